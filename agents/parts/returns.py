"""Targets of critics: returns that bootstrap from values, and the parts that compute them.

Axes: B batch, L time, C critics, G discounts. All functions return (B, L, G, 1) float. If all inputs have
further axes between L and G, such as one for critics, the result has them too. A return never looks beyond a
termination, nor beyond the last real step before a place where mask is False; there it bootstraps, as at a
truncation. Sequences that share a row therefore need at least one such place between them. Entries where mask
is False are meaningless, and do not influence any other entry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import gin
import torch
from torch import Tensor

from ...data.errors import check_count, check_number
from ...nets.recurrence import reverse_recurrence


class Steps(NamedTuple):
    """Transitions in the form that the functions below take."""

    rewards: Tensor  # (B, L, 1 or G, 1) float, times the reward multiplier
    terminated: Tensor  # (B, L, 1, 1) bool
    mask: Tensor  # (B, L, 1, 1) bool, True on real transitions
    discounts: Tensor  # (G, 1) float


class Lookahead(Protocol):
    """The timestep after each transition; values are computed on request."""

    def policy_values(self) -> Tensor:
        """(B, L, C, G, 1) values of the policy's actions."""

    def corrections(self) -> tuple[Tensor, Tensor, Tensor]:
        """Values of the policy's and of the recorded action, and log(pi / b) of the latter.

        Both values are (B, L, C, G, 1), the logarithm is (B, L, G, 1). b is the probability with which the
        action was taken, or its upper bound 1 if it was not stored.
        """


Reduce = Callable[[Tensor], Tensor]
"""Reduces values of several critics (B, L, C, G, 1) to one value (B, L, G, 1); see RandomSubset."""


class Returns(ABC):
    """Base of the parts that compute the targets of critics."""

    needs_probabilities: ClassVar[bool] = False
    """True if trajectories have to store the probabilities with which actions were taken."""

    @abstractmethod
    def targets(self, steps: Steps, following: Lookahead, reduce: Reduce) -> Tensor:
        """(B, L, G, 1) targets from transitions and from the timestep after each."""

    def of_continuous_actions(self) -> Returns:
        """The returns for actions with densities: these, or others if these need probabilities."""
        return self


class UncorrectedReturns(Returns):
    """Base of returns that need one value of each following timestep and do not correct recorded actions."""

    @abstractmethod
    def from_values(self, steps: Steps, next_values: Tensor) -> Tensor:
        """(B, L, G, 1) targets from values (B, L, G, 1) of the timestep after each transition."""

    def targets(self, steps: Steps, following: Lookahead, reduce: Reduce) -> Tensor:
        return self.from_values(steps, reduce(following.policy_values()))


@gin.configurable
@dataclass(frozen=True)
class NStep(UncorrectedReturns):
    """n rewards, then the value of the timestep after them.

        y_t = sum_{i<n} g^i r_{t+i} + g^n (1 - d_{t+n-1}) V_{t+n}

    Source: Grigsby et al. 2023, arXiv:2310.09971 (published: n = 1). Exact form: `n_step_targets`.

    Args:
        n: number of rewards before the value, at least 1; may exceed the length of a window.
    """

    n: int = 1

    def __post_init__(self) -> None:
        check_count("NStep.n", self.n)

    def from_values(self, steps: Steps, next_values: Tensor) -> Tensor:
        rewards, terminated, mask, discounts = steps
        return n_step_targets(rewards, terminated, mask, next_values, discounts, n_step=self.n)


