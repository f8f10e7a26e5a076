"""`ChunkStore`: one collection as a key-value store. The read path: coordinates in, byte ranges and bytes out."""

from __future__ import annotations

import itertools
import logging
import math
import weakref
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from shardfs.model.blobs import Blob, ByteRange, Stat
from shardfs.model.errors import CorruptShardError, DanglingLinkError, StaleShardError, UnsupportedError
from shardfs.storage.blob_views import BytesBlob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardfs.model.collection import ShardSource
    from shardfs.model.shard_format import Checksum, Index, Placement, ShardFormat, ShardIndex
    from shardfs.model.values import U64, Bool, Coords, Sizes, Version
    from shardfs.storage.cache import ByteLRU

log = logging.getLogger(__name__)

DAMAGE_TTL_S = 5.0
"""How long a page that could not be decoded is remembered as such, so that an `ls` of its chunks reads it once."""

MAX_OBJECT = 1 << 50
"""No remote object is larger; how large one is would cost a request."""

POSITION_BITS = 22
"""A page has fewer entries than 2**22 (`shards.MAX_INDEX_BYTES`)."""

FEW = 64
"""Up to so many chunks are looked up one by one, faster than with arrays."""


class StoredChunk(NamedTuple):
    """A chunk's stored bytes: `[start, start + size)` of `blob`; its checksum, if it has one, is behind them."""

    blob: Blob
    start: int
    size: int
    checksum: Checksum | None = None


_new = tuple.__new__

T = TypeVar("T")


def _as_it_is(data: bytes) -> bytes:
    return data


class ChunkBatch(NamedTuple):
    """Chunks that exist: coordinates (n, d), stored sizes (-1 if the entry is broken), the shard's mtime, cookies."""

    coords: U64
    sizes: Sizes
    mtime_ns: int
    cookies: U64


class Occupancy(NamedTuple):
    """How many shards and chunks exist, and their bytes."""

    shards: int
    chunks: int
    stored_bytes: int
    shard_bytes: int


class _Page:
    """A decoded index page and the version of the shard it was read from; what checksums its chunks have."""

    __slots__ = ("blob", "checksum", "index", "version")

    def __init__(self, index: Index, blob: Blob, version: Version, checksum: Checksum | None = None) -> None:
        self.index, self.version, self.checksum = index, version, checksum
        # Weak: the store's own bound decides how many descriptors stay open, not the size of the index cache.
        self.blob = weakref.ref(blob)


class _Absent:
    """The page of a shard that does not exist, or that holds nothing."""


class _Damaged:
    def __init__(self, error: CorruptShardError) -> None:
        self.error = error


ABSENT = _Absent()


