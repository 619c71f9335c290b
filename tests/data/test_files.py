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

from loxodon.data import Trajectory, TrajectoryReader, load_trajectory, save_trajectory
from loxodon.data import files as files_module
from loxodon.data.files import TrajectoryName, format_name, parse_name
from loxodon.data.npz import read_npz

MakeTraj = Callable[..., Trajectory]
NAMED: dict[str, Any] = {"traj_id": "0123abcd", "unix_time": 1_700_000_000.25}


def arrays_of(traj: Trajectory) -> dict[str, np.ndarray[Any, Any]]:
    return {
        **traj.obs,
        **{name: getattr(traj, name) for name in ("rl2s", "time_idxs", "actions", "rews", "dones")},
    }


@pytest.mark.parametrize("save_as", ["npz", "npz-compressed"])
@pytest.mark.parametrize("length", [1, 30_000])  # read at once, and mapped
def test_file_gives_back_values_and_dtypes(
    tmp_path: Path, make_traj: MakeTraj, save_as: str, length: int
) -> None:
    traj = make_traj(length, env_name="maze")
    path = save_trajectory(tmp_path, traj, save_as=save_as, **NAMED)
    loaded = load_trajectory(path)
    assert loaded.env_name == "maze"
    for name, value in arrays_of(traj).items():
        got = arrays_of(loaded)[name]
        np.testing.assert_array_equal(got, value)
        assert got.dtype == value.dtype, name
        assert not got.flags.writeable, name


def test_what_lies_on_disk(tmp_path: Path, make_traj: MakeTraj) -> None:
    path = save_trajectory(tmp_path, make_traj(4, env_name="a_b/c d"), save_as="npz", **NAMED)
    assert path.name == "a_b-c-d_0123abcd_1700000000.250000.npz"
    with np.load(path) as stored:
        assert set(stored) == {
            "rl2s", "time_idxs", "rews", "dones", "actions", "_OBS_KEY_position", "_OBS_KEY_image",
        }  # fmt: skip
        assert stored["dones"].dtype == np.bool_
        assert stored["actions"].dtype == np.int64
        assert stored["_OBS_KEY_image"].dtype == np.uint8


def test_large_files_are_mapped_and_small_ones_are_not(tmp_path: Path, make_traj: MakeTraj) -> None:
    path = save_trajectory(tmp_path, make_traj(30_000), save_as="npz", **NAMED)
    content = read_npz(path)
    assert content.is_mapped
    assert content.ram_bytes < 10_000
    content = read_npz(path, map_above_bytes=1 << 30)
    assert not content.is_mapped
    assert content.ram_bytes > path.stat().st_size


def test_mapped_file_outlives_its_deletion(tmp_path: Path, make_traj: MakeTraj) -> None:
    path = save_trajectory(tmp_path, make_traj(30_000), save_as="npz", **NAMED)
    loaded = load_trajectory(path)
    path.unlink()
    assert loaded.obs["position"][29_999, 0] == 29_999


@settings(deadline=None)
@given(
    env=st.from_regex(r"[A-Za-z0-9_.-]{1,20}", fullmatch=True),
    traj_id=st.from_regex(r"[0-9a-f]{8}", fullmatch=True),
    micros=st.integers(0, 4_000_000_000_000_000),
)
def test_names_are_parsed_from_the_right(env: str, traj_id: str, micros: int) -> None:
    parsed = parse_name(format_name(env, traj_id, micros / 1e6))
    assert parsed is not None
    assert (parsed.env_name, parsed.traj_id) == (env, traj_id)
    assert round(parsed.unix_time * 1e6) == micros


def test_names_of_other_writers() -> None:
    assert parse_name("CartPole_9f86d081_1700000000.123.npz") == TrajectoryName(
        "CartPole", "9f86d081", 1700000000.123
    )
    for foreign in ("notes.txt", "a_b.npz", "a_b_c.npz", "env_0123abcd_17.0.npz.tmp", "_0123abcd_17.0.npz"):
        assert parse_name(foreign) is None, foreign


def test_very_long_environment_names_fit_a_file_system(tmp_path: Path, make_traj: MakeTraj) -> None:
    path = save_trajectory(tmp_path, make_traj(1, env_name="x" * 400), save_as="npz", **NAMED)
    assert parse_name(path.name) is not None


