"""What an Experiment does as a member of its run: counting, waiting for actors, figures of staleness."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from accelerate.utils import broadcast_object_list

from .membership import Membership
from .ratio import Ratio

if TYPE_CHECKING:
    from ..experiment import Experiment

WAIT_S = 0.2  # between the learner's looks at the actors
REMIND_S = 30.0
Value = TypeVar("Value")
_logger = logging.getLogger("loxodon")


def make_membership(exp: Experiment) -> Membership:
    """Nothing is written and nobody is refused before `joining`."""
    fleet = Membership(exp.run_dir, exp.run_name, exp.mode, exp.accelerator.process_index, ratio_of(exp))
    fleet.steps_count_for = exp.accelerator.num_processes if exp.mode == "both" else 1
    steps_per_epoch = exp.parallel_actors * exp.train_timesteps_per_epoch
    fleet.warm_up = steps_per_epoch * (exp.start_learning_at_epoch + 1)
    return fleet


def ratio_of(exp: Experiment) -> Ratio | None:
    """What the settings ask for."""
    if exp.replay_ratio is None:
        return None
    epoch_updates = exp.train_batches_per_epoch // exp.batches_per_update
    return Ratio(exp.replay_ratio, exp.replay_ratio_tolerance, epoch_updates)


def begin(exp: Experiment) -> None:
    """Tell what this process is, once it is built and has loaded what it goes on from."""
    fleet, buffer = exp.fleet, exp.dataset.save_new_trajs_to
    fleet.should_stop, fleet.say = lambda: exp.ctx.stop.requested(), lambda text: exp.ctx.console.say(text)  # noqa: PLW0108
    fleet.is_over = lambda: _is_over(exp)
    if exp.mode == "both":
        fleet.env_steps = exp.env_steps
    elif exp.mode == "learn":  # actors may have seen later versions than the checkpoint knows of
        exp.ctx.progress.policy_version = _from_main(
            exp, lambda: max(exp.ctx.progress.policy_version, _published_version(exp))
        )
    fleet.put(
        epoch=exp.epoch,
        env_steps=fleet.env_steps,
        gradient_steps=exp.learner.gradient_steps,
        policy_version=exp.ctx.progress.policy_version,
        spaces_digest=exp.env_spaces.digest(),
        buffer=None if buffer is None else str(buffer.parent.absolute()),
    )
    fleet.state("waiting", "to begin")
    if fleet.ledger is not None:
        fleet.ledger.begin(anew=exp.epoch == 0 and exp.learner.gradient_steps == 0)


def begin_epoch(exp: Experiment) -> None:
    """Count what all actors collected so far and tell which epoch this is."""
    exp.fleet.put(epoch=exp.epoch)
    exp.fleet.collected = 0
    if exp.fleet.ledger is not None:
        count(exp)
        exp.fleet.ledger.fold()


def count(exp: Experiment) -> int:
    """Env steps of the run; in a learner that never collects, `exp.env_steps` follows. Main process only."""
    ledger = exp.fleet.ledger
    assert ledger is not None
    counted = ledger.count()
    if exp.mode == "learn":
        exp.env_steps = max(exp.env_steps, counted)
        return counted
    return exp.env_steps + counted


def is_warm(exp: Experiment) -> bool:
    """Whether actors have collected as much as mode "both" has when it begins to train."""
    if exp.replay_ratio is None:
        return True
    return _from_main(exp, lambda: _main_is_warm(exp))


def plan_batches(exp: Experiment) -> int:
    """Number of batches this epoch trains on. From here on, env steps and updates count for the ratio.

    With a replay_ratio in mode "both": as many as are missing to `replay_ratio` times the env steps since
    training began, those of its first epoch included. Otherwise train_batches_per_epoch.
    """
    if exp.replay_ratio is None:
        return exp.train_batches_per_epoch
    due = _from_main(exp, lambda: _begin_training(exp))
    return due * exp.batches_per_update if exp.mode == "both" else exp.train_batches_per_epoch


def await_actors(exp: Experiment) -> bool:
    """Return before an update when the env steps allow for it; False if the run was asked to stop."""
    if exp.replay_ratio is None or exp.mode != "learn":
        return True
    if exp.fleet.updates_left < 1 and not _wait(exp):
        return False
    exp.fleet.updates_left -= 1
    return True


def ratio_figures(exp: Experiment) -> dict[str, float]:
    """The ratio so far, and how long this epoch waited for it; nothing without a replay_ratio."""
    fleet = exp.fleet
    if exp.replay_ratio is None or fleet.ledger is None:
        return {}
    env_steps, updates = fleet.ledger.since_began(count(exp), exp.learner.gradient_steps)
    waited_s, fleet.waited_s = fleet.waited_s, 0.0
    ratio = {"train/replay_ratio": updates / env_steps} if env_steps else {}
    return {**ratio, "time/wait_for_actors_s": waited_s}


def _wait(exp: Experiment) -> bool:
    """Wait until there is an update to make, which is often at once; all processes of a learner together."""
    start_s, reminded_s, fleet = time.monotonic(), -math.inf, exp.fleet
    while (left := _from_main(exp, lambda: _allowance(exp))) < 1:
        if exp.ctx.stop_agreed():
            return False
        fleet.state("waiting", "for env steps of actors")
        if time.monotonic() - reminded_s > REMIND_S:
            reminded_s = time.monotonic()
            _say_what_for(exp)
        time.sleep(WAIT_S)
    fleet.updates_left = left
    if reminded_s > -math.inf:
        fleet.waited_s += time.monotonic() - start_s
        fleet.state("learning")
    return True


def _say_what_for(exp: Experiment) -> None:
    """Once in a while, and only if nobody is there to wait for: waiting is the ratio's way of working."""
    ledger = exp.fleet.ledger
    if ledger is None or any(beat.is_alive and beat.role == "actor" for beat in ledger.beats):
        return
    exp.ctx.console.say(
        f"Waiting for env steps, as Experiment.replay_ratio = {exp.replay_ratio} asks, and no actor is "
        "running (start --mode collect)."
    )


