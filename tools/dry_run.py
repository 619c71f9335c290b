"""`--check`: build the whole experiment in a temporary folder and try all its parts without training."""

from __future__ import annotations

import tempfile

import gin

from ..experiment.collect.build import describe_envs
from ..experiment.config import LoadedConfig
from ..experiment.experiment import Experiment
from ..experiment.settings import FEW_STEPS, fields_with, is_on_policy, keep_in_own_folder


def dry_run(config: LoadedConfig) -> str:
    """Build, collect and evaluate a few steps, compute the losses of one batch; returns a report.

    Everything is written to a temporary folder that is then removed. This changes gin's configuration, so
    load it again before a real run.
    """
    with tempfile.TemporaryDirectory(prefix="loxodon-check-") as folder:
        settings = {
            **fields_with("tried"),
            "ckpt_base_dir": folder,
            "verbose": False,
            "val_timesteps_per_epoch": FEW_STEPS,
        }
        for name, value in settings.items():
            gin.bind_parameter(f"Experiment.{name}", value)
        for name in ("Artifacts.store", "WarmStart.source"):
            gin.bind_parameter(name, None)
        exp = Experiment()  # type: ignore[call-arg]  # gin supplies the arguments
        if not is_on_policy(exp.agent_type):  # on-policy sequences and minibatches need a whole rollout
            exp.train_timesteps_per_epoch = FEW_STEPS
        keep_in_own_folder(exp.dataset)
        try:
            exp.start()
            unused = config.check_unused()
            exp.collect_new_training_data()
            report = [exp.describe(describe_envs(exp.train_envs, exp.env_mode))]
            report.append(f"   collected  {exp.env_steps} env steps")
            if exp.val_envs is not None:
                exp.interact(exp.val_envs, FEW_STEPS)
                report.append(f"   evaluated  {FEW_STEPS} steps in each validation environment")
            assert exp.collector is not None
            exp.collector.flush()
            report += exp.trainer.try_once()
            if unused:
                report.append(f"        note  {unused}")
        finally:
            exp.close()
    return "\n".join([*report, "check passed: everything was built, nothing was trained"])
