"""Measure random play in the tasks of a suite, for the reference values of `loxodon benchmark`.

python benchmarks/random_play.py --suite popgym
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import gin
import numpy as np

import loxodon.experiment  # noqa: F401  # registers the names in presets
from loxodon.envs import resolve_env
from loxodon.experiment.config import load_config
from loxodon.tools.benchmark.results import REFERENCES
from loxodon.tools.benchmark.suites import SUITES, Task


@gin.configurable(module="benchmarks.random_play")
def env_holder(make_env: Any = gin.REQUIRED) -> Any:
    """Receive a reference as Experiment does."""
    return make_env


def play(task: Task, configs: tuple[str, ...], episodes: int) -> dict[str, Any]:
    """Mean of a task's metric over episodes of uniformly random actions; the seed is 0."""
    load_config([*configs, *task.configs], [*task.settings, "Experiment.run_name='random'"])
    gin.bind_parameter("env_holder.make_env", gin.query_parameter("Experiment.make_val_env"))
    env = resolve_env(env_holder()).build_raw()
    env.action_space.seed(0)
    values = []
    for episode in range(episodes):
        env.reset(seed=0 if episode == 0 else None)
        metrics: dict[str, float] = {}
        total, is_over = 0.0, False
        while not is_over:
            _, reward, terminated, truncated, info = env.step(env.action_space.sample())
            total, is_over = total + float(reward), terminated or truncated
            metrics |= info
        values.append(metrics.get(f"metric/{task.metric.removeprefix('val/')}", total))
    error = float(np.std(values, ddof=1)) / episodes**0.5
    return {
        "value": round(float(np.mean(values)), 4),
        "standard_error": round(error, 4),
        "episodes": episodes,
    }


def main() -> None:
    """Measure every task of a suite; the file is written after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", help="tasks of the suite; all if left out")
    parser.add_argument("--suite", choices=list(SUITES), required=True)
    parser.add_argument("--episodes", type=int, default=200)
    args = parser.parse_args()
    suite = SUITES[args.suite]
    for name in args.tasks or suite.tasks:
        values = json.loads(REFERENCES.read_text(encoding="utf-8"))
        found = {**play(suite.tasks[name], suite.configs, args.episodes), "source": "random_play"}
        values["tasks"].setdefault(name, {})["random"] = found
        REFERENCES.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        print(name, found, flush=True)


if __name__ == "__main__":
    main()
