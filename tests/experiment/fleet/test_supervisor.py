"""Supervision of actors that die, hang or outlive their learner; the actors are scripts of a few lines."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from loxodon.experiment.fleet import supervisor
from loxodon.experiment.fleet.actors import actor_environment
from loxodon.experiment.fleet.supervisor import ActorSupervisor, RestartPolicy

from ..processes import wait_for

FAST = RestartPolicy(min_backoff_s=0.01, max_backoff_s=0.05, max_failures=3, poll_s=0.005, grace_s=5.0)
FORK = multiprocessing.get_context("fork")
FOREVER = "import time; print('at work', flush=True); time.sleep(600)"


class Fleet:
    """A supervisor, with its messages and requests."""

    def __init__(self, folder: Path, code: str, num_actors: int = 1, **changes: Any) -> None:
        self.lines: list[str] = []
        self.is_stopping = False
        self.has_failed = False
        settings: dict[str, Any] = {
            "say": self.lines.append,
            "should_stop": lambda: self.is_stopping,
            "on_failure": lambda: setattr(self, "has_failed", True),
            "restart_policy": FAST,
            **changes,
        }
        command = [sys.executable, "-c", code]
        self.supervisor = ActorSupervisor(
            command, num_actors, folder, actor_environment(os.environ), **settings
        )

    def pids(self) -> list[int]:
        return [int(line.split("process ")[1].split(",")[0]) for line in self.lines if "started" in line]

    def waits(self) -> list[str]:
        """Seconds before each restart."""
        return [line.split("again in ")[1].split(" s")[0] for line in self.lines if "again in" in line]


def is_alive(pid: int) -> bool:
    """Zombies, which nobody waits for in a container, do not count as alive."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_actors_that_keep_failing_wait_longer_each_time_and_are_given_up_with_the_end_of_their_log(
    tmp_path: Path,
) -> None:
    restart_policy = RestartPolicy(min_backoff_s=0.01, max_backoff_s=0.03, max_failures=4, poll_s=0.005)
    fleet = Fleet(
        tmp_path, "print('the cause'); raise SystemExit(3)", num_actors=2, restart_policy=restart_policy
    )
    with fleet.supervisor:
        wait_for(lambda: fleet.has_failed)
    failure = str(fleet.supervisor.failure)
    assert "No actor is left: actor " in failure
    assert "ended with exit status 3" in failure
    assert "4 times in a row" in failure
    assert "    the cause\n" in failure
    assert "Fix: correct the error in this log" in failure
    assert sorted(fleet.waits()) == ["0.01", "0.01", "0.02", "0.02", "0.03", "0.03"]
    assert len(fleet.pids()) == 8
    assert sum("will not run again (still running: 1)" in line for line in fleet.lines) == 1
    assert (tmp_path / "actor_0.log").read_text().count("==== start ") == 4


def test_an_actor_with_an_impossible_config_is_not_restarted(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "raise SystemExit(2)")
    with fleet.supervisor:
        wait_for(lambda: fleet.has_failed)
    assert len(fleet.pids()) == 1


def test_a_killed_actor_is_always_restarted(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, FOREVER)
    with fleet.supervisor:
        for number in range(1, 4):
            wait_for(lambda number=number: len(fleet.pids()) == number)  # type: ignore[misc]
            os.kill(fleet.pids()[-1], signal.SIGKILL)
        wait_for(lambda: len(fleet.pids()) == 4)
    assert sum("was killed by SIGKILL" in line for line in fleet.lines) == 3
    assert not fleet.has_failed
    assert not any(is_alive(pid) for pid in fleet.pids())


