"""Causal Transformer over timesteps with a sliding attention window and a key/value cache for acting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

import gin
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import (
    Attention,
    attention_mask,
    count,
    damped,
    fits,
    normed_and_turned,
    plain_attention,
    sdpa,
    without_present,
)
from .dropout import Dropout
from .head_kinds import HeadKinds, counting_threshold
from .init import EMBEDDING_STD, FIXED_CONTENT_GAIN, QK_GAIN
from .kv_cache import Cache, KeyValueCache, RingKeyValueCache, Rows, without_unused
from .mlp import RMSNorm, require_at_least, require_positive
from .plain_step import PlainStep
from .positions import HeadPositions, LearnedPositions, Places, SinusoidalPositions, rotate
from .sigma_reparam import linear
from .trunk import BlockSettings, ResidualBlock, State, TrunkTrajEncoder

POSITIONS = ("fixed", "learned", None)
ATTENTIONS: dict[str, Attention] = {"sdpa": sdpa, "plain": plain_attention}


class TransformerLayer(ResidualBlock):
    """Pre-norm attention and feed-forward block.

    A Transformer keeps the keys and values of all layers in one cache, and gives them and positions to
    `encode` and `act`. With `is_alone`, as a block of a trunk with other mixers, the layer keeps those of its
    window and makes positions itself.

    Shapes: x (B, L, D) -> (B, L, D).
    Source: Vaswani et al. 2017, arXiv:1706.03762; query/key normalisation of Henry et al. 2020,
    arXiv:2010.04245; head scales of Shleifer et al. 2021, arXiv:2110.09456; a learned key that attention can
    rest on of Xiao et al. 2023, arXiv:2309.17453; for kinds of heads see `head_kinds`.
    """

    slopes: Tensor
    least_length: Tensor

    def __init__(
        self,
        settings: BlockSettings,
        *,
        heads: HeadKinds,
        window: int,
        qk_gain: float | None,
        fixed_content_gain: float = FIXED_CONTENT_GAIN,
        is_alone: bool = False,
        head_scaling: bool = False,
        attention_sink: bool = False,
        dropout_attn: float = 0.0,
        dropout_qkv: float = 0.0,
        attention: Attention = sdpa,
    ) -> None:
        super().__init__(settings)
        n_heads = len(heads)
        d_model, width = settings.d_model, settings.d_model // n_heads
        self.n_heads, self.window, self.context_len = n_heads, window, window - 1
        kept = (n_heads, window, width)
        self.state_shapes = {"keys": kept, "values": kept, "age": ()}
        self.attention, self.dropout_attn, self.dropout_qkv = attention, dropout_attn, Dropout(dropout_qkv)
        self.qkv = linear(d_model, 3 * d_model, bias=False, sigma_reparam=settings.sigma_reparam)
        self.proj = linear(d_model, d_model, bias=False, sigma_reparam=settings.sigma_reparam)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if qk_gain is not None:
            self.q_norm, self.k_norm = (RMSNorm(width) for _ in range(2))
            nn.init.constant_(next(self.q_norm.parameters()), qk_gain)
            least_length = torch.tensor((width * RMSNorm.EPS) ** 0.5)
            self.register_buffer("least_length", least_length, persistent=False)
        self.head_scale = nn.Parameter(torch.ones(n_heads, 1, 1)) if head_scaling else None
        self.sink = nn.Parameter(EMBEDDING_STD * torch.randn(n_heads, 1, width)) if attention_sink else None
        content_heads, fixed_heads = heads.num("content", "counting"), heads.num("fixed")
        if content_heads:  # they begin by looking for what is like the present
            weight = next(self.qkv.parameters())
            q, k, _ = weight.detach().view(3, n_heads, -1)[:, n_heads - content_heads :]
            k.copy_(q)
        self.fixed_heads, self.content_heads = fixed_heads, content_heads
        self.counting_heads = heads.num("counting")  # the last of the content heads, which are the last ones
        self.threshold = counting_threshold(width, qk_gain)
        self.from_waves = None
        if fixed_heads:
            self.from_waves = linear(
                d_model, 2 * fixed_heads * width, bias=False, sigma_reparam=settings.sigma_reparam
            )
            with torch.no_grad():  # they begin as heads that know places rather than contents
                weight = next(self.qkv.parameters())
                weight.view(3, n_heads, -1)[:2, :fixed_heads] *= fixed_content_gain
        self.positions = None
        if is_alone and heads.need_positions:
            self.positions = HeadPositions(d_model, heads, window)
        self.has_biases = heads.num("alibi") > 0
        self.register_buffer("slopes", torch.tensor(heads.slopes())[:, None, None], persistent=False)
        self._add_feed_forward()

    def queries_keys_values(self, x: Tensor, places: Places | None) -> tuple[Tensor, Tensor, Tensor]:
        """Each (B, H, L, E), positions applied."""
        qkv, added = self._project(x, places)
        if places is not None and isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            gains = torch.stack((self.q_norm.weight, self.k_norm.weight))
            return normed_and_turned(qkv, added, gains, RMSNorm.EPS, places)
        q, k, v = self._with_waves(qkv, added).unbind(2)
        q, k = self.q_norm(q), self.k_norm(k)
        if places is not None:
            q, k = rotate(q, places.cos, places.sin), rotate(k, places.cos, places.sin)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _project(self, x: Tensor, places: Places | None) -> tuple[Tensor, Tensor | None]:
        """X (..., D) -> queries, keys and values (..., 3, H, E), and the waves of heads that know places.

        The second, (..., 2, F, E), is to be added to the queries and keys of the first heads.
        """
        qkv: Tensor = self.dropout_qkv(self.qkv(self.norm_attn(x))).unflatten(-1, (3, self.n_heads, -1))
        if self.from_waves is None or places is None or places.waves is None:
            return qkv, None
        return qkv, self.from_waves(places.waves).unflatten(-1, (2, self.fixed_heads, -1))

    def _with_waves(self, qkv: Tensor, added: Tensor | None) -> Tensor:
        # not added in place: autograd would copy the gradient of all of qkv for it
        return qkv if added is None else qkv + F.pad(added, (0, 0, 0, self.n_heads - self.fixed_heads, 0, 1))

    def mask(self, seq: Tensor, resets: Tensor | None, visible: Tensor | None = None) -> Tensor | None:
        """What `encode` needs; arguments as those of `attention_mask`."""
        mask = attention_mask(seq, self.window, resets, visible)
        if not self.has_biases and self.sink is None:
            return mask
        length, num_before = seq.shape[1], 0 if visible is None else visible.shape[1]
        t = torch.arange(-num_before, length, device=seq.device)
        lag = t[num_before:, None] - t
        mask = lag >= 0 if mask is None else mask
        return torch.where(mask, -self.slopes * lag, -torch.inf) if self.has_biases else mask

    def encode(
        self,
        x: Tensor,
        places: Places | None,
        mask: Tensor | None,
        memory: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """A sequence; the memory holds keys and values (B, H, M, E) of timesteps before x."""
        return self._encode(x, places, mask, memory)[0]

    def _encode(
        self,
        x: Tensor,
        places: Places | None,
        mask: Tensor | None,
        memory: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Also the keys and values attended to, (B, H, M + L, E)."""
        q, k, v = self.queries_keys_values(x, places)
        if memory is not None:
            k, v = (
                torch.cat([old.to(new.dtype), new], dim=2) for old, new in zip(memory, (k, v), strict=True)
            )
        attended = self._attend(q, k, v, mask)
        return self.finish(x, self.proj(rearrange(attended, "b h l e -> b l (h e)"))), k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if self.sink is not None and mask is not None:
            sink = self.sink.to(k.dtype).expand(len(k), -1, -1, -1)
            k, v = torch.cat([sink, k], dim=2), F.pad(v, (0, 0, 1, 0))  # whose value is 0
            mask = F.pad(mask, (1, 0), value=True if mask.dtype == torch.bool else 0.0)
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(q.dtype)
        dropout, first = self.dropout_attn if self.training else 0.0, self.n_heads - self.content_heads
        of_contents = mask
        if self.has_biases and self.content_heads and mask is not None:  # (..., H, L, S), alike for contents
            mask, of_contents = mask[..., :first, :, :], mask[..., -1:, :, :]
        found = []
        if first:
            found.append(self.attention(q[:, :first], k[:, :first], v[:, :first], mask, dropout))
        if self.content_heads:
            k, v, mask = without_present(k[:, first:], v[:, first:], of_contents)
            n, last = first + self.content_heads - self.counting_heads, self.counting_heads
            if n > first:
                k_like, v_like = k[:, : n - first], v[:, : n - first]
                found.append(self.attention(q[:, first:n], k_like, v_like, mask, dropout))
            if last:
                found.append(count(q[:, n:], k[:, -last:], v[:, -last:], mask, self.threshold))
        attended = torch.cat(found, dim=1)
        return attended if self.head_scale is None else attended * self.head_scale

    def _seen_now(self, x: Tensor) -> Tensor:
        """The key or value (N, H, E) of the present as heads see it; zeros to those of contents."""
        if not self.content_heads:
            return x
        return F.pad(x[:, : -self.content_heads], (0, 0, 0, self.content_heads))

    def act(
        self,
        x: Tensor,
        places: Places | None,
        cache: Cache,
        layer: int,
        bias: Tensor | None,
    ) -> Tensor:
        """One timestep of N envs against what is cached; the same result as `encode`, in fewer operations.

        Shapes: x (N, D) -> (N, D); layer: number of this one in the cache; bias (N, 1, 1, S) float or None.
        """
        qkv = self._with_waves(*self._project(x, places)).transpose(0, 1)
        both = qkv[:2]  # queries and keys share operations: (2, N, H, E)
        root, scale = both.shape[-1] ** 0.5, both.shape[-1] ** -0.5
        if isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            length = torch.linalg.vector_norm(both, dim=-1, keepdim=True, dtype=torch.float32)
            gains = torch.stack((self.q_norm.weight, self.k_norm.weight * root))
            both = both / torch.hypot(length, self.least_length) * gains[:, None, None]
            scale = 1.0  # the root of E of a normed query and the 1 / root of logits cancel
        if places is not None:
            both = rotate(both, places.cos, places.sin)
        q, k = both.unbind()
        q = q if scale == 1.0 else q * scale
        keys, values = cache.store(layer, self._seen_now(k), self._seen_now(qkv[2]), self.window)
        if self.has_biases or self.window < cache.window:
            bias = cache.bias_within(self.window)
            if self.has_biases:
                bias = bias - self.slopes * cache.lags(self.window)
        attended = self._attend_once(q.to(keys.dtype), keys, values, bias).to(x.dtype)
        if self.content_heads:
            cache.store(layer, k, qkv[2], self.window)
        return self.finish(x, self.proj(attended.view(x.shape)))

    def _attend_once(self, q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
        """One scaled query (N, H, E), keys (N H, E, S), values (N H, S, E) -> (N, H, E).

        Plain products, as kernels are made for many queries.
        """
        logits = torch.bmm(q.reshape(-1, 1, q.shape[-1]), keys)
        if bias is not None:
            logits = (logits.view(*q.shape[:2], 1, -1) + bias).flatten(0, 1)
        if self.sink is not None:
            logits = torch.cat([logits, (q[:, :, None] @ self.sink.mT).flatten(0, 1)], dim=-1)
        by_head, num_means = logits.view(*q.shape[:2], 1, -1), q.shape[1] - self.counting_heads
        weights = by_head.softmax(-1)
        if self.counting_heads:
            counted = fits(by_head[:, num_means:], self.threshold)
            weights = torch.cat([weights[:, :num_means], counted], dim=1)
        weights = weights.flatten(0, 1)
        attended = torch.bmm(weights if self.sink is None else weights[..., :-1], values).view(q.shape)
        if self.counting_heads:
            attended = torch.cat([attended[:, :num_means], damped(attended[:, num_means:])], dim=1)
        return attended if self.head_scale is None else attended * self.head_scale[:, 0]

    # A block of a trunk. Its state is a ring: timestep t of an episode stands at place t % window.

    def forward(self, x: Tensor, resets: Tensor | None, state: State) -> tuple[Tensor, State]:
        length, age = x.shape[1], state["age"]
        num_used = min(int(age.max()), self.window - 1)  # the newest ones: all that some row may still see
        ages = age[:, None] + torch.arange(length, device=x.device)
        if resets is not None:
            since = torch.where(resets, torch.arange(length, device=x.device), -1).cummax(1).values
            ages = torch.where(since < 0, ages, torch.arange(length, device=x.device) - since)
        places = None if self.positions is None else self.positions(ages[..., None], x.dtype)
        memory, visible = None, None
        if num_used:
            visible = torch.arange(num_used, 0, -1, device=x.device) <= age[:, None]
            keys, values = (_rolled(state[name], age)[:, :, -num_used:] for name in ("keys", "values"))
            memory = keys, values
        y, k, v = self._encode(x, places, self.mask(x, resets, visible), memory)
        age = ages[:, -1] + 1
        short = max(self.window - k.shape[2], 0)
        shown = torch.arange(self.window, 0, -1, device=x.device) <= age[:, None]
        keys, values = (
            F.pad(part[:, :, -self.window :].float(), (0, 0, short, 0)) * shown[:, None, :, None]
            for part in (k, v)
        )
        return y, {"keys": _rolled(keys, -age), "values": _rolled(values, -age), "age": age}

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """As that of `Mixer`, but without gradient it writes the newest keys and values into the state."""
        age = state["age"].long()
        places = None if self.positions is None else self.positions(age[:, None, None], x.dtype)
        q, k, v = (part[:, :, 0].float() for part in self.queries_keys_values(x[:, None], places))
        newest = torch.arange(len(x), device=x.device), age % self.window
        write = Tensor.index_put if torch.is_grad_enabled() else Tensor.index_put_
        keys, values = (
            write(state[name].transpose(1, 2), newest, self._seen_now(part)).transpose(1, 2)
            for name, part in (("keys", k), ("values", v))
        )
        lags = (age[:, None] - torch.arange(self.window, device=x.device)) % self.window
        bias = torch.where(lags <= age[:, None], 0.0, -torch.inf)[:, None, None]
        if self.has_biases:
            bias = bias - self.slopes * lags[:, None, None]
        scaled = q * q.shape[-1] ** -0.5
        attended = self._attend_once(scaled, keys.flatten(0, 1).mT, values.flatten(0, 1), bias).to(x.dtype)
        if self.content_heads:
            keys, values = (
                write(kept.transpose(1, 2), newest, part).transpose(1, 2)
                for kept, part in ((keys, k), (values, v))
            )
        y = self.finish(x, self.proj(attended.flatten(1)))
        return y, {"keys": keys, "values": values, "age": state["age"] + 1}


def _rolled(x: Tensor, shift: Tensor) -> Tensor:
    """X (N, H, S, E) with what stands `shift` (N,) places further, around the end, at each place."""
    places = (torch.arange(x.shape[2], device=x.device) + shift.long()[:, None]) % x.shape[2]
    return x.gather(2, places[:, None, :, None].expand(x.shape))


@gin.configurable(denylist=["tstep_dim", "max_seq_len"])
class TransformerTrajEncoder(TrunkTrajEncoder):
    """Causal Transformer in which every timestep attends to itself and the `max_seq_len` before it.

    These are all timesteps of the longest training sequence, the one after its last transition included, so
    attention in training is plainly causal. The same sliding window holds in training and acting, so the
    key/value cache gives what the full forward gives at any length of history. A training slice that starts
    in mid-episode lacks the timesteps before it, so its first outputs see less context than the actor had;
    `encode_from` gives them to it, as the cached keys and values of every layer.

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
        pos_emb: positions that are added to the input: "fixed" (sinusoidal), "learned" or None.
        heads: what heads look at: one kind for all, or one per head in any order (layers sort them). Kinds
            are "plain" (no positions), "rotary" and "alibi" (distances), "fixed" (places in the episode),
            "content" (what is like the present) and "counting" (how often that was), see nets/head_kinds.py.
        max_time_idx: episodes may be this long with learned positions.
        qk_norm: normalise queries and keys, which bounds attention logits.
        qk_gain: length of normalised queries at the start of training, relative to keys. Above 1, some heads
            single out rare timesteps by chance and recall is learned from there; nearly uniform attention
            would dilute such a timestep's gradient by the length of the sequence.
        fixed_content_gain: factor of the first weights of queries and keys of fixed heads, whose waves then
            weigh more than contents.
        dropout_attn: on attention weights, but for heads that count.
        dropout_qkv: on queries, keys and values.
        windows: timesteps that each layer attends to, its own included, max_seq_len + 1 at most; None takes
            that for all.
        attention_sink: a learned key of no value beside the timesteps, for heads that look for nothing.
        head_scaling: a learned factor of each head's result.
        normformer_norms: normalise behind attention and inside the feed-forward part, too.
        sigma_reparam: linear layers keep a learned spectral norm.
        glu: the feed-forward part is gated: activation(A x) * B x.
        gating: "gru" replaces residual sums by gates that begin close to the identity (GTrXL); None for sums.
        attention_type: of training: "sdpa" (torch's own kernels), "plain" (the formula) or a function, see
            `Attention`. Acting always takes the formula.
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
        attention_type: str | Attention = "sdpa",
    ) -> None:
        require_positive(
            "TransformerTrajEncoder", d_model=d_model, n_heads=n_heads, d_ff=d_ff, n_layers=n_layers
        )
        gains = {"qk_gain": qk_gain, "fixed_content_gain": fixed_content_gain}
        require_at_least(0, "TransformerTrajEncoder", **gains)
        require_even_heads("TransformerTrajEncoder", d_model, n_heads)
        if pos_emb not in POSITIONS:
            allowed = ", ".join(map(repr, POSITIONS))
            raise ValueError(
                f"pos_emb is {pos_emb!r}, allowed are {allowed}; positions in queries and keys are kinds of "
                "heads. Fix: bind one of these, or None and TransformerTrajEncoder.heads = 'rotary' or one "
                "kind per head, e.g. ('fixed', 'rotary', 'rotary', 'content') for four."
            )
        kinds = HeadKinds.named(heads, n_heads, setting="TransformerTrajEncoder.heads")
        if isinstance(attention_type, str) and attention_type not in ATTENTIONS:
            raise ValueError(
                f"attention_type is {attention_type!r}, allowed are {sorted(ATTENTIONS)} and functions. "
                "Fix: bind one of these."
            )
        longest = max_seq_len + 1  # timesteps of a training sequence, which then needs no mask
        if windows is not None and not (
            len(windows) == n_layers and all(1 <= window <= longest for window in windows)
        ):
            raise ValueError(
                f"windows is {list(windows)}, but must be {n_layers} numbers from 1 to {longest}, one "
                f"per layer. Fix: bind, say, TransformerTrajEncoder.windows = {[longest] * n_layers}."
            )
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
        )
        self.n_heads, self.window = n_heads, longest if windows is None else max(windows)
        self.places = None
        if kinds.need_positions:
            self.places = HeadPositions(d_model, kinds, min(self.window, max_seq_len))
        self._cache_type: type[Cache] = KeyValueCache
        self._plain_step: PlainStep | None = None

    def train(self, mode: bool = True) -> TransformerTrajEncoder:
        super().train(mode)
        parts, self._plain_step = (self.inp, self.blocks, self.out_norm), None
        if mode or self.places is None or self.learned is not None:
            return self
        if PlainStep.is_for(*parts, self.window):
            self._plain_step = PlainStep(*parts, self.places)
        return self

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
        x, masks = self._embed(seq, time_idxs), self._masks(seq, resets)
        places = self._places(time_idxs, x.dtype)
        kept = self.window - 1
        all_keys: list[Tensor] = []
        all_values: list[Tensor] = []
        short = max(kept - seq.shape[1], 0)
        for layer in cast("Iterable[TransformerLayer]", self.layers):
            _, keys, values = layer.queries_keys_values(x, places)
            for column, new in ((all_keys, keys), (all_values, values)):
                column.append(F.pad(new[:, :, max(seq.shape[1] - kept, 0) :].float(), (0, 0, short, 0)))
            x = layer.encode(x, places, masks[layer.window])
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
        if seq.shape[1] == 1 and resets is None:
            return self._encode_timestep(seq, time_idxs, hidden_state), hidden_state
        outputs = []
        for t in range(seq.shape[1]):
            if resets is not None:
                self.reset_hidden_state(hidden_state, resets[:, t])
            outputs.append(self._encode_timestep(seq[:, t : t + 1], time_idxs[:, t : t + 1], hidden_state))
        return torch.cat(outputs, dim=1), hidden_state

    def _places(self, time_idxs: Tensor, dtype: torch.dtype) -> Places | None:
        return None if self.places is None else self.places(time_idxs, dtype)

    def _masks(
        self, seq: Tensor, resets: Tensor | None, visible: Tensor | None = None
    ) -> dict[int, Tensor | None]:
        """The mask of layers of each window."""
        layers = cast("Iterable[TransformerLayer]", self.layers)
        one_of_each = {layer.window: layer for layer in layers}
        return {window: layer.mask(seq, resets, visible) for window, layer in one_of_each.items()}

    def _encode_sequence(
        self, seq: Tensor, time_idxs: Tensor, resets: Tensor | None, memory: Rows | None = None
    ) -> Tensor:
        x = self._embed(seq, time_idxs)
        places = self._places(time_idxs, x.dtype)
        masks = self._masks(seq, resets, None if memory is None else memory["visible"])
        for i, layer in enumerate(cast("Iterable[TransformerLayer]", self.layers)):
            past = None if memory is None else (memory["keys"][:, i], memory["values"][:, i])
            x = layer.encode(x, places, masks[layer.window], past)
        y: Tensor = self.out_norm(x)
        return y

    def _encode_timestep(self, seq: Tensor, time_idxs: Tensor, cache: Cache) -> Tensor:
        if self._plain_step is not None and isinstance(cache, KeyValueCache) and PlainStep.serves(seq):
            return self._plain_step(seq[:, 0], time_idxs[:, 0], cache)[:, None]
        x = self._embed(seq, time_idxs)[:, 0]
        places, bias = self._places(time_idxs[:, 0], x.dtype), cache.advance()
        for i, layer in enumerate(cast("Iterable[TransformerLayer]", self.layers)):
            x = layer.act(x, places, cache, i, bias)
        y: Tensor = self.out_norm(x)
        return y[:, None]


def require_even_heads(owner: str, d_model: int, n_heads: int) -> None:
    """Check that heads have an even width. Raises: ValueError if not."""
    if d_model % n_heads or (d_model // n_heads) % 2:
        raise ValueError(
            f"d_model {d_model} and n_heads {n_heads} give no even width per head. "
            f"Fix: choose {owner}.d_model as a multiple of 2 * n_heads."
        )
