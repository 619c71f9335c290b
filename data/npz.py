"""Reading `.npz` archives without copying them: uncompressed members are views into the file itself.

The archive's directory is parsed here, since zipfile takes many times longer for files as small as most
trajectories; it takes over where an archive is so large that it needs 64-bit records.
"""

from __future__ import annotations

import functools
import io
import json
import os
import struct
import tokenize
import zipfile
import zlib
from typing import Any, NamedTuple

import numpy as np

from .compressed import BlockStore, PackedColumn, parse_block_index
from .content import NVEC, FileContent
from .errors import FormatError
from .extras import EXTRA_PREFIX
from .trajectory import Array

POLICY_VERSION = "policy_version"
MAX_DECODED_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # half of the memory
_SUSPICIOUS_BYTES = 64 << 20  # compressed members that announce more are looked at before they are decoded
_MAX_HEADER_BYTES = 16 << 10  # of an array; numpy reads 10,000
# PKWARE, APPNOTE.TXT 6.3.10, sections 4.3.7, 4.3.12 and 4.3.16
_LOCAL_BYTES, _LOCAL_LENGTHS = 30, struct.Struct("<HH")  # fixed part; at byte 26: lengths of name and extra
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_MAX_COMMENT_BYTES = (1 << 16) - 1
_STORED, _DEFLATED = 0, 8
_ENCRYPTED = 1  # bit of the flags
_LARGE = 0xFFFFFFFF, 0xFFFF  # stand for "see the 64-bit record"
_NPY_MAGIC = b"\x93NUMPY"
_NPY_LENGTHS = {b"\1\0": struct.Struct("<H"), b"\2\0": struct.Struct("<I")}  # by version
# what numpy's parser of array headers lets through, beside its own ValueError, when it meets nonsense
_UNREADABLE = ValueError, SyntaxError, TypeError, tokenize.TokenError, RecursionError, MemoryError


class _Member(NamedTuple):
    name: str
    method: int
    crc: int
    begin: int  # of its (compressed) bytes
    end: int
    size: int  # of its bytes when decoded
    extra: bytes


def read_npz(buffer: Any, path: str) -> FileContent:
    """Return the arrays in the bytes (or memory map) of an archive.

    Uncompressed ones are views; those with an index of their blocks are decoded later, where they are needed;
    other compressed ones are decoded now.

    Args:
        buffer: all bytes of the file.
        path: where they come from.

    Raises:
        FormatError: If they are not one complete archive of plain arrays. Pickled objects are refused, never
            loaded.
    """
    members, comment = _list_members(buffer, path)
    announced = _check_sizes(buffer, members)
    content = FileContent({}, env_name=_parse_env_name(comment))
    store = BlockStore(buffer, path)
    try:
        for member in members:
            _read_member(buffer, path, member, content, store)
    except MemoryError:
        if announced <= _SUSPICIOUS_BYTES:  # then it is not the file that takes too much
            raise
        raise FormatError(f"there is no memory for the {announced:,} bytes that it announces") from None
    if not store.is_empty:
        content.blocks = store
    version = content.arrays.pop(POLICY_VERSION, None)
    if version is not None:
        if version.dtype.kind not in "iu" or version.size != 1:
            raise FormatError(
                f"{POLICY_VERSION} is {version.dtype}{list(version.shape)}, not one whole number"
            )
        content.policy_version = int(version.item())
    return content


def _read_member(buffer: Any, path: str, member: _Member, content: FileContent, store: BlockStore) -> None:
    """Add one array to the content, and to the store if it can be decoded in part."""
    name = member.name.removesuffix(".npy")
    is_extra = name.startswith(EXTRA_PREFIX)
    index = parse_block_index(member.extra) if member.method == _DEFLATED else None
    if name in (POLICY_VERSION, NVEC):
        index = None
    content.is_buffer_used |= member.method == _STORED or index is not None
    if index is not None:
        begin, header_end = index.locate_header(buffer, member.begin)
        shape, is_fortran, dtype = _parse_npy_header(bytes(buffer[begin:header_end]), member.name)
        if is_fortran or member.size != header_end - begin + _count(shape) * dtype.itemsize:
            raise FormatError(f"member {member.name!r} does not have the size that its header announces")
        if is_extra:
            place = (index, shape, dtype, header_end, member.end, member.name)
            content.extras[name.removeprefix(EXTRA_PREFIX)] = PackedColumn(buffer, path, *place)
            return
        array = store.add(index, shape, dtype, header_end, member.end, member.name)
        content.ram_bytes += array.nbytes + 64 * len(index.lengths)
    elif member.method == _STORED:
        array = _view_array(buffer, member.begin, member.end, member.name)
    else:
        data = _decode(buffer, member)
        array = _view_array(data, 0, len(data), member.name)
        content.ram_bytes += len(data)
    if is_extra:
        content.extras[name.removeprefix(EXTRA_PREFIX)] = array
    else:
        content.arrays[name] = array


