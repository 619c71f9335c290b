from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gin
import numpy as np
import pytest
import torch
from gymnasium import spaces

from loxodon.agents import LinearSchedule
from loxodon.data import DiskTrajDataset, DoNothingDataset, load_trajectory
from loxodon.envs import EnvSpec, EpsilonGreedy
from loxodon.envs.vector import workers
from loxodon.experiment import Callback, EpisodeLengthCurriculum, Experiment, WeightAverage
from loxodon.experiment.checkpoint.policy_file import read_info
from loxodon.experiment.config import load_config
from loxodon.experiment.config.load import unused_settings
from loxodon.experiment.process import threads
from loxodon.gin_configs.start import GinText

from .fakes import TINY, CountingEnv, TinyAgent, make_experiment, metrics, run
from .ppo.whole_runs import ppo_experiment
from .test_heartbeat import write_beat

REQUIRED = [
    "run_name",
    "ckpt_base_dir",
    "max_seq_len",
    "dataset",
    "traj_encoder_type",
    "agent_type",
    "val_timesteps_per_epoch",
    "make_train_env",
    "make_val_env",
]
DEFAULTS = {
    "tstep_encoder_type": None,
    "parallel_actors": 12,
    "env_mode": "async",
    "async_env_mp_context": None,
    "exploration_wrapper_type": EpsilonGreedy,
    "sample_actions": True,
    "sample_actions_val": True,
    "force_reset_train_envs_every": None,
    "log_to_wandb": False,
    "wandb_project": "from-env",
    "wandb_entity": "me",
    "wandb_group_name": None,
    "verbose": True,
    "log_interval": 300,
    "traj_save_len": 1e10,
    "has_dset_edit_rights": True,
    "stagger_traj_file_lengths": True,
    "save_trajs_as": "npz",
    "padded_sampling": "none",
    "dloader_workers": 6,
    "epochs": 1000,
    "start_learning_at_epoch": 0,
    "start_collecting_at_epoch": 0,
    "train_timesteps_per_epoch": 1000,
    "train_batches_per_epoch": 1000,
    "val_interval": 20,
    "ckpt_interval": 50,
    "always_save_latest": True,
    "batch_size": 24,
    "batches_per_update": 1,
    "learning_rate": 1e-4,
    "critic_loss_weight": 10.0,
    "lr_warmup_steps": 500,
    "grad_clip": 1.0,
    "l2_coeff": 1e-3,
    "mixed_precision": "no",
}


def test_fields_have_the_documented_order_and_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "from-env")  # read at construction, not at import
    monkeypatch.setenv("WANDB_ENTITY", "me")
    parameters = inspect.signature(Experiment).parameters
    assert [n for n, p in parameters.items() if p.default is inspect.Parameter.empty] == REQUIRED
    values = {name: None for name in REQUIRED} | {"run_name": "a", "ckpt_base_dir": str(tmp_path)}
    values |= {"max_seq_len": 8, "dataset": DoNothingDataset(), "agent_type": torch.nn.Identity}
    values |= {"val_timesteps_per_epoch": 0}
    exp = Experiment(**values)  # type: ignore[arg-type]
    assert {name: getattr(exp, name) for name in DEFAULTS} == DEFAULTS


_OWN = f"{TINY}Experiment.val_timesteps_per_epoch = 0\nExperiment.test_run = True\n"


@pytest.mark.parametrize(
    ("config", "says_so"),
    [
        (None, True),
        (_OWN, True),
        (f"include 'small.gin'\n{_OWN}", False),
        (f"include 'amago.gin'\n{_OWN}", False),
    ],
    ids=["plain Python", "no preset", "base_offpolicy", "amago"],
)
def test_a_run_without_a_recommended_preset_gives_a_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: str | None, says_so: bool
) -> None:
    if config is None:
        exp = make_experiment(tmp_path)
    else:
        load_config([GinText("own.gin", config)], [f"Experiment.ckpt_base_dir='{tmp_path}'"])
        exp = Experiment()  # type: ignore[call-arg]  # gin supplies the arguments
    exp.start()
    exp.close()
    lines = [record.getMessage() for record in caplog.records if "recommended preset" in record.getMessage()]
    assert len(lines) == says_so
    assert all("Fix: begin your gin file with include 'base_offpolicy.gin'" in line for line in lines)
    assert all("In Python, call load_config with one of these names" in line for line in lines)


