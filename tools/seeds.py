"""Several runs, each in its own process: those of `--seeds`, and the trials of a sweep."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..experiment.checkpoint.record import bindings_of
from ..experiment.checkpoint.store import CheckpointManager
from ..experiment.config.hash import without_macros
from ..experiment.config.reading import read_source
from ..experiment.fleet.actors import actor_environment, without
from ..experiment.fleet.heartbeat import BY_SIGNAL, newest_learner, read_heartbeats
from ..experiment.fleet.supervisor import PARENT, kill_group
from ..experiment.process.exits import FAILED, INTERRUPTED
from ..experiment.process.signals import StopRequest

_POLL_S = 0.2


@dataclass
class Job:
    """A run in its own process.

    run_dir: its folder. has_log: whether its output goes to logs/console.log there. through: words before its
    command, such as those of srun, which run it on another machine. should_end: polled; when it returns True,
    the process is terminated. was_terminated: whether this process ended it.
    """

    command: Sequence[str]
    run_dir: Path
    has_log: bool
    through: Sequence[str] = ()
    should_end: Callable[[], bool] = lambda: False
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    was_terminated: bool = field(default=False, init=False)

    def start(self) -> subprocess.Popen[bytes]:
        """Start the run in a new session, so that Ctrl-C only reaches this process, which terminates it."""
        environment = actor_environment(os.environ) if self.has_log else dict(os.environ)
        settings: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True}
        # A run that this process does not start directly must not watch for its parent.
        settings["env"] = environment if self.through else {**environment, PARENT: str(os.getpid())}
        command = [*self.through, *self.command]
        if not self.has_log:
            return subprocess.Popen(command, **settings)
        log = self.run_dir / "logs" / "console.log"
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            file = log.open("ab")
        except OSError as error:
            raise OSError(
                f"{log} cannot be written ({error}). Fix: choose another folder with --run-name or "
                "Experiment.ckpt_base_dir."
            ) from error
        with file:
            return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, **settings)

    def stopped_early(self) -> str | None:
        """Why a run that exited with 0 is not finished, such as "by SIGTERM"; None if it is."""
        learner = newest_learner(read_heartbeats(self.run_dir))
        if learner is None or learner.state != "stopped":
            return None
        return learner.note or "as it was asked to"

    def was_interrupted(self) -> bool:
        """True if a run that exited with 0 was ended by a signal to its process."""
        return (self.stopped_early() or "").startswith(BY_SIGNAL)

    def terminate(self) -> None:
        """Send SIGTERM once; the run saves a checkpoint first."""
        if self.process is not None and not self.was_terminated:
            # srun kills its job on SIGTERM, but forwards SIGUSR1.
            is_srun = any(Path(word).name == "srun" for word in self.through)
            self.process.send_signal(signal.SIGUSR1 if is_srun else signal.SIGTERM)
            self.was_terminated = True


def run_jobs(jobs: Iterator[Job], num_parallel: int, on_end: Callable[[Job, int], None]) -> bool:
    """Run the jobs, `num_parallel` at a time. SIGINT or SIGTERM ends all of them, and no further job starts.

    on_end: called with every ended job and its exit status, which is negative for a signal.
    Returns: False if a signal ended jobs or kept some from starting; jobs ended by should_end() do not count.
    Raises: KeyboardInterrupt for a second SIGINT, which kills the jobs.
    """
    running: list[Job] = []
    try:
        with StopRequest() as stop:
            while True:
                while len(running) < num_parallel and not stop.requested() and (job := next(jobs, None)):
                    running.append(job)
                    job.process = job.start()
                if not running:
                    return not stop.requested()
                time.sleep(_POLL_S)
                for job in list(running):
                    if stop.requested() or job.should_end():
                        job.terminate()
                    if job.process is not None and (status := job.process.poll()) is not None:
                        running.remove(job)
                        on_end(job, status)
    finally:
        for job in running:
            if job.process is not None:
                kill_group(job.process.pid)
                job.process.wait()


# ---- seeds ----


def run_seeds(
    run_dir: Path,
    ends: Mapping[str, Any],
    seeds: Sequence[int],
    words: Sequence[str],
    program: Sequence[str],
    num_parallel: int,
    through: Sequence[str] = (),
) -> int:
    """Run the same experiment with several seeds, in `<run_dir>-seed<k>`; returns the exit status.

    With --resume among the words, finished runs are skipped, and others continue if they can.

    Args:
        run_dir: folder of the run without seeds.
        ends: settings that decide where a run ends, by their gin names.
        seeds: seed of each run.
        words: words of the command line.
        program: words that start the program again.
        num_parallel: number of simultaneous runs; if above 1, each has one thread, and logs instead of a
            screen.
        through: words before the command of each run.
    """
    kept = without(words, "--seeds", "--jobs", "--through", "--run-name", "--resume", "Experiment.run_name")
    runs = {run_dir.with_name(f"{run_dir.name}-seed{seed}"): seed for seed in seeds}
    resumes, failures = "--resume" in words, list[str]()

    def jobs() -> Iterator[Job]:
        for folder, seed in runs.items():
            if resumes and _is_finished(folder, ends):
                _say(f"{folder.name} has already finished{_other_settings(folder, kept)}")
                continue
            again = ["--resume"] * (resumes and bool(_epochs(folder)))
            _say(f"---- {folder.name} ----")
            own = ["--seed", str(seed), "--run-name", folder.name, *again]
            yield Job([*program, *kept, *own], folder, has_log=num_parallel > 1, through=through)

    def on_end(job: Job, status: int) -> None:
        if status and not job.was_terminated:
            failures.append(job.run_dir.name)
            log = f", log {job.run_dir / 'logs' / 'console.log'}" * job.has_log
            _say(f"{job.run_dir.name} failed with exit status {status}{log}")
        elif not job.was_terminated and (early := job.stopped_early()) is not None:
            _say(f"{job.run_dir.name} stopped early ({early}); --resume continues it")
        elif num_parallel > 1:
            _say(f"{job.run_dir.name} {'stopped' if job.was_terminated else 'finished'}")

    is_complete = run_jobs(jobs(), num_parallel, on_end)
    _say(f"report              {shlex.join(['loxodon', 'report', *map(str, runs)])}")
    if failures:
        _say(f"error: {len(failures)} of {len(runs)} runs failed: {', '.join(failures)}")
    if not is_complete:
        _say("interrupted; run the same command with --resume to continue")
        return INTERRUPTED
    return FAILED if failures else 0


def _epochs(run_dir: Path) -> list[int]:
    return CheckpointManager(run_dir, run_dir.name).complete_epochs()


def _is_finished(run_dir: Path, ends: Mapping[str, Any]) -> bool:
    """Return True if the run has reached its end, and that is still the end that the settings give."""
    learner, config = newest_learner(read_heartbeats(run_dir)), run_dir / "ckpts" / "config.txt"
    if learner is None or learner.state != "finished" or not config.is_file():
        return False
    before = bindings_of(config.read_text(encoding="utf-8", errors="replace"))
    return all(
        without_macros(before.get(name, "None"), before) == repr(value) for name, value in ends.items()
    )


def _other_settings(run_dir: Path, words: Sequence[str]) -> str:
    """A clause that names settings of the command line with which a finished run was not made."""
    given = [word for word in words if re.match(r"[\w/.]+\.\w+\s*=", word)]
    asked = read_source([], zip(given, given, strict=True)).bindings
    now = bindings_of("\n".join(f"{one.key} = {one.value!r}" for one in asked))
    before = bindings_of((run_dir / "ckpts" / "config.txt").read_text(encoding="utf-8", errors="replace"))
    differ = [f"{k} = {before[k]}, not {value}" for k, value in now.items() if before.get(k, value) != value]
    return f" with {', '.join(differ)}. Fix: choose another --run-name for other settings." if differ else ""


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
