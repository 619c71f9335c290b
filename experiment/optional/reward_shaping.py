"""Rewards for training: changed between the environment and storage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gin
import numpy as np

from ...data import RLDataset
from ...data.errors import check_number
from .novelty import NoveltyBonus

ShapeRewards = Callable[[np.ndarray, float], np.ndarray]


@gin.configurable
class ScaleRewards:
    """The reward as `scale * reward + shift`, then clipped to [low, high].

    Args:
        scale: factor.
        shift: added after scaling.
        low, high: limits; None for none.

    Raises: ValueError unless low is below high.
    """

    def __init__(
        self, scale: float = 1.0, shift: float = 0.0, low: float | None = None, high: float | None = None
    ) -> None:
        settings = {"scale": scale, "shift": shift, "low": low, "high": high}
        for name, value in settings.items():
            check_number(f"ScaleRewards.{name}", value, optional=name in ("low", "high"))
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"ScaleRewards.low is {low}, but must be below ScaleRewards.high = {high}. Fix: swap them."
            )
        self.scale, self.shift, self.low, self.high = scale, shift, low, high

    def __call__(self, rewards: np.ndarray, progress: float) -> np.ndarray:
        """Map rewards (N,) float32 to (N,) float32."""
        shaped = self.scale * rewards + self.shift
        if self.low is not None or self.high is not None:
            shaped = np.clip(shaped, self.low, self.high)
        return shaped.astype(np.float32)


@gin.configurable(allowlist=["shaper", "bonus"])
class RewardShaping:
    """Shapes the rewards that training sees, of collected and of relabelled trajectories.

    The policy's input and all metrics keep the environment's own rewards.

    Args:
        num_epochs: number of epochs of the run.
        epoch: returns the epoch that schedules follow.
        shaper: (rewards (N,) float32, progress from 0 to 1) -> (N,), the rewards stored for training. None
            changes nothing.
        bonus: added to the shaped rewards of collected trajectories, for new observations; None adds nothing.

    Raises: TypeError for a shaper or bonus that cannot be called this way.
    """

    def __init__(
        self,
        num_epochs: int,
        epoch: Callable[[], int],
        *,
        shaper: ShapeRewards | None = None,
        bonus: NoveltyBonus | None = None,
    ) -> None:
        if shaper is not None and (isinstance(shaper, type) or not callable(shaper)):
            raise TypeError(
                f"RewardShaping.shaper is {shaper!r}, but must be a function of (rewards, progress). Fix: in "
                "gin write @ScaleRewards() with parentheses."
            )
        if bonus is not None and not isinstance(bonus, NoveltyBonus):
            raise TypeError(
                f"RewardShaping.bonus is {bonus!r}, but must be a NoveltyBonus. Fix: in gin write "
                "@NoveltyBonus() with parentheses; derive your own from it."
            )
        self._num_epochs, self._epoch, self._shaper, self._bonus = num_epochs, epoch, shaper, bonus

    def of_rollouts(self) -> Callable[[np.ndarray, Mapping[str, np.ndarray]], np.ndarray] | None:
        """The function that the training collector applies to each step; None if nothing is shaped.

        It takes rewards (N,) float32, which it does not change, and the observations (N, ...) that follow,
        and returns (N,) float32. It raises ValueError if the user's function returns anything else.
        """
        return None if self._shaper is None and self._bonus is None else self._shaped_with_bonus

    def _shaped_with_bonus(self, rewards: np.ndarray, following: Mapping[str, np.ndarray]) -> np.ndarray:
        shaped = self._shaped(rewards, self._epoch())
        return shaped if self._bonus is None else shaped + self._bonus(following)

    def metrics(self) -> dict[str, float]:
        """The mean novelty since the last call, if there is a bonus."""
        return {} if self._bonus is None else self._bonus.metrics()

    def state_dict(self) -> dict[str, Any]:
        """State of the bonus."""
        return {} if self._bonus is None else self._bonus.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of `state_dict`."""
        if self._bonus is not None and state:
            self._bonus.load_state_dict(state)

    def shape_relabeled(self, dataset: RLDataset) -> None:
        """Let relabellers in all parts of the dataset shape the rewards that they return, without a bonus."""
        if self.of_rollouts() is None:
            return
        if dataset.relabeler is not None:
            dataset.relabeler.shape_rewards = self._shaped
        for part in getattr(dataset, "datasets", ()):
            self.shape_relabeled(part)

    def _shaped(self, rewards: np.ndarray, epoch: int) -> np.ndarray:
        """The result of the shaper at that epoch, (N,) float32."""
        if self._shaper is None:
            return rewards.astype(np.float32)
        progress = min(1.0, epoch / max(self._num_epochs, 1))
        shaped: Any = self._shaper(rewards.astype(np.float32), progress)
        name = getattr(self._shaper, "__name__", type(self._shaper).__name__)
        is_array = isinstance(shaped, np.ndarray) and shaped.dtype.kind in "fiub"
        if not (is_array and shaped.shape == rewards.shape and np.isfinite(shaped).all()):
            raise ValueError(
                f"RewardShaping.shaper ({name}) returned {shaped!r} for the rewards {rewards!r}, but must "
                "return an array with one finite number for each. Fix: work on all rewards at once, without "
                "adding or dropping an axis, and guard divisions and logarithms."
            )
        found: np.ndarray = shaped.astype(np.float32, copy=False)
        return found
