"""Whole runs: resumed ones end bit by bit where undisturbed ones do, failures stop all ranks and lose no rollout."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers.modeling_utils
from datasets import Dataset, IterableDataset
from helpers import PROMPTS, config_options, make_tokenizer, save_tiny_policy
from peft import LoraConfig
from processes import run_alone, run_ranks
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from workers.train_worker import digit_share
from workers.training_run import GENERATED, make_trainer, train, whole_weights

from mu_grpo_trl import MuGRPOConfig, MuGRPOTrainer, load_stage
from mu_grpo_trl.anchors import AnchorStore
from mu_grpo_trl.report import completions as completion_report
from mu_grpo_trl.rewards.functions import RewardError
from mu_grpo_trl.rollout.engine import EngineError
from mu_grpo_trl.stage.reader import StageReader
from mu_grpo_trl.stage.schema import StageError, read_manifest
from mu_grpo_trl.telemetry import KINDS, Telemetry, peak_flops

LORA = {"r": 4, "lora_dropout": 0.05, "target_modules": ["q_proj", "v_proj"]}


pytestmark = pytest.mark.usefixtures("objects_of_the_libraries_are_not_collected")


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(autouse=True)
def stages_flush_as_in_production(monkeypatch):
    from mu_grpo_trl.rollout import fill

    monkeypatch.setattr(fill, "FLUSH_GROUPS", fill.FLUSH_GROUPS)  # `train` lowers it


def short(policy: Path, output_dir: Path, **options: Any) -> dict[str, Any]:
    """One stage of two updates of 4 × 4 responses."""
    defaults = {"model": str(policy), "prompts": PROMPTS[:12], "stage_updates": 2, "max_steps": 2}
    return {**config_options(output_dir), **defaults, **options}


def long(policy: Path, output_dir: Path, **options: Any) -> dict[str, Any]:
    """Ten updates in stages of four, over 24 prompts: six updates an epoch, a short last stage, four batches each."""
    return short(
        policy, output_dir,
        prompts=PROMPTS[:24], stage_updates=4, max_steps=10, rollout_concurrency=16, lr_scheduler_type="cosine",
        save_strategy="steps", save_steps=2, **options,
    )  # fmt: skip


def generated(output_dir: Path) -> list[tuple[int, tuple[int, ...]]]:
    """`(seed of the stage, groups)` of every call of the engine, over all processes."""
    path = output_dir / GENERATED
    calls = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [(seed, tuple(groups)) for seed, groups in calls]


def history(trainer: MuGRPOTrainer) -> list[dict[str, float]]:
    """What was logged at each update, timers aside."""
    return [
        {name: value for name, value in entry.items() if not name.startswith(("time/", "tokens/", "train_"))}
        for entry in trainer.state.log_history
    ]


def assert_equal_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different


class Undisturbed:
    """The reference run, from which killed ones must not differ."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.folder = Path(spec["output_dir"])
        self.trainer = train(spec)
        self.weights = whole_weights(self.trainer)
        self.history = history(self.trainer)
        self.generated = generated(self.folder)


@pytest.fixture(scope="module")
def undisturbed(policy, tmp_path_factory) -> Undisturbed:
    return Undisturbed(long(policy, tmp_path_factory.mktemp("undisturbed")))


# Resume


@pytest.mark.parametrize(
    ("place", "number"),
    [
        ("publish", 2),  # the policy of stage 1
        ("generate", 3),  # stage 0, before any checkpoint
        ("generate", 7),  # stage 1
        ("complete", 2),  # all of stage 1 is there, but not marked so
        ("step", 6),  # within stage 1, after an optimizer step
        ("checkpoint", 3),  # checkpoint-6 has weights but no end
        ("saved", 8),  # at the boundary of stages 1 and 2, in the second epoch
    ],
)
def test_b28_b29_b31_a_killed_run_ends_with_the_bits_of_the_undisturbed_one(
    place, number, policy, undisturbed, tmp_path
):
    spec = long(policy, tmp_path)
    ended = run_alone(spec, fault={"kind": "die", "at": place, "number": number})
    assert ended.exitcode == -9, ended.log[-3000:]
    flushed = {}
    for folder in sorted((tmp_path / "stages").glob("stage-*/manifest.json")):
        reader = StageReader(folder.parent, allow_filling=True)
        flushed[reader.manifest.sampling["seed"]] = set(reader.groups.tolist())
    before = generated(tmp_path)
    resumed = train(spec, resume=any(tmp_path.glob("checkpoint-*")) or None)
    assert_equal_weights(whole_weights(resumed), undisturbed.weights)
    assert history(resumed)[-1] == undisturbed.history[-1]
    again = generated(tmp_path)[len(before) :]
    assert not [groups for seed, groups in again if flushed.get(seed, set()).issuperset(groups)]
    assert set(before) | set(again) == set(undisturbed.generated)


