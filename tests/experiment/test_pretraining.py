"""Pre-training on demonstrations, warm starts, and data of one kind of agent for the other."""

from __future__ import annotations

import logging
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from loxodon.agents import Agent, PPOAgent, RewardNormalizer
from loxodon.data import DiskTrajDataset, MemoryTrajDataset
from loxodon.envs import EnvSpec
from loxodon.experiment import Experiment
from loxodon.experiment.ppo import PPOLearner
from loxodon.nets import FFTstepEncoder, GRUTrajEncoder, IdentityTrajEncoder

from .demonstrations import (
    ENCODER,
    STEPS,
    Copy,
    demonstration,
    demos,
    make_ppo,
    same,
    stage,
    weights_of,
)
from .fakes import make_experiment, metrics, run


@pytest.mark.parametrize(
    ("kind", "agent", "num_batches"),
    [
        ("discrete", partial(PPOAgent, share_encoder=False, value_norm="popart"), 100),
        ("box", PPOAgent, 250),
        ("multi", partial(PPOAgent, value_norm="running"), 100),
    ],
)
def test_an_imitating_agent_is_good_before_ppo_begins_and_ppo_continues(
    tmp_path: Path, kind: str, agent: Any, num_batches: int
) -> None:
    made = stage(demos(kind), num_batches=num_batches)
    exp = run(make_ppo(tmp_path, kind, agent_type=agent, callbacks=[made], epochs=2))
    first = next(row["val/return"] for row in metrics(exp.run_dir) if "val/return" in row)
    assert first > 0.9 * STEPS
    figures = next(row for row in metrics(exp.run_dir) if "pretrain/loss" in row)
    assert figures["pretrain/loss"] < figures["pretrain/first_loss"]
    assert exp.learner.gradient_steps == 4  # those of PPO alone
    assert all(int(state["step"]) == 4 for state in exp.optimizer.state.values())
    if kind == "box":
        untrained = run(make_ppo(tmp_path / "other", kind, agent_type=agent))
        assert metrics(untrained.run_dir)[0]["val/return"] < 0.7 * STEPS
        rows = [row for row in metrics(exp.run_dir) if "pretrain-update/value" in row]
        # The expected value is the mean of sum_k 0.99^k over the rewards left in an episode of 8.
        expected = np.mean([sum(0.99**k for k in range(left)) for left in range(1, STEPS + 1)])
        assert abs(rows[0]["pretrain-update/value"] - expected) > 1.0
        assert abs(rows[-1]["pretrain-update/value"] - expected) < 0.7
        assert abs(rows[-1]["pretrain-update/return"] - expected) < 0.7


def test_a_resumed_run_does_not_pretrain_again(tmp_path: Path) -> None:
    run(make_ppo(tmp_path, callbacks=[stage()]))
    again = make_ppo(tmp_path, callbacks=[stage()], epochs=2)
    again.start()
    again.load_checkpoint()
    assert again.hooks.callbacks[0].is_done
    again.learn()
    again.close()
    assert sum("pretrain/loss" in row for row in metrics(again.run_dir)) == 1


