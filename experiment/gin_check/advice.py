"""Types and values in words, and the change that would make a value fit."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from typing import Any

from . import registry
from .annotations import UNIONS, bare_hint, fits
from .source import Reference

MAX_CHOICES = 6
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}


def describe(hint: Any) -> str:
    """A hint in words for an error text."""
    hint = bare_hint(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in UNIONS:
        return " or ".join(describe(arg) for arg in args)
    if origin is typing.Literal:
        return " or ".join(repr(arg) for arg in args)
    kind = origin or hint
    if kind is type or kind in (Callable, typing.Callable):
        made = bare_hint(args[-1]) if args else None
        names_result = isinstance(made, type) and made not in (object, Any, type(None))
        return f"@Name of a {made.__name__}" if names_result and made else "@Name"
    name = "None" if kind is type(None) else getattr(kind, "__name__", str(kind))
    inner = ", ".join("..." if arg is Ellipsis else describe(arg) for arg in args)
    return f"{name}[{inner}]" if inner else str(name)


def describe_value(value: Any) -> str:
    """What a value is, in words."""
    if isinstance(value, Reference):
        return "what that call returns" if value.is_called else "the class or function itself"
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def mend(value: Any, hint: Any) -> str:
    """The change that most likely makes `value` fit `hint`."""
    wants_callable = "@Name" in describe(hint)
    spellings = _respelled_text(value) if isinstance(value, str) else _respelled(value)
    for other, text in spellings:
        is_lucky = (
            wants_callable and isinstance(other, Reference) and other.is_called
        )  # fits by being callable
        if fits(other, hint) and not is_lucky:
            return text
    known = [registry.find(name)[0] for name in registry.names_known()]
    classes = [c.name for c in known if isinstance(c.wrapped, type)]
    choices = [repr(ref) for name in classes if fits(ref := Reference(name, not wants_callable), hint)]
    if 0 < len(choices) <= MAX_CHOICES:
        return f"choose {' or '.join(choices)}"
    return f"give it {describe(hint)}"


def _respelled(value: Any) -> Iterator[tuple[Any, str]]:
    """Other spellings of a value that is no text, each with the advice that leads to it."""
    if isinstance(value, Reference):
        other = Reference(value.scoped_name, not value.is_called)
        yield other, f"write {other!r}"
        return
    if isinstance(value, (int, float)) and value in (0, 1):
        yield bool(value), f"write {bool(value)}"
    if isinstance(value, float) and value.is_integer():
        yield int(value), f"write {int(value)}"
    if isinstance(value, (int, float)) or value is None:
        yield str(value), f"put quotes around it: '{value}'"
    if isinstance(value, (list, tuple)):
        for other_type in (list, tuple):
            yield other_type(value), f"write {other_type(value)!r}"
    else:
        yield [value], f"write [{value!r}]"
        yield (value,), f"write ({value!r},)"


def _respelled_text(value: str) -> Iterator[tuple[Any, str]]:
    """The same for a text: a word, number or reference in quotes, or one item of a list."""
    if value.lower() in _WORDS:
        word = _WORDS[value.lower()]
        yield word, f"write {word} without quotes"
    for number in (int, float):
        try:
            yield number(value), f"write {number(value)} without quotes"
        except ValueError:
            continue
    name = value.removeprefix("@").removesuffix("()")
    if name in registry.names_known():
        for is_called in (value.endswith("()"), not value.endswith("()")):
            reference = Reference(name, is_called)
            yield reference, f"write {reference!r} without quotes"
    yield [value], f"write [{value!r}]"
    yield (value,), f"write ({value!r},)"
