"""Generalised advantage estimation over the [T, N] steps of a rollout."""

from __future__ import annotations

import gin
import torch
from torch import Tensor

from ..data.errors import check_number
from ..nets.recurrence import reverse_recurrence


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    ended: Tensor,
    mask: Tensor | None = None,
    *,
    discount: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Compute advantages, and the returns that values should predict.

        delta_t = r_t + discount * (0 if terminated_t else V'_t) - V_t
        A_t = delta_t + discount * lam * (0 if ended_t else A_{t+1}),  A_T = 0
        R_t = A_t + V_t
    With lam = 1 the returns are Monte Carlo returns that bootstrap at truncations.

    Args:
        rewards: (T, N) float32.
        values: (T, N) float32, V of the timestep at which each action was taken.
        next_values: (T, N) float32, V' of the timestep after it: the next one while the episode continues,
            the final observation if it was truncated. Ignored, even if NaN, if it terminated.
        terminated: (T, N) bool.
        ended: (T, N) bool, terminated or truncated.
        mask: (T, N) bool, True where a step was taken; None: everywhere. Other places are ignored, even if
            NaN: their results are 0, and they do not affect earlier steps.
        discount: in [0, 1].
        lam: in [0, 1].
    Returns: advantages and returns, (T, N) float32 each.
    Source: Schulman et al. 2016, arXiv:1506.02438, equation 16.
    """
    if mask is None:
        mask = torch.ones_like(ended)
    following = next_values.float().masked_fill(terminated, 0.0)
    deltas = (rewards.float() + discount * following - values.float()).masked_fill(~mask, 0.0)
    decay = torch.full_like(deltas, discount * lam).masked_fill(ended | ~mask, 0.0)
    advantages = reverse_recurrence(decay[None], deltas[None])[0]
    return advantages, (advantages + values.float()).masked_fill(~mask, 0.0)


@gin.configurable
class GAE:
    """Estimates advantages of a rollout; see `gae`.

    Args:
        gamma: discount per timestep.
        lam: 0 looks one step ahead, 1 to the end of the episode or rollout.
        time_limit_bootstrap: bootstrap from the value of the final observation of a truncated episode;
            otherwise a truncation counts as a termination.
    Raises: ValueError for gamma or lam outside [0, 1].
    """

    def __init__(self, *, gamma: float = 0.99, lam: float = 0.95, time_limit_bootstrap: bool = True) -> None:
        check_number("GAE.gamma", gamma, lowest=0, highest=1)
        check_number("GAE.lam", lam, lowest=0, highest=1)
        self.gamma, self.lam, self.time_limit_bootstrap = gamma, lam, time_limit_bootstrap

    def __call__(
        self,
        rewards: Tensor,
        values: Tensor,
        next_values: Tensor,
        terminated: Tensor,
        ended: Tensor,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Advantages and returns, (T, N) float32 each; arguments as in `gae`."""
        if not self.time_limit_bootstrap:
            terminated = ended
        return gae(rewards, values, next_values, terminated, ended, mask, discount=self.gamma, lam=self.lam)
