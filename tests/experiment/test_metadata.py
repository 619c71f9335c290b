"""The metadata of checkpoints, and the warnings and errors when another run loads them."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import gin
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import Space, spaces
from safetensors.torch import save_file

from loxodon.agents import LinearSchedule
from loxodon.data import DiskTrajDataset, DoNothingDataset, HindsightRelabeler, MixtureOfDatasets
from loxodon.envs import EnvSpec, Tokens
from loxodon.experiment import Callback, Experiment
from loxodon.experiment.checkpoint.policy_file import POLICY_FORMAT, plain_tensors, read_info, read_policy
from loxodon.experiment.checkpoint.record import bindings_of, settings_from_python
from loxodon.experiment.checkpoint.spaces import EnvSpaces, space_differences, space_from_json, space_to_json
from loxodon.experiment.config.hash import config_hash
from loxodon.experiment.process import versions

from .fakes import CountingEnv, TinyAgent, make_experiment, run


class WiderEnv(CountingEnv):
    """CountingEnv with one more number in its observations and one more action."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(4)

    def _obs(self) -> np.ndarray:
        return np.append(super()._obs(), np.float32(0))


def started(folder: Path, env: type[gym.Env[Any, Any]] = CountingEnv, **changes: Any) -> Experiment:
    spec = EnvSpec(env, {})
    exp = make_experiment(folder, make_train_env=spec, make_val_env=spec, **changes)
    exp.start()
    return exp


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(started(tmp_path_factory.mktemp("finished"))).run_dir


@pytest.fixture
def exp(finished: Path, tmp_path: Path) -> Experiment:
    """A run that could continue in a copy of a finished one."""
    shutil.copytree(finished, tmp_path / finished.name)
    return started(tmp_path)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def saved_metadata(exp: Experiment) -> tuple[Path, dict[str, Any]]:
    path = exp.checkpoints.state_dir(exp.checkpoints.newest_epoch()) / "metadata.json"
    return path, json.loads(path.read_text())


def change_metadata(exp: Experiment, **changes: Any) -> None:
    path, values = saved_metadata(exp)
    path.write_text(json.dumps({**values, **changes}))
    (path.parent / "COMPLETE").write_text('{"files": {}}')


def test_a_checkpoint_records_how_it_was_made(exp: Experiment) -> None:
    _, found = saved_metadata(exp)
    assert found["packages"] == {name: versions.version_of(name) for name in versions.PACKAGES}
    assert (found["world_size"], found["seed"], found["max_seq_len"], found["mode"]) == (1, 7, 8, "both")
    own = EnvSpaces(CountingEnv.observation_space, CountingEnv.action_space)
    assert EnvSpaces.from_json(found["spaces"]) == own
    assert found["types"]["agent_type"].endswith(":TinyAgent")
    assert found["time"] > 1.7e9
    stored = json.loads(exp.checkpoints.versions_path.read_text())
    assert str(Path.cwd()) in stored.pop("import_path")
    environments = stored.pop("environments")["dict"]
    assert environments["make_val_env"]["kwargs"]["target"]["name"].endswith(":CountingEnv")
    assert {name: found[name] for name in stored} == stored
    assert stored.keys() == {"seed", "mode", "config_hash", "python", "packages", "hardware", "run_id"}


def test_git_problems_never_stop_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions.git_commit(tmp_path) is None  # not a repository
    assert versions.git_commit(tmp_path / "nothing") is None
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    assert len(versions.git_commit(tmp_path) or "") == 40

    def hanging(*_: Any, **__: Any) -> Any:
        raise subprocess.TimeoutExpired("git", 2.0)

    monkeypatch.setattr(subprocess, "run", hanging)
    assert versions.git_commit(tmp_path) is None


def test_another_environment_is_refused_with_each_difference(exp: Experiment, tmp_path: Path) -> None:
    other = started(tmp_path, WiderEnv)
    text = (
        r"belongs to another environment: observation 'observation' is Box\(-inf, inf, \(2,\), float32\) in "
        r"the file and Box\(-inf, inf, \(3,\), float32\) here; the action space is Discrete\(3\) in the "
        r"file and Discrete\(4\) here. Fix:"
    )
    before = {name: value.clone() for name, value in other.policy.state_dict().items()}
    with pytest.raises(ValueError, match=text):
        other.load_checkpoint()
    assert all((value == before[name]).all() for name, value in other.policy.state_dict().items())
    exp.write_latest_policy()
    actor = started(tmp_path, WiderEnv, mode="collect")
    with pytest.raises(ValueError, match=r"another environment: obs.*Discrete\(4\).*Fix:"):
        actor.learn()


def test_the_same_run_gives_no_warning_and_other_versions_give_one(
    exp: Experiment, caplog: pytest.LogCaptureFixture
) -> None:
    _, values = saved_metadata(exp)
    exp.load_checkpoint()
    assert warnings_of(caplog) == []
    change_metadata(exp, python="3.1.0", packages={**values["packages"], "torch": "\x1b0.4"})
    exp.load_checkpoint()
    (warning,) = warnings_of(caplog)
    python, torch = values["python"], values["packages"]["torch"]
    expected = ["-python 3.1.0", r"-torch \x1b0.4", f"+python {python}", f"+torch {torch}"]
    assert warning.splitlines()[1:] == [f"  {line}" for line in expected]


