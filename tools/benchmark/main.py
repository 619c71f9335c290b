"""`loxodon benchmark popgym --jobs 2`: runs of an agent on all tasks of a suite, and a page about them.

In the folder of results, `SUITE/NAME/TASK-seed0.json` is a finished run, `SUITE/NAME/runs/` has the folders
of all runs, and `SUITE.md` is the page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ...data.lock import FolderLock, LockPurpose
from ...experiment.checkpoint.store import CheckpointManager
from ...experiment.config import ConfigError, explained, load_config
from ...experiment.experiment import Experiment
from ...experiment.fleet.actors import library_program
from ...experiment.fleet.supervisor import end_of_log
from ...experiment.output.plots import curves_if_readable
from ...experiment.process.exits import FAILED, INTERRUPTED
from ...experiment.process.files import digest_of, json_object, write_text
from ...experiment.process.versions import PACKAGES, git_commit, hardware, version_of
from .. import run as run_command
from ..arguments import parse_benchmark
from ..dry_run import dry_run
from ..seeds import Job, run_jobs
from .page import write_page
from .results import Run, path_of, read_run, read_runs, store
from .suites import SUITES, Task

OWN_NAME = "loxodon"
_AGENT = "agent.json"  # in the folder of a run: what it was begun with
_OF_THE_BENCHMARK = {
    "Experiment.ckpt_base_dir": "-o",
    "Experiment.run_name": "--name",
    "Experiment.seed": "--seeds",
    "Experiment.epochs": "--env-steps",
}
"""Settings that a benchmark makes for each run: the option to use instead."""
_CLAIM = LockPurpose(
    "benchmark",
    "runs",
    "a run has only one process",
    "wait for it.",
)


class Agent(NamedTuple):
    """Configs and settings of a run, and digests of the user's gin files by name."""

    configs: list[str]
    settings: list[str]
    digests: dict[str, str]


