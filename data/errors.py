"""The one error class of this folder."""

from __future__ import annotations


class BrokenTrajectoryError(ValueError):
    """A file that exists but is not a complete trajectory: truncated, empty, foreign, damaged or too new.

    Its text names the file, what was found, what is allowed, and the mend.
    """
