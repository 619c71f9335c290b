"""Tests of commands share what holds for tests of a run."""

from ..experiment.conftest import nothing_left

__all__ = ["nothing_left"]
