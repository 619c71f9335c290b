"""What can be wrong with a trajectory file."""

from __future__ import annotations


class BrokenTrajectoryError(ValueError):
    """A file that exists but is not a complete trajectory: truncated, empty, foreign, damaged or too new.

    Its text names the file, what was found, what is allowed, and the mend.
    """


class FormatError(Exception):
    """What a format's own reader found wrong; the caller, who knows the file, makes the error above of it."""
