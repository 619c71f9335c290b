"""The writer: its pieces, their order and content; no finished trajectory is lost."""

from __future__ import annotations

import copy
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
    """N environments that observe `1000 * env + a running count` and feed a writer as a collector does."""

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
        """Extras of the step that begins now: 1000 * env + the running count."""
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
    """All files in the order of writing."""
    paths = [path for path in folder.iterdir() if parse_name(path.name)]
    return [
        load_trajectory(path) for path in sorted(paths, key=lambda path: float(path.stem.rsplit("_", 1)[1]))
    ]


# --- pieces --------------------------------------------------------------------------------------------


def test_only_short_whole_episodes_that_a_time_limit_ends_count_as_terminated(tmp_path: Path) -> None:
    rollout = FakeRollout(TrajectoryWriter(tmp_path, 3, terminates_within=3), 3)
    for step in range(1, 8):
        if step == 5:
            rollout.writer.flush_partial()  # the pieces of environments 0 and 2 no longer begin at a reset
        rollout.add(truncated={3: (0,), 4: (1,), 6: (0,), 7: (1, 2)}.get(step, ()))
    rollout.writer.close()
    found = read_all(tmp_path)
    assert [(t.env_name, t.time_idxs[[0, -1], 0].tolist(), t.dones[:, 0].tolist()) for t in found] == [
        ("env0", [0, 3], [False, False, True]),
        ("env1", [0, 4], [False, False, False, False]),
        ("env0", [0, 1], [False]),
        ("env2", [0, 4], [False, False, False, False]),
        ("env0", [1, 3], [False, False]),
        ("env1", [0, 3], [False, False, True]),
        ("env2", [4, 7], [False, False, False]),
    ]


@pytest.mark.parametrize("save_as", FILE_FORMATS)
def test_an_episode_is_written_with_the_alignment_of_the_worked_example(tmp_path: Path, save_as: str) -> None:
    rollout = FakeRollout(TrajectoryWriter(tmp_path, 2, save_as=save_as), 2)
    for version in (None, 4):  # the policy that acts last counts
        rollout.writer.policy_version = version
        rollout.add(extras=rollout.extras())
    rollout.add(terminated=(0,), truncated=(1,), extras=rollout.extras())
    rollout.writer.close()
    traj, other = read_all(tmp_path)
    assert (traj.env_name, traj.policy_version) == ("env0", 4)
    assert traj.obs["x"][:, 0].tolist() == [0, 1, 2, 3]
    assert traj.obs["image"].dtype == np.uint8
    assert traj.time_idxs.tolist() == [[0], [1], [2], [3]]
    assert traj.actions.tolist() == [[0, 1, 0], [0, 0, 1], [1, 0, 0]]  # the form that AMAGO 3.x stores
    assert traj.actions.dtype == np.uint8
    assert traj.rews.tolist() == [[1], [2], [3]]
    assert traj.dones.tolist() == [[False], [False], [True]]
    assert traj.rl2s[0].tolist() == [0, 0, 0, 0]
    np.testing.assert_array_equal(traj.rl2s[1:, 0], traj.rews[:, 0])
    np.testing.assert_array_equal(traj.rl2s[1:, 1:], traj.actions)
    assert traj.extras["log_probs"][:, 0].tolist() == [0, 1, 2]
    assert traj.extras["samples"].shape == (3, 1, 3)
    assert other.obs["x"][:, 0].tolist() == [1000, 1001, 1002, 1003]
    assert not other.dones.any()  # truncated


def test_continuous_actions_and_all_factors_are_stored(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path / "a", 1)
    FakeRollout(writer, 1, is_discrete=False).add(terminated=(0,))
    writer.close()
    [traj] = read_all(tmp_path / "a")
    assert traj.actions.dtype == np.float32
    np.testing.assert_allclose(traj.actions, [[0.01, 0.01, 0.01]])
    writer = TrajectoryWriter(tmp_path / "b", 2, nvec=(2, 3))
    obs, rl2s, times = {"x": np.zeros((2, 1))}, np.zeros((2, 6), np.float32), np.zeros((2, 1), np.int64)
    writer.begin([0, 1], obs, rl2s, times, ["env", "env"])
    obs["x"] += 5  # callers may reuse arrays
    no = np.zeros(2, np.bool_)
    writer.add(np.array([[1, 2], [0, 1]]), np.zeros(2, np.float32), no, ~no, obs, rl2s, times + 1)
    obs["x"] += 5
    writer.close()
    assert [traj.obs["x"].tolist() for traj in read_all(tmp_path / "b")] == [[[0], [5]]] * 2
    stored = [action_indices(traj) for traj in read_all(tmp_path / "b")]
    assert sorted(indices.tolist() for indices in stored if indices is not None) == [[[0, 1]], [[1, 2]]]


