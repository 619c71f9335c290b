"""Settings of networks in `base_offpolicy.gin` and `encoders/transformer.gin`, without sizes."""

from __future__ import annotations

from typing import Any

TRANSFORMER: dict[str, Any] = {
    "pos_emb": None,
    "heads": ("fixed", "fixed", "rotary", "rotary", "rotary", "rotary", "content", "counting"),
    "qk_norm": True,
    "sigma_reparam": False,
    "normformer_norms": False,
    "head_scaling": False,
}
ACTOR: dict[str, Any] = {"out_gain": 0.1, "out_bias_gain": 0.0}
CRITICS: dict[str, Any] = {"out_gain": 1.0, "joint_fan_in": False}