def test_b28_resuming_within_a_stage_generates_nothing_for_it(policy, undisturbed, tmp_path):
    shutil.copytree(undisturbed.folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / GENERATED).unlink()
    shutil.rmtree(tmp_path / "stages" / "stage-002")
    resumed = train(long(policy, tmp_path), resume=str(tmp_path / "checkpoint-6"))
    last = resumed.schedule.stage_seed(2)
    assert {seed for seed, _ in generated(tmp_path)} == {last}
    assert_equal_weights(whole_weights(resumed), undisturbed.weights)
    assert history(resumed)[-5:] == undisturbed.history[-5:]


def test_b29_every_epoch_draws_each_prompt_once_in_an_order_of_its_own(undisturbed):
    drawn = [
        i for stage in range(3) for i in read_manifest(undisturbed.folder / f"stages/stage-00{stage}").prompt_indices
    ]
    first, second = drawn[:24], drawn[24:]
    assert sorted(first) == list(range(24))
    assert len(set(second)) == len(second) == 16
    assert second != first[:16]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"num_generations": 8}, "num_generations: 4 → 8"),
        ({"prompts_per_update": 2}, "prompts_per_update: 4 → 2"),
        ({"stage_updates": 2}, "stage_updates: 4 → 2"),
        ({"temperature": 0.9}, "temperature: 1.0 → 0.9"),
        ({"max_completion_length": 21}, "max_tokens: 20 → 21"),
        ({"seed": 43}, "seed: 42 → 43"),
        ({"prompts": PROMPTS[:23]}, "hash of the dataset"),
        ({"advantage_eps": 1e-4}, "advantage_eps: 1e-06 → 0.0001"),
        ({"anchor": "trainer"}, "anchor: 'engine' → 'trainer'"),
    ],
)
def test_a_setting_that_changes_the_data_is_refused_on_resume_with_both_values(
    changed, named, policy, undisturbed, tmp_path
):
    spec = {**long(policy, tmp_path), **changed}
    with pytest.raises(ValueError, match=f"other settings.*{named}"):
        train(spec, resume=str(undisturbed.folder / "checkpoint-6"))
    assert not list(tmp_path.glob("stages/stage-*"))


def test_a_setting_that_does_not_change_the_data_passes(policy, undisturbed, tmp_path):
    trainer = make_trainer(
        long(policy, tmp_path, learning_rate=1e-3, max_tokens_per_microbatch=64, veto_scope="suffix")
    )
    trainer.stage_callback.restore(undisturbed.folder / "checkpoint-6")
    assert trainer.stage_callback.stage == 1


@pytest.mark.parametrize("damage", ["removed", "truncated", "other weights"])
def test_b31_a_stage_that_cannot_be_continued_is_refused_with_the_way_out(damage, policy, undisturbed, tmp_path):
    shutil.copytree(undisturbed.folder, tmp_path, dirs_exist_ok=True)
    stage = tmp_path / "stages" / "stage-001"
    if damage == "removed":
        shutil.rmtree(stage)
    elif damage == "truncated":
        shard = sorted(stage.glob("groups/*.arrow"))[1]
        shard.write_bytes(shard.read_bytes()[:-100])
    else:
        manifest = json.loads((stage / "manifest.json").read_text())
        shutil.rmtree(stage)
        shutil.copytree(tmp_path / "stages" / "stage-000", stage)
        assert manifest["stage"] == 1
    with pytest.raises(StageError, match="stage.*Resume from a checkpoint at a stage boundary"):
        train(long(policy, tmp_path), resume=str(tmp_path / "checkpoint-6"))
    resumed = train(long(policy, tmp_path), resume=str(tmp_path / "checkpoint-4"))
    assert_equal_weights(whole_weights(resumed), undisturbed.weights)


def test_a_checkpoint_that_is_not_whole_is_passed_over_with_one_line(policy, undisturbed, tmp_path, caplog):
    shutil.copytree(undisturbed.folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "checkpoint-10" / "trainer_state.json").unlink()
    state = tmp_path / "checkpoint-8" / "trainer_state.json"
    state.write_text(state.read_text()[:-50])
    with caplog.at_level(logging.WARNING, "mu_grpo_trl.checkpoints"):
        resumed = train(long(policy, tmp_path), resume=True)
    assert [record.args[0].args[0].split(" ")[0][-13:] for record in caplog.records] == [
        "checkpoint-10",
        "/checkpoint-8",
    ]
    assert_equal_weights(whole_weights(resumed), undisturbed.weights)


def test_resuming_where_there_is_no_checkpoint_is_an_error(policy, tmp_path):
    with pytest.raises(ValueError, match="no checkpoint in .*Leave `resume_from_checkpoint` out"):
        train(short(policy, tmp_path), resume=True)
    with pytest.raises(ValueError, match="checkpoint-7 is not a whole checkpoint of MuGRPOTrainer.*No such file"):
        train(short(policy, tmp_path), resume=str(tmp_path / "checkpoint-7"))


def test_b31_a_stage_left_by_other_weights_is_dropped_with_one_line(policy, tmp_path, caplog):
    other = save_tiny_policy(tmp_path / "other", seed=1)
    spec = short(policy, tmp_path / "run")
    train({**spec, "model": str(other)})
    left = load_stage(tmp_path / "run/stages/stage-000")["completion_ids"]
    with caplog.at_level(logging.WARNING, "mu_grpo_trl.staging"):
        second = train(spec)
    assert len([r for r in caplog.records if "its rows are dropped" in r.getMessage()]) == 1
    assert load_stage(tmp_path / "run/stages/stage-000")["completion_ids"] != left
    fresh = train(short(policy, tmp_path / "fresh"))
    assert_equal_weights(whole_weights(second), whole_weights(fresh))


