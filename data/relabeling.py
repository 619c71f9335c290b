"""Changing whole stored trajectories before a window is cut out of them."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod

import gin
import numpy as np

from .extras import without
from .trajectory import Trajectory

# Extras that say something else, or nothing, once goals or rewards are others than those that the policy saw.
STALE_WHEN_RELABELED = ("log_probs", "values", "raw_rewards")


class Relabeler(ABC):
    """Turns one whole stored trajectory into another one to learn from, each time that it is sampled.

    To make your own, implement `relabel`, decorate the class with `@gin.configurable` and name it in gin:
    `DiskTrajDataset.relabeler = @MyRelabeler()`. What is on disk never changes.
    """

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
