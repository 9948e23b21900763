"""
What the log of a run holds: name, unit and meaning of every metric. `docs/metrics.md` is made from it:

    python -m mu_grpo_trl.metrics > docs/metrics.md
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """
    One number of the log.

    Args:
        name (`str`): its key in `trainer.state.log_history`; `{function}` stands for the name of a reward function.
        unit (`str`): of its values.
        meaning (`str`): what it is.
        when (`str`): where it is left out, a condition; empty: it is in every log of training.
    """

    name: str
    unit: str
    meaning: str
    when: str = ""

    def matches(self, key: str) -> bool:
        """Whether `key` is this metric, of whichever reward function."""
        return re.fullmatch(re.escape(self.name).replace(r"\{function\}", ".+"), key) is not None


TAKEN = "an update was taken"
"""What `when` says of all that a skipped update does not have."""
_EVALUATED = "an evaluation"
_ENDED = "the end of training"
_MADE = "the first log after it was made"

SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Training": (
        Metric("loss", "1", "−objective, averaged over the updates since the last log"),
        Metric("grad_norm", "1", "norm of the gradient of the last update, before it is clipped to `max_grad_norm`"),
        Metric("learning_rate", "1", "of the last update"),
        Metric("epoch", "epochs", "passes over the prompts consumed by updates"),
        Metric("nonfinite/skipped_updates", "updates", "skipped because loss or gradient were not finite; the total",
               "once there are any"),
    ),
    "Rollouts of the update": (
        Metric("reward", "reward", "mean over scored responses", "some are scored"),
        Metric("reward_std", "reward", "standard deviation over scored responses", "some are scored"),
        Metric("rewards/{function}/mean", "reward", "mean of one reward function", "some are scored"),
        Metric("rewards/unscorable_share", "share of responses", "without a reward"),
        Metric("frac_reward_zero_std", "share of groups", "all advantages are 0: no gradient comes of them"),
        Metric("completions/mean_length", "tokens", "generated tokens of a response, mean"),
        Metric("completions/max_length", "tokens", "of the longest response"),
        Metric("completions/clipped_ratio", "share of responses", "cut by the token limit"),
    ),
    "Ratio, clip and veto": (
        Metric("ratio/negative_mean", "1", "E[ρ | A<0] over usable tokens, before the veto", "there are such tokens"),
        Metric("ratio/positive_mean", "1", "E[ρ | A>0] over usable tokens", "there are such tokens"),
        Metric("ratio/abs_log_mean", "nats", "mean absolute log-ratio over usable tokens, each at most 20",
               "there are usable tokens"),
        Metric("clip/token_fraction", "share of tokens", "at which min() selects the clipped constant", TAKEN),
        Metric("veto/trigger_tokens", "tokens", "triggers: A < 0 and ρ below `veto_threshold`", TAKEN),
        Metric("veto/token_fraction", "share of tokens", "masked by the veto", TAKEN),
        Metric("veto/response_fraction", "share of responses", "with a token that the veto masks", TAKEN),
        Metric("behavior/unusable_tokens", "tokens", "forwarded without a usable behavior log-prob", TAKEN),
        Metric("kl/behavior", "nats", "k3 estimate of KL(β_k ‖ π_θ) over usable tokens", "there are usable tokens"),
        Metric("kl/ref", "nats", "k3 estimate of KL(π_θ ‖ π_ref) over forwarded tokens", "`beta` is not 0"),
        Metric("policy/entropy", "nats", "mean entropy over forwarded tokens", "`entropy_coef` is not 0"),
        Metric("prefix/m_H", "probability", "mass of H_κ under β_k (paper App. D)", TAKEN),
        Metric("prefix/q_H", "probability", "the same under the current policy's prefixes", TAKEN),
        Metric("prefix/chi2_lower_bound", "1", "Theorem 1's bound from the two; 0 if q_H is 1 or more", TAKEN),
    ),
    "The stage": (
        Metric("stage/number", "", "counted from 0", _MADE),
        Metric("stage/responses", "responses", "of the stage", _MADE),
        Metric("stage/tokens", "tokens", "generated for the stage", _MADE),
        Metric("stage/reward", "reward", "mean over its scored responses", f"{_MADE}, if any is scored"),
        Metric("stage/mean_length", "tokens", "of a response", _MADE),
        Metric("stage/truncated_share", "share of responses", "cut by the token limit", _MADE),
        Metric("stage/zero_advantage_share", "share of groups", "without signal", _MADE),
        Metric("stage/unscorable_responses", "responses", "without a reward", _MADE),
    ),
    "Time since the start of the run, its former starts included": (
        Metric("time/rollout_s", "s", "generation, and rewards while generating"),
        Metric("time/reward_s", "s", "wait for rewards after the last response was generated",
               "once there was a wait"),
        Metric("time/sync_s", "s", "publishing weights, loading them into the engine, and the probe"),
        Metric("time/handover_s", "s", "handing the device over to the engine and back"),
        Metric("time/optimize_s", "s", "updates"),
        Metric("time/checkpoint_s", "s", "writing checkpoints", "once one was written"),
        Metric("time/evaluation_s", "s", "evaluation; not part of T_total", "once there was one"),
        Metric("time/other_s", "s", "all else"),
        Metric("time/total_s", "s", "T_total: the sum of the above but evaluation"),
    ),
    "Throughput since the start of the run": (
        Metric("tokens/generated_tokens_per_s", "tokens/s", "generated tokens by T_rollout"),
        Metric("tokens/forwarded_tokens_per_s", "tokens/s", "forwarded, padding included, by optimization time"),
        Metric("tokens/trained_tokens_per_s", "tokens/s", "generated tokens trained on, by optimization time"),
        Metric("tokens/padding_share", "share of tokens", "padding among forwarded tokens", "some were forwarded"),
        Metric("tokens/skipped_response_share", "share of responses", "never forwarded, for they add no gradient"),
        Metric("mfu", "share of peak", "6 · parameters · forwarded tokens, by what the devices could do",
               "the devices' peak is known"),
    ),
    "Evaluation (TRL's)": tuple(
        Metric(f"eval_{name}", unit, meaning, _EVALUATED)
        for name, unit, meaning in (
            ("loss", "1", "of TRL's GRPO on fresh responses"),
            ("policy_loss", "1", "the same without its KL term; only with `beta`"),
            ("reward", "reward", "mean of the weighted sum"),
            ("reward_std", "reward", "mean standard deviation within a group"),
            ("rewards/{function}/mean", "reward", "mean of one reward function"),
            ("rewards/{function}/std", "reward", "its standard deviation"),
            ("frac_reward_zero_std", "share of groups", "equal rewards"),
            ("completions/mean_length", "tokens", "of a response"),
            ("completions/min_length", "tokens", "of a response"),
            ("completions/max_length", "tokens", "of a response"),
            ("completions/clipped_ratio", "share of responses", "cut by the token limit"),
            ("completions/mean_terminated_length", "tokens", "of a response that ended by itself"),
            ("completions/min_terminated_length", "tokens", "of a response that ended by itself"),
            ("completions/max_terminated_length", "tokens", "of a response that ended by itself"),
            ("entropy", "nats", "mean over generated tokens"),
            ("kl", "nats", "to the reference policy; only with `beta`"),
            ("clip_ratio/low_mean", "share of tokens", "clipped below"),
            ("clip_ratio/low_min", "share of tokens", "clipped below, least of the ranks"),
            ("clip_ratio/high_mean", "share of tokens", "clipped above"),
            ("clip_ratio/high_max", "share of tokens", "clipped above, most of the ranks"),
            ("clip_ratio/region_mean", "share of tokens", "clipped"),
            ("num_tokens", "tokens", "that TRL counted in training: always 0, see `tokens/`"),
            ("runtime", "s", "of the evaluation"),
            ("samples_per_second", "1/s", "prompts evaluated"),
            ("steps_per_second", "1/s", "batches evaluated"),
        )
    ),
    "The whole run (transformers')": (
        Metric("train_loss", "1", "mean over updates", _ENDED),
        Metric("train_runtime", "s", "of this start, rollouts and evaluation included", _ENDED),
        Metric("train_samples_per_second", "1/s", "by transformers' count", _ENDED),
        Metric("train_steps_per_second", "1/s", "updates", _ENDED),
        Metric("total_flos", "operations", "6 · parameters · forwarded tokens", _ENDED),
    ),
}  # fmt: skip
"""Every metric, by what it is about."""

METRICS: tuple[Metric, ...] = tuple(metric for section in SECTIONS.values() for metric in section)

_HEAD = """# Metrics

<!-- Made by `python -m mu_grpo_trl.metrics > docs/metrics.md`; a test compares the two. -->

Keys are those of `trainer.state.log_history`. Trackers (W&B, trackio, TensorBoard) show them as `train/…`, and
evaluation's `eval_…` as `eval/…`, over `train/global_step`, the number of updates. With `logging_steps` above 1, those
of ratio, clip and veto are ratios of sums over all updates since the last log, those of the rollouts are means of the
updates' means. All are over all ranks. "when" says which logs a metric is in.
W&B and trackio also get TRL's `profiling/…`: seconds of each part of an evaluation.
"""


def markdown() -> str:
    """The page of all metrics."""
    lines = [_HEAD]
    for title, metrics in SECTIONS.items():
        lines += [f"## {title}", "", "| key | unit | meaning | when |", "|---|---|---|---|"]
        lines += [f"| `{m.name}` | {m.unit or '–'} | {m.meaning} | {m.when or 'every log'} |" for m in metrics]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(), end="")
