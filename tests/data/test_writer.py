"""What the writer makes of steps: pieces, their order and content, and that nothing finished is lost."""

from __future__ import annotations

import copy
import shutil
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loxodon.data import (
    FILE_FORMATS,
    DiskTrajDataset,
    Trajectory,
    TrajectoryWriter,
    WritingClock,
    load_trajectory,
    save_trajectory,
)
from loxodon.data import writer as writer_module
from loxodon.data.files import parse_name
from loxodon.data.trajectory import action_indices
from loxodon.experiment.checkpoint.store import read_values, write_values


class FakeRollout:
    """N environments that observe `1000 * env + a running count` and feed a writer like a collector does."""

    def __init__(self, writer: TrajectoryWriter, num_envs: int, *, is_discrete: bool = True) -> None:
        self.writer, self.num_envs, self.is_discrete = writer, num_envs, is_discrete
        self.count, self.times = 0, np.zeros(num_envs, np.int64)
        self.rl2s = np.zeros((num_envs, 4), np.float32)
        self.begin(np.arange(num_envs))

    def obs(self) -> dict[str, Any]:
        return {
            "x": (1000 * np.arange(self.num_envs) + self.count)[:, None].astype(np.float32),
            "image": np.full((self.num_envs, 2), self.count % 256, np.uint8),
        }

    def begin(self, rows: Any) -> None:
        self.times[rows] = 0
        self.rl2s[rows] = 0
        names = [f"env{i}" for i in range(self.num_envs)]
        self.writer.begin(rows, self.obs(), self.rl2s, self.times, names)

    def extras(self) -> dict[str, Any]:
        """What the agent says about the step that begins now: 1000 * env + the running count."""
        log_probs = self.obs()["x"]
        return {"log_probs": log_probs, "samples": np.repeat(log_probs[:, None], 3, 2)}

    def add(
        self,
        *,
        terminated: tuple[int, ...] = (),
        truncated: tuple[int, ...] = (),
        ignored: Any = None,
        extras: Any = None,
    ) -> None:
        self.count += 1
        self.times += 1
        actions = np.full(self.num_envs, self.count % 3)
        rewards = np.full(self.num_envs, self.count, np.float32)
        self.rl2s[:, 0], self.rl2s[:, 1:] = rewards, np.eye(3)[actions]
        flags = np.zeros((2, self.num_envs), np.bool_)
        flags[0, list(terminated)], flags[1, list(truncated)] = True, True
        if not self.is_discrete:
            actions = np.full((self.num_envs, 3), self.count / 100, np.float32)
        ended = flags[0] | flags[1]
        steps: Any = (actions, rewards, flags[0], ended, self.obs(), self.rl2s, self.times[:, None])
        self.writer.add(*steps, ignored=ignored, extras=extras)
        ended = np.flatnonzero(ended if ignored is None else ended | ignored)
        if len(ended):
            self.begin(ended)


def read_all(folder: Path) -> list[Trajectory]:
    """All files, in the order in which they were written."""
    paths = [path for path in folder.iterdir() if parse_name(path.name)]
    return [
        load_trajectory(path) for path in sorted(paths, key=lambda path: float(path.stem.rsplit("_", 1)[1]))
    ]


# --- pieces --------------------------------------------------------------------------------------------


def test_episode_is_written_with_the_alignment_of_the_worked_example(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path, 1)
    rollout = FakeRollout(writer, 1)
    rollout.add()
    rollout.add()
    rollout.add(terminated=(0,))
    writer.close()
    [traj] = read_all(tmp_path)
    assert traj.env_name == "env0"
    assert traj.obs["x"][:, 0].tolist() == [0, 1, 2, 3]
    assert traj.obs["image"].dtype == np.uint8
    assert traj.time_idxs.tolist() == [[0], [1], [2], [3]]
    assert traj.actions.tolist() == [[0, 1, 0], [0, 0, 1], [1, 0, 0]]  # as AMAGO 3.x has them
    assert traj.actions.dtype == np.uint8
    assert traj.rews.tolist() == [[1], [2], [3]]
    assert traj.dones.tolist() == [[False], [False], [True]]
    assert traj.rl2s[0].tolist() == [0, 0, 0, 0]
    np.testing.assert_array_equal(traj.rl2s[1:, 0], traj.rews[:, 0])
    np.testing.assert_array_equal(traj.rl2s[1:, 1:], traj.actions)