def from_python(tmp_path: Path, **settings: Any) -> Experiment:
    load_config("ppo/cartpole", {"SACAgent.alpha": 2.0, "Experiment.epochs": 3})
    settings = {"ckpt_base_dir": str(tmp_path), "verbose": False, "epochs": 1, **settings}
    return Experiment(**settings)


def test_settings_from_python_that_nothing_reads_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exp = from_python(tmp_path)  # an argument replaces a setting, which is not a mistake
    exp.start()
    exp.close()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "SACAgent.alpha = 2.0 is set, but nothing in this experiment uses it. Fix" in warnings[0]
    assert unused_settings() != ""
    gin.clear_config()
    assert unused_settings() == ""  # that config is gone


def test_methods_that_need_a_started_run_say_so(tmp_path: Path) -> None:
    exp = from_python(tmp_path)
    for call in (exp.learn, exp.load_checkpoint, lambda: exp.evaluate_test("CartPole-v1", 10)):
        with pytest.raises(RuntimeError, match=r"not been started. Fix: call start\(\)"):
            call()


def test_a_run_whose_start_failed_does_not_learn(tmp_path: Path) -> None:
    class Failing(Callback):
        def on_start(self, run: Any) -> None:
            raise OSError("no licence")

    exp = make_experiment(tmp_path, callbacks=[Failing()])
    with pytest.raises(OSError, match="no licence"):
        exp.start()
    with pytest.raises(RuntimeError, match="not been started"):
        exp.learn()
    exp.close()


