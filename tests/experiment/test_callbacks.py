"""Callbacks: the order of hooks, state and errors; the library's own for episode lengths and rewards."""

from __future__ import annotations

import math
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loxodon.agents import Agent
from loxodon.data import DiskTrajDataset, HindsightRelabeler, MixtureOfDatasets, load_trajectory
from loxodon.envs import EnvError, EnvSpec, MazeRunner
from loxodon.experiment import Callback, EpisodeLengthCurriculum, Experiment, ScaleRewards
from loxodon.experiment.callbacks import HOOKS
from loxodon.nets import FFTstepEncoder, IdentityTrajEncoder

from .fakes import CountingEnv, make_experiment, metrics, run


class Recorder(Callback):
    """Records every hook with its epoch."""

    def __init__(self) -> None:
        self.calls: list[str] = []


def recorded(hook: str) -> Any:
    return lambda self, exp, *args: self.calls.append(f"{hook} {exp.epoch}")


for hook in HOOKS:
    setattr(Recorder, hook, recorded(hook))


class Counter(Callback):
    """Counts epochs, including those before a resume."""

    def __init__(self) -> None:
        self.num_epochs = 0

    def on_epoch_end(self, exp: Experiment, epoch: int) -> None:
        self.num_epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"num_epochs": self.num_epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_epochs = state["num_epochs"]


def test_the_hooks_of_a_run_are_called_in_order(tmp_path: Path) -> None:
    recorder = Recorder()
    run(make_experiment(tmp_path, callbacks=[recorder], ckpt_interval=1))
    epoch = "on_epoch_start {0}|on_eval_start {0}|on_eval_end {0}|before_play_steps {0}|after_train {0}"
    epoch += "|on_epoch_end {1}"
    saved = "on_save_checkpoint_start {1}|on_save_checkpoint_end {1}"
    begun = "on_model_init_start 0|on_optimizer_init_start 0|on_optimizer_init_end 0|on_model_init_end 0"
    expected = [
        *begun.split("|"),
        "on_start 0",
        "on_fit_start 0",
        *epoch.format(0, 1).split("|"),
        *saved.format(0, 1).split("|"),
        *epoch.format(1, 2).split("|"),
        "on_eval_start 2",
        "on_eval_end 2",
        "on_training_end 2",
        *saved.format(1, 2).split("|"),
        "on_fit_end 2",
    ]
    assert recorder.calls == expected


def test_the_hooks_of_a_stop_and_a_resume_are_called(tmp_path: Path) -> None:
    recorder = Recorder()
    exp = make_experiment(tmp_path, callbacks=[recorder], val_interval=None)
    exp.start()
    step = exp.train_step
    exp.train_step = lambda *args, **kw: os.kill(os.getpid(), signal.SIGTERM) or step(*args, **kw)  # type: ignore[func-returns-value,method-assign]
    with pytest.raises(SystemExit):
        exp.learn()
    assert recorder.calls[-4:] == [
        "after_train 0",
        "on_training_stop 0",
        "on_save_checkpoint_start 0",
        "on_save_checkpoint_end 0",
    ]
    again = make_experiment(tmp_path, callbacks=[recorder])
    again.start()
    again.load_checkpoint()
    assert recorder.calls[-2:] == ["on_load_checkpoint_start 0", "on_load_checkpoint_end 0"]
    again.close()


def test_a_stop_that_is_requested_at_the_start_ends_the_first_epoch(tmp_path: Path) -> None:
    class Early(Callback):
        def on_start(self, exp: Any) -> None:
            exp.request_stop("early")

    assert run(make_experiment(tmp_path, callbacks=[Early], epochs=3)).epoch == 1


def test_states_of_callbacks_are_stored_in_checkpoints(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"callbacks": [Counter, Counter, Recorder], "val_timesteps_per_epoch": 0}
    exp = run(make_experiment(tmp_path, **settings))
    kept = exp.checkpoints.read(exp.checkpoints.state_dir(1)).shared["callbacks"]
    assert kept == {"Counter": {"num_epochs": 2}, "Counter 2": {"num_epochs": 2}}
    settings["callbacks"].append(Counter)  # the checkpoint has no state for it
    more = run(make_experiment(tmp_path, **settings, epochs=3), lambda e: e.load_checkpoint())
    assert [one.num_epochs for one in more.hooks.callbacks if isinstance(one, Counter)] == [3, 3, 1]


