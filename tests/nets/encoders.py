"""One small trajectory encoder of each kind, for the tests of their common contract."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from loxodon.nets import (
    FFMTrajEncoder,
    FFTrajEncoder,
    GatedDeltaNetTrajEncoder,
    GLATrajEncoder,
    GRUTrajEncoder,
    HybridTrajEncoder,
    IdentityTrajEncoder,
    LRUTrajEncoder,
    LSTMTrajEncoder,
    Mamba2TrajEncoder,
    MambaTrajEncoder,
    MinGRUTrajEncoder,
    MinLSTMTrajEncoder,
    MLSTMTrajEncoder,
    S5TrajEncoder,
    TrajEncoder,
    TransformerTrajEncoder,
)

from ..transformers import recommended

DIM, WINDOW = 6, 5
WIDE_KEYS = {"expand_k": 1.0}  # outputs of few features are often near 0, and the norm amplifies rounding


def transformer(**kwargs: object) -> TrajEncoder:
    settings = {"d_model": 32, "d_ff": 32, "n_layers": 3, **recommended(8)}
    return TransformerTrajEncoder(DIM, WINDOW, **{**settings, **kwargs})  # type: ignore[arg-type]


def trunk(encoder: type[TrajEncoder], **kwargs: object) -> Callable[[], TrajEncoder]:
    sizes = {"d_model": 16, "n_layers": 2, "d_ff": 24}
    return lambda: encoder(DIM, WINDOW, **{**sizes, **kwargs})  # type: ignore[arg-type]


ENCODERS: dict[str, Callable[[], TrajEncoder]] = {
    "ffm": trunk(FFMTrajEncoder, d_trace=8, d_context=3, short_conv=3),
    "gated_delta": trunk(GatedDeltaNetTrajEncoder, n_heads=2),
    "gla": trunk(GLATrajEncoder, n_heads=2, **WIDE_KEYS),
    "hybrid": lambda: HybridTrajEncoder(
        DIM, WINDOW, mixers=["attention", "min_gru", "attention"], d_model=32, n_heads=8, d_ff=24
    ),
    "hybrid_alibi": lambda: HybridTrajEncoder(
        DIM,
        WINDOW,
        mixers=["lru", "attention"],
        mixer_settings={"attention": {"heads": "alibi", "attention_sink": True, "window": 5}},
        d_model=16,
        n_heads=2,
        d_ff=24,
    ),
    "lru": trunk(LRUTrajEncoder, norm="rmsnorm", normformer_norms=True, glu=True),
    "mamba": trunk(MambaTrajEncoder, d_state=4, d_ff=0),
    "mamba2": trunk(Mamba2TrajEncoder, d_state=8, n_heads=2, d_ff=0),
    "min_gru": trunk(MinGRUTrajEncoder, gating="gru"),
    "min_lstm": trunk(MinLSTMTrajEncoder, sigma_reparam=True),
    "mlstm": trunk(MLSTMTrajEncoder, n_heads=2, **WIDE_KEYS),
    "retnet": trunk(GLATrajEncoder, n_heads=1, decay="fixed", **WIDE_KEYS),
    "s5": trunk(S5TrajEncoder),
    "ff": lambda: FFTrajEncoder(DIM, WINDOW, d_model=16),
    "gru": lambda: GRUTrajEncoder(DIM, WINDOW, d_hidden=16, d_output=12),
    "identity": lambda: IdentityTrajEncoder(DIM, WINDOW),
    "lstm": lambda: LSTMTrajEncoder(DIM, WINDOW, d_hidden=16, d_output=12),
    "transformer_rotary": lambda: transformer(heads="rotary"),
    "transformer_recommended": transformer,
    "transformer_all_kinds": lambda: transformer(
        heads=["content", "alibi", "plain", "rotary", "fixed", "content", "alibi", "content"],
        pos_emb="fixed",
    ),
    "transformer_learned": lambda: transformer(heads="plain", pos_emb="learned", max_time_idx=200),
    "transformer_plain": lambda: transformer(
        heads="plain", qk_norm=False, norm="rmsnorm", attention_type="plain", glu=True
    ),
    "transformer_alibi": lambda: transformer(heads="alibi", attention_sink=True, windows=[2, 5, 3]),
    "transformer_reference": lambda: transformer(
        heads="plain",
        pos_emb="fixed",
        qk_norm=False,
        sigma_reparam=True,
        normformer_norms=True,
        head_scaling=True,
        dropout_attn=0.1,
        dropout_qkv=0.1,
        gating="gru",
        attention_sink=True,
    ),
}
MEMORYLESS = {"ff", "identity"}


def make_encoder(name: str) -> TrajEncoder:
    torch.manual_seed(0)
    return ENCODERS[name]().eval()


def episode_times(resets: Tensor) -> Tensor:
    """Timesteps within the episode (B, L, 1), counted from each reset."""
    times = torch.zeros(resets.shape, dtype=torch.int64)
    for t in range(1, resets.shape[1]):
        times[:, t] = torch.where(resets[:, t], 0, times[:, t - 1] + 1)
    return times[..., None]
