"""Episodes that grow with training, and environments that hear of epochs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loxodon.data import load_trajectory
from loxodon.envs import EnvError, EnvSpec
from loxodon.experiment import EpisodeLengthCurriculum, Experiment

from .fakes import CountingEnv, make_experiment, run

LONG = {
    "make_train_env": EnvSpec(CountingEnv, {"length": 50}),
    "make_val_env": EnvSpec(CountingEnv, {"length": 6}),
}


class LevelEnv(CountingEnv):
    """Has a level, and notes the epochs it hears of in its metric."""

    def __init__(self) -> None:
        super().__init__(length=4)
        self.level = 0
        self.epochs: list[int] = []

    def on_epoch_end(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def step(self, action: int) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        if terminated:
            info = {"metric/level": float(self.level), "metric/last_epoch": float(([-1, *self.epochs])[-1])}
        return obs, reward, terminated, truncated, info


def figures(exp: Experiment, name: str) -> list[float]:
    lines = (exp.run_dir / "logs" / "metrics.jsonl").read_text().splitlines()
    return [record[name] for record in map(json.loads, lines) if name in record]


def curriculum(**changes: Any) -> list[Any]:
    return [lambda: EpisodeLengthCurriculum(**{"start": 2, "end": 6, "over_epochs": 2, **changes})]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_episodes_grow(tmp_path: Path, mode: str) -> None:
    settings: dict[str, Any] = {"env_mode": mode, "async_env_mp_context": "fork", **LONG}
    exp = run(make_experiment(tmp_path, epochs=4, callbacks=curriculum(), ckpt_interval=1, **settings))
    assert figures(exp, "collect/max_episode_length") == [2, 4, 6]
    assert figures(exp, "collect/episode_length") == [2, 4, 6, 6]
    assert figures(exp, "val/episode_length") == [6] * 5  # untouched
    trajs = [load_trajectory(path) for path in (exp.run_dir / "buffer" / "fifo").glob("*.npz")]
    assert {len(traj) for traj in trajs} == {2, 4, 6}
    assert not any(traj.dones.any() for traj in trajs)


def test_a_resumed_run_goes_on_with_the_length_of_its_epoch(tmp_path: Path) -> None:
    run(make_experiment(tmp_path, epochs=1, callbacks=curriculum(), **LONG))
    exp = run(
        make_experiment(tmp_path, epochs=2, callbacks=curriculum(), **LONG), lambda e: e.load_checkpoint()
    )
    assert figures(exp, "collect/episode_length") == [2, 4]


def test_validation_may_follow(tmp_path: Path) -> None:
    settings = {**LONG, "make_val_env": LONG["make_train_env"]}
    exp = run(make_experiment(tmp_path, callbacks=curriculum(also_validation=True), **settings))
    assert figures(exp, "val/episode_length") == [2, 4, 6]


def test_any_attribute_can_be_set_and_environments_hear_of_epochs(tmp_path: Path) -> None:
    exp = make_experiment(
        tmp_path, epochs=3, make_train_env=LevelEnv, callbacks=curriculum(attribute="level", over_epochs=4)
    )
    run(exp)
    assert figures(exp, "collect/level") == [2, 2, 3, 3, 4, 4]  # what was set, what the episodes had
    assert figures(exp, "collect/last_epoch") == [-1, 0, 1]


@pytest.mark.parametrize(("mode", "error"), [("sync", AttributeError), ("async", EnvError)])
def test_an_unknown_attribute_is_an_error(tmp_path: Path, mode: str, error: type[Exception]) -> None:
    changes: dict[str, Any] = {"env_mode": mode, "async_env_mp_context": "fork", "val_interval": None}
    exp = make_experiment(tmp_path, callbacks=curriculum(attribute="lengt"), **changes)
    exp.start()
    words = r"CountingEnv.* has no attribute 'lengt'; looked for in CountingEnv. Did you mean 'length'\? Fix"
    with pytest.raises(error, match=words):
        exp.learn()
    exp.close()


def test_the_ramp() -> None:
    (made,) = (make() for make in curriculum(start=10, end=4, over_epochs=3))
    assert [made.length(epoch) for epoch in range(5)] == [10, 8, 6, 4, 4]


@pytest.mark.parametrize("name", ["start", "end", "over_epochs"])
@pytest.mark.parametrize("value", [0, 2.5, True])
def test_bad_numbers(name: str, value: Any) -> None:
    words = rf"EpisodeLengthCurriculum.{name} is .*at least 1.*Fix"
    with pytest.raises((TypeError, ValueError), match=words):
        EpisodeLengthCurriculum(**{"start": 1, "end": 2, "over_epochs": 3, name: value})


def test_every_row_is_set_when_halves_overlap(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"env_mode": "async", "overlap_sampling": True, "parallel_actors": 3, **LONG}
    exp = make_experiment(tmp_path, callbacks=curriculum(), async_env_mp_context="fork", **settings)
    exp.start()
    exp.collect_new_training_data()
    assert exp.train_envs.get_attr("max_episode_length") == (2, 2, 2)
    assert np.allclose(exp.collector.groups[0].state.time_idxs, 0)  # type: ignore[union-attr]
    exp.close()
