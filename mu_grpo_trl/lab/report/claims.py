"""
The claims of the paper, each with the rule its verdict follows. Fixed before the laboratory was run.

A claim is a function from the cells of a regime to a [`Finding`]; the rule is stated in the registry beside it and
printed with every verdict. Verdicts come from finished cells of the reporting seeds alone: with fewer than five of
them, or while planned cells are missing, a verdict is `unclear`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from . import verdicts
from .results import Result
from .selection import LOW_STALENESS, Lab, Regime, Selection
from .statistics import Estimate, estimate, paired_difference, paired_ratio
from .verdicts import MIN_SEEDS, Verdict

KEPT_SHARE = 0.9
"""A run is stable if its final accuracy is at least this share of its peak (claim c)."""
RATIO_DROP = 0.5
"""E[ρ | A<0] has fallen once it is under this level (claim b): half of what it is on fresh data."""
PREFIX_RATIO = 0.01
"""Retained suffixes are off support if q_H is at most this share of m_H (claim i)."""
SHARE_STEP = 0.002
"""A vetoed share counts as risen from a stage to the next if its mean rises by more than this (claim f)."""


@dataclass(frozen=True)
class Finding:
    """
    What the cells of one regime say about one claim.

    Args:
        verdict (`str`): by the claim's rule.
        num_seeds (`int`): of the smallest part.
        numbers (`str`): means with intervals, for the table.
        values (`dict`): the same and the numbers of each seed, for `claims.json`.
        reason (`str`): why it is unclear, if not by the numbers.
    """

    verdict: Verdict
    num_seeds: int
    numbers: str
    values: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class Claim:
    """
    A claim of the paper.

    Args:
        key (`str`): short name.
        text (`str`): the claim.
        source (`str`): where the paper makes it.
        rule (`str`): how the verdict follows.
        judge (`Callable`): finding of a regime, None where none of its cells are planned.
        shared_lr (`bool`): an ablation, judged with μ-GRPO's tuned learning rate for all methods, as in the paper;
            else each method has its own.
        everywhere (`bool`): also judged at every other learning rate and μ there are cells for.
    """

    key: str
    text: str
    source: str
    rule: str
    judge: Callable[[Lab, Regime], Finding | None]
    shared_lr: bool = False
    everywhere: bool = False


def points(value: Estimate, signed: bool = False) -> str:
    """An accuracy or a share in percent with its interval: `48.0 ± 1.2%`."""
    sign = "+" if signed else ""
    if not value.num:
        return "–"
    if value.num == 1:
        return f"{100 * value.mean:{sign}.1f}%"
    return f"{100 * value.mean:{sign}.1f} ± {100 * value.half_width:.1f}%"


def times(value: Estimate) -> str:
    """A ratio with its interval: `1.53× (1.41–1.66)`."""
    if not value.num:
        return "–"
    return f"{value.mean:.2f}×" + (f" ({value.low:.2f}–{value.high:.2f})" if value.num > 1 else "")


def _compared(
    first: Selection,
    second: Selection,
    names: tuple[str, str],
    rule: Callable[[Estimate], Verdict],
    of: Callable[[Result], float | None] = lambda result: result.final,
) -> Finding | None:
    """A paired comparison of a number of two settings; a seed whose number is None in one of them is left out."""
    if not first.num_planned or not second.num_planned:
        return None
    columns = [{s: v for s, r in part.by_seed.items() if (v := of(r)) is not None} for part in (first, second)]
    difference = paired_difference(*columns)
    means = [estimate(list(column.values())) for column in columns]
    values: dict[str, Any] = {"difference": verdicts.interval(difference)}
    for name, mean, column in zip(names, means, columns, strict=True):
        values[name] = verdicts.interval(mean) | {"seeds": _keyed(column)}
    numbers = f"{names[0]} {points(means[0])}, {names[1]} {points(means[1])}, difference {points(difference, True)}"
    return _checked(Finding(rule(difference), difference.num, numbers, values), [first, second])


def _checked(finding: Finding, parts: Iterable[Selection]) -> Finding:
    """The finding, made `unclear` with the reason if cells are missing or seeds are too few."""
    parts = list(parts)
    done, planned = sum(len(part.by_seed) for part in parts), sum(part.num_planned for part in parts)
    if done < planned:
        return replace(finding, verdict="unclear", reason=f"{done} of {planned} cells")
    if finding.num_seeds < MIN_SEEDS:
        reason = finding.reason or f"{finding.num_seeds} seeds, fewer than {MIN_SEEDS}"
        return replace(finding, verdict="unclear", reason=reason)
    return finding


def _joined(findings: Sequence[Finding | None], names: Sequence[str]) -> Finding | None:
    """A claim of several parts; None if one of them is not planned."""
    parts = [finding for finding in findings if finding is not None]
    if not parts or len(parts) < len(findings):
        return None
    return Finding(
        verdicts.all_of([part.verdict for part in parts]),
        min(part.num_seeds for part in parts),
        "; ".join(part.numbers for part in parts),
        {name: part.values | {"verdict": part.verdict} for name, part in zip(names, parts, strict=True)},
        "; ".join(dict.fromkeys(part.reason for part in parts if part.reason)),
    )


def _runs(selection: Selection, hits: Callable[[Result], bool], rule: Callable[[Sequence[bool]], Verdict], word: str):
    """A run-by-run effect."""
    if not selection.num_planned:
        return None
    found = [hits(run) for run in selection.runs]
    kept = estimate([run.kept for run in selection.runs])
    values = {
        word: verdicts.share_of(found),
        "final_over_peak": verdicts.interval(kept) | {"seeds": _keyed({r.seed: r.kept for r in selection.runs})},
        "final": verdicts.interval(estimate(list(selection.finals.values()))) | {"seeds": _keyed(selection.finals)},
    }
    numbers = f"{sum(found)} of {len(found)} seeds {word}, final / peak {points(kept)}"
    return _checked(Finding(rule(found), len(found), numbers, values), [selection])


def _keyed(column: dict[int, float]) -> dict[str, float]:
    return {str(seed): column[seed] for seed in sorted(column)}


# The claims


def tight_clip_ends_below(lab: Lab, regime: Regime) -> Finding | None:
    return _compared(
        lab.select("mu_grpo", regime), lab.select("grpo_high", regime), ("μ-GRPO", "GRPO, same μ"), verdicts.above
    )


def tight_clip_clips_more(lab: Lab, regime: Regime) -> Finding | None:
    def clipped(result: Result) -> float | None:
        return result.mean_metric("clip/token_fraction")

    parts = lab.select("grpo_high", regime), lab.select("mu_grpo", regime)
    return _compared(*parts, ("GRPO, same μ", "μ-GRPO"), _strictly_above, clipped)


def _strictly_above(difference: Estimate) -> Verdict:
    if difference.num < MIN_SEEDS:
        return "unclear"
    return "seen" if difference.low > 0 else "not_seen" if difference.high < 0 else "unclear"


def collapses(method: str) -> Callable[[Lab, Regime], Finding | None]:
    def judge(lab: Lab, regime: Regime) -> Finding | None:
        return _runs(lab.select(method, regime), lambda run: run.collapsed, verdicts.in_most, "collapsed")

    return judge


def ratio_falls_first(lab: Lab, regime: Regime) -> Finding | None:
    parts = [lab.select("no_veto", regime), lab.select("trigger", regime)]
    if not any(part.num_planned for part in parts):
        return None
    collapsed = [run for part in parts for run in part.runs if run.collapsed]
    pairs = [(run.first_below("ratio/negative_mean", RATIO_DROP), run.collapse_update) for run in collapsed]
    hits = [fell is not None and broke is not None and fell < broke for fell, broke in pairs]
    values = {
        "fell_first": verdicts.share_of(hits),
        "runs": [
            {"method": run.method, "seed": run.seed, "ratio_fell_at": fell, "collapsed_at": broke}
            for run, (fell, broke) in zip(collapsed, pairs, strict=True)
        ],
    }
    numbers = f"{sum(hits)} of {len(hits)} collapsed runs"
    reason = f"{len(hits)} runs collapsed, fewer than {MIN_SEEDS}" if len(hits) < MIN_SEEDS else ""
    num_seeds = len({run.seed for run in collapsed})
    return _checked(Finding(verdicts.in_most(hits), num_seeds, numbers, values, reason), parts)


def stays_stable(method: str) -> Callable[[Lab, Regime], Finding | None]:
    def judge(lab: Lab, regime: Regime) -> Finding | None:
        return _runs(lab.select(method, regime), lambda run: run.kept >= KEPT_SHARE, verdicts.in_every, "stable")

    return judge


def shape_of_mu(lab: Lab, regime: Regime) -> Finding | None:
    total = lab.num_updates(regime.task)
    main = lab.main_mu(regime.task)
    by_mu = {mu: lab.select("mu_grpo", replace(regime, stage_updates=mu)) for mu in (main // 2, main, 2 * main, total)}
    near = [
        _compared(by_mu[mu], by_mu[main], (f"μ = {mu}", f"μ = {main}"), verdicts.close) for mu in (main // 2, 2 * main)
    ]
    single = _compared(by_mu[main], by_mu[total], (f"μ = {main}", f"one stage (μ = {total})"), verdicts.above)
    return _joined([*near, single], ["half_mu", "double_mu", "single_stage"])


def shape_of_threshold(lab: Lab, regime: Regime) -> Finding | None:
    by = {value: lab.select("mu_grpo", regime, veto_threshold=value) for value in (1e-1, 1e-4, 1e-6)}
    return _joined(
        [
            _compared(by[1e-6], by[1e-4], ("τ_c = 1e-6", "τ_c = 1e-4"), verdicts.close),
            _compared(by[1e-4], by[1e-1], ("τ_c = 1e-4", "τ_c = 1e-1"), verdicts.above),
        ],
        ["smaller", "largest"],
    )


def shape_of_upper_bound(lab: Lab, regime: Regime) -> Finding | None:
    by = {bound: lab.select("mu_grpo", regime, epsilon_high=bound - 1.0) for bound in (3.0, 5.0, 10.0, math.inf)}
    names = {3.0: "upper bound 3", 5.0: "5", 10.0: "10", math.inf: "∞"}
    return _joined(
        [
            _compared(by[3.0], by[5.0], (names[3.0], names[5.0]), verdicts.close),
            _compared(by[10.0], by[5.0], (names[10.0], names[5.0]), verdicts.close),
            _compared(by[5.0], by[math.inf], (names[5.0], names[math.inf]), verdicts.above),
        ],
        ["three", "ten", "none"],
    )


def low_staleness(lab: Lab, regime: Regime) -> Finding | None:
    if regime.stage_updates != lab.main_mu(regime.task):
        return None
    rate = regime.learning_rate or lab.tuned_lr(regime.task, "grpo_low")
    at = replace(regime, stage_updates=LOW_STALENESS, learning_rate=rate)
    names = (f"μ-GRPO, μ = {LOW_STALENESS}", f"GRPO, μ = {LOW_STALENESS}")
    return _compared(lab.select("mu_grpo", at), lab.select("grpo_low", at), names, verdicts.not_below)


def vetoed_share_falls(lab: Lab, regime: Regime) -> Finding | None:
    selection = lab.select("mu_grpo", regime)
    runs = [run for run in selection.runs if len(run.vetoed_shares) > 1]
    if not selection.num_planned or not runs:
        return None
    stages = [estimate(column) for column in zip(*(run.vetoed_shares for run in runs), strict=False)]
    drop = estimate([run.vetoed_shares[0] - run.vetoed_shares[-1] for run in runs])
    rises = any(after.mean > before.mean + SHARE_STEP for before, after in zip(stages, stages[1:], strict=False))
    verdict: Verdict = "seen" if drop.low > 0 and not rises else "not_seen" if drop.high < 0 or rises else "unclear"
    active = any(share > 0 for run in runs for share in run.vetoed_shares)
    values = {
        "by_stage": [verdicts.interval(stage) for stage in stages],
        "first_minus_last": verdicts.interval(drop),
        "seeds": {str(run.seed): list(run.vetoed_shares) for run in runs},
    }
    numbers = " → ".join(f"{100 * stage.mean:.2f}%" for stage in stages)
    numbers += f", first − last {100 * drop.mean:+.2f} ± {100 * drop.half_width:.2f}%" if drop.num > 1 else ""
    finding = Finding(verdict, len(runs), numbers, values)
    if not active:
        finding = replace(finding, verdict="unclear", reason="the veto never acted")
    return _checked(finding, [selection])


def scopes_order_vetoed_shares(lab: Lab, regime: Regime) -> Finding | None:
    def vetoed(result: Result) -> float | None:
        return result.mean_metric("veto/token_fraction")

    narrow, middle, wide = (lab.select(method, regime) for method in ("non_trigger_suffix", "suffix", "mu_grpo"))
    return _joined(
        [
            _compared(wide, middle, ("vetoed S_seq", "S_κ"), _strictly_above, vetoed),
            _compared(middle, narrow, ("vetoed S_κ", "H_κ"), _strictly_above, vetoed),
        ],
        ["sequence_over_suffix", "suffix_over_non_trigger_suffix"],
    )


def matches_at_equal_updates(lab: Lab, regime: Regime) -> Finding | None:
    names = ("μ-GRPO", f"GRPO, μ = {LOW_STALENESS}")
    return _compared(lab.select("mu_grpo", regime), lab.select("grpo_low", regime), names, verdicts.not_below)


def total_is_shorter(lab: Lab, regime: Regime) -> Finding | None:
    return _timed(lab.select("mu_grpo", regime), lab.select("grpo_low", regime), f"GRPO, μ = {LOW_STALENESS}")


def _timed(ours: Selection, baseline: Selection, name: str) -> Finding | None:
    if not ours.num_planned or not baseline.num_planned:
        return None
    seconds = [{seed: run.total_cpu_s for seed, run in part.by_seed.items()} for part in (baseline, ours)]
    ratio = paired_ratio(*seconds)
    rollout = paired_ratio(*({s: run.rollout_cpu_s for s, run in p.by_seed.items()} for p in (baseline, ours)))
    means = [estimate(list(column.values())) for column in seconds]
    values = {
        "speedup_total": verdicts.interval(ratio),
        "speedup_rollout": verdicts.interval(rollout),
        "total_cpu_s": {
            key: verdicts.interval(mean) | {"seeds": _keyed(column)}
            for key, mean, column in zip((name, "μ-GRPO"), means, seconds, strict=True)
        },
    }
    numbers = f"T_total {times(ratio)}, T_rollout {times(rollout)} ({name}: {means[0].mean:.0f} CPU s)"
    return _checked(Finding(verdicts.faster(ratio), ratio.num, numbers, values), [ours, baseline])


def ahead_at_equal_time(lab: Lab, regime: Regime) -> Finding | None:
    ours, baseline = lab.select("mu_grpo", regime), lab.select("grpo_low", regime)
    if not ours.num_planned or not baseline.num_planned:
        return None
    first, second = accuracies_at_equal_time(ours, baseline)
    difference = paired_difference(first, second)
    values = {
        "difference": verdicts.interval(difference),
        "μ-GRPO": verdicts.interval(estimate(list(first.values()))) | {"seeds": _keyed(first)},
        f"GRPO, μ = {LOW_STALENESS}": verdicts.interval(estimate(list(second.values()))) | {"seeds": _keyed(second)},
    }
    numbers = f"difference {points(difference, True)} when the faster of the two is done"
    return _checked(Finding(verdicts.above(difference), difference.num, numbers, values), [ours, baseline])


def accuracies_at_equal_time(ours: Selection, baseline: Selection) -> tuple[dict[int, float], dict[int, float]]:
    """Accuracies by seed after as many CPU seconds as the faster of the two runs of that seed takes in all."""
    first, second = {}, {}
    for seed in sorted(ours.by_seed.keys() & baseline.by_seed.keys()):
        a, b = ours.by_seed[seed], baseline.by_seed[seed]
        cpu_s = min(a.evaluations[-1].cpu_s, b.evaluations[-1].cpu_s)
        first[seed], second[seed] = a.accuracy_at(cpu_s), b.accuracy_at(cpu_s)
    return first, second


def reaches_sooner(lab: Lab, regime: Regime) -> Finding | None:
    ours, baseline = lab.select("mu_grpo", regime), lab.select("grpo_low", regime)
    if not ours.num_planned or not baseline.num_planned:
        return None
    ratio, reached, seeds = time_to_baseline(ours, baseline)
    values = {"speedup": verdicts.interval(ratio), "reached": reached, "num_seeds": seeds}
    numbers = f"{times(ratio)}, reached in {reached} of {seeds} seeds"
    finding = Finding(verdicts.faster(ratio), seeds, numbers, values)
    if reached < seeds:
        few = reached <= (1 - verdicts.MOST) * seeds + 1e-9
        finding = replace(
            finding, verdict="not_seen" if few else "unclear", reason=f"not reached in {seeds - reached} of them"
        )
    return _checked(finding, [ours, baseline])


def time_to_baseline(ours: Selection, baseline: Selection) -> tuple[Estimate, int, int]:
    """
    How much sooner each seed reaches the baseline's final accuracy than the baseline itself first does. Seeds whose
    baseline gained nothing over its start are left out.

    Returns:
        `tuple[Estimate, int, int]`: ratio of CPU seconds over the seeds that reach it, their number, and that of all.
    """
    seconds: tuple[dict[int, float], dict[int, float]] = ({}, {})
    num_seeds = 0
    for seed in sorted(ours.by_seed.keys() & baseline.by_seed.keys()):
        target = baseline.by_seed[seed].final
        theirs, own = baseline.by_seed[seed].time_to(target), ours.by_seed[seed].time_to(target)
        num_seeds += bool(theirs)
        if theirs and own:
            seconds[0][seed], seconds[1][seed] = theirs, own
    return paired_ratio(*seconds), len(seconds[0]), num_seeds


def retained_suffixes_are_off_support(lab: Lab, regime: Regime) -> Finding | None:
    selection = lab.select("no_veto", regime)
    if not selection.num_planned:
        return None
    ratios, bounds = {}, {}
    for run in selection.runs:
        mass = dict(run.metric("prefix/m_H"))
        prefix = dict(run.metric("prefix/q_H"))
        steps = [step for step, m in mass.items() if m > 0 and step in prefix]
        if steps:
            ratios[run.seed] = math.fsum(prefix[s] for s in steps) / math.fsum(mass[s] for s in steps)
            finite = [value for _, value in run.metric("prefix/chi2_lower_bound")]
            bounds[run.seed] = math.inf if any(prefix[s] == 0 for s in steps) else max(finite, default=0.0)
    hits = [ratio <= PREFIX_RATIO for ratio in ratios.values()]
    verdict: Verdict = "seen" if all(hits) else "unclear" if any(hits) else "not_seen"
    values = {
        "q_over_m": {"seeds": _keyed(ratios)},
        "largest_chi2_lower_bound": {"seeds": _keyed(bounds)},
        "off_support": verdicts.share_of(hits),
    }
    numbers = f"{sum(hits)} of {len(hits)} seeds with retained suffixes"
    if hits:
        numbers += f", median q_H / m_H {median(ratios.values()):.1e}, median of the largest χ² bounds "
        numbers += f"{median(bounds.values()):.1e}"
    reason = "" if len(hits) >= MIN_SEEDS else f"{len(hits)} seeds with retained suffixes, fewer than {MIN_SEEDS}"
    finding = Finding("unclear" if reason else verdict, len(hits), numbers, values, reason)
    return _checked(finding, [selection])


def more_updates_from_one_stage(lab: Lab, regime: Regime) -> Finding | None:
    rate = regime.learning_rate or lab.tuned_lr(regime.task, "mu_grpo")
    by_size = lab.budget(regime.task, rate) if rate else {}
    if len(by_size) < 2:
        return None
    small, large = min(by_size), max(by_size)
    finding = _compared(by_size[small], by_size[large], (f"{small:g} prompts", f"{large:g} prompts"), verdicts.above)
    if finding is not None:
        finals = {f"{size:g}": verdicts.interval(estimate(list(s.finals.values()))) for size, s in by_size.items()}
        finding.values["by_prompts_per_update"] = finals
    return finding


def holds_against_m2po(lab: Lab, regime: Regime) -> Finding | None:
    ours, m2po = lab.select("mu_grpo", regime), lab.select("m2po", regime)
    return _compared(ours, m2po, ("μ-GRPO", "M2PO, same μ"), verdicts.not_below)


def _stable_rule(scope: str) -> str:
    return f"Stable: final accuracy at least {KEPT_SHARE:g} × peak. {verdicts.IN_EVERY_RULE} Scope {scope}."


_COLLAPSED = f"Collapsed: final accuracy under half its peak. {verdicts.IN_MOST_RULE}"
_PARTS = "Not seen if one part is not seen, seen if all are, else unclear."

CLAIMS = (
    Claim(
        "a",
        "At high μ, GRPO's tight clip ends below relaxed clip + veto (μ-GRPO).",
        "§3.1, Fig. 2, Table 1",
        verdicts.ABOVE_RULE,
        tight_clip_ends_below,
        everywhere=True,
    ),
    Claim(
        "a-clip",
        "At high μ the tight clip clips a larger share of tokens.",
        "§3.1, Fig. 2",
        "Mean clipped share over the run. seen: the 95% interval of the paired difference lies above 0; "
        "not seen: it lies below 0; else unclear.",
        tight_clip_clips_more,
        shared_lr=True,
    ),
    Claim(
        "b-none",
        "Relaxed clip without veto collapses.",
        "§3.1–3.3, Fig. 2, 3",
        _COLLAPSED,
        collapses("no_veto"),
        everywhere=True,
        shared_lr=True,
    ),
    Claim(
        "b-trigger",
        "Masking the triggers alone collapses.",
        "§3.3, Fig. 3",
        _COLLAPSED,
        collapses("trigger"),
        everywhere=True,
        shared_lr=True,
    ),
    Claim(
        "b-ratio",
        "E[ρ | A<0] falls before accuracy does.",
        "§3.2, Fig. 3",
        f"Over all collapsed runs of the two above: E[ρ | A<0] is under {RATIO_DROP:g} at an update before the first "
        f"evaluation under half the best accuracy so far. {verdicts.IN_MOST_RULE}",
        ratio_falls_first,
        everywhere=True,
        shared_lr=True,
    ),
    Claim(
        "c-H",
        "Masking the non-trigger suffix H_κ keeps training stable.",
        "§3.3, Fig. 3, Table 6",
        _stable_rule("H_κ"),
        stays_stable("non_trigger_suffix"),
        everywhere=True,
        shared_lr=True,
    ),
    Claim(
        "c-S",
        "Masking the suffix S_κ keeps training stable.",
        "§3.3, Fig. 3, Table 6",
        _stable_rule("S_κ"),
        stays_stable("suffix"),
        everywhere=True,
        shared_lr=True,
    ),
    Claim(
        "c-seq",
        "Masking the sequence S_seq (μ-GRPO) keeps training stable.",
        "§3.3, Fig. 3, Table 6",
        _stable_rule("S_seq"),
        stays_stable("mu_grpo"),
        everywhere=True,
        shared_lr=True,
    ),
    Claim(
        "c-share",
        "The wider the scope, the more tokens it vetoes: H_κ < S_κ < S_seq.",
        "C.2, Table 6",
        "Mean vetoed share over the run. Each step seen: the 95% interval of the paired difference lies above 0; "
        f"not seen: it lies below 0; else unclear. {_PARTS}",
        scopes_order_vetoed_shares,
        shared_lr=True,
    ),
    Claim(
        "d-mu",
        "At fixed updates, accuracy is flat around four stages and drops with a single stage.",
        "§5.2, Table 4",
        f"Half and twice the μ of four stages against it: {verdicts.CLOSE_RULE} Four stages over one: "
        f"{verdicts.ABOVE_RULE} {_PARTS}",
        shape_of_mu,
        shared_lr=True,
        everywhere=True,
    ),
    Claim(
        "d-tau",
        "A small τ_c is enough (1e-6 like 1e-4), a large one costs accuracy (1e-1 below 1e-4).",
        "C.3, Table 7",
        f"1e-6 against 1e-4: {verdicts.CLOSE_RULE} 1e-4 over 1e-1: {verdicts.ABOVE_RULE} {_PARTS}",
        shape_of_threshold,
        shared_lr=True,
    ),
    Claim(
        "d-bound",
        "An upper bound of 3, 5 or 10 does alike, none at all costs accuracy.",
        "C.3, Table 8",
        f"3 and 10 against 5: {verdicts.CLOSE_RULE} 5 over ∞: {verdicts.ABOVE_RULE} {_PARTS}",
        shape_of_upper_bound,
        shared_lr=True,
    ),
    Claim(
        "e",
        "At low staleness (μ = 4), μ-GRPO is at least as good as GRPO.",
        "C.4, Table 9",
        f"Both at GRPO's tuned lr. {verdicts.NOT_BELOW_RULE}",
        low_staleness,
        everywhere=True,
    ),
    Claim(
        "f",
        "The vetoed share of tokens falls from stage to stage.",
        "C.1, Table 5",
        "seen: the 95% interval of (first − last stage) lies above 0 and no stage's mean is more than "
        f"{100 * SHARE_STEP:g} points above that of the stage before; not seen: the interval lies below 0, or one is; "
        "else unclear.",
        vetoed_share_falls,
        shared_lr=True,
        everywhere=True,
    ),
    Claim(
        "g",
        "At equal updates, μ-GRPO matches or exceeds GRPO at μ = 4.",
        "§5.1, Table 1",
        verdicts.NOT_BELOW_RULE,
        matches_at_equal_updates,
        everywhere=True,
    ),
    Claim(
        "h-total",
        "At equal updates, T_total of μ-GRPO is shorter.",
        "§5.1, Table 1",
        f"T_total of GRPO at μ = 4 over that of μ-GRPO, CPU seconds, geometric mean. {verdicts.FASTER_RULE}",
        total_is_shorter,
        everywhere=True,
    ),
    Claim(
        "h-equal-time",
        "At equal time, μ-GRPO is ahead of GRPO at μ = 4.",
        "Fig. 1",
        "Accuracy after the CPU seconds the faster of the two runs takes, linear between evaluations. "
        f"{verdicts.ABOVE_RULE}",
        ahead_at_equal_time,
        everywhere=True,
    ),
    Claim(
        "h-reach",
        "μ-GRPO reaches GRPO's final accuracy sooner.",
        "Fig. 1",
        "CPU seconds until GRPO (μ = 4) first has its own final accuracy over those until μ-GRPO has it, "
        f"paired by seed, geometric mean. {verdicts.FASTER_RULE} Not reached in at least {verdicts.MOST:.0%} of the "
        "seeds: not seen; not reached in fewer: unclear.",
        reaches_sooner,
    ),
    Claim(
        "i",
        "Without a veto, retained suffixes lie behind prefixes the policy has left: the bound of Theorem 1 is large.",
        "§3.3, Theorem 1",
        f"q_H / m_H, each summed over the updates of a run with retained suffixes. seen: at most {PREFIX_RATIO:g} in "
        "every seed; not seen: in none; else unclear.",
        retained_suffixes_are_off_support,
        shared_lr=True,
        everywhere=True,
    ),
    Claim(
        "j",
        "From one fixed stage, more and smaller updates do better than fewer and larger ones.",
        "§5.2, Table 3",
        f"Smallest over largest number of prompts per update. {verdicts.ABOVE_RULE}",
        more_updates_from_one_stage,
        shared_lr=True,
    ),
    Claim(
        "k",
        "At the same μ, μ-GRPO is competitive with M2PO.",
        "§5.1, Table 1",
        verdicts.NOT_BELOW_RULE,
        holds_against_m2po,
        everywhere=True,
    ),
)
"""All claims, in the order of the page."""


@dataclass(frozen=True)
class Judged:
    """A claim with what one regime says of it; `main` at the tuned learning rates and four stages."""

    claim: Claim
    regime: Regime
    finding: Finding
    main: bool

    def entry(self) -> dict[str, Any]:
        """As in `claims.json`."""
        return {
            "claim": self.claim.key,
            "text": self.claim.text,
            "source": self.claim.source,
            "rule": self.claim.rule,
            "regime": {
                "task": self.regime.task,
                "stage_updates": self.regime.stage_updates,
                "learning_rate": self.regime.learning_rate or "tuned",
                "main": self.main,
            },
            "verdict": self.finding.verdict,
            "reason": self.finding.reason,
            "num_seeds": self.finding.num_seeds,
            "numbers": self.finding.numbers,
            "values": self.finding.values,
        }


def judge_all(lab: Lab) -> list[Judged]:
    """
    Every claim in every regime it has cells for, the main one of each task first: four stages, and the tuned learning
    rates. A sweep that was not run at the tuned one is judged at the nearest it was run at.
    """
    judged = []
    for claim in CLAIMS:
        for task in lab.tasks:
            found = [(regime, claim.judge(lab, regime)) for regime in _regimes(lab, task, claim)]
            present = [(regime, finding) for regime, finding in found if finding is not None]
            judged += [
                Judged(claim, regime, finding, main=number == 0)
                for number, (regime, finding) in enumerate(present)
                if number == 0 or claim.everywhere
            ]
    return judged


def _regimes(lab: Lab, task: str, claim: Claim) -> list[Regime]:
    """The main regime, then the other learning rates by their distance from it, then the other μ."""
    mu = lab.main_mu(task)
    tuned = lab.tuned_lr(task, "mu_grpo")
    rates = sorted(lab.learning_rates(task), key=lambda rate: (abs(math.log(rate / tuned)) if tuned else 0.0, rate))
    different = {lab.tuned_lr(task, method) for method in lab.methods(task)} != {tuned}
    main = Regime(task, mu, None if different and not claim.shared_lr else tuned)
    others = [Regime(task, mu, rate) for rate in rates]
    others += [replace(main, stage_updates=other) for other in lab.staleness(task)]
    return list(dict.fromkeys([main, *others]))
