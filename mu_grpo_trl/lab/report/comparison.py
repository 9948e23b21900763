"""μ-GRPO against GRPO at μ = 4 over the whole grid, and every setting's figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .claims import accuracies_at_equal_time, time_to_baseline
from .results import Result
from .selection import SWEPT, Lab, Regime, Selection, setting
from .statistics import Estimate, estimate, paired_difference, paired_ratio, share
from .verdicts import MARGIN

Mark = Literal["ahead", "match", "behind", "open"]


@dataclass(frozen=True)
class Point:
    """
    μ-GRPO at one learning rate and μ against GRPO at μ = 4.

    Args:
        regime (`Regime`): μ-GRPO's, with its learning rate.
        baseline_lr (`float`): GRPO's learning rate.
        equal_updates (`Estimate`): paired difference of final accuracies.
        equal_time (`Estimate`): paired difference of accuracies after the CPU seconds the faster of the two takes.
        speedup (`Estimate`): paired ratio of T_total, GRPO's over μ-GRPO's.
        to_baseline (`Estimate`): paired ratio of the times to GRPO's final accuracy, over the seeds that reach it.
        reached, num_seeds (`int`): how many do, of how many.
        speedups (`dict[int, float]`): the ratio of T_total by seed.
    """

    regime: Regime
    baseline_lr: float
    equal_updates: Estimate
    equal_time: Estimate
    speedup: Estimate
    to_baseline: Estimate
    reached: int
    num_seeds: int
    speedups: dict[int, float]


def mark(difference: Estimate) -> Mark:
    """
    Where a difference of accuracies stands: `match` if its interval lies within ± the margin; else `ahead` or `behind`
    if it lies above or below 0; `open` if it does neither.
    """
    if difference.low > -MARGIN and difference.high < MARGIN:
        return "match"
    return "ahead" if difference.low > 0 else "behind" if difference.high < 0 else "open"


def compare_grid(lab: Lab, task: str, same_lr: bool) -> list[Point]:
    """
    Every learning rate and μ at which both have run, against GRPO at the same learning rate or at its tuned one.
    """
    points = []
    for mu in lab.staleness(task):
        for rate in lab.learning_rates(task):
            baseline_lr = rate if same_lr else lab.tuned_lr(task, "grpo_low")
            if baseline_lr is None:
                continue
            ours = lab.select("mu_grpo", Regime(task, mu, rate))
            baseline = lab.select("grpo_low", Regime(task, mu, baseline_lr))
            if ours.by_seed.keys() & baseline.by_seed.keys():
                points.append(_point(Regime(task, mu, rate), baseline_lr, ours, baseline))
    return points


def _point(regime: Regime, baseline_lr: float, ours: Selection, baseline: Selection) -> Point:
    seconds = [{seed: run.total_cpu_s for seed, run in part.by_seed.items()} for part in (baseline, ours)]
    to_baseline, reached, num_seeds = time_to_baseline(ours, baseline)
    seeds = sorted(seconds[0].keys() & seconds[1].keys())
    return Point(
        regime=regime,
        baseline_lr=baseline_lr,
        equal_updates=paired_difference(ours.finals, baseline.finals),
        equal_time=paired_difference(*accuracies_at_equal_time(ours, baseline)),
        speedup=paired_ratio(*seconds),
        to_baseline=to_baseline,
        reached=reached,
        num_seeds=num_seeds,
        speedups={seed: seconds[0][seed] / seconds[1][seed] for seed in seeds},
    )


def speedup_in_region(points: Sequence[Point]) -> tuple[int, Estimate]:
    """
    Over the points where the accuracies match or μ-GRPO is ahead at equal updates: their number, and the speedup of
    T_total. The logarithms are averaged over the points first, within a seed, and the interval is over seeds.
    """
    region = [point for point in points if mark(point.equal_updates) in ("match", "ahead")]
    logs: dict[int, list[float]] = {}
    for point in region:
        for seed, ratio in point.speedups.items():
            logs.setdefault(seed, []).append(math.log(ratio))
    over_seeds = estimate([math.fsum(values) / len(values) for _, values in sorted(logs.items())])
    low, mean, high = (math.exp(value) for value in (over_seeds.low, over_seeds.mean, over_seeds.high))
    return len(region), Estimate(mean, low, high, over_seeds.num)


@dataclass(frozen=True)
class Setting:
    """
    All reporting seeds of one setting.

    Args:
        task, method (`str`): names.
        stage_updates (`int`): μ.
        learning_rate (`float`): of the optimizer.
        num_updates (`int`): updates in all.
        swept (`dict[str, float]`): swept settings away from their base value.
        runs (`list[Result]`): by seed.
    """

    task: str
    method: str
    stage_updates: int
    learning_rate: float
    num_updates: int
    swept: dict[str, float]
    runs: list[Result]

    @property
    def final(self) -> Estimate:
        """Final accuracy."""
        return estimate([run.final for run in self.runs])

    @property
    def peak(self) -> Estimate:
        """Best accuracy of each run."""
        return estimate([run.peak for run in self.runs])

    @property
    def collapsed(self) -> Estimate:
        """Share of the runs that collapsed, with its exact interval."""
        return share(sum(run.collapsed for run in self.runs), len(self.runs))

    @property
    def total_cpu_s(self) -> Estimate:
        """T_total in CPU seconds."""
        return estimate([run.total_cpu_s for run in self.runs])

    @property
    def rollout_cpu_s(self) -> Estimate:
        """T_rollout in CPU seconds."""
        return estimate([run.rollout_cpu_s for run in self.runs])


def all_settings(lab: Lab) -> list[Setting]:
    """Every setting with finished reporting seeds, by task, method, μ and learning rate."""
    grouped: dict[tuple, list[Result]] = {}
    for result in lab.results:
        if result.seed in lab.tuning_seeds:
            continue
        swept = tuple(
            (name, value)
            for name in SWEPT
            if (value := setting(result, name)) not in (None, lab.base_value(result.task, result.method, name))
        )
        key = (result.task, result.method, result.stage_updates, result.learning_rate, result.num_updates, swept)
        grouped.setdefault(key, []).append(result)
    return [
        Setting(task, method, mu, rate, updates, dict(swept), runs)
        for (task, method, mu, rate, updates, swept), runs in sorted(grouped.items(), key=lambda item: item[0])
    ]
