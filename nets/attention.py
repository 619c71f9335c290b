"""Attention of all kinds of heads: visibility of keys, weights, and the weighted sums of values.

`attend` is the only attention of Transformer layers, for L >= 1 queries: in training, over padded and packed
rows, from a stored state, and while acting. For a single query it evaluates the formula for all heads at
once, because kernels are made for many queries. For many queries it calls a kernel for each group of heads
that attend in the same way.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from . import cpu
from .cpu.attention import sdpa_in_parts
from .head_kinds import Heads
from .positions import PositionFeatures, rotate
from .precision import in_full_precision

Kernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
"""Softmax attention over queries (B, H, L, E), keys and values (B, H, S, E) with a mask and a dropout rate.

The mask is bool (True where attention is allowed) or float (added to logits), broadcast to (B, H, L, S). None
means a causal mask with L = S. Returns (B, H, L, E).
"""


class Sight(ABC):
    """Visibility and age of S keys for each of L queries.

    A sight contains times and episodes rather than a matrix, so that each kernel can get the form that it
    needs: nothing for causal attention, the bounds of episodes for packed rows, a matrix for everything else.
    Layers with the same window share it.
    """

    def __init__(self) -> None:
        self._terms: dict[Heads, tuple[Tensor, Tensor | None]] = {}

    @abstractmethod
    def is_seen(self) -> Tensor:
        """(1 or B, 1, L, S) bool, True where a query may read a key."""

    @abstractmethod
    def lag(self) -> Tensor:
        """(1 or B, 1, L, S) int64, age of the keys in timesteps; arbitrary where a key is not seen."""

    def is_past(self) -> Tensor:
        """(1 or B, 1, L, S) bool, False where key and query belong to the same timestep."""
        return self.lag() != 0

    def terms(self, heads: Heads) -> tuple[Tensor, Tensor | None]:
        """Terms of the formula, which uses logits * kept + bias, and weights * kept.

        Returns: bias and kept, (1 or B, 1 or H, L, S) float. `kept` is 0 where zeros replace a key and its
            value, else 1; None if no head has such keys.
        """
        if heads not in self._terms:
            bias, kept = torch.where(self.is_seen(), 0.0, -torch.inf), None
            if heads.any_fades:
                bias = bias - _fading(heads, self.lag())
            if not heads.all_see_present:
                kept = torch.where(self.is_past(), 1.0, heads.on(bias.device).sees_present)
            self._terms[heads] = bias, kept
        return self._terms[heads]


class RingSight(Sight):
    """Visibility of a ring of keys for the present timestep of each env; timestep t is at slot t % window.

    Attributes:
        age: (N,) int64, number of timesteps of the running episode before the present.
        window: number of slots in the ring.
        num_used: number of slots that are read, from the first one.
        present: two (N,) int64, indices of the envs and the slots of their present timesteps.
    """

    def __init__(self, age: Tensor, window: int, num_used: int) -> None:
        super().__init__()
        self._age, self.window = age.view(-1, 1, 1, 1), window
        self._slots = torch.arange(num_used, device=age.device)
        self.present = torch.arange(len(age), device=age.device), age % window

    def is_seen(self) -> Tensor:
        return self._slots <= self._age

    def lag(self) -> Tensor:
        return (self._age - self._slots) % self.window

    def is_past(self) -> Tensor:
        return self._slots != self.present[1].view(-1, 1, 1, 1)


class SequenceSight(Sight):
    """Visibility of keys for the timesteps of sequences, in temporal order, with M keys before the sequence.

    Attributes:
        like: (B, L, ...), for its shape and device.
        window: number of timesteps that a query may read, its own included.
        resets: (B, L) bool, True on the first timestep of an episode; None if no episode begins within a row.
        num_before: number M of keys of timesteps before the sequence.
        ages: (B,) int64, number of these that belong to the running episode.
    """

    def __init__(
        self,
        like: Tensor,
        window: int,
        resets: Tensor | None = None,
        num_before: int = 0,
        ages: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.like, self.window, self.num_before, self.ages = like, window, num_before, ages
        self.resets = resets
        self._mask: Tensor | None = None

    @property
    def sees_all_episodes(self) -> bool:
        """True if each timestep sees its whole episode so far, and the episode begins in the sequence."""
        return not self.num_before and self.like.shape[1] <= self.window

    @property
    def mask(self) -> Tensor | None:
        """(1 or B, 1, L, S) bool, True where a key is seen; None if the plain causal mask is right."""
        if self.resets is None and self.sees_all_episodes:
            return None
        if self._mask is None:
            self._mask = self.is_seen()
        return self._mask

    def lag(self) -> Tensor:
        t = torch.arange(-self.num_before, self.like.shape[1], device=self.like.device)
        return (t[self.num_before :, None] - t)[None, None]

    def is_seen(self) -> Tensor:
        lag, before = self.lag(), self.num_before
        is_seen = (lag >= 0) & (lag < self.window)
        if not before and self.resets is None:
            return is_seen
        episode = torch.zeros(self.like.shape[:2], dtype=torch.int64, device=lag.device)
        if self.resets is not None:
            episode = self.resets.long().cumsum(1)
        of_key = episode
        if self.ages is not None:
            is_running = torch.arange(before, 0, -1, device=lag.device) <= self.ages[:, None]
            of_key = torch.cat([is_running.long() - 1, episode], dim=1)
        return is_seen & (episode[:, None, :, None] == of_key[:, None, None])


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sight: Sight,
    heads: Heads,
    *,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    kernel: Kernel | None = None,
) -> Tensor:
    """Attention of all heads.

    Args:
        q: (B, H, L, E), queries.
        k: (B, H, S, E), keys; in a sequence, the last L belong to the queries' own timesteps.
        v: (B, H, S, E), values.
        sight: the keys that each query sees.
        heads: the kind of each head.
        sink: (H, 1, E), an additional key with value 0; or None.
        dropout: share of the weights that are dropped.
        kernel: for many queries; None uses the formula.
    Returns: (B, H, L, E).
    """
    if kernel is None or q.shape[2] == 1:
        # Autocast would round all float32 keys of a ring in each step; narrow ones are read as they are.
        is_narrow_ring = isinstance(sight, RingSight) and k.dtype.itemsize < torch.float32.itemsize
        device = q.device.type
        is_plain = is_narrow_ring or (device != "meta" and not torch.is_autocast_enabled(device))
        read = attention_formula if is_plain else _formula_in_full_precision
        return read(q, k, v, *sight.terms(heads), sink, dropout)
    assert isinstance(sight, SequenceSight)  # a ring has a single query
    if not heads.all_see_present and sight.sees_all_episodes:
        k, v, heads = _one_later(k, heads, sight.resets), _one_later(v, heads, sight.resets), heads.shifted
    sinks = [None] * len(heads.groups) if sink is None else heads.split(sink, dim=0)
    queries, keys, values = (heads.split(x, dim=1) for x in (q, k, v))
    found = [
        _by_kernel(*group, sight, dropout, kernel)
        for group in zip(heads.groups, queries, keys, values, sinks, strict=True)
    ]
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)


def attention_formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    kept: Tensor | None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Evaluate the formula for all heads at once; see `attend`, and `Sight.terms` for bias and kept.

    Products have the precision of keys and values, everything else that of the bias.
    """
    shape, scale, q = q.shape, q.shape[-1] ** -0.5, q.to(k.dtype)
    logits = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(*shape[:3], -1)
    if kept is None:
        logits = torch.add(bias, logits, alpha=scale)
    else:
        logits = torch.addcmul(bias, logits, kept, value=scale)
    if sink is not None:
        logits = torch.cat([logits, q @ sink.to(q.dtype).mT * scale], dim=-1)
    weights = logits.softmax(-1)
    weights = F.dropout(weights, dropout) if dropout else weights
    weights = weights if sink is None else weights[..., :-1]
    weights = weights if kept is None else weights * kept
    return torch.bmm(weights.to(v.dtype).flatten(0, 1), v.flatten(0, 1)).view(shape)


