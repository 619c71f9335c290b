"""Trials of several episodes of one task, for agents that learn within their memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gin
import gymnasium as gym
import numpy as np
from gymnasium import spaces

from ..data.errors import WrongValueError, check_count
from ..data.spaces import SINGLE_KEY, shown
from .env_state import chain_state, missing_layer, set_chain_state
from .returned import METRIC_PREFIX, as_flag, as_reward, check_env, copied, reset_result, step_result
from .spec import EnvSpec, resolve_env

FIRST_KEY = "is_first_timestep"
ATTEMPT_KEY = "attempt_index"
KEEP_TASK = "keep_task"
_SUCCESS = METRIC_PREFIX + "success"
_NUM_ENDED = METRIC_PREFIX + "attempts"
_TRIAL = ("_seed", "_options", "_attempt", "_trial_len", "_return")


@gin.configurable
class KShotWrapper(gym.Wrapper[Any, Any, Any, Any]):
    """Joins `num_attempts` episodes ("attempts") of the same task into one episode, the trial.

    When an attempt ends inside the trial, by termination or by its time limit, the environment is reset and
    the trial continues: both flags stay False, the reward is that of the attempt's last step, and the
    observation is the first of the next attempt. The trial ends with the last attempt and has its flags. Two
    observations are added (an observation that is not a Dict is stored under "observation"):

    - "is_first_timestep": Box (1,) float32, 1 at the first timestep of every attempt, else 0.
    - "attempt_index": Discrete(num_attempts), from zero.

    `info["metric/return_attempt_<i>"]`, with i from zero, is the undiscounted return of an attempt, reported
    when it ends; an attempt cut off by `max_trial_len` has none. `info["metric/success_attempt_<i>"]` is
    `metric/success` of that attempt, if the environment reports it. `info["metric/attempts"]` is the number
    of attempts that ended, reported at the end of the trial.

    Attempts of a trial share a task in one of two ways. An environment with the attribute `can_keep_task =
    True` keeps its task on `reset(options={"keep_task": True})`, while its other randomness continues. For
    all other environments, see `task_seed`.

    In gin: `KShotWrapper.env = @gym_env()` (or any other environment, called or not), then
    `Experiment.make_train_env = @KShotWrapper`.

    Args:
        env: an environment, or anything that `resolve_env` takes: a recipe, an id, a callable.
        num_attempts: episodes per trial, k.
        task_seed: for environments without `can_keep_task`. True gives every reset of a trial the same seed,
            drawn anew for each trial (the first uses the seed of `reset(seed=...)`), for environments in
            which the seed decides the task; their other randomness repeats as well. False resets without a
            seed inside a trial, for environments that keep their task until it is changed explicitly. In both
            cases, the options of `reset` apply to the whole trial.
        max_trial_len: env steps after which a trial is truncated; None for no limit.

    Source: Duan et al. 2016, arXiv:1611.02779, section 2.2 (trials of several episodes).
    """

    def __init__(
        self,
        env: gym.Env[Any, Any] | EnvSpec | str | Callable[..., Any] = gin.REQUIRED,
        num_attempts: int = gin.REQUIRED,
        task_seed: bool = True,
        max_trial_len: int | None = None,
    ) -> None:
        check_count("KShotWrapper.num_attempts", num_attempts)
        check_count("KShotWrapper.max_trial_len", max_trial_len, optional=True)
        super().__init__(env if isinstance(env, gym.Env) else resolve_env(env).build_raw())
        check_env(self.env)
        self.num_attempts, self.task_seed, self.max_trial_len = num_attempts, task_seed, max_trial_len
        self._keeps_task = self.env.has_wrapper_attr("can_keep_task") and bool(
            self.env.get_wrapper_attr("can_keep_task")
        )
        self.observation_space = self._extended_space(self.env.observation_space)
        self._trial_seeds = np.random.default_rng()
        self._seed: int | None = None
        self._options: dict[str, Any] | None = None
        self._attempt, self._trial_len, self._return = 0, 0, 0.0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin a trial with a new task."""
        if seed is not None:
            self._trial_seeds = np.random.default_rng([seed, 1])  # a different stream than that of the task
        elif self.task_seed:
            seed = int(self._trial_seeds.integers(2**31))
        self._seed, self._options = seed if self.task_seed else None, options
        self._attempt, self._trial_len, self._return = 0, 0, 0.0
        raw, info = self._begin(seed)
        return self._extended(raw, is_first=True), info

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Take one env step, and the next attempt's reset if an attempt ends inside the trial."""
        raw, reward, terminated, truncated, info = step_result(self.env.step(action), self.env)
        reward = as_reward(reward)
        terminated, truncated = as_flag(terminated, "terminated"), as_flag(truncated, "truncated")
        self._trial_len += 1
        self._return += reward
        is_first, num_ended = False, self._attempt
        if terminated or truncated:
            num_ended += 1
            info = {**copied(info), f"{METRIC_PREFIX}return_attempt_{self._attempt}": self._return}
            if _SUCCESS in info:
                info[f"{_SUCCESS}_attempt_{self._attempt}"] = info[_SUCCESS]
            if num_ended < self.num_attempts:
                self._attempt, self._return = num_ended, 0.0
                raw, reset_info = self._begin(None if self._keeps_task else self._seed, self._keeps_task)
                info = {**reset_info, **info}
                terminated, truncated, is_first = False, False, True
        if self._trial_len == self.max_trial_len and not terminated:
            truncated = True
        if terminated or truncated:
            info = {**info, _NUM_ENDED: num_ended}
        return self._extended(raw, is_first), reward, terminated, truncated, info

    def get_state(self) -> dict[str, Any]:
        """State of the trial, its task's seed, and the state of the inner environment."""
        own = {name: getattr(self, name) for name in _TRIAL}
        return {**own, "seeds": self._trial_seeds.bit_generator.state, "layers": chain_state(self.env)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_state` returned."""
        for name in _TRIAL:
            setattr(self, name, state[name])
        self._trial_seeds.bit_generator.state = state["seeds"]
        set_chain_state(self.env, state["layers"])

    def missing_state(self) -> str | None:
        """The inner part that cannot be stored; None if all can."""
        return missing_layer(self.env)

    def _begin(self, seed: int | None, keeps_task: bool = False) -> tuple[Any, dict[str, Any]]:
        """Reset the environment with a copy of the trial's options, since it may remove entries."""
        options = None if self._options is None else dict(self._options)
        if keeps_task:
            options = {**(options or {}), KEEP_TASK: True}
        return reset_result(self.env.reset(seed=seed, options=options), self.env)

    def _extended_space(self, space: gym.Space[Any]) -> spaces.Dict:
        parts = dict(space.spaces) if isinstance(space, spaces.Dict) else {SINGLE_KEY: space}
        taken = {FIRST_KEY, ATTEMPT_KEY} & parts.keys()
        if taken:
            raise ValueError(
                f"The environment already has observations named {sorted(taken)}, which KShotWrapper adds. "
                "Fix: rename them in the environment (gymnasium.wrappers.TransformObservation)."
            )
        parts[FIRST_KEY] = spaces.Box(0.0, 1.0, (1,), np.float32)
        parts[ATTEMPT_KEY] = spaces.Discrete(self.num_attempts)
        return spaces.Dict(parts)

    def _extended(self, raw: Any, is_first: bool) -> dict[str, Any]:
        obs = {SINGLE_KEY: raw}
        if isinstance(self.env.observation_space, spaces.Dict):
            if not isinstance(raw, Mapping):
                raise WrongValueError(
                    f"{shown(raw)} as observation",
                    "Its space is a Dict. Fix: return a dict, or correct the observation_space.",
                )
            obs = dict(raw)
        obs[FIRST_KEY] = np.array([is_first], np.float32)
        obs[ATTEMPT_KEY] = np.int64(self._attempt)
        return obs
