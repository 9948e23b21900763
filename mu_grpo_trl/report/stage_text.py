"""What `mu-grpo stage show` prints: a stage as lines of text, or as one JSON object."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from ..stage.reader import StageReader
from .stage_view import Example, StageView

if TYPE_CHECKING:
    from .ratios import RatioView

Decode = Callable[[np.ndarray], str]

BAR = 40
TOKENS_BEFORE, TOKENS_AFTER = 12, 6
MOST_TRIGGERED_ROWS = 10


def identity(reader: StageReader) -> list[str]:
    """What the stage is and what generated it."""
    manifest = reader.manifest
    return [
        f"{reader.path}: stage {manifest.stage}, {manifest.status}",
        f"  {len(reader)} of {manifest.num_groups} groups × {manifest.num_generations} responses, "
        f"{manifest.num_updates} updates of {manifest.prompts_per_update} groups",
        f"  {manifest.engine} {manifest.engine_version}, sampling {manifest.sampling}",
        f"  policy {manifest.policy_hash} published at update {manifest.published_step}, run {manifest.run_id}",
        f"  dataset {manifest.dataset_hash}, tokenizer {manifest.tokenizer_hash}, seed {manifest.seed}",
    ]


def totals(view: StageView) -> list[str]:
    """Rewards, solve rates and lengths."""
    summary, size = view.summary, len(view.groups_by_right) - 1
    each = ", ".join(f"{name} {mean:.3f}" for name, mean in summary.mean_rewards.items())
    num_groups = summary.num_groups
    quantiles = ", ".join(f"{_quantile_name(share)} {length}" for share, length in view.length_quantiles.items())
    kinds = (
        ("right", view.mean_length_right),
        ("wrong", view.mean_length_wrong),
    )
    by_kind = ", ".join(f"{mean:.1f} where {name}" for name, mean in kinds if not math.isnan(mean))
    solved = [(f"{right} of {size}", count) for right, count in enumerate(view.groups_by_right)]
    return [
        f"  {summary.num_responses} responses of {summary.num_tokens} tokens, {summary.tokens_without_logp} tokens "
        "without a usable log-prob",
        "",
        f"reward: mean {summary.mean_reward:.3f} ({each}), unscorable {summary.unscorable_responses}",
        *bars(view.rewards, "responses"),
        "",
        f"groups by right responses (reward ≥ {view.right_at:g}): all wrong {view.all_wrong / num_groups:.1%}, "
        f"mixed {view.mixed / num_groups:.1%}, all right {view.all_right / num_groups:.1%}; "
        f"without signal {summary.zero_advantage_group_share:.1%}",
        *bars(solved, "groups"),
        "",
        f"tokens per response: mean {summary.mean_length:.1f} ({by_kind}); {quantiles}; "
        f"cut at the limit {summary.truncated_share:.1%} ({view.truncated})",
        *bars(view.lengths, "responses"),
    ]


def bars(counts: Sequence[tuple[str, int]], unit: str) -> list[str]:
    """A histogram, one line a bin."""
    if not counts:
        return []
    total, most = sum(count for _, count in counts), max(count for _, count in counts)
    width = max(len(name) for name, _ in counts)
    digits = max(len(str(count)) for _, count in counts)
    return [
        f"  {name:>{width}}  {'█' * math.ceil(BAR * count / max(1, most)):<{BAR}}  {count:>{digits}} {unit} "
        f"({count / max(1, total):.1%})"
        for name, count in counts
    ]


def examples(reader: StageReader, view: StageView, decode: Decode) -> list[str]:
    """The best and the worst responses with their prompts."""
    lines = []
    for kind, chosen in (("best", view.best), ("worst", view.worst)):
        for example in chosen:
            lines += _response(reader, example, decode, kind)
    return lines


def group(reader: StageReader, number: int, samples: Iterable[int], decode: Decode) -> list[str]:
    """Responses of one group."""
    rewards, advantages = reader.rewards([number])[0], reader.advantages([number])[0]
    lines = []
    for sample in samples:
        example = Example(number, sample, float(rewards[sample]), float(advantages[sample]))
        lines += _response(reader, example, decode, "")
    return lines


def ratios(view: RatioView, decode: Decode, num_tokens: int) -> list[str]:
    """The sample under the checkpoint: means, triggers in their context, and what each veto scope would mask."""
    metrics = view.metrics
    names = {"ratio/negative_mean": "E[ρ | A<0]", "ratio/positive_mean": "E[ρ | A>0]", "ratio/abs_log_mean": "|log ρ|"}
    means = ", ".join(f"{label} {metrics[key]:.4g}" for key, label in names.items() if key in metrics)
    lines = [
        "",
        f"under {view.checkpoint}: {len(view.responses)} responses with A ≠ 0, {view.num_tokens} tokens",
        f"  {means}",
        f"  {metrics['veto/trigger_tokens']:.0f} triggers (A < 0, ρ < {view.threshold:g}) in {len(view.triggered)} "
        "responses",
        "  the veto would mask:",
    ]
    for scope, (responses, tokens) in view.masked().items():
        share = tokens / view.num_tokens
        lines.append(f"    {scope:<20} {responses:>5} responses, {tokens:>7} tokens ({share:.2%})")
    for response in view.triggered[:MOST_TRIGGERED_ROWS]:
        masked = ", ".join(f"{scope} {count}" for scope, count in response.masked_tokens.items() if count)
        lines.append(
            f"  group {response.group} sample {response.sample}: κ = {int(response.triggers.argmax())} of "
            f"{len(response.completion_ids)} tokens; masked: {masked}"
        )
    if len(view.triggered) > MOST_TRIGGERED_ROWS:
        lines.append(f"  … and {len(view.triggered) - MOST_TRIGGERED_ROWS} more responses with a trigger")
    lowest = view.lowest(num_tokens)
    lines += ["  lowest ratios with A < 0 (⚑ a trigger):"] if lowest else []
    for response, place in lowest:
        flag = "⚑" if response.triggers[place] else " "
        ratio = math.exp(response.log_ratios[place])
        where = f"group {response.group} sample {response.sample} t={place}"
        lines.append(f"  {flag} ρ={ratio:<9.3g} {where}: {context(response.completion_ids, place, decode)}")
    return lines


def context(token_ids: np.ndarray, place: int, decode: Decode) -> str:
    """The token at `place` in ⟦brackets⟧ with some before and after it, on one line."""
    before = decode(token_ids[max(0, place - TOKENS_BEFORE) : place])
    token, after = decode(token_ids[place : place + 1]), decode(token_ids[place + 1 : place + 1 + TOKENS_AFTER])
    return f"{before}⟦{token}⟧{after}".replace("\n", "⏎")


def as_json(
    reader: StageReader,
    view: StageView | None = None,
    ratios: RatioView | None = None,
    decode: Decode | None = None,
) -> str:
    """All of it as one JSON object; what is not a number is null."""
    manifest = reader.manifest
    told: dict[str, Any] = {
        "path": str(reader.path),
        "groups": len(reader),
        "manifest": json.loads(manifest.to_json()),
    }
    del told["manifest"]["prompt_indices"]
    if view is not None and decode is not None:
        told["view"] = asdict(view) | {
            kind: [_example(reader, example, decode) for example in chosen]
            for kind, chosen in (("best", view.best), ("worst", view.worst))
        }
    if ratios is not None:
        told["ratios"] = {
            "checkpoint": ratios.checkpoint,
            "threshold": ratios.threshold,
            "num_responses": len(ratios.responses),
            "num_tokens": ratios.num_tokens,
            "metrics": ratios.metrics,
            "masked": {scope: {"responses": n, "tokens": t} for scope, (n, t) in ratios.masked().items()},
            "triggered": [
                {
                    "group": response.group,
                    "sample": response.sample,
                    "advantage": response.advantage,
                    "num_tokens": len(response.completion_ids),
                    "triggers": [
                        {"token": int(t), "log_ratio": float(response.log_ratios[t])}
                        for t in np.flatnonzero(response.triggers)
                    ],
                    "masked_tokens": response.masked_tokens,
                }
                for response in ratios.triggered
            ],
        }
    return json.dumps(_finite(told), indent=1, ensure_ascii=False, allow_nan=False)


def _example(reader: StageReader, example: Example, decode: Decode) -> dict[str, Any]:
    response = reader.response(example.group, example.sample)
    texts = {"prompt": decode(response.prompt_ids), "completion": decode(response.completion_ids)}
    return asdict(example) | texts


def _response(reader: StageReader, example: Example, decode: Decode, kind: str) -> list[str]:
    response = reader.response(example.group, example.sample)
    return [
        "",
        f"--- {f'{kind}: ' if kind else ''}group {example.group} sample {example.sample}: "
        f"{len(response.completion_ids)} tokens, reward {example.reward:.3f}, advantage {example.advantage:.3f}",
        decode(response.prompt_ids),
        f">>> {decode(response.completion_ids)}",
    ]


def _quantile_name(share: float) -> str:
    return {0.0: "shortest", 0.5: "median", 1.0: "longest"}.get(share, f"{share:.0%}")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
