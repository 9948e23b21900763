"""The stage on disk: what is written is read back, and nothing that a kill, a disk or a hand did to it is trusted."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mu_grpo_trl.stage import (
    GroupRollout,
    Manifest,
    ResponseRow,
    StageError,
    StageReader,
    StageWriter,
    load_stage,
    read_manifest,
)
from mu_grpo_trl.stage.repair import check_stage
from mu_grpo_trl.stage.schema import SCHEMA_VERSION, shard_paths

fork = multiprocessing.get_context("fork")


def make_manifest(**changes) -> Manifest:
    """Two updates of three groups of two responses."""
    values = {
        "stage": 0,
        "seed": 42,
        "num_updates": 2,
        "num_generations": 2,
        "prompts_per_update": 3,
        "prompt_indices": (10, 11, 12, 13, 14, 15),
        "dataset_hash": "d",
        "tokenizer_hash": "t",
        "sampling": {"temperature": 0.6, "stop": ["</answer>"]},
        "engine": "vllm",
        "engine_version": "0.22",
        "policy_hash": "p",
        "policy_version": "step-0",
        "published_step": 0,
        "run_id": "run",
        "reward_names": ("accuracy", "format"),
    }
    return Manifest(**(values | changes))


def make_row(group: int, sample: int, **changes) -> ResponseRow:
    length = 1 + (group + sample) % 3
    values = {
        "completion_ids": np.arange(length, dtype=np.int32) + 100 * group,
        "behavior_logps": np.full(length, -0.5 * (sample + 1), dtype=np.float32),
        "rewards": {"accuracy": float(sample), "format": 0.5},
        "reward": sample + 0.5,
        "advantage": 1.0 if sample else -1.0,
        "finish_reason": "stop" if sample else "length",
    }
    return ResponseRow(**(values | changes))


def make_group(group: int, rows: list[ResponseRow] | None = None, **changes) -> GroupRollout:
    values = {
        "group": group,
        "prompt_index": 10 + group,
        "prompt_ids": np.arange(2 + group, dtype=np.int32),
        "policy_version": "step-0",
        "responses": rows or [make_row(group, 0), make_row(group, 1)],
    }
    return GroupRollout(**(values | changes))


EMPTY = make_row(1, 1, completion_ids=np.zeros(0, np.int32), behavior_logps=np.zeros(0, np.float32))


def fill_stage(path: Path, manifest: Manifest | None = None, shards=((0, 1), (5, 2), (4, 3))) -> Manifest:
    manifest = manifest or make_manifest()
    writer = StageWriter.create(path, manifest)
    for groups in shards:
        writer.append([make_group(group) for group in groups])
    writer.complete()
    return manifest


def flip_bit(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def rss_anon_mib() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


# What is written is what is read


def test_a_stage_gives_back_every_row_as_it_was_written_whatever_the_order_of_completion(tmp_path):
    fill_stage(tmp_path)
    stage = StageReader(tmp_path, verify=True)
    assert len(stage) == 6
    assert stage.groups.tolist() == [0, 1, 2, 3, 4, 5]
    for group in range(6):
        for sample in range(2):
            response, row = stage.response(group, sample), make_row(group, sample)
            assert response.prompt_ids.tolist() == list(range(2 + group))
            assert response.completion_ids.tolist() == list(row.completion_ids)
            assert response.behavior_logps.tolist() == list(row.behavior_logps)
            assert response.advantage == row.advantage


def test_lengths_advantages_and_rewards_come_in_the_order_asked_for(tmp_path):
    fill_stage(tmp_path)
    stage = StageReader(tmp_path)
    prompt_lengths, completion_lengths = stage.lengths([5, 0, 3])
    assert prompt_lengths.tolist() == [[7, 7], [2, 2], [5, 5]]
    assert completion_lengths.tolist() == [[3, 1], [1, 2], [1, 2]]
    assert stage.advantages([5, 0]).tolist() == [[-1.0, 1.0], [-1.0, 1.0]]
    assert stage.advantages([5]).dtype == np.float32
    assert stage.rewards([2, 4]).tolist() == [[0.5, 1.5], [0.5, 1.5]]
    assert stage.rewards([2], "accuracy").tolist() == [[0.0, 1.0]]
    assert stage.truncated([5, 0]).tolist() == [[True, False], [True, False]]
    assert stage.lengths([])[0].shape == (0, 2)


def test_rewards_of_a_group_in_the_middle_of_a_shard_are_its_own(tmp_path):
    writer = StageWriter.create(tmp_path, make_manifest())
    scored = [[make_row(g, s, rewards={"accuracy": 10.0 * g + s, "format": -g}) for s in range(2)] for g in range(6)]
    writer.append([make_group(g, scored[g]) for g in (3, 1, 0, 2, 5, 4)])
    writer.complete()
    stage = StageReader(tmp_path)
    assert stage.rewards([2, 3, 4], "accuracy").tolist() == [[20, 21], [30, 31], [40, 41]]
    assert stage.rewards([5], "format").tolist() == [[-5, -5]]


def test_responses_are_read_only_views_into_the_file_that_outlive_the_reader(tmp_path):
    fill_stage(tmp_path)
    response = StageReader(tmp_path).response(3, 1)
    assert not response.completion_ids.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        response.behavior_logps[0] = 0.0
    shutil.rmtree(tmp_path / "groups")
    assert response.completion_ids.tolist() == [300, 301]


def test_plain_lists_and_numpy_arrays_are_stored_alike(tmp_path):
    rows = [make_row(0, s, completion_ids=[7, 8], behavior_logps=[-1.5, -0.25]) for s in range(2)]
    writer = StageWriter.create(tmp_path, make_manifest())
    writer.append([make_group(0, rows, prompt_ids=[1, 2, 3])])
    response = StageReader(tmp_path, allow_filling=True).response(0, 1)
    assert response.prompt_ids.tolist() == [1, 2, 3]
    assert response.completion_ids.dtype == np.int32
    assert response.behavior_logps.dtype == np.float32
    assert response.behavior_logps.tolist() == [-1.5, -0.25]


rows_of_a_stage = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
        st.lists(st.tuples(st.integers(0, 2**31 - 1), st.one_of(st.none(), st.floats(-30, 0, width=32))), max_size=6),
        st.floats(-5, 5, width=32),
    ),
    min_size=12,
    max_size=12,
)


@settings(max_examples=25, deadline=None)
@given(rows=rows_of_a_stage, order=st.permutations(range(6)), cuts=st.sets(st.integers(1, 5)))
def test_any_rows_in_any_order_of_shards_survive_the_disk(tmp_path_factory, rows, order, cuts):
    path = tmp_path_factory.mktemp("stage")
    writer = StageWriter.create(path, make_manifest())
    expected = {}
    groups = []
    for group in order:
        responses = []
        for sample in range(2):
            _, tokens, advantage = rows[2 * group + sample]
            tokens = [*tokens, (9, -1.0)]
            ids, logps = [t for t, _ in tokens], [b for _, b in tokens]
            responses.append(make_row(group, sample, completion_ids=ids, behavior_logps=logps, advantage=advantage))
            expected[group, sample] = (ids, logps, advantage)
        groups.append(make_group(group, responses, prompt_ids=rows[2 * group][0]))
    edges = [0, *sorted(cuts), 6]
    for start, stop in zip(edges, edges[1:], strict=False):
        writer.append(groups[start:stop])
    writer.complete()
    stage = StageReader(path, verify=True)
    for (group, sample), (ids, logps, advantage) in expected.items():
        response = stage.response(group, sample)
        assert response.prompt_ids.tolist() == rows[2 * group][0]
        assert response.completion_ids.tolist() == ids
        assert [None if math.isnan(b) else b for b in response.behavior_logps.tolist()] == logps
        assert response.advantage == advantage


def test_b16_a_missing_log_prob_is_stored_as_nan_never_as_zero(tmp_path):
    rows = [make_row(0, s, completion_ids=[5, 6, 7], behavior_logps=[-0.7, None, -1.2]) for s in range(2)]
    writer = StageWriter.create(tmp_path, make_manifest())
    writer.append([make_group(0, rows)])
    logps = StageReader(tmp_path, allow_filling=True).response(0, 0).behavior_logps
    np.testing.assert_array_equal(logps, np.array([-0.7, np.nan, -1.2], dtype=np.float32))
    dataset = load_stage(tmp_path, allow_filling=True)
    assert dataset.data.column("behavior_logps").chunk(0).values.null_count == 0


def test_b16_a_response_without_any_usable_log_prob_is_refused(tmp_path):
    writer = StageWriter.create(tmp_path, make_manifest())
    for garbage in ([math.nan, math.nan], [None, None], [-9999.0, -9999.0], [-math.inf, None], [-1e39, None]):
        rows = [make_row(0, 0), make_row(0, 1, completion_ids=[1, 2], behavior_logps=garbage)]
        with pytest.raises(StageError, match="group 0 sample 1: none of its 2 behavior_logps is usable"):
            writer.append([make_group(0, rows)])
    assert shard_paths(tmp_path) == []


def test_logits_in_place_of_log_probs_are_refused(tmp_path):
    rows = [make_row(0, 0), make_row(0, 1, completion_ids=[1, 2], behavior_logps=[-1.0, 14.5])]
    with pytest.raises(StageError, match=r"up to 14\.5.*processed_logprobs"):
        StageWriter.create(tmp_path, make_manifest()).append([make_group(0, rows)])


@pytest.mark.parametrize("unscorable", [None, math.nan, math.inf, -math.inf])
def test_every_way_to_say_unscorable_is_null_on_disk(tmp_path, unscorable):
    rows = [
        make_row(0, 0, rewards={"accuracy": unscorable, "format": 1.0}, reward=unscorable, advantage=0.0),
        make_row(0, 1),
    ]
    StageWriter.create(tmp_path, make_manifest()).append([make_group(0, rows)])
    stage = StageReader(tmp_path, allow_filling=True)
    assert np.isnan(stage.rewards([0])).tolist() == [[True, False]]
    assert np.isnan(stage.rewards([0], "accuracy")).tolist() == [[True, False]]
    row = load_stage(tmp_path, allow_filling=True)[0]
    assert row["reward"] is None
    assert row["rewards"] == {"accuracy": None, "format": 1.0}


# What is refused on writing

REFUSED = {
    "behavior_logps of shape (1,)": {"completion_ids": [1, 2], "behavior_logps": [-1.0]},
    "behavior_logps of shape (3,)": {"completion_ids": [1, 2], "behavior_logps": [-1.0, -1.0, -1.0]},
    "completion_ids has shape (0,)": {"completion_ids": [], "behavior_logps": []},
    "completion_ids has shape (1, 2)": {"completion_ids": [[1, 2]]},
    "completion_ids holds float64": {"completion_ids": [1.5]},
    "completion_ids holds int64 from -1": {"completion_ids": [-1]},
    "token ids are int32": {"completion_ids": [2**31]},
    "advantage nan": {"advantage": math.nan},
    "advantage inf": {"advantage": math.inf},
    "advantage None": {"advantage": None},
    "advantage -1.0 without a reward": {"advantage": -1.0, "reward": None},
    "rewards of ['accuracy']": {"rewards": {"accuracy": 1.0}},
    "rewards of ['accuracy', 'format', 'length']": {"rewards": {"accuracy": 1.0, "format": 1.0, "length": 0.0}},
    "finish_reason 'abort'": {"finish_reason": "abort"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_row_that_breaks_the_format_is_refused_and_nothing_is_written(tmp_path, message):
    changes = {"completion_ids": [1], "behavior_logps": [-1.0]} | REFUSED[message]
    writer = StageWriter.create(tmp_path, make_manifest())
    with pytest.raises(StageError) as error:
        writer.append([make_group(0), make_group(1, [make_row(1, 0), make_row(1, 1, **changes)])])
    assert message in str(error.value)
    assert "group 1 sample 1" in str(error.value)
    assert list((tmp_path / "groups").iterdir()) == []
    assert writer.done_groups == set()


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (make_group(6), "group 6: this stage has groups 0…5"),
        (make_group(-1), "group -1"),
        (make_group(2, prompt_index=11), "prompt_index 11, but the manifest gives it row 12"),
        (make_group(2, [make_row(2, 0)]), "1 responses instead of num_generations=2"),
        (make_group(2, prompt_ids=[]), "group 2 prompt_ids has shape"),
        (make_group(2, policy_version="step-7"), "generated by policy 'step-7'.*'step-0'"),
    ],
)
def test_a_group_that_is_not_of_the_stage_is_refused(tmp_path, group, message):
    with pytest.raises(StageError, match=message):
        StageWriter.create(tmp_path, make_manifest()).append([group])
    assert shard_paths(tmp_path) == []


def test_a_group_is_written_once(tmp_path):
    writer = StageWriter.create(tmp_path, make_manifest())
    with pytest.raises(StageError, match="group 3 is in"):
        writer.append([make_group(3), make_group(3)])
    writer.append([make_group(3)])
    with pytest.raises(StageError, match="group 3 is in"):
        writer.append([make_group(2), make_group(3)])
    assert writer.done_groups == {3}
    assert len(shard_paths(tmp_path)) == 1


def test_appending_nothing_writes_nothing(tmp_path):
    StageWriter.create(tmp_path, make_manifest()).append([])
    assert list((tmp_path / "groups").iterdir()) == []


def test_threads_may_append_at_once(tmp_path):
    writer = StageWriter.create(tmp_path, make_manifest())
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda group: writer.append([make_group(group)]), range(6)))
    writer.complete()
    assert StageReader(tmp_path, verify=True).lengths(range(6))[0][:, 0].tolist() == [2, 3, 4, 5, 6, 7]


def test_threads_that_race_for_one_group_write_it_once(tmp_path):
    writer = StageWriter.create(tmp_path, make_manifest())

    def append(_) -> bool:
        try:
            writer.append([make_group(0)])
        except StageError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(append, range(8))) == 1
    assert len(shard_paths(tmp_path)) == 1


# The life of a stage


def test_a_stage_is_complete_only_when_every_group_is_there(tmp_path):
    writer = StageWriter.create(tmp_path, make_manifest())
    writer.append([make_group(group) for group in (0, 1, 2, 4)])
    with pytest.raises(StageError, match="lacks 2 of 6 groups, 3 first"):
        writer.complete()
    with pytest.raises(StageError, match="still filling"):
        StageReader(tmp_path)
    writer.append([make_group(3), make_group(5)])
    writer.complete()
    assert read_manifest(tmp_path).status == "complete"
    assert len(StageReader(tmp_path)) == 6


def test_a_complete_stage_takes_no_more_groups_and_resumes_as_complete(tmp_path):
    manifest = fill_stage(tmp_path)
    writer = StageWriter.resume(tmp_path, manifest)
    assert writer.done_groups == set(range(6))
    with pytest.raises(StageError, match="complete: nothing can be appended"):
        writer.append([make_group(0)])
    writer.complete()
    assert read_manifest(tmp_path).status == "complete"


def test_only_the_groups_there_can_be_read_of_a_filling_stage(tmp_path):
    StageWriter.create(tmp_path, make_manifest()).append([make_group(4)])
    stage = StageReader(tmp_path, allow_filling=True)
    assert stage.groups.tolist() == [4]
    for group in (0, 6, -1):
        with pytest.raises(StageError, match=f"group {group} is not in"):
            stage.response(group, 0)
    with pytest.raises(StageError, match="sample 2"):
        stage.response(4, 2)
    with pytest.raises(StageError, match="sample -1"):
        stage.response(4, -1)
    with pytest.raises(StageError, match="reward 'length'"):
        stage.rewards([4], "length")


def test_create_accepts_a_folder_with_the_policy_and_refuses_one_with_a_stage(tmp_path):
    (tmp_path / "policy").mkdir()
    StageWriter.create(tmp_path, make_manifest()).close()
    with pytest.raises(StageError, match="holds a stage already"):
        StageWriter.create(tmp_path, make_manifest())


def test_resume_starts_a_stage_where_there_is_none(tmp_path):
    writer = StageWriter.resume(tmp_path / "stages" / "stage-000", make_manifest())
    assert writer.done_groups == set()
    assert read_manifest(writer.path) == make_manifest()


def test_a_summary_counts_what_an_engineer_wants_to_know(tmp_path):
    manifest = make_manifest(num_updates=1, prompts_per_update=2, prompt_indices=(10, 11))
    writer = StageWriter.create(tmp_path, manifest)
    writer.append([make_group(0)])  # lengths 1 (cut) and 2, rewards 0.5 and 1.5
    flat = {"completion_ids": [1, 2, 3], "behavior_logps": [-1.0, None, -2000.0], "advantage": 0.0}
    unscored = {"reward": None, "rewards": {"accuracy": None, "format": 0.5}}
    writer.append([make_group(1, [make_row(1, 0, **flat), make_row(1, 1, **flat, **unscored)])])
    writer.complete()
    summary = StageReader(tmp_path).summary()
    assert dataclasses.asdict(summary) == {
        "num_groups": 2,
        "num_responses": 4,
        "num_tokens": 9,
        "tokens_without_logp": 4,
        "mean_length": 2.25,
        "mean_reward": pytest.approx((0.5 + 1.5 + 0.5) / 3),
        "mean_rewards": {"accuracy": pytest.approx(1 / 3), "format": 0.5},
        "unscorable_responses": 1,
        "truncated_share": 0.5,
        "zero_advantage_group_share": 0.5,
    }


def test_a_summary_of_an_empty_stage_has_no_means(tmp_path):
    StageWriter.create(tmp_path, make_manifest())
    summary = StageReader(tmp_path, allow_filling=True).summary()
    assert summary.num_tokens == 0
    assert math.isnan(summary.mean_length)
    assert math.isnan(summary.mean_rewards["accuracy"])


def test_b38_reading_a_stage_takes_no_memory_of_its_size(tmp_path):
    manifest = make_manifest()
    writer = StageWriter.create(tmp_path, manifest)
    ids, logps = np.zeros(500_000, dtype=np.int32), np.full(500_000, -1.0, dtype=np.float32)
    for group in range(6):  # 48 MB in all
        rows = [make_row(group, s, completion_ids=ids, behavior_logps=logps) for s in range(2)]
        writer.append([make_group(group, rows)])
    writer.complete()
    before = rss_anon_mib()
    stage = StageReader(tmp_path)
    held = [stage.response(group, sample) for group in range(6) for sample in range(2)]
    assert sum(float(response.behavior_logps.sum(dtype=np.float64)) for response in held) == -6_000_000.0
    assert rss_anon_mib() - before < 6


# Kills, disks and hands


@pytest.fixture
def warnings_of_stage(caplog):
    caplog.set_level(logging.WARNING, logger="mu_grpo_trl.stage")
    return caplog


def test_b31_a_shard_cut_short_is_set_aside_and_only_its_groups_are_missing(tmp_path, warnings_of_stage):
    manifest = fill_stage(tmp_path)
    victim = shard_paths(tmp_path)[2]
    os.truncate(victim, victim.stat().st_size - 100)
    with pytest.raises(StageError, match="resume sets it aside"):
        StageReader(tmp_path, verify=True)
    writer = StageWriter.resume(tmp_path, manifest)
    assert writer.done_groups == {0, 1, 2, 5}
    assert len(warnings_of_stage.records) == 1
    assert victim.name in warnings_of_stage.text
    assert victim.with_name(victim.name + ".rejected").exists()
    assert read_manifest(tmp_path).status == "filling"
    writer.append([make_group(3), make_group(4)])
    writer.complete()
    assert len(StageReader(tmp_path, verify=True)) == 6


@pytest.mark.parametrize("kept", [0, 7, 500])
def test_b31_a_shard_of_which_hardly_anything_is_left_is_refused_even_without_verifying(tmp_path, kept):
    fill_stage(tmp_path)
    os.truncate(shard_paths(tmp_path)[0], kept)
    with pytest.raises(StageError, match="truncated or corrupt|record batches"):
        StageReader(tmp_path)


def test_b31_any_flipped_bit_is_found_by_verifying(tmp_path):
    manifest = fill_stage(tmp_path)
    victim = shard_paths(tmp_path)[1]
    generator = random.Random(0)
    for _ in range(40):
        bit = generator.randrange(8 * victim.stat().st_size)
        flip_bit(victim, bit)
        with pytest.raises(StageError, match="do not match the digest"):
            StageReader(tmp_path, verify=True)
        flip_bit(victim, bit)
    StageReader(tmp_path, verify=True)
    flip_bit(victim, 4000)
    assert StageWriter.resume(tmp_path, manifest).done_groups == {0, 1, 3, 4}


def test_b31_leftovers_of_a_killed_write_are_removed_and_never_read(tmp_path):
    manifest = make_manifest()
    StageWriter.create(tmp_path, manifest).append([make_group(0)])
    shard = shard_paths(tmp_path)[0]
    shutil.copy(shard, shard.with_name("r0-000001-" + "0" * 32 + ".arrow.tmp"))
    (tmp_path / "manifest.json.tmp").write_text("{")
    assert StageReader(tmp_path, allow_filling=True).groups.tolist() == [0]
    writer = StageWriter.resume(tmp_path, manifest)
    assert writer.done_groups == {0}
    assert [path.name for path in (tmp_path / "groups").iterdir()] == [shard.name]
    assert not (tmp_path / "manifest.json.tmp").exists()


@pytest.mark.parametrize("damage", ["", '{"stage": 0, "se', "\xff\xfe"])
def test_b31_a_lost_manifest_is_written_again_and_the_shards_of_its_stage_kept(tmp_path, damage, warnings_of_stage):
    manifest = fill_stage(tmp_path)
    (tmp_path / "manifest.json").write_bytes(damage.encode("latin-1"))
    if not damage:
        (tmp_path / "manifest.json").unlink()
    with pytest.raises(StageError, match=r"manifest\.json"):
        StageReader(tmp_path)
    writer = StageWriter.resume(tmp_path, manifest)
    assert len(warnings_of_stage.records) == 1
    assert writer.done_groups == set(range(6))
    writer.complete()
    assert StageReader(tmp_path).manifest == manifest.with_status("complete")


def test_b31_a_lost_manifest_does_not_make_another_runs_shards_ours(tmp_path, warnings_of_stage):
    fill_stage(tmp_path, make_manifest(run_id="older run"))
    (tmp_path / "manifest.json").unlink()
    assert StageWriter.resume(tmp_path, make_manifest()).done_groups == set()
    assert len(warnings_of_stage.records) == 1 + 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run_id": "another"}, "run_id: 'run' → 'another'"),
        ({"seed": 43}, "seed: 42 → 43"),
        ({"policy_hash": "q"}, "policy_hash: 'p' → 'q'"),
        ({"sampling": {"temperature": 0.8, "stop": ["</answer>"]}}, "sampling['temperature']: 0.6 → 0.8"),
        ({"sampling": {"temperature": 0.6}}, "sampling['stop']: ['</answer>'] → 'absent'"),
        ({"prompt_indices": (10, 11, 99, 13, 14, 15)}, "prompt_indices[2]: 12 → 99"),
        ({"num_updates": 1, "prompt_indices": (10, 11, 12)}, "num_updates: 2 → 1"),
    ],
)
def test_b31_a_stage_of_another_run_or_setting_is_not_used_and_the_field_is_named(tmp_path, change, message):
    fill_stage(tmp_path)
    for use in (StageWriter.resume, lambda path, manifest: StageWriter.join(path, manifest, rank=1)):
        with pytest.raises(StageError) as error:
            use(tmp_path, make_manifest(**change))
        assert message in str(error.value)
    assert len(StageReader(tmp_path, verify=True)) == 6


def test_an_edited_manifest_does_not_fit_the_shards_any_more(tmp_path):
    fill_stage(tmp_path)
    values = json.loads((tmp_path / "manifest.json").read_text())
    values["sampling"]["temperature"] = 1.0
    (tmp_path / "manifest.json").write_text(json.dumps(values))
    with pytest.raises(StageError, match="the manifest was edited"):
        StageReader(tmp_path)


def test_a_manifest_marked_complete_by_hand_is_not_believed(tmp_path):
    StageWriter.create(tmp_path, make_manifest()).append([make_group(0)])
    text = (tmp_path / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(text.replace("filling", "complete"))
    with pytest.raises(StageError, match="marked complete but lacks 5 of 6 groups, 1 first"):
        StageReader(tmp_path)
    assert StageWriter.resume(tmp_path, make_manifest()).done_groups == {0}
    assert read_manifest(tmp_path).status == "filling"


def test_a_removed_shard_is_noticed_and_its_groups_are_generated_again(tmp_path):
    manifest = fill_stage(tmp_path)
    shard_paths(tmp_path)[0].unlink()
    with pytest.raises(StageError, match="lacks 2 of 6 groups, 0 first"):
        StageReader(tmp_path)
    assert StageWriter.resume(tmp_path, manifest).done_groups == {2, 3, 4, 5}


def test_b31_a_shard_of_another_stage_copied_in_is_not_used(tmp_path, warnings_of_stage):
    manifest = make_manifest()
    fill_stage(tmp_path / "other", make_manifest(stage=1), shards=[range(6)])
    StageWriter.create(tmp_path / "mine", manifest).append([make_group(0)])
    shutil.copy(shard_paths(tmp_path / "other")[0], tmp_path / "mine" / "groups")
    with pytest.raises(StageError, match="copied in from another stage"):
        StageReader(tmp_path / "mine", allow_filling=True)
    assert StageWriter.resume(tmp_path / "mine", manifest).done_groups == {0}
    assert len(warnings_of_stage.records) == 1


def test_a_shard_with_a_foreign_name_is_not_trusted(tmp_path):
    manifest = fill_stage(tmp_path)
    shard = shard_paths(tmp_path)[0]
    shard.rename(shard.with_name("shard.arrow"))
    with pytest.raises(StageError, match="digest in its name"):
        StageReader(tmp_path, verify=True)
    assert StageWriter.resume(tmp_path, manifest).done_groups == {2, 3, 4, 5}


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            [make_group(1, [make_row(1, 0), make_row(1, 1, behavior_logps=np.zeros(2, np.float32))])],
            "row 1 has not as",
        ),
        ([make_group(1, [make_row(1, 0)])], "not whole groups of 2 samples"),
        ([make_group(1, [make_row(1, 0)] * 3)], "not whole groups of 2 samples"),
        ([make_group(1, [make_row(1, 0)] * 3), make_group(2, [make_row(2, 0)])], "not whole groups of 2 samples"),
        ([make_group(1), make_group(1)], "groups are mixed, or one is there twice"),
        ([make_group(7)], "holds a group outside 0…5"),
        ([make_group(1, prompt_ids=np.zeros(0, np.int32))], "empty prompt or response"),
        ([make_group(1, [make_row(1, 0), EMPTY])], "empty prompt or response"),
    ],
)
def test_the_reader_relies_on_no_writer_for_the_invariants(tmp_path, monkeypatch, groups, message):
    writer = StageWriter.create(tmp_path, make_manifest())
    monkeypatch.setattr("mu_grpo_trl.stage.writer._checked_group", lambda group, manifest: group)
    monkeypatch.setattr("mu_grpo_trl.stage.writer.Counter", lambda ids: dict.fromkeys(ids, 1))
    writer.append(groups)
    writer.close()
    with pytest.raises(StageError, match=message):
        StageReader(tmp_path, verify=True, allow_filling=True)
    assert StageWriter.resume(tmp_path, make_manifest()).done_groups == set()


def test_b31_two_writers_cannot_fill_one_stage(tmp_path):
    writer = StageWriter.create(tmp_path, make_manifest())
    with pytest.raises(StageError, match="being filled by another writer"):
        StageWriter.resume(tmp_path, make_manifest())
    with pytest.raises(StageError, match="being filled by another writer"):
        StageWriter.create(tmp_path, make_manifest())
    writer.close()
    with pytest.raises(StageError, match="this writer was closed"):
        writer.append([make_group(0)])
    with pytest.raises(StageError, match="this writer was closed"):
        writer.complete()
    assert StageWriter.resume(tmp_path, make_manifest()).done_groups == set()


def test_a_writer_that_is_forgotten_gives_up_its_lock(tmp_path):
    StageWriter.create(tmp_path, make_manifest())
    StageWriter.resume(tmp_path, make_manifest())


def test_ranks_write_side_by_side(tmp_path):
    manifest = make_manifest()
    main = StageWriter.create(tmp_path, manifest)
    main.append([make_group(0)])
    helper = StageWriter.join(tmp_path, manifest, rank=3)
    assert helper.done_groups == {0}
    helper.append([make_group(1), make_group(2)])
    helper.append([make_group(5)])
    main.append([make_group(3), make_group(4)])
    with pytest.raises(StageError, match="rank 3 cannot complete"):
        helper.complete()
    main.complete()
    assert [path.name[:9] for path in shard_paths(tmp_path)] == ["r0-000000", "r0-000001", "r3-000000", "r3-000001"]
    assert len(StageReader(tmp_path, verify=True)) == 6


def test_a_group_that_two_ranks_wrote_is_noticed_and_one_shard_of_them_set_aside(tmp_path, warnings_of_stage):
    manifest = make_manifest()
    main = StageWriter.create(tmp_path, manifest)
    helper = StageWriter.join(tmp_path, manifest, rank=1)
    main.append([make_group(group) for group in (0, 1, 2, 3)])
    helper.append([make_group(group) for group in (3, 4, 5)])
    with pytest.raises(StageError, match="group 3 is in another shard too"):
        main.complete()
    with pytest.raises(StageError, match="group 3 is in the stage twice"):
        StageReader(tmp_path, allow_filling=True)
    main.close()
    assert StageWriter.resume(tmp_path, manifest).done_groups == {0, 1, 2, 3}
    assert len(warnings_of_stage.records) == 1


def test_b31_a_rank_whose_folder_is_not_shared_is_told_so(tmp_path):
    with pytest.raises(StageError, match="not shared with this machine"):
        StageWriter.join(tmp_path / "local disk", make_manifest(), rank=1)
    with pytest.raises(StageError, match="not shared with this machine"):
        StageReader(tmp_path / "local disk")


def test_shards_continue_their_numbers_after_a_resume(tmp_path):
    manifest = make_manifest()
    for group in range(3):
        writer = StageWriter.resume(tmp_path, manifest)
        writer.append([make_group(group)])
        writer.close()
    assert [path.name[:9] for path in shard_paths(tmp_path)] == ["r0-000000", "r0-000001", "r0-000002"]


MANY = make_manifest(num_updates=10, prompt_indices=tuple(range(10, 40)))


def make_big_group(group: int) -> GroupRollout:
    length = 100_000 + group
    ids, logps = np.full(length, group, dtype=np.int32), np.full(length, -1.0, dtype=np.float32)
    return make_group(group, [make_row(group, s, completion_ids=ids, behavior_logps=logps) for s in range(2)])


def fill_the_rest(path: Path) -> None:
    writer = StageWriter.resume(path, MANY)
    for group in range(MANY.num_groups):
        if group not in writer.done_groups:
            writer.append([make_big_group(group)])
    writer.complete()


def die_at_call(path: Path, function: str, call: int) -> None:
    """Fill the stage, but die just before the given call of `os.<function>`."""
    real, calls = getattr(os, function), iter(range(call))

    def counted(*arguments):
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    setattr(os, function, counted)
    fill_the_rest(path)


def run_and_reap(target, *arguments, seconds: float | None = None) -> int | None:
    process = fork.Process(target=target, args=arguments)
    process.start()
    process.join(seconds)
    process.kill()
    process.join()
    return process.exitcode


def groups_on_disk(path: Path) -> set[int]:
    if not (path / "manifest.json").exists():
        return set()
    return set(StageReader(path, verify=True, allow_filling=True).groups.tolist())


def test_b31_a_stage_survives_kill_9_at_any_moment(tmp_path):
    generator = random.Random(7)
    there: set[int] = set()
    for _ in range(60):
        exit_code = run_and_reap(fill_the_rest, tmp_path, seconds=generator.uniform(0.002, 0.04))
        if exit_code == 0:
            break
        assert exit_code == -signal.SIGKILL
        assert groups_on_disk(tmp_path) >= there  # nothing that was on the disk is lost, nothing there is broken
        there = groups_on_disk(tmp_path)
    else:
        fill_the_rest(tmp_path)
    stage = StageReader(tmp_path, verify=True)
    assert not list(tmp_path.glob("**/*.rejected"))
    assert stage.lengths(range(30))[1].tolist() == [[100_000 + group] * 2 for group in range(30)]
    assert all(stage.response(group, 1).completion_ids[-1] == group for group in range(30))


# Each write is fsync, replace, fsync of the folder: the manifest's first, then a shard's per group.
@pytest.mark.parametrize(("function", "groups"), [("fsync", [0, 0, 0, 1, 1, 2]), ("replace", [0, 0, 1, 2, 3, 4])])
def test_b31_a_stage_survives_a_death_before_every_step_of_its_writes(tmp_path, function, groups):
    for call, count in enumerate(groups):
        path = tmp_path / str(call)
        assert run_and_reap(die_at_call, path, function, call) == -signal.SIGKILL
        assert groups_on_disk(path) == set(range(count))
        writer = StageWriter.resume(path, MANY)
        assert writer.done_groups == set(range(count))
        assert not list(path.glob("**/*.tmp"))
        writer.close()


def hold_a_writer_and_a_child(path: Path, ready) -> None:
    writer = StageWriter.create(path, make_manifest())
    orphan = fork.Process(target=time.sleep, args=(60,))
    orphan.start()
    ready.put(orphan.pid)
    time.sleep(60)
    writer.close()


def test_an_orphan_of_a_killed_run_does_not_keep_the_stage_locked(tmp_path):
    ready = fork.Queue()
    process = fork.Process(target=hold_a_writer_and_a_child, args=(tmp_path, ready))
    process.start()
    orphan = ready.get(timeout=30)
    try:
        with pytest.raises(StageError, match="being filled by another writer"):
            StageWriter.resume(tmp_path, make_manifest())
        process.kill()
        process.join()
        os.kill(orphan, 0)
        StageWriter.resume(tmp_path, make_manifest())
    finally:
        os.kill(orphan, signal.SIGKILL)


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a tmpfs: {error}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_b31_a_full_disk_is_one_clear_error_and_costs_only_the_last_shard(small_disk):
    manifest = make_manifest()
    writer = StageWriter.create(small_disk / "stage", manifest)
    ids, logps = np.zeros(20_000, dtype=np.int32), np.full(20_000, -1.0, dtype=np.float32)
    with pytest.raises(StageError, match=r"groups is full: \d{6} bytes needed, \d+ free\. Make room") as error:
        for group in range(6):
            rows = [make_row(group, s, completion_ids=ids, behavior_logps=logps) for s in range(2)]
            writer.append([make_group(group, rows)])
    assert str(small_disk) in str(error.value)
    assert writer.done_groups == {0, 1, 2}
    assert not list(small_disk.glob("**/*.tmp"))
    writer.append([make_group(3)])  # a smaller one still fits
    writer.close()
    assert StageWriter.resume(small_disk / "stage", manifest).done_groups == {0, 1, 2, 3}


# The stage as a dataset


def test_load_stage_is_in_the_order_of_groups_and_samples(tmp_path):
    fill_stage(tmp_path)
    dataset = load_stage(tmp_path)
    assert list(zip(dataset["group"], dataset["sample"], strict=True)) == [(g, s) for g in range(6) for s in range(2)]
    assert dataset.column_names == [
        "prompt_index",
        "group",
        "sample",
        "prompt_ids",
        "completion_ids",
        "behavior_logps",
        "rewards",
        "reward",
        "advantage",
        "finish_reason",
        "policy_version",
    ]
    assert dataset[7] == {
        "prompt_index": 13,
        "group": 3,
        "sample": 1,
        "prompt_ids": [0, 1, 2, 3, 4],
        "completion_ids": [300, 301],
        "behavior_logps": [-1.0, -1.0],
        "rewards": {"accuracy": 1.0, "format": 0.5},
        "reward": 1.5,
        "advantage": 1.0,
        "finish_reason": "stop",
        "policy_version": "step-0",
    }


@pytest.mark.parametrize("allow_filling", [False, True])
def test_what_datasets_caches_of_an_opened_stage_does_no_harm(tmp_path, allow_filling):
    fill_stage(tmp_path)
    if allow_filling:
        StageWriter.resume(tmp_path, read_manifest(tmp_path).with_status("filling")).close()
    dataset = load_stage(tmp_path, allow_filling=allow_filling)
    assert dataset.filter(lambda row: row["group"] > 1).num_rows == 8
    dataset.map(lambda row: {"length": len(row["completion_ids"])})
    dataset.sort("reward").shuffle(seed=1).flatten_indices()
    assert len(list((tmp_path / "groups").glob("cache-*.arrow"))) >= 2
    assert len(StageReader(tmp_path, verify=True, allow_filling=allow_filling)) == 6
    assert load_stage(tmp_path, verify=True, allow_filling=allow_filling)[:] == dataset[:]
    found = check_stage(tmp_path)
    assert not found.problems and not found.missing_groups
    assert {path.name.split("-")[0] for path in found.leftovers} == {"cache"}
    writer = StageWriter.resume(tmp_path, found.manifest)
    assert writer.done_groups == set(range(6))
    writer.close()
    assert not list((tmp_path / "groups").glob("*.rejected"))


def test_load_stage_works_from_any_folder_and_leaves_for_others(tmp_path, monkeypatch):
    fill_stage(tmp_path / "runs" / "stage-000")
    monkeypatch.chdir(tmp_path / "runs")
    dataset = load_stage("stage-000")
    monkeypatch.chdir("/")
    frame = dataset.to_pandas()
    assert not isinstance(frame, Iterator)
    assert frame["reward"].tolist() == [0.5, 1.5] * 6
    dataset.save_to_disk(str(tmp_path / "saved"))
    dataset.to_parquet(str(tmp_path / "stage.parquet"))
    assert (tmp_path / "stage.parquet").stat().st_size > 0
    from datasets import Dataset, load_from_disk

    assert load_from_disk(str(tmp_path / "saved"))[3] == dataset[3]
    assert Dataset.from_parquet(str(tmp_path / "stage.parquet"), cache_dir=str(tmp_path / "cache"))[3] == dataset[3]


def test_datasets_opens_a_single_shard_as_it_is(tmp_path):
    from datasets import Dataset

    fill_stage(tmp_path)
    shard = Dataset.from_file(str(shard_paths(tmp_path)[1]))
    assert shard["group"][:] == [5, 5, 2, 2]


def test_load_stage_refuses_what_the_reader_refuses(tmp_path):
    writer = StageWriter.create(tmp_path, make_manifest())
    with pytest.raises(StageError, match="still filling"):
        load_stage(tmp_path)
    with pytest.raises(StageError, match="holds no group yet"):
        load_stage(tmp_path, allow_filling=True)
    writer.append([make_group(2)])
    assert load_stage(tmp_path, allow_filling=True)["group"][:] == [2, 2]


# The manifest


def test_a_manifest_equals_its_round_trip_through_json():
    manifest = make_manifest(sampling={"stop": ("a", "b"), "temperature": 1.0}, prompt_indices=np.arange(6))
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.sampling == {"stop": ["a", "b"], "temperature": 1.0}
    assert manifest.prompt_indices == (0, 1, 2, 3, 4, 5)


def test_the_fingerprint_tells_all_fields_but_the_status():
    manifest = make_manifest()
    assert manifest.with_status("complete").fingerprint() == manifest.fingerprint()
    changes = [
        {"stage": 1},
        {"seed": 1},
        {"dataset_hash": "x"},
        {"tokenizer_hash": "x"},
        {"sampling": {}},
        {"engine": "transformers"},
        {"engine_version": "x"},
        {"policy_hash": "x"},
        {"policy_version": "x"},
        {"published_step": 1},
        {"run_id": "x"},
        {"reward_names": ("accuracy",)},
        {"num_generations": 4},
        {"prompt_indices": (0, 1, 2, 3, 4, 5)},
    ]
    prints = {make_manifest(**change).fingerprint() for change in changes}
    assert len(prints | {manifest.fingerprint()}) == len(changes) + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stage": -1}, "stage: -1 must be an integer of at least 0"),
        ({"stage": True}, "stage: True must be an integer"),
        ({"seed": 1.0}, "seed: 1.0 must be an integer"),
        ({"num_generations": 0}, "num_generations: 0"),
        ({"prompt_indices": (1, 2)}, "2 prompt_indices, but num_updates 2 × prompts_per_update 3 = 6"),
        ({"prompt_indices": "012345"}, "must be a list"),
        ({"prompt_indices": (0, 1, 2, 3, 4, -1)}, "prompt_indices: -1"),
        ({"reward_names": ()}, "reward_names=()"),
        ({"reward_names": ("a", "a")}, "distinct"),
        ({"reward_names": "accuracy"}, "must be a list"),
        ({"run_id": None}, "run_id=None must be a string"),
        ({"sampling": {"temperature": math.nan}}, "JSON values only"),
        ({"sampling": {"stop": {1, 2}}}, "JSON values only"),
        ({"sampling": [1]}, "must be a dict"),
        ({"status": "done"}, "status='done'"),
        ({"schema_version": SCHEMA_VERSION + 1}, f"reads {SCHEMA_VERSION} only"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(change, message):
    with pytest.raises(StageError) as error:
        make_manifest(**change)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda values: values.pop("engine"), "lacks ['engine']"),
        (lambda values: values.update(extra=1), "unknown ['extra']"),
        (lambda values: values.update(schema_version=0), "schema_version 0"),
        (lambda values: values.update(num_updates="2"), "num_updates: '2' must be an integer"),
        (lambda values: values.update(seed=math.nan), "holds NaN"),
    ],
)
def test_an_edited_manifest_is_refused_and_never_written_over(tmp_path, edit, message):
    fill_stage(tmp_path)
    values = json.loads((tmp_path / "manifest.json").read_text())
    edit(values)
    (tmp_path / "manifest.json").write_text(json.dumps(values))
    for use in (StageReader, lambda path: StageWriter.resume(path, make_manifest())):
        with pytest.raises(StageError) as error:
            use(tmp_path)
        assert message in str(error.value)
    assert json.loads((tmp_path / "manifest.json").read_text()).keys() == values.keys()


def test_a_manifest_that_is_no_object_is_refused():
    with pytest.raises(StageError, match="holds a list"):
        Manifest.from_json("[]")


def test_threads_may_read_at_once(tmp_path):
    fill_stage(tmp_path)
    stage = StageReader(tmp_path)
    seen: list[int] = []
    threads = [
        threading.Thread(target=lambda g=g: seen.append(int(stage.response(g, 0).completion_ids[0]))) for g in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [0, 100, 200, 300, 400, 500]


# What a manifest says of the rewards


def test_a_stage_written_before_the_scoring_was_kept_is_read_and_continued(tmp_path):
    writer = StageWriter.create(tmp_path, make_manifest())
    writer.append([make_group(0)])
    writer.close()
    assert "scoring" not in json.loads((tmp_path / "manifest.json").read_text())
    resumed = StageWriter.resume(tmp_path, make_manifest(scoring={"advantage_eps": 1e-6}))
    assert resumed.done_groups == {0}
    resumed.append([make_group(group) for group in range(1, 6)])
    resumed.complete()
    assert len(load_stage(tmp_path)) == 12


def test_another_scoring_is_another_stage(tmp_path):
    StageWriter.create(tmp_path, make_manifest(scoring={"advantage_eps": 1e-6, "scale_rewards": "group"})).close()
    other = make_manifest(scoring={"advantage_eps": 1e-6, "scale_rewards": "none"})
    with pytest.raises(StageError, match=r"scoring\['scale_rewards'\]: 'group' → 'none' \(stored → expected\)"):
        StageWriter.resume(tmp_path, other)
    assert read_manifest(tmp_path).scoring == {"advantage_eps": 1e-6, "scale_rewards": "group"}


@pytest.mark.parametrize("scoring", ["group", {"advantage_eps": math.nan}, {"f": len}])
def test_a_scoring_that_is_no_json_object_is_refused(scoring):
    with pytest.raises(StageError, match="manifest scoring="):
        make_manifest(scoring=scoring)
