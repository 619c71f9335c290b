"""Learners under `accelerate launch` beside a collecting process: stopped, resumed, one of them killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from .launching import Run, rank_of

pytestmark = pytest.mark.slow


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.close()


def updates(folder: Path) -> list[int]:
    """Values of the update counter in the metrics."""
    path = folder / "pair" / "logs" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["gradient_steps"] for line in lines]


def states(folder: Path) -> list[Path]:
    return sorted((folder / "pair" / "ckpts" / "training_states").iterdir())


def test_a_signal_to_one_learner_stops_all_with_one_checkpoint_that_can_be_resumed(
    processes: Run, tmp_path: Path
) -> None:
    learners, collector = processes.learn(), processes.collect()
    processes.wait_for(lambda: len(updates(tmp_path)) > 3, learners, collector)
    os.kill(rank_of(learners, 1), signal.SIGTERM)
    assert processes.end_of(learners) == 0, processes.text(learners)
    text = processes.text(learners)
    assert text.count("Stopped by") == 1
    assert "--resume" in text
    (state,) = states(tmp_path)
    assert {path.name for path in state.iterdir()} >= {"COMPLETE", "rank_0.pt", "rank_1.pt"}
    assert len(list((tmp_path / "pair" / "logs").glob("metrics*.jsonl"))) == 2  # learners, collector

    epoch, done = int(state.name.rpartition("_")[2]), max(updates(tmp_path))
    more = processes.learn("--resume", f"Experiment.epochs={epoch + 2}")
    assert processes.end_of(more) == 0, processes.text(more)
    assert f"Resuming at epoch {epoch}" in processes.text(more)
    assert max(updates(tmp_path)) == done + 20  # two epochs of ten, whatever the number of processes
    assert processes.end_of(collector) == 0, processes.text(collector)
    assert max(updates(tmp_path)) == sorted(updates(tmp_path))[-1]
    assert len(states(tmp_path)) == 2


def test_the_death_of_one_learner_ends_the_others_soon_and_says_so(processes: Run, tmp_path: Path) -> None:
    learners, collector = processes.learn(), processes.collect()
    processes.wait_for(lambda: len(updates(tmp_path)) > 3, learners, collector)
    os.kill(rank_of(learners, 1), signal.SIGKILL)
    assert processes.end_of(learners) != 0
    text = processes.text(learners)
    assert "lost contact with another one" in text
    assert "--resume" in text
    assert "exitcode  : -9" in text
    assert collector.poll() is None


def test_ctrl_c_in_the_terminal_saves_although_it_arrives_twice(processes: Run, tmp_path: Path) -> None:
    learners = processes.learn()
    processes.wait_for(lambda: "Waiting for trajectories" in processes.text(learners), learners)
    os.killpg(learners.pid, signal.SIGINT)  # as a terminal does: to the launcher and to its children
    processes.end_of(learners)
    assert "Stopped by SIGINT" in processes.text(learners)
    assert [path.name for path in states(tmp_path)] == ["pair_epoch_0"]
