"""Callbacks: code of the user's own at the fixed points of a run."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import gin

if TYPE_CHECKING:
    from .experiment import Experiment

T = TypeVar("T")
_PREFIXES = ("on_", "before_", "after_")


class Callback:
    """Derive from this and override what is needed; every hook gets the Experiment.

    Where several processes train together, each has its own callbacks and calls them at the same points.
    """

    def on_model_init_start(self, exp: Experiment) -> None:
        """Spaces, environments and data are there; the agent is built next."""

    def on_model_init_end(self, exp: Experiment) -> None:
        """The agent, its optimizer and the collector are built."""

    def on_optimizer_init_start(self, exp: Experiment) -> None:
        """The agent is built (`exp.policy`); its optimizer is next."""

    def on_optimizer_init_end(self, exp: Experiment) -> None:
        """The optimizer is built."""

    def on_load_checkpoint_start(self, exp: Experiment) -> None:
        """A training state or weights are loaded next."""

    def on_load_checkpoint_end(self, exp: Experiment) -> None:
        """They are loaded; after a training state `exp.epoch` is the epoch to go on with."""

    def on_save_checkpoint_start(self, exp: Experiment) -> None:
        """A checkpoint is written next; the states of callbacks are taken after this."""

    def on_save_checkpoint_end(self, exp: Experiment) -> None:
        """The checkpoint is complete on disk."""

    def on_fit_start(self, exp: Experiment) -> None:
        """`learn` begins with epoch `exp.epoch`."""

    def before_play_steps(self, exp: Experiment) -> None:
        """The collection of this epoch comes next; before the very first one no episode has begun."""

    def after_train(self, exp: Experiment) -> None:
        """The updates of this epoch are done."""

    def on_eval_start(self, exp: Experiment) -> None:
        """An evaluation comes next."""

    def on_eval_end(self, exp: Experiment, metrics: dict[str, float]) -> None:
        """An evaluation has ended; metrics: its figures, named `val/...` or `test/...`."""

    def on_epoch_end(self, exp: Experiment, epoch: int) -> None:
        """Epoch `epoch` is over; `exp.epoch` is the next one already."""

    def on_training_stop(self, exp: Experiment) -> None:
        """Training ends before its last epoch: a signal, `request_stop` or `max_wall_clock_s`."""

    def on_fit_end(self, exp: Experiment) -> None:
        """`learn` returns next; not after a signal, which ends the process."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this callback, JSON-able; asked in the main process."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned; called in every process."""


@gin.configurable
class EvaluateAfterLoad(Callback):
    """Evaluates before training goes on from a checkpoint or from weights, if that is not due anyway."""

    def __init__(self) -> None:
        self._is_due = False

    def on_load_checkpoint_end(self, exp: Experiment) -> None:
        """Something was loaded."""
        self._is_due = True

    def on_fit_start(self, exp: Experiment) -> None:
        """Evaluate it."""
        is_coming = exp.val_interval is not None and exp.epoch % exp.val_interval == 0
        if self._is_due and not is_coming and exp.val_timesteps_per_epoch > 0:
            exp.evaluate_val()
        self._is_due = False


HOOKS = tuple(name for name in vars(Callback) if name.startswith(_PREFIXES))


class CallbackList:
    """The callbacks of a run, called in their order.

    Args:
        exp: the experiment that they get.
        makers: what makes each of them: classes, functions without arguments, or callbacks themselves.

    Raises: TypeError for anything else; ValueError for a method that looks like a hook and is none.
    """

    def __init__(self, exp: Experiment, makers: Iterable[Callable[[], Callback] | Callback]) -> None:
        self._exp = exp
        if not isinstance(makers, list | tuple):
            raise TypeError(_entry_text(makers, "is"))
        self.callbacks = [_made(maker) for maker in makers]
        self._methods: dict[str, list[Callable[..., None]]] = {
            hook: [
                getattr(one, hook)
                for one in self.callbacks
                if getattr(type(one), hook) is not getattr(Callback, hook)
            ]
            for hook in HOOKS
        }

    def __call__(self, hook: str, *args: Any) -> None:
        """Call this hook of all callbacks."""
        for method in self._methods[hook]:
            method(self._exp, *args)

    def around(self, event: str, function: Callable[..., T], *args: Any) -> T:
        """Call `on_<event>_start`, the function, and `on_<event>_end`; returns what the function returns."""
        self(f"on_{event}_start")
        result = function(*args)
        self(f"on_{event}_end")
        return result

    def state_dict(self) -> dict[str, Any]:
        """States of the callbacks that have one, by class name.

        Raises: TypeError if one is not JSON-able.
        """
        states = {name: one.state_dict() for name, one in self._named()}
        for name, state in states.items():
            try:
                json.dumps(state)
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"{name}.state_dict() cannot be stored in a checkpoint: {error}. Allowed are numbers, "
                    "texts, None, lists and dicts of them. Fix: convert the rest, e.g. arrays by tolist()."
                ) from error
        return {name: state for name, state in states.items() if state}

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


def learner_epoch(exp: Experiment) -> int:
    """The epoch that schedules follow: the running one; in a collecting process that of its newest policy."""
    loaded = exp.loaded_policy
    return exp.epoch if exp.mode != "collect" or loaded is None else loaded.epoch


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
                f"{type(made).__name__} defines {name}, which is no hook and would never be called. Hooks "
                f"are {', '.join(HOOKS)}. Fix: rename it to {near}, or begin a helper's name with '_'."
            )
    return made


def _entry_text(found: Any, verb: str) -> str:
    return (
        f"Experiment.callbacks {verb} {found!r}, but must be a list of what makes Callbacks. Fix: e.g. "
        "Experiment.callbacks = [@EpisodeLengthCurriculum] in gin, callbacks=[MyCallback] in Python."
    )
