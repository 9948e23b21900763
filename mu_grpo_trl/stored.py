"""Train on a stage that is already on disk: no policy is published, no engine starts, only the checks are made."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from .config import MuGRPOConfig
from .schedule import Schedule
from .stage.reader import StageReader
from .stage.schema import Manifest, StageError, read_manifest
from .staging import StageMaker

logger = logging.getLogger(__name__)


def stored_schedule(config: MuGRPOConfig, manifest: Manifest) -> Schedule:
    """
    One pass over a stored stage; sets `max_steps` to its number of updates.

    Groups that fill no update are left out, the last ones first.

    Raises:
        `ValueError`: the stage has not enough prompt groups for one update, or for `max_steps` of them.
    """
    groups, size = manifest.num_groups, config.prompts_per_update
    available = groups // size
    if not available:
        raise ValueError(
            f"`prompts_per_update={size}` is more than the {groups} prompt groups of the stage "
            f"{config.train_on_stage!r}. Lower it to at most {groups}."
        )
    if config.max_steps > available:
        raise ValueError(
            f"`max_steps={config.max_steps}` is more than the {available} updates of {size} prompt groups in the "
            f"stage {config.train_on_stage!r}, which has {groups}. Lower it to at most {available}, or leave it out."
        )
    if config.max_steps <= 0:
        config.max_steps = available
    return Schedule(
        num_prompts=groups,
        prompts_per_update=size,
        stage_updates=available,
        num_updates=config.max_steps,
        seed=config.seed,
        shuffle_stage=config.shuffle_stage,
    )


class StoredStage(StageMaker):
    """A [`~mu_grpo_trl.staging.StageMaker`] whose only stage is the one in `train_on_stage`; it never changes."""

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | {"fingerprint of the stage": read_manifest(self.folder(0)).fingerprint()}

    def folder(self, stage: int) -> Path:
        return Path(str(self._config.train_on_stage))

    def make(self, stage: int) -> StageReader:
        reader = self._together(lambda _: self._checked(stage))
        left_out = reader.manifest.num_groups - self._schedule.num_groups(stage)
        if left_out and self._accelerator.is_main_process:
            logger.warning(
                "%s holds %d prompt groups: %d updates of %d take all but the last %d.",
                reader.path, reader.manifest.num_groups, self._schedule.updates_in(stage),
                self._schedule.prompts_per_update, left_out,
            )  # fmt: skip
        self._check_signal(reader)
        return reader

    def _verified(self, stage: int, policy_hash: str) -> StageReader:
        return self._checked(stage)  # which weights generated it is part of its fingerprint

    def _checked(self, stage: int) -> StageReader:
        """
        The stage, complete, and on the main process its bytes and all that its rows depend on.

        Raises:
            `StageError`: it cannot be read, or was generated with other settings than this run has.
        """
        main = self._accelerator.is_main_process
        reader = StageReader(self.folder(stage), verify=main)
        if main and (difference := reader.manifest.first_difference(self._as_now(reader.manifest))):
            raise StageError(
                f"The stage {self._config.train_on_stage!r} was generated with other settings: {difference} (stored → "
                "now). Only `prompts_per_update` is free: set the others as they were, or fill another stage."
            )
        return reader

    def _as_now(self, manifest: Manifest) -> Manifest:
        return replace(
            manifest,
            num_generations=self._config.num_generations or 0,
            dataset_hash=self._hashes[0],
            tokenizer_hash=self._hashes[1],
            sampling={**asdict(self._sampling(0)), "seed": manifest.sampling["seed"]},
            reward_names=tuple(self._rewards.names),
            scoring=self._scoring,
        )


def make_stage_maker(config: MuGRPOConfig, *arguments: Any) -> StageMaker:
    """What gives the trainer its stages. The arguments are [`~mu_grpo_trl.staging.StageMaker`]'s."""
    return (StoredStage if config.train_on_stage else StageMaker)(config, *arguments)