def test_truncated_episodes_are_not_done_and_continuous_actions_float32(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path, 2)
    FakeRollout(writer, 2, is_discrete=False).add(truncated=(1,))
    writer.close()
    [traj] = read_all(tmp_path)
    assert not traj.dones.any()
    assert traj.actions.dtype == np.float32
    np.testing.assert_allclose(traj.actions, [[0.01, 0.01, 0.01]])


@pytest.mark.parametrize("save_as", FILE_FORMATS)
def test_all_factors_of_an_action_are_stored(tmp_path: Path, save_as: str) -> None:
    writer = TrajectoryWriter(tmp_path, 2, save_as=save_as, nvec=(2, 3))
    obs, rl2s, times = {"x": np.zeros((2, 1))}, np.zeros((2, 6), np.float32), np.zeros((2, 1), np.int64)
    writer.begin([0, 1], obs, rl2s, times, ["env", "env"])
    no = np.zeros(2, np.bool_)
    writer.add(np.array([[1, 2], [0, 1]]), np.zeros(2, np.float32), no, ~no, obs, rl2s, times + 1)
    writer.close()
    stored = [action_indices(traj) for traj in read_all(tmp_path)]
    assert sorted(indices.tolist() for indices in stored if indices is not None) == [[[0, 1]], [[1, 2]]]


def test_environments_end_independently_and_keep_their_own_numbers(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path, 3)
    rollout = FakeRollout(writer, 3)
    rollout.add()
    rollout.add(terminated=(2,))
    rollout.add()
    rollout.add(truncated=(0, 2))
    writer.close()
    first, second, third = read_all(tmp_path)
    assert first.obs["x"][:, 0].tolist() == [2000, 2001, 2002]
    assert second.obs["x"][:, 0].tolist() == [0, 1, 2, 3, 4]
    assert third.obs["x"][:, 0].tolist() == [2002, 2003, 2004]
    assert third.time_idxs[:, 0].tolist() == [0, 1, 2]
    assert [traj.env_name for traj in (first, second, third)] == ["env2", "env0", "env2"]


def test_pieces_of_a_long_episode_overlap_by_one_timestep(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path, 1, save_every=(3, 3))
    rollout = FakeRollout(writer, 1)
    for _ in range(7):
        rollout.add()
    rollout.add(terminated=(0,))
    writer.close()
    pieces = read_all(tmp_path)
    assert [len(piece) for piece in pieces] == [3, 3, 2]
    assert [piece.time_idxs[0, 0] for piece in pieces] == [0, 3, 6]
    for before, after in pairwise(pieces):
        np.testing.assert_array_equal(before.rl2s[-1], after.rl2s[0])
        np.testing.assert_array_equal(before.obs["x"][-1], after.obs["x"][0])
    np.testing.assert_array_equal(np.concatenate([piece.rews for piece in pieces])[:, 0], np.arange(1, 9))
    assert [bool(piece.dones[-1, 0]) for piece in pieces] == [False, False, True]


def test_lengths_of_pieces_are_drawn_from_the_whole_range(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path, 4, save_every=(2, 5))
    rollout = FakeRollout(writer, 4)
    for _ in range(60):
        rollout.add()
    writer.close()
    assert {len(piece) for piece in read_all(tmp_path)} == {2, 3, 4, 5}


def test_episode_end_at_the_length_limit_makes_one_piece(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path, 1, save_every=(2, 2))
    rollout = FakeRollout(writer, 1)
    rollout.add()
    rollout.add(terminated=(0,))
    rollout.add()
    writer.close()
    [traj] = read_all(tmp_path)
    assert traj.dones[-1]


@pytest.mark.parametrize(("save_every", "capacity"), [(None, 1024), ((5, 9), 128)])
def test_columns_grow_only_as_far_as_a_piece_needs(tmp_path: Path, save_every: Any, capacity: int) -> None:
    writer = TrajectoryWriter(tmp_path, 2, save_every=save_every)
    rollout = FakeRollout(writer, 2)
    for _ in range(700):
        rollout.add()
    rollout.add(terminated=(1,))
    writer.flush_partial()
    writer.close()
    assert writer._capacity == capacity
    for row in range(2):
        pieces = [traj for traj in read_all(tmp_path) if traj.env_name == f"env{row}"]
        np.testing.assert_array_equal(np.concatenate([p.rews[:, 0] for p in pieces]), np.arange(1, 702))
        np.testing.assert_array_equal(pieces[-1].obs["x"][-1], [1000 * row + 701])


