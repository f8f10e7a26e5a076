"""Reading ahead: right bytes, few requests, bounded waste, and no reader that depends on it."""

from __future__ import annotations

import itertools
import math
import os
import threading
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.model.blobs import ByteRange, Stat
from shardfs.model.grid import unravel_many
from shardfs.model.shard_format import ShardIndex
from shardfs.shards.chunk_read_ahead import CollectionReadAhead
from shardfs.shards.shard_indices import IndexPage
from shardfs.storage import read_ahead
from shardfs.storage.blob_views import BytesBlob
from shardfs.storage.counters import WARM_HITS
from shardfs.storage.read_ahead import Piece, ReadAhead
from shardfs.storage.retry import RetryPolicy
from shardfs.storage.store import read_merged
from tests.failing_starts import FailingStarts
from tests.scheduling import bool_true, explore
from tests.virtual_threads import install, wait
from tests.waiting import settle, wait_until
from tests.write import bugs
from tests.write.scale import times

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardfs.model.blobs import ByteRequest
    from shardfs.model.values import U64, Bool, Coords
    from shardfs.shards.shard_indices import ShardIndices
    from tests.scheduling import Schedule

DIMS = (4, 8, 8)
PER_SHARD = 64
KIB = 1 << 10


class Store:
    """Shards of 64 chunks in C order. Records requests. `fails` makes every request fail, `gate` holds them."""

    fd, file_offset = -1, 0

    def __init__(self, dims: Sequence[int] = DIMS, size: int = 4 * KIB) -> None:
        self.dims, self.size = dims, size
        self.requests: list[ByteRange] = []
        self.fails = False
        self.gate = threading.Event()
        self.gate.set()
        self.asked = threading.Event()
        self.on_request: Callable[[], object] = lambda: None

    def number(self, coords: Coords) -> int:
        return sum(c * math.prod(self.dims[axis + 1 :]) for axis, c in enumerate(coords))

    def content(self, coords: Coords) -> bytes:
        return self.number(coords).to_bytes(8, "little") * (self.size // 8)

    def locate(self, coords: Coords) -> Piece:
        number = self.number(coords)
        start = number * self.size  # the blob of all shards is one, and its positions go on
        return Piece(number // PER_SHARD, self, ByteRange(start, start + self.size))

    def stat(self) -> Stat:
        raise AssertionError

    def read(self, requests: Sequence[ByteRequest]) -> list[bytes]:
        ranges = [r for r in requests if isinstance(r, ByteRange)]
        return read_merged(ranges, lambda merged: [self._read(r) for r in merged])

    def _read(self, where: ByteRange) -> bytes:
        self.requests.append(where)
        self.on_request()
        self.asked.set()
        assert self.gate.wait(60)
        if self.fails:
            raise ConnectionResetError("as told")
        numbers = range(where.start // self.size, -(-where.stop // self.size))
        data = b"".join(n.to_bytes(8, "little") * (self.size // 8) for n in numbers)
        return data[where.start - numbers[0] * self.size :][: where.stop - where.start]

    @property
    def nbytes(self) -> int:
        return sum(r.stop - r.start for r in self.requests)


class Format:
    """The placement of a `Store`: one index page for each shard."""

    def __init__(self, store: Store) -> None:
        self.grid, self._store = store.dims, store

    def place(self, coords: Coords) -> tuple[int, int, int]:
        shard, slot = divmod(self._store.number(coords), PER_SHARD)
        return shard, 0, slot

    def coords(self, shard: int, page: int, slots: U64) -> tuple[U64, Bool]:
        return unravel_many(slots + np.uint64(shard * PER_SHARD), self.grid), np.ones(len(slots), np.bool_)


class Index:
    """Stands for the `ShardIndices` of a `Store`, all of whose pages are cached, except those of `missing` shards."""

    def __init__(self, store: Store) -> None:
        self.format, self.missing = Format(store), set[int]()

    def page(self, shard: int, number: int) -> IndexPage:
        starts = np.arange(PER_SHARD, dtype=np.uint64)
        return IndexPage(ShardIndex(None, starts, starts), BytesBlob(b"", Store()), None)

    def cached_page(self, shard: int, number: int) -> IndexPage | None:
        return None if shard in self.missing else self.page(shard, number)

    def load_quietly(self, home: tuple[int, int]) -> None:
        self.missing.discard(home[0])

    def pages(self, shard: int, first: int) -> Iterator[int]:
        yield from range(first, 1)


class Reader:
    """Reads chunks as a `ChunkStore` does, with its own request where nothing was fetched ahead."""

    def __init__(self, store: Store, limit: int = 1 << 28, connections: int = 4) -> None:
        self.store, self.index, retry = store, Index(store), RetryPolicy()
        self.shared, self.counters = ReadAhead(limit, connections, retry), retry.counters
        self.ahead = CollectionReadAhead(self.shared, cast("ShardIndices", self.index), store.locate)
        self.own = 0

    def read(self, coords: Coords, part: ByteRange | None = None) -> bytes:
        where = whole = self.store.locate(coords).where
        if part is not None:
            where = ByteRange(where.start + part.start, min(where.start + part.stop, where.stop))
        data = self.ahead.read(coords, whole, where, -math.inf)
        if data is None:
            self.own += 1
            data = self.store.read([whole])[0][where.start - whole.start : where.stop - whole.start]
        return data


WHOLE = list(itertools.product(*map(range, DIMS)))


def test_a_whole_array_needs_few_requests_and_no_byte_more() -> None:
    reader = Reader(Store())
    for coords in WHOLE:
        assert reader.read(coords) == reader.store.content(coords)
        settle(reader.shared)
    assert reader.store.nbytes == len(WHOLE) * reader.store.size
    assert len(reader.store.requests) < len(WHOLE) / 4
    assert reader.shared.nbytes == 0
    assert reader.counters.figures["bytes_ahead_wasted"] == 0


def test_what_a_disk_cache_has_is_not_fetched_ahead() -> None:
    """Only index pages are loaded ahead. After the first miss, chunks are fetched ahead again."""
    reader, half = Reader(Store()), len(WHOLE) // 2
    reader.index.missing = {1, 2}
    reader.counters.hits_in_a_row = WARM_HITS
    for coords in WHOLE[:half]:
        assert reader.read(coords) == reader.store.content(coords)
    assert reader.own == len(reader.store.requests) == half
    wait_until(lambda: not reader.index.missing)
    reader.counters.cache(hits=0, misses=1, nbytes=0)
    for coords in WHOLE[half:]:
        assert reader.read(coords) == reader.store.content(coords)
        settle(reader.shared)
    assert reader.own < half + 16
    assert reader.counters.figures["bytes_ahead_wasted"] == 0


def test_a_chunk_is_read_in_parts() -> None:
    reader = Reader(Store((256,)))
    half = reader.store.size // 2
    for x in range(256):
        whole = reader.store.content((x,))
        assert reader.read((x,), ByteRange(0, half)) == whole[:half]
        assert reader.read((x,), ByteRange(half, 4 * half)) == whole[half:]
        settle(reader.shared)
    assert reader.own < 16
    assert reader.shared.nbytes == 0


def test_a_reader_does_not_wait_for_a_fetch_that_has_not_begun() -> None:
    store = Store((64,))
    reader = Reader(store, connections=1)
    store.gate.clear()
    start = threading.Event()

    def block() -> None:
        start.set()
        store.gate.wait(60)

    reader.shared.start(block)
    assert start.wait(60)
    reader.shared.fetch(reader.ahead._owner, [(5,)], store.size, store.locate)
    assert reader.shared.take((reader.ahead._owner, (5,)), store.locate((5,)).where, -math.inf, keep=False) is None
    store.gate.set()


def test_without_threads_readers_read_by_themselves_until_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    starts, store = FailingStarts(monkeypatch), Store((64,))
    reader = Reader(store)
    for coords in ((5,), (6,)):
        reader.shared.fetch(reader.ahead._owner, [coords], store.size, store.locate)
    assert reader.shared.take((reader.ahead._owner, (5,)), store.locate((5,)).where, -math.inf, keep=False) is None
    starts.fails = False
    reader.shared.fetch(reader.ahead._owner, [(7,)], store.size, store.locate)
    for coords in ((6,), (7,)):
        assert reader.shared._fetches[reader.ahead._owner, coords].data.result(60) == store.content(coords)


def try_readers(numbers: Sequence[Sequence[int]], monkeypatch: pytest.MonkeyPatch, *, invalidates: bool = False) -> int:
    """Chunks are fetched ahead while threads read them. Return the number of orders."""
    install(monkeypatch)
    monkeypatch.setattr(read_ahead, "SMALL_GAP", 0)

    def scenario(schedule: Schedule) -> None:
        store = Store((64,))
        store.on_request = lambda: wait(bool_true)  # other threads may go on while a request is under way
        shared = ReadAhead(1 << 20, 1, RetryPolicy())

        def read(*own: int) -> None:
            for x in own:
                where = store.locate((x,)).where
                data = shared.take((0, (x,)), where, -math.inf, keep=False)
                assert (store.read([where])[0] if data is None else data) == store.content((x,))

        shared.fetch(0, [(x,) for x in itertools.chain(*numbers)], store.size, store.locate)
        calls: list[Callable[[], object]] = [partial(read, *own) for own in numbers]
        if invalidates:
            calls.append(lambda: shared.invalidate(0))
        schedule.together(*calls)
        assert shared.nbytes == 0
        figures = shared._counters.figures
        assert figures["bytes_ahead_used"] + figures["bytes_ahead_wasted"] <= store.nbytes
        if not invalidates:
            assert store.nbytes == sum(map(len, numbers)) * store.size, "bytes are read twice"
            assert figures["bytes_ahead_wasted"] == 0

    return explore(scenario, preemptions=1 + (times() > 1))


@pytest.mark.parametrize("numbers", [[[0, 40], [1]], [[0], [10]]])
def test_each_byte_is_read_once_in_any_order_of_readers_and_fetches(
    numbers: Sequence[Sequence[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert try_readers(numbers, monkeypatch) > 60


def test_chunks_that_are_read_while_their_shards_change_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    assert try_readers([[0, 1]], monkeypatch, invalidates=True) > 60


@pytest.mark.every_case
@pytest.mark.parametrize("bug", [
    "a reader gives up a fetch that is under way, and reads the bytes again",
    "a chunk that a reader has read itself is fetched nevertheless",
])  # fmt: skip
def test_a_race_of_a_reader_and_a_fetch_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bugs.seed(monkeypatch, bug)
    with pytest.raises(AssertionError):
        try_readers([[0], [10]], monkeypatch)


def test_a_failed_fetch_fails_no_reader() -> None:
    store = Store((64,))
    reader = Reader(store)
    for x in range(3):
        reader.read((x,))
    store.fails = True
    reader.shared.fetch(reader.ahead._owner, [(30,)], store.size, store.locate)
    reader.shared._fetches[reader.ahead._owner, (30,)].data.exception(60)
    store.fails = False
    assert reader.read((30,)) == store.content((30,))
    assert reader.counters.figures["bytes_ahead_wasted"] == 0


def test_a_chunk_that_cannot_be_located_keeps_no_reader_waiting() -> None:
    class Postponed(BaseException):
        pass

    def locate(coords: Coords) -> Piece:
        raise Postponed

    store = Store((64,))
    reader = Reader(store, connections=1)
    reader.shared.fetch(reader.ahead._owner, [(5,)], store.size, locate)
    reader.shared.fetch(reader.ahead._owner, [(6,)], store.size, store.locate)
    assert reader.shared._fetches[reader.ahead._owner, (6,)].data.result(60) == store.content((6,))
    assert reader.read((5,)) == store.content((5,))


def test_an_overloaded_store_gets_fewer_connections_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(read_ahead, "clock", lambda: now[0])
    store = Store((256,))
    reader = Reader(store, connections=8)

    def throttled() -> None:
        reader.counters.add(retries=1)

    def fetch(number: int) -> None:
        x = 7 * number  # no stream
        reader.shared.fetch(reader.ahead._owner, [(x,)], store.size, store.locate)
        reader.shared._fetches[reader.ahead._owner, (x,)].data.result(60)
        assert reader.read((x,)) == store.content((x,))
        settle(reader.shared)

    store.on_request = throttled
    for number, (at, allowed) in enumerate([(0, 4), (0.5, 4), (1, 2), (2, 1), (3, 1)]):
        now[0] = at * read_ahead.OVERLOAD_S
        fetch(number)
        assert reader.shared._threads.limit == allowed
    assert reader.shared._threads.count == 1
    store.on_request = lambda: None
    for number, allowed in enumerate([1, 2, 4, 8, 8], 5):
        fetch(number)
        assert reader.shared._threads.limit == allowed
        now[0] += read_ahead.CALM_S


def test_failures_make_pauses_that_become_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = Store((64,)), 1000.0
    monkeypatch.setattr(read_ahead, "clock", lambda: now)
    reader = Reader(store)

    def fetch(x: int) -> None:
        reader.shared.fetch(reader.ahead._owner, [(x,)], store.size, store.locate)
        reader.shared._fetches[reader.ahead._owner, (x,)].data.exception(60)

    for x, (fails, seconds) in enumerate([(True, 1), (True, 2), (True, 4), (False, 0), (True, 1)]):
        store.fails = fails
        fetch(x)
        assert (reader.shared.room() == 0) == fails
        now += seconds + 0.1
        assert reader.shared.room() > 0


def test_a_forked_process_waits_for_no_fetch_of_its_parent() -> None:
    store = Store((64,))
    reader = Reader(store)
    store.gate.clear()
    reader.shared.fetch(reader.ahead._owner, [(5,)], store.size, store.locate)
    assert store.asked.wait(60)
    pid = os.fork()
    if not pid:
        try:
            key, where = (reader.ahead._owner, (5,)), store.locate((5,)).where
            os._exit(reader.shared.take(key, where, -math.inf, keep=False) is not None or reader.shared.room() > 0)
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    store.gate.set()
    assert reader.read((5,)) == store.content((5,))


def test_bytes_of_another_length_are_not_used() -> None:
    store = Store((64,))
    reader = Reader(store)
    reader.shared.fetch(
        reader.ahead._owner, [(9,)], 7, lambda c: Piece(0, store, ByteRange(9 * store.size, 9 * store.size + 7))
    )
    assert reader.read((9,)) == store.content((9,))


def test_what_was_fetched_is_forgotten_when_shards_change() -> None:
    store = Store((64,))
    reader = Reader(store)
    reader.shared.fetch(reader.ahead._owner, [(7,)], store.size, store.locate)
    reader.shared._fetches[reader.ahead._owner, (7,)].data.result(60)
    reader.ahead.invalidate()
    assert reader.shared.nbytes == 0
    store.requests.clear()
    assert reader.read((7,)) == store.content((7,))
    assert len(store.requests) == 1


def test_the_limit_holds_and_zero_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    off = Reader(Store(), limit=0)
    for coords in WHOLE:
        off.read(coords)
    assert len(off.store.requests) == len(WHOLE)
    few = Reader(Store(), limit=16 * off.store.size)
    peak = 0
    for coords in WHOLE:
        few.read(coords)
        peak = max(peak, few.shared.nbytes)
    assert 0 < peak <= 16 * few.store.size


def test_what_nobody_reads_gives_up_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(read_ahead, "clock", lambda: now[0])
    store = Store((64,))
    reader = Reader(store)
    reader.shared.fetch(reader.ahead._owner, [(7,)], store.size, store.locate)
    reader.shared._fetches[reader.ahead._owner, (7,)].data.result(60)
    now[0] = read_ahead.STALE_S + 1
    reader.shared.fetch(reader.ahead._owner, [(8,)], store.size, store.locate)
    assert (reader.ahead._owner, (7,)) not in reader.shared._fetches
    assert reader.counters.figures["bytes_ahead_wasted"] == store.size


def box(corner: Coords, shape: Coords) -> list[Coords]:
    return list(itertools.product(*(range(c, c + n) for c, n in zip(corner, shape, strict=True))))


ACCESSES = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 3), st.integers(0, 7), st.integers(0, 7)).map(lambda c: [c]),
        st.tuples(st.integers(0, 3), st.integers(0, 7)).map(lambda zy: [(*zy, x) for x in range(8)]),
        st.tuples(st.integers(0, 3), st.integers(0, 7)).map(lambda zx: [(zx[0], y, zx[1]) for y in range(8)]),
        st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 5)).map(lambda c: box(c, (2, 3, 3))),
        st.tuples(st.integers(0, 255), st.integers(1, 40)).map(lambda run: WHOLE[run[0] : sum(run)]),
    ),
    max_size=40,
)


@given(ACCESSES)
def test_any_order_of_accesses_gets_right_bytes_with_bounded_waste(runs: list[list[Coords]]) -> None:
    """At most what is needed, `WASTE` (15 %) of it, and `FREE_WASTE` bytes, here 32 chunks instead of 16 MiB."""
    free = 32 * 4 * KIB
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_ahead, "FREE_WASTE", free)
        patch.setattr(read_ahead, "SMALL_GAP", 0)
        reader = Reader(Store())
        needed = 0
        for coords in itertools.chain(*runs):
            assert reader.read(coords) == reader.store.content(coords)
            needed += reader.store.size
        finish(reader.shared)
    assert reader.store.nbytes <= (1 + read_ahead.WASTE) * needed + free


def finish(shared: ReadAhead) -> None:
    """Wait until nothing is under way."""
    for fetch in list(shared._fetches.values()):
        if not fetch.data.cancel():
            fetch.data.result(60)
