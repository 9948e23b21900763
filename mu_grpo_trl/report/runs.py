"""What a run left in its `output_dir`, finished or not: its log as series over updates, settings, accuracies."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..telemetry import METRICS_NAME, RUN_NAME

STATE_NAME = "trainer_state.json"
EVALUATIONS = ("eval.json", "evaluation/eval.json")
"""Where `mu-grpo eval` may have been told to write, below a run."""

KINDS_OF_ROLLOUT = ("rollout", "reward")
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


class ReportError(ValueError):
    """There is nothing to report on; the message says why, and what to name instead."""


@dataclass(frozen=True)
class Accuracy:
    """
    Accuracies of a run's checkpoints.

    Args:
        source (`str`): what they are: `"pass@1"` of `mu-grpo eval`, TRL's `"evaluation reward"`, or the
            `"held-out accuracy"` of the lab.
        steps (`np.ndarray` of shape `(n,)`): updates taken before each.
        benchmarks (`dict[str, np.ndarray]`): values `(n,)` by benchmark, NaN where a checkpoint lacks one.
        averaged (`tuple[str, ...]`): the benchmarks that [`mean`] is over.
    """

    source: str
    steps: np.ndarray
    benchmarks: dict[str, np.ndarray]
    averaged: tuple[str, ...]

    @property
    def mean(self) -> np.ndarray:
        """Unweighted over the benchmarks `averaged`, shape `(n,)`; NaN for a checkpoint that lacks one."""
        return np.mean([self.benchmarks[name] for name in self.averaged], axis=0)


@dataclass(frozen=True)
class Run:
    """
    A run as `mu-grpo report` sees it.

    Args:
        label (`str`): its name in figures and tables.
        path (`Path`): its `output_dir`.
        history (`list[dict]`): the log, as `trainer.state.log_history`.
        settings (`dict[str, Any]`): model, processes and options; empty for a run that wrote no `run.json`.
        accuracy (`Accuracy` or None): None if it was evaluated nowhere.
    """

    label: str
    path: Path
    history: list[dict[str, Any]]
    settings: dict[str, Any]
    accuracy: Accuracy | None

    @property
    def updates(self) -> list[dict[str, Any]]:
        """The entries of the log that tell of updates."""
        return [entry for entry in self.history if "loss" in entry]

    @property
    def num_updates(self) -> int:
        """The last update logged."""
        return int(self.updates[-1]["step"])

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Updates and finite values of a metric, each `(n,)`; n is 0 if it was not logged."""
        points = [
            (entry["step"], entry[key])
            for entry in self.updates
            if entry.get(key) is not None and math.isfinite(entry[key])
        ]
        steps, values = zip(*points, strict=True) if points else ((), ())
        return np.array(steps, dtype=float), np.array(values, dtype=float)

    def boundaries(self) -> list[int]:
        """Updates after which a new stage began, ascending; empty if μ is not known."""
        stage_updates = self.settings.get("stage_updates")
        return list(range(stage_updates, self.num_updates, stage_updates)) if stage_updates else []

    def seconds(self) -> dict[str, float]:
        """Wall-clock by kind of work, and `total` (T_total, without evaluation); empty if it was not logged."""
        timed = next((entry for entry in reversed(self.history) if "time/total_s" in entry), {})
        return {
            key.removeprefix("time/").removesuffix("_s"): float(value)
            for key, value in timed.items()
            if key.startswith("time/")
        }

    def rollout_seconds(self) -> float:
        """T_rollout: generation and rewards."""
        return sum(self.seconds().get(kind, 0.0) for kind in KINDS_OF_ROLLOUT)

    def seconds_at(self, steps: np.ndarray) -> np.ndarray:
        """T_total in seconds when each of `steps` updates were taken, between two entries of the log by a line."""
        logged, totals = self.series("time/total_s")
        if not len(logged):
            return np.full(len(steps), np.nan)
        return np.interp(steps, np.append(0.0, logged), np.append(0.0, totals))


def load_runs(
    paths: Sequence[Path], labels: Sequence[str] | None = None, evaluations: Sequence[Path] | None = None
) -> list[Run]:
    """
    Read runs by their `output_dir`.

    Args:
        paths (`Sequence[Path]`): of the runs.
        labels (`Sequence[str]`, *optional*): their names; by default the shortest ends of the paths that differ.
        evaluations (`Sequence[Path]`, *optional*): the `output_dir` of `mu-grpo eval` for each; by default what lies
            below the run.

    Raises:
        `ReportError`: no run, a folder that is none or is named twice, a log without an update, or labels or
            evaluations that do not fit.
    """
    if not paths:
        raise ReportError("No run is named. Give the `output_dir` of one or more runs, such as runs/quickstart.")
    resolved = [path.resolve() for path in paths]
    if twice := next((path for path in resolved if resolved.count(path) > 1), None):
        raise ReportError(f"{twice} is named twice. Name each run once.")
    if labels is not None and (len(labels) != len(paths) or len(set(labels)) != len(labels)):
        raise ReportError(f"{len(paths)} runs, but the labels {list(labels)}: give as many, all different.")
    if evaluations is not None and len(evaluations) != len(paths):
        raise ReportError(f"{len(paths)} runs, but {len(evaluations)} evaluations: give one for each run.")
    names, places = labels or _labels(resolved), evaluations or [None] * len(paths)
    return [load_run(*named) for named in zip(paths, names, places, strict=True)]


