"""The one rollout loop: acts in a vector env, feeds a sink and the statistics, always as arrays of N rows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..agents import BaseAgent
from ..data.sink import Arrays, Sink
from ..envs import ActionCode, ExplorationWrapper, Histories, is_text
from .timing import StageTimer


@dataclass
class RolloutState:
    """Where the rollout stands between two calls; all arrays have N rows."""

    obs: Arrays  # each (N, ...), owned by the env: valid until its next step
    rl2s: np.ndarray  # (N, 1+A) float32, reward and previous action
    time_idxs: np.ndarray  # (N, 1) int64, index within the episode
    env_names: list[str]
    hidden_state: Any = field(default=None, repr=False)
    actions: np.ndarray | None = (
        None  # of the step under way (or broken off), see ActionCode; None between steps
    )


class Collector:
    """Steps a vector env (same-step autoreset) with an agent; the rollout continues from call to call.

    A step has two halves, `begin_step` (the policy acts, the env starts) and `finish_step` (the results are
    taken in), so that something else can be done while the env is at work in other processes.

    Args:
        envs: vector env with `env_names`; single action space as ActionMap makes it.
        agent: acts; its hidden state lives here.
        device: where the agent is.
        exploration: adds noise to the actions of all N envs; None acts as the agent says.
        sink: takes every env step; None stores nothing.
        histories: statistics to add to.
        sample: True samples actions, False takes the most likely ones.
        should_stop: asked after each vector step; True ends the call early.
        cast: makes the autocast context of the forward pass.
        on_env_steps: told the env steps taken, all envs together, after each vector step; it may sleep.
        shape_rewards: (N,) float32 to (N,) float32, the rewards that the sink gets; it has to leave its input
            alone. The sink gets the environment's own as extras["raw_rewards"] (N, 1) then.
        timer: told how long acting, the envs and the sink take.
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
        on_env_steps: Callable[[int], None] | None = None,
        shape_rewards: Callable[[np.ndarray], np.ndarray] | None = None,
        timer: StageTimer | None = None,
    ) -> None:
        self.shape_rewards, self.timer = shape_rewards, timer or StageTimer()
        self.envs, self.agent, self.device = envs, agent, device
        self.exploration, self.sink, self.histories, self.sample = exploration, sink, histories, sample
        self.should_stop, self.cast, self.on_env_steps = should_stop, cast, on_env_steps
        self.num_envs: int = envs.num_envs
        self._is_async = hasattr(envs, "step_async")
        self.action_code = ActionCode(envs.single_action_space)
        # Neither tensors nor files of plain arrays can hold texts.
        self._keys = [key for key, part in envs.single_observation_space.spaces.items() if not is_text(part)]
        self.state: RolloutState | None = None
        self.extras: Arrays | None = None  # what the agent said about the step under way, each (N, ...)

    def restart(self, seed: int | None) -> None:
        """Store running pieces, reset all envs (env i gets seed + i) and forget the hidden state."""
        self.flush()
        if self.exploration is not None:
            self.exploration.on_episode_end(np.ones(self.num_envs, dtype=bool))
        self.histories.returns.restart()
        self.state = None  # if the reset fails, there is nothing that a checkpoint could go on from
        obs, _ = self.envs.reset(seed=seed)
        self.state = RolloutState(
            obs=self._numbers(obs),
            rl2s=np.zeros((self.num_envs, 1 + self.action_code.width), dtype=np.float32),
            time_idxs=np.zeros((self.num_envs, 1), dtype=np.int64),
            env_names=list(self.envs.env_names),
            hidden_state=self.agent.init_hidden_state(self.num_envs, self.device),
        )
        if self.sink is not None:
            rows = np.arange(self.num_envs)
            self.sink.begin(rows, self.state.obs, self.state.rl2s, self.state.time_idxs, self.state.env_names)

    @property
    def hidden_state(self) -> Any:
        """The memory that the next action comes from."""
        return None if self.state is None else self.state.hidden_state

    def context(self) -> dict[str, Any] | None:
        """What learning needs of the steps before this timestep, for a checkpoint; None for nothing."""
        return None

    def go_on_from(self, state: RolloutState, context: dict[str, Any] | None = None) -> None:
        """Act on in the middle of episodes.

        What the sink gets begins with this timestep, unless `load_state_dict` gives it running pieces.

        context: what `context` returned when that state was captured.
        """
        self.state = state
        if self.sink is not None:
            rows = np.arange(self.num_envs)
            self.sink.begin(rows, state.obs, state.rl2s, state.time_idxs, state.env_names)

    def set_policy_version(self, version: int | None) -> None:
        """Tell the sink which policy acts from now on."""
        if self.sink is not None:
            self.sink.policy_version = version

    def flush(self) -> None:
        """Store what is running: every running piece is closed, and all pieces are on disk afterwards."""
        if self.sink is not None:
            self.sink.flush_partial()
            self.sink.wait()

    def wait(self) -> None:
        """Return when every finished piece is on disk."""
        if self.sink is not None:
            self.sink.wait()

    def close(self) -> None:
        """Store what is running and end the sink; the envs are left alone."""
        self.flush()
        if self.sink is not None:
            self.sink.close()
            self.sink = None

    def state_dict(self) -> dict[str, Any]:
        """What exact resumption needs of exploration and sink."""
        return {
            "exploration": None if self.exploration is None else self.exploration.state_dict(),
            "writer": None if self.sink is None else self.sink.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if isinstance(state["exploration"] or state["writer"], list):
            raise ValueError(
                "The checkpoint was written with overlapping sampling, which this run does without. Fix: "
                "resume with the Experiment.overlap_sampling and env_mode of the earlier run."
            )
        if self.sink is not None and state["writer"] is not None:
            self.sink.load_state_dict(state["writer"])
        if self.exploration is not None and state["exploration"] is not None:
            self.exploration.load_state_dict(state["exploration"])

    def collect(self, timesteps: int, *, episodes: int | None = None, render: bool = False) -> int:
        """Take up to `timesteps` steps in every env; returns the env steps taken, all envs together.

        With `episodes`, each env plays its equal share of them and further episodes do not count, so that
        short episodes are not preferred; the call ends when all shares are done.
        """
        if self.state is None:
            self.restart(seed=None)
        quota = None if episodes is None else episode_shares(episodes, self.num_envs)
        taken = 0
        with torch.inference_mode(), self.cast():
            for _ in range(timesteps):
                self.begin_step()
                taken += self.finish_step(quota)
                if render:
                    self.envs.render()
                if quota is not None and not quota.any():
                    break
                if self.should_stop is not None and self.should_stop():
                    break
        return taken

    def begin_step(self) -> None:
        """Let the policy act and start the step of all envs; needs inference mode and `cast` around it."""
        state = self.state
        assert state is not None
        assert state.actions is None
        start_s = time.perf_counter()
        state.actions = self._act(state)
        self.timer.lap("policy", start_s)
        if self._is_async:
            self.envs.step_async(state.actions)

    def finish_step(self, quota: np.ndarray | None = None) -> int:
        """Wait for the step and take in its results; returns the env steps taken.

        quota: (N,) int64, episodes of each env that still count, lowered here; None counts all.
        """
        state = self.state
        assert state is not None
        assert state.actions is not None
        actions, start_s = state.actions, time.perf_counter()
        obs, rewards, terminated, truncated, infos = (
            self.envs.step_wait() if self._is_async else self.envs.step(actions)
        )
        env_s = self.timer.lap("env", start_s)
        obs, ended, ignored = self._numbers(obs), terminated | truncated, infos.get("_ignore")
        fresh = ended if ignored is None else ended | ignored
        self._count(rewards, ended, ignored, state.env_names, infos, quota)
        # New arrays every step: the hidden state may still refer to the previous ones.
        rl2s = self._rl2s(rewards, actions)
        time_idxs = state.time_idxs + 1
        if self.sink is not None:
            following = _true_next_obs(obs, infos, ended) if "final_obs" in infos else obs
            stored, extras = rewards, self.extras
            if self.shape_rewards is not None:
                stored = self.shape_rewards(rewards)
                extras = {**(extras or {}), "raw_rewards": rewards[:, None]}
            self.sink.add(actions, stored, terminated, ended, following, rl2s, time_idxs, ignored, extras)
            self.timer.lap("store", env_s)
        if np.count_nonzero(fresh):  # a third of what any() takes
            self._begin_episodes(state, fresh, obs, rl2s, time_idxs)
        state.obs, state.rl2s, state.time_idxs, state.actions = obs, rl2s, time_idxs, None
        num_taken = self.num_envs if ignored is None else int((~ignored).sum())
        if self.on_env_steps is not None:
            self.on_env_steps(num_taken)
        return num_taken

    def _begin_episodes(
        self, state: RolloutState, fresh: np.ndarray, obs: Arrays, rl2s: np.ndarray, time_idxs: np.ndarray
    ) -> None:
        """Forget the past of the envs where fresh (N,) bool is True; changes rl2s and time_idxs."""
        rl2s[fresh] = 0.0
        time_idxs[fresh] = 0
        state.hidden_state = self.agent.reset_hidden_state(state.hidden_state, self._tensor(fresh))
        state.env_names = list(self.envs.env_names)
        if self.exploration is not None:
            self.exploration.on_episode_end(fresh)
        if self.sink is not None:
            self.sink.begin(np.flatnonzero(fresh), obs, rl2s, time_idxs, state.env_names)

    def _numbers(self, obs: Arrays) -> Arrays:
        """The observations without texts."""
        return obs if len(obs) == len(self._keys) else {key: obs[key] for key in self._keys}

    def _rl2s(self, rewards: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """(N, 1+A) float32: rewards, then actions, discrete ones as one-hot."""
        rl2s = np.zeros((self.num_envs, 1 + self.action_code.width), dtype=np.float32)
        rl2s[:, 0] = rewards
        self.action_code.write(actions, rl2s[:, 1:])
        return rl2s

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)

    def _act(self, state: RolloutState) -> np.ndarray:
        """Actions (N,) or (N, K) int64, or (N, A) float32, with exploration noise."""
        chosen, state.hidden_state = self.agent.get_actions(
            {key: self._tensor(value) for key, value in state.obs.items()},
            self._tensor(state.rl2s),
            self._tensor(state.time_idxs),
            state.hidden_state,
            self.sample,
        )
        actions: np.ndarray = (chosen if self.action_code.has_integers else chosen.float()).cpu().numpy()
        if self.exploration is not None:
            actions = self.exploration.add_exploration_noise(actions, state.time_idxs[:, 0])
        return actions

    def _count(
        self,
        rewards: np.ndarray,
        ended: np.ndarray,
        ignored: np.ndarray | None,
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
        self.histories.returns.add_step(rewards, ended, names, ignored)
        if metrics:
            self.histories.specials.add_step(metrics, names)


def episode_shares(episodes: int, num_envs: int) -> np.ndarray:
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
