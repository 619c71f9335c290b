"""Relabellers, which change whole stored trajectories before windows are cut out; mainly for hindsight."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import gin
import numpy as np
import numpy.typing as npt

from .errors import check_choice, check_number
from .trajectory import Array, Trajectory

# These extras become wrong or meaningless when goals or rewards differ from those that the policy saw.
STALE_WHEN_RELABELED = ("log_probs", "values", "raw_rewards")
STRATEGIES = ("final", "future", "all", "some", "none")  # choices of HindsightRelabeler


class Relabeler(ABC):
    """Turns one whole stored trajectory into another one to learn from, each time it is sampled.

    To make your own, implement `relabel`, decorate the class with `@gin.configurable` and bind it in gin:
    `DiskTrajDataset.relabeler = @MyRelabeler()`. The files on disk never change.

    Attributes:
        shape_rewards: the reward shaping of the run: (rewards (T,) float32, epoch) -> (T,) float32.
        epoch: the current epoch.
    """

    shape_rewards: Callable[[Array, int], Array] | None = None
    epoch: int = 0

    @abstractmethod
    def relabel(self, traj: Trajectory, rng: np.random.Generator) -> Trajectory:
        """Return the trajectory that the window is taken from.

        Args:
            traj: the whole content of one file. Its arrays may be read-only, shared views of that file: build
                new arrays instead of writing to them.
            rng: the only source of randomness.

        Returns: `traj` or another trajectory of the same layout (keys, shapes per timestep, dtypes), which
            may be shorter and may share arrays with `traj`.
        """

    def stored_rewards(self, traj: Trajectory, rewards: Array) -> Array:
        """The stored `rews` (T, 1) of a relabelled `traj` for which an environment pays `rewards` (T, 1).

        They are equal, unless the run shapes rewards: then the shaping of the current epoch is applied.
        `rl2s` hold the rewards that the environment paid, since the policy saw those.

        Raises: ValueError if the trajectory has shaped rewards, but the run does not shape any.
        """
        if "raw_rewards" not in traj.extras:
            return rewards
        if self.shape_rewards is None:
            raise ValueError(
                f"The rewards of a trajectory of environment {traj.env_name!r} were shaped when it was "
                f"collected, but this run has no shaper for the rewards that {type(self).__name__} assigns. "
                "Fix: set RewardShaping.shaper to the function used in collection, or leave out the "
                "relabeler."
            )
        return self.shape_rewards(rewards[:, 0], self.epoch)[:, None]

    def _check_result(self, relabeled: Any) -> None:
        """Raise an error that names this class if its result is not a trajectory to learn from."""
        name, kind = f"{type(self).__name__}.relabel", type(relabeled).__name__
        if not isinstance(relabeled, Trajectory):
            raise TypeError(f"{name} returned a {kind}, but must return a Trajectory. Fix: correct it.")
        expected, found = (len(relabeled), 1), relabeled.rews.shape
        if found != expected or not np.isfinite(relabeled.rews).all():
            raise ValueError(
                f"{name} returned rewards of shape {found}, or values that are not finite, but they must be "
                f"finite and of shape {expected}. Fix: correct it."
            )

    def apply(self, traj: Trajectory, rng: np.random.Generator) -> Trajectory:
        """Relabel, and drop extras that the new trajectory invalidates; datasets call this."""
        relabeled = self.relabel(traj, rng)
        if relabeled is traj:
            return traj
        self._check_result(relabeled)
        if not relabeled.extras:
            return relabeled
        extras = {name: value for name, value in relabeled.extras.items() if name not in STALE_WHEN_RELABELED}
        return dataclasses.replace(relabeled, extras=extras)


@gin.configurable
class NoOpRelabeler(Relabeler):
    """Leaves every trajectory as it is."""

    def relabel(self, traj: Trajectory, rng: np.random.Generator) -> Trajectory:
        """Return `traj` itself."""
        return traj


@gin.configurable
class HindsightRelabeler(Relabeler):
    """Learn from a failure as if the positions that were reached had been the goals.

    Replaces missed goals by achieved positions, and updates everything that depends on the goals.

    For tasks with a sequence of k goals (k = 1 is a single goal) that count in order, at most one per env
    step and none at reset. If the trajectory reached n of them, `strategy` decides about the k - n others. At
    most as many are replaced as there are timesteps to take positions from:
        "none": keep them.
        "some": h of them, h uniform in {0, ..., k - n}, are replaced by positions of timesteps drawn
            uniformly from the whole trajectory.
        "all": like "some" with h = k - n.
        "future": all of them, by positions of timesteps drawn uniformly after the n-th goal was reached.
        "final": like "future", but the last one is the position of the last timestep.
    Goals that were reached are kept, the sequence is in the order of reaching, and goals that are still
    missing (with "some") come last. Observed goals, rewards (also in rl2s) and dones are then recomputed, and
    the trajectory is cut where the last goal is reached. It equals what the environment would have produced
    with these goals from the start; the actions and the files on disk do not change.

    Trajectories must begin at reset, so files must hold whole episodes: set `Experiment.traj_save_len` to at
    least the length of an episode (the default does this) and
    `Experiment.stagger_traj_file_lengths = False`.

    The defaults fit `MazeRunner`. For other environments, derive from this class and override `goals_of`,
    `is_reached`, `show_goals` or `edit_rewards`; each takes a few lines.

    Args:
        strategy: which missed goals are replaced: "none", "some", "all", "future" or "final".
        achieved_key: observation (D,), the position that is compared with goals.
        goals_key: observation (k, D), or (D,) for one goal; at reset it shows all goals in their order.
        tolerance: maximum Euclidean distance at which a position counts as the goal.
        goal_reward: reward that the environment pays for one goal.
        share: probability of relabelling a trajectory.

    Raises:
        ValueError: For an unknown strategy and impossible numbers; by `relabel`, if a trajectory does not fit
            the settings or does not begin at reset.

    Source: Andrychowicz et al. 2017, arXiv:1707.01495, section 3.3, for sequences of goals.
    """

    def __init__(
        self,
        *,
        strategy: str = "some",
        achieved_key: str = "achieved",
        goals_key: str = "goals",
        tolerance: float = 1e-3,
        goal_reward: float = 1.0,
        share: float = 1.0,
    ) -> None:
        check_choice("HindsightRelabeler.strategy", strategy, STRATEGIES)
        check_number("HindsightRelabeler.tolerance", tolerance, lowest=0)
        check_number("HindsightRelabeler.share", share, lowest=0, highest=1)
        self.strategy, self.share = strategy, share
        self.achieved_key, self.goals_key = achieved_key, goals_key
        self.tolerance, self.goal_reward = tolerance, goal_reward

    # ---- methods that depend on the environment ----

    def goals_of(self, traj: Trajectory) -> Array:
        """All goals of a trajectory that begins at reset, in order, (k, D)."""
        first = traj.obs[self.goals_key][:1]
        return first.reshape(-1, first.shape[-1])

    def is_reached(self, achieved: Array, goal: Array) -> npt.NDArray[np.bool_]:
        """Compare positions achieved (T, D) with a goal (D,); returns (T,) bool, True where it is reached."""
        offset = achieved - goal
        return np.asarray(np.einsum("td,td->t", offset, offset) <= self.tolerance**2)

    def show_goals(self, goals: Array, num_reached: npt.NDArray[np.int64]) -> Array:
        """The observed goals, given all goals (k, D) and how many are reached at each timestep, (T+1,).

        Returns: (T+1, k, D): the goals still to be reached, the next one first, then rows of -1.
        """
        padded = np.concatenate([goals, np.full_like(goals, -1)])
        rows = num_reached[:, None] + np.arange(len(goals))
        shown: Array = padded[rows]
        return shown

    def edit_rewards(
        self, traj: Trajectory, was_reached: npt.NDArray[np.bool_], is_reached: npt.NDArray[np.bool_]
    ) -> Array:
        """The rewards with new goals, (T, 1) in the dtype of `traj.rews`.

        Args:
            traj: the trajectory, cut to its new length T, with the rewards that were paid.
            was_reached: (T,) bool, True for steps that reached the next of the old goals.
            is_reached: (T,) bool, the same for the new goals.

        Returns: by default, `goal_reward` moves from the former steps to the latter; other rewards stay.
        """
        rews = traj.rews.copy()
        rews[was_reached & ~is_reached] -= self.goal_reward
        rews[is_reached & ~was_reached] += self.goal_reward
        return rews

    # ---- methods for all environments ----

    def relabel(self, traj: Trajectory, rng: np.random.Generator) -> Trajectory:
        """Return the trajectory with other goals, or itself if there is nothing to replace."""
        if self.strategy == "none" or (self.share < 1 and rng.random() >= self.share):
            return traj
        self._check(traj)
        goals, achieved = self.goals_of(traj), traj.obs[self.achieved_key]
        reach_times = self._reach_times(achieved, goals)
        self._check_shown(traj, goals, reach_times)
        new_goals = self._draw_goals(achieved, goals, reach_times, rng)
        return traj if new_goals is None else self.with_goals(traj, new_goals)

    def with_goals(self, traj: Trajectory, goals: Array) -> Trajectory:
        """Return the trajectory that the same actions give under other goals (k, D).

        If it had reached all its goals and now does not, it looks as if a time limit had cut it.
        """
        achieved, old_goals = traj.obs[self.achieved_key], self.goals_of(traj)
        old_times, new_times = self._reach_times(achieved, old_goals), self._reach_times(achieved, goals)
        was_complete, is_complete = len(old_times) == len(old_goals), len(new_times) == len(goals)
        num_steps = new_times[-1] if is_complete else len(traj)
        cut = traj.slice(0, num_steps)
        was_reached, is_reached = _mark(old_times, num_steps), _mark(new_times, num_steps)
        paid = dataclasses.replace(cut, rews=cut.extras.get("raw_rewards", cut.rews))  # before shaping
        rews = self.edit_rewards(paid, was_reached, is_reached)
        rl2s, dones = cut.rl2s.copy(), cut.dones.copy()
        rl2s[1:, :1] = rews
        rews = self.stored_rewards(cut, rews)
        if was_complete or is_complete:
            dones[-1] = is_complete
        shown = self.show_goals(goals, _count(is_reached)).reshape(cut.obs[self.goals_key].shape)
        obs = {**cut.obs, self.goals_key: shown.astype(traj.obs[self.goals_key].dtype, copy=False)}
        return dataclasses.replace(cut, obs=obs, rl2s=rl2s, rews=rews, dones=dones)

    def _reach_times(self, achieved: Array, goals: Array) -> list[int]:
        """Timesteps at which the goals are reached in order; shorter than goals if some are never reached.

        As in the environment, the first possible time counts for each goal.
        """
        times: list[int] = []
        now = 0
        for goal in goals:
            hits = np.flatnonzero(self.is_reached(achieved[now + 1 :], goal))
            if not len(hits):
                break
            now += 1 + int(hits[0])
            times.append(now)
        return times

    def _draw_goals(
        self, achieved: Array, goals: Array, reach_times: list[int], rng: np.random.Generator
    ) -> Array | None:
        """The new sequence (k, D); None to keep the old one."""
        num_steps, num_missing = len(achieved) - 1, len(goals) - len(reach_times)
        if self.strategy == "some":
            num_missing = int(rng.integers(num_missing, endpoint=True))
        if self.strategy in ("some", "all"):
            candidates = 1 + np.flatnonzero(~_mark(reach_times, num_steps))
        else:
            candidates = np.arange((reach_times[-1] if reach_times else 0) + 1, num_steps + 1)
        num_new = min(num_missing, len(candidates))
        if not num_new:
            return None
        if self.strategy == "final":
            times = [*rng.permutation(candidates[:-1])[: num_new - 1].tolist(), num_steps]
        else:
            times = rng.permutation(candidates)[:num_new].tolist()
        taken = achieved[sorted(reach_times + times)]
        still_missing = goals[len(reach_times) : len(goals) - num_new]
        return np.concatenate([taken, still_missing]).astype(goals.dtype, copy=False)

    def _check(self, traj: Trajectory) -> None:
        """Raise ValueError if the trajectory lacks the observations or begins in mid-episode."""
        missing = [key for key in (self.achieved_key, self.goals_key) if key not in traj.obs]
        if missing:
            raise ValueError(
                f"HindsightRelabeler looks for the observations {missing}, but environment "
                f"{traj.env_name!r} has {sorted(traj.obs)}. Fix: set HindsightRelabeler.achieved_key and "
                "HindsightRelabeler.goals_key, or leave out the relabeler."
            )
        start = int(traj.time_idxs[0, 0])
        if start:
            raise ValueError(
                f"A trajectory of environment {traj.env_name!r} begins at time index {start}, but hindsight "
                "needs whole episodes (from index 0), because the goals reached before are unknown. Fix: "
                "set Experiment.stagger_traj_file_lengths = False, remove Experiment.traj_save_len (or "
                "raise it to the length of an episode), and collect again under another "
                "Experiment.run_name."
            )

    def _check_shown(self, traj: Trajectory, goals: Array, reach_times: list[int]) -> None:
        """Raise ValueError if the observed goals contradict these settings."""
        shown = traj.obs[self.goals_key]
        expected = self.show_goals(goals, _count(_mark(reach_times, len(traj)))).reshape(shown.shape)
        if not np.array_equal(shown, expected):
            timestep = int(np.flatnonzero((shown != expected).reshape(len(shown), -1).any(axis=1))[0])
            raise ValueError(
                f"At timestep {timestep} of a trajectory of environment {traj.env_name!r} the observation "
                f"{self.goals_key!r} is {shown[timestep].tolist()}, but with tolerance {self.tolerance} "
                f"HindsightRelabeler expects {expected[timestep].tolist()}, so relabelled trajectories would "
                "be wrong. Fix: set HindsightRelabeler.tolerance to that of the environment, or derive a "
                "class and override goals_of, is_reached or show_goals."
            )


def _mark(times: list[int], num_steps: int) -> npt.NDArray[np.bool_]:
    """(num_steps,) bool, True for the steps that arrive at one of `times`; later times are left out."""
    marks = np.zeros(num_steps + 1, np.bool_)
    marks[[time for time in times if time <= num_steps]] = True
    return marks[1:]


def _count(marks: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Number (T+1,) of marked steps, of (T,), that arrive at or before each timestep."""
    counts = np.zeros(len(marks) + 1, np.int64)
    np.cumsum(marks, out=counts[1:])
    return counts
