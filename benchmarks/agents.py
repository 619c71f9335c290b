"""Studies of the agents: runs the tasks of agent_tasks.py over seeds, and prints JSON.

    python benchmarks/agents.py                                  # all studies, seeds 0 1
    python benchmarks/agents.py credit/lambda offline --seeds 0

recurrent: DQN and SAC with a GRU on tasks with hidden velocities or hidden history. peers: RecurrentPPO of
sb3-contrib on such tasks, in a separate virtual environment (--venv). offline: learning from trajectories of
a Loxodon run, and from a Minari dataset made from another run. credit: kinds of targets in the active T-maze.

Every run is a separate process, as in learning.py. It is written to the output at once, and a later call does
not repeat it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent_tasks import DATA, STUDIES, OfflineTask, PeerTask
from learning import ROOT, Results, run_once
from learning_tasks import Task
from peers_ppo import Peer, install_peers, run_peer, run_process

from loxodon.data import minari
from loxodon.data.episodes import best_files
from loxodon.data.files import load_trajectory

OUTPUT = ROOT / "benchmarks" / "results" / "agents.json"


def train(task: Task, seed: int) -> dict[str, Any]:
    """Run Loxodon once; add the last return in each of its environments."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_once(task, seed, Path(folder), threads=1)
        log = Path(folder) / f"seed{seed}" / "logs" / "metrics.jsonl"
        records = [json.loads(line) for line in log.open(encoding="utf-8")]
    last = next(record for record in reversed(records) if "val/return" in record)
    found["returns"] = {key[11:]: value for key, value in last.items() if key.startswith("val/return/")}
    return found


def train_offline(task: OfflineTask, seed: int, folder: Path) -> dict[str, Any]:
    """Train on stored data, which are made with seed 0 if they are missing; add the returns in the data."""
    home, dataset = folder / task.data, f"{task.data}/best{100 * task.share:.0f}-v0"
    buffer = home / "seed0" / "buffer" / "fifo"
    if not (home / "whole").exists():
        run_once(DATA[task.data], 0, home, threads=1)
        (home / "whole").touch()
    files = sorted(buffer.glob("*.npz"))
    if not (folder / "minari" / dataset).exists():
        minari.export_minari(best_files(files, task.share), dataset)
    returns = [float(load_trajectory(file).rews.sum()) for file in files]
    overrides = tuple(word.format(folder=home, run="seed0", dataset=dataset) for word in task.overrides)
    found = train(replace(task, overrides=overrides), seed)
    about = {"episodes": len(returns), "mean": statistics.mean(returns), "best": max(returns)}
    return {**found, "data": about}


def train_peer(task: PeerTask, seed: int, python: Path) -> dict[str, Any]:
    """Run the other library; the result has the form of `train`."""
    peer = Peer("peers.sb3_recurrent_ppo", lstm_critic="own")
    found = run_peer(peer, replace(task.settings, seed=seed), python, run_process)
    above = [point for point in found["curve"] if point["return"] >= task.target]
    reached = {key: above[0][key] for key in ("env_steps", "seconds")} | {"updates": None} if above else None
    return {**found, "final": found["curve"][-1]["return"], "reached": reached}


def main() -> None:
    """Run the chosen studies and print one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    temp = Path(tempfile.gettempdir())
    add = parser.add_argument
    add("tasks", nargs="*", help=f"studies ({', '.join(STUDIES)}) or study/task (default: all)")
    add("--seeds", type=int, nargs="+", default=[0, 1])
    add("--again", action="store_true", help="repeat runs that the output already holds")
    add("--output", type=Path, default=OUTPUT)
    add("--data", type=Path, default=temp / "loxodon-agents", help="folder for the data of the offline study")
    add("--venv", type=Path, default=temp / "loxodon-peers", help="folder in which the peers are installed")
    args = parser.parse_args()
    every = {f"{study}/{name}": task for study, found in STUDIES.items() for name, task in found.items()}
    chosen = {
        name: task
        for name, task in every.items()
        if not args.tasks or name in args.tasks or name.split("/")[0] in args.tasks
    }
    if not chosen:
        parser.error(f"no such task; allowed are: {', '.join(every)}")
    os.environ["MINARI_DATASETS_PATH"] = str(args.data / "minari")
    results = Results(args.output, chosen, threads=1)
    for seed in args.seeds:
        for name, task in chosen.items():
            if results.has(name, seed) and not args.again:
                continue
            if isinstance(task, PeerTask):
                found = train_peer(task, seed, install_peers(args.venv, [], run_process))
            elif isinstance(task, OfflineTask):
                found = train_offline(task, seed, args.data)
            else:
                found = train(task, seed)
            print(f"{name} {json.dumps(found)}", file=sys.stderr, flush=True)
            results.add(name, found)
    print(json.dumps(results.found, indent=1))


if __name__ == "__main__":
    main()
