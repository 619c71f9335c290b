"""An average of the weights: it follows the updates, is evaluated, and is stored in policy files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loxodon.data import pad_batch
from loxodon.experiment import Experiment, WeightAverage
from loxodon.experiment.checkpoint.policy_file import read_policy

from ..rounding import assert_equal_but_for_rounding
from .fakes import make_experiment
from .test_learner import NUM_OPS, TRAJECTORIES


def update(exp: Experiment) -> torch.Tensor:
    """The weights of the actor after one update."""
    exp.train_step(pad_batch(TRAJECTORIES))
    weight: torch.Tensor = exp.policy.actor.weight.detach().clone()
    return weight


def test_the_average_is_evaluated_and_stored_while_the_newest_weights_collect(tmp_path: Path) -> None:
    exp = make_experiment(tmp_path, weight_average=lambda agent: WeightAverage(agent, rate=0.95))
    exp.start()
    assert exp.evaluated is exp.policy  # until the first update
    weights = [update(exp) for _ in range(3)]
    expected = weights[0].lerp(weights[1], 0.95).lerp(weights[2], 0.95)
    assert_equal_but_for_rounding(exp.evaluated.actor.weight, expected, NUM_OPS)
    assert not torch.equal(expected, weights[-1])
    assert exp.policy.actor.weight.requires_grad
    acted = []
    for agent, name in ((exp.policy, "newest"), (exp.evaluated, "average")):
        agent.actor.register_forward_hook(lambda *_, name=name: acted.append(name))
    for rollout, name in ((exp.evaluate_val, "average"), (exp.collect_new_training_data, "newest")):
        rollout()
        assert set(acted) == {name}
        acted.clear()
    ckpts = exp.run_dir / "ckpts"
    latest = ckpts / "latest" / "policy.safetensors"
    exp.write_latest_policy()
    assert torch.equal(read_policy(latest)[1]["actor.weight"], weights[-1])
    exp.save_checkpoint()
    exp.write_latest_policy(is_final=True)
    for path in (latest, *(ckpts / "policy_weights").iterdir()):
        assert_equal_but_for_rounding(read_policy(path)[1]["actor.weight"], expected, NUM_OPS)
    (state,) = (ckpts / "training_states").iterdir()
    assert torch.equal(read_policy(state / "model.safetensors")[1]["actor.weight"], weights[-1])
    exp.load_checkpoint_from_path(latest)
    assert exp.evaluated is exp.policy  # until the loaded weights have been updated
    exp.close()


def test_a_training_state_without_an_average_begins_one(tmp_path: Path) -> None:
    without = make_experiment(tmp_path / "without")
    without.start()
    weight = update(without)
    folder = without.save_checkpoint()
    without.close()
    exp = make_experiment(tmp_path / "with", weight_average=WeightAverage)
    exp.start()
    update(exp)
    exp.load_checkpoint_from_path(folder)
    assert exp.evaluated is exp.policy
    assert torch.equal(exp.policy.actor.weight, weight)
    exp.close()


def test_the_window_is_a_tenth_of_the_updates_until_the_rate_ends_its_growth() -> None:
    agent: Any = torch.nn.Linear(1, 1, bias=False)
    average, shares = WeightAverage(agent, rate=0.01), []
    for _ in range(1200):
        with torch.no_grad():
            if average.num_updates:
                average.agent.weight.zero_()  # type: ignore[attr-defined,operator]
            agent.weight.fill_(1.0)
        average.follow()
        shares.append(float(average.agent.weight))  # type: ignore[attr-defined,arg-type]
    assert shares[0] == 1.0
    assert shares[100] == pytest.approx(10 / 110)
    assert shares[-1] == pytest.approx(0.01)


@pytest.mark.parametrize(("rate", "words"), [(1.5, "at most 1"), (0, "above 0"), ("all", "a number")])
def test_impossible_rates_are_refused(rate: Any, words: str) -> None:
    agent: Any = torch.nn.Linear(1, 1)
    with pytest.raises((ValueError, TypeError), match=rf"WeightAverage.rate is .*{words}.*Fix:"):
        WeightAverage(agent, rate=rate)
