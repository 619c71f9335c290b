"""Learner and actors as real processes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from loxodon.experiment import status
from loxodon.experiment.fleet import Beat, read_heartbeats
from loxodon.experiment.fleet.overview import overview

from .fakes import make_experiment
from .test_resume import finish, launch, metrics, wait_for

RATIO = 0.05  # 20 env steps per update
QUIET: dict[str, Any] = {"val_timesteps_per_epoch": 0, "ckpt_interval": 1}
PACED: dict[str, Any] = {
    **QUIET,
    "replay_ratio": RATIO,
    "train_batches_per_epoch": 100,
    "CheckpointManager.keep": 2,
}


def beats_of(run_dir: Path, role: str) -> list[Beat]:
    return [beat for beat in read_heartbeats(run_dir) if beat.role == role]


def learner_state(run_dir: Path) -> str | None:
    found = beats_of(run_dir, "learner")
    return found[-1].state if found else None


def last_ratio(run_dir: Path) -> float:
    return float([r["train/replay_ratio"] for r in metrics(run_dir) if "train/replay_ratio" in r][-1])


def stop(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGTERM)
    return finish(process)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["learner", "actors"])
def test_the_ratio_holds_and_all_end_in_either_order_of_starting(tmp_path: Path, first: str) -> None:
    run_dir, seeds = tmp_path / "tiny", (1,) if first == "learner" else (1, 2)
    learner = launch(tmp_path, mode="learn", epochs=10, **PACED) if first == "learner" else None
    actors = [launch(tmp_path, mode="collect", seed=seed, **PACED) for seed in seeds]
    wait_for(lambda: all(b.env_steps > 500 for b in beats_of(run_dir, "actor")), actors[0])
    learner = learner or launch(tmp_path, mode="learn", epochs=10, **PACED)
    text = finish(learner)
    assert learner.returncode == 0, text
    for actor in actors:  # they notice that it has finished, wherever they wait
        text = finish(actor)
        assert actor.returncode == 0, text
    # In a run this short, what actors take between two looks at the learner on a busy machine counts.
    assert 0.4 * RATIO < last_ratio(run_dir) < 1.2 * RATIO
    assert {beat.state for beat in read_heartbeats(run_dir)} == {"finished"}
    records = metrics(run_dir)
    assert records[-1]["env_steps"] >= sum(r.get("train/updates", 0) for r in records) / RATIO / 1.2
    assert any("train/policy_lag" in r for r in records)
    assert any("dataset/newest_age_s" in r for r in records)
    actor_log = next((run_dir / "logs").glob("metrics_collect_*.jsonl")).read_text()
    for name in ("policy/version", "policy/age_s", "policy/versions_behind", "time/wait_for_learner_s"):
        assert name in actor_log


@pytest.mark.slow
def test_the_ratio_survives_the_death_of_an_actor_and_of_the_learner(tmp_path: Path) -> None:
    run_dir = tmp_path / "tiny"
    learner = launch(tmp_path, mode="learn", epochs=10_000, **PACED)
    actor = launch(tmp_path, mode="collect", seed=1, **PACED)
    wait_for((run_dir / "ckpts/training_states/tiny_epoch_2/COMPLETE").exists, learner)
    actor.kill()  # nobody collects any more: the learner waits
    finish(actor)
    wait_for(lambda: learner_state(run_dir) == "waiting", learner)
    waiting = beats_of(run_dir, "learner")[0].gradient_steps
    assert [beat.life for beat in beats_of(run_dir, "actor")] == ["dead"]
    actor = launch(tmp_path, mode="collect", seed=3, **PACED)
    wait_for(lambda: beats_of(run_dir, "learner")[0].gradient_steps > waiting + 4, learner)
    learner.kill()
    finish(learner)
    # What the learner told last allows some steps yet, also to an actor that is waiting at this moment.
    seen = [beats_of(run_dir, "actor")[-1]]

    def stands_still() -> bool:
        time.sleep(1.0)
        seen.append(beats_of(run_dir, "actor")[-1])
        return seen[-1].state == "waiting" and seen[-1].env_steps == seen[-2].env_steps

    wait_for(stands_still, actor)
    learner = launch(tmp_path, "--resume", mode="learn", epochs=10_000, **PACED)
    wait_for(lambda: beats_of(run_dir, "actor")[-1].env_steps > seen[-1].env_steps + 1000, learner)
    assert "Stopped by SIGTERM" in stop(learner)
    assert "Stopped by SIGTERM" in stop(actor)  # it waits for the learner
    assert 0.4 * RATIO < last_ratio(run_dir) < 1.2 * RATIO
    actors = beats_of(run_dir, "actor")
    assert overview(run_dir)["env_steps"] == sum(beat.env_steps for beat in actors)  # each process once


@pytest.mark.slow
def test_a_run_at_work_shows_its_status_and_refuses_a_second_learner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "tiny"
    learner = launch(tmp_path, mode="both", epochs=10_000, **QUIET)
    wait_for((run_dir / "ckpts/training_states/tiny_epoch_1/COMPLETE").exists, learner)
    assert status.main([str(run_dir), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["alive"], facts["processes"][0]["pid"]) == (1, learner.pid)
    assert facts["env_steps"] > 0
    assert facts["buffer"]["fifo_files"] > 0
    assert 1 in facts["checkpoint_epochs"]
    note = json.loads((run_dir / "learner.json").read_text())
    holder = f"Process {learner.pid} on {note['host']} (run 'tiny', since {note['since']}) trains {run_dir}"
    for mode in ("both", "learn"):
        before = set((run_dir / "status").glob("*.json"))
        with pytest.raises(ValueError, match=rf"{re.escape(holder)} already.*--mode collect"):
            make_experiment(tmp_path, mode=mode, **QUIET).start()
        assert set((run_dir / "status").glob("*.json")) == before
    learner.kill()  # the lock goes with its process
    finish(learner)
    assert status.main([str(run_dir)]) == status.NOBODY
    assert " dead " in capsys.readouterr().out
    exp = make_experiment(tmp_path, mode="learn", **QUIET)
    exp.start()
    exp.close()
    assert not (run_dir / "learner.json").exists()
