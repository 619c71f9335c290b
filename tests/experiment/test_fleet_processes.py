"""Learner and actors as real processes, and properties that only a new interpreter can show."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from loxodon.data import check_file
from loxodon.experiment.checkpoint.store import CheckpointManager
from loxodon.experiment.fleet import Heartbeat, read_heartbeats
from loxodon.tools import status
from loxodon.tools.run import main
from loxodon.tools.status import overview

from .fakes import TINY, make_experiment, metrics
from .processes import finish, is_anybody_left, launch, start, wait_for

RATIO = 0.05  # 20 env steps per update
PACED: dict[str, Any] = {
    "val_timesteps_per_epoch": 0,
    "ckpt_interval": 1,
    "replay_ratio": RATIO,
    "train_batches_per_epoch": 50,
    "CheckpointManager.keep": 2,
}


def last_beat(run_dir: Path, role: str) -> Heartbeat | None:
    found = [beat for beat in read_heartbeats(run_dir) if beat.role == role]
    return found[-1] if found else None


def known_beat(run_dir: Path, role: str) -> Heartbeat:
    found = last_beat(run_dir, role)
    assert found is not None
    return found


def stands_still(run_dir: Path, role: str) -> bool:
    """True if the process waits; a few steps may still be allowed by its last reading of the others."""
    before = known_beat(run_dir, role)
    time.sleep(1.0)
    now = known_beat(run_dir, role)
    done = [(at.env_steps, at.gradient_steps) for at in (before, now)]
    return now.state == "waiting" and done[0] == done[1]


def newest_epoch(run_dir: Path) -> int:
    return max(CheckpointManager(run_dir, "tiny").complete_epochs(), default=-1)


def finished_trajectories(run_dir: Path) -> dict[str, str]:
    """Digests of the files by name."""
    files = (run_dir / "buffer" / "fifo").glob("*.npz")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def assert_it_ends_well(process: subprocess.Popen[str]) -> str:
    text: str = finish(process)
    assert process.returncode == 0, text
    return text


def assert_they_are_there(finished: dict[str, str], run_dir: Path) -> None:
    assert len(finished) > 100
    assert finished.items() <= finished_trajectories(run_dir).items()
    for path in (run_dir / "buffer" / "fifo").glob("*.npz"):
        check_file(path)


def assert_it_is_seen_and_refuses_a_second_learner(
    run_dir: Path, pid: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status.main([str(run_dir), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["alive"], pid in {one["pid"] for one in facts["processes"]}) == (2, True)
    assert facts["env_steps"] > 0
    assert facts["buffer"]["fifo_files"] > 0
    assert facts["checkpoint_epochs"]
    note = json.loads((run_dir / "learner.json").read_text())
    holder = f"Process {pid} on {note['host']} (run 'tiny', since {note['since']}) already trains {run_dir}"
    for mode in ("both", "learn"):
        before = set((run_dir / "status").glob("*.json"))
        with pytest.raises(ValueError, match=rf"{re.escape(holder)}.*--mode collect"):
            make_experiment(run_dir.parent, mode=mode, val_timesteps_per_epoch=0).start()
        assert set((run_dir / "status").glob("*.json")) == before


def assert_the_records_tell_of_it(run_dir: Path) -> None:
    records = metrics(run_dir)
    ratio = [r["train/replay_ratio"] for r in records if "train/replay_ratio" in r][-1]
    # In a run this short, env steps taken between two readings of the learner matter on a busy machine.
    assert 0.4 * RATIO < ratio < 1.2 * RATIO
    assert records[-1]["env_steps"] >= sum(r.get("train/updates", 0) for r in records) / RATIO / 1.2
    assert any("train/policy_lag" in r for r in records)
    assert any("dataset/newest_age_s" in r for r in records)
    actor_log = next((run_dir / "logs").glob("metrics_collect_*.jsonl")).read_text()
    for name in ("policy/version", "policy/age_s", "policy/versions_behind", "time/wait_for_learner_s"):
        assert name in actor_log
    actors = [one for one in read_heartbeats(run_dir) if one.role == "actor"]
    # each process is counted once
    assert overview(run_dir)["env_steps"] == sum(beat.env_steps for beat in actors)


@pytest.mark.slow
@pytest.mark.forked
@pytest.mark.timeout(300)
def test_learner_and_actors_keep_pace_and_data_when_any_of_them_dies_and_all_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each dies once; benchmarks/chaos.py kills fifty times at random moments."""
    run_dir = tmp_path / "tiny"
    beat = partial(known_beat, run_dir)

    def start(*words: str, **changes: Any) -> subprocess.Popen[str]:
        return launch(tmp_path, *words, **{**PACED, "epochs": 10_000, **changes})

    # An actor may start first, and collects in advance.
    actor = start(mode="collect", seed=1)
    wait_for(lambda: (seen := last_beat(run_dir, "actor")) is not None and seen.env_steps > 500, actor)
    learner = start(mode="learn")
    wait_for(lambda: newest_epoch(run_dir) >= 2, learner)

    assert_it_is_seen_and_refuses_a_second_learner(run_dir, learner.pid, capsys)

    # Without an actor the learner waits; a new actor lets it continue.
    finished = finished_trajectories(run_dir)
    actor.kill()
    finish(actor)
    wait_for(lambda: stands_still(run_dir, "learner"), learner)
    waiting = beat("learner").gradient_steps
    assert beat("actor").life == "dead"
    actor = start(mode="collect", seed=3)
    wait_for(lambda: beat("actor").pid == actor.pid, actor)
    wait_for(lambda: beat("learner").gradient_steps > waiting + 4, learner)

    # Without a learner the actor waits. The lock is free, and a resumed learner continues.
    finished |= finished_trajectories(run_dir)
    learner.kill()
    finish(learner)
    wait_for(lambda: stands_still(run_dir, "actor"), actor)
    standing = beat("actor").env_steps
    assert status.main([str(run_dir)]) == 0, actor.poll()
    assert " dead " in capsys.readouterr().out
    learner = start("--resume", mode="learn", epochs=newest_epoch(run_dir) + 4)
    assert_it_ends_well(learner)
    assert_it_ends_well(actor)  # it notices that the learner has finished, wherever it waits
    assert beat("actor").env_steps > standing + 500
    assert (beat("learner").state, beat("actor").state) == ("finished", "finished")
    assert not (run_dir / "learner.json").exists()
    assert status.main([str(run_dir)]) == 0  # no process is running, and nothing is left to do

    assert_the_records_tell_of_it(run_dir)
    assert_they_are_there(finished, run_dir)


