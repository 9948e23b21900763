"""The benchmarks run, end with one line of JSON, and measure what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common import report, run_pairs
from benchmarks.plan import fixed_load, plan_stage
from benchmarks.synthetic import group_advantages, long_tailed_lengths

ROOT = Path(__file__).resolve().parent.parent


def run(name: str, *options: str) -> dict[str, Any]:
    """The last line of `python -m benchmarks.NAME --quick`."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", *options]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    line = json.loads(done.stdout.strip().splitlines()[-1])
    assert line["min"] <= line["ratio"] <= line["max"]
    assert line["pairs"] == 2
    return line


def test_pairs_alternate_and_the_ratio_is_above_1_where_ours_is_cheaper(capsys):
    runs: list[str] = []

    def ours() -> float:
        runs.append("ours")
        return 2.0

    def other() -> float:
        runs.append("other")
        return 3.0 * len(runs)

    ratios = run_pairs(ours, other, 3)
    assert runs == ["ours", "other", "other", "ours", "ours", "other"]
    assert ratios == [3.0, 4.5, 9.0]
    report("x", ratios, more=[1])
    assert json.loads(capsys.readouterr().out) == {
        "name": "x", "ratio": 4.5, "min": 3.0, "max": 9.0, "pairs": 3, "more": [1]
    }  # fmt: skip


def test_made_up_rollouts_have_the_lengths_and_advantages_they_claim():
    rng = np.random.default_rng(0)
    lengths = long_tailed_lengths(rng, 200_000)
    assert lengths.mean() == pytest.approx(600, rel=0.02)
    assert np.log(lengths[lengths < 8192]).std() == pytest.approx(0.9, rel=0.02)
    assert (lengths.min(), lengths.max()) == (pytest.approx(10, abs=10), 8192)
    advantages = group_advantages(rng, 1000, 8)
    assert (~advantages.any(axis=1)).sum() == 350
    np.testing.assert_allclose(advantages.sum(axis=1), 0, atol=1e-5)
    np.testing.assert_allclose(advantages[advantages.any(axis=1)].std(axis=1, ddof=1), 1, rtol=1e-5)


def test_loads_of_a_plan_are_counted_by_hand():
    lengths = np.array([10, 10, 6, 4])
    assert fixed_load(lengths, 1, budget=20) == 2 * 10 + 2 * 6
    assert fixed_load(lengths, 2, budget=20) == 10 * 2  # dealt out as (10, 6) and (10, 4)
    case = plan_stage([lengths], 1, budget=1000)
    assert (case.real, case.mean_load, case.highest_load) == (30, case.forwarded, case.forwarded)
    assert 30 <= case.forwarded <= 31.25  # at most 4% padding


def test_plan_keeps_padding_under_5_and_imbalance_under_3_percent():
    line = run("plan", "--updates", "8", "--ranks", "1", "4")
    assert line["worst_padding"] < 0.05
    assert line["worst_imbalance"] < 0.03
    assert line["ratio"] > 1.3


@pytest.mark.slow
def test_stage_store_takes_memory_that_does_not_grow():
    line = run("stage_store", "--powers", "9", "11", "--pair-power", "9")
    assert [size["responses"] for size in line["sizes"]] == [512, 2048]
    assert line["read_rss_growth"] < 1.2
    assert all(size["write_mb_per_s"] > 0 and size["fetch_p99_ms"] > 0 for size in line["sizes"])
    assert set(line["pair_seconds"]) == {f"{s}_{p}" for s in ("ours", "datasets") for p in ("write", "open", "read")}


def test_rollout_client_stores_every_replayed_token():
    line = run("rollout_client", "--part", "replay", "--groups", "16")
    assert line["tokens_per_s_min"] > 0
    assert 80 < line["bytes_per_answer"] / 8 / 1000 < 140  # an answer is eight responses of 1,000 tokens, about
