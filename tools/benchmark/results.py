"""Runs of `loxodon benchmark` as files, their scores, and the reference values that scores are compared with.

Axis: n runs of a task with different seeds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ...experiment.process.files import write_text
from .suites import Task

REFERENCES = Path(__file__).with_name("references.json")
LAST_SHARE = 0.2
"""The score of a run is the mean of the evaluations in this share of its env steps, at its end."""
ENV_STEPS, UPDATES, SECONDS, VALUE = range(4)


@dataclass(frozen=True)
class Run:
    """A finished run of an agent on a task; one JSON file.

    curve: evaluations [env steps, updates, seconds, value], in order. configs and settings: those of
    the agent and of the task. stopped_at: the target at which an older run ended before its budget; None in
    new runs, which use all of it. versions: packages and the commit. machine: see `hardware`. digests: of
    the contents of gin files among the configs, by name.
    """

    suite: str
    task: str
    name: str
    seed: int
    curve: list[list[float]]
    configs: list[str]
    settings: list[str]
    stopped_at: float | None = None
    versions: dict[str, str | None] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def values(self) -> np.ndarray:
        """(number of evaluations, 4) the curve."""
        return np.array(self.curve, dtype=float).reshape(-1, 4)

    @property
    def score(self) -> float:
        """Mean of the evaluations at the end; the last one if the run ended at its target."""
        values = self.values
        if self.stopped_at is not None:
            return float(values[-1, VALUE])
        is_late = values[:, ENV_STEPS] >= (1 - LAST_SHARE) * values[-1, ENV_STEPS]
        return float(values[is_late, VALUE].mean())

    def retention(self, random: float) -> float | None:
        """Score divided by the best evaluation, both as gains over random play; None without a gain."""
        best = float(self.values[:, VALUE].max())
        return (self.score - random) / (best - random) if best > random else None

    def arrival(self, target: float) -> np.ndarray | None:
        """The first point (4,) of the curve at the target or above; None if there is none."""
        values = self.values
        reached = values[values[:, VALUE] >= target]
        return reached[0] if len(reached) else None

    def tried(self, target: float) -> bool:
        """Whether the run would have gone on until the target: it did not stop at a lower one."""
        return self.stopped_at is None or self.stopped_at >= target


def path_of(folder: Path, name: str, task: str, seed: int) -> Path:
    """File of a run below the folder of a suite."""
    return folder / name / f"{task}-seed{seed}.json"


def store(run: Run, folder: Path) -> None:
    """Write the file of a run."""
    points = ",\n".join(f"  {json.dumps(point)}" for point in run.curve)
    text = json.dumps({**asdict(run), "curve": None}, indent=1).replace(
        '"curve": null', f'"curve": [\n{points}\n ]'
    )
    path = path_of(folder, run.name, run.task, run.seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text + "\n")


def read_run(path: Path) -> Run:
    """Read the file of a run. Raises: ValueError if it is not one."""
    fix = "Fix: delete it and run the command again, or restore it."
    try:
        run = Run(**json.loads(path.read_text(encoding="utf-8")))
        is_whole = len(run.values) > 0 and bool(np.isfinite(run.values).all())
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a result of loxodon benchmark ({error}). {fix}") from error
    if not is_whole:
        raise ValueError(f"{path} has a curve without points, or with points that are not finite. {fix}")
    return run


def read_runs(folder: Path) -> dict[str, dict[str, list[Run]]]:
    """Runs of a suite in the order of their seeds, by name of the agent and by task."""
    found: dict[str, dict[str, list[Run]]] = {}
    for path in sorted(folder.glob("*/*.json")):
        run = read_run(path)
        found.setdefault(run.name, {}).setdefault(run.task, []).append(run)
    return {
        name: {task: sorted(runs, key=lambda run: run.seed) for task, runs in tasks.items()}
        for name, tasks in found.items()
    }


# ---- reference values ----


@cache
def references() -> dict[str, Any]:
    """Random play, optimum or scripted player, and the best published value of tasks, with their sources."""
    found: dict[str, Any] = json.loads(REFERENCES.read_text(encoding="utf-8"))
    return found


def reference(task: str, kind: str) -> float | None:
    """The value for a task: "random", "optimum" or "published"; None if there is none."""
    entry = references()["tasks"].get(task, {}).get(kind)
    return None if entry is None else float(entry["value"])


def target_of(name: str, task: Task) -> float | None:
    """The target of a task, or else its published value."""
    return reference(name, "published") if task.target is None else task.target


def normalized(name: str, score: float) -> float | None:
    """A score on the scale on which random play has 0 and the reference player 1.

    The reference is the optimum or the best scripted player, or else the published value; None without it.
    """
    random = reference(name, "random")
    best = reference(name, "optimum")
    best = reference(name, "published") if best is None else best
    if random is None or best is None:
        return None
    return (score - random) / (best - random)


def scores(runs: Sequence[Run]) -> np.ndarray:
    """(n,) scores of the runs."""
    return np.array([run.score for run in runs])
