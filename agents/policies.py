"""Parts of a policy besides its head: the distribution for an action space, and the action mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from ..nets import (
    Bernoulli,
    Beta,
    Categorical,
    DistributionType,
    Gaussian,
    GaussianMixture,
    MultiCategorical,
    MultiCategoricalType,
    TanhGaussian,
)

CONTINUOUS: dict[str, DistributionType] = {
    "Beta": Beta,
    "Gaussian": Gaussian,
    "GaussianMixture": GaussianMixture,
    "TanhGaussian": TanhGaussian,
}
OWN: dict[str, Any] = {
    "Categorical": Categorical,
    "MultiCategorical": MultiCategorical,
    "Bernoulli": Bernoulli,
    **CONTINUOUS,
}


def distribution_for(
    action_space: spaces.Space[Any], chosen: DistributionType | str | None, setting: str
) -> DistributionType:
    """The distribution type of a policy over an action space.

    Args:
        action_space: Discrete, flat MultiDiscrete or flat Box.
        chosen: a class of `nets`, or its name: for Box "TanhGaussian" (the default), "Gaussian", "Beta" or
            "GaussianMixture"; for MultiDiscrete "MultiCategorical" (the default) or, if all factors have two
            actions, "Bernoulli"; for Discrete "Categorical" (the default). None for the default. A type of
            your own fits Box if its `is_discrete` is False, and other spaces if it is True. For Discrete,
            derive it from `Categorical`, whose probabilities most agents need.
        setting: name of the setting that chose it, for errors.
    Raises: ValueError for a distribution that does not fit.
    """
    fitting: dict[str, DistributionType] = {}
    if isinstance(action_space, spaces.Discrete):
        fitting = {"Categorical": Categorical}
    elif isinstance(action_space, spaces.MultiDiscrete):
        nvec = action_space.nvec.tolist()
        fitting = {"MultiCategorical": MultiCategoricalType(nvec)}
        if set(nvec) == {2}:
            fitting["Bernoulli"] = Bernoulli
    else:
        fitting = {"TanhGaussian": TanhGaussian, **CONTINUOUS}
    if chosen is None:
        return next(iter(fitting.values()))
    chosen = OWN.get(chosen, chosen) if isinstance(chosen, str) else chosen
    name = getattr(chosen, "__name__", repr(chosen))
    is_own = chosen in OWN.values()
    if is_own and name in fitting:
        return fitting[name]
    is_discrete = getattr(chosen, "is_discrete", None)  # None if it is not a distribution
    if is_own or is_discrete in {None, isinstance(action_space, spaces.Box)}:
        raise ValueError(
            f"{setting} is {name}, which does not fit actions in {action_space}. Fix: remove this binding, "
            f"or bind one of {', '.join(map(repr, fitting))}{_if_made_one(action_space)}."
        )
    return chosen


def _if_made_one(action_space: spaces.Space[Any]) -> str:
    is_one = isinstance(action_space, spaces.Discrete)
    return "; if the environment has several choices, gym_env.joint_actions = 0 keeps them" if is_one else ""


@dataclass(frozen=True)
class ActionMask:
    """Reads the allowed actions from an observation.

    An entry other than 0 allows its action. If none is allowed (padding, the end of an episode), all are.

    Attributes:
        key: name of the observation.
        nvec: numbers of actions of all factors; a single one for a Discrete space.
    """

    key: str
    nvec: tuple[int, ...]

    @classmethod
    def of(
        cls, key: str, obs_space: spaces.Dict, action_space: spaces.Space[Any], setting: str
    ) -> ActionMask:
        """The mask under `key`, for the setting `setting`. Raises: ValueError if it does not fit."""
        if isinstance(action_space, spaces.Discrete):
            nvec = [int(action_space.n)]
        elif isinstance(action_space, spaces.MultiDiscrete):
            nvec = action_space.nvec.tolist()
        else:
            raise ValueError(
                f"{setting} is {key!r}, but actions in {action_space} cannot be masked one by one. Fix: "
                f"remove {setting}."
            )
        space = obs_space.spaces.get(key)
        fits = isinstance(space, spaces.Box | spaces.MultiBinary) and prod(space.shape) == sum(nvec)
        if not fits:
            found = "not an observation of" if space is None else f"{space} in"
            raise ValueError(
                f"{setting} is {key!r}, which is {found} this environment, but a mask of {action_space} "
                f"is a MultiBinary or Box with {sum(nvec)} entries (the masks of all factors, "
                f"concatenated). Fix: name one of the observations {sorted(obs_space.spaces)} that is such "
                f"a mask{_if_made_one(action_space)}."
            )
        return cls(key, tuple(nvec))

    def __call__(self, obs: dict[str, Tensor], lead: Sequence[int]) -> Tensor:
        """(*lead, A) bool, True for allowed actions, from observations with leading axes `lead`."""
        allowed = obs[self.key].reshape(*lead, sum(self.nvec)) != 0
        parts = torch.split(allowed, list(self.nvec), dim=-1)
        return torch.cat([part | ~part.any(-1, keepdim=True) for part in parts], dim=-1)
