"""What hooks into the Hugging Face training loop: timers, checkpoints at stage ends, the stage in their state."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from .phases import register_fused_head
from .schedule import Schedule
from .telemetry import Telemetry

logger = logging.getLogger(__name__)


class StageCallback(TrainerCallback, ExportableState):
    """
    Charges each update to the timer `optimize`, saves at the end of every stage, and keeps in the checkpoint which
    stage it lies in, which weights generated that stage, the settings of its data, and the timers.

    Args:
        schedule (`Schedule`): where stages end.
        telemetry (`Telemetry`): the timers.
        settings (`Callable`): gives all that decides what data the run trains on, by name, as JSON values.
    """

    def __init__(self, schedule: Schedule, telemetry: Telemetry, settings: Callable[[], dict[str, Any]]) -> None:
        self._schedule = schedule
        self._telemetry = telemetry
        self._settings = settings
        self.stage = -1
        self.policy_hash = ""

    def state(self) -> dict[str, Any]:
        attributes = {
            "stage": self.stage,
            "policy_hash": self.policy_hash,
            "settings": self._settings(),
            "telemetry": self._telemetry.state(),
        }
        return {"args": {}, "attributes": attributes}

    def restore(self, checkpoint: str | Path) -> None:
        """
        Take up the stage that `checkpoint` was taken in.

        Raises:
            `ValueError`: the folder is no whole checkpoint of `MuGRPOTrainer`, or one of a run on other data.
        """
        attributes = _stage_attributes(Path(checkpoint))
        stored, now = attributes["settings"], json.loads(json.dumps(self._settings()))
        changed = [
            f"{name}: {stored.get(name)!r} → {value!r}" for name, value in now.items() if stored.get(name) != value
        ]
        if changed:
            raise ValueError(
                f"{checkpoint} belongs to a run with other settings (then → now): {'; '.join(changed)}. They decide "
                "what data the run trains on. Restore them, or start a new run in another `output_dir`."
            )
        self.stage, self.policy_hash = attributes["stage"], attributes["policy_hash"]
        self._telemetry.restore(attributes["telemetry"])

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


def check_optimizer_state(checkpoint: Path, accelerator: Accelerator) -> None:
    """
    Whether this run can take up the optimizer of `checkpoint`; transformers would go on with a fresh one in silence.

    Raises:
        `ValueError`: it has none, another backend wrote it, or DeepSpeed split it for another number of ranks.
    """
    shards = len(list(checkpoint.glob("global_step*/*_optim_states.pt")))
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        if not any(checkpoint.glob("optimizer*")):
            written = "DeepSpeed wrote it" if shards else "`save_only_model` leaves it out"
            raise ValueError(
                f"{checkpoint} has no optimizer state that this run can load ({written}): the run would not go on as "
                "it would have. Resume with the launcher configuration that wrote it, or from another checkpoint."
            )
        return
    plugin = accelerator.state.deepspeed_plugin
    universal = plugin is not None and plugin.deepspeed_config.get("checkpoint", {}).get("load_universal", False)
    if not any(checkpoint.glob("global_step*")) and not universal:
        raise ValueError(
            f"{checkpoint} was not written by DeepSpeed, which cannot load it. Resume with the launcher configuration "
            "that wrote it."
        )
    if shards and shards != accelerator.num_processes and not universal:
        raise ValueError(
            f"{checkpoint} holds an optimizer split over {shards} ranks by ZeRO, but this run has "
            f"{accelerator.num_processes}. Resume with {shards} processes, or convert it to a universal checkpoint of "
            "DeepSpeed (`ds_to_universal.py`) and set `load_universal`."
        )


def last_whole_checkpoint(output_dir: str | Path) -> Path | None:
    """
    The newest checkpoint that was written to its end, or None. One line in the log names each that was not.

    `trainer_state.json` is what a checkpoint gets last, so it tells whether the rest is there.

    Raises:
        `ValueError`: there is no checkpoint at all.
    """
    found = [
        (int(step), path)
        for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if (step := path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")).isdigit()
    ]
    if not found:
        raise ValueError(f"There is no checkpoint in {output_dir}. Leave `resume_from_checkpoint` out to start anew.")
    for _, path in sorted(found, reverse=True):
        try:
            _stage_attributes(path)
        except ValueError as error:
            logger.warning("Passed over: %s", error)
        else:
            return path
    return None


def _stage_attributes(checkpoint: Path) -> dict[str, Any]:
    """What [`StageCallback.state`] put into a checkpoint."""
    try:
        state = json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
        attributes = state["stateful_callbacks"][StageCallback.__name__]["attributes"]
        return {name: attributes[name] for name in ("stage", "policy_hash", "settings", "telemetry")}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{checkpoint} is not a whole checkpoint of MuGRPOTrainer ({type(error).__name__}: {error}). Resume from "
            "another `checkpoint-*` folder of the run, or start anew in another `output_dir`."
        ) from error