def test_eval_end_gets_the_metrics(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []

    class Watch(Callback):
        def on_eval_end(self, exp: Experiment, metrics: dict[str, float]) -> None:
            seen.append(metrics)

    exp = run(make_experiment(tmp_path, callbacks=[Watch()], **{"FinalTest.timesteps": 12}))
    assert len(seen) == 4  # two epochs, the end, the test
    assert seen[2] == exp.last_val_metrics
    assert "test/return" in seen[3]


class Misspelt(Callback):
    def on_fit_ends(self, exp: Experiment) -> None: ...


@pytest.mark.parametrize(
    ("callbacks", "error", "words"),
    [
        ([Misspelt], ValueError, r"Misspelt defines on_fit_ends.*not a hook.*Fix: rename it to on_fit_end,"),
        ([dict], TypeError, r"callbacks makes \{\}.*that create Callbacks.*Fix"),
        ([3], TypeError, r"callbacks holds 3.*Fix"),
        (Counter, TypeError, r"callbacks is <class .*Counter.*Fix"),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, callbacks: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make_experiment(tmp_path, callbacks=callbacks)


# ---- episodes that become longer ----


LONG = {
    "make_train_env": EnvSpec(CountingEnv, {"length": 50}),
    "make_val_env": EnvSpec(CountingEnv, {"length": 6}),
}


class LevelEnv(CountingEnv):
    """Has a level; its metrics report the level and the last epoch that it was notified of."""

    def __init__(self) -> None:
        super().__init__(length=4)
        self.level = 0
        self.epochs: list[int] = []

    def on_epoch_end(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def step(self, action: int) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        if terminated:
            info = {"metric/level": float(self.level), "metric/last_epoch": float(([-1, *self.epochs])[-1])}
        return obs, reward, terminated, truncated, info


def figures(exp: Experiment, name: str) -> list[float]:
    return [record[name] for record in metrics(exp.run_dir) if name in record]


def curriculum(**changes: Any) -> list[Any]:
    return [lambda: EpisodeLengthCurriculum(**{"start": 2, "end": 6, "over_epochs": 2, **changes})]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_episodes_become_longer(tmp_path: Path, mode: str) -> None:
    settings: dict[str, Any] = {"env_mode": mode, "async_env_mp_context": "fork", **LONG}
    exp = run(make_experiment(tmp_path, epochs=4, callbacks=curriculum(), ckpt_interval=1, **settings))
    assert figures(exp, "collect/max_episode_length") == [2, 4, 6]
    assert figures(exp, "collect/episode_length") == [2, 4, 6, 6]
    assert figures(exp, "val/episode_length") == [6] * 5  # unchanged
    trajs = [load_trajectory(path) for path in (exp.run_dir / "buffer" / "fifo").glob("*.npz")]
    assert {len(traj) for traj in trajs} == {2, 4, 6}
    assert not any(traj.dones.any() for traj in trajs)


def test_a_resumed_run_continues_with_the_length_of_its_epoch(tmp_path: Path) -> None:
    run(make_experiment(tmp_path, epochs=1, callbacks=curriculum(), **LONG))
    exp = run(
        make_experiment(tmp_path, epochs=2, callbacks=curriculum(), **LONG), lambda e: e.load_checkpoint()
    )
    assert figures(exp, "collect/episode_length") == [2, 4]


def test_validation_can_follow_the_curriculum(tmp_path: Path) -> None:
    settings = {**LONG, "make_val_env": LONG["make_train_env"]}
    exp = run(make_experiment(tmp_path, callbacks=curriculum(also_validation=True), **settings))
    assert figures(exp, "val/episode_length") == [2, 4, 6]


def test_any_attribute_can_be_set_and_environments_are_notified_of_epochs(tmp_path: Path) -> None:
    exp = make_experiment(
        tmp_path, epochs=3, make_train_env=LevelEnv, callbacks=curriculum(attribute="level", over_epochs=4)
    )
    run(exp)
    assert figures(exp, "collect/level") == [2, 3, 4]  # the value that was set
    assert figures(exp, "collect/metric/level") == [2, 3, 4]  # the value that the episodes had
    assert figures(exp, "collect/last_epoch") == [-1, 0, 1]


@pytest.mark.parametrize(("mode", "error"), [("sync", AttributeError), ("async", EnvError)])
def test_an_unknown_attribute_is_an_error(tmp_path: Path, mode: str, error: type[Exception]) -> None:
    changes: dict[str, Any] = {"env_mode": mode, "async_env_mp_context": "fork", "val_interval": None}
    exp = make_experiment(tmp_path, callbacks=curriculum(attribute="lengt"), **changes)
    exp.start()
    words = r"CountingEnv.* has no attribute 'lengt' \(searched: CountingEnv\). Did you mean 'length'\? Fix"
    with pytest.raises(error, match=words):
        exp.learn()
    exp.close()


def test_the_ramp_is_linear_or_geometric() -> None:
    (made,) = (make() for make in curriculum(start=10, end=4, over_epochs=3))
    assert [made.length(epoch) for epoch in range(5)] == [10, 8, 6, 4, 4]
    (made,) = (make() for make in curriculum(start=10, end=80, over_epochs=3, from_epoch=2, geometric=True))
    assert [made.length(epoch) for epoch in range(7)] == [10, 10, 10, 20, 40, 80, 80]


@pytest.mark.parametrize(
    ("name", "value"), [("start", 0), ("end", 2.5), ("over_epochs", True), ("from_epoch", -1)]
)
def test_impossible_numbers_are_refused(name: str, value: Any) -> None:
    words = rf"EpisodeLengthCurriculum.{name} is .*at least [01].*Fix"
    with pytest.raises((TypeError, ValueError), match=words):
        EpisodeLengthCurriculum(**{"start": 1, "end": 2, "over_epochs": 3, name: value})


# ---- shaped rewards ----


def stored(exp: Experiment) -> list[Any]:
    folder = exp.run_dir / "buffer" / "fifo"
    return [load_trajectory(path) for path in sorted(folder.glob("*.npz"))]


def test_only_the_rewards_of_training_change(tmp_path: Path) -> None:
    plain = run(make_experiment(tmp_path / "plain", epochs=1))
    shaped = run(
        make_experiment(tmp_path / "shaped", epochs=1, **{"RewardShaping.shaper": ScaleRewards(2.0, 1.0)})
    )
    pairs = list(zip(stored(plain), stored(shaped), strict=True))
    assert pairs
    for one, other in pairs:
        np.testing.assert_allclose(other.rews, 2.0 * one.rews + 1.0, rtol=1e-6)
        np.testing.assert_array_equal(other.rl2s, one.rl2s)  # the rewards that the policy saw
        np.testing.assert_array_equal(other.extras["raw_rewards"], one.rews)
    assert first_figures(plain)["collect/return"] == first_figures(shaped)["collect/return"]


def test_relabelled_goals_are_shaped_like_real_ones(tmp_path: Path) -> None:
    """Shaping depends on progress; data relabelled in the last epoch use the shaping of that epoch."""
    dataset = DiskTrajDataset(relabeler=HindsightRelabeler(strategy="final"))
    maze = EnvSpec(MazeRunner, {"size": 5, "num_goals": 1, "time_limit": 8})
    exp = make_experiment(
        tmp_path,
        **{"RewardShaping.shaper": lambda rewards, progress: (0.1 + progress) * rewards - 0.01},
        dataset=MixtureOfDatasets([dataset], [1.0]),
        agent_type=Agent,
        tstep_encoder_type=partial(FFTstepEncoder, n_layers=1, d_hidden=8, d_output=8),
        traj_encoder_type=IdentityTrajEncoder,
        make_train_env=maze,
        val_timesteps_per_epoch=0,
        stagger_traj_file_lengths=False,
    )
    run(exp)
    windows = dataset.sample_windows(50, np.random.default_rng(0))
    reached = [window for window in windows if window.dones[-1]]
    relabelled = [window for window in reached if "raw_rewards" not in window.extras]
    assert 0 < len(relabelled) < len(reached)
    for window in relabelled:
        paid = window.rl2s[1:, :1]  # the last step reached the goal
        assert paid.sum() == paid[-1] == 1.0
        np.testing.assert_allclose(window.rews, 0.6 * paid - 0.01, rtol=1e-6)


def first_figures(exp: Experiment) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in metrics(exp.run_dir):
        found = {**one, **found}
    return found


def test_the_shaper_gets_the_progress_and_a_copy(tmp_path: Path) -> None:
    seen: list[float] = []

    def shaper(rewards: np.ndarray, progress: float) -> np.ndarray:
        seen.append(progress)
        rewards[:] = 7.0
        return rewards

    exp = run(
        make_experiment(tmp_path, epochs=4, **{"RewardShaping.shaper": shaper}, val_timesteps_per_epoch=0)
    )
    assert sorted(set(seen)) == [0.0, 0.25, 0.5, 0.75]
    assert all((traj.rews == 7.0).all() for traj in stored(exp))
    assert first_figures(exp)["collect/return"] < 7.0


def test_rewards_are_scaled_and_then_clipped() -> None:
    rewards = np.array([-2.0, 0.0, 2.0], np.float32)
    shaped = ScaleRewards(2.0, 1.0, low=-1.0, high=4.0)(rewards, 0.0)
    assert shaped.dtype == np.float32
    assert shaped.tolist() == [-1.0, 1.0, 4.0]
    assert ScaleRewards(low=1.0)(rewards, 0.0).tolist() == [1.0, 1.0, 2.0]


@pytest.mark.parametrize(
    "shaper",
    [lambda r, p: r[:, None], lambda r, p: r / 0.0, lambda r, p: None, lambda r, p: r.astype(object)],
)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_impossible_results_of_a_shaper_are_refused(tmp_path: Path, shaper: Any) -> None:
    exp = make_experiment(tmp_path, **{"RewardShaping.shaper": shaper}, val_timesteps_per_epoch=0)
    exp.start()
    words = r"RewardShaping.shaper \(<lambda>\) returned .* one finite number for each. Fix"
    with pytest.raises(ValueError, match=f"(?s){words}"):
        exp.learn()
    exp.close()


def test_mistakes_are_reported_before_the_start(tmp_path: Path) -> None:
    for wrong in (ScaleRewards, 3):
        with pytest.raises(TypeError, match=r"RewardShaping.shaper is .*parentheses"):
            make_experiment(tmp_path, **{"RewardShaping.shaper": wrong}).start()
    with pytest.raises(ValueError, match=r"ScaleRewards.low is 2.*high = 1.*Fix"):
        ScaleRewards(low=2.0, high=1.0)
    with pytest.raises(ValueError, match=r"ScaleRewards.scale is nan.*Fix"):
        ScaleRewards(math.nan)
