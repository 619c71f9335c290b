"""Callbacks: user code at the fixed points of a run."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import gin
import torch

from ..data.errors import check_number
from .contracts import Run

T = TypeVar("T")
_PREFIXES = ("on_", "before_", "after_")


class Callback:
    """Derive from this and override what is needed; every hook gets the Experiment as `Run`.

    If several processes train together, each has its own callbacks and calls them at the same points.

    Attributes:
        collect_metrics: names of metrics that the callback logs under `collect/`; metrics of environments
            with the same name are logged under another name.
        changes_episode_length: True if it changes after how many env steps training episodes are truncated.
            They are then stored as truncated in spite of `Experiment.time_limits_terminate`, because the
            agent cannot foresee their ends.
    """

    collect_metrics: tuple[str, ...] = ()
    changes_episode_length: bool = False

    def on_model_init_start(self, run: Run) -> None:
        """Spaces, environments and data are there; the agent is built next."""

    def on_model_init_end(self, run: Run) -> None:
        """The agent, its optimizer and the collector are built."""

    def on_optimizer_init_start(self, run: Run) -> None:
        """The agent is built (`run.policy`); its optimizer is next."""

    def on_optimizer_init_end(self, run: Run) -> None:
        """The optimizer is built."""

    def on_load_checkpoint_start(self, run: Run) -> None:
        """A training state or weights are loaded next."""

    def on_load_checkpoint_end(self, run: Run) -> None:
        """The weights are loaded; after a training state, `run.epoch` is the epoch to resume at."""

    def on_save_checkpoint_start(self, run: Run) -> None:
        """A checkpoint is written next; the states of callbacks are taken after this."""

    def on_save_checkpoint_end(self, run: Run) -> None:
        """The checkpoint is complete on disk."""

    def on_start(self, run: Run) -> None:
        """Everything is built and initial weights are loaded; a checkpoint to resume is not loaded yet."""

    def on_fit_start(self, run: Run) -> None:
        """`learn` begins with epoch `run.epoch`."""

    def on_epoch_start(self, run: Run, epoch: int) -> None:
        """Epoch `epoch` begins."""

    def before_play_steps(self, run: Run) -> None:
        """The collection of this epoch comes next; before the very first one no episode has begun."""

    def after_train(self, run: Run) -> None:
        """The updates of this epoch are done."""

    def on_eval_start(self, run: Run) -> None:
        """An evaluation comes next."""

    def on_eval_end(self, run: Run, metrics: dict[str, float]) -> None:
        """An evaluation has ended; metrics: its metrics, named `val/...` or `test/...`."""

    def on_epoch_end(self, run: Run, epoch: int) -> None:
        """Epoch `epoch` is over; `run.epoch` is already the next one."""

    def on_training_end(self, run: Run) -> None:
        """The last epoch and the evaluation after it are over; the last checkpoint comes next."""

    def on_training_stop(self, run: Run) -> None:
        """Training ends early: by a signal, `request_stop` or `WallClockLimit`.

        A signal in the final evaluation comes after `on_training_end`.
        """

    def on_fit_end(self, run: Run) -> None:
        """`learn` returns next; not after a signal, which ends the process."""

    def state_dict(self) -> dict[str, Any]:
        """State of this callback in a checkpoint, tensors and plain values; called in the main process."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`; called in every process."""


@gin.configurable
class EvaluateAfterLoad(Callback):
    """Evaluates loaded weights before training continues from them, if no evaluation is due anyway."""

    def __init__(self) -> None:
        self._is_due = False

    def on_load_checkpoint_end(self, run: Run) -> None:
        """Remember that something was loaded."""
        self._is_due = True

    def on_fit_start(self, run: Run) -> None:
        """Evaluate the loaded weights."""
        is_coming = run.val_interval is not None and run.epoch % run.val_interval == 0
        if self._is_due and not is_coming and run.val_timesteps_per_epoch > 0:
            run.evaluate_val()
        self._is_due = False


@gin.configurable
class WallClockLimit(Callback):
    """Ends training, with a checkpoint, after the epoch in which `seconds` of `learn` have passed.

    Every run has one; set `WallClockLimit.seconds = 3600` to use it.

    Args:
        seconds: the limit; None for no limit.
    """

    def __init__(self, seconds: float | None = None) -> None:
        check_number("WallClockLimit.seconds", seconds, above=0, optional=True)
        self.seconds = seconds

    def on_epoch_end(self, run: Run, epoch: int) -> None:
        """Stop if the time is over."""
        if self.seconds is not None and not run.test_run and run.ctx.stop.age_s() >= self.seconds:
            run.request_stop(f"WallClockLimit.seconds = {self.seconds:g} is reached")


