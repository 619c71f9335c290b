"""Files that stay open, and arrays in them whose rows are read on demand.

A memory map would do the same, but truncating a mapped file kills the process by SIGBUS. A read returns fewer
bytes instead, which can be handled as an ordinary error.
"""

from __future__ import annotations

import math
import os
from typing import Any, TypeAlias

import numpy as np

from .errors import FormatError
from .trajectory import Array


class OpenFile:
    """The bytes of a file, which is closed when nothing refers to it any more. Slices are returned as bytes.

    Args:
        descriptor: descriptor of a regular file; this object closes it.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size

    def __len__(self) -> int:
        """Return the size of the file when it was opened."""
        return self._size

    def __getitem__(self, span: slice) -> bytes:
        """Return the bytes of a slice, which ends at the end of the file, like a slice of bytes."""
        start, stop, _ = span.indices(self._size)
        return self.read(start, max(0, stop - start))

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return `num_bytes` bytes. Raises FormatError if the file no longer has all of them."""
        data = os.pread(self._descriptor, num_bytes, start)
        while len(data) < num_bytes:  # the kernel reads at most 2 GiB at once
            more = os.pread(self._descriptor, num_bytes - len(data), start + len(data))
            if not more:
                raise FormatError("it was cut off after it had been opened")
            data += more
        return data

    def __del__(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


Bytes: TypeAlias = "bytes | OpenFile"


class StoredRows:
    """An array (T, ...) in an open file. Slices along the first axis are read into new arrays."""

    __slots__ = ("_file", "_row_bytes", "_start", "dtype", "shape")

    def __init__(self, file: OpenFile, start: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._file, self._start, self.shape, self.dtype = file, start, shape, dtype
        self._row_bytes = math.prod(shape[1:]) * dtype.itemsize

    def __len__(self) -> int:
        """Return T."""
        return self.shape[0]

    def __getitem__(self, span: slice) -> Array:
        """Return rows as a read-only array. Raises FormatError if the file lacks them."""
        start, stop, _ = span.indices(self.shape[0])
        num_rows = stop - start
        data = self._file.read(self._start + start * self._row_bytes, num_rows * self._row_bytes)
        return np.ndarray((num_rows, *self.shape[1:]), self.dtype, data)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return all rows, for numpy's functions."""
        return self[:].astype(dtype or self.dtype, copy=bool(copy))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of all rows."""
        return len(self) * self._row_bytes


def array_in(
    source: Bytes, start: int, shape: tuple[int, ...], dtype: np.dtype[Any], order: Any = "C"
) -> Any:
    """Return the array that begins at a byte: a view for bytes, StoredRows for a file."""
    if isinstance(source, OpenFile):
        if shape and order == "C":
            return StoredRows(source, start, shape, dtype)
        source, start = source.read(start, math.prod(shape) * dtype.itemsize), 0
    return np.ndarray(shape, dtype, source, start, order=order)


def whole(array: Any) -> Array:
    """Return all rows of StoredRows, and any other array unchanged."""
    found: Array = array[:] if isinstance(array, StoredRows) else array
    return found
