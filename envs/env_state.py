"""The state of an environment as plain values, so that a checkpoint can hold it and an episode can continue.

An environment, or a wrapper for everything inside it, offers its state by two methods:

    get_state() -> dict: texts as keys; numbers, texts, booleans, None, NumPy arrays, and lists, tuples and
        dicts of these. It contains everything that future steps and resets depend on, including the random
        generator (see `generator_state`). Later steps must not change the returned values.
    set_state(state): continue from there; called after a reset. ValueError for a state that does not fit.
    missing_state() -> str | None: optional, for a wrapper that queries the inner environment by
        `chain_state`: the name of the part that cannot be stored.

This module supports gymnasium's wrappers TimeLimit and OrderEnforcing, its wrappers that transform single
observations, rewards or actions by a function, and `PartialObs`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import gin
import gymnasium as gym
from gymnasium import wrappers

from .attributes import MaxEpisodeLength, layers, owns
from .partial import PartialObs
from .sequence_env import SequenceEnv
from .spec import EnvSpec, resolve_env

_COUNTERS: dict[type, tuple[str, ...]] = {
    wrappers.TimeLimit: ("_elapsed_steps",),
    wrappers.OrderEnforcing: ("_has_reset",),
    wrappers.PassiveEnvChecker: (),
}
_PURE = (wrappers.TransformObservation, wrappers.TransformReward, wrappers.TransformAction, PartialObs)


def offers_state(layer: Any) -> bool:
    """Return True if an environment or wrapper itself has `get_state` and `set_state`."""
    return owns(layer, "get_state") and owns(layer, "set_state")


def generator_state(env: gym.Env[Any, Any]) -> dict[str, Any]:
    """State of the environment's `np_random`."""
    return copy.deepcopy(dict(env.unwrapped.np_random.bit_generator.state))


def set_generator_state(env: gym.Env[Any, Any], state: dict[str, Any]) -> None:
    """Restore what `generator_state` returned."""
    env.unwrapped.np_random.bit_generator.state = state


# ---- wrappers and what is inside them ----


def missing_layer(env: Any) -> str | None:
    """The outermost layer without access to its state; None if all layers have it."""
    for layer in layers(env):
        if offers_state(layer):
            return layer.missing_state() if owns(layer, "missing_state") else None
        if type(layer) not in _COUNTERS and not isinstance(layer, _PURE):
            return type(layer).__name__
    return None


