"""Two formats, one table: round trips, and clear errors for damaged, crafted and foreign files."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import struct
import tempfile
import tracemalloc
import zipfile
import zlib
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
    pad_batch,
    save_trajectory,
)
from loxodon.data import npz as npz_module

MakeTraj = Callable[..., Trajectory]
NAMED: dict[str, Any] = {"traj_id": "0123abcd", "unix_time": 1_700_000_000.25}
OBSERVATIONS: dict[str, dict[str, tuple[tuple[int, ...], Any]]] = {
    "floats": {"observation": ((4,), np.float32)},
    "dict": {
        "goal": ((2,), np.float64),
        "map": ((3, 3), np.int8),
        "flag": ((), np.bool_),
        "n": ((1,), ">i4"),
    },
    "odd": {"half": ((4,), np.float16), "nothing": ((0,), np.float32), "wave": ((2,), np.complex64)},
}
ACTIONS: dict[str, tuple[int, ...] | int | None] = {
    "continuous": None,
    "discrete": 3,
    "many": 300,
    "single": 1,
    "factors": (2, 3),
    "buttons": (2,) * 5,
    "ones": (1, 1),
}


def make(length: int, *, obs: str = "floats", actions: str = "discrete", seed: int = 0) -> Trajectory:
    """A self-consistent trajectory of random numbers; with a seed, it also has extras."""
    rng = np.random.default_rng(seed)
    kind = ACTIONS[actions]
    nvec = kind if isinstance(kind, tuple) else None
    taken: Any = rng.uniform(-1, 1, (length, 3)).astype(np.float32)
    rows = taken
    if kind is not None:
        factors = nvec or (kind,)
        taken = rng.integers(0, factors, size=(length, len(factors)))
        rows = np.concatenate([np.eye(n)[taken[:, i]] for i, n in enumerate(factors)], axis=1)
    rews = rng.standard_normal((length, 1)).astype(np.float32)
    extras = {"logits": rng.standard_normal((length, 2, 3)), "option": rng.integers(9, size=length)}
    return Trajectory(
        obs={
            key: (100 * rng.standard_normal((length + 1, *shape))).astype(dtype)
            for key, (shape, dtype) in OBSERVATIONS[obs].items()
        },
        rl2s=np.concatenate([np.zeros((1, 1 + rows.shape[1])), np.concatenate([rews, rows], 1)]).astype("f4"),
        time_idxs=np.arange(seed, seed + length + 1)[:, None],
        actions=taken,
        rews=rews,
        dones=rng.random((length, 1)) < 0.1,
        env_name="some_env",
        policy_version=seed or None,
        nvec=nvec,
        extras=extras if seed else {},
    )


def arrays_by_name(traj: Trajectory) -> dict[str, np.ndarray[Any, Any]]:
    fields = {name: getattr(traj, name) for name in ("rl2s", "time_idxs", "actions", "rews", "dones")}
    return {**traj.obs, **fields, **{f"extra {name}": value for name, value in traj.extras.items()}}


def assert_equal(got: Trajectory, expected: Trajectory) -> None:
    """Compare arrays and dtypes (in the byte order of this machine), and all other fields."""
    facts = got.env_name, got.policy_version, got.nvec
    assert facts == ("some_env", expected.policy_version, expected.nvec)
    theirs, ours = arrays_by_name(got), arrays_by_name(expected)
    assert theirs.keys() == ours.keys()
    for name, array in ours.items():
        found = theirs[name]
        np.testing.assert_array_equal(found, array, err_msg=name)
        assert found.dtype == array.dtype.newbyteorder("=")
        assert not found.flags.writeable


def save(folder: Path, traj: Trajectory, save_as: str) -> Path:
    return save_trajectory(folder, traj, save_as=save_as, **NAMED)


def arrays_in(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    with np.load(path, allow_pickle=False) as stored:
        return dict(stored)


# --- round trips ---------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    save_as=st.sampled_from(FILE_FORMATS),
    obs=st.sampled_from(sorted(OBSERVATIONS)),
    actions=st.sampled_from(sorted(ACTIONS)),
    length=st.sampled_from([1, 2, 40, 3000]),
    seed=st.integers(0, 3),
    begin=st.floats(0, 1, exclude_max=True),
    share=st.floats(0, 1, exclude_max=True),
)
def test_files_return_what_was_written_and_any_slice_of_it(
    save_as: str, obs: str, actions: str, length: int, seed: int, begin: float, share: float
) -> None:
    traj = make(min(length, 200 if actions == "many" else 3000), obs=obs, actions=actions, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder), traj, save_as)
        check_file(path)
        loaded = load_trajectory(path)
        assert_equal(loaded, traj)
        assert loaded.actions.dtype == (np.float32 if actions == "continuous" else np.uint8)
        start = int(begin * len(traj))
        stop = start + 1 + int(share * (len(traj) - start))
        assert_equal(loaded.slice(start, stop), traj.slice(start, stop))


@pytest.mark.parametrize("save_as", FILE_FORMATS)
def test_unusual_dtypes_and_names_survive(tmp_path: Path, save_as: str) -> None:
    obs = {
        "times": np.array([f"2026-01-0{day}" for day in (1, 2, 3, 4)], "datetime64[D]"),
        "words": np.array(["go", "left", "", "é"]),
        "columns": np.asfortranarray(np.arange(12.0).reshape(4, 3)),
    }
    for env_name in ("ALE/Pong-v5", "ä_ö ü", "x" * 500, "100%", "a_b"):
        traj = dataclasses.replace(make(3), obs=obs, env_name=env_name)
        path = save(tmp_path, traj, save_as)
        check_file(path)
        loaded = load_trajectory(path)
        assert loaded.env_name == env_name
        for key, value in obs.items():
            np.testing.assert_array_equal(loaded.obs[key], value)
            assert loaded.obs[key].dtype == value.dtype


def test_objects_and_rows_without_an_action_are_not_written(tmp_path: Path) -> None:
    objects = dataclasses.replace(make(2), obs={"mission": np.array(["go", None, 3], dtype=object)})
    no_rows = dataclasses.replace(make(2), actions=np.ones((2, 3), np.uint8))
    for save_as in FILE_FORMATS:
        with pytest.raises(ValueError, match=r"_OBS_KEY_mission.*Python objects.*Fix:"):
            save(tmp_path, objects, save_as)
        with pytest.raises(ValueError, match=r"not one-hot rows. Fix:"):
            save(tmp_path, no_rows, save_as)
    assert list(tmp_path.iterdir()) == []


def test_a_trajectory_too_large_for_an_archive_is_neither_written_nor_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, make(50), "npz-compressed")
    monkeypatch.setattr(npz_module, "MAX_BYTES", 1000)
    with pytest.raises(ValueError, match=r"too large for an npz.*Fix: "):
        save(tmp_path, make(50), "npz")
    monkeypatch.setattr(npz_module, "_decode", None)
    with pytest.raises(BrokenTrajectoryError, match=r"declare [\d,]+ bytes, but at most 1,000 are"):
        load_trajectory(path)


def test_an_archive_that_inflates_to_more_than_it_announces_takes_no_memory(tmp_path: Path) -> None:
    megabyte = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    block = megabyte.compress(bytes(1 << 20)) + megabyte.flush(zlib.Z_FULL_FLUSH)
    path, name, data = tmp_path / "a.npz", b"rews.npy", 1024 * block + megabyte.flush()
    fixed = (20, 0, 8, 0, 33, 0, len(data), 100, len(name))  # deflated; 100 bytes are announced
    local = struct.pack("<4s5H3L2H", b"PK\3\4", *fixed, 0) + name
    entry = struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, *fixed, 0, 0, 0, 0, 0, 0) + name
    begin = len(local) + len(data)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, len(entry), begin, 0)
    path.write_bytes(local + data + entry + end)
    tracemalloc.start()
    try:
        with pytest.raises(BrokenTrajectoryError, match=r"does not have the size that the archive declares"):
            load_trajectory(path)
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()


def test_only_suspicious_files_are_blamed_for_a_lack_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    path = save(tmp_path, make(3), "npz-compressed")
    monkeypatch.setattr(npz_module.zlib, "decompressobj", no_memory)
    with pytest.raises(MemoryError):  # the file is small, so it is not to blame
        load_trajectory(path)
    monkeypatch.setattr(npz_module, "_SUSPICIOUS_BYTES", 10)
    with pytest.raises(BrokenTrajectoryError, match="there is not enough memory for the"):
        load_trajectory(path)


# --- other programs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("save_as", ["npz", "npz-compressed"])
def test_numpy_finds_the_arrays_that_amago_looks_for(tmp_path: Path, save_as: str) -> None:
    """The names and content are the same; the archive may hold more."""
    traj = make(500, obs="dict", seed=12)
    path = save(tmp_path, traj, save_as)
    assert len(path.name.split("_")) == 3  # AMAGO 3.x splits names there
    stored = arrays_in(path)
    ours = {"policy_version", "_EXTRA_logits", "_EXTRA_option"}
    theirs = {"rl2s", "time_idxs", "rews", "dones", "actions", *(f"_OBS_KEY_{key}" for key in traj.obs)}
    assert set(stored) == theirs | ours
    assert stored["policy_version"].tolist() == [12]
    assert (stored["actions"].dtype, stored["dones"].dtype) == (np.uint8, np.bool_)
    np.testing.assert_array_equal(stored["actions"], stored["rl2s"][1:, 1:])
    for key, value in traj.obs.items():
        np.testing.assert_array_equal(stored[f"_OBS_KEY_{key}"], value)
    assert zipfile.ZipFile(path).testzip() is None
    plain = arrays_in(save(tmp_path, dataclasses.replace(traj, extras={}, policy_version=None), save_as))
    assert set(plain) == theirs


def amago_arrays(length: int) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays that AMAGO 3.x stores: rl2s, and its actions again, one-hot as float32."""
    rng = np.random.default_rng(0)
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


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("length", [30, 8000])
def test_a_buffer_of_amago_is_ready_for_training(
    tmp_path: Path, write: Callable[..., None], length: int
) -> None:
    arrays = amago_arrays(length)
    path = tmp_path / "CartPole-v1_9f86d081_1700000000.123.npz"
    write(path, **arrays)
    check_file(path)
    traj = load_trajectory(path)
    batch = pad_batch([traj.slice(3, 23)])
    assert traj.env_name == "CartPole-v1"
    np.testing.assert_array_equal(batch.obs["observation"][0], arrays["_OBS_KEY_observation"][3:24])
    for name, extra in (("rl2s", 1), ("time_idxs", 1), ("actions", 0), ("rews", 0), ("dones", 0)):
        np.testing.assert_array_equal(getattr(batch, name)[0], arrays[name][3 : 23 + extra])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("rews", lambda array: array[:, 0].astype(np.float64)),
        ("rl2s", lambda array: array.astype(">f4")),
        ("dones", lambda array: array[:, 0].astype(np.uint8)),
        ("time_idxs", lambda array: np.asfortranarray(array.astype(np.int32))),
        ("actions", lambda array: array.argmax(1)[:, None]),
        ("actions", lambda array: array.astype(np.int64)),
        ("_OBS_KEY_observation", lambda array: array.astype(">f4")),
        ("_EXTRA_values", lambda _: np.ones((30, 1), ">f4")),
    ],
)
def test_other_dtypes_and_shapes_are_converted(
    tmp_path: Path, name: str, change: Callable[[Any], Any]
) -> None:
    arrays, path = amago_arrays(30), tmp_path / "CartPole-v1_9f86d081_1700000000.123.npz"
    np.savez(path, **{**arrays, name: change(arrays.get(name))}, unknown=np.zeros(3))
    loaded = load_trajectory(path)
    for field in ("rl2s", "time_idxs", "actions", "rews", "dones"):
        value = getattr(loaded, field)
        np.testing.assert_array_equal(value, arrays[field], err_msg=field)
        assert value.dtype == arrays[field].dtype or (field == "actions" and value.dtype == np.uint8)
    for value in (loaded.rl2s, loaded.actions, *loaded.obs.values(), *loaded.extras.values()):
        assert not value.flags.writeable
        assert value.dtype.isnative
    np.testing.assert_array_equal(loaded.obs["observation"], arrays["_OBS_KEY_observation"])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"actions": np.zeros((9, 3), np.float32)}, r"Actions float32\[9, 3\].*has 4 columns for actions"),
        ({"actions": np.array(["left"] * 9)}, r"Actions <U4\[9\]"),
        ({"actions": np.int64(3)}, "actions is a single number"),
        ({"rews": np.array([["many"]] * 9)}, r"rews is <U4\[9, 1\], but must be rows of numbers"),
        ({"rews": np.zeros((9, 2), np.float32)}, r"rews is float32\[9, 2\], but must have 1 column"),
        ({"rews": np.zeros((8, 1), np.float32)}, r"do not form a trajectory: .*rews \(8, 1\)"),
        ({"dones": np.zeros((9, 1, 1), np.bool_)}, r"dones is bool\[9, 1, 1\], but must be rows"),
        ({"rl2s": np.zeros((10, 1), np.float32)}, "a reward and at least one action column"),
        ({"time_idxs": np.int64(3)}, r"time_idxs is int64\[\], but must be rows"),
        ({"_OBS_KEY_observation": np.float32(3)}, "_OBS_KEY_observation is a single number"),
        ({"_OBS_KEY_observation": np.zeros((9, 2))}, "do not form a trajectory"),
        ({"_EXTRA_values": np.zeros((8, 1))}, r"do not form a trajectory: .*extras\['values'\] \(8, 1\)"),
        ({"policy_version": np.array([1.5])}, r"policy_version is float64\[1\], but must hold whole"),
        ({"action_nvec": np.array([[2.0, 2.0]])}, r"action_nvec is float64\[1, 2\], but must hold whole"),
        ({"action_nvec": np.array([[0, 4]])}, r"action_nvec is int64\[1, 2\], but must hold whole"),
        ({"action_nvec": np.array([[2, 3]])}, "Actions"),
        ({"rews": None, "dones": None}, r"it lacks rews, dones; it holds _OBS_KEY_observation, "),
    ],
)
def test_impossible_arrays_are_named(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    arrays = {name: value for name, value in {**amago_arrays(9), **changes}.items() if value is not None}
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(BrokenTrajectoryError, match=rf"a\.npz.*{problem}.*Fix:"):
        load_trajectory(tmp_path / "a.npz")


# --- damage --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save_as", FILE_FORMATS)
def test_a_file_cut_anywhere_is_never_a_trajectory(tmp_path: Path, save_as: str) -> None:
    """A short file is cut after every byte, and a file that stays open at many places."""
    for length in (2, 6000):
        path = save(tmp_path, make(length, seed=3), save_as)
        content = path.read_bytes()
        path.write_bytes(content + b"more")
        with pytest.raises(BrokenTrajectoryError, match=r"does not end"):
            load_trajectory(path)
        for kept in reversed(range(0, len(content), 1 if length == 2 else len(content) // 60)):
            os.truncate(path, kept)
            for read in (load_trajectory, TrajectoryReader().load):
                with pytest.raises(BrokenTrajectoryError) as caught:
                    read(str(path))
                assert f"{path.name} ({kept} bytes) is not a readable" in str(caught.value)


@pytest.mark.parametrize("save_as", FILE_FORMATS)
def test_a_changed_byte_is_found_by_checking(tmp_path: Path, save_as: str) -> None:
    """Opening does not read everything in a file; checking does, so it finds any change."""
    for length in (20, 6000):
        path = save(tmp_path, make(length, actions="continuous", seed=3), save_as)
        content = path.read_bytes()
        end = content.index(b"PK\1\2")
        for position in range(60, end, max(end // 40, 1)):
            damaged = bytearray(content)
            damaged[position] ^= 16
            path.write_bytes(damaged)
            with contextlib.suppress(BrokenTrajectoryError):  # some bytes of a local header are not used
                check_file(path)
                assert_equal(load_trajectory(path), make(length, actions="continuous", seed=3))


@settings(max_examples=100, deadline=None)
@given(
    save_as=st.sampled_from(FILE_FORMATS),
    length=st.sampled_from([1, 40, 2000]),
    place=st.floats(0, 1, exclude_max=True),
    removed=st.integers(0, 9),
    added=st.binary(max_size=9),
    is_at_end=st.booleans(),
)
def test_no_damage_makes_reading_fail_in_another_way(
    save_as: str, length: int, place: float, removed: int, added: bytes, is_at_end: bool
) -> None:
    """Bytes are overwritten, inserted or removed, mostly near the ends: reading works or raises our error."""
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder), make(length, obs="odd", seed=3), save_as)
        content = path.read_bytes()
        position = int(place**2 * len(content))
        position = len(content) - 1 - position if is_at_end else position
        path.write_bytes(content[:position] + added + content[position + removed :])
        for read in (load_trajectory, check_file):
            with contextlib.suppress(BrokenTrajectoryError):
                read(path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "it is empty"),
        (b"hello, world", r"it begins with b'hello, w', unlike an .npz"),
        (b"PK\5\6" + bytes(18), "it lacks rl2s, .*it holds nothing"),
        (b"PK\3\4 and then nothing of an archive, which is long enough", "not an .npz file"),
        (b"PK" + bytes(200_000), "not an .npz file"),
    ],
)
def test_foreign_files_are_named(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "env_0123abcd_17.0.npz"
    path.write_bytes(content)
    for read in (load_trajectory, check_file):
        with pytest.raises(BrokenTrajectoryError, match=rf"{path.name}.*{problem}.*Fix: move the file"):
            read(path)


class _Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_pickled_objects_are_refused_and_never_run(tmp_path: Path, write: Callable[..., None]) -> None:
    trap = np.array([_Trap(tmp_path / "sprung")] * 3, dtype=object)
    for key in ("actions", "_OBS_KEY_observation", "_EXTRA_values", "unrelated"):
        write(tmp_path / "a.npz", **{**amago_arrays(3), key: trap})
        with pytest.raises(BrokenTrajectoryError, match=r"holds pickled Python objects.*Fix:"):
            load_trajectory(tmp_path / "a.npz")
    assert not (tmp_path / "sprung").exists()


def with_member(path: Path, content: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("rl2s.npy", content)


def with_directory(path: Path, at: int, content: bytes) -> None:
    """Overwrite the directory entry of the first member of a good archive."""
    data = save(path.parent, make(3), "npz").read_bytes()
    at += data.index(b"PK\1\2")
    path.write_bytes(data[:at] + content + data[at + len(content) :])


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda path: with_member(path, b"hello"), "rl2s.npy' is not an array"),
        (lambda path: with_member(path, b"\x93NUMPY\1\0\xff\xff...."), "rl2s.npy' is cut off"),
        (lambda path: with_member(path, b"\x93NUMPY\1\0\x10\0{'descr': '<f4', "), "cannot be parsed"),
        (lambda path: with_directory(path, 10, b"\x63\0"), "unknown method"),
        (lambda path: with_directory(path, 20, b"\0\xff\xff\0"), "is cut off"),
        (lambda path: with_directory(path, 24, b"\xff" * 4), "64-bit records"),
        (lambda path: with_directory(path, 42, b"\0\xff\xff\0"), "is not where the directory"),
        (lambda path: with_directory(path, 0, b"PK\0\0"), "directory of the archive is damaged"),
    ],
)
def test_archives_with_false_entries_are_named(
    tmp_path: Path, spoil: Callable[[Path], None], problem: str
) -> None:
    spoil(tmp_path / "a.npz")
    with pytest.raises(BrokenTrajectoryError, match=problem):
        load_trajectory(tmp_path / "a.npz")
