"""Evaluation counts episodes independently of their lengths."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from loxodon.data import load_trajectory
from loxodon.envs import EnvHalves, EnvSpec
from loxodon.experiment import Experiment
from loxodon.experiment.callbacks import FinalTest

from .fakes import CountingEnv, make_experiment, metrics, run
from .ppo.whole_runs import ppo_experiment

NUM_ENVS, LONG = 40, 50


class ShortOrLong(CountingEnv):
    """Half of the episodes have 1 step and return 0, half have 50 steps and return 50."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        found = super().reset(seed=seed, options=options)
        self.length = LONG if self.np_random.random() < 0.5 else 1
        return found

    def step(self, action: int) -> Any:
        obs, _, terminated, truncated, info = super().step(action)
        reward = float(terminated and self.length == LONG) * LONG
        return obs, reward, terminated, truncated, {"metric/is_long": reward / LONG} if info else {}


def vectorized(mode: str) -> gym.vector.VectorEnv[Any, Any, Any]:
    return gym.vector.SyncVectorEnv([ShortOrLong] * NUM_ENVS, autoreset_mode=AutoresetMode(mode))


def expected(exp: Experiment, timesteps: int) -> list[float]:
    """Returns of all episodes that begin in time, computed by playing the environments directly."""
    returns, envs = [], [ShortOrLong() for _ in range(NUM_ENVS)]
    for env, seed in zip(envs, exp.first_seed + np.arange(NUM_ENVS), strict=True):  # type: ignore[attr-defined]
        steps, _ = 0, env.reset(seed=int(seed))
        while steps < timesteps:
            returns.append(sum(env.step(0)[1] for _ in range(env.length)))
            steps += env.length
            env.reset()
    return returns


MODES: dict[str, dict[str, Any]] = {
    "sync": {"env_mode": "sync"},
    "async": {"env_mode": "async", "async_env_mp_context": "fork", "AsyncVectorEnv.num_workers": 2},
    **{
        mode: {"env_mode": "already_vectorized", "make_val_env": EnvSpec(vectorized, {"mode": mode})}
        for mode in ("SameStep", "NextStep", "Disabled")
    },
}


@pytest.mark.parametrize(("mode", "timesteps"), [("sync", 200), *((mode, 60) for mode in MODES)])
def test_neither_short_nor_long_episodes_are_preferred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, timesteps: int
) -> None:
    settings: dict[str, Any] = {"make_val_env": EnvSpec(ShortOrLong), **MODES[mode]}
    settings |= {"parallel_actors": NUM_ENVS, "train_timesteps_per_epoch": 0}
    exp = make_experiment(tmp_path, val_timesteps_per_epoch=timesteps, **settings)
    exp.start()
    reset = exp.val_envs.reset

    def noted(*, seed: int, **kwargs: Any) -> Any:
        exp.first_seed = seed  # type: ignore[attr-defined]
        return reset(seed=seed, **kwargs)

    monkeypatch.setattr(exp.val_envs, "reset", noted)
    found = exp.evaluate_val()
    exp.close()
    returns = expected(exp, timesteps)
    assert found["val/episodes"] == len(returns)
    assert found["val/return"] == pytest.approx(np.mean(returns))
    # counting only episodes that ended in time would give 17 and 22
    assert found["val/return"] == pytest.approx(25.0, abs=3.0)
    assert found["val/return_p20"] == np.percentile(returns, 20)
    assert found["val/is_long"] == pytest.approx(np.mean(returns) / LONG)


@pytest.mark.parametrize("kind", ["test", "test by episodes", "ppo"])
def test_the_same_holds_for_tests_and_on_policy_agents(tmp_path: Path, kind: str) -> None:
    settings: dict[str, Any] = {"parallel_actors": NUM_ENVS, "train_timesteps_per_epoch": 0}
    settings["make_val_env"] = EnvSpec(ShortOrLong)
    if kind == "ppo":
        changes = {"train_timesteps_per_epoch": 8, "make_train_env": EnvSpec(ShortOrLong)}
        exp = ppo_experiment(tmp_path, **{**settings, **changes})
    else:
        exp = make_experiment(tmp_path, **settings)
    exp.start()
    episodes = 7 * NUM_ENVS if kind == "test by episodes" else None
    found = exp.evaluate_test(EnvSpec(ShortOrLong), 60, episodes=episodes)
    exp.close()
    assert found["test/return"] == pytest.approx(25.0, abs=3.0)
    assert found["test/is_long"] == pytest.approx(found["test/return"] / LONG)
    assert episodes is None or found["test/episodes"] < episodes  # some begin too late to count


