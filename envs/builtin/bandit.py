"""Bandits: find the best of several arms by trying them."""

from __future__ import annotations

from typing import Any, ClassVar

import gin
import gymnasium as gym
import numpy as np

from ...data.errors import check_choice
from ..returned import METRIC_PREFIX
from .task import StepResult, Task, check_counts


@gin.configurable
class Bandit(Task):
    """Arms with hidden mean rewards, which are drawn anew in every episode.

    Observation: Box (1,) float32, 1 at the first timestep, else 0. Action: the arm to pull, 0 to num_arms -
    1. The episode terminates after `num_steps` pulls. `info["metric/best_arm"]` is the share of pulls of the
    best arm, reported at the end.

    Args:
        num_arms: number of arms.
        num_steps: pulls per episode.
        kind: "bernoulli" pays 0 or 1, with probabilities drawn uniformly from [0, 1]; "gaussian" pays the
            arm's mean, drawn from a normal distribution around 0, plus normal noise, both of standard
            deviation 1.

    Source: Duan et al. 2016, arXiv:1611.02779, section 3.1.
    """

    settings: ClassVar[tuple[str, ...]] = ("num_arms", "num_steps", "kind")
    variables: ClassVar[tuple[str, ...]] = ("_means", "_time", "_num_best")

    def __init__(self, num_arms: int = 5, num_steps: int = 100, kind: str = "bernoulli") -> None:
        check_counts(self, num_steps=num_steps)
        check_counts(self, 2, num_arms=num_arms)
        check_choice("Bandit.kind", kind, ("bernoulli", "gaussian"))
        self.num_arms, self.num_steps, self.kind = num_arms, num_steps, kind
        self.observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(num_arms)
        self._means, self._time, self._num_best = [0.0] * num_arms, 0, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Draw new arms."""
        super().reset(seed=seed)
        draw = self.np_random.random if self.kind == "bernoulli" else self.np_random.standard_normal
        self._means, self._time, self._num_best = draw(self.num_arms).tolist(), 0, 0
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> StepResult:
        """Pull an arm."""
        self._time += 1
        mean = self._means[action]
        self._num_best += mean == max(self._means)
        if self.kind == "bernoulli":
            reward = float(self.np_random.random() < mean)
        else:
            reward = mean + self.np_random.standard_normal()
        is_over = self._time >= self.num_steps
        info = {METRIC_PREFIX + "best_arm": self._num_best / self.num_steps} if is_over else {}
        return np.zeros(1, np.float32), reward, is_over, False, info
