"""Agents: acting, losses, and the pure objective functions behind them."""

if __name__ == "agents":
    raise ImportError(
        "Import this as 'loxodon.agents', not 'agents': a second copy would break isinstance and gin. "
        "Fix: pip install -e ."
    )

from .advantages import AdvantageNorm
from .agent import Agent
from .base import ActOutput, BaseAgent, LossTerms
from .bc import BCAgent
from .dqn import DQNAgent
from .filters import binary_filter, exp_filter, leaky_relu_filter
from .gae import GAE, gae
from .imitation import Demonstrations, imitation_loss
from .iql import IQLAgent
from .masks import fit_mask, masked_mean
from .multi_task import MultiTaskAgent
from .off_policy import OffPolicyAgent, Values
from .on_policy import Evaluation, OnPolicyAgent
from .parts import (
    ActByReturn,
    FixedUnits,
    LambdaReturns,
    NStep,
    PlainValues,
    PopArt,
    RandomSubset,
    Retrace,
    SummedValues,
    WeighByAdvantage,
    lambda_returns,
    n_step_targets,
    retrace_targets,
)
from .ppo import PPOAgent
from .ppo_loss import PPOLoss
from .rewards import RewardNormalizer
from .rollout_hooks import RolloutHooks
from .sac import SACAgent
from .schedules import (
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    Schedule,
    TorchSchedule,
    value_at,
)

__all__ = [
    "GAE",
    "ActByReturn",
    "ActOutput",
    "AdvantageNorm",
    "Agent",
    "BCAgent",
    "BaseAgent",
    "ConstantSchedule",
    "CosineSchedule",
    "DQNAgent",
    "Demonstrations",
    "Evaluation",
    "FixedUnits",
    "IQLAgent",
    "LambdaReturns",
    "LinearSchedule",
    "LossTerms",
    "MultiTaskAgent",
    "NStep",
    "OffPolicyAgent",
    "OnPolicyAgent",
    "PPOAgent",
    "PPOLoss",
    "PlainValues",
    "PopArt",
    "RandomSubset",
    "Retrace",
    "RewardNormalizer",
    "RolloutHooks",
    "SACAgent",
    "Schedule",
    "SummedValues",
    "TorchSchedule",
    "Values",
    "WeighByAdvantage",
    "binary_filter",
    "exp_filter",
    "fit_mask",
    "gae",
    "imitation_loss",
    "lambda_returns",
    "leaky_relu_filter",
    "masked_mean",
    "n_step_targets",
    "retrace_targets",
    "value_at",
]
