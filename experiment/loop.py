"""The order of events: the epochs of `learn`, and how it begins, stops and ends."""

from __future__ import annotations

import contextlib
import itertools
import logging
import signal
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

from . import building, final_test, resume, stopping
from .console import ConsoleView
from .distributed import any_process, explained_loss_of_contact
from .fleet import pacing
from .plots import draw_if_possible
from .pretraining import pretrain_if_due
from .signals import StopRequest
from .timing import profiled_epoch
from .training import stop_agreed, train

if TYPE_CHECKING:
    from .experiment import Experiment

logger = logging.getLogger("loxodon")
_INTERRUPTED = 128 + signal.SIGINT  # exit status, by which a shell's loop over commands knows to end too


def run_epochs(exp: Experiment) -> Generator[int, None, None]:
    """Run the epochs from exp.epoch on and yield the number of each; see Experiment.learn_iter."""
    collects_only = exp.mode == "collect"
    first = exp.epoch
    if first >= exp.epochs and not collects_only and exp.is_finished:
        logger.info("All epochs (%d) are done already. Raise Experiment.epochs to go on.", exp.epochs)
        exp.fleet.end("finished")
        return
    exp.is_finished = False
    shows = exp.verbose and exp.accelerator.is_main_process
    _begin_new_run(exp)
    with (
        explained_loss_of_contact(exp.accelerator),
        StopRequest() as exp.stop,
        ConsoleView(shows, None if collects_only else exp.epochs, first) as exp.view,
        contextlib.ExitStack() as stack,
        _curves_at_the_end(exp),
        _rescue(exp),
    ):
        pacing.begin(exp)
        building.begin_run(exp)
        if exp.mode == "learn":
            exp.write_latest_policy()
        if exp.actors is not None:
            stack.enter_context(exp.actors)
        exp.hooks("on_fit_start")
        pretrain_if_due(exp)
        if stop_agreed(exp):
            _stop(exp)
        is_stopped = yield from _epochs(exp, first)
        if not is_stopped:
            _finish(exp)
        exp.hooks("on_fit_end")


def _epochs(exp: Experiment, first: int) -> Generator[int, None, bool]:
    """Run the epochs; returns whether they ended before the last one, with everything saved already."""
    collects_only, saved_s = exp.mode == "collect", 0.0
    for epoch in itertools.count(first) if collects_only else range(first, exp.epochs):
        exp.epoch, exp.epoch_figures = epoch, {}
        with profiled_epoch(exp):
            is_final = _run_epoch(exp)
        if stop_agreed(exp):
            _stop(exp)
        exp.epoch = epoch + 1
        stopping.end_epoch(exp, epoch)
        goes_on = not is_final and (collects_only or exp.epoch < exp.epochs)
        is_stopped = goes_on and stopping.ends_here(exp)
        if is_stopped:
            stopping.end_here(exp)
        elif goes_on and not collects_only:
            if exp.always_save_latest or exp.mode == "learn":
                exp.write_latest_policy()  # before the checkpoint, which keeps the version
            if exp.ckpt_interval is not None and exp.epoch % exp.ckpt_interval == 0:
                exp.save_checkpoint()
                saved_s = exp.stop.age_s()
            elif _is_time_to_save(exp, saved_s):
                resume.save(exp, epoch, exp.epoch, is_interim=True)
                saved_s = exp.stop.age_s()
        yield epoch
        if is_stopped or is_final:
            return is_stopped
    return False


def _is_time_to_save(exp: Experiment, saved_s: float) -> bool:
    """True in all processes if ckpt_minutes have passed in any since the last checkpoint.

    Never with exact_resume: such a checkpoint may cut episodes, which has to happen at fixed epochs.
    """
    if exp.ckpt_minutes is None or exp.exact_resume:
        return False
    return any_process(exp.stop.age_s() - saved_s >= 60.0 * exp.ckpt_minutes, exp.accelerator)


def _begin_new_run(exp: Experiment) -> None:
    """Do not train a run that starts from scratch on what an earlier run of its name has collected."""
    is_new = exp.env_steps == 0 if exp.mode == "both" else exp.actors is not None and exp.policy_version == 0
    from_scratch = is_new and exp.start_collecting_at_epoch == 0
    if from_scratch and exp.has_dset_edit_rights and exp.accelerator.is_main_process:
        num_files = exp.dataset.begin_new_run()
        if num_files:
            logger.warning(
                "%d trajectories of an earlier run named %r were moved to buffer/superseded/ of its folder. "
                "To train on them, name the dataset: DiskTrajDataset.dset_name.",
                num_files,
                exp.run_name,
            )
    exp.accelerator.wait_for_everyone()


def _run_epoch(exp: Experiment) -> bool:
    """One epoch up to its training; True when nothing is left to do after it.

    That is when an evaluation reaches the return to stop at, or when a collecting process learns that the
    learner is done.
    """
    is_final = False
    pacing.begin_epoch(exp)
    if exp.always_load_latest or exp.mode == "collect":
        exp.accelerator.wait_for_everyone()  # the main process may still be writing it
        is_final = any_process(_follow_latest(exp), exp.accelerator)
    if exp.val_timesteps_per_epoch > 0 and exp.val_interval is not None and exp.epoch % exp.val_interval == 0:
        exp.view.show(exp.epoch, "evaluating", {})
        exp.evaluate_val()
        if _is_good_enough(exp):
            return True
    if stop_agreed(exp):
        return is_final
    if exp.collector is not None and exp.epoch >= exp.start_collecting_at_epoch:
        exp.view.show(exp.epoch, "collecting", {})
        exp.collect_new_training_data()
        if exp.test_run:
            exp.collector.flush()  # in so few steps no episode ends
    if exp.mode != "collect" and not stop_agreed(exp):
        train(exp)
        exp.hooks("after_train")
    exp.view.show(exp.epoch + 1, "done", {})
    return is_final


