"""`open_chunks`: the one place that assembles layers, their sources and indices to the chunks of a collection."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardfs.shards.byte_layouts.unsharded import Unsharded
from shardfs.shards.chunk_layer import ChunkLayer
from shardfs.shards.chunk_store import ChunkStore
from shardfs.shards.lead_layer import LeadLayer
from shardfs.shards.object_layer import ObjectLayer
from shardfs.shards.shard_indices import ShardIndices
from shardfs.shards.shard_sources import NestedShards, StoreShards

if TYPE_CHECKING:
    from shardfs.model.collection import Collection, Layer, ShardSource
    from shardfs.storage.cache import ByteLRU
    from shardfs.storage.store import Store


def open_chunks(
    store: Store,
    directory: str,
    path: str,
    collection: Collection,
    index_cache: ByteLRU,
    chunk_cache: ByteLRU,
    index_ttl_s: float = math.inf,
    mtime_ns: int = 0,
) -> ChunkStore:
    """Return the chunks of a collection whose outermost shards are in `directory` of the store. Reads nothing.

    Args:
        path: the path of the collection, for messages.
        index_ttl_s: seconds for which index pages stay cached.
        mtime_ns: the modification time of filled chunks.
    """
    layers = collection.layers
    lead = collection.lead

    def index_of(layer: Layer, source: ShardSource) -> ShardIndices:
        pool = store.read_ahead if store.remote else None
        return ShardIndices(path, layer.format, source, index_cache, index_ttl_s, pool)

    index = index_of(layers[0], StoreShards(store, directory, layers[0], chunk_cache))
    if isinstance(layers[0].format, Unsharded) and store.remote:
        return ChunkStore(collection, ObjectLayer(index), chunk_cache, mtime_ns, None)
    innermost = ChunkLayer(index) if lead is None else LeadLayer(lead, index, chunk_cache.decoding)
    for inner in layers[1:]:
        innermost = ChunkLayer(index_of(inner, NestedShards(innermost, inner, chunk_cache)), innermost)
    return ChunkStore(collection, innermost, chunk_cache, mtime_ns, store.read_ahead)
