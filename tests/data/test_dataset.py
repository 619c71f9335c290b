"""The folder of files: its place, what is deleted, set aside or ignored; memory use and killed writers."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import pickle
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loxodon.data import (
    DiskTrajDataset,
    DoNothingDataset,
    MixtureOfDatasets,
    PrioritySampler,
    TrajectoryWriter,
)

Fill = Callable[[Path, list[int]], list[Path]]
MakeDataset = Callable[..., DiskTrajDataset]
ROOT = Path(__file__).resolve().parents[2]


def listed(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"mode": "rigth"}, r"padded_sampling is 'rigth'.*Fix: set .* = 'right'"),
        ({"max_seq_len": 0}, r"max_seq_len is 0.*Fix:"),
        ({"dset_min_size": 5, "dset_max_size": 4}, r"dset_max_size is 4, but .*at least 5.*Fix:"),
        ({"sample_by": "timesteps"}, r"sample_by is 'timesteps'.*= 'timestep'"),
        ({"dset_max_bytes": 0}, r"dset_max_bytes is 0.*Fix:"),
        ({"dset_max_timesteps": -1}, r"dset_max_timesteps is -1.*Fix:"),
    ],
)
def test_impossible_settings_are_refused(
    make_dataset: MakeDataset, kwargs: dict[str, object], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        make_dataset(**kwargs)


def test_the_folder_is_where_the_user_or_the_run_puts_it(tmp_path: Path, make_dataset: MakeDataset) -> None:
    with pytest.raises(ValueError, match=r"Fix: call configure"):
        DiskTrajDataset().refresh()
    dataset = make_dataset()
    assert dataset.save_new_trajs_to == tmp_path / "set" / "buffer" / "fifo"
    with pytest.raises(ValueError, match=r"set/buffer holds no trajectories.*Fix: collect first"):
        dataset.sample_random_trajectory(np.random.default_rng(0))
    named = make_dataset(dset_root=str(tmp_path / "r"), dset_name="n")
    assert named.save_new_trajs_to == tmp_path / "r" / "n" / "buffer" / "fifo"
    assert (tmp_path / "r" / "n" / "buffer" / "protected").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"cannot be created.*Fix: set DiskTrajDataset.dset_root"):
        make_dataset(dset_root=str(tmp_path / "file"))


def test_a_dataset_becomes_ready_at_its_minimum(make_dataset: MakeDataset, fill: Fill, fifo: Path) -> None:
    dataset = make_dataset(dset_min_size=3)
    fill(fifo, [2, 2])
    dataset.refresh()
    assert not dataset.ready_for_training
    fill(fifo.with_name("protected"), [2])
    dataset.refresh()
    assert dataset.ready_for_training
    assert dataset.num_files == 3
    assert dataset.newest_time_s == 1e9 + 1  # the newest collected file


def test_the_oldest_by_name_are_deleted_first_and_protected_files_never(
    make_dataset: MakeDataset, fill: Fill, fifo: Path
) -> None:
    dataset = make_dataset(dset_max_size=2)
    paths, protected = fill(fifo, [2] * 5), fill(fifo.with_name("protected"), [2] * 4)
    os.utime(paths[0])  # new on disk, but old by name
    metrics = dataset.on_end_of_collection()
    assert listed(fifo) == paths[3:]
    assert listed(fifo.with_name("protected")) == protected
    sizes = sum(path.stat().st_size for path in (*paths[3:], *protected))
    assert metrics == {
        "fifo_files": 2,
        "protected_files": 4,
        "total_files": 6,
        "deleted_files": 3,
        "disk_gb": pytest.approx(sizes / 1e9),
        "broken_files": 0,
        "quarantined_files": 0,
    }
    fill(fifo, [2] * 2)  # the oldest are written last
    assert dataset.on_end_of_collection()["deleted_files"] == 2
    assert listed(fifo) == paths[3:]
    dataset.delete()
    assert listed(fifo) == []
    assert dataset.num_files == 4


@pytest.mark.parametrize(
    ("limits", "num_kept"),
    [
        ({"dset_max_timesteps": 25}, 3),  # file lengths are 10, 10, 10, 4, 10
        ({"dset_max_bytes": 1}, 1),
        ({"dset_max_bytes": 1, "dset_max_timesteps": 1, "dset_min_size": 2}, 2),  # training needs two files
    ],
)
def test_timesteps_and_bytes_are_limited(
    make_dataset: MakeDataset, fill: Fill, fifo: Path, limits: dict[str, int], num_kept: int
) -> None:
    paths = fill(fifo, [10, 10, 10, 4, 10])
    dataset = make_dataset(**limits)
    fill(fifo.with_name("protected"), [100])
    assert dataset.on_end_of_collection()["deleted_files"] == 5 - num_kept
    assert listed(fifo) == paths[5 - num_kept :]
    assert dataset.ready_for_training
    fill(fifo.with_name("more"), [9] * 6)[5].rename(fifo / "env_00000005_1000000009.0.npz")
    assert dataset.on_end_of_collection()["deleted_files"] == 1


def test_without_edit_rights_nothing_is_touched(make_dataset: MakeDataset, fill: Fill, fifo: Path) -> None:
    dataset = make_dataset(dset_max_size=2, edit=False)
    fill(fifo, [2] * 5)
    assert dataset.on_end_of_collection()["total_files"] == 5
    with pytest.raises(ValueError, match=r"no edit rights.*deleting.*Fix:"):
        dataset.delete()
    with pytest.raises(ValueError, match=r"no edit rights.*aside.*Fix:"):
        dataset.set_aside_newer(dataset.state_dict())


@pytest.mark.parametrize(
    "limits", [{"dset_max_size": 3}, {"dset_max_timesteps": 9}, {"dset_max_bytes": 5_000}]
)
def test_a_named_folder_beyond_the_limits_is_refused_and_not_emptied(
    make_dataset: MakeDataset, fill: Fill, fifo: Path, limits: dict[str, int]
) -> None:
    paths = fill(fifo, [2] * 6)
    dataset = make_dataset(dset_name="set", **limits)
    fill(fifo, [2] * 7)  # one more is collected
    text = r"set/buffer/fifo already holds \d trajectories.*dset_max_.*= \d.*Fix: .*takes_new_trajs = False"
    for call in (dataset.on_run_start, dataset.on_end_of_collection):
        with pytest.raises(ValueError, match=text):
            call()
    dataset.close()
    make_dataset(MixtureOfDatasets([DiskTrajDataset(dset_name="set", takes_new_trajs=False)], [1.0])).close()
    with pytest.raises(ValueError, match=text):
        make_dataset(MixtureOfDatasets([DiskTrajDataset(dset_name="set", **limits)], [1.0])).on_run_start()
    assert set(paths) <= set(listed(fifo))


@pytest.mark.parametrize("edit", [True, False])
def test_read_only_data_are_neither_deleted_nor_moved(
    make_dataset: MakeDataset, fill: Fill, fifo: Path, edit: bool
) -> None:
    fill(fifo, [2] * 30)
    (fifo / "env_0123abcd_1700000000.0.npz").write_bytes(b"not a trajectory")
    stale = fifo / "env_0123abce_1700000000.0.npz.tmp"
    stale.touch()
    os.utime(stale, (0, 0))
    before = sorted(fifo.parent.rglob("*"))
    dataset = make_dataset(dset_max_size=2, takes_new_trajs=False, edit=edit)
    empty = {"newest": None, "num_fifo_files": 0}
    dataset.sample_windows(100, np.random.default_rng(0))
    dataset.on_run_start()
    metrics = dataset.on_end_of_collection()
    assert (metrics["deleted_files"], metrics["broken_files"]) == (0, 1)
    assert dataset.set_aside_newer(empty) == dataset.begin_new_run() == 0
    dataset.delete()
    dataset.close()
    assert sorted(fifo.parent.rglob("*")) == before


def test_only_what_the_run_collected_is_deleted_from_a_named_folder(
    make_dataset: MakeDataset, fill: Fill, fifo: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = fill(fifo, [2] * 2)
    dataset = make_dataset(dset_name="set")
    dataset.on_run_start()
    assert "already holds 2 trajectories" in caplog.text
    fill(fifo, [2] * 4)
    dataset.refresh()
    state = json.loads(json.dumps(dataset.state_dict()))
    dataset.close()
    resumed = make_dataset(dset_name="set")
    resumed.load_state_dict(state)
    resumed.delete()
    assert listed(fifo) == paths


@pytest.mark.parametrize("change", ["none", "limit", "folder", "only read before", "many files put there"])
def test_a_resumed_run_may_trim_its_own_files_and_no_others(
    make_dataset: MakeDataset, fill: Fill, fifo: Path, change: str
) -> None:
    """A run is killed after collecting, so its own named folder exceeds the limit."""
    dataset = make_dataset(dset_name="set", dset_max_size=4, takes_new_trajs=change != "only read before")
    fill(fifo, [2] * 9)
    dataset.refresh()
    state = json.loads(json.dumps(dataset.state_dict()))
    dataset.close()
    if change == "many files put there":
        for path in fill(fifo.with_name("more"), [2] * 5):
            path.rename(fifo / path.name.replace("_0000", "_ffff").replace("_1", "_0"))
    name = "set"
    if change == "folder":
        name = "other"
        fifo.parent.parent.rename(fifo.parent.parent.with_name(name))
    resumed = make_dataset(dset_name=name, dset_max_size=3 if change == "limit" else 4)
    if change == "folder":  # no file is newer or older than those of the state
        assert resumed.set_aside_newer({**state, "newest": None}) == 0
    resumed.load_state_dict(state)
    if change == "none":
        resumed.on_run_start()
        assert resumed.on_end_of_collection()["fifo_files"] == 4
    else:
        with pytest.raises(ValueError, match=r"already holds"):
            resumed.on_run_start()


@pytest.fixture
def read_only(fill: Fill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A buffer of 30 good files and a broken one; nothing can be created or written inside."""
    buffer, open_file, make, may = tmp_path / "set/buffer", os.open, Path.mkdir, os.access

    def refuse(path: Any, is_writing: object) -> None:
        if is_writing and str(path).startswith(str(buffer)):
            raise OSError(errno.EROFS, "Read-only file system", str(path))

    def open_to_read(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        refuse(path, flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT))
        return open_file(path, flags, *args, **kwargs)

    def make_elsewhere(path: Path, *args: Any, **kwargs: Any) -> None:
        refuse(path, not path.is_dir())
        make(path, *args, **kwargs)

    def may_read(path: Any, mode: int) -> bool:
        return may(path, mode) and not (mode & os.W_OK and str(path).startswith(str(buffer)))

    fill(buffer / "protected", [2] * 30)
    (buffer / "protected/env_0123abcd_1700000000.0.npz").touch()
    monkeypatch.setattr(os, "open", open_to_read)
    monkeypatch.setattr(Path, "mkdir", make_elsewhere)
    monkeypatch.setattr(os, "access", may_read)
    return buffer


