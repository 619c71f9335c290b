"""Data that the layers of a trunk share in one call: the times of its timesteps, and derived results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from torch import Tensor

from .positions import PositionFeatures

T = TypeVar("T")


@dataclass
class Timeline:
    """One call of a trunk over L timesteps of B rows.

    Attributes:
        time_idxs: (B, L, 1) int64, timestep within the episode; (B, 1) for a step.
        resets: (B, L) bool, True on the first timestep of an episode; None if none begins within a row.
        positions: positions for queries and keys of attention; None if no head needs them.
        keeps_state: True if the states after the last timestep are needed.
        shared: results that the first layer has computed for all layers, by key.
    """

    time_idxs: Tensor
    resets: Tensor | None
    positions: PositionFeatures | None = None
    keeps_state: bool = True
    shared: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """The result of `make`, which is called only for the first layer that asks for `key`."""
        if key not in self.shared:
            self.shared[key] = make()
        return cast("T", self.shared[key])
