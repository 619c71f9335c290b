"""Files keep their order of writing, whatever the system's clock does."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from loxodon.data import DiskTrajDataset, TrajectoryWriter
from loxodon.data.files import parse_name

from .test_writer import FakeRollout

HOUR_NS = 3600 * 10**9


class Clock:
    """Stands for time.time_ns; jumps when told to."""

    def __init__(self) -> None:
        self.now_ns = 1_800_000_000 * 10**9

    def __call__(self) -> int:
        self.now_ns += 1000
        return self.now_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(time, "time_ns", fake)
    return fake


def write_episode(writer: TrajectoryWriter) -> str:
    """Name of the file of one episode of two steps."""
    before = {path.name for path in writer.folder.iterdir()}
    rollout = FakeRollout(writer, 1)
    rollout.begin([0])
    rollout.add()
    rollout.add(terminated=(0,))
    writer.wait()
    ((name),) = {path.name for path in writer.folder.iterdir()} - before
    return str(name)


def in_order(folder: Path) -> list[str]:
    return sorted((p.name for p in folder.iterdir()), key=lambda name: parse_name(name).unix_time)  # type: ignore[union-attr]


def test_a_clock_that_goes_back_during_a_run_makes_no_file_older(tmp_path: Path, clock: Clock) -> None:
    writer = TrajectoryWriter(tmp_path, 1)
    names = [write_episode(writer)]
    clock.now_ns -= HOUR_NS
    names += [write_episode(writer), write_episode(writer)]
    clock.now_ns += 2 * HOUR_NS
    names.append(write_episode(writer))
    writer.close()
    assert in_order(tmp_path) == names


def test_a_clock_that_goes_back_between_two_runs_makes_no_file_older(tmp_path: Path, clock: Clock) -> None:
    names = []
    for seed in range(4):
        writer = TrajectoryWriter(tmp_path, 1, seed=seed)
        names.append(write_episode(writer))
        writer.close()
        clock.now_ns -= HOUR_NS
    assert in_order(tmp_path) == names


def test_the_oldest_are_deleted_first_after_a_jump(tmp_path: Path, clock: Clock) -> None:
    dataset = DiskTrajDataset(dset_max_size=2)
    common = {"max_seq_len": 8, "padded_sampling": "none", "default_root": str(tmp_path), "default_name": "d"}
    dataset.configure(has_edit_rights=True, **common)  # type: ignore[arg-type]
    assert dataset.save_new_trajs_to is not None
    names = []
    for seed in range(4):
        writer = TrajectoryWriter(dataset.save_new_trajs_to, 1, seed=seed)
        names.append(write_episode(writer))
        writer.close()
        clock.now_ns -= HOUR_NS
    dataset.on_end_of_collection()
    assert in_order(dataset.save_new_trajs_to) == names[2:]
    dataset.close()


def test_looking_for_the_newest_file_is_cheap(tmp_path: Path) -> None:
    for i in range(2000):
        (tmp_path / f"env_{i:08x}_{1_700_000_000 + i}.000000.npz").touch()
    (tmp_path / "notes.txt").touch()
    start_s = time.process_time()
    writer = TrajectoryWriter(tmp_path, 1)
    assert time.process_time() - start_s < 0.5
    assert writer.state_dict()["last_time_us"] == 1_700_001_999 * 10**6
