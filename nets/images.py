"""Embeddings of images and small maps: convolutional networks, and the preparation of their input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gin
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from .init import ORTHOGONAL_GAIN
from .log_once import log_once
from .mlp import Linear, activation_fn

_IMAGE_AXES = 3
_MAX_IDS = 1024  # per channel of a map; larger ranges are measurements rather than ids
_SMALLEST_NATURE = 36  # pixels
_SHIFT = 4  # pixels, at most (Kostrikov et al. 2020)
_WIDEST = 1e6  # wider bounds, such as those of float32, contain no information about the values

CNNType = Callable[..., nn.Module]
"""Builds (N, C, H, W) float -> (N, C', H', W') from the number of channels and the name of an activation."""


# ---- convolutions ----


class _Convs(nn.Module):
    """Convolutions with an activation after each; `layers` are (channels, kernel, stride)."""

    def __init__(self, channels: int, activation: str, layers: Sequence[tuple[int, int, int]]) -> None:
        super().__init__()
        self.activation = activation_fn(activation, overwrites=True)
        self.convs = nn.ModuleList()
        for width, kernel, stride in layers:
            conv = nn.Conv2d(channels, width, kernel, stride)
            nn.init.orthogonal_(conv.weight, gain=ORTHOGONAL_GAIN)
            nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
            self.convs.append(conv)
            channels = width

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = self.activation(conv(x))
        return x


@gin.configurable(denylist=["channels", "activation"])
class NatureishCNN(_Convs):
    """Three convolutions, for images from 36 x 36 pixels. Source: Mnih et al. 2015, Nature 518."""

    def __init__(self, channels: int, activation: str = "leaky_relu") -> None:
        super().__init__(channels, activation, [(32, 8, 4), (64, 4, 2), (64, 3, 1)])


@gin.configurable(denylist=["channels", "activation"])
class DrQCNN(_Convs):
    """Four convolutions that keep much of the resolution. Source: Yarats et al. 2021, arXiv:2107.09645."""

    def __init__(self, channels: int, activation: str = "leaky_relu") -> None:
        super().__init__(channels, activation, [(32, 3, 2), (32, 3, 1), (32, 3, 1), (32, 3, 1)])


@gin.configurable(denylist=["channels", "activation"])
class GridworldCNN(_Convs):
    """Three convolutions of 2 x 2 cells, for maps from 4 x 4 cells."""

    def __init__(self, channels: int, activation: str = "leaky_relu") -> None:
        super().__init__(channels, activation, [(16, 2, 1), (32, 2, 1), (48, 2, 1)])


@gin.configurable(denylist=["channels", "activation"])
class IMPALAishCNN(nn.Module):
    """Blocks of a convolution, a pool that halves the image, and two residual pairs; for any size.

    Args:
        channels: number of channels of the image.
        activation: name of the activation between convolutions.
        cnn_block_depths: number of channels of each block.
    Source: Espeholt et al. 2018, arXiv:1802.01561, figure 3.
    """

    def __init__(
        self,
        channels: int,
        activation: str = "leaky_relu",
        *,
        cnn_block_depths: Sequence[int] = (16, 32, 32),
    ) -> None:
        super().__init__()
        self.activation = activation_fn(activation)
        self.first, self.residual = nn.ModuleList(), nn.ModuleList()
        for width in cnn_block_depths:
            self.first.append(nn.Conv2d(channels, width, 3, padding=1))
            self.residual.extend(nn.Conv2d(width, width, 3, padding=1) for _ in range(4))
            channels = width

    def forward(self, x: Tensor) -> Tensor:
        act, residual = self.activation, iter(self.residual)
        for conv in self.first:
            x = F.max_pool2d(conv(x), 3, stride=2, padding=1)
            for _ in range(2):
                x = x + next(residual)(act(next(residual)(act(x))))
        return act(x)


# ---- from an observation to the input of convolutions ----


def random_shift(images: Tensor, share: float) -> Tensor:
    """Move whole sequences of images by up to four pixels in each direction; edges are repeated.

    Args:
        images: (B, L, C, H, W), any dtype. All L images of a sequence have the same shift, since a memory
            would mistake a changing shift for movement.
        share: share of the sequences that are moved.
    Returns: the same shape and dtype.
    Source: Kostrikov et al. 2020, arXiv:2004.13649, section 3 (there one shift per image).
    """
    batch, device = len(images), images.device
    is_moved = torch.rand(batch, device=device) < share
    moves = torch.randint(-_SHIFT, _SHIFT + 1, (2, batch), device=device) * is_moved
    for axis, move in zip((-2, -1), moves, strict=True):
        size = images.shape[axis]
        source = (torch.arange(size, device=device) + move[:, None]).clamp(0, size - 1)
        shape = [batch, 1, 1, 1, 1]
        shape[axis] = size
        images = images.gather(axis, source.view(shape).expand_as(images))
    return images


def sides_of(space: spaces.Box) -> tuple[int, int]:
    """Lengths of the two longest axes of an image or map, shorter one first."""
    first, second = sorted(map(int, space.shape))[-2:]
    return first, second


def _has_channels_first(key: str, space: spaces.Box, channels_first: bool | None, setting: str) -> bool:
    """True if the channels of an image with three axes come first; by default, the shorter end has them."""
    shape = tuple(map(int, space.shape))
    if channels_first is None:
        if shape[0] == shape[2]:
            raise ValueError(
                f"Observation {key!r} has shape {shape}, so its channels may be the first or the last axis. "
                f"Fix: bind {setting}.channels_first to True or False."
            )
        channels_first = shape[0] < shape[2]
    channels, height, width = shape if channels_first else (shape[2], *shape[:2])
    log_once(
        f"Observation {key!r} {shape} is read as {height} x {width} with {channels} channels on its "
        f"{'first' if channels_first else 'last'} axis."
    )
    return channels_first


class _Image(nn.Module):
    """Base class of embeddings of images and maps: order of axes, convolutions and a linear layer.

    Args:
        key: name of the observation, for errors.
        space: (H, W), or with channels first or last.
        owner: the configurable with the settings below, for errors.
        cnn_type: builds the convolutions.
        features: width of the result.
        activation: name of the activation of the convolutions.
        channels_first: order of the axes; None infers it from the space.
        depth: number of input channels of the convolutions per channel of the observation.
    """

    def __init__(
        self,
        key: str,
        space: spaces.Box,
        *,
        owner: str,
        cnn_type: CNNType,
        features: int,
        activation: str,
        channels_first: bool | None,
        depth: int = 1,
    ) -> None:
        super().__init__()
        shape = tuple(map(int, space.shape))
        if len(shape) not in (_IMAGE_AXES - 1, _IMAGE_AXES):
            raise ValueError(
                f"Observation {key!r} has the space {space}, but an image must have two or three axes. "
                f"Fix: exclude it with {owner}.specify_obs_keys, or use DictTstepEncoder."
            )
        self.has_channels = len(shape) == _IMAGE_AXES
        self.channels_first = self.has_channels and _has_channels_first(key, space, channels_first, owner)
        if not self.has_channels:
            shape = (*shape, 1)
        self.channels, *size = shape if self.channels_first else (shape[2], *shape[:2])
        self.cnn = cnn_type(self.channels * depth, activation)
        try:
            with torch.no_grad():
                width = self.cnn(torch.zeros(1, self.channels * depth, *size)).numel()
        except RuntimeError as error:
            name = type(self.cnn).__name__
            raise ValueError(
                f"{name} does not take observation {key!r} of {size[0]} x {size[1]} with {self.channels} "
                f"channels ({error}). Fix: bind {owner}.cnn_type to @IMPALAishCNN, which takes any size "
                "(NatureishCNN needs 36 x 36, GridworldCNN 4 x 4)."
            ) from error
        self.out = Linear(width, features)

    def _planes(self, x: Tensor) -> Tensor:
        """View x (B, L, *shape) as (B, L, C, H, W)."""
        if not self.has_channels:
            return x.unsqueeze(2)
        return x if self.channels_first else x.movedim(-1, -3)

    def _embedded(self, x: Tensor, batch: int) -> Tensor:
        """Embed x (B * L, C, H, W) float as (B, L, features)."""
        y: Tensor = self.out(self.cnn(x).flatten(1))
        return y.view(batch, -1, y.shape[-1])


class ImageEmb(_Image):
    """Embed images (B, L, *shape) as (B, L, features); finite bounds are scaled to -1 and 1 on the device.

    Args:
        key, space, settings: see `_Image`.
        shifted_share: share of the sequences that are shifted at random in training, see `random_shift`.
    """

    def __init__(self, key: str, space: spaces.Box, *, shifted_share: float = 0.0, **settings: Any) -> None:
        super().__init__(key, space, **settings)
        low, high = float(space.low.min()), float(space.high.max())
        is_bounded = 0.0 < high - low < _WIDEST
        self.scale = 2.0 / (high - low) if is_bounded else 1.0
        self.offset = -1.0 - low * self.scale if is_bounded else 0.0
        self.shifted_share = shifted_share

    def forward(self, x: Tensor) -> Tensor:
        x = self._planes(x)
        if self.training and self.shifted_share:
            x = random_shift(x, self.shifted_share)
        images = x.flatten(0, 1).to(torch.float32, copy=True)  # a copy, to be changed in place
        return self._embedded(images.mul_(self.scale).add_(self.offset), len(x))


class MapEmb(_Image):
    """Embed maps (B, L, *shape) of ids as (B, L, features); each channel has its own embeddings.

    Args:
        key, space, settings: see `_Image`.
        d_embedding: width of an embedded id.
    Raises: ValueError unless the space is an integer Box with at most 1,024 ids per channel.
    """

    def __init__(self, key: str, space: spaces.Box, *, d_embedding: int, **settings: Any) -> None:
        super().__init__(key, space, depth=d_embedding, **settings)
        if not holds_ids(space):
            raise ValueError(
                f"Observation {key!r} has the space {space}, but a map may hold at most {_MAX_IDS:,} "
                "different whole numbers. Fix: use CNNTstepEncoder or DictTstepEncoder, or narrow its "
                "bounds."
            )
        self.low = int(space.low.min())
        self.num_ids = int(space.high.max()) - self.low + 1
        self.embedding = nn.Embedding(self.channels * self.num_ids, d_embedding)

    def forward(self, x: Tensor) -> Tensor:
        cells = self._planes(x).flatten(0, 1).movedim(1, -1).long() - self.low  # (B * L, H, W, C)
        # Values out of bounds cause a warning elsewhere; as indices on a GPU they would abort the run.
        ids = cells.clamp(0, self.num_ids - 1) + self.num_ids * torch.arange(self.channels, device=x.device)
        return self._embedded(self.embedding(ids).flatten(-2).movedim(-1, 1), len(x))


def holds_ids(space: spaces.Box) -> bool:
    """True if the values of a Box can be ids: whole numbers in a small range."""
    return space.dtype.kind in "iu" and int(space.high.max()) - int(space.low.min()) < _MAX_IDS


def default_cnn(space: spaces.Box) -> CNNType:
    """NatureishCNN for images that are large enough, else IMPALAishCNN."""
    return NatureishCNN if sides_of(space)[0] >= _SMALLEST_NATURE else IMPALAishCNN
