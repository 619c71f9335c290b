"""Timestep encoders, which map an observation, previous reward and previous action to a vector."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import gin
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from .goals import FFGoalEmb, TokenGoalEmb
from .images import (
    CNNType,
    GridworldCNN,
    ImageEmb,
    MapEmb,
    NatureishCNN,
    default_cnn,
    holds_ids,
    sides_of,
)
from .log_once import log_once
from .mlp import MLP, Linear, activation_fn, initialize, norm_layer, require_at_least, require_positive
from .normalization import RunningNorm

SHIFTED_SHARE = 0.75
"""Share of the sequences of a batch that `drqv2_aug` shifts."""
_SMALLEST_IMAGE, _SMALLEST_MAP = 17, 4  # pixels and cells, shorter side


class TstepEncoder(nn.Module, ABC):
    """Base class of timestep encoders. Subclasses must treat each timestep separately, without memory.

    A subclass defines `emb_dim` and `inner_forward`. The inputs of the latter depend on these settings:

    Args:
        obs_space: the observations, one entry per name.
        rl2_dim: width 1 + A of the previous reward and action.
        specify_obs_keys: names of the observations to use; None for all.
        hide_rl2s: replace previous reward and action by zeros.
        hide_rewards: replace only the previous reward by zeros.
        time_scale: append the index of the timestep in its episode, divided by this, to the previous reward
            and action; None leaves it out.

    Attributes:
        keys: names of the observations that it uses, sorted.
        rl2_dim: width of previous reward and action, 1 + A, plus 1 with a time_scale.
    Raises: ValueError for names that are not in obs_space, or a time_scale that is not positive.
    """

    def __init__(
        self,
        obs_space: spaces.Dict,
        rl2_dim: int,
        *,
        specify_obs_keys: Sequence[str] | None = None,
        hide_rl2s: bool = False,
        hide_rewards: bool = False,
        time_scale: int | None = None,
    ) -> None:
        super().__init__()
        self.obs_space, self.rl2_dim = obs_space, rl2_dim + (time_scale is not None)
        self.keys = _chosen_keys(type(self).__name__, obs_space, specify_obs_keys)
        self.hide_rl2s, self.hide_rewards, self.time_scale = hide_rl2s, hide_rewards, time_scale
        if time_scale is not None:
            require_positive(type(self).__name__, time_scale=time_scale)

    @property
    @abstractmethod
    def emb_dim(self) -> int:
        """Width of the output."""

    def describe(self) -> str:
        """Name of the class, and the observations that it uses if it does not use all."""
        is_all = len(self.keys) == len(self.obs_space.spaces)
        return type(self).__name__ + ("" if is_all else f" of {', '.join(self.keys)}")

    def forward(
        self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Embed timesteps, (B, L, emb_dim).

        Args:
            obs: each (B, L, ...) in the environment's dtype.
            rl2s: (B, L, 1+A) float32.
            time_idxs: (B, L, 1) int64, index within the episode.
            mask: (B, L, 1) bool, True on real timesteps; in training mode, these update running statistics.
                None updates nothing.
        """
        return self.inner_forward({key: obs[key] for key in self.keys}, self._shown(rl2s, time_idxs), mask)

    def inner_forward(self, obs: dict[str, Tensor], rl2s: Tensor, mask: Tensor | None) -> Tensor:
        """Embed timesteps for `forward`, from the observations of `keys` and rl2s (B, L, rl2_dim).

        Hidden entries of rl2s are zeros. With a time_scale, the last entry is the time.
        """
        raise NotImplementedError(f"{type(self).__name__} has no inner_forward. Fix: define it.")

    def gather_statistics(
        self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, mask: Tensor
    ) -> None:
        """Gather running statistics over the timesteps of a rollout where mask (B, L, 1) bool is True.

        Shapes are those of `forward`. On-policy training calls this once per rollout, instead of passing
        masks to `forward`, so that statistics are constant between the evaluation of a rollout and its last
        update. Encoders without statistics need not override it.
        """

    def _shown(self, rl2s: Tensor, time_idxs: Tensor) -> Tensor:
        """(B, L, rl2_dim): rl2s (B, L, 1+A) with zeros for hidden entries, and the time (B, L, 1) if used."""
        if self.hide_rl2s:
            rl2s = torch.zeros_like(rl2s)
        elif self.hide_rewards:
            rl2s = torch.cat([torch.zeros_like(rl2s[..., :1]), rl2s[..., 1:]], dim=-1)
        return rl2s if self.time_scale is None else torch.cat([rl2s, time_idxs / self.time_scale], dim=-1)


