"""An auxiliary loss: the state of the sequence model also learns to predict the next observation.

python examples/next_observation.py "Experiment.extra_loss_weights={'next_obs': 0.5}"
"""

import dataclasses
import sys

import gin
import torch
from gymnasium import spaces
from torch import nn

from loxodon.agents import Agent
from loxodon.tools.run import main


@gin.configurable
class PredictingAgent(Agent):
    """Predicts the next observation from state and action with a head of its own."""

    def __init__(self, *given, obs_key: str = "observation", d_hidden: int = 64, **shared):
        super().__init__(*given, **shared)
        self.obs_key, width = obs_key, spaces.flatdim(self.obs_space[obs_key])
        inputs = nn.Linear(self.state_dim + self.action_dim, d_hidden)
        self.predictor = nn.Sequential(inputs, nn.ReLU(), nn.Linear(d_hidden, width))

    def losses(self, transitions, with_metrics):
        state, actions = transitions.current.state[..., : self.state_dim], transitions.batch.actions
        predicted = self.predictor(torch.cat([state, actions], -1))  # (B, L, width)
        observed = transitions.following.obs[self.obs_key].flatten(2).float()
        terms = super().losses(transitions, with_metrics)
        return dataclasses.replace(terms, extra={"next_obs": (predicted - observed).square()})


if __name__ == "__main__":
    words = ["Experiment.agent_type=@PredictingAgent", "Experiment.extra_loss_weights={'next_obs': 0.1}"]
    words += ["HORIZON=10", "Experiment.max_seq_len=11"]  # a short T-maze, learned in a minute
    sys.exit(main(["--config", "tmaze", "--run-name", "next-observation", *words, *sys.argv[1:]]))
