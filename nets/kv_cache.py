"""What a Transformer keeps of the past while it acts: keys and values of recent timesteps.

Keys are kept with timesteps last: the product of one query with them is then two to four times faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypedDict

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

Rows: TypeAlias = dict[str, Tensor]
"""What a cache holds of each env, in one shape at any time so that rows of different exports can be mixed.

keys, values: (N, layers, H, S, E) float, S = window - 1, newest timestep last, 0 where not visible.
visible: (N, S) bool, True on timesteps of the running episode; these are the last ones of their row.
place: (N,) int64, where the newest timestep stood in the cache. Rows of one export, without others among
    them, go back there: in another place the same sums may be rounded in another way.
"""


class Sizes(TypedDict):
    """Arguments of `create`."""

    num_layers: int
    num_envs: int
    num_heads: int
    window: int
    width: int
    device: torch.device


def sizes(rows: Rows) -> Sizes:
    """The sizes of a cache that `rows` came from."""
    num_envs, num_layers, num_heads, num_kept, width = rows["keys"].shape
    return {
        "num_layers": num_layers,
        "num_envs": num_envs,
        "num_heads": num_heads,
        "window": num_kept + 1,
        "width": width,
        "device": rows["keys"].device,
    }


def exported(keys: Tensor, values: Tensor, visible: Tensor, size: int, place: Tensor) -> Rows:
    """Rows of `size` timesteps from the newest ones.

    Shapes: keys (layers, N, H, E, S), values (layers, N, H, S, E), visible (N, S) bool with S <= size, place
    (1,) int64.
    """
    missing, hidden = size - visible.shape[1], ~visible[:, None, None, :, None]
    rows = {"visible": F.pad(visible, (missing, 0)), "place": place.repeat(len(visible))}
    for name, buffer in (("keys", keys.mT), ("values", values)):
        by_env = rearrange(buffer.detach(), "layer n h s e -> n layer h s e")
        copy = by_env.clone(memory_format=torch.contiguous_format)
        rows[name] = F.pad(copy.masked_fill_(hidden, 0.0), (0, 0, missing, 0))
    return rows


def by_layer(row: Tensor) -> Tensor:
    """Keys or values of `Rows` as caches hold values: (N, layers, H, S, E) -> (layers, N, H, S, E)."""
    return rearrange(row.detach(), "n layer h s e -> layer n h s e")


def common_place(rows: Rows) -> int | None:
    """The `place` of all rows; None if they have several, or do not say."""
    places = set(rows["place"].tolist()) if "place" in rows else set()
    return places.pop() if len(places) == 1 else None


def without_unused(rows: Rows) -> Rows:
    """The same without the oldest timesteps that no env sees: `S` is the largest number of visible ones."""
    num_unused = rows["visible"].shape[1] - int(rows["visible"].sum(1).max())
    return {
        "keys": rows["keys"][:, :, :, num_unused:],
        "values": rows["values"][:, :, :, num_unused:],
        "visible": rows["visible"][:, num_unused:],
    }


@dataclass
class KeyValueCache:
    """Keys and values of recent timesteps, one contiguous stretch shared by all layers and envs.

    The buffers have a fixed size somewhat larger than the window. Each timestep is written at `end`; when the
    buffers are full, the last window - 1 timesteps move to the front (once in many timesteps, so its cost
    vanishes). Hence attention always reads one contiguous slice, never longer than the oldest running
    episode.

    keys: (layers, N, H, E, capacity) float.
    values: (layers, N, H, capacity, E) float.
    starts: (N,) int64 on the CPU, where the running episode of each env begins.
    bias: (N, capacity) float, -inf before `starts`, else 0; what attention adds to its logits.
    window: timesteps that attention reaches back, the newest included.
    oldest, newest: the smallest and the largest of `starts`.
    begin: where what attention reads begins.
    views: what `store` needs of all layers: places of the newest key and value, recent keys and values.
    """

    keys: Tensor
    values: Tensor
    starts: Tensor
    bias: Tensor
    window: int
    end: int = 0
    oldest: int = 0
    newest: int = 0
    begin: int = 0
    views: Sequence[Tensor] = ()

    @classmethod
    def create(
        cls,
        *,
        num_layers: int,
        num_envs: int,
        num_heads: int,
        window: int,
        width: int,
        device: torch.device,
    ) -> KeyValueCache:
        """The cache before the first timestep."""
        capacity = window + max(32, window // 4)
        return cls(
            keys=torch.zeros(num_layers, num_envs, num_heads, width, capacity, device=device),
            values=torch.zeros(num_layers, num_envs, num_heads, capacity, width, device=device),
            starts=torch.zeros(num_envs, dtype=torch.int64),
            bias=torch.zeros(num_envs, capacity, device=device),
            window=window,
        )

    def advance(self) -> Tensor | None:
        """Make room for one more timestep of every env.

        Returns: the bias (N, 1, 1, S) float of the logits over the S timesteps that `store` will return,
            None if every env may see all of them.
        """
        if self.end == self.keys.shape[-1]:
            self._move_to_front(self.window - 1)
        self.end += 1
        self.begin = max(self.end - self.window, self.oldest)
        keys, values = self.keys[..., self.begin : self.end], self.values[:, :, :, self.begin : self.end]
        self.views = keys[..., -1], values[:, :, :, -1], keys.flatten(1, 2), values.flatten(1, 2)
        return None if self.newest <= self.begin else self.bias[:, None, None, self.begin : self.end]

    def _recent(self, window: int) -> slice:
        return slice(max(self.begin, self.end - window), self.end)

    def bias_within(self, window: int) -> Tensor:
        """As `advance` of a cache with this window, in each case."""
        return self.bias[:, None, None, self._recent(window)]

    def lags(self, window: int) -> Tensor:
        """(S,) int64, how many timesteps ago each one of the window was."""
        recent = self._recent(window)
        return torch.arange(recent.stop - recent.start - 1, -1, -1, device=self.bias.device)

    def store(self, layer: int, key: Tensor, value: Tensor, window: int) -> tuple[Tensor, Tensor]:
        """Keep (N, H, E) of the newest timestep; returns keys (N H, E, S), values (N H, S, E)."""
        newest_key, newest_value, keys, values = [view[layer] for view in self.views]
        newest_key.copy_(key)
        newest_value.copy_(value)
        return (keys, values) if window >= self.window else (keys[..., -window:], values[:, -window:])

    def forget(self, ended: Tensor) -> None:
        """Begin new episodes in the rows where ended (N,) bool is True."""
        self.starts[ended.cpu()] = self.end
        self.bias[:, : self.end].masked_fill_(ended.to(self.bias.device)[:, None], -torch.inf)
        self._note_extremes()

    def export(self) -> Rows:
        """The newest window - 1 timesteps of each env, see `Rows`."""
        size, place = self.window - 1, torch.full((1,), self.end, device=self.bias.device)
        recent = slice(max(self.end - size, self.oldest), self.end)
        keys, values = self.keys[..., recent], self.values[:, :, :, recent]
        return exported(keys, values, self.bias[:, recent] == 0, size, place)

    @classmethod
    def of(cls, rows: Rows) -> KeyValueCache:
        """A cache that holds copies of `rows`."""
        cache, place, rows = cls.create(**sizes(rows)), common_place(rows), without_unused(rows)
        size = rows["visible"].shape[1]
        cache.end = max(place or 0, size)
        recent = slice(cache.end - size, cache.end)
        cache.keys[..., recent] = by_layer(rows["keys"]).mT
        cache.values[:, :, :, recent] = by_layer(rows["values"])
        cache.bias[:, recent].masked_fill_(~rows["visible"], -torch.inf)
        cache.starts = cache.end - rows["visible"].sum(1).cpu()
        cache._note_extremes()
        return cache

    def _move_to_front(self, num_kept: int) -> None:
        shift = self.end - num_kept
        for buffer in (*self.keys.mT, *self.values):
            buffer[:, :, :num_kept] = buffer[:, :, shift:].clone()
        self.bias[:, :num_kept] = self.bias[:, shift:].clone()
        self.bias[:, num_kept:] = 0.0
        self.starts.sub_(shift).clamp_(min=0)
        self.end = num_kept
        self._note_extremes()

    def _note_extremes(self) -> None:
        self.oldest, self.newest = int(self.starts.min()), int(self.starts.max())


@dataclass
class RingKeyValueCache:
    """The same memory without shapes or branches that depend on how far it is filled.

    Each timestep takes the place of the one a window ago, and attention always reads the whole window; what
    it may not see is masked. So one compiled graph, or one captured CUDA graph, serves every timestep. Where
    nothing is compiled, `KeyValueCache` does less work.

    keys: (layers, N, H, E, window) float, in the order of the ring.
    values: (layers, N, H, window, E) float, likewise.
    bias: (N, window) float, 0 where the running episode of an env has left something, else -inf.
    slot: (1,) int64, the place of the newest timestep.
    """

    keys: Tensor
    values: Tensor
    bias: Tensor
    slot: Tensor

    @classmethod
    def create(
        cls,
        *,
        num_layers: int,
        num_envs: int,
        num_heads: int,
        window: int,
        width: int,
        device: torch.device,
    ) -> RingKeyValueCache:
        """The cache before the first timestep."""
        return cls(
            keys=torch.zeros(num_layers, num_envs, num_heads, width, window, device=device),
            values=torch.zeros(num_layers, num_envs, num_heads, window, width, device=device),
            bias=torch.full((num_envs, window), -torch.inf, device=device),
            slot=torch.full((1,), window - 1, dtype=torch.int64, device=device),
        )

    def advance(self) -> Tensor:
        """Make room for one more timestep; returns the bias (N, 1, 1, window) float of all logits."""
        self.slot.add_(1).remainder_(self.bias.shape[1])
        self.bias.index_fill_(1, self.slot, 0.0)
        return self.bias[:, None, None]

    @property
    def window(self) -> int:
        return self.bias.shape[1]

    def bias_within(self, window: int) -> Tensor:
        """As `advance` of a cache with this window, but over all places."""
        return self.bias.masked_fill(self.lags(window) >= window, -torch.inf)[:, None, None]

    def lags(self, window: int) -> Tensor:
        """(window,) int64, how many timesteps ago each place of the ring was taken, whatever `window` is."""
        return (self.slot - torch.arange(self.window, device=self.slot.device)) % self.window

    def store(self, layer: int, key: Tensor, value: Tensor, window: int) -> tuple[Tensor, Tensor]:
        """Keep (N, H, E) of the newest timestep; returns all keys (N H, E, S) and values (N H, S, E)."""
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(3, self.slot, key[..., None].to(keys.dtype))
        values.index_copy_(2, self.slot, value[:, :, None].to(values.dtype))
        return keys.flatten(0, 1), values.flatten(0, 1)

    def forget(self, ended: Tensor) -> None:
        """Begin new episodes in the rows where ended (N,) bool is True."""
        self.bias.masked_fill_(ended.to(self.bias.device)[:, None], -torch.inf)

    def export(self) -> Rows:
        """The newest window - 1 timesteps of each env, see `Rows`."""
        recent = self._recent()
        keys, values = self.keys.index_select(4, recent), self.values.index_select(3, recent)
        return exported(keys, values, self.bias[:, recent] == 0, len(recent), self.slot)

    @classmethod
    def of(cls, rows: Rows) -> RingKeyValueCache:
        """A cache that holds copies of `rows`."""
        cache, place = cls.create(**sizes(rows)), common_place(rows)
        cache.slot.fill_(rows["visible"].shape[1] - 1 if place is None else place)
        recent = cache._recent()
        cache.keys[..., recent] = by_layer(rows["keys"]).mT
        cache.values[:, :, :, recent] = by_layer(rows["values"])
        cache.bias[:, recent] = torch.where(rows["visible"], 0.0, -torch.inf)
        return cache

    def _recent(self) -> Tensor:
        """(window - 1,) int64, the places of all timesteps but the oldest one, the newest last."""
        window = self.bias.shape[1]
        return (self.slot + torch.arange(2, window + 1, device=self.slot.device)) % window


Cache: TypeAlias = KeyValueCache | RingKeyValueCache
