"""Settings of Experiment that an on-policy agent reads in another way, or not at all."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from typing import TYPE_CHECKING, Any

from ..agents import OnPolicyAgent

if TYPE_CHECKING:
    from .experiment import Experiment
    from .onpolicy import PPOLearner

logger = logging.getLogger("loxodon")
_UNREAD = (
    "batch_size",
    "exploration_wrapper_type",
    "log_interval",
    "padded_sampling",
    "replay_ratio_tolerance",
    "train_batches_per_epoch",
)


def is_on_policy(agent_type: Any) -> bool:
    """Whether the agent will be one that learns from its newest rollout; False where that cannot be told."""
    while isinstance(agent_type, functools.partial):
        agent_type = agent_type.func
    agent_type = inspect.unwrap(agent_type)
    return isinstance(agent_type, type) and issubclass(agent_type, OnPolicyAgent)


def check_learner(experiment: Experiment, learner: PPOLearner) -> None:
    """Warn of settings that differ from their default without a meaning for the on-policy agent.

    Raises: ValueError if two settings want to set the learning rate.
    """
    if learner.lr_adapter is not None and experiment.lr_schedule is not None:
        raise ValueError(
            "Both Experiment.lr_schedule and PPOLearner.lr_adapter are bound, but only one can set the "
            "learning rate. Fix: set Experiment.lr_schedule = None or PPOLearner.lr_adapter = None."
        )
    # None is what an on-policy agent does anyway. A test run has set most of them itself.
    unread = {f.name: f.default for f in dataclasses.fields(experiment) if f.name in _UNREAD}
    changed = [name for name, default in unread.items() if getattr(experiment, name) not in (default, None)]
    if changed and not experiment.test_run:
        logger.warning(
            "Settings of Experiment that have no meaning for the on-policy agent %s, which trains on each "
            "rollout as PPOLearner says: %s.",
            type(experiment.policy).__name__,
            ", ".join(sorted(changed)),
        )
