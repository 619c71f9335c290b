"""Actor, critics, policy and value heads: shapes, independence, and initial outputs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loxodon.nets import (
    Actor,
    BinnedCriticEnsemble,
    Categorical,
    CriticEnsemble,
    DiscountInputCriticEnsemble,
    DuelingCriticEnsemble,
    Gaussian,
    MultiCategoricalType,
    PolicyDistribution,
    PolicyHead,
    TanhGaussian,
    ValueHead,
    dead_units,
)


@pytest.mark.parametrize("kind", [Categorical, TanhGaussian, MultiCategoricalType((1, 2))])
def test_actor_gives_one_policy_per_discount(kind: Any) -> None:
    policy = Actor(8, 3, 2, kind, d_hidden=16)(torch.randn(4, 5, 8))
    assert policy.params.shape == (4, 5, 2, kind.num_params(3))
    assert policy.sample().shape == (4, 5, 2, 3)


def test_critic_members_are_independent_networks() -> None:
    torch.manual_seed(0)
    critics = CriticEnsemble(8, 3, 2, True, num_critics=3, n_layers=2, d_hidden=16)
    out = critics(torch.randn(4, 5, 8))
    assert out.shape == (4, 5, 3, 2, 3)
    out[:, :, 1].sum().backward()
    for weight in (critics.out.weight, critics.hidden[0].weight):
        felt = weight.grad.abs().flatten(1).sum(1) > 0
        assert felt.tolist() == [False, True, False]


@pytest.mark.parametrize(
    "kind", [CriticEnsemble, DuelingCriticEnsemble, BinnedCriticEnsemble, DiscountInputCriticEnsemble]
)
def test_initial_weights_of_critics_are_uniform_with_variance_1_by_fan_in(kind: Any) -> None:
    """Published critics are einops' `EinMix` layers; their biases lie within 1 / sqrt(fan_in)."""
    torch.manual_seed(0)
    is_discrete = kind is DuelingCriticEnsemble
    last = 11 if kind is BinnedCriticEnsemble else is_discrete
    critics = kind(96, 32, 9, last, n_layers=3, d_hidden=64, num_critics=64)
    of_action = 32 + (kind is DiscountInputCriticEnsemble)  # the discount is one more input
    layers = [
        (critics.from_state, 96 + of_action * (not is_discrete)),
        *((layer, 64) for layer in (*critics.hidden, critics.out)),
    ]
    if not is_discrete:
        layers.append((critics.from_action, of_action + 96))
    for layer, fan_in in layers:
        assert 0.99 < layer.weight.abs().max() / (3 / fan_in) ** 0.5 <= 1.0001
        assert layer.weight.detach().var() * fan_in == pytest.approx(1.0, rel=0.05)
        if layer.bias is not None:
            assert 0.95 < layer.bias.abs().max() / (1 / fan_in) ** 0.5 <= 1.0001


def test_a_continuous_critic_of_many_actions_equals_one_at_a_time() -> None:
    torch.manual_seed(0)
    critics = CriticEnsemble(8, 2, 3, False, num_critics=2, d_hidden=16)
    state, actions = torch.randn(4, 5, 8), torch.randn(4, 5, 6, 2)
    together = critics(state, actions)
    assert together.shape == (4, 5, 6, 2, 3, 1)
    for k in range(6):
        torch.testing.assert_close(critics(state, actions[:, :, k : k + 1])[:, :, 0], together[:, :, k])


def test_dueling_critics_are_a_value_and_advantages_of_mean_zero() -> None:
    critics, state = DuelingCriticEnsemble(8, 3, 2, True, num_critics=4, d_hidden=16), torch.randn(4, 5, 8)
    parts = CriticEnsemble.forward(critics, state)
    q = critics(state)
    assert q.shape == (4, 5, 4, 2, 3)
    torch.testing.assert_close(q.mean(-1), parts[..., 0])
    torch.testing.assert_close(q.diff(dim=-1), parts[..., 1:].diff(dim=-1))
    with pytest.raises(ValueError, match=r"one output per action.*Fix: bind CriticEnsemble"):
        DuelingCriticEnsemble(8, 3, 2, False)


