"""Check of numbers that users set, with one form of error."""

from __future__ import annotations

import math
from typing import Any


def check_number(
    name: str,
    value: Any,
    *,
    lowest: float = -math.inf,
    above: float = -math.inf,
    whole: bool = False,
    optional: bool = False,
) -> None:
    """Raise TypeError for a setting that is not a number, ValueError for one below `lowest` or not `above`.

    optional: None is allowed too.
    """
    if optional and value is None:
        return
    allowed = f"{'None or ' if optional else ''}a {'whole ' if whole else ''}number"
    if lowest > -math.inf:
        allowed += f" of at least {lowest}"
    if above > -math.inf:
        allowed += f" above {above}"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (whole and not float(value).is_integer()):
        raise TypeError(f"{name} is {value!r}, but must be {allowed}. Fix: set {name} to such a number.")
    if not value >= lowest or value <= above:  # also refuses NaN
        raise ValueError(f"{name} is {value!r}, but must be {allowed}. Fix: set {name} to such a number.")
