"""Recommended settings of off-policy agents (`gin_configs/base_offpolicy.gin`), without random subsets."""

from __future__ import annotations

from typing import Any

from loxodon.agents import (
    RandomSubset,
    Retrace,
    SummedValues,
    WeighByAdvantage,
)
from loxodon.nets import CriticEnsemble


def all_of(num_critics: int) -> RandomSubset:
    """Every target uses all critics, so nothing is drawn."""
    return RandomSubset(num_critics, per="update", replace=False)


def recommended(**changes: Any) -> dict[str, Any]:
    """Keyword arguments of an agent: the recommended parts, with changes."""
    parts = {
        "returns": Retrace(),
        "values": SummedValues(),
        "loss_weights": WeighByAdvantage(),
        "critic_type": CriticEnsemble,
        "critic_subset": RandomSubset(per="update", replace=False),
    }
    return {**parts, **changes}
