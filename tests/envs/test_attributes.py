"""Attributes and methods of environments through every kind of vector environment; the length of episodes."""

from __future__ import annotations

import os
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from scripted_envs import ScriptedEnv
from vector_builders import VECTORIZED_MODES, build, gymnasium_vector_env

from loxodon.envs import EnvError, EnvHalves, EnvSpec, SequenceEnv, make_vector_env


class Adjustable(ScriptedEnv):
    """Has an attribute to set and a method to call."""

    def __init__(self) -> None:
        super().__init__()
        self.level = 0

    def level_times(self, factor: int, *, plus: int = 0) -> int:
        return self.level * factor + plus


class Outer(gym.Wrapper):
    """A wrapper with an attribute of its own."""

    def __init__(self) -> None:
        super().__init__(Adjustable())
        self.colour = "red"


class Endless(gym.Env):
    """Never ends by itself; observes the timestep."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        return np.full(1, self.time, np.float32), 0.0, False, False, {}


def adjustable(opened: Any, kind: str, num_envs: int = 3) -> Any:
    if kind not in VECTORIZED_MODES:
        return opened(kind, [EnvSpec(Outer)] * num_envs)
    mode = gym.vector.AutoresetMode(VECTORIZED_MODES[kind])
    made = gym.vector.SyncVectorEnv([Outer] * num_envs, autoreset_mode=mode)
    return make_vector_env([EnvSpec(lambda: made)], "already_vectorized")


@pytest.mark.parametrize("kind", ["sync", "fork", "already_vectorized", "autoreset disabled"])
def test_attributes_of_every_environment_can_be_read_and_set(opened: Any, kind: str) -> None:
    env = adjustable(opened, kind)
    assert env.get_attr("colour") == ("red",) * 3
    assert env.has_attr("level") == (True,) * 3
    assert env.has_attr("levle") == (False,) * 3
    env.set_attr("level", 2)
    assert env.call("level_times", 10, plus=1) == (21, 21, 21)
    env.set_attr("level", [1, 2, 3])
    assert env.call("level_times", 10) == (10, 20, 30)
    env.reset(seed=0)
    assert env.step(np.zeros(3, np.int64))[1].tolist() == [10.0, 10.0, 10.0]
    if kind in VECTORIZED_MODES:
        return
    assert env.call_each("level_times", [(1,), (2,), (3,)]) == (1, 4, 9)
    with pytest.raises(ValueError, match=r"2 argument tuples for 3 environments.*Fix"):
        env.call_each("level_times", [(1,), (2,)])
    with pytest.raises(ValueError, match=r"2 values for 3 environments.*Fix"):
        env.set_attr("level", [1, 2])
    with pytest.raises(ValueError, match=r"call got 'step'.*Fix"):
        env.call("step", 0)


def test_a_missing_attribute_is_named_with_the_wrappers() -> None:
    env = build("sync", [EnvSpec(Outer)])
    words = r"no attribute 'levle' \(searched: Outer > Adjustable\). Did you mean 'level'\? Fix"
    with pytest.raises(AttributeError, match=words):
        env.set_attr("levle", 1)
    with pytest.raises(AttributeError, match=words):
        env.call("levle")
    env.close()
    env = build("fork", [EnvSpec(Outer)])
    with pytest.raises(EnvError, match=r"Environment 0 failed in set_attr: AttributeError: .*" + words):
        env.set_attr("levle", 1)
    env = build("already_vectorized", [EnvSpec(ScriptedEnv)])
    with pytest.raises(AttributeError, match=r"SyncVectorEnv.*nor its rows have the attribute 'levle'.*Fix"):
        env.set_attr("levle", 1)
    env.close()


def test_attributes_cannot_be_read_while_the_environments_step(opened: Any) -> None:
    env = adjustable(opened, "fork")
    env.reset(seed=0)
    env.step_async([0, 0, 0])
    with pytest.raises(RuntimeError, match=r"while the environments step.*step_wait"):
        env.get_attr("level")
    env.step_wait()
    assert env.get_attr("level") == (0, 0, 0)


def test_two_halves_act_as_one_environment(opened: Any) -> None:
    halves = EnvHalves([opened("fork", [EnvSpec(Outer)] * n, num_workers=1) for n in (2, 1)])
    halves.set_attr("level", [1, 2, 3])
    assert halves.get_attr("level") == (1, 2, 3)
    assert halves.call_each("level_times", [(1,), (10,), (100,)]) == (1, 20, 300)
    assert halves.has_attr("levle") == (False,) * 3
    halves.set_attr("level", 5)
    assert halves.call("level_times", 2, plus=1) == (11, 11, 11)
    with pytest.raises(ValueError, match=r"4 values for 3 environments"):
        halves.set_attr("level", [1, 2, 3, 4])
    assert not hasattr(halves, "step")  # each half steps by itself
    halves.close()
    assert all(half.closed for half in halves.halves)


class OwnBatch(gym.vector.SyncVectorEnv):
    """A vector environment that answers for all its rows."""

    length = 7

    def total(self, plus: int) -> int:
        return self.length + plus


def test_a_vector_environment_may_have_attributes_of_its_own() -> None:
    made = OwnBatch([ScriptedEnv] * 2, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    env = make_vector_env([EnvSpec(lambda: made)], "already_vectorized")
    assert env.get_attr("length") == (7, 7)
    env.set_attr("length", 8)
    assert (made.length, OwnBatch.length) == (8, 7)
    assert env.call("total", 1) == (9,)
    with pytest.raises(ValueError, match=r"different arguments of 'total'.*Fix"):
        env.call_each("total", [(1,), (2,)])
    env.close()


def test_a_vector_environment_without_attribute_access_is_explained() -> None:
    class Closed(gym.vector.VectorWrapper):
        @property
        def unwrapped(self) -> Any:
            return self

    made = Closed(gymnasium_vector_env(2))
    env = make_vector_env([EnvSpec(lambda: made)], "already_vectorized")
    assert env.has_attr("level") == (False, False)
    with pytest.raises(AttributeError, match=r"gives no access to its rows.*Fix"):
        env.get_attr("level")
    env.close()


def lengths_of_episodes(env: Any, num_steps: int) -> list[int]:
    """Lengths of the first environment's episodes that end within this number of steps."""
    found, length = [], 0
    for _ in range(num_steps):
        obs, _, terminated, truncated, infos = env.step(np.zeros(env.num_envs, np.int64))
        length += 1
        assert not terminated.any()
        if truncated[0]:
            assert infos["final_obs"]["observation"][0, 0] >= length
            assert obs["observation"][0, 0] == 0.0
            found.append(length)
            length = 0
    return found


