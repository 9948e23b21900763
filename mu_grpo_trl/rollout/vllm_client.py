"""The vLLM engine: prompt groups over HTTP to one or several servers, managed or external."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import queue
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import numpy as np

from . import vllm_wire as wire
from .engine import EngineError, GroupRequest, GroupResult, SamplingParams
from .vllm_checks import check_server
from .vllm_process import ManagedServer, preflight
from .vllm_server import ClientOptions, Dispatch, Server, ServerFailure, retried

logger = logging.getLogger(__name__)
T = TypeVar("T")

_FINGERPRINT = [1, 2, 3, 5, 4, 3, 2, 1]
"""Tokens whose log-probs tell one policy from another."""
_SAME_WEIGHTS = 1e-3
"""Nats. Where half precision differs by more, answers in flight are asked for again, which costs time only."""


class VLLMEngine:
    """
    Samples from vLLM servers side by side. Implements [`~mu_grpo_trl.rollout.engine.Engine`].

    Groups go to the server with the fewest in flight. A group whose request fails for a passing reason is asked again,
    alone; a managed server that died or froze is started again with the same policy, an external one that comes back
    is given the policy again. Nothing is handed out twice, because a group is handed out only by its one task.

    Args:
        servers (`list[ManagedServer]` or `list[str]`): servers to start, or addresses of running ones.
        options (`ClientOptions`): checks and limits.
        python (`str` or None): interpreter of the managed servers, looked at by [`check`].
    """

    name = "vllm"

    def __init__(
        self, servers: list[ManagedServer] | list[str], options: ClientOptions, python: str | None = None
    ) -> None:
        if not servers:
            raise ValueError("`servers` is empty: give the addresses of running servers, or servers to start.")
        self.version = ""
        self._options = options
        self._python = python
        self._servers = [Server(server, options) for server in servers]
        self._policy: Path | None = None
        self._policy_version = ""
        self._loop: _LoopThread | None = _LoopThread()
        # One thread beside the event loop: reading JSON holds the interpreter, so that more would wait for each other.
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="vllm-answers")

    def check(self) -> None:
        """
        Fail early, before any model is loaded: managed servers' interpreter, external servers' health and settings.

        Raises:
            [`EngineError`]: naming what is wrong with which server.
        """
        if self._python is not None:
            self.version = preflight(self._python)
        self._run(_gather(self._check_server(server) for server in self._servers if server.managed is None))

    def open(self, policy: Path, policy_version: str) -> None:
        """
        Start or wake the servers with the weights in `policy`, and check that they do what training needs.

        Raises:
            [`ServerUnreachable`]: when a server does not become healthy within `connection_timeout_s`.
            [`EngineError`]: when a server cannot start, load the weights, or answer as needed.
        """
        self._policy, self._policy_version = policy.resolve(), policy_version
        self._run(_gather(self._open_server(server) for server in self._servers))

    def score(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """
        Log-probs (float32 `(len − 1,)` each) of tokens 1… of each sequence, from the loaded weights, at temperature 1:
        vLLM never scales those of a prompt. Every server is asked, and they must agree.

        Raises:
            [`EngineError`]: when two servers differ by more than `agreement_tolerance`.
        """
        scores = self._run(_gather(self._score_on(server, sequences) for server in self._servers))
        for server, others in zip(self._servers[1:], scores[1:], strict=True):
            gap = np.nanmean(np.abs(np.concatenate(others) - np.concatenate(scores[0])))
            if not gap <= self._options.agreement_tolerance:
                raise EngineError(
                    f"{server.url} and {self._servers[0].url} give the same tokens log-probs that differ by {gap:.4g} "
                    f"nats on average (limit {self._options.agreement_tolerance:g}): one of them has other weights."
                )
        return scores[0]

    def generate(self, requests: Iterable[GroupRequest], sampling: SamplingParams) -> Iterator[GroupResult]:
        """
        Answer the requests, yielding groups as they finish, in any order. `requests` is read only as far as needed.

        Raises:
            [`ServerUnreachable`]: when an external server is gone.
            [`EngineError`]: when a group cannot be answered, or none was finished for `progress_timeout_s`.
        """
        slots = max(1, self._options.concurrency // sampling.num_generations)
        dispatch = Dispatch(self._servers, slots)
        waiting = iter(requests)
        done: queue.SimpleQueue[concurrent.futures.Future[GroupResult]] = queue.SimpleQueue()
        pending: set[concurrent.futures.Future[GroupResult]] = set()
        loop = self._require_loop()
        loop.submit(_gather(self._watch(server) for server in self._servers))
        try:
            while True:
                # Twice as many as the servers take, so that they stay busy while the caller handles a result.
                for request in itertools.islice(waiting, 2 * slots * len(self._servers) - len(pending)):
                    future = loop.submit(self._answer(request, sampling, dispatch))
                    pending.add(future)
                    future.add_done_callback(done.put)
                if not pending:
                    return
                finished = self._next_finished(done)
                pending.remove(finished)
                yield finished.result()
        finally:
            if loop is self._loop:
                loop.cancel_all()

    def release(self) -> None:
        """Free the device as `release` says; external servers keep running."""
        running = [server for server in self._servers if server.managed is not None and server.managed.alive]
        if self._options.release == "stop":
            self._run(_gather(server.stop() for server in running))
        elif self._options.release == "sleep":
            self._run(_gather(server.sleep() for server in running))

    def close(self) -> None:
        """Stop managed servers and the client's thread; may be called again."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        managed = [server.managed for server in self._servers if server.managed is not None]
        for process in managed:
            process.stop()
        loop.cancel_all()
        loop.run(_gather(server.disconnect() for server in self._servers))
        loop.stop()
        self._reading.shutdown()
        for process in managed:  # one that was just being started again on the loop's threads
            process.stop()

    def _require_loop(self) -> _LoopThread:
        if self._loop is None:
            raise EngineError("The vLLM engine is closed; make a new one.")
        return self._loop

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            loop = self._require_loop()
        except EngineError:
            work.close()
            raise
        return loop.run(work)

    def _require_policy(self) -> Path:
        if self._policy is None:
            raise EngineError("The vLLM engine has no policy loaded; call `open` first.")
        return self._policy

    async def _open_server(self, server: Server) -> None:
        policy = self._require_policy()
        server.restarts_left = self._options.max_restarts
        if server.managed is not None and not server.managed.alive:
            await server.start(policy)
        else:
            await server.wait_until_healthy()
            await server.load(policy)
        await self._check_server(server)
        if server.managed is None:
            server.fingerprint = (await self._score_on(server, [_FINGERPRINT]))[0]

    async def _check_server(self, server: Server) -> None:
        self.version = await check_server(server, self._options.context_length)

    async def _score_on(self, server: Server, sequences: list[list[int]]) -> list[np.ndarray]:
        self._require_policy()
        bodies = [wire.scoring_body(sequence, server.model, self._policy_version) for sequence in sequences]
        answers = await _gather(server.complete(body) for body in bodies)
        return [wire.parse_scores(raw, sequence) for raw, sequence in zip(answers, sequences, strict=True)]

    async def _answer(self, request: GroupRequest, sampling: SamplingParams, dispatch: Dispatch) -> GroupResult:
        self._require_policy()

        async def ask() -> GroupResult:
            async with dispatch.slot() as server:
                body = wire.generation_body(request, sampling, server.model, self._policy_version)
                epoch, weights = server.epoch, server.weights
                try:
                    raw = await server.post("/v1/completions", body)
                except (aiohttp.ClientError, OSError) as error:
                    await self._recover(server, epoch, dispatch)
                    raise ServerFailure(f"{server.url}: {type(error).__name__}: {error}") from error
                async with server.recovery:  # what another connection broke for may have changed the weights
                    if server.weights != weights:
                        raise ServerFailure(f"{server.url} had other weights when it answered")
            vocab_size = self._options.vocab_size
            arguments = raw, request, sampling, server.model, vocab_size
            parsed = asyncio.get_running_loop().run_in_executor(self._reading, wire.parse_generation, *arguments)
            return GroupResult(request.group, await parsed)

        return await retried(f"Group {request.group}", ask, self._options)

    async def _recover(self, server: Server, epoch: int, dispatch: Dispatch) -> None:
        """After a broken connection: have `server` healthy with the policy; the first to notice does it for all."""
        async with server.recovery:
            if server.epoch != epoch:
                return
            server.available = False
            if server.managed is None:
                await server.wait_until_healthy()
                scores = await self._score_on(server, [_FINGERPRINT])
                if not np.allclose(scores[0], server.fingerprint, rtol=0, atol=_SAME_WEIGHTS, equal_nan=True):
                    server.weights += 1  # it was started again, with its first ones
                await server.load(self._require_policy())
            elif not await server.survives():
                await self._restart(server)
            server.epoch += 1
            await dispatch.put_back(server)

    async def _restart(self, server: Server) -> None:
        assert server.managed is not None
        failure = server.managed.describe_failure()
        if server.restarts_left == 0:
            raise EngineError(f"{server.url} died {self._options.max_restarts + 1} times in this stage. {failure}")
        server.restarts_left -= 1
        logger.warning("Starting %s again. %s", server.url, failure)
        await server.start(self._require_policy())
        await self._check_server(server)

    async def _watch(self, server: Server) -> None:
        """Cut off the requests of a server that stopped answering `/health` (frozen, or unreachable)."""
        last_healthy = time.monotonic()
        while True:
            await asyncio.sleep(self._options.connection_timeout_s / 10)
            if server.recovery.locked() or await server.is_healthy():
                last_healthy = time.monotonic()
            elif time.monotonic() - last_healthy > self._options.connection_timeout_s:
                await server.cut_off()
                last_healthy = time.monotonic()

    def _next_finished(
        self, done: queue.SimpleQueue[concurrent.futures.Future[GroupResult]]
    ) -> concurrent.futures.Future[GroupResult]:
        while True:
            try:
                return done.get(timeout=self._options.progress_timeout_s)
            except queue.Empty:
                if any(server.recovery.locked() for server in self._servers):
                    continue  # starting a server may take longer, and has a limit of its own
                states = "; ".join(server.describe() for server in self._servers)
                raise EngineError(
                    f"No prompt group finished for {self._options.progress_timeout_s:g} s ({states}). Raise "
                    "`rollout_timeout_s` if responses take longer than that."
                ) from None


class _LoopThread:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-client", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        future = self.submit(work)
        try:
            return future.result()
        finally:
            future.cancel()

    def cancel_all(self) -> None:
        """Cancel what was submitted, and wait until it has ended."""
        self.run(self._cancel_all())

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    @staticmethod
    async def _cancel_all() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)


async def _gather(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; the first failure cancels the rest."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
