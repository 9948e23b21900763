"""The laboratory's report: verdicts, intervals and files, from cells whose truth is known."""

from __future__ import annotations

import gzip
import html.parser
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from mu_grpo_trl.lab.grid import Cell, load_grid
from mu_grpo_trl.lab.report import claims, comparison, main, verdicts
from mu_grpo_trl.lab.report.claims import CLAIMS, Judged, judge_all
from mu_grpo_trl.lab.report.results import parse_result
from mu_grpo_trl.lab.report.selection import Lab, Regime, number
from mu_grpo_trl.lab.report.statistics import Estimate, estimate, paired_difference, paired_ratio, share
from mu_grpo_trl.lab.report.write import rounded, write_report

SEEDS = range(5)
TUNING_SEEDS = frozenset({100, 101})
UPDATES, MU, LR = 128, 32, 2e-4
RELAXED = {"objective": "mu_grpo", "epsilon_high": 4.0, "veto_threshold": 1e-4}
NOISE = {0: 0.0, 1: 0.01, 2: -0.01, 3: 0.02, 4: -0.02, 100: 0.0, 101: 0.005}
"""Offsets of accuracy by seed; they cancel in paired differences."""
T_4 = 2.7764451051977987
"""0.975 quantile of Student's t with 4 degrees of freedom (any table: 2.776)."""


def planned(method: str = "mu_grpo", seed: int = 0, lr: float = LR, experiments=("main",), **settings: Any) -> Cell:
    """A cell of a small grid; μ is 4 for the methods of low staleness."""
    own = (
        {"objective": "grpo"} if method.startswith("grpo") else {"objective": "m2po"} if method == "m2po" else RELAXED
    )
    mu = 4 if method.endswith("_low") else MU
    base = {
        "prompts_per_update": 8,
        "num_generations": 8,
        "max_steps": UPDATES,
        "stage_updates": mu,
        "veto_scope": method,
    }
    return Cell("sums", method, seed, base | own | {"learning_rate": lr} | settings, {"every": 16}, tuple(experiments))


