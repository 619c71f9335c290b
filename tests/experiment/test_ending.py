"""The end of training that is asked for between two epochs: request_stop and max_wall_clock_s; learn_iter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loxodon.experiment import Callback, Experiment
from loxodon.experiment.signals import StopRequest

from .fakes import make_experiment, run

NO_VAL: dict[str, Any] = {"val_timesteps_per_epoch": 0}


class StopAfterOne(Callback):
    """Asks while the first epoch runs."""

    def after_train(self, exp: Experiment) -> None:
        if exp.epoch == 0:
            exp.request_stop("enough seen")


def records(exp: Experiment) -> list[dict[str, Any]]:
    lines = (exp.run_dir / "logs" / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(("time", "_time"))} for line in lines
    ]


def test_a_requested_stop_returns_and_resumes_as_if_nothing_had_been(
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
    assert "To go on: the same command with --resume." in said
    rest = run(make_experiment(tmp_path / "parts", **settings), lambda e: e.load_checkpoint())
    assert rest.is_finished
    assert records(rest) == records(whole)


def test_learn_again_goes_on(tmp_path: Path) -> None:
    exp = run(make_experiment(tmp_path, callbacks=[StopAfterOne], **NO_VAL), lambda e: e.learn())
    assert (exp.epoch, exp.is_finished) == (2, True)


def test_a_stop_asked_for_in_the_last_epoch_changes_nothing(tmp_path: Path) -> None:
    exp = run(make_experiment(tmp_path, callbacks=[StopAfterOne], epochs=1))
    assert exp.is_finished
    assert "val/return" in exp.last_val_metrics


def test_a_collecting_process_stops_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Stop(Callback):
        def on_epoch_end(self, exp: Experiment, epoch: int) -> None:
            if epoch == 1:
                exp.request_stop()

    exp = run(make_experiment(tmp_path, callbacks=[Stop], mode="collect", **NO_VAL))
    assert exp.epoch == 2
    assert "after epoch 1 (request_stop): all finished traj" in " ".join(capsys.readouterr().out.split())


def test_the_time_limit_stops_after_the_epoch_in_which_it_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exp = make_experiment(tmp_path, epochs=5, **{"WallClockLimit.seconds": 10.0}, **NO_VAL)
    monkeypatch.setattr(StopRequest, "age_s", lambda self: 4.0 * exp.epoch)
    run(exp)
    assert exp.epoch == 3
    assert "WallClockLimit.seconds = 10 is reached" in capsys.readouterr().out
    assert exp.checkpoints.newest_intact_epoch() == (2, [])


def test_age_counts_from_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 10.0, 25.0])
    monkeypatch.setattr("loxodon.experiment.signals.time.monotonic", lambda: next(now))
    with StopRequest() as stop:
        assert stop.age_s() == 15.0


@pytest.mark.parametrize("value", [0, -1.0])
def test_the_time_limit_must_be_positive(tmp_path: Path, value: float) -> None:
    with pytest.raises(ValueError, match=r"WallClockLimit.seconds is .*above 0.*Fix"):
        make_experiment(tmp_path, **{"WallClockLimit.seconds": value})


def test_epochs_one_by_one_give_their_figures(tmp_path: Path) -> None:
    exp = make_experiment(tmp_path, epochs=3)
    exp.start()
    figures = list(exp.learn_iter())
    exp.close()
    assert len(figures) == 3
    assert all({"val/return", "train/loss", "time/collect_s"} <= one.keys() for one in figures)
    losses = [record["train/loss"] for record in records(exp) if "train/loss" in record]
    assert [one["train/loss"] for one in figures] == losses
    assert exp.is_finished


def test_a_loop_over_epochs_can_ask_for_the_end(tmp_path: Path) -> None:
    exp = make_experiment(tmp_path, epochs=9, **NO_VAL)
    exp.start()
    for number, _ in enumerate(exp.learn_iter()):
        if number == 1:
            exp.request_stop("the loop has seen enough")
    exp.close()
    assert exp.epoch == 3  # the request counts for the epoch that the loop goes on with
    assert exp.checkpoints.newest_intact_epoch() == (2, [])
