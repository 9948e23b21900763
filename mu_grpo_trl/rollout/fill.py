"""Fill a stage: stream requests to the engine, score groups as they finish, append them to the store."""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from ..stage.schema import GroupRollout
from ..stage.writer import StageWriter
from .engine import Completion, Engine, GroupRequest, GroupResult, SamplingParams

logger = logging.getLogger(__name__)

FLUSH_GROUPS = 128
FLUSH_S = 60.0
UNSCORED_PREFIX = "unscored-"


class FillProgress:
    """
    Progress bar of a fill (groups, tokens/s, mean reward, truncated share, ends of the rollout and of the run), and
    the totals behind it.

    Args:
        stage (`int`): its number.
        num_groups (`int`): groups of the stage.
        num_done (`int`): of those, the ones that were there before.
        visible (`bool`): whether to show the bar.
        run_ends (`Callable[[int], str]`): after so many groups of this fill, when the run will end, in words.
    """

    def __init__(
        self, stage: int, num_groups: int, num_done: int, visible: bool, run_ends: Callable[[int], str] = lambda _: ""
    ) -> None:
        self.generated_tokens = self.num_added = 0
        self._run_ends = run_ends
        self._responses = self._truncated = self._scored = 0
        self._reward = 0.0
        self._started = time.perf_counter()
        self._bar = tqdm(
            desc=f"stage {stage}: rollout", total=num_groups, initial=num_done, unit="group", disable=not visible,
            dynamic_ncols=True,
        )  # fmt: skip

    def add(self, rollout: GroupRollout) -> None:
        """Count one finished group."""
        self.num_added += 1
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
            f"cut {self._truncated / max(self._responses, 1):.1%}{self._run_ends(self.num_added)}",
            refresh=False,
        )
        self._bar.update()

    def close(self) -> None:
        """Leave the finished bar on the screen."""
        self._bar.close()


class UnscoredStore:
    """
    Groups that were generated but not scored when a fill failed, so that a reward function can be mended without
    generating them again: one file a rank, which only the same rank of as many takes up, since ranks share the groups.

    Args:
        writer (`StageWriter`): of the stage.
        num_ranks (`int`): that fill the stage.
    """

    def __init__(self, writer: StageWriter, num_ranks: int) -> None:
        share, fingerprint = f"r{writer.rank}of{num_ranks}", writer.manifest.fingerprint()
        self._path = writer.path / f"{UNSCORED_PREFIX}{share}-{fingerprint}.npz"

    def save(self, results: list[GroupResult]) -> None:
        """Store `results`, whole or not at all, in place of what there was."""
        completions = [completion for result in results for completion in result.completions]
        temporary = self._path.with_suffix(".tmp.npz")
        np.savez(
            temporary,
            groups=np.array([result.group for result in results], np.int64),
            sizes=np.array([len(result.completions) for result in results], np.int64),
            lengths=np.array([len(completion.token_ids) for completion in completions], np.int64),
            stopped=np.array([completion.finish_reason == "stop" for completion in completions], np.bool_),
            token_ids=np.concatenate([completion.token_ids for completion in completions]),
            logps=np.concatenate([completion.logps for completion in completions]),
        )
        os.replace(temporary, self._path)

    def load(self) -> list[GroupResult]:
        """What [`save`] stored; nothing if there is nothing."""
        if not self._path.exists():
            return []
        with np.load(self._path, allow_pickle=False) as arrays:
            ends = np.cumsum(arrays["lengths"])[:-1]
            pieces = zip(
                np.split(arrays["token_ids"], ends), np.split(arrays["logps"], ends), arrays["stopped"], strict=True
            )
            completions = (Completion(ids, logps, "stop" if stopped else "length") for ids, logps, stopped in pieces)
            return [
                GroupResult(int(group), list(itertools.islice(completions, int(size))))
                for group, size in zip(arrays["groups"], arrays["sizes"], strict=True)
            ]

    def clear(self) -> None:
        """Forget what was stored."""
        self._path.unlink(missing_ok=True)


def remove_unscored(stage: Path) -> None:
    """Delete what [`UnscoredStore`] left of any rank."""
    for path in stage.glob(f"{UNSCORED_PREFIX}*"):
        path.unlink()