@pytest.mark.slow
@pytest.mark.forked
@pytest.mark.timeout(300)
def test_a_signal_to_all_processes_is_not_a_failure_and_leaves_no_process(tmp_path: Path) -> None:
    process = launch(
        tmp_path,
        epochs=10**6,
        env_mode="async",
        dloader_workers=2,
        async_env_mp_context="fork",
        ckpt_interval=None,
        evaluate_at_end=False,
        val_interval=None,
        **{"AsyncVectorEnv.num_workers": 2},
    )
    wait_for((tmp_path / "tiny" / "ckpts" / "latest" / "policy.safetensors").exists, process)
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGTERM)
    assert "Stopped by SIGTERM" in assert_it_ends_well(process)
    deadline_s = time.monotonic() + 25.0
    while is_anybody_left(process.pid):  # such as a worker in its grace period of 30 s
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


# ---- a new interpreter ----


FRESH = """
import sys
import loxodon.experiment, loxodon.tools.launch
absent = {"wandb", "tensorboard", "torch.utils.tensorboard", "tensorflow", "popgym", "ray", "submitit"}
print(sorted(absent & set(sys.modules)))

import numpy as np
policy = loxodon.experiment.load_policy("alone.safetensors")
print(policy.act(np.zeros(3, np.float32)) in range(4))

from tests.experiment import fakes
from loxodon.envs import EnvSpec, TMazePassive
from loxodon.experiment.artifacts import UrlStore
exp = fakes.make_experiment(
    ".", epochs=1, make_train_env=EnvSpec(TMazePassive, {"horizon": 3}), env_mode="async",
    async_env_mp_context="spawn", dloader_workers=1,
    val_timesteps_per_epoch=0,
    **{"Artifacts.store": lambda: UrlStore("store")},
)
exp.start()
exp.learn()
print(sorted(absent & set(sys.modules)))
print("done", flush=True)  # and forgets to close
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_optional_packages_are_not_imported_a_policy_is_one_file_and_an_unclosed_run_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, alone = tmp_path / "trained", tmp_path / "alone"
    trained.mkdir()
    alone.mkdir()
    monkeypatch.chdir(trained)
    Path("tiny.gin").write_text(TINY)
    assert main(["--config", "tiny.gin", "Experiment.verbose=False"]) == 0
    shutil.move("runs/tiny/ckpts/latest/policy.safetensors", alone / "alone.safetensors")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")
    process = start(FRESH, cwd=alone)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(5)]
    assert "no recommended preset" in lines.pop(2), lines
    assert lines == ["[]\n", "True\n", "[]\n", "done\n"], [*lines, process.stdout.read()]
    process.communicate(timeout=25)  # the workers' grace period alone is 30 s
    assert process.returncode == 0
