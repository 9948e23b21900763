"""Stages without signal, updates that must not be taken, and policies that collapse."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .case import BITWISE, FLUSHED, IN_PROCESS, Case, Fails, Fault, Recovers, Unexpected
from .worker import At


def equal(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def _stops(exits: int, **then: Any) -> Any:
    """A start that stops, and one with other options."""

    def run(case: Case) -> None:
        case.go(exits=exits)
        case.go(setting=case.setting.but(options=then))

    return run


def _once(case: Case) -> None:
    case.go()


def poison(trainer: Any, model: Any, inputs: dict[str, torch.Tensor], *_: Any, **__: Any) -> None:
    """A micro-batch whose loss is not finite, as a kernel's bug would give it."""
    inputs["advantages"][0] = float("nan")


def _poisoned(exits: int, onward: bool = False, then: bool = False) -> Any:
    def run(case: Case) -> None:
        case.go(At("forward and backward", 7, poison, onward=onward), exits=exits)
        saved = list(case.output.glob("nonfinite/*.parquet"))
        if not saved:
            raise Unexpected("the batch was not saved")
        case.notes.append(f"{len(saved)} batch(es) saved for inspection")
        if then:
            case.go()

    return run


def _broken_weights(case: Case) -> None:
    folder = case.folder / "broken"
    shutil.copytree(case.lab.policy("layers"), folder)
    path = Path(folder) / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"][3, 0] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    case.go(setting=case.setting.but(policy=str(folder)), exits=2)


_NO_SIGNAL = IN_PROCESS.but(options={"no_signal": "stop"})
_COLLAPSING = IN_PROCESS.but(
    options={"learning_rate": 0.1, "max_steps": 12, "stage_updates": 12, "collapse_window": 2, "save_steps": 4}
)

FAULTS = [
    Fault("every group has equal rewards", "every stage", Recovers(bitwise=False, warning="learn next to nothing"),
          _once, IN_PROCESS.but(reward=equal)),
    Fault("every group has equal rewards, `no_signal: stop`", "stage 0",
          Fails("100.0% of its groups.*The stage is kept", then=FLUSHED), _stops(2, no_signal="warn"),
          _NO_SIGNAL.but(reward=equal)),
    Fault("every response is cut, `no_signal: stop`", "stage 0",
          Fails("of its responses were cut.*The stage is kept", then=FLUSHED), _stops(2, no_signal="warn"),
          _NO_SIGNAL.but(options={"max_completion_length": 2})),
    Fault("a loss that is not finite", "update 6, once",
          Fails("is not finite.*No weight was changed", 3, then=BITWISE), _poisoned(3, then=True)),
    Fault("a loss that is not finite, `nonfinite: skip`", "update 6, once",
          Recovers(bitwise=False, warning="It is skipped"), _poisoned(0),
          IN_PROCESS.but(options={"nonfinite": "skip"})),
    Fault("losses that are not finite, `nonfinite: skip`", "from update 6 on",
          Fails("number 3 in a row, more than `max_nonfinite_skips=2`", 3, then=FLUSHED),
          _poisoned(3, onward=True, then=True),
          IN_PROCESS.but(options={"nonfinite": "skip", "max_nonfinite_skips": 2})),
    Fault("weights that are not finite", "in the model to begin with",
          Fails("log-probs of the probe tokens are not finite"), _broken_weights),
    Fault("the policy collapses", "a learning rate of 0.1",
          Recovers(bitwise=False, warning="ratio/negative_mean.*collapse_watch: stop. would end the run here"), _once,
          _COLLAPSING),
    Fault("the policy collapses, `collapse_watch: stop`", "a learning rate of 0.1",
          Fails("collapse_watch: stop. ended training here", 3), lambda case: case.go(exits=3) and None,
          _COLLAPSING.but(options={"collapse_watch": "stop"})),
]  # fmt: skip
