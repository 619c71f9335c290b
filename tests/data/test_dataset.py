from __future__ import annotations

import gc
import json
import logging
import os
import pickle
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loxodon.data import DiskTrajDataset, DoNothingDataset, RLDataset, Trajectory, random_window
from loxodon.data.buffer import Buffer

Fill = Callable[[Path, list[int]], list[Path]]
MakeDataset = Callable[..., DiskTrajDataset]
ROOT = Path(__file__).resolve().parents[2]


def all_windows(traj_len: int, max_seq_len: int, mode: str) -> Counter[tuple[int, int]]:
    """How many of the equally likely starts lead to each window, straight from the definition."""
    first = -max_seq_len + 1 if mode in ("left", "both") else 0
    last = traj_len - 2 if mode in ("right", "both") else traj_len - max_seq_len
    return Counter((max(start, 0), min(start + max_seq_len, traj_len)) for start in range(first, last + 1))


@pytest.mark.parametrize("mode", ["none", "left", "right", "both"])
@pytest.mark.parametrize(("traj_len", "max_seq_len"), [(9, 4), (5, 4), (2, 1), (6, 1)])
def test_windows_have_exactly_their_distribution(mode: str, traj_len: int, max_seq_len: int) -> None:
    rng, num_draws = np.random.default_rng(0), 4000
    drawn = Counter(random_window(traj_len, max_seq_len, mode, rng) for _ in range(num_draws))
    expected = all_windows(traj_len, max_seq_len, mode)
    assert drawn.keys() == expected.keys()
    for window, count in expected.items():
        share = count / expected.total()
        assert abs(drawn[window] / num_draws - share) < 5 * np.sqrt(share * (1 - share) / num_draws) + 1e-9


def test_hand_counted_windows() -> None:
    """6 transitions, windows of 3: what each mode can draw."""
    assert set(all_windows(6, 3, "none")) == {(0, 3), (1, 4), (2, 5), (3, 6)}
    assert set(all_windows(6, 3, "left")) == {(0, 1), (0, 2), (0, 3), (1, 4), (2, 5), (3, 6)}
    assert set(all_windows(6, 3, "right")) == {(0, 3), (1, 4), (2, 5), (3, 6), (4, 6)}
    assert set(all_windows(6, 3, "both")) == {(0, 1), (0, 2), (0, 3), (1, 4), (2, 5), (3, 6), (4, 6)}


@settings(deadline=None)
@given(
    traj_len=st.integers(1, 50),
    max_seq_len=st.integers(1, 60),
    mode=st.sampled_from(["none", "left", "right", "both"]),
    seed=st.integers(0, 99),
)
def test_windows_lie_inside_the_trajectory(traj_len: int, max_seq_len: int, mode: str, seed: int) -> None:
    start, stop = random_window(traj_len, max_seq_len, mode, np.random.default_rng(seed))
    assert 0 <= start < stop <= traj_len
    assert stop - start <= max_seq_len
    if traj_len <= max_seq_len:
        assert (start, stop) == (0, traj_len)
    elif mode == "none":
        assert stop - start == max_seq_len


def test_impossible_settings_are_refused(make_dataset: MakeDataset) -> None:
    with pytest.raises(ValueError, match=r"padded_sampling is 'rigth'.*Fix: set .* = 'right'"):
        make_dataset(mode="rigth")
    with pytest.raises(ValueError, match=r"max_seq_len is 0.*Fix:"):
        make_dataset(max_seq_len=0)
    with pytest.raises(ValueError, match=r"dset_min_size is 5 and dset_max_size 4.*Fix:"):
        DiskTrajDataset(dset_min_size=5, dset_max_size=4)
    with pytest.raises(ValueError, match=r"Fix: call configure"):
        DiskTrajDataset().refresh()


def test_files_are_sampled_uniformly_whatever_their_length(make_dataset: MakeDataset, fill: Fill) -> None:
    dataset = make_dataset(max_seq_len=4)
    assert dataset.save_new_trajs_to is not None
    fill(dataset.save_new_trajs_to, [2, 4, 100])
    dataset.refresh()
    rng = np.random.default_rng(0)
    windows = [dataset.sample_random_trajectory(rng) for _ in range(1500)]
    shares = Counter(int(window.obs["position"][0, 0]) // 1000 for window in windows)
    assert all(abs(shares[i] / 1500 - 1 / 3) < 0.06 for i in range(3))
    assert {len(window) for window in windows} == {2, 4}


def test_folder_is_where_the_user_or_the_run_says(tmp_path: Path, make_dataset: MakeDataset) -> None:
    assert make_dataset().save_new_trajs_to == tmp_path / "set" / "buffer" / "fifo"
    named = make_dataset(dset_root=str(tmp_path / "r"), dset_name="n")
    assert named.save_new_trajs_to == tmp_path / "r" / "n" / "buffer" / "fifo"
    assert (tmp_path / "r" / "n" / "buffer" / "protected").is_dir()


def test_unusable_root_is_named(tmp_path: Path, make_dataset: MakeDataset) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"cannot be made.*Fix: set DiskTrajDataset.dset_root"):
        make_dataset(dset_root=str(tmp_path / "file"))


