"""SIGTERM and SIGINT ask a run to end in order; what they asked for is acted on where nothing gets lost."""

from __future__ import annotations

import builtins
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)

_DEFAULT_HANDLERS = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}


class Interrupted(SystemExit):
    """
    A run was ended by a signal, with all that it had done on the disk. Ends the process with 128 + the signal's
    number (143 for SIGTERM, 130 for SIGINT) unless it is caught.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum

    def __str__(self) -> str:
        return f"ended by {signal.Signals(self.signum).name}"


class StopRequest:
    """
    Whether a signal asked this process to end its run.

    `with request.handled():` turns signals into requests; code in the block asks for them by `signum`, or has them
    raised by [`check`] and, at any moment, within [`interruptible`]. A second SIGINT is a `KeyboardInterrupt` at once.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._interruptible = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """
        Handle SIGTERM and SIGINT inside the block. Nothing is changed in notebooks and outside the main thread, nor
        where the program handles a signal itself.
        """
        self.signum = 0
        former = {}
        if threading.current_thread() is threading.main_thread() and not hasattr(builtins, "__IPYTHON__"):
            former = {
                number: default for number, default in _DEFAULT_HANDLERS.items() if signal.getsignal(number) is default
            }
        for number in former:
            signal.signal(number, self._receive)
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def check(self) -> None:
        """
        Raises:
            `Interrupted`: a signal came.
        """
        if self.signum:
            raise Interrupted(self.signum)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a signal raise `Interrupted` anywhere inside the block; one that came before raises at its start."""
        self._interruptible = True
        try:
            self.check()
            yield
        finally:
            self._interruptible = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signum == signal.SIGINT:
            raise KeyboardInterrupt
        first, self.signum = not self.signum, self.signum or number
        if self._interruptible:
            self._interruptible = False
            raise Interrupted(self.signum)
        if first:
            logger.warning(
                "%s: the run ends after this update.%s",
                signal.Signals(number).name,
                " Once more stops it at once." if number == signal.SIGINT else "",
            )
