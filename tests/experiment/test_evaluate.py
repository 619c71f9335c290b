"""`loxodon evaluate`: which policy in which environments, and what cutting its memory does to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gin
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from loxodon.agents import BaseAgent
from loxodon.experiment import Experiment
from loxodon.experiment.checkpoint.policy_file import PolicyInfo, policy_header, write_policy
from loxodon.experiment.checkpoint.record import record_run
from loxodon.experiment.checkpoint.spaces import EnvSpaces
from loxodon.experiment.config import load_config
from loxodon.experiment.evaluate import main
from loxodon.nets import Categorical, TrajEncoder, TstepEncoder

from .fakes import TINY, run

LENGTH = 5


class FirstBit(gym.Env[Any, Any]):
    """Shows a bit, then nothing; pays 1 if the last action is that bit. Draws itself as one grey."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012 - as gymnasium has it

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.bit, self.t = int(self.np_random.integers(2)), 0
        return np.array([2.0 * self.bit - 1.0], np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        over = self.t == LENGTH
        reward = float(over and int(action) == self.bit)
        return np.zeros(1, np.float32), reward, over, False, {"metric/success": reward} if over else {}

    def render(self) -> Any:
        return np.full((32, 32, 3), 10 * self.t, np.uint8)


class AsItIs(TstepEncoder):
    """The observation."""

    emb_dim = 1

    def inner_forward(self, obs: dict[str, Tensor], rl2s: Tensor, mask: Tensor | None) -> Tensor:
        return obs["observation"]


class Sum(TrajEncoder):
    """The sum of all that was seen in the episode."""

    emb_dim = 1

    def init_hidden_state(self, num_envs: int, device: torch.device) -> Tensor:
        return torch.zeros(num_envs, 1)

    def reset_hidden_state(self, hidden_state: Tensor, ended: Tensor) -> Tensor:
        return hidden_state.masked_fill(ended[:, None], 0.0)

    def forward(
        self, seq: Tensor, time_idxs: Tensor, hidden_state: Any = None, resets: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        total = torch.zeros(len(seq), 1) if hidden_state is None else hidden_state
        outputs = []
        for t in range(seq.shape[1]):
            if resets is not None:
                total = self.reset_hidden_state(total, resets[:, t])
            total = total + seq[:, t]
            outputs.append(total)
        return torch.stack(outputs, 1), total


class SignAgent(BaseAgent):
    """Takes action 1 where the state is positive, else 0."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("signs", torch.tensor([-1.0, 1.0]))

    def policy(self, state: Tensor) -> Categorical:
        return Categorical(state * self.signs)

    def forward(self, batch: Any, with_metrics: bool = False) -> Any:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def _in_an_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    gym.register("FirstBit-v0", FirstBit)  # type: ignore[arg-type]
    yield
    del gym.registry["FirstBit-v0"]


def results(path: str | Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(Path(path).read_text())["results"]
    return found


def a_policy_that_remembers_the_bit() -> str:
    types = {"agent_type": SignAgent, "tstep_encoder_type": AsItIs, "traj_encoder_type": Sum}
    env_spaces = EnvSpaces(FirstBit.observation_space, FirstBit.action_space)
    record = record_run(spaces=env_spaces, types=types, max_seq_len=LENGTH, config_hash="")
    tensors = {"signs": torch.tensor([-1.0, 1.0])}
    write_policy(Path("sign.safetensors"), tensors, policy_header(PolicyInfo(1, 3, False), record.header()))
    return "sign.safetensors"


def test_a_policy_that_needs_its_memory_fails_without(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--env", "FirstBit-v0", "--episodes", "40", "--parallel", "3", "--context", f"full,{LENGTH},4"]
    assert main([a_policy_that_remembers_the_bit(), *words, "--output", "out.json"]) == 0
    report = json.loads(Path("out.json").read_text())
    names = ("format", "env", "policy", "epoch", "sampled", "seed", "episodes")
    assert [report[name] for name in names] == [1, "FirstBit-v0", "sign", 3, False, 0, 40]
    full, all_of_it, too_short = report["results"]
    assert [one["context"] for one in report["results"]] == [None, LENGTH, 4]
    assert full["returns"] == all_of_it["returns"] == [1.0] * 40
    assert full["lengths"] == [LENGTH] * 40
    assert 0.2 < np.mean(too_short["returns"]) < 0.8  # the bit is out of sight when it is asked for
    assert too_short["metrics"] == {"success": too_short["returns"]}
    assert too_short["task"] == "FirstBit"
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("last 4 "))
    low, _, high = row.split()[5:8]
    assert row.split()[4] == f"{np.mean(too_short['returns']):.4g}"
    assert float(low) < np.mean(too_short["returns"]) < float(high)


def a_run(*changes: str) -> Path:
    """A finished run with enlarged weights: what has hardly been trained acts the same everywhere."""
    Path("tiny.gin").write_text(TINY)
    load_config(["tiny.gin"], ["Experiment.verbose=False", "Experiment.seed=1", *changes])
    exp = run(Experiment())  # type: ignore[call-arg]  # gin supplies the arguments
    with torch.no_grad():
        for param in exp.acting.parameters():
            param.mul_(4.0)
    exp.write_latest_policy()
    gin.clear_config()
    return exp.run_dir


@pytest.mark.parametrize(
    "changes",
    [
        ["Experiment.traj_encoder_type=@GRUTrajEncoder", "GRUTrajEncoder.d_hidden=8"],
        [
            "Experiment.traj_encoder_type=@TransformerTrajEncoder",
            "TransformerTrajEncoder.d_model=8",
            "TransformerTrajEncoder.n_heads=2",
        ],
        ["Experiment.traj_encoder_type=@MambaTrajEncoder", "MambaTrajEncoder.d_model=8"],
        [
            "Experiment.traj_encoder_type=@GRUTrajEncoder",
            "Experiment.agent_type=@PPOAgent",
            "PPOLearner.minibatches=1",
        ],
    ],
    ids=["gru", "transformer", "mamba", "ppo"],
)
def test_a_context_as_long_as_the_episodes_is_the_whole_memory(changes: list[str]) -> None:
    env = ["Experiment.make_train_env=@Recall", "Experiment.make_val_env=@Recall", "Recall.length=3"]
    folder = a_run(*env, *changes)
    words = ["--policy", "latest", "--sampled", "--episodes", "100", "--context", "1,6,9,full"]
    assert main([str(folder), *words]) == 0
    found = {
        one["context"]: one["returns"] for one in results(folder / "evaluations/latest-val-sampled.json")
    }
    assert len(found[None]) == 100
    assert found[6] == found[9] == found[None]  # episodes of 6 steps; the same actions are drawn
    assert found[1] != found[None]


def test_a_run_is_evaluated_in_its_own_environments_with_changes_on_top(
    capsys: pytest.CaptureFixture[str],
) -> None:
    env = ["Experiment.make_val_env=@KShotWrapper", "Experiment.make_train_env=@KShotWrapper"]
    folder = a_run(*env, "KShotWrapper.env=@TMazePassive", "KShotWrapper.num_attempts=2")
    words = ["--episodes", "4", "--parallel", "3", "--policy"]
    assert main([str(folder), *words, "latest"]) == 0
    (one,) = results(folder / "evaluations/latest-val-greedy.json")
    assert one["lengths"] == [8] * 4
    assert [len(attempt) for attempt in one["attempts"]] == [4, 4]
    assert np.sum(one["attempts"]) == pytest.approx(np.sum(one["returns"]))
    assert "return by attempt" in capsys.readouterr().out
    changed = [*words, "epoch:0", "--set", "TMazePassive.horizon=2", "--seed", "5"]
    assert main([str(folder), *changed]) == 0
    (one,) = results(folder / "evaluations/epoch_0-val_TMazePassive.horizon_2-greedy.json")
    assert one["lengths"] == [6] * 4
    assert main([str(folder / "ckpts/latest/policy.safetensors"), "--episodes", "1"]) == 0
    capsys.readouterr()
    for wrong, says in {
        ("epoch:7",): "policy_epoch_7.safetensors: runs/tiny has latest, epoch:0. Fix: choose one",
        ("newest",): "--policy is 'newest', but must be best, latest or epoch:N. Fix: ",
        ("latest", "--set", "TMazePassive.horizn=2"): "Did you mean 'horizon'?",
        ("latest", "--env", "CartPole-v1"): "is of another environment: ",
    }.items():
        assert main([str(folder), *words, *wrong]) in (1, 2)
        assert says in capsys.readouterr().err


def test_a_file_alone_needs_an_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([a_policy_that_remembers_the_bit()]) == 1
    assert "Fix: give the folder of such a run, or name an environment: --env" in capsys.readouterr().err


@pytest.mark.parametrize("env", ["FirstBit-v0", None])
def test_episodes_are_recorded(env: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("moviepy")
    words = [a_policy_that_remembers_the_bit(), "--env", env or "CartPole-v1", "--episodes", "1"]
    assert main([*words, "--video", "films"]) == (0 if env else 1)
    if env:
        assert [path.name for path in sorted(Path("films").iterdir())] == [
            f"sign-episode-{i}.mp4" for i in range(3)
        ]
