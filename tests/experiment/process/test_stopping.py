"""A run that is asked to stop, by a signal at any point or between two epochs, saves everything."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loxodon.data import DiskTrajDataset, load_trajectory
from loxodon.envs import EnvSpec
from loxodon.experiment import Callback, Experiment
from loxodon.experiment.checkpoint.policy_file import read_info
from loxodon.experiment.process.signals import StopRequest
from loxodon.tools.run import exit_status

from ..fakes import CountingEnv, make_experiment, metrics, run

FOREVER = 10**6
NEVER: dict[str, Any] = {"val_timesteps_per_epoch": 0, "val_interval": None, "evaluate_at_end": False}


class AskingEnv(CountingEnv):
    """Asks this process to stop in its fifth step overall."""

    num_steps = 0

    def step(self, action: int) -> Any:
        AskingEnv.num_steps += 1
        if AskingEnv.num_steps == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().step(action)


ASKING = EnvSpec(AskingEnv, {"length": 3})
ENVS: dict[str, Any] = {"make_train_env": ASKING, "make_val_env": ASKING}


class NeverReady(DiskTrajDataset):
    """Never becomes ready; asks the process to stop at the second request."""

    num_asked = 0

    @property
    def ready_for_training(self) -> bool:
        self.num_asked += 1
        if self.num_asked == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return False


def asking_update(exp: Experiment) -> None:
    update = exp.learner.update

    def asking(*args: Any) -> Any:
        if exp.learner.gradient_steps == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return update(*args)

    exp.learner.update = asking  # type: ignore[method-assign]


PLACES: dict[str, tuple[dict[str, Any], Callable[[Experiment], None] | None]] = {
    "collection": ({**ENVS, **NEVER, "train_timesteps_per_epoch": FOREVER}, None),
    "actor": ({**ENVS, **NEVER, "train_timesteps_per_epoch": FOREVER, "mode": "collect"}, None),
    "evaluation": ({**ENVS, "val_timesteps_per_epoch": FOREVER}, None),
    "final evaluation": (
        {**ENVS, "val_timesteps_per_epoch": FOREVER, "val_interval": None, "epochs": 0},
        None,
    ),
    "update": ({**NEVER, "train_batches_per_epoch": FOREVER}, asking_update),
    "waiting for data": ({**NEVER, "mode": "learn", "dataset": NeverReady()}, None),
}


def stopped(folder: Path, place: str) -> Experiment:
    """A run that was asked to stop at this place, and has stopped."""
    settings, prepare = PLACES[place]
    AskingEnv.num_steps = 0
    exp = make_experiment(folder, **{"epochs": 3, **settings})
    exp.start()
    if prepare is not None:
        prepare(exp)
    restarts: list[int] = []
    restart = exp.restart_train_envs
    exp.restart_train_envs = lambda epoch: (restarts.append(epoch), restart(epoch))[1]  # type: ignore[method-assign,func-returns-value]
    with pytest.raises(SystemExit) as caught:
        exp.learn()
    assert caught.value.code == (130 if place == "update" else 0)
    # The current operation, a step of three envs or an update, is the last one.
    assert AskingEnv.num_steps <= 6
    assert exp.learner.gradient_steps <= 6
    collects = place in ("collection", "actor", "update")
    assert restarts == ([0] if collects else [])  # a stop begins no new episodes
    return exp


@pytest.mark.parametrize("place", list(PLACES))
def test_a_signal_saves_at_once_and_explains_how_to_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    exp = stopped(tmp_path, place)
    said = " ".join(capsys.readouterr().out.split())
    where = "the final evaluation" if place == "final evaluation" else "epoch 0"
    name = "SIGINT" if place == "update" else "SIGTERM"
    lengths = [len(load_trajectory(path)) for path in (exp.run_dir / "buffer" / "fifo").glob("*.npz")]
    assert sum(lengths) == exp.env_steps
    if place == "actor":
        assert exp.env_steps > 0
        assert (
            "Stopped by SIGTERM: all finished trajectories are stored. Start the same command again" in said
        )
        return
    assert f"Stopped by {name} in {where}: saved " in said
    assert "To continue, run the same command with --resume." in said
    assert exp.checkpoints.newest_intact_epoch()[1] == []
    again = make_experiment(tmp_path, **{**NEVER, "epochs": 1, "mode": exp.mode})
    again.start()
    assert again.load_checkpoint() == 0
    assert again.learner.gradient_steps == exp.learner.gradient_steps
    again.close()


def test_an_interrupted_test_run_does_not_say_how_to_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    AskingEnv.num_steps = 0
    exp = make_experiment(tmp_path, test_run=True, **ENVS)
    exp.start()
    with pytest.raises(SystemExit):
        exp.learn()
    said = capsys.readouterr().out
    assert "Stopped by SIGTERM in a test run" in said
    assert "--resume" not in said
    assert exp.checkpoints.complete_epochs() == []


def test_an_interrupted_final_evaluation_is_repeated(tmp_path: Path) -> None:
    exp = make_experiment(tmp_path, epochs=2, val_interval=None)
    exp.start()
    evaluate = exp.evaluator.play

    def asked_meanwhile(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*args, **kwargs)

    exp.evaluator.play = asked_meanwhile  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        exp.learn()
    info = read_info(exp.checkpoints.latest_path)
    assert info is not None
    assert not info.is_final
    assert not any("val/return" in record for record in metrics(exp.run_dir))
    again = run(make_experiment(tmp_path, epochs=2, val_interval=None), lambda e: e.load_checkpoint())
    info = read_info(again.checkpoints.latest_path)
    assert info is not None
    assert info.is_final
    assert "val/return" in again.last_val_metrics
    assert again.learner.gradient_steps == exp.learner.gradient_steps == 8
    once_more = run(make_experiment(tmp_path, epochs=2, val_interval=None), lambda e: e.load_checkpoint())
    assert once_more.last_val_metrics == {}  # nothing is left to do


# ---- foreign code that would end the program ----


class LeavingEnv(CountingEnv):
    """Calls sys.exit(), as a closed window of pygame does, in its second episode."""

    def step(self, action: int) -> Any:
        if self.episode == 1:
            sys.exit()
        return super().step(action)


class LeavingCallback(Callback):
    """Calls sys.exit() after the updates."""

    def after_train(self, exp: Experiment) -> None:
        sys.exit("enough")


def leaving_update(exp: Experiment) -> None:
    exp.learner.update = lambda *args: sys.exit(3)  # type: ignore[method-assign,assignment]


ENV_EXITS = r"test_stopping.py:\d+ \(in step\) called sys.exit"
LEAVING: dict[str, tuple[dict[str, Any], Callable[[Experiment], None] | None, str]] = {
    "training": ({"make_train_env": EnvSpec(LeavingEnv), **NEVER}, None, ENV_EXITS),
    "evaluation": (
        {"make_val_env": EnvSpec(LeavingEnv), "val_interval": None},
        None,
        ENV_EXITS,
    ),
    "callback": ({"callbacks": [LeavingCallback]}, None, r"test_stopping.py:\d+ .*sys.exit\('enough'\)"),
    "agent": ({}, leaving_update, r"test_stopping.py:\d+ .*sys.exit\(3\)"),
}


@pytest.mark.parametrize("place", list(LEAVING))
def test_sys_exit_in_foreign_code_is_an_error_and_the_run_is_saved(
    tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, prepare, words = LEAVING[place]
    exp = make_experiment(tmp_path, **settings)
    exp.start()
    if prepare is not None:
        prepare(exp)
    with pytest.raises(RuntimeError, match=rf"{words}.*Fix"):
        exp.learn()
    exp.close()
    assert "Stopped by an error in " in capsys.readouterr().out
    assert exp.checkpoints.newest_intact_epoch()[1] == []


def test_a_command_does_not_succeed_because_foreign_code_calls_exit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_status(lambda: sys.exit(0)) == 1
    assert re.search(r"error: .*test_stopping.py:\d+ .*sys.exit\(0\).*Fix", capsys.readouterr().err)


# ---- closing ----


class Unclosable:
    """Fails to close."""

    def close(self, *_: Any, **__: Any) -> None:
        raise OSError("the window is gone")


PARTS = ("collector", "loader", "dataset", "train_envs", "val_envs", "artifacts", "metric_logger")


@pytest.mark.parametrize("part", [*PARTS, "sink", "tensorboard"])
def test_a_part_that_cannot_be_closed_gives_one_warning(
    tmp_path: Path, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    exp = make_experiment(tmp_path, epochs=1)
    exp.start()
    exp.learn()
    caplog.clear()
    closed = []
    for name in PARTS:
        own = getattr(exp, name).close
        getattr(exp, name).close = lambda *a, own=own, name=name: (closed.append(name), own(*a))
    if part == "sink":
        assert exp.collector is not None
        exp.collector.groups[0].sinks[0].close = Unclosable().close  # type: ignore[method-assign]
    elif part == "tensorboard":
        exp.metric_logger._tensorboard = Unclosable()
    else:
        setattr(exp, part, Unclosable())
    with caplog.at_level(logging.WARNING, logger="loxodon"):
        exp.close()
    assert sorted(closed) == sorted(set(PARTS) - {part})
    told = [record.getMessage() for record in caplog.records]
    assert [text for text in told if "could not be closed: OSError: the window is gone" in text] == told
    assert len(told) == 1


def test_closing_is_possible_at_any_time(tmp_path: Path) -> None:
    make_experiment(tmp_path).close()
    broken = make_experiment(tmp_path, make_train_env=lambda: None)
    with pytest.raises(TypeError, match="created None"):
        broken.start()
    broken.close()
    exp = make_experiment(tmp_path, epochs=1, **NEVER)
    exp.start()
    exp.close()
    exp.close()


# ---- a second signal ----


def test_a_second_sigint_aborts(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested()
        assert "a second Ctrl-C ends it at once" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt, match="second SIGINT"):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_launcher_that_forwards_ctrl_c_does_not_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    with StopRequest() as stop:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal_name == "SIGINT"
        stop._first_s -= 2.0  # the user insists two seconds later
        with pytest.raises(KeyboardInterrupt, match="second SIGINT"):
            os.kill(os.getpid(), signal.SIGINT)


# ---- a stop that is requested between two epochs ----

NO_VAL: dict[str, Any] = {"val_timesteps_per_epoch": 0}


class StopAfterOne(Callback):
    """Requests a stop during the first epoch."""

    def after_train(self, exp: Experiment) -> None:
        if exp.epoch == 0:
            exp.request_stop("enough seen")


def test_a_requested_stop_returns_and_resumes_without_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {"epochs": 3, "ckpt_interval": 1, "CheckpointManager.exact_resume": True}
    whole = run(make_experiment(tmp_path / "whole", **settings))
    exp = make_experiment(tmp_path / "parts", callbacks=[StopAfterOne], **settings)
    exp.start()
    assert exp.learn() == exp.last_val_metrics
    assert "val/return" in exp.last_val_metrics
    exp.close()
    assert (exp.epoch, exp.is_finished) == (1, False)
    said = " ".join(capsys.readouterr().out.split())
    assert "Training stops after epoch 0 (enough seen): saved" in said
    assert "To continue, run the same command with --resume." in said
    rest = run(make_experiment(tmp_path / "parts", **settings), lambda e: e.load_checkpoint())
    assert rest.is_finished
    assert metrics(rest.run_dir) == metrics(whole.run_dir)


def test_learn_called_again_continues(tmp_path: Path) -> None:
    exp = run(make_experiment(tmp_path, callbacks=[StopAfterOne], **NO_VAL), lambda e: e.learn())
    assert (exp.epoch, exp.is_finished) == (2, True)


def test_a_collecting_process_stops_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    class Stop(Callback):
        def on_epoch_end(self, exp: Experiment, epoch: int) -> None:
            if epoch == 1:
                exp.request_stop()

    settings = {"CheckpointManager.best_by": "val/success", **NO_VAL}  # the learner's concern
    exp = run(make_experiment(tmp_path, callbacks=[Stop], mode="collect", **settings))
    assert exp.epoch == 2
    assert "best_by" not in caplog.text
    assert "after epoch 1 (request_stop): all finished traj" in " ".join(capsys.readouterr().out.split())


def test_the_time_limit_stops_after_the_epoch_in_which_it_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exp = make_experiment(tmp_path, epochs=5, **{"WallClockLimit.seconds": 10.0}, **NO_VAL)
    monkeypatch.setattr(StopRequest, "age_s", lambda self: 4.0 * exp.epoch)
    run(exp)
    assert exp.epoch == 3
    assert "WallClockLimit.seconds = 10 is reached" in capsys.readouterr().out
    assert exp.checkpoints.newest_intact_epoch() == (2, [])


def test_epochs_one_by_one_yield_their_metrics(tmp_path: Path) -> None:
    class Talkative(Callback):
        def on_epoch_end(self, exp: Any, epoch: int) -> None:
            exp.log({"phase": "easy", "is_easy": True, "unknown": None})

    exp = make_experiment(tmp_path, epochs=3, callbacks=[Talkative()])
    exp.start()
    figures = list(exp.learn_iter())
    exp.close()
    assert len(figures) == 3
    assert [(one["phase"], one["is_easy"], one["unknown"]) for one in figures] == [("easy", True, None)] * 3
    assert all({"val/return", "train/loss", "time/collect_s"} <= one.keys() for one in figures)
    losses = [record["train/loss"] for record in metrics(exp.run_dir) if "train/loss" in record]
    assert [one["train/loss"] for one in figures] == losses
    assert exp.is_finished


def test_a_loop_over_epochs_can_request_the_end(tmp_path: Path) -> None:
    exp = make_experiment(tmp_path, epochs=9, **NO_VAL)
    exp.start()
    for number, _ in enumerate(exp.learn_iter()):
        if number == 1:
            exp.request_stop("the loop has seen enough")
    exp.close()
    assert exp.epoch == 3  # the request takes effect in the epoch that follows
    assert exp.checkpoints.newest_intact_epoch() == (2, [])
