"""Writes `.npz` archives: faster than numpy does, and compressed ones that can be decoded in part."""

from __future__ import annotations

import functools
import io
import struct
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from .compressed import choose_rows_per_block, compress_member
from .trajectory import Array

MAX_BYTES = 1 << 31  # of an archive; beyond, zip needs its 64-bit records

# PKWARE, APPNOTE.TXT 6.3.10, sections 4.3.7, 4.3.12 and 4.3.16; members are dated 1980-01-01.
_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_COPIED_BYTES = 64 << 10  # up to here, a copy costs less than a view
_VERSION, _NO_FLAGS, _STORED, _DEFLATED, _TIME, _DATE = 20, 0, 0, 8, 0, (1 << 5) | 1


class _Packed(NamedTuple):
    name: bytes
    method: int
    crc: int
    unpacked_bytes: int
    packed_bytes: int
    parts: tuple[Any, ...]
    extra: bytes


def pack_npz(arrays: Mapping[str, Array], comment: bytes = b"") -> list[Any]:
    """The archive that numpy.savez would write, in pieces to be written one after the other.

    Args:
        arrays: C-contiguous arrays of plain numbers by name, together smaller than MAX_BYTES.
        comment: of the archive, which numpy does not look at.
    """
    return _assemble((_store(name, array) for name, array in arrays.items()), comment)


def pack_compressed_npz(arrays: Mapping[str, Array], num_timesteps: int, comment: bytes = b"") -> list[Any]:
    """An archive like that of numpy.savez_compressed, of which parts can be decoded. See compressed.py.

    Args:
        arrays: C-contiguous arrays of plain numbers by name, together smaller than MAX_BYTES.
        num_timesteps: T+1; arrays with far fewer rows are not compressed.
        comment: of the archive.
    """
    columns = [array for array in arrays.values() if len(array) + 1 >= num_timesteps]
    row_bytes = sum(array.nbytes // len(array) for array in columns)
    rows_per_block = choose_rows_per_block(num_timesteps, row_bytes)
    members = []
    for name, array in arrays.items():
        is_column = len(array) + 1 >= num_timesteps
        if not is_column or array.nbytes == 0:
            members.append(_store(name, array))
            continue
        header, data = _array_header(array.shape, array.dtype), array.reshape(-1).view(np.uint8)
        stream, index = compress_member(header, data, rows_per_block, array.nbytes // len(array))
        crc, size = zlib.crc32(data.data, zlib.crc32(header)), len(header) + len(data)
        file_name = f"{name}.npy".encode()
        members.append(_Packed(file_name, _DEFLATED, crc, size, len(stream), (stream,), index.pack()))
    return _assemble(members, comment)


def _store(key: str, array: Array) -> _Packed:
    header = _array_header(array.shape, array.dtype)
    data: Any = array.tobytes() if array.nbytes <= _COPIED_BYTES else array.reshape(-1).view(np.uint8)
    size = len(header) + len(data)
    crc = zlib.crc32(data, zlib.crc32(header))
    return _Packed(f"{key}.npy".encode(), _STORED, crc, size, size, (header, data), b"")


def _assemble(members: Iterable[_Packed], comment: bytes) -> list[Any]:
    parts: list[Any] = []
    directory: list[bytes] = []
    offset = 0
    for name, method, crc, unpacked_bytes, packed_bytes, content, extra in members:
        common: tuple[Any, ...] = (
            _VERSION, _NO_FLAGS, method, _TIME, _DATE, crc, packed_bytes, unpacked_bytes, len(name),
        )  # fmt: skip
        parts += (_LOCAL.pack(b"PK\x03\x04", *common, 0), name, *content)
        directory += (
            _CENTRAL.pack(b"PK\x01\x02", _VERSION, *common, len(extra), 0, 0, 0, 0, offset),
            name,
            extra,
        )
        offset += _LOCAL.size + len(name) + packed_bytes
    listing, count = b"".join(directory), len(directory) // 3
    end = _END.pack(b"PK\x05\x06", 0, 0, count, count, len(listing), offset, len(comment))
    return [*parts, listing, end, comment]


@functools.lru_cache(maxsize=4096)
def _array_header(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> bytes:
    """Magic, version and header of the .npy format; trajectories of equal length share it."""
    buffer = io.BytesIO()
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, description)
    return buffer.getvalue()
