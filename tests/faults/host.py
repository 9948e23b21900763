"""Faults of the machine: disks, files, signals, other runs, ranks."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .case import BITWISE, Case, Fails, Fault, Recovers, Setting, Unexpected
from .worker import At, Call, FillDisk, Signal, die, fail, flush_each_batch

RANKS = Setting(ranks=2)


# Disks


def _small_disk(case: Case, megabytes: int = 16) -> None:
    """A file system of its own for the run's output."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", case.output], check=True)
    case.at_close.callback(lambda: subprocess.run(["umount", "-l", case.output], check=True))


def _full_at(place: str, call: int) -> Any:
    """The disk is full from a moment on; then there is room again."""

    def run(case: Case) -> None:
        _small_disk(case)
        filler = case.output / "filler"
        case.go(flush_each_batch, At(place, call, FillDisk(str(filler))), exits=2)
        filler.unlink()
        case.go()

    return run


def _refused_at(place: str, call: int) -> Any:
    """The folder of the shards takes no new file from a moment on; then it does again."""

    def run(case: Case) -> None:
        folder = str(case.output / "stages/stage-001/groups")
        forbid = Call("subprocess:check_call", ["chattr", "+i", folder])
        case.at_close.callback(lambda: subprocess.run(["chattr", "-i", folder]))
        case.go(flush_each_batch, At(place, call, forbid), exits=2)
        subprocess.run(["chattr", "-i", folder], check=True)
        case.go()

    return run


def _read_only_from_the_start(case: Case) -> None:
    _small_disk(case)
    subprocess.run(["mount", "-o", "remount,ro", case.output], check=True)
    case.go(exits=2)
    subprocess.run(["mount", "-o", "remount,rw", case.output], check=True)
    case.go()


def _slow_disk(case: Case) -> None:
    case.go(
        At("writing a file of the stage", 1, Call("time:sleep", 0.3), onward=True),
        At("checkpoint: weights written", 1, Call("time:sleep", 1.0), onward=True),
    )


# Files


def _shard(output: Path, stage: int = 1) -> Path:
    return sorted(output.glob(f"stages/stage-{stage:03d}/groups/*.arrow"))[0]


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def _copy_twice(output: Path) -> None:
    shard = _shard(output)
    shutil.copy(shard, shard.with_name(shard.name.replace("-000000-", "-000009-")))


def _copy_from_stage_0(output: Path) -> None:
    foreign = _shard(output, 0)
    shutil.copy(foreign, _shard(output).with_name(foreign.name.replace("-000000-", "-000009-")))


def _edit_manifest(output: Path) -> None:
    path = output / "stages/stage-001/manifest.json"
    path.write_text(path.read_text().replace('"temperature": 1.0', '"temperature": 0.9'))


def _leave_temporary_files(output: Path) -> None:
    stage = output / "stages/stage-001"
    (stage / "policy.tmp").mkdir()
    for name in ("groups/r0-000007-00.arrow.tmp", "manifest.json.tmp", "policy.tmp/part-0"):
        (stage / name).write_bytes(b"half")


def _lose_policy(output: Path) -> None:
    shutil.rmtree(output / "stages/stage-001/policy")


def _damaged(damage: Callable[[Path], Any], killed: At) -> Any:
    """Killed, damaged, and gone on with."""

    def run(case: Case) -> None:
        case.dies(flush_each_batch, killed)
        damage(case.output)
        case.go()

    return run


def _contradicts(damage: Callable[[Path], Any], killed: At, mend: Callable[[Path], Any]) -> Any:
    """Killed, damaged, refused; mended, and gone on with."""

    def run(case: Case) -> None:
        case.dies(flush_each_batch, killed)
        damage(case.output)
        case.go(exits=2)
        mend(case.output)
        case.go()

    return run


def _drop_newest_checkpoint(output: Path) -> None:
    shutil.rmtree(max(output.glob("checkpoint-*"), key=lambda path: int(path.name.removeprefix("checkpoint-"))))


def _drop_stage_1(output: Path) -> None:
    shutil.rmtree(output / "stages/stage-001")


