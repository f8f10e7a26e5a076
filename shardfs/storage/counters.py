"""Counters and histograms of requests, errors and durations. Updates are cheap enough for every request."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

BOUNDS_S: tuple[float, ...] = tuple(float(4**i) / 1e6 for i in range(14))
"""Upper bounds of a histogram's bins, from 1 microsecond to 67 seconds; the last bin has no bound."""


ORDINARY = frozenset(("ENOENT", "ENOSYS", "EROFS", "ENODATA", "ENOTSUP", "ENOTTY", "ERANGE"))
"""Errors that are normal replies: a name does not exist, a request is not supported."""


class Histogram:
    """Counts of durations in the bins of `BOUNDS_S`. Only one thread may add."""

    __slots__ = ("bins", "seconds")

    def __init__(self) -> None:
        self.bins = [0] * (len(BOUNDS_S) + 1)
        self.seconds = 0.0

    def add(self, seconds: float, weight: int = 1) -> None:
        """Add a duration `weight` times."""
        self.bins[min((int(seconds * 1e6).bit_length() + 1) // 2, len(BOUNDS_S))] += weight
        self.seconds += seconds * weight

    def merge(self, other: Histogram) -> None:
        """Add the counts of another histogram."""
        self.bins = [a + b for a, b in zip(self.bins, other.bins, strict=True)]
        self.seconds += other.seconds

    @property
    def count(self) -> int:
        return sum(self.bins)

    def below(self, share: float) -> float:
        """Return an upper bound in seconds for this share of the durations.

        The result is the upper bound of a bin, infinite for the last bin.
        """
        left = share * self.count
        for bound, n in zip(BOUNDS_S, self.bins, strict=False):
            left -= n
            if left <= 0:
                return bound
        return float("inf")


OPCODES = 256
"""Length of the lists by FUSE opcode, above every opcode."""


class RequestTally:
    """Counters of the requests that one thread answered. Only that thread writes them; other threads may read.

    `calls` are counted by opcode up to the length of a round; `rounds` are the full rounds. `nbytes` are the sent
    bytes of files.
    """

    __slots__ = ("calls", "errors", "nbytes", "rounds", "times")

    def __init__(self) -> None:
        self.calls, self.rounds, self.nbytes = [0] * OPCODES, [0] * OPCODES, 0
        self.errors = Counter[tuple[int, int]]()  # opcode, errno
        self.times = [Histogram() for _ in range(OPCODES)]


class StoreCounters:
    """Counters of the requests to a remote store. Thread-safe.

    `requests` are operations by kind, without retries; `errors` are operations that failed finally, by errno.
    `timeouts` are attempts that timed out; `retries` are attempts after the first. Of the bytes that were fetched
    before a reader asked for them, `ahead_used` were read, and `ahead_wasted` were not. The disk cache had the bytes of
    `cache_hits` requests, together `cache_bytes`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.requests, self.errors = Counter[str](), Counter[int]()
        self.retries = self.timeouts = self.nbytes = self.waiting = 0
        self.ahead_used = self.ahead_wasted = self.cache_hits = self.cache_misses = self.cache_bytes = 0
        self.times = Histogram()

    def begin(self, kind: str) -> None:
        """Count the start of an operation."""
        with self._lock:
            self.requests[kind] += 1
            self.waiting += 1

    def end(self, seconds: float, error: int | None) -> None:
        """Count the end of an operation; `error` is its errno if it failed."""
        with self._lock:
            self.waiting -= 1
            self.times.add(seconds)
            if error is not None:
                self.errors[error] += 1

    def attempt(self, *, again: bool, timeout: bool) -> None:
        """Count the end of an attempt."""
        with self._lock:
            self.retries += again
            self.timeouts += timeout

    def received(self, nbytes: int) -> None:
        """Count received bytes."""
        with self._lock:
            self.nbytes += nbytes

    def ahead(self, *, used: int = 0, wasted: int = 0) -> None:
        """Count bytes that were fetched ahead, when they are read or given up."""
        with self._lock:
            self.ahead_used += used
            self.ahead_wasted += wasted

    def cache(self, *, hits: int, misses: int, nbytes: int) -> None:
        """Count requests for byte ranges that the disk cache answered with so many bytes, or could not answer."""
        with self._lock:
            self.cache_hits += hits
            self.cache_misses += misses
            self.cache_bytes += nbytes

    def snapshot(self) -> dict[str, Any]:
        """Return a snapshot of the counters, by name."""
        with self._lock:
            return {
                "requests": dict(self.requests),
                "errors": dict(self.errors),
                "retries": self.retries,
                "timeouts": self.timeouts,
                "bytes_fetched": self.nbytes,
                "bytes_ahead_used": self.ahead_used,
                "bytes_ahead_wasted": self.ahead_wasted,
                "disk_cache_hits": self.cache_hits,
                "disk_cache_misses": self.cache_misses,
                "bytes_from_disk_cache": self.cache_bytes,
                "waiting": self.waiting,
                "bins": list(self.times.bins),
                "seconds": self.times.seconds,
            }