def test_dataset_becomes_ready_at_its_minimum(make_dataset: MakeDataset, fill: Fill, tmp_path: Path) -> None:
    dataset = make_dataset(dset_min_size=3)
    fill(tmp_path / "set/buffer/fifo", [2, 2])
    dataset.refresh()
    assert not dataset.ready_for_training
    fill(tmp_path / "set/buffer/protected", [2])
    dataset.refresh()
    assert dataset.ready_for_training
    assert dataset.num_files == 3


def test_oldest_by_name_go_first_and_protected_never(
    make_dataset: MakeDataset, fill: Fill, tmp_path: Path
) -> None:
    dataset = make_dataset(dset_max_size=2)
    fifo = fill(tmp_path / "set/buffer/fifo", [2] * 5)
    protected = fill(tmp_path / "set/buffer/protected", [2] * 4)
    os.utime(fifo[0])  # young on disk, but old by name
    metrics = dataset.on_end_of_collection()
    assert sorted((tmp_path / "set/buffer/fifo").iterdir()) == fifo[3:]
    assert sorted((tmp_path / "set/buffer/protected").iterdir()) == protected
    sizes = sum(path.stat().st_size for path in (*fifo[3:], *protected))
    assert metrics == {
        "fifo_files": 2,
        "protected_files": 4,
        "total_files": 6,
        "deleted_files": 3,
        "disk_gb": pytest.approx(sizes / 1e9),
        "broken_files": 0,
        "quarantined_files": 0,
    }
    assert dataset.on_end_of_collection()["deleted_files"] == 0


def test_without_edit_rights_nothing_is_touched(
    make_dataset: MakeDataset, fill: Fill, tmp_path: Path
) -> None:
    dataset = make_dataset(dset_max_size=2, edit=False)
    fill(tmp_path / "set/buffer/fifo", [2] * 5)
    assert dataset.on_end_of_collection()["total_files"] == 5
    with pytest.raises(ValueError, match=r"no edit rights.*deleting.*Fix:"):
        dataset.delete()
    with pytest.raises(ValueError, match=r"no edit rights.*aside.*Fix:"):
        dataset.set_aside_newer(dataset.state_dict())


def test_delete_empties_fifo_only(make_dataset: MakeDataset, fill: Fill, tmp_path: Path) -> None:
    dataset = make_dataset()
    fill(tmp_path / "set/buffer/fifo", [2] * 3)
    fill(tmp_path / "set/buffer/protected", [2])
    dataset.delete()
    assert not list((tmp_path / "set/buffer/fifo").iterdir())
    assert dataset.num_files == 1