@pytest.mark.parametrize("takes_new_trajs", [True, False])
@pytest.mark.parametrize("edit", [True, False])
def test_data_on_a_read_only_file_system_can_be_used(
    make_dataset: MakeDataset,
    read_only: Path,
    caplog: pytest.LogCaptureFixture,
    takes_new_trajs: bool,
    edit: bool,
) -> None:
    dataset = make_dataset(takes_new_trajs=takes_new_trajs, edit=edit, dset_max_size=2)
    dataset.on_run_start()
    assert len(dataset.sample_windows(100, np.random.default_rng(0))) == 100
    for _ in range(2):
        assert dataset.on_end_of_collection()["total_files"] == 30
    if edit or not takes_new_trajs:  # a resumed run calls this
        assert dataset.set_aside_newer({"newest": None, "num_fifo_files": 0}) == 0
    assert caplog.text.count("cannot be written to") == (edit and takes_new_trajs)
    assert [path.name for path in read_only.iterdir()] == ["protected"]
    if takes_new_trajs:
        with pytest.raises(PermissionError, match=r"cannot be written to .*set/buffer/fifo.*Fix:"):
            TrajectoryWriter(read_only / "fifo", 1)


def test_temporary_files_of_other_programs_stay(make_dataset: MakeDataset, fifo: Path) -> None:
    dataset = make_dataset()
    (fifo / "notes.tmp").touch()
    os.utime(fifo / "notes.tmp", (0, 0))
    dataset.on_end_of_collection()
    assert (fifo / "notes.tmp").exists()