def test_a_config_that_was_replaced_before_the_start_is_refused(tmp_path: Path) -> None:
    exp = from_python(tmp_path)
    from_python(tmp_path)
    with pytest.raises(ValueError, match=r"load_config was called again.*Fix: call start\(\) before"):
        exp.start()


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("agent_type", "PPOAgent", r"agent_type is 'PPOAgent', but must be a class. Fix"),
        ("tstep_encoder_type", "FFTstepEncoder", r"is 'FFTstepEncoder', but must be .*TstepEncoder.*Fix"),
        ("traj_encoder_type", torch.nn.GRU(2, 3), r"is an object of class GRU, but must be .*Fix"),
        ("traj_encoder_type", torch.nn.GRU, r"is GRU, which does not derive from TrajEncoder.*Fix"),
    ],
)
def test_types_that_build_no_agent_or_encoder_are_refused(
    tmp_path: Path, setting: str, value: Any, words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        from_python(tmp_path, **{setting: value}).start()


def test_an_off_policy_agent_needs_a_dataset_that_stores_data(tmp_path: Path) -> None:
    words = r"TinyAgent learns from stored trajectories.*DoNothingDataset.*Fix: set .*@DiskTrajDataset\(\)"
    with pytest.raises(ValueError, match=words):
        make_experiment(tmp_path, dataset=DoNothingDataset()).start()


@pytest.mark.parametrize(
    ("settings", "terminates"),
    [
        ({}, False),
        ({"time_limits_terminate": True}, True),
        ({"time_limits_terminate": True, "max_seq_len": 4}, False),
    ],
)
def test_a_time_limit_terminates_episodes_that_fit_into_a_window_if_asked(
    tmp_path: Path, settings: dict[str, Any], terminates: bool
) -> None:
    env = EnvSpec(CountingEnv, {"length": 5, "truncates": True})
    exp = run(make_experiment(tmp_path, make_train_env=env, **settings))
    trajs = [load_trajectory(file) for file in (exp.run_dir / "buffer" / "fifo").glob("*.npz")]
    whole = [traj.dones[:, 0].tolist() for traj in trajs if traj.time_idxs[[0, -1], 0].tolist() == [0, 5]]
    assert len(whole) >= 6
    assert whole == [[False] * 4 + [terminates]] * len(whole)


class EndsEarly(TinyAgent):
    """Truncates each episode after three steps."""

    def post_env_step_modifications(self, obs: Any, rewards: Any, terminated: Any, truncated: Any) -> Any:
        return terminated, truncated | (obs["observation"][:, 1] >= 3)


class ChangesLengths(Callback):
    changes_episode_length = True


@pytest.mark.parametrize(
    "settings",
    [
        {"callbacks": [partial(EpisodeLengthCurriculum, 2, 4, 2)]},
        {"callbacks": [ChangesLengths]},
        {"agent_type": EndsEarly},
    ],
    ids=["curriculum", "another callback", "agent"],
)
def test_truncations_that_the_environment_does_not_decide_terminate_nothing(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    env = EnvSpec(CountingEnv, {"length": 5, "truncates": True})
    exp = run(make_experiment(tmp_path, make_train_env=env, time_limits_terminate=True, **settings))
    trajs = [load_trajectory(file) for file in (exp.run_dir / "buffer" / "fifo").glob("*.npz")]
    assert len(trajs) >= 6
    assert not any(traj.dones.any() for traj in trajs)


def test_a_batch_has_fewer_sequences_the_longer_they_are(tmp_path: Path) -> None:
    sizes = {
        length: make_experiment(tmp_path, max_seq_len=length, batch_size="auto").sequences_per_batch
        for length in (16, 32, 64, 2000)
    }
    assert sizes == {16: 24, 32: 16, 64: 8, 2000: 4}
    exp = make_experiment(tmp_path, max_seq_len=9, batch_size="auto", epochs=3)
    batch = next(iter(run(exp).loader.epoch(0, 1)))
    assert len(batch.mask) == 24
    assert make_experiment(tmp_path, max_seq_len=2000, batch_size=7).sequences_per_batch == 7


def test_a_run_creates_the_documented_files(tmp_path: Path) -> None:
    exp = run(make_experiment(tmp_path, epochs=3))
    ckpts = exp.run_dir / "ckpts"
    assert exp.checkpoints.complete_epochs() == [1, 2]  # every second epoch, and the last one
    for path in (
        "policy_weights/policy_epoch_2.safetensors",
        "latest/policy.safetensors",
        "best/policy.safetensors",
        "config.txt",
    ):
        assert (ckpts / path).is_file(), path
    assert len(list((exp.run_dir / "buffer" / "fifo").glob("*.npz"))) > 9
    assert list(exp.run_dir.rglob("*.tmp")) == []


def test_one_seed_gives_one_metrics_file_and_another_seed_another(tmp_path: Path) -> None:
    one, same, other = (
        metrics(run(make_experiment(tmp_path / name, seed=seed, dloader_workers=workers)).run_dir)
        for name, seed, workers in (("a", 3, 0), ("b", 3, 1), ("c", 4, 0))
    )
    assert one == same
    assert (
        len(one) == 2 * (1 + 1 + 1 + 2 + 1) + 1
    )  # per epoch: val, collect, dataset, two update records, means
    assert one != other


class Watched(Experiment):
    """Records the order of events."""

    def note(self, what: str) -> None:
        self.__dict__.setdefault("events", []).append((self.epoch, what))

    def evaluate_val(self) -> dict[str, float]:
        self.note("evaluate")
        return super().evaluate_val()

    def collect_new_training_data(self) -> dict[str, float]:
        self.note("collect")
        return super().collect_new_training_data()

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        self.note("update")
        return super().train_step(*args, **kwargs)

    def save_checkpoint(self) -> Any:
        self.note("checkpoint")
        return super().save_checkpoint()

    def write_latest_policy(self, is_final: bool = False) -> None:
        self.note("publish")
        super().write_latest_policy(is_final)


def events_of(folder: Path, **changes: Any) -> list[tuple[int, str]]:
    exp = make_experiment(folder, train_batches_per_epoch=1, **changes)
    exp.__class__ = Watched
    run(exp)
    return exp.__dict__["events"]  # type: ignore[no-any-return]


def test_an_epoch_evaluates_collects_trains_saves_and_publishes_in_this_order(tmp_path: Path) -> None:
    events = events_of(tmp_path, epochs=2, ckpt_interval=1, val_interval=2)
    assert events == [
        (0, "evaluate"),
        (0, "collect"),
        (0, "update"),
        (1, "publish"),
        (1, "checkpoint"),
        (1, "collect"),
        (1, "update"),
        (2, "evaluate"),
        (2, "checkpoint"),
        (2, "publish"),
    ]


def test_collecting_and_learning_can_start_at_later_epochs(tmp_path: Path) -> None:
    events = events_of(
        tmp_path,
        epochs=4,
        start_collecting_at_epoch=1,
        start_learning_at_epoch=2,
        val_interval=None,
        ckpt_interval=None,
    )
    assert [e for e in events if e[1] in ("collect", "update")] == [
        (1, "collect"),
        (2, "collect"),
        (2, "update"),
        (3, "collect"),
        (3, "update"),
    ]


def test_a_run_that_ends_before_it_learns_gives_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "loxodon"):
        run(make_experiment(tmp_path / "enough", epochs=2, start_learning_at_epoch=1))
        assert "makes no update" not in caplog.text
        run(make_experiment(tmp_path / "too_few", epochs=1, start_learning_at_epoch=1))
    assert "Experiment.epochs is 1, and learning begins after 1 epoch(s). Fix: raise" in caplog.text


def test_without_finished_episodes_there_is_a_warning_and_no_nan(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    never = EnvSpec(CountingEnv, {"length": 10_000})
    with caplog.at_level(logging.WARNING, "loxodon"):
        exp = run(
            make_experiment(
                tmp_path,
                make_val_env=never,
                make_train_env=never,
                traj_save_len=8,
                epochs=1,
                evaluate_at_end=False,
            )
        )
    assert "no episode ended" in caplog.text
    assert exp.last_val_metrics == {}
    for record in metrics(exp.run_dir):
        assert not any(key.startswith(("val/", "collect/")) for key in record)
        assert all(v is not None and math.isfinite(v) for v in record.values())


def test_evaluation_leaves_no_trace_in_training(tmp_path: Path) -> None:
    def training_records(name: str, **changes: Any) -> list[dict[str, Any]]:
        exp = run(make_experiment(tmp_path / name, **changes))
        return [r for r in metrics(exp.run_dir) if "train/loss" in r]

    with_val = training_records("a")
    without = training_records("b", val_timesteps_per_epoch=0)
    assert with_val == without


def test_evaluation_does_not_explore(tmp_path: Path) -> None:
    def always_one(policy: Any) -> None:
        with torch.no_grad():
            policy.actor.weight.zero_()
            policy.actor.bias.copy_(torch.tensor([0.0, 50.0, 0.0]))

    exp = make_experiment(tmp_path, make_val_env=EnvSpec(CountingEnv))
    exp.start()
    always_one(exp.policy)
    assert exp.evaluate_val()["val/return"] == 5.0
    assert exp.collect_new_training_data()["collect/return"] < 5.0


def test_evaluate_test_counts_episodes_and_stores_trajectories(tmp_path: Path) -> None:
    exp = make_experiment(tmp_path)
    exp.start()
    metrics = exp.evaluate_test(
        EnvSpec(CountingEnv, {"length": 4}), 100, save_trajs_to=str(tmp_path / "kept"), episodes=7
    )
    assert metrics["test/episodes"] == 7
    assert metrics["test/episode_length"] == 4
    assert "test/success" in metrics
    assert len(list((tmp_path / "kept").glob("*.npz"))) >= 7


def test_interaction_continues_from_the_hidden_state_that_it_returned(tmp_path: Path) -> None:
    exp = make_experiment(tmp_path)
    exp.start()
    returns, hidden = [], []
    for parts in ((12,), (7, 5)):
        torch.manual_seed(0)
        state, found = None, []
        for timesteps in parts:
            state, (history, _) = exp.interact(exp.val_envs, timesteps, hidden_state=state)
            found += history.returns["CountingEnv"]
        returns.append(found)
        hidden.append(state.tolist())
    exp.close()
    assert len(returns[0]) == 2 * 3  # 5 steps each
    assert returns[0] == returns[1]
    assert hidden == [[2] * 3] * 2


def test_a_hidden_state_is_refused_after_another_evaluation(tmp_path: Path) -> None:
    exp = make_experiment(tmp_path)
    exp.start()
    envs = exp.make_envs(exp.make_val_env)
    state, _ = exp.interact(envs, 3)
    exp.evaluate_val()
    with pytest.raises(ValueError, match=r"did not act in these environments.*Fix: pass hidden_state=None"):
        exp.interact(envs, 3, hidden_state=state)
    exp.close()


def test_interaction_is_stored_in_training_environments_only(tmp_path: Path) -> None:
    exp = make_experiment(tmp_path, parallel_actors=1)
    exp.start()

    def lengths() -> list[int]:
        """Lengths of the stored pieces; their timesteps must be consecutive."""
        trajs = [load_trajectory(file) for file in (exp.run_dir / "buffer" / "fifo").glob("*.npz")]
        for traj in trajs:
            episodes, times = traj.obs["observation"].T
            assert len(set(episodes)) == 1
            assert times.tolist() == traj.time_idxs[:, 0].tolist() == list(range(len(times)))
        return sorted(map(len, trajs))

    exp.interact(exp.val_envs, 12)
    assert lengths() == []
    exp.interact(exp.train_envs, 12)
    assert lengths() == [2, 5, 5]
    exp.collect_new_training_data()
    exp.interact(exp.train_envs, 4, save_on_done=str(tmp_path / "elsewhere"))  # stores the running pieces
    assert lengths() == [2, 2, 5, 5, 5, 5]
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1
    exp.collect_new_training_data()
    exp.close()
    assert lengths() == [2, 2, 2, 5, 5, 5, 5, 5, 5]


def test_metrics_can_be_logged_by_keyword(tmp_path: Path) -> None:
    exp = make_experiment(tmp_path)
    exp.start()
    exp.log(metrics_dict={"mine": 1.0}, key="own")
    exp.close()
    assert [one["own/mine"] for one in metrics(exp.run_dir)] == [1.0]


@pytest.mark.parametrize("is_staggered", [True, False])
def test_pieces_of_long_episodes_have_staggered_lengths_by_default(
    tmp_path: Path, is_staggered: bool
) -> None:
    exp = make_experiment(
        tmp_path,
        make_train_env=EnvSpec(CountingEnv, {"length": 10_000}),
        train_timesteps_per_epoch=300,
        traj_save_len=20,
        stagger_traj_file_lengths=is_staggered,
    )
    exp.start()
    exp.collect_new_training_data()
    lengths = {len(load_trajectory(file)) for file in (exp.run_dir / "buffer" / "fifo").glob("*.npz")}
    assert (len(lengths) > 3 and lengths <= set(range(12, 29))) if is_staggered else lengths == {20}


def test_force_reset_begins_new_episodes(tmp_path: Path) -> None:
    never = EnvSpec(CountingEnv, {"length": 10_000})
    exp = make_experiment(tmp_path, make_train_env=never, force_reset_train_envs_every=2)
    exp.start()
    times = []
    for exp.epoch in range(4):
        exp.collect_new_training_data()
        assert exp.collector is not None
        assert exp.collector.groups[0].state is not None
        times.append(int(exp.collector.groups[0].state.time_idxs[0, 0]))
    assert times == [12, 24, 12, 24]


def test_verbose_prints_the_summary_and_quiet_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exp = run(make_experiment(tmp_path / "a", verbose=True))
    text = capsys.readouterr().out.replace("\n", "")  # a long path is wrapped
    for part in (str(exp.run_dir), "seed 7", "Discrete(3)", "TinyAgent", "3 x sync", "2 epochs"):
        assert part in text
    run(make_experiment(tmp_path / "b"))
    assert capsys.readouterr().out == ""


def test_the_dataset_is_within_its_limit_when_the_run_ends(tmp_path: Path) -> None:
    exp = run(make_experiment(tmp_path, dataset=DiskTrajDataset(dset_max_size=5), parallel_actors=6))
    assert len(list((exp.run_dir / "buffer" / "fifo").glob("*.npz"))) == 5


def test_deleting_the_buffer_removes_the_trajectories(tmp_path: Path) -> None:
    exp = run(make_experiment(tmp_path))
    exp.delete_buffer_from_disk()
    assert list((exp.run_dir / "buffer" / "fifo").glob("*.npz")) == []


def test_a_list_of_envs_needs_one_entry_per_actor(tmp_path: Path) -> None:
    exp = make_experiment(tmp_path, make_train_env=[EnvSpec(CountingEnv)] * 2)
    with pytest.raises(ValueError, match=r"2 entries, but Experiment.parallel_actors is 3.*Fix:"):
        exp.start()


def test_collecting_without_env_steps_is_a_clear_error(tmp_path: Path) -> None:
    exp = make_experiment(tmp_path, train_timesteps_per_epoch=0)
    exp.start()
    with pytest.raises(ValueError, match=r"Nothing can be collected.*Fix:"):
        exp.collect_new_training_data()


def test_training_stops_once_an_evaluation_is_good_enough(tmp_path: Path) -> None:
    patient = run(make_experiment(tmp_path / "a", epochs=3, val_interval=1, stop_at_val_return=1e9))
    assert max(one["epoch"] for one in metrics(patient.run_dir)) == 3
    early = run(make_experiment(tmp_path / "b", epochs=3, val_interval=1, stop_at_val_return=-1e9))
    assert early.env_steps == 0
    scores = [one for one in metrics(early.run_dir) if "val/return" in one]
    assert len(scores) == 2  # the one that was good enough, and the last one on new episodes
    assert early.checkpoints.complete_epochs() == [0]
    for limit, last_epoch in ((-1e9, 0), (1e9, 2)):  # the run is finished until the limit is raised
        again = make_experiment(tmp_path / "b", epochs=3, val_interval=1, stop_at_val_return=limit)
        again.start(resume=True)
        again.learn()
        again.close()
        assert again.checkpoints.complete_epochs()[-1] == last_epoch


@pytest.mark.parametrize("make", [make_experiment, ppo_experiment], ids=["off-policy", "ppo"])
def test_a_run_ends_at_its_limit_of_env_steps(tmp_path: Path, make: Any) -> None:
    def budget(num_epochs: int) -> Experiment:
        changes = {"val_timesteps_per_epoch": 12, "train_timesteps_per_epoch": 8}
        return make(tmp_path, epochs=9, max_env_steps=24 * num_epochs - 1, **changes)  # type: ignore[no-any-return]

    exp = run(budget(2))
    assert (exp.env_steps, exp.epoch, exp.is_finished) == (48, 2, True)
    assert [one["env_steps"] for one in metrics(exp.run_dir) if "val/return" in one] == [0, 24, 48]
    assert exp.checkpoints.complete_epochs() == [1]
    assert read_info(exp.checkpoints.latest_path).is_final

    again = run(budget(2), lambda exp: exp.load_checkpoint())
    assert len(metrics(again.run_dir)) == len(metrics(exp.run_dir))
    further = run(budget(3), lambda exp: exp.load_checkpoint())
    assert (further.env_steps, further.epoch, further.is_finished) == (72, 3, True)


def test_schedules_do_not_depend_on_the_limit_of_env_steps(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"epochs": 4, "val_interval": None, "lr_schedule": lambda share: 1.0 - share}
    short = run(make_experiment(tmp_path / "a", max_env_steps=72, **settings))
    long = run(make_experiment(tmp_path / "b", **settings))
    assert short.epoch == 2
    of_both = [[one for one in metrics(exp.run_dir) if "train/loss" in one] for exp in (short, long)]
    assert of_both[0] == of_both[1][:2]


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (LinearSchedule(1.0, -1.0), r"lr_schedule .* gives -0\.5 at training progress 0\.750.*Fix"),
        (lambda share: math.nan, r"gives nan .*must give a finite number.*Fix"),
    ],
)
def test_schedules_of_the_learning_rate_are_checked(tmp_path: Path, schedule: Any, words: str) -> None:
    exp = make_experiment(tmp_path, epochs=4, val_interval=None, lr_schedule=schedule)
    with pytest.raises(ValueError, match=words):
        run(exp)