def _chosen_keys(owner: str, obs_space: spaces.Dict, names: Sequence[str] | None) -> list[str]:
    keys = sorted(names if names is not None else obs_space.spaces)
    unknown = [key for key in keys if key not in obs_space.spaces]
    if unknown or not keys:
        raise ValueError(
            f"specify_obs_keys names {unknown or 'nothing'}, but the environment offers "
            f"{sorted(obs_space.spaces)}. Fix: bind {owner}.specify_obs_keys to some of these names."
        )
    return keys


# ---- numbers through an MLP, with or without embeddings of other things ----


class _MLPTstepEncoder(TstepEncoder):
    """An MLP on normalised flat observations and rl2s, and embeddings of the other observations.

    embedders: modules (B, L, ...) -> (B, L, width) and their widths, by name of the observation.
    """

    def __init__(
        self,
        obs_space: spaces.Dict,
        rl2_dim: int,
        embedders: Mapping[str, tuple[nn.Module, int]],
        *,
        n_layers: int,
        d_hidden: int,
        d_output: int,
        activation: str,
        out_norm: str | None,
        normalize_inputs: bool,
        rl2_gain: float,
        init: str,
        activate_output: bool = False,
        **base: Any,
    ) -> None:
        super().__init__(obs_space, rl2_dim, **base)
        owner = type(self).__name__
        require_positive(owner, n_layers=n_layers, d_hidden=d_hidden, d_output=d_output)
        require_at_least(0, owner, rl2_gain=rl2_gain)
        self.flat_keys = [key for key in self.keys if key not in embedders]
        self.embedded_keys = list(embedders)
        flat_width = sum(_flat_width(owner, key, obs_space) for key in self.flat_keys) + self.rl2_dim
        self._choices = {key: _choices(obs_space[key]) for key in self.flat_keys}
        self.input_norm = RunningNorm(flat_width) if normalize_inputs else None
        width = flat_width + sum(added for _, added in embedders.values())
        self.mlp = MLP(width, d_hidden, d_output, n_layers, activation)
        self.out_norm = norm_layer(out_norm, d_output)
        self.activates_output = activate_output
        self._emb_dim = d_output
        initialize(self.mlp, init)
        with torch.no_grad():
            first = next(self.mlp.hidden.parameters())
            before = flat_width - self.rl2_dim
            first[:, before : before + rl2_dim] *= rl2_gain
        self.embedders = nn.ModuleList(module for module, _ in embedders.values())

    @property
    def emb_dim(self) -> int:
        return self._emb_dim

    def inner_forward(self, obs: dict[str, Tensor], rl2s: Tensor, mask: Tensor | None) -> Tensor:
        x = self._flat(obs, rl2s)
        if self.input_norm is not None:
            if self.training and mask is not None:
                self.input_norm.gather(x, mask)
            x = self.input_norm(x)
        if self.embedded_keys:
            pairs = zip(self.embedders, self.embedded_keys, strict=True)
            x = torch.cat([x, *(embedder(obs[key]) for embedder, key in pairs)], dim=-1)
        y: Tensor = self.out_norm(self.mlp(x))
        return self.mlp.activation(y) if self.activates_output else y

    def gather_statistics(
        self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, mask: Tensor
    ) -> None:
        if self.input_norm is not None:
            self.input_norm.gather(self._flat(obs, self._shown(rl2s, time_idxs)), mask)

    def _flat(self, obs: dict[str, Tensor], rl2s: Tensor) -> Tensor:
        """(B, L, width) float32, the inputs that are normalised."""
        return torch.cat([*(_flatten(obs[key], self._choices[key]) for key in self.flat_keys), rl2s], dim=-1)


