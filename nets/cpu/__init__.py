"""Faster ways on the CPU to what torch, or the general code of this package, computes there too.

Each gives the same results up to rounding. `IS_ON = False` switches all of them off.
"""

from __future__ import annotations

import torch
from torch import Tensor

IS_ON = True


def serves(x: Tensor) -> bool:
    """True where the code of this package is to be used: on the CPU, unless torch.compile makes its own."""
    return IS_ON and x.device.type == "cpu" and not torch.compiler.is_compiling()
