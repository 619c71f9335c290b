"""Numbers that users set: one error for all that cannot be."""

from __future__ import annotations

from typing import Any


def check_number(name: str, value: Any, allowed: str, lowest: float, *, whole: bool) -> None:
    """Raise for a setting that is no number, or below `lowest`; allowed: what it must be, in words."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (whole and value != int(value)):
        raise TypeError(f"{name} is {value!r}, but must be {allowed}. Fix: set {name} to one.")
    if value < lowest:
        raise ValueError(f"{name} is {value!r}, but must be {allowed}. Fix: set {name} to one.")
