"""Errors of trajectory files and settings."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Sequence

READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)  # errors of writing to a folder without permission


def visible(text: str) -> str:
    r"""Escape text or name of a file for a terminal: unprintable characters become `\x1b` and the like."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def check_choice(setting: str, value: object, allowed: Sequence[str]) -> None:
    """Raise ValueError unless `value` of a setting, such as "Experiment.env_mode", is allowed."""
    if value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, n=1)
        raise ValueError(
            f"{setting} is {value!r}; allowed are {', '.join(map(repr, allowed))}. "
            f"Fix: set {setting} = {near[0] if near else allowed[0]!r}."
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
