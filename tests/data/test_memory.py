from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from loxodon.data import MemoryTrajDataset, Sampler, Trajectory, split_episodes

MakeDataset = Callable[..., MemoryTrajDataset]
MakeTraj = Callable[..., Trajectory]
Arrays = dict[str, np.ndarray]


def test_the_oldest_trajectories_are_dropped_first(make_dataset: MakeDataset, make_traj: MakeTraj) -> None:
    dataset = make_dataset(MemoryTrajDataset(max_timesteps=10, min_trajs=2, sampler=Sampler("timestep")))
    assert not dataset.ready_for_training
    for i in range(3):
        dataset.add(make_traj(4, first=1000 * i))
    assert dataset.ready_for_training
    assert dataset.on_end_of_collection() == {"total_trajs": 2, "total_timesteps": 8}
    windows = dataset.sample_windows(100, np.random.default_rng(0))
    assert {window.obs["position"][0, 0] // 1000 for window in windows} == {1, 2}
    dataset.add(make_traj(50))  # a single trajectory may be longer
    assert (dataset.num_trajs, dataset.num_timesteps) == (1, 50)
    dataset.delete()
    with pytest.raises(ValueError, match=r"holds no trajectories.*Fix:"):
        dataset.sample_random_trajectory(np.random.default_rng(0))


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ({"min_trajs": 0}, "min_trajs is 0"),
        ({"trajs": (3, 5)}, r"'other' cannot join the 1 others.*5 columns, expected 3"),
    ],
)
def test_wrong_arguments_are_refused(make_traj: MakeTraj, argument: dict[str, Any], text: str) -> None:
    widths = argument.get("trajs", (3,))
    trajs = [make_traj(2, num_actions=n, env_name="other") for n in widths]
    with pytest.raises(ValueError, match=rf"{text}.*Fix:"):
        MemoryTrajDataset(**{**argument, "trajs": trajs})


# --- flat arrays ---------------------------------------------------------------------------------------


def flat_steps() -> Arrays:
    """Three episodes of 3 (terminated), 2 (truncated) and 2 steps (end of the data); step i observes i."""
    return {
        "obs": np.arange(7, dtype=np.float32)[:, None],
        "actions": np.array([0, 1, 2, 0, 1, 2, 0]),
        "rews": np.arange(1, 8) / 10,
        "terminated": np.array([0, 0, 1, 0, 0, 0, 0]),
        "truncated": np.array([0, 0, 0, 0, 1, 0, 0]),
    }


def test_flat_arrays_with_next_observations_keep_every_step() -> None:
    steps = flat_steps()
    trajs = split_episodes(**steps, next_obs=steps["obs"] + 0.5)
    assert [len(traj) for traj in trajs] == [3, 2, 2]
    assert [traj.obs["observation"][:, 0].tolist() for traj in trajs] == [
        [0, 1, 2, 2.5],
        [3, 4, 4.5],
        [5, 6, 6.5],
    ]
    assert [traj.dones[:, 0].tolist() for traj in trajs] == [[False, False, True], [False] * 2, [False] * 2]
    second = trajs[1]
    assert second.time_idxs[:, 0].tolist() == [0, 1, 2]
    np.testing.assert_allclose(second.rews[:, 0], [0.4, 0.5])
    np.testing.assert_allclose(second.rl2s, [[0, 0, 0, 0], [0.4, 1, 0, 0], [0.5, 0, 1, 0]])
    assert second.actions.tolist() == [[1, 0, 0], [0, 1, 0]]


def test_without_next_observations_the_steps_of_unknown_outcome_are_lost() -> None:
    trajs = split_episodes(**flat_steps())
    assert [traj.obs["observation"][:, 0].tolist() for traj in trajs] == [[0, 1, 2, 2], [3, 4], [5, 6]]
    assert [traj.dones[:, 0].tolist() for traj in trajs] == [[False, False, True], [False], [False]]
    assert [traj.rews.dtype for traj in trajs] == [np.float32] * 3
    begin = {name: array[:4] for name, array in flat_steps().items()}
    assert [len(traj) for traj in split_episodes(**begin)] == [3]  # one truncated step is not an episode


