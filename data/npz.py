"""The `.npz` format: archives of arrays as numpy writes them. Uncompressed arrays are read without a copy.

This module parses and writes the archive's directory itself, since zipfile takes many times longer for files
as small as most trajectories.
"""

from __future__ import annotations

import functools
import io
import json
import math
import struct
import tokenize
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .errors import FormatError
from .rows import Bytes, array_in
from .trajectory import Array

MAX_BYTES = 1 << 31  # maximum size of an archive; far beyond it, zip needs 64-bit records
_SUSPICIOUS_BYTES = 1 << 28  # size of a member for which memory may run out
_COPIED_BYTES = 64 << 10  # up to this size, a copy costs less than a view
_LEVEL = 6  # compression level
# See PKWARE, APPNOTE.TXT 6.3.10, sections 4.3.7, 4.3.12 and 4.3.16. All files are dated 1980-01-01.
_LOCAL = struct.Struct("<4s5H3L2H")
_LOCAL_LENGTHS = struct.Struct("<HH")  # bytes 26 to 29 of the local header: lengths of name and extra field
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_VERSION, _NO_FLAGS, _TIME, _DATE = 20, 0, 0, (1 << 5) | 1
_STORED, _DEFLATED = 0, 8
_ENCRYPTED = 1  # flag bit
_MAX_COMMENT_BYTES = (1 << 16) - 1
_LARGE = 0xFFFFFFFF, 0xFFFF  # values that mean "see the 64-bit record"
_TOO_LARGE = "it is an archive with 64-bit records (over 4 GiB), which this reader does not support"
_HEAD_BYTES = 256  # usually longer than the header of an array
_NPY_MAGIC = b"\x93NUMPY"
_NPY_LENGTHS = {b"\1\0": struct.Struct("<H"), b"\2\0": struct.Struct("<I")}  # by version of the .npy format
# errors that numpy's parser of array headers raises for malformed input
_UNREADABLE = ValueError, SyntaxError, TypeError, tokenize.TokenError, RecursionError, MemoryError


def pack_npz(arrays: Mapping[str, Array], comment: bytes = b"", is_compressed: bool = False) -> list[Any]:
    """Return the archive that numpy.savez or savez_compressed would write, as pieces to write in order.

    Args:
        arrays: arrays of plain numbers by name.
        comment: comment of the archive, which numpy ignores.
        is_compressed: whether to compress the arrays.

    Raises:
        ValueError: If the arrays together are larger than MAX_BYTES.
    """
    num_bytes = sum(array.nbytes for array in arrays.values())
    if num_bytes > MAX_BYTES:
        raise ValueError(
            f"A trajectory of {num_bytes:,} bytes is too large for an npz file, which holds at most "
            f"{MAX_BYTES:,}. Fix: lower Experiment.traj_save_len."
        )
    method = _DEFLATED if is_compressed else _STORED
    parts: list[Any] = []
    directory: list[bytes] = []
    offset = 0
    for key, array in arrays.items():
        name, header, crc = _member_head(key, array.shape, array.dtype)
        data = array.tobytes() if array.nbytes <= _COPIED_BYTES else array.reshape(-1).view(np.uint8).data
        crc, size = zlib.crc32(data, crc), len(header) + len(data)
        content = [header, data]
        if is_compressed:
            compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
            content = [compressor.compress(header), compressor.compress(data), compressor.flush()]
        packed_bytes = sum(map(len, content))
        fixed = (_VERSION, _NO_FLAGS, method, _TIME, _DATE, crc, packed_bytes, size, len(name))
        parts += (_LOCAL.pack(b"PK\x03\x04", *fixed, 0), name, *content)
        directory += (_CENTRAL.pack(b"PK\x01\x02", _VERSION, *fixed, 0, 0, 0, 0, 0, offset), name)
        offset += _LOCAL.size + len(name) + packed_bytes
    listing, count = b"".join(directory), len(arrays)
    end = _END.pack(b"PK\x05\x06", 0, 0, count, count, len(listing), offset, len(comment))
    return [*parts, listing, end, comment]


