from __future__ import annotations

import dataclasses
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loxodon.data import (
    Trajectory,
    TrajectoryReader,
    load_trajectory,
    save_trajectory,
)
from loxodon.data import files as files_module
from loxodon.data.files import TrajectoryName, format_name, parse_name

MakeTraj = Callable[..., Trajectory]
NAMED: dict[str, Any] = {"traj_id": "0123abcd", "unix_time": 1_700_000_000.25}


def arrays_of(traj: Trajectory) -> dict[str, np.ndarray[Any, Any]]:
    return {
        **traj.obs,
        **{name: getattr(traj, name) for name in ("rl2s", "time_idxs", "actions", "rews", "dones")},
    }


def test_what_lies_on_disk(tmp_path: Path, make_traj: MakeTraj) -> None:
    path = save_trajectory(tmp_path, make_traj(4, env_name="a_b/c d"), save_as="npz", **NAMED)
    assert path.name == "a-b-c-d_0123abcd_1700000000.250000.npz"
    assert load_trajectory(path).env_name == "a_b/c d"
    with np.load(path) as stored:
        assert set(stored) == {
            "rl2s", "time_idxs", "rews", "dones", "actions", "_OBS_KEY_position", "_OBS_KEY_image",
        }  # fmt: skip
        assert stored["dones"].dtype == np.bool_
        assert stored["actions"].dtype == np.uint8
        np.testing.assert_array_equal(stored["actions"], np.eye(3)[[0, 1, 2, 0]])
        assert stored["_OBS_KEY_image"].dtype == np.uint8


@pytest.mark.parametrize("save_as", ["npz", "traj"])
def test_large_files_are_mapped_and_small_ones_are_not(
    tmp_path: Path, make_traj: MakeTraj, save_as: str
) -> None:
    for length, is_mapped in ((30_000, True), (30, False)):
        reader = TrajectoryReader()
        path = save_trajectory(tmp_path, make_traj(length), save_as=save_as, **NAMED)
        traj = reader.load(str(path))
        assert reader.num_maps == is_mapped
        own_bytes = 4096 + (traj.slice(0, length).actions.nbytes if save_as == "traj" else 0)
        assert reader.ram_bytes == own_bytes + (0 if is_mapped else path.stat().st_size)


def test_mapped_file_outlives_its_deletion(tmp_path: Path, make_traj: MakeTraj) -> None:
    path = save_trajectory(tmp_path, make_traj(30_000), save_as="npz", **NAMED)
    loaded = load_trajectory(path)
    path.unlink()
    assert loaded.obs["position"][29_999, 0] == 29_999


@settings(deadline=None)
@given(
    env=st.from_regex(r"[A-Za-z0-9.-]{1,20}", fullmatch=True),
    traj_id=st.from_regex(r"[0-9a-f]{8}", fullmatch=True),
    micros=st.integers(0, 4_000_000_000_000_000),
)
def test_names_are_parsed_from_the_right(env: str, traj_id: str, micros: int) -> None:
    parsed = parse_name(format_name(env, traj_id, micros / 1e6))
    assert parsed is not None
    assert (parsed.env_name, parsed.traj_id) == (env, traj_id)
    assert round(parsed.unix_time * 1e6) == micros


def test_names_of_other_writers() -> None:
    assert parse_name("Cart_Pole_9f86d081_1700000000.npz") == ("Cart_Pole", "9f86d081", 1.7e9)
    assert parse_name("CartPole_9f86d081_1700000000.5.traj") == ("CartPole", "9f86d081", 1.7e9 + 0.5)
    assert parse_name("CartPole_9f86d081_1700000000.123.npz") == TrajectoryName(
        "CartPole", "9f86d081", 1700000000.123
    )
    for foreign in ("notes.txt", "a_b.npz", "a_b_c.npz", "env_0123abcd_17.0.traj.tmp", "_0123abcd_17.0.npz"):
        assert parse_name(foreign) is None, foreign


def test_very_long_environment_names_fit_a_file_system(tmp_path: Path, make_traj: MakeTraj) -> None:
    path = save_trajectory(tmp_path, make_traj(1, env_name="x" * 400), save_as="npz", **NAMED)
    assert parse_name(path.name) is not None


