"""The one rollout loop: acts in a vector env, feeds a sink and the statistics, always as arrays of N rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from ..agents import BaseAgent
from ..envs import ExplorationWrapper, ReturnHistory, SpecialMetricHistory
from .sink import Arrays, Sink


@dataclass
class Histories:
    """Episode statistics of one rollout: returns and the environment's own metrics."""

    returns: ReturnHistory
    specials: SpecialMetricHistory

    @classmethod
    def create(cls, num_envs: int) -> Histories:
        """Empty statistics of `num_envs` envs."""
        return cls(ReturnHistory(num_envs), SpecialMetricHistory())

    def summary(self, prefix: str) -> dict[str, float]:
        """Figures of the finished episodes; empty when none has finished."""
        return {**self.returns.summary(prefix), **self.specials.summary(prefix)}

    def clear(self) -> None:
        """Forget the finished episodes; running ones go on."""
        self.returns.clear()
        self.specials.clear()


@dataclass
class RolloutState:
    """Where the rollout stands between two calls; all arrays have N rows."""

    obs: Arrays  # each (N, ...), owned by the env: valid until its next step
    rl2s: np.ndarray  # (N, 1+A) float32, reward and previous action
    time_idxs: np.ndarray  # (N, 1) int64, index within the episode
    env_names: list[str]
    hidden_state: Any = field(default=None, repr=False)


class Collector:
    """Steps a vector env (same-step autoreset) with an agent; the rollout continues from call to call.

    Args:
        envs: vector env with `env_names`; single action space Discrete(A) (start 0) or Box(-1, 1, (A,)).
        agent: acts; its hidden state lives here.
        device: where the agent is.
        exploration: adds noise to the actions of all N envs; None acts as the agent says.
        sink: takes every env step; None stores nothing.
        histories: statistics to add to.
        sample: True samples actions, False takes the most likely ones.
        should_stop: asked after each vector step; True ends the call early.
        cast: makes the autocast context of the forward pass.
    """

    def __init__(
        self,
        envs: Any,
        agent: BaseAgent,
        device: torch.device,
        exploration: ExplorationWrapper | None,
        sink: Sink | None,
        histories: Histories,
        sample: bool,
        *,
        should_stop: Callable[[], bool] | None = None,
        cast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.envs, self.agent, self.device = envs, agent, device
        self.exploration, self.sink, self.histories, self.sample = exploration, sink, histories, sample
        self.should_stop, self.cast = should_stop, cast
        self.num_envs: int = envs.num_envs
        space = envs.single_action_space
        self.is_discrete = isinstance(space, spaces.Discrete)
        self.action_dim = (
            int(space.n) if isinstance(space, spaces.Discrete) else int((space.shape or (0,))[0])
        )
        self.state: RolloutState | None = None

    def restart(self, seed: int | None) -> None:
        """Store running pieces, reset all envs (env i gets seed + i) and forget the hidden state."""
        self.flush()
        if self.exploration is not None:
            self.exploration.on_episode_end(np.ones(self.num_envs, dtype=bool))
        self.histories.returns.restart()
        obs, _ = self.envs.reset(seed=seed)
        self.state = RolloutState(
            obs=obs,
            rl2s=np.zeros((self.num_envs, 1 + self.action_dim), dtype=np.float32),
            time_idxs=np.zeros((self.num_envs, 1), dtype=np.int64),
            env_names=list(self.envs.env_names),
            hidden_state=self.agent.init_hidden_state(self.num_envs, self.device),
        )
        if self.sink is not None:
            rows = np.arange(self.num_envs)
            self.sink.begin(rows, obs, self.state.rl2s, self.state.time_idxs, self.state.env_names)

    def flush(self) -> None:
        """Store what is running: every running piece is closed, and all pieces are on disk afterwards."""
        if self.sink is not None and self.state is not None:
            self.sink.flush_partial()
            self.sink.wait()

    def collect(self, timesteps: int, *, episodes: int | None = None, render: bool = False) -> int:
        """Take up to `timesteps` steps in every env; returns the env steps taken, all envs together.

        With `episodes`, each env plays its equal share of them and further episodes do not count, so that
        short episodes are not preferred; the call ends when all shares are done.
        """
        if self.state is None:
            self.restart(seed=None)
        quota = None if episodes is None else _episode_shares(episodes, self.num_envs)
        taken = 0
        with torch.inference_mode(), self.cast():
            for _ in range(timesteps):
                ended, infos, rewards, names = self._env_step()
                taken += self.num_envs
                self._count(rewards, ended, names, infos, quota)
                if render:
                    self.envs.render()
                if quota is not None and not quota.any():
                    break
                if self.should_stop is not None and self.should_stop():
                    break
        return taken

    def _env_step(self) -> tuple[np.ndarray, dict[str, Any], np.ndarray, list[str]]:
        """One step of all envs: ended (N,) bool, infos, rewards (N,) float32, names before the step."""
        state = self.state
        assert state is not None
        actions = self._act(state)
        obs, rewards, terminated, truncated, infos = self.envs.step(actions)
        ended: np.ndarray = terminated | truncated
        any_ended = bool(ended.any())
        names = state.env_names
        # New arrays every step: the hidden state may still refer to the previous ones.
        rl2s = np.zeros((self.num_envs, 1 + self.action_dim), dtype=np.float32)
        rl2s[:, 0] = rewards
        if self.is_discrete:
            rl2s[np.arange(self.num_envs), 1 + actions] = 1.0
        else:
            rl2s[:, 1:] = actions
        time_idxs = state.time_idxs + 1
        if self.sink is not None:
            following = _true_next_obs(obs, infos, ended) if any_ended else obs
            self.sink.add(actions, rewards, terminated, ended, following, rl2s, time_idxs)
        if any_ended:
            rl2s[ended] = 0.0
            time_idxs[ended] = 0
            flags = torch.from_numpy(ended).to(self.device)
            state.hidden_state = self.agent.reset_hidden_state(state.hidden_state, flags)
            state.env_names = list(self.envs.env_names)
            if self.exploration is not None:
                self.exploration.on_episode_end(ended)
            if self.sink is not None:
                self.sink.begin(np.flatnonzero(ended), obs, rl2s, time_idxs, state.env_names)
        state.obs, state.rl2s, state.time_idxs = obs, rl2s, time_idxs
        return ended, infos, rewards, names

    def _act(self, state: RolloutState) -> np.ndarray:
        """Actions (N,) int64 or (N, A) float32 with exploration noise."""
        obs = {key: torch.from_numpy(value).to(self.device) for key, value in state.obs.items()}
        chosen, state.hidden_state = self.agent.get_actions(
            obs,
            torch.from_numpy(state.rl2s).to(self.device),
            torch.from_numpy(state.time_idxs).to(self.device),
            state.hidden_state,
            self.sample,
        )
        actions: np.ndarray = (chosen if self.is_discrete else chosen.float()).cpu().numpy()
        if self.exploration is not None:
            actions = self.exploration.add_exploration_noise(actions, state.time_idxs[:, 0])
        return actions

    def _count(
        self,
        rewards: np.ndarray,
        ended: np.ndarray,
        names: list[str],
        infos: dict[str, Any],
        quota: np.ndarray | None,
    ) -> None:
        """Add one env step to the statistics; envs whose share of episodes is used up are left out."""
        metrics = infos.get("metrics", ())
        if quota is not None:
            metrics = [entry for entry in metrics if quota[entry[0]] > 0]
            ended = ended & (quota > 0)
            quota -= ended
        self.histories.returns.add_step(rewards, ended, names)
        if metrics:
            self.histories.specials.add_step(metrics, names)


def _episode_shares(episodes: int, num_envs: int) -> np.ndarray:
    """How many episodes each of N envs plays, (N,) int64, summing to `episodes`."""
    shares = np.full(num_envs, episodes // num_envs, dtype=np.int64)
    shares[: episodes % num_envs] += 1
    return shares


def _true_next_obs(obs: Arrays, infos: dict[str, Any], ended: np.ndarray) -> Arrays:
    """What followed the action in every env: the final observation where an episode ended, else `obs`."""
    final = infos["final_obs"]
    following = {}
    for key, value in obs.items():
        merged = value.copy()
        merged[ended] = final[key][ended]
        following[key] = merged
    return following
