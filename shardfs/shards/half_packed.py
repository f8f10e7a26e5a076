"""Arrays that are packed or unpacked in place: each chunk is in a shard, in a file of its own, or in both."""

from __future__ import annotations

import errno
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from shardfs.model.blobs import whole
from shardfs.model.collection import ShardSource
from shardfs.model.errors import CorruptShardError, StaleShardError
from shardfs.model.grid import ravel, ravel_many, renamed, unravel, unravel_many
from shardfs.shards.byte_layouts.unsharded import Unsharded
from shardfs.shards.shard_sources import NestedShards, StoreShards
from shardfs.storage.blob_views import BytesBlob
from shardfs.storage.in_place import FILES, HERE, places

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardfs.model.blobs import Blob
    from shardfs.model.collection import Collection, Layer
    from shardfs.model.values import U64, Coords
    from shardfs.shards.chunk_store import ChunkStore
    from shardfs.shards.wrapping import DecodedShards
    from shardfs.storage.in_place import InPlaceStore
    from shardfs.storage.pack_state import PackState

T = TypeVar("T")

MAX_TRIES = 5
"""How often a chunk is looked for if the job reaches another state meanwhile."""


class HalfPacked(Unsharded):
    """A `ShardFormat` in which every chunk is a shard of its own, wherever the job has it now.

    Chunks have the coordinates of the sharded array. A chunk has the same name in both arrays. Its file has the bytes
    that a mount of the sharded array shows.

    Args:
        plain, sharded: the array with a file for each chunk, and with shards.
        is_sharded: returns whether the source has the sharded array, for the time after the job.
    """

    def __init__(self, plain: Collection, sharded: Collection, is_sharded: Callable[[], bool]) -> None:
        super().__init__(sharded.layers[-1].format.grid, self._file_key, self._coords_of_file)
        self.plain, self.sharded, self.is_sharded = plain, sharded, is_sharded
        self._files = plain.layers[0].format

    def file(self, coords: Coords) -> int:
        """Return the number of a chunk in the plain array."""
        cells = renamed(self.sharded.names, self.plain.names, np.array([coords], np.uint64))
        return ravel(tuple(cells[0].tolist()), self._files.grid)

    def numbers(self, files: U64) -> U64:
        """Return the numbers of chunks by their numbers in the plain array."""
        stored = unravel_many(files, self._files.grid)
        return ravel_many(renamed(self.plain.names, self.sharded.names, stored), self.grid)

    def _file_key(self, coords: Coords) -> str:
        return self._files.key(self.file(coords))

    def _coords_of_file(self, key: str) -> Coords | None:
        file = self._files.shard_of(key)
        return None if file is None else unravel(self.numbers(np.array([file], np.uint64)).item(), self.grid)

    def shard_of(self, key: str) -> int | None:
        """Return the number of the chunk with this file; for the name of a shard, any number."""
        found, layer = super().shard_of(key), self.sharded.layers[0]
        return layer.format.shard_of(layer.single_name(key)) if found is None else found


class HalfPackedShards(ShardSource):
    """The chunks of an array during an in-place job, each as a shard.

    Args:
        files: the chunk files, by their numbers in the plain array.
        shards: the chunks in shards, by the place of the shards.
    """

    is_local = True

    def __init__(
        self,
        store: InPlaceStore,
        format: HalfPacked,
        layer: Layer,
        files: StoreShards,
        shards: Mapping[str, ChunkStore],
        decoded: DecodedShards,
    ) -> None:
        self._store, self._format, self.layer, self._files = store, format, layer, files
        self._after: tuple[str] | None = None  # where chunks are after the job, which may have been aborted
        self._stores = shards
        self._shards = {place: NestedShards(chunks, layer, decoded) for place, chunks in shards.items()}

    def key(self, shard: int) -> str:
        """Return the path of the file that has the chunk now."""
        coords = unravel(shard, self._format.grid)
        for place in self._places(self._store.state()):
            with suppress(CorruptShardError, OSError, ValueError):
                if place != FILES and self._in_shard(place, coords) is not None:
                    return self._stores[place].key_of(coords)
        return self._files.key(self._format.file(coords))

    def number(self, key: str) -> int | None:
        file = self._files.number(key)
        return None if file is None else self._format.numbers(np.array([file], np.uint64)).item()

    def unwrap(self, shard: int, stored: Blob) -> Blob:
        return stored

    def stored(self, shard: int) -> Blob:
        coords = unravel(shard, self._format.grid)

        def search(among: Sequence[str]) -> Blob | None:
            blobs = (self._in_file(coords) if place == FILES else self._in_shard(place, coords) for place in among)
            return next(filter(None, blobs), None)

        found = self._in_one_state(search)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "no such chunk", str(coords))
        return found

    def _in_one_state(self, search: Callable[[Sequence[str]], T]) -> T:
        """Return what `search` finds in the places where chunks may be. Search again if the job has changed these."""
        for _ in range(MAX_TRIES):
            state = self._store.state()
            found = search(self._places(state))
            if self._store.state() is state:
                return found
        raise StaleShardError("the in-place job reached several states during one search; try again")

    def _places(self, state: PackState | None) -> Sequence[str]:
        if state is not None:
            self._after = None
            return places(state)
        self._after = self._after or ((HERE if self._format.is_sharded() else FILES),)
        return self._after

    def _in_file(self, coords: Coords) -> Blob | None:
        try:
            blob = self._files.stored(self._format.file(coords))
        except (FileNotFoundError, NotADirectoryError):
            return None
        transform = self._format.sharded.transform_of(coords)
        return blob if transform is None else BytesBlob(transform.store(coords, whole(blob)), blob)

    def _in_shard(self, place: str, coords: Coords) -> Blob | None:
        chunks = self._stores[place]
        shard, page, _ = chunks.format.place(coords)
        if chunks.index.cached_page(shard, page) is None:
            chunks.forget(coords)  # a shard that was absent may have appeared
        try:
            blob = self._shards[place].stored(ravel(coords, self._format.grid))
        except FileNotFoundError:
            return None
        # Without a descriptor, the blob would keep the whole decoded shard in memory.
        return blob if blob.fd >= 0 else BytesBlob(whole(blob), blob)

    def existing(self) -> tuple[U64, CorruptShardError | None]:
        """Return `ShardSource.existing`, with 8 bytes of memory for each chunk."""

        def search(among: Sequence[str]) -> tuple[U64, CorruptShardError | None]:
            found, damage = zip(*map(self._listed, among), strict=True)
            return np.unique(np.concatenate(found)), next(filter(None, damage), None)

        return self._in_one_state(search)

    def _listed(self, place: str) -> tuple[U64, CorruptShardError | None]:
        if place == FILES:
            files, faults = self._files.survey()
            return self._format.numbers(files), next(iter(faults), None)
        self._stores[place].forget_all()  # other shards exist now
        return self._shards[place].existing()

    def reopen(self, shard: int) -> None:
        for chunks in self._stores.values():
            chunks.forget(unravel(shard, self._format.grid))
