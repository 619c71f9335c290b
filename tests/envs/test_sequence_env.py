"""Environments with any spaces become environments with dict observations and normalised actions."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_envs import ScriptedEnv, SpacesEnv

from loxodon.data.spaces import ActionMap, ObsLayout
from loxodon.envs import SequenceEnv


@pytest.mark.parametrize(("n", "start"), [(3, 5), (1000, 0), (1, 0), (300, -7)])
def test_discrete_actions_of_any_size_and_start(n: int, start: int) -> None:
    inner = SpacesEnv(spaces.Discrete(n, start=start))
    env = SequenceEnv(inner)
    assert env.action_space == spaces.Discrete(n)
    env.reset(seed=0)
    env.step(0)
    env.step(np.int64(n - 1))
    assert inner.received == [start, start + n - 1]


@settings(max_examples=50, deadline=None)
@given(
    st.floats(-1e3, 1e3), st.floats(1e-3, 1e3), st.floats(-1, 1), st.sampled_from([np.float32, np.float64])
)
def test_box_actions_are_rescaled(low: float, width: float, action: float, dtype: Any) -> None:
    space = spaces.Box(low, low + width, (2, 3), dtype)
    inner = SpacesEnv(space)
    env = SequenceEnv(inner)
    assert env.action_space == spaces.Box(-1, 1, (6,), np.float32)
    env.reset(seed=0)
    env.step(np.full(6, action, np.float32))
    (received,) = inner.received
    assert received.shape == (2, 3)
    assert received.dtype == dtype
    np.testing.assert_allclose(received, low + (action + 1) / 2 * width, rtol=1e-3, atol=1e-3 * width)


def test_box_actions_keep_their_element_order_and_are_clipped() -> None:
    low, high = np.zeros((2, 3)), np.array([[1.0, 2, 3], [4, 5, 6]])
    to_env = ActionMap(spaces.Box(low, high, dtype=np.float64)).to_env
    np.testing.assert_array_equal(to_env(np.full((1, 6), 7.0, np.float32))[0], high)
    np.testing.assert_array_equal(to_env(np.full((1, 6), -7.0, np.float32))[0], low)
    one_up = np.array([[-1, -1, -1, 1, -1, -1]], np.float32)
    np.testing.assert_array_equal(to_env(one_up)[0], [[0, 0, 0], [4, 0, 0]])


def test_huge_bounds_do_not_overflow() -> None:
    top = np.finfo(np.float32).max
    to_env = ActionMap(spaces.Box(-top, top, (1,), np.float32)).to_env
    assert to_env(np.array([[1.0], [0.0]], np.float32)).ravel().tolist() == [top, 0.0]


def test_infinite_bounds_become_a_range_of_two() -> None:
    low, high = np.array([-np.inf, 3, -np.inf, -5], np.float32), np.array([np.inf, np.inf, 4, 5], np.float32)
    env = SequenceEnv(SpacesEnv(spaces.Box(low, high)))
    assert env.action_space == spaces.Box(-1.0, 1.0, (4,), np.float32)
    ends = np.array([[-1.0] * 4, [0.5] * 4], np.float32)
    given = env.action_map.to_env(ends)
    np.testing.assert_array_equal(given, [[-1, 3, 2, -5], [0.5, 4.5, 3.5, 2.5]])
    np.testing.assert_array_equal(env.action_map.from_env(given), ends)
    with pytest.raises(ValueError, match=r"beyond the finite bounds that replace infinite ones.*Fix: give"):
        env.action_map.from_env(np.array([[7.0, 4.0, 3.0, 0.0]]))


@pytest.mark.parametrize(
    ("space", "error", "words"),
    [
        (spaces.Box(0, 255, (2,), np.uint8), TypeError, r"integer Box.*Allowed are.*Fix"),
        (spaces.Tuple([spaces.Discrete(2)]), TypeError, r"Tuple.*MultiDiscrete, MultiBinary and Box.*Fix"),
        (spaces.Text(4), TypeError, r"action space is Text.*Fix"),
    ],
)
def test_action_spaces_that_cannot_be_mapped_are_refused(
    space: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        SequenceEnv(SpacesEnv(space))


def test_a_single_observation_gets_the_common_key() -> None:
    env = SequenceEnv(ScriptedEnv())
    assert list(env.observation_space) == ["observation"]
    obs, _ = env.reset(seed=4)
    np.testing.assert_array_equal(obs["observation"], [4, 0, 0])
    obs, reward, terminated, truncated, _ = env.step(2)
    np.testing.assert_array_equal(obs["observation"], [4, 0, 1])
    assert (reward, terminated, truncated) == (12.0, False, False)


def test_discrete_observations_stay_integers_and_start_at_zero() -> None:
    layout = ObsLayout(spaces.Discrete(4, start=-2))
    assert layout.space["observation"] == spaces.Discrete(4)
    flat = layout.flatten(np.int64(1))["observation"]
    assert (flat.shape, flat.dtype, int(flat)) == ((), np.int64, 3)
    multi = ObsLayout(spaces.MultiDiscrete([3, 4]))
    assert multi.flatten([2, 3])["observation"].tolist() == [2, 3]


def test_nested_spaces_are_flattened_in_the_order_of_the_space() -> None:
    boxes = [spaces.Box(i, i, (1,), np.float32) for i in range(12)]
    space = spaces.Dict(
        {"a": spaces.Dict({"b": spaces.Tuple(boxes)}), "a-b": spaces.Box(20, 20, (2,), np.int32)}
    )
    layout = ObsLayout(space)
    flat = layout.flatten(space.sample())
    assert list(flat) == list(layout.space.spaces)
    assert {f"a/b/{i}": float(flat[f"a/b/{i}"][0]) for i in range(12)} == {f"a/b/{i}": i for i in range(12)}
    assert flat["a-b"].tolist() == [20, 20]


def test_colliding_names_are_refused() -> None:
    box = spaces.Box(0, 1, (1,))
    space = spaces.Dict({"a": spaces.Dict({"b": box}), "a/b": box})
    with pytest.raises(ValueError, match=r"share a key.*Fix"):
        ObsLayout(space)


@pytest.mark.parametrize(
    "space", [spaces.Graph(spaces.Discrete(3), None), spaces.Sequence(spaces.Discrete(2))]
)
def test_observations_without_array_form_are_refused(space: Any) -> None:
    nested = spaces.Dict({"mission": space, "x": spaces.Discrete(2)})
    with pytest.raises(TypeError, match=r"'mission' has the space .*Allowed are Box.*Fix"):
        SequenceEnv(SpacesEnv(spaces.Discrete(2), nested))


def test_the_name_is_that_of_the_environment_or_its_id() -> None:
    assert SequenceEnv(gym.make("CartPole-v1")).env_name == "CartPole"
    assert SequenceEnv(SpacesEnv(spaces.Discrete(2))).env_name == "SpacesEnv"
    assert SequenceEnv(SpacesEnv(spaces.Discrete(2)), "mine").env_name == "mine"
    dynamic = SequenceEnv(gym.wrappers.TimeLimit(ScriptedEnv(num_names=2), 100))
    dynamic.reset(seed=0)
    dynamic.reset()
    assert dynamic.env_name == "scripted1"


def test_only_gymnasium_environments_are_accepted() -> None:
    with pytest.raises(TypeError, match=r"got str.*gymnasium.Env.*Fix"):
        SequenceEnv("CartPole-v1")  # type: ignore[arg-type]