def result(
    cell: Cell,
    final: float = 0.8,
    collapse_at: int | None = None,
    ratio_falls_at: int | None = None,
    shares: tuple[float, ...] = (0.10, 0.04, 0.02, 0.01),
    clipped: float = 0.01,
    vetoed: float = 0.03,
    prefix_ratio: float = 1e-4,
    cpu_s_per_update: float = 1.0,
    noise: bool = True,
) -> dict[str, Any]:
    """
    The `result.json` of a cell: accuracy rises linearly from 0.3 to `final` (and its seed's noise) over the first half
    of the updates and stays there, or is 0.1 from `collapse_at` on. E[ρ | A<0] falls within each stage from 1 to 0.8,
    or is 0.1 from `ratio_falls_at` on. Retained suffixes appear in the second half, with q_H = `prefix_ratio` · m_H.
    """
    final += NOISE.get(cell.seed, 0.0) if noise else 0.0
    updates, every = cell.num_updates, max(1, cell.num_updates // 8)
    evaluations = []
    for update in range(0, updates + 1, every):
        accuracy = 0.3 + (final - 0.3) * min(1.0, 2 * update / updates)
        accuracy = 0.1 if collapse_at is not None and update >= collapse_at else accuracy
        seconds = cpu_s_per_update * update
        evaluations.append({"update": update, "train_cpu_s": seconds, "train_wall_s": seconds, "accuracy": accuracy})
    steps = list(range(1, updates + 1))
    fallen = math.inf if ratio_falls_at is None else ratio_falls_at
    ratios = [0.1 if s >= fallen else 1 - 0.2 * ((s - 1) % cell.stage_updates) / cell.stage_updates for s in steps]
    masses = [0.02 if step > updates // 2 else 0.0 for step in steps]
    total_s = cpu_s_per_update * updates
    return {
        "schema": 1,
        "cell": cell.to_dict(),
        "evaluations": evaluations,
        "metrics": {
            "step": steps,
            "ratio/negative_mean": ratios,
            "clip/token_fraction": [clipped] * updates,
            "veto/token_fraction": [vetoed] * updates,
            "prefix/m_H": masses,
            "prefix/q_H": [prefix_ratio * mass for mass in masses],
            "prefix/chi2_lower_bound": [mass and mass / prefix_ratio for mass in masses],
        },
        "stages": [{"stage": k, "mean_reward": 0.5, "vetoed_token_share": value} for k, value in enumerate(shares)],
        "times": {"total_cpu_s": total_s, "rollout_cpu_s": total_s / 2},
        "num_responses": 64 * updates,
        "versions": {},
    }


def cells(method: str = "mu_grpo", seeds: Iterable[int] = SEEDS, truth: dict[str, Any] | None = None, **options: Any):
    """One cell a seed, with its result."""
    return [(cell, result(cell, **truth or {})) for cell in (planned(method, seed, **options) for seed in seeds)]


def lab_of(*groups, missing: int = 0) -> Lab:
    """The laboratory of these cells; the last `missing` of them have not finished."""
    pairs = [pair for group in groups for pair in group]
    finished = pairs[: len(pairs) - missing]
    return Lab([parse_result(raw) for _, raw in finished], [cell for cell, _ in pairs], TUNING_SEEDS)


def judged(lab: Lab, key: str) -> Judged:
    """What the main regime says of a claim."""
    (found,) = [entry for entry in judge_all(lab) if entry.claim.key == key and entry.main]
    return found


def verdict(lab: Lab, key: str) -> str:
    return judged(lab, key).finding.verdict


# Intervals


def test_t_interval_equals_hand_computed_numbers() -> None:
    # 1 … 5: mean 3, s² = 2.5, s/√n = √0.5.
    half = T_4 * math.sqrt(0.5)
    found = estimate([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.mean, found.num) == (3.0, 5)
    assert (found.low, found.high) == pytest.approx((3 - half, 3 + half), rel=1e-9)
    assert found.half_width == pytest.approx(half, rel=1e-9)
    assert estimate([0.25]) == Estimate(0.25, -math.inf, math.inf, 1)
    assert estimate([]).num == 0 and math.isnan(estimate([]).mean)


def test_differences_are_paired_by_seed_and_skip_seeds_that_one_lacks() -> None:
    first, second = {0: 0.9, 1: 0.5, 2: 0.7, 9: 0.0}, {2: 0.6, 1: 0.3, 0: 0.6}
    # 0.3, 0.2, 0.1: mean 0.2, s = 0.1, t(0.975, 2) = 4.302653.
    half = 4.302652729911275 * 0.1 / math.sqrt(3)
    found = paired_difference(first, second)
    assert (found.mean, found.low, found.high) == pytest.approx((0.2, 0.2 - half, 0.2 + half), rel=1e-9)
    assert found.num == 3


def test_ratios_are_geometric() -> None:
    found = paired_ratio({0: 2.0, 1: 8.0}, {0: 1.0, 1: 1.0})
    half = 12.706204736432095 * math.log(2)  # logs ln 2 and 3 ln 2: s = √2 ln 2, s/√2 = ln 2; t with 1 degree
    assert found.mean == pytest.approx(4.0)
    assert (found.low, found.high) == pytest.approx((4 / math.exp(half), 4 * math.exp(half)), rel=1e-9)


def test_share_of_runs_has_the_exact_interval() -> None:
    all_of_five = share(5, 5)
    assert (all_of_five.mean, all_of_five.high) == (1.0, 1.0)
    assert all_of_five.low == pytest.approx(0.025 ** (1 / 5), rel=1e-9)
    assert (share(0, 0).low, share(0, 0).high) == (0.0, 1.0)


# Rules


def interval(low: float, high: float, num: int = 5) -> Estimate:
    return Estimate((low + high) / 2, low, high, num)


@pytest.mark.parametrize(
    ("rule", "low", "high", "expected"),
    [
        (verdicts.above, 0.001, 0.5, "seen"),
        (verdicts.above, -0.01, 0.019, "not_seen"),
        (verdicts.above, -0.01, 0.021, "unclear"),
        (verdicts.close, -0.019, 0.019, "seen"),
        (verdicts.close, 0.021, 0.1, "not_seen"),
        (verdicts.close, -0.1, -0.021, "not_seen"),
        (verdicts.close, 0.0, 0.021, "unclear"),
        (verdicts.not_below, -0.019, 0.3, "seen"),
        (verdicts.not_below, -0.01, -0.001, "not_seen"),
        (verdicts.not_below, -0.021, 0.3, "unclear"),
        (verdicts.faster, 1.01, 2.0, "seen"),
        (verdicts.faster, 0.5, 0.99, "not_seen"),
        (verdicts.faster, 0.9, 1.1, "unclear"),
    ],
)
def test_rules_at_their_edges(rule, low: float, high: float, expected: str) -> None:
    assert rule(interval(low, high)) == expected
    assert rule(interval(low, high, num=4)) == "unclear"


def test_rules_over_runs() -> None:
    assert verdicts.in_most([True] * 4 + [False]) == "seen"
    assert verdicts.in_most([True] * 3 + [False] * 2) == "unclear"
    assert verdicts.in_most([True] + [False] * 4) == "not_seen"
    assert verdicts.in_every([True] * 5) == "seen"
    assert verdicts.in_every([True] * 5 + [False]) == "not_seen"
    assert verdicts.in_most([True] * 4) == verdicts.in_every([True] * 4) == "unclear"
    assert verdicts.all_of(["seen", "unclear", "not_seen"]) == "not_seen"
    assert verdicts.all_of(["seen", "unclear"]) == "unclear"
    assert verdicts.all_of(["seen", "seen"]) == "seen"
    assert verdicts.all_of([]) == "unclear"


# Claims


def compared(key: str, better: dict[str, Any], worse: dict[str, Any], methods: tuple[str, str]) -> list[str]:
    """Verdicts of a claim as stated, with the two methods' truths exchanged, and with a difference between seeds."""
    tuning = [cells(method, TUNING_SEEDS) for method in methods]
    stated = lab_of(cells(methods[0], truth=better), cells(methods[1], truth=worse), *tuning)
    exchanged = lab_of(cells(methods[0], truth=worse), cells(methods[1], truth=better), *tuning)
    mixed = lab_of(
        cells(methods[0], [0, 1], better), cells(methods[0], [2, 3, 4], worse), cells(methods[1], truth=worse), *tuning
    )
    return [verdict(lab, key) for lab in (stated, exchanged, mixed)]


@pytest.mark.parametrize(
    ("key", "methods", "better", "worse"),
    [
        ("a", ("mu_grpo", "grpo_high"), {"final": 0.8}, {"final": 0.6}),
        ("a-clip", ("grpo_high", "mu_grpo"), {"clipped": 0.3}, {"clipped": 0.01}),
        ("h-total", ("grpo_low", "mu_grpo"), {"cpu_s_per_update": 1.5}, {"cpu_s_per_update": 1.0}),
    ],
)
def test_a_difference_is_seen_its_opposite_is_not_and_seeds_that_disagree_are_unclear(
    key: str, methods: tuple[str, str], better: dict[str, Any], worse: dict[str, Any]
) -> None:
    assert compared(key, better, worse, methods) == ["seen", "not_seen", "unclear"]


@pytest.mark.parametrize(
    ("key", "methods"),
    [
        ("e", ("mu_grpo_low", "grpo_low")),
        ("g", ("mu_grpo", "grpo_low")),
        ("k", ("mu_grpo", "m2po")),
    ],
)
def test_at_least_as_good_is_seen_of_equals_and_not_of_the_worse(key: str, methods: tuple[str, str]) -> None:
    reference = [cells("mu_grpo", TUNING_SEEDS)]
    if key == "e":
        reference.append(cells("mu_grpo"))
    equal = lab_of(cells(methods[0]), cells(methods[1]), *reference)
    worse = lab_of(cells(methods[0], truth={"final": 0.7}), cells(methods[1]), *reference)
    assert (verdict(equal, key), verdict(worse, key)) == ("seen", "not_seen")


def test_the_difference_of_a_claim_equals_hand_computed_numbers() -> None:
    ours = [(c, result(c, 0.80 + 0.01 * c.seed, noise=False)) for c in (planned("mu_grpo", seed) for seed in SEEDS)]
    tight = [(c, result(c, 0.60, noise=False)) for c in (planned("grpo_high", seed) for seed in SEEDS)]
    finding = judged(lab_of(ours, tight), "a").finding
    # Differences 0.20 … 0.24: mean 0.22, s² = 0.00025.
    half = T_4 * math.sqrt(0.00025 / 5)
    expected = {"mean": 0.22, "low": 0.22 - half, "high": 0.22 + half, "num_seeds": 5}
    assert finding.values["difference"] == pytest.approx(expected)
    assert finding.values["μ-GRPO"]["seeds"] == pytest.approx({str(seed): 0.80 + 0.01 * seed for seed in SEEDS})
    assert finding.numbers == "μ-GRPO 82.0 ± 2.0%, GRPO, same μ 60.0 ± 0.0%, difference +22.0 ± 2.0%"


def test_collapse_is_counted_run_by_run() -> None:
    collapsing = {"collapse_at": 80, "ratio_falls_at": 70}
    for number_collapsed, expected in ((5, "seen"), (4, "seen"), (3, "unclear"), (1, "not_seen"), (0, "not_seen")):
        lab = lab_of(
            cells("no_veto", range(number_collapsed), collapsing), cells("no_veto", range(number_collapsed, 5))
        )
        found = judged(lab, "b-none").finding
        assert found.verdict == expected
        assert found.values["collapsed"]["hits"] == number_collapsed
    lab = lab_of(cells("trigger", truth=collapsing))
    assert verdict(lab, "b-trigger") == "seen"


def test_ratio_falls_first_needs_the_ratio_to_fall_before_the_evaluation_that_shows_the_collapse() -> None:
    def found(falls_at: int | None, seeds: Iterable[int] = SEEDS):
        return judged(lab_of(cells("no_veto", seeds, {"collapse_at": 80, "ratio_falls_at": falls_at})), "b-ratio")

    entry = found(79)
    assert entry.finding.verdict == "seen"
    assert entry.finding.values["runs"][0] == {"method": "no_veto", "seed": 0, "ratio_fell_at": 79, "collapsed_at": 80}
    assert found(80).finding.verdict == "not_seen"
    assert found(None).finding.verdict == "not_seen"
    # Two methods collapse in the same three seeds: six runs, but three seeds.
    falling = {"collapse_at": 80, "ratio_falls_at": 70}
    few = judged(lab_of(cells("no_veto", range(3), falling), cells("trigger", range(3), falling)), "b-ratio").finding
    assert (few.verdict, few.num_seeds) == ("unclear", 3)


@pytest.mark.parametrize(("key", "method"), [("c-H", "non_trigger_suffix"), ("c-S", "suffix"), ("c-seq", "mu_grpo")])
def test_stability_is_lost_by_a_single_seed(key: str, method: str) -> None:
    assert verdict(lab_of(cells(method)), key) == "seen"
    lab = lab_of(cells(method, range(4)), cells(method, [4], {"collapse_at": 128}))
    assert verdict(lab, key) == "not_seen"


def test_wider_scopes_veto_more() -> None:
    groups = [
        cells(method, truth={"vetoed": vetoed})
        for method, vetoed in (("mu_grpo", 0.03), ("suffix", 0.02), ("non_trigger_suffix", 0.01))
    ]
    assert verdict(lab_of(*groups), "c-share") == "seen"
    same = lab_of(*groups[:2], cells("non_trigger_suffix", truth={"vetoed": 0.025}))
    assert verdict(same, "c-share") == "not_seen"


def test_shape_of_the_staleness_sweep() -> None:
    def found(single: float, double: float = 0.8) -> str:
        finals = {16: 0.8, 32: 0.8, 64: double, 128: single}
        return verdict(lab_of(*(cells(stage_updates=mu, truth={"final": f}) for mu, f in finals.items())), "d-mu")

    assert found(single=0.7) == "seen"
    assert found(single=0.8) == "not_seen"
    assert found(single=0.7, double=0.75) == "not_seen"


@pytest.mark.parametrize(
    ("key", "name", "values", "harmful", "harmless"),
    [
        ("d-tau", "veto_threshold", (1e-6, 1e-4, 1e-2, 1e-1), 1e-1, 1e-6),
        ("d-bound", "epsilon_high", (2.0, 4.0, 9.0, math.inf), math.inf, 9.0),
    ],
)
def test_shapes_of_the_sweeps(key: str, name: str, values: tuple[float, ...], harmful: float, harmless: float) -> None:
    def found(low: float | None) -> str:
        groups = [cells(truth={"final": 0.7 if value == low else 0.8}, **{name: value}) for value in values]
        base = cells("no_veto")  # so that the base value is the most common one
        return verdict(lab_of(*groups, base, cells(seeds=range(5, 9), experiments=("other",))), key)

    assert found(harmful) == "seen"
    assert found(None) == "not_seen"
    assert found(harmless) == "not_seen"


def test_vetoed_share_falls_from_stage_to_stage() -> None:
    def found(*shares: float) -> claims.Finding:
        return judged(lab_of(cells(truth={"shares": shares})), "f").finding

    assert found(0.1, 0.04, 0.041, 0.01).verdict == "seen"  # 0.1 points up is within the margin
    assert found(0.1, 0.04, 0.05, 0.01).verdict == "not_seen"
    assert found(0.01, 0.02, 0.03, 0.04).verdict == "not_seen"
    silent = found(0.0, 0.0, 0.0, 0.0)
    assert (silent.verdict, silent.reason) == ("unclear", "the veto never acted")


def test_equal_time_compares_when_the_faster_run_is_done() -> None:
    slow = {"cpu_s_per_update": 2.0}
    lab = lab_of(cells("mu_grpo"), cells("grpo_low", truth=slow))
    entry = judged(lab, "h-equal-time")
    # μ-GRPO is done after 128 s; GRPO has then made 64 updates and is at its end level as well.
    assert entry.finding.values["difference"]["mean"] == pytest.approx(0.0)
    ours = lab.select("mu_grpo", Regime("sums", MU, LR)).by_seed[0]
    theirs = lab.select("grpo_low", Regime("sums", MU, LR)).by_seed[0]
    assert ours.accuracy_at(24) == pytest.approx(0.3 + 0.5 * 24 / 64)
    assert theirs.accuracy_at(24) == pytest.approx(0.3 + 0.5 * 12 / 64)
    assert theirs.accuracy_at(1e9) == pytest.approx(0.8)
    assert (ours.time_to(0.55), theirs.time_to(0.55)) == pytest.approx((32.0, 64.0))
    assert ours.time_to(0.81) is None
    assert judged(lab, "h-reach").finding.values["speedup"]["mean"] == pytest.approx(2.0)
    assert verdict(lab, "h-reach") == "seen"


def test_a_baseline_that_is_never_reached_is_not_reached_sooner() -> None:
    lab = lab_of(cells("mu_grpo", truth={"final": 0.6}), cells("grpo_low", truth={"cpu_s_per_update": 3.0}))
    entry = judged(lab, "h-reach").finding
    assert (entry.verdict, entry.values["reached"], entry.reason) == ("not_seen", 0, "not reached in 5 of them")


def test_retained_suffixes_are_judged_by_their_prefix_mass() -> None:
    assert verdict(lab_of(cells("no_veto", truth={"prefix_ratio": 1e-4})), "i") == "seen"
    assert verdict(lab_of(cells("no_veto", truth={"prefix_ratio": 0.5})), "i") == "not_seen"
    finding = judged(lab_of(cells("no_veto", truth={"prefix_ratio": 1e-4})), "i").finding
    assert finding.values["q_over_m"]["seeds"]["0"] == pytest.approx(1e-4)
    assert finding.values["largest_chi2_lower_bound"]["seeds"]["0"] == pytest.approx(200.0)
    impossible = [(cell, result(cell)) for cell in (planned("no_veto", seed) for seed in SEEDS)]
    for _, raw in impossible:
        raw["metrics"]["prefix/q_H"] = [0.0] * UPDATES
        raw["metrics"]["prefix/chi2_lower_bound"] = [None] * UPDATES  # infinite
    bounds = judged(lab_of(impossible), "i").finding.values["largest_chi2_lower_bound"]["seeds"]
    assert set(bounds.values()) == {math.inf}


def test_fixed_generation_budget_compares_the_smallest_update_with_the_largest() -> None:
    def found(finals: dict[int, float]) -> str:
        groups = [
            cells(
                truth={"final": final}, experiments=("fixed_generation_budget",), prompts_per_update=size,
                max_steps=1024 // size, stage_updates=1024 // size,
            )
            for size, final in finals.items()
        ]  # fmt: skip
        return verdict(lab_of(cells(), *groups), "j")

    assert found({8: 0.8, 16: 0.7, 32: 0.6}) == "seen"
    assert found({8: 0.6, 16: 0.7, 32: 0.8}) == "not_seen"


def test_every_claim_is_tested_by_name() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert [claim.key for claim in CLAIMS if f'"{claim.key}"' not in source] == []


# Cells, seeds, regimes


def test_missing_cells_and_too_few_seeds_are_unclear_with_the_reason() -> None:
    missing = judged(lab_of(cells("mu_grpo"), cells("grpo_high", truth={"final": 0.5}), missing=1), "a").finding
    assert (missing.verdict, missing.reason, missing.num_seeds) == ("unclear", "9 of 10 cells", 4)
    few = judged(lab_of(cells("mu_grpo", range(4)), cells("grpo_high", range(4), {"final": 0.5})), "a").finding
    assert (few.verdict, few.reason) == ("unclear", "4 seeds, fewer than 5")


def test_learning_rates_are_tuned_on_their_own_seeds_and_verdicts_use_the_others() -> None:
    # On the tuning seeds 4e-4 wins for μ-GRPO, although it is worse on the reporting seeds.
    groups = []
    for lr, tuning, reporting in ((1e-4, 0.5, 0.5), (2e-4, 0.7, 0.9), (4e-4, 0.8, 0.6)):
        groups.append(cells(seeds=TUNING_SEEDS, lr=lr, truth={"final": tuning}))
        groups.append(cells(lr=lr, truth={"final": reporting}))
        groups.append(cells("grpo_high", TUNING_SEEDS, {"final": 1 - tuning}, lr=lr))
        groups.append(cells("grpo_high", lr=lr, truth={"final": 0.4}))
    lab = lab_of(*groups)
    assert (lab.tuned_lr("sums", "mu_grpo"), lab.tuned_lr("sums", "grpo_high")) == (4e-4, 1e-4)
    assert lab.tuned_lr("sums", "suffix") == 4e-4  # never tuned: μ-GRPO's
    entries = [entry for entry in judge_all(lab) if entry.claim.key == "a"]
    assert [(str(entry.regime), entry.main) for entry in entries] == [
        ("sums, μ = 32, each its tuned lr", True),
        ("sums, μ = 32, lr 4e-4", False),
        ("sums, μ = 32, lr 2e-4", False),
        ("sums, μ = 32, lr 1e-4", False),
    ]
    assert entries[0].finding.values["difference"]["mean"] == pytest.approx(0.2)
    assert entries[2].finding.values["difference"]["mean"] == pytest.approx(0.5)
    assert set(entries[0].finding.values["μ-GRPO"]["seeds"]) == {str(seed) for seed in SEEDS}
    # An ablation is judged at μ-GRPO's learning rate for both.
    (clip,) = [entry for entry in judge_all(lab) if entry.claim.key == "a-clip"]
    assert clip.regime == Regime("sums", MU, 4e-4)


def test_a_sweep_is_judged_at_the_learning_rate_it_was_run_at() -> None:
    groups = [cells(seeds=TUNING_SEEDS, lr=4e-4), cells(seeds=TUNING_SEEDS, lr=2e-4, truth={"final": 0.5})]
    groups += [cells(lr=lr) for lr in (2e-4, 4e-4)]
    groups += [cells(lr=2e-4, veto_threshold=value) for value in (1e-1, 1e-6)]
    assert judged(lab_of(*groups), "d-tau").regime == Regime("sums", MU, 2e-4)


def test_the_grid_marks_where_accuracies_match_and_states_the_speedup_there() -> None:
    groups = [cells(seeds=TUNING_SEEDS), cells("grpo_low", TUNING_SEEDS)]
    groups += [cells("grpo_low", lr=lr, truth={"cpu_s_per_update": 3.0}) for lr in (1e-4, 2e-4)]
    groups += [cells(lr=1e-4, truth={"final": 0.5})]
    groups += [cells(truth={"cpu_s_per_update": 2.0}), cells(stage_updates=64, truth={"cpu_s_per_update": 1.5})]
    lab = lab_of(*groups)
    points = {
        (point.regime.learning_rate, point.regime.stage_updates): point
        for point in comparison.compare_grid(lab, "sums", same_lr=True)
    }
    assert {key: comparison.mark(point.equal_updates) for key, point in points.items()} == {
        (1e-4, 32): "behind",
        (2e-4, 32): "match",
        (2e-4, 64): "match",
    }
    assert points[2e-4, 64].speedup.mean == pytest.approx(2.0)
    number_of_points, speedup = comparison.speedup_in_region(list(points.values()))
    assert number_of_points == 2
    assert (speedup.mean, speedup.low, speedup.high) == pytest.approx((math.sqrt(3.0),) * 3)
    tuned = comparison.compare_grid(lab, "sums", same_lr=False)
    assert {point.baseline_lr for point in tuned} == {2e-4}
    settings = comparison.all_settings(lab)
    assert sum(len(setting.runs) for setting in settings) == 25  # every reporting cell is in the table


def test_results_are_checked() -> None:
    raw = result(planned())
    with pytest.raises(ValueError, match="schema 2"):
        parse_result(raw | {"schema": 2})
    with pytest.raises(ValueError, match="'times'"):
        parse_result({key: value for key, value in raw.items() if key != "times"})
    with pytest.raises(ValueError, match="no evaluation"):
        parse_result(raw | {"evaluations": []})
    twice = [cells("mu_grpo", [0])[0], (planned("mu_grpo", 0, seed_of_data=1), result(planned("mu_grpo", 0)))]
    with pytest.raises(ValueError, match="both have seed 0"):
        judge_all(lab_of(twice))


def test_numbers_are_short_and_stay_json() -> None:
    assert rounded({"a": [1 / 3, 7, math.inf, math.nan, 123456.7, "text", None]}) == {
        "a": [0.33333, 7, "inf", "nan", 123460.0, "text", None]
    }
    assert [number(value) for value in (3e-4, 1.5e-6, 0.1)] == ["3e-4", "1.5e-6", "1e-1"]


# Files


def write_cells(folder: Path, *groups) -> list[Cell]:
    pairs = [pair for group in groups for pair in group]
    for cell, raw in pairs:
        (folder / cell.id).mkdir(parents=True, exist_ok=True)
        (folder / cell.id / "result.json").write_text(json.dumps(raw), encoding="utf-8")
    return [cell for cell, _ in pairs]


class Tags(html.parser.HTMLParser):
    """Collects what a page would load, and its texts."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "data")]
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_report_writes_the_page_the_figures_and_all_cells_and_is_the_same_the_second_time(tmp_path: Path) -> None:
    folder = tmp_path / "cells"
    grid = write_cells(
        folder,
        cells(seeds=TUNING_SEEDS),
        cells(),
        cells(stage_updates=64),
        cells("grpo_low", truth={"cpu_s_per_update": 2.0}),
        cells("grpo_high", truth={"final": 0.6}),
        cells("no_veto", truth={"collapse_at": 80, "ratio_falls_at": 70}),
    )
    failed = planned("m2po")
    (folder / failed.id).mkdir()
    (folder / failed.id / "error.txt").write_text("Traceback …\nRuntimeError: a | b\n", encoding="utf-8")
    running = planned("m2po", 1)
    (folder / running.id).mkdir()
    write_cells(folder, cells("trigger", [0]))  # of no experiment any more
    grid += [failed, running]

    output = tmp_path / "docs"
    (output / "figures").mkdir(parents=True)
    (output / "figures" / "old.png").write_bytes(b"")
    line = write_report(folder, output, grid, TUNING_SEEDS)
    assert line.startswith("27 cells, 1 failed; main verdicts: ")
    files = {path.name for path in (output / "figures").iterdir()}
    figures = {Path(name).stem for name in files}
    assert files == {f"{figure}.{kind}" for figure in figures for kind in ("png", "svg")}
    assert figures >= {"sums-grid", "sums-main", "sums-sweeps"}
    assert {re.sub("-lr.*", "", figure) for figure in figures} == {
        f"sums-{name}" for name in ("dilemma", "grid", "main", "scopes", "sweeps", "vetoed-shares")
    }

    with gzip.open(output / "cells.jsonl.gz", "rt", encoding="utf-8") as file:
        published = [json.loads(line) for line in file]
    assert {raw["cell"]["id"] for raw in published} == {cell.id for cell in grid} - {running.id}
    entries = json.loads((output / "claims.json").read_text(encoding="utf-8"))
    assert all({"claim", "regime", "verdict", "num_seeds", "values", "rule"} <= set(entry) for entry in entries)
    assert {entry["verdict"] for entry in entries} <= {"seen", "not_seen", "unclear"}
    by_claim = {entry["claim"]: entry for entry in entries if entry["regime"]["main"]}
    assert by_claim["a"]["verdict"] == by_claim["b-none"]["verdict"] == by_claim["h-total"]["verdict"] == "seen"
    assert (by_claim["k"]["verdict"], by_claim["k"]["reason"]) == ("unclear", "5 of 7 cells")

    text = (output / "README.md").read_text(encoding="utf-8")
    assert "27 of 29 cells are finished. 1 failed" in text
    assert "RuntimeError: a \\| b" in text
    assert "no cell was run for it" in text  # of the sweeps
    assert text.index("| a | At high μ") < text.index("## Task sums") < text.index("## Figures")
    page = (output / "page.html").read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert len(tags.loaded) == 6 and all(link.startswith("data:image/svg+xml;base64,") for link in tags.loaded)

    first = {path.relative_to(output): path.read_bytes() for path in output.rglob("*.*") if path.is_file()}
    again = tmp_path / "again"
    write_report(output / "cells.jsonl.gz", again, grid, TUNING_SEEDS)
    assert {path.relative_to(again): path.read_bytes() for path in again.rglob("*.*") if path.is_file()} == first


def test_command_line_reads_the_experiments_and_says_when_there_is_nothing(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--runs", str(tmp_path), "--output", str(tmp_path / "docs")])
    assert stopped.value.code == 2
    assert "has no finished cell of the experiments" in capsys.readouterr().err
    cell = load_grid(["main"])[0]
    write_cells(tmp_path / "lab" / "cells", [(cell, result(cell))])
    main(["--runs", str(tmp_path), "--output", str(tmp_path / "docs")])
    assert capsys.readouterr().out.startswith("1 cells, 0 failed; main verdicts: 0 seen, 0 not seen, ")
