"""What hooks into the Hugging Face training loop: timers, checkpoints at stage ends, the log and settings on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from .checkpoints import CheckpointError, read_stage_state
from .phases import register_fused_head
from .schedule import Schedule
from .stage.writer import write_atomically
from .telemetry import METRICS_NAME, RUN_NAME, Telemetry


class StageCallback(TrainerCallback, ExportableState):
    """
    Charges each update to the timer `optimize`, saves (with `eval_stage_ends` also evaluates) at the end of every
    stage, and keeps in the checkpoint which stage it lies in, which weights generated that stage, the settings of its
    data, and the timers.

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
            `CheckpointError`: the folder is no whole checkpoint of `MuGRPOTrainer`, or one of a run on other data.
        """
        attributes = read_stage_state(Path(checkpoint))
        stored, now = attributes["settings"], json.loads(json.dumps(self._settings()))
        changed = [
            f"{name}: {stored.get(name)!r} → {value!r}" for name, value in now.items() if stored.get(name) != value
        ]
        if changed:
            raise CheckpointError(
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

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        done, schedule = state.global_step, self._schedule
        ends_run = done == schedule.num_updates
        ends_stage = ends_run or done == schedule.first_update(schedule.stage_of(done))
        if (ends_run or (ends_stage and args.save_at_stage_end)) and args.save_strategy != SaveStrategy.NO:
            control.should_save = True
        if ends_stage and args.eval_stage_ends:
            control.should_evaluate = True


class RunFiles(TrainerCallback):
    """
    Keeps in `output_dir` what `mu-grpo report` reads: `metrics.jsonl`, one entry of the log a line as soon as it is
    logged, and `run.json`, the model's name and all settings, without secrets.

    A start rewrites both: the lines are those up to the checkpoint it goes on from, so that no update is there twice.
    A kill costs at most the line being written.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        folder = Path(str(args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        run = {
            "model": kwargs["model"].config._name_or_path,
            "num_processes": args.world_size,
            "settings": args.to_dict(),
        }
        write_atomically(folder / RUN_NAME, json.dumps(run, indent=1, default=str).encode())
        write_atomically(folder / METRICS_NAME, "".join(map(_line, state.log_history)).encode())

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            with open(Path(str(args.output_dir)) / METRICS_NAME, "a", encoding="utf-8") as file:
                file.write(_line(state.log_history[-1]))


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry) + "\n"
