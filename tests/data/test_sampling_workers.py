"""Worker processes of the loader: what they deliver, and what happens when something goes wrong."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
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


class OneMethodDataset(RLDataset):
    """Windows of one trajectory."""

    def __init__(self, traj: Trajectory) -> None:
        self.traj = traj

    def sample_random_trajectory(self, rng: np.random.Generator) -> Trajectory:
        return self.traj.slice(0, int(rng.integers(1, len(self.traj), endpoint=True)))


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
        if self.epoch == 4:
            raise EOFError("a short file")  # not to be taken for the end of a pipe
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
    with pytest.raises(EOFError, match="a short file"):
        list(loader.epoch(4, 4))
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
        deadline = time.monotonic() + 120
        while any(is_running(pid) for pid in pids):
            assert time.monotonic() < deadline, pids
            time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"
