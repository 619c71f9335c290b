"""Taking over those weights of another agent that fit: `Experiment.warm_start`, and after pre-training."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

from .artifacts.restoring import locate
from .env_spaces import space_differences
from .policy_files import read_policy

if TYPE_CHECKING:
    from .experiment import Experiment

logger = logging.getLogger("loxodon")
_SHOWN = 5


@dataclass(frozen=True)
class Handover:
    """Names of tensors: taken over, left as they were, left over in the source, of another shape."""

    loaded: list[str]
    left: list[str]
    unused: list[str]
    other_shape: list[str]

    def __str__(self) -> str:
        """One line, by modules."""
        total = len(self.loaded) + len(self.left)
        text = f"{len(self.loaded)} of {total} tensors: {_by_module(self.loaded) or 'none'}"
        if self.left:
            text += f"; not loaded, as before: {_by_module(self.left)}"
        if self.other_shape:
            text += f"; of another shape: {_some(self.other_shape)}"
        if self.unused:
            text += f"; there, but not used: {_by_module(self.unused)}"
        return text


def load_what_fits(model: nn.Module, weights: Mapping[str, Tensor], source: str) -> Handover:
    """Copy the tensors whose names and shapes fit into the model.

    source: where they are from, for the error.

    Raises: ValueError naming both sets if nothing fits.
    """
    own = model.state_dict()
    fits = {name for name in own.keys() & weights.keys() if own[name].shape == weights[name].shape}
    other = sorted((own.keys() & weights.keys()) - fits)
    if not fits:
        shapes = f" The shapes of {_some(other)} differ." if other else ""
        raise ValueError(
            f"No tensor of {source} fits this agent: there are {_by_module(weights)}, and the agent has "
            f"{_by_module(own)}.{shapes} Fix: use the encoders and sizes that it was trained with."
        )
    with torch.no_grad():
        for name in fits:
            own[name].copy_(weights[name])
    return Handover(sorted(fits), sorted(own.keys() - fits), sorted(weights.keys() - fits), other)


def warm_start_if_asked(exp: Experiment) -> None:
    """Begin a new run with those weights of another one that fit; says which do and which do not.

    Counters and optimizer are new. A collecting process follows its learner's weights instead.

    Raises: FileNotFoundError; ValueError if the environment is another one, or nothing fits.
    """
    if exp.warm_start is None or exp.mode == "collect":
        return
    fetched = exp.checkpoints.root / "warm-start"
    where: list[Any] = [None]
    if exp.accelerator.is_main_process:
        where = [locate(exp, exp.warm_start, fetched, "warm_start")[0]]
    broadcast_object_list(where)
    path = where[0] / "model.safetensors" if where[0].is_dir() else where[0]
    info, weights = read_policy(path)
    saved = info.env_spaces()
    differences = [] if saved is None else space_differences(saved, exp.env_spaces, "the file")
    if differences:
        raise ValueError(
            f"Experiment.warm_start: {path} is of another environment: {'; '.join(differences)}. Fix: name a "
            "policy of an environment with these spaces."
        )
    found = load_what_fits(exp.policy, weights, str(path))
    logger.info("Warm start from %s: %s.", exp.warm_start, found)
    exp.accelerator.wait_for_everyone()
    if exp.accelerator.is_main_process:
        shutil.rmtree(fetched, ignore_errors=True)


def _by_module(names: Iterable[str]) -> str:
    """`tstep_encoder (6), traj_encoder (20)`."""
    counts = Counter(name.partition(".")[0] for name in names)
    return ", ".join(f"{module} ({count})" for module, count in counts.items())


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