def test_b31_a_stage_left_by_a_run_with_other_settings_is_not_used(policy, tmp_path):
    train(short(policy, tmp_path))
    with pytest.raises(StageError, match="holds another stage: .*seed.*42 → 43"):
        train(short(policy, tmp_path, seed=43))


def test_a_run_made_longer_goes_on_from_the_end_of_its_last_whole_stage(policy, tmp_path):
    short_spec = short(policy, tmp_path / "run", max_steps=3, save_strategy="steps", save_steps=1)
    train(short_spec)
    longer = {**short_spec, "max_steps": 6}
    with pytest.raises(StageError, match="num_updates: 1 → 2.*remove the folder and resume from .*stage's beginning"):
        train(longer, resume=True)
    shutil.rmtree(tmp_path / "run/stages/stage-001")
    resumed = train(longer, resume=str(tmp_path / "run/checkpoint-2"))
    whole = train({**longer, "output_dir": str(tmp_path / "whole")})
    assert_equal_weights(whole_weights(resumed), whole_weights(whole))


def test_damaged_weights_are_named_as_such(policy, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(policy)
    with torch.no_grad():
        model.lm_head.weight[0] = torch.nan
    with pytest.raises(EngineError, match="The policy's own log-probs .* not finite: its weights are damaged"):
        make_trainer({**short(policy, tmp_path), "model": model}).train()


@pytest.mark.parametrize("num_responses", [0, 1, 5])
def test_stored_anchors_come_back_with_every_bit(num_responses, tmp_path):
    values = [torch.randn(length).numpy() for length in range(1, 1 + num_responses)]
    store = AnchorStore(tmp_path)
    store.clear()
    store.write(3, 0, [(7, sample) for sample in range(num_responses)], values)
    store.write(3, 1, [(8, 2)], [np.array([np.nan, -1.5], np.float32)])
    read = AnchorStore(tmp_path)
    read.load()
    for sample, expected in enumerate(values):
        np.testing.assert_array_equal(read.logps(7, sample), expected)
    np.testing.assert_array_equal(read.logps(8, 2), np.array([np.nan, -1.5], np.float32))


@pytest.mark.parametrize("place", [0, 40, 200, -1, None])
def test_b31_damaged_anchors_are_never_trained_on(place, tmp_path):
    store = AnchorStore(tmp_path)
    store.clear()
    store.write(0, 0, [(0, 0)], [np.linspace(-3, -1, 100, dtype=np.float32)])
    (path,) = (tmp_path / "anchors").iterdir()
    data = bytearray(path.read_bytes())
    if place is None:
        data = data[:-100]
    else:
        data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(StageError, match="do not match the digest.*stage boundary"):
        AnchorStore(tmp_path).load()


def test_anchors_of_the_trainer_survive_a_resume_within_the_stage(policy, tmp_path):
    spec = short(
        policy, tmp_path / "whole", anchor="trainer", stage_updates=4, max_steps=4, save_strategy="steps", save_steps=2
    )
    whole = train(spec)
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    resumed = train({**spec, "output_dir": str(tmp_path / "resumed")}, resume=str(tmp_path / "resumed/checkpoint-2"))
    assert_equal_weights(whole_weights(resumed), whole_weights(whole))
    shutil.rmtree(tmp_path / "resumed/stages/stage-000/anchors")
    with pytest.raises(StageError, match="anchors has no log-probs of group.*stage boundary"):
        train({**spec, "output_dir": str(tmp_path / "resumed")}, resume=str(tmp_path / "resumed/checkpoint-2"))


# Several ranks


def m2po(policy: Path, output_dir: Path, **options: Any) -> dict[str, Any]:
    """Plain SGD with long steps, so that M2PO clips and the weights tell gradients apart."""
    return long(
        policy, output_dir, objective="m2po", m2po_scope="update", optim="sgd", learning_rate=2.0, weight_decay=0.0,
        max_grad_norm=0.0, **options,
    )  # fmt: skip


@pytest.mark.distributed
def test_one_failing_rank_stops_both_and_the_resumed_run_ends_like_the_undisturbed_one(policy, tmp_path):
    fault = {"kind": "fail", "at": "generate", "number": 3, "rank": 1}  # the first batch of rank 1 in stage 1
    failed = run_ranks([m2po(policy, tmp_path / "failed")] * 2, fault=fault)
    assert [ended.exitcode for ended in failed] == [1, 1]
    assert abs(failed[0].ended_s - failed[1].ended_s) < 10
    assert "ZeroDivisionError: injected on this rank" in failed[1].log
    assert "PeerError: Rank 1 failed while the stage was being made: ZeroDivisionError: injected" in failed[0].log
    stage = StageReader(tmp_path / "failed/stages/stage-001", allow_filling=True)
    seed = stage.manifest.sampling["seed"]
    assert [groups for stage_seed, groups in generated(tmp_path / "failed") if stage_seed == seed]
    resumed = run_ranks([m2po(policy, tmp_path / "failed")] * 2, resume=True)
    assert [ended.exitcode for ended in resumed] == [0, 0], resumed[0].log[-3000:]
    calls = generated(tmp_path / "failed")
    assert len(calls) == len(set(calls))  # what rank 0 had generated, scored or not, was not generated again
    undisturbed = run_ranks([m2po(policy, tmp_path / "undisturbed")] * 2)
    assert [ended.exitcode for ended in undisturbed] == [0, 0], undisturbed[0].log[-3000:]
    final = torch.load(tmp_path / "undisturbed/final.pt")
    assert_equal_weights(torch.load(tmp_path / "failed/final.pt"), final)

    single = whole_weights(train(m2po(policy, tmp_path / "single")))
    start = AutoModelForCausalLM.from_pretrained(policy).state_dict()
    moved = torch.stack([(single[name] - start[name]).norm() for name in single]).norm()
    apart = torch.stack([(single[name] - final[name]).norm() for name in single]).norm()
    assert apart < 1e-4 * moved


@pytest.mark.distributed
def test_b31_a_stages_folder_that_ranks_do_not_share_is_one_error_on_all_of_them(policy, tmp_path, monkeypatch):
    specs = [short(policy, tmp_path, stage_dir=str(tmp_path / f"node-{rank}")) for rank in range(2)]
    for ended in run_ranks(specs, fault={"kind": "fail", "at": "begin", "number": -1}):
        assert ended.exitcode == 1
        assert "is not shared by all ranks: [1] do not see what rank 0 wrote there" in ended.log


@pytest.mark.distributed
def test_b43_b20_a_reward_that_raises_on_one_rank_stops_both(policy, tmp_path):
    spec = short(policy, tmp_path, rollout_concurrency=16)
    fault = {"kind": "fail", "at": "reward", "number": 2, "rank": 0}
    for ended in run_ranks([spec, spec], fault=fault):
        assert ended.exitcode == 1
        assert "Reward function 'digit_share' raised on prompt" in ended.log
        assert "injected on this rank" in ended.log
    assert [ended.exitcode for ended in run_ranks([spec, spec])] == [0, 0]  # mended
    calls = generated(tmp_path)
    assert len(calls) == len(set(calls)) == 2  # nothing was generated twice


# Rewards


def none_and_nan(completions, **_):
    return [None, float("nan"), *(float(i) for i in range(len(completions) - 2))]


async def asynchronous(completions, **_):
    await asyncio.sleep(0.01)
    return digit_share(completions)


class AsyncCallable:
    async def __call__(self, completions, **_):
        return digit_share(completions)


@pytest.mark.parametrize("reward", [none_and_nan, asynchronous, AsyncCallable()])
def test_b40_b42_unscorable_and_async_rewards_train(reward, policy, tmp_path):
    trainer = make_trainer(short(policy, tmp_path), reward)
    trainer.train()
    stage = StageReader(tmp_path / "stages/stage-000")
    groups = stage.groups
    rewards, advantages = stage.rewards(groups), stage.advantages(groups)
    if reward is none_and_nan:
        assert np.isnan(rewards[:, :2]).all() and (advantages[:, :2] == 0).all()
        np.testing.assert_allclose(advantages[:, 2:], [[-(0.5**0.5), 0.5**0.5]] * len(groups), atol=1e-5)
        assert logged(trainer, "rewards/unscorable_share") == [0.5, 0.5]
    else:
        texts = [
            trainer.processing_class.decode(stage.response(3, i).completion_ids, skip_special_tokens=True)
            for i in range(4)
        ]
        assert rewards[3].tolist() == digit_share(texts)


@pytest.mark.parametrize(
    ("returned", "said"),
    [([1.0], "returned 1 rewards for 4"), (1.0, "type float"), (None, "type NoneType"), (["1.0"] * 4, "no number")],
)
def test_b43_what_is_no_list_of_rewards_stops_naming_the_function_and_keeps_the_rollouts(
    returned, said, policy, tmp_path
):
    def broken(completions, **_):
        return returned

    spec = short(policy, tmp_path)
    with pytest.raises(RewardError, match=f"'broken'.*{said}"):
        make_trainer(spec, broken).train()

    def broken(completions, **_):  # mended, under its name
        return digit_share(completions)

    calls = []
    trainer = make_trainer(spec, broken)
    generate = trainer.stage_maker.engine.generate
    trainer.stage_maker.engine.generate = lambda *a: calls.append(a) or generate(*a)
    trainer.train()
    assert not calls  # the one batch of the stage was on the disk


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_b43_arrays_and_tensors_are_rewards(kind, policy, tmp_path):
    trainer = make_trainer(short(policy, tmp_path), lambda completions, **_: kind(digit_share(completions)))
    trainer.train()
    assert StageReader(tmp_path / "stages/stage-000").advantages([0, 1, 2]).any()


def test_b43_a_raising_reward_can_leave_its_responses_unscorable(policy, tmp_path):
    def raises_on_one(prompts, completions, **_):
        if prompts[0] == PROMPTS[5]:
            raise ZeroDivisionError
        return digit_share(completions)

    trainer = make_trainer(short(policy, tmp_path, reward_error="unscorable"), raises_on_one)
    trainer.train()
    stage = StageReader(tmp_path / "stages/stage-000")
    lost = [group for group in stage.groups if np.isnan(stage.rewards([group])).all()]
    assert [stage.manifest.prompt_indices[group] for group in lost] == [5] * len(lost)
    assert len(lost) == stage.manifest.prompt_indices.count(5)


def equal_tenths(completions, **_):
    return [float(np.float32(0.1))] * len(completions)


def thirds(completions, **_):
    return [1 / 3] * len(completions)


@pytest.mark.parametrize("reward", [equal_tenths, [equal_tenths, thirds]])
def test_b44_b45_a_stage_without_signal_is_named_and_moves_no_weight(reward, policy, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "mu_grpo_trl.staging"):
        trainer = make_trainer(short(policy, tmp_path, optim="adamw_torch", weight_decay=0.5), reward)
        trainer.train()
    warned = [record.getMessage() for record in caplog.records if "learn next to nothing" in record.getMessage()]
    assert len(warned) == 1
    assert "100.0% of its groups have equal rewards" in warned[0]
    start = AutoModelForCausalLM.from_pretrained(policy).state_dict()
    assert_equal_weights(whole_weights(trainer), {name: start[name] for name in whole_weights(trainer)})


@pytest.mark.parametrize(
    ("options", "reward", "said"),
    [
        ({}, equal_tenths, "100.0% of its groups"),
        ({"max_completion_length": 2}, digit_share, "of its responses were cut"),
    ],
)
def test_b44_a_stage_without_signal_can_stop_the_run_and_is_kept(options, reward, said, policy, tmp_path):
    with pytest.raises(StageError, match=f"{said}.*The stage is kept"):
        make_trainer(short(policy, tmp_path, no_signal="stop", **options), reward).train()
    assert read_manifest(tmp_path / "stages/stage-000").status == "complete"


def test_b45_with_a_kl_coefficient_groups_of_equal_rewards_are_still_pulled(policy, tmp_path):
    trainer = make_trainer(short(policy, tmp_path, beta=0.5, optim="sgd", learning_rate=1.0), digit_share)
    forwarded = []
    record = trainer._record
    trainer._record = lambda batch: forwarded.append(batch.num_skipped) or record(batch)
    trainer.train()
    assert forwarded == [0, 0]


@pytest.mark.parametrize("answers", [list(range(12)), [float(i) for i in range(12)], [[str(i)] for i in range(12)]])
def test_b57_numeric_answers_are_scored_by_the_math_reward(answers, policy, tmp_path):
    trainer = make_trainer(short(policy, tmp_path, prompts={"prompt": PROMPTS[:12], "answer": answers}), "math")
    trainer.train()
    rewards = StageReader(tmp_path / "stages/stage-000").rewards(range(8))
    assert not np.isnan(rewards).any()


@pytest.mark.parametrize("answer", [None, True])
def test_b57_an_answer_that_is_none_is_named_with_row_and_column(answer, policy, tmp_path):
    answers = [True] * 12 if answer is True else [*map(str, range(7)), None, *map(str, range(8, 12))]
    with pytest.raises((TypeError, ValueError), match=f"{answer} in row {0 if answer else 7} of column 'answer'"):
        make_trainer(short(policy, tmp_path, prompts={"prompt": PROMPTS[:12], "answer": answers}), "math")


def test_b59_a_stream_of_rows_with_different_keys_trains(policy, tmp_path):
    def rows():
        for number in range(10**9):
            yield {"prompt": PROMPTS[number % 64], **({"solution": str(number)} if number % 2 else {})}

    seen = []

    def reward(completions, solution, **_):
        seen.append(solution[0])
        return digit_share(completions)

    options = short(policy, tmp_path)
    del options["prompts"], options["model"]
    trainer = MuGRPOTrainer(str(policy), reward, MuGRPOConfig(**options), IterableDataset.from_generator(rows))
    trainer.train()
    assert sorted(filter(None, seen)) == ["1", "3", "5", "7"]
    assert seen.count(None) == 4


# Tokenizers


def saved_with(folder: Path, **changes: Any) -> Path:
    """The tiny policy with another tokenizer or generation config."""
    save_tiny_policy(folder)
    tokenizer = make_tokenizer()
    if changes.get("pad_is_eos"):
        tokenizer.pad_token = tokenizer.eos_token
    if changes.get("bos"):
        tokenizer.bos_token = "{"
        tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    if eos := changes.get("eos"):
        config = json.loads((folder / "generation_config.json").read_text())
        (folder / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": eos}))
    return folder


def test_b47_with_pad_equal_to_eos_the_sampled_eos_is_kept_and_trained_on(tmp_path):
    model = saved_with(tmp_path / "model", pad_is_eos=True)
    trainer = make_trainer(short(model, tmp_path / "run", max_completion_length=60))
    widths = []
    loss_inputs = trainer._loss_inputs
    trainer._loss_inputs = lambda model, inputs: (
        widths.append(inputs["completion_mask"].sum().item()) or loss_inputs(model, inputs)
    )
    trainer.train()
    rows = load_stage(tmp_path / "run/stages/stage-000")
    ended = [row for row in rows if row["finish_reason"] == "stop"]
    assert ended and all(row["completion_ids"][-1] == 1 for row in ended)
    assert all(1 not in row["completion_ids"] for row in rows if row["finish_reason"] == "length")
    trained = sum(len(row["completion_ids"]) for row in rows if row["advantage"])
    first_update_again = widths[0]  # the check before the first step
    assert sum(widths[1:]) == trained > first_update_again


def test_b48_every_eos_id_of_the_generation_config_ends_a_response(tmp_path):
    model = saved_with(tmp_path / "model", eos=[1, 20, 30])
    make_trainer(short(model, tmp_path / "run", max_completion_length=60)).train()
    rows = load_stage(tmp_path / "run/stages/stage-000")
    last = {row["completion_ids"][-1] for row in rows if row["finish_reason"] == "stop"}
    assert {20, 30} <= last <= {1, 20, 30}
    assert set(read_manifest(tmp_path / "run/stages/stage-000").sampling["eos_token_ids"]) == {1, 20, 30}


def test_b49_a_conversation_has_one_bos_and_the_ids_generated_on_are_the_ids_trained_on(tmp_path):
    model = saved_with(tmp_path / "model", bos=True)
    prompts = {"prompt": [[{"role": "user", "content": text}] for text in PROMPTS[:12]]}

    def reward(completions, **_):
        return digit_share([messages[0]["content"] for messages in completions])

    trainer = make_trainer(short(model, tmp_path / "run", prompts=prompts), reward)
    asked = []
    generate = trainer.stage_maker.engine.generate

    def remember(requests, sampling):
        asked.extend(requests)
        return generate(requests, sampling)

    trainer.stage_maker.engine.generate = remember
    trainer.train()
    stage = StageReader(tmp_path / "run/stages/stage-000")
    bos = trainer.processing_class.bos_token_id
    assert len(asked) == 8
    for request in asked:
        assert request.prompt_ids.count(bos) == 1 and request.prompt_ids[0] == bos
        assert stage.response(request.group, 0).prompt_ids.tolist() == request.prompt_ids


# Options of TRL in whole runs


def logged(trainer: MuGRPOTrainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize("lora", [None, LORA])
def test_the_kl_to_the_reference_starts_at_zero_and_grows(lora, policy, tmp_path):
    spec = short(policy, tmp_path, beta=0.04, lora=lora, learning_rate=0.05, max_steps=4, stage_updates=4)
    trainer = train(spec)
    assert (trainer.ref_model is None) == (lora is not None)
    kl = logged(trainer, "kl/ref")
    assert kl[0] < 1e-6
    assert kl[-1] > 1e-4


def test_dropout_of_an_adapter_is_turned_off_and_said(policy, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "mu_grpo_trl.policy"):
        trainer = make_trainer(short(policy, tmp_path, lora={**LORA, "lora_dropout": 0.3}))
    assert [record.getMessage() for record in caplog.records if "Dropout of 4 modules" in record.getMessage()]
    trainer.train()
    assert logged(trainer, "ratio/abs_log_mean")[0] < 1e-5


@pytest.mark.parametrize(
    "options", [{"objective": "grpo"}, {"objective": "m2po"}, {"objective": "m2po", "m2po_scope": "update"}]
)
def test_the_baselines_train_on_stages(options, policy, tmp_path):
    spec = long(policy, tmp_path, **options)
    trainer = train(spec)
    assert trainer.state.global_step == 10
    assert logged(trainer, "ratio/abs_log_mean")[0] < 1e-5
    clipped = logged(trainer, "clip/token_fraction")
    assert clipped[0] == 0 and max(clipped) > 0
    assert set(logged(trainer, "veto/token_fraction")) == {0.0}


def test_evaluation_is_trls_and_outside_the_total(policy, tmp_path):
    options = short(policy, tmp_path, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4)
    trainer = make_trainer(options, eval_dataset=Dataset.from_dict({"prompt": PROMPTS[40:44]}))
    trainer.train()
    assert len(logged(trainer, "eval_reward")) == 2
    assert all(0 <= value <= 1 for value in logged(trainer, "eval_reward"))
    plain = make_trainer({**options, "output_dir": str(tmp_path / "plain"), "eval_strategy": "no"})
    plain.train()
    assert_equal_weights(whole_weights(trainer), whole_weights(plain))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["evaluation_s"] > 0
    assert summary["total_s"] < trainer.telemetry.total_s() + 1e-6


def test_evaluation_at_stage_ends_comes_there_and_nowhere_else(policy, tmp_path):
    options = short(
        policy, tmp_path, max_steps=5, eval_stage_ends=True, num_generations_eval=2, per_device_eval_batch_size=4
    )
    trainer = make_trainer(options, eval_dataset=Dataset.from_dict({"prompt": PROMPTS[40:44]}))
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "eval_reward" in entry] == [2, 4, 5]
    assert json.loads((tmp_path / "summary.json").read_text())["evaluation_s"] > 0
    with pytest.raises(ValueError, match="`eval_stage_ends=True` needs an `eval_dataset`"):
        make_trainer(options)
    with pytest.raises(ValueError, match="4 rows, no multiple of the 3 responses"):
        make_trainer({**options, "num_generations_eval": 3}, eval_dataset=Dataset.from_dict({"prompt": PROMPTS[:2]}))


def test_the_kinds_of_time_add_up_to_the_wall_clock_of_training(policy, tmp_path):
    trainer = make_trainer(long(policy, tmp_path))
    start = time.perf_counter()
    trainer.train()
    elapsed = time.perf_counter() - start
    assert sum(trainer.telemetry.seconds.values()) == pytest.approx(elapsed, rel=0.01, abs=0.05)
    summary = json.loads((tmp_path / "summary.json").read_text())
    off_the_clock = trainer.telemetry.seconds["evaluation"]  # the figure that a run which saves ends with
    assert summary["total_s"] == pytest.approx(elapsed - off_the_clock, rel=0.01, abs=0.05)
    parts = sum(summary[f"{kind}_s"] for kind in KINDS if kind not in ("reward", "evaluation"))
    assert parts == pytest.approx(summary["total_s"], rel=1e-9)  # T_rollout holds the reward's


def test_mfu_is_what_the_forwarded_tokens_took_of_the_peak():
    telemetry = Telemetry(peak_flops=1e12)
    telemetry.restore({"seconds": {"optimize": 2.0}, "counts": {"flops": 5e11}})
    assert telemetry.metrics()["mfu"] == pytest.approx(0.25)
    assert "mfu" not in Telemetry().metrics()
    assert peak_flops("NVIDIA H100 80GB HBM3") == peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("Some Card 9") is None


def test_gradient_checkpointing_is_honored_and_changes_no_weight(policy, tmp_path, monkeypatch):
    recomputed = []
    checkpoint = transformers.modeling_utils.checkpoint

    def counted(*args, **kwargs):
        recomputed.append(1)
        return checkpoint(*args, **kwargs)

    plain = make_trainer(short(policy, tmp_path / "plain"))
    plain.train()
    monkeypatch.setattr(transformers.modeling_utils, "checkpoint", counted)
    saving = make_trainer(short(policy, tmp_path / "saving", gradient_checkpointing=True))
    saving.train()
    assert recomputed
    weights = whole_weights(saving)
    for name, weight in whole_weights(plain).items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("ranks", "options", "said"),
    [
        (
            7,
            {"prompts_per_update": 1, "num_generations": 4},
            "gives 4 responses an update, fewer than the 7 ranks.*at least 2",
        ),
        (7, {"generation_batch_size": 10}, "generation_batch_size=10"),
        (2, {"steps_per_generation": 3}, "steps_per_generation=3"),
        (2, {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2"),
        (1, {"num_generations": 1}, "num_generations"),
    ],
)
def test_b32_batches_that_do_not_fit_are_refused_with_the_numbers(ranks, options, said, tmp_path, monkeypatch):
    monkeypatch.setattr(MuGRPOConfig, "world_size", ranks)
    with pytest.raises(ValueError, match=said):
        MuGRPOConfig(**config_options(tmp_path, **options))


@pytest.mark.parametrize(
    ("ranks", "prompts", "size"), [(7, 32, 8), (3, 5, 4), (6, 1, 8), (5, 3, 2), (2, 1, 2), (64, 8, 8), (1, 1, 3)]
)
def test_b32_ranks_share_an_update_that_they_need_not_divide(ranks, prompts, size, tmp_path, monkeypatch):
    monkeypatch.setattr(MuGRPOConfig, "world_size", ranks)
    config = MuGRPOConfig(**config_options(tmp_path, prompts_per_update=prompts, num_generations=size))
    assert (config.prompts_per_update, config.num_generations) == (prompts, size)
    assert config.steps_per_generation is None and config.generation_batch_size is None


@pytest.mark.parametrize(("ranks", "prompts", "size"), [(7, 3, 2), (8, 1, 4), (64, 7, 8), (3, 1, 2)])
def test_b32_the_size_that_the_error_names_is_the_smallest_that_works(ranks, prompts, size, tmp_path, monkeypatch):
    monkeypatch.setattr(MuGRPOConfig, "world_size", ranks)
    with pytest.raises(ValueError, match=f"the {ranks} ranks") as refused:
        MuGRPOConfig(**config_options(tmp_path, prompts_per_update=prompts, num_generations=size))
    named = int(re.search(r"to at least (\d+)", str(refused.value)).group(1))
    MuGRPOConfig(**config_options(tmp_path, prompts_per_update=named, num_generations=size))
    with pytest.raises(ValueError, match="ranks"):
        MuGRPOConfig(**config_options(tmp_path, prompts_per_update=named - 1 or 1, num_generations=size))


# What a run leaves behind


def test_intervals_add_up_and_the_summary_says_where_the_time_went(undisturbed):
    summary = json.loads((undisturbed.folder / "summary.json").read_text())
    assert summary["num_updates"] == 10
    assert summary["num_stages"] == 3
    assert 0 < summary["rollout_s"] < summary["total_s"]
    parts = sum(summary[f"{kind}_s"] for kind in KINDS if kind not in ("rollout", "reward", "evaluation"))
    assert abs(parts + summary["rollout_s"] - summary["total_s"]) <= 0.01 * summary["total_s"]
    runtime = undisturbed.trainer.state.log_history[-1]["train_runtime"]
    assert runtime * 0.99 < summary["total_s"] + summary["evaluation_s"]
    assert summary["responses"] == 10 * 16
    tokens = [
        row
        for stage in range(3)
        for row in load_stage(undisturbed.folder / f"stages/stage-00{stage}")["completion_ids"]
    ]
    assert summary["generated_tokens"] == sum(map(len, tokens))


def test_a_resumed_run_reports_the_time_of_its_first_part_too(policy, undisturbed, tmp_path):
    shutil.copytree(undisturbed.folder, tmp_path, dirs_exist_ok=True)
    train(long(policy, tmp_path), resume=str(tmp_path / "checkpoint-8"))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["updates"] == 10
    state = json.loads((tmp_path / "checkpoint-8/trainer_state.json").read_text())
    before = state["stateful_callbacks"]["StageCallback"]["attributes"]["telemetry"]
    assert summary["optimize_s"] > before["seconds"]["optimize"] > 0
    assert before["counts"]["updates"] == 8


def test_old_stages_and_policies_are_removed_as_configured(policy, tmp_path):
    train(short(policy, tmp_path, max_steps=8, keep_stages=2, keep_policies=1))
    assert sorted(path.name for path in tmp_path.glob("stages/stage-*")) == ["stage-001", "stage-002", "stage-003"]
    assert [path.parent.parent.name for path in tmp_path.glob("stages/stage-*/policy/*.safetensors*")] == ["stage-003"]
    assert len(list(tmp_path.glob("stages/stage-*/policy/tokenizer.json"))) == 3
    assert not list(tmp_path.glob("stages/.meeting-*"))


def test_b36_completions_are_logged_once_a_stage_in_a_bounded_table(policy, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(completion_report, "MAX_ROWS", 12)
    monkeypatch.setattr(completion_report, "MAX_CELL_CHARACTERS", 10)
    written = []
    to_parquet = pd.DataFrame.to_parquet
    monkeypatch.setattr(
        pd.DataFrame,
        "to_parquet",
        lambda table, path, **kw: written.append(Path(path).name) or to_parquet(table, path, **kw),
    )
    spec = short(policy, tmp_path, max_steps=4, log_completions=True, num_completions_to_print=3)
    trainer = train(spec)
    assert written == ["stage-000.parquet", "stage-001.parquet"]
    assert sorted(path.name for path in (tmp_path / "completions").iterdir()) == written
    table = pd.read_parquet(tmp_path / "completions/stage-001.parquet")
    stage = StageReader(tmp_path / "stages/stage-001")
    assert len(table) == 12 and table["group"].nunique() == 3 and set(table["stage"]) == {1}
    for row in table.itertuples():
        response = stage.response(row.group, row.sample)
        text = trainer.processing_class.decode(response.completion_ids)
        assert row.completion == (text[:10] + "…" if len(text) > 10 else text)
        assert len(row.prompt) <= 11
        assert row.advantage == pytest.approx(response.advantage)
        assert row.digit_share == row.reward == stage.rewards([row.group])[0, row.sample]
    printed = capsys.readouterr().out
    assert printed.count("Step 0") == printed.count("Step 2") == 1
    assert printed.count("├") == 2 * 2  # three rows in each of two tables


def test_b36_one_response_of_each_prompt_on_request(policy, tmp_path):
    train(short(policy, tmp_path, log_completions=True, log_unique_prompts=True))
    table = pd.read_parquet(tmp_path / "completions/stage-000.parquet")
    assert table["prompt"].is_unique and set(table["sample"]) == {0}


def test_b36_the_table_goes_to_an_active_tracker(policy, undisturbed, tmp_path, monkeypatch):
    sent = []
    tracker = types.ModuleType("trackio")
    tracker.Table, tracker.log = (lambda dataframe: dataframe), sent.append
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    config = MuGRPOConfig(**config_options(tmp_path))
    config.report_to = ["wandb", "trackio"]  # no run of W&B is active
    reader = StageReader(undisturbed.folder / "stages/stage-000")
    path = completion_report.log_stage_completions(reader, make_tokenizer(), config)
    assert [list(entry) for entry in sent] == [["completions"]]
    pd.testing.assert_frame_equal(sent[0]["completions"], pd.read_parquet(path))


class StopAt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 1


def test_a_run_that_is_stopped_within_a_stage_can_go_on(policy, tmp_path):
    spec = short(policy, tmp_path / "stopped", save_strategy="steps", save_steps=1)
    make_trainer(spec, callbacks=[StopAt()]).train()
    resumed = train(spec, resume=True)
    assert_equal_weights(whole_weights(resumed), whole_weights(train(short(policy, tmp_path / "whole"))))
    assert AutoTokenizer.from_pretrained(tmp_path / "stopped/checkpoint-2").pad_token == "<pad>"
    assert LoraConfig(**LORA).lora_dropout == 0.05
