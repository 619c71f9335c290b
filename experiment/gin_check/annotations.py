"""Does a bound value fit a parameter's type hint? Only a certain misfit counts.

Unknown hints accept everything.
"""

from __future__ import annotations

import collections.abc
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import registry
from .source import Macro, Reference

UNIONS = (typing.Union, types.UnionType)
_CALLABLES = (Callable, typing.Callable)
_ITEM_HOLDERS: dict[Any, Any] = {
    Sequence: (list, tuple),
    collections.abc.Iterable: (list, tuple),
    collections.abc.Collection: (list, tuple),
    list: (list,),
    set: (set,),
    frozenset: (frozenset,),
}


def fits(value: Any, hint: Any) -> bool:
    """Whether `value`, as written in a config, may be passed where `hint` is annotated.

    bool is no int, an int is a fine float, a str is no sequence, text is a fine path. Macros must have been
    replaced by their values; those that remain are gin constants, which may be anything.
    """
    hint = bare_hint(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in UNIONS:
        return any(fits(value, part) for part in args)
    if isinstance(value, Macro) or _accepts_all(hint):
        return True
    if isinstance(value, Reference):
        return _reference_fits(value, hint)
    if origin is typing.Literal:
        return any(value == arg and type(value) is type(arg) for arg in args)
    return _literal_fits(value, origin or hint, args)


def bare_hint(hint: Any) -> Any:
    """The hint without `Annotated` and `NewType` around it."""
    while typing.get_origin(hint) is typing.Annotated or isinstance(hint, typing.NewType):
        hint = hint.__supertype__ if isinstance(hint, typing.NewType) else typing.get_args(hint)[0]
    return hint


def _accepts_all(hint: Any) -> bool:
    return hint in (Any, object) or isinstance(hint, (typing.TypeVar, str))


def _literal_fits(value: Any, kind: Any, args: tuple[Any, ...]) -> bool:
    """A number, text, None or container against `kind[args]`."""
    if kind is type or kind in _CALLABLES:
        return False  # only a reference can be one
    if kind is tuple:
        return isinstance(value, tuple) and _tuple_fits(value, args)
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return isinstance(value, dict) and all(
            fits(key, args[0]) and fits(item, args[1]) for key, item in value.items() if args
        )
    if kind in _ITEM_HOLDERS:
        return isinstance(value, _ITEM_HOLDERS[kind]) and (
            not args or all(fits(v, args[0]) for v in list(value))
        )
    return _plain_fits(value, kind)


def _tuple_fits(value: tuple[Any, ...], args: tuple[Any, ...]) -> bool:
    if args[1:] == (Ellipsis,):
        return all(fits(item, args[0]) for item in value)
    return not args or (len(args) == len(value) and all(map(fits, value, args)))


def _plain_fits(value: Any, kind: Any) -> bool:
    if _is_unchecked(kind):
        return True
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return isinstance(value, str if issubclass(kind, os.PathLike) else kind)


def _is_unchecked(kind: Any) -> bool:
    """Whether isinstance and issubclass have no answer: no class, or a protocol."""
    return not isinstance(kind, type) or getattr(kind, "_is_protocol", False)


# --- references -----------------------------------------------------------------------------------------


def _reference_fits(ref: Reference, hint: Any) -> bool:
    """`@Name` is the class or function itself, `@Name()` what calling it returns."""
    matches = registry.find(ref.name)
    if len(matches) != 1:
        return True  # reported as an unknown name elsewhere
    target = matches[0]
    return _instance_fits(target.result_hint, hint) if ref.is_called else _itself_fits(target.wrapped, hint)


def _itself_fits(wrapped: Any, hint: Any) -> bool:
    """The class or function itself: wanted by `type[...]` and `Callable`, not by plain data or instances."""
    kind, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is typing.Literal:
        return False
    if kind is type:
        return not isinstance(wrapped, type) or not args or _instance_fits(wrapped, args[0])
    if kind in _CALLABLES:
        return not isinstance(wrapped, type) or not args or _instance_fits(wrapped, args[-1])
    return bool(_is_unchecked(kind) or isinstance(wrapped, kind))


def _instance_fits(result: Any, hint: Any) -> bool:
    """Whether an instance of `result` (a class, or a return annotation) fits `hint`."""
    hint = bare_hint(hint)
    kind = typing.get_origin(hint) or hint
    if kind in UNIONS:
        return any(_instance_fits(result, part) for part in typing.get_args(hint))
    if not isinstance(result, type) or _accepts_all(hint):
        return True
    if kind in _CALLABLES:
        return _can_be_called(result) and not _makes(result, typing.get_args(hint))
    return bool(_is_unchecked(kind) or issubclass(result, (int, float) if kind is float else kind))


def _can_be_called(result: type) -> bool:
    """Whether instances of a class can be called."""
    return any("__call__" in vars(base) for base in result.__mro__)


def _makes(result: type, args: tuple[Any, ...]) -> bool:
    """Whether the callable was to make just what is given instead: `@Agent()` where `@Agent` is wanted."""
    made = args[-1] if args else None
    return isinstance(made, type) and made is not object and issubclass(result, made)
