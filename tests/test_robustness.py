"""Runs that are stopped, started twice, or learn badly: what they leave, how they end, and how they go on."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import math
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from accelerate.utils import DistributedType
from aiohttp import web
from helpers import PROMPTS, REPOSITORY, config_options, save_tiny_policy
from processes import run_alone, run_ranks
from pyarrow import parquet
from transformers import AutoModelForCausalLM
from workers.train_worker import RecordWeights
from workers.training_run import Poison, make_trainer, train, whole_weights

from mu_grpo_trl import MuGRPOConfig, preflight
from mu_grpo_trl.checkpoints import check_optimizer_state
from mu_grpo_trl.collapse import CollapseWatch
from mu_grpo_trl.guards import LearningError
from mu_grpo_trl.locks import LOCK_NAME, FolderInUseError, RunLock
from mu_grpo_trl.losses import SUM_NAMES, nan_unless_finite
from mu_grpo_trl.rollout.vllm_server import ClientOptions, Server
from mu_grpo_trl.signals import Interrupted, StopRequest
from mu_grpo_trl.stage.reader import StageReader
from mu_grpo_trl.stage.schema import GroupRollout, ResponseRow, StageError
from mu_grpo_trl.stage.writer import StageWriter
from mu_grpo_trl.trackers import open_wandb_run

pytestmark = pytest.mark.usefixtures("objects_of_the_libraries_are_not_collected")


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


def options(policy: Path, output_dir: Path, **changes: Any) -> dict[str, Any]:
    """Eight updates in stages of four, two batches of generation each; a checkpoint at the end of a stage only."""
    return {
        "model": str(policy), "prompts": PROMPTS[:24], "stage_updates": 4, "max_steps": 8, "rollout_concurrency": 32,
        **config_options(output_dir), "save_strategy": "steps", "save_steps": 1000, **changes,
    }  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(policy, tmp_path_factory) -> dict[str, torch.Tensor]:
    return whole_weights(train(options(policy, tmp_path_factory.mktemp("undisturbed"))))


def assert_equal_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]


PLAIN_SGD = {"optim": "sgd", "learning_rate": 2.0, "weight_decay": 0.0, "max_grad_norm": 0.0}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([(one[name] - other[name]).norm() for name in other]).norm())


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*"))


# Two runs in one folder


HOLDER = """
import sys, time
from pathlib import Path
from mu_grpo_trl.locks import RunLock
lock = RunLock([Path(path) for path in sys.argv[1:]])
lock.acquire()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Starts a process that holds the lock of the given folders."""
    started = []

    def hold(*folders: Path) -> subprocess.Popen[str]:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-c", HOLDER, *map(str, folders)]
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        return process

    yield hold
    for process in started:
        process.kill()
        process.wait()


def test_a_second_run_in_an_output_dir_is_refused_before_its_model_is_loaded(holder, tmp_path):
    first = holder(tmp_path / "run", tmp_path / "run/stages")
    said = f"in use by another run .process {first.pid} on {socket.gethostname()}, started 20.*choose another"
    with pytest.raises(FolderInUseError, match=said):
        make_trainer(options(tmp_path / "no model here", tmp_path / "run"))


def test_a_second_run_with_the_stages_folder_of_another_is_refused(holder, tmp_path):
    holder(tmp_path / "a", tmp_path / "stages")
    with pytest.raises(FolderInUseError, match="stages' is in use"):
        make_trainer(options(tmp_path / "no model", tmp_path / "b", stage_dir=str(tmp_path / "stages")))


def test_the_lock_of_a_killed_run_keeps_nobody_out(holder, tmp_path):
    first = holder(tmp_path)
    first.kill()
    first.wait()
    assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == first.pid
    lock = RunLock([tmp_path])
    lock.acquire()
    assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()


def wait_for_ever(started: Any) -> None:
    started.set()
    time.sleep(600)


def test_a_forked_child_does_not_keep_the_lock_of_its_dead_parent(holder, tmp_path):
    lock = RunLock([tmp_path])
    lock.acquire()
    context = multiprocessing.get_context("fork")
    started = context.Event()
    child = context.Process(target=wait_for_ever, args=(started,), daemon=True)
    child.start()
    try:
        assert started.wait(30)
        lock.release()
        holder(tmp_path)
    finally:
        child.kill()
        child.join()


def test_one_process_may_build_its_next_trainer_while_the_last_one_exists(policy, tmp_path):
    spec = options(policy, tmp_path, max_steps=1)
    first, second = make_trainer(spec), make_trainer(spec)
    first.train()
    second.train()
    assert second.state.global_step == 1
    third = RunLock([tmp_path])
    third.acquire()


@pytest.mark.distributed
def test_a_run_of_two_ranks_in_a_used_folder_ends_on_both(holder, policy, tmp_path):
    holder(tmp_path)
    for ended in run_ranks([options(policy, tmp_path)] * 2):
        assert ended.exitcode == 1
        assert "FolderInUseError" in ended.log and "in use by another run (process" in ended.log


# Signals


@pytest.mark.parametrize(
    ("place", "number", "saved"),
    [
        ("publish", 1, []),
        ("generate", 2, []),
        ("append", 2, []),
        ("reward", 9, []),
        ("complete", 1, []),
        ("begin", 2, [3]),
        ("step", 2, [3]),
        ("saved", 4, [4]),
        ("generate", 4, [4]),
        ("step", 6, [4, 7]),
    ],
)
def test_sigterm_ends_a_run_with_143_and_the_resumed_one_has_the_bits_of_the_undisturbed(
    place, number, saved, policy, undisturbed, tmp_path
):
    spec = options(policy, tmp_path)
    ended = run_alone(spec, fault={"kind": "terminate", "at": place, "number": number})
    assert ended.exitcode == 143, ended.log[-3000:]
    assert checkpoints(tmp_path) == saved
    resumed = train(spec, resume=True if saved else None)
    assert_equal_weights(whole_weights(resumed), undisturbed)


def test_without_a_save_strategy_sigterm_writes_no_checkpoint(policy, tmp_path):
    fault = {"kind": "terminate", "at": "step", "number": 2}
    ended = run_alone(options(policy, tmp_path, save_strategy="no"), fault=fault)
    assert ended.exitcode == 143
    assert checkpoints(tmp_path) == []


def test_the_first_sigint_ends_a_run_with_130_and_a_checkpoint(policy, tmp_path):
    ended = run_alone(options(policy, tmp_path), fault={"kind": "interrupt", "at": "begin", "number": 1})
    assert ended.exitcode == 130, ended.log[-3000:]
    assert "SIGINT: the run ends after this update. Once more stops it at once." in ended.log
    assert checkpoints(tmp_path) == [2]
    saved = re.search(
        r"The run was ended by SIGINT\. On the disk are the checkpoint (\S+) and (\d+) of \2 prompt", ended.log
    )
    assert saved is not None and saved[1] == str(tmp_path / "checkpoint-2"), ended.log[-2000:]
    assert "Go on with `--resume auto`." in ended.log


def test_the_second_sigint_stops_at_once(policy, tmp_path):
    ended = run_alone(options(policy, tmp_path), fault={"kind": "interrupt_twice", "at": "begin", "number": 1})
    assert ended.exitcode == 1
    assert "KeyboardInterrupt" in ended.log
    assert checkpoints(tmp_path) == []


@pytest.mark.distributed
@pytest.mark.parametrize(("place", "number", "saved"), [("step", 5, [4, 7]), ("generate", 2, [4])])
def test_a_signal_to_one_rank_ends_all_at_the_same_update(place, number, saved, policy, tmp_path):
    spec = options(policy, tmp_path / "stopped")
    fault = {"kind": "terminate", "at": place, "number": number, "rank": 1}  # rank 1 generates one batch a stage
    ended = run_ranks([spec] * 2, fault=fault)
    assert [rank.exitcode for rank in ended] == [143, 143], ended[0].log[-3000:] + ended[1].log[-3000:]
    assert abs(ended[0].ended_s - ended[1].ended_s) < 10
    assert checkpoints(tmp_path / "stopped") == saved
    assert [rank.exitcode for rank in run_ranks([spec] * 2, resume=True)] == [0, 0]
    assert [rank.exitcode for rank in run_ranks([options(policy, tmp_path / "whole")] * 2)] == [0, 0]
    assert_equal_weights(torch.load(tmp_path / "stopped/final.pt"), torch.load(tmp_path / "whole/final.pt"))


def test_handlers_are_put_back_and_those_of_the_program_left_alone():
    request = StopRequest()
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with request.handled():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGINT) == request._receive
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_notebooks_keep_their_handlers(monkeypatch):
    import builtins

    monkeypatch.setattr(builtins, "__IPYTHON__", True, raising=False)
    with StopRequest().handled():
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_is_raised_only_where_nothing_gets_lost():
    request = StopRequest()
    with request.handled():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert request.signum == signal.SIGTERM
        with pytest.raises(Interrupted) as ended, request.interruptible():
            pytest.fail("the block was entered")
        assert ended.value.code == 143
    with pytest.raises(Interrupted), request.handled(), request.interruptible():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)


# Settings that decide stored rows


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"scale_rewards": "none"}, r"scoring\['scale_rewards'\]: 'group' → 'none'"),
        ({"advantage_eps": 1e-4}, r"scoring\['advantage_eps'\]: 1e-06 → 0.0001"),
        ({"reward_weights": [2.0]}, r"scoring\['reward_weights'\]: None → \[2.0\]"),
    ],
)
def test_a_reward_setting_changed_before_the_first_checkpoint_is_refused_by_name(changed, named, policy, tmp_path):
    ended = run_alone(options(policy, tmp_path), fault={"kind": "die", "at": "append", "number": 2})
    assert ended.exitcode == -9
    with pytest.raises(StageError, match=named):
        train(options(policy, tmp_path, **changed))


# Gradients and losses that are not finite


def test_a_loss_that_is_not_finite_stops_before_the_step_and_leaves_its_rows(policy, undisturbed, tmp_path):
    trainer = make_trainer(options(policy, tmp_path, save_steps=2))
    poison = Poison(trainer, {5})
    said = "Update 5 has a loss or gradient that is not finite .* 1 of the 14 .*No weight was changed.*checkpoint-4: "
    with pytest.raises(LearningError, match=said):
        trainer.train()
    before = whole_weights(trainer)
    rows = parquet.read_table(tmp_path / "nonfinite/update-000005-rank-0.parquet").to_pylist()
    stage = StageReader(tmp_path / "stages/stage-001")
    assert len(rows) == int((stage.advantages(trainer.schedule.update_groups(5)) != 0).sum())
    broken = [row for row in rows if not np.isfinite(row["policy_logps"]).all()]
    assert len(broken) == 1
    for row in rows:
        stored = stage.response(row["group"], row["sample"])
        assert (row["stage"], row["update"]) == (1, 5)
        assert row["completion_ids"] == stored.completion_ids.tolist()
        assert row["advantage"] == stored.advantage
        np.testing.assert_array_equal(np.float32(row["behavior_logps"]), stored.behavior_logps)
    assert all(torch.isfinite(tensor).all() for tensor in before.values())
    del poison
    assert_equal_weights(whole_weights(train(options(policy, tmp_path), resume=True)), undisturbed)


def test_skipped_updates_move_no_weight_and_are_counted(policy, tmp_path, caplog):
    trainer = make_trainer(options(policy, tmp_path, nonfinite="skip", weight_decay=0.5))
    Poison(trainer, {2, 5})
    recorder = RecordWeights()
    recorder.trainer = trainer
    trainer.add_callback(recorder)
    with caplog.at_level(logging.WARNING, "mu_grpo_trl.guards"):
        trainer.train()
    for update in range(8):
        moved = any(
            not torch.equal(recorder.weights[update][name], recorder.weights[update + 1][name])
            for name in recorder.weights[0]
        )
        assert moved == (update not in {2, 5})
    assert all(torch.isfinite(tensor).all() for tensor in recorder.weights[-1].values())
    skipped = [entry.get("nonfinite/skipped_updates") for entry in trainer.state.log_history[:8]]
    assert skipped == [None, None, 1, 1, 1, 2, 2, 2]
    means = [entry["ratio/abs_log_mean"] for entry in trainer.state.log_history[:8] if "ratio/abs_log_mean" in entry]
    assert len(means) == 6 and np.isfinite(means).all()
    assert len([record for record in caplog.records if "It is skipped" in record.getMessage()]) == 2


def test_too_many_skips_in_a_row_stop_the_run(policy, tmp_path):
    trainer = make_trainer(options(policy, tmp_path, nonfinite="skip", max_nonfinite_skips=2))
    Poison(trainer, {1, 5, 6, 7})
    with pytest.raises(LearningError, match="Update 7 .*number 3 in a row, more than `max_nonfinite_skips=2`"):
        trainer.train()


@pytest.mark.distributed
@pytest.mark.parametrize("zero3", [False, True])
def test_a_nan_on_one_rank_skips_the_update_on_all(zero3, policy, tmp_path):
    changes = {**PLAIN_SGD, "nonfinite": "skip", "max_steps": 4}
    fault = {"kind": "poison", "number": 2, "rank": 1}
    ended = run_ranks([options(policy, tmp_path / "two", **changes)] * 2, fault=fault, zero3=zero3)
    assert [rank.exitcode for rank in ended] == [0, 0], ended[0].log[-3000:]
    assert "Update 2 has a loss or gradient that is not finite" in ended[0].log
    assert sorted(path.name for path in (tmp_path / "two/nonfinite").iterdir()) == [
        "update-000002-rank-0.parquet",
        "update-000002-rank-1.parquet",
    ]
    single = make_trainer(options(policy, tmp_path / "one", **changes))
    Poison(single, {2})
    single.train()
    final, expected = torch.load(tmp_path / "two/final.pt"), whole_weights(single)
    start = AutoModelForCausalLM.from_pretrained(policy).state_dict()
    assert distance(final, expected) < 1e-3 * distance(expected, start)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_loss_that_is_not_finite_has_no_finite_gradient(value):
    parameter = torch.tensor([1.0, 2.0], requires_grad=True)
    nan_unless_finite((parameter * 3).sum() + value).backward()
    assert parameter.grad is not None and parameter.grad.isnan().all()


def test_a_finite_loss_keeps_every_bit():
    parameter = torch.tensor([0.1, 0.7], requires_grad=True)
    loss = (parameter**3).sum()
    guarded = nan_unless_finite(loss)
    assert torch.equal(guarded, loss)
    (expected,) = torch.autograd.grad(loss, parameter, retain_graph=True)
    assert torch.equal(torch.autograd.grad(guarded, parameter)[0], expected)


# Collapse


def sums_of(**values: float) -> list[float]:
    return [values.get(name, 0.0) for name in SUM_NAMES]


def test_a_sinking_ratio_alarms_once_an_episode_with_its_figure():
    watch = CollapseWatch(2, 0.5, None, None)
    ratios = [1.0, 0.6, 0.2, 0.1, 0.9, 0.9, 0.1, 0.0]
    alarms = [
        watch.observe(update, 0, sums_of(negative_tokens=10, negative_ratio=10 * ratio))
        for update, ratio in enumerate(ratios)
    ]
    assert [len(alarm) for alarm in alarms] == [0, 0, 1, 0, 0, 0, 0, 1]
    assert alarms[2][0].startswith("Update 2: `ratio/negative_mean` is 0.4 over the last 2 updates, below 0.5: ")


def test_each_stage_is_looked_at_by_itself_and_tokens_are_weighed():
    watch = CollapseWatch(2, 0.5, 0.25, 0.01)
    low = sums_of(negative_tokens=1, negative_ratio=0.0)
    assert not watch.observe(0, 0, low)
    assert not watch.observe(1, 1, low)  # another stage
    assert not watch.observe(2, 1, sums_of(negative_tokens=9, negative_ratio=9.0))  # 0.9 over ten tokens
    assert not watch.observe(3, 1, sums_of())  # nothing negative
    assert not CollapseWatch(1, 0.5, 0.25, 0.01).observe(0, 0, sums_of())


def test_vetoed_responses_and_vanished_entropy_alarm():
    watch = CollapseWatch(1, 0.5, 0.25, 0.01)
    sums = sums_of(responses=8, vetoed_responses=3, entropy_tokens=100, entropy=0.5)
    veto, entropy = watch.observe(7, 0, sums)
    assert "`veto/response_fraction` is 0.375 over the last 1 updates, above 0.25" in veto
    assert "`policy/entropy` is 0.005 over the last 1 updates, below 0.01" in entropy
    assert not CollapseWatch(1, None, None, None).observe(0, 0, sums)


COLLAPSING = {"learning_rate": 0.3, "collapse_window": 2, "collapse_negative_ratio": 0.9}


def test_a_collapsing_run_is_warned_of_and_goes_on(policy, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "mu_grpo_trl.guards"):
        trainer = make_trainer(options(policy, tmp_path, **COLLAPSING))
        trainer.train()
    warned = [record.getMessage() for record in caplog.records if "`ratio/negative_mean` is" in record.getMessage()]
    assert warned and "`collapse_watch: stop` would end the run here" in warned[0]
    assert trainer.state.global_step == 8


def test_a_collapsing_run_can_be_stopped_without_another_checkpoint(policy, tmp_path):
    trainer = make_trainer(options(policy, tmp_path, **COLLAPSING, collapse_watch="stop", save_steps=1))
    with pytest.raises(LearningError, match=r"`ratio/negative_mean` is .*ended training here.*since .*checkpoint-\d"):
        trainer.train()
    assert 2 <= trainer.state.global_step < 8
    assert max(checkpoints(tmp_path)) == trainer.state.global_step - 1
    assert (tmp_path / "summary.json").exists()


def test_the_watch_can_be_turned_off(policy, tmp_path):
    trainer = make_trainer(options(policy, tmp_path, **COLLAPSING, collapse_watch="off"))
    assert trainer.guard._watch is None


# Other numbers of ranks


@pytest.mark.distributed
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_run_goes_on_with_another_number_of_ranks(before, after, policy, tmp_path):
    one_stage = {**PLAIN_SGD, "stage_updates": 8}  # sampled from the very weights that all runs start with
    spec = options(policy, tmp_path / "changed", **one_stage)
    stop = {"kind": "terminate", "at": "begin", "number": 5}
    assert [ended.exitcode for ended in run_ranks([spec] * before, fault=stop)] == [143] * before
    assert checkpoints(tmp_path / "changed") == [6]
    groups = [StageReader(path).manifest for path in sorted((tmp_path / "changed/stages").glob("stage-*"))]
    resumed = run_ranks([spec] * after, resume=True)
    assert [ended.exitcode for ended in resumed] == [0] * after, resumed[0].log[-3000:]
    final = torch.load(tmp_path / "changed/final.pt")
    run_ranks([options(policy, tmp_path / "whole", **one_stage)] * before)
    whole = torch.load(tmp_path / "whole/final.pt")
    start = AutoModelForCausalLM.from_pretrained(policy).state_dict()
    assert distance(final, whole) < 1e-4 * distance(whole, start)
    for path in sorted((tmp_path / "whole/stages").glob("stage-*")):
        manifest = StageReader(path).manifest
        assert manifest.prompt_indices == groups[manifest.stage].prompt_indices


class Backend:
    """As much of an `Accelerator` as tells how the optimizer is kept."""

    def __init__(self, deepspeed: bool, num_processes: int, config: dict[str, Any] | None = None) -> None:
        self.distributed_type = DistributedType.DEEPSPEED if deepspeed else DistributedType.MULTI_CPU
        self.num_processes = num_processes
        self.state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config=config or {}))


def test_an_optimizer_that_cannot_be_taken_up_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no optimizer state .*`save_only_model` leaves it out"):
        check_optimizer_state(tmp_path, Backend(False, 2))
    with pytest.raises(ValueError, match="was not written by DeepSpeed"):
        check_optimizer_state(tmp_path, Backend(True, 2))
    (tmp_path / "global_step4").mkdir()
    for rank in range(2):
        (tmp_path / f"global_step4/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    check_optimizer_state(tmp_path, Backend(True, 2))
    with pytest.raises(ValueError, match="split over 2 ranks by ZeRO, but this run has 4. Resume with 2 processes"):
        check_optimizer_state(tmp_path, Backend(True, 4))
    check_optimizer_state(tmp_path, Backend(True, 4, {"checkpoint": {"load_universal": True}}))
    with pytest.raises(ValueError, match="DeepSpeed wrote it"):
        check_optimizer_state(tmp_path, Backend(False, 2))
    (tmp_path / "optimizer.pt").touch()
    check_optimizer_state(tmp_path, Backend(False, 2))


# One rank fails while the others wait for it in a collective


@pytest.mark.distributed
def test_an_exception_in_one_ranks_update_ends_all_ranks_in_seconds(policy, tmp_path):
    fault = {"kind": "fail", "at": "begin", "number": 5, "rank": 1}
    ended = run_ranks([options(policy, tmp_path)] * 2, fault=fault)
    assert [rank.exitcode for rank in ended] == [1, 1]
    assert abs(ended[0].ended_s - ended[1].ended_s) < 20
    assert "ZeroDivisionError: injected on this rank" in ended[1].log
    assert "Rank 1 failed during the run: ZeroDivisionError: injected on this rank" in ended[0].log


STUCK = """
import sys, time
from pathlib import Path
from mu_grpo_trl import running
from mu_grpo_trl.rollout.rendezvous import Rendezvous
import threading
running.PEER_POLL_S, running.PEER_GRACE_S = 0.1, 0.5
folder = Path(sys.argv[1])
other = Rendezvous(folder, 1, 2)
mine = Rendezvous(folder, 0, 2, purpose="during the run")
threading.Thread(target=running._watch, args=(mine, threading.Event()), daemon=True).start()
other.tell(eval(sys.argv[2]))
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        ("ZeroDivisionError('injected')", 1, "Rank 1 failed during the run: ZeroDivisionError: injected"),
        ("__import__('mu_grpo_trl.signals').signals.Interrupted(15)", 143, "Another rank was ended by a signal"),
    ],
)
def test_a_rank_that_is_stuck_when_another_fails_is_ended(error, code, said, tmp_path):
    command = [sys.executable, "-c", STUCK, str(tmp_path / "meeting"), error]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
    assert ended.returncode == code, ended.stderr[-2000:]
    assert said in ended.stderr


