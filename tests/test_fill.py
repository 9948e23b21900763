"""Filling a stage loses nothing that was generated, and ranks that wait for each other learn of failures at once."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mu_grpo_trl.rewards.functions import RewardError
from mu_grpo_trl.rollout import fill
from mu_grpo_trl.rollout.engine import Completion, EngineError, GroupRequest, GroupResult, SamplingParams
from mu_grpo_trl.rollout.fill import FillProgress, UnscoredStore, fill_stage
from mu_grpo_trl.rollout.rendezvous import PeerError, Rendezvous
from mu_grpo_trl.stage.reader import StageReader
from mu_grpo_trl.stage.schema import GroupRollout, Manifest, ResponseRow
from mu_grpo_trl.stage.writer import StageWriter

NUM_GROUPS = 12
SAMPLING = SamplingParams(
    temperature=1.0, max_tokens=8, context_length=32, num_generations=2, eos_token_ids=(1,), seed=0
)


class CountingEngine:
    """Answers group g with tokens derived from g, and remembers what it was asked."""

    name, version = "counting", "1"

    def __init__(self, fails_after: int | None = None) -> None:
        self.asked: list[int] = []
        self._fails_after = fails_after

    def generate(self, requests: Iterable[GroupRequest], sampling: SamplingParams) -> Iterator[GroupResult]:
        for request in requests:
            if self._fails_after is not None and len(self.asked) >= self._fails_after:
                raise EngineError("the server is gone")
            self.asked.append(request.group)
            yield GroupResult(request.group, [completion(request.group, sample) for sample in range(2)])


def completion(group: int, sample: int) -> Completion:
    ids = np.arange(3, 4 + group % 4 + sample, dtype=np.int32)
    return Completion(ids, -0.25 * np.arange(1, len(ids) + 1, dtype=np.float32), "stop" if sample else "length")


def scored(result: GroupResult) -> GroupRollout:
    rows = [
        ResponseRow(c.token_ids, c.logps, {"r": float(result.group)}, float(result.group), 0.0, c.finish_reason)
        for c in result.completions
    ]
    return GroupRollout(result.group, result.group, np.array([5]), "v0", rows)


def open_writer(folder: Path) -> StageWriter:
    manifest = Manifest(
        stage=0, seed=0, num_updates=3, num_generations=2, prompts_per_update=4,
        prompt_indices=tuple(range(NUM_GROUPS)), dataset_hash="d", tokenizer_hash="t", sampling={}, engine="counting",
        engine_version="1", policy_hash="p", policy_version="v0", published_step=0, run_id="run", reward_names=("r",),
    )  # fmt: skip
    return StageWriter.resume(folder, manifest)


def run_fill(writer: StageWriter, engine, score=scored, *, batch_size: int | None = None, **options) -> None:
    """One stream of requests as for servers, or batches as in process."""

    def request(group: int) -> GroupRequest:
        return GroupRequest(group, [5])

    if batch_size is None:
        batches = (
            (request(group) for group in range(NUM_GROUPS) if group not in writer.done_groups) for _ in range(1)
        )
    else:
        starts = range(0, NUM_GROUPS, batch_size)
        batches = (
            [request(group) for group in range(start, start + batch_size)]
            for start in starts
            if not writer.done_groups.issuperset(range(start, start + batch_size))
        )
    progress = FillProgress(0, NUM_GROUPS, len(writer.done_groups), False)
    fill_stage(engine, writer, batches, SAMPLING, score, progress, score_threads=2, **options)


def assert_complete(writer: StageWriter, folder: Path) -> None:
    writer.complete()
    reader = StageReader(folder, verify=True)
    for group in range(NUM_GROUPS):
        for sample in range(2):
            response, expected = reader.response(group, sample), completion(group, sample)
            assert response.completion_ids.tolist() == expected.token_ids.tolist()
            assert response.behavior_logps.tobytes() == expected.logps.tobytes()
        assert reader.rewards([group]).tolist() == [[group, group]]
        assert reader.truncated([group]).tolist() == [[True, False]]


@pytest.mark.parametrize("batch_size", [None, 3])
def test_every_group_is_generated_once_scored_and_stored(batch_size, tmp_path):
    engine, writer = CountingEngine(), open_writer(tmp_path)
    run_fill(writer, engine, batch_size=batch_size)
    assert engine.asked == list(range(NUM_GROUPS))
    assert_complete(writer, tmp_path)


@pytest.mark.parametrize("batch_size", [None, 3])
def test_b43_a_raising_reward_stops_and_what_was_generated_is_never_generated_again(batch_size, tmp_path):
    def breaks(result: GroupResult) -> GroupRollout:
        if result.group == 4:
            raise RewardError("Reward function 'r' raised: ZeroDivisionError")
        return scored(result)

    first, writer = CountingEngine(), open_writer(tmp_path)
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        run_fill(writer, first, breaks, batch_size=batch_size)
    writer.close()
    second, writer = CountingEngine(), open_writer(tmp_path)
    assert 4 not in writer.done_groups
    run_fill(writer, second, batch_size=batch_size)
    assert sorted(first.asked + second.asked) == list(range(NUM_GROUPS))
    assert not list(tmp_path.glob("unscored*"))
    assert_complete(writer, tmp_path)


def test_b22_an_engine_that_fails_keeps_all_that_it_gave_before(tmp_path):
    first, writer = CountingEngine(fails_after=7), open_writer(tmp_path)
    with pytest.raises(EngineError, match="the server is gone"):
        run_fill(writer, first)
    writer.close()
    second, writer = CountingEngine(), open_writer(tmp_path)
    run_fill(writer, second)
    assert (first.asked, second.asked) == (list(range(7)), list(range(7, NUM_GROUPS)))
    assert_complete(writer, tmp_path)


def test_a_batch_half_of_which_is_there_is_generated_whole_and_stored_once(tmp_path):
    writer = open_writer(tmp_path)
    writer.append([scored(GroupResult(g, [completion(g, 0), completion(g, 1)])) for g in (0, 1, 2, 4)])
    engine = CountingEngine()
    run_fill(writer, engine, batch_size=3)
    assert engine.asked == list(range(3, NUM_GROUPS))  # the first batch is complete, the second is not
    assert_complete(writer, tmp_path)


def test_one_slow_reward_does_not_keep_the_others_from_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(fill, "FLUSH_GROUPS", 1)
    released, writer = threading.Event(), open_writer(tmp_path)

    class LastWaits(CountingEngine):
        def generate(self, requests, sampling):
            for result in super().generate(requests, sampling):
                if result.group == NUM_GROUPS - 1:
                    deadline = time.monotonic() + 10
                    while len(writer.done_groups) < NUM_GROUPS - 3 and time.monotonic() < deadline:
                        time.sleep(0.01)
                        yield GroupResult(1, [completion(1, 0), completion(1, 1)])  # a group it gave already
                    assert 0 not in writer.done_groups
                    released.set()
                yield result

    def slow_first(result: GroupResult) -> GroupRollout:
        if result.group == 0:
            assert released.wait(20)
        return scored(result)

    run_fill(writer, LastWaits(), slow_first)
    assert_complete(writer, tmp_path)


def test_a_failing_peer_stops_the_fill_and_its_groups_are_kept(tmp_path):
    writer, calls = open_writer(tmp_path), []

    def check() -> None:
        calls.append(None)
        if len(calls) == 5:
            raise PeerError("Rank 1 failed while the stage was being made: EngineError: boom")

    engine = CountingEngine()
    with pytest.raises(PeerError, match="boom"):
        run_fill(writer, engine, check=check)
    writer.close()
    second, writer = CountingEngine(), open_writer(tmp_path)
    run_fill(writer, second)
    assert sorted(engine.asked + second.asked) == list(range(NUM_GROUPS))
    assert_complete(writer, tmp_path)


def test_unscored_groups_of_another_stage_are_not_taken_up(tmp_path):
    writer = open_writer(tmp_path)
    UnscoredStore(writer, 1).save([GroupResult(0, [completion(0, 0), completion(0, 1)])])
    [stored] = tmp_path.glob("unscored*")
    assert [result.group for result in UnscoredStore(writer, 1).load()] == [0]
    assert UnscoredStore(writer, 2).load() == []  # shared out otherwise
    stored.rename(stored.with_name("unscored-r0of1-" + "0" * 32 + ".npz"))
    assert UnscoredStore(writer, 1).load() == []
    writer.close()


# Rendezvous


def test_ranks_go_on_together_once_all_are_done(tmp_path):
    waited: dict[int, float] = {}

    def rank(number: int, seconds: float) -> None:
        meeting = Rendezvous(tmp_path, number, 3)
        with meeting.work():
            time.sleep(seconds)
        started = time.monotonic()
        meeting.wait()
        waited[number] = time.monotonic() - started

    threads = [threading.Thread(target=rank, args=(number, 0.4 * number)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert waited[0] > 0.7
    assert waited[2] < 0.3


def test_b20_an_error_of_one_rank_reaches_the_others_with_its_message_while_they_work_or_wait(tmp_path):
    failing, working = Rendezvous(tmp_path, 1, 3), Rendezvous(tmp_path, 0, 3)
    with pytest.raises(EngineError), failing.work():
        raise EngineError("GET /health answered 503")
    started = time.monotonic()
    with pytest.raises(PeerError, match="Rank 1 failed.*EngineError: GET /health answered 503"):
        working.check()
    with working.work():
        pass
    with pytest.raises(PeerError, match="GET /health answered 503"):
        working.wait()
    assert time.monotonic() - started < 2


def test_a_rank_that_falls_silent_is_given_up(tmp_path):
    meeting = Rendezvous(tmp_path, 0, 2, silence_s=0.3)
    with meeting.work():
        pass
    with pytest.raises(PeerError, match="Rank 1 gave no sign of life"):
        meeting.wait()


def test_a_rank_whose_process_was_killed_is_given_up_at_once(tmp_path):
    script = "import sys, time; from pathlib import Path; from mu_grpo_trl.rollout.rendezvous import Rendezvous\n"
    script += "meeting = Rendezvous(Path(sys.argv[1]), 1, 2); print(flush=True); time.sleep(60)"
    meeting = Rendezvous(tmp_path, 0, 2)
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"\n"
        meeting.check()
        other.kill()
    with meeting.work(), pytest.raises(PeerError, match=f"Rank 1 is gone: its process {other.pid} was killed"):
        meeting.check()


def test_a_rank_that_works_for_long_gives_signs_of_life(tmp_path, monkeypatch):
    from mu_grpo_trl.rollout import rendezvous

    monkeypatch.setattr(rendezvous, "HEARTBEAT_S", 0.05)
    slow = Rendezvous(tmp_path, 1, 2)

    def work() -> None:
        with slow.work():
            time.sleep(1.5)

    thread = threading.Thread(target=work)
    thread.start()
    meeting = Rendezvous(tmp_path, 0, 2, silence_s=0.7)
    with meeting.work():
        pass
    meeting.wait()
    thread.join()
