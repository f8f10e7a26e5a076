"""A cache bounded in bytes that loads each key once, however many threads ask."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

T = TypeVar("T")


def nothing() -> None:
    """The default of every `waiting` hook."""


class Entry(NamedTuple):
    """A value and what it costs; `expires` in `time.monotonic` seconds."""

    value: Any
    nbytes: int
    expires: float


class _Flight:
    """A load under way; the other threads wait for it."""

    __slots__ = ("done", "error", "value")

    def __init__(self) -> None:
        self.done = threading.Lock()  # held until the load is done; an Event costs ten times as much to make
        self.done.acquire()
        self.value: Any = None
        self.error: BaseException | None = None


OVERHEAD = 300
"""What an entry costs besides its payload: key, tuple, slots of the dictionary, small Python objects."""


FEW_SPENT = 2
"""Values that are kept though they were spent, however large: requests for parts of one may overtake each other."""


class ByteLRU:
    """Least recently used goes first once the payloads exceed `limit` bytes. Thread-safe.

    Args:
        waiting: called before a thread blocks on another thread's load. Loads that take long call it, too.
        spent: bytes that values take at most which were spent.
    """

    def __init__(self, limit: int, waiting: Callable[[], None] = nothing, spent: int | None = None) -> None:
        self.limit, self.waiting = limit, waiting
        self._spent_limit = spent
        self._spent: OrderedDict[Hashable, int] = OrderedDict()
        self._spent_bytes = 0
        self._entries: OrderedDict[Hashable, Entry] = OrderedDict()
        self._flights: dict[Hashable, _Flight] = {}
        self._lock = threading.Lock()
        self.nbytes = 0
        self.hits = self.misses = 0  # not exact: threads that count at the same time may lose one

    def peek(self, key: Hashable) -> Any:
        """The value if it is there and fresh, else None. Takes no lock: the hot path."""
        entry = self._entries.get(key)
        if entry is None or (entry[2] != math.inf and entry[2] < time.monotonic()):
            return None
        try:  # noqa: SIM105 - `suppress` costs a microsecond, and this is the hot path
            self._entries.move_to_end(key)
        except KeyError:  # evicted meanwhile; the value is good all the same
            pass
        self.hits += 1
        return entry[0]

    def get(self, key: Hashable, load: Callable[[], tuple[T, int, float]]) -> T:
        """The value, loaded if needed. `load` returns (value, bytes, seconds to live) and runs without a lock.

        What `load` raises reaches every thread that waited for it, and is not kept.
        """
        value = self.peek(key)
        if value is not None:
            return cast("T", value)
        with self._lock:
            value = self.peek(key)  # another thread's load may have ended since
            if value is not None:
                return cast("T", value)
            flight = self._flights.get(key)
            mine = flight is None
            if flight is None:
                flight = self._flights[key] = _Flight()
        if not mine:
            self.waiting()
            with flight.done:
                pass
            if flight.error is not None:
                raise flight.error
            return cast("T", flight.value)
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
            del flight  # an error and its own frame would hold each other, and all that lies in the frames below

    def _put(self, key: Hashable, flight: _Flight, nbytes: int, seconds: float) -> None:
        nbytes += OVERHEAD
        with self._lock:
            if self._flights.get(key) is not flight:
                return  # dropped while it was loaded: what it loaded may be what had to be forgotten
            self._drop(key)
            if nbytes > self.limit:
                return
            self._entries[key] = Entry(flight.value, nbytes, time.monotonic() + seconds)
            self.nbytes += nbytes
            while self.nbytes > self.limit:
                self._drop(next(iter(self._entries)))

    def _drop(self, key: Hashable) -> None:
        old = self._entries.pop(key, None)
        if old is not None:
            self.nbytes -= old.nbytes
            self._spent_bytes -= self._spent.pop(key, 0)

    def spend(self, key: Hashable) -> None:
        """All of the value was used by who keeps it himself: few of these are kept, so that others get their memory,
        which, unlike that which was never touched, costs no time."""
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

    def drop(self, key: Hashable) -> None:
        """Forget the value; a load under way is not kept, and who asks from now on does not wait for it."""
        with self._lock:
            self._drop(key)
            self._flights.pop(key, None)
