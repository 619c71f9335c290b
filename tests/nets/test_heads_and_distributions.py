"""Policies and value heads against definitions and tiny hand-computed cases."""

from __future__ import annotations

import math

import pytest
import torch

from loxodon.nets import Actor, Categorical, CriticEnsemble, TanhGaussian


def test_categorical_log_prob_entropy_and_mode() -> None:
    policy = Categorical(torch.tensor([[0.0, math.log(3.0)]]))
    torch.testing.assert_close(policy.probs, torch.tensor([[0.25, 0.75]]))
    assert policy.mode().tolist() == [[0.0, 1.0]]
    torch.testing.assert_close(policy.log_prob(torch.tensor([[1.0, 0.0]])), torch.tensor([[math.log(0.25)]]))
    expected = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    torch.testing.assert_close(policy.entropy(), torch.tensor([[expected]]))


def test_categorical_with_many_actions_can_become_certain() -> None:
    logits = torch.zeros(1, 1000)
    logits[0, 300] = 40.0
    assert Categorical(logits).probs[0, 300] > 0.999


def test_categorical_samples_follow_the_probabilities() -> None:
    torch.manual_seed(0)
    draws = Categorical(torch.tensor([0.0, math.log(3.0)]).expand(4000, 2)).sample()
    assert draws.sum(-1).eq(1).all()
    assert abs(draws[:, 1].mean().item() - 0.75) < 0.03


def test_tanh_gaussian_matches_torch_distributions() -> None:
    torch.manual_seed(0)
    policy = TanhGaussian(torch.randn(5, 4))
    action = torch.rand(5, 2) * 1.8 - 0.9
    base = torch.distributions.Normal(policy.loc, policy.log_std.exp())
    reference = torch.distributions.TransformedDistribution(base, torch.distributions.TanhTransform())
    expected = reference.log_prob(action).sum(-1, keepdim=True)
    torch.testing.assert_close(policy.log_prob(action), expected, rtol=1e-4, atol=1e-4)


def test_tanh_gaussian_is_finite_at_the_bounds_and_differentiable() -> None:
    params = torch.zeros(1, 2, requires_grad=True)
    policy = TanhGaussian(params)
    assert torch.isfinite(policy.log_prob(torch.tensor([[1.0]]))).all()
    policy.sample().sum().backward()
    assert params.grad is not None
    assert params.grad.abs().sum() > 0


def test_actor_gives_one_policy_per_discount() -> None:
    policy = Actor(8, 3, 2, Categorical, d_hidden=16)(torch.randn(4, 5, 8))
    assert policy.params.shape == (4, 5, 2, 3)


@pytest.mark.parametrize("size", ["n_layers", "d_hidden"])
def test_actor_sizes_below_one_are_refused(size: str) -> None:
    with pytest.raises(ValueError, match=rf"Actor.{size} is 0, but must be at least 1. Fix: bind Actor"):
        Actor(8, 3, 2, Categorical, **{size: 0})


def test_critic_members_are_independent_networks() -> None:
    torch.manual_seed(0)
    critics = CriticEnsemble(8, 3, 2, True, num_critics=3, n_layers=2, d_hidden=16)
    out = critics(torch.randn(4, 5, 8))
    assert out.shape == (4, 5, 3, 2, 3)
    critics.out.weight.grad = None
    out[:, :, 1].sum().backward()
    for weight in (critics.out.weight, critics.hidden[0].weight):
        felt = weight.grad.abs().flatten(1).sum(1) > 0
        assert felt.tolist() == [False, True, False]


def test_continuous_critic_of_many_actions_equals_one_at_a_time() -> None:
    torch.manual_seed(0)
    critics = CriticEnsemble(8, 2, 3, False, num_critics=2, d_hidden=16)
    state, actions = torch.randn(4, 5, 8), torch.randn(4, 5, 6, 2)
    together = critics(state, actions)
    assert together.shape == (4, 5, 6, 2, 3, 1)
    for k in range(6):
        torch.testing.assert_close(critics(state, actions[:, :, k : k + 1])[:, :, 0], together[:, :, k])


def test_critic_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"n_layers=0.*Fix"):
        CriticEnsemble(8, 2, 3, False, n_layers=0)


def test_discrete_actions_are_drawn_with_their_probabilities() -> None:
    torch.manual_seed(0)
    policy = Categorical(torch.tensor([1.0, -torch.inf, 0.0, 2.0]).expand(20_000, 4))
    drawn = policy.act(sample=True)
    frequencies = torch.bincount(drawn, minlength=4) / len(drawn)
    torch.testing.assert_close(frequencies, policy.probs[0], rtol=0, atol=0.015)
    assert frequencies[1] == 0
    assert policy.act(sample=False).unique().tolist() == [3]
    torch.manual_seed(1)
    one_hot = policy.sample()
    torch.manual_seed(1)
    assert torch.equal(one_hot.argmax(-1), policy.act(sample=True))


def test_continuous_actions_are_handed_over_as_they_are() -> None:
    policy = TanhGaussian(torch.randn(5, 6))
    assert policy.act(sample=True).shape == (5, 3)
    assert torch.equal(policy.act(sample=False), policy.mode())