@gin.configurable
@dataclass(frozen=True)
class LambdaReturns(UncorrectedReturns):
    """The mean of n-step targets of all lengths n, with weights that decay with n.

        y_t = r_t + g (1 - d_t) ((1 - lambda) V_{t+1} + lambda y_{t+1})

    Reason: a reward reaches earlier timesteps within one update; one-step targets need an update per
    timestep. Recorded actions that the policy would not take are not corrected, so lambda is smaller than in
    Retrace. Source: Sutton & Barto 2018, eq. 12.18; for Q functions Peng & Williams 1996.
    Off: `returns = @NStep()` (published).
    Effect: none beyond chance on the double integrator, the one continuous task (docs/algorithm.md).

    Args:
        trace_decay: lambda, in [0, 1]; 0 gives one-step targets.
    """

    trace_decay: float = 0.8

    def __post_init__(self) -> None:
        check_number("LambdaReturns.trace_decay", self.trace_decay, lowest=0, highest=1)

    def from_values(self, steps: Steps, next_values: Tensor) -> Tensor:
        rewards, terminated, mask, discounts = steps
        decay = self.trace_decay
        return lambda_returns(rewards, terminated, mask, next_values, discounts, trace_decay=decay)


@gin.configurable
@dataclass(frozen=True)
class Retrace(Returns):
    """Multi-step targets for discrete actions, corrected for recorded ones that the policy would not take.

        y_t = r_t + g (1 - d_t) (V_{t+1} + c_{t+1} (y_{t+1} - Q(s_{t+1}, a_{t+1})))
        c   = lambda min(1, pi(a|s) / b(a|s))

    Each critic is corrected by its own values before the critics are reduced: the minimum over critics is
    lower for one action than for a mean over actions, and the differences would add up over timesteps.

    Reason: a reward reaches earlier timesteps within one update, and exploration does not bias the targets.
    Actors store the probability b of each action; without it, b = 1, which is tree backup.
    Source: Munos et al. 2016, arXiv:1606.02647; tree backup: Precup et al. 2000.
    Off: `returns = @NStep()` (published).
    Effect: CartPole without velocities is learned by 4 of 5 seeds, without it by none; on other tasks, small
    gains and losses cancel (docs/algorithm.md).

    Args:
        trace_decay: lambda, in [0, 1]; 0 gives one-step targets.
        continuous: the returns for continuous actions, which have no probabilities.
    """

    trace_decay: float = 0.9
    continuous: Returns = LambdaReturns()
    needs_probabilities: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("Retrace.trace_decay", self.trace_decay, lowest=0, highest=1)
        if not isinstance(self.continuous, Returns) or self.continuous.needs_probabilities:
            raise ValueError(
                f"Retrace.continuous is {self.continuous!r}, but must be returns that need no probabilities "
                "of actions. Fix: bind Retrace.continuous = @LambdaReturns()."
            )

    def of_continuous_actions(self) -> Returns:
        return self.continuous

    def targets(self, steps: Steps, following: Lookahead, reduce: Reduce) -> Tensor:
        values, q, log_ratio = following.corrections()
        traces = self.trace_decay * log_ratio.clamp(max=0.0).exp()
        rewards, terminated, mask = (x[:, :, None] for x in steps[:3])
        found = retrace_targets(
            rewards, terminated, mask, values, steps.discounts, next_q=q, next_traces=traces[:, :, None]
        )
        return reduce(found)


def n_step_targets(
    rewards: Tensor, terminated: Tensor, mask: Tensor, next_values: Tensor, discounts: Tensor, *, n_step: int
) -> Tensor:
    """TD targets that look up to n steps ahead.

    y_t = sum_{i<k} discount^i r_{t+i} + discount^k (1 - d_{t+k-1}) V_{t+k}, where k is n, or the number of
    steps until the first terminal step or the last real one of the sequence, whichever comes first. With
    n_step = 1 it is r + discount (1 - d) V'. No importance correction.

    Args:
        rewards: (B, L, 1, 1) float.
        terminated: (B, L, 1, 1) bool, True where the environment terminated; truncation is not termination.
        mask: (B, L, 1, 1) bool, True on real steps; False at least once between two sequences of a row.
        next_values: (B, L, G, 1) float, value of the timestep after each step, per discount.
        discounts: (G, 1) float in [0, 1].
        n_step: at least 1; may exceed L.
    """
    targets = rewards + discounts * next_values * ~terminated
    # extended[t] is the target with i + 1 steps. A step that ends its episode, or is followed by padding,
    # keeps the shorter target.
    extended = targets
    can_look_on = _goes_on(terminated, mask)
    for _ in range(min(n_step, rewards.shape[1]) - 1):
        following = torch.cat([extended[:, 1:], extended[:, -1:]], dim=1)
        extended = torch.where(can_look_on, rewards + discounts * following, targets)
    return extended


