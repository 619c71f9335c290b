"""`loxodon evaluate`: its choice of policy and environments, and the effect of a shorter memory."""

from __future__ import annotations

import functools
import json
import shutil
import sys
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

from loxodon.agents import Agent, BaseAgent, PPOAgent
from loxodon.envs import EnvSpec
from loxodon.experiment import Experiment
from loxodon.experiment.checkpoint.policy_file import PolicyInfo, policy_header, write_policy
from loxodon.experiment.checkpoint.record import record_run
from loxodon.experiment.checkpoint.spaces import EnvSpaces
from loxodon.experiment.config import load_config
from loxodon.experiment.process.files import short_name
from loxodon.nets import Categorical, FFTstepEncoder, GRUTrajEncoder, TrajEncoder, TstepEncoder
from loxodon.tools import evaluate
from loxodon.tools.evaluate import cut_memory, find_policy, main, print_table

from ..experiment.fakes import TINY, CountingEnv, make_experiment, run
from ..nets.encoders import DIM, ENCODERS

LENGTH = 5


class FirstBit(gym.Env[Any, Any]):
    """Shows a bit, then zeros; the reward is 1 if the last action equals the bit. Frames are plain grey."""

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
        own = {"metric/success": reward, "metric/return": 7.0, "metric/length": 8.0}
        return np.zeros(1, np.float32), reward, over, False, own if over else {}

    def render(self) -> Any:
        return np.full((32, 32, 3), 10 * self.t, np.uint8)


class AsItIs(TstepEncoder):
    """Encodes an observation as itself."""

    emb_dim = 1

    def inner_forward(self, obs: dict[str, Tensor], rl2s: Tensor, mask: Tensor | None) -> Tensor:
        return obs["observation"]


class Sum(TrajEncoder):
    """Sums up all observations of the episode."""

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
    """Takes action 1 if the state is positive, otherwise 0."""

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


def test_a_policy_that_needs_its_memory_fails_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--env", "FirstBit-v0", "--episodes", "40", "--parallel", "3", "--context", f"full,{LENGTH},4"]
    assert main([a_policy_that_remembers_the_bit(), *words, "--output", "out.json"]) == 0
    report = json.loads(Path("out.json").read_text())
    names = ("format", "env", "policy", "epoch", "sampled", "seed", "episodes")
    assert [report[name] for name in names] == [1, "FirstBit-v0", "sign", 3, False, 0, 40]
    full, all_of_it, too_short = report["results"]
    assert [one["context"] for one in report["results"]] == [None, LENGTH, 4]
    assert full["returns"] == all_of_it["returns"] == [1.0] * 40
    assert full["lengths"] == [LENGTH] * 40
    assert 0.2 < np.mean(too_short["returns"]) < 0.8  # the bit is out of sight when it is needed
    assert too_short["metrics"] == {
        "success": too_short["returns"],
        "metric/return": [7.0] * 40,
        "length": [8.0] * 40,
    }
    assert too_short["task"] == "FirstBit"
    lines = capsys.readouterr().out.splitlines()
    figures = [line.split() for line in lines if line.startswith(" ")][-4:]
    assert [row[:2] for row in figures] == [
        ["length", str(LENGTH)],
        ["metric/length", "8"],
        ["metric/return", "7"],
        ["success", f"{np.mean(too_short['returns']):.4g}"],
    ]
    (row,) = (line for line in lines if line.startswith("last 4 "))
    low, _, high = row.split()[5:8]
    assert row.split()[4] == f"{np.mean(too_short['returns']):.4g}"
    assert float(low) < np.mean(too_short["returns"]) < float(high)