def test_classifying_critics_judge_actions_for_all_discounts_or_for_their_own() -> None:
    torch.manual_seed(0)
    critics = BinnedCriticEnsemble(8, 2, 3, 11, num_critics=4, d_hidden=16)
    state, actions = torch.randn(2, 5, 8), torch.randn(2, 5, 6, 3, 2)  # 6 samples for each of 3 discounts
    own = critics(state, actions, own_discount=True)
    assert own.shape == (2, 5, 6, 4, 3, 11)
    for g in range(3):
        torch.testing.assert_close(own[..., g, :], critics(state, actions[..., g, :])[..., g, :])
    read = critics(state, actions, own_discount=True, read=lambda logits: logits.sum(-1))
    torch.testing.assert_close(read, own.sum(-1, keepdim=True))


def test_the_gradient_of_one_hots_passes_the_clip() -> None:
    critics = DiscountInputCriticEnsemble(8, 3, 1, False, num_critics=2, d_hidden=16)
    critics.build([0.9])
    actions = torch.eye(3)[None, None].requires_grad_()
    critics(torch.zeros(1, 1, 8), actions).sum().backward()
    assert actions.grad is not None
    assert (actions.grad != 0).all()


def test_published_critics_read_the_discount_and_the_clipped_action() -> None:
    torch.manual_seed(0)
    discounts = [0.1, 0.9, 1.0]
    critics = DiscountInputCriticEnsemble(8, 2, 3, False, num_critics=4, d_hidden=16)
    critics.build(discounts)
    state, actions = torch.randn(2, 5, 8), torch.randn(2, 5, 6, 3, 2)  # 6 samples for each of 3 discounts
    own = critics(state, actions, own_discount=True)
    assert own.shape == (2, 5, 6, 4, 3, 1)
    for g, discount in enumerate(discounts):
        of_all = critics(state, actions[..., g, :])
        torch.testing.assert_close(own[..., g, :], of_all[..., g, :])
        encoded = torch.full((2, 5, 6, 1), math.log(1 + 1 / max(1 - discount, 1e-6)))
        x = torch.cat([actions[..., g, :].clamp(-0.999, 0.999), encoded], -1)
        for c in range(4):
            of_state = critics.from_state(state)[:, :, None] + critics.from_action(x)
            hidden = F.leaky_relu(of_state[..., 16 * c : 16 * c + 16])
            hidden = F.leaky_relu(hidden @ critics.hidden[0].weight[c] + critics.hidden[0].bias[c])
            torch.testing.assert_close(
                own[..., c, g, :], hidden @ critics.out.weight[c] + critics.out.bias[c]
            )
    assert DiscountInputCriticEnsemble(8, 2, 3, True)(state).shape == (2, 5, 4, 3, 2)


@pytest.mark.parametrize(
    "critics",
    [
        CriticEnsemble(8, 2, 3, False, num_critics=4, n_layers=3, d_hidden=16),
        DuelingCriticEnsemble(8, 2, 3, True, num_critics=4, d_hidden=16),
        BinnedCriticEnsemble(8, 2, 3, 11, num_critics=4, d_hidden=16),
    ],
    ids=lambda critics: type(critics).__name__,
)
def test_a_subset_of_critics_gives_the_same_as_all(critics: CriticEnsemble) -> None:
    torch.manual_seed(0)
    args = (torch.randn(4, 5, 8), *([] if critics.is_discrete else [torch.randn(4, 5, 6, 2)]))
    members = torch.tensor([3, 1])
    some, among_all = critics.frozen(members)(*args), critics(*args)[..., members, :, :]
    torch.testing.assert_close(some, among_all)
    assert not some.requires_grad


