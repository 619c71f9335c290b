"""`--check`: a test run of the whole experiment in a temporary folder."""

from __future__ import annotations

import dataclasses
import tempfile

import gin

from ..experiment.collect.build import describe_envs
from ..experiment.config import LoadedConfig
from ..experiment.experiment import Experiment


def dry_run(config: LoadedConfig) -> str:
    """Build, collect, train, evaluate and save once, with tiny numbers; returns a report.

    Everything is written to a temporary folder that is then removed. This changes gin's configuration, so
    load it again before a real run.

    Raises: ValueError if the run makes no update because its data are too few and it collects none.
    """
    for name, value in {"test_run": True, "verbose": False}.items():
        gin.bind_parameter(f"Experiment.{name}", value)
    with tempfile.TemporaryDirectory(prefix="loxodon-check-") as folder:
        exp = Experiment()  # type: ignore[call-arg]  # gin supplies the arguments
        # Its dataset knows the real folder already.
        exp = dataclasses.replace(exp, ckpt_base_dir=folder, run_name=exp.run_name.removesuffix("-test"))
        try:
            exp.start()
            notes = config.check_unused(exp.unread_parts)
            exp.learn()
            problem = lack_of_data(exp)
            if problem:
                raise ValueError(problem)
            report = exp.describe(describe_envs(exp.train_envs, exp.env_mode))
        finally:
            exp.close()
    note = [f"        note  {notes}"] if notes else []
    return "\n".join([report, *note, f"check passed: {work_of(exp)}; the temporary folder is removed"])


def lack_of_data(exp: Experiment) -> str:
    """Why a run made no update, with `Fix:`; "" if it made one, or is only too short as a test run."""
    is_too_short = exp.test_run and exp.collector is not None
    if not exp.trainer.idle_epochs or exp.learner.gradient_steps or is_too_short:
        return ""
    return f"This run made no update. {exp.why_idle()}"


def work_of(exp: Experiment) -> str:
    """The work that a test run has done, on one line."""
    updates = exp.learner.gradient_steps
    trained = f"{updates} updates" if updates else "no update (the dataset was not ready for training)"
    return f"{exp.env_steps} env steps, {trained}, one checkpoint"
