"""The LM head in tiles: TRL's log-probs and gradients, without logits of more than a tile."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, PhiConfig, PhiForCausalLM
from trl.trainer.utils import add_fused_lm_head

from mu_grpo_trl import lm_head
from mu_grpo_trl.policy import use_lean_head_in_training

SIZES = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip


@pytest.fixture
def small_tiles(monkeypatch):
    """Five rows a tile: the micro-batch of `batch` makes several, the last one not full."""
    monkeypatch.setattr(lm_head, "MIN_TILE_ROWS", 5)
    monkeypatch.setattr(lm_head, "TILE_BYTES", 0)


def llama(**options) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.2, **options)).train()


def batch() -> dict[str, torch.Tensor]:
    """Three rows of prompts and completions, padded on the right."""
    ids = torch.randint(3, 40, (3, 12), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :4] = -100
    labels[1, 9:] = -100
    labels[2, 6:] = -100
    return {"input_ids": ids, "labels": labels, "use_cache": False, "fused_lm_head": True}


def measured(model: torch.nn.Module, inputs: dict, autocast=nullcontext) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs, and the gradient of a loss that weighs each of them differently (one of them not at all)."""
    model.zero_grad()
    with autocast():
        logps = model(**inputs).log_probs
    weights = torch.arange(logps.numel(), dtype=torch.float32).view_as(logps) - 15
    (logps * weights).sum().backward()
    gradients = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    return logps.detach(), torch.cat(gradients) if gradients else torch.zeros(0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_gradients_are_those_of_trls_head(small_tiles, tied: bool, temperature: float):
    theirs, ours = llama(tie_word_embeddings=tied), llama(tie_word_embeddings=tied)
    add_fused_lm_head(theirs, temperature, False)
    use_lean_head_in_training(ours, temperature, False)
    expected_logps, expected = measured(theirs, batch())
    logps, gradient = measured(ours, batch())
    torch.testing.assert_close(logps, expected_logps, atol=2e-6, rtol=0)
    assert (gradient - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("cast_to_fp32", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_in_bfloat16_it_is_as_close_to_float32_as_trls_head(small_tiles, cast_to_fp32: bool, autocast: bool):
    context = (lambda: torch.autocast("cpu", torch.bfloat16)) if autocast else nullcontext
    dtype = torch.float32 if autocast else torch.bfloat16
    exact, theirs, ours = llama(), llama().to(dtype), llama().to(dtype)
    add_fused_lm_head(exact, 0.7, False)
    add_fused_lm_head(theirs, 0.7, cast_to_fp32)
    use_lean_head_in_training(ours, 0.7, cast_to_fp32)
    (exact_logps, exact_gradient), results = (
        measured(exact, batch()),
        [measured(m, batch(), context) for m in (theirs, ours)],
    )
    their_error, our_error = (float((logps - exact_logps).norm()) for logps, _ in results)
    assert our_error <= 1.1 * their_error
    their_error, our_error = (float((gradient - exact_gradient).norm()) for _, gradient in results)
    assert our_error <= 1.1 * their_error


def test_with_the_head_frozen_only_the_rest_gets_a_gradient(small_tiles):
    theirs, ours = llama(), llama()
    for model in (theirs, ours):
        model.lm_head.weight.requires_grad_(False)
    add_fused_lm_head(theirs, 1.0, False)
    use_lean_head_in_training(ours, 1.0, False)
    expected, gradient = measured(theirs, batch())[1], measured(ours, batch())[1]
    assert ours.lm_head.weight.grad is None
    assert (gradient - expected).norm() <= 1e-6 * expected.norm()


def test_a_batch_without_labels_is_a_differentiable_zero():
    model = llama()
    use_lean_head_in_training(model, 1.0, False)
    inputs = batch()
    inputs["labels"][:] = -100
    logps, gradient = measured(model, inputs)
    assert not logps.any()
    assert gradient.numel() == sum(p.numel() for p in model.parameters())
    assert not gradient.any()


class LargestResult(TorchDispatchMode):
    """Watches how many elements the largest tensor that an operator returns has."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result


def test_no_tensor_holds_more_logits_than_a_tile(small_tiles):
    hidden = torch.randn(23, 4, requires_grad=True)
    weight = torch.randn(1000, 4, requires_grad=True)
    with LargestResult() as watch:
        lm_head._TiledLogProbs.apply(hidden, weight, torch.arange(23), 0.7).sum().backward()
    assert watch.largest == 5 * 1000


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES)), "final_logit_softcapping"),
        (lambda: PhiForCausalLM(PhiConfig(**{**SIZES, "num_key_value_heads": 2})), "bias=True"),
    ],
)
def test_a_model_with_other_logits_keeps_trls_head_and_says_why(make, reason: str, caplog):
    torch.manual_seed(0)
    model = make().train()
    add_fused_lm_head(model, 0.7, False)
    expected = model(**batch()).log_probs
    use_lean_head_in_training(model, 0.7, False)
    assert reason in caplog.text
    assert torch.equal(model(**batch()).log_probs, expected)


def test_evaluation_keeps_trls_head_with_entropies():
    model = llama()
    add_fused_lm_head(model, 1.0, False, outputs=("log_probs", "entropy"))
    use_lean_head_in_training(model, 1.0, False)
    assert model(**batch()).entropy is None
    assert model.eval()(**batch()).entropy is not None
