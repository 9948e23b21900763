"""One vLLM server as the client sees it: its address, its state, and the calls made to it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import aiohttp
import numpy as np

from .engine import EngineError
from .vllm_process import ManagedServer
from .vllm_wire import UnusableAnswer

logger = logging.getLogger(__name__)
T = TypeVar("T")

_WARNING_S = 10.0
_MAX_BACKOFF_S = 30.0
_CONNECT_S = 30.0
_HEALTH_S = 10.0
_HEALTH_POLL_S = 0.5
_KEEPALIVE_S = 2.0
"""Below vLLM's 5 s: else a request may meet a connection that the server is just closing."""
_RESET_TRIES = 5
_RESET_POLL_S = 0.2
_RETRIED_STATUS = (408, 429)


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


class ServerUnreachable(EngineError, ConnectionError):
    """A server does not answer, or not as one that is ready; the message quotes its address and last status."""


class ServerFailure(Exception):
    """A broken connection, or a 408, 429 or 5xx answer: asking again may help."""


class Server:
    """
    Calls to one server; everything but the constructor runs on the client's event loop.

    Args:
        server (`ManagedServer` or `str`): the process behind it, or the address of an external server.
        options (`ClientOptions`): limits of the waits, and the API key.
    """

    def __init__(self, server: ManagedServer | str, options: ClientOptions) -> None:
        self.managed = None if isinstance(server, str) else server
        self.model = ""
        self.in_flight = 0
        self.available = True
        self.epoch = 0
        """Times it was recovered: tells whether a failed request was sent before or after."""
        self.weights = 0
        """Times it was found with other weights than it was given: tells what an answer in flight was sampled from."""
        self.fingerprint = np.zeros(0, np.float32)
        self.restarts_left = 0
        self.recovery = asyncio.Lock()
        self._address = server.rstrip("/") if isinstance(server, str) else ""
        self._options = options
        self._session: aiohttp.ClientSession | None = None
        self._asleep = False
        self._frozen = False
        self._last_health = "not asked yet"

    @property
    def url(self) -> str:
        return self._address if self.managed is None else self.managed.url

    def describe(self) -> str:
        """State in a few words, for error messages."""
        return f"{self.url}: {self.in_flight} groups in flight, /health last: {self._last_health}"

    async def post(self, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None) -> bytes:
        """
        The body of a 200 answer.

        Raises:
            [`EngineError`]: for an answer that asking again cannot change (4xx), with the server's text.
            [`ServerFailure`]: for one that it may.
            `aiohttp.ClientError`, `OSError`: when there is no answer.
        """
        async with self._open_session().post(self.url + path, json=body, timeout=_timeout(timeout_s)) as response:
            content = await response.read()
        if response.status == 200:
            return content
        message = f"{self.url}{path} answered {response.status}: {content[:2000].decode(errors='replace')}"
        if response.status < 500 and response.status not in _RETRIED_STATUS:
            raise EngineError(message)
        raise ServerFailure(message)

    async def complete(self, body: dict[str, Any]) -> bytes:
        """The answer to one small completion request, asked again on passing failures."""

        async def ask() -> bytes:
            if self.managed is not None and not self.managed.alive:
                raise EngineError(self.managed.describe_failure())
            return await self.post("/v1/completions", body, self._options.progress_timeout_s)

        return await retried(f"A check of {self.url}", ask, self._options)

    async def get_json(self, path: str) -> dict[str, Any]:
        """The JSON object at `path`. Raises [`ServerUnreachable`] when there is none."""
        try:
            async with self._open_session().get(self.url + path, timeout=_timeout(_CONNECT_S)) as response:
                if response.status == 200:
                    return await response.json()
                answer = f"answered {response.status}: {(await response.text())[:2000]}"
        except (aiohttp.ClientError, OSError, json.JSONDecodeError) as error:
            answer = f"failed: {type(error).__name__}: {error}"
        raise ServerUnreachable(f"GET {self.url}{path} {answer}. Is it a vLLM server, and the API key right?")

    async def is_healthy(self) -> bool:
        """Whether `/health` answers 200 at once."""
        timeout_s = min(_HEALTH_S, self._options.connection_timeout_s)
        try:
            async with self._open_session().get(self.url + "/health", timeout=_timeout(timeout_s)) as response:
                self._last_health = f"status {response.status}"
                return response.status == 200
        except (aiohttp.ClientError, OSError) as error:
            self._last_health = f"{type(error).__name__} {error}".strip()
            return False

    async def wait_until_healthy(self) -> None:
        """Raises [`ServerUnreachable`] when it takes longer than `connection_timeout_s`, or the process has ended."""
        deadline = time.monotonic() + self._options.connection_timeout_s
        while not await self.is_healthy():
            ended = self.managed is not None and not self.managed.alive
            if ended or time.monotonic() > deadline:
                raise ServerUnreachable(
                    f"{self.url} was not healthy within {self._options.connection_timeout_s:g} s; /health last: "
                    f"{self._last_health}. Start the server, correct its address, or raise `vllm_server_timeout`."
                )
            await asyncio.sleep(min(_HEALTH_POLL_S, self._options.connection_timeout_s / 4))

    async def survives(self) -> bool:
        """Whether a managed server that broke a connection is well again by itself."""
        if self._frozen:
            return False
        try:
            await self.wait_until_healthy()
        except ServerUnreachable:
            return False
        return True

    async def start(self, policy: Path) -> None:
        """Start the managed process with the weights in `policy`."""
        assert self.managed is not None
        await self.disconnect()
        await asyncio.to_thread(self.managed.start, policy)
        self._asleep = self._frozen = False

    async def stop(self) -> None:
        """End the managed process."""
        assert self.managed is not None
        await self.disconnect()
        await asyncio.to_thread(self.managed.stop)

    async def sleep(self) -> None:
        """Give weights and cache of the device back (sleep level 2)."""
        await self._control("/sleep?level=2", "cannot sleep. Use `vllm_release: stop`")
        self._asleep = True

    async def load(self, policy: Path) -> None:
        """
        Replace the weights by those in `policy`, waking up first, and forget the cache of the old ones.

        Raises:
            [`EngineError`]: when the server cannot read them, or keeps its prefix cache.
        """
        if self._asleep:
            await self._control("/wake_up", "cannot wake up")
            self._asleep = False
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(policy)}}
        advice = (
            f"could not load the policy {policy}. The folder must exist under this name on the server's machine, "
            "and the server must run with VLLM_SERVER_DEV_MODE=1"
        )
        await self._control("/collective_rpc", advice, body)
        for _ in range(_RESET_TRIES):
            answer = await self._control("/reset_prefix_cache", "cannot reset its prefix cache")
            if not answer or json.loads(answer).get("success", True):
                return
            await asyncio.sleep(_RESET_POLL_S)
        raise EngineError(
            f"{self.url} kept its prefix cache (success=false, {_RESET_TRIES} times), so answers would mix old and "
            "new weights. Is someone else using the server?"
        )

    async def cut_off(self) -> None:
        """Declare the server frozen and break its connections, so that all requests in flight fail now."""
        self._frozen = True
        await self.disconnect()

    async def disconnect(self) -> None:
        """Close the connections to it."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _control(self, path: str, advice: str, body: dict[str, Any] | None = None) -> bytes:
        try:
            return await self.post(path, body, self._options.load_timeout_s)
        except (EngineError, ServerFailure, aiohttp.ClientError, OSError) as error:
            raise EngineError(f"{self.url} {advice}. {type(error).__name__}: {error}") from error

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
            key = self._options.api_key
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            self._session = aiohttp.ClientSession(connector=connector, headers=headers, trust_env=False)
        return self._session


def _timeout(total_s: float | None) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=total_s, sock_connect=_CONNECT_S)


async def retried(what: str, ask: Callable[[], Awaitable[T]], options: ClientOptions) -> T:
    """
    The result of `ask()`, asked again after passing failures with growing, jittered waits.

    Raises:
        [`EngineError`]: after `max_retries` repetitions, or at once when asking again cannot help.
    """
    wait_s = options.retry_wait_s
    for failures in itertools.count(1):
        try:
            return await ask()
        except EngineError:
            raise
        except (ServerFailure, UnusableAnswer, aiohttp.ClientError, OSError) as error:
            if failures > options.max_retries:
                raise EngineError(f"{what} failed {failures} times; the last time: {error}") from error
            _warn_of_retry("%s failed and is asked again (%d): %s", what, failures, error)
        await asyncio.sleep(wait_s * random.uniform(0.5, 1.5))
        wait_s = min(2 * wait_s, _MAX_BACKOFF_S)
    raise AssertionError("unreachable")


_last_warning = -math.inf


def _warn_of_retry(message: str, *args: object) -> None:
    """One warning in `_WARNING_S` seconds: a server that dies takes hundreds of requests with it."""
    global _last_warning
    now = time.monotonic()
    level = logging.WARNING if now - _last_warning > _WARNING_S else logging.DEBUG
    _last_warning = now if level == logging.WARNING else _last_warning
    logger.log(level, message, *args)


class Dispatch:
    """Hands out servers, each to at most `slots` holders at once, the least loaded first."""

    def __init__(self, servers: list[Server], slots: int) -> None:
        self._servers = servers
        self._slots = slots
        self._freed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[Server]:
        """Hold a place on a server while in the context."""
        async with self._freed:
            await self._freed.wait_for(lambda: self._free() is not None)
            server = self._free()
            assert server is not None
            server.in_flight += 1
        try:
            yield server
        finally:
            server.in_flight -= 1
            async with self._freed:
                self._freed.notify()

    async def put_back(self, server: Server) -> None:
        """Have `server` handed out again after a recovery."""
        server.available = True
        async with self._freed:
            self._freed.notify_all()

    def _free(self) -> Server | None:
        free = [server for server in self._servers if server.available and server.in_flight < self._slots]
        return min(free, key=lambda server: server.in_flight, default=None)