@functools.lru_cache(maxsize=4096)
def _member_head(key: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[bytes, bytes, int]:
    """Name of a member, header of the .npy format and its checksum, shared by members of equal shape."""
    buffer = io.BytesIO()
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, description)
    header = buffer.getvalue()
    return f"{key}.npy".encode(), header, zlib.crc32(header)


class _Member(NamedTuple):
    name: str
    method: int
    crc: int
    begin: int  # offset of its (compressed) bytes
    end: int
    size: int  # number of its bytes when decoded


def read_npz(source: Bytes, *, is_checked: bool = False) -> tuple[dict[str, Any], str | None]:
    """Return the arrays in an archive, and the environment's name if the archive has it.

    Uncompressed arrays are returned as by array_in. Compressed arrays are decoded and compared with their
    checksums.

    Raises:
        FormatError: If `source` is not one complete archive of plain arrays; with `is_checked`, also if the
            checksum of an uncompressed array differs. Pickled objects are refused, never loaded.
    """
    members, comment = _list_members(source)
    announced = sum(member.size for member in members if member.method == _DEFLATED)
    if announced > MAX_BYTES:
        raise FormatError(f"its headers declare {announced:,} bytes, but at most {MAX_BYTES:,} are decoded")
    arrays: dict[str, Any] = {}
    for member in members:
        place = source, member.begin, member.end
        if member.method == _DEFLATED:
            place = _decode(source, member), 0, member.size
        elif is_checked:
            compare_crc(member.name, zlib.crc32(source[member.begin : member.end]), member.crc)
        arrays[member.name.removesuffix(".npy")] = _view_array(*place, member.name)
    return arrays, _parse_env_name(comment)


def _list_members(source: Bytes) -> tuple[list[_Member], bytes]:
    """Return the members of an archive, and its comment."""
    size = len(source)
    tail = source[max(0, size - _END.size) :]
    if not tail.startswith(b"PK\x05\x06"):  # the archive has a comment
        tail = source[max(0, size - _END.size - _MAX_COMMENT_BYTES) :]
        tail = tail[tail.rfind(b"PK\x05\x06") :]
    if not tail.startswith(b"PK\x05\x06") or len(tail) < _END.size:
        raise FormatError("it does not end like an archive, so it is cut off or not an .npz file")
    end = size - len(tail)
    _, disk, _, num_here, num_members, listing_bytes, listing, comment_bytes = _END.unpack_from(tail)
    if num_members == _LARGE[1] or listing == _LARGE[0] or listing_bytes == _LARGE[0]:
        raise FormatError(_TOO_LARGE)
    if disk or num_here != num_members or listing + listing_bytes != end:
        raise FormatError("the directory of the archive is not where its end record says")
    if end + _END.size + comment_bytes != size:
        raise FormatError("the archive does not end where its end record says")
    members: list[_Member] = []
    directory, position = source[listing:end], 0
    try:
        for _ in range(num_members):
            member, position = _read_entry(source, directory, position, listing)
            members.append(member)
    except struct.error as error:
        raise FormatError("the directory of the archive points outside the archive") from error
    return members, tail[_END.size :]


