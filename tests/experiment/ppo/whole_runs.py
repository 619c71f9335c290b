"""Small PPO runs through Experiment."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from loxodon.agents import PPOAgent
from loxodon.data import DoNothingDataset
from loxodon.envs import EnvSpec
from loxodon.experiment import Experiment
from loxodon.experiment.ppo import PPOLearner
from loxodon.nets import (
    FFTrajEncoder,
    FFTstepEncoder,
    GRUTrajEncoder,
    IdentityTrajEncoder,
    LSTMTrajEncoder,
    TransformerTrajEncoder,
)

from ...transformers import recommended
from ..fakes import make_experiment
from .rollouts import RandomLengths

ENCODERS: dict[str, Any] = {
    "identity": IdentityTrajEncoder,
    "ff": partial(FFTrajEncoder, d_model=8),
    "gru": partial(GRUTrajEncoder, d_hidden=8, d_output=8, n_layers=1),
    "lstm": partial(LSTMTrajEncoder, d_hidden=8, d_output=8, n_layers=1),
    "transformer": partial(
        TransformerTrajEncoder,
        d_model=8,
        d_ff=16,
        n_layers=2,
        dropout_ff=0.0,
        dropout_emb=0.0,
        **recommended(2),
    ),
}


def ppo_experiment(
    folder: Path,
    encoder: str = "gru",
    *,
    agent: dict[str, Any] | None = None,
    learner: dict[str, Any] | None = None,
    tstep: dict[str, Any] | None = None,
    **changes: Any,
) -> Experiment:
    """A silent on-policy run, not yet started; `changes` are settings of Experiment."""
    env = EnvSpec(RandomLengths, {"longest": 9})
    settings: dict[str, Any] = {
        "agent_type": partial(PPOAgent, **(agent or {})),
        "on_policy_learner_type": partial(
            PPOLearner, **{"minibatches": 2, "update_epochs": 2, **(learner or {})}
        ),
        "tstep_encoder_type": partial(FFTstepEncoder, n_layers=1, d_hidden=8, d_output=8, **(tstep or {})),
        "traj_encoder_type": ENCODERS[encoder],
        "dataset": DoNothingDataset(),
        "make_train_env": env,
        "make_val_env": env,
        "exploration_wrapper_type": None,
        "max_seq_len": 6,
        "train_timesteps_per_epoch": 8,
        "val_timesteps_per_epoch": 0,
        "critic_loss_weight": 0.5,
        "lr_warmup_steps": 0,
    }
    return make_experiment(folder, **{**settings, **changes})


def learned(exp: Experiment) -> Experiment:
    """Start if necessary, learn and close."""
    if not hasattr(exp, "learner"):
        exp.start()
    exp.learn()
    exp.close()
    return exp


def weights(exp: Experiment) -> dict[str, torch.Tensor]:
    """Copies of all tensors of the agent."""
    return {name: value.detach().clone() for name, value in exp.policy.state_dict().items()}


def differing(one: Experiment, two: Experiment) -> list[str]:
    """Names of the weights that are not equal to the bit."""
    first, second = weights(one), weights(two)
    assert first.keys() == second.keys()
    return [name for name, value in first.items() if not torch.equal(value, second[name])]
