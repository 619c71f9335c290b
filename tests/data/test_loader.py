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
from loxodon.data import loader as loader_module
from loxodon.data.batch import in_one_block
from loxodon.data.loader import cut_by_length

Fill = Callable[[Path, list[int]], list[Path]]
MakeDataset = Callable[..., DiskTrajDataset]


@pytest.fixture
def dataset(make_dataset: MakeDataset, fill: Fill, tmp_path: Path) -> DiskTrajDataset:
    fill(tmp_path / "set/buffer/fifo", [3, 9, 20, 40])
    return make_dataset(max_seq_len=6, mode="both")


def positions(batches: Iterator[Batch]) -> list[list[list[float]]]:
    """The observed positions, which identify every sampled window."""
    return [batch.obs["position"][..., 0].tolist() for batch in batches]


def test_samples_depend_only_on_seed_rank_and_epoch(dataset: DiskTrajDataset) -> None:
    def sample(*, seed: int = 0, rank: int = 0, epoch: int = 3) -> list[list[list[float]]]:
        loader = BatchLoader(dataset, batch_size=4, num_workers=0, seed=seed, rank=rank)
        return positions(loader.epoch(epoch, 5))

    loader = BatchLoader(dataset, batch_size=4, num_workers=0, seed=0)
    list(loader.epoch(2, 5))  # earlier samples do not matter
    assert positions(loader.epoch(3, 5)) == sample()
    assert sample(seed=1) != sample()
    assert sample(rank=1) != sample()
    assert sample(epoch=4) != sample()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"num_workers": -1}, "workers is -1"),
        ({}, "pool_batches is 0"),
    ],
)
def test_impossible_numbers_are_refused_and_gin_sets_only_the_pool(
    dataset: DiskTrajDataset, wrong: dict[str, int], text: str
) -> None:
    gin.clear_config()
    with pytest.raises(ValueError, match="batch_size"):
        gin.parse_config("BatchLoader.batch_size = 3")
    gin.clear_config()
    gin.parse_config("BatchLoader.pool_batches = 0")
    with pytest.raises(ValueError, match=rf"{text}.*Fix:"):
        BatchLoader(dataset, **{"batch_size": 4, "num_workers": 0, "seed": 0, **wrong})
    gin.clear_config()


def test_every_drawn_window_is_used_once_next_to_similar_ones(make_traj: Callable[..., Trajectory]) -> None:
    rng = np.random.default_rng(0)
    windows = [make_traj(int(n), first=1000 * i) for i, n in enumerate(rng.integers(1, 50, 40))]
    batches = list(cut_by_length(list(windows), 8, rng))
    used = [id(window) for batch in batches for window in batch]
    assert sorted(used) == sorted(map(id, windows))
    spans = [(min(map(len, batch)), max(map(len, batch))) for batch in batches]
    assert spans != sorted(spans)  # batches come in random order
    spans.sort()
    # their lengths do not overlap
    assert all(high <= low for (_, high), (low, _) in itertools.pairwise(spans))
    before, equal = rng.bit_generator.state, [windows[0].slice(0, 1) for _ in range(6)]
    assert [id(w) for batch in cut_by_length(equal, 2, rng) for w in batch] == [id(w) for w in equal]
    assert rng.bit_generator.state == before  # windows of equal length stay in the order of drawing


def test_a_pool_of_large_windows_has_fewer_batches(
    dataset: DiskTrajDataset, monkeypatch: pytest.MonkeyPatch, make_traj: Callable[..., Trajectory]
) -> None:
    counts: list[int] = []
    draw = dataset.sample_windows
    monkeypatch.setattr(dataset, "sample_windows", lambda n, rng: counts.append(n) or draw(n, rng))
    dataset.expect(make_traj(1).layout)
    batch_bytes = 2 * (6 + 1) * (2 * 4 + 8 * 3 + 32)  # two windows of 7 timesteps
    for pool_bytes in (1, 3 * batch_bytes, 100 * batch_bytes):
        monkeypatch.setattr(loader_module, "_POOL_BYTES", pool_bytes)
        list(BatchLoader(dataset, batch_size=2, num_workers=0, seed=0, pool_batches=4).epoch(0, 4))
    assert counts == [2] * 4 + [6, 2] + [8]


