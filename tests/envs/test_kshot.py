"""Trials of several episodes of one task."""

from __future__ import annotations

from typing import Any

import gin
import gymnasium as gym
import numpy as np
import pytest
from scripted_envs import ScriptedEnv, SpacesEnv

from loxodon.envs import EnvSpec, KShotWrapper, SequenceEnv, TMazePassive, gym_env, resolve_env


def play(env: Any, num_steps: int, action: Any = 0) -> list[Any]:
    """Observation, reward, terminated, truncated and info of each step, until the trial ends."""
    steps = []
    for _ in range(num_steps):
        steps.append(env.step(action))
        if steps[-1][2] or steps[-1][3]:
            break
    return steps


def test_a_trial_of_three_episodes() -> None:
    """Under seed 0 each episode has two steps, because every reset restarts from the task's seed."""
    env = KShotWrapper(ScriptedEnv(), 3)
    obs, _ = env.reset(seed=0)
    assert (obs["is_first_timestep"].tolist(), obs["attempt_index"]) == ([1.0], 0)
    steps = play(env, 20)
    assert [s[0]["observation"].tolist() for s in steps] == [[0, 0, t] for t in (1, 0, 1, 0, 1, 2)]
    assert [s[0]["is_first_timestep"].tolist() for s in steps] == [[0], [1], [0], [1], [0], [0]]
    assert [int(s[0]["attempt_index"]) for s in steps] == [0, 1, 1, 2, 2, 2]
    assert [s[1] for s in steps] == [10, 20] * 3
    assert [s[2] for s in steps] == [False] * 5 + [True]
    assert not any(s[3] for s in steps)
    given = [{k: v for k, v in s[4].items() if k.startswith("metric/")} for s in steps]
    assert given == [
        {},
        {"metric/return_attempt_0": 30.0, "metric/final_time": 2},
        {},
        {"metric/return_attempt_1": 30.0, "metric/final_time": 2},
        {},
        {"metric/return_attempt_2": 30.0, "metric/final_time": 2, "metric/attempts": 3},
    ]


def test_one_attempt_equals_the_environment_itself() -> None:
    ours, plain = SequenceEnv(KShotWrapper(ScriptedEnv(), 1)), SequenceEnv(ScriptedEnv())
    ours.reset(seed=4)
    plain.reset(seed=4)
    for _ in range(3):
        obs, *rest, _ = ours.step(1)
        plain_obs, *plain_rest, _ = plain.step(1)
        np.testing.assert_array_equal(obs["observation"], plain_obs["observation"])
        assert rest == plain_rest


def test_a_time_limit_ends_the_attempt_not_the_trial() -> None:
    inner = SpacesEnv(gym.spaces.Discrete(2))  # never ends by itself
    env = KShotWrapper(gym.wrappers.TimeLimit(inner, 3), 2)
    env.reset(seed=0)
    steps = play(env, 20)
    assert len(steps) == 6
    assert [s[3] for s in steps] == [False] * 5 + [True]  # flags of the last attempt
    assert [s[4].get("metric/return_attempt_0") for s in steps] == [None, None, 3.0, None, None, None]
    assert steps[-1][4]["metric/return_attempt_1"] == 3.0


def test_the_success_of_an_attempt_is_reported_under_its_number() -> None:
    class Reporting(ScriptedEnv):
        def step(self, action: Any) -> Any:
            return *super().step(action)[:4], {"metric/success": 0.5}

    env = KShotWrapper(Reporting(), 2)
    env.reset(seed=0)
    of_first = {"metric/return_attempt_0": 30.0, "metric/success_attempt_0": 0.5}
    of_trial = {"metric/return_attempt_1": 30.0, "metric/success_attempt_1": 0.5, "metric/attempts": 2}
    reported = {"metric/success": 0.5}
    assert [info for *_, info in play(env, 20)] == [
        reported,
        reported | of_first,
        reported,
        reported | of_trial,
    ]


def test_a_trial_ends_at_its_maximum_length() -> None:
    env = KShotWrapper(ScriptedEnv(), 9, max_trial_len=5)
    env.reset(seed=0)
    steps = play(env, 20)
    assert len(steps) == 5
    assert steps[-1][2:4] == (False, True)
    assert steps[-1][4]["metric/attempts"] == 2
    assert "metric/return_attempt_2" not in steps[-1][4]
    env.reset(seed=0)
    assert len(play(env, 20)) == 5  # the count restarts