_formula_in_full_precision = in_full_precision(attention_formula)


def _fading(heads: Heads, lag: Tensor) -> Tensor:
    """(1 or B, H, L, S) float, subtracted from the logits of these heads."""
    return heads.on(lag.device).slopes * lag


# --- kernels -------------------------------------------------------------------------------------------


def _by_kernel(
    heads: Heads,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    sight: SequenceSight,
    dropout: float,
    kernel: Kernel,
) -> Tensor:
    """Softmax attention of heads that attend in the same way; see `attend`."""
    kind, batch = heads.kinds[0], q.shape[0]
    further = [] if sink is None else [sink.to(k.dtype).expand(batch, -1, -1, -1)]  # keys with value 0
    if not kind.sees_present:
        further.append(torch.zeros_like(k[:, :, :1]))
    if not further and not kind.fades:
        has_bounds = sight.resets is not None and not sight.num_before
        if kernel is sdpa and has_bounds and _can_be_packed(q, v, dropout):
            return _packed(q, k, v, sight)
        return kernel(q, k, v, sight.mask, dropout)
    mask = sight.is_seen()
    if not kind.sees_present:
        mask = mask & sight.is_past()
    if kind.fades:
        mask = torch.where(mask, -_fading(heads, sight.lag()), -torch.inf).to(q.dtype)
    if further:
        mask = F.pad(mask, (len(further), 0), value=0.0 if kind.fades else True)
        k, v = torch.cat([*further, k], dim=2), F.pad(v, (0, 0, len(further), 0))
    return kernel(q, k, v, mask, dropout)


