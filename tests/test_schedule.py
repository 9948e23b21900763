"""schedule.py: hand-checked examples and properties over random shapes of a run."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mu_grpo_trl.schedule import Schedule


@st.composite
def schedules(draw) -> Schedule:
    prompts_per_update = draw(st.integers(1, 6))
    return Schedule(
        num_prompts=draw(st.integers(prompts_per_update, 30)),
        prompts_per_update=prompts_per_update,
        stage_updates=draw(st.integers(1, 12)),
        num_updates=draw(st.integers(1, 40)),
        seed=draw(st.integers(0, 2**64)),
        shuffle=draw(st.booleans()),
        shuffle_stage=draw(st.booleans()),
    )


def stream(schedule: Schedule) -> list[int]:
    """Prompts of the whole run in the order of the stages' groups."""
    return np.concatenate([schedule.prompt_indices(stage) for stage in range(schedule.num_stages)]).tolist()


def test_worked_example_without_shuffling() -> None:
    schedule = Schedule(num_prompts=5, prompts_per_update=2, stage_updates=2, num_updates=5, seed=0, shuffle=False)
    assert schedule.num_stages == 3
    assert [schedule.stage_of(update) for update in range(5)] == [0, 0, 1, 1, 2]
    assert [schedule.first_update(stage) for stage in range(3)] == [0, 2, 4]
    assert [schedule.updates_in(stage) for stage in range(3)] == [2, 2, 1]
    assert [schedule.num_groups(stage) for stage in range(3)] == [4, 4, 2]
    assert [schedule.prompt_indices(stage).tolist() for stage in range(3)] == [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4]]
    assert [schedule.update_groups(update).tolist() for update in range(5)] == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_every_epoch_covers_each_prompt_exactly_once(schedule: Schedule) -> None:
    prompts = stream(schedule)
    for start in range(0, len(prompts), schedule.num_prompts):
        epoch = prompts[start : start + schedule.num_prompts]
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) <= set(range(schedule.num_prompts))
        if len(epoch) == schedule.num_prompts:
            assert set(epoch) == set(range(schedule.num_prompts))


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_stages_partition_the_updates_and_updates_partition_their_stage(schedule: Schedule) -> None:
    updates: list[int] = []
    for stage in range(schedule.num_stages):
        first = schedule.first_update(stage)
        members = list(range(first, first + schedule.updates_in(stage)))
        assert {schedule.stage_of(update) for update in members} == {stage}
        groups = np.concatenate([schedule.update_groups(update) for update in members])
        assert sorted(groups.tolist()) == list(range(schedule.num_groups(stage)))
        assert len(schedule.prompt_indices(stage)) == schedule.num_groups(stage)
        updates += members
    assert updates == list(range(schedule.num_updates))
    assert len(stream(schedule)) == schedule.num_updates * schedule.prompts_per_update


@settings(max_examples=60, deadline=None)
@given(schedules(), st.randoms(use_true_random=False))
def test_b29_answers_do_not_depend_on_what_was_asked_before(schedule: Schedule, random) -> None:
    stages = list(range(schedule.num_stages))
    expected = {stage: schedule.prompt_indices(stage).tolist() for stage in stages}
    groups = {update: schedule.update_groups(update).tolist() for update in range(schedule.num_updates)}
    resumed = replace(schedule)
    random.shuffle(stages)
    assert {stage: resumed.prompt_indices(stage).tolist() for stage in stages} == expected
    for update in sorted(groups, key=lambda _: random.random()):
        assert resumed.update_groups(update).tolist() == groups[update]


@settings(max_examples=100, deadline=None)
@given(schedules(), st.integers(1, 12))
def test_b28_length_of_stages_does_not_change_which_prompt_comes_when(schedule: Schedule, stage_updates: int) -> None:
    assert stream(replace(schedule, stage_updates=stage_updates)) == stream(schedule)
    longer = replace(schedule, num_updates=schedule.num_updates + 7)
    assert stream(longer)[: len(stream(schedule))] == stream(schedule)


def test_epochs_and_seeds_differ_in_order() -> None:
    schedule = Schedule(num_prompts=50, prompts_per_update=10, stage_updates=5, num_updates=30, seed=3)
    epochs = [tuple(schedule.prompt_indices(stage)) for stage in range(6)]
    assert len(set(epochs)) == 6
    assert tuple(range(50)) not in epochs
    others = [tuple(replace(schedule, seed=seed).prompt_indices(0)) for seed in range(10)]
    assert len(set(others)) == 10


def test_permutations_are_uniform_over_the_six_orders_of_three_prompts() -> None:
    counts: dict[tuple[int, ...], int] = dict.fromkeys(itertools.permutations(range(3)), 0)
    schedule = Schedule(num_prompts=3, prompts_per_update=3, stage_updates=6000, num_updates=6000, seed=1)
    for order in schedule.prompt_indices(0).reshape(-1, 3).tolist():
        counts[tuple(order)] += 1
    assert all(abs(count - 1000) < 6 * 1000**0.5 for count in counts.values())


def test_order_is_the_same_on_every_machine_and_version() -> None:
    schedule = Schedule(
        num_prompts=8, prompts_per_update=2, stage_updates=4, num_updates=8, seed=42, shuffle_stage=True
    )
    assert schedule.prompt_indices(0).tolist() == [2, 3, 5, 0, 1, 6, 7, 4]
    assert [schedule.update_groups(update).tolist() for update in range(4)] == [[7, 3], [4, 6], [0, 5], [2, 1]]
    assert schedule.stage_seed(0) == 151979076420290914


