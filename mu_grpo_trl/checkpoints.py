"""Checkpoints that tell whether they are whole, and which of them a run goes on from."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors import SafetensorError
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .config import MuGRPOConfig
from .schedule import Schedule
from .telemetry import Telemetry

logger = logging.getLogger(__name__)

FILES_NAME = "files.json"
STATE_OWNER = "StageCallback"
_FULL_BELOW_BYTES = 2**20


class CheckpointError(ValueError):
    """A checkpoint cannot be written, is not whole, or belongs to a run on other data; the message says which."""


class WholeCheckpoints:
    """Mixin of a `Trainer`: its checkpoints can be told from those that were cut, and none has an update after it."""

    args: MuGRPOConfig
    accelerator: Any
    state: Any
    schedule: Schedule
    telemetry: Telemetry

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = self.args.output_path / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with self.telemetry.interval("checkpoint"), writing_checkpoint(self.args.output_path):
            if self.accelerator.is_main_process:  # a damaged one, from before this start: not whole until its end
                (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)  # type: ignore[misc]

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        self.accelerator.wait_for_everyone()  # what is written next, `trainer_state.json`, says that all is there
        if self.accelerator.is_main_process:
            list_files(Path(output_dir))

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step < self.schedule.num_updates:  # the parent takes an update before it looks
            super()._run_epoch(*args, **kwargs)  # type: ignore[misc]


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


def list_files(checkpoint: Path) -> None:
    """Write down the files of a checkpoint and their sizes, so that one that is cut or gone is noticed."""
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != FILES_NAME]
    sizes = {str(path.relative_to(checkpoint)): path.stat().st_size for path in sorted(files)}
    (checkpoint / FILES_NAME).write_text(json.dumps(sizes, indent=1))


def last_whole_checkpoint(output_dir: str | Path) -> Path | None:
    """
    The newest checkpoint that was written to its end, or None. One line in the log names each that was not.

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
            read_stage_state(path)
        except CheckpointError as error:
            logger.warning("Passed over: %s", error)
        else:
            return path
    return None


def read_stage_state(checkpoint: Path) -> dict[str, Any]:
    """
    The stage, its policy, settings and timers in a checkpoint that has all its files.

    `trainer_state.json` is what a checkpoint gets last, so it tells whether the rest was written; the sizes beside it
    tell whether the rest is still there.

    Raises:
        `CheckpointError`: it is not whole.
    """
    try:
        state = json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
        for name, size in json.loads((checkpoint / FILES_NAME).read_text()).items():
            if name != TRAINER_STATE_NAME and (checkpoint / name).stat().st_size != size:
                raise ValueError(f"{name} was cut")
        attributes = state["stateful_callbacks"][STATE_OWNER]["attributes"]
        return {name: attributes[name] for name in ("stage", "policy_hash", "settings", "telemetry")}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint} is not a whole checkpoint of MuGRPOTrainer ({type(error).__name__}: {error}). Resume from "
            "another `checkpoint-*` folder of the run, or start anew in another `output_dir`."
        ) from error


def check_optimizer_state(checkpoint: Path, accelerator: Accelerator) -> None:
    """
    Whether this run can take up the optimizer of `checkpoint`; transformers would go on with a fresh one in silence.

    Raises:
        `CheckpointError`: it has none, another backend wrote it, or DeepSpeed split it for another number of ranks.
    """
    shards = len(list(checkpoint.glob("global_step*/*_optim_states.pt")))
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        if not any(checkpoint.glob("optimizer*")):
            written = "DeepSpeed wrote it" if shards else "`save_only_model` leaves it out"
            raise CheckpointError(
                f"{checkpoint} has no optimizer state that this run can load ({written}): the run would not go on as "
                "it would have. Resume with the launcher configuration that wrote it, or from another checkpoint."
            )
        return
    plugin = accelerator.state.deepspeed_plugin
    universal = plugin is not None and plugin.deepspeed_config.get("checkpoint", {}).get("load_universal", False)
    if not any(checkpoint.glob("global_step*")) and not universal:
        raise CheckpointError(
            f"{checkpoint} was not written by DeepSpeed, which cannot load it. Resume with the launcher configuration "
            "that wrote it."
        )
    if shards and shards != accelerator.num_processes and not universal:
        raise CheckpointError(
            f"{checkpoint} holds an optimizer split over {shards} ranks by ZeRO, but this run has "
            f"{accelerator.num_processes}. Resume with {shards} processes, or convert it to a universal checkpoint of "
            "DeepSpeed (`ds_to_universal.py`) and set `load_universal`."
        )
