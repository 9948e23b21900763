"""Cut one update into micro-batches. Pure: no randomness, no distributed state.

Sorted by length, rows of a micro-batch are nearly equal, so padding is small. Cuts are then chosen as few as the
padding limit allows, and the micro-batches shared out so that all ranks carry the same cost; only where that fails
are they cut finer.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

IMBALANCE_GOAL = 0.02
SHARING_GAIN = 0.9
"""Prompts are shared once that brings the estimated cost of an update below this share of what it was."""
# From coarse to fine: (limit of the padding share, a rank's mean load over the costliest micro-batch's cost).
_CUTS = ((0.04, 1), (0.02, 2), (0.01, 2), (0.005, 3))


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """Which rank forwards which rows of an update, and in which micro-batch.

    Args:
        microbatches (`list[list[list[int]]]`): `microbatches[rank][i]` are row numbers, longest row first. Every rank
            has the same number of micro-batches, at least one; the costly ones come first, so that index i costs
            about the same on all ranks; missing ones are empty lists at the end.
        forwarded_tokens (`int`): tokens that all ranks together forward, padding included.
        padding_share (`float`): padding tokens over forwarded tokens.
        imbalance (`float`): cost of the costliest rank over the mean cost, minus 1.
    """

    microbatches: list[list[list[int]]]
    forwarded_tokens: int
    padding_share: float
    imbalance: float


@dataclass(frozen=True, slots=True)
class _Limits:
    max_tokens: int
    max_rows: int
    attention_cost: float
    padding_free: bool

    def row_cost(self, length: int) -> float:
        return length + self.attention_cost * length * length

    def cost(self, lengths: Sequence[int]) -> float:
        """Cost of a micro-batch whose rows have `lengths`, at least one."""
        if self.padding_free:
            return sum(map(self.row_cost, lengths))
        return len(lengths) * self.row_cost(max(lengths))

    def holds(self, lengths: Sequence[int]) -> bool:
        """Whether rows of `lengths` fit into one micro-batch; one row always does."""
        tokens = sum(lengths) if self.padding_free else len(lengths) * max(lengths)
        return len(lengths) == 1 or (len(lengths) <= self.max_rows and tokens <= self.max_tokens)


def plan_update(
    lengths: Sequence[int] | np.ndarray,
    num_ranks: int,
    max_tokens_per_microbatch: int,
    max_rows_per_microbatch: int | None = None,
    padding_free: bool = False,
    attention_cost: float = 0.0,
    sort_by_length: bool = True,
) -> UpdatePlan:
    """Plan the micro-batches of one update.

    Args:
        lengths (int `(rows,)`): tokens of the rows to forward, prompt and completion: the update's responses of
            nonzero advantage, or bundles of them.
        num_ranks (`int`): data-parallel ranks.
        max_tokens_per_microbatch (`int`): limit on rows × longest row (on the sum of lengths if `padding_free`). A
            row that alone exceeds it gets a micro-batch of its own.
        max_rows_per_microbatch (`int`, *optional*): limit on the rows of a micro-batch.
        padding_free (`bool`, defaults to `False`): rows are packed, so padding costs nothing.
        attention_cost (`float`, defaults to `0.0`): weight of the quadratic term: a row of length L costs
            L + attention_cost · L² when ranks are balanced (about 1 / (12 · hidden size) for a dense causal model).
        sort_by_length (`bool`, defaults to `True`): False keeps the rows in order, in equal numbers per rank, as a
            trainer without a plan would have them; for comparison.

    Returns:
        [`UpdatePlan`]: the same one for the same arguments, on every rank.

    Raises:
        ValueError: a length, limit or number of ranks is out of range.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    max_rows = max(lengths.size, 1) if max_rows_per_microbatch is None else max_rows_per_microbatch
    limits = _Limits(max_tokens_per_microbatch, max_rows, attention_cost, padding_free)
    _check(lengths, num_ranks, limits)
    order = np.argsort(-lengths, kind="stable").tolist() if sort_by_length else list(range(lengths.size))
    ordered = lengths[order].tolist()
    share = _share_in_order if not sort_by_length else _share_packed if padding_free else _share_padded
    ranks = share(ordered, num_ranks, limits) if ordered else [[] for _ in range(num_ranks)]

    def cost(rows: list[int]) -> float:
        return limits.cost([ordered[i] for i in rows])

    real = sum(ordered)
    padded = sum(len(rows) * max(ordered[i] for i in rows) for batches in ranks for rows in batches)
    forwarded = real if padding_free else padded
    loads = [sum(map(cost, batches)) for batches in ranks]
    count = max(1, *map(len, ranks))
    for batches in ranks:
        batches.sort(key=cost, reverse=True)
        batches += [[] for _ in range(count - len(batches))]
    return UpdatePlan(
        microbatches=[[[order[i] for i in rows] for rows in batches] for batches in ranks],
        forwarded_tokens=forwarded,
        padding_share=1 - real / forwarded if forwarded else 0.0,
        imbalance=max(loads) * num_ranks / sum(loads) - 1 if forwarded else 0.0,
    )


