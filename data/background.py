"""A bounded queue with one thread behind it, which never drops an item and hands its errors to the caller."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Item = TypeVar("Item")
_GATHER_S = 0.05  # the thread lets items come together for this long
_logger = logging.getLogger("loxodon")


class BackgroundQueue(Generic[Item]):
    """Processes items in order on one thread.

    An item leaves the queue only after `process` returned. If it raises, the item stays first, the thread
    rests, and the next call from outside raises `explain(error)`. A call after that makes it try again.

    The thread wakes for several items at once: each time it runs, it takes the interpreter from whoever
    submits, which for small items costs more than processing them.

    Args:
        process: called on the thread with one item at a time.
        explain: turns an error of `process` and the number of waiting items into the error to raise.
        max_pending: `submit` waits while more items than this are unfinished.
        name: name of the thread.
    """

    def __init__(
        self,
        process: Callable[[Item], object],
        explain: Callable[[Exception, int], Exception],
        *,
        max_pending: int,
        name: str,
    ) -> None:
        self._process, self._explain = process, explain
        self._max_pending, self._name = max_pending, name
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._is_error_reported = False
        self._is_stopping = False
        self._is_idle = False  # the thread sleeps until it is notified
        self._is_awaited = False  # somebody waits for the thread
        self._thread: threading.Thread | None = None
        self._owner_pid = os.getpid()

    @property
    def num_pending(self) -> int:
        """Number of items that are not finished."""
        return len(self._items)

    @property
    def has_failed(self) -> bool:
        """True when the next call will raise, or try once more what failed."""
        return self._error is not None

    def submit(self, items: Iterable[Item]) -> None:
        """Take items, wait while there are too many, and raise the error of an earlier one, if any.

        The items are in the queue even if this raises.
        """
        with self._changed:
            self._retry_after_report()
            self._items.extend(items)
            if self._items and self._thread is None:
                self._start_thread()
            if self._is_idle or len(self._items) > self._max_pending // 2:
                self._changed.notify_all()
            self._wait_until_at_most(self._max_pending)

    def wait(self) -> None:
        """Block until every item is finished. Raises the error of the first item that is not."""
        with self._changed:
            self._retry_after_report()
            self._wait_until_at_most(0)

    def close(self) -> None:
        """Finish every item and end the thread. If an item fails, this raises and may be called again."""
        self.wait()
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            atexit.unregister(self._finish_at_exit)
        self._is_stopping = False

    def _wait_until_at_most(self, num_items: int) -> None:
        """Wait, holding the condition, until few enough items are left or one of them failed."""
        if self._error is None and len(self._items) > num_items:
            self._is_awaited = True
            self._changed.notify_all()
            while self._error is None and len(self._items) > num_items:
                self._changed.wait()
            self._is_awaited = False
        if self._error is not None:
            self._is_error_reported = True
            explained = self._explain(self._error, len(self._items))
            raise explained from (None if explained is self._error else self._error)

    def _retry_after_report(self) -> None:
        """Let the thread try again if the caller was told of the failure and called nonetheless."""
        if self._is_error_reported:
            self._error, self._is_error_reported = None, False
            self._changed.notify_all()

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()
        atexit.register(self._finish_at_exit)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._is_stopping and (not self._items or self._error is not None):
                    self._is_idle = True
                    self._changed.wait()
                    self._is_idle = False
                    self._gather()
                if self._is_stopping:
                    return
                item = self._items[0]
            try:
                self._process(item)
            except Exception as error:  # carried to the caller's next call, never swallowed
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
            else:
                with self._changed:
                    self._items.popleft()
                    self._changed.notify_all()

    def _gather(self) -> None:
        """Wait, holding the condition, for more items, unless there are many or somebody waits for them."""
        until_s = time.monotonic() + _GATHER_S
        while not (self._is_stopping or self._is_awaited or len(self._items) > self._max_pending // 2):
            if (rest_s := until_s - time.monotonic()) <= 0:
                return
            self._changed.wait(rest_s)

    def _finish_at_exit(self) -> None:
        """Finish what is queued when the program ends without close(), as after an error elsewhere."""
        if os.getpid() != self._owner_pid:
            return
        with self._changed:
            is_known, self._error, self._is_awaited = self._is_error_reported, None, True
            self._changed.notify_all()
            while self._error is None and self._items:
                self._changed.wait()
            if self._error is not None and not is_known:
                _logger.error("%s", self._explain(self._error, len(self._items)))
