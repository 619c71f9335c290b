"""What gin knows: the configurables, their parameters with type hints, and what their code mentions.

The only place that touches gin's private tables; gin has no public way to list its configurables.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import threading
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import gin

MISSING = inspect.Parameter.empty
MACRO = "gin.macro"


@dataclass(frozen=True)
class Param:
    """One parameter of a configurable. `hint` is Any where it cannot be resolved."""

    name: str
    default: Any
    hint: Any
    is_keyword_only: bool
    is_settable: bool
    """False where the code supplies the value, so that gin may not."""


@dataclass(eq=False)
class Configurable:
    """A class or function that gin can configure."""

    selector: str
    wrapped: Callable[..., Any]
    denied: frozenset[str]
    allowed: frozenset[str] | None
    is_method: bool

    @cached_property
    def name(self) -> str:
        """The shortest name that a config can use."""
        return str(gin.config._REGISTRY.minimal_selector(self.selector))

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The function that receives the parameters, without gin's wrapper."""
        function: Callable[..., Any] = inspect.unwrap(_construction_function(self.wrapped))
        return function

    @cached_property
    def takes_any(self) -> bool:
        """True if it accepts arbitrary keywords, whose names cannot be checked."""
        return any(p.kind is p.VAR_KEYWORD for p in _parameters(self.function))

    @cached_property
    def params(self) -> dict[str, Param]:
        """Named parameters in the order of the signature, without `self`."""
        hints: dict[str, Any] = {}
        if isinstance(self.wrapped, type) and dataclasses.is_dataclass(self.wrapped):
            for base in reversed(self.wrapped.__mro__):  # an inherited field is annotated in its own module
                hints |= type_hints(base)
        hints |= type_hints(self.function)
        found = {}
        listed = _parameters(self.function)
        if isinstance(self.wrapped, type) or self.is_method:
            listed = listed[1:]
        factories = _default_factories(self.wrapped)
        for p in listed:
            if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
                continue
            settable = p.name not in self.denied and (self.allowed is None or p.name in self.allowed)
            default = factories.get(p.name, p.default)
            hint = hints.get(p.name, Any)
            found[p.name] = Param(p.name, default, hint, p.kind is p.KEYWORD_ONLY, settable)
        return found

    @cached_property
    def result_hint(self) -> Any:
        """What a call gives: the class itself, or a function's return annotation (Any if there is none)."""
        if isinstance(self.wrapped, type):
            return self.wrapped
        return type_hints(self.function).get("return", Any)


