"""A state space of complex numbers with HiPPO's frequencies, discretised with learned step sizes."""

from __future__ import annotations

import math

import gin
import torch
from torch import Tensor, nn

from ..mlp import Linear, require_positive
from ..recurrence import complex_product
from ..trunk import MixerTrajEncoder
from .parts import RotatingMixer


class S5Mixer(RotatingMixer):
    """A state space x' = rate x + B u, read as y = 2 Re(C x) + D u, with all inputs in all states.

    A state represents itself and its conjugate. The only non-linearity is in the trunk's feed-forward part.
    """

    def __init__(
        self,
        d_model: int,
        max_seq_len: int,
        *,
        d_state: int | None = None,
        min_step: float = 0.001,
        max_step: float = 0.1,
    ) -> None:
        super().__init__()
        self.d_state = (d_model + 1) // 2 if d_state is None else d_state
        owner = type(self).__name__
        require_positive(owner, d_state=self.d_state)
        if not 0.0 < min_step <= max_step:
            raise ValueError(
                f"{owner}.min_step is {min_step} and max_step {max_step}, but 0 < min_step <= max_step must "
                f"hold. Fix: bind, say, {owner}.min_step = 0.001 and {owner}.max_step = 0.1."
            )
        self.log_rate = nn.Parameter(torch.full((self.d_state,), math.log(0.5)))
        self.frequency = nn.Parameter(hippo_frequencies(self.d_state))
        steps = torch.empty(self.d_state).uniform_(math.log(min_step), math.log(max_step))
        self.log_step = nn.Parameter(steps)
        # HiPPO's eigenvectors are orthonormal, so normal weights are normal in their basis, too.
        self.inp = Linear(d_model, 2 * self.d_state, bias=False)
        self.out = Linear(2 * self.d_state, d_model, bias=False)
        self.skip = nn.Parameter(torch.zeros(d_model))  # 0, because the trunk already has a skip connection
        self.state_shapes = {"h": (2, self.d_state)}
        with torch.no_grad():  # all states begin with variance 1, including those with small steps
            decay, _, gain = self._discretised()
            self.inp.weight.view(2, self.d_state, -1).mul_(
                ((1 - decay.square()).sqrt() / gain.norm(dim=0))[:, None]
            )

    def _discretised(self) -> tuple[Tensor, Tensor, Tensor]:
        """Decay and angle (S,) per timestep; gain (2, S) of an input that is constant for one timestep."""
        rate, step = self.log_rate.exp(), self.log_step.exp()
        log_decay, angle = -rate * step, self.frequency * step
        # The gain is (exp(step * eigenvalue) - 1) / eigenvalue.
        decay, change = log_decay.exp(), torch.expm1(log_decay)
        grown = torch.stack([change * angle.cos() - 2 * (angle / 2).sin() ** 2, decay * angle.sin()])
        size = rate.square() + self.frequency.square()
        return decay, angle, complex_product(grown, -rate / size, -self.frequency / size)

    def _parts(self, x: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        decay, angle, gain = self._discretised()
        return (decay, angle, complex_product(self.inp(x).float().unflatten(-1, (2, -1)), *gain)), x

    def _finish(self, h: Tensor, x: Tensor) -> Tensor:
        y: Tensor = 2 * self.out(h.flatten(-2)) + self.skip * x
        return y


def hippo_frequencies(num: int) -> Tensor:
    """(num,) imaginary parts of the eigenvalues -1/2 +- i y of the matrix HiPPO-N of 2 * num states.

    Source: Smith et al. 2023, arXiv:2208.04933, section 4.2 and appendix B.1.
    """
    root = torch.sqrt(torch.arange(2 * num, dtype=torch.float64) + 0.5)
    skew = torch.outer(root, root).triu(1)
    frequencies: Tensor = torch.linalg.eigvalsh(1j * (skew - skew.T))[num:].float()
    return frequencies


@gin.configurable(denylist=["tstep_dim", "max_seq_len"])
class S5TrajEncoder(MixerTrajEncoder):
    """A trunk of diagonal state spaces; settings of `MixerTrajEncoder` and these.

    Args:
        d_state: number of complex numbers in the state of a layer; None means half of d_model.
        min_step: smallest step size per timestep at the start of training.
        max_step: largest step size.
    Source: Smith et al. 2023, arXiv:2208.04933.
    """

    mixer_type = S5Mixer
