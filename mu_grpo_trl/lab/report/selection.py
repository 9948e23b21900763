"""Which cells a claim is judged on: the learning rate each method was tuned to, the regimes, the sweeps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..grid import Cell
from .results import Result, by_seed

LOW_STALENESS = 4
"""μ of standard GRPO."""
NUM_STAGES = 4
"""Stages of the paper's μ-GRPO runs: high staleness is μ = updates / 4 unless another μ is named."""
SWEPT = ("veto_threshold", "epsilon_high", "prompts_per_update")
"""Settings that sweeps vary; μ, which has its own field, besides."""


def number(value: float) -> str:
    """A learning rate or threshold in the shortest scientific form: `3e-4`."""
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


@dataclass(frozen=True)
class Regime:
    """
    Where a claim is judged.

    Args:
        task (`str`): name.
        stage_updates (`int`): μ of the high-staleness methods.
        learning_rate (`float` or None): the same for all methods; None: each method's tuned one.
    """

    task: str
    stage_updates: int
    learning_rate: float | None = None

    def __str__(self) -> str:
        rate = "each its tuned lr" if self.learning_rate is None else f"lr {number(self.learning_rate)}"
        return f"{self.task}, μ = {self.stage_updates}, {rate}"


@dataclass(frozen=True)
class Selection:
    """The finished cells of one setting by seed, and how many there should be."""

    by_seed: dict[int, Result]
    num_planned: int

    @property
    def complete(self) -> bool:
        """Whether all planned cells have finished."""
        return len(self.by_seed) >= self.num_planned

    @property
    def finals(self) -> dict[int, float]:
        """Seed → final accuracy."""
        return {seed: result.final for seed, result in self.by_seed.items()}

    @property
    def runs(self) -> list[Result]:
        """The cells by seed."""
        return [self.by_seed[seed] for seed in sorted(self.by_seed)]


def setting(cell: Result | Cell, name: str) -> float | None:
    """A swept setting of a cell, or the trainer's default if it does not set it."""
    defaults = {"veto_threshold": 1e-4, "epsilon_high": 0.2 if cell.settings.get("objective") == "grpo" else 4.0}
    value = cell.settings.get(name, defaults.get(name))
    return None if value is None else float(value)


