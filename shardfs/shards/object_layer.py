"""`ObjectLayer`: chunks of a remote store that are objects of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardfs.model.blobs import Stat
from shardfs.shards.chunk_layer import ChunkLayer

if TYPE_CHECKING:
    from shardfs.model.values import U64, Bool, Sizes
    from shardfs.shards.shard_sources import StoreShards


class ObjectLayer(ChunkLayer):
    """Chunks of a remote store that are objects of their own.

    One listing returns all chunks of a directory. Without it, each lookup would cost a request.
    """

    source: StoreShards

    def present(self, coords: U64) -> tuple[Bool, Sizes, Sizes]:
        keys = [self.format.key(shard).rpartition("/") for shard in self.format.place_many(coords).shard.tolist()]
        parents = {parent for parent, _, _ in keys}
        if len(parents) != 1 or parents == {""}:  # the root directory may contain any number of other chunks
            return super().present(coords)
        listed = self.source.listed(*parents)
        names = [name for _, _, name in keys]
        unknown = Stat(-1, 0, None)
        stats = [listed.get(name) or unknown for name in names]
        exists = np.array([name in listed for name in names], np.bool_)
        sizes = np.array([stat.size for stat in stats], np.int64)
        return exists, sizes, np.array([stat.mtime_ns for stat in stats], np.int64)