def driven(agent: BaseAgent, start: int, stop: int, state: Any) -> tuple[Any, Tensor]:
    """Act at the timesteps start..stop-1 of two envs; returns hidden state and the last policy's parameters.

    The second env begins a new episode at timestep 4.
    """
    found: list[Tensor] = []
    policy = agent.policy

    def noted(x: Tensor) -> Any:
        found.append((distribution := policy(x)).params)
        return distribution

    vars(agent)["policy"] = noted
    for t in range(start, stop):
        g = torch.Generator().manual_seed(t)
        times = torch.tensor([[t], [t if t < 4 else t - 4]])
        state = agent.reset_hidden_state(state, times[:, 0] == 0)
        actions = torch.nn.functional.one_hot(torch.randint(8, (2,), generator=g), 8).float()
        rl2s = torch.cat([torch.randn(2, 1, generator=g), actions], 1) * (times > 0)
        obs = {"observation": torch.randn(2, 3, generator=g)}
        _, state = agent.get_actions(obs, rl2s, times, state, False)
    del vars(agent)["policy"]
    return state, found[-1]


def make_agent(kind: Any, encoder: str, **tstep: Any) -> Any:
    torch.manual_seed(0)
    obs_space = spaces.Dict(observation=spaces.Box(-np.inf, np.inf, (3,), np.float32))
    tstep_type = partial(FFTstepEncoder, d_hidden=8, d_output=DIM, **tstep)
    encoders = tstep_type, lambda *_: ENCODERS[encoder]()
    return kind(obs_space, spaces.Discrete(8), *encoders, 8).eval()


@pytest.mark.parametrize(
    ("kind", "encoder"),
    [
        *((Agent, encoder) for encoder in ENCODERS),
        *(
            (partial(PPOAgent, share_encoder=False), encoder)
            for encoder in ("gru", "mamba", "transformer_rotary")
        ),
    ],
)
def test_an_agent_with_a_shortened_memory_acts_like_one_that_has_just_started(
    kind: Any, encoder: str
) -> None:
    cpu, agent = torch.device("cpu"), make_agent(kind, encoder)
    for size in (1, 3):
        cut = make_agent(kind, encoder)
        cut_memory(cut, size)
        with torch.inference_mode():
            state = cut.init_hidden_state(2, cpu)
            for t in range(7):
                state, found = driven(cut, t, t + 1, state)
                _, expected = driven(agent, max(0, t + 1 - size), t + 1, agent.init_hidden_state(2, cpu))
                torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_an_unknown_hidden_state_cannot_be_shortened() -> None:
    class Own(SignAgent):
        def init_hidden_state(self, num_envs: int, device: torch.device) -> Any:
            return torch.zeros(num_envs)

    space = spaces.Dict(observation=FirstBit.observation_space)
    agent = Own(space, FirstBit.action_space, AsItIs, Sum, LENGTH)
    with pytest.raises(ValueError, match=r"Own has its own hidden state.*Fix: remove --context"):
        cut_memory(agent, 1)


def a_run(*changes: str) -> Path:
    """A finished run with enlarged weights, because barely trained ones act the same everywhere."""
    Path("tiny.gin").write_text(TINY)
    load_config(["tiny.gin"], ["Experiment.verbose=False", "Experiment.seed=1", *changes])
    exp = run(Experiment())  # type: ignore[call-arg]  # gin supplies the arguments
    with torch.no_grad():
        for param in exp.policy.parameters():
            param.mul_(4.0)
    exp.write_latest_policy()
    gin.clear_config()
    return exp.run_dir


def test_a_context_as_long_as_the_episodes_is_the_whole_memory() -> None:
    env = ["Experiment.make_train_env=@Recall", "Experiment.make_val_env=@Recall", "Recall.length=3"]
    folder = a_run(*env, "Experiment.traj_encoder_type=@GRUTrajEncoder", "GRUTrajEncoder.d_hidden=8")
    words = ["--policy", "latest", "--sampled", "--episodes", "30", "--context", "1,6,9,full"]
    assert main([str(folder), *words]) == 0
    found = {
        one["context"]: one["returns"] for one in results(folder / "evaluations/latest-val-sampled.json")
    }
    assert len(found[None]) == 30
    assert found[6] == found[9] == found[None]  # episodes have 6 steps, and the same actions are drawn
    assert found[1] != found[None]


