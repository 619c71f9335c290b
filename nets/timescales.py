"""Timescales of memories at the start of training."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def timescales(num: int, max_seq_len: int, least: float = 2.0) -> Tensor:
    """(num,) float, number of timesteps over which memories fade at first, up to the training window.

    They cover all orders of magnitude, because memories that fade at once have no gradient for long delays.
    Source: Tallec & Ollivier 2018, arXiv:1804.11188.
    """
    most = max(float(max_seq_len), 2 * least)
    return torch.logspace(math.log10(least), math.log10(most), num)


def forget_gate_biases(num: int, max_seq_len: int, least: float = 2.0) -> Tensor:
    """(num,) float, biases of sigmoid gates that keep 1 - 1 / T per timestep, for each timescale T."""
    return (timescales(num, max_seq_len, least) - 1).log()
