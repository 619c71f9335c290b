"""Learning with separate actor processes against learning in one process, as JSON.

    python benchmarks/actors.py               seeds 0, 1, 2; writes benchmarks/results/actors.json

The T-maze preset until it is solved: in one process (mode "both"), with `--actors 2`, and with `--actors 2`
whose environments are slowed so that actors alone are 4 and 32 times slower. With `--actors` the ratio of
updates to env steps is that of the preset, so curves over env steps should not depend on the actors' speed.
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
from pathlib import Path
from typing import Any

from provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
SLOW_GIN = """
import slow_tmaze
Experiment.make_train_env = @SlowTMaze
SlowTMaze.horizon = %HORIZON
SlowTMaze.sleep_s = {sleep_s}
"""
STEP_S = 0.92e-3 / 12  # of one env of an actor that nobody slows, policy included
WAYS = {"both": (None, 1), "actors": (2, 1), "actors_4x_slower": (2, 4), "actors_32x_slower": (2, 32)}


def run_once(actors: int | None, slowdown: int, seed: int) -> dict[str, Any]:
    """Train until solved; returns wall time, counters, speeds and the evaluations over env steps."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, str(ROOT / "examples" / "run.py"), "--config", "tmaze"]
        if slowdown > 1:
            path = folder / "slow.gin"
            path.write_text(SLOW_GIN.format(sleep_s=(slowdown - 1) * STEP_S))
            command += ["--config", str(path)]
        if actors is not None:
            command += ["--actors", str(actors)]
        command += ["--seed", str(seed), "--run-name", "run", f"Experiment.ckpt_base_dir='{folder}'"]
        start_s = time.perf_counter()
        paths = os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": paths})
        wall_s = time.perf_counter() - start_s
        lines = (folder / "run" / "logs" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    curve = [(r["env_steps"], round(r["val/success"], 3)) for r in records if "val/success" in r]
    speeds = [r["time/updates_per_s"] for r in records if "time/updates_per_s" in r]
    last = records[-1]
    return {
        "wall_s": round(wall_s, 1),
        "env_steps": last["env_steps"],
        "updates": last["gradient_steps"],
        "final_success": curve[-1][1],
        "env_steps_per_s": round(last["env_steps"] / wall_s, 1),
        "updates_per_s": round(statistics.median(speeds), 1),
        "success_over_env_steps": curve,
    }


def main() -> None:
    """Run all ways with all seeds, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    args = parser.parse_args()
    ways: dict[str, Any] = {}
    for way in args.ways:
        runs = []
        for seed in args.seeds:
            runs.append({"seed": seed, **run_once(*WAYS[way], seed)})
            print(way, json.dumps(runs[-1]), file=sys.stderr, flush=True)
        names = ("wall_s", "env_steps", "updates", "env_steps_per_s", "updates_per_s")
        medians = {name: statistics.median(run[name] for run in runs) for name in names}
        ways[way] = {"median": medians, "runs": runs}
    text = json.dumps({"provenance": provenance(), "ways": ways}, indent=1)
    print(text)
    (ROOT / "benchmarks" / "results" / "actors.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