def test_a_learner_is_built_for_the_training_environments(tmp_path: Path) -> None:
    class Other(CountingEnv):
        observation_space = spaces.Box(-1, 1, (5,), np.float32)

    with pytest.raises(ValueError, match=r"evaluation environments .*Fix: .*spaces of the training env"):
        make_experiment(tmp_path, mode="learn", make_val_env=EnvSpec(Other)).start()


def test_a_learner_counts_the_env_steps_of_its_actors(tmp_path: Path) -> None:
    run(make_experiment(tmp_path, epochs=1))  # creates the data
    exp = make_experiment(tmp_path, mode="learn", epochs=9, max_env_steps=100, start_learning_at_epoch=99)
    exp.start()
    for epoch, _ in enumerate(exp.learn_iter()):
        write_beat(exp.run_dir, "a", env_steps=30 * epoch)
        write_beat(exp.run_dir, "b", env_steps=30 * epoch)
    exp.close()
    assert (exp.epoch, exp.env_steps, exp.is_finished) == (4, 120, True)
    assert read_info(exp.checkpoints.latest_path).is_final


def test_a_second_run_of_the_same_name_does_not_train_on_the_data_of_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = run(make_experiment(tmp_path, epochs=2, seed=1))
    files = first.dataset.num_files  # type: ignore[attr-defined]
    assert "moved to buffer/superseded/" not in caplog.text
    second = run(make_experiment(tmp_path, epochs=2, seed=1))
    assert f"{files} trajectories of an earlier run" in caplog.text
    assert second.dataset.num_files == files  # type: ignore[attr-defined]


