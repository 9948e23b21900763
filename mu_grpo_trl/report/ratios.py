"""What the ratios of a stage would be under other weights: a sample of its responses, scored by a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from ..losses import (
    LossInputs,
    VetoScope,
    find_triggers,
    metrics_from_sums,
    mu_grpo_objective,
    token_log_ratios,
    veto_mask,
)
from ..policy import completion_logps
from ..stage import StageError
from ..stage.collate import collate
from ..stage.reader import Response, StageReader

MAX_TOKENS = 8192
"""Padded tokens forwarded at once."""


@dataclass(frozen=True)
class ScoredResponse:
    """
    A response under the checkpoint.

    Args:
        group (`int`), sample (`int`): where it is in the stage.
        advantage (`float`): A.
        completion_ids (`np.ndarray` int32 `(T,)`): its tokens.
        log_ratios (`np.ndarray` float32 `(T,)`): log π_θ(a_t) − b_t, NaN where b_t is not usable.
        triggers (`np.ndarray` bool `(T,)`): True at triggers.
        masked_tokens (`dict[str, int]`): by veto scope, how many of its tokens would be masked.
    """

    group: int
    sample: int
    advantage: float
    completion_ids: np.ndarray
    log_ratios: np.ndarray
    triggers: np.ndarray
    masked_tokens: dict[str, int]


@dataclass(frozen=True)
class RatioView:
    """
    A sample of a stage under a checkpoint.

    Args:
        checkpoint (`str`): whose weights.
        threshold (`float`): τ_c.
        num_tokens (`int`): generated tokens of the sample.
        metrics (`dict[str, float]`): of [`~mu_grpo_trl.losses.metrics_from_sums`], as if the sample were one update.
        responses (`list[ScoredResponse]`): in the order of the stage.
    """

    checkpoint: str
    threshold: float
    num_tokens: int
    metrics: dict[str, float]
    responses: list[ScoredResponse]

    @property
    def triggered(self) -> list[ScoredResponse]:
        """The responses with a trigger."""
        return [response for response in self.responses if response.triggers.any()]

    def masked(self) -> dict[str, tuple[int, int]]:
        """By veto scope, `(responses with a masked token, masked tokens)`."""
        scopes = get_args(VetoScope)
        tokens = {scope: [response.masked_tokens[scope] for response in self.responses] for scope in scopes}
        return {scope: (sum(count > 0 for count in counts), sum(counts)) for scope, counts in tokens.items()}

    def lowest(self, count: int) -> list[tuple[ScoredResponse, int]]:
        """The `count` tokens with A < 0 of the lowest ratio, as `(response, position)`; triggers come first."""
        negative = [response for response in self.responses if response.advantage < 0]
        places = [
            (float(response.log_ratios[t]), number, int(t))
            for number, response in enumerate(negative)
            for t in np.argsort(response.log_ratios)[:count]  # NaN is sorted last
            if not np.isnan(response.log_ratios[t])
        ]
        return [(negative[number], t) for _, number, t in sorted(places)[:count]]


def score_stage(
    reader: StageReader, checkpoint: str | Path, num_responses: int = 64, threshold: float = 1e-4
) -> RatioView:
    """
    Score responses with A ≠ 0 of prompt groups evenly spaced over the stage, in float32, at the stage's temperature.

    Args:
        reader (`StageReader`): the stage.
        checkpoint (`str` or `Path`): folder of a model or of an adapter, such as `checkpoint-16`.
        num_responses (`int`): the most to score; whole groups, so that at least one group is.
        threshold (`float`): τ_c.

    Raises:
        `StageError`: no response has an advantage, or the checkpoint's vocabulary lacks tokens of the stage.
    """
    rows = sample_rows(reader, num_responses)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.to(device).eval()
    _check_vocabulary(reader, rows, model.get_input_embeddings().num_embeddings, checkpoint)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    add_fused_lm_head(base, float(reader.manifest.sampling["temperature"]), True, outputs=("log_probs",))
    scored: dict[tuple[int, int], ScoredResponse] = {}
    sums: Any = 0
    for batch in _batches(rows, reader):
        responses = [reader.response(*row) for row in batch]
        inputs = _loss_inputs(model, responses, device)
        sums = (
            sums
            + mu_grpo_objective(
                inputs, clip_low=0.0, clip_high=5.0, veto_scope="sequence", veto_threshold=threshold
            ).sums
        )
        scored |= dict(zip(batch, _scored(batch, responses, inputs, threshold), strict=True))
    return RatioView(
        checkpoint=str(checkpoint),
        threshold=threshold,
        num_tokens=sum(len(response.completion_ids) for response in scored.values()),
        metrics=metrics_from_sums(sums.tolist()),
        responses=[scored[row] for row in rows],
    )


def sample_rows(reader: StageReader, num_responses: int) -> list[tuple[int, int]]:
    """
    `(group, sample)` of responses with A ≠ 0, at most `num_responses` of them but at least a group's.

    Raises:
        `StageError`: there are none.
    """
    groups = np.concatenate([part[reader.advantages(part).any(axis=1)] for part in np.array_split(reader.groups, 64)])
    if not len(groups):
        raise StageError(f"No response of {reader.path} has an advantage: there is nothing that the veto could mask.")
    count = min(len(groups), max(1, num_responses // reader.manifest.num_generations))
    chosen = groups[np.linspace(0, len(groups) - 1, count).round().astype(int)]
    places = np.argwhere(reader.advantages(chosen) != 0)
    return [(int(chosen[row]), int(sample)) for row, sample in places]


@torch.no_grad()
def _loss_inputs(model: Any, responses: Sequence[Response], device: torch.device) -> LossInputs:
    batch = {name: values.to(device) for name, values in collate([[one] for one in responses], None).items()}
    logps, _ = completion_logps(model, batch)
    return LossInputs(logps, batch["behavior_logps"], batch["advantages"], batch["completion_mask"])


def _scored(
    rows: Sequence[tuple[int, int]], responses: Sequence[Response], inputs: LossInputs, threshold: float
) -> Iterator[ScoredResponse]:
    log_ratios, usable_mask = token_log_ratios(inputs)
    triggers = find_triggers(log_ratios, inputs.advantages, usable_mask, threshold)
    masked = {
        scope: (inputs.completion_mask & ~veto_mask(triggers, scope)).sum(dim=-1).tolist()
        for scope in get_args(VetoScope)
    }
    values = torch.where(usable_mask, log_ratios, torch.nan).float().cpu().numpy()
    for number, ((group, sample), response) in enumerate(zip(rows, responses, strict=True)):
        length = len(response.completion_ids)
        yield ScoredResponse(
            group=group,
            sample=sample,
            advantage=response.advantage,
            completion_ids=response.completion_ids,
            log_ratios=values[number, :length],
            triggers=triggers[number, :length].cpu().numpy(),
            masked_tokens={scope: counts[number] for scope, counts in masked.items()},
        )


def _batches(rows: Sequence[tuple[int, int]], reader: StageReader) -> Iterator[list[tuple[int, int]]]:
    """`rows` by length, cut so that a padded batch holds at most `MAX_TOKENS`, or one row."""
    prompts, completions = reader.lengths([group for group, _ in rows])
    samples = [sample for _, sample in rows]
    lengths = (prompts + completions)[np.arange(len(rows)), samples]
    batch: list[tuple[int, int]] = []
    for number in np.argsort(lengths, kind="stable").tolist():
        if batch and (len(batch) + 1) * lengths[number] > MAX_TOKENS:
            yield batch
            batch = []
        batch.append(rows[number])
    yield batch


def _check_vocabulary(
    reader: StageReader, rows: Sequence[tuple[int, int]], num_embeddings: int, checkpoint: str | Path
) -> None:
    largest = max(int(reader.response(*row).completion_ids.max()) for row in rows)
    if largest >= num_embeddings:
        raise StageError(
            f"{reader.path} has token {largest}, but {checkpoint} knows {num_embeddings}: it is another model. Name a "
            "checkpoint of the run that owns the stage."
        )
