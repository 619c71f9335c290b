"""Linear recurrences over a sequence, computed in chunks, for memories of linear cost.

All begin from a state, and none carries information across a timestep where `resets` is True. They compute in
float32 (or in float64 for such inputs), under autocast too. Lengths are arbitrary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from . import kernels
from .precision import in_full_precision

MIN_LOG_DECAY = -2.5
"""Least log decay per timestep if each key feature has its own: exp(2.5 * SHORT_CHUNK) fits into float32."""
CHUNK, SHORT_CHUNK = 64, 32
SCAN_CHUNK = 15
"""Not a power of two, so that rows of different chunks do not collide in the cache."""


def running_sum(x: Tensor) -> Tensor:
    """Sums (..., L, D) over each place of the last but one axis and those before it.

    On CUDA, torch's own sums depend on the order in which threads finish, and are an error if
    torch.use_deterministic_algorithms is on. A matrix product is not.
    """
    return _summed_by_product(x) if torch.are_deterministic_algorithms_enabled() else x.cumsum(-2)


@in_full_precision
def _summed_by_product(x: Tensor) -> Tensor:
    return torch.ones(x.shape[-2], x.shape[-2], dtype=x.dtype, device=x.device).tril() @ x


# --- one number per channel ----------------------------------------------------------------------------


def _scan(decay: Tensor, inputs: Tensor, initial: Tensor, angle: Tensor | None = None) -> Tensor:
    """Compute `linear_recurrence` in chunks of chunks, so that each operation covers many timesteps.

    With angles, compute `rotating_recurrence` in axes that rotate with the states, in which states only fade.
    The axes restart in each chunk.
    """
    length = inputs.shape[1]
    size = min(length, SCAN_CHUNK)

    def chunks(x: Tensor) -> Tensor:
        """Copy x (B, L, ...) to (B, C, size, ...)."""
        missing = -length % size
        padding = [0, 0] * (x.ndim - 2) + [0, missing]
        x = F.pad(x, padding) if missing else x.clone(memory_format=torch.contiguous_format)
        return x.view(len(x), -1, size, *x.shape[2:])

    states, kept = chunks(inputs), chunks(decay)
    if angle is not None:
        cos, sin = _axes(angle, torch.arange(1, size + 1, device=inputs.device)[:, None], inputs.dtype)
        states = complex_product(states, cos, -sin)
    for t in range(1, size):  # states of each chunk from a zero state, and decays since its beginning
        states[:, :, t].addcmul_(kept[:, :, t], states[:, :, t - 1])
        kept[:, :, t].mul_(kept[:, :, t - 1])
    starts = initial[:, None]
    if length > size:
        ends = states[:, :, -1] if angle is None else complex_product(states[:, :, -1], cos[-1], sin[-1])
        whole = None if angle is None else angle.double() * size
        starts = _before(initial, _scan(kept[:, :, -1], ends, initial, whole))
    states.addcmul_(kept, starts[:, :, None])
    states = states if angle is None else complex_product(states, cos, sin)
    return states.view(len(inputs), -1, *inputs.shape[2:])[:, :length]


def _axes(angle: Tensor, turns: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of angles after many turns, computed in float64 to keep their digits."""
    angles = turns * angle.double()
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _scan_back(decay: Tensor, grad: Tensor, angle: Tensor | None = None) -> Tensor:
    """The gradient of the `inputs` of a scan, from the gradient of its result."""
    following = torch.cat([torch.zeros_like(decay[:, :1]), decay[:, 1:].flip(1)], dim=1)
    back = None if angle is None else -angle
    return _scan(following, grad.flip(1), torch.zeros_like(grad[:, 0]), back).flip(1)


def _before(initial: Tensor, states: Tensor) -> Tensor:
    """The state before each timestep of a scan."""
    return torch.cat([initial[:, None], states[:, :-1]], dim=1)


class _LinearRecurrence(torch.autograd.Function):
    """A recurrence with its gradient, which is the same recurrence in reverse."""

    @staticmethod
    def forward(ctx: Any, decay: Tensor, inputs: Tensor, initial: Tensor) -> Tensor:
        states = _scan(decay, inputs, initial)
        ctx.save_for_backward(decay, initial, states)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        decay, initial, states = ctx.saved_tensors
        grad_inputs = _scan_back(decay, grad)
        return (
            (grad_inputs * _before(initial, states)).sum_to_size(decay.shape),
            grad_inputs,
            grad_inputs[:, 0] * decay[:, 0],
        )