def test_a_pool_lowers_the_padding_and_the_metric_counts_it(
    dataset: DiskTrajDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    original = dataset.sample_windows
    monkeypatch.setattr(dataset, "sample_windows", lambda n, rng: drawn.append(n) or original(n, rng))

    def padded(*, pool_batches: int) -> float:
        loader = BatchLoader(dataset, batch_size=4, num_workers=0, seed=0, pool_batches=pool_batches)
        assert loader.metrics() == {}
        batches = list(loader.epoch(0, 50))
        zeros = sum(int((~batch.mask).sum()) for batch in batches)
        expected = zeros / sum(batch.mask.numel() for batch in batches)
        assert loader.metrics() == {"padded_share": pytest.approx(expected)}
        return loader.metrics()["padded_share"]

    assert 0 < padded(pool_batches=8) < padded(pool_batches=1) / 2
    assert drawn[:7] == [32] * 6 + [8]


@pytest.mark.parametrize("packs", [False, True])
def test_one_block_holds_a_whole_batch(dataset: DiskTrajDataset, packs: bool) -> None:
    loader = BatchLoader(dataset, batch_size=4, num_workers=0, seed=0, packs=packs)
    (batch,) = loader.epoch(0, 1)
    block, read = in_one_block(batch)
    found = read(block.clone())  # as on another device
    block.zero_()
    flat, same = ({**vars(x), **x.obs, "obs": None} for x in (batch, found))
    assert flat.keys() == same.keys()
    for name, value in flat.items():
        if value is None:
            assert same[name] is None, name
        else:
            torch.testing.assert_close(same[name], value, rtol=0, atol=0, equal_nan=True)


def test_packed_batches_hold_the_windows_of_padded_ones_in_less_space(dataset: DiskTrajDataset) -> None:
    def epoch(packs: bool) -> tuple[list[list[list[float]]], float]:
        loader = BatchLoader(dataset, batch_size=4, num_workers=0, seed=0, packs=packs, pool_batches=1)
        found = []
        for batch in loader.epoch(0, 20):
            real, window = batch.timestep_mask[..., 0], batch.window_idxs
            assert real.shape[1] <= dataset.max_seq_len + 1
            found.append(sorted(batch.obs["position"][real & (window == k)][:, 0].tolist() for k in range(4)))
        return found, loader.metrics()["padded_share"]

    (padded, much), (packed, little) = epoch(packs=False), epoch(packs=True)
    assert packed == padded
    assert little < much


# --- custom datasets -----------------------------------------------------------------------------------


class OneMethodDataset(RLDataset):
    """The minimum that a custom dataset needs."""

    def __init__(self, traj: Trajectory) -> None:
        self.traj = traj

    def sample_random_trajectory(self, rng: np.random.Generator) -> Trajectory:
        stop = int(rng.integers(1, len(self.traj), endpoint=True))
        return self.traj.slice(0, stop)


def test_one_method_is_enough_for_a_dataset(make_traj: Callable[..., Trajectory]) -> None:
    loader = BatchLoader(OneMethodDataset(make_traj(9)), batch_size=4, num_workers=0, seed=0)
    batches = list(loader.epoch(0, 10))
    assert len(batches) == 10
    for batch in batches:
        for length, observed in zip(batch.lengths.tolist(), batch.obs["position"][..., 0], strict=True):
            assert observed[: length + 1].tolist() == list(range(length + 1))


# --- worker processes ----------------------------------------------------------------------------------


class ProcessDataset(OneMethodDataset):
    """Windows that name the process in which they were sampled; some epochs fail."""

    epoch = 0
    is_fresh = False

    def on_new_epoch(self, epoch: int) -> None:
        self.epoch, self.is_fresh = epoch, False

    def refresh(self) -> None:
        self.is_fresh = True

    def sample_random_trajectory(self, rng: np.random.Generator) -> Trajectory:
        assert self.is_fresh  # the epoch is announced before the refresh
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
def test_workers_persist_survive_errors_and_interrupts_and_are_replaced(
    make_traj: Callable[..., Trajectory],
) -> None:
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
    with pytest.raises(RuntimeError, match=r"A loader worker died.*Fix: lower Experiment\.dloader_workers"):
        list(loader.epoch(12, 4))
    after = pids(loader.epoch(1, 4))  # new workers take over
    assert len(after) == 4
    loader.close()
    assert not {child.pid for child in multiprocessing.active_children()} & {*before, *after}


@pytest.mark.slow
def test_samples_of_two_workers_depend_on_the_epoch_but_not_on_the_past(
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
    loaders = [BatchLoader(dataset, batch_size=4, num_workers=n, seed=0, packs=True) for n in (1, 0)]
    next(loaders[0].epoch(1, 40))  # its other messages are never read
    # Lists check that received batches stay valid when a worker reuses its memory.
    for batch, same in zip(*(list(loader.epoch(0, 80)) for loader in loaders), strict=True):
        for name, tensor in vars(batch).items():  # one worker samples like none
            for key, value in (tensor if name == "obs" else {"": tensor}).items():
                expected = getattr(same, name)[key] if name == "obs" else getattr(same, name)
                if value is None:  # no two windows of the batch fit into one row
                    assert expected is None
                    continue
                assert torch.equal(value, expected)
                assert value.dtype == expected.dtype
    assert loaders[0].metrics() == loaders[1].metrics()
    loaders[0].close()
