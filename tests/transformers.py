"""Settings of the Transformer as in the recommended presets, at the sizes of tests."""

from __future__ import annotations

from typing import Any

HEADS = {
    2: ("fixed", "rotary"),
    4: ("fixed", "rotary", "rotary", "content"),
    8: ("fixed", "fixed", "rotary", "rotary", "rotary", "rotary", "content", "content"),
}


def recommended(n_heads: int) -> dict[str, Any]:
    """Settings of `TransformerTrajEncoder` with this number of heads."""
    return {
        "n_heads": n_heads,
        "heads": HEADS[n_heads],
        "pos_emb": None,
        "qk_norm": True,
        "sigma_reparam": False,
        "normformer_norms": False,
        "head_scaling": False,
    }
