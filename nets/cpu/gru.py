"""Training of small gated recurrent units on the CPU, where torch's own backward pass is slow.

Torch records a dozen operations per timestep and sums the gradient of the weights step by step. Here the
forward pass is torch's without recording, and the backward pass recomputes the gates of all timesteps at once
from the outputs; only four operations remain per timestep. This is up to twice as fast for small batches and
widths, and slower for large ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from . import serves

# Above this batch size times width, torch's own GRU is as fast (16 to 24 rows of 64, 8 to 16 of 128).
_MANY = 1536
# The same limit if torch has to stop at every reset (20 rows of 128).
_MANY_WITH_RESETS = 2560


def is_faster_for(seq: Tensor, width: int, *, has_resets: bool = False) -> bool:
    """True if `run_gru` should replace torch.nn.GRU: small inputs, with gradients, on the CPU.

    seq: (B, L, D). width: H. False under autocast, whose precision only torch.nn.GRU follows.
    """
    is_small = seq.shape[0] * width <= (_MANY_WITH_RESETS if has_resets else _MANY)
    return is_small and torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu") and serves(seq)


def run_gru(
    seq: Tensor, state: Tensor, layers: Sequence[Sequence[Tensor]], resets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute torch.nn.GRU, batch first, with the same gradients; second derivatives are not supported.

    Args:
        seq: (B, L, D) float.
        state: (n_layers, B, H) float.
        layers: the weights of each layer, in the order of torch.nn.GRU.all_weights.
        resets: (B, L) bool, True where the previous state counts as zero.
    Returns: (B, L, H) and the state after the last timestep.
    """
    x, last = rearrange(seq, "b l d -> l b d").contiguous(), []
    forgets = None if resets is None else rearrange(resets, "b l -> l b 1")
    for weights, before in zip(layers, state, strict=True):
        x = _GRULayer.apply(x, before, forgets, *weights)  # type: ignore[no-untyped-call]
        last.append(x[-1])
    return rearrange(x, "l b h -> b l h"), torch.stack(last)


class _GRULayer(torch.autograd.Function):
    """One layer, time first: x (L, B, D), initial state (B, H) -> states after each timestep (L, B, H).

    forgets: (L, B, 1) bool or None, True where the previous state counts as zero.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, before: Tensor, forgets: Tensor | None, *weights: Tensor) -> Tensor:
        ctx.cuts = [] if forgets is None else forgets.any(1).flatten().nonzero().flatten().tolist()
        ctx.forgets, parts, state = forgets, [], before
        for start, stop in pairwise(sorted({0, *ctx.cuts, len(x)})):  # one call between two resets
            if forgets is not None:
                state = state.masked_fill(forgets[start], 0.0)
            parts.append(torch.gru(x[start:stop], state[None], weights, True, 1, 0.0, False, False, False)[0])
            state = parts[-1][-1]
        after = torch.cat(parts)
        ctx.save_for_backward(x, before, after, *weights)
        return after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, first, after, w_in, w_state, b_in, b_state = ctx.saved_tensors
        before = torch.cat([first[None], after[:-1]])
        if ctx.forgets is not None:
            before.masked_fill_(ctx.forgets, 0.0)
        in_r, in_z, in_n = F.linear(x, w_in, b_in).chunk(3, -1)
        state_r, state_z, state_n = F.linear(before, w_state, b_state).chunk(3, -1)
        r, z = torch.sigmoid(in_r + state_r), torch.sigmoid(in_z + state_z)
        n = torch.tanh(in_n + r * state_n)
        # Derivatives of a state with respect to the inputs of its gates: factors of the state's gradient.
        by_n = (1.0 - z) * (1.0 - n.square())
        by_r, by_z = by_n * state_n * r * (1.0 - r), (before - n) * z * (1.0 - z)
        factors = torch.stack([by_r, by_z, by_n * r], dim=2)  # (L, B, 3, H), for the state's inputs
        grads, per_gate = torch.empty_like(after), torch.empty_like(factors)
        carried, cuts = torch.zeros_like(first), set(ctx.cuts)
        steps = (range(len(x)), *(s.unbind(0) for s in (grad, z, factors, grads, per_gate)))
        for t, own, keep, factor, total, gates in zip(*map(reversed, steps), strict=True):
            torch.add(own, carried, out=total)
            torch.mul(factor, total[:, None], out=gates)
            carried = torch.addmm(total * keep, gates.flatten(1), w_state)
            if t in cuts:
                carried.masked_fill_(ctx.forgets[t], 0.0)
        from_state = rearrange(per_gate, "l b gate h -> (l b) (gate h)")
        from_in = torch.cat([from_state[:, : -n.shape[-1]], (grads * by_n).flatten(0, 1)], dim=1)
        flat_x, flat_before = x.flatten(0, 1), before.flatten(0, 1)
        return (
            (from_in @ w_in).view_as(x),
            carried,
            None,
            from_in.t() @ flat_x,
            from_state.t() @ flat_before,
            from_in.sum(0),
            from_state.sum(0),
        )
