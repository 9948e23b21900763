"""Faults of reward functions and of the processes they run in."""

from __future__ import annotations

import time
from typing import Any

import psutil
from helpers import PROMPTS

from . import scoring
from .case import BITWISE, Case, Fails, Fault, Recovers, Setting, Unexpected
from .worker import At, die

POOL = Setting(reward="faults.scoring:score", options={"reward_timeout_s": 1.0, "reward_workers": 2})
THREAD = POOL.but(reward=scoring.score)
ASYNC = POOL.but(reward=scoring.score_async)
PROMPT = {"REWARD_FAULT_PROMPT": PROMPTS[5]}


def _with(setting: Setting, fault: str, **options: Any) -> Setting:
    return setting.but(env={"REWARD_FAULT": fault, **PROMPT}, options=options)


def _once(case: Case) -> None:
    case.go()


def _happens_once(fault: str) -> Any:
    """At the first group of the prompt only."""

    def run(case: Case) -> None:
        marker = case.folder / "happened"
        case.go(setting=case.setting.but(env={"REWARD_FAULT": fault, "REWARD_FAULT_MARKER": str(marker), **PROMPT}))
        if not marker.exists():
            raise Unexpected("the fault did not happen")

    return run


def _until_mended(fault: str) -> Any:
    """One start that stops; one with the reward mended, which generates nothing again."""

    def run(case: Case) -> None:
        case.go(setting=_with(case.setting, fault), exits=2)
        before = case.asked()
        case.go()
        again = set(before) & set(case.asked()[len(before) :])
        if again:
            raise Unexpected(f"(seed, group) {sorted(again)[:5]} were generated again")
        case.notes.append(f"{len(before)} groups generated before, 0 again")

    return run


def _trainer_killed(case: Case) -> None:
    """The workers die with the trainer."""
    running = case.start(At("flushing", 3, die), setting=_with(case.setting, "sleep", reward_timeout_s=60.0))
    running.wait_for("scoring", 2)
    time.sleep(1.0)
    workers = psutil.Process(running.processes[0].pid).children(recursive=True)
    if not workers:
        raise Unexpected("no worker process was found")
    running.kill()
    running.wait()
    _gone, alive = psutil.wait_procs(workers, timeout=5)
    if any(process.status() != psutil.STATUS_ZOMBIE for process in alive):
        raise Unexpected(f"{len(alive)} workers outlived the trainer")
    case.notes.append(f"{len(workers)} workers died with it")
    case.go()


_UNSCORABLE = "the groups of one prompt"
_LOST = {
    "sleep": "hangs",
    "gil": "hangs in C code that holds the interpreter",
    "number": "hangs in the conversion of a huge number",
    "regex": "hangs in a backtracking regular expression",
    "freeze": "is frozen with its process",
    "exit": "ends its process",
    "segfault": "crashes its process, whenever it is called",
    "huge": "returns 128 MiB",
    "close": "closes all files of its process",
    "nan": "returns NaN",
    "inf": "returns infinities",
}
_REFUSED = {
    "raise": ("raises", "raised on prompt.*(?s:.)*ZeroDivisionError: injected"),
    "memory": ("eats the memory", "raised on prompt.*(?s:.)*MemoryError"),
    "short": ("returns a reward too few", "returned 3 rewards for 4 completions"),
    "text": ("returns text", "which is no number"),
    "scalar": ("returns one number", "of type float"),
    "nothing": ("returns nothing", "of type NoneType"),
}


def _reference(setting: Setting) -> Setting:
    """The run in which the reward says `None` where it is lost here."""
    return _with(setting, "none")


FAULTS = [
    *(
        Fault(f"a reward in a process {what}", _UNSCORABLE,
              Recovers(warning="" if fault in ("nan", "inf") else "are unscorable"), _once, _with(POOL, fault),
              _reference(POOL), quick=fault == "gil")
        for fault, what in _LOST.items()
    ),
    *(
        Fault(f"a reward in a process {what}", _UNSCORABLE, Fails(message, then=BITWISE), _until_mended(fault), POOL)
        for fault, (what, message) in _REFUSED.items()
    ),
    Fault("a reward in a process raises, `reward_error: unscorable`", _UNSCORABLE, Recovers(warning="are unscorable"),
          _once, _with(POOL, "raise", reward_error="unscorable"), _reference(POOL)),
    Fault("a reward's process is killed", "within a call", BITWISE, _happens_once("kill"), POOL),
    Fault("a reward floods its output", _UNSCORABLE, BITWISE, _once, _with(POOL, "flood"), POOL),
    Fault("the trainer is killed while rewards hang", "stage 0", BITWISE, _trainer_killed, POOL),
    Fault("a reward on a thread hangs", _UNSCORABLE, Recovers(warning="are unscorable"), _once,
          _with(THREAD, "sleep"), _reference(THREAD)),
    Fault("a reward on a thread raises", _UNSCORABLE, Fails(_REFUSED["raise"][1], then=BITWISE),
          _until_mended("raise"), THREAD, quick=True),
    Fault("a reward on a thread returns a reward too few", _UNSCORABLE, Fails(_REFUSED["short"][1], then=BITWISE),
          _until_mended("short"), THREAD),
    Fault("an async reward hangs", _UNSCORABLE, Recovers(warning="are unscorable"), _once, _with(ASYNC, "await"),
          _reference(ASYNC)),
    Fault("an async reward blocks its event loop", _UNSCORABLE, Recovers(warning="are unscorable"), _once,
          _with(ASYNC, "sleep"), _reference(ASYNC)),
]  # fmt: skip
