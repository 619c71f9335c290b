"""Status of a run's processes: a heartbeat file per process, and the lock for the one learner.

Every process replaces its `<run_dir>/status/<role>_<host>_<pid>_<start>.json` a few times per second. The
status command reads them all, and so does the learner, which publishes what its actors need in
`<run_dir>/status/pace.json`. An actor reads only that file, so the number of actors does not matter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import re
import socket
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ...agents.parts import EpisodeResult
from ...data.lock import FolderLock, LockPurpose
from ..process.files import parse_json, write_text
from ..process.versions import version_of

STATES = ("starting", "collecting", "learning", "evaluating", "waiting", "stopped", "failed", "finished")
ENDED_STATES = ("stopped", "failed", "finished")
BY_SIGNAL = "by "
"""Beginning of the note of a process that a signal stopped; its name follows."""
ROLES = ("both", "learner", "actor")
STATUS_FOLDER = "status"
RUN_FOLDERS = ("ckpts", "logs", STATUS_FOLDER)
"""The folder of a run has at least one of these."""
PACE_FILE = "pace.json"
PERIOD_S = 0.4  # time between two heartbeats
STALE_S = 30.0  # a process of another machine that has been silent for longer counts as dead
LEARNER = LockPurpose(
    "learner",
    "trains",
    "a run has one learner (mode 'learn' or 'both'), and a second one would overwrite its policy and "
    "checkpoints",
    "end that process, or choose another name with --run-name (Experiment.run_name); only --mode collect "
    "may run in any number of processes.",
)
_FORMAT = 1
_NUM_FOR_SPEED = 26  # number of heartbeats; speeds are means over about 10 s
_MIN_GAP_S = 0.05  # least time between two heartbeats, even if the state changes more often
_CLOSE_TIMEOUT_S = 5.0  # limit, so that a file system that hangs does not keep a finished process
_CLOCK_SLACK_S = 10.0  # tolerance for the start time of a process, as the clock may be set
_logger = logging.getLogger("loxodon")


class Membership:
    """This process as a member of its run, with its `Status`: a heartbeat, and a learner's lock.

    The calls only fill in a dictionary; a daemon thread writes it, each period and at once on a change of
    state. A folder that cannot be written is logged once and tried again; it never fails the run. Forked
    children do not inherit any of this.

    Args:
        run_dir, run_name: the run.
        role: "both", "learner" or "actor".
        rank: rank of this process among the learner's; only rank 0 takes the lock.
        period_s: time between two heartbeats.

    Attributes:
        id: random name of this process; unlike a pid it is never used again.
    """

    def __init__(
        self, run_dir: Path, run_name: str, role: str, rank: int = 0, *, period_s: float = PERIOD_S
    ) -> None:
        self.run_dir, self.run_name, self.role, self.rank = run_dir, run_name, role, rank
        self.id = uuid.uuid4().hex
        self._ending: tuple[str, str | None] = ("stopped", None)
        self._period_s = period_s
        self._values: dict[str, Any] = {
            "state": "starting",
            "note": None,
            "env_steps": 0,
            "gradient_steps": 0,
        }
        self._lock: FolderLock | None = None
        self._writer: _Writer | None = None

    @contextlib.contextmanager
    def joining(self) -> Iterator[None]:
        """Join the run, of which this process is still a member after the block.

        If the block raises, report the error and leave.

        Raises:
            ValueError: If this process would be the second learner of the run.
            OSError: If nothing can be written to the run folder.
        """
        try:
            if self.role != "actor" and self.rank == 0 and self._lock is None:
                self.run_dir.mkdir(parents=True, exist_ok=True)
                self._lock = FolderLock(self.run_dir, self.run_name, LEARNER)
        except OSError as error:
            raise OSError(
                f"The run folder {self.run_dir} cannot be written to: {error}. Fix: restore its permissions, "
                "or choose another Experiment.ckpt_base_dir."
            ) from error
        if self._writer is None:
            self._values.update(state="starting", note=None)
            facts = {"id": self.id, "role": self.role, "rank": self.rank}
            self._writer = _Writer(self.run_dir, facts, self._values, self._period_s)
            self._finalizer = weakref.finalize(self, self._writer.end)
        try:
            with self.reporting():
                yield
        except BaseException:
            self.leave()
            raise

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Report an error that leaves the block."""
        try:
            yield
        except KeyboardInterrupt:
            self.end("stopped", "interrupted")
            raise
        except Exception as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            self.end("failed", f"{type(error).__name__}: {lines[-1] if lines else ''}")
            raise

    def state(self, state: str, note: str | None = None) -> None:
        """Set the current activity, one of STATES; note: one line, the reason for waiting."""
        assert state in STATES
        if (self._values["state"], self._values["note"]) != (state, note):
            self._values.update(state=state, note=_one_line(note))
            if self._writer is not None:
                self._writer.wake.set()

    def put(self, **values: Any) -> None:
        """Report new values with the next heartbeat; names are those of `Heartbeat`.

        Known: epoch, env_steps, gradient_steps, policy_version, buffer, num_episodes, episodes.
        """
        self._values.update(values)

    def ends_as(self, state: str, note: str | None = None) -> None:
        """Set the state that `leave` will report."""
        self._ending = state, note

    def end(self, state: str, note: str | None = None) -> None:
        """Report that this process has ended its work, and how."""
        self.ends_as(state, note)
        self.state(state, note)

    def leave(self) -> None:
        """Write the last state and release the lock for another learner."""
        if self._writer is not None:
            state, note = self._ending
            self._values.update(state=state, note=_one_line(note))
            self._finalizer()
            self._writer = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None