def test_flushing_writes_running_pieces_and_goes_on_from_there(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path, 2)
    rollout = FakeRollout(writer, 2)
    writer.flush_partial()  # nothing to write yet
    rollout.add()
    rollout.add(terminated=(0,))  # env 0 begins anew, without a transition
    writer.flush_partial()
    writer.wait()
    assert sorted(len(traj) for traj in read_all(tmp_path)) == [2, 2]
    rollout.add(truncated=(1,))
    writer.close()
    last = read_all(tmp_path)[-1]
    assert last.env_name == "env1"
    assert last.time_idxs[:, 0].tolist() == [2, 3]


def test_forced_reset_keeps_what_was_running(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path, 1)
    rollout = FakeRollout(writer, 1)
    rollout.add()
    rollout.begin(np.array([0]))
    writer.close()
    assert [len(traj) for traj in read_all(tmp_path)] == [1]


def test_arrays_may_be_reused_by_the_caller(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path, 1)
    obs, rl2s, times = (
        {"x": np.zeros((1, 1), np.float32)},
        np.zeros((1, 2), np.float32),
        np.zeros(1, np.int64),
    )
    flags = np.zeros(1, np.bool_)
    writer.begin([0], obs, rl2s, times, ["env"])
    obs["x"] += 5
    writer.add(np.zeros(1, np.int64), np.zeros(1, np.float32), flags, ~flags, obs, rl2s, times)
    obs["x"] += 5
    writer.close()
    assert read_all(tmp_path)[0].obs["x"].tolist() == [[0], [5]]


def test_rows_that_took_no_step_leave_no_trace(tmp_path: Path) -> None:
    rollout = FakeRollout(TrajectoryWriter(tmp_path, 2), 2)
    rollout.add(extras=rollout.extras())
    rollout.add(extras=rollout.extras(), ignored=np.array([False, True]))  # env 1 was only reset
    rollout.add(extras=rollout.extras())
    rollout.writer.flush_partial()
    rollout.writer.close()
    found: dict[str, list[float]] = {}
    for traj in read_all(tmp_path):
        found.setdefault(traj.env_name, []).extend(traj.extras["log_probs"][:, 0].tolist())
    assert found == {"env0": [0, 1, 2], "env1": [1000, 1002]}


def test_adding_without_begin_names_the_environment(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path, 2)
    rollout = FakeRollout(writer, 2)
    rollout.writer = TrajectoryWriter(tmp_path, 2)
    rollout.writer.begin([0], rollout.obs(), rollout.rl2s, rollout.times, ["a", "b"])
    with pytest.raises(ValueError, match=r"Environments \[1\] have no running trajectory.*Fix: call begin"):
        rollout.add()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"save_every": (0, 5)}, "save_every is"),
        ({"save_every": (6, 5)}, "save_every is"),
        ({"save_as": "zip"}, "'zip'"),
    ],
)
def test_impossible_settings_are_refused(tmp_path: Path, settings: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=rf"{problem}.*Fix:"):
        TrajectoryWriter(tmp_path, 1, **settings)


@pytest.mark.parametrize("save_as", FILE_FORMATS)
def test_pieces_carry_the_version_of_the_policy_that_acted_last(tmp_path: Path, save_as: str) -> None:
    writer = TrajectoryWriter(tmp_path, 1, save_as=save_as)
    rollout = FakeRollout(writer, 1)
    for version in (None, 4, 5):
        writer.policy_version = version
        rollout.add()
        writer.flush_partial()
    writer.close()
    stored = [load_trajectory(path) for path in tmp_path.iterdir()]
    assert {traj.policy_version for traj in stored} == {None, 4, 5}


# --- extras --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save_as", FILE_FORMATS)
def test_extras_reach_the_files_with_the_steps_they_belong_to(tmp_path: Path, save_as: str) -> None:
    rollout = FakeRollout(TrajectoryWriter(tmp_path, 2, save_every=(7, 30), save_as=save_as), 2)
    for t in range(300):  # more than the first columns hold
        rollout.add(terminated=(t % 2,) if t % 11 == 0 else (), extras=rollout.extras())
    rollout.writer.flush_partial()
    rollout.writer.close()
    trajs = read_all(tmp_path)
    assert sum(len(traj) for traj in trajs) == 600
    for traj in trajs:
        assert list(traj.extras) == ["log_probs", "samples"]
        np.testing.assert_array_equal(traj.extras["log_probs"], traj.obs["x"][:-1])
        np.testing.assert_array_equal(traj.extras["samples"], traj.obs["x"][:-1, :, None].repeat(3, 2))


