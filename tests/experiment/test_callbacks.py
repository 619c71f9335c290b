"""Hooks at the points of a run, their state, and the mistakes one can make with them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from loxodon.experiment import Callback, Experiment

from .fakes import make_experiment, run


class Recorder(Callback):
    """Notes every hook with the epoch it was called in."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith(("on_", "before_", "after_")):
            return found

        def noted(exp: Experiment, *args: Any) -> None:
            self.calls.append(f"{name} {exp.epoch}")
            found(exp, *args)

        return noted


def recorded(hook: str) -> Any:
    """A method of this name, so that the class overrides it."""

    def method(self: Recorder, exp: Experiment, *args: Any) -> None:
        pass

    method.__name__ = hook
    return method


HOOKS = [name for name in vars(Callback) if name.startswith(("on_", "before_", "after_"))]
for hook in HOOKS:
    setattr(Recorder, hook, recorded(hook))


class Counter(Callback):
    """Counts epochs, also those before a resume."""

    def __init__(self) -> None:
        self.num_epochs = 0

    def on_epoch_end(self, exp: Experiment, epoch: int) -> None:
        self.num_epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"num_epochs": self.num_epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_epochs = state["num_epochs"]


def test_the_hooks_of_a_run_come_in_order(tmp_path: Path) -> None:
    exp = run(make_experiment(tmp_path, callbacks=[Recorder], ckpt_interval=1))
    recorder = exp.hooks.callbacks[0]
    assert isinstance(recorder, Recorder)
    epoch = "on_epoch_start {0}|on_eval_start {0}|on_eval_end {0}|before_play_steps {0}|after_train {0}"
    epoch += "|on_epoch_end {1}"
    saved = "on_save_checkpoint_start {1}|on_save_checkpoint_end {1}"
    begun = "on_model_init_start 0|on_optimizer_init_start 0|on_optimizer_init_end 0|on_model_init_end 0"
    expected = [
        *begun.split("|"),
        "on_start 0",
        "on_fit_start 0",
        *epoch.format(0, 1).split("|"),
        *saved.format(0, 1).split("|"),
        *epoch.format(1, 2).split("|"),
        "on_eval_start 2",
        "on_eval_end 2",
        "on_training_end 2",
        *saved.format(1, 2).split("|"),
        "on_fit_end 2",
    ]
    assert recorder.calls == expected


def test_the_hooks_of_a_stop_and_a_resume(tmp_path: Path) -> None:
    exp = make_experiment(tmp_path, callbacks=[Recorder], val_interval=None)
    exp.start()
    recorder = exp.hooks.callbacks[0]
    assert isinstance(recorder, Recorder)
    step = exp.train_step
    exp.train_step = lambda *args, **kw: os.kill(os.getpid(), signal.SIGTERM) or step(*args, **kw)  # type: ignore[func-returns-value,method-assign]
    with pytest.raises(SystemExit):
        exp.learn()
    assert recorder.calls[-4:] == [
        "after_train 0",
        "on_training_stop 0",
        "on_save_checkpoint_start 0",
        "on_save_checkpoint_end 0",
    ]
    again = make_experiment(tmp_path, callbacks=[Recorder])
    again.start()
    again.load_checkpoint()
    recorder = again.hooks.callbacks[0]
    assert isinstance(recorder, Recorder)
    assert recorder.calls[-2:] == ["on_load_checkpoint_start 0", "on_load_checkpoint_end 0"]
    again.close()


def test_every_hook_is_called_somewhere() -> None:
    text = "".join(
        path.read_text()
        for path in Path(__file__).parents[2].glob("experiment/**/*.py")
        if path.name != "callbacks.py"
    )
    events = {"model_init", "optimizer_init", "load_checkpoint"}
    direct = {
        hook
        for hook in HOOKS
        if hook.removeprefix("on_").removesuffix("_start").removesuffix("_end") not in events
    }
    assert [hook for hook in direct if f'hooks("{hook}"' not in text] == []
    assert [event for event in events if f'around("{event}"' not in text] == []


def test_states_are_kept_in_the_checkpoint(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"callbacks": [Counter, Counter, Recorder], "val_timesteps_per_epoch": 0}
    exp = run(make_experiment(tmp_path, **settings))
    kept = exp.checkpoints.read(exp.checkpoints.state_dir(1)).shared["callbacks"]
    assert kept == {"Counter": {"num_epochs": 2}, "Counter 2": {"num_epochs": 2}}
    more = run(make_experiment(tmp_path, **settings, epochs=3), lambda e: e.load_checkpoint())
    assert [one.num_epochs for one in more.hooks.callbacks if isinstance(one, Counter)] == [3, 3]


def test_eval_end_gets_the_figures(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []

    class Watch(Callback):
        def on_eval_end(self, exp: Experiment, metrics: dict[str, float]) -> None:
            seen.append(metrics)

    exp = run(make_experiment(tmp_path, callbacks=[Watch()], **{"FinalTest.timesteps": 12}))
    assert len(seen) == 4  # two epochs, at the end, the test
    assert seen[2] == exp.last_val_metrics
    assert "test/return" in seen[3]


class Misspelt(Callback):
    def on_fit_ends(self, exp: Experiment) -> None: ...


class NotJson(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"x": {1, 2}}


@pytest.mark.parametrize(
    ("callbacks", "error", "words"),
    [
        ([Misspelt], ValueError, r"Misspelt defines on_fit_ends.*no hook.*Fix: rename it to on_fit_end,"),
        ([dict], TypeError, r"callbacks makes \{\}.*list of what makes Callbacks.*Fix"),
        ([3], TypeError, r"callbacks holds 3.*Fix"),
        (Counter, TypeError, r"callbacks is <class .*Counter.*Fix"),
    ],
)
def test_mistakes(tmp_path: Path, callbacks: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make_experiment(tmp_path, callbacks=callbacks)


def test_a_state_must_be_storable(tmp_path: Path) -> None:
    exp = make_experiment(tmp_path, callbacks=[NotJson])
    with pytest.raises(TypeError, match=r"NotJson.state_dict\(\) cannot be stored.*Fix"):
        exp.hooks.state_dict()


def test_a_checkpoint_without_callbacks_can_be_loaded(tmp_path: Path) -> None:
    run(make_experiment(tmp_path, val_timesteps_per_epoch=0))
    exp = make_experiment(tmp_path, callbacks=[Counter])
    exp.start()
    exp.load_checkpoint()
    counter = exp.hooks.callbacks[0]
    assert isinstance(counter, Counter)
    assert counter.num_epochs == 0
    exp.close()
