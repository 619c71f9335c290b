"""Losses, metrics and statistics of the PPO agent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from loxodon.agents import LossTerms, PPOAgent, PPOLoss
from loxodon.data import RolloutBatch
from loxodon.experiment.learn.learner import masked_losses
from loxodon.nets import Categorical, RunningNorm

from .rollouts import BOX, DISCRETE, MULTI, collect, evaluated, make_agent

ASYMMETRIC = {"share_encoder": False, "actor_obs_keys": ["observation"]}


def total_loss(terms: LossTerms, batch: RolloutBatch) -> Tensor:
    found = masked_losses(batch, terms)
    return found["Actor Loss"] + 0.5 * found["Critic Loss"]  # type: ignore[no-any-return]


# --- losses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "kind"), [(DISCRETE, "clip"), (MULTI, "clip"), (BOX, "kl_penalty")], ids=str
)
def test_untouched_weights_have_ratio_one(space: Any, kind: str) -> None:
    agent = make_agent(space, loss_type=lambda: PPOLoss(kind=kind))
    batch = evaluated(agent, collect(agent)[0])
    terms = agent(batch, with_metrics=True)
    assert terms.actor.shape == (3, 6, 1, 1)
    assert terms.critic.shape == (3, 6, 1, 1, 1)
    assert batch.advantages is not None
    assert torch.allclose(terms.actor[:, :, 0], -batch.advantages, atol=1e-4)
    metrics = {name: float(value) for name, value in terms.metrics.items()}
    for name in ("kl", "kl_k1", "kl_exact", "clip_fraction"):
        assert metrics[name] == pytest.approx(0.0, abs=1e-5)
    for name in ("ratio_min", "ratio_max", "ratio_mean", "ratio_mean_square"):
        assert metrics[name] == pytest.approx(1.0, abs=1e-4)
    assert metrics["entropy"] > 0.0


def test_kl_is_reported_without_other_metrics_and_grows() -> None:
    agent = make_agent()
    batch = evaluated(agent, collect(agent, rows=2_000)[0])
    with torch.no_grad():
        agent.policy_head.mlp.out.weight.mul_(-1.5)  # type: ignore[union-attr,operator]
    terms = agent(batch)
    assert terms.metrics.keys() == {"kl"}
    metrics = agent(batch, with_metrics=True).metrics
    assert float(metrics["kl"]) == pytest.approx(float(metrics["kl_exact"]), rel=0.3)
    assert float(metrics["kl"]) == pytest.approx(float(metrics["kl_k1"]), rel=0.5)
    assert float(metrics["kl_exact"]) > 0.01
    assert 0 < float(metrics["ratio_mean"]) ** 2 < float(metrics["ratio_mean_square"])
    assert float(metrics["clip_fraction"]) > 0
    assert float(metrics["ratio_min"]) < 1 < float(metrics["ratio_max"])


def test_divergence_is_that_of_the_new_policy_from_the_one_that_acted() -> None:
    agent = make_agent()
    batch = evaluated(agent, collect(agent)[0])
    with torch.no_grad():
        agent.policy_head.mlp.out.bias[0] += 2.0
    new = agent.evaluate(batch).params
    assert batch.params is not None
    expected = Categorical(batch.params).kl(Categorical(new)).mean()
    assert abs(expected - Categorical(new).kl(Categorical(batch.params)).mean()) > 0.01
    assert torch.allclose(agent(batch, with_metrics=True).metrics["kl_exact"], expected)


@pytest.mark.parametrize("encoder", ["gru", "transformer"])
def test_padding_changes_no_loss_and_no_gradient(encoder: str) -> None:
    agent = make_agent(encoder=encoder, loss_type=lambda: PPOLoss(kind="kl_penalty", entropy_coef=0.1))
    whole = evaluated(agent, collect(agent, length=8)[0])
    mask = whole.mask.clone()
    mask[:, 5:] = False

    def outcome(noise: float) -> list[Tensor]:
        batch = replace(whole, mask=mask)
        for name in ("log_probs", "values", "params", "advantages", "returns", "rl2s"):
            x = getattr(batch, name).clone()
            x[:, 5:] = torch.nan if noise and name != "rl2s" else noise
            batch = replace(batch, **{name: x})
        agent.zero_grad()
        terms = agent(batch, with_metrics=True)
        loss = total_loss(terms, batch)
        loss.backward()
        grads = [p.grad for p in agent.parameters() if p.grad is not None]
        return [loss.detach(), *terms.metrics.values(), *grads]

    for a, b in zip(outcome(0.0), outcome(3.0), strict=True):
        assert torch.isfinite(a).all()
        assert torch.allclose(a, b, atol=1e-6)


def test_losses_require_an_evaluated_batch() -> None:
    agent = make_agent()
    with pytest.raises(ValueError, match=r"has no log_probs.*Fix"):
        agent(collect(agent)[0])


def test_metrics_are_float32_in_mixed_precision() -> None:
    for space in (DISCRETE, MULTI, BOX):
        agent = make_agent(space, "ff")
        batch = evaluated(agent, collect(agent)[0])
        with torch.autocast("cpu", torch.bfloat16):
            assert agent.policy_head.mlp(torch.zeros(1, 16)).dtype == torch.bfloat16  # type: ignore[union-attr,operator]
            found, terms = agent.evaluate(batch), agent(batch, with_metrics=True)
            acted = collect(agent)[1][0].extras
        tensors = [*vars(found).values(), terms.actor, terms.critic, *terms.metrics.values(), *acted.values()]
        assert {tensor.dtype for tensor in tensors} == {torch.float32}


def test_an_update_makes_better_than_expected_actions_more_likely() -> None:
    agent = make_agent()
    batch = evaluated(agent, collect(agent, rows=20)[0])
    optimizer = torch.optim.Adam(agent.trainable_params(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        total_loss(agent(batch), batch).backward()
        optimizer.step()
    assert batch.log_probs is not None
    assert batch.advantages is not None
    gain = (agent.evaluate(batch).log_probs - batch.log_probs) * batch.advantages
    assert gain.mean() > 0


# --- statistics ----------------------------------------------------------------------------------------


def norms(agent: PPOAgent) -> list[RunningNorm]:
    return [m for m in agent.modules() if isinstance(m, RunningNorm) and m is not agent.value_norm]


def test_input_statistics_count_steps_and_move_after_the_rollout() -> None:
    agent = make_agent(**ASYMMETRIC).train()
    batch = evaluated(agent, collect(agent)[0])
    before = agent.evaluate(batch).params
    mask = batch.mask.clone()
    mask[:, 4:] = False
    agent.gather_statistics(replace(batch, mask=mask))
    agent(batch)
    agent.after_update()
    assert torch.equal(agent.evaluate(batch).params, before)
    agent.after_rollout(0.0)
    assert [float(norm.count) for norm in norms(agent)] == [12.0, 12.0]
    assert torch.allclose(norms(agent)[0].mean[:3], batch.obs["observation"][:, :4].mean((0, 1)), atol=1e-5)
    assert not torch.allclose(agent.evaluate(batch).params, before, atol=1e-4)


def test_kl_divergence_and_progress_reach_the_loss() -> None:
    clip_eps = lambda progress: 0.3 - 0.2 * progress  # noqa: E731
    agent = make_agent(loss_type=lambda: PPOLoss(kind="kl_penalty", clip_eps=clip_eps))
    agent.after_rollout(1.0)
    assert agent.loss.beta == agent.state_dict()["loss.beta"] == 2.0
    agent.set_progress(0.5)
    assert agent.loss.clip_eps == pytest.approx(0.2)


def test_popart_keeps_values_and_running_does_not() -> None:
    for value_norm, is_kept in (("popart", True), ("running", False), ("none", True)):
        agent = make_agent(value_norm=value_norm)
        batch = evaluated(agent, collect(agent)[0])
        assert batch.returns is not None
        for returns in (batch.returns * 100 + 50, batch.returns - 7):
            before = agent.evaluate(batch).values
            agent.update_value_statistics(returns, batch.mask)
            after = agent.evaluate(batch).values
            assert torch.allclose(before, after, rtol=1e-4, atol=1e-3) is is_kept


@pytest.mark.parametrize("value_norm", ["popart", "running"])
def test_value_losses_are_in_normalised_units(value_norm: str) -> None:
    agent = make_agent(value_norm=value_norm)
    batch = evaluated(agent, collect(agent)[0])
    assert batch.returns is not None
    batch = replace(batch, returns=batch.returns * 1000)
    agent.update_value_statistics(batch.returns, batch.mask)
    found = agent(batch).critic[:, :, 0, 0]
    values = agent.evaluate(batch).values
    std = batch.returns.std(unbiased=False)
    assert torch.allclose(found, ((values - batch.returns) / std).square(), rtol=1e-3, atol=1e-4)
    assert torch.allclose(agent.value_norm.mean, batch.returns.mean(), rtol=1e-4)


def test_value_statistics_count_steps_and_fade_beyond_the_window() -> None:
    agent = make_agent(value_norm="running", value_norm_window=2.0)
    returns, mask = torch.tensor([1.0, 3.0, torch.nan])[None, :, None], torch.tensor([True, True, False])
    for expected in (2.0, 2.0):
        agent.update_value_statistics(returns, mask[None, :, None])
        assert float(agent.value_norm.mean) == expected
        assert float(agent.value_norm.std) == 1.0
    agent.update_value_statistics(torch.full((1, 2, 1), 8.0), torch.ones(1, 2, 1, dtype=torch.bool))
    assert float(agent.value_norm.mean) == 5.0
