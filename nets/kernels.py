"""The recurrences of `recurrence.py` on a GPU, by the kernels of flash-linear-attention if it is installed.

The results are the same, except that a GPU rounds float32 products to fewer digits (TF32). If several
episodes share a row, all rows are concatenated, and each episode becomes a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

PACKAGE = "fla"
_WIDEST_KEY = 256  # largest width that all kernels support
_LEAST_DECAY = 1e-30  # keeps logarithms finite


def serve(x: Tensor, key_width: int = 1) -> bool:
    """True if the kernels can compute a recurrence over `x`."""
    fits = x.dtype == torch.float32 and key_width <= _WIDEST_KEY
    return fits and runs_kernels(x.device) and _is_installed()


def runs_kernels(device: torch.device) -> bool:
    """True if Triton compiles for `device`."""
    return device.type == "cuda"


@cache
def _is_installed() -> bool:
    return find_spec(PACKAGE) is not None


def _kernel(module: str, name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Import a kernel; this is done late, because Triton takes seconds."""
    kernel: Callable[..., tuple[Tensor, Tensor]] = getattr(import_module(f"{PACKAGE}.ops.{module}"), name)
    return kernel


class _Episodes(NamedTuple):
    """Borders of the S episodes of a batch (B, L) with concatenated rows.

    borders: (S + 1,) int64, the first timestep of each episode, and B L.
    first, last: (B,) int64, indices of the first and last episode of each row.
    continues: (B,) bool, True where a row continues the episode before it.
    """

    borders: Tensor
    first: Tensor
    last: Tensor
    continues: Tensor

    @classmethod
    def of(cls, resets: Tensor) -> _Episodes:
        begins = resets.clone()
        begins[:, 0] = True
        ends = begins.sum(1).cumsum(0)
        borders = F.pad(begins.flatten().nonzero().squeeze(1), (0, 1), value=begins.numel())
        return cls(borders, F.pad(ends[:-1], (1, 0)), ends - 1, ~resets[:, 0])


def _run(
    kernel: Callable[..., tuple[Tensor, Tensor]],
    parts: dict[str, Tensor],
    initial: Tensor,
    resets: Tensor | None,
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """Run a kernel over parts (B, L, ...) from a state (B, ...); return (B, L, ...) and the last state."""
    settings["output_final_state"] = True
    if resets is None:
        return kernel(**parts, initial_state=initial, **settings)
    episodes = _Episodes.of(resets)
    known = initial * episodes.continues.view(-1, *[1] * (initial.ndim - 1))
    starts = initial.new_zeros(len(episodes.borders) - 1, *initial.shape[1:])
    starts = starts.index_copy(0, episodes.first, known)
    in_one_row = {name: part.flatten(0, 1)[None] for name, part in parts.items()}
    y, ends = kernel(**in_one_row, initial_state=starts, cu_seqlens=episodes.borders, **settings)
    return y.view(*resets.shape, *y.shape[2:]), ends[episodes.last]


def linear_recurrence(decay: Tensor, inputs: Tensor, initial: Tensor, resets: Tensor | None) -> Tensor:
    """Compute `recurrence.linear_recurrence`; decay (B, L, ...) has the shape of inputs."""
    log_decay = decay.clamp(min=_LEAST_DECAY).log()
    parts = {"x": inputs.flatten(2), "g": log_decay.flatten(2)}
    kernel = _kernel("hgrn", "fused_recurrent_hgrn")
    states, _ = _run(kernel, parts, initial.flatten(1), resets)
    return states.view_as(inputs)


def matrix_recurrence(
    parts: dict[str, Tensor], initial: Tensor, resets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `recurrence.matrix_recurrence`; parts: queries "q", keys "k", values "v", log decay "g"."""
    q, k, v, log_decay = (parts[name] for name in ("q", "k", "v", "g"))
    parts = {"q": q.expand(*v.shape[:3], -1), "k": k.expand(*v.shape[:3], -1), "v": v}
    if log_decay.shape[-1] > 1:
        return _run(_kernel("gla", "chunk_gla"), {**parts, "g": log_decay}, initial, resets, scale=1.0)
    parts["g"] = log_decay.squeeze(-1)
    return _run(_kernel("simple_gla", "chunk_simple_gla"), parts, initial, resets, scale=1.0)


def delta_recurrence(
    parts: dict[str, Tensor], initial: Tensor, resets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `recurrence.delta_recurrence`; parts: those of `matrix_recurrence`, and the rate "beta"."""
    scalars = {name: parts[name].squeeze(-1) for name in ("beta", "g")}
    kernel = _kernel("gated_delta_rule", "chunk_gated_delta_rule")
    return _run(kernel, {**parts, **scalars}, initial, resets, scale=1.0)
