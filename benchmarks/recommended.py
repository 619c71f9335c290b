"""The Transformer's settings in `gin_configs/encoders/transformer.gin`, without its sizes."""

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
