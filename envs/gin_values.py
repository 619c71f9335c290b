"""gin bindings of an environment, turned into plain values that a worker process can use.

A spawned worker has no gin configuration. So what gin would have filled in is read in the parent and becomes
ordinary keyword arguments; references to other configurables become `Deferred` calls, made anew for every
environment. What an environment builds inside itself is covered by `shippable_config`: the configuration's
text travels too, and a worker keeps the part about configurables that it knows.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gin
from gin import config as gin_config


@dataclass(frozen=True)
class Deferred:
    """A call (`is_called`) or a callable with its arguments, resolved where the environment is built."""

    target: Callable[..., Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    is_called: bool = True

    def resolve(self) -> Any:
        """The call's result, or a callable that has the arguments filled in."""
        if self.is_called:
            return self.target(**build_value(self.kwargs))
        return Deferred(self.target, self.kwargs).with_arguments if self.kwargs else self.target

    def with_arguments(self, *args: Any, **kwargs: Any) -> Any:
        """Call the target; arguments given here win over the bound ones."""
        return self.target(*args, **{**build_value(self.kwargs), **kwargs})


def build_value(value: Any) -> Any:
    """A private copy of a frozen value, with every `Deferred` inside resolved."""
    if isinstance(value, Deferred):
        return value.resolve()
    if isinstance(value, dict):
        return {key: build_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(build_value(item) for item in value)
    return copy.deepcopy(value)


def freeze_configurable(target: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Split a callable into one that can be shipped and the keyword arguments gin binds to it.

    `functools.partial` is looked through. The current gin scope and the scope of a reference such as
    `@train/MyEnv` both count. A callable unknown to gin comes back as it is, without arguments.
    """
    if isinstance(target, functools.partial):
        inner, bound = freeze_configurable(target.func)
        return functools.partial(inner, *target.args), {**bound, **target.keywords}
    found = _registered(target)
    if found is None:
        return target, {}
    scopes = (*gin_config.current_scope(), *_hidden_scopes(target))
    with gin.config_scope(list(scopes) or None):
        bindings = gin.get_bindings(found, resolve_references=False)
        _note_as_used(found, bindings)
        return _importable(target), {name: _freeze(value) for name, value in bindings.items()}


def shippable_config() -> str:
    """The gin configuration as text, without its imports (they would pull torch into workers)."""
    lines: list[str] = gin.config_str().splitlines()
    return "\n".join(line for line in lines if not line.startswith(("import ", "from ")))


def load_shipped_config(text: str) -> None:
    """Bind what `shippable_config` gave, in a worker; what this process has not imported is left out."""
    gin.parse_config(text, skip_unknown=True)


def _freeze(value: Any) -> Any:
    if isinstance(value, gin_config.ConfigurableReference):
        return _freeze_reference(value)
    if isinstance(value, dict):
        return {key: _freeze(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_freeze(item) for item in value)
    return copy.deepcopy(value)


def _freeze_reference(reference: Any) -> Any:
    if repr(reference).startswith("%"):  # a macro or a constant
        name = repr(reference)[1:]
        macro = f"{name}/gin.macro"
        bound = gin.get_bindings(macro, resolve_references=False, inherit_scopes=False)
        copy.deepcopy(reference)  # evaluates the macro, by which gin counts its value as used
        return _freeze(bound["value"]) if "value" in bound else copy.deepcopy(reference)
    target, kwargs = freeze_configurable(reference.scoped_configurable_fn)
    return Deferred(target, kwargs, is_called=reference.evaluate)


def _candidates(target: Any) -> list[Any]:
    """The object itself, then what gin may have wrapped in it, outermost first."""
    if inspect.isclass(target):
        return list(target.__mro__)[:-1]
    chain = [target]
    while hasattr(chain[-1], "__wrapped__"):
        chain.append(chain[-1].__wrapped__)
    return chain


def _registered(target: Any) -> Any | None:
    """The layer of `target` whose bindings fill in its arguments, or None if gin has no part in it."""
    for candidate in _candidates(target):
        if gin_config._inverse_lookup(candidate) is not None:
            return candidate
        if inspect.isclass(candidate) and {"__init__", "__new__"} & vars(candidate).keys():
            return None  # its own constructor decides what the configurable base class gets
    return None


def _hidden_scopes(target: Any) -> list[str]:
    """Scope of a scoped reference; gin keeps it in the closure of a wrapper it builds for the reference."""
    call = type(target).__call__ if inspect.isclass(target) else target
    if not inspect.isfunction(call):
        return []
    return list(inspect.getclosurevars(call).nonlocals.get("scope_components", ()))


def _importable(target: Any) -> Any:
    """The first layer of `target` that another process can import by its name, else `target`."""
    for candidate in _candidates(target):
        holder: Any = sys.modules.get(getattr(candidate, "__module__", ""))
        for part in getattr(candidate, "__qualname__", "").split("."):
            holder = getattr(holder, part, None)
        if holder is candidate:
            return candidate
    return target


def _note_as_used(target: Any, bindings: dict[str, Any]) -> None:
    """Enter the bindings in gin's operative configuration, as calling the configurable itself would do.

    Without this they would look unused there, since the environment gets them as ordinary arguments. gin has
    no public way to do it.
    """
    selector = gin_config._inverse_lookup(target).selector
    with gin_config._OPERATIVE_CONFIG_LOCK:
        used = gin_config._OPERATIVE_CONFIG.setdefault((gin_config.current_scope_str(), selector), {})
        used.update(bindings)