def fill_stage(
    engine: Engine,
    writer: StageWriter,
    batches: Iterable[list[GroupRequest] | Iterator[GroupRequest]],
    sampling: SamplingParams,
    score: Callable[[GroupResult], GroupRollout],
    progress: FillProgress,
    *,
    score_threads: int,
    num_ranks: int = 1,
    check: Callable[[], None] = lambda: None,
    waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
    interruptible: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """
    Generate, score and store every group of `batches` that the writer does not have yet.

    Groups are scored on threads while the engine generates, and appended every `FLUSH_GROUPS` groups or `FLUSH_S`
    seconds. Whatever goes wrong, what was generated is stored before the exception leaves: scored groups in the stage,
    the others in [`UnscoredStore`], from where the next call takes them up.

    Args:
        engine (`Engine`): open, with the stage's policy loaded.
        writer (`StageWriter`): of the stage; groups it already has are skipped.
        batches (`Iterable`): requests by engine call, read after the unscored groups were. A list is generated whole
            also when only some of it is missing, since the random numbers of an in-process batch depend on all of it.
        sampling (`SamplingParams`): of the stage.
        score (`Callable`): turns a finished group into the rows to store; called on threads.
        progress (`FillProgress`): told of every stored group.
        score_threads (`int`): groups scored at once.
        num_ranks (`int`): that fill the stage, each its own `batches`.
        check (`Callable`): called between groups; raises when another rank has failed.
        waiting (`Callable`): context for the time spent waiting for rewards after the last group was generated.
        interruptible (`Callable`): context for the waits, on the engine and on rewards, in which an exception that a
            signal raises loses nothing.
    """
    fill = _Fill(writer, score, progress, score_threads, num_ranks, interruptible)
    try:
        fill.submit(fill.unscored.load())
        with waiting():
            fill.collect(until=0)
        fill.flush()
        for batch in batches:
            generated = _chunks(engine.generate(batch, sampling), whole=isinstance(batch, list))
            while results := _next(generated, interruptible):
                fill.submit(results)
                check()
                fill.collect(until=4 * FLUSH_GROUPS)
                fill.flush_if_due()
        with waiting():
            fill.collect(until=0)
        fill.flush()
        fill.unscored.clear()
    except BaseException:
        fill.rescue()
        raise
    finally:
        fill.close()


def _chunks(results: Iterator[GroupResult], whole: bool) -> Iterator[list[GroupResult]]:
    """What was generated in one go stays together, so that an error in scoring loses none of it."""
    if whole:
        yield list(results)
    else:
        yield from ([result] for result in results)


def _next(
    generated: Iterator[list[GroupResult]], interruptible: Callable[[], AbstractContextManager[Any]]
) -> list[GroupResult]:
    """What the engine gives next; nothing at its end."""
    with interruptible():
        return next(generated, [])


class _Fill:
    """Groups on their way from the engine to the stage."""

    def __init__(
        self,
        writer: StageWriter,
        score: Callable[[GroupResult], GroupRollout],
        progress: FillProgress,
        score_threads: int,
        num_ranks: int,
        interruptible: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._interruptible = interruptible
        self.unscored = UnscoredStore(writer, num_ranks)
        self._writer = writer
        self._score = score
        self._progress = progress
        self._pool = ThreadPoolExecutor(score_threads, thread_name_prefix="reward")
        self._pending: dict[Future[GroupRollout], GroupResult] = {}
        self._scored: list[GroupRollout] = []
        self._taken = set(writer.done_groups)
        self._last_flush = time.monotonic()

    def submit(self, results: list[GroupResult]) -> None:
        """Have those groups scored that the stage lacks, each once."""
        for result in results:
            if result.group not in self._taken:
                self._taken.add(result.group)
                self._pending[self._pool.submit(self._score, result)] = result

    def collect(self, until: int) -> None:
        """Take what is scored, and wait while more than `until` groups are not."""
        while True:
            for future in [future for future in self._pending if future.done()]:
                self._scored.append(future.result())
                del self._pending[future]
            if len(self._pending) <= until:
                return
            with self._interruptible():
                wait(self._pending, return_when=FIRST_COMPLETED)

    def flush_if_due(self) -> None:
        if len(self._scored) >= FLUSH_GROUPS or time.monotonic() - self._last_flush > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Append what is scored to the stage."""
        rollouts, self._scored = self._scored, []
        self._writer.append(rollouts)
        for rollout in rollouts:
            self._progress.add(rollout)
        self._last_flush = time.monotonic()

    def rescue(self) -> None:
        """After an error: store what was generated, scored or not. A second error is only logged."""
        unscored = []
        for future, result in self._pending.items():
            if future.cancel() or not future.done() or future.exception() is not None:
                unscored.append(result)
            else:
                self._scored.append(future.result())
        try:
            self.flush()
            if unscored:
                self.unscored.save(unscored)
        except (OSError, ValueError) as error:
            logger.warning("Groups generated since the last flush are lost: %s", error)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