def test_shuffling_the_stage_moves_groups_but_not_prompts() -> None:
    plain = Schedule(num_prompts=64, prompts_per_update=8, stage_updates=8, num_updates=16, seed=5)
    shuffled = replace(plain, shuffle_stage=True)
    assert stream(shuffled) == stream(plain)
    assert shuffled.update_groups(0).tolist() != plain.update_groups(0).tolist()
    assert shuffled.update_groups(0).tolist() != shuffled.update_groups(8).tolist()  # each stage in its own order


def test_stage_may_be_many_times_the_dataset() -> None:
    schedule = Schedule(num_prompts=4, prompts_per_update=3, stage_updates=8, num_updates=8, seed=0)
    assert np.bincount(schedule.prompt_indices(0)).tolist() == [6, 6, 6, 6]


def test_indices_are_int64() -> None:
    schedule = Schedule(num_prompts=4, prompts_per_update=2, stage_updates=2, num_updates=2, seed=0)
    for shuffle, shuffle_stage in itertools.product([False, True], repeat=2):
        variant = replace(schedule, shuffle=shuffle, shuffle_stage=shuffle_stage)
        assert variant.prompt_indices(0).dtype == np.int64
        assert variant.update_groups(1).dtype == np.int64


def test_stage_seeds_are_63_bit_and_all_different() -> None:
    schedule = Schedule(num_prompts=1, prompts_per_update=1, stage_updates=1, num_updates=500, seed=0)
    seeds = [replace(schedule, seed=seed).stage_seed(stage) for seed in range(4) for stage in range(500)]
    assert len(set(seeds)) == 2000
    assert all(0 <= seed < 2**63 for seed in seeds)
    ones = np.array([bin(seed).count("1") for seed in seeds])
    assert abs(ones.mean() - 31.5) < 5 * (63 / 4 / 2000) ** 0.5


def test_answers_are_equal_in_another_process() -> None:
    code = (
        "from mu_grpo_trl.schedule import Schedule\n"
        "s = Schedule(9, 2, 3, num_updates=9, seed=7, shuffle_stage=True)\n"
        "print([s.prompt_indices(1).tolist(), s.update_groups(4).tolist(), s.stage_seed(2)])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    s = Schedule(9, 2, 3, num_updates=9, seed=7, shuffle_stage=True)
    assert printed.strip() == str([s.prompt_indices(1).tolist(), s.update_groups(4).tolist(), s.stage_seed(2)])


def test_run_of_the_paper_is_cheap_to_schedule() -> None:
    schedule = Schedule(num_prompts=40_000, prompts_per_update=32, stage_updates=1024, num_updates=4096, seed=0)
    start = time.perf_counter()
    for stage in range(schedule.num_stages):
        schedule.prompt_indices(stage)
    for update in range(0, schedule.num_updates):
        schedule.update_groups(update)
    assert time.perf_counter() - start < 2.0


@pytest.mark.parametrize(
    ("max_steps", "epochs", "num_prompts", "prompts_per_update", "expected"),
    [
        (7, 3.0, 100, 10, 7),
        (-1, 1.0, 100, 10, 10),
        (0, 1.0, 101, 10, 11),
        (-1, 1.1, 100, 11, 10),  # 110 prompts exactly, although 1.1 * 100 > 110 in floating point
        (-1, 0.01, 100, 10, 1),
        (-1, 3, 40_315, 32, 3780),
    ],
)
def test_number_of_updates(max_steps, epochs, num_prompts, prompts_per_update, expected) -> None:
    assert Schedule.num_updates_for(max_steps, epochs, num_prompts, prompts_per_update) == expected


@pytest.mark.parametrize("epochs", [0.0, -1.0, float("nan"), float("inf")])
def test_run_without_a_length_is_refused(epochs: float) -> None:
    with pytest.raises(ValueError, match=f"max_steps is -1 and num_train_epochs {epochs}"):
        Schedule.num_updates_for(-1, epochs, 100, 10)


def test_b32_dataset_smaller_than_one_update_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match="7 prompts, fewer than the 8 .* at most 7"):
        Schedule(num_prompts=7, prompts_per_update=8, stage_updates=4, num_updates=4, seed=0)


@pytest.mark.parametrize("field", ["num_prompts", "prompts_per_update", "stage_updates", "num_updates"])
def test_counts_below_one_are_refused_by_name(field: str) -> None:
    schedule = Schedule(num_prompts=8, prompts_per_update=2, stage_updates=2, num_updates=4, seed=0)
    with pytest.raises(ValueError, match=f"{field} is 0"):
        replace(schedule, **{field: 0})


def test_negative_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="seed is -1"):
        Schedule(num_prompts=2, prompts_per_update=1, stage_updates=1, num_updates=1, seed=-1)


def test_stages_and_updates_outside_the_run_are_refused() -> None:
    schedule = Schedule(num_prompts=4, prompts_per_update=2, stage_updates=2, num_updates=3, seed=0)
    for call, value in [
        (schedule.prompt_indices, 2),
        (schedule.prompt_indices, -1),
        (schedule.stage_seed, 2),
        (schedule.updates_in, 2),
        (schedule.update_groups, 3),
        (schedule.stage_of, -1),
    ]:
        with pytest.raises(ValueError, match=f"{value} is not part of the run"):
            call(value)