@pytest.mark.parametrize(
    ("owner", "broken_call", "save_as"),
    [
        (files_module, "pack_npz", "npz"),
        (files_module, "pack_compressed_npz", "npz-compressed"),
        (files_module, "pack_container", "traj"),
        (os, "write", "npz"),
        (os, "replace", "npz"),
    ],
)
def test_failed_write_leaves_nothing(
    tmp_path: Path,
    make_traj: MakeTraj,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    broken_call: str,
    save_as: str,
) -> None:
    def disk_full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(owner, broken_call, disk_full)
    with pytest.raises(OSError, match="No space left"):
        save_trajectory(tmp_path, make_traj(3), save_as=save_as, **NAMED)
    assert list(tmp_path.iterdir()) == []


def test_file_has_its_final_name_only_when_complete(
    tmp_path: Path, make_traj: MakeTraj, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def spy(source: Any, target: Any) -> None:
        seen.extend(entry.name for entry in tmp_path.iterdir())
        original(source, target)

    original = os.replace
    monkeypatch.setattr(os, "replace", spy)
    path = save_trajectory(tmp_path, make_traj(3), save_as="npz", **NAMED)
    assert seen == [path.name + ".tmp"]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("save_as", ["numpy", "pickle"])
def test_unknown_format_is_named(tmp_path: Path, make_traj: MakeTraj, save_as: str) -> None:
    with pytest.raises(ValueError, match=rf"{save_as}.*allowed are 'npz', 'npz-compressed', 'traj'.*Fix:"):
        save_trajectory(tmp_path, make_traj(3), save_as=save_as, **NAMED)


class _Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("key", ["actions", "_OBS_KEY_position", "unrelated"])
def test_pickled_objects_are_refused_and_never_run(
    tmp_path: Path, make_traj: MakeTraj, save: Callable[..., None], key: str
) -> None:
    path = save_trajectory(tmp_path, make_traj(3), save_as="npz", **NAMED)
    with np.load(path) as stored:
        arrays = dict(stored)
    arrays[key] = np.array([_Trap(tmp_path / "sprung")] * 3, dtype=object)
    save(path, **arrays)
    with pytest.raises(
        ValueError, match=r"not a readable trajectory file.*holds pickled Python objects.*Fix:"
    ):
        load_trajectory(path)
    assert not (tmp_path / "sprung").exists()


def test_objects_are_not_written(tmp_path: Path, make_traj: MakeTraj) -> None:
    traj = make_traj(2)
    traj = dataclasses.replace(traj, obs={"mission": np.array(["go", None, 3], dtype=object)})
    with pytest.raises(ValueError, match=r"_OBS_KEY_mission.*Python objects.*Fix:"):
        save_trajectory(tmp_path, traj, save_as="npz", **NAMED)
    assert list(tmp_path.iterdir()) == []


def test_member_that_is_no_array_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("rl2s.npy", b"hello")
    with pytest.raises(ValueError, match=r"rl2s.npy.*not an array"):
        load_trajectory(path)


def test_missing_keys_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", rews=np.zeros((2, 1)), rl2s=np.zeros((3, 2)))
    with pytest.raises(
        ValueError, match=r"it lacks time_idxs, dones, actions, _OBS_KEY_\*; it holds rews, rl2s"
    ):
        load_trajectory(tmp_path / "a.npz")


def test_wrong_lengths_inside_a_file_name_the_file(tmp_path: Path, make_traj: MakeTraj) -> None:
    path = save_trajectory(tmp_path, make_traj(3), save_as="npz", **NAMED)
    with np.load(path) as stored:
        arrays = dict(stored)
    np.savez(path, **{**arrays, "rews": arrays["rews"][:-1]})
    with pytest.raises(ValueError, match=rf"{path.name}.*do not form a trajectory"):
        load_trajectory(path)


def test_column_major_arrays_are_read_right(tmp_path: Path, make_traj: MakeTraj) -> None:
    traj = make_traj(3)
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    traj = dataclasses.replace(traj, obs={"x": np.asfortranarray(values)})
    loaded = load_trajectory(save_trajectory(tmp_path, traj, save_as="npz", **NAMED))
    np.testing.assert_array_equal(loaded.obs["x"], values)
