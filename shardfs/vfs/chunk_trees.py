"""All sharded collections of a source that were found so far, by inode number and by path."""

from __future__ import annotations

import errno
import threading
from bisect import bisect_right
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from shardfs.codecs.transcode import Transcoder
from shardfs.model.errors import CorruptShardError
from shardfs.model.file_tree import KernelHooks
from shardfs.model.kinds import is_in
from shardfs.shards.mesh_fragments import open_chunks
from shardfs.vfs.chunk_dirs import ChunkDirs
from shardfs.vfs.inodes import CREATED, TABLE_END, ChunkNumbers
from shardfs.vfs.reshaping import chunks_at, is_refilled

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardfs.model.collection import Collection
    from shardfs.storage.cache import ByteLRU
    from shardfs.storage.store import Store
    from shardfs.vfs.nodes import CollectionAt

MAX_NODES = 1 << 56
"""Maximum number of inode numbers for one collection.

No real array needs as many, and one collection cannot use up all numbers.
"""


MAX_DETACHED = 1_000
"""Maximum number of collections kept after their directory was removed, in case that the same ones are created anew."""


class ChunkTrees:
    """Assigns ranges of inode numbers to collections. Thread-safe.

    A collection keeps its range while documents describe the same array, also with other shapes. Documents that say
    that chunks are stored in another form describe another array: that has another range, and the former one is freed.
    """

    def __init__(self, store: Store, index_cache: ByteLRU, chunk_cache: ByteLRU, ttl_s: float) -> None:
        self._store, self._index_cache, self._chunk_cache, self._ttl = store, index_cache, chunk_cache, ttl_s
        self.hooks = KernelHooks()
        self._lock = threading.Lock()
        self._trees: list[ChunkDirs] = []
        self._firsts: list[int] = []  # the first inode number of each tree
        self._next_first = TABLE_END
        self._tree_at: dict[str, ChunkDirs] = {}
        self._former: dict[str, ChunkDirs] = {}
        self._edited: set[str] = set()  # directories whose documents programs of this mount have written

    def owner(self, number: int) -> ChunkDirs:
        """Return the tree that owns an inode number. Raise OSError (ESTALE) if another array has replaced it."""
        with self._lock:
            tree = self._trees[i] if (i := bisect_right(self._firsts, number) - 1) >= 0 else None
        if tree is None or number >= tree.first + tree.numbers.count:
            text = "the array was removed, or created anew with other codecs or chunks; open the file again"
            raise OSError(errno.ESTALE, text, str(number))
        return tree

    def open(self, path: str, shown: str, placed: CollectionAt, mtime_ns: int) -> ChunkDirs:
        """Return the tree of the collection in a directory, which is shown as `shown`."""
        collection = placed.collection
        caches = self._index_cache, self._chunk_cache, self._ttl
        with self._lock:
            former = self._tree_at.get(path) or self._former.get(path)
            if former is not None and _is_same(former.collection, collection):
                return self._attach(path, former, collection)
        chunks = open_chunks(self._store, placed.shards, path, collection, *caches)
        with self._lock:
            former = self._tree_at.pop(path, None) or self._former.pop(path, None)
            if former is not None and _is_same(former.collection, collection):
                return self._attach(path, former, collection)
            numbers = ChunkNumbers(collection.names, self._next_first)
            if numbers.count > MAX_NODES:
                why = f"a grid of {numbers.count} chunks is beyond any real array"
                raise CorruptShardError(path, "its metadata", why)
            if numbers.count >= CREATED - numbers.first:
                why = "no inode numbers are left for its chunks, because this mount has shown too many large arrays; "
                raise OSError(errno.EOVERFLOW, f"{why}mount again, or mount a part of the source", path)
            tree = ChunkDirs(
                shown, collection, chunks, self._chunk_cache, numbers, mtime_ns, self._ttl,
                stored=path, is_moved=shown != placed.shards,
            )  # fmt: skip
            chunks.on_resize = partial(tree.resized, self.hooks)
            tree.shown.on_former_edges = partial(_found_edges, tree, self.hooks)
            if former is not None and _is_reshaped(former.collection, collection):
                if path.removesuffix(collection.path).rstrip("/") in self._edited:
                    tree.allow_missing(former.shards.outermost.source.required)
                self._free(tree.follow(former))
            elif former is not None:
                tree.replace(former)
                self._store.reopen_below(placed.shards)
                self._free([former, *former.formers()])
            self._next_first += numbers.count
            self._tree_at[path] = tree
            self._trees.append(tree)
            self._firsts.append(numbers.first)
        for reshaped in tree.numbers_at_edges():
            self.hooks.reshaped(reshaped)
        return tree

    def _attach(self, path: str, tree: ChunkDirs, collection: Collection) -> ChunkDirs:
        """Return the tree, which documents describe anew. The caller holds the lock."""
        self._former.pop(path, None)
        self._tree_at[path] = tree
        tree.description = collection.description
        return tree

    def _free(self, trees: Iterable[ChunkDirs]) -> None:
        """Free the inode numbers of trees. The caller holds the lock."""
        for tree in trees:
            i = bisect_right(self._firsts, tree.first) - 1
            if i >= 0 and self._trees[i] is tree:
                del self._trees[i], self._firsts[i]

    def below(self, path: str) -> list[ChunkDirs]:
        """Return the trees at `path` and below that documents described when they were read last."""
        with self._lock:
            return [tree for at, tree in self._tree_at.items() if is_in(at, path)]

    def described_by(self, document: str) -> list[ChunkDirs]:
        """Return the trees, also of former shapes, that the document at this path of the store describes."""
        with self._lock:
            return [tree for tree in self._trees if tree.description and document in tree.description.digests]

    def forget(self, path: str, *, edited: bool = False) -> list[str]:
        """Detach the trees at `path` and below, because their metadata changed. Return their paths.

        A tree keeps its inode numbers if the new metadata describes the same chunks. `edited`: a program of this mount
        has changed the metadata. Then shards that an array did not have before may be absent until they are written.
        """
        with self._lock:
            if edited:
                self._edited.add(path)
            found = [at for at in self._tree_at if is_in(at, path)]
            for at in found:
                self._former[at] = self._tree_at.pop(at)
            while len(self._former) > MAX_DETACHED + len(found):
                tree = self._former.pop(next(iter(self._former)))
                self._free([tree, *tree.formers()])
        return found

    def move(self, old: str, new: str) -> None:
        """Update the paths of all trees in a directory that was renamed."""
        with self._lock:
            for trees in (self._tree_at, self._former):
                for path in [p for p in trees if is_in(p, old)]:
                    tree = trees.pop(path)
                    tree.move(old, new)
                    trees[new + path[len(old) :]] = tree


def _found_edges(tree: ChunkDirs, hooks: KernelHooks, edges: set[tuple[int, int]]) -> None:
    """Invalidate what the kernel knows of chunks at the edges of an earlier shape, after a chunk has revealed them."""
    array, transform = tree.collection.array, tree.collection.transform
    if array is None or not isinstance(transform, Transcoder):
        return
    transform.former_edges |= edges
    for coords in chunks_at(edges, array.grid, array.grid_axes):
        for each in (tree, *tree.formers()):
            numbers = each.numbers_inside(coords)
            hooks.resized(numbers)
            hooks.reshaped(numbers)


def _is_same(old: Collection, new: Collection) -> bool:
    """Return whether newly read metadata describes the same chunks in the same places."""
    same = old.facts == new.facts and old.names.dims == new.names.dims and _is_reshaped(old, new)
    return same and not is_refilled(old, new)


def _is_reshaped(old: Collection, new: Collection) -> bool:
    """Return whether newly read metadata describes the same array, perhaps with another shape."""
    facts = replace(old.facts, shape=new.facts.shape)
    mine, other = (old.form, facts, old.codecs, old.format), (new.form, new.facts, new.codecs, new.format)
    return mine == other and old.names.prefix == new.names.prefix
