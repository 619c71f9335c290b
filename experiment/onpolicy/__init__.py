"""On-policy training: the rollout buffer, sequences, and PPO's updates."""

from .buffer import RolloutBuffer
from .kl_adaptive import KLAdaptiveLR
from .ppo_learner import PPOLearner

__all__ = ["KLAdaptiveLR", "PPOLearner", "RolloutBuffer"]
