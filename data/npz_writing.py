"""Writes `.npz` archives: faster than numpy does, and compressed ones that can be decoded in part."""

from __future__ import annotations

import functools
import io
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from .compressed import choose_rows_per_block, compress_member
from .extras import EXTRA_PREFIX
from .trajectory import Array

MAX_BYTES = 1 << 31  # of an archive; beyond, zip needs its 64-bit records

# PKWARE, APPNOTE.TXT 6.3.10, sections 4.3.7, 4.3.12 and 4.3.16; members are dated 1980-01-01.
_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
COPIED_BYTES = 64 << 10  # up to here, a copy costs less than a view
_VERSION, _NO_FLAGS, _STORED, _DEFLATED, _TIME, _DATE = 20, 0, 0, 8, 0, (1 << 5) | 1


def pack_npz(arrays: Mapping[str, Array], comment: bytes = b"") -> list[Any]:
    """The archive that numpy.savez would write, in pieces to be written one after the other.

    Args:
        arrays: arrays of plain numbers by name, together smaller than MAX_BYTES.
        comment: of the archive, which numpy does not look at.
    """
    return _pack(arrays, 0, comment)


def pack_compressed_npz(arrays: Mapping[str, Array], num_timesteps: int, comment: bytes = b"") -> list[Any]:
    """An archive like that of numpy.savez_compressed, of which parts can be decoded. See compressed.py.

    Args:
        arrays: arrays of plain numbers by name, together smaller than MAX_BYTES.
        num_timesteps: T+1; arrays that are no columns of a trajectory, with fewer rows, are not compressed.
        comment: of the archive.
    """
    columns = [
        array  # extras are not decoded with the others, so they do not count
        for name, array in arrays.items()
        if len(array) + 1 >= num_timesteps and not name.startswith(EXTRA_PREFIX)
    ]
    row_bytes = sum(array.nbytes // len(array) for array in columns)
    return _pack(arrays, choose_rows_per_block(num_timesteps, row_bytes), comment, num_timesteps - 1)


def _pack(arrays: Mapping[str, Array], rows_per_block: int, comment: bytes, min_rows: int = 0) -> list[Any]:
    """Pack an archive; its arrays of at least `min_rows` rows are compressed if rows_per_block is not 0."""
    parts: list[Any] = []
    directory: list[bytes] = []
    offset = 0
    for key, array in arrays.items():
        name, header, crc = _member_head(key, array.shape, array.dtype)
        data: Any = array.tobytes() if array.nbytes <= COPIED_BYTES else array.reshape(-1).view(np.uint8).data
        crc = zlib.crc32(data, crc)
        packed_bytes = size = len(header) + len(data)
        content: tuple[Any, ...] = header, data
        method, extra = _STORED, b""
        if rows_per_block and len(array) >= min_rows and data:
            stream, index = compress_member(header, data, rows_per_block, array.nbytes // len(array))
            content, method, extra, packed_bytes = (stream,), _DEFLATED, index.pack(), len(stream)
        fixed = (_VERSION, _NO_FLAGS, method, _TIME, _DATE, crc, packed_bytes, size, len(name))
        parts += (_LOCAL.pack(b"PK\x03\x04", *fixed, 0), name, *content)
        entry = _CENTRAL.pack(b"PK\x01\x02", _VERSION, *fixed, len(extra), 0, 0, 0, 0, offset)
        directory += (entry, name, extra)
        offset += _LOCAL.size + len(name) + packed_bytes
    listing, count = b"".join(directory), len(arrays)
    end = _END.pack(b"PK\x05\x06", 0, 0, count, count, len(listing), offset, len(comment))
    return [*parts, listing, end, comment]


@functools.lru_cache(maxsize=4096)
def _member_head(key: str, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> tuple[bytes, bytes, int]:
    """Name of the member, header of the .npy format and its checksum, shared by members of equal shape."""
    buffer = io.BytesIO()
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, description)
    header = buffer.getvalue()
    return f"{key}.npy".encode(), header, zlib.crc32(header)