@gin.configurable(denylist=["obs_space", "rl2_dim"])
class FFTstepEncoder(_MLPTstepEncoder):
    """An MLP on normalised observations (flattened, discrete ones as one-hots) and rl2s.

    Args:
        obs_space: given by the agent.
        rl2_dim: given by the agent.
        n_layers: number of hidden layers.
        d_hidden: width of the hidden layers.
        d_output: width of the result.
        activation: relu, leaky_relu, gelu, silu, mish or tanh.
        activate_output: apply the non-linearity to the result too, so that this encoder and heads without
            hidden layers form a plain MLP.
        out_norm: normalisation of the result.
        normalize_inputs: shift and scale inputs by running statistics of the replayed data.
        hide_rl2s: replace previous reward and action by zeros.
        hide_rewards: replace only the previous reward by zeros.
        time_scale: also use the index of the timestep in its episode, divided by this; None leaves it out.
        specify_obs_keys: names of the observations to use; None for all.
        rl2_gain: factor of the initial weights of previous reward and action; below 1, they gain influence by
            learning.
        init: initialisation of linear layers, "default" or "orthogonal".
    Raises: ValueError for a size below 1, unknown observation names or spaces that cannot be flattened.
    """

    def __init__(  # noqa: PLR0913 - every keyword is a gin setting
        self,
        obs_space: spaces.Dict,
        rl2_dim: int,
        *,
        n_layers: int = 2,
        d_hidden: int = 128,
        d_output: int = 128,
        activation: str = "leaky_relu",
        out_norm: str | None = "layer",
        normalize_inputs: bool = True,
        hide_rl2s: bool = False,
        hide_rewards: bool = False,
        time_scale: int | None = None,
        specify_obs_keys: Sequence[str] | None = None,
        rl2_gain: float = 1.0,
        init: str = "default",
        activate_output: bool = False,
    ) -> None:
        super().__init__(
            obs_space,
            rl2_dim,
            {},
            n_layers=n_layers,
            d_hidden=d_hidden,
            d_output=d_output,
            activation=activation,
            out_norm=out_norm,
            normalize_inputs=normalize_inputs,
            rl2_gain=rl2_gain,
            init=init,
            activate_output=activate_output,
            hide_rl2s=hide_rl2s,
            hide_rewards=hide_rewards,
            time_scale=time_scale,
            specify_obs_keys=specify_obs_keys,
        )
        _warn_of_flattened(type(self).__name__, obs_space, self.flat_keys)


