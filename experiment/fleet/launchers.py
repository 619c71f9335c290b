"""Launchers for several machines: Slurm jobs through submitit, and actors on a Ray cluster.

A separate process manages the actors on a Ray cluster, so that the learner imports nothing of Ray: this
module, run with the arguments of `run_pool` as JSON. Each Ray task supervises one collecting process, as the
learner's machine would; Ray starts it again on another machine when its own is lost. The collecting process
ends with its Ray task, the task with the pool process, and the pool process with the learner.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from ..checkpoint.store import CheckpointManager
from ..config import ConfigError
from ..contracts import RunContext
from ..process.exits import CONFIG_ERROR
from ..process.signals import StopRequest
from ..process.versions import import_extra
from .actors import ActorSpec, SeparateActors, actor_environment, library_program, supervise
from .heartbeat import read_heartbeats
from .pace import FINISHED_VARIABLE
from .shared_folder import TOKEN_VARIABLE, check_folder, write_token
from .supervisor import GRACE_S, ActorSupervisor, exit_with_parent

_SLURM_PROGRAM = "python -m loxodon.tools.launch --backend slurm"
_MOST_TIMEOUTS = 10_000  # a job is queued again after each time limit
_POLL_S = 0.25


def connect_ray(address: str) -> Any:
    """The module ray, with this process connected to the cluster at `address`.

    Raises: ImportError if Ray is not installed, ConnectionError if the cluster cannot be reached.
    """
    # These variables are read when Ray is imported or a local cluster begins. Lines of several actors must
    # not be merged as repetitions.
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0")
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # each try takes most of a minute
    if address == "local":
        # Ray would store a token in the home folder, with which other clusters then cannot be reached.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray = import_extra("ray", "loxodon[ray]")
    try:
        ray.init(address=address, include_dashboard=False if address == "local" else None)
    except (ConnectionError, ValueError) as error:  # nothing answers, or the address is malformed
        raise ConnectionError(
            f"There is no Ray cluster at {address!r} ({str(error).splitlines()[0]}). Fix: start one with "
            "`ray start --head`, or give the HOST:PORT of a running cluster."
        ) from None
    return ray


# ---- Slurm ----


@dataclass
class SlurmJob:
    """A Slurm job: the command line of the library with these words.

    Slurm's warning before preemption or the time limit ends the job like SIGTERM: the learner saves a
    checkpoint, and the job is queued again and continues from there.

    Attributes:
        main: function of the command line.
        words: its arguments, for an actor or a learner.
        run_dir: folder of the run.
        folder: folder to start in.
        finished_before: learners that had finished at submission, by the ids of their heartbeats. An actor
            that starts only after the learner of this submission has finished has nothing to do.
        environment: variables to set, such as TOKEN_VARIABLE.
    """

    main: Callable[..., int]
    words: list[str]
    run_dir: Path
    folder: Path
    finished_before: frozenset[str] = frozenset()
    environment: Mapping[str, str] = field(default_factory=dict)

    def __call__(self) -> int:
        """Run; returns the exit status."""
        os.chdir(self.folder)
        os.environ.update(self.environment)
        os.environ[FINISHED_VARIABLE] = " ".join(self.finished_before)
        if not self._is_learner and finished_learners(self.run_dir) - self.finished_before:
            return 0
        queue_again, is_warned = signal.getsignal(signal.SIGUSR2), False

        def on_warning(signum: int, frame: FrameType | None) -> None:
            nonlocal is_warned
            is_warned = True
            os.kill(os.getpid(), signal.SIGTERM)

        signal.signal(signal.SIGUSR2, on_warning)
        try:
            status = self.main(self.words, pool=lambda *_: SeparateActors(), program=_SLURM_PROGRAM)
        except SystemExit as stopped:
            status = stopped.code if isinstance(stopped.code, int) else 1
        if is_warned and callable(queue_again):
            queue_again(signal.SIGUSR2, None)
        return status

    def checkpoint(self) -> Any:
        """The job to queue again."""
        from submitit.helpers import DelayedSubmission

        words = [word for word in self.words if word != "--resume"]
        if self._is_learner and CheckpointManager(self.run_dir, self.run_dir.name).complete_epochs():
            words.append("--resume")
        return DelayedSubmission(replace(self, words=words))

    @property
    def _is_learner(self) -> bool:
        return "--actors" in self.words


def finished_learners(run_dir: Path) -> frozenset[str]:
    """Learners that finished all their work, by the ids of their heartbeats."""
    beats = read_heartbeats(run_dir)
    return frozenset(beat.id for beat in beats if beat.role != "actor" and beat.state == "finished")


def submit(
    main: Callable[..., int],
    spec: ActorSpec,
    run_dir: Path,
    *,
    prepare: Callable[[], None],
    cluster: str,
    common: Mapping[str, Any],
    learner: Mapping[str, Any],
    actor: Mapping[str, Any],
) -> list[Any]:
    """Submit the learner and an array of actors; returns their jobs, the learner's first.

    Args:
        main: function of the command line.
        spec: words of the learner, and number and words of its actors.
        run_dir: folder of the run.
        prepare: called right before the jobs are submitted.
        cluster: "slurm", or "local" for submitit's substitute on this machine, for tests.
        common: parameters of `submitit.AutoExecutor` for every job.
        learner: further parameters for the learner's job.
        actor: further parameters for the jobs of actors.

    Raises: ImportError if submitit is not installed, ConfigError if Slurm cannot be used here or a parameter
    is wrong.
    """
    submitit = import_extra("submitit", "loxodon[slurm]")
    try:
        executor = submitit.AutoExecutor(
            folder=run_dir / "logs" / "slurm" / "%j", cluster=cluster, slurm_max_num_timeout=_MOST_TIMEOUTS
        )
    except RuntimeError as error:
        raise ConfigError(
            f"Slurm cannot be used here ({error}). Fix: run this on a machine of the cluster, or try it out "
            "with --slurm-cluster local."
        ) from None
    try:
        executor.update_parameters(**{"slurm_signal_delay_s": 90, **common})
    except (AssertionError, NameError, TypeError) as error:
        raise ConfigError(f"--slurm-set is wrong: {error}. Fix: correct its names and values.") from None
    prepare()
    words, finished_before = list(spec.learner_words), finished_learners(run_dir)
    environment = {TOKEN_VARIABLE: write_token(run_dir)}
    learner_job = SlurmJob(main, words, run_dir.absolute(), Path.cwd(), finished_before, environment)
    actor_job = replace(learner_job, words=spec.words(), environment={**environment, **spec.environment})
    # The learner comes last, so that a failure never leaves it alone in the queue.
    executor.update_parameters(name=f"{run_dir.name}-actor", **actor)
    with executor.batch():  # one job array
        actors = [executor.submit(actor_job) for _ in range(spec.num_actors)]
    executor.update_parameters(name=f"{run_dir.name}-learner", **learner)
    return [executor.submit(learner_job), *actors]


# ---- Ray, in the learner ----


def ray_pool(
    ctx: RunContext, spec: ActorSpec, *, address: str, num_cpus: float, num_gpus: float
) -> ActorSupervisor:
    """Actors on the Ray cluster at `address`, each with this many CPUs and GPUs.

    A separate process manages them, because Ray's threads do not work together with a learner that forks.
    """
    spec = replace(spec, device="cuda" if num_gpus else spec.device)
    settings = {
        "words": spec.words(),
        "num_actors": spec.num_actors,
        "run_dir": str(ctx.run_dir.absolute()),
        "environment": {**spec.environment, TOKEN_VARIABLE: write_token(ctx.run_dir)},
        "address": address,
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
    }
    return supervise(ctx, spec, [sys.executable, "-m", __name__, json.dumps(settings)], 1, "ray_pool")


# ---- Ray, in the pool process ----


def supervise_actor(
    index: int, words: Sequence[str], folder: str, run_dir: str, environment: Mapping[str, str]
) -> str | None:
    """A Ray task: one collecting process and its supervisor, until it is cancelled or cannot continue.

    Args:
        index: number of the actor.
        words: its arguments.
        folder: working directory, on the shared file system like run_dir.
        run_dir: folder of the run.
        environment: variables to set for the process, TOKEN_VARIABLE among them.

    Returns: the reason why it cannot continue.
    """
    try:
        check_folder(Path(run_dir), environment[TOKEN_VARIABLE])
        os.chdir(folder)
    except (ConfigError, OSError) as error:
        return f"actor {index} cannot start on {socket.gethostname()}: {error}"
    has_failed = threading.Event()
    with ActorSupervisor(
        [*library_program(), *words],
        1,
        Path(run_dir, "logs", "actors"),
        {**actor_environment(os.environ), **environment},
        say=lambda line: print(line, flush=True),  # noqa: T201 - Ray passes it on to the pool process
        should_stop=lambda: False,
        on_failure=has_failed.set,
        first_index=index,
    ) as supervisor:
        while not has_failed.wait(_POLL_S):  # cancelling raises KeyboardInterrupt between two waits
            pass
    return supervisor.failure


def run_pool(
    words: list[str],
    num_actors: int,
    run_dir: str,
    environment: dict[str, str],
    address: str,
    num_cpus: float,
    num_gpus: float,
) -> int:
    """Run the actors until this process is asked to end; returns its exit status. See ray_pool."""
    ray = connect_ray(address)
    remote = ray.remote(supervise_actor).options(num_cpus=num_cpus, num_gpus=num_gpus, max_retries=-1)
    tasks = [remote.remote(i, words, str(Path.cwd()), run_dir, environment) for i in range(num_actors)]
    running = tasks
    with StopRequest() as stop:
        while running and not stop.requested():
            ended, running = ray.wait(running, num_returns=len(running), timeout=_POLL_S)
            for task in ended:
                sys.stderr.write(f"{_reason(ray, task)}\n")
                sys.stderr.flush()
    for task in running:
        ray.cancel(task)
    ray.wait(tasks, num_returns=len(tasks), timeout=GRACE_S - 2)
    ray.shutdown()
    return 0 if running else CONFIG_ERROR  # trying again would not help


def _reason(ray: Any, task: Any) -> str:
    """The reason why a task of `supervise_actor` has ended."""
    try:
        return str(ray.get(task))
    except ray.exceptions.RayError as error:
        return str(error)


if __name__ == "__main__":
    exit_with_parent()
    try:
        sys.exit(run_pool(**json.loads(sys.argv[1])))
    except ConnectionError as unreachable:  # the cluster may come back, so the learner tries again
        sys.exit(f"error: {unreachable}")