def _of_newest_checkpoint(name: str, change: Callable[[Path], Any]) -> Callable[[Path], Any]:
    return lambda output: change(output / "checkpoint-8" / name)


# Signals and other runs


def _signalled(place: str, call: int, *numbers: int, exits: int) -> Any:
    def run(case: Case) -> None:
        started = time.monotonic()
        case.go(*(At(place, call, Signal(number)) for number in numbers), exits=exits)
        case.notes.append(f"ended {time.monotonic() - started:.1f} s after its start")
        case.go()

    return run


def _two_runs(case: Case) -> None:
    """A second start while the first one runs."""
    first = case.start(At("generating", 6, Call("time:sleep", 6.0)))
    first.wait_for("generating", 6)
    case.go(exits=2)
    if first.wait().exitcode:
        raise Unexpected(f"the first run was disturbed:\n{first.log[-3000:]}")


# Ranks


def _rank_fails(place: str, call: int, rank: int = 1) -> Any:
    """An exception on one rank; both must end within seconds, each with its traceback in its log."""

    def run(case: Case) -> None:
        ended = case.go(At(place, call, fail, rank=rank), exits=None)
        if 0 in ended.exitcodes or max(ended.ended_s) - min(ended.ended_s) > 20:
            raise Unexpected(f"exit codes {ended.exitcodes}, ended at {ended.ended_s}:\n{ended.log[-4000:]}")
        case.notes.append(f"both ended within {max(ended.ended_s) - min(ended.ended_s):.1f} s")
        case.go()

    return run


def _rank_killed(place: str, call: int) -> Any:
    def run(case: Case) -> None:
        ended = case.go(At(place, call, die, rank=1), exits=None)
        if 0 in ended.exitcodes or max(ended.ended_s) - min(ended.ended_s) > 20:
            raise Unexpected(f"exit codes {ended.exitcodes}, ended at {ended.ended_s}:\n{ended.log[-4000:]}")
        case.notes.append(f"the other ended {max(ended.ended_s) - min(ended.ended_s):.1f} s later")
        case.go()

    return run


def _slow_rank(case: Case) -> None:
    case.go(
        At("generating", 1, Call("time:sleep", 4.0), rank=1),
        At("forward and backward", 2, Call("time:sleep", 3.0), rank=1),
    )


_FILLING = At("flushing", 10, die)
_WITHIN = At("after an optimizer step", 8, die)
_LATE = At("after an optimizer step", 9, die)
_SET_ASIDE = Recovers(warning="is set aside")
_PASSED_OVER = Recovers(warning="Passed over: .*checkpoint-8")
_BOUNDARY = Fails("lies within stage 1.*Resume from a checkpoint at a stage boundary", then=BITWISE)