def chain_state(env: Any, bottom: Callable[[Any], dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """States from the outside in, down to the first layer that includes the state of everything inside it.

    bottom: returns the state of an innermost environment that has no `get_state`.
    """
    entries: list[dict[str, Any]] = []
    for layer in layers(env):
        name = type(layer).__name__
        if offers_state(layer):
            return [*entries, {"layer": name, "state": copy.deepcopy(layer.get_state())}]
        if bottom is not None and not isinstance(layer, gym.Wrapper):
            return [*entries, {"layer": name, "state": bottom(layer)}]
        entries.append({"layer": name, "state": {key: getattr(layer, key) for key in _counters(layer)}})
    return entries


def set_chain_state(
    env: Any, entries: Sequence[dict[str, Any]], bottom: Callable[[Any, Any], None] | None = None
) -> None:
    """Restore what `chain_state` returned.

    Raises: ValueError if the wrappers differ from those of the state.
    """
    found = list(layers(env))[: len(entries)]
    names, saved = [type(layer).__name__ for layer in found], [entry["layer"] for entry in entries]
    if names != saved:
        raise ValueError(
            f"The saved state is that of an environment {' > '.join(saved)}, but this environment is "
            f"{' > '.join(names)}. Fix: resume with the environment and wrappers of the earlier run, or set "
            "Collector.save_env_state = False to begin new episodes."
        )
    for layer, entry in zip(found, entries, strict=True):
        if offers_state(layer):
            layer.set_state(copy.deepcopy(entry["state"]))
        elif bottom is not None and not isinstance(layer, gym.Wrapper):
            bottom(layer, entry["state"])
        else:
            for key in _counters(layer):
                setattr(layer, key, entry["state"][key])


def _counters(layer: Any) -> tuple[str, ...]:
    return _COUNTERS.get(type(layer), ())


# ---- queries of a vector environment to each of its environments ----


def state_problem(env: SequenceEnv) -> str | None:
    """The reason why the state of an environment is not available; None if it is."""
    missing = missing_layer(_without_limit(env))
    if missing is None:
        return None
    methods = "get_state() and set_state(state)"
    return f"The state of the environment {env.env_name} cannot be stored: {missing} has no {methods}"


def get_state(env: SequenceEnv) -> dict[str, Any]:
    """State of an environment and all its wrappers."""
    limit = env.env if isinstance(env.env, MaxEpisodeLength) else None
    return {
        "limit": None if limit is None else [limit.max_episode_length, limit.num_steps],
        "layers": chain_state(_without_limit(env)),
    }


def set_state(env: SequenceEnv, state: dict[str, Any]) -> str:
    """Restore what `get_state` returned; returns the environment's name."""
    set_chain_state(_without_limit(env), state["layers"])
    if state["limit"] is not None:
        if not isinstance(env.env, MaxEpisodeLength):
            env.env = MaxEpisodeLength(env.env)
        env.env.max_episode_length, env.env.num_steps = state["limit"]
    return env.env_name


def _without_limit(env: SequenceEnv) -> gym.Env[Any, Any]:
    """Remove the episode limit that a vector environment has added as a wrapper."""
    return env.env.env if isinstance(env.env, MaxEpisodeLength) else env.env


# ---- environments of other packages ----


@gin.configurable
class ClassicControlState(gym.Wrapper[Any, Any, Any, Any]):
    """Offers the state of an environment that keeps it in a few attributes, like classic control.

    In gin: `ClassicControlState.env = @gym_env()`, then `Experiment.make_train_env = @ClassicControlState`.

    Args:
        env: an environment, or anything that `resolve_env` takes: a recipe, an id, a callable.
        attributes: attributes of the innermost environment that form its state, together with its random
            generator; missing ones are skipped.

    Raises: ValueError if the environment has none of them, or a wrapper in between cannot be stored.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any] | EnvSpec | str | Callable[..., Any] = gin.REQUIRED,
        attributes: Sequence[str] = ("state", "steps_beyond_terminated", "last_u"),
    ) -> None:
        super().__init__(env if isinstance(env, gym.Env) else resolve_env(env).build_raw())
        self._attributes = tuple(attributes)
        wrapped = [layer for layer in layers(self.env) if isinstance(layer, gym.Wrapper)]
        opaque = [type(w).__name__ for w in wrapped if missing_layer(w) == type(w).__name__]
        if not self._found(self.unwrapped):
            self.env.reset()  # some environments have their state only after a reset
        if opaque or not self._found(self.unwrapped):
            what = opaque[0] if opaque else type(self.unwrapped).__name__
            raise ValueError(
                f"ClassicControlState cannot store {what}, which has none of the attributes "
                f"{self._attributes}. Fix: name those that hold its state in "
                f"ClassicControlState.attributes, or define get_state() and set_state(state) in {what}."
            )

    def get_state(self) -> dict[str, Any]:
        """Attributes, random generator, and the counters of the wrappers inside."""
        return {"layers": chain_state(self.env, self._read)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_state` returned."""
        set_chain_state(self.env, state["layers"], self._write)

    def _found(self, env: gym.Env[Any, Any]) -> list[str]:
        return [name for name in self._attributes if hasattr(env, name)]

    def _read(self, env: gym.Env[Any, Any]) -> dict[str, Any]:
        values = {name: copy.deepcopy(getattr(env, name)) for name in self._found(env)}
        return {"attributes": values, "generator": generator_state(env)}

    def _write(self, env: gym.Env[Any, Any], state: dict[str, Any]) -> None:
        for name, value in state["attributes"].items():
            setattr(env, name, copy.deepcopy(value))
        set_generator_state(env, state["generator"])
