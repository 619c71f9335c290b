"""A dataset in this process's memory, for offline arrays, small runs and tests."""

from __future__ import annotations

from collections.abc import Sequence

import gin
import numpy as np

from .dataset import RLDataset
from .errors import check_number
from .relabeling import Relabeler
from .sampling import Sampler
from .trajectory import Layout, Trajectory
from .values import find_bad_value


@gin.configurable(denylist=["trajs"])
class MemoryTrajDataset(RLDataset):
    """Holds trajectories in RAM. The stored arrays never change: windows are views that pad_batch copies.

    Each sampling process has the trajectories that existed when it started. Loader workers do not see later
    additions, so add all trajectories first or use `dloader_workers = 0`.

    Args:
        trajs: initial trajectories.
        sampler: draws trajectories and windows; None for the sampler of RLDataset.
        max_timesteps: maximum number of transitions; the oldest trajectories are dropped. None keeps all.
        min_trajs: number of trajectories at which training starts.
        relabeler: changes the whole trajectory each time, before a window is cut out of it.

    Raises:
        ValueError: If an argument is not allowed, or the trajectories differ in layout.
    """

    def __init__(
        self,
        trajs: Sequence[Trajectory] = (),
        sampler: Sampler | None = None,
        max_timesteps: int | None = None,
        min_trajs: int = 1,
        relabeler: Relabeler | None = None,
    ) -> None:
        super().__init__(*[sampler] if sampler else [])  # gin gives RLDataset.sampler if nothing is passed
        check_number("MemoryTrajDataset.max_timesteps", max_timesteps, lowest=1, optional=True)
        check_number("MemoryTrajDataset.min_trajs", min_trajs, lowest=1)
        self.max_timesteps, self.min_trajs, self.relabeler = max_timesteps, min_trajs, relabeler
        self._trajs: list[Trajectory] = []
        # Numbers in the order of adding, which identify trajectories in the sampler.
        self._ids: list[str] = []
        self._num_timesteps = self._num_added = 0
        self._has_changed = True  # True if trajectories changed since the sampler received them
        for traj in trajs:
            self.add(traj)

    def add(self, traj: Trajectory) -> None:
        """Add one trajectory, and drop the oldest while there are more than max_timesteps.

        Its arrays are kept, not copied: do not write to them afterwards.

        Raises:
            ValueError: If its layout differs from that of the others, or a value cannot be trained on.
        """
        self._check_values(traj)
        if self._trajs and (problem := self._trajs[0].layout.describe_mismatch(traj.layout)):
            raise ValueError(
                f"This trajectory of environment {traj.env_name!r} cannot join the "
                f"{len(self._trajs)} others, which have [{self._trajs[0].layout}]: {problem}. "
                "Fix: use one MemoryTrajDataset per observation and action space."
            )
        self._trajs.append(traj)
        self._ids.append(str(self._num_added))
        self._num_added += 1
        self._num_timesteps += len(traj)
        self._has_changed = True
        # A single trajectory may exceed the limit; it stays until the next one is added.
        while self._num_timesteps > (self.max_timesteps or np.inf) and len(self._trajs) > 1:
            self._num_timesteps -= len(self._trajs.pop(0))
            self._ids.pop(0)

    def expect(self, layout: Layout) -> None:
        """Receive the layout of this run's trajectories. Raises ValueError if values do not fit."""
        super().expect(layout)
        for traj in self._trajs:
            self._check_values(traj)

    def _check_values(self, traj: Trajectory) -> None:
        layout = self.layout
        if layout is not None and layout.describe_mismatch(traj.layout):
            layout = None  # making a batch of it raises an error with the reason
        if problem := find_bad_value(traj, layout):
            raise ValueError(
                f"A trajectory of environment {traj.env_name!r} with {len(traj)} transitions cannot be "
                f"trained on: {problem}. Fix: correct its values, or leave it out."
            )

    @property
    def ready_for_training(self) -> bool:
        return len(self._trajs) >= self.min_trajs

    @property
    def num_trajs(self) -> int:
        """Number of stored trajectories."""
        return len(self._trajs)

    @property
    def num_timesteps(self) -> int:
        """Number of stored transitions."""
        return self._num_timesteps

    def sample_random_trajectory(self, rng: np.random.Generator) -> Trajectory:
        return self.sample_windows(1, rng)[0]

    def sample_windows(self, count: int, rng: np.random.Generator) -> list[Trajectory]:
        """Draw windows; raises ValueError if the dataset is empty."""
        if not self._trajs:
            raise ValueError(
                "MemoryTrajDataset holds no trajectories to sample from. Fix: pass some when it is made, or "
                "add() them first."
            )
        if self._has_changed:
            values = [self.sampler.value(traj) for traj in self._trajs] if self.sampler.needs_values else None
            self.sampler.set_trajs([*self._ids], values)
            self._has_changed = False
        return [
            self.window_of(self._trajs[position], self._ids[position], fraction, rng)
            for position, fraction in self.sampler.draw(count, rng)
        ]

    def delete(self) -> None:
        self._trajs, self._ids, self._num_timesteps, self._has_changed = [], [], 0, True

    def on_end_of_collection(self) -> dict[str, float]:
        return {"total_trajs": float(self.num_trajs), "total_timesteps": float(self.num_timesteps)}
