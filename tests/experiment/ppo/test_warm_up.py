"""Before learning begins: random steps, rollouts without updates, and statistics that are found and kept."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gin
import numpy as np
import pytest
import torch
from gymnasium import spaces

from loxodon.data import DiskTrajDataset, load_trajectory
from loxodon.envs import EnvSpec
from loxodon.experiment import Experiment
from loxodon.experiment.cli import main

from ..fakes import CountingEnv
from ..test_resume import metrics
from .whole_runs import differing, learned, ppo_experiment, weights

LONG = EnvSpec(CountingEnv, {"length": 30, "noise": 1.0})  # longer than the rollouts of 8 steps


@pytest.fixture(autouse=True)
def _gin_is_left_empty() -> Iterator[None]:
    gin.clear_config()
    yield
    gin.clear_config()


def started(folder: Path, encoder: str = "gru", **changes: Any) -> Experiment:
    exp = ppo_experiment(folder, encoder, make_train_env=LONG, make_val_env=LONG, epochs=4, **changes)
    exp.start()
    return exp


def is_statistic(name: str) -> bool:
    return "input_norm" in name or "value_norm" in name


@pytest.mark.parametrize(
    "changes", [{"learner": {"random_timesteps": 9}}, {"start_learning_at_epoch": 2}], ids=["random", "idle"]
)
def test_statistics_move_and_weights_do_not_before_learning_begins(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    exp = started(tmp_path, **changes)
    before, epochs = weights(exp), exp.learn_iter()
    figures = [next(epochs), next(epochs)]
    after = weights(exp)
    assert {name for name, value in before.items() if not torch.equal(value, after[name])} == {
        name for name in before if is_statistic(name)
    }
    figures += list(epochs)
    exp.close()
    assert [one["ppo/updates"] for one in figures] == [0, 0, 4, 4]
    moved = {name for name, value in weights(exp).items() if not torch.equal(value, after[name])}
    assert any(not is_statistic(name) for name in moved)


@pytest.mark.parametrize("encoder", ["gru", "transformer"])
def test_memory_has_seen_the_random_steps(tmp_path: Path, encoder: str) -> None:
    exp = started(tmp_path, encoder, learner={"random_timesteps": 11, "chunk_len": 4})
    figures = list(exp.learn_iter())
    exp.close()
    assert ["ppo/initial_logratio_abs_max" in one for one in figures] == [False, False, True, True]
    # In the middle of an episode that began at random.
    assert figures[2]["ppo/initial_logratio_abs_max"] < 1e-4


SPACES = [spaces.Discrete(3), spaces.MultiDiscrete([3, 2]), spaces.Box(-2.0, 2.0, (2,))]


class AnyActions(CountingEnv):
    """Takes whatever is in its action space."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.action_space = SPACES[kind]

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        return super().step(0)


@pytest.mark.parametrize(
    ("kind", "log_prob", "means"),  # of one-hot actions, or of those in [-1, 1]
    [
        (0, -math.log(3), [1 / 3] * 3),
        (1, -math.log(6), [1 / 3] * 3 + [1 / 2] * 2),
        (2, -2 * math.log(2), [0.0, 0.0]),
    ],
    ids=["discrete", "factors", "box"],
)
def test_random_actions_are_uniform_and_stored_with_their_probability(
    tmp_path: Path, kind: int, log_prob: float, means: list[float]
) -> None:
    env = EnvSpec(AnyActions, {"kind": kind})
    exp = ppo_experiment(
        tmp_path,
        make_train_env=env,
        make_val_env=env,
        epochs=1,
        dataset=DiskTrajDataset(),
        train_timesteps_per_epoch=60,
        learner={"random_timesteps": 50},
    )
    exp.start()
    with torch.no_grad():
        for parameter in exp.policy.policy_head.parameters():
            parameter.mul_(30.0)  # a policy that is far from uniform
    learned(exp)
    files = sorted(Path(exp.dataset.save_new_trajs_to).glob("*.npz"))
    trajectories = [load_trajectory(path) for path in files]
    found = np.concatenate([traj.extras["log_probs"][:, 0] for traj in trajectories])
    is_random = np.isclose(found, log_prob, atol=1e-6)
    assert is_random.sum() == 3 * 50
    actions = np.concatenate([traj.actions for traj in trajectories])[is_random].astype(np.float64)
    np.testing.assert_allclose(actions.mean(0), means, atol=0.15)
    if kind == 2:
        np.testing.assert_allclose(actions.std(0), 3**-0.5, atol=0.1)


def test_statistics_of_random_steps_stay_as_they_are(tmp_path: Path) -> None:
    gin.parse_config("RunningNorm.stop_after = 20")
    exp = started(tmp_path, learner={"random_timesteps": 8})
    epochs = exp.learn_iter()
    next(epochs)
    found = {name: value for name, value in weights(exp).items() if "input_norm" in name}
    assert found["tstep_encoder.input_norm.count"] == 24
    list(epochs)
    exp.close()
    assert all(torch.equal(value, weights(exp)[name]) for name, value in found.items())


def test_random_steps_that_are_left_are_taken_after_a_resume(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "learner": {"random_timesteps": 20},
        "ckpt_interval": 1,
        "CheckpointManager.exact_resume": True,
    }
    whole = learned(started(tmp_path / "whole", **settings))
    first = started(tmp_path / "parts", **settings)
    epochs = first.learn_iter()
    next(epochs)
    next(epochs)
    first.close()
    again = started(tmp_path / "parts", **settings)
    assert again.load_checkpoint() == 2
    learned(again)
    assert [r["ppo/updates"] for r in metrics(again.run_dir) if "ppo/updates" in r] == [0, 0, 0, 4]
    assert differing(whole, again) == []


def test_a_number_of_random_steps_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"PPOLearner.random_timesteps is -1.*Fix:"):
        started(tmp_path, learner={"random_timesteps": -1})


def test_what_only_tries_a_run_takes_no_random_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exp = learned(
        started(tmp_path, learner={"random_timesteps": 20}, test_run=True, start_learning_at_epoch=2)
    )
    assert exp.learner.gradient_steps == 4
    words = ["--config", "ppo/cartpole", "--check", "PPOLearner.random_timesteps=999"]
    assert main([*words, "Experiment.parallel_actors=2", "Experiment.val_timesteps_per_epoch=0"]) == 0
    assert "check passed" in capsys.readouterr().out
