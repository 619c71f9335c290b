from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loxodon.data import (
    DiskTrajDataset,
    Layout,
    MixtureOfDatasets,
    PrioritySampler,
    RLDataset,
    Sampler,
    Trajectory,
)

MakeDataset = Callable[..., RLDataset]
MakeTraj = Callable[..., Trajectory]
Fill = Callable[[Path, list[int]], list[Path]]


class FakeDataset(RLDataset):
    """A dataset whose readiness is set by the test; it records the calls that reach it."""

    def __init__(self, traj: Trajectory, *, ready: bool = True) -> None:
        self.traj, self.ready, self.calls = traj, ready, list[Any]()

    @property
    def ready_for_training(self) -> bool:
        return self.ready

    def sample_random_trajectory(self, rng: np.random.Generator) -> Trajectory:
        return self.traj

    def expect(self, layout: Layout) -> None:
        self.calls.append("expect")

    def on_new_epoch(self, epoch: int) -> None:
        self.calls.append(epoch)

    def refresh(self) -> None:
        self.calls.append("refresh")

    def delete(self) -> None:
        self.calls.append("delete")

    def close(self) -> None:
        self.calls.append("close")

    def metrics(self) -> dict[str, float]:
        return {"x": 1.0}


def test_priorities_that_nobody_would_update_are_refused() -> None:
    datasets = [DiskTrajDataset(), DiskTrajDataset(sampler=PrioritySampler())]
    with pytest.raises(ValueError, match=r"datasets\[1\] has a PrioritySampler, but.*Fix: use Sampler"):
        MixtureOfDatasets(datasets, [1.0, 1.0])


def test_datasets_may_not_share_a_sampler() -> None:
    sampler = Sampler()
    with pytest.raises(ValueError, match=r"the same sampler object.*Fix: make a sampler for each"):
        MixtureOfDatasets([DiskTrajDataset(sampler=sampler) for _ in range(2)], [1.0, 1.0])


