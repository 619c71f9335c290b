"""`loxodon sweep --config tmaze Experiment.learning_rate=log(1e-5,1e-3) --trials 20`: a search by Optuna.

A trial is a run in its own process, in `runs/trial-<n>` of the sweep's folder. `study.db` there records all
trials, so the same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..data.lock import FolderLock, LockPurpose
from ..experiment.checkpoint.store import CheckpointManager
from ..experiment.config import ConfigError, explained, load_config
from ..experiment.config.reading import read_source
from ..experiment.experiment import Experiment
from ..experiment.fleet.actors import library_program, without
from ..experiment.fleet.supervisor import describe_exit
from ..experiment.output.plots import curves_if_readable, metrics_of, points_of
from ..experiment.process.exits import FAILED, INTERRUPTED
from ..experiment.process.files import WatchedFile, digest_of, write_text
from ..experiment.process.versions import import_extra
from ..gin_configs.presets import did_you_mean
from . import run
from .arguments import parse_sweep
from .dry_run import dry_run
from .report.main import write_report
from .seeds import Job, run_jobs

_SWEEP = LockPurpose(
    "sweep",
    "records the trials in",
    "a sweep has only one process",
    "end that process, or choose another folder with -o.",
)
_SPACE = re.compile(r"(log|uniform|int|choice)\((.+)\)")
_COMMA = re.compile(r""",(?![^(\[{]*[)\]}])(?=(?:[^'"]|'[^']*'|"[^"]*")*$)""")
"""A comma outside of brackets and quotes."""
_CALL = re.compile(r"(\w+)\(.*")
_EXAMPLES = "log(1e-5,1e-3), uniform(0,1), int(1,8) or choice(8,'a',@Name), with the lower bound first"
_OF_SIGNALS = 128  # launchers, such as srun, report signal n as 128 + n
_MOST_FAILURES = 3  # give up after this many failures without a success


def parse_space(typed: str) -> tuple[str, Any] | None:
    """Parse `Name.param=log(1e-5,1e-3)` to parameter and Optuna distribution; None for a plain override.

    Other distributions: `uniform(a,b)`, `int(a,b)` (inclusive) and `choice(x,y,...)` of values as in gin
    files.

    Raises: ConfigError for an invalid distribution.
    """
    key, _, text = (part.strip() for part in typed.partition("="))
    if not (called := _CALL.fullmatch(text)):
        return None
    if not (found := _SPACE.fullmatch(text)):
        kinds = ("log", "uniform", "int", "choice")
        meant = " Close the parenthesis." if called[1] in kinds else did_you_mean(called[1], kinds)
        raise ConfigError(
            f"command line, `{typed}`: {text} is not a search space.{meant} Fix: write {_EXAMPLES}."
        )
    kind, inside = found.groups()
    spaces = _optuna().distributions
    try:
        if kind == "choice":
            return key, spaces.CategoricalDistribution([one.strip() for one in _COMMA.split(inside)])
        low, high = map(int if kind == "int" else float, inside.split(","))
        if kind == "int":
            return key, spaces.IntDistribution(low, high)
        return key, spaces.FloatDistribution(low, high, log=kind == "log")
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise ConfigError(f"command line, `{typed}`: {reason}. Fix: write {_EXAMPLES}.") from None


@dataclass(frozen=True)
class Sweep:
    """The trials of a study, as runs.

    spaces: Optuna's distributions by parameter. command: program and words of every trial. is_max: whether a
    higher metric is better. num_trials: total number, including those of earlier processes. through: words
    before the command. pruned: trials that were ended early, with their number of env steps.
    """

    study: Any
    spaces: Mapping[str, Any]
    folder: Path
    command: Sequence[str]
    metric: str
    is_max: bool
    num_trials: int
    through: Sequence[str] = ()
    pruned: dict[int, int] = field(default_factory=dict)

    def run(self, num_parallel: int) -> bool:
        """Run the remaining trials; returns whether all ended by themselves."""
        trials: dict[Path, Any] = {}

        def jobs() -> Iterator[Job]:
            for trial in self._trials():
                job = self._job(trial)
                trials[job.run_dir] = trial
                yield job

        return run_jobs(
            jobs(), num_parallel, lambda job, status: self._record_result(trials[job.run_dir], job, status)
        )

    def _trials(self) -> Iterator[Any]:
        """Yield interrupted trials, then new ones."""
        for one in self.study.get_trials(states=(_state("RUNNING"),)):
            yield _optuna().trial.Trial(self.study, one._trial_id)
        while len(states := [one.state for one in self.study.trials]) < self.num_trials:
            if states.count(_state("FAIL")) >= _MOST_FAILURES and _state("COMPLETE") not in states:
                return
            yield self.study.ask(self.spaces)

    def _job(self, trial: Any) -> Job:
        run_dir = self.folder / "runs" / f"trial-{trial.number}"
        chosen = [f"{name}={value}" for name, value in trial.params.items()]
        run.say(f"trial {trial.number} started: {' '.join(chosen)}")
        again = ["--resume"] * bool(CheckpointManager(run_dir, run_dir.name).complete_epochs())
        place = [f"Experiment.ckpt_base_dir={str(run_dir.parent)!r}", "--run-name", run_dir.name]
        should_prune = self._pruning_check(trial, run_dir)
        command = [*self.command, *chosen, *place, *again]
        return Job(command, run_dir, has_log=True, through=self.through, should_end=should_prune)

    def _pruning_check(self, trial: Any, run_dir: Path) -> Callable[[], bool]:
        """A function that checks in the logs whether a trial is worse than the others were at this point."""
        curves = WatchedFile(metrics_of(run_dir), lambda _: curves_if_readable(run_dir))
        seen: set[int] = set(self.study.trials[trial.number].intermediate_values)

        def should_prune() -> bool:
            for point in (curves.poll() or {}).get(self.metric, ()):
                step = int(point["env_steps"])
                if point["gradient_steps"] and step not in seen:
                    seen.add(step)
                    trial.report(point["value"], step)
                    if trial.should_prune():
                        self.pruned.setdefault(trial.number, step)
            return trial.number in self.pruned

        return should_prune

    def _record_result(self, trial: Any, job: Job, status: int) -> None:
        """Record in the study how a trial ended; a trial that was interrupted or killed stays open."""
        if self.through and status > _OF_SIGNALS:
            status = _OF_SIGNALS - status
        log = job.run_dir / "logs" / "console.log"
        curves = curves_if_readable(job.run_dir)
        points = points_of(curves, self.metric, "env_steps")
        if (steps := self.pruned.get(trial.number)) is not None:
            self.study.tell(trial, state=_state("PRUNED"))
            text = f"was ended after {steps:,} env steps: it was worse than the median of the others"
        elif job.was_terminated:
            text = "was interrupted"
        elif status < 0:
            text = f"{describe_exit(status)}; run the same command to continue it"
        elif not status and job.was_interrupted():
            text = f"was stopped {job.stopped_early()}; run the same command to continue it"
        elif status or not len(points):
            self.study.tell(trial, state=_state("FAIL"))
            why = f"exit status {status}" if status else f"no {self.metric} in its logs"
            text = f"failed ({why}), log {log}.{'' if status else did_you_mean(self.metric, curves)}"
        else:
            self.study.tell(trial, float(points[-1, 1]))
            text = f"{self.metric} {points[-1, 1]:.4g} (best: {self.study.best_value:.4g})"
        run.say(f"trial {trial.number} {text}")

    def write_results(self) -> bool:
        """Write best.gin and the report, and print a summary; returns whether a best trial exists."""
        if not self.study.get_trials(states=(_state("COMPLETE"),)):
            return False
        best = self.study.best_trial
        chosen = [f"{name}={value}" for name, value in best.params.items()]
        lines = [
            f"{one.key} = {one.value!r}" for one in read_source([], zip(chosen, chosen, strict=True)).bindings
        ]
        place = f"# {self.metric} {best.value:.6g} in trial {best.number} of {len(self.study.trials)}"
        text = "\n".join([place, *lines]) + "\n"
        path = self.folder / "best.gin"
        write_text(path, text)
        run.say(f"\n{text}\nbest settings       {path}")
        try:
            page, _ = write_report(
                [self.folder / "runs"],
                self.folder / "report",
                metric=self.metric,
                is_less_better=not self.is_max,
            )
            run.say(f"report              {page}")
        except (ImportError, OSError, ValueError) as error:
            run.say(f"no report: {error}")
        return True


def _optuna() -> Any:
    return import_extra("optuna", "loxodon[sweep]")


def _state(name: str) -> Any:
    return _optuna().trial.TrialState[name]


def main(argv: Sequence[str] | None = None) -> int:
    """Begin or continue a search; returns the exit status."""
    args, parsed, words = parse_sweep(argv)
    return run.exit_status(lambda: _sweep(args, parsed, words))


def _sweep(args: argparse.Namespace, parsed: argparse.Namespace, words: Sequence[str]) -> int:
    found = {typed: space for typed in parsed.overrides if (space := parse_space(typed)) is not None}
    if not found:
        raise ConfigError(
            "A sweep needs a setting to search. Fix: add 'Experiment.learning_rate=log(1e-5,1e-3)', for "
            "example."
        )
    by_key: dict[str, str] = {}
    for typed, (key, _) in found.items():
        if (other := by_key.setdefault(key, typed)) != typed:
            raise ConfigError(
                f"command line: `{other}` and `{typed}` search the same setting. Fix: remove one of the two."
            )
    parsed.overrides = [typed for typed in parsed.overrides if typed not in found]
    name, digests = _check(parsed, found)
    folder = args.output or Path("sweeps", name)
    optuna = _optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(folder, folder.name, _SWEEP)
    study = _study(folder / "study.db", args.direction, args.prune_after)
    if parsed.seed is not None:
        study.sampler = optuna.samplers.TPESampler(seed=parsed.seed + len(study.trials))
    kept = without([word for word in words if word not in found], "--resume", "--through")
    asked = {"words": kept, "spaces": sorted(found), "metric": args.metric, "direction": args.direction}
    asked["files"] = digests
    if (before := {"files": digests, **study.user_attrs.get("asked", asked)}) != asked:
        raise ConfigError(
            f"{folder} holds another sweep, {before}, but this one is {asked}. Fix: choose another folder "
            "with -o."
        )
    if not study.trials and (old := sorted((folder / "runs").glob("trial-*"))):
        raise ConfigError(
            f"{folder / 'study.db'} has no trials, but {old[0]} exists, and its settings are not known any "
            "more. Fix: restore study.db, remove the folder, or choose another with -o."
        )
    study.set_user_attr("asked", asked)
    command, is_max = [*library_program(), *kept], args.direction == "maximize"
    sweep = Sweep(
        study, dict(found.values()), folder, command, args.metric, is_max, args.trials, parsed.through
    )
    is_complete = sweep.run(args.jobs)
    has_best = sweep.write_results()
    lock.release()
    if not is_complete:
        run.say("interrupted; run the same command to continue")
        return INTERRUPTED
    if not has_best:
        run.say("error: no trial has finished. Fix: correct the errors in their logs.")
    return 0 if has_best else FAILED


def _study(path: Path, direction: str, prune_after: int) -> Any:
    """Open the study in a file, or create it.

    Raises: ValueError if the file is not the database of a sweep.
    """
    optuna = _optuna()
    try:
        study = optuna.create_study(
            storage=f"sqlite:///{path}",
            study_name="sweep",
            direction=direction,
            pruner=optuna.pruners.MedianPruner(n_warmup_steps=prune_after),
            load_if_exists=True,
        )
        study.get_trials()
    except Exception as error:  # Optuna, SQLAlchemy and SQLite all have errors of their own
        reason = str(error.__cause__ or error).partition("\n")[0]
        raise ValueError(
            f"{path} cannot be used as the database of a sweep ({reason}). Fix: restore it from a copy, or "
            "choose another folder with -o."
        ) from error
    return study


def _check(parsed: argparse.Namespace, found: Mapping[str, tuple[str, Any]]) -> tuple[str, dict[str, str]]:
    """Check the config with all choices and ends of ranges, and build it.

    Returns: the run's name, and digests of the user's gin files by path.

    Raises: ConfigError.
    """
    edges = {
        typed: (key, getattr(space, "choices", None) or (space.low, space.high))
        for typed, (key, space) in found.items()
    }
    for i in range(max(len(values) for _, values in edges.values())):
        chosen = [(f"{key}={values[i % len(values)]}", typed) for typed, (key, values) in edges.items()]
        config = load_config(parsed.configs, [*run.overrides(parsed), *chosen], is_complete=True)
        with explained():
            name: str = Experiment().run_name  # type: ignore[call-arg]  # gin supplies the arguments
            dry_run(config)
        digests = {str(path): digest_of(path) for path in config.source.own_files}
    return name, digests


if __name__ == "__main__":
    sys.exit(main())
