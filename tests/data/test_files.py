"""Names of trajectory files, atomic writes, and the bounded cache of opened files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loxodon.data import FILE_FORMATS, Trajectory, TrajectoryReader, load_trajectory, save_trajectory
from loxodon.data import files as files_module
from loxodon.data.files import format_name, parse_name

MakeTraj = Callable[..., Trajectory]
NAMED: dict[str, Any] = {"traj_id": "0123abcd", "unix_time": 1_700_000_000.25}


def test_names_are_parsed_for_every_writer(tmp_path: Path, make_traj: MakeTraj) -> None:
    assert format_name("a_b/c d", **NAMED) == "a-b-c-d_0123abcd_1700000000.250000.npz"
    for name, expected in {
        "a-b_0123abcd_1700000000.250000.npz": ("a-b", "0123abcd", 1.7e9 + 0.25),
        "Cart_Pole_9f86d081_1700000000.npz": ("Cart_Pole", "9f86d081", 1.7e9),
        "CartPole_9f86d081_1700000000.123.npz": ("CartPole", "9f86d081", 1700000000.123),
        "CartPole_9f86d081_1700000000.123.traj": None,  # AMAGO pickles these
        "notes.txt": None,
        "a_b_c.npz": None,
        "env_0123abcd_17.0.npz.tmp": None,
        "_0123abcd_17.0.npz": None,
    }.items():
        assert parse_name(name) == expected, name
    path = save_trajectory(tmp_path, make_traj(1, env_name="x" * 400), save_as="npz", **NAMED)
    assert parse_name(path.name) is not None  # the name is short enough for file systems
    with pytest.raises(ValueError, match=r"'numpy'.*allowed are 'npz', 'npz-compressed'.*Fix:"):
        save_trajectory(tmp_path, make_traj(3), save_as="numpy", **NAMED)


@pytest.mark.parametrize(
    ("owner", "broken_call", "save_as"),
    [
        (files_module, "pack_npz", "npz-compressed"),
        (files_module, "open", "npz"),
        (os, "replace", "npz"),
    ],
)
def test_a_failed_write_leaves_nothing_and_a_file_gets_its_name_only_when_complete(
    tmp_path: Path,
    make_traj: MakeTraj,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    broken_call: str,
    save_as: str,
) -> None:
    seen: list[str] = []

    def disk_full(*_: Any, **__: Any) -> None:
        seen.extend(entry.name for entry in tmp_path.iterdir())
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(owner, broken_call, disk_full, raising=False)
        with pytest.raises(OSError, match="No space left"):
            save_trajectory(tmp_path, make_traj(3), save_as=save_as, **NAMED)
    assert list(tmp_path.iterdir()) == []
    path = save_trajectory(tmp_path, make_traj(3), save_as=save_as, **NAMED)
    assert list(tmp_path.iterdir()) == [path]
    assert seen == ([path.name + ".tmp"] if broken_call == "replace" else [])


# --- the cache of opened files -------------------------------------------------------------------------


@pytest.mark.parametrize("save_as", FILE_FORMATS)
def test_large_files_stay_open_and_loaded_files_survive_their_deletion(
    tmp_path: Path, make_traj: MakeTraj, save_as: str
) -> None:
    for length in (30_000, 30):
        reader = TrajectoryReader()
        path = save_trajectory(tmp_path, make_traj(length), save_as=save_as, **NAMED)
        traj = reader.load(str(path))
        is_open = length == 30_000 and save_as != "npz-compressed"
        assert len(reader._in_files) == is_open
        num_bytes = 32 if is_open else 40  # bytes per timestep, without or with observations
        assert reader.ram_bytes == pytest.approx(4096 + length * num_bytes, abs=100)
        path.unlink()
        assert reader.load(str(path)) is traj
        assert traj.slice(length - 1, length).obs["position"][:, 0].tolist() == [length - 1, length]
        reader.forget([str(path), "never opened"])
        assert reader.ram_bytes == 0
        with pytest.raises(FileNotFoundError):
            reader.load(str(path))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors where Linux lists them")
@pytest.mark.parametrize("save_as", ["npz", "npz-compressed"])
def test_hundreds_of_files_keep_few_descriptors_and_little_memory(
    tmp_path: Path, make_traj: MakeTraj, save_as: str
) -> None:
    """Twelve real files under many names; files that are read at once and files that stay open are mixed."""
    templates = [
        save_trajectory(tmp_path, make_traj(length), save_as=save_as, traj_id=f"{length:08x}", unix_time=1e9)
        for length in (*range(1, 11), 20_000, 25_000)
    ]
    paths = []
    for i in range(600):
        paths.append(f"{tmp_path}/env_{i:08x}_17.0.npz")
        os.link(templates[i % len(templates)], paths[-1])
    reader = TrajectoryReader(max_ram_bytes=1 << 20, max_open_files=8)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for path in paths:
        assert len(reader.load(path).slice(0, 1)) == 1
        assert reader.ram_bytes <= 1 << 20
        assert len(reader._in_files) <= 8
    assert len(os.listdir("/proc/self/fd")) <= before + 8  # noqa: PTH208
    assert 0 < len(reader._opened) < 300


def test_the_cache_drops_open_files_before_small_ones(tmp_path: Path, make_traj: MakeTraj) -> None:
    paths = [
        str(save_trajectory(tmp_path, make_traj(length), save_as="npz", traj_id=f"{i:08x}", unix_time=1e9))
        for i, length in enumerate((10, 20_000, 20_000, 20_000))
    ]
    reader = TrajectoryReader(max_open_files=1)
    small, first = reader.load(paths[0]), reader.load(paths[1])
    reader.load(paths[2])
    recent = reader.load(paths[3])
    assert reader.load(paths[3]) is recent
    assert reader.load(paths[0]) is small  # open files do not evict small ones
    assert reader.load(paths[1]) is not first
    tiny = TrajectoryReader(max_ram_bytes=1000)  # a file larger than the cache is returned but not kept
    traj = tiny.load(paths[0])
    assert tiny.ram_bytes == 0
    np.testing.assert_array_equal(traj.slice(5, 9).rl2s, load_trajectory(paths[0]).rl2s[5:10])
