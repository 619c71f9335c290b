"""What every timestep of a trajectory looks like, whatever its length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Layout:
    """Observation keys, shapes and dtypes, and the number of action columns.

    Attributes:
        obs: shape of one timestep and dtype, by observation key.
        action_width: A, the number of discrete actions or of elements of a continuous one; with several
            factors the sum of their numbers of actions.
        nvec: number of actions of each of K factors (MultiDiscrete); None for other actions.
    """

    obs: dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
    action_width: int
    nvec: tuple[int, ...] | None = None

    def describe_mismatch(self, other: Layout) -> str | None:
        """Say why data of layout `other` cannot be trained on where this one is expected; None if it can.

        Keys, shapes, A and nvec must be equal; dtypes may differ if numpy casts them "same_kind" to the
        expected one, such as float64 to float32, or uint8 to float32, but not float32 to uint8.
        """
        if other == self:
            return None
        problems: list[str] = []
        for key in sorted(self.obs.keys() | other.obs.keys()):
            expected, found = self.obs.get(key), other.obs.get(key)
            if found is None:
                problems.append(f"observation {key!r} is missing")
            elif expected is None:
                problems.append(f"observation {key!r} is not expected")
            elif found[0] != expected[0] or not np.can_cast(found[1], expected[1], "same_kind"):
                problems.append(
                    f"observation {key!r} is {found[1]}{list(found[0])}, expected "
                    f"{expected[1]}{list(expected[0])}"
                )
        if other.action_width != self.action_width:
            problems.append(f"actions have {other.action_width} columns, expected {self.action_width}")
        elif other.nvec != self.nvec:
            problems.append(f"actions have {_factors(other.nvec)}, expected {_factors(self.nvec)}")
        return "; ".join(problems) or None

    def __str__(self) -> str:
        """Return for example `position float32[2], image uint8[64, 64, 3]; 4 action columns`."""
        obs = ", ".join(f"{key} {dtype}{list(shape)}" for key, (shape, dtype) in self.obs.items())
        factors = "" if self.nvec is None else f" ({_factors(self.nvec)})"
        return f"{obs}; {self.action_width} action columns{factors}"


def _factors(nvec: tuple[int, ...] | None) -> str:
    return "one factor" if nvec is None else f"factors of {', '.join(map(str, nvec))}"
