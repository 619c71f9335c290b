from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from loxodon.data import TrajectoryWriter, load_trajectory
from loxodon.envs import EnvSpec, EpsilonGreedy, make_vector_env
from loxodon.experiment import Collector, Histories

from .fakes import CountingEnv, TinyAgent


def make_collector(
    lengths: Sequence[int], *, truncates: bool = False, sink: Any = None, exploration: Any = None
) -> Collector:
    specs = [EnvSpec(CountingEnv, {"length": n, "truncates": truncates}) for n in lengths]
    envs = make_vector_env(specs, "sync")
    torch.manual_seed(0)
    agent = TinyAgent(envs.single_observation_space, envs.single_action_space, None, None, 8)
    histories = Histories.create(len(lengths))
    return Collector(envs, agent, torch.device("cpu"), exploration, sink, histories, True)  # type: ignore[arg-type]


class RecordingSink:
    """Keeps copies of everything it is given."""

    def __init__(self) -> None:
        self.begun: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        self.added: list[dict[str, np.ndarray]] = []
        self.num_flushes = 0

    def begin(self, rows: Any, obs: Any, rl2s: Any, time_idxs: Any, env_names: list[str]) -> None:
        self.begun.append((rows.copy(), obs["observation"].copy(), rl2s.copy(), time_idxs.copy()))

    def add(
        self,
        actions: Any,
        rewards: Any,
        terminated: Any,
        ended: Any,
        obs: Any,
        rl2s: Any,
        time_idxs: Any,
        ignored: Any = None,
        extras: Any = None,
    ) -> None:
        entry = {"actions": actions, "rewards": rewards, "terminated": terminated, "ended": ended}
        entry |= {"obs": obs["observation"], "rl2s": rl2s, "time_idxs": time_idxs}
        self.added.append({key: value.copy() for key, value in entry.items()})

    def flush_partial(self) -> None:
        self.num_flushes += 1

    def wait(self) -> None:
        pass


def test_rl2s_hold_the_reward_and_the_one_hot_of_the_executed_action() -> None:
    sink = RecordingSink()
    collector = make_collector([4, 4], sink=sink)
    collector.restart(seed=0)
    collector.collect(7)
    for step in sink.added:
        np.testing.assert_array_equal(step["rl2s"][:, 0], step["rewards"])
        np.testing.assert_array_equal(step["rl2s"][:, 1:], np.eye(3, dtype=np.float32)[step["actions"]])


def test_the_stored_action_is_the_one_after_exploration() -> None:
    sink = RecordingSink()
    space = spaces.Discrete(3)
    noise = EpsilonGreedy(space, 2, 0, eps_start=1.0, eps_end=1.0, randomize_eps=False)
    collector = make_collector([50, 50], sink=sink, exploration=noise)
    collector.sample = False
    collector.restart(seed=0)
    collector.collect(30)
    assert {int(a) for step in sink.added for a in step["actions"]} == {0, 1, 2}


def test_ended_rows_give_the_sink_the_final_observation_and_the_policy_a_fresh_start() -> None:
    sink = RecordingSink()
    collector = make_collector([3, 5], sink=sink)
    collector.restart(seed=0)
    collector.collect(4)
    at_end = sink.added[2]  # env 0 ends with its third step
    np.testing.assert_array_equal(at_end["ended"], [True, False])
    np.testing.assert_array_equal(at_end["obs"], [[0, 3], [0, 3]])
    np.testing.assert_array_equal(at_end["time_idxs"], [[3], [3]])
    rows, obs, rl2s, time_idxs = sink.begun[1]
    np.testing.assert_array_equal(rows, [0])
    np.testing.assert_array_equal(obs[0], [1, 0])
    assert not rl2s[0].any()
    assert time_idxs[0] == 0
    assert rl2s[1].any()
    np.testing.assert_array_equal(sink.added[3]["time_idxs"], [[1], [4]])


def test_the_rollout_goes_on_between_two_calls() -> None:
    whole, halves = RecordingSink(), RecordingSink()
    for sink, parts in ((whole, [6]), (halves, [2, 4])):
        collector = make_collector([4, 4], sink=sink)
        collector.restart(seed=0)
        for part in parts:
            collector.collect(part)
    for one, other in zip(whole.added, halves.added, strict=True):
        for key, value in one.items():
            np.testing.assert_array_equal(value, other[key])