def test_the_final_test_counts_episodes_that_begin_in_time(tmp_path: Path) -> None:
    changes = {"FinalTest.timesteps": 7, "epochs": 1, "val_timesteps_per_epoch": 0}
    exp = run(make_experiment(tmp_path, **changes))  # episodes of 5 steps in 3 environments
    assert any(isinstance(one, FinalTest) for one in exp.hooks.callbacks)
    (record,) = [one for one in metrics(exp.run_dir) if "test/episodes" in one]
    assert record["test/episodes"] == 2 * 3


def test_episodes_that_do_not_end_are_skipped_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    envs = [EnvSpec(CountingEnv, {"length": n}) for n in (5, 10**6, 1_020)]  # 12 steps, so the limit is 1,120
    exp = make_experiment(tmp_path, make_val_env=envs, train_timesteps_per_epoch=0)
    exp.start()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "loxodon"):
        found = exp.evaluate_val()
    exp.close()
    (warning,) = caplog.messages
    assert warning.startswith(
        "1 episode(s) of this evaluation had not ended after 1120 steps and do not count"
    )
    assert "Fix: end episodes with gymnasium's TimeLimit" in warning
    assert found["val/episodes"] == 3 + 0 + 1
    assert found["val/episode_length"] == (3 * 5 + 1_020) / 4


def test_steps_after_the_counted_episodes_belong_to_new_ones(tmp_path: Path) -> None:
    """Episodes that are played while others finish never count."""
    envs = [EnvSpec(CountingEnv, {"length": n}) for n in (2, 9, 9)]
    exp = make_experiment(tmp_path, make_val_env=envs)
    exp.start()
    state, (history, _) = exp.interact(exp.val_envs, 1, episodes=3)
    assert sorted(history.lengths["CountingEnv"]) == [2, 9, 9]
    _, (history, _) = exp.interact(exp.val_envs, 1, hidden_state=state)  # the fifth episode of the first env
    exp.close()
    assert history.lengths["CountingEnv"] == [2]


class Boasting(CountingEnv):
    """Its return is at most 5, and it reports metrics under the names of ours."""

    def step(self, action: int) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        names = (
            "return",
            "episodes",
            "return_p20",
            "return/Boasting",
            "episode_length",
            "env_steps/Boasting",
        )
        return (
            obs,
            reward,
            terminated,
            truncated,
            {f"metric/{name}": 1000.0 for name in names} if info else {},
        )


@pytest.mark.parametrize("kind", ["off-policy", "ppo"])
def test_metrics_of_environments_do_not_replace_ours(tmp_path: Path, kind: str) -> None:
    make = make_experiment if kind == "off-policy" else ppo_experiment
    env = EnvSpec(Boasting)
    changes = {"make_val_env": env, "make_train_env": env, "val_timesteps_per_epoch": 12, "epochs": 1}
    exp = run(make(tmp_path, **changes, stop_at_val_return=100.0))
    assert exp.best_score is not None
    assert exp.best_score <= 5.0
    records = metrics(exp.run_dir)
    for group, episodes in {"val": 9, "collect": 6 if kind == "off-policy" else 3}.items():
        (one, *_) = (record for record in records if f"{group}/return" in record)
        assert one[f"{group}/return"] <= 5.0
        assert one[f"{group}/return/Boasting"] == one[f"{group}/return"]
        assert one[f"{group}/episodes"] == episodes
        assert one[f"{group}/env_steps/Boasting"] == 5 * episodes
        assert one[f"{group}/metric/return"] == one[f"{group}/metric/env_steps/Boasting"] == 1000.0


def test_the_halves_of_asynchronous_training_environments_are_played_together(tmp_path: Path) -> None:
    exp = make_experiment(tmp_path, make_train_env=EnvSpec(CountingEnv), env_mode="async", parallel_actors=3)
    exp.start()
    assert isinstance(exp.train_envs, EnvHalves)
    state, (history, _) = exp.interact(exp.train_envs, 7)
    state, (later, _) = exp.interact(exp.train_envs, 5, hidden_state=state)
    exp.close()
    assert history.lengths["CountingEnv"] == [5] * 3
    assert later.lengths["CountingEnv"] == [5] * 3
    assert [one.tolist() for one in state] == [[2] * 2, [2]]
    trajs = [load_trajectory(file) for file in (exp.run_dir / "buffer" / "fifo").glob("*.npz")]
    assert sorted(map(len, trajs)) == sorted([5, 2, 3, 2] * 3)
