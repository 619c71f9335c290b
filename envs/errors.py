"""The one public error class of this folder."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any


class EnvError(RuntimeError):
    """An environment, or the worker process it lived in, failed while running."""


def raise_if_exit(error: BaseException, who: str, doing: str) -> None:
    """Raise EnvError for what would end the program silently, such as the SystemExit of `sys.exit()`.

    A KeyboardInterrupt counts unless it comes from the user: from Python's own handler of SIGINT, or from
    another handler, which raises a class of its own.

    Args:
        error: what came out of an environment.
        who: the environment, to begin a sentence with.
        doing: what it was asked for, such as "step".
    """
    if not isinstance(error, SystemExit | KeyboardInterrupt | GeneratorExit):
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