def _construction_function(wrapped: Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(wrapped, type):
        return wrapped
    for base in wrapped.__mro__:
        for name in ("__init__", "__new__"):
            if name in vars(base):
                return typing.cast("Callable[..., Any]", getattr(base, name))
    return wrapped


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    if function is object.__init__:
        return []  # it takes nothing, whatever its signature says
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:  # some builtins have no signature
        return []


def _default_factories(wrapped: Any) -> dict[str, Any]:
    """Factories of a dataclass's fields, in place of the opaque marker that the signature shows."""
    if not (isinstance(wrapped, type) and dataclasses.is_dataclass(wrapped)):
        return {}
    fields = dataclasses.fields(wrapped)
    return {f.name: f.default_factory for f in fields if f.default_factory is not dataclasses.MISSING}


def type_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Resolved annotations of a function or class; those that name something unimportable are left out."""
    found = {}
    module = sys.modules.get(getattr(function, "__module__", ""))
    names = getattr(function, "__globals__", getattr(module, "__dict__", {}))
    for name, annotation in getattr(function, "__annotations__", {}).items():
        holder = types.SimpleNamespace(__annotations__={name: annotation})
        try:
            found[name] = typing.get_type_hints(holder, globalns=names)[name]
        except (NameError, TypeError, AttributeError, SyntaxError):
            continue
    return found


_KNOWN: dict[int, tuple[Any, Configurable]] = {}


def _view(entry: Any) -> Configurable:
    """Our view of an entry of gin's registry, made once per entry."""
    held = _KNOWN.get(id(entry))
    if held is None or held[0] is not entry:
        allowed = frozenset(entry.allowlist) if entry.allowlist else None
        denied = frozenset(entry.denylist or ())
        view = Configurable(entry.selector, entry.wrapped, denied, allowed, bool(entry.is_method))
        held = _KNOWN[id(entry)] = (entry, view)
    return held[1]


def find(selector: str) -> list[Configurable]:
    """Every configurable that a (partial) selector can mean: one if all is well."""
    return [_view(entry) for entry in gin.config._REGISTRY.get_all_matches(selector)]


def find_object(thing: Any) -> Configurable | None:
    """The configurable whose class or function `thing` is."""
    if not callable(thing) or inspect.ismethod(thing):
        return None
    try:
        entry = gin.config._inverse_lookup(thing)
    except (TypeError, ValueError):  # not hashable, or its wrappers form a circle
        return None
    return _view(entry) if entry is not None else None


def names_known() -> list[str]:
    """Shortest names of all configurables except gin's own."""
    entries = [entry for _, entry in gin.config._REGISTRY.items()]
    return [_view(entry).name for entry in entries if entry.module != "gin"]


def methods_of(configurable: Configurable) -> list[Configurable]:
    """Configurable methods of a configurable class."""
    entries = [entry for selector, entry in gin.config._REGISTRY.items() if entry.is_method]
    return [_view(e) for e in entries if e.selector.rpartition(".")[0] == configurable.selector]


def constant_value(name: str) -> Any:
    """The value of a gin constant such as `gin.REQUIRED`, or MISSING if there is none of this name."""
    matches = gin.config._CONSTANTS.matching_selectors(name)
    return gin.config._CONSTANTS[matches[0]] if len(matches) == 1 else MISSING


# --- gin's state ----------------------------------------------------------------------------------------


_PRESERVING = threading.RLock()


@contextmanager
def preserved_config() -> Iterator[None]:
    """Put gin's configuration back afterwards, whatever the block does: bindings, what was used, the lock.

    gin's public texts would not do: they leave out values that cannot be written, such as objects. What the
    block imports stays registered. One block at a time; other threads see what the block does.
    """
    config = gin.config
    with _PRESERVING:
        bindings = {key: dict(values) for key, values in config._CONFIG.items()}
        operative = {key: dict(values) for key, values in config._OPERATIVE_CONFIG.items()}
        singletons, imports = dict(config._SINGLETONS), set(config._IMPORTS)
        was_locked = config.config_is_locked()
        config._set_config_is_locked(False)
        try:
            yield
        finally:
            for table, before in (
                (config._CONFIG, bindings),
                (config._OPERATIVE_CONFIG, operative),
                (config._SINGLETONS, singletons),
                (config._IMPORTS, imports),
            ):
                table.clear()
                table.update(before)
            config._set_config_is_locked(was_locked)


# --- what code mentions -------------------------------------------------------------------------------------


def mentioned(configurable: Configurable) -> list[Configurable]:
    """Configurables that the code of this one names, directly or through plain helpers of the same package.

    A reading of names, not of behaviour: what is listed may be constructed, what is not listed can hardly be.
    """
    package = (configurable.wrapped.__module__ or "").partition(".")[0]
    by_name: dict[str, list[Configurable]] = {}
    for _, entry in gin.config._REGISTRY.items():
        by_name.setdefault(entry.name, []).append(_view(entry))
    found: dict[str, Configurable] = {}
    queue: list[Any] = [configurable.wrapped]
    visited = {id(configurable.wrapped)}
    while queue:
        for function in _functions_in(queue.pop(), package):
            names = list(_names_in(function.__code__))
            found.update({c.selector: c for name in names for c in by_name.get(name, ())})
            for thing in _things_named(names, function.__globals__):
                is_helper = isinstance(thing, (type, types.FunctionType)) and find_object(thing) is None
                if is_helper and id(thing) not in visited and _package(thing) == package:
                    visited.add(id(thing))
                    queue.append(thing)
    found.pop(configurable.selector, None)
    return list(found.values())


def _things_named(names: Sequence[str], variables: Mapping[str, Any]) -> Iterator[Any]:
    """What global names refer to, and what the same names refer to in modules among it: `module.function`."""
    things = [variables[name] for name in names if name in variables]
    yield from things
    for module in things:
        if isinstance(module, types.ModuleType):
            yield from (vars(module)[name] for name in names if name in vars(module))


def _package(thing: Any) -> str:
    return (getattr(thing, "__module__", None) or "").partition(".")[0]


def _functions_in(thing: Any, package: str) -> Iterator[types.FunctionType]:
    """The function itself, or the methods of a class and of its bases within the package."""
    things = [thing]
    if isinstance(thing, type):
        things = [m for base in thing.__mro__ if _package(base) == package for m in vars(base).values()]
    for member in things:
        function = getattr(
            member, "__func__", getattr(member, "fget", member)
        )  # static, class method, property
        if callable(function) and isinstance(plain := inspect.unwrap(function), types.FunctionType):
            yield plain


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Global names, attributes and imported names in a code object and in the functions nested in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
