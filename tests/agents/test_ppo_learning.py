"""The parts of on-policy learning, combined by hand, learn a task that needs memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gymnasium import spaces

from loxodon.agents import GAE, AdvantageNorm, PPOAgent
from loxodon.data import RolloutBatch

from .rollouts import collect, make_agent


def rewarded(agent: PPOAgent, seed: int) -> tuple[RolloutBatch, float]:
    """A rollout with reward 1 for every action that names the sign of the episode's first number."""
    batch, _ = collect(agent, rows=64, length=8, seed=seed)
    numbers = batch.obs["observation"][..., 0]
    first = numbers[:, 0]
    wanted = []
    for t in range(8):
        first = torch.where(batch.resets[:, t], numbers[:, t], first)
        wanted.append(first > 0)
    rewards = (torch.stack(wanted) == batch.actions[..., 1].T.bool()).float()
    found = agent.evaluate(batch)
    values = found.values[..., 0].T.detach()
    ended = torch.cat([batch.resets.T[1:], torch.ones(1, 64, dtype=torch.bool)])
    advantages, returns = GAE(gamma=0.9)(rewards, values, values.roll(-1, 0), ended, ended)
    normalized = AdvantageNorm()(advantages, batch.mask[..., 0].T)
    batch = replace(
        batch,
        log_probs=found.log_probs.detach(),
        values=found.values.detach(),
        params=found.params.detach(),
        advantages=normalized.T[..., None],
        returns=returns.T[..., None],
    )
    return batch, float(rewards.mean())


def share_of_right_actions(**kwargs: Any) -> float:
    agent = make_agent(spaces.Discrete(2), "gru", **kwargs)
    optimizer = torch.optim.Adam(agent.trainable_params(), lr=5e-3, eps=1e-5)
    for rollout in range(12):
        batch, _ = rewarded(agent.eval(), rollout)
        agent.gather_statistics(batch)
        agent.update_value_statistics(batch.returns, batch.mask)  # type: ignore[arg-type]
        agent.train()
        for _ in range(4):
            for rows in torch.randperm(64).chunk(4):
                terms = agent(batch.rows(rows))
                optimizer.zero_grad()
                (terms.actor.mean() + 0.5 * terms.critic.mean()).backward()
                torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        agent.after_rollout(float(terms.metrics["kl"]))
    return rewarded(agent.eval(), 1000)[1]


@pytest.mark.learning
@pytest.mark.parametrize(
    "kwargs", [{}, {"share_encoder": False, "value_norm": "popart"}], ids=["shared", "separate"]
)
def test_a_recurrent_agent_learns_to_remember(kwargs: dict[str, Any]) -> None:
    assert share_of_right_actions(**kwargs) > 0.8
