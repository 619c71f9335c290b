"""Settings of Experiment that an on-policy agent reads in another way, or not at all."""

from __future__ import annotations

import functools
import inspect
import logging
from typing import TYPE_CHECKING, Any

import gin

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
    """Warn of settings that are bound in gin without a meaning for the on-policy agent.

    Raises: ValueError if two settings want to set the learning rate.
    """
    if learner.lr_adapter is not None and experiment.lr_schedule is not None:
        raise ValueError(
            "Both Experiment.lr_schedule and PPOLearner.lr_adapter are bound, but only one can set the "
            "learning rate. Fix: set Experiment.lr_schedule = None or PPOLearner.lr_adapter = None."
        )
    bound = [name for name in _UNREAD if _binding(f"Experiment.{name}") is not None]
    if bound:
        logger.warning(
            "Settings of Experiment that have no meaning for the on-policy agent %s, which trains on each "
            "rollout as PPOLearner says: %s.",
            type(experiment.policy).__name__,
            ", ".join(bound),
        )


def _binding(name: str) -> Any:
    """What gin binds a parameter to; None without a binding."""
    try:
        return gin.query_parameter(name)
    except ValueError:
        return None
