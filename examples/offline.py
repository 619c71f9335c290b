"""Learn from stored data alone: write some episodes to files, then imitate them.

python examples/offline.py                 # any settings on top; `--config agents/iql` for another agent
"""

import sys
from pathlib import Path

import gymnasium as gym
import numpy as np

from loxodon.data import save_trajectory, split_episodes
from loxodon.tools.run import main

FOLDER = Path("datasets/cartpole/buffer/protected")  # "protected": learned from, never deleted


def demonstrations(num_steps):
    """Steps of a simple controller in the layout of most offline data sets: flat arrays, one row per step."""
    env, rows = gym.make("CartPole-v1"), []
    obs, _ = env.reset(seed=0)
    for _ in range(num_steps):
        action = int(obs[2] + obs[3] > 0)  # push towards the side to which the pole falls
        next_obs, reward, terminated, truncated, _ = env.step(action)
        rows.append((obs, action, reward, terminated, truncated, next_obs))
        obs = env.reset()[0] if terminated or truncated else next_obs
    return [np.array(column) for column in zip(*rows, strict=True)]


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    *columns, next_obs = demonstrations(num_steps=5_000)
    for number, episode in enumerate(split_episodes(*columns, next_obs=next_obs)):
        save_trajectory(FOLDER, episode, save_as="npz", traj_id=f"{number:08x}", unix_time=1e9 + number)
    words = ["--config", "cartpole", "--config", "agents/bc", "--run-name", "offline"]
    words += ["Experiment.train_timesteps_per_epoch=0", "Experiment.epochs=6"]  # no collection
    words += ["DiskTrajDataset.dset_root='datasets'", "DiskTrajDataset.dset_name='cartpole'"]
    words += ["DiskTrajDataset.takes_new_trajs=False"]
    sys.exit(main([*words, *sys.argv[1:]]))
