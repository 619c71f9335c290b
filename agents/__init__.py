"""Agents: acting, losses, and the pure objective functions behind them."""

if __name__ == "agents":
    raise ImportError(
        "Import this as 'loxodon.agents', not 'agents': a second copy would break isinstance and gin. "
        "Fix: pip install -e ."
    )

from .advantages import AdvantageNorm
from .agent import Agent
from .base import ActOutput, BaseAgent, LossTerms
from .filters import binary_filter, exp_filter, leaky_relu_filter
from .gae import GAE, gae
from .imitation import Demonstrations, imitation_loss
from .objectives import masked_mean, n_step_targets
from .on_policy import Evaluation, OnPolicyAgent
from .ppo import PPOAgent
from .ppo_loss import PPOLoss
from .rewards import RewardNormalizer
from .schedules import ConstantSchedule, CosineSchedule, LinearSchedule, Schedule, value_at

__all__ = [
    "GAE",
    "ActOutput",
    "AdvantageNorm",
    "Agent",
    "BaseAgent",
    "ConstantSchedule",
    "CosineSchedule",
    "Demonstrations",
    "Evaluation",
    "LinearSchedule",
    "LossTerms",
    "OnPolicyAgent",
    "PPOAgent",
    "PPOLoss",
    "RewardNormalizer",
    "Schedule",
    "binary_filter",
    "exp_filter",
    "gae",
    "imitation_loss",
    "leaky_relu_filter",
    "masked_mean",
    "n_step_targets",
    "value_at",
]
