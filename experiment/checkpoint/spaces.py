"""The spaces of an environment as JSON and back, and differences between two environments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from ...data.errors import FormatError, visible
from ...data.spaces import PolicyActionSpace
from ...envs import ActionMap, ObsLayout, Tokens

# Limit for an observation and an action together; a Box keeps two bounds for each number.
_MAX_NUMBERS = 2**26
# Errors for values that do not describe a space; the AssertionErrors are from gymnasium.
_UNUSABLE = (FormatError, LookupError, TypeError, ValueError, ArithmeticError, AssertionError, RecursionError)
_FIX = "Fix: use a file written by this version of Loxodon."


@dataclass(frozen=True)
class EnvSpaces:
    """Observations and actions as the environment defines them, before anything is flattened or scaled."""

    observation: Space[Any]
    action: Space[Any]

    @property
    def policy_observation(self) -> spaces.Dict:
        """The observation space of the agent: a flat Dict."""
        return ObsLayout(self.observation).space

    @property
    def policy_action(self) -> PolicyActionSpace:
        """The action space of the agent: Discrete or MultiDiscrete from zero, or Box(-1, 1, (A,))."""
        return ActionMap(self.action).policy_space

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"observation": space_to_json(self.observation), "action": space_to_json(self.action)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> EnvSpaces:
        """Restore the result of to_json.

        Raises: ValueError for anything else, and for huge spaces, before memory is allocated.
        """
        try:
            size = _num_numbers(value["observation"]) + _num_numbers(value["action"], is_one_hot=True)
            if size <= _MAX_NUMBERS:
                return cls(space_from_json(value["observation"]), space_from_json(value["action"]))
        except _UNUSABLE as error:
            raise ValueError(f"The header of the file describes no spaces ({error!r}). {_FIX}") from error
        raise ValueError(
            f"The spaces in the header of the file have {size:,} numbers, but at most {_MAX_NUMBERS:,} are "
            f"allowed. {_FIX}"
        )


def space_to_json(space: Space[Any]) -> dict[str, Any]:
    """JSON value of a Box, Discrete, MultiDiscrete, MultiBinary, Tokens, or a Dict or Tuple of these.

    Raises: TypeError for other spaces.
    """
    for kind, encode in _ENCODERS.items():
        if isinstance(space, kind):
            return {"type": kind.__name__, **encode(space)}
    raise TypeError(
        f"The space {space} has no JSON form; allowed are Box, Discrete, MultiDiscrete, MultiBinary, Tokens, "
        "Dict and Tuple. Fix: wrap the environment so that it uses these."
    )


_ENCODERS: dict[type, Any] = {
    spaces.Dict: lambda s: {"spaces": [[key, space_to_json(child)] for key, child in s.spaces.items()]},
    spaces.Tuple: lambda s: {"spaces": [space_to_json(child) for child in s.spaces]},
    spaces.Box: lambda s: {
        "low": _numbers(s.low),
        "high": _numbers(s.high),
        "shape": list(s.shape),
        "dtype": np.dtype(s.dtype).name,
    },
    spaces.Discrete: lambda s: {"n": int(s.n), "start": int(s.start)},
    Tokens: lambda s: {"words": list(s.words), "max_tokens": s.max_tokens},  # Tokens is also a MultiDiscrete
    spaces.MultiDiscrete: lambda s: {
        "nvec": s.nvec.tolist(),
        "start": np.broadcast_to(getattr(s, "start", 0), s.nvec.shape).tolist(),
        "dtype": np.dtype(s.dtype).name,
    },
    spaces.MultiBinary: lambda s: {"n": s.n if isinstance(s.n, int) else list(s.shape)},
}


def space_from_json(value: dict[str, Any]) -> Space[Any]:
    """Restore the result of space_to_json; anything else raises the errors of the spaces' constructors."""
    return _DECODERS[value["type"]](value)


