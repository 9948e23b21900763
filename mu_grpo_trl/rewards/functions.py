"""
Calls everything that TRL accepts as a reward: sync and async callables, reward models, names, with a time limit each.

Different from TRL on purpose: TRL sums over reward functions with `nansum`, so that a response that one function could
not score competes with its group on fewer terms. Here such a response is unscorable (see [`combine`]).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import re
import sys
import threading
import traceback
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Literal

import numpy as np

from .math import ANSWER_LIMIT_S, MathReward
from .pool import GIB, Crashed, ProcessPool, Raised, TimedOut, function_reference

logger = logging.getLogger(__name__)

_MAX_ABANDONED = 8
_CANCEL_GRACE_S = 2.0
_ASYNC_ATTEMPTS = 3
"""A call that waited behind one that blocks the event loop has not begun, and is made again on another loop."""
_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_POOL_MEMORY_LIMIT_BYTES = 16 * GIB
_NOT_SENT_TO_POOL = ("trainer_state", "log_extra", "log_metric")


class RewardError(RuntimeError):
    """A reward function failed, or returned what is no list of rewards; the message names it."""


class Scores(dict[str, np.ndarray]):
    """
    Rewards of one prompt group by function name, `(n,)` float64, NaN where unscorable.

    Attributes:
        failed (`set[str]`):
            Functions whose call timed out, crashed or raised: not the same as not applying to the group.
    """

    def __init__(self, rewards: Mapping[str, np.ndarray] = {}, failed: Collection[str] = ()):  # noqa: B006
        super().__init__(rewards)
        self.failed = set(failed)


def combine(rewards: Mapping[str, np.ndarray], weights: Mapping[str, float] | None = None) -> np.ndarray:
    """
    Weighted sum of the reward functions over one prompt group.

    A function that is NaN for the whole group does not apply to it and is left out, unless its call failed
    ([`Scores.failed`]). A response that any other function could not score is unscorable: its sum would not be
    comparable.

    Args:
        rewards (`Mapping[str, np.ndarray]`):
            `(n,)` rewards by function name.
        weights (`Mapping[str, float]`, *optional*):
            Weight by function name; 1 without.

    Returns:
        `np.ndarray`: `(n,)` float64, NaN where unscorable.

    Examples:
    ```python
    >>> combine({"math": np.array([1.0, 0.0]), "length": np.array([np.nan, 0.5])})
    array([nan, 0.5])
    ```
    """
    failed = rewards.failed if isinstance(rewards, Scores) else set()
    finite = {name: np.where(np.isfinite(values), values, np.nan) for name, values in rewards.items()}
    used = [name for name, values in finite.items() if name in failed or not np.isnan(values).all()]
    if not used:
        return np.full(len(next(iter(finite.values()))), np.nan)
    return np.sum([(1.0 if weights is None else weights[name]) * finite[name] for name in used], axis=0)


def resolve_reward(name: str, *, workers: int = 4, timeout_s: float = 60.0) -> Callable[..., Any]:
    """
    Reward by name.

    Args:
        name (`str`):
            `"math"`, or `"module:function"` of a TRL reward function, which then runs in killable processes; its
            arguments and result must be JSON values, and it gets no `trainer_state`, `log_extra` or `log_metric`.
        workers (`int`, *optional*, defaults to `4`):
            Processes.
        timeout_s (`float`, *optional*, defaults to `60.0`):
            Seconds for one call; `"math"` takes at most 5 for one answer.

    Returns:
        `Callable`: Reward function, with a `close()`.

    Raises:
        ValueError: If the name is neither.
    """
    if name == "math":
        return MathReward(workers=workers, timeout_s=min(timeout_s, ANSWER_LIMIT_S))
    if _REFERENCE.fullmatch(name):
        return _PoolReward(name, workers, timeout_s)
    raise ValueError(f"{name!r} is no reward: use 'math' or 'module:function'.")


class RewardFunctions:
    """
    Scores prompt groups with one or several reward functions.

    May be used from several threads, also inside a running event loop. Plain callables and reward models run one call
    at a time each (they are written for that); async callables, `"math"` and `"module:function"` run side by side.

    Args:
        reward_funcs (`str`, `Callable`, `PreTrainedModel` or list of these):
            As in TRL: sync or async callables (functions, objects, `functools.partial`), sequence classification
            models or their model ids; also `"math"` and `"module:function"`, see [`resolve_reward`].
        reward_weights (`Sequence[float]`, *optional*):
            One for each function; 1 without.
        processing_classes (`list`, *optional*):
            Tokenizers of the reward models, in the order of `reward_funcs` (`None` elsewhere); loaded without.
        chat_template_kwargs (`dict`, *optional*):
            For the reward models' chat template.
        workers (`int`, *optional*, defaults to `4`):
            Processes of each named reward.
        timeout_s (`float`, *optional*, defaults to `60.0`):
            Seconds for one call. A call over it leaves its responses unscorable and is counted.
        on_error (`str`, *optional*, defaults to `"stop"`):
            What a raising reward does: `"stop"` raises [`RewardError`], `"unscorable"` leaves its responses
            unscorable.

    Attributes:
        names (`list[str]`):
            Names as in TRL.
        counters (`dict[str, Counter]`):
            By function name: `calls`, `timeouts`, `raised`, `crashed`, and `unscorable` responses.

    Raises:
        ValueError: For no function, two of one name, or lists of different lengths.
    """

    def __init__(
        self,
        reward_funcs: Any,
        reward_weights: Sequence[float] | None = None,
        *,
        processing_classes: Any = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        workers: int = 4,
        timeout_s: float = 60.0,
        on_error: Literal["stop", "unscorable"] = "stop",
    ):
        if on_error not in ("stop", "unscorable"):
            raise ValueError(f"on_error={on_error!r} is no rule for raising rewards: use 'stop' or 'unscorable'.")
        functions = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        classes = processing_classes if isinstance(processing_classes, list) else [processing_classes] * len(functions)
        weights = [1.0] * len(functions) if reward_weights is None else [float(weight) for weight in reward_weights]
        if not functions or len(weights) != len(functions) or len(classes) != len(functions):
            raise ValueError(
                f"{len(functions)} reward functions with {len(weights)} weights and {len(classes)} processing "
                "classes: give at least one function, with one weight and processing class each, or leave those out."
            )
        self.timeout_s, self.on_error = timeout_s, on_error
        self._functions: dict[str, Any] = {}  # callables, some with `to_device` or `close`
        for function, processing_class in zip(functions, classes, strict=True):
            function = _as_callable(function, processing_class, chat_template_kwargs or {}, workers, timeout_s)
            name = reward_name(function)
            if name in self._functions:
                raise ValueError(
                    f"Two reward functions are named {name!r}: rename one, since rewards are kept by name."
                )
            self._functions[name] = function
        self.names = list(self._functions)
        self.weights = dict(zip(self.names, weights, strict=True))
        self.counters: dict[str, Counter[str]] = defaultdict(Counter)
        self._lock = threading.Lock()
        self._one_call = {name: threading.Lock() for name in self.names}
        self._abandoned = 0
        self._loop: _BackgroundLoop | None = None

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, list[Any]],
        trainer_state: Any = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
    ) -> Scores:
        """
        Score the responses of one prompt group with every function, all side by side.

        Args:
            prompts, completions (`Sequence`):
                n strings, or n lists of messages, as in TRL.
            completion_ids (`Sequence[Sequence[int]]`):
                n lists of token ids.
            columns (`Mapping[str, list]`):
                Other dataset columns, n values each.
            trainer_state (`TrainerState`, *optional*), log_extra (`Callable`, *optional*), log_metric (`Callable`,
            *optional*):
                Handed to the functions as TRL does; logged values go nowhere without.

        Returns:
            [`Scores`]: `(n,)` float64 by function name, NaN where unscorable.

        Raises:
            RewardError: If a function returned something else than n rewards, raised (with `on_error="stop"`), or too
            many
                calls have been abandoned.
        """
        kwargs = {
            **{
                name: values
                for name, values in columns.items()
                if name not in ("prompt", "completion", "completion_ids")
            },
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids,
            "trainer_state": trainer_state,
            "log_extra": log_extra or _ignore,
            "log_metric": log_metric or _ignore,
        }
        calls = {name: _in_thread(f"mu-grpo-score-{name}", self._score_one, name, kwargs) for name in self.names}
        results = {name: call.result() for name, call in calls.items()}
        nothing = np.full(len(completions), np.nan)
        return Scores(
            {name: nothing.copy() if rewards is None else rewards for name, rewards in results.items()},
            failed=[name for name, rewards in results.items() if rewards is None],
        )

    @property
    def callables(self) -> list[Callable[..., Any]]:
        """The functions in TRL's form, for its evaluation."""
        return list(self._functions.values())

    def to(self, device: Any) -> None:
        """Move reward models to `device`."""
        for function in self._functions.values():
            if hasattr(function, "to_device"):
                function.to_device(device)

    def combine(self, scores: Mapping[str, np.ndarray]) -> np.ndarray:
        """Weighted rewards `(n,)` of one prompt group, see [`combine`]."""
        return combine(scores, self.weights)

    def close(self) -> None:
        """End worker processes and the event loop."""
        for function in self._functions.values():
            if isinstance(function, MathReward | _PoolReward):
                function.close()
        if self._loop is not None:
            self._loop.stop()

    def _score_one(self, name: str, kwargs: dict[str, Any]) -> np.ndarray | None:
        """Rewards `(n,)` of one function, or `None` if its call failed."""
        count = len(kwargs["completions"])
        self._count(name, "calls")
        try:
            output = self._call(name, kwargs)
        except _CallFailed as failure:
            return self._failed(name, failure.counter, count, failure.reason)
        except RewardError:
            raise
        except (Exception, SystemExit) as error:
            if self.on_error == "unscorable":
                return self._failed(name, "raised", count, repr(error))
            trace = str(error) if isinstance(error, _RaisedInPool) else "".join(traceback.format_exception(error))
            prompt = repr(kwargs["prompts"][0] if count else None)[:500]
            raise RewardError(f"Reward function {name!r} raised on prompt {prompt}:\n{trace}") from error
        rewards = as_rewards(name, output, count)
        self._count(name, "unscorable", int(np.isnan(rewards).sum()))
        return rewards

    def _call(self, name: str, kwargs: dict[str, Any]) -> Any:
        function = self._functions[name]
        if isinstance(function, MathReward | _PoolReward):
            return function(**kwargs)  # these limit their own time
        if is_async_callable(function):
            return self._call_async(name, function, kwargs)
        with self._one_call[name]:
            call = _in_thread(f"mu-grpo-{name}", _result, function, kwargs)
            return self._within_limit(name, call, self.timeout_s)

    def _call_async(self, name: str, function: Callable[..., Awaitable[Any]], kwargs: dict[str, Any]) -> Any:
        for _ in range(_ASYNC_ATTEMPTS):
            outcome: Future[Any] = Future()
            loop = self._current_loop()
            loop.submit(self._settle(outcome, function, kwargs))
            wait([outcome], self.timeout_s + _CANCEL_GRACE_S)
            waited_in_vain = outcome.cancel()
            if waited_in_vain or not outcome.done():  # a call blocks the loop, perhaps this one, or ignores its limit
                self._abandon_loop(loop)
            if not waited_in_vain:
                return self._within_limit(name, outcome, 0.0)
        raise self._over_limit()

    async def _settle(
        self, outcome: Future[Any], function: Callable[..., Awaitable[Any]], kwargs: dict[str, Any]
    ) -> None:
        """
        Give `outcome` what `function` returns or raises, unless it was cancelled before this began. The loop's own
        future would have to wait for a turn of the loop, which the next call may block.
        """
        if not outcome.set_running_or_notify_cancel():
            return
        scope = asyncio.timeout(self.timeout_s)
        try:
            async with scope:
                value = await function(**kwargs)
        except TimeoutError as error:
            outcome.set_exception(self._over_limit() if scope.expired() else error)
        except SystemExit as error:  # it would end the loop's thread
            outcome.set_exception(RuntimeError(f"it raised SystemExit({error.code!r})"))
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(value)

    def _current_loop(self) -> _BackgroundLoop:
        with self._lock:
            if self._loop is None:
                self._loop = _BackgroundLoop()
            return self._loop

    def _abandon_loop(self, loop: _BackgroundLoop) -> None:
        with self._lock:
            if self._loop is loop:
                self._loop = None

    def _within_limit(self, name: str, future: Future[Any], limit_s: float) -> Any:
        wait([future], limit_s)
        if future.done():
            return future.result()
        with self._lock:
            self._abandoned += 1
            abandoned = self._abandoned
        if abandoned < _MAX_ABANDONED:
            raise self._over_limit()
        raise RewardError(
            f"{_MAX_ABANDONED} reward calls still hang after their limit of {self.timeout_s} s, the last one of "
            f"{name!r}; a thread cannot be killed. Give a limit to what the function waits for, or pass it as "
            "'module:function' to run it in processes that can be killed."
        )

    def _over_limit(self) -> _CallFailed:
        return _CallFailed("timeouts", f"took longer than {self.timeout_s} s")

    def _failed(self, name: str, counter: str, count: int, reason: str) -> None:
        self._count(name, counter)
        self._count(name, "unscorable", count)
        logger.warning("Reward function %r: a call %s; its %d responses are unscorable.", name, reason, count)

    def _count(self, name: str, counter: str, amount: int = 1) -> None:
        with self._lock:
            self.counters[name][counter] += amount


