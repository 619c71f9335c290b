from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loxodon.data import BrokenTrajectoryError, Trajectory, open_trajectory, save_trajectory
from loxodon.data.container import FORMAT_VERSION, MAGIC, pack_container, read_container, verify_container
from loxodon.data.errors import FormatError

MakeTraj = Callable[..., Trajectory]
NAMED: dict[str, Any] = {"save_as": "traj", "traj_id": "0123abcd", "unix_time": 1_700_000_000.25}


def header_of(content: bytes) -> dict[str, Any]:
    length = struct.unpack_from("<I", content, 8)[0]
    header: dict[str, Any] = json.loads(content[16 : 16 + length])
    return header


def with_header(content: bytes, header: dict[str, Any]) -> bytes:
    """The same file with another header of its length, and right checksums."""
    length = struct.unpack_from("<I", content, 8)[0]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    assert len(text) == length
    num_arrays = len(header_of(content)["arrays"])
    checksums = content[16 + length : 16 + length + 4 * num_arrays]
    crc = struct.pack("<I", zlib.crc32(text + checksums))
    return content[:12] + crc + text + content[16 + length :]


def test_what_lies_on_disk(tmp_path: Path, make_traj: MakeTraj) -> None:
    path = save_trajectory(tmp_path, make_traj(20, env_name="maze"), **NAMED)
    content = path.read_bytes()
    assert path.name == "maze_0123abcd_1700000000.250000.traj"
    assert content.startswith(MAGIC + struct.pack("<H", FORMAT_VERSION))
    header = header_of(content)
    arrays = {entry.pop("name"): entry for entry in header.pop("arrays")}
    assert header == {
        "format_version": 1, "env_name": "maze", "policy_version": None, "num_transitions": 20,
    }  # fmt: skip
    assert {name: (entry["dtype"], entry["shape"]) for name, entry in arrays.items()} == {
        "_OBS_KEY_position": ("<f4", [21, 1]),
        "_OBS_KEY_image": ("|u1", [21, 2, 2]),
        "rl2s": ("<f4", [21, 4]),
        "time_idxs": ("<i8", [21, 1]),
        "rews": ("<f4", [20, 1]),
        "dones": ("|b1", [20, 1]),
        "actions": ("|u1", [20, 1]),
    }
    assert all(entry["offset"] % 64 == 0 for entry in arrays.values())


def test_arrays_are_aligned_in_the_file() -> None:
    arrays = {f"a{i}": np.full(i, i, np.float64) for i in range(1, 20)}
    content = b"".join(pack_container(arrays, env_name="e", policy_version=3, num_transitions=1))
    read = read_container(content)
    start = np.frombuffer(content, np.uint8).__array_interface__["data"][0]
    for name, array in read.arrays.items():
        assert (array.__array_interface__["data"][0] - start) % 64 == 0
        np.testing.assert_array_equal(array, arrays[name])
    assert (read.env_name, read.policy_version) == ("e", 3)


def test_every_array_has_its_checksum() -> None:
    arrays = {name: np.arange(100) for name in "abc"}
    content = b"".join(pack_container(arrays, env_name="e", policy_version=3, num_transitions=1))
    verify_container(content)
    for i, name in enumerate(arrays):
        damaged = bytearray(content)
        damaged[len(content) - 1 - (2 - i) * 832] ^= 1
        read_container(bytes(damaged))  # only checking looks at the content
        with pytest.raises(FormatError, match=f"checksum of {name} is .*has changed"):
            verify_container(bytes(damaged))


def test_newer_format_is_named(tmp_path: Path, make_traj: MakeTraj) -> None:
    path = save_trajectory(tmp_path, make_traj(3), **NAMED)
    content = path.read_bytes()
    path.write_bytes(content[:6] + struct.pack("<H", 9) + content[8:])
    with pytest.raises(
        BrokenTrajectoryError, match=r"format version 9, but this Loxodon reads versions 1 to 1.*Fix:"
    ):
        open_trajectory(path)


def test_changed_header_is_named(tmp_path: Path, make_traj: MakeTraj) -> None:
    path = save_trajectory(tmp_path, make_traj(3, env_name="maze"), **NAMED)
    path.write_bytes(path.read_bytes().replace(b'"maze"', b'"moze"'))
    with pytest.raises(BrokenTrajectoryError, match="checksum of its header is wrong"):
        open_trajectory(path)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("dtype", "|O", "dtype object, which is not plain"),
        ("dtype", "?!", "header cannot be understood"),
        ("shape", [-4, 1], r"shape \(-4, 1\) and offset 0, but both must be counts"),
        ("shape", ["4"], "must be counts"),
        ("shape", [9**9], r"should have \d+ bytes according to its header, but has"),
        ("name", "x", "it lacks _OBS_KEY_"),
    ],
)
def test_impossible_header_is_named(
    tmp_path: Path, make_traj: MakeTraj, field: str, value: Any, problem: str
) -> None:
    path = save_trajectory(tmp_path, make_traj(3, env_name="maze" * 9), **NAMED)
    header = header_of(path.read_bytes())
    header["env_name"] = "e"  # makes room
    for entry in header["arrays"][:2]:
        entry[field] = value
    path.write_bytes(with_header(path.read_bytes(), header))
    with pytest.raises(BrokenTrajectoryError, match=problem):
        open_trajectory(path)
