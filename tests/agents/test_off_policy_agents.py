"""Every off-policy agent: sound updates on the action spaces it supports, formulas, and that it learns."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn.functional import one_hot

from loxodon.agents import Agent, BCAgent, DQNAgent, IQLAgent, MultiTaskAgent, SACAgent
from loxodon.data import Batch
from loxodon.nets import (
    Actor,
    BinnedCriticEnsemble,
    CriticEnsemble,
    DuelingCriticEnsemble,
    FFTrajEncoder,
    FFTstepEncoder,
    GRUTrajEncoder,
    ValueBins,
)

DISCRETE, BOX = spaces.Discrete(4), spaces.Box(-1, 1, (2,), np.float32)
MULTI, BITS = spaces.MultiDiscrete([2, 3]), spaces.MultiDiscrete([2, 2])
ONE_BOX, TWO = spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(2)
Case = tuple[Any, Any, dict[str, Any]]

tstep = partial(FFTstepEncoder, n_layers=1, d_hidden=16, d_output=16)
gru = partial(GRUTrajEncoder, n_layers=1, d_hidden=16, d_output=16)
SMALL_CRITICS: dict[Any, Any] = {MultiTaskAgent: BinnedCriticEnsemble, DQNAgent: DuelingCriticEnsemble}


def obs_space(mask_width: int = 0) -> spaces.Dict:
    parts: dict[str, Any] = {"observation": spaces.Box(-np.inf, np.inf, (3,), np.float32)}
    return spaces.Dict(parts | ({"allowed": spaces.MultiBinary(mask_width)} if mask_width else {}))


def make(kind: Any, space: Any, mask_width: int = 0, encoder: Any = gru, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    if mask_width:
        kwargs["action_mask_key"] = "allowed"
    return kind(obs_space(mask_width), space, tstep, encoder, 8, **kwargs)


def random_actions(space: Any, rows: int, length: int) -> Tensor:
    if isinstance(space, spaces.Box):
        return torch.rand(rows, length, *space.shape) * 2 - 1
    nvec = space.nvec.tolist() if isinstance(space, spaces.MultiDiscrete) else [int(space.n)]
    return torch.cat([one_hot(torch.randint(0, n, (rows, length)), n).float() for n in nvec], dim=-1)


def make_batch(space: Any, rows: int = 3, length: int = 5, lengths: tuple[int, ...] = (5, 3, 1)) -> Batch:
    torch.manual_seed(1)
    actions = random_actions(space, rows, length)
    return Batch(
        obs={"observation": torch.randn(rows, length + 1, 3)},
        rl2s=torch.randn(rows, length + 1, 1 + actions.shape[-1]),
        time_idxs=torch.arange(length + 1).expand(rows, -1)[..., None],
        actions=actions,
        rews=torch.randn(rows, length, 1),
        dones=torch.rand(rows, length, 1) < 0.2,
        mask=(torch.arange(length)[None] < torch.tensor(lengths)[:, None])[..., None],
    )


CASES: dict[str, Case] = {
    "multi-task discrete": (MultiTaskAgent, DISCRETE, {}),
    "multi-task sampled discrete": (MultiTaskAgent, DISCRETE, {"training_discounts": (), "entropy_coeff": 0.1}),
    "multi-task factors": (MultiTaskAgent, MULTI, {"critic_subset": "element"}),
    "multi-task box": (MultiTaskAgent, BOX, {"distribution_type": "GaussianMixture"}),
    "bc discrete": (BCAgent, DISCRETE, {"entropy_coeff": 0.1}),
    "bc bits": (BCAgent, BITS, {"distribution_type": "Bernoulli"}),
    "bc box": (BCAgent, BOX, {"distribution_type": "Beta", "pass_obs_keys_to_actor": ["observation"]}),
    "dqn": (DQNAgent, DISCRETE, {"n_step": 3, "burn_in": 2}),
    "dqn plain": (DQNAgent, DISCRETE, {"critic_type": CriticEnsemble, "double_q": False, "returns": "retrace"}),
    "sac discrete": (SACAgent, DISCRETE, {"returns": "lambda"}),
    "sac factors": (SACAgent, MULTI, {"returns": "retrace", "learn_alpha": False}),
    "sac box": (SACAgent, BOX, {"num_actions_for_value": 2}),
    "iql discrete": (IQLAgent, DISCRETE, {"returns": "lambda"}),
    "iql factors": (IQLAgent, MULTI, {"popart": False}),
    "iql box": (IQLAgent, BOX, {"distribution_type": "Gaussian"}),
    "actor-critic beta": (Agent, BOX, {"distribution_type": "Beta", "pass_obs_keys_to_actor": ["observation"]}),
    "actor-critic gaussian": (Agent, BOX, {"distribution_type": "Gaussian", "popart_floor": 0.0}),
    "actor-critic bits": (Agent, BITS, {"distribution_type": "Bernoulli", "returns": "retrace"}),
}


@pytest.mark.parametrize("case", CASES)
def test_two_updates_move_what_they_should_and_ignore_padding(case: str) -> None:
    kind, space, kwargs = CASES[case]
    losses = []
    for fill in (0.0, 55.0):
        agent, batch = make(kind, space, **kwargs), make_batch(space)
        before = {name: p.clone() for name, p in agent.named_parameters()}
        pad = ~batch.mask
        batch = replace(
            batch,
            obs={"observation": batch.obs["observation"].masked_fill(~batch.timestep_mask, fill)},
            rews=batch.rews.masked_fill(pad, fill),
            dones=batch.dones | (pad if fill else False),
        )
        optimizer = torch.optim.AdamW(agent.trainable_params(), lr=1e-2)
        torch.manual_seed(2)
        for _ in range(2):
            out = agent(batch, with_metrics=True)
            mask = batch.mask[..., None]
            loss = out.actor.where(mask, 0.0).sum() + out.critic.where(mask[..., None], 0.0).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            agent.after_update()
        losses.append(loss.detach())
        assert all(x.ndim == 0 and torch.isfinite(x) for x in out.metrics.values()), out.metrics
        for name, p in agent.named_parameters():
            moved = not torch.equal(p, before[name])
            assert moved == (p.requires_grad or name.startswith("target_")), name
    if kwargs.get("distribution_type") != "Beta":  # whose samples take as many random numbers as they need
        torch.testing.assert_close(losses[0], losses[1])
    assert torch.isfinite(losses[0])


BINS = partial(ValueBins, num_bins=32, low=-20.0, high=20.0)
LEARN: dict[str, Case] = {
    "multi-task discrete": (MultiTaskAgent, TWO, {"bins_type": BINS}),
    "multi-task box": (MultiTaskAgent, ONE_BOX, {"bins_type": BINS}),
    "dqn": (DQNAgent, TWO, {}),
    "sac discrete": (SACAgent, TWO, {"alpha": 0.1}),
    "sac box": (SACAgent, ONE_BOX, {"alpha": 0.1}),
    "iql discrete": (IQLAgent, TWO, {}),
    "iql box": (IQLAgent, ONE_BOX, {"beta": 10.0, "expectile": 0.9}),
    "bc": (BCAgent, TWO, {}),
}


@pytest.mark.learning
@pytest.mark.parametrize("case", LEARN)
def test_the_rewarded_action_is_found(case: str) -> None:
    """A one-step task: the reward is high when the action matches the sign of the observation."""
    kind, space, kwargs = LEARN[case]
    if kind is not DQNAgent:
        kwargs = {"actor_type": partial(Actor, d_hidden=32), **kwargs}
    if kind is not BCAgent:
        critics = partial(SMALL_CRITICS.get(kind, CriticEnsemble), d_hidden=64)
        kwargs = {"training_discounts": (), "gamma": 0.9, "tau": 0.05, "critic_type": critics, **kwargs}
        kwargs |= {"num_critics": 2, "num_critics_td": 1}
    agent = make(kind, space, encoder=partial(FFTrajEncoder, d_model=16), **kwargs)
    optimizer = torch.optim.AdamW(agent.trainable_params(), lr=5e-3)
    width, ones = 1 + agent.action_dim, torch.ones(64, 1, 1, dtype=torch.bool)
    times = torch.zeros(64, 2, 1, dtype=torch.int64)
    for _ in range(150):
        x = torch.randn(64, 2, 3)
        right = (x[:, :1, :1] > 0).float()
        actions = random_actions(space, 64, 1)
        if kind is BCAgent:
            actions = one_hot(right[..., 0].long(), 2).float()
        if space is ONE_BOX:
            reward = -(actions - (right - 0.5)).abs()
        else:
            reward = (actions[..., 1:] == right).float()
        out = agent(Batch({"observation": x}, torch.zeros(64, 2, width), times, actions, reward, ones, ones))
        (out.actor.mean() + 10 * out.critic.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        agent.after_update()
    x = torch.randn(256, 3)
    with torch.no_grad():
        rl2s, time_idxs = torch.zeros(256, width), torch.zeros(256, 1, dtype=torch.int64)
        action, _ = agent.eval().get_actions({"observation": x}, rl2s, time_idxs, None, sample=False)
    action = action.view(256, -1)
    if space is ONE_BOX:
        assert (action - 0.5 * x[:, :1].sign()).abs().mean() < 0.2
    else:
        assert (action == (x[:, :1] > 0)).float().mean() > 0.95