class Lab:
    """
    The cells of all experiments, and how to choose among them.

    Args:
        results (`Iterable[Result]`): finished cells.
        planned (`Iterable[Cell]`): all cells of the experiments; the finished ones alone if empty.
        tuning_seeds (`frozenset[int]`): seeds that choose the learning rates and take no part in verdicts.
        budget_experiments (`frozenset[str]`): experiments on one fixed stage, kept apart from all others.
    """

    def __init__(
        self,
        results: Iterable[Result],
        planned: Iterable[Cell],
        tuning_seeds: frozenset[int],
        budget_experiments: frozenset[str] = frozenset({"fixed_generation_budget"}),
    ) -> None:
        self.results = list(results)
        self.planned = list(planned)
        self.tuning_seeds = tuning_seeds
        self._budget = budget_experiments
        self._defaults: dict[tuple[str, str], tuple[Any, ...]] = {}
        self._selections: dict[tuple[Any, ...], Selection] = {}
        self._tuned: dict[tuple[str, str], float | None] = {}

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, those with most cells first."""
        counts = Counter(cell.task for cell in self._cells())
        return sorted(counts, key=lambda task: (-counts[task], task))

    def num_updates(self, task: str) -> int:
        """Updates of the main comparison: what most cells of the task have."""
        return self._defaults_of(task, None)[0]

    def main_mu(self, task: str) -> int:
        """μ of four stages."""
        return self.num_updates(task) // NUM_STAGES

    def learning_rates(self, task: str) -> list[float]:
        """All learning rates of a task."""
        return sorted({cell.learning_rate for cell in self._cells() if cell.task == task})

    def staleness(self, task: str) -> list[int]:
        """All μ that μ-GRPO is run at."""
        methods = ("mu_grpo", "mu_grpo_low")
        return sorted({c.stage_updates for c in self._base_cells(task) if c.method in methods})

    def methods(self, task: str) -> list[str]:
        """All methods of a task."""
        return sorted({cell.method for cell in self._cells() if cell.task == task})

    def tuning(self, task: str, method: str) -> dict[float, list[float]]:
        """Learning rate → final accuracies of the tuning seeds, at the method's main μ."""
        mu = self._mu_of(method, self.main_mu(task))
        scores: dict[float, list[float]] = {}
        for result in self.results:
            tuning = result.seed in self.tuning_seeds and result.task == task and result.method == method
            if tuning and result.stage_updates == mu and self._is_base(result):
                scores.setdefault(result.learning_rate, []).append(result.final)
        return dict(sorted(scores.items()))

    def tuned_lr(self, task: str, method: str) -> float | None:
        """
        The learning rate with the best mean final accuracy over the tuning seeds; the smaller one of equals. A method
        without tuning cells of its own (the scopes) takes μ-GRPO's.
        """
        if (task, method) not in self._tuned:
            scores = self.tuning(task, method)
            if scores:
                rate = max(scores, key=lambda rate: (math.fsum(scores[rate]) / len(scores[rate]), -rate))
            else:
                rate = self.tuned_lr(task, "mu_grpo") if method != "mu_grpo" else self._only_lr(task)
            self._tuned[task, method] = rate
        return self._tuned[task, method]

    def select(self, method: str, regime: Regime, **swept: Any) -> Selection:
        """
        The reporting seeds of one method in a regime. `grpo_low` has μ = 4 whatever the regime's; μ-GRPO at μ = 4 is
        the method `mu_grpo_low`.

        Args:
            method (`str`): name.
            regime (`Regime`): task, μ and learning rate.
            **swept: values of swept settings other than the base ones.
        """
        rate = regime.learning_rate or self.tuned_lr(regime.task, method)
        mu = self._mu_of(method, regime.stage_updates)
        name = "mu_grpo_low" if (method, mu) == ("mu_grpo", LOW_STALENESS) else method

        def matches(cell: Result | Cell) -> bool:
            return (
                (cell.task, cell.method, cell.stage_updates) == (regime.task, name, mu)
                and rate is not None
                and math.isclose(cell.learning_rate, rate, rel_tol=1e-6)
                and cell.seed not in self.tuning_seeds
                and self._is_base(cell, swept)
            )

        key = (method, regime, *sorted(swept.items()))
        if key not in self._selections:
            finished = by_seed(result for result in self.results if matches(result))
            self._selections[key] = Selection(finished, max(len(finished), sum(map(matches, self.planned))))
        return self._selections[key]

    def swept_values(self, task: str, name: str) -> list[float]:
        """The values a sweep of μ-GRPO's setting `name` takes, its base value included."""
        values = {
            setting(cell, name)
            for cell in self._cells()
            if (cell.task, cell.method) == (task, "mu_grpo") and not self._of_budget(cell)
        }
        return sorted(value for value in values if value is not None)

    def budget(self, task: str, learning_rate: float) -> dict[float, Selection]:
        """Prompts per update → the cells that train on one fixed stage."""

        def matches(cell: Result | Cell) -> bool:
            same = cell.task == task and math.isclose(cell.learning_rate, learning_rate, rel_tol=1e-6)
            return same and self._of_budget(cell) and cell.seed not in self.tuning_seeds

        sizes = sorted({setting(cell, "prompts_per_update") or 0.0 for cell in self._cells() if matches(cell)})
        chosen: dict[float, Selection] = {}
        for size in sizes:
            cells = [c for c in self.results if matches(c) and setting(c, "prompts_per_update") == size]
            planned = [c for c in self.planned if matches(c) and setting(c, "prompts_per_update") == size]
            finished = by_seed(cells)
            chosen[size] = Selection(finished, max(len(finished), len(planned)))
        return chosen

    def base_value(self, task: str, method: str, name: str) -> float | None:
        """The value of a swept setting outside of its sweep."""
        return self._defaults_of(task, method)[1 + SWEPT.index(name)]

    def _cells(self) -> list[Result | Cell]:
        return [*self.planned, *self.results]

    def _base_cells(self, task: str) -> list[Result | Cell]:
        return [cell for cell in self._cells() if cell.task == task and self._is_base(cell)]

    def _of_budget(self, cell: Result | Cell) -> bool:
        return bool(self._budget & set(cell.experiments))

    def _is_base(self, cell: Result | Cell, swept: dict[str, Any] | None = None) -> bool:
        """Whether a cell has the base value of every swept setting but those of `swept`, which it has as given."""
        swept = swept or {}
        if cell.num_updates != self.num_updates(cell.task) or self._only_of_budget(cell):
            return False
        return all(
            setting(cell, name) == swept.get(name, self.base_value(cell.task, cell.method, name)) for name in SWEPT
        )

    def _only_of_budget(self, cell: Result | Cell) -> bool:
        return self._of_budget(cell) and set(cell.experiments) <= self._budget

    def _defaults_of(self, task: str, method: str | None) -> tuple[Any, ...]:
        """Most common number of updates of a task, and most common swept settings of a method, outside of budgets."""
        if (task, method or "") not in self._defaults:
            cells = [
                cell
                for cell in self._cells()
                if cell.task == task and not self._only_of_budget(cell) and method in (None, cell.method)
            ]
            columns = [[cell.num_updates for cell in cells]]
            columns += [[setting(cell, name) for cell in cells] for name in SWEPT]
            self._defaults[task, method or ""] = tuple(map(_most_common, columns))
        return self._defaults[task, method or ""]

    def _mu_of(self, method: str, mu: int) -> int:
        return LOW_STALENESS if method == "grpo_low" else mu

    def _only_lr(self, task: str) -> float | None:
        rates = self.learning_rates(task)
        return rates[0] if len(rates) == 1 else None


def _most_common(values: Sequence[Any]) -> Any:
    """The most frequent value, the first as text of equals; None of none."""
    return max(sorted(set(values), key=str), key=values.count, default=None)
