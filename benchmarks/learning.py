"""Do the presets learn what they claim? Runs each over seeds as a user would, and prints JSON.

    python benchmarks/learning.py                       # all tasks, seeds 0 1 2
    python benchmarks/learning.py tmaze cartpole --seeds 0

Every run is a process of its own: examples/run.py with the preset. Seconds are those spent collecting,
learning and evaluating, from the run's own metrics; `wall_s` is the whole process, imports included. A run
over all tasks and seeds also writes benchmarks/results/learning.json.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
TIME_KEYS = ("time/collect_s", "time/learn_s", "time/val_s")


@dataclass(frozen=True)
class Task:
    """A preset and what it promises.

    metric: figure of the greedy evaluation. target: what its last value must reach (a control: not reach).
    max_env_steps, max_seconds: budget until then; None where there is none.
    """

    configs: tuple[str, ...]
    metric: str
    target: float
    max_env_steps: int | None
    max_seconds: float | None
    is_control: bool = False
    overrides: tuple[str, ...] = ()


TASKS = {
    "tmaze": Task(("tmaze",), "val/success", 1.0, None, 180.0),
    "tmaze_without_memory": Task(
        ("tmaze", "encoders/ff_small"), "val/success", 0.65, None, None, is_control=True
    ),
    "cartpole": Task(("cartpole",), "val/return", 475.0, 150_000, 300.0),
    "popgym_repeat_gru": Task(("popgym_repeat",), "val/return", 0.95, 25_000, 90.0),
    "popgym_repeat_transformer": Task(
        ("popgym_repeat", "encoders/transformer_small"), "val/return", 0.95, None, 150.0
    ),
    "pendulum": Task(("pendulum",), "val/return", -250.0, 100_000, None),
    "ppo_cartpole": Task(("ppo/cartpole",), "val/return", 475.0, 100_000, None),
    "ppo_pendulum": Task(("ppo/pendulum",), "val/return", -250.0, 200_000, None),
    "ppo_acrobot": Task(("ppo/acrobot",), "val/return", -100.0, 500_000, None),
    "ppo_cartpole_no_velocity": Task(("ppo/cartpole_no_velocity",), "val/return", 450.0, 200_000, None),
    "ppo_cartpole_no_velocity_without_memory": Task(
        ("ppo/cartpole_no_velocity", "encoders/identity"), "val/return", 200.0, None, None, is_control=True
    ),
    "ppo_repeat_gru": Task(("ppo/repeat_previous",), "val/return", 0.9, 2_000_000, None),
    "ppo_repeat_transformer": Task(
        ("ppo/repeat_previous", "encoders/transformer_small"), "val/return", 0.9, 2_000_000, None
    ),
    "ppo_repeat_without_memory": Task(
        ("ppo/repeat_previous", "encoders/identity"),
        "val/return",
        -0.4,
        None,
        None,
        is_control=True,
        # Its own previous action would be a memory of a kind: with it the return is about -0.3.
        overrides=("Experiment.epochs=300", "FFTstepEncoder.hide_rl2s=True"),
    ),
}


def run_once(task: Task, seed: int, folder: Path, threads: int) -> dict[str, Any]:
    """Train one preset with one seed; returns the figures of the run."""
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
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "WANDB_MODE": "disabled"}
    )
    wall_s = time.perf_counter() - start_s
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} failed:\n{done.stderr[-3000:]}\nFix: run that command by hand."
        )
    records = [json.loads(line) for line in (folder / f"seed{seed}" / "logs" / "metrics.jsonl").open()]
    return {"seed": seed, **summarize(task, records), "wall_s": round(wall_s, 1)}


def summarize(task: Task, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Final figure, and when the target was first reached in an evaluation."""
    seconds, reached, final, last = 0.0, None, float("nan"), records[-1]
    for record in records:
        seconds += sum(record.get(key) or 0.0 for key in TIME_KEYS)
        if task.metric not in record:
            continue
        final, last = record[task.metric], record
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
            "env_steps": last["env_steps"],
            "updates": last["gradient_steps"],
        },
        "passed": final < task.target if task.is_control else within and final >= task.target,
    }


def median_of(runs: list[dict[str, Any]], key: str) -> float | None:
    """Median over the runs that reached the target; None if any did not."""
    values = [run["reached"][key] for run in runs if run["reached"]]
    return statistics.median(values) if len(values) == len(runs) else None


def main() -> None:
    """Run the chosen tasks and print one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "tasks", nargs="*", choices=[[], *TASKS], help=f"of {', '.join(TASKS)}; all when left out"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=2, help="torch threads of each run")
    args = parser.parse_args()
    names = args.tasks or list(TASKS)
    results: dict[str, Any] = {"provenance": provenance(), "threads": args.threads, "tasks": {}}
    for name in names:
        task, runs = TASKS[name], []
        for seed in args.seeds:
            with tempfile.TemporaryDirectory() as folder:
                runs.append(run_once(task, seed, Path(folder), args.threads))
            print(f"{name} {json.dumps(runs[-1])}", file=sys.stderr, flush=True)
        medians = {key: median_of(runs, key) for key in ("seconds", "env_steps", "updates")}
        results["tasks"][name] = {"task": asdict(task), "median_to_target": medians, "runs": runs}
    text = json.dumps(results, indent=1)
    print(text)
    if len(names) == len(TASKS) and args.seeds == [0, 1, 2]:
        results_dir = ROOT / "benchmarks" / "results"
        results_dir.mkdir(exist_ok=True)
        (results_dir / "learning.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
