"""Meta-World's meta-learning benchmarks: a robot arm, and tasks with goals that only the rewards reveal."""

from __future__ import annotations

from typing import Any, ClassVar

import gin
import gymnasium as gym
import numpy as np

from ...data.errors import check_choice
from ..kshot import KEEP_TASK
from ..returned import METRIC_PREFIX
from ..spec import import_package

_BENCHMARKS = ("ML1", "ML10", "ML25", "ML45")
_SPLITS = ("train", "test")


@gin.configurable
class MetaWorld(gym.Env[np.ndarray, np.ndarray]):
    """A benchmark that draws one of its tasks, and one of the task's 50 goals, at every reset.

    Episodes are truncated by Meta-World's own time limit. Metric of an episode: `success`, whether the task
    was solved at any of its timesteps.

    Args:
        benchmark: "ML1" (one task), "ML10", "ML25" or "ML45".
        task: the task of "ML1", such as "reach-v3".
        split: "train" or "test". They have different goals and, except in ML1, different tasks.
    Raises: ValueError for an unknown name, ModuleNotFoundError without the package metaworld.
    Source: Yu et al. 2019, arXiv:1910.10897.
    """

    can_keep_task: ClassVar[bool] = True

    def __init__(self, benchmark: str = "ML1", task: str = "reach-v3", split: str = "train") -> None:
        check_choice("MetaWorld.benchmark", benchmark, _BENCHMARKS)
        check_choice("MetaWorld.split", split, _SPLITS)
        package = import_package("metaworld", "metaworld", type(self).__name__)
        if benchmark == "ML1":
            check_choice("MetaWorld.task", task, package.ML1.ENV_NAMES)
        chosen = package.ML1(task, seed=0) if benchmark == "ML1" else getattr(package, benchmark)(seed=0)
        self._classes = getattr(chosen, f"{split}_classes")
        self._tasks: dict[str, list[Any]] = {name: [] for name in self._classes}
        for one in getattr(chosen, f"{split}_tasks"):
            self._tasks[one.env_name].append(one)
        self._envs: dict[str, Any] = {}
        self.env = self._env_of(next(iter(self._classes)))
        space = self.env.observation_space
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, space.shape, np.float32)
        self.action_space = self.env.action_space
        self._was_done = False

    def _env_of(self, name: str) -> Any:
        if name not in self._envs:
            self._envs[name] = self._classes[name]()
        return self._envs[name]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode with a new task and goal, or with the same ones for the option "keep_task"."""
        super().reset(seed=seed)
        if not (options or {}).get(KEEP_TASK):
            name = sorted(self._tasks)[self.np_random.integers(len(self._tasks))]
            goals = self._tasks[name]
            self.env = self._env_of(name)
            self.env.set_task(goals[self.np_random.integers(len(goals))])
        self._was_done = False
        obs, _ = self.env.reset()
        return obs.astype(np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Move the arm; see the class."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._was_done |= bool(info["success"])
        ended = terminated or truncated
        metrics = {METRIC_PREFIX + "success": float(self._was_done)} if ended else {}
        return obs.astype(np.float32), float(reward), terminated, truncated, metrics

    def close(self) -> None:
        """Close all tasks that were used."""
        for env in self._envs.values():
            env.close()
