"""Tasks that share spaces and differ in what is right and in how much it pays; see scaled_answers.gin."""

from __future__ import annotations

from typing import Any, ClassVar

import gin
import gymnasium as gym
import numpy as np

from loxodon.envs.builtin.task import StepResult, Task
from loxodon.envs.returned import METRIC_PREFIX

NUM_TASKS, NUM_SYMBOLS = 6, 3


@gin.configurable
class Answers(Task):
    """Answer every symbol by its number plus that of the task.

    Observation: Box (9,) float32 = [which task (6), which symbol is shown (3)]. Action: 0 to 5, of which
    (symbol + task) mod 6 is right and pays 10^x / length, where x goes evenly from -spread (task 0) to spread
    (task 5). After `length` answers the episode terminates. `info["metric/success"]` is the share of right
    answers, at the end.
    """

    settings: ClassVar[tuple[str, ...]] = ("task", "spread", "length")
    variables: ClassVar[tuple[str, ...]] = ("_symbol", "_time", "_num_right")

    def __init__(self, task: int = gin.REQUIRED, spread: float = gin.REQUIRED, length: int = 16) -> None:
        self.task, self.spread, self.length = task, spread, length
        self.env_name = f"Answers{task}"
        self.scale = 10.0 ** (spread * (2.0 * task / (NUM_TASKS - 1) - 1.0))
        self.observation_space = gym.spaces.Box(0.0, 1.0, (NUM_TASKS + NUM_SYMBOLS,), np.float32)
        self.action_space = gym.spaces.Discrete(NUM_TASKS)
        self._symbol, self._time, self._num_right = 0, 0, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Show a symbol."""
        super().reset(seed=seed)
        self._time, self._num_right = 0, 0
        return self._show(), {}

    def step(self, action: Any) -> StepResult:
        """Take an answer, and show the next symbol."""
        is_right = int(action) == (self._symbol + self.task) % NUM_TASKS
        self._num_right += is_right
        self._time += 1
        is_over = self._time == self.length
        info = {METRIC_PREFIX + "success": self._num_right / self.length} if is_over else {}
        return self._show(), is_right * self.scale / self.length, is_over, False, info

    def _show(self) -> np.ndarray:
        """Draw a symbol."""
        self._symbol = int(self.np_random.integers(NUM_SYMBOLS))
        obs = np.zeros(NUM_TASKS + NUM_SYMBOLS, np.float32)
        obs[[self.task, NUM_TASKS + self._symbol]] = 1.0
        return obs