def _read_entry(source: Bytes, directory: bytes, position: int, listing: int) -> tuple[_Member, int]:
    """Return the member that an entry of the directory describes, and the position of the next entry."""
    entry = _CENTRAL.unpack_from(directory, position)
    signature, _, _, flags, method, _, _, crc, packed, unpacked = entry[:10]
    name_bytes, extra_bytes, comment_length, _, _, _, offset = entry[10:]
    if signature != b"PK\x01\x02":
        raise FormatError("the directory of the archive is damaged")
    if _LARGE[0] in (packed, unpacked, offset):
        raise FormatError(_TOO_LARGE)
    name_end = position + _CENTRAL.size + name_bytes
    name = directory[name_end - name_bytes : name_end].decode("utf-8", "replace")
    if method not in (_STORED, _DEFLATED) or flags & _ENCRYPTED:
        raise FormatError(f"member {name!r} is encrypted or compressed by an unknown method ({method})")
    local = source[offset : offset + _LOCAL.size]
    if local[:4] != b"PK\x03\x04":
        raise FormatError(f"member {name!r} is not where the directory of the archive says")
    begin = offset + _LOCAL.size + sum(_LOCAL_LENGTHS.unpack_from(local, 26))
    if begin + packed > listing or (method == _STORED and packed != unpacked):
        raise FormatError(f"member {name!r} is cut off")
    member = _Member(name, method, crc, begin, begin + packed, unpacked)
    return member, name_end + extra_bytes + comment_length


def _parse_env_name(comment: bytes) -> str | None:
    """Return the environment's name from the comment, which holds it if the file name cannot."""
    try:
        name = json.loads(comment)["env_name"] if comment else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None  # another program wrote the comment
    return name if isinstance(name, str) else None


def _decode(source: Bytes, member: _Member) -> bytes:
    """Decode a compressed member and compare its checksum."""
    packed = source[member.begin : member.end]
    try:
        data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, member.size + 1)
    except zlib.error as error:
        raise FormatError(f"member {member.name!r} cannot be decoded ({error})") from error
    except MemoryError as error:
        if member.size < _SUSPICIOUS_BYTES:
            raise  # the file does not cause the lack of memory
        raise FormatError(
            f"there is not enough memory for the {member.size:,} bytes of {member.name!r}"
        ) from error
    if len(data) != member.size:
        raise FormatError(f"member {member.name!r} does not have the size that the archive declares")
    compare_crc(member.name, zlib.crc32(data), member.crc)
    return data


def compare_crc(name: str, found: int, written: int) -> None:
    """Raise FormatError if two checksums differ."""
    if found != written:
        raise FormatError(
            f"the checksum of {name} is {found:08x}, but {written:08x} was written, so its content has "
            "changed since"
        )


def _view_array(source: Bytes, begin: int, end: int, name: str) -> Any:
    head = source[begin : min(begin + _HEAD_BYTES, end)]
    length_field = _NPY_LENGTHS.get(head[6:8])
    if head[:6] != _NPY_MAGIC or length_field is None or begin + 12 > end:
        raise FormatError(f"member {name!r} is not an array")
    head_bytes = 8 + length_field.size + length_field.unpack_from(head, 8)[0]
    if begin + head_bytes > end:
        raise FormatError(f"member {name!r} is cut off")
    if head_bytes > len(head):
        head = source[begin : begin + head_bytes]
    shape, is_fortran, dtype = _parse_npy_header(head[:head_bytes], name)
    if begin + head_bytes + math.prod(shape) * dtype.itemsize != end:
        raise FormatError(f"member {name!r} does not have the size that its header declares")
    return array_in(source, begin + head_bytes, shape, dtype, "F" if is_fortran else "C")


@functools.lru_cache(maxsize=4096)
def _parse_npy_header(header: bytes, name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Parse the header of an array; cached, because trajectories of equal length share it."""
    stream = io.BytesIO(header)
    try:
        is_first = np.lib.format.read_magic(stream) == (1, 0)
        formats = np.lib.format
        read = formats.read_array_header_1_0 if is_first else formats.read_array_header_2_0
        shape, is_fortran, dtype = read(stream)
        if min(shape, default=0) < 0:
            raise FormatError(f"member {name!r} has the impossible shape {shape}")
    except _UNREADABLE as error:
        raise FormatError(f"member {name!r} has a header that cannot be parsed ({error})") from error
    if dtype.hasobject:
        raise FormatError(f"member {name!r} holds pickled Python objects")
    return shape, is_fortran, dtype
