"""Deterministic environments for the tests, in a module of their own so that spawned workers find them."""

from __future__ import annotations

import copy
import os
import random
import signal
import string
import sys
import time
from typing import Any

import gin
import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode


@gin.configurable
class ScriptedEnv(gym.Env):
    """obs = [seed, episode, timestep]; episodes alternate between termination and truncation.

    Episode e of seed s lasts 2 + (s + e) % 3 steps. The reward is 10 * timestep + action.
    """

    def __init__(self, start: int = 0, gain: float = 1.0, num_names: int = 1) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = spaces.Discrete(4, start=start)
        self.start, self.gain, self.num_names = start, gain, num_names
        self.seed_, self.episode, self.time = 0, -1, 0
        self.received: list[Any] = []

    @property
    def env_name(self) -> str:
        return f"scripted{self.episode % self.num_names}"

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.seed_, self.episode = seed, -1
        self.episode, self.time = self.episode + 1, 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        if not self.action_space.contains(action):
            raise ValueError(f"bad action {action!r}")
        self.received.append(action)
        self.time += 1
        ended = self.time == 2 + (self.seed_ + self.episode) % 3
        is_even = self.episode % 2 == 0
        info = {"metric/final_time": self.time, "other": 1} if ended else {}
        reward = self.gain * (10.0 * self.time + action - self.start)
        return self._obs(), reward, ended and is_even, ended and not is_even, info

    def render(self) -> Any:
        return np.full((2, 2), self.time)

    def _obs(self) -> np.ndarray:
        return np.array([self.seed_, self.episode, self.time], np.float32)


class FactorsEnv(ScriptedEnv):
    """Takes actions of several factors; the reward is the number that their digits make."""

    def __init__(self, nvec: Any = (2, 3), start: Any = (0, 5)) -> None:
        super().__init__()
        self.action_space = spaces.MultiDiscrete(np.array(nvec), start=np.array(start))

    def step(self, action: Any) -> Any:
        if action not in self.action_space:
            raise ValueError(f"bad action {action!r}")
        self.received.append(action)
        self.time += 1
        ended = self.time == 4
        return self._obs(), float("".join(map(str, action.reshape(-1)))), ended, False, {}


@gin.configurable
class WrappingEnv(gym.Wrapper):
    """An environment made from another one that gin names."""

    def __init__(self, inner: Any = gin.REQUIRED, extra: Any = None) -> None:
        super().__init__(inner)
        self.extra = extra


class SubclassOfScripted(ScriptedEnv):
    """Inherits the gin-bound constructor."""