def test_dead_units_are_those_hardly_active_on_real_timesteps() -> None:
    layer = torch.ones(2, 3, 4)  # C critics, n places, 4 units
    layer[0, :2, 1] = 0.001
    layer[1, :, 2:] = -1.0  # the absolute value counts
    assert dead_units([layer, layer], torch.tensor([True, True, False])) == 1 / 8
    actor = Actor(8, 3, 2, Categorical, n_layers=3, d_hidden=16)
    assert [x.shape for x in actor.activations(torch.randn(7, 8))] == [(7, 16)] * 3


@pytest.mark.parametrize("n_layers", [0, 3])
@pytest.mark.parametrize("kind", [Categorical, Gaussian, TanhGaussian])
def test_policies_start_nearly_the_same_in_all_states(n_layers: int, kind: type[PolicyDistribution]) -> None:
    torch.manual_seed(0)
    policy = PolicyHead(8, 3, kind, n_layers=n_layers, d_hidden=16)(torch.randn(4, 5, 8))
    assert isinstance(policy, kind)
    assert policy.params.shape == (4, 5, kind.num_params(3))
    assert policy.params.abs().max() < 0.1


@pytest.mark.parametrize("state_dependent_std", [False, True])
def test_gaussian_heads_learn_their_standard_deviation(state_dependent_std: bool) -> None:
    torch.manual_seed(0)
    head = PolicyHead(8, 3, Gaussian, out_gain=1, init_log_std=-1, state_dependent_std=state_dependent_std)
    policy = head(torch.randn(64, 8))
    assert (policy.log_std.std(0) > 0.1).all() == state_dependent_std
    torch.testing.assert_close(policy.log_std.mean(0), torch.full((3,), -1.0), rtol=0, atol=0.5)
    assert (policy.log_std == -1.0).all() != state_dependent_std
    policy.entropy().sum().backward()
    learned = head.mlp.out.bias if state_dependent_std else head.log_std
    assert learned.grad.tolist()[-3:] == [64.0] * 3


def test_policy_heads_accept_any_callable_that_makes_policies() -> None:
    class Halved:
        def num_params(self, action_dim: int) -> int:
            return action_dim

        def __call__(self, params: Tensor) -> PolicyDistribution:
            return Categorical(params / 2)

    head, state = PolicyHead(8, 3, Halved()), torch.randn(2, 8)
    assert torch.equal(head(state).params, head.mlp(state) / 2)


@pytest.mark.parametrize(("head", "gain"), [(PolicyHead(8, 3, Categorical), 0.01), (ValueHead(8), 1.0)])
def test_heads_start_orthogonal_with_zero_biases(head: PolicyHead | ValueHead, gain: float) -> None:
    out, hidden = head.mlp.out, head.mlp.hidden[0]
    torch.testing.assert_close(out.weight @ out.weight.T, gain**2 * torch.eye(len(out.weight)))
    torch.testing.assert_close(hidden.weight.T @ hidden.weight, 2.0 * torch.eye(8), rtol=0, atol=1e-5)
    assert all((layer.bias == 0).all() for layer in head.modules() if isinstance(layer, nn.Linear))


def test_value_heads_give_one_value_per_state() -> None:
    assert ValueHead(8, d_hidden=16)(torch.randn(4, 5, 8)).shape == (4, 5, 1)
    assert not list(ValueHead(8, n_layers=0).mlp.hidden)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda: Actor(8, 3, 2, Categorical, n_layers=0),
            r"Actor.n_layers is 0, but must be at least 1. Fix",
        ),
        (
            lambda: Actor(8, 3, 2, Categorical, d_hidden=0),
            r"Actor.d_hidden is 0, but must be at least 1. Fix",
        ),
        (lambda: CriticEnsemble(8, 2, 3, False, n_layers=0), r"CriticEnsemble.n_layers is 0.*Fix"),
        (
            lambda: PolicyHead(8, 3, Categorical, n_layers=-1),
            r"PolicyHead.n_layers is -1, .* at least 0. Fix",
        ),
        (lambda: ValueHead(8, d_hidden=0), r"ValueHead.d_hidden is 0, but must be at least 1. Fix: bind"),
    ],
)
def test_impossible_sizes_are_refused(build: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build()
