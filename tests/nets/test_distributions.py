"""Policies against torch's own distributions, and the cases where those would not be finite."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import gin
import pytest
import torch
from torch import Tensor
from torch import distributions as reference

from loxodon.nets import (
    Bernoulli,
    Beta,
    Categorical,
    Gaussian,
    GaussianMixture,
    MultiCategorical,
    MultiCategoricalType,
    PolicyDistribution,
    TanhGaussian,
)

KINDS: dict[str, tuple[Any, int]] = {  # the constructor of a policy, and its number of parameters
    "categorical": (Categorical, 4),
    "factors of several sizes": (MultiCategoricalType((2, 3, 4)), 9),
    "factors of one size": (MultiCategoricalType((3, 3)), 6),
    "one factor": (MultiCategoricalType((5,)), 5),
    "a factor without choice": (MultiCategoricalType((1, 2)), 3),
    "bits": (Bernoulli, 3),
    "gaussian": (Gaussian, 4),
    "beta": (Beta, 4),
    "tanh gaussian": (TanhGaussian, 4),
}


@pytest.mark.parametrize("kind", [Categorical, MultiCategoricalType((3,)), Bernoulli])
def test_infinite_logits_mask_actions(kind: Any) -> None:
    policy = kind(torch.tensor([[0.5, 1.0, -math.inf]]))
    action = policy.mode()
    assert torch.isfinite(policy.log_prob(action)).all()
    assert torch.isfinite(policy.entropy()).all()
    assert action[0, 2] == 0.0


def factors(policy: Any) -> list[Any]:
    """Torch's distributions of the independent parts of an action, before a tanh or stretching."""
    if isinstance(policy, Bernoulli):
        return [reference.OneHotCategorical(logits=part.log()) for part in policy.probs.unbind(-2)]
    if isinstance(policy, Beta):
        ones = (1.0001 + torch.nn.functional.softplus(part) for part in policy.params.chunk(2, dim=-1))
        return [reference.Independent(reference.Beta(*ones), 1)]
    if isinstance(policy, Categorical | MultiCategorical):
        nvec = getattr(policy, "nvec", (policy.params.shape[-1],))
        return [reference.OneHotCategorical(logits=part) for part in policy.params.split(nvec, dim=-1)]
    return [reference.Independent(reference.Normal(policy.loc, policy.log_std.exp()), 1)]


