from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from loxodon.data import MinariDataset, Trajectory, load_trajectory, split_episodes
from loxodon.data.minari import EpisodeCodec, guess_spaces
from loxodon.data.spaces import ActionMap
from loxodon.envs import SequenceEnv

MakeTraj = Callable[..., Trajectory]
MakeMinari = Callable[..., Any]


class Nested(gym.Env[Any, Any]):
    """Dict and Tuple observations, integers that start at -1; ends after 3 or is cut after 5 steps."""

    def __init__(self, is_discrete: bool) -> None:
        self.observation_space = spaces.Dict(
            {
                "zone": spaces.Discrete(4, start=-1),
                "arm": spaces.Tuple(
                    (spaces.Box(-9, 9, (2,), np.float64), spaces.Box(0, 255, (3, 2), np.uint8))
                ),
            }
        )
        low, high = np.array([-2.0, 0.0], np.float32), np.array([2.0, 5.0], np.float32)
        self.action_space = spaces.Discrete(3, start=2) if is_discrete else spaces.Box(low, high)
        self.rng, self.episode = np.random.default_rng(0), -1
        self.record: dict[str, list[Any]] = {}

    def _obs(self) -> dict[str, Any]:
        obs = {
            "zone": np.int64(self.rng.integers(-1, 3)),
            "arm": (self.rng.uniform(-9, 9, 2), self.rng.integers(0, 256, (3, 2), np.uint8)),
        }
        self.record["observations"].append(obs)
        return obs

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episode, self.time = self.episode + 1, 0
        self.record = {name: [] for name in ("observations", "actions", "rewards", "ends")}
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        ends = self.episode % 2 == 0 and self.time == 3, self.episode % 2 == 1 and self.time == 5
        reward = float(self.rng.normal())
        for name, value in (("actions", action), ("rewards", reward), ("ends", ends)):
            self.record[name].append(value)
        return self._obs(), reward, *ends, {}


def raw_columns(env: Nested) -> dict[str, Any]:
    """What Minari's own recorder would store of the episode just played."""
    obs = env.record["observations"]
    ends = np.array(env.record["ends"])
    return {
        "observations": {
            "zone": np.array([o["zone"] for o in obs]),
            "arm": tuple(np.array([o["arm"][i] for o in obs]) for i in range(2)),
        },
        "actions": np.array(env.record["actions"]),
        "rewards": np.array(env.record["rewards"]),
        "terminations": ends[:, 0],
        "truncations": ends[:, 1],
        "infos": {},
    }


@pytest.mark.parametrize("is_discrete", [True, False])
def test_episodes_look_as_the_environment_shows_them_to_a_policy(
    is_discrete: bool, make_minari: MakeMinari, configured: Callable[..., MinariDataset]
) -> None:
    """Every number of the import equals what SequenceEnv showed or was given during the recording."""
    env = Nested(is_discrete)
    shown = SequenceEnv(env)
    columns, seen = [], []
    for _ in range(4):
        obs, _ = shown.reset()
        steps: list[Any] = [(obs, None, 0.0, False)]
        while True:
            action = shown.action_space.sample()
            obs, reward, terminated, truncated, _ = shown.step(action)
            steps.append((obs, action, reward, terminated))
            if terminated or truncated:
                break
        columns.append(raw_columns(env))
        seen.append(steps)
    make_minari("test/nested-v0", columns, env)
    trajs = [load_trajectory(file.path) for file in configured("test/nested-v0")._buffer.files]
    assert [len(traj) for traj in trajs] == [3, 5, 3, 5]
    codec = EpisodeCodec(env.observation_space, env.action_space)
    for traj, steps, raw in zip(trajs, seen, columns, strict=True):
        back = codec.to_columns(traj)  # and the way back gives what was recorded
        for i in range(2):
            np.testing.assert_array_equal(back["observations"]["arm"][i], raw["observations"]["arm"][i])
        np.testing.assert_array_equal(back["observations"]["zone"], raw["observations"]["zone"])
        np.testing.assert_allclose(back["actions"], raw["actions"], atol=1e-6)
        for name in ("terminations", "truncations"):
            np.testing.assert_array_equal(back[name], raw[name])
        assert set(traj.obs) == set(shown.observation_space.spaces) == {"arm/0", "arm/1", "zone"}
        for t, (obs, action, reward, terminated) in enumerate(steps):
            for key, value in obs.items():
                np.testing.assert_array_equal(traj.obs[key][t], value)
                assert traj.obs[key].dtype == value.dtype
            assert traj.time_idxs[t, 0] == t
            if t == 0:
                assert not traj.rl2s[0].any()
                continue
            row = np.eye(3)[action] if is_discrete else action
            np.testing.assert_allclose(traj.rl2s[t], [np.float32(reward), *row], atol=1e-6)
            np.testing.assert_allclose(traj.actions[t - 1], row, atol=1e-6)
            assert traj.rews[t - 1, 0] == np.float32(reward)
            assert traj.dones[t - 1, 0] == terminated
    assert trajs[0].dones[-1, 0]
    assert not trajs[1].dones.any()  # truncated


