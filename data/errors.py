"""Errors of trajectory files and settings."""

from __future__ import annotations

import difflib
import errno
import math
from collections.abc import Sequence
from typing import Any

READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)  # errors of writing to a folder without permission


def visible(text: str) -> str:
    r"""Escape text or name of a file for a terminal: unprintable characters become `\x1b` and the like."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def with_fix(error: BaseException) -> str:
    """The text of an error for the terminal, with general advice if it has none of its own."""
    text = str(error)
    advice = "Fix: check the path, its permissions and the free space."
    return text if "Fix:" in text else f"{text.rstrip('.')}. {advice}"


def check_choice(setting: str, value: object, allowed: Sequence[str]) -> None:
    """Raise ValueError unless `value` of a setting, such as "Experiment.env_mode", is allowed."""
    if value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, n=1)
        advice = f"set {setting} = {near[0]!r}" if near else f"set {setting} to one of these"
        raise ValueError(
            f"{setting} is {value!r}; allowed are {', '.join(map(repr, allowed))}. Fix: {advice}."
        )


def check_number(
    setting: str,
    value: Any,
    *,
    lowest: float = -math.inf,
    above: float = -math.inf,
    highest: float = math.inf,
    whole: bool = False,
    optional: bool = False,
) -> None:
    """Raise TypeError for a setting that is not a number, ValueError for one outside its limits.

    whole: a float without a fraction, such as 1e6, is allowed too; see `check_count`.
    optional: None is allowed too.
    """
    if optional and value is None:
        return
    limits = [f"of at least {lowest}"] * (lowest > -math.inf) + [f"above {above}"] * (above > -math.inf)
    limits += [f"at most {highest}"] * (highest < math.inf)
    allowed = f"{'None or ' if optional else ''}a {'whole ' if whole else ''}number {' and '.join(limits)}"
    text = f"{setting} is {value!r}, but must be {allowed.strip()}. Fix: set {setting} to such a number."
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (whole and not float(value).is_integer()):
        raise TypeError(text)
    if not lowest <= value <= highest or value <= above:  # also refuses NaN
        raise ValueError(text)


def check_count(setting: str, value: Any, lowest: int = 1, *, optional: bool = False) -> None:
    """Raise ValueError unless a setting is an int of at least `lowest`, or None if that is allowed."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not (is_integer and value >= lowest) and not (optional and value is None):
        raise ValueError(
            f"{setting} is {value!r}, but must be {'None or ' if optional else ''}an integer of at least "
            f"{lowest}. Fix: set {setting} = {max(lowest, 10)}, for example."
        )


class BrokenTrajectoryError(ValueError):
    """An existing file that is not a complete trajectory: truncated, empty, foreign, damaged or too new.

    Its text says which file, what was found, what is allowed, and how to fix it.
    """

    def __init__(self, text: str) -> None:
        super().__init__(visible(text))


class WrongValueError(ValueError):
    """A value from an environment that its spaces, or gymnasium's interface, do not allow.

    Args:
        found: what the environment returned, such as "the reward 'much'".
        allowed: sentences that describe the allowed values and the fix.
        row: index among the values that were checked together; None for all of them, or a single one.
    """

    def __init__(self, found: str, allowed: str, row: int | None = None) -> None:
        super().__init__(f"The environment returned {found}. {allowed}")
        self.found, self.allowed, self.row = found, allowed, row

    def at(self, row: int) -> WrongValueError:
        """The same error with another row."""
        return WrongValueError(self.found, self.allowed, row)

    def completed(self, subject: str, place: str = "", more: str = "") -> ValueError:
        """Return the error to raise, with the name of the environment and the time.

        Args:
            subject: source of the value, such as "The environment CartPole returned".
            place: where and when it was returned.
            more: sentences to add.
        """
        return ValueError(
            f"{subject} {self.found}{place and f' ({place})'}. {self.allowed}{more and f' {more}'}"
        )


class FormatError(Exception):
    """A defect found by a reader. Its caller, who knows the file, converts it to a BrokenTrajectoryError."""
