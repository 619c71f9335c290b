"""What a report knows of runs: read from their folders, without running anything of theirs, and grouped."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..checkpoint.record import bindings_of
from ..config.hash import is_setting
from ..fleet.heartbeat import newest_learner, read_heartbeats
from ..plots import Curves, points_of, read_curves

_FOLDERS = ("ckpts", "logs", "status")
_ATTEMPT = re.compile(r"val/return_attempt_(\d+)")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Result:
    """Episodes of an evaluation. context: timesteps that the policy could look back on, None for all."""

    env: str
    policy: str
    task: str
    context: int | None
    returns: np.ndarray


@dataclass(frozen=True)
class Run:
    """One run.

    curves: see read_curves. state: of its learner, in words. settings: hyper-parameters, as written in gin.
    versions: versions.json. evaluations: of evaluations/*.json, oldest first. notes: what could not be read.
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
        """Environments it was evaluated in, or else trained in."""
        for kind in ("val", "collect"):
            if names := [n.split("/", 2)[2] for n in self.curves if n.startswith(f"{kind}/return/")]:
                return ", ".join(sorted(names))
        return "unknown task"

    def last(self, figure: str, default: float = float("nan")) -> float:
        """The last value of a figure."""
        points = self.curves.get(figure)
        return points[-1]["value"] if points else default

    def total(self, figure: str) -> float:
        """The sum of a figure over all records."""
        return sum(point["value"] for point in self.curves.get(figure, ()))

    def attempts(self) -> np.ndarray:
        """(k, 2): attempt, from 1, and its mean return in the last evaluation; k is 0 without attempts."""
        numbers = sorted(int(found[1]) for name in self.curves if (found := _ATTEMPT.fullmatch(name)))
        last = [(i + 1, self.last(f"val/return_attempt_{i}")) for i in numbers]
        return np.array(last, dtype=float).reshape(-1, 2)

    def ablation(self, env: str) -> dict[int | None, float]:
        """Mean return by context of the newest evaluation in `env` that has several."""
        for results in reversed(self.evaluations):
            returns: dict[int | None, list[float]] = {}
            for one in results:
                if one.env == env:
                    returns.setdefault(one.context, []).extend(one.returns)
            if len(returns) > 1:
                return {context: float(np.mean(found)) for context, found in returns.items()}
        return {}


@dataclass(frozen=True)
class Group:
    """Runs that repeat one another. style: number of its colour and dash in every figure."""

    name: str
    runs: Sequence[Run]
    style: int = 0

    @property
    def task(self) -> str:
        """That of its runs."""
        return self.runs[0].task

    def scores(self, metric: str) -> np.ndarray:
        """(n,): the last value of every run that has the metric."""
        return np.array([run.last(metric) for run in self.runs if metric in run.curves])

    def curves(self, metric: str, axis: str) -> list[np.ndarray]:
        """(n_i, 2) of every run that has the metric."""
        return [points_of(run.curves, metric, axis) for run in self.runs if metric in run.curves]


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], dict[str, str]]:
    """Runs that have figures, and why others have not, by folder. A folder of runs stands for these."""
    runs, without = [], {}
    for folder in {one.resolve(): one for given in folders for one in _runs_in(given)}.values():
        try:
            found = _read_run(folder)
        except OSError as error:
            found = str(error)
        if isinstance(found, Run):
            runs.append(found)
        else:
            without[str(folder)] = found
    return runs, without


def _runs_in(folder: Path) -> Iterator[Path]:
    """The run of a folder, or those inside."""
    inside = sorted(folder.glob("*/")) if folder.is_dir() else []
    found = [one for one in inside if any((one / name).is_dir() for name in _FOLDERS)]
    is_run = any(one.name in _FOLDERS for one in inside)
    yield from [folder] if is_run or not found else found


def _read_run(folder: Path) -> Run | str:
    """The run, or why there is nothing to show."""
    if not any((folder / name).is_dir() for name in _FOLDERS):
        return "holds no run" if folder.is_dir() else "does not exist"
    state = _state(folder)
    metrics = folder / "logs" / "metrics.jsonl"
    curves = read_curves(metrics) if metrics.is_file() else {}
    if not curves:
        return f"{state}; no figures in logs/metrics.jsonl"
    notes: list[str] = []
    config = _tried(lambda path: path.read_text(encoding="utf-8"), folder / "ckpts" / "config.txt", notes)
    settings = {name: value for name, value in bindings_of(config or "").items() if not is_setting(name)}
    versions = _tried(_versions, folder / "ckpts" / "versions.json", notes) or {}
    paths = sorted((folder / "evaluations").glob("*.json"), key=lambda path: path.stat().st_mtime)
    evaluations = [_tried(_results, path, notes) or [] for path in paths]
    return Run(folder, curves, state, settings, versions, evaluations, notes)


def _state(folder: Path) -> str:
    """What became of the learner."""
    if (learner := newest_learner(read_heartbeats(folder))) is None:
        return "state unknown"
    state = {"alive": "still running", "dead": "killed"}.get(learner.life, learner.state)
    return f"{state}: {learner.note}" if learner.note else state


def _versions(path: Path) -> dict[str, Any]:
    """Raises: as _results."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return {**found, "packages": dict(found["packages"]), "hardware": dict(found.get("hardware", {}))}


def _results(path: Path) -> list[Result]:
    """Raises: OSError, or ValueError, KeyError, TypeError or AttributeError for something else."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return [
        Result(
            found["env"],
            f"{found['policy']}{', sampled' if found['sampled'] else ''}",
            str(one["task"]),
            None if one["context"] is None else int(one["context"]),
            np.array(one["returns"], dtype=float).reshape(-1),
        )
        for one in found["results"]
        if one["returns"]
    ]


def _tried(read: Callable[[Path], Found], path: Path, notes: list[str]) -> Found | None:
    """What a file holds; None and a note if it is missing or broken."""
    try:
        return read(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"is unreadable ({error})"
        notes.append(f"{path.parent.name}/{path.name} {reason}")
        return None


def grouped(runs: Sequence[Run], prefixes: Sequence[str]) -> list[Group]:
    """Groups: runs whose names begin alike, by `prefixes`; of the others those that differ in their seed."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        prefix = max((p for p in prefixes if run.name.startswith(p)), key=len, default="")
        identity = prefix or str(run.versions.get("config_hash", _stem(run.name)))
        found.setdefault((identity, run.task), []).append(run)
    groups: dict[str, Group] = {}
    for (identity, _), members in found.items():
        name = base = identity if identity in prefixes else _common_name([run.name for run in members])
        for number in range(2, len(found) + 1):
            name = name if name not in groups else f"{base} ({number})"
        groups[name] = Group(name, members)
    return list(groups.values())


def _common_name(names: Sequence[str]) -> str:
    stems = [_stem(name) for name in names]
    if len(set(stems)) == 1:
        return stems[0]
    return os.path.commonprefix(stems).rstrip("-_.") or names[0]  # noqa: RUF071 - names, not paths


def _stem(name: str) -> str:
    """A run's name without its seed."""
    return re.sub(r"[-_.]?(seed|s)[-_]?\d+$", "", name) or name
