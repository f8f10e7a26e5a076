"""A bound for the bytes that threads use at the same time."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class ByteBudget:
    """Lets threads take bytes, first come, first served, until `limit` bytes are taken. Thread-safe.

    A thread that takes more than `limit` bytes must be the only one. A thread that holds bytes must not wait for a
    thread that may take some.

    Args:
        waiting: called before a thread blocks.

    Attributes:
        used: bytes that are taken now.
    """

    def __init__(self, limit: int, waiting: Callable[[], None]) -> None:
        self.limit = limit
        self.used = 0
        self._waiting = waiting
        self._changed = threading.Condition()
        self._queue = deque[object]()

    @contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        """Take bytes for a block, once it is this thread's turn and they fit, and give them back afterwards.

        Waits without a time limit.
        """
        with self._changed:
            fits = not self._queue and self._fits(nbytes)
            if fits:
                self._take(nbytes)
        if not fits:
            self._waiting()
            self._wait(nbytes)
        try:
            yield
        finally:
            with self._changed:
                self.used -= nbytes
                self._changed.notify_all()

    def _wait(self, nbytes: int) -> None:
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            try:
                self._changed.wait_for(lambda: self._queue[0] is ticket and self._fits(nbytes))
                self._take(nbytes)
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()

    def _fits(self, nbytes: int) -> bool:
        return not self.used or self.used + nbytes <= self.limit

    def _take(self, nbytes: int) -> None:
        self.used += nbytes
