"""A few integers that a process shares with those it starts."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any

# Enough for any change of a few integers. A process that was killed in the middle of one never gives the lock
# back; the others then go on without.
_LOCK_S = 0.05


class SharedCounts:
    """Integers in memory that this process shares with those it starts.

    Copies made by pickle, other than for a process that is being started, have memory of their own.

    Args:
        values: to begin with.
    """

    def __init__(self, values: Sequence[int]) -> None:
        self._array = multiprocessing.RawArray("q", list(values))
        self._lock = multiprocessing.Lock()

    def values(self) -> list[int]:
        """Return all of them."""
        return list(self._array)

    def set(self, values: Sequence[int]) -> None:
        """Replace all of them."""
        self._array[:] = list(values)

    def set_item(self, index: int, value: int) -> None:
        """Replace one of them."""
        self._array[index] = value

    def add(self, amounts: Sequence[int]) -> None:
        """Add to each of them."""
        locked = self._lock.acquire(timeout=_LOCK_S)
        self._array[:] = [value + amount for value, amount in zip(self._array, amounts, strict=True)]
        if locked:
            self._lock.release()

    def restart(self, epoch: int) -> None:
        """Set all to 0 in the first process that says that an epoch begins; the first one is its number."""
        locked = self._lock.acquire(timeout=_LOCK_S)
        if self._array[0] != epoch:
            self._array[:] = [epoch] + [0] * (len(self._array) - 1)
        if locked:
            self._lock.release()

    def __getstate__(self) -> dict[str, Any]:
        """Return the shared memory for a process that is being started, else what is in it."""
        return self.__dict__ if get_spawning_popen() is not None else {"values": self.values()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what __getstate__ returned."""
        if "values" in state:
            self.__init__(state["values"])  # type: ignore[misc]
        else:
            self.__dict__.update(state)