def _check_sizes(buffer: Any, members: list[_Member]) -> int:
    """Return how many bytes compressed members announce.

    Raises:
        FormatError: If they are too many, or more rows than there are timesteps. Nothing was decoded then.
    """
    announced = sum(member.size for member in members if member.method == _DEFLATED)
    if announced > MAX_DECODED_BYTES:
        raise FormatError(
            f"its compressed arrays announce {announced:,} bytes, but at most {MAX_DECODED_BYTES:,} are "
            "decoded, half of this machine's memory"
        )
    if announced > _SUSPICIOUS_BYTES:
        rows = {}
        for member in members:
            head_end = min(member.end, member.begin + _MAX_HEADER_BYTES)
            is_packed = member.method == _DEFLATED
            head = (
                _inflate(buffer, member, _MAX_HEADER_BYTES) if is_packed else buffer[member.begin : head_end]
            )
            shape = _read_header(head, 0, len(head), member.name)[0]
            rows[member.name.removesuffix(".npy")] = shape[0] if shape else 1
        num_timesteps = rows.get("time_idxs", 0)
        for name, count in rows.items():
            if count > num_timesteps:
                raise FormatError(f"{name} has {count:,} rows, but time_idxs has {num_timesteps:,}")
    return announced


def verify_npz(buffer: Any, path: str) -> None:
    """Decode everything and compare it with the archive's checksums. Raises FormatError if one differs."""
    for member in _list_members(buffer, path)[0]:
        if member.method == _DEFLATED:
            _decode(buffer, member)  # compares
            continue
        with memoryview(buffer) as view, view[member.begin : member.end] as data:
            _check_crc(member, zlib.crc32(data))


def _list_members(buffer: Any, path: str) -> tuple[list[_Member], bytes]:
    """Return the members of an archive and its comment."""
    size = len(buffer)
    end = size - _END.size
    if end < 0 or buffer[end : end + 4] != b"PK\x05\x06" or buffer[size - 2 :] != b"\0\0":
        end = buffer.rfind(b"PK\x05\x06", max(0, end - _MAX_COMMENT_BYTES))
        if end < 0 or end + _END.size > size:
            raise FormatError("its end is not that of an archive, so it is cut off or no .npz file")
    _, disk, _, num_here, num_members, listing_bytes, listing, comment_bytes = _END.unpack_from(buffer, end)
    if num_members == _LARGE[1] or listing == _LARGE[0] or listing_bytes == _LARGE[0]:
        return _list_large(buffer, path)
    if disk or num_here != num_members or listing + listing_bytes != end:
        raise FormatError("the directory of the archive is not where its end says")
    if end + _END.size + comment_bytes != size:
        raise FormatError("the archive does not end where its end says")
    members: list[_Member] = []
    position = listing
    for _ in range(num_members):
        if position + _CENTRAL.size > end:
            raise FormatError("the directory of the archive is too short")
        entry = _CENTRAL.unpack_from(buffer, position)
        signature, _, _, flags, method, _, _, crc, packed, unpacked = entry[:10]
        name_bytes, extra_bytes, comment_length, _, _, _, offset = entry[10:]
        if signature != b"PK\x01\x02":
            raise FormatError("the directory of the archive is damaged")
        if _LARGE[0] in (packed, unpacked, offset):
            return _list_large(buffer, path)
        name_end = position + _CENTRAL.size + name_bytes
        name = bytes(buffer[name_end - name_bytes : name_end]).decode("utf-8", "replace")
        extra = bytes(buffer[name_end : name_end + extra_bytes]) if extra_bytes else b""
        members.append(_locate(buffer, listing, name, flags, method, crc, packed, unpacked, offset, extra))
        position = name_end + extra_bytes + comment_length
    return members, bytes(buffer[end + _END.size :])


