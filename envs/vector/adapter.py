"""An adapter for environments with their own batch axis (EnvPool, JAX and GPU environments, make_vec)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from ...data.errors import WrongValueError
from ...data.spaces import ActionMap, ObsLayout, as_numpy
from ..attributes import layers, owns
from ..env_state import offers_state
from ..errors import close_all
from ..returned import (
    METRIC_PREFIX,
    Metrics,
    as_flags,
    as_metric,
    as_rewards,
    check_space,
    collect_metrics,
    merged,
    reset_result,
    step_result,
)
from ..spec import EnvSpec
from .base import SequenceVectorEnv, StepResult
from .group import ColumnCheck, column_checks, step_location


class AlreadyVectorizedEnv(SequenceVectorEnv):
    """One gymnasium VectorEnv in the library's form. See `SequenceVectorEnv` for the interface.

    All values of gymnasium's `metadata["autoreset_mode"]` are supported:

    - SAME_STEP: the last observation comes as `infos["final_obs"]`, per row (an object array, list or
      tuple) or batched.
    - NEXT_STEP (EnvPool, `gymnasium.make_vec`): the step after an episode's end only resets the row; such a
      row is marked in `infos["_ignore"]`.
    - DISABLED: this class resets finished rows, by `reset(options={"reset_mask": (N,) bool})`.

    Args:
        specs: recipes whose target is a registered id (made by `gymnasium.make_vec` with one row per recipe)
            or returns a VectorEnv. Only one environment is built; several equal recipes mean that it must
            have that many rows.
    """

    def __init__(self, specs: Sequence[EnvSpec]) -> None:
        self.closed = True  # nothing needs closing yet
        if any(spec is not specs[0] and spec != specs[0] for spec in specs[1:]):
            raise ValueError(
                f"already_vectorized got {len(specs)} different environments, but builds a single one. "
                "Fix: give make_train_env one callable, not a list."
            )
        env = specs[0].build_vector(len(specs))
        _check_kind(env, len(specs))
        for name in ("single_observation_space", "single_action_space"):
            check_space(env, name)
        self.env, self._mode = env, _autoreset_mode(env)
        raw_space = specs[0].numbered(env.single_observation_space)
        self._layout, self._map = ObsLayout(raw_space), ActionMap(env.single_action_space)
        obs_space, action_space = self._layout.space, self._map.policy_space
        super().__init__(obs_space, action_space, env.num_envs)
        self.env_observation_space, self.env_action_space = raw_space, env.single_action_space
        self._obs_checks = column_checks(self._layout, self.buffers.obs)
        self._final_checks = column_checks(self._layout, self.buffers.final_obs)
        self.closed, self._num_steps = False, 0
        self._all_rows = np.ones(env.num_envs, np.bool_)
        self._resets_next = np.zeros(env.num_envs, np.bool_)  # rows that the next step only resets
        self.env_names = [specs[0].env_name or _name_of(env)] * env.num_envs

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Begin new episodes in all rows; the environment derives a seed for each row."""
        self._num_steps = 0
        found = self.env.reset(seed=seed, options=options)
        self.buffers.rewards.fill(0.0)
        self._resets_next = np.zeros(self.num_envs, np.bool_)
        try:
            raw, infos = reset_result(found, self.env)
            metrics = self._columns_of(infos, self._all_rows, self._all_rows)
            self._write(raw, self.buffers.obs)
            self._check(self._obs_checks)
        except WrongValueError as error:
            raise self._located(error) from None
        return self.buffers.obs, self.infos(False, metrics)

    def step(self, actions: Any) -> StepResult:
        """Take one env step in all rows, except those that `infos["_ignore"]` marks."""
        buffers, ignored = self.buffers, self._resets_next
        buffers.actions[:] = actions
        self._num_steps += 1
        env_actions = np.asarray(self._map.to_env(buffers.actions), self.env.single_action_space.dtype)
        found = self.env.step(env_actions)
        try:
            has_ended, metrics = self._take(step_result(found, self.env), ignored)
            self._check(self._obs_checks)
        except WrongValueError as error:
            raise self._located(error) from None
        result = self.step_result(has_ended, metrics)
        if ignored.any():
            result[-1]["_ignore"] = ignored
        return result

    def begin_episodes(self, rows: np.ndarray) -> Metrics:
        """See the base class. Row-by-row resets work only if the environment does not reset rows itself."""
        if self._mode is not AutoresetMode.DISABLED:
            raise NotImplementedError(
                f"The agent ended episodes, but {type(self.env).__name__} resets finished rows itself (mode "
                f"{self._mode.value}), so its rows cannot be reset from outside. Fix: use env_mode 'sync' or "
                "'async', or an environment with metadata['autoreset_mode'] = AutoresetMode.DISABLED."
            )
        try:
            metrics = self._reset_rows(rows)
            self._check(self._obs_checks)
        except WrongValueError as error:
            raise self._located(error) from None
        return metrics

    def render(self) -> Any:
        """Return the result of the environment's own `render`."""
        return self.env.render()

    def close_extras(self, **_: Any) -> None:
        """Close the environment."""
        close_all([self.env])

    def _query(self, what: str, arguments: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        """Ask the vector environment's own attribute, or those of its rows in gymnasium's way."""
        name, *rest = arguments[0]
        owner = next((layer for layer in layers(self.env) if owns(layer, name)), None)
        if what == "has_attr":
            return (owner is not None or self._rows_have(name),) * self.num_envs
        if what == "call_if_defined":
            if owner is None and not self._rows_have(name):
                return ()
            what, rest, arguments = "call", [tuple(rest), {}], arguments[:1]
        if owner is None and not self._rows_have(name):
            chain = " > ".join(type(layer).__name__ for layer in layers(self.env))
            raise AttributeError(
                f"Neither the vector environment ({chain}) nor its rows have the attribute {name!r}, or the "
                "vector environment gives no access to its rows. Fix: define the attribute in the vector "
                "environment, give it gymnasium's call and set_attr, or use env_mode 'sync' or 'async'."
            )
        if what == "set_attr":
            values = [value for _, value in arguments]
            if owner is None:
                self.env.unwrapped.set_attr(name, values)
            else:
                setattr(owner, name, values[0] if all(v is values[0] for v in values) else values)
            return ()
        args, kwargs = rest
        if any(other[1] is not arguments[0][1] for other in arguments):
            raise ValueError(
                f"call_each got different arguments of {name!r} for the rows of {type(self.env).__name__}, "
                "which can only be called as a whole. Fix: use env_mode 'sync' or 'async'."
            )
        if owner is None:
            return tuple(self.env.unwrapped.call(name, *args, **kwargs))
        found = getattr(owner, name)
        return (found(*args, **kwargs),) if callable(found) else (found,) * self.num_envs

    def state_problem(self) -> str | None:
        """See the base class; here the vector environment answers for all its rows."""
        if offers_state(self.env):
            return None
        name = type(self.env).__name__
        return (
            f"The state of the environment {self.env_names[0]} cannot be stored: {name} has no get_state() "
            "and set_state(state)"
        )

    def get_states(self) -> list[dict[str, Any]]:
        """See the base class; the list has one state for all rows."""
        state = copy.deepcopy(self.env.get_state())
        return [{"env": state, "resets_next": self._resets_next.copy()}]

    def set_states(self, states: Sequence[dict[str, Any]]) -> None:
        """See the base class."""
        (state,) = states
        self.env.set_state(copy.deepcopy(state["env"]))
        self._resets_next = state["resets_next"].copy()

    def _rows_have(self, name: str) -> bool:
        """True if every row has the attribute and can be queried for it."""
        call = getattr(self.env.unwrapped, "call", None)
        return call is not None and all(call("has_wrapper_attr", name))

    def _take(self, found: tuple[Any, ...], ignored: np.ndarray) -> tuple[bool, Metrics]:
        """Copy a step's results to the buffers, and begin episodes; returns if any ended, and metrics."""
        raw, rewards, terminated, truncated, infos = found
        buffers, taken = self.buffers, None
        if ignored.any():
            taken, self._resets_next = ~ignored, np.zeros(self.num_envs, np.bool_)
        buffers.rewards[:] = as_rewards(self._batch(rewards, "rewards"), taken)
        buffers.terminated[:] = as_flags(self._batch(terminated, "terminated"), "terminated", taken)
        buffers.truncated[:] = as_flags(self._batch(truncated, "truncated"), "truncated", taken)
        ended = buffers.terminated | buffers.truncated
        has_ended = bool(ended.any())
        metrics = self._columns_of(infos, self._all_rows if taken is None else taken, self._all_rows)
        self._write(raw, buffers.obs)
        if has_ended:
            of_reset = self._finish(ended, infos)
            self._check(self._final_checks, ended)
            metrics = merged(merged(self._metrics_of_the_end(infos, ended), metrics), of_reset)
        return has_ended, metrics

    def _metrics_of_the_end(self, infos: Mapping[str, Any], ended: np.ndarray) -> Metrics:
        """Collect metrics from `infos["final_info"]`: columns, or a dict for each row that has ended."""
        found = infos.get("final_info")
        if found is None:
            return []
        if isinstance(found, Mapping):
            return self._columns_of(found, ended, ended)
        metrics: Metrics = []
        rows = self._batch(found, "final_info")
        for row in np.flatnonzero(ended).tolist():
            collect_metrics(rows[row] or {}, row, metrics)
        return metrics

    def _finish(self, ended: np.ndarray, infos: Mapping[str, Any]) -> Metrics:
        """Fill `final_obs` and, if possible, `obs` of ended rows; returns the metrics of their reset."""
        if self._mode is AutoresetMode.SAME_STEP:
            self._write_final(infos, ended)
            return []
        if self._mode is AutoresetMode.NEXT_STEP:
            self._copy_to_final(ended)
            self._resets_next = ended
            return []
        return self._reset_rows(ended)

    def _reset_rows(self, rows: np.ndarray) -> Metrics:
        """Reset rows, whose observations move to `final_obs`; returns the metrics of the reset."""
        self._copy_to_final(rows)
        raw, infos = reset_result(self.env.reset(options={"reset_mask": rows.copy()}), self.env)
        self._write(raw, self.buffers.obs, rows)
        return self._columns_of(infos, rows, rows)

    def _copy_to_final(self, rows: np.ndarray) -> None:
        for key, column in self.buffers.obs.items():
            self.buffers.final_obs[key][rows] = column[rows]

    def _write(self, raw: Any, columns: dict[str, np.ndarray], rows: np.ndarray | None = None) -> None:
        """Copy a batch of raw observations, or only its rows where `rows` ((N,) bool) is True."""
        for leaf, batch in zip(self._layout.leaves, self._layout.values(raw), strict=True):
            value = self._batch(batch, f"observation {leaf.key!r}")
            try:
                if rows is None:
                    columns[leaf.key][...] = leaf.convert(value, self.num_envs)
                else:
                    columns[leaf.key][rows] = leaf.convert(as_numpy(value)[rows], int(rows.sum()))
            except WrongValueError as error:
                raise _of_row(error, rows) from None

    def _batch(self, value: Any, what: str) -> Any:
        """Check that a value has one entry per environment. Raises: ValueError if it does not."""
        try:
            shape = np.shape(value)
        except ValueError:  # the lists have different lengths
            shape = (len(value),)
        if shape[:1] != (self.num_envs,):
            raise ValueError(
                f"{type(self.env).__name__} returned {what} with shape {shape}, but its spaces and num_envs "
                f"require ({self.num_envs}, ...). Fix: make the environment return one value for every row "
                "in every step (for EnvPool: batch_size equal to num_envs, and a single player)."
            )
        return value

    def _write_final(self, infos: Mapping[str, Any], ended: np.ndarray) -> None:
        final = infos.get("final_obs")
        if final is None:
            raise ValueError(
                f"{type(self.env).__name__} ended an episode without infos['final_obs'] (its infos: "
                f"{sorted(infos)}), so the last observation is lost. Fix: make the vector environment "
                "report final_obs on same-step autoreset."
            )
        is_nested = isinstance(final, tuple) and isinstance(self.env.single_observation_space, spaces.Tuple)
        is_column = isinstance(final, np.ndarray) and final.dtype.kind != "O"
        if is_nested or is_column or not isinstance(final, (list, tuple, np.ndarray)):
            self._write(final, self.buffers.final_obs, ended)
            return
        columns = list(self.buffers.final_obs.values())
        for row in np.flatnonzero(ended).tolist():
            try:
                self._layout.write(self._batch(final, "final_obs")[row], columns, row)
            except WrongValueError as error:
                raise error.at(row) from None

    def _check(self, checks: Sequence[ColumnCheck], rows: np.ndarray | None = None) -> None:
        for check, column in checks:
            try:
                check(column if rows is None else column[rows])
            except WrongValueError as error:
                raise _of_row(error, rows) from None

    def _located(self, error: WrongValueError) -> ValueError:
        name = self.env_names[error.row or 0]
        return error.completed(f"The environment {name} returned", step_location(error.row, self._num_steps))

    def _columns_of(self, infos: Mapping[str, Any], unmasked: np.ndarray, allowed: np.ndarray) -> Metrics:
        """Collect metrics from infos with one entry per environment, and an optional mask "_<key>".

        Args:
            infos: may lack the mask for a key.
            unmasked: (N,) bool, the rows that count if the mask is missing.
            allowed: (N,) bool, the rows that may count at all.
        """
        metrics: Metrics = []
        for key, values in infos.items():
            if isinstance(key, str) and key.startswith(METRIC_PREFIX):
                mask = infos.get(f"_{key}")
                counts = (
                    unmasked if mask is None else allowed & np.asarray(self._batch(mask, f"_{key}"), bool)
                )
                for row in np.flatnonzero(counts).tolist():
                    value = as_metric(self._batch(values, f"infos[{key!r}]")[row], key, row)
                    metrics.append((row, key[len(METRIC_PREFIX) :], value))
        return metrics


def _of_row(error: WrongValueError, rows: np.ndarray | None) -> WrongValueError:
    """Convert an error's row, counted in the rows (N,) bool, to the row in the whole batch."""
    if rows is None or error.row is None:
        return error
    return error.at(int(np.flatnonzero(rows)[error.row]))


def _name_of(env: Any) -> str:
    own = getattr(env, "env_name", None) or getattr(env.spec, "name", None)
    return str(own or type(env.unwrapped).__name__.removesuffix("GymnasiumEnvPool"))


def _autoreset_mode(env: Any) -> AutoresetMode:
    mode = (env.metadata or {}).get("autoreset_mode")
    try:
        return AutoresetMode(mode)
    except ValueError:
        raise ValueError(
            f"{type(env).__name__} has metadata['autoreset_mode'] = {mode!r}, but gymnasium.vector's "
            "AutoresetMode has only NEXT_STEP, SAME_STEP and DISABLED. Fix: set it to one of these."
        ) from None


def _check_kind(env: Any, num_specs: int) -> None:
    if not isinstance(env, gym.vector.VectorEnv):
        raise TypeError(
            f"env_mode='already_vectorized' got {type(env).__name__}, but needs a "
            "gymnasium.vector.VectorEnv. Fix: return gymnasium.make_vec(...) from make_train_env, or use "
            "env_mode 'sync' or 'async'."
        )
    if num_specs not in (1, env.num_envs):
        raise ValueError(
            f"The vector environment has {env.num_envs} rows, but parallel_actors is {num_specs}. "
            f"Fix: set Experiment.parallel_actors = {env.num_envs} (loxodon evaluate: --parallel "
            f"{env.num_envs}), or build the environment with {num_specs} rows."
        )
