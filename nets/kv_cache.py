"""Keys and values of recent timesteps, which attention keeps from call to call."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import RingSight, SequenceSight, Sight
from .timeline import Timeline
from .trunk import State


class KeyValueRing:
    """What attention with a window of W timesteps keeps of each env, in fixed shapes.

    Timestep t of an episode stands at place t % W. So what a row holds follows from its age alone, and rows of
    different ages and different exports need nothing in common. Timesteps are the last axis, with which the
    product of one query and all keys is twice as fast.

    The state has two parts, "ring" (N, H, 2 E, W) float with keys above values, and "age" (N,) float, the
    timesteps of the running episode until then. What stands in the ring before that is not read.
    """

    def __init__(self, num_heads: int, width: int, window: int) -> None:
        self.width, self.window = width, window
        self.state_shapes: dict[str, tuple[int, ...]] = {"ring": (num_heads, 2 * width, window), "age": ()}

    def extend(
        self, k: Tensor, v: Tensor, timeline: Timeline, state: State | None
    ) -> tuple[Tensor, Tensor, Sight, State | None]:
        """Add L timesteps to those that are kept.

        Args:
            k: (N, H, L, E) float, keys.
            v: (N, H, L, E) float, values.
            timeline: the call.
            state: what is kept; None for nothing. One timestep without gradient is written into it.
        Returns: keys and values to read (N, H, S, E), what queries see of them, and the state after, None if
            nobody needs it.
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
        def look() -> tuple[RingSight, tuple[Tensor, Tensor], int, Tensor]:
            age, num_used = state["age"].long(), self.window
            if age.device.type == "cpu" and not torch.compiler.is_compiling():
                num_used = min(int(age.max()) + 1, self.window)  # There is less to read in young episodes.
            sight = RingSight(age, self.window, num_used)
            return sight, (torch.arange(len(age), device=age.device), sight.place), num_used, state["age"] + 1

        sight, place, num_used, age = timeline.once(self.window, look)
        write = Tensor.index_put if torch.is_grad_enabled() else Tensor.index_put_
        new = torch.cat([k, v], dim=-1)[:, :, 0].float()
        ring = write(state["ring"].permute(0, 3, 1, 2), place, new).permute(0, 2, 3, 1)
        keys, values = ring[..., :num_used].split(self.width, dim=2)
        return keys.mT, values.mT, sight, {"ring": ring, "age": age}

    def _with_sequence(
        self, k: Tensor, v: Tensor, timeline: Timeline, state: State
    ) -> tuple[Tensor, Tensor, Sight, State | None]:
        def look() -> tuple[Tensor, SequenceSight, Tensor, Tensor]:
            age, length = state["age"].long(), k.shape[2]
            num_kept = min(int(age.max()), self.window - 1)  # the newest, which some row may still see
            t = torch.arange(length, device=k.device)
            age_after = age + length
            if timeline.resets is not None:
                newest = torch.where(timeline.resets, t, -1).amax(1)
                age_after = torch.where(newest < 0, age_after, length - newest)
            sight = SequenceSight(timeline.time_idxs, self.window, timeline.resets, num_kept, age)
            places = torch.arange(self.window, device=k.device)
            kept = (age[:, None] - num_kept + places[:num_kept]) % self.window
            after = num_kept + length - 1 - (age_after[:, None] - 1 - places) % self.window
            return kept, sight, after.clamp(min=0), age_after.float()

        kept, sight, after, age = timeline.once(self.window, look)
        both = torch.cat([_at(state["ring"], kept), torch.cat([k, v], dim=-1).float().mT], dim=-1)
        keys, values = both.split(self.width, dim=2)
        state_after = {"ring": _at(both, after), "age": age} if timeline.keeps_state else None
        return keys.mT.to(k.dtype), values.mT.to(v.dtype), sight, state_after


def _at(x: Tensor, places: Tensor) -> Tensor:
    """X (N, H, F, S) at places (N, S') -> (N, H, F, S')."""
    return x.gather(3, places[:, None, None].expand(*x.shape[:3], -1))