def bundle_responses(
    groups: Sequence[int] | np.ndarray,
    prompt_lengths: Sequence[int] | np.ndarray,
    completion_lengths: Sequence[int] | np.ndarray,
    max_tokens: int,
    attention_cost: float = 0.0,
    share_prompts: bool | None = None,
) -> list[list[int]]:
    """Which responses of an update go through the model behind one copy of their prompt.

    A bundle of n responses is one row of P − 1 + Σ (T + 1) tokens (see [`~mu_grpo_trl.stage.collate.collate`]) in
    place of n rows of P + T, but its attention is dense: it pays where prompts are long beside the responses.

    Args:
        groups, prompt_lengths, completion_lengths (int `(responses,)`): prompt group of each response, ascending, P
            and T.
        max_tokens (`int`): limit on a bundle of several responses.
        attention_cost (`float`): as in [`plan_update`].
        share_prompts (`bool`, *optional*): wherever it is possible, never, or (by default) in updates where it pays.

    Returns:
        `list[list[int]]`: numbers of the responses in each bundle; every response is in one, in order.
    """
    lengths = np.asarray(prompt_lengths, dtype=np.int64) + np.asarray(completion_lengths, dtype=np.int64)
    alone = [[i] for i in range(lengths.size)]
    if share_prompts is False:
        return alone
    bundles: list[list[int]] = []
    room = 0
    for i in range(lengths.size):
        added = int(completion_lengths[i]) + 1
        if bundles and groups[bundles[-1][-1]] == groups[i] and added <= room:
            bundles[-1].append(i)
            room -= added
        else:
            bundles.append([i])
            room = max_tokens - int(lengths[i])

    def cost(bundle: list[int]) -> float:
        length = bundle_length(bundle, prompt_lengths, completion_lengths)
        return length + (2 if len(bundle) > 1 else 1) * attention_cost * length * length

    if share_prompts is None and sum(map(cost, bundles)) > SHARING_GAIN * sum(map(cost, alone)):
        return alone
    return bundles


def bundle_length(
    bundle: Sequence[int],
    prompt_lengths: Sequence[int] | np.ndarray,
    completion_lengths: Sequence[int] | np.ndarray,
) -> int:
    """Tokens of the row that a bundle becomes."""
    shared = int(prompt_lengths[bundle[0]]) - 1 if bundle else 0
    return shared + sum(int(completion_lengths[i]) + 1 for i in bundle)


def _check(lengths: np.ndarray, num_ranks: int, limits: _Limits) -> None:
    if lengths.ndim != 1 or (lengths.size and lengths.min() < 1):
        raise ValueError(f"lengths {lengths.tolist()}: a plan needs one positive length per row.")
    if num_ranks < 1 or limits.max_tokens < 1 or limits.max_rows < 1 or limits.attention_cost < 0:
        raise ValueError(f"num_ranks={num_ranks}, {limits}: ranks and limits start at 1, the attention cost at 0.")