def _allowance(exp: Experiment) -> int:
    ledger = exp.fleet.ledger
    assert ledger is not None
    assert ledger.ratio is not None
    return ledger.ratio.updates_allowed(*ledger.since_began(count(exp), exp.learner.gradient_steps))


def _main_is_warm(exp: Experiment) -> bool:
    ledger = exp.fleet.ledger
    assert ledger is not None
    count(exp)
    # The same sum as the actors look at, so that they do not wait for each other.
    collected = sum(beat.env_steps for beat in ledger.beats if beat.role == "actor" and beat.is_alive)
    return ledger.tally.began_at is not None or collected >= (exp.fleet.warm_up or 0)


def _begin_training(exp: Experiment) -> int:
    """Begin to count if that has not begun; returns the updates missing to the ratio."""
    ledger = exp.fleet.ledger
    assert ledger is not None
    assert ledger.ratio is not None
    env_steps, updates = count(exp), exp.learner.gradient_steps
    ledger.begin_training(env_steps - exp.fleet.collected, updates)
    return ledger.ratio.updates_due(*ledger.since_began(env_steps, updates))


def _from_main(exp: Experiment, compute: Callable[[], Value]) -> Value:
    """What `compute` returns in the main process, in all processes."""
    if exp.accelerator.num_processes == 1:
        return compute()
    values = [compute() if exp.accelerator.is_main_process else None]
    broadcast_object_list(values)
    value: Value = values[0]  # type: ignore[assignment]  # the main process put one there
    return value


def _published_version(exp: Experiment) -> int:
    """Version of the policy file; 0 if there is none, or none that is readable: it is replaced soon."""
    try:
        info = exp.latest.poll()
    except (ValueError, OSError):
        return 0
    return 0 if info is None else info.version


def _is_over(exp: Experiment) -> bool:
    """True when a policy was published that says it is the last and is not loaded yet."""
    info = exp.latest.poll()
    return info is not None and info.is_final and info != exp.loaded_policy


class Pace:
    """The functions above for one run."""

    def __init__(self, exp: Experiment) -> None:
        self.exp = exp

    def begin(self) -> None:
        begin(self.exp)

    def begin_epoch(self) -> None:
        begin_epoch(self.exp)

    def after_env_steps(self, num_steps: int) -> None:
        self.exp.fleet.on_env_steps(num_steps)

    def is_warm(self) -> bool:
        return is_warm(self.exp)

    def batches(self, planned: int) -> int:
        return plan_batches(self.exp)

    def before_update(self) -> bool:
        return await_actors(self.exp)

    def figures(self) -> dict[str, float]:
        if self.exp.ctx.role.is_actor and self.exp.replay_ratio is not None:
            waited_s, self.exp.fleet.waited_s = self.exp.fleet.waited_s, 0.0
            return {"time/wait_for_learner_s": waited_s}
        return ratio_figures(self.exp)

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        pass
