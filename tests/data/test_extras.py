"""Extra columns of trajectories: kept by every format, read when asked for, and no concern of training."""

from __future__ import annotations

import dataclasses
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loxodon.data import (
    FILE_FORMATS,
    BatchLoader,
    BrokenTrajectoryError,
    DiskTrajDataset,
    MemoryTrajDataset,
    Relabeler,
    Trajectory,
    TrajectoryReader,
    check_file,
    load_trajectory,
    open_trajectory,
    save_trajectory,
)
from loxodon.data import compressed as compressed_module
from loxodon.data.commands.command_line import main
from loxodon.data.commands.convert import describe_difference
from loxodon.data.extras import Extras

MakeTraj = Callable[..., Trajectory]
MakeDataset = Callable[..., DiskTrajDataset]
NAMED: dict[str, Any] = {"traj_id": "0123abcd", "unix_time": 1e9}


def extras_of(length: int, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {
        "log_probs": rng.standard_normal((length, 1)).astype(np.float32),
        "values": rng.standard_normal((length, 1)).astype(np.float32),
        "raw_rewards": rng.standard_normal((length, 1)).astype(np.float32),
        "samples": rng.standard_normal((length, 3)).astype(np.float32),
        "logits": rng.standard_normal((length, 2, 3)),
        "option": rng.integers(9, size=length).astype(np.int16),
    }


def with_extras(traj: Trajectory, seed: int = 0) -> Trajectory:
    return dataclasses.replace(traj, extras=extras_of(len(traj), seed), policy_version=4)


def assert_same_extras(got: Any, expected: Any, start: int = 0, stop: int | None = None) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        part = value[start:stop]
        np.testing.assert_array_equal(got[name], part, err_msg=name)
        assert (got[name].dtype, got[name].shape) == (part.dtype, part.shape), name


# --- files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save_as", FILE_FORMATS)
@pytest.mark.parametrize("length", [1, 40, 6000])
def test_files_give_back_extras_whole_and_in_part(
    tmp_path: Path, make_traj: MakeTraj, save_as: str, length: int
) -> None:
    traj = with_extras(make_traj(length))
    path = save_trajectory(tmp_path, traj, save_as=save_as, **NAMED)
    loaded = load_trajectory(path)
    assert describe_difference(traj, loaded) is None
    assert loaded.policy_version == 4
    assert_same_extras(loaded.extras, traj.extras)
    assert not any(value.flags.writeable for value in loaded.extras.values())
    check_file(path)
    reader = TrajectoryReader()
    for start, stop in ((0, 1), (length // 3, length // 3 + 1), (length // 2, length), (length - 1, length)):
        if start < stop:
            window = reader.load(str(path)).slice(start, stop)
            assert_same_extras(window.extras, traj.extras, start, stop)
            inner = window.slice(len(window) - 1, len(window))  # a window of a window
            assert_same_extras(inner.extras, traj.extras, stop - 1, stop)


@pytest.mark.parametrize("save_as", FILE_FORMATS)
def test_files_without_extras_are_what_they_were(tmp_path: Path, make_traj: MakeTraj, save_as: str) -> None:
    plain = make_traj(30)
    path = save_trajectory(tmp_path, plain, save_as=save_as, **NAMED)
    assert dict(load_trajectory(path).extras) == {}
    assert dict(open_trajectory(path).slice(3, 9).extras) == {}
    assert b"_EXTRA_" not in path.read_bytes()


@pytest.mark.parametrize("save_as", ["npz", "npz-compressed"])
def test_the_members_of_an_archive_are_those_without_extras_and_more(
    tmp_path: Path, make_traj: MakeTraj, save_as: str
) -> None:
    """A reader that looks for its own names, as AMAGO 3.x does, finds the same under them."""
    traj = make_traj(50)
    (tmp_path / "a").mkdir()
    plain = save_trajectory(tmp_path / "a", traj, save_as=save_as, **NAMED)
    full = save_trajectory(tmp_path, with_extras(traj), save_as=save_as, **NAMED)
    with np.load(plain) as before, np.load(full) as after:
        added = {f"_EXTRA_{name}" for name in extras_of(1)} | {"policy_version"}
        assert set(after) == set(before) | added
        for name in before:
            np.testing.assert_array_equal(after[name], before[name])
        np.testing.assert_array_equal(after["_EXTRA_values"], extras_of(50)["values"])


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_archives_of_numpy_may_have_extras_of_any_byte_order(
    tmp_path: Path, make_traj: MakeTraj, save: Callable[..., None]
) -> None:
    plain = save_trajectory(tmp_path, make_traj(40), save_as="npz", **NAMED)
    with np.load(plain) as file:
        arrays = dict(file)
    expected = extras_of(40)["values"]
    foreign = tmp_path / "env_0123abce_5.0.npz"
    save(foreign, **arrays, _EXTRA_values=expected.astype(">f4"), unknown=np.zeros(3))
    window = open_trajectory(foreign).slice(5, 20)
    assert_same_extras(window.extras, {"values": expected}, 5, 20)
    assert not window.extras["values"].flags.writeable


def test_windows_of_compressed_files_decode_extras_only_when_asked(
    tmp_path: Path, make_traj: MakeTraj, monkeypatch: pytest.MonkeyPatch
) -> None:
    traj = with_extras(make_traj(6000))
    path = save_trajectory(tmp_path, traj, save_as="npz-compressed", **NAMED)
    decoded: list[str] = []
    original = compressed_module.BlockStore._decode

    def note(self: Any, member: Any, first: int, last: int) -> None:
        decoded.append(member.name)
        original(self, member, first, last)

    monkeypatch.setattr(compressed_module.BlockStore, "_decode", note)
    window = open_trajectory(path).slice(100, 200)
    changed = dataclasses.replace(window, rews=window.rews + 1)  # checks lengths
    assert "values" in changed.extras
    assert "nothing" not in changed.extras
    assert len(changed.extras) == 6
    assert not [name for name in decoded if "EXTRA" in name]
    assert_same_extras({"values": changed.extras["values"]}, {"values": traj.extras["values"]}, 100, 200)
    assert [name for name in decoded if "EXTRA" in name] == ["_EXTRA_values.npy"]


def test_extras_cost_no_memory_in_the_cache_of_files(tmp_path: Path, make_traj: MakeTraj) -> None:
    sizes = []
    for number, traj in enumerate((make_traj(30_000), with_extras(make_traj(30_000)))):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = save_trajectory(folder, traj, save_as="npz-compressed", **NAMED)
        reader = TrajectoryReader()
        window = reader.load(str(path)).slice(0, 50)
        dict(window.extras)
        sizes.append(reader.ram_bytes)
    assert sizes[0] == sizes[1]  # both are mapped


def test_views_of_mapped_files_are_not_copied(tmp_path: Path, make_traj: MakeTraj) -> None:
    for save_as in ("npz", "traj"):
        path = save_trajectory(tmp_path, with_extras(make_traj(6000)), save_as=save_as, **NAMED)
        reader = TrajectoryReader()
        stored = reader.load(str(path))
        assert reader.num_maps == 1
        first, again = (stored.slice(10, 20).extras["values"] for _ in range(2))
        assert np.shares_memory(first, again)


@pytest.mark.parametrize("save_as", FILE_FORMATS)
def test_extras_of_another_length_make_a_broken_file(
    tmp_path: Path, make_traj: MakeTraj, make_dataset: MakeDataset, save_as: str
) -> None:
    traj = with_extras(make_traj(300))
    dataset = make_dataset()
    folder = dataset.save_new_trajs_to
    assert folder is not None
    object.__setattr__(traj, "extras", {"values": np.zeros((299, 1), np.float32)})
    path = save_trajectory(folder, traj, save_as=save_as, **NAMED)
    for read in (open_trajectory, load_trajectory, check_file):
        with pytest.raises(
            BrokenTrajectoryError, match=r"extra 'values' is float32\[299, 1\], but there are 300"
        ):
            read(path)
    for number in range(1, 4):
        save_trajectory(folder, make_traj(5), save_as="npz", traj_id=f"{number:08x}", unix_time=1e9)
    dataset.refresh()
    assert {len(window) for window in dataset.sample_windows(50, np.random.default_rng(0))} == {5}
    assert not path.exists()
    assert "extra 'values'" in next(tmp_path.rglob("quarantine/*.txt")).read_text()
    dataset.close()


def test_a_damaged_extra_is_found_by_checking_and_told_to_who_reads_it(
    tmp_path: Path, make_traj: MakeTraj
) -> None:
    traj = with_extras(make_traj(6000))
    path = save_trajectory(tmp_path, traj, save_as="npz-compressed", **NAMED)
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("_EXTRA_samples.npy")
    content = bytearray(path.read_bytes())
    middle = info.header_offset + info.compress_size // 2
    content[middle : middle + 64] = bytes(64)
    path.write_bytes(content)
    whole = load_trajectory(path)  # training does not see it
    np.testing.assert_array_equal(whole.extras["values"], traj.extras["values"])
    with pytest.raises(BrokenTrajectoryError, match=r"_EXTRA_samples.npy' cannot be decoded.*Fix: move"):
        whole.extras["samples"]
    with pytest.raises(BrokenTrajectoryError, match="_EXTRA_samples"):
        check_file(path)


# --- trajectories --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 1), (6, 1), ()])
def test_every_extra_has_one_row_per_transition(make_traj: MakeTraj, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"extras\['values'\] \(.*dones and extras have T rows.*Fix:"):
        dataclasses.replace(make_traj(5), extras={"values": np.zeros(shape)})


def test_windows_change_processes_with_the_rows_that_they_show(tmp_path: Path, make_traj: MakeTraj) -> None:
    traj = with_extras(make_traj(500))
    path = save_trajectory(tmp_path, traj, save_as="npz-compressed", **NAMED)
    window = open_trajectory(path).slice(7, 30)
    assert isinstance(window.extras, Extras)
    assert_same_extras(pickle.loads(pickle.dumps(window)).extras, traj.extras, 7, 30)
    with pytest.raises(KeyError):
        window.extras["nothing"]


# --- datasets and batches ------------------------------------------------------------------------------


def write_folder(dataset: DiskTrajDataset, trajs: list[Trajectory], save_as: str) -> None:
    folder = dataset.save_new_trajs_to
    assert folder is not None
    for i, traj in enumerate(trajs):
        save_trajectory(folder, traj, save_as=save_as, traj_id=f"{i:08x}", unix_time=1e9 + i)
    dataset.refresh()


@pytest.mark.parametrize("save_as", FILE_FORMATS)
@pytest.mark.parametrize("every", [1, 2])
def test_batches_are_the_same_whether_files_have_extras_or_not(
    tmp_path: Path, make_traj: MakeTraj, save_as: str, every: int
) -> None:
    plain = [dataclasses.replace(make_traj(3 + 7 * i, first=100 * i), policy_version=4) for i in range(8)]
    full = [with_extras(traj) if i % every == 0 else traj for i, traj in enumerate(plain)]
    batches = []
    for name, trajs in (("plain", plain), ("full", full)):
        dataset = DiskTrajDataset()
        dataset.configure(
            max_seq_len=9,
            padded_sampling="none",
            has_edit_rights=True,
            default_root=str(tmp_path),
            default_name=name,
        )
        write_folder(dataset, trajs, save_as)
        batches.append(list(BatchLoader(dataset, batch_size=6, num_workers=0, seed=3).epoch(0, 10)))
        dataset.close()
    for one, other in zip(*batches, strict=True):
        ours, theirs = vars(one), vars(other)
        for key, value in ours.pop("obs").items():
            np.testing.assert_array_equal(value, theirs["obs"][key])
        for name, value in ours.items():
            np.testing.assert_array_equal(value, theirs[name], err_msg=name)


@pytest.mark.parametrize("save_as", FILE_FORMATS)
def test_sampled_windows_show_their_extras(
    make_traj: MakeTraj, make_dataset: MakeDataset, save_as: str
) -> None:
    trajs = [with_extras(make_traj(60, first=1000 * i), seed=i) for i in range(3)]
    dataset = make_dataset(max_seq_len=16)
    write_folder(dataset, [*trajs, make_traj(60, first=3000)], save_as)
    seen = set()
    for window in dataset.sample_windows(60, np.random.default_rng(0)):
        number, start = divmod(int(window.obs["position"][0, 0]), 1000)
        seen.add(number)
        if number == 3:
            assert not window.extras
        else:
            assert_same_extras(window.extras, trajs[number].extras, start, start + len(window))
    assert seen == {0, 1, 2, 3}
    dataset.close()


class Shifted(Relabeler):
    """Other rewards, for trajectories with an extra; the rest as they are."""

    def relabel(self, traj: Trajectory, rng: np.random.Generator) -> Trajectory:
        return dataclasses.replace(traj, rews=traj.rews + 1) if "kept" not in traj.extras else traj


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_relabelled_trajectories_drop_what_is_not_true_of_them(
    make_traj: MakeTraj, make_dataset: MakeDataset, is_on_disk: bool
) -> None:
    traj = with_extras(make_traj(20))
    kept = dataclasses.replace(traj, extras={**traj.extras, "kept": np.ones(20)})
    for stored, expected in ((traj, {"samples", "logits", "option"}), (kept, set(kept.extras))):
        if is_on_disk:
            disk = make_dataset(relabeler=Shifted())
            disk.delete()
            write_folder(disk, [stored], "npz-compressed")
            window = disk.sample_random_trajectory(np.random.default_rng(0))
            disk.close()
        else:
            memory = MemoryTrajDataset([stored], relabeler=Shifted())
            memory.configure(
                max_seq_len=5, padded_sampling="none", has_edit_rights=True, default_root="", default_name=""
            )
            window = memory.sample_random_trajectory(np.random.default_rng(0))
        assert set(window.extras) == expected
        assert window.extras["samples"].shape == (5, 3)


# --- commands ------------------------------------------------------------------------------------------


def test_commands_know_of_extras(
    tmp_path: Path, make_traj: MakeTraj, capsys: pytest.CaptureFixture[str]
) -> None:
    fifo = tmp_path / "fifo"
    fifo.mkdir()
    path = save_trajectory(fifo, with_extras(make_traj(6)), save_as="npz", **NAMED)
    save_trajectory(fifo, make_traj(6), save_as="npz", traj_id="00000001", unix_time=1e9)
    assert main(["show", str(path)]) == 0
    out = capsys.readouterr().out
    assert "extras log_probs float32[1], values float32[1], raw_rewards float32[1], samples float32[3]" in out
    assert "logits float64[2, 3], option int16[]" in out
    assert "policy version 4" in out
    assert main(["ls", str(fifo)]) == 0
    assert "extras: log_probs 1, values 1" in capsys.readouterr().out
    assert main(["check", str(fifo)]) == 0
    assert "2 good, 0 broken, 0 of another layout" in capsys.readouterr().out
    for save_as in FILE_FORMATS:
        assert main(["convert", str(fifo), str(tmp_path / save_as), "--to", save_as]) == 0
        converted = load_trajectory(next((tmp_path / save_as).glob("*0123abcd*")))
        assert_same_extras(converted.extras, extras_of(6))


def test_convert_compares_extras(make_traj: MakeTraj) -> None:
    traj = with_extras(make_traj(4))
    assert describe_difference(traj, make_traj(4)) == "set of extras"
    other = dataclasses.replace(traj, extras={**traj.extras, "values": traj.extras["values"] + 1})
    assert describe_difference(traj, other) == "extra values"
    flat = dataclasses.replace(traj, extras={**traj.extras, "values": traj.extras["values"][:, 0]})
    assert describe_difference(traj, flat) == "extra values"
