"""What Transformer layers do with queries, keys and values: see them as they should be, and attend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .head_kinds import COUNT_SCALE
from .positions import Places, rotate
from .recurrence import in_full_precision

Attention: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
"""Attention over queries (B, H, L, E), keys and values (B, H, S, E) with a mask and a dropout rate.

The mask is bool (True where attention is allowed) or float (added to logits), broadcast to (B, H, L, S). None
stands for a causal one with L = S, and for none with L = 1. Returns (B, H, L, E).
"""

_QUERIES = 48  # whose keys are looked for together; 32 to 64 took the same time
_COUNTING_QUERIES = 512  # whose logits are held at once


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """The attention of torch, which takes the fastest kernel that it has for the device."""
    is_plain_cpu = q.device.type == "cpu" and not torch.compiler.is_compiling()
    return (_sdpa_on_cpu if is_plain_cpu else _kernel)(q, k, v, mask, dropout)


def _kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=mask is None and q.shape[2] > 1)


@in_full_precision  # the gradient in bfloat16 takes four times as long as in float32
def _sdpa_on_cpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    if mask is None or mask.dtype != torch.bool:
        return _kernel(q, k, v, mask, dropout)
    queries, masks = (torch.split(x, _QUERIES, dim=-2) for x in (q, mask))
    seen = []  # by these queries; the kernel goes through what a mask hides, too
    for allowed in masks:
        places = allowed.flatten(0, -2).any(0).nonzero().flatten()
        seen.append(slice(int(places[0]), int(places[-1]) + 1))
    parts = [
        _kernel(some, keys, values, allowed[..., span], dropout).transpose(1, 2)
        for some, allowed, keys, values, span in zip(
            queries, masks, _spans(k, seen), _spans(v, seen), seen, strict=True
        )
    ]
    return torch.cat(parts, dim=1).transpose(1, 2)  # the layout of the kernel's results


def _spans(x: Tensor, spans: Sequence[slice]) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = _Spans.apply(x, spans)  # type: ignore[no-untyped-call]
    return found


class _Spans(torch.autograd.Function):
    """Overlapping spans of x (B, H, S, E). Autograd would add up a whole gradient for each of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spans: Sequence[slice]) -> tuple[Tensor, ...]:
        ctx.spans, ctx.shape = spans, x.shape
        return tuple(x[:, :, span] for span in spans)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        b, h, s, e = ctx.shape
        total = grads[0].new_zeros(b, s, h, e).transpose(1, 2)
        for span, grad in zip(ctx.spans, grads, strict=True):
            total[:, :, span] += grad
        return total, None


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """The formula, with all weights in memory."""
    if mask is None and q.shape[2] > 1:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return F.dropout(_masked_logits(q, k, mask).softmax(-1), dropout) @ v


