"""Environment of a run: packages and their versions, the commit of a repository, the machine."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import psutil
import torch

PACKAGES = ("loxodon", "torch", "accelerate", "gymnasium", "numpy", "gin-config", "safetensors")
"""Packages with versions in the record of a run."""
_GIT_TIMEOUT_S = 2.0


def version_of(package: str) -> str | None:
    """Installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def import_extra(package: str, install: str) -> Any:
    """Import a package that only some runs and commands need. install: its name for pip.

    Raises: ImportError with the line that installs it.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name not in (package, package.partition(".")[0]):
            raise
        raise ImportError(
            f"This needs {error.name}, which is not installed. Fix: pip install '{install}'."
        ) from None


def git_commit(folder: Path | None = None) -> str | None:
    """Commit of the repository around `folder` (None: the working directory), or None if there is none."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def hardware() -> dict[str, Any]:
    """This machine: system, processor, cores, memory in GB, and names of its GPUs."""
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):  # only Linux has the file
        if found := re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8")):
            processor = found[1]
    return {
        "system": platform.platform(),
        "processor": processor,
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }
