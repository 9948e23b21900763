"""Log-probs of completion tokens from the LM head, a few rows of logits at a time, where no fused kernel does it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from trl.trainer.utils import FusedCausalLMOutput, maybe_gather_lm_head_ctx

TILE_BYTES = 4 * 2**20
"""Logits held at once. They are gone over several times, so they should stay in the processor's cache, ..."""
MIN_TILE_ROWS = 256
"""... but with a large vocabulary reading the weights again for every tile must not cost more than the products."""

_TRANSFORMED_LOGITS = (
    "final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling",
)  # fmt: skip


def why_not_tiled(model: PreTrainedModel) -> str | None:
    """The reason why [`tiled_forward`] cannot compute the logits of `model`, or None: they are `hidden @ weight.T`."""
    text, head = model.config.get_text_config(), model.get_output_embeddings()
    transformed = [name for name in _TRANSFORMED_LOGITS if getattr(text, name, None) is not None]
    if transformed:
        return f"`{transformed[0]}` of its configuration changes the logits"
    if type(head) is not nn.Linear or head.bias is not None:
        return f"its LM head is {head}, not a linear layer without bias"
    if getattr(text, "output_router_logits", False):
        return "it returns router logits"
    return None


def tiled_forward(
    model: Any, *args: Any, labels: Tensor, temperature: float, cast_to_fp32: bool, **kwargs: Any
) -> FusedCausalLMOutput:
    """
    What TRL's fused head returns with `outputs=("log_probs",)`, its loss left out.

    Args:
        model (`PreTrainedModel`): for which [`why_not_tiled`] has no reason.
        labels (`torch.Tensor` of shape `(B, L)`): −100 where no log-prob is wanted.
        temperature (`float`): divides the logits.
        cast_to_fp32 (`bool`): compute the head in float32 whatever the model's dtype.
        args, kwargs: for the model below the head.
    """
    hidden = model.base_model(*args, **kwargs).last_hidden_state[:, :-1]
    labels = labels[:, 1:]
    mask = labels != -100
    weight = model.get_output_embeddings().weight
    if isinstance(weight, DTensor):  # FSDP2
        weight = weight.full_tensor()
    autocast = torch.is_autocast_enabled(hidden.device.type) and not cast_to_fp32
    dtype = torch.get_autocast_dtype(hidden.device.type) if autocast else hidden.dtype
    selected = hidden[mask].to(torch.float32 if cast_to_fp32 else dtype)
    gathered = maybe_gather_lm_head_ctx(weight)  # pyright: ignore[reportArgumentType]  # a whole tensor is left alone
    with gathered, torch.autocast(hidden.device.type, enabled=False):
        logps = _TiledLogProbs.apply(selected, weight, labels[mask], temperature)
    assert isinstance(logps, Tensor)
    # Connected to the model even without a label: an empty micro-batch is a differentiable zero.
    log_probs = logps.new_zeros(mask.shape).masked_scatter(mask, logps)
    return FusedCausalLMOutput(log_probs=log_probs, label_mask=mask)  # pyright: ignore[reportArgumentType]


class _TiledLogProbs(torch.autograd.Function):
    """`log_softmax(hidden @ weight.T / temperature)` at the targets, float32 `(N,)`; its backward computes the logits
    again. Nothing of the size of a tile is allocated but the tile and one temporary."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
        log_z = hidden.new_empty(len(hidden), dtype=torch.float32)
        logps = torch.empty_like(log_z)
        typed_weight = weight.to(hidden.dtype)
        for rows in _tiles(len(hidden), len(weight)):
            logits = _logits(hidden[rows], typed_weight, temperature)
            logps[rows] = logits.gather(1, targets[rows, None])[:, 0]
            highest = logits.amax(1)
            log_z[rows] = logits.sub_(highest[:, None]).exp_().sum(1).log_().add_(highest)
        ctx.save_for_backward(hidden, weight, targets, log_z)
        ctx.temperature = temperature
        return logps.sub_(log_z)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # its only output's gradient
        ctx: Any, grad_logps: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, targets, log_z = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        scaled = grad_logps / ctx.temperature
        with maybe_gather_lm_head_ctx(weight):
            grad_hidden = torch.empty_like(hidden) if needs_hidden else None
            # Summed over tiles in float32 even where the weights are not.
            grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
            typed_weight = weight.to(hidden.dtype)
            for rows in _tiles(len(hidden), len(weight)):
                grad = _logits(hidden[rows], typed_weight, ctx.temperature)
                grad.sub_(log_z[rows, None]).exp_().mul_(-scaled[rows, None])
                grad.scatter_add_(1, targets[rows, None], scaled[rows, None])
                grad = grad.to(hidden.dtype)
                if grad_hidden is not None:
                    torch.mm(grad, typed_weight, out=grad_hidden[rows])
                if grad_weight is not None:
                    grad_weight.addmm_(grad.T.float(), hidden[rows].float())
            return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = (hidden @ weight.T).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _tiles(num_rows: int, vocab_size: int) -> list[slice]:
    size = max(MIN_TILE_ROWS, TILE_BYTES // (4 * vocab_size))
    return [slice(start, start + size) for start in range(0, num_rows, size)]
