"""Run one command on a Ray cluster, like srun on Slurm; `--through` puts these words before a run's command.

    python -m loxodon.tools.on_ray --cpus 2 -- python examples/run.py --config tmaze

It waits for the command and ends with its exit status. Ray forwards the command's output. SIGTERM and SIGINT
are forwarded to the command, so that a run saves a checkpoint first.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..experiment.fleet.launchers import connect_ray
from ..experiment.fleet.supervisor import GRACE_S, PARENT
from ..experiment.process.signals import StopRequest
from .arguments import Parser
from .run import exit_status

_POLL_S = 0.25
_LOG_S = 1.0  # Ray forwards the last lines of the command's output a little later


class RemoteCommand:
    """A Ray actor that starts the command on the machine that Ray chose.

    If Ray ends this actor, for example because its owner has ended, a run notices and saves a checkpoint.
    """

    def __init__(self, command: Sequence[str], folder: str) -> None:
        self._process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, PARENT: str(os.getpid())}, start_new_session=True
        )

    def wait(self) -> int | None:
        """Wait up to a quarter of a second; returns the exit status (negative for a signal), or None."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_POLL_S)
        return self._process.poll()

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in the arguments; returns its exit status, or 128 + n if signal n ended it."""
    parser = Parser(prog="python -m loxodon.tools.on_ray", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--address", default="auto", help="address of the cluster (auto: the one on this machine)"
    )
    parser.add_argument("--cpus", type=float, default=1.0, help="CPUs for the command")
    parser.add_argument("--gpus", type=float, default=0.0, help="GPUs for the command")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    args = parser.parse_args(argv)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("there is no command. Fix: write it after the options.")
    return exit_status(lambda: _run(command, args.address, num_cpus=args.cpus, num_gpus=args.gpus))


def _run(command: Sequence[str], address: str, **resources: float) -> int:
    ray = connect_ray(address)
    found = ray.remote(RemoteCommand).options(**resources).remote(command, str(Path.cwd()))
    status: int | None = None
    give_up_s = math.inf  # the command cannot answer until the cluster has resources for it
    with StopRequest() as stop:
        answer, terminated = found.wait.remote(), None
        while status is None:
            if ray.wait([answer], timeout=_POLL_S)[0]:
                status = _answer(ray, answer)
                answer, give_up_s = found.wait.remote(), math.inf
            elif time.monotonic() > give_up_s:
                status = -signal.SIGTERM
            if stop.requested() and terminated is None:
                terminated, give_up_s = found.terminate.remote(), time.monotonic() + GRACE_S
    time.sleep(_LOG_S)
    ray.shutdown()
    return status if status >= 0 else 128 - status


def _answer(ray: Any, answer: Any) -> int | None:
    """The result of `RemoteCommand.wait`; a command whose machine or process was lost counts as killed."""
    try:
        status: int | None = ray.get(answer)
    except ray.exceptions.RayActorError as error:
        sys.stderr.write(f"The machine or process of the command was lost: {str(error).splitlines()[0]}\n")
        return -signal.SIGKILL
    return status


if __name__ == "__main__":
    sys.exit(main())