def log_prob(policy: PolicyDistribution, action: Tensor) -> Tensor:
    parts = factors(policy)
    if isinstance(policy, TanhGaussian):
        parts = [reference.TransformedDistribution(parts[0], reference.TanhTransform())]
    if isinstance(policy, Beta):
        stretch = reference.AffineTransform(-1.0, 2.0, event_dim=1)
        parts = [reference.TransformedDistribution(parts[0], stretch)]
    pieces = action.split([part.event_shape[0] for part in parts], dim=-1)
    return sum(part.log_prob(piece)[..., None] for part, piece in zip(parts, pieces, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_and_entropies_equal_those_of_torch(kind: str) -> None:
    torch.manual_seed(0)
    make, num_params = KINDS[kind]
    policy, other = (make(params) for params in torch.randn(2, 6, 7, num_params))
    action = policy.sample()
    if kind == "tanh gaussian":
        action = 0.9 * action  # at the bounds, torch's own is not finite
    torch.testing.assert_close(policy.log_prob(action), log_prob(policy, action), rtol=1e-4, atol=1e-4)
    pairs = zip(factors(policy), factors(other), strict=True)
    divergence = sum(reference.kl_divergence(one, two) for one, two in pairs)
    torch.testing.assert_close(policy.kl(other), divergence[..., None])  # type: ignore[index]
    torch.testing.assert_close(policy.kl(policy), torch.zeros(6, 7, 1))
    if kind != "tanh gaussian":  # its entropy has no closed form
        entropy = sum(part.entropy() for part in factors(policy))
        if kind == "beta":
            entropy = entropy + 2 * math.log(2.0)
        torch.testing.assert_close(policy.entropy(), entropy[..., None])  # type: ignore[index]
    modes = torch.cat([part.mode for part in factors(policy)], dim=-1)
    modes = modes.tanh() if kind == "tanh gaussian" else 2 * modes - 1 if kind == "beta" else modes
    torch.testing.assert_close(policy.mode(), modes)


@pytest.mark.parametrize("kind", KINDS)
def test_envs_are_given_the_action_that_was_drawn(kind: str) -> None:
    torch.manual_seed(0)
    make, num_params = KINDS[kind]
    policy = make(torch.randn(6, num_params))
    for is_sampled in (True, False):
        torch.manual_seed(1)
        given = policy.act(sample=is_sampled)
        torch.manual_seed(1)
        action = policy.sample() if is_sampled else policy.mode()
        if isinstance(policy, MultiCategorical):
            action = torch.stack([part.argmax(-1) for part in action.split(policy.nvec, dim=-1)], dim=-1)
        elif isinstance(policy, Categorical):
            action = action.argmax(-1)
        assert torch.equal(given, action)
        assert given.dtype == (torch.int64 if policy.is_discrete else torch.float32)


@pytest.mark.parametrize("kind", [TanhGaussian, Beta, GaussianMixture])
def test_squashed_policies_against_numeric_integration(kind: Any) -> None:
    """Densities have mass 1; samples, entropies, divergences and the entropy's gradient agree with them."""
    torch.manual_seed(0)
    x = torch.linspace(-0.9989, 0.9989, 20_001)[:, None]
    dx = float(x[1] - x[0])
    params, other = 0.5 * torch.randn(2, kind.num_params(1))
    exact, leaf = (params.clone().requires_grad_() for _ in range(2))
    log_p = kind(exact).log_prob(x)
    assert abs(log_p.exp().sum().item() * dx - 1.0) < 0.01
    entropy = -(log_p.exp() * log_p).sum() * dx
    entropy.backward()
    many = kind(leaf.expand(20_000, -1))
    estimate = many.entropy().mean()
    estimate.backward()
    assert abs(estimate.item() - entropy.item()) < 0.03
    torch.testing.assert_close(leaf.grad, exact.grad, rtol=0.1, atol=0.03)
    if kind.has_gradient:
        exact, leaf = (params.clone().requires_grad_() for _ in range(2))
        (kind(exact).log_prob(x).exp() * x).sum().mul(dx).backward()
        kind(leaf.expand(20_000, -1)).sample().mean().backward()
        torch.testing.assert_close(leaf.grad, exact.grad, rtol=0.1, atol=0.02)
    with torch.no_grad():
        rival, drawn = kind(other.expand(20_000, -1)), many.sample()
        divergence = (log_p.exp() * (log_p - kind(other).log_prob(x))).sum() * dx
        assert abs(many.kl(rival).mean() - divergence) < 0.05
        for power in (1, 2):
            assert abs((drawn**power).mean() - (log_p.exp() * x**power).sum() * dx) < 0.02


def test_a_mixture_is_greedy_at_its_densest_center_and_its_samples_have_no_gradient() -> None:
    params = torch.full((5, 3), -9.0)  # narrow components; all but two are almost never chosen
    params[0], params[1] = torch.tensor([0.0, 0.8, -9.0]), torch.tensor([0.2, -0.8, 0.5])
    mixture = GaussianMixture(params.flatten().requires_grad_())
    # narrower, so denser than the more likely one
    assert mixture.mode().item() == pytest.approx(math.tanh(0.8))
    assert not mixture.sample().requires_grad
    assert not GaussianMixture.has_gradient


@pytest.mark.parametrize(
    ("make", "num_params", "allowed"),
    [
        (Categorical, 4, [1, 0, 1, 0]),
        (MultiCategoricalType((2, 3)), 5, [0, 1, 1, 1, 0]),
        (Bernoulli, 3, [0, 1, 1, 0, 1, 1]),
    ],
)
def test_disallowed_actions_are_never_drawn(make: Any, num_params: int, allowed: list[int]) -> None:
    torch.manual_seed(0)
    mask = torch.tensor(allowed, dtype=torch.bool)
    params = torch.randn(num_params, requires_grad=True)
    free, policy = make(params), make(params.expand(100_000, -1)).masked(mask)
    drawn = policy.sample()
    assert (drawn.sum(0) > 0).tolist() == mask.tolist()
    assert (policy.mode()[0] * ~mask).sum() == 0
    assert torch.isfinite(policy.log_prob(drawn)).all()
    assert torch.isfinite(policy.entropy()).all()
    one = make(params).masked(mask)
    probs, sizes = one.log_probs.exp(), getattr(one, "nvec", (len(mask),))
    kept = one._side_by_side(probs) if hasattr(one, "nvec") else probs
    assert (kept[~mask] == 0).all()
    full = free._side_by_side(free.probs) if hasattr(free, "nvec") else free.probs
    for part, before, ok in zip(kept.split(sizes), full.split(sizes), mask.split(sizes), strict=True):
        torch.testing.assert_close(part, before * ok / (before * ok).sum())  # the others keep their ratios
    (one.log_prob(drawn[0]) + one.entropy()).sum().backward()
    assert torch.isfinite(params.grad).all()  # type: ignore[arg-type]


def test_continuous_policies_refuse_masks() -> None:
    with pytest.raises(ValueError, match=r"Beta cannot mask single actions.*Fix: remove action_mask_key"):
        Beta(torch.zeros(2)).masked(torch.ones(1, dtype=torch.bool))


def test_probabilities_first_read_without_gradient_have_one_afterwards() -> None:
    for make, size in ((Categorical, 4), (MultiCategoricalType((2, 2)), 4), (Bernoulli, 2)):
        policy = make(torch.zeros(size, requires_grad=True))
        with torch.no_grad():
            _ = policy.probs
        assert policy.entropy().requires_grad


def test_discrete_actions_are_drawn_with_their_probabilities() -> None:
    torch.manual_seed(0)
    policy = Categorical(torch.tensor([1.0, -torch.inf, 0.0, 2.0]).expand(20_000, 4))
    frequencies = torch.bincount(policy.act(sample=True), minlength=4) / 20_000
    torch.testing.assert_close(frequencies, policy.probs[0], rtol=0, atol=0.015)
    assert frequencies[1] == 0
    certain = torch.zeros(1, 1000)
    certain[0, 300] = 40.0
    assert Categorical(certain).probs[0, 300] > 0.999


def test_samples_follow_the_probabilities_of_the_pairs() -> None:
    torch.manual_seed(0)
    policy = MultiCategorical(torch.tensor([0.0, 1.0, 0.5, -1.0, 2.0]).expand(20_000, 5), (2, 3))
    p, q = (part.probs[0] for part in factors(policy))
    indices = policy.act(sample=True)
    for i, j in product(range(2), range(3)):
        share = ((indices[:, 0] == i) & (indices[:, 1] == j)).float().mean()
        assert abs(share - p[i] * q[j]) < 0.015


@pytest.mark.parametrize("nvec", [(2, 3), (3, 3)])
def test_samples_are_one_hot_with_the_gradient_of_their_relaxation(nvec: tuple[int, ...]) -> None:
    """On average, the gradient of an expected value that is linear in the action is nearly right."""
    torch.manual_seed(0)
    params, value = torch.randn(sum(nvec)), torch.randn(sum(nvec))
    exact, leaf = (params.clone().requires_grad_() for _ in range(2))
    probs = torch.cat([part.probs for part in factors(MultiCategorical(exact, nvec))])
    (probs * value).sum().backward()
    sample = MultiCategorical(leaf.expand(40_000, -1), nvec, temperature=1.0).sample()
    assert set(sample.unique().tolist()) == {0.0, 1.0}
    assert all(part.sum(-1).eq(1).all() for part in sample.split(nvec, dim=-1))
    (sample * value).sum(-1).mean().backward()
    assert leaf.grad is not None
    assert exact.grad is not None
    assert torch.nn.functional.cosine_similarity(leaf.grad, exact.grad, dim=0) > 0.95


def test_gaussian_samples_are_unbounded_and_differentiable() -> None:
    torch.manual_seed(0)
    params = torch.tensor([5.0, -3.0, math.log(2.0), math.log(0.5)], requires_grad=True)
    draws = Gaussian(params.expand(20_000, 4)).act(sample=True)
    torch.testing.assert_close(draws.mean(0), torch.tensor([5.0, -3.0]), rtol=0, atol=0.05)
    torch.testing.assert_close(draws.std(0), torch.tensor([2.0, 0.5]), rtol=0.03, atol=0)
    draws.sum().backward()
    assert params.grad is not None
    assert (params.grad[:2] == 20_000).all()


def test_divergence_of_squashed_gaussians_agrees_with_samples() -> None:
    torch.manual_seed(0)
    one, other = TanhGaussian(torch.tensor([0.2, 0.1])), TanhGaussian(torch.tensor([-0.1, 0.4]))
    x = torch.tanh(one.loc + one.log_std.exp() * torch.randn(100_000, 1))
    assert abs((one.log_prob(x) - other.log_prob(x)).mean() - one.kl(other).item()) < 0.01


def test_everything_stays_finite_at_the_extremes() -> None:
    gaussian = Gaussian(torch.tensor([0.0, 0.0, -1e9, 1e9]))
    assert gaussian.log_std.tolist() == [-20.0, 2.0]
    assert torch.isfinite(gaussian.log_prob(gaussian.sample())).all()

    far = torch.tensor([[1000.0, 0.0, -1000.0, 0.0, 0.0]], requires_grad=True)
    policy = MultiCategorical(far, (2, 3))
    multi = policy.entropy() + policy.log_prob(policy.sample()) + policy.sample().sum() + policy.kl(policy)
    zeros = torch.zeros(1, 2, requires_grad=True)
    squashed = TanhGaussian(zeros)
    at_the_bound = squashed.log_prob(torch.tensor([[1.0]])) + squashed.sample()
    ruled_out = torch.tensor([0.0, math.log(3.0), -torch.inf], requires_grad=True)
    divergence = Categorical(ruled_out).kl(Categorical(torch.tensor([0.0, 0.0, -torch.inf])))
    assert abs(divergence.item() - (0.25 * math.log(0.5) + 0.75 * math.log(1.5))) < 1e-6
    for result, params in ((multi, far), (at_the_bound, zeros), (divergence, ruled_out)):
        result.sum().backward()
        assert torch.isfinite(result).all()
        assert params.grad is not None
        assert torch.isfinite(params.grad).all()
    assert zeros.grad is not None
    assert zeros.grad.abs().sum() > 0


def test_gin_sets_the_temperature_and_zero_is_refused() -> None:
    try:
        gin.parse_config("MultiCategoricalType.temperature = 0.5")
        assert MultiCategoricalType((2, 3))(torch.zeros(5)).temperature == 0.5
        gin.parse_config("MultiCategoricalType.temperature = 0.0")
        with pytest.raises(
            ValueError, match=r"MultiCategoricalType.temperature is 0.0.*above 0. Fix: bind .* 1.0"
        ):
            MultiCategoricalType((2, 3))
    finally:
        gin.clear_config()