def lambda_returns(
    rewards: Tensor,
    terminated: Tensor,
    mask: Tensor,
    next_values: Tensor,
    discounts: Tensor,
    *,
    trace_decay: float,
) -> Tensor:
    """Mean of all n-step targets with weights (1 - lambda) lambda^(n-1); the longest has the rest.

    y_t = r_t + discount (1 - d_t) ((1 - lambda) V_{t+1} + lambda y_{t+1}). No importance correction.

    Args:
        rewards: (B, L, 1, 1) float.
        terminated: (B, L, 1, 1) bool, True where the environment terminated; truncation is not termination.
        mask: (B, L, 1, 1) bool, True on real steps; False at least once between two sequences of a row.
        next_values: (B, L, G, 1) float, value of the timestep after each step, per discount.
        discounts: (G, 1) float in [0, 1].
        trace_decay: lambda in [0, 1]; 0 gives the one-step target.
    Source: Sutton & Barto 2018, eq. 12.18; for Q functions Peng & Williams 1996.
    """
    going = discounts * ~terminated
    mixed = rewards + going * (1.0 - trace_decay) * next_values
    last = rewards + going * next_values
    return _accumulated(mixed, trace_decay * going, last, terminated, mask)


def retrace_targets(
    rewards: Tensor,
    terminated: Tensor,
    mask: Tensor,
    next_values: Tensor,
    discounts: Tensor,
    *,
    next_q: Tensor,
    next_traces: Tensor,
) -> Tensor:
    """Returns with corrections for recorded actions that the policy would not take.

    y_t = r_t + discount (1 - d_t) (V_{t+1} + c_{t+1} (y_{t+1} - Q_{t+1})), V the mean of Q under the policy.

    Args:
        rewards: (B, L, 1, 1) float.
        terminated: (B, L, 1, 1) bool, True where the environment terminated; truncation is not termination.
        mask: (B, L, 1, 1) bool, True on real steps; False at least once between two sequences of a row.
        next_values: (B, L, G, 1) float, value of the timestep after each step, per discount.
        discounts: (G, 1) float in [0, 1].
        next_q: (B, L, G, 1) float, value of the recorded action at the timestep after each step; ignored
            where the sequence ends.
        next_traces: (B, L, G, 1) float in [0, 1], c of that action: lambda min(1, pi(a|s) / b(a|s)) for
            Retrace, where b is the policy that acted; lambda pi(a|s) for tree backup.
    Source: Munos et al. 2016, arXiv:1606.02647, eq. 3 and 4; tree backup: Precup et al. 2000.
    """
    going = discounts * ~terminated
    mixed = rewards + going * (next_values - next_traces * next_q)
    last = rewards + going * next_values
    return _accumulated(mixed, going * next_traces, last, terminated, mask)


def _goes_on(terminated: Tensor, mask: Tensor) -> Tensor:
    """(B, L, 1, 1) bool, True on real steps before a real step of the same episode."""
    return mask & ~terminated & torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)


def _accumulated(mixed: Tensor, weight: Tensor, last: Tensor, terminated: Tensor, mask: Tensor) -> Tensor:
    """y_t = mixed_t + weight_t y_{t+1} where the sequence continues, otherwise last_t; 0 under False."""
    goes_on = _goes_on(terminated, mask)
    # A product of 0 and NaN would be NaN, so padding has to be finite.
    inputs = mixed.where(goes_on, last).where(mask, 0.0)
    return reverse_recurrence(weight.where(goes_on, 0.0), inputs)