class SeededTask(ScriptedEnv):
    """Draws a task at every reset, and records the arguments of its resets."""

    def __init__(self) -> None:
        super().__init__()
        self.resets: list[Any] = []
        self.tasks: list[int] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        gym.Env.reset(self, seed=seed)
        self.resets.append((seed, options))
        self.tasks.append(int(self.np_random.integers(10**9)))
        return super().reset(seed=0)


def test_the_task_stays_within_a_trial_and_changes_between_trials() -> None:
    inner = SeededTask()
    env = KShotWrapper(inner, 2)
    env.reset(seed=7, options={"level": 3})
    play(env, 20)
    for _ in range(2):
        env.reset()
        play(env, 20)
    tasks = inner.tasks
    assert tasks[0::2] == tasks[1::2]
    assert len(set(tasks)) == 3
    assert inner.resets[:2] == [(7, {"level": 3})] * 2
    assert inner.resets[2][1] is None
    again = SeededTask()
    env = KShotWrapper(again, 2)
    env.reset(seed=7)
    play(env, 20)
    env.reset()
    assert again.tasks == tasks[:3]  # the seed fixes the tasks of all following trials


def test_environments_that_keep_their_task_are_reset_without_a_seed() -> None:
    inner = SeededTask()
    env = KShotWrapper(inner, 2, task_seed=False)
    env.reset(seed=7, options={"level": 3})
    play(env, 20)
    env.reset()
    assert inner.resets == [(7, {"level": 3}), (None, {"level": 3}), (None, None)]


def test_dict_observations_are_extended_and_collisions_refused() -> None:
    box = gym.spaces.Box(-1, 1, (2,), np.float32)
    env = KShotWrapper(SpacesEnv(gym.spaces.Discrete(2), gym.spaces.Dict({"a": box})), 2)
    assert sorted(env.observation_space.spaces) == ["a", "attempt_index", "is_first_timestep"]
    obs, _ = env.reset(seed=0)
    assert env.observation_space.contains(obs)
    assert env.observation_space.contains(env.step(0)[0])
    taken = SpacesEnv(gym.spaces.Discrete(2), gym.spaces.Dict({"attempt_index": box}))
    with pytest.raises(ValueError, match=r"observations named \['attempt_index'\].*Fix"):
        KShotWrapper(taken, 2)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"num_attempts": 0}, r"num_attempts is 0.*Fix"),
        ({"num_attempts": 2.0}, r"num_attempts is 2.0.*Fix"),
        ({"num_attempts": None}, r"num_attempts is None.*Fix"),
        ({"num_attempts": 2, "max_trial_len": 0}, r"max_trial_len is 0.*Fix"),
    ],
)
def test_impossible_arguments_are_refused(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        KShotWrapper(ScriptedEnv(), **kwargs)


@pytest.mark.parametrize(
    "env", [TMazePassive(horizon=2), EnvSpec(TMazePassive, {"horizon": 2}), lambda: TMazePassive(horizon=2)]
)
def test_it_takes_environments_recipes_and_callables(env: Any) -> None:
    wrapped = KShotWrapper(env, 2)
    cues = [wrapped.reset(seed=3)[0]["observation"][1]]
    for _ in range(2):
        *_, last = play(wrapped, 3)
        cues.append(last[0]["observation"][1])
    assert cues[0] == cues[1] != 0  # the same side pays in the second attempt


@pytest.mark.parametrize(
    ("kind", "inner"),
    [
        ("sync", "'CartPole-v1'"),
        ("fork", "@TMazePassive()"),
        ("forkserver", "@TMazePassive"),
        ("spawn", "@gym_env()"),
    ],
)
def test_gin_configures_trials_in_every_kind_of_worker(kind: str, inner: str, opened: Any) -> None:
    assert gym_env
    gin.parse_config(
        f"KShotWrapper.env = {inner}\nKShotWrapper.num_attempts = 2\n"
        "gym_env.env_id = 'CartPole-v1'\nTMazePassive.horizon = 3"
    )
    env = opened(kind, [resolve_env(KShotWrapper)] * 2, num_workers=1)
    assert env.env_names == ["TMazePassive" if "TMaze" in inner else "CartPole"] * 2
    env.reset(seed=0)
    metrics, num_trials = [], 0
    for _ in range(60):
        _, _, terminated, truncated, infos = env.step([0, 0])
        metrics += infos.get("metrics", [])
        num_trials += int((terminated | truncated).sum())
    names = [name for _, name, _ in metrics]
    assert num_trials >= 2
    assert names.count("return_attempt_1") == num_trials
    assert names.count("return_attempt_0") - num_trials in (0, 1, 2)
