"""What a stage holds, in one pass over its rows: rewards, solve rates, lengths, the best and the worst responses."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..stage.reader import StageReader, StageSummary

GROUPS_AT_ONCE = 1024
MOST_DISTINCT_REWARDS = 12
NUM_BINS = 10
QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True)
class Example:
    """Where a response is, and how it was judged."""

    group: int
    sample: int
    reward: float
    advantage: float


@dataclass(frozen=True)
class StageView:
    """
    A stage as a person wants to see it.

    Args:
        summary (`StageSummary`): its totals.
        right_at (`float`): reward from which a response counts as right; an unscorable one never does.
        rewards (`list[tuple[str, int]]`): responses by reward, in ascending order: by its value where there are at
            most `MOST_DISTINCT_REWARDS`, else in bins of equal width.
        groups_by_right (`list[int]` of length G + 1): groups with 0, 1, …, G right responses.
        lengths (`list[tuple[str, int]]`): responses by number of tokens, in bins of equal width.
        length_quantiles (`dict[float, int]`): the shortest length that this share of the responses does not exceed.
        mean_length_right (`float`), mean_length_wrong (`float`): NaN where there are none.
        truncated (`int`): responses that the token limit cut.
        best (`list[Example]`): of the highest reward, and of those with the highest advantage: right where most of
            the group is wrong.
        worst (`list[Example]`): of the lowest reward, and of those with the lowest advantage.
    """

    summary: StageSummary
    right_at: float
    rewards: list[tuple[str, int]]
    groups_by_right: list[int]
    lengths: list[tuple[str, int]]
    length_quantiles: dict[float, int]
    mean_length_right: float
    mean_length_wrong: float
    truncated: int
    best: list[Example]
    worst: list[Example]

    @property
    def all_wrong(self) -> int:
        """Groups without a right response."""
        return self.groups_by_right[0]

    @property
    def all_right(self) -> int:
        """Groups without a wrong response."""
        return self.groups_by_right[-1]

    @property
    def mixed(self) -> int:
        """The other groups."""
        return sum(self.groups_by_right[1:-1])


def view_stage(reader: StageReader, right_at: float = 1.0, num_examples: int = 2) -> StageView:
    """
    Look at the groups that are there. Memory does not grow with the stage but for 8 bytes a group.

    Args:
        reader (`StageReader`): with at least one group.
        right_at (`float`): reward from which a response counts as right.
        num_examples (`int`): how many of the best and of the worst responses to find.
    """
    size = reader.manifest.num_generations
    groups_by_right = np.zeros(size + 1, dtype=np.int64)
    length_counts = np.zeros(1, dtype=np.int64)
    tokens, responses = np.zeros(2), np.zeros(2)  # of the wrong, of the right
    truncated = 0
    distinct: Counter[float] = Counter()
    best: list[tuple[tuple[float, ...], Example]] = []
    worst: list[tuple[tuple[float, ...], Example]] = []
    for groups in _chunks(reader.groups):
        rewards, advantages = reader.rewards(groups), reader.advantages(groups)
        lengths, right = reader.lengths(groups)[1], rewards >= right_at
        groups_by_right += np.bincount(right.sum(axis=1), minlength=size + 1)
        length_counts = _add(length_counts, np.bincount(lengths.ravel()))
        for kind in (0, 1):
            tokens[kind] += lengths[right == kind].sum()
            responses[kind] += (right == kind).sum()
        truncated += int(reader.truncated(groups).sum())
        if len(distinct) <= MOST_DISTINCT_REWARDS:
            values, counts = np.unique(rewards[~np.isnan(rewards)], return_counts=True)
            distinct.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        _keep(best, groups, rewards, advantages, num_examples, sign=1)
        _keep(worst, groups, rewards, advantages, num_examples, sign=-1)
    with np.errstate(invalid="ignore"):
        mean_wrong, mean_right = (tokens / responses).tolist()
    return StageView(
        summary=reader.summary(),
        right_at=right_at,
        rewards=_reward_histogram(reader, distinct),
        groups_by_right=groups_by_right.tolist(),
        lengths=_length_histogram(length_counts),
        length_quantiles=_quantiles(length_counts),
        mean_length_right=mean_right,
        mean_length_wrong=mean_wrong,
        truncated=truncated,
        best=[example for _, example in sorted(best, key=lambda kept: kept[0], reverse=True)],
        worst=[example for _, example in sorted(worst, key=lambda kept: kept[0], reverse=True)],
    )


def _chunks(groups: np.ndarray) -> Iterator[np.ndarray]:
    return (groups[start : start + GROUPS_AT_ONCE] for start in range(0, len(groups), GROUPS_AT_ONCE))


def _add(counts: np.ndarray, more: np.ndarray) -> np.ndarray:
    total = np.zeros(max(len(counts), len(more)), dtype=np.int64)
    total[: len(counts)] += counts
    total[: len(more)] += more
    return total


def _keep(
    kept: list[tuple[tuple[float, ...], Example]],
    groups: np.ndarray,
    rewards: np.ndarray,
    advantages: np.ndarray,
    count: int,
    sign: int,
) -> None:
    """Keep the `count` scored responses of the largest (`sign` 1) or smallest reward, then advantage, in a heap."""
    scored = np.argwhere(~np.isnan(rewards))
    first = -np.arange(len(scored))  # of equals, the one that comes first in the stage
    order = np.lexsort((first, sign * advantages[tuple(scored.T)], sign * rewards[tuple(scored.T)]))
    for row, sample in scored[order[::-1][:count]].tolist():
        example = Example(int(groups[row]), sample, float(rewards[row, sample]), float(advantages[row, sample]))
        rank = (sign * example.reward, sign * example.advantage, -example.group, -sample)
        (heapq.heappush if len(kept) < count else heapq.heappushpop)(kept, (rank, example))


def _reward_histogram(reader: StageReader, distinct: Counter[float]) -> list[tuple[str, int]]:
    if len(distinct) <= MOST_DISTINCT_REWARDS:
        return [(f"{value:g}", distinct[value]) for value in sorted(distinct)]
    extremes = [_extremes(reader.rewards(groups)) for groups in _chunks(reader.groups)]
    low, high = min(low for low, _ in extremes), max(high for _, high in extremes)
    edges = np.linspace(low, high, NUM_BINS + 1)
    counts = np.zeros(NUM_BINS, dtype=np.int64)
    for groups in _chunks(reader.groups):
        rewards = reader.rewards(groups)
        counts += np.histogram(rewards[~np.isnan(rewards)], edges)[0]
    return [(f"{a:.3g}–{b:.3g}", int(count)) for a, b, count in zip(edges, edges[1:], counts, strict=False)]


def _extremes(rewards: np.ndarray) -> tuple[float, float]:
    scored = rewards[~np.isnan(rewards)]
    return (float(scored.min()), float(scored.max())) if scored.size else (np.inf, -np.inf)


def _length_histogram(counts: np.ndarray) -> list[tuple[str, int]]:
    lengths = np.flatnonzero(counts)
    first, last = int(lengths[0]), int(lengths[-1])
    width = -(-(last - first + 1) // NUM_BINS)
    starts = range(first, last + 1, width)
    names = [f"{start}–{min(start + width - 1, last)}" if width > 1 else str(start) for start in starts]
    return [(name, int(counts[start : start + width].sum())) for name, start in zip(names, starts, strict=True)]


def _quantiles(counts: np.ndarray) -> dict[float, int]:
    cumulative = np.cumsum(counts)
    total = int(cumulative[-1])
    return {share: int(np.searchsorted(cumulative, max(1, np.ceil(share * total)))) for share in QUANTILES}
