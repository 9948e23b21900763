"""The options of a run to plan, and everything that is wrong about them: each is set aside, and the rest read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl import ModelConfig

from ..config import MuGRPOConfig
from ..recipe import read_recipe
from ..train import ScriptArguments, check_setting, option_types, parse_options

HERE = {"use_cpu": True, "fp16": False, "tf32": None}
"""Options that ask for a device, which the planning machine may lack."""


@dataclass
class Findings:
    """
    What is wrong with a run, or worth knowing.

    Args:
        errors (`list[str]`): it would not start, or not end. Each names the value and the mend.
        warnings (`list[str]`): it would run.
    """

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Keep what a check inside the block raises, once."""
        try:
            yield
        except (ValueError, TypeError, OSError, ImportError) as error:
            self.error(str(error))

    def error(self, message: str) -> None:
        """Add an error, unless it is known."""
        if message not in self.errors:
            self.errors.append(message)


@dataclass(frozen=True)
class Options:
    """
    The options of a run, as `mu-grpo train` would take them.

    Args:
        script (`ScriptArguments`), config (`MuGRPOConfig`), model (`ModelConfig`): see [`~mu_grpo_trl.train.parse`].
        on_cpu (`bool`): what `use_cpu` says; `config` itself is always made for the CPU.
        half (`bool`): whether the forward pass runs in half precision.
    """

    script: ScriptArguments
    config: MuGRPOConfig
    model: ModelConfig
    on_cpu: bool
    half: bool


def read_options(recipe: Path | None, arguments: Sequence[str], findings: Findings) -> Options | None:
    """
    The options from a recipe and `--key value` arguments. What is refused goes to `findings` and is left at its
    default, so that the rest can be checked; None if that is not possible.
    """
    given = _checked_recipe(recipe, findings)
    given.pop("env", None)
    overrides = _by_name(arguments)
    while True:
        device = {name: _last(name, given, overrides) for name in HERE}
        here = {name: value for name, value in {**given, **HERE}.items() if value is not None}
        rest = [token for name, tokens in overrides.items() if name not in HERE for token in tokens]
        try:
            script, config, model = parse_options(here, rest)
        except (ValueError, TypeError, OSError, ImportError) as error:
            message = str(error)
            findings.error(message)
            culprit = _culprit(message, [*given, *overrides])
            if culprit is None:
                return None
            given.pop(culprit, None)
            overrides.pop(culprit, None)
            continue
        on_cpu = str(device["use_cpu"]).lower() in ("true", "1", "yes", "on")
        half = bool(config.bf16) or str(device["fp16"]).lower() in ("true", "1", "yes", "on")
        return Options(script, config, model, on_cpu, half)


def _checked_recipe(path: Path | None, findings: Findings) -> dict[str, Any]:
    if path is None:
        return {}
    types, checked = option_types(), {}
    with findings.collecting():
        for key, setting in read_recipe(path).items():
            with findings.collecting():
                checked[key] = check_setting(key, setting, types)
    return checked


def _by_name(arguments: Sequence[str]) -> dict[str, list[str]]:
    """`--key value …` and `--key=value` arguments, with all their words, by key; the last of a key wins."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in arguments:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            found[name] = []
        found.setdefault(name, []).append(word)
    return found


def _last(name: str, given: dict[str, Any], overrides: dict[str, list[str]]) -> Any:
    if name not in overrides:
        return given.get(name)
    words = overrides[name]
    return words[0].partition("=")[2] or (words[1] if len(words) > 1 else "true")


def _culprit(message: str, names: Iterable[str]) -> str | None:
    """The option among `names` that a message is about: the one it mentions first."""
    places = {}
    for name in names:
        spelled = re.escape(name).replace("_", "[_-]")
        if found := re.search(rf"(?<![\w.]){spelled}(?!\w)", message):
            places[name] = found.start()
    return min(places, key=lambda name: (places[name], -len(name)), default=None)
