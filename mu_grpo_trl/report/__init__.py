"""What people see of a run: progress, tables, figures, trackers."""

from __future__ import annotations

from typing import Any

from transformers import PrinterCallback, ProgressCallback

from .progress import RunProgress
from .tracking import StageTracking

__all__ = ["RunProgress", "StageTracking", "attach"]


def attach(trainer: Any) -> StageTracking:
    """
    Let a `MuGRPOTrainer` tell what it does; a notebook's own table stays in place of the bar.

    Returns:
        `StageTracking`: to be told of complete stages.
    """
    removed = [trainer.pop_callback(kind) for kind in (PrinterCallback, ProgressCallback)]
    trainer.add_callback(RunProgress(trainer.schedule, trainer.telemetry, has_bar=any(removed)))
    tracking = StageTracking(trainer.args, trainer.telemetry, trainer._tokenizer, trainer.accelerator.is_main_process)
    trainer.add_callback(tracking)
    return tracking