@gin.configurable(denylist=["obs_space", "rl2_dim"])
class DictTstepEncoder(_MLPTstepEncoder):
    """Any observations: each is embedded according to its kind, then all go through an MLP with the rl2s.

    - "image": a Box of two or three axes with sides of 17 or more (uint8, or from 0 to 255 in any
      type, or three axes of floats), by convolutions as in `CNNTstepEncoder`.
    - "map": a Box of two or three axes with ids, sides of 4 or more, as in `GridworldCNNTstepEncoder`.
    - "tokens": text with a vocabulary (`loxodon.envs.Tokens`), by `TokenGoalEmb`.
    - "flat": all others, as in `FFTstepEncoder`.
    - "goal": a Box (goal_length, goal_dim), by `FFGoalEmb`; only if obs_kinds chooses it.

    Args:
        obs_space: given by the agent.
        rl2_dim: given by the agent.
        obs_kinds: kinds by name of the observation, where the automatic choice is wrong.
        cnn_type: convolutions of images; None means NatureishCNN from 36 pixels, IMPALAishCNN below.
        img_features: width of an embedded image or map.
        channels_first: order of the axes of images and maps; None infers it from the space.
        drqv2_aug: shift images in training, see `CNNTstepEncoder`.
        d_embedding: width of an embedded id of a map.
        n_layers: number of hidden layers.
        d_hidden: width of the hidden layers.
        d_output: width of the result.
        activation: relu, leaky_relu, gelu, silu, mish or tanh.
        out_norm: normalisation of the result.
        normalize_inputs: shift and scale flat inputs by running statistics of the replayed data.
        hide_rl2s: replace previous reward and action by zeros.
        hide_rewards: replace only the previous reward by zeros.
        time_scale: also use the index of the timestep in its episode, divided by this; None leaves it out.
        specify_obs_keys: names of the observations to use; None for all.
        rl2_gain: factor of the initial weights of previous reward and action; below 1, they gain influence by
            learning.
        init: initialisation of the linear layers of the MLP, "default" or "orthogonal".
    Raises: ValueError for a size below 1, unknown names or kinds, or text without a vocabulary.
    """

    def __init__(  # noqa: PLR0913 - every keyword is a gin setting
        self,
        obs_space: spaces.Dict,
        rl2_dim: int,
        *,
        obs_kinds: Mapping[str, str] | None = None,
        cnn_type: CNNType | None = None,
        img_features: int = 256,
        channels_first: bool | None = None,
        drqv2_aug: bool = False,
        d_embedding: int = 8,
        n_layers: int = 2,
        d_hidden: int = 128,
        d_output: int = 128,
        activation: str = "leaky_relu",
        out_norm: str | None = "layer",
        normalize_inputs: bool = True,
        hide_rl2s: bool = False,
        hide_rewards: bool = False,
        time_scale: int | None = None,
        specify_obs_keys: Sequence[str] | None = None,
        rl2_gain: float = 1.0,
        init: str = "default",
    ) -> None:
        require_positive("DictTstepEncoder", img_features=img_features, d_embedding=d_embedding)
        shared = {
            "owner": "DictTstepEncoder",
            "features": img_features,
            "activation": activation,
            "channels_first": channels_first,
        }

        def embedder(key: str, kind: str, space: Any) -> tuple[nn.Module, int]:
            if kind == "image":
                cnn = cnn_type or default_cnn(space)
                share = SHIFTED_SHARE * drqv2_aug
                return ImageEmb(key, space, cnn_type=cnn, shifted_share=share, **shared), img_features
            if kind == "map":
                cnn = GridworldCNN
                return MapEmb(key, space, cnn_type=cnn, d_embedding=d_embedding, **shared), img_features
            length, dim = (*space.shape, 1)[:2]
            goal: Any = FFGoalEmb(length, dim)
            if kind == "tokens":
                goal = TokenGoalEmb(length, dim, min_token=0, max_token=int(space.nvec.max()) - 1)
            return goal, goal.goal_emb_dim

        keys = _chosen_keys("DictTstepEncoder", obs_space, specify_obs_keys)
        kinds = _chosen_kinds({key: obs_space[key] for key in keys}, obs_kinds or {})
        log_once(f"Kinds of observations for DictTstepEncoder (obs_kinds changes them): {kinds}.")
        super().__init__(
            obs_space,
            rl2_dim,
            {key: embedder(key, kind, obs_space[key]) for key, kind in kinds.items() if kind != "flat"},
            n_layers=n_layers,
            d_hidden=d_hidden,
            d_output=d_output,
            activation=activation,
            out_norm=out_norm,
            normalize_inputs=normalize_inputs,
            rl2_gain=rl2_gain,
            init=init,
            hide_rl2s=hide_rl2s,
            hide_rewards=hide_rewards,
            time_scale=time_scale,
            specify_obs_keys=specify_obs_keys,
        )
        self.kinds = kinds
        _warn_of_flattened(type(self).__name__, obs_space, {*self.flat_keys} - {*(obs_kinds or {})})

    def describe(self) -> str:
        kinds = ", ".join(f"{key}: {kind}" for key, kind in self.kinds.items())
        return f"{type(self).__name__} ({kinds})"


_FITS: dict[str, Callable[[spaces.Space[Any]], bool]] = {
    "image": lambda space: isinstance(space, spaces.Box) and len(space.shape) in (2, 3),
    "map": lambda space: isinstance(space, spaces.Box) and len(space.shape) in (2, 3),
    "tokens": lambda space: hasattr(space, "words"),
    "goal": lambda space: isinstance(space, spaces.Box) and len(space.shape) in (1, 2),
    "flat": lambda space: True,
}


