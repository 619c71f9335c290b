"""Layered configs, user modules, and suggested fixes that are followed to the letter."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import gin
import pytest

from loxodon import tools
from loxodon.tools.run import main

from .fakes import TINY

ENVS = """
import gin
import gymnasium as gym
import numpy as np


class Base(gym.Env):
    observation_space = gym.spaces.Dict(place=gym.spaces.Box(-1.0, 1.0, (1,), np.float32))
    action_space = gym.spaces.Discrete(2)
    far = 0.0

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return {"place": np.zeros(1, np.float32)}, {}

    def step(self, action):
        self.t += 1
        return {"place": np.full(1, self.far, np.float32)}, 1.0, self.t == 12, False, {}


@gin.configurable
class CompDictEnv(Base):
    pass


@gin.configurable
class CompOldReset(Base):
    def reset(self):
        return {"place": np.zeros(1, np.float32)}


@gin.configurable
class CompFar(Base):
    far = 1e6
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    modules, known = set(sys.modules), dict(gin.config._REGISTRY.items())
    Path("tiny.gin").write_text(TINY)
    yield
    for name in set(sys.modules) - modules:
        if name.startswith("comp_"):
            del sys.modules[name]
    for selector in set(dict(gin.config._REGISTRY.items())) - set(known):
        if selector.startswith("comp_"):
            gin.config._REGISTRY.pop(selector)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The error for an unusable config: one line, without a traceback."""
    assert main([*words, "--check"]) == 2
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line.startswith("config error:")]
    assert len(lines) == 1, error
    assert "Traceback" not in error
    assert "Fix:" in lines[0]
    return lines[0]


# --- replacing parts ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_later_source_switches_the_encoder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "tmaze", "--config", "encoders/gru_small", "--check"]) == 0
    printed = capsys.readouterr()
    assert "# unused: " in printed.out
    assert "unused" not in printed.err
    assert "check passed" in printed.out


def test_a_switched_agent_trains_without_notes_about_settings_of_the_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--config", "tiny.gin", "Experiment.agent_type=@PPOAgent"]) == 0
    assert "note: " not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("added", "words"),
    [
        ("Actor.d_hidden = 9\nExperiment.agent_type = @PPOAgent\n", []),
        ("", ["Experiment.agent_type=@PPOAgent", "Actor.d_hidden=9"]),
    ],
)
def test_a_setting_that_its_own_source_makes_unused_is_an_error(
    added: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.gin").write_text(f"include 'tiny.gin'\n{added}")
    assert "Actor.d_hidden = 9 is set, but" in refused(capsys, "--config", "mine.gin", *words)


# --- the user's module ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("x = 1\ny = (2,\n", "comp_env.py:2: SyntaxError: '(' was never closed"),
        ("\nx = 1 / 0\n", "comp_env.py:2: ZeroDivisionError: division by zero"),
        ("import comp_none\n", "comp_env.py:1: ModuleNotFoundError: No module named 'comp_none'"),
        ("import json\njson.loads('{')\n", "comp_env.py:2: JSONDecodeError"),
    ],
)
def test_an_error_in_an_imported_module_is_reported_as_such(
    code: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("comp_env.py").write_text(code)
    Path("mine.gin").write_text("include 'tiny.gin'\nimport comp_env\n")
    error = refused(capsys, "--config", "mine.gin")
    assert said in error
    assert "while importing comp_env for mine.gin:2" in error


# --- suggested fixes ------------------------------------------------------------------------------------


def envs(*words: str) -> list[str]:
    """A command line with the environments above."""
    Path("comp_envs.py").write_text(ENVS)
    text = Path("tiny.gin").read_text().replace("TMazePassive.horizon = 3\n", "")
    Path("mine.gin").write_text(f"{text}import comp_envs\n")
    return ["--config", "mine.gin", *words]


def in_env(name: str) -> list[str]:
    return [f"Experiment.make_train_env={name}", f"Experiment.make_val_env={name}"]


def test_the_fix_for_a_forgotten_at_sign_works(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, *envs(*in_env("CompDictEnv")))
    (mended,) = re.findall(r"Fix: write (\S+) ", error)
    assert main([*envs(*in_env(mended)), "--check"]) == 0


def test_environments_of_old_gym_are_refused_with_the_new_signature(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = refused(capsys, *envs(*in_env("@CompOldReset")))
    assert "define reset(self, *, seed=None, options=None)" in error


# --- warnings -------------------------------------------------------------------------------------------


def test_observations_out_of_bounds_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    words = ["Experiment.val_timesteps_per_epoch=0", "Experiment.traj_save_len=8"]
    assert main([*envs(*in_env("@CompFar")), *words]) == 0
    told = [text for text in caplog.messages if "outside the bounds" in text]
    assert len(told) == 1
    assert "CompFar returned 1e+06 as observation 'place'" in told[0]


def test_collecting_for_a_dataset_that_takes_nothing_is_reported(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", "tiny.gin", "--run-name", "data"]) == 0
    settings = ["DiskTrajDataset.dset_name=data", "DiskTrajDataset.takes_new_trajs=False"]
    for steps, is_told in ((8, True), (0, False)):
        caplog.clear()
        words = ["--config", "tiny.gin", *settings, f"Experiment.train_timesteps_per_epoch={steps}"]
        assert main(words) == 0
        assert any("discarded" in text for text in caplog.messages) == is_told
    capsys.readouterr()
    before = sorted(Path("runs").rglob("*"))
    assert main(["--config", "tiny.gin", *settings, "DiskTrajDataset.dset_root=runs", "--check"]) == 0
    assert " 1 updates" in capsys.readouterr().out  # with the existing data
    assert sorted(Path("runs").rglob("*")) == before


def test_a_test_run_plays_whole_episodes(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    words = envs(*in_env("@CompDictEnv"), "Experiment.val_timesteps_per_epoch=100")
    assert main([*words, "--test-run"]) == 0
    assert "updates, one checkpoint, all in runs/tiny-test" in capsys.readouterr().out
    assert not [text for text in caplog.messages if "no episode ended" in text]
    assert '"val/return": 12.0' in Path("runs/tiny-test/logs/metrics.jsonl").read_text()


# --- entry points ---------------------------------------------------------------------------------------


def test_the_tools_package_is_runnable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Path(str(tools.__file__)).with_name("__main__.py")
    monkeypatch.setattr(sys, "argv", [str(started), "run", "--help"])
    monkeypatch.delitem(sys.modules, "loxodon.tools.__main__", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("loxodon.tools", run_name="__main__")
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("usage: python -m loxodon.tools run ")
    assert re.search(r"Partial presets to put on top of one: .*encoders/ff_small", said)
    assert "small," not in said.partition("Partial presets to put")[0].partition("Presets:")[2]


def test_settings_of_another_dataset_in_a_preset_are_not_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("own.gin").write_text("include 'tmaze.gin'\nExperiment.dataset = @MemoryTrajDataset()\n")
    assert main(["--config", "own.gin", "--config", "amago", "--check"]) == 0
    assert "unused" not in capsys.readouterr().err
