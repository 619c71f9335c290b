"""Ablation of the changes to the published agent: each is left out, one at a time, on eight tasks.

    python benchmarks/ablation.py --jobs 2      # every run that is not stored yet
    python benchmarks/ablation.py --rows recommended n_step --tasks bandit --seeds 0
    python benchmarks/ablation.py --list        # rows, and the number of stored runs
    python benchmarks/ablation.py --report      # the table, in Markdown

Tasks, rows, budgets and targets are in `ablation_rows.py`. A run is one process of `examples/run.py` and
always uses its whole budget. When it ends, it is stored as one line of `benchmarks/results/ablation.jsonl`.
A stored run is not repeated, so the queue can be interrupted at any time. `cpu_s` is the CPU time of that
process.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import resource
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ablation_rows import ROWS, SEEDS, TASKS, AblationTask
from learning import run_once

RESULTS = Path(__file__).resolve().parent / "results" / "ablation.jsonl"
NICENESS = 19
NUM_RESAMPLES = 10_000
REFERENCE = "recommended"

Key = tuple[str, str, int]
"""Row, task and seed of a run."""


# ---- runs ----


def run(key: Key) -> dict[str, Any]:
    """Train one row on one task with one seed, and return the record that is stored."""
    row_name, task_name, seed = key
    row, task = ROWS[row_name], TASKS[task_name]
    assert row.settings is not None, "rows without settings are not queued"
    settings = (*task.settings, *row.settings)
    whole = replace(task.as_learned(), configs=("base_offpolicy", *row.configs), overrides=settings)
    before_s = _cpu_s_of_children()
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # for environments defined in this folder
    with tempfile.TemporaryDirectory() as folder:
        found = run_once(whole, seed, Path(folder), threads=1)
    return {
        "row": row_name,
        "task": task_name,
        "seed": seed,
        "reached": found["reached"] and found["reached"]["env_steps"],
        "curve": [(env_steps, figure) for env_steps, _, _, figure in found["curve"]],
        "updates": found["total"]["updates"],
        "cpu_s": round(_cpu_s_of_children() - before_s, 1),
        "wall_s": found["wall_s"],
        "commit": found["commit"],
        "configs": whole.configs,
        "settings": settings,
    }


def _cpu_s_of_children() -> float:
    """CPU time of all ended child processes. A worker runs one at a time, so differences are single runs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def store(record: dict[str, Any], path: Path) -> None:
    """Append one line; several queues may write to the same file."""
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def stored(path: Path) -> dict[Key, dict[str, Any]]:
    """Records by row, task and seed. A later line replaces an earlier one; an unfinished one is skipped."""
    found: dict[Key, dict[str, Any]] = {}
    if path.exists():
        text = path.read_text(encoding="utf-8")
        for line in text[: text.rfind("\n") + 1].splitlines():
            record = json.loads(line)
            found[record["row"], record["task"], record["seed"]] = record
    return found


def keys_of(rows: Iterable[str], tasks: Sequence[str], seeds: Sequence[int]) -> list[Key]:
    """Runs in the order of the queue: row by row, and within a row seed by seed over all of its tasks."""
    return [
        (row, task, seed)
        for row in rows
        if ROWS[row].settings is not None
        for seed in seeds
        for task in tasks
        if task not in ROWS[row].cannot_matter_on
    ]


def work(keys: Sequence[Key], jobs: int, path: Path) -> None:
    """Run and store; a run that fails is reported and left for the next call."""
    queue, running = iter(keys), dict[Future[dict[str, Any]], Key]()
    total_s = sum(record["cpu_s"] for record in stored(path).values())
    with ProcessPoolExecutor(jobs) as pool:
        while True:
            while len(running) < jobs and (key := next(queue, None)) is not None:
                if key not in stored(path):
                    running[pool.submit(run, key)] = key
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                key = running.pop(future)
                if (error := future.exception()) is not None:
                    print(f"{key} failed: {error}", file=sys.stderr, flush=True)
                    continue
                record = future.result()
                store(record, path)
                total_s += record["cpu_s"]
                print(
                    f"{' '.join(map(str, key))}: reached {record['reached']}, last {record['curve'][-1][1]}, "
                    f"{record['cpu_s']} CPU s; {total_s / 3600:.2f} CPU hours in all",
                    flush=True,
                )


# ---- statistics ----


class Interval(NamedTuple):
    """A mean, and the ends of its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """1 if the whole interval is above 0, -1 if it is below, 0 if it includes 0."""
        return (self.low > 0.0) - (self.high < 0.0)


def area(curve: Sequence[tuple[int, float]], task: AblationTask) -> float:
    """Area under a learning curve, per env step of the budget: 0 at chance throughout, 1 at the target.

    The curve is linear between evaluations and constant after the last one. Evaluations beyond the budget do
    not count.
    """
    env_steps, figures = (np.array(values, float) for values in zip(*curve, strict=True))
    grid = np.unique([*env_steps[env_steps < task.num_env_steps], 0, task.num_env_steps])
    mean = np.trapezoid(np.interp(grid, env_steps, figures), grid) / task.num_env_steps
    return float((mean - task.chance) / (task.target - task.chance))


def bootstrap(groups: Sequence[Sequence[float]]) -> Interval:
    """Mean over groups of the means of their values, resampled within each group (percentile bootstrap)."""
    rng = np.random.default_rng(0)
    means = [
        values[rng.integers(len(values), size=(NUM_RESAMPLES, len(values)))].mean(1)
        for values in (np.array(group, float) for group in groups)
    ]
    low, high = np.quantile(np.mean(means, axis=0), (0.025, 0.975))
    return Interval(statistics.fmean(map(statistics.fmean, groups)), float(low), float(high))


def verdict(by_task: Sequence[Interval], overall: Interval) -> str:
    """Effect of the change that a row leaves out, from the row's differences to the recommended agent."""
    signs = {overall.sign} - {0} or {interval.sign for interval in by_task} - {0}
    if signs == {1, -1}:
        return "mixed"
    return "no effect" if not signs else "harms" if 1 in signs else "helps"


