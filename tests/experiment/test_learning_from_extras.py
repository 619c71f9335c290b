"""The off-policy agent learns from trajectories that an on-policy run has stored."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from loxodon.agents import Agent
from loxodon.data import save_trajectory
from loxodon.nets import FFTrajEncoder, FFTstepEncoder

from .fakes import make_experiment, run
from .test_learner import make_trajectory


def weights_after_learning(
    folder: Path, *, extra_files: range = range(0), first_seed: int = 0
) -> list[torch.Tensor]:
    """Train on twelve trajectories, of which some have extras."""
    protected = folder / "tiny" / "buffer" / "protected"
    protected.mkdir(parents=True)
    for number in range(12):
        traj = dataclasses.replace(
            make_trajectory(4 + number, seed=first_seed + number), policy_version=number
        )
        if number in extra_files:
            rows = np.full((len(traj), 1), float(number), np.float32)
            traj = dataclasses.replace(traj, extras={"log_probs": rows, "samples": rows.repeat(3, 1)})
        save_trajectory(protected, traj, save_as="npz", traj_id=f"{number:08x}", unix_time=1e9 + number)
    exp = run(
        make_experiment(
            folder,
            agent_type=Agent,
            tstep_encoder_type=FFTstepEncoder,
            traj_encoder_type=FFTrajEncoder,
            train_timesteps_per_epoch=0,
            val_timesteps_per_epoch=0,
        )
    )
    return [p.detach().clone() for p in exp.policy.parameters()]


@pytest.mark.slow
def test_learning_is_the_same_with_and_without_extras_in_the_files(tmp_path: Path) -> None:
    plain, mixed, full = (
        weights_after_learning(tmp_path / str(len(files)), extra_files=files)
        for files in (range(0), range(6), range(12))
    )
    for one, other, third in zip(plain, mixed, full, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)
    others = weights_after_learning(tmp_path / "others", first_seed=100)
    assert not all(map(torch.equal, plain, others))  # the trajectories do matter
