"""Messages that are logged once per process."""

from __future__ import annotations

import functools
import logging

logger = logging.getLogger("loxodon")


@functools.cache  # several networks may be built alike
def log_once(message: str, level: int = logging.INFO) -> None:
    """Log a message, unless the same one was logged before."""
    logger.log(level, "%s", message)
