"""Actor and critic heads: from trajectory embeddings to policies and values, for all discounts at once."""

from __future__ import annotations

import math

import gin
import torch
from torch import Tensor, nn

from .distributions import DistributionType, PolicyDistribution
from .mlp import MLP, activation_fn, require_positive


@gin.configurable(denylist=["state_dim", "action_dim", "num_discounts", "distribution"])
class Actor(nn.Module):
    """One policy per discount factor from a shared MLP.

    Shapes: state (..., D) -> distribution over (..., G, A).
    Raises: ValueError for a size below 1.
    """

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        num_discounts: int,
        distribution: DistributionType,
        *,
        n_layers: int = 2,
        d_hidden: int = 256,
        activation: str = "leaky_relu",
    ) -> None:
        super().__init__()
        require_positive("Actor", n_layers=n_layers, d_hidden=d_hidden)
        self.distribution, self.num_discounts = distribution, num_discounts
        self.num_params = distribution.num_params(action_dim)
        self.mlp = MLP(state_dim, d_hidden, num_discounts * self.num_params, n_layers, activation)
        with torch.no_grad():  # start near the uniform policy
            self.mlp.out.weight.mul_(0.1)
            self.mlp.out.bias.zero_()

    def forward(self, state: Tensor) -> PolicyDistribution:
        params: Tensor = self.mlp(state)
        return self.distribution(torch.unflatten(params, -1, (self.num_discounts, self.num_params)))


class EnsembleLinear(nn.Module):
    """C independent linear layers: (C, M, d_in) -> (C, M, d_out)."""

    def __init__(self, num_members: int, d_in: int, d_out: int) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(d_in)
        self.weight = nn.Parameter(torch.empty(num_members, d_in, d_out).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(num_members, 1, d_out).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


@gin.configurable(denylist=["state_dim", "action_dim", "num_discounts", "is_discrete"])
class CriticEnsemble(nn.Module):
    """An ensemble of Q functions, each with an output per discount factor.

    Discrete actions: one pass gives the values of all A actions. Continuous: the action enters the first
    layer beside the state, whose share of that layer is computed once for any number of actions.

    Shapes:
        discrete: state (..., D) -> (..., C, G, A).
        continuous: state (..., D), actions (..., K, A) -> (..., K, C, G, 1).
    """

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        num_discounts: int,
        is_discrete: bool,
        *,
        num_critics: int = 4,
        n_layers: int = 2,
        d_hidden: int = 256,
        activation: str = "leaky_relu",
    ) -> None:
        super().__init__()
        if n_layers < 1 or num_critics < 1:
            raise ValueError(
                f"CriticEnsemble has n_layers={n_layers} and num_critics={num_critics}, both must be at "
                "least 1. Fix: bind CriticEnsemble.n_layers and Agent.num_critics to positive integers."
            )
        self.num_critics, self.num_discounts, self.is_discrete = num_critics, num_discounts, is_discrete
        self.activation, self.d_hidden = activation_fn(activation), d_hidden
        self.from_state = nn.Linear(state_dim, num_critics * d_hidden)
        self.from_action = None if is_discrete else nn.Linear(action_dim, num_critics * d_hidden, bias=False)
        self.hidden = nn.ModuleList(
            EnsembleLinear(num_critics, d_hidden, d_hidden) for _ in range(n_layers - 1)
        )
        self.num_outputs = action_dim if is_discrete else 1
        self.out = EnsembleLinear(num_critics, d_hidden, num_discounts * self.num_outputs)

    def forward(self, state: Tensor, actions: Tensor | None = None) -> Tensor:
        x = self.from_state(state)
        if self.from_action is not None:
            x = x.unsqueeze(-2) + self.from_action(actions)
        lead = x.shape[:-1]
        x = x.reshape(-1, self.num_critics, self.d_hidden).transpose(0, 1)
        for layer in self.hidden:
            x = layer(self.activation(x))
        x = self.out(self.activation(x)).transpose(0, 1)
        y: Tensor = x.reshape(*lead, self.num_critics, self.num_discounts, self.num_outputs)
        return y
