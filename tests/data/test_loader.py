from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import gin
import numpy as np
import pytest
import torch

from loxodon.data import Batch, BatchLoader, DiskTrajDataset, RLDataset, Trajectory
from loxodon.data.loader import cut_by_length

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


def test_pools_of_no_batches_are_refused(dataset: DiskTrajDataset) -> None:
    with pytest.raises(ValueError, match=r"pool_batches is 0.*Fix:"):
        BatchLoader(dataset, batch_size=4, num_workers=0, seed=0, pool_batches=0)


def test_gin_sets_the_pool_and_nothing_else(dataset: DiskTrajDataset) -> None:
    gin.clear_config()
    with pytest.raises(ValueError, match="batch_size"):
        gin.parse_config("BatchLoader.batch_size = 3")
    gin.clear_config()
    gin.parse_config("BatchLoader.pool_batches = 0")
    with pytest.raises(ValueError, match="pool_batches is 0"):
        BatchLoader(dataset, batch_size=4, num_workers=0, seed=0)
    gin.clear_config()


# --- batches of similar length -------------------------------------------------------------------------


def test_every_drawn_window_is_used_once_beside_similar_ones(make_traj: Callable[..., Trajectory]) -> None:
    rng = np.random.default_rng(0)
    windows = [make_traj(int(n), first=1000 * i) for i, n in enumerate(rng.integers(1, 50, 40))]
    batches = list(cut_by_length(list(windows), 8, rng))
    used = [id(window) for batch in batches for window in batch]
    assert sorted(used) == sorted(map(id, windows))
    spans = [(min(map(len, batch)), max(map(len, batch))) for batch in batches]
    assert spans != sorted(spans)  # the batches come in random order,
    spans.sort()
    assert all(high <= low for (_, high), (low, _) in itertools.pairwise(spans))  # without overlap


def test_windows_of_one_length_stay_in_the_order_of_drawing(make_traj: Callable[..., Trajectory]) -> None:
    windows = [make_traj(3) for _ in range(6)]
    rng = np.random.default_rng(0)
    before = rng.bit_generator.state
    assert [id(w) for batch in cut_by_length(windows, 2, rng) for w in batch] == [id(w) for w in windows]
    assert rng.bit_generator.state == before


def test_a_pool_lowers_the_padding_and_the_metric_counts_it(dataset: DiskTrajDataset) -> None:
    def padded(*, pool_batches: int) -> float:
        loader = BatchLoader(dataset, batch_size=4, num_workers=0, seed=0, pool_batches=pool_batches)
        assert loader.metrics() == {}
        masks = [batch.mask for batch in loader.epoch(0, 50)]
        zeros = sum(int((~mask).sum()) for mask in masks)
        expected = zeros / sum(mask.numel() for mask in masks)
        assert loader.metrics() == {"padded_fraction": pytest.approx(expected)}
        return loader.metrics()["padded_fraction"]

    assert 0 < padded(pool_batches=8) < padded(pool_batches=1) / 2


def test_an_epoch_has_a_smaller_last_pool(dataset: DiskTrajDataset) -> None:
    drawn: list[int] = []
    original = dataset.sample_windows
    dataset.sample_windows = lambda count, rng: drawn.append(count) or original(count, rng)  # type: ignore
    batches = list(BatchLoader(dataset, batch_size=4, num_workers=0, seed=0, pool_batches=3).epoch(0, 7))
    assert drawn == [12, 12, 4]
    assert len(batches) == 7


# --- page-locked memory --------------------------------------------------------------------------------


