"""What may stop a run between updates: a signal, a gradient that is not finite, a policy that collapses."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from pyarrow import parquet
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from .collapse import CollapseWatch
from .config import MuGRPOConfig
from .losses import SUM_NAMES, LossInputs
from .schedule import Schedule
from .signals import Interrupted, StopRequest
from .stage.reader import StageReader

logger = logging.getLogger(__name__)

NONFINITE_FOLDER = "nonfinite"
MOST_SCALED_SKIPS = 30
"""Updates in a row that the loss scaler of fp16 may discard: it starts at a scale of 2¹⁶."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class LearningError(RuntimeError):
    """Training cannot go on in a useful way; the message says why, and what to resume from."""


class UpdateGuard(TrainerCallback):
    """
    Judges every update once its gradient is known, from numbers that are the same on all ranks, so that all ranks
    stop at the same update.

    Args:
        config (`MuGRPOConfig`): the run's options.
        accelerator (`Accelerator`): the trainer's.
        schedule (`Schedule`): which stage an update is in.
        stop (`StopRequest`): of this process.
    """

    def __init__(self, config: MuGRPOConfig, accelerator: Accelerator, schedule: Schedule, stop: StopRequest) -> None:
        self._config = config
        self._accelerator = accelerator
        self._schedule = schedule
        self._stop = stop
        self._watch = None
        if config.collapse_watch != "off":
            self._watch = CollapseWatch(
                config.collapse_window,
                config.collapse_negative_ratio,
                config.collapse_veto_share,
                config.collapse_entropy,
            )
        self._outcome: Interrupted | LearningError | None = None
        self._skipped = self._skipped_in_a_row = 0

    def flags(self) -> torch.Tensor:
        """This rank's stop request, to be added up over ranks with the sums of the update: shape `(2,)`, float64."""
        asked = [float(self._stop.signum == number) for number in _SIGNALS]
        return torch.tensor(asked, dtype=torch.float64, device=self._accelerator.device)

    def accepts(
        self, update: int, grad_norm: float, reduced: Sequence[float], model: Any, save: Callable[[Path], str]
    ) -> bool:
        """
        Whether this update's step may be taken; the gradient of one that may not is dropped, so that the step changes
        nothing. All ranks get the same answer.

        Args:
            update (`int`): its number.
            grad_norm (`float`): global norm of the gradient; a loss that is not finite shows in it.
            reduced (`Sequence[float]`): the update's sums and [`flags`], over all ranks.
            model (`nn.Module`): the wrapped model.
            save (`Callable[[Path], str]`): writes the update's rows below a folder and describes them.

        Raises:
            `LearningError`: the gradient is not finite, and `nonfinite` is `"stop"` or too many were skipped.
        """
        sums, asked = reduced[: len(SUM_NAMES)], reduced[len(SUM_NAMES) :]
        for number, ranks in zip(_SIGNALS, asked, strict=True):
            if ranks and self._outcome is None:
                self._outcome = Interrupted(number)
        if not math.isfinite(grad_norm):
            self._reject(update, grad_norm, save)
            if self._accelerator.distributed_type != DistributedType.DEEPSPEED and self._accelerator.scaler is None:
                model.zero_grad()
            return False
        self._skipped_in_a_row = 0
        if self._watch is not None:
            for alarm in self._watch.observe(update, self._schedule.stage_of(update), sums):
                self._sound(alarm)
        return True

    def metrics(self) -> dict[str, float]:
        """`nonfinite/skipped_updates`, once there are any."""
        return {"nonfinite/skipped_updates": float(self._skipped)} if self._skipped else {}

    def raise_outcome(self) -> None:
        """
        Raises:
            `Interrupted`, `LearningError`: what ended the training loop before its last update.
        """
        outcome, self._outcome = self._outcome, None
        if outcome is not None:
            raise outcome

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._outcome is None and self._accelerator.num_processes == 1 and self._stop.signum:
            self._outcome = Interrupted(self._stop.signum)  # it came after the update was judged
        if self._outcome is None:
            return
        if state.global_step >= state.max_steps and isinstance(self._outcome, Interrupted):
            self._outcome = None  # there was nothing left to stop
            return
        control.should_training_stop = True
        control.should_evaluate = False
        control.should_save = isinstance(self._outcome, Interrupted) and args.save_strategy != SaveStrategy.NO

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._outcome is not None:
            control.should_evaluate = control.should_save = False

    def _sound(self, alarm: str) -> None:
        if self._config.collapse_watch == "stop" and self._outcome is None:
            self._outcome = LearningError(
                f"{alarm} `collapse_watch: stop` ended training here. {self._newest_checkpoint()}"
            )
        elif self._accelerator.is_main_process:
            logger.warning("%s (`collapse_watch: stop` would end the run here.)", alarm)

    def _newest_checkpoint(self) -> str:
        paths = self._config.output_path.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        steps = [int(step) for path in paths if (step := path.name.rpartition("-")[2]).isdigit()]
        if not steps:
            return "No checkpoint was written before it."
        newest = self._config.output_path / f"{PREFIX_CHECKPOINT_DIR}-{max(steps)}"
        return f"No checkpoint was written since {newest}: resume from it or from one before."

    def _reject(self, update: int, grad_norm: float, save: Callable[[Path], str]) -> None:
        """Count an update that is not finite and save its rows, or stop."""
        self._skipped += 1
        self._skipped_in_a_row += 1
        limit = self._config.max_nonfinite_skips
        if self._accelerator.mixed_precision == "fp16":
            if self._skipped_in_a_row < MOST_SCALED_SKIPS:
                return  # the loss scaler discards such updates itself, and lowers its scale
            limit = MOST_SCALED_SKIPS
        saved = save(self._config.output_path / NONFINITE_FOLDER)
        finding = f"Update {update} has a loss or gradient that is not finite (gradient norm {grad_norm}). {saved}"
        if self._step_was_taken():
            raise LearningError(
                f"{finding} This DeepSpeed configuration does not check gradients, so the step was taken: the weights "
                f"in memory are lost. {self._newest_checkpoint()} Use ZeRO with `check_grad_overflow`."
            )
        if self._config.nonfinite == "stop":
            raise LearningError(
                f"{finding} No weight was changed. {self._newest_checkpoint()} `nonfinite: skip` goes on without "
                "such updates."
            )
        if self._skipped_in_a_row > limit:
            raise LearningError(
                f"{finding} It is number {self._skipped_in_a_row} in a row, more than `max_nonfinite_skips={limit}`. "
                f"{self._newest_checkpoint()}"
            )
        if self._accelerator.is_main_process:
            logger.warning("%s It is skipped (%d so far).", finding, self._skipped)

    def _step_was_taken(self) -> bool:
        """Whether DeepSpeed, which steps within the backward pass, has taken the step already."""
        if self._accelerator.distributed_type != DistributedType.DEEPSPEED:
            return False
        wrapped = self._accelerator.deepspeed_engine_wrapped
        assert wrapped is not None
        return wrapped.engine.was_step_applied()


