"""What a fault is, the run it disturbs, and how its outcome is checked."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import yaml
from helpers import PROMPTS, config_options, save_tiny_policy
from processes import exit_code, rank_environments, start_process
from safetensors.torch import load_file
from stub_vllm import StubVLLM
from workers.train_worker import digit_share

from mu_grpo_trl.stage.schema import FINGERPRINT_KEY, MANIFEST_NAME, ShardName, file_digest, read_manifest, shard_paths

from . import worker
from .servers import VLLM_PYTHON, ServerProcess, fake_vllm, save_policy

TIMEOUT_S = 180.0
OUTPUT = "out"


@dataclass(frozen=True)
class Setting:
    """
    A training run but for its folder.

    Args:
        options (`Mapping`): options of the config beside those of `BASE`.
        reward (`Any`): as the trainer takes it.
        prompts (`Mapping`): columns of the dataset.
        policy (`str`): `"layers"`; `"bigram"`, which the stub server can serve; `"wide"`, which vLLM can.
        server (`str` or None): `"external"`: a stub server on a thread of the harness; `"process"`: one in a process
            of its own; `"managed"`: the trainer starts stub servers; `"vllm"`: it starts real ones.
        ranks (`int`), zero3 (`bool`): how it is launched.
        env (`Mapping[str, str]`): environment variables.
        recipe (`str`): more lines of the recipe.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    reward: Any = digit_share
    prompts: Mapping[str, Any] = field(default_factory=lambda: {"prompt": PROMPTS[:24]})
    policy: str = "layers"
    server: str | None = None
    ranks: int = 1
    zero3: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    recipe: str = ""

    def but(self, **changes: Any) -> Setting:
        """This setting with other fields; `options` are added to those there."""
        options = {**self.options, **changes.pop("options", {})}
        return replace(self, options=options, **changes)


BASE = {
    "stage_updates": 4,
    "max_steps": 10,
    "max_completion_length": 16,
    "rollout_concurrency": 16,
    "lr_scheduler_type": "cosine",
    "save_strategy": "steps",
    "save_steps": 2,
}
"""Ten updates of 4 × 4 responses in stages of 4, 4 and 2 updates over 24 prompts; a stage is made in four batches."""

IN_PROCESS = Setting()
STUB = Setting(policy="bigram", server="external", options={"max_context_length": 64, "rollout_concurrency": 16})
PROCESS = replace(STUB, server="process")
MANAGED = replace(STUB, server="managed")
VLLM = Setting(
    policy="wide",
    server="vllm",
    options={"rollout_concurrency": 16, "vllm_server_timeout": 60.0, "rollout_timeout_s": 120.0},
)


@dataclass(frozen=True)
class Recovers:
    """
    The run ends by itself or after `--resume auto`; nothing that was flushed changed, nothing of it was asked again.

    Args:
        bitwise (`bool`): its final weights are those of the undisturbed run, bit by bit.
        warning (`str`): a regular expression that its log must show.
    """

    bitwise: bool = True
    warning: str = ""

    def __str__(self) -> str:
        said = f", and the log says “{_readable(self.warning)}”" if self.warning else ""
        return ("recovers bitwise" if self.bitwise else "recovers: flushed rows unchanged") + said


@dataclass(frozen=True)
class Fails:
    """
    A process ends with an error.

    Args:
        message (`str`): regular expression that its log must show.
        exitcode (`int`): of the process; 2 for what a user can mend.
        then (`Recovers` or None): what must come of `--resume auto` once the fault is gone.
    """

    message: str
    exitcode: int = 2
    then: Recovers | None = None

    def __str__(self) -> str:
        then = f"; once mended, {self.then}" if self.then else ""
        return f"ends (exit code {self.exitcode}) with “{_readable(self.message)}”{then}"


BITWISE = Recovers()
FLUSHED = Recovers(bitwise=False)


def _readable(pattern: str) -> str:
    return re.sub(r"\\(.)", r"\1", pattern.replace(".*", " … ").replace("(?s)", ""))


@dataclass(frozen=True)
class Fault:
    """
    One entry of the table.

    Args:
        name (`str`): what goes wrong.
        moment (`str`): when.
        required (`Recovers` or `Fails`): the outcome, fixed before the run.
        run (`Callable`): makes it happen in a case, up to the end of the last process.
        setting (`Setting`): the run that is disturbed.
        undisturbed (`Setting` or None): the run to compare with, where it is not `setting`.
        quick (`bool`): part of `make test`.
        needs (`str`): `"mount"`, `"vllm"`, or nothing.
    """

    name: str
    moment: str
    required: Recovers | Fails
    run: Callable[[Case], None]
    setting: Setting = IN_PROCESS
    undisturbed: Setting | None = None
    quick: bool = False
    needs: str = ""


