"""Adapter for environments that bring their own batch axis (EnvPool, JAX and GPU environments, make_vec)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from .actions import ActionMap
from .group import Metrics, StepBuffers
from .observations import ObsLayout
from .sequence_env import METRIC_PREFIX
from .spec import EnvSpec
from .vector_base import SAME_STEP, SequenceVectorEnv, StepResult


class AlreadyVectorizedEnv(SequenceVectorEnv):
    """One gymnasium VectorEnv in the library's form. See `SequenceVectorEnv` for the interface.

    The environment must reset a finished row within the same step (`metadata["autoreset_mode"]` SAME_STEP)
    and report the last observation as `infos["final_obs"]`: per row (an object array) or batched, with the
    mask `_final_obs`.

    Args:
        specs: recipes whose target returns a VectorEnv. Exactly one environment is built; several equal
            recipes mean that it must have that many rows.
    """

    def __init__(self, specs: Sequence[EnvSpec]) -> None:
        self.closed = True  # until there is something to close
        if any(spec is not specs[0] and spec != specs[0] for spec in specs[1:]):
            raise ValueError(
                f"already_vectorized got {len(specs)} different environments, but builds a single one. "
                "Fix: give make_train_env one callable, not a list."
            )
        env = specs[0].build_raw()
        _check_kind(env, len(specs))
        self.env = env
        self._layout, self._map = ObsLayout(env.single_observation_space), ActionMap(env.single_action_space)
        obs_space, action_space = self._layout.space, self._map.policy_space
        memory = bytearray(StepBuffers.num_bytes(obs_space, action_space, env.num_envs))
        super().__init__(
            obs_space, action_space, StepBuffers.carve(memory, obs_space, action_space, env.num_envs)
        )
        self.closed = False
        name = specs[0].env_name or getattr(env, "env_name", None) or (env.spec.name if env.spec else None)
        self.env_names = [str(name or type(env.unwrapped).__name__)] * env.num_envs

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Begin new episodes everywhere; the environment turns the seed into one per row."""
        raw, infos = self.env.reset(seed=seed, options=options)
        self._write(raw, self.buffers.obs)
        return self.buffers.obs, self.infos(False, self._metrics(infos))

    def step(self, actions: Any) -> StepResult:
        """One env step everywhere."""
        buffers = self.buffers
        buffers.actions[:] = actions
        env_actions = np.asarray(self._map.to_env(buffers.actions))
        raw, rewards, terminated, truncated, infos = self.env.step(env_actions)
        self._write(raw, buffers.obs)
        buffers.rewards[:], buffers.terminated[:], buffers.truncated[:] = rewards, terminated, truncated
        ended = buffers.terminated | buffers.truncated
        if ended.any():
            self._write_final(infos, ended)
        return self.step_result(bool(ended.any()), self._metrics(infos))

    def render(self) -> Any:
        """Whatever the environment renders."""
        return self.env.render()

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environment."""
        self.env.close(**kwargs)

    def _write(self, raw: Any, columns: dict[str, np.ndarray]) -> None:
        for leaf in self._layout.leaves:
            columns[leaf.key][...] = leaf.read(raw)

    def _write_final(self, infos: dict[str, Any], ended: np.ndarray) -> None:
        final = infos.get("final_obs", infos.get("final_observation"))
        if final is None:
            raise ValueError(
                f"{type(self.env).__name__} ended an episode without infos['final_obs'] (its infos: "
                f"{sorted(infos)}), so the last observation is lost. Fix: make the vector environment "
                "report final_obs on same-step autoreset."
            )
        if isinstance(final, np.ndarray) and final.dtype == object:
            columns = list(self.buffers.final_obs.values())
            for row in np.flatnonzero(ended).tolist():
                self._layout.write(final[row], columns, row)
        else:
            self._write(final, self.buffers.final_obs)

    def _metrics(self, infos: dict[str, Any]) -> Metrics:
        metrics: Metrics = []
        for source in (infos, infos.get("final_info", {})):
            for key in source if isinstance(source, dict) else ():
                if isinstance(key, str) and key.startswith(METRIC_PREFIX):
                    has_value = source.get(f"_{key}", np.ones(self.num_envs, np.bool_))
                    name = key[len(METRIC_PREFIX) :]
                    metrics += [(int(row), name, source[key][row]) for row in np.flatnonzero(has_value)]
        return metrics


def _check_kind(env: Any, num_specs: int) -> None:
    if not isinstance(env, gym.vector.VectorEnv):
        raise TypeError(
            f"env_mode='already_vectorized' got {type(env).__name__}, but needs a "
            "gymnasium.vector.VectorEnv. Fix: return gymnasium.make_vec(...) from make_train_env, or use "
            "env_mode 'sync' or 'async'."
        )
    if num_specs not in (1, env.num_envs):
        raise ValueError(
            f"The vector environment has {env.num_envs} rows, but parallel_actors is {num_specs}. "
            f"Fix: set Experiment.parallel_actors = {env.num_envs}, or build the environment with "
            f"{num_specs} rows."
        )
    mode = env.metadata.get("autoreset_mode")
    if getattr(mode, "value", mode) != getattr(SAME_STEP, "value", SAME_STEP):
        raise ValueError(
            f"The vector environment's autoreset mode is {mode}, but SAME_STEP is the one supported. Fix: "
            "build it so, e.g. gymnasium.make_vec(id, num_envs, "
            "vector_kwargs={'autoreset_mode': AutoresetMode.SAME_STEP})."
        )
