"""A folder of trajectory files as a listing that costs what is new, not what is there."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import NamedTuple

from .files import TEMPORARY_SUFFIX, parse_name

_STALE_TEMPORARY_S = 3600.0
_logger = logging.getLogger("loxodon")


class TrajectoryFile(NamedTuple):
    """One finished file. Sorts by age, the oldest first."""

    unix_time: float  # seconds
    traj_id: str
    path: str


class TrajectoryFolder:
    """What lies in one folder. Temporary files are ignored; other foreign files too, with one warning."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, TrajectoryFile] = {}
        self._ignored: set[str] = set()

    def refresh(self) -> tuple[list[TrajectoryFile], list[TrajectoryFile]]:
        """List the folder again. Returns the files that are new and those that are gone.

        A folder that does not exist is empty.
        """
        try:
            names = set(os.listdir(self.path))  # noqa: PTH208 (only names are needed)
        except FileNotFoundError:
            names = set()
        gone = [self.files.pop(name) for name in self.files.keys() - names]
        added: list[TrajectoryFile] = []
        for name in names - self.files.keys() - self._ignored:
            parsed = parse_name(name)
            if parsed is not None:
                file = TrajectoryFile(parsed.unix_time, parsed.traj_id, f"{self.path}/{name}")
                self.files[name] = file
                added.append(file)
            elif not name.endswith(TEMPORARY_SUFFIX):
                self._warn_of(name)
        return added, gone

    def discard(self, file: TrajectoryFile) -> None:
        """Take a file off the listing."""
        self.files.pop(Path(file.path).name, None)

    def remove_stale_temporaries(self) -> None:
        """Delete temporary files that a killed writer left more than an hour ago."""
        now_s = time.time()
        for path in self.path.glob(f"*{TEMPORARY_SUFFIX}"):
            try:
                if now_s - path.stat().st_mtime > _STALE_TEMPORARY_S:
                    path.unlink()
            except FileNotFoundError:  # its writer has just finished it
                continue

    def _warn_of(self, name: str) -> None:
        if not self._ignored:
            _logger.warning(
                "%s contains %r, which is not named <env>_<id>_<unix time>.npz, so it is ignored. "
                "Fix: rename it or move it away.",
                self.path,
                name,
            )
        self._ignored.add(name)
