"""What critics learn to predict: returns of a sequence that bootstrap from values, as scans over time.

Axes: B batch, L time, G discounts. All return (B, L, G, 1) float. If all inputs have more axes between L and
G, such as one of critics, so has the result. A return never looks beyond a termination, nor beyond the last
real step before a place where mask is False; there it bootstraps, as at a truncation. So sequences that share
a row have at least one such place between them. Entries where mask is False are meaningless, and whatever
stands there reaches no other.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
    # extended[t] is the target with i + 1 steps; a step whose successor is terminal or padding keeps the
    # shorter one
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
    """The mean of all n-step targets with weights (1 - lambda) lambda^(n-1), the last one taking the rest.

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
    mixed = rewards + discounts * ~terminated * (1.0 - trace_decay) * next_values
    weight = (trace_decay * discounts * ~terminated).expand_as(mixed)
    last = rewards + discounts * next_values * ~terminated
    return _scan(mixed, weight, last, _goes_on(terminated, mask))


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
    """Returns with corrections for what the policy would have done otherwise.

    y_t = r_t + discount (1 - d_t) (V_{t+1} + c_{t+1} (y_{t+1} - Q_{t+1})), V the mean of Q under the policy.

    Args:
        rewards: (B, L, 1, 1) float.
        terminated: (B, L, 1, 1) bool, True where the environment terminated; truncation is not termination.
        mask: (B, L, 1, 1) bool, True on real steps; False at least once between two sequences of a row.
        next_values: (B, L, G, 1) float, value of the timestep after each step, per discount.
        discounts: (G, 1) float in [0, 1].
        next_q: (B, L, G, 1) float, value of the recorded action of the timestep after each step. Unused
            where there is none.
        next_traces: (B, L, G, 1) float in [0, 1], its c: lambda min(1, pi(a|s) / mu(a|s)) for Retrace, with
            mu the policy that acted; lambda pi(a|s) for tree backup.
    Source: Munos et al. 2016, arXiv:1606.02647, eq. 3 and 4; tree backup: Precup et al. 2000.
    """
    going = discounts * ~terminated
    mixed = rewards + going * (next_values - next_traces * next_q)
    last = rewards + discounts * next_values * ~terminated
    return _scan(mixed, going * next_traces, last, _goes_on(terminated, mask))


def _goes_on(terminated: Tensor, mask: Tensor) -> Tensor:
    """(B, L, 1, 1) bool, True where a real step of the same episode follows."""
    return ~terminated & torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)


def _scan(mixed: Tensor, weight: Tensor, last: Tensor, goes_on: Tensor) -> Tensor:
    """y_t = mixed_t + weight_t y_{t+1} where the sequence goes on, else last_t."""
    targets, following = torch.empty_like(last), last[:, -1]
    for t in reversed(range(last.shape[1])):
        following = torch.where(goes_on[:, t], mixed[:, t] + weight[:, t] * following, last[:, t])
        targets[:, t] = following
    return targets