def _chosen_kinds(parts: Mapping[str, spaces.Space[Any]], given: Mapping[str, str]) -> dict[str, str]:
    for key, kind in given.items():
        if key not in parts or kind not in _FITS or not _FITS[kind](parts[key]):
            raise ValueError(
                f"DictTstepEncoder.obs_kinds sets {key!r} to the kind {kind!r}, but the observations are "
                f"{dict(parts)} and the kinds are {sorted(_FITS)}. Fix: name an observation and a kind that "
                "fits it."
            )
    return {key: given.get(key, kind_of(space)) for key, space in parts.items()}


def kind_of(space: spaces.Space[Any]) -> str:
    """The default kind of an observation for `DictTstepEncoder`: "image", "map", "tokens" or "flat"."""
    if hasattr(space, "words"):  # loxodon.data.spaces.Tokens
        return "tokens"
    if not isinstance(space, spaces.Box) or len(space.shape) not in (2, 3):
        return "flat"
    side = sides_of(space)[0]
    is_pixels = (
        space.dtype.name == "uint8"
        or (space.dtype.kind == "f" and len(space.shape) == 3)  # noqa: PLR2004
        or ((space.low == 0).all() and (space.high == 255).all())  # noqa: PLR2004 - the largest uint8
    )
    if side >= _SMALLEST_IMAGE and is_pixels:
        return "image"
    return "map" if side >= _SMALLEST_MAP and holds_ids(space) else "flat"


def default_tstep_encoder(obs_space: spaces.Dict) -> type[TstepEncoder]:
    """The default encoder: `FFTstepEncoder` if all observations are flat, else `DictTstepEncoder`."""
    is_flat = all(kind_of(space) == "flat" for space in obs_space.spaces.values())
    return FFTstepEncoder if is_flat else DictTstepEncoder


def _warn_of_flattened(owner: str, obs_space: spaces.Dict, keys: Iterable[str]) -> None:
    """Warn once about each Box among `keys` with several axes: an MLP ignores its spatial structure."""
    for key in keys:
        space = obs_space[key]
        if not isinstance(space, spaces.Box) or len(space.shape) < 2:  # noqa: PLR2004
            continue
        if sides_of(space)[0] < _SMALLEST_MAP:  # too small for an image
            continue
        shape = tuple(map(int, space.shape))
        if kind_of(space) != "flat":
            fix = "remove Experiment.tstep_encoder_type or set it to None, which selects convolutions"
        elif _FITS["image"](space):
            fix = (
                "if it is an image, set Experiment.tstep_encoder_type = @DictTstepEncoder and "
                f"DictTstepEncoder.obs_kinds = {{{key!r}: 'image'}}"
            )
        else:
            fix = "if it contains several images, stack them along the channel axis"
        log_once(
            f"{owner} flattens observation {key!r} of shape {shape} to {math.prod(shape):,} numbers, which "
            f"suits a table but not an image. Fix: {fix}.",
            logging.WARNING,
        )


# ---- images alone ----