@gin.configurable
class FinalTest(Callback):
    """Evaluates after the last epoch, in environments of its own.

    Every run has one; set `FinalTest.timesteps = 1000` to use it.

    Args:
        timesteps: steps per environment, like `Experiment.val_timesteps_per_epoch`; 0 for no test.
        make_env: makes the environments; None for those of validation.
    """

    def __init__(self, timesteps: int = 0, make_env: Any = None) -> None:
        check_number("FinalTest.timesteps", timesteps, lowest=0, whole=True)
        self.timesteps, self.make_env = timesteps, make_env

    def on_model_init_end(self, run: Run) -> None:
        """Build the environments once, so that a mistake shows before training.

        Raises: ValueError if their observations or actions differ from those the agent was built for.
        """
        if not self.timesteps or self.make_env is None or run.ctx.role.is_actor:
            return
        run.make_envs(self.make_env).close()

    def on_training_end(self, run: Run) -> None:
        """Evaluate."""
        if not self.timesteps:
            return
        make_env = run.make_val_env if self.make_env is None else self.make_env
        run.evaluate_test(make_env, 1 if run.test_run else self.timesteps)  # 1: one episode per environment


@gin.configurable
class ProfileEpoch(Callback):
    """Writes a trace of one epoch by torch's profiler to the run folder's logs.

    Every run has one; set `ProfileEpoch.epoch = 3` to use it.

    Args:
        epoch: number of the epoch; None for no trace.
    """

    def __init__(self, epoch: int | None = None) -> None:
        check_number("ProfileEpoch.epoch", epoch, lowest=0, whole=True, optional=True)
        self.epoch = epoch
        self._profile: Any = None

    def on_epoch_start(self, run: Run, epoch: int) -> None:
        """Begin recording, if this is the epoch to profile."""
        if epoch == self.epoch and run.ctx.is_main and not run.ctx.role.is_actor:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if run.DEVICE.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profile = torch.profiler.profile(activities=activities)
            self._profile.__enter__()

    def on_epoch_end(self, run: Run, epoch: int) -> None:
        """Write the trace."""
        if self._profile is None:
            return
        self._profile.__exit__(None, None, None)
        path = run.ctx.run_dir / "logs" / f"profile_epoch_{epoch}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(path))
        self._profile = None
        run.ctx.console.say(
            f"Profile of epoch {epoch}: {path} (open it in chrome://tracing or ui.perfetto.dev)"
        )


OF_EVERY_RUN = (WallClockLimit, FinalTest, ProfileEpoch)
HOOKS = tuple(name for name in vars(Callback) if name.startswith(_PREFIXES))


class CallbackList:
    """The callbacks of a run, called in their order.

    Args:
        run: the experiment that is passed to every hook.
        makers: classes, functions without arguments, or callbacks themselves.
        more: makers of the callbacks that every run has.

    Raises: TypeError for anything else; ValueError for a method that is named like a hook but is not one.
    """

    def __init__(
        self,
        run: Run,
        makers: Iterable[Callable[[], Callback] | Callback],
        more: Iterable[Callable[[], Callback]] = (),
    ) -> None:
        self._run = run
        if not isinstance(makers, list | tuple):
            raise TypeError(_entry_text(makers, "is"))
        self.callbacks = [_made(maker) for maker in (*makers, *more)]

    def __call__(self, hook: str, *args: Any) -> None:
        """Call this hook of all callbacks."""
        for one in self.callbacks:
            getattr(one, hook)(self._run, *args)

    def around(self, event: str, function: Callable[..., T], *args: Any) -> T:
        """Call `on_<event>_start`, the function, and `on_<event>_end`; returns what the function returns."""
        self(f"on_{event}_start")
        result = function(*args)
        self(f"on_{event}_end")
        return result

    def state_dict(self) -> dict[str, Any]:
        """States of the callbacks that have one, by class name."""
        return {name: state for name, one in self._named() if (state := one.state_dict())}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Give each callback its state; those without one are left as they are."""
        for name, one in self._named():
            if name in states:
                one.load_state_dict(states[name])

    def _named(self) -> list[tuple[str, Callback]]:
        """Callbacks by class name; the second of a class gets a 2, and so on."""
        seen: Counter[str] = Counter()
        named = []
        for one in self.callbacks:
            name = type(one).__name__
            seen[name] += 1
            named.append((name if seen[name] == 1 else f"{name} {seen[name]}", one))
        return named


def _made(maker: Any) -> Callback:
    if not isinstance(maker, Callback) and not callable(maker):
        raise TypeError(_entry_text(maker, "holds"))
    made = maker if isinstance(maker, Callback) else maker()
    if not isinstance(made, Callback):
        raise TypeError(_entry_text(made, "makes"))
    for name in dir(type(made)):
        if name.startswith(_PREFIXES) and name not in HOOKS and callable(getattr(type(made), name)):
            near = difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"{type(made).__name__} defines {name}, which is not a hook and would never be called. "
                f"Hooks are {', '.join(HOOKS)}. Fix: rename it to {near}, or begin the name of a helper "
                "method with '_'."
            )
    return made


def _entry_text(found: Any, verb: str) -> str:
    return (
        f"Experiment.callbacks {verb} {found!r}, but must be a list of classes or functions that create "
        "Callbacks. Fix: set Experiment.callbacks = [@EpisodeLengthCurriculum] in gin or "
        "callbacks=[MyCallback] in Python, for example."
    )
