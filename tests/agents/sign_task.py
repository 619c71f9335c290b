"""A one-step task: the reward is high when the action matches the sign of the observation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from loxodon.agents import BaseAgent
from loxodon.data import Batch


def after_learning(
    agent: BaseAgent,
    learning_rate: float,
    draw: Callable[[Tensor], tuple[Tensor, Tensor]],
    num_batches: int,
) -> tuple[Tensor, Tensor]:
    """Train; `draw` maps the right actions (64, 1, 1), 1 or 0, to actions and rewards.

    Returns: greedy actions (256, 1), and the right ones, 1 or 0.
    """
    optimizer = torch.optim.AdamW(agent.trainable_params(), lr=learning_rate)
    width, ones = 1 + agent.action_dim, torch.ones(64, 1, 1, dtype=torch.bool)
    times = torch.zeros(64, 2, 1, dtype=torch.int64)
    for _ in range(num_batches):
        x = torch.randn(64, 2, 3)
        actions, reward = draw((x[:, :1, :1] > 0).float())
        out = agent(Batch({"observation": x}, torch.zeros(64, 2, width), times, actions, reward, ones, ones))
        (out.actor.mean() + 10 * out.critic.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        agent.after_update()
    x = torch.randn(256, 3)
    with torch.no_grad():
        rl2s, time_idxs = torch.zeros(256, width), torch.zeros(256, 1, dtype=torch.int64)
        state = agent.init_hidden_state(len(x), x.device)
        action, _ = agent.eval().get_actions({"observation": x}, rl2s, time_idxs, state, sample=False)
    return action.view(256, -1), (x[:, :1] > 0).float()
