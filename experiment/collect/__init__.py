"""The rollout: environments, the agent that acts in them, and what takes the steps."""

from .collector import Collector, RolloutGroup, RolloutState, StageTimer

__all__ = ["Collector", "RolloutGroup", "RolloutState", "StageTimer"]
