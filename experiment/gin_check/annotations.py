"""Does a bound value fit a parameter's type hint? Only a certain misfit counts; unknown hints accept everything."""

from __future__ import annotations

import collections.abc
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import registry
from .source import Macro, Reference

_PLAIN = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, type(None))
_LISTS = (Sequence, collections.abc.Iterable, collections.abc.Collection, collections.abc.Container)


def fits(value: Any, hint: Any) -> bool:
    """Whether `value`, as written in a config, may be passed where `hint` is annotated.

    bool is no int, an int is a fine float, a str is no sequence, text is a fine path. Macros must be replaced by
    their values before.
    """
    if isinstance(hint, typing.NewType):
        return fits(value, hint.__supertype__)
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return fits(value, typing.get_args(hint)[0])
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in typing.get_args(hint))
    if hint in (Any, object) or isinstance(hint, (typing.TypeVar, str)):
        return True
    if isinstance(value, Macro):
        return True  # a gin constant: any Python object
    if isinstance(value, Reference):
        return _reference_fits(value, hint)
    if origin is typing.Literal:
        return any(value == arg and type(value) is type(arg) for arg in typing.get_args(hint))
    if origin is not None or hint in (Sequence, Mapping, Callable):
        return _generic_fits(value, origin or hint, typing.get_args(hint))
    return _plain_fits(value, hint)


def _plain_fits(value: Any, hint: Any) -> bool:
    """A literal against a hint without brackets."""
    if hint is None or hint is type(None):
        return value is None
    if not isinstance(hint, type) or getattr(hint, "_is_protocol", False):
        return True
    if hint is type or hint is typing.Callable:
        return False
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if issubclass(hint, os.PathLike):
        return isinstance(value, str)
    return isinstance(value, hint)


def _generic_fits(value: Any, origin: Any, args: tuple[Any, ...]) -> bool:
    """A literal against a hint with brackets, such as dict[str, int]."""
    if origin is type or origin is collections.abc.Callable:
        return False  # only a reference can be one
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(args) == 2 and args[1] is Ellipsis:
            return all(fits(item, args[0]) for item in value)
        return not args or (len(args) == len(value) and all(map(fits, value, args)))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        pairs = value.items() if isinstance(value, dict) else ()
        return isinstance(value, dict) and all(fits(k, args[0]) and fits(v, args[1]) for k, v in pairs if args)
    if origin in _LISTS:
        return isinstance(value, (list, tuple)) and all(fits(item, args[0]) for item in value if args)
    if origin in (list, set, frozenset):
        return isinstance(value, origin) and all(fits(item, args[0]) for item in value if args)
    return not isinstance(value, _PLAIN) or not isinstance(origin, type) or isinstance(value, origin)


def _reference_fits(ref: Reference, hint: Any) -> bool:
    """`@Name` is the class or function itself, `@Name()` what calling it returns."""
    matches = registry.find(ref.name)
    if len(matches) != 1:
        return True  # reported as an unknown name elsewhere
    return _result_fits(matches[0].result_hint, hint) if ref.is_called else _itself_fits(matches[0].wrapped, hint)