class DrawingEnv(ScriptedEnv):
    """Draws from the global random generators at construction and in each episode, like many environments."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = self._draw()

    def _draw(self) -> float:
        return float(np.random.uniform() + random.random())  # noqa: NPY002 - that is the point

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.drawn = self._draw()
        return self._obs(), {}

    def _obs(self) -> np.ndarray:
        return np.array([self.seed_, self.drawn, self.time], np.float32)

    def get_state(self) -> dict[str, Any]:
        return {"time": self.time, "episode": self.episode, "seed": self.seed_, "drawn": self.drawn}

    def set_state(self, state: dict[str, Any]) -> None:
        self.time, self.episode, self.seed_, self.drawn = state.values()


class LeavingEnv(ScriptedEnv):
    """Raises an exception that would end a program, or fails to close."""

    def __init__(self, where: str, error: type[BaseException] = SystemExit) -> None:
        super().__init__()
        self.where, self.error = where, error

    def step(self, action: Any) -> Any:
        if self.where == "step":
            raise self.error("bye")
        return super().step(action)

    def close(self) -> None:
        if self.where == "close":
            raise self.error("bye")


BAD_REWARDS = {
    "nan reward": float("nan"),
    "inf reward": -float("inf"),
    "word as reward": "much",
    "reward shape": np.zeros(2),
}


class FailingEnv(ScriptedEnv):
    """Raises, dies or loads modules in the given step or reset."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.how == "raise in reset":
            raise RuntimeError("cannot reset")
        obs, info = super().reset(seed=seed)
        return (obs * np.nan, info) if self.how == "nan in reset" else (obs, info)

    def step(self, action: Any) -> Any:
        if self.time == 1:
            self._fail()
        obs, reward, terminated, truncated, info = super().step(action)
        if self.how == "shape":
            obs = obs[:1]
        if self.how in ("nan", "inf") and self.time == 2:
            obs[:2] = np.nan if self.how == "nan" else (np.inf, -np.inf)
        if self.how == "modules":
            info["metric/heavy"] = float(
                any(name in sys.modules for name in ("torch", "wandb", "accelerate"))
            )
            info["metric/pid"] = os.getpid()
            info["metric/threads"] = float(os.environ["OMP_NUM_THREADS"])
        return obs, BAD_REWARDS.get(self.how, reward), terminated, truncated, info

    def render(self) -> Any:
        if self.how == "raise in render":
            raise RuntimeError("cannot render")
        return super().render()

    def _fail(self) -> None:
        if self.how == "raise":
            self._deep_inside()
        if self.how == "hang":
            time.sleep(60)
        if self.how == "exit":
            os._exit(3)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

    def _deep_inside(self) -> None:
        raise ZeroDivisionError("deep trouble")


class MissionEnv(ScriptedEnv):
    """Adds an instruction in words to the observation; it changes with the episode."""

    def __init__(self, space: Any = None) -> None:
        super().__init__()
        words = space or spaces.Text(32, charset=string.ascii_letters + string.digits + " .")
        self.observation_space = spaces.Dict({"image": self.observation_space, "mission": words})

    def _obs(self) -> Any:
        return {"image": super()._obs(), "mission": f"go to room {self.seed_}.{self.episode}"}


class WordSpace(spaces.Space):
    """A space of strings that is not gymnasium's own."""

    def __init__(self) -> None:
        super().__init__(dtype=str)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def sample(self, *_: Any) -> str:
        return "word"


class SpacesEnv(gym.Env):
    """Any pair of spaces; records the actions that it receives."""

    def __init__(self, action_space: Any, observation_space: Any = None) -> None:
        self.action_space = action_space
        self.observation_space = observation_space or spaces.Box(-1, 1, (2,), np.float64)
        self.received: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.received.append(action)
        return self.observation_space.sample(), 1.0, False, False, {}


def make_scripted(gain: float = 1.0) -> ScriptedEnv:
    return ScriptedEnv(gain=gain)


def make_scripted_inside() -> ScriptedEnv:
    """Takes no arguments; gin configures the environment that it builds."""
    return ScriptedEnv()


class ReusingEnv(ScriptedEnv):
    """Returns the same objects from every call, in all environments of a process, and clears them first.

    Reports metrics at the end of an episode (an array among them) and at each reset. `is_tidy`: new objects.
    """

    obs, reward, flags = np.zeros(3, np.float32), np.zeros(()), np.zeros(2, bool)
    figures, info = np.zeros(2), dict[str, Any]()

    def __init__(self, is_tidy: bool = False, nests: bool = False) -> None:
        super().__init__(num_names=2)
        self.is_tidy, self.nests = is_tidy, nests
        if nests:
            self.observation_space = spaces.Dict({"a": spaces.Tuple([self.observation_space])})
        self.raw = {"a": [self.obs]} if nests else self.obs

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._clear()
        self.obs[:] = super().reset(seed=seed)[0]
        self.info["metric/begun"] = self.figures[:1]
        self.figures[:] = 3 + self.episode
        if self.nests:
            self.raw["a"].append(self.obs)
        return self._given((self.raw, self.info))

    def step(self, action: Any) -> Any:
        self._clear()
        self.obs[:], self.reward[...], *self.flags[:], _ = super().step(action)
        if self.flags.any():
            self.figures[:] = self.time, 10 + self.time
            self.info |= {
                "metric/time": self.figures,
                "metric/success": self.figures[1:],
                "other": [self.info],
            }
        if self.nests:
            self.raw["a"].append(self.obs)
        return self._given((self.raw, self.reward, self.flags[:1], self.flags[1:], self.info))

    def _given(self, parts: Any) -> Any:
        return copy.deepcopy(parts) if self.is_tidy else parts

    def _clear(self) -> None:
        self.info.clear()
        if self.nests:
            self.raw["a"].clear()
        self.obs[:], self.reward[...], self.flags[:], self.figures[:] = -7, -7, False, -7