def test_a_worker_forked_while_an_actor_starts_does_not_block_the_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, has_pipe, is_forked = os.pipe, threading.Event(), threading.Event()

    def slow_pipe() -> tuple[int, int]:
        ends = pipe()
        # on this pipe, Popen waits for the new process
        if threading.current_thread().name == "actor-supervisor":
            has_pipe.set()
            is_forked.wait(0.5)
        return ends

    monkeypatch.setattr(os, "pipe", slow_pipe)
    fleet, worker = Fleet(tmp_path, FOREVER), FORK.Process(target=time.sleep, args=(600,))
    with fleet.supervisor:
        has_pipe.wait()
        worker.start()
        is_forked.set()
        try:
            wait_for(lambda: bool(fleet.pids()))
        finally:
            worker.kill()


def test_the_log_of_an_earlier_run_is_kept(tmp_path: Path) -> None:
    (tmp_path / "actor_0.log").write_text("earlier\n")
    fleet = Fleet(tmp_path, "")
    with fleet.supervisor:
        wait_for(lambda: bool(fleet.pids()))
    assert (tmp_path / "actor_0.log").read_text().startswith("earlier\n==== start 1 of actor 0")


def test_actors_start_when_allowed_and_are_asked_to_end_when_the_run_stops(tmp_path: Path) -> None:
    allowed: list[bool] = []
    fleet = Fleet(tmp_path, FOREVER, num_actors=2, may_start=lambda: bool(allowed))
    with fleet.supervisor:
        time.sleep(0.1)
        assert fleet.pids() == []
        allowed.append(True)
        wait_for(lambda: len(fleet.pids()) == 2)
        fleet.is_stopping = True
        wait_for(lambda: not any(is_alive(pid) for pid in fleet.pids()))
        time.sleep(0.1)
    assert len(fleet.pids()) == 2


def test_an_actor_that_ignores_the_request_is_killed_with_its_children(tmp_path: Path) -> None:
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "print(child.pid, flush=True); time.sleep(600)"
    )
    restart_policy = RestartPolicy(poll_s=0.005, grace_s=0.2)
    fleet = Fleet(tmp_path, code, restart_policy=restart_policy)
    log = tmp_path / "actor_0.log"
    with fleet.supervisor:
        wait_for(lambda: log.exists() and len(log.read_text().splitlines()) == 2)
    grandchild = int(log.read_text().splitlines()[1])
    wait_for(lambda: not is_alive(fleet.pids()[0]) and not is_alive(grandchild))


def lead(folder: Path) -> None:
    """Act as a learner with a supervised actor and a worker that outlives the learner."""
    code = f"from {supervisor.__name__} import exit_with_parent; exit_with_parent(); {FOREVER}"
    with Fleet(folder, code, say=(folder / "said").write_text).supervisor:
        FORK.Process(target=time.sleep, args=(600,)).start()
        time.sleep(600)


def test_actors_end_when_the_learner_is_killed_even_if_a_forked_worker_survives(tmp_path: Path) -> None:
    learner = FORK.Process(target=lead, args=(tmp_path,))
    learner.start()
    log = tmp_path / "actor_0.log"
    wait_for(lambda: log.exists() and "at work" in log.read_text())
    wait_for(lambda: len(psutil.Process(learner.pid).children()) == 2)  # the actor may start first
    said = tmp_path / "said"
    wait_for(lambda: said.exists() and "log " in said.read_text())
    actor = int(said.read_text().split("process ")[1].split(",")[0])
    (worker,) = [child for child in psutil.Process(learner.pid).children() if child.pid != actor]
    learner.kill()
    learner.join()
    wait_for(lambda: not is_alive(actor))
    assert worker.is_running()
    worker.kill()


def test_an_actor_that_lived_long_enough_starts_again_with_the_shortest_wait(tmp_path: Path) -> None:
    restart_policy = RestartPolicy(min_backoff_s=0.01, max_failures=2, poll_s=0.005, healthy_s=0.0)
    fleet = Fleet(tmp_path, "raise SystemExit(1)", restart_policy=restart_policy)
    with fleet.supervisor:
        wait_for(lambda: len(fleet.pids()) >= 4)
    assert set(fleet.waits()) == {"0.01"}
    assert not fleet.has_failed
