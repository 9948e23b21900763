"""What hooks into the Hugging Face training loop: timers, checkpoints at stage ends, what makes a checkpoint whole."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from .phases import register_fused_head
from .schedule import Schedule
from .telemetry import Telemetry

logger = logging.getLogger(__name__)

FILES_NAME = "files.json"
_FULL_BELOW_BYTES = 2**20


class CheckpointError(ValueError):
    """A checkpoint cannot be written, is not whole, or belongs to a run on other data; the message says which."""


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
            `CheckpointError`: the folder is no whole checkpoint of `MuGRPOTrainer`, or one of a run on other data.
        """
        attributes = _stage_attributes(Path(checkpoint))
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

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        done, schedule = state.global_step, self._schedule
        ends_stage = done == schedule.num_updates or done == schedule.first_update(schedule.stage_of(done))
        if ends_stage and args.save_strategy != SaveStrategy.NO:
            control.should_save = True


@contextmanager
def writing_checkpoint(output_dir: Path) -> Iterator[None]:
    """
    Raises:
        `CheckpointError`: in place of what the libraries say when the disk takes no more.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        free = shutil.disk_usage(output_dir).free
        if isinstance(error, RuntimeError) and free > _FULL_BELOW_BYTES:
            raise
        raise CheckpointError(
            f"The checkpoint could not be written to {output_dir} ({free} bytes free): {error}. Make room there; a "
            "restart goes on from the checkpoint before it, and no stage is lost."
        ) from error


def seal_checkpoint(checkpoint: str | Path) -> None:
    """Write down what files `checkpoint` has, and how long they are, so that one that is cut or gone is noticed."""
    folder = Path(checkpoint)
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in _files(folder)}
    (folder / FILES_NAME).write_text(json.dumps(sizes, indent=1))


def _files(folder: Path) -> list[Path]:
    unlisted = (folder / FILES_NAME, folder / TRAINER_STATE_NAME)
    return sorted(path for path in folder.rglob("*") if path.is_file() and path not in unlisted)


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
        except CheckpointError as error:
            logger.warning("Passed over: %s", error)
        else:
            return path
    return None


def _stage_attributes(checkpoint: Path) -> dict[str, Any]:
    """What [`StageCallback.state`] put into a checkpoint that has all its files."""
    try:
        sizes = json.loads((checkpoint / FILES_NAME).read_text())
        for path in (checkpoint / name for name in sizes):
            if path.stat().st_size != sizes[str(path.relative_to(checkpoint))]:
                raise ValueError(f"{path.name} was cut")
        state = json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
        attributes = state["stateful_callbacks"][StageCallback.__name__]["attributes"]
        return {name: attributes[name] for name in ("stage", "policy_hash", "settings", "telemetry")}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint} is not a whole checkpoint of MuGRPOTrainer ({type(error).__name__}: {error}). Resume from "
            "another `checkpoint-*` folder of the run, or start anew in another `output_dir`."
        ) from error
