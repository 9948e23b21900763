"""losses.py against hand-computed numbers, a slow reference in plain Python, and TRL's formula."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mu_grpo_trl.losses import (
    SUM_NAMES,
    LossInputs,
    LossOutputs,
    VetoScope,
    find_triggers,
    group_advantages,
    m2po_clip_bound,
    m2po_objective,
    metrics_from_sums,
    mu_grpo_objective,
    skipped_sums,
    token_log_ratios,
    veto_mask,
)

NAN, INF = math.nan, math.inf
SCOPES: tuple[VetoScope, ...] = ("sequence", "suffix", "non_trigger_suffix", "trigger", "none")
MU_GRPO: dict[str, Any] = {"clip_low": 0.0, "clip_high": 5.0, "veto_scope": "sequence", "veto_threshold": 1e-4}
GRPO: dict[str, Any] = {"clip_low": 0.8, "clip_high": 1.2, "veto_scope": "none", "veto_threshold": 1e-4}


def batch(log_ratios, advantages, lengths=None, behavior: Any = -1.0, **optional) -> LossInputs:
    """Rows with the given log-ratios on top of `behavior` log-probs; float64, so that hand computation is exact."""
    log_ratios = torch.tensor(log_ratios, dtype=torch.float64)
    behavior = torch.as_tensor(behavior, dtype=torch.float32).expand(log_ratios.shape).clone()
    policy = torch.where(behavior.isfinite() & (behavior > -1000), log_ratios + behavior, -1.0)
    lengths = torch.tensor(lengths if lengths is not None else [log_ratios.shape[1]] * len(log_ratios))
    return LossInputs(
        policy_logps=policy.requires_grad_(),
        behavior_logps=behavior,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        completion_mask=torch.arange(log_ratios.shape[1]) < lengths.unsqueeze(1),
        **{name: torch.tensor(value, dtype=torch.float64) for name, value in optional.items()},
    )


def gradient(inputs: LossInputs, outputs: LossOutputs) -> torch.Tensor:
    (grad,) = torch.autograd.grad(outputs.objective, inputs.policy_logps, retain_graph=True)
    return grad


def sums(outputs: LossOutputs) -> dict[str, float]:
    return dict(zip(SUM_NAMES, outputs.sums.tolist(), strict=True))


def mu_grpo(inputs: LossInputs, **changes: Any) -> LossOutputs:
    return mu_grpo_objective(inputs, **{**MU_GRPO, **changes})


def close(actual, expected, rel=1e-12) -> None:
    torch.testing.assert_close(
        actual, torch.as_tensor(expected, dtype=actual.dtype, device=actual.device), rtol=rel, atol=rel
    )


# Objective and gradient


def test_objective_and_gradient_equal_hand_computed_numbers_on_both_signs_of_the_advantage() -> None:
    logs = [[math.log(2.0), math.log(6.0)], [math.log(0.5), math.log(6.0)]]
    inputs = batch(logs, [1.5, -2.0])
    outputs = mu_grpo(inputs)
    # A > 0: (2 + min(6, 5)) · 1.5 / 2.  A < 0: (0.5 + 6) · −2 / 2, no dual clip.
    close(outputs.objective.detach(), 5.25 - 6.5, rel=1e-7)
    close(gradient(inputs, outputs), [[2 * 1.5 / 2, 0.0], [-0.5 * 2 / 2, -6 * 2 / 2]], rel=1e-7)


def test_gradient_of_the_stock_clip_vanishes_exactly_where_min_selects_the_constant() -> None:
    logs = [[math.log(r) for r in (0.7, 0.9, 1.1, 1.3)]] * 2
    inputs = batch(logs, [1.0, -1.0])
    outputs = mu_grpo_objective(inputs, **GRPO)
    close(gradient(inputs, outputs), [[0.7 / 4, 0.9 / 4, 1.1 / 4, 0.0], [0.0, -0.9 / 4, -1.1 / 4, -1.3 / 4]], rel=1e-7)
    close(outputs.objective.detach(), (0.7 + 0.9 + 1.1 + 1.2 - 0.8 - 0.9 - 1.1 - 1.3) / 4, rel=1e-7)
    assert sums(outputs)["clipped_tokens"] == 2


def test_ratio_of_one_on_fresh_data_gives_the_policy_gradient() -> None:
    inputs = batch([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], [2.0, -3.0], lengths=[3, 2])
    outputs = mu_grpo(inputs)
    close(gradient(inputs, outputs), [[2 / 3, 2 / 3, 2 / 3], [-3 / 2, -3 / 2, 0.0]])


def test_no_upper_clip_keeps_the_gradient_of_large_ratios() -> None:
    inputs = batch([[math.log(50.0)]], [1.0])
    outputs = mu_grpo(inputs, clip_high=INF)
    close(outputs.objective.detach(), 50.0, rel=1e-6)
    close(gradient(inputs, outputs), [[50.0]], rel=1e-6)
    assert sums(outputs)["clipped_tokens"] == 0


def test_length_counts_vetoed_and_unusable_tokens_and_the_eos() -> None:
    behavior = [[-1.0, NAN, -1.0, -1.0]]
    inputs = batch([[0.0, 0.0, 0.0, 0.0]], [1.0], lengths=[3], behavior=behavior)
    close(mu_grpo(inputs).objective.detach(), 2 / 3)
    inputs = batch([[-12.0, 0.0, 0.0, 0.0]], [-1.0])
    close(mu_grpo(inputs, veto_scope="suffix").objective.detach(), -math.exp(-12) / 4)


@pytest.mark.parametrize("kl_coefficient", [0.0, 0.3])
def test_loss_and_gradient_equal_trl(kl_coefficient: float) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (6, 9)
    old = -3 * torch.rand(shape, generator=generator)
    policy = (old + 0.4 * torch.randn(shape, generator=generator)).requires_grad_()
    ref = old + 0.4 * torch.randn(shape, generator=generator)
    advantages = torch.randn(6, generator=generator)
    lengths = torch.tensor([9, 1, 4, 9, 7, 2])
    mask = torch.arange(9) < lengths.unsqueeze(1)

    # GRPOTrainer._compute_loss of TRL 1.16, loss_type="grpo", epsilon 0.2.
    coef_1 = torch.exp(policy - old)
    coef_2 = torch.clamp(coef_1, 0.8, 1.2)
    per_token_loss = -torch.min(coef_1 * advantages.unsqueeze(1), coef_2 * advantages.unsqueeze(1))
    if kl_coefficient != 0.0:
        per_token_loss = per_token_loss + kl_coefficient * (torch.exp(ref - policy) - (ref - policy) - 1)
    trl_loss = ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    (trl_grad,) = torch.autograd.grad(trl_loss, policy)

    inputs = LossInputs(policy, old, advantages, mask, ref_logps=ref)
    loss = -mu_grpo_objective(inputs, **GRPO, kl_coefficient=kl_coefficient).objective / 6
    (grad,) = torch.autograd.grad(loss, policy)
    torch.testing.assert_close(loss, trl_loss, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(grad, trl_grad, rtol=1e-6, atol=1e-8)
    assert 0 < (trl_grad[mask] == 0).sum() < mask.sum() or kl_coefficient


def test_kl_term_is_outside_the_veto_and_reaches_unusable_and_zero_advantage_tokens() -> None:
    inputs = batch(
        [[-12.0, 0.0], [0.0, 0.0]], [-1.0, 0.0], behavior=[[-1.0, NAN], [-1.0, -1.0]], ref_logps=[[-13.0, -2.0]] * 2
    )
    outputs = mu_grpo(inputs, kl_coefficient=0.5)
    k3_of_minus_one = math.exp(-1) - (-1) - 1  # policy −1, reference −2
    close(
        outputs.objective.detach(),
        -0.5 * (0.0 + k3_of_minus_one) / 2 - 0.5 * (math.exp(-12) + 12 - 1 + k3_of_minus_one) / 2,
        rel=1e-9,
    )
    slope = 0.5 * (math.exp(-1) - 1) / 2
    close(gradient(inputs, outputs), [[0.0, slope], [0.5 * (math.exp(-12) - 1) / 2, slope]], rel=1e-9)
    assert sums(outputs)["ref_tokens"] == 4


def test_reference_without_coefficient_is_a_diagnostic_alone() -> None:
    inputs = batch([[0.0, 0.0]], [1.0], lengths=[1], ref_logps=[[-3.0, NAN]])
    outputs = mu_grpo(inputs)
    close(outputs.objective.detach(), 1.0)
    assert metrics_from_sums(outputs.sums.tolist())["kl/ref"] == pytest.approx(math.exp(-2) + 2 - 1)


# Veto


TRIGGERS = [0, 1, 0, 1, 0]  # tokens 1 and 3 of a five-token response


@pytest.mark.parametrize(
    ("scope", "kept"),
    [
        ("sequence", [0, 0, 0, 0, 0]),
        ("suffix", [1, 1, 0, 0, 0]),
        ("non_trigger_suffix", [1, 1, 0, 1, 0]),
        ("trigger", [1, 0, 1, 0, 1]),
        ("none", [1, 1, 1, 1, 1]),
    ],
)
def test_veto_scope_masks_what_the_paper_says_and_leaves_the_neighbour_alone(
    scope: VetoScope, kept: list[int]
) -> None:
    triggers = torch.tensor([TRIGGERS, [0] * 5]).bool()
    assert veto_mask(triggers, scope).int().tolist() == [kept, [1] * 5]


@pytest.mark.parametrize("scope", SCOPES)
def test_gradient_is_zero_exactly_at_masked_tokens(scope: VetoScope) -> None:
    logs = [[0.0, -12.0, 0.5, -11.0, 0.0], [0.0, -12.0, 0.5, -11.0, 0.0]]
    inputs = batch(logs, [-1.0, 1.0])
    outputs = mu_grpo(inputs, veto_scope=scope)
    kept = veto_mask(torch.tensor([TRIGGERS, [0] * 5]).bool(), scope)
    expected = kept * torch.tensor(logs, dtype=torch.float64).exp() * torch.tensor([[-1.0], [1.0]]) / 5
    close(gradient(inputs, outputs), expected, rel=1e-6)
    assert sums(outputs)["vetoed_tokens"] == 5 - kept[0].sum()
    assert sums(outputs)["trigger_tokens"] == 2


def test_trigger_compares_the_raw_log_ratio_strictly() -> None:
    at = math.log(1e-4)
    log_ratios = torch.tensor([[at, at - 1e-9, at + 1e-9, -5000.0, -INF]], dtype=torch.float64)
    usable = torch.ones(1, 5, dtype=torch.bool)
    assert find_triggers(log_ratios, torch.tensor([-1.0]), usable, 1e-4).tolist() == [[False, True, False, True, True]]
    # Below the clamp of exp (e^-20 = 2e-9) the threshold still separates.
    assert find_triggers(log_ratios, torch.tensor([-1.0]), usable, 1e-10).tolist() == [[False] * 3 + [True] * 2]


@pytest.mark.parametrize("advantage", [0.0, 1.0])
def test_only_negative_advantages_trigger(advantage: float) -> None:
    outputs = mu_grpo(batch([[-12.0, 0.0]], [advantage]))
    assert sums(outputs)["trigger_tokens"] == 0
    close(outputs.objective.detach(), advantage * (math.exp(-12) + 1) / 2, rel=1e-7)


def test_padding_and_unusable_tokens_never_trigger() -> None:
    inputs = batch([[0.0, 0.0, -12.0]], [-1.0], lengths=[2])
    assert sums(mu_grpo(inputs))["trigger_tokens"] == 0
    for b in (NAN, INF, -INF, -1000.0, -9999.0):
        inputs = LossInputs(
            torch.tensor([[-1.0, -500.0]]), torch.tensor([[-1.0, b]]), torch.tensor([-1.0]), torch.ones(1, 2).bool()
        )
        assert sums(mu_grpo(inputs))["trigger_tokens"] == 0


def test_all_vetoed_batch_has_zero_objective_and_zero_gradient() -> None:
    inputs = batch([[-12.0, 0.0], [0.0, -12.0]], [-1.0, -2.0])
    outputs = mu_grpo(inputs)
    assert outputs.objective.item() == 0.0
    assert gradient(inputs, outputs).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert sums(outputs)["vetoed_responses"] == 2


def test_suffix_veto_after_a_final_trigger_masks_no_response() -> None:
    outputs = mu_grpo(batch([[0.0, -12.0]], [-1.0]), veto_scope="suffix")
    assert (sums(outputs)["trigger_tokens"], sums(outputs)["vetoed_responses"]) == (1, 0)


def test_veto_is_not_differentiated() -> None:
    inputs = batch([[-1.0, -12.0, 0.3]], [-1.0])
    outputs = mu_grpo(inputs, veto_scope="trigger")
    close(gradient(inputs, outputs), [[-math.exp(-1) / 3, 0.0, -math.exp(0.3) / 3]], rel=1e-6)


# Unusable behavior log-probs


@pytest.mark.parametrize("veto_scope", SCOPES)
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("anchor", [-9999.0, -1000.0, NAN, INF, -INF, -999.0, -100.0, 0.0])
def test_b17_loss_and_gradient_are_finite_whatever_the_anchor(anchor, advantage, veto_scope) -> None:
    for policy in (-1.0, -300.0, -0.0):
        policy_logps = torch.tensor([[policy, -1.0]], requires_grad=True)
        behavior = torch.tensor([[anchor, -1.0]])
        inputs = LossInputs(policy_logps, behavior, torch.tensor([advantage]), torch.ones(1, 2).bool())
        for clip_high in (5.0, INF):
            outputs = mu_grpo_objective(
                inputs, clip_low=0.0, clip_high=clip_high, veto_scope=veto_scope, veto_threshold=1e-4
            )
            assert outputs.objective.isfinite()
            assert outputs.sums.isfinite().all()
            assert gradient(inputs, outputs).isfinite().all()
        assert gradient(inputs, m2po_objective(inputs, threshold=0.04)).isfinite().all()


def test_b17_floor_values_are_counted_and_get_no_gradient() -> None:
    inputs = batch([[0.0, 0.0, 0.0]], [1.0], behavior=[[-9999.0, -1000.0, -1.0]])
    outputs = mu_grpo(inputs)
    close(gradient(inputs, outputs), [[0.0, 0.0, 1 / 3]])
    assert (sums(outputs)["unusable_tokens"], sums(outputs)["usable_tokens"], sums(outputs)["tokens"]) == (2, 1, 3)


def test_b17_anchor_89_nats_below_the_policy_is_clamped_in_float32() -> None:
    policy = torch.tensor([[-1.0]], requires_grad=True)
    inputs = LossInputs(policy, torch.tensor([[-90.0]]), torch.tensor([-1.0]), torch.ones(1, 1).bool())
    outputs = mu_grpo(inputs)
    close(outputs.objective.detach(), -math.exp(20.0), rel=1e-6)
    assert gradient(inputs, outputs).tolist() == [[0.0]]


def test_b16_missing_logprob_excludes_that_token_alone() -> None:
    behavior = torch.tensor([[-0.7, NAN, -1.2]])
    policy = torch.tensor([[-0.7, -0.1, -1.2]], requires_grad=True)
    inputs = LossInputs(policy, behavior, torch.tensor([3.0]), torch.ones(1, 3).bool())
    outputs = mu_grpo(inputs)
    close(outputs.objective.detach(), 2.0, rel=1e-6)
    close(gradient(inputs, outputs), [[1.0, 0.0, 1.0]], rel=1e-6)
    metrics = metrics_from_sums(outputs.sums.tolist())
    assert metrics["behavior/unusable_tokens"] == 1
    assert metrics["ratio/positive_mean"] == 1.0  # not pulled towards the left-out token


ANCHORS = st.sampled_from([-0.5, -1.0, -3.0, -60.0, None, -1000.0, -9999.0, -1e30, -INF, INF])


@settings(max_examples=100, deadline=None)
@given(st.lists(ANCHORS, min_size=1, max_size=6), st.sampled_from([-1.5, 2.0]), st.sampled_from(SCOPES))
def test_b16_b17_tokens_without_usable_log_probs_only_lengthen_the_response(anchors, advantage, scope) -> None:
    """Wherever they stand: objective and gradient are those of the other tokens, over the length of all of them."""
    behavior = torch.tensor([[NAN if anchor is None else anchor for anchor in anchors]])
    usable = (behavior > -1000) & behavior.isfinite()
    policy = torch.linspace(-20, -0.1, len(anchors), dtype=torch.float64)[None].requires_grad_()
    advantages, share = torch.tensor([advantage]).double(), int(usable.sum()) / len(anchors)
    every = LossInputs(policy, behavior, advantages, torch.ones_like(usable))
    outputs = mu_grpo(every, veto_scope=scope)
    assert sums(outputs)["unusable_tokens"] == len(anchors) - int(usable.sum())
    if not usable.any():
        assert outputs.objective.item() == 0.0 and not gradient(every, outputs).any()
        return
    rest = LossInputs(
        policy[usable][None], behavior[usable][None], advantages, torch.ones(1, int(usable.sum())).bool()
    )
    expected = mu_grpo(rest, veto_scope=scope)
    close(outputs.objective, share * expected.objective.item())
    (grad,) = torch.autograd.grad(expected.objective, policy)
    close(gradient(every, outputs), share * grad)
    assert not gradient(every, outputs)[~usable].any()
    assert sums(outputs)["trigger_tokens"] == sums(expected)["trigger_tokens"]


def test_garbage_at_padding_reaches_neither_value_nor_gradient_nor_sums() -> None:
    clean = batch([[0.2, -0.1, 0.0]], [-1.0], lengths=[2], ref_logps=[[-1.0, -2.0, -1.0]], entropies=[[1.0, 2.0, 9.0]])
    for garbage in (NAN, INF, -INF):
        tensors = {name: value.detach().clone() for name, value in vars(clean).items()}
        for name in ("policy_logps", "behavior_logps", "ref_logps", "entropies"):
            tensors[name][0, 2] = garbage
        tensors["policy_logps"].requires_grad_()
        dirty = LossInputs(**tensors)
        expected = mu_grpo(clean, kl_coefficient=0.1)
        actual = mu_grpo(dirty, kl_coefficient=0.1)
        assert actual.objective == expected.objective
        assert torch.equal(actual.sums, expected.sums)
        assert torch.equal(gradient(dirty, actual), gradient(clean, expected))


def test_impossible_token_is_a_trigger_with_ratio_near_zero_and_no_gradient() -> None:
    policy = torch.tensor([[-INF, -1.0]], requires_grad=True)
    inputs = LossInputs(policy, torch.tensor([[-1.0, -1.0]]), torch.tensor([-1.0]), torch.ones(1, 2).bool())
    outputs = mu_grpo(inputs, veto_scope="none")
    close(outputs.objective.detach(), -(math.exp(-20) + 1) / 2, rel=1e-6)
    assert gradient(inputs, outputs).tolist() == [[0.0, -0.5]]
    assert sums(outputs)["trigger_tokens"] == 1
    assert outputs.sums.isfinite().all()


def test_broken_model_shows_in_the_loss() -> None:
    policy = torch.tensor([[NAN, -1.0]], requires_grad=True)
    inputs = LossInputs(policy, torch.tensor([[-1.0, -1.0]]), torch.tensor([1.0]), torch.ones(1, 2).bool())
    assert mu_grpo(inputs).objective.isnan()


def test_bfloat16_log_probs_are_subtracted_in_float32() -> None:
    policy = torch.tensor([[-1.0]], dtype=torch.bfloat16)
    inputs = LossInputs(policy, torch.tensor([[-1.001]]), torch.tensor([1.0]), torch.ones(1, 1).bool())
    log_ratios, _ = token_log_ratios(inputs)
    assert log_ratios.dtype == torch.float32
    close(log_ratios, [[0.001]], rel=1e-6)


# Empty batches, micro-batches, the device


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0), (2, 4)])
def test_empty_batch_gives_a_differentiable_zero(shape: tuple[int, int]) -> None:
    for objective in (
        lambda inputs: mu_grpo(inputs, kl_coefficient=0.1),
        lambda inputs: m2po_objective(inputs, threshold=0.04),
    ):
        policy = torch.full(shape, -1.0, requires_grad=True)
        inputs = LossInputs(
            policy,
            torch.full(shape, NAN),
            torch.ones(shape[0]),
            torch.zeros(shape, dtype=torch.bool),
            ref_logps=torch.full(shape, -2.0),
        )
        outputs = objective(inputs)
        assert outputs.objective.item() == 0.0
        assert gradient(inputs, outputs).abs().sum() == 0.0
        assert outputs.sums.tolist() == [0.0] * len(SUM_NAMES)


def random_inputs(seed: int, rows: int = 16, width: int = 12, drift: float = 8.0) -> LossInputs:
    """Ragged rows whose log-ratios have the standard deviation `drift`; one `b_t` in ten is missing."""
    generator = torch.Generator().manual_seed(seed)
    behavior = -4 * torch.rand(rows, width, generator=generator)
    policy = behavior + drift * torch.randn(rows, width, generator=generator)
    behavior[torch.rand(rows, width, generator=generator) < 0.1] = NAN
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    return LossInputs(
        policy.double().requires_grad_(),
        behavior,
        torch.randn(rows, generator=generator).sign() * (torch.rand(rows, generator=generator) > 0.2),
        torch.arange(width) < lengths,
        ref_logps=policy + 1.0,
        entropies=torch.rand(rows, width, generator=generator),
    )


def rows_of(inputs: LossInputs, rows: slice) -> LossInputs:
    fields = {name: value for name, value in vars(inputs).items() if value is not None}
    return LossInputs(**{name: value[rows] for name, value in fields.items()})


@pytest.mark.parametrize("veto_scope", SCOPES)
def test_b34_objective_gradient_and_sums_add_up_over_micro_batches_of_any_size(veto_scope: VetoScope) -> None:
    inputs = random_inputs(3)
    options: dict[str, Any] = {"veto_scope": veto_scope, "kl_coefficient": 0.1}
    whole = mu_grpo(inputs, **options)
    for bounds in ([0, 8, 16], [0, 1, 2, 16], [0, 16, 16], list(range(17))):
        slices = [slice(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]
        parts = [mu_grpo(rows_of(inputs, rows), **options) for rows in slices]
        total = torch.stack([part.objective for part in parts]).sum()
        close(total.detach(), whole.objective.detach())
        close(torch.autograd.grad(total, inputs.policy_logps)[0], gradient(inputs, whole))
        close(torch.stack([part.sums for part in parts]).sum(dim=0), whole.sums)


def test_columns_of_padding_change_nothing() -> None:
    inputs = random_inputs(5)
    padded = LossInputs(
        **{
            name: torch.nn.functional.pad(value, (0, 7), value=False if name == "completion_mask" else -1.0)
            if value.dim() == 2
            else value
            for name, value in vars(inputs).items()
        }
    )
    expected, actual = (mu_grpo(x, kl_coefficient=0.1) for x in (inputs, padded))
    close(actual.objective.detach(), expected.objective.detach())
    close(actual.sums, expected.sums)


def test_no_value_of_a_tensor_is_read_by_the_host() -> None:
    """Tensors of the meta device have no values: whatever would make the host wait for a device raises there."""
    meta = LossInputs(*(torch.empty_like(value, device="meta") for value in vars(random_inputs(0)).values()))
    meta.policy_logps.requires_grad_()
    with pytest.raises((NotImplementedError, RuntimeError)):
        meta.advantages.sum().item()
    for scope in SCOPES:
        mu_grpo(meta, veto_scope=scope, kl_coefficient=0.1).objective.backward()
    m2po_objective(meta, threshold=0.04).objective.backward()


@pytest.mark.parametrize("veto_scope", SCOPES)
@pytest.mark.parametrize("clip", [(0.0, 5.0), (0.8, 1.2), (0.0, INF)])
@pytest.mark.parametrize("seed", range(4))
def test_objective_gradient_and_sums_equal_a_slow_reference(
    seed: int, clip: tuple[float, float], veto_scope: VetoScope
) -> None:
    inputs = random_inputs(seed)
    outputs = mu_grpo_objective(
        inputs, clip_low=clip[0], clip_high=clip[1], veto_scope=veto_scope, veto_threshold=1e-4, kl_coefficient=0.2
    )
    objective, slopes, expected = slow_reference(inputs, clip, veto_scope, 1e-4, 0.2)
    close(outputs.objective.detach(), objective, rel=1e-9)
    close(gradient(inputs, outputs), slopes, rel=1e-9)
    assert sums(outputs) == pytest.approx(expected, rel=1e-9)
    assert expected["harmful_mass"] > 0  # so that scopes differ and every sum is at work


def slow_reference(inputs, clip, veto_scope, threshold, kl_coefficient):
    """Objective, its slope in each policy log-prob, and the sums: token by token, from the formulas of the paper."""
    objective, total = 0.0, dict.fromkeys(SUM_NAMES, 0.0)
    slopes = [[0.0] * inputs.completion_mask.shape[1] for _ in inputs.advantages]
    for row in range(len(inputs.advantages)):
        length = int(inputs.completion_mask[row].sum())
        advantage = float(inputs.advantages[row])
        policy, behavior, ref = (
            x[row, :length].tolist() for x in (inputs.policy_logps, inputs.behavior_logps, inputs.ref_logps)
        )
        raw = [None if math.isnan(b) else p - b for p, b in zip(policy, behavior, strict=True)]
        is_trigger = [advantage < 0 and d is not None and d < math.log(threshold) for d in raw]
        first = is_trigger.index(True) if any(is_trigger) else None
        prefix = 0.0
        total["responses"] += 1
        row_vetoed = 0
        for t, d in enumerate(raw):
            after = first is not None and t > first
            masked = {
                "sequence": first is not None,
                "suffix": after,
                "non_trigger_suffix": after and not is_trigger[t],
                "trigger": is_trigger[t],
                "none": False,
            }[veto_scope]
            row_vetoed += masked
            total["tokens"] += 1
            total["trigger_tokens"] += is_trigger[t]
            total["ref_tokens"] += 1
            total["entropy_tokens"] += 1
            total["entropy"] += float(inputs.entropies[row, t])
            r = max(-20.0, min(20.0, ref[t] - policy[t]))
            total["ref_kl"] += math.exp(r) - r - 1
            objective -= kl_coefficient * (math.exp(r) - r - 1) / length
            slopes[row][t] -= kl_coefficient * (1 - math.exp(r)) / length * (abs(ref[t] - policy[t]) < 20)
            if d is None:
                total["unusable_tokens"] += 1
                continue
            log_ratio = max(-20.0, min(20.0, d))
            ratio = math.exp(log_ratio)
            clipped = max(clip[0], min(clip[1], ratio))
            objective += (not masked) * min(ratio * advantage, clipped * advantage) / length
            moves = ratio * advantage <= clipped * advantage and abs(d) < 20
            slopes[row][t] += (not masked and moves) * ratio * advantage / length
            total["usable_tokens"] += 1
            total["abs_log_ratio"] += abs(log_ratio)
            total["behavior_kl"] += ratio - 1 - log_ratio
            total["clipped_tokens"] += clipped * advantage < ratio * advantage
            if advantage:
                sign = "negative" if advantage < 0 else "positive"
                total[f"{sign}_tokens"] += 1
                total[f"{sign}_ratio"] += ratio
            if after and not is_trigger[t]:
                total["harmful_mass"] += 1 / length
                total["harmful_prefix_mass"] += math.exp(prefix) / length
            prefix += d
        total["vetoed_tokens"] += row_vetoed
        total["vetoed_responses"] += row_vetoed > 0
    return objective, slopes, total


def test_gradcheck_away_from_the_kinks() -> None:
    inputs = batch(
        [[0.3, 1.0, -0.5], [0.2, -0.7, 0.9]], [1.0, -2.0], lengths=[3, 2], ref_logps=[[-1.0, -2.0, -0.5]] * 2
    )

    def objective(policy: torch.Tensor) -> torch.Tensor:
        moved = LossInputs(policy, *(value for name, value in vars(inputs).items() if name != "policy_logps"))
        return mu_grpo_objective(moved, **GRPO, kl_coefficient=0.2).objective

    assert torch.autograd.gradcheck(objective, inputs.policy_logps, eps=1e-6, atol=1e-7)


# M2PO


def bound_of(log_ratios: list[float], advantages: list[float], threshold: float = 0.04) -> float:
    logs, signs = torch.tensor(log_ratios, dtype=torch.float64), torch.tensor(advantages, dtype=torch.float64)
    return m2po_clip_bound(logs, signs, torch.ones_like(logs, dtype=torch.bool), threshold).item()


def test_m2po_bound_equals_a_hand_computed_example() -> None:
    # v = .01, .04, .09, .25; N = 4, budget .16. k=0: .01+3·.01 = .04; k=1: .05+2·.04 = .13; k=2: .14+.09 = .23 ≥ .16.
    assert bound_of([0.2, -0.1, 0.5, -0.3], [1, -1, 1, -1]) == pytest.approx(0.2, rel=1e-12)
    # Tokens that clipping cannot reach change nothing: A > 0 with ρ < 1, A < 0 with ρ > 1, A = 0.
    assert bound_of([0.2, -0.1, 0.5, -0.3, -9, 9, 9], [1, -1, 1, -1, 1, -1, 0]) == pytest.approx(0.2, rel=1e-12)


def test_m2po_clips_everything_reachable_when_the_smallest_square_exceeds_the_budget() -> None:
    assert bound_of([0.3, 0.5], [1, 1]) == 0.0


def test_m2po_does_not_clip_at_or_below_the_threshold_or_without_reachable_tokens() -> None:
    assert bound_of([0.5, 0.5], [1, 1], threshold=0.25) == INF
    assert bound_of([0.1, 0.1, 0.1], [1, 1, 1]) == INF
    assert bound_of([-3.0, 3.0, 0.0], [1, -1, 1]) == INF
    assert bound_of([], []) == INF


def test_m2po_single_outlier_is_clipped_to_the_second_largest() -> None:
    assert bound_of([0.01] * 10 + [0.02, 100.0], [1] * 12) == pytest.approx(0.02, rel=1e-12)
    assert bound_of([0.01] * 10 + [0.02, INF], [1] * 12) == pytest.approx(0.02, rel=1e-12)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-2, 2), st.sampled_from([-1.0, 0.0, 0.5])), max_size=20),
    st.floats(0.01, 0.5),
)
def test_m2po_bound_equals_the_rule_read_literally(tokens: list[tuple[float, float]], threshold: float) -> None:
    squares = sorted(d * d for d, a in tokens if (a > 0 and d > 0) or (a < 0 and d < 0))
    n = len(squares)
    if not squares or sum(squares) / n <= threshold:
        expected = INF
    else:
        reached = [k for k in range(n) if sum(squares[: k + 1]) + (n - k - 1) * squares[k] >= threshold * n]
        k = reached[0]
        expected = math.sqrt(squares[k - 1]) if k else 0.0
    assert bound_of([d for d, _ in tokens], [a for _, a in tokens], threshold) == pytest.approx(expected, rel=1e-12)


def test_m2po_objective_clips_reachable_tokens_at_the_bound_and_passes_the_rest() -> None:
    logs = [[0.2, 0.5, -0.6], [-0.1, -0.3, 0.7]]
    inputs = batch(logs, [1.0, -1.0])
    outputs = m2po_objective(inputs, threshold=0.04)  # √c = 0.2, as above
    ratios = torch.tensor(logs, dtype=torch.float64).exp()
    close(
        outputs.objective.detach(),
        (math.exp(0.2) * 2 + math.exp(-0.6)) / 3 - (math.exp(-0.1) + math.exp(-0.2) + math.exp(0.7)) / 3,
        rel=1e-6,
    )
    moving = torch.tensor([[1, 0, 1], [1, 0, 1]])
    close(gradient(inputs, outputs), moving * ratios * torch.tensor([[1.0], [-1.0]]) / 3, rel=1e-6)
    assert sums(outputs)["clipped_tokens"] == 2
    assert sums(outputs)["vetoed_tokens"] == 0


def test_m2po_bound_of_the_whole_update_can_be_passed_in() -> None:
    inputs = batch([[0.2, 0.5, -0.6], [-0.1, -0.3, 0.7]], [1.0, -1.0])
    log_ratios, usable_mask = token_log_ratios(inputs)
    bound = m2po_clip_bound(log_ratios, inputs.advantages, usable_mask, 0.04)
    flat = m2po_clip_bound(
        log_ratios.flatten(), inputs.advantages.repeat_interleave(3), usable_mask.flatten(), threshold=0.04
    )
    assert flat == bound
    parts = [m2po_objective(rows_of(inputs, slice(i, i + 1)), threshold=0.04, clip=bound) for i in range(2)]
    whole = m2po_objective(inputs, threshold=0.04)
    close(parts[0].objective.detach() + parts[1].objective.detach(), whole.objective.detach())
    own = m2po_objective(rows_of(inputs, slice(1, 2)), threshold=0.04)
    assert abs((own.objective - parts[1].objective).item()) > 1e-3  # alone, the second row has another bound


def test_m2po_without_drift_equals_the_unclipped_objective() -> None:
    inputs = batch([[0.1, -0.1]], [1.0])
    unclipped = mu_grpo_objective(inputs, clip_low=0.0, clip_high=INF, veto_scope="none", veto_threshold=1e-4)
    outputs = m2po_objective(inputs, threshold=0.04)
    assert outputs.objective == unclipped.objective
    assert torch.equal(gradient(inputs, outputs), gradient(inputs, unclipped))


@pytest.mark.parametrize("drift", [0.05, 0.3, 1.0, 8.0])
@pytest.mark.parametrize("seed", range(4))
def test_m2po_objective_gradient_and_sums_equal_a_slow_reference(seed: int, drift: float) -> None:
    inputs = random_inputs(seed, drift=drift)
    outputs = m2po_objective(inputs, threshold=0.04, kl_coefficient=0.2)
    bound = slow_m2po_bound(inputs, 0.04)
    clip = (math.exp(-bound), math.exp(bound)) if bound is not None else (0.0, INF)
    objective, slopes, expected = slow_reference(inputs, clip, "none", 1e-4, 0.2)
    close(outputs.objective.detach(), objective, rel=1e-9)
    close(gradient(inputs, outputs), slopes, rel=1e-9)
    assert sums(outputs) == pytest.approx(expected, rel=1e-9)
    assert (expected["clipped_tokens"] == 0) == (drift == 0.05)  # a drift of 0.05² is below the threshold


def slow_m2po_bound(inputs: LossInputs, threshold: float) -> float | None:
    """√c by walking up the sorted squares; None if nothing is to be clipped."""
    squares = []
    for row, advantage in enumerate(inputs.advantages.tolist()):
        length = int(inputs.completion_mask[row].sum())
        policy, behavior = (x[row].tolist() for x in (inputs.policy_logps, inputs.behavior_logps))
        for t in range(length):
            d = policy[t] - behavior[t]
            if advantage * d > 0:  # never true of a missing b_t, which is NaN
                squares.append(d * d)
    squares.sort()
    if not squares or sum(squares) <= threshold * len(squares):
        return None
    below = 0.0  # the largest square that may stay as it is
    for k, square in enumerate(squares):
        if sum(min(other, square) for other in squares) >= threshold * len(squares):
            return math.sqrt(below)
        below = squares[k]
    raise AssertionError("the sum of all squares exceeds the budget")


# Advantages


def test_advantages_equal_hand_computed_numbers() -> None:
    # mean 0.25, Bessel std sqrt((0.5625 + 3 · 0.0625) / 3) = 0.5
    close(group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]])), [[0.75 / 0.500001] + [-0.25 / 0.500001] * 3])
    close(
        group_advantages(torch.tensor([1.0, 0.0]), eps=1e-4),
        [0.5 / (math.sqrt(0.5) + 1e-4)] + [-0.5 / (math.sqrt(0.5) + 1e-4)],
    )
    close(group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), scale=False), [[0.75, -0.25, -0.25, -0.25]])


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize(
    "rewards",
    [
        torch.tensor([0.1] * 8),
        torch.tensor([1 / 3] * 7),
        torch.tensor([0.1 + 0.2, 0.3, 0.3], dtype=torch.float64),
        torch.tensor([1e9, 1e9 + 1.0], dtype=torch.float64),
        torch.tensor([-0.7, -0.7 * (1 + 1e-7)], dtype=torch.float64),
        torch.zeros(8),
    ],
)
def test_b45_rewards_equal_up_to_rounding_have_advantage_exactly_zero(rewards: torch.Tensor, scale: bool) -> None:
    assert group_advantages(rewards, scale=scale).tolist() == [0.0] * len(rewards)


def test_b45_small_but_real_differences_keep_their_advantage() -> None:
    close(group_advantages(torch.tensor([1.0, 1.0 + 1e-5], dtype=torch.float64), eps=0.0).sign(), [-1.0, 1.0])
    close(group_advantages(torch.tensor([0.0, 1e-3], dtype=torch.float64), eps=0.0), [-(0.5**0.5), 0.5**0.5])


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_b40_unscorable_responses_leave_the_statistics_and_get_zero(bad: float) -> None:
    rest = group_advantages(torch.tensor([1.0, 0.0, 1.0])).tolist()
    assert group_advantages(torch.tensor([1.0, 0.0, bad, 1.0])).tolist() == [rest[0], rest[1], 0.0, rest[2]]


def test_b40_groups_with_fewer_than_two_scored_responses_are_all_zero() -> None:
    rewards = torch.tensor([[NAN, 1.0], [NAN, NAN], [1.0, 0.0]])
    advantages = group_advantages(rewards)
    assert advantages[:2].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert advantages[2, 0] > 0 > advantages[2, 1]
    assert group_advantages(torch.tensor([[3.0]])).tolist() == [[0.0]]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, NAN]), min_size=2, max_size=8), st.booleans())
def test_advantages_of_a_group_sum_to_zero_and_do_not_depend_on_its_neighbours(rewards, scale) -> None:
    group = torch.tensor(rewards, dtype=torch.float64)
    advantages = group_advantages(group, scale=scale)
    assert advantages.isfinite().all()
    assert abs(advantages.sum().item()) < 1e-9
    stacked = group_advantages(torch.stack([group, group.flip(0)]), scale=scale)
    close(stacked[0], advantages)
    close(stacked[1], advantages.flip(0))


REWARDS = st.one_of(st.floats(-1e6, 1e6), st.sampled_from([0.0, 0.1, 1 / 3, 1.0, NAN, INF, -INF]))


@settings(max_examples=200, deadline=None)
@given(st.lists(REWARDS, min_size=1, max_size=9), st.booleans())
def test_b40_b45_unscorable_responses_change_no_advantage_and_signs_are_those_of_the_rewards(rewards, scale) -> None:
    group = torch.tensor(rewards, dtype=torch.float64)
    scored = group.isfinite()
    advantages = group_advantages(group, scale=scale)
    assert not advantages[~scored].any()
    close(advantages[scored], group_advantages(group[scored], scale=scale) if scored.any() else group[scored])
    values = group[scored]
    if len(values) < 2 or values.max() - values.min() <= 1e-7 * values.abs().max():
        assert not advantages.any()
    elif values.max() - values.min() > 1e-5 * values.abs().max():
        assert advantages[scored][values.argmax()] == advantages.max() > 0
        assert advantages[scored][values.argmin()] == advantages.min() < 0


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-3, 1e6), st.integers(2, 16), st.sampled_from([torch.float32, torch.float64]), st.data())
def test_b45_no_rounding_of_equal_rewards_leaves_an_advantage(value, size, dtype, data) -> None:
    steps = data.draw(st.lists(st.integers(-2, 2), min_size=size, max_size=size))
    last = torch.finfo(dtype).eps
    rewards = torch.tensor([value * (1 + step * last) for step in steps], dtype=dtype)
    for scale in (True, False):
        assert group_advantages(rewards, scale=scale).tolist() == [0.0] * size


# Diagnostics


def test_diagnostics_equal_hand_computed_numbers() -> None:
    logs = [[math.log(0.5), math.log(1.5), -12.0, 0.0], [math.log(6.0), math.log(2.0), 0.0, 0.0], [0.0] * 4]
    inputs = batch(logs, [-1.0, 1.0, 0.0], lengths=[4, 2, 1], entropies=[[1.0, 2.0, 3.0, 4.0]] * 3)
    outputs = mu_grpo(inputs)
    metrics = metrics_from_sums((outputs.sums + skipped_sums([5, 8])).tolist())
    log_ratios = [math.log(0.5), math.log(1.5), -12.0, 0.0, math.log(6.0), math.log(2.0), 0.0]
    m_h = 0.25 / 5  # one token of four after the trigger, in one of five responses
    q_h = 0.25 * 0.5 * 1.5 * math.exp(-12) / 5
    assert metrics == pytest.approx(
        {
            "ratio/negative_mean": (0.5 + 1.5 + math.exp(-12) + 1) / 4,
            "ratio/positive_mean": 4.0,
            "ratio/abs_log_mean": sum(map(abs, log_ratios)) / 7,
            "clip/token_fraction": 1 / 20,
            "veto/trigger_tokens": 1,
            "veto/token_fraction": 4 / 20,
            "veto/response_fraction": 1 / 5,
            "behavior/unusable_tokens": 0,
            "kl/behavior": sum(math.exp(d) - 1 - d for d in log_ratios) / 7,
            "policy/entropy": (1 + 2 + 3 + 4 + 1 + 2 + 1) / 7,
            "prefix/m_H": m_h,
            "prefix/q_H": q_h,
            "prefix/chi2_lower_bound": (m_h - q_h) ** 2 / (q_h * (1 - q_h)),
        },
        rel=1e-6,
    )


@pytest.mark.parametrize("veto_scope", SCOPES)
def test_prefix_diagnostics_do_not_depend_on_the_veto(veto_scope: VetoScope) -> None:
    inputs = random_inputs(1)
    reference = sums(mu_grpo(inputs))
    other = sums(mu_grpo(inputs, veto_scope=veto_scope))
    changed = {name for name in SUM_NAMES if other[name] != reference[name]}
    assert changed <= {"vetoed_tokens", "vetoed_responses"}
    assert reference["harmful_mass"] > 0


def test_corollary_1_of_the_paper_is_reproduced() -> None:
    # Two positions; token c has β = m and π = rm, then h is certain. Over responses from β a share m is (c, h).
    m, r = 0.25, 1e-5
    logs = [[math.log(r), 0.0]] + [[math.log((1 - r * m) / (1 - m)), 0.0]] * 3
    metrics = metrics_from_sums(mu_grpo(batch(logs, [-1.0, 1.0, 1.0, 1.0])).sums.tolist())
    assert metrics["prefix/m_H"] == pytest.approx(0.5 * m)
    assert metrics["prefix/q_H"] == pytest.approx(0.5 * m * r, rel=1e-6)
    assert metrics["prefix/chi2_lower_bound"] >= 0.5 * m * (1 - r) ** 2 / r


def test_prefix_products_over_thousands_of_tokens_stay_finite() -> None:
    for sign in (1.0, -1.0):
        logs = [[-12.0] + [sign * 5.0] * 2000]
        outputs = mu_grpo(batch(logs, [-1.0]))
        assert outputs.sums.isfinite().all()
        bound = metrics_from_sums(outputs.sums.tolist())["prefix/chi2_lower_bound"]
        assert math.isfinite(bound)
        assert (bound > 1) == (sign < 0) or bound == 0.0


def test_bound_is_infinite_only_where_the_theorem_says_so() -> None:
    def bound(m: float, q: float) -> float:
        total = dict.fromkeys(SUM_NAMES, 0.0) | {"responses": 1.0, "harmful_mass": m, "harmful_prefix_mass": q}
        return metrics_from_sums(list(total.values()))["prefix/chi2_lower_bound"]

    assert (bound(0.0, 0.0), bound(0.1, 0.0), bound(0.3, 0.3)) == (0.0, INF, 0.0)
    assert bound(0.5, 0.1) == pytest.approx(0.16 / 0.09)
    assert (bound(0.5, 1.0), bound(0.5, 7.0)) == (0.0, 0.0)


def test_means_over_nothing_have_no_key() -> None:
    assert metrics_from_sums([0.0] * len(SUM_NAMES)) == {"veto/trigger_tokens": 0.0, "behavior/unusable_tokens": 0.0}
    with pytest.raises(ValueError, match="zip"):
        metrics_from_sums([0.0])


def test_skipped_responses_count_like_forwarded_ones_without_advantage() -> None:
    inputs = batch([[0.0] * 3] * 2, [0.0, 0.0], lengths=[3, 0])
    forwarded = sums(mu_grpo(inputs))
    skipped = dict(zip(SUM_NAMES, skipped_sums([3, 0]).tolist(), strict=True))
    differing = {name for name in SUM_NAMES if forwarded[name] != skipped[name]}
    assert differing == {"usable_tokens"}
    assert (skipped["responses"], skipped["tokens"]) == (1, 3)


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": -0.1}, r"\[-0.1, 5.0\]"),
        ({"clip_low": 1.1}, r"\[1.1, 5.0\]"),
        ({"clip_high": 0.9}, r"\[0.0, 0.9\]"),
        ({"clip_high": NAN}, "nan"),
        ({"veto_threshold": 0.0}, "threshold is 0.0"),
        ({"veto_threshold": 1.5}, "threshold is 1.5"),
        ({"veto_scope": "prefix"}, "'prefix': choose one of sequence, suffix"),
        ({"kl_coefficient": 0.1}, "kl_coefficient is 0.1"),
    ],
)
def test_option_out_of_range_is_refused_with_its_value(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mu_grpo(batch([[0.0]], [1.0]), **options)


def test_m2po_threshold_must_be_positive() -> None:
    with pytest.raises(ValueError, match="threshold is 0.0"):
        m2po_objective(batch([[0.0]], [1.0]), threshold=0.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("policy_logps", torch.zeros(2)),
        ("behavior_logps", torch.zeros(2, 4)),
        ("advantages", torch.zeros(2, 1)),
        ("completion_mask", torch.ones(2, 3, dtype=torch.long)),
        ("ref_logps", torch.zeros(3, 2)),
        ("entropies", torch.zeros(2)),
    ],
)
def test_misshapen_input_is_refused_by_name(field: str, value: torch.Tensor) -> None:
    good = {
        "policy_logps": torch.zeros(2, 3),
        "behavior_logps": torch.zeros(2, 3),
        "advantages": torch.zeros(2),
        "completion_mask": torch.ones(2, 3, dtype=torch.bool),
    }
    LossInputs(**good)
    with pytest.raises(ValueError, match=field):
        LossInputs(**(good | {field: value}))
