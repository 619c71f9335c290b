"""What PPOAgent's settings mean, and which of them fit together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from torch import nn

from ..nets import Gaussian, PolicyDistribution, TanhGaussian

_DISTRIBUTIONS: dict[str, type[PolicyDistribution]] = {"Gaussian": Gaussian, "TanhGaussian": TanhGaussian}
_VALUE_NORMS = ("none", "running", "popart")


def check_sharing(share_encoder: bool, *keys: Sequence[str] | None) -> None:
    """Raise ValueError if observations are told apart that one encoder for both cannot tell apart."""
    if share_encoder and any(part is not None for part in keys):
        raise ValueError(
            "actor_obs_keys and critic_obs_keys show policy and value function different observations, but "
            "PPOAgent.share_encoder is True. Fix: bind PPOAgent.share_encoder = False."
        )


def part_of(obs_space: spaces.Dict, keys: Sequence[str] | None, setting: str) -> spaces.Dict:
    """The observations under `keys`."""
    if keys is None:
        return obs_space
    unknown = [key for key in keys if key not in obs_space.spaces]
    if unknown or not keys:
        raise ValueError(
            f"PPOAgent.{setting} names {unknown or 'nothing'}, but the environment offers "
            f"{sorted(obs_space.spaces)}. Fix: bind PPOAgent.{setting} to some of these names."
        )
    return spaces.Dict({key: obs_space[key] for key in keys})


def numeric_keys(obs_space: spaces.Dict) -> list[str]:
    """Names of the observations that tensors can hold: all but texts, which rollouts leave out."""
    return [key for key, space in obs_space.spaces.items() if np.dtype(space.dtype).kind != "U"]


def chosen_distribution(
    chosen: type[PolicyDistribution] | str | None, action_space: Any
) -> type[PolicyDistribution] | None:
    """The policy's distribution; None for that of BaseAgent, which knows the discrete ones."""
    is_box = isinstance(action_space, spaces.Box)
    if chosen is None:
        return Gaussian if is_box else None
    if isinstance(chosen, str):
        if chosen not in _DISTRIBUTIONS:
            raise ValueError(
                f"PPOAgent.distribution_type is {chosen!r}, but the names are {sorted(_DISTRIBUTIONS)}. "
                "Fix: bind one of these, or leave it out."
            )
        chosen = _DISTRIBUTIONS[chosen]
    if chosen.is_discrete is is_box:
        raise ValueError(
            f"PPOAgent.distribution_type is {chosen.__name__}, which does not fit actions in {action_space}. "
            "Fix: leave it out; TanhGaussian and Gaussian are for Box spaces."
        )
    return chosen


def is_normed(value_norm: str) -> bool:
    """True if values are learned at unit scale. Raises: ValueError for an unknown name."""
    if value_norm not in _VALUE_NORMS:
        raise ValueError(
            f"PPOAgent.value_norm is {value_norm!r}, but must be one of "
            f"{', '.join(map(repr, _VALUE_NORMS))}. Fix: bind PPOAgent.value_norm to one of these."
        )
    return value_norm != "none"


def output_layer(head: nn.Module) -> nn.Linear:
    """The layer that the values come from: the last linear one with a single output."""
    layers = [m for m in head.modules() if isinstance(m, nn.Linear) and m.out_features == 1]
    if not layers or layers[-1].bias is None:
        raise ValueError(
            f"{type(head).__name__} does not end in a linear layer with bias and a single output, which "
            "PPOAgent.value_norm = 'popart' has to rescale. Fix: bind PPOAgent.value_norm = 'running'."
        )
    return layers[-1]
