"""Actor and critic heads: from trajectory embeddings to policies and values, for all discounts at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import gin
import torch
from einops import pack, rearrange, unpack
from torch import Tensor, nn

from .distributions import DistributionType, Gaussian, PolicyDistribution
from .init import FAN_IN_GAIN, ORTHOGONAL_GAIN
from .mlp import MLP, Linear, activation_fn, orthogonal_init, require_at_least, require_positive

_DEAD = 0.025  # share of the layer's average activation below which a unit counts as dead
_BLOCK = 2**21  # number of logits that fit into a CPU's cache


@gin.configurable(denylist=["state_dim", "action_dim", "num_discounts", "distribution"])
class Actor(nn.Module):
    """One policy per discount factor from a shared MLP.

    Shapes: state (..., D) -> distribution over (..., G, A).

    Args:
        state_dim, action_dim, num_discounts, distribution: given by the agent.
        n_layers: number of hidden layers.
        d_hidden: width of the hidden layers.
        activation: name of the non-linearity.
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

    def forward(self, state: Tensor) -> PolicyDistribution:
        params = torch.unflatten(self.mlp(state), -1, (self.num_discounts, self.num_params))
        return self.distribution(params)

    def activations(self, state: Tensor) -> list[Tensor]:
        """Activations (..., d_hidden) of the hidden layers, first to last."""
        found = [state]
        for linear in self.mlp.hidden:
            found.append(self.mlp.activation(linear(found[-1])))
        return found[1:]


