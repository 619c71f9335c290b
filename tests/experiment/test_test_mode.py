"""The test run before training, the test after it, and where the time goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gin
import pytest

from loxodon.data import DiskTrajDataset, MixtureOfDatasets
from loxodon.envs import EnvSpec
from loxodon.experiment import Experiment
from loxodon.experiment.cli import main
from loxodon.experiment.cli import words_on_test as report
from loxodon.experiment.collect import StageTimer

from .fakes import CountingEnv, make_experiment, run


def records(exp: Experiment) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (exp.run_dir / "logs" / "metrics.jsonl").read_text().splitlines()]


def named(exp: Experiment, *names: str) -> list[dict[str, float]]:
    return [record for record in records(exp) if set(names) <= record.keys()]


# ---- test_run ----


def test_a_test_run_does_one_of_everything_beside_the_real_run(tmp_path: Path) -> None:
    real = run(make_experiment(tmp_path, val_timesteps_per_epoch=0))
    before = {path: path.stat().st_mtime_ns for path in real.run_dir.rglob("*")}
    data = DiskTrajDataset(dset_root=str(tmp_path), dset_name="tiny")  # that of the real run
    exp = make_experiment(
        tmp_path,
        dataset=data,
        test_run=True,
        epochs=10**6,
        train_timesteps_per_epoch=10**6,
        val_timesteps_per_epoch=10**6,
        train_batches_per_epoch=10**6,
        **{"FinalTest.timesteps": 10**6},
        val_interval=None,
        ckpt_interval=None,
        log_to_wandb=True,
        mode="learn",
        make_train_env=EnvSpec(CountingEnv, {"length": 10**6}),
        make_val_env=EnvSpec(CountingEnv, {"length": 3}),
    )
    run(exp)
    assert {path: path.stat().st_mtime_ns for path in real.run_dir.rglob("*")} == before
    assert exp.run_dir == tmp_path / "tiny-test"
    assert (exp.env_steps, exp.learner.gradient_steps, exp.epoch) == (3 * 8, 2, 1)
    assert exp.checkpoints.newest_intact_epoch() == (0, [])
    assert named(exp, "val/return")
    assert named(exp, "test/return")
    assert "24 env steps, 2 updates, one checkpoint, all in" in report(exp)


def test_a_dataset_that_is_not_ready_is_told_of(tmp_path: Path) -> None:
    exp = run(make_experiment(tmp_path, test_run=True, dataset=DiskTrajDataset(dset_min_size=100)))
    assert "no update (the dataset was not ready for training)" in report(exp)


def test_the_parts_of_a_mixture_are_redirected(tmp_path: Path) -> None:
    parts = [DiskTrajDataset(str(tmp_path), name, takes_new_trajs=name == "new") for name in ("new", "old")]
    make_experiment(tmp_path, dataset=MixtureOfDatasets(parts, [1.0, 1.0]), test_run=True)
    assert [(part.dset_root, part.dset_name) for part in parts] == [(None, None), (str(tmp_path), "old")]


@pytest.mark.slow
def test_an_on_policy_run_has_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--config", "ppo/cartpole", "--test-run", "FinalTest.timesteps=8"]
    words += ["Experiment.callbacks=[@EpisodeLengthCurriculum]", "EpisodeLengthCurriculum.start=2"]
    words += ["EpisodeLengthCurriculum.end=9", "EpisodeLengthCurriculum.over_epochs=9"]
    words += ["RewardShaping.shaper=@ScaleRewards()", "ScaleRewards.scale=100.0"]
    try:
        assert main(words) == 0
    finally:
        gin.clear_config()
    (log,) = tmp_path.glob("runs/*-test/logs/metrics.jsonl")
    found = {name: value for line in log.read_text().splitlines() for name, value in json.loads(line).items()}
    assert (found["collect/episode_length"], found["collect/return"]) == (2.0, 2.0)
    assert found["ppo/return"] > 10  # what is learned from is shaped
    assert found["time/update_ms"] > 0


# ---- the test after training ----


def test_the_test_comes_once_after_training(tmp_path: Path) -> None:
    test_env = EnvSpec(CountingEnv, {"length": 2})
    exp = run(make_experiment(tmp_path, **{"FinalTest.make_env": test_env}, **{"FinalTest.timesteps": 6}))
    (test,) = named(exp, "test/return")
    assert test["test/episode_length"] == 2
    assert records(exp)[-1] == test
    assert exp.train_envs is None


def test_without_environments_of_its_own_it_takes_those_of_validation(tmp_path: Path) -> None:
    exp = run(
        make_experiment(
            tmp_path, **{"FinalTest.timesteps": 6}, make_val_env=EnvSpec(CountingEnv, {"length": 3})
        )
    )
    assert [test["test/episode_length"] for test in named(exp, "test/return")] == [3]


class OtherEnv(CountingEnv):
    """Has another action more."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = type(self.action_space)(4)


