"""A trajectory encoder of your own: define how one layer mixes the past in; the trunk does the rest.

python examples/own_memory.py              # CartPole without velocities, by PPO; any settings on top
"""

import sys

import gin
import torch
from torch import nn

from loxodon.nets import Mixer, MixerTrajEncoder
from loxodon.nets.recurrence import linear_recurrence
from loxodon.tools.run import main


class FadingMixer(Mixer):
    """Averages of the past, each fading at a learned rate."""

    def __init__(self, d_model, max_seq_len):
        super().__init__()
        self.inp, self.out = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.fade = nn.Parameter(torch.linspace(0.0, 6.0, d_model))  # sigmoid: 0.5 to 0.998 per timestep
        self.state_shapes = {"mean": (d_model,)}  # the memory of one environment

    def forward(self, x, resets, state):  # sequences (B, L, D), for learning; nothing crosses a reset
        keep = self.fade.sigmoid()
        mean = linear_recurrence(keep, (1 - keep).sqrt() * self.inp(x), state["mean"], resets)
        return self.out(mean), {"mean": mean[:, -1]}

    def step(self, x, state):  # the same for one timestep (N, D), for acting
        mean, last = self.forward(x[:, None], None, state)
        return mean[:, 0], last


@gin.configurable
class MyMemory(MixerTrajEncoder):
    """A stack of such layers, each with norms, residual connections and a feed-forward part."""

    mixer_type = FadingMixer


if __name__ == "__main__":
    words = ["Experiment.traj_encoder_type=@MyMemory", "MyMemory.d_model=64", "MyMemory.n_layers=2"]
    words += ["Experiment.stop_at_val_return=450", "--run-name", "own-memory"]
    sys.exit(main(["--config", "ppo/cartpole_no_velocity", *words, *sys.argv[1:]]))
