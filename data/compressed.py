"""Compressed archive members that can be decoded in part: an index of blocks, and arrays that fill on demand.

A member is one ordinary deflate stream, so that any program that reads .npz files reads it, but it is flushed
at regular borders, behind which decoding can begin: after the array's header and then after every
`rows_per_block` timesteps, the same number for all arrays of a file. The compressed length of every block
stands in the extra field of the archive's directory, which other programs skip.
"""

from __future__ import annotations

import itertools
import math
import struct
import zlib
from typing import Any, NamedTuple

import numpy as np

from .errors import BrokenTrajectoryError, FormatError
from .layout import Layout
from .trajectory import Array, Trajectory

_EXTRA_ID = 0x584C
_EXTRA = struct.Struct("<HH")  # id and length of what follows
_INDEX = struct.Struct("<HL")  # version of this index, rows per block; then one 32-bit length per block
_INDEX_VERSION = 1
_STORED_BLOCK = struct.Struct("<BHH")  # RFC 1951, 3.2.4: type, length and its complement
_ALL_BITS = 0xFFFF
_MAX_BLOCKS = 15_000  # an extra field has at most 65,535 bytes
_BLOCK_BYTES = 16 << 10  # of all arrays together
_MIN_ROWS, _MAX_ROWS = 4, 1024
_LEVEL = 6


class BlockIndex(NamedTuple):
    """Where the blocks of a member are."""

    rows_per_block: int
    lengths: tuple[int, ...]  # bytes, compressed

    def pack(self) -> bytes:
        """Return the index as an extra field."""
        index = _INDEX.pack(_INDEX_VERSION, self.rows_per_block)
        index += struct.pack(f"<{len(self.lengths)}L", *self.lengths)
        return _EXTRA.pack(_EXTRA_ID, len(index)) + index

    @staticmethod
    def locate_header(buffer: Any, begin: int) -> tuple[int, int]:
        """Return begin and end of the array's header, which is the member's first block, not compressed."""
        kind, length, complement = _STORED_BLOCK.unpack_from(buffer, begin)
        begin += _STORED_BLOCK.size
        if kind != 0 or length ^ complement != _ALL_BITS or begin + length > len(buffer):
            raise FormatError("its index of blocks does not fit its content")
        return begin, begin + length


def parse_block_index(extra: bytes) -> BlockIndex | None:
    """Find our index among the extra fields of a member."""
    position = 0
    while position + _EXTRA.size <= len(extra):
        kind, length = _EXTRA.unpack_from(extra, position)
        position += _EXTRA.size
        if kind == _EXTRA_ID and position + length <= len(extra) and length >= _INDEX.size:
            version, rows_per_block = _INDEX.unpack_from(extra, position)
            count = (length - _INDEX.size) // 4
            if version == _INDEX_VERSION and rows_per_block > 0:
                lengths = struct.unpack_from(f"<{count}L", extra, position + _INDEX.size)
                return BlockIndex(rows_per_block, lengths)
        position += length
    return None


