"""What trackers get beside the metrics: a table of responses, a figure, and where stages and checkpoints are."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from ..config import MuGRPOConfig
from ..stage.reader import StageReader
from ..telemetry import Telemetry
from .completions import log_stage_completions
from .figures import draw_sheet, save
from .runs import Run

logger = logging.getLogger(__name__)

FIGURE_NAME = "run.png"


def stage_metrics(reader: StageReader) -> dict[str, float]:
    """The `stage/` metrics of a complete stage."""
    summary = reader.summary()
    metrics = {
        "stage/number": float(reader.manifest.stage),
        "stage/responses": float(summary.num_responses),
        "stage/tokens": float(summary.num_tokens),
        "stage/reward": summary.mean_reward,
        "stage/mean_length": summary.mean_length,
        "stage/truncated_share": summary.truncated_share,
        "stage/zero_advantage_share": summary.zero_advantage_group_share,
        "stage/unscorable_responses": float(summary.unscorable_responses),
    }
    return {name: value for name, value in metrics.items() if value == value}


class StageTracking(TrainerCallback):
    """
    Writes the table of responses, and `run.png` when a run that saves ends, and sends to the active run of W&B what it
    shows beside metrics, a figure with each checkpoint. All on the main process.

    Stages and checkpoints are artifacts by reference: W&B keeps the path and the settings, and no byte is uploaded.

    Args:
        config (`MuGRPOConfig`): the run's options.
        telemetry (`Telemetry`): figures are drawn off the clock, as evaluation is.
        tokenizer (`PreTrainedTokenizerBase`): of the policy.
        is_main (`bool`): whether this is the main process.
    """

    def __init__(
        self, config: MuGRPOConfig, telemetry: Telemetry, tokenizer: PreTrainedTokenizerBase, is_main: bool
    ) -> None:
        self._config = config
        self._telemetry = telemetry
        self._tokenizer = tokenizer
        self._is_main = is_main

    def stage_made(self, reader: StageReader) -> dict[str, list[float]]:
        """Tell of a stage that is complete now; returns its metrics, for the next log."""
        metrics = stage_metrics(reader)
        if self._is_main:
            if self._config.log_completions:
                log_stage_completions(reader, self._tokenizer, self._config)
            manifest = reader.manifest
            about = {
                "stage": manifest.stage,
                "policy_hash": manifest.policy_hash,
                "dataset_hash": manifest.dataset_hash,
                "engine": f"{manifest.engine} {manifest.engine_version}",
                "sampling": manifest.sampling,
            }
            self._refer_to(reader.path, "stage", about | metrics)
        return {name: [value] for name, value in metrics.items()}

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        path = self._config.output_path / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if self._is_main:
            self._refer_to(path, "checkpoint", {"update": state.global_step})
            if _active_wandb(self._config) is not None and state.global_step < state.max_steps:
                self._draw(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._is_main and self._config.save_strategy != SaveStrategy.NO:
            self._draw(state)

    def _draw(self, state: TrainerState) -> None:
        config = self._config
        if find_spec("matplotlib") is None:
            return
        run = Run(config.output_path.name, config.output_path, state.log_history, config.to_dict(), None)
        if not run.updates:
            return
        with self._telemetry.interval("evaluation"):
            path = save(draw_sheet([run]), config.output_path / FIGURE_NAME)
        if (wandb := _active_wandb(config)) is not None:
            wandb.log({"figures/run": wandb.Image(str(path)), "train/global_step": state.global_step})

    def _refer_to(self, path: Path, kind: str, about: dict[str, Any]) -> None:
        if (wandb := _active_wandb(self._config)) is not None:
            artifact = wandb.Artifact(f"{kind}-{wandb.run.id}", type=kind, metadata=about | {"path": str(path)})
            artifact.add_reference(path.resolve().as_uri(), name=path.name, checksum=False)
            wandb.run.log_artifact(artifact, aliases=[path.name])


def wandb_url(config: MuGRPOConfig) -> str | None:
    """Address of the active run of W&B; None if there is none, or it is offline."""
    wandb = _active_wandb(config)
    return None if wandb is None else wandb.run.url


def _active_wandb(config: MuGRPOConfig) -> Any:
    """The module, if a run is active and `report_to` names it."""
    if "wandb" not in (config.report_to or ()):
        return None
    import wandb

    return wandb if wandb.run is not None else None
