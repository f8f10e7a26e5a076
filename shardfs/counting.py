"""Counters: what was asked, what failed, how long it took. To add to them costs next to nothing."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

BOUNDS_S: tuple[float, ...] = tuple(float(4**i) / 1e6 for i in range(14))
"""Of the bins of a histogram, from 1 microsecond to 67 seconds; one more bin is open."""


ORDINARY = frozenset(("ENOENT", "ENOSYS", "EROFS", "ENODATA", "ENOTSUP", "ENOTTY", "ERANGE"))
"""Names of errors that are ordinary answers: a name does not exist, a request is not supported."""


class Histogram:
    """Durations, in bins of which each ends at four times the one before. Not for several threads that write."""

    __slots__ = ("bins", "seconds")

    def __init__(self) -> None:
        self.bins = [0] * (len(BOUNDS_S) + 1)
        self.seconds = 0.0

    def add(self, seconds: float, weight: int = 1) -> None:
        """One duration, which stands for `weight` such."""
        self.bins[min((int(seconds * 1e6).bit_length() + 1) // 2, len(BOUNDS_S))] += weight
        self.seconds += seconds * weight

    def merge(self, other: Histogram) -> None:
        """Add what another one has counted."""
        self.bins = [a + b for a, b in zip(self.bins, other.bins, strict=True)]
        self.seconds += other.seconds

    @property
    def count(self) -> int:
        return sum(self.bins)

    def below(self, share: float) -> float:
        """Seconds below which that share of the durations lies: the bound of a bin, infinite for the last one."""
        left = share * self.count
        for bound, n in zip(BOUNDS_S, self.bins, strict=False):
            left -= n
            if left <= 0:
                return bound
        return float("inf")


OPCODES = 256
"""More kinds of FUSE requests than there are."""


class Tally:
    """What one thread has answered. It alone writes here; others may read at any time.

    `calls` are counted by opcode up to the length of a round, and `rounds` are the full ones.
    The bytes of files that it has sent are `nbytes` and, of those that it only passes on, what `sent` returns.
    """

    __slots__ = ("calls", "errors", "nbytes", "rounds", "sent", "times")

    def __init__(self) -> None:
        self.calls, self.rounds, self.nbytes = [0] * OPCODES, [0] * OPCODES, 0
        self.sent: Callable[[], int] = int
        self.errors = Counter[tuple[int, int]]()  # opcode, errno
        self.times = [Histogram() for _ in range(OPCODES)]


class StoreCounters:
    """What was asked of a remote store. Thread-safe.

    `requests` are operations by kind, however often they were tried; `errors` those that failed for good, by errno.
    `timeouts` are attempts that got no answer in time, `retries` those that were not the first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.requests, self.errors = Counter[str](), Counter[int]()
        self.retries = self.timeouts = self.nbytes = self.waiting = 0
        self.times = Histogram()

    def begin(self, kind: str) -> None:
        """An operation begins."""
        with self._lock:
            self.requests[kind] += 1
            self.waiting += 1

    def end(self, seconds: float, error: int | None) -> None:
        """It ends, with an errno if it failed."""
        with self._lock:
            self.waiting -= 1
            self.times.add(seconds)
            if error is not None:
                self.errors[error] += 1

    def attempt(self, *, again: bool, timeout: bool) -> None:
        """An attempt has ended."""
        with self._lock:
            self.retries += again
            self.timeouts += timeout

    def received(self, nbytes: int) -> None:
        """So many bytes have come."""
        with self._lock:
            self.nbytes += nbytes

    def told(self) -> dict[str, Any]:
        """The counts, by name."""
        with self._lock:
            return {
                "requests": dict(self.requests),
                "errors": dict(self.errors),
                "retries": self.retries,
                "timeouts": self.timeouts,
                "bytes_fetched": self.nbytes,
                "waiting": self.waiting,
                "bins": list(self.times.bins),
                "seconds": self.times.seconds,
            }
