from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from loxodon.data import DiskTrajDataset
from loxodon.data.buffer import Buffer

Fill = Callable[[Path, list[int]], list[Path]]
MakeDataset = Callable[..., DiskTrajDataset]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    return tmp_path / "set/buffer/fifo"


def test_timesteps_are_limited(make_dataset: MakeDataset, fill: Fill, fifo: Path) -> None:
    dataset = make_dataset(dset_max_timesteps=25)
    paths = fill(fifo, [10, 10, 10, 4, 10])
    fill(fifo.with_name("protected"), [100])
    assert dataset.on_end_of_collection()["deleted_files"] == 2
    assert sorted(fifo.iterdir()) == paths[2:]
    assert dataset.on_end_of_collection()["deleted_files"] == 0
    fill(fifo.with_name("more"), [9] * 6)[5].rename(fifo / "env_00000005_1000000009.0.npz")
    assert dataset.on_end_of_collection()["deleted_files"] == 1
    assert not paths[2].exists()


def test_bytes_are_limited(make_dataset: MakeDataset, fill: Fill, fifo: Path) -> None:
    paths = fill(fifo, [10, 10, 10])
    size = paths[0].stat().st_size
    dataset = make_dataset(dset_max_bytes=2 * size)
    assert dataset.on_end_of_collection()["deleted_files"] == 1
    assert sorted(fifo.iterdir()) == paths[1:]


def test_limits_leave_what_training_needs(make_dataset: MakeDataset, fill: Fill, fifo: Path) -> None:
    paths = fill(fifo, [10] * 4)
    dataset = make_dataset(dset_max_bytes=1, dset_max_timesteps=1, dset_min_size=2)
    dataset.on_end_of_collection()
    assert sorted(fifo.iterdir()) == paths[2:]
    assert dataset.ready_for_training


def test_unchanged_folder_is_not_listed_again(
    fill: Fill, fifo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(fifo, [2] * 3)
    listed: list[str] = []
    listing = Buffer(fifo.parent, may_move=False, with_lengths=False, on_change=lambda gone: None)
    listdir = os.listdir

    def count(path: Path) -> list[str]:
        listed.append(path.name)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", count)
    listing.refresh()
    listing.refresh()  # the folder has only just changed: its time of change may be too coarse to trust
    assert listed.count("fifo") == 2
    os.utime(fifo, (time.time() - 10, time.time() - 10))
    listing.refresh()
    listing.refresh()
    assert listed.count("fifo") == 3
    fill(fifo, [2] * 4)
    listing.refresh()
    assert len(listing.files) == 4
    os.utime(fifo, (time.time() - 10, time.time() - 10))
    listing.refresh()
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 31)  # some file systems keep no time of change
    listing.refresh()
    assert listed.count("fifo") == 6


def test_order_stays_by_age_whatever_arrives_when(fill: Fill, tmp_path: Path) -> None:
    paths = fill(tmp_path / "all", [2] * 6)
    listing = Buffer(tmp_path / "buffer", may_move=False, with_lengths=False, on_change=lambda gone: None)
    for order in ([3], [5, 0], [1, 4, 2]):
        for i in order:
            paths[i].rename(listing.fifo.path / paths[i].name)
        before = listing.files
        listing.refresh()
        assert listing.files == sorted(listing.files)
        assert listing.files is not before
    assert [Path(file.path).name for file in listing.files] == [path.name for path in paths]


@pytest.mark.slow
def test_refreshing_a_large_folder_costs_little(make_dataset: MakeDataset, fill: Fill, fifo: Path) -> None:
    """20,000 files; ten times the measured time, so as to fail only if something runs over all files."""
    data = fill(fifo, [2])[0].read_bytes()
    for i in range(1, 20_000):
        (fifo / f"env_{i:08x}_{1e9 + i:.6f}.npz").write_bytes(data)
    dataset = make_dataset(dset_max_size=10**6)
    assert dataset.on_end_of_collection()["total_files"] == 20_000
    times_s = []
    for i in range(5):
        (fifo / f"env_{i:08x}_{2e9 + i:.6f}.npz").write_bytes(data)
        start_s = time.process_time()
        dataset.on_end_of_collection()
        dataset.refresh()
        times_s.append(time.process_time() - start_s)
    assert dataset.num_files == 20_005
    assert min(times_s) < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("kwargs", [{}, {"sample_by": "timestep", "priority_exponent": 1.0}])
def test_memory_stays_flat(
    make_dataset: MakeDataset, fill: Fill, fifo: Path, kwargs: dict[str, object]
) -> None:
    """200 epochs in which files come and go; an array or a few paths kept per epoch would be too much."""
    data = fill(fifo, [40] * 30)[0].read_bytes()
    rng, used = np.random.default_rng(0), []
    tracemalloc.start()
    try:
        dataset = make_dataset(dset_max_size=30, **kwargs)
        for epoch in range(200):
            for i in range(10):
                (fifo / f"env_{10 * epoch + i:08x}_{2e9 + epoch + i / 100:.6f}.npz").write_bytes(data)
            assert dataset.on_end_of_collection()["fifo_files"] == 30
            dataset.refresh()
            dataset.sample_windows(60, rng)
            if epoch in (10, 199):
                gc.collect()
                snapshot = tracemalloc.take_snapshot()  # pathlib interns names in a table of the interpreter
                snapshot = snapshot.filter_traces([tracemalloc.Filter(False, "*pathlib.py")])
                used.append(sum(trace.size for trace in snapshot.traces))
    finally:
        tracemalloc.stop()
    assert used[1] < 1.05 * used[0] + 64_000  # what numpy keeps for small arrays fills up within that


@pytest.mark.slow
def test_killed_writers_leave_nothing_half(tmp_path: Path) -> None:
    """Three rounds of the benchmark, one for each file format."""
    command = [sys.executable, str(ROOT / "benchmarks" / "data_chaos.py"), "--rounds", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["faults"] == []
    assert result["rounds"] == 3
    assert result["broken_files"] == 0
    assert min(result["windows"], result["finished_files"], result["reported_files"]) > 0
