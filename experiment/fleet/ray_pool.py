"""Keeps actors on a Ray cluster: python -m loxodon.experiment.fleet.ray_pool --actors 4 -- WORDS OF AN ACTOR.

Each Ray actor supervises one collecting process, as the learner's machine would; Ray starts it again on
another machine when its own is lost. The process ends with its Ray actor, and that with this one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..signals import StopRequest
from . import leash
from .commands import actor_environment, library_program
from .extras import require
from .supervisor import ActorSupervisor

_POLL_S = 1.0
_PATIENCE_S = 15.0  # without a word from an actor, until its wait is mentioned


class Host:
    """A Ray actor: one collecting process and its supervisor, from construction on.

    Args:
        index: number of the actor. words: its arguments.
        folder: working directory, and the `log_folder` for its log, both on the shared file system.
    """

    def __init__(self, index: int, words: Sequence[str], folder: str, log_folder: str) -> None:
        os.chdir(folder)
        self._lines: list[str] = []
        self._supervisor = ActorSupervisor(
            [*library_program(), *words],
            1,
            Path(log_folder),
            actor_environment(os.environ),
            say=self._lines.append,
            should_stop=lambda: False,
            on_failure=lambda: None,
            first_index=index,
        )
        self._supervisor.__enter__()

    def poll(self) -> tuple[list[str], str | None]:
        """What there is to say since the last time, and why this actor cannot go on, if so."""
        lines = self._lines[:]
        del self._lines[: len(lines)]
        return lines, self._supervisor.failure

    def stop(self) -> None:
        """End the process."""
        self._supervisor.__exit__(None, None, None)


class Member:
    """The keeper's view of one Ray actor."""

    def __init__(self, ray: Any, handle: Any, index: int) -> None:
        self.ray, self.handle, self.index = ray, handle, index
        self.failure: str | None = None
        self._answer = handle.poll.remote()
        self._asked_s, self._has_told = time.monotonic(), False

    def poll(self) -> list[str]:
        """Lines to print. Waits for nothing."""
        if self.failure is not None:
            return []
        if not self.ray.wait([self._answer], timeout=0)[0]:
            if self._has_told or time.monotonic() - self._asked_s < _PATIENCE_S:
                return []
            self._has_told = True
            return [f"actor {self.index} waits for a place on the Ray cluster"]
        lines: list[str] = []
        try:
            lines, self.failure = self.ray.get(self._answer)
        except self.ray.exceptions.RayActorError as error:
            lines = [f"actor {self.index} lost its Ray worker ({type(error).__name__}); Ray starts it again"]
            time.sleep(_POLL_S)
        self._answer = self.handle.poll.remote()
        self._asked_s, self._has_told = time.monotonic(), False
        return lines


def keep(args: argparse.Namespace) -> int:
    """Keep the actors until this process is told to end; returns its exit status."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # read when Ray is imported or a local cluster begins
    ray = require("ray", "ray")
    ray.init(
        address=args.address,
        log_to_driver=False,
        include_dashboard=False if args.address == "local" else None,
    )
    remote = ray.remote(Host).options(
        num_cpus=args.cpus_per_actor, num_gpus=args.gpus_per_actor, max_restarts=-1, max_task_retries=0
    )
    places = [(i, args.words, str(Path.cwd()), args.log_folder) for i in range(args.actors)]
    members = [Member(ray, remote.remote(*place), place[0]) for place in places]
    with StopRequest() as stop:
        while not stop.requested() and any(member.failure is None for member in members):
            for line in [line for member in members for line in member.poll()]:
                sys.stdout.write(line + "\n")
            sys.stdout.flush()
            time.sleep(_POLL_S / 4)
    ray.wait([m.handle.stop.remote() for m in members], num_returns=len(members), timeout=leash.GRACE_S - 2)
    ray.shutdown()
    failures = [member.failure for member in members if member.failure is not None]
    if len(failures) == len(members):
        sys.stderr.write(f"{failures[-1]}\n")
        return 2  # trying again would not help
    return 0


def main() -> int:
    """Entry of the keeper."""
    leash.attach()
    parser = argparse.ArgumentParser(prog="ray_pool")
    parser.add_argument("--address", default="auto")
    parser.add_argument("--cpus-per-actor", type=float, default=1.0)
    parser.add_argument("--gpus-per-actor", type=float, default=0.0)
    parser.add_argument("--actors", type=int, required=True)
    parser.add_argument("--log-folder", required=True)
    parser.add_argument("words", nargs="*")
    return keep(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
