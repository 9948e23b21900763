"""What surrounds a whole run: its folders are its own, signals end it in order, and no rank outlives another."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .checkpoints import check_optimizer_state, last_whole_checkpoint, read_stage_state
from .config import MuGRPOConfig
from .locks import FolderInUseError, RunLock
from .ranks import broadcast_string
from .rollout.rendezvous import MEETING_PREFIX, PeerError, Rendezvous
from .signals import Interrupted, StopRequest
from .stage.reader import StageReader
from .stage.schema import MANIFEST_NAME, StageError
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
    except Interrupted as interrupted:
        if accelerator.is_main_process:
            logger.warning("The run was %s. %s", interrupted, what_is_saved(config))
        raise
    finally:
        lock.release()


def what_is_saved(config: MuGRPOConfig) -> str:
    """What of a run that was ended is on the disk, and how to go on with it."""
    said = []
    if any(config.output_path.glob(f"{PREFIX_CHECKPOINT_DIR}-*")) and (
        path := last_whole_checkpoint(config.output_path)
    ):
        said.append(f"the checkpoint {path}")
    for stage in sorted(config.stages_path.glob(f"stage-*/{MANIFEST_NAME}"))[-1:]:
        with suppress(StageError):
            reader = StageReader(stage.parent, allow_filling=True)
            said.append(f"{len(reader)} of {reader.manifest.num_groups} prompt groups of {reader.path}")
    return (
        f"On the disk are {' and '.join(said)}. Go on with `--resume auto`."
        if said
        else "Nothing was on the disk yet."
    )


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
