"""The collecting part of an epoch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .distributed import gather, merge_episodes
from .fleet import pacing

if TYPE_CHECKING:
    from .experiment import Experiment


def collect(exp: Experiment) -> dict[str, float]:
    """Go on with the training rollout; see Experiment.collect_new_training_data."""
    collector = exp.collector
    if collector is None:
        raise ValueError(
            f"Nothing can be collected: mode is {exp.mode!r} and train_timesteps_per_epoch "
            f"{exp.train_timesteps_per_epoch}. Fix: use mode 'both' or 'collect' and a positive number."
        )
    exp.hooks("before_play_steps")
    every = exp.force_reset_train_envs_every
    if collector.state is None or (every is not None and exp.epoch > 0 and exp.epoch % every == 0):
        exp.restart_train_envs(exp.epoch)
    exp.policy.eval()
    loaded = exp.loaded_policy
    version = exp.policy_version if loaded is None else loaded.version
    collector.set_policy_version(version)
    exp.fleet.put(policy_version=version)
    exp.fleet.state("collecting")
    start_s = time.perf_counter()
    taken = collector.collect(exp.train_timesteps_per_epoch)
    collector.wait()
    elapsed_s = time.perf_counter() - start_s
    exp.timer.num_env_steps += taken
    taken = sum(gather(taken, exp.accelerator))  # all processes; a stopped one took fewer
    exp.env_steps += taken
    metrics = merge_episodes(collector.histories, exp.accelerator).summary("collect")
    collector.histories.clear()
    metrics |= pacing.actor_figures(exp)
    speed = {"time/collect_s": elapsed_s, "time/env_steps_per_s": taken / elapsed_s}
    exp.log({**metrics, **speed, **exp.timer.step_figures(exp.parallel_actors)})
    if "collect/return" in metrics:
        exp.view.show(exp.epoch, "collecting", {"return": metrics["collect/return"]})
    return metrics