def test_batches_are_pinned_for_a_cuda_device(
    dataset: DiskTrajDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[Batch] = []
    monkeypatch.setattr(Batch, "pin_memory", lambda batch: pinned.append(batch) or batch)
    loader = BatchLoader(dataset, batch_size=4, num_workers=0, seed=0, pin_memory=True)
    assert [id(batch) for batch in loader.epoch(0, 5)] == [id(batch) for batch in pinned]
    assert len(pinned) == 5


# --- datasets of users ---------------------------------------------------------------------------------


class OneMethodDataset(RLDataset):
    """The least that a dataset of one's own needs; its windows say in which order hooks were called."""

    def __init__(self, traj: Trajectory) -> None:
        self.traj = traj
        self.calls: list[str] = []

    def sample_random_trajectory(self, rng: np.random.Generator) -> Trajectory:
        stop = int(rng.integers(1, len(self.traj), endpoint=True))
        return self.traj.slice(0, stop)


class HookedDataset(OneMethodDataset):
    def on_new_epoch(self, epoch: int) -> None:
        self.calls.append(f"epoch {epoch}")

    def refresh(self) -> None:
        self.calls.append("refresh")

    def sample_random_trajectory(self, rng: np.random.Generator) -> Trajectory:
        raise ValueError(" ".join(self.calls))


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_one_method_makes_a_dataset(make_traj: Callable[..., Trajectory], num_workers: int) -> None:
    loader = BatchLoader(OneMethodDataset(make_traj(9)), batch_size=4, num_workers=num_workers, seed=0)
    batches = list(loader.epoch(0, 10))
    assert len(batches) == 10
    for batch in batches:
        for length, observed in zip(batch.lengths.tolist(), batch.obs["position"][..., 0], strict=True):
            assert observed[: length + 1].tolist() == list(range(length + 1))
    lengths = torch.cat([batch.lengths for batch in batches])
    fraction = 1 - int(lengths.sum()) / sum(batch.mask.numel() for batch in batches)
    assert loader.metrics()["padded_fraction"] == pytest.approx(fraction)
    loader.close()


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_epoch_is_told_before_the_refresh(make_traj: Callable[..., Trajectory], num_workers: int) -> None:
    loader = BatchLoader(HookedDataset(make_traj(2)), batch_size=1, num_workers=num_workers, seed=0)
    parent = "" if num_workers == 0 else "epoch 3 "
    with pytest.raises(ValueError, match=rf"^{parent}epoch 3 refresh$"):
        next(loader.epoch(3, 1))
    loader.close()


# --- worker processes ----------------------------------------------------------------------------------


class ProcessDataset(OneMethodDataset):
    """Windows that tell in which process they were sampled; each epoch may bring a misfortune."""

    epoch = 0

    def on_new_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def sample_random_trajectory(self, rng: np.random.Generator) -> Trajectory:
        if self.epoch == 10:
            raise ValueError("nothing to sample. Fix: collect first.")
        if self.epoch == 11:
            raise KeyError("what happened")
        if self.epoch == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        pid = np.full((len(self.traj) + 1, 1), os.getpid())
        return Trajectory(**{**self.traj.__dict__, "obs": {**self.traj.obs, "pid": pid}})


def pids(batches: Iterator[Batch]) -> list[int]:
    return [int(batch.obs["pid"][0, 0, 0]) for batch in batches]


@pytest.mark.slow
def test_workers_stay_and_survive_errors_and_interrupts(make_traj: Callable[..., Trajectory]) -> None:
    loader = BatchLoader(ProcessDataset(make_traj(2)), batch_size=1, num_workers=2, seed=0)
    before = pids(loader.epoch(0, 6))
    assert len(set(before)) == 2
    assert os.getpid() not in before
    with pytest.raises(ValueError, match=r"^nothing to sample\. Fix: collect first\.$") as caught:
        list(loader.epoch(10, 4))
    assert "in sample_random_trajectory" in str(caught.value.__cause__)
    with pytest.raises(RuntimeError, match=r"A loader worker failed: KeyError: 'what happened'.*Fix:"):
        list(loader.epoch(11, 4))
    for pid in set(before):
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    assert pids(loader.epoch(1, 30))[:6] == before  # in turns, in a fixed order
    loader.close()
    assert not {child.pid for child in multiprocessing.active_children()} & set(before)


@pytest.mark.slow
def test_the_death_of_a_worker_is_told_and_others_take_over(make_traj: Callable[..., Trajectory]) -> None:
    loader = BatchLoader(ProcessDataset(make_traj(2)), batch_size=1, num_workers=2, seed=0)
    with pytest.raises(RuntimeError, match=r"has died.*Fix: set Experiment\.dloader_workers"):
        list(loader.epoch(12, 4))
    workers = pids(loader.epoch(1, 4))
    assert len(workers) == 4
    loader.close()
    assert not {child.pid for child in multiprocessing.active_children()} & set(workers)


@pytest.mark.slow
def test_samples_of_two_workers_depend_on_the_epoch_and_not_on_the_past(
    dataset: DiskTrajDataset, fill: Fill, tmp_path: Path
) -> None:
    one, other = (BatchLoader(dataset, batch_size=8, num_workers=2, seed=5) for _ in range(2))
    state = torch.get_rng_state()
    first = positions(one.epoch(0, 5))
    assert len(first) == 5
    for epoch in (7, 0):
        last = positions(other.epoch(epoch, 5))
    assert last == first
    assert torch.equal(torch.get_rng_state(), state)
    abandoned = other.epoch(3, 20)
    next(abandoned)
    assert positions(other.epoch(1, 5)) == positions(one.epoch(1, 5)) != first
    assert list(abandoned) == []  # an epoch ends when another begins
    fill(tmp_path / "set/buffer/fifo", [3] * 40)
    assert np.max([batch.obs["position"].max() for batch in one.epoch(2, 5)]) >= 4000
    one.close()
    other.close()


def tensors(batch: Batch) -> list[torch.Tensor]:
    rest = [batch.rl2s, batch.time_idxs, batch.actions, batch.rews, batch.dones, batch.mask]
    return [*batch.obs.values(), *rest]


@pytest.mark.slow
def test_one_worker_samples_like_none(dataset: DiskTrajDataset) -> None:
    loaders = [BatchLoader(dataset, batch_size=4, num_workers=n, seed=0) for n in (1, 0)]
    for batch, same in zip(loaders[0].epoch(0, 3), loaders[1].epoch(0, 3), strict=True):
        for tensor, other in zip(tensors(batch), tensors(same), strict=True):
            assert torch.equal(tensor, other)
            assert tensor.dtype == other.dtype
    loaders[0].close()
