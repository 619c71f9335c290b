"""Checks and copies of values that environments return, since an environment may reuse its objects later.

Errors are `WrongValueError`. Callers that know the environment's name and row add them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from ..data.errors import WrongValueError
from ..data.spaces import as_numpy, not_finite, shown

NUM_STEP_PARTS = 5
METRIC_PREFIX = "metric/"
"""Prefix of special metrics in `info`: numbers that are reported under the rest of the key."""
MAX_REWARD = float(np.finfo(np.float32).max)
Metrics = list[tuple[int, str, Any]]
"""Each entry holds the row of the environment, a name, and a float or a list of floats."""


def reset_result(found: Any, env: gym.Env[Any, Any]) -> tuple[Any, dict[str, Any]]:
    """Check the `(observation, info)` returned by `env.reset`. Raises: TypeError for anything else."""
    if not isinstance(found, tuple) or len(found) != 2:  # noqa: PLR2004 - a pair
        raise wrong_result(env, "reset", _kind_of(found))
    return found[0], as_info(found[1])


def step_result(found: Any, env: gym.Env[Any, Any]) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
    """Check the five values returned by `env.step`. Raises: TypeError for anything else."""
    if not isinstance(found, tuple | list) or len(found) != NUM_STEP_PARTS:
        raise wrong_result(env, "step", _kind_of(found))
    raw, reward, terminated, truncated, info = found
    return raw, reward, terminated, truncated, as_info(info)


def wrong_result(env: gym.Env[Any, Any], call: str, found: str) -> TypeError:
    """Make the error for a `step` or `reset` that returned something other than its parts."""
    expected = {
        "reset": "the pair (observation, info). Fix: return observation, {} from it.",
        "step": "observation, reward, terminated, truncated, info. Fix: return these five values; `done` of "
        "old gym was terminated or truncated.",
    }
    return TypeError(
        f"{type(env.unwrapped).__name__}.{call} returned {found}, but gymnasium expects {expected[call]}"
    )


def is_unpacking(error: BaseException) -> bool:
    """Return True if a gymnasium wrapper could not unpack the result of the next `step` or `reset`."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    is_inside = trace is not None and str(trace.tb_frame.f_globals.get("__name__")).startswith("gymnasium.")
    return is_inside and isinstance(error, TypeError | ValueError) and "unpack" in str(error)


def _kind_of(found: Any) -> str:
    return f"{len(found)} values" if isinstance(found, tuple | list) else f"one {type(found).__name__}"


def as_info(info: Any) -> dict[str, Any]:
    """Check that the info of a step or reset is a dict."""
    if isinstance(info, Mapping):
        return info if isinstance(info, dict) else dict(info)
    raise WrongValueError(
        f"the info {shown(info)}", "The info must be a dict. Fix: return {} if there is nothing to report."
    )


def as_reward(reward: Any, row: int | None = None) -> float:
    """Convert a reward to a float that float32 can hold, from a number or a one-element array or tensor."""
    value = _one_number(reward)
    if value is None:
        raise WrongValueError(
            f"the reward {shown(reward)}",
            "A reward must be one real number. Fix: return float(reward) from its step.",
            row,
        )
    if not abs(value) <= MAX_REWARD:  # this form also catches NaN
        raise not_finite("reward", value, row)
    return value


def as_flag(flag: Any, name: str) -> bool:
    """Convert `terminated` or `truncated` to a bool from a bool, 0 or 1, or a one-element array or tensor."""
    if type(flag) is bool or type(flag) is np.bool_:
        return bool(flag)
    value = _one_number(flag)
    if value not in {0.0, 1.0}:
        raise WrongValueError(
            f"{shown(flag)} as {name}",
            f"It must be a single boolean. Fix: return bool({name}) from its step.",
        )
    return bool(value)


def as_rewards(rewards: Any, rows: np.ndarray | None) -> np.ndarray:
    """Convert N environments' rewards to (N,) float64; 0 where `rows` ((N,) bool, None for all) is False."""
    array = _array(rewards)
    if array.dtype.kind not in "biuf" or array.ndim != 1:
        raise WrongValueError(
            f"the rewards {shown(rewards)}",
            "Rewards must be one real number per environment. Fix: return an array (num_envs,) of float32.",
        )
    found = array.astype(np.float64)
    if rows is not None:
        found[~rows] = 0.0
    if not np.abs(found).max() <= MAX_REWARD:  # this form also catches NaN
        row = int(np.argmin(np.abs(found) <= MAX_REWARD))
        as_reward(found[row], row)
    return found


