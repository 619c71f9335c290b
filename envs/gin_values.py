"""What gin configures, in worker processes that do not inherit gin's configuration.

A forked worker has the configuration of its parent. To any other it travels as text, from which the worker
keeps the part about configurables that it knows. What gin has wrapped, as for the reference `@train/MyEnv`,
cannot be pickled and travels as a `GinCall`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import gin
from gin import config as gin_config

_MACRO = "gin.macro"


@dataclass(frozen=True)
class GinCall:
    """Calls what gin configures, in any process.

    Attributes:
        target: what importing gives.
        scope: gin's scope for the call, outermost first.
        selector: the name under which gin has bindings for `target`; "" if `target` itself asks gin.
    """

    target: Callable[..., Any]
    scope: tuple[str, ...] = ()
    selector: str = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with gin.config_scope(list(self.scope) or None):
            called = gin.get_configurable(self.selector) if self.selector else self.target
            return called(*args, **kwargs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In a new process gin does not know yet what another module than its own has registered."""
        vars(self).update(state)
        if self.selector and not gin_config._REGISTRY.matching_selectors(self.selector):
            module, _, name = self.selector.rpartition(".")
            gin.external_configurable(self.target, name, module=module or None)


def portable(target: Callable[..., Any]) -> Callable[..., Any]:
    """A callable that does as `target` does in the current scope of gin, and can be sent to another process.

    `functools.partial` is looked through. The scope of a reference such as `@train/MyEnv` counts too.
    """
    if isinstance(target, functools.partial):
        return functools.partial(portable(target.func), *target.args, **target.keywords)
    base = next((layer for layer in _layers(target) if _is_importable(layer)), target)
    scope = (*gin.current_scope(), *_hidden_scope(target))
    entry = _entry(base)
    selector = entry.selector if entry is not None and entry.wrapper is not base else ""
    return GinCall(base, scope, selector) if scope or selector else base


def shippable_config(targets: Iterable[Any]) -> str:
    """The configuration as text, with imports only of what bindings of these callables lead to.

    The imports of the configuration itself would pull torch into workers.
    """
    lines = [line for line in gin.config_str().splitlines() if not line.startswith(("import ", "from "))]
    return "\n".join([f"import {module}" for module in sorted(_modules(targets))] + lines)


def load_shipped_config(text: str) -> None:
    """Bind what `shippable_config` gave, in a worker; what this process has not imported is left out."""
    gin.parse_config(text, skip_unknown=True)


def _modules(targets: Iterable[Any]) -> set[str]:
    """Modules of what references in the bindings of `targets` name, in turn."""
    entries = [_entry(layer) for target in targets for layer in _layers(_inside(target))]
    queue = [("", entry.selector) for entry in entries if entry is not None]
    modules, visited = set(), set()
    while queue:
        key = queue.pop()
        visited.add(key)
        for (scope, selector), values in gin_config._CONFIG.items():
            if selector != key[1] or (selector == _MACRO and scope != key[0]):
                continue
            for reference in gin_config.iterate_references({key: values}):
                modules.add(reference.configurable.wrapped.__module__)
                if (found := reference.config_key) not in visited:
                    queue.append(found)
    return modules


def _inside(target: Any) -> Any:
    """What a partial or a `GinCall` calls."""
    while isinstance(target, functools.partial | GinCall):
        target = target.target if isinstance(target, GinCall) else target.func
    return target


def _entry(layer: Any) -> Any | None:
    """The record that gin has of exactly this class or function."""
    return gin_config._inverse_lookup(layer) if isinstance(layer, Hashable) else None


def _layers(target: Any) -> list[Any]:
    """The object itself, then what gin may have wrapped in it, outermost first."""
    if inspect.isclass(target):
        return list(target.__mro__)[:-1]
    chain = [target]
    while hasattr(chain[-1], "__wrapped__"):
        chain.append(chain[-1].__wrapped__)
    return chain


def _is_importable(layer: Any) -> bool:
    """Whether another process can import it by its name."""
    holder: Any = sys.modules.get(getattr(layer, "__module__", ""))
    for part in getattr(layer, "__qualname__", "").split("."):
        holder = getattr(holder, part, None)
    return holder is layer


def _hidden_scope(target: Any) -> list[str]:
    """Scope of a scoped reference; gin keeps it in the closure of a wrapper it builds for the reference."""
    call = type(target).__call__ if inspect.isclass(target) else target
    if not inspect.isfunction(call):
        return []
    return list(inspect.getclosurevars(call).nonlocals.get("scope_components", ()))