def reward_name(function: Callable[..., Any]) -> str:
    """Name of a reward function as in TRL: that of the function inside a partial, or the class of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def is_async_callable(function: Callable[..., Any]) -> bool:
    """Whether a call gives a coroutine: an async function, a partial of one, or an object with async `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def as_rewards(name: str, output: Any, count: int) -> np.ndarray:
    """
    Check what a reward function returned.

    Args:
        name (`str`):
            Name of the function, for the error.
        output (`Any`):
            List, tuple, array, series or tensor of numbers; `None`, NaN and infinities are unscorable.
        count (`int`):
            Number of responses.

    Returns:
        `np.ndarray`: `(count,)` float64, NaN where unscorable.

    Raises:
        RewardError: For anything else, naming the function.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(output, torch.Tensor):
        output = output.detach().cpu().tolist()
    elif hasattr(output, "__array__"):  # also what pandas and JAX hold
        output = np.asarray(output).tolist()
    way_out = f"Return a list of {count} numbers, one for each completion, `None` for an unscorable one."
    if not isinstance(output, list | tuple):
        raise RewardError(
            f"Reward function {name!r} returned {output!r:.200} of type {type(output).__name__}. {way_out}"
        )
    if len(output) != count:
        raise RewardError(
            f"Reward function {name!r} returned {len(output)} rewards for {count} completions. {way_out}"
        )
    rewards = np.full(count, np.nan)
    for i, value in enumerate(output):
        if isinstance(value, np.ndarray) or torch is not None and isinstance(value, torch.Tensor):
            value = value.tolist() if value.ndim == 0 else value
        if value is None:
            continue
        if not isinstance(value, int | float | np.number | np.bool_) or isinstance(value, np.complexfloating):
            raise RewardError(
                f"Reward function {name!r} returned {value!r:.200} at position {i}, which is no number. {way_out}"
            )
        if isinstance(value, int) and abs(value) > sys.float_info.max:
            continue  # like an infinity
        if math.isfinite(value):
            rewards[i] = value
    return rewards


def _as_callable(function: Any, processing_class: Any, template: dict[str, Any], workers: int, limit_s: float) -> Any:
    if isinstance(function, str) and (function == "math" or _REFERENCE.fullmatch(function)):
        return resolve_reward(function, workers=workers, timeout_s=limit_s)
    torch = sys.modules.get("torch")
    if isinstance(function, str) or (torch is not None and isinstance(function, torch.nn.Module)):
        from .model import ModelReward

        return ModelReward(function, processing_class, template)
    if not callable(function):
        raise ValueError(
            f"{function!r} is no reward function: give a callable, a model, a model id, 'math' or 'module:function'."
        )
    return function


class _CallFailed(Exception):
    """A call gave no rewards for a reason that is not the function's own exception."""

    def __init__(self, counter: str, reason: str):
        super().__init__(reason)
        self.counter, self.reason = counter, reason


class _RaisedInPool(Exception):
    """Traceback of a function that raised in its process."""


class _PoolReward:
    """A `"module:function"` reward in killable processes."""

    def __init__(self, reference: str, workers: int, timeout_s: float):
        self.__name__ = function_reference(reference).partition(":")[2]
        self._pool = ProcessPool(reference, workers, timeout_s, _POOL_MEMORY_LIMIT_BYTES)
        self._reference = reference

    def __call__(self, **kwargs: Any) -> Any:
        sent = {name: value for name, value in kwargs.items() if name not in _NOT_SENT_TO_POOL}
        try:
            future = self._pool.submit(**sent)
        except TypeError as error:
            raise RewardError(
                f"Reward {self._reference!r} runs in a process of its own, which takes JSON values only: {error}. "
                "Drop that column, or pass the function itself."
            ) from error
        result = future.result()
        if isinstance(result, TimedOut):
            raise _CallFailed("timeouts", f"took longer than {result.limit_s} s")
        if isinstance(result, Crashed):
            raise _CallFailed("crashed", f"lost its process: {result.reason}")
        if isinstance(result, Raised):
            raise _RaisedInPool(result.error)
        return result

    def close(self) -> None:
        self._pool.close()


class _BackgroundLoop:
    """An event loop on a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="mu-grpo-reward-loop").start()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


def _result(function: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """What `function` returns, or what comes of the coroutine it returns (a decorator may hide that it is async)."""
    result = function(**kwargs)
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def _in_thread(thread: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
    """Run on a daemon thread, which does not keep the interpreter alive if it hangs."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, daemon=True, name=thread).start()
    return future


def _ignore(*_: Any) -> None:
    """Where logged values go when nobody collects them."""
