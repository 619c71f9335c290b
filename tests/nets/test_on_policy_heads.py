"""What on-policy agents act with: Gaussian policies, divergences, policy and value heads."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution, kl_divergence

from loxodon.nets import (
    Categorical,
    FFTstepEncoder,
    Gaussian,
    PolicyDistribution,
    PolicyHead,
    TanhGaussian,
    ValueHead,
)


def reference(policy: Gaussian | TanhGaussian) -> Independent:
    return Independent(Normal(policy.loc, policy.log_std.exp()), 1)


def test_gaussian_matches_torch_distributions() -> None:
    torch.manual_seed(0)
    policy, action = Gaussian(torch.randn(5, 3, 4)), 3.0 * torch.randn(5, 3, 2)
    assert Gaussian.num_params(2) == 4
    torch.testing.assert_close(policy.log_prob(action), reference(policy).log_prob(action)[..., None])
    torch.testing.assert_close(policy.entropy(), reference(policy).entropy()[..., None])
    assert torch.equal(policy.mode(), policy.loc)


def test_gaussian_samples_are_unbounded_and_differentiable() -> None:
    torch.manual_seed(0)
    params = torch.tensor([5.0, -3.0, math.log(2.0), math.log(0.5)], requires_grad=True)
    draws = Gaussian(params.expand(20_000, 4)).act(sample=True)
    torch.testing.assert_close(draws.mean(0), torch.tensor([5.0, -3.0]), rtol=0, atol=0.05)
    torch.testing.assert_close(draws.std(0), torch.tensor([2.0, 0.5]), rtol=0.03, atol=0)
    draws.sum().backward()
    assert params.grad is not None
    assert (params.grad[:2] == 20_000).all()


def test_gaussian_stays_finite_for_any_parameters() -> None:
    policy = Gaussian(torch.tensor([0.0, 0.0, -1e9, 1e9]))
    assert policy.log_std.tolist() == [-20.0, 2.0]
    assert torch.isfinite(policy.log_prob(policy.sample())).all()


@pytest.mark.parametrize("kind", [Gaussian, TanhGaussian])
def test_divergence_of_gaussians_matches_torch_distributions(
    kind: type[Gaussian] | type[TanhGaussian],
) -> None:
    torch.manual_seed(0)
    one, other = kind(torch.randn(5, 4)), kind(torch.randn(5, 4))
    expected = kl_divergence(reference(one), reference(other))[:, None]
    torch.testing.assert_close(one.kl(other), expected)
    assert (one.kl(one) == 0).all()


def test_divergence_of_squashed_gaussians_is_what_samples_say() -> None:
    torch.manual_seed(0)
    one, other = TanhGaussian(torch.tensor([0.2, 0.1])), TanhGaussian(torch.tensor([-0.1, 0.4]))
    squashed = TransformedDistribution(Normal(one.loc, one.log_std.exp()), TanhTransform(cache_size=1))
    x = squashed.sample((100_000,))
    estimate = (one.log_prob(x) - other.log_prob(x)).mean()
    assert abs(estimate - one.kl(other).item()) < 0.01


def test_divergence_of_categoricals() -> None:
    one = Categorical(torch.tensor([[0.0, math.log(3.0)]]))
    other = Categorical(torch.tensor([[0.0, 0.0]]))
    expected = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    torch.testing.assert_close(one.kl(other), torch.tensor([[expected]]))
    assert one.kl(other) != other.kl(one)


def test_actions_that_are_ruled_out_add_nothing_to_the_divergence() -> None:
    params = torch.tensor([0.0, math.log(3.0), -torch.inf], requires_grad=True)
    divergence = Categorical(params).kl(Categorical(torch.tensor([0.0, 0.0, -torch.inf])))
    divergence.sum().backward()
    assert abs(divergence.item() - (0.25 * math.log(0.5) + 0.75 * math.log(1.5))) < 1e-6
    assert params.grad is not None
    assert torch.isfinite(params.grad).all()


@pytest.mark.parametrize("n_layers", [0, 1, 3])
@pytest.mark.parametrize("kind", [Categorical, Gaussian, TanhGaussian])
def test_policies_start_nearly_the_same_in_all_states(n_layers: int, kind: type[PolicyDistribution]) -> None:
    torch.manual_seed(0)
    policy = PolicyHead(8, 3, kind, n_layers=n_layers, d_hidden=16)(torch.randn(4, 5, 8))
    assert isinstance(policy, kind)
    assert policy.params.shape == (4, 5, kind.num_params(3))
    assert policy.params.abs().max() < 0.1
    assert policy.log_prob(policy.sample()).shape == (4, 5, 1)


@pytest.mark.parametrize("state_dependent_std", [False, True])
def test_gaussian_heads_learn_their_standard_deviation(state_dependent_std: bool) -> None:
    torch.manual_seed(0)
    head = PolicyHead(
        8, 3, Gaussian, out_gain=1.0, init_log_std=-0.5, state_dependent_std=state_dependent_std
    )
    policy = head(torch.randn(64, 8))
    assert (policy.log_std.std(0) > 0.1).all() == state_dependent_std
    torch.testing.assert_close(policy.log_std.mean(0), torch.full((3,), -0.5), rtol=0, atol=0.5)
    assert (policy.log_std == -0.5).all() != state_dependent_std
    policy.entropy().sum().backward()
    learned = head.mlp.out.bias if state_dependent_std else head.log_std
    assert learned.grad.tolist()[-3:] == [64.0] * 3


def test_settings_may_be_whole_numbers() -> None:
    head = PolicyHead(8, 3, Gaussian, init_log_std=-1, out_gain=1)
    assert head(torch.randn(2, 8)).log_std.tolist() == [[-1.0] * 3] * 2


def test_policy_heads_take_any_callable_that_makes_policies() -> None:
    class Halved:
        def num_params(self, action_dim: int) -> int:
            return action_dim

        def __call__(self, params: Tensor) -> PolicyDistribution:
            return Categorical(params / 2)

    head = PolicyHead(8, 3, Halved())
    state = torch.randn(2, 8)
    assert torch.equal(head(state).params, head.mlp(state) / 2)


def test_value_heads_give_one_value_per_state() -> None:
    assert ValueHead(8, d_hidden=16)(torch.randn(4, 5, 8)).shape == (4, 5, 1)
    assert not list(ValueHead(8, n_layers=0).mlp.hidden)


@pytest.mark.parametrize(("head", "gain"), [(PolicyHead(8, 3, Categorical), 0.01), (ValueHead(8), 1.0)])
def test_heads_start_orthogonal_with_zero_biases(head: PolicyHead | ValueHead, gain: float) -> None:
    out, hidden = head.mlp.out, head.mlp.hidden[0]
    torch.testing.assert_close(out.weight @ out.weight.T, gain**2 * torch.eye(len(out.weight)))
    torch.testing.assert_close(hidden.weight.T @ hidden.weight, 2.0 * torch.eye(8), rtol=0, atol=1e-5)
    assert all((layer.bias == 0).all() for layer in head.modules() if isinstance(layer, nn.Linear))


def test_head_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"PolicyHead.n_layers is -1, but must be at least 0. Fix: bind"):
        PolicyHead(8, 3, Categorical, n_layers=-1)
    with pytest.raises(ValueError, match=r"ValueHead.d_hidden is 0, but must be at least 1. Fix: bind"):
        ValueHead(8, d_hidden=0)


def test_timestep_encoders_can_start_orthogonal() -> None:
    space = spaces.Dict({"observation": spaces.Box(-np.inf, np.inf, (3,), np.float32)})
    encoder = FFTstepEncoder(space, 2, n_layers=1, d_hidden=16, d_output=8, init="orthogonal")
    weight = encoder.mlp.out.weight
    torch.testing.assert_close(weight @ weight.T, 2.0 * torch.eye(8), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"init is 'normal', allowed are 'default', 'orthogonal'. Fix"):
        FFTstepEncoder(space, 2, init="normal")