def test_continuous_actions_and_several_observations() -> None:
    steps: dict[str, Any] = {**flat_steps(), "actions": np.linspace(-1, 1, 14).reshape(7, 2)}
    steps["obs"] = {"a": steps["obs"], "b": np.zeros((7, 2, 2), np.uint8)}
    first, *_ = split_episodes(**steps, env_name="hopper")
    assert first.env_name == "hopper"
    assert first.obs["b"].dtype == np.uint8
    np.testing.assert_array_equal(first.rl2s[1:, 1:], first.actions)
    assert first.actions.dtype == np.float32
    factors = np.array([[0, 2], [1, 1], [1, 0], *[[0, 0]] * 4])
    for num_actions in ([2, 3], np.array([2, 3])):
        first, *_ = split_episodes(**{**steps, "actions": factors}, num_actions=num_actions)
        assert first.nvec == (2, 3)
    with pytest.raises(ValueError, match=r"in 2 columns.*Fix: pass num_actions=\(2, 3\)"):
        split_episodes(**{**steps, "actions": factors})
    one_hot = np.eye(3, dtype=np.int64)[[0, 1, 1, 0, 0, 0, 0]]  # the last action is never taken
    chosen, *_ = split_episodes(**{**steps, "actions": one_hot})
    assert chosen.actions.tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 0]]
    pressed, *_ = split_episodes(**{**steps, "actions": np.arange(7) % 2 == 1})
    assert pressed.actions.tolist() == [[1, 0], [0, 1], [1, 0]]
    assert first.actions.tolist() == [[1, 0, 0, 0, 1], [0, 1, 0, 1, 0], [0, 1, 1, 0, 0]]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rews": np.zeros(6)}, r"rews 6.*one row per step"),
        ({"actions": np.full((7, 2), -5.0)}, r"range from -5.0 to -5.0.*\[-1, 1\]"),
        ({"num_actions": 2}, r"range from 0 to 2.*has 2 columns for actions"),
        ({"next_obs": {"x": np.zeros((7, 1))}}, r"next_obs has the keys \['x'\]"),
    ],
)
def test_contradicting_arrays_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=rf"{text}.*Fix:"):
        split_episodes(**{**flat_steps(), **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rews": [0.0, np.nan, 0, 0, 0, 0, 0]}, r"rows 0 to .* cannot be trained on: rl2s .* is nan.*Fix:"),
        (
            {"rews": [0.0, 1e300, 0, 0, 0, 0, 0]},
            r"rews is float64 and holds 1e\+300.*float32.*Fix:",
        ),
        ({"terminated": [0.0, 0.5, 0, 0, 0, 0, 1]}, r"terminated is float64 and holds 0.5.*bool cannot hold"),
    ],
)
def test_flat_arrays_whose_values_would_change_or_are_not_finite_are_refused(
    changes: dict[str, Any], text: str
) -> None:
    steps = {**flat_steps(), **{name: np.array(value) for name, value in changes.items()}}
    with pytest.raises(ValueError, match=text):
        split_episodes(**steps)


def test_next_observations_are_not_cast_to_a_narrower_dtype() -> None:
    obs = np.zeros((3, 2), np.uint8)
    ends = np.array([False, False, True])
    steps = (np.zeros(3, np.int64), np.zeros(3), ends, ~ends & False)
    with pytest.raises(ValueError, match=r"next_obs\['observation'\] is float64 and holds 0.25.*uint8"):
        split_episodes(obs, *steps, next_obs=np.full((3, 2), 0.25))


def test_trajectories_in_memory_must_have_values_that_the_run_accepts(
    make_dataset: MakeDataset, make_traj: MakeTraj
) -> None:
    traj = make_traj(3)
    spoilt = dataclasses.replace(traj, rews=np.full_like(traj.rews, np.inf))
    with pytest.raises(ValueError, match=r"trained on: rews \(float32\) is inf at timestep 0.*Fix:"):
        MemoryTrajDataset([spoilt])
    dataset = make_dataset(MemoryTrajDataset([traj]))
    with pytest.raises(ValueError, match=r"'image' \(uint8\) is 7 at timestep 0, but .* uint8 from 0 to 3"):
        dataset.expect(dataclasses.replace(traj.layout, num_values={"image": 4}))
