"""Checkpoints do not disturb training: runs with and without them are equal, and nothing is lost."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from loxodon.agents import Agent, PPOAgent
from loxodon.data import load_trajectory
from loxodon.envs import EnvSpec, FrozenLake, MazeRunner, generator_state, set_generator_state
from loxodon.experiment import Experiment
from loxodon.experiment.ppo import PPOLearner
from loxodon.nets import FFTstepEncoder, GRUTrajEncoder, TransformerTrajEncoder

from ..transformers import recommended
from .fakes import CountingEnv, die_in, make_experiment, metrics, run, stored

EPOCHS, STEPS = 6, 8


class LongEnv(CountingEnv):
    """Its episodes last 18 to 30 steps, which is several epochs."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        found = super().reset(seed=seed, options=options)
        self.length = int(self.np_random.integers(18, 31))
        return found


class StoredEnv(LongEnv):
    """LongEnv that offers its state."""

    def get_state(self) -> dict[str, Any]:
        return {"place": [self.episode, self.timestep, self.length], "generator": generator_state(self)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.episode, self.timestep, self.length = state["place"]
        set_generator_state(self, state["generator"])


AGENTS: dict[str, dict[str, Any]] = {
    "off-policy": {"traj_save_len": 13, "env_mode": "sync"},
    "overlap": {"traj_save_len": 13, "env_mode": "async", "AsyncVectorEnv.num_workers": 2},
    "ppo": {
        "agent_type": PPOAgent,
        "on_policy_learner_type": partial(PPOLearner, minibatches=2, update_epochs=2, chunk_len=4, burn_in=2),
        "exploration_wrapper_type": None,
        "env_mode": "sync",
    },
    "ppo-transformer": {
        "agent_type": PPOAgent,
        "on_policy_learner_type": partial(PPOLearner, minibatches=2, update_epochs=2),
        "traj_encoder_type": partial(
            TransformerTrajEncoder, d_model=28, d_ff=16, n_layers=1, **recommended(2)
        ),
        "exploration_wrapper_type": None,
        "env_mode": "async",
        "AsyncVectorEnv.num_workers": 2,
    },
}


def long_run(folder: Path, agent: str, env: type[LongEnv], **changes: Any) -> Experiment:
    """A run whose episodes are longer than its epochs, not yet started."""
    settings: dict[str, Any] = {
        "agent_type": partial(Agent, num_critics=2),
        "tstep_encoder_type": partial(FFTstepEncoder, d_hidden=8, d_output=8),
        "traj_encoder_type": partial(GRUTrajEncoder, d_hidden=8, d_output=8),
        "make_train_env": EnvSpec(env, {"noise": 1.0}),
        "make_val_env": EnvSpec(env, {"noise": 1.0}),
        "val_timesteps_per_epoch": 0,
        "train_timesteps_per_epoch": STEPS,
        "train_batches_per_epoch": 2,
        "epochs": EPOCHS,
        "deterministic": True,
        **AGENTS[agent],
    }
    return make_experiment(folder, **{**settings, **changes})


def assert_same(one: Experiment, two: Experiment) -> None:
    """Check that weights (bit for bit), all records and the trajectory files are equal."""
    assert metrics(one.run_dir) == metrics(two.run_dir)
    first, second = one.policy.state_dict(), two.policy.state_dict()
    assert [name for name, value in first.items() if not torch.equal(value, second[name])] == []
    assert stored(one) == stored(two)


@pytest.mark.parametrize(
    ("agent", "env"),
    [("overlap", StoredEnv), ("ppo-transformer", StoredEnv), ("off-policy", LongEnv), ("ppo", LongEnv)],
)
def test_checkpoints_and_a_death_change_neither_episodes_nor_files_nor_weights(
    tmp_path: Path, agent: str, env: type[LongEnv]
) -> None:
    without, often = (
        run(long_run(tmp_path / str(interval), agent, env, ckpt_interval=interval)) for interval in (None, 1)
    )
    records = metrics(without.run_dir)
    assert sum(record.get("collect/episodes", 0) for record in records) >= 5
    assert max(record.get("collect/episode_length", 0) for record in records) > 2 * STEPS
    assert_same(without, often)
    if env is StoredEnv:
        first = long_run(tmp_path / "parts", agent, env, ckpt_interval=3)
        first.start()
        die_in(first, 4)
        first.train_envs.close()
        parts = run(long_run(tmp_path / "parts", agent, env), lambda exp: exp.load_checkpoint())
        assert_same(without, parts)


def num_stored(exp: Experiment) -> int:
    return sum(len(load_trajectory(path)) for path in (exp.run_dir / "buffer/fifo").glob("*.npz"))


@pytest.mark.parametrize(
    ("end", "env"),
    [
        ("killed", LongEnv),
        ("killed", StoredEnv),
        ("stopped", StoredEnv),
        ("stopped without rights", LongEnv),
        ("finished", StoredEnv),
    ],
)
def test_every_step_is_stored_once(tmp_path: Path, end: str, env: type[LongEnv]) -> None:
    changes: dict[str, Any] = {"has_dset_edit_rights": end != "stopped without rights", "ckpt_interval": 3}
    first = long_run(tmp_path, "off-policy", env, **changes, epochs=5 if end == "finished" else EPOCHS)
    first.start()
    if end == "killed":
        die_in(first, 4)
    elif end == "finished":
        first.learn()
    else:
        for _ in first.learn_iter():
            if first.epoch == 4:
                first.request_stop()
    if end != "killed":
        first.close()
        assert num_stored(first) == first.env_steps == 5 * STEPS * 3
    second = long_run(tmp_path, "off-policy", env, **changes)
    second.start()
    second.load_checkpoint()
    assert second.collector.groups[0].state.time_idxs.any() == (env is StoredEnv)
    second.learn()
    second.close()
    assert num_stored(second) == second.env_steps == EPOCHS * STEPS * 3


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"parallel_actors": 2}, "states of 3 environments .* this run has 2"),
    ({"make_train_env": EnvSpec(FrozenLake, {"slip_prob": 0.5})}, "this environment has .*'slip_prob': 0.5"),
]