def test_a_stop_during_pretraining_saves_nothing_of_it_and_resuming_gives_the_same_run(
    tmp_path: Path,
) -> None:
    whole = run(make_ppo(tmp_path / "whole", callbacks=[stage(num_batches=40)]))
    stopped = make_ppo(tmp_path / "parts", callbacks=[stage(num_batches=40)])
    stopped.start()
    before = weights_of(stopped)
    real, count = stopped.log, 0

    def log(*args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        if count == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        real(*args, **kwargs)

    stopped.log = log  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        stopped.learn()
    assert same(before, weights_of(stopped))
    resumed = make_ppo(tmp_path / "parts", callbacks=[stage(num_batches=40)])
    resumed.start()
    resumed.load_checkpoint()
    assert not resumed.hooks.callbacks[0].is_done
    resumed.learn()
    resumed.close()
    assert same(weights_of(whole), weights_of(resumed))


def test_a_test_run_pretrains_a_little(tmp_path: Path) -> None:
    exp = run(make_ppo(tmp_path, test_run=True, callbacks=[stage()]))
    assert [row["pretrain/updates"] for row in metrics(exp.run_dir) if "pretrain/updates" in row] == [2]


def test_impossible_settings_are_refused(tmp_path: Path) -> None:
    for changes in ({"num_batches": 0}, {"learning_rate": 0.0}):
        ((name, value),) = changes.items()
        with pytest.raises(ValueError, match=rf"{name} is {value!r}.*Fix:"):
            stage(**changes)
    with pytest.raises(TypeError, match=r"Pretraining.dataset is 'demos'.*Fix:"):
        stage("demos")
    exp = make_ppo(tmp_path, callbacks=[stage(DiskTrajDataset(dset_name="nothing"))])
    exp.start()
    with pytest.raises(
        ValueError, match=r"Pretraining.dataset has no trajectories.*nothing.*Fix: name the folder"
    ):
        exp.learn()
    exp.close()
    off_policy = make_experiment(tmp_path, callbacks=[stage()])
    with pytest.raises(ValueError, match=r"Pretraining is for on-policy agents, but TinyAgent.*Fix:"):
        off_policy.start()
    learner = partial(PPOLearner, minibatches=2, reward_normalizer=RewardNormalizer)
    scaled = make_ppo(tmp_path, on_policy_learner_type=learner, callbacks=[stage()])
    with pytest.raises(ValueError, match=r"value_coef is 0.5, but with PPOLearner.reward_normalizer.*Fix:"):
        scaled.start()


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_weights(tmp_path: Path) -> None:
    bad = MemoryTrajDataset([demonstration(0)])
    exp = make_ppo(tmp_path, callbacks=[stage(bad, num_batches=2)])
    exp.start()
    bad._trajs[0].rews[:] = np.nan  # after the values were checked
    before = weights_of(exp)
    with pytest.raises(FloatingPointError, match=r"critic loss is nan.*batch's rews.*the weights are finite"):
        exp.learn()
    assert same(before, weights_of(exp))
    exp.close()


def test_any_error_keeps_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exp = make_ppo(tmp_path, callbacks=[stage(num_batches=2)])
    exp.start()
    before = weights_of(exp)
    monkeypatch.setattr(exp.policy, "after_imitation", mock.Mock(side_effect=KeyError("mine")))
    with pytest.raises(KeyError, match="mine"):
        exp.learn()
    assert same(before, weights_of(exp))
    exp.close()


# ---- warm starts ----


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
    assert "left unchanged: " in line
    assert "policy_head" in line.partition("left unchanged")[2]
    assert "critics" in line.partition("unused")[2]
    assert exp.epoch == 0
    exp.learn()
    exp.close()


def test_impossible_warm_starts_are_refused(tmp_path: Path) -> None:
    base = off_policy_run(tmp_path, epochs=0)
    path = str(base.checkpoints.root / "latest" / "policy.safetensors")
    wider = partial(FFTstepEncoder, n_layers=3, d_hidden=8, d_output=8, normalize_inputs=False)
    message = r"No tensor of .*fits this agent.*: the source has .*critics.*the agent has .*policy_head.*Fix:"
    with pytest.raises(ValueError, match=message):
        make_ppo(tmp_path, tstep_encoder_type=wider, **{"WarmStart.source": path}).start()
    with pytest.raises(
        ValueError, match=r"WarmStart.source: .* belongs to another environment: .*action.*Fix:"
    ):
        make_ppo(tmp_path, "box", **{"WarmStart.source": path}).start()
    with pytest.raises(ValueError, match=r"restore_from and WarmStart.source are both set.*Fix:"):
        make_ppo(tmp_path, **{"WarmStart.source": "./x"}, restore_from="./y").start()
    with pytest.raises(ValueError, match=r"WarmStart.source = 'other:best' names an artifact"):
        make_ppo(tmp_path, **{"WarmStart.source": "other:best"}).start()
    with pytest.raises(FileNotFoundError, match=r"WarmStart.source: .*does not exist"):
        make_ppo(tmp_path, **{"WarmStart.source": str(tmp_path / "none")}).start()


# ---- from one kind of agent to the other through files ----


def test_both_kinds_of_agents_learn_from_the_data_that_ppo_stores(tmp_path: Path) -> None:
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
    made = stage(DiskTrajDataset(dset_name="teed"), num_batches=4)
    exp = run(make_ppo(tmp_path, run_name="cloned", callbacks=[made]))
    assert exp.hooks.callbacks[0].is_done
    assert any("pretrain/loss" in row for row in metrics(exp.run_dir))
