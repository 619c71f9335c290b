from __future__ import annotations

import dataclasses
import multiprocessing
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from loxodon.data import DiskTrajDataset, NoOpRelabeler, Relabeler, Trajectory, save_trajectory

Fill = Callable[[Path, list[int]], list[Path]]
MakeDataset = Callable[..., DiskTrajDataset]


def file_numbers(windows: list[Trajectory]) -> list[int]:
    """Which file of `fill` each window comes from."""
    return [int(window.obs["position"][0, 0]) // 1000 for window in windows]


def assert_shares(found: list[int], shares: dict[int, float]) -> None:
    """Compare frequencies with probabilities, within five standard deviations."""
    counts, num_draws = Counter(found), len(found)
    assert counts.keys() == {number for number, share in shares.items() if share}
    for number, share in shares.items():
        error = 5 * np.sqrt(share * (1 - share) / num_draws)
        assert abs(counts[number] / num_draws - share) <= error, (number, counts[number] / num_draws, share)


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    return tmp_path / "set/buffer/fifo"


def test_timesteps_are_drawn_alike(make_dataset: MakeDataset, fill: Fill, fifo: Path) -> None:
    fill(fifo, [2, 6, 12])
    dataset = make_dataset(max_seq_len=2, sample_by="timestep")
    found = file_numbers(dataset.sample_windows(4000, np.random.default_rng(0)))
    assert_shares(found, {0: 0.1, 1: 0.3, 2: 0.6})


def test_only_the_newest_share_is_drawn(make_dataset: MakeDataset, fill: Fill, fifo: Path) -> None:
    fill(fifo, [2] * 10)
    dataset = make_dataset(recent_fraction=0.25)
    found = file_numbers(dataset.sample_windows(3000, np.random.default_rng(0)))
    assert_shares(found, {7: 1 / 3, 8: 1 / 3, 9: 1 / 3})


def test_a_tiny_share_leaves_the_newest_file(make_dataset: MakeDataset, fill: Fill, fifo: Path) -> None:
    fill(fifo, [2] * 3)
    windows = make_dataset(recent_fraction=0.01).sample_windows(20, np.random.default_rng(0))
    assert set(file_numbers(windows)) == {2}


def test_recent_timesteps(make_dataset: MakeDataset, fill: Fill, fifo: Path) -> None:
    fill(fifo, [50, 50, 2, 8])
    dataset = make_dataset(recent_fraction=0.5, sample_by="timestep")
    found = file_numbers(dataset.sample_windows(3000, np.random.default_rng(0)))
    assert_shares(found, {2: 0.2, 3: 0.8})


def test_new_files_count_by_length_after_a_refresh(make_dataset: MakeDataset, fill: Fill, fifo: Path) -> None:
    fill(fifo, [4, 4])
    dataset = make_dataset(sample_by="timestep")
    fill(fifo, [4, 4, 8])
    dataset.refresh()
    found = file_numbers(dataset.sample_windows(3000, np.random.default_rng(0)))
    assert_shares(found, {0: 0.25, 1: 0.25, 2: 0.5})


@pytest.mark.parametrize(
    "kwargs", [{}, {"sample_by": "timestep"}, {"priority_exponent": 0.5}, {"recent_fraction": 0.5}]
)
def test_same_generator_and_files_give_the_same_windows(
    make_dataset: MakeDataset, fill: Fill, fifo: Path, kwargs: dict[str, object]
) -> None:
    fill(fifo, [3, 9, 20, 40, 7])

    def draw(seed: int) -> list[tuple[float, int]]:
        windows = make_dataset(max_seq_len=4, mode="both", **kwargs).sample_windows(
            30, np.random.default_rng(seed)
        )
        return [(float(window.obs["position"][0, 0]), len(window)) for window in windows]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_windows_of_a_file_have_their_distribution(make_dataset: MakeDataset, fill: Fill, fifo: Path) -> None:
    fill(fifo, [9])
    windows = make_dataset(max_seq_len=4, mode="both").sample_windows(6000, np.random.default_rng(0))
    found = Counter((int(window.time_idxs[0, 0]), len(window)) for window in windows)
    shares = {(0, 1): 1, (0, 2): 1, (0, 3): 1, **{(i, 4): 1 for i in range(6)}, (6, 3): 1, (7, 2): 1}
    assert found.keys() == shares.keys()
    for count in found.values():
        assert abs(count / 6000 - 1 / 11) < 5 * np.sqrt(1 / 11 * 10 / 11 / 6000)


def test_frequencies_follow_priorities(make_dataset: MakeDataset, fill: Fill, fifo: Path) -> None:
    fill(fifo, [2] * 4)
    dataset, rng = make_dataset(priority_exponent=0.5), np.random.default_rng(0)
    assert_shares(file_numbers(dataset.sample_windows(2000, rng)), dict.fromkeys(range(4), 0.25))
    slots = {file_numbers([window])[0]: window.source for window in dataset.sample_windows(100, rng)}
    dataset.update_priorities(
        np.array([slots[0], slots[1], slots[2], -1]), np.array([1.0, 4.0, 16.0, 1000.0])
    )
    # 3 has none yet, so it counts like 16, the highest; square roots of 1, 4, 16, 16
    found = file_numbers(dataset.sample_windows(6000, rng))
    assert_shares(found, {0: 1 / 11, 1: 2 / 11, 2: 4 / 11, 3: 4 / 11})


def test_priorities_and_lengths_multiply(make_dataset: MakeDataset, fill: Fill, fifo: Path) -> None:
    fill(fifo, [2, 8])
    dataset, rng = make_dataset(priority_exponent=1.0, sample_by="timestep"), np.random.default_rng(0)
    slots = {file_numbers([window])[0]: window.source for window in dataset.sample_windows(100, rng)}
    dataset.update_priorities(np.array([slots[0], slots[1]]), np.array([3.0, 1.0]))
    assert_shares(file_numbers(dataset.sample_windows(4000, rng)), {0: 6 / 14, 1: 8 / 14})


def test_deleted_files_take_their_priority_with_them(
    make_dataset: MakeDataset, fill: Fill, fifo: Path
) -> None:
    paths = fill(fifo, [2] * 2)
    dataset, rng = make_dataset(priority_exponent=1.0), np.random.default_rng(0)
    dataset.update_priorities(np.array([0, 1]), np.array([0.0, 5.0]))
    assert set(file_numbers(dataset.sample_windows(200, rng))) == {1}
    paths[0].unlink()
    dataset.refresh()
    fill(fifo, [2] * 2)
    dataset.refresh()
    assert_shares(file_numbers(dataset.sample_windows(1000, rng)), {0: 0.5, 1: 0.5})


def _set_priority(dataset: DiskTrajDataset) -> None:
    dataset.update_priorities(np.array([0, 1]), np.array([0.0, 1.0]))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_priorities_of_another_process_are_seen(
    make_dataset: MakeDataset, fill: Fill, fifo: Path, method: str
) -> None:
    fill(fifo, [2] * 2)
    dataset, rng = make_dataset(priority_exponent=1.0), np.random.default_rng(0)
    assert set(file_numbers(dataset.sample_windows(100, rng))) == {0, 1}
    process = multiprocessing.get_context(method).Process(target=_set_priority, args=(dataset,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert set(file_numbers(dataset.sample_windows(100, rng))) == {1}


def test_priorities_survive_a_checkpoint_and_a_copy(
    make_dataset: MakeDataset, fill: Fill, fifo: Path
) -> None:
    fill(fifo, [2] * 3)
    dataset = make_dataset(priority_exponent=0.5)
    assert dataset.state_dict()["priorities"] == {"highest": 0, "of": {}}
    dataset.update_priorities(np.array([0, 1, 77]), np.array([4.0, 1.0, 9.0]))
    state = dataset.state_dict()
    assert state["priorities"]["of"] == {"00000000": pytest.approx(4.0), "00000001": pytest.approx(1.0)}
    assert state["priorities"]["highest"] == pytest.approx(9.0)
    other = make_dataset(priority_exponent=0.5)
    other.load_state_dict(state)
    for same in (other, pickle.loads(pickle.dumps(dataset))):
        found = file_numbers(same.sample_windows(4000, np.random.default_rng(0)))
        assert_shares(found, {0: 2 / 6, 1: 1 / 6, 2: 3 / 6})
    assert "priorities" not in make_dataset().state_dict()


def test_windows_have_no_source_without_priorities(make_dataset: MakeDataset, fill: Fill, fifo: Path) -> None:
    fill(fifo, [2])
    dataset = make_dataset()
    assert dataset.sample_random_trajectory(np.random.default_rng(0)).source == -1
    with pytest.raises(ValueError, match=r"keeps no priorities.*Fix: set .*priority_exponent"):
        dataset.update_priorities(np.array([0]), np.array([1.0]))


@pytest.mark.parametrize(
    ("slots", "priorities", "text"),
    [
        ([0], [1.0, 2.0], r"int64\[1\] and priorities \[2\]"),
        ([0.5], [1.0], r"float64\[1\]"),
        ([0, 1], [1.0, np.nan], "finite"),
        ([0], [-1.0], "from -1.0"),
        ([2**20], [1.0], "below 1048576"),
    ],
)
def test_impossible_priorities_are_refused(
    make_dataset: MakeDataset, slots: list[float], priorities: list[float], text: str
) -> None:
    dataset = make_dataset(priority_exponent=1.0)
    with pytest.raises(ValueError, match=rf"{text}[\s\S]*Fix:"):
        dataset.update_priorities(np.array(slots), np.array(priorities))


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"sample_by": "timesteps"}, r"sample_by is 'timesteps'.*= 'timestep'"),
        ({"recent_fraction": 0.0}, r"recent_fraction is 0.0"),
        ({"recent_fraction": 1.5}, r"recent_fraction is 1.5"),
        ({"priority_exponent": 0.0}, r"priority_exponent is 0.0"),
        ({"dset_max_bytes": 0}, r"dset_max_bytes is 0"),
        ({"dset_max_timesteps": -1}, r"dset_max_timesteps is -1"),
    ],
)
def test_impossible_settings_are_refused(kwargs: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=rf"{text}.*Fix:|{text}"):
        DiskTrajDataset(**kwargs)


