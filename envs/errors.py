"""Errors of environments: the public class of this folder, and failures in close."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

logger = logging.getLogger("loxodon")


class EnvError(RuntimeError):
    """An environment, or its worker process, failed while running."""


def close_all(envs: Iterable[Any], first_row: int = 0) -> None:
    """Close environments, and log all failures as one warning; `first_row` is the index of the first one."""
    problems = []
    for row, env in enumerate(envs, start=first_row):
        try:
            env.close()
        except (Exception, SystemExit) as error:  # the other environments must still be closed
            name = type(env.unwrapped).__name__
            problems.append(f"Environment {row} ({name}) failed in close: {type(error).__name__}: {error}")
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        logger.warning("%s%s. Fix: correct its close().", problems[0], more)