@dataclass(frozen=True)
class Result:
    """What came of one fault; `problem` is empty if it was what is required."""

    kind: str
    fault: Fault
    seen: str
    seconds: float
    problem: str = ""
    skipped: bool = False


class Unexpected(AssertionError):
    """The outcome is not the required one, or the fault did not happen."""


@dataclass
class Ended:
    """How the processes of one start ended."""

    exitcodes: list[int]
    ended_s: list[float]
    log: str

    @property
    def exitcode(self) -> int:
        return self.exitcodes[0]


class Running:
    """Processes of one start."""

    def __init__(self, case: Case, runs: list[worker.Run]) -> None:
        self._case = case
        self._logs = [Path(run.log) for run in runs]
        self._starts = [path.stat().st_size if path.exists() else 0 for path in self._logs]
        self.started_s = time.monotonic()
        self.processes = [start_process(worker.child, run) for run in runs]

    def kill(self, rank: int = 0, number: int = signal.SIGKILL) -> None:
        """Send a signal to one process."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    @property
    def log(self) -> str:
        """What all ranks have written since this start."""
        pieces = []
        for path, start in zip(self._logs, self._starts, strict=True):
            with path.open(errors="replace") as file:
                file.seek(start)
                pieces.append(file.read())
        return "\n".join(pieces)

    def wait_for(self, place: str, calls: int = 1) -> None:
        """Return once the journal has so many more calls of a place than at the start; a run that ends is an error."""
        while self._case.count(place) < calls:
            if all(exit_code(process) is not None for process in self.processes):
                raise Unexpected(f"the run ended before “{place}” ({calls}):\n{self.log[-3000:]}")
            time.sleep(0.005)

    def kill_at(self, line: int, delay_s: float, ranks: Sequence[int] = (0,)) -> None:
        """`kill -9` a moment after the journal got so many lines, if the run is still there."""
        while self._case.journal_lines() < line and any(exit_code(process) is None for process in self.processes):
            time.sleep(0.002)
        time.sleep(delay_s)
        for rank in ranks:
            if exit_code(self.processes[rank]) is None:
                self.kill(rank)

    def kill_after(self, seconds: float) -> None:
        """`kill -9` so long after the trainer was made, if it is still there."""
        self.wait_for("trainer made")
        time.sleep(seconds)
        if exit_code(self.processes[0]) is None:
            self.kill()

    def wait(self, timeout_s: float = TIMEOUT_S) -> Ended:
        """Wait for all, and note what they left."""
        ended: dict[int, float] = {}
        while len(ended) < len(self.processes):
            for rank, process in enumerate(self.processes):
                if rank not in ended and exit_code(process) is not None:
                    ended[rank] = time.monotonic()
            if time.monotonic() > self.started_s + timeout_s:
                for process in self.processes:
                    process.kill()
                raise Unexpected(f"still running after {timeout_s:g} s:\n{self.log[-4000:]}")
            time.sleep(0.01)
        exitcodes = [exit_code(process) or 0 for process in self.processes]
        return self._case.note_end(Ended(exitcodes, [ended[rank] for rank in sorted(ended)], self.log))


class Case:
    """
    One run in a folder of its own, started as often as it takes.

    Attributes:
        folder (`Path`): logs, recipe and journal.
        output (`Path`): the run's `output_dir`.
        at_close (`ExitStack`): what to undo when the case is closed.
        ended (`list[Ended]`): how its starts ended.
        notes (`list[str]`): what a fault wants to have in the report.
    """

    def __init__(self, lab: Lab, folder: Path, setting: Setting) -> None:
        self.lab, self.folder, self.setting = lab, folder, setting
        self.ended: list[Ended] = []
        self.notes: list[str] = []
        self._flushed: list[dict[tuple[int, int], str]] = []
        self._segments: list[int] = []
        self._stub: StubVLLM | None = None
        self._process: ServerProcess | None = None
        self.at_close = contextlib.ExitStack()
        self.output.mkdir(parents=True, exist_ok=True)

    @property
    def output(self) -> Path:
        return self.folder / OUTPUT

    @property
    def stub(self) -> StubVLLM:
        """The external server, started on first use."""
        if self._stub is None:
            self._stub = StubVLLM(self.lab.policy("bigram"))
            self._stub.start()
        return self._stub

    @property
    def process(self) -> ServerProcess:
        """The external server in a process of its own, started on first use."""
        if self._process is None:
            self._process = ServerProcess(self.lab.policy("bigram"))
        return self._process

    def start(self, *injections: Callable[[], None], setting: Setting | None = None) -> Running:
        """Start the run, or go on with it: `--resume auto`."""
        setting = setting or self.setting
        self._flushed.append(flushed_rows(self.output))
        self._segments.append(len(worker.read_journal(self.folder)))
        options = {**config_options(self.output), **BASE, **setting.options, **self._server_options(setting)}
        recipe = self.folder / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(options) + setting.recipe)
        env = {**self._server_env(setting), **setting.env}
        runs = [
            worker.Run(
                recipe=str(recipe),
                log=str(self.folder / f"rank{rank}.log"),
                journal=str(self.folder / worker.JOURNAL),
                model=str(self.lab.policy(setting.policy)),
                prompts=dict(setting.prompts),
                reward=setting.reward,
                injections=injections,
                env={**env, **rank_env},
            )
            for rank, rank_env in enumerate(rank_environments(setting.ranks, setting.zero3))
        ]
        return Running(self, runs)

    def go(self, *injections: Callable[[], None], setting: Setting | None = None, exits: int | None = 0) -> Ended:
        """Start, wait, and check the exit code of rank 0 (None: any)."""
        ended = self.start(*injections, setting=setting).wait()
        if exits is not None and ended.exitcode != exits:
            raise Unexpected(f"exit code {ended.exitcode} where {exits} was expected:\n{ended.log[-4000:]}")
        return ended

    def start_over(self) -> None:
        """Forget everything, as if nothing had been started."""
        shutil.rmtree(self.folder)
        self.output.mkdir(parents=True)
        self.ended, self.notes, self._flushed, self._segments = [], [], [], []

    def dies(self, *injections: Callable[[], None], setting: Setting | None = None) -> Ended:
        """Start, and see it killed."""
        return self.go(*injections, setting=setting, exits=-signal.SIGKILL)

    def note_end(self, ended: Ended) -> Ended:
        self.ended.append(ended)
        return ended

    def journal_lines(self) -> int:
        """Lines of the journal since the last start."""
        path = self.folder / worker.JOURNAL
        return (path.read_bytes().count(b"\n") if path.exists() else 0) - self._segments[-1]

    def count(self, place: str) -> int:
        """Calls of a place since the last start."""
        return sum(entry.get("at") == place for entry in worker.read_journal(self.folder)[self._segments[-1] :])

    def asked(self) -> list[tuple[int, int]]:
        """`(seed of the stage, group)` of everything asked of the engine, over all starts."""
        entries = worker.read_journal(self.folder)
        return [(entry["ask"], group) for entry in entries if "ask" in entry for group in entry["groups"]]

    def close(self) -> None:
        if self._stub is not None:
            self._stub.stop()
        if self._process is not None:
            self._process.kill()
        self.at_close.close()

    def _server_options(self, setting: Setting) -> dict[str, Any]:
        if setting.server is None:
            return {}
        options: dict[str, Any] = {"rollout_engine": "vllm", "vllm_server_timeout": 3.0, "rollout_timeout_s": 30.0}
        if setting.server == "external":
            options |= {"vllm_mode": "server", "vllm_server_urls": [self.stub.url]}
        elif setting.server == "process":
            options |= {"vllm_mode": "server", "vllm_server_urls": [self.process.url]}
        elif setting.server == "vllm":
            options |= {"vllm_release": "keep", "vllm_python": VLLM_PYTHON, "vllm_server_args": ["--enforce-eager"]}
        else:
            options |= {"vllm_release": "keep"}
        return {**options, **setting.options}

    def _server_env(self, setting: Setting) -> dict[str, str]:
        if setting.server == "managed":
            return {"PYTHONPATH": str(self.lab.fake_vllm)}
        return {"VLLM_CPU_KVCACHE_SPACE": "1"} if setting.server == "vllm" else {}

    # The checks

    def check(self, required: Recovers | Fails, undisturbed: Path | None) -> str:
        """
        What was seen, in words.

        Raises:
            `Unexpected`: it is not what is required.
        """
        seen = []
        if isinstance(required, Fails):
            failed = next((ended for ended in self.ended if required.exitcode in ended.exitcodes), None)
            if failed is None:
                raise Unexpected(f"exit codes {self._exitcodes()}, none is {required.exitcode}:\n{self._last_log()}")
            if not re.search(required.message, failed.log):
                raise Unexpected(f"the log does not say “{required.message}”:\n{failed.log[-4000:]}")
            seen.append(f"exit code {required.exitcode} and the message")
        recovers = required.then if isinstance(required, Fails) else required
        self._check_flushed()
        if recovers is None:
            return ", ".join([*seen, *self.notes])
        if any(self.ended[-1].exitcodes):
            raise Unexpected(f"exit codes {self._exitcodes()}: it did not end well:\n{self._last_log()}")
        if not any(re.search(recovers.warning, ended.log) for ended in self.ended):
            raise Unexpected(f"no log says “{recovers.warning}”:\n{self._last_log()}")
        if recovers.bitwise:
            assert undisturbed is not None
            differing = different_tensors(self.output, undisturbed)
            if differing:
                raise Unexpected(f"the final weights differ from the undisturbed run's in {differing}")
            seen.append("weights bitwise equal")
        if recovers.warning:
            seen.append("the message")
        before = sum(len(rows) for rows in self._flushed[-1:])
        if len(self.ended) > 1:
            seen.append(f"{before} groups kept unchanged")
        return ", ".join([*seen, *self.notes]) or "ended well"

    def _check_flushed(self) -> None:
        """What was on the disk before a start is there at the end, and nothing of it was asked of an engine again."""
        final = flushed_rows(self.output)
        for rows in self._flushed:
            changed = [key for key, digest in rows.items() if final.get(key) != digest]
            if changed:
                raise Unexpected(f"rows of (seed, group) {changed[:5]} were flushed, and are gone or different now")
        journal = worker.read_journal(self.folder)
        ends = [*self._segments[1:], len(journal)]
        for rows, start, end in zip(self._flushed, self._segments, ends, strict=True):
            known = set(rows)
            for entry in journal[start:end]:
                if "flushed" in entry:
                    known |= {(entry["flushed"], group) for group in entry["groups"]}
                elif "ask" in entry:
                    asked = {(entry["ask"], group) for group in entry["groups"]}
                    again = asked & known
                    if again and (again == asked or not entry["batch"]):  # a batch is redone whole
                        raise Unexpected(f"(seed, group) {sorted(again)[:5]} were generated again once flushed")

    def _exitcodes(self) -> list[list[int]]:
        return [ended.exitcodes for ended in self.ended]

    def _last_log(self) -> str:
        return self.ended[-1].log[-4000:] if self.ended else "nothing was started"


class Lab:
    """
    What cases share: policies, and the undisturbed runs.

    Args:
        root (`Path`): holds everything; each case has a folder below.
        seed (`int`): of random moments.
    """

    def __init__(self, root: Path, seed: int = 0) -> None:
        self.root, self.seed = root, seed
        self._lock = threading.Lock()
        self._undisturbed: dict[str, threading.Lock] = {}
        self._numbers = itertools.count()
        self._policies = {
            "layers": save_tiny_policy(root / "layers"),
            "bigram": save_policy(root / "bigram", layers=0),
            "wide": save_policy(root / "wide", layers=2, hidden=64),
        }
        self.fake_vllm = fake_vllm(root / "site")

    def policy(self, name: str) -> Path:
        """A policy of the lab by name, or the one in a folder."""
        return self._policies.get(name) or Path(name)

    def undisturbed(self, setting: Setting) -> Path:
        """`output_dir` of a finished run of `setting`; made once."""
        name = "undisturbed-" + hashlib.blake2b(repr(setting).encode(), digest_size=6).hexdigest()
        with self._lock:
            lock = self._undisturbed.setdefault(name, threading.Lock())
        folder = self.root / name
        with lock:
            if not (folder / "finished").exists():
                case = Case(self, folder, setting)
                case.go()
                case.close()
                (folder / "finished").touch()
        return folder / OUTPUT

    def num_lines(self, setting: Setting) -> int:
        """Lines that the journal of the undisturbed run has."""
        return len(worker.read_journal(self.undisturbed(setting).parent))

    def case(self, name: str, setting: Setting) -> Case:
        """A case in a new folder."""
        return Case(self, self.root / f"{next(self._numbers):03d}-{re.sub(r'[^A-Za-z0-9]+', '-', name)[:60]}", setting)


def different_tensors(one: Path, other: Path) -> list[str]:
    """Names of tensors of two saved models that are not equal bit by bit."""
    a, b = (load_file(folder / "model.safetensors") for folder in (one, other))
    return [name for name in sorted({*a, *b}) if name not in a or name not in b or not torch.equal(a[name], b[name])]


def flushed_rows(folder: Path) -> dict[tuple[int, int], str]:
    """Digest of the rows of each `(seed of the stage, group)` in the shards that are whole and of their stage."""
    rows: dict[tuple[int, int], str] = {}
    for manifest_path in sorted(folder.glob(f"stages/stage-*/{MANIFEST_NAME}")):
        try:
            manifest = read_manifest(manifest_path.parent)
        except ValueError:
            continue
        for shard in shard_paths(manifest_path.parent):
            name = ShardName.parse(shard.name)
            if name is None or file_digest(shard) != name.digest:
                continue
            with pa.OSFile(str(shard)) as file, pa.ipc.open_stream(file) as stream:
                table = stream.read_all()
            if table.schema.metadata.get(FINGERPRINT_KEY) != manifest.fingerprint().encode():
                continue
            for start in range(0, table.num_rows, manifest.num_generations):
                group = table.slice(start, manifest.num_generations).to_pylist()
                digest = hashlib.blake2b(repr(group).encode(), digest_size=8).hexdigest()
                rows[manifest.sampling["seed"], group[0]["group"]] = digest
    return rows