def test_temporary_and_foreign_files_are_ignored(
    make_dataset: MakeDataset, fill: Fill, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = make_dataset()
    fifo = tmp_path / "set/buffer/fifo"
    fill(fifo, [2])
    (fifo / "env_0123abcd_1700000000.0.npz.tmp").write_bytes(b"half")
    dataset.refresh()
    assert not caplog.records
    for name in ("notes.txt", "odd.npz"):
        (fifo / name).write_bytes(b"not mine")
    with caplog.at_level(logging.WARNING, logger="loxodon"):
        dataset.refresh()
        dataset.refresh()
    assert dataset.num_files == 1
    assert len(caplog.records) == 1
    assert "Fix: rename it" in caplog.text


def test_temporary_files_of_killed_writers_go_after_an_hour(
    make_dataset: MakeDataset, tmp_path: Path
) -> None:
    dataset = make_dataset()
    old, young = (tmp_path / "set/buffer/fifo" / name for name in ("a.npz.tmp", "b.npz.tmp"))
    old.touch()
    young.touch()
    os.utime(old, (time.time() - 4000, time.time() - 4000))
    dataset.on_end_of_collection()
    assert (old.exists(), young.exists()) == (False, True)


@pytest.mark.parametrize("is_opened", [True, False])
def test_vanished_file_is_replaced_by_another_draw(
    make_dataset: MakeDataset, fill: Fill, tmp_path: Path, is_opened: bool
) -> None:
    dataset = make_dataset()
    paths = fill(tmp_path / "set/buffer/fifo", [2, 2])
    dataset.refresh()
    rng = np.random.default_rng(0)
    if is_opened:
        for _ in range(20):
            dataset.sample_random_trajectory(rng)
    paths[0].unlink()
    if is_opened:  # an opened file is let go of when the folder is listed again
        dataset.refresh()
    assert {int(dataset.sample_random_trajectory(rng).obs["position"][0, 0]) for _ in range(20)} == {1000}
    assert dataset.num_files == 1


def test_sampling_from_nothing_says_where_it_looked(make_dataset: MakeDataset) -> None:
    with pytest.raises(ValueError, match=r"set/buffer holds no trajectories.*Fix: collect first"):
        make_dataset().sample_random_trajectory(np.random.default_rng(0))


def test_newer_files_are_set_aside(make_dataset: MakeDataset, fill: Fill, tmp_path: Path) -> None:
    dataset, fifo = make_dataset(), tmp_path / "set/buffer/fifo"
    paths = fill(fifo, [2] * 3)
    fill(tmp_path / "set/buffer/protected", [2] * 5)
    dataset.refresh()
    state = json.loads(json.dumps(dataset.state_dict()))
    fill(fifo, [2] * 5)
    assert dataset.set_aside_newer(state) == 2
    assert sorted(fifo.iterdir()) == paths
    assert len(list((tmp_path / "set/buffer/superseded").iterdir())) == 2
    assert dataset.num_files == 8
    assert dataset.state_dict() == state


def test_state_of_an_empty_folder_sets_everything_aside(
    make_dataset: MakeDataset, fill: Fill, tmp_path: Path
) -> None:
    dataset = make_dataset()
    state = dataset.state_dict()
    fill(tmp_path / "set/buffer/fifo", [2] * 2)
    assert dataset.set_aside_newer(state) == 2
    assert dataset.num_files == 0


@pytest.mark.parametrize(("name", "num_hidden"), [(None, 2), ("demos", 0)])
def test_a_new_run_hides_what_its_own_folder_holds_but_not_a_chosen_dataset(
    fill: Fill, tmp_path: Path, name: str | None, num_hidden: int
) -> None:
    dataset = DiskTrajDataset(dset_name=name)
    dataset.configure(
        max_seq_len=5,
        padded_sampling="none",
        has_edit_rights=True,
        default_root=str(tmp_path),
        default_name="run",
    )
    fill(tmp_path / (name or "run") / "buffer/fifo", [2] * 2)
    fill(tmp_path / (name or "run") / "buffer/protected", [2])
    assert dataset.begin_new_run() == num_hidden
    dataset.refresh()
    assert dataset.num_files == 3 - num_hidden


def test_files_lost_since_the_checkpoint_are_told(
    make_dataset: MakeDataset, fill: Fill, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = make_dataset()
    paths = fill(tmp_path / "set/buffer/fifo", [2] * 3)
    dataset.refresh()
    state = dataset.state_dict()
    paths[0].unlink()
    with caplog.at_level(logging.WARNING, logger="loxodon"):
        dataset.load_state_dict(state)
        dataset.set_aside_newer(state)
    assert "1 trajectories that the checkpoint was trained on" in caplog.text


def test_dataset_travels_without_its_open_files(
    make_dataset: MakeDataset, fill: Fill, tmp_path: Path
) -> None:
    fill(tmp_path / "set/buffer/fifo", [30_000] * 2)  # memory maps cannot be pickled
    dataset = make_dataset()
    here = dataset.sample_random_trajectory(np.random.default_rng(3))
    there = pickle.loads(pickle.dumps(dataset)).sample_random_trajectory(np.random.default_rng(3))
    np.testing.assert_array_equal(here.time_idxs, there.time_idxs)


def test_dataset_that_does_nothing() -> None:
    dataset = DoNothingDataset()
    assert not dataset.ready_for_training
    assert dataset.save_new_trajs_to is None
    assert dataset.on_end_of_collection() == {}
    with pytest.raises(ValueError, match=r"holds no trajectories.*Fix:"):
        dataset.sample_random_trajectory(np.random.default_rng(0))


def test_one_method_makes_a_dataset(make_traj: Callable[..., Trajectory]) -> None:
    class Mine(RLDataset):
        def sample_random_trajectory(self, rng: np.random.Generator) -> Trajectory:
            return make_traj(3)

    dataset = Mine()
    dataset.configure(
        max_seq_len=3, padded_sampling="none", has_edit_rights=False, default_root="", default_name=""
    )
    assert dataset.ready_for_training
    assert dataset.state_dict() == {}
    assert dataset.set_aside_newer({}) == 0
    dataset.refresh()
    dataset.delete()


# --- limits, listings, and what is killed ---------------------------------------------------------------


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    return tmp_path / "set/buffer/fifo"


def test_timesteps_are_limited(make_dataset: MakeDataset, fill: Fill, fifo: Path) -> None:
    dataset = make_dataset(dset_max_timesteps=25)
    paths = fill(fifo, [10, 10, 10, 4, 10])
    fill(fifo.with_name("protected"), [100])
    assert dataset.on_end_of_collection()["deleted_files"] == 2
    assert sorted(fifo.iterdir()) == paths[2:]
    assert dataset.on_end_of_collection()["deleted_files"] == 0
    fill(fifo.with_name("more"), [9] * 6)[5].rename(fifo / "env_00000005_1000000009.0.npz")
    assert dataset.on_end_of_collection()["deleted_files"] == 1
    assert not paths[2].exists()


def test_bytes_are_limited(make_dataset: MakeDataset, fill: Fill, fifo: Path) -> None:
    paths = fill(fifo, [10, 10, 10])
    size = paths[0].stat().st_size
    dataset = make_dataset(dset_max_bytes=2 * size)
    assert dataset.on_end_of_collection()["deleted_files"] == 1
    assert sorted(fifo.iterdir()) == paths[1:]


def test_limits_leave_what_training_needs(make_dataset: MakeDataset, fill: Fill, fifo: Path) -> None:
    paths = fill(fifo, [10] * 4)
    dataset = make_dataset(dset_max_bytes=1, dset_max_timesteps=1, dset_min_size=2)
    dataset.on_end_of_collection()
    assert sorted(fifo.iterdir()) == paths[2:]
    assert dataset.ready_for_training


def test_unchanged_folder_is_not_listed_again(
    fill: Fill, fifo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(fifo, [2] * 3)
    listed: list[str] = []
    listing = Buffer(fifo.parent, may_move=False, with_lengths=False, on_change=lambda gone: None)
    listdir = os.listdir

    def count(path: Path) -> list[str]:
        listed.append(path.name)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", count)
    listing.refresh()
    listing.refresh()  # the folder has only just changed: its time of change may be too coarse to trust
    assert listed.count("fifo") == 2
    os.utime(fifo, (time.time() - 10, time.time() - 10))
    listing.refresh()
    listing.refresh()
    assert listed.count("fifo") == 3
    fill(fifo, [2] * 4)
    listing.refresh()
    assert len(listing.files) == 4
    os.utime(fifo, (time.time() - 10, time.time() - 10))
    listing.refresh()
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 31)  # some file systems keep no time of change
    listing.refresh()
    assert listed.count("fifo") == 6


def test_order_stays_by_age_whatever_arrives_when(fill: Fill, tmp_path: Path) -> None:
    paths = fill(tmp_path / "all", [2] * 6)
    listing = Buffer(tmp_path / "buffer", may_move=False, with_lengths=False, on_change=lambda gone: None)
    for order in ([3], [5, 0], [1, 4, 2]):
        for i in order:
            paths[i].rename(listing.fifo.path / paths[i].name)
        before = listing.files
        listing.refresh()
        assert listing.files == sorted(listing.files)
        assert listing.files is not before
    assert [Path(file.path).name for file in listing.files] == [path.name for path in paths]


@pytest.mark.slow
@pytest.mark.parametrize("kwargs", [{}, {"sample_by": "timestep", "priority_exponent": 1.0}])
def test_memory_stays_flat(
    make_dataset: MakeDataset, fill: Fill, fifo: Path, kwargs: dict[str, object]
) -> None:
    """200 epochs in which files come and go; an array or a few paths kept per epoch would be too much."""
    data = fill(fifo, [40] * 30)[0].read_bytes()
    rng, used = np.random.default_rng(0), []
    tracemalloc.start()
    try:
        dataset = make_dataset(dset_max_size=30, **kwargs)
        for epoch in range(200):
            for i in range(10):
                (fifo / f"env_{10 * epoch + i:08x}_{2e9 + epoch + i / 100:.6f}.npz").write_bytes(data)
            assert dataset.on_end_of_collection()["fifo_files"] == 30
            dataset.refresh()
            dataset.sample_windows(60, rng)
            if epoch in (10, 199):
                gc.collect()
                snapshot = tracemalloc.take_snapshot()  # pathlib interns names in a table of the interpreter
                snapshot = snapshot.filter_traces([tracemalloc.Filter(False, "*pathlib.py")])
                used.append(sum(trace.size for trace in snapshot.traces))
    finally:
        tracemalloc.stop()
    assert used[1] < 1.05 * used[0] + 64_000  # what numpy keeps for small arrays fills up within that


@pytest.mark.slow
def test_killed_writers_leave_nothing_half(tmp_path: Path) -> None:
    """Three rounds of the benchmark, one for each file format."""
    command = [sys.executable, str(ROOT / "benchmarks" / "data_chaos.py"), "--rounds", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["faults"] == []
    assert result["rounds"] == 3
    assert result["broken_files"] == 0
    assert min(result["windows"], result["finished_files"], result["reported_files"]) > 0
