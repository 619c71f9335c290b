"""The one rollout loop: acts in vector envs and passes every step to sinks, always as arrays of N rows."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gin
import numpy as np
import torch

from ...agents import BaseAgent, OffPolicyAgent, RolloutHooks
from ...agents.parts import EpisodeResult
from ...data.sink import Arrays, Sink
from ...envs import ActionCode, ExplorationWrapper, Histories
from ...envs.returned import merged
from ..process.transfer import to_device, to_host

logger = logging.getLogger("loxodon")
_STEP_STAGES = ("policy", "env", "store")
_LIMIT_FACTOR, _LIMIT_SLACK = 10, 1_000  # see `episode_limit`
# keys that no observation has
_RL2S, _TIMES, _FRESH, _ACTIONS, _DISCOUNTS = "/rl2s", "/time_idxs", "/fresh", "/actions", "/discounts"
_MIN_PROB = 1e-30  # instead of 0 for an action that noise chose and a greedy policy never takes
_HOW_TO_OFFER_STATE = (
    "define both there or in a wrapper around it (loxodon.envs.ClassicControlState does so for gymnasium's "
    "classic control)"
)


class StageTimer:
    """Adds up the seconds of the stages of an epoch; a lap costs well below a microsecond.

    Stages: "policy" (acting, until the actions are on the CPU), "env" (the environments' step, or the wait
    for it), "store" (handing the step to the sinks), "update" (the learner's work on this
    thread; on a GPU most of it runs in the background).
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((*_STEP_STAGES, "update"), 0.0)
        self.num_updates = 0

    def lap(self, stage: str, since_s: float) -> float:
        """Add the time since `since_s` (of time.perf_counter) to a stage; returns the time now."""
        now_s = time.perf_counter()
        self.seconds[stage] += now_s - since_s
        return now_s

    def step_metrics(self, num_steps: float) -> dict[str, float]:
        """Milliseconds of each stage per vector step; `num_steps` were taken since the last call."""
        taken = {stage: self._take(stage) for stage in _STEP_STAGES}
        if not num_steps:
            return {}
        return {f"time/{stage}_ms_per_step": 1e3 * s / num_steps for stage, s in taken.items()}

    def update_metrics(self) -> dict[str, float]:
        """Milliseconds per update since the last call."""
        num_updates, self.num_updates = self.num_updates, 0
        taken = self._take("update")
        return {"time/update_ms": 1e3 * taken / num_updates} if num_updates else {}

    def _take(self, stage: str) -> float:
        seconds, self.seconds[stage] = self.seconds[stage], 0.0
        return seconds


@dataclass
class RolloutState:
    """State of the rollout of a group; all arrays have N rows.

    Attributes:
        obs: arrays (N, ...), owned by the env: valid until its next step.
        rl2s: (N, 1+A) float32, reward and previous action.
        time_idxs: (N, 1) int64, index within the episode.
        env_names: N names.
        hidden_state: the agent's memory; rows in `fresh` still hold that of the previous episode.
        fresh: (N,) bool, rows whose memory is reset before the agent acts; None if there are none.
        actions: those of the step under way (or interrupted), see ActionCode; None between steps.
        extras: further outputs of the agent at that step, each (N, ...).
        discounts: (N,) int64, index of the discount whose policy acts; None if the agent has no choice.
        returns: (N,) float, returns of the running episodes, if it has.
    """

    obs: Arrays
    rl2s: np.ndarray
    time_idxs: np.ndarray
    env_names: list[str]
    hidden_state: Any = field(default=None, repr=False)
    fresh: np.ndarray | None = None
    actions: np.ndarray | None = None
    extras: Arrays = field(default_factory=dict)
    discounts: np.ndarray | None = None
    returns: np.ndarray = field(default_factory=lambda: np.zeros(0))


@dataclass
class RolloutGroup:
    """Envs that step together, with their exploration noise, sinks and statistics.

    Attributes:
        envs: vector env (same-step autoreset) with `env_names`; single action space as ActionMap makes it.
        exploration: adds noise to the actions of all N envs; None adds none.
        sinks: receivers of every step.
        state: state of the rollout; None before the first step and after a failed reset.
        histories: statistics to add to; the collector sets it.
    """

    envs: Any
    exploration: ExplorationWrapper | None = None
    sinks: Sequence[Sink] = ()
    state: RolloutState | None = None
    histories: Histories = field(init=False)

    @property
    def num_envs(self) -> int:
        """The number of envs, N."""
        return int(self.envs.num_envs)

    def call_sinks(self, method: str, *args: Any) -> None:
        """Call a method of every sink, even if one raises, so that no sink misses a step."""
        _call_all(partial(getattr(sink, method), *args) for sink in self.sinks)

    def flush(self) -> None:
        """Close every running piece, and return when all pieces are on disk."""
        _call_all((partial(self.call_sinks, "flush_partial"), partial(self.call_sinks, "wait")))

    def begin_trajectories(self, rows: np.ndarray) -> None:
        """Begin trajectories in the sinks at the present timestep, in the envs `rows` (k,) int."""
        assert self.state is not None
        state = self.state
        self.call_sinks("begin", rows, state.obs, state.rl2s, state.time_idxs, state.env_names)


