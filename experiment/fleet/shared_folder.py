"""Check that all processes of a run see the same run folder: each is started with a token from that folder.

The processes of a run share only a folder. Two machines that do not share a file system, or mount it
elsewhere, each have a folder of that name, and an actor in the wrong one would collect in vain.
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

TOKEN_VARIABLE = "LOXODON_RUN_FOLDER"  # environment variable of processes that were started for a run
VISIBLE_WITHIN_S = 8.0  # time after which a file written by another machine is visible here
SHARED = "set Experiment.ckpt_base_dir to a folder on a file system that all machines share"
_TOKEN = "token"
_POLL_S = 0.2


def location_of(folder: Path) -> str:
    """`host:/absolute/path`, which shows the place of a folder when two machines disagree."""
    return f"{socket.gethostname()}:{folder.expanduser().resolve()}"


def write_token(run_dir: Path) -> str:
    """Write a token to the run folder if it has none; returns the value of TOKEN_VARIABLE."""
    if (token := _token_in(run_dir)) is None:
        token = uuid.uuid4().hex
        write_text(run_dir / STATUS_FOLDER / _TOKEN, token)
    return f"{token} {location_of(run_dir)}"


def check_folder(run_dir: Path, expected: str | None) -> None:
    """Make sure that this process sees the folder of its run.

    Args:
        run_dir: the run's folder as this process finds it.
        expected: the result of `write_token` in the process that started the run; None skips the check.

    Raises: ConfigError if the token does not appear within VISIBLE_WITHIN_S.
    """
    if expected is None:
        return
    token, _, place = expected.partition(" ")
    deadline_s = time.monotonic() + VISIBLE_WITHIN_S
    while (found := _token_in(run_dir)) != token:
        if time.monotonic() > deadline_s:
            has = "is missing" if not run_dir.is_dir() else "holds nothing of this run"
            raise ConfigError(
                f"This process does not see the folder of its run, which is {place}: {location_of(run_dir)} "
                f"{has if found is None else 'is another folder'}. Fix: {SHARED}."
            )
        time.sleep(_POLL_S)


def expected_token() -> str | None:
    """The value of TOKEN_VARIABLE in this process; None in one that was started by hand."""
    return os.environ.get(TOKEN_VARIABLE)


def _token_in(run_dir: Path) -> str | None:
    try:
        return (run_dir / STATUS_FOLDER / _TOKEN).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
