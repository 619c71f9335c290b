"""The global random generators of a worker process, for environments that draw from them."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np


def seed_generators(*seeds: int) -> None:
    """Seed `random`, NumPy's global generator and, if it is imported in this process, torch's."""
    seed = int(np.random.SeedSequence(seeds).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - environments draw from the legacy global generator
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


def python_state() -> tuple[int, np.ndarray, float | None]:
    """The state of `random`, its 625 numbers as one array, which is much faster to store."""
    version, numbers, gauss = random.getstate()
    return version, np.array(numbers, np.uint32), gauss


def set_python_state(state: tuple[int, np.ndarray, float | None]) -> None:
    """Restore what `python_state` returned."""
    version, numbers, gauss = state
    random.setstate((version, tuple(numbers.tolist()), gauss))


def generators_state() -> dict[str, Any]:
    """The states of these generators, as plain values."""
    state: dict[str, Any] = {"python": python_state()}
    state["numpy"] = np.random.get_state(legacy=True)  # noqa: NPY002
    if (torch := sys.modules.get("torch")) is not None:
        state["torch"] = torch.get_rng_state().numpy()
    return state


def set_generators_state(state: dict[str, Any]) -> None:
    """Restore what `generators_state` returned."""
    set_python_state(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    if "torch" in state and (torch := sys.modules.get("torch")) is not None:
        torch.set_rng_state(torch.from_numpy(state["torch"]))
