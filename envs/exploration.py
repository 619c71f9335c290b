"""Exploration noise for all environments of a vector environment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import gin
import numpy as np
from gymnasium import spaces

from ..data.errors import check_count, check_number
from ..data.spaces import PolicyActionSpace

_CODE_SUPPLIED = ["action_space", "num_envs", "seed"]
_BLOCK_STEPS = 64  # vector steps per block of random numbers, since single draws cost more


class ExplorationWrapper(ABC):
    """Adds noise to the policy's actions while training data are collected.

    Subclasses return one noise level per environment from `noise_levels`. Discrete actions are replaced by
    uniform ones with that probability (with several factors, all are replaced together). Continuous actions
    get Gaussian noise with that standard deviation, clipped to [-1, 1].

    Noise can be held for several steps: independent random actions cancel out if progress takes several
    similar ones in a row, as on a swing or in a corridor. Random actions then begin less often, so that the
    noise level remains the fraction of random actions.

    Source of held noise: Dabney et al. 2021, arXiv:2006.01782, here with a geometric duration.

    Args:
        action_space: the policy's, Discrete or MultiDiscrete from zero, or Box(-1, 1, (A,)).
        num_envs: number N of parallel environments.
        seed: seed of the noise.
        randomize_eps: multiply each environment's noise level by a number from [0, 1), drawn uniformly for
            each episode.
        mean_repeat: mean number of env steps, at least 1, for which a random action (for a Box, the added
            noise) is held within an episode.
        randomize_repeat: draw that mean anew for each environment and episode, log-uniformly from 1 to
            `mean_repeat`: some tasks need held noise, and in others it ends episodes early.

    Attributes:
        num_calls: number of vector steps so far, which schedules depend on.
        steps_per_call: number of vector steps that a call counts as. With the number of processes that
            explore alike, a schedule takes the same number of env steps for any number of them.
    """

    def __init__(
        self,
        action_space: PolicyActionSpace,
        num_envs: int,
        seed: int,
        randomize_eps: bool = True,
        mean_repeat: float = 1.0,
        randomize_repeat: bool = True,
    ) -> None:
        check_number(f"{type(self).__name__}.mean_repeat", mean_repeat, lowest=1)
        self.action_space, self.num_envs, self.randomize_eps = action_space, num_envs, randomize_eps
        self.mean_repeat, self.randomize_repeat = mean_repeat, randomize_repeat and mean_repeat > 1.0
        dtype = np.float64 if isinstance(action_space, spaces.Box) else np.int64
        self._is_held = np.zeros(num_envs, bool)
        self._held: np.ndarray = np.zeros((num_envs, *(action_space.shape or ())), dtype)
        self._goes_on, self._begin = np.zeros(num_envs, bool), np.zeros(num_envs)  # used by `probability`
        num_actions = _num_actions(action_space)
        self._log_uniform = -float(np.log(1 if num_actions is None else num_actions).sum())
        self.num_calls, self.steps_per_call = 0, 1
        self._rng, self._episode_rng = (np.random.default_rng([seed, stream]) for stream in (0, 1))
        self._multipliers, self._repeats = np.ones(num_envs), np.full(num_envs, float(mean_repeat))
        self._draw_for_episodes(np.ones(num_envs, bool))
        self._draw_block()

    @abstractmethod
    def noise_levels(self, episode_timesteps: np.ndarray) -> np.ndarray:
        """Noise level per environment, (N,) float >= 0, before the per-episode multiplier.

        Args:
            episode_timesteps: (N,) int, env steps since the episode began.
        """

    def current_eps(self, episode_timesteps: np.ndarray) -> np.ndarray:
        """The noise levels that the next call would use, (N,) float."""
        eps: np.ndarray = self._multipliers * self.noise_levels(episode_timesteps)
        return eps

    def add_exploration_noise(
        self, actions: np.ndarray, episode_timesteps: np.ndarray, allowed: np.ndarray | None = None
    ) -> np.ndarray:
        """Add noise to actions, keeping shape and dtype; counts one vector step.

        Args:
            actions: (N,) or (N, K) int, or (N, A) float in [-1, 1].
            episode_timesteps: (N,) int, env steps since the episode began.
            allowed: (N, A) bool, for discrete actions: random ones are drawn where it is True (several
                factors are side by side; if a factor has no allowed action, all are). None allows all.
        """
        if self._block_step == _BLOCK_STEPS:
            self._draw_block()
        step, eps = self._block_step, self.current_eps(episode_timesteps)
        self._block_step += 1
        self.num_calls += self.steps_per_call
        goes_on = np.zeros(self.num_envs, bool)
        if self._ends is not None:
            goes_on = self._is_held & (self._ends[step] >= 1.0 / self._repeats)
        if self._thresholds is None:
            self._held = np.where(goes_on[:, None], self._held, self._noise[step])
            self._is_held[:] = True
            noisy: np.ndarray = np.clip(actions + self._held * eps[:, None], -1.0, 1.0)
            return noisy.astype(actions.dtype, copy=False)
        if allowed is not None:
            goes_on &= _all_allowed(self._held, allowed, self.action_space)
        # This start probability makes a fraction eps of all actions random, even when an episode starts.
        begin = np.where(episode_timesteps == 0, eps, eps / (eps + self._repeats * (1.0 - eps)))
        noise = _random_actions(self._noise[step], allowed, self.action_space)
        self._goes_on, self._begin = goes_on, begin
        self._held = np.where(_like(goes_on, noise), self._held, noise)
        self._is_held = goes_on | (self._thresholds[step] < begin)
        return np.where(_like(self._is_held, actions), self._held, actions).astype(actions.dtype, copy=False)

    def log_probability(self, of_policy: np.ndarray, allowed: np.ndarray | None = None) -> np.ndarray:
        """Log-probability of the last noisy actions, (N,) float64: 0 where a held action continues.

        Args:
            of_policy: (N,) float64, the policy's log-probabilities of these actions, which are discrete.
            allowed: the same as when they were drawn.
        """
        uniform = self._log_uniform if allowed is None else -_log_num_allowed(allowed, self.action_space)
        with np.errstate(divide="ignore"):  # the logarithm of 0 is -inf, as it should be
            mixed = np.logaddexp(of_policy + np.log1p(-self._begin), uniform + np.log(self._begin))
        found: np.ndarray = np.where(self._goes_on, 0.0, mixed)
        return found

    def _draw_block(self) -> None:
        """Draw random numbers for _BLOCK_STEPS calls: uniform or Gaussian ones."""
        self._rng_at_block, self._block_step = self._rng.bit_generator.state, 0
        shape = (_BLOCK_STEPS, self.num_envs)
        noise_shape = (*shape, *(self.action_space.shape or ()))
        self._thresholds: np.ndarray | None = None
        if isinstance(self.action_space, spaces.Box):
            self._noise: np.ndarray = self._rng.standard_normal(noise_shape)
        else:
            self._thresholds, self._noise = self._rng.random(shape), self._rng.random(noise_shape)
        self._ends = self._rng.random(shape) if self.mean_repeat > 1.0 else None

    def on_episode_end(self, ended: np.ndarray) -> None:
        """Release held noise, and redraw per-episode values, where `ended` ((N,) bool) is True."""
        self._is_held[ended] = False
        self._draw_for_episodes(ended)

    def _draw_for_episodes(self, begins: np.ndarray) -> None:
        if not (num_begun := np.count_nonzero(begins)):
            return
        if self.randomize_eps:
            self._multipliers[begins] = self._episode_rng.random(num_begun)
        if self.randomize_repeat:
            self._repeats[begins] = self.mean_repeat ** self._episode_rng.random(num_begun)

    def state_dict(self) -> dict[str, Any]:
        """The state for an exact continuation, as plain JSON values."""
        return {
            "num_calls": self.num_calls,
            "multipliers": self._multipliers.tolist(),
            "rng": self._rng_at_block,
            "block_step": self._block_step,
            "episode_rng": self._episode_rng.bit_generator.state,
            "is_held": self._is_held.tolist(),
            "held": self._held.tolist(),
            "repeats": self._repeats.tolist(),
        }

    def load_schedule(self, state: dict[str, Any]) -> None:
        """Restore the part of `state_dict` that does not depend on the number of environments.

        Override it along with `state_dict` if a schedule depends on more than `num_calls`.
        """
        self.num_calls = int(state["num_calls"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises: ValueError for another number of environments."""
        multipliers = np.array(state["multipliers"], np.float64)
        if multipliers.shape != (self.num_envs,):
            raise ValueError(
                f"The saved exploration state is for {len(multipliers)} environments, but this run has "
                f"{self.num_envs}. Fix: resume with the same Experiment.parallel_actors."
            )
        self.load_schedule(state)
        self._multipliers = multipliers
        self._rng.bit_generator.state = state["rng"]
        self._draw_block()
        self._block_step = int(state["block_step"])
        self._episode_rng.bit_generator.state = state["episode_rng"]
        self._is_held = np.array(state["is_held"], bool)
        self._held = np.array(state["held"], self._held.dtype).reshape(self._held.shape)
        if self.randomize_repeat:
            self._repeats = np.array(state["repeats"], np.float64)


