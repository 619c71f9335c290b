"""A group of environments in one process that steps straight into preallocated arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from ...data.errors import WrongValueError
from ...data.spaces import ObsLayout
from ..attributes import ATTRIBUTE_QUERIES
from ..env_state import get_state, set_state, state_problem
from ..errors import EnvError, close_all
from ..returned import (
    MAX_REWARD,
    NUM_STEP_PARTS,
    Metrics,
    as_flag,
    as_reward,
    collect_metrics,
    copied,
    is_unpacking,
    merged,
    reset_result,
    step_result,
    wrong_result,
)
from ..sequence_env import SequenceEnv

ALIGN_BYTES = 64
_QUERIES: dict[str, Callable[..., Any]] = {
    **ATTRIBUTE_QUERIES,
    "state_problem": state_problem,
    "get_state": get_state,
    "set_state": set_state,
    "render": lambda env: copied(env.render()),
}
ColumnCheck = tuple[Callable[[np.ndarray], None], np.ndarray]


@dataclass(frozen=True)
class StepBuffers:
    """All arrays of one vector step, each with a leading env axis N.

    obs, final_obs: per key [N, ...]; rewards (N,) float32; terminated, truncated (N,) bool; actions (N,)
    int64 or (N, A) float32.
    """

    obs: dict[str, np.ndarray]
    final_obs: dict[str, np.ndarray]
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    actions: np.ndarray

    @staticmethod
    def num_bytes(obs_space: spaces.Dict, action_space: spaces.Space[Any], num_envs: int) -> int:
        """Size of the memory that `carve` needs."""
        fields = _fields(obs_space, action_space, num_envs)
        return sum(_padded(shape, dtype) for _, shape, dtype in fields)

    @classmethod
    def carve(
        cls, memory: Any, obs_space: spaces.Dict, action_space: spaces.Space[Any], num_envs: int
    ) -> StepBuffers:
        """Place the arrays in `memory`, a writable buffer of at least `num_bytes` bytes."""
        arrays, offset = [], 0
        for name, shape, dtype in _fields(obs_space, action_space, num_envs):
            arrays.append((name, np.ndarray(shape, dtype, buffer=memory, offset=offset)))
            offset += _padded(shape, dtype)
        rest = dict(arrays[-4:])
        keys = len(obs_space.spaces)
        return cls(dict(arrays[:keys]), dict(arrays[keys : 2 * keys]), **rest)

    def rows(self, start: int, stop: int) -> StepBuffers:
        """Views of the rows start..stop of every array."""

        def part(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: column[start:stop] for key, column in value.items()}
            return value[start:stop]

        return StepBuffers(**{name: part(value) for name, value in vars(self).items()})


def _fields(
    obs_space: spaces.Dict, action_space: spaces.Space[Any], num_envs: int
) -> list[tuple[str, tuple[int, ...], Any]]:
    obs: list[tuple[str, tuple[int, ...], Any]] = [
        (key, (num_envs, *(leaf.shape or ())), leaf.dtype) for key, leaf in obs_space.spaces.items()
    ]
    action_dtype = np.float32 if isinstance(action_space, spaces.Box) else np.int64
    return [
        *obs,
        *obs,
        ("rewards", (num_envs,), np.float32),
        ("terminated", (num_envs,), np.bool_),
        ("truncated", (num_envs,), np.bool_),
        ("actions", (num_envs, *(action_space.shape or ())), action_dtype),
    ]


def _padded(shape: tuple[int, ...], dtype: Any) -> int:
    size = math.prod(shape) * int(np.dtype(dtype).itemsize)
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


class EnvGroup:
    """Steps several environments one after the other; a finished environment is reset within the same step.

    Attributes:
        env_names: current name of each environment.
        failed_row: row of the environment that raised the last exception.
        num_steps: steps since all environments were last reset.

    Args:
        envs: the environments.
        buffers: arrays with one row per environment; `step` reads the actions there and writes all other
            arrays.
        first_row: index of envs[0] among all environments, for errors.
    """

    def __init__(self, envs: Sequence[SequenceEnv], buffers: StepBuffers, first_row: int = 0) -> None:
        self.envs, self.first_row = list(envs), first_row
        self.failed_row = self.num_steps = 0
        self._buffers = buffers
        self._obs_columns, self._final_columns = list(buffers.obs.values()), list(buffers.final_obs.values())
        self._obs_checks = column_checks(self.envs[0].obs_layout, buffers.obs)
        self._final_checks = column_checks(self.envs[0].obs_layout, buffers.final_obs)
        self._steps = self._step_methods()
        self._writes = [env.obs_layout.write for env in self.envs]
        self._maps = [env.action_map.to_env for env in self.envs]
        self._has_one_map = all(env.env.action_space == self.envs[0].env.action_space for env in self.envs)
        self.env_names = [env.env_name for env in self.envs]

    def reset(self, seeds: Sequence[int | None], options: dict[str, Any] | None) -> Metrics:
        """Begin a new episode in all environments; the observations are in the buffers afterwards."""
        metrics: Metrics = []
        self.num_steps = 0
        self._buffers.rewards.fill(0.0)
        self._buffers.terminated.fill(False)
        self._buffers.truncated.fill(False)
        row = 0
        try:
            for row, (env, seed) in enumerate(zip(self.envs, seeds, strict=True)):
                own = None if options is None else dict(options)  # an environment may remove entries
                raw, info = reset_result(env.env.reset(seed=seed, options=own), env)
                env.obs_layout.write(raw, self._obs_columns, row)
                if info:
                    collect_metrics(info, row, metrics)
        except BaseException as error:
            self._explain(error, row, "reset")
            raise
        self.env_names = [env.env_name for env in self.envs]
        self._check(self._obs_checks)
        return metrics

    def step(self) -> tuple[bool, Metrics]:
        """Step every environment with the buffers' actions.

        Returns: whether any episode ended (its last observation is in `final_obs`, the first one of the next
            episode in `obs`), and the special metrics.
        """
        columns = self._obs_columns
        metrics: Metrics = []
        rewards: list[float] = []
        ended: list[tuple[int, bool, bool]] = []
        row = 0
        self.num_steps += 1
        try:
            for row, (env_step, write, action) in enumerate(
                zip(self._steps, self._writes, self._env_actions(), strict=True)
            ):
                found = env_step(action)
                if type(found) is not tuple or len(found) != NUM_STEP_PARTS or type(found[-1]) is not dict:
                    found = step_result(found, self.envs[row])
                raw, reward, terminated, truncated, info = found
                if type(reward) is not float or not -MAX_REWARD <= reward <= MAX_REWARD:
                    reward = as_reward(reward)
                rewards.append(reward)
                if info:
                    collect_metrics(info, row, metrics)
                if terminated is not False or truncated is not False:
                    flags = as_flag(terminated, "terminated"), as_flag(truncated, "truncated")
                    if True in flags:
                        ended.append((row, *flags))
                        write(raw, self._final_columns, row)
                        raw = self._begin_episode(row, metrics)
                write(raw, columns, row)
        except BaseException as error:
            self._explain(error, row, "step")
            raise
        self._store(rewards, ended)
        return bool(ended), metrics

    def _store(self, rewards: list[float], ended: list[tuple[int, bool, bool]]) -> None:
        """Write the rewards and flags of a step to the buffers, and check the observations there."""
        buffers = self._buffers
        buffers.rewards[:] = rewards
        buffers.terminated.fill(False)
        buffers.truncated.fill(False)
        for row, terminated, truncated in ended:
            buffers.terminated[row], buffers.truncated[row] = terminated, truncated
        if ended:
            rows = [row for row, _, _ in ended]
            self._check(self._final_checks, rows)
            self._refresh_names(rows)
        self._check(self._obs_checks)

    def _begin_episode(self, row: int, metrics: Metrics) -> Any:
        """Reset one environment; returns the raw observation.

        metrics: receives those of the reset, except for names that the previous step reported.
        """
        env = self.envs[row]
        raw, info = reset_result(env.env.reset(), env)
        if info:
            of_reset: Metrics = []
            collect_metrics(info, row, of_reset)
            metrics[:] = merged(metrics, of_reset)
        return raw

    def _replace_episode(self, row: int, begins: bool) -> tuple[str, Metrics] | None:
        """Reset one environment in mid-episode if `begins` is True; its observation moves to `final_obs`.

        Returns: its name and the metrics of the reset; None if `begins` is False.
        """
        if not begins:
            return None
        metrics: Metrics = []
        for final, column in zip(self._final_columns, self._obs_columns, strict=True):
            final[row] = column[row]
        try:
            self._writes[row](self._begin_episode(row, metrics), self._obs_columns, row)
        except BaseException as error:
            self._explain(error, row, "reset")
            raise
        self._check(self._obs_checks, [row])
        return self.envs[row].env_name, metrics

    def query(self, what: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Query each environment, which has its own tuple of arguments.

        what: "replace_episode" or a key of `_QUERIES`.
        """
        answers = []
        for row, (env, argument) in enumerate(zip(self.envs, arguments, strict=True)):
            self.failed_row = row
            if what == "replace_episode":
                answers.append(self._replace_episode(row, *argument))
            else:
                answers.append(_QUERIES[what](env, *argument))
        if what in ("set_state", "replace_episode"):
            self._refresh_names(range(len(self.envs)))
        self._steps = self._step_methods()  # the query may have added a wrapper
        return answers

    def _step_methods(self) -> list[Callable[[Any], Any]]:
        return [env.env.step for env in self.envs]

    def close(self) -> None:
        """Close every environment."""
        close_all(self.envs, self.first_row)

    def _check(self, checks: Sequence[ColumnCheck], rows: list[int] | None = None) -> None:
        for check, column in checks:
            try:
                check(column if rows is None else column[rows])
            except WrongValueError as error:
                row = error.row or 0
                raise self._located(error, row if rows is None else rows[row]) from None

    def _explain(self, error: BaseException, row: int, call: str) -> None:
        """Record which environment failed; if it returned a wrong value, raise an error with its location."""
        self.failed_row = row
        if isinstance(error, WrongValueError):
            raise self._located(error, row) from None
        if is_unpacking(error):
            raise wrong_result(self.envs[row], call, f"something else ({error})") from None

    def _located(self, error: WrongValueError, row: int) -> ValueError:
        """Add the name of the environment and the time to an error."""
        self.failed_row = row
        return error.completed(
            f"The environment {self.env_names[row]} returned",
            step_location(self.first_row + row, self.num_steps),
        )

    def _env_actions(self) -> Iterable[Any]:
        actions = self._buffers.actions
        if self._has_one_map:
            mapped: Iterable[Any] = self._maps[0](actions)
            return mapped
        return [to_env(actions[i : i + 1])[0] for i, to_env in enumerate(self._maps)]

    def _refresh_names(self, rows: Iterable[int]) -> None:
        names = list(self.env_names)
        for row in rows:
            names[row] = self.envs[row].env_name
        if names != self.env_names:
            self.env_names = names


