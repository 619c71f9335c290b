"""Faster CPU versions of computations in torch or in the general code of `nets`.

Each gives the same results up to rounding. `IS_ON = False` switches all of them off.
"""

from __future__ import annotations

import torch
from torch import Tensor

IS_ON = True


def serves(x: Tensor) -> bool:
    """True if x should be computed by this package: on the CPU, unless torch.compile generates the code."""
    return IS_ON and x.device.type == "cpu" and not torch.compiler.is_compiling()