def _share_padded(ordered: list[int], num_ranks: int, limits: _Limits) -> list[list[list[int]]]:
    """Micro-batches of neighbours in length: per rank, lists of positions in `ordered` (lengths, longest first)."""
    longest = limits.row_cost(ordered[0])
    total = sum(map(limits.row_cost, ordered))
    best: list[list[list[int]]] = []
    best_load = float("inf")
    for padding_limit, parts in _CUTS if num_ranks > 1 else _CUTS[:1]:
        max_cost = max(longest, 1.05 * total / num_ranks / parts) if num_ranks > 1 else float("inf")
        cuts = _cut_fewest(ordered, padding_limit, max_cost, limits)
        costs = [(stop - start) * limits.row_cost(ordered[start]) for start, stop in cuts]
        goal = max(longest, (1 + IMBALANCE_GOAL) * sum(costs) / num_ranks)
        bins, load = _balance(costs, num_ranks, -(-len(costs) // num_ranks), goal)
        if load < best_load:
            best_load = load
            best = [[list(range(*cuts[i])) for i in members] for members in bins]
        if load <= goal:
            break
    return best


def _share_in_order(lengths: list[int], num_ranks: int, limits: _Limits) -> list[list[list[int]]]:
    """Equal numbers of rows per rank, cut where a micro-batch is full."""
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for rank, rows in enumerate(np.array_split(np.arange(len(lengths)), num_ranks)):
        for row in rows.tolist():
            if ranks[rank] and limits.holds([lengths[i] for i in [*ranks[rank][-1], row]]):
                ranks[rank][-1].append(row)
            else:
                ranks[rank].append([row])
    return ranks


def _share_packed(ordered: list[int], num_ranks: int, limits: _Limits) -> list[list[list[int]]]:
    """As `_share_padded`, without padding to mind: balance the rows themselves, then pack each rank's first-fit."""
    costs = list(map(limits.row_cost, ordered))
    bins, _ = _balance(costs, num_ranks, len(costs), (1 + IMBALANCE_GOAL) * sum(costs) / num_ranks)
    return [_pack(sorted(members), ordered, limits) for members in bins]


def _pack(rows: list[int], ordered: list[int], limits: _Limits) -> list[list[int]]:
    packs: list[list[int]] = []
    room: list[int] = []
    for row in rows:
        length = ordered[row]
        fitting = (i for i, pack in enumerate(packs) if room[i] >= length and len(pack) < limits.max_rows)
        chosen = next(fitting, len(packs))
        if chosen == len(packs):
            packs.append([])
            room.append(limits.max_tokens)
        packs[chosen].append(row)
        room[chosen] -= length
    return packs


def _cut_fewest(ordered: list[int], padding_limit: float, max_cost: float, limits: _Limits) -> list[tuple[int, int]]:
    """About the fewest cuts whose padding stays under the limit, by bisecting the padding of one micro-batch."""
    real = sum(ordered)
    low, high = 0.0, real * padding_limit
    best = _cut(ordered, low, max_cost, limits)
    for _ in range(8):
        middle = (low + high) / 2
        cuts = _cut(ordered, middle, max_cost, limits)
        forwarded = sum((stop - start) * ordered[start] for start, stop in cuts)
        if forwarded - real <= padding_limit * forwarded:
            low, best = middle, cuts
        else:
            high = middle
    return best


def _cut(ordered: list[int], max_padding: float, max_cost: float, limits: _Limits) -> list[tuple[int, int]]:
    """Cut greedily into (start, stop) ranges within the limits, each with at most `max_padding` padding tokens."""
    cuts = []
    start, padding, rows_fitting = 0, 0, 0
    for i, length in enumerate(ordered):
        padding += ordered[start] - length
        if i == start + rows_fitting or padding > max_padding:
            if i:
                cuts.append((start, i))
            start, padding = i, 0
            by_cost = len(ordered) if max_cost == float("inf") else int(max_cost / limits.row_cost(length))
            rows_fitting = max(1, min(limits.max_tokens // length, limits.max_rows, by_cost))
    cuts.append((start, len(ordered)))
    return cuts


def _balance(costs: Sequence[float], num_ranks: int, capacity: int, goal: float) -> tuple[list[list[int]], float]:
    """Share items out to ranks, at most `capacity` to each, costliest first to the least loaded; then swap until the
    highest load is within `goal` or no swap helps. Returns each rank's items and the highest load."""
    bins: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [0.0] * num_ranks
    heap = [(0.0, rank) for rank in range(num_ranks)]
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        _, rank = heapq.heappop(heap)
        bins[rank].append(item)
        load[rank] += costs[item]
        if len(bins[rank]) < capacity:
            heapq.heappush(heap, (load[rank], rank))
    for _ in range(2 * num_ranks):
        top = max(range(num_ranks), key=load.__getitem__)
        swap = _best_swap(bins, load, costs, top, capacity) if load[top] > goal else None
        if swap is None:
            break
        other, given, taken = swap
        moved = costs[given] - (costs[taken] if taken is not None else 0.0)
        bins[top].remove(given)
        bins[other].append(given)
        if taken is not None:
            bins[other].remove(taken)
            bins[top].append(taken)
        load[top] -= moved
        load[other] += moved
    return bins, max(load)


def _best_swap(
    bins: list[list[int]], load: list[float], costs: Sequence[float], top: int, capacity: int
) -> tuple[int, int, int | None] | None:
    """The swap of an item of `top` for one, or none, of a rank below the mean that lowers their higher load most."""
    lowest, best = load[top], None
    mean = sum(load) / len(load)
    for other in range(len(bins)):
        if load[other] >= mean:
            continue
        options: list[int | None] = [*bins[other]] if len(bins[other]) >= capacity else [*bins[other], None]
        for taken in options:
            returned = costs[taken] if taken is not None else 0.0
            for given in bins[top]:
                moved = costs[given] - returned
                highest = max(load[top] - moved, load[other] + moved)
                if moved > 0 and highest < lowest:
                    lowest, best = highest, (other, given, taken)
    return best