@dataclass
class Benchmark:
    """The runs of one agent on tasks of a suite.

    folder: that of the suite, for all agents. configs and settings: the agent. num_env_steps: budget of each
    run; None for that of its task.
    """

    suite: str
    name: str
    folder: Path
    configs: Sequence[str]
    settings: Sequence[str]
    num_env_steps: int | None
    num_jobs: int
    failed: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    _pending: dict[Path, tuple[Run, FolderLock]] = field(default_factory=dict)

    def run(self, tasks: Sequence[str], seeds: Sequence[int]) -> bool:
        """Run what is not stored, seed by seed over all tasks; returns whether nothing was interrupted.

        Raises: ValueError, before any run, if a stored run has other settings.
        """
        agents = {name: self.agent_of(SUITES[self.suite].tasks[name]) for name in tasks}
        runs = [
            Run(self.suite, name, self.name, seed, [], one.configs, one.settings, digests=one.digests)
            for seed in seeds
            for name, one in agents.items()
        ]
        missing = [run for run in runs if not self._is_stored(run)]
        for run in missing:
            self._check_begun(run)
        jobs = (job for run in missing if (job := self._job(run)) is not None)
        return run_jobs(jobs, self.num_jobs, self._on_end)

    def agent_of(self, task: Task) -> Agent:
        """Configs and settings of a run: those of the agent have precedence over those of the task.

        Raises: ConfigError if it cannot be run as a benchmark.
        """
        configs, settings = [*task.configs, *self.configs], [*task.settings, *self.settings]
        texts = [*settings, "Experiment.run_name='any'"]
        config = load_config(configs, [(text, text) for text in texts], is_complete=True)
        for key, option in _OF_THE_BENCHMARK.items():
            if any(
                binding.key == key and binding.origin.text in self.settings for binding in config.bindings
            ):
                raise ConfigError(
                    f"`{key}` cannot be set, because a benchmark decides it. Fix: use {option} instead."
                )
        with explained():
            exp = Experiment()  # type: ignore[call-arg]  # gin supplies the arguments; nothing is built
        if not exp.train_timesteps_per_epoch:
            raise ConfigError(
                "Experiment.train_timesteps_per_epoch is 0, so the agent takes no env steps, but a benchmark "
                "has a budget of them. Fix: set it to a positive number."
            )
        budget = self.num_env_steps or task.num_env_steps
        epochs = -(-budget // (exp.parallel_actors * exp.train_timesteps_per_epoch))
        settings += [f"Experiment.epochs={epochs}", "Experiment.stop_at_val_return=None"]
        return Agent(configs, settings, _digests(configs, config.source.own_files))

    def check(self, task: Task) -> None:
        """Build and train once with tiny numbers, so that mistakes are found before the first run."""
        agent = self.agent_of(task)
        texts = [*agent.settings, "Experiment.run_name='check'"]
        config = load_config(agent.configs, [(text, text) for text in texts], is_complete=True)
        with explained():
            dry_run(config)

    def _job(self, run: Run) -> Job | None:
        """The job that makes a run; None if another process makes it, or has made it."""
        run_name = f"{run.task}-seed{run.seed}"
        run_dir = self._folder_of(run)
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            lock = FolderLock(run_dir, run_name, _CLAIM)
        except ValueError:
            self.elsewhere.append(run_name)
            return None
        if self._is_stored(run):
            lock.release()
            return None
        self._pending[run_dir] = run, lock
        write_text(run_dir / _AGENT, json.dumps(_agent_of(run), indent=1) + "\n")
        run_command.say(f"{run_name} started")
        again = ["--resume"] * bool(CheckpointManager(run_dir, run_name).complete_epochs())
        command = [*library_program(), *(word for config in run.configs for word in ("--config", config))]
        command += ["--seed", str(run.seed), "--run-name", run_name, *again]
        place = f"Experiment.ckpt_base_dir={str(run_dir.parent)!r}"
        own = [place, "Experiment.torch_threads=1"]
        return Job([*command, *run.settings, *own], run_dir, has_log=True)

    def _folder_of(self, run: Run) -> Path:
        return self.folder / self.name / "runs" / f"{run.task}-seed{run.seed}"

    def _check_begun(self, run: Run) -> None:
        """Raise ValueError if the folder of a run that is not stored is that of another agent."""
        path = self._folder_of(run) / _AGENT
        if path.is_file() and json_object(path) != _agent_of(run):
            raise ValueError(
                f"{path.parent} holds a run that was begun with other settings or other contents of their "
                f"files, see {_AGENT} there. Fix: choose another --name or -o, or delete that folder."
            )

    def _is_stored(self, run: Run) -> bool:
        """Whether the file of a run exists. Raises: ValueError if it is one with another agent or budget."""
        path = path_of(self.folder, run.name, run.task, run.seed)
        if not path.exists():
            return False
        found = read_run(path)
        if (found.configs, found.settings) != (run.configs, run.settings):
            differ = sorted({*found.configs, *found.settings} ^ {*run.configs, *run.settings})
            raise ValueError(
                f"{path} was made with other settings; only one of the two has {', '.join(differ)}. "
                f"Fix: choose another --name or -o, or delete that file and {self._folder_of(run)}."
            )
        changed = [name for name, digest in found.digests.items() if run.digests.get(name) != digest]
        if changed:
            raise ValueError(
                f"{path} was made before {', '.join(changed)} changed. Fix: choose another --name or -o, or "
                f"delete that file and {self._folder_of(run)}."
            )
        return True

    def _on_end(self, job: Job, status: int) -> None:
        run, lock = self._pending.pop(job.run_dir)
        metric, run_name = SUITES[self.suite].tasks[run.task].metric, job.run_dir.name
        points = curves_if_readable(job.run_dir).get(metric, ())
        if job.was_terminated:
            run_command.say(f"{run_name} was interrupted")
        elif status or not points:
            why = f"exit status {status}" if status else f"no {metric} in its logs"
            log = job.run_dir / "logs" / "console.log"
            run_command.say(f"{run_name} failed ({why}), the end of {log}:\n{end_of_log(log)}")
            self.failed.append(run_name)
        elif (early := job.stopped_early()) is not None:
            run_command.say(f"{run_name} stopped early ({early}); run the same command to continue it")
            self.failed.append(run_name)
        else:
            curve = [
                [p["env_steps"], p["gradient_steps"], round(p["wall_s"], 1), round(p["value"], 4)]
                for p in points
            ]
            versions = {package: version_of(package) for package in PACKAGES}
            versions["commit"] = git_commit()
            run = replace(run, curve=curve, versions=versions, machine=hardware())
            store(run, self.folder)
            run_command.say(f"{run_name} has a score of {run.score:.4g}")
        lock.release()


def _agent_of(run: Run) -> dict[str, Any]:
    """The agent of a run as JSON values."""
    return {"configs": run.configs, "settings": run.settings, "digests": run.digests}


def _digests(configs: Sequence[str], read: Sequence[Path]) -> dict[str, str]:
    """Digests of the gin files of the user, which includes the files that they include.

    Presets change with the library, whose commit is stored.

    Args:
        configs: presets, and files as the user wrote them.
        read: all files that are not presets.
    """
    files = {config: Path(config) for config in configs if Path(config).is_file()}
    typed = {path.resolve() for path in files.values()}
    files |= {str(path): path for path in read if path.resolve() not in typed}
    return {name: digest_of(path) for name, path in files.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, and write the page; returns the exit status."""
    args = parse_benchmark(argv)
    return run_command.exit_status(lambda: _benchmark(args))


def _benchmark(args: argparse.Namespace) -> int:
    suite, is_own = SUITES[args.suite], not args.config and not args.overrides
    folder: Path = args.output / args.suite
    benchmark = Benchmark(
        args.suite,
        args.name or OWN_NAME,
        folder,
        args.config or suite.configs,
        [*suite.settings, *args.overrides] if not args.config else args.overrides,
        args.env_steps,
        args.jobs,
    )
    if not is_own and not (folder / benchmark.name).exists():
        benchmark.check(suite.tasks[args.tasks[0]])
    is_complete = benchmark.run(args.tasks, args.seeds)
    if found := read_runs(folder):
        page: Path = args.page or args.output / f"{args.suite}.md"
        try:
            write_page(args.suite, found, page)
        except ImportError as error:
            run_command.say(f"no learning curves on the page: {error}")
        run_command.say(f"page                {page}")
    if benchmark.elsewhere:
        run_command.say(f"made by other processes: {', '.join(benchmark.elsewhere)}")
    if not is_complete:
        run_command.say("interrupted; run the same command to continue")
        return INTERRUPTED
    return FAILED if benchmark.failed else 0


if __name__ == "__main__":
    sys.exit(main())