@in_full_precision
def linear_recurrence(decay: Tensor, inputs: Tensor, initial: Tensor, resets: Tensor | None = None) -> Tensor:
    """Compute all h_t = decay_t * h_{t-1} + inputs_t, where h_{-1} is `initial`.

    Only products of decays and sums are formed, so nothing overflows that would not overflow in a loop.

    Args:
        decay: (B, L, ...) float in [0, 1], broadcast to the shape of `inputs`.
        inputs: (B, L, ...) float.
        initial: (B, ...) float.
        resets: (B, L) bool, True where h_{t-1} counts as zero.
    Returns: (B, L, ...) float.
    """
    decay = decay[(None,) * (inputs.ndim - decay.ndim)]
    decay = decay.expand(*inputs.shape[:2], *[-1] * (inputs.ndim - 2))
    if kernels.serve(inputs):
        return kernels.linear_recurrence(decay.expand_as(inputs), inputs, initial, resets)
    if resets is not None:
        decay = decay.masked_fill(resets.view(*resets.shape, *[1] * (inputs.ndim - 2)), 0.0)
    states = _LinearRecurrence.apply(decay, inputs, initial.to(inputs.dtype))  # type: ignore[no-untyped-call]
    return cast("Tensor", states)


@in_full_precision
def reverse_recurrence(decay: Tensor, inputs: Tensor) -> Tensor:
    """Compute all h_t = decay_t * h_{t+1} + inputs_t, where h_L is 0; arguments as in `linear_recurrence`.

    Kernels are not used: they need logarithms of decays, which round a discount close to 1 too coarsely.
    """
    states = _LinearRecurrence.apply(decay.flip(1), inputs.flip(1), torch.zeros_like(inputs[:, 0]))  # type: ignore[no-untyped-call]
    return cast("Tensor", states).flip(1)


class _RotatingRecurrence(torch.autograd.Function):
    """The same as `_LinearRecurrence`, for complex numbers."""

    @staticmethod
    def forward(
        ctx: Any, decay: Tensor, angle: Tensor, inputs: Tensor, initial: Tensor, kept: Tensor
    ) -> Tensor:
        states = _scan(kept * decay, inputs, initial, angle)
        ctx.save_for_backward(decay, angle, initial, kept, states)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        decay, angle, initial, kept, states = ctx.saved_tensors
        grad_inputs = _scan_back(kept * decay, grad, angle)
        (x, y), (u, v) = _before(initial, states).unbind(-2), (grad_inputs * kept).unbind(-2)
        of_factor = torch.stack([torch.addcmul(x * u, y, v), torch.addcmul(x * v, y, u, value=-1)], dim=-2)
        of_factor = complex_product(of_factor.sum((0, 1)), angle.cos(), -angle.sin())
        of_initial = complex_product(grad_inputs[:, 0] * kept[:, 0] * decay, angle.cos(), -angle.sin())
        return of_factor[0], of_factor[1] * decay, grad_inputs, of_initial, None


@in_full_precision
def rotating_recurrence(
    decay: Tensor, angle: Tensor, inputs: Tensor, initial: Tensor, resets: Tensor | None = None
) -> Tensor:
    """Compute all h_t = decay * exp(i angle) * h_{t-1} + inputs_t, complex, in real arithmetic.

    Args:
        decay: (D,) float in [0, 1].
        angle: (D,) float, radians per timestep.
        inputs: (B, L, 2, D) float, real and imaginary parts.
        initial: (B, 2, D) float.
        resets: (B, L) bool, True where h_{t-1} counts as zero.
    Returns: (B, L, 2, D) float.
    """
    kept = inputs.new_ones(1, inputs.shape[1]) if resets is None else (~resets).to(inputs.dtype)
    states = _RotatingRecurrence.apply(decay, angle, inputs, initial.to(inputs.dtype), kept[..., None, None])  # type: ignore[no-untyped-call]
    return cast("Tensor", states)


def complex_product(x: Tensor, real: Tensor, imaginary: Tensor) -> Tensor:
    """Multiply x (..., 2, D), as complex numbers, by those with the given parts, each (..., D)."""
    u, v = x.unbind(-2)
    return torch.stack(
        [
            torch.addcmul(u * real, v, imaginary, value=-1),
            torch.addcmul(u * imaginary, v, real),
        ],
        dim=-2,
    )


def rotating_step(decay: Tensor, angle: Tensor, inputs: Tensor, state: Tensor) -> Tensor:
    """One timestep of `rotating_recurrence`: inputs and state (N, 2, D)."""
    return inputs + complex_product(state, decay * angle.cos(), decay * angle.sin())


