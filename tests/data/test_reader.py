from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loxodon.data import FILE_FORMATS, Trajectory, TrajectoryReader, load_trajectory, save_trajectory

MakeTraj = Callable[..., Trajectory]
NAMED: dict[str, Any] = {"traj_id": "0123abcd", "unix_time": 1_700_000_000.25}


def test_reader_reads_a_file_once(tmp_path: Path, make_traj: MakeTraj) -> None:
    path = str(save_trajectory(tmp_path, make_traj(3), save_as="npz", **NAMED))
    reader = TrajectoryReader()
    assert reader.load(path) is reader.load(path)
    reader.forget([path, "never opened"])
    assert reader.ram_bytes == 0
    Path(path).unlink()
    with pytest.raises(FileNotFoundError):
        reader.load(path)


def test_reader_stays_within_its_bounds(tmp_path: Path, make_traj: MakeTraj) -> None:
    def write(length: int, i: int) -> str:
        return str(
            save_trajectory(tmp_path, make_traj(length), save_as="npz", traj_id=f"{i:08x}", unix_time=1e9)
        )

    small, large = [write(50, i) for i in range(6)], [write(30_000, i) for i in range(10, 14)]
    size = Path(small[0]).stat().st_size + 4096
    reader = TrajectoryReader(max_ram_bytes=3 * size + 3 * 4096, max_open_maps=2)
    for path in (*small, *large, small[-1]):
        reader.load(path)
        assert reader.num_maps <= 2
        assert reader.ram_bytes <= 3 * size + 3 * 4096
    recent = reader.load(large[-1])
    assert reader.load(large[-1]) is recent
    assert reader.num_maps == 2


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors where Linux lists them")
@pytest.mark.parametrize("save_as", FILE_FORMATS)
def test_thousands_of_files_keep_few_descriptors_and_little_memory(
    tmp_path: Path, make_traj: MakeTraj, save_as: str
) -> None:
    """Twelve real files under three thousand names, small and mapped ones mixed."""
    templates = [
        save_trajectory(tmp_path, make_traj(length), save_as=save_as, traj_id=f"{length:08x}", unix_time=1e9)
        for length in (*range(1, 11), 3000, 4000)
    ]
    paths = []
    for i in range(3000):
        paths.append(f"{tmp_path}/env_{i:08x}_17.0.{save_as.split('-', maxsplit=1)[0]}")
        os.link(templates[i % len(templates)], paths[-1])
    reader = TrajectoryReader(max_ram_bytes=1 << 20, max_open_maps=8)
    before = num_descriptors()
    for path in paths:
        assert len(reader.load(path).slice(0, 1)) == 1
        assert reader.ram_bytes <= 1 << 20
        assert reader.num_maps <= 8
    assert num_descriptors() <= before + 8
    assert 0 < len(reader) < 300


def test_one_file_larger_than_the_cache_is_served_and_not_kept(tmp_path: Path, make_traj: MakeTraj) -> None:
    path = save_trajectory(tmp_path, make_traj(2000), save_as="npz", **NAMED)
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
    reader.load(paths[3])
    assert reader.load(paths[0]) is small
    assert reader.load(paths[1]) is not first
