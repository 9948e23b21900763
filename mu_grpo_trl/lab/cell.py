"""Run one cell of the laboratory's grid: train as its recipe says, evaluate off the clock, write `result.json`."""

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..train import make_trainer, parse
from ..trainer import MuGRPOTrainer
from .arithmetic import RewardFunction, greedy_accuracy
from .grid import SCHEMA, Cell
from .tasks import LAB_TASKS, warm_start_folder

RESULT_NAME = "result.json"
SIGNIFICANT_DIGITS = 6
METRICS = (
    "reward",
    "frac_reward_zero_std",
    "grad_norm",
    "completions/mean_length",
    "completions/clipped_ratio",
    "ratio/negative_mean",
    "ratio/positive_mean",
    "ratio/abs_log_mean",
    "clip/token_fraction",
    "veto/token_fraction",
    "veto/response_fraction",
    "veto/trigger_tokens",
    "kl/behavior",
    "prefix/m_H",
    "prefix/q_H",
    "prefix/chi2_lower_bound",
)
"""Of the log of every update, those that results keep."""
_PACKAGES = ("mu-grpo-trl", "reasoning-gym", "torch", "transformers", "trl")


def cell_folder(cell: Cell, root: Path) -> Path:
    """Where the cell's result is, or what went wrong with it."""
    return root / "cells" / cell.id


class Evaluations(TrainerCallback):
    """
    Greedy accuracy on held-out problems before training and at every so many updates, on no clock.

    Args:
        trainer (`MuGRPOTrainer`): whose policy and timers they are of.
        cell (`Cell`): says how many problems, and how often.
    """

    def __init__(self, trainer: MuGRPOTrainer, cell: Cell) -> None:
        self._trainer = trainer
        self._cell = cell
        self._held_out = LAB_TASKS[cell.task].held_out(cell.evaluation["num_problems"])
        module, _, name = cell.settings["reward_funcs"][0].partition(":")
        self._reward: RewardFunction = getattr(importlib.import_module(module), name)
        self.entries: list[dict[str, float]] = []
        self.evaluate(0)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step % self._cell.evaluation["every"] == 0:
            with self._trainer.telemetry.interval("evaluation"):
                self.evaluate(state.global_step)

    def evaluate(self, update: int) -> None:
        """Add the accuracy after so many updates."""
        trainer = self._trainer
        accuracy = greedy_accuracy(
            trainer.model,
            trainer.processing_class,
            self._held_out,
            self._cell.settings["max_completion_length"],
            self._reward,
        )
        entry = {
            "update": update,
            "train_cpu_s": _total(trainer.telemetry.cpu_seconds),
            "train_wall_s": _total(trainer.telemetry.seconds),
            "accuracy": accuracy,
        }
        self.entries.append({name: _rounded(value) for name, value in entry.items()})


def run_cell(cell: Cell, root: Path) -> None:
    """
    Train and evaluate `cell` in this process, and write its result below `root`; a result that is there is whole.

    What the run leaves on the way (stages, policies) is removed. It starts over where an earlier one was killed.
    """
    torch.set_num_threads(1)  # so small a model computes no faster on more, and CPU seconds stay comparable
    work = root / "work" / cell.id
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    recipe = cell.settings | {
        "seed": cell.seed,
        "model_name_or_path": str(warm_start_folder(cell.task, root)),
        "output_dir": str(work / "run"),
    }
    (work / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    trainer = make_trainer(*parse(["--config", str(work / "recipe.yaml")]))
    evaluations = Evaluations(trainer, cell)
    trainer.add_callback(evaluations)
    trainer.train()
    write_result(_result(cell, trainer, evaluations.entries), root)
    shutil.rmtree(work)


def write_result(result: dict[str, Any], root: Path) -> None:
    """Write a result of [`run_cell`] where it belongs, under its name only once it is whole."""
    folder = root / "cells" / result["cell"]["id"]
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{RESULT_NAME}.{os.getpid()}"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(result, file, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(folder / RESULT_NAME)


def _result(cell: Cell, trainer: MuGRPOTrainer, evaluations: list[dict[str, float]]) -> dict[str, Any]:
    updates = [entry for entry in trainer.state.log_history if "reward" in entry]
    metrics: dict[str, list[Any]] = {"step": [entry["step"] for entry in updates]}
    metrics |= {name: [_rounded(entry.get(name)) for entry in updates] for name in METRICS}
    telemetry = trainer.telemetry
    times = {"total_cpu_s": _total(telemetry.cpu_seconds), "total_wall_s": _total(telemetry.seconds)}
    times |= {f"{kind}_cpu_s": seconds for kind, seconds in telemetry.cpu_seconds.items()}
    times |= {f"{kind}_wall_s": seconds for kind, seconds in telemetry.seconds.items()}
    return {
        "schema": SCHEMA,
        "cell": cell.to_dict(),
        "evaluations": evaluations,
        "metrics": metrics,
        "stages": [_stage(cell, stage, updates) for stage in range(cell.num_updates // cell.stage_updates)],
        "times": {name: _rounded(value) for name, value in times.items()},
        "num_responses": int(telemetry.counts["responses"]),
        "versions": dict(zip(_PACKAGES, map(_version, _PACKAGES), strict=True)),
    }


def _stage(cell: Cell, stage: int, updates: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over the updates of one stage; an update whose responses all had advantage 0 vetoes nothing."""
    first = stage * cell.stage_updates
    entries = [entry for entry in updates if first < entry["step"] <= first + cell.stage_updates]
    rewards = [entry["reward"] for entry in entries]
    shares = [entry.get("veto/token_fraction") or 0.0 for entry in entries]
    return {
        "stage": stage,
        "mean_reward": _rounded(math.fsum(rewards) / len(rewards)),
        "vetoed_token_share": _rounded(math.fsum(shares) / len(shares)),
    }


def _total(seconds: dict[str, float]) -> float:
    return sum(amount for kind, amount in seconds.items() if kind != "evaluation")


def _rounded(value: Any) -> Any:
    """To the digits that results keep; None where there is no finite number."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if isinstance(value, float) else value


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
