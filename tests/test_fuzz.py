"""
Whatever bytes lie on the disk or come from a server give a clear error of the documented class, or what was written.

`HYPOTHESIS_PROFILE=long` tries 10,000 inputs for each property.
"""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_stage import fill_stage, make_manifest

from mu_grpo_trl.rollout import vllm_wire as wire
from mu_grpo_trl.rollout.engine import Completion, EngineError, GroupRequest, SamplingParams
from mu_grpo_trl.stage import Manifest, StageError, StageReader
from mu_grpo_trl.stage.reader import Shard
from mu_grpo_trl.stage.repair import check_stage
from mu_grpo_trl.stage.schema import ShardName, arrow_schema, digest, shard_paths

calm = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-2, 12)
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["filling", "complete", "stop", "length", "abort", "token_id:5", "NaN"])
)
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values within a JSON value, its own included."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, inner in items for place in places(inner, (*path, key)))]


@st.composite
def edits(draw: st.DrawFn, original: Any) -> Any:
    """`original` with one to three of its values replaced, removed or repeated."""
    edited = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        *parents, last = draw(st.sampled_from([place for place in places(edited) if place] or [()])) or (None,)
        if last is None:
            return draw(json_values)
        holder = functools.reduce(lambda value, key: value[key], parents, edited)
        action = draw(st.sampled_from(["replace", "remove", "repeat"]))
        if action == "replace":
            holder[last] = draw(json_values)
        elif action == "remove":
            del holder[last]
        elif isinstance(holder, list):
            holder.insert(last, holder[last])
    return edited


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """`data` with some bytes changed, cut out or put in, or cut short: never equal to it."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(changed) - 1)))
        action = draw(st.sampled_from(["flip", "set", "cut", "insert", "short"]))
        if action == "flip" and changed:
            changed[at] ^= 1 << draw(st.integers(0, 7))
        elif action == "set" and changed:
            filling = draw(st.sampled_from([b"\x00", b"\xff", b"\x7f"])) * draw(st.integers(1, 8))
            changed[at : at + len(filling)] = filling
        elif action == "cut":
            del changed[at : at + draw(st.integers(1, 16))]
        elif action == "insert":
            changed[at:at] = draw(st.binary(min_size=1, max_size=16))
        else:
            del changed[at:]
    return bytes(changed) if bytes(changed) != data else data[:-1]


# The manifest

MANIFEST = make_manifest()
MANIFEST_BYTES = MANIFEST.to_json().encode()


def read_or_refuse(data: bytes) -> None:
    """Parse a manifest; one that is accepted is whole, and equal to its own round trip."""
    try:
        manifest = Manifest.from_json(data)
    except StageError as error:
        assert str(error)
        return
    assert len(manifest.prompt_indices) == manifest.num_updates * manifest.prompts_per_update
    assert all(index >= 0 for index in manifest.prompt_indices)
    assert min(manifest.num_updates, manifest.prompts_per_update, manifest.num_generations) >= 1
    assert manifest.status in ("filling", "complete")
    assert Manifest.from_json(manifest.to_json()) == manifest
    same = manifest.with_status(MANIFEST.status) == MANIFEST
    assert (manifest.fingerprint() == MANIFEST.fingerprint()) == same


@given(st.binary(max_size=400) | damaged(MANIFEST_BYTES))
@example(b"[" * 100_000)
@example(b"\xef\xbb\xbf{}")
@example(b"1" * 10_000)
def test_any_bytes_are_a_whole_manifest_or_a_clear_error(data: bytes):
    read_or_refuse(data)


@given(edits(json.loads(MANIFEST_BYTES)))
def test_an_edited_manifest_is_refused_or_whole_and_then_of_another_stage(values: Any):
    read_or_refuse(json.dumps(values).encode())


# A shard


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete stage of one shard."""
    path = tmp_path_factory.mktemp("stage")
    fill_stage(path, shards=(range(6),))
    return path


