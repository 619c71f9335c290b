"""The choice of the discount whose policy acts: its rule, acting row by row, whole runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from loxodon.agents import ActByReturn, Agent
from loxodon.envs import EnvSpec
from loxodon.experiment.checkpoint.policy_file import read_policy
from loxodon.nets import FFTstepEncoder, GRUTrajEncoder

from ..experiment.fakes import make_experiment, metrics, run

DISCOUNTS = [0.5, 0.9, 0.99]


def choice(**settings: Any) -> ActByReturn:
    part: ActByReturn = ActByReturn(**settings)
    part.build(DISCOUNTS)
    return part


def shares(part: ActByReturn) -> list[float]:
    torch.manual_seed(0)
    return (np.bincount(part.draw(6000), minlength=3) / 6000).tolist()


def test_without_episodes_all_discounts_are_tried_and_the_last_one_is_the_best() -> None:
    part = choice()
    assert shares(part) == pytest.approx([1 / 3] * 3, abs=0.03)
    assert int(part.best) == 2


def test_draws_follow_the_rule() -> None:
    part = choice(explore=0.3)
    part.add(np.array([0, 1, 2]), np.array([-10.0, 50.0, -40.0]), ["a"] * 3)
    assert int(part.best) == 1
    scores = np.array([-10.0, 50.0, -40.0]) / np.std([-10.0, 50.0, -40.0])
    drawn = np.random.default_rng(0).normal(scores / 2, 0.5**0.5, (100_000, 3)).argmax(1)
    expected = 0.7 * np.bincount(drawn, minlength=3) / 100_000 + 0.1
    assert shares(part) == pytest.approx(expected.tolist(), abs=0.03)


def test_returns_of_environments_with_different_scales_are_comparable() -> None:
    part = choice(explore=0.0)
    for _ in range(20):  # discount 0 is better in both, but plays mostly where returns are low
        part.add(np.array([0, 0, 1, 1]), np.array([2.0, 1.0, 0.0, 1000.0]), ["low", "low", "low", "high"])
    part.add(np.array([0]), np.array([2000.0]), ["high"])
    assert int(part.best) == 0


def test_only_recent_episodes_count() -> None:
    part = choice(recent=10)
    part.add(np.array([0, 1] * 20), np.array([1.0, 0.0] * 20), ["a"] * 40)
    assert int(part.best) == 0
    part.add(np.array([0, 1] * 5), np.array([0.0, 1.0] * 5), ["a"] * 10)
    assert int(part.best) == 1
    other = choice(recent=10)
    other.set_episodes(part.episodes())
    assert shares(other) == shares(part)


def test_equal_returns_decide_nothing() -> None:
    part = choice()
    part.add(np.array([0, 1]), np.array([3.0, 3.0]), ["a"] * 2)
    assert int(part.best) == 2


@pytest.mark.parametrize("setting", [{"recent": 0}, {"explore": 1.5}])
def test_impossible_settings_of_the_choice_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"ActByReturn.{next(iter(setting))} is .*Fix:"):
        ActByReturn(**setting)


# --- whole runs ----------------------------------------------------------------------------------------


class Pays(gym.Env[Any, Any]):
    """Pays for action 1 and shows the last action; three steps."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.zeros(1, np.float32), float(action == 1), self.t == 3, False, {}


class Fixed(nn.Module):
    """An actor whose policy for discount g always takes action g."""

    def __init__(self, dim: int, num_actions: int, num_discounts: int, distribution: Any) -> None:
        super().__init__()
        self.distribution = distribution
        self.logits = nn.Parameter(100 * torch.eye(num_discounts))

    def forward(self, state: Tensor) -> Any:
        return self.distribution(self.logits.expand(*state.shape[:-1], -1, -1))


def experiment(folder: Path, acting: Any, **changes: Any) -> Any:
    agent = partial(Agent, training_discounts=(0.5, 0.9), gamma=0.99, actor_type=Fixed, acting=acting)
    return make_experiment(
        folder,
        agent_type=agent,
        tstep_encoder_type=partial(FFTstepEncoder, d_hidden=8, d_output=8),
        traj_encoder_type=partial(GRUTrajEncoder, d_hidden=8, d_output=8),
        make_train_env=EnvSpec(Pays),
        make_val_env=EnvSpec(Pays),
        exploration_wrapper_type=None,
        train_batches_per_epoch=0,
        train_timesteps_per_epoch=30,
        epochs=2,
        **changes,
    )


def test_the_discount_with_the_best_returns_acts_in_training_evaluation_and_policy_files(
    tmp_path: Path,
) -> None:
    exp = run(experiment(tmp_path / "a", ActByReturn()))
    records = metrics(exp.run_dir)
    assert [one["collect/acting_discount"] for one in records if "collect/acting_discount" in one] == [
        pytest.approx(0.9)
    ] * 2
    returns = [one["collect/return"] for one in records if "collect/return" in one]
    assert 1.0 < returns[-1] < 3.0  # mostly discount 0.9, sometimes others
    values = [one["val/return"] for one in records if "val/return" in one]
    assert (values[0], values[-1]) == (0.0, 3.0)  # that of the last discount, then of the best
    assert int(read_policy(exp.checkpoints.best_path)[1]["acting.best"]) == 1
    again = experiment(tmp_path / "a", ActByReturn())
    again.start(resume=True)
    assert int(again.policy.acting.best) == 1
    assert again.collector._choice.episodes() == exp.collector._choice.episodes()
    again.close()
    plain = run(experiment(tmp_path / "b", None))
    assert {one["val/return"] for one in metrics(plain.run_dir) if "val/return" in one} == {0.0}


def test_each_environment_acts_by_the_policy_of_its_discount(tmp_path: Path) -> None:
    exp = experiment(tmp_path, ActByReturn(explore=1.0))
    exp.start()
    exp.collect_new_training_data()
    (group,) = exp.collector.groups
    exp.collector._begin_step(group)
    np.testing.assert_array_equal(group.state.actions, group.state.discounts)
    assert len(set(group.state.discounts.tolist())) > 1
    exp.collector._finish_step(group, None)
    assert exp.policy.acting_discount is None
    exp.close()


@pytest.mark.parametrize("mode", ["learn", "collect"])
def test_separate_processes_refuse_the_choice(tmp_path: Path, mode: str) -> None:
    with pytest.raises(ValueError, match=r"Agent.acting is set, but a learner does not see.*Fix: set"):
        experiment(tmp_path, ActByReturn(), mode=mode).start()