def column_checks(layout: ObsLayout, columns: dict[str, np.ndarray]) -> list[ColumnCheck]:
    """Return the checks of the columns for each vector step: `ObsLeaf.check` if it can find anything."""
    return [(leaf.check, columns[leaf.key]) for leaf in layout.leaves if leaf.has_checks]


def step_location(row: int | None, num_steps: int) -> str:
    """The location of a returned value, for errors; `row` counts all environments, None omits it."""
    return f"{'' if row is None else f'environment {row}, '}step {num_steps} since all were reset"


def check_same_spaces(
    envs: Sequence[SequenceEnv], obs_space: spaces.Dict, action_space: Any, first: int
) -> None:
    """Raise EnvError unless every environment has the given spaces; `first` is the index of envs[0]."""
    for number, env in enumerate(envs, start=first):
        if not have_same_spaces(env.observation_space, env.action_space, obs_space, action_space):
            raise EnvError(
                f"Environment {number} ({env.env_name}) has observations {env.observation_space} and "
                f"actions {env.action_space}, but environment 0 has {obs_space} and {action_space}. All "
                "parallel environments must agree in observation keys, shapes and dtypes, and in the "
                "action space. Fix: pad or wrap them to common spaces."
            )


def have_same_spaces(
    obs_space: Any, action_space: Any, other_obs_space: Any, other_action_space: Any
) -> bool:
    """Return True if an agent for the first pair of spaces, in the library's form, fits the second."""
    return _signature(obs_space) == _signature(other_obs_space) and action_space == other_action_space


def _signature(space: Any) -> list[tuple[Any, ...]]:
    """The part of a space that must agree: everything but the bounds of a Box."""
    return [
        (key, leaf.shape, leaf.dtype) if isinstance(leaf, spaces.Box) else (key, leaf)
        for key, leaf in space.spaces.items()
    ]
