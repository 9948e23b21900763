"""
A reward that misbehaves as its environment says, for worker processes: nothing heavy is imported.

`REWARD_FAULT` names what happens at the prompt `REWARD_FAULT_PROMPT`; `once`, when `REWARD_FAULT_MARKER` (a path) is
given, only until that file is there.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any


def score(prompts: list[str], completions: list[str], **_: Any) -> Any:
    """The share of digits, in tenths, unless a fault is due."""
    rewards = [round(10 * sum(c.isdigit() for c in text) / max(len(text), 1)) / 10 for text in completions]
    return _FAULTS[os.environ["REWARD_FAULT"]](rewards) if _is_due(prompts[0]) else rewards


async def score_async(prompts: list[str], completions: list[str], **columns: Any) -> Any:
    """As [`score`]; a hang is one that can be cancelled, or blocks the event loop."""
    if _is_due(prompts[0]):
        if os.environ["REWARD_FAULT"] == "await":
            await asyncio.sleep(1e6)
        return _FAULTS[os.environ["REWARD_FAULT"]]([0.0] * len(completions))
    return score(prompts, completions, **columns)


def _is_due(prompt: str) -> bool:
    if "REWARD_FAULT" not in os.environ or prompt != os.environ["REWARD_FAULT_PROMPT"]:
        return False
    marker = os.environ.get("REWARD_FAULT_MARKER")
    if marker is None:
        return True
    if Path(marker).exists():
        return False
    Path(marker).touch()
    return True


def _sleeps(rewards: list[float]) -> None:
    time.sleep(1e6)


def _sleeps_with_the_gil(rewards: list[float]) -> None:
    ctypes.PyDLL(None).sleep(1_000_000)


def _writes_a_number(rewards: list[float]) -> str:
    sys.set_int_max_str_digits(0)
    return str(7 ** (10**8))


def _backtracks(rewards: list[float]) -> None:
    re.match(r"(a+)+$", "a" * 64 + "b")


def _freezes(rewards: list[float]) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _exits(rewards: list[float]) -> None:
    os._exit(3)


def _segfaults(rewards: list[float]) -> None:
    ctypes.string_at(0)


def _is_killed(rewards: list[float]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raises(rewards: list[float]) -> None:
    raise ZeroDivisionError("injected")


def _eats_memory(rewards: list[float]) -> None:
    eaten = []
    while True:
        eaten.append(bytes(1 << 28))  # address space only, which is what is limited


def _floods(rewards: list[float]) -> list[float]:
    for descriptor in (1, 2):
        os.write(descriptor, b"x" * 2**22)
    return rewards


def _closes_everything(rewards: list[float]) -> None:
    os.closerange(0, 64)


_FAULTS = {
    "none": lambda rewards: [None] * len(rewards),
    "nan": lambda rewards: [float("nan")] * len(rewards),
    "inf": lambda rewards: [float("inf")] * len(rewards),
    "short": lambda rewards: rewards[:-1],
    "text": lambda rewards: [str(reward) for reward in rewards],
    "scalar": lambda rewards: rewards[0],
    "nothing": lambda rewards: None,
    "huge": lambda rewards: "x" * 2**27,
    "sleep": _sleeps,
    "gil": _sleeps_with_the_gil,
    "number": _writes_a_number,
    "regex": _backtracks,
    "freeze": _freezes,
    "exit": _exits,
    "segfault": _segfaults,
    "kill": _is_killed,
    "raise": _raises,
    "memory": _eats_memory,
    "flood": _floods,
    "close": _closes_everything,
}
