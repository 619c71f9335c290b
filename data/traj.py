"""The `.traj` format: the file layout of safetensors, so that anything that reads those reads this.

    8 bytes     N, length of the JSON text, little-endian
    N bytes     JSON: for each array, by name, `dtype`, `shape` and `data_offsets` (begin and end, from the
                end of the text); and `__metadata__` with `format`, `version` and `env_name`, and `dtypes` of
                arrays that safetensors has no name for, which stand there as bytes
    data        little-endian arrays without gaps, those of the widest numbers first, so that all are aligned

The array `_CRC32` holds the checksums of the text and of every other array in the order of the text. They lie
outside the text so that trajectories of equal shape share one, which is then parsed once, not once per file.
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

from .errors import FormatError
from .npz import bytes_of, compare_crc
from .rows import Bytes, array_in, whole
from .trajectory import Array

VERSION = 2
MAGIC_OF_VERSION_1 = b"\x89LXTRJ"  # a layout of its own, which is not read any more
_CRCS = "_CRC32"
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64
_MAX_TEXT_BYTES = 1 << 24
_CODES = {
    "?": "BOOL",
    **{f"u{size}": f"U{8 * size}" for size in (1, 2, 4, 8)},
    **{f"i{size}": f"I{8 * size}" for size in (1, 2, 4, 8)},
    **{f"f{size}": f"F{8 * size}" for size in (2, 4, 8)},
}
_CODE_OF = {np.dtype(name): code for name, code in _CODES.items()}
_DTYPE_OF = {code: np.dtype(name).newbyteorder("<") for name, code in _CODES.items()}


class _Entry(NamedTuple):
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int


def pack_traj(arrays: Mapping[str, Array], env_name: str) -> list[Any]:
    """The pieces of a file, to be written one after the other."""
    crcs = np.zeros(1 + len(arrays), "<u4")
    ordered = sorted({**arrays, _CRCS: crcs}.items(), key=lambda item: -item[1].itemsize)
    native = [(name, array.astype(array.dtype.newbyteorder("<"), copy=False)) for name, array in ordered]
    text = _describe(tuple((name, array.dtype, array.shape) for name, array in native), env_name)
    data = {name: bytes_of(array) for name, array in native if name != _CRCS}
    crcs[:] = [zlib.crc32(text), *map(zlib.crc32, data.values())]
    data[_CRCS] = crcs.tobytes()
    return [_LENGTH.pack(len(text)), text, *(data[name] for name, _ in native)]


@functools.lru_cache(maxsize=1024)
def _describe(described: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...], env_name: str) -> bytes:
    header: dict[str, Any] = {
        "__metadata__": {"format": "loxodon-trajectory", "version": str(VERSION), "env_name": env_name}
    }
    end, unknown = 0, {}
    for name, dtype, shape in described:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        code = _CODE_OF.get(dtype.newbyteorder("="))
        if code is None:
            code, shape, unknown[name] = "U8", (*shape, dtype.itemsize), dtype.str  # noqa: PLW2901
        header[name] = {"dtype": code, "shape": shape, "data_offsets": (begin, end)}
    if unknown:
        header["__metadata__"]["dtypes"] = json.dumps(unknown)
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-(_LENGTH.size + len(text)) % _ALIGNMENT)


def is_traj(source: Bytes) -> bool:
    """Whether bytes begin like those of this format: a length, and a JSON object."""
    return source[_LENGTH.size : _LENGTH.size + 1] == b"{"


def read_traj(source: Bytes, *, is_checked: bool = False) -> tuple[dict[str, Any], str]:
    """The arrays of a file by name, as array_in returns them, and the environment's name.

    Raises:
        FormatError: If the bytes are not one complete file of a known version; if checked, also if a checksum
            is not that of its array.
    """
    size = len(source)
    if size < _LENGTH.size:
        raise FormatError(f"the file ends within the {_LENGTH.size} bytes that it begins with")
    (text_bytes,) = _LENGTH.unpack(source[: _LENGTH.size])
    start = _LENGTH.size + text_bytes
    if text_bytes > _MAX_TEXT_BYTES or start > size:
        raise FormatError(f"its header should have {text_bytes} bytes, but the file has only {size}")
    text = source[_LENGTH.size : start]
    entries, env_name, data_bytes = _parse(text)
    if size != start + data_bytes:
        raise FormatError(
            f"it should have {start + data_bytes} bytes according to its header, but has {size}"
        )
    try:
        arrays: dict[str, Any] = {
            entry.name: array_in(source, start + entry.begin, entry.shape, entry.dtype) for entry in entries
        }
    except ValueError as error:  # too many axes, for example
        raise FormatError(f"its header describes an impossible array ({error})") from error
    crcs = whole(arrays.pop(_CRCS))
    if crcs.shape != (1 + len(arrays),) or crcs[0] != zlib.crc32(text):
        raise FormatError("the checksum of its header is wrong, so its content has changed")
    if is_checked:
        for (name, array), crc in zip(arrays.items(), crcs[1:].tolist(), strict=True):
            compare_crc(name, zlib.crc32(bytes_of(array)), crc)
    return arrays, env_name


@functools.lru_cache(maxsize=1024)
def _parse(text: bytes) -> tuple[tuple[_Entry, ...], str, int]:
    """Arrays, environment name and bytes of data; equal shapes share a text, so it is worth remembering."""
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__")
        if metadata["format"] != "loxodon-trajectory" or int(metadata["version"]) != VERSION:
            raise FormatError(
                f"it is a {metadata['format']!r} of version {metadata['version']!r}, but this Loxodon reads "
                f"'loxodon-trajectory' of version {VERSION}"
            )
        unknown = json.loads(metadata.get("dtypes", "{}"))
        entries = tuple(_parse_entry(name, entry, unknown.get(name)) for name, entry in header.items())
        if not any(entry.name == _CRCS for entry in entries):
            raise FormatError("its header lacks the checksums")
        env_name = metadata["env_name"]
        if not isinstance(env_name, str):
            raise FormatError(f"its header gives the environment the name {env_name!r}, which is no text")
    except (ValueError, TypeError, KeyError, AttributeError, SyntaxError, RecursionError) as error:
        raise FormatError(f"its header cannot be understood ({type(error).__name__}: {error})") from error
    return entries, env_name, max(entry.end for entry in entries)


def _parse_entry(name: str, entry: dict[str, Any], unknown: str | None) -> _Entry:
    dtype, shape, (begin, end) = _DTYPE_OF[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
    if unknown is not None:
        dtype, shape = np.dtype(unknown), shape[:-1]
        if dtype.kind in "OV":
            raise FormatError(f"its header names dtype {dtype}, which is not plain")
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, begin)):
        raise FormatError(
            f"its header gives {name!r} shape {shape} and offset {begin}, but both must be counts"
        )
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise FormatError(
            f"its header gives {name!r} {end - begin} bytes, which do not fit {dtype}{list(shape)}"
        )
    return _Entry(name, dtype, shape, begin, end)
