"""Checks of the numbers that parts take."""

from __future__ import annotations


def require_above_zero(owner: str, **numbers: float) -> None:
    """Raise ValueError for a setting of the part `owner` that is not above 0."""
    for name, number in numbers.items():
        if not number > 0:
            raise ValueError(
                f"{owner}.{name} is {number}, but must be above 0. Fix: bind {owner}.{name} to a positive "
                "number, or remove the binding to use the default."
            )
