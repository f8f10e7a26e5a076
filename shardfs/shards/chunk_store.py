"""`ChunkStore`: a collection as a key-value store, which maps coordinates to attributes and bytes of shown chunks."""

from __future__ import annotations

import errno
import math
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from shardfs.codecs.transcode import ClippedBlockError
from shardfs.codecs.zlib_streams import MAX_STORED
from shardfs.model.attributes import Attributes, Extent
from shardfs.model.blobs import ByteRange
from shardfs.model.errors import CorruptShardError, ShardfsError, StaleShardError
from shardfs.shards.chunk_read_ahead import CollectionReadAhead
from shardfs.storage.cache import ByteLRU, WindowCache
from shardfs.storage.read_ahead import Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardfs.model.collection import Collection
    from shardfs.model.values import U64, AxisPosition, Coords, Sizes, Version
    from shardfs.shards.chunk_layer import ChunkLayer
    from shardfs.shards.stored_chunk import StoredChunk
    from shardfs.storage.read_ahead import ReadAhead

LONG_WORK = 4096
"""Stored chunks of this many bytes or more may take longer to decode than handing leadership to another thread."""

T = TypeVar("T")

_new = tuple.__new__


class ChunkStore:
    """The chunks of a collection. A read locates its chunk once. Thread-safe.

    Bytes are cached if they differ from the stored ones, or if the shards are remote.

    Args:
        layer: the innermost layer of sharding, which has the chunks.
        mtime_ns: modification time of filled chunks; any other chunk has that of its shard.
        shared: fetches chunks before readers ask for them; None if nothing is to be fetched ahead.

    Attributes:
        on_clipped: called with the positions of `ClippedBlockError`.
    """

    def __init__(
        self, collection: Collection, layer: ChunkLayer, cache: ByteLRU, mtime_ns: int, shared: ReadAhead | None
    ) -> None:
        self.layer = layer
        self.filler = collection.filler
        self.on_clipped: Callable[[set[AxisPosition]], None] = lambda positions: None
        self._collection = collection
        self._transform = collection.transform
        self._mtime_ns = mtime_ns
        self._cache = cache
        self._windows = WindowCache(cache)
        self._invalidations = 0
        self._ahead = (
            None if shared is None else CollectionReadAhead(shared, layer.index, partial(_piece_of, layer), layer.files)
        )

    @property
    def is_local(self) -> bool:
        """Whether the shards are files of this machine."""
        return self.layer.source.is_local

    # ---- attributes ----

    def attributes(self, number: int, coords: Coords, place: StoredChunk | None) -> Attributes:
        """Return the attributes of chunk file `number` at this location; its size is that of the shown bytes.

        `place` None: the chunk is not stored. Raise FileNotFoundError if it is not filled either, CorruptShardError if
        its size needs its damaged bytes, and OSError if the store fails.
        """
        if place is None:
            if self.filler is None:
                raise self._missing(coords)
            size = self.filler.sizes(np.array([coords], np.uint64)).item()
            return Attributes(number, False, len(self.filler.show(coords)) if size < 0 else size, self._mtime_ns)
        blob, start, size, _, _ = place
        is_raw = self._transform is None
        if blob.fd < 0:
            mtime_ns = self.layer.index.stat(self.layer.shard_of(coords)).mtime_ns
            return Attributes(number, False, size if is_raw else self._size(number, coords, size), mtime_ns)
        mtime_ns = blob.stat().mtime_ns
        if is_raw:
            # Twice as fast as the constructor. Every opened chunk passes here.
            return _new(Attributes, (number, False, size, mtime_ns, _new(Extent, (blob, start)), 0))
        return Attributes(number, False, self._size(number, coords, size), mtime_ns)

    def _size(self, number: int, coords: Coords, nbytes: int) -> int:
        size = -1 if nbytes < 0 else self.shown_size(coords, nbytes)
        return len(self._cache.get((number, "shown"), partial(self._load, coords))) if size < 0 else size

    def sizes(self, coords: U64, nbytes: Sizes) -> Sizes:
        """Return the shown sizes of chunks of `nbytes` stored bytes; -1 where damaged, or unknown before decoding."""
        return nbytes if self._transform is None else np.where(nbytes < 0, -1, self._transform.sizes(coords, nbytes))

    def shown_size(self, coords: Coords, nbytes: int) -> int:
        """Return the shown size of a chunk of `nbytes` stored bytes; -1 if it must be decoded to learn its size."""
        transform = self._collection.transform_of(coords)
        if transform is None:
            return nbytes
        return transform.sizes(np.array([coords], np.uint64), np.array([nbytes], np.int64)).item()

    # ---- one chunk ----

    def read(self, number: int, coords: Coords, offset: int, size: int) -> bytes | memoryview:
        """Return `size` shown bytes of a chunk from `offset` on; fewer only at its end.

        Raise FileNotFoundError if the chunk does not exist, and the errors of `stored_bytes`. `number` is the key of
        the cache.
        """
        key = number, "shown"
        data = None if self._transform is None else self._cache.peek(key)
        if data is None:
            before = self._invalidations
            place = self.layer.locate(coords)
            if place is None:
                return memoryview(self._filled(coords))[offset : offset + size]
            if self._transform is None:
                return self._read_unchanged(number, coords, ByteRange(offset, offset + size), place, before)
            data = self._cache.get(key, partial(self._load, coords, place, before))
        if offset + size >= len(data):
            self._cache.mark_read(key)
        return memoryview(data)[offset : offset + size]

    def _read_unchanged(
        self, number: int, coords: Coords, part: ByteRange, place: StoredChunk, before: int
    ) -> bytes | memoryview:
        """Return a part of a chunk that is shown as it is stored. Parts of remote chunks are read in windows."""
        size = max(min(part.stop, place.size) - part.start, 0)
        if self.is_local or (size == place.size and self._cache.reader_caches):
            return self._existing(coords, self.stored_bytes(coords, part, place))

        def fetch(window: ByteRange) -> bytes:
            return self._existing(coords, self.stored_bytes(coords, window, self._unless_outdated(place, before)))

        return self._windows.read(number, fetch, part.start, size, place.expires)

    def _load(
        self, coords: Coords, place: StoredChunk | None = None, before: int = 0
    ) -> tuple[bytes | memoryview, int, float]:
        """Return the shown bytes of a chunk as `ByteLRU.get` takes them."""
        place = self._existing(coords, self._unless_outdated(place, before) or self.layer.locate(coords))
        data = self.whole(coords, place)
        if data is None:
            raise self._missing(coords)
        return data, len(data), place.expires - monotonic()

    def _unless_outdated(self, place: StoredChunk | None, before: int) -> StoredChunk | None:
        """Return a location for bytes that are to be cached; None if it must be looked up again.

        It was looked up when the number of invalidations was `before`. If one has followed, bytes at this location are
        outdated. If one follows from now on, the cache does not keep them.
        """
        return place if before == self._invalidations else None

    def _filled(self, coords: Coords) -> bytes:
        """Return the bytes of a chunk that is not stored."""
        if self.filler is None:
            raise self._missing(coords)
        return self.filler.show(coords)

    def _existing(self, coords: Coords, item: T | None) -> T:
        if item is None:
            raise self._missing(coords)
        return item

    def stored_bytes(
        self, coords: Coords, part: ByteRange | None = None, place: StoredChunk | None = None
    ) -> bytes | None:
        """Return the stored bytes of a chunk, or `part` of them; None if the chunk is absent.

        Raise CorruptShardError if they are damaged, StaleShardError if the shard changed twice meanwhile, and OSError.

        Args:
            part: relative to the beginning of the chunk; None for all.
            place: what `ChunkLayer.locate` has returned just now.
        """

        def read(chunk: StoredChunk) -> bytes:
            ahead = self.fetched_ahead(coords, chunk, part)
            return chunk.read(part) if ahead is None else chunk.verified(ahead, part)

        return self._twice(coords, read, place)

    def whole(self, coords: Coords, place: StoredChunk | None = None) -> bytes | memoryview | None:
        """Return all shown bytes of a chunk, verified as far as its shard has a checksum; None if it is absent.

        No cache of bytes is used. Raise the errors of `stored_bytes`, and OSError (ESTALE) if the chunk is clipped.
        """
        transform = self._transform
        if transform is None:
            return self.stored_bytes(coords, None, place)

        def show(chunk: StoredChunk) -> bytes | memoryview:
            if chunk.size > MAX_STORED:
                raise ValueError(f"{chunk.size} stored bytes; {MAX_STORED} is the limit")
            ahead = self.fetched_ahead(coords, chunk)
            with self._cache.decoding.taken(chunk.size + transform.work(coords, chunk.size)):
                data = chunk.read() if ahead is None else chunk.verified(ahead)
                if len(data) >= LONG_WORK:
                    self._cache.waiting()
                try:
                    return transform.show(coords, data)
                except ClippedBlockError as e:
                    self.on_clipped(e.positions)
                    raise OSError(errno.ESTALE, str(e)) from e  # the reader may know another size

        return self._twice(coords, show, place)

    def _twice(self, coords: Coords, read: Callable[[StoredChunk], T], place: StoredChunk | None) -> T | None:
        """Return what `read` makes of the location of a chunk; None if the chunk is absent.

        If the bytes contradict the index (too few, or `read` raises ValueError), the index is read again and the read
        is retried once, as it is if a remote shard was replaced. Raise CorruptShardError if the shard is unchanged and
        still wrong, and StaleShardError if it changed between the two attempts.
        """
        layer = self.layer
        before: Version = None
        for attempt in (1, 2):
            place = place or layer.locate(coords)
            if place is None:
                return None
            try:
                return read(place)
            except StaleShardError:
                if attempt == 2:
                    raise
                why = ""
            except ValueError as e:
                why = f"chunk {coords}: {e}"
            if attempt == 1:
                before, place = place.blob.stat().version, None
                self.invalidate_shard(coords)
        shard, _, slot = layer.format.place(coords)
        key = layer.source.key(shard)
        if before != layer.index.stat(shard).version:
            raise StaleShardError(f"{layer.index.path or '/'}: {key}: changed twice during one read; read it again")
        raise CorruptShardError(layer.index.path, key, why, slot)

    def fetched_ahead(self, coords: Coords, place: StoredChunk, part: ByteRange | None = None) -> bytes | None:
        """Return the bytes of `StoredChunk.range` if they were fetched already, else None. Notes the access."""
        if self._ahead is None:
            return None
        return self._ahead.read(coords, place.range(), place.range(part), self.layer.index.loaded(place))

    def show(self, key: object, coords: Coords, read: Callable[[], bytes]) -> bytes | memoryview:
        """Return the shown bytes of a chunk that `read` returns from another place than a shard, and cache them.

        `key` stands for these bytes. Raise ValueError, with the reason, if they cannot be this chunk.
        """

        def load() -> tuple[bytes | memoryview, int, float]:
            transform, data = self._collection.transform_of(coords), read()
            self._cache.waiting()
            if transform is None:
                return data, len(data), math.inf
            with self._cache.decoding.taken(transform.work(coords, len(data))):
                chunk = transform.show(coords, data)
            return chunk, len(chunk), math.inf

        return self._cache.get(key, load)

    # ---- several chunks ----

    @property
    def can_read_many(self) -> bool:
        """Whether to read several chunks together: they are shown unchanged and their shards are not local files."""
        return self._transform is None and not self.is_local

    def read_many(self, coords: Sequence[Coords], parts: Sequence[ByteRange]) -> list[bytes | Exception]:
        """Return parts of several chunks that are shown unchanged, in order, or the error of each.

        Chunks of the same shard are fetched together.
        """
        out: list[bytes | Exception] = []
        for c, part, data in zip(coords, parts, self._fetched(coords, parts), strict=True):
            if data is not None:
                out.append(data)
            else:
                out.append(self._missing(c) if self.filler is None else self.filler.show(c)[part.start : part.stop])
        return out

    def whole_many(self, coords: Sequence[Coords]) -> list[bytes | memoryview | Exception | None]:
        """Return `whole` of several chunks, or its errors. Chunks of the same remote shard are fetched together."""
        if self.is_local or self.layer.files > 1:
            return [_or_error(self.whole, c) for c in coords]
        pieces = self._fetched(coords, [None] * len(coords))
        return [self._shown_or_error(c, data) for c, data in zip(coords, pieces, strict=True)]

    def _shown_or_error(self, coords: Coords, data: bytes | Exception | None) -> bytes | memoryview | Exception | None:
        transform = self._transform
        if data is None or (transform is None and isinstance(data, bytes)):
            return data
        if transform is not None and isinstance(data, bytes):
            size = len(data)
            with suppress(ValueError), self._cache.decoding.taken(size + transform.work(coords, size)):
                return transform.show(coords, data)
        return _or_error(self.whole, coords)  # reads it again, and raises a detailed error

    def _fetched(self, coords: Sequence[Coords], parts: Sequence[ByteRange | None]) -> list[bytes | Exception | None]:
        """Return the stored bytes of chunks or parts, None for an absent one, or the error.

        Bytes of the same shard are fetched together.
        """
        out: list[bytes | Exception | None] = [None] * len(coords)
        groups: dict[int, list[tuple[int, StoredChunk]]] = {}
        for i, c in enumerate(coords):
            place = _or_error(self.layer.locate, c)
            if isinstance(place, Exception):
                out[i] = place
            elif place is not None:
                groups.setdefault(id(place.blob), []).append((i, place))  # decoded chunks are blobs, too
        for members in groups.values():
            try:
                pieces = members[0][1].blob.read([place.range(parts[i]) for i, place in members])
            except StaleShardError:
                pieces = [b""] * len(members)  # a replaced shard is read with its new index
            except OSError as e:
                for i, _ in members:
                    out[i] = e
                continue
            for (i, place), data in zip(members, pieces, strict=True):
                try:
                    out[i] = place.verified(data, parts[i])
                except ValueError:  # retries, and raises a detailed error
                    out[i] = _or_error(partial(self.stored_bytes, part=parts[i]), coords[i])
        return out

    # ---- changes ----

    @property
    def is_cached(self) -> bool:
        """Whether bytes of chunks are cached, so that a new version needs `invalidate`."""
        return not (self._transform is None and self.is_local)

    def invalidate(self, number: int, size: int = MAX_STORED) -> None:
        """Drop the cached bytes of a chunk of at most `size` stored bytes.

        Call this after the pages, from which these bytes are computed.
        """
        self._invalidations += 1
        self._cache.invalidate((number, "shown"))
        self._windows.invalidate(number, size)

    def invalidate_shard(self, coords: Coords) -> None:
        """Drop everything cached for the chunk's shard, so that the next lookup reads the current shard."""
        self.layer.invalidate_shard(coords)
        self._invalidate_ahead()

    def invalidate_all(self) -> None:
        """Drop what is cached of all indices of this collection."""
        for layer in self.layer.layers:
            layer.index.invalidate_all()
        self._invalidate_ahead()

    def _invalidate_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.invalidate()

    def _missing(self, coords: Coords) -> FileNotFoundError:
        return FileNotFoundError(f"{self.layer.index.path or '/'}: no chunk {coords}")


def _or_error(read: Callable[[Coords], T], coords: Coords) -> T | Exception:
    """Return what `read` returns of a chunk, or the error that it raises."""
    try:
        return read(coords)
    except (ShardfsError, OSError) as e:
        return e


def _piece_of(layer: ChunkLayer, coords: Coords) -> Piece | None:
    """Return where a chunk is, for fetching it ahead; None if it is absent."""
    place = layer.locate(coords)
    return None if place is None else Piece(layer.shard_of(coords), place.blob, place.range())