@dataclass
class Quota:
    """Selects the episodes of a group that count when a number of episodes is asked for.

    Attributes:
        left: (N,) int64, episodes of each env that still count.
        deadline: number of env steps of an env after which no counted episode may begin.
        steps: (N,) int64, env steps taken by each env.
    """

    left: np.ndarray
    deadline: int
    steps: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        """Begin at step 0."""
        self.steps = np.zeros_like(self.left)

    def take(self, ended: np.ndarray, ignored: np.ndarray | None) -> np.ndarray:
        """Account for a vector step; returns where its episodes count, (N,) bool. See `ReturnHistory`."""
        counted: np.ndarray = self.left > 0
        self.steps += 1 if ignored is None else ~ignored
        self.left -= ended & counted
        self.left[ended & (self.steps >= self.deadline)] = 0
        return counted


def episode_limit(timesteps: int) -> int:
    """Number of steps of an env after which an episode that began in its first `timesteps` is given up."""
    return _LIMIT_FACTOR * timesteps + _LIMIT_SLACK if timesteps else 0


@gin.configurable(allowlist=["save_env_state"])
class Collector:
    """Steps vector envs with an agent; the rollout continues from call to call.

    With several groups of asynchronous envs, one group steps in its worker processes while the agent acts for
    the next. The order of all calls is fixed, so a seed gives the same rollout every time. That rollout
    differs from that of a single group, since the agent draws actions for one group after the other.

    Args:
        groups: at least one group. All have the same spaces; each has its envs, exploration and sinks.
        agent: acts; the collector keeps its hidden states.
        device: device of the agent.
        sample: True samples actions, False takes the most likely ones.
        should_stop: asked after each vector step; True ends the call early.
        cast: makes the autocast context of the forward pass.
        on_env_steps: called after each vector step of a group with its number of env steps; it may sleep.
        shape_rewards: function of the rewards (N,) float32 and the observations (N, ...) that follow them.
            It returns the rewards that the sinks get, (N,) float32, and must not change its input. Sinks then
            get the original rewards as extras["raw_rewards"] (N, 1).
        timer: measures the time of acting, of the envs and of the sinks.
        is_training: True lets the agent's hooks end episodes and combine rewards.
        save_env_state: False leaves the rollout out of `state_dict`, True requires it, and None includes it
            if the environments and the agent's memory can be stored.

    Attributes:
        on_episodes: called with the episodes that have ended in a step, if the agent chooses a discount for
            each; tells the agent about them, unless it is replaced. None if there is no choice.

    Raises: ValueError if save_env_state is True and the environments or the memory cannot be stored.
    """

    def __init__(
        self,
        groups: Sequence[RolloutGroup],
        agent: BaseAgent,
        device: torch.device,
        sample: bool,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        cast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        on_env_steps: Callable[[int], None] | None = None,
        shape_rewards: Callable[[np.ndarray, Arrays], np.ndarray] | None = None,
        timer: StageTimer | None = None,
        is_training: bool = True,
        save_env_state: bool | None = None,
    ) -> None:
        self.groups, self.agent, self.device, self.sample = list(groups), agent, device, sample
        self.should_stop, self.cast, self.on_env_steps = should_stop, cast, on_env_steps
        self.shape_rewards, self.timer = shape_rewards, timer or StageTimer()
        self.is_training, self.save_env_state = is_training, save_env_state
        self.num_envs, self.share_done = sum(group.num_envs for group in self.groups), 0.0
        self.histories = Histories.create(self.num_envs)
        for group in self.groups:
            is_alone = len(self.groups) == 1
            group.histories = self.histories if is_alone else self.histories.share(group.num_envs)
        envs = self.groups[0].envs
        self._is_async = hasattr(envs, "step_async")
        self.action_code = ActionCode(envs.single_action_space)
        self.hooks = RolloutHooks(agent, list(envs.single_observation_space.spaces))
        self._choice = agent.acting if is_training and isinstance(agent, OffPolicyAgent) else None
        self.on_episodes: Callable[[Sequence[EpisodeResult]], None] | None = None
        if self._choice is not None:
            self.on_episodes = self._choice.add
        if save_env_state and (problem := self._storage_problem()) is not None:
            raise ValueError(
                f"{problem}, which Collector.save_env_state needs. Fix: {_HOW_TO_OFFER_STATE}, or set "
                "Collector.save_env_state = None to begin new episodes on resume."
            )

    @property
    def metrics(self) -> dict[str, float]:
        """The discount that has the best returns so far, if the agent has a choice."""
        return {} if self._choice is None else {"collect/acting_discount": self._choice.best_discount}

    @property
    def has_begun(self) -> bool:
        """True once the envs were reset."""
        return any(group.state is not None for group in self.groups)

    def restart(self, seed: int | None) -> None:
        """Store running pieces, reset all envs (env i gets seed + i) and clear the hidden states."""
        for group, own_seed in self._seeded(seed):
            group.flush()
            group.call_sinks("restart")
            if group.exploration is not None:
                group.exploration.on_episode_end(np.ones(group.num_envs, dtype=bool))
            group.histories.returns.restart()
            group.state = None  # after a failed reset, a checkpoint has nothing to resume from
            obs, _ = group.envs.reset(seed=own_seed)
            obs = self._with_info(obs, None, np.ones(group.num_envs, dtype=bool))
            with self.cast():
                hidden_state = self.agent.init_hidden_state(group.num_envs, self.device)
            group.state = RolloutState(
                obs=obs,
                rl2s=np.zeros((group.num_envs, 1 + self.action_code.width), dtype=np.float32),
                time_idxs=np.zeros((group.num_envs, 1), dtype=np.int64),
                env_names=list(group.envs.env_names),
                hidden_state=hidden_state,
            )
            self._choose_discounts(group.state)
            group.begin_trajectories(np.arange(group.num_envs))

    def continue_from(self, states: Sequence[RolloutState]) -> None:
        """Continue in the middle of episodes; new trajectories begin in the sinks at this timestep.

        states: one for each group; its envs are in that state already.
        """
        for group, state in zip(self.groups, states, strict=True):
            group.state = state
            group.call_sinks("restart")
            group.begin_trajectories(np.arange(group.num_envs))

    def leave_envs(self) -> None:
        """Store running pieces and leave the envs to other code; the next call begins new episodes."""
        self.flush()
        for group in self.groups:
            group.state = None

    def set_policy_version(self, version: int | None) -> None:
        """Pass the version of the acting policy to the sinks."""
        for group in self.groups:
            for sink in group.sinks:
                sink.policy_version = version

    def advance_exploration(self, env_steps: int) -> None:
        """Advance schedules of exploration to the run's env steps, if they lag behind.

        Without this, an actor that joins late or restarts would explore as at the beginning of the run.
        """
        num_calls = env_steps // sum(group.num_envs for group in self.groups)
        for group in self.groups:
            if group.exploration is not None:
                group.exploration.num_calls = max(group.exploration.num_calls, num_calls)

    def flush(self) -> None:
        """Close every running piece, and return when all pieces are on disk."""
        _call_all(group.flush for group in self.groups)

    def wait(self) -> None:
        """Return when every finished piece is on disk; an error is raised after all have been tried."""
        _call_all(partial(group.call_sinks, "wait") for group in self.groups)

    def close(self) -> None:
        """Store running pieces and close the sinks; the envs are left alone."""
        _call_all([self.flush, *(partial(group.call_sinks, "close") for group in self.groups)])
        for group in self.groups:
            group.sinks = ()

    # ---- the rollout ----

    def collect(
        self, timesteps: int, *, episodes: int | None = None, limit: int | None = None, render: bool = False
    ) -> int:
        """Take `timesteps` steps in every env; returns the env steps taken by all envs together.

        With `episodes`, each env has an equal share of them. An episode counts if it begins within the first
        `timesteps` steps of its env. Each is played to its end, and the call ends when all have ended:
        whether an episode counts must not depend on its length. Episodes that have not ended after `limit`
        steps (None: `episode_limit`) are left out, with a warning. No step is left under way.
        """
        if not self.has_begun:
            self.restart(seed=None)
        quotas = self._quotas(episodes, timesteps)
        last = timesteps if episodes is None else limit or episode_limit(timesteps)
        taken, step, goes_on = 0, 0, timesteps > 0 and _has_episodes_left(quotas)
        self.share_done = 0.0
        with self.cast(), self._without_gradient():
            if goes_on:
                for group in self.groups:
                    self._begin_step(group)
            while goes_on:
                step += 1
                self.share_done = min(1.0, step / timesteps)
                for group, quota in zip(self.groups, quotas, strict=True):
                    taken += self._finish_step(group, quota)
                    if render:
                        with self._plain_torch():
                            group.envs.render()
                    if group is self.groups[0]:  # the first group decides, so that all take as many steps
                        goes_on = step < last and _has_episodes_left(quotas) and not self.should_stop()
                    if goes_on:
                        self._begin_step(group)
        if step == last:
            self._warn_of_unfinished(quotas, step)
        return taken

    def _without_gradient(self) -> contextlib.AbstractContextManager[Any]:
        """Inference mode; under autocast, which keeps no cast weights in that mode, no_grad."""
        device = self.device.type
        is_cast = device != "meta" and torch.is_autocast_enabled(device)
        return torch.no_grad() if is_cast else torch.inference_mode()

    @contextlib.contextmanager
    def _plain_torch(self) -> Iterator[None]:
        """The usual modes of torch for the code of environments, which may use models of its own."""
        device = "cpu" if self.device.type == "meta" else self.device.type
        with torch.inference_mode(mode=False), torch.autocast(device, enabled=False):
            yield

    def _begin_step(self, group: RolloutGroup) -> None:
        """Let the agent act and start the step of all envs."""
        state = group.state
        assert state is not None
        assert state.actions is None
        start_s = time.perf_counter()
        state.actions = self._act(group, state)
        self.timer.lap("policy", start_s)
        if self._is_async:
            group.envs.step_async(state.actions)

    def _act(self, group: RolloutGroup, state: RolloutState) -> np.ndarray:
        """Actions (N,) or (N, K) int64, or (N, A) float32, with exploration noise."""
        given = {**state.obs, _RL2S: state.rl2s, _TIMES: state.time_idxs}
        if state.fresh is not None:
            given[_FRESH] = state.fresh
        if state.discounts is not None:
            given[_DISCOUNTS] = state.discounts
        seen = to_device(given, self.device)
        rl2s, time_idxs, fresh = seen.pop(_RL2S), seen.pop(_TIMES), seen.pop(_FRESH, None)
        discounts = seen.pop(_DISCOUNTS, None)
        inputs = (seen, rl2s, time_idxs, self._updated_hidden_state(group, state, fresh))
        with self._acting_for(discounts):
            if group.sinks:
                output = self.agent.act(*inputs, self.sample)
                chosen, state.hidden_state, extras = output.actions, output.hidden_state, output.extras
            else:  # further outputs of the agent are not stored
                chosen, state.hidden_state = self.agent.get_actions(*inputs, self.sample)
                extras = {}
        chosen = chosen if self.action_code.has_integers else chosen.float()
        state.extras = to_host({**extras, _ACTIONS: chosen})
        actions = state.extras.pop(_ACTIONS)
        allowed, noise = None, group.exploration
        if noise is not None:
            if (mask := self.agent.action_mask) is not None:
                allowed = state.obs[mask.key].reshape(len(actions), -1) != 0
            actions = noise.add_exploration_noise(actions, state.time_idxs[:, 0], allowed)
        if (probs := state.extras.pop("action_probs", None)) is not None:
            state.extras["log_probs"] = _log_probs(probs, actions, noise, allowed)
        return actions

    @contextlib.contextmanager
    def _acting_for(self, discounts: torch.Tensor | None) -> Iterator[None]:
        """Let the policies of these discounts act, (N,) int64, one per env; None changes nothing."""
        if discounts is None:
            yield
            return
        assert isinstance(self.agent, OffPolicyAgent)
        before, self.agent.acting_discount = self.agent.acting_discount, discounts
        try:
            yield
        finally:
            self.agent.acting_discount = before

    def _choose_discounts(self, state: RolloutState) -> None:
        """Choose the discounts whose policies act in all envs, if the agent has a choice."""
        if self._choice is not None:
            num_envs = len(state.rl2s)
            state.discounts, state.returns = self._choice.draw(num_envs), np.zeros(num_envs)

    def _judge_discounts(
        self, state: RolloutState, rewards: np.ndarray, ended: np.ndarray, ignored: np.ndarray | None
    ) -> None:
        """Report the results of ended episodes, and choose the discounts that act in the next ones."""
        if self._choice is None or state.discounts is None:
            return
        state.returns += rewards if ignored is None else np.where(ignored, 0.0, rewards)
        rows = np.flatnonzero(ended)
        if len(rows):
            ended_now = [
                EpisodeResult(int(state.discounts[row]), float(state.returns[row]), state.env_names[row])
                for row in rows
            ]
            assert self.on_episodes is not None
            self.on_episodes(ended_now)
            state.returns[rows], state.discounts[rows] = 0.0, self._choice.draw(len(rows))

    def _updated_hidden_state(
        self, group: RolloutGroup, state: RolloutState, fresh: torch.Tensor | None = None
    ) -> Any:
        """Bring the memory up to date before the next action: forget old episodes, apply new weights.

        fresh: `state.fresh` on the device, if it is there already.
        """
        if state.fresh is not None:
            fresh = to_device({_FRESH: state.fresh}, self.device)[_FRESH] if fresh is None else fresh
            state.hidden_state, state.fresh = self.agent.reset_hidden_state(state.hidden_state, fresh), None
        for sink in group.sinks:
            state.hidden_state = sink.before_act(self.agent, state.hidden_state)
        return state.hidden_state

    def _finish_step(self, group: RolloutGroup, quota: Quota | None) -> int:
        """Wait for the step and process its results; returns the env steps taken.

        quota: the episodes that count; None counts all.
        """
        state = group.state
        assert state is not None
        assert state.actions is not None
        actions, start_s = state.actions, time.perf_counter()
        obs, rewards, terminated, truncated, infos = self._step(group, actions)
        if self.hooks.ends_episodes and self.is_training:
            terminated, truncated = self._end_episodes(group, obs, rewards, terminated, truncated, infos)
        env_s = self.timer.lap("env", start_s)
        ended, ignored = terminated | truncated, infos.get("_ignore")
        fresh, before = ended if ignored is None else ended | ignored, state.obs
        full = self._with_info(obs, before, fresh)
        self._judge_discounts(state, rewards, ended, ignored)
        _count(group.histories, rewards, ended, ignored, state.env_names, infos, quota)
        # New arrays every step: the hidden state may still refer to the previous ones.
        rl2s = self._rl2s(rewards, actions)
        time_idxs = state.time_idxs + 1
        if group.sinks:
            final = infos.get("final_obs")
            following = full if final is None else self._following(obs, full, final, before, ended)
            stored, more = self._stored_rewards(rewards, following, infos)
            extras = {**state.extras, **more} if more else state.extras
            step = (actions, stored, terminated, ended, following, rl2s, time_idxs, ignored, extras)
            group.call_sinks("add", *step)
            self.timer.lap("store", env_s)
        state.obs, state.rl2s, state.time_idxs = full, rl2s, time_idxs
        if np.count_nonzero(fresh):  # takes a third of the time of any()
            self._begin_episodes(group, state, fresh)
        state.actions = None
        num_taken = len(rewards) if ignored is None else int((~ignored).sum())
        if self.on_env_steps is not None:
            self.on_env_steps(num_taken)
        return num_taken

    def _step(self, group: RolloutGroup, actions: np.ndarray) -> Any:
        """The results of a step of all envs, in this process or in worker processes."""
        if self._is_async:
            return group.envs.step_wait()
        with self._plain_torch():
            return group.envs.step(actions)

    def _following(
        self, obs: Arrays, full: Arrays, final: Arrays, before: Arrays | None, ended: np.ndarray
    ) -> Arrays:
        """Observations (N, ...) after the step: `final` where an episode ended, otherwise `full`.

        obs: as `full`, without what the agent adds; before: those of the previous timestep.
        """
        following = _true_next_obs(obs, final, ended)
        if not self.hooks.adds_to_obs:
            return following
        return _true_next_obs(full, self._with_info(following, before, np.zeros_like(ended)), ended)

    def _stored_rewards(
        self, rewards: np.ndarray, following: Arrays, infos: dict[str, Any]
    ) -> tuple[np.ndarray, Arrays]:
        """The rewards (N,) that sinks get, and those of the env as an extra if they differ.

        following: the observations (N, ...) after the step.
        """
        combines = self.hooks.combines_rewards and self.is_training
        if not combines and self.shape_rewards is None:
            return rewards, {}
        stored = rewards
        if combines:
            stored = self.hooks.combined(self.agent, rewards, infos.get("metrics", ()))
        if self.shape_rewards is not None:
            stored = self.shape_rewards(stored, following)
        return stored, {"raw_rewards": rewards[:, None]}

    def _begin_episodes(self, group: RolloutGroup, state: RolloutState, fresh: np.ndarray) -> None:
        """Begin episodes in the envs where fresh (N,) bool is True; their memory is reset before they act."""
        state.rl2s[fresh] = 0.0
        state.time_idxs[fresh] = 0
        state.fresh = fresh
        state.env_names = list(group.envs.env_names)
        if group.exploration is not None:
            group.exploration.on_episode_end(fresh)
        group.begin_trajectories(np.flatnonzero(fresh))

    def _end_episodes(
        self,
        group: RolloutGroup,
        obs: Arrays,
        rewards: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        infos: dict[str, Any],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Let the agent end episodes: those envs are reset, and `infos` then says so; returns the flags."""
        ended, over = terminated | truncated, infos.get("_ignore")
        following = _true_next_obs(obs, infos["final_obs"], ended) if "final_obs" in infos else obs
        flags = self.hooks.flags(self.agent, following, rewards, terminated, truncated)
        more = (flags[0] | flags[1]) & ~ended
        if over is not None:  # an env that was reset took no step
            more &= ~over
        if more.any():
            with self._plain_torch():
                metrics = merged(infos.get("metrics", []), group.envs.begin_episodes(more))
            if metrics:
                infos["metrics"] = metrics
            infos["final_obs"], infos["_final_obs"] = group.envs.buffers.final_obs, ended | more
        kept = ended | more
        return flags[0] & kept, flags[1] & kept

    def _with_info(self, obs: Arrays, before: Arrays | None, is_first: np.ndarray) -> Arrays:
        """Observations (N, ...) and what the agent adds to them; before: those of the previous timestep."""
        if not self.hooks.adds_to_obs:
            return obs
        return {**obs, **self.hooks.info(self.agent, obs, before, is_first)}

    def _rl2s(self, rewards: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Rewards, then actions (discrete ones as one-hot), (N, 1+A) float32."""
        rl2s = np.zeros((len(rewards), 1 + self.action_code.width), dtype=np.float32)
        rl2s[:, 0] = rewards
        self.action_code.write(actions, rl2s[:, 1:])
        return rl2s

    def _seeded(self, seed: int | None) -> Iterator[tuple[RolloutGroup, int | None]]:
        """The groups, each with the seed of its first env."""
        offset = 0
        for group in self.groups:
            yield group, None if seed is None else seed + offset
            offset += group.num_envs

    def _quotas(self, episodes: int | None, deadline: int) -> list[Quota | None]:
        """For each group, its share of the episodes, as equal as possible; None counts all."""
        if episodes is None:
            return [None] * len(self.groups)
        shares = np.full(self.num_envs, episodes // self.num_envs, dtype=np.int64)
        shares[: episodes % self.num_envs] += 1
        borders = np.cumsum([group.num_envs for group in self.groups])[:-1]
        return [Quota(share.copy(), deadline) for share in np.split(shares, borders)]

    def _warn_of_unfinished(self, quotas: Sequence[Quota | None], num_steps: int) -> None:
        """Warn about episodes that should count and have not ended."""
        num_running = sum(int(np.count_nonzero(quota.left)) for quota in quotas if quota is not None)
        if not num_running:
            return
        if self.histories.returns.num_episodes:
            found = (
                f"{num_running} episode(s) of this evaluation had not ended after {num_steps} steps and do "
                "not count, so long episodes are missing from its means."
            )
        else:
            found = (
                f"Evaluation took {num_steps} steps in each of {self.num_envs} envs and no episode ended, so "
                "there is nothing to report."
            )
        logger.warning(
            "%s Fix: end episodes with gymnasium's TimeLimit, or raise the number of evaluation timesteps "
            "(Experiment.val_timesteps_per_epoch); an episode may take up to %d times as many steps, plus "
            "%d.",
            found,
            _LIMIT_FACTOR,
            _LIMIT_SLACK,
        )

    # ---- in checkpoints ----

    @property
    def is_storable(self) -> bool:
        """True if `state_dict` can store the current state of the rollout."""
        if self.save_env_state is False:
            return False
        # A rollout interrupted in the middle of a step, for example by an error, cannot be resumed.
        stands = all(group.state is not None and group.state.actions is None for group in self.groups)
        return stands and self._storage_problem() is None

    def state_dict(self) -> dict[str, Any]:
        """State for `load_state_dict`: the rollout, exploration and sinks, one entry per group."""
        return {
            "has_begun": self.has_begun,
            "num_envs": [group.num_envs for group in self.groups],
            "rollout": [self._group_state(group) for group in self.groups] if self.is_storable else None,
            "exploration": [
                None if group.exploration is None else group.exploration.state_dict() for group in self.groups
            ],
            "sinks": [[sink.state_dict() for sink in group.sinks] for group in self.groups],
        }

    def load_state_dict(self, state: dict[str, Any], *, seed: int | None = None) -> bool:
        """Continue from the result of `state_dict`, also in another process.

        Call this before the random generators are restored: if the rollout was stored, environments are reset
        first, with `seed`, and pieces begin in the sinks.

        Returns: whether the rollout continues in the middle of its episodes. This is False if no rollout was
        stored, or if it does not fit and save_env_state does not require it; the caller then calls `restart`.
        With other numbers of environments, see `take_over`.

        Raises: ValueError if the sinks are not those of this run, or if save_env_state is True and the
        environments differ.
        """
        now = [group.num_envs for group in self.groups]
        if (before := state.get("num_envs", now)) != now:
            return self.take_over(
                [state],
                f"it holds the states of {sum(before)} environments (in {len(before)} part(s)), but this "
                f"run has {sum(now)} (in {len(now)})",
                "TrainingEnvs.overlap, Experiment.parallel_actors and env_mode",
            )
        goes_on = self._restore_rollout(state["rollout"], seed)
        for group, saved in zip(self.groups, state["sinks"], strict=True):
            pairs = _pairs(group.sinks, saved)
            try:
                for sink, one in pairs:
                    sink.load_state_dict(one)
            except ValueError as error:
                goes_on = self._begin_new_episodes(error)
        for group, saved in zip(self.groups, state["exploration"], strict=True):
            if group.exploration is not None and saved is not None:
                group.exploration.load_state_dict(saved)
        return goes_on

    def take_over(
        self, states: Sequence[dict[str, Any]], difference: str, settings: str, *, stores_pieces: bool = True
    ) -> bool:
        """Continue after rollouts in other environments, if their state per environment does not fit.

        Schedules of exploration continue. The random draws of exploration per environment stay as this
        process drew them. Pieces of trajectories that were running are stored with the next flush.

        Args:
            states: the `state_dict` results of these rollouts' collectors. The first one decides the
                schedules.
            difference: the difference between the checkpoint and this run, for the warning.
            settings: the settings to restore in order to continue those episodes instead.
            stores_pieces: False if another process stores the pieces.

        Returns: False, see `load_state_dict`; the caller calls `restart`.

        Raises: ValueError if save_env_state is True, or if the sinks are not those of this run.
        """
        fix = f"Fix: resume with the {settings} of the earlier run, or set Collector.save_env_state = False"
        goes_on = self._begin_new_episodes(ValueError(f"{difference}. {fix}."))
        for i, group in enumerate(self.groups):
            schedule = next((one for one in states[0]["exploration"] if one is not None), None)
            if group.exploration is not None and schedule is not None:
                group.exploration.load_schedule(schedule)
            for saved in [saved for state in states for saved in state["sinks"]]:
                for sink, one in _pairs(group.sinks, saved):
                    sink.take_over(one, stores_pieces=stores_pieces and i == 0)
        return goes_on

    def warn_of_cut_episodes(self, num_steps: int) -> None:
        """With exact_resume: warn if no episode has ended in the last `num_steps`, as all are cut now."""
        times = [group.state.time_idxs for group in self.groups if group.state is not None]
        if num_steps and times and min(int(part.min()) for part in times) >= num_steps:
            logger.warning(
                "No training episode has ended in the %d steps since the last checkpoint, and "
                "CheckpointManager.exact_resume cuts them all at each checkpoint. Fix: raise "
                "Experiment.ckpt_interval, give the environment get_state() and set_state(state), or set "
                "CheckpointManager.exact_resume = False.",
                num_steps,
            )

    def _storage_problem(self) -> str | None:
        """The reason why the rollout cannot be stored; None if it can."""
        for group in self.groups:
            if (problem := group.envs.state_problem()) is not None:
                return str(problem)
        try:
            self.agent.export_hidden_state(self.agent.init_hidden_state(1, self.device))
        except NotImplementedError:
            encoder = type(self.agent.traj_encoder).__name__
            return f"The memory of {encoder} cannot be stored: it has no export_hidden_state(hidden_state)"
        return None

    def _group_state(self, group: RolloutGroup) -> dict[str, Any]:
        state = group.state
        assert state is not None
        return {
            "envs": group.envs.get_states(),
            "obs": state.obs,
            "rl2s": state.rl2s,
            "time_idxs": state.time_idxs,
            "env_names": list(state.env_names),
            "memory": self.agent.export_hidden_state(self._updated_hidden_state(group, state)),
            "running": group.histories.returns.running(),
            "discounts": state.discounts,
            "returns": state.returns,
        }

    def _restore_rollout(self, saved: Sequence[dict[str, Any]] | None, seed: int | None) -> bool:
        """Restore environments, memory and statistics; False if they were not restored."""
        if saved is None or self.save_env_state is False:
            return False
        try:
            if self.save_env_state is None and (problem := self._storage_problem()) is not None:
                raise ValueError(f"{problem}. Fix: {_HOW_TO_OFFER_STATE}.")
            self._restore_groups(saved, seed)
        except ValueError as error:
            return self._begin_new_episodes(error)
        return True

    def _restore_groups(self, saved: Sequence[dict[str, Any]], seed: int | None) -> None:
        states = []
        for (group, own_seed), one in zip(self._seeded(seed), saved, strict=True):
            group.envs.reset(seed=own_seed)
            group.envs.set_states(one["envs"])
            group.histories.returns.set_running(one["running"])
            rows = {name: value.to(self.device) for name, value in one["memory"].items()}
            names, hidden_state = list(one["env_names"]), self.agent.import_hidden_state(rows)
            state = RolloutState(one["obs"], one["rl2s"], one["time_idxs"], names, hidden_state)
            self._choose_discounts(state)
            if state.discounts is not None and one.get("discounts") is not None:
                state.discounts, state.returns = one["discounts"], one["returns"]
            states.append(state)
        self.continue_from(states)

    def _begin_new_episodes(self, error: ValueError) -> bool:
        """Continue without the stored rollout because of `error`, or raise it if that is not allowed."""
        if self.save_env_state:
            raise error
        logger.warning(
            "Training begins new episodes instead of continuing those of the checkpoint: %s", error
        )
        return False


def _pairs(sinks: Sequence[Sink], saved: Sequence[dict[str, Any]]) -> list[tuple[Sink, dict[str, Any]]]:
    """Pairs of a sink and its saved state; empty if no state was stored, or this run stores none."""
    if saved and sinks and len(saved) != len(sinks):
        raise ValueError(
            f"The saved state has {len(saved)} sinks for collected data, but this run has {len(sinks)}. "
            "Fix: resume with the collection settings (what is stored, and where) of the original run."
        )
    return list(zip(sinks, saved, strict=False))


def _call_all(calls: Iterable[Callable[[], object]]) -> None:
    """Make all calls, even if one raises; then raise the first error."""
    first_error: Exception | None = None
    for call in calls:
        try:
            call()
        except Exception as error:  # raised below
            first_error = first_error or error
    if first_error is not None:
        raise first_error


def _has_episodes_left(quotas: Sequence[Quota | None]) -> bool:
    """True if some env has episodes left to play, or without a quota."""
    return any(quota is None or bool(quota.left.any()) for quota in quotas)


def _log_probs(
    probs: np.ndarray, actions: np.ndarray, noise: ExplorationWrapper | None, allowed: np.ndarray | None
) -> np.ndarray:
    """Log-probabilities (N, 1) float32 of the actions taken in the end; probs: see ActOutput.extras."""
    of_factors = probs.reshape(-1, probs.shape[-1])  # take_along_axis takes three times as long
    taken = of_factors[np.arange(len(of_factors)), actions.reshape(-1)].reshape(len(actions), -1)
    found: np.ndarray = np.log(np.maximum(taken, _MIN_PROB), dtype=np.float64).sum(axis=1)
    if noise is not None:
        found = noise.log_probability(found, allowed)
    return found.astype(np.float32)[:, None]


def _count(
    histories: Histories,
    rewards: np.ndarray,
    ended: np.ndarray,
    ignored: np.ndarray | None,
    names: list[str],
    infos: dict[str, Any],
    quota: Quota | None,
) -> None:
    """Add one env step to the statistics; envs that have used up their share of episodes are left out."""
    metrics, counted = infos.get("metrics", ()), None
    if quota is not None:
        counted = quota.take(ended, ignored)
        metrics = [entry for entry in metrics if counted[entry[0]]]
    histories.returns.add_step(rewards, ended, names, ignored, counted)
    if metrics:
        histories.specials.add_step(metrics, names)


def _true_next_obs(obs: Arrays, final: Arrays, ended: np.ndarray) -> Arrays:
    """The observation after the action in every env: `final` where an episode ended, otherwise `obs`."""
    following = {}
    for key, value in obs.items():
        following[key] = value.copy()
        following[key][ended] = final[key][ended]
    return following