@pytest.mark.parametrize(("changes", "words"), CHANGES)
def test_new_episodes_begin_if_states_do_not_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], words: str
) -> None:
    lake = {"make_train_env": EnvSpec(FrozenLake, {}), "exploration_wrapper_type": None}
    first = long_run(tmp_path, "off-policy", LongEnv, **lake, traj_save_len=1000)
    first.start()
    first.collect_new_training_data()
    first.save_checkpoint()
    required = long_run(
        tmp_path, "off-policy", LongEnv, **{**lake, **changes, "Collector.save_env_state": True}
    )
    required.start()
    with pytest.raises(ValueError, match=f"{words}.*Fix:"):
        required.load_checkpoint()
    own = {**lake, **changes, "Collector.save_env_state": None}
    second = long_run(tmp_path, "off-policy", LongEnv, **own)
    second.start()
    with caplog.at_level(logging.WARNING, logger="loxodon"):
        second.load_checkpoint()
    assert "Training begins new episodes" in caplog.text
    assert not second.collector.groups[0].state.time_idxs.any()
    assert num_stored(second) == first.env_steps
    for exp in (first, required, second):
        exp.close()


def test_without_the_setting_new_episodes_begin(tmp_path: Path) -> None:
    first = long_run(tmp_path, "off-policy", StoredEnv, **{"Collector.save_env_state": False})
    first.start()
    first.collect_new_training_data()
    first.save_checkpoint()
    assert first.collector.groups[0].state.time_idxs.any()  # the checkpoint does not disturb the rollout
    second = long_run(tmp_path, "off-policy", StoredEnv, **{"Collector.save_env_state": True})
    second.start()
    second.load_checkpoint()  # the checkpoint has no environments
    assert not second.collector.groups[0].state.time_idxs.any()
    first.close()
    second.close()


def test_an_environment_without_the_methods_is_named(tmp_path: Path) -> None:
    exp = long_run(tmp_path, "off-policy", LongEnv, **{"Collector.save_env_state": True})
    with pytest.raises(
        ValueError, match=r"LongEnv cannot be stored: LongEnv has no get_state\(\) and .*Fix:"
    ):
        exp.start()
    exp.train_envs.close()


def test_a_maze_of_another_size_is_refused() -> None:
    small, large = MazeRunner(size=7), MazeRunner(size=9)
    small.reset(seed=0)
    large.reset(seed=0)
    with pytest.raises(
        ValueError, match=r"MazeRunner with .*'size': 7.*, but this environment has .*'size': 9.*Fix:"
    ):
        large.set_state(small.get_state())


@pytest.mark.parametrize(("interval", "is_warned"), [(2, True), (5, False)])
def test_exact_resumption_warns_if_no_episode_can_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, interval: int, is_warned: bool
) -> None:
    with caplog.at_level(logging.WARNING, logger="loxodon"):
        exp = run(
            long_run(
                tmp_path,
                "off-policy",
                LongEnv,
                epochs=6,
                ckpt_interval=interval,
                **{"CheckpointManager.exact_resume": True},
            )
        )
    ended = sum(record.get("collect/episodes", 0) for record in metrics(exp.run_dir))
    assert (ended == 0) == is_warned
    assert ("No training episode has ended in the 16 steps" in caplog.text) == is_warned
