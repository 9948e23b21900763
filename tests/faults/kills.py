"""`kill -9` at each phase of a run, at random moments, and of ranks under ZeRO-3."""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .case import BITWISE, Case, Ended, Fault, Recovers, Setting, Unexpected
from .worker import At, die, flush_each_batch, last_moment

RANDOM_KILLS = 40
ZERO3_KILLS = 8
ZERO3 = Setting(zero3=True, ranks=2)
MAX_DELAY_S = 0.02


def _half_written(path: Path, data: Any) -> None:
    """Half of the bytes under the temporary name, then the kill."""
    whole = bytes(data)
    path.with_name(path.name + ".tmp").write_bytes(whole[: len(whole) // 2])
    die()


def _without_old_policy(temporary: Path, folder: Path) -> None:
    """The moment between the removal of what was in the policy's place and the rename."""
    shutil.rmtree(folder, ignore_errors=True)
    die()


def _killed(place: str, call: int, action: Any = die) -> Any:
    def run(case: Case) -> None:
        case.dies(flush_each_batch, At(place, call, action))
        case.go()

    return run


def _killed_in_a_row(case: Case) -> None:
    for place, call in (("generating", 2), ("flushing", 2), ("scoring", 3), ("forward and backward", 1)):
        case.dies(At(place, call, die))
    case.go()


def _killed_by_the_clock(case: Case) -> None:
    """Kill it after 1.2 s, then after 1.4 s, … until it gets through."""
    for attempt in range(30):
        running = case.start()
        running.kill_after(1.2 + 0.2 * attempt)
        if running.wait().exitcode == 0:
            case.notes.append(f"killed {attempt} times")
            return
    raise Unexpected("it never got through")


_MOMENTS: list[tuple[str, str, int, Any]] = [
    ("before β's weights are written", "writing β", 1, die),
    ("β of stage 1 written, but not in its place", "moving β into place", 2, die),
    ("β of stage 1 in its place, before the engine has it", "opening the engine", 2, die),
    ("the old β of stage 0 removed, the new one not in its place", "moving β into place", 1, _without_old_policy),
    ("generating the first batch of stage 0", "generating", 1, die),
    ("generating the third batch of stage 1", "generating", 7, die),
    ("scoring", "scoring", 6, die),
    ("a shard half written under its temporary name", "writing a file of the stage", 3, _half_written),
    ("a shard just renamed", "a file of the stage renamed", 3, die),
    ("the manifest of stage 1 half written", "writing a file of the stage", 7, _half_written),
    ("every group flushed, the stage not marked complete", "completing the stage", 2, die),
    ("the stage complete, before its first update", "beginning an update", 5, die),
    ("within an update, between forward and step", "forward and backward", 5, die),
    ("after the optimizer step of update 7", "after an optimizer step", 7, die),
    ("a checkpoint with weights only", "checkpoint: weights written", 3, die),
    ("a checkpoint without its random states", "checkpoint: optimizer written", 2, die),
    ("a checkpoint that lacks only its state", "checkpoint: all but its state", 3, die),
    ("between stages, at the checkpoint's end", "beginning an update", 9, die),
    ("after the last update, before the summary", "end of training", 1, die),
]  # fmt: skip

FAULTS = [
    *(
        Fault("kill -9", moment, BITWISE, _killed(place, call, action), quick=place == "scoring")
        for moment, place, call, action in _MOMENTS
    ),
    Fault("kill -9, four times in a row", "twice while generating, scoring, updating", BITWISE, _killed_in_a_row),
    Fault("kill -9 by the clock until it gets through", "every 1.2 s and later", BITWISE, _killed_by_the_clock),
]


def _moment_of(case: Case, number: int, slices: int) -> tuple[int, float]:
    """
    Where kill `number` comes: a line of the journal, drawn from one of as many equal slices of the undisturbed run's,
    and the seconds after it.
    """
    draw = random.Random(f"{case.lab.seed}-{case.setting.zero3}-{number}")
    line = int(case.lab.num_lines(case.setting) * (number + draw.random()) / slices)
    return line, draw.uniform(0, MAX_DELAY_S)


def _killed_at_random(case: Case, number: int, slices: int, ranks: Sequence[int] = (0,)) -> Ended:
    """Start the run and kill it; one that had fewer lines than the undisturbed run, and so ended first, once more."""
    line, delay_s = _moment_of(case, number, slices)
    for earlier in range(0, 20, 5):
        running = case.start()
        running.kill_at(max(1, line - earlier), delay_s, ranks)
        ended = running.wait()
        if -signal.SIGKILL in ended.exitcodes:
            share = line / case.lab.num_lines(case.setting)
            moment = last_moment(case.folder, running.processes[ranks[0]].pid)
            case.notes.append(f"rank {' and '.join(map(str, ranks))} killed at {share:.0%}: {moment}")
            return ended
        case.start_over()
    raise Unexpected("it always ended before the kill")


def _random_kill(number: int) -> Any:
    def run(case: Case) -> None:
        _killed_at_random(case, number, RANDOM_KILLS)
        case.go()

    return run


RANDOM = [
    Fault("kill -9 at a random moment", f"slice {number + 1} of {RANDOM_KILLS}", BITWISE, _random_kill(number))
    for number in range(RANDOM_KILLS)
]


def _zero3_kill(number: int) -> Any:
    def run(case: Case) -> None:
        ended = _killed_at_random(case, number, ZERO3_KILLS, [(0,), (1,), (0, 1)][number % 3])
        case.notes.append(f"all ranks ended within {max(ended.ended_s) - min(ended.ended_s):.1f} s")
        case.go()

    return run


ZERO3_RANDOM = [
    Fault(
        "kill -9 of ranks of two under ZeRO-3", f"slice {number + 1} of {ZERO3_KILLS}", Recovers(),
        _zero3_kill(number), ZERO3,
    )
    for number in range(ZERO3_KILLS)
]  # fmt: skip
