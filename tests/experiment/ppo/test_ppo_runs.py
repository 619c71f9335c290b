"""Whole on-policy runs: custom agents, refused settings, the end of a run, and its files."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gin
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from loxodon.agents import GAE, ConstantSchedule, PPOAgent, PPOLoss
from loxodon.data import DiskTrajDataset
from loxodon.envs import EnvSpec
from loxodon.experiment import EvaluateAfterLoad, Experiment, Pretraining, load_policy
from loxodon.experiment.checkpoint.policy_file import read_info
from loxodon.experiment.ppo import KLAdaptiveLR
from loxodon.nets import FFTstepEncoder, GRUTrajEncoder
from loxodon.tools.run import main

from ...rounding import rounding
from ..fakes import CountingEnv, metrics
from .rollouts import RandomLengths
from .whole_runs import learned, ppo_experiment, weights

VALUE_ROUNDING = rounding(1.0, num_ops=256 * 4 * 8)  # width and layers of the agent, timesteps


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"mode": "learn"},
            r"Experiment.mode is 'learn'.*on-policy agent.*Fix: set Experiment.mode = 'both'",
        ),
        ({"mode": "collect"}, r"Experiment.mode is 'collect'.*Fix:"),
        ({"sample_actions": False}, r"Experiment.sample_actions is False.*Fix:"),
        ({"replay_ratio": 1.0}, r"Experiment.replay_ratio is 1.0.*Fix:"),
        (
            {"train_timesteps_per_epoch": 0, "val_timesteps_per_epoch": 4},
            r"train_timesteps_per_epoch is 0.*Fix:",
        ),
        ({"start_collecting_at_epoch": 1}, r"Experiment.start_collecting_at_epoch is 1.*Fix:"),
        ({"learner": {"minibatches": 99}}, r"too few for PPOLearner.minibatches = 99. Fix:"),
        ({"learner": {"minibatches": 0}}, r"PPOLearner.minibatches is 0.*Fix:"),
        ({"learner": {"update_epochs": 0}}, r"PPOLearner.update_epochs is 0.*Fix:"),
        ({"learner": {"chunk_len": 0}}, r"PPOLearner.chunk_len is 0.*Fix:"),
        ({"learner": {"target_kl": -1.0}}, r"PPOLearner.target_kl is -1.0.*above 0.*Fix:"),
        ({"learner": {"chunk_len": 7}}, r"chunk_len is 7.*at most Experiment.max_seq_len = 6. Fix:"),
        ({"learner": {"chunk_len": 3, "burn_in": 2}}, r"burn_in is 2 with chunk_len 3.*divide.*Fix:"),
        ({"learner": {"chunk_len": 4, "burn_in": 5}}, r"burn_in is 5 with chunk_len 4.*Fix:"),
        ({"learner": {"context_mode": "window"}}, r"context_mode is 'window'.*Fix:"),
        ({"learner": {"stop_scope": "run"}}, r"stop_scope is 'run'.*Fix:"),
        (
            {"learner": {"lr_adapter": KLAdaptiveLR}, "lr_schedule": ConstantSchedule(0.5)},
            r"Both Experiment.lr_schedule and PPOLearner.lr_adapter.*Fix:",
        ),
    ],
)
def test_settings_that_do_not_fit_an_on_policy_agent_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    exp = ppo_experiment(tmp_path, **changes)
    with pytest.raises(ValueError, match=words):
        exp.start()


@pytest.mark.parametrize(
    "kwargs",
    [{"kl_threshold": 0.0}, {"factor": 1.0}, {"band": 0.5}, {"min_lr": 1.0, "max_lr": 0.1}],
)
def test_impossible_bounds_of_the_learning_rate_are_refused(kwargs: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"KLAdaptiveLR has .*Fix:"):
        KLAdaptiveLR(**kwargs)
    with pytest.raises(ValueError, match=r"KLAdaptiveLR.per is 'run'.*Fix:"):
        KLAdaptiveLR(per="run")


AT_DEFAULTS = {"batch_size": 24, "train_batches_per_epoch": 1000, "log_interval": 300}


def test_settings_without_an_effect_are_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gin.parse_config("Experiment.padded_sampling = 'left'")
    changes = {**AT_DEFAULTS, "train_batches_per_epoch": 7, "exploration_wrapper_type": None}
    learned(ppo_experiment(tmp_path, **changes))
    lines = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    assert len(lines) == 1
    assert ": dloader_workers, padded_sampling, train_batches_per_epoch. Fix: " in lines[0]


def test_what_a_run_that_stores_or_imitates_reads_is_not_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of_files = {"traj_save_len": 9, "time_limits_terminate": True, "save_trajs_as": "npz-compressed"}
    stores = ppo_experiment(tmp_path, **AT_DEFAULTS, **of_files, dataset=DiskTrajDataset())
    stores.start()
    stores.close()
    (line,) = [line for line in caplog.messages if "no effect" in line]
    assert "PPOLearner: dloader_workers. Fix: " in line
    caplog.clear()
    of_batches = {"batch_size": 7, "packed_batches": True, "padded_sampling": "both", "log_interval": 3}
    demos = DiskTrajDataset(dset_root=str(tmp_path), dset_name=stores.run_name, takes_new_trajs=False)
    callbacks = [partial(Pretraining, dataset=demos, num_batches=1)]
    imitates = ppo_experiment(
        tmp_path, **{**AT_DEFAULTS, **of_batches}, callbacks=callbacks, run_name="imitates"
    )
    imitates.start()
    imitates.close()
    assert [line for line in caplog.messages if "no effect" in line] == []


class OwnStep(Experiment):
    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().train_step(*args, **kwargs)


def test_a_step_of_ones_own_that_nothing_calls_gives_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exp = ppo_experiment(tmp_path)
    exp.__class__ = OwnStep
    exp.start()
    exp.close()
    assert "OwnStep.train_step is not called: the on-policy agent PPOAgent" in caplog.text


class RisingEnv(gym.Env[Any, Any]):
    """Every evaluation but the last has a higher return than the one before."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)
    rewards: Iterator[float]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), next(RisingEnv.rewards), True, False, {}


