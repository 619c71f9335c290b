"""Choosing a mode, and environments that bring their own batch axis."""

from __future__ import annotations

import logging
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from scripted_envs import ScriptedEnv
from vector_builders import gymnasium_vector_env

from loxodon.envs import AsyncVectorEnv, EnvSpec, SyncVectorEnv, make_vector_env


def test_async_halves_must_alternate(opened: Any) -> None:
    env = opened("fork", [EnvSpec(ScriptedEnv)] * 2)
    env.reset(seed=0)
    with pytest.raises(RuntimeError, match=r"without step_async.*Fix"):
        env.step_wait()
    env.step_async([0, 0])
    with pytest.raises(RuntimeError, match=r"twice.*Fix"):
        env.step_async([0, 0])
    assert env.step_wait()[1].tolist() == [10.0, 10.0]


@pytest.mark.parametrize(("speeds", "chosen"), [((9.0, 8.0), "sync"), ((8.0, 9.0), "async")])
def test_auto_takes_the_faster_and_says_so(
    speeds: tuple[float, float],
    chosen: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = iter(speeds)
    monkeypatch.setattr("loxodon.envs.vector._steps_per_s", lambda _: next(measured))
    with caplog.at_level(logging.INFO, logger="loxodon"):
        env = make_vector_env([EnvSpec(ScriptedEnv)] * 2, "auto", num_workers=1)
    assert type(env) is {"sync": SyncVectorEnv, "async": AsyncVectorEnv}[chosen]
    assert [
        f"auto chose {chosen}: {speeds[0]:.0f} env steps/s in process" in r.message for r in caplog.records
    ] == [True]
    env.close()


def test_auto_measures_the_real_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loxodon.envs.vector.AUTO_TRIAL_S", 0.02)
    env = make_vector_env([EnvSpec(ScriptedEnv)] * 2, "auto", num_workers=1)
    obs, _ = env.reset(seed=3)
    np.testing.assert_array_equal(obs["observation"], [[3, 0, 0], [4, 0, 0]])
    env.close()


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"mode": "asink"}, r"env_mode is 'asink'.*'async'.*Fix"),
        ({"mode": "async", "context": "forc"}, r"async_env_mp_context is 'forc'.*'fork'.*Fix"),
        ({"mode": "async", "num_workers": 0}, r"num_workers is 0.*Fix"),
    ],
)
def test_wrong_choices(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_vector_env([EnvSpec(ScriptedEnv)], **kwargs)


def test_no_environments() -> None:
    with pytest.raises(ValueError, match=r"no environments.*parallel_actors"):
        make_vector_env([], "sync")


def test_already_vectorized_refuses_what_it_cannot_map() -> None:
    def next_step() -> gym.vector.VectorEnv:
        return gym.vector.SyncVectorEnv([ScriptedEnv] * 2)

    with pytest.raises(ValueError, match=r"autoreset mode is .*NEXT_STEP.*Fix"):
        make_vector_env([EnvSpec(next_step)], "already_vectorized")
    with pytest.raises(TypeError, match=r"got ScriptedEnv.*needs a gymnasium.vector.VectorEnv.*Fix"):
        make_vector_env([EnvSpec(ScriptedEnv)], "already_vectorized")
    spec = EnvSpec(gymnasium_vector_env, {"num_envs": 2})
    with pytest.raises(ValueError, match=r"2 rows, but parallel_actors is 3.*Fix"):
        make_vector_env([spec] * 3, "already_vectorized")
    with pytest.raises(ValueError, match=r"2 different environments.*Fix"):
        make_vector_env([spec, EnvSpec(ScriptedEnv)], "already_vectorized")


class BatchedFinalEnv(gym.vector.VectorEnv):
    """Reports final observations as one [N, ...] array, or not at all."""

    def __init__(self, has_final: bool) -> None:
        self.num_envs, self.has_final = 2, has_final
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = gym.spaces.Box(-9, 9, (1,), np.float32)
        self.single_action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros((2, 1), np.float32), {}

    def step(self, actions: Any) -> Any:
        ended = np.array([False, True])
        infos = {"final_obs": np.array([[0.0], [8.0]]), "_final_obs": ended} if self.has_final else {}
        return np.zeros((2, 1), np.float32), np.ones(2), np.zeros(2, bool), ended, infos


def test_already_vectorized_takes_batched_final_obs_and_misses_none() -> None:
    env = make_vector_env([EnvSpec(BatchedFinalEnv, {"has_final": True})], "already_vectorized")
    env.reset()
    *_, truncated, infos = env.step([0, 0])
    assert truncated.tolist() == [False, True]
    assert infos["final_obs"]["observation"][1].tolist() == [8.0]
    env = make_vector_env([EnvSpec(BatchedFinalEnv, {"has_final": False})], "already_vectorized")
    env.reset()
    with pytest.raises(ValueError, match=r"without infos\['final_obs'\].*Fix"):
        env.step([0, 0])
