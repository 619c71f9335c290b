"""Actor processes next to the learner: started, monitored, restarted and terminated.

A thread of the learner's process supervises them. A parent process that supervises the learner too would have
to forward signals, exit statuses and the terminal, and would be one more process that can die. Actors end
with the learner: each checks whether its parent is still the process that started it. That works on every
POSIX system, also after kill -9.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import TracebackType

from ..process.exits import CONFIG_ERROR

PARENT = "LOXODON_PARENT"  # environment variable: id of the process with which an actor ends
GRACE_S = 10.0  # seconds between SIGTERM and SIGKILL
_PARENT_POLL_S = 0.5
_TAIL_LINES = 15
# Held while a process is started, so that other threads do not fork meanwhile: a copy of this process made at
# that time, such as an environment worker, would keep open the pipe on which Popen waits.
_STARTING = threading.Lock()
os.register_at_fork(
    before=_STARTING.acquire, after_in_parent=_STARTING.release, after_in_child=_STARTING.release
)


@dataclass(frozen=True)
class RestartPolicy:
    """Rules for restarting an actor and for giving it up. Durations are in seconds.

    min_backoff_s, max_backoff_s: delay before a restart; it doubles with each exit within `healthy_s` of the
        start.
    healthy_s: an actor that has run this long counts as healthy again.
    max_failures: an actor is given up after this many failures in a row, each within `healthy_s` of its
        start. An exit by SIGTERM or SIGKILL is not a failure of the actor.
    """

    min_backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    healthy_s: float = 60.0
    max_failures: int = 5
    poll_s: float = 0.1
    grace_s: float = GRACE_S


@dataclass
class _Actor:
    """One actor: its process, and its restarts so far."""

    index: int
    log: Path
    process: subprocess.Popen[bytes] | None = None
    start_s: float = 0.0  # monotonic; start of the running process, or of the next one
    num_starts: int = 0
    num_short_runs: int = 0  # number in a row
    num_failures: int = 0  # number in a row
    is_given_up: bool = False


@dataclass
class ActorSupervisor:
    """Context manager: inside it, `num_actors` processes run `command`.

    Args:
        command: program and arguments, the same for every actor.
        num_actors: number of actors.
        first_index: number of the first one. name: name of the actors in logs and lines.
        log_folder: gets `<name>_<i>.log`, to which every start of an actor appends.
        environment: environment variables of the actors.
        say: prints a line.
        should_stop: polled; once it is True, the actors are terminated.
        may_start: polled; the actors are started once it is True.
        on_failure: called (by the supervising thread) when no actor is left.
        restart_policy: rules for restarting an actor and for giving it up.

    Attributes:
        failure: reason why no actor is left, with the end of a log; None otherwise.
    """

    command: Sequence[str]
    num_actors: int
    log_folder: Path
    environment: Mapping[str, str]
    say: Callable[[str], None]
    should_stop: Callable[[], bool]
    on_failure: Callable[[], None]
    may_start: Callable[[], bool] = lambda: True
    first_index: int = 0
    name: str = "actor"
    restart_policy: RestartPolicy = field(default_factory=RestartPolicy)
    failure: str | None = field(default=None, init=False)

    def __enter__(self) -> ActorSupervisor:
        self.log_folder.mkdir(parents=True, exist_ok=True)
        self._actors = [
            _Actor(i, self.log_folder / f"{self.name}_{i}.log")
            for i in range(self.first_index, self.first_index + self.num_actors)
        ]
        self._terminated_s: float | None = None
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="actor-supervisor", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Terminate the actors, wait, and kill those that have not ended after the grace period."""
        self._is_closing.set()
        try:
            self._thread.join()
            self._terminate()
            deadline_s = (self._terminated_s or 0.0) + self.restart_policy.grace_s
            for process in self._running():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(deadline_s - time.monotonic(), 0.0))
        finally:  # also if a second Ctrl-C ends the waiting
            for actor in self._actors:
                if actor.process is not None:
                    kill_group(actor.process.pid)
                    actor.process.wait()

    # ---- the supervising thread ----

    def _watch(self) -> None:
        try:
            while not self._is_closing.wait(self.restart_policy.poll_s):
                if self.should_stop():
                    self._terminate()
                    return
                for actor in self._actors:
                    self._check(actor)
        except OSError as error:  # a full disk, or a missing program
            self._fail(
                f"Starting or watching the actors failed: {error}. Fix: make sure that {self.command[0]} "
                "can run, and that the disk is not full."
            )

    def _check(self, actor: _Actor) -> None:
        if actor.is_given_up:
            return
        if actor.process is None:
            if time.monotonic() >= actor.start_s and self.may_start():
                self._start(actor)
            return
        status = actor.process.poll()
        if status is not None:
            kill_group(actor.process.pid)  # includes its environment workers
            actor.process = None
            self._handle_exit(actor, status)

    def _start(self, actor: _Actor) -> None:
        actor.num_starts += 1
        with actor.log.open("ab") as log:
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            log.write(f"==== start {actor.num_starts} of {self.name} {actor.index}, {now} ====\n".encode())
            log.flush()
            with _STARTING:
                actor.process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**self.environment, PARENT: str(os.getpid())},
                    start_new_session=True,  # Ctrl-C is for the learner, which terminates the actors
                )
        actor.start_s = time.monotonic()
        again = f" again (start {actor.num_starts})" if actor.num_starts > 1 else ""
        self.say(f"{self.name} {actor.index} started{again}: process {actor.process.pid}, log {actor.log}")

    def _handle_exit(self, actor: _Actor, status: int) -> None:
        """Decide if and when to restart an actor that has exited."""
        uptime_s = time.monotonic() - actor.start_s
        was_short = uptime_s < self.restart_policy.healthy_s
        is_failure = status not in (0, -signal.SIGTERM, -signal.SIGKILL)
        actor.num_short_runs = actor.num_short_runs + 1 if was_short else 0
        actor.num_failures = (actor.num_failures if was_short else 0) + int(is_failure and was_short)
        what_happened = f"{self.name} {actor.index} {describe_exit(status)} after {uptime_s:.0f} s"
        if status == CONFIG_ERROR or actor.num_failures >= self.restart_policy.max_failures:
            self._give_up(actor, what_happened, status)
            return
        doublings = min(max(actor.num_short_runs - 1, 0), 30)
        wait_s = min(self.restart_policy.min_backoff_s * 2**doublings, self.restart_policy.max_backoff_s)
        actor.start_s = time.monotonic() + wait_s
        self.say(f"{what_happened}; starting it again in {wait_s:g} s, log {actor.log}")

    def _give_up(self, actor: _Actor, what_happened: str, status: int) -> None:
        actor.is_given_up = True
        num_left = sum(not other.is_given_up for other in self._actors)
        if num_left:
            self.say(
                f"{what_happened} and will not run again (still running: {num_left}). Its log: {actor.log}"
            )
            return
        times = "once" if status == CONFIG_ERROR else f"{actor.num_failures} times in a row"
        self._fail(
            f"No actor is left: {what_happened}, {times} within {self.restart_policy.healthy_s:g} s of its "
            f"start. The end of {actor.log}:\n{end_of_log(actor.log)}\nFix: correct the error in this log, "
            "then run the same command with --resume."
        )

    def _fail(self, text: str) -> None:
        self.failure = text
        self.on_failure()

    # ---- ending ----

    def _running(self) -> list[subprocess.Popen[bytes]]:
        processes = [actor.process for actor in self._actors if actor.process is not None]
        return [process for process in processes if process.poll() is None]

    def _terminate(self) -> None:
        if self._terminated_s is None:
            self._terminated_s = time.monotonic()
            for process in self._running():
                process.terminate()


def exit_with_parent() -> None:
    """In an actor: end when the process that started it is gone. In other processes: do nothing."""
    if (parent := os.environ.pop(PARENT, None)) is not None:
        threading.Thread(target=_exit_with, args=(int(parent),), name="parent watch", daemon=True).start()


def _exit_with(parent: int) -> None:
    """Wait for the end of the parent; then send SIGTERM to this process, and SIGKILL after GRACE_S."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    if os.getpgrp() == os.getpid():
        kill_group(os.getpid())
    os._exit(1)


def kill_group(pid: int) -> None:
    """Kill a process that leads a process group, and all its children; missing ones are ignored."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def describe_exit(status: int) -> str:
    """How a process ended, as a verb phrase; status: negative for a signal."""
    if status >= 0:
        return f"ended with exit status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    return f"was killed by {name}"


def end_of_log(log: Path) -> str:
    """The last lines of a log, indented."""
    with log.open(encoding="utf-8", errors="replace") as file:
        lines = deque(file, maxlen=_TAIL_LINES)
    return "".join(f"    {line}" for line in lines).rstrip()
