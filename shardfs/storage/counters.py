"""Counters and histograms of requests, errors and durations. Updates are cheap enough for every request."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from typing import Any

BOUNDS_S: tuple[float, ...] = tuple(float(4**i) / 1e6 for i in range(14))
"""Upper bounds of a histogram's bins, from 1 microsecond to 67 seconds; the last bin has no bound."""


ORDINARY = frozenset(("ENOENT", "ENOSYS", "EROFS", "ENODATA", "ENOTSUP", "ENOTTY", "ERANGE"))
"""Errors that are normal replies: a name does not exist, a request is not supported."""


class Histogram:
    """Counts of durations in the bins of `BOUNDS_S`. Only one thread may add.

    Attributes:
        bins: the number of durations up to each bound and above the bound before; the last one is above all bounds.
        seconds: the sum of all durations.
    """

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
        """The number of durations."""
        return sum(self.bins)

    def below(self, share: float) -> float:
        """Return an upper bound in seconds for this share (0 to 1) of the durations.

        It is the upper bound of a bin: infinite for the last bin, and the first bound if there are no durations.
        """
        remaining = share * self.count
        for bound, n in zip(BOUNDS_S, self.bins, strict=False):
            remaining -= n
            if remaining <= 0:
                return bound
        return float("inf")


FIGURES = (
    "retries", "timeouts", "bytes_fetched", "bytes_ahead_used", "bytes_ahead_wasted", "disk_cache_hits",
    "disk_cache_misses", "bytes_from_disk_cache", "waiting",
)  # fmt: skip
"""The names of `StoreCounters.figures`."""

WARM_HITS, WARM_S = 64, 1.0
"""The disk cache is warm after so many hits in a row, and so many seconds after the last miss."""


OPCODES = 256
"""Length of the lists by FUSE opcode, above every opcode."""


class RequestTally:
    """Counters of the requests that one thread answered. Only that thread writes them; other threads may read.

    Attributes:
        calls, rounds: requests by opcode: `calls` counts up to the length of a round, `rounds` the full rounds.
        nbytes: the bytes of files that were sent.
        errors: replies with an error, by opcode and errno.
        times: durations by opcode.
    """

    __slots__ = ("calls", "errors", "nbytes", "rounds", "times")

    def __init__(self) -> None:
        self.calls = [0] * OPCODES
        self.rounds = [0] * OPCODES
        self.nbytes = 0
        self.errors = Counter[tuple[int, int]]()  # opcode, errno
        self.times = [Histogram() for _ in range(OPCODES)]


class StoreCounters:
    """Counters of the requests to a remote store. Thread-safe. All begin with 0.

    Attributes:
        requests: operations by kind, without retries.
        errors: operations that failed finally, by errno.
        times: durations of operations, with their retries.
        figures: counters by the names in `FIGURES`: `waiting` are operations under way; `timeouts` are attempts that
            timed out; `retries` are attempts after the first; `bytes_fetched` came from the store. Of the bytes fetched
            before a reader asked for them, `bytes_ahead_used` were read, and `bytes_ahead_wasted` were not. The disk
            cache answered `disk_cache_hits` requests for byte ranges with `bytes_from_disk_cache`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.requests = Counter[str]()
        self.errors = Counter[int]()
        self.figures = dict.fromkeys(FIGURES, 0)
        self.times = Histogram()
        self.hits_in_a_row = 0
        self._missed = -math.inf

    def add(self, **figures: int) -> None:
        """Add to `figures`, by name. Raise KeyError for a name that is not in `FIGURES`."""
        with self._lock:
            for name, n in figures.items():
                self.figures[name] += n

    def count_start(self, kind: str) -> None:
        """Count the start of an operation."""
        self.add(waiting=1)
        with self._lock:
            self.requests[kind] += 1

    def count_end(self, seconds: float, error: int | None) -> None:
        """Count the end of an operation; `error` is its errno if it failed."""
        self.add(waiting=-1)
        with self._lock:
            self.times.add(seconds)
            if error is not None:
                self.errors[error] += 1

    def received(self, nbytes: int) -> None:
        """Count received bytes."""
        self.add(bytes_fetched=nbytes)

    def cache(self, *, hits: int, misses: int, nbytes: int) -> None:
        """Count requests for byte ranges that the disk cache answered with so many bytes, or could not answer."""
        self.add(disk_cache_hits=hits, disk_cache_misses=misses, bytes_from_disk_cache=nbytes)
        self.hits_in_a_row = 0 if misses else self.hits_in_a_row + hits
        if misses:
            self._missed = time.monotonic()

    def is_cache_warm(self) -> bool:
        """Return whether the disk cache had all bytes that were read lately."""
        return self.hits_in_a_row >= WARM_HITS and time.monotonic() - self._missed > WARM_S

    def snapshot(self) -> dict[str, Any]:
        """Return the counters as JSON values, by name.

        These are `requests`, `errors`, each of `figures`, and `bins` and `seconds` of `times`.
        """
        with self._lock:
            counts = {"requests": dict(self.requests), "errors": dict(self.errors), **self.figures}
            return counts | {"bins": list(self.times.bins), "seconds": self.times.seconds}