def test_evaluations_of_an_earlier_run_go_with_its_policies(tmp_path: Path) -> None:
    first = run(make_experiment(tmp_path))
    (first.run_dir / "evaluations").mkdir()
    (first.run_dir / "evaluations" / "best-val-greedy.json").touch()
    run(make_experiment(tmp_path))
    assert not (first.run_dir / "evaluations").exists()
    assert (first.run_dir / "ckpts_old1" / "evaluations" / "best-val-greedy.json").is_file()


def test_an_offline_run_trains_on_the_data_of_an_earlier_run_of_its_name(tmp_path: Path) -> None:
    first = run(make_experiment(tmp_path, epochs=2))
    files = first.dataset.num_files  # type: ignore[attr-defined]
    offline = run(make_experiment(tmp_path, epochs=2, train_timesteps_per_epoch=0))
    assert offline.dataset.num_files == files  # type: ignore[attr-defined]
    assert offline.ctx.progress.gradient_steps == 2 * 4


def test_records_of_updates_are_log_interval_batches_apart_with_a_replay_ratio(tmp_path: Path) -> None:
    exp = run(make_experiment(tmp_path, epochs=4, replay_ratio=0.1, log_interval=5))
    steps = [one["gradient_steps"] for one in metrics(exp.run_dir) if "train-update/loss" in one]
    assert exp.ctx.progress.gradient_steps == 14
    assert steps == [1, 6, 11]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"replay_ratio": 0.1},
            "Experiment.train_batches_per_epoch = 4 has no effect, because Experiment.replay_ratio = 0.1 ",
        ),
        (
            {"stop_at_val_return": 1.0, "val_interval": None},
            "Experiment.stop_at_val_return = 1 cannot end this run, because Experiment.val_interval is None",
        ),
        ({"stop_at_val_return": 1e9, "start_collecting_at_epoch": 0}, None),
    ],
)
def test_a_setting_that_another_one_disables_gives_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], words: str | None
) -> None:
    exp = make_experiment(tmp_path, **settings)
    exp.start()
    exp.close()
    found = [line for line in caplog.messages if "no effect" in line or "cannot" in line]
    assert len(found) == (words is not None)
    assert all(words in line and " Fix: " in line for line in found)  # type: ignore[operator]