def _is_good_enough(exp: Experiment) -> bool:
    """True when the last evaluation reached stop_at_val_return."""
    score = exp.last_val_metrics.get("val/return")
    if exp.mode == "collect" or exp.stop_at_val_return is None or score is None:
        return False
    if score < exp.stop_at_val_return:
        return False
    exp.view.say(f"Mean return {score:.3f} reaches {exp.stop_at_val_return}: training stops.")
    return True


def _follow_latest(exp: Experiment) -> bool:
    """Load newer weights; True when they are the last ones of a learner that was at work meanwhile."""
    before = exp.loaded_policy
    info = exp.read_latest_policy()
    if info is None:
        if exp.epoch == 0:
            logger.warning(
                "There is no published policy in %s yet; acting with new weights.", exp.checkpoints.root
            )
        return False
    if info.is_final and before is None:
        logger.warning("The learner of this run has finished before; collecting with its final policy.")
    return exp.mode == "collect" and info.is_final and before is not None and before != info


def _stop(exp: Experiment) -> None:
    """Store what there is, say how to go on, and exit."""
    name = exp.stop.signal_name or "a signal to another process"
    exp.fleet.ending = "stopped", f"by {name}"
    exp.hooks("on_training_stop")
    if exp.mode == "collect":
        exp.close()
        line = (
            f"Stopped by {name}: all finished trajectories are stored. Start the same command again to go on."
        )
    else:
        folder = _save_running_epoch(exp)
        exp.close()
        line = f"Stopped by {name} in {_place(exp)}: saved {folder}. "
        line += "To go on: the same command with --resume."
    if exp.accelerator.is_main_process:
        exp.view.console.print(line, markup=False)
    is_alone = exp.accelerator.num_processes == 1  # a launcher would take it for a failure
    raise SystemExit(_INTERRUPTED if is_alone and name == "SIGINT" else 0)


def _place(exp: Experiment) -> str:
    return f"epoch {exp.epoch}" if exp.epoch < exp.epochs else "the final evaluation"


def _save_running_epoch(exp: Experiment) -> Path | None:
    """Save in the middle of an epoch.

    It is repeated on resume, and the checkpoint bears its number. After the last epoch only the final
    evaluation is left to repeat.
    """
    return resume.save(exp, epoch=max(min(exp.epoch, exp.epochs - 1), 0), next_epoch=exp.epoch, goes_on=False)


@contextlib.contextmanager
def _rescue(exp: Experiment) -> Generator[None, None, None]:
    """When an error ends the run, save where it stands, if that is sound, and say how to go on."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        is_abort = isinstance(error, KeyboardInterrupt) and exp.stop.requested()  # a second Ctrl-C
        if exp.mode == "both":
            exp.env_steps = max(exp.env_steps, exp.fleet.env_steps)  # the running epoch's are stored too
        has_done_anything = exp.env_steps > 0 or exp.learner.gradient_steps > 0
        if exp.mode != "collect" and not exp.test_run and not is_abort and has_done_anything:
            saved = _save_after_error(exp)
            if exp.accelerator.is_main_process:
                exp.view.console.print(f"Stopped by an error in {_place(exp)}: {saved}", markup=False)
        raise


def _save_after_error(exp: Experiment) -> str:
    """Try to save as a signal does; returns what became of it, and how to go on."""
    goes_on = "To go on: the same command with --resume."
    if exp.accelerator.num_processes > 1:  # the others cannot be asked for their part any more
        problem = "several processes train, and not all are left"
    elif not exp.learner.is_sound():
        problem = "the weights are not finite"
    else:
        try:
            return f"saved {_save_running_epoch(exp)}. {goes_on}"
        except Exception as error:  # whatever it is, the first error is the one to raise
            problem = f"{type(error).__name__}: {error}"
    epochs = exp.checkpoints.complete_epochs()
    newest = f"The newest checkpoint is of epoch {epochs[-1]}. {goes_on}" if epochs else "There is none yet."
    return f"it could not be saved ({problem}). {newest}"


@contextlib.contextmanager
def _curves_at_the_end(exp: Experiment) -> Generator[None, None, None]:
    """Draw the learning curves, however the run ends."""
    try:
        yield
    finally:
        if exp.verbose and exp.mode != "collect" and exp.accelerator.is_main_process and not exp.test_run:
            draw_if_possible(exp.run_dir)


def _finish(exp: Experiment) -> None:
    """Last evaluation, last checkpoint, last policy."""
    if exp.collector is not None:
        exp.collector.flush()
    if exp.mode == "collect":
        exp.fleet.end("finished")
        return
    exp.accelerator.wait_for_everyone()
    exp.dataset.on_end_of_collection()  # the flush may have left more than may stay
    if exp.evaluate_at_end and exp.val_timesteps_per_epoch > 0:
        exp.evaluate_val()
        if stop_agreed(exp):
            _stop(exp)
    final_test.run_final_test(exp)
    if stop_agreed(exp):
        _stop(exp)
    exp.is_finished = True
    exp.save_checkpoint()
    if exp.always_save_latest or exp.mode == "learn":
        exp.write_latest_policy(is_final=True)
    exp.fleet.end("finished")
