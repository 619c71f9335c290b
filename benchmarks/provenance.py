"""Where a figure comes from: commit, machine and versions."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "accelerate", "gin-config", "gymnasium", "numpy")


def git_commit() -> str:
    """Commit of the code that was measured, marked when the working tree differs from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def provenance() -> dict[str, Any]:
    """Commit, device and versions, for the head of a result."""
    return {
        "commit": git_commit(),
        "device": f"cpu, {platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
    }
