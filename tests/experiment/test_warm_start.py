"""Warm starts, and data that one kind of agent collects for the other."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loxodon.agents import Agent
from loxodon.data import DiskTrajDataset, save_trajectory
from loxodon.envs import EnvSpec
from loxodon.experiment import Experiment
from loxodon.nets import FFTrajEncoder, FFTstepEncoder, GRUTrajEncoder, IdentityTrajEncoder

from .demonstrations import (
    ENCODER,
    Copy,
    demonstration,
    make_ppo,
    records,
    stage,
    weights_of,
)
from .fakes import make_experiment, run


def off_policy_run(folder: Path, **changes: Any) -> Experiment:
    return run(
        make_experiment(
            folder,
            **{
                "run_name": "base",
                "agent_type": partial(Agent, num_critics=2),
                "tstep_encoder_type": ENCODER,
                "traj_encoder_type": partial(GRUTrajEncoder, d_hidden=16, d_output=16),
                "make_train_env": EnvSpec(Copy),
                "make_val_env": EnvSpec(Copy),
                "epochs": 1,
                **changes,
            },
        )
    )


@pytest.mark.parametrize("where", ["latest/policy.safetensors", "training_states/base_epoch_0"])
def test_a_warm_start_takes_the_encoders_of_an_off_policy_run_and_lists_the_rest(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "loxodon")
    base = off_policy_run(tmp_path)
    gru = partial(GRUTrajEncoder, d_hidden=16, d_output=16)
    path = base.checkpoints.root / where
    exp = make_ppo(tmp_path, traj_encoder_type=gru, **{"WarmStart.source": str(path)})
    exp.start()
    theirs, own = weights_of(base), weights_of(exp)
    shared = [name for name in own if name.startswith(("tstep_encoder.", "traj_encoder."))]
    assert shared
    assert all(torch.equal(own[name], theirs[name]) for name in shared)
    (line,) = [record.getMessage() for record in caplog.records if "Warm start" in record.getMessage()]
    assert f"loaded {len(shared)} of {len(own)}" in line or f"{len(shared)} of {len(own)} tensors" in line
    assert "not loaded, as before: " in line
    assert "policy_head" in line.partition("not loaded")[2]
    assert "critics" in line.partition("not used")[2]
    assert exp.epoch == 0
    exp.learn()
    exp.close()


def test_a_warm_start_that_nothing_fits_names_both_sets(tmp_path: Path) -> None:
    base = off_policy_run(tmp_path, epochs=0)
    path = str(base.checkpoints.root / "latest" / "policy.safetensors")
    wider = partial(FFTstepEncoder, n_layers=3, d_hidden=8, d_output=8, normalize_inputs=False)
    exp = make_ppo(tmp_path, tstep_encoder_type=wider, **{"WarmStart.source": path})
    message = r"No tensor of .*fits this agent: there are .*critics.*the agent has .*policy_head.*Fix:"
    with pytest.raises(ValueError, match=message):
        exp.start()


def test_a_warm_start_from_another_environment_is_refused(tmp_path: Path) -> None:
    base = off_policy_run(tmp_path, epochs=0)
    path = str(base.checkpoints.root / "latest" / "policy.safetensors")
    with pytest.raises(ValueError, match=r"WarmStart.source: .* is of another environment: .*action.*Fix:"):
        make_ppo(tmp_path, "box", **{"WarmStart.source": path}).start()


def test_warm_starts_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"restore_from and WarmStart.source are both set.*Fix:"):
        make_ppo(tmp_path, **{"WarmStart.source": "./x"}, restore_from="./y").start()
    with pytest.raises(ValueError, match=r"WarmStart.source = 'other:best' names an artifact"):
        make_ppo(tmp_path, **{"WarmStart.source": "other:best"}).start()
    with pytest.raises(FileNotFoundError, match=r"WarmStart.source: .*does not exist"):
        make_ppo(tmp_path, **{"WarmStart.source": str(tmp_path / "none")}).start()


# ---- from one kind of agent to the other, through files ----


def test_what_ppo_stores_is_learned_from_by_both_kinds_of_agents(tmp_path: Path) -> None:
    teed = run(make_ppo(tmp_path, run_name="teed", dataset=DiskTrajDataset(), epochs=2))
    files = list((tmp_path / "teed" / "buffer" / "fifo").iterdir())
    assert files
    with np.load(files[0]) as arrays:
        assert any("log_probs" in name for name in arrays.files)
        assert any("values" in name for name in arrays.files)
    assert teed.epoch == 2
    offline = off_policy_run(
        tmp_path,
        run_name="offline",
        traj_encoder_type=IdentityTrajEncoder,
        dataset=DiskTrajDataset(dset_name="teed"),
        train_timesteps_per_epoch=0,
        val_timesteps_per_epoch=0,
    )
    assert offline.learner.gradient_steps == 4
    made = stage(DiskTrajDataset(dset_name="teed"), num_batches=4, cache_dir=str(tmp_path / "cache"))
    exp = run(make_ppo(tmp_path, run_name="cloned", callbacks=[made]))
    assert exp.hooks.callbacks[0].is_done
    assert any("pretrain/loss" in row for row in records(exp))
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_demonstrations_on_disk_may_be_protected_files(tmp_path: Path) -> None:
    folder = tmp_path / "demos" / "buffer" / "protected"
    folder.mkdir(parents=True)
    for seed in range(4):
        save_trajectory(
            folder, demonstration(seed), save_as="npz", traj_id=f"{seed:08x}", unix_time=1e9 + seed
        )
    made = stage(DiskTrajDataset(dset_name="demos", takes_new_trajs=False), num_batches=2)
    exp = run(make_ppo(tmp_path, traj_encoder_type=partial(FFTrajEncoder, d_model=16), callbacks=[made]))
    assert exp.hooks.callbacks[0].is_done