class _Writer:
    """Data of the thread; it does not keep the Membership alive, because the thread ends with that."""

    def __init__(
        self, run_dir: Path, facts: Mapping[str, Any], values: dict[str, Any], period_s: float
    ) -> None:
        host, self.pid = socket.gethostname(), os.getpid()
        name = f"{facts['role']}_{re.sub(r'[^A-Za-z0-9.-]', '-', host)}_{self.pid}_{time.time_ns()}.json"
        self.run_dir = run_dir.absolute()  # the directory may change
        self.path = self.run_dir / STATUS_FOLDER / name
        self.leads = facts["role"] != "actor" and facts["rank"] == 0
        self.known: list[Heartbeat] = []  # heartbeats of the run, read at `known_s` or later
        self.known_s = -math.inf
        self.facts = {
            "format": _FORMAT,
            **facts,
            "host": host,
            "pid": self.pid,
            "started": time.time(),
            "machine": machine_id(),
            "loxodon": version_of("loxodon"),
        }
        self.values, self.period_s = values, period_s
        self.num_beats = 0
        self.has_complained = self.is_closing = False
        self.wake = threading.Event()
        self.history: deque[tuple[float, int, int]] = deque(maxlen=_NUM_FOR_SPEED)
        self.thread = threading.Thread(target=self.run, name="heartbeat", daemon=True)
        self.thread.start()

    def run(self) -> None:
        while not self.is_closing:
            self.write()
            time.sleep(_MIN_GAP_S)
            self.wake.wait(self.period_s)
            self.wake.clear()
        self.write()

    def end(self) -> None:
        """Write the last state and end the thread; do nothing in a forked child."""
        if os.getpid() != self.pid:
            return
        if self.values["state"] not in ENDED_STATES:
            self.values.update(state="stopped", note=None)
        self.is_closing = True
        # The garbage collector may call this in the thread itself, even while it waits for `wake`.
        if threading.current_thread() is not self.thread:
            self.wake.set()
            self.thread.join(_CLOSE_TIMEOUT_S)

    def write(self) -> None:
        """Replace the file; an error is logged once."""
        self.num_beats += 1
        values = dict(self.values)
        speeds = self.speeds(values["env_steps"], values["gradient_steps"])
        record = {**self.facts, "time": time.time(), "beat": self.num_beats, **values, **speeds}
        try:
            write_text(self.path, json.dumps(record, default=str) + "\n", is_durable=False)
            if self.leads:
                self.publish(record)
        except OSError as error:
            if not self.has_complained:
                self.has_complained = True
                _logger.warning(
                    "The heartbeat %s cannot be written (%s); the run continues. Fix: free space or "
                    "restore the folder's permissions.",
                    self.path,
                    error,
                )

    def publish(self, record: Mapping[str, Any]) -> None:
        """Replace pace.json. Heartbeats are read once per period, even if the state changes more often."""
        if time.monotonic() - self.known_s >= self.period_s:
            self.known, self.known_s = read_heartbeats(self.run_dir), time.monotonic()
        write_learner_report(self.run_dir, record, self.known)

    def speeds(self, env_steps: int, gradient_steps: int) -> dict[str, float]:
        """Env steps and updates per second over the last seconds."""
        now, history = time.monotonic(), self.history
        if history and (env_steps < history[-1][1] or gradient_steps < history[-1][2]):
            history.clear()  # a checkpoint was loaded
        history.append((now, env_steps, gradient_steps))
        then, first_env_steps, first_gradient_steps = history[0]
        elapsed_s = max(now - then, 1e-9)
        return {
            "env_steps_per_s": (env_steps - first_env_steps) / elapsed_s,
            "updates_per_s": (gradient_steps - first_gradient_steps) / elapsed_s,
        }


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The last heartbeat of one process.

    Attributes:
        id: random name of the process. role: "both", "learner" or "actor".
        rank: rank among the learner's processes.
        started, time: unix seconds, by the clock of that machine. beat: number of this heartbeat.
        state: one of STATES. note: the reason for waiting, or the last error.
        env_steps: number that it collected (with role "both", those of the whole run up to it).
        policy_version: version that it acts with, or has published.
        began_env_steps, began_updates: counters of the run when training began, in a learner; None before.
        forgotten_env_steps: env steps of actors with deleted files, in a learner.
        lacks_data: True in a learner that waits for trajectories.
        buffer: folder with the trajectories (`.../buffer`).
        num_episodes, episodes: episodes that an actor has played, and the newest of them, if the agent needs
            their results.
        machine: see machine_id. modified: unix seconds, by the clock of the file system.
        life: "alive"; "ended" after it reported its end; "dead" if it ended without a report. A process of
            this machine is dead if it is not in the process table; one of another machine, if `modified` is
            30 s ago.
    """

    id: str
    role: str
    host: str
    pid: int
    rank: int = 0
    started: float
    time: float
    beat: int
    state: str
    note: str | None = None
    epoch: int = 0
    env_steps: int = 0
    env_steps_per_s: float = 0.0
    gradient_steps: int = 0
    updates_per_s: float = 0.0
    policy_version: int = 0
    began_env_steps: int | None = None
    began_updates: int | None = None
    forgotten_env_steps: int = 0
    lacks_data: bool = False
    buffer: str | None = None
    num_episodes: int = 0
    episodes: tuple[EpisodeResult, ...] = ()
    loxodon: str | None = None
    machine: str | None = None
    modified: float = 0.0
    path: Path
    life: str = "dead"

    @property
    def is_alive(self) -> bool:
        """True while the process is at work, as far as is known."""
        return self.life == "alive"


def _episodes(raw: Iterable[Sequence[Any]]) -> tuple[EpisodeResult, ...]:
    return tuple(EpisodeResult(int(one), float(total), str(name)) for one, total, name in raw)


_CASTS = {
    "str": str,
    "str | None": str,
    "int": int,
    "int | None": int,
    "float": float,
    "bool": bool,
    "tuple[EpisodeResult, ...]": _episodes,
}
_UNREADABLE = (ValueError, TypeError, AttributeError, KeyError, OverflowError)
_KINDS: dict[str, Any] = {
    f.name: _CASTS[str(f.type)] for f in dataclasses.fields(Heartbeat) if f.type in _CASTS
}


def read_heartbeats(run_dir: Path) -> list[Heartbeat]:
    """The last heartbeat of every process of a run, oldest process first; unreadable files are left out."""
    beats = []
    for path in (Path(run_dir) / STATUS_FOLDER).glob("*_*.json"):
        if not path.is_file():  # reading a pipe would wait for its writer
            continue
        try:
            with path.open("rb") as file:
                beat = _beat(parse_json(file.read()), path, os.fstat(file.fileno()).st_mtime)
        except (OSError, *_UNREADABLE):  # removed at this moment, or not a heartbeat
            continue
        if beat.role in ROLES and beat.state in STATES:
            beats.append(beat)
    return sorted(beats, key=lambda beat: (beat.started, beat.host, beat.pid))


@dataclass(frozen=True)
class LearnerReport:
    """Report of a learner to its actors.

    Attributes:
        learner: heartbeat of the learner.
        env_steps: env steps of the whole run, as far as the learner has counted them.
        counted: the share of each actor that has not ended, by its id.
        num_actors: number of actors at work.
    """

    learner: Heartbeat
    env_steps: int
    counted: Mapping[str, int]
    num_actors: int


def write_learner_report(run_dir: Path, learner: Mapping[str, Any], beats: Sequence[Heartbeat]) -> None:
    """Replace pace.json. learner: record of its heartbeat. beats: those of the run. Raises: OSError."""
    actors = [beat for beat in beats if beat.role == "actor"]
    content = {
        **learner,
        "run_env_steps": env_steps_of(beats),
        "counted": {beat.id: beat.env_steps for beat in actors if beat.life != "ended"},
        "num_actors": sum(beat.is_alive for beat in actors),
    }
    text = json.dumps(content, default=str) + "\n"
    write_text(run_dir / STATUS_FOLDER / PACE_FILE, text, is_durable=False)


def read_learner_report(run_dir: Path) -> LearnerReport | None:
    """The report of a run's learner; None if there never was one, or the file cannot be read."""
    path = run_dir / STATUS_FOLDER / PACE_FILE
    try:
        with path.open("rb") as file:
            raw, modified = parse_json(file.read()), os.fstat(file.fileno()).st_mtime
        counted = {str(name): int(steps) for name, steps in raw["counted"].items()}
        learner, env_steps = _beat(raw, path, modified), int(raw["run_env_steps"])
        return LearnerReport(learner, env_steps, counted, int(raw["num_actors"]))
    except (OSError, *_UNREADABLE):
        return None


