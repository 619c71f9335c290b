from __future__ import annotations

import multiprocessing
import os
import re
import socket
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from loxodon.data import BrokenTrajectoryError, DiskTrajDataset, Layout, Trajectory, save_trajectory
from loxodon.data.buffer import Quarantine
from loxodon.data.files import check_file

Fill = Callable[[Path, list[int]], list[Path]]
MakeDataset = Callable[..., DiskTrajDataset]
MakeTraj = Callable[..., Trajectory]
NAME = "env_ffffffff_1800000000.000000.npz"


@pytest.fixture
def buffer(tmp_path: Path) -> Path:
    return tmp_path / "set/buffer"


def spoil(path: Path, how: str, good: Path, make_traj: MakeTraj) -> None:
    """Make a file that bears the name of a trajectory and is none that can be used."""
    if how == "truncated":
        path.write_bytes(good.read_bytes()[:-200])
    elif how == "empty":
        path.touch()
    elif how == "foreign":
        path.write_bytes(b"\x89PNG, not an archive" * 100)
    elif how == "another archive":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("readme.txt", "hello")
    elif how == "wrong shape":
        np.savez(path, **{**np.load(good), "rews": np.zeros((1, 1), np.float32)})
    elif how == "wrong space":
        traj = make_traj(5, num_actions=9)
        save_trajectory(path.parent, traj, save_as="npz", traj_id="ffffffff", unix_time=1.8e9)
    elif how == "folder":
        path.mkdir()
    elif how == "pipe":  # which nobody writes to, so that opening it would wait for ever
        os.mkfifo(path)
    elif how == "bomb":
        bomb(path, good)


def bomb(path: Path, good: Path) -> None:
    """A small file that announces 80 MB, which no trajectory of this length needs."""
    np.savez_compressed(path, **{**np.load(good), "rews": np.zeros((20_000_000, 1), np.float32)})
    assert path.stat().st_size < 200_000


@pytest.mark.parametrize(
    "how",
    [
        *("truncated", "empty", "foreign", "another archive", "wrong shape", "wrong space", "folder"),
        *("pipe", "bomb"),
    ],
)
@pytest.mark.parametrize(("sample_by", "is_early"), [("trajectory", False), ("timestep", True)])
def test_unusable_files_are_moved_and_training_goes_on(
    make_dataset: MakeDataset,
    make_traj: MakeTraj,
    fill: Fill,
    buffer: Path,
    how: str,
    sample_by: str,
    is_early: bool,
) -> None:
    good = fill(buffer / "fifo", [5] * 8)
    spoil(buffer / "fifo" / NAME, how, good[0], make_traj)
    dataset = DiskTrajDataset(sample_by=sample_by)
    if is_early:  # the spaces may be known before the folder is
        dataset.expect(make_traj(1).layout)
    dataset = make_dataset(dataset)
    if not is_early:
        dataset.expect(make_traj(1).layout)
    windows = dataset.sample_windows(200, np.random.default_rng(0))
    assert len(windows) == 200
    assert sorted(buffer.glob("fifo/*")) == sorted(good)
    assert (buffer / "quarantine" / NAME).exists()
    note = (buffer / "quarantine" / f"{NAME}.txt").read_text(encoding="utf-8")
    assert NAME in note
    assert "Fix:" in note
    assert "moved from" in note
    metrics = dataset.on_end_of_collection()
    assert (metrics["broken_files"], metrics["quarantined_files"], metrics["total_files"]) == (1, 1, 8)
    assert metrics == {**metrics, **dataset.metrics()}


