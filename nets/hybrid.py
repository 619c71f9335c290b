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
from .mlp import require_at_least, require_positive, require_share
from .positions import HeadPositions
from .transformer import TransformerLayer, require_even_heads
from .trunk import (
    BlockSettings,
    Mixer,
    MixerBlock,
    ResidualBlock,
    TrunkTrajEncoder,
    build_mixer,
    check_setting_names,
)

_NAME = "HybridTrajEncoder"  # in errors

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

    Attention has normalised queries and keys and reaches `max_seq_len` timesteps back. By default, a quarter
    of its heads, rounded down, attend by content, and the others have rotary positions.

    Args:
        tstep_dim: given by the agent.
        max_seq_len: given by the agent.
        mixers: one per layer: "attention", a name from `MIXERS`, or your own class.
        mixer_settings: settings of the named mixers, e.g. {"mamba": {"d_state": 8}}; for attention, those of
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
    Raises: ValueError for a size below 1, an unknown name, or settings of a mixer that no layer has;
        TypeError for an unknown setting.
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
        require_at_least(0, _NAME, d_ff=d_ff)
        require_positive(_NAME, n_heads=n_heads)
        require_share(_NAME, dropout_ff=dropout_ff, dropout_emb=dropout_emb)
        given = dict(mixer_settings or {})
        _check_names(mixers, given)
        settings = BlockSettings(
            d_model, d_ff, dropout_ff, activation, norm, glu, normformer_norms, gating, sigma_reparam
        )

        attention: dict[str, Any] = {}
        head_positions = None
        if "attention" in mixers:
            require_even_heads(_NAME, d_model, n_heads)
            attention = _attention_settings(n_heads, max_seq_len, given.get("attention", {}))
            if attention["heads"].need_positions:
                head_positions = HeadPositions(d_model, attention["heads"], attention["window"])

        def make_block(layer: int) -> ResidualBlock:
            kind = mixers[layer]
            if kind == "attention":
                return TransformerLayer(settings, **attention)
            if isinstance(kind, str):
                owner = f"{_NAME}.mixer_settings[{kind!r}]"
                mixer = build_mixer(owner, MIXERS[kind], d_model, max_seq_len, given.get(kind, {}))
            else:
                mixer = kind(d_model, max_seq_len)
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


def _check_names(mixers: Sequence[str | type[Mixer]], mixer_settings: Mapping[str, Any]) -> None:
    """Raise ValueError for no mixers, an unknown one, or settings of a mixer that no layer has."""
    names = [name for name in mixers if isinstance(name, str)]
    allowed = ["attention", *sorted(MIXERS)]
    if not mixers or not {*names} <= {*allowed}:
        unknown = [name for name in names if name not in allowed]
        raise ValueError(
            f"{_NAME}.mixers names {unknown or 'nothing'}, but needs a mixer for each layer: your own class, "
            f"or one of {allowed}. Fix: bind, say, {_NAME}.mixers = ('gated_delta', 'attention')."
        )
    if unused := [name for name in mixer_settings if name not in names]:
        raise ValueError(
            f"{_NAME}.mixer_settings has settings of {unused}, but {_NAME}.mixers names only {names}. "
            f"Fix: remove them, or name their mixers in {_NAME}.mixers."
        )


def _attention_settings(n_heads: int, max_seq_len: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of attention layers: defaults, replaced by those given, with the kinds of heads as `Heads`."""
    owner, num_content = f"{_NAME}.mixer_settings['attention']", n_heads // 4
    check_setting_names(owner, TransformerLayer, 1, given)
    settings = {
        "window": max_seq_len + 1,  # timesteps of the longest training sequence
        "qk_gain": QK_GAIN,
        "heads": [*["rotary"] * (n_heads - num_content), *["content"] * num_content],
        **given,
    }
    require_share(owner, **{name: rate for name, rate in given.items() if name.startswith("dropout_")})
    require_at_least(1, owner, window=settings["window"])
    gains = {name: settings[name] for name in ("qk_gain", "fixed_content_gain") if name in settings}
    require_at_least(0, owner, **gains)
    settings["heads"] = Heads.named(settings["heads"], n_heads, setting=f"{owner}['heads']")
    return settings
