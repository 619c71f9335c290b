"""A Transformer's step with as little overhead around its matrix products as possible.

For a dozen environments, a step is about a hundred operations on a few kilobytes each. Calls of modules, and
work that could be done for all layers at once, then cost as much as all matrix products. Attention and its
ring of keys are the general ones; only the projections around them are written out here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import cpu
from ..attention import attention_formula
from ..mlp import Linear, RMSNorm
from ..positions import HeadPositions
from ..timeline import Timeline

# Number of timesteps with stored positions (24 MB at width 128); later ones are computed in each step.
_TABLE = 16_384


class TransformerStep:
    """Steps of a Transformer for which `is_for` is True.

    Weights are looked up in each step. Products of gains and mixtures of waves are cached, and invalidated by
    the `_version` of these parameters. Writes through `.data`, fused optimizers and new hooks do not change
    it: build a new step after them, as the encoder's `train` and `eval` do.

    Args:
        inp: the input layer.
        layers: `TransformerLayer`s.
        out_norm: normalisation of the output.
        head_positions: positions of queries and keys.
    """

    def __init__(
        self, inp: nn.Module, layers: Sequence[Any], out_norm: nn.Module, head_positions: HeadPositions
    ) -> None:
        names = ("norm_attn", "qkv", "proj", "norm_ff", "up", "down")
        self.layers = [(layer, *(_parameters(getattr(layer, name)) for name in names)) for layer in layers]
        self.gains = [_parameters(norm) for layer in layers for norm in (layer.q_norm, layer.k_norm)]
        self.mixtures = [_parameters(layer.from_waves) for layer in layers if layer.num_with_waves]
        self.inp, self.out_norm = _parameters(inp), _parameters(out_norm)
        self.least_square = torch.tensor(head_positions.frequencies.shape[-1] * RMSNorm.EPS)
        self.head_positions, self.table = head_positions, torch.empty(0)
        self.cache_key: list[tuple[int, int]] = []

    @staticmethod
    def is_for(inp: nn.Module, layers: Sequence[Any], out_norm: nn.Module) -> bool:
        """True for linear layers, layer norms, normalised queries and keys, residual sums, and no hooks."""
        parts = [inp, out_norm, *(part for layer in layers for part in layer.modules())]
        has_hooks = any(part._forward_hooks or part._forward_pre_hooks for part in parts)
        has_versions = not any(x.is_inference() for part in parts for x in part.parameters())
        return (has_versions and not has_hooks) and all(
            {type(part) for part in (inp, layer.qkv, layer.proj, layer.up, layer.down)} == {Linear}
            and {type(part) for part in (layer.norm_attn, layer.norm_ff, out_norm)} == {nn.LayerNorm}
            and {layer.sink, layer.head_scale, layer.gate_ff, layer.norm_mixed, layer.join_mixed} == {None}
            and layer.is_normed
            for layer in layers
        )

    @staticmethod
    def serves(x: Tensor, keys: Tensor) -> bool:
        """True for a step in float32 without gradient or autocast. keys: of the first layer's ring."""
        is_plain = x.dtype == keys.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        return is_plain and not torch.is_grad_enabled() and cpu.serves(x)

    def __call__(self, x: Tensor, time_idxs: Tensor, states: Sequence[Any]) -> tuple[Tensor, list[Any]]:
        """Step all layers on x (N, D_in) float32, time_idxs (N, 1) int64; return (N, D) and new states."""
        timeline, after = Timeline(time_idxs, None), []
        cosines, sines, waves = self._positions(time_idxs)
        x = F.linear(x, self.inp["weight"], self.inp["bias"])
        for i, (layer, norm_attn, qkv, proj, norm_ff, up, down) in enumerate(self.layers):
            projected = F.linear(_layer_norm(x, norm_attn), qkv["weight"]).view(
                len(x), 3, len(layer.heads), -1
            )
            both = projected[:, :2].transpose(0, 1)  # queries and keys together, to share operations
            if waves:
                both[:, :, : layer.num_with_waves].add_(waves[i])
            length = torch.linalg.vector_norm(both, dim=-1, keepdim=True)
            both = both / torch.addcmul(self.least_square, length, length).sqrt_()
            both = both.roll(both.shape[-1] // 2, -1).mul_(sines[i]).addcmul_(both, cosines[i])
            q, k = both.unsqueeze(3).unbind()
            k, v, sight, state = layer.ring.extend(k, projected[:, 2:].transpose(1, 2), timeline, states[i])
            read = attention_formula(q, k, v, *sight.terms(layer.heads))
            x = torch.addmm(x, read.view(x.shape), proj["weight"].t())
            y = layer.activation(F.linear(_layer_norm(x, norm_ff), up["weight"], up["bias"]))
            x = torch.addmm(x, y, down["weight"].t()).add_(down["bias"])
            after.append(state)
        return _layer_norm(x, self.out_norm), after

    def _refresh(self) -> None:
        parts = [part["weight"] for part in (*self.gains, *self.mixtures)]
        cache_key = [(id(part), part._version) for part in parts]
        if cache_key == self.cache_key:
            return
        gains = torch.stack(parts[: len(self.gains)])
        self.stretch = gains.view(len(self.layers), 2, 1, 1, -1) * gains.shape[-1] ** 0.5
        self.turned_stretch = self.stretch.roll(gains.shape[-1] // 2, -1)
        self.mixture = torch.cat(parts[len(self.gains) :]) if self.mixtures else None
        self.cache_key, self.parts = cache_key, parts  # keeping the parts prevents reuse of their ids

    def _positions(self, time_idxs: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
        """Cosine and sine factors (2, N, H, E) of queries and keys for each layer, and waves to add."""
        self._refresh()
        rows, shape = self._rows(time_idxs), self.head_positions.frequencies.shape
        cos, sin = rows[:, : 2 * shape.numel()].view(len(rows), 2, *shape).unbind(1)
        waves: Sequence[Tensor] = ()
        if self.mixture is not None:
            mixed = F.linear(rows[:, 2 * shape.numel() :], self.mixture)
            by_layer = mixed.view(len(rows), len(self.layers), 2, -1, shape[-1])
            waves = by_layer.movedim(0, 2).unbind()
        return (self.stretch * cos).unbind(), (self.turned_stretch * sin).unbind(), waves

    def _rows(self, time_idxs: Tensor) -> Tensor:
        """Cosines, sines and waves of timesteps, (N, ...)."""
        newest = int(time_idxs.max())
        if newest >= _TABLE:
            return self._computed(time_idxs)
        if newest >= len(self.table):
            self.table = self._computed(torch.arange(min(2 * newest + 256, _TABLE))[:, None])
        return self.table.index_select(0, time_idxs[:, 0])

    def _computed(self, time_idxs: Tensor) -> Tensor:
        cos, sin, waves = self.head_positions(time_idxs, torch.float32)
        parts = [cos.flatten(1), sin.flatten(1)]
        return torch.cat(parts if waves is None else [*parts, waves], dim=-1)


def _parameters(module: nn.Module) -> Mapping[str, Tensor]:
    """The module's own dict of parameters, so that replaced parameters are found."""
    return cast("Mapping[str, Tensor]", module._parameters)


def _layer_norm(x: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    return torch.layer_norm(x, (x.shape[-1],), parameters["weight"], parameters["bias"], 1e-5)
