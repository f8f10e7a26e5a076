"""Fetches chunks of remote stores before a reader asks for them.

`shards.read_patterns` says which chunks come next. Neighbours in a shard are fetched with one request, and several
requests run in parallel. Complete chunks wait here until they are read. A reader never depends on it: if a fetch
failed, or waits for a free connection, the reader makes its own request.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from concurrent.futures import CancelledError, Future
from functools import partial
from time import monotonic as clock
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from shardfs.model.byte_ranges import coalesce
from shardfs.storage.cache import nothing
from shardfs.storage.daemon_threads import DaemonThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardfs.model.blobs import Blob, ByteRange
    from shardfs.model.values import Coords
    from shardfs.storage.retry import RetryPolicy

T = TypeVar("T")

GAP = 10
"""Neighbours are fetched with one request if the gap between them is at most a tenth of a chunk, or `SMALL_GAP`."""

SMALL_GAP = 4 << 10
"""So few bytes cost less than the headers of another request."""

MAX_REQUEST = 4 << 20
"""Bytes up to which neighbouring chunks are fetched with one request: enough for a connection's full speed, and few
enough for several connections to share the work."""

FREE_WASTE = 16 << 20
"""Bytes that may be fetched in vain before the share of used bytes counts."""

WASTE = 0.15
"""The share of the bytes used so far that may wait to be read or be fetched in vain, in addition to `FREE_WASTE`."""

STALE_S = 60.0
"""Seconds after which a chunk that nobody has read gives up its place."""

OVERLOAD_S, CALM_S = 1.0, 10.0
"""The number of connections is halved at most once in the first number of seconds while requests must be repeated, and
doubled again after the second without that."""

PAUSE_S = 1.0
"""Seconds for which nothing is fetched ahead after a failed request. Further failures double them, up to a minute."""


class Piece(NamedTuple):
    """Where the stored bytes of a chunk are: the number of its shard, the shard's blob, and the range in it."""

    shard: int
    blob: Blob
    where: ByteRange


class _Fetch:
    """A chunk that is being fetched or waits to be read."""

    __slots__ = ("data", "nbytes", "since")

    def __init__(self, nbytes: int) -> None:
        self.data: Future[bytes | None] = Future()
        self.nbytes = nbytes
        self.since = clock()


