"""Recurrent PPO of sb3-contrib on the walkers of the suite `control`, stored next to the runs of Loxodon.

    python benchmarks/peers_control.py Hopper-positions --seeds 0 1 2
    loxodon benchmark control Hopper-positions -o benchmarks/results    # Loxodon's runs, and a page with both

The peer has the settings that RL Zoo publishes for recurrent PPO on the PyBullet walkers, and the budget of
the suite. It evaluates greedily over 20 episodes. It is installed into a virtual environment of its own
(--venv), as by peers_ppo.py. Finished runs are kept.
"""

from __future__ import annotations

import argparse
import ast
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peers.common import Settings
from peers_ppo import ROOT, install_peers, run_process
from provenance import git_commit

from loxodon.experiment.process.versions import hardware
from loxodon.tools.benchmark.results import Run, path_of, store
from loxodon.tools.benchmark.suites import SUITES

SUITE, NAME = "control", "sb3_recurrent_ppo"
RESULTS = ROOT / "benchmarks" / "results" / SUITE
REQUIREMENTS = ("torch==2.13.0", "sb3-contrib", "gymnasium[mujoco]")


def peer_settings(task: str, seed: int) -> Settings:
    """Settings of the peer's run on a task of the suite, with the same observations."""
    given = dict(text.split("=", 1) for text in SUITES[SUITE].tasks[task].settings)
    num_envs, rollout = 16, 256
    return Settings(
        ast.literal_eval(given["partial_env.env_id"]),
        updates=-(-SUITES[SUITE].tasks[task].num_env_steps // (num_envs * rollout)),
        evaluate_every=7,
        obs_indices=ast.literal_eval(given["partial_env.keep"]),
        seed=seed,
        threads=1,
        num_envs=num_envs,
        rollout=rollout,
        epochs=10,
        minibatches=32,
        learning_rate=3e-4,
        lam=0.9,
        hidden=(),
        lstm=128,
        lstm_critic="own",
        normalize=True,
    )


def train(task: str, seed: int, python: Path, run: Callable[[list[str], Path], str] = run_process) -> Run:
    """Train the peer."""
    settings = peer_settings(task, seed)
    command = [str(python), "-m", "peers.sb3_recurrent_ppo", json.dumps(asdict(settings))]
    lines = run(command, ROOT / "benchmarks").splitlines()
    about, *points = [json.loads(line) for line in lines if line.startswith("{")]
    rollouts = [point["env_steps"] / settings.env_steps_per_update for point in points]
    updates = [number * settings.epochs * settings.minibatches for number in rollouts]
    curve = [[p["env_steps"], n, p["seconds"], p["return"]] for p, n in zip(points, updates, strict=True)]
    versions = {"sb3-contrib": about["version"], "torch": about["torch"], "commit": git_commit()}
    words = [f"{name}={value!r}" for name, value in asdict(settings).items() if name != "seed"]
    return Run(SUITE, task, NAME, seed, curve, [], words, versions=versions, machine=hardware())


def main() -> None:
    """Train on the chosen tasks, seed by seed, and print each run that is stored."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="+", choices=list(SUITES[SUITE].tasks))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--venv", type=Path, default=Path(tempfile.gettempdir()) / "loxodon-peers-control")
    parser.add_argument("--pip-args", default="", help="pip options, such as an index")
    args: Any = parser.parse_args()
    python = install_peers(args.venv, args.pip_args.split(), run_process, REQUIREMENTS)
    for seed in args.seeds:
        for task in args.tasks:
            if not path_of(RESULTS, NAME, task, seed).exists():
                run = train(task, seed, python)
                store(run, RESULTS)
                print(json.dumps({"task": task, "seed": seed, "score": run.score}), flush=True)


if __name__ == "__main__":
    main()