def choose_rows_per_block(num_rows: int, row_bytes: int) -> int:
    """Timesteps per block: few enough that little is decoded for a window, many enough to compress.

    Args:
        num_rows: timesteps of the trajectory.
        row_bytes: of one timestep of all its arrays together.
    """
    rows = min(max(_BLOCK_BYTES // max(row_bytes, 1), _MIN_ROWS), _MAX_ROWS)
    return max(rows, math.ceil(num_rows / _MAX_BLOCKS))


def compress_member(
    header: bytes, data: Any, rows_per_block: int, row_bytes: int
) -> tuple[bytes, BlockIndex]:
    """Return a deflate stream of `header + data` and the index of its blocks.

    Args:
        header: what the .npy format begins with.
        data: (nbytes,) uint8, C-contiguous rows.
        rows_per_block: timesteps per block.
        row_bytes: of one timestep of this array.
    """
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    parts = [_STORED_BLOCK.pack(0, len(header), len(header) ^ _ALL_BITS) + header]
    lengths = []
    block_bytes = max(rows_per_block * row_bytes, 1)
    for first in range(0, len(data), block_bytes):
        block = compressor.compress(data[first : first + block_bytes])
        block += compressor.flush(zlib.Z_FULL_FLUSH)
        parts.append(block)
        lengths.append(len(block))
    parts.append(compressor.flush(zlib.Z_FINISH))
    return b"".join(parts), BlockIndex(rows_per_block, tuple(lengths))


class _Member(NamedTuple):
    name: str
    target: Array  # (nbytes,) uint8, what the array is a view of
    block_bytes: int
    borders: list[int]  # where the blocks begin in the buffer, and where the last one ends


class BlockStore:
    """The arrays of one file; their rows are decoded when they are asked for, and once.

    The memory of rows that were never asked for is reserved, but not used.
    """

    def __init__(self, buffer: Any, path: str) -> None:
        self._buffer, self._path = buffer, path
        self._members: list[_Member] = []
        self._rows_per_block = 0
        self._is_ready = bytearray()  # one per block

    @property
    def is_empty(self) -> bool:
        """True if no array was added."""
        return not self._members

    def add(
        self, index: BlockIndex, shape: tuple[int, ...], dtype: np.dtype[Any], begin: int, end: int, name: str
    ) -> Array:
        """Return a read-only array whose rows are not there yet.

        Args:
            index: of the member.
            shape: of the array.
            dtype: of the array.
            begin: where the first block begins in the buffer.
            end: where the last one ends at most.
            name: of the member.

        Raises:
            FormatError: If the index contradicts the shape or the indices of other arrays.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        block_bytes = index.rows_per_block * (nbytes // shape[0] if shape and shape[0] else 1)
        borders = list(itertools.accumulate(index.lengths, initial=begin))
        if (
            self._rows_per_block not in (0, index.rows_per_block)
            or len(index.lengths) != (math.ceil(nbytes / block_bytes) if nbytes else 0)
            or borders[-1] > end
        ):
            raise FormatError(f"the index of the blocks of member {name!r} does not fit its content")
        self._rows_per_block = index.rows_per_block
        if len(index.lengths) > len(self._is_ready):
            self._is_ready = bytearray(len(index.lengths))
        target = np.empty(nbytes, np.uint8)
        self._members.append(_Member(name, target, block_bytes, borders))
        array: Array = target.view(dtype).reshape(shape)
        array.flags.writeable = False
        return array

    def fill(self, start: int, stop: int) -> None:
        """Decode the rows from start (inclusive) to stop (exclusive) that are not there yet.

        Raises:
            BrokenTrajectoryError: If they cannot be decoded.
        """
        first, last = start // self._rows_per_block, (stop - 1) // self._rows_per_block + 1
        wanted = self._is_ready[first:last]
        if 0 not in wanted:
            return
        last = first + wanted.rindex(0) + 1
        first += wanted.index(0)
        for member in self._members:
            self._decode(member, first, min(last, len(member.borders) - 1))
        self._is_ready[first:last] = b"\1" * (last - first)

    def fill_all(self) -> None:
        """Decode everything that is not there yet."""
        if self._is_ready:
            self.fill(0, len(self._is_ready) * self._rows_per_block)

    def _decode(self, member: _Member, first: int, last: int) -> None:
        if first >= last:
            return
        begin = first * member.block_bytes
        end = min(last * member.block_bytes, len(member.target))
        try:
            packed = self._buffer[member.borders[first] : member.borders[last]]
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, end - begin + 1)
            problem = "it has another length than its header announces"
        except zlib.error as error:
            data, problem = b"", str(error)
        if len(data) != end - begin:
            raise BrokenTrajectoryError(
                f"{self._path} is not a readable trajectory file: part of member {member.name!r} cannot be "
                f"decoded ({problem}). Allowed is what Loxodon has written. Fix: move the file out of the "
                "folder or delete it."
            )
        member.target.data[begin:end] = data


class PackedColumn:
    """A compressed array that decodes only the rows it is asked for, anew each time, and keeps none.

    Args:
        buffer: all bytes of the file.
        path: of the file.
        index: of the member; this and what follows as in BlockStore.add.
        shape: of the array.
        dtype: of the array.
        begin: where the first block begins in the buffer.
        end: where the last one ends at most.
        name: of the member.

    Raises:
        FormatError: If the index contradicts the shape.
    """

    def __init__(
        self,
        buffer: Any,
        path: str,
        index: BlockIndex,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        begin: int,
        end: int,
        name: str,
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self._file, self._place = (buffer, path), (index, shape, dtype, begin, end, name)
        BlockStore(buffer, path).add(*self._place)  # only to see whether it fits

    def __getitem__(self, rows: slice) -> Array:
        """Decode rows start to stop, (rows, ...), read-only.

        Raises:
            BrokenTrajectoryError: If they cannot be decoded.
        """
        store = BlockStore(*self._file)
        whole = store.add(*self._place)
        store.fill(rows.start, rows.stop)
        part = whole[rows].copy()  # so that the whole is let go of
        part.flags.writeable = False
        return part


class BlockTrajectory:
    """A compressed trajectory that decodes only what its slices need.

    Args:
        whole: the trajectory, of arrays that fill later.
        blocks: fills them.
    """

    def __init__(self, whole: Trajectory, blocks: BlockStore) -> None:
        self._whole, self._blocks = whole, blocks
        self.env_name, self.policy_version = whole.env_name, whole.policy_version

    @property
    def layout(self) -> Layout:
        """What its timesteps look like."""
        return self._whole.layout

    def __len__(self) -> int:
        """Return the number of transitions, T."""
        return len(self._whole)

    def slice(self, start: int, stop: int) -> Trajectory:
        """Return transitions start (inclusive) to stop (exclusive) as views of what is decoded once.

        Raises:
            BrokenTrajectoryError: If this part of the file is damaged.
        """
        window = self._whole.slice(start, stop)
        self._blocks.fill(start, stop + 1)
        return window
