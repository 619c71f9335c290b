"""Exit statuses, as argparse and shells use them, and protection against silent exits."""

from __future__ import annotations

import contextlib
import logging
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

FAILED = 1
CONFIG_ERROR = 2  # trying again would not help
INTERRUPTED = 128 + signal.SIGINT  # lets a shell's loop over commands end too
logger = logging.getLogger("loxodon")


class Stopped(SystemExit):
    """The end of a run that a signal asked for. Everything is saved and closed."""


@contextlib.contextmanager
def without_foreign_exits() -> Iterator[None]:
    """Keep foreign code from ending the program silently.

    Raises: RuntimeError for a SystemExit that is not `Stopped`, with the place that raised it.
    """
    try:
        yield
    except Stopped:
        raise
    except SystemExit as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise RuntimeError(
            f"{place.filename}:{place.lineno} (in {place.name}) called sys.exit({error.code!r}), which would "
            "end the run silently. Fix: raise an exception there; a callback ends training by "
            "run.request_stop()."
        ) from error


def close_each(parts: Iterable[tuple[str, Callable[[], Any]]]) -> None:
    """Call all functions that close a part. An error causes a warning, and the others are still called.

    Args:
        parts: the name of each part, for the warning, and the function that closes it.
    """
    for name, close in parts:
        try:
            close()
        except (Exception, SystemExit, GeneratorExit) as error:
            logger.warning("The %s could not be closed: %s: %s", name, type(error).__name__, error)
