"""The interface of the library's vector environments."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from ..returned import Metrics
from .group import StepBuffers

logger = logging.getLogger("loxodon")
_SLACK = 1e-3  # fraction of a bound by which rounding may exceed it
_STEPS_TO_CHECK = 100
_OWN_METHODS = ("reset", "step", "close", "render")
StepResult = tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]


def _widened(space: spaces.Box) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of a Box, widened to allow for rounding."""
    low, high = (bound.astype(np.float64) for bound in (space.low, space.high))
    return low - _SLACK * np.maximum(1.0, np.abs(low)), high + _SLACK * np.maximum(1.0, np.abs(high))


class EnvQueries:
    """Access to attributes, methods and states of N environments; a subclass defines `_query`."""

    num_envs: int
    env_names: list[str]

    # ---- attributes and methods of the environments themselves ----

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call the method `name` of every environment; returns N results (for a plain attribute, its values).

        If a user's vector environment has the method itself, it answers for all rows with one entry.

        Raises: AttributeError if an environment does not have it (EnvError from a worker process, which ends
            all workers: call `has_attr` first); ValueError for methods that must be called on this class.
        """
        return self.call_each(name, [args] * self.num_envs, kwargs)

    def call_each(
        self, name: str, arguments: Sequence[tuple[Any, ...]], kwargs: dict[str, Any] | None = None
    ) -> tuple[Any, ...]:
        """Like `call`, with separate positional arguments for each environment: one tuple per environment."""
        if name in _OWN_METHODS:
            raise ValueError(
                f"call got {name!r}, which would bypass this vector environment. Any other attribute of the "
                f"environments is allowed. Fix: use the method {name} of the vector environment."
            )
        self._check_rows(arguments, "argument tuples")
        return self._query("call", [(name, tuple(one), kwargs or {}) for one in arguments])

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """The attribute `name` of every environment; see `call`."""
        return self.call(name)

    def render(self) -> tuple[Any, ...]:
        """One frame per environment."""
        return self._query("render", [()] * self.num_envs)

    def has_attr(self, name: str) -> tuple[bool, ...]:
        """Return for each environment whether it, or one of its wrappers, has the attribute."""
        return self._query("has_attr", [(name,)] * self.num_envs)

    def call_if_defined(self, name: str, *args: Any) -> None:
        """Call the method `name` of all environments that have it."""
        self._query("call_if_defined", [(name, *args)] * self.num_envs)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment that defines it; a list or tuple has one value for each.

        `max_episode_length` works for all environments: if none of the wrappers has it, episodes are
        truncated after that many env steps from now on.

        Raises: AttributeError (EnvError from a worker process) if an environment does not have it.
        """
        if not isinstance(values, list | tuple):
            values = [values] * self.num_envs
        self._check_rows(values, "values")
        self._query("set_attr", [(name, value) for value in values])

    # ---- their states, see env_state.py ----

    def state_problem(self) -> str | None:
        """The reason why the states of the environments cannot be stored; None if they can."""
        return next(filter(None, self._query("state_problem", [()] * self.num_envs)), None)

    def get_states(self) -> list[dict[str, Any]]:
        """Return states for `set_states`; call `state_problem` first."""
        return list(self._query("get_state", [()] * self.num_envs))

    def set_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue from the states that `get_states` returned; called after a `reset`.

        The buffers keep the observations of the reset until the next step.
        """
        self._check_rows(states, "states")
        self.env_names = list(self._query("set_state", [(state,) for state in states]))

    def _query(self, what: str, arguments: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        """Query every environment; see `EnvGroup.query`; each has its tuple of arguments."""
        raise NotImplementedError

    def _check_rows(self, rows: Sequence[Any], what: str) -> None:
        if len(rows) != self.num_envs:
            raise ValueError(
                f"There are {len(rows)} {what} for {self.num_envs} environments. "
                "Fix: give one per environment."
            )


class SequenceVectorEnv(EnvQueries, gym.vector.VectorEnv[Any, Any, Any]):
    """N environments that are stepped together; an environment that ends is reset within the same step.

    step(actions (N,) or (N, K) int, or (N, A) float) returns obs dict of [N, ...], rewards (N,) float32,
    terminated (N,) bool, truncated (N,) bool, infos. If an episode ended, its row of `obs` is already the
    first observation of the next episode (but see `_ignore`) and

    - infos["final_obs"]: dict of [N, ...], the episode's true last observation, valid where
      infos["_final_obs"] ((N,) bool) is True. Both are absent when no episode ended.
    - infos["metrics"]: list of (env index, name, value); absent when empty. All of them count.
    - infos["_ignore"]: (N,) bool, True in rows that took no env step; absent when False in every row. Only
      environments with their own batch axis that reset a finished row during the *next* step (NEXT_STEP
      autoreset) return it. There, `obs` of an ended row is the final observation. The following call ignores
      the row's action and marks the row in `_ignore`. It returns the first observation of the new episode in
      `obs`, with reward 0 and both flags False. Code that steps the environments must handle it:

      - Skip the timestep: such a row is neither stored nor counted (no transition, no env step, no reward or
        length in the statistics: `ReturnHistory.add_step` takes the mask).
      - Start anew: afterwards the row is treated exactly like one that ended in this call, from `obs` (new
        trajectory, zero reward and previous action, time index 0, hidden state reset, name read again).
        Doing so in the step before as well is harmless, since nothing was stored in between. With
        `fresh = ended | ignore` instead of `ended`, one code path covers both.

    The arrays in `obs` and `final_obs` are reused by the next call, so copy values that you keep. `env_names`
    lists the current names; a change makes a new list, so a list fetched earlier never changes.

    `env_observation_space` and `env_action_space` are the spaces of the first environment, before its
    observations are flattened and its actions scaled.
    """

    def __init__(
        self, obs_space: spaces.Dict, action_space: spaces.Space[Any], num_envs: int, memory: Any = None
    ) -> None:
        """Prepare the buffers, in `memory` of `StepBuffers.num_bytes` bytes; None takes new memory."""
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space, self.single_action_space = obs_space, action_space
        self.observation_space = batch_space(obs_space, self.num_envs)
        self.action_space = batch_space(action_space, self.num_envs)
        if memory is None:
            memory = bytearray(StepBuffers.num_bytes(obs_space, action_space, num_envs))
        self.buffers = StepBuffers.carve(memory, obs_space, action_space, num_envs)
        self.env_observation_space: spaces.Space[Any] = obs_space
        self.env_action_space: spaces.Space[Any] = action_space
        self.env_names = []
        boxes = {key: space for key, space in obs_space.spaces.items() if isinstance(space, spaces.Box)}
        # Keys are removed once a value is outside.
        self._obs_bounds = {key: _widened(space) for key, space in boxes.items()}
        self._steps_to_check = _STEPS_TO_CHECK

    def seeds_of(self, seed: int | Sequence[int | None] | None) -> list[int | None]:
        """Return one seed per environment: seed + i, the given seeds, or None for all."""
        if seed is None:
            return [None] * self.num_envs
        if isinstance(seed, (int, np.integer)):
            return [int(seed) + i for i in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ValueError(
                f"reset got {len(seed)} seeds for {self.num_envs} environments. Fix: pass one int, or one "
                "per environment."
            )
        return list(seed)

    def begin_episodes(self, rows: np.ndarray) -> Metrics:
        """Reset the environments of some rows, after a step that did not end their episodes.

        Their observations move from `buffers.obs` to `buffers.final_obs`, and `buffers.obs` receives the
        first observations of the new episodes. rows: (N,) bool.

        Returns: the special metrics of the resets.
        Raises: NotImplementedError for a user's vector environment that cannot do this.
        """
        names, metrics = list(self.env_names), Metrics()
        answers = self._query("replace_episode", [(bool(row),) for row in rows])
        for row in np.flatnonzero(rows).tolist():
            names[row], found = answers[row]
            metrics += [(row, name, value) for _, name, value in found]
        self.env_names = names
        return metrics

    def infos(self, has_ended: bool, metrics: Metrics) -> dict[str, Any]:
        """Make the infos dict of one call; its observations are in the buffers."""
        if self._steps_to_check:
            self._steps_to_check -= 1
            self._warn_if_outside(self.buffers.obs, range(self.num_envs))
        infos: dict[str, Any] = {}
        if has_ended:
            ended = self.buffers.terminated | self.buffers.truncated
            infos["final_obs"], infos["_final_obs"] = self.buffers.final_obs, ended
            self._warn_if_outside(self.buffers.final_obs, np.flatnonzero(ended).tolist())
        if metrics:
            infos["metrics"] = metrics
        return infos

    def _warn_if_outside(self, obs: dict[str, np.ndarray], rows: Sequence[int]) -> None:
        """Warn, once per key, if observations in these rows are outside the observation space."""
        for key, (low, high) in list(self._obs_bounds.items()):
            values = obs[key][rows]
            is_outside = (values < low) | (values > high)
            if is_outside.any():
                del self._obs_bounds[key]
                row, *place = np.argwhere(is_outside)[0].tolist()
                logger.warning(
                    "The environment %s returned %g as observation %r, outside the bounds of its space: %s. "
                    "Nothing is clipped. Fix: correct the environment or its observation_space.",
                    self.env_names[rows[row]],
                    values[(row, *place)],
                    key,
                    cast("spaces.Dict", self.single_observation_space)[key],
                )

    def step_result(self, has_ended: bool, metrics: Metrics) -> StepResult:
        """Make the return value of `step` from the buffers."""
        buffers = self.buffers
        return (
            buffers.obs,
            buffers.rewards.copy(),
            buffers.terminated.copy(),
            buffers.truncated.copy(),
            self.infos(has_ended, metrics),
        )
