"""An LRU cache bounded in bytes, with single-flight loads: threads that need the same key share one load."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from shardfs.model.blobs import ByteRange
from shardfs.storage.byte_budget import ByteBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

T = TypeVar("T")


def nothing() -> None:
    """Do nothing; the default of every `waiting` hook."""


class CacheEntry(NamedTuple):
    """A value and its size; `expires` is a time of `time.monotonic`."""

    value: Any
    nbytes: int
    expires: float


class _Flight:
    """A load in progress, for which other threads can wait."""

    __slots__ = ("done", "error", "value")

    def __init__(self) -> None:
        self.done = threading.Lock()  # held until the load ends; creating an Event costs ten times as much
        self.done.acquire()
        self.value: Any = None
        self.error: BaseException | None = None


OVERHEAD = 300
"""Bytes of memory per entry besides its payload: key, tuple, dictionary slots, small Python objects."""


FEW_SPENT = 2
"""Number of spent values that are always kept: the kernel's requests for parts of a value may arrive out of order."""


class ByteLRU:
    """Evicts the least recently used entries when their total size exceeds `limit` bytes. Thread-safe.

    Of the values that are larger than `limit`, the last one is kept: else each read of a part would load it again. No
    value may be None.

    Args:
        waiting: called before a thread blocks on another thread's load. Long loads call it, too.
        spent: the most bytes of spent values (see `mark_read`); None for no separate limit.

    Attributes:
        decoding: what loads of this cache that decode may use at the same time: as many bytes as the cache.
        reader_caches: whether the reader keeps what it has read, so that a value that was read at once need not be.
        nbytes: bytes of all entries, with `OVERHEAD` for each, without the large value.
        hits, misses: approximate, because concurrent increments may be lost.
    """

    def __init__(self, limit: int, waiting: Callable[[], None] = nothing, spent: int | None = None) -> None:
        self.limit = limit
        self.waiting = waiting
        self._spent_limit = spent
        self.reader_caches = spent is not None
        self._spent: OrderedDict[Hashable, int] = OrderedDict()
        self._spent_bytes = 0
        self._entries: OrderedDict[Hashable, CacheEntry] = OrderedDict()
        self._large: dict[Hashable, CacheEntry] = {}  # at most one, which is replaced as a whole
        self.decoding = ByteBudget(limit, waiting)
        self._flights: dict[Hashable, _Flight] = {}
        self._lock = threading.Lock()
        self.nbytes = 0
        self.hits = self.misses = 0  # approximate: concurrent increments may be lost

    def peek(self, key: Hashable) -> Any:
        """Return the value if it is cached and not expired, else None. Takes no lock: this is the hot path."""
        entry = self._entries.get(key) or self._large.get(key)
        if entry is None or (entry[2] != math.inf and entry[2] < time.monotonic()):
            return None
        try:  # noqa: SIM105 - `suppress` costs a microsecond, and this is the hot path
            self._entries.move_to_end(key)
        except KeyError:  # it is the large one, or another thread evicted it; its value is still valid
            pass
        self.hits += 1
        return entry[0]

    def former(self, key: Hashable) -> Any:
        """Return the value even if it has expired; None if it is not cached."""
        entry = self._entries.get(key) or self._large.get(key)
        return None if entry is None else entry.value

    def get(self, key: Hashable, load: Callable[[], tuple[T, int, float]]) -> T:
        """Return the value, loading it if needed.

        `load` returns (value, bytes, seconds to live) and runs without a lock. An exception of `load` is raised in
        every thread that waited for the load, and is not cached. If `load` is aborted (by a `BaseException`, such as a
        postponed request), the threads that waited begin again.
        """
        while True:
            value = self.peek(key)
            if value is not None:
                return cast("T", value)
            with self._lock:
                value = self.peek(key)  # another thread's load may have just ended
                if value is not None:
                    return cast("T", value)
                flight = self._flights.get(key)
                if flight is None:
                    flight = self._flights[key] = _Flight()
                    break
            self.waiting()
            with flight.done:
                pass
            if flight.error is None:
                return cast("T", flight.value)
            if isinstance(flight.error, Exception):
                raise flight.error
        self.misses += 1
        try:
            flight.value, nbytes, seconds = load()
            self._put(key, flight, nbytes, seconds)
            return cast("T", flight.value)
        except BaseException as e:
            flight.error = e
            raise
        finally:
            with self._lock:
                if self._flights.get(key) is flight:
                    del self._flights[key]
            flight.done.release()
            # Without this, a reference cycle of the error and this frame keeps all objects of the traceback's frames
            # alive.
            del flight

    def _put(self, key: Hashable, flight: _Flight, nbytes: int, seconds: float) -> None:
        nbytes += OVERHEAD
        with self._lock:
            if self._flights.get(key) is not flight:
                return  # `invalidate` was called during the load, so the loaded value may be outdated
            self._drop(key)
            entry = CacheEntry(flight.value, nbytes, time.monotonic() + seconds)
            if nbytes > self.limit:
                self._large = {key: entry}
                return
            self._entries[key] = entry
            self.nbytes += nbytes
            while self.nbytes > self.limit:  # `popitem` is one step; an iterator would fail if `peek` moves an entry
                self._dropped(*self._entries.popitem(last=False))

    def _drop(self, key: Hashable) -> None:
        if key in self._large:
            self._large = {}
        old = self._entries.pop(key, None)
        if old is not None:
            self._dropped(key, old)

    def _dropped(self, key: Hashable, old: CacheEntry) -> None:
        self.nbytes -= old.nbytes
        self._spent_bytes -= self._spent.pop(key, 0)

    def mark_read(self, key: Hashable) -> None:
        """Mark the value as fully read; nothing if it is not cached, or `spent` is None.

        The kernel now caches it, so spent values are evicted first. Reusing their memory for new values is also faster
        than touching new memory.
        """
        if self._spent_limit is None:
            return
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or key in self._spent:
                return
            self._spent[key] = entry.nbytes
            self._spent_bytes += entry.nbytes
            while self._spent_bytes > self._spent_limit and len(self._spent) > FEW_SPENT:
                self._drop(next(iter(self._spent)))

    def invalidate(self, key: Hashable) -> None:
        """Drop a value that may be outdated. A load in progress is not cached, and later calls do not wait for it."""
        with self._lock:
            self._drop(key)
            self._flights.pop(key, None)

    def expire(self, key: Hashable) -> None:
        """Like `invalidate`, but until the value is loaded again, `former` returns it."""
        with self._lock:
            for entries in (self._entries, self._large):
                if key in entries:
                    entries[key] = entries[key]._replace(expires=-math.inf)
            self._flights.pop(key, None)


