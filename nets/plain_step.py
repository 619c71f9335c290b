"""A Transformer's acting step with as little around its matrix products as there can be.

For a dozen environments a step is some hundred operations on a few kilobytes each, and between them the keys
and values of all environments pass through the processor's cache. So calls of modules, lookups of their
parameters and what could have been computed before take as long as all products. `TransformerLayer.act` is
the same step for every setting and device; this one is for the usual settings on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import damped, fits
from .kv_cache import KeyValueCache
from .mlp import RMSNorm
from .positions import HeadPositions

_TABLE = 16_384  # timesteps whose positions are kept, 24 MB at width 128; later ones are computed each time


class PlainStep:
    """Steps of a Transformer for which `is_for` is True and that adds no positions to its input.

    Weights are looked up in each step. What follows from gains of queries and keys and from the mixtures of
    waves is kept until one of these parameters is written to. Writes through `.data` and those of fused
    optimizers leave no trace, nor does a hook that is added: make a new one of these after them, as the
    encoder's `train` and `eval` do, one of which comes between training and acting.

    Args:
        inp: the input layer.
        layers: `TransformerLayer`s.
        out_norm: normalisation of the result.
        places: positions of queries and keys.
    """

    def __init__(
        self, inp: nn.Module, layers: Sequence[Any], out_norm: nn.Module, places: HeadPositions
    ) -> None:
        first, names = layers[0], ("norm_attn", "qkv", "proj", "norm_ff", "up", "down")
        self.num_heads, self.fixed_heads, self.width = first.n_heads, first.fixed_heads, first.qkv.in_features
        self.contents = slice(first.n_heads - first.content_heads, first.n_heads)
        self.counting_heads, self.threshold = first.counting_heads, first.threshold
        self.least_length, self.activation = first.least_length, first.activation
        self.inp, self.out_norm, self.eps = _parameters(inp), _parameters(out_norm), first.norm_attn.eps
        self.layers = [[_parameters(getattr(layer, name)) for name in names] for layer in layers]
        self.gains = [_parameters(norm) for layer in layers for norm in (layer.q_norm, layer.k_norm)]
        self.mixtures = [_parameters(layer.from_waves) for layer in layers if self.fixed_heads]
        self.places, self.table = places, torch.empty(0)
        self.made_of: list[tuple[int, int]] = []

    @staticmethod
    def is_for(inp: nn.Module, layers: Sequence[Any], out_norm: nn.Module, window: int) -> bool:
        """True for linear layers, layer norms, normalised queries and keys, sums, one window, no biases."""
        parts = [inp, out_norm, *(part for layer in layers for part in layer.modules())]
        has_hooks = any(part._forward_hooks or part._forward_pre_hooks for part in parts)
        tells_writes = not any(x.is_inference() for part in parts for x in part.parameters())
        return (
            tells_writes
            and not has_hooks
            and all(
                {type(part) for part in (inp, layer.qkv, layer.proj, layer.up, layer.down)} == {nn.Linear}
                and {type(part) for part in (layer.norm_attn, layer.norm_ff, out_norm)} == {nn.LayerNorm}
                and isinstance(layer.q_norm, RMSNorm)
                and {layer.sink, layer.head_scale, layer.gate_ff, layer.norm_mixed, layer.join_mixed}
                == {None}
                and layer.window == window
                and not layer.has_biases
                for layer in layers
            )
        )

    @staticmethod
    def serves(x: Tensor) -> bool:
        """True for a step on the CPU in float32, without gradient, autocast or compilation."""
        return (
            x.device.type == "cpu"
            and x.dtype == torch.float32
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
            and not torch.compiler.is_compiling()
        )

    def __call__(self, x: Tensor, time_idxs: Tensor, cache: KeyValueCache) -> Tensor:
        """X (N, D_in) float32, time_idxs (N, 1) int64 -> (N, D) float32."""
        n, heads, size = len(x), self.num_heads, (self.width,)
        half, contents = self.width // heads // 2, self.contents
        counting = slice(heads - self.counting_heads, heads)
        self._refresh()
        cosines, sines, waves = self._told(time_idxs)
        bias = cache.advance()
        newest_keys, newest_values, keys, values = (view.unbind() for view in cache.views)
        x = F.linear(x, self.inp["weight"], self.inp["bias"])
        for i, (norm_attn, qkv, proj, norm_ff, up, down) in enumerate(self.layers):
            y = torch.layer_norm(x, size, norm_attn["weight"], norm_attn["bias"], self.eps)
            projected = F.linear(y, qkv["weight"]).view(n, 3, heads, -1).transpose(0, 1)
            both = projected[:2]  # queries and keys share operations: (2, N, H, E)
            if waves:
                both[:, :, : self.fixed_heads].add_(waves[i])
            both = both / torch.linalg.vector_norm(both, dim=-1, keepdim=True).hypot_(self.least_length)
            q, k = both.roll(half, -1).mul_(sines[i]).addcmul_(both, cosines[i]).unbind()
            kept = (newest_keys[i], k), (newest_values[i], projected[2])
            for place, new in kept:
                place.copy_(new)
                place[:, contents].zero_()  # they see earlier timesteps alone
            logits = torch.bmm(q.view(n * heads, 1, -1), keys[i])
            if bias is not None:
                logits = (logits.view(n, heads, 1, -1) + bias).flatten(0, 1)
            weights = torch.softmax(logits, -1)
            if self.counting_heads:
                by_head = (n, heads, 1, -1)
                weights.view(by_head)[:, counting] = fits(logits.view(by_head)[:, counting], self.threshold)
            attended = torch.bmm(weights, values[i])
            if self.counting_heads:
                counts = attended.view(n, heads, -1)[:, counting]
                counts.copy_(damped(counts))
            for place, new in kept:
                place[:, contents].copy_(new[:, contents])
            x = torch.addmm(x, attended.view(x.shape), proj["weight"].t())
            y = torch.layer_norm(x, size, norm_ff["weight"], norm_ff["bias"], self.eps)
            y = self.activation(F.linear(y, up["weight"], up["bias"]))
            x = torch.addmm(x, y, down["weight"].t()).add_(down["bias"])
        return torch.layer_norm(x, size, self.out_norm["weight"], self.out_norm["bias"], self.eps)

    def _refresh(self) -> None:
        parts = [part["weight"] for part in (*self.gains, *self.mixtures)]
        made_of = [(id(part), part._version) for part in parts]
        if made_of == self.made_of:
            return
        num_gains, num_layers = len(self.gains), len(self.layers)
        gains = torch.stack(parts[:num_gains]).view(num_layers, 2, 1, 1, -1)
        gains[:, 1] *= gains.shape[-1] ** 0.5  # that of queries cancels with the scale of logits
        self.stretch, self.turned_stretch = gains, gains.roll(gains.shape[-1] // 2, -1)
        self.mixture = torch.cat(parts[num_gains:]) if self.mixtures else None
        self.made_of, self.parts = made_of, parts  # kept, as the id of one that is gone may come again

    def _told(self, time_idxs: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
        """Of each layer, factors of queries and keys (2, N, H, E), and what fixed heads add (2, N, H', E)."""
        size = self.places.frequencies.numel()
        rows = self._rows(time_idxs)
        cos, sin = rows[:, : 2 * size].view(len(rows), 2, *self.places.frequencies.shape).unbind(1)
        waves: Sequence[Tensor] = ()
        if self.mixture is not None:
            mixed = F.linear(rows[:, 2 * size :], self.mixture)
            by_layer = mixed.view(len(rows), len(self.layers), 2, self.fixed_heads, -1)
            waves = by_layer.movedim(0, 2).unbind()
        return (self.stretch * cos).unbind(), (self.turned_stretch * sin).unbind(), waves

    def _rows(self, time_idxs: Tensor) -> Tensor:
        """(N, ...) cosines, sines and waves of timesteps."""
        newest = int(time_idxs.max())
        if newest >= _TABLE:
            return self._computed(time_idxs)
        if newest >= len(self.table):
            self.table = self._computed(torch.arange(min(2 * newest + 256, _TABLE))[:, None])
        return self.table[time_idxs[:, 0]]

    def _computed(self, time_idxs: Tensor) -> Tensor:
        places = self.places(time_idxs, torch.float32)
        parts = [places.cos.flatten(1), places.sin.flatten(1)]
        return torch.cat(parts if places.waves is None else [*parts, places.waves], dim=-1)


def _parameters(module: nn.Module) -> Mapping[str, Tensor]:
    """Where the module keeps them, so that one that is replaced is found there."""
    return cast("Mapping[str, Tensor]", module._parameters)