@calm
@given(data=st.data())
def test_no_changed_byte_of_a_shard_goes_unnoticed(stage: Path, data: st.DataObject):
    (shard,) = shard_paths(stage)
    original = shard.read_bytes()
    try:
        shard.write_bytes(data.draw(damaged(original) | st.binary(max_size=200)))
        with pytest.raises(StageError):
            StageReader(stage, verify=True)
        assert list(check_stage(stage).bad_shards) == [shard]
    finally:
        shard.write_bytes(original)


def read_or_refuse_shard(data: bytes) -> None:
    """Read bytes as a shard that has their digest; one that is accepted keeps the invariants."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / str(ShardName(0, 0, digest(data)))
        path.write_bytes(data)
        try:
            shard = Shard(path, arrow_schema(MANIFEST.reward_names, MANIFEST.fingerprint()))
            groups = shard.groups(MANIFEST)
        except StageError as error:
            assert str(error)
            return
        assert len(set(groups.tolist())) == len(groups) == shard.num_rows // MANIFEST.num_generations
        assert set(groups.tolist()) <= set(range(MANIFEST.num_groups))
        assert np.array_equal(shard.completion_offsets, shard.logp_offsets)
        assert len(shard.completion_ids) == len(shard.behavior_logps) == shard.completion_offsets[-1]
        assert np.diff(shard.completion_offsets).min() >= 1
        assert np.diff(shard.prompt_offsets).min() >= 1
        assert len(shard.advantages) == shard.num_rows
        shard.batch.to_pylist()


@calm
@given(data=st.data())
def test_a_changed_shard_under_a_fitting_digest_is_refused_or_keeps_its_invariants(stage: Path, data: st.DataObject):
    """As if another program had written it: nothing warns but the rows themselves."""
    read_or_refuse_shard(data.draw(damaged(shard_paths(stage)[0].read_bytes())))


@pytest.mark.parametrize("bit", [0, 3, 7])
def test_a_shard_with_any_one_byte_changed_is_refused_or_keeps_its_invariants(stage: Path, bit: int):
    """Among them are lengths of buffers that are no multiple of their elements."""
    original = shard_paths(stage)[0].read_bytes()
    for at in range(len(original)):
        changed = bytearray(original)
        changed[at] ^= 1 << bit
        read_or_refuse_shard(bytes(changed))


@calm
@given(st.binary(max_size=300))
@example(b"\xff\xff\xff\xff\x00\x00\x00\x00")
@example(b"\xff\xff\xff\xff\xff\xff\xff\x7f")
@example(pa.schema([]).serialize().to_pybytes())
def test_any_bytes_in_the_place_of_a_shard_are_a_clear_error(data: bytes):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / str(ShardName(0, 0, digest(data)))
        path.write_bytes(data)
        with pytest.raises(StageError):
            Shard(path, arrow_schema(MANIFEST.reward_names, MANIFEST.fingerprint()))


# An answer of the server

VOCAB_SIZE, EOS = 20, 1
REQUEST = GroupRequest(4, [3, 4, 5])
SAMPLING = SamplingParams(1.0, 4, 64, 2, (EOS,), ("x",))


def choice(index: int, ids: list[int], logps: list[float], reason: str, detail: Any = None) -> dict[str, Any]:
    names = [f"token_id:{token}" for token in ids]
    return {
        "index": index,
        "text": "…",
        "logprobs": {
            "text_offset": list(range(len(ids))),
            "token_logprobs": logps,
            "tokens": names,
            "top_logprobs": [{name: logp} for name, logp in zip(names, logps, strict=True)],
        },
        "finish_reason": reason,
        "stop_reason": detail,
        "token_ids": ids,
        "prompt_logprobs": None,
        "prompt_token_ids": REQUEST.prompt_ids,
    }


ANSWER = {
    "id": "cmpl-1",
    "model": "policy",
    "choices": [
        choice(0, [7, 8, EOS], [-0.5, -1.25, -0.0001], "stop", EOS),
        choice(1, [9, 9, 2, 11], [-2.0, -0.5, -9999.0, -1.0], "length"),
    ],
}
ANSWER_BYTES = json.dumps(ANSWER).encode()


def parse(raw: bytes) -> list[Completion] | None:
    """The completions, each checked for what training relies on; None for a clear error."""
    try:
        completions = wire.parse_generation(raw, REQUEST, SAMPLING, "policy", VOCAB_SIZE)
    except (EngineError, wire.UnusableAnswer) as error:
        assert str(error)
        return None
    assert len(completions) == SAMPLING.num_generations
    for one in completions:
        assert one.token_ids.dtype == np.int32 and one.logps.dtype == np.float32
        assert one.token_ids.shape == one.logps.shape and 1 <= len(one.token_ids) <= SAMPLING.max_tokens
        assert one.token_ids.min() >= 0 and one.token_ids.max() < VOCAB_SIZE
        assert EOS not in one.token_ids[:-1]
        measured = one.logps[~np.isnan(one.logps)]
        assert measured.size and measured.max() <= 1e-3 and measured.min() > wire.FLOOR_LOGP
        assert (one.finish_reason == "length") <= (len(one.token_ids) == SAMPLING.max_tokens)
    return completions


def test_the_untouched_answer_is_taken_as_it_is():
    completions = parse(ANSWER_BYTES)
    assert completions is not None
    assert [one.token_ids.tolist() for one in completions] == [[7, 8, EOS], [9, 9, 2, 11]]
    assert [one.finish_reason for one in completions] == ["stop", "length"]


@given(st.binary(max_size=300) | damaged(ANSWER_BYTES))
@example(b"[" * 100_000)
@example(ANSWER_BYTES.replace(b"-0.5", b"NaN"))
@example(ANSWER_BYTES.replace(b"-0.5", b"-" + b"1" * 5000))
def test_any_bytes_are_usable_responses_or_a_clear_error(raw: bytes):
    parse(raw)


@given(edits(ANSWER))
@example({"choices": [None]})
@example({"choices": {"0": 1}})
@example([1])
def test_an_edited_answer_never_gives_a_response_that_was_not_sampled(answer: Any):
    """Ids and log-probs that come out are, pair by pair, those of one choice."""
    completions = parse(json.dumps(answer).encode())
    if completions is None:
        return
    by_index = {one["index"]: one for one in answer["choices"]}
    for index, one in enumerate(completions):
        assert one.token_ids.tolist() == by_index[index]["token_ids"]
        logps = by_index[index]["logprobs"]
        assert logps["tokens"] == [f"token_id:{token}" for token in one.token_ids]
        assert len(logps["token_logprobs"]) == len(one.logps)


ROWS = [None, {"4": {"logprob": -1.0}}, {"5": {"logprob": -2.0}, "6": {"logprob": -3.0}}]
SCORES = {"choices": [{"prompt_logprobs": ROWS}]}
RANKING = {"choices": [{"logprobs": {"top_logprobs": [{"token_id:5": -0.25, "token_id:6": -2.0}]}}]}


def answers_like(answer: Any) -> st.SearchStrategy[bytes]:
    """Random bytes, and `answer` with its bytes or values changed."""
    edited = edits(answer).map(lambda value: json.dumps(value).encode())
    return st.binary(max_size=200) | damaged(json.dumps(answer).encode()) | edited


@given(answers_like(SCORES))
def test_any_scores_are_one_number_a_token_or_a_clear_error(raw: bytes):
    try:
        scores = wire.parse_scores(raw, [3, 4, 5])
    except (EngineError, wire.UnusableAnswer) as error:
        assert str(error)
        return
    assert scores.shape == (2,) and scores.dtype == np.float32
    assert not (scores > 1e-3).any() and not (scores <= wire.FLOOR_LOGP).any()


@given(answers_like(RANKING))
def test_any_ranking_is_log_probs_by_token_or_a_clear_error(raw: bytes):
    try:
        ranking = wire.parse_ranking(raw)
    except (EngineError, wire.UnusableAnswer) as error:
        assert str(error)
        return
    assert ranking and all(isinstance(name, str) and isinstance(logp, float) for name, logp in ranking.items())