# --- one matrix per head -------------------------------------------------------------------------------


@dataclass
class _Decays:
    """Decay inside chunks of c timesteps, restarting at resets; E is 1, or K if each key feature has its own.

    within: (B, C, H, c, E), log decay since the beginning of the chunk or of the newest episode in it.
    visible: (B, C, 1, c, c) or (c, c) bool, True on earlier timesteps (the columns) of the same episode.
    from_start: (B, C, H, c, E), factor of the state before the chunk in the read of a timestep.
    to_end: (B, C, H, c, E), factor of the write of a timestep in the state after the chunk.
    whole: (B, C, H, E), factor of the state before the chunk in the state after it.
    """

    within: Tensor
    visible: Tensor
    from_start: Tensor
    to_end: Tensor
    whole: Tensor

    @classmethod
    def of(cls, log_decay: Tensor, resets: Tensor | None, size: int) -> _Decays:
        """Decays of log_decay (B, L, H, E), with resets (B, L) bool."""
        visible = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril()
        chunks = _chunked(log_decay, size)
        if resets is None:
            within = running_sum(chunks)
            to_end = (within[..., -1:, :] - within).exp()
            from_start = within.exp()
            return cls(within, visible, from_start, to_end, from_start[..., -1, :])
        begins = _chunked(resets[:, :, None, None], size)  # (B, C, 1, c, 1)
        episode = begins.long().cumsum(-2)
        visible = visible & (episode == episode.mT)
        # Sums within an episode are a matrix product, because differences of cumulative sums would include
        # rounding errors of earlier episodes.
        chunks = rearrange(chunks.masked_fill(begins, 0.0), "b n h c e -> b n c (h e)")
        within = visible[:, :, 0].to(chunks.dtype) @ chunks
        within = rearrange(within, "b n c (h e) -> b n h c e", h=log_decay.shape[2])
        to_end = (within[..., -1:, :] - within).masked_fill(episode != episode[..., -1:, :], -torch.inf).exp()
        from_start = within.masked_fill(episode > 0, -torch.inf).exp()
        return cls(within, visible, from_start, to_end, from_start[..., -1, :])

    def weights(self) -> Tensor:
        """(B, C, H, c, c), decay from each timestep (column) to each later one; for E = 1."""
        hidden = torch.where(self.visible, 0.0, -torch.inf).to(self.within.dtype)
        return (self.within + (-self.within).mT).add_(hidden).exp_()


def _chunked(x: Tensor, size: int) -> Tensor:
    """Split x (B, L, H, E) into (B, C, H, size, E), padded by zeros (no write, no decay, no reset)."""
    missing = -x.shape[1] % size
    x = F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x
    return rearrange(x, "b (n c) h e -> b n h c e", c=size)


def _unchunked(x: Tensor, length: int) -> Tensor:
    return rearrange(x, "b n h c e -> b (n c) h e")[:, :length]


