"""The native single-file container, suffix `.traj`: a JSON header, then raw arrays that can be mapped.

Little-endian throughout:

    bytes 0-5      magic
    bytes 6-7      format version
    bytes 8-11     H, length of the JSON text
    bytes 12-15    CRC-32 of JSON text and checksums together
    H bytes        JSON: format_version, env_name, policy_version, num_transitions and, for each array, name,
                   dtype, shape and offset (from the beginning of the data)
    4 bytes each   CRC-32 of every array
    data           begins at the next multiple of 64, as does every array; the file ends with the last array

The checksums lie outside the JSON so that trajectories of equal shape share one header text, which is then
parsed once, not once per file.
"""

from __future__ import annotations

import functools
import json
import math
import struct
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .content import FileContent
from .errors import FormatError
from .extras import EXTRA_PREFIX, Column
from .npz_writing import COPIED_BYTES
from .trajectory import Array

MAGIC = b"\x89LXTRJ"  # the first byte is no text, so that nothing takes it for some
FORMAT_VERSION = 1
_START = struct.Struct("<6sHII")
_ALIGNMENT = 64
_MAX_HEADER_BYTES = 1 << 24


class _ArrayEntry(NamedTuple):
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class _Header(NamedTuple):
    entries: tuple[_ArrayEntry, ...]
    env_name: str
    policy_version: int | None
    data_bytes: int


def pack_container(
    arrays: Mapping[str, Array], *, env_name: str, policy_version: int | None, num_transitions: int
) -> list[Any]:
    """Return the pieces of a file, to be written one after the other.

    Args:
        arrays: C-contiguous arrays without Python objects, by name.
        env_name: of the environment.
        policy_version: of the policy that acted last, None if unknown.
        num_transitions: T.
    """
    described = tuple((name, array.dtype.str, array.shape, array.nbytes) for name, array in arrays.items())
    text, padding = _describe(described, env_name, policy_version, num_transitions)
    data: list[Any] = [
        array.tobytes() if array.nbytes <= COPIED_BYTES else array.reshape(-1).view(np.uint8).data
        for array in arrays.values()
    ]
    checksums = struct.pack(f"<{len(data)}I", *map(zlib.crc32, data))
    start = _START.pack(MAGIC, FORMAT_VERSION, len(text), zlib.crc32(checksums, zlib.crc32(text)))
    parts: list[Any] = [
        start,
        text,
        checksums,
        bytes(-(_START.size + len(text) + len(checksums)) % _ALIGNMENT),
    ]
    for part, gap in zip(data, padding, strict=True):
        parts += (part, gap)
    return parts


@functools.lru_cache(maxsize=1024)
def _describe(
    described: tuple[tuple[str, str, tuple[int, ...], int], ...],
    env_name: str,
    policy_version: int | None,
    num_transitions: int,
) -> tuple[bytes, tuple[bytes, ...]]:
    """Return the JSON text and what fills the gap after each array; equal for trajectories of equal shape."""
    entries, padding, offset = [], [], 0
    for name, dtype, shape, nbytes in described:
        entries.append({"name": name, "dtype": dtype, "shape": shape, "offset": offset})
        padding.append(bytes(-nbytes % _ALIGNMENT))
        offset += nbytes + len(padding[-1])
    padding[-1] = b""
    header = {
        "format_version": FORMAT_VERSION,
        "env_name": env_name,
        "policy_version": policy_version,
        "num_transitions": num_transitions,
        "arrays": entries,
    }
    return json.dumps(header, separators=(",", ":")).encode(), tuple(padding)


def read_container(buffer: Any) -> FileContent:
    """Return views of the arrays in the bytes (or memory map) of a file.

    Raises:
        FormatError: If the bytes are not one complete container of a known version.
    """
    header, begin, _ = _open(buffer)
    arrays: dict[str, Array] = {}
    extras: dict[str, Column] = {}
    for entry in header.entries:
        array = np.ndarray(entry.shape, entry.dtype, buffer, begin + entry.offset)
        if entry.name.startswith(EXTRA_PREFIX):
            extras[entry.name.removeprefix(EXTRA_PREFIX)] = array
        else:
            arrays[entry.name] = array
    return FileContent(
        arrays,
        env_name=header.env_name,
        policy_version=header.policy_version,
        is_buffer_used=True,
        extras=extras,
    )


def verify_container(buffer: Any) -> None:
    """Compare the checksum of every array. Raises FormatError if one differs."""
    header, begin, checksums = _open(buffer)
    with memoryview(buffer) as view:
        for entry, expected in zip(header.entries, checksums, strict=True):
            first = begin + entry.offset
            with view[first : first + entry.nbytes] as data:
                found = zlib.crc32(data)
            if found != expected:
                raise FormatError(
                    f"the checksum of {entry.name} is {found:08x}, but {expected:08x} was written, so its "
                    "content has changed since"
                )


def _open(buffer: Any) -> tuple[_Header, int, tuple[int, ...]]:
    """Return the header, where the data begins, and the checksum of each array."""
    size = len(buffer)
    if size < _START.size:
        raise FormatError(f"the file ends within the {_START.size} bytes that a container begins with")
    magic, version, text_bytes, expected_crc = _START.unpack_from(buffer, 0)
    if magic != MAGIC:
        raise FormatError(f"it begins with {magic!r}, a container with {MAGIC!r}")
    if version > FORMAT_VERSION or version < 1:
        raise FormatError(
            f"it has format version {version}, but this Loxodon reads versions 1 to {FORMAT_VERSION}, so a "
            "newer Loxodon is needed"
        )
    text_end = _START.size + text_bytes
    if text_bytes > _MAX_HEADER_BYTES or text_end > size:
        raise FormatError(f"its header should have {text_bytes} bytes, but the file has only {size}")
    header = _parse(bytes(buffer[_START.size : text_end]))
    checksums_end = text_end + 4 * len(header.entries)
    begin = checksums_end + -checksums_end % _ALIGNMENT
    if size != begin + header.data_bytes:
        raise FormatError(
            f"it should have {begin + header.data_bytes} bytes according to its header, but has {size}"
        )
    if zlib.crc32(buffer[_START.size : checksums_end]) != expected_crc:
        raise FormatError("the checksum of its header is wrong, so its content has changed")
    return header, begin, struct.unpack_from(f"<{len(header.entries)}I", buffer, text_end)


@functools.lru_cache(maxsize=1024)
def _parse(text: bytes) -> _Header:
    """Parse the JSON text; trajectories of equal shape share it, so it is worth remembering."""
    try:
        header = json.loads(text)
        entries = tuple(_parse_entry(entry) for entry in header["arrays"])
        env_name, policy_version = header["env_name"], header["policy_version"]
        if not isinstance(env_name, str) or not isinstance(policy_version, int | None):
            raise FormatError(
                "its header gives env_name or policy_version another type than text or a number"
            )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FormatError(f"its header cannot be understood ({type(error).__name__}: {error})") from error
    return _Header(entries, env_name, policy_version, max((e.offset + e.nbytes for e in entries), default=0))


def _parse_entry(entry: dict[str, Any]) -> _ArrayEntry:
    dtype, shape, offset = np.dtype(str(entry["dtype"])), tuple(entry["shape"]), entry["offset"]
    if dtype.hasobject or dtype.kind == "V":
        raise FormatError(f"its header names dtype {dtype}, which is not plain")
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, offset)):
        raise FormatError(f"its header gives shape {shape} and offset {offset}, but both must be counts")
    return _ArrayEntry(str(entry["name"]), dtype, shape, offset, math.prod(shape) * dtype.itemsize)
