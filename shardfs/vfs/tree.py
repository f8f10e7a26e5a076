"""The unsharded tree that the mount, fsspec and the command line show."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from shardfs.storage import retry
from shardfs.storage.cache import ByteLRU, nothing
from shardfs.storage.open_store import open_store
from shardfs.vfs.changes import Changes
from shardfs.vfs.discovery import NATIVE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Tree(Changes):
    """The unsharded tree of a source. Thread-safe.

    Every method may block on the store; before that, the tree calls the `waiting` hook.
    """

    def caches(self) -> dict[str, dict[str, int]]:
        """Return hits, misses, bytes and limit of each cache."""
        return {
            name: {"hits": cache.hits, "misses": cache.misses, "bytes": cache.nbytes, "limit": cache.limit}
            for name, cache in (("index", self._index_cache), ("chunk", self._chunk_cache))
        }

    @property
    def patience(self) -> retry.RetryPolicy | None:
        """The retry policy of a remote store; None for a local store."""
        return getattr(self.store, "patience", None)


def open_tree(
    source: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    index_cache_bytes: int = 256 << 20,
    chunk_cache_bytes: int = 256 << 20,
    spent_bytes: int | None = None,
    index_ttl_s: float = math.inf,
    follow_symlinks: bool = False,
    layout: str = NATIVE,
    skip_unsupported: bool = False,
    chunk_codec: str | None = None,
    store_timeout_s: float = retry.TIMEOUT_S,
    store_retries: int = retry.RETRIES,
    may_be_empty: bool = False,
    waiting: Callable[[], None] = nothing,
) -> Tree:
    """Return the unsharded tree of a path or fsspec URL.

    `spent_bytes` of the chunk cache are for chunks that were read to their end, if the reader caches them itself.

    Raise FileNotFoundError or another OSError if the source cannot be read. Raise NotADatasetError if the source holds
    nothing sharded, unless `may_be_empty` is set. Raise UnsupportedError if the layout cannot express a dataset, unless
    `skip_unsupported` is set.
    """
    patient = retry.RetryPolicy(store_timeout_s, store_retries)
    store = open_store(source, storage_options, waiting, follow_symlinks=follow_symlinks, patience=patient)
    caches = ByteLRU(index_cache_bytes, waiting), ByteLRU(chunk_cache_bytes, waiting, spent_bytes)
    tree = Tree(store, *caches, index_ttl_s, layout, skip_unsupported=skip_unsupported, chunk_codec=chunk_codec)
    if not may_be_empty:
        tree.require_dataset()
    elif not store.remote:  # a directory of an object store does not exist before it holds an object
        store.entry("")
    return tree
