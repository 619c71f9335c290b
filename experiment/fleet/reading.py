"""Reads the heartbeats of a run and decides who is alive."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

from .heartbeat import ENDED_STATES, ROLES, STATES, STATUS_FOLDER
from .machine import machine_id, process_start

STALE_S = 30.0  # a process of another machine that has not beaten for so long counts as dead
TOTALS_NAME = "totals.json"  # of the learner, in the same folder; see ratio.py
_CHECK = tuple[int, int, int]  # mtime in ns, inode, size: another content has another one


@dataclass(frozen=True)
class Beat:
    """The last heartbeat of one process.

    Attributes:
        id: random name of the process. role: "both", "learner" or "actor". rank: among the learner's.
        started, time: unix seconds, by the clock of that machine. beat: number of this heartbeat.
        state: one of STATES. note: what it waits for, or its last error.
        env_steps: that it collected (with role "both", those of the whole run up to it).
        policy_version: it acts with, or has published.
        buffer: folder with the trajectories (`.../buffer`). buffer_files: how many it has seen there.
        life: "alive"; "ended" after it said so; "dead" if it went without a word.
        modified: unix seconds, by the clock of the file system.
    """

    id: str
    role: str
    host: str
    pid: int
    rank: int
    started: float
    time: float
    beat: int
    state: str
    note: str | None
    epoch: int
    env_steps: int
    env_steps_per_s: float
    gradient_steps: int
    updates_per_s: float
    policy_version: int
    buffer: str | None
    buffer_files: int | None
    loxodon: str | None
    spaces_digest: str | None
    machine: str
    process_start: int | None
    modified: float
    path: Path
    life: str = "alive"

    @property
    def is_alive(self) -> bool:
        """True while the process is at work, as far as one can tell."""
        return self.life == "alive"


@dataclass
class _Seen:
    """A file as it was read last. changed_s: on the monotonic clock; None until it changed while watched."""

    check: _CHECK
    fields: dict[str, Any] | None
    first_s: float
    changed_s: float | None = None


class StatusReader:
    """Reads the heartbeats of one run again and again; a file is opened only after it has changed.

    Who is alive: a process that said it has ended is not. On this machine the process table decides (pid and
    start time). Elsewhere, a file that changes while this object looks is of a live process, and one that
    does not for 30 s by this process's monotonic clock is of a dead one; no wall clock has a say in that.
    Before 30 s have passed, the age of the file decides for now, as measured by three clocks (this machine's
    against the file system's, the newest file's, and that machine's own): dead is what all three call older
    than 30 s. An age below zero is no sign of death.

    Args:
        run_dir: folder of the run.

    Attributes:
        machine: name of this machine, as in `Beat.machine`.
    """

    def __init__(self, run_dir: Path) -> None:
        self.folder = Path(run_dir) / STATUS_FOLDER
        self.machine = machine_id()
        self._seen: dict[str, _Seen] = {}

    def read(self) -> list[Beat]:
        """The last heartbeat of every process, oldest process first; unreadable files are left out."""
        now_s, found = time.monotonic(), {}
        try:
            paths = [path for path in self.folder.glob("*.json") if path.name != TOTALS_NAME]
        except OSError:
            paths = []
        for path in paths:
            try:
                stat = path.stat()
                if not S_ISREG(stat.st_mode):  # reading a pipe would wait for whoever writes to it
                    continue
                check = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
                seen = self._seen.get(path.name)
                if seen is None or seen.check != check:
                    seen = _follow(seen, check, _parse(path.read_bytes(), path, stat.st_mtime), now_s)
            except OSError:  # replaced or removed at this moment
                continue
            found[path.name] = seen
        self._seen = found
        newest = max((one.fields["modified"] for one in found.values() if one.fields), default=0.0)
        beats = [
            Beat(**one.fields, life=self._life(one.fields, one, newest, now_s))
            for one in found.values()
            if one.fields is not None
        ]
        return sorted(beats, key=lambda beat: (beat.started, beat.host, beat.pid))

    def _life(self, fields: dict[str, Any], seen: _Seen, newest: float, now_s: float) -> str:
        if fields["state"] in ENDED_STATES:
            return "ended"
        if fields["machine"] == self.machine:
            start = process_start(fields["pid"])
            return "alive" if start is not None and start == fields["process_start"] else "dead"
        if seen.changed_s is not None:
            return "alive" if now_s - seen.changed_s <= STALE_S else "dead"
        if now_s - seen.first_s > STALE_S:
            return "dead"
        wall = time.time()
        ages_s = (wall - fields["modified"], newest - fields["modified"], wall - fields["time"])
        return "alive" if min(ages_s) <= STALE_S else "dead"


def read_heartbeats(run_dir: Path) -> list[Beat]:
    """The last heartbeat of every process of a run, oldest process first; see StatusReader."""
    return StatusReader(run_dir).read()


def alive(beats: Sequence[Beat]) -> list[Beat]:
    """Those at work."""
    return [beat for beat in beats if beat.is_alive]


def _follow(seen: _Seen | None, check: _CHECK, fields: dict[str, Any] | None, now_s: float) -> _Seen:
    """What is known of a file after it was read again."""
    if seen is None:
        return _Seen(check, fields, now_s)
    changed = fields is not None and seen.fields is not None and fields["beat"] != seen.fields["beat"]
    return _Seen(check, fields or seen.fields, seen.first_s, now_s if changed else seen.changed_s)


def _parse(text: bytes, path: Path, modified: float) -> dict[str, Any] | None:
    """The fields of a Beat, or None if this is no heartbeat."""
    try:
        raw = json.loads(text)
        fields: dict[str, Any] = {
            **{name: str(raw[name]) for name in ("id", "role", "host", "state")},
            **{name: int(raw[name]) for name in ("pid", "beat")},
            **{name: float(raw[name]) for name in ("started", "time")},
            **{name: int(raw.get(name) or 0) for name in _COUNTS},
            **{name: float(raw.get(name) or 0.0) for name in ("env_steps_per_s", "updates_per_s")},
            **{name: None if raw.get(name) is None else str(raw[name]) for name in _TEXTS},
            "buffer_files": raw.get("buffer_files"),
            "machine": str(raw.get("machine")),
            "process_start": raw.get("process_start"),
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    if fields["role"] not in ROLES or fields["state"] not in STATES:
        return None
    return {**fields, "modified": modified, "path": path}


_COUNTS = ("rank", "epoch", "env_steps", "gradient_steps", "policy_version")
_TEXTS = ("note", "buffer", "loxodon", "spaces_digest")