WINDOW = 8 << 20
"""Window size for reads that cannot be served from a local file.

A chunk of up to 8 MiB costs one request, however small the client's reads are.
"""


class WindowCache:
    """Windows of `WINDOW` bytes in a shared cache, by the object's key and the window's number."""

    def __init__(self, cache: ByteLRU) -> None:
        self._cache = cache

    def read(
        self, key: Hashable, fetch: Callable[[ByteRange], bytes], offset: int, size: int, expires: float
    ) -> bytes | memoryview:
        """Return bytes of an object, fewer at its end. They may be a view of cached bytes, which nobody may change.

        Args:
            key: the object and its version, such as a path with a `Stat`, or an inode number.
            fetch: returns the bytes of a range, fewer at the end of the object. Its errors are raised.
            expires: a time of `time.monotonic` at which windows that are fetched now expire.
        """
        pieces: list[bytes | memoryview] = []
        while size > 0:
            window = offset // WINDOW
            data = self._cache.get((key, window), partial(_load_window, fetch, window, expires))
            piece = memoryview(data)[offset % WINDOW : offset % WINDOW + size]
            if not len(piece):
                break
            pieces.append(piece)
            offset, size = offset + len(piece), size - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def invalidate(self, key: Hashable, size: int) -> None:
        """Drop all windows of an object of at most `size` bytes."""
        for window in range(-(-size // WINDOW)):
            self._cache.invalidate((key, window))


def _load_window(fetch: Callable[[ByteRange], bytes], window: int, expires: float) -> tuple[bytes, int, float]:
    data = fetch(ByteRange(window * WINDOW, (window + 1) * WINDOW))
    return data, len(data), expires - time.monotonic()
