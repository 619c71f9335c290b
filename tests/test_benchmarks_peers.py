"""The comparison with other libraries uses the same settings for all; no training."""

import json
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from loxodon.tools.benchmark.results import path_of, read_run, store

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
RATES = {"loxodon": 300.0, "skrl": 100.0}  # env steps per second
OURS, THEIRS = 40.0, 30.0  # returns
STEPS = [2048, 4096, 5120]  # evaluations every 2 of 5 rollouts


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import peers_ppo

    yield peers_ppo
    for name in ("peers_ppo", "peers_control", "peers", "peers.common", "provenance"):
        sys.modules.pop(name, None)


def skrl_case(bench: ModuleType) -> Any:
    settings = replace(bench.CASES["cartpole"].settings, updates=5, evaluate_every=2)
    return replace(bench.CASES["cartpole"], settings=settings)


class FakeRunner:
    """Trains nothing: returns the output of the processes and records their arguments."""

    def __init__(self) -> None:
        self.ours: list[dict[str, str]] = []
        self.peers: list[dict[str, Any]] = []

    def __call__(self, command: list[str], cwd: Path) -> str:
        if command[1:2] == ["-m"]:
            given = json.loads(command[3])
            self.peers.append(given)
            lines = [{"env_steps": n, "seconds": n / RATES["skrl"], "return": THEIRS} for n in STEPS]
            return "\n".join(["a line of the library", *map(json.dumps, [{"peer": "skrl"}, *lines])])
        told = dict(word.split("=", 1) for word in command if "=" in word)
        self.ours.append(told)
        folder = Path(told["Experiment.ckpt_base_dir"].strip("'")) / "run" / "logs"
        folder.mkdir(parents=True)
        half = 1024 / RATES["loxodon"] / 2
        records: list[dict[str, Any]] = [{"env_steps": 0, "val/return": 9.0}]
        for steps in range(1024, 5 * 1024 + 1, 1024):
            records.append({"env_steps": steps, "time/collect_s": half})
            records.append({"env_steps": steps, "time/learn_s": half})
            if steps in STEPS:
                records.append({"env_steps": steps, "val/return": OURS, "time/val_s": 1e6})
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
        return ""


def measured(bench: ModuleType, seeds: list[int], systems: list[str]) -> tuple[dict[str, Any], FakeRunner]:
    case, runner = skrl_case(bench), FakeRunner()
    return bench.measure_case(case, case.settings, seeds, systems, Path("python"), runner), runner


def test_rates_exclude_evaluations_and_every_seed_runs_once_per_system(bench: ModuleType) -> None:
    result, runner = measured(bench, [3, 4], ["loxodon", "skrl"])
    assert {name: found["env_steps_per_s"] for name, found in result["systems"].items()} == RATES
    ours = result["systems"]["loxodon"]["returns"]
    assert ours == [{"env_steps": steps, "return": OURS} for steps in STEPS]
    assert [given["seed"] for given in runner.peers] == [3, 4]
    assert len(runner.ours) == 2
    json.dumps(result)


def test_all_systems_get_the_same_settings(bench: ModuleType) -> None:
    _, runner = measured(bench, [0], ["loxodon", "skrl"])
    told, given = runner.ours[0], runner.peers[0]
    same = {
        "Experiment.parallel_actors": "num_envs",
        "Experiment.train_timesteps_per_epoch": "rollout",
        "Experiment.epochs": "updates",
        "Experiment.val_interval": "evaluate_every",
        "Experiment.learning_rate": "learning_rate",
        "Experiment.grad_clip": "grad_clip",
        "Experiment.critic_loss_weight": "critic_loss_weight",
        "PPOLearner.update_epochs": "epochs",
        "PPOLearner.minibatches": "minibatches",
        "GAE.gamma": "gamma",
        "GAE.lam": "lam",
        "PPOLoss.clip_eps": "clip_eps",
        "PPOLoss.entropy_coef": "entropy_coef",
    }
    assert {name: told[name] for name in same} == {name: repr(given[key]) for name, key in same.items()}


def test_every_setting_has_a_name_that_the_scripts_read(bench: ModuleType) -> None:
    scripts = "".join(path.read_text() for path in (BENCHMARKS / "peers").glob("*.py"))
    unread = [field.name for field in fields(bench.Settings) if f"settings.{field.name}" not in scripts]
    assert unread == []


@pytest.mark.parametrize("name", ["cartpole", "pendulum", "cartpole_no_velocity"])
def test_a_case_evaluates_seven_times_and_its_scripts_exist(bench: ModuleType, name: str) -> None:
    case = bench.CASES[name]
    assert case.settings.updates == bench.NUM_EVALS * case.settings.evaluate_every
    modules = {peer.module.replace(".", "/") for peer in case.peers.values()}
    assert all((BENCHMARKS / f"{module}.py").is_file() for module in modules)


def test_runs_evaluated_at_other_steps_are_not_compared(bench: ModuleType) -> None:
    settings = replace(bench.CASES["cartpole"].settings, updates=2, evaluate_every=1)
    curve = [{"env_steps": 1000, "seconds": 1.0, "return": 1.0}]
    with pytest.raises(
        RuntimeError, match=r"after \[1000\] env steps, but must be evaluated after \[1024, 2048\].*Fix:"
    ):
        bench.with_rate(settings, curve)


class Countdown(gym.Env[np.ndarray, int]):
    """Gives reward 1 per step, and lasts `length` steps."""

    observation_space = gym.spaces.Box(0.0, 9.0, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)  # type: ignore[assignment]

    def __init__(self, length: int) -> None:
        self.length, self.now = length, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.now = 0
        return np.array([1, 2, 3], np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.now += 1
        return np.array([1, 2, 3], np.float32), 1.0, self.now == self.length, False, {}


def test_an_evaluation_takes_one_episode_of_each_environment(bench: ModuleType) -> None:
    common = sys.modules["peers.common"]
    envs = gym.vector.SyncVectorEnv([lambda: Countdown(2), lambda: Countdown(8)])
    starts = []

    def act(obs: np.ndarray, is_first: np.ndarray) -> np.ndarray:
        starts.append(is_first.tolist())
        return np.zeros(2, int)

    assert common.mean_return(envs, act) == 5.0
    assert starts == [[True, True]] + [[False, False]] * 7


def test_a_peer_gets_the_observations_and_the_budget_of_the_suite(bench: ModuleType, tmp_path: Path) -> None:
    import peers_control

    lines = [{"env_steps": n * 4096, "seconds": 1.0, "return": 5.0} for n in (7, 49)]
    about = {"version": "2", "torch": "2"}
    given: dict[str, Any] = {}

    def runner(command: list[str], cwd: Path) -> str:
        given.update(json.loads(command[3]))
        return "\n".join(map(json.dumps, [about, *lines]))

    run = peers_control.train("Hopper-velocities", 1, Path("python"), runner)
    assert (given["env"], given["obs_indices"]) == ("Hopper-v5", [5, 6, 7, 8, 9, 10])
    assert given["updates"] * given["num_envs"] * given["rollout"] == 200_704  # 200,000, in whole rollouts
    store(run, tmp_path)
    stored = read_run(path_of(tmp_path, "sb3_recurrent_ppo", "Hopper-velocities", 1))
    assert stored.curve == [[28_672, 2_240, 1.0, 5.0], [200_704, 15_680, 1.0, 5.0]]
    assert stored.score == 5.0
