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
from .objectives import masked_mean
from .off_policy import OffPolicyAgent
from .on_policy import Evaluation, OnPolicyAgent
from .ppo import PPOAgent
from .ppo_loss import PPOLoss
from .rewards import RewardNormalizer
from .schedules import ConstantSchedule, CosineSchedule, LinearSchedule, Schedule, value_at
from .targets import lambda_returns, n_step_targets, retrace_targets

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
    "OffPolicyAgent",
    "OnPolicyAgent",
    "PPOAgent",
    "PPOLoss",
    "RewardNormalizer",
    "Schedule",
    "binary_filter",
    "exp_filter",
    "gae",
    "imitation_loss",
    "lambda_returns",
    "leaky_relu_filter",
    "masked_mean",
    "n_step_targets",
    "retrace_targets",
    "value_at",
]
