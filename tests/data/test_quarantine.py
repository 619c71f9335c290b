"""Unusable files are moved away with their reason and counted; they never end a run."""

from __future__ import annotations

import dataclasses
import errno
import multiprocessing
import os
import re
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loxodon.data import (
    BrokenTrajectoryError,
    DiskTrajDataset,
    Layout,
    Sampler,
    Trajectory,
    TrajectoryReader,
    check_file,
    load_trajectory,
    save_trajectory,
)
from loxodon.data.buffer import Quarantine
from loxodon.data.errors import FormatError

Fill = Callable[[Path, list[int]], list[Path]]
MakeDataset = Callable[..., DiskTrajDataset]
MakeTraj = Callable[..., Trajectory]
NAME = "env_ffffffff_1800000000.000000.npz"


@pytest.fixture
def buffer(tmp_path: Path) -> Path:
    return tmp_path / "set/buffer"


def other_archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")


def change(path: Path, good: Path, name: str, value: float, dtype: type | None = None) -> None:
    """Copy a good file with another value in row 3 of one of its arrays."""
    arrays = dict(np.load(good))
    arrays[name] = arrays[name].astype(dtype or arrays[name].dtype)
    arrays[name][3] = value
    np.savez(path, **arrays)


# Files that are named like trajectories but cannot be used, each made from a good one.
SPOILED: dict[str, Callable[[Path, Path], object]] = {
    "truncated": lambda path, good: path.write_bytes(good.read_bytes()[:-200]),
    "empty": lambda path, good: path.touch(),
    "another archive": lambda path, good: other_archive(path),
    "wrong shape": lambda path, good: np.savez(path, **{**np.load(good), "rews": np.zeros((1, 1))}),
    "wrong space": lambda path, good: np.savez(path, **{**np.load(good), "_OBS_KEY_more": np.zeros(6)}),
    "folder": lambda path, good: path.mkdir(),
    "pipe": lambda path, good: os.mkfifo(path),  # without a writer, opening it would block forever
    "link to itself": lambda path, good: path.symlink_to(path.name),
    "device": lambda path, good: path.symlink_to("/dev/zero"),
    "NaN observed": lambda path, good: change(path, good, "_OBS_KEY_position", np.nan),
    "infinite reward": lambda path, good: change(path, good, "rews", np.inf),
    "NaN seen before": lambda path, good: change(path, good, "rl2s", np.nan),
    "too large for float32": lambda path, good: change(path, good, "_OBS_KEY_position", 1e300, np.float64),
    "NaN action": lambda path, good: change(path, good, "actions", np.nan, np.float32),
    "two actions at once": lambda path, good: change(path, good, "actions", 1),
    "half a termination": lambda path, good: change(path, good, "dones", 0.5, np.float32),
}


@pytest.mark.parametrize(
    ("how", "is_early"), [*((how, False) for how in SPOILED), ("truncated", True), ("wrong space", True)]
)
def test_unusable_files_are_moved_and_training_continues(
    make_dataset: MakeDataset, make_traj: MakeTraj, fill: Fill, buffer: Path, how: str, is_early: bool
) -> None:
    """Early means at listing time: the sampler asks for lengths, and the spaces are known."""
    good = fill(buffer / "fifo", [5] * 8)
    SPOILED[how](buffer / "fifo" / NAME, good[0])
    dataset = DiskTrajDataset(sampler=Sampler("timestep" if is_early else "trajectory"))
    if is_early:
        dataset.expect(make_traj(1).layout)
    dataset = make_dataset(dataset)
    dataset.expect(make_traj(1).layout)
    windows = dataset.sample_windows(200, np.random.default_rng(0))
    assert len(windows) == 200
    assert sorted(buffer.glob("fifo/*")) == sorted(good)
    assert os.path.lexists(buffer / "quarantine" / NAME)
    note = (buffer / "quarantine" / f"{NAME}.txt").read_text(encoding="utf-8")
    assert all(words in note for words in (NAME, "Fix:", "moved from"))
    metrics = dataset.on_end_of_collection()
    assert (metrics["broken_files"], metrics["quarantined_files"], metrics["total_files"]) == (1, 1, 8)
    assert metrics == {**metrics, **dataset.metrics()}
    dataset.set_aside_newer({"newest": [1e9, "00000000"], "num_fifo_files": 1})
    dataset.delete()
    assert not list((buffer / "fifo").iterdir())
    assert len(list((buffer / "quarantine").iterdir())) == 2


