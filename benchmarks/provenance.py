"""Provenance of a result: commit, machine and versions."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "accelerate", "gin-config", "gymnasium", "numpy")


def git_commit() -> str:
    """The current commit, with a mark if code or settings of the working tree differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    differs = git("status", "--porcelain", "--", "*.py", "*.gin", "constraints.txt")
    return (git("rev-parse", "HEAD") or "unknown") + ("-dirty" if differs else "")


def provenance(device: str = "cpu") -> dict[str, Any]:
    """Commit, device and versions, for the header of a result."""
    name = f"cpu, {platform.machine()}, {os.cpu_count()} cores"
    if device == "cuda":
        name = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, host {name}"
    return {
        "commit": git_commit(),
        "device": name,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
    }
