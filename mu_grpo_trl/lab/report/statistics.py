"""Means with Student's t intervals over seeds, paired differences and ratios, and shares with exact intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """
    A mean with its two-sided 95% interval.

    Args:
        mean (`float`): of the values; NaN of none.
        low (`float`): lower end; −inf with fewer than two values.
        high (`float`): upper end; inf with fewer than two values.
        num (`int`): of values.
    """

    mean: float
    low: float
    high: float
    num: int

    @property
    def half_width(self) -> float:
        """Half of the interval's width; inf with fewer than two values."""
        return (self.high - self.low) / 2


def estimate(values: Sequence[float]) -> Estimate:
    """
    Mean and Student t interval: mean ± t(0.975, n − 1) · s / √n.

    >>> estimate([1.0, 2.0, 3.0])  # t = 4.3027, s = 1
    Estimate(mean=2.0, low=-0.484..., high=4.484..., num=3)
    """
    num = len(values)
    if num == 0:
        return Estimate(math.nan, -math.inf, math.inf, 0)
    mean = math.fsum(values) / num
    if num == 1:
        return Estimate(mean, -math.inf, math.inf, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (num - 1)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, num - 1)) * math.sqrt(variance / num)
    return Estimate(mean, mean - half, mean + half, num)


def paired_difference(first: Mapping[int, float], second: Mapping[int, float]) -> Estimate:
    """Interval of the mean of `first − second` over the seeds that both have."""
    return estimate([first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())])


def paired_ratio(first: Mapping[int, float], second: Mapping[int, float]) -> Estimate:
    """Geometric mean of `first / second` over the seeds that both have; the interval is symmetric in the logarithm."""
    logs = estimate([math.log(first[seed] / second[seed]) for seed in sorted(first.keys() & second.keys())])
    return Estimate(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high), logs.num)


def share(hits: int, num: int) -> Estimate:
    """Share `hits / num` with the exact (Clopper–Pearson) interval."""
    if num == 0:
        return Estimate(math.nan, 0.0, 1.0, 0)
    interval = stats.binomtest(hits, num).proportion_ci(CONFIDENCE, method="exact")
    return Estimate(hits / num, float(interval.low), float(interval.high), num)
