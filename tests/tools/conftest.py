"""Tests of commands use the fixtures of tests of runs and of trajectories."""

from ..data.conftest import fill, make_traj
from ..experiment.conftest import nothing_left

__all__ = ["fill", "make_traj", "nothing_left"]
