"""Actions of several factors (MultiDiscrete) from a rollout through every file format into batches."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loxodon.data import (
    FILE_FORMATS,
    BrokenTrajectoryError,
    Layout,
    Trajectory,
    TrajectoryWriter,
    check_file,
    load_trajectory,
    open_trajectory,
    pad_batch,
    save_trajectory,
    split_episodes,
)
from loxodon.data.action_forms import action_indices, factor_indices, factor_rows
from loxodon.data.commands.command_line import main
from loxodon.data.commands.convert import describe_difference

NVEC = (2, 3)
NAMED: dict[str, Any] = {"traj_id": "0123abcd", "unix_time": 1_700_000_000.25}


def make(length: int, nvec: tuple[int, ...] = NVEC, *, as_rows: bool = False) -> Trajectory:
    rng = np.random.default_rng(length)
    indices = rng.integers(nvec, size=(length, len(nvec)))
    rows = factor_rows(indices, nvec)
    rl2s = np.zeros((length + 1, 1 + sum(nvec)), np.float32)
    rl2s[1:, 1:] = rows
    return Trajectory(
        obs={"observation": rng.standard_normal((length + 1, 2)).astype(np.float32)},
        rl2s=rl2s,
        time_idxs=np.arange(length + 1)[:, None],
        actions=rows if as_rows else indices,
        rews=np.zeros((length, 1), np.float32),
        dones=np.zeros((length, 1), np.bool_),
        nvec=nvec,
    )


@pytest.mark.parametrize("save_as", FILE_FORMATS)
@pytest.mark.parametrize("length", [1, 2, 3000])
@pytest.mark.parametrize("nvec", [NVEC, (3, 3), (4,), (1, 1), (300, 2), (2,) * 20])
@pytest.mark.parametrize("as_rows", [False, True])
def test_files_give_back_what_was_written(
    tmp_path: Path, save_as: str, length: int, nvec: tuple[int, ...], as_rows: bool
) -> None:
    traj = make(length, nvec, as_rows=as_rows)
    path = save_trajectory(tmp_path, traj, save_as=save_as, **NAMED)
    check_file(path)
    loaded = load_trajectory(path)
    assert loaded.layout == open_trajectory(path).layout == traj.layout
    assert loaded.nvec == nvec
    np.testing.assert_array_equal(factor_indices(loaded.actions, nvec), factor_indices(traj.actions, nvec))
    stop = min(length, 7)
    batch = pad_batch([open_trajectory(path).slice(0, stop)], traj.layout)
    assert batch.actions.shape == (1, stop, sum(nvec))
    np.testing.assert_array_equal(batch.actions[0], traj.rl2s[1 : stop + 1, 1:])


def test_batches_mix_both_forms_and_pad_with_zeros() -> None:
    trajs = [make(3), make(5, as_rows=True), make(2)]
    batch = pad_batch(trajs)
    for row, traj in zip(batch.actions.numpy(), trajs, strict=True):
        np.testing.assert_array_equal(row[: len(traj)], traj.rl2s[1:, 1:])
        assert not row[len(traj) :].any()
    same = pad_batch([trajs[0], trajs[2]])
    np.testing.assert_array_equal(same.actions[1, :2], trajs[2].rl2s[1:, 1:])
    assert not same.actions[1, 2:].any()


def test_other_factors_of_equal_width_do_not_fit() -> None:
    expected, found = make(3).layout, make(3, (3, 2)).layout
    assert expected.describe_mismatch(found) == "actions have factors of 3, 2, expected factors of 2, 3"
    assert Layout(expected.obs, 5).describe_mismatch(expected) == (
        "actions have factors of 2, 3, expected one factor"
    )
    assert str(expected).endswith("5 action columns (factors of 2, 3)")
    for layout in (expected, Layout(expected.obs, 5)):
        with pytest.raises(ValueError, match=r"actions have factors of 3, 2, expected .*Fix:"):
            pad_batch([make(3, (3, 2), as_rows=True)], layout)


def test_indices_out_of_range_are_refused(tmp_path: Path) -> None:
    traj = make(3)
    wrong = dataclasses.replace(traj, actions=traj.actions + np.array([0, 3]))
    with pytest.raises(ValueError, match=r"Discrete actions range.*2 \+ 3 actions.*Fix"):
        pad_batch([wrong])
    with pytest.raises(ValueError, match=r"none of factors of 2, 3. Fix: store indices \(T, 2\)"):
        save_trajectory(tmp_path, wrong, save_as="traj", **NAMED)
    with pytest.raises(ValueError, match=r"none of factors of 2, 3. Fix"):
        factor_indices(np.ones((3, 5), np.uint8), NVEC)  # two ones in a factor
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"action_nvec": np.array([[2.0, 3.0]])}, r"action_nvec is float64\[1, 2\], but must hold counts"),
        ({"action_nvec": np.array([[0, 5]])}, r"action_nvec is int64\[1, 2\], but must hold counts"),
        ({"action_nvec": np.array([[2, 2]])}, r"room for 5 action columns, but action_nvec is \[2, 2\]"),
        ({"actions": np.zeros((3, 4), np.int64)}, r"allowed are \(T, 5\) rows and \(T, 2\) indices"),
    ],
)
def test_contradictory_files_are_broken(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    path = save_trajectory(tmp_path, make(3), save_as="npz", **NAMED)
    with np.load(path) as arrays:
        content = dict(arrays)
    np.savez(path, **{**content, **changes})
    with pytest.raises(BrokenTrajectoryError, match=problem):
        load_trajectory(path)


def test_npz_files_hold_what_amago_expects_of_discrete_actions(tmp_path: Path) -> None:
    """Rows of bytes as wide as rl2s says; nothing of it is in the files of other action spaces."""
    with np.load(save_trajectory(tmp_path, make(3), save_as="npz", **NAMED)) as arrays:
        assert arrays["actions"].dtype == np.uint8
        np.testing.assert_array_equal(arrays["actions"], arrays["rl2s"][1:, 1:])
    plain = dataclasses.replace(make(3, (5,)), nvec=None)
    with np.load(save_trajectory(tmp_path, plain, save_as="npz", **NAMED)) as arrays:
        assert "action_nvec" not in arrays


@pytest.mark.parametrize("save_as", FILE_FORMATS)
def test_the_writer_stores_all_factors(tmp_path: Path, save_as: str) -> None:
    writer = TrajectoryWriter(tmp_path, 2, save_as=save_as, nvec=NVEC)
    obs = {"observation": np.zeros((2, 1), np.float32)}
    rl2s, times = np.zeros((2, 6), np.float32), np.zeros((2, 1), np.int64)
    writer.begin([0, 1], obs, rl2s, times, ["env", "env"])
    flags = np.zeros(2, np.bool_)
    actions = np.array([[1, 2], [0, 1]])
    for step in range(2):
        ended = np.full(2, step == 1)
        writer.add(actions, np.zeros(2, np.float32), flags, ended, obs, rl2s, times + step + 1)
    writer.close()
    stored = [action_indices(load_trajectory(path)) for path in sorted(tmp_path.iterdir())]
    assert sorted(indices.tolist() for indices in stored if indices is not None) == [
        [[0, 1], [0, 1]],
        [[1, 2], [1, 2]],
    ]


def test_commands_show_and_convert_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traj = make(4)
    (tmp_path / "source").mkdir()
    path = save_trajectory(tmp_path / "source", traj, save_as="npz", **NAMED)
    assert main(["show", str(path), "--plot", str(tmp_path / "a.png")]) == 0
    shown = capsys.readouterr().out
    assert "factors of 2, 3" in shown
    assert f" {traj.actions[0, 0]} {traj.actions[0, 1]} " in shown
    assert main(["convert", str(path), str(tmp_path / "made"), "--to", "traj"]) == 0
    (converted,) = (tmp_path / "made").glob("*.traj")
    assert describe_difference(traj, load_trajectory(converted)) is None
    other = dataclasses.replace(traj, actions=(traj.actions + 1) % NVEC)
    assert describe_difference(traj, other) == "actions"
    assert describe_difference(traj, dataclasses.replace(traj, nvec=(3, 2))) == "set of action factors"


def test_flat_arrays_with_a_count_for_each_factor() -> None:
    actions = np.array([[0, 2], [1, 1], [1, 0]])
    ends = np.array([0, 0, 1])
    (traj,) = split_episodes(np.zeros((3, 1)), actions, np.ones(3), ends, 0 * ends, num_actions=[2, 3])
    assert traj.nvec == (2, 3)
    assert traj.rl2s[1:, 1:].tolist() == [[1, 0, 0, 0, 1], [0, 1, 0, 1, 0], [0, 1, 1, 0, 0]]
    assert pad_batch([traj]).actions[0].tolist() == traj.rl2s[1:, 1:].tolist()
