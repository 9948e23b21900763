"""Rewards: the math reward, the killable process pool, and the caller of any reward TRL accepts."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Gold": "math",
    "GoldReport": "math",
    "MathReward": "math",
    "check_golds": "math",
    "extract_answer": "answers",
    "from_code_contests": "code_problems",
    "from_livecodebench": "code_problems",
    "prepare_gold": "math",
    "verify": "math",
    "CodeProblem": "code_problems",
    "CodeTest": "code_problems",
    "Crashed": "pool",
    "ProblemError": "code_problems",
    "ProcessPool": "pool",
    "Raised": "pool",
    "TimedOut": "pool",
    "RewardError": "functions",
    "RewardFunctions": "functions",
    "combine": "functions",
    "resolve_reward": "functions",
}

__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]  # one list of names is enough


def __getattr__(name: str) -> Any:
    """Import on first use, so that a pool worker imports only what its function needs."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
