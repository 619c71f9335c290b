"""Whether the processes of a run see one run folder: whoever starts a process hands on a token from there.

All that processes of a run have in common is a folder. Two machines that do not share a file system, or mount
it elsewhere, each have a folder of that name, and an actor in the wrong one would collect for nobody.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from pathlib import Path

from ..config import ConfigError
from ..process.files import write_text
from .heartbeat import STATUS_FOLDER

EXPECTED = "LOXODON_RUN_FOLDER"  # environment variable of a process that was started for a run
PATIENCE_S = 8.0  # until a file that another machine has written is visible here
SHARED = "set Experiment.ckpt_base_dir to a folder on a file system that all machines share"
_TOKEN = "token"
_LOOK_S = 0.2


def place_of(folder: Path) -> str:
    """`host:/absolute/path`, which shows where a folder is when two machines disagree."""
    return f"{socket.gethostname()}:{folder.expanduser().resolve()}"


def mark(run_dir: Path) -> str:
    """Put a token into the run folder if it has none; returns the value of EXPECTED for its processes."""
    if (token := _token_in(run_dir)) is None:
        token = uuid.uuid4().hex
        write_text(run_dir / STATUS_FOLDER / _TOKEN, token)
    return f"{token} {place_of(run_dir)}"


def check_folder(run_dir: Path, expected: str | None) -> None:
    """Make sure that this process sees the folder of its run.

    Args:
        run_dir: the run's folder as this process finds it.
        expected: what `mark` returned in the process that started the run; None skips the check.

    Raises: ConfigError if the token is not there within PATIENCE_S.
    """
    if expected is None:
        return
    token, _, place = expected.partition(" ")
    deadline_s = time.monotonic() + PATIENCE_S
    while (found := _token_in(run_dir)) != token:
        if time.monotonic() > deadline_s:
            has = "is missing" if not run_dir.is_dir() else "holds nothing of this run"
            raise ConfigError(
                f"This process does not see the folder of its run, which is {place}: {place_of(run_dir)} "
                f"{has if found is None else 'is another folder'}. Fix: {SHARED}."
            )
        time.sleep(_LOOK_S)


def expected_here() -> str | None:
    """The value of EXPECTED in this process; None in one that was started by hand."""
    return os.environ.get(EXPECTED)


def _token_in(run_dir: Path) -> str | None:
    try:
        return (run_dir / STATUS_FOLDER / _TOKEN).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
