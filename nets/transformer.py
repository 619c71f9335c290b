"""Causal Transformer over timesteps with a sliding attention window."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import gin
import torch
from torch import Tensor, nn

from .attention import Kernel, attend, prepared, sdpa
from .cpu.transformer_step import TransformerStep
from .dropout import Dropout
from .head_kinds import Heads
from .init import EMBEDDING_STD, FIXED_CONTENT_GAIN, QK_GAIN
from .kv_cache import KeyValueRing
from .mlp import RMSNorm, require_at_least, require_positive, require_share
from .positions import HeadPositions, LearnedPositions, PositionFeatures, SinusoidalPositions
from .sigma_reparam import SigmaReparamLinear, linear
from .timeline import Timeline
from .trunk import BlockSettings, ResidualBlock, State, TrunkTrajEncoder

POSITIONS = ("fixed", "learned", None)
ATTENTIONS: dict[str, Kernel | None] = {"sdpa": sdpa, "plain": None}


class TransformerLayer(ResidualBlock):
    """Pre-norm attention and feed-forward block.

    Shapes: x (B, L, D) -> (B, L, D).
    Source: Vaswani et al. 2017, arXiv:1706.03762; query/key normalisation: Henry et al. 2020,
    arXiv:2010.04245; head scales: Shleifer et al. 2021, arXiv:2110.09456; attention sink: Xiao et al. 2023,
    arXiv:2309.17453; for kinds of heads see `head_kinds`.
    """

    def __init__(
        self,
        settings: BlockSettings,
        *,
        heads: Heads,
        window: int,
        qk_gain: float | None,
        fixed_content_gain: float = FIXED_CONTENT_GAIN,
        head_scaling: bool = False,
        attention_sink: bool = False,
        dropout_attn: float = 0.0,
        dropout_qkv: float = 0.0,
        attention: Kernel | None = sdpa,
    ) -> None:
        super().__init__(settings)
        n_heads, d_model = len(heads), settings.d_model
        width = d_model // n_heads
        self.heads, self.window, self.context_len = heads, window, window - 1
        self.ring = KeyValueRing(n_heads, width, window)
        self.attention, self.dropout_attn, self.dropout_qkv = attention, dropout_attn, Dropout(dropout_qkv)
        self.qkv = linear(d_model, 3 * d_model, bias=False, sigma_reparam=settings.sigma_reparam)
        self.proj = linear(d_model, d_model, bias=False, sigma_reparam=settings.sigma_reparam)
        self.is_normed = qk_gain is not None
        if qk_gain is not None:
            self.q_norm, self.k_norm = (RMSNorm(width) for _ in range(2))
            nn.init.constant_(self.q_norm.weight, qk_gain)
        self.head_scale = nn.Parameter(torch.ones(n_heads, 1, 1)) if head_scaling else None
        self.sink = nn.Parameter(EMBEDDING_STD * torch.randn(n_heads, 1, width)) if attention_sink else None
        by_head = next(self.qkv.parameters()).detach().view(3, n_heads, width, d_model)
        for i, kind in enumerate(heads.kinds):
            if kind.begins_alike:
                by_head[1, i] = by_head[0, i]
        self.num_with_waves, self.from_waves = heads.num("has_waves"), None
        if self.num_with_waves:
            self.from_waves = linear(
                d_model, 2 * self.num_with_waves * width, bias=False, sigma_reparam=settings.sigma_reparam
            )
            by_head[:2, : self.num_with_waves] *= fixed_content_gain  # they begin by attending to places
        if isinstance(self.qkv, SigmaReparamLinear):
            self.qkv.find_vectors()
        self._add_feed_forward()

    def forward(self, x: Tensor, timeline: Timeline, state: State | None) -> tuple[Tensor, State | None]:
        q, k, v = self.queries_keys_values(x, timeline.positions)
        k, v, sight, state = self.ring.extend(k, v, timeline, state)
        dropout = self.dropout_attn if self.training else 0.0
        read = attend(q, k, v, sight, self.heads, sink=self.sink, dropout=dropout, kernel=self.attention)
        read = read if self.head_scale is None else read * self.head_scale
        return self.finish(x, self.proj(read.transpose(1, 2).reshape(x.shape).to(x.dtype))), state

    def step(self, x: Tensor, timeline: Timeline, state: State) -> tuple[Tensor, State | None]:
        return self.forward(x, timeline, state)

    def begin(self, num_envs: int, device: torch.device) -> State:
        return self.ring.begin(num_envs, device)

    def forget(self, state: State, ended: Tensor) -> State:
        return {**state, "age": state["age"].masked_fill(ended.to(state["age"].device), 0)}

    def queries_keys_values(
        self, x: Tensor, positions: PositionFeatures | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, H, L, E), with positions, of x (B, L, D), or (N, D) with L = 1."""
        num_heads, leading = len(self.heads), x.shape[:-1]
        qkv = self.qkv(self.norm_attn(x)).view(*leading, 3, num_heads, -1)
        qkv = self.dropout_qkv(qkv) if self.training else qkv
        added, gains = None, None
        if self.from_waves is not None and positions is not None and positions.waves is not None:
            added = self.from_waves(positions.waves)
            added = added.view(*added.shape[:-1], 2, self.num_with_waves, -1)
        if self.is_normed:
            gains = torch.stack((self.q_norm.weight, self.k_norm.weight))
        both, v = prepared(qkv, added, gains, RMSNorm.EPS, positions)
        if len(leading) == 1:
            q, k = both.unsqueeze(3).unbind(1)
            return q, k, v.unsqueeze(2)
        q, k = both.unbind(2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


@gin.configurable(denylist=["tstep_dim", "max_seq_len"])
class TransformerTrajEncoder(TrunkTrajEncoder):
    """Causal Transformer in which every timestep attends to itself and the `max_seq_len` before it.

    The longest training sequence, including the timestep after its last transition, fits into this window, so
    attention in training is plainly causal. Training and acting use the same sliding window, so the key/value
    cache gives the same results as the full forward pass for any length of history. A training window that
    begins in mid-episode lacks the timesteps before it, so its first outputs have less context than while
    acting; `encode_from` supplies them, as the cached keys and values of every layer.

    Source of `encode_from`: Dai et al. 2019, arXiv:1901.02860 (Transformer-XL).

    Args:
        tstep_dim: given by the agent.
        max_seq_len: given by the agent.
        d_model: width.
        n_heads: number of attention heads, a divisor of d_model.
        d_ff: width of the feed-forward part.
        n_layers: number of blocks.
        dropout_ff: dropout after attention and feed-forward part.
        dropout_emb: dropout on the input.
        activation: name of the non-linearity.
        norm: normalisation before each part and of the result, "layer" or "rmsnorm".
        pos_emb: positions that are added to the input: "fixed" (sinusoidal), "learned" or None.
        heads: one kind for all heads, or one per head in any order (layers sort them). Kinds are "plain" (no
            positions), "rotary" and "alibi" (distances), "fixed" (places in the episode) and
            "content" (timesteps similar to the present), see nets/head_kinds.py.
        max_time_idx: last timestep of an episode with a learned position of its own; later ones share it.
        qk_norm: normalise queries and keys, which bounds attention logits.
        qk_gain: length of normalised queries at the start of training, relative to keys. Above 1, some heads
            single out rare timesteps by chance, and recall is learned from there; nearly uniform attention
            would dilute the gradient of such a timestep by the length of the sequence.
        fixed_content_gain: factor of the initial weights of queries and keys of fixed heads; a small one
            gives waves more weight than contents.
        dropout_attn: dropout on attention weights.
        dropout_qkv: dropout on queries, keys and values.
        windows: number of timesteps that each layer attends to, its own included, at most max_seq_len + 1;
            None means this maximum for all layers.
        attention_sink: add a learned key with value 0, for heads that find nothing to attend to.
        head_scaling: multiply each head's result by a learned factor.
        normformer_norms: normalise after attention and inside the feed-forward part, too.
        sigma_reparam: linear layers have a learned spectral norm.
        glu: the feed-forward part is gated: activation(A x) * B x.
        gating: "gru" replaces residual sums by gates that begin close to the identity (GTrXL); None for sums.
        attention_type: attention in training: "sdpa" (torch's own kernels), "plain" (the formula) or a
            function, see `Kernel`. Acting always uses the formula.
    Raises: ValueError for a size below 1, a bad head count or an unknown name.
    """

    def __init__(  # noqa: PLR0913 - every keyword is a gin setting
        self,
        tstep_dim: int,
        max_seq_len: int,
        *,
        d_model: int = 128,
        n_heads: int = 8,
        d_ff: int = 512,
        n_layers: int = 2,
        dropout_ff: float = 0.05,
        dropout_emb: float = 0.05,
        activation: str = "leaky_relu",
        norm: str = "layer",
        pos_emb: str | None = "fixed",
        heads: str | Sequence[str] = "plain",
        max_time_idx: int = 10_000,
        qk_norm: bool = False,
        qk_gain: float = QK_GAIN,
        fixed_content_gain: float = FIXED_CONTENT_GAIN,
        dropout_attn: float = 0.0,
        dropout_qkv: float = 0.0,
        windows: Sequence[int] | None = None,
        attention_sink: bool = False,
        head_scaling: bool = True,
        normformer_norms: bool = True,
        sigma_reparam: bool = True,
        glu: bool = False,
        gating: str | None = None,
        attention_type: str | Kernel = "sdpa",
    ) -> None:
        require_positive(
            "TransformerTrajEncoder", d_model=d_model, n_heads=n_heads, d_ff=d_ff, n_layers=n_layers
        )
        gains = {"qk_gain": qk_gain, "fixed_content_gain": fixed_content_gain}
        require_at_least(0, "TransformerTrajEncoder", max_time_idx=max_time_idx, **gains)
        rates = {"dropout_ff": dropout_ff, "dropout_emb": dropout_emb}
        rates |= {"dropout_attn": dropout_attn, "dropout_qkv": dropout_qkv}
        require_share("TransformerTrajEncoder", **rates)
        require_even_heads("TransformerTrajEncoder", d_model, n_heads)
        if pos_emb not in POSITIONS:
            allowed = ", ".join(map(repr, POSITIONS))
            raise ValueError(
                f"pos_emb is {pos_emb!r}; allowed are {allowed}. Positions in queries and keys, such as "
                "'rotary', are kinds of heads. Fix: bind one of these, or set TransformerTrajEncoder.heads "
                "= 'rotary' or to one kind per head, e.g. ('fixed', 'rotary', 'rotary', 'content') for "
                "four."
            )
        kinds = Heads.named(heads, n_heads, setting="TransformerTrajEncoder.heads")
        if isinstance(attention_type, str) and attention_type not in ATTENTIONS:
            raise ValueError(
                f"attention_type is {attention_type!r}; allowed are {sorted(ATTENTIONS)} and functions. "
                "Fix: bind one of these."
            )
        longest = max_seq_len + 1  # timesteps of a training sequence, so that training needs no mask
        if windows is not None and not (
            len(windows) == n_layers and all(1 <= window <= longest for window in windows)
        ):
            raise ValueError(
                f"windows is {list(windows)}, but must hold {n_layers} numbers from 1 to {longest}, one per "
                f"layer. Fix: bind, say, TransformerTrajEncoder.windows = {[longest] * n_layers}."
            )
        furthest = longest if windows is None else max(windows)
        settings = BlockSettings(
            d_model, d_ff, dropout_ff, activation, norm, glu, normformer_norms, gating, sigma_reparam
        )
        positions: dict[str | None, Callable[[], nn.Module]] = {
            "learned": lambda: LearnedPositions(d_model, max_time_idx),
            "fixed": lambda: SinusoidalPositions(d_model),
        }
        super().__init__(
            tstep_dim,
            max_seq_len,
            lambda i: TransformerLayer(
                settings,
                heads=kinds,
                window=longest if windows is None else windows[i],
                qk_gain=qk_gain if qk_norm else None,
                fixed_content_gain=fixed_content_gain,
                head_scaling=head_scaling,
                attention_sink=attention_sink,
                dropout_attn=dropout_attn,
                dropout_qkv=dropout_qkv,
                attention=ATTENTIONS[attention_type] if isinstance(attention_type, str) else attention_type,
            ),
            d_model=d_model,
            n_layers=n_layers,
            norm=norm,
            dropout_emb=dropout_emb,
            positions=positions[pos_emb]() if pos_emb in positions else None,
            head_positions=HeadPositions(d_model, kinds, min(furthest, max_seq_len))
            if kinds.need_positions
            else None,
        )
        self._fast_step: TransformerStep | None = None

    def train(self, mode: bool = True) -> TransformerTrajEncoder:
        super().train(mode)
        parts, self._fast_step = (self.inp, self.blocks, self.out_norm), None
        if (
            not mode
            and self.head_positions is not None
            and self.input_positions is None
            and TransformerStep.is_for(*parts)
        ):
            self._fast_step = TransformerStep(*parts, self.head_positions)
        return self

    def _step(
        self, seq: Tensor, time_idxs: Tensor, hidden_state: list[State]
    ) -> tuple[Tensor, list[State | None]]:
        if self._fast_step is not None and TransformerStep.serves(seq, hidden_state[0]["keys"]):
            return self._fast_step(seq, time_idxs, hidden_state)
        return super()._step(seq, time_idxs, hidden_state)


def require_even_heads(owner: str, d_model: int, n_heads: int) -> None:
    """Check that heads have an even width. Raises: ValueError if not."""
    if d_model % n_heads or (d_model // n_heads) % 2:
        raise ValueError(
            f"d_model is {d_model} and n_heads is {n_heads}, but d_model must be a multiple of 2 * n_heads. "
            f"Fix: bind {owner}.d_model to such a number."
        )
