"""One run at a time in a folder: a lock that ends with the process that holds it, however that process ends."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

LOCK_NAME = "run.lock"


class FolderInUseError(ValueError):
    """Another run works in a folder; the message says which."""


class RunLock:
    """
    Keeps other processes out of the folders of a run, from [`acquire`] until [`release`], until nothing refers to it
    any more, or until the process ends.

    The lock is the operating system's (`flock` on `run.lock`), so that one left by a killed process keeps nobody out.
    Within a process it is shared: a notebook may build its next trainer while the last one still exists.

    Args:
        folders (`Iterable[Path]`): to be locked together; they must exist.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self._paths = sorted({folder.resolve() / LOCK_NAME for folder in folders})
        self._held: list[_HeldFile] = []

    def acquire(self) -> None:
        """
        Take the lock, or keep it if it is held already.

        Raises:
            `FolderInUseError`: another process holds it; the message gives its pid, host and start.
        """
        if self._held:
            return
        held = [_HeldFile.of(path) for path in self._paths]
        self._held = held

    def release(self) -> None:
        """Let other processes in, unless another lock of this process is on the same folder."""
        self._held = []


class _HeldFile:
    """One locked file, unlocked when nothing refers to this any more."""

    _open: weakref.WeakValueDictionary[Path, _HeldFile] = weakref.WeakValueDictionary()

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _holder(self._descriptor)
            self.close()
            raise FolderInUseError(
                f"{str(path.parent)!r} is in use by another run ({holder}): two runs in one folder would mix their "
                "checkpoints and stages. Wait for it, end it, or choose another `output_dir` (and `stage_dir`)."
            ) from error
        except OSError as error:
            logger.warning("%s cannot be locked (%s): make sure that only one run works there.", path, error)
        else:
            os.truncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(_myself()).encode(), 0)
        held = weakref.ref(self)
        # Else a forked child, orphaned by the death of its parent, would keep the lock.
        os.register_at_fork(after_in_child=lambda: _close(held()))

    @classmethod
    def of(cls, path: Path) -> _HeldFile:
        held = cls._open.get(path)
        if held is None or held._descriptor is None:
            held = cls._open[path] = cls(path)
        return held

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    __del__ = close


def _close(held: _HeldFile | None) -> None:
    if held is not None:
        held.close()


def _myself() -> dict[str, str | int]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S%z")}


def _holder(descriptor: int) -> str:
    with suppress(OSError, ValueError, KeyError, TypeError):
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}, started {holder['started']}"
    return "which has not yet said who it is"
