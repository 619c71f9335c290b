"""Timestep encoders: one observation, previous reward and previous action -> one vector."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import gin
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from .mlp import MLP, initialize, norm_layer, require_positive
from .normalization import RunningNorm


class TstepEncoder(nn.Module, ABC):
    """Base class. Subclasses must treat every timestep alone: no mixing over time.

    Args:
        obs_space: the observations, one entry per name.
        rl2_dim: width 1 + A of the previous reward and action.
    """

    def __init__(self, obs_space: spaces.Dict, rl2_dim: int) -> None:
        super().__init__()
        self.obs_space, self.rl2_dim = obs_space, rl2_dim

    @property
    @abstractmethod
    def emb_dim(self) -> int:
        """Width of the output."""

    @abstractmethod
    def forward(self, obs: dict[str, Tensor], rl2s: Tensor, mask: Tensor | None = None) -> Tensor:
        """Obs each (B, L, ...), rl2s (B, L, 1+A) -> (B, L, emb_dim).

        mask (B, L, 1) bool is True on real timesteps; when given in training mode, those feed running
        statistics.
        """

    def gather_statistics(self, obs: dict[str, Tensor], rl2s: Tensor, mask: Tensor) -> None:
        """Show running statistics the timesteps of a rollout where mask (B, L, 1) bool is True.

        Shapes as in `forward`. On-policy training calls this once per rollout, in place of masks in
        `forward`, so that nothing moves between the evaluation of a rollout and its last update. Encoders
        without statistics leave it as it is.
        """


@gin.configurable(denylist=["obs_space", "rl2_dim"])
class FFTstepEncoder(TstepEncoder):
    """Observations (flattened, discrete ones one-hot) and rl2s, normalised, through an MLP.

    Args:
        obs_space: given by the agent.
        rl2_dim: given by the agent.
        n_layers: hidden layers.
        d_hidden: width of the hidden layers.
        d_output: width of the result.
        activation: name of the non-linearity.
        activate_output: apply it to the result too, so that heads without layers of their own make up a
            plain MLP with this encoder.
        out_norm: normalisation of the result.
        normalize_inputs: shift and scale inputs by running statistics of the replayed data.
        hide_rl2s: feed zeros instead of previous reward and action.
        hide_rewards: feed zeros instead of the previous reward only.
        specify_obs_keys: names of the observations to use; all of them when None.
        init: how linear layers start, "default" or "orthogonal".
    Raises: ValueError for a size below 1, unknown observation names or spaces that cannot be flattened.
    """

    def __init__(  # noqa: PLR0913 - every keyword is a gin setting
        self,
        obs_space: spaces.Dict,
        rl2_dim: int,
        *,
        n_layers: int = 2,
        d_hidden: int = 512,
        d_output: int = 256,
        activation: str = "leaky_relu",
        out_norm: str | None = "layer",
        normalize_inputs: bool = True,
        hide_rl2s: bool = False,
        hide_rewards: bool = False,
        specify_obs_keys: list[str] | None = None,
        init: str = "default",
        activate_output: bool = False,
    ) -> None:
        super().__init__(obs_space, rl2_dim)
        require_positive("FFTstepEncoder", n_layers=n_layers, d_hidden=d_hidden, d_output=d_output)
        self.keys = sorted(specify_obs_keys if specify_obs_keys is not None else obs_space.spaces)
        unknown = [key for key in self.keys if key not in obs_space.spaces]
        if unknown or not self.keys:
            raise ValueError(
                f"specify_obs_keys names {unknown or 'nothing'}, but the environment offers "
                f"{sorted(obs_space.spaces)}. "
                "Fix: bind FFTstepEncoder.specify_obs_keys to some of these names."
            )
        width = sum(_flat_width(key, obs_space[key]) for key in self.keys) + rl2_dim
        self.hide_rl2s, self.hide_rewards = hide_rl2s, hide_rewards
        self.input_norm = RunningNorm(width) if normalize_inputs else None
        self.mlp = MLP(width, d_hidden, d_output, n_layers, activation)
        self.out_norm = norm_layer(out_norm, d_output)
        self.activates_output = activate_output
        self._emb_dim = d_output
        initialize(self.mlp, init)

    @property
    def emb_dim(self) -> int:
        return self._emb_dim

    def forward(self, obs: dict[str, Tensor], rl2s: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self._inputs(obs, rl2s)
        if self.input_norm is not None:
            if self.training and mask is not None:
                self.input_norm.gather(x, mask)
            x = self.input_norm(x)
        y: Tensor = self.out_norm(self.mlp(x))
        return self.mlp.activation(y) if self.activates_output else y

    def gather_statistics(self, obs: dict[str, Tensor], rl2s: Tensor, mask: Tensor) -> None:
        if self.input_norm is not None:
            self.input_norm.gather(self._inputs(obs, rl2s), mask)

    def _inputs(self, obs: dict[str, Tensor], rl2s: Tensor) -> Tensor:
        """(B, L, width) float32, what the network sees before it is normalised."""
        parts = [_flatten(obs[key], self.obs_space[key]) for key in self.keys]
        if self.hide_rl2s:
            rl2s = torch.zeros_like(rl2s)
        elif self.hide_rewards:
            rl2s = torch.cat([torch.zeros_like(rl2s[..., :1]), rl2s[..., 1:]], dim=-1)
        return torch.cat([*parts, rl2s], dim=-1)


def _flat_width(key: str, space: spaces.Space[Any]) -> int:
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return int(space.nvec.sum())
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        width = 1
        for size in space.shape:
            width *= int(size)
        return width
    raise ValueError(
        f"Observation {key!r} is a {type(space).__name__}, which cannot be flattened to numbers. "
        "Fix: leave it out with FFTstepEncoder.specify_obs_keys, or write a TstepEncoder for it."
    )


def _flatten(x: Tensor, space: spaces.Space[Any]) -> Tensor:
    """(B, L, *shape) -> (B, L, width) float32."""
    if isinstance(space, spaces.Discrete):
        return F.one_hot(x.reshape(x.shape[:2]).long() - int(space.start), int(space.n)).float()
    if isinstance(space, spaces.MultiDiscrete):
        sizes = [int(n) for n in space.nvec.reshape(-1)]
        digits = x.reshape(*x.shape[:2], -1).long()
        return torch.cat([F.one_hot(digits[..., i], n).float() for i, n in enumerate(sizes)], dim=-1)
    return x.reshape(*x.shape[:2], -1).float()
