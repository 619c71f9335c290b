"""Transfer of gin's configuration to worker processes that do not inherit it.

A forked worker has the configuration of its parent. Any other worker receives it as text, together with its
environments, and keeps the bindings of configurables that it has imported. Objects that another process can
import by name are imported there; all others are sent by value, even if gin wraps them.
"""

from __future__ import annotations

import inspect
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import gin
from gin import config as gin_config

_MACRO = "gin.macro"
_KEPT = ("__dict__", "__defaults__", "__kwdefaults__", "__name__", "__qualname__", "__module__", "__doc__")


@dataclass(frozen=True)
class GinCall:
    """Calls `target` in a fixed scope of gin (outermost first)."""

    target: Callable[..., Any]
    scope: tuple[str, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with gin.config_scope(list(self.scope)):
            return self.target(*args, **kwargs)


def in_current_scope(target: Callable[..., Any]) -> Callable[..., Any]:
    """Return a callable that always runs `target` in the current scope of gin."""
    scope = gin.current_scope()
    return GinCall(target, tuple(scope)) if scope else target


def is_importable(thing: Any) -> bool:
    """Return True if another process can import exactly this class or function by its module and name."""
    module = getattr(thing, "__module__", None)
    holder: Any = sys.modules.get(module) if isinstance(module, str) and module != "__main__" else None
    for part in getattr(thing, "__qualname__", "").split("."):
        holder = getattr(holder, part, None)
    return holder is not None and holder is thing


def inside_gin(thing: Any) -> Any:
    """The object inside a wrapper of gin, such as `@scope/Name`; wrappers of other packages are kept."""
    while not is_importable(thing):
        if isinstance(thing, type):
            call, inner = vars(type(thing)).get("__call__"), thing.__base__
            if thing.__bases__ != (inner,) or type(inner) is type(thing):  # a subclass that gin did not make
                return thing
        else:
            call, inner = thing, getattr(thing, "__wrapped__", None)
        if not _is_of_gin(call):
            return thing
        thing = inner
    return thing


def _is_of_gin(function: Any) -> bool:
    return type(function) is FunctionType and function.__globals__ is vars(gin_config)


# ---- to a worker ----


def ship(thing: Any) -> bytes:
    """Serialise anything, including lambdas and local classes, with gin's configuration, for `unship`.

    Objects that the bindings of its configurables refer to are sent too. The configuration's imports are
    omitted, because they would load torch in workers.

    Raises: pickle's errors for objects that cannot be sent, such as locks.
    """
    lines = [line for line in gin.config_str().splitlines() if not line.startswith(("import ", "from "))]
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump((thing, "\n".join(lines)))
    visited: set[tuple[str, str]] = set()
    while keys := pickler.found - visited:
        visited |= keys
        for reference in _references(keys):
            pickler.found.add(reference.config_key)
            pickler.dump(reference.configurable.wrapper)
    return file.getvalue()


def unship(data: bytes) -> tuple[Any, str]:
    """Return the argument of `ship`, and the text of the configuration for `bind_known`."""
    unpickler = pickle.Unpickler(io.BytesIO(data))  # written by our own parent
    shipped: tuple[Any, str] = unpickler.load()
    with suppress(EOFError):
        while True:
            unpickler.load()  # registers it with gin
    return shipped


def bind_known(text: str) -> int:
    """Bind parameters of configurables that this process has imported; returns how many have bindings."""
    gin.parse_config(text, skip_unknown=True)
    return len(gin_config._CONFIG)


def _references(keys: set[tuple[str, str]]) -> Iterator[Any]:
    """Yield the references in the bindings of configurables (scope, selector); "" means any scope."""
    for (scope, selector), values in list(gin_config._CONFIG.items()):
        name = scope if selector == _MACRO else ""
        if (name, selector) in keys or (scope, selector) in keys:
            yield from gin_config.iterate_references({(scope, selector): values})


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Pickles by value what cannot be imported, without gin's own globals.

    Attributes:
        found: ("", selector) of each configurable in the pickled object, including bases of classes.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.found: set[tuple[str, str]] = set()

    def reducer_override(self, obj: Any) -> Any:
        """See pickle. A function of gin gets the receiver's globals of gin, with its locks and bindings."""
        if isinstance(obj, type | FunctionType):
            layers = obj.__mro__ if isinstance(obj, type) else [obj, inspect.unwrap(obj)]
            entries = map(gin_config._INVERSE_REGISTRY.get, layers)
            self.found |= {("", entry.selector) for entry in entries if entry is not None}
        if not _is_of_gin(obj) or is_importable(obj):
            return super().reducer_override(obj)
        cells = [cell.cell_contents for cell in obj.__closure__ or ()]
        configured = dict(zip(obj.__code__.co_freevars, cells, strict=True)).get("fn_or_cls")
        attributes = {name: getattr(obj, name) for name in _KEPT}
        state = cells, attributes, gin_config._INVERSE_REGISTRY.get(configured)
        return _function_of_gin, (obj.__code__, len(cells)), state, None, None, _complete


def _function_of_gin(code: Any, num_cells: int) -> FunctionType:
    return FunctionType(code, vars(gin_config), closure=tuple(CellType() for _ in range(num_cells)))


def _complete(function: FunctionType, state: tuple[list[Any], dict[str, Any], Any]) -> None:
    """Fill in parts that may refer to the function itself, and register it with gin."""
    cells, attributes, entry = state
    for cell, content in zip(function.__closure__ or (), cells, strict=True):
        cell.cell_contents = content
    for name, value in attributes.items():
        setattr(function, name, value)
    if entry is not None:
        gin_config._REGISTRY[entry.selector] = gin_config._INVERSE_REGISTRY[entry.wrapped] = entry