def test_a_run_that_does_not_collect_yet_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(make_experiment(tmp_path, epochs=2, start_collecting_at_epoch=5))
    assert "Nothing is collected before epoch 5 (Experiment.start_collecting_at_epoch)" in caplog.text


def test_numbers_of_numpy_are_settings(tmp_path: Path) -> None:
    exp = make_experiment(tmp_path, epochs=np.int64(3), learning_rate=np.float32(0.5))
    assert (exp.epochs, exp.learning_rate) == (3, 0.5)
    assert (type(exp.epochs), type(exp.learning_rate)) == (int, float)


def test_acting_is_compiled_before_the_agent_acts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(TinyAgent, "compile_acting", lambda agent: calls.append("compile"), raising=False)
    init = TinyAgent.init_hidden_state
    monkeypatch.setattr(
        TinyAgent,
        "init_hidden_state",
        lambda agent, *args: calls.append("hidden state") or init(agent, *args),  # type: ignore[func-returns-value]
    )
    exp = make_experiment(tmp_path, compile_acting=True, weight_average=WeightAverage)
    exp.start()
    exp.collect_new_training_data()
    exp.close()
    assert calls[:3] == ["compile", "compile", "hidden state"]  # the agent, and the average of its weights


@pytest.mark.parametrize(
    ("setting", "value", "text"),
    [
        ("env_mode", "asink", "env_mode is 'asink'.*Fix: set Experiment.env_mode = 'async'"),
        ("mixed_precision", "bf17", "Fix: set Experiment.mixed_precision = 'bf16'"),
        ("parallel_actors", 0, "whole number of at least 1"),
        ("batch_size", 2.5, "batch_size is 2.5"),
        ("sample_actions", "False", "sample_actions is 'False', but must be True or False.*Fix"),
        ("learning_rate", "fast", "learning_rate is 'fast'"),
        ("val_interval", 0, "val_interval is 0.*None or a whole number"),
        ("traj_save_len", 4, "traj_save_len is 4, shorter than max_seq_len = 8"),
        ("seed", -5, "Experiment.seed is -5.*at least 0"),
        ("stop_at_val_return", "high", "stop_at_val_return is .high.*None or a number"),
        ("replay_ratio", -1, "replay_ratio is -1.*above 0.*Fix"),
        ("ReplayRatio.tolerance", 1.0, "ReplayRatio.tolerance is 1.0.*below 1.*Fix"),
        ("ReplayRatio.actor_processes", 0, "ReplayRatio.actor_processes is 0.*at least 1.*Fix"),
        ("WallClockLimit.seconds", 0, "WallClockLimit.seconds is .*above 0.*Fix"),
        ("FinalTest.timesteps", -1, "FinalTest.timesteps is -1.*Fix"),
        ("ProfileEpoch.epoch", -1, "ProfileEpoch.epoch is -1.*Fix"),
        ("Learner.on_nan", "skp", "on_nan is 'skp'.*Fix: set Learner.on_nan = 'skip'"),
        ("CheckpointManager.keep_every", 0, "keep_every is 0.*Fix:"),
        *[
            ("run_name", name, "run_name is .*Fix:")
            for name in ("", "..", "a:b", "-a", "\x1b[1m", "n" * 129, 3)
        ],
    ],
)
def test_impossible_settings_are_refused(tmp_path: Path, setting: str, value: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        make_experiment(tmp_path / "runs", **{setting: value}).start()


def test_whole_floats_are_integers(tmp_path: Path) -> None:
    exp = make_experiment(tmp_path, epochs=2.0, batch_size=3.0, ckpt_interval=1.0, stop_at_val_return=1e9)
    assert [exp.epochs, exp.batch_size, exp.ckpt_interval] == [2, 3, 1]
    assert all(isinstance(one, int) for one in (exp.epochs, exp.batch_size, exp.ckpt_interval))
    assert isinstance(exp.stop_at_val_return, float)


# ---- threads of torch ----


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "num_usable_cores", lambda: 4)
    threads._replaced.clear()
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def threads_of(folder: Path, setting: int | None = None) -> int:
    """The number of torch threads once a small run has started."""
    exp = make_experiment(folder, torch_threads=setting)
    exp.start()
    exp.close()
    return torch.get_num_threads()