def test_differing_settings_are_shown_as_a_short_diff(
    exp: Experiment, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    many = "".join(f"M{i} = {i}\n" for i in range(20))
    gin.parse_config(f"Experiment.grad_clip = 9\nExperiment.seed = 2\n{many}")
    requested = started(tmp_path).record.config_requested.replace("M3 = 3", "M3 = 4")
    requested = requested.replace("seed = 2", "seed = 1").replace("Experiment.grad_clip = 9\n", "")
    change_metadata(exp, config_requested=requested)
    started(tmp_path).load_checkpoint()
    (warning,) = (text for text in warnings_of(caplog) if "settings differ" in text)
    assert warning.splitlines()[1:] == ["  -M3 = 4", "  +M3 = 3", "  +Experiment.grad_clip = 9"]
    change_metadata(exp, config_requested="")
    started(tmp_path).load_checkpoint()
    assert warnings_of(caplog)[-1].splitlines()[-1].startswith("  and ")


def test_settings_from_python_are_recorded_and_replace_those_of_gin(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gin.parse_config("Experiment.learning_rate = 0.5\nExperiment.grad_clip = 3.0")
    exp = run(make_experiment(tmp_path, learning_rate=0.25, callbacks=[Callback]))
    assert "Experiment.extra_loss_weights" not in settings_from_python(exp)
    for path in (exp.checkpoints.config_path, exp.checkpoints.requested_path):
        found = bindings_of(path.read_text())
        assert found["Experiment.learning_rate"] == "0.25"
        assert found["Experiment.max_seq_len"] == repr(exp.max_seq_len)
        assert found["Experiment.grad_clip"] == "3.0"
        assert not {"Experiment.make_train_env", "Experiment.callbacks"} & found.keys()
    other = make_experiment(tmp_path, learning_rate=0.125, epochs=exp.epochs)
    other.start(resume=True)
    (warning,) = (text for text in warnings_of(caplog) if "settings differ" in text)
    assert "-Experiment.learning_rate = 0.25\n  +Experiment.learning_rate = 0.125" in warning
    other.close()


def test_settings_whose_default_gin_does_not_know_are_recorded_if_they_differ(tmp_path: Path) -> None:
    weights = {"next_obs": 0.5}
    found = settings_from_python(make_experiment(tmp_path, extra_loss_weights=weights))
    assert found["Experiment.extra_loss_weights"] == weights
    assert "Experiment.wandb_project" not in found


# --- published policies ---------------------------------------------------------------------------------


def test_a_restarted_learner_publishes_another_policy_under_the_same_version(tmp_path: Path) -> None:
    actor, first = started(tmp_path, mode="collect"), started(tmp_path)
    first.write_latest_policy()
    info = actor.read_latest_policy()
    assert info is not None
    assert (info.format, info.loxodon, info.max_seq_len) == (
        POLICY_FORMAT,
        versions.version_of("loxodon"),
        8,
    )
    assert (info.published_s or 0) > 1.7e9
    assert info.env_spaces() == first.env_spaces
    second = started(tmp_path, seed=8)
    second.write_latest_policy()
    actor.read_latest_policy()
    weights = read_policy(second.checkpoints.latest_path)[1]
    assert all((actor.policy.state_dict()[name] == value).all() for name, value in weights.items())


def test_weights_of_another_format_are_refused(tmp_path: Path) -> None:
    learner, actor = started(tmp_path), started(tmp_path, mode="collect")
    header = {**learner.checkpoints.facts(), "loxodon_format": str(POLICY_FORMAT - 1), "loxodon": "9.9"}
    publish(learner, header)
    for load in (
        actor.read_latest_policy,
        lambda: learner.load_checkpoint_from_path(learner.checkpoints.latest_path),
    ):
        with pytest.raises(ValueError, match=r"format is \d, by Loxodon 9.9; this is Loxodon .*Fix:"):
            load()


def test_files_without_a_header_can_be_loaded(tmp_path: Path) -> None:
    exp = started(tmp_path)
    publish(exp, {"version": "3", "epoch": "1"})
    info = started(tmp_path, mode="collect").read_latest_policy()
    assert info is not None
    assert (info.version, info.epoch, info.format, info.published_s) == (3, 1, None, None)
    publish(exp, {"version": "three"})
    with pytest.raises(ValueError, match=r"not a readable safetensors file.*Fix:"):
        read_info(exp.checkpoints.latest_path)


def publish(exp: Experiment, header: dict[str, str]) -> None:
    save_file(plain_tensors(exp.policy), exp.checkpoints.latest_path, metadata=header)


# --- spaces as text ---------------------------------------------------------------------------------------

ALL: list[Space[Any]] = [
    spaces.Box(-np.inf, np.inf, (3, 2), np.float32),
    spaces.Box(np.array([0.1, -2.0]), np.array([0.3, np.inf]), dtype=np.float64),
    spaces.Box(0, 255, (4, 4, 3), np.uint8),
    spaces.Box(np.array(-1.5, np.float32), np.array(0.1, np.float32), (), np.float32),
    spaces.Discrete(5, start=-2),
    spaces.MultiDiscrete([3, 4], start=[1, 0]),
    spaces.MultiDiscrete([[3, 4], [5, 6]], dtype=np.int32),
    spaces.MultiBinary(7),
    spaces.MultiBinary((2, 3)),
    Tokens(["go", "left"], 4),
    spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 1, (2,))])}),
]


