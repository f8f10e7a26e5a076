"""Polling for the next request before the leader sleeps.

Waking a thread on an idle CPU often takes longer than answering a request. Polling saves that time for one client that
asks densely, and costs several clients CPU time. See docs/decisions/0006-one-leader.md.
"""

from __future__ import annotations

import os
from time import monotonic as clock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

DENSE = 16
"""Polling begins after more requests of one thread in a row than this."""


class Polling:
    """Polls for the requests of one mount. Only the leader calls it.

    Args:
        is_ready: returns at once whether a request can be read; its argument is a time-out of 0.
        poll_us: the longest time to poll for one request; 0 turns polling off, as does a process with a single CPU.
        is_alone: returns whether no other thread works on a request.
    """

    SHARE, BURST_S = 0.5, 0.01
    """Polling takes at most this share of one CPU, and this time in addition."""
    MOST_MISSES = 10

    def __init__(self, is_ready: Callable[[int], object], poll_us: int, is_alone: Callable[[], bool]) -> None:
        self._is_ready = is_ready
        self._is_alone = is_alone
        self._poll_s = min(poll_us / 1e6, self.BURST_S) if len(os.sched_getaffinity(0)) > 1 else 0.0
        self._misses = 0
        self._credit_s = self.BURST_S
        self._credited = clock()

    def poll(self) -> int:
        """Poll for the next request; return how many requests of one client thread to read before the next call.

        0: a request is ready, and the next call is due after it. Returns at once if polling is off or not worth it.
        """
        if not self._poll_s or not self._is_alone():
            return DENSE
        start = now = clock()
        self._credit_s = min(self._credit_s + self.SHARE * (start - self._credited), self.BURST_S)
        self._credited = start
        if self._credit_s < self._poll_s:
            return 1
        ready: object = False
        while not ready and now - start < self._poll_s:
            os.sched_yield()  # the client may need this CPU
            ready, now = self._is_ready(0), clock()
        self._credit_s -= now - start
        if now - start > 2 * self._poll_s:  # another program needed this CPU
            self._misses = self.MOST_MISSES
        elif ready:
            self._misses = max(self._misses - 1, 0)
            return 0
        else:
            self._misses = min(self._misses + 1, self.MOST_MISSES)
        return 1 << self._misses
