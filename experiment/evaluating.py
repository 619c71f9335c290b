"""Rollouts that measure the policy: validation, tests, and interaction for its own sake."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..envs import Histories
from . import building
from .checkpoint.policy_file import PolicyInfo
from .collector import Collector
from .distributed import any_process

if TYPE_CHECKING:
    from .experiment import Experiment
    from .settings import MakeEnv


def interact(
    exp: Experiment,
    envs: Any,
    timesteps: int,
    hidden_state: Any,
    render: bool,
    save_on_done: bool | str,
    episodes: int | None,
) -> tuple[Any, Histories]:
    """Roll out; see Experiment.interact."""
    folder = exp.dataset.save_new_trajs_to if save_on_done is True else (save_on_done or None)
    writer = None if folder is None else building.make_writer(exp, Path(folder), envs.num_envs, "interact")
    before = exp.interaction if hidden_state is not None else None
    if before is not None and before.envs is not envs:
        before = None
    histories = Histories.create(envs.num_envs) if before is None else copy.deepcopy(before.histories)
    histories.clear()
    sample = exp.sample_actions if exp.sample_actions_val is None else exp.sample_actions_val
    collector = Collector(
        envs,
        exp.policy,
        exp.DEVICE,
        None,
        writer,
        histories,
        sample,
        should_stop=exp.stop.requested,
        cast=exp.caster,
    )
    was_training = exp.policy.training
    exp.policy.eval()
    if before is not None and before.state is not None:
        collector.go_on_from(before.state)
    else:
        # Drawn from torch's generator, so that whoever seeds that one decides the episodes too.
        collector.restart(int(torch.randint(2**31 - 1, ())))
    assert collector.state is not None
    if hidden_state is not None:
        collector.state.hidden_state = hidden_state
    collector.collect(timesteps, episodes=episodes, render=render)
    exp.interaction = collector
    exp.policy.train(was_training)
    if writer is not None:
        writer.close()
    return collector.state.hidden_state, histories


def evaluate_val(exp: Experiment) -> dict[str, float]:
    """Evaluate and log; see Experiment.evaluate_val."""
    if exp.val_envs is None:
        exp.val_envs = building.make_envs(exp, exp.make_val_env)
    exp.fleet.state("evaluating")
    start_s = time.perf_counter()
    exp.hooks("on_eval_start")
    seed = building.stream_seed(exp, "val", exp.epoch)
    metrics = exp.evaluator.evaluate(
        exp.val_envs,
        exp.val_timesteps_per_epoch,
        seed=seed,
        episodes=exp.parallel_actors if exp.test_run else None,
    )
    # Cut short, the figures would favour short episodes.
    if any_process(exp.stop.requested(), exp.accelerator):
        return {}
    named = {f"val/{name}": value for name, value in metrics.items()}
    exp.last_val_metrics = named
    if named:
        exp.log({**named, "time/val_s": time.perf_counter() - start_s})
    score = metrics.get("return")
    if score is not None:
        exp.view.show(exp.epoch, "evaluating", {"val return": score})
    exp.hooks("on_eval_end", named)
    return named


def keep_if_best(exp: Experiment, figures: Mapping[str, Any]) -> None:
    """Keep the present policy if figures that were just logged make it the best one."""
    # Whoever only measures, before training or saving anything, leaves the folder alone.
    keeps_best = exp.mode != "collect" and exp.checkpoints.has_begun
    score = exp.checkpoints.better_score(figures, exp.best_score) if keeps_best else None
    if score is None:
        return
    exp.best_score = score
    if exp.accelerator.is_main_process:
        info = PolicyInfo(exp.policy_version, exp.epoch, False)
        exp.checkpoints.save_policy(exp.checkpoints.best_path, exp.policy, info)
        exp.artifacts.store_best(exp.checkpoints.best_path)


def evaluate_test(
    exp: Experiment,
    make_test_env: MakeEnv | Sequence[MakeEnv],
    timesteps: int,
    render: bool,
    save_trajs_to: str | None,
    episodes: int | None,
) -> dict[str, float]:
    """Evaluate in new environments; see Experiment.evaluate_test."""
    envs = building.make_envs(exp, make_test_env)
    exp.hooks("on_eval_start")
    try:
        seed = building.stream_seed(exp, "test")
        metrics = exp.evaluator.evaluate(
            envs, timesteps, seed=seed, render=render, save_trajs_to=save_trajs_to, episodes=episodes
        )
    finally:
        envs.close()
    if any_process(exp.stop.requested(), exp.accelerator):
        return {}
    named = {f"test/{name}": value for name, value in metrics.items()}
    exp.log(named)
    exp.hooks("on_eval_end", named)
    return named
