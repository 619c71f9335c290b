"""The rollout: environments, the agent that acts in them, and what takes the steps."""

from .collector import Collector, Group, RolloutState, StageTimer

__all__ = ["Collector", "Group", "RolloutState", "StageTimer"]
