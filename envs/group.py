"""A group of environments in one process that steps straight into preallocated arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from ..data.spaces import is_text, storage_dtype
from .attributes import ASKED
from .env_state import get_state, set_state, state_problem
from .errors import EnvError
from .sequence_env import (
    METRIC_PREFIX,
    NUM_STEP_PARTS,
    SequenceEnv,
    check_reset_result,
    wrong_step_result,
)

ALIGN_BYTES = 64
_QUESTIONS: dict[str, Callable[..., Any]] = {
    **ASKED,
    "state_problem": state_problem,
    "get_state": get_state,
    "set_state": set_state,
}
Metrics = list[tuple[int, str, Any]]


@dataclass(frozen=True)
class StepBuffers:
    """Everything one vector step exchanges, as arrays with a leading env axis N.

    obs, final_obs: per key [N, ...]; rewards (N,) float32; terminated, truncated (N,) bool; actions (N,)
    int64 or (N, A) float32. Text observations are (N,) arrays of Python strings, which no shared memory can
    hold: every process has its own.
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
        """Lay the arrays out in `memory`, any writable buffer of at least `num_bytes` bytes."""
        arrays, offset = [], 0
        for name, shape, dtype in _fields(obs_space, action_space, num_envs):
            if np.dtype(dtype).hasobject:
                arrays.append((name, np.full(shape, "", dtype)))
            else:
                arrays.append((name, np.ndarray(shape, dtype, buffer=memory, offset=offset)))
            offset += _padded(shape, dtype)
        rest = dict(arrays[-4:])
        keys = len(obs_space.spaces)
        return cls(dict(arrays[:keys]), dict(arrays[keys : 2 * keys]), **rest)

    @property
    def text_columns(self) -> list[np.ndarray]:
        """The (N,) arrays of text, first those of `obs`, then those of `final_obs`."""
        return [c for c in (*self.obs.values(), *self.final_obs.values()) if c.dtype == object]

    def floats(self, obs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The arrays that may hold NaN or infinity: rewards and floats of `obs`, named as errors say."""
        found = {f"observation {key!r}": column for key, column in obs.items() if column.dtype.kind == "f"}
        return {"reward": self.rewards, **found}

    def rows(self, start: int, stop: int) -> StepBuffers:
        """Views of the rows start..stop of every array."""
        part = slice(start, stop)
        return StepBuffers(
            {key: column[part] for key, column in self.obs.items()},
            {key: column[part] for key, column in self.final_obs.items()},
            self.rewards[part],
            self.terminated[part],
            self.truncated[part],
            self.actions[part],
        )


def _fields(
    obs_space: spaces.Dict, action_space: spaces.Space[Any], num_envs: int
) -> list[tuple[str, tuple[int, ...], Any]]:
    obs: list[tuple[str, tuple[int, ...], Any]] = [
        (key, (num_envs, *(leaf.shape or ())), storage_dtype(leaf)) for key, leaf in obs_space.spaces.items()
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
    if np.dtype(dtype).hasobject:
        return 0
    size = math.prod(shape) * int(np.dtype(dtype).itemsize)
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


class EnvGroup:
    """Steps several environments one after the other; a finished one is reset within the same step.

    Attributes:
        env_names: current name of each environment.
        failed_row: row of the environment that was being called when the last exception left this object.
        num_steps: since the last reset of all.

    Args:
        envs: the environments.
        buffers: arrays with one row per environment; `step` reads the actions there and writes everything
            else.
        first_row: number of the first one among all environments, for errors.
    """

    def __init__(self, envs: Sequence[SequenceEnv], buffers: StepBuffers, first_row: int = 0) -> None:
        self.envs, self.first_row = list(envs), first_row
        self.failed_row = self.num_steps = 0
        self._buffers = buffers
        self._obs_columns, self._final_columns = list(buffers.obs.values()), list(buffers.final_obs.values())
        self._checked_obs, self._checked_final = (
            buffers.floats(buffers.obs),
            buffers.floats(buffers.final_obs),
        )
        self._steps = self._step_methods()
        self._writes = [env.obs_layout.write for env in self.envs]
        self._maps = [env.action_map.to_env for env in self.envs]
        self._has_one_map = all(env.env.action_space == self.envs[0].env.action_space for env in self.envs)
        self.env_names = [env.env_name for env in self.envs]

    def reset(self, seeds: Sequence[int | None], options: dict[str, Any] | None) -> Metrics:
        """Begin a new episode everywhere; observations are in the buffers afterwards."""
        metrics: Metrics = []
        self.num_steps = 0
        self._buffers.rewards.fill(0.0)
        self._buffers.terminated.fill(False)
        self._buffers.truncated.fill(False)
        for row, (env, seed) in enumerate(zip(self.envs, seeds, strict=True)):
            self.failed_row = row
            raw, info = check_reset_result(env.env.reset(seed=seed, options=options), env)
            env.obs_layout.write(raw, self._obs_columns, row)
            if info:
                _collect_metrics(info, row, metrics)
        self.env_names = [env.env_name for env in self.envs]
        self._refuse_non_finite(self._checked_obs, slice(None))
        return metrics

    def step(self) -> tuple[bool, Metrics]:
        """One step of every environment with the buffers' actions.

        Returns: whether any episode ended (its last observation is in `final_obs`, its next first one in
            `obs`), and
        the special metrics as (row, name, value).
        """
        buffers, columns = self._buffers, self._obs_columns
        metrics: Metrics = []
        rewards: list[Any] = []
        ended: list[tuple[int, bool, bool]] = []
        row = 0
        self.num_steps += 1
        try:
            for row, (env_step, write, action) in enumerate(
                zip(self._steps, self._writes, self._env_actions(), strict=True)
            ):
                found = env_step(action)
                if len(found) != NUM_STEP_PARTS:
                    raise wrong_step_result(found, self.envs[row])
                raw, reward, terminated, truncated, info = found
                rewards.append(reward)
                if terminated or truncated:
                    ended.append((row, terminated, truncated))
                    write(raw, self._final_columns, row)
                    raw, reset_info = check_reset_result(self.envs[row].env.reset(), self.envs[row])
                    if reset_info:
                        info = {**reset_info, **info}
                write(raw, columns, row)
                if info:
                    _collect_metrics(info, row, metrics)
        except BaseException:
            self.failed_row = row
            raise
        self._store_rewards(rewards)
        buffers.terminated.fill(False)
        buffers.truncated.fill(False)
        for row, terminated, truncated in ended:
            buffers.terminated[row], buffers.truncated[row] = terminated, truncated
        if ended:
            self._refresh_names(row for row, _, _ in ended)
            self._refuse_non_finite(self._checked_final, [row for row, _, _ in ended])
        self._refuse_non_finite(self._checked_obs, slice(None))
        return bool(ended), metrics

    @property
    def text_columns(self) -> list[np.ndarray]:
        """See `StepBuffers.text_columns`; here one row per environment of the group."""
        return self._buffers.text_columns

    def ask(self, what: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The answer of each environment; `what` is one of `_QUESTIONS`, with one tuple of arguments each."""
        answers = []
        for row, (env, argument) in enumerate(zip(self.envs, arguments, strict=True)):
            self.failed_row = row
            answers.append(_QUESTIONS[what](env, *argument))
        if what in ("set_state", "begin_episode"):
            self._refresh_names(range(len(self.envs)))
        self._steps = self._step_methods()  # there may be a wrapper more now
        return answers

    def _step_methods(self) -> list[Callable[[Any], Any]]:
        return [env.env.step for env in self.envs]

    def render(self) -> list[Any]:
        """One frame per environment."""
        frames = []
        for row, env in enumerate(self.envs):
            self.failed_row = row
            frames.append(env.render())
        return frames

    def close(self) -> None:
        """Close every environment."""
        for env in self.envs:
            env.close()

    def _store_rewards(self, rewards: list[Any]) -> None:
        try:
            self._buffers.rewards[:] = rewards
        except (TypeError, ValueError):
            for row, reward in enumerate(rewards):
                self._store_reward(row, reward)

    def _store_reward(self, row: int, reward: Any) -> None:
        try:
            self._buffers.rewards[row] = reward
        except (TypeError, ValueError) as error:
            self.failed_row = row
            raise ValueError(
                f"The environment {self.env_names[row]} returned the reward {reward!r}, but it must be one "
                "number. Fix: return float(reward) from its step."
            ) from error

    def _refuse_non_finite(self, columns: dict[str, np.ndarray], rows: Any) -> None:
        found = find_non_finite(columns, rows, self.env_names, self.num_steps, self.first_row)
        if found is not None:
            self.failed_row, error = found
            raise error

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


def find_non_finite(
    columns: Mapping[str, np.ndarray],
    rows: Any,
    env_names: Sequence[str],
    num_steps: int,
    first_row: int = 0,
) -> tuple[int, ValueError] | None:
    """The first NaN or infinity, which would ruin every weight it reaches: its row, and the error to raise.

    Args:
        columns: see StepBuffers.floats.
        rows: index of the rows to look at.
        env_names: N names.
        num_steps: since the last reset of all, and
        first_row: number of the first row among all environments, for the error.
    """
    for what, column in columns.items():
        values = column[rows]
        if math.isfinite(np.vdot(values, values)):  # NaN and infinity spread; a fraction of what all() takes
            continue
        is_finite = np.isfinite(values)
        if is_finite.all():  # only the squares are too large
            continue
        bad = int(np.flatnonzero(~is_finite.reshape(len(is_finite), -1).all(axis=1))[0])
        value = float(values[bad][~is_finite[bad]].flat[0])
        row = int(np.arange(len(column))[rows][bad])
        return row, ValueError(
            f"The environment {env_names[row]} returned {'NaN' if math.isnan(value) else value} as {what} "
            f"(environment {first_row + row}, step {num_steps} since all were reset). Allowed are finite "
            "numbers. Fix: correct the environment, or replace such values in a wrapper "
            "(gymnasium.wrappers.TransformObservation, TransformReward)."
        )
    return None


def _collect_metrics(info: dict[str, Any], row: int, metrics: Metrics) -> None:
    for key, value in info.items():
        if isinstance(key, str) and key.startswith(METRIC_PREFIX):
            metrics.append((row, key[len(METRIC_PREFIX) :], value))


def check_same_spaces(
    envs: Sequence[SequenceEnv], obs_space: spaces.Dict, action_space: Any, first: int
) -> None:
    """Raise EnvError unless every environment has the given spaces; `first` is the number of envs[0]."""
    for number, env in enumerate(envs, start=first):
        if _signature(env.observation_space) != _signature(obs_space) or env.action_space != action_space:
            raise EnvError(
                f"Environment {number} ({env.env_name}) has observations {env.observation_space} and "
                f"actions {env.action_space}, environment 0 has {obs_space} and {action_space}. All "
                "parallel environments must agree in observation keys, shapes and dtypes, and in the action "
                "space. Fix: pad or wrap them to common spaces."
            )


def _signature(space: Any) -> list[tuple[Any, ...]]:
    """What must agree: all but the bounds of a Box and the words of a text."""
    return [
        (key, leaf.shape, leaf.dtype) if isinstance(leaf, spaces.Box) or is_text(leaf) else (key, leaf)
        for key, leaf in space.spaces.items()
    ]
