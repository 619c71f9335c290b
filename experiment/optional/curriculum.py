"""Episodes that grow longer with training: a callback that sets an attribute of the environments."""

from __future__ import annotations

import math
from typing import Any

import gin

from ...data.errors import check_number
from ...envs.attributes import EPISODE_LENGTH
from ..callbacks import Callback
from ..contracts import Run


@gin.configurable
class EpisodeLengthCurriculum(Callback):
    """Sets an attribute of all training environments before each epoch's collection.

    The value follows from the epoch alone, so a resumed run needs nothing else.

    Args:
        start: value until epoch `from_epoch`.
        end: value from epoch `from_epoch + over_epochs` on.
        over_epochs: epochs of the ramp between them.
        from_epoch: epoch in which the ramp begins.
        geometric: True grows by the same factor in each of these epochs, False by the same number.
        attribute: attribute to set. Every environment has `max_episode_length` (episodes are truncated after
            this many env steps); any other has to be defined by the environment or one of its wrappers.
        also_validation: True sets it in the validation environments too.

    Raises: TypeError or ValueError for invalid numbers; AttributeError (EnvError in worker processes)
        if the environments do not have the attribute.
    """

    def __init__(
        self,
        start: int = gin.REQUIRED,
        end: int = gin.REQUIRED,
        over_epochs: int = gin.REQUIRED,
        *,
        from_epoch: int = 0,
        geometric: bool = False,
        attribute: str = EPISODE_LENGTH,
        also_validation: bool = False,
    ) -> None:
        for name, value in (("start", start), ("end", end), ("over_epochs", over_epochs)):
            check_number(f"EpisodeLengthCurriculum.{name}", value, lowest=1, whole=True)
        check_number("EpisodeLengthCurriculum.from_epoch", from_epoch, lowest=0, whole=True)
        self.start, self.end, self.over_epochs = start, end, over_epochs
        self.from_epoch, self.geometric = from_epoch, geometric
        self.attribute, self.also_validation = attribute, also_validation
        self.collect_metrics = (attribute,)
        self.changes_episode_length = attribute == EPISODE_LENGTH
        self._is_set: dict[int, int] = {}  # value by vector env

    def length(self, epoch: int) -> int:
        """Value in this epoch."""
        share = min(1.0, max(0, epoch - self.from_epoch) / self.over_epochs)
        if self.geometric:
            return round(self.start * math.pow(self.end / self.start, share))
        return round(self.start + share * (self.end - self.start))

    def before_play_steps(self, run: Run) -> None:
        """Set it in the training environments."""
        if (length := self._set(run.train_envs, run)) is not None:
            run.log({"collect/" + self.attribute: length})

    def on_eval_start(self, run: Run) -> None:
        """Set it in the validation environments."""
        if self.also_validation:
            self._set(run.val_envs, run)

    def _set(self, envs: Any, run: Run) -> int | None:
        """Set the value if it has changed; returns it in that case, otherwise None."""
        length = self.length(run.ctx.progress.schedule_epoch)
        if envs is None or self._is_set.get(id(envs)) == length:
            return None
        envs.set_attr(self.attribute, length)
        self._is_set[id(envs)] = length
        return length