def _num_actions(action_space: PolicyActionSpace) -> Any:
    """Number of discrete actions, or of those of each factor, (K,)."""
    return getattr(action_space, "nvec", getattr(action_space, "n", None))


def _like(is_chosen: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """Reshape (N,) bool to broadcast with actions (N,) or (N, K)."""
    return is_chosen if actions.ndim == 1 else is_chosen[:, None]


def _all_allowed(actions: np.ndarray, allowed: np.ndarray, action_space: PolicyActionSpace) -> np.ndarray:
    """Return (N,) bool, True if allowed (N, A) bool allows actions (N,) or (N, K) int in every factor."""
    offsets = np.cumsum([0, *np.atleast_1d(_num_actions(action_space))[:-1]])
    places = actions.reshape(len(actions), -1) + offsets
    return np.asarray(np.take_along_axis(allowed, places, axis=1).all(axis=1))


def _random_actions(
    uniform: np.ndarray, allowed: np.ndarray | None, action_space: PolicyActionSpace
) -> np.ndarray:
    """Uniformly drawn actions, (N,) or (N, K) int, from uniform numbers in [0, 1) of the same shape.

    allowed: see `add_exploration_noise`.
    """
    if allowed is None:
        return np.asarray(uniform * _num_actions(action_space)).astype(np.int64)
    chosen = []
    for share, free in zip(uniform.reshape(len(uniform), -1).T, _free(allowed, action_space), strict=True):
        rank = (share * free.sum(axis=1)).astype(np.int64)  # index among the allowed actions
        chosen.append((free.cumsum(axis=1) > rank[:, None]).argmax(axis=1))
    return chosen[0] if isinstance(action_space, spaces.Discrete) else np.stack(chosen, axis=1)


def _free(allowed: np.ndarray, action_space: PolicyActionSpace) -> list[np.ndarray]:
    """Choices to draw from for each factor, (N, A) bool: the allowed ones, or all if none is allowed."""
    parts = np.split(allowed, np.cumsum(_num_actions(action_space))[:-1], axis=1)
    return [part | ~part.any(axis=1, keepdims=True) for part in parts]


def _log_num_allowed(allowed: np.ndarray, action_space: PolicyActionSpace) -> np.ndarray:
    """Logarithm of the number of actions to draw from, (N,) float64."""
    return np.asarray(sum(np.log(free.sum(axis=1)) for free in _free(allowed, action_space)))


def _check_schedule(name: str, action_space: PolicyActionSpace, steps_anneal: float, **levels: float) -> None:
    """Check the settings of a schedule: `levels` are standard deviations for a Box, else probabilities."""
    check_number(f"{name}.steps_anneal", steps_anneal, above=0)
    for argument, level in levels.items():
        highest = np.inf if isinstance(action_space, spaces.Box) else 1
        check_number(f"{name}.{argument}", level, lowest=0, highest=highest)


def _anneal(start: float, end: float, progress: float) -> float:
    return start + (end - start) * min(max(progress, 0.0), 1.0)


@gin.configurable(denylist=_CODE_SUPPLIED)
class EpsilonGreedy(ExplorationWrapper):
    """Noise level that decreases linearly with the number of vector steps, then stays constant.

    Args:
        action_space: the policy's action space.
        num_envs: number of parallel environments.
        seed: seed of the noise.
        eps_start: noise level at the first vector step.
        eps_end: noise level after `steps_anneal` vector steps.
        steps_anneal: in vector steps (one per call, all N environments together). An agent that explores too
            briefly may never see a reward.
        randomize_eps: see `ExplorationWrapper`.
        mean_repeat: see `ExplorationWrapper`.
        randomize_repeat: see `ExplorationWrapper`.
    """

    def __init__(
        self,
        action_space: PolicyActionSpace,
        num_envs: int,
        seed: int,
        eps_start: float = 1.0,
        eps_end: float = 0.05,
        steps_anneal: int = 1_000_000,
        randomize_eps: bool = True,
        mean_repeat: float = 1.0,
        randomize_repeat: bool = True,
    ) -> None:
        super().__init__(action_space, num_envs, seed, randomize_eps, mean_repeat, randomize_repeat)
        _check_schedule("EpsilonGreedy", action_space, steps_anneal, eps_start=eps_start, eps_end=eps_end)
        self.eps_start, self.eps_end, self.steps_anneal = eps_start, eps_end, steps_anneal
        self._levels = np.empty(num_envs)

    def noise_levels(self, episode_timesteps: np.ndarray) -> np.ndarray:
        """The same level for all: eps_start + (eps_end - eps_start) * calls / steps_anneal, clamped."""
        self._levels.fill(_anneal(self.eps_start, self.eps_end, self.num_calls / self.steps_anneal))
        return self._levels


@gin.configurable(denylist=_CODE_SUPPLIED)
class BilevelEpsilonGreedy(ExplorationWrapper):
    """Noise level that also changes within an episode, so that late timesteps of long episodes are explored.

    eps(h) = start + (end - start) * min(h / rollout_horizon, 1) ** curve, with `start` and `end` annealed
    over vector steps.

    Args:
        action_space: the policy's action space.
        num_envs: number of parallel environments.
        seed: seed of the noise.
        rollout_horizon: number of env steps after which the level within an episode reaches its end value.
        eps_start_start: level at the start of an episode, at the first vector step.
        eps_start_end: level at the start of an episode, after `steps_anneal` vector steps.
        eps_end_start: level at the end of an episode, at the first vector step.
        eps_end_end: level at the end of an episode, after `steps_anneal` vector steps.
        steps_anneal: in vector steps (one per call, all N environments together).
        randomize_eps: see `ExplorationWrapper`.
        curve: values above 1 hold the start level for longer and move to the end level late.
        eps_first: constant level at an episode's first timestep, for tasks in which the first action decides
            a long course; None treats it like the other timesteps.
    """

    def __init__(
        self,
        action_space: PolicyActionSpace,
        num_envs: int,
        seed: int,
        rollout_horizon: int = gin.REQUIRED,
        eps_start_start: float = 1.0,
        eps_start_end: float = 0.05,
        eps_end_start: float = 0.8,
        eps_end_end: float = 0.01,
        steps_anneal: int = 1_000_000,
        randomize_eps: bool = True,
        curve: float = 1.0,
        eps_first: float | None = None,
    ) -> None:
        super().__init__(action_space, num_envs, seed, randomize_eps)
        self._start = (eps_start_start, eps_start_end)
        self._end = (eps_end_start, eps_end_end)
        _check_schedule(
            "BilevelEpsilonGreedy",
            action_space,
            steps_anneal,
            eps_start_start=eps_start_start,
            eps_start_end=eps_start_end,
            eps_end_start=eps_end_start,
            eps_end_end=eps_end_end,
            eps_first=0.0 if eps_first is None else eps_first,
        )
        check_count("BilevelEpsilonGreedy.rollout_horizon", rollout_horizon)
        check_number("BilevelEpsilonGreedy.curve", curve, above=0)
        self.rollout_horizon, self.steps_anneal, self.curve = rollout_horizon, steps_anneal, curve
        self.eps_first = eps_first

    def noise_levels(self, episode_timesteps: np.ndarray) -> np.ndarray:
        """Level per environment, by the position in its episode; see the class."""
        progress = self.num_calls / self.steps_anneal
        start, end = _anneal(*self._start, progress), _anneal(*self._end, progress)
        share = np.clip(episode_timesteps / self.rollout_horizon, 0.0, 1.0) ** self.curve
        levels = start + (end - start) * share
        return levels if self.eps_first is None else np.where(episode_timesteps == 0, self.eps_first, levels)
