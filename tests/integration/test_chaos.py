"""A learner and two actors are killed at random and lose nothing; benchmarks/chaos.py does it fifty times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_kills_of_learner_and_actors_lose_no_finished_trajectory(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "benchmarks" / "chaos.py")]
    done = subprocess.run(
        [*script, "--rounds", "2", "--epochs", "25", "--no-reference", "--seed", "20"],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,  # a guard; on a busy machine it takes minutes
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
    )
    assert done.stdout, done.stderr
    chaos = json.loads(done.stdout)["chaos"]
    assert chaos["faults"] == []
    assert chaos["learner_exit_code"] == 0, chaos["learner_log_tail"]
    assert sum(chaos["kills"].values()) >= 1
    assert chaos["trajectories"] > 100
