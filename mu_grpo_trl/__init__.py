"""μ-GRPO for TRL: train in a few large generation → optimization stages (arXiv 2605.17570)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import MuGRPOConfig
    from .data import load_prompts
    from .rewards.math import MathReward
    from .stage.reader import load_stage
    from .trainer import MuGRPOTrainer

__version__ = "0.1.0"

_EXPORTS = {
    "MathReward": ".rewards.math",
    "MuGRPOConfig": ".config",
    "MuGRPOTrainer": ".trainer",
    "load_prompts": ".data",
    "load_stage": ".stage.reader",
}

__all__ = ["MathReward", "MuGRPOConfig", "MuGRPOTrainer", "load_prompts", "load_stage"]


def __getattr__(name: str) -> Any:
    """Import on first use: reward workers start without torch."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name], __name__), name)