@pytest.mark.parametrize("preset", ["tmaze", "ppo/cartpole"])
@pytest.mark.usefixtures("four_cores")
def test_presets_train_small_models_on_one_thread(tmp_path: Path, preset: str) -> None:
    folder = f"Experiment.ckpt_base_dir='{tmp_path}'"
    load_config([preset], [(folder, folder)])
    exp = Experiment()  # type: ignore[call-arg]
    exp.verbose = False
    exp.start()
    exp.close()
    assert torch.get_num_threads() == 1


@pytest.mark.usefixtures("four_cores")
def test_a_large_model_gets_the_threads_that_the_user_and_the_cores_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "WORTH_MORE", 0.0)
    for limit, share, expected in (
        (4, "1", 4),
        (3, "1", 3),
        (4, "2", 2),
        (1, "1", 1),
        (8, "1", 4),
        (4, "9", 1),
    ):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", share)
        torch.set_num_threads(limit)
        threads._replaced.clear()
        assert threads_of(tmp_path) == expected


@pytest.mark.usefixtures("four_cores")
def test_a_number_above_the_limit_is_reduced_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(2)
    with caplog.at_level(logging.WARNING):
        assert threads_of(tmp_path, 3) == 2
    assert "torch_threads is 3, but the limit of this process is 2" in caplog.text
    caplog.clear()
    assert threads_of(tmp_path) == 1
    assert threads_of(tmp_path, 2) == 2  # the choice of the previous run does not limit this one
    assert "torch_threads" not in caplog.text


@pytest.mark.usefixtures("four_cores")
def test_the_quota_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(workers, "CPU_QUOTA", quota)
    without = workers.num_usable_cores()
    for text, expected in (("max 100000", without), ("100000 100000", 1), ("50000 100000", 1)):
        quota.write_text(text)
        assert workers.num_usable_cores() == expected
