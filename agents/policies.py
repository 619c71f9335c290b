"""What belongs to a policy besides its head: a fitting distribution, and the actions that are allowed."""

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
    TanhGaussian,
)

CONTINUOUS: dict[str, DistributionType] = {
    "Beta": Beta,
    "Gaussian": Gaussian,
    "GaussianMixture": GaussianMixture,
    "TanhGaussian": TanhGaussian,
}


def distribution_for(
    action_space: spaces.Space[Any], chosen: DistributionType | str | None, setting: str
) -> DistributionType:
    """The distribution type of a policy over an action space.

    Args:
        action_space: Discrete, flat MultiDiscrete or flat Box.
        chosen: by name: for Box "TanhGaussian" (which None means), "Gaussian", "Beta", "GaussianMixture";
            for MultiDiscrete "MultiCategorical" (None) or, if all factors are two, "Bernoulli"; for Discrete
            "Categorical" (None). Or any type of a kind that fits.
        setting: where it was chosen, for errors.
    Raises: ValueError for a distribution that does not fit.
    """
    fitting: dict[str, DistributionType] = {}
    if isinstance(action_space, spaces.Discrete):
        fitting = {"Categorical": Categorical}
    elif isinstance(action_space, spaces.MultiDiscrete):
        nvec = action_space.nvec.tolist()
        fitting = {"MultiCategorical": MultiCategorical.for_nvec(nvec)}
        if set(nvec) == {2}:
            fitting["Bernoulli"] = Bernoulli
    else:
        fitting = {"TanhGaussian": TanhGaussian, **CONTINUOUS}
    if chosen is None:
        return next(iter(fitting.values()))
    if isinstance(chosen, str) and chosen in fitting:
        return fitting[chosen]
    if isinstance(chosen, str) or chosen.is_discrete is isinstance(action_space, spaces.Box):
        known = CONTINUOUS.get(chosen, chosen) if isinstance(chosen, str) else chosen
        name = getattr(known, "__name__", repr(known))
        raise ValueError(
            f"{setting} is {name}, which does not fit actions in {action_space}. Fix: leave it out, or bind "
            f"one of {', '.join(map(repr, fitting))}{_if_made_one(action_space)}."
        )
    return chosen


def _if_made_one(action_space: spaces.Space[Any]) -> str:
    is_one = isinstance(action_space, spaces.Discrete)
    return "; if the environment has several choices, gym_env.joint_actions = 0 keeps them" if is_one else ""


@dataclass(frozen=True)
class ActionMask:
    """Reads which actions are allowed from an observation.

    An entry that is not 0 allows its action; where none is allowed (padding, the end of an episode), all are.

    Attributes:
        key: of the observation.
        nvec: numbers of actions of all factors; a single one for a Discrete space.
    """

    key: str
    nvec: tuple[int, ...]

    @classmethod
    def of(
        cls, key: str, obs_space: spaces.Dict, action_space: spaces.Space[Any], setting: str
    ) -> ActionMask:
        """The mask under `key`. Raises: ValueError if there is none that fits; `setting` named it."""
        if isinstance(action_space, spaces.Discrete):
            nvec = [int(action_space.n)]
        elif isinstance(action_space, spaces.MultiDiscrete):
            nvec = action_space.nvec.tolist()
        else:
            raise ValueError(
                f"{setting} is {key!r}, but actions in {action_space} cannot be ruled out one by one. "
                f"Fix: leave {setting} out."
            )
        space = obs_space.spaces.get(key)
        fits = isinstance(space, spaces.Box | spaces.MultiBinary) and prod(space.shape) == sum(nvec)
        if not fits:
            raise ValueError(
                f"{setting} is {key!r}, where the environment offers {space}, but a mask of {action_space} "
                f"is a MultiBinary or Box with {sum(nvec)} entries (of several factors, side by side). "
                f"Fix: name one of the observations {sorted(obs_space.spaces)} that is such a mask"
                f"{_if_made_one(action_space)}."
            )
        return cls(key, tuple(nvec))

    def __call__(self, obs: dict[str, Tensor], lead: Sequence[int]) -> Tensor:
        """(*lead, A) bool, True where allowed, from observations that begin with the shape `lead`."""
        allowed = obs[self.key].reshape(*lead, sum(self.nvec)) != 0
        parts = torch.split(allowed, list(self.nvec), dim=-1)
        return torch.cat([part | ~part.any(-1, keepdim=True) for part in parts], dim=-1)
