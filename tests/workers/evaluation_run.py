"""`mu-grpo eval` as a child of the fork server (see `tests/processes.py`), killed in the middle on request."""

from __future__ import annotations

import os
import signal
import sys

from mu_grpo_trl.evaluation import command
from mu_grpo_trl.evaluation.store import ResponseStore


def child(argv: list[str], log: str, kill_at: int | None) -> None:
    """Run the command with its output in the file `log`; SIGKILL while the problem number `kill_at` is written."""
    stream = open(log, "w")  # noqa: SIM115  # as long as the process
    os.dup2(stream.fileno(), 1)
    os.dup2(stream.fileno(), 2)
    if kill_at is not None:
        _die_in_append(kill_at)
    command.main(argv)
    sys.stdout.flush()


def _die_in_append(at: int) -> None:
    append, calls = ResponseStore.append, 0

    def dying(store: ResponseStore, responses) -> None:
        nonlocal calls
        calls += 1
        append(store, responses)
        if calls == at:
            size = store.path.stat().st_size
            os.truncate(store.path, size - 5)  # what reached the disk of a write that was cut
            os.kill(os.getpid(), signal.SIGKILL)

    ResponseStore.append = dying
