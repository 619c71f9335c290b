"""What all three formats promise: they give back what was written, whole or in part, or say what is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loxodon.data import (
    FILE_FORMATS,
    BrokenTrajectoryError,
    Trajectory,
    TrajectoryReader,
    check_file,
    load_trajectory,
    open_trajectory,
    pad_batch,
    save_trajectory,
)

MakeTraj = Callable[..., Trajectory]
NAMED: dict[str, Any] = {"traj_id": "0123abcd", "unix_time": 1_700_000_000.25}
OBSERVATIONS = {
    "floats": {"observation": ((4,), np.float32)},
    "image": {"image": ((5, 5, 3), np.uint8)},
    "dict": {"goal": ((2,), np.float64), "map": ((3, 3), np.int8), "flag": ((), np.bool_)},
    "integers": {"observation": ((1,), np.int64)},
    "empty": {"observation": ((4,), np.float16), "nothing": ((0,), np.float32)},
}
ACTIONS = ("discrete", "one_hot", "continuous")


def make(length: int, *, obs: str, actions: str, num_actions: int = 3, seed: int = 0) -> Trajectory:
    """A trajectory of random numbers that is consistent in itself."""
    rng = np.random.default_rng(seed)
    indices = rng.integers(0, num_actions, (length, 1))
    rows = np.eye(num_actions, dtype=np.float32)[indices[:, 0]]
    taken = {
        "discrete": indices,
        "one_hot": rows.astype(np.uint8),
        "continuous": rng.uniform(-1, 1, (length, num_actions)).astype(np.float32),
    }[actions]
    rl2s = np.zeros((length + 1, 1 + num_actions), np.float32)
    rl2s[1:, 1:] = taken if actions == "continuous" else rows
    rews = rl2s[1:, :1] = rng.standard_normal((length, 1)).astype(np.float32)
    return Trajectory(
        obs={
            key: (100 * rng.standard_normal((length + 1, *shape))).astype(dtype)
            for key, (shape, dtype) in OBSERVATIONS[obs].items()
        },
        rl2s=rl2s,
        time_idxs=np.arange(seed, seed + length + 1)[:, None],
        actions=taken,
        rews=rews,
        dones=rng.random((length, 1)) < 0.1,
        env_name="some_env",
        policy_version=seed or None,
    )


def one_hot(traj: Trajectory) -> np.ndarray[Any, Any]:
    """Actions as training sees them."""
    rows: np.ndarray[Any, Any] = pad_batch([traj]).actions[0].numpy()
    return rows


def assert_equal(got: Trajectory, expected: Trajectory) -> None:
    assert (len(got), got.layout) == (len(expected), expected.layout)
    assert (got.env_name, got.policy_version) == (expected.env_name, expected.policy_version)
    arrays = {f"obs {key}": (value, expected.obs[key]) for key, value in got.obs.items()}
    for name in ("rl2s", "time_idxs", "rews", "dones"):
        arrays[name] = getattr(got, name), getattr(expected, name)
    for name, (value, wanted) in arrays.items():
        np.testing.assert_array_equal(value, wanted, err_msg=name)
        assert value.dtype == wanted.dtype, name
        assert not value.flags.writeable, name
    assert (got.actions.dtype, got.actions.shape[1]) in {
        (np.dtype(np.int64), 1),
        (np.dtype(np.uint8), expected.rl2s.shape[1] - 1),
        (np.dtype(np.float32), expected.rl2s.shape[1] - 1),
    }
    np.testing.assert_array_equal(one_hot(got), one_hot(expected))


@pytest.mark.parametrize("save_as", FILE_FORMATS)
@pytest.mark.parametrize("obs", OBSERVATIONS)
@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("length", [1, 6000])
def test_files_give_back_what_was_written(
    tmp_path: Path, save_as: str, obs: str, actions: str, length: int
) -> None:
    traj = make(length, obs=obs, actions=actions, seed=7)
    path = save_trajectory(tmp_path, traj, save_as=save_as, **NAMED)
    assert_equal(load_trajectory(path), traj)
    check_file(path)
    opened = open_trajectory(path)
    assert (len(opened), opened.layout, opened.env_name, opened.policy_version) == (
        length, traj.layout, "some_env", 7,
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    save_as=st.sampled_from(FILE_FORMATS),
    obs=st.sampled_from(sorted(OBSERVATIONS)),
    actions=st.sampled_from(ACTIONS),
    length=st.integers(1, 3000),
    num_actions=st.sampled_from([1, 2, 3, 256, 257, 300]),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_any_slice_is_that_part_of_the_whole(
    save_as: str, obs: str, actions: str, length: int, num_actions: int, seed: int, data: st.DataObject
) -> None:
    length = min(length, 60_000 // num_actions)
    traj = make(length, obs=obs, actions=actions, num_actions=num_actions, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        path = save_trajectory(Path(folder), traj, save_as=save_as, **NAMED)
        reader = TrajectoryReader()
        for _ in range(4):
            start = data.draw(st.integers(0, length - 1))
            stop = data.draw(st.integers(start + 1, length))
            assert_equal(reader.load(str(path)).slice(start, stop), traj.slice(start, stop))
        assert_equal(load_trajectory(path), traj)


@pytest.mark.parametrize("save_as", FILE_FORMATS)
@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 2), (3, 2), (0, 6)])
def test_slices_outside_are_refused(tmp_path: Path, save_as: str, start: int, stop: int) -> None:
    path = save_trajectory(tmp_path, make(5, obs="floats", actions="discrete"), save_as=save_as, **NAMED)
    with pytest.raises(ValueError, match=rf"from {start} to {stop} of a trajectory of 5 .*Fix:"):
        open_trajectory(path).slice(start, stop)


@pytest.mark.parametrize("save_as", FILE_FORMATS)
def test_numbers_keep_their_size_on_disk(tmp_path: Path, save_as: str) -> None:
    traj = make(1000, obs="image", actions="discrete")
    size = save_trajectory(tmp_path, traj, save_as=save_as, **NAMED).stat().st_size
    assert size < 1000 * (75 + 4 * 4 + 8 + 3 + 4 + 1) + 4000  # image, rl2s, time, action, reward, done


def test_container_stores_actions_as_the_smallest_integers(tmp_path: Path) -> None:
    for num_actions, dtype in ((2, b"|u1"), (256, b"|u1"), (257, b"<u2")):
        traj = make(300, obs="floats", actions="discrete", num_actions=num_actions)
        path = save_trajectory(tmp_path, traj, save_as="traj", **NAMED)
        expected = b'{"name":"actions","dtype":"' + dtype + b'","shape":[300,1]'
        assert expected in path.read_bytes()
        assert load_trajectory(path).actions.dtype == np.int64


@pytest.mark.parametrize("save_as", FILE_FORMATS)
@pytest.mark.parametrize("bad", [[[0], [3]], [[-1], [0]], [[0, 1], [1, 0]]])
def test_actions_out_of_range_are_not_written(tmp_path: Path, save_as: str, bad: list[list[int]]) -> None:
    traj = dataclasses.replace(make(2, obs="floats", actions="discrete"), actions=np.array(bad))
    with pytest.raises(ValueError, match=r"Discrete actions int64.*room for 3 actions \(0 to 2\).*Fix:"):
        save_trajectory(tmp_path, traj, save_as=save_as, **NAMED)
    assert list(tmp_path.iterdir()) == []


def test_observations_keep_any_plain_dtype(tmp_path: Path) -> None:
    traj = make(3, obs="floats", actions="discrete")
    times = np.array([f"2026-01-0{day}" for day in (1, 2, 3, 4)], "datetime64[D]")
    words = np.array(["go", "left", "", "é"])
    traj = dataclasses.replace(traj, obs={"times": times, "words": words})
    for save_as in FILE_FORMATS:
        obs = load_trajectory(save_trajectory(tmp_path, traj, save_as=save_as, **NAMED)).obs
        for key, value in traj.obs.items():
            np.testing.assert_array_equal(obs[key], value)
            assert obs[key].dtype == value.dtype


def cuts(size: int) -> list[int]:
    """Lengths at which a file of `size` bytes is cut: in its head, at its end, and all over."""
    near = {0, 1, 3, 8, 15, 16, 20, 63, 64, 65, size - 65, size - 23, size - 22, size - 4, size - 1}
    return sorted({*near, *range(0, size, max(size // 60, 1))} & set(range(size)))


@pytest.mark.parametrize("save_as", FILE_FORMATS)
@pytest.mark.parametrize("length", [5, 6000])
def test_truncated_files_are_never_trajectories(tmp_path: Path, save_as: str, length: int) -> None:
    traj = make(length, obs="dict", actions="discrete", seed=3)
    path = save_trajectory(tmp_path, traj, save_as=save_as, **NAMED)
    content = path.read_bytes()
    for kept in cuts(len(content)):
        path.write_bytes(content[:kept])
        with pytest.raises(BrokenTrajectoryError, match=rf"{path.name} \({kept} bytes\) is not a.*Fix:"):
            open_trajectory(path)
    path.write_bytes(content + b"more")
    with pytest.raises(BrokenTrajectoryError, match=r"does not end|according to its header"):
        open_trajectory(path)


@pytest.mark.parametrize("suffix", ["npz", "traj"])
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "it is empty"),
        (b"hello, world", r"it begins with b'hello, w', like neither"),
        (b"PK\5\6" + bytes(18), "it lacks rl2s, .*it holds nothing"),
        (b"PK\3\4 and then nothing of an archive, which is long enough", "no .npz file"),
        (b"PK" + bytes(200_000), "no .npz file"),
        (b"\x89LXTRJ", "ends within the 16 bytes"),
    ],
)
def test_foreign_files_are_named(tmp_path: Path, suffix: str, content: bytes, problem: str) -> None:
    path = tmp_path / f"env_0123abcd_17.0.{suffix}"
    path.write_bytes(content)
    for read in (open_trajectory, load_trajectory, check_file):
        with pytest.raises(BrokenTrajectoryError, match=rf"{path.name}.*{problem}.*Fix: move"):
            read(path)


def test_folder_and_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(BrokenTrajectoryError, match="it is a folder"):
        open_trajectory(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_trajectory(tmp_path / "a.npz")
    with pytest.raises(FileNotFoundError):
        check_file(tmp_path / "a.npz")


@pytest.mark.parametrize("save_as", FILE_FORMATS)
@pytest.mark.parametrize("length", [20, 6000])
def test_changed_content_is_found_by_checking(tmp_path: Path, save_as: str, length: int) -> None:
    """A flipped bit in what opening does not look at; wherever it is, checking finds it."""
    traj = make(length, obs="floats", actions="continuous", seed=3)
    path = save_trajectory(tmp_path, traj, save_as=save_as, **NAMED)
    content = path.read_bytes()
    if save_as == "npz-compressed":
        with zipfile.ZipFile(path) as archive:
            info = archive.getinfo("_OBS_KEY_observation.npy")
        begin, num_bytes = info.header_offset + 200, info.compress_size - 180  # behind the array's header
    else:
        raw = traj.obs["observation"].tobytes()
        begin, num_bytes = content.index(raw), len(raw)
    for position in range(begin, begin + num_bytes, num_bytes // 20):
        damaged = bytearray(content)
        damaged[position] ^= 16
        path.write_bytes(damaged)
        with pytest.raises(BrokenTrajectoryError, match=r"checksum of|cannot be decoded.*Fix:"):
            check_file(path)
    path.write_bytes(content)
    check_file(path)


def test_damaged_block_is_named_when_it_is_needed_and_only_then(tmp_path: Path) -> None:
    traj = make(6000, obs="floats", actions="continuous")
    path = save_trajectory(tmp_path, traj, save_as="npz-compressed", **NAMED)
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("_OBS_KEY_observation.npy")
    middle = info.header_offset + info.compress_size // 2
    damaged = bytearray(path.read_bytes())
    damaged[middle : middle + 40] = bytes(40)
    path.write_bytes(damaged)
    stored = open_trajectory(path)
    assert_equal(stored.slice(0, 100), traj.slice(0, 100))
    with pytest.raises(BrokenTrajectoryError, match=rf"{path.name}.*_OBS_KEY_observation.*Fix:"):
        stored.slice(0, 6000)
    with pytest.raises(BrokenTrajectoryError, match=rf"{path.name}.*_OBS_KEY_observation.*Fix:"):
        stored.slice(0, 6000)


@pytest.mark.parametrize("save_as", ["npz", "npz-compressed"])
def test_numpy_and_torch_read_what_is_written(tmp_path: Path, save_as: str) -> None:
    import torch

    traj = make(500, obs="dict", actions="discrete", seed=12)
    path = save_trajectory(tmp_path, traj, save_as=save_as, **NAMED)
    assert len(path.name.split("_")) == 3  # AMAGO 3.x takes names apart there
    with np.load(path, allow_pickle=False) as stored:
        assert set(stored) == {
            "rl2s", "time_idxs", "rews", "dones", "actions", "policy_version",
            "_OBS_KEY_goal", "_OBS_KEY_map", "_OBS_KEY_flag",
        }  # fmt: skip
        assert stored["policy_version"].tolist() == [12]
        rows = torch.from_numpy(stored["actions"])
        np.testing.assert_array_equal(rows * torch.tensor(1.0), stored["rl2s"][1:, 1:])
        for key, value in traj.obs.items():
            np.testing.assert_array_equal(stored[f"_OBS_KEY_{key}"], value)
    traj = dataclasses.replace(traj, policy_version=None)
    with np.load(save_trajectory(tmp_path, traj, save_as=save_as, **NAMED)) as stored:
        assert "policy_version" not in stored


def test_env_names_that_no_file_name_can_hold(tmp_path: Path, make_traj: MakeTraj) -> None:
    for save_as in FILE_FORMATS:
        for env_name in ("ALE/Pong-v5", "ä_ö ü", "x" * 500, "100%", "a_b"):
            traj = make_traj(2, env_name=env_name)
            path = save_trajectory(tmp_path, traj, save_as=save_as, **NAMED)
            assert open_trajectory(path).env_name == env_name
            check_file(path)


@settings(max_examples=150, deadline=None)
@given(
    save_as=st.sampled_from(FILE_FORMATS),
    length=st.sampled_from([1, 40, 2000]),
    place=st.floats(0, 1, exclude_max=True),
    removed=st.integers(0, 9),
    added=st.binary(max_size=9),
    is_at_end=st.booleans(),
)
def test_no_damage_makes_reading_fail_otherwise(
    save_as: str, length: int, place: float, removed: int, added: bytes, is_at_end: bool
) -> None:
    """Whatever is overwritten, inserted or cut out, mostly near the ends: an error of ours, or a result."""
    traj = make(length, obs="dict", actions="discrete", seed=3)
    with tempfile.TemporaryDirectory() as folder:
        path = save_trajectory(Path(folder), traj, save_as=save_as, **NAMED)
        content = path.read_bytes()
        position = int(place**2 * len(content))
        position = len(content) - 1 - position if is_at_end else position
        path.write_bytes(content[:position] + added + content[position + removed :])
        for read in (load_trajectory, check_file):
            with contextlib.suppress(BrokenTrajectoryError):
                read(path)
