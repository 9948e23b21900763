"""
Killable worker processes for functions that may hang, crash or eat the memory.

A worker is a new interpreter (never a fork: the parent has threads and CUDA), which never imports the parent's
`__main__`. Both sides exchange length-prefixed JSON over pipes; nothing is unpickled. One task at a time runs in a
worker; a task over its time limit costs the worker its life (SIGKILL, so neither frozen processes nor C code holding
the GIL matter), and a new one takes its place. The limit runs from the moment the worker says that it started the
task, so that neither queueing nor the worker's start counts: its imports, and a first call with `warm_up` where the
function imports when it is called. Workers die with the parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import inspect
import json
import os
import queue
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

_HEADER = struct.Struct(">Q")
_MAX_REPLY_BYTES = 64 * 2**20
_START_LIMIT_S = 120.0
_ACCEPT_LIMIT_S = 30.0
_ATTEMPTS = 3
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from mu_grpo_trl.rewards.pool import _work; _work()"
GIB = 2**30


@dataclass(frozen=True)
class TimedOut:
    """The task ran longer than `limit_s` seconds; its worker was killed."""

    limit_s: float


@dataclass(frozen=True)
class Crashed:
    """The worker died during the task, twice, or could not be started; `reason` tells how."""

    reason: str


@dataclass(frozen=True)
class Raised:
    """The function raised an exception; `error` is its traceback."""

    error: str


def function_reference(function: str | Callable[..., Any]) -> str:
    """
    `"module:function"` of an importable function.

    Args:
        function (`str` or `Callable`):
            Reference, or the function itself.

    Returns:
        `str`

    Raises:
        ValueError: If a worker could not import the function: it is local, a lambda, or lives in `__main__`.
    """
    if isinstance(function, str):
        reference = function
    else:
        reference = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', repr(function))}"
    module, _, name = reference.partition(":")
    if module == "__main__" or not module or not name.isidentifier():
        raise ValueError(
            f"{reference!r} cannot run in a worker process: a worker imports functions as `module:function` and never "
            "runs the main script. Move the function to the top level of a module of its own."
        )
    return reference


class ProcessPool:
    """
    Runs one function in killable processes.

    May be used from several threads; use `asyncio.wrap_future(pool.submit(...))` in a coroutine.

    Args:
        function (`str` or `Callable`):
            `"module:function"`, or a function importable that way. May be async. Arguments and result must be JSON
            values (arrays and tensors are returned as lists).
        workers (`int`):
            Number of processes. They start on first use.
        timeout_s (`float`):
            Time limit of one task in seconds, counted from its start in the worker.
        memory_limit_bytes (`int`, *optional*, defaults to 4 GiB):
            Limit of each worker's address space; `None` for none. The function then sees a `MemoryError`.
        warm_up (`Sequence`, *optional*):
            Arguments of a call that each worker makes when it starts, whatever comes of it.

    Raises:
        ValueError: If the function cannot be imported by a worker, or a limit is not positive.

    Examples:
    ```python
    >>> with ProcessPool("math:factorial", workers=2, timeout_s=5) as pool:
    ...     pool.map([(3,), (4,)])
    [6, 24]
    ```
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        workers: int,
        timeout_s: float,
        memory_limit_bytes: int | None = 4 * GIB,
        warm_up: Sequence[Any] | None = None,
    ):
        if workers < 1 or not timeout_s > 0:
            raise ValueError(
                f"workers={workers}, timeout_s={timeout_s}: both must be positive. Use workers=1 for one process."
            )
        self.reference = function_reference(function)
        self.timeout_s = float(timeout_s)
        self._setup = {"reference": self.reference, "memory": memory_limit_bytes, "warm_up": warm_up}
        self._tasks: queue.SimpleQueue[tuple[Future[Any], bytes] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._running: set[_Worker] = set()
        self._threads = [
            threading.Thread(target=self._serve, daemon=True, name="mu-grpo-pool") for _ in range(workers)
        ]
        self._started = False

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """
        Queue one call.

        Args:
            *args, **kwargs:
                JSON values.

        Returns:
            `Future`: Its result is the function's, or a [`TimedOut`], [`Crashed`] or [`Raised`]; it never raises
            these.

        Raises:
            RuntimeError: If the pool is closed.
            TypeError: If an argument is no JSON value.
        """
        message = json.dumps([args, kwargs]).encode()
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"The pool of {self.reference!r} is closed. Make a new ProcessPool.")
            if not self._started:
                self._started = True
                for thread in self._threads:
                    thread.start()
            self._tasks.put((future, message))
        return future

    def map(self, calls: Iterable[Sequence[Any]]) -> list[Any]:
        """
        Run calls side by side.

        Args:
            calls (`Iterable[Sequence]`):
                Arguments of each call.

        Returns:
            `list`: Results in the order of the calls, as from [`~ProcessPool.submit`].
        """
        return [future.result() for future in [self.submit(*args) for args in calls]]

    def close(self) -> None:
        """Kill the workers. Running tasks end as [`Crashed`], queued ones are cancelled."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            running = list(self._running)
            with contextlib.suppress(queue.Empty):
                while task := self._tasks.get_nowait():
                    task[0].cancel()
            for _ in self._threads:
                self._tasks.put(None)
        for worker in running:
            worker.kill()
        if self._started:
            for thread in self._threads:
                thread.join()

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _serve(self) -> None:
        """One thread per worker: hands it tasks and replaces it when it is lost."""
        worker: _Worker | None = None
        while (task := self._tasks.get()) is not None:
            future, message = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                worker, result = self._run(worker, message)
            except OSError as error:
                worker, result = None, Crashed(f"no worker process could be started: {error}")
            future.set_result(result)
        if worker is not None:
            self._discard(worker)

    def _run(self, worker: _Worker | None, message: bytes) -> tuple[_Worker | None, Any]:
        """
        Result of one task. A worker that never took it (frozen, or dead while idle) is replaced, without blame; one
        that died over it may have been killed from outside, so that another one tries it once more.
        """
        reason, deaths = "", 0
        for _ in range(_ATTEMPTS):
            if self._closed:
                break
            try:
                worker = worker or self._start_worker()
                worker.send(message, _ACCEPT_LIMIT_S)
                worker.receive(_ACCEPT_LIMIT_S)
            except (_Lost, TimeoutError) as error:
                reason = str(error)
                worker = worker and self._discard(worker)
                continue
            try:
                reply = worker.receive(self.timeout_s)
                return worker, reply["value"] if "value" in reply else Raised(reply["error"])
            except TimeoutError:
                return self._discard(worker), TimedOut(self.timeout_s)
            except _Lost as error:
                reason, deaths, worker = str(error), deaths + 1, self._discard(worker)
                if deaths > 1:
                    break
        return worker, Crashed(reason or "the pool was closed")

    def _start_worker(self) -> _Worker:
        worker = _Worker()
        with self._lock:
            self._running.add(worker)
            if self._closed:
                worker.kill()
        try:
            worker.send(json.dumps({**self._setup, "parent": os.getpid()}).encode(), _START_LIMIT_S)
            problem = worker.receive(_START_LIMIT_S).get("error")
        except (_Lost, TimeoutError):
            self._discard(worker)
            raise
        if problem:
            self._discard(worker)
            raise _Lost(f"a worker cannot import {self.reference!r}:\n{problem}")
        return worker

    def _discard(self, worker: _Worker) -> None:
        with self._lock:
            self._running.discard(worker)
        worker.kill()
        worker.reap()


class _Lost(Exception):
    """The worker is gone, or speaks no longer the protocol."""


class _Worker:
    """Parent's side of one worker process."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        path = [os.path.abspath(entry) for entry in sys.path]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin and self._process.stdout
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)

    def send(self, message: bytes, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        rest = memoryview(_HEADER.pack(len(message)) + message)
        while rest:
            self._wait(self._stdin.fileno(), select.POLLOUT, deadline)
            try:
                rest = rest[os.write(self._stdin.fileno(), rest) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise _Lost(self._fate()) from error

    def receive(self, limit_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        (size,) = _HEADER.unpack(self._read(_HEADER.size, deadline))
        if size > _MAX_REPLY_BYTES:
            raise _Lost(f"a reply of {size} bytes is over the limit of {_MAX_REPLY_BYTES}")
        return json.loads(self._read(size, deadline))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def reap(self) -> None:
        self._process.wait()
        self._stdin.close()
        self._stdout.close()

    def _read(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._wait(self._stdout.fileno(), select.POLLIN, deadline)
            chunk = os.read(self._stdout.fileno(), min(size - len(data), 2**20))
            if not chunk:
                raise _Lost(self._fate())
            data += chunk
        return bytes(data)

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError(f"worker {self._process.pid} did not answer")

    def _fate(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        return f"worker {self._process.pid} ended with exit code {self._process.returncode}"


def _work() -> None:
    """Main loop of a worker process."""
    tasks, replies = _private_pipes()

    def reply(**content: Any) -> None:
        message = json.dumps(content).encode()
        replies.write(_HEADER.pack(len(message)) + message)
        replies.flush()

    setup = _read_message(tasks)
    if setup is None:
        return
    _die_with_parent(setup["parent"])
    try:
        _limit_memory(setup["memory"])
        module, _, name = setup["reference"].partition(":")
        function = getattr(importlib.import_module(module), name)
    except Exception:
        return reply(error=_traceback())
    if setup["warm_up"] is not None:
        with contextlib.suppress(Exception):
            function(*setup["warm_up"])
    reply()
    while (call := _read_message(tasks)) is not None:
        reply()
        try:
            args, kwargs = call
            value = function(*args, **kwargs)
            if inspect.iscoroutine(value):
                value = asyncio.run(value)
            result = {"value": json.loads(json.dumps(value, default=_as_list))}
        except Exception:
            result = {"error": _traceback()}
        reply(**result)


def _as_list(array: Any) -> list[Any]:
    """JSON form of an array or tensor; an `AttributeError` for what has none."""
    return array.tolist()


def _private_pipes() -> tuple[Any, Any]:
    """The protocol's pipes, moved away from stdin and stdout so that the function may read and print."""
    tasks = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    return tasks, replies


def _read_message(stream: Any) -> Any:
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    return json.loads(stream.read(_HEADER.unpack(header)[0]))


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _limit_memory(limit_bytes: int | None) -> None:
    if limit_bytes is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))


def _traceback() -> str:
    return traceback.format_exc(limit=-20)
