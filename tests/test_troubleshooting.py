"""The messages in docs/troubleshooting.md are the ones that people see."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gin
import gymnasium as gym
import numpy as np
import pytest

from loxodon.tools.run import main

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["examples/run.py"])
    gin.clear_config()
    yield
    gin.clear_config()


def dialogues() -> list[tuple[dict[str, str], str, str]]:
    """Existing files, the command, and its output."""
    found, files = [], {}
    for block in re.findall(r"```console\n(.*?)```", PAGE, flags=re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, rest = part.partition("\n")
            if command.startswith("cat "):
                files[command.removeprefix("cat ")] = rest
            else:
                found.append((dict(files), command, " ".join(rest.split())))
    return found


@pytest.mark.parametrize(
    ("files", "command", "said"), dialogues(), ids=[command for _, command, _ in dialogues()]
)
def test_a_mistake_gives_the_message_on_the_page(
    files: dict[str, str], command: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, text in files.items():
        Path(name).write_text(text, encoding="utf-8")
    try:
        code = main(shlex.split(command)[2:])
    except SystemExit as end:
        code = int(end.code or 0)
    told = " ".join(capfd.readouterr().err.split())
    pattern = ".*?".join(re.escape(part) for part in re.split(r"\s*\.\.\.\s*", said))
    assert re.search(pattern + ("" if said.endswith("...") else "$"), told), told
    assert code == 2
    assert "Fix: " in told


@gin.configurable
class Sound(gym.Env[Any, Any]):
    """Five steps with constant observations and rewards."""

    observation_space: Any = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space: Any = gym.spaces.Discrete(2)
    shown: Any = np.zeros(2, np.float32)
    paid, length = 0.0, 5

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.shown, {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.shown, self.paid, self.t >= self.length, False, {}


@gin.configurable
class OldReset(Sound):
    def reset(self) -> Any:  # type: ignore[override]
        return self.shown


@gin.configurable
class OldStep(Sound):
    def step(self, action: Any) -> Any:
        return self.shown, 0.0, False, {}


@gin.configurable
class NoEnv:
    """A class that is not an environment."""


FAULTS: dict[str, Any] = {
    "return another shape than its space says": {"shown": np.zeros(3, np.float32)},
    "return floats where its space has `uint8`": {
        "observation_space": gym.spaces.Box(0, 255, (2,), np.uint8),
        "shown": np.full(2, 0.5),
    },
    "return a number that its Discrete space lacks": {
        "observation_space": gym.spaces.Discrete(4),
        "shown": 4,
    },
    "return a reward that is text": {"paid": "1.0"},
    "declare no action space": {"action_space": None},
    "return NaN": {"shown": np.full(2, np.nan, np.float32)},
    "return infinity": {"paid": float("inf")},
    "have a `reset` of old gym": OldReset,
    "have a `step` of old gym": OldStep,
    "never end an episode": {"length": 10**6},
    "take actions of another kind": {"action_space": gym.spaces.Text(5)},
    "show text": {"observation_space": gym.spaces.Text(5), "shown": "hello"},
    "derive from nothing": NoEnv,
}
ROWS = dict(re.findall(r"^\| ([a-z].*?) \| `(.*?)` \|$", PAGE, flags=re.MULTILINE))
TINY = (
    "epochs=1",
    "train_timesteps_per_epoch=22",
    "train_batches_per_epoch=1",
    "parallel_actors=2",
    "val_timesteps_per_epoch=0",
    "start_learning_at_epoch=0",
    "verbose=False",
)
WORDS = [f"Experiment.{setting}" for setting in TINY] + ["MetricLogger.tensorboard=False"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_environment_gives_the_message_on_the_page(
    fault: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    what = FAULTS[fault]
    for name, value in what.items() if isinstance(what, dict) else ():
        monkeypatch.setattr(Sound, name, value)
    env = "@Sound" if isinstance(what, dict) else f"@{what.__name__}"
    status = main(["--config", "tmaze", f"Experiment.make_train_env={env}", *WORDS])
    told = capfd.readouterr().err
    assert ROWS[fault] in told
    assert status in (1, 2)
    assert "Fix: " in told


def test_a_folder_without_data_gives_the_message_on_the_page(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["Experiment.make_train_env=@Sound", "DiskTrajDataset.takes_new_trajs=False", *WORDS]
    assert main(["--config", "tmaze", *words]) == 1
    told, said = capfd.readouterr().err, "has no trajectories"
    assert f"buffer {said}, because the folder" in told
    assert "and takes no new trajectories. Fix: train from @DiskTrajDataset()" in told
    assert said in " ".join(PAGE.split())


def test_every_row_of_the_page_is_tested() -> None:
    assert set(ROWS) == set(FAULTS)
    assert len(dialogues()) + len(ROWS) >= 35
