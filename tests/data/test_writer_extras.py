from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loxodon.data import FILE_FORMATS, Trajectory, TrajectoryWriter, load_trajectory


class Steps:
    """Feeds a writer steps of N envs; the extras of step t of env n are 100 n + t."""

    def __init__(self, folder: Path, num_envs: int = 2, **settings: Any) -> None:
        self.writer, self.num_envs, self.t = TrajectoryWriter(folder, num_envs, **settings), num_envs, 0
        self.begin(list(range(num_envs)))

    def arrays(self) -> tuple[dict[str, Any], Any, Any]:
        column = np.full((self.num_envs, 1), self.t, np.float32)
        return {"x": column}, np.zeros((self.num_envs, 3), np.float32), column.astype(np.int64)

    def begin(self, rows: list[int]) -> None:
        names = [f"env{i}" for i in range(self.num_envs)]
        self.writer.begin(np.array(rows), *self.arrays(), names)

    def extras(self) -> dict[str, Any]:
        log_probs = (100.0 * np.arange(self.num_envs) + self.t)[:, None].astype(np.float32)
        return {"log_probs": log_probs, "samples": np.repeat(log_probs[:, None], 3, 2).astype(np.float16)}

    def add(self, *ended: int, extras: Any = "default", ignored: Any = None) -> None:
        over = np.isin(np.arange(self.num_envs), ended)
        given = self.extras() if extras == "default" else extras
        self.t += 1
        actions, rewards = np.full(self.num_envs, 1), np.full(self.num_envs, self.t, np.float32)
        self.writer.add(actions, rewards, over, over, *self.arrays(), ignored=ignored, extras=given)
        fresh = over if ignored is None else over | ignored
        if fresh.any():
            self.begin(np.flatnonzero(fresh).tolist())

    def close(self) -> list[Trajectory]:
        self.writer.flush_partial()
        self.writer.close()
        paths = [path for path in self.writer.folder.iterdir() if path.suffix in (".npz", ".traj")]
        return [load_trajectory(p) for p in sorted(paths, key=lambda p: float(p.stem.rsplit("_", 1)[1]))]


@pytest.mark.parametrize("save_as", FILE_FORMATS)
def test_extras_reach_the_files_with_the_version_and_the_steps_they_belong_to(
    tmp_path: Path, save_as: str
) -> None:
    steps = Steps(tmp_path, save_every=(7, 30), save_as=save_as)
    steps.writer.policy_version = 3
    for t in range(400):  # more than the first columns hold
        steps.add(*([t % 2] if t % 11 == 0 else []))
    trajs = steps.close()
    assert sum(len(traj) for traj in trajs) == 800
    for traj in trajs:
        assert traj.policy_version == 3
        number = int(traj.env_name.removeprefix("env"))
        expected = 100 * number + traj.rews - 1
        np.testing.assert_array_equal(traj.extras["log_probs"], expected)
        np.testing.assert_array_equal(traj.extras["samples"], expected[:, :, None].repeat(3, 2).astype("f2"))
        assert traj.extras["samples"].dtype == np.float16
        assert list(traj.extras) == ["log_probs", "samples"]


def test_without_extras_there_are_none(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    for extras in (None, {}):
        steps.add(extras=extras)
    assert not any(name.startswith("extra/") for name in steps.writer._columns)
    assert [dict(traj.extras) for traj in steps.close()] == [{}, {}]


def test_pieces_end_where_extras_begin(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    steps.add(extras=None)
    steps.add(0, extras=None)  # env 0 has no transition when they begin
    steps.add()
    steps.add()
    before, other, *after = steps.close()
    assert [len(before), len(other)] == [2, 2]
    assert not before.extras
    assert not other.extras
    assert sorted(len(traj) for traj in after) == [2, 2]
    for traj in after:
        np.testing.assert_array_equal(traj.extras["log_probs"][:, 0] % 100, [2, 3])
    rest = next(traj for traj in after if traj.env_name == "env1")
    np.testing.assert_array_equal(rest.obs["x"][0], other.obs["x"][-1])  # no transition is lost


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        {"log_probs": np.zeros((2, 1), np.float32)},
        {"log_probs": np.zeros((2, 1)), "samples": np.zeros((2, 1, 3)), "values": np.zeros((2, 1))},
        {"log_probs": np.zeros(2), "samples": np.zeros((2, 1, 3))},
        {"log_probs": np.zeros((1, 1)), "samples": np.zeros((2, 1, 3))},
    ],
)
def test_extras_stay_the_same(tmp_path: Path, wrong: Any) -> None:
    steps = Steps(tmp_path)
    steps.add()
    with pytest.raises(
        ValueError, match=r"This step has the extras .* expected are {'log_probs': \(2, 1\).*Fix:"
    ):
        steps.add(extras=wrong)
    assert [len(traj) for traj in steps.close()] == [1, 1]


def test_first_extras_of_another_number_of_envs_lose_nothing(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    steps.add(extras=None)
    with pytest.raises(
        ValueError, match=r"This step has the extras {'values': \(3, 1\)}.*Fix: let the agent"
    ):
        steps.add(extras={"values": np.zeros((3, 1))})
    assert [len(traj) for traj in steps.close()] == [1, 1]


def test_rows_that_took_no_step_leave_no_extras(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    steps.add()
    steps.add(ignored=np.array([False, True]))
    steps.add()
    by_env: dict[str, list[float]] = {}
    for traj in steps.close():
        by_env.setdefault(traj.env_name, []).extend(traj.extras["log_probs"][:, 0].tolist())
    assert by_env == {"env0": [0, 1, 2], "env1": [100, 102]}