def judged(tmp_path: Path, rewards: list[float], **changes: Any) -> Experiment:
    """A run whose evaluations have these returns."""
    env = EnvSpec(RisingEnv)
    RisingEnv.rewards = iter(rewards)
    settings: dict[str, Any] = {
        "make_train_env": EnvSpec(FlatEnv),
        "make_val_env": env,
        "parallel_actors": 1,
        "train_timesteps_per_epoch": 12,
        "learner": {"chunk_len": 3},
        "val_timesteps_per_epoch": 1,
        "epochs": 3,
        "evaluate_at_end": False,
    }
    return ppo_experiment(tmp_path, **{**settings, **changes})


@pytest.mark.parametrize(
    ("setting", "score", "epoch"),
    [
        ("", 5.0, 1),
        ("CheckpointManager.lowest_is_best = True", 1.0, 0),
        ("CheckpointManager.best_by = 'ppo/updates'", 4.0, 0),  # any logged metric can be used
        ("CheckpointManager.best_by = 'val/sucess'", None, None),
    ],
)
def test_the_policy_of_the_best_evaluation_is_kept(
    tmp_path: Path, setting: str, score: float | None, epoch: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    gin.parse_config(setting)
    exp = learned(judged(tmp_path, [1.0, 5.0, 2.0]))
    assert exp.best_score == score
    if score is None:
        assert "best_by is 'val/sucess', but no such metric was logged" in caplog.text
    else:
        assert read_info(exp.checkpoints.best_path).epoch == epoch


def test_a_resumed_run_compares_anew_if_the_metric_changes(tmp_path: Path) -> None:
    learned(judged(tmp_path, [1.0, 5.0, 2.0]))
    for setting, score in (("CheckpointManager.best_by = 'val/length'", None), ("", 5.0)):
        gin.clear_config()
        gin.parse_config(setting)
        exp = judged(tmp_path, [])
        exp.start()
        exp.load_checkpoint()
        assert exp.best_score == score
        exp.close()


@pytest.mark.parametrize("interval", [None, 1])
def test_a_loaded_run_is_evaluated_before_it_continues(tmp_path: Path, interval: int | None) -> None:
    learned(judged(tmp_path, [1.0], epochs=1))
    exp = judged(tmp_path, [2.0, 3.0], epochs=2, val_interval=interval, callbacks=[EvaluateAfterLoad])
    exp.start()
    exp.load_checkpoint()
    learned(exp)
    returns = [record["val/return"] for record in metrics(exp.run_dir) if "val/return" in record]
    assert returns == [1.0, 2.0]  # once, whether or not it was due


class FlatEnv(RisingEnv):
    """RisingEnv without rewards."""

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 0.0, True, False, {}


def test_a_critic_that_returns_nan_is_reported(tmp_path: Path) -> None:
    exp = ppo_experiment(tmp_path)
    exp.start()
    with torch.no_grad():
        next(iter(exp.policy.value_head.parameters())).fill_(float("nan"))
    with pytest.raises(ValueError, match=r"values has 24 NaN.*step 0 of env 0. Fix:"):
        exp.learn()
    exp.close()


def test_two_halves_in_worker_processes_with_compiled_acting_are_evaluated_as_they_acted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = PPOAgent.compile_acting
    monkeypatch.setattr(PPOAgent, "compile_acting", lambda self: compiled(self, backend="eager"))
    exp = ppo_experiment(
        tmp_path,
        "transformer",
        env_mode="async",
        **{"AsyncVectorEnv.num_workers": 2},
        parallel_actors=4,
        compile_acting=True,
        learner={"chunk_len": 4},
    )
    exp.start()
    assert len(exp.trainer.buffers) == 2
    learned(exp)
    found = [r for r in metrics(exp.run_dir) if "ppo/initial_logratio_abs_max" in r]
    assert len(found) == 2
    assert all(r["ppo/initial_logratio_abs_max"] < r["ppo/initial_logratio_rounding_max"] for r in found)
    assert all(r["ppo/initial_value_diff_abs_max"] < VALUE_ROUNDING for r in found)


# ---- numbers ----


@pytest.fixture
def float32_only(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fails if the quantities that PPO compares or divides have another precision."""
    functions = [(PPOLoss, "actor"), (PPOLoss, "critic"), (PPOLoss, "log_ratio"), (GAE, "__call__")]
    calls = set()

    def checked(name: str, inner: Any) -> Any:
        def call(self: Any, *args: Any) -> Any:
            found = inner(self, *args)
            every = [*args, *(found if isinstance(found, tuple) else (found,))]
            kinds = {x.dtype for x in every if isinstance(x, Tensor) and x.is_floating_point()}
            assert kinds == {torch.float32}
            calls.add(name)
            return found

        return call

    for owner, name in functions:
        monkeypatch.setattr(owner, name, checked(name, getattr(owner, name)))
    yield
    assert calls == {name for _, name in functions}


@pytest.mark.usefixtures("float32_only")
@pytest.mark.parametrize(("encoder", "is_discrete"), [("ff", False), ("gru", True), ("transformer", False)])
def test_bfloat16_keeps_ratios_and_losses_in_float32(tmp_path: Path, encoder: str, is_discrete: bool) -> None:
    env = EnvSpec(RandomLengths, {"is_discrete": is_discrete})
    exp = ppo_experiment(tmp_path, encoder, make_train_env=env, mixed_precision="bf16")
    exp.start()
    figures: list[dict[str, float]] = []
    log = exp.log
    exp.log = lambda values, *args: (figures.append(dict(values)), log(values, *args))[1]  # type: ignore[method-assign]
    exp.learn()
    found = [one for one in figures if "ppo/loss" in one]
    assert len(found) == 2
    for one in found:
        assert 0.0 <= one["ppo/initial_logratio_abs_max"] < one["ppo/initial_logratio_rounding_max"]
        assert np.isfinite([one["ppo/loss"], one["ppo/grad_norm"], one["ppo/kl"]]).all()
        assert one["ppo/skipped_updates"] == 0
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in exp.policy.parameters())
    exp.close()


def test_nan_losses_are_skipped_if_asked_for(tmp_path: Path) -> None:
    exp = ppo_experiment(tmp_path, "ff", epochs=1, learner={"update_epochs": 8}, **{"Learner.on_nan": "skip"})
    exp.start()
    spoils = [True] * 3 + [False] * 13
    compute_loss = exp.learner.compute_loss

    def spoilt(*args: Any, **kwargs: Any) -> Any:
        found = compute_loss(*args, **kwargs)
        return {**found, "Actor Loss": found["Actor Loss"] * torch.nan} if spoils.pop(0) else found

    exp.learner.compute_loss = spoilt
    exp.learn()
    (record,) = [one for one in metrics(exp.run_dir) if "ppo/loss" in one]
    assert (record["ppo/skipped_updates"], record["ppo/updates"]) == (3, 13)
    assert np.isfinite([record["ppo/loss"], record["ppo/kl_last"]]).all()
    assert all(p.isfinite().all() for p in exp.policy.parameters())
    exp.close()


# ---- with gin ----

PRIVILEGED = """
GRUTrajEncoder.d_hidden = 8
GRUTrajEncoder.d_output = 8
FFTstepEncoder.d_hidden = 8
FFTstepEncoder.d_output = 8
PPOAgent.share_encoder = False
PPOAgent.actor_obs_keys = ['seen']
PPOAgent.critic_obs_keys = ['seen', 'hidden']
"""


class TwoViews(RandomLengths):
    """One part of the observation is for the value function only, and one has no elements."""

    def __init__(self) -> None:
        super().__init__()
        box = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        parts = {"seen": box, "hidden": box, "empty": spaces.Box(-1, 1, (0,), np.float32)}
        self.observation_space = spaces.Dict(parts)  # type: ignore[assignment]

    def _obs(self) -> Any:
        return {"seen": super()._obs(), "hidden": super()._obs(), "empty": np.zeros(0, np.float32)}


def test_a_policy_file_acts_without_the_observations_of_the_value_function(tmp_path: Path) -> None:
    gin.parse_config(PRIVILEGED)
    env = EnvSpec(TwoViews)
    exp = ppo_experiment(
        tmp_path,
        agent_type=PPOAgent,
        tstep_encoder_type=FFTstepEncoder,
        traj_encoder_type=GRUTrajEncoder,
        make_train_env=env,
        make_val_env=env,
    )
    learned(exp)
    gin.clear_config()
    shapes = {"seen": (2, 3), "hidden": (2, 3), "empty": (2, 0)}
    obs = {key: np.ones(shape, np.float32) for key, shape in shapes.items()}
    policy, actions = load_policy(exp.checkpoints.latest_path), []
    for hidden in (obs["hidden"], obs["hidden"] + 9):
        policy.reset(num_envs=2)
        actions.append(policy.act({**obs, "hidden": hidden}))
    assert np.array_equal(*actions)


def command(folder: Path, *words: str) -> list[str]:
    return ["--config", "ppo/cartpole", f"Experiment.ckpt_base_dir={str(folder)!r}", *words]


SMALLER = (
    "Experiment.torch_threads=1",
    "Experiment.parallel_actors=2",
    "Experiment.train_timesteps_per_epoch=32",
    "PPOLearner.update_epochs=1",
    "PPOLearner.minibatches=17",  # more than a rollout of a few steps has
)


def test_check_tries_a_whole_rollout_of_the_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path, *SMALLER, "--check")) == 0
    printed = capsys.readouterr().out
    assert "up to 17 updates" in printed
    assert "check passed: 64 env steps, 17 updates" in printed
    assert list(tmp_path.iterdir()) == []


# ---- before learning begins ----

LONG = EnvSpec(CountingEnv, {"length": 30, "noise": 1.0})  # longer than a rollout of 8 steps


def started(folder: Path, **changes: Any) -> Experiment:
    exp = ppo_experiment(folder, make_train_env=LONG, make_val_env=LONG, epochs=4, **changes)
    exp.start()
    return exp


def is_statistic(name: str) -> bool:
    return "input_norm" in name or "value_norm" in name


def test_before_learning_begins_statistics_move_and_weights_do_not(tmp_path: Path) -> None:
    exp = started(tmp_path, start_learning_at_epoch=2)
    before, epochs = weights(exp), exp.learn_iter()
    figures = [next(epochs), next(epochs)]
    after = weights(exp)
    assert {name for name, value in before.items() if not torch.equal(value, after[name])} == {
        name for name in before if is_statistic(name)
    }
    figures += list(epochs)
    exp.close()
    assert [one["ppo/updates"] for one in figures] == [0, 0, 4, 4]
    moved = {name for name, value in weights(exp).items() if not torch.equal(value, after[name])}
    assert any(not is_statistic(name) for name in moved)
