"""The objective of proximal policy optimisation, per timestep, and metrics of its updates."""

from __future__ import annotations

from collections.abc import Callable

import gin
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..data.errors import check_choice, check_number
from .masks import masked_mean
from .schedules import Schedule, value_at

_VALUE_LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "huber": F.smooth_l1_loss,
    "l1": F.l1_loss,
}
BETA_RANGE = (1e-6, 1e6)
"""Bounds of the adapted KL coefficient, so that it never becomes 0 or infinite."""


@gin.configurable
class PPOLoss(nn.Module):
    """Policy and value loss; a module so that the adapted KL coefficient is saved with the agent.

    With log ratio d = log pi(a) - log pi_old(a), ratio rho = exp(d), advantage A, and the entropy H, summed
    over action dimensions:
        clip:        -min(A rho, A clip(rho, 1 - clip_eps, 1 + clip_eps)) - entropy_coef H
        kl_penalty:  -A rho + beta KL(pi_old || pi) - entropy_coef H
    After each rollout beta grows where KL > kl_band kl_target, and shrinks where KL < kl_target / kl_band.

    Source: Schulman et al. 2017, arXiv:1707.06347, equations 7 and 8.

    Args:
        kind: "clip" or "kl_penalty".
        clip_eps: number above 0, or a schedule, which may reach 0.
        value_clip: largest difference between a new value and the old one before its loss is clipped, in the
            units of the critic (normalised if values are); None: no clipping.
        value_clip_mode: "max" takes the larger of clipped and plain loss; "only" takes the clipped one, which
            has no gradient beyond the band.
        value_loss: "mse" (the squared error, not halved), "huber" (quadratic below 1) or "l1".
        entropy_coef: number or schedule, per nat.
        kl_target: desired KL per rollout, in nats.
        kl_beta: initial beta.
        kl_increase: factor by which beta grows.
        kl_decrease: factor by which beta shrinks.
        kl_band: factor, at least 1, by which KL may miss its target before beta moves.
        log_ratio_limit: |d| is clamped to this before the exponential.
    Raises: ValueError for unknown names, or numbers out of range.
    """

    beta: Tensor

    def __init__(
        self,
        *,
        kind: str = "clip",
        clip_eps: float | Schedule = 0.2,
        value_clip: float | None = None,
        value_clip_mode: str = "max",
        value_loss: str = "mse",
        entropy_coef: float | Schedule = 0.0,
        kl_target: float = 0.01,
        kl_beta: float = 1.0,
        kl_increase: float = 2.0,
        kl_decrease: float = 0.5,
        kl_band: float = 1.5,
        log_ratio_limit: float = 20.0,
    ) -> None:
        super().__init__()
        check_choice("PPOLoss.kind", kind, ("clip", "kl_penalty"))
        check_choice("PPOLoss.value_clip_mode", value_clip_mode, ("max", "only"))
        check_choice("PPOLoss.value_loss", value_loss, tuple(_VALUE_LOSSES))
        check_number("PPOLoss.value_clip", value_clip, above=0, optional=True)
        check_number("PPOLoss.kl_target", kl_target, above=0)
        check_number("PPOLoss.kl_beta", kl_beta, above=0)
        check_number("PPOLoss.kl_increase", kl_increase, lowest=1)
        check_number("PPOLoss.kl_decrease", kl_decrease, above=0, highest=1)
        check_number("PPOLoss.kl_band", kl_band, lowest=1)
        check_number("PPOLoss.log_ratio_limit", log_ratio_limit, above=0)
        if not callable(clip_eps):
            check_number("PPOLoss.clip_eps", clip_eps, above=0)
        self.kind, self.value_clip, self.value_clip_mode = kind, value_clip, value_clip_mode
        self.value_loss = _VALUE_LOSSES[value_loss]
        self.kl_target, self.kl_increase, self.kl_decrease = kl_target, kl_increase, kl_decrease
        self.kl_band, self.log_ratio_limit = kl_band, log_ratio_limit
        self._clip_setting, self._entropy_setting = clip_eps, entropy_coef
        self.register_buffer("beta", torch.tensor(float(kl_beta)))
        for progress in (1.0, 0.0):  # a schedule that ends out of range is refused now
            self.set_progress(progress)

    def set_progress(self, progress: float) -> None:
        """Move schedules to `progress` in [0, 1] of training."""
        self.clip_eps = value_at(self._clip_setting, progress)
        self.entropy_coef = value_at(self._entropy_setting, progress)
        check_number("PPOLoss.clip_eps", self.clip_eps, lowest=0)

    def log_ratio(self, log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
        """New minus old log-probability, (..., 1) float32 within the limit."""
        ratio = log_probs.float() - old_log_probs.float()
        return ratio.clamp(-self.log_ratio_limit, self.log_ratio_limit)

    def actor(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        entropy: Tensor | None,
        kl: Tensor | None = None,
    ) -> Tensor:
        """Policy loss per timestep.

        Args:
            log_probs: (..., 1) float, of the actions taken, under the new policy.
            old_log_probs: (..., 1) float, of the same actions, under the policy that acted.
            advantages: (..., 1) float32.
            entropy: (..., 1) float, of the new policy; may be None if its coefficient is 0.
            kl: (..., 1) float, KL(pi_old || pi); only "kl_penalty" needs it.
        Returns: (..., 1) float32.
        Raises: ValueError if `kl` is missing.
        """
        ratio = self.log_ratio(log_probs, old_log_probs).exp()
        gain = advantages * ratio
        if self.kind == "clip":
            clipped = advantages * ratio.clamp(1.0 - self.clip_eps, 1.0 + self.clip_eps)
            loss = -torch.minimum(gain, clipped)
        elif kl is None:
            raise ValueError(
                "No KL divergence was given, but PPOLoss.kind = 'kl_penalty' needs one. "
                "Fix: pass it to PPOLoss.actor, or bind PPOLoss.kind = 'clip'."
            )
        else:
            loss = self.beta * kl.float() - gain
        if entropy is None or not self.entropy_coef:
            return loss
        return loss - self.entropy_coef * entropy.float()

    def critic(self, values: Tensor, old_values: Tensor, returns: Tensor) -> Tensor:
        """Value loss per timestep; arguments and result are (..., 1) float, in units of the critic."""
        values, old_values, returns = values.float(), old_values.float(), returns.float()
        plain = self.value_loss(values, returns, reduction="none")
        if self.value_clip is None:
            return plain
        near = old_values + (values - old_values).clamp(-self.value_clip, self.value_clip)
        clipped = self.value_loss(near, returns, reduction="none")
        return clipped if self.value_clip_mode == "only" else torch.maximum(plain, clipped)

    @torch.no_grad()
    def after_rollout(self, kl: float) -> None:
        """Adapt beta to the divergence after the updates on one rollout, in nats.

        With kind="clip" this does nothing.
        """
        if self.kind != "kl_penalty":
            return
        if kl > self.kl_band * self.kl_target:
            self.beta.mul_(self.kl_increase)
        elif kl < self.kl_target / self.kl_band:
            self.beta.mul_(self.kl_decrease)
        self.beta.clamp_(*BETA_RANGE)


@torch.no_grad()
def kl_estimate(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Estimate the divergence of the new policy from the one that acted, a scalar of at least 0.

    This is the mean of r - 1 - log r, which has the expectation of -log r, but less variance.

    Args:
        log_ratio: (..., 1) float, new minus old log-probability of actions that the old policy drew.
        mask: (..., 1) bool, the timesteps that count.
    Source: Schulman 2020, "Approximating KL Divergence" (estimator k3).
    """
    return masked_mean(torch.expm1(log_ratio) - log_ratio, mask)


@torch.no_grad()
def policy_metrics(log_ratio: Tensor, entropy: Tensor, clip_eps: float, mask: Tensor) -> dict[str, Tensor]:
    """Metrics of the policy, over timesteps where mask is True; arguments (..., 1)."""
    ratio = log_ratio.exp()
    return {
        "kl_k1": masked_mean(-log_ratio, mask),
        "clip_fraction": masked_mean(((ratio - 1.0).abs() > clip_eps).float(), mask),
        "entropy": masked_mean(entropy, mask),
        "ratio_min": ratio.masked_fill(~mask, torch.inf).amin(),
        "ratio_max": ratio.masked_fill(~mask, -torch.inf).amax(),
        "ratio_mean": masked_mean(ratio, mask),
        "ratio_mean_square": masked_mean(ratio.square(), mask),
    }