def test_environments_that_do_not_fit_are_found_before_training(tmp_path: Path) -> None:
    exp = make_experiment(tmp_path, **{"FinalTest.make_env": OtherEnv}, **{"FinalTest.timesteps": 6})
    with pytest.raises(ValueError, match=r"FinalTest.make_env has .*Discrete\(4\).*Discrete\(3\).*Fix"):
        exp.start()


def test_the_number_of_its_steps_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"FinalTest.timesteps is -1.*Fix"):
        make_experiment(tmp_path, **{"FinalTest.timesteps": -1})


# ---- time ----


def test_stages_are_divided_by_what_they_were_for(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = StageTimer()
    now = iter([1.0, 2.5, 2.75, 10.0])
    monkeypatch.setattr("loxodon.experiment.collect.collector.time.perf_counter", lambda: next(now))
    after_policy = timer.lap("policy", 0.5)
    after_env = timer.lap("env", after_policy)
    timer.lap("store", after_env)
    timer.lap("update", 2.0)
    timer.num_env_steps, timer.num_updates = 10, 4  # 5 vector steps of 2 envs
    assert timer.step_figures(2) == {
        "time/policy_ms_per_step": 100.0,
        "time/env_ms_per_step": 300.0,
        "time/store_ms_per_step": 50.0,
    }
    assert timer.update_figures() == {"time/update_ms": 2000.0}
    assert (timer.step_figures(2), timer.update_figures()) == ({}, {})
    assert set(timer.seconds.values()) == {0.0}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_stages_of_a_run_are_logged_within_their_whole(tmp_path: Path, mode: str) -> None:
    exp = run(make_experiment(tmp_path, env_mode=mode, async_env_mp_context="fork"))
    stages = [f"time/{stage}_ms_per_step" for stage in ("policy", "env", "store")]
    for record in (collected := named(exp, *stages)):
        assert all(record[stage] > 0 for stage in stages)
        assert sum(record[stage] for stage in stages) * 12 <= 1e3 * record["time/collect_s"]
    for record in (learned := named(exp, "time/update_ms")):
        assert 0 < record["time/update_ms"] * record["train/updates"] <= 1e3 * record["time/learn_s"]
    assert (len(collected), len(learned)) == (2, 2)


def test_one_epoch_is_profiled(tmp_path: Path) -> None:
    exp = run(make_experiment(tmp_path, **{"ProfileEpoch.epoch": 1}, val_timesteps_per_epoch=0))
    (trace,) = (exp.run_dir / "logs").glob("profile_epoch_*.json")
    assert trace.name == "profile_epoch_1.json"
    assert json.loads(trace.read_text())["traceEvents"]


def test_the_epoch_to_profile_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ProfileEpoch.epoch is -1.*Fix"):
        make_experiment(tmp_path, **{"ProfileEpoch.epoch": -1})
