"""The state of an environment can be moved to another one, which then continues identically."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers

from loxodon.envs import (
    ClassicControlState,
    EnvSpec,
    KShotWrapper,
    MazeRunner,
    TMazePassive,
)
from loxodon.envs.env_state import get_state, set_state, state_problem
from loxodon.envs.vector.make import make_vector_env
from loxodon.envs.vector.sync import SyncVectorEnv

MAKERS: dict[str, Callable[[], gym.Env[Any, Any]]] = {
    "tmaze": lambda: TMazePassive(horizon=6),
    "maze": lambda: MazeRunner(size=5, num_goals=2, time_limit=20, randomize_actions=True),
    "cartpole": lambda: ClassicControlState("CartPole-v1"),
    "pendulum": lambda: ClassicControlState("Pendulum-v1"),
    "acrobot": lambda: ClassicControlState("Acrobot-v1"),
    "mountain car": lambda: ClassicControlState("MountainCarContinuous-v0"),
    "time limit": lambda: wrappers.TimeLimit(TMazePassive(horizon=6), 4),
    "scaled": lambda: wrappers.TransformReward(TMazePassive(horizon=6), lambda r: 2 * r),
    "trials": lambda: KShotWrapper(ClassicControlState("CartPole-v1"), num_attempts=3),
}


def plain(obs: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {key: value.tobytes() for key, value in obs.items()}


def play(env: gym.Env[Any, Any], actions: list[Any]) -> list[Any]:
    """The environment's answers to `actions`, including resets."""
    answers = []
    for action in actions:
        obs, reward, terminated, truncated, info = env.step(action)
        answers += [plain(obs), reward, terminated, truncated, info]
        if terminated or truncated:
            answers.append(plain(env.reset()[0]))
    return answers


@pytest.mark.parametrize("name", list(MAKERS))
def test_another_environment_continues_identically(name: str) -> None:
    one, other = (EnvSpec(MAKERS[name]).build() for _ in range(2))
    one.reset(seed=3)
    one.action_space.seed(0)
    actions = [one.action_space.sample() for _ in range(60)]
    play(one, actions[:2])
    state = get_state(one)
    expected = play(one, actions[2:])  # these steps follow the saved state
    other.reset(seed=8)
    set_state(other, state)
    assert play(other, actions[2:]) == expected


def test_a_limit_of_the_vector_environment_is_part_of_the_state() -> None:
    one, other = (SyncVectorEnv([EnvSpec(MAKERS["tmaze"])]) for _ in range(2))
    one.reset(seed=0)
    one.set_attr("max_episode_length", 3)
    one.step([0])
    one.step([0])
    other.reset(seed=1)
    other.set_states(one.get_states())
    assert other.get_attr("max_episode_length") == (3,)
    assert [envs.step([0])[3].tolist() for envs in (one, other)] == [[True], [True]]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_vector_environments_and_their_names_are_restored(mode: str) -> None:
    specs = [EnvSpec(NamedMaze) for _ in range(3)]
    one, other = (make_vector_env(specs, mode, num_workers=2) for _ in range(2))
    one.reset(seed=0)
    for _ in range(9):
        one.step([0, 0, 0])
    assert len(set(one.env_names)) > 1 or one.env_names[0] != "episode 1"
    other.reset(seed=5)
    other.set_states(one.get_states())
    assert other.env_names == one.env_names
    for _ in range(20):
        first, second = (envs.step([0, 0, 1]) for envs in (one, other))
        assert np.array_equal(first[0]["observation"], second[0]["observation"])
        assert other.env_names == one.env_names
    one.close()
    other.close()


class NamedMaze(TMazePassive):
    """Uses the number of its episode as its name."""

    def __init__(self) -> None:
        super().__init__(horizon=3)
        self.env_name, self.count = "episode 0", 0

    def reset(self, **kwargs: Any) -> Any:
        self.count += 1
        self.env_name = f"episode {self.count}"
        return super().reset(**kwargs)

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "count": self.count}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.count = state["count"]
        self.env_name = f"episode {self.count}"


class Batched(gym.vector.VectorEnv[Any, Any, Any]):
    """A vector environment that counts its steps; rows end after five and are reset by the next step."""

    num_envs = 2
    single_observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    single_action_space = gym.spaces.Discrete(2)
    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": "NextStep"}

    def __init__(self) -> None:
        self.clocks = np.zeros(2, np.int64)

    def reset(self, **_: Any) -> Any:
        self.clocks[:] = [0, 2]
        return self._obs(), {}

    def step(self, actions: Any) -> Any:
        self.clocks = np.where(self.clocks == 5, 0, self.clocks + 1)
        return self._obs(), np.zeros(2), self.clocks == 5, np.zeros(2, bool), {}

    def _obs(self) -> np.ndarray:
        return self.clocks[:, None].astype(np.float32)


class StoredBatch(Batched):
    def get_state(self) -> dict[str, Any]:
        return {"clocks": self.clocks.copy()}

    def set_state(self, state: dict[str, Any]) -> None:
        self.clocks = state["clocks"].copy()


def test_an_environment_with_its_own_batch_axis_has_a_state() -> None:
    assert "Batched cannot be stored" in str(
        make_vector_env([EnvSpec(Batched)] * 2, "already_vectorized").state_problem()
    )
    one, other = (make_vector_env([EnvSpec(StoredBatch)] * 2, "already_vectorized") for _ in range(2))
    one.reset()
    for _ in range(3):
        one.step([0, 0])  # the next step resets the second row
    other.reset()
    other.set_states(one.get_states())
    assert one.state_problem() is None
    for _ in range(4):
        results = [envs.step([0, 0]) for envs in (one, other)]
        assert np.array_equal(results[0][0]["observation"], results[1][0]["observation"])
        ignored = [result[-1].get("_ignore", np.zeros(2, bool)).tolist() for result in results]
        assert ignored[0] == ignored[1]


@pytest.mark.parametrize(
    ("env", "missing"),
    [
        (lambda: gym.make("CartPole-v1"), "CartPoleEnv"),
        (lambda: wrappers.NormalizeReward(TMazePassive(horizon=3)), "NormalizeReward"),
        (lambda: KShotWrapper(gym.make("CartPole-v1"), num_attempts=2), "CartPoleEnv"),
    ],
)
def test_a_state_that_cannot_be_stored_is_named(env: Any, missing: str) -> None:
    problem = state_problem(EnvSpec(env).build())
    assert problem is not None
    assert f"{missing} has no get_state() and set_state(state)" in problem


def test_a_state_of_another_environment_is_refused() -> None:
    one, other = EnvSpec(MAKERS["tmaze"]).build(), EnvSpec(MAKERS["time limit"]).build()
    other.reset(seed=0)
    with pytest.raises(
        ValueError,
        match=r"is that of an environment TimeLimit > TMazePassive, but this environment is .*Fix:",
    ):
        set_state(one, get_state(other))


def test_classic_control_without_its_attributes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot store CartPoleEnv, which has none of.*Fix:"):
        ClassicControlState("CartPole-v1", attributes=("position",))
    with pytest.raises(ValueError, match=r"cannot store NormalizeReward.*Fix:"):
        ClassicControlState(wrappers.NormalizeReward(gym.make("CartPole-v1")))