def newest_learner(beats: Iterable[Heartbeat]) -> Heartbeat | None:
    """The learner of the run, even if dead; None if there never was one. beats: oldest process first.

    A learner that ended without any work, because of an error or because the run had finished, does not
    replace one that worked.
    """
    learners = [b for b in beats if b.role != "actor" and b.rank == 0]
    worked = [b for b in learners if b.gradient_steps or b.env_steps or b.state not in ENDED_STATES]
    return next(reversed(worked or learners), None)


def env_steps_of(beats: Iterable[Heartbeat]) -> int:
    """Env steps of the whole run."""
    beats = list(beats)
    learner, by_actors = newest_learner(beats), sum(beat.env_steps for beat in beats if beat.role == "actor")
    if learner is None:
        return by_actors
    return by_actors + learner.forgotten_env_steps + (learner.env_steps if learner.role == "both" else 0)


def _beat(raw: Any, path: Path, modified: float) -> Heartbeat:
    known = {name: kind(raw[name]) for name, kind in _KINDS.items() if raw.get(name) is not None}
    beat = Heartbeat(**{**known, "modified": modified, "path": path})
    is_here = beat.machine == machine_id()
    if beat.state in ENDED_STATES:
        life = "ended"
    elif _runs_here(beat.pid, max(beat.started, modified)) if is_here else time.time() - modified <= STALE_S:
        life = "alive"
    else:
        life = "dead"
    return dataclasses.replace(beat, life=life)


def _runs_here(pid: int, seen: float) -> bool:
    """True if the process of this machine last seen at `seen` still runs; its number may have been reused.

    The start time of the process is compared with its last heartbeat, not its first, because it changes when
    the clock of the machine is set.
    """
    try:
        process = psutil.Process(pid)
        is_zombie = process.status() == psutil.STATUS_ZOMBIE
        return not is_zombie and process.create_time() <= seen + _CLOCK_SLACK_S
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


@functools.cache
def machine_id() -> str:
    """Name of the space in which process numbers are unique: one boot of one machine or container.

    Host names are not enough: two containers of one name may share a file system.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 (the link leads nowhere)
    except OSError:
        return f"host {socket.gethostname()}"


def _one_line(text: str | None) -> str | None:
    return None if text is None else " ".join(text.split())[:500]
