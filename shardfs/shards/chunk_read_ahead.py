"""Reads ahead in one collection: along the axes of its grid, or in the order in which its chunks are stored."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING

from shardfs.model.errors import CorruptShardError
from shardfs.shards.read_patterns import RUN, Streams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardfs.model.blobs import ByteRange
    from shardfs.model.shard_format import ShardIndex
    from shardfs.model.values import Coords
    from shardfs.shards.shard_indices import ShardIndices
    from shardfs.storage.read_ahead import Piece, ReadAhead

MAX_PAGES = 256
"""Index pages in which accesses are remembered; the one that was used least recently is dropped."""


class _Page:
    """The streams along one index page. `passed`: the pages after it were entered already."""

    __slots__ = ("passed", "streams")

    def __init__(self, entries: int) -> None:
        self.streams = Streams((entries,))
        self.passed = False


class StoredOrder:
    """Recognises programs that read chunks in the order in which they are stored, which is the order of listings.

    Each index page has streams of its own, along the positions in the page. So a program that reads ascending ids is
    recognised as well: a hash distributes the ids over many pages, but each page is sorted by id. Not thread-safe.
    """

    def __init__(self, index: ShardIndices, files: int = 1) -> None:
        self._index = index
        self._files = files
        self._pages: OrderedDict[tuple[int, int], _Page] = OrderedDict()

    def access(self, coords: Coords, room: int) -> tuple[list[Coords], int]:
        """Take note of an access to an existing chunk.

        Return at most `room` chunks that will probably be asked for next. If the pages after that of the chunk should
        be entered now, the number says by how many chunks; otherwise it is 0.
        """
        shard, number, slot = self._index.format.place(coords)
        entry = self._index.cached_page(shard, number)
        if entry is None:
            return [], 0
        index = entry.index.arrays()
        page = self._page(shard, number, len(index))
        positions = page.streams.access((max(index.position(slot), 0),), room)
        stream = page.streams.latest
        ends = stream is not None and stream.at_end and not page.passed
        page.passed |= ends
        return self._chunks(shard, number, index, positions), stream.used if stream is not None and ends else 0

    def enter(self, shard: int, number: int, index: ShardIndex, ahead: int, room: int) -> list[Coords]:
        """Return the first chunks of a page, at most `room`, for a stream that comes from the page before.

        `ahead` is how many chunks the stream has used there. None are returned if chunks of the page were read already.
        """
        if not room or (shard, number) in self._pages:
            return []
        page = self._page(shard, number, len(index))
        positions = page.streams.expect(ahead, room)
        page.passed = len(positions) == len(index) < room
        return self._chunks(shard, number, index, positions)

    def _page(self, shard: int, number: int, entries: int) -> _Page:
        page = self._pages.pop((shard, number), None) or _Page(entries)
        self._pages[shard, number] = page
        if len(self._pages) > MAX_PAGES:
            self._pages.popitem(last=False)
        return page

    def _chunks(self, shard: int, number: int, index: ShardIndex, positions: Sequence[Coords]) -> list[Coords]:
        coords, valid = self._index.format.coords(shard, number, index.all_slots()[[p for (p,) in positions]])
        cells = coords[valid].tolist()
        return [tuple(c) for c in cells] if self._files == 1 else [(i, n) for i, _ in cells for n in range(self._files)]


class CollectionReadAhead:
    """Reading ahead in one collection. Thread-safe.

    Args:
        index: the index of the collection's shards. Its format has the grid; ids are a grid with one axis.
        locate: says where a chunk is; None if it is absent.
        files: the number of files that a chunk is shown as. To locate one of several, `locate` sends a request.
    """

    def __init__(
        self, shared: ReadAhead, index: ShardIndices, locate: Callable[[Coords], Piece | None], files: int = 1
    ) -> None:
        self._shared = shared
        self._index = index
        self._locate = locate
        self._files = files
        self._begin()
        self._lock = threading.Lock()
        self._owner = next(_owners)
        self._warm = False

    def _begin(self) -> None:
        self._grid = Streams(self._index.format.grid)
        self._order = StoredOrder(self._index, self._files)

    def read(self, coords: Coords, whole: ByteRange, where: ByteRange, since: float) -> bytes | None:
        """Note that the chunk at `whole`, or the part `where` of it, is read. Return its bytes if they are here.

        `since`: see `ReadAhead.take`.
        """
        start, stop = whole
        if where.start == start:
            self._note(coords, max(stop - start, 1))
        data = self._shared.take((self._owner, coords), whole, since, keep=where.stop < stop)
        return None if data is None else data[where.start - start : where.stop - start]

    def invalidate(self) -> None:
        """Drop what was fetched: shards may have changed."""
        self._shared.invalidate(self._owner)

    def _note(self, coords: Coords, size: int) -> None:
        room, beyond, warm = self._shared.room() // size, 0, self._shared.is_warm()
        with self._lock:
            if self._warm and not warm:
                self._begin()  # the streams believe that chunks ahead were fetched
            self._warm = warm
            coming = self._grid.access(coords, room)
            if self._grid.unclaimed:
                room = room if self._grid.unclaimed >= RUN else 0
                coming, beyond = self._order.access(coords, room)
                coming = [c for c in coming if c not in self._grid.recent]
        if coming:
            self._fetch(coming, size)
        if beyond:
            shard, number, _ = self._index.format.place(coords)
            self._shared.start(partial(self._enter, shard, number + 1, beyond, size))

    def _fetch(self, coming: Sequence[Coords], size: int) -> None:
        """Begin to fetch chunks; only their index pages if a disk cache has the chunks."""
        if self._warm:
            for home in {self._index.format.place(c)[:2] for c in coming}:
                if self._index.cached_page(*home) is None:
                    self._shared.start(partial(self._index.load_quietly, home))
            return
        for group in [coming] if self._files == 1 else [[c] for c in coming]:
            self._shared.fetch(self._owner, group, size, self._located)

    def _located(self, coords: Coords) -> Piece | None:
        """Return where a chunk is stored; None if it is absent. May wait for the store."""
        piece = self._locate(coords)
        if piece is None:
            with self._lock:
                self._grid.give_up(coords)
        return piece

    def _enter(self, shard: int, first: int, ahead: int, size: int) -> None:
        """Fetch the first `ahead` chunks in the pages of a shard from `first` on. May wait for the store."""
        wanted = ahead
        try:
            for number in self._index.pages(shard, first):
                page = self._index.page(shard, number)
                if page is None:
                    continue
                with self._lock:
                    room = min(wanted, self._shared.room() // size)
                    coming = self._order.enter(shard, number, page.index.arrays(), ahead, room)
                self._fetch(coming, size)
                wanted -= len(coming)
                if wanted <= 0 or not coming:
                    return
        except (OSError, CorruptShardError):  # the reader will get the error
            return


_owners = itertools.count()
