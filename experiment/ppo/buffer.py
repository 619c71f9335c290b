"""Storage of an on-policy rollout while it is collected: arrays [T, N], read once they are full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...agents import OnPolicyAgent
from ...data import Sink
from ...data.sink import Arrays

_CAUSES = "check the environment's observations and rewards, or lower Experiment.learning_rate or grad_clip"


@dataclass(frozen=True)
class Finals:
    """Last timesteps of k truncated episodes, which no other row holds.

    steps: (k,) int64, number of the rollout step that led there. envs: (k,) int64.
    obs: arrays (k, ...). rl2s: (k, 1+A) float32. time_idxs: (k, 1) int64.
    """

    steps: np.ndarray
    envs: np.ndarray
    obs: Arrays
    rl2s: np.ndarray
    time_idxs: np.ndarray


@dataclass
class CollectedRollout:
    """Content of a buffer, all arrays time-major; the next rollout overwrites them.

    Row `history + t` of `obs`, `rl2s`, `time_idxs` and `resets` is timestep t, in which step t acts. Earlier
    rows are from the previous rollout, and the row after the last step holds the timestep that followed it.

    obs: each (H+T+1, N, ...). rl2s: (H+T+1, N, 1+A) float32. time_idxs: (H+T+1, N, 1) int64.
    resets: (H+T+1, N) bool, True on the first timestep of an episode.
    known_from: (N,) int64, the first row that has been written.
    steps: by key, each (T, N, ...): "actions", "rewards" (T, N), "terminated", "ended", "valid" (T, N) bool,
        and the further outputs of the agent.
    finals: last timesteps of truncated episodes.
    states: exported hidden states, each (N, ...), by the number of the step that they precede.
    """

    history: int
    obs: Arrays
    rl2s: np.ndarray
    time_idxs: np.ndarray
    resets: np.ndarray
    known_from: np.ndarray
    steps: Arrays
    finals: list[Finals]
    states: dict[int, dict[str, Tensor]]

    @property
    def rows(self) -> Arrays:
        """Data of every timestep besides the observations, by name."""
        return {"rl2s": self.rl2s, "time_idxs": self.time_idxs, "resets": self.resets}


class RolloutBuffer(Sink):
    """A sink for T steps of N envs, with the keys that the environment and the agent have.

    It returns only whole rollouts, in which every step has every key, so that nothing stale or unwritten is
    ever trained on. Timesteps of the previous rollout stay readable as context.

    Attributes:
        carried_state: hidden state from which the next rollout continues, because the weights have changed;
            None continues from the last acting state.

    Args:
        num_envs: N.
        num_steps: T.
        chunk_len: hidden states are kept before steps 0, chunk_len, 2 chunk_len ...
        burn_in: with burn-in, hidden states are kept this many steps earlier.
        history: number of rows of earlier rollouts that stay, at least burn_in.
        keeps_states: False for agents without hidden states.
    """

    def __init__(
        self,
        num_envs: int,
        num_steps: int,
        *,
        chunk_len: int,
        burn_in: int = 0,
        history: int = 0,
        keeps_states: bool = True,
    ) -> None:
        self.num_envs, self.num_steps, self.keeps_states = num_envs, num_steps, keeps_states
        self.chunk_len, self.burn_in, self.history = chunk_len, burn_in, max(history, burn_in)
        self.carried_state: Any = None
        self._now = 0  # number of steps written
        self._has_begun = False
        self._rollout: CollectedRollout  # set by the first `begin`

    def before_act(self, agent: OnPolicyAgent, hidden_state: Any) -> Any:
        """Return `carried_state` or else `hidden_state`, and keep it if a sequence may begin here."""
        if self.carried_state is not None:
            hidden_state, self.carried_state = self.carried_state, None
        if self.keeps_states and (self._now == 0 or (self._now + self.burn_in) % self.chunk_len == 0):
            self._rollout.states[self._now] = agent.export_hidden_state(hidden_state)
        return hidden_state

    def restart(self) -> None:
        """Forget everything; the next call is `begin` with all rows."""
        self._now, self.carried_state = 0, None
        if self._has_begun:
            self._rollout.finals, self._rollout.states = [], {}
            self._rollout.known_from[:] = self.history

    def state_dict(self) -> dict[str, Any]:
        """The earlier timesteps that the next rollout may read, as views; empty if it reads none.

        "obs": by key, each (H, N, ...); "rows": "rl2s", "time_idxs" and "resets", each (H, N, ...);
        "known_from": (N,) int64; "states": hidden states, as in `CollectedRollout`, from before the rollout.
        An incomplete rollout is dropped.
        """
        if not self.history or not self._has_begun:
            return {}
        states = self._states_before(self._now)
        if self.keeps_states and -self.burn_in not in states:  # the state is saved in the middle of a rollout
            return {}
        rollout, past = self._rollout, slice(self._now, self._now + self.history)
        return {
            "obs": {key: column[past] for key, column in rollout.obs.items()},
            "rows": {key: column[past] for key, column in rollout.rows.items()},
            "known_from": np.maximum(rollout.known_from - self._now, 0),
            "states": states,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`, after `begin` has set the timestep that followed.

        Raises: ValueError if it has another number of timesteps or of envs.
        """
        if not state or not self._has_begun:
            return
        known = np.asarray(state["known_from"])
        found = (len(state["rows"]["resets"]), len(known))
        if found != (self.history, self.num_envs):
            raise ValueError(
                f"The checkpoint holds {found[0]} earlier timesteps of {found[1]} environments, but this "
                f"run reads {self.history} of {self.num_envs}. Fix: resume with the encoder, "
                "Experiment.max_seq_len and parallel_actors of the earlier run, or set "
                "Collector.save_env_state = False."
            )
        rollout = self._rollout
        for columns, saved in ((rollout.obs, state["obs"]), (rollout.rows, state["rows"])):
            for key, column in columns.items():
                column[: self.history] = saved[key]
        rollout.known_from[:], rollout.states = known, dict(state["states"])

    def next_rollout(self) -> None:
        """Prepare for the next T steps: the newest timesteps become history."""
        rollout, last, kept = self._rollout, self.num_steps, self.history + 1
        for column in (*rollout.rows.values(), *rollout.obs.values()):
            column[:kept] = column[last : last + kept].copy()
        rollout.known_from = np.maximum(rollout.known_from - last, 0)
        rollout.finals, rollout.states, self._now = [], self._states_before(last), 0

    def _states_before(self, now: int) -> dict[int, dict[str, Tensor]]:
        """The hidden states that a rollout from step `now` on may need, by steps from there."""
        before = {step - now: state for step, state in self._rollout.states.items()}
        return {step: state for step, state in before.items() if -self.burn_in <= step < 0}

    def begin(
        self, rows: np.ndarray, obs: Arrays, rl2s: np.ndarray, time_idxs: np.ndarray, env_names: list[str]
    ) -> None:
        """Episodes start in the envs `rows` at the present timestep, or continue if their time is not 0."""
        if not self._has_begun:
            self._rollout, self._has_begun = self._allocated(obs, rl2s), True
        rollout, now = self._rollout, self.history + self._now
        for key, column in rollout.obs.items():
            column[now, rows] = obs[key][rows]
        rollout.rl2s[now, rows] = rl2s[rows]
        rollout.time_idxs[now, rows] = time_idxs[rows]
        rollout.resets[now, rows] = time_idxs[rows, 0] == 0

    def add(
        self,
        actions: np.ndarray,
        rewards: np.ndarray,
        terminated: np.ndarray,
        ended: np.ndarray,
        obs: Arrays,
        rl2s: np.ndarray,
        time_idxs: np.ndarray,
        ignored: np.ndarray | None = None,
        extras: Arrays | None = None,
    ) -> None:
        """Store one env step of all N envs; see `Sink`.

        Raises: ValueError if T steps are already stored, if the agent returns a reserved key, or if its keys
            change.
        """
        if self._now >= self.num_steps:
            raise ValueError(
                f"The rollout buffer is full with {self.num_steps} steps, but another one was added. "
                "Fix: collect Experiment.train_timesteps_per_epoch steps per epoch and train on them."
            )
        rollout = self._rollout
        step = {
            "actions": actions,
            "rewards": rewards,
            "terminated": terminated,
            "ended": ended,
            "valid": np.ones(self.num_envs, np.bool_) if ignored is None else ~ignored,
        }
        if taken := step.keys() & (extras or {}).keys():
            raise ValueError(
                f"The agent's act() returned an extra named {min(taken)!r}, but the rollout buffer already "
                f"stores something under that name. Fix: choose a name other than {', '.join(step)}."
            )
        step |= extras or {}
        if not rollout.steps:
            rollout.steps = {k: np.empty((self.num_steps, *v.shape), v.dtype) for k, v in step.items()}
        if step.keys() != rollout.steps.keys():
            raise ValueError(
                f"Step {self._now} of the rollout has {', '.join(step)}, but the steps before have "
                f"{', '.join(rollout.steps)}. Fix: let the agent's act() return the same extras every time."
            )
        for key, value in step.items():
            rollout.steps[key][self._now] = value
        self._keep_finals(ended & ~terminated, obs, rl2s, time_idxs)
        self._now += 1
        row = self.history + self._now
        for key, column in rollout.obs.items():
            column[row] = obs[key]
        rollout.rl2s[row], rollout.time_idxs[row], rollout.resets[row] = rl2s, time_idxs, False

    def read(self) -> CollectedRollout:
        """The rollout, once it is complete.

        Raises: ValueError if it is not.
        """
        if self._now < self.num_steps:
            raise ValueError(
                f"The rollout buffer holds {self._now} of its {self.num_steps} steps. Fix: collect a whole "
                "rollout before training."
            )
        return self._rollout

    def _allocated(self, obs: Arrays, rl2s: np.ndarray) -> CollectedRollout:
        shape = (self.history + self.num_steps + 1, self.num_envs)
        return CollectedRollout(
            history=self.history,
            obs={key: np.zeros((*shape, *value.shape[1:]), value.dtype) for key, value in obs.items()},
            rl2s=np.zeros((*shape, rl2s.shape[1]), np.float32),
            time_idxs=np.zeros((*shape, 1), np.int64),
            resets=np.zeros(shape, np.bool_),
            known_from=np.full(self.num_envs, self.history, np.int64),
            steps={},
            finals=[],
            states={},
        )

    def _keep_finals(
        self, truncated: np.ndarray, obs: Arrays, rl2s: np.ndarray, time_idxs: np.ndarray
    ) -> None:
        if not np.count_nonzero(truncated):
            return
        envs = np.flatnonzero(truncated)
        self._rollout.finals.append(
            Finals(
                steps=np.full(len(envs), self._now),
                envs=envs,
                obs={key: value[envs] for key, value in obs.items()},
                rl2s=rl2s[envs],
                time_idxs=time_idxs[envs],
            )
        )


