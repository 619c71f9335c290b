"""Errors of environments: the one public class of this folder, exits, and failures in close."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any

logger = logging.getLogger("loxodon")


class EnvError(RuntimeError):
    """An environment, or the worker process it lived in, failed while running."""


def raise_if_exit(error: BaseException, who: str, doing: str) -> None:
    """Raise EnvError for an exception that is not an `Exception`, which the code that saves a run would miss.

    The SystemExit of `sys.exit()` is one; it would end the program silently. A KeyboardInterrupt
    counts unless it comes from the user: from Python's own handler of SIGINT, or from another handler, which
    raises a class of its own.

    Args:
        error: what came out of an environment.
        who: the environment, to begin a sentence with.
        doing: what it was asked for, such as "step".
    """
    if isinstance(error, Exception):
        return
    if isinstance(error, KeyboardInterrupt):
        is_main = threading.current_thread() is threading.main_thread()
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if type(error) is not KeyboardInterrupt or (is_main and is_default):
            return
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    raise EnvError(
        f"{who} tried to end the program in {doing} ({text}). Allowed are exceptions, and episodes that end. "
        "Fix: let it return terminated or truncated, or raise an error that says what is wrong."
    ) from error


def guarded(who: Callable[[], str], doing: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the call returns. Raises: as raise_if_exit, with what `who` returns, and what the call raises."""
    try:
        return call(*args, **kwargs)
    except BaseException as error:
        raise_if_exit(error, who(), doing)
        raise


def close_all(envs: Iterable[Any], first_row: int = 0) -> None:
    """Close environments, the first of which is number `first_row`; failures are one warning together."""
    problems = []
    for row, env in enumerate(envs, start=first_row):
        try:
            env.close()
        except BaseException as error:  # the others have to be closed, also after a `sys.exit()`
            if type(error) is KeyboardInterrupt:  # that is the user's, see raise_if_exit
                raise
            name = type(env.unwrapped).__name__
            problems.append(f"Environment {row} ({name}) failed in close: {type(error).__name__}: {error}")
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        logger.warning("%s%s. Fix: correct its close().", problems[0], more)