class _ImageTstepEncoder(TstepEncoder):
    """Embedded images and embedded rl2s, joined by a linear layer."""

    def __init__(
        self,
        obs_space: spaces.Dict,
        rl2_dim: int,
        make: Callable[..., nn.Module],
        *,
        img_features: int,
        rl2_features: int,
        d_output: int,
        out_norm: str | None,
        activation: str,
        channels_first: bool | None,
        cnn_type: CNNType,
        **base: Any,
    ) -> None:
        super().__init__(obs_space, rl2_dim, **base)
        owner = type(self).__name__
        require_positive(owner, img_features=img_features, rl2_features=rl2_features, d_output=d_output)
        others = [key for key in self.keys if not _FITS["image"](obs_space[key])]
        if others:
            raise ValueError(
                f"{owner} embeds Boxes with two or three axes, but {others} of the observations {self.keys} "
                "are not such Boxes. Fix: use DictTstepEncoder, or exclude them with "
                f"{owner}.specify_obs_keys."
            )
        self.images = nn.ModuleList(
            make(
                key,
                obs_space[key],
                owner=owner,
                cnn_type=cnn_type,
                features=img_features,
                activation=activation,
                channels_first=channels_first,
            )
            for key in self.keys
        )
        self.activation = activation_fn(activation, overwrites=True)
        self.rl2_in = Linear(self.rl2_dim, rl2_features)
        self.out = Linear(len(self.keys) * img_features + rl2_features, d_output)
        self.out_norm = norm_layer(out_norm, d_output)
        self._emb_dim = d_output

    @property
    def emb_dim(self) -> int:
        return self._emb_dim

    def inner_forward(self, obs: dict[str, Tensor], rl2s: Tensor, mask: Tensor | None) -> Tensor:
        images = [image(obs[key]) for key, image in zip(self.keys, self.images, strict=True)]
        symlog = rl2s.sign() * rl2s.abs().log1p()  # handles rewards of any size without statistics
        x = torch.cat([*images, self.rl2_in(symlog)], dim=-1)
        y: Tensor = self.out_norm(self.out(self.activation(x)))
        return y


@gin.configurable(denylist=["obs_space", "rl2_dim"])
class CNNTstepEncoder(_ImageTstepEncoder):
    """Convolutions on images: Boxes (H, W), (H, W, C) or (C, H, W), e.g. uint8.

    Images are transferred unchanged, and scaled from their bounds to [-1, 1] on the device.

    Args:
        obs_space: given by the agent.
        rl2_dim: given by the agent.
        cnn_type: @NatureishCNN, @IMPALAishCNN, @DrQCNN or your own, see `CNNType`.
        channels_first: order of the axes; None takes the shorter of the first and the last axis for channels,
            and logs this once.
        img_features: width of an embedded image.
        rl2_features: width of the embedded previous reward and action.
        d_output: width of the result.
        out_norm: normalisation of the result.
        activation: relu, leaky_relu, gelu, silu, mish or tanh.
        drqv2_aug: in training, shift images at random by up to 4 pixels, with one shift per sequence. This
            does not apply while acting, nor in PPO, which has to evaluate the images that it acted on.
        aug_pct_of_batch: share of the sequences that are shifted.
        hide_rl2s: replace previous reward and action by zeros.
        hide_rewards: replace only the previous reward by zeros.
        time_scale: also use the index of the timestep in its episode, divided by this; None leaves it out.
        specify_obs_keys: names of the observations to use; None for all.
    Raises: ValueError for unknown names, other observations than images, and too small images.
    """

    def __init__(  # noqa: PLR0913 - every keyword is a gin setting
        self,
        obs_space: spaces.Dict,
        rl2_dim: int,
        *,
        cnn_type: CNNType = NatureishCNN,
        channels_first: bool | None = None,
        img_features: int = 256,
        rl2_features: int = 12,
        d_output: int = 128,
        out_norm: str | None = "layer",
        activation: str = "leaky_relu",
        drqv2_aug: bool = False,
        aug_pct_of_batch: float = SHIFTED_SHARE,
        hide_rl2s: bool = False,
        hide_rewards: bool = False,
        time_scale: int | None = None,
        specify_obs_keys: Sequence[str] | None = None,
    ) -> None:
        if not 0.0 <= aug_pct_of_batch <= 1.0:
            raise ValueError(
                f"CNNTstepEncoder.aug_pct_of_batch is {aug_pct_of_batch}, but must lie in [0, 1]. Fix: bind "
                "it, e.g. to 0.75."
            )
        share = aug_pct_of_batch if drqv2_aug else 0.0
        super().__init__(
            obs_space,
            rl2_dim,
            lambda key, space, **settings: ImageEmb(key, space, shifted_share=share, **settings),
            cnn_type=cnn_type,
            channels_first=channels_first,
            img_features=img_features,
            rl2_features=rl2_features,
            d_output=d_output,
            out_norm=out_norm,
            activation=activation,
            hide_rl2s=hide_rl2s,
            hide_rewards=hide_rewards,
            time_scale=time_scale,
            specify_obs_keys=specify_obs_keys,
        )