@pytest.mark.parametrize(
    "space", [spaces.MultiDiscrete(np.array([[2, 3]]), start=np.array([[5, 1]])), spaces.MultiBinary(3)]
)
def test_actions_of_several_factors_there_and_back(space: Any) -> None:
    action_map = ActionMap(space)
    space.seed(0)
    actions = np.stack([space.sample() for _ in range(20)])
    indices = action_map.from_env(actions)
    assert indices.min() == 0
    np.testing.assert_array_equal(action_map.to_env(indices), actions)
    with pytest.raises(ValueError, match=r"Actions range from .*Fix"):
        action_map.from_env(actions + 7)


def test_actions_outside_the_bounds_are_clipped_and_fixed_ones_are_zero() -> None:
    action_map = ActionMap(spaces.Box(np.array([-1.0, 3.0], np.float32), np.array([3.0, 3.0], np.float32)))
    rows = action_map.from_env(np.array([[-1, 3], [1, 3], [9, 3]]))
    np.testing.assert_array_equal(rows, [[-1, 0], [0, 0], [1, 0]])
    np.testing.assert_array_equal(action_map.to_env(rows), [[-1, 3], [1, 3], [3, 3]])


def test_spaces_are_guessed_from_the_arrays(make_traj: MakeTraj) -> None:
    obs, action = guess_spaces(make_traj(3))
    assert action == spaces.Discrete(3)
    assert isinstance(obs, spaces.Dict)
    assert obs["image"] == spaces.Box(0, 255, (2, 2), np.uint8)
    assert obs["position"] == spaces.Box(-np.inf, np.inf, (1,), np.float32)
    actions, ends = np.array([[0, 2], [1, 1], [1, 0]]), np.array([False, False, True])
    (traj,) = split_episodes(np.zeros((3, 1)), actions, np.ones(3), ends, 0 * ends, num_actions=[2, 3])
    assert guess_spaces(traj)[1] == spaces.MultiDiscrete([2, 3])
    np.testing.assert_array_equal(EpisodeCodec(*guess_spaces(traj)).to_columns(traj)["actions"], actions)


@pytest.mark.parametrize(
    ("obs", "action", "error", "match"),
    [
        (spaces.Text(5), spaces.Discrete(2), TypeError, "texts, which trajectories cannot hold.*Fix:"),
        (spaces.Discrete(2), spaces.Text(3), TypeError, "Discrete, MultiDiscrete, MultiBinary and Box"),
        (spaces.Discrete(2), spaces.Box(0, 9, (1,), np.int64), TypeError, "Box with a float dtype"),
    ],
)
def test_spaces_that_cannot_be_stored_are_refused(
    obs: Any, action: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        EpisodeCodec(obs, action)


def test_episodes_that_contradict_their_spaces_are_refused() -> None:
    codec = EpisodeCodec(spaces.Box(-1, 1, (2,)), spaces.Discrete(2))
    episode: dict[str, Any] = {"id": 7, "rewards": [0.0, 1.0], "terminations": [False, True]}
    with pytest.raises(ValueError, match=r"of episode 7 has the shape \(2, 2\).*\(3, 2\)"):
        codec.to_trajectory(SimpleNamespace(observations=np.zeros((2, 2)), actions=[0, 1], **episode), "env")
    with pytest.raises(ValueError, match="Actions range from 0 to 2"):
        codec.to_trajectory(SimpleNamespace(observations=np.zeros((3, 2)), actions=[0, 2], **episode), "env")
