"""Exact resume: what a checkpoint holds beside the weights, and how a run is put back to it."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list

from .checkpoint.policy_file import load_weights
from .checkpoint.record import check_checkpoint
from .checkpoint.start_from import as_branch, fetched, warm_start
from .checkpoint.store import TrainingState
from .rng import derive_seed, restore_rng_state, rng_state

if TYPE_CHECKING:
    from .experiment import Experiment

logger = logging.getLogger("loxodon")


def shared_state(exp: Experiment, next_epoch: int) -> dict[str, Any]:
    """States of the parts that are equal in all processes, to go on with `next_epoch`."""
    return {
        "progress": {**exp.ctx.progress.state_dict(), "epoch": next_epoch},
        "learner": exp.learner.state_dict(),
        "dataset": exp.dataset.state_dict(),
        "logs": exp.metric_logger.state_dict(),
        "callbacks": exp.hooks.state_dict(),
        "fleet": exp.pace.state_dict(),
    }


def own_state(exp: Experiment) -> dict[str, Any]:
    """States of the parts that each process has for itself."""
    return {
        "rng": rng_state(),
        "trainer": exp.trainer.state_dict(),
        "collector": {
            "state": None if exp.collector is None else exp.collector.state_dict(),
            "is_collecting": exp.collector is not None and exp.collector.has_begun,
        },
    }


def save(
    exp: Experiment, epoch: int, next_epoch: int, *, goes_on: bool = True, is_interim: bool = False
) -> Path | None:
    """Write the checkpoint named after `epoch`; the rollout goes on as if nothing had happened.

    But with exact_resume, if the checkpoint cannot hold the training envs, they are restarted. That gives
    every run, interrupted or not, the same state after a checkpoint: fresh episodes with a seed that follows
    from the run's seed and the epoch. Returns the folder in the main process.

    goes_on: False in a process that ends now, whose envs need not be restarted.
    is_interim: only a safeguard until the next one; it stays in the run folder, and goes when that is there.

    Raises: OSError if the disk does not take it; trajectories that are stored and earlier checkpoints stay.
    """
    exp.begin_run()
    collector = exp.collector
    restarts = exp.exact_resume and collector is not None and not collector.is_storable
    if collector is not None and (restarts or not exp.has_dset_edit_rights):
        collector.flush()  # without rights nobody sets files aside that repeat what the checkpoint holds
    elif collector is not None:
        collector.wait()
    exp.accelerator.wait_for_everyone()
    exp.hooks("on_save_checkpoint_start")
    exp.dataset.refresh()
    shared = shared_state(exp, next_epoch)
    exp.checkpoints.write_own(epoch, own_state(exp))
    exp.accelerator.wait_for_everyone()
    folder = None
    if exp.accelerator.is_main_process:
        facts = {"seed": exp.run_seed, "mode": exp.mode, "world_size": exp.accelerator.num_processes}
        metadata = exp.record.metadata(**facts, is_interim=is_interim)
        folder = exp.checkpoints.commit(epoch, exp.policy, shared, metadata)
        if not is_interim:
            exp.artifacts.store_state(folder, epoch)
        if not exp.checkpoints.config_path.exists():  # somebody deleted the folder
            exp.store_config()
        exp.checkpoints.prune(exp.keep_checkpoints, exp.keep_every_epochs)
    exp.accelerator.wait_for_everyone()
    exp.hooks("on_save_checkpoint_end")
    if restarts and goes_on and collector is not None and collector.has_begun:
        collector.warn_of_cut_episodes(exp.train_timesteps_per_epoch * (exp.ckpt_interval or 0))
        exp.restart_train_envs(next_epoch)
    return folder


def choose_epoch(exp: Experiment) -> int:
    """The newest checkpoint that is intact, the same in all processes; says so if it is not the newest.

    Raises: FileNotFoundError if there is none; ValueError if all are damaged.
    """
    chosen: list[int] = [-1]
    if exp.accelerator.is_main_process:
        chosen[0], problems = exp.checkpoints.newest_intact_epoch()
        if problems:
            logger.warning("%s. Going on from the one of epoch %d instead.", "; ".join(problems), chosen[0])
    if exp.accelerator.num_processes > 1:
        broadcast_object_list(chosen)
    return chosen[0]


def load(exp: Experiment, folder: Path, *, is_branch: bool = False) -> None:
    """Put the whole run back to the checkpoint in `folder`; is_branch: begin a run of its own from there.

    Raises: FileNotFoundError if it is missing or incomplete; ValueError if it is damaged or does not fit.
    """
    state = exp.checkpoints.read(folder)
    where = f"the training state {exp.restore_from}" if is_branch else f"the checkpoint {folder}"
    check_checkpoint(state.metadata, exp.record, where, exp.checkpoints.on_mismatch)
    load_weights(exp.policy, folder / "model.safetensors")
    restore(exp, as_branch(state) if is_branch else state)


def restore(exp: Experiment, state: TrainingState) -> None:
    """Put the whole run back to a checkpoint whose weights are loaded already.

    A shared part that the state has not is left as it is.
    """
    shared, own, progress = state.shared, state.own, state.shared["progress"]
    exp.learner.load_state_dict(shared["learner"])
    if exp.seed is not None and exp.seed != progress["seed"]:
        logger.warning(
            "The checkpoint belongs to seed %d; Experiment.seed = %d is set aside.",
            progress["seed"],
            exp.seed,
        )
    is_same_seed = exp.ctx.progress.seed == progress["seed"]
    exp.ctx.progress.load_state_dict(progress)
    if state.metadata["best_by"] != exp.checkpoints.best_by:
        exp.ctx.progress.best_score = None
    if not is_same_seed:
        exp.loader.reseed(derive_seed(exp.run_seed, "loader"))
    if "logs" in shared:
        exp.metric_logger.load_state_dict(shared["logs"])
    exp.hooks.load_state_dict(shared["callbacks"])
    exp.pace.load_state_dict(shared["fleet"])
    exp.trainer.load_state_dict(own["trainer"])
    collector, seed = own["collector"], exp.ctx.seed_of("train_envs", exp.epoch)
    goes_on = False
    if exp.collector is not None and collector["state"] is not None:
        goes_on = exp.collector.load_state_dict(collector["state"], seed=seed)
    # All fits: only now files are touched.
    exp.checkpoints.go_on_with(state.metadata["run_id"])
    if "dataset" in shared:
        if exp.mode == "both" and exp.accelerator.is_main_process and exp.has_dset_edit_rights:
            exp.dataset.set_aside_newer(shared["dataset"])
        exp.accelerator.wait_for_everyone()
        exp.dataset.load_state_dict(shared["dataset"])
    restore_rng_state(own["rng"])
    if not goes_on and exp.collector is not None and collector["is_collecting"]:
        exp.restart_train_envs(exp.epoch)


# ---- other runs ----


def restore_if_asked(exp: Experiment) -> None:
    """Begin from what restore_from names: a training state goes on, policy weights are learned on from.

    A training state of another run starts a new branch; see `as_branch`. A collecting process follows the
    learner's weights and restores nothing.

    Raises: FileNotFoundError, listing what exists; ValueError if it does not fit this run.
    """
    if exp.restore_from is None or exp.mode == "collect":
        return
    with _fetched(exp, exp.restore_from, "restore_from") as (path, run):
        is_state = path.is_dir()
        if is_state and run != exp.run_name:
            exp.hooks.around("load_checkpoint", lambda: load(exp, path, is_branch=True))
        else:
            exp.load_checkpoint_from_path(path, is_state)
    if exp.accelerator.is_main_process:
        began = f"the training state, at epoch {exp.epoch}" if is_state else "the weights"
        logger.info("Restored %s, from %s.", began, exp.restore_from)


def warm_start_if_asked(exp: Experiment) -> None:
    """Begin a new run with those weights of another one that fit; says which do and which do not.

    Counters and optimizer are new. A collecting process follows its learner's weights instead.

    Raises: FileNotFoundError; ValueError if the environment is another one, or nothing fits.
    """
    if exp.warm_start is None or exp.mode == "collect":
        return
    with _fetched(exp, exp.warm_start, "warm_start") as (path, _):
        found = warm_start(exp.policy, path, exp.env_spaces)
        logger.info("Warm start from %s: %s.", exp.warm_start, found)


def _fetched(exp: Experiment, reference: str, name: str) -> AbstractContextManager[tuple[Path, str | None]]:
    return fetched(
        reference,
        store=exp.artifacts.store,
        run_name=exp.run_name,
        ckpts=exp.checkpoints.root,
        accelerator=exp.accelerator,
        say=exp.ctx.console.say,
        name=name,
    )
