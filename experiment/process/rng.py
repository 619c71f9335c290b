"""Random numbers: named streams derived from one seed, and saving and restoring of generator states."""

from __future__ import annotations

import random
import secrets
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ...envs.generators import python_state, set_python_state


def draw_seed() -> int:
    """A fresh seed from the operating system, in [0, 2**31)."""
    return secrets.randbits(31)


def derive_seed(seed: int, *names: str | int) -> int:
    """Seed in [0, 2**31) of the stream called `names`; streams with different names are independent."""
    words = [n if isinstance(n, int) else zlib.crc32(n.encode()) for n in names]
    return int(np.random.SeedSequence([seed, *words]).generate_state(1)[0] >> 1)


def seed_global_generators(seed: int) -> None:
    """Seed the process-wide generators of Python, numpy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - user environments may draw from the legacy global generator
    torch.manual_seed(seed)


class GlobalGenerators:
    """The process-wide generators of Python, numpy and torch, as a part whose state a checkpoint keeps."""

    def state_dict(self) -> dict[str, Any]:
        """States of all generators, including torch's on the CPU and on every CUDA device."""
        return {
            "python": python_state(),
            "numpy": np.random.get_state(legacy=True),  # noqa: NPY002
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`; CUDA's are ignored if the number of devices differs."""
        set_python_state(state["python"])
        np.random.set_state(state["numpy"])  # noqa: NPY002
        torch.set_rng_state(state["cpu"])
        if state["cuda"] and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])


@contextmanager
def isolated_rng(seed: int | None) -> Iterator[None]:
    """Run a block with generators seeded by `seed`; afterwards all global generators are as before.

    seed: None keeps the current states for the block.
    """
    generators = GlobalGenerators()
    before = generators.state_dict()
    if seed is not None:
        seed_global_generators(seed)
    try:
        yield
    finally:
        generators.load_state_dict(before)