@gin.configurable(denylist=["obs_space", "rl2_dim"])
class GridworldCNNTstepEncoder(_ImageTstepEncoder):
    """Embeddings and convolutions on small maps of ids, such as MiniGrid's (7, 7, 3).

    Args:
        obs_space: given by the agent.
        rl2_dim: given by the agent.
        cnn_type: builds the convolutions, see `CNNType`.
        d_embedding: width of an embedded id; every channel has its own ids.
        channels_first: order of the axes; None takes the shorter of the first and the last axis for channels.
        img_features: width of an embedded map.
        rl2_features: width of the embedded previous reward and action.
        d_output: width of the result.
        out_norm: normalisation of the result.
        activation: relu, leaky_relu, gelu, silu, mish or tanh.
        hide_rl2s: replace previous reward and action by zeros.
        hide_rewards: replace only the previous reward by zeros.
        time_scale: also use the index of the timestep in its episode, divided by this; None leaves it out.
        specify_obs_keys: names of the observations to use; None for all.
    Raises: ValueError for unknown names, other observations than maps of ids, and too small maps.
    """

    def __init__(  # noqa: PLR0913 - every keyword is a gin setting
        self,
        obs_space: spaces.Dict,
        rl2_dim: int,
        *,
        cnn_type: CNNType = GridworldCNN,
        d_embedding: int = 8,
        channels_first: bool | None = None,
        img_features: int = 256,
        rl2_features: int = 12,
        d_output: int = 128,
        out_norm: str | None = "layer",
        activation: str = "leaky_relu",
        hide_rl2s: bool = False,
        hide_rewards: bool = False,
        time_scale: int | None = None,
        specify_obs_keys: Sequence[str] | None = None,
    ) -> None:
        require_positive("GridworldCNNTstepEncoder", d_embedding=d_embedding)
        super().__init__(
            obs_space,
            rl2_dim,
            lambda key, space, **settings: MapEmb(key, space, d_embedding=d_embedding, **settings),
            cnn_type=cnn_type,
            channels_first=channels_first,
            img_features=img_features,
            rl2_features=rl2_features,
            d_output=d_output,
            out_norm=out_norm,
            activation=activation,
            hide_rl2s=hide_rl2s,
            hide_rewards=hide_rewards,
            time_scale=time_scale,
            specify_obs_keys=specify_obs_keys,
        )


# ---- flat numbers ----


def _flat_width(owner: str, key: str, obs_space: spaces.Dict) -> int:
    space = obs_space[key]
    if choices := _choices(space):
        return sum(choices)
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        width = 1
        for size in space.shape:
            width *= int(size)
        return width
    others = [name for name, other in obs_space.spaces.items() if other.shape is not None]
    leave_out = f", or leave it out with {owner}.specify_obs_keys = {others}" if others else ""
    raise ValueError(
        f"Observation {key!r} is a {type(space).__name__}, which only a vocabulary can turn into numbers. "
        "Fix: list its words in gym_env.vocabulary = ['go', 'left'] (an environment of your own class "
        f"declares it as loxodon.envs.Tokens(['go', 'left'])){leave_out}."
    )


def _choices(space: spaces.Space[Any]) -> list[int]:
    """Number of values of each discrete factor, which count from 0; empty for other spaces."""
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, spaces.MultiDiscrete):
        return [int(n) for n in space.nvec.reshape(-1)]
    return []


def _flatten(x: Tensor, choices: list[int]) -> Tensor:
    """Flatten x (B, L, *shape) to (B, L, width) float32, discrete factors as one-hots."""
    rows = x.reshape(*x.shape[:2], -1)
    if not choices:
        return rows.float()
    digits = rows.long().unbind(-1)
    one_hots = [F.one_hot(digit, n) for digit, n in zip(digits, choices, strict=True)]
    return torch.cat(one_hots, dim=-1).float()