@pytest.mark.parametrize(
    ("save_every", "steps", "lengths"),
    [
        ((3, 3), 8, {3, 2}),
        ((2, 2), 4, {2}),  # the episode ends at the limit, so there is one piece
        ((2, 5), 300, {1, 2, 3, 4, 5}),
        (None, 701, {701}),
    ],
)
def test_pieces_of_a_long_episode_overlap_by_one_timestep(
    tmp_path: Path, save_every: Any, steps: int, lengths: set[int]
) -> None:
    writer = TrajectoryWriter(tmp_path, 2, save_every=save_every)
    rollout = FakeRollout(writer, 2)
    for step in range(steps):
        rollout.add(terminated=(0, 1) if step == steps - 1 else ())
    writer.close()
    assert writer._capacity == (1024 if save_every is None else 128)  # no larger than a piece needs
    found = set()
    for row in range(2):
        pieces = [traj for traj in read_all(tmp_path) if traj.env_name == f"env{row}"]
        found |= {len(piece) for piece in pieces}
        for before, after in pairwise(pieces):
            assert before.time_idxs[-1] == after.time_idxs[0]
            np.testing.assert_array_equal(before.rl2s[-1], after.rl2s[0])
            np.testing.assert_array_equal(before.obs["x"][-1], after.obs["x"][0])
        rewards = np.concatenate([piece.rews[:, 0] for piece in pieces])
        np.testing.assert_array_equal(rewards, np.arange(1, steps + 1))
        np.testing.assert_array_equal(pieces[-1].obs["x"][-1], [1000 * row + steps])
        assert [bool(piece.dones[-1, 0]) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert found <= lengths
    assert found == lengths or (steps == 300 and found >= {2, 3, 4, 5})


def test_flushing_and_forced_resets_keep_running_pieces(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path, 2)
    rollout = FakeRollout(writer, 2)
    writer.flush_partial()  # there is nothing to write yet
    rollout.add()
    rollout.add(terminated=(0,))  # env 0 restarts without a transition
    writer.flush_partial()
    writer.wait()
    assert sorted(len(traj) for traj in read_all(tmp_path)) == [2, 2]
    rollout.add()
    rollout.begin(np.array([1]))
    writer.close()
    last = read_all(tmp_path)[-1]
    assert (last.env_name, last.time_idxs[:, 0].tolist()) == ("env1", [2, 3])
    rollout.add(terminated=(0,))  # a closed writer can be used again
    writer.close()
    assert len(read_all(tmp_path)) == 4


def test_rows_without_a_step_leave_no_trace(tmp_path: Path) -> None:
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


def test_pieces_end_where_extras_begin_and_the_names_of_extras_are_fixed(tmp_path: Path) -> None:
    rollout = FakeRollout(TrajectoryWriter(tmp_path, 2), 2)
    with pytest.raises(ValueError, match=r"This step has the extras .* are expected: .*Fix: let the agent"):
        rollout.add(extras={"values": np.zeros((3, 1))})
    rollout.count, rollout.times[:] = 0, 0
    rollout.add(extras={})
    rollout.add(terminated=(0,))  # env 0 has no transition when extras begin
    for _ in range(2):
        rollout.add(extras=rollout.extras())
    integers = {name: value.astype(np.int64) for name, value in rollout.extras().items()}
    more = {**rollout.extras(), "values": np.zeros((2, 1))}
    for wrong in (None, {"log_probs": np.zeros((2, 1))}, more, integers):
        with pytest.raises(ValueError, match=r"This step has the extras .*Fix: let the agent"):
            rollout.add(extras=wrong)
    rollout.writer.flush_partial()
    rollout.writer.close()
    before, other, *after = read_all(tmp_path)
    assert [len(before), len(other), *(len(traj) for traj in after)] == [2, 2, 2, 2]
    assert before.extras == other.extras == {}
    for traj in after:
        np.testing.assert_array_equal(traj.extras["log_probs"], traj.obs["x"][:-1])
        np.testing.assert_array_equal(traj.extras["samples"], traj.obs["x"][:-1, :, None].repeat(3, 2))
    rest = next(traj for traj in after if traj.env_name == "env1")
    np.testing.assert_array_equal(rest.obs["x"][0], other.obs["x"][-1])


def test_caller_errors_are_named(tmp_path: Path) -> None:
    rollout = FakeRollout(TrajectoryWriter(tmp_path, 2), 2)
    rollout.writer = TrajectoryWriter(tmp_path, 2)
    rollout.writer.begin([0], rollout.obs(), rollout.rl2s, rollout.times, ["a", "b"])
    with pytest.raises(ValueError, match=r"Environments \[1\] have no running trajectory.*Fix: call begin"):
        rollout.add()
    for settings in ({"save_every": (0, 5)}, {"save_every": (6, 5)}, {"save_as": "zip"}):
        with pytest.raises(ValueError, match=r"(save_every is|'zip').*Fix:"):
            TrajectoryWriter(tmp_path, 1, **settings)  # type: ignore[arg-type]


# --- names and times -----------------------------------------------------------------------------------


def run(folder: Path, seed: int, *, num_steps: int = 40, state: dict[str, Any] | None = None) -> Any:
    writer = TrajectoryWriter(folder, 2, save_every=(2, 6), seed=seed)
    rollout = FakeRollout(writer, 2)
    if state is not None:
        writer.load_state_dict(state)
    for _ in range(num_steps):
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
    state = run(tmp_path / "d", 1, num_steps=10)[2]
    one, same = run(tmp_path / "e", 1, state=state), run(tmp_path / "f", 1, state=state)
    assert one[:2] == same[:2]  # a restored writer continues
    assert not set(one[0]) & set(first[0][:3])
    run(tmp_path / "g", 1, state={**state, "last_time_us": 4_000_000_000_000_000})
    assert all(float(path.stem.rsplit("_", 1)[1]) > 4e9 for path in (tmp_path / "g").glob("*.npz"))


class Clock:
    """Replaces time.time_ns; tests can make it jump."""

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


def test_a_clock_that_jumps_does_not_get_the_newest_files_deleted(
    make_dataset: Callable[..., DiskTrajDataset], clock: Clock
) -> None:
    dataset, written = make_dataset(dset_max_size=2), []
    folder = dataset.save_new_trajs_to
    assert folder is not None
    for seed in range(3):  # between runs
        writer = TrajectoryWriter(folder, 1, seed=seed)
        for _ in range(2):  # and within a run
            before = {path.name for path in folder.iterdir()}
            FakeRollout(writer, 1).add(terminated=(0,))
            writer.wait()
            written += {path.name for path in folder.iterdir()} - before
            clock.now_ns -= 3600 * 10**9
        writer.close()
    assert sorted(written, key=lambda name: parse_name(name).unix_time) == written  # type: ignore[union-attr]
    dataset.on_end_of_collection()
    assert {path.name for path in folder.iterdir()} == set(written[-2:])


def test_writers_that_share_a_clock_never_share_a_time(tmp_path: Path, clock: Clock) -> None:
    shared, clock.tick_ns = WritingClock(), 0
    rollouts = [FakeRollout(TrajectoryWriter(tmp_path, 1, seed=i, clock=shared), 1) for i in range(2)]
    for rollout in rollouts * 2:
        rollout.add(terminated=(0,))
    for rollout in rollouts:
        rollout.writer.close()
    assert len({path.stem.rsplit("_", 1)[1] for path in tmp_path.glob("*.npz")}) == 4


# --- resumption ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 3, 300])
def test_running_pieces_continue_in_another_writer(tmp_path: Path, num_steps: int) -> None:
    whole = FakeRollout(TrajectoryWriter(tmp_path / "whole", 3, save_every=(2, 260), seed=3), 3)
    for i in range(num_steps):
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


def test_running_pieces_that_are_not_continued_are_stored_once(tmp_path: Path) -> None:
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


# --- write errors --------------------------------------------------------------------------------------


def add_forever(rollout: FakeRollout) -> None:
    while True:
        rollout.add()


def disk_full(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_disk_is_reported_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TrajectoryWriter(tmp_path, 1, save_every=(1, 1))
    rollout = FakeRollout(writer, 1)
    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "save_trajectory", disk_full)
        for _ in range(2):  # a later call tries again and raises again
            with pytest.raises(OSError, match=rf"not be written to {tmp_path}.*No space left.*Fix:"):
                add_forever(rollout)
        with pytest.raises(OSError, match=rf"{rollout.count} finished trajectories are in memory only"):
            writer.wait()
    folder = tmp_path.rename(tmp_path.with_name("elsewhere"))
    with pytest.raises(OSError, match=r"No such file.*Fix:.*restore the folder"):
        writer.wait()
    folder.rename(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "save_trajectory", lambda *_, **__: {}["of our own"])
        with pytest.raises(KeyError, match="of our own"):  # other errors are not wrapped
            writer.wait()
    writer.close()
    # The steps passed to the calls that raised are among them.
    assert [traj.rews[0, 0] for traj in read_all(tmp_path)] == list(range(1, rollout.count + 1))
    assert list(tmp_path.glob("*.tmp")) == []


def test_an_error_is_raised_even_by_a_step_that_finishes_no_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = TrajectoryWriter(tmp_path, 1)
    rollout = FakeRollout(writer, 1)
    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "save_trajectory", disk_full)
        rollout.add(terminated=(0,))
        assert writer._background._saving is not None
        assert isinstance(writer._background._saving.exception(), OSError)  # waits for the thread
        with pytest.raises(OSError, match="No space left"):
            rollout.add()
    writer.close()
    assert len(read_all(tmp_path)) == 1


def test_a_slow_disk_blocks_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_program_that_ends_early_still_writes_finished_trajectories(
    tmp_path: Path, run_python: Callable[..., int]
) -> None:
    assert run_python(_ABANDONED, str(tmp_path)) == 3
    assert len(read_all(tmp_path)) == 30