def test_a_run_is_evaluated_in_its_own_environments_with_changes_on_top(
    capsys: pytest.CaptureFixture[str],
) -> None:
    env = ["Experiment.make_val_env=@KShotWrapper", "Experiment.make_train_env=@KShotWrapper"]
    made = ["KShotWrapper.env=@TMazePassive", "KShotWrapper.num_attempts=2"]
    folder = a_run(*env, *made, "DiskTrajDataset.sampler=@PrioritySampler()")
    with (folder / "ckpts/config.txt").open("a") as file:
        file.write("Agent.of_another_version = 1\n")  # this setting is skipped
    words = ["--episodes", "4", "--parallel", "3", "--policy"]
    assert main([str(folder), *words, "latest"]) == 0
    (one,) = results(folder / "evaluations/latest-val-greedy.json")
    assert one["lengths"] == [8] * 4
    assert [len(attempt) for attempt in one["attempts"]] == [4, 4]
    assert np.sum(one["attempts"]) == pytest.approx(np.sum(one["returns"]))
    assert "return by attempt" in capsys.readouterr().out
    (folder / "ckpts/versions.json").write_text("{")  # damaged, but not needed if gin configures everything
    changed = [*words, "epoch:0", "--set", "TMazePassive.horizon=2", "--seed", "5"]
    assert main([str(folder), *changed]) == 0
    (one,) = results(folder / "evaluations/epoch_0-val_TMazePassive.horizon_2-greedy.json")
    assert one["lengths"] == [6] * 4
    assert main([str(folder / "ckpts/latest/policy.safetensors"), "--episodes", "1"]) == 0
    assert main([str(folder / "ckpts/policy_weights/policy_epoch_0.safetensors"), *words[:4]]) == 0
    (other,) = results(folder / "evaluations/epoch_0-val-greedy.json")
    assert other["lengths"] == [8] * 4
    assert main([str(folder / "ckpts/latest/policy.safetensors"), "--policy", "best"]) == 2
    assert "Fix: leave out --policy." in capsys.readouterr().err
    written = sorted((folder / "evaluations").iterdir())
    assert main([str(folder), *words, "latest", "--discount", "0.9"]) == 0
    assert sorted((folder / "evaluations").iterdir()) == written
    capsys.readouterr()
    for wrong, says in {
        ("epoch:7",): "policy_epoch_7.safetensors: runs/tiny has best, latest, epoch:0. Fix: choose one",
        ("newest",): "--policy is 'newest', but must be best, latest or epoch:N. Fix: ",
        ("latest", "--set", "TMazePassive.horizn=2"): "Did you mean 'horizon'?",
        ("latest", "--env", "CartPole-v9"): "Fix: ",
        ("latest", "--discount", "0.7"): "The discount 0.7 is not trained: this Agent has [0.1, 0.9, ",
        ("latest", "--set", "TMazePassive.horizon=-5"): "TMazePassive.horizon is -5",
        ("latest", "--env", "CartPole-v1"): "belongs to another environment: ",
    }.items():
        assert main([str(folder), *words, *wrong]) == 2
        assert says in capsys.readouterr().err
    shutil.rmtree(folder / "evaluations")
    (folder / "evaluations").touch()
    assert main([str(folder), *words, "latest"]) == 2
    assert "evaluations cannot be written to (Not a directory). Fix: " in capsys.readouterr().err


def test_a_policy_file_on_its_own_needs_an_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([a_policy_that_remembers_the_bit()]) == 2
    assert "Fix: give the folder of such a run, or name an environment, e.g. --env" in capsys.readouterr().err


def test_a_vector_environment_of_the_working_folder_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("bits_of_tests.py").write_text(
        """import gymnasium as gym

class Bits(gym.vector.SyncVectorEnv):
    def __init__(self):
        super().__init__([lambda: gym.make("FirstBit-v0")] * 3)
"""
    )
    words = ["--env", "bits_of_tests:Bits", "--parallel", "3", "--episodes", "6", "--json", "out.json"]
    assert main([a_policy_that_remembers_the_bit(), *words]) == 0
    assert results("out.json")[0]["returns"] == [1.0] * 6


