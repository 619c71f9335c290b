"""What happens to disks: damaged and foreign files, vanished folders, no space; nothing is ever unpickled."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from loxodon.data import DiskTrajDataset, load_trajectory
from loxodon.experiment import Experiment, checkpoints, load_policy, policy_files
from loxodon.experiment.checkpoints import MARKER

from .fakes import make_experiment, run


def started(folder: Path, **changes: Any) -> Experiment:
    exp = make_experiment(folder, **changes)
    exp.start()
    return exp


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
    "cut": ("trainer.safetensors", cut_short, r"trainer.safetensors has \d+ bytes instead of"),
    "gone": ("rank_0.json", Path.unlink, "rank_0.json is missing"),
    "marker": (MARKER, cut_short, "its marker COMPLETE cannot be read"),
    "state": ("state.json", flip_a_byte, "state.json does not have the checksum"),
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
    warnings = [r.getMessage() for r in caplog.records if "damaged" in r.getMessage()]
    assert len(warnings) == 1
    assert "tiny_epoch_3 is damaged" in warnings[0]
    assert warnings[0].endswith("Going on from the one of epoch 1 instead.")
    with pytest.raises(ValueError, match=rf"tiny_epoch_3 is damaged: .*{text}.*Fix:"):
        started(tmp_path, epochs=4).load_checkpoint(3)
    again.learn()  # and writes the damaged one anew
    again.close()
    assert again.checkpoints.newest_intact_epoch() == (3, [])


def test_without_any_intact_checkpoint_the_error_lists_all(tmp_path: Path) -> None:
    exp = four_epochs(tmp_path)
    for epoch in (1, 3):
        flip_a_byte(exp.checkpoints.state_dir(epoch) / "model.safetensors")
    with pytest.raises(ValueError, match=r"No checkpoint can.*epoch_3 is.*epoch_1 is damaged.*Fix:"):
        started(tmp_path, epochs=4).load_checkpoint()


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


def test_a_full_disk_is_one_clear_error_and_what_there_is_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exp = started(tmp_path, epochs=4)

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    commit = exp.checkpoints.commit

    def commit_on_a_full_disk(*args: Any) -> Any:
        if exp.epoch >= 4:
            monkeypatch.setattr(checkpoints, "save_file", full)
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


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not hold root back")
def test_a_read_only_folder_is_one_clear_error(tmp_path: Path) -> None:
    exp = started(tmp_path)
    exp.checkpoints.states_dir.chmod(0o500)
    with pytest.raises(OSError, match=r"could not be written to.*Permission denied.*Fix:"):
        exp.save_checkpoint()
    exp.checkpoints.states_dir.chmod(0o700)


def test_a_file_in_the_place_of_the_folder_is_one_clear_error(tmp_path: Path) -> None:
    exp = started(tmp_path)
    exp.checkpoints.states_dir.rmdir()
    exp.checkpoints.states_dir.touch()
    with pytest.raises(OSError, match=r"could not .*states.*There is no earlier one. Fix:.*start again"):
        exp.save_checkpoint()


def test_a_policy_that_cannot_be_published_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exp = started(tmp_path)
    exp.write_latest_policy()
    before = exp.checkpoints.latest_path.read_bytes()

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(policy_files, "save_file", read_only)
    with pytest.raises(OSError, match=r"policy could not be written.*Read-only file system.*Fix:"):
        exp.write_latest_policy()
    assert exp.checkpoints.latest_path.read_bytes() == before
    assert len(list(exp.checkpoints.latest_path.parent.iterdir())) == 1


# --- retention ------------------------------------------------------------------------------------------


def test_every_nth_and_the_newest_checkpoints_stay_and_the_best_weights_too(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ckpt_interval": 1, "keep_checkpoints": 2, "keep_every_epochs": 3}
    exp = run(make_experiment(tmp_path, epochs=8, **settings))
    assert exp.checkpoints.complete_epochs() == [2, 5, 6, 7]  # after 3 and 6 epochs, and the last two
    assert exp.checkpoints.best_path.exists()
    assert len(list(exp.checkpoints.weights_dir.iterdir())) == 8


def test_the_period_of_checkpoints_that_stay_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"keep_every_epochs is 0.*Fix:"):
        make_experiment(tmp_path, keep_every_epochs=0)


# --- pickles --------------------------------------------------------------------------------------------


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = str(target)

    def __reduce__(self) -> Any:
        return (open, (self.target, "w"))


@pytest.fixture
def bomb(tmp_path: Path) -> Any:
    """A function that puts a pickle, plain or as torch writes it, in the place of a file."""
    went_off = tmp_path / "it_went_off"

    def drop(path: Path, *, by_torch: bool = False) -> None:
        if by_torch:
            torch.save(Bomb(went_off), path)
        else:
            path.write_bytes(pickle.dumps(Bomb(went_off)))

    yield drop
    assert not went_off.exists(), "a pickle was executed"


def test_the_bomb_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "x"))).close()
    assert (tmp_path / "x").exists()


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("suffix", ["npz", "traj"])
def test_a_pickle_in_the_buffer_goes_to_the_quarantine(
    tmp_path: Path, bomb: Any, suffix: str, by_torch: bool
) -> None:
    dataset = DiskTrajDataset(sample_by="timestep")  # opens every file
    exp = started(tmp_path, epochs=2, val_interval=None, dataset=dataset)
    fifo = exp.run_dir / "buffer" / "fifo"
    bomb(fifo / f"env_00000000_9999999999.0.{suffix}", by_torch=by_torch)
    exp.epoch = 1  # not a new run, which would move the file away
    exp.env_steps = 1
    exp.learn()
    exp.close()
    moved = [path.name for path in (exp.run_dir / "buffer" / "quarantine").iterdir()]
    assert f"env_00000000_9999999999.0.{suffix}" in moved


@pytest.mark.parametrize("by_torch", [False, True])
def test_a_pickle_in_the_place_of_the_latest_policy_is_refused(
    tmp_path: Path, bomb: Any, by_torch: bool
) -> None:
    learner, actor = started(tmp_path), started(tmp_path, mode="collect")
    learner.write_latest_policy()
    bomb(learner.checkpoints.latest_path, by_torch=by_torch)
    with pytest.raises(ValueError, match=r"not a readable safetensors file.*Fix:"):
        actor.read_latest_policy()
    with pytest.raises(ValueError, match=r"not a readable safetensors file.*Fix:"):
        load_policy(learner.checkpoints.latest_path)
    learner.write_latest_policy()  # the next publication mends it
    assert actor.read_latest_policy() is not None


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("name", ["model.safetensors", "trainer.safetensors", "rank_0.safetensors", MARKER])
def test_a_pickle_in_the_newest_checkpoint_is_passed_over(
    tmp_path: Path, bomb: Any, caplog: pytest.LogCaptureFixture, name: str, by_torch: bool
) -> None:
    folder = four_epochs(tmp_path).checkpoints.state_dir(3)
    bomb(folder / name, by_torch=by_torch)
    for extra in ("rank_0.pt", "trainer.pt", "model.pt"):  # names that other libraries would load
        bomb(folder / extra, by_torch=True)
    assert started(tmp_path, epochs=4).load_checkpoint() == 2
    assert "tiny_epoch_3 is damaged" in caplog.text


@pytest.mark.parametrize("name", ["model.safetensors", "trainer.safetensors", "rank_0.safetensors"])
def test_a_pickle_with_the_right_checksum_is_refused_all_the_same(
    tmp_path: Path, bomb: Any, name: str
) -> None:
    folder = four_epochs(tmp_path).checkpoints.state_dir(3)
    bomb(folder / name)
    (folder / MARKER).write_text('{"files": {}}')
    with pytest.raises(ValueError, match=r"is not a readable.*Fix:"):
        started(tmp_path, epochs=4).load_checkpoint()


def test_nothing_in_the_experiment_calls_a_loader_of_pickles() -> None:
    folder = Path(checkpoints.__file__).parent
    for path in folder.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "torch.load(" not in text
        assert "pickle.load" not in text
