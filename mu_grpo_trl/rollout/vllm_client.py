"""The vLLM engine: prompt groups over HTTP to one or several servers, managed or external."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import queue
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import aiohttp
import numpy as np

from . import vllm_wire as wire
from .engine import EngineError, GroupRequest, GroupResult, SamplingParams
from .vllm_process import ManagedServer, check_version, preflight
from .vllm_server import Dispatch, Server, ServerFailure, ServerUnreachable

logger = logging.getLogger(__name__)
T = TypeVar("T")

_MAX_BACKOFF_S = 30.0
_RANKING_PROMPTS = ([1], [2, 3], [3, 1, 2], [5, 4, 3, 2, 1])
_READABLE_GAP = (1e-3, 50.0)
_RANKING_TOLERANCE = 0.15
_MODE_ADVICE = "Start it with `--logprobs-mode processed_logprobs`."


@dataclass(frozen=True)
class ClientOptions:
    """
    What the client checks and how long it waits.

    Args:
        vocab_size (`int`): of the trainer's model; a token id beyond it is an error.
        context_length (`int`): limit on prompt and response together, in tokens; servers must allow as much.
        concurrency (`int`): responses in flight per server.
        release (`"sleep"`, `"stop"` or `"keep"`): what managed servers do during optimization. External ones are kept.
        progress_timeout_s (`float`): seconds without any finished group after which the run is stopped.
        connection_timeout_s (`float`): seconds a server may go without a healthy answer.
        load_timeout_s (`float`): seconds that loading weights, sleeping and waking up may take.
        max_retries (`int`): times one group is asked again.
        max_restarts (`int`): times one managed server is started again within a stage.
        retry_wait_s (`float`): first wait before asking again; it doubles each time.
        agreement_tolerance (`float`): largest mean absolute difference of log-probs between two servers, in nats.
        api_key (`str` or None): sent to the servers.
    """

    vocab_size: int
    context_length: int
    concurrency: int = 1024
    release: Literal["sleep", "stop", "keep"] = "sleep"
    progress_timeout_s: float = 1800.0
    connection_timeout_s: float = 240.0
    load_timeout_s: float = 1800.0
    max_retries: int = 5
    max_restarts: int = 3
    retry_wait_s: float = 1.0
    agreement_tolerance: float = 0.05
    api_key: str | None = None


class VLLMEngine:
    """
    Samples from vLLM servers side by side. Implements [`~mu_grpo_trl.rollout.engine.Engine`].

    Groups go to the server with the fewest in flight. A group whose request fails for a passing reason is asked again,
    alone; a managed server that died or froze is started again with the same policy, an external one that comes back is
    given the policy again. Nothing is handed out twice, because a group is handed out only by its one task.

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
        self._servers = [
            Server(server, options.connection_timeout_s, options.load_timeout_s, options.api_key) for server in servers
        ]
        self._policy: Path | None = None
        self._policy_version = ""
        self._loop: _LoopThread | None = _LoopThread()

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
        Log-probs (float32 `(len − 1,)` each, at temperature 1: vLLM never scales those of a prompt) of tokens 1… of each
        sequence, from the loaded weights. Every server is asked and must agree.

        Raises:
            [`EngineError`]: when two servers differ by more than `agreement_tolerance`.
        """
        scores = self._run(_gather(self._score_on(server, sequences) for server in self._servers))
        for server, others in zip(self._servers[1:], scores[1:], strict=True):
            gap = np.nanmean(np.abs(np.concatenate(others) - np.concatenate(scores[0])))
            if not gap <= self._options.agreement_tolerance:
                raise EngineError(
                    f"{server.url} and {self._servers[0].url} give the same tokens log-probs that differ by {gap:.4g} nats "
                    f"on average (limit {self._options.agreement_tolerance:g}): one of them has other weights."
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
        for server in self._servers:
            if server.managed is not None:
                server.managed.stop()
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.cancel_all()
            loop.run(_gather(server.disconnect() for server in self._servers))
            loop.stop()

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

    async def _check_server(self, server: Server) -> None:
        if server.managed is None:
            await server.wait_until_healthy()
        self.version = check_version((await server.get_json("/version"))["version"])
        models = (await server.get_json("/v1/models"))["data"]
        base = [model for model in models if model.get("parent") is None]
        if len(base) != 1:
            raise EngineError(f"{server.url} serves {[model['id'] for model in models]}; one model is needed.")
        server.model = base[0]["id"]
        limit = base[0].get("max_model_len")
        if limit is not None and limit < self._options.context_length:
            raise EngineError(
                f"{server.url} allows {limit} tokens of prompt and response (max_model_len), but the run needs "
                f"{self._options.context_length}. Start it with `--max-model-len {self._options.context_length}` or lower "
                "`max_context_length`."
            )
        await self._check_logprobs_mode(server)

    async def _check_logprobs_mode(self, server: Server) -> None:
        """
        Measure that log-probs are those after temperature: at twice the temperature the gap between the two likeliest
        tokens halves; in raw log-probs it does not change.
        """
        ratios: list[tuple[float, float]] = []
        for prompt_ids in _RANKING_PROMPTS:
            cold, hot = [
                wire.parse_ranking(
                    await self._post_completion(
                        server,
                        wire.ranking_body(prompt_ids, temperature, server.model, self._policy_version or "check"),
                    )
                )
                for temperature in (1.0, 2.0)
            ]
            first, second = sorted(cold, key=cold.__getitem__, reverse=True)[:2]
            gap = cold[first] - cold[second]
            if max(*cold.values(), *hot.values()) > 1e-3:
                raise EngineError(f"{server.url} gives logits for log-probs. {_MODE_ADVICE}")
            if first in hot and second in hot and _READABLE_GAP[0] < gap < _READABLE_GAP[1]:
                ratios.append((gap, (hot[first] - hot[second]) / gap))
        if not ratios:
            logger.warning(
                "Whether %s gives processed log-probs cannot be measured: no two likely tokens.", server.url
            )
            return
        ratio = max(ratios)[1]
        if abs(ratio - 0.5) > _RANKING_TOLERANCE:
            raise EngineError(
                f"{server.url} does not give log-probs after temperature: doubling the temperature scales the gap between "
                f"two tokens by {ratio:.3f} instead of 0.5. {_MODE_ADVICE}"
            )

    async def _score_on(self, server: Server, sequences: list[list[int]]) -> list[np.ndarray]:
        self._require_policy()
        bodies = [wire.scoring_body(sequence, server.model, self._policy_version) for sequence in sequences]
        answers = await _gather(self._post_completion(server, body) for body in bodies)
        return [wire.parse_scores(raw, sequence) for raw, sequence in zip(answers, sequences, strict=True)]

    async def _post_completion(self, server: Server, body: dict[str, Any]) -> bytes:
        """One request outside the rollout, asked again on passing failures."""

        async def ask() -> bytes:
            return await server.post("/v1/completions", body, self._options.progress_timeout_s)

        return await self._retry(f"A check of {server.url}", ask)

    async def _answer(self, request: GroupRequest, sampling: SamplingParams, dispatch: Dispatch) -> GroupResult:
        self._require_policy()

        async def ask() -> GroupResult:
            async with dispatch.slot() as server:
                body = wire.generation_body(request, sampling, server.model, self._policy_version)
                epoch = server.epoch
                try:
                    raw = await server.post("/v1/completions", body)
                except (aiohttp.ClientError, OSError) as error:
                    await self._recover(server, epoch, dispatch)
                    raise ServerFailure(f"{server.url}: {type(error).__name__}: {error}") from error
            parse = wire.parse_generation
            completions = await asyncio.to_thread(
                parse, raw, request, sampling, server.model, self._options.vocab_size
            )
            return GroupResult(request.group, completions)

        return await self._retry(f"Group {request.group}", ask)

    async def _retry(self, what: str, ask: Callable[[], Awaitable[T]]) -> T:
        wait_s, failures = self._options.retry_wait_s, 0
        while True:
            try:
                return await ask()
            except ServerUnreachable:
                raise
            except (ServerFailure, wire.UnusableAnswer, aiohttp.ClientError, OSError) as error:
                failures += 1
                if failures > self._options.max_retries:
                    raise EngineError(f"{what} failed {failures} times; the last time: {error}") from error
                logger.warning("%s failed and is asked again (%d): %s", what, failures, error)
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.5))
            wait_s = min(2 * wait_s, _MAX_BACKOFF_S)

    async def _recover(self, server: Server, epoch: int, dispatch: Dispatch) -> None:
        """After a broken connection: have `server` healthy again, with the policy; the first to notice does it for all."""
        async with server.recovery:
            if server.epoch != epoch:
                return
            server.available = False
            if server.managed is not None and (server.frozen or not server.managed.alive):
                await self._restart(server)
            else:
                await server.wait_until_healthy()
            if server.managed is None:
                await server.load(self._require_policy())  # it may have been started again, with its first weights
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
                server.cut_off()
                last_healthy = time.monotonic()

    def _next_finished(
        self, done: queue.SimpleQueue[concurrent.futures.Future[GroupResult]]
    ) -> concurrent.futures.Future[GroupResult]:
        try:
            return done.get(timeout=self._options.progress_timeout_s)
        except queue.Empty:
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
