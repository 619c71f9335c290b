"""Base class of off-policy agents whose actor imitates the recorded actions that a filter lets through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..data.errors import check_number
from ..nets import PolicyDistribution
from .filters import binary_filter
from .off_policy import OffPolicyAgent, Transitions


class FilteredActorAgent(OffPolicyAgent):
    """Imitation weighted by a filter f of advantages in environment units, and a Polyak average of the actor.

    Args:
        *given: arguments that code supplies, see BaseAgent.
        fbc_filter_func: f, a function from advantages (B, L, G, 1) to weights of the same shape.
        fake_filter: f = 1 (behaviour cloning).
        entropy_coeff: weight of an entropy bonus in the actor loss, in nats.
        use_target_actor: take the actions a' of targets from the Polyak average of the actor, else from the
            actor itself.
        **shared: settings of OffPolicyAgent.
    """

    has_target_actor = True

    def __init__(
        self,
        *given: Any,
        fbc_filter_func: Callable[..., Tensor] = binary_filter,
        fake_filter: bool = False,
        entropy_coeff: float = 0.0,
        use_target_actor: bool = True,
        **shared: Any,
    ) -> None:
        super().__init__(*given, **shared)
        check_number(f"{type(self).__name__}.entropy_coeff", entropy_coeff)
        self.fbc_filter_func, self.fake_filter = fbc_filter_func, fake_filter
        self.entropy_coeff, self.use_target_actor = entropy_coeff, use_target_actor

    def compile_learning(self, backend: str | Callable[..., Any] = "inductor") -> None:
        # gin looks up the filter's settings under a lock, which torch.compile cannot trace.
        torch.compiler.allow_in_graph(self.fbc_filter_func)  # type: ignore[no-untyped-call]
        super().compile_learning(backend)

    def next_policies(self, transitions: Transitions) -> PolicyDistribution:
        """The policies over (B, L, G, A) that take the actions a' of targets."""
        actor = self.target_actor if self.use_target_actor else self.actor
        return self.policies(actor, transitions.following)

    def filter_weights(self, advantages: Tensor) -> Tensor:
        """Weights f(A) of recorded actions, (B, L, G, 1), from their advantages."""
        return torch.ones_like(advantages) if self.fake_filter else self.fbc_filter_func(advantages)

    def with_entropy_bonus(self, loss: Tensor, policy: PolicyDistribution) -> Tensor:
        """The actor loss (B, L, G, 1) with the bonus, if there is one."""
        return loss - self.entropy_coeff * policy.entropy() if self.entropy_coeff else loss
