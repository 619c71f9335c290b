"""Hooks of an agent that act on a rollout, and checks of their results.

They are methods of `BaseAgent`. Hooks that an agent's class does not override are never called.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from gymnasium import spaces

from .base import BaseAgent

Arrays = dict[str, np.ndarray]
REWARD_TERM = "reward/"
"""Prefix of the metrics of a step that are terms of its reward."""


class RolloutHooks:
    """The hooks that the class of an agent overrides.

    Attributes:
        adds_to_obs, ends_episodes, combines_rewards: True if the hook is overridden.

    Args:
        agent: an agent of this class, which may differ from the one that acts.
        env_keys: names of the environment's observations.
    Raises: ValueError if the agent adds to observations, but its obs_space does not declare them.
    """

    def __init__(self, agent: Any, env_keys: Collection[str]) -> None:
        self.ends_episodes = _overrides(agent, "post_env_step_modifications")
        self.combines_rewards = _overrides(agent, "combine_rewards")
        self.adds_to_obs = _overrides(agent, "add_agent_info_to_obs")
        self._name, self._added = type(agent).__name__, dict[str, spaces.Space[Any]]()
        if self.adds_to_obs:
            self._added = {key: s for key, s in agent.obs_space.spaces.items() if key not in env_keys}
            if not self._added:
                raise ValueError(
                    f"{self._name} has its own add_agent_info_to_obs, but its obs_space has only the "
                    f"environment's own entries {sorted(env_keys)}. Fix: give BaseAgent's constructor an "
                    "obs_space with the entries that the agent adds."
                )

    def info(self, agent: BaseAgent, obs: Arrays, before: Arrays | None, is_first: np.ndarray) -> Arrays:
        """The agent's entries in observations; see `BaseAgent.add_agent_info_to_obs`.

        before: observations of the previous timestep; the agent sees only its own entries.
        """
        own = None if before is None else {key: before[key] for key in self._added}
        found = agent.add_agent_info_to_obs(obs, own, is_first)
        wanted = {key: (len(is_first), *(space.shape or ())) for key, space in self._added.items()}
        shapes = {key: np.shape(value) for key, value in found.items()}
        if shapes != wanted:
            raise ValueError(
                f"{self._name}.add_agent_info_to_obs returned arrays of shapes {shapes}, but its obs_space "
                f"says {wanted}. Fix: return arrays of exactly these shapes, with the environments as the "
                "first axis."
            )
        return {key: np.array(found[key], dtype=space.dtype) for key, space in self._added.items()}

    def flags(
        self,
        agent: BaseAgent,
        obs: Arrays,
        rewards: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The flags of a step; see `BaseAgent.post_env_step_modifications`."""
        given = terminated.copy(), truncated.copy()
        found = tuple(np.asarray(flag) for flag in agent.post_env_step_modifications(obs, rewards, *given))
        is_right = [flag.shape == terminated.shape and flag.dtype == np.bool_ for flag in found]
        if is_right != [True, True] or (~(found[0] | found[1]) & (terminated | truncated)).any():
            raise ValueError(
                f"{self._name}.post_env_step_modifications returned {found}, but must return terminated and "
                f"truncated, both bool {terminated.shape}, and must not continue ended episodes. Fix: return "
                "terminated | more, truncated."
            )
        return found[0], found[1]

    def combined(
        self, agent: BaseAgent, rewards: np.ndarray, metrics: Iterable[tuple[int, str, Any]]
    ) -> np.ndarray:
        """The rewards to learn from; see `BaseAgent.combine_rewards`. metrics: (row, name, value)."""
        terms: Arrays = {}
        for row, name, value in metrics:
            if name.startswith(REWARD_TERM):
                term = terms.setdefault(name[len(REWARD_TERM) :], np.zeros_like(rewards))
                term[row] += np.sum(value, dtype=np.float32)
        found = np.asarray(agent.combine_rewards(rewards.copy(), terms))
        if found.shape != rewards.shape or not np.isfinite(found).all():
            raise ValueError(
                f"{self._name}.combine_rewards returned {found} for the rewards {rewards} and the terms "
                f"{terms}, but must return one finite number per environment, {rewards.shape}. Fix: return "
                "rewards + 0.1 * terms['name'], for example."
            )
        return found.astype(np.float32)


def _overrides(agent: Any, hook: str) -> bool:
    own = getattr(type(agent), hook, None)
    return own is not None and own is not getattr(BaseAgent, hook)
