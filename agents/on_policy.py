"""Interface of agents that learn only from rollouts of their newest policy."""

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
    """Outputs of the policy and the value function for B sequences of L timesteps.

    Attributes:
        log_probs: (B, L, 1) float32, log-probabilities of the actions taken.
        values: (B, L, 1) float32, in units of the rewards that they are learned from.
        entropy: (B, L, 1) float32, summed over action dimensions.
        params: (B, L, P) float32, parameters of the policy's distribution.
    """

    log_probs: Tensor
    values: Tensor
    entropy: Tensor
    params: Tensor


class OnPolicyAgent(BaseAgent, ABC):
    """An agent with a policy and a value function.

    Per rollout, a learner calls `act` and `evaluate` in evaluation mode, `gather_statistics` and
    `update_value_statistics`, then `forward` for every minibatch, and `after_rollout` at the end. Between
    `evaluate` and `after_rollout` only the optimizer changes the agent, so the first ratios are 1. For the
    same reason `forward` is called in evaluation mode too, without dropout.

    Attributes:
        values_when_acting: False if nobody reads the values that `act` computes. An agent may then leave them
            out, if neither its actions nor its memory depend on them.
    """

    values_when_acting: bool = True

    @property
    def context_len(self) -> int | None:
        """Number of earlier timesteps that outputs can depend on; None without a bound."""
        lengths = [model.traj_encoder.context_len for model in self._models]
        known = [length for length in lengths if length is not None]
        return max(known) if len(known) == len(lengths) else None

    def remember(self, batch: RolloutBatch) -> dict[str, Tensor]:
        """The exported hidden state after the last timestep of each sequence, by the current weights.

        Timesteps before the last reset of a sequence have no effect.
        """
        return self._joined([model.remember(batch) for model in self._models])

    @abstractmethod
    def act(
        self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, hidden_state: Any, sample: bool
    ) -> ActOutput:
        """Act for one timestep of N envs, with the extras that the learner needs; see `BaseAgent.act`."""

    def get_actions(
        self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, hidden_state: Any, sample: bool
    ) -> tuple[Tensor, Any]:
        """Act without the value function; a subclass that acts differently overrides both this and `act`.

        Memories that only the value function reads are returned as they are.
        """
        return self._act(obs, rl2s, time_idxs, hidden_state, sample)[:2]

    @abstractmethod
    def evaluate(self, batch: RolloutBatch) -> Evaluation:
        """Evaluate sequences as `act` did: in evaluation mode, regardless of the agent's mode.

        Log-probabilities are meaningful only where the batch's mask is True.
        """

    @abstractmethod
    def forward(self, batch: RolloutBatch, with_metrics: bool = False) -> LossTerms:  # type: ignore[override]
        """The losses of evaluated sequences: actor (B, L, 1, 1), critic (B, L, 1, 1, 1).

        Metrics always contain "kl", an estimate of the divergence from the policy that acted: the mean over
        the mask of r - 1 - log r, with r the probability ratio of the action taken.
        """

    def gather_statistics(self, batch: RolloutBatch) -> None:
        """Gather input statistics of a rollout; they are applied in `after_rollout`."""
        for model in self._models:
            model.tstep_encoder.gather_statistics(batch.obs, batch.rl2s, batch.time_idxs, batch.mask)

    def update_value_statistics(self, returns: Tensor, mask: Tensor) -> None:
        """Update the normalisation of values, before the updates on a rollout.

        All processes that train together have to call this at the same time.

        Args:
            returns: (B, L, 1) float32.
            mask: (B, L, 1) bool, True where a return counts.
        """

    def after_rollout(self, kl: float) -> None:
        """Update input statistics and settings that depend on `kl` (nats), after the updates on a rollout.

        All processes that train together have to call this at the same time, with the same `kl`.
        """
        super().after_update()

    def after_imitation(self) -> None:
        """Update statistics, after an update on demonstrations or a rollout without updates.

        All processes that train together have to call this at the same time.
        """
        super().after_update()

    def set_progress(self, progress: float) -> None:
        """Move schedules to this share of training, in [0, 1]."""

    def after_update(self) -> None:
        """Do nothing: statistics stay fixed between the updates on a rollout."""

    def compile_acting(self, backend: str | Callable[..., Any] = "inductor") -> None:
        super().compile_acting(backend)
        self._act_and_evaluate = torch.compile(self._act_and_evaluate, backend=backend)  # type: ignore[method-assign]

    @abstractmethod
    def _act_and_evaluate(
        self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, hidden_state: Any, sample: bool
    ) -> tuple[Tensor, Any, dict[str, Tensor]]:
        """Compute the result of `act`, as a function that torch.compile can take."""
