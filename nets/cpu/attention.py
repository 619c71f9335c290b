"""Attention on the CPU that skips masked keys, which torch's kernel does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..precision import in_full_precision

_QUERIES = 48  # queries per block; 32 to 64 perform alike


@in_full_precision  # the gradient in bfloat16 takes four times as long as in float32
def sdpa_in_parts(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, is_causal: bool
) -> Tensor:
    """Compute F.scaled_dot_product_attention for a block of queries at a time, over the keys that it sees."""
    kernel = F.scaled_dot_product_attention
    if mask is None or mask.dtype != torch.bool:
        return kernel(q, k, v, mask, dropout, is_causal)
    queries, masks = (torch.split(x, _QUERIES, dim=-2) for x in (q, mask))
    seen = []
    for allowed in masks:
        columns = allowed.flatten(0, -2).any(0).nonzero().flatten()
        seen.append(slice(int(columns[0]), int(columns[-1]) + 1))
    parts = [
        kernel(some, keys, values, allowed[..., span], dropout).transpose(1, 2)
        for some, allowed, keys, values, span in zip(
            queries, masks, _spans(k, seen), _spans(v, seen), seen, strict=True
        )
    ]
    return torch.cat(parts, dim=1).transpose(1, 2)  # the layout of the kernel's results


def _spans(x: Tensor, spans: Sequence[slice]) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = _Spans.apply(x, spans)  # type: ignore[no-untyped-call]
    return found


class _Spans(torch.autograd.Function):
    """Overlapping spans of x (B, H, S, E). Autograd would sum a gradient of full size for each of them."""

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
