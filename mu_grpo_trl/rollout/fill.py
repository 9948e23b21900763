"""Fill a stage: stream requests to the engine, score groups as they finish, append them to the store."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tqdm.auto import tqdm

from ..stage.schema import GroupRollout
from ..stage.writer import StageWriter
from .engine import Engine, GroupRequest, GroupResult, SamplingParams

FLUSH_GROUPS = 128
FLUSH_S = 60.0


class FillProgress:
    """Progress bar of a fill (groups, tokens/s, ETA, mean reward, truncated share), and the totals behind it."""

    def __init__(self, stage: int, num_groups: int, num_done: int, visible: bool) -> None:
        self.generated_tokens = 0
        self._responses = self._truncated = self._scored = 0
        self._reward = 0.0
        self._started = time.perf_counter()
        self._bar = tqdm(
            desc=f"stage {stage}: rollout", total=num_groups, initial=num_done, unit="group", disable=not visible,
            dynamic_ncols=True,
        )  # fmt: skip

    def add(self, rollout: GroupRollout) -> None:
        """Count one finished group."""
        for row in rollout.responses:
            self._responses += 1
            self.generated_tokens += len(row.completion_ids)
            self._truncated += row.finish_reason == "length"
            if row.reward is not None and math.isfinite(row.reward):
                self._scored += 1
                self._reward += row.reward
        elapsed_s = time.perf_counter() - self._started
        self._bar.set_postfix_str(
            f"{self.generated_tokens / elapsed_s:,.0f} tok/s, reward {self._reward / max(self._scored, 1):.3f}, "
            f"cut {self._truncated / max(self._responses, 1):.1%}",
            refresh=False,
        )
        self._bar.update()

    def close(self) -> None:
        """Leave the finished bar on the screen."""
        self._bar.close()


def fill_stage(
    engine: Engine,
    writer: StageWriter,
    batches: Iterable[list[GroupRequest] | Iterator[GroupRequest]],
    sampling: SamplingParams,
    score: Callable[[GroupResult], GroupRollout],
    progress: FillProgress,
    *,
    score_threads: int,
    check: Callable[[], None] = lambda: None,
    waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """
    Generate, score and store every group of `batches` that the writer does not have yet.

    Groups are scored on threads while the engine generates, and appended every `FLUSH_GROUPS` groups or `FLUSH_S`
    seconds. Whatever goes wrong, the groups scored so far are stored before the exception leaves.

    Args:
        engine (`Engine`): open, with the stage's policy loaded.
        writer (`StageWriter`): of the stage; groups it already has are skipped.
        batches (`Iterable`): requests by engine call. A batch is generated whole also when only some of it is missing,
            since the random numbers of an in-process batch depend on all of it.
        sampling (`SamplingParams`): of the stage.
        score (`Callable`): turns a finished group into the rows to store; called on threads.
        progress (`FillProgress`): told of every stored group.
        score_threads (`int`): groups scored at once.
        check (`Callable`): called between groups; raises when another rank has failed.
        waiting (`Callable`): context for the time spent waiting for rewards after the last group was generated.
    """
    scored: list[GroupRollout] = []
    pending: deque[Future[GroupRollout]] = deque()
    last_flush = time.monotonic()

    def collect(block: bool) -> None:
        while pending and (block or pending[0].done()):
            scored.append(pending.popleft().result())

    def flush() -> None:
        nonlocal last_flush
        rollouts, scored[:] = list(scored), []
        if rollouts:
            writer.append(rollouts)
            for rollout in rollouts:
                progress.add(rollout)
        last_flush = time.monotonic()

    with ThreadPoolExecutor(score_threads, thread_name_prefix="reward") as pool:
        try:
            for batch in batches:
                for result in engine.generate(batch, sampling):
                    check()
                    if result.group in writer.done_groups:
                        continue
                    pending.append(pool.submit(score, result))
                    collect(block=len(pending) > 4 * FLUSH_GROUPS)
                    if len(scored) >= FLUSH_GROUPS or time.monotonic() - last_flush > FLUSH_S:
                        flush()
            with waiting():
                collect(block=True)
        except BaseException:
            for future in pending:
                future.cancel()
            scored.extend(f.result() for f in pending if f.done() and not f.cancelled() and f.exception() is None)
            raise
        finally:
            flush()
