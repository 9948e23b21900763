"""Signs of a collapsing policy in the diagnostics of its updates (paper Sections 3.2 and 3.3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from .losses import SUM_NAMES


@dataclass(frozen=True)
class Sign:
    """
    A figure of the last updates that should not pass a limit.

    Args:
        name (`str`): as the log calls it.
        total (`str`), count (`str`): entries of `SUM_NAMES`; the figure is the one over the other.
        limit (`float`): what it should not fall below, or rise above; None never alarms.
        falls (`bool`): which of the two.
        meaning (`str`): what it tells, and what to do.
    """

    name: str
    total: str
    count: str
    limit: float | None
    falls: bool
    meaning: str

    def passed(self, figure: float) -> bool:
        """Whether `figure` is beyond the limit."""
        return self.limit is not None and (figure < self.limit if self.falls else figure > self.limit)


class CollapseWatch:
    """
    Looks at the last `window` updates of a stage, and alarms once when a figure passes its limit: again only after it
    came back. At the start of a stage the policy is β and every ratio 1, so each stage is looked at by itself.

    Args:
        window (`int`): updates that a figure is taken over.
        min_negative_ratio (`float` or None): E[ρ | A<0] may not sink below it.
        max_veto_share (`float` or None): share of responses with a vetoed token, not to be exceeded.
        min_entropy (`float` or None): nats per token, where the entropy is computed.
    """

    def __init__(
        self, window: int, min_negative_ratio: float | None, max_veto_share: float | None, min_entropy: float | None
    ) -> None:
        self._signs = (
            Sign(
                "ratio/negative_mean", "negative_ratio", "negative_tokens", min_negative_ratio, True,
                "updates only push bad responses further down; lower the learning rate or `stage_updates`",
            ),
            Sign(
                "veto/response_fraction", "vetoed_responses", "responses", max_veto_share, False,
                "the policy has left the stage it learns from; lower the learning rate or `stage_updates`",
            ),
            Sign(
                "policy/entropy", "entropy", "entropy_tokens", min_entropy, True,
                "the policy hardly explores any more; raise `entropy_coef` or `temperature`",
            ),
        )  # fmt: skip
        self._updates: deque[dict[str, float]] = deque(maxlen=window)
        self._stage = -1
        self._alarmed: set[str] = set()

    def observe(self, update: int, stage: int, sums: Sequence[float]) -> list[str]:
        """
        Take in one update.

        Args:
            update (`int`): its number.
            stage (`int`): the stage it is in.
            sums (`Sequence[float]` of length `len(SUM_NAMES)`): its sums over all ranks.

        Returns:
            `list[str]`: one sentence for each figure that has passed its limit now.
        """
        if stage != self._stage:
            self._stage = stage
            self._updates.clear()
        self._updates.append(dict(zip(SUM_NAMES, sums, strict=True)))
        if len(self._updates) < (self._updates.maxlen or 1):
            return []
        return [alarm for sign in self._signs if (alarm := self._alarm(sign, update)) is not None]

    def _alarm(self, sign: Sign, update: int) -> str | None:
        count = sum(sums[sign.count] for sums in self._updates)
        if count == 0:
            return None
        figure = sum(sums[sign.total] for sums in self._updates) / count
        if not sign.passed(figure):
            self._alarmed.discard(sign.name)
            return None
        if sign.name in self._alarmed:
            return None
        self._alarmed.add(sign.name)
        return (
            f"Update {update}: `{sign.name}` is {figure:.4g} over the last {len(self._updates)} updates, "
            f"{'below' if sign.falls else 'above'} {sign.limit:g}: {sign.meaning}."
        )
