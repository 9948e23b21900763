"""
The laboratory's grid: experiments in `recipes/lab/*.yaml`, expanded into cells. Knows YAML and nothing heavier.

A cell is one training run with its evaluations: a task, a method, all settings and a seed. Experiments that ask for
the same run share the cell.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

SCHEMA = 1
"""Of cells and results. A change of what a cell computes needs a new one, so that no old result is taken for it."""

BASE_NAME = "base.yaml"
MAIN_COMPARISON = ("tuning", "main")
"""Experiments of the main comparison: the seeds that choose learning rates, and the seeds that are reported."""


class GridError(ValueError):
    """An experiment's YAML asks for what cannot be run; the message says which."""


@dataclass(frozen=True)
class Cell:
    """
    One training run of the laboratory.

    Args:
        task (`str`): name in [`~mu_grpo_trl.lab.tasks.LAB_TASKS`].
        method (`str`): name of its objective and veto; GRPO at low and at high μ are two methods.
        seed (`int`): of data order, sampling and training.
        settings (`dict[str, Any]`): the whole recipe but for the seed, and what is the machine's (model, output).
        evaluation (`dict[str, int]`): `every` so many updates, on `num_problems`.
        experiments (`tuple[str, ...]`): that it belongs to.
        priority (`tuple[int, ...]`): cells run in this order.
    """

    task: str
    method: str
    seed: int
    settings: dict[str, Any]
    evaluation: dict[str, int]
    experiments: tuple[str, ...] = ()
    priority: tuple[int, ...] = field(default=(), compare=False)

    @cached_property
    def id(self) -> str:
        """Name of the cell's folder: a hash of all that decides its result."""
        identity = [SCHEMA, self.task, self.seed, _canonical(self.settings), _canonical(self.evaluation)]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def stage_updates(self) -> int:
        """μ."""
        return self.settings["stage_updates"]

    @property
    def learning_rate(self) -> float:
        """Of the optimizer."""
        return self.settings["learning_rate"]

    @property
    def num_updates(self) -> int:
        """Updates of the run."""
        return self.settings["max_steps"]

    @property
    def num_responses(self) -> int:
        """Responses generated, and trained on."""
        return self.num_updates * self.settings["prompts_per_update"] * self.settings["num_generations"]

    def to_dict(self) -> dict[str, Any]:
        """As it stands in results: JSON, where an infinite bound is text."""
        infinite = {name: str(value) for name, value in self.settings.items() if value == math.inf}
        return {
            "id": self.id,
            "task": self.task,
            "method": self.method,
            "experiments": list(self.experiments),
            "stage_updates": self.stage_updates,
            "learning_rate": self.learning_rate,
            "seed": self.seed,
            "num_updates": self.num_updates,
            "settings": self.settings | infinite,
            "evaluation": self.evaluation,
        }

    def __str__(self) -> str:
        return f"{self.task} {self.method} μ={self.stage_updates} lr={self.learning_rate:g} seed={self.seed}"


