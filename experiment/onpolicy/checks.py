"""Finite checks that say which tensor, step and environment is to blame."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...data import RolloutBatch
from .buffer import CollectedRollout

LEVELS = ("off", "cheap", "full")
_CAUSES = "check the environment's observations and rewards, or lower Experiment.learning_rate or grad_clip"


def check_rollout(rollout: CollectedRollout) -> None:
    """Refuse a rollout with NaN or infinite numbers.

    Raises: ValueError naming the tensor, the first bad step and its env.
    """
    now = slice(rollout.history, None)
    columns = {f"observation {key!r}": value[now] for key, value in rollout.obs.items()}
    columns |= {"rl2s": rollout.rl2s[now]} | rollout.steps
    for name, column in columns.items():
        # One sum tells whether all is well: NaN and infinity spread, and only then is each number looked at.
        if column.dtype.kind != "f" or np.isfinite(column.sum(dtype=np.float64)):
            continue
        bad = ~np.isfinite(column)
        if bad.any():
            step, env = (int(i) for i in np.argwhere(bad)[0][:2])
            raise ValueError(
                f"The rollout's {name} has {int(bad.sum())} NaN or infinite numbers, first at step {step} of "
                f"env {env}. Fix: {_CAUSES}."
            )


def check_batch(batch: RolloutBatch) -> None:
    """Refuse a minibatch with NaN or infinite numbers where the loss counts.

    Raises: ValueError naming the tensor.
    """
    for name, value in _tensors(batch):
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise ValueError(f"A minibatch's {name} holds NaN or infinite numbers. Fix: {_CAUSES}.")


def _tensors(batch: RolloutBatch) -> Iterator[tuple[str, Tensor]]:
    for field in dataclasses.fields(batch):
        value: Any = getattr(batch, field.name)
        if isinstance(value, dict):
            yield from ((f"{field.name}[{key!r}]", part) for key, part in value.items())
        elif value is not None:
            yield field.name, value
