"""A moving average of an agent's weights, which acts instead of the newest ones."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ...agents import BaseAgent, OnPolicyAgent
from ..numbers import check_number

_FIRST, _YOUNG = 200, 10  # updates before weights are averaged; then the average grows with a tenth of them
_USUAL_RATE = 0.01


def weight_average(agent: BaseAgent, rate: float | None) -> WeightAverage | None:
    """What `Learner.average_rate` asks for: None takes what suits the agent, 0 has none.

    Raises: TypeError or ValueError for a rate that is no share; ValueError for one above 0 and an agent that
        learns only from what its own weights have done.
    """
    is_on_policy = isinstance(agent, OnPolicyAgent)
    if rate is None:
        rate = 0.0 if is_on_policy else _USUAL_RATE
    check_number("Learner.average_rate", rate, lowest=0, optional=True)
    if rate > 1:
        raise ValueError(
            f"Learner.average_rate is {rate}, but a share is at most 1. Fix: set it to {_USUAL_RATE}."
        )
    if rate > 0 and is_on_policy:
        raise ValueError(
            f"Learner.average_rate is {rate}, but {type(agent).__name__} learns from what its own weights "
            "have done. Fix: set Learner.average_rate = 0."
        )
    return WeightAverage(agent, rate) if rate > 0 else None


class WeightAverage:
    """Follows the weights of an agent; its buffers, such as statistics, are those of the agent.

    Args:
        agent: on its device, before the first update.
        rate: share of an update's weights, above 0 and at most 1. It is 1 in the first 200 updates, in which
            most changes, and about a tenth at 300.
    Source: Polyak & Juditsky 1992, here with exponential weights.
    """

    def __init__(self, agent: BaseAgent, rate: float) -> None:
        self.agent, self.rate, self.num_updates = agent, rate, 0
        self.averaged = copy.deepcopy(agent).requires_grad_(False).eval()

    @property
    def acting(self) -> BaseAgent:
        """The average; the agent itself where there was no update yet."""
        return self.averaged if self.num_updates else self.agent

    def restart(self) -> None:
        """The agent's weights have come from elsewhere."""
        self.num_updates = 0

    @torch.no_grad()
    def follow(self) -> None:
        """Once per update, after it."""
        share = max(self.rate, _YOUNG / (_YOUNG + max(self.num_updates - _FIRST, 0)))
        torch._foreach_lerp_(list(self.averaged.parameters()), list(self.agent.parameters()), share)
        for own, new in zip(self.averaged.buffers(), self.agent.buffers(), strict=True):
            own.copy_(new)
        self.num_updates += 1

    def state_dict(self) -> dict[str, Any]:
        """Weights and count; tensors and plain values only."""
        return {"weights": self.averaged.state_dict(), "num_updates": self.num_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what state_dict returned."""
        self.averaged.load_state_dict(state["weights"])
        self.num_updates = int(state["num_updates"])
