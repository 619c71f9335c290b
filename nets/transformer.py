"""Causal Transformer over timesteps with a sliding attention window and a key/value cache for acting."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import gin
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from .kv_cache import Cache, KeyValueCache, RingKeyValueCache, Rows, without_unused
from .mlp import RMSNorm, activation_fn, norm_layer, require_positive
from .positions import LearnedPositions, RotaryPositions
from .traj_encoders import TrajEncoder


class TransformerLayer(nn.Module):
    """Pre-norm attention and feed-forward block, with normalised queries and keys.

    Shapes: x (B, L, D) -> (B, L, D).
    Source: Vaswani et al. 2017, arXiv:1706.03762; query/key normalisation of
    Henry et al. 2020, arXiv:2010.04245.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_ff: int,
        *,
        dropout: float,
        activation: str,
        norm: str,
        qk_gain: float | None,
    ) -> None:
        super().__init__()
        self.n_heads, self.dropout = n_heads, nn.Dropout(dropout)
        self.activation = activation_fn(activation)
        self.norm_attn, self.norm_ff = norm_layer(norm, d_model), norm_layer(norm, d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.proj = nn.Linear(d_model, d_model, bias=False)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if qk_gain is not None:
            self.q_norm, self.k_norm = (RMSNorm(d_model // n_heads) for _ in range(2))
            nn.init.constant_(next(self.q_norm.parameters()), qk_gain)
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def queries_keys_values(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Each (B, H, L, E), positions applied."""
        qkv = self.qkv(self.norm_attn(x))
        q, k, v = rearrange(qkv, "b l (qkv h e) -> qkv b h l e", qkv=3, h=self.n_heads)
        q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = RotaryPositions.rotate(q, *rotary), RotaryPositions.rotate(k, *rotary)
        return q, k, v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add the attention result and the feed-forward part to x; all (..., D)."""
        x = x + self.dropout(self.proj(attended))
        y: Tensor = x + self.dropout(self.down(self.activation(self.up(self.norm_ff(x)))))
        return y

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
        memory: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The memory holds keys and values (B, H, M, E) of timesteps before x."""
        q, k, v = self.queries_keys_values(x, rotary)
        if memory is not None:
            k, v = (
                torch.cat([old.to(new.dtype), new], dim=2) for old, new in zip(memory, (k, v), strict=True)
            )
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.finish(x, rearrange(attended, "b h l e -> b l (h e)"))

    def forward_timestep(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        cache: Cache,
        layer: int,
        bias: Tensor | None,
    ) -> Tensor:
        """One timestep of N envs against what is cached; the same result as `forward`, in fewer operations.

        Shapes: x (N, D) -> (N, D); layer: number of this one in the cache; bias (N, 1, 1, S) float or None.
        """
        qkv = self.qkv(self.norm_attn(x)).view(x.shape[0], 3, self.n_heads, -1)
        both = qkv[:, :2]  # queries and keys share each operation: (N, 2, H, E)
        if isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            both = F.rms_norm(both.float(), both.shape[-1:], eps=self.q_norm.eps)
            both = both * torch.stack((self.q_norm.weight, self.k_norm.weight))[:, None]
        if rotary is not None:
            both = RotaryPositions.rotate(both, *rotary)
        q, k = both.unbind(1)
        keys, values = cache.store(layer, k, qkv[:, 2])
        q = q[:, :, None].to(keys.dtype)
        attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias).to(x.dtype)
        return self.finish(x, attended.flatten(1))


@gin.configurable(denylist=["tstep_dim", "max_seq_len"])
class TransformerTrajEncoder(TrajEncoder):
    """Causal Transformer in which every timestep attends to itself and the `max_seq_len - 1` before it.

    The same sliding window holds in training and acting, so the key/value cache gives what the full
    forward gives at any length of history. A training slice that starts in mid-episode lacks the
    timesteps before it, so its first outputs see less context than the actor had; `encode_from` gives
    them to it, as the cached keys and values of every layer.

    Source of `encode_from`: Dai et al. 2019, arXiv:1901.02860 (Transformer-XL).

    Args:
        tstep_dim: given by the agent.
        max_seq_len: given by the agent.
        d_model: width.
        n_heads: attention heads, a divisor of d_model.
        d_ff: width of the feed-forward part.
        n_layers: blocks.
        dropout_ff: after attention and feed-forward.
        dropout_emb: on the input.
        activation: name of the non-linearity.
        norm: normalisation before each part and of the result, "layer" or "rmsnorm".
        pos_emb: "rope" (rotary), "learned" or None.
        max_time_idx: episodes may be this long with learned positions.
        qk_norm: normalise queries and keys, which bounds attention logits.
        qk_gain: length of normalised queries at the start of training, relative to keys. Above 1, some heads
            single out rare timesteps by chance and recall is learned from there; nearly uniform attention
            would dilute such a timestep's gradient by the length of the sequence.
    Raises: ValueError for a size below 1, a bad head count or position kind.
    """

    def __init__(  # noqa: PLR0913 - every keyword is a gin setting
        self,
        tstep_dim: int,
        max_seq_len: int,
        *,
        d_model: int = 256,
        n_heads: int = 8,
        d_ff: int = 1024,
        n_layers: int = 3,
        dropout_ff: float = 0.05,
        dropout_emb: float = 0.05,
        activation: str = "leaky_relu",
        norm: str = "layer",
        pos_emb: str | None = "rope",
        max_time_idx: int = 10_000,
        qk_norm: bool = True,
        qk_gain: float = 3.0,
    ) -> None:
        super().__init__(tstep_dim, max_seq_len)
        require_positive(
            "TransformerTrajEncoder", d_model=d_model, n_heads=n_heads, d_ff=d_ff, n_layers=n_layers
        )
        if d_model % n_heads or (d_model // n_heads) % 2:
            raise ValueError(
                f"d_model {d_model} and n_heads {n_heads} give no even width per head. "
                "Fix: choose TransformerTrajEncoder.d_model as a multiple of 2 * n_heads."
            )
        if pos_emb not in ("rope", "learned", None):
            raise ValueError(
                f"pos_emb is {pos_emb!r}, allowed are 'rope', 'learned', None. Fix: bind one of these."
            )
        self.n_heads, self.window = n_heads, max_seq_len
        self.inp, self.dropout_emb = nn.Linear(tstep_dim, d_model), nn.Dropout(dropout_emb)
        self.learned = LearnedPositions(d_model, max_time_idx) if pos_emb == "learned" else None
        self.rotary = RotaryPositions(d_model // n_heads) if pos_emb == "rope" else None
        self.layers = nn.ModuleList(
            TransformerLayer(
                d_model,
                n_heads,
                d_ff,
                dropout=dropout_ff,
                activation=activation,
                norm=norm,
                qk_gain=qk_gain if qk_norm else None,
            )
            for _ in range(n_layers)
        )
        self.out_norm = norm_layer(norm, d_model)
        self._emb_dim = d_model
        self._cache_type: type[Cache] = KeyValueCache

    @property
    def emb_dim(self) -> int:
        return self._emb_dim

    def use_static_shapes(self) -> None:
        self._cache_type = RingKeyValueCache

    def init_hidden_state(self, num_envs: int, device: torch.device) -> Cache:
        return self._cache_type.create(
            num_layers=len(self.layers),
            num_envs=num_envs,
            num_heads=self.n_heads,
            window=self.window,
            width=self._emb_dim // self.n_heads,
            device=device,
        )

    def reset_hidden_state(self, hidden_state: Cache, ended: Tensor) -> Cache:
        hidden_state.forget(ended)
        return hidden_state

    @property
    def context_len(self) -> int:
        return len(self.layers) * (self.window - 1)

    def export_hidden_state(self, hidden_state: Cache) -> Rows:
        return hidden_state.export()

    def import_hidden_state(self, rows: Rows) -> Cache:
        return self._cache_type.of(rows)

    def encode_from(self, seq: Tensor, time_idxs: Tensor, rows: Rows, resets: Tensor | None = None) -> Tensor:
        memory = {name: kept.detach() for name, kept in rows.items()}
        if resets is not None:  # where all episodes begin with the sequence, no history is left to read
            memory["visible"] = memory["visible"] & ~resets[:, :1]
        return self._encode_sequence(seq, time_idxs, resets, without_unused(memory))

    def remember(self, seq: Tensor, time_idxs: Tensor, resets: Tensor) -> Rows:
        x, rotary = self._embed(seq, time_idxs)
        mask = attention_mask(seq, self.window, resets)
        kept = self.window - 1
        all_keys: list[Tensor] = []
        all_values: list[Tensor] = []
        short = max(kept - seq.shape[1], 0)
        for layer in cast("Iterable[TransformerLayer]", self.layers):
            _, keys, values = layer.queries_keys_values(x, rotary)
            for column, new in ((all_keys, keys), (all_values, values)):
                column.append(F.pad(new[:, :, max(seq.shape[1] - kept, 0) :].float(), (0, 0, short, 0)))
            x = layer(x, rotary, mask)
        episode = resets.long().cumsum(1)
        visible = F.pad(episode == episode[:, -1:], (short, 0))[:, -kept:] if kept else episode[:, :0].bool()
        shown = visible[:, None, None, :, None]
        keys, values = (torch.stack(x, dim=1).detach() * shown for x in (all_keys, all_values))
        return {"keys": keys, "values": values, "visible": visible}

    def forward(
        self,
        seq: Tensor,
        time_idxs: Tensor,
        hidden_state: Cache | None = None,
        resets: Tensor | None = None,
    ) -> tuple[Tensor, Cache | None]:
        if hidden_state is None:
            return self._encode_sequence(seq, time_idxs, resets), None
        outputs = []
        for t in range(seq.shape[1]):
            if resets is not None:
                self.reset_hidden_state(hidden_state, resets[:, t])
            outputs.append(self._encode_timestep(seq[:, t : t + 1], time_idxs[:, t : t + 1], hidden_state))
        return torch.cat(outputs, dim=1), hidden_state

    def _embed(self, seq: Tensor, time_idxs: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        x = self.inp(seq)
        if self.learned is not None:
            x = x + self.learned(time_idxs)
        return self.dropout_emb(x), self.rotary(time_idxs, x.dtype) if self.rotary is not None else None

    def _encode_sequence(
        self, seq: Tensor, time_idxs: Tensor, resets: Tensor | None, memory: Rows | None = None
    ) -> Tensor:
        x, rotary = self._embed(seq, time_idxs)
        visible = None if memory is None else memory["visible"]
        mask = attention_mask(seq, self.window, resets, visible)
        for i, layer in enumerate(self.layers):
            past = None if memory is None else (memory["keys"][:, i], memory["values"][:, i])
            x = layer(x, rotary, mask, past)
        y: Tensor = self.out_norm(x)
        return y

    def _encode_timestep(self, seq: Tensor, time_idxs: Tensor, cache: Cache) -> Tensor:
        embedded, rotary = self._embed(seq, time_idxs)
        x = embedded[:, 0]
        bias = cache.advance()
        for i, layer in enumerate(cast("Iterable[TransformerLayer]", self.layers)):
            x = layer.forward_timestep(x, rotary, cache, i, bias)
        y: Tensor = self.out_norm(x)
        return y[:, None]


def attention_mask(
    seq: Tensor, window: int, resets: Tensor | None = None, visible: Tensor | None = None
) -> Tensor | None:
    """Which timesteps each one may attend to: the `window` newest ones of its own episode.

    Args:
        seq: (B, L, ...), whose shape and device count.
        window: timesteps that attention reaches back, the newest included.
        resets: (B, L) bool, True on the first timestep of an episode.
        visible: (B, M) bool, True on those of the M timesteps before `seq` that its first episode has seen.
    Returns: bool (L, L) or (B, 1, L, M + L), True where attention is allowed; None if plain causal is right.
    """
    batch, length = seq.shape[:2]
    has_borders = resets is not None and bool(resets[:, 1:].any())
    num_before = 0 if visible is None else visible.shape[1]
    if not has_borders and not num_before and length <= window:
        return None
    t = torch.arange(-num_before, length, device=seq.device)
    lag = t[num_before:, None] - t
    mask = (lag >= 0) & (lag < window)
    if not has_borders and not num_before:
        return mask
    episode = torch.zeros(batch, length, dtype=torch.int64, device=seq.device)
    if resets is not None:
        episode = resets.long().cumsum(1)
    of_key = episode if visible is None else torch.cat([visible.long() - 1, episode], dim=1)
    return (mask & (episode[:, :, None] == of_key[:, None]))[:, None]
