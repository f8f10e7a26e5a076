"""`ChunkLayer`: the stored chunks of one layer of sharding, found by coordinates and listed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from shardfs.model.blobs import Stat
from shardfs.model.errors import CorruptShardError, UnsupportedError
from shardfs.model.shard_format import ShardIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardfs.model.shard_format import ChunkExtent, Index, Placement
    from shardfs.model.values import U64, Bool, Coords, Sizes
    from shardfs.shards.shard_indices import ShardIndices
    from shardfs.shards.stored_chunk import StoredChunk

POSITION_BITS = 22
"""A page has fewer than 2**22 entries (`single_page.MAX_INDEX_BYTES`)."""

BATCH = 4096
"""Maximum number of chunks in a `ChunkBatch`."""

FEW = 64
"""Maximum number of chunks that are looked up one by one, which is faster than arrays for so few."""

NONE = -2
"""Stands for the size of an absent chunk."""


class ChunkBatch(NamedTuple):
    """Existing chunks of one shard, as parallel columns.

    Args:
        coords: (n, d) coordinates.
        sizes: stored bytes (n,); -1 where the index entry is broken.
        mtime_ns: the shard's modification time in ns; 0 if unknown.
        cookies: positions (n,), ascending; `ChunkLayer.scan` continues after one.
    """

    coords: U64
    sizes: Sizes
    mtime_ns: int
    cookies: U64


class Occupancy(NamedTuple):
    """Number and bytes of the existing shards and chunks, and whether some cannot be read."""

    shards: int
    chunks: int
    stored_bytes: int
    shard_bytes: int
    damaged: bool


class ChunkLayer:
    """The stored chunks of one layer of sharding: finds and lists them, but reads no chunk. Thread-safe.

    Args:
        index: finds the chunks in the shards of this layer.
        outer: the layer whose chunks are the shards of this layer; None for the outermost layer.

    Attributes:
        on_resize: called, before any thread sees a new version of a shard, with the coordinates of chunks that may have
            another size in it, and with the largest sizes that they may have had.
    """

    files = 1  # the number of files that a chunk is shown as

    def __init__(self, index: ShardIndices, outer: ChunkLayer | None = None) -> None:
        self.index = index
        self.outer = outer
        self.format = index.format
        self.source = index.source
        self.on_resize: Callable[[U64, Sizes], None] = lambda coords, sizes: None
        index.on_reload = self._report_resized

    @property
    def layers(self) -> list[ChunkLayer]:
        """All layers of the collection as far as this one, the outermost first."""
        return [self] if self.outer is None else [*self.outer.layers, self]

    # ---- finding ----

    def locate(self, coords: Coords) -> StoredChunk | None:
        """Return the location of a chunk; None if the chunk is absent. Costs no request if the index page is cached.

        Raise CorruptShardError if the index cannot be decoded or the entry of this chunk is invalid; OSError if the
        store fails; StaleShardError if the array was replaced.
        """
        return self.index.at(self.format.place(coords), coords)

    def stored(self, coords: Coords) -> StoredChunk | None:
        """Return the location of the stored bytes from which the chunk is made; None if it is absent.

        Raise as `locate`.
        """
        return self.locate(coords)

    def invalidate_shard(self, coords: Coords) -> None:
        """Drop everything cached for the chunk's shard, so that the next lookup reads the current shard."""
        shard, number, _ = self.format.place(coords)
        self.index.invalidate_page(shard, number)

    def shard_of(self, coords: Coords) -> int:
        """Return the number, in this layer, of the shard that a chunk belongs to, whether the chunk exists or not."""
        return self.format.place(coords)[0]

    def key_of(self, coords: Coords) -> str:
        """Return the path in the store of the chunk's shard. An inner shard has its coordinates in brackets."""
        return self.source.key(self.shard_of(coords))

    def _report_resized(self, shard: int, number: int, before: Index, after: Index) -> None:
        """Call `on_resize` for the chunks of a page that was read again."""
        slots = before.arrays().all_slots()
        sizes = _sizes_of(before, slots)
        changed = sizes != _sizes_of(after, slots)
        coords, valid = self.format.coords(shard, number, slots[changed])
        if valid.any():
            self.on_resize(coords[valid], sizes[changed][valid])

    # ---- listing ----

    def present(self, coords: U64) -> tuple[Bool, Sizes, Sizes]:
        """For (n, d) coordinates, return whether each chunk exists, its stored bytes, and its shard's mtime in ns.

        The size is -1 where an entry or page is damaged. Opening such a chunk shows whether it exists. Raise OSError if
        a store refuses a request.
        """
        n = len(coords)
        exists, sizes, mtimes = np.zeros(n, np.bool_), np.zeros(n, np.int64), np.zeros(n, np.int64)
        places = self.format.place_many(coords)
        homes = np.stack([places.shard, places.page], axis=1)
        # np.unique would import numpy.ma, which takes 20 ms
        for shard, number in self.index.each(sorted(set(map(tuple, homes.tolist())))):
            at = np.flatnonzero((homes[:, 0] == shard) & (homes[:, 1] == number))
            try:
                page = self.index.page(shard, number)
            except CorruptShardError:
                exists[at], sizes[at] = True, -1
                continue
            if page is None:
                continue
            page_sizes = _sizes_of(page.index, places.slot[at])
            at, page_sizes = at[page_sizes != NONE], page_sizes[page_sizes != NONE]
            exists[at], sizes[at] = True, page_sizes
            mtimes[at] = self._stat_if_known(shard).mtime_ns if len(at) else 0
        return exists, sizes, mtimes

    def row(self, place: Callable[[int], Placement], n: int) -> list[tuple[int, int, int]]:
        """Return last coordinate, stored bytes and mtime in ns of the existing chunks among the first `n` of a row.

        The bytes are -1 for a damaged chunk. Faster than `present` for short rows, where numpy's overhead dominates.
        `place` is from `ShardFormat.row`. Raise as `present`.
        """
        out: list[tuple[int, int, int]] = []
        home: tuple[int, int] | None = None
        loaded = self.index.along(place, n)
        for last in range(n):
            shard, number, slot = place(last)
            if home != (shard, number):
                home = shard, number
                next(loaded, None)
                find, mtime_ns = self._finder(shard, number)
            try:
                extent = find(slot)
            except ValueError:
                out.append((last, -1, 0))
                continue
            if extent is not None:
                out.append((last, extent[1], mtime_ns))
        return out

    def _finder(self, shard: int, number: int) -> tuple[Callable[[int], ChunkExtent | None], int]:
        """Return the lookup function of a page, and the shard's mtime."""
        try:
            page = self.index.page(shard, number)
        except CorruptShardError:
            return _unknown_chunk, 0
        if page is None:
            return ShardIndex.empty().find, 0
        blob = page.blob()
        stat = self._stat_if_known(shard) if blob is None or blob.fd < 0 else blob.stat()
        return page.index.find, stat.mtime_ns

    def _stat_if_known(self, shard: int) -> Stat:
        """Return the attributes of a shard; zeros if it is absent or damaged although its index is cached."""
        try:
            return self.index.stat(shard)
        except (FileNotFoundError, CorruptShardError):
            return Stat(0, 0, None)

    def existing_shards(self) -> U64:
        """Return the numbers of the existing shards, ascending. They are cached, with 8 bytes for each shard."""
        return self.index.existing()[0]

    def scan(self, cookie: int, only: U64 | None = None) -> Iterator[ChunkBatch]:
        """Yield all chunks that follow `cookie`, or those in the shards `only`, page by page, at most `BATCH` together.

        All possible chunks of a damaged page are listed with size -1, if they can be enumerated. If not,
        CorruptShardError is raised after the last batch, so that a client that copies the directory learns of missing
        chunks.
        """
        (shards, damage), page_bits = (only, None) if only is not None else self.index.existing(), self.format.page_bits
        if len(shards).bit_length() + page_bits + POSITION_BITS > 60:
            raise UnsupportedError(f"{self.index.path}: too many index pages to list the chunks in one directory")
        begin = cookie >> (page_bits + POSITION_BITS)
        page = cookie >> POSITION_BITS & ((1 << page_bits) - 1)
        skip = cookie & ((1 << POSITION_BITS) - 1)
        for ordinal, shard in enumerate(self.index.shards(map(int, shards[begin:])), begin):
            try:
                for _, number in self.index.each((shard, number) for number in self.index.pages(shard, page)):
                    base = (ordinal << page_bits | number) << POSITION_BITS
                    try:
                        yield from self._scan_page(shard, number, base, skip if number == page else 0)
                    except CorruptShardError as e:
                        damage = e
            except CorruptShardError as e:
                damage = e
            page = skip = 0  # the cookie is within the first shard
        if damage is not None:
            raise damage.with_traceback(None)

    def _scan_page(self, shard: int, number: int, base: int, skip: int) -> Iterator[ChunkBatch]:
        try:
            page = self.index.page(shard, number)
        except CorruptShardError:
            slots = self.format.candidates(shard)
            if slots is None:
                raise
            page = None  # each chunk may exist, so all are listed; opening one raises the error
        else:
            if page is None:
                return
            index = page.index.arrays()
            slots = index.all_slots()
        mtime_ns = self._stat_if_known(shard).mtime_ns if page is not None else 0
        for start in range(skip, len(slots), BATCH):
            stop = min(start + BATCH, len(slots))
            coords, valid = self.format.coords(shard, number, slots[start:stop])
            at = np.arange(start, stop)[valid]
            if len(at):
                sizes = np.full(len(at), -1, np.int64) if page is None else index.sizes_at(at)
                yield ChunkBatch(coords[valid], sizes, mtime_ns, np.uint64(base + 1) + at.astype(np.uint64))

    def occupancy(self) -> Occupancy:
        """Return the numbers of existing shards and readable chunks, and their bytes. Reads every index once."""
        shards = self.existing_shards().tolist()
        chunks = nbytes = 0
        damaged = False
        try:
            for batch in ChunkLayer.scan(self, 0):
                readable = batch.sizes >= 0
                damaged = damaged or not readable.all()
                chunks += int(readable.sum())
                nbytes += int(batch.sizes[readable].sum())
        except CorruptShardError:  # logged when the page was read
            damaged = True
        shard_bytes = sum(self._stat_if_known(shard).size for shard in shards)
        return Occupancy(len(shards), chunks, nbytes, shard_bytes, damaged)

    def covering(self, key: str, offset: int) -> Coords | None:
        """Return the chunk whose stored bytes cover byte `offset` of the shard object `key`; None if no chunk does.

        Raise CorruptShardError if the index cannot be read.
        """
        at = np.uint64(offset)
        for shard, number, index in self._indices(key):
            starts, sizes = index.starts.astype(np.uint64), index.sizes.astype(np.uint64)
            hits = np.flatnonzero((starts <= at) & (at - np.minimum(starts, at) < sizes))
            for coords in self._coords(shard, number, index, hits):
                return coords
        return None

    def _indices(self, key: str) -> Iterator[tuple[int, int, ShardIndex]]:
        """Yield the pages of the shard object with this key."""
        shard = self.source.number(key)
        if shard is None:
            return
        for number in self.index.pages(shard, 0):
            page = self.index.page(shard, number)
            if page is not None:
                yield shard, number, page.index.arrays()

    def _coords(self, shard: int, number: int, index: ShardIndex, at: npt.NDArray[np.intp]) -> list[Coords]:
        """Return the coordinates of entries at these positions in a page, without entries that readers cannot reach."""
        coords, valid = self.format.coords(shard, number, index.all_slots()[at])
        return [tuple(c) for c in coords[valid].tolist()]


def _unknown_chunk(slot: int) -> None:
    """`Index.find` for a page that cannot be read."""
    raise ValueError(slot)


def _sizes_of(index: Index, slots: U64) -> Sizes:
    """Return the stored sizes of the chunks in these slots: -1 for a broken entry, NONE for an absent chunk."""
    if len(slots) <= FEW:
        return np.fromiter((_size_of(index, slot) for slot in slots.tolist()), np.int64, len(slots))
    arrays = index.arrays()
    at = arrays.positions(slots)
    sizes = np.full(len(slots), NONE, np.int64)
    sizes[at >= 0] = arrays.sizes_at(at[at >= 0])
    return sizes


def _size_of(index: Index, slot: int) -> int:
    try:
        extent = index.find(slot)
    except ValueError:
        return -1
    return NONE if extent is None else extent[1]
