"""Environments that show only some entries of their observation."""

from __future__ import annotations

import pickle
from typing import Any

import gin
import gymnasium as gym
import numpy as np
import pytest

from loxodon.envs import EnvSpec, PartialObs, make_vector_env, partial_env, resolve_env


class Wide(gym.Env[Any, Any]):
    """Observations of three bounded float64 entries."""

    def __init__(self, space: gym.Space[Any] | None = None) -> None:
        bounds = np.array([1.0, 2.0, 3.0])
        self.observation_space = gym.spaces.Box(-bounds, 10 * bounds, dtype=np.float64)
        if space is not None:
            self.observation_space = space
        self.action_space = gym.spaces.Discrete(2)


@gin.configurable(module="tests.partial")
def partial_holder(make_env: Any = gin.REQUIRED) -> Any:
    """Receives a reference as Experiment does."""
    return make_env


def cartpole_positions() -> EnvSpec:
    return partial_env("CartPole-v1", keep=(0, 2))


def test_only_the_kept_entries_are_seen_and_everything_else_stays() -> None:
    whole, part = gym.make("CartPole-v1"), cartpole_positions().build_raw()
    seen = part.reset(seed=3)[0]
    np.testing.assert_array_equal(seen, whole.reset(seed=3)[0][[0, 2]])
    for t in range(4):
        expected, obs = whole.step(t % 2), part.step(t % 2)
        np.testing.assert_array_equal(obs[0], expected[0][[0, 2]])
        assert obs[1:] == expected[1:]


def test_bounds_order_and_dtype_of_the_space_match_the_entries() -> None:
    space = PartialObs(Wide(), (2, 0)).observation_space
    assert space == gym.spaces.Box(np.array([-3.0, -1.0]), np.array([30.0, 10.0]), dtype=np.float64)
    assert space.dtype == np.float64
    whole, part = gym.make("CartPole-v1").observation_space, cartpole_positions().build_raw()
    assert isinstance(whole, gym.spaces.Box)
    assert part.observation_space == gym.spaces.Box(whole.low[[0, 2]], whole.high[[0, 2]], dtype=np.float32)
    assert part.reset(seed=0)[0] in part.observation_space


def test_the_recipe_reaches_workers() -> None:
    spec: EnvSpec = pickle.loads(pickle.dumps(cartpole_positions()))
    assert spec == cartpole_positions()
    env = make_vector_env([spec] * 2, "sync")
    obs, _ = env.reset(seed=0)
    assert obs["observation"].shape == (2, 2)
    assert obs["observation"].dtype == np.float32
    assert env.env_names == ["CartPole"] * 2


@pytest.mark.parametrize("reference", ["@partial_env()", "@partial_env"])
def test_gin_can_name_it(reference: str) -> None:
    gin.parse_config(
        f"partial_holder.make_env = {reference}\npartial_env.env_id = 'CartPole-v1'\n"
        "partial_env.keep = (2,)\npartial_env.kwargs = {'max_episode_steps': 1}\n"
        "partial_env.env_name = 'Angle'"
    )
    env = resolve_env(partial_holder()).build()
    assert env.observation_space["observation"].shape == (1,)
    env.reset(seed=0)
    assert env.step(0)[3]
    if reference.endswith(")"):
        assert env.env_name == "Angle"


@pytest.mark.parametrize("keep", [(), (0, 4), (-1,), (1, 1), (0.5,)])
def test_missing_entries_are_refused(keep: Any) -> None:
    with pytest.raises(ValueError, match=r"different whole numbers from 0 to 3.*Fix: set partial_env"):
        partial_env("CartPole-v1", keep=keep).build()


@pytest.mark.parametrize(
    "space",
    [gym.spaces.Discrete(3), gym.spaces.Box(0, 1, (2, 2)), gym.spaces.Dict({"a": gym.spaces.Box(0, 1)})],
)
def test_other_observations_are_refused(space: gym.Space[Any]) -> None:
    with pytest.raises(ValueError, match=r"entries of a flat observation.*Fix: name an environment"):
        PartialObs(Wide(space), (0,))
