"""
The mathematics of μ-GRPO (arXiv 2605.17570) as pure functions: advantages, the relaxed-clip objective with the
negative-advantage veto, the M2PO baseline, and the diagnostics of both. Knows no trainer, configuration or logger.

Nothing here makes the host wait for the device: no value of a tensor is read, and no shape depends on one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

VetoScope = Literal["sequence", "suffix", "non_trigger_suffix", "trigger", "none"]

LOG_RATIO_LIMIT = 20.0  # what `exp` takes is clamped to ± this, so that value and gradient stay finite
PREFIX_LOG_LIMIT = 600.0  # the same for the log of a product over a prefix, in float64
UNUSABLE_LOGP = -1000.0  # servers report a floor (vLLM: -9999) where they have no log-prob; nothing real is this low
EQUAL_REWARDS_RTOL = 1e-6

SUM_NAMES: tuple[str, ...] = (
    "responses",
    "tokens",
    "usable_tokens",
    "unusable_tokens",
    "negative_tokens",
    "negative_ratio",
    "positive_tokens",
    "positive_ratio",
    "clipped_tokens",
    "abs_log_ratio",
    "behavior_kl",
    "trigger_tokens",
    "vetoed_tokens",
    "vetoed_responses",
    "harmful_mass",
    "harmful_prefix_mass",
    "ref_tokens",
    "ref_kl",
    "entropy_tokens",
    "entropy",
)

_MEANS = {
    "ratio/negative_mean": ("negative_ratio", "negative_tokens"),
    "ratio/positive_mean": ("positive_ratio", "positive_tokens"),
    "ratio/abs_log_mean": ("abs_log_ratio", "usable_tokens"),
    "clip/token_fraction": ("clipped_tokens", "tokens"),
    "veto/token_fraction": ("vetoed_tokens", "tokens"),
    "veto/response_fraction": ("vetoed_responses", "responses"),
    "kl/behavior": ("behavior_kl", "usable_tokens"),
    "kl/ref": ("ref_kl", "ref_tokens"),
    "policy/entropy": ("entropy", "entropy_tokens"),
    "prefix/m_H": ("harmful_mass", "responses"),
    "prefix/q_H": ("harmful_prefix_mass", "responses"),
}


@dataclass(frozen=True)
class LossInputs:
    """
    One micro-batch of responses. What stands at padding is never read, NaN included.

    Args:
        policy_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probs of the sampled tokens under the policy π_θ, logits divided by the sampling temperature. Carries
            the gradient. −inf is a ratio of (almost) 0 without gradient; NaN is a broken model and reaches the loss.
        behavior_logps (`torch.Tensor` of shape `(B, T)`, float32):
            `b_t`, log-probs of the same tokens as sampled. NaN, ±inf and values ≤ −1000 are unusable: such a token is
            left out of objective, trigger test and ratio diagnostics, and counted.
        advantages (`torch.Tensor` of shape `(B,)`):
            One advantage a response.
        completion_mask (`torch.Tensor` of shape `(B, T)`, bool):
            True where a token was generated (the sampled EOS included), False at padding.
        ref_logps (`torch.Tensor` of shape `(B, T)`, *optional*):
            Log-probs under the reference policy, for the KL term and its diagnostic.
        entropies (`torch.Tensor` of shape `(B, T)`, *optional*):
            Entropies of the policy's next-token distributions, in nats, for the diagnostic alone.

    Raises:
        ValueError: If shapes disagree or the mask is not boolean.
    """

    policy_logps: Tensor
    behavior_logps: Tensor
    advantages: Tensor
    completion_mask: Tensor
    ref_logps: Tensor | None = None
    entropies: Tensor | None = None

    def __post_init__(self) -> None:
        shape = self.policy_logps.shape
        if len(shape) != 2:
            raise ValueError(f"policy_logps has shape {tuple(shape)}, but (B, T) is needed: one row a response.")
        for name in ("behavior_logps", "completion_mask", "ref_logps", "entropies"):
            value = getattr(self, name)
            if value is not None and value.shape != shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}, policy_logps {tuple(shape)}: align them.")
        if self.advantages.shape != shape[:1]:
            raise ValueError(
                f"advantages has shape {tuple(self.advantages.shape)}, but one advantage a response is needed: "
                f"pass shape {tuple(shape[:1])}."
            )
        if self.completion_mask.dtype != torch.bool:
            raise ValueError(
                f"completion_mask has dtype {self.completion_mask.dtype}, but bool is needed: pass `mask.bool()`."
            )


@dataclass(frozen=True)
class LossOutputs:
    """
    What an objective returns; both fields add up over micro-batches and ranks.

    Args:
        objective (`torch.Tensor`, scalar):
            Σ over responses of (1/T) Σ_t m_t · min(…), the KL term subtracted. To be maximized and *not* divided by
            the number of responses: with N responses in the whole update and W ranks whose gradients are averaged,
            `loss = -(W / N) * objective`. An empty micro-batch gives a differentiable zero.
        sums (`torch.Tensor` of shape `(len(SUM_NAMES),)`, float64, detached):
            Sums and counts in the order of `SUM_NAMES`. Add them up over everything, then call `metrics_from_sums`.
    """

    objective: Tensor
    sums: Tensor


def mu_grpo_objective(
    inputs: LossInputs,
    *,
    clip_low: float,
    clip_high: float,
    veto_scope: VetoScope,
    veto_threshold: float,
    kl_coefficient: float = 0.0,
    kl_times_ratio: bool = False,
) -> LossOutputs:
    """
    Clipped objective with the negative-advantage veto (paper §4; `clip` [0, 5], scope `sequence`, threshold 1e-4).
    GRPO (eq. 2) is the same function with [1 − ε, 1 + ε] and scope `none`.

    No dual clip: for A < 0 and a ratio above `clip_high` the term stays ρA. The KL term is k3 of policy against
    reference, as in TRL, averaged over the same T tokens and outside the veto.

    Args:
        inputs (`LossInputs`): The micro-batch.
        clip_low (`float`): Lower bound of the ratio, in [0, 1].
        clip_high (`float`): Upper bound of the ratio, at least 1; `inf` for none.
        veto_scope (`str`): Which tokens of a triggered response are masked, see `veto_mask`.
        veto_threshold (`float`): τ_c in (0, 1]. With scope `none` it only defines the diagnostics.
        kl_coefficient (`float`): Weight of the KL term; needs `ref_logps` if not 0.
        kl_times_ratio (`bool`): Multiply the KL term by the ratio, TRL's `use_bias_correction_kl`; by 1 where a token
            has no usable `b_t`.

    Raises:
        ValueError: For bounds, scope, threshold or coefficient outside of the above.
    """
    if not 0.0 <= clip_low <= 1.0 <= clip_high:
        raise ValueError(
            f"The clip interval [{clip_low}, {clip_high}] does not hold a ratio of 1, so that even fresh data would "
            "be clipped: choose 0 <= clip_low <= 1 <= clip_high."
        )
    low = inputs.policy_logps.new_full((), clip_low, dtype=torch.float64)
    high = inputs.policy_logps.new_full((), clip_high, dtype=torch.float64)
    return _clipped_objective(inputs, (low, high), veto_scope, veto_threshold, kl_coefficient, kl_times_ratio)


def m2po_objective(
    inputs: LossInputs,
    *,
    threshold: float,
    clip: Tensor | None = None,
    veto_threshold: float = 1e-4,
    kl_coefficient: float = 0.0,
    kl_times_ratio: bool = False,
) -> LossOutputs:
    """
    M2PO: clip the ratio to [exp(−√c), exp(√c)], with c such that the second moment of the log-ratios stays below a
    threshold (Zheng et al., "Prosperity before collapse", ICLR 2026).

    Args:
        inputs (`LossInputs`): The micro-batch.
        threshold (`float`): Largest mean of the squared log-ratio over the tokens that clipping can reach (0.04).
        clip (`torch.Tensor`, scalar, *optional*):
            √c from `m2po_clip_bound` over a larger set, such as the whole update. By default this micro-batch's own.
        veto_threshold (`float`): τ_c of the diagnostics; M2PO has no veto.
        kl_coefficient (`float`): Weight of the KL term; needs `ref_logps` if not 0.
        kl_times_ratio (`bool`): Multiply the KL term by the ratio, TRL's `use_bias_correction_kl`; by 1 where a token
            has no usable `b_t`.

    Raises:
        ValueError: For a threshold or a coefficient outside of the above.
    """
    if clip is None:
        with torch.no_grad():
            log_ratios, usable_mask = token_log_ratios(inputs)
        clip = m2po_clip_bound(log_ratios, inputs.advantages, usable_mask, threshold)
    bounds = (torch.exp(-clip), torch.exp(clip))
    return _clipped_objective(inputs, bounds, "none", veto_threshold, kl_coefficient, kl_times_ratio)


@torch.no_grad()
def m2po_clip_bound(log_ratios: Tensor, advantages: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """
    √c, the bound of the log-ratio that M2PO clips at; `inf` where nothing is to be clipped.

    H are the tokens that clipping can reach, (A > 0, ρ > 1) or (A < 0, ρ < 1). If their mean squared log-ratio v is at
    most `threshold`, nothing is clipped. Else, v ascending, k is the first index with
    Σ_{i≤k} v_i + (N_H − k − 1)·v_k ≥ threshold·N_H, and c = v_{k−1} (0 if k = 0).

    Args:
        log_ratios (`torch.Tensor` of shape `(B, T)` or `(M,)`): Raw log-ratios.
        advantages (`torch.Tensor` of shape `(B,)` or as `log_ratios`): Advantages, a response or a token.
        mask (`torch.Tensor`, as `log_ratios`, bool): True where a token takes part (has a usable `b_t`).
        threshold (`float`): Bound of the mean, positive.

    Returns:
        `torch.Tensor`: Scalar, of the dtype of `log_ratios`.
    """
    if not threshold > 0.0:
        raise ValueError(f"The M2PO threshold is {threshold}, but it bounds a mean of squares: choose one above 0.")
    if advantages.dim() < log_ratios.dim():
        advantages = advantages.unsqueeze(-1)
    reachable = (mask & (advantages.sign() * log_ratios > 0)).flatten()
    # Squares of a log-ratio of −inf stay finite: no bound this large ever binds.
    squares = log_ratios.double().clamp(-PREFIX_LOG_LIMIT, PREFIX_LOG_LIMIT).square().flatten()
    squares = torch.where(reachable, squares, math.inf).sort().values
    num_reachable = reachable.sum()
    index = torch.arange(squares.numel(), device=squares.device)
    in_set = index < num_reachable
    squares = torch.where(in_set, squares, 0.0)
    budget = threshold * num_reachable.double()
    # Σ_i min(v_i, v_k) never falls as k grows, so k is the number of those below the budget.
    capped_sums = _cumulative_sum(squares) + (num_reachable - index - 1) * squares
    first_over = (in_set & (capped_sums < budget)).sum()
    bound = torch.nn.functional.pad(squares, (1, 0)).gather(0, first_over.unsqueeze(0)).squeeze(0).sqrt()
    return torch.where(squares.sum() <= budget, math.inf, bound).to(log_ratios.dtype)


def token_log_ratios(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """
    Raw log-ratios log π_θ(a_t) − b_t and where they exist.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: The log-ratios, shape `(B, T)`, at least float32, differentiable, 0 where
        there is none; and the usable mask, shape `(B, T)`, bool, True at generated tokens with a usable `b_t`.
    """
    behavior = inputs.behavior_logps
    usable_mask = inputs.completion_mask & torch.isfinite(behavior) & (behavior > UNUSABLE_LOGP)
    # Not `mask * difference`: the gradient of what `where` leaves out is exactly 0, while 0 · NaN is NaN.
    return torch.where(usable_mask, inputs.policy_logps - behavior.float(), 0.0), usable_mask


@torch.no_grad()
def find_triggers(log_ratios: Tensor, advantages: Tensor, usable_mask: Tensor, threshold: float) -> Tensor:
    """
    Triggers (paper §3.3): tokens with A < 0 and ρ < τ_c. The raw log-ratio is compared, not the clamped one.

    Args:
        log_ratios (`torch.Tensor` of shape `(B, T)`): Raw log-ratios.
        advantages (`torch.Tensor` of shape `(B,)`): Advantages.
        usable_mask (`torch.Tensor` of shape `(B, T)`, bool): True where the log-ratio exists.
        threshold (`float`): τ_c in (0, 1].

    Returns:
        `torch.Tensor` of shape `(B, T)`, bool: True at triggers.
    """
    if not 0.0 < threshold <= 1.0:
        raise ValueError(
            f"The veto threshold is {threshold}, but it is a ratio below which a token was suppressed: choose one in "
            "(0, 1], such as 1e-4, and scope 'none' for no veto."
        )
    return usable_mask & (advantages < 0).unsqueeze(-1) & (log_ratios < math.log(threshold))


def veto_mask(triggers: Tensor, scope: VetoScope) -> Tensor:
    """
    The veto m_t (paper §3.3), where κ is the first trigger of a response. A response without one is kept whole.

    | scope | masked |
    |---|---|
    | `sequence` | all tokens of the response |
    | `suffix` | t > κ |
    | `non_trigger_suffix` | t > κ that are not triggers |
    | `trigger` | the triggers alone |
    | `none` | nothing |

    Args:
        triggers (`torch.Tensor` of shape `(B, T)`, bool): True at triggers.
        scope (`str`): One of the above.

    Returns:
        `torch.Tensor` of shape `(B, T)`, bool: True where a token is kept.
    """
    if scope == "sequence":
        return ~triggers.any(dim=-1, keepdim=True).expand_as(triggers)
    if scope == "suffix":
        return ~_after_first(triggers)
    if scope == "non_trigger_suffix":
        return ~_after_first(triggers) | triggers
    if scope == "trigger":
        return ~triggers
    if scope == "none":
        return torch.ones_like(triggers)
    raise ValueError(f"Unknown veto scope {scope!r}: choose one of {', '.join(get_args(VetoScope))}.")


def group_advantages(rewards: Tensor, eps: float = 1e-6, scale: bool = True) -> Tensor:
    """
    Advantages of prompt groups (paper eq. 1): A = (R − mean) / (std + eps), with Bessel's correction.

    Exactly 0 are: a group whose rewards are equal within a relative 1e-6, so that the veto never acts on the sign of
    rounding noise; a response whose reward is NaN or infinite, which also leaves its group's statistics; and a group
    with fewer than two scored responses.

    Args:
        rewards (`torch.Tensor` of shape `(..., G)`): Rewards, one group a row; NaN for unscorable. Float64 is best.
        eps (`float`): Added to the standard deviation (TRL's is 1e-4).
        scale (`bool`): Divide by the standard deviation. False is TRL's `scale_rewards="none"`.

    Returns:
        `torch.Tensor` of shape `(..., G)`, float64.
    """
    rewards = rewards.double()
    scored = torch.isfinite(rewards)
    count = scored.sum(dim=-1, keepdim=True)
    mean = torch.where(scored, rewards, 0.0).sum(dim=-1, keepdim=True) / count.clamp(min=1)
    centered = torch.where(scored, rewards - mean, 0.0)
    highest = torch.where(scored, rewards, -math.inf).amax(dim=-1, keepdim=True)
    lowest = torch.where(scored, rewards, math.inf).amin(dim=-1, keepdim=True)
    # With one scored response the two are equal, with none they are −inf and inf: not informative either.
    informative = highest - lowest > EQUAL_REWARDS_RTOL * torch.maximum(highest.abs(), lowest.abs())
    if scale:
        std = (centered.square().sum(dim=-1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        centered = centered / (std + eps)
    return torch.where(informative, centered, 0.0)


def nan_unless_finite(loss: Tensor) -> Tensor:
    """`loss` itself, bit by bit, if it is finite; else NaN, and so is every entry of its gradient."""
    return loss * torch.where(loss.isfinite(), 1.0, math.nan)


def skipped_sums(lengths: Sequence[int]) -> Tensor:
    """
    Sums of responses that are never forwarded, since their advantage is 0: they count as responses and as tokens.

    Args:
        lengths (`Sequence[int]`): Numbers of generated tokens.

    Returns:
        `torch.Tensor` of shape `(len(SUM_NAMES),)`, float64, on the host.
    """
    sums = torch.zeros(len(SUM_NAMES), dtype=torch.float64)
    sums[SUM_NAMES.index("responses")] = sum(1 for length in lengths if length > 0)
    sums[SUM_NAMES.index("tokens")] = sum(lengths)
    return sums


def metrics_from_sums(sums: Sequence[float]) -> dict[str, float]:
    """
    The diagnostics of an update, from its `sums` added up over micro-batches and ranks. All are before the veto, but
    for `veto/*_fraction`. A mean over nothing has no key.

    | key | meaning |
    |---|---|
    | `ratio/negative_mean`, `ratio/positive_mean` | E[ρ] over usable tokens with A < 0, A > 0 |
    | `ratio/abs_log_mean` | mean absolute log-ratio over usable tokens, each at most 20 |
    | `clip/token_fraction` | tokens at which min() selects the clipped constant, of all tokens |
    | `veto/trigger_tokens` | number of triggers |
    | `veto/token_fraction`, `veto/response_fraction` | tokens masked by the veto, responses with one |
    | `behavior/unusable_tokens` | number of forwarded tokens without a usable `b_t` |
    | `kl/behavior` | k3 estimate of KL(β_k ‖ π_θ) over usable tokens |
    | `kl/ref` | k3 estimate of KL(π_θ ‖ π_ref) over forwarded tokens |
    | `policy/entropy` | mean entropy over forwarded tokens, nats |
    | `prefix/m_H`, `prefix/q_H` | mass of H_κ under β, and under the current policy's prefixes (paper App. D) |
    | `prefix/chi2_lower_bound` | Theorem 1's bound from the two; 0 if the estimate of q_H is 1 or more |

    Args:
        sums (`Sequence[float]` of length `len(SUM_NAMES)`): Sums and counts in the order of `SUM_NAMES`.

    Returns:
        `dict[str, float]`
    """
    total = dict(zip(SUM_NAMES, (float(value) for value in sums), strict=True))
    metrics = {key: total[name] / total[count] for key, (name, count) in _MEANS.items() if total[count] != 0}
    metrics["veto/trigger_tokens"] = total["trigger_tokens"]
    metrics["behavior/unusable_tokens"] = total["unusable_tokens"]
    if "prefix/m_H" in metrics:
        metrics["prefix/chi2_lower_bound"] = _chi2_lower_bound(metrics["prefix/m_H"], metrics["prefix/q_H"])
    return metrics


def _chi2_lower_bound(m: float, q: float) -> float:
    """χ²(Bern(m) ‖ Bern(q)) (paper Theorem 1). An estimate q ≥ 1 of a probability bounds nothing."""
    if q == 0.0:
        return math.inf if m > 0.0 else 0.0
    return (m - q) ** 2 / (q * (1.0 - q)) if q < 1.0 else 0.0


def _clipped_objective(
    inputs: LossInputs,
    clip: tuple[Tensor, Tensor],
    veto_scope: VetoScope,
    veto_threshold: float,
    kl_coefficient: float,
    kl_times_ratio: bool,
) -> LossOutputs:
    if kl_coefficient != 0.0 and inputs.ref_logps is None:
        raise ValueError(f"kl_coefficient is {kl_coefficient}, but there are no ref_logps: pass them, or 0.")
    log_ratios, usable_mask = token_log_ratios(inputs)
    triggers = find_triggers(log_ratios, inputs.advantages, usable_mask, veto_threshold)
    keep_mask = veto_mask(triggers, veto_scope)

    ratios = log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    advantages = inputs.advantages.to(ratios.dtype).unsqueeze(-1)
    terms = torch.minimum(ratios * advantages, ratios.clamp(*clip) * advantages)
    terms = torch.where(usable_mask & keep_mask, terms, 0.0)
    sums = _ratio_sums(inputs, log_ratios.detach(), usable_mask, clip)
    sums |= _veto_sums(inputs, log_ratios.detach(), usable_mask, triggers, keep_mask)

    if inputs.ref_logps is not None:
        differences = torch.where(inputs.completion_mask, inputs.ref_logps - inputs.policy_logps, 0.0)
        ref_kl = _k3(differences)
        if kl_coefficient != 0.0:
            terms = terms - kl_coefficient * (ref_kl * ratios if kl_times_ratio else ref_kl)
        sums |= {"ref_tokens": sums["tokens"], "ref_kl": _total(ref_kl.detach(), inputs.completion_mask)}
    if inputs.entropies is not None:
        entropy = _total(inputs.entropies.detach(), inputs.completion_mask)
        sums |= {"entropy_tokens": sums["tokens"], "entropy": entropy}

    objective = (terms.sum(dim=-1) / _lengths(inputs)).sum()
    zero = torch.zeros_like(sums["tokens"])
    return LossOutputs(objective, torch.stack([sums.get(name, zero) for name in SUM_NAMES]))


@torch.no_grad()
def _ratio_sums(
    inputs: LossInputs, log_ratios: Tensor, usable_mask: Tensor, clip: tuple[Tensor, Tensor]
) -> dict[str, Tensor]:
    log_ratios = log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratios = log_ratios.exp()
    advantages = inputs.advantages.unsqueeze(-1)
    negative = usable_mask & (advantages < 0)
    positive = usable_mask & (advantages > 0)
    clipped = (positive & (ratios > clip[1])) | (negative & (ratios < clip[0]))
    return {
        "responses": _count(inputs.completion_mask.any(dim=-1)),
        "tokens": _count(inputs.completion_mask),
        "usable_tokens": _count(usable_mask),
        "unusable_tokens": _count(inputs.completion_mask & ~usable_mask),
        "negative_tokens": _count(negative),
        "negative_ratio": _total(ratios, negative),
        "positive_tokens": _count(positive),
        "positive_ratio": _total(ratios, positive),
        "clipped_tokens": _count(clipped),
        "abs_log_ratio": _total(log_ratios.abs(), usable_mask),
        "behavior_kl": _total(_k3(log_ratios), usable_mask),
    }


@torch.no_grad()
def _veto_sums(
    inputs: LossInputs, log_ratios: Tensor, usable_mask: Tensor, triggers: Tensor, keep_mask: Tensor
) -> dict[str, Tensor]:
    vetoed = inputs.completion_mask & ~keep_mask
    # H_κ as if nothing were masked, λ uniform over the positions of each response (paper App. D).
    harmful = usable_mask & _after_first(triggers) & ~triggers
    weights = harmful / _lengths(inputs).double().unsqueeze(-1)
    steps = log_ratios.double().clamp(-PREFIX_LOG_LIMIT, PREFIX_LOG_LIMIT)
    log_prefix = (_cumulative_sum(steps) - steps).clamp(-PREFIX_LOG_LIMIT, PREFIX_LOG_LIMIT)  # log R_{t−1}
    return {
        "trigger_tokens": _count(triggers),
        "vetoed_tokens": _count(vetoed),
        "vetoed_responses": _count(vetoed.any(dim=-1)),
        "harmful_mass": weights.sum(),
        "harmful_prefix_mass": _total(weights * log_prefix.exp(), harmful),
    }


def _k3(log_ratios: Tensor) -> Tensor:
    """exp(d) − d − 1, non-negative, with d clamped like every log-ratio that is exponentiated."""
    log_ratios = log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(log_ratios) - log_ratios


def _lengths(inputs: LossInputs) -> Tensor:
    """T of each response, shape `(B,)`; 1 for an empty one."""
    return inputs.completion_mask.sum(dim=-1).clamp(min=1)


def _after_first(triggers: Tensor) -> Tensor:
    """True strictly after the first True of each row."""
    return triggers.cumsum(dim=-1) - triggers.long() > 0


def _cumulative_sum(values: Tensor) -> Tensor:
    """Running sum of the last dimension in log₂ steps: `cumsum` of floats raises on CUDA in deterministic mode."""
    shift = 1
    while shift < values.shape[-1]:
        values = values + torch.nn.functional.pad(values[..., :-shift], (shift, 0))
        shift *= 2
    return values


def _count(mask: Tensor) -> Tensor:
    return mask.sum(dtype=torch.float64)


def _total(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum(dtype=torch.float64)
