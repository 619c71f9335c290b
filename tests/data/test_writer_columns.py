from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loxodon.data import TrajectoryWriter, WritingClock
from loxodon.data import writer as writer_module

from .test_writer import FakeRollout, read_all


def test_rows_that_took_no_step_leave_no_trace(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path, 2)
    obs, rl2s, times = {"x": np.zeros((2, 1))}, np.zeros((2, 2), np.float32), np.zeros((2, 1), np.int64)
    no, second = np.zeros(2, np.bool_), np.array([False, True])
    everything: Any = (np.zeros(2, np.int64), np.zeros(2, np.float32))
    writer.begin([0, 1], obs, rl2s, times, ["a", "b"])
    writer.add(*everything, second, second, obs, rl2s, times + 1)  # env 1 ends ...
    writer.begin([1], obs, rl2s, times, ["a", "b"])
    writer.add(*everything, no, no, obs, rl2s, times + 2, ignored=second)  # ... and resets one call later
    with pytest.raises(ValueError, match=r"Environments \[1\] have no running trajectory"):
        writer.add(*everything, no, no, obs, rl2s, times)
    writer.begin([1], {"x": np.full((2, 1), 7.0)}, rl2s, times, ["a", "c"])
    writer.add(*everything, no, ~no, obs, rl2s, times + 3)
    writer.close()
    first, other, last = read_all(tmp_path)
    assert [len(first), len(other), len(last)] == [1, 3, 1]
    assert (last.env_name, last.obs["x"][0, 0]) == ("c", 7.0)


def test_long_runs_of_short_pieces_need_no_more_columns(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path, 2, save_every=(5, 9))
    rollout = FakeRollout(writer, 2)
    for _ in range(1000):
        rollout.add()
    writer.flush_partial()
    writer.close()
    assert writer._capacity == 128
    for row in range(2):
        pieces = [traj for traj in read_all(tmp_path) if traj.env_name == f"env{row}"]
        rewards = np.concatenate([traj.rews[:, 0] for traj in pieces])
        np.testing.assert_array_equal(rewards, np.arange(1, 1001))


def test_writers_with_one_clock_never_share_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = WritingClock()
    monkeypatch.setattr(writer_module.time, "time_ns", lambda: 1_700_000_000_000_000_000)
    rollouts = [FakeRollout(TrajectoryWriter(tmp_path, 1, seed=i, clock=clock), 1) for i in range(2)]
    for rollout in rollouts * 2:
        rollout.add(terminated=(0,))
    for rollout in rollouts:
        rollout.writer.close()
    assert len({path.stem.rsplit("_", 1)[1] for path in tmp_path.glob("*.npz")}) == 4
