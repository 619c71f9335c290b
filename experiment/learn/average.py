"""The average of weights that is evaluated and stored in policy files."""

from __future__ import annotations

import copy
from typing import Any

import gin
import torch

from ...agents import BaseAgent, OnPolicyAgent
from ...data.errors import check_number

_WINDOW = 10.0  # the average covers about one tenth of the updates so far


@gin.configurable(denylist=["learning"])
class WeightAverage:
    """A moving average of the weights, which is evaluated and stored in policy files.

    After update n = 0, 1, 2, ... with parameters w_n (buffers are copied):

        average <- average + share_n (w_n - average),  share_n = max(rate, 10 / (10 + n))

    So the average covers about the last tenth of all updates, and at most the last 1 / rate. Training is the
    same with and without it: the newest weights learn and collect.

    Reason: the policy of the newest weights oscillates: it loses a skill within a few hundred updates and
    learns it again. The average is steadier. It does not help where a skill is forgotten for longer.
    Source: Polyak & Juditsky 1992; the growing window is polynomial-decay averaging, Shamir & Zhang 2013,
    arXiv:1212.1824.
    Off: `Experiment.weight_average = None` (published).
    Effect: over ten tasks of POPGym, scores are 0.06 higher; that of PositionOnlyCartPoleHard is 0.87 instead
    of 0.51 (one seed each, docs/notebook).

    Args:
        learning: the agent that learns, on its device, before its first update.
        rate: smallest share of an update, above 0 and at most 1.
    Raises: TypeError or ValueError for an impossible rate; ValueError for an agent that learns only from what
        its own weights have done.
    """

    def __init__(self, learning: BaseAgent, *, rate: float = 0.01) -> None:
        if isinstance(learning, OnPolicyAgent):
            raise ValueError(
                f"Experiment.weight_average is set, but {type(learning).__name__} learns from what its own "
                "weights have done, not those of an average. Fix: set Experiment.weight_average = None."
            )
        check_number("WeightAverage.rate", rate, above=0, highest=1)
        self.rate, self.num_updates, self._learning = rate, 0, learning
        choice = getattr(learning, "acting", None)  # The choice of an acting discount is shared, not copied.
        self._averaged = copy.deepcopy(learning, {id(choice): choice}).requires_grad_(False).eval()

    @property
    def agent(self) -> BaseAgent:
        """The agent with the average; before the first update, the one that learns."""
        return self._averaged if self.num_updates else self._learning

    @torch.no_grad()
    def follow(self) -> None:
        """Add the weights after one update."""
        share = max(self.rate, _WINDOW / (_WINDOW + self.num_updates))
        torch._foreach_lerp_(list(self._averaged.parameters()), list(self._learning.parameters()), share)
        for own, new in zip(self._averaged.buffers(), self._learning.buffers(), strict=True):
            own.copy_(new)
        self.num_updates += 1

    def restart(self) -> None:
        """Begin again, because other weights were loaded."""
        self.num_updates = 0

    def compile_acting(self) -> None:
        """Compile acting with the averaged weights, as `BaseAgent.compile_acting` does."""
        self._averaged.compile_acting()

    def state_dict(self) -> dict[str, Any]:
        """Weights and number of updates; tensors and plain values only."""
        return {"weights": self._averaged.state_dict(), "num_updates": self.num_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of state_dict."""
        self._averaged.load_state_dict(state["weights"])
        self._averaged.on_checkpoint_loaded(is_resume=True)
        self.num_updates = int(state["num_updates"])
