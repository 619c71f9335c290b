"""Linear layers with a learned spectral norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .init import EMBEDDING_STD
from .mlp import Linear, by_input


class SigmaReparamLinear(nn.Module):
    """A linear layer with weight (gain / sigma) W, where sigma is the spectral norm of W.

    It keeps attention from collapsing onto single timesteps. Each forward pass with gradient ends with one
    power iteration of the singular vectors; passes without gradient do not change them.
    Shapes: (..., d_in) -> (..., d_out).
    Source: Zhai et al. 2023, arXiv:2303.06296.
    """

    left: Tensor
    right: Tensor

    def __init__(self, d_in: int, d_out: int, bias: bool = True) -> None:
        super().__init__()
        weight = nn.init.trunc_normal_(torch.empty(d_out, d_in), std=EMBEDDING_STD)
        self.weight = nn.Parameter(by_input(weight))
        self.bias = nn.Parameter(torch.zeros(d_out)) if bias else None
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("left", torch.empty(d_out))
        self.register_buffer("right", torch.empty(d_in))
        self.find_vectors()

    @torch.no_grad()
    def find_vectors(self) -> None:
        """Compute the singular vectors; call this after the weights were replaced."""
        u, _, vh = torch.linalg.svd(self.weight, full_matrices=False)
        self.left.copy_(u[:, 0])
        self.right.copy_(vh[0])

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            # The vectors are cloned, because they change before the gradient is computed.
            scale = self.gain / (self.left.clone() @ (self.weight @ self.right.clone()))
            if torch.is_grad_enabled():
                with torch.no_grad():
                    self.left.copy_(F.normalize(self.weight @ self.right, dim=0))
                    self.right.copy_(F.normalize(self.weight.T @ self.left, dim=0))
        return F.linear(x, self.weight * scale, self.bias)


def linear(d_in: int, d_out: int, bias: bool = True, *, sigma_reparam: bool = False) -> nn.Module:
    """Build a linear layer, with `SigmaReparamLinear` if `sigma_reparam`."""
    return SigmaReparamLinear(d_in, d_out, bias) if sigma_reparam else Linear(d_in, d_out, bias)