def _num_numbers(value: dict[str, Any], *, is_one_hot: bool = False) -> int:
    """Lower bound on the numbers in a described space; with `is_one_hot`, of actions as networks see them."""
    kind = value["type"]
    if kind in ("Dict", "Tuple"):
        children = [child[1] if kind == "Dict" else child for child in value["spaces"]]
        return sum(_num_numbers(child, is_one_hot=is_one_hot) for child in children)
    if kind == "Tokens":
        return abs(value["max_tokens"])  # type: ignore[no-any-return]
    if kind in ("Box", "MultiBinary"):
        size = value["shape"] if kind == "Box" else value["n"]
        return math.prod(map(abs, size if isinstance(size, list) else [size]))
    if kind in ("Discrete", "MultiDiscrete") and is_one_hot:
        return sum(map(abs, np.ravel(value["n" if kind == "Discrete" else "nvec"]).tolist()))
    return 1


def _plain(dtype: str) -> np.dtype[Any]:
    found = np.dtype(dtype)
    if found.kind not in "biuf":  # with other kinds, a single element can take gigabytes
        raise FormatError(f"{found} is not a numeric dtype")
    return found


def _box(value: dict[str, Any]) -> Space[Any]:
    dtype, shape = _plain(value["dtype"]), tuple(value["shape"])
    low, high = (_array(value[name], shape, dtype) for name in ("low", "high"))
    return spaces.Box(low, high, shape, dtype.type)


_DECODERS: dict[str, Callable[[dict[str, Any]], Space[Any]]] = {
    "Box": _box,
    "Tokens": lambda v: Tokens(list(map(str, v["words"])), v["max_tokens"]),
    "Dict": lambda v: spaces.Dict({key: space_from_json(child) for key, child in v["spaces"]}),
    "Tuple": lambda v: spaces.Tuple([space_from_json(child) for child in v["spaces"]]),
    "Discrete": lambda v: spaces.Discrete(v["n"], start=v["start"]),
    "MultiBinary": lambda v: spaces.MultiBinary(v["n"]),
    "MultiDiscrete": lambda v: spaces.MultiDiscrete(
        np.array(v["nvec"]), dtype=_plain(v["dtype"]).type, start=np.array(v["start"])
    ),
}


def _numbers(bounds: np.ndarray) -> Any:
    """One number if all are equal, otherwise a list of all; infinities as texts, which JSON lacks."""
    flat = bounds.reshape(-1)
    values = flat[:1].tolist() if flat.size and (flat == flat[0]).all() else flat.tolist()
    shown = [str(v) if isinstance(v, float) and not math.isfinite(v) else v for v in values]
    return shown[0] if len(shown) == 1 else shown


def _array(value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    if not isinstance(value, list):
        return np.full(shape, float(value) if isinstance(value, str) else value, dtype)
    numbers = [float(v) if isinstance(v, str) else v for v in value]
    return np.array(numbers, dtype).reshape(shape)


def check_spaces(saved: EnvSpaces | None, own: EnvSpaces, *, what: str, fix: str) -> None:
    """Refuse weights or data that were made for another environment; None fits all.

    Args:
        saved: spaces in the file.
        own: spaces of this run.
        what: beginning of the error, such as "The policy in x".
        fix: its text after "Fix:".

    Raises: ValueError naming each difference.
    """
    if saved is not None and (differences := space_differences(saved, own)):
        raise ValueError(f"{what} belongs to another environment: {'; '.join(differences)}. Fix: {fix}")


def space_differences(saved: EnvSpaces, own: EnvSpaces) -> list[str]:
    """Reasons why a policy for `saved`, from a file, cannot act in `own`, one per observation or action.

    Bounds of actions count. Bounds of observations do not, as nothing depends on them.
    """
    theirs, ours = saved.policy_observation.spaces, own.policy_observation.spaces
    found = [f"observation {key!r} is only in the file" for key in theirs if key not in ours]
    found += [f"observation {key!r} is not in the file" for key in ours if key not in theirs]
    for key in theirs.keys() & ours.keys():
        if _signature(theirs[key]) != _signature(ours[key]):
            found.append(f"observation {key!r} is {theirs[key]} in the file and {ours[key]} here")
    if saved.action != own.action:
        found.append(f"the action space is {saved.action} in the file and {own.action} here")
    return sorted(map(visible, found))


def _signature(space: Space[Any]) -> Any:
    return (space.shape, space.dtype) if isinstance(space, spaces.Box) else space
