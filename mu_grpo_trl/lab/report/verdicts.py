"""What a verdict is, and the few rules that all verdicts are made of. Fixed before the laboratory was run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from .statistics import Estimate, share

Verdict = Literal["seen", "not_seen", "unclear"]

MIN_SEEDS = 5
"""With fewer seeds every verdict is `unclear`."""
MARGIN = 0.02
"""Differences of accuracy up to two points are small: accuracies that surely differ by less match."""
MOST = 0.8
"""A run-by-run effect is seen if at least this share of the seeds shows it, not seen if at most the rest does."""


ABOVE_RULE = (
    f"seen: the 95% interval of the paired difference lies above 0; not seen: it lies below {MARGIN}; else unclear."
)
CLOSE_RULE = (
    f"seen: the 95% interval of the paired difference lies within ±{MARGIN}; not seen: it lies outside; else unclear."
)
NOT_BELOW_RULE = (
    f"not seen: the 95% interval of the paired difference lies below 0; seen: it lies above −{MARGIN}; else unclear."
)
FASTER_RULE = "seen: the 95% interval of the paired ratio lies above 1; not seen: it lies below 1; else unclear."
IN_MOST_RULE = f"seen: in at least {MOST:.0%} of the seeds; not seen: in at most {1 - MOST:.0%}; else unclear."
IN_EVERY_RULE = "seen: in every seed; not seen: not in every seed."


def above(difference: Estimate) -> Verdict:
    """[`ABOVE_RULE`]: is the difference positive?"""
    if difference.num < MIN_SEEDS:
        return "unclear"
    return "seen" if difference.low > 0 else "not_seen" if difference.high < MARGIN else "unclear"


def close(difference: Estimate) -> Verdict:
    """[`CLOSE_RULE`]: is the difference surely small?"""
    if difference.num < MIN_SEEDS:
        return "unclear"
    if difference.low > -MARGIN and difference.high < MARGIN:
        return "seen"
    return "not_seen" if difference.low > MARGIN or difference.high < -MARGIN else "unclear"


def not_below(difference: Estimate) -> Verdict:
    """[`NOT_BELOW_RULE`]: is the first at least as good, up to the margin?"""
    if difference.num < MIN_SEEDS:
        return "unclear"
    return "not_seen" if difference.high < 0 else "seen" if difference.low > -MARGIN else "unclear"


def faster(ratio: Estimate) -> Verdict:
    """[`FASTER_RULE`]: is the ratio of times above 1?"""
    if ratio.num < MIN_SEEDS:
        return "unclear"
    return "seen" if ratio.low > 1 else "not_seen" if ratio.high < 1 else "unclear"


def in_most(hits: Sequence[bool]) -> Verdict:
    """[`IN_MOST_RULE`]: does the run-by-run effect occur as a rule?"""
    if len(hits) < MIN_SEEDS:
        return "unclear"
    rate = sum(hits) / len(hits)
    return "seen" if rate >= MOST - 1e-9 else "not_seen" if rate <= 1 - MOST + 1e-9 else "unclear"


def in_every(hits: Sequence[bool]) -> Verdict:
    """[`IN_EVERY_RULE`]: does the effect occur without exception?"""
    return "unclear" if len(hits) < MIN_SEEDS else "seen" if all(hits) else "not_seen"


def all_of(verdicts: Sequence[Verdict]) -> Verdict:
    """A claim of several parts: not seen if one part is not, seen if all are, else unclear."""
    if "not_seen" in verdicts:
        return "not_seen"
    return "seen" if verdicts and all(verdict == "seen" for verdict in verdicts) else "unclear"


def interval(value: Estimate) -> dict[str, Any]:
    """An estimate for `claims.json`; an end that does not exist is None."""
    return {
        "mean": value.mean if value.num else None,
        "low": value.low if value.num > 1 else None,
        "high": value.high if value.num > 1 else None,
        "num_seeds": value.num,
    }


def share_of(hits: Sequence[bool]) -> dict[str, Any]:
    """How many of the runs show the effect, with the exact interval of the share."""
    rate = share(sum(hits), len(hits))
    return {
        "hits": sum(hits),
        "num_seeds": len(hits),
        "share": rate.mean if hits else None,
        "low": rate.low,
        "high": rate.high,
    }