def test_broken_files_are_told_from_others_that_a_resumed_run_misses(
    make_dataset: MakeDataset, fill: Fill, buffer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = fill(buffer / "fifo", [5] * 60)
    dataset = make_dataset(DiskTrajDataset())
    state = dataset.state_dict()
    SPOILED["truncated"](paths[0], paths[1])
    dataset.sample_windows(400, np.random.default_rng(0))
    paths[2].unlink()
    dataset.set_aside_newer(state)
    assert "2 trajectories that the checkpoint was trained on are gone" in caplog.messages[-1]
    assert (
        f"Broken files (1) were moved to {buffer}/quarantine. Others were deleted by hand"
        in caplog.messages[-1]
    )


def test_paths_that_are_not_regular_files_are_reported_without_blocking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # socket names must be short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket.npz")
        os.mkfifo("pipe.npz")
        Path("device.npz").symlink_to("/dev/zero")
        for name, problem in (
            *(
                (f"{name}.npz", "it is not a regular file, but a pipe.*Fix:")
                for name in ("socket", "pipe", "device")
            ),
            (str(tmp_path), "it is a folder"),
        ):
            for read in (load_trajectory, check_file):
                with pytest.raises(BrokenTrajectoryError, match=problem):
                    read(name)
    with pytest.raises(FileNotFoundError):
        check_file(tmp_path / "nothing.npz")


def test_the_layout_of_files_opened_before_it_was_known_is_checked(
    make_dataset: MakeDataset, make_traj: MakeTraj, fill: Fill, buffer: Path
) -> None:
    fill(buffer / "fifo", [5] * 3)
    dataset, rng = make_dataset(), np.random.default_rng(0)
    dataset.sample_windows(50, rng)
    layout = make_traj(1).layout
    dataset.expect(Layout({**layout.obs, "extra": ((2,), np.dtype(np.float32))}, layout.action_width))
    with pytest.raises(
        ValueError, match=r"2 of 3 trajectory files in .*buffer cannot be used.*'extra'.*Fix:"
    ):
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


def test_a_folder_of_broken_files_only_reports_the_reason(make_dataset: MakeDataset, buffer: Path) -> None:
    dataset = make_dataset()
    (buffer / "fifo" / NAME).touch()
    dataset.refresh()
    with pytest.raises(
        ValueError, match=r"holds no trajectories.*cannot be used: 1 \(see .*it is empty.*Fix:"
    ):
        dataset.sample_windows(1, np.random.default_rng(0))


# files are opened when drawn, or when listed
@pytest.mark.parametrize("sample_by", ["trajectory", "timestep"])
@pytest.mark.parametrize("num_broken", [2, 3])
def test_more_than_a_twentieth_of_broken_files_stops_the_run(
    make_dataset: MakeDataset, fill: Fill, buffer: Path, num_broken: int, sample_by: str
) -> None:
    fill(buffer / "fifo", [5] * 39)
    dataset, rng = make_dataset(sample_by=sample_by), np.random.default_rng(0)
    for i in range(num_broken):
        (buffer / "protected" / f"env_{i:08x}_1800000000.0.npz").write_bytes(b"not a trajectory")
    if num_broken == 2:
        dataset.refresh()
        dataset.sample_windows(1000, rng)
    else:
        text = r"3 of 42 trajectory files in .*set/buffer cannot be used.*not a readable.*Fix: give"
        with pytest.raises(ValueError, match=text):  # noqa: PT012 - by the one or the other
            dataset.refresh()
            dataset.sample_windows(1000, rng)
    assert dataset.metrics()["broken_files"] == num_broken
    assert len(list((buffer / "quarantine").iterdir())) == 2 * num_broken  # moved, not deleted


def test_files_that_other_processes_quarantine_count_too(
    make_dataset: MakeDataset, fill: Fill, buffer: Path
) -> None:
    fill(buffer / "fifo", [5] * 4)
    (buffer / "quarantine").mkdir()
    (buffer / "quarantine" / "env_0_1.0.npz").touch()  # a file of an earlier run
    dataset = make_dataset()
    assert dataset.on_end_of_collection()["broken_files"] == 0
    for name in ("env_1_1.0.npz", "env_2_1.0.npz"):
        (buffer / "quarantine" / name).touch()
        (buffer / "quarantine" / f"{name}.txt").write_text("It is cut off.\n")
    with pytest.raises(ValueError, match=r"2 of 4 .* The last reason: It is cut off\."):
        dataset.on_end_of_collection()


def test_a_moved_file_counts_even_if_its_reason_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    quarantine = Quarantine(tmp_path, may_move=True)
    (tmp_path / NAME).touch()
    monkeypatch.setattr(Path, "write_text", fail)
    quarantine.put(tmp_path / NAME, "It is empty.")
    assert [path.name for path in quarantine.folder.iterdir()] == [NAME]
    assert f"was moved to {quarantine.folder / NAME}: It is empty." in caplog.text


@pytest.mark.parametrize(("may_move", "text"), [(True, "were left in place"), (False, "loxodon data check")])
def test_files_that_stay_in_place_are_not_looked_for_in_quarantine(
    tmp_path: Path, may_move: bool, text: str
) -> None:
    quarantine = Quarantine(tmp_path, may_move=may_move)
    for i in range(2):
        quarantine.put(tmp_path / f"env_{i}_1.0.npz", "It cannot be read.", is_broken=False)
    with pytest.raises(ValueError, match=text):
        quarantine.check_share(8)
    assert quarantine.describe() == " Files that cannot be used: 2; the last reason: It cannot be read."


def _put_all(quarantine: Quarantine, paths: list[Path]) -> None:
    for path in paths:
        quarantine.put(path, "It is broken.")


@pytest.mark.slow
def test_processes_that_move_the_same_files_lose_none_and_overwrite_none(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path, may_move=True)
    for content in ("a", "b"):  # the same name twice
        (tmp_path / NAME).write_text(content)
        quarantine.put(tmp_path / NAME, "It is broken.")
    moved = [path for path in quarantine.folder.iterdir() if path.suffix != ".txt"]
    assert sorted(path.read_text() for path in moved) == ["a", "b"]
    paths = [tmp_path / f"env_{i:08x}_1.0.npz" for i in range(100)]
    for path in paths:
        path.write_text(path.name)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_put_all, args=(quarantine, paths)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    names = {path.name for path in quarantine.folder.iterdir() if not path.name.startswith(NAME)}
    found = {name for name in names if not name.endswith(".txt")}
    # A process that loses a race may use `<name>.2` or `<name>.3`.
    assert sorted(re.sub(r"\.npz\.[23]$", ".npz", name) for name in found) == [path.name for path in paths]
    assert names - found == {f"{name}.txt" for name in found}
    quarantine.refresh()
    assert quarantine.num_broken == 102


@pytest.mark.parametrize("sample_by", ["trajectory", "timestep"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE, errno.ENOTCONN])
def test_a_file_that_cannot_be_read_is_skipped_with_a_warning(
    make_dataset: MakeDataset,
    fill: Fill,
    buffer: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
    sample_by: str,
) -> None:
    bad, open_file = str(fill(buffer / "fifo", [5] * 8)[3]), os.open

    def fail(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path) == bad:
            raise OSError(number, os.strerror(number), bad)
        return open_file(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", fail)
    dataset, rng = make_dataset(sample_by=sample_by), np.random.default_rng(0)
    assert len(dataset.sample_windows(200, rng)) == 200
    metrics = dataset.on_end_of_collection()
    assert (metrics["broken_files"], metrics["total_files"]) == (1, 7)
    assert Path(bad).exists()
    assert f"{bad} cannot be read ({os.strerror(number)}). Fix:" in caplog.text


def test_nothing_is_deleted_when_the_folder_turns_out_to_be_read_only(
    make_dataset: MakeDataset, fill: Fill, buffer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make_dataset(dset_max_size=2)
    dataset.close()  # gives up the lock
    paths = fill(buffer / "fifo", [5] * 8)

    def fail(*_: Any) -> Any:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("loxodon.data.disk_dataset.FolderLock", fail)
    with pytest.raises(ValueError, match=r"no edit rights.*Fix"):
        dataset.delete()
    assert dataset.on_end_of_collection()["deleted_files"] == 0
    assert all(path.exists() for path in paths)


def test_a_process_without_descriptors_does_not_blame_files(
    make_dataset: MakeDataset, fill: Fill, buffer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(buffer / "fifo", [5] * 8)
    dataset = make_dataset(sample_by="trajectory")

    def fail(*_: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(OSError, match="Too many open files"):
        dataset.sample_windows(1, np.random.default_rng(0))
    assert dataset.num_files == 8


def test_a_folder_that_cannot_be_listed_for_a_while_keeps_its_files(
    make_dataset: MakeDataset,
    fill: Fill,
    buffer: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fill(buffer / "fifo", [5] * 8)
    dataset = make_dataset()

    def fail(folder: Any) -> list[str]:
        raise OSError(errno.EIO, "Input/output error", str(folder))

    monkeypatch.setattr(os, "listdir", fail)
    assert dataset.on_end_of_collection()["total_files"] == 8
    assert "cannot be listed at the moment" in caplog.text


def test_a_file_truncated_while_open_is_broken(
    make_dataset: MakeDataset, make_traj: MakeTraj, buffer: Path
) -> None:
    """A page fault in a mapped file would kill the process here."""
    dataset, rng = make_dataset(max_seq_len=1000), np.random.default_rng(0)
    paths = [
        save_trajectory(buffer / "fifo", make_traj(30_000), save_as="npz", traj_id=f"{i:08x}", unix_time=1e9)
        for i in range(4)
    ]
    dataset.refresh()
    dataset.sample_windows(50, rng)
    os.truncate(paths[2], 5_000)
    dataset.sample_windows(50, rng)
    assert dataset.metrics()["broken_files"] == 1
    assert not paths[2].exists()
    reader = TrajectoryReader()
    traj = reader.load(str(paths[1]))
    os.truncate(paths[1], 100)
    with pytest.raises(FormatError, match="cut off after it had been opened"):  # it has been checked
        traj.slice(0, len(traj))


def test_old_files_that_cannot_be_deleted_are_no_longer_used(
    make_dataset: MakeDataset, fill: Fill, buffer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(buffer / "fifo", [5] * 3)
    (buffer / "fifo" / "env_00000000_1.0.npz").mkdir()
    dataset = make_dataset(sample_by="trajectory", dset_max_size=2)
    for num_deleted in (1, 0):
        metrics = dataset.on_end_of_collection()
        assert (metrics["fifo_files"], metrics["deleted_files"]) == (2, num_deleted)
    assert "1 of 2 old trajectory files cannot be deleted" in caplog.text


def test_integers_out_of_the_range_of_the_run_are_found(
    make_dataset: MakeDataset, make_traj: MakeTraj, buffer: Path
) -> None:
    """An unchecked cast would change 300 in a uint16 file to 44 in a uint8 batch."""
    dataset, layout = make_dataset(), make_traj(1).layout
    for i, (dtype, value) in enumerate([(np.uint16, 300), (np.uint8, 9), *[(np.uint8, 7)] * 50]):
        traj = make_traj(5)
        image = traj.obs["image"].astype(dtype)
        image[2] = value
        traj = dataclasses.replace(traj, obs={**traj.obs, "image": image})
        save_trajectory(buffer / "fifo", traj, save_as="npz", traj_id=f"{i:08x}", unix_time=1e9)
    dataset.expect(dataclasses.replace(layout, num_values={"image": 8}))
    dataset.refresh()
    dataset.sample_windows(2000, np.random.default_rng(0))
    notes = sorted(note.read_text() for note in (buffer / "quarantine").glob("*.txt"))
    assert "(uint16) is 300 at timestep 2, but this run has uint8 from 0 to 7" in notes[0]
    assert "'image' (uint8) is 9 at timestep 2" in notes[1]
    assert len(notes) == 2
    dataset.expect(dataclasses.replace(layout, num_values={"image": 7}))  # files are checked once more
    with pytest.raises(ValueError, match=r"image' \(uint8\) is 7 at timestep 0"):
        dataset.sample_windows(2000, np.random.default_rng(0))


def test_floats_out_of_the_range_of_the_run_are_found(
    make_dataset: MakeDataset, make_traj: MakeTraj, fill: Fill, buffer: Path
) -> None:
    fill(buffer / "fifo", [5] * 40)
    change(buffer / "fifo" / NAME, next(buffer.glob("fifo/*.npz")), "_OBS_KEY_position", 1e5)
    dataset, layout = make_dataset(), make_traj(1).layout
    narrow = {**layout.obs, "position": (layout.obs["position"][0], np.dtype(np.float16))}
    dataset.expect(dataclasses.replace(layout, obs=narrow))
    dataset.sample_windows(400, np.random.default_rng(0))
    note = (buffer / "quarantine" / f"{NAME}.txt").read_text()
    assert "(float32) is 100000.0 at timestep 3, which is not finite in float16" in note


@pytest.mark.parametrize("sample_by", ["trajectory", "timestep"])
@pytest.mark.parametrize("how", ["could not be moved", "dangling link"])
def test_files_that_cannot_be_moved_are_skipped(
    make_dataset: MakeDataset,
    fill: Fill,
    buffer: Path,
    caplog: pytest.LogCaptureFixture,
    how: str,
    sample_by: str,
) -> None:
    fill(buffer / "fifo", [5] * 4)
    if how == "dangling link":
        (buffer / "fifo" / NAME).symlink_to(buffer / "nowhere")
    else:
        (buffer / "fifo" / NAME).touch()
        (buffer / "quarantine").touch()  # a file instead of the folder
    dataset = make_dataset(sample_by=sample_by)
    dataset.sample_windows(100, np.random.default_rng(0))
    assert ("could not be moved" in caplog.text) == (how == "could not be moved")
    assert dataset.metrics()["broken_files"] == 1
    assert dataset.num_files == 4
