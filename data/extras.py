"""What an agent says about its steps beside the actions, such as log-probabilities; read when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

EXTRA_PREFIX = "_EXTRA_"  # of their names in a file
Array: TypeAlias = npt.NDArray[Any]


class Column(Protocol):
    """An array, or what decodes parts of one."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of its rows."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""

    def __getitem__(self, rows: slice, /) -> Array:
        """Return some rows."""


class Extras(Mapping[str, Array]):
    """The same rows of several columns; each is cut out, or decoded, when it is asked for, and not kept.

    Args:
        columns: each with at least `stop` rows.
        start: first row.
        stop: row behind the last one.
    """

    __slots__ = ("_columns", "_start", "_stop")

    def __init__(self, columns: Mapping[str, Column], start: int, stop: int) -> None:
        self._columns, self._start, self._stop = columns, start, stop

    @property
    def num_rows(self) -> int:
        """Number of rows of every array."""
        return self._stop - self._start

    def window(self, start: int, stop: int) -> Extras:
        """Return rows start (inclusive) to stop (exclusive) of these, without reading any."""
        return Extras(self._columns, self._start + start, self._start + stop)

    def without(self, names: tuple[str, ...]) -> Extras:
        """Return all but some, without reading any."""
        return Extras({k: v for k, v in self._columns.items() if k not in names}, self._start, self._stop)

    def __getitem__(self, name: str) -> Array:
        """Read one, (rows, ...) in the byte order of this machine; it must not be written to.

        Raises:
            KeyError: If there is none of this name.
            BrokenTrajectoryError: If this part of a compressed file is damaged.
        """
        array = self._columns[name][self._start : self._stop]
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
            array.flags.writeable = False
        return array

    def __contains__(self, name: object) -> bool:
        """Whether there is one of this name; reads none."""
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._columns)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._columns)

    def __reduce__(self) -> Any:
        """Go to another process as a plain dict of these rows."""
        return dict, (dict(self),)

    @property
    def columns(self) -> Mapping[str, Column]:
        """What they are cut out of; dtypes and shapes can be seen there without reading."""
        return self._columns


def window_of(extras: Mapping[str, Array], start: int, stop: int) -> Extras:
    """Return rows start (inclusive) to stop (exclusive) of extras of either kind."""
    return extras.window(start, stop) if isinstance(extras, Extras) else Extras(extras, start, stop)


def without(extras: Mapping[str, Array], names: tuple[str, ...]) -> Mapping[str, Array]:
    """Return all extras but some."""
    if isinstance(extras, Extras):
        return extras.without(names)
    return {name: value for name, value in extras.items() if name not in names}


def shapes_of(extras: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every one, without reading any."""
    if isinstance(extras, Extras):
        return {name: (extras.num_rows, *column.shape[1:]) for name, column in extras.columns.items()}
    return {name: value.shape for name, value in extras.items()}


def describe_extras(extras: Mapping[str, Array]) -> str:
    """Return for example `log_probs float32[1], values float32[1]`, shapes being those of one transition."""
    columns: Mapping[str, Column] = extras.columns if isinstance(extras, Extras) else extras
    return ", ".join(f"{name} {value.dtype}{list(value.shape[1:])}" for name, value in columns.items())
