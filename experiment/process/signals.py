"""Stopping on request: SIGINT, SIGTERM and SIGUSR1 set a flag that the loops check between two steps."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

# Schedulers send SIGUSR1 as a warning, and srun forwards it.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_ECHO_S = 1.0
_ONCE_MORE = b"\nThe run stops after this step and saves; a second Ctrl-C ends it at once, without saving.\n"


class Aborted(KeyboardInterrupt):
    """The end of a run that a second SIGINT asked for. Nothing is saved."""


class StopRequest:
    """Context manager: the first of these signals sets `requested`, a second SIGINT aborts at once.

    Ctrl-C reaches a process under a launcher twice, from the terminal and from the launcher, which passes it
    on. A signal that follows within a second therefore counts as the same.
    Outside the main thread this does nothing, because Python lets only that thread handle signals.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._previous: dict[int, Any] = {}
        self._pid = os.getpid()
        self._first_s = 0.0
        self._begin_s = time.monotonic()
        self.after_epoch: str | None = None  # reason why training ends after the running epoch

    def requested(self) -> bool:
        """True once a signal asked this process to stop."""
        return self.signal_name is not None

    def ask(self, who: str) -> None:
        """Ask this process to stop, as a signal would, on behalf of `who`."""
        self.signal_name = self.signal_name or who

    def ask_after_epoch(self, reason: str) -> None:
        """Ask for the end of training after the running epoch; the first reason counts.

        This leaves `requested` as it is: nothing is interrupted, and the process continues.
        """
        self.after_epoch = self.after_epoch or reason

    def age_s(self) -> float:
        """Seconds since this object was entered."""
        return time.monotonic() - self._begin_s

    def __enter__(self) -> StopRequest:
        self.signal_name = None  # earlier signals do not apply to this block
        self._pid, self._begin_s = os.getpid(), time.monotonic()
        if threading.current_thread() is threading.main_thread():
            self._previous = {int(s): signal.signal(s, self._handle) for s in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)
        self._previous, self.after_epoch = {}, None

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked worker that inherited this handler
            if signum == signal.SIGTERM:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGTERM)
            return
        if self.signal_name is not None and signum == signal.SIGINT and not self._is_echo():
            raise Aborted("second SIGINT: stopped without saving")
        if self.signal_name is None:
            self._first_s = time.monotonic()
            if signum == signal.SIGINT and os.environ.get("LOCAL_RANK", "0") == "0":
                with contextlib.suppress(OSError):  # not through sys.stderr, which may be in use just now
                    os.write(2, _ONCE_MORE)
        self.signal_name = signal.Signals(signum).name

    def _is_echo(self) -> bool:
        """True if a launcher is passing on a signal that the terminal has sent already."""
        return "LOCAL_RANK" in os.environ and time.monotonic() - self._first_s < _ECHO_S
