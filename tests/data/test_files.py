"""Names of trajectory files, writing one atomically, and the bounded cache of opened ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loxodon.data import FILE_FORMATS, Trajectory, TrajectoryReader, load_trajectory, save_trajectory
from loxodon.data import files as files_module
from loxodon.data.files import TrajectoryName, format_name, parse_name

MakeTraj = Callable[..., Trajectory]
NAMED: dict[str, Any] = {"traj_id": "0123abcd", "unix_time": 1_700_000_000.25}


# --- names ---------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    env=st.from_regex(r"[A-Za-z0-9.-]{1,20}", fullmatch=True),
    traj_id=st.from_regex(r"[0-9a-f]{8}", fullmatch=True),
    micros=st.integers(0, 4_000_000_000_000_000),
)
def test_names_are_parsed_from_the_right(env: str, traj_id: str, micros: int) -> None:
    parsed = parse_name(format_name(env, traj_id, micros / 1e6))
    assert parsed is not None
    assert (parsed.env_name, parsed.traj_id) == (env, traj_id)
    assert round(parsed.unix_time * 1e6) == micros


def test_names_of_other_writers(tmp_path: Path, make_traj: MakeTraj) -> None:
    assert format_name("a_b/c d", **NAMED) == "a-b-c-d_0123abcd_1700000000.250000.npz"
    assert parse_name("Cart_Pole_9f86d081_1700000000.npz") == ("Cart_Pole", "9f86d081", 1.7e9)
    assert parse_name("CartPole_9f86d081_1700000000.5.traj") == ("CartPole", "9f86d081", 1.7e9 + 0.5)
    assert parse_name("CartPole_9f86d081_1700000000.123.npz") == TrajectoryName(
        "CartPole", "9f86d081", 1700000000.123
    )
    for foreign in ("notes.txt", "a_b.npz", "a_b_c.npz", "env_0123abcd_17.0.traj.tmp", "_0123abcd_17.0.npz"):
        assert parse_name(foreign) is None, foreign
    path = save_trajectory(tmp_path, make_traj(1, env_name="x" * 400), save_as="npz", **NAMED)
    assert parse_name(path.name) is not None  # fits a file system


# --- writing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "broken_call", "save_as"),
    [
        (files_module, "pack_npz", "npz"),
        (files_module, "pack_npz", "npz-compressed"),
        (files_module, "pack_traj", "traj"),
        (files_module, "open", "npz"),
        (os, "replace", "npz"),
    ],
)
def test_failed_write_leaves_nothing(
    tmp_path: Path,
    make_traj: MakeTraj,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    broken_call: str,
    save_as: str,
) -> None:
    def disk_full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(owner, broken_call, disk_full, raising=False)
    with pytest.raises(OSError, match="No space left"):
        save_trajectory(tmp_path, make_traj(3), save_as=save_as, **NAMED)
    assert list(tmp_path.iterdir()) == []


def test_file_has_its_final_name_only_when_complete(
    tmp_path: Path, make_traj: MakeTraj, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def spy(source: Any, target: Any) -> None:
        seen.extend(entry.name for entry in tmp_path.iterdir())
        original(source, target)

    original = os.replace
    monkeypatch.setattr(os, "replace", spy)
    path = save_trajectory(tmp_path, make_traj(3), save_as="npz", **NAMED)
    assert seen == [path.name + ".tmp"]
    assert list(tmp_path.iterdir()) == [path]


def test_unknown_format_is_named(tmp_path: Path, make_traj: MakeTraj) -> None:
    with pytest.raises(ValueError, match=r"'numpy'.*allowed are 'npz', 'npz-compressed', 'traj'.*Fix:"):
        save_trajectory(tmp_path, make_traj(3), save_as="numpy", **NAMED)


# --- the cache of opened files -------------------------------------------------------------------------


@pytest.mark.parametrize("save_as", FILE_FORMATS)
def test_large_files_are_mapped_and_outlive_their_deletion(
    tmp_path: Path, make_traj: MakeTraj, save_as: str
) -> None:
    for length in (30_000, 30):
        reader = TrajectoryReader()
        path = save_trajectory(tmp_path, make_traj(length), save_as=save_as, **NAMED)
        traj = reader.load(str(path))
        is_mapped = length == 30_000 and save_as != "npz-compressed"
        assert reader.num_maps == is_mapped
        assert (reader.ram_bytes == 4096) if is_mapped else (4096 + length * 20 < reader.ram_bytes)
        path.unlink()
        assert traj.obs["position"][length - 1, 0] == length - 1


def test_reader_reads_a_file_once(tmp_path: Path, make_traj: MakeTraj) -> None:
    path = str(save_trajectory(tmp_path, make_traj(3), save_as="npz", **NAMED))
    reader = TrajectoryReader()
    assert reader.load(path) is reader.load(path)
    reader.forget([path, "never opened"])
    assert reader.ram_bytes == 0
    Path(path).unlink()
    with pytest.raises(FileNotFoundError):
        reader.load(path)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors where Linux lists them")
@pytest.mark.parametrize("save_as", FILE_FORMATS)
def test_thousands_of_files_keep_few_descriptors_and_little_memory(
    tmp_path: Path, make_traj: MakeTraj, save_as: str
) -> None:
    """Twelve real files under two thousand names, small and mapped ones mixed."""
    templates = [
        save_trajectory(tmp_path, make_traj(length), save_as=save_as, traj_id=f"{length:08x}", unix_time=1e9)
        for length in (*range(1, 11), 3000, 4000)
    ]
    paths = []
    for i in range(2000):
        paths.append(f"{tmp_path}/env_{i:08x}_17.0.{save_as.split('-', maxsplit=1)[0]}")
        os.link(templates[i % len(templates)], paths[-1])
    reader = TrajectoryReader(max_ram_bytes=1 << 20, max_open_maps=8)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for path in paths:
        assert len(reader.load(path).slice(0, 1)) == 1
        assert reader.ram_bytes <= 1 << 20
        assert reader.num_maps <= 8
    assert len(os.listdir("/proc/self/fd")) <= before + 8  # noqa: PTH208
    assert 0 < len(reader) < 300


def test_one_file_larger_than_the_cache_is_served_and_not_kept(tmp_path: Path, make_traj: MakeTraj) -> None:
    path = save_trajectory(tmp_path, make_traj(2000), save_as="npz-compressed", **NAMED)
    reader = TrajectoryReader(max_ram_bytes=1000)
    traj = reader.load(str(path))
    assert reader.ram_bytes == 0
    np.testing.assert_array_equal(traj.slice(5, 9).rl2s, load_trajectory(path).rl2s[5:10])


def test_too_many_maps_do_not_push_out_small_files(tmp_path: Path, make_traj: MakeTraj) -> None:
    paths = [
        str(save_trajectory(tmp_path, make_traj(length), save_as="npz", traj_id=f"{i:08x}", unix_time=1e9))
        for i, length in enumerate((10, 20_000, 20_000, 20_000))
    ]
    reader = TrajectoryReader(max_open_maps=1)
    small, first = reader.load(paths[0]), reader.load(paths[1])
    reader.load(paths[2])
    recent = reader.load(paths[3])
    assert reader.load(paths[3]) is recent
    assert reader.load(paths[0]) is small
    assert reader.load(paths[1]) is not first
