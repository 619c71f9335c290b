"""Two runs of one name, errors, kills and failed resumptions: the data of a run survive and stay separate."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from loxodon.data import files, load_trajectory
from loxodon.envs import EnvSpec
from loxodon.experiment import Callback, Experiment
from loxodon.experiment.process.signals import Aborted, StopRequest

from .fakes import CountingEnv, make_experiment, run
from .ppo.whole_runs import ppo_experiment


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


# --- two runs of one name -------------------------------------------------------------------------------

TWO_STAY: dict[str, Any] = {"ckpt_interval": 1, "CheckpointManager.keep": 2, "val_interval": 2}


def test_a_new_run_sets_the_earlier_one_aside_and_sees_only_itself(tmp_path: Path) -> None:
    run(make_experiment(tmp_path, epochs=5, **TWO_STAY))
    before = contents(tmp_path / "tiny/ckpts")
    second = run(make_experiment(tmp_path, epochs=3, seed=8, **TWO_STAY))
    assert contents(tmp_path / "tiny/ckpts_old1") == before
    assert second.checkpoints.complete_epochs() == [1, 2]
    resumed = make_experiment(tmp_path, epochs=4, seed=None, **TWO_STAY)
    resumed.start()
    assert resumed.load_checkpoint() == 3
    assert resumed.run_seed == 8
    resumed.learn()
    resumed.close()
    assert resumed.checkpoints.complete_epochs() == [2, 3]
    assert sorted(path.name for path in (tmp_path / "tiny").glob("ckpts*")) == ["ckpts", "ckpts_old1"]


def test_a_state_of_another_run_in_the_folder_is_neither_resumed_nor_deleted(tmp_path: Path) -> None:
    run(make_experiment(tmp_path, epochs=4))
    run(make_experiment(tmp_path, epochs=2, seed=8))
    states = tmp_path / "tiny/ckpts/training_states"
    shutil.copytree(tmp_path / "tiny/ckpts_old1/training_states/tiny_epoch_3", states / "tiny_epoch_3")
    third = run(make_experiment(tmp_path, epochs=3, **TWO_STAY), lambda exp: exp.load_checkpoint())
    assert third.checkpoints.complete_epochs() == [1, 2]
    assert (states / "tiny_epoch_3").exists()


def test_a_start_that_does_not_train_leaves_the_checkpoints_in_place(tmp_path: Path) -> None:
    run(make_experiment(tmp_path))
    before = contents(tmp_path / "tiny/ckpts")
    for mode in ("both", "collect"):
        exp = make_experiment(tmp_path, mode=mode)
        exp.start()
        if mode == "collect":
            next(iter(exp.learn_iter()))
        else:
            exp.load_checkpoint(resume_training_state=False)
            exp.evaluate_val()
        exp.close()
        assert contents(tmp_path / "tiny/ckpts") == before


@pytest.mark.parametrize("what", ["best/policy.safetensors", "training_states/tiny_epoch_1"])
def test_a_new_run_may_begin_from_checkpoints_that_were_set_aside(tmp_path: Path, what: str) -> None:
    run(make_experiment(tmp_path, val_interval=None))
    old = tmp_path / "tiny/ckpts" / what
    wanted = load_file(old if old.is_file() else old / "model.safetensors")
    begun: list[dict[str, torch.Tensor]] = []

    class Look(Callback):
        def on_fit_start(self, exp: Experiment) -> None:
            begun.append({name: value.clone() for name, value in exp.policy.state_dict().items()})

    first = make_experiment(tmp_path, epochs=1, restore_from=str(old), callbacks=[Look])
    if old.is_file():  # weights begin a new run
        run(first)
        old = tmp_path / "tiny/ckpts_old1" / what
    run(make_experiment(tmp_path, epochs=3, restore_from=str(old), callbacks=[Look]))
    assert all(torch.equal(weights[name], wanted[name]) for weights in begun for name in wanted)


def test_a_run_may_be_copied_or_restored_and_reports_where_its_trajectories_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(make_experiment(tmp_path))
    shutil.copytree(tmp_path / "tiny", tmp_path / "other")
    copy = run(make_experiment(tmp_path, run_name="other", epochs=3), lambda exp: exp.load_checkpoint())
    assert copy.checkpoints.complete_epochs() == [1, 2]
    run(make_experiment(tmp_path, seed=8))
    shutil.rmtree(tmp_path / "tiny/ckpts")
    exp = make_experiment(tmp_path)
    exp.start()
    with pytest.raises(FileNotFoundError, match=r"no complete checkpoint \(.*ckpts_old1\).*Fix"):
        exp.load_checkpoint()
    exp.close()
    shutil.rmtree(tmp_path / "tiny/ckpts")
    (tmp_path / "tiny/ckpts_old1").rename(tmp_path / "tiny/ckpts")
    exp = make_experiment(tmp_path)
    exp.start()
    exp.load_checkpoint()
    exp.close()
    (text,) = (r.getMessage() for r in caplog.records if "trained on are gone" in r.getMessage())
    assert str(tmp_path / "tiny/buffer/superseded") in text


# --- errors ---------------------------------------------------------------------------------------------


FOREVER = 10**6


class FailingEnv(CountingEnv):
    """Fails in its step number `fatal`, counted over all episodes, in the given way."""

    def __init__(self, fatal: int, way: str = "raises") -> None:
        super().__init__(length=4)
        self.left, self.way = fatal, way

    def step(self, action: int) -> Any:
        self.left -= 1
        if self.left == 0 and self.way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.left == 0 and self.way == "raises":
            raise RuntimeError("the simulator has crashed")
        return super().step(action)


def failing_update(error: BaseException) -> Callable[[Experiment], None]:
    def prepare(exp: Experiment) -> None:
        update = exp.learner.update

        def fails(*args: Any, **kwargs: Any) -> Any:
            if exp.epoch == 1 and exp.learner.gradient_steps % 4 == 2:
                raise error
            return update(*args, **kwargs)

        exp.learner.update = fails  # type: ignore[method-assign]

    return prepare


ERRORS: dict[str, Callable[[Experiment], None]] = {
    "env": lambda exp: None,
    "memory": failing_update(MemoryError("out of memory")),
    "interrupt": failing_update(KeyboardInterrupt()),
}


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (make_experiment, "env"),
        (make_experiment, "interrupt"),
        (ppo_experiment, "env"),
        (ppo_experiment, "memory"),
    ],
)
def test_a_run_that_fails_can_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: Any, how: str
) -> None:
    settings: dict[str, Any] = {"epochs": 3, "ckpt_interval": None, "train_timesteps_per_epoch": 12}
    settings["make_train_env"] = EnvSpec(FailingEnv, {"fatal": 18 if how == "env" else FOREVER})
    exp = kind(tmp_path, **settings)
    exp.start()
    ERRORS[how](exp)
    with pytest.raises((RuntimeError, MemoryError, KeyboardInterrupt)):
        exp.learn()
    exp.close()
    state = exp.checkpoints.state_dir(1)
    expected = (
        f"Stopped by an error in epoch 1: saved {state}. To continue, run the same command with --resume."
    )
    assert expected.replace(" ", "") in said(capsys).replace(" ", "")
    if kind is make_experiment:
        files = (exp.run_dir / "buffer/fifo").glob("*.npz")
        assert sum(len(load_trajectory(path)) for path in files) == exp.env_steps
    again = kind(tmp_path, **{**settings, "make_train_env": EnvSpec(FailingEnv, {"fatal": FOREVER})})
    again.start()
    assert again.load_checkpoint() == 1
    assert (again.learner.gradient_steps, again.env_steps) == (exp.learner.gradient_steps, exp.env_steps)
    again.learn()
    again.close()
    assert again.is_finished


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, num_files: int) -> None:
    pack, lock, packed = files.pack_npz, threading.Lock(), list[Any]()

    def full(*args: Any) -> Any:
        with lock:  # both halves write at the same time
            if len(packed) >= num_files:
                raise OSError(28, "No space left on device")
            packed.append(args)
            is_last = len(packed) == num_files
        if is_last:
            time.sleep(0.5)  # one half gets the error while the other still writes
        return pack(*args)

    monkeypatch.setattr(files, "pack_npz", full)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("raises", "the simulator has crashed"),
        ("killed", "was killed by signal 9"),
        ("disk", "could not be written to"),
    ],
)
def test_a_failure_stores_finished_trajectories_and_is_reported_once(
    tmp_path: Path, way: str, words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    exp = make_experiment(
        tmp_path,
        env_mode="async",
        make_train_env=EnvSpec(FailingEnv, {"way": way, "fatal": 19}),
        val_timesteps_per_epoch=0,
        train_timesteps_per_epoch=100,
        async_env_mp_context="fork",
    )
    exp.start()
    if way == "disk":
        fill_the_disk(monkeypatch, 12)
    with pytest.raises((RuntimeError, OSError)) as caught:
        exp.learn()
    stored = list((tmp_path / "tiny/buffer/fifo").glob("*.npz"))  # before anything is closed
    shown = "".join(traceback.format_exception(caught.value)) + capfd.readouterr().err
    told = [line for line in shown.splitlines() if words in line and "raise " not in line]
    # An env's error in a worker comes as a summary and in the env's own traceback.
    # The writer of each half reports a full disk.
    assert len(told) == 1 or (len(told) == 2 and way != "killed"), shown
    assert "During handling" not in shown
    lengths = [len(load_trajectory(path)) for path in stored]
    assert lengths.count(4) == 12  # four episodes of each of three envs ended earlier
    assert max(lengths) == 4
    if way == "disk":  # the checkpoint is on another disk
        assert exp.checkpoints.complete_epochs() == [0]
    with contextlib.suppress(OSError):  # the disk is still full
        exp.close()
    if way != "disk":  # steps of unfinished episodes are stored too
        lengths = [len(load_trajectory(path)) for path in (tmp_path / "tiny/buffer/fifo").glob("*.npz")]
        assert sum(lengths) > 48


@pytest.mark.parametrize(
    ("minutes", "way_on"),
    [(5.0, "newest checkpoint is of epoch 0. To continue"), (None, "No checkpoint has been written yet.")],
)
def test_weights_that_are_not_finite_are_not_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], minutes: float | None, way_on: str
) -> None:
    """The first epoch ends with a checkpoint unless saving by time is switched off."""

    class Spoil(Callback):
        def before_play_steps(self, exp: Experiment) -> None:
            if exp.epoch == 1:
                torch.nn.init.constant_(exp.policy.critic.weight, torch.nan)

    settings: dict[str, Any] = {"CheckpointManager.every_minutes": minutes, "ckpt_interval": None}
    exp = make_experiment(tmp_path, callbacks=[Spoil], val_interval=None, **settings)
    exp.start()
    with pytest.raises(FloatingPointError, match=r"critic loss is nan.*the weights 'critic.weight'.*Fix"):
        exp.learn()
    exp.close()
    text = said(capsys)
    assert "its state could not be saved (the weights are not finite)" in text
    assert way_on in text
    assert exp.checkpoints.complete_epochs() == ([] if minutes is None else [0])


def test_errors_outside_exception_save_the_run_too(tmp_path: Path) -> None:
    """Environments in other languages raise such errors."""

    class Panic(BaseException):
        pass

    def panics(*_: Any, **__: Any) -> None:
        raise Panic

    exp = make_experiment(tmp_path, ckpt_interval=None)
    exp.start()
    exp.learner.update = panics  # type: ignore[method-assign]
    with pytest.raises(Panic):
        exp.learn()
    exp.close()
    assert exp.checkpoints.complete_epochs() == [0]


def test_a_learner_that_died_before_it_published_its_last_policy_does_so_when_started_again(
    tmp_path: Path,
) -> None:
    exp = run(make_experiment(tmp_path))
    exp.checkpoints.latest_path.unlink()
    again = run(make_experiment(tmp_path, mode="learn"), lambda exp: exp.load_checkpoint())
    info = again.published.header()
    assert info is not None
    assert info.is_final


def test_a_second_interrupt_saves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exp = make_experiment(tmp_path)
    exp.start()

    def twice(*_: Any) -> None:
        exp.ctx.stop.ask("SIGINT")
        raise Aborted

    exp.learner.update = twice  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        exp.learn()
    exp.close()
    assert exp.checkpoints.complete_epochs() == []
    assert "Stopped by an error" not in said(capsys)


# --- checkpoints by time --------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [False, True])
def test_long_epochs_are_saved_in_between_until_the_next_regular_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    epochs: list[list[int]] = []

    class Watch(Callback):
        def on_save_checkpoint_end(self, exp: Experiment) -> None:
            epochs.append(exp.checkpoints.complete_epochs())

    settings: dict[str, Any] = {
        "epochs": 9,
        "ckpt_interval": 4,
        "CheckpointManager.every_minutes": 2.0,
        "callbacks": [Watch],
    }
    exp = make_experiment(
        tmp_path, val_interval=None, **{"CheckpointManager.exact_resume": exact}, **settings
    )
    monkeypatch.setattr(StopRequest, "age_s", lambda self: 60.0 * exp.epoch)
    run(exp)
    assert epochs == ([[3], [3, 7], [3, 7, 8]] if exact else [[0], [2], [3], [3, 5], [3, 7], [3, 7, 8]])
    names = {path.stem for path in exp.checkpoints.weights_dir.iterdir()}
    assert names == {"policy_epoch_3", "policy_epoch_7", "policy_epoch_8"}
    about = json.loads((exp.checkpoints.state_dir(8) / "metadata.json").read_text())
    assert about["run_id"] == json.loads(exp.checkpoints.versions_path.read_text())["run_id"]


# --- settings -------------------------------------------------------------------------------------------


def test_a_file_where_the_base_folder_should_be_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(OSError, match=r"run folder .*runs/tiny cannot be written to.*Fix:.*ckpt_base_dir"):
        make_experiment(tmp_path / "runs").start()
