"""What happens to disks: damaged and foreign files, vanished folders, no space; no file runs any code."""

from __future__ import annotations

import io
import logging
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loxodon.data import DiskTrajDataset, load_trajectory
from loxodon.experiment import Experiment, load_policy
from loxodon.experiment.checkpoint import policy_file, store
from loxodon.experiment.checkpoint.store import MARKER, read_values

from .fakes import make_experiment, run
from .test_checkpoints import started


def four_epochs(folder: Path) -> Experiment:
    """A finished run with checkpoints of the epochs 1 and 3."""
    return run(make_experiment(folder, epochs=4))


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "bit": ("model.safetensors", flip_a_byte, "does not have the checksum it was written with"),
    "cut": ("shared.pt", cut_short, r"shared.pt has \d+ bytes instead of"),
    "gone": ("rank_0.pt", Path.unlink, "rank_0.pt is missing"),
    "marker": (MARKER, cut_short, "its marker COMPLETE cannot be read"),
}


@pytest.mark.parametrize("how", list(DAMAGES))
def test_a_damaged_newest_checkpoint_is_passed_over_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    name, spoil, text = DAMAGES[how]
    exp = four_epochs(tmp_path)
    spoil(exp.checkpoints.state_dir(3) / name)
    again = started(tmp_path, epochs=4)
    with caplog.at_level(logging.WARNING, logger="loxodon"):
        caplog.clear()
        assert again.load_checkpoint() == 2
    (warning,) = (r.getMessage() for r in caplog.records if "damaged" in r.getMessage())
    assert "tiny_epoch_3 is damaged" in warning
    assert warning.endswith("Going on from the one of epoch 1 instead.")
    with pytest.raises(ValueError, match=rf"tiny_epoch_3 is damaged: .*{text}.*Fix:"):
        started(tmp_path, epochs=4).load_checkpoint(3)
    if how == "marker":
        again.learn()  # and writes the damaged one anew
        again.close()
        assert again.checkpoints.newest_intact_epoch() == (3, [])
        flip_a_byte(exp.checkpoints.state_dir(1) / name)
        spoil(exp.checkpoints.state_dir(3) / name)
        with pytest.raises(ValueError, match=r"No checkpoint can.*epoch_3 is.*epoch_1 is damaged.*Fix:"):
            started(tmp_path, epochs=4).load_checkpoint()


def test_a_save_that_died_between_the_two_renames_is_finished(tmp_path: Path) -> None:
    exp = run(make_experiment(tmp_path))
    final = exp.checkpoints.state_dir(1)
    final.rename(final.with_name(final.name + ".replaced"))
    final.with_name("tiny_epoch_5.tmp").mkdir()
    exp.checkpoints.make_folders(clean=True)
    assert exp.checkpoints.complete_epochs() == [1]
    assert list(final.parent.iterdir()) == [final]


def test_a_deleted_checkpoint_folder_is_made_again(tmp_path: Path) -> None:
    exp = started(tmp_path, epochs=4, val_interval=None)
    update, seen = exp.learner.update, []

    def deleting(*args: Any) -> Any:
        if exp.epoch == 2 and not seen:
            shutil.rmtree(exp.checkpoints.root)
            seen.append(True)
        return update(*args)

    exp.learner.update = deleting  # type: ignore[method-assign]
    exp.learn()
    exp.close()
    assert exp.checkpoints.complete_epochs() == [3]
    assert exp.checkpoints.latest_path.exists()
    assert (exp.checkpoints.root / "config.txt").exists()
    assert started(tmp_path, epochs=4).load_checkpoint() == 4


# --- disks that do not take it --------------------------------------------------------------------------


def full(*args: Any, **kwargs: Any) -> Any:
    raise OSError(28, "No space left on device")


