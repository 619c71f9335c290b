"""What to do with an update whose gradient is not finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...nets import RunningStatistics

_CHOICES = (None, "skip", "raise")


class GradientGuard:
    """Judges the gradient of an update.

    Gradients are judged after those of all processes were averaged, so that all processes decide alike. The
    loss scaler of fp16 overflows as a matter of course and skips such steps itself: with it, nothing is
    judged here.

    Args:
        agent: whose parameters are named.
        choice: "skip" leaves the update out, "raise" stops; None looks at nothing.
        has_scaler: whether there is a loss scaler.
    """

    def __init__(self, agent: nn.Module, choice: str | None, has_scaler: bool) -> None:
        if choice not in _CHOICES:
            raise ValueError(
                f"Learner.bad_grad is {choice!r}; allowed are None, 'skip' and 'raise'. Fix: set "
                "Learner.bad_grad = 'skip'."
            )
        self._agent, self._choice = agent, None if has_scaler else choice

    def before_clipping(self, params: list[nn.Parameter]) -> None:
        """With "raise": stop here, since clipping by a norm that is NaN makes every gradient NaN.

        Raises: FloatingPointError naming the first parameter with a gradient that is not finite.
        """
        if self._choice != "raise":
            return
        found = [(p, p.grad) for p in params if p.grad is not None]
        norms = torch.stack(torch._foreach_norm([gradient for _, gradient in found]))
        if torch.isfinite(norms).all():
            return
        bad = {id(p) for (p, _), norm in zip(found, norms.tolist(), strict=True) if not math.isfinite(norm)}
        names = [name for name, p in self._agent.named_parameters() if id(p) in bad]
        raise FloatingPointError(
            f"The gradient of {names[0]!r} is not finite, nor are those of {len(names) - 1} others of "
            f"{len(found)} parameters; nothing was updated. Fix: lower Experiment.learning_rate, check "
            "rewards and observations for extreme values, or set Learner.bad_grad = 'skip'."
        )

    def is_bad(self, grad_norm: Tensor | None) -> bool:
        """With "skip": True for an update that must be left out; grad_norm is a scalar tensor."""
        if self._choice != "skip" or grad_norm is None:
            return False
        return not bool(torch.isfinite(grad_norm))


def forget_pending(agent: nn.Module) -> None:
    """Drop what running statistics have gathered for an update that is left out."""
    for module in agent.modules():
        if isinstance(module, RunningStatistics):
            module.set_pending_sums(torch.zeros_like(module.pending_sums()))
