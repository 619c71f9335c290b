"""The rollout: environments, the agent that acts in them, and the loop that steps them."""

from .collector import Collector, RolloutGroup, RolloutState, StageTimer

__all__ = ["Collector", "RolloutGroup", "RolloutState", "StageTimer"]
