"""`--check`: a test run of the whole experiment in a temporary folder."""

from __future__ import annotations

import tempfile

import gin

from ..experiment.collect.build import describe_envs
from ..experiment.config import LoadedConfig
from ..experiment.experiment import Experiment


def dry_run(config: LoadedConfig) -> str:
    """Build, collect, train, evaluate and save once, with tiny numbers; returns a report.

    Everything is written to a temporary folder that is then removed. This changes gin's configuration, so
    load it again before a real run.
    """
    with tempfile.TemporaryDirectory(prefix="loxodon-check-") as folder:
        settings = {"test_run": True, "ckpt_base_dir": folder, "verbose": False}
        for name, value in settings.items():
            gin.bind_parameter(f"Experiment.{name}", value)
        exp = Experiment()  # type: ignore[call-arg]  # gin supplies the arguments
        try:
            exp.start()
            notes = config.check_unused()
            exp.learn()
            report = exp.describe(describe_envs(exp.train_envs, exp.env_mode))
        finally:
            exp.close()
    note = [f"        note  {notes}"] if notes else []
    return "\n".join([report, *note, f"check passed: {work_of(exp)}; the temporary folder is removed"])


def work_of(exp: Experiment) -> str:
    """The work that a test run has done, on one line."""
    updates = exp.learner.gradient_steps
    trained = f"{updates} updates" if updates else "no update (the dataset was not ready for training)"
    return f"{exp.env_steps} env steps, {trained}, one checkpoint"