@in_full_precision
def matrix_recurrence(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_decay: Tensor,
    initial: Tensor,
    resets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute S_t = exp(log_decay_t) S_{t-1} + k_t v_t^T, read as y_t = S_t^T q_t, as matrix products.

    Inside a chunk this is attention with decaying weights; states connect the chunks.

    Args:
        queries: (B, L, H, K) float; the head axis may be 1 if all heads share them.
        keys: the same.
        values: (B, L, H, V) float.
        log_decay: (B, L, H, 1) float, at most 0; or (B, L, H, K), one for each row of S, at least
            `MIN_LOG_DECAY`.
        initial: (B, H, K, V) float, the state before the first timestep.
        resets: (B, L) bool, True where S_{t-1} counts as zero.
    Returns: y (B, L, H, V) and the state after the last timestep (B, H, K, V), float.
    Source: Yang et al. 2024, arXiv:2312.06635, section 4; for one decay per head Dao & Gu 2024,
        arXiv:2405.21060, section 6.
    """
    if kernels.serve(queries, queries.shape[-1]):
        parts = {"q": queries, "k": keys, "v": values, "g": log_decay}
        return kernels.matrix_recurrence(parts, initial, resets)
    length, per_key = queries.shape[1], log_decay.shape[-1] > 1
    size = min(length, SHORT_CHUNK if per_key else CHUNK)
    q, k, v = (_chunked(x, size) for x in (queries, keys, values))
    decays = _Decays.of(log_decay, resets, size)
    if per_key:
        scores = (q * decays.within.exp()) @ (k * (-decays.within).exp()).mT
        scores = scores.masked_fill(~decays.visible, 0.0)
    else:
        scores = (q @ k.mT) * decays.weights()
    shared = q.shape[2] < v.shape[2]  # a single product for all heads; decays multiply their values
    written = _for_all_heads(k.mT, v * decays.to_end) if shared else (k * decays.to_end).mT @ v
    ends = linear_recurrence(decays.whole[..., None], written, initial)
    starts = _before(initial.to(ends.dtype), ends)
    if shared:
        y = torch.addcmul(scores @ v, _for_all_heads(q, starts), decays.from_start)
    else:
        y = scores @ v + (q * decays.from_start) @ starts
    return _unchunked(y, length), ends[:, -1]


def _for_all_heads(x: Tensor, y: Tensor) -> Tensor:
    """Matrix product of x (B, C, 1, I, J) and y (B, C, H, J, E)."""
    product = x[:, :, 0] @ rearrange(y, "b n h j e -> b n j (h e)")
    return rearrange(product, "b n i (h e) -> b n h i e", h=y.shape[2])


def matrix_step(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One timestep of `matrix_recurrence`: (N, H, K), (N, H, K), (N, H, V), (N, H, 1 or K), (N, H, K, V)."""
    written = key[..., None] * value[..., None, :]
    state = torch.addcmul(written, log_decay.exp()[..., None], state)
    return _read(query, state), state


def _read(query: Tensor, state: Tensor) -> Tensor:
    """Read state (N, H, K, V) by query (N, H, K); returns (N, H, V)."""
    return (query.to(state.dtype)[..., None, :] @ state).squeeze(-2)


@in_full_precision
def delta_recurrence(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    rate: Tensor,
    log_decay: Tensor,
    initial: Tensor,
    resets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute S_t = D + rate_t k_t (v_t - D^T k_t)^T with D = exp(log_decay_t) S_{t-1}, read by S_t^T q_t.

    Each write replaces the value of its key. Inside a chunk the corrected values solve a triangular system.

    Args:
        queries: (B, L, H, K) float.
        keys: (B, L, H, K) float of length 1.
        values: (B, L, H, V) float.
        rate: (B, L, H, 1) float in [0, 1].
        log_decay: (B, L, H, 1) float, at most 0.
        initial: (B, H, K, V) float, the state before the first timestep.
        resets: (B, L) bool, True where S_{t-1} counts as zero.
    Returns: y (B, L, H, V) and the state after the last timestep (B, H, K, V), float.
    Source: Yang et al. 2024, arXiv:2412.06464, section 3.3.
    """
    if kernels.serve(queries, queries.shape[-1]):
        parts = {"q": queries, "k": keys, "v": values, "beta": rate, "g": log_decay}
        return kernels.delta_recurrence(parts, initial, resets)
    length = queries.shape[1]
    size = min(length, SHORT_CHUNK)  # systems are solved row by row
    q, k, v, beta = (_chunked(x, size) for x in (queries, keys, values, rate))
    decays = _Decays.of(log_decay, resets, size)
    weights, num_values = decays.weights(), v.shape[-1]
    rhs = torch.cat([beta * v, beta * decays.from_start * k], dim=-1)
    system = beta * weights * (k @ k.mT)  # only the part below the diagonal is read
    solved = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
    new, replaced = solved[..., :num_values], solved[..., num_values:]
    scores, reads, writes = (q @ k.mT) * weights, q * decays.from_start, (k * decays.to_end).mT
    # A whole chunk changes the state linearly: S -> passed S + added.
    kept = torch.diag_embed(decays.whole.expand(*k.shape[:3], k.shape[-1]))
    passed, added = kept - writes @ replaced, writes @ new
    passed, added = (rearrange(x, "b n h i j -> n (b h) i j") for x in (passed, added))
    states = [initial.to(new.dtype).flatten(0, 1)]
    for factor, term in zip(passed, added, strict=True):
        states.append(torch.baddbmm(term, factor, states[-1]))
    starts = rearrange(torch.stack(states[:-1]), "n (b h) i j -> b n h i j", b=len(q))
    y = reads @ starts + scores @ (new - replaced @ starts)
    return _unchunked(y, length), states[-1].view_as(initial)


def delta_step(
    query: Tensor, key: Tensor, value: Tensor, rate: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One timestep of `delta_recurrence`: (N, H, K), (N, H, K), (N, H, V), (N, H, 1) twice, (N, H, K, V)."""
    state = log_decay.exp()[..., None] * state
    corrected = rate * (value - _read(key, state))
    state = torch.addcmul(state, key[..., None].to(state.dtype), corrected[..., None, :])
    return _read(query, state), state
