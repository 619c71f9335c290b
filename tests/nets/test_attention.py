"""Attention: hand-written gradients and shortcuts agree with the formulas."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from loxodon.nets import attention
from loxodon.nets.attention import RingSight, SequenceSight, attend, prepared, sdpa
from loxodon.nets.head_kinds import KINDS, Heads
from loxodon.nets.mlp import RMSNorm
from loxodon.nets.positions import HeadPositions, PositionFeatures, rotate

from ..rounding import assert_equal_but_for_rounding

pytestmark = pytest.mark.kernels
B, L, H, E, FIXED = 3, 7, 4, 6, 1
NUM_OPS = 1_000  # sums over heads and timesteps


def positions() -> PositionFeatures:
    times = torch.arange(L)[:, None] + torch.tensor([[[0]], [[5]], [[90]]])
    kinds = Heads.named(["fixed", "rotary", "rotary", "content"], H, setting="heads")
    features: PositionFeatures = HeadPositions(H * E, kinds, L)(times, torch.float32)
    return features


def with_gradients(outputs: tuple[Tensor, ...], inputs: list[Tensor]) -> list[Tensor]:
    felt = [torch.linspace(-1, 2, x.numel()).view(x.shape).sin() for x in outputs]
    return [*outputs, *torch.autograd.grad(outputs, inputs, felt)]


@pytest.mark.parametrize("has_graph", [True, False])
def test_queries_and_keys_are_normed_and_rotated_as_by_autograd(has_graph: bool) -> None:
    qkv, gains = torch.randn(B, L, 3, H, E, requires_grad=True), torch.randn(2, E, requires_grad=True)
    added, features = torch.randn(B, L, 2, FIXED, E, requires_grad=True), positions()
    inputs = [qkv, added, gains]
    both = qkv[:, :, :2] + torch.nn.functional.pad(added, (0, 0, 0, H - FIXED))
    normed = both * (both.square().mean(-1, keepdim=True) + RMSNorm.EPS).rsqrt() * gains[:, None]
    turned = rotate(normed, features.cos, features.sin)
    if not has_graph:
        with torch.no_grad():
            found, _ = prepared(qkv.clone(), added, gains, RMSNorm.EPS, features)
        assert_equal_but_for_rounding(found, turned.detach(), num_ops=NUM_OPS)
        return
    expected = with_gradients((turned, qkv[:, :, 2]), inputs)
    ours = with_gradients(prepared(qkv, added, gains, RMSNorm.EPS, features), inputs)
    for one, other in zip(ours, expected, strict=True):
        assert_equal_but_for_rounding(one, other, num_ops=NUM_OPS)


def test_rotation_turns_pairs_of_features_by_time() -> None:
    """The rotation is that of complex numbers; the first and the last head are not rotated."""
    x, features = torch.randn(B, L, 2, H, E), positions()
    pairs = torch.complex(*x.chunk(2, dim=-1))
    times = torch.arange(L) + torch.tensor([[0], [5], [90]])
    angles = times[..., None] * 10_000.0 ** -(torch.arange(3) / 3)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, :, None, None]
    turned[..., [0, -1], :] = pairs[..., [0, -1], :]
    found = rotate(x, features.cos, features.sin)
    torch.testing.assert_close(found, torch.cat([turned.real, turned.imag], dim=-1), rtol=0, atol=1e-5)


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, lag: Tensor, kinds: list[str], sink: Tensor | None
) -> Tensor:
    """The equations of `head_kinds`, one head at a time; seen and lag (B, L, S)."""
    heads, num_fading = [], kinds.count("alibi")
    for h, kind in enumerate(kinds):
        logits = q[:, h] @ k[:, h].mT * E**-0.5
        if kind == "alibi":
            logits = logits - 2.0 ** (-8.0 * (kinds[: h + 1].count("alibi")) / num_fading) * lag
        logits = logits.masked_fill(~seen, -torch.inf)
        if kind == "content":
            logits = torch.cat(
                [logits.masked_fill(lag == 0, -torch.inf), torch.zeros_like(logits[..., :1])], -1
            )
        if sink is not None:
            logits = torch.cat([logits, q[:, h] @ sink[h].mT * E**-0.5], -1)
        heads.append(logits.softmax(-1)[..., : k.shape[2]] @ v[:, h])
    return torch.stack(heads, dim=1)


RESETS = torch.zeros(2, 9, dtype=torch.bool)
RESETS[0, [0, 4]] = RESETS[1, 6] = True
SIGHTS = {  # queries, window, first timesteps of episodes, ages in keys before the sequence
    "causal": (9, 9, None, None),
    "in a window": (9, 4, None, None),
    "in episodes": (9, 9, RESETS, None),
    "in episodes and a window": (9, 4, RESETS, None),
    "after others": (6, 5, None, [2, 3]),
    "after others, in episodes": (6, 7, RESETS[:, 3:], [0, 3]),
}


@pytest.mark.parametrize("case", SIGHTS)
@pytest.mark.parametrize("kernel", [sdpa, None])
@pytest.mark.parametrize("has_sink", [False, True])
def test_heads_of_all_kinds_follow_their_equations(
    case: str, kernel: attention.Kernel | None, has_sink: bool
) -> None:
    """Whole sequences, windows, several episodes in a row, and sequences that continue others."""
    length, window, resets, ages = SIGHTS[case]
    num_before = 9 - length
    q = torch.randn(2, 8, length, E, requires_grad=True)
    k, v = (torch.randn(2, 8, 9, E, requires_grad=True) for _ in range(2))
    kinds = [*KINDS, "alibi", "content", "content"]
    heads = Heads.named(kinds, 8, setting="heads")
    sink = torch.randn(8, 1, E, requires_grad=True) if has_sink else None
    sight = SequenceSight(q[:, 0], window, resets, num_before, None if ages is None else torch.tensor(ages))
    found = attend(q, k, v, sight, heads, sink=sink, kernel=kernel)

    t = torch.arange(-num_before, length)
    lag = (t[num_before:, None] - t).expand(2, -1, -1)
    episode = torch.zeros(2, length) if resets is None else resets.cumsum(1)
    running = t[:num_before] >= -torch.tensor(ages or [0, 0])[:, None]
    of_key = torch.cat([running.long() - 1, episode], dim=1)
    seen = (lag >= 0) & (lag < window) & (episode[:, :, None] == of_key[:, None])
    expected = by_definition(q, k, v, seen, lag, [kind.name for kind in heads.kinds], sink)
    inputs = [x for x in (q, k, v, sink) if x is not None]
    for one, other in zip(with_gradients((found,), inputs), with_gradients((expected,), inputs), strict=True):
        assert_equal_but_for_rounding(one, other, num_ops=NUM_OPS)


def test_a_single_query_reads_a_ring_of_keys_as_a_sequence() -> None:
    """Three envs with one timestep, some timesteps, and more than the ring has slots for."""
    window, ages = 5, torch.tensor([0, 2, 12])
    heads = Heads.named([*KINDS, "alibi", "content", "content"], 8, setting="heads")
    q, k, v = torch.randn(3, 8, 1, E), torch.randn(3, 8, window, E), torch.randn(3, 8, window, E)
    found = attend(q, k, v, RingSight(ages, window, window), heads)
    for row, age in enumerate(ages.tolist()):
        newest_last = [t % window for t in range(max(age - window + 1, 0), age + 1)]
        inputs = (q[row, None], k[row, None, :, newest_last], v[row, None, :, newest_last])
        lag = torch.arange(len(newest_last) - 1, -1, -1)[None, None]
        kinds = [kind.name for kind in heads.kinds]
        expected = by_definition(*inputs, torch.ones_like(lag, dtype=torch.bool), lag, kinds, None)
        assert_equal_but_for_rounding(found[row], expected[0], num_ops=NUM_OPS)


def test_attention_within_a_window_sees_everything_that_the_mask_allows() -> None:
    """On the CPU, queries are processed in blocks with overlapping keys."""
    length = 130
    q, k, v = (torch.randn(2, H, length, E, requires_grad=True) for _ in range(3))
    resets = torch.zeros(2, length, dtype=torch.bool)
    resets[0, 20], resets[1, [70, 71]] = True, True
    sight, heads = SequenceSight(q[:, 0], 60, resets), Heads.named("plain", H, setting="heads")
    found, expected = (
        with_gradients((attend(q, k, v, sight, heads, kernel=kernel),), [q, k, v]) for kernel in (sdpa, None)
    )
    for one, other in zip(found, expected, strict=True):
        assert_equal_but_for_rounding(one, other, num_ops=NUM_OPS)


def attention_of_packed_rows(
    q: Tensor, k: Tensor, v: Tensor, of_q: Tensor, of_k: Tensor, *_: int, window_size: tuple[int, int]
) -> Tensor:
    """The result of torch's kernel for sequences of different lengths; (timesteps, H, E) each."""
    found = torch.zeros_like(q)
    for start, stop in pairwise(of_q.tolist()):
        lag = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        seen = (lag >= 0) & (lag <= window_size[0])
        episode = (x[start:stop].transpose(0, 1) for x in (q, k, v))
        found[start:stop] = scaled_dot_product_attention(*episode, seen).transpose(0, 1)
    return found


@pytest.mark.parametrize("num_before", [0, 2])
def test_packed_attention_is_that_with_a_mask(num_before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, window = torch.randn(B, H, L, E), 4
    k, v = torch.randn(2, B, H, num_before + L, E)
    resets = torch.zeros(B, L, dtype=torch.bool)
    resets[2, 0] = resets[1, 3] = True
    ages = torch.full((B,), num_before) if num_before else None
    heads, found = Heads.named(["plain"] * H, H, setting="heads"), []
    monkeypatch.setattr(attention, "_varlen_attention", lambda: attention_of_packed_rows)
    for is_packed in (False, True):
        monkeypatch.setattr(attention, "_can_be_packed", lambda *_, is_packed=is_packed: is_packed)
        sight = SequenceSight(q[:, 0], window, resets, num_before, ages)
        found.append(attend(q, k, v, sight, heads, kernel=sdpa))
    assert_equal_but_for_rounding(found[1], found[0], num_ops=NUM_OPS)
