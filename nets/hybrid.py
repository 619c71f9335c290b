"""A trunk with a different mixer in each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gin

from .head_kinds import Heads
from .init import QK_GAIN
from .mixers.ffm import FFMMixer
from .mixers.gated_delta import GatedDeltaNetMixer
from .mixers.gla import GLAMixer
from .mixers.lru import LRUMixer
from .mixers.mamba import Mamba2Mixer, MambaMixer
from .mixers.min_rnn import MinGRUMixer, MinLSTMMixer
from .mixers.mlstm import MLSTMMixer
from .mixers.s5 import S5Mixer
from .mlp import require_at_least, require_positive
from .positions import HeadPositions
from .transformer import TransformerLayer, require_even_heads
from .trunk import BlockSettings, Mixer, MixerBlock, ResidualBlock, TrunkTrajEncoder, build_mixer

MIXERS: dict[str, type[Mixer]] = {
    "ffm": FFMMixer,
    "gated_delta": GatedDeltaNetMixer,
    "gla": GLAMixer,
    "lru": LRUMixer,
    "mamba": MambaMixer,
    "mamba2": Mamba2Mixer,
    "min_gru": MinGRUMixer,
    "min_lstm": MinLSTMMixer,
    "mlstm": MLSTMMixer,
    "s5": S5Mixer,
}


@gin.configurable(denylist=["tstep_dim", "max_seq_len"])
class HybridTrajEncoder(TrunkTrajEncoder):
    """A residual trunk with a mixer of choice in each layer, e.g. three of linear cost and one of attention.

    Attention has normalised queries and keys and reaches `max_seq_len` timesteps back. By default, six of its
    eight heads have rotary positions, and two attend by content.

    Args:
        tstep_dim: given by the agent.
        max_seq_len: given by the agent.
        mixers: one per layer: "attention", a name from `MIXERS`, or your own class.
        mixer_settings: settings of mixers by name, e.g. {"mamba": {"d_state": 8}}; for attention, those of
            `TransformerLayer`, e.g. {"attention": {"heads": "rotary"}} (kinds: `head_kinds`).
        d_model: width.
        n_heads: number of attention heads, a divisor of d_model.
        d_ff: width of the feed-forward part of each block, 0 for none; None means 4 * d_model.
        dropout_ff: dropout after mixer and feed-forward part.
        dropout_emb: dropout on the input.
        activation: name of the non-linearity of the feed-forward part.
        norm: normalisation before each part and of the result, "layer", "rmsnorm" or None.
        glu: the feed-forward part is gated: activation(A x) * B x.
        normformer_norms: normalise after the mixer and inside the feed-forward part, too.
        gating: "gru" replaces residual sums by gates that begin close to the identity; None for sums.
        sigma_reparam: linear layers of attention and the feed-forward part have a learned spectral norm.
    Raises: ValueError for a size below 1 or an unknown name; TypeError for an unknown setting.
    """

    def __init__(  # noqa: PLR0913 - every keyword is a gin setting
        self,
        tstep_dim: int,
        max_seq_len: int,
        *,
        mixers: Sequence[str | type[Mixer]] = ("gated_delta", "gated_delta", "gated_delta", "attention"),
        mixer_settings: Mapping[str, dict[str, Any]] | None = None,
        d_model: int = 128,
        n_heads: int = 8,
        d_ff: int | None = None,
        dropout_ff: float = 0.0,
        dropout_emb: float = 0.0,
        activation: str = "leaky_relu",
        norm: str | None = "layer",
        glu: bool = False,
        normformer_norms: bool = False,
        gating: str | None = None,
        sigma_reparam: bool = False,
    ) -> None:
        d_ff = 4 * d_model if d_ff is None else d_ff
        require_at_least(0, "HybridTrajEncoder", d_ff=d_ff)
        require_positive("HybridTrajEncoder", n_heads=n_heads)
        given = dict(mixer_settings or {})
        for name in [*(name for name in mixers if isinstance(name, str)), *given]:
            if name not in MIXERS and name != "attention":
                raise ValueError(
                    f"HybridTrajEncoder has no mixer {name!r}; allowed are "
                    f"{['attention', *sorted(MIXERS)]}. Fix: name one of these in HybridTrajEncoder.mixers "
                    "and mixer_settings."
                )
        settings = BlockSettings(
            d_model, d_ff, dropout_ff, activation, norm, glu, normformer_norms, gating, sigma_reparam
        )

        attention: dict[str, Any] = {}
        head_positions = None
        if "attention" in mixers:
            require_even_heads("HybridTrajEncoder", d_model, n_heads)
            attention = {
                "window": max_seq_len + 1,  # timesteps of the longest training sequence
                "qk_gain": QK_GAIN,
                "heads": (*["rotary"] * 6, "content", "content"),
                **given.get("attention", {}),
            }
            where = "HybridTrajEncoder.mixer_settings['attention']['heads']"
            heads = attention["heads"] = Heads.named(attention["heads"], n_heads, setting=where)
            if heads.need_positions:
                head_positions = HeadPositions(d_model, heads, attention["window"])

        def make_block(layer: int) -> ResidualBlock:
            kind = mixers[layer]
            if kind == "attention":
                return TransformerLayer(settings, **attention)
            own = given.get(kind, {}) if isinstance(kind, str) else {}
            mixer_type = MIXERS[kind] if isinstance(kind, str) else kind
            mixer = build_mixer("HybridTrajEncoder", mixer_type, d_model, max_seq_len, own)
            return MixerBlock(settings, mixer)

        super().__init__(
            tstep_dim,
            max_seq_len,
            make_block,
            d_model=d_model,
            n_layers=len(mixers),
            norm=norm,
            dropout_emb=dropout_emb,
            head_positions=head_positions,
        )
