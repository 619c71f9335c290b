"""The rollout loop of on-policy agents: keeps what the agent says of each action, and hidden states."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from ...agents import ActOutput, OnPolicyAgent
from ..collector import Collector, RolloutState
from .buffer import RolloutBuffer


class OnPolicyCollector(Collector):
    """A collector whose sink is, or holds, a rollout buffer, which each `collect` fills.

    Args:
        buffer: takes the rollout; `sink` must hand it every step.
        args, kwargs: those of `Collector`.
    """

    agent: OnPolicyAgent

    def __init__(self, buffer: RolloutBuffer, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.buffer = buffer

    def restart(self, seed: int | None) -> None:
        self.flush()
        self.buffer.restart()
        super().restart(seed)

    @property
    def hidden_state(self) -> Any:
        """The memory that the next action comes from: what new weights made of it, where they did."""
        carried = self.buffer.carried_state
        return super().hidden_state if carried is None else carried

    def context(self) -> dict[str, Any] | None:
        return self.buffer.context()

    def go_on_from(self, state: RolloutState, context: dict[str, Any] | None = None) -> None:
        self.buffer.restart()
        super().go_on_from(state)
        if context is not None:
            states = {
                step: {name: value.to(self.device) for name, value in rows.items()}
                for step, rows in context["states"].items()
            }
            self.buffer.recall({**context, "states": states})

    def _act(self, state: RolloutState) -> np.ndarray:
        """Actions of all envs; the state that chose them is kept before they are chosen."""
        if self.buffer.carried_state is not None:
            state.hidden_state, self.buffer.carried_state = self.buffer.carried_state, None
        if self.buffer.wants_state:
            self.buffer.keep_state(self.agent.export_hidden_state(state.hidden_state))
        output = self.agent.act(
            {key: self._tensor(value) for key, value in state.obs.items()},
            self._tensor(state.rl2s),
            self._tensor(state.time_idxs),
            state.hidden_state,
            self.sample,
        )
        if self.buffer.wants_random_actions:
            output = _at_random(output, self.envs.single_action_space)
        state.hidden_state = output.hidden_state
        self.extras = {key: value.cpu().numpy() for key, value in output.extras.items()}
        actions: np.ndarray = output.actions.cpu().numpy()
        return actions


def _at_random(output: ActOutput, space: Any) -> ActOutput:
    """The same with actions drawn uniformly from the policy's space, and their log-probs."""
    uniform = torch.rand_like(output.actions, dtype=torch.float64)
    if isinstance(space, spaces.Box):
        actions, log_prob = (2.0 * uniform - 1.0).float(), -uniform.shape[-1] * math.log(2.0)
    else:
        sizes = np.atleast_1d(space.n if isinstance(space, spaces.Discrete) else space.nvec)
        actions = (uniform * torch.from_numpy(sizes).to(uniform.device)).long()
        log_prob = -float(np.log(sizes).sum())
    extras = {**output.extras, "log_probs": torch.full_like(output.extras["log_probs"], log_prob)}
    if "samples" in extras:
        extras["samples"] = actions
    return dataclasses.replace(output, actions=actions, extras=extras)