# Weights & Biases


def wandb_starts(folder: Path) -> Counter[str]:
    """How often each run of W&B was started, from its offline files (`offline-run-<time>-<id>`)."""
    return Counter(path.name.split("-")[3] for path in (folder / "wandb").glob("offline-run-*"))


def test_a_resumed_run_keeps_its_run_of_wandb_and_a_new_one_gets_another(policy, tmp_path, monkeypatch):
    for name in ("WANDB_RUN_ID", "WANDB_RESUME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    import wandb

    spec = options(
        policy, tmp_path / "run", report_to="wandb", vllm_api_key="sk-very-secret", max_steps=4, save_steps=2
    )
    with pytest.raises(Interrupted):
        train(spec, fault={"kind": "terminate", "at": "begin", "number": 1})
    stored = (tmp_path / "run/wandb_run_id").read_text()
    for resume in (True, None):
        wandb.finish()
        train(spec, resume=resume)
    wandb.finish()
    assert wandb_starts(tmp_path) == {stored: 2, (tmp_path / "run/wandb_run_id").read_text(): 1}
    assert not files_that_hold(tmp_path, b"sk-very-secret")


def files_that_hold(folder: Path, secret: bytes) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and secret in path.read_bytes()]


def test_a_run_of_wandb_named_by_the_user_or_active_is_left_alone(tmp_path, monkeypatch):
    import wandb

    config = MuGRPOConfig(**config_options(tmp_path, report_to="wandb"))
    started = []
    monkeypatch.setattr(wandb, "init", lambda **arguments: started.append(arguments["id"]))
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    open_wandb_run(config, True, False)
    monkeypatch.delenv("WANDB_RUN_ID")
    monkeypatch.setattr(wandb, "run", "active")
    open_wandb_run(config, True, False)
    monkeypatch.setattr(wandb, "run", None)
    open_wandb_run(config, False, False)
    assert not started and not (tmp_path / "wandb_run_id").exists()
    open_wandb_run(config, True, False)
    (tmp_path / "stages/stage-000").mkdir(parents=True)  # a first stage that a kill left unfinished
    open_wandb_run(config, True, False)
    assert started == [(tmp_path / "wandb_run_id").read_text()] * 2


