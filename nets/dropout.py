"""Dropout with cheap random numbers on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import cpu

_STEPS = 2**16


class Dropout(nn.Dropout):
    """Set a share p of the entries to 0 in training, and divide the others by 1 - p.

    On the CPU, torch draws a number for every entry. Here four entries share a number of 64 bits, which takes
    less than half of the time and rounds p to a multiple of 2^-16. On other devices and in compiled code,
    this is torch's own dropout.

    Source: Srivastava et al. 2014, Journal of Machine Learning Research 15.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        dropped = round(self.p * _STEPS)
        if not 0 < dropped < _STEPS or not cpu.serves(x):
            return super().forward(x)
        draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        is_kept = draws.view(torch.int16)[: x.numel()].view(x.shape) >= dropped - _STEPS // 2
        return x * is_kept.to(x.dtype).mul_(_STEPS / (_STEPS - dropped))
