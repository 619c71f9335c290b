"""Feed-forward building blocks shared by encoders and heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .init import ORTHOGONAL_GAIN

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "mish": F.mish,
    "tanh": F.tanh,
}
# In-place versions of the activations with a gradient that can be computed from the result.
_OVERWRITING: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu_,
    "leaky_relu": F.leaky_relu_,
    "tanh": torch.tanh_,
}


def require_positive(owner: str, **sizes: int) -> None:
    """Check widths and counts of the configurable `owner`. Raises: ValueError for a size below 1."""
    require_at_least(1, owner, **sizes)


def require_at_least(minimum: int, owner: str, **numbers: float) -> None:
    """Check sizes and gains of the configurable `owner`. Raises: ValueError for one below `minimum`."""
    for name, number in numbers.items():
        if not number >= minimum:  # also rejects NaN
            raise ValueError(
                f"{owner}.{name} is {number}, but must be at least {minimum}. "
                f"Fix: bind {owner}.{name} to {minimum} or more."
            )


def require_share(owner: str, **shares: float) -> None:
    """Check dropout rates of the configurable `owner`. Raises: ValueError for one outside [0, 1)."""
    for name, share in shares.items():
        if not 0.0 <= share < 1.0:
            raise ValueError(
                f"{owner}.{name} is {share}, but must be at least 0 and below 1. "
                f"Fix: bind {owner}.{name} = 0.1, for example."
            )


def activation_fn(name: str, overwrites: bool = False) -> Callable[[Tensor], Tensor]:
    """The activation called `name`.

    overwrites: it may write its result into its input, because nothing else needs the input.
    Raises: ValueError for an unknown name.
    """
    if name not in ACTIVATIONS:
        raise ValueError(
            f"activation is {name!r}; allowed are {sorted(ACTIVATIONS)}. Fix: bind activation to one of "
            "these."
        )
    return _OVERWRITING.get(name, ACTIVATIONS[name]) if overwrites else ACTIVATIONS[name]


def as_rows(x: Tensor) -> Tensor:
    """Flatten x (..., D) to (n, D), for a linear layer before an activation that overwrites its input.

    With more than two axes the layer's result is a view, and writing into a view makes autograd copy the
    whole gradient three times.
    """
    return x.reshape(-1, x.shape[-1])


def by_input(weight: Tensor) -> Tensor:
    """A copy of weight (d_out, d_in) that lies in memory input by input."""
    return weight.t().contiguous().t()


class Linear(nn.Linear):
    """torch.nn.Linear with weights that lie in memory input by input.

    On a CPU, products of a few rows, as in acting, then take about two thirds of the time, because weights
    need not be transposed first. Products of many rows are as fast.
    """

    def __init__(self, d_in: int, d_out: int, bias: bool = True) -> None:
        super().__init__(d_in, d_out, bias)
        self.weight.data = by_input(self.weight.data)


class RMSNorm(nn.RMSNorm):
    """Root-mean-square normalisation of the last axis, in float32 under autocast too (like LayerNorm)."""

    EPS = 1e-5

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=self.EPS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


def norm_layer(name: str | None, width: int) -> nn.Module:
    """Build a normalisation over the last axis: "layer", "rmsnorm" or None for the identity.

    Raises: ValueError for an unknown name.
    """
    if name is None:
        return nn.Identity()
    if name == "layer":
        return nn.LayerNorm(width)
    if name == "rmsnorm":
        return RMSNorm(width)
    raise ValueError(
        f"norm is {name!r}; allowed are 'layer', 'rmsnorm' and None. Fix: bind norm to one of these."
    )


def orthogonal_init(module: nn.Module, gain: float) -> None:
    """Give every linear layer inside `module` orthogonal weights times `gain`, and biases of zero.

    Source: Saxe et al. 2014, arXiv:1312.6120.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.orthogonal_(layer.weight, gain)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def initialize(module: nn.Module, init: str) -> None:
    """Apply the initialisation called `init` to linear layers: "default" (torch's own) or "orthogonal".

    Raises: ValueError for an unknown name.
    """
    if init == "orthogonal":
        orthogonal_init(module, gain=ORTHOGONAL_GAIN)
    elif init != "default":
        raise ValueError(
            f"init is {init!r}; allowed are 'default' and 'orthogonal'. Fix: bind init to one of these."
        )


class MLP(nn.Module):
    """An MLP of `n_layers` hidden layers (linear, activation; may be 0) and a linear output.

    Shapes: (..., d_in) -> (..., d_output).
    """

    def __init__(self, d_in: int, d_hidden: int, d_output: int, n_layers: int, activation: str) -> None:
        super().__init__()
        self.activation = activation_fn(activation, overwrites=True)
        self.hidden = nn.ModuleList(Linear(d_hidden if i else d_in, d_hidden) for i in range(n_layers))
        self.out = Linear(d_hidden if n_layers > 0 else d_in, d_output)

    def forward(self, x: Tensor) -> Tensor:
        rows = as_rows(x)
        for linear in self.hidden:
            rows = self.activation(linear(rows))
        y: Tensor = self.out(rows)
        return y.view(*x.shape[:-1], y.shape[-1])