def save_update(
    folder: Path,
    update: int,
    rank: int,
    reader: StageReader,
    rows: Sequence[Sequence[tuple[int, int]]],
    loss_inputs: Iterable[LossInputs],
) -> str:
    """
    Write what the loss of an update was made of to `<folder>/update-000123-rank-0.parquet`, one row a response.

    Args:
        folder (`Path`): made if it is missing.
        update (`int`), rank (`int`): of the run, and of this process.
        reader (`StageReader`): the stage.
        rows (`Sequence`): `(group, sample)` of each row of each micro-batch of this rank.
        loss_inputs (`Iterable[LossInputs]`): of each micro-batch.

    Returns:
        `str`: where it is and how many responses have log-probs that are not finite, in a sentence or two.
    """
    records, broken = [], 0
    for places, inputs in zip(rows, loss_inputs, strict=True):
        for row, (group, sample) in enumerate(places):
            mask = inputs.completion_mask[row]
            response = reader.response(group, sample)
            logps = inputs.policy_logps[row][mask].float().cpu().numpy()
            broken += not np.isfinite(logps).all()
            records.append(
                {
                    "stage": reader.manifest.stage,
                    "update": update,
                    "group": group,
                    "sample": sample,
                    "advantage": float(inputs.advantages[row]),
                    "prompt_ids": np.asarray(response.prompt_ids),
                    "completion_ids": np.asarray(response.completion_ids),
                    "behavior_logps": inputs.behavior_logps[row][mask].float().cpu().numpy(),
                    "policy_logps": logps,
                }
            )
    path = folder / f"update-{update:06d}-rank-{rank}.parquet"
    folder.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(records), path)
    return (
        f"{broken} of the {len(records)} responses that this rank forwarded have log-probs that are not finite; they "
        f"are in {path}."
    )
