"""A timestep encoder of your own: observations, previous reward and previous action -> one vector.

python examples/own_encoder.py             # any settings on top, as with run.py
"""

import sys

import gin
import torch
from torch import nn

from loxodon.nets import TstepEncoder
from loxodon.tools.run import main


@gin.configurable
class MyEncoder(TstepEncoder):
    """An MLP over vectors. It sees one timestep at a time; the trajectory encoder handles the past."""

    emb_dim = 32  # width of the result

    def __init__(self, obs_space, rl2_dim, *, d_hidden: int = 64) -> None:  # keywords are set in gin
        super().__init__(obs_space, rl2_dim)
        width = rl2_dim + sum(obs_space[key].shape[0] for key in self.keys)
        self.net = nn.Sequential(nn.Linear(width, d_hidden), nn.GELU(), nn.Linear(d_hidden, self.emb_dim))

    def inner_forward(self, obs, rl2s, mask):  # obs[key] (B, L, ...), rl2s (B, L, 1 + actions) float32
        return self.net(torch.cat([*(obs[key].float() for key in self.keys), rl2s], dim=-1))


if __name__ == "__main__":
    words = ["Experiment.tstep_encoder_type=@MyEncoder", "MyEncoder.d_hidden=32"]
    words += ["HORIZON=10", "Experiment.max_seq_len=11"]  # a short T-maze, learned in a minute
    sys.exit(main(["--config", "tmaze", "--run-name", "own-encoder", *words, *sys.argv[1:]]))
