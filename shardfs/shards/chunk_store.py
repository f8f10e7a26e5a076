"""`ChunkStore`: a collection as a key-value store, which maps coordinates to byte ranges and reads them."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from shardfs.model.blobs import Blob, ByteRange, Stat
from shardfs.model.errors import CorruptShardError, StaleShardError, UnsupportedError
from shardfs.model.shard_format import ShardIndex
from shardfs.shards.chunk_read_ahead import CollectionReadAhead
from shardfs.storage.read_ahead import Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from shardfs.model.shard_format import Index, Placement
    from shardfs.model.values import U64, Bool, Coords, Sizes, Version
    from shardfs.shards.shard_indices import ShardIndices, StoredChunk
    from shardfs.storage.read_ahead import ReadAhead

POSITION_BITS = 22
"""A page has fewer than 2**22 entries (`single_page.MAX_INDEX_BYTES`)."""

BATCH = 4096
"""Maximum number of chunks in a `ChunkBatch`."""

FEW = 64
"""Maximum number of chunks that are looked up one by one, which is faster than arrays for so few."""

NONE = -2
"""Stands for the size of an absent chunk."""

T = TypeVar("T")


def _unchanged(data: bytes) -> bytes:
    return data


class ChunkBatch(NamedTuple):
    """Existing chunks: coordinates (n, d), stored sizes (-1 if the entry is broken), the shard's mtime, and cookies."""

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