def test_an_empty_part_is_named_when_a_run_starts(
    children: list[FakeDataset], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    part = DiskTrajDataset(dset_name="nothere", takes_new_trajs=False)
    mixture = MixtureOfDatasets([children[0], part], [1, 1])
    mixture.configure(
        max_seq_len=4,
        padded_sampling="none",
        has_edit_rights=False,
        default_root=str(tmp_path),
        default_name="a",
    )
    mixture.on_run_start()
    assert f"the folder {tmp_path}/nothere/buffer does not exist. Until it is ready" in caplog.text


def shares(mixture: MixtureOfDatasets, count: int = 3000) -> list[float]:
    """The share of each child among many windows; child i observes positions from 1000 * i on."""
    windows = mixture.sample_windows(count, np.random.default_rng(0))
    sources = [int(window.obs["position"][0, 0]) // 1000 for window in windows]
    return (np.bincount(sources, minlength=len(mixture.datasets)) / count).tolist()


@pytest.fixture
def children(make_traj: MakeTraj) -> list[FakeDataset]:
    return [FakeDataset(make_traj(3, first=1000 * i)) for i in range(3)]


def test_weights_are_distributed_among_the_ready_datasets(children: list[FakeDataset]) -> None:
    mixture = MixtureOfDatasets(children, [2, 1, 1])
    assert mixture.current_weights().tolist() == [0.5, 0.25, 0.25]
    assert shares(mixture) == pytest.approx([0.5, 0.25, 0.25], abs=0.03)
    assert mixture.metrics()["0-FakeDataset/weight"] == 0.5
    # every window of a batch is drawn on its own
    windows = mixture.sample_windows(60, np.random.default_rng(0))
    sources = [int(window.obs["position"][0, 0]) // 1000 for window in windows]
    assert set(sources[:20]) == set(sources[20:40]) == {0, 1, 2}
    children[0].ready = False
    assert shares(mixture) == pytest.approx([0, 0.5, 0.5], abs=0.03)
    assert mixture.ready_for_training
    for child in children:
        child.ready = False
    assert not mixture.ready_for_training
    with pytest.raises(ValueError, match=r"None of the 3 datasets .*Fix:"):
        mixture.sample_random_trajectory(np.random.default_rng(0))


@pytest.mark.parametrize(
    ("final", "initial", "num_epochs", "expected"),
    [
        (3, [1, 1], 4, {0: 0, 4: 0, 5: 1.5, 6: 2, 7: 2.5, 8: 3, 50: 3}),  # 1 + (3 - 1) * (e - 5 + 1) / 4
        (1, None, 2, {0: 0, 4: 0, 5: 0.5, 6: 1, 7: 1}),  # the initial weight is zero by default
    ],
)
def test_a_weight_grows_from_the_epoch_in_which_its_dataset_became_ready(
    children: list[FakeDataset], final: float, initial: Any, num_epochs: int, expected: dict[int, float]
) -> None:
    first, late, _ = children
    late.ready = False
    mixture = MixtureOfDatasets([first, late], [1, final], num_epochs, initial)
    for epoch, weight in expected.items():
        late.ready = epoch >= 5
        mixture.on_new_epoch(epoch)
        np.testing.assert_allclose(mixture.current_weights(), [1 / (1 + weight), weight / (1 + weight)])
    assert first.calls == list(expected)


def test_a_resumed_ramp_continues(children: list[FakeDataset]) -> None:
    def make() -> MixtureOfDatasets:
        return MixtureOfDatasets(children[:2], [1, 1], smooth_sudden_starts=10)

    original, resumed, fresh = make(), make(), make()
    children[1].ready = False
    original.on_new_epoch(0)
    children[1].ready = True
    original.on_new_epoch(3)
    resumed.load_state_dict(json.loads(json.dumps(original.state_dict())))
    for mixture in (original, resumed, fresh):
        mixture.on_new_epoch(6)
    assert resumed.current_weights().tolist() == original.current_weights().tolist()
    assert fresh.current_weights().tolist() != original.current_weights().tolist()
    with pytest.raises(ValueError, match=r"mixture of 2 datasets, but this run has 3.*Fix:"):
        MixtureOfDatasets(children, [1, 1, 1]).check_state(original.state_dict())


def test_hooks_are_passed_on_but_only_collected_files_are_deleted(
    make_dataset: MakeDataset, make_traj: MakeTraj, children: list[FakeDataset], fill: Fill, tmp_path: Path
) -> None:
    offline = DiskTrajDataset(dset_root=str(tmp_path), dset_name="demos", takes_new_trajs=False)
    online = DiskTrajDataset()
    fill(tmp_path / "demos/buffer/fifo", [3, 3])
    fill(tmp_path / "set/buffer/fifo", [3])
    mixture = MixtureOfDatasets([children[0], offline, online], [1, 1, 1])
    make_dataset(mixture)
    assert mixture.save_new_trajs_to == tmp_path / "set/buffer/fifo"
    mixture.expect(make_traj(3).layout)
    mixture.refresh()
    assert mixture.on_end_of_collection()["1-demos/total_files"] == 2
    assert mixture.metrics()["0-FakeDataset/x"] == 1
    state = mixture.state_dict()
    for folder in ("demos", "set"):
        fill(tmp_path / folder / "buffer/fifo", [3] * 5)
    assert mixture.set_aside_newer(state) == 4
    assert mixture.begin_new_run() == 1
    mixture.delete()
    mixture.close()
    assert children[0].calls == ["expect", "refresh", "refresh", "close"]
    assert (offline.num_files, online.num_files) == (2, 0)


def test_two_datasets_may_not_share_a_folder_or_collected_data(
    make_dataset: MakeDataset, tmp_path: Path
) -> None:
    mixture = MixtureOfDatasets([DiskTrajDataset(), DiskTrajDataset()], [1, 1])
    with pytest.raises(ValueError, match=r"0-DiskTrajDataset and 1-DiskTrajDataset .*both lie in .*Fix:"):
        make_dataset(mixture)
    named = DiskTrajDataset(dset_root=str(tmp_path), dset_name="set", takes_new_trajs=False)
    with pytest.raises(ValueError, match=r"0-DiskTrajDataset and 1-set .*both lie in"):
        make_dataset(MixtureOfDatasets([DiskTrajDataset(), named], [1, 1]))
    mixture = MixtureOfDatasets([DiskTrajDataset(), DiskTrajDataset(dset_name="demos")], [1, 1])
    with pytest.raises(ValueError, match=r"0-DiskTrajDataset \(.*1-demos \(.*takes_new_trajs = False"):
        make_dataset(mixture)
    mixture.close()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"sampling_weights": [1]}, r"sampling_weights \[1\]"),
        ({"sampling_weights": [1, 0]}, "above 0"),
        ({"sampling_weights": [1, float("nan")]}, "above 0"),
        ({"sampling_weights": [1, 1], "initial_sampling_weights": [1, -1]}, "at least 0"),
        ({"sampling_weights": [1, 1], "smooth_sudden_starts": 0}, "smooth_sudden_starts is 0"),
        ({"datasets": [], "sampling_weights": []}, "datasets is empty"),
    ],
)
def test_wrong_weights_are_refused(children: list[FakeDataset], arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s){text}.*Fix:"):
        MixtureOfDatasets(**{"datasets": children[:2], **arguments})

    with pytest.raises(TypeError, match=r"datasets\[0\] is .*parentheses"):
        MixtureOfDatasets([DiskTrajDataset], [1])  # type: ignore[list-item]
