"""The contract of agents that learn from the rollouts of their newest policy alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..data import RolloutBatch
from .base import ActOutput, BaseAgent, LossTerms


@dataclass(frozen=True)
class Evaluation:
    """What policy and value function make of B sequences of L timesteps.

    Attributes:
        log_probs: (B, L, 1) float32, of the actions taken.
        values: (B, L, 1) float32, in units of the rewards that they are learned from.
        entropy: (B, L, 1) float32, summed over action dimensions.
        params: (B, L, P) float32, of the policy's distribution.
    """

    log_probs: Tensor
    values: Tensor
    entropy: Tensor
    params: Tensor


class OnPolicyAgent(BaseAgent, ABC):
    """An agent with a policy and a value function.

    Per rollout, a learner calls `act` and `evaluate` in evaluation mode, `gather_statistics` and
    `update_values_statistics`, then `forward` for every minibatch, and `after_rollout` at the end. Between
    `evaluate` and `after_rollout` nothing moves but what an optimizer moves, so the first ratios are 1; for
    that `forward`, too, is called in evaluation mode, without dropout.

    Attributes:
        values_when_acting: False where nobody reads the values that `act` finds. An agent may leave them out
            then, if neither its actions nor its memory need what they cost.
    """

    values_when_acting: bool = True

    @property
    def context_len(self) -> int | None:
        """Earlier timesteps that outputs can depend on; None without a bound."""
        lengths = [model.traj_encoder.context_len for model in self._models]
        known = [length for length in lengths if length is not None]
        return max(known) if len(known) == len(lengths) else None

    def remember(self, batch: RolloutBatch) -> dict[str, Tensor]:
        """The hidden state after the last place of all sequences, as exported, by the present weights.

        What stands before a sequence's last reset has no effect.
        """
        return self._joined([model.remember(batch) for model in self._models])

    @abstractmethod
    def act(
        self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, hidden_state: Any, sample: bool
    ) -> ActOutput:
        """Act for one timestep of N envs, and tell what the learner will need of it.

        See `BaseAgent.act`. `get_actions` does without what only the learner needs.
        """

    @abstractmethod
    def evaluate(self, batch: RolloutBatch) -> Evaluation:
        """Judge sequences as `act` did: in evaluation mode, whichever mode the agent is in.

        Log-probabilities mean something where the batch's mask is True only.
        """

    @abstractmethod
    def forward(self, batch: RolloutBatch, with_metrics: bool = False) -> LossTerms:  # type: ignore[override]
        """The losses of evaluated sequences: actor (B, L, 1, 1), critic (B, L, 1, 1, 1).

        Metrics always contain "kl", how far the policy is from the one that acted: the mean over the mask of
        r - 1 - log r, with r the ratio of probabilities of the action taken.
        """

    def gather_statistics(self, batch: RolloutBatch) -> None:
        """Show input statistics the steps of a rollout; they move in `after_rollout`."""
        for model in self._models:
            model.tstep_encoder.gather_statistics(batch.obs, batch.rl2s, batch.time_idxs, batch.mask)

    def update_values_statistics(self, returns: Tensor, mask: Tensor) -> None:
        """Let the normalisation of values move, before the updates on a rollout.

        All processes that train together have to call this at the same time.

        Args:
            returns: (B, L, 1) float32.
            mask: (B, L, 1) bool, True where a return counts.
        """

    def after_rollout(self, kl: float) -> None:
        """After the last update on a rollout: let input statistics, and what depends on `kl` (nats), move.

        All processes that train together have to call this at the same time, with the same `kl`.
        """
        super().after_update()

    def after_imitation(self) -> None:
        """After an update on demonstrations, or a rollout without updates: statistics move.

        All processes that train together have to call this at the same time.
        """
        super().after_update()

    def set_progress(self, progress: float) -> None:
        """Tell the share of training that is done, in [0, 1]."""

    def after_update(self) -> None:
        """Nothing moves between the updates on a rollout."""

    def compile_acting(self, backend: str | Callable[..., Any] = "inductor") -> None:
        super().compile_acting(backend)
        self._act_and_judge = torch.compile(self._act_and_judge, backend=backend)  # type: ignore[method-assign]

    @abstractmethod
    def _act_and_judge(
        self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, hidden_state: Any, sample: bool
    ) -> tuple[Tensor, Any, dict[str, Tensor]]:
        """What `act` computes, as a function that torch.compile can take."""
