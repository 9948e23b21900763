"""What an evaluation keeps on disk: the responses of one checkpoint to one benchmark, and the settings behind them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SETTINGS_NAME = "settings.json"
RESPONSES_NAME = "responses"


@dataclass(frozen=True)
class Response:
    """
    One scored response: a line of the file.

    Args:
        problem (`int`): row of the benchmark.
        sample (`int`): which of the problem's responses, from 0.
        gold (`str`): the reference answer.
        answer (`str` or None): what the response puts in its last box; None if there is no complete one.
        correct (`bool`): the verdict of the math reward.
        num_tokens (`int`): generated tokens, the EOS included.
        finish_reason (`str`): `"stop"`, or `"length"` where the limit cut it.
        text (`str`): the response without special tokens.
    """

    problem: int
    sample: int
    gold: str
    answer: str | None
    correct: bool
    num_tokens: int
    finish_reason: str
    text: str


class ResponseStore:
    """
    The responses of one checkpoint to one benchmark, as JSON lines that are only ever appended to.

    The responses to a problem are written in one go and reach the disk before [`append`] returns. What a killed
    process left unfinished at the end of the file is cut off when it is opened again.

    Args:
        path (`Path`): the file; it need not exist.
        num_problems (`int`): problems of the benchmark.
        num_samples (`int`): responses to each.

    Raises:
        `ValueError`: a line before the end is damaged.
    """

    def __init__(self, path: Path, num_problems: int, num_samples: int) -> None:
        self.path = path
        self.num_problems = num_problems
        self.num_samples = num_samples
        self.responses: dict[int, list[Response]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._read()

    @property
    def missing(self) -> list[int]:
        """Problems without responses."""
        return [problem for problem in range(self.num_problems) if problem not in self.responses]

    def append(self, responses: Sequence[Response]) -> None:
        """Keep all responses to one problem."""
        lines = "".join(json.dumps(asdict(response), ensure_ascii=False) + "\n" for response in responses)
        with self.path.open("ab", buffering=0) as file:
            content = memoryview(lines.encode())
            while content:
                content = content[file.write(content) :]
            os.fsync(file.fileno())
        self.responses[responses[0].problem] = list(responses)

    def _read(self) -> None:
        if not self.path.exists():
            return
        lines = self.path.read_bytes().splitlines(keepends=True)
        whole = 0
        for start in range(0, len(lines), self.num_samples):
            group = lines[start : start + self.num_samples]
            is_last = start + self.num_samples >= len(lines)
            try:
                responses = [self._parsed(line, sample) for sample, line in enumerate(group)]
                if len(group) < self.num_samples or len({response.problem for response in responses}) > 1:
                    raise ValueError("these are not all responses to one problem")
            except (ValueError, TypeError) as error:
                if not is_last:
                    raise ValueError(
                        f"{self.path}, lines {start + 1} to {start + len(group)}: {error}. Remove the file to have "
                        "its responses generated again."
                    ) from error
                logger.warning("%s: its last %d lines were cut by a kill and are dropped.", self.path, len(group))
                os.truncate(self.path, whole)
                return
            self.responses[responses[0].problem] = responses
            whole += sum(map(len, group))

    def _parsed(self, line: bytes, sample: int) -> Response:
        if not line.endswith(b"\n"):
            raise ValueError("a line is cut")
        response = Response(**json.loads(line))
        if response.sample != sample or not 0 <= response.problem < self.num_problems:
            raise ValueError(f"unexpected problem {response.problem}, sample {response.sample}")
        return response


def keep_settings(folder: Path, settings: dict[str, Any]) -> None:
    """
    Write down what the responses in `folder` depend on, or check it against what was written before. Further settings
    (of another checkpoint or benchmark) are added.

    Raises:
        `ValueError`: a setting has changed, or responses are there whose settings are not.
    """
    path, now = folder / SETTINGS_NAME, json.loads(json.dumps(settings))
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        stored = {}
        if any((folder / RESPONSES_NAME).glob("*/*")):
            raise ValueError(
                f"{folder} holds responses but no {SETTINGS_NAME}, so nobody knows how they were sampled. Choose "
                "another `output_dir`."
            ) from None
    changed = [f"{name}: {stored[name]!r} → {now[name]!r}" for name in now if stored.get(name, now[name]) != now[name]]
    if changed:
        raise ValueError(
            f"{folder} holds responses of an evaluation with other settings (then → now): {'; '.join(changed)}. "
            "Restore them, or choose another `output_dir`."
        )
    write_atomically(path, json.dumps(stored | now, indent=1, ensure_ascii=False))


def write_atomically(path: Path, text: str) -> None:
    """The file holds all of `text`, or what it held before."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