class ChunkStore:
    """The chunks of one layer of sharding. Thread-safe.

    Args:
        index: finds the chunks in the shards of this layer.
        outer: the layer whose chunks are the shards of this layer; None for the outermost layer.

    Attributes:
        on_resize: called, before any thread sees a new version of a shard, with the coordinates of chunks that may have
            another size in it, and with the largest sizes that they may have had.
    """

    def __init__(self, index: ShardIndices, outer: ChunkStore | None = None) -> None:
        self.index, self.outer, self.format, self.source = index, outer, index.format, index.source
        self.at = index.at  # the hot path: `locate` for a caller that has already computed the chunk's placement
        self.on_resize: Callable[[U64, Sizes], None] = lambda coords, sizes: None
        self.index.on_reload = partial(_report_resized, self)
        self._ahead: CollectionReadAhead | None = None

    files = 1  # the number of files that a chunk is shown as

    @property
    def path(self) -> str:
        """The path of the collection, for messages."""
        return self.index.path

    @path.setter
    def path(self, path: str) -> None:
        self.index.path = path

    @property
    def is_local(self) -> bool:
        """Whether the shards are files of this machine."""
        return self.source.is_local

    def read_ahead(self, shared: ReadAhead) -> None:
        """From now on, fetch chunks before readers ask for them."""
        self._ahead = CollectionReadAhead(shared, self.index, partial(_locate, self), self.files)

    # ---- finding ----

    def locate(self, coords: Coords) -> StoredChunk | None:
        """Return the location of a chunk; None if the chunk is absent. Costs no request if the index page is cached.

        Raise CorruptShardError if the index cannot be read or the entry of this chunk is invalid.
        """
        return self.at(self.format.place(coords), coords)

    def stored(self, coords: Coords) -> StoredChunk | None:
        """Return the location of the stored bytes from which the chunk is made; None if the chunk is absent."""
        return self.locate(coords)

    def forget(self, coords: Coords) -> None:
        """Drop everything cached for the chunk's shard, so that the next lookup reads the current shard."""
        shard, number, _ = self.format.place(coords)
        self.index.forget(shard, number)
        if self._ahead is not None:
            self._ahead.forget()

    def forget_existing(self) -> None:
        """Drop the cached list of existing shards."""
        self.index.drop("existing", 0)

    def forget_all(self) -> None:
        """Drop everything cached for this collection."""
        self.index.forget_all()
        if self._ahead is not None:
            self._ahead.forget()

    def shard_of(self, coords: Coords) -> int:
        """Return the number of the shard that a chunk belongs to, whether the chunk exists or not."""
        return self.format.place(coords)[0]

    def key_of(self, coords: Coords) -> str:
        return self.source.key(self.shard_of(coords))

    def stat(self, shard: int) -> Stat:
        """Return the attributes of a shard object, with at most one request."""
        return self.index.stat(shard)

    # ---- reading ----

    def read(self, coords: Coords, part: ByteRange | None = None, found: StoredChunk | None = None) -> bytes | None:
        """Return the stored bytes of a chunk, or `part` of them; None if the chunk is absent.

        `found`: what `locate` has returned just now. Raise the errors of `decoded`.
        """
        return self.decoded(coords, _unchanged, part, found=found)

    def decoded(
        self,
        coords: Coords,
        decode: Callable[[bytes], T],
        part: ByteRange | None = None,
        most: float = math.inf,
        found: StoredChunk | None = None,
        room: Callable[[int], AbstractContextManager[object]] = nullcontext,
    ) -> T | None:
        """Return what `decode` makes of the stored bytes of a chunk; None if the chunk is absent.

        With `part`, only that part is read and decoded. A chunk of more than `most` stored bytes counts as damage.
        Bytes are read and decoded inside of `room`, given their number.

        If the bytes contradict the index (too few, or `decode` raises ValueError), the index is read again and the read
        is retried once, as it is if a remote shard was replaced. Raise CorruptShardError if the shard is unchanged and
        still wrong, and StaleShardError if it changed between the two attempts.
        """
        before: Version = None
        for attempt in (1, 2):
            found = found or self.locate(coords)
            if found is None:
                return None
            try:
                if found.size > most:
                    raise ValueError(f"{found.size} stored bytes; {most} is the limit")
                held = self.fetched_ahead(coords, found, part) if attempt == 1 else None
                with room(found.size):
                    return decode(self._read_found(found, part, held))
            except StaleShardError:
                if attempt == 2:
                    raise
                why = ""
            except ValueError as e:
                why = f"chunk {coords}: {e}"
            shard, _, slot = self.format.place(coords)
            if attempt == 1:
                before, found = found.blob.stat().version, None
                self.forget(coords)
        after = self.stat(shard).version
        key = self.source.key(shard)
        if before != after:
            raise StaleShardError(f"{self.path or '/'}: {key}: changed twice during one read; read it again")
        raise CorruptShardError(self.path, key, why, slot)

    def fetched_ahead(self, coords: Coords, found: StoredChunk, part: ByteRange | None = None) -> bytes | None:
        """Return the bytes that `_read_found` would read, if they were fetched already. Notes the access."""
        if self._ahead is None:
            return None
        return self._ahead.read(coords, _range_of(found), _range_of(found, part))

    def _read_found(self, found: StoredChunk, part: ByteRange | None, data: bytes | None = None) -> bytes:
        """Return the stored bytes, verified if all are read. Raise ValueError, with the reason, if they are wrong.

        `data`: the bytes of the chunk or part, and of the checksum after a whole chunk, if they were read already.
        """
        where = _range_of(found, part)
        try:
            data = found.blob.read([where])[0] if data is None else data
        except FileNotFoundError as e:
            raise ValueError("its shard was removed") from e
        if len(data) != where.stop - where.start:
            raise ValueError(f"{where.stop - where.start} bytes expected at {where.start}, {len(data)} found")
        if part is None and found.checksum is not None:
            data, stored_checksum = data[: found.size], data[found.size :]
            found.checksum.verify(data, stored_checksum)
        return data

    def read_many(self, coords: Sequence[Coords], parts: Sequence[ByteRange]) -> list[bytes | Exception]:
        """Return the stored bytes, or the error, for parts of several chunks.

        Parts in the same shard are fetched together.
        """
        out: list[bytes | Exception] = [b""] * len(coords)
        groups: dict[int, list[tuple[int, Blob, ByteRange]]] = {}
        for i, (c, part) in enumerate(zip(coords, parts, strict=True)):
            try:
                found = self.locate(c)
            except (CorruptShardError, OSError) as e:
                out[i] = e
                continue
            if found is None:
                out[i] = FileNotFoundError(f"{self.path or '/'}: no chunk {c}")
                continue
            stop = found.start + found.size
            where = ByteRange(min(found.start + part.start, stop), min(found.start + part.stop, stop))
            groups.setdefault(id(found.blob), []).append((i, found.blob, where))  # decoded chunks are blobs, too
        for members in groups.values():
            try:
                read = members[0][1].read([where for _, _, where in members])
            except (StaleShardError, OSError) as e:
                for i, _, _ in members:  # a replaced shard is read with its new index
                    out[i] = self._read_or_error(coords[i], parts[i]) if isinstance(e, StaleShardError) else e
                continue
            for (i, _, where), data in zip(members, read, strict=True):
                whole = len(data) == where.stop - where.start
                # retries, and raises a detailed error
                out[i] = data if whole else self._read_or_error(coords[i], parts[i])
        return out

    def _read_or_error(self, coords: Coords, part: ByteRange) -> bytes | Exception:
        try:
            return self.read(coords, part) or b""
        except (CorruptShardError, StaleShardError, OSError) as e:
            return e

    # ---- listing ----

    def present(self, coords: U64) -> tuple[Bool, Sizes, Sizes]:
        """For (n, d) coordinates, return whether each chunk exists, its stored size, and its shard's mtime in ns.

        The size is -1 where an entry or page is damaged. Opening such a chunk shows whether it exists.
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
            found = _sizes_of(page.index, places.slot[at])
            at, found = at[found != NONE], found[found != NONE]
            exists[at], sizes[at] = True, found
            mtimes[at] = self._stat_if_known(shard).mtime_ns if len(at) else 0
        return exists, sizes, mtimes

    def row(self, place: Callable[[int], Placement], n: int) -> list[tuple[int, int, int]]:
        """Return last coordinate, size and mtime of the existing chunks among the first `n` of a row.

        Faster than `present` for short rows, where numpy's overhead dominates. `place` is from `ShardFormat.row`.
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

    def _finder(self, shard: int, number: int) -> tuple[Callable[[int], tuple[int, int] | None], int]:
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
        """Return `stat`; zeros if the shard is absent or damaged, which can happen while its index is cached."""
        try:
            return self.stat(shard)
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
            raise UnsupportedError(f"{self.path}: too many index pages to list the chunks in one directory")
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
        """Count shards and readable chunks and their bytes. Reads every index once."""
        shards = self.existing_shards().tolist()
        chunks = stored = 0
        damaged = False
        try:
            for batch in ChunkStore.scan(self, 0):
                readable = batch.sizes >= 0
                damaged = damaged or not readable.all()
                chunks += int(readable.sum())
                stored += int(batch.sizes[readable].sum())
        except CorruptShardError:  # logged when the page was read
            damaged = True
        shard_bytes = sum(self._stat_if_known(shard).size for shard in shards)
        return Occupancy(len(shards), chunks, stored, shard_bytes, damaged)

    def covering(self, key: str, offset: int) -> Coords | None:
        """Return the chunk whose stored bytes cover byte `offset` of a shard object; None if no chunk does."""
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