FAULTS = [
    Fault("the disk is full", "flushing", Fails("is full: .* bytes needed.*what is written is safe", then=BITWISE),
          _full_at("flushing", 9), needs="mount", quick=True),
    Fault("the disk is full", "publishing β",
          Fails("policy could not be written.*what is on the disk is safe", then=BITWISE), _full_at("writing β", 2),
          needs="mount"),
    Fault("the disk is full", "completing the stage", Fails("is full: .* bytes needed", then=BITWISE),
          _full_at("completing the stage", 2), needs="mount"),
    Fault("the disk is full", "writing a checkpoint", Fails("checkpoint.*could not be written", then=BITWISE),
          _full_at("checkpoint", 3), needs="mount"),
    Fault("the stage's folder refuses new files", "flushing",
          Fails("cannot be written .Operation not permitted.*what is written is safe", then=BITWISE),
          _refused_at("flushing", 9), needs="mount"),
    Fault("the disk is read-only", "from the start", Fails("Nothing can be written to .*Read-only", then=BITWISE),
          _read_only_from_the_start, needs="mount"),
    Fault("a slow disk", "0.3 s a shard, 1 s a checkpoint", BITWISE, _slow_disk),
    Fault("a shard is truncated", "filling stage 1", _SET_ASIDE, _damaged(lambda out: _cut(_shard(out)), _FILLING),
          quick=True),
    Fault("a bit of a shard is flipped", "filling stage 1", _SET_ASIDE,
          _damaged(lambda out: _flip(_shard(out)), _FILLING)),
    Fault("a shard is gone", "filling stage 1", BITWISE, _damaged(lambda out: _shard(out).unlink(), _FILLING)),
    Fault("a shard is there twice", "filling stage 1", _SET_ASIDE, _damaged(_copy_twice, _FILLING)),
    Fault("a shard of another stage", "filling stage 1", _SET_ASIDE, _damaged(_copy_from_stage_0, _FILLING)),
    Fault("the manifest is gone", "filling stage 1", Recovers(warning="It is written again"),
          _damaged(lambda out: (out / "stages/stage-001/manifest.json").unlink(), _FILLING)),
    Fault("the manifest is cut", "filling stage 1", Recovers(warning="It is written again"),
          _damaged(lambda out: _cut(out / "stages/stage-001/manifest.json"), _FILLING)),
    Fault("the manifest is edited", "filling stage 1", Fails("holds another stage: sampling.*0.9 → 1.0", then=BITWISE),
          _contradicts(_edit_manifest, _FILLING, _drop_stage_1)),
    Fault("temporary files are left", "filling stage 1", BITWISE, _damaged(_leave_temporary_files, _FILLING)),
    Fault("the policy folder is gone", "filling stage 1", BITWISE, _damaged(_lose_policy, _FILLING)),
    Fault("the policy folder is gone", "optimizing on stage 1", BITWISE, _damaged(_lose_policy, _WITHIN)),
    Fault("a shard is truncated", "optimizing on stage 1", _BOUNDARY,
          _contradicts(lambda out: _cut(_shard(out)), _WITHIN, _drop_newest_checkpoint)),
    Fault("a bit of a shard is flipped", "optimizing on stage 1", _BOUNDARY,
          _contradicts(lambda out: _flip(_shard(out)), _WITHIN, _drop_newest_checkpoint)),
    Fault("the stage is gone", "optimizing on stage 1", _BOUNDARY,
          _contradicts(_drop_stage_1, _WITHIN, _drop_newest_checkpoint)),
    *(
        Fault(f"`{name}` of the newest checkpoint is {what}", "between two starts", _PASSED_OVER,
              _damaged(_of_newest_checkpoint(name, change), _LATE))
        for name in ("trainer_state.json", "model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt")
        for what, change in (("cut", _cut), ("gone", Path.unlink))
    ),
    Fault("two runs in one `output_dir`", "filling stage 1", Fails("is in use by another run", then=BITWISE),
          _two_runs),
    Fault("SIGTERM", "generating", Fails("", 143, then=BITWISE),
          _signalled("generating", 6, signal.SIGTERM, exits=143)),
    Fault("SIGTERM", "within an update", Fails("", 143, then=BITWISE),
          _signalled("forward and backward", 5, signal.SIGTERM, exits=143), quick=True),
    Fault("SIGINT", "within an update", Fails("", 130, then=BITWISE),
          _signalled("forward and backward", 5, signal.SIGINT, exits=130)),
    Fault("SIGINT twice", "within an update", Fails("KeyboardInterrupt", -signal.SIGINT, then=BITWISE),
          _signalled("forward and backward", 5, signal.SIGINT, signal.SIGINT, exits=-signal.SIGINT)),
    Fault("one of two ranks fails", "generating", Fails("ZeroDivisionError: injected", 1, then=BITWISE),
          _rank_fails("generating", 3), RANKS),
    Fault("one of two ranks fails", "optimizing", Fails("ZeroDivisionError: injected", 1, then=BITWISE),
          _rank_fails("forward and backward", 6), RANKS),
    Fault("one of two ranks fails", "writing a checkpoint", Fails("ZeroDivisionError: injected", 1, then=BITWISE),
          _rank_fails("checkpoint", 2, rank=0), RANKS),
    Fault("one of two ranks is killed", "generating", BITWISE, _rank_killed("generating", 3), RANKS),
    Fault("one of two ranks is killed", "optimizing", BITWISE, _rank_killed("forward and backward", 6), RANKS),
    Fault("one of two ranks is slow", "4 s generating, 3 s in an update", BITWISE, _slow_rank, RANKS),
]  # fmt: skip
