"""`--check`: build the whole experiment in a temporary folder, try all of it, train nothing."""

from __future__ import annotations

import tempfile
from typing import Any

import gin
import torch

from . import building
from .config import LoadedConfig, check_all_used
from .experiment import Experiment
from .onpolicy_settings import is_on_policy
from .test_mode import FEW_STEPS, TINY


def dry_run(config: LoadedConfig) -> str:
    """Build, collect and evaluate a few steps, compute the losses of one batch; returns a report.

    Everything is written to a temporary folder that is removed. gin's configuration is changed for that, so
    load it again before a real run.
    """
    with tempfile.TemporaryDirectory(prefix="loxodon-check-") as folder:
        _redirect(config, folder)
        exp = Experiment()  # type: ignore[call-arg]  # gin supplies the arguments
        if not is_on_policy(exp.agent_type):  # whose sequences and minibatches need a whole rollout
            exp.train_timesteps_per_epoch = FEW_STEPS
        try:
            exp.start()
            unused = check_all_used(config)
            report = [building.summarize(exp, building.describe_envs(exp)), *_try_everything(exp)]
            if unused:
                report.append(f"        note  {unused}")
        finally:
            if hasattr(exp, "metric_logger"):
                exp.close()
    return "\n".join([*report, "check passed: everything could be built, nothing was trained"])


def _redirect(config: LoadedConfig, folder: str) -> None:
    """Settings that make the run tiny and keep it inside `folder`."""
    settings: dict[str, Any] = {
        **TINY,
        "ckpt_base_dir": folder,
        "verbose": False,
        "val_timesteps_per_epoch": FEW_STEPS,
    }
    for name, value in settings.items():
        gin.bind_parameter(f"Experiment.{name}", value)
    for node in config.nodes_with("dset_root"):
        gin.bind_parameter(("/".join(node.scope), node.configurable.selector, "dset_root"), folder)


def _try_everything(exp: Experiment) -> list[str]:
    """One line per part that worked."""
    if exp.on_policy is not None:
        exp.on_policy.set_random_steps(0)  # the only rollout is learned from
    exp.collect_new_training_data()
    lines = [f"   collected  {exp.env_steps} env steps"]
    if exp.val_envs is not None:
        exp.interact(exp.val_envs, FEW_STEPS)
        lines.append(f"   evaluated  {FEW_STEPS} steps in each validation environment")
    assert exp.collector is not None
    exp.collector.flush()
    if exp.on_policy is not None:
        exp.learner.lr_scale = 0.0
        figures = exp.on_policy.train(0)
        found = ", ".join(f"{name} {figures[name]:.4g}" for name in ("loss", "initial_logratio_abs_max"))
        return [*lines, f"      losses  {found} with untrained weights"]
    exp.dataset.refresh()
    if not exp.dataset.ready_for_training:
        return [*lines, "       batch  not tried, because the dataset is not ready for training"]
    batch = next(iter(exp.loader.epoch(0, 1))).to(exp.DEVICE)
    with torch.no_grad():
        losses = exp.compute_loss(batch, log_step=False)
    loss = float(losses["Actor Loss"] + exp.critic_loss_weight * losses["Critic Loss"])
    shapes = ", ".join(f"{name} {tuple(obs.shape)}" for name, obs in batch.obs.items())
    lines.append(
        f"       batch  {shapes}, actions {tuple(batch.actions.shape)}, mask {tuple(batch.mask.shape)}"
    )
    return [*lines, f"        loss  {loss:.4g} with untrained weights"]
