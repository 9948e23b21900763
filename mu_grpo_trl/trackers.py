"""Trackers across restarts: the run of Weights & Biases goes on where the run of the trainer does."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .config import MuGRPOConfig

WANDB_ID_FILE = "wandb_run_id"


@contextmanager
def kept_wandb_run(config: MuGRPOConfig, is_main: bool, resumed: bool) -> Iterator[None]:
    """
    Inside the block W&B logs to the run whose id `output_dir` keeps, if `report_to` names it. An id is drawn at the
    first start and again by a start that continues nothing. A run that is active, or named in `WANDB_RUN_ID`, is left.
    """
    wandb = sys.modules.get("wandb")
    active = wandb is not None and wandb.run is not None
    if not is_main or "wandb" not in (config.report_to or ()) or active or "WANDB_RUN_ID" in os.environ:
        yield
        return
    path = config.output_path / WANDB_ID_FILE
    if not path.exists() or not (resumed or _continues(config)):
        path.write_text(uuid.uuid4().hex[:8])
    former = os.environ.get("WANDB_RESUME")
    os.environ |= {"WANDB_RUN_ID": path.read_text(), "WANDB_RESUME": former or "allow"}
    try:
        yield
    finally:
        del os.environ["WANDB_RUN_ID"]
        if former is None:
            del os.environ["WANDB_RESUME"]


def _continues(config: MuGRPOConfig) -> bool:
    """Whether a start without a checkpoint goes on with a first stage that was left unfinished."""
    done = [*config.output_path.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), *config.output_path.glob("summary.json")]
    return not done and any(config.stages_path.glob("stage-*"))
