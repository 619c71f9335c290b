"""Attributes and methods of environments inside a vector environment, and a settable length of episodes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym

from .returned import step_result
from .sequence_env import SequenceEnv

EPISODE_LENGTH = "max_episode_length"
"""An attribute of every environment; a `MaxEpisodeLength` provides it if the environment lacks it."""


class MaxEpisodeLength(gym.Wrapper[Any, Any, Any, Any]):
    """Truncates episodes after `max_episode_length` env steps, which may be changed at any time.

    A running episode counts from its own reset, or from the moment at which this wrapper was added.

    Attributes:
        max_episode_length: value of the argument, which may be changed.
        num_steps: env steps of the running episode.

    Args:
        env: environment to wrap.
        max_episode_length: in env steps; None means that this wrapper has no limit.
    """

    def __init__(self, env: gym.Env[Any, Any], max_episode_length: int | None = None) -> None:
        super().__init__(env)
        self.max_episode_length = max_episode_length
        self.num_steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Begin an episode."""
        self.num_steps = 0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        """Take one env step; truncated is True in the last one allowed."""
        found = self.env.step(action)
        self.num_steps += 1
        if self.max_episode_length is None or self.num_steps < self.max_episode_length:
            return found
        obs, reward, terminated, _, info = step_result(found, self.env)
        return obs, reward, terminated, True, info


def has_attr(env: SequenceEnv, name: str) -> bool:
    """True if the environment or one of its wrappers has the attribute."""
    return _owner(env, name) is not None


def call_attr(env: SequenceEnv, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method and return its result; for an attribute that cannot be called, return its value."""
    owner = _owner(env, name)
    if owner is None:
        raise AttributeError(_missing_text(env, name))
    found = getattr(owner, name)
    return found(*args, **kwargs) if callable(found) else found


def set_attr(env: SequenceEnv, name: str, value: Any) -> None:
    """Set the attribute where it is defined; the outermost wrapper is tried first."""
    owner = _owner(env, name)
    if owner is None and name == EPISODE_LENGTH:
        owner = env.env = MaxEpisodeLength(env.env)
    if owner is None:
        raise AttributeError(_missing_text(env, name))
    setattr(owner, name, value)


def call_if_defined(env: SequenceEnv, name: str, *args: Any) -> None:
    """Call the method if it exists."""
    if has_attr(env, name):
        call_attr(env, name, args, {})


ATTRIBUTE_QUERIES: dict[str, Callable[..., Any]] = {
    "call": call_attr,
    "has_attr": has_attr,
    "set_attr": set_attr,
    "call_if_defined": call_if_defined,
}
"""Queries of one environment, by name; each function takes the environment, then the arguments."""


def layers(env: Any) -> Iterator[Any]:
    """Yield the wrappers of an environment from the outside in, then the environment itself."""
    yield env
    while isinstance(env, gym.Wrapper | gym.vector.VectorWrapper):
        env = env.env
        yield env


def owns(layer: Any, name: str) -> bool:
    """True if the layer itself has the attribute; an attribute of an inner layer does not count."""
    return name in getattr(layer, "__dict__", ()) or hasattr(type(layer), name)


def _owner(env: SequenceEnv, name: str) -> Any:
    # SequenceEnv itself is skipped: its additions are not the user's.
    return next((layer for layer in layers(env.env) if owns(layer, name)), None)


def _missing_text(env: SequenceEnv, name: str) -> str:
    found = list(layers(env.env))
    names = {known for layer in found for known in dir(layer) if not known.startswith("_")}
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    chain = " > ".join(type(layer).__name__ for layer in found)
    return (
        f"The environment {env.env_name} has no attribute {name!r} (searched: {chain}). {hint}Fix: define "
        "it in the environment or in one of its wrappers (self.<name> = ... in its __init__)."
    )
