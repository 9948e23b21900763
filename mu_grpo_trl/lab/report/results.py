"""The cells of the laboratory as the report reads them: one checked `result.json` each, and what follows from it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..grid import SCHEMA

COLLAPSE_SHARE = 0.5
"""A run has collapsed if its final accuracy is under this share of its peak."""


@dataclass(frozen=True)
class Evaluation:
    """
    One evaluation on the held-out problems.

    Args:
        update (`int`): updates made so far.
        cpu_s (`float`): CPU seconds of training so far, rollouts included and evaluation excluded.
        wall_s (`float`): the same in wall-clock seconds, during which other cells may have run.
        accuracy (`float`): in [0, 1].
    """

    update: int
    cpu_s: float
    wall_s: float
    accuracy: float


@dataclass(frozen=True)
class Result:
    """
    A finished cell.

    Args:
        cell_id (`str`): name of its folder.
        task, method (`str`): names.
        experiments (`tuple[str, ...]`): those the cell belongs to.
        stage_updates (`int`): μ.
        learning_rate (`float`): of the optimizer.
        seed (`int`): of data order, sampling and training.
        num_updates (`int`): updates in all.
        settings (`dict`): the options that the cell sets.
        evaluations (`tuple[Evaluation, ...]`): by update.
        metrics (`dict[str, list]`): `step` and, at these updates, the logged metrics; None where one was not logged.
        vetoed_shares (`tuple[float, ...]`): share of tokens the veto masked, by stage.
        total_cpu_s, rollout_cpu_s (`float`): T_total and T_rollout in CPU seconds.
    """

    cell_id: str
    task: str
    method: str
    experiments: tuple[str, ...]
    stage_updates: int
    learning_rate: float
    seed: int
    num_updates: int
    settings: dict[str, Any]
    evaluations: tuple[Evaluation, ...]
    metrics: dict[str, list[float | None]]
    vetoed_shares: tuple[float, ...]
    total_cpu_s: float
    rollout_cpu_s: float

    @property
    def final(self) -> float:
        """Accuracy of the last evaluation."""
        return self.evaluations[-1].accuracy

    @property
    def peak(self) -> float:
        """Best accuracy of all evaluations."""
        return max(evaluation.accuracy for evaluation in self.evaluations)

    @property
    def kept(self) -> float:
        """Final accuracy as a share of its peak; 1 if it never got anything right."""
        return self.final / self.peak if self.peak > 0 else 1.0

    @property
    def collapsed(self) -> bool:
        """Whether the final accuracy is under half its peak."""
        return self.kept < COLLAPSE_SHARE

    @property
    def collapse_update(self) -> int | None:
        """The first evaluation under half of the best accuracy so far, of a run that has collapsed."""
        best = 0.0
        for evaluation in self.evaluations if self.collapsed else ():
            if evaluation.accuracy < COLLAPSE_SHARE * best:
                return evaluation.update
            best = max(best, evaluation.accuracy)
        return None

    def metric(self, name: str) -> list[tuple[int, float]]:
        """`(update, value)` wherever the metric was logged."""
        values = self.metrics.get(name, [])
        steps = self.metrics.get("step", [])
        return [
            (int(step), float(value))
            for step, value in zip(steps, values, strict=False)
            if step is not None and value is not None
        ]

    def mean_metric(self, name: str) -> float | None:
        """Mean of a metric over the updates; None if it was never logged."""
        values = [value for _, value in self.metric(name)]
        return math.fsum(values) / len(values) if values else None

    def first_below(self, name: str, level: float) -> int | None:
        """The first update at which a metric is under `level`."""
        return next((step for step, value in self.metric(name) if value < level), None)

    def accuracy_at(self, cpu_s: float) -> float:
        """Accuracy after `cpu_s` seconds of training, linear between evaluations; the last one from then on."""
        before = self.evaluations[0]
        for evaluation in self.evaluations:
            if evaluation.cpu_s >= cpu_s:
                span = evaluation.cpu_s - before.cpu_s
                weight = (cpu_s - before.cpu_s) / span if span > 0 else 1.0
                return before.accuracy + max(0.0, weight) * (evaluation.accuracy - before.accuracy)
            before = evaluation
        return before.accuracy

    def time_to(self, accuracy: float) -> float | None:
        """CPU seconds of training until `accuracy` is reached, linear between evaluations; None if it never is."""
        before = self.evaluations[0]
        for evaluation in self.evaluations:
            if evaluation.accuracy >= accuracy:
                rise = evaluation.accuracy - before.accuracy
                weight = (accuracy - before.accuracy) / rise if rise > 0 else 1.0
                return before.cpu_s + weight * (evaluation.cpu_s - before.cpu_s)
            before = evaluation
        return None


@dataclass(frozen=True)
class Failure:
    """A cell that ended with an error: its name and the error's last line."""

    cell_id: str
    error: str