@pytest.mark.parametrize(
    ("owner", "broken_call", "save_as"),
    [(files_module, "pack_npz", "npz"), (np, "savez_compressed", "npz-compressed"), (os, "replace", "npz")],
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
    with pytest.raises(ValueError, match=r"(?i)not a readable trajectory file.*pickle.*Fix:"):
        load_trajectory(path)
    assert not (tmp_path / "sprung").exists()


def test_objects_are_not_written(tmp_path: Path, make_traj: MakeTraj) -> None:
    traj = make_traj(2)
    traj = dataclasses.replace(traj, obs={"mission": np.array(["go", None, 3], dtype=object)})
    with pytest.raises(ValueError, match=r"_OBS_KEY_mission.*Python objects.*Fix:"):
        save_trajectory(tmp_path, traj, save_as="npz", **NAMED)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("save_as", ["npz", "npz-compressed"])
@pytest.mark.parametrize("length", [5, 30_000])
def test_truncated_file_is_named(
    tmp_path: Path, make_traj: MakeTraj, kept: float, save_as: str, length: int
) -> None:
    path = save_trajectory(tmp_path, make_traj(length), save_as=save_as, **NAMED)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(ValueError, match=rf"{path.name}.*not a readable trajectory file.*Fix:"):
        load_trajectory(path)


def test_member_that_is_no_array_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("rl2s.npy", b"hello")
    with pytest.raises(ValueError, match=r"rl2s.npy.*not an array"):
        load_trajectory(path)


def test_missing_keys_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", rews=np.zeros((2, 1)), rl2s=np.zeros((3, 2)))
    with pytest.raises(
        ValueError, match=r"a.npz lacks time_idxs, dones, actions, _OBS_KEY_\*; it holds rews, rl2s"
    ):
        load_trajectory(tmp_path / "a.npz")


def test_wrong_lengths_inside_a_file_name_the_file(tmp_path: Path, make_traj: MakeTraj) -> None:
    path = save_trajectory(tmp_path, make_traj(3), save_as="npz", **NAMED)
    with np.load(path) as stored:
        arrays = dict(stored)
    np.savez(path, **{**arrays, "rews": arrays["rews"][:-1]})
    with pytest.raises(ValueError, match=rf"{path.name} is broken.*do not form a trajectory"):
        load_trajectory(path)


def test_other_number_types_become_ours(tmp_path: Path, make_traj: MakeTraj) -> None:
    path = save_trajectory(tmp_path, make_traj(3), save_as="npz", **NAMED)
    with np.load(path) as stored:
        arrays = dict(stored)
    foreign = {
        "rews": arrays["rews"].astype(np.float64),
        "actions": np.eye(3),
        "dones": np.uint8(arrays["dones"]),
    }
    np.savez(path, **{**arrays, **foreign})
    loaded = load_trajectory(path)
    for got, wanted in ((loaded.rews, np.float32), (loaded.actions, np.float32), (loaded.dones, np.bool_)):
        assert got.dtype == wanted
    assert loaded.dones[:, 0].tolist() == [False, False, True]


def test_column_major_arrays_are_read_right(tmp_path: Path, make_traj: MakeTraj) -> None:
    traj = make_traj(3)
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    traj = dataclasses.replace(traj, obs={"x": np.asfortranarray(values)})
    loaded = load_trajectory(save_trajectory(tmp_path, traj, save_as="npz", **NAMED))
    np.testing.assert_array_equal(loaded.obs["x"], values)


def test_reader_reads_a_file_once(tmp_path: Path, make_traj: MakeTraj) -> None:
    path = str(save_trajectory(tmp_path, make_traj(3), save_as="npz", **NAMED))
    reader = TrajectoryReader()
    assert reader.load(path) is reader.load(path)
    reader.forget([path, "never opened"])
    assert reader.ram_bytes == 0
    Path(path).unlink()
    with pytest.raises(FileNotFoundError):
        reader.load(path)


def test_reader_stays_within_its_bounds(tmp_path: Path, make_traj: MakeTraj) -> None:
    def write(length: int, i: int) -> str:
        return str(
            save_trajectory(tmp_path, make_traj(length), save_as="npz", traj_id=f"{i:08x}", unix_time=1e9)
        )

    small, large = [write(50, i) for i in range(6)], [write(30_000, i) for i in range(10, 14)]
    size = Path(small[0]).stat().st_size + 4096
    reader = TrajectoryReader(max_ram_bytes=3 * size + 3 * 4096, max_open_maps=2)
    for path in (*small, *large, small[-1]):
        reader.load(path)
        assert reader.num_maps <= 2
        assert reader.ram_bytes <= 3 * size + 3 * 4096
    recent = reader.load(large[-1])
    assert reader.load(large[-1]) is recent
    assert reader.num_maps == 2
