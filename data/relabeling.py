"""Changing whole stored trajectories before a window is cut out of them."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable

import gin
import numpy as np

from .extras import without
from .trajectory import Array, Trajectory

# Extras that say something else, or nothing, once goals or rewards are others than those that the policy saw.
STALE_WHEN_RELABELED = ("log_probs", "values", "raw_rewards")


class Relabeler(ABC):
    """Turns one whole stored trajectory into another one to learn from, each time that it is sampled.

    To make your own, implement `relabel`, decorate the class with `@gin.configurable` and name it in gin:
    `DiskTrajDataset.relabeler = @MyRelabeler()`. What is on disk never changes.

    Attributes:
        shape_rewards: what runs with a reward shaper store: (rewards (T,) float32, epoch) -> (T,) float32.
        epoch: the running one.
    """

    shape_rewards: Callable[[Array, int], Array] | None = None
    epoch: int = 0

    @abstractmethod
    def relabel(self, traj: Trajectory, rng: np.random.Generator) -> Trajectory:
        """Return the trajectory to take a window from.

        Args:
            traj: everything that one file holds. Its arrays may be read-only views of that file and are
                shared with others: never write to them, build new ones.
            rng: the only source of randomness.

        Returns: `traj` itself or another one of the same layout (keys, shapes per timestep, dtypes), which
            may be shorter and may share arrays with `traj`.
        """

    def stored_rewards(self, traj: Trajectory, rewards: Array) -> Array:
        """What a relabelled `traj` has as `rews` (T, 1) if the environment had paid `rewards` (T, 1).

        The same, unless the run shapes rewards: then they are shaped as in the running epoch. What the
        environment paid is in `rl2s`, which hold what the policy saw.

        Raises: ValueError for a trajectory with shaped rewards in a run that shapes none.
        """
        if "raw_rewards" not in traj.extras:
            return rewards
        if self.shape_rewards is None:
            raise ValueError(
                f"The rewards of a trajectory of environment {traj.env_name!r} were shaped when it was "
                f"collected, but this run has no shaper for those that {type(self).__name__} gives it. Fix: "
                "set RewardShaping.shaper as when it was collected, or leave the relabeler out."
            )
        return self.shape_rewards(rewards[:, 0], self.epoch)[:, None]

    def apply(self, traj: Trajectory, rng: np.random.Generator) -> Trajectory:
        """Relabel, and drop the extras that are not true of another trajectory; datasets call this."""
        relabeled = self.relabel(traj, rng)
        if relabeled is traj or not relabeled.extras:
            return relabeled
        return dataclasses.replace(relabeled, extras=without(relabeled.extras, STALE_WHEN_RELABELED))


@gin.configurable
class NoOpRelabeler(Relabeler):
    """Leaves every trajectory as it is."""

    def relabel(self, traj: Trajectory, rng: np.random.Generator) -> Trajectory:
        """Return `traj` itself."""
        return traj