@pytest.mark.parametrize("truncates", [False, True])
def test_files_on_disk_tell_truncation_from_termination(tmp_path: Path, truncates: bool) -> None:
    writer = TrajectoryWriter(tmp_path, 2, save_as="npz", seed=0)
    collector = make_collector([3, 3], truncates=truncates, sink=writer)
    collector.restart(seed=0)
    collector.collect(6)
    writer.close()
    paths = sorted(tmp_path.glob("*.npz"))
    assert len(paths) == 4
    for path in paths:
        traj = load_trajectory(path)
        np.testing.assert_array_equal(
            traj.obs["observation"][:, 1], [0, 1, 2, 3]
        )  # 3: the true last observation
        np.testing.assert_array_equal(traj.dones[:, 0], [False, False, not truncates])
        np.testing.assert_array_equal(traj.time_idxs[:, 0], [0, 1, 2, 3])
        assert len(np.unique(traj.obs["observation"][:, 0])) == 1  # nothing of the next episode


def test_episode_shares_are_equal_whatever_the_episode_lengths() -> None:
    collector = make_collector([2, 10])
    collector.collect(1000, episodes=6)
    lengths = [n for of_name in collector.histories.returns.lengths.values() for n in of_name]
    assert sorted(lengths) == [2, 2, 2, 10, 10, 10]
    successes = collector.histories.specials.values["success"]
    assert sum(len(values) for values in successes.values()) == 6


def test_should_stop_ends_a_call_after_the_running_step() -> None:
    collector = make_collector([4, 4])
    collector.should_stop = lambda: True
    assert collector.collect(100) == 2


def test_restart_stores_what_was_running_and_forgets_running_returns() -> None:
    sink = RecordingSink()
    collector = make_collector([4, 4], sink=sink)
    collector.restart(seed=0)
    collector.collect(3)
    sink.num_flushes = 0
    collector.restart(seed=1)
    assert sink.num_flushes == 1
    collector.collect(4)
    assert collector.histories.returns.num_episodes == 2
    assert all(n == [4, 4] for n in collector.histories.returns.lengths.values())


def test_nothing_finished_means_no_figures() -> None:
    collector = make_collector([9])
    collector.collect(5)
    assert collector.histories.summary("val") == {}


class NextStepEnvs:
    """Two envs; the second has episodes of three steps and resets a call late (next-step autoreset)."""

    num_envs = 2
    single_observation_space = spaces.Dict(
        observation=spaces.Box(-np.inf, np.inf, (2,), np.float32), words=spaces.Text(9)
    )
    single_action_space = spaces.Discrete(3)

    def reset(self, *, seed: Any) -> Any:
        self.time, self.episode, self.env_names = np.array([0, 0]), 0, ["steady", "late0"]
        return self._obs(), {}

    def _obs(self) -> dict[str, np.ndarray]:
        rows = np.array([[0, self.time[0]], [self.episode, self.time[1]]], np.float32)
        return {"observation": rows, "words": np.array(["some", "text"], object)}

    def step(self, actions: np.ndarray) -> Any:
        no = np.zeros(2, dtype=bool)
        self.time += 1
        infos: dict[str, Any] = {}
        ended, rewards = np.array([False, bool(self.time[1] == 3)]), np.array([1, 1], np.float32)
        if self.time[1] == 4:
            self.time[1], self.episode = 0, self.episode + 1
            self.env_names = ["steady", f"late{self.episode}"]
            infos["_ignore"], rewards[1] = np.array([False, True]), 0
        obs = self._obs()
        if ended.any():
            infos |= {"final_obs": obs, "_final_obs": ended}
        return obs, rewards, ended, no, infos


def test_rows_that_are_no_timestep_are_not_stored_counted_or_remembered(tmp_path: Path) -> None:
    envs: Any = NextStepEnvs()
    obs_space = spaces.Dict(observation=envs.single_observation_space["observation"])
    torch.manual_seed(0)
    agent: Any = TinyAgent(obs_space, envs.single_action_space, None, None, 8)
    # TinyAgent itself checks that its memory is blank exactly where an episode begins.
    writer = TrajectoryWriter(tmp_path, 2)
    noise = EpsilonGreedy(envs.single_action_space, 2, 0)
    collector = Collector(envs, agent, torch.device("cpu"), noise, writer, Histories.create(2), True)
    assert collector.collect(12) == 24 - 3
    assert collector.histories.returns.lengths == {f"late{i}": [3] for i in range(3)}
    assert collector.histories.returns.returns == {f"late{i}": [3.0] for i in range(3)}
    collector.close()
    trajs = {traj.env_name: traj for traj in map(load_trajectory, tmp_path.glob("*.npz"))}
    assert len(trajs["steady"]) == 12
    for i in range(3):
        traj = trajs[f"late{i}"]
        np.testing.assert_array_equal(traj.obs["observation"], [[i, t] for t in range(4)])
        assert set(traj.obs) == {"observation"}
        np.testing.assert_array_equal(traj.time_idxs[:, 0], range(4))
        assert not traj.rl2s[0].any()
