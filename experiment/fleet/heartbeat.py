"""A small file per process that says what it does, written beside the work by a thread of its own."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import re
import socket
import threading
import time
import uuid
import weakref
from collections import deque
from pathlib import Path
from typing import Any

from .machine import machine_id, process_start

STATES = ("starting", "collecting", "learning", "evaluating", "waiting", "stopped", "failed", "finished")
ENDED_STATES = ("stopped", "failed", "finished")
ROLES = ("both", "learner", "actor")
STATUS_FOLDER = "status"
FORMAT = 1
PERIOD_S = 2.0  # between two writes
_RATE_OVER_S = 10.0  # speeds are means over this long
_MIN_GAP_S = 0.05  # between two writes, however often the state changes
_CLOSE_TIMEOUT_S = 5.0  # a file system that hangs must not keep a finished process
_logger = logging.getLogger("loxodon")


class Heartbeat:
    """Writes `<run_dir>/status/<role>_<host>_<pid>.json` every period and at once on a change of state.

    The calls only fill in a dictionary; a daemon thread writes. A folder that cannot be written is logged
    once and tried again; it never fails the run. Forked children inherit nothing of it.

    Args:
        run_dir: folder of the run.
        role: "both", "learner" or "actor".
        rank: of this process among the learner's.
        period_s: between two writes.
    """

    def __init__(self, run_dir: Path, role: str, *, rank: int = 0, period_s: float = PERIOD_S) -> None:
        self._writer = _Writer(run_dir, role, rank, period_s)
        self.path = self._writer.path
        self._writer.thread.start()
        self._finalizer = weakref.finalize(self, self._writer.end)

    @property
    def process_id(self) -> str:
        """Random name of this process; unlike a pid it is never used again."""
        return str(self._writer.facts["id"])

    def state(self, state: str, note: str | None = None) -> None:
        """Tell what this process does from now on: one of STATES. note: one line, what it waits for."""
        assert state in STATES
        figures = self._writer.figures
        if figures["state"] != state or figures["note"] != note:
            figures.update(state=state, note=_one_line(note))
            self._writer.wake.set()

    def put(self, **figures: Any) -> None:
        """Tell new figures; they are written with the next beat. Names are those of `Beat`.

        Known: epoch, env_steps, gradient_steps, policy_version, buffer, buffer_files, spaces_digest.
        """
        self._writer.figures.update(figures)

    def close(self, state: str | None = None, note: str | None = None) -> None:
        """Write the last state: the given one, else the one told if it is an end, else "stopped"."""
        if self._finalizer.detach() is not None:
            self._writer.end(state, note)


class _Writer:
    """What the thread works with; it does not keep the Heartbeat alive."""

    def __init__(self, run_dir: Path, role: str, rank: int, period_s: float) -> None:
        host = socket.gethostname()
        self.pid = os.getpid()
        self.folder = run_dir.absolute() / STATUS_FOLDER  # the thread must not follow a change of directory
        self.path = self.folder / f"{role}_{re.sub(r'[^A-Za-z0-9.-]', '-', host)}_{self.pid}.json"
        self.period_s = period_s
        self.facts: dict[str, Any] = {
            "format": FORMAT,
            "id": uuid.uuid4().hex,
            "role": role,
            "host": host,
            "pid": self.pid,
            "rank": rank,
            "started": time.time(),
            "machine": machine_id(),
            "process_start": process_start(self.pid),
            "loxodon": _version(),
        }
        self.figures: dict[str, Any] = {
            "state": "starting",
            "note": None,
            "epoch": 0,
            "env_steps": 0,
            "gradient_steps": 0,
            "policy_version": 0,
            "buffer": None,
            "buffer_files": None,
            "spaces_digest": None,
        }
        self.num_beats = 0
        self.has_complained = False
        self.is_closing = False
        self.wake, self.closing = threading.Event(), threading.Event()
        self.history: deque[tuple[float, int, int]] = deque()
        self.thread = threading.Thread(target=self.run, name="heartbeat", daemon=True)

    def run(self) -> None:
        self.set_aside_namesake()
        while not self.is_closing:
            self.write()
            self.closing.wait(_MIN_GAP_S)
            self.wake.wait(self.period_s)
            self.wake.clear()
        self.write()

    def end(self, state: str | None = None, note: str | None = None) -> None:
        """Write the last state and end the thread; in a forked child, do nothing."""
        if os.getpid() != self.pid:
            return
        if state is None and self.figures["state"] not in ENDED_STATES:
            state = "stopped"
        if state is not None:
            self.figures.update(state=state, note=_one_line(note))
        self.is_closing = True
        self.closing.set()
        self.wake.set()
        self.thread.join(_CLOSE_TIMEOUT_S)

    def write(self) -> None:
        """Replace the file; what stands in the way is logged once."""
        self.num_beats += 1
        figures = dict(self.figures)
        env_steps_per_s, updates_per_s = self.speeds(figures["env_steps"], figures["gradient_steps"])
        record = {
            **self.facts,
            "time": time.time(),
            "beat": self.num_beats,
            **figures,
            "env_steps_per_s": env_steps_per_s,
            "updates_per_s": updates_per_s,
        }
        temporary = self.path.with_name(f".{self.path.name}.tmp")  # no reader takes it for a heartbeat
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(record, default=str) + "\n", encoding="utf-8")
            temporary.replace(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            if not self.has_complained:
                self.has_complained = True
                _logger.warning(
                    "The heartbeat %s cannot be written (%s); the run goes on without. Fix: make space or "
                    "restore the folder's permissions.",
                    self.path,
                    error,
                )

    def speeds(self, env_steps: int, gradient_steps: int) -> tuple[float, float]:
        """Env steps and updates per second over the last seconds."""
        now = time.monotonic()
        history = self.history
        if history and (env_steps < history[-1][1] or gradient_steps < history[-1][2]):
            history.clear()  # a checkpoint was loaded
        history.append((now, env_steps, gradient_steps))
        while len(history) > 2 and now - history[1][0] > _RATE_OVER_S:  # noqa: PLR2004 - two ends of a span
            history.popleft()
        then, first_env_steps, first_gradient_steps = history[0]
        elapsed_s = now - then
        if elapsed_s <= 0:
            return 0.0, 0.0
        return (env_steps - first_env_steps) / elapsed_s, (gradient_steps - first_gradient_steps) / elapsed_s

    def set_aside_namesake(self) -> None:
        """Keep the file of an earlier process that had the same pid: its env steps still count."""
        with contextlib.suppress(OSError):
            old = self.path.with_name(f"{self.path.stem}_{int(self.path.stat().st_mtime)}.json")
            self.path.replace(old)


def _one_line(text: str | None) -> str | None:
    return None if text is None else " ".join(text.split())[:500]


def _version() -> str | None:
    try:
        return importlib.metadata.version("loxodon")
    except importlib.metadata.PackageNotFoundError:
        return None