@in_full_precision  # bfloat16 tells no 257 from 256
def count(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, threshold: float) -> Tensor:
    """Sums of the values whose keys fit (see `fits`, `damped`): how much there is of what a query looks for.

    A mean of values tells its share of all timesteps, from which a number is hard to learn. Arguments and
    result as those of an `Attention`, but that logits above the threshold count, in place of a dropout rate.
    Logits are held for some queries at a time.
    Source: weights of Ramapuram et al. 2024, arXiv:2409.04431 (sigmoid attention).
    """
    length, parts = q.shape[2], []
    for start in range(0, length, _COUNTING_QUERIES):
        some = q[:, :, start : start + _COUNTING_QUERIES]
        seen, allowed = k.shape[2], None
        if mask is not None:
            allowed = mask[..., start : start + _COUNTING_QUERIES, :]
        elif length > 1:
            seen = start + some.shape[2]
            allowed = torch.ones(some.shape[2], seen, dtype=torch.bool, device=q.device).tril(start)
        given = (some, k[:, :, :seen], v[:, :, :seen], allowed, threshold)
        if some.shape[2] == length:
            return _count(*given)
        parts.append(checkpoint(_count, *given, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(parts, dim=2)


def _count(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, threshold: float) -> Tensor:
    return damped(fits(_masked_logits(q, k, mask), threshold) @ v)


def fits(logits: Tensor, threshold: float) -> Tensor:
    """Weights from 0 to 1 of keys that are counted."""
    return (logits - threshold).sigmoid()


def damped(sums: Tensor) -> Tensor:
    """Sums of values as layers can use them, of any number of timesteps."""
    return (sums / COUNT_SCALE).asinh()


def _masked_logits(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    logits: Tensor = q @ k.mT * q.shape[-1] ** -0.5
    if mask is None:
        return logits
    return logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask


def without_present(k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys, values and mask of attention to earlier timesteps alone, and to a key and a value of zeros.

    Arguments as those of an `Attention` over L queries, S >= L keys and values, the last L of them their own.
    """
    if mask is None:  # at the place of each timestep is what is at the place before it
        return F.pad(k[:, :, :-1], (0, 0, 1, 0)), F.pad(v[:, :, :-1], (0, 0, 1, 0)), None
    length, size = mask.shape[-2:]
    t = torch.arange(size, device=mask.device)
    is_present, is_bool = t[size - length :, None] == t, mask.dtype == torch.bool
    mask = F.pad(mask.masked_fill(is_present, False if is_bool else -torch.inf), (1, 0), value=is_bool)
    return F.pad(k, (0, 0, 1, 0)), F.pad(v, (0, 0, 1, 0)), mask


def normed_and_turned(
    qkv: Tensor, added: Tensor | None, gains: Tensor, eps: float, places: Places
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys at unit root mean square, times gains, rotated; and values.

    Args:
        qkv: (B, L, 3, H, E) float.
        added: (B, L, 2, F, E) float, of queries and keys of the F first heads, before the norm; or None.
        gains: (2, E) float, of queries and keys.
        eps: of the norm.
        places: cosines and sines (B, L, 1 or H, E).
    Returns: three times (B, H, L, E), queries and keys in float32.
    """
    turned, v = _NormedAndTurned.apply(qkv, added, gains, eps, places.cos, places.sin)  # type: ignore[no-untyped-call]
    q, k = turned.unbind(2)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class _NormedAndTurned(torch.autograd.Function):
    """In a third of the operations of autograd, each of which costs as much as reading its input."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, added: Tensor | None, gains: Tensor, eps: float, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        x = qkv[:, :, :2].to(torch.float32, copy=True)
        if added is not None:
            x[:, :, :, : added.shape[3]] += added
        scale = (x * x).sum(-1, keepdim=True).div_(x.shape[-1]).add_(eps).rsqrt_()
        x *= scale
        gains = gains[:, None].expand(x.shape[2:]).contiguous()  # by head, as short rows are slow
        cos, sin = cos[:, :, None], sin[:, :, None]
        y = rotate(x * gains, cos, sin)
        ctx.save_for_backward(x, scale, gains, cos, sin)
        ctx.num_added = None if added is None else added.shape[3]
        return y, qkv[:, :, 2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_turned: Tensor, of_values: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, gains, cos, sin = ctx.saved_tensors
        back = sin.roll(sin.shape[-1] // 2, -1)  # sines of the inverse rotation
        stretched = rotate(of_turned, cos, back)
        of_gains = (stretched * x).flatten(0, 1)
        normed = stretched.mul_(gains)
        along = (of_gains * gains).sum(-1).view_as(scale).div_(x.shape[-1])
        of_qkv = of_values.new_empty(*x.shape[:2], 3, *x.shape[3:])
        of_qkv[:, :, :2] = normed.addcmul_(x, along, value=-1).mul_(scale)
        of_qkv[:, :, 2] = of_values
        of_added = None if ctx.num_added is None else of_qkv[:, :, :2, : ctx.num_added]
        return of_qkv, of_added, of_gains.flatten(1).sum(0).view(gains.shape).sum(1), None, None, None


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