class ReusingBatch(gym.vector.VectorEnv):
    """ReusingEnv as a batch, in any autoreset mode; row i has episodes of 2 + i steps."""

    def __init__(self, mode: str, is_tidy: bool = False, num_envs: int = 3) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode(mode)}
        self.num_envs, self.mode, self.is_tidy = num_envs, mode, is_tidy
        self.single_observation_space = spaces.Box(-9, 99, (1,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.obs, self.final, self.time = (np.zeros((num_envs, 1), np.float32) for _ in range(3))
        self.rewards, self.flags = np.zeros(num_envs), np.zeros((2, num_envs), bool)
        self.figures, self.infos = np.zeros(num_envs), dict[str, Any]()
        self.over = np.zeros(num_envs, bool)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._clear()
        self.time[(options or {}).get("reset_mask", slice(None))] = 0
        self.over[:] = False
        self.obs[:] = self.time
        return self._given((self.obs, self.infos))

    def step(self, actions: Any) -> Any:
        self._clear()
        resets = self.over.copy() if self.mode == "NextStep" else np.zeros(self.num_envs, bool)
        self.time += 1
        self.time[resets] = 0
        self.over[:] = self.time[:, 0] == 2 + np.arange(self.num_envs)
        self.rewards[:], self.flags[0] = self.time[:, 0] + actions, self.over
        if self.over.any():
            self.figures[:] = self.time[:, 0]
            metrics = {"metric/time": self.figures, "_metric/time": self.over}
            self.infos |= {"final_info": metrics} if self.mode == "SameStep" else metrics
        if self.mode == "SameStep":
            self.final[:] = self.time
            self.infos |= {"final_obs": self.final} if self.over.any() else {}
            self.time[self.over] = 0
        self.obs[:] = self.time
        return self._given((self.obs, self.rewards, *self.flags, self.infos))

    def _given(self, parts: Any) -> Any:
        return copy.deepcopy(parts) if self.is_tidy else parts

    def _clear(self) -> None:
        self.infos.clear()
        for array in (self.obs, self.final, self.rewards, self.figures, self.flags):
            array[:] = -7 if array is not self.flags else False


class OddEnv(ScriptedEnv):
    """Returns `odd` as the part `what` of step number `time`, or of the reset if `time` is 0."""

    def __init__(
        self, what: str = "obs", odd: Any = None, time: int = 2, space: Any = None, good: Any = None
    ) -> None:
        super().__init__()
        self.what, self.odd, self.when, self.good = what, odd, time, good
        self.observation_space = space or self.observation_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        obs, info = super().reset(seed=seed)
        return self._with_odd({"obs": obs, "info": info}, "reset")

    def step(self, action: Any) -> Any:
        names = ("obs", "reward", "terminated", "truncated", "info")
        self.episode = 1  # episodes have at least three steps
        return self._with_odd(dict(zip(names, super().step(action), strict=True)), "step")

    def _with_odd(self, parts: dict[str, Any], call: str) -> Any:
        if self.good is not None:
            parts["obs"] = self.good
        if self.time == self.when:
            if self.what in (call, "call"):
                return self.odd
            parts[self.what] = self.odd
        return tuple(parts.values())
