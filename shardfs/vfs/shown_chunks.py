"""Attributes and bytes of a collection's chunks, as the tree shows them."""

from __future__ import annotations

import errno
import math
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np

from shardfs.codecs.transcode import ClippedBlockError
from shardfs.codecs.zlib_streams import MAX_STORED
from shardfs.model.attributes import Attributes, Extent
from shardfs.model.blobs import ByteRange
from shardfs.model.errors import ShardfsError
from shardfs.storage.cache import ByteLRU, WindowCache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from shardfs.model.collection import Collection
    from shardfs.model.values import U64, Coords, Sizes
    from shardfs.shards.chunk_store import ChunkStore
    from shardfs.shards.shard_indices import StoredChunk

LONG_WORK = 4096
"""Stored chunks of this many bytes or more may take longer to decode than handing leadership to another thread."""

WHOLE = ByteRange(0, 1 << 62)

_new = tuple.__new__


class ShownChunks:
    """The chunks of a collection by coordinates and inode number. Caches the bytes that differ from the stored ones.

    Args:
        path: the path of the collection, for messages.
        mtime_ns: modification time of filled chunks; any other chunk has that of its shard.

    Attributes:
        on_clipped: called with the positions of `ClippedBlockError`.
    """

    def __init__(self, path: str, collection: Collection, chunks: ChunkStore, cache: ByteLRU, mtime_ns: int) -> None:
        self.path, self._chunks, self._mtime_ns = path, chunks, mtime_ns
        self._transform, self.filler, self._transform_of = (
            collection.transform,
            collection.filler,
            collection.transform_of,
        )
        self.on_clipped: Callable[[set[tuple[int, int]]], None] = lambda positions: None
        self._raw = collection.transform is None
        self._cache, self._windows = cache, WindowCache(cache)

    # ---- attributes ----

    def attributes(self, number: int, coords: Coords, found: StoredChunk | None) -> Attributes:
        """Return the attributes of a chunk that is stored at `found`. Raise FileNotFoundError if it does not exist."""
        if found is None:
            if self.filler is None:
                raise self._missing(coords)
            size = self.fill_sizes(np.array([coords], np.uint64)).item()
            return Attributes(number, False, len(self.filler.show(coords)) if size < 0 else size, self._mtime_ns)
        blob, start, size, _ = found
        if blob.fd < 0:
            mtime_ns = self._chunks.stat(self._chunks.shard_of(coords)).mtime_ns
            return Attributes(number, False, size if self._raw else self._size(number, coords, size), mtime_ns)
        mtime_ns = blob.stat().mtime_ns
        if self._raw:
            # Twice as fast as the constructor. Every opened chunk passes here.
            return _new(Attributes, (number, False, size, mtime_ns, _new(Extent, (blob, start)), 0))
        return Attributes(number, False, self._size(number, coords, size), mtime_ns)

    def _size(self, number: int, coords: Coords, stored: int) -> int:
        known = -1 if stored < 0 else self.shown_size(coords, stored)
        return len(self._transformed(number, coords)) if known < 0 else known

    def sizes(self, coords: U64, stored: Sizes) -> Sizes:
        """Return shown sizes; -1 where the chunk is damaged or must be decoded to learn its size."""
        return stored if self._transform is None else np.where(stored < 0, -1, self._transform.sizes(coords, stored))

    def fill_sizes(self, coords: U64) -> Sizes:
        """Return the shown sizes of chunks that are not stored."""
        return np.zeros(len(coords), np.int64) if self.filler is None else self.filler.sizes(coords)

    # ---- bytes ----

    def read(self, number: int, coords: Coords, offset: int, size: int) -> bytes | memoryview:
        """Return bytes of a chunk; fewer than `size` only at its end."""
        if self.filler is not None and self._chunks.locate(coords) is None:
            return memoryview(self.filler.show(coords))[offset : offset + size]
        if not self._raw:
            shown = memoryview(self._transformed(number, coords))
            if offset + size >= len(shown):
                self._cache.mark_read((number, "shown"))
            return shown[offset : offset + size]
        if self._chunks.is_local:
            return self._part(coords, ByteRange(offset, offset + size))
        found = self._chunks.locate(coords)
        if found is None:
            raise self._missing(coords)
        size = min(size, max(found.size - offset, 0))
        if size == found.size and self._cache.reader_caches:
            return self._part(coords, ByteRange(0, size), found)
        return self._windows.read(number, partial(self._part, coords), offset, size, self._chunks.index.expires(coords))

    def _part(self, coords: Coords, part: ByteRange, found: StoredChunk | None = None) -> bytes:
        data = self._chunks.read(coords, part, found)
        if data is None:
            raise self._missing(coords)
        return data

    def _transformed(self, number: int, coords: Coords) -> bytes | memoryview:
        key = number, "shown"
        return self._cache.peek(key) or self._cache.get(key, partial(self._load, coords))

    def show(self, key: object, coords: Coords, read: Callable[[], bytes]) -> bytes | memoryview:
        """Return the shown bytes of a chunk that `read` returns from another place than a shard, and cache them.

        `key` stands for these bytes. Raise ValueError, with the reason, if they cannot be this chunk.
        """

        def load() -> tuple[bytes | memoryview, int, float]:
            transform, stored = self._transform_of(coords), read()
            self._cache.waiting()
            if transform is None:
                return stored, len(stored), math.inf
            with self._cache.decoding.taken(transform.work(coords, len(stored))):
                shown = transform.show(coords, stored)
            return shown, len(shown), math.inf

        return self._cache.peek(key) or self._cache.get(key, load)

    def shown_size(self, coords: Coords, stored: int) -> int:
        """Return the shown size of a chunk of `stored` bytes; -1 if it must be decoded to learn its size."""
        transform = self._transform_of(coords)
        if transform is None:
            return stored
        return transform.sizes(np.array([coords], np.uint64), np.array([stored], np.int64)).item()

    def whole(self, coords: Coords) -> bytes | memoryview | None:
        """Return all bytes of a chunk, verified as far as its shard has a checksum, from no cache; None if absent."""

        def show(stored: bytes) -> bytes | memoryview:
            if len(stored) >= LONG_WORK:
                self._cache.waiting()
            try:
                return stored if self._transform is None else self._transform.show(coords, stored)
            except ClippedBlockError as e:
                self.on_clipped(e.positions)
                raise OSError(errno.ESTALE, str(e)) from e  # the reader may know another size

        if self._raw:
            return self._chunks.decoded(coords, show)
        return self._chunks.decoded(coords, show, most=MAX_STORED, room=partial(self._room, coords))

    def _room(self, coords: Coords, stored: int) -> AbstractContextManager[object]:
        """Return the room for a chunk of `stored` bytes while it is read and decoded."""
        work = stored if self._transform is None else stored + self._transform.work(coords, stored)
        return self._cache.decoding.taken(work)

    def whole_many(self, coords: Sequence[Coords]) -> list[bytes | memoryview | Exception | None]:
        """Return `whole` of several chunks, or its errors. Chunks of the same remote shard are fetched together."""
        if self._chunks.is_local or self._chunks.files > 1:
            return [self._whole_or_error(c) for c in coords]
        stored = self._chunks.read_many(coords, [WHOLE] * len(coords))
        return [self._shown_or_error(c, data) for c, data in zip(coords, stored, strict=True)]

    def _whole_or_error(self, coords: Coords) -> bytes | memoryview | Exception | None:
        try:
            return self.whole(coords)
        except (ShardfsError, OSError) as e:
            return e

    def _shown_or_error(self, coords: Coords, stored: bytes | Exception) -> bytes | memoryview | Exception | None:
        if isinstance(stored, bytes):
            found = self._chunks.locate(coords)
            if found is not None and found.checksum is None and found.size == len(stored):
                with suppress(ValueError), self._room(coords, len(stored)):
                    return stored if self._transform is None else self._transform.show(coords, stored)
        return self._whole_or_error(coords)  # reads it again, and raises a detailed error

    def _load(self, coords: Coords) -> tuple[bytes | memoryview, int, float]:
        self._chunks.locate(coords)  # loads the index page
        expires = self._chunks.index.expires(coords)
        data = self.whole(coords)
        if data is None:
            raise self._missing(coords)
        return data, len(data), expires - monotonic()

    @property
    def can_read_many(self) -> bool:
        """Whether to read several chunks together: they are shown unchanged and their shards are not local files."""
        return self._raw and not self._chunks.is_local

    def read_many(self, coords: Sequence[Coords], parts: Sequence[ByteRange]) -> list[bytes | Exception]:
        """Read parts of several chunks. Chunks of the same shard are fetched together."""
        found = self._chunks.read_many(coords, parts)
        if self.filler is not None:
            for i, data in enumerate(found):
                if isinstance(data, FileNotFoundError):
                    found[i] = self.filler.show(coords[i])[parts[i].start : parts[i].stop]
        return found

    @property
    def is_cached(self) -> bool:
        """Whether bytes of chunks are cached, so that a new version needs `invalidate`."""
        return not (self._raw and self._chunks.is_local)

    def invalidate(self, number: int, size: int = MAX_STORED) -> None:
        """Drop the cached bytes of a chunk of at most `size` stored bytes.

        Call this after the pages, from which these bytes are computed.
        """
        self._cache.drop((number, "shown"))
        self._windows.invalidate(number, size)

    def _missing(self, coords: Coords) -> FileNotFoundError:
        return FileNotFoundError(f"{self.path or '/'}: no chunk {coords}")