def test_temporary_and_foreign_files_are_ignored(
    make_dataset: MakeDataset, fill: Fill, fifo: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = make_dataset()
    fill(fifo, [2])
    old, young = fifo / "env_0123abcd_1700000000.0.npz.tmp", fifo / "env_0123abce_1700000000.0.npz.tmp"
    old.write_bytes(b"half")
    young.touch()
    os.utime(old, (time.time() - 4000, time.time() - 4000))
    dataset.on_end_of_collection()
    # temporary files of killed writers are deleted after an hour
    assert (old.exists(), young.exists()) == (False, True)
    assert not caplog.records
    for name in ("notes.txt", "odd.npz"):
        (fifo / name).write_bytes(b"not mine")
    with caplog.at_level(logging.WARNING, logger="loxodon"):
        dataset.refresh()
        dataset.refresh()
    assert dataset.num_files == 1
    assert len(caplog.records) == 1
    assert "Fix: rename it" in caplog.text


@pytest.mark.parametrize("is_opened", [True, False])
def test_a_vanished_file_is_replaced_by_another_draw(
    make_dataset: MakeDataset, fill: Fill, fifo: Path, is_opened: bool
) -> None:
    dataset, rng = make_dataset(sample_by="trajectory"), np.random.default_rng(0)  # opens no file in advance
    paths = fill(fifo, [2, 2])
    dataset.refresh()
    if is_opened:
        dataset.sample_windows(20, rng)
    paths[0].unlink()
    if is_opened:  # an opened file is released when the folder is listed again
        dataset.refresh()
    assert {float(window.obs["position"][0, 0]) for window in dataset.sample_windows(20, rng)} == {1000}
    assert dataset.num_files == 1


def test_newer_files_of_a_shared_folder_are_not_moved_in_silence(
    make_dataset: MakeDataset, fill: Fill, fifo: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = make_dataset(dset_name="set")
    fill(fifo, [2] * 3)
    dataset.refresh()
    state = dataset.state_dict()
    fill(fifo, [2] * 5)
    assert dataset.set_aside_newer(state) == 2
    assert "2 trajectories that are newer than the checkpoint were moved to " in caplog.text
    assert "Fix: if other runs store theirs in this folder too, move the files back" in caplog.text


def test_newer_files_are_set_aside_and_lost_ones_reported(
    make_dataset: MakeDataset, fill: Fill, fifo: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = make_dataset()
    empty = dataset.state_dict()
    paths = fill(fifo, [2] * 3)
    fill(fifo.with_name("protected"), [2] * 5)
    dataset.refresh()
    state = json.loads(json.dumps(dataset.state_dict()))
    fill(fifo, [2] * 5)
    assert dataset.set_aside_newer(state) == 2
    assert listed(fifo) == paths
    assert len(listed(fifo.with_name("superseded"))) == 2
    assert dataset.num_files == 8
    assert dataset.state_dict() == state
    assert not caplog.records
    paths[0].unlink()
    with caplog.at_level(logging.WARNING, logger="loxodon"):
        dataset.load_state_dict(state)
        dataset.set_aside_newer(state)
    assert "1 trajectories that the checkpoint was trained on" in caplog.text
    assert dataset.set_aside_newer(empty) == 2
    assert listed(fifo) == []


@pytest.mark.parametrize(("name", "num_hidden"), [(None, 2), ("demos", 0)])
def test_a_new_run_hides_old_data_in_its_own_folder_but_not_a_chosen_dataset(
    make_dataset: MakeDataset, fill: Fill, tmp_path: Path, name: str | None, num_hidden: int
) -> None:
    dataset = make_dataset(dset_name=name)
    fill(tmp_path / (name or "set") / "buffer/fifo", [2] * 2)
    fill(tmp_path / (name or "set") / "buffer/protected", [2])
    assert dataset.begin_new_run() == num_hidden
    dataset.refresh()
    assert dataset.num_files == 3 - num_hidden


def test_a_dataset_is_pickled_without_its_open_files(
    make_dataset: MakeDataset, fill: Fill, fifo: Path
) -> None:
    fill(fifo, [30_000] * 2)  # large files stay open
    dataset = make_dataset()
    here = dataset.sample_random_trajectory(np.random.default_rng(3))
    there = pickle.loads(pickle.dumps(dataset)).sample_random_trajectory(np.random.default_rng(3))
    np.testing.assert_array_equal(here.time_idxs, there.time_idxs)


def test_the_dataset_that_does_nothing() -> None:
    dataset = DoNothingDataset()
    assert not dataset.ready_for_training
    assert dataset.save_new_trajs_to is None
    assert dataset.on_end_of_collection() == dataset.metrics() == {}
    assert dataset.set_aside_newer({}) == dataset.begin_new_run() == 0
    with pytest.raises(ValueError, match=r"holds no trajectories.*Fix:"):
        dataset.sample_random_trajectory(np.random.default_rng(0))


@pytest.mark.slow
def test_memory_use_stays_constant(make_dataset: MakeDataset, fill: Fill, fifo: Path) -> None:
    """Files come and are deleted for 60 epochs; one array or a few paths per epoch would be too much."""
    data = fill(fifo, [40] * 30)[0].read_bytes()
    rng, used = np.random.default_rng(0), []
    tracemalloc.start()
    try:
        sampler = PrioritySampler()
        sampler.sample_by = "timestep"
        dataset = make_dataset(dset_max_size=30, sampler=sampler)
        for epoch in range(60):
            for i in range(10):
                (fifo / f"env_{10 * epoch + i:08x}_{2e9 + epoch + i / 100:.6f}.npz").write_bytes(data)
            assert dataset.on_end_of_collection()["fifo_files"] == 30
            dataset.refresh()
            dataset.sample_windows(60, rng)
            if epoch in (10, 59):
                gc.collect()
                snapshot = tracemalloc.take_snapshot()  # pathlib interns names in a table of the interpreter
                snapshot = snapshot.filter_traces([tracemalloc.Filter(False, "*pathlib.py")])
                used.append(sum(trace.size for trace in snapshot.traces))
    finally:
        tracemalloc.stop()
    assert used[1] < 1.05 * used[0] + 40_000  # the allowance covers numpy's cache of small arrays


@pytest.mark.slow
def test_killed_writers_leave_no_partial_files(tmp_path: Path) -> None:
    """Three rounds of the benchmark; they alternate between the file formats."""
    command = [sys.executable, str(ROOT / "benchmarks" / "data_chaos.py"), "--rounds", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["faults"] == []
    assert result["rounds"] == 3
    assert result["broken_files"] == 0
    assert min(result["windows"], result["finished_files"], result["reported_files"]) > 0
