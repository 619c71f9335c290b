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
from loxodon.agents.parts import EpisodeResult
from loxodon.envs import EnvSpec
from loxodon.experiment.checkpoint.policy_file import read_policy
from loxodon.experiment.fleet import EpisodeReports, Membership
from loxodon.nets import FFTstepEncoder, GRUTrajEncoder

from ..experiment.fakes import make_experiment, metrics, run

DISCOUNTS = [0.5, 0.9, 0.99]


def choice(**settings: Any) -> ActByReturn:
    part: ActByReturn = ActByReturn(**settings)
    part.build(DISCOUNTS)
    return part


def results(discounts: list[int], returns: list[float], envs: list[str] | None = None) -> list[EpisodeResult]:
    names = envs or ["a"] * len(discounts)
    return [EpisodeResult(*one) for one in zip(discounts, returns, names, strict=True)]


def shares(part: ActByReturn) -> list[float]:
    torch.manual_seed(0)
    return (np.bincount(part.draw(6000), minlength=3) / 6000).tolist()


def test_without_episodes_all_discounts_are_tried_and_the_last_one_is_the_best() -> None:
    part = choice()
    assert shares(part) == pytest.approx([1 / 3] * 3, abs=0.03)
    assert int(part.best) == 2


def test_draws_follow_the_rule() -> None:
    part = choice(explore=0.3)
    part.add(results([0, 1, 2], [-10.0, 50.0, -40.0]))
    assert int(part.best) == 1
    scores = np.array([-10.0, 50.0, -40.0]) / np.std([-10.0, 50.0, -40.0])
    drawn = np.random.default_rng(0).normal(scores / 2, 0.5**0.5, (100_000, 3)).argmax(1)
    expected = 0.7 * np.bincount(drawn, minlength=3) / 100_000 + 0.1
    assert shares(part) == pytest.approx(expected.tolist(), abs=0.03)


def test_returns_of_environments_with_different_scales_are_comparable() -> None:
    part = choice(explore=0.0)
    for _ in range(20):  # discount 0 is better in both, but plays mostly where returns are low
        part.add(results([0, 0, 1, 1], [2.0, 1.0, 0.0, 1000.0], ["low", "low", "low", "high"]))
    part.add(results([0], [2000.0], ["high"]))
    assert int(part.best) == 0


def test_only_recent_episodes_count() -> None:
    part = choice(recent=10)
    part.add(results([0, 1] * 20, [1.0, 0.0] * 20))
    assert int(part.best) == 0
    part.add(results([0, 1] * 5, [0.0, 1.0] * 5))
    assert int(part.best) == 1
    other = choice(recent=10)
    other.load_state_dict(part.state_dict())
    assert shares(other) == shares(part)


def test_equal_returns_decide_nothing() -> None:
    part = choice()
    part.add(results([0, 1], [3.3, 3.3]))
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
    assert torch.equal(again.policy.acting.episodes, exp.policy.acting.episodes)
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


def test_a_learner_chooses_by_the_episodes_that_its_actors_report(tmp_path: Path) -> None:
    learner = experiment(tmp_path, ActByReturn(recent=50), mode="learn")
    learner.start()
    learner.write_latest_policy()
    actors = [experiment(tmp_path, ActByReturn(recent=50), mode="collect") for _ in range(2)]
    for actor in actors:
        actor.start()
        actor.read_latest_policy()
        actor.collect_new_training_data()
        actor.fleet.leave()  # writes the last heartbeat
    learner.write_latest_policy()
    choice = learner.policy.acting
    assert int(choice.best) == 1  # action 1 pays
    assert (choice.episodes[:, 0] >= 0).all()
    seen = choice.episodes.clone()
    learner.write_latest_policy()
    assert torch.equal(choice.episodes, seen)  # each episode counts once
    actors[0].read_latest_policy()
    assert torch.equal(actors[0].policy.acting.episodes, seen)
    later = EpisodeReports(learner.ctx, choice)
    later.begin(is_new=False)
    later.before_publication()
    assert torch.equal(choice.episodes, seen)  # a resumed agent knows them already
    for one in (learner, *actors):
        one.close()


def test_actors_take_turns_among_the_newest_episodes(tmp_path: Path) -> None:
    part = choice(recent=4)
    learner = experiment(tmp_path, part, mode="learn")
    for folder, returns in (("a", [1.0, 2.0, 3.0]), ("b", [10.0, 20.0, 30.0])):
        member = Membership(learner.run_dir, folder, "actor")
        with member.joining():
            member.put(num_episodes=5, episodes=results([0, 1, 2], returns))
            member.leave()
    EpisodeReports(learner.ctx, part).before_publication()
    assert sorted(part.episodes[:, 1].tolist()) == [2.0, 3.0, 20.0, 30.0]
