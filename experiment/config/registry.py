"""View of gin's state: the configurables, their parameters with type hints, and what has been read so far.

Nothing else in this folder touches gin's private tables; gin has no public way to list its configurables.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from typing import Any

import gin

MISSING = inspect.Parameter.empty
MACRO = "gin.macro"


@dataclass(frozen=True)
class Configurable:
    """A class or function that gin can configure; `entry` is gin's own record of it."""

    entry: Any

    @property
    def name(self) -> str:
        """The shortest name that a config can use; gin's own configurables include their modules."""
        selector = str(self.entry.selector)
        return selector if self.entry.module == "gin" else gin.config._REGISTRY.minimal_selector(selector)

    @property
    def wrapped(self) -> Callable[..., Any]:
        """The class or function without gin's wrapper."""
        return typing.cast("Callable[..., Any]", self.entry.wrapped)

    @property
    def is_class(self) -> bool:
        """True if calling it constructs an object."""
        return isinstance(self.wrapped, type)

    @property
    def takes_any(self) -> bool:
        """True if it accepts arbitrary keywords, so that their names cannot be checked."""
        return any(p.kind is p.VAR_KEYWORD for p in self._parameters())

    @property
    def params(self) -> dict[str, inspect.Parameter]:
        """Named parameters in the order of the signature, without `self`.

        Their annotations are resolved; Any if that fails.
        """
        return {p.name: p for p in self._parameters() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}

    @property
    def passed_on(self) -> dict[str, inspect.Parameter] | None:
        """Parameters of the classes that get its other keywords; None if these cannot be known.

        A class with arbitrary keywords passes them to the next configurable base class, and a trunk those of
        its mixer to the mixer.
        """
        found = {p.name: p for p in self.mixer_settings}
        if not self.takes_any:
            return found
        if not self.is_class:
            return None
        for base in inspect.getmro(typing.cast("type", self.wrapped))[1:]:
            if (known := find_object(base)) is not None:
                found |= known.params
                if not known.takes_any:
                    return found
        return found if self.mixer_settings else None

    @property
    def mixer_settings(self) -> list[inspect.Parameter]:
        """Settings of the mixer that gets a trunk's keywords (nets/trunk.py); none for other classes."""
        mixer = getattr(self.wrapped, "mixer_type", None)
        return [p for p in _signature(mixer) if p.kind is p.KEYWORD_ONLY] if mixer else []

    def can_set(self, param: str) -> bool:
        """False if the code supplies the value of a parameter, so that gin may not."""
        denied, allowed = self.entry.denylist or (), self.entry.allowlist
        return param not in denied and (not allowed or param in allowed)

    @property
    def result_hint(self) -> Any:
        """The type of a call's result: the class itself, or a function's return annotation (else Any)."""
        return self.wrapped if self.is_class else _type_hints(self.wrapped).get("return", Any)

    def _parameters(self) -> tuple[inspect.Parameter, ...]:
        found = _signature(self.wrapped)
        return found[1:] if self.entry.is_method else found


@functools.cache
def _signature(wrapped: Any) -> tuple[inspect.Parameter, ...]:
    init: Any = wrapped.__init__ if isinstance(wrapped, type) else wrapped  # type: ignore[misc]
    if inspect.unwrap(init) is object.__init__:
        return ()  # despite its signature, it takes no arguments
    try:
        parameters = inspect.signature(wrapped).parameters.values()
    except ValueError:  # some builtins have no signature
        return ()
    hints = {**(_type_hints(wrapped) if is_dataclass(wrapped) else {}), **_type_hints(init)}
    return tuple(p.replace(annotation=hints.get(p.name, Any)) for p in parameters)


def _type_hints(thing: Any) -> dict[str, Any]:
    """Resolved annotations of a function or class; those that name something unimportable are left out."""
    found = {}
    for one in reversed(thing.__mro__) if isinstance(thing, type) else [inspect.unwrap(thing)]:
        # A field is resolved in the module of its class.
        module = sys.modules.get(getattr(one, "__module__", ""))
        for name, annotation in getattr(one, "__annotations__", {}).items():
            holder = types.SimpleNamespace(__annotations__={name: annotation})
            try:
                found[name] = typing.get_type_hints(holder, globalns=getattr(module, "__dict__", {}))[name]
            except (NameError, TypeError, AttributeError, SyntaxError):
                continue
    return found


def find(selector: str) -> list[Configurable]:
    """Every configurable that a (partial) selector matches; a valid one matches exactly one."""
    return [Configurable(entry) for entry in gin.config._REGISTRY.get_all_matches(selector)]


def find_object(thing: Any) -> Configurable | None:
    """The configurable of the class or function `thing`."""
    if not callable(thing) or inspect.ismethod(thing):
        return None
    try:
        entry = gin.config._inverse_lookup(thing)
    except (TypeError, ValueError):  # not hashable, or its wrappers form a cycle
        return None
    return Configurable(entry) if entry is not None else None


def all_known() -> list[Configurable]:
    """All configurables except gin's own."""
    return [Configurable(entry) for _, entry in gin.config._REGISTRY.items() if entry.module != "gin"]


def constant_value(name: str) -> Any:
    """The value of a gin constant such as `gin.REQUIRED`, or MISSING if it does not exist."""
    matches = gin.config._CONSTANTS.matching_selectors(name)
    return gin.config._CONSTANTS[matches[0]] if len(matches) == 1 else MISSING


def can_be_written(value: Any) -> bool:
    """True if gin can write the value, which is not a reference."""
    return bool(gin.config._is_literally_representable(value))


def was_read() -> dict[tuple[str, str], set[str]]:
    """Parameters that gin has supplied since its configuration was cleared, by (scope, name)."""
    called = gin.config._OPERATIVE_CONFIG.items()
    return {(scope, find(selector)[0].name): set(values) for (scope, selector), values in called}


_PRESERVING = threading.RLock()


@contextmanager
def cleared_config() -> Iterator[None]:
    """An empty, unlocked configuration of gin for the block; then the previous one, with its lock.

    gin's public texts are not enough: they leave out values that cannot be written, such as objects. Imports
    of the block stay registered. Use one block at a time; other threads see its changes.
    """
    config = gin.config
    tables: tuple[Any, ...] = (config._CONFIG, config._OPERATIVE_CONFIG, config._SINGLETONS, config._IMPORTS)
    with _PRESERVING:
        before, was_locked = [table.copy() for table in tables], config.config_is_locked()
        gin.clear_config()  # leaves the objects inside the tables unchanged; unlocks too
        try:
            yield
        finally:
            for table, content in zip(tables, before, strict=True):
                table.clear()
                table.update(content)
            config._set_config_is_locked(was_locked)
