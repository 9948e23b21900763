"""What surrounds a whole run: its folders are its own, signals end it in order, and no rank outlives another."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState

from .checkpoints import check_optimizer_state, read_stage_state
from .config import MuGRPOConfig
from .locks import FolderInUseError, RunLock
from .ranks import broadcast_string
from .rollout.rendezvous import MEETING_PREFIX, PeerError, Rendezvous
from .signals import Interrupted, StopRequest
from .trackers import open_wandb_run

logger = logging.getLogger(__name__)

PEER_POLL_S = 1.0
PEER_GRACE_S = 10.0
"""Time that a rank has to end by itself after another failed: it may be stuck in a collective."""


def lock_folders(config: MuGRPOConfig, lock: RunLock | None = None) -> RunLock:
    """
    Keep other runs out of `output_dir` and the stages folder: the main process takes `lock`, by default a new one.
    Collective.

    Raises:
        `FolderInUseError`: on all ranks, when another process works there.
    """
    state = PartialState()
    lock = lock or RunLock([config.output_path, config.stages_path])
    error = ""
    if state.is_main_process:
        try:
            lock.acquire()
        except (FolderInUseError, OSError) as reason:
            error = str(reason)
    if error := broadcast_string(state, error):
        raise FolderInUseError(error)
    return lock


@contextmanager
def running(
    config: MuGRPOConfig, accelerator: Accelerator, lock: RunLock, stop: StopRequest, checkpoint: str | None
) -> Iterator[None]:
    """
    The folders locked, signals handled and the run of W&B kept inside the block. Collective.

    Raises:
        `FolderInUseError`: on all ranks, when another process works in the folders.
        `CheckpointError`: `checkpoint` is not whole, or its optimizer none for this run.
    """
    lock_folders(config, lock)
    try:
        if checkpoint is not None:
            read_stage_state(Path(checkpoint))
            check_optimizer_state(Path(checkpoint), accelerator)
            _load_onto_numbered_cpus()
        open_wandb_run(config, accelerator.is_main_process, resumed=checkpoint is not None)
        with stop.handled():
            yield
    finally:
        lock.release()


@cache
def _load_onto_numbered_cpus() -> None:
    """Let `torch.load` put an optimizer on `cpu:0`, as accelerate calls the device of a rank on the CPU."""
    torch.serialization.register_package(
        priority=100,
        tagger=lambda storage: None,
        deserializer=lambda storage, location: storage if location.startswith("cpu:") else None,
    )


@contextmanager
def ended_with_peers(accelerator: Accelerator, folder: Path) -> Iterator[None]:
    """
    Inside the block, end this process `PEER_GRACE_S` after another rank left it with an exception, also when this one
    waits for that rank in a collective, and log the other's error. `folder` is shared by all ranks. Collective.

    Raises:
        `Interrupted`: in place of what went wrong here, when another rank was ended by a signal before.
    """
    if accelerator.num_processes == 1:
        yield
        return
    name = f"{MEETING_PREFIX}{broadcast_string(accelerator, uuid.uuid4().hex)}"
    meeting = Rendezvous(folder / name, accelerator.process_index, accelerator.num_processes, purpose="during the run")
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(meeting, over), daemon=True, name="peer-watch")
    thread.start()
    try:
        yield
    except BaseException as error:
        try:
            meeting.check()  # a lost connection is only what another rank's failure looks like from here
        except PeerError as first:
            logger.error("%s", first)
        meeting.tell(error)
        raise
    finally:
        over.set()
        thread.join()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        meeting.remove()


def _watch(meeting: Rendezvous, over: threading.Event) -> None:
    while not over.wait(PEER_POLL_S):
        try:
            meeting.check()
        except Interrupted as interrupted:
            code, reason = int(interrupted.code or 0), "Another rank was ended by a signal."
        except PeerError as error:
            code, reason = 1, str(error)
        else:
            continue
        logger.error("%s", reason)
        if not over.wait(PEER_GRACE_S):
            logger.error("This rank is stuck and ends with exit code %d.", code)
            logging.shutdown()
            os._exit(code)
        return
