"""An environment of your own: any gymnasium.Env, with one decorator so that gin knows its name.

python examples/own_env.py ShellGame.delay=20      # or any other settings on top, as with run.py
"""

import sys

import gin
import gymnasium as gym
import numpy as np

from loxodon.tools.run import main


@gin.configurable
class ShellGame(gym.Env):
    """Shows once which of three shells hides the pea; `delay` steps later, the agent must point at it."""

    def __init__(self, delay: int = 10) -> None:
        self.delay = delay
        self.observation_space = gym.spaces.Box(0.0, 1.0, (3,), np.float32)
        self.action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.shell, self.t = int(self.np_random.integers(3)), 0
        return np.eye(3, dtype=np.float32)[self.shell], {}

    def step(self, action):
        self.t += 1
        ended, found = self.t > self.delay, int(action) == self.shell
        info = {"metric/success": float(found)} if ended else {}  # logged as val/success
        return np.zeros(3, np.float32), float(ended and found), ended, False, info


if __name__ == "__main__":  # the settings of a preset, with this environment
    words = ["Experiment.make_train_env=@ShellGame", "Experiment.make_val_env=@ShellGame"]
    sys.exit(main(["--config", "tmaze", "--run-name", "own-env", *words, *sys.argv[1:]]))
