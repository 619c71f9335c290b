"""Types and recipes as JSON, from which another process makes the same: importable names, and values.

Numbers, texts, booleans, None and lists are written as such. Everything else is an object: `{"tuple":
[...]}`, `{"dict": {...}}`, `{"name": "module:Class"}`, or `{"call": ..., "args": [...], "kwargs": {...}}`,
which is a functools.partial, or with `"now": true` the result of the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np

from ...data.spaces import Tokens
from ...envs import EnvSpec
from ...envs.gin_values import is_importable

_DEEPEST = 100  # levels of nesting, such as a partial of a partial


def to_json(thing: Any) -> Any:
    """The JSON value. Raises: TypeError for an object without one, naming it."""
    if thing is None or isinstance(thing, bool | int | float | str):
        return thing
    if isinstance(thing, np.bool_ | np.integer | np.floating):
        return thing.item()
    if isinstance(thing, type | FunctionType | BuiltinFunctionType) and is_importable(thing):
        return {"name": name_of(thing)}
    if (write := _WRITERS.get(type(thing))) is not None:
        return write(thing)
    name = getattr(thing, "__qualname__", repr(thing))
    if not isinstance(thing, type | FunctionType | BuiltinFunctionType):
        raise TypeError(
            f"{name} is an object ({type(thing).__name__}). Fix: set it by gin (the second argument of "
            "load_config), which records it."
        )
    raise TypeError(
        f"{name} ({type(thing).__name__}) cannot be imported by another process. Fix: define it at the top "
        "of a module."
    )


def _of_dict(values: dict[Any, Any]) -> dict[str, Any]:
    if wrong := [key for key in values if not isinstance(key, str)]:
        raise TypeError(f"a dict has the key {wrong[0]!r}, which is not a string. Fix: use strings as keys.")
    return {"dict": {key: to_json(value) for key, value in values.items()}}


def _call(function: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    values = {key: to_json(value) for key, value in kwargs.items()}
    return {"call": to_json(function), "args": [to_json(one) for one in args], "kwargs": values}


_WRITERS: dict[type, Callable[[Any], Any]] = {
    list: lambda thing: [to_json(one) for one in thing],
    tuple: lambda thing: {"tuple": [to_json(one) for one in thing]},
    dict: _of_dict,
    functools.partial: lambda thing: _call(thing.func, *thing.args, **thing.keywords),
    EnvSpec: lambda spec: {**_call(EnvSpec, **vars(spec)), "now": True},
    Tokens: lambda space: {**_call(Tokens, list(space.words), space.max_tokens), "now": True},
}


def from_json(value: Any, find: Callable[[str], Any], *, calls: bool = False) -> Any:
    """The object that `to_json` was given.

    Args:
        value: JSON from a source that need not be trusted.
        find: returns the object of a name.
        calls: whether to make the calls marked "now"; if False, such a call is an error.

    Raises: ValueError for anything else, and the errors of `find`.
    """
    if isinstance(value, list):
        return [from_json(one, find, calls=calls) for one in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("tuple"), list):
        return tuple(from_json(value["tuple"], find, calls=calls))
    if isinstance(value.get("dict"), dict):
        return {key: from_json(one, find, calls=calls) for key, one in value["dict"].items()}
    if isinstance(value.get("name"), str):
        return find(value["name"])
    args, kwargs = value.get("args"), value.get("kwargs")
    may_call = "call" in value and (calls or "now" not in value)
    if may_call and isinstance(args, list) and isinstance(kwargs, dict):
        function = from_json(value["call"], find, calls=calls)
        if callable(function):
            values = {key: from_json(one, find, calls=calls) for key, one in kwargs.items()}
            made = functools.partial(function, *from_json(args, find, calls=calls), **values)
            return made() if "now" in value else made
    raise ValueError(
        f"{str(value)[:200]} is not a value that Loxodon writes. Fix: use a file that Loxodon wrote."
    )


def called_name(value: Any) -> str | None:
    """The `module:name` of a written type, or of the object it calls; None if it is not a written type."""
    for _ in range(_DEEPEST):
        if not isinstance(value, dict) or "call" not in value:
            break
        value = value["call"]
    name = value.get("name") if isinstance(value, dict) else value
    return name if isinstance(name, str) else None


def name_of(thing: Any) -> str:
    """The `module:name` of an importable object."""
    return f"{thing.__module__}:{thing.__qualname__}"
