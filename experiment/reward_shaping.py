"""Rewards as training sees them: changed between the environment and what is stored."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import gin
import numpy as np

from ..data import RLDataset

if TYPE_CHECKING:
    from .experiment import Experiment

ShapeRewards = Callable[[np.ndarray, float], np.ndarray]


@gin.configurable
class ScaleRewards:
    """`scale * reward + shift`, then clipped to [low, high].

    Args:
        scale, shift: numbers.
        low, high: limits; None for none.

    Raises: ValueError unless low is below high.
    """

    def __init__(
        self, scale: float = 1.0, shift: float = 0.0, low: float | None = None, high: float | None = None
    ) -> None:
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"ScaleRewards.low is {low}, but must be below ScaleRewards.high = {high}. "
                "Fix: exchange them."
            )
        self.scale, self.shift, self.low, self.high = scale, shift, low, high

    def __call__(self, rewards: np.ndarray, progress: float) -> np.ndarray:
        """Rewards (N,) float32 to (N,) float32."""
        shaped = self.scale * rewards + self.shift
        if self.low is not None or self.high is not None:
            shaped = np.clip(shaped, self.low, self.high)
        return shaped.astype(np.float32)


def make_shaping(exp: Experiment) -> Callable[[np.ndarray], np.ndarray] | None:
    """What the training collector calls with the rewards of each vector step; None without a shaper.

    The function takes (N,) float32, leaves it alone and returns (N,) float32. It raises TypeError or
    ValueError if the user's function returns anything else.
    """
    shaper = exp.reward_shaper
    if shaper is None:
        return None
    return lambda rewards: _shaped(shaper, exp.epochs, rewards, exp.ctx.progress.schedule_epoch)


def shape_relabeled(dataset: RLDataset, shaper: ShapeRewards, num_epochs: int) -> None:
    """Let what relabels trajectories, in all parts of the dataset, shape the rewards that it gives alike."""
    if dataset.relabeler is not None:
        dataset.relabeler.shape_rewards = functools.partial(_shaped, shaper, num_epochs)
    for part in getattr(dataset, "datasets", ()):
        shape_relabeled(part, shaper, num_epochs)


def _shaped(shaper: ShapeRewards, num_epochs: int, rewards: np.ndarray, epoch: int) -> np.ndarray:
    progress = min(1.0, epoch / max(num_epochs, 1))
    return checked(shaper(rewards.astype(np.float32), progress), rewards, shaper)


def checked(shaped: object, rewards: np.ndarray, shaper: object) -> np.ndarray:
    """What a shaper returned, as (N,) float32."""
    name = getattr(shaper, "__name__", type(shaper).__name__)
    must = f"must return finite numbers of shape {rewards.shape}, one for each"
    if not isinstance(shaped, np.ndarray) or shaped.dtype.kind not in "fiub":
        raise TypeError(
            f"Experiment.reward_shaper ({name}) returned {type(shaped).__name__}, but {must}. Fix: return a "
            "numpy array; return rewards * 0.1, for example."
        )
    if shaped.shape != rewards.shape:
        raise ValueError(
            f"Experiment.reward_shaper ({name}) returned shape {shaped.shape}, but {must}. Fix: work on all "
            "rewards at once, without adding or dropping an axis."
        )
    if not np.isfinite(shaped).all():
        row = int(np.flatnonzero(~np.isfinite(shaped))[0])
        raise ValueError(
            f"Experiment.reward_shaper ({name}) returned {shaped[row]} for the reward {rewards[row]}, but "
            f"{must}. Fix: guard divisions and logarithms."
        )
    return shaped.astype(np.float32, copy=False)
