"""Accuracies of sampled responses and their 95% intervals. Pure functions on arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Z95 = 1.959963984540054

INTERVAL_METHOD = (
    "95% Wilson score interval over problems: the samples of one problem are one cluster, so the number of trials is "
    "the effective one, p(1 - p) / SE^2 with SE = (standard deviation of the problems' means) / sqrt(problems), at "
    "most problems * samples; where p is 0 or 1, or there is one problem, it is the number of problems. An average of "
    "benchmarks has the limits of these put together (square-and-add). It says how far another draw of problems and "
    "samples may be, not how far another training run may be."
)


def pass_at_k(num_correct: np.ndarray, num_samples: int, k: int) -> float:
    """
    Unbiased estimate of the chance that one of `k` responses is right: the mean over problems of
    1 − C(n − c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374).

    Args:
        num_correct (`np.ndarray` `(problems,)`): c, right responses to each problem.
        num_samples (`int`): n, responses to each problem.
        k (`int`): at most n.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} cannot be estimated from {num_samples} samples: k is at least 1, at most those.")
    total = math.comb(num_samples, k)
    return float(np.mean([1.0 - math.comb(num_samples - int(c), k) / total for c in num_correct]))


def interval(num_correct: np.ndarray, num_samples: int) -> tuple[float, float]:
    """The 95% interval of pass@1 described by `INTERVAL_METHOD`, from the right responses to each problem."""
    means = num_correct / num_samples
    accuracy, problems = float(means.mean()), len(means)
    trials = float(problems)
    if 0 < accuracy < 1 and problems > 1:
        error, most = means.std(ddof=1) / math.sqrt(problems), problems * num_samples
        trials = min(accuracy * (1 - accuracy) / error**2, most) if error else most
    spread = Z95**2 / trials
    center = (accuracy + spread / 2) / (1 + spread)
    half = Z95 * math.sqrt(accuracy * (1 - accuracy) / trials + spread / (4 * trials)) / (1 + spread)
    return max(0.0, center - half), min(1.0, center + half)


def average_interval(values: Sequence[float], intervals: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """
    95% interval of the unweighted average of independent `values` from their own `intervals`: the distances to the
    lower limits are added in squares, and so are those to the upper ones (Zou & Donner 2008).
    """
    average = sum(values) / len(values)
    below = math.sqrt(sum((value - low) ** 2 for value, (low, _) in zip(values, intervals, strict=True)))
    above = math.sqrt(sum((high - value) ** 2 for value, (_, high) in zip(values, intervals, strict=True)))
    return max(0.0, average - below / len(values)), min(1.0, average + above / len(values))
