"""`mu-grpo stage show`: rewards, solve rates and lengths of a stage, and its ratios under a checkpoint, by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import make_tokenizer, save_tiny_policy
from test_stage import fill_stage, make_group, make_manifest, make_row
from test_stage_cli import run
from transformers import AutoModelForCausalLM

from mu_grpo_trl.report import ratios, stage_text, stage_view
from mu_grpo_trl.report.ratios import sample_rows, score_stage
from mu_grpo_trl.report.stage_view import Example, view_stage
from mu_grpo_trl.stage import StageError, StageReader, StageWriter

PROMPT, TEMPERATURE = "2+2=", 0.05


def write_stage(folder: Path, rewards: list[list[float | None]], **rows) -> StageReader:
    """One group a list, advantages ±1 by the sign of reward − ½, 0 where unscorable; all of one token."""
    size = len(rewards[0])
    manifest = make_manifest(
        num_updates=len(rewards),
        prompts_per_update=1,
        num_generations=size,
        prompt_indices=tuple(range(10, 10 + len(rewards))),
    )
    writer = StageWriter.create(folder, manifest)
    for group, own in enumerate(rewards):
        written = [
            make_row(
                group,
                sample,
                reward=reward,
                advantage=0.0 if reward is None else math.copysign(1.0, reward - 0.5),
                **{"completion_ids": [7], "behavior_logps": [-1.0], **rows},
            )
            for sample, reward in enumerate(own)
        ]
        writer.append([make_group(group, written)])
    writer.complete()
    return StageReader(folder)


# The stage


def test_lengths_and_truncation_are_counted(tmp_path):
    fill_stage(tmp_path)  # lengths of samples 0 and 1 in groups 0…5: 1 2 3 1 2 3 and 2 3 1 2 3 1
    view = view_stage(StageReader(tmp_path))
    assert view.lengths == [("1", 4), ("2", 4), ("3", 4)]
    assert view.length_quantiles == {0.0: 1, 0.1: 1, 0.5: 2, 0.9: 3, 0.99: 3, 1.0: 3}
    assert (view.mean_length_right, view.mean_length_wrong) == (2.0, 2.0)
    assert view.truncated == 6  # every sample 0
    assert view.rewards == [("0.5", 6), ("1.5", 6)]
    assert view.groups_by_right == [0, 6, 0]


def test_groups_are_counted_by_their_right_responses_and_unscorable_ones_are_not_right(tmp_path):
    reader = write_stage(tmp_path, [[0, 0, 0], [0, 1, 0], [1, 1, 1], [None, 1, 1], [None, None, None]])
    view = view_stage(reader)
    assert view.groups_by_right == [2, 1, 1, 1]
    assert (view.all_wrong, view.mixed, view.all_right) == (2, 2, 1)
    assert view.rewards == [("0", 5), ("1", 6)]
    assert view.summary.unscorable_responses == 4
    assert view_stage(reader, right_at=0.0).groups_by_right == [1, 0, 1, 3]


def test_many_distinct_rewards_are_binned(tmp_path, monkeypatch):
    monkeypatch.setattr(stage_view, "GROUPS_AT_ONCE", 3)
    values = [[0.0, 1.0], [None, None], *([i / 10 + 0.03, i / 10 + 0.06] for i in range(10))]
    view = view_stage(write_stage(tmp_path, values))
    assert [count for _, count in view.rewards] == [3, 2, 2, 2, 2, 2, 2, 2, 2, 3]
    assert (view.rewards[0][0], view.rewards[-1][0]) == ("0–0.1", "0.9–1")


def test_long_lengths_are_binned_without_a_gap():
    counts = np.zeros(126, dtype=np.int64)
    counts[[1, 13, 14, 125]] = [5, 1, 2, 3]
    bins = stage_view._length_histogram(counts)  # 125 lengths in bins of 13
    assert bins[:2] == [("1–13", 6), ("14–26", 2)] and bins[-1] == ("118–125", 3)
    assert sum(count for _, count in bins) == 11


@pytest.mark.parametrize("at_once", [1, 2, 1024])
def test_the_best_is_of_the_highest_reward_then_advantage_then_first(at_once, tmp_path, monkeypatch):
    monkeypatch.setattr(stage_view, "GROUPS_AT_ONCE", at_once)
    rewards = {0: (1.0, 0.2), 1: (1.0, 2.0), 2: (0.0, -2.0), 3: (1.0, 2.0), 4: (0.0, -0.1), 5: (None, 0.0)}
    manifest = make_manifest(num_generations=1)
    writer = StageWriter.create(tmp_path, manifest)
    for group, (reward, advantage) in rewards.items():
        writer.append([make_group(group, [make_row(group, 0, reward=reward, advantage=advantage)])])
    writer.complete()
    view = view_stage(StageReader(tmp_path), num_examples=3)
    assert view.best == [Example(1, 0, 1.0, 2.0), Example(3, 0, 1.0, 2.0), Example(0, 0, 1.0, pytest.approx(0.2))]
    assert [example.group for example in view.worst] == [2, 4, 0]


def test_bars_are_in_proportion():
    assert stage_text.bars([("0", 30), ("1", 10), ("2", 0)], "groups") == [
        f"  0  {'█' * 40}  30 groups (75.0%)",
        f"  1  {'█' * 14}{' ' * 26}   10 groups (25.0%)".replace("   10", "  10"),
        f"  2  {' ' * 40}   0 groups (0.0%)",
    ]


# Under a checkpoint


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def unlikely(policy) -> tuple[list[int], np.ndarray]:
    """Four tokens after `PROMPT` that the policy hardly ever samples at `TEMPERATURE`, and their log-probs."""
    model = AutoModelForCausalLM.from_pretrained(policy)
    ids = make_tokenizer()(PROMPT)["input_ids"]
    chosen: list[int] = []
    logps = []
    for _ in range(4):
        with torch.no_grad():
            logits = model(torch.tensor([ids + chosen])).logits[0, -1] / TEMPERATURE
        chosen.append(3 + int(logits[3:].argmin()))  # behind pad, EOS and unknown
        logps.append(float(logits.log_softmax(-1)[chosen[-1]]))
    assert max(logps) < -15.0  # so that even e^−15 of it is a probability
    return chosen, np.array(logps)


@pytest.fixture
def stage(unlikely, tmp_path) -> Path:
    """
    Four groups of two. The first of group 1 has A = −1 and ratios 1, ½, e^−15, 2; the first of
    group 3 A = −1, ratios 1 and three tokens of which b_t is missing; all others A = 1 (0 in group 0) and ratios e.
    """
    ids, logps = unlikely
    down = logps - np.array([0.0, math.log(0.5), -15.0, math.log(2.0)])
    missing = np.where([False, True, True, True], np.nan, logps)
    manifest = make_manifest(
        num_updates=1, prompts_per_update=4, prompt_indices=(10, 11, 12, 13), sampling={"temperature": TEMPERATURE}
    )
    writer = StageWriter.create(tmp_path / "stage", manifest)
    for group in range(4):
        firsts = {1: (-1.0, down), 3: (-1.0, missing)}
        first = firsts.get(group, (0.0 if group == 0 else 1.0, logps - 1))
        second = (0.0 if group == 0 else 1.0, logps - 1)
        rows = [
            make_row(
                group, sample, completion_ids=ids, behavior_logps=own, advantage=advantage, reward=float(advantage > 0)
            )
            for sample, (advantage, own) in enumerate((first, second))
        ]
        writer.append([make_group(group, rows, prompt_ids=make_tokenizer()(PROMPT)["input_ids"])])
    writer.complete()
    return tmp_path / "stage"


@pytest.mark.parametrize("max_tokens", [1, 16, 8192])
def test_ratios_triggers_and_what_the_scopes_mask_are_those_computed_by_hand(stage, policy, max_tokens, monkeypatch):
    monkeypatch.setattr(ratios, "MAX_TOKENS", max_tokens)
    view = score_stage(StageReader(stage), policy)
    assert [(one.group, one.sample) for one in view.responses] == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert view.num_tokens == 24
    expected = [0.0, math.log(0.5), -15.0, math.log(2.0)]
    assert view.responses[0].log_ratios.tolist() == pytest.approx(expected, abs=1e-4)
    assert np.isnan(view.responses[4].log_ratios).tolist() == [False, True, True, True]
    assert view.metrics["ratio/negative_mean"] == pytest.approx((1 + 0.5 + math.exp(-15) + 2 + 1) / 5, abs=1e-4)
    assert view.metrics["ratio/positive_mean"] == pytest.approx(math.e, abs=1e-3)
    assert view.metrics["veto/trigger_tokens"] == 1
    (triggered,) = view.triggered
    assert triggered.triggers.tolist() == [False, False, True, False]
    masked = {"sequence": 4, "suffix": 1, "non_trigger_suffix": 1, "trigger": 1, "none": 0}
    assert triggered.masked_tokens == masked
    assert view.masked() == {scope: (int(count > 0), count) for scope, count in masked.items()}
    places = [(one.group, t) for one, t in view.lowest(3)]
    assert places[:2] == [(1, 2), (1, 1)]


def test_a_higher_threshold_triggers_earlier(stage, policy):
    (triggered,) = score_stage(StageReader(stage), policy, threshold=0.6).triggered
    assert triggered.triggers.tolist() == [False, True, True, False]
    assert triggered.masked_tokens == {
        "sequence": 4, "suffix": 2, "non_trigger_suffix": 1, "trigger": 2, "none": 0
    }  # fmt: skip


def test_the_sample_is_of_whole_groups_with_advantages_spread_over_the_stage(stage, policy):
    reader = StageReader(stage)
    assert sample_rows(reader, 4) == [(1, 0), (1, 1), (3, 0), (3, 1)]
    assert sample_rows(reader, 1) == [(1, 0), (1, 1)]
    assert len(sample_rows(reader, 100)) == 6


def test_what_cannot_be_scored_is_said(policy, tmp_path):
    with pytest.raises(StageError, match="No response of .* has an advantage"):
        score_stage(write_stage(tmp_path / "none", [[None, None]]), policy)
    with pytest.raises(StageError, match=r"has token 5000, but .* knows 53: it is another model"):
        score_stage(write_stage(tmp_path / "other", [[0, 1]], completion_ids=[5000]), policy)


def test_the_command_shows_the_trigger_in_its_context(stage, policy, unlikely, capsys):
    response = make_tokenizer().decode(unlikely[0])
    code, text = run(capsys, "show", stage, "--checkpoint", policy, "--responses", 1)
    assert code == 0
    assert f"best: group 1 sample 1: 4 tokens, reward 1.000, advantage 1.000\n2+2=\n>>> {response}\n" in text
    assert "worst: group 1 sample 0" in text
    assert "1 triggers (A < 0, ρ < 0.0001) in 1 responses" in text
    assert "group 1 sample 0: κ = 2 of 4 tokens; masked: sequence 4, suffix 1, non_trigger_suffix 1, trigger 1" in text
    before, (trigger, after) = response[:2], response[2:]
    assert f"⚑ ρ=3.06e-07  group 1 sample 0 t=2: {before}⟦{trigger}⟧{after}".replace("\n", "⏎") in text
    assert "3 tokens without a usable log-prob" in text


def test_the_json_holds_the_same(stage, policy, unlikely, capsys):
    code, text = run(capsys, "show", stage, "--checkpoint", policy, "--json")
    assert code == 0
    told = json.loads(text)
    assert told["view"]["groups_by_right"] == [1, 2, 1]
    assert told["view"]["best"][0]["completion"] == make_tokenizer().decode(unlikely[0])
    assert told["ratios"]["masked"]["sequence"] == {"responses": 1, "tokens": 4}
    (triggered,) = told["ratios"]["triggered"]
    assert [trigger["token"] for trigger in triggered["triggers"]] == [2]
    assert told["manifest"]["sampling"]["temperature"] == TEMPERATURE