def test_every_space_survives_strict_json() -> None:
    for space in ALL:
        text = json.dumps(space_to_json(space), allow_nan=False)
        back = space_from_json(json.loads(text))
        assert (back, back.dtype) == (space, space.dtype)


def test_unknown_spaces_are_refused() -> None:
    with pytest.raises(TypeError, match=r"no JSON form.*Fix:"):
        space_to_json(spaces.Graph(spaces.Discrete(2), None))
    for space in ({"type": "Sphere"}, {"type": "Box", "low": 0}):
        with pytest.raises(ValueError, match=r"describes no spaces.*Fix:"):
            EnvSpaces.from_json({"observation": space, "action": {"type": "Discrete", "n": 2, "start": 0}})


def test_differences_are_shapes_and_the_bounds_of_actions() -> None:
    def env(high: float, obs_high: float) -> EnvSpaces:
        return EnvSpaces(spaces.Dict(x=spaces.Box(0, obs_high, (3,))), spaces.Box(-1, high, (2,)))

    one, two = env(1, 1), env(2, 9)
    assert [text.split(" is ")[0] for text in space_differences(one, two)] == ["the action space"]
    assert space_differences(one, one) == []


# --- hashes of configs -------------------------------------------------------------------------------------


def digest(text: str = "", **changes: Any) -> str:
    exp = make_experiment(Path("somewhere"), **changes)
    return config_hash(exp, bindings_of(text))


def test_macros_of_macros_change_the_hash() -> None:
    one, other = (digest(f"A = {value}\nB = %A\nAgent.gamma = %B") for value in (0.9, 0.99))
    assert one != other
    assert digest("A = %B\nB = %A\nAgent.gamma = %A") == digest("A = %B\nB = %A\nAgent.gamma = %A")


def test_hyperparameters_change_the_hash_and_other_settings_do_not() -> None:
    plain = digest()
    assert len(plain) == 16
    settings = {
        "verbose": True,
        "wandb_project": "x",
        "run_name": "other",
        "CheckpointManager.keep": 3,
        "dloader_workers": 2,
        "seed": 8,
        "ckpt_interval": 1,
        "dataset": DiskTrajDataset(dset_root="/elsewhere"),
    }
    assert digest(**settings) == plain
    changes = [
        {"learning_rate": 0.5},
        {"epochs": 9},
        {"l2_coeff": 0.5},
        {"make_train_env": EnvSpec(CountingEnv, {"noise": 2.0})},
        {"agent_type": partial(TinyAgent)},
    ]
    exact = "CheckpointManager.exact_resume = True"  # determines where checkpoints cut episodes
    found = {plain, *(digest(**change) for change in changes), digest(exact), digest(exact, ckpt_interval=1)}
    assert len(found) == 3 + len(changes)


class Private:
    """Stores its argument privately."""

    def __init__(self, every: float) -> None:
        self._every, self.noise = every, object()


class Derived:
    """Stores a computed value only."""

    def __init__(self, every: float) -> None:
        self.rate, self.noise = 1 / every, object()


@pytest.mark.parametrize(
    ("setting", "make"),
    [
        ("lr_schedule", Private),
        ("lr_schedule", Derived),
        ("lr_schedule", lambda x: LinearSchedule(1.0, x)),
        ("dataset", lambda x: DiskTrajDataset(relabeler=HindsightRelabeler(share=x))),
        ("dataset", lambda x: MixtureOfDatasets([DiskTrajDataset(), DoNothingDataset()], [x, 1.0 - x])),
    ],
)
def test_arguments_of_objects_built_in_python_count(setting: str, make: Any) -> None:
    hashes = [digest(**{setting: make(x)}) for x in (0.1, 0.1, 0.5)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_gin_bindings_count_and_macros_count_by_their_values() -> None:
    plain = digest("TMazePassive.horizon = 5\nDiskTrajDataset.dset_root = 'a'")
    assert digest("H = 5\nD = 'b'\nTMazePassive.horizon = %H\nDiskTrajDataset.dset_root = %D") == plain
    assert digest("H = 6\nTMazePassive.horizon = %H") != plain
    assert digest("train/TMazePassive.horizon = 5") != plain
    assert digest("UrlStore.url = 'x'") == digest()
