"""Learners of two processes, as `accelerate launch` starts them: stopped, resumed, one of them killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from loxodon.experiment.checkpoint.store import read_values

from .launching import Run

pytestmark = [pytest.mark.slow, pytest.mark.forked, pytest.mark.timeout(300)]
ON_POLICY = (
    "Experiment.parallel_actors=2",
    "Experiment.torch_threads=1",
    "Experiment.val_timesteps_per_epoch=0",
    "Experiment.train_timesteps_per_epoch=8",
    "Experiment.max_seq_len=8",
    "MetricLogger.tensorboard=False",
    "Experiment.seed=3",
    "Experiment.verbose=False",
    "PPOLearner.minibatches=2",
    "PPOLearner.reward_normalizer=@RewardNormalizer",
    "PPOLearner.update_epochs=2",
)


def records(folder: Path) -> list[dict[str, Any]]:
    path = folder / "pair" / "logs" / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def updates(folder: Path) -> list[int]:
    """Values of the update counter in the metrics."""
    return [record["gradient_steps"] for record in records(folder)]


def states(folder: Path) -> list[Path]:
    return sorted((folder / "pair" / "ckpts" / "training_states").iterdir())


def test_a_signal_to_one_learner_stops_all_and_the_death_of_one_ends_the_others(tmp_path: Path) -> None:
    run = Run(tmp_path)
    learners, collector = run.learn(), run.collect()
    run.wait_for(lambda: len(updates(tmp_path)) > 3, *learners, collector)
    learners[1].send_signal(signal.SIGTERM)
    assert [run.end_of(learner) for learner in learners] == [0, 0], run.text(learners[0])
    text = "".join(map(run.text, learners))
    assert text.count("Stopped by") == 1
    assert "--resume" in text
    (state,) = states(tmp_path)
    assert {path.name for path in state.iterdir()} >= {"COMPLETE", "rank_0.pt", "rank_1.pt"}
    # one of the learners, one of the collector
    assert len(list((tmp_path / "pair" / "logs").glob("metrics*.jsonl"))) == 2

    epoch, done, before = int(state.name.rpartition("_")[2]), max(updates(tmp_path)), len(records(tmp_path))
    more = run.learn("--resume")
    run.wait_for(lambda: max(updates(tmp_path)) >= done + 20, *more, collector)
    more[1].kill()
    assert run.end_of(more[0]) > 0
    assert records(tmp_path)[before]["epoch"] == epoch
    text = run.text(more[0])
    assert "lost contact with another one" in text
    assert "--resume" in text
    assert collector.poll() is None


def test_an_on_policy_run_continues_with_the_state_of_each_process_and_stops_on_ctrl_c(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, "ppo/cartpole", ON_POLICY)
    first = run.learn("Experiment.epochs=2", mode="both")
    assert [run.end_of(learner) for learner in first] == [0, 0], run.text(first[0])
    second = run.launch("--resume", "Experiment.epochs=100000", mode="both")
    run.wait_for(lambda: any(one["epoch"] >= 3 for one in records(tmp_path)), second)
    os.killpg(second.pid, signal.SIGINT)  # a terminal sends it to the launcher and to its children
    run.end_of(second)
    assert "Stopped by SIGINT" in run.text(second)  # it is saved although the signal arrives twice

    for state in states(tmp_path):
        epochs = read_values(state / "shared.pt")["progress"]["epoch"]
        ranks = [read_values(state / f"rank_{rank}.pt")["trainer"] for rank in range(2)]
        own = [rank["reward_normalizer"].pop("accumulators") for rank in ranks]
        assert [len(one) for one in own] == [2, 2]
        assert ranks[0] == ranks[1]
        # The count covers all processes; it may include a last rollout whose updates were interrupted.
        assert ranks[0]["reward_normalizer"]["count"] in (epochs * 8 * 4, (epochs + 1) * 8 * 4)
    assert len(states(tmp_path)) > 1

    lines = [record for record in records(tmp_path) if "ppo/loss" in record]
    # the third one follows the resumption
    assert [line["gradient_steps"] for line in lines[:3]] == [4, 8, 12]
    for line in lines[:3]:
        assert line["ppo/initial_logratio_abs_max"] < line["ppo/initial_logratio_rounding_max"]
        assert line["ppo/batch_timesteps"] == 16  # the sum over both processes