@torch.no_grad()
def dead_units(layers: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Share of hidden units that are hardly ever active: mean size below 1/40 of the layer's average.

    Args:
        layers: activations, each (..., n, units).
        mask: (n,) bool, True for entries that count.
    Returns: a scalar tensor.
    Source: Sokar et al. 2023, arXiv:2302.12902, definition 3.1, with a threshold of 0.025.
    """
    sizes = torch.stack([(layer.abs() * mask[:, None]).sum(-2) for layer in layers])
    return (sizes <= _DEAD * sizes.mean(-1, keepdim=True)).float().mean()


class EnsembleLinear(nn.Module):
    """C independent linear layers: (C, M, d_in) -> (C, M, d_out).

    Initial weights are uniform with a variance of 1 / d_in (`FAN_IN_GAIN`), biases within 1 / sqrt(d_in).
    """

    def __init__(self, num_members: int, d_in: int, d_out: int) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(d_in)
        limit = FAN_IN_GAIN * bound
        self.weight = nn.Parameter(torch.empty(num_members, d_in, d_out).uniform_(-limit, limit))
        self.bias = nn.Parameter(torch.empty(num_members, 1, d_out).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


@gin.configurable(denylist=["state_dim", "action_dim", "num_discounts", "is_discrete", "num_critics"])
class CriticEnsemble(nn.Module):
    """An ensemble of Q functions with an output per discount factor, which the agent turns into a value.

    For discrete actions, one pass gives the values of all A actions. Continuous actions enter the first layer
    together with the state; the state's part of that layer is computed once for any number of actions.

    Initial weights are uniform with a variance of 1 / fan_in, biases within 1 / sqrt(fan_in). State and
    action are one input of the first layer, so its fan-in is D + A. Source: the published code of Grigsby et
    al. 2023, arXiv:2310.09971.

    Shapes:
        discrete: state (..., D) -> (..., C, G, A).
        continuous: state (..., D), actions (..., K, A) -> (..., K, C, G, 1).

    Args:
        state_dim, action_dim, num_discounts, is_discrete, num_critics: given by the agent; num_critics is C.
        n_layers: number of hidden layers.
        d_hidden: width of the hidden layers.
        activation: name of the non-linearity.
    """

    reads_discount: ClassVar[bool] = False
    """True if a discount is an input, so that each action can be evaluated for its own discount alone."""

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
        require_positive("CriticEnsemble", n_layers=n_layers, num_critics=num_critics, d_hidden=d_hidden)
        self.num_critics, self.num_discounts, self.is_discrete = num_critics, num_discounts, is_discrete
        self.activation, self.d_hidden = activation_fn(activation, overwrites=True), d_hidden
        self.from_state = Linear(state_dim, num_critics * d_hidden)
        self.from_action = None if is_discrete else Linear(action_dim, num_critics * d_hidden, bias=False)
        with torch.no_grad():
            for layer in (self.from_state, self.from_action):
                if layer is not None:
                    layer.weight.mul_(FAN_IN_GAIN)
                    if not is_discrete:  # torch scaled each by its own fan-in
                        for weights in layer.parameters():
                            weights.mul_((layer.in_features / (state_dim + action_dim)) ** 0.5)
        self.hidden = nn.ModuleList(
            EnsembleLinear(num_critics, d_hidden, d_hidden) for _ in range(n_layers - 1)
        )
        self.num_outputs = action_dim if is_discrete else 1
        self.out = EnsembleLinear(num_critics, d_hidden, num_discounts * self.num_outputs)

    def forward(self, state: Tensor, actions: Tensor | None = None) -> Tensor:
        hidden, lead = self.activations(state, actions)
        y: Tensor = rearrange(self.out(hidden[-1]), "c n (g a) -> n c g a", g=self.num_discounts)
        return unpack(y, lead, "* c g a")[0]

    def build(self, discounts: Sequence[float]) -> None:
        """Set the discounts, in the order of the values. Most critics do not need them."""

    def frozen(self, members: Tensor | None = None) -> Callable[..., Tensor]:
        """A version of `forward` that passes gradients to its inputs, but not to parameters.

        members: (C',) int64, the critics to evaluate; None for all.
        """

        def kept(x: Tensor) -> Tensor:  # the first axis of all parameters is C, or C times hidden units
            if members is None:
                return x.detach()
            by_member = rearrange(x.detach(), "(c h) ... -> c h ...", c=self.num_critics)
            return rearrange(by_member[members], "c h ... -> (c h) ...")

        parameters = {name: kept(x) for name, x in self.named_parameters()}

        def critics(*args: Any, **kwargs: Any) -> Tensor:
            out: Tensor = torch.func.functional_call(self, parameters, args, kwargs)
            return out

        return critics

    def _by_member(self, layer: nn.Linear, rows: Tensor) -> Tensor:
        """A layer of all critics for rows (n, d_in), in the layout of later layers: (C, n, d_hidden)."""
        weight = rearrange(layer.weight, "(c h) d -> c d h", h=self.d_hidden)
        rows = rows.expand(len(weight), -1, -1)
        if layer.bias is None:
            return torch.bmm(rows, weight)
        return torch.baddbmm(rearrange(layer.bias, "(c h) -> c 1 h", h=self.d_hidden), rows, weight)

    def activations(self, state: Tensor, actions: Tensor | None = None) -> tuple[list[Tensor], Any]:
        """Activations (C, n, d_hidden) of hidden layers, and the shapes packed into n, for einops.unpack."""
        rows, lead = pack([state], "* d")
        x = self._by_member(self.from_state, rows)
        if self.from_action is not None:
            assert actions is not None
            action_rows, lead = pack([actions], "* d")
            of_actions = self._by_member(self.from_action, action_rows)
            x = torch.unflatten(of_actions, 1, (len(rows), actions.shape[-2])) + x.unsqueeze(2)
        # The activation overwrites its input, which must not be a view (see as_rows), so flatten after it.
        found = [self.activation(x).flatten(1, -2)]
        for layer in self.hidden:
            found.append(self.activation(layer(found[-1])))
        return found, lead


@gin.configurable(denylist=["state_dim", "action_dim", "num_discounts", "is_discrete", "num_critics"])
class DuelingCriticEnsemble(CriticEnsemble):
    """Critics of discrete actions that add a value of the state and an advantage of each action.

    Q = V + A - mean of A. The settings are those of `CriticEnsemble`.

    Shapes: state (..., D) -> (..., C, G, A).
    Raises: ValueError unless there is one output per action.
    Source: Wang et al. 2016, arXiv:1511.06581, eq. 9.
    """

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        num_discounts: int,
        is_discrete: bool,
        *,
        num_critics: int = 4,
        **settings: Any,
    ) -> None:
        super().__init__(
            state_dim, action_dim, num_discounts, is_discrete, num_critics=num_critics, **settings
        )
        if not is_discrete:
            raise ValueError(
                "DuelingCriticEnsemble has one output per action, so it needs a Discrete action space. "
                "Fix: bind CriticEnsemble instead."
            )
        self.out = EnsembleLinear(num_critics, self.d_hidden, num_discounts * (1 + action_dim))

    def forward(self, state: Tensor, actions: Tensor | None = None) -> Tensor:
        parts = super().forward(state, actions)
        value, advantages = parts[..., :1], parts[..., 1:]
        q: Tensor = value + advantages - advantages.mean(-1, keepdim=True)
        return q


@gin.configurable(denylist=["state_dim", "action_dim", "num_discounts", "is_discrete", "num_critics"])
class DiscountInputCriticEnsemble(CriticEnsemble):
    """Critics with one output that read the discount factor g in addition to the state and the action.

        Q_c(s, a, g) = f_c(s, log(1 + 1 / max(1 - g, 1e-6)), clip(a, -0.999, 0.999))

    Each pair of an action and a discount takes a separate pass. Discrete actions have outputs per action and
    discount, exactly as in `CriticEnsemble`. The settings are those of `CriticEnsemble`; an agent passes the
    discounts to `build`.

    Shapes: state (..., D), actions (..., K, A) -> (..., K, C, G, 1); with `own_discount`, actions
        (..., K, G, A) -> (..., K, C, G, 1), with the value of each action for its own discount only.
    Source: Grigsby et al. 2023, arXiv:2310.09971, and its published code.
    """

    reads_discount = True
    encoded: Tensor

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        num_discounts: int,
        is_discrete: bool,
        *,
        num_critics: int = 4,
        **settings: Any,
    ) -> None:
        # The discount is one more feature of an action, so that initial weights count it in their fan-in.
        sizes = (action_dim, num_discounts) if is_discrete else (action_dim + 1, 1)
        super().__init__(state_dim, *sizes, is_discrete, num_critics=num_critics, **settings)

    def build(self, discounts: Sequence[float]) -> None:
        odds = 1.0 / (1.0 - torch.tensor(discounts)[:, None]).clamp(min=1e-6)
        self.register_buffer("encoded", odds.log1p(), persistent=False)  # (G, 1)

    def forward(self, state: Tensor, actions: Tensor | None = None, own_discount: bool = False) -> Tensor:
        if actions is None:
            return super().forward(state)
        hidden, lead = self.activations(state, actions, own_discount)
        values = rearrange(self.out(hidden[-1]), "c n 1 -> n c 1")
        y: Tensor = rearrange(unpack(values, lead, "* c a")[0], "... g c a -> ... c g a")
        return y

    def activations(
        self, state: Tensor, actions: Tensor | None = None, own_discount: bool = False
    ) -> tuple[list[Tensor], Any]:
        if actions is None:
            return super().activations(state)
        if not own_discount:
            actions = actions.unsqueeze(-2).expand(*actions.shape[:-1], len(self.encoded), -1)
        encoded = self.encoded.to(actions.dtype).expand(*actions.shape[:-1], 1)
        clipped = actions + (actions.clamp(-0.999, 0.999) - actions).detach()
        inputs = torch.cat([clipped, encoded], dim=-1)
        hidden, _ = super().activations(state, inputs.flatten(-3, -2))
        return hidden, [inputs.shape[:-1]]


@gin.configurable(denylist=["state_dim", "action_dim", "num_discounts", "num_bins", "num_critics"])
class BinnedCriticEnsemble(CriticEnsemble):
    """Critics that classify the value of an action: they return logits of K bins instead of a number.

    Actions of every kind are inputs, discrete ones as one-hots. The settings are those of `CriticEnsemble`.

    Shapes: state (..., D), actions (..., M, A) -> (..., M, C, G, K); with `own_discount`, actions
        (..., M, G, A) -> (..., M, C, G, K), with the outputs of each action for its own discount only. With
        `read`, a function from logits (..., K) to numbers (...), the last axis is 1; on the CPU, the logits
        are then never in memory all at once.
    """

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        num_discounts: int,
        num_bins: int,
        *,
        num_critics: int = 4,
        **settings: Any,
    ) -> None:
        super().__init__(state_dim, action_dim, num_discounts, False, num_critics=num_critics, **settings)
        self.out = EnsembleLinear(num_critics, self.d_hidden, num_discounts * num_bins)

    def forward(
        self,
        state: Tensor,
        actions: Tensor | None = None,
        own_discount: bool = False,
        read: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        assert actions is not None
        lead, g = actions.shape[: -2 if own_discount else -1], self.num_discounts
        hidden, _ = self.activations(state, actions.flatten(-3, -2) if own_discount else actions)
        x, weight, bias = hidden[-1], self.out.weight, self.out.bias
        if own_discount:  # the first axis enumerates members and discounts
            x = rearrange(x, "c (n g) h -> (c g) n h", g=g)
            weight = rearrange(weight, "c h (g k) -> (c g) h k", g=g)
            bias = rearrange(bias, "c 1 (g k) -> (c g) 1 k", g=g)

        def outputs(rows: Tensor) -> Tensor:
            logits = torch.baddbmm(bias, rows, weight)
            logits = rearrange(logits, "c n (g k) -> c n g k", g=1 if own_discount else g)
            return logits if read is None else read(logits)[..., None]

        if read is None:
            y = outputs(x)
        else:  # on the CPU, blocks stay in the cache from one operation to the next
            size = max(1, _BLOCK // (weight.shape[0] * weight.shape[2]))
            rows = size if x.device.type == "cpu" else x.shape[1]
            y = torch.cat([outputs(block) for block in torch.split(x, rows, dim=1)], dim=1)
        y = rearrange(y, "(c g2) n g k -> n c (g2 g) k", g2=g if own_discount else 1)
        return y.reshape(*lead, *y.shape[1:])


@gin.configurable(denylist=["state_dim", "action_dim", "distribution"])
class PolicyHead(nn.Module):
    """One policy from an orthogonally initialised MLP, nearly the same in every state at the start.

    The standard deviation of a `Gaussian` is learned, and the same in all states unless
    `state_dependent_std`. Other distributions ignore `init_log_std` and `state_dependent_std`.

    Shapes: state (..., D) -> distribution over (..., A).

    Args:
        state_dim: given by the agent.
        action_dim: given by the agent.
        distribution: given by the agent.
        n_layers: number of hidden layers; with 0 the head is linear.
        d_hidden: width of the hidden layers.
        activation: name of the non-linearity.
        out_gain: gain of the output layer's initial weights.
        init_log_std: logarithm of a Gaussian's standard deviation at the start, from -20 to 2.
        state_dependent_std: compute a Gaussian's standard deviation from the state.
    Raises: ValueError for an impossible size.
    Source: Andrychowicz et al. 2021, arXiv:2006.05990, section 3.2 (small last layer of the policy).
    """

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        distribution: DistributionType,
        *,
        n_layers: int = 1,
        d_hidden: int = 256,
        activation: str = "tanh",
        out_gain: float = 0.01,
        init_log_std: float = 0.0,
        state_dependent_std: bool = False,
    ) -> None:
        super().__init__()
        self.distribution = distribution
        is_gaussian = isinstance(distribution, type) and issubclass(distribution, Gaussian)
        has_free_std = is_gaussian and not state_dependent_std
        num_outputs = action_dim if has_free_std else distribution.num_params(action_dim)
        self.mlp = _orthogonal_mlp(
            "PolicyHead", state_dim, d_hidden, num_outputs, n_layers, activation, out_gain
        )
        self.log_std = nn.Parameter(torch.full((action_dim,), float(init_log_std))) if has_free_std else None
        if is_gaussian and state_dependent_std:
            nn.init.constant_(self.mlp.out.bias[action_dim:], init_log_std)

    def forward(self, state: Tensor) -> PolicyDistribution:
        params: Tensor = self.mlp(state)
        if self.log_std is not None:
            params = torch.cat([params.float(), self.log_std.expand_as(params)], dim=-1)
        return self.distribution(params)


@gin.configurable(denylist=["state_dim"])
class ValueHead(nn.Module):
    """The value of a state from an orthogonally initialised MLP.

    Shapes: state (..., D) -> (..., 1).

    Args:
        state_dim: given by the agent.
        n_layers: number of hidden layers; with 0 the head is linear.
        d_hidden: width of the hidden layers.
        activation: name of the non-linearity.
        out_gain: gain of the output layer's initial weights.
    Raises: ValueError for an impossible size.
    """

    def __init__(
        self,
        state_dim: int,
        *,
        n_layers: int = 1,
        d_hidden: int = 256,
        activation: str = "tanh",
        out_gain: float = 1.0,
    ) -> None:
        super().__init__()
        self.mlp = _orthogonal_mlp("ValueHead", state_dim, d_hidden, 1, n_layers, activation, out_gain)

    def forward(self, state: Tensor) -> Tensor:
        value: Tensor = self.mlp(state)
        return value


def _orthogonal_mlp(
    owner: str, d_in: int, d_hidden: int, d_output: int, n_layers: int, activation: str, out_gain: float
) -> MLP:
    require_at_least(0, owner, n_layers=n_layers, out_gain=out_gain)
    require_positive(owner, d_hidden=d_hidden)
    mlp = MLP(d_in, d_hidden, d_output, n_layers, activation)
    orthogonal_init(mlp, gain=ORTHOGONAL_GAIN)
    orthogonal_init(mlp.out, gain=out_gain)
    return mlp
