"""Actions of several factors, from the policy's numbering to the environment's own."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from scripted_envs import FactorsEnv, SpacesEnv

from loxodon.envs import ActionCode, ActionMap, EnvSpec, EpsilonGreedy, JointActions, SequenceEnv, gym_env
from loxodon.envs.env_state import missing_layer

TABLE = spaces.MultiDiscrete(np.array([[2, 3], [4, 5]]), dtype=np.int32, start=np.array([[0, 1], [-2, 9]]))  # type: ignore[var-annotated]


@pytest.mark.parametrize(
    ("space", "nvec"),
    [
        (spaces.MultiDiscrete([3, 4]), [3, 4]),
        (spaces.MultiDiscrete([3]), [3]),
        (spaces.MultiDiscrete([3, 4], start=[1, -5]), [3, 4]),
        (TABLE, [2, 3, 4, 5]),
        (spaces.MultiBinary(3), [2, 2, 2]),
        (spaces.MultiBinary((2, 2)), [2, 2, 2, 2]),
    ],
)
def test_every_action_of_the_environment_is_reached_once(space: Any, nvec: list[int]) -> None:
    action_map = ActionMap(space)
    assert action_map.policy_space == spaces.MultiDiscrete(nvec)
    ours = np.stack(np.meshgrid(*map(np.arange, nvec), indexing="ij"), -1).reshape(-1, len(nvec))
    theirs = action_map.to_env(ours)
    assert all(action in space for action in theirs)
    assert len({action.tobytes() for action in theirs}) == np.prod(nvec)
    start = np.broadcast_to(getattr(space, "start", 0), space.shape)
    np.testing.assert_array_equal(np.asarray(theirs).reshape(len(ours), -1), ours + start.reshape(-1))


@pytest.mark.parametrize(
    "space", [spaces.MultiDiscrete([3, 4], start=[1, -5]), TABLE, spaces.MultiBinary((2, 2))]
)
def test_few_combinations_become_one_discrete_action(space: Any) -> None:
    inner = SpacesEnv(space)
    num = int(np.prod(getattr(space, "nvec", np.full(4, 2))))
    env = EnvSpec(lambda: inner, joint_actions=num).build()
    assert env.action_space == spaces.Discrete(num)
    assert missing_layer(JointActions(inner)) == missing_layer(inner)  # it has no state of its own
    env.reset(seed=0)
    for action in range(num):
        env.step(action)
    assert all(action in space for action in inner.received)
    assert len({np.asarray(action).tobytes() for action in inner.received}) == num
    assert EnvSpec(lambda: inner, joint_actions=num - 1).build().action_space == ActionMap(space).policy_space
    with pytest.raises(ValueError, match=r"gym_env.joint_actions is -1, but must be .*Fix"):
        gym_env("CartPole-v1", joint_actions=-1)
    with pytest.raises(TypeError, match=r"The action space is Discrete\(2\), but JointActions supports.*Fix"):
        JointActions(gym.make("CartPole-v1"))
    assert EnvSpec("CartPole-v1", joint_actions=64).build().action_space == spaces.Discrete(2)


def test_batches_keep_their_choices() -> None:
    def batch() -> gym.vector.VectorEnv[Any, Any, Any]:
        return gym.vector.SyncVectorEnv([lambda: SpacesEnv(spaces.MultiDiscrete([3, 4]))] * 2)

    made = EnvSpec(batch, joint_actions=64).build_vector(2)
    assert made.single_action_space == spaces.MultiDiscrete([3, 4])
    made.close()


def test_environments_get_arrays_of_their_own() -> None:
    """An environment that keeps its action must not see the next one in it."""
    inner = SpacesEnv(spaces.MultiDiscrete([3, 4]))
    env = SequenceEnv(inner)
    env.reset(seed=0)
    action = np.array([2, 3])
    env.step(action)
    action[:] = 0
    assert inner.received[0].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("kind", "nvec", "start"),
    [("sync", (2, 3), (0, 5)), ("fork", ((2, 2), (3, 3)), ((0, 1), (2, 3)))],
)
def test_vector_environments_carry_all_factors(kind: str, nvec: Any, start: Any, opened: Any) -> None:
    env = opened(kind, [EnvSpec(FactorsEnv, {"nvec": nvec, "start": start})] * 3)
    flat, first = np.array(nvec).reshape(-1), np.array(start).reshape(-1)
    assert env.single_action_space == spaces.MultiDiscrete(flat)
    env.reset(seed=0)
    rng = np.random.default_rng(0)
    for _ in range(9):
        actions = rng.integers(flat, size=(3, len(flat)))
        _, rewards, *_ = env.step(actions)
        assert rewards.tolist() == [float("".join(map(str, row))) for row in actions + first]


def test_vectorized_environments_carry_all_factors_too(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import vector_builders

    monkeypatch.setattr(vector_builders, "ScriptedEnv", FactorsEnv)
    env = opened("already_vectorized", [EnvSpec(FactorsEnv)] * 2)
    assert env.single_action_space == spaces.MultiDiscrete([2, 3])
    env.reset(seed=0)
    assert env.step(np.array([[1, 2], [0, 1]]))[1].tolist() == [17.0, 6.0]


@pytest.mark.parametrize(
    ("space", "actions", "nvec", "expected"),
    [
        (spaces.MultiDiscrete([2, 3]), [[1, 0], [0, 2]], (2, 3), [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]]),
        (spaces.Discrete(3), [2], None, [[0, 0, 1]]),
        (spaces.Box(-1, 1, (2,)), [[0.5, -1]], None, [[0.5, -1]]),
    ],
)
def test_codes_are_concatenated_one_hots(space: Any, actions: Any, nvec: Any, expected: Any) -> None:
    code, rows = ActionCode(space), np.zeros((len(expected), 1 + len(expected[0])), np.float32)
    code.write(np.array(actions), rows[:, 1:])
    assert (code.width, code.nvec) == (len(expected[0]), nvec)
    assert rows[:, 1:].tolist() == expected
    assert not rows[:, 0].any()


def test_exploration_replaces_whole_actions_by_uniform_ones() -> None:
    space, num_envs = spaces.MultiDiscrete([5, 2]), 4000
    noise = EpsilonGreedy(space, num_envs, 0, eps_start=0.5, eps_end=0.5, randomize_eps=False)
    policy = np.full((num_envs, 2), [4, 1])
    noisy = noise.add_exploration_noise(policy, np.zeros(num_envs, np.int64))
    assert noisy.shape == policy.shape
    assert noisy.dtype == policy.dtype
    table = np.zeros((5, 2))
    np.add.at(table, tuple(noisy.T), 1 / num_envs)
    expected = np.full((5, 2), 0.5 / 10)
    expected[4, 1] += 0.5
    np.testing.assert_allclose(table, expected, atol=0.02)  # factors are never replaced one by one


def test_exploration_probability_above_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"eps_start is 1.5.*at most 1.*Fix:"):
        EpsilonGreedy(spaces.MultiDiscrete([2, 2]), 2, 0, eps_start=1.5)
