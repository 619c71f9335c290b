"""Buffers that AMAGO 3.x or somebody else has written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loxodon.data import (
    BrokenTrajectoryError,
    Trajectory,
    TrajectoryReader,
    check_file,
    load_trajectory,
    open_trajectory,
    pad_batch,
)


def one_hot(traj: Trajectory) -> np.ndarray[Any, Any]:
    """Actions as training sees them."""
    rows: np.ndarray[Any, Any] = pad_batch([traj]).actions[0].numpy()
    return rows


def foreign_arrays(length: int, rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    """What AMAGO 3.x stores: the actions of rl2s once more, one-hot as float32."""
    rows = np.eye(4, dtype=np.float32)[rng.integers(0, 4, length)]
    rews = rng.standard_normal((length, 1)).astype(np.float32)
    return {
        "rl2s": np.concatenate([np.zeros((1, 5), np.float32), np.concatenate([rews, rows], 1)]),
        "time_idxs": np.arange(length + 1)[:, None],
        "rews": rews,
        "dones": np.arange(length)[:, None] == length - 1,
        "actions": rows,
        "_OBS_KEY_observation": rng.standard_normal((length + 1, 6)).astype(np.float32),
    }


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("length", [30, 8000])
def test_buffer_of_amago_is_ready_for_training(
    tmp_path: Path, save: Callable[..., None], length: int
) -> None:
    arrays = foreign_arrays(length, np.random.default_rng(0))
    path = tmp_path / "CartPole-v1_9f86d081_1700000000.123.npz"
    save(path, **arrays)
    reader = TrajectoryReader()
    batch = pad_batch([reader.load(str(path)).slice(3, 23)])
    assert reader.load(str(path)).env_name == "CartPole-v1"
    np.testing.assert_array_equal(batch.obs["observation"][0], arrays["_OBS_KEY_observation"][3:24])
    for name in ("rl2s", "time_idxs"):
        np.testing.assert_array_equal(getattr(batch, name)[0], arrays[name][3:24])
    for name in ("actions", "rews", "dones"):
        np.testing.assert_array_equal(getattr(batch, name)[0], arrays[name][3:23])
    check_file(path)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize(
    ("name", "convert"),
    [
        ("rews", lambda array: array.astype(np.float64)),
        ("rews", lambda array: array[:, 0]),
        ("rl2s", lambda array: array.astype(np.float64)),
        ("dones", lambda array: array.astype(np.float32)),
        ("dones", lambda array: array[:, 0].astype(np.uint8)),
        ("time_idxs", lambda array: array[:, 0].astype(np.int32)),
        ("time_idxs", np.asfortranarray),
        ("actions", lambda array: array.argmax(1)[:, None]),
        ("actions", lambda array: array.argmax(1)),
        ("actions", lambda array: array.argmax(1)[:, None].astype(np.uint8)),
        ("actions", lambda array: array.astype(np.float64)),
        ("actions", lambda array: array.astype(np.int64)),
        ("actions", lambda array: array.astype(np.bool_)),
        ("_OBS_KEY_observation", lambda array: array.astype(">f4")),
    ],
)
def test_other_dtypes_and_shapes_become_ours(
    tmp_path: Path, save: Callable[..., None], name: str, convert: Callable[[Any], Any]
) -> None:
    arrays = foreign_arrays(30, np.random.default_rng(0))
    path = tmp_path / "CartPole-v1_9f86d081_1700000000.123.npz"
    save(path, **arrays)
    expected = load_trajectory(path)
    save(path, **{**arrays, name: convert(arrays[name])})
    loaded = load_trajectory(path)
    assert loaded.layout == expected.layout
    np.testing.assert_array_equal(one_hot(loaded), one_hot(expected))
    np.testing.assert_array_equal(loaded.obs["observation"], expected.obs["observation"])
    assert not loaded.obs["observation"].flags.writeable
    for field in ("rl2s", "time_idxs", "rews", "dones"):
        value, wanted = getattr(loaded, field), getattr(expected, field)
        np.testing.assert_array_equal(value, wanted, err_msg=field)
        assert value.dtype == wanted.dtype, field
        assert not value.flags.writeable, field


def test_single_discrete_action_from_either_side(tmp_path: Path) -> None:
    arrays = foreign_arrays(5, np.random.default_rng(0))
    arrays["rl2s"] = arrays["rl2s"][:, :2]
    for stored in (np.zeros((5, 1), np.int64), np.ones((5, 1), np.uint8), np.ones((5, 1), np.float32)):
        np.savez(tmp_path / "a.npz", **{**arrays, "actions": stored})
        assert one_hot(load_trajectory(tmp_path / "a.npz")).tolist() == [[1.0]] * 5


@pytest.mark.parametrize(
    ("name", "array", "problem"),
    [
        ("actions", np.zeros((9, 3), np.float32), r"actions are float32\[9, 3\].*room for 4 action columns"),
        ("actions", np.zeros((9, 3), np.int64), r"actions are int64\[9, 3\].*\(T, 4\) or, as indices"),
        ("actions", np.array(["left"] * 9), r"actions are <U4\[9\]"),
        ("rews", np.array([["many"]] * 9), r"rews is <U4\[9, 1\], but must be rows of numbers"),
        ("rews", np.zeros((9, 2), np.float32), r"rews is float32\[9, 2\], but must have 1 column"),
        ("rews", np.zeros((8, 1), np.float32), r"do not form a trajectory: .*rews \(8, 1\)"),
        ("dones", np.zeros((9, 1, 1), np.bool_), r"dones is bool\[9, 1, 1\], but must be rows"),
        ("rl2s", np.zeros((10, 1), np.float32), r"room for 0 action columns"),
        ("time_idxs", np.int64(3), r"time_idxs is int64\[\], but must be rows"),
        ("_OBS_KEY_observation", np.float32(3), "_OBS_KEY_observation is a single number"),
        ("_OBS_KEY_observation", np.zeros((9, 2)), "do not form a trajectory"),
        ("policy_version", np.array([1.5]), r"policy_version is float64\[1\], not one whole number"),
    ],
)
def test_impossible_arrays_are_named(
    tmp_path: Path, name: str, array: np.ndarray[Any, Any], problem: str
) -> None:
    arrays = {**foreign_arrays(9, np.random.default_rng(0)), name: array}
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(BrokenTrajectoryError, match=rf"a\.npz.*{problem}.*Fix:"):
        open_trajectory(tmp_path / "a.npz")