def _one_later(x: Tensor, heads: Heads, resets: Tensor | None) -> Tensor:
    """Shift keys or values (B, H, L, E) of heads that do not see the present to the next timestep.

    Zeros replace the first timestep of an episode.
    """
    parts = list(heads.split(x, dim=1))
    for i, group in enumerate(heads.groups):
        if not group.all_see_present:
            later = F.pad(parts[i][:, :, :-1], (0, 0, 1, 0))
            parts[i] = later if resets is None else later.masked_fill(resets[:, None, :, None], 0.0)
    return torch.cat(parts, dim=1)


@cache
def _varlen_attention() -> Callable[..., Any] | None:
    try:  # imported late, because it takes seconds
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # an older torch
        return None
    # The first versions of this function have no windows.
    return varlen_attn if "window_size" in inspect.signature(varlen_attn).parameters else None


def _can_be_packed(q: Tensor, v: Tensor, dropout: float) -> bool:
    """True if torch has FlashAttention over sequences of different lengths for these inputs."""
    is_narrow = v.dtype in (torch.float16, torch.bfloat16)
    return (
        q.is_cuda and is_narrow and not dropout and q.shape[-1] % 8 == 0 and _varlen_attention() is not None
    )


def _packed(q: Tensor, k: Tensor, v: Tensor, sight: SequenceSight) -> Tensor:
    """Attention within the episodes of packed rows, by a kernel that takes their bounds instead of a mask.

    The kernel itself has never been run: it needs a GPU of the Ampere generation or later, and a new torch.
    """
    (batch, length), attention = sight.like.shape[:2], _varlen_attention()
    assert sight.resets is not None  # checked by the caller
    assert attention is not None
    is_first = sight.resets | (torch.arange(length, device=q.device) == 0)
    bounds = F.pad(is_first.flatten().nonzero().flatten(), (0, 1), value=batch * length).int()
    rows = (rearrange(x, "b h l e -> (b l) h e").to(v.dtype) for x in (q, k, v))
    found = attention(*rows, bounds, bounds, length, length, window_size=(sight.window - 1, 0))
    by_row: Tensor = rearrange(found, "(b l) h e -> b h l e", b=batch)
    return by_row


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """Attention by torch's fastest kernel for the device."""
    attention = sdpa_in_parts if cpu.serves(q) else F.scaled_dot_product_attention
    return attention(q, k, v, mask, dropout, is_causal=mask is None)


