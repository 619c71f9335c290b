"""Find NaN and infinity in the losses, batch and weights of an update, and save the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...agents import Demonstrations
from ...data import Batch
from ...nets import RunningStatistics
from ..process.files import atomic_write

HUGE_REWARD = 1e17
"""Squares of returns of such rewards exceed float32."""


def bad_losses(found: Mapping[str, Any], names: Mapping[str, str], agent: nn.Module) -> list[str]:
    """One clause for each loss term of a batch that is not finite.

    found: the result of `compute_loss`. names: names of the terms, by the names of their means in `found`.
    """
    values = {name: float(found[mean].detach()) for mean, name in names.items()}
    return [
        f"the {name} loss is {value:g}{_place_in_term(found, name, agent)}"
        for name, value in values.items()
        if not math.isfinite(value)
    ]


def _place_in_term(found: Mapping[str, Any], name: str, agent: nn.Module) -> str:
    """Position in a term that is not finite; empty if compute_loss returned only its mean."""
    terms = found.get("terms")
    losses = {} if terms is None else {"actor": terms.actor, "critic": terms.critic, **terms.extra}
    if name not in losses:
        return ""
    masks = {"actor": "Actor Mask", "critic": "Critic Mask"}
    bad = ~torch.isfinite(losses[name]) & found[masks.get(name, f"{name}_mask")]
    if not bad.any():
        return ", although it is finite at every timestep"
    place = f"first at {_first(bad)}"
    discounts = getattr(agent, "discounts", None)  # (G, 1), for agents with several
    if name in masks and discounts is not None:
        affected = bad.any(dim=tuple(range(bad.dim() - 2)))
        if affected.shape == discounts.shape:
            place += ", discounts " + ", ".join(f"{g:g}" for g in discounts[affected].tolist())
    return f" ({place}; {int(bad.sum())} of {bad.numel()} values)"


def bad_fields(batch: Any) -> list[str]:
    """One clause for each field of a batch that is not finite."""
    return [
        f"the batch's {name} is not finite (first at {_first(~torch.isfinite(x))})"
        for name, x in _named_tensors(batch)
        if x.is_floating_point() and not torch.isfinite(x).all()
    ]


def largest_reward(batch: Any) -> float:
    """The largest absolute reward of a batch of trajectories; 0 for other batches."""
    return float(batch.rews.abs().max()) if isinstance(batch, Batch) and batch.rews.numel() else 0.0


def _named_tensors(batch: Any) -> Iterator[tuple[str, Tensor]]:
    unknown = "log_probs" if isinstance(batch, Batch) else ""  # NaN in files without them
    for name, value in vars(batch).items():
        if isinstance(value, dict):
            yield from ((f"{name}[{key!r}]", part) for key, part in value.items())
        elif isinstance(value, Tensor) and name != unknown:
            yield name, value


def _first(bad: Tensor) -> str:
    """The earliest timestep of a batch that is True in bad (B, L, ...), or the first row of bad (B,)."""
    bad = bad.reshape(*bad.shape[:2], -1).any(-1)
    if bad.dim() == 1:
        return f"sequence {int(bad.nonzero()[0])}"
    timestep = int(bad.any(0).nonzero()[0])
    return f"sequence {int(bad[:, timestep].nonzero()[0])}, timestep {timestep}"


def bad_weights(agent: nn.Module) -> list[str]:
    """Names of parameters and statistics that are not finite, and of other stored buffers with NaN.

    Such a buffer may hold infinity on purpose, for example a causal mask.
    """
    statistics = [m for m in agent.modules() if isinstance(m, RunningStatistics)]
    finite = {id(x) for x in agent.parameters()} | {id(x) for m in statistics for x in m.buffers()}
    found = agent.state_dict(keep_vars=True).items()
    return [
        name
        for name, x in found
        if x.is_floating_point() and not (torch.isfinite(x) if id(x) in finite else ~torch.isnan(x)).all()
    ]


def bad_gradients(agent: nn.Module) -> list[str]:
    """The names of the parameters whose gradients are not finite."""
    found = [(name, p.grad) for name, p in agent.named_parameters() if p.grad is not None]
    if not found:
        return []
    norms = torch.stack(torch._foreach_norm([gradient for _, gradient in found])).tolist()
    return [name for (name, _), norm in zip(found, norms, strict=True) if not math.isfinite(norm)]


def named(names: Sequence[str]) -> str:
    """The first of several names, and how many others there are."""
    num_others = len(names) - 1
    return repr(names[0]) + (f" and {num_others} other{'s' * (num_others > 1)}" if num_others else "")


def plain(batch: Any) -> Any:
    """The batch that holds the tensors: the windows of demonstrations, else the batch itself."""
    return batch.batch if isinstance(batch, Demonstrations) else batch


def save_batches(batches: Sequence[Any], path: Path) -> None:
    """Write a list with the fields of each batch as a dict; `torch.load` with `weights_only` reads it."""
    with atomic_write(path) as temp:
        torch.save([vars(plain(batch).to("cpu")) for batch in batches], temp)
