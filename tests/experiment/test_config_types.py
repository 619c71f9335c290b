"""Which literals and references fit which annotations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NewType, Optional, Protocol, TypeVar, Union

import gin
import pytest

from loxodon.experiment.config.checks import describe, fits, mend
from loxodon.experiment.config.reading import Macro, Reference

Seconds = NewType("Seconds", float)
T = TypeVar("T")


class FitBase:
    pass


@gin.configurable
class FitChild(FitBase):
    pass


@gin.configurable
def fit_number(start: int = 0) -> int:
    return start


class FitShape(Protocol):
    def area(self) -> float: ...


def ref(text: str) -> Reference:
    return Reference(text.strip("@()"), text.endswith("()"))


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (1, int),
        (1, float),
        (1.5, float),
        (True, bool),
        ("a", str),
        (None, Optional[int]),  # noqa: UP045
        (1, Union[str, int]),  # noqa: UP007
        (1, int | None),
        ("a", Literal["a", "b"]),
        ([1, 2], Sequence[int]),
        ((1, 2), Sequence[int]),
        ((), tuple[int, ...]),
        ((1, "a"), tuple[int, str]),
        ([1.0, 2], list[float]),
        ([1], Iterable[int]),
        ({"a": 1}, dict[str, int]),
        ({"a": [1]}, Mapping[str, Any]),
        ({}, dict),
        ("a/b", Path),
        ("a/b", str | Path),
        (1.5, Seconds),
        (1, Annotated[int, "count"]),
        (object(), Any),
        (1, T),
        (3, FitShape),
        (Macro("gin.REQUIRED"), int),
        (ref("@FitChild"), type[FitBase]),
        (ref("@FitChild"), Callable[..., FitBase]),
        (ref("@FitChild"), Callable[[], object] | None),
        (ref("@FitChild"), type),
        (ref("@FitChild()"), FitBase),
        (ref("@FitChild()"), Optional[FitBase]),  # noqa: UP045
        (ref("@fit_number"), Callable[..., int]),
        (ref("@fit_number()"), float),
        (ref("@fit_number()"), int),
    ],
)
def test_fits(value: Any, hint: Any) -> None:
    assert fits(value, hint)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (True, int),
        (True, float),
        (1, bool),
        (1.0, int),
        (1, str),
        ("1", int),
        (None, int),
        ("c", Literal["a", "b"]),
        (1, Literal[True]),
        ("ab", Sequence[str]),
        ([1, "a"], Sequence[int]),
        ([1], tuple[int, ...]),
        ((1,), tuple[int, str]),
        ((1,), list[int]),
        ({"a": "b"}, dict[str, int]),
        ([("a", 1)], dict[str, int]),
        (1, Path),
        ("1", Seconds),
        ("1", Annotated[int, "count"]),
        ("FitChild", type[FitBase]),
        ("f", Callable[..., Any]),
        (1, FitBase),
        (ref("@fit_number"), int),
        (ref("@fit_number()"), str),
        (ref("@FitChild"), FitBase),
        (ref("@FitChild"), Literal["a"]),
        (ref("@FitChild"), type[int]),
        (ref("@FitChild()"), type[FitBase]),
        (ref("@FitChild()"), Callable[..., FitBase]),
        (ref("@FitChild()"), int),
    ],
)
def test_does_not_fit(value: Any, hint: Any) -> None:
    assert not fits(value, hint)


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (int | None, "int or None"),
        (Literal["a", 2], "'a' or 2"),
        (tuple[int, ...], "tuple[int, ...]"),
        (Callable[..., FitBase], "@Name of a FitBase"),
        (Callable[..., Any], "@Name"),
        (type[FitBase], "@Name of a FitBase"),
        (dict[str, list[int]], "dict[str, list[int]]"),
        (Annotated[int, "count"], "int"),
    ],
)
def test_hints_in_words(hint: Any, text: str) -> None:
    assert describe(hint) == text


@pytest.mark.parametrize(
    ("value", "hint", "text"),
    [
        (4.0, int, "write 4"),
        (1, bool, "write True"),
        ("none", int | None, "write None without quotes"),
        ("0.5", float, "write 0.5 without quotes"),
        (5, str, "put quotes around it: '5'"),
        (ref("@FitChild"), FitBase, "write @FitChild()"),
        (ref("@FitChild()"), type[FitBase], "write @FitChild"),
        ("FitChild", FitBase, "write @FitChild() without quotes"),
        (3, FitBase, "choose @FitChild()"),
        ({}, int, "give it int"),
    ],
)
def test_mends(value: Any, hint: Any, text: str) -> None:
    assert mend(value, hint) == text
