"""The rows of each update: read, planned over all ranks, collated into this rank's micro-batches one update ahead."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

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
from .policy import attention_cost, has_varlen_attention, takes_attention_mask
from .rollout.engine import EngineError
from .schedule import Schedule
from .stage.batches import UpdatePlan, bundle_length, bundle_responses, plan_update
from .stage.collate import collate
from .stage.reader import Response, StageReader


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
        share_prompts (`bool` or None): see [`~mu_grpo_trl.stage.batches.bundle_responses`].
        padding_free (`bool`): pack sequences without padding.
        sort_by_length (`bool`): see [`~mu_grpo_trl.stage.batches.plan_update`].
        attention_cost (`float`): of the model, see there.
        read_ahead (`bool`): prepare the next update on a thread.
    """

    max_tokens: int
    max_rows: int
    skip_zero_advantage: bool
    mask_truncated: bool
    pad_token_id: int
    share_prompts: bool | None = False
    padding_free: bool = False
    sort_by_length: bool = True
    attention_cost: float = 0.0
    read_ahead: bool = True

    @classmethod
    def of(cls, config: MuGRPOConfig, model: PreTrainedModel, pad_token_id: int, num_parameters: int) -> BatchOptions:
        """
        What `config` asks for, and what `model` can do where it leaves that open.

        Raises:
            `ValueError`: it asks for a layout that the model's attention cannot compute.
        """
        can_share = takes_attention_mask(model)
        if config.share_prompts and not can_share:
            raise ValueError(
                f"`share_prompts=True` needs full attention by 'sdpa' in every layer, but {type(model).__name__} has "
                f"'{model.config._attn_implementation}' or other layers. Leave it out."
            )
        padding_free = has_varlen_attention(model) if config.padding_free is None else config.padding_free
        needs_every_row = bool(config.beta or config.entropy_coef) or not config.skip_zero_advantage
        return cls(
            max_tokens=config.max_tokens_per_microbatch,
            max_rows=config.per_device_train_batch_size,
            skip_zero_advantage=not needs_every_row,
            mask_truncated=config.mask_truncated_completions,
            pad_token_id=pad_token_id,
            share_prompts=config.share_prompts if can_share and not padding_free else False,
            padding_free=padding_free,
            sort_by_length=config.sort_by_length,
            attention_cost=attention_cost(model.config, num_parameters),
            read_ahead=config.read_ahead,
        )


@dataclass(frozen=True)
class UpdateBatch:
    """
    What one rank needs of one update.

    Args:
        microbatches (`list[dict[str, torch.Tensor]]`): this rank's, as many as every other rank's; see
            [`~mu_grpo_trl.stage.collate.collate`].
        num_responses (`int`): N, responses of the update over all ranks, skipped ones included.
        num_tokens (`int`): generated tokens of those.
        num_skipped (`int`): responses of those that nobody forwards.
        skipped_sums (`torch.Tensor`): the additive sums of the responses nobody forwards, counted on rank 0 alone.
        plan (`UpdatePlan`): of all ranks.
        rows (`list[list[tuple[int, int]]]`): `(group, sample)` of each response of each micro-batch.
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

    def counts(self, num_parameters: int) -> dict[str, float]:
        """What the update of a model of that size adds to the counters of [`~mu_grpo_trl.telemetry.Telemetry`]."""
        forwarded = self.plan.forwarded_tokens
        return {
            "updates": 1,
            "forwarded_tokens": forwarded,
            "padding_tokens": forwarded * self.plan.padding_share,
            "trained_tokens": self.trained_tokens,
            "flops": 6.0 * num_parameters * forwarded,
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
        following, schedule = update + 1, self._schedule
        last = schedule.first_update(self.stage) + schedule.updates_in(self.stage) - 1
        if self._options.read_ahead and update < last:
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
        prompts, completions, options = prompt_lengths[forwarded], completion_lengths[forwarded], self._options
        bundles = bundle_responses(
            group_of, prompts, completions, options.max_tokens, options.attention_cost, options.share_prompts
        )
        plan = plan_update(
            [bundle_length(bundle, prompts, completions) for bundle in bundles],
            self._num_ranks,
            options.max_tokens,
            max_rows_per_microbatch=options.max_rows,
            padding_free=options.padding_free,
            attention_cost=options.attention_cost,
            sort_by_length=options.sort_by_length,
        )
        microbatches = [
            [[(int(groups[group_of[i]]), int(sample_of[i])) for i in bundles[number]] for number in numbers]
            for numbers in plan.microbatches[self._rank]
        ]
        skipped = skipped_sums(completion_lengths[~forwarded].tolist() if self._rank == 0 else [])
        return UpdateBatch(
            microbatches=[self._collate(microbatch) for microbatch in microbatches],
            num_responses=advantages.size,
            num_tokens=int(completion_lengths.sum()),
            num_skipped=int((~forwarded).sum()),
            skipped_sums=skipped,
            plan=plan,
            rows=[list(chain.from_iterable(microbatch)) for microbatch in microbatches],
            metrics=_rollout_metrics(self.reader, groups, completion_lengths, truncated, advantages),
            trained_tokens=int(completion_lengths[forwarded].sum()),
        )

    def _forwarded(self, advantages: np.ndarray, truncated: np.ndarray) -> np.ndarray:
        keep = advantages != 0 if self._options.skip_zero_advantage else np.ones_like(advantages, dtype=bool)
        return keep & ~truncated if self._options.mask_truncated else keep

    def _collate(self, bundles: list[list[tuple[int, int]]]) -> dict[str, torch.Tensor]:
        responses = [[self._response(*row) for row in bundle] for bundle in bundles]
        return collate(responses, self._options.pad_token_id, self._options.padding_free)

    def _response(self, group: int, sample: int) -> Response:
        response = self.reader.response(group, sample)
        if self.anchors is not None:
            response = replace(response, behavior_logps=self.anchors.logps(group, sample))
        return response


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
        "rewards/unscorable_share": float(np.isnan(rewards).mean()),
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
