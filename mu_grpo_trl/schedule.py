"""
Which prompts belong to which stage and update. Pure arithmetic on (seed, epoch, stage): nothing is kept between calls,
so that every rank, and every restart, gets the same answer in whatever order it asks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

# One random stream a purpose. Changing a number changes the data of every run.
_EPOCH_STREAM, _STAGE_ORDER_STREAM, _SAMPLING_STREAM = 0, 1, 2


@dataclass(frozen=True)
class Schedule:
    """
    The prompts of a run are one endless stream of epochs, each a new permutation of the dataset. Update u consumes the
    `prompts_per_update` prompts from position u · `prompts_per_update` on; a stage is `stage_updates` updates in a
    row. So a stage may be larger than the dataset or straddle epochs, and how long stages are does not change which
    prompt comes when.

    With 5 prompts, 2 per update, 2 updates a stage and 5 updates in all:

    ```
    stream   3 0 4 1 2 | 2 4 0 1 3 | ...     epoch permutations
    update   0 0 1 1 2   2 3 3 4 4
    stage    0 0 0 0 1   1 1 1 2 2           the last stage has one update
    ```

    Args:
        num_prompts (`int`): Prompts in the dataset.
        prompts_per_update (`int`): B_mini, prompt groups an update, over all ranks.
        stage_updates (`int`): μ, updates a stage.
        num_updates (`int`): Updates of the run; the last stage is shorter if it is no multiple of `stage_updates`.
        seed (`int`): Seed of permutations and sampling, not negative.
        shuffle (`bool`): Permute the prompts anew each epoch; False keeps the dataset's order.
        shuffle_stage (`bool`): Permute the groups among the updates of their stage as well.

    Raises:
        ValueError: If a count is below 1, the seed negative, or the dataset smaller than one update.
    """

    num_prompts: int
    prompts_per_update: int
    stage_updates: int
    num_updates: int
    seed: int
    shuffle: bool = True
    shuffle_stage: bool = False

    def __post_init__(self) -> None:
        for name in ("num_prompts", "prompts_per_update", "stage_updates", "num_updates"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} is {value}, which leaves nothing to train on: it must be at least 1.")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}, which random streams cannot start from: it must not be negative.")
        if self.num_prompts < self.prompts_per_update:
            raise ValueError(
                f"The dataset has {self.num_prompts} prompts, fewer than the {self.prompts_per_update} of one update, "
                f"so that every update would repeat prompts: lower prompts_per_update to at most {self.num_prompts}, "
                "or add prompts."
            )

    @property
    def num_stages(self) -> int:
        """Stages of the run, a shorter last one included."""
        return -(-self.num_updates // self.stage_updates)

    def stage_of(self, update: int) -> int:
        """Stage that holds an update."""
        self._check("update", update, self.num_updates)
        return update // self.stage_updates

    def first_update(self, stage: int) -> int:
        """First update of a stage."""
        self._check("stage", stage, self.num_stages)
        return stage * self.stage_updates

    def updates_in(self, stage: int) -> int:
        """Updates of a stage: `stage_updates`, or what is left for the last one."""
        return min(self.stage_updates, self.num_updates - self.first_update(stage))

    def num_groups(self, stage: int) -> int:
        """Prompt groups of a stage: what its updates consume, and no more."""
        return self.updates_in(stage) * self.prompts_per_update

    def prompt_indices(self, stage: int) -> NDArray[np.int64]:
        """Dataset index of each prompt group of a stage, shape `(num_groups,)`. Memory: an epoch and a stage."""
        start = self.first_update(stage) * self.prompts_per_update
        stop = start + self.num_groups(stage)
        epochs = range(start // self.num_prompts, (stop - 1) // self.num_prompts + 1)
        prompts = np.concatenate([self._epoch_order(epoch) for epoch in epochs])
        offset = epochs.start * self.num_prompts
        return prompts[start - offset : stop - offset]

    def update_groups(self, update: int) -> NDArray[np.int64]:
        """Positions in its stage of the prompt groups of an update, shape `(prompts_per_update,)`."""
        stage = self.stage_of(update)
        start = (update - self.first_update(stage)) * self.prompts_per_update
        stop = start + self.prompts_per_update
        if not self.shuffle_stage:
            return np.arange(start, stop, dtype=np.int64)
        return self._permutation(self.num_groups(stage), _STAGE_ORDER_STREAM, stage)[start:stop]

    def stage_seed(self, stage: int) -> int:
        """Sampling seed of a stage, in [0, 2⁶³)."""
        self._check("stage", stage, self.num_stages)
        return int(self._stream(_SAMPLING_STREAM, stage).generate_state(1, np.uint64)[0] >> np.uint64(1))

    @staticmethod
    def num_updates_for(max_steps: int, num_train_epochs: float, num_prompts: int, prompts_per_update: int) -> int:
        """
        Updates of a run: `max_steps` if positive, else enough for `num_train_epochs` passes, rounded up to a whole
        update (its surplus prompts are the next epoch's first).

        Raises:
            ValueError: If neither asks for a single update.
        """
        if max_steps > 0:
            return max_steps
        if not (0 < num_train_epochs < math.inf):
            raise ValueError(
                f"max_steps is {max_steps} and num_train_epochs {num_train_epochs}, which is no length of a run: set "
                "one of them to a positive number."
            )
        # By the decimals as written: 1.1 epochs of 100 prompts are 110 prompts, while 1.1 * 100 is a little more.
        return math.ceil(Fraction(str(num_train_epochs)) * num_prompts / prompts_per_update)

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(self.num_prompts, dtype=np.int64)
        return self._permutation(self.num_prompts, _EPOCH_STREAM, epoch)

    def _permutation(self, size: int, stream: int, index: int) -> NDArray[np.int64]:
        # NumPy keeps raw bits the same from version to version, but not what `Generator.permutation` makes of them.
        keys = np.random.Philox(self._stream(stream, index)).random_raw(size)
        return np.argsort(keys, kind="stable").astype(np.int64, copy=False)

    def _stream(self, stream: int, index: int) -> np.random.SeedSequence:
        return np.random.SeedSequence(self.seed, spawn_key=(stream, index))

    @staticmethod
    def _check(name: str, value: int, stop: int) -> None:
        if not 0 <= value < stop:
            raise ValueError(f"{name} {value} is not part of the run: choose one in [0, {stop}).")
