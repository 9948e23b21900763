"""Log-probs of the policy and of the reference on a micro-batch, through TRL's fused LM head."""

from __future__ import annotations

import functools
import logging
import types
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from trl.trainer.utils import add_fused_lm_head, use_adapter

from .lm_head import tiled_forward, why_not_tiled
from .stage.collate import shared_prompt_mask

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

    They cost about a quarter of a forward pass, and only an entropy bonus needs them in training. On a CPU TRL's head
    has no kernel, scores every position and holds about nine arrays of 4,096 rows of logits:
    [`~mu_grpo_trl.lm_head.tiled_forward`] takes its place.
    """
    with_entropy = model.forward
    add_fused_lm_head(model, temperature, cast_lm_head_to_fp32, outputs=("log_probs",))
    without_entropy = model.forward
    reason = why_not_tiled(model)
    if reason is not None and model.device.type == "cpu":
        logger.warning("The log-probs of %s take TRL's slower LM head, as %s.", type(model).__name__, reason)

    @functools.wraps(type(model).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return with_entropy(*args, **kwargs)
        if reason is None and kwargs.get("fused_lm_head") and kwargs["labels"].device.type == "cpu":
            del kwargs["fused_lm_head"]
            return tiled_forward(self, *args, temperature=temperature, cast_to_fp32=cast_lm_head_to_fp32, **kwargs)
        return without_entropy(*args, **kwargs)

    model.forward = types.MethodType(forward, model)


def completion_logps(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """
    Log-probs (after temperature) and, where the head computes them, entropies of the generated tokens.

    Args:
        model (`nn.Module`): with TRL's fused head.
        inputs (`dict[str, Tensor]`): from [`~mu_grpo_trl.stage.collate.collate`]. Padding is on the right and packed
            sequences are told apart by their positions, so only shared prompts need an attention mask.

    Returns:
        `tuple[Tensor, Tensor | None]`: each float `(B, T)`; arbitrary at padding.
    """
    layout = {}
    if "position_ids" in inputs:
        layout["position_ids"] = inputs["position_ids"]
    if "segments" in inputs:
        layout["attention_mask"] = shared_prompt_mask(inputs["segments"])
    outputs = model(
        input_ids=inputs["input_ids"], labels=inputs["labels"], use_cache=False, fused_lm_head=True, **layout
    )
    # The head's column j belongs to token j + 1.
    width = outputs.log_probs.size(1)
    steps = torch.arange(inputs["completion_mask"].size(1), device=inputs["input_ids"].device)
    columns = (inputs["columns"][:, None] + steps).clamp(max=width - 1)
    places = inputs["rows"][:, None] * width + columns

    def completions(values: Tensor) -> Tensor:
        return values.flatten().gather(0, places.flatten()).view_as(places)

    entropies = None if outputs.entropy is None else completions(outputs.entropy)
    return completions(outputs.log_probs), entropies


def attention_cost(config: PretrainedConfig, num_parameters: int) -> float:
    """
    What attention adds to the cost of a row, for [`~mu_grpo_trl.stage.batches.plan_update`].

    A token costs 2 · `num_parameters` operations, and 4 · layers · heads · head size for each token it looks back at,
    of which there are half the row's length on average. 0 where the configuration does not say.
    """
    text = config.get_text_config()
    heads, hidden = getattr(text, "num_attention_heads", None), getattr(text, "hidden_size", None)
    if not (isinstance(heads, int) and isinstance(hidden, int)):
        return 0.0
    head_size = getattr(text, "head_dim", None) or hidden // heads
    return text.num_hidden_layers * heads * head_size / num_parameters


def takes_attention_mask(model: PreTrainedModel) -> bool:
    """Whether every layer of `model` attends as a 4-dimensional mask says, so that responses can share a prompt."""
    text = model.config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    is_full = getattr(text, "sliding_window", None) is None if kinds is None else set(kinds) <= {"full_attention"}
    return bool(model._supports_sdpa) and text._attn_implementation == "sdpa" and is_full


def has_varlen_attention(model: PreTrainedModel) -> bool:
    """Whether `model` attends by a kernel that takes sequences of any length without padding."""
    return "flash" in (model.config.get_text_config()._attn_implementation or "")


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