@pytest.mark.parametrize("kind", ["sync", "fork"])
def test_every_environment_has_a_settable_length_of_episodes(opened: Any, kind: str) -> None:
    env = opened(kind, [EnvSpec(Endless)] * 2, num_workers=1)
    env.set_attr("max_episode_length", 3)
    assert env.get_attr("max_episode_length") == (3, 3)
    env.reset(seed=0)
    assert lengths_of_episodes(env, 7) == [3, 3]  # a third episode has taken one step
    env.set_attr("max_episode_length", 5)
    assert lengths_of_episodes(env, 9) == [4, 5]  # the running episode counts from its own reset
    env.set_attr("max_episode_length", None)
    assert lengths_of_episodes(env, 50) == []


class SpoiltReset(Endless):
    """Reports its number of resets, and observes `later` in every reset but the first."""

    def __init__(self, later: Any) -> None:
        self.later, self.num_resets = later, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset()
        self.num_resets += 1
        return [0.0] if self.num_resets == 1 else self.later, {"metric/num_resets": self.num_resets}


def begin_second_episode(opened: Any, kind: str, later: Any) -> Any:
    made = gym.vector.SyncVectorEnv(
        [lambda: SpoiltReset(later)] * 2, autoreset_mode=gym.vector.AutoresetMode.DISABLED
    )
    is_vector = kind == "already_vectorized"
    env = (
        make_vector_env([EnvSpec(lambda: made)], kind)
        if is_vector
        else opened(kind, [EnvSpec(SpoiltReset, {"later": later})] * 2, num_workers=2)
    )
    env.reset(seed=0)
    env.step(np.zeros(2, np.int64))
    return env, env.begin_episodes(np.array([False, True]))


@pytest.mark.parametrize("kind", ["sync", "fork", "already_vectorized"])
def test_an_episode_that_begins_early_is_checked_like_any_other(opened: Any, kind: str) -> None:
    env, metrics = begin_second_episode(opened, kind, [5.0])
    assert metrics == [(1, "num_resets", 2.0)]
    assert env.buffers.obs["observation"].tolist() == [[1.0], [5.0]]
    assert env.buffers.final_obs["observation"][1].tolist() == [1.0]
    words = r"The environment \S+ returned NaN .*environment 1, step 1 since.*Fix"
    with pytest.raises(EnvError if kind == "fork" else ValueError, match=words):
        begin_second_episode(opened, kind, [np.nan])


def test_an_environments_own_length_takes_precedence() -> None:
    class Own(Endless):
        max_episode_length = 9

    env = build("sync", [EnvSpec(Own)])
    env.set_attr("max_episode_length", 4)
    assert env.get_attr("max_episode_length") == (4,)
    env.reset(seed=0)
    assert lengths_of_episodes(env, 20) == []  # the environment does not use the attribute
    env.close()


def test_answers_come_from_the_process_of_the_environment(opened: Any) -> None:
    class Here(ScriptedEnv):
        def pid(self) -> int:
            return os.getpid()

    here = opened("sync", [EnvSpec(Here)]).call("pid")
    there = opened("fork", [EnvSpec(Here)] * 2).call("pid")
    assert here == (os.getpid(),)
    assert os.getpid() not in there
    assert len(set(there)) == 2
    assert isinstance(SequenceEnv(Here()), gym.Wrapper)
