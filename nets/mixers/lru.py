"""A linear recurrence of complex numbers that rotate and fade at rates that do not depend on the input."""

from __future__ import annotations

import math

import gin
import torch
from torch import Tensor, nn

from ..mlp import Linear, require_positive
from ..trunk import MixerTrajEncoder
from .parts import RotatingMixer


class LRUMixer(RotatingMixer):
    """Linear recurrent unit; the only non-linearity is in the feed-forward part of the trunk."""

    def __init__(
        self,
        d_model: int,
        max_seq_len: int,
        *,
        d_state: int | None = None,
        r_min: float = 0.9,
        r_max: float = 0.999,
        max_phase: float = math.pi,
    ) -> None:
        super().__init__()
        self.d_state = d_model if d_state is None else d_state
        owner = type(self).__name__
        require_positive(owner, d_state=self.d_state)
        if not 0.0 <= r_min < r_max < 1.0:
            raise ValueError(
                f"{owner}.r_min is {r_min} and r_max {r_max}, but 0 <= r_min < r_max < 1 must hold. "
                f"Fix: bind, say, {owner}.r_min = 0.9 and {owner}.r_max = 0.999."
            )
        radius = torch.empty(self.d_state).uniform_(r_min**2, r_max**2).clamp(min=1e-8).sqrt()
        self.log_rate = nn.Parameter((-radius.log()).log())
        self.log_angle = nn.Parameter((max_phase * torch.rand(self.d_state)).clamp(min=1e-6).log())
        self.log_scale = nn.Parameter(0.5 * torch.log1p(-radius.square()))  # states begin with variance 1
        self.inp = Linear(d_model, 2 * self.d_state, bias=False)
        self.out = Linear(2 * self.d_state, d_model, bias=False)
        self.skip = nn.Parameter(torch.zeros(d_model))  # 0, because the trunk already has a skip connection
        self.state_shapes = {"h": (2, self.d_state)}

    def _parts(self, x: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        inputs = self.inp(x).float().unflatten(-1, (2, -1)) * self.log_scale.exp()
        return ((-self.log_rate.exp()).exp(), self.log_angle.exp(), inputs), x

    def _finish(self, h: Tensor, x: Tensor) -> Tensor:
        y: Tensor = self.out(h.flatten(-2)) + self.skip * x
        return y


@gin.configurable(denylist=["tstep_dim", "max_seq_len"])
class LRUTrajEncoder(MixerTrajEncoder):
    """A trunk of linear recurrent units; settings of `MixerTrajEncoder` and these.

    Args:
        d_state: number of complex numbers in the state of a layer; None means d_model.
        r_min: smallest factor by which a state fades per timestep, at the start of training.
        r_max: largest factor.
        max_phase: largest angle in radians by which a state rotates per timestep, at the start of training.
            With small angles, states do not distinguish the most recent timesteps.
    Source: Orvieto et al. 2023, arXiv:2303.06349.
    """

    mixer_type = LRUMixer
