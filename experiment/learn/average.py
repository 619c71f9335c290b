"""A moving average of an agent's weights that acts instead of the newest weights."""

from __future__ import annotations

import copy
from typing import Any

import gin
import torch

from ...agents import BaseAgent, OnPolicyAgent
from ..process.ranges import check_number

_WINDOW = 10.0  # the growing window is about one tenth of the updates since the start


@gin.configurable(denylist=["agent"])
class WeightAverage:
    """A moving average of the weights acts, is evaluated and published, while the newest weights learn.

    After update n = 0, 1, 2, ..., with weights w_n (all parameters of the agent; buffers are copied):

        average_n = average_{n-1} + share_n (w_n - average_{n-1})
        share_n   = max(rate, 10 / (10 + max(n - start_after_updates, 0)))

    So the average equals the newest weights for `start_after_updates` updates. Then it covers about the last
    tenth of all updates since, and in the end the last 1 / rate updates.

    Reason: the policy of the newest weights oscillates: it can lose a skill within a few updates, and learn
    it again. The average does so less.
    Off: `Learner.weight_average = None`.
    Effect: none in short runs (docs/algorithm.md); it was added for CartPole-v1.
    Source: Polyak & Juditsky 1992; the growing window is polynomial-decay averaging, Shamir & Zhang 2013,
        arXiv:1212.1824.

    Args:
        agent: the agent, on its device, before the first update.
        rate: smallest share that an update has in the average, above 0 and at most 1.
        start_after_updates: number of first updates, with the largest changes, in which the average equals
            the newest weights.
    Raises: TypeError or ValueError for a number that cannot be; ValueError for an agent that learns only from
        what its own weights have done.
    """

    def __init__(
        self,
        agent: BaseAgent,
        *,
        rate: float = 0.01,
        start_after_updates: int = 200,
    ) -> None:
        if isinstance(agent, OnPolicyAgent):
            raise ValueError(
                f"Learner.weight_average is set, but {type(agent).__name__} learns from what its own weights "
                "have done, not those of an average. Fix: set Learner.weight_average = None."
            )
        check_number("WeightAverage.rate", rate, above=0)
        if rate > 1:
            raise ValueError(
                f"WeightAverage.rate is {rate}, but a share is at most 1. Fix: set WeightAverage.rate = 0.01."
            )
        check_number("WeightAverage.start_after_updates", start_after_updates, lowest=0, whole=True)
        self.agent, self.rate, self.start_after_updates = agent, rate, start_after_updates
        self.num_updates = 0
        self.averaged = copy.deepcopy(agent).requires_grad_(False).eval()

    @property
    def acting(self) -> BaseAgent:
        """The average; the agent itself before the first update."""
        return self.averaged if self.num_updates else self.agent

    def restart(self) -> None:
        """Start again, because the agent's weights were loaded."""
        self.num_updates = 0

    @torch.no_grad()
    def follow(self) -> None:
        """Add the weights after one update."""
        averaged_updates = max(self.num_updates - self.start_after_updates, 0)
        share = max(self.rate, _WINDOW / (_WINDOW + averaged_updates))
        torch._foreach_lerp_(list(self.averaged.parameters()), list(self.agent.parameters()), share)
        for own, new in zip(self.averaged.buffers(), self.agent.buffers(), strict=True):
            own.copy_(new)
        self.num_updates += 1

    def state_dict(self) -> dict[str, Any]:
        """Weights and count; tensors and plain values only."""
        return {"weights": self.averaged.state_dict(), "num_updates": self.num_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of state_dict."""
        self.averaged.load_state_dict(state["weights"])
        self.num_updates = int(state["num_updates"])