def torch_on_a_full_disk(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("PytorchStreamWriter failed writing file data/0: No space left on device")


@pytest.mark.parametrize(("name", "failure"), [("save_file", full), ("write_values", torch_on_a_full_disk)])
def test_a_full_disk_is_one_clear_error_and_what_there_is_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, failure: Any
) -> None:
    exp = started(tmp_path, epochs=4)
    commit = exp.checkpoints.commit

    def commit_on_a_full_disk(*args: Any) -> Any:
        if exp.epoch >= 4:
            monkeypatch.setattr(store, name, failure)
        return commit(*args)

    exp.checkpoints.commit = commit_on_a_full_disk  # type: ignore[method-assign]
    with pytest.raises(OSError, match=r"checkpoint of epoch 3 could not .*No space.*epochs \[1\].*Fix:"):
        exp.learn()
    exp.close()
    monkeypatch.undo()
    assert exp.checkpoints.newest_intact_epoch() == (1, [])
    assert [path.name for path in exp.checkpoints.states_dir.iterdir()] == ["tiny_epoch_1"]
    lengths = [len(load_trajectory(path)) for path in (exp.run_dir / "buffer" / "fifo").glob("*.npz")]
    assert sum(lengths) == exp.env_steps == 4 * 12 * 3


def test_a_save_that_fails_puts_the_earlier_one_of_its_epoch_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exp = started(tmp_path)
    exp.epoch = 1
    exp.save_checkpoint()
    rename = Path.rename

    def failing(self: Path, target: Any) -> Any:
        if self.name.endswith(".tmp"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match=r"epoch 0 could not be written.*Input/output error"):
        exp.save_checkpoint()
    monkeypatch.undo()
    assert [path.name for path in exp.checkpoints.states_dir.iterdir()] == ["tiny_epoch_0"]
    assert exp.load_checkpoint() == 1


def test_a_file_in_the_place_of_the_folder_is_one_clear_error(tmp_path: Path) -> None:
    exp = started(tmp_path)
    exp.checkpoints.states_dir.rmdir()
    exp.checkpoints.states_dir.touch()
    with pytest.raises(OSError, match=r"could not .*states.*There is no earlier one. Fix:.*start again"):
        exp.save_checkpoint()


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not hold root back")
def test_a_read_only_folder_is_one_clear_error(tmp_path: Path) -> None:
    exp = started(tmp_path)
    exp.checkpoints.states_dir.chmod(0o500)
    with pytest.raises(OSError, match=r"could not be written to.*Permission denied.*Fix:"):
        exp.save_checkpoint()
    exp.checkpoints.states_dir.chmod(0o700)


def test_a_policy_that_cannot_be_published_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exp = started(tmp_path)
    exp.write_latest_policy()
    before = exp.checkpoints.latest_path.read_bytes()
    monkeypatch.setattr(policy_file, "save_file", full)
    with pytest.raises(OSError, match=r"policy could not be written.*No space.*Fix:"):
        exp.write_latest_policy()
    assert exp.checkpoints.latest_path.read_bytes() == before
    assert len(list(exp.checkpoints.latest_path.parent.iterdir())) == 1


# --- files by somebody else -----------------------------------------------------------------------------


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = str(target)

    def __reduce__(self) -> Any:
        return (open, (self.target, "w"))


@pytest.fixture
def went_off(tmp_path: Path) -> Iterator[Path]:
    """The file that a bomb makes, which nothing may do."""
    yield tmp_path / "it_went_off"
    assert not (tmp_path / "it_went_off").exists(), "a pickle was executed"


def by_torch(value: Any, **settings: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **settings)
    return buffer.getvalue()


