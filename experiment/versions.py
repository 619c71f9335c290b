"""What software this is: versions of packages, and the commit of a repository."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path

PACKAGES = ("loxodon", "torch", "accelerate", "gymnasium", "numpy", "gin-config", "safetensors")
"""Those whose versions a run remembers."""
_GIT_TIMEOUT_S = 2.0


def version_of(package: str) -> str | None:
    """Installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


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