@pytest.mark.parametrize("env", ["FirstBit-v0", None])
def test_videos_of_episodes_are_recorded(env: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("moviepy")
    words = [a_policy_that_remembers_the_bit(), "--env", env or "CartPole-v1", "--episodes", "1"]
    assert main([*words, "--video", "films"]) == (0 if env else 2)
    if env:
        assert [path.name for path in sorted(Path("films").iterdir())] == [
            f"sign-episode-{i}.mp4" for i in range(3)
        ]


def test_a_run_configured_in_python_is_evaluated_in_its_own_environment(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_env = functools.partial(EnvSpec, functools.partial(CountingEnv, length=3), env_name="three")
    types = {"agent_type": Agent, "tstep_encoder_type": FFTstepEncoder, "traj_encoder_type": GRUTrajEncoder}
    exp = run(make_experiment(Path(), make_val_env=make_env, epochs=1, **types))
    assert main([str(exp.run_dir), "--episodes", "6"]) == 0
    (found,) = results(exp.run_dir / "evaluations" / "best-val-greedy.json")
    assert (found["task"], found["lengths"]) == ("three", [3] * 6)
    nameless = run(
        make_experiment(Path(), make_val_env=lambda: CountingEnv(length=3), epochs=1, run_name="b", **types)
    )
    assert main([str(nameless.run_dir)]) == 2
    assert "does not record how to create its environment" in capsys.readouterr().err


def test_an_environment_from_python_replaces_that_of_a_preset() -> None:
    load_config("small", {"Experiment.make_val_env": "@gym_env()", "gym_env.env_id": "CartPole-v1"})
    make_env = EnvSpec(CountingEnv, {"length": 3}, env_name="three")
    types = {"agent_type": Agent, "tstep_encoder_type": FFTstepEncoder, "traj_encoder_type": GRUTrajEncoder}
    exp = run(make_experiment(Path(), make_val_env=make_env, make_train_env=make_env, epochs=1, **types))
    assert main([str(exp.run_dir), "--episodes", "6"]) == 0
    (found,) = results(exp.run_dir / "evaluations" / "best-val-greedy.json")
    assert (found["task"], found["lengths"]) == ("three", [3] * 6)


def test_all_contexts_are_of_one_policy_although_a_learner_may_replace_its_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = a_policy_that_remembers_the_bit()
    loads: list[Any] = []
    load = evaluate.load_policy
    monkeypatch.setattr(
        evaluate, "load_policy", lambda *given, **how: loads.append(given) or load(*given, **how)
    )
    words = ["--env", "FirstBit-v0", "--episodes", "4", "--context", "full,4", "--json", "out.json"]
    assert main([file, *words]) == 0
    assert len(loads) == 1


def test_many_changes_make_a_short_file_name() -> None:
    assert len(short_name("a" * 500, "a" * 500)) < 140
    assert short_name("a" * 500, "a" * 500) != short_name("a" * 499, "a" * 499)
    assert short_name("best-val-greedy", "") == "best-val-greedy"


def test_a_policy_is_found_from_inside_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    types = {"agent_type": Agent, "tstep_encoder_type": FFTstepEncoder, "traj_encoder_type": GRUTrajEncoder}
    exp = run(make_experiment(Path(), epochs=1, **types))
    monkeypatch.chdir(exp.run_dir / "ckpts" / "best")
    found = find_policy(Path("policy.safetensors"))
    assert (found.name, found.run_dir) == ("best", Path.cwd().parents[1])


def test_values_of_the_attempts_of_a_trial_have_no_interval(capsys: pytest.CaptureFixture[str]) -> None:
    one = {"context": None, "task": "t", "returns": [1.0, 3.0], "lengths": [4, 4], "attempts": []}
    print_table([{**one, "metrics": {"success": [1.0, 0.0, 1.0, 0.0]}}])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["full", "t", "return", "2", "1", "to", "3", "2"] in rows
    assert ["success", "0.5", "4"] in rows
