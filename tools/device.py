"""The device of `--device`, chosen before the first Experiment and checked after it."""

from __future__ import annotations

import os
from typing import Any

import torch

from ..experiment.config import ConfigError


def choose_device(name: str | None) -> None:
    """Make Accelerate use this device, here and in child processes; None keeps the default.

    Raises: ConfigError if PyTorch does not find the device here.
    """
    if name is None:
        return
    backend: Any = {"cuda": torch.cuda, "mps": torch.backends.mps}.get(name)
    if backend is not None and not backend.is_available():
        raise ConfigError(
            f"command line: --device is {name}, but PyTorch {torch.__version__} finds no such device on this "
            "machine. Fix: use --device cpu, or install a build of PyTorch for this device and its driver."
        )
    os.environ["ACCELERATE_USE_CPU"] = "true" if name == "cpu" else "false"


def check_device(found: torch.device, name: str | None) -> None:
    """Raise ConfigError if the agent is on another device: Accelerate chooses it once per process."""
    if name is not None and found.type != name:
        raise ConfigError(
            f"command line: --device is {name}, but this process has been set up for {found}, by an earlier "
            "run or by its launcher. Fix: start a new process, or give the launcher the same device."
        )
