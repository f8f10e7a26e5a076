"""All sharded collections of a source that were found so far, by inode number and by path."""

from __future__ import annotations

import errno
import os
import threading
from bisect import bisect_right
from collections import deque
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np

from shardfs.model.errors import CorruptShardError
from shardfs.model.file_tree import KernelHooks
from shardfs.model.grid import IdNames
from shardfs.model.kinds import is_in
from shardfs.model.listing import BATCH
from shardfs.shards.open_chunks import open_chunks
from shardfs.shards.shard_indices import REPLACED
from shardfs.vfs.chunk_dirs import ChunkDirs
from shardfs.vfs.inodes import CREATED, TABLE_END, ChunkNumbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardfs.model.collection import ChunkNames, Collection, Description
    from shardfs.storage.cache import ByteLRU
    from shardfs.storage.store import Store
    from shardfs.vfs.directory_content import CollectionAt

MAX_NODES = 1 << 56
"""Maximum number of inode numbers for one collection.

No real array needs as many, and one collection cannot use up all numbers.
"""

MAX_DETACHED = 1_000
"""Maximum number of collections kept after their directory was removed, in case that the same ones are created anew."""

MAX_FORMER = 64
"""Maximum number of trees that are kept after another tree has replaced them, for files that are open.

The kernel's references to chunks are not counted.
"""

MAX_NAMES = 1 << 16
"""Maximum number of names in the root that the kernel looks up again after a change of an array there."""


class ChunkTrees:
    """Assigns ranges of inode numbers to collections. Thread-safe.

    A collection keeps its tree while documents describe the same collection (`is_same`). Any other collection in its
    directory gets another tree, with other inode numbers.

    Attributes:
        is_writable: programs of this mount may change documents, as well as other programs.
    """

    def __init__(self, store: Store, index_cache: ByteLRU, chunk_cache: ByteLRU, ttl_s: float) -> None:
        self._store = store
        self._caches = index_cache, chunk_cache, ttl_s
        self.hooks = KernelHooks()
        self.is_writable = False
        self._lock = threading.Lock()
        self._trees: list[ChunkDirs] = []
        self._firsts: list[int] = []  # the first inode number of each tree
        self._next_first = TABLE_END
        self._tree_at: dict[str, ChunkDirs] = {}
        self._detached: dict[str, ChunkDirs] = {}
        self._former = deque[ChunkDirs]()

    def owner(self, number: int) -> ChunkDirs:
        """Return the tree that owns an inode number. Raise OSError (ESTALE) if the tree was freed."""
        with self._lock:
            tree = self._trees[i] if (i := bisect_right(self._firsts, number) - 1) >= 0 else None
        if tree is None or number >= tree.first + tree.numbers.count:
            raise OSError(errno.ESTALE, REPLACED, str(number))
        return tree

    def open(self, path: str, shown_path: str, placed: CollectionAt, mtime_ns: int) -> ChunkDirs:
        """Return the tree of the collection in a directory, which is shown as `shown_path`.

        It replaces the tree of another collection that was in this directory: the kernel then looks up the names there
        again. Raise CorruptShardError if the grid has more than `MAX_NODES` nodes; OSError (EOVERFLOW) if no inode
        numbers are left.

        Args:
            path: the directory in the store.
            mtime_ns: the modification time that directories of chunks get.
        """
        collection = placed.collection
        _, chunk_cache, ttl_s = self._caches
        with self._lock:
            former = self._tree_at.get(path) or self._detached.get(path)
            if former is not None and is_same(former.collection, collection):
                former.description = collection.description
                self._tree_at[path] = former
                self._detached.pop(path, None)
                return former
            numbers = self._reserve(path, collection, is_first=former is None)
            chunks = open_chunks(self._store, placed.directory, shown_path, collection, *self._caches, mtime_ns)
            tree = ChunkDirs(
                shown_path, collection, chunks, chunk_cache, numbers, mtime_ns, ttl_s,
                stored_path=path, is_moved=shown_path != placed.directory,
            )  # fmt: skip
            chunks.layer.on_resize = partial(tree.resized, self.hooks)
            chunks.on_clipped = partial(tree.found_clipped, self.hooks)
            self._tree_at[path] = tree
            self._detached.pop(path, None)
            self._trees.append(tree)
            self._firsts.append(numbers.first)
            if former is not None:
                self._replace(former, tree)
                if former.is_frozen:
                    self._store.reopen_below(placed.directory)
        if former is not None:
            self.hooks.names_changed(*_changed(shown_path, former.collection.names, collection.names))
        return tree

    def _reserve(self, path: str, collection: Collection, *, is_first: bool) -> ChunkNumbers:
        """Return inode numbers that no other collection has. The caller holds the lock.

        `is_first`: no other collection was in this directory before.
        """
        salt = 0 if is_first else self._next_first
        numbers = ChunkNumbers(collection.names, self._next_first, salt)
        if numbers.count > MAX_NODES:
            why = f"a grid of {numbers.count} chunks is beyond any real array"
            raise CorruptShardError(path, "its metadata", why)
        if numbers.count >= CREATED - numbers.first:
            why = "no inode numbers are left for its chunks, because this mount has shown too many large arrays; "
            raise OSError(errno.EOVERFLOW, f"{why}mount again, or mount a part of the source", path)
        self._next_first += numbers.count
        return numbers

    def _replace(self, former: ChunkDirs, tree: ChunkDirs) -> None:
        """Show a tree instead of a former one from now on. The caller holds the lock."""
        former.is_former = True
        self._former.append(former)
        if is_stored_alike(former.collection, tree.collection):
            tree.follow(former)
            if self.is_writable:  # shards that the array did not have before may not be written yet
                tree.shards.outermost.source.allow_missing(former.shards.outermost.source.required)
        else:
            for shape in former.shapes:
                shape.freeze()
        while len(self._former) > MAX_FORMER:
            oldest = self._former.popleft()
            self._free([oldest])
            oldest.shapes.remove(oldest)

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

    def note_removed(self, document: str) -> None:
        """Note that this mount has removed the document at a path of the store."""
        with self._lock:
            for tree in self._trees:
                if tree.description is not None and document in tree.description.digests:
                    tree.description = tree.description.without(document)

    def describe(self, tree: ChunkDirs, before: Description, present: Collection) -> bool:
        """Note the documents of `present` as those that describe a tree.

        Return False if others were noted since `before`.
        """
        with self._lock:
            is_latest = tree.description is before
            if is_latest:
                tree.description = present.description
        return is_latest

    def detach(self, path: str) -> list[str]:
        """Detach the trees at `path` and below, because their metadata changed. Return the paths of their directories.

        A tree keeps its inode numbers if the new metadata describes the same collection.
        """
        with self._lock:
            detached = {at: tree for at, tree in self._tree_at.items() if is_in(at, path)}
            for at in detached:
                self._detached[at] = self._tree_at.pop(at)
            while len(self._detached) > MAX_DETACHED + len(detached):
                self._free(self._detached.pop(next(iter(self._detached))).shapes)
        return [tree.path for tree in detached.values()]

    def move(self, old: str, new: str) -> None:
        """Update the paths of all trees in a directory of the store that was renamed from `old` to `new`."""
        with self._lock:
            for tree in self._trees:
                if is_in(tree.stored_path, old):
                    tree.move(old, new)
            for trees in (self._tree_at, self._detached):
                for path in [path for path in trees if is_in(path, old)]:
                    trees[new + path[len(old) :]] = trees.pop(path)


def is_same(old: Collection, new: Collection) -> bool:
    """Return whether documents describe the same collection: chunks with the same names, places, sizes and bytes."""
    one, other = ((c.facts, c.names.dims, *map(_is_none, (c.transform, c.filler, c.zeros))) for c in (old, new))
    return is_stored_alike(old, new) and one == other and _shown_fill(old) == _shown_fill(new)


def is_stored_alike(old: Collection, new: Collection) -> bool:
    """Return whether documents describe the same array, perhaps with another shape or fill value."""
    one, other = ((c.form, c.format, c.codecs, c.names.prefix, replace(c.facts, shape=())) for c in (old, new))
    return one == other


def _is_none(value: object) -> bool:
    return value is None


def _shown_fill(collection: Collection) -> object:
    """Return the fill value, if files depend on it: stored chunks do not."""
    is_stored = collection.transform is None and collection.filler is None
    return None if is_stored or collection.array is None else collection.array.fill_value


def _changed(path: str, old: ChunkNames, new: ChunkNames) -> tuple[str, Iterable[bytes]]:
    """Return a directory and the names in it below which the kernel may know files of a former collection.

    These are directories of chunks if possible, and otherwise the directory of the array.
    """
    if old.prefix and new.prefix:
        return path, {old.prefix, new.prefix}
    above, _, name = path.rpartition("/")
    if name:
        return above, [os.fsencode(name)]
    return path, islice(chain(_top_names(new), _top_names(old)), MAX_NAMES)


def _top_names(names: ChunkNames) -> Iterator[bytes]:
    """Yield the names of chunks, or of directories of chunks, in the directory of their array."""
    if names.prefix:
        yield names.prefix
    elif not isinstance(names, IdNames):  # opening a former number is an error, and has the kernel look it up
        for start in range(0, names.dims[0], BATCH):
            yield from names.render(0, np.arange(start, min(start + BATCH, names.dims[0]), dtype=np.uint64)).tolist()