def test_pieces_end_where_extras_begin_and_no_transition_is_lost(tmp_path: Path) -> None:
    rollout = FakeRollout(TrajectoryWriter(tmp_path, 2), 2)
    rollout.add(extras={})
    rollout.add(terminated=(0,))  # env 0 has no transition when they begin
    for _ in range(2):
        rollout.add(extras=rollout.extras())
    rollout.writer.flush_partial()
    rollout.writer.close()
    before, other, *after = read_all(tmp_path)
    assert [len(before), len(other), *(len(traj) for traj in after)] == [2, 2, 2, 2]
    assert before.extras == other.extras == {}
    for traj in after:
        np.testing.assert_array_equal(traj.extras["log_probs"], traj.obs["x"][:-1])
    rest = next(traj for traj in after if traj.env_name == "env1")
    np.testing.assert_array_equal(rest.obs["x"][0], other.obs["x"][-1])


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        {"log_probs": np.zeros((2, 1), np.float32)},
        {"log_probs": np.zeros((2, 1)), "samples": np.zeros((2, 1, 3)), "values": np.zeros((2, 1))},
        {"log_probs": np.zeros((1, 1)), "samples": np.zeros((2, 1, 3))},
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_extras_stay_the_same(tmp_path: Path, wrong: Any, is_first: bool) -> None:
    rollout = FakeRollout(TrajectoryWriter(tmp_path, 2), 2)
    rollout.add(extras=None if is_first else rollout.extras())
    wrong = {"values": np.zeros((3, 1))} if is_first else wrong
    with pytest.raises(ValueError, match=r"This step has the extras .* expected are .*Fix: let the agent"):
        rollout.add(extras=wrong)
    rollout.writer.flush_partial()
    rollout.writer.close()
    assert [len(traj) for traj in read_all(tmp_path)] == [1, 1]


# --- names and times -----------------------------------------------------------------------------------


def run(folder: Path, seed: int, *, num_updates: int = 40, state: dict[str, Any] | None = None) -> Any:
    writer = TrajectoryWriter(folder, 2, save_every=(2, 6), seed=seed)
    rollout = FakeRollout(writer, 2)
    if state is not None:
        writer.load_state_dict(state)
    for _ in range(num_updates):
        rollout.add()
    state = copy.deepcopy(writer.state_dict())
    writer.close()
    names = [parse_name(path.name) for path in folder.glob("*.npz")]
    files = sorted((name.unix_time, name.traj_id) for name in names if name is not None)
    return [traj_id for _, traj_id in files], [len(traj) for traj in read_all(folder)], state


