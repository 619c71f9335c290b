"""A cache of the keys and values of recent timesteps for attention."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from .attention import RingSight, SequenceSight, Sight
from .timeline import Timeline
from .trunk import State

_BLOCK = 32  # slots; on the CPU, reads are multiples of this


class KeyValueRing:
    """A ring of keys and values per env for attention with a window of W timesteps, in fixed shapes.

    Timestep t of an episode is written to slot t % W, so the age of a row determines its contents, and rows
    can have different ages. Timesteps are the last axis of keys, which makes the product of one query and all
    keys twice as fast.

    The state has three parts: "keys" (N, H, E, W) float, "values" (N, H, W, E) float, and "age" (N,) int64,
    the number of timesteps of the running episode so far. Slots from earlier episodes are not read.

    A state that begins under autocast holds keys and values in the precision of autocast, because reading
    them takes most of the time of a step with a long context. On a CPU they stay in float32, because few
    processors have fast products of narrow numbers.
    """

    def __init__(self, num_heads: int, width: int, window: int) -> None:
        self.num_heads, self.width, self.window = num_heads, width, window

    def begin(self, num_envs: int, device: torch.device) -> State:
        """The state before the first timestep."""
        heads, dtype = (num_envs, self.num_heads), torch.float32
        if device.type not in ("cpu", "meta") and torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        return {
            "keys": torch.zeros(*heads, self.width, self.window, dtype=dtype, device=device),
            "values": torch.zeros(*heads, self.window, self.width, dtype=dtype, device=device),
            "age": torch.zeros(num_envs, dtype=torch.int64, device=device),
        }

    def extend(
        self, k: Tensor, v: Tensor, timeline: Timeline, state: State | None
    ) -> tuple[Tensor, Tensor, Sight, State | None]:
        """Add L timesteps to the ring.

        Args:
            k: (N, H, L, E) float, keys.
            v: (N, H, L, E) float, values.
            timeline: the current call of the trunk.
            state: the ring before; None without history. A single timestep without gradient is written into
                it in place.
        Returns: keys and values to read (N, H, S, E), their visibility, and the state after, which may be
            None if nobody needs it.
        """
        if state is None:
            sight = timeline.once(
                self.window, lambda: SequenceSight(timeline.time_idxs, self.window, timeline.resets)
            )
            return k, v, sight, None
        if k.shape[2] == 1:
            return self._with_present(k, v, timeline, state)
        return self._with_sequence(k, v, timeline, state)

    def _with_present(
        self, k: Tensor, v: Tensor, timeline: Timeline, state: State
    ) -> tuple[Tensor, Tensor, Sight, State]:
        def look() -> tuple[RingSight, int, Tensor]:
            age, num_used = state["age"], self.window
            if age.device.type == "cpu" and not torch.compiler.is_compiling():
                # Young episodes have fewer keys to read. Products over less than a block take three times as
                # long.
                num_used = min(ceil((int(age.max()) + 1) / _BLOCK) * _BLOCK, self.window)
            return RingSight(age, self.window, num_used), num_used, age + 1

        sight, num_used, age = timeline.once(self.window, look)
        put = Tensor.index_put if torch.is_grad_enabled() else Tensor.index_put_
        keys, values = state["keys"].permute(0, 3, 1, 2), state["values"].transpose(1, 2)  # (N, W, H, E)
        keys = put(keys, sight.present, k[:, :, 0].to(keys.dtype)).permute(0, 2, 3, 1)
        values = put(values, sight.present, v[:, :, 0].to(values.dtype)).transpose(1, 2)
        read = keys[..., :num_used].mT, values[:, :, :num_used]
        return *read, sight, {"keys": keys, "values": values, "age": age}

    def _with_sequence(
        self, k: Tensor, v: Tensor, timeline: Timeline, state: State
    ) -> tuple[Tensor, Tensor, Sight, State | None]:
        def look() -> tuple[Tensor, SequenceSight, Tensor, Tensor]:
            age, length = state["age"], k.shape[2]
            num_kept = min(int(age.max()), self.window - 1)  # the newest timesteps that a row may still see
            t = torch.arange(length, device=k.device)
            age_after = age + length
            if timeline.resets is not None:
                newest = torch.where(timeline.resets, t, -1).amax(1)
                age_after = torch.where(newest < 0, age_after, length - newest)
            sight = SequenceSight(timeline.time_idxs, self.window, timeline.resets, num_kept, age)
            slots = torch.arange(self.window, device=k.device)
            kept = (age[:, None] - num_kept + slots[:num_kept]) % self.window
            after = num_kept + length - 1 - (age_after[:, None] - 1 - slots) % self.window
            return kept, sight, after.clamp(min=0), age_after

        kept, sight, after, age = timeline.once(self.window, look)
        keys, values = state["keys"].mT, state["values"]
        keys = torch.cat([_at(keys, kept), k.to(keys.dtype)], dim=2)
        values = torch.cat([_at(values, kept), v.to(values.dtype)], dim=2)
        state_after = None
        if timeline.keeps_state:
            state_after = {"keys": _at(keys, after).mT.contiguous(), "values": _at(values, after), "age": age}
        return keys.to(k.dtype), values.to(v.dtype), sight, state_after


def _at(x: Tensor, slots: Tensor) -> Tensor:
    """Select slots (N, S') of x (N, H, S, E); returns (N, H, S', E)."""
    return x.gather(2, slots[:, None, :, None].expand(*x.shape[:2], -1, x.shape[3]))
