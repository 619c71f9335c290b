"""Exact resume: what a checkpoint holds beside the weights, and how a run is put back to it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate.utils import broadcast_object_list

from .checkpoints import TrainingState
from .metadata import check_metadata, describe_run
from .policy_files import load_weights
from .rng import derive_seed, host_rng_state, restore_host_rng_state, restore_torch_rng_state, torch_rng_state
from .rollout_state import capture_rollout, is_storable, restore_rollout, warn_of_cut_episodes

if TYPE_CHECKING:
    from .experiment import Experiment

logger = logging.getLogger("loxodon")
FORMAT_VERSION = 4


def capture(exp: Experiment, next_epoch: int) -> TrainingState:
    """Everything this process needs to go on with `next_epoch`."""
    return TrainingState(
        trainer=exp.learner.state_dict(),
        shared={
            "format_version": FORMAT_VERSION,
            "next_epoch": next_epoch,
            "env_steps": exp.env_steps,
            "seed": exp.ctx.progress.seed,
            "run_id": exp.checkpoints.run_id,
            "policy_version": exp.ctx.progress.policy_version,
            "best_score": exp.ctx.progress.best_score,
            "best_by": exp.checkpoints.best_by,
            "is_finished": exp.ctx.progress.is_finished,
            "dataset": exp.dataset.state_dict(),
            "logs": exp.metric_logger.state_dict(),
            "fleet": exp.pace.state_dict(),
            "callbacks": exp.hooks.state_dict(),
        },
        rank_tensors={
            **torch_rng_state(),
            "rollout": capture_rollout(exp),
            "collector": None if exp.collector is None else exp.collector.state_dict(),
        },
        rank_values={
            "host_rng": host_rng_state(),
            "trainer": exp.trainer.state_dict(),
            "is_collecting": exp.collector is not None and exp.collector.state is not None,
        },
        metadata=describe_run(exp),
    )


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
    restarts = exp.exact_resume and collector is not None and not is_storable(exp)
    if collector is not None and (restarts or not exp.has_dset_edit_rights):
        collector.flush()  # without rights nobody sets files aside that repeat what the checkpoint holds
    elif collector is not None:
        collector.wait()
    exp.accelerator.wait_for_everyone()
    exp.hooks("on_save_checkpoint_start")
    exp.dataset.refresh()
    state = capture(exp, next_epoch)
    state.metadata["is_interim"] = is_interim
    exp.checkpoints.write_rank_files(epoch, state)
    exp.accelerator.wait_for_everyone()
    folder = None
    if exp.accelerator.is_main_process:
        folder = exp.checkpoints.commit(epoch, exp.policy, state)
        if not is_interim:
            exp.artifacts.store_state(exp, folder, epoch)
        if not exp.checkpoints.config_path.exists():  # somebody deleted the folder
            exp.store_config()
        exp.checkpoints.prune(exp.keep_checkpoints, exp.keep_every_epochs)
    exp.accelerator.wait_for_everyone()
    exp.hooks("on_save_checkpoint_end")
    if restarts and goes_on and collector is not None and collector.state is not None:
        warn_of_cut_episodes(exp)
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


def load(exp: Experiment, folder: Path) -> None:
    """Put the whole run back to the checkpoint in `folder`.

    Raises: FileNotFoundError if it is missing or incomplete; ValueError if it is damaged or does not fit.
    """
    state = exp.checkpoints.read(folder)
    check_metadata(exp, state.metadata, f"the checkpoint {folder}")
    load_weights(exp.policy, folder / "model.safetensors")
    restore(exp, state)


def restore(exp: Experiment, state: TrainingState) -> None:
    """Put the whole run back to a checkpoint whose weights are loaded already."""
    shared, own = state.shared, state.rank_values
    if shared["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"The checkpoint has format version {shared['format_version']}, this Loxodon reads "
            f"{FORMAT_VERSION}. Fix: use the version of Loxodon that wrote it, or load the weights only "
            "(resume_training_state=False)."
        )
    exp.learner.load_state_dict(state.trainer)
    if exp.seed is not None and exp.seed != shared["seed"]:
        logger.warning(
            "The checkpoint belongs to seed %d; Experiment.seed = %d is set aside.", shared["seed"], exp.seed
        )
    exp.epoch, exp.env_steps = int(shared["next_epoch"]), int(shared["env_steps"])
    is_same_figure = shared.get("best_by", "val/return") == exp.checkpoints.best_by
    exp.ctx.progress.policy_version = int(shared["policy_version"])
    exp.ctx.progress.best_score = shared["best_score"] if is_same_figure else None
    exp.ctx.progress.is_finished = bool(shared["is_finished"])
    exp.metric_logger.load_state_dict(shared["logs"])
    exp.hooks.load_state_dict(shared.get("callbacks", {}))
    exp.pace.load_state_dict(shared["fleet"])
    if exp.ctx.progress.seed != int(shared["seed"]):
        exp.ctx.progress.seed = int(shared["seed"])
        exp.loader.reseed(derive_seed(exp.ctx.progress.seed, "loader"))
    exp.trainer.load_state_dict(own["trainer"])
    tensors, seed = state.rank_tensors, exp.ctx.seed_of("train_envs", exp.epoch)
    goes_on = restore_rollout(exp, tensors["rollout"], seed)
    if exp.collector is not None and tensors["collector"] is not None:
        exp.collector.load_state_dict(tensors["collector"])
    # All fits: only now files are touched.
    exp.checkpoints.go_on_with(shared.get("run_id", ""))
    if exp.mode == "both" and exp.accelerator.is_main_process and exp.has_dset_edit_rights:
        exp.dataset.set_aside_newer(shared["dataset"])
    exp.accelerator.wait_for_everyone()
    exp.dataset.load_state_dict(shared["dataset"])
    restore_host_rng_state(own["host_rng"])
    restore_torch_rng_state(tensors)
    if not goes_on and exp.collector is not None and own["is_collecting"]:
        exp.restart_train_envs(exp.epoch)
