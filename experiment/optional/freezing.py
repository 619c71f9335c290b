"""Parameters that stay unchanged for some of a run's epochs."""

from __future__ import annotations

from collections.abc import Sequence

import gin

from ..callbacks import Callback
from ..contracts import Run
from ..learn.optimizer import check_prefixes, is_under, named_among


@gin.configurable
class ParamFreezer(Callback):
    """Freezes the parameters in some modules of the agent, always or in a window of epochs.

    A frozen parameter gets no update at all: no gradient step, no weight decay and no change of AdamW's
    moments. Its gradient does not count in the norm that is clipped. Gradients still flow through it to
    earlier layers. Running statistics (input normalisers, value scales) are not parameters, and keep moving;
    target networks keep approaching the frozen weights. In gin: `Experiment.callbacks = [@ParamFreezer]`.

    Args:
        prefixes: names of modules or parameters of the agent, such as "tstep_encoder" or "traj_encoder.cell".
        start: first frozen epoch.
        stop: first epoch in which they are trained again; None for never.

    Raises: ValueError for an invalid schedule.
    """

    def __init__(
        self,
        prefixes: Sequence[str] = ("tstep_encoder",),
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        self.prefixes = (prefixes,) if isinstance(prefixes, str) else tuple(prefixes)
        self.start, self.stop = start, stop
        if not self.prefixes:
            raise ValueError(
                "ParamFreezer.prefixes is empty, but must name parameters to freeze. Fix: set it, e.g. to "
                "('tstep_encoder',), or remove ParamFreezer from Experiment.callbacks."
            )
        if start < 0 or (stop is not None and stop <= start):
            raise ValueError(
                f"ParamFreezer.start is {start} and stop is {stop}, but they must be epochs with 0 <= start "
                "< stop, or stop None. Fix: set ParamFreezer.stop."
            )

    def is_frozen(self, epoch: int) -> bool:
        """True if the parameters are frozen in this epoch."""
        return epoch >= self.start and (self.stop is None or epoch < self.stop)

    def on_model_init_end(self, run: Run) -> None:
        """Find the parameters in the agent.

        Raises: ValueError if a prefix matches no parameter, or if nothing would be left to train.
        """
        named = named_among(run.policy, run.policy.trainable_params())
        check_prefixes(self.prefixes, named, "ParamFreezer.prefixes")
        frozen = [p for name, p in named.items() if any(is_under(name, prefix) for prefix in self.prefixes)]
        if len(frozen) == len(named):
            raise ValueError(
                f"ParamFreezer.prefixes {self.prefixes} freezes every trainable parameter, so there is "
                "nothing to learn. Fix: remove a prefix, or set Experiment.mode = 'collect'."
            )

        def drop_gradients() -> None:
            # The optimizer skips parameters without a gradient. Processes that train together have averaged
            # the gradients by now, so none waits for another.
            if self.is_frozen(run.ctx.progress.epoch):
                for param in frozen:
                    param.grad = None

        run.learner.before_clipping.append(drop_gradients)
