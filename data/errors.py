"""What can be wrong with a trajectory file."""

from __future__ import annotations


def visible(text: str) -> str:
    r"""Text of a file, or its name, for a terminal: what is not printable becomes `\x1b` and the like."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class BrokenTrajectoryError(ValueError):
    """A file that exists but is not a complete trajectory: truncated, empty, foreign, damaged or too new.

    Its text names the file, what was found, what is allowed, and the mend.
    """

    def __init__(self, text: str) -> None:
        super().__init__(visible(text))


class FormatError(Exception):
    """What a format's own reader found wrong; the caller, who knows the file, makes the error above of it."""

    def __init__(self, text: str, mend: str = "move the file out of the folder or delete it.") -> None:
        super().__init__(text)
        self.mend = mend
