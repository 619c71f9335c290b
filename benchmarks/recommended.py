"""Settings of networks and agents in `base_offpolicy.gin` and `encoders/transformer.gin`, without sizes."""

from __future__ import annotations

from typing import Any

from loxodon.agents import (
    Agent,
    MultiTaskAgent,
    RandomSubset,
    Retrace,
    SummedValues,
    WeighByAdvantage,
)
from loxodon.nets import CriticEnsemble

TRANSFORMER: dict[str, Any] = {
    "pos_emb": None,
    "heads": ("fixed", "fixed", "rotary", "rotary", "rotary", "rotary", "content", "content"),
    "qk_norm": True,
    "sigma_reparam": False,
    "normformer_norms": False,
    "head_scaling": False,
}


def parts(kind: type) -> dict[str, Any]:
    """Discounts and parts of an off-policy agent of this class."""
    if kind is MultiTaskAgent:
        subset = RandomSubset(per="update", replace=False, reduce="mean")
        return {"training_discounts": (0.1, 0.5, 0.9, 0.99), "tau": 0.03, "critic_subset": subset}
    found = {
        "training_discounts": (0.1, 0.5, 0.9, 0.99),
        "tau": 0.03,
        "values": SummedValues(),
        "loss_weights": WeighByAdvantage(),
    }
    if kind is Agent:
        found |= {
            "critic_type": CriticEnsemble,
            "critic_subset": RandomSubset(per="update", replace=False),
            "returns": Retrace(),
        }
    return found
