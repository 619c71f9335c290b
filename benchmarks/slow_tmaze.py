"""A T-maze whose steps take longer; see actors.py."""

from __future__ import annotations

import time
from typing import Any

import gin
import numpy as np

from loxodon.envs import TMazePassive


@gin.configurable
class SlowTMaze(TMazePassive):
    """TMazePassive that sleeps `sleep_s` seconds in each step."""

    def __init__(self, horizon: int, sleep_s: float) -> None:
        super().__init__(horizon=horizon)
        self.sleep_s = sleep_s

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Sleep, then step."""
        time.sleep(self.sleep_s)
        return super().step(action)
