"""One collector for one or two groups of envs: stepping, storing, counting and continuing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from loxodon.data import Sink, TrajectoryWriter, WritingClock, load_trajectory
from loxodon.envs import EnvSpec, EpsilonGreedy, make_vector_env
from loxodon.experiment import Collector
from loxodon.experiment.collect import RolloutGroup

from .fakes import CountingEnv, TinyAgent

CPU = torch.device("cpu")


class TwoPartEnvs:
    """An in-process vector env with the two-part step of worker processes; it records the order of calls."""

    def __init__(self, name: str, envs: Any, calls: list[str]) -> None:
        self.name, self.envs, self.calls = name, envs, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self.envs, name)

    def step_async(self, actions: np.ndarray) -> None:
        self.calls.append(f"{self.name} starts")
        self.actions = actions

    def step_wait(self) -> Any:
        self.calls.append(f"{self.name} is awaited")
        return self.envs.step(self.actions)


def make_collector(
    *lengths: Sequence[int],
    sinks: Sequence[Any] = (),
    folder: Path | None = None,
    truncates: bool = False,
    calls: list[str] | None = None,
    agent_type: type[TinyAgent] = TinyAgent,
    **settings: Any,
) -> Collector:
    """One group per list of episode lengths; `sinks` go to the first group."""
    groups, clock = [], WritingClock()
    for i, part in enumerate(lengths):
        specs = [EnvSpec(CountingEnv, {"length": n, "truncates": truncates}) for n in part]
        envs: Any = make_vector_env(specs, "sync")
        if len(lengths) > 1:
            envs = TwoPartEnvs("ab"[i], envs, [] if calls is None else calls)
        group = RolloutGroup(
            envs, EpsilonGreedy(spaces.Discrete(3), len(part), i), list(sinks if i == 0 else ())
        )
        if folder is not None:
            writer = TrajectoryWriter(folder, len(part), save_as="npz", seed=i, clock=clock)
            group.sinks = [*group.sinks, writer]
        groups.append(group)
    torch.manual_seed(0)
    agent: Any = agent_type(envs.single_observation_space, envs.single_action_space, None, None, 8)
    return Collector(groups, agent, CPU, True, **settings)


def trajectories(folder: Path) -> list[Any]:
    """Trajectories in the order of writing."""
    paths = sorted(folder.glob("*.npz"), key=lambda path: path.name.split("_")[1])
    return [load_trajectory(path) for path in paths]


def lengths_of(collector: Collector) -> list[int]:
    """Lengths of all episodes that have ended."""
    return sorted(n for ns in collector.histories.returns.lengths.values() for n in ns)


class RecordingSink(Sink):
    """Stores copies of all its inputs and the names of all calls; raises in the calls named."""

    def __init__(self, *failing: str) -> None:
        self.begun: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        self.added: list[dict[str, np.ndarray]] = []
        self.failing, self.calls = failing, list[str]()

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if name in self.failing:
            raise OSError(f"{name} failed in sink {id(self)}")

    def begin(self, rows: Any, obs: Any, rl2s: Any, time_idxs: Any, env_names: list[str]) -> None:
        self.begun.append((rows.copy(), obs["observation"].copy(), rl2s.copy(), time_idxs.copy()))
        self._note("begin")

    def add(self, actions, rewards, terminated, ended, obs, rl2s, time_idxs, ignored=None, extras=None):  # type: ignore[no-untyped-def]
        entry = {"actions": actions, "rewards": rewards, "terminated": terminated, "ended": ended}
        entry |= {"obs": obs["observation"], "rl2s": rl2s, "time_idxs": time_idxs, **(extras or {})}
        self.added.append({key: value.copy() for key, value in entry.items()})
        self._note("add")

    def flush_partial(self) -> None:
        self._note("flush_partial")

    def close(self) -> None:
        self._note("close")

    def state_dict(self) -> dict[str, Any]:
        return {"count": len(self.added)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


# ---- steps ----


def test_a_sink_gets_the_original_step_and_the_policy_resets_after_an_end() -> None:
    """TinyAgent checks that its hidden state is reset exactly where an episode begins."""
    sink = RecordingSink()
    make_collector([3, 5], sinks=[sink]).collect(4)
    for step in sink.added:
        np.testing.assert_array_equal(step["rl2s"][:, 0], step["rewards"])
        np.testing.assert_array_equal(step["rl2s"][:, 1:], np.eye(3, dtype=np.float32)[step["actions"]])
    at_end = sink.added[2]  # env 0 ends with its third step
    np.testing.assert_array_equal(at_end["ended"], [True, False])
    np.testing.assert_array_equal(at_end["obs"][:, 1], [3, 3])
    np.testing.assert_array_equal(at_end["time_idxs"], [[3], [3]])
    rows, obs, rl2s, time_idxs = sink.begun[1]
    np.testing.assert_array_equal(rows, [0])
    assert obs[0, 1] == time_idxs[0] == 0
    assert not rl2s[0].any()
    assert rl2s[1].any()
    np.testing.assert_array_equal(sink.added[3]["time_idxs"], [[1], [4]])


def test_the_stored_action_is_the_one_after_exploration() -> None:
    sink = RecordingSink()
    collector = make_collector([50, 50], sinks=[sink])
    noise = EpsilonGreedy(spaces.Discrete(3), 2, 0, eps_start=1.0, eps_end=1.0, randomize_eps=False)
    collector.groups[0].exploration, collector.sample = noise, False
    collector.collect(30)
    assert {int(a) for step in sink.added for a in step["actions"]} == {0, 1, 2}


def test_one_group_steps_while_the_policy_acts_for_the_other() -> None:
    calls: list[str] = []
    assert make_collector([9, 9], [9], calls=calls).collect(2) == 6
    assert calls[:4] == ["a starts", "b starts", "a is awaited", "a starts"]
    assert calls[4:] == ["b is awaited", "b starts", "a is awaited", "b is awaited"]


GROUPS = pytest.mark.parametrize("lengths", [[[3, 5, 4]], [[3, 5], [4]]], ids=["one group", "two groups"])


@GROUPS
def test_collection_can_be_split_anywhere(tmp_path: Path, lengths: list[list[int]]) -> None:
    for name, parts in (("whole", [12]), ("parts", [5, 0, 7])):
        collector = make_collector(*lengths, folder=tmp_path / name)
        collector.restart(seed=3)
        torch.manual_seed(1)
        assert sum(collector.collect(part) for part in parts) == 36
        collector.close()
    whole, parts_ = trajectories(tmp_path / "whole"), trajectories(tmp_path / "parts")
    assert sorted(map(len, whole)) == [2, 3, 3, 3, 3, 4, 4, 4, 5, 5]
    for one, other in zip(whole, parts_, strict=True):
        np.testing.assert_array_equal(one.obs["observation"], other.obs["observation"])
        np.testing.assert_array_equal(one.actions, other.actions)


@GROUPS
def test_metrics_cover_all_envs_and_every_env_counts_equally_many_episodes(lengths: list[list[int]]) -> None:
    collector = make_collector(*lengths)
    collector.collect(12)
    assert lengths_of(collector) == [3] * 4 + [4] * 3 + [5] * 2
    collector.histories.clear()
    assert collector.histories.summary("") == {}
    collector.restart(seed=0)
    collector.collect(1000, episodes=7)
    assert lengths_of(collector) == [3, 3, 3, 4, 4, 5, 5]
    assert sum(map(len, collector.histories.specials.values["success"].values())) == 7


@pytest.mark.parametrize("truncates", [False, True])
def test_files_distinguish_truncation_from_termination(tmp_path: Path, truncates: bool) -> None:
    collector = make_collector([3, 3], truncates=truncates, folder=tmp_path)
    collector.collect(6)
    collector.close()
    trajs = trajectories(tmp_path)
    assert len(trajs) == 4
    for traj in trajs:
        np.testing.assert_array_equal(traj.obs["observation"][:, 1], [0, 1, 2, 3])  # 3 is the true last one
        np.testing.assert_array_equal(traj.dones[:, 0], [False, False, not truncates])
        np.testing.assert_array_equal(traj.time_idxs[:, 0], [0, 1, 2, 3])
        assert len(np.unique(traj.obs["observation"][:, 0])) == 1  # nothing of the next episode


class NextStepEnvs:
    """Two envs; the second has episodes of three steps and resets one call late (next-step autoreset)."""

    num_envs = 2
    single_observation_space = spaces.Dict(observation=spaces.Box(-np.inf, np.inf, (2,), np.float32))
    single_action_space = spaces.Discrete(3)

    def reset(self, *, seed: Any) -> Any:
        self.time, self.episode, self.env_names = np.array([0, 0]), 0, ["steady", "late0"]
        return self._obs(), {}

    def _obs(self) -> dict[str, np.ndarray]:
        rows = np.array([[0, self.time[0]], [self.episode, self.time[1]]], np.float32)
        return {"observation": rows}

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


def test_rows_without_a_timestep_are_not_stored_counted_or_remembered(tmp_path: Path) -> None:
    envs: Any = NextStepEnvs()
    obs_space = spaces.Dict(observation=envs.single_observation_space["observation"])
    torch.manual_seed(0)
    agent: Any = TinyAgent(obs_space, envs.single_action_space, None, None, 8)
    noise = EpsilonGreedy(envs.single_action_space, 2, 0)
    collector = Collector([RolloutGroup(envs, noise, [TrajectoryWriter(tmp_path, 2)])], agent, CPU, True)
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


# ---- several sinks, and checkpoints ----


def test_a_sink_that_raises_does_not_affect_the_others() -> None:
    first, second, third = RecordingSink("add", "close"), RecordingSink("add"), RecordingSink()
    collector = make_collector([4, 4], sinks=[first, second, third])
    collector.set_policy_version(5)
    with pytest.raises(OSError, match=f"add failed in sink {id(first)}"):
        collector.collect(3)
    with pytest.raises(OSError, match="close failed"):
        collector.close()
    assert first.calls == second.calls == third.calls
    assert first.calls == ["flush_partial", "begin", "add", "flush_partial", "close"]
    assert [sink.policy_version for sink in (first, second, third)] == [5, 5, 5]


@GROUPS
def test_states_are_restored_and_foreign_ones_are_refused(tmp_path: Path, lengths: list[list[int]]) -> None:
    def make(*parts: list[int], num_sinks: int = 2) -> Collector:
        return make_collector(*parts, sinks=[RecordingSink() for _ in range(num_sinks)], folder=tmp_path)

    collector = make(*lengths)
    collector.collect(3)
    collector.wait()
    state, other = collector.state_dict(), make(*lengths)
    assert state["rollout"] is None  # these envs do not offer their state
    assert not other.load_state_dict(state)
    assert other.groups[0].exploration.state_dict() == state["exploration"][0]  # type: ignore[union-attr]
    assert [sink.count for sink in other.groups[0].sinks[:2]] == [3, 3]  # type: ignore[attr-defined]
    other.flush()  # running pieces are stored
    assert sorted(map(len, trajectories(tmp_path))) == [3, 3, 3]
    with pytest.raises(
        ValueError, match=r"state has 3 sinks for collected data, but this run has 2.*Fix: resume with"
    ):
        make(*lengths, num_sinks=1).load_state_dict(state)


@pytest.mark.parametrize("now", [[[5], [3, 4]], [[3, 5, 4, 6]], [[3], [5]], [[4]]], ids=str)
@GROUPS
def test_with_other_envs_schedules_continue_and_running_pieces_are_stored_once(
    tmp_path: Path, lengths: list[list[int]], now: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    before = make_collector(*lengths, folder=tmp_path)
    before.collect(4)
    before.wait()
    after = make_collector(*now, folder=tmp_path)
    drawn = [group.exploration.state_dict() for group in after.groups]  # type: ignore[union-attr]
    assert not after.load_state_dict(before.state_dict())
    for group, own in zip(after.groups, drawn, strict=True):
        assert group.exploration.state_dict() == {**own, "num_calls": 4}  # type: ignore[union-attr]
    after.restart(seed=0)
    after.collect(4)
    after.close()
    assert caplog.text.count("Training begins new episodes") == 1
    assert sum(map(len, trajectories(tmp_path))) == 4 * 3 + 4 * after.num_envs
    ids = [path.name.split("_")[1] for path in tmp_path.glob("*.npz")]
    assert len(set(ids)) == len(ids)
    required = make_collector(*now)
    required.save_env_state = True
    with pytest.raises(ValueError, match=r"3 environments.*Fix: resume with the TrainingEnvs.overlap"):
        required.load_state_dict(before.state_dict())