def test_one_seed_gives_one_sequence_of_ids_and_lengths(tmp_path: Path) -> None:
    first, again, other = (run(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert first[:2] == again[:2]
    assert len(set(first[0])) == len(first[0])
    assert first[0] != other[0]
    assert first[1] != other[1]


HOUR_NS = 3600 * 10**9


class Clock:
    """Stands for time.time_ns; jumps when told to."""

    def __init__(self) -> None:
        self.now_ns, self.tick_ns = 1_800_000_000 * 10**9, 1000

    def __call__(self) -> int:
        self.now_ns += self.tick_ns
        return self.now_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(time, "time_ns", fake)
    return fake


def write_episode(writer: TrajectoryWriter) -> str:
    """Name of the file of one episode."""
    before = {path.name for path in writer.folder.iterdir()}
    FakeRollout(writer, 1).add(terminated=(0,))
    writer.wait()
    ((name),) = {path.name for path in writer.folder.iterdir()} - before
    return str(name)


def in_order(folder: Path) -> list[str]:
    return sorted((p.name for p in folder.iterdir()), key=lambda name: parse_name(name).unix_time)  # type: ignore[union-attr]


def test_a_clock_that_jumps_during_a_run_makes_no_file_older(tmp_path: Path, clock: Clock) -> None:
    writer = TrajectoryWriter(tmp_path, 1)
    names = [write_episode(writer)]
    for hours in (-1, 0, 2):
        clock.now_ns += hours * HOUR_NS
        names.append(write_episode(writer))
    writer.close()
    assert in_order(tmp_path) == names


def test_a_clock_that_jumps_between_runs_does_not_make_the_newest_go_first(
    tmp_path: Path, clock: Clock
) -> None:
    dataset = DiskTrajDataset(dset_max_size=2)
    common: Any = {
        "max_seq_len": 8,
        "padded_sampling": "none",
        "default_root": str(tmp_path),
        "default_name": "d",
    }
    dataset.configure(has_edit_rights=True, **common)
    assert dataset.save_new_trajs_to is not None
    names = []
    for seed in range(4):
        writer = TrajectoryWriter(dataset.save_new_trajs_to, 1, seed=seed)
        names.append(write_episode(writer))
        writer.close()
        clock.now_ns -= HOUR_NS
    assert in_order(dataset.save_new_trajs_to) == names
    dataset.on_end_of_collection()
    assert in_order(dataset.save_new_trajs_to) == names[2:]
    dataset.close()


def test_writers_with_one_clock_never_share_a_time(tmp_path: Path, clock: Clock) -> None:
    shared, clock.tick_ns = WritingClock(), 0
    rollouts = [FakeRollout(TrajectoryWriter(tmp_path, 1, seed=i, clock=shared), 1) for i in range(2)]
    for rollout in rollouts * 2:
        rollout.add(terminated=(0,))
    for rollout in rollouts:
        rollout.writer.close()
    assert len({path.stem.rsplit("_", 1)[1] for path in tmp_path.glob("*.npz")}) == 4


# --- resumption ----------------------------------------------------------------------------------------


def test_restored_writer_goes_on_with_ids_lengths_and_later_times(tmp_path: Path) -> None:
    _, _, state = run(tmp_path / "a", 1, num_updates=10)
    one, other = run(tmp_path / "b", 1, state=state), run(tmp_path / "c", 1, state=state)
    fresh = run(tmp_path / "d", 1)
    assert one[:2] == other[:2]
    assert not set(one[0]) & set(fresh[0][:3])
    future = {**state, "last_time_us": 4_000_000_000_000_000}
    run(tmp_path / "e", 1, state=future)
    assert all(float(path.stem.rsplit("_", 1)[1]) > 4e9 for path in (tmp_path / "e").glob("*.npz"))


@pytest.mark.parametrize("num_updates", [0, 3, 300])
def test_running_pieces_go_on_in_another_writer(tmp_path: Path, num_updates: int) -> None:
    whole = FakeRollout(TrajectoryWriter(tmp_path / "whole", 3, save_every=(2, 260), seed=3), 3)
    for i in range(num_updates):
        whole.add(terminated=(0,) if i % 7 == 0 else ())
    whole.writer.wait()
    num_before = len(read_all(tmp_path / "whole"))
    rest = FakeRollout(TrajectoryWriter(tmp_path / "rest", 3, save_every=(2, 260), seed=8), 3)
    rest.count, rest.times, rest.rl2s = whole.count, whole.times.copy(), whole.rl2s.copy()
    rest.writer.load_state_dict(read_values(save(whole.writer.state_dict(), tmp_path / "state")))
    for rollout in (whole, rest):
        for i in range(300):
            rollout.add(terminated=(2,) if i % 11 == 0 else ())
        rollout.writer.flush_partial()
        rollout.writer.close()
    expected, found = read_all(tmp_path / "whole")[num_before:], read_all(tmp_path / "rest")
    assert len(found) == len(expected) > 3
    for one, other in zip(expected, found, strict=True):
        assert one.env_name == other.env_name
        np.testing.assert_array_equal(one.obs["x"], other.obs["x"])
        np.testing.assert_array_equal(one.rews, other.rews)
        np.testing.assert_array_equal(one.actions, other.actions)


def test_running_pieces_that_nobody_goes_on_with_are_stored_once(tmp_path: Path) -> None:
    first = FakeRollout(TrajectoryWriter(tmp_path / "first", 2), 2)
    first.writer.policy_version = 4
    first.add()
    first.add(terminated=(0,))
    first.add()
    state = read_values(save(first.writer.state_dict(), tmp_path / "state"))
    for num_envs in (2, 5):
        folder = tmp_path / str(num_envs)
        writer = TrajectoryWriter(folder, num_envs)
        writer.load_state_dict(state)
        writer.flush_partial()
        FakeRollout(writer, num_envs).add()
        writer.wait()
        assert [(len(t), t.env_name, t.policy_version) for t in read_all(folder)] == [
            (1, "env0", 4),
            (3, "env1", 4),
        ]


def save(state: Any, path: Path) -> Path:
    write_values(path, state)
    return path


# --- what cannot be written ----------------------------------------------------------------------------


def end_episode_and_close(rollout: FakeRollout) -> None:
    """Whichever of these calls comes next raises what went wrong in the background."""
    rollout.add(terminated=(0,))
    rollout.writer.close()


def add_forever(rollout: FakeRollout) -> None:
    while True:
        rollout.add()


def disk_full(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def test_full_disk_surfaces_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TrajectoryWriter(tmp_path, 1, save_every=(1, 1))
    rollout = FakeRollout(writer, 1)
    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "save_trajectory", disk_full)
        for _ in range(2):  # a later call tries again, and says so again
            with pytest.raises(OSError, match=rf"not be written to {tmp_path}.*No space left.*Fix:"):
                add_forever(rollout)
        with pytest.raises(OSError, match=rf"{rollout.count} finished trajectories are in memory only"):
            writer.wait()
    writer.close()
    # The steps given to the calls that raised are among them.
    assert [traj.rews[0, 0] for traj in read_all(tmp_path)] == list(range(1, rollout.count + 1))
    assert list(tmp_path.glob("*.tmp")) == []


def test_removed_folder_surfaces_in_the_next_call(tmp_path: Path) -> None:
    folder = tmp_path / "buffer"
    writer = TrajectoryWriter(folder, 1)
    rollout = FakeRollout(writer, 1)
    shutil.rmtree(folder)
    with pytest.raises(OSError, match=rf"{folder}.*No such file.*Fix:.*restore the folder"):
        end_episode_and_close(rollout)
    folder.mkdir()
    writer.close()
    assert len(read_all(folder)) == 1


def test_other_errors_of_the_background_surface_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("objects are not written")

    writer = TrajectoryWriter(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "save_trajectory", broken)
        with pytest.raises(ValueError, match="objects are not written"):
            end_episode_and_close(FakeRollout(writer, 1))
    writer.close()


def test_slow_disk_holds_the_caller_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = threading.Event()
    most_pending = 0

    def slow(*args: Any, **kwargs: Any) -> Path:
        may_write.wait(10)
        return save_trajectory(*args, **kwargs)

    monkeypatch.setattr(writer_module, "save_trajectory", slow)
    writer = TrajectoryWriter(tmp_path, 1, max_pending=3)

    def collect() -> None:
        nonlocal most_pending
        rollout = FakeRollout(writer, 1)
        for _ in range(20):
            rollout.add(terminated=(0,))
            most_pending = max(most_pending, writer.num_pending)

    collector = threading.Thread(target=collect)
    collector.start()
    collector.join(0.1)
    assert collector.is_alive()
    may_write.set()
    collector.join(10)
    writer.close()
    assert most_pending <= 3
    assert len(read_all(tmp_path)) == 20


def test_closed_writer_can_be_used_again(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path, 1)
    rollout, threads = FakeRollout(writer, 1), set(threading.enumerate())
    for expected in (1, 2):
        rollout.add(terminated=(0,))
        writer.close()
        writer.close()
        assert len(read_all(tmp_path)) == expected
        assert set(threading.enumerate()) <= threads


_ABANDONED = """
import sys
import numpy as np
from loxodon.data import TrajectoryWriter
writer = TrajectoryWriter(sys.argv[1], 1)
one, flags = np.zeros(1, np.int64), np.ones(1, np.bool_)
for _ in range(30):
    writer.begin([0], {"x": np.zeros((1, 1))}, np.zeros((1, 2)), one, ["env"])
    writer.add(one, np.zeros(1), flags, flags, {"x": np.ones((1, 1))}, np.zeros((1, 2)), one + 1)
raise SystemExit(3)
"""


@pytest.mark.slow
def test_program_that_ends_early_still_writes_what_was_finished(
    tmp_path: Path, run_python: Callable[..., int]
) -> None:
    assert run_python(_ABANDONED, str(tmp_path)) == 3
    assert len(read_all(tmp_path)) == 30