def _itself_fits(wrapped: Any, hint: Any) -> bool:
    """The class or function itself: wanted by `type[...]` and `Callable`, not by plain data or instances."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is type:
        wanted = args[0] if args else Any
        return not (isinstance(wanted, type) and isinstance(wrapped, type)) or _is_subclass(wrapped, wanted)
    if origin is collections.abc.Callable:
        returned = args[-1] if args else Any
        return not isinstance(wrapped, type) or _result_fits(wrapped, returned)
    if hint in (type, Callable, collections.abc.Callable):
        return True
    if hint is None or origin is not None or hint in _PLAIN:
        return False
    return not isinstance(hint, type) or getattr(hint, "_is_protocol", False) or _is_metaclass_of(hint, wrapped)


def _is_metaclass_of(hint: type, wrapped: Any) -> bool:
    """Whether the hint is a class of classes or functions, such as `types.FunctionType`."""
    return isinstance(wrapped, hint)


def _result_fits(result: Any, hint: Any) -> bool:
    """Whether something of type `result` (a class, or a return annotation) may stand where `hint` is annotated."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_result_fits(result, part) for part in typing.get_args(hint))
    if not isinstance(result, type) or hint in (Any, object) or isinstance(hint, typing.TypeVar):
        return True
    if origin is type or hint is type:
        return False
    if origin is collections.abc.Callable or hint is Callable:
        return hasattr(result, "__call__")  # noqa: B004  # asks the class, not an instance
    if origin is typing.Literal or hint is None or hint is type(None):
        return result is type(None) if hint in (None, type(None)) else True
    wanted = origin or hint
    if hint is float and result is int:
        return True
    return not isinstance(wanted, type) or getattr(wanted, "_is_protocol", False) or _is_subclass(result, wanted)


def _is_subclass(given: type, wanted: type) -> bool:
    try:
        return issubclass(given, wanted) or (wanted is float and given is int)
    except TypeError:  # generics and protocols that refuse the question
        return True


def describe(hint: Any) -> str:
    """A hint in words for an error text."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is None or hint is type(None):
        return "None"
    if origin is typing.Annotated:
        return describe(args[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin is typing.Literal:
        return " or ".join(repr(arg) for arg in args)
    if origin is collections.abc.Callable or hint is Callable:
        returned = f" that makes a {describe(args[-1])}" if args and isinstance(args[-1], type) else ""
        return f"@Name of a class or function{returned}"
    if origin is type or hint is type:
        return f"@Name of a {describe(args[0])} class" if args else "@Name of a class"
    if origin is not None:
        inner = ", ".join("..." if arg is Ellipsis else describe(arg) for arg in args)
        return f"{getattr(origin, '__name__', origin)}[{inner}]"
    if isinstance(hint, type):
        return hint.__name__
    return str(hint)


def describe_value(value: Any) -> str:
    """What a value is, in words."""
    if isinstance(value, Reference):
        return "what that call returns" if value.is_called else "the class or function itself"
    return "None" if value is None else f"a {type(value).__name__}"


def mend(value: Any, hint: Any) -> str:
    """The change that most likely makes `value` fit `hint`."""
    for candidate, text in _candidates(value):
        if fits(candidate, hint):
            return text
    return f"give it {describe(hint)}"


def _candidates(value: Any) -> list[tuple[Any, str]]:
    """Other spellings of a value, each with the advice that leads to it."""
    found: list[tuple[Any, str]] = []
    if isinstance(value, Reference):
        other = Reference(value.scoped_name, not value.is_called)
        return [(other, f"write {other!r}")]
    if isinstance(value, float) and value.is_integer():
        found.append((int(value), f"write {int(value)}"))
    if isinstance(value, str):
        words: dict[str, Any] = {"true": True, "false": False, "none": None}
        if value.lower() in words:
            found.append((words[value.lower()], f"write {words[value.lower()]} without quotes"))
        for number in (int, float):
            try:
                found.append((number(value), f"write {number(value)} without quotes"))
            except ValueError:
                continue
        name = value.removeprefix("@").removesuffix("()")
        if len(registry.find(name)) == 1 and registry.find(name)[0].name == name:
            for is_called in (value.endswith("()"), not value.endswith("()")):
                reference = Reference(name, is_called)
                found.append((reference, f"write {reference!r} without quotes"))
    elif isinstance(value, (int, float)) or value is None:
        found.append((str(value), f"put quotes around it: '{value}'"))
    if isinstance(value, list):
        found.append((tuple(value), f"write {tuple(value)!r}"))
    if isinstance(value, tuple):
        found.append((list(value), f"write {list(value)!r}"))
    if not isinstance(value, (list, tuple)):
        found.append(([value], f"write [{value!r}]"))
        found.append(((value,), f"write ({value!r},)"))
    return found
