"""Tests of commands use the fixtures for runs and for trajectories."""

from ..data.conftest import fill, make_traj
from ..experiment.conftest import nothing_left

__all__ = ["fill", "make_traj", "nothing_left"]
