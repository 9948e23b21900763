"""What hooks into the Hugging Face training loop: timers, checkpoints at stage ends, the stage in the checkpoint's state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from .phases import register_fused_head
from .schedule import Schedule
from .telemetry import Telemetry


class StageCallback(TrainerCallback, ExportableState):
    """
    Charges each update to the timer `optimize`, saves at the end of every stage, and keeps in the checkpoint which stage
    it lies in and which weights generated that stage.

    Args:
        schedule (`Schedule`): where stages end.
        telemetry (`Telemetry`): the timers.
    """

    def __init__(self, schedule: Schedule, telemetry: Telemetry) -> None:
        self._schedule = schedule
        self._telemetry = telemetry
        self.stage = -1
        self.policy_hash = ""

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"stage": self.stage, "policy_hash": self.policy_hash}}

    def restore(self, checkpoint: str | Path) -> None:
        """
        Take up the stage that `checkpoint` was taken in.

        Raises:
            `ValueError`: the folder is no whole checkpoint of `MuGRPOTrainer`.
        """
        path = Path(checkpoint) / TRAINER_STATE_NAME
        try:
            attributes = json.loads(path.read_text())["stateful_callbacks"][type(self).__name__]["attributes"]
            self.stage, self.policy_hash = int(attributes["stage"]), str(attributes["policy_hash"])
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{checkpoint} is not a whole checkpoint of MuGRPOTrainer ({type(error).__name__}: {error}). Resume from "
                "another `checkpoint-*` folder of the run, or start anew in another `output_dir`."
            ) from error

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        register_fused_head(kwargs["model"])

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._telemetry.base("optimize")

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._telemetry.base("other")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        done, schedule = state.global_step, self._schedule
        ends_stage = done == schedule.num_updates or done == schedule.first_update(schedule.stage_of(done))
        if ends_stage and args.save_strategy != SaveStrategy.NO:
            control.should_save = True
