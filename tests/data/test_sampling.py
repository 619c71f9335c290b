"""Sampling of trajectories and windows: by trajectory, timestep, priority or a custom rule."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gin
import numpy as np
import pytest

from loxodon.data import (
    DiskTrajDataset,
    MemoryTrajDataset,
    NoOpRelabeler,
    PrioritySampler,
    Relabeler,
    Sampler,
    Trajectory,
    load_trajectory,
    save_trajectory,
)

Fill = Callable[[Path, list[int]], list[Path]]
MakeDataset = Callable[..., DiskTrajDataset]


def file_numbers(windows: list[Trajectory]) -> list[int]:
    """The index of the file of `fill` that each window comes from."""
    return [int(window.obs["position"][0, 0]) // 1000 for window in windows]


def assert_shares(found: Sequence[object], shares: Mapping[Any, float]) -> None:
    """Compare frequencies with probabilities, within five standard deviations."""
    counts, num_draws = Counter(found), len(found)
    assert counts.keys() == {number for number, share in shares.items() if share}
    for number, share in shares.items():
        error = 5 * np.sqrt(share * (1 - share) / num_draws)
        assert abs(counts[number] / num_draws - share) <= error, (number, counts[number] / num_draws, share)


# --- windows -------------------------------------------------------------------------------------------


def window_shares(traj_len: int, max_seq_len: int, mode: str) -> dict[tuple[int, int], float]:
    """The probability of each (start, length): all starts that the definition allows are equally likely."""
    if mode == "shifted":
        cut = window_shares(traj_len, max_seq_len, "both")
        inside: dict[tuple[int, int], float] = defaultdict(float)
        for (start, length), share in cut.items():
            inside[start if start + length < traj_len else traj_len - max_seq_len, max_seq_len] += share
        return dict(inside)
    first = -max_seq_len + 1 if mode in ("left", "both") else 0
    last = traj_len - (min(max_seq_len, 2) if mode in ("right", "both") else max_seq_len)
    spans = [(max(start, 0), min(start + max_seq_len, traj_len)) for start in range(first, last + 1)]
    counts = Counter((start, stop - start) for start, stop in spans)
    return {window: count / len(spans) for window, count in counts.items()}


def test_windows_counted_by_hand() -> None:
    """A trajectory has 6 transitions, and a window 3: each mode allows these windows."""
    inside = {(0, 3), (1, 3), (2, 3), (3, 3)}
    assert window_shares(6, 3, "none").keys() == inside
    assert window_shares(6, 3, "left").keys() == inside | {(0, 1), (0, 2)}
    assert window_shares(6, 3, "right").keys() == inside | {(4, 2)}
    assert window_shares(6, 3, "both").keys() == inside | {(0, 1), (0, 2), (4, 2)}
    shares = window_shares(6, 3, "shifted")
    assert {window: round(7 * share) for window, share in shares.items()} == {
        (0, 3): 3,
        (1, 3): 1,
        (2, 3): 1,
        (3, 3): 2,
    }


@pytest.mark.parametrize("mode", ["none", "left", "right", "both", "shifted"])
def test_windows_of_a_file_have_exactly_their_distribution(
    make_dataset: MakeDataset, fill: Fill, fifo: Path, mode: str
) -> None:
    fill(fifo, [9])
    windows = make_dataset(max_seq_len=4, mode=mode).sample_windows(4000, np.random.default_rng(0))
    found = [(int(window.time_idxs[0, 0]), len(window)) for window in windows]
    assert_shares(found, window_shares(9, 4, mode))
    sampler = Sampler()
    for length, max_seq_len in ((5, 4), (2, 1), (6, 1)):
        sampler.configure(max_seq_len=max_seq_len, padded_sampling=mode)
        spans = [sampler.window(length, fraction) for fraction in np.linspace(0, 1, 2000, endpoint=False)]
        assert_shares([(a, b - a) for a, b in spans], window_shares(length, max_seq_len, mode))
    sampler.configure(max_seq_len=4, padded_sampling=mode)
    # the whole trajectory fits
    assert {sampler.window(n, 0.9) for n in (1, 2, 4)} == {(0, 1), (0, 2), (0, 4)}


# --- trajectories --------------------------------------------------------------------------------------


class LastTimestep(Sampler):
    """Draws in proportion to the last observation, and only the last timestep."""

    needs_values = True

    def value(self, traj: Trajectory) -> float:
        return float(traj.obs["position"][-1, 0])

    def window(self, length: int, fraction: float) -> tuple[int, int]:
        return length - 1, length


@pytest.mark.parametrize(
    ("lengths", "make_sampler", "shares"),
    [
        ([2, 4, 100], Sampler, {0: 1 / 3, 1: 1 / 3, 2: 1 / 3}),
        ([2, 6, 12], lambda: Sampler("timestep"), {0: 0.1, 1: 0.3, 2: 0.6}),
        ([2] * 10, lambda: Sampler(recent_fraction=0.25), {7: 1 / 3, 8: 1 / 3, 9: 1 / 3}),
        ([2] * 3, lambda: Sampler(recent_fraction=0.01), {2: 1.0}),
        ([50, 50, 2, 8], lambda: Sampler("timestep", 0.5), {2: 0.2, 3: 0.8}),
        ([998, 2, 2], LastTimestep, {0: 998 / 4002, 1: 1002 / 4002, 2: 2002 / 4002}),
    ],
)
def test_trajectories_are_drawn_by_the_rule_of_the_sampler(
    make_dataset: MakeDataset,
    fill: Fill,
    fifo: Path,
    lengths: list[int],
    make_sampler: Callable[[], Sampler],
    shares: dict[object, float],
) -> None:
    fill(fifo, lengths[:1])
    on_disk = make_dataset(max_seq_len=2, sampler=make_sampler())
    paths = fill(fifo, lengths)  # new files count after a refresh
    on_disk.refresh()
    in_memory = MemoryTrajDataset([load_trajectory(path) for path in paths], sampler=make_sampler())
    for dataset in (on_disk, make_dataset(in_memory, max_seq_len=2)):
        windows = dataset.sample_windows(3000, np.random.default_rng(0))
        assert_shares(file_numbers(windows), shares)
        assert make_sampler is not LastTimestep or all(
            window.dones.tolist() == [[True]] for window in windows
        )


def test_a_sampler_can_read_the_observations_of_a_large_file(
    make_dataset: MakeDataset, fill: Fill, fifo: Path
) -> None:
    fill(fifo, [9_998, 10_000])  # large files are not read as a whole
    windows = make_dataset(sampler=LastTimestep()).sample_windows(2000, np.random.default_rng(0))
    last = [int(window.obs["position"][-1, 0]) for window in windows]
    assert_shares(last, {9_998: 9_998 / 20_998, 11_000: 11_000 / 20_998})


def test_one_line_of_gin_gives_every_dataset_its_own_sampler() -> None:
    gin.clear_config()
    gin.parse_config("RLDataset.sampler = @PrioritySampler()\ndemos/RLDataset.sampler = None")
    gin.parse_config("PrioritySampler.exponent = 0.9\nSampler.sample_by = 'timestep'")
    samplers = [DiskTrajDataset().sampler, MemoryTrajDataset().sampler]
    assert [(type(sampler), sampler.sample_by) for sampler in samplers] == [(PrioritySampler, "timestep")] * 2
    assert samplers[0] is not samplers[1]
    with gin.config_scope("demos"):
        assert type(DiskTrajDataset().sampler) is Sampler
    gin.clear_config()


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [0.0, 0.0], [1.0, np.nan], []])
def test_impossible_weights_are_refused(
    make_dataset: MakeDataset, fill: Fill, fifo: Path, weights: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(fifo, [2, 2])
    monkeypatch.setattr(LastTimestep, "weights", lambda *_: np.array(weights))
    dataset = make_dataset(sampler=LastTimestep())
    with pytest.raises(
        ValueError, match=r"LastTimestep.weights returned .* must return \(2,\).*Fix: correct"
    ):
        dataset.sample_random_trajectory(np.random.default_rng(0))


@pytest.mark.parametrize("make_sampler", [Sampler, lambda: Sampler("timestep"), PrioritySampler])
def test_the_same_generator_and_files_give_the_same_windows(
    make_dataset: MakeDataset, fill: Fill, fifo: Path, make_sampler: Callable[[], Sampler]
) -> None:
    fill(fifo, [3, 9, 20, 40, 7])

    def draw(seed: int) -> list[tuple[float, int]]:
        dataset = make_dataset(max_seq_len=4, mode="both", sampler=make_sampler())
        windows = dataset.sample_windows(30, np.random.default_rng(seed))
        return [(float(window.obs["position"][0, 0]), len(window)) for window in windows]

    assert draw(1) == draw(1) != draw(2)


# --- priorities ----------------------------------------------------------------------------------------


def test_frequencies_follow_priorities(make_dataset: MakeDataset, fill: Fill, fifo: Path) -> None:
    fill(fifo, [2] * 4)
    dataset, rng = make_dataset(sampler=PrioritySampler(0.5)), np.random.default_rng(0)
    windows = dataset.sample_windows(2000, rng)
    assert_shares(file_numbers(windows), dict.fromkeys(range(4), 0.25))
    slots = dict(zip(file_numbers(windows), [window.priority_slot for window in windows], strict=True))
    given = np.array([slots[0], slots[1], slots[2], -1])
    dataset.sampler.update_priorities(given, np.array([1.0, 4.0, 16.0, 1000.0]))
    # File 3 has no priority yet, so it counts like the highest, 16; the square roots are 1, 2, 4 and 4.
    shares = {0: 1 / 11, 1: 2 / 11, 2: 4 / 11, 3: 4 / 11}
    assert_shares(file_numbers(dataset.sample_windows(6000, rng)), shares)
    state = dataset.state_dict()
    assert state["sampler"]["sources"] == [0, 1, 2]
    assert state["sampler"]["priorities"] == pytest.approx([1.0, 4.0, 16.0])
    other = make_dataset(sampler=PrioritySampler(0.5))
    other.load_state_dict(state)
    assert_shares(file_numbers(other.sample_windows(6000, rng)), shares)


def test_the_highest_priority_ever_given_is_restored(
    make_dataset: MakeDataset, fill: Fill, fifo: Path
) -> None:
    fill(fifo, [2] * 2)
    dataset, rng = make_dataset(sampler=PrioritySampler(1.0)), np.random.default_rng(0)
    for highest in (9.0, 1.0):
        dataset.sampler.update_priorities(np.array([0, 1]), np.array([highest, 1.0]))
    other = make_dataset(sampler=PrioritySampler(1.0))
    other.load_state_dict(dataset.state_dict())
    fill(fifo, [2] * 3)
    other.refresh()
    assert_shares(file_numbers(other.sample_windows(4000, rng)), {0: 1 / 11, 1: 1 / 11, 2: 9 / 11})


def test_priorities_and_lengths_multiply_and_priorities_follow_their_files(
    make_dataset: MakeDataset, fill: Fill, fifo: Path
) -> None:
    paths = fill(fifo, [2, 8])
    by_both = PrioritySampler(1.0)
    by_both.sample_by = "timestep"
    dataset, rng = make_dataset(sampler=by_both), np.random.default_rng(0)
    dataset.sampler.update_priorities(np.array([0, 1]), np.array([3.0, 1.0]))
    assert_shares(file_numbers(dataset.sample_windows(4000, rng)), {0: 6 / 14, 1: 8 / 14})
    paths[0].unlink()
    dataset.refresh()
    fill(fifo, [2, 8])
    dataset.sampler.update_priorities(np.array([1]), np.array([3.0]))
    dataset.refresh()
    assert_shares(file_numbers(dataset.sample_windows(4000, rng)), {0: 0.2, 1: 0.8})


def test_trajectories_in_memory_keep_their_priorities_while_others_are_dropped(
    make_dataset: MakeDataset, make_traj: Callable[..., Trajectory]
) -> None:
    trajs = [make_traj(2, first=1000 * i) for i in range(3)]
    dataset: Any = make_dataset(MemoryTrajDataset(trajs, max_timesteps=6, sampler=PrioritySampler(1.0)))
    seen = {window.priority_slot for window in dataset.sample_windows(50, np.random.default_rng(0))}
    dataset.sampler.update_priorities(np.array([*seen]), np.array([8.0, 1.0, 3.0]))
    dataset.add(make_traj(2, first=3000))  # without a priority yet, it counts as 8; the first one is dropped
    windows = dataset.sample_windows(3000, np.random.default_rng(0))
    assert_shares(file_numbers(windows), {1: 1 / 12, 2: 3 / 12, 3: 8 / 12})
    assert [window.priority_slot for window in windows] == file_numbers(windows)
    assert dataset.state_dict()["sampler"]["sources"] == [1, 2]


def _set_priority(dataset: DiskTrajDataset) -> None:
    dataset.sampler.update_priorities(np.array([0, 1]), np.array([0.0, 1.0]))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_priorities_set_by_another_process_are_seen(
    make_dataset: MakeDataset, fill: Fill, fifo: Path, method: str
) -> None:
    fill(fifo, [2] * 2)
    dataset, rng = make_dataset(sampler=PrioritySampler(1.0)), np.random.default_rng(0)
    assert set(file_numbers(dataset.sample_windows(100, rng))) == {0, 1}
    process = multiprocessing.get_context(method).Process(target=_set_priority, args=(dataset,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert set(file_numbers(dataset.sample_windows(100, rng))) == {1}


def test_windows_have_no_slot_without_priorities(make_dataset: MakeDataset, fill: Fill, fifo: Path) -> None:
    fill(fifo, [2])
    dataset = make_dataset()
    assert dataset.sample_random_trajectory(np.random.default_rng(0)).priority_slot == -1
    assert dataset.state_dict()["sampler"] == {}


@pytest.mark.parametrize(
    ("kind", "setting", "value"),
    [(PrioritySampler, "exponent", 0.0)] + [(Sampler, "recent_fraction", share) for share in (0.0, 1.5)],
)
def test_impossible_settings_are_refused(kind: type[Sampler], setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{setting} is {value}.*Fix: set {kind.__name__}.{setting}"):
        kind(**{setting: value})


def test_a_broken_file_without_a_value_is_quarantined(
    make_dataset: MakeDataset, make_traj: Callable[..., Trajectory], fill: Fill, fifo: Path
) -> None:
    fill(fifo, [3])
    traj = dataclasses.replace(make_traj(3), obs={**make_traj(3).obs, "position": np.full((4, 1), np.nan)})
    broken = save_trajectory(fifo, traj, save_as="npz", traj_id="f", unix_time=2e9)
    dataset = make_dataset(sampler=LastTimestep())
    assert dataset.num_files == 1
    assert [path.stem for path in (fifo.parent / "quarantine").glob("*.npz")] == [broken.stem]


@pytest.mark.parametrize(
    ("slots", "priorities", "text"),
    [
        ([0], [1.0, 2.0], r"int64\[1\] up to 0 and priorities \[2\]"),
        ([0.5], [1.0], r"float64\[1\]"),
        ([0, 1], [1.0, np.nan], "finite"),
        ([0], [-1.0], "from -1.0"),
        ([2**20], [1.0], "below 1048576"),
    ],
)
def test_impossible_priorities_are_refused(
    make_dataset: MakeDataset, slots: list[float], priorities: list[float], text: str
) -> None:
    dataset = make_dataset(sampler=PrioritySampler(1.0))
    with pytest.raises(ValueError, match=rf"{text}[\s\S]*Fix:"):
        dataset.sampler.update_priorities(np.array(slots), np.array(priorities))


# --- relabelling ---------------------------------------------------------------------------------------


class LastTwo(Relabeler):
    """Keeps the last two transitions and records the length of the whole."""

    def relabel(self, traj: Trajectory, rng: np.random.Generator) -> Trajectory:
        part = traj.slice(len(traj) - 2, len(traj))
        return dataclasses.replace(part, rews=np.full((2, 1), len(traj), np.float32))


@pytest.mark.parametrize(
    ("rews", "words"),
    [(np.zeros(2), r"shape \(2,\)"), (np.full((2, 1), np.nan), "not finite"), (None, "NoneType")],
)
def test_results_of_a_relabeler_that_cannot_be_used_name_it(
    make_traj: Callable[..., Trajectory], rews: Any, words: str
) -> None:
    class Wrong(Relabeler):
        def relabel(self, traj: Trajectory, rng: np.random.Generator) -> Any:
            return None if rews is None else dataclasses.replace(traj, rews=rews)

    with pytest.raises((TypeError, ValueError), match=rf"Wrong.relabel returned .*{words}.*Fix"):
        Wrong().apply(make_traj(2), np.random.default_rng(0))


def test_an_error_of_a_relabeler_is_not_blamed_on_the_file(
    make_dataset: MakeDataset, fill: Fill, fifo: Path
) -> None:
    class Failing(Relabeler):
        def relabel(self, traj: Trajectory, rng: np.random.Generator) -> Trajectory:
            raise FileNotFoundError("goals.npz")

    fill(fifo, [2] * 2)
    dataset = make_dataset(relabeler=Failing())
    with pytest.raises(RuntimeError, match=r"Failing.relabel failed: goals.npz.*Fix:"):
        dataset.sample_windows(1, np.random.default_rng(0))
    assert dataset.num_files == 2


def test_a_relabeler_sees_whole_trajectories_and_the_extras_of_acting_are_dropped(
    make_dataset: MakeDataset, make_traj: Callable[..., Trajectory], fifo: Path
) -> None:
    extras = {name: np.zeros((30, 1)) for name in ("log_probs", "values", "raw_rewards", "option")}
    fifo.mkdir(parents=True)
    traj = dataclasses.replace(make_traj(30), extras=extras)
    save_trajectory(fifo, traj, save_as="npz", traj_id="0", unix_time=1e9)
    for relabeler, kept in ((NoOpRelabeler(), set(extras)), (LastTwo(), {"option"})):
        dataset = make_dataset(max_seq_len=1, relabeler=relabeler, sampler=PrioritySampler(1.0))
        windows = dataset.sample_windows(50, np.random.default_rng(0))
        assert all(window.extras.keys() == kept for window in windows)
        dataset.close()
    assert {window.priority_slot for window in windows} == {0}
    in_memory = make_dataset(MemoryTrajDataset([traj], relabeler=LastTwo()), max_seq_len=1)
    for found in (windows, in_memory.sample_windows(50, np.random.default_rng(0))):
        assert {int(window.time_idxs[0, 0]) for window in found} == {28, 29}
        assert {(len(window), float(window.rews[0, 0])) for window in found} == {(1, 30.0)}
        assert all(window.extras.keys() == {"option"} for window in found)
