"""A learner job and actor jobs on a Slurm cluster, submitted through submitit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from ..checkpoint.store import CheckpointManager
from .extras import require

PROGRAM = "-m loxodon.experiment.launch --backend slurm"


@dataclass
class SlurmOptions:
    """What to ask of the cluster.

    cluster: "slurm", or "local" for submitit's stand-in on this machine, to try things.
    partition: None for the cluster's default. minutes: limit of each job; the jobs are queued again after it.
    learner_gpus, actor_gpus, learner_cpus, actor_cpus: per job.
    more: further parameters of `submitit.AutoExecutor`, such as slurm_account.
    """

    cluster: str = "slurm"
    partition: str | None = None
    minutes: int = 24 * 60
    learner_gpus: int = 1
    actor_gpus: int = 0
    learner_cpus: int = 8
    actor_cpus: int = 1
    more: dict[str, Any] = field(default_factory=dict)


@dataclass
class Job:
    """What a job runs: the command line of the library, with these words.

    Slurm's warning before a job is preempted or runs into its time limit ends it as SIGTERM would; the
    learner saves a checkpoint, and the job, queued again, goes on from there.

    Attributes:
        words: arguments; of an actor or a learner.
        run_dir: folder of the run.
        folder: to start in.
        seen_policy: time of the policy file at submission. An actor that gets its turn only after the learner
            has finished has nothing to do.
    """

    words: list[str]
    run_dir: Path
    folder: Path
    seen_policy: float | None

    def __call__(self) -> int:
        """Run; returns the exit status."""
        from ..cli import main
        from .pools import elsewhere

        os.chdir(self.folder)
        if not self._is_learner and self._has_finished():
            return 0
        queue_again, is_warned = signal.getsignal(signal.SIGUSR2), False

        def on_warning(signum: int, frame: FrameType | None) -> None:
            nonlocal is_warned
            is_warned = True
            os.kill(os.getpid(), signal.SIGTERM)

        signal.signal(signal.SIGUSR2, on_warning)
        try:
            status = main(self.words, pool=elsewhere, program=PROGRAM)
        except SystemExit as stopped:
            status = stopped.code if isinstance(stopped.code, int) else 1
        if is_warned and callable(queue_again):
            queue_again(signal.SIGUSR2, None)
        return status

    def checkpoint(self) -> Any:
        """The job to queue instead of this one."""
        from submitit.helpers import DelayedSubmission

        words = [word for word in self.words if word != "--resume"]
        if self._is_learner and CheckpointManager(self.run_dir, self.run_dir.name).complete_epochs():
            words.append("--resume")
        return DelayedSubmission(Job(words, self.run_dir, self.folder, self.seen_policy))

    @property
    def _is_learner(self) -> bool:
        return "--actors" in self.words

    def _has_finished(self) -> bool:
        latest = CheckpointManager(self.run_dir, self.run_dir.name)
        info = latest.policy_info(latest.latest_path)
        return info is not None and info.is_final and policy_time(self.run_dir) != self.seen_policy


def policy_time(run_dir: Path) -> float | None:
    """When the newest policy of a run was written (file system's clock, s), or None if there is none."""
    path = CheckpointManager(run_dir, run_dir.name).latest_path
    return path.stat().st_mtime if path.exists() else None


def submit(
    learner_words: Sequence[str],
    actor_words: Sequence[str],
    num_actors: int,
    run_dir: Path,
    options: SlurmOptions,
    executor_of: Callable[..., Any] | None = None,
) -> list[Any]:
    """Submit the learner and an array of actors; returns their jobs, the learner's first.

    executor_of: makes the executor; None for submitit.AutoExecutor.

    Raises: ImportError if submitit is not installed.
    """
    make = executor_of or require("submitit", "slurm").AutoExecutor
    executor = make(folder=run_dir / "logs" / "slurm" / "%j", cluster=options.cluster)
    slurm = {"slurm_partition": options.partition} if options.partition is not None else {}
    common = {"timeout_min": options.minutes, "slurm_signal_delay_s": 90, **slurm, **options.more}
    seen, folder = policy_time(run_dir), Path.cwd()

    def job(words: Sequence[str]) -> Job:
        return Job(list(words), run_dir.absolute(), folder, seen)

    executor.update_parameters(
        name=f"{run_dir.name}-learner",
        gpus_per_node=options.learner_gpus,
        cpus_per_task=options.learner_cpus,
        **common,
    )
    jobs = [executor.submit(job(learner_words))]
    executor.update_parameters(
        name=f"{run_dir.name}-actor",
        gpus_per_node=options.actor_gpus,
        cpus_per_task=options.actor_cpus,
        **common,
    )
    with executor.batch():  # one job array
        jobs += [executor.submit(job(actor_words)) for _ in range(num_actors)]
    return jobs