def _locate(
    buffer: Any,
    limit: int,
    name: str,
    flags: int,
    method: int,
    crc: int,
    packed: int,
    unpacked: int,
    offset: int,
    extra: bytes,
) -> _Member:
    """Find where the bytes of a member begin, behind a local header of variable length."""
    if method not in (_STORED, _DEFLATED) or flags & _ENCRYPTED:
        raise FormatError(f"member {name!r} is encrypted or compressed by an unknown method ({method})")
    if offset + _LOCAL_BYTES > limit or buffer[offset : offset + 4] != b"PK\x03\x04":
        raise FormatError(f"member {name!r} is not where the directory of the archive says")
    begin = offset + _LOCAL_BYTES + sum(_LOCAL_LENGTHS.unpack_from(buffer, offset + 26))
    if begin + packed > limit or (method == _STORED and packed != unpacked):
        raise FormatError(f"member {name!r} is cut off")
    return _Member(name, method, crc, begin, begin + packed, unpacked, extra)


def _list_large(buffer: Any, path: str) -> tuple[list[_Member], bytes]:
    """Do the same for an archive with 64-bit records, which has gigabytes, so that time does not matter."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [
                _locate(
                    buffer,
                    archive.start_dir,
                    info.filename,
                    info.flag_bits,
                    info.compress_type,
                    info.CRC,
                    info.compress_size,
                    info.file_size,
                    info.header_offset,
                    b"",
                )
                for info in archive.infolist()
            ], archive.comment
    except (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError) as error:
        raise FormatError(str(error)) from error


def _parse_env_name(comment: bytes) -> str | None:
    """Return the environment's name, which stands in the comment if the file name cannot hold it."""
    if not comment:
        return None
    try:
        name = json.loads(comment)["env_name"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None  # somebody else's comment
    return name if isinstance(name, str) else None


def _decode(buffer: Any, member: _Member) -> bytes:
    """Decode a compressed member and compare its checksum."""
    data = _inflate(buffer, member, member.size + 1)
    if len(data) != member.size:
        raise FormatError(f"member {member.name!r} does not have the size that the archive announces")
    _check_crc(member, zlib.crc32(data))
    return data


def _inflate(buffer: Any, member: _Member, max_bytes: int) -> bytes:
    """Decode the beginning of a compressed member."""
    try:
        with memoryview(buffer) as view, view[member.begin : member.end] as packed:
            return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, max_bytes)
    except zlib.error as error:
        raise FormatError(f"member {member.name!r} cannot be decoded ({error})") from error


def _check_crc(member: _Member, found: int) -> None:
    if found != member.crc:
        raise FormatError(
            f"the checksum of member {member.name!r} is {found:08x}, but {member.crc:08x} was written, so "
            "its content has changed since"
        )


def _view_array(buffer: Any, begin: int, end: int, name: str) -> Array:
    """Return the array between two positions of a buffer as a view."""
    shape, is_fortran, dtype, header_end = _read_header(buffer, begin, end, name)
    if header_end + _count(shape) * dtype.itemsize != end:
        raise FormatError(f"member {name!r} does not have the size that its header announces")
    return np.ndarray(shape, dtype, buffer=buffer, offset=header_end, order="F" if is_fortran else "C")


def _read_header(
    buffer: Any, begin: int, end: int, name: str
) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return shape, order and dtype of the array that begins there, and where its numbers begin."""
    length_field = _NPY_LENGTHS.get(bytes(buffer[begin + 6 : begin + 8]))
    if buffer[begin : begin + 6] != _NPY_MAGIC or length_field is None or begin + 12 > end:
        raise FormatError(f"member {name!r} is not an array")
    header_end = begin + 8 + length_field.size + length_field.unpack_from(buffer, begin + 8)[0]
    if header_end > end:
        raise FormatError(f"member {name!r} is cut off")
    return *_parse_npy_header(bytes(buffer[begin:header_end]), name), header_end


def _count(shape: tuple[int, ...]) -> int:
    return functools.reduce(int.__mul__, shape, 1)


@functools.lru_cache(maxsize=4096)
def _parse_npy_header(header: bytes, name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Parse what an array begins with; trajectories of equal length share it, so it is worth remembering."""
    stream = io.BytesIO(header)
    try:
        version = np.lib.format.read_magic(stream)
        read = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, is_fortran, dtype = read(stream)
        if min(shape, default=0) < 0:
            raise FormatError(f"member {name!r} has a shape that cannot be, {shape}")
    except _UNREADABLE as error:
        raise FormatError(f"member {name!r} has a header that cannot be understood ({error})") from error
    if dtype.hasobject:
        raise FormatError(f"member {name!r} holds pickled Python objects")
    return shape, is_fortran, dtype
