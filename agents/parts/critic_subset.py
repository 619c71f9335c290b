"""The choice of critics for a target: the minimum, or mean, over a random subset of the ensemble."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import gin
import torch
from torch import Tensor

from ...data.errors import check_choice, check_count
from ...nets import CriticEnsemble


@gin.configurable
@dataclass(frozen=True)
class RandomSubset:
    """The minimum over a few critics that are drawn at random, so that targets do not overestimate.

        V'(s') = min_{c in S} V'_c(s'),  S: `size` of the C target critics

    The published agent draws S anew for every element of the batch, with replacement. `per = "update"` with
    `replace = False` draws one set of different critics for the whole batch, and evaluates only these.

    Effect: one set per update evaluates half of the critics for targets, and learning is as fast
    (docs/algorithm.md).

    Source: Chen et al. 2021 (REDQ), arXiv:2101.05982; per element and with replacement: Grigsby et al. 2023,
    arXiv:2310.09971.

    Args:
        size: number of critics in S.
        per: "element" draws a set for every timestep, discount and sequence; "update" draws one for all.
        replace: the same critic may be drawn more than once.
        reduce: "min", or "mean" for agents whose policy does not exploit errors of the critics (the published
            agent takes the mean if its `online_coeff` is 0).
    Raises: ValueError for a size below 1 or an unknown name.
    """

    size: int = 2
    per: str = "element"
    replace: bool = True
    reduce: str = "min"

    def __post_init__(self) -> None:
        check_count("RandomSubset.size", self.size)
        check_choice("RandomSubset.per", self.per, ("element", "update"))
        check_choice("RandomSubset.reduce", self.reduce, ("min", "mean"))

    def check(self, num_critics: int, owner: str) -> None:
        """Raise ValueError if an ensemble of `num_critics` has too few members; owner: class of the agent."""
        if self.size > num_critics and not self.replace:
            raise ValueError(
                f"RandomSubset.size is {self.size}, but {owner} has only {num_critics} critics to draw "
                f"from. Fix: lower RandomSubset.size or raise {owner}.num_critics."
            )

    def draw(
        self, critics: CriticEnsemble, batch_shape: tuple[int, int], num_discounts: int, device: torch.device
    ) -> tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]:
        """Draw the critics for a batch of shape (B, L).

        Returns: the critics to evaluate, and a function that reduces their values (B, L, C', G, 1) to
            (B, L, G, 1).
        """
        num_critics = critics.num_critics
        if num_critics == 1 or (self.size == num_critics and not self.replace):
            return critics, self._reduced
        if self.per == "update":
            if self.replace:
                members = torch.randint(num_critics, (self.size,), device=device)
            else:
                members = torch.randperm(num_critics, device=device)[: self.size]
            return critics.frozen(members), self._reduced
        subset = self.indices(num_critics, (*batch_shape, num_discounts), device)
        return critics, lambda values: self._reduced(values.gather(2, subset))

    def indices(self, num_critics: int, shape: tuple[int, int, int], device: torch.device) -> Tensor:
        """(B, L, size, G, 1) int64, the critics of each element; shape: (B, L, G)."""
        b, length, g = shape
        if self.replace:
            return torch.randint(num_critics, (b, length, self.size, g, 1), device=device)
        chances = torch.rand(b, length, num_critics, g, 1, device=device)
        return chances.argsort(2)[:, :, : self.size]

    def _reduced(self, values: Tensor) -> Tensor:
        return values.amin(2) if self.reduce == "min" else values.mean(2)
