"""Policies over actions of several factors, against torch's own distributions."""

from __future__ import annotations

from itertools import product
from typing import Any

import gin
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical as Reference
from torch.distributions import kl_divergence

from loxodon.nets import Actor, MultiCategorical

NVECS = [(2, 3, 4), (3, 3), (5,), (1, 2)]


def references(params: Tensor, nvec: tuple[int, ...]) -> list[Reference]:
    return [Reference(logits=part) for part in params.split(nvec, dim=-1)]


def one_hots(indices: Tensor, nvec: tuple[int, ...]) -> Tensor:
    parts = [torch.nn.functional.one_hot(indices[..., k], n) for k, n in enumerate(nvec)]
    return torch.cat(parts, dim=-1).float()


@pytest.mark.parametrize("nvec", NVECS)
def test_numbers_are_those_of_independent_factors(nvec: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    params, other = torch.randn(2, 6, 7, sum(nvec)) * 3
    policy, second = (MultiCategorical.for_nvec(nvec)(p) for p in (params, other))
    factors, second_factors = references(params, nvec), references(other, nvec)
    indices = torch.stack([f.sample() for f in factors], dim=-1)
    expected = sum(f.log_prob(indices[..., k]) for k, f in enumerate(factors))
    torch.testing.assert_close(policy.log_prob(one_hots(indices, nvec)), expected[..., None])  # type: ignore[index]
    entropy = torch.stack([f.entropy() for f in factors]).sum(0)
    torch.testing.assert_close(policy.entropy(), entropy[..., None])
    kl = torch.stack([kl_divergence(a, b) for a, b in zip(factors, second_factors, strict=True)]).sum(0)
    torch.testing.assert_close(policy.kl(second), kl[..., None])
    torch.testing.assert_close(policy.kl(policy), torch.zeros(6, 7, 1))
    modes = torch.stack([f.probs.argmax(-1) for f in factors], dim=-1)
    assert torch.equal(policy.act(sample=False), modes)
    assert policy.act(sample=False).dtype == torch.int64
    assert torch.equal(policy.mode(), one_hots(modes, nvec))


def test_samples_follow_the_probabilities_of_the_pairs() -> None:
    torch.manual_seed(0)
    nvec = (2, 3)
    params = torch.tensor([0.0, 1.0, 0.5, -1.0, 2.0])
    p, q = (f.probs for f in references(params, nvec))
    policy = MultiCategorical(params.expand(20_000, 5), nvec)
    parts = policy.sample().split(nvec, dim=-1)
    assert all(part.sum(-1).eq(1).all() for part in parts)
    for indices in (policy.act(sample=True), torch.stack([part.argmax(-1) for part in parts], dim=-1)):
        for i, j in product(range(2), range(3)):
            share = ((indices[:, 0] == i) & (indices[:, 1] == j)).float().mean()
            assert abs(share - p[i] * q[j]) < 0.015


@pytest.mark.parametrize("nvec", [(2, 3), (3, 3)])
def test_samples_are_one_hot_with_the_gradient_of_their_relaxation(nvec: tuple[int, ...]) -> None:
    """On average, the gradient of an expected value that is linear in the action comes out nearly right."""
    torch.manual_seed(0)
    params, value = torch.randn(sum(nvec)), torch.randn(sum(nvec))
    exact = params.clone().requires_grad_()
    probs = torch.cat([f.probs for f in references(exact, nvec)])
    (probs * value).sum().backward()
    leaf = params.clone().requires_grad_()
    sample = MultiCategorical(leaf.expand(40_000, -1), nvec, temperature=1.0).sample()
    assert set(sample.unique().tolist()) == {0.0, 1.0}
    assert all(part.sum(-1).eq(1).all() for part in sample.split(nvec, dim=-1))
    (sample * value).sum(-1).mean().backward()
    assert leaf.grad is not None
    assert exact.grad is not None
    assert torch.nn.functional.cosine_similarity(leaf.grad, exact.grad, dim=0) > 0.95


def test_a_factor_that_is_certain_and_one_logit_far_below_stay_finite() -> None:
    params = torch.tensor([[1000.0, 0.0, -1000.0, 0.0, 0.0]], requires_grad=True)
    policy = MultiCategorical(params, (2, 3))
    total = policy.entropy() + policy.log_prob(policy.sample()) + policy.sample().sum() + policy.kl(policy)
    total.sum().backward()
    assert params.grad is not None
    assert torch.isfinite(params.grad).all()


def test_an_actor_makes_them_and_gin_sets_the_temperature() -> None:
    gin.clear_config()
    gin.parse_config("MultiCategoricalType.temperature = 0.5")
    try:
        actor = Actor(8, 5, 2, MultiCategorical.for_nvec((2, 3)), d_hidden=16)
    finally:
        gin.clear_config()
    policy: Any = actor(torch.randn(4, 8))
    assert policy.params.shape == (4, 2, 5)
    assert policy.temperature == 0.5
    assert policy.act(sample=True).shape == (4, 2, 2)


def test_a_temperature_of_zero_is_refused() -> None:
    gin.parse_config("MultiCategoricalType.temperature = 0.0")
    try:
        with pytest.raises(ValueError, match=r"MultiCategoricalType.temperature is 0.0.*above 0. Fix: 1.0"):
            MultiCategorical.for_nvec((2, 3))
    finally:
        gin.clear_config()