# ---- report ----


def report(found: dict[Key, dict[str, Any]], seeds: Sequence[int] = SEEDS) -> str:
    """Markdown: the recommended agent on each task, then the difference of each row to it."""
    lines = ["| task | kind | area | env steps to target | reached |", "| --- | --- | --- | --- | --- |"]
    lines += [_task_line(found, name, seeds) for name in TASKS]
    rows = [name for name, row in ROWS.items() if row.settings is not None and name != REFERENCE]
    lines += ["", *_row_lines(found, rows, seeds)]
    cpu_h = sum(record["cpu_s"] for record in found.values()) / 3600
    return "\n".join([*lines, "", f"{len(found)} runs, {cpu_h:.1f} CPU hours."])


def report_removed(found: dict[Key, dict[str, Any]], seeds: Sequence[int] = SEEDS) -> str:
    """Markdown: the same table for changes that no longer exist."""
    return "\n".join(_row_lines(found, [name for name, row in ROWS.items() if row.settings is None], seeds))


def _row_lines(found: dict[Key, dict[str, Any]], rows: Sequence[str], seeds: Sequence[int]) -> list[str]:
    begun = [name for name in rows if any(key[0] == name for key in found)]
    names = ("left out", "instead", "all tasks", "tasks with a difference", "the change")
    head = [f"| {' | '.join(names)} |", "| --- | --- | --- | --- | --- |"]
    return head + [_row_line(found, name, seeds) for name in begun]


def _task_line(found: dict[Key, dict[str, Any]], name: str, seeds: Sequence[int]) -> str:
    task = TASKS[name]
    records = [found[REFERENCE, name, seed] for seed in seeds if (REFERENCE, name, seed) in found]
    if not records:
        return f"| {name} | {task.kind} | not run | | |"
    areas, median = [area(record["curve"], task) for record in records], median_to_target(records)
    steps = f"{median:,.0f}" if math.isfinite(median) else "not reached"
    num_reached = sum(record["reached"] is not None for record in records)
    cells = (name, task.kind, f"{statistics.fmean(areas):.2f}", steps, f"{num_reached} of {len(records)}")
    return f"| {' | '.join(cells)} |"


def _row_line(found: dict[Key, dict[str, Any]], row: str, seeds: Sequence[int]) -> str:
    by_task: dict[str, list[float]] = {}
    for name, task in TASKS.items():
        keys = [(row, name, seed) for seed in seeds if (row, name, seed) in found]
        by_task[name] = [
            area(found[key]["curve"], task) - area(found[REFERENCE, name, key[2]]["curve"], task)
            for key in keys
            if (REFERENCE, name, key[2]) in found
        ]
    by_task = {name: differences for name, differences in by_task.items() if len(differences) > 1}
    if not by_task:
        return f"| {ROWS[row].leaves_out} | {ROWS[row].instead} | not enough runs | | |"
    intervals = {name: bootstrap([differences]) for name, differences in by_task.items()}
    overall = bootstrap(list(by_task.values()))
    cells = [f"{name} {interval.mean:+.2f}" for name, interval in intervals.items() if interval.sign]
    num_runs = sum(map(len, by_task.values()))
    return (
        f"| {ROWS[row].leaves_out} | {ROWS[row].instead} | {_text(overall)}, {num_runs} runs "
        f"| {', '.join(cells) or 'none'} | {verdict(list(intervals.values()), overall)} |"
    )


def _text(interval: Interval) -> str:
    mark = "**" if interval.sign else ""
    return f"{mark}{interval.mean:+.2f}{mark} [{interval.low:+.2f}, {interval.high:+.2f}]"


def median_to_target(records: Sequence[dict[str, Any]]) -> float:
    """Median env steps to the target, infinite if most runs have not reached it."""
    return statistics.median(math.inf if one["reached"] is None else one["reached"] for one in records)


def main() -> None:
    """Run the missing runs, or report the stored ones."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="TASK")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each with one torch thread")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument(
        "--report", action="store_true", help="print the table of stored runs without running anything"
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="print the rows and the number of stored runs without running anything",
    )
    args = parser.parse_args()
    if args.report:
        found = stored(args.output)
        print(report(found, args.seeds), "Removed:", report_removed(found, args.seeds), sep="\n\n")
    elif args.list:
        found = stored(args.output)
        for name, row in ROWS.items():
            keys = keys_of([name], args.tasks, args.seeds)
            state = f"{sum(key in found for key in keys)} of {len(keys)}" if keys else "cannot be run"
            print(f"{name:28} {state:16} {row.leaves_out}; {row.instead}")
    else:
        os.nice(NICENESS - os.nice(0))
        work(keys_of(args.rows, args.tasks, args.seeds), args.jobs, args.output)


if __name__ == "__main__":
    main()
