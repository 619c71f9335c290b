"""Reading `.npz` archives without copying them: uncompressed members are views into the file itself."""

from __future__ import annotations

import functools
import io
import mmap
import os
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .errors import BrokenTrajectoryError
from .trajectory import Array

_LOCAL_HEADER_BYTES = 30  # fixed part of a zip local file header; name and extra field follow
_NAME_AND_EXTRA_LENGTHS = struct.Struct("<HH")  # at byte 26 of that header
_MAGIC = b"\x93NUMPY"
_BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    IndexError,
    struct.error,
    ValueError,
    NotImplementedError,
)
_HEADER_LENGTHS = {(1, 0): struct.Struct("<H"), (2, 0): struct.Struct("<I")}


@dataclass(frozen=True)
class NpzContent:
    """What one archive holds.

    Attributes:
        arrays: read-only arrays by name.
        ram_bytes: memory that keeping them costs; mapped files count only a small fixed amount.
        is_mapped: True if the arrays are views into a memory map (which keeps a file descriptor open).
    """

    arrays: dict[str, Array]
    ram_bytes: int
    is_mapped: bool


def read_npz(path: str | Path, *, map_above_bytes: int = 1 << 20) -> NpzContent:
    """Open an archive; of a large uncompressed one, only the parts that are used are ever read from disk.

    Args:
        path: the file, written by numpy.savez or numpy.savez_compressed.
        map_above_bytes: larger files are memory-mapped, smaller ones read at once.

    Raises:
        FileNotFoundError: If it does not exist (any longer).
        BrokenTrajectoryError: If it is not a complete archive of plain arrays. Pickled objects are refused,
            never loaded.
    """
    with Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            with zipfile.ZipFile(file) as archive:
                is_mapped = size > map_above_bytes
                buffer: bytes | mmap.mmap
                if is_mapped:
                    buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                else:
                    file.seek(0)
                    buffer = file.read()
                ram_bytes = 4096 if is_mapped else size + 4096
                arrays: dict[str, Array] = {}
                for info in archive.infolist():
                    name = info.filename.removesuffix(".npy")
                    if info.compress_type == zipfile.ZIP_STORED:
                        arrays[name] = _view_member(buffer, info)
                    else:
                        arrays[name] = _decode_member(archive.read(info))
                        ram_bytes += arrays[name].nbytes
        except _BROKEN as error:
            raise BrokenTrajectoryError(
                f"{path} ({size} bytes) is not a readable trajectory file: {error}. Allowed is a complete "
                ".npz archive of plain (never pickled) arrays. Fix: move the file out of the folder or "
                "delete it."
            ) from error
    return NpzContent(arrays, ram_bytes, is_mapped)


def _view_member(buffer: bytes | mmap.mmap, info: zipfile.ZipInfo) -> Array:
    """Return an uncompressed member as a view into the archive's bytes."""
    name_length, extra_length = _NAME_AND_EXTRA_LENGTHS.unpack_from(buffer, info.header_offset + 26)
    begin = info.header_offset + _LOCAL_HEADER_BYTES + name_length + extra_length
    end = begin + info.file_size
    version = (buffer[begin + 6], buffer[begin + 7])
    if end > len(buffer) or buffer[begin : begin + 6] != _MAGIC:
        raise zipfile.BadZipFile(f"member {info.filename!r} is cut off or not an array")
    if version not in _HEADER_LENGTHS:
        return _decode_member(bytes(buffer[begin:end]))
    length_field = _HEADER_LENGTHS[version]
    header_end = begin + 8 + length_field.size + length_field.unpack_from(buffer, begin + 8)[0]
    shape, is_fortran, dtype = _parse_header(version, bytes(buffer[begin + 8 : header_end]))
    if header_end + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize != end:
        raise zipfile.BadZipFile(f"member {info.filename!r} does not have the size that its header announces")
    return np.ndarray(shape, dtype, buffer=buffer, offset=header_end, order="F" if is_fortran else "C")


@functools.lru_cache(maxsize=4096)
def _parse_header(
    version: tuple[int, int], header: bytes
) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    """Parse the header of an array; trajectories of equal length share it, so it is worth remembering."""
    if version == (1, 0):
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(io.BytesIO(header))
    else:
        shape, is_fortran, dtype = np.lib.format.read_array_header_2_0(io.BytesIO(header))
    if dtype.hasobject:
        raise zipfile.BadZipFile("it holds pickled Python objects")
    return shape, is_fortran, dtype


def _decode_member(member: bytes) -> Array:
    array: Array = np.lib.format.read_array(io.BytesIO(member), allow_pickle=False)
    array.flags.writeable = False
    return array