def with_a_pickle_of(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """A file of torch with another pickle in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, change(content) if name.endswith("data.pkl") else content)
    return buffer.getvalue()


CRAFTED: dict[str, Callable[[Path], bytes]] = {
    "pickle": lambda target: pickle.dumps(Bomb(target)),
    "torch": lambda target: by_torch({"rng": Bomb(target)}),
    "old torch": lambda target: by_torch(Bomb(target), _use_new_zipfile_serialization=False),
    "larger than the file": lambda _: by_torch({"x": torch.zeros(1).expand(10**12)}),
    "another size": lambda _: with_a_pickle_of(
        by_torch({"x": torch.zeros(10)}), lambda data: data.replace(b"K\n", b"J\x00\x00\x00\x40")
    ),
    "array of objects": lambda _: by_torch({None: ("O", (1,), torch.zeros(8, dtype=torch.uint8))}),
    "nesting": lambda _: with_a_pickle_of(
        by_torch([]), lambda data: b"\x80\x02" + b"]" * 9999 + b"a" * 9998 + b"."
    ),
    "nothing": lambda _: b"",
}


def test_the_bombs_work(tmp_path: Path) -> None:
    pickle.loads(CRAFTED["pickle"](tmp_path / "x")).close()
    assert (tmp_path / "x").exists()
    torch.load(io.BytesIO(CRAFTED["torch"](tmp_path / "y")), weights_only=False)["rng"].close()
    assert (tmp_path / "y").exists()


@pytest.mark.parametrize("how", list(CRAFTED))
def test_a_crafted_state_is_refused_and_runs_nothing(tmp_path: Path, went_off: Path, how: str) -> None:
    path = tmp_path / "shared.pt"
    path.write_bytes(CRAFTED[how](went_off))
    with pytest.raises(ValueError, match=r"shared.pt is not a readable part of a checkpoint \(.*Fix:"):
        read_values(path)


@pytest.mark.parametrize("name", ["model.safetensors", "shared.pt", "rank_0.pt"])
def test_a_checkpoint_with_a_pickle_is_passed_over_or_refused(
    tmp_path: Path, went_off: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    folder = four_epochs(tmp_path).checkpoints.state_dir(3)
    (folder / name).write_bytes(CRAFTED["torch"](went_off))
    for extra in ("rank_0.safetensors", "optimizer.pt", "model.pt"):
        (folder / extra).write_bytes(CRAFTED["torch"](went_off))
    assert started(tmp_path, epochs=4).load_checkpoint() == 2
    assert "tiny_epoch_3 is damaged" in caplog.text
    (folder / MARKER).write_text('{"files": {}}')  # as if all was as it was written
    with pytest.raises(ValueError, match=r"is not a readable.*Fix:"):
        started(tmp_path, epochs=4).load_checkpoint()


@pytest.mark.parametrize("suffix", ["npz", "traj"])
def test_a_pickle_in_the_buffer_goes_to_the_quarantine(tmp_path: Path, went_off: Path, suffix: str) -> None:
    dataset = DiskTrajDataset(sample_by="timestep")  # opens every file
    exp = started(tmp_path, epochs=2, val_interval=None, dataset=dataset)
    fifo = exp.run_dir / "buffer" / "fifo"
    name = f"env_00000000_9999999999.0.{suffix}"
    (fifo / name).write_bytes(CRAFTED["pickle" if suffix == "npz" else "torch"](went_off))
    exp.epoch = exp.env_steps = 1  # not a new run, which would move the file away
    exp.learn()
    exp.close()
    assert name in [path.name for path in (exp.run_dir / "buffer" / "quarantine").iterdir()]


def test_a_pickle_in_the_place_of_the_latest_policy_is_refused(tmp_path: Path, went_off: Path) -> None:
    learner, actor = started(tmp_path), started(tmp_path, mode="collect")
    path = learner.checkpoints.latest_path
    for content in (CRAFTED["pickle"](went_off), CRAFTED["torch"](went_off), b"not weights"):
        learner.write_latest_policy()  # the next publication mends it
        assert actor.read_latest_policy() is not None
        path.write_bytes(content)
        unreadable = r"policy\.safetensors is not a readable safetensors file.*Fix:"
        for read in (actor.read_latest_policy, lambda: load_policy(path)):
            with pytest.raises(ValueError, match=unreadable):
                read()
        with pytest.raises(ValueError, match=unreadable):
            learner.load_checkpoint_from_path(path)


def test_nothing_in_the_experiment_calls_a_loader_of_pickles() -> None:
    for path in Path(store.__file__).parents[1].rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert text.count("torch.load(") == text.count("weights_only=True, "), path
        assert "pickle.load" not in text
