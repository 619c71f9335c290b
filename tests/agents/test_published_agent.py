"""The published agent: the numbers of the reference implementation for the same inputs.

The arrays in `golden/` are inputs and outputs of AMAGO 3.3.0 in six settings, three calls each. Networks are
replaced by functions that return the recorded outputs; everything downstream of them is the agent's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from loxodon.agents import Agent, NStep, PlainValues, PopArt, RandomSubset, masked_mean
from loxodon.agents.off_policy import Timesteps, Transitions
from loxodon.data import Batch
from loxodon.nets import Categorical, FFTrajEncoder, FFTstepEncoder

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.npz"))
OBS = spaces.Dict({"observation": spaces.Box(-1, 1, (1,), np.float32)})
close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)


class RecordedSubset(RandomSubset):
    """Draws the critics that the reference drew."""

    drawn: Tensor

    def indices(self, num_critics: int, shape: tuple[int, int, int], device: torch.device) -> Tensor:
        return self.drawn


class RecordedCritics(nn.Module):
    """Critics that return recorded outputs and ignore their inputs.

    of_all: for Discrete actions (B, L, C, G, A). Otherwise `of_recorded` (B, L, C, G, 1) for one action per
    timestep, and `of_policy` (K, B, L, C, G, 1) for K samples per discount, each judged for its own discount.
    """

    num_critics = 4
    reads_discount = False  # the recorded outputs have one entry per discount

    def __init__(self, **outputs: Tensor) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, state: Tensor, actions: Tensor | None = None) -> Tensor:
        if actions is None:
            return self.outputs["of_all"]
        if actions.shape[2] == 1:
            return self.outputs["of_recorded"][:, :, None]
        of_policy = self.outputs["of_policy"]
        by_action = of_policy[..., None, :, :].expand(*of_policy.shape[:-2], of_policy.shape[-2], -1, -1)
        return by_action.permute(1, 2, 0, 4, 3, 5, 6).flatten(2, 3)  # (B, L, K G, C, G, 1)

    def frozen(self) -> Callable[..., Tensor]:
        return self


class RecordedPolicy:
    """A policy over continuous actions whose log-probabilities are recorded."""

    is_bounded = True

    def __init__(self, log_probs: Tensor) -> None:
        self.log_probs = log_probs

    def sample(self) -> Tensor:
        return self.log_probs.new_zeros(*self.log_probs.shape[:3], 2)

    def log_prob(self, actions: Tensor) -> Tensor:
        return self.log_probs


def published_agent(
    settings: Mapping[str, Any], space: Any, discounts: list[float], num_samples: int
) -> Agent:
    reduce = "min" if settings["online_coeff"] > 0 else "mean"
    return Agent(
        OBS,
        space,
        partial(FFTstepEncoder, n_layers=1, d_hidden=4, d_output=4),
        partial(FFTrajEncoder, d_model=4),
        9,
        gamma=discounts[-1],
        training_discounts=discounts[:-1],
        online_coeff=settings["online_coeff"],
        offline_coeff=settings["offline_coeff"],
        reward_multiplier=settings["reward_multiplier"],
        returns=NStep(settings["n_step"]),
        values=PopArt(beta=settings["popart_beta"]) if settings["popart"] else PlainValues(),
        critic_subset=RecordedSubset(settings["num_critics_td"], reduce=reduce),
        num_actions_for_value_in_critic_loss=num_samples,
        num_actions_for_value_in_actor_loss=num_samples,
    )


@pytest.mark.parametrize("call", range(3))
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_targets_statistics_and_losses_equal_the_reference(path: Path, call: int) -> None:
    stored = np.load(path)
    settings = json.loads(stored["settings"].tobytes())
    known = {
        name.split("/")[1]: torch.from_numpy(stored[name])
        for name in stored.files
        if name.startswith(f"{call}/")
    }
    is_discrete = "critics_all" in known
    space = spaces.Discrete(3) if is_discrete else spaces.Box(-1, 1, (2,), np.float32)
    num_samples = 1 if is_discrete else len(known["maximized_critics_out"])
    agent = published_agent(settings, space, known["gammas"].tolist(), num_samples).train()
    object.__setattr__(agent.critic_subset, "drawn", known["subset"])
    if settings["popart"]:
        for name in ("mu", "nu", "w", "b"):
            getattr(agent.values, f"_{name}").copy_(known[f"popart_before_{name}"])
        agent.values.updates.copy_(known["popart_before__t"][0, 0])  # type: ignore[operator, union-attr]
    actions, mask = known["actions"], known["mask"]
    state, following = torch.zeros(*actions.shape[:2], 4), torch.ones(*actions.shape[:2], 4)
    if is_discrete:
        actions = actions.clamp(0, 1)
        critics = RecordedCritics(of_all=known["critics_all"])
        target_critics = RecordedCritics(of_all=known["target_critics_all"])
        policy: Any = Categorical(known["pi_probs"][:, :-1].log())
        target_policy: Any = Categorical(known["pi_target_probs"][:, 1:].log())
    else:
        critics = RecordedCritics(
            of_recorded=known["critics_out"][0], of_policy=known["maximized_critics_out"][:, :, :-1]
        )
        target_critics = RecordedCritics(of_policy=known["target_critics_out"])
        policy = target_policy = RecordedPolicy(known["logp"])
    agent.critics, agent.target_critics = critics, target_critics  # type: ignore[assignment]
    agent.policies = lambda actor, at: target_policy if at.state is following else policy  # type: ignore
    batch = Batch(
        obs={},
        rl2s=torch.zeros(4, 10, 1),
        time_idxs=torch.zeros(4, 10, 1),
        actions=actions,
        rews=known["rews"],
        dones=known["dones"],
        mask=mask,
    )
    transitions = Transitions(batch, Timesteps(state, {}), Timesteps(following, {}), mask)

    def same(found: Tensor, expected: Tensor) -> None:
        real = mask.view(*mask.shape, *[1] * (expected.dim() - mask.dim()))
        close(found.where(real, 0.0), expected.where(real, 0.0))

    same(agent.policy_targets(transitions, target_policy), known["td_target"][:, :, 0])
    losses = agent.losses(transitions, with_metrics=False)
    same(losses.critic, known["critic_loss"])
    same(losses.actor, known["actor_loss"])
    actor = masked_mean(losses.actor, mask[..., None])
    critic = masked_mean(losses.critic, mask[..., None, None])
    close(actor + settings["critic_loss_weight"] * critic, known["loss"])
    agent.values.commit()
    if settings["popart"]:
        for name in ("mu", "nu", "w", "b"):
            close(getattr(agent.values, f"_{name}"), known[f"popart_after_{name}"])