def test_what_is_no_file_of_numbers_is_told_without_memory_or_waiting(
    tmp_path: Path, fill: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    (good,) = fill(tmp_path, [5])
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket.npz")
        os.mkfifo("pipe.npz")
        Path("device.npz").symlink_to("/dev/zero")
        for name in ("socket.npz", "pipe.npz", "device.npz"):
            with pytest.raises(BrokenTrajectoryError, match=r"it is no regular file, but a pipe.*Fix:"):
                check_file(name)
    bomb(tmp_path / NAME, good)
    tracemalloc.start()
    with pytest.raises(BrokenTrajectoryError, match=r"rews has 20,000,000 rows, but time_idxs has 6.*Fix:"):
        check_file(tmp_path / NAME)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 4 << 20


def test_damage_inside_a_compressed_file_shows_when_it_is_read(
    make_dataset: MakeDataset, make_traj: MakeTraj, fill: Fill, buffer: Path
) -> None:
    good = fill(buffer / "fifo", [5] * 4)
    traj = make_traj(40_000)
    noise = np.random.default_rng(0).integers(0, 256, (40_001, 2, 2), np.uint8)
    traj = Trajectory(**{**traj.__dict__, "obs": {**traj.obs, "image": noise}})
    path = save_trajectory(
        buffer / "fifo", traj, save_as="npz-compressed", traj_id="ffffffff", unix_time=1.8e9
    )
    data = bytearray(path.read_bytes())
    data[len(data) // 4 : 3 * len(data) // 4] = b"\0" * (3 * len(data) // 4 - len(data) // 4)
    path.write_bytes(data)
    dataset = make_dataset()
    windows = dataset.sample_windows(300, np.random.default_rng(0))
    assert sorted(buffer.glob("fifo/*")) == sorted(good)
    assert dataset.metrics()["quarantined_files"] == 1
    assert len(windows) == 300


def test_layout_is_checked_for_files_opened_before_it_was_known(
    make_dataset: MakeDataset, make_traj: MakeTraj, fill: Fill, buffer: Path
) -> None:
    fill(buffer / "fifo", [5] * 3)
    dataset, rng = make_dataset(), np.random.default_rng(0)
    dataset.sample_windows(50, rng)
    layout = make_traj(1).layout
    dataset.expect(Layout({**layout.obs, "extra": ((2,), np.dtype(np.float32))}, layout.action_width))
    with pytest.raises(ValueError, match=r"2 of 3 trajectory files in .*buffer are broken.*'extra'.*Fix:"):
        dataset.sample_windows(50, rng)


def test_without_edit_rights_broken_files_stay_and_are_counted(
    make_dataset: MakeDataset, fill: Fill, buffer: Path
) -> None:
    fill(buffer / "fifo", [5] * 8)
    (buffer / "fifo" / NAME).touch()
    dataset = make_dataset(edit=False)
    for _ in range(3):
        dataset.sample_windows(50, np.random.default_rng(0))
        metrics = dataset.on_end_of_collection()
    assert (buffer / "fifo" / NAME).exists()
    assert not (buffer / "quarantine").exists()
    assert (metrics["broken_files"], metrics["quarantined_files"], metrics["total_files"]) == (1, 0, 8)


def test_many_broken_files_stop_the_run(make_dataset: MakeDataset, fill: Fill, buffer: Path) -> None:
    fill(buffer / "fifo", [5] * 39)
    dataset = make_dataset()
    for i in range(3):
        (buffer / "protected" / f"env_{i:08x}_1800000000.0.npz").write_bytes(b"not a trajectory")
    dataset.refresh()
    with pytest.raises(
        ValueError, match=r"3 of 42 trajectory files in .*set/buffer are broken.*not a readable.*Fix: read"
    ):
        dataset.sample_windows(1000, np.random.default_rng(0))
    assert len(list((buffer / "quarantine").iterdir())) == 6  # moved, not deleted


def test_broken_files_up_to_a_twentieth_are_borne(
    make_dataset: MakeDataset, fill: Fill, buffer: Path
) -> None:
    fill(buffer / "fifo", [5] * 38)
    dataset = make_dataset()
    for i in range(2):
        (buffer / "protected" / f"env_{i:08x}_1800000000.0.npz").touch()
    dataset.refresh()
    dataset.sample_windows(1000, np.random.default_rng(0))
    assert dataset.metrics()["broken_files"] == 2


def test_what_other_processes_find_counts_too(make_dataset: MakeDataset, fill: Fill, buffer: Path) -> None:
    fill(buffer / "fifo", [5] * 4)
    (buffer / "quarantine").mkdir()
    (buffer / "quarantine" / "env_0_1.0.npz").touch()  # of an earlier run
    dataset = make_dataset()
    assert dataset.on_end_of_collection()["broken_files"] == 0
    for name in ("env_1_1.0.npz", "env_2_1.0.npz"):
        (buffer / "quarantine" / name).touch()
        (buffer / "quarantine" / f"{name}.txt").write_text("It is cut off.\n")
    with pytest.raises(ValueError, match=r"2 of 4 .* The last reason: It is cut off\."):
        dataset.on_end_of_collection()


def test_equal_names_do_not_overwrite_each_other(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path, may_move=True)
    for content in ("a", "b", "c"):
        (tmp_path / NAME).write_text(content)
        quarantine.put(tmp_path / NAME, "It is broken.")
    moved = [path for path in (tmp_path / "quarantine").iterdir() if path.suffix != ".txt"]
    assert sorted(path.read_text() for path in moved) == ["a", "b", "c"]
    assert quarantine.num_quarantined == 3


def _put_all(quarantine: Quarantine, paths: list[Path]) -> None:
    for path in paths:
        quarantine.put(path, "It is broken.")


@pytest.mark.slow
def test_processes_that_move_the_same_files_lose_none(tmp_path: Path) -> None:
    paths = [tmp_path / f"env_{i:08x}_1.0.npz" for i in range(200)]
    for path in paths:
        path.write_text(path.name)
    quarantine = Quarantine(tmp_path, may_move=True)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_put_all, args=(quarantine, paths)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    names = {path.name for path in (tmp_path / "quarantine").iterdir()}
    moved = {name for name in names if not name.endswith(".txt")}
    # Where several are at it, the winner may have taken `<name>.2` or `<name>.3`.
    assert sorted(re.sub(r"\.npz\.[23]$", ".npz", name) for name in moved) == [path.name for path in paths]
    assert names - moved == {f"{name}.txt" for name in moved}
    quarantine.refresh()
    assert quarantine.num_broken == 200


def test_file_that_cannot_be_moved_is_skipped(
    make_dataset: MakeDataset, fill: Fill, buffer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(buffer / "fifo", [5] * 4)
    (buffer / "fifo" / NAME).touch()
    (buffer / "quarantine").touch()  # where the folder should be
    dataset = make_dataset()
    dataset.sample_windows(100, np.random.default_rng(0))
    assert "cannot be moved" in caplog.text
    assert dataset.metrics()["broken_files"] == 1
    assert dataset.num_files == 4


def test_dangling_links_are_not_drawn_forever(make_dataset: MakeDataset, fill: Fill, buffer: Path) -> None:
    fill(buffer / "fifo", [5] * 2)
    (buffer / "fifo" / NAME).symlink_to(buffer / "nowhere")
    dataset = make_dataset()
    dataset.sample_windows(100, np.random.default_rng(0))
    assert dataset.num_files == 2
    assert dataset.metrics()["broken_files"] == 0


def test_deleting_and_setting_aside_leave_the_quarantine_alone(
    make_dataset: MakeDataset, fill: Fill, buffer: Path
) -> None:
    fill(buffer / "fifo", [5] * 4)
    (buffer / "fifo" / NAME).touch()
    dataset = make_dataset()
    dataset.sample_windows(100, np.random.default_rng(0))
    dataset.set_aside_newer({"newest": [1e9, "00000000"], "num_fifo_files": 1})
    dataset.delete()
    assert len(list((buffer / "quarantine").iterdir())) == 2
    assert not list((buffer / "fifo").iterdir())