def parse_result(raw: dict[str, Any]) -> Result:
    """
    Check one `result.json`.

    Raises:
        `ValueError`: another schema, a missing field, or no evaluation.
    """
    source = f"The cell {raw.get('cell', {}).get('id', '?')}"
    if raw.get("schema") != SCHEMA:
        raise ValueError(
            f"{source} has schema {raw.get('schema')!r}, but this version reads {SCHEMA}: run the cell again, or use "
            "the version of mu-grpo-trl that wrote it."
        )
    try:
        cell, times = raw["cell"], raw["times"]
        evaluations = tuple(
            Evaluation(int(e["update"]), float(e["train_cpu_s"]), float(e["train_wall_s"]), float(e["accuracy"]))
            for e in sorted(raw["evaluations"], key=lambda entry: entry["update"])
        )
        result = Result(
            cell_id=cell["id"],
            task=cell["task"],
            method=cell["method"],
            experiments=tuple(cell["experiments"]),
            stage_updates=int(cell["stage_updates"]),
            learning_rate=float(cell["learning_rate"]),
            seed=int(cell["seed"]),
            num_updates=int(cell["num_updates"]),
            settings=cell["settings"],
            evaluations=evaluations,
            metrics=raw["metrics"],
            vetoed_shares=tuple(
                float(stage["vetoed_token_share"]) for stage in sorted(raw["stages"], key=lambda s: s["stage"])
            ),
            total_cpu_s=float(times["total_cpu_s"]),
            rollout_cpu_s=float(times["rollout_cpu_s"]),
        )
    except KeyError as error:
        raise ValueError(f"{source} has no {error}: it was not written by this version; run the cell again.") from None
    if not evaluations:
        raise ValueError(f"{source} has no evaluation, so there is nothing to report: run the cell again.")
    return result


def read_cells(folder: Path) -> list[dict[str, Any]]:
    """
    The JSON of all cells below `folder` that have ended, by name: `<folder>/<cell>/result.json`, or the cell's name
    and the last line of the `error*` file that lies there instead. A cell that has neither is still running: left out.
    """
    raws = []
    for cell in sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else ():
        path, errors = cell / "result.json", sorted(cell.glob("error*"))
        if path.is_file():
            raw = json.loads(path.read_text(encoding="utf-8"))
            raws.append(_failed(cell.name, str(raw["error"])) if "error" in raw else raw)
        elif errors:
            raws.append(_failed(cell.name, errors[0].read_text(encoding="utf-8", errors="replace")))
    return raws


def _failed(cell_id: str, error: str) -> dict[str, Any]:
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return {"schema": SCHEMA, "cell": {"id": cell_id}, "error": lines[-1][:200] if lines else "no message"}


def by_seed(results: Iterable[Result]) -> dict[int, Result]:
    """
    Seed → cell, by seed.

    Raises:
        `ValueError`: two cells have the same seed, so that they are not of one setting.
    """
    found: dict[int, Result] = {}
    for result in sorted(results, key=lambda result: (result.seed, result.cell_id)):
        if result.seed in found:
            raise ValueError(
                f"{found[result.seed].cell_id} and {result.cell_id} both have seed {result.seed}: the report would "
                "mix their settings. Remove the one that no experiment lists any more."
            )
        found[result.seed] = result
    return found
