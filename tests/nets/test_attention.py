"""Attention: own gradients and shortcuts give what the formulas give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loxodon.nets import attention
from loxodon.nets.attention import (
    attention_mask,
    count,
    normed_and_turned,
    plain_attention,
    sdpa,
    without_present,
)
from loxodon.nets.head_kinds import HeadKinds
from loxodon.nets.mlp import RMSNorm
from loxodon.nets.positions import HeadPositions, Places, rotate

from ..rounding import assert_equal_but_for_rounding

pytestmark = pytest.mark.kernels

B, L, H, E, FIXED = 3, 7, 4, 6, 1
NUM_OPS = 1_000  # sums over heads and timesteps


def positions() -> Places:
    times = torch.arange(L)[:, None] + torch.tensor([[[0]], [[5]], [[90]]])
    kinds = HeadKinds.named(["fixed", "rotary", "rotary", "content"], H, setting="heads")
    places: Places = HeadPositions(H * E, kinds, L)(times, torch.float32)
    return places


def with_gradients(outputs: tuple[Tensor, ...], inputs: list[Tensor]) -> list[Tensor]:
    felt = [torch.linspace(-1, 2, x.numel()).view(x.shape).sin() for x in outputs]
    return [*outputs, *torch.autograd.grad(outputs, inputs, felt)]


def test_queries_and_keys_are_normed_and_turned_as_by_autograd() -> None:
    qkv, gains = torch.randn(B, L, 3, H, E, requires_grad=True), torch.randn(2, E, requires_grad=True)
    added, places = torch.randn(B, L, 2, FIXED, E, requires_grad=True), positions()
    inputs = [qkv, added, gains]
    found = with_gradients(normed_and_turned(qkv, added, gains, RMSNorm.EPS, places), inputs)

    q, k, v = qkv.unbind(2)
    q, k = (
        torch.cat([x[:, :, :FIXED] + added[:, :, i], x[:, :, FIXED:]], dim=2) for i, x in enumerate((q, k))
    )
    turned = [
        rotate(x * (x.square().mean(-1, keepdim=True) + RMSNorm.EPS).rsqrt() * gain, places.cos, places.sin)
        for x, gain in zip((q, k), gains, strict=True)
    ]
    expected = with_gradients(tuple(x.transpose(1, 2) for x in (*turned, v)), inputs)
    for one, other in zip(found, expected, strict=True):
        assert_equal_but_for_rounding(one, other, num_ops=NUM_OPS)


def test_rotation_turns_pairs_of_features_by_time() -> None:
    """As complex numbers; the first and the last head are not turned."""
    x, places = torch.randn(B, L, H, E), positions()
    pairs = torch.complex(*x.chunk(2, dim=-1))
    times = torch.arange(L) + torch.tensor([[0], [5], [90]])
    angles = times[..., None] * 10_000.0 ** -(torch.arange(3) / 3)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, :, None]
    turned[:, :, [0, -1]] = pairs[:, :, [0, -1]]
    found = rotate(x, places.cos, places.sin)
    torch.testing.assert_close(found, torch.cat([turned.real, turned.imag], dim=-1), rtol=0, atol=1e-5)


def test_attention_to_earlier_timesteps_sees_these_and_a_key_of_zeros() -> None:
    """Of a whole sequence, within a window and episodes, with timesteps before it, and with biases."""
    q, k, v = (torch.randn(2, H, 9, E) for _ in range(3))
    resets = torch.zeros(2, 6, dtype=torch.bool)
    resets[0, 2] = resets[1, 4] = True
    visible = torch.tensor([[False, True, True], [True, True, True]])
    t, windowed = torch.arange(9), attention_mask(q.transpose(1, 2), 4)
    before = attention_mask(q[:, :, 3:, 0].transpose(1, 2), 5, resets, visible)
    assert windowed is not None
    assert before is not None
    biases = torch.where(windowed, -0.5 * (t[:, None] - t), -torch.inf)
    for queries, mask in ((q, None), (q, windowed), (q[:, :, 3:], before), (q, biases)):
        length = queries.shape[2]
        bias = (t[:, None] >= t).log() if mask is None else mask.log() if mask.dtype == torch.bool else mask
        logits = queries @ k.mT * E**-0.5 + bias
        logits = logits.masked_fill(torch.eye(9, dtype=torch.bool)[9 - length :], -torch.inf)
        share = torch.cat([torch.zeros(2, H, length, 1), logits], dim=-1).softmax(-1)
        found = sdpa(queries, *without_present(k, v, mask), 0.0)
        assert_equal_but_for_rounding(found, share[..., 1:] @ v, num_ops=NUM_OPS)


def test_attention_within_a_window_looks_at_all_that_the_mask_shows() -> None:
    """Queries are taken in parts, whose keys overlap."""
    length = 130
    q, k, v = (torch.randn(2, H, length, E, requires_grad=True) for _ in range(3))
    resets = torch.zeros(2, length, dtype=torch.bool)
    resets[0, 20], resets[1, [70, 71]] = True, True
    mask = attention_mask(q[:, 0], 60, resets)
    found, expected = (
        with_gradients((attend(q, k, v, mask, 0.0),), [q, k, v]) for attend in (sdpa, plain_attention)
    )
    for one, other in zip(found, expected, strict=True):
        assert_equal_but_for_rounding(one, other, num_ops=NUM_OPS)


def test_counts_are_sums_over_the_keys_that_fit_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_COUNTING_QUERIES", 4)
    inputs = [torch.randn(2, H, 9, E, requires_grad=True) for _ in range(3)]
    q, k, v = inputs
    resets = torch.zeros(2, 9, dtype=torch.bool)
    resets[1, 5] = True
    episodes = attention_mask(q[:, 0], 6, resets)
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    assert episodes is not None
    for mask, seen in ((None, causal), (episodes, episodes), (episodes.log(), episodes)):
        found = with_gradients((count(q, k, v, mask, 0.5),), inputs)
        sums = ((q @ k.mT * E**-0.5 - 0.5).sigmoid() * seen) @ v
        for one, other in zip(found, with_gradients(((sums / 32).asinh(),), inputs), strict=True):
            assert_equal_but_for_rounding(one, other, num_ops=NUM_OPS)
