"""A learning rate that follows the distance between policies."""

from __future__ import annotations

from typing import Any

import gin

from ...data.errors import check_choice


@gin.configurable
class KLAdaptiveLR:
    """Raises the learning rate if updates change the policy little, and lowers it if they change it much.

    KL > band kl_threshold: lr / factor; KL < kl_threshold / band: lr * factor; within [min_lr, max_lr].

    Args:
        kl_threshold: target KL divergence between the policies before and after, in nats.
        factor: factor of one change, above 1.
        band: at least 1; the rate does not change within this factor of the threshold.
        min_lr: lower bound.
        max_lr: upper bound.
        per: "epoch" looks once per pass over the rollout, at the mean KL; "minibatch" after every update.
    Raises: ValueError for invalid bounds.
    Source: the rule of Schulman et al. 2017, arXiv:1707.06347, section 4, applied to the learning rate.
    """

    def __init__(
        self,
        *,
        kl_threshold: float = 0.008,
        factor: float = 1.5,
        band: float = 2.0,
        min_lr: float = 1e-6,
        max_lr: float = 1e-2,
        per: str = "epoch",
    ) -> None:
        if not (kl_threshold > 0 and factor > 1 and band >= 1 and 0 < min_lr <= max_lr):
            raise ValueError(
                f"KLAdaptiveLR has kl_threshold={kl_threshold}, factor={factor}, band={band}, "
                f"min_lr={min_lr}, max_lr={max_lr}; allowed are kl_threshold > 0, factor > 1, band >= 1 and "
                "0 < min_lr <= max_lr. Fix: bind values in these ranges."
            )
        check_choice("KLAdaptiveLR.per", per, ("epoch", "minibatch"))
        self.kl_threshold, self.factor, self.band = kl_threshold, factor, band
        self.min_lr, self.max_lr = min_lr, max_lr
        self.per_minibatch = per == "minibatch"
        self.scale = 1.0

    def adapt(self, kl: float, learning_rate: float) -> float:
        """Update the rate for a KL divergence; returns the factor of the configured `learning_rate`.

        NaN, the divergence of a policy without finite outputs, leaves the rate as it is.
        """
        if kl > self.band * self.kl_threshold:
            self.scale /= self.factor
        elif kl < self.kl_threshold / self.band:
            self.scale *= self.factor
        self.scale = min(max(self.scale, self.min_lr / learning_rate), self.max_lr / learning_rate)
        return self.scale

    def state_dict(self) -> dict[str, Any]:
        """State as JSON values."""
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.scale = float(state["scale"])
