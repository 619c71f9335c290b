"""Learning runs of presets over seeds, started as a user would start them. Prints JSON.

    python benchmarks/learning.py                                   # all presets, seeds 0 1 2
    python benchmarks/learning.py tmaze cartpole --seeds 0
    python benchmarks/learning.py --suite encoders --jobs 2         # every trajectory encoder on two tasks

Every run is a separate process: examples/run.py with the preset. Seconds are the times of collecting,
learning and evaluating in the run's own metrics; `wall_s` is the whole process, including imports. Each run
is written to the output at once, and a later call does not repeat it (except with --again), so a long suite
can be interrupted. A run that exceeds the seconds of its task is ended.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from threading import Lock
from typing import Any

from learning_tasks import SUITES, Task
from provenance import git_commit, provenance

ROOT = Path(__file__).resolve().parents[1]
STARTING_S = 60.0  # imports, and a margin for evaluations that have begun in time
POLL_S = 5.0  # interval between checks of a run that ends at its target
TIME_KEYS = ("time/collect_s", "time/learn_s", "time/val_s")


def run_once(task: Task, seed: int, folder: Path, threads: int, until_target: bool = False) -> dict[str, Any]:
    """Train one preset with one seed, optionally only until an evaluation is at the target."""
    command = [
        sys.executable,
        str(ROOT / "examples" / "run.py"),
        "--seed",
        str(seed),
        "--run-name",
        f"seed{seed}",
    ]
    for config in task.configs:
        command += ["--config", config]
    command += [
        f"Experiment.ckpt_base_dir='{folder}'",
        f"Experiment.torch_threads={threads}",
        *task.overrides,
    ]
    start_s = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "WANDB_MODE": "disabled"},
    )
    was_ended = False
    metrics = folder / f"seed{seed}" / "logs" / "metrics.jsonl"
    try:
        while True:
            try:
                _, errors = process.communicate(timeout=POLL_S)
                break
            except subprocess.TimeoutExpired:
                seconds = time.perf_counter() - start_s
                is_late = task.max_seconds is not None and seconds > STARTING_S + task.max_seconds
                is_there = until_target and metrics.exists() and summarize(task, metrics)["reached"]
                if not was_ended and (is_late or is_there):
                    process.terminate()
                    was_ended = True
    finally:
        process.kill()
    wall_s = time.perf_counter() - start_s
    if process.returncode and not was_ended:
        raise RuntimeError(f"{' '.join(command)} failed:\n{errors[-3000:]}\nFix: run that command by hand.")
    return {"seed": seed, **summarize(task, metrics), "wall_s": round(wall_s, 1), "commit": git_commit()}


def summarize(task: Task, metrics: Path) -> dict[str, Any]:
    """Final result, and the first evaluation that reached the target; only whole lines of the file count."""
    text = metrics.read_text(encoding="utf-8")
    records = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    seconds, reached, final, last = 0.0, None, float("nan"), records[-1] if records else {}
    curve: list[tuple[int, int, float, float]] = []
    for record in records:
        seconds += sum(record.get(key) or 0.0 for key in TIME_KEYS)
        if task.metric not in record:
            continue
        final, last = record[task.metric], record
        point = record["env_steps"], record["gradient_steps"], round(seconds, 1), round(final, 4)
        curve.append(point)
        if reached is None and final >= task.target and not task.is_control:
            reached = {
                "seconds": round(seconds, 1),
                "env_steps": record["env_steps"],
                "updates": record["gradient_steps"],
            }
    within = reached is not None and all(
        limit is None or value <= limit
        for limit, value in (
            (task.max_seconds, reached["seconds"]),
            (task.max_env_steps, reached["env_steps"]),
        )
    )
    return {
        "final": round(final, 4),
        "episodes": last.get("val/episodes"),
        "reached": reached,
        "total": {
            "seconds": round(seconds, 1),
            "env_steps": last.get("env_steps"),
            "updates": last.get("gradient_steps"),
        },
        "passed": final < task.target if task.is_control else within and final >= task.target,
        "curve": curve,  # env steps, updates, seconds, result
    }


def median_of(runs: list[dict[str, Any]], key: str) -> float | None:
    """Median over the runs that reached the target; None if any did not."""
    values = [run["reached"][key] for run in runs if run["reached"]]
    return statistics.median(values) if len(values) == len(runs) else None


class Results:
    """Results of a suite in a file, which is valid after each run."""

    def __init__(self, output: Path, tasks: dict[str, Task], threads: int) -> None:
        self._output, self._lock = output, Lock()
        self.found: dict[str, Any] = {"provenance": provenance(), "threads": threads, "tasks": {}}
        if output.exists():
            self.found["tasks"] = json.loads(output.read_text(encoding="utf-8"))["tasks"]
        for name, task in tasks.items():
            known = self.found["tasks"].get(name)
            if known is None or known["task"] != json.loads(json.dumps(asdict(task))):
                self.found["tasks"][name] = {"task": asdict(task), "median_to_target": {}, "runs": []}

    def has(self, name: str, seed: int) -> bool:
        """True if this run is already stored."""
        return any(run["seed"] == seed for run in self.found["tasks"][name]["runs"])

    def add(self, name: str, run: dict[str, Any]) -> None:
        """Store a run."""
        with self._lock:
            entry = self.found["tasks"][name]
            others = [one for one in entry["runs"] if one["seed"] != run["seed"]]
            entry["runs"] = sorted([*others, run], key=lambda one: int(one["seed"]))
            keys = ("seconds", "env_steps", "updates")
            entry["median_to_target"] = {key: median_of(entry["runs"], key) for key in keys}
            self._output.parent.mkdir(exist_ok=True)
            self._output.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Run the chosen tasks and print one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", help="tasks of the suite (default: all)")
    parser.add_argument("--suite", choices=list(SUITES), default="presets")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--set", nargs="+", default=[], help="gin settings that override those of every task")
    parser.add_argument("--again", action="store_true", help="repeat runs that the output already holds")
    parser.add_argument(
        "--until-target",
        action="store_true",
        help="end a run at the first evaluation that reaches the target",
    )
    parser.add_argument(
        "--output", type=Path, help="file for the results (default: benchmarks/results/learning_SUITE.json)"
    )
    args = parser.parse_args()
    suite = SUITES[args.suite]
    if unknown := set(args.tasks) - set(suite):
        parser.error(f"not tasks of {args.suite}: {', '.join(unknown)}; allowed are: {', '.join(suite)}")
    tasks = {name: suite[name] for name in args.tasks or suite}
    output = args.output or ROOT / "benchmarks" / "results" / f"learning_{args.suite}.json"
    tasks = {name: replace(task, overrides=(*task.overrides, *args.set)) for name, task in tasks.items()}
    results = Results(output, tasks, args.threads)

    def run(name: str, seed: int) -> None:
        if results.has(name, seed) and not args.again:
            return
        with tempfile.TemporaryDirectory() as folder:
            found = run_once(tasks[name], seed, Path(folder), args.threads, args.until_target)
        print(f"{name} {json.dumps(found)}", file=sys.stderr, flush=True)
        results.add(name, found)

    with ThreadPoolExecutor(args.jobs) as pool:
        for done in [pool.submit(run, name, seed) for seed in args.seeds for name in tasks]:
            done.result()
    print(json.dumps(results.found, indent=1))


if __name__ == "__main__":
    main()
