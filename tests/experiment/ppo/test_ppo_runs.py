"""Whole on-policy runs: agents of one's own, what is refused, how they end, and what they leave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gin
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from loxodon.agents import ConstantSchedule, PPOAgent
from loxodon.data import DiskTrajDataset, load_trajectory
from loxodon.envs import EnvSpec
from loxodon.experiment import Callback, EvaluateAfterLoad, Experiment, load_policy
from loxodon.experiment.checkpoint.policy_file import read_info
from loxodon.experiment.cli import main
from loxodon.experiment.ppo import KLAdaptiveLR
from loxodon.nets import FFTstepEncoder, GRUTrajEncoder

from ...rounding import rounding
from ..test_resume import metrics
from .rollouts import RandomLengths
from .whole_runs import learned, ppo_experiment, weights

VALUE_ROUNDING = rounding(1.0, num_ops=256 * 4 * 8)  # width and layers of the agent, timesteps


@pytest.fixture(autouse=True)
def _gin_is_left_empty() -> Iterator[None]:
    gin.clear_config()
    yield
    gin.clear_config()


class CuriousAgent(PPOAgent):
    """Says of every step how sure it was, beside what PPO needs."""

    def act(self, *args: Any) -> Any:
        output = super().act(*args)
        output.extras["sureness"] = output.extras["log_probs"].exp() * torch.tensor([1.0, 2.0])
        return output


def test_an_extra_output_of_ones_own_agent_reaches_buffer_and_disk_and_it_trains(tmp_path: Path) -> None:
    exp = ppo_experiment(tmp_path, agent_type=CuriousAgent, dataset=DiskTrajDataset())
    exp.start()
    before, rollouts = weights(exp), []
    (buffer,) = exp.trainer.buffers
    read = buffer.read
    buffer.read = lambda: rollouts.append(read()) or rollouts[-1]  # type: ignore[method-assign,func-returns-value]
    epochs = exp.learn_iter()
    next(epochs)
    sureness, log_probs = (rollouts[0].steps[name].copy() for name in ("sureness", "log_probs"))
    assert len(list(epochs)) == 1
    exp.close()
    assert sureness.shape == (8, 3, 2)
    after = weights(exp)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    files = list(Path(exp.dataset.save_new_trajs_to).glob("*.npz"))
    trajectories = [load_trajectory(path) for path in files]
    assert sum(len(traj) for traj in trajectories) == exp.env_steps == 2 * 3 * 8
    for traj in trajectories:
        assert traj.extras["sureness"].shape == (len(traj), 2)
        np.testing.assert_allclose(
            traj.extras["sureness"][:, :1], np.exp(traj.extras["log_probs"]), rtol=1e-5
        )
    np.testing.assert_allclose(log_probs, np.log(sureness[..., :1]), rtol=1e-4, atol=1e-5)


class Mission(gym.ObservationWrapper[Any, Any, Any]):
    """Says in words what there is to do, beside what is seen."""

    def __init__(self) -> None:
        env = RandomLengths()
        super().__init__(env)
        self.observation_space = spaces.Dict({"seen": env.observation_space, "words": spaces.Text(20)})

    def observation(self, observation: Any) -> Any:
        return {"seen": observation, "words": "go on"}


@pytest.mark.parametrize("shares", [True, False])
def test_text_observations_are_left_out(tmp_path: Path, shares: bool) -> None:
    exp = ppo_experiment(
        tmp_path,
        make_train_env=EnvSpec(Mission),
        make_val_env=EnvSpec(Mission),
        val_timesteps_per_epoch=9,
        tstep={"specify_obs_keys": ["seen"]},
        agent={"share_encoder": shares},
    )
    assert learned(exp).learner.gradient_steps == 2 * 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "learn"}, r"Experiment.mode is 'learn', but the on-policy agent .* needs 'both'.*Fix:"),
        ({"mode": "collect"}, r"Experiment.mode is 'collect'.*Fix:"),
        ({"sample_actions": False}, r"Experiment.sample_actions is False.*Fix:"),
        ({"replay_ratio": 1.0}, r"Experiment.replay_ratio is 1.0.*Fix:"),
        (
            {"train_timesteps_per_epoch": 0, "val_timesteps_per_epoch": 4},
            r"train_timesteps_per_epoch is 0.*Fix:",
        ),
        ({"start_collecting_at_epoch": 1}, r"Experiment.start_collecting_at_epoch is 1.*Fix:"),
        ({"learner": {"minibatches": 99}}, r"too few for PPOLearner.minibatches = 99. Fix:"),
        ({"learner": {"minibatches": 0}}, r"minibatches=0.*Fix:"),
        ({"learner": {"update_epochs": 0}}, r"update_epochs=0.*Fix:"),
        ({"learner": {"chunk_len": 7}}, r"chunk_len=7.*at most Experiment.max_seq_len = 6. Fix:"),
        ({"learner": {"chunk_len": 3, "burn_in": 2}}, r"burn_in is 2 with chunk_len 3.*divide.*Fix:"),
        ({"learner": {"chunk_len": 4, "burn_in": 5}}, r"burn_in is 5 with chunk_len 4.*Fix:"),
        ({"learner": {"context_mode": "window"}}, r"context_mode is 'window', allowed are.*Fix:"),
        ({"learner": {"stop_scope": "run"}}, r"stop_scope is 'run'.*Fix:"),
        ({"learner": {"finite_checks": "some"}}, r"finite_checks is 'some'.*Fix:"),
        (
            {"learner": {"lr_adapter": KLAdaptiveLR}, "lr_schedule": ConstantSchedule(0.5)},
            r"Both Experiment.lr_schedule and PPOLearner.lr_adapter.*Fix:",
        ),
    ],
)
def test_settings_that_do_not_go_with_an_on_policy_agent(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    exp = ppo_experiment(tmp_path, **changes)
    with pytest.raises(ValueError, match=words):
        exp.start()


@pytest.mark.parametrize(
    "kwargs",
    [{"kl_threshold": 0.0}, {"factor": 1.0}, {"band": 0.5}, {"min_lr": 1.0, "max_lr": 0.1}, {"min_lr": 0.0}],
)
def test_impossible_bounds_of_the_learning_rate(kwargs: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"KLAdaptiveLR has .*Fix:"):
        KLAdaptiveLR(**kwargs)
    with pytest.raises(ValueError, match=r"KLAdaptiveLR.per is 'run'.*Fix:"):
        KLAdaptiveLR(per="run")


AT_DEFAULTS = {"batch_size": 24, "train_batches_per_epoch": 1000, "log_interval": 300}


def test_settings_without_a_meaning_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gin.parse_config("Experiment.padded_sampling = 'left'")
    changes = {**AT_DEFAULTS, "train_batches_per_epoch": 7, "exploration_wrapper_type": None}
    learned(ppo_experiment(tmp_path, **changes))
    lines = [record.getMessage() for record in caplog.records if "no meaning" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].endswith(": padded_sampling, train_batches_per_epoch.")


def test_nothing_is_said_where_nothing_differs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    learned(ppo_experiment(tmp_path, **AT_DEFAULTS))
    assert "no meaning" not in caplog.text


class RisingEnv(gym.Env[Any, Any]):
    """Each evaluation goes better than the one before, but for the last."""

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
        ("CheckpointManager.best_by = 'ppo/updates'", 4.0, 0),  # whatever is logged
    ],
)
def test_the_best_evaluation_keeps_its_policy(tmp_path: Path, setting: str, score: float, epoch: int) -> None:
    gin.parse_config(setting)
    exp = learned(judged(tmp_path, [1.0, 5.0, 2.0]))
    assert exp.best_score == score
    best = read_info(exp.checkpoints.best_path)
    assert best.epoch == epoch


def test_a_resumed_run_judges_anew_by_another_figure(tmp_path: Path) -> None:
    learned(judged(tmp_path, [1.0, 5.0, 2.0]))
    for setting, score in (("CheckpointManager.best_by = 'val/length'", None), ("", 5.0)):
        gin.clear_config()
        gin.parse_config(setting)
        exp = judged(tmp_path, [])
        exp.start()
        exp.load_checkpoint()
        assert exp.best_score == score
        exp.close()


def test_a_figure_that_is_never_logged_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gin.parse_config("CheckpointManager.best_by = 'val/sucess'")
    learned(judged(tmp_path, [1.0, 5.0, 2.0]))
    assert "best_by is 'val/sucess', but no such figure was logged" in caplog.text


@pytest.mark.parametrize("interval", [None, 3, 1])
def test_a_loaded_run_is_evaluated_before_it_goes_on(tmp_path: Path, interval: int | None) -> None:
    learned(judged(tmp_path, [1.0], epochs=1))
    exp = judged(tmp_path, [2.0, 3.0], epochs=2, val_interval=interval, callbacks=[EvaluateAfterLoad])
    exp.start()
    exp.load_checkpoint()
    learned(exp)
    returns = [record["val/return"] for record in metrics(exp.run_dir) if "val/return" in record]
    assert returns == [1.0, 2.0]  # once, whether or not it was due


class FlatEnv(RisingEnv):
    """The same without rewards."""

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 0.0, True, False, {}


class StopsAfterTwo(Callback):
    def after_train(self, exp: Any) -> None:
        if exp.epoch == 1:
            exp.request_stop("enough")


def test_a_callback_ends_the_run_after_the_epoch_and_it_can_go_on(tmp_path: Path) -> None:
    exp = learned(ppo_experiment(tmp_path, epochs=5, callbacks=[StopsAfterTwo]))
    assert (exp.epoch, exp.env_steps) == (2, 2 * 24)
    again = ppo_experiment(tmp_path, epochs=3)
    again.start()
    assert again.load_checkpoint() == 2
    learned(again)
    assert again.epoch == 3


def test_a_critic_of_nan_is_told(tmp_path: Path) -> None:
    exp = ppo_experiment(tmp_path)
    exp.start()
    with torch.no_grad():
        next(iter(exp.policy.value_head.parameters())).fill_(float("nan"))
    with pytest.raises(ValueError, match=r"values has 24 NaN.*step 0 of env 0. Fix:"):
        exp.learn()
    exp.close()


def test_weights_that_become_nan_are_told(tmp_path: Path) -> None:
    exp = ppo_experiment(tmp_path, epochs=1)
    exp.start()
    update = exp.learner.update

    def spoils(*args: Any, **kwargs: Any) -> Any:
        found = update(*args, **kwargs)
        with torch.no_grad():
            next(iter(exp.policy.value_head.parameters())).fill_(float("nan"))
        return found

    exp.learner.update = spoils  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"loss of epoch 0 is nan.*Fix:"):
        exp.learn()
    exp.close()


@pytest.mark.parametrize("encoder", ["gru", "transformer"])
def test_two_halves_in_worker_processes_read_again_as_they_acted(tmp_path: Path, encoder: str) -> None:
    exp = ppo_experiment(
        tmp_path,
        encoder,
        env_mode="async",
        **{"AsyncVectorEnv.num_workers": 2},
        parallel_actors=4,
        learner={"chunk_len": 4},
    )
    exp.start()
    assert len(exp.trainer.buffers) == 2
    learned(exp)
    found = [r for r in metrics(exp.run_dir) if "ppo/initial_logratio_abs_max" in r]
    assert len(found) == 2
    assert all(r["ppo/initial_logratio_abs_max"] < r["ppo/initial_logratio_rounding_max"] for r in found)
    assert all(r["ppo/initial_value_diff_abs_max"] < VALUE_ROUNDING for r in found)


def test_compiled_acting_agrees_with_reading_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = PPOAgent.compile_acting
    monkeypatch.setattr(PPOAgent, "compile_acting", lambda self: compiled(self, backend="eager"))
    exp = learned(ppo_experiment(tmp_path, "transformer", compile_acting=True, learner={"chunk_len": 4}))
    found = [r for r in metrics(exp.run_dir) if "ppo/kl_last" in r]
    assert len(found) == 2
    assert all(r["ppo/initial_logratio_abs_max"] < r["ppo/initial_logratio_rounding_max"] for r in found)


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
    """One part of what it shows is for the value function alone."""

    def __init__(self) -> None:
        super().__init__()
        box = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.observation_space = spaces.Dict({"seen": box, "hidden": box})  # type: ignore[assignment]

    def _obs(self) -> Any:
        return {"seen": super()._obs(), "hidden": super()._obs()}


def test_a_policy_file_acts_without_what_only_the_value_function_saw(tmp_path: Path) -> None:
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
    obs = {"seen": np.ones((2, 3), np.float32), "hidden": np.zeros((2, 3), np.float32)}
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


def test_check_tries_a_whole_rollout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path, *SMALLER, "--check")) == 0
    printed = capsys.readouterr().out
    assert "up to 17 updates" in printed
    assert "collected  64 env steps" in printed
    assert "initial_logratio_abs_max" in printed
    assert list(tmp_path.iterdir()) == []


def test_a_test_run_trains_on_a_whole_rollout_and_draws_its_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path, *SMALLER, "--test-run")) == 0
    assert "test run passed: 64 env steps, 17 updates, one checkpoint" in capsys.readouterr().out
    (run_dir,) = tmp_path.iterdir()
    assert metrics(run_dir)


@pytest.mark.parametrize(
    ("binding", "words"),
    [
        ("PPOLearner.update_epoch=3", "Did you mean 'update_epochs'?"),
        ("PPOLearner.seed=3", "Fix:"),
        ("PPOLoss.clip=0.1", "PPOLoss has no parameter 'clip'"),
        ("GEA.lam=0.9", "GEA"),
        ("KLAdaptiveLR.factr=2", "Did you mean 'factor'?"),
    ],
)
def test_misspelt_settings_are_caught_at_the_start(
    tmp_path: Path, binding: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path, binding)) == 2
    printed = capsys.readouterr().err
    assert words in printed
    assert "Fix:" in printed
    assert list(tmp_path.iterdir()) == []