# Security

KEY = "sk-very-secret"
TOKEN = "hf_very_secret"


def test_managed_servers_listen_on_loopback_and_require_the_key_without_showing_it(tmp_path):
    config = MuGRPOConfig(**config_options(tmp_path, rollout_engine="vllm", vllm_api_key=KEY))
    (server,) = preflight.managed_servers(config, 64)
    command = server.command(tmp_path)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert server._options.env["VLLM_API_KEY"] == KEY
    assert KEY not in " ".join(command) + repr(server._options)


def test_the_key_in_the_environment_is_used_too(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    config = MuGRPOConfig(**config_options(tmp_path, rollout_engine="vllm"))
    assert preflight.managed_servers(config, 64)[0]._options.env["VLLM_API_KEY"] == KEY
    assert preflight._api_key(config) == KEY
    assert config.vllm_api_key is None


def test_a_server_gets_the_key_as_a_bearer_token():
    seen = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.json_response({"data": []})

    async def ask() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        for key in (KEY, None):
            server = Server(f"http://127.0.0.1:{runner.addresses[0][1]}", ClientOptions(8, 8, api_key=key))
            await server.get_json("/v1/models")
            await server.disconnect()
        await runner.cleanup()

    asyncio.run(ask())
    assert seen == [f"Bearer {KEY}", None]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(420)
def test_sigterm_ends_a_managed_server_which_answers_only_with_the_key(vllm_python, tmp_path):
    command = [
        sys.executable, "-m", "mu_grpo_trl.train", "--config", "recipes/quickstart.yaml",
        "--model_name_or_path", "mu_grpo_trl/lab/checkpoint", "--rollout_engine", "vllm", "--vllm_python", vllm_python,
        "--vllm_server_args=--enforce-eager", "--output_dir", str(tmp_path),
    ]  # fmt: skip
    env = {**os.environ, "VLLM_API_KEY": KEY, "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(command, cwd=REPOSITORY, env=env, stdout=log, stderr=log)
    try:
        server = wait_for(lambda: serving(run.pid), 240)
        port = server.cmdline()[server.cmdline().index("--port") + 1]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=30)
        run.terminate()
        assert run.wait(60) == 143, (tmp_path / "log").read_text()[-3000:]
        assert wait_for(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, 20)
    finally:
        run.kill()
    assert not files_that_hold(tmp_path, KEY.encode())


def serving(pid: int) -> psutil.Process | None:
    """The vLLM server among the descendants of a process, once it answers."""
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            command = process.cmdline()
            if "vllm.entrypoints.openai.api_server" in command and "-I" not in command:
                urllib.request.urlopen(f"http://127.0.0.1:{command[command.index('--port') + 1]}/health", timeout=5)
                return process
    return None


def wait_for(condition: Callable[[], Any], timeout_s: float) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.2)
    raise TimeoutError