class ReadAhead:
    """What is fetched ahead of all readers of a mount. Thread-safe.

    Args:
        limit: the most bytes that are under way or wait to be read; 0 turns reading ahead off.
        connections: the most requests under way.
        retry: of the store; its counters count the bytes that were read or given up.
        waiting: called before a thread waits for a request that is under way.
    """

    def __init__(self, limit: int, connections: int, retry: RetryPolicy, waiting: Callable[[], None] = nothing) -> None:
        self.limit = limit
        self.connections = connections
        self.waiting = waiting
        self._retry = retry
        self._counters = retry.counters
        self._threads = DaemonThreads("shardfs-ahead", connections)
        self._adapted = -math.inf
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._fetches: dict[tuple[int, Coords], _Fetch] = {}
        self.nbytes = 0
        self._pause_s = 0.0
        self._resume = 0.0

    @property
    def usable(self) -> bool:
        """Whether this process has the threads; a forked process has none."""
        return os.getpid() == self._pid

    def is_warm(self) -> bool:
        """Return whether readers get all bytes from a disk cache, so that nothing should be fetched."""
        return self._counters.is_cache_warm()

    def room(self) -> int:
        """Return the bytes that may be fetched now; 0 for some time after a failed request."""
        if not self.usable or clock() < self._resume:
            return 0
        figures = self._counters.figures
        allowed = FREE_WASTE + int(WASTE * figures["bytes_ahead_used"]) - figures["bytes_ahead_wasted"]
        return max(min(self.limit, allowed) - self.nbytes, 0)

    def take(self, key: tuple[int, Coords], where: ByteRange, since: float, *, keep: bool) -> bytes | None:
        """Return the bytes of a chunk if they were fetched; None if the reader must ask for them by itself.

        May wait for a request that is under way. Raises nothing: the reader's own request shows the error.

        Args:
            key: the owner of `fetch`, and the chunk's coordinates.
            where: the range that the index names; other bytes are not returned.
            since: a time of `time.monotonic`; bytes whose fetch began before are not returned.
            keep: whether the rest of the chunk will be asked for later. Otherwise the bytes are dropped.
        """
        if key not in self._fetches or not self.usable:
            return None
        with self._lock:
            fetch = self._fetches.get(key)
            if fetch is None:
                return None
            if fetch.since < since:
                self._waste(key)
                return None
            if self._threads.busy and fetch.data.cancel():  # its request is in a queue, so the reader is faster
                self._drop(key)
                return None
        if not fetch.data.done():
            self.waiting()
        try:
            data = fetch.data.result()
        except CancelledError:  # the chunk is absent, or its shard changed
            return None
        with self._lock:
            usable = data is not None and len(data) == where.stop - where.start
            if (not keep or not usable) and self._fetches.get(key) is fetch:
                self._drop(key)
                if data is not None:  # else the request failed
                    self._counters.add(**{"bytes_ahead_used" if usable else "bytes_ahead_wasted": fetch.nbytes})
        return data if usable else None

    def invalidate(self, owner: int) -> None:
        """Drop what was fetched for a collection, whose shards may have changed."""
        with self._lock:
            for key in [key for key in self._fetches if key[0] == owner]:
                self._waste(key)

    def fetch(
        self, owner: int, coords: Sequence[Coords], nbytes: int, locate: Callable[[Coords], Piece | None]
    ) -> None:
        """Begin to fetch chunks of about `nbytes` each, and return at once.

        Chunks that are under way or wait are left out.

        Args:
            owner: a number of the collection that has the chunks, for `take` and `invalidate`.
            locate: returns where a chunk is; None if it is absent. Another thread calls it, and it may wait for the
                store.
        """
        if not coords:
            return
        with self._lock:
            self._waste_stale()
            new = [c for c in coords if (owner, c) not in self._fetches]
            for c in new:
                self._fetches[owner, c] = _Fetch(nbytes)
            self.nbytes += nbytes * len(new)
        if new:
            self.start(partial(self._plan, owner, new, locate))

    def start(self, job: Callable[[], T]) -> Future[T]:
        """Let a thread do a job that may wait for the store, after the jobs started before. Return its future."""
        return self._threads.submit(job)

    # ---- in threads of its own ----

    def _plan(self, owner: int, coords: Sequence[Coords], locate: Callable[[Coords], Piece | None]) -> None:
        """Find where chunks are, and start one request for neighbours in a shard."""
        shards: dict[int, list[tuple[Coords, Piece]]] = {}
        for c in coords:
            try:
                piece = locate(c)
            except BaseException:  # noqa: BLE001 - the reader gets the error; `Postponed` is none of this thread
                piece = None
            if piece is None or not self._reserve((owner, c), piece.where.stop - piece.where.start):
                with self._lock:
                    self._drop((owner, c))
            else:
                shards.setdefault(piece.shard, []).append((c, piece))
        for members in shards.values():
            ranges = [piece.where for _, piece in members]
            gap = max(sum(r.stop - r.start for r in ranges) // len(ranges) // GAP, SMALL_GAP)
            for _, numbers in coalesce(ranges, gap, MAX_REQUEST):
                self.start(partial(self._read, owner, [members[n] for n in numbers]))

    def _reserve(self, key: tuple[int, Coords], nbytes: int) -> bool:
        with self._lock:
            fetch = self._fetches.get(key)
            if fetch is None or self.nbytes + nbytes - fetch.nbytes > self.limit:
                return False
            self.nbytes += nbytes - fetch.nbytes
            fetch.nbytes = nbytes
            return True

    def _read(self, owner: int, members: Sequence[tuple[Coords, Piece]]) -> None:
        """Fetch chunks of one shard with one request."""
        wanted: list[tuple[_Fetch, ByteRange]] = []
        with self._lock:
            for coords, piece in members:
                fetch = self._fetches.get((owner, coords))
                if fetch is not None and fetch.data.set_running_or_notify_cancel():
                    wanted.append((fetch, piece.where))
        if not wanted:
            return
        repeated = self._repeated()
        try:
            with self._retry.optional():
                pieces: list[bytes | None] = [*members[0][1].blob.read([where for _, where in wanted])]
            self._pause_s = 0.0
        except Exception:  # noqa: BLE001 - the reader makes its own request, and gets the error
            pieces = [None] * len(wanted)
            self._pause()
        for (fetch, _), data in zip(wanted, pieces, strict=True):
            fetch.data.set_result(data)
        self._adapt(overloaded=pieces[0] is None or self._repeated() != repeated)

    def _repeated(self) -> int:
        return self._counters.figures["retries"] + self._counters.figures["timeouts"]

    def _adapt(self, *, overloaded: bool) -> None:
        """Use fewer connections if the store throttles requests or does not answer, and more again after a while."""
        with self._lock:
            if clock() - self._adapted < (OVERLOAD_S if overloaded else CALM_S):
                return
            allowed = self._threads.limit
            self._threads.limit = max(allowed // 2, 1) if overloaded else min(allowed * 2, self.connections)
            self._adapted = clock()

    def _pause(self) -> None:
        """Fetch nothing for some time. Requests that fail together count as one."""
        with self._lock:
            if clock() >= self._resume:
                self._pause_s = min(2 * self._pause_s or PAUSE_S, STALE_S)
                self._resume = clock() + self._pause_s

    # ---- with the lock ----

    def _drop(self, key: tuple[int, Coords]) -> None:
        fetch = self._fetches.pop(key, None)
        if fetch is not None:
            fetch.data.cancel()
            self.nbytes -= fetch.nbytes

    def _waste(self, key: tuple[int, Coords]) -> None:
        self._counters.add(bytes_ahead_wasted=self._fetches[key].nbytes)
        self._drop(key)

    def _waste_stale(self) -> None:
        old = clock() - STALE_S
        for key in list(itertools.takewhile(lambda key: self._fetches[key].since < old, self._fetches)):
            self._waste(key)
