from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import gin
import numpy as np
import pytest
import torch

from loxodon.data import Batch, BatchLoader, DiskTrajDataset, RLDataset, Trajectory, loader
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
    assert all(high <= low for (_, high), (low, _) in zip(spans, spans[1:], strict=False))  # without overlap


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


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_batches_are_laid_out_in_one_pinned_block(
    dataset: DiskTrajDataset, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    blocks: list[torch.Tensor] = []

    def fake(num_bytes: int) -> torch.Tensor:
        blocks.append(torch.full((num_bytes,), 77, dtype=torch.uint8))
        return blocks[-1]

    monkeypatch.setattr(loader, "new_pinned_block", fake)
    pinned = BatchLoader(dataset, batch_size=4, num_workers=num_workers, seed=0, pin_memory=True)
    plain = BatchLoader(dataset, batch_size=4, num_workers=0, seed=0)
    for i, (batch, same) in enumerate(zip(pinned.epoch(0, 5), plain.epoch(0, 5), strict=True)):
        for tensor, other in zip(tensors(batch), tensors(same), strict=True):
            assert torch.equal(tensor, other)
            assert tensor.untyped_storage().data_ptr() == blocks[i].data_ptr()
    assert len(blocks) == 5
    pinned.close()


def tensors(batch: Batch) -> list[torch.Tensor]:
    rest = [batch.rl2s, batch.time_idxs, batch.actions, batch.rews, batch.dones, batch.mask]
    return [*batch.obs.values(), *rest]


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


class GrowingDataset(RLDataset):
    """Windows that are much larger in later epochs."""

    size = 1

    def on_new_epoch(self, epoch: int) -> None:
        self.size = 10**epoch

    def sample_random_trajectory(self, rng: np.random.Generator) -> Trajectory:
        one = np.ones((1, 1), int)
        obs = {"x": np.full((2, self.size), rng.integers(1000))}
        rl2s, time_idxs = np.zeros((2, 3), np.float32), np.zeros((2, 1), int)
        return Trajectory(obs, rl2s, time_idxs, one, one.astype(np.float32), one.astype(bool))


@pytest.mark.slow
def test_shared_memory_grows_with_the_batches_and_is_not_the_batch() -> None:
    workers, inside = (BatchLoader(GrowingDataset(), batch_size=3, num_workers=n, seed=0) for n in (1, 0))
    for epoch in (0, 2, 4, 1):
        batches, expected = list(workers.epoch(epoch, 6)), list(inside.epoch(epoch, 6))
        for batch, same in zip(batches, expected, strict=True):
            assert torch.equal(batch.obs["x"], same.obs["x"])
    workers.close()


class _Stubborn(Exception):  # noqa: N818
    """Does not survive pickling."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class FailingDataset(OneMethodDataset):
    epoch = 0

    def on_new_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def sample_random_trajectory(self, rng: np.random.Generator) -> Trajectory:
        if self.epoch == 0:
            raise KeyError("what happened")
        if self.epoch == 1:
            raise _Stubborn(3, 4)
        if self.epoch == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().sample_random_trajectory(rng)


@pytest.mark.slow
def test_workers_survive_errors_and_their_death_is_told_once(make_traj: Callable[..., Trajectory]) -> None:
    parent = os.getpid()
    loader = BatchLoader(FailingDataset(make_traj(5)), batch_size=2, num_workers=2, seed=0)
    with pytest.raises(KeyError, match="what happened") as caught:
        list(loader.epoch(0, 4))
    assert "in sample_random_trajectory" in str(caught.value.__cause__)
    with pytest.raises(RuntimeError, match=r"Loader worker 0 failed: .*_Stubborn: 3 and 4.*Fix:"):
        list(loader.epoch(1, 4))
    assert len(list(loader.epoch(3, 4))) == 4
    with pytest.raises(RuntimeError, match=r"Loader worker \d .* signal 9 \(SIGKILL\).*Fix:"):
        list(loader.epoch(2, 4))
    assert multiprocessing.active_children() == []
    assert len(list(loader.epoch(3, 4))) == 4  # with new processes
    loader.close()
    assert os.getpid() == parent


@pytest.mark.slow
def test_an_epoch_ends_when_another_begins(make_traj: Callable[..., Trajectory]) -> None:
    loader = BatchLoader(OneMethodDataset(make_traj(5)), batch_size=2, num_workers=2, seed=0)
    first = loader.epoch(0, 10)
    next(first)
    assert len(list(loader.epoch(1, 10))) == 10
    assert list(first) == []
    assert len(list(loader.epoch(2, 10))) == 10
    loader.close()


@pytest.mark.slow
def test_workers_end_with_a_parent_that_never_closes_or_is_killed(run_python: Callable[..., int]) -> None:
    code = (
        "import os, signal, sys, time\n"
        "import numpy as np\n"
        "from loxodon.data import BatchLoader, MemoryTrajDataset\n"
        "flags = np.zeros(50, bool)\n"
        "data = MemoryTrajDataset.from_arrays(np.ones((50, 2)), flags + 0, flags, flags, flags)\n"
        "data.configure(max_seq_len=8, padded_sampling='none', has_edit_rights=True,\n"
        "               default_root='.', default_name='x')\n"
        "loader = BatchLoader(data, batch_size=2, num_workers=2, seed=0)\n"
        "batches = loader.epoch(0, 1000)\n"
        "next(batches)\n"
        "pids = [w._process.pid for w in loader._workers._workers]\n"
        "open(sys.argv[1], 'w').write(' '.join(map(str, pids)))\n"
        "if sys.argv[2] == 'kill': os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    for how, expected in (("leave", 0), ("kill", -signal.SIGKILL)):
        path = Path(os.environ.get("TMPDIR", "/tmp"), f"loader-pids-{os.getpid()}")
        assert run_python(code, str(path), how) == expected
        pids = [int(pid) for pid in path.read_text().split()]
        path.unlink()
        deadline = time.monotonic() + 10
        while any(is_running(pid) for pid in pids):
            assert time.monotonic() < deadline, pids
            time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"
