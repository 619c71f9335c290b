"""Hooks of agents in rollouts besides acting: ending episodes, extending observations, combining rewards."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import gin
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from loxodon.agents import Agent, PPOAgent
from loxodon.data import load_trajectory
from loxodon.envs import EnvSpec, make_vector_env
from loxodon.experiment import Collector, load_policy
from loxodon.experiment.collect import RolloutGroup
from loxodon.experiment.evaluation import Evaluator
from loxodon.nets import FFTrajEncoder, FFTstepEncoder

from .fakes import CountingEnv, TinyAgent, make_experiment, metrics, run
from .test_collector import RecordingSink, lengths_of, make_collector

LENGTH = 5


# ---- ending episodes ----


class Impatient(TinyAgent):
    """Ends each episode after its second step, alternately by termination and by truncation."""

    def post_env_step_modifications(
        self, obs: Any, rewards: np.ndarray, terminated: np.ndarray, truncated: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        episode, timestep = obs["observation"].T
        is_over = timestep >= 2
        return terminated | (is_over & (episode % 2 == 0)), truncated | (is_over & (episode % 2 == 1))


class Announcing(CountingEnv):
    """Reports a metric when an episode begins."""

    def reset(self, **given: Any) -> Any:
        return super().reset(**given)[0], {"metric/begun": 1.0}


def counting_vector(**kwargs: Any) -> gym.vector.VectorEnv[Any, Any, Any]:
    mode = gym.vector.AutoresetMode[kwargs.pop("mode")]
    return gym.vector.SyncVectorEnv([partial(Announcing, LENGTH)] * 2, autoreset_mode=mode)


@pytest.mark.parametrize(
    "mode",
    ["sync", pytest.param("async", marks=pytest.mark.slow), "already_vectorized"],
)
def test_an_agent_ends_episodes_and_their_environments_begin_new_ones(mode: str) -> None:
    recipe = EnvSpec(counting_vector, {"mode": "DISABLED"}) if mode == "already_vectorized" else None
    specs = [recipe or EnvSpec(Announcing, {"length": LENGTH})] * (1 if recipe else 2)
    envs, sink = make_vector_env(specs, mode), RecordingSink()
    agent: Any = Impatient(envs.single_observation_space, envs.single_action_space, None, None, 8)
    collector = Collector([RolloutGroup(envs, sinks=[sink])], agent, torch.device("cpu"), True)
    collector.restart(seed=3)
    collector.collect(6)
    envs.close()
    assert [step["obs"][0].tolist() for step in sink.added] == [[i // 2, 1 + i % 2] for i in range(6)]
    assert [step["ended"].tolist() for step in sink.added] == [[i % 2 == 1] * 2 for i in range(6)]
    assert [step["terminated"][0] for step in sink.added] == [i in (1, 5) for i in range(6)]
    firsts = [obs.tolist() for _, obs, _, _ in sink.begun]
    assert firsts == [[[i, 0]] * 2 for i in range(4)]
    assert [step["time_idxs"][0, 0] for step in sink.added] == [1, 2] * 3
    assert lengths_of(collector) == [2] * 6
    assert [*collector.histories.specials.values["begun"].values()] == [[1.0] * 6]


@pytest.mark.parametrize("episodes", [None, 4])
@pytest.mark.parametrize("stores", [False, True])
def test_evaluations_play_episodes_to_their_natural_end(stores: bool, episodes: int | None) -> None:
    envs = make_vector_env([EnvSpec(CountingEnv, {"length": LENGTH})] * 2, "sync")
    agent: Any = Impatient(envs.single_observation_space, envs.single_action_space, None, None, 8)
    sinks = [RecordingSink()] if stores else []
    evaluator = Evaluator(torch.device("cpu"), sample=True)
    _, histories = evaluator.play(agent, envs, 2 * LENGTH, episodes=episodes, make_sinks=lambda _: sinks)
    assert [n for lengths in histories.returns.lengths.values() for n in lengths] == [LENGTH] * 4


def test_an_environment_that_resets_itself_cannot_be_reset_for_an_agent() -> None:
    envs = make_vector_env([EnvSpec(counting_vector, {"mode": "NEXT_STEP"})], "already_vectorized")
    agent: Any = Impatient(envs.single_observation_space, envs.single_action_space, None, None, 8)
    collector = Collector([RolloutGroup(envs, sinks=[RecordingSink()])], agent, torch.device("cpu"), True)
    collector.restart(seed=3)
    with pytest.raises(NotImplementedError, match=r"agent ended episodes.*NextStep.*Fix:.*DISABLED"):
        collector.collect(6)


class Reviving(TinyAgent):
    def post_env_step_modifications(self, obs: Any, rewards: Any, terminated: Any, truncated: Any) -> Any:
        return terminated & False, truncated


def test_an_episode_that_has_ended_cannot_be_continued() -> None:
    collector = make_collector([2], sinks=[RecordingSink()], agent_type=Reviving)
    with pytest.raises(
        ValueError, match=r"Reviving.post_env_step_modifications returned .*must not continue.*Fix:"
    ):
        collector.collect(3)


# ---- extending observations ----


class Latent:
    """Draws a number for every episode, on which all its actions depend; a mixin for agents."""

    def __init__(self, obs_space: spaces.Dict, *args: Any, **kwargs: Any) -> None:
        own = {"latent": spaces.Box(-np.inf, np.inf, (2,), np.float32)}
        super().__init__(spaces.Dict({**obs_space.spaces, **own}), *args, **kwargs)

    def add_agent_info_to_obs(self, obs: Any, info: Any, is_first: np.ndarray) -> dict[str, np.ndarray]:
        drawn = torch.randn(len(is_first), 2).numpy()
        return {"latent": drawn if info is None else np.where(is_first[:, None], drawn, info["latent"])}


@gin.configurable
class LatentAgent(Latent, Agent):
    pass


@gin.configurable
class LatentPPO(Latent, PPOAgent):
    pass


def settings(agent_type: Any, **changes: Any) -> dict[str, Any]:
    return {
        "agent_type": agent_type,
        "tstep_encoder_type": FFTstepEncoder,
        "traj_encoder_type": FFTrajEncoder,
        "FFTstepEncoder.d_hidden": 8,
        "FFTstepEncoder.d_output": 8,
        "FFTrajEncoder.d_model": 8,
        **changes,
    }


@pytest.mark.slow
def test_added_observations_are_stored_learned_from_and_acted_on(tmp_path: Path) -> None:
    exp = make_experiment(tmp_path, **settings(LatentAgent))
    run(exp)
    seen = set()
    for path in (exp.run_dir / "buffer" / "fifo").glob("*.npz"):
        traj = load_trajectory(path)
        latents = traj.obs["latent"]
        assert latents.shape == (len(traj) + 1, 2)
        assert (latents == latents[0]).all()  # this includes the final observation
        seen.add(tuple(latents[0]))
        assert traj.obs["observation"][:, 1].tolist() == list(range(len(traj) + 1))
    assert len(seen) >= 4
    batch = next(iter(exp.loader.epoch(0, 1)))
    assert batch.obs["latent"].shape[-1] == 2
    policy = load_policy(exp.run_dir / "ckpts" / "latest" / "policy.safetensors", trust=__name__)
    firsts, add = [], policy.agent.add_agent_info_to_obs
    policy.agent.add_agent_info_to_obs = lambda *rest: firsts.append(rest[-1].tolist()) or add(*rest)  # type: ignore[func-returns-value, method-assign]
    latents, act = [], policy.agent.get_actions
    policy.agent.get_actions = lambda obs, *rest: latents.append(obs["latent"].tolist()) or act(obs, *rest)  # type: ignore[assignment, func-returns-value]
    obs = np.zeros((3, 2), np.float32)
    policy.reset(num_envs=3)
    policy.act(obs)
    policy.act(obs, np.zeros(3))
    policy.act(obs, np.zeros(3), is_first=np.array([False, True, False]))
    assert firsts == [[True] * 3, [False] * 3, [False, True, False]]
    assert latents[0] == latents[1]
    assert [one == other for one, other in zip(latents[1], latents[2], strict=True)] == [True, False, True]


@pytest.mark.slow
def test_ppo_evaluates_the_observations_that_it_acted_on(tmp_path: Path) -> None:
    changes = {"exploration_wrapper_type": None, "epochs": 1, "train_timesteps_per_epoch": 16}
    exp = run(make_experiment(tmp_path, **settings(LatentPPO, **changes)))
    name = "ppo/initial_logratio_abs_max"
    assert [one[name] < 1e-4 for one in metrics(exp.run_dir) if name in one] == [True]


class Ageing(TinyAgent):
    """Adds the number of the timestep."""

    obs_space = spaces.Dict(
        {"observation": CountingEnv.observation_space, "age": spaces.Box(0, 99, (1,), np.float32)}
    )

    def add_agent_info_to_obs(self, obs: Any, info: Any, is_first: np.ndarray) -> dict[str, np.ndarray]:
        zeros = np.zeros((len(is_first), 1))
        return {"age": zeros if info is None else np.where(is_first[:, None], zeros, info["age"] + 1)}


class ObsSink(RecordingSink):
    def add(self, *step: Any) -> None:
        super().add(*step)
        self.added[-1]["age"] = step[4]["age"].copy()


def test_additions_to_a_final_observation_belong_to_the_episode_that_ended() -> None:
    sink = ObsSink()
    make_collector([2, 3], sinks=[sink], agent_type=Ageing).collect(7)
    for step in sink.added:
        assert step["age"][:, 0].tolist() == step["obs"][:, 1].tolist()
    assert sum(int(step["ended"].sum()) for step in sink.added) == 5


class Undeclared(TinyAgent):
    obs_space = spaces.Dict({"observation": CountingEnv.observation_space})

    def add_agent_info_to_obs(self, obs: Any, info: Any, is_first: Any) -> dict[str, np.ndarray]:
        return {"latent": np.zeros((len(is_first), 2))}


class Misshapen(Undeclared):
    obs_space = spaces.Dict({**Undeclared.obs_space, "latent": spaces.Box(-1, 1, (3,), np.float32)})


def test_added_observations_must_be_declared() -> None:
    with pytest.raises(
        ValueError, match=r"Undeclared has its own add_agent_info_to_obs.*Fix: give BaseAgent's"
    ):
        make_collector([2], agent_type=Undeclared)
    collector = make_collector([2], agent_type=Misshapen)
    with pytest.raises(ValueError, match=r"shapes \{'latent': \(1, 2\)\}.*says \{'latent': \(1, 3\)\}.*Fix:"):
        collector.collect(1)


# ---- combining rewards ----


class Payer(CountingEnv):
    """Reports two terms of its reward, the second in odd steps only."""

    def step(self, action: int) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        terms = {"metric/reward/speed": 2.0} | ({"metric/reward/energy": -4.0} if self.timestep % 2 else {})
        return obs, reward, terminated, truncated, {**info, **terms}


class Frugal(TinyAgent):
    def combine_rewards(self, rewards: np.ndarray, terms: dict[str, np.ndarray]) -> np.ndarray:
        return 10.0 * rewards + terms["speed"] + 0.5 * terms.get("energy", 0.0)


def test_an_agent_combines_the_terms_of_rewards(tmp_path: Path) -> None:
    envs, sink = make_vector_env([EnvSpec(Payer, {"length": 4})] * 2, "sync"), RecordingSink()
    agent: Any = Frugal(envs.single_observation_space, envs.single_action_space, None, None, 8)
    shaped = {"shape_rewards": lambda rewards, obs: rewards / 2}
    collector = Collector([RolloutGroup(envs, sinks=[sink])], agent, torch.device("cpu"), True, **shaped)
    collector.restart(seed=0)
    collector.collect(4)
    for i, step in enumerate(sink.added):
        own = (step["actions"] == 1).astype(np.float32)
        assert np.array_equal(step["raw_rewards"][:, 0], own)
        assert np.array_equal(step["rewards"], (10.0 * own + 2.0 - 2.0 * (i % 2 == 0)) / 2)
        assert np.array_equal(step["rl2s"][:, 0], own)  # the rewards that the policy sees
    returns = [value for values in collector.histories.returns.returns.values() for value in values]
    assert sum(returns) == sum(step["raw_rewards"].sum() for step in sink.added)
    sink.added.clear()
    collector.is_training = False
    collector.collect(4)
    assert [step["rewards"].tolist() for step in sink.added] == [
        (step["raw_rewards"][:, 0] / 2).tolist() for step in sink.added
    ]
    collector.is_training = True
    agent.combine_rewards = lambda rewards, terms: np.full(2, np.nan)
    with pytest.raises(ValueError, match=r"Frugal.combine_rewards returned .*one finite number.*Fix:"):
        collector.collect(1)


# ---- the documentation ----


def test_the_documented_agents_do_what_the_page_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rollout_hooks.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "docs_agents"}
    for sample in re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL):
        exec(sample, names)
    given = [partial(FFTstepEncoder, d_hidden=8, d_output=8), partial(FFTrajEncoder, d_model=8), 4]
    poles = make_vector_env([EnvSpec("CartPole-v1")] * 2, "sync")
    payers = make_vector_env([EnvSpec(Payer, {"length": 4})] * 2, "sync")
    found = {}
    for name, envs in {"CarefulAgent": poles, "SkilledAgent": poles, "WeighingAgent": payers}.items():
        own = {"term_weights": {"energy": 0.5}} if name == "WeighingAgent" else {}
        agent = names[name](envs.single_observation_space, envs.single_action_space, *given, **own)
        sink = found[name] = RecordingSink()
        group = RolloutGroup(envs, sinks=[sink])
        collector = Collector([group], agent, torch.device("cpu"), True)
        collector.restart(seed=0)
        collector.collect(40)
        assert group.state is not None
        if name == "SkilledAgent":
            assert group.state.obs["skill"].sum(1).tolist() == [1.0, 1.0]
    poles.close()
    payers.close()
    careful = found["CarefulAgent"].added
    leans = np.array([abs(step["obs"][:, 2]) > 0.1 for step in careful])
    assert leans.any()
    assert np.array([step["terminated"] for step in careful])[leans].all()
    for i, step in enumerate(found["WeighingAgent"].added):
        assert np.array_equal(step["rewards"], step["raw_rewards"][:, 0] - 2.0 * (i % 2 == 0))
