"""Runs for a report: read from their folders, without running any of their code, and grouped."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ...data.errors import FormatError
from ...experiment.checkpoint.record import bindings_of
from ...experiment.checkpoint.store import EVALUATIONS
from ...experiment.config.hash import is_technical
from ...experiment.fleet.heartbeat import RUN_FOLDERS, newest_learner, read_heartbeats
from ...experiment.output.plots import Curves, is_number, metrics_of, points_of, read_curves
from ...experiment.process.files import check_inside, parse_json, read_text
from ...experiment.settings import fields_with

logger = logging.getLogger("loxodon")
EVALUATION_FORMAT = 1  # format of the JSON files of `loxodon evaluate`
_SHOWN = 60  # maximum number of characters of a value in a warning
# Errors of files with unexpected content.
_BROKEN = (
    *(OSError, FormatError, ArithmeticError, AttributeError),
    *(LookupError, RecursionError, TypeError, ValueError),
)
_ATTEMPT = re.compile(r"val/return_attempt_(\d+)")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Result:
    """The episodes of an evaluation.

    policy: "best", "latest" or "epoch:N"; epoch: epoch in which its weights were saved. sampled: whether
    actions were sampled. context: number of past timesteps that the policy saw, None for all. returns: (n,),
    n > 0.
    """

    env: str
    policy: str
    epoch: int
    sampled: bool
    task: str
    context: int | None
    returns: np.ndarray


@dataclass(frozen=True)
class Run:
    """A run, as read from its folder.

    curves: see read_curves. state: state of its learner, in words. settings: hyper-parameters, in gin syntax.
    versions: texts of versions.json. evaluations: contents of evaluations/*.json, oldest first. notes: parts
    that could not be read.
    """

    folder: Path
    curves: Curves
    state: str
    settings: Mapping[str, str]
    versions: Mapping[str, Any]
    evaluations: Sequence[Sequence[Result]]
    notes: Sequence[str]

    @property
    def name(self) -> str:
        """The run's name."""
        return self.folder.resolve().name

    @functools.cached_property
    def task(self) -> str:
        """The environments of its evaluation or, without one, of its training."""
        for kind in ("val", "collect"):
            if names := [n.split("/", 2)[2] for n in self.curves if n.startswith(f"{kind}/return/")]:
                return ", ".join(sorted(names))
        return "unknown task"

    def last(self, figure: str, default: float = float("nan")) -> float:
        """The last value of a metric."""
        points = self.curves.get(figure)
        return points[-1]["value"] if points else default

    def total(self, figure: str) -> float:
        """The sum of a metric over all records."""
        return sum(point["value"] for point in self.curves.get(figure, ()))

    def attempts(self) -> np.ndarray:
        """(k, 2): attempt, from 1, and its mean return in the last evaluation; k is 0 without attempts."""
        numbers = sorted(int(found[1]) for name in self.curves if (found := _ATTEMPT.fullmatch(name)))
        last = [(i + 1, self.last(f"val/return_attempt_{i}")) for i in numbers]
        return np.array(last, dtype=float).reshape(-1, 2)

    def ablation(self, env: str) -> dict[int | None, float]:
        """Mean return by context, from the newest evaluation in `env` that has several."""
        for results in reversed(self.evaluations):
            returns: dict[int | None, list[float]] = {}
            for one in results:
                if one.env == env:
                    returns.setdefault(one.context, []).extend(one.returns)
            if len(returns) > 1:
                return {context: float(np.mean(found)) for context, found in returns.items()}
        return {}


@dataclass(frozen=True)
class RunGroup:
    """Runs that are compared as repetitions. style: index of their colour and dash in all figures."""

    name: str
    runs: Sequence[Run]
    style: int = 0

    @property
    def task(self) -> str:
        """The task of its runs."""
        return self.runs[0].task

    def scores(self, metric: str) -> np.ndarray:
        """(n,): the last value of every run that has the metric."""
        return np.array([run.last(metric) for run in self.runs if metric in run.curves])

    def curves(self, metric: str, axis: str) -> list[np.ndarray]:
        """(n_i, 2) of every run that has the metric."""
        return [points_of(run.curves, metric, axis) for run in self.runs if metric in run.curves]


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], dict[str, str]]:
    """Return runs with metrics, and why others have none, by folder. A folder may hold many runs."""
    runs, without = [], {}
    seen: set[str] = set()
    for folder in (one for given in folders for one in _runs_in(given)):
        if (real := os.path.realpath(folder)) in seen:
            continue
        seen.add(real)
        try:
            found = _read_run(folder)
        except (OSError, ValueError) as error:
            found = str(error)
        if isinstance(found, Run):
            runs.append(found)
        else:
            without[str(folder)] = found
    return runs, without


def _runs_in(folder: Path) -> list[Path]:
    """The run in a folder, or those inside it."""
    try:
        inside = sorted(folder.glob("*/")) if folder.is_dir() else []
    except OSError:  # unreadable; _read_run reports it
        inside = []
    is_run = any(one.name in RUN_FOLDERS for one in inside)
    return [folder] if is_run else [one for one in inside if _is_run(one)] or [folder]


def _is_run(folder: Path) -> bool:
    return any(os.path.isdir(folder / name) for name in RUN_FOLDERS)  # noqa: PTH112 - False without permission