def test_no_secret_is_in_any_file_or_log_of_a_run(policy, tmp_path, caplog, capfd):
    spec = options(
        policy,
        tmp_path,
        max_steps=2,
        stage_updates=2,
        save_steps=1,
        vllm_api_key=KEY,
        hub_token=TOKEN,
        log_level="debug",
    )
    with caplog.at_level(logging.DEBUG):
        trainer = make_trainer(spec)
        trainer.train()
        trainer.save_model(str(tmp_path))
        trainer.create_model_card()
    assert trainer.args.vllm_api_key == KEY
    assert (tmp_path / "README.md").exists() and list(tmp_path.glob("checkpoint-*/training_args.bin"))
    written = capfd.readouterr()
    for secret in (KEY, TOKEN):
        assert not files_that_hold(tmp_path, secret.encode())
        assert secret not in caplog.text + written.out + written.err


READ_WITH_AUDIT = """
import sys
from mu_grpo_trl import load_stage
from mu_grpo_trl.stage.reader import StageReader
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
stage = StageReader(sys.argv[1], verify=True)
[stage.response(group, 0) for group in stage.groups]
load_stage(sys.argv[1])
print([path for path in opened if "outside" in path])
"""


def test_no_field_of_a_manifest_is_used_as_a_path(policy, tmp_path):
    train(options(policy, tmp_path / "run", max_steps=1, stage_updates=1))
    source = StageReader(tmp_path / "run/stages/stage-000")
    elsewhere = "../../outside"
    manifest = dataclasses.replace(
        source.manifest, dataset_hash=elsewhere, tokenizer_hash=elsewhere, engine=elsewhere, engine_version=elsewhere,
        policy_hash=elsewhere, policy_version=elsewhere, run_id=elsewhere, reward_names=(elsewhere,),
        scoring={"path": elsewhere}, sampling={**source.manifest.sampling, "stop": [elsewhere]}, status="filling",
    )  # fmt: skip
    writer = StageWriter.create(tmp_path / "stage", manifest)
    for group in source.groups.tolist():
        responses = [source.response(group, sample) for sample in range(4)]
        rows = [
            ResponseRow(response.completion_ids, response.behavior_logps, {elsewhere: 0.0}, 0.0, 0.0, "stop")
            for response in responses
        ]
        prompt = manifest.prompt_indices[group]
        writer.append([GroupRollout(group, prompt, responses[0].prompt_ids, elsewhere, rows)])
    writer.complete()
    command = [sys.executable, "-c", READ_WITH_AUDIT, str(tmp_path / "stage")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
    assert done.stdout.strip().splitlines()[-1:] == ["[]"], done.stderr[-2000:]
