from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from loxodon.data import Batch, BatchLoader, DiskTrajDataset, RLDataset, Trajectory

Fill = Callable[[Path, list[int]], list[Path]]
MakeDataset = Callable[..., DiskTrajDataset]


@pytest.fixture
def dataset(make_dataset: MakeDataset, fill: Fill, tmp_path: Path) -> DiskTrajDataset:
    fill(tmp_path / "set/buffer/fifo", [3, 9, 20, 40])
    return make_dataset(max_seq_len=6, mode="both")


def positions(batches: Iterator[Batch]) -> list[list[list[float]]]:
    """What identifies each sampled window: its observed positions."""
    return [batch.obs["position"][..., 0].tolist() for batch in batches]


def test_epoch_has_its_batches(dataset: DiskTrajDataset) -> None:
    batches = list(BatchLoader(dataset, batch_size=5, num_workers=0, seed=0).epoch(0, 7))
    assert len(batches) == 7
    assert all(batch.mask.shape[0] == 5 and batch.mask.shape[1] <= 6 for batch in batches)


def test_samples_depend_on_seed_rank_and_epoch_only(dataset: DiskTrajDataset) -> None:
    def sample(*, seed: int = 0, rank: int = 0, epoch: int = 3) -> list[list[list[float]]]:
        loader = BatchLoader(dataset, batch_size=4, num_workers=0, seed=seed, rank=rank)
        return positions(loader.epoch(epoch, 5))

    loader = BatchLoader(dataset, batch_size=4, num_workers=0, seed=0)
    list(loader.epoch(2, 5))  # what was sampled before does not matter
    assert positions(loader.epoch(3, 5)) == sample()
    assert sample(seed=1) != sample()
    assert sample(rank=1) != sample()
    assert sample(epoch=4) != sample()


def test_new_files_are_seen_in_the_next_epoch(dataset: DiskTrajDataset, fill: Fill, tmp_path: Path) -> None:
    loader = BatchLoader(dataset, batch_size=50, num_workers=0, seed=0)
    assert next(loader.epoch(0, 1)).obs["position"].max() < 4000
    fill(tmp_path / "set/buffer/fifo", [3] * 8)
    assert next(loader.epoch(1, 1)).obs["position"].max() >= 4000


@pytest.mark.parametrize(("batch_size", "num_workers"), [(0, 0), (4, -1)])
def test_impossible_numbers_are_refused(dataset: DiskTrajDataset, batch_size: int, num_workers: int) -> None:
    with pytest.raises(ValueError, match=r"batch_size is .*Fix:"):
        BatchLoader(dataset, batch_size=batch_size, num_workers=num_workers, seed=0)


class ProcessDataset(RLDataset):
    """Windows that tell in which process they were sampled."""

    def __init__(self, traj: Trajectory) -> None:
        self.traj = traj

    def sample_random_trajectory(self, rng: np.random.Generator) -> Trajectory:
        pid = np.full((len(self.traj) + 1, 1), os.getpid())
        return Trajectory(**{**self.traj.__dict__, "obs": {**self.traj.obs, "pid": pid}})


@pytest.mark.slow
def test_workers_stay_the_same_processes(make_traj: Callable[..., Trajectory]) -> None:
    loader = BatchLoader(ProcessDataset(make_traj(2)), batch_size=1, num_workers=2, seed=0)
    epochs = [[int(batch.obs["pid"][0, 0, 0]) for batch in loader.epoch(epoch, 6)] for epoch in range(3)]
    assert len(set(epochs[0])) == 2
    assert os.getpid() not in epochs[0]
    assert epochs[0] == epochs[1] == epochs[2]  # in turns, in a fixed order
    loader.close()
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_two_workers_are_reproducible_and_see_new_files(
    dataset: DiskTrajDataset, fill: Fill, tmp_path: Path
) -> None:
    one, other = (BatchLoader(dataset, batch_size=8, num_workers=2, seed=5) for _ in range(2))
    first = positions(one.epoch(0, 5))
    assert len(first) == 5
    for epoch in (7, 8, 0):  # the history of a loader does not matter
        last = positions(other.epoch(epoch, 5))
    assert last == first
    assert positions(one.epoch(1, 5)) != first
    fill(tmp_path / "set/buffer/fifo", [3] * 40)
    assert np.max([batch.obs["position"].max() for batch in one.epoch(2, 5)]) >= 4000
    one.close()
    other.close()


@pytest.mark.slow
def test_batches_of_workers_are_complete_and_writable(dataset: DiskTrajDataset) -> None:
    loader = BatchLoader(dataset, batch_size=4, num_workers=1, seed=0)
    inside = BatchLoader(dataset, batch_size=4, num_workers=0, seed=0)
    for batch, same in zip(
        loader.epoch(0, 3), inside.epoch(0, 3), strict=True
    ):  # one worker samples like none
        for name in ("rl2s", "time_idxs", "actions", "rews", "dones", "mask"):
            assert torch.equal(getattr(batch, name), getattr(same, name)), name
        assert torch.equal(batch.obs["image"], same.obs["image"])
        assert batch.obs["image"].dtype == torch.uint8
        batch.rews.zero_()
    loader.close()


@pytest.mark.slow
def test_epoch_that_was_left_early_does_not_leak_into_the_next(dataset: DiskTrajDataset) -> None:
    loader = BatchLoader(dataset, batch_size=4, num_workers=2, seed=0)
    expected = positions(loader.epoch(1, 4))
    abandoned = loader.epoch(0, 20)
    next(abandoned)
    assert positions(loader.epoch(1, 4)) == expected
    del abandoned
    loader.close()


@pytest.mark.slow
def test_error_in_a_worker_keeps_its_text(make_dataset: MakeDataset) -> None:
    loader = BatchLoader(make_dataset(), batch_size=4, num_workers=1, seed=0)
    with pytest.raises(ValueError, match="holds no trajectories to sample from"):
        list(loader.epoch(0, 2))
    loader.close()


@pytest.mark.slow
def test_workers_leave_interrupts_to_the_parent(make_traj: Callable[..., Trajectory]) -> None:
    loader = BatchLoader(ProcessDataset(make_traj(2)), batch_size=1, num_workers=1, seed=0)
    pid = int(next(loader.epoch(0, 1)).obs["pid"][0, 0, 0])
    os.kill(pid, signal.SIGINT)
    assert [int(batch.obs["pid"][0, 0, 0]) for batch in loader.epoch(1, 30)] == [pid] * 30
    loader.close()