class ChunkStore:
    """The chunks of one layer of sharding. Thread-safe.

    Args:
        path: of the collection, for messages.
        index_ttl_s: how long a page, or the absence of a shard, is trusted.
        outer: of which the chunks are the shards of this layer, if it is not the outermost.
    """

    def __init__(
        self,
        path: str,
        format: ShardFormat,
        source: ShardSource,
        cache: ByteLRU,
        index_ttl_s: float = math.inf,
        outer: ChunkStore | None = None,
    ) -> None:
        self.path, self.format, self.source, self.outer = path, format, source, outer
        self._cache, self._ttl = cache, index_ttl_s
        self._id = next(_ids)

    @property
    def is_local(self) -> bool:
        """Whether the shards are files of this machine."""
        return self.source.is_local

    # ---- finding ----

    def locate(self, coords: Coords) -> StoredChunk | None:
        """Where the chunk lies; None if there is none. No request if the index page is cached.

        Raise CorruptShardError if the index cannot be read, or this chunk's entry cannot be true.
        """
        return self.at(self.format.place(coords), coords)

    def at(self, placement: Placement, coords: Coords) -> StoredChunk | None:
        """`locate`, for who knows where the chunk is placed."""
        shard, number, slot = placement
        page = self._cache.peek((self._id, shard, number))
        if type(page) is not _Page:
            page = self._page(shard, number)
            if page is None:
                return None
        try:
            extent = page.index.find(slot)
        except ValueError as e:
            raise CorruptShardError(self.path, self.source.key(shard), f"chunk {coords}: {e}", slot) from e
        if extent is None:
            return None
        start, size = extent
        blob = page.blob()
        if blob is None:
            blob = self._open(shard, number, page)
            if blob is None:
                return self.at(placement, coords)
        return _new(StoredChunk, (blob, start, size, page.checksum))  # as the constructor would, in half the time

    def stored(self, coords: Coords) -> StoredChunk | None:
        """Where the stored bytes lie of which the chunk is made."""
        return self.locate(coords)

    def _open(self, shard: int, number: int, page: _Page) -> Blob | None:
        """The shard's blob, if it is still what the page was read from; else the page is forgotten."""
        try:
            blob = self.source.open(shard)
            if page.version is None or blob.stat().version == page.version:
                page.blob = weakref.ref(blob)
                return blob
        except (FileNotFoundError, ValueError):  # gone, or can no longer be decoded: reading the page again tells
            pass
        self._cache.drop((self._id, shard, number))
        return None

    def _page(self, shard: int, number: int) -> _Page | None:
        key = (self._id, shard, number)
        page = self._cache.peek(key)
        if page is None:
            page = self._cache.get(key, lambda: self._load(shard, number))
        if page is ABSENT:
            return None
        if type(page) is _Damaged:
            raise page.error.with_traceback(None)  # raised many times, it must not collect the frames of all
        return page  # type: ignore[no-any-return]

    def _load(self, shard: int, number: int) -> tuple[object, int, float]:
        if self._ttl != math.inf:
            self._forget_shard(shard, number)  # page, root and time must be those of one version
        try:
            page = self._current_page(shard, number)
        except (IsADirectoryError, PermissionError, DanglingLinkError) as e:
            return _Damaged(self._unreadable(shard, e)), 1000, DAMAGE_TTL_S
        except (FileNotFoundError, NotADirectoryError):
            return ABSENT, 0, self._ttl
        except (ValueError, UnsupportedError) as e:
            return _Damaged(self._damage(shard, str(e))), 1000, DAMAGE_TTL_S
        if page is None:
            return ABSENT, 0, self._ttl
        return page, page.index.nbytes, self._ttl

    def _damage(self, shard: int, why: str) -> CorruptShardError:
        error = CorruptShardError(self.path, self.source.key(shard), why)
        log.warning("%s", error)
        return error

    def _unreadable(self, shard: int, error: OSError) -> CorruptShardError:
        """Not for remote stores, which may refuse an object for a while only."""
        if not self.is_local:
            raise error
        return self._damage(shard, f"should be a file that can be read, but {error.strerror}")

    def _current_page(self, shard: int, number: int) -> _Page | None:
        """If a shard is changed where it lies, its index may lead beyond the end that it had when it was opened."""
        try:
            return self._read_page(shard, number)
        except ValueError:
            if not self.is_local:
                raise
        self._forget_shard(shard, number)
        return self._read_page(shard, number)

    def _read_page(self, shard: int, number: int) -> _Page | None:
        blob = self.source.open(shard)
        if self.format.walk is not None:
            walked, told = self.format.walk(blob), blob.stat()
            self.stat(shard, blob)  # which is known now, and asked for soon
            return _Page(walked.checked(told.size), blob, told.version if self.is_local else None, walked.checksum)
        root = self._root(shard, blob, self.format.block_of(number))
        request = self.format.page_request(shard, number, root)
        if request is None:
            return None
        local = blob.fd >= 0 or isinstance(blob, BytesBlob)
        size = blob.stat().size if local else MAX_OBJECT
        if isinstance(request, ByteRange) and request.stop > size:
            raise ValueError(f"an index is said to lie at [{request.start}, {request.stop}), beyond its {size} bytes")
        raw = blob.read([request])[0]
        if isinstance(request, ByteRange) and len(raw) != request.stop - request.start:
            raise ValueError(f"an index at [{request.start}, {request.stop}) is cut off after {len(raw)} bytes")
        index = self.format.decode_page(shard, number, raw).checked(size)
        return _Page(index, blob, blob.stat().version if local else None)

    def _root(self, shard: int, blob: Blob, block: int) -> bytes | None:
        where = self.format.root_request(block)
        if where is None:
            return None
        key = (self._id, shard, "root", block)
        version = blob.stat().version if blob.fd >= 0 else None

        def load() -> tuple[tuple[bytes | None, Version], int, float]:
            try:
                data = blob.read([where])[0]
            except FileNotFoundError:
                return (None, version), 0, self._ttl
            whole = len(data) == where.stop - where.start
            return (data, version), len(data), self._ttl if whole else DAMAGE_TTL_S

        root, of = self._cache.get(key, load)
        if of != version:  # somebody else looked at it before or after it was replaced
            self._cache.drop(key)
            root = load()[0][0]
        if root is None:
            raise FileNotFoundError(self.source.key(shard))
        return root

    def forget(self, coords: Coords) -> None:
        """Drop what is cached of the chunk's shard, so that the next look sees what is there now."""
        shard, number, _ = self.format.place(coords)
        self._forget_shard(shard, number)
        # The page last: who began to read it before has the old shard open, and is not believed; others open the new.
        self._cache.drop((self._id, shard, number))

    def forget_existing(self) -> None:
        """Look anew which shards there are, when somebody wants to know."""
        self._cache.drop((self._id, "existing"))

    def forget_all(self) -> None:
        """Look anew at everything."""
        self._id = next(_ids)

    def _forget_shard(self, shard: int, number: int) -> None:
        self.source.reopen(shard)
        self._cache.drop((self._id, shard, "stat"))
        self._cache.drop((self._id, shard, "root", self.format.block_of(number)))

    def shard_of(self, coords: Coords) -> int:
        """The number of the shard in which a chunk lies, or would lie."""
        return self.format.place(coords)[0]

    def key_of(self, coords: Coords) -> str:
        return self.source.key(self.format.place(coords)[0])

    def stat(self, shard: int, blob: Blob | None = None) -> Stat:
        """Of the shard object, which `blob` is, if it is open already; at most one request."""

        def load() -> tuple[Stat, int, float]:
            try:
                return (blob or self.source.open(shard)).stat(), 100, self._ttl
            except ValueError as e:
                raise self._damage(shard, str(e)) from e

        return self._cache.get((self._id, shard, "stat"), load)

    # ---- reading ----

    def read(self, coords: Coords, part: ByteRange | None = None) -> bytes | None:
        """Stored bytes of a chunk, or `part` of them; None if there is no such chunk. Raise as `decoded`."""
        return self.decoded(coords, _as_it_is, part)

    def decoded(
        self,
        coords: Coords,
        decode: Callable[[bytes], T],
        part: ByteRange | None = None,
        most: float = math.inf,
    ) -> T | None:
        """What `decode` makes of the stored bytes of a chunk, or of `part` of them; None if there is no such chunk.

        A chunk of more than `most` stored bytes counts as damage.

        If the bytes contradict the index (too few, or `decode` raises ValueError), index and version are looked up
        again and the read is tried once more. Raise CorruptShardError if the shard is the same and still wrong,
        StaleShardError if it keeps changing.
        """
        before: Version = None
        for attempt in (1, 2):
            found = self.locate(coords)
            if found is None:
                return None
            try:
                if found.size > most:
                    raise ValueError(f"{found.size} stored bytes; {most} is the limit")
                return decode(self._read_found(found, part))
            except ValueError as e:
                why = f"chunk {coords}: {e}"
            shard, _, slot = self.format.place(coords)
            if attempt == 1:
                before = found.blob.stat().version
                self.forget(coords)
        after = self.stat(shard).version
        key = self.source.key(shard)
        if before != after:
            raise StaleShardError(f"{self.path or '/'}: {key}: changes while it is read")
        raise CorruptShardError(self.path, key, why, slot)

    def _read_found(self, found: StoredChunk, part: ByteRange | None) -> bytes:
        start, stop = found.start, found.start + found.size
        checksum = found.checksum if part is None else None
        if part is not None:
            start, stop = min(start + part.start, stop), min(start + part.stop, stop)
        elif checksum is not None:
            stop += checksum.size
        try:
            data = found.blob.read([ByteRange(start, stop)])[0]
        except FileNotFoundError as e:
            raise ValueError("its shard has gone") from e
        if len(data) != stop - start:
            raise ValueError(f"{stop - start} bytes expected at {start}, {len(data)} found")
        if checksum is not None:
            data, told = data[: found.size], data[found.size :]
            checksum.verify(data, told)
        return data

    def read_many(self, coords: Sequence[Coords], parts: Sequence[ByteRange]) -> list[bytes | Exception]:
        """Stored bytes of parts of several chunks, or why not; those of one shard are fetched together."""
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
            groups.setdefault(self.format.place(c)[0], []).append((i, found.blob, where))
        for members in groups.values():
            try:
                got = members[0][1].read([where for _, _, where in members])
            except OSError as e:
                for i, _, _ in members:
                    out[i] = e
                continue
            for (i, _, where), data in zip(members, got, strict=True):
                whole = len(data) == where.stop - where.start
                out[i] = data if whole else self._read_or_error(coords[i], parts[i])  # which retries, and explains
        return out

    def _read_or_error(self, coords: Coords, part: ByteRange) -> bytes | Exception:
        try:
            return self.read(coords, part) or b""
        except (CorruptShardError, StaleShardError, OSError) as e:
            return e

    # ---- listing ----

    def present(self, coords: U64) -> tuple[Bool, Sizes, Sizes]:
        """For (n, d) coordinates: does the chunk exist, its stored size, its shard's mtime (ns).

        The size is -1 where something is damaged: whether the chunk exists shows when it is opened.
        """
        n = len(coords)
        exists, sizes = np.zeros(n, np.bool_), np.zeros(n, np.int64)
        mtimes = np.zeros(n, np.int64)
        places = self.format.place_many(coords)
        homes = np.stack([places.shard, places.page], axis=1)
        for shard, number in sorted(set(map(tuple, homes.tolist()))):  # np.unique would load numpy.ma: 20 ms
            at = np.flatnonzero((homes[:, 0] == shard) & (homes[:, 1] == number))
            try:
                page = self._page(shard, number)
            except CorruptShardError:
                exists[at], sizes[at] = True, -1
                continue
            if page is None:
                continue
            found = _sizes_of(page.index, places.slot[at])
            at, found = at[found != NONE], found[found != NONE]
            exists[at], sizes[at] = True, found
            mtimes[at] = self._mtime_ns(shard) if len(at) else 0
        return exists, sizes, mtimes

    def row(self, place: Callable[[int], Placement], n: int) -> list[tuple[int, int, int]]:
        """`present` for the first `n` chunks of a row: last coordinate, size and mtime of those that exist.

        For short rows, where numpy's overhead would be most of the work. `place` is from `ShardFormat.row`.
        """
        out: list[tuple[int, int, int]] = []
        home: tuple[int, int] | None = None
        for last in range(n):
            shard, number, slot = place(last)
            if home != (shard, number):
                home = shard, number
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
        """What finds chunks in a page, and the shard's mtime."""
        try:
            page = self._page(shard, number)
        except CorruptShardError:
            return _unknown_chunk, 0
        if page is None:
            return _no_chunk, 0
        blob = page.blob()
        if blob is None or blob.fd < 0:
            return page.index.find, self._mtime_ns(shard)
        return page.index.find, blob.stat().mtime_ns

    def _mtime_ns(self, shard: int) -> int:
        try:
            return self.stat(shard).mtime_ns
        except (FileNotFoundError, CorruptShardError):  # its index is still known
            return 0

    def existing_shards(self) -> U64:
        """Numbers of the shards that exist, ascending; 8 bytes for each are kept."""

        return self._existing()[0]

    def _existing(self) -> tuple[U64, CorruptShardError | None]:
        def load() -> tuple[tuple[U64, CorruptShardError | None], int, float]:
            found, damage = self.source.existing()
            return (found, damage), found.nbytes, self._ttl if damage is None else DAMAGE_TTL_S

        return self._cache.get((self._id, "existing"), load)

    def scan(self, cookie: int) -> Iterator[ChunkBatch]:
        """All chunks, shard by shard and page by page, from behind `cookie`; at most 4,096 in a batch.

        Chunks of a damaged page are all there, with size -1, if they can be counted. If not, CorruptShardError is
        raised at the very end: who copies a directory must learn that some are missing.
        """
        (shards, damage), page_bits = self._existing(), self.format.page_bits
        if len(shards).bit_length() + page_bits + POSITION_BITS > 60:
            raise UnsupportedError(f"{self.path}: too many index pages to list the chunks in one directory")
        begin = cookie >> (page_bits + POSITION_BITS)
        page = cookie >> POSITION_BITS & ((1 << page_bits) - 1)
        skip = cookie & ((1 << POSITION_BITS) - 1)
        for ordinal in range(begin, len(shards)):
            shard = int(shards[ordinal])
            try:
                for number in self._pages(shard, page):
                    base = (ordinal << page_bits | number) << POSITION_BITS
                    try:
                        yield from self._scan_page(shard, number, base, skip if number == page else 0)
                    except CorruptShardError as e:
                        damage = e
            except CorruptShardError as e:
                damage = e
            page = skip = 0
        if damage is not None:
            raise damage.with_traceback(None)

    def _pages(self, shard: int, first: int) -> Iterator[int]:
        """The numbers of a shard's pages that hold entries, from `first` on."""
        for block in range(self.format.block_of(first), self.format.blocks):
            try:
                root = self._root(shard, self.source.open(shard), block)
                pages = self.format.nonempty_pages(block, root)
            except (IsADirectoryError, PermissionError, DanglingLinkError) as e:
                raise self._unreadable(shard, e) from e
            except (FileNotFoundError, NotADirectoryError):
                return
            except ValueError as e:
                raise self._damage(shard, str(e)) from e
            yield from (n for n in pages.tolist() if n >= first)

    def _scan_page(self, shard: int, number: int, base: int, skip: int) -> Iterator[ChunkBatch]:
        try:
            page = self._page(shard, number)
        except CorruptShardError:
            slots = self.format.candidates(shard)
            if slots is None:
                raise
            page = None  # each may or may not be there: all are listed, and opening one tells what is wrong
        else:
            if page is None:
                return
            index = page.index.arrays()
            slots = index.all_slots()
        mtime_ns = self._mtime_ns(shard) if page is not None else 0
        for start in range(skip, len(slots), 4096):
            stop = min(start + 4096, len(slots))
            coords, valid = self.format.coords(shard, number, slots[start:stop])
            at = np.arange(start, stop)[valid]
            if len(at):
                sizes = np.full(len(at), -1, np.int64) if page is None else _sizes(index, at)
                yield ChunkBatch(coords[valid], sizes, mtime_ns, np.uint64(base + 1) + at.astype(np.uint64))

    def occupancy(self) -> Occupancy:
        """Counts over all shards; reads every index once."""
        shards = self.existing_shards().tolist()
        chunks = stored = 0
        try:
            for batch in ChunkStore.scan(self, 0):
                chunks += len(batch.sizes)
                stored += int(np.maximum(batch.sizes, 0).sum())
        except CorruptShardError:
            pass  # logged when the page was read; `info` counts what can be read
        return Occupancy(len(shards), chunks, stored, sum(map(self._size, shards)))

    def _size(self, shard: int) -> int:
        try:
            return self.stat(shard).size
        except (FileNotFoundError, CorruptShardError):
            return 0

    def covering(self, key: str, offset: int) -> Coords | None:
        """The chunk whose stored bytes cover `offset` of the shard object of this name."""
        at = np.uint64(offset)
        for shard, number, index in self._indices(key):
            starts, sizes = index.starts.astype(np.uint64), index.sizes.astype(np.uint64)
            hits = np.flatnonzero((starts <= at) & (at - np.minimum(starts, at) < sizes))
            for coords in self._coords(shard, number, index, hits):
                return coords
        return None

    def _indices(self, key: str) -> Iterator[tuple[int, int, ShardIndex]]:
        """The pages of the shard object of this name."""
        shard = self.source.number(key)
        if shard is None:
            return
        for number in self._pages(shard, 0):
            page = self._page(shard, number)
            if page is not None:
                yield shard, number, page.index.arrays()

    def _coords(self, shard: int, number: int, index: ShardIndex, at: npt.NDArray[np.intp]) -> list[Coords]:
        """Of the entries of a page at these positions, but for those that no reader finds."""
        coords, valid = self.format.coords(shard, number, index.all_slots()[at])
        return [tuple(c) for c in coords[valid].tolist()]


_ids = itertools.count()


def _no_chunk(slot: int) -> None:
    """`Index.find` for a page that holds nothing."""


def _unknown_chunk(slot: int) -> None:
    """The same for a page that cannot be read."""
    raise ValueError(slot)


NONE = -2


def _sizes_of(index: Index, slots: U64) -> Sizes:
    """Stored sizes of the chunks in these slots; -1 where the entry is broken, NONE where there is no chunk."""
    if len(slots) <= FEW:
        return np.fromiter((_size_of(index, slot) for slot in slots.tolist()), np.int64, len(slots))
    arrays = index.arrays()
    at = arrays.positions(slots)
    sizes = np.full(len(slots), NONE, np.int64)
    sizes[at >= 0] = _sizes(arrays, at[at >= 0])
    return sizes


def _size_of(index: Index, slot: int) -> int:
    try:
        extent = index.find(slot)
    except ValueError:
        return -1
    return NONE if extent is None else extent[1]


def _sizes(index: ShardIndex, at: npt.NDArray[np.intp]) -> Sizes:
    sizes = index.sizes[at].astype(np.int64)
    if index.broken:
        bad = np.fromiter(index.broken, np.intp, len(index.broken))
        sizes[np.isin(at, bad)] = -1
    return sizes