# --- queries and keys ----------------------------------------------------------------------------------


def prepared(
    qkv: Tensor, added: Tensor | None, gains: Tensor | None, eps: float, positions: PositionFeatures | None
) -> tuple[Tensor, Tensor]:
    """Prepare queries and keys: add waves, normalise and rotate. Also return the values.

    Args:
        qkv: (..., 3, H, E) float, projections of the input, which may be overwritten.
        added: (..., 2, F, E) float, waves for the queries and keys of the first F heads; or None.
        gains: (2, E) float, factors of queries and keys at unit root mean square; None: no normalisation.
        eps: epsilon of the norm.
        positions: cosines and sines (..., 1, 1 or H, E); None for no rotation.
    Returns: (..., 2, H, E), in float32 if normalised, and (..., H, E).
    """
    if gains is not None and positions is not None:
        given = (qkv, added, gains, eps, positions.cos, positions.sin)
        if torch.is_grad_enabled():
            both, v = _NormedAndTurned.apply(*given)  # type: ignore[no-untyped-call]
            return both, v
        return _normed_and_turned(qkv[..., :2, :, :].float(), *given[1:])[0], qkv[..., 2, :, :]
    both, v = qkv[..., :2, :, :], qkv[..., 2, :, :]
    if added is not None:
        both = both + F.pad(added, (0, 0, 0, both.shape[-2] - added.shape[-2]))
    if gains is not None:
        both = both.float()
        both = both * (both.square().mean(-1, keepdim=True) + eps).rsqrt() * gains[:, None]
    return both if positions is None else rotate(both, positions.cos, positions.sin), v


def _normed_and_turned(
    x: Tensor, added: Tensor | None, gains: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and inputs of the gradient: x, normalised in place, its scale, and gains."""
    if added is not None:
        x[..., : added.shape[-2], :].add_(added)
    scale = (x * x).mean(-1, keepdim=True).add_(eps).rsqrt_()
    x.mul_(scale)
    gains = gains[:, None]
    if x.ndim > 4:  # noqa: PLR2004 - a sequence
        gains = gains.expand(x.shape[-3:]).contiguous()  # one row per head, because short rows are slow
    return rotate(x * gains, cos, sin), x, scale, gains


class _NormedAndTurned(torch.autograd.Function):
    """`_normed_and_turned` with a third of autograd's operations, each of which costs a pass over x."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, added: Tensor | None, gains: Tensor, eps: float, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        x = qkv[..., :2, :, :].to(torch.float32, copy=True)
        y, *for_gradient = _normed_and_turned(x, added, gains, eps, cos, sin)
        ctx.save_for_backward(*for_gradient, cos, sin)
        ctx.num_added = None if added is None else added.shape[-2]
        return y, qkv[..., 2, :, :]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_turned: Tensor, of_values: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, gains, cos, sin = ctx.saved_tensors
        back = sin.roll(sin.shape[-1] // 2, -1)  # sines of the inverse rotation
        stretched = rotate(of_turned, cos, back)
        of_gains = (stretched * x).flatten(0, -4)
        normed = stretched.mul_(gains)
        along = (of_gains * gains).sum(-1).view_as(scale).div_(x.shape[-1])
        of_qkv = of_values.new_empty(*x.shape[:-3], 3, *x.shape[-2:])
        of_qkv[..., :2, :, :] = normed.addcmul_(x, along, value=-1).mul_(scale)
        of_qkv[..., 2, :, :] = of_values
        of_added = None if ctx.num_added is None else of_qkv[..., :2, : ctx.num_added, :]
        of_gains = of_gains.flatten(1).sum(0).view(x.shape[-3:]).sum(1)
        return of_qkv, of_added, of_gains, None, None, None
