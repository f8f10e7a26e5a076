"""The shards of one collection: all layers of sharding, and where chunks are stored in the outermost shards."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from shardfs.model.collection import Located
from shardfs.model.errors import CorruptShardError
from shardfs.model.grid import ravel_many, unravel
from shardfs.shards.rewriting import StoredShard
from shardfs.storage.blob_views import SliceBlob

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardfs.model.collection import Collection
    from shardfs.model.values import U64, Coords
    from shardfs.shards.chunk_layer import ChunkBatch, ChunkLayer
    from shardfs.shards.chunk_store import ChunkStore
    from shardfs.shards.stored_chunk import StoredChunk
    from shardfs.storage.cache import ByteLRU


class CollectionShards:
    """The shards of a collection and its stored chunks. Coordinates are those of the innermost layer's grid.

    Args:
        path: the path of the collection, for messages.
        first: the first inode number of the collection, which distinguishes it in the cache.
        ttl_s: seconds for which answers of the store are cached.
    """

    def __init__(
        self, path: str, collection: Collection, chunks: ChunkStore, cache: ByteLRU, first: int, ttl_s: float
    ) -> None:
        self.path = path
        self.layers = chunks.layer.layers
        self._collection = collection
        self._chunks = chunks
        self._cache = cache
        self._first = first
        self._ttl = ttl_s

    @property
    def outermost(self) -> ChunkLayer:
        """The outermost layer, whose shards are objects of the store."""
        return self.layers[0]

    def number_of(self, coords: Coords) -> int:
        """Return the number of the outermost shard to which a chunk belongs, stored or not."""
        shard = self._chunks.layer.shard_of(coords)
        for outer in self.layers[-2::-1]:
            shard = outer.shard_of(unravel(shard, outer.format.grid))
        return shard

    def key(self, shard: int) -> str:
        """Return the path in the store of an outermost shard."""
        return self.outermost.source.key(shard)

    def may_be_all(self, shard: int, coords: Sequence[Coords]) -> bool:
        """Return whether an outermost shard has no more chunks than these and no index page without one of them.

        Costs no request if the pages of these chunks are cached.
        """
        index, place, count = self.outermost.index, self.outermost.format.place, 0
        touched = {place(c)[1] for c in coords}
        with suppress(OSError, CorruptShardError):
            for number in index.pages(shard, 0):
                page = index.page(shard, number) if number in touched else None
                count += len(page.index.arrays()) if page is not None else len(coords) + 1
                if count > len(coords):
                    return False
            return True
        return False

    def is_pair(self, coords: Coords) -> bool:
        """Return whether a chunk's outermost shard is stored as two files instead of one. One may be missing.

        Raise OSError if the store fails.
        """
        if self._collection.layers[0].pair is None:
            return False
        number = self.number_of(coords)

        def load() -> tuple[bool, int, float]:
            return self.outermost.source.is_pair(number), 1, self._ttl

        return self._cache.get((self._first, "pair", number), load)

    def is_empty(self) -> bool:
        """Return whether the collection has no shard."""
        return not self.outermost.source.exists()

    def usage(self) -> tuple[int, int]:
        """Return the live and the dead bytes of all shards, without damaged shards. Reads every index.

        Live bytes are those of chunks, dead ones those to which no index entry refers.
        """
        live = dead = 0
        for shard in self.outermost.existing_shards().tolist():
            with suppress(OSError, ValueError, CorruptShardError):  # `verify` reports damaged shards
                usage = StoredShard(self._collection, shard, self.outermost.source.stored(shard)).usage()
                live += usage.live
                dead += usage.dead
        return live, dead

    # ---- stored chunks ----

    def stored_in(self, shards: U64) -> Iterator[ChunkBatch]:
        """Yield all stored chunks in these outermost shards, shard by shard.

        Raise CorruptShardError as `ChunkLayer.scan`.
        """
        for outer in self.layers[:-1]:
            inner = [np.empty(0, np.uint64)]
            for batch in outer.scan(0, shards):
                for broken in batch.coords[batch.sizes < 0][:1].tolist():
                    outer.locate(tuple(broken))  # raises the error
                inner.append(ravel_many(batch.coords, outer.format.grid))
            shards = np.sort(np.concatenate(inner))
        yield from self._chunks.layer.scan(0, shards)

    def has(self, coords: Coords) -> bool:
        """Return whether a chunk is stored. Both files of a chunk (`Lead`) count as stored if the chunk is.

        Raise as `ChunkLayer.locate`. The answer may be from a cached index, unlike that of `stored_chunk`.
        """
        return self._stored(coords) is not None

    def stored_chunk(self, coords: Coords) -> SliceBlob | None:
        """Return the bytes of a chunk, still in the chunk codecs; None if it is absent, or an empty second file.

        A page of a remote shard that was cached before this mount replaced the shard is read again.
        Raise OSError or CorruptShardError if the index cannot be read.
        """
        chunk = self._stored(coords)
        if chunk is not None and not self._chunks.is_local and self._is_outdated(coords, chunk):
            self._chunks.invalidate_shard(coords)
            chunk = self._stored(coords)
        if chunk is not None and self._collection.lead is not None and coords[-1] == 1:
            chunk = self._second_file(coords)
        return None if chunk is None else SliceBlob(chunk.blob, chunk.start, chunk.size)

    def _is_outdated(self, coords: Coords, chunk: StoredChunk) -> bool:
        with suppress(FileNotFoundError):
            return chunk.blob.stat().version != self.outermost.index.stat(self.number_of(coords)).version
        return True

    def _stored(self, coords: Coords) -> StoredChunk | None:
        return self._chunks.layer.stored(coords if self._collection.lead is None else (*coords[:-1], 0))

    def _second_file(self, coords: Coords) -> StoredChunk | None:
        with suppress(CorruptShardError):  # a damaged chunk has no second file
            lead = self._chunks.layer.stored(coords)
            return lead if lead is not None and lead.size else None
        return None

    def locate(self, coords: Coords) -> Located | None:
        """Return the location of a chunk; None if the chunk is not stored but shown anyway (`Collection.filler`).

        Raise FileNotFoundError if it does not exist, and OSError or CorruptShardError if the index cannot be read.
        """
        chunk, transform = self._chunks.layer.stored(coords), self._collection.transform_of(coords)
        if chunk is None:
            if self._collection.filler is not None:
                return None
            raise FileNotFoundError(f"{self.path or '/'}: no chunk {coords}")
        codecs = (*self._collection.codecs, *([transform.name] if transform is not None else []))
        offset = chunk.start + max(chunk.blob.file_offset, 0)
        return Located(self.path, coords, self._chunks.layer.key_of(coords), offset, chunk.size, codecs)

    # ---- changes ----

    def invalidate(self, coords: Sequence[Coords], *, moved: bool) -> None:
        """Drop everything cached for the shards of these chunks. `moved`: other chunks of the shards may have moved."""
        place = self._chunks.layer.format.place
        for c in {place(c)[:2]: c for c in coords}.values():
            self._chunks.invalidate_shard(c)
        for layer in self.layers:
            layer.index.invalidate("existing", 0)
        if moved and not self._chunks.is_local:
            self._chunks.invalidate_all()

    def move(self, path: str, old: str, new: str) -> None:
        """Continue at `path`, after directory `old` of the store was renamed to `new`."""
        self.path = path
        for layer in self.layers:
            layer.index.path = path
            layer.source.move(old, new)
        self._chunks.invalidate_all()  # a lookup under the new name may have cached the absence of the shards
