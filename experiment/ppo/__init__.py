"""On-policy training: the rollout buffer, sequences, and PPO's updates."""

from .buffer import RolloutBuffer
from .kl_adaptive import KLAdaptiveLR
from .trainer import PPOLearner

__all__ = ["KLAdaptiveLR", "PPOLearner", "RolloutBuffer"]
