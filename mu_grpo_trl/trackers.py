"""Trackers across restarts: the run of Weights & Biases goes on where the run of the trainer does."""

from __future__ import annotations

import os
import uuid

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .config import MuGRPOConfig

WANDB_ID_FILE = "wandb_run_id"


def open_wandb_run(config: MuGRPOConfig, is_main: bool, resumed: bool) -> None:
    """
    Have W&B log to the run whose id `output_dir` keeps, if `report_to` names it. An id is drawn at the first start and
    again by a start that continues nothing. A run that is active, or named in `WANDB_RUN_ID`, is left.
    """
    if not is_main or "wandb" not in (config.report_to or ()) or "WANDB_RUN_ID" in os.environ:
        return
    import wandb

    if wandb.run is not None:
        return
    path = config.output_path / WANDB_ID_FILE
    if not path.exists() or not (resumed or _continues(config)):
        path.write_text(uuid.uuid4().hex[:8])
    # Not by the environment, which W&B reads once per process.
    wandb.init(
        project=os.environ.get("WANDB_PROJECT", "huggingface"),  # as transformers would
        name=config.run_name,
        id=path.read_text(),
        resume=os.environ.get("WANDB_RESUME", "allow"),  # type: ignore[arg-type]  # checked by W&B
    )


def _continues(config: MuGRPOConfig) -> bool:
    """Whether a start without a checkpoint goes on with a first stage that was left unfinished."""
    done = [*config.output_path.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), *config.output_path.glob("summary.json")]
    return not done and any(config.stages_path.glob("stage-*"))
