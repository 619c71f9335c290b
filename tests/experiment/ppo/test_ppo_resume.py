"""An on-policy run that dies and resumes equals the uninterrupted run, bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from loxodon.agents import PPOLoss, RewardNormalizer
from loxodon.envs import ClassicControlState, EnvSpec, TMazePassive
from loxodon.experiment import Experiment
from loxodon.experiment.ppo import KLAdaptiveLR

from ...rounding import rounding
from ..fakes import die_in, metrics
from .whole_runs import differing, learned, ppo_experiment

EPOCHS, MIDDLE = 3, 1
VALUE_ROUNDING = rounding(10.0, num_ops=256 * 4 * 8)  # scale; width and layers of the agent, timesteps
ALL_STATE = {"reward_normalizer": RewardNormalizer, "lr_adapter": partial(KLAdaptiveLR, kl_threshold=1e-4)}
CARTPOLE = EnvSpec(ClassicControlState, {"env": "CartPole-v1"})
LONG = EnvSpec(TMazePassive, {"horizon": 40})


def resumable(folder: Path, encoder: str, env: EnvSpec, save_env_state: bool, **changes: Any) -> Experiment:
    learner = {"chunk_len": 4, **ALL_STATE, **changes.pop("learner", {})}
    agent = {"value_norm": "popart", **changes.pop("agent", {})}
    settings: dict[str, Any] = {
        "epochs": EPOCHS,
        "ckpt_interval": MIDDLE,
        "train_timesteps_per_epoch": 8,
        "make_train_env": env,
        "make_val_env": env,
        "val_timesteps_per_epoch": 6,
        "val_interval": 2,
        "Collector.save_env_state": save_env_state,
        "CheckpointManager.exact_resume": True,
        "deterministic": True,
    }
    return ppo_experiment(
        folder,
        encoder,
        agent=agent,
        learner=learner,
        tstep={"normalize_inputs": True},
        **{**settings, **changes},
    )


CASES: list[tuple[str, dict[str, Any], bool]] = [  # encoder, settings, whether episodes continue
    ("identity", {}, True),
    ("gru", {}, False),
    ("gru", {"learner": {"burn_in": 2}}, True),
    ("lstm", {"agent": {"share_encoder": False}}, True),
    ("transformer", {"learner": {"context_mode": "episode"}}, True),
    ("transformer", {"learner": {"context_mode": "segment"}}, True),
    (
        "transformer",
        {"agent": {"share_encoder": False, "loss_type": partial(PPOLoss, kind="kl_penalty")}},
        False,
    ),
]


@pytest.mark.parametrize(("encoder", "changes", "save_env_state"), CASES)
def test_death_and_resume_change_no_bit(
    tmp_path: Path, encoder: str, changes: dict[str, Any], save_env_state: bool
) -> None:
    def make(name: str) -> Experiment:
        env = LONG if encoder == "transformer" else CARTPOLE
        exp = resumable(tmp_path / name, encoder, env, save_env_state, **changes)
        exp.start()
        return exp

    whole = learned(make("whole"))
    first = make("parts")
    die_in(first, MIDDLE)  # in the middle of the updates that follow the checkpoint
    first.train_envs.close()
    second = make("parts")
    assert second.load_checkpoint() == MIDDLE
    if save_env_state:
        assert second.collector.groups[0].state.time_idxs.any()
    learned(second)
    assert differing(whole, second) == []
    records = metrics(whole.run_dir)
    assert records == metrics(second.run_dir)
    figures = [r for r in records if "ppo/learning_rate" in r]
    assert len(figures) == EPOCHS
    assert len({r["ppo/learning_rate"] for r in figures}) > 1  # otherwise its adaptation would not be tested
    is_read_differently = changes.get("learner", {}).get("burn_in")
    for r in [] if is_read_differently else figures:
        assert r["ppo/initial_logratio_abs_max"] < r["ppo/initial_logratio_rounding_max"]
        assert r["ppo/initial_value_diff_abs_max"] < VALUE_ROUNDING


def test_earlier_timesteps_of_other_shapes_are_refused(tmp_path: Path) -> None:
    exp = resumable(tmp_path, "transformer", LONG, True)
    exp.start()
    exp.collect_new_training_data()
    exp.save_checkpoint()
    exp.close()
    again = resumable(tmp_path, "transformer", LONG, True, max_seq_len=7)
    again.start()
    with pytest.raises(ValueError, match=r"earlier timesteps|window|max_seq_len"):
        again.load_checkpoint()
    again.close()


@pytest.mark.parametrize("save_env_state", [False, True])
def test_reward_sums_restart_where_episodes_are_cut(tmp_path: Path, save_env_state: bool) -> None:
    exp = resumable(tmp_path, "gru", CARTPOLE, save_env_state)
    exp.start()
    next(exp.learn_iter())
    normalizer = exp.trainer.reward_normalizer
    assert np.any(normalizer.state_dict()["accumulators"])
    exp.save_checkpoint()  # resets the environments unless it stores them
    with mock.patch.object(normalizer, "restart", wraps=normalizer.restart) as restart:
        next(exp.learn_iter())
    assert restart.called is not save_env_state
    exp.close()