def join(rollouts: Sequence[CollectedRollout]) -> CollectedRollout:
    """Join the envs of several rollouts, in order, into one; copies unless there is only one."""
    first = rollouts[0]
    if len(rollouts) == 1:
        return first
    offsets = np.cumsum([0, *(rollout.resets.shape[1] for rollout in rollouts)])

    def beside(parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts, axis=1)

    return CollectedRollout(
        history=first.history,
        obs={key: beside([r.obs[key] for r in rollouts]) for key in first.obs},
        rl2s=beside([r.rl2s for r in rollouts]),
        time_idxs=beside([r.time_idxs for r in rollouts]),
        resets=beside([r.resets for r in rollouts]),
        known_from=np.concatenate([r.known_from for r in rollouts]),
        steps={key: beside([r.steps[key] for r in rollouts]) for key in first.steps},
        finals=[
            Finals(f.steps, f.envs + offset, f.obs, f.rl2s, f.time_idxs)
            for r, offset in zip(rollouts, offsets, strict=False)
            for f in r.finals
        ],
        states={
            step: {key: torch.cat([r.states[step][key] for r in rollouts]) for key in state}
            for step, state in first.states.items()
        },
    )


def check_rollout(rollout: CollectedRollout) -> None:
    """Refuse a rollout in which the agent returned NaN or infinite numbers; environments check their own.

    Raises: ValueError naming the tensor, the first bad step and its env.
    """
    for name, column in rollout.steps.items():
        if column.dtype.kind == "f" and (bad := ~np.isfinite(column)).any():
            step, env = (int(i) for i in np.argwhere(bad)[0][:2])
            raise ValueError(
                f"The rollout's {name} has {int(bad.sum())} NaN or infinite numbers, first at step {step} of "
                f"env {env}. Fix: {_CAUSES}."
            )
