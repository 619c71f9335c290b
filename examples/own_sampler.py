"""A sampler of your own: how often each trajectory is drawn; here the best ones are drawn more often.

python examples/own_sampler.py GoodEpisodes.best=0.2      # or any other settings on top
"""

import sys

import gin
import numpy as np

from loxodon.data import Sampler
from loxodon.tools.run import main


@gin.configurable
class GoodEpisodes(Sampler):
    """Draws half of the windows from the `best` share of trajectories by return, and half from all."""

    needs_values = True  # each trajectory is opened once, when first seen, to compute its value

    def __init__(self, best: float = 0.1):
        super().__init__()
        self.best = best

    def value(self, traj):
        return traj.rews.sum()

    def weights(self, num_trajs, values):  # oldest first; probabilities are weights / weights.sum()
        is_good = values >= np.quantile(values, 1 - self.best)
        return 0.5 / num_trajs + 0.5 * is_good / is_good.sum()


if __name__ == "__main__":
    words = ["RLDataset.sampler=@GoodEpisodes()", "HORIZON=10", "Experiment.max_seq_len=11"]
    sys.exit(main(["--config", "tmaze", "--run-name", "own-sampler", *words, *sys.argv[1:]]))
