"""Small PPO agents, and rollouts that they collect step by step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn import functional as F

from loxodon.agents import ActOutput, PPOAgent
from loxodon.data import RolloutBatch
from loxodon.nets import (
    FFTrajEncoder,
    FFTstepEncoder,
    GRUTrajEncoder,
    LSTMTrajEncoder,
    TransformerTrajEncoder,
)

from ..transformers import recommended

OBS = spaces.Dict(
    {
        "observation": spaces.Box(-np.inf, np.inf, (3,), np.float32),
        "secret": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    }
)
DISCRETE, BOX = spaces.Discrete(4), spaces.Box(-1, 1, (2,), np.float32)
MULTI = spaces.MultiDiscrete([2, 3])

tstep = partial(FFTstepEncoder, n_layers=1, d_hidden=16, d_output=16, time_scale=5)
ENCODERS: dict[str, Any] = {
    "ff": partial(FFTrajEncoder, d_model=16),
    "gru": partial(GRUTrajEncoder, n_layers=1, d_hidden=16, d_output=16),
    "lstm": partial(LSTMTrajEncoder, n_layers=1, d_hidden=16, d_output=16),
    "transformer": partial(TransformerTrajEncoder, d_model=16, n_layers=2, d_ff=16, **recommended(8)),
}


def make_agent(space: Any = DISCRETE, encoder: str = "gru", **kwargs: Any) -> PPOAgent:
    torch.manual_seed(0)
    agent = PPOAgent(OBS, space, tstep, ENCODERS[encoder], 16, **kwargs)
    with torch.no_grad():  # the policy must depend on its inputs
        for head in (agent.policy_head, agent.value_head):
            head.mlp.out.weight.mul_(50.0 if head is agent.policy_head else 1.0)  # type: ignore[union-attr,operator]
    return agent.eval()


def inputs(rows: int, length: int, width: int, seed: int = 1) -> dict[str, Any]:
    """Observations and resets of `rows` envs. Every row but the first has an episode border inside."""
    g = torch.Generator().manual_seed(seed)
    resets = torch.zeros(rows, length, dtype=torch.bool)
    for row in range(1, rows):
        resets[row, (2 * row) % length] = True
    time_idxs = torch.zeros(rows, length, 1, dtype=torch.int64)
    for t in range(1, length):
        time_idxs[:, t] = torch.where(resets[:, t, None], 0, time_idxs[:, t - 1] + 1)
    return {
        "obs": {key: torch.randn(rows, length, *OBS[key].shape, generator=g) for key in OBS},
        "rl2s": torch.randn(rows, length, 1 + width, generator=g),
        "time_idxs": time_idxs,
        "resets": resets,
    }


@torch.no_grad()
def collect(
    agent: PPOAgent, rows: int = 3, length: int = 6, *, after: ActOutput | None = None, seed: int = 1
) -> tuple[RolloutBatch, list[ActOutput]]:
    """A rollout of random observations with the agent's outputs; it can continue from an exported state."""
    steps, given = [], inputs(rows, length, agent.action_dim, seed)
    if agent.action_mask is not None:  # each action is allowed half of the time
        allowed = (
            torch.rand(rows, length, agent.action_dim, generator=torch.Generator().manual_seed(seed)) < 0.5
        )
        given["obs"][agent.action_mask.key] = allowed.to(torch.int8)
    hidden = agent.init_hidden_state(rows, torch.device("cpu")) if after is None else after.hidden_state
    start = None if after is None else agent.export_hidden_state(hidden)
    for t in range(length):
        hidden = agent.reset_hidden_state(hidden, given["resets"][:, t])
        obs = {key: x[:, t] for key, x in given["obs"].items()}
        steps.append(agent.act(obs, given["rl2s"][:, t], given["time_idxs"][:, t], hidden, True))
        hidden = steps[-1].hidden_state
    actions = torch.stack([stored_actions(agent, step) for step in steps], dim=1)
    mask = torch.ones(rows, length, 1, dtype=torch.bool)
    return RolloutBatch(**given, actions=actions, mask=mask, start=start), steps


def stored_actions(agent: PPOAgent, step: ActOutput) -> Tensor:
    """Actions in the form that a rollout batch stores, (N, A) float32."""
    if isinstance(agent.action_space, spaces.MultiDiscrete):
        sizes = agent.action_space.nvec.tolist()
        return torch.cat([F.one_hot(step.actions[:, k], n) for k, n in enumerate(sizes)], dim=-1).float()
    if agent.is_discrete:
        return F.one_hot(step.actions, agent.action_dim).float()
    return step.extras.get("samples", step.actions)


def stacked(steps: list[ActOutput], name: str) -> Tensor:
    return torch.stack([step.extras[name] for step in steps], dim=1)


@torch.no_grad()
def evaluated(agent: PPOAgent, batch: RolloutBatch, seed: int = 2) -> RolloutBatch:
    """The batch with everything that losses need; advantages and returns are random."""
    found = agent.evaluate(batch)
    advantages, returns = torch.randn(
        2, *batch.mask.shape, generator=torch.Generator().manual_seed(seed)
    ).unbind()
    return replace(
        batch,
        log_probs=found.log_probs,
        values=found.values,
        params=found.params,
        advantages=advantages,
        returns=5.0 + 3.0 * returns,
    )