def as_flags(flags: Any, name: str, rows: np.ndarray | None) -> np.ndarray:
    """Convert `terminated` or `truncated` of N environments to (N,) bool; False where `rows` is False."""
    array = _array(flags)
    judged = array if rows is None or array.ndim != 1 else array[rows]
    if array.ndim != 1 or (array.dtype != bool and not np.isin(judged, (0, 1)).all()):
        raise WrongValueError(
            f"{shown(flags)} as {name}",
            "It must be one boolean per environment. Fix: return an array (num_envs,) of bool.",
        )
    return array.astype(np.bool_) if rows is None else array.astype(np.bool_) & rows


def _array(value: Any) -> np.ndarray:
    """The value as an array; lists of different lengths become one object."""
    try:
        return as_numpy(value)
    except ValueError:
        return np.asarray(None)


def _one_number(value: Any) -> float | None:
    """The only number in a value; None if it has no number or several."""
    if not isinstance(value, int | float | np.integer | np.floating | np.bool_):
        array = _array(value)
        if array.size != 1 or array.dtype.kind not in "biuf":
            return None
        value = array.item()
    try:
        return float(value)
    except OverflowError:  # the int has several hundred digits
        return math.inf if value > 0 else -math.inf


def merged(metrics: Metrics, others: Metrics) -> Metrics:
    """Merge metrics; those of a step take precedence over others, so that an episode's end counts first."""
    reported = {(row, name) for row, name, _ in metrics}
    return metrics + [metric for metric in others if metric[:2] not in reported]


def collect_metrics(info: Mapping[str, Any], row: int, metrics: Metrics) -> None:
    """Append the special metrics of one environment's info to `metrics`."""
    for key, value in info.items():
        if isinstance(key, str) and key.startswith(METRIC_PREFIX):
            metrics.append((row, key[len(METRIC_PREFIX) :], as_metric(value, key, row)))


def as_metric(value: Any, key: str, row: int) -> float | list[float]:
    """Convert a special metric to a float, or to a list for an array of numbers."""
    if type(value) is float:
        return value
    array = _array(value)
    if array.dtype.kind not in "biuf":
        raise WrongValueError(
            f"{shown(value)} as info[{key!r}]",
            f"Keys that begin with {METRIC_PREFIX!r} are metrics and must hold numbers or arrays of "
            "numbers. Fix: return a number, omit the key when there is no value, or rename it.",
            row,
        )
    numbers: float | list[float] = array.astype(np.float64).ravel().tolist() if array.ndim else float(array)
    return numbers


def copied(value: Any, copies: dict[int, Any] | None = None) -> Any:
    """Copy nested dicts, lists, tuples and arrays; other objects are returned unchanged.

    copies: the copies made so far, by the id of the original, since values may contain themselves.
    """
    copies = {} if copies is None else copies
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) is dict:
        found = copies[id(value)] = dict[Any, Any]()
        found.update((key, copied(part, copies)) for key, part in value.items())
        return found
    if type(value) is list:
        parts = copies[id(value)] = list[Any]()
        parts.extend(copied(part, copies) for part in value)
        return parts
    return tuple(copied(part, copies) for part in value) if type(value) is tuple else value


def check_env(env: gym.Env[Any, Any]) -> None:
    """Raise TypeError for an environment without spaces, or of old gym, whose reset does not take a seed."""
    for name in ("observation_space", "action_space"):
        check_space(env, name)
    parameters = inspect.signature(env.unwrapped.reset).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not takes_all and not {"seed", "options"} <= parameters.keys():
        raise TypeError(
            f"{type(env.unwrapped).__name__}.reset takes ({', '.join(parameters)}), but gymnasium passes it "
            "seed and options. Fix: define reset(self, *, seed=None, options=None) and return "
            "(observation, info); for old gym environments, install shimmy."
        )


def check_space(env: Any, name: str) -> None:
    """Raise TypeError unless the attribute `name` of an environment is a gymnasium space."""
    space = getattr(env, name, None)
    if not isinstance(space, gym.Space):
        found = "has no" if space is None else f"has {shown(space)} as"
        raise TypeError(
            f"The environment {type(env.unwrapped).__name__} {found} {name}, but every environment must "
            f"declare its spaces. Fix: set self.{name} to a space of gymnasium.spaces in its __init__, for "
            "example Box or Discrete."
        )
