"""Where environments offer their state, a resumed rollout goes on in mid-episode, to the last bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loxodon.agents import Agent, PPOAgent
from loxodon.envs import ClassicControlState, EnvSpec, TMazePassive
from loxodon.experiment import Experiment
from loxodon.experiment.checkpoint.store import CheckpointManager
from loxodon.nets import FFTstepEncoder, GRUTrajEncoder, TransformerTrajEncoder

from .fakes import CountingEnv, make_experiment
from .test_exact_resume import die_in
from .test_resume import metrics

EPOCHS, MIDDLE = 4, 2
ENVS = {
    "tmaze": EnvSpec(TMazePassive, {"horizon": 40}),
    "cartpole": EnvSpec(ClassicControlState, {"env": "CartPole-v1"}),
}
ENCODERS = {
    "gru": partial(GRUTrajEncoder, d_hidden=8, d_output=8),
    "transformer": partial(TransformerTrajEncoder, d_model=8, d_ff=16, n_heads=2, n_layers=2),
}


def acting(folder: Path, env: str, encoder: str = "gru", **changes: Any) -> Experiment:
    """A run whose epochs end in the middle of episodes."""
    settings: dict[str, Any] = {
        "agent_type": partial(Agent, num_critics=2),
        "tstep_encoder_type": partial(FFTstepEncoder, d_hidden=8, d_output=8),
        "traj_encoder_type": ENCODERS[encoder],
        "make_train_env": ENVS[env],
        "make_val_env": ENVS[env],
        "val_timesteps_per_epoch": 0,
        "train_timesteps_per_epoch": 13,
        "traj_save_len": 10,
        "ckpt_interval": MIDDLE,
        "epochs": EPOCHS,
        "deterministic": True,
    }
    exp = make_experiment(folder, **{**settings, **changes})
    exp.start()
    return exp


def ended(exp: Experiment) -> Experiment:
    exp.learn()
    exp.close()
    return exp


def stored(exp: Experiment) -> list[tuple[Any, ...]]:
    """Everything in the trajectory files, in the order of writing."""
    paths = sorted(Path(exp.dataset.save_new_trajs_to).glob("*.npz"), key=lambda p: p.name.split("_")[-1])
    found = []
    for path in paths:
        with np.load(path) as file:
            found.append(tuple((name, file[name].tobytes()) for name in sorted(file.files)))
    return sorted(found)


@pytest.fixture(autouse=True)
def _deterministic_algorithms_are_put_back() -> Any:
    yield
    torch.use_deterministic_algorithms(False)


CASES = [
    ("cartpole", "transformer", {"env_mode": "sync"}),
    ("tmaze", "gru", {"env_mode": "async", "overlap_sampling": True, "AsyncVectorEnv.num_workers": 2}),
    ("tmaze", "gru", {"agent_type": PPOAgent, "env_mode": "sync"}),
    ("cartpole", "transformer", {"agent_type": PPOAgent, "env_mode": "sync"}),
]


@pytest.mark.parametrize(("env", "encoder", "changes"), CASES)
def test_two_halves_equal_the_whole_in_the_middle_of_episodes(
    tmp_path: Path, env: str, encoder: str, changes: dict[str, Any]
) -> None:
    whole = ended(acting(tmp_path / "whole", env, encoder, **changes))
    first = acting(tmp_path / "parts", env, encoder, **changes)
    die_in(first, MIDDLE)
    first.train_envs.close()
    saved = first.checkpoints.read(first.checkpoints.state_dir(MIDDLE - 1)).own["collector"]["rollout"]
    timesteps = np.concatenate([part["time_idxs"] for part in saved])
    assert (timesteps > 0).any()
    second = acting(tmp_path / "parts", env, encoder, **changes)
    second.load_checkpoint()
    assert np.array_equal(np.concatenate([g.state.time_idxs for g in second.collector.groups]), timesteps)
    ended(second)
    weights = [exp.policy.state_dict() for exp in (whole, second)]
    assert [name for name, value in weights[0].items() if not torch.equal(value, weights[1][name])] == []
    assert metrics(whole.run_dir) == metrics(second.run_dir)
    assert stored(whole) == stored(second)


def test_without_the_setting_the_same_run_begins_new_episodes(tmp_path: Path) -> None:
    exp = acting(tmp_path, "tmaze", **{"Collector.save_env_state": False})
    exp.collect_new_training_data()
    assert exp.collector.groups[0].state.time_idxs.any()
    exp.save_checkpoint()
    assert exp.collector.groups[0].state.time_idxs.any()
    exp.close()
    again = acting(
        tmp_path, "tmaze", **{"Collector.save_env_state": True}
    )  # the checkpoint has no environments
    again.load_checkpoint()
    assert not again.collector.groups[0].state.time_idxs.any()
    again.close()


def memory(exp: Experiment) -> dict[str, torch.Tensor]:
    return exp.policy.export_hidden_state(exp.collector.groups[0].state.hidden_state)


def test_memory_and_running_returns_survive(tmp_path: Path) -> None:
    exp = acting(tmp_path, "cartpole", "transformer")
    exp.collect_new_training_data()
    before = memory(exp)
    exp.save_checkpoint()
    assert any(rows.float().abs().sum() > 0 for rows in before.values())
    running = exp.collector.histories.returns.running()
    exp.close()
    again = acting(tmp_path, "cartpole", "transformer")
    again.load_checkpoint()
    for one in (exp, again):
        assert all(torch.equal(rows, before[name]) for name, rows in memory(one).items())
    assert running["lengths"].any()
    for name, values in again.collector.histories.returns.running().items():
        assert np.array_equal(values, running[name])
    again.close()


def test_a_run_with_other_environments_is_refused(tmp_path: Path) -> None:
    exp = acting(tmp_path, "tmaze", exploration_wrapper_type=None)
    exp.collect_new_training_data()
    exp.save_checkpoint()
    exp.close()
    changes = {"exploration_wrapper_type": None, "parallel_actors": 2, "Collector.save_env_state": True}
    again = acting(tmp_path, "tmaze", **changes)
    with pytest.raises(ValueError, match=r"states of 3 environments.*this run has 2.*Fix:"):
        again.load_checkpoint()
    again.close()


def test_an_environment_without_the_methods_is_named(tmp_path: Path) -> None:
    message = r"CountingEnv cannot be stored: CountingEnv has no get_state\(\) and set_state.*Fix:"
    exp = make_experiment(tmp_path, **{"Collector.save_env_state": True}, make_train_env=EnvSpec(CountingEnv))
    with pytest.raises(ValueError, match=message):
        exp.start()
    exp.train_envs.close()


def test_arrays_of_an_environment_come_back_as_they_were(tmp_path: Path) -> None:
    exp = acting(tmp_path, "cartpole")
    exp.collect_new_training_data()
    folder = exp.save_checkpoint()
    exp.close()
    assert folder is not None
    state = CheckpointManager(exp.run_dir, exp.run_name).read(folder).own["collector"]["rollout"][0]
    cart = state["envs"][0]["layers"][0]["state"]["layers"][-1]["state"]["attributes"]["state"]
    assert (cart.dtype, cart.shape) == (np.float64, (4,))
