"""The rows of each update: read, planned over all ranks, collated into this rank's micro-batches one update ahead."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from .anchors import AnchorStore
from .config import MuGRPOConfig
from .losses import (
    LossInputs,
    LossOutputs,
    m2po_clip_bound,
    m2po_objective,
    mu_grpo_objective,
    skipped_sums,
    token_log_ratios,
)
from .rollout.engine import EngineError
from .schedule import Schedule
from .stage.batches import UpdatePlan, collate, plan_update
from .stage.reader import StageReader


@dataclass(frozen=True)
class BatchOptions:
    """
    How an update becomes micro-batches.

    Args:
        max_tokens (`int`): padded tokens a rank forwards at once.
        max_rows (`int`): rows a rank forwards at once.
        skip_zero_advantage (`bool`): leave responses without gradient out; not where KL or entropy need them.
        mask_truncated (`bool`): responses cut by the token limit add nothing (they still count in N).
        pad_token_id (`int`): fills padded positions.
    """

    max_tokens: int
    max_rows: int
    skip_zero_advantage: bool
    mask_truncated: bool
    pad_token_id: int


@dataclass(frozen=True)
class UpdateBatch:
    """
    What one rank needs of one update.

    Args:
        microbatches (`list[dict[str, torch.Tensor]]`): this rank's, as many as every other rank's; see
            [`~mu_grpo_trl.stage.batches.collate`].
        num_responses (`int`): N, responses of the update over all ranks, skipped ones included.
        num_tokens (`int`): generated tokens of those.
        num_skipped (`int`): responses of those that nobody forwards.
        skipped_sums (`torch.Tensor`): the additive sums of the responses nobody forwards, counted on rank 0 alone.
        plan (`UpdatePlan`): of all ranks.
        rows (`list[list[tuple[int, int]]]`): `(group, sample)` of each row of each micro-batch.
        metrics (`dict[str, float]`): of the update's rollouts, under TRL's names; the same on every rank.
        trained_tokens (`int`): generated tokens of forwarded responses over all ranks.
    """

    microbatches: list[dict[str, torch.Tensor]]
    num_responses: int
    num_tokens: int
    num_skipped: int
    skipped_sums: torch.Tensor
    plan: UpdatePlan
    rows: list[list[tuple[int, int]]]
    metrics: dict[str, float]
    trained_tokens: int

    def counts(self) -> dict[str, float]:
        """What the update adds to the counters of [`~mu_grpo_trl.telemetry.Telemetry`]."""
        forwarded = self.plan.forwarded_tokens
        return {
            "updates": 1,
            "forwarded_tokens": forwarded,
            "padding_tokens": forwarded * self.plan.padding_share,
            "trained_tokens": self.trained_tokens,
            "responses": self.num_responses,
            "skipped_responses": self.num_skipped,
        }


class StageBatches:
    """
    The updates of one stage, as this rank sees them. While one update is optimized the next is prepared on a thread.

    Args:
        reader (`StageReader`): the complete stage.
        schedule (`Schedule`): which groups an update holds.
        stage (`int`): its number.
        rank (`int`), num_ranks (`int`): of this process.
        options (`BatchOptions`): how to cut micro-batches.
        anchors (`AnchorStore` or None): recomputed behavior log-probs that take the place of the engine's.
    """

    def __init__(
        self,
        reader: StageReader,
        schedule: Schedule,
        stage: int,
        rank: int,
        num_ranks: int,
        options: BatchOptions,
        anchors: AnchorStore | None = None,
    ) -> None:
        self.reader = reader
        self.stage = stage
        self.anchors = anchors
        self._schedule = schedule
        self._rank = rank
        self._num_ranks = num_ranks
        self._options = options
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stage-batches")
        self._ahead: tuple[int, Future[UpdateBatch]] | None = None

    def update(self, update: int) -> UpdateBatch:
        """The batch of `update` (of the run, not of the stage); starts on the one after it."""
        ahead = self._ahead
        batch = ahead[1].result() if ahead is not None and ahead[0] == update else self.build(update)
        following = update + 1
        if following < self._schedule.first_update(self.stage) + self._schedule.updates_in(self.stage):
            self._ahead = following, self._thread.submit(self.build, following)
        return batch

    def close(self) -> None:
        """Stop reading ahead."""
        self._thread.shutdown(cancel_futures=True)

    def build(self, update: int) -> UpdateBatch:
        """Read, plan and collate one update."""
        groups = self._schedule.update_groups(update)
        prompt_lengths, completion_lengths = self.reader.lengths(groups)
        advantages = self.reader.advantages(groups)
        truncated = self.reader.truncated(groups)
        forwarded = self._forwarded(advantages, truncated)
        group_of, sample_of = np.nonzero(forwarded)
        plan = plan_update(
            prompt_lengths[forwarded],
            completion_lengths[forwarded],
            self._num_ranks,
            self._options.max_tokens,
            max_rows_per_microbatch=self._options.max_rows,
        )
        rows = [
            [(int(groups[group_of[row]]), int(sample_of[row])) for row in microbatch]
            for microbatch in plan.microbatches[self._rank]
        ]
        skipped = skipped_sums(completion_lengths[~forwarded].tolist() if self._rank == 0 else [])
        return UpdateBatch(
            microbatches=[self._collate(microbatch) for microbatch in rows],
            num_responses=advantages.size,
            num_tokens=int(completion_lengths.sum()),
            num_skipped=int((~forwarded).sum()),
            skipped_sums=skipped,
            plan=plan,
            rows=rows,
            metrics=_rollout_metrics(self.reader, groups, completion_lengths, truncated, advantages),
            trained_tokens=int(completion_lengths[forwarded].sum()),
        )

    def _forwarded(self, advantages: np.ndarray, truncated: np.ndarray) -> np.ndarray:
        keep = advantages != 0 if self._options.skip_zero_advantage else np.ones_like(advantages, dtype=bool)
        return keep & ~truncated if self._options.mask_truncated else keep

    def _collate(self, rows: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
        responses = [self.reader.response(group, sample) for group, sample in rows]
        if self.anchors is not None:
            responses = [
                replace(response, behavior_logps=self.anchors.logps(*row))
                for response, row in zip(responses, rows, strict=True)
            ]
        return collate(responses, self._options.pad_token_id)


def make_objective(config: MuGRPOConfig) -> Callable[..., LossOutputs]:
    """The configured objective as a function of `LossInputs` (and of M2PO's `clip`, where it is found beforehand)."""
    if config.objective == "m2po":
        return partial(
            m2po_objective,
            threshold=config.m2po_threshold,
            veto_threshold=config.veto_threshold,
            kl_coefficient=config.beta,
            kl_times_ratio=config.use_bias_correction_kl,
        )
    clip_low, clip_high = config.clip_range
    return partial(
        mu_grpo_objective,
        clip_low=clip_low,
        clip_high=clip_high,
        veto_scope=config.veto_scope,  # type: ignore[arg-type]  # checked by the config
        veto_threshold=config.veto_threshold,
        kl_coefficient=config.beta,
        kl_times_ratio=config.use_bias_correction_kl,
    )


def check_first_ratios(metrics: dict[str, float], tolerance: float, reader: StageReader) -> None:
    """
    Before the first step of a stage the policy still is β: its ratios must be 1 on the real data.

    Args:
        metrics (`dict[str, float]`): diagnostics of the first rows of the stage, over all ranks.
        tolerance (`float`): largest mean |log-ratio|, in nats.
        reader (`StageReader`): the stage.

    Raises:
        `EngineError`: they are not.
    """
    mean = metrics.get("ratio/abs_log_mean", 0.0)
    if not mean <= tolerance:
        raise EngineError(
            f"Before the first update of stage {reader.manifest.stage} the trainer's log-probs differ from the stored "
            f"ones by {mean:.4g} nats on average (triggers: {metrics['veto/trigger_tokens']:.0f}), above "
            f"`probe_tolerance` {tolerance:g}: the stage was not sampled from these weights at temperature "
            f"{reader.manifest.sampling['temperature']}. Check the server's --logprobs-mode, its weights and the "
            f"tokenizer; the stage is kept in {reader.path}."
        )


def m2po_update_clip(microbatches: list[LossInputs], accelerator: Accelerator, threshold: float) -> torch.Tensor:
    """M2PO's bound √c of the log-ratio over the tokens of all micro-batches of all ranks. Collective."""
    reachable = []
    for inputs in microbatches:
        log_ratios, usable_mask = token_log_ratios(inputs)
        reachable.append((log_ratios * inputs.advantages.sign()[:, None])[usable_mask].clamp(min=0))
    # Padding is 0, like every token that clipping cannot reach.
    values: Any = accelerator.gather(accelerator.pad_across_processes(torch.cat(reachable)))
    return m2po_clip_bound(values, torch.ones_like(values), values > 0, threshold)


def _rollout_metrics(
    reader: StageReader, groups: np.ndarray, lengths: np.ndarray, truncated: np.ndarray, advantages: np.ndarray
) -> dict[str, float]:
    """TRL's names for what it logs of a generation batch."""
    rewards = reader.rewards(groups)
    metrics = {
        "completions/mean_length": float(lengths.mean()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(truncated.mean()),
        "frac_reward_zero_std": float((~advantages.any(axis=1)).mean()),
    }
    scored = rewards[~np.isnan(rewards)]
    if scored.size:
        metrics["reward"] = float(scored.mean())
        metrics["reward_std"] = float(scored.std())
    for name in reader.manifest.reward_names:
        values = reader.rewards(groups, name)
        if not np.isnan(values).all():
            metrics[f"rewards/{name}/mean"] = float(np.nanmean(values))
    return metrics
