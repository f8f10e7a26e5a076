"""The unsharded tree: what the mount, fsspec and the command line all show."""

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
    """Thread-safe. Every method may block on the store, after calling the `waiting` hook."""

    def caches(self) -> dict[str, dict[str, int]]:
        """Of each cache, what was found in it, what was not, and its bytes."""
        return {
            name: {"hits": cache.hits, "misses": cache.misses, "bytes": cache.nbytes, "limit": cache.limit}
            for name, cache in (("index", self._index_cache), ("chunk", self._chunk_cache))
        }

    @property
    def patience(self) -> retry.RetryPolicy | None:
        """What makes the calls of the store, if that lies behind a network."""
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
    """The unsharded tree of a path or fsspec URL.

    `spent_bytes` of the chunk cache are for chunks that were read to their end, if who reads keeps them himself.

    Raise FileNotFoundError or another OSError if the source cannot be read, NotADatasetError if it holds nothing
    sharded (unless it may be empty so far), UnsupportedError if the layout cannot express something in it that is not
    to be skipped.
    """
    patient = retry.RetryPolicy(store_timeout_s, store_retries)
    store = open_store(source, storage_options, waiting, follow_symlinks=follow_symlinks, patience=patient)
    caches = ByteLRU(index_cache_bytes, waiting), ByteLRU(chunk_cache_bytes, waiting, spent_bytes)
    tree = Tree(store, *caches, index_ttl_s, layout, skip_unsupported=skip_unsupported, chunk_codec=chunk_codec)
    if not may_be_empty:
        tree.require_dataset()
    elif not store.remote:  # a directory of an object store is not there before it holds something
        store.entry("")
    return tree