class LastTwo(Relabeler):
    """Keeps the last two transitions, and says how long the whole was."""

    def relabel(self, traj: Trajectory, rng: np.random.Generator) -> Trajectory:
        part = traj.slice(len(traj) - 2, len(traj))
        return Trajectory(**{**part.__dict__, "rews": np.full((2, 1), len(traj), np.float32)})


def test_relabeler_sees_whole_trajectories(make_dataset: MakeDataset, fill: Fill, fifo: Path) -> None:
    fill(fifo, [30])
    dataset = make_dataset(max_seq_len=1, relabeler=LastTwo(), priority_exponent=1.0)
    windows = dataset.sample_windows(50, np.random.default_rng(0))
    assert {int(window.time_idxs[0, 0]) for window in windows} == {28, 29}
    assert {(len(window), float(window.rews[0, 0]), window.source) for window in windows} == {(1, 30.0, 0)}


def test_a_relabelled_trajectory_drops_what_no_policy_saw(
    make_dataset: MakeDataset, make_traj: Callable[..., Trajectory], fifo: Path
) -> None:
    extras = {name: np.zeros((4, 1)) for name in ("log_probs", "values", "raw_rewards", "option")}
    traj = dataclasses.replace(make_traj(4), extras=extras)
    fifo.mkdir(parents=True)
    save_trajectory(fifo, traj, save_as="npz", traj_id="0", unix_time=1e9)
    for relabeler, kept in ((NoOpRelabeler(), set(extras)), (LastTwo(), {"option"})):
        dataset = make_dataset(relabeler=relabeler)
        assert dataset.sample_random_trajectory(np.random.default_rng(0)).extras.keys() == kept
        dataset.close()
