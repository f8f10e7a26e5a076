"""`LeadLayer`: chunks with bytes before them that are files of their own, such as mesh fragments."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardfs.codecs.zlib_streams import MAX_STORED
from shardfs.model.errors import CorruptShardError
from shardfs.shards.chunk_layer import ChunkBatch, ChunkLayer
from shardfs.shards.shard_indices import DAMAGE_TTL_S, ShardIndices
from shardfs.shards.stored_chunk import StoredChunk
from shardfs.storage.blob_views import BytesBlob

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardfs.model.collection import Lead
    from shardfs.model.shard_format import Index
    from shardfs.model.values import U64, Coords, Version
    from shardfs.storage.byte_budget import ByteBudget


class _Manifest(NamedTuple):
    """What a chunk with a lead contains: its decoded bytes, if a transform applies, and the size of the lead.

    `origin` distinguishes this chunk from a later version. `lead` is an error message if the size is invalid.
    """

    origin: tuple[int, int, Version]
    data: bytes
    lead: int | str


def _origin(chunk: StoredChunk) -> tuple[int, int, Version]:
    # The version of a remote shard would cost a request; instead, `index_ttl` limits how long a manifest is cached.
    return chunk.start, chunk.size, chunk.blob.stat().version if chunk.blob.fd >= 0 else None


class LeadLayer(ChunkLayer):
    """Chunks that are two files each: the second is the bytes right before the first in the shard (`Lead`).

    Args:
        decoding: the bytes that decoding of the first files may use.
    """

    files = 2

    def __init__(self, lead: Lead, index: ShardIndices, decoding: ByteBudget) -> None:
        super().__init__(index)
        self._decoding = decoding
        self._lead = lead
        root = index.format.root_request()
        self._floor = 0 if root is None else root.stop  # the end of the index's root, before which no chunk can be

    def locate(self, coords: Coords) -> StoredChunk | None:
        chunk = super().locate(coords)
        if chunk is None or (coords[-1] == 0 and self._lead.transform is None):
            return chunk
        manifest = self._manifest(coords, chunk)
        if coords[-1] == 0:
            return StoredChunk(BytesBlob(manifest.data, chunk.blob), 0, len(manifest.data), None, chunk.expires)
        if isinstance(manifest.lead, str):
            raise self._damage_of(coords, manifest.lead)
        return StoredChunk(chunk.blob, chunk.start - manifest.lead, manifest.lead, None, chunk.expires)

    def _manifest(self, coords: Coords, chunk: StoredChunk) -> _Manifest:
        def load() -> tuple[_Manifest, int, float]:
            return self._load(coords, chunk)

        manifest = self.index.cached("lead", coords[0], load)
        if manifest.origin != _origin(chunk):
            self.index.invalidate("lead", coords[0])
            manifest = self.index.cached("lead", coords[0], load)
        return manifest

    def _load(self, coords: Coords, chunk: StoredChunk) -> tuple[_Manifest, int, float]:
        transform = self._lead.transform
        try:
            if chunk.size > MAX_STORED:
                raise ValueError(f"{chunk.size} bytes; {MAX_STORED} is the limit")
            with self._decoding.taken(chunk.size + (0 if transform is None else transform.work(coords, chunk.size))):
                data = chunk.read()
                data = data if transform is None else bytes(transform.show(coords, data))
        except ValueError as e:
            raise self._damage_of(coords, str(e)) from e
        lead = self._lead_of(data, chunk.start)
        cached, ttl_s = b"" if transform is None else data, self.index.ttl_s if isinstance(lead, int) else DAMAGE_TTL_S
        return _Manifest(_origin(chunk), cached, lead), len(cached), ttl_s

    def _lead_of(self, data: bytes, start: int) -> int | str:
        """Return the size of the lead, or an error message if it is invalid."""
        try:
            size = self._lead.size(data)
        except ValueError as e:
            return str(e)
        if size > start - self._floor:
            return f"{size} bytes expected before it, but it begins at {start}, behind an index of {self._floor}"
        return size

    def stored(self, coords: Coords) -> StoredChunk | None:
        return super().locate(coords) if coords[-1] == 0 else self.locate(coords)

    def covering(self, key: str, offset: int) -> Coords | None:
        return super().covering(key, offset) or self._leading(key, offset)

    def _leading(self, key: str, offset: int) -> Coords | None:
        """Return the second file of the next chunk in the shard, if that file begins at `offset` or before."""
        following = []
        for shard, number, index in self._indices(key):
            later = np.flatnonzero(index.starts > offset)
            if len(later):
                nearest = later[index.starts[later].argmin()]
                cells = self._coords(shard, number, index, np.array([nearest]))
                following += [(index.starts[nearest].item(), cell[0]) for cell in cells]
        if not following:
            return None
        second = (min(following)[1], 1)
        place = self.locate(second)
        return second if place is not None and place.start <= offset else None

    def invalidate_shard(self, coords: Coords) -> None:
        super().invalidate_shard(coords)
        self.index.invalidate("lead", coords[0])

    def _report_resized(self, shard: int, number: int, before: Index, after: Index) -> None:
        """Report both files of all chunks of the page: only a chunk contains the size of its second file."""
        coords, valid = self.format.coords(shard, number, before.arrays().all_slots())
        coords = np.repeat(coords[valid], 2, axis=0)
        coords[1::2, -1] = 1
        self.on_resize(coords, np.full(len(coords), MAX_STORED))

    def _damage_of(self, coords: Coords, why: str) -> CorruptShardError:
        shard, _, slot = self.format.place(coords)
        return CorruptShardError(self.index.path, self.source.key(shard), f"chunk {coords[0]}: {why}", slot)

    def scan(self, cookie: int, only: U64 | None = None) -> Iterator[ChunkBatch]:
        """Yield both files of each chunk, one after the other, as `ChunkLayer.scan`; up to 2 * `BATCH` together.

        The second has size -1, because only the chunk contains its size. If the chunk has a transform, so has the
        first. Here, -1 does not mean that the index entry is broken.
        """
        whole, skip = divmod(cookie, 2)
        for batch in super().scan(whole, only):
            n = len(batch.sizes)
            coords = np.repeat(batch.coords, 2, axis=0)
            coords[1::2, -1] = 1
            sizes = np.full(2 * n, -1, np.int64)
            if self._lead.transform is None:
                sizes[::2] = batch.sizes
            cookies = np.repeat(batch.cookies, 2) * np.uint64(2)
            cookies[::2] -= np.uint64(1)
            yield ChunkBatch(coords[skip:], sizes[skip:], batch.mtime_ns, cookies[skip:])
            skip = 0
