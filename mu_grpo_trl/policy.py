"""Log-probs of the policy and of the reference on a micro-batch, through TRL's fused LM head."""

from __future__ import annotations

import functools
import logging
import types
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from trl.trainer.utils import add_fused_lm_head, use_adapter

logger = logging.getLogger(__name__)


def turn_dropout_off(model: nn.Module) -> None:
    """
    Set every dropout of `model`, LoRA's included, to 0, and say so once.

    With dropout the forward pass of training is another function than the one that sampled: ratios would not be 1 even
    before the first update of a stage.
    """
    dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout) and module.p > 0]
    for module in dropouts:
        module.p = 0.0
    if dropouts:
        logger.warning("Dropout of %d modules is turned off: it would bias the ratio π_θ/β.", len(dropouts))


def use_lean_head_in_training(model: PreTrainedModel, temperature: float, cast_lm_head_to_fp32: bool) -> None:
    """
    Leave entropies out of the fused LM head while `model` is in training mode; evaluation keeps TRL's head with them.

    They cost about a quarter of a forward pass, and only an entropy bonus needs them in training.
    """
    with_entropy = model.forward
    add_fused_lm_head(model, temperature, cast_lm_head_to_fp32, outputs=("log_probs",))
    without_entropy = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (without_entropy if self.training else with_entropy)(*args, **kwargs)

    model.forward = types.MethodType(forward, model)


def completion_logps(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """
    Log-probs (after temperature) and, where the head computes them, entropies of the generated tokens.

    Args:
        model (`nn.Module`): with TRL's fused head.
        inputs (`dict[str, Tensor]`): from [`~mu_grpo_trl.stage.batches.collate`]; rows are right-padded, so causal
            attention needs no mask.

    Returns:
        `tuple[Tensor, Tensor | None]`: each float `(B, T)`; arbitrary at padding.
    """
    outputs = model(input_ids=inputs["input_ids"], labels=inputs["labels"], fused_lm_head=True)
    # The head's column j belongs to token j + 1, and completion token t is input token prompt_lengths + t.
    steps = torch.arange(inputs["completion_mask"].size(1), device=inputs["input_ids"].device)
    columns = inputs["prompt_lengths"][:, None] - 1 + steps
    columns = columns.clamp(max=outputs.log_probs.size(1) - 1)
    entropies = None if outputs.entropy is None else outputs.entropy.gather(1, columns)
    return outputs.log_probs.gather(1, columns), entropies


@torch.no_grad()
def reference_logps(
    ref_model: nn.Module | None, model: nn.Module, unwrapped: Any, inputs: dict[str, Tensor]
) -> Tensor:
    """
    Log-probs `(B, T)` of the generated tokens under the reference policy: `ref_model`, or without one the PEFT `model`
    with TRL's adapter `"ref"`, or with no adapter at all.
    """
    if ref_model is not None:
        return completion_logps(ref_model, inputs)[0]
    with use_adapter(unwrapped, "ref" if "ref" in unwrapped.peft_config else None):
        return completion_logps(model, inputs)[0]