def _report_resized(chunks: ChunkStore, shard: int, number: int, before: Index, after: Index) -> None:
    """Call `on_resize` for the chunks of a page that was read again."""
    slots = before.arrays().all_slots()
    sizes = _sizes_of(before, slots)
    changed = sizes != _sizes_of(after, slots)
    coords, valid = chunks.format.coords(shard, number, slots[changed])
    if valid.any():
        chunks.on_resize(coords[valid], sizes[changed][valid])


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


def _range_of(found: StoredChunk, part: ByteRange | None = None) -> ByteRange:
    """Return the range of a part of a chunk; without `part`, of the chunk and the checksum that follows it."""
    start, end = found.start, found.start + found.size
    if part is not None:
        return ByteRange(min(start + part.start, end), min(start + part.stop, end))
    return ByteRange(start, end if found.checksum is None else end + found.checksum.size)


def _piece(chunks: ChunkStore, coords: Coords, found: StoredChunk) -> Piece:
    return Piece(chunks.shard_of(coords), found.blob, _range_of(found))


def _locate(chunks: ChunkStore, coords: Coords) -> Piece | None:
    """Return where a chunk is, for fetching it ahead; None if it is absent."""
    found = chunks.locate(coords)
    return None if found is None else _piece(chunks, coords, found)