@dataclass(frozen=True)
class Experiment:
    """
    What a YAML in `recipes/lab` says. Its cells are the product of the five lists.

    Args:
        name (`str`): the file's.
        title (`str`): what it shows.
        paper (`str`): figure, table or theorem it reproduces.
        claim (`str`): which claim of the paper it serves.
        priority (`int`): lower ones run first.
        tasks (`list[str]`), methods (`list[str]`): names in `base.yaml`.
        learning_rates (`list[float]`), seeds (`list[int]`): of the cells.
        vary (`list[dict]`, *optional*): settings of a sweep, one mapping a point.
    """

    name: str
    title: str
    paper: str
    claim: str
    priority: int
    tasks: list[str]
    methods: list[str]
    learning_rates: list[float]
    seeds: list[int]
    vary: list[dict[str, Any]] = field(default_factory=lambda: [{}])

    def cells(self, base: dict[str, Any]) -> Iterable[Cell]:
        """
        Raises:
            `GridError`: a task or method that `base.yaml` does not have, or a length of run that does not divide.
        """
        for kind, names in (("tasks", self.tasks), ("methods", self.methods)):
            if unknown := set(names) - set(base[kind]):
                raise GridError(
                    f"{self.name}.yaml: unknown {kind} {sorted(unknown)}: {BASE_NAME} has {[*base[kind]]}."
                )
        seeds = enumerate(self.seeds)
        grid = itertools.product(seeds, self.tasks, self.learning_rates, self.vary, self.methods)
        for number, ((nth_seed, seed), task, learning_rate, point, method) in enumerate(grid):
            settings = base["settings"] | base["tasks"][task] | base["methods"][method] | point
            cell = Cell(
                task=task,
                method=method,
                seed=seed,
                settings=settings | {"learning_rate": learning_rate},
                evaluation=base["evaluation"],
                experiments=(self.name,),
                priority=(self.priority, nth_seed, number),
            )
            for length in (cell.stage_updates, base["evaluation"]["every"]):
                if cell.num_updates % length:
                    raise GridError(
                        f"{self.name}.yaml: {cell}: {cell.num_updates} updates are no multiple of {length} (μ, and "
                        "the updates between evaluations, must divide them)."
                    )
            yield cell


def lab_folder() -> Path:
    """Folder of the experiments: in the installed package, or in the checkout beside it."""
    package = Path(__file__).parents[1]
    folders = (package / "recipes" / "lab", package.parent / "recipes" / "lab")
    return next(folder for folder in folders if folder.exists())


def load_experiments(folder: Path | None = None) -> dict[str, Experiment]:
    """
    All experiments by name, in the order of their priorities.

    Raises:
        `GridError`: a key that is unknown or missing.
    """
    experiments = []
    for path in sorted((folder or lab_folder()).glob("*.yaml")):
        if path.name != BASE_NAME:
            try:
                experiments.append(Experiment(name=path.stem, **_load(path)))
            except TypeError as error:
                raise GridError(f"{path}: {error}".replace("Experiment.__init__() ", "")) from error
    return {experiment.name: experiment for experiment in sorted(experiments, key=lambda e: (e.priority, e.name))}


def load_grid(names: Sequence[str] = (), folder: Path | None = None) -> list[Cell]:
    """
    The cells of the named experiments (by default of all), each once, in the order in which they run: by the
    experiments' priorities, then by the number of the seed, so that a part of the grid already says something.

    Raises:
        `GridError`: there is no experiment of that name, or it cannot be expanded.
    """
    experiments = load_experiments(folder)
    if unknown := [name for name in names if name not in experiments]:
        raise GridError(f"There is no experiment {unknown[0]!r}. Choose among {', '.join(experiments)}.")
    base = _load((folder or lab_folder()) / BASE_NAME)
    cells: dict[str, Cell] = {}
    for experiment in experiments.values():
        for cell in experiment.cells(base):
            same = cells.setdefault(cell.id, cell)
            if same.method != cell.method:
                raise GridError(
                    f"{experiment.name}.yaml: {cell} is the run that {same.experiments[0]}.yaml calls "
                    f"{same.method!r}: keep one name for it."
                )
            if same is not cell:
                joined = tuple(dict.fromkeys((*same.experiments, *cell.experiments)))
                cells[cell.id] = replace(same, experiments=joined, priority=min(same.priority, cell.priority))
    wanted = set(names or experiments)
    return sorted((c for c in cells.values() if wanted & set(c.experiments)), key=lambda cell: cell.priority)


def _load(path: Path) -> dict[str, Any]:
    return _numbers(yaml.safe_load(path.read_text(encoding="utf-8")))


def _numbers(value: Any) -> Any:
    """YAML 1.1 reads `1e-4` as text; here it is the number."""
    if isinstance(value, dict):
        return {key: _numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_numbers(entry) for entry in value]
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _canonical(value: Any) -> Any:
    """The same for 4 and 4.0, which settle the same run."""
    if isinstance(value, dict):
        return {key: _canonical(entry) for key, entry in value.items()}
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