def _read_run(folder: Path) -> Run | str:
    """Return the run, or the reason why it cannot be shown.

    Raises: OSError or ValueError if its metrics cannot be read.
    """
    if not _is_run(folder):
        if folder.is_dir():
            return "holds no run"
        return "is a file, not the folder of a run" if folder.exists() else "does not exist"
    state = _state(folder)
    metrics = metrics_of(folder)
    check_inside(metrics, folder)
    curves = read_curves(metrics) if metrics.exists() else {}
    if not curves:
        return f"{state}; no figures in logs/metrics.jsonl"
    notes: list[str] = []
    settings = _tried(_settings, folder, folder / "ckpts" / "config.txt", notes) or {}
    versions, evaluations = read_versions(folder, notes), read_evaluations(folder, notes)
    return Run(folder, curves, state, settings, versions, evaluations, notes)


def _state(folder: Path) -> str:
    """Describe the state of the learner."""
    if (learner := newest_learner(read_heartbeats(folder))) is None:
        return "state unknown"
    state = {"alive": "still running", "dead": "killed"}.get(learner.life, learner.state)
    return f"{state}: {learner.note}" if learner.note else state


def _settings(text: str) -> dict[str, str]:
    found = {name: value for name, value in bindings_of(text).items() if not is_technical(name)}
    for name in fields_with("in_hash"):  # the fields of Experiment that do not affect the result
        found.pop(f"Experiment.{name}", None)
    return found


def read_versions(folder: Path, notes: list[str]) -> dict[str, Any]:
    """The origin of a run as texts: seed, config_hash, python; dicts of packages and hardware.

    The result is empty, with a line in `notes`, if they cannot be read.
    """
    return _tried(_versions, folder, folder / "ckpts" / "versions.json", notes) or {}


def _versions(text: str) -> dict[str, Any]:
    found = parse_json(text)
    plain = {name: str(found[name]) for name in ("seed", "config_hash", "python") if name in found}
    parts = {name: dict(found.get(name) or {}) for name in ("packages", "hardware")}
    shown = {
        name: {str(key): str(value) for key, value in part.items() if value not in (None, [])}
        for name, part in parts.items()
    }
    return {**plain, **shown}


# ---- evaluations ----


def read_evaluations(folder: Path, notes: list[str]) -> list[list[Result]]:
    """Results of every evaluation of a run, oldest first; `notes` gets a line for each unreadable one."""
    paths = sorted((folder / EVALUATIONS).glob("*.json"), key=_age)
    return [_tried(_results, folder, path, notes) or [] for path in paths]


def _age(path: Path) -> tuple[float, str]:
    try:
        return path.stat().st_mtime, path.name
    except OSError:  # such as a broken link
        return 0.0, path.name


def _results(text: str) -> list[Result]:
    """Parse results; raises ValueError, FormatError, LookupError, TypeError or AttributeError for others."""
    found = parse_json(text)
    if found.get("format") != EVALUATION_FORMAT:
        raise FormatError(f"its format is {found.get('format')!r} instead of {EVALUATION_FORMAT}")
    return [
        Result(
            env=_typed(found["env"], str),
            policy=_typed(found["policy"], str),
            epoch=_typed(found["epoch"], int),
            sampled=_typed(found["sampled"], bool),
            task=_typed(one["task"], str),
            context=_typed(one["context"], int | None),
            returns=_returns(one["returns"]),
        )
        for one in _typed(found["results"], list)
        if one["returns"]
    ]


def _typed(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise FormatError(f"it has {str(value)[:_SHOWN]!r} where {kind} is expected")
    return value


def _returns(values: Any) -> np.ndarray:
    if not all(map(is_number, _typed(values, list))):
        raise FormatError("its returns are not a list of finite numbers")
    return np.array(values, dtype=float)


def _tried(read: Callable[[str], Found], folder: Path, path: Path, notes: list[str]) -> Found | None:
    """The content of a file of the run in `folder`; None and a note if it is missing or broken."""
    try:
        return read(read_text(path, folder))
    except _BROKEN as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"is unreadable ({error})"
        notes.append(f"{path.parent.name}/{path.name} {reason}")
        if not isinstance(error, FileNotFoundError):
            logger.warning("%s %s and is skipped.", path, reason)
        return None


def grouped(runs: Sequence[Run], prefixes: Sequence[str]) -> list[RunGroup]:
    """Group runs by `prefixes` of their names; the others are grouped if they only differ in their seed.

    Raises: ValueError for a prefix of no run.
    """
    for prefix in prefixes:
        if not any(run.name.startswith(prefix) for run in runs):
            names = ", ".join(sorted({_stem(run.name) for run in runs}))
            raise ValueError(
                f"--group {prefix!r} is not the beginning of the name of any run. Fix: write the beginning "
                f"of one of {names}, or leave out --group to group runs by their settings."
            )
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        prefix = max((p for p in prefixes if run.name.startswith(p)), key=len, default="")
        identity = prefix or str(run.versions.get("config_hash", _stem(run.name)))
        found.setdefault((identity, run.task), []).append(run)
    groups: dict[str, RunGroup] = {}
    for (identity, _), members in found.items():
        name = base = identity if identity in prefixes else _common_name([run.name for run in members])
        for number in range(2, len(found) + 1):
            name = name if name not in groups else f"{base} ({number})"
        groups[name] = RunGroup(name, members)
    return list(groups.values())


def _common_name(names: Sequence[str]) -> str:
    stems = [_stem(name) for name in names]
    if len(set(stems)) == 1:
        return stems[0]
    return os.path.commonprefix(stems).rstrip("-_.") or names[0]  # noqa: RUF071 - names, not paths


def _stem(name: str) -> str:
    """A run's name without its seed."""
    return re.sub(r"[-_.]?(seed|s)[-_]?\d+$", "", name) or name