def load_run(path: Path, label: str | None = None, evaluation: Path | None = None) -> Run:
    """
    Read one run, by default labelled with its folder's name.

    Raises:
        `ReportError`: see [`load_runs`].
    """
    history = _read_history(path)
    description = _read_json(path / RUN_NAME) or {}
    settings = {key: value for key, value in description.items() if key != "settings"}
    run = Run(label or path.resolve().name, path, history, settings | description.get("settings", {}), None)
    if not run.updates:
        raise ReportError(f"The log of {path} has no update yet. Wait for the first one.")
    return replace(run, accuracy=_read_accuracy(run, evaluation))


def _read_history(path: Path) -> list[dict[str, Any]]:
    if not path.is_dir():
        raise ReportError(f"{path} is no folder. Name the `output_dir` of a run.")
    source = path / METRICS_NAME
    if source.exists():
        history = _parse_lines(source)
    else:
        checkpoints = [(int(_CHECKPOINT.fullmatch(p.name)[1]), p) for p in _checkpoints(path)]  # type: ignore[index]
        states = [path / STATE_NAME, *(folder / STATE_NAME for _, folder in sorted(checkpoints, reverse=True))]
        source = next((state for state in states if state.exists()), None)
        if source is None:
            raise ReportError(f"{path} is no run: it has no {METRICS_NAME} and no checkpoint.{_runs_below(path)}")
        history = (_read_json(source) or {}).get("log_history", [])
    if not history:
        raise ReportError(f"{source} is empty: the run has logged nothing yet. Wait for its first update.")
    steps = [entry["step"] for entry in history if "loss" in entry]
    if back := next((pair for pair in zip(steps, steps[1:], strict=False) if pair[1] <= pair[0]), None):
        raise ReportError(
            f"{source} goes from update {back[0]} to update {back[1]}: it mixes two runs. Give each its own "
            "`output_dir`."
        )
    return history


def _parse_lines(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            if not isinstance(entry.get("step"), int | float):
                raise ValueError("no step")
        except (ValueError, AttributeError) as error:
            if number == len(lines):  # a kill while it was written
                break
            raise ReportError(f"{path}, line {number}: {line[:60]!r} is no entry of a log ({error}).") from error
        entries.append(entry)
    return entries


def _read_accuracy(run: Run, evaluation: Path | None) -> Accuracy | None:
    if evaluation is not None:
        file = evaluation / EVALUATIONS[0]
        if not file.exists():
            raise ReportError(f"{file} does not exist. Name the `output_dir` of `mu-grpo eval`.")
        return _from_evaluation(file)
    files = [run.path / place for place in EVALUATIONS]
    found = next((file for file in files if file.exists()), None)
    return _from_evaluation(found) if found else _from_log(run) or _from_lab(run)


def _from_evaluation(file: Path) -> Accuracy | None:
    """Of `mu-grpo eval`. A model that is no checkpoint of a run has no place on the axes."""
    stored = _read_json(file) or {}
    try:
        points = {
            checkpoint["step"]: {name: score["pass@1"] for name, score in checkpoint["benchmarks"].items()}
            for checkpoint in stored["checkpoints"]
            if checkpoint["step"] is not None
        }
        return _accuracy("pass@1", points, stored["average_of"])
    except (KeyError, TypeError) as error:
        raise ReportError(f"{file} is no result of `mu-grpo eval` ({type(error).__name__}: {error}).") from error


def _from_log(run: Run) -> Accuracy | None:
    points = {entry["step"]: {"eval_reward": entry["eval_reward"]} for entry in run.history if "eval_reward" in entry}
    return _accuracy("evaluation reward", points)


def _from_lab(run: Run) -> Accuracy | None:
    """The quickstart evaluates before the first and after the last update."""
    summary = _read_json(run.path / "summary.json") or {}
    if "accuracy_before" not in summary:
        return None
    steps = {0: summary["accuracy_before"], int(summary["num_updates"]): summary["accuracy_after"]}
    return _accuracy("held-out accuracy", {step: {"held out": value} for step, value in steps.items()})


def _accuracy(
    source: str, points: dict[int, dict[str, float]], averaged: Sequence[str] | None = None
) -> Accuracy | None:
    if not points:
        return None
    steps = sorted(points)
    names = list(dict.fromkeys(name for step in steps for name in points[step]))
    values = {name: np.array([points[step].get(name, np.nan) for step in steps], dtype=float) for name in names}
    return Accuracy(source, np.array(steps, dtype=float), values, tuple(averaged or names))


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ReportError(f"{path} is not JSON ({error}). Restore it, or remove it.") from error


def _checkpoints(path: Path) -> list[Path]:
    return [folder for folder in path.glob("checkpoint-*") if _CHECKPOINT.fullmatch(folder.name)]


def _runs_below(path: Path) -> str:
    below = sorted(folder.name for folder in path.iterdir() if folder.is_dir() and (folder / METRICS_NAME).exists())
    if not below:
        return " Name the `output_dir` of a run."
    return f" Name the runs below it: {', '.join(str(path / name) for name in below[:10])}."


def _labels(paths: Iterable[Path]) -> list[str]:
    """The shortest ends of the paths that differ from each other."""
    parts = [path.parts for path in paths]
    length = next(n for n in range(1, 1 + max(map(len, parts))) if len({p[-n:] for p in parts}) == len(parts))
    return ["/".join(p[-length:]) for p in parts]
