"""How ranks wait for hours without a collective: small files in a shared folder, renamed into place and polled."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ..signals import Interrupted

logger = logging.getLogger(__name__)

POLL_S = 0.2
HEARTBEAT_S = 5.0


MEETING_PREFIX = ".meeting-"
"""Of the folders that meetings are held in."""
INTERRUPTED = "Interrupted by signal "


class PeerError(RuntimeError):
    """Another rank failed, or fell silent; the message is that rank's."""


@dataclass(frozen=True)
class _Process:
    """A process by its id, and by the boot and PID namespace in which that id means something (empty: unknown)."""

    pid: int
    space: str

    @classmethod
    def this(cls) -> _Process:
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return cls(os.getpid(), f"{boot} {os.readlink('/proc/self/ns/pid')}")
        except OSError:
            return cls(os.getpid(), "")

    def is_gone(self) -> bool:
        """Whether it is one of this machine's, and has ended."""
        if not self.space or self.space != self.this().space:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False


class Rendezvous:
    """
    One meeting of all ranks, in a folder of its own. Each rank calls [`work`] around its share (which may be nothing)
    and [`wait`] afterwards; [`check`] in between tells of failures early.

    A process group would time out (`ddp_timeout`) while rank 0 waits for servers; polling files does not.

    Args:
        folder (`Path`): shared by all ranks, new for every meeting.
        rank (`int`): of this process.
        num_ranks (`int`): how many meet.
        silence_s (`float`): a rank that neither finished nor gave a sign of life for so long counts as dead.
        purpose (`str`): what they meet for, as error messages put it.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        num_ranks: int,
        silence_s: float = 300.0,
        purpose: str = "while the stage was being made",
    ) -> None:
        self._folder = folder
        self._rank = rank
        self._num_ranks = num_ranks
        self._silence_s = silence_s
        self._purpose = purpose
        self._started = time.time()
        self._processes: dict[int, _Process] = {}
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # without it, others notice a killed rank by its silence only
            self._write("alive", json.dumps(asdict(_Process.this())))

    @contextmanager
    def work(self) -> Iterator[None]:
        """Announce how the block ended: done, or the exception it raised. Gives signs of life meanwhile."""
        ended = threading.Event()
        thread = threading.Thread(target=self._beat, args=(ended,), daemon=True, name="rendezvous-heartbeat")
        thread.start()
        try:
            yield
        except BaseException as error:
            self.tell(error)
            raise
        else:
            self._write("done", "")
        finally:
            ended.set()
            thread.join()

    def check(self) -> None:
        """
        Raises:
            `PeerError`: another rank has failed, or its process is gone.
            `Interrupted`: another rank was ended by a signal.
        """
        for rank in range(self._num_ranks):
            if rank == self._rank:
                continue
            gone = self._is_gone(rank)  # looked at first: what it wrote last is then there
            path = self._path("error", rank)
            if not path.exists():
                if gone and not self._path("done", rank).exists():
                    raise PeerError(f"Rank {rank} is gone: its process {self._processes[rank].pid} was killed.")
                continue
            text = path.read_text()
            if text.startswith(INTERRUPTED):
                raise Interrupted(int(text.removeprefix(INTERRUPTED)))
            raise PeerError(f"Rank {rank} failed {self._purpose}: {text}")

    def wait(self) -> None:
        """
        Return once every rank is done.

        Raises:
            `PeerError`: another rank failed, or was silent for longer than `silence_s`.
            `Interrupted`: another rank was ended by a signal.
        """
        missing = set(range(self._num_ranks))
        while True:
            self.check()
            missing = {rank for rank in missing if not self._path("done", rank).exists()}
            if not missing:
                return
            for rank in missing:
                silent_s = time.time() - self._last_sign(rank)
                if silent_s > self._silence_s:
                    raise PeerError(f"Rank {rank} gave no sign of life for {silent_s:.0f} s; it is dead or frozen.")
            time.sleep(POLL_S)

    def tell(self, error: BaseException) -> None:
        """Announce to the others that this rank leaves with `error`; on a full disk they will miss its process."""
        interrupted = isinstance(error, Interrupted)
        try:
            self._write("error", f"{INTERRUPTED}{error.signum}" if interrupted else f"{type(error).__name__}: {error}")
        except OSError as reason:
            logger.warning("Other ranks cannot be told of the error on this one: %s", reason)

    def remove(self) -> None:
        """Delete the folder; call it after a barrier, on one rank."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _is_gone(self, rank: int) -> bool:
        """Whether the process of a rank on this machine has ended; unknown processes count as there."""
        if rank not in self._processes:
            try:
                self._processes[rank] = _Process(**json.loads(self._path("alive", rank).read_text()))
            except (OSError, ValueError, TypeError):
                return False
        return self._processes[rank].is_gone()

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(HEARTBEAT_S):
            self._path("alive", self._rank).touch()

    def _last_sign(self, rank: int) -> float:
        try:
            return max(self._started, self._path("alive", rank).stat().st_mtime)
        except FileNotFoundError:
            return self._started

    def _path(self, kind: str, rank: int) -> Path:
        return self._folder / f"{kind}-{rank}"

    def _write(self, kind: str, text: str) -> None:
        path = self._path(kind, self._rank)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text)
        os.replace(temporary, path)
