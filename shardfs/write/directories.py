"""Which directories of the tree a writable mount shows.

A read-only mount shows every directory that could hold chunks, by arithmetic. Programs that copy or delete trees need
directories that can be created and removed, and a new array has no directories yet. A writable mount therefore keeps
one bit for each directory, but only in collections that were empty at first or where a directory was removed. If chunks
are shown that are not stored, all directories are shown at first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardfs.model.kinds import NameKind
from shardfs.vfs.inodes import TABLE_END
from shardfs.write.files import join, split

if TYPE_CHECKING:
    from shardfs.model.attributes import Attributes
    from shardfs.model.listing import Batch
    from shardfs.model.values import U64, Bool
    from shardfs.vfs.chunk_dirs import ChunkDirs
    from shardfs.write.names import Names

MAX_DIRECTORIES = 1 << 27
"""Maximum directories of one collection with bits (16 MiB). A larger one shows all of them, and none can be removed."""


class Directories:
    """Shown directories of all collections. Thread-safe.

    Args:
        local: the store has directories of its own. In an object store, a directory that was shown once stays shown
            when its last object goes.
    """

    def __init__(self, names: Names, *, local: bool) -> None:
        self._names = names
        self._local = local
        self._bits: dict[int, bytearray | None] = {}
        self._inhabited: set[str] = set()  # named by documents; shown even if missing in the store
        self._removed: set[str] = set()  # named by documents; the store has their chunks at another path

    def hides(self, entry: Attributes, parent: int, path: str) -> bool:
        """Return whether the mount does not show this entry of the tree."""
        if not entry.directory:
            return False
        return not self.shows(entry) or self._is_implied(parent, path)

    def shows(self, entry: Attributes) -> bool:
        """Return False for a virtual directory of chunks that the mount does not show; True for all other entries."""
        tree = self._names.source_tree.chunk_tree(entry.number) if entry.directory else None
        if tree is None:
            return True
        with self._names.lock:
            return self._is_set(tree, entry.number)

    def _is_implied(self, parent: int, path: str) -> bool:
        """Return whether only documents name a directory, so the mount does not show it."""
        if path in self._inhabited or path in self._removed:
            return path in self._removed
        if self._names.source_tree.is_implied(parent, path.rpartition("/")[2]):
            return True
        if not self._local:
            self._inhabited.add(path)
        return False

    def only_shown(self, batch: Batch, directory: int, path: str) -> Batch:
        """Return the entries of the tree's `directory` without the directories that the mount does not show.

        `path` is that of the directory on the mount.
        """
        if directory < TABLE_END and batch.directories.any():
            names, mask = batch.names.tolist(), ~batch.directories
            for i in np.flatnonzero(batch.directories).tolist():
                mask[i] = not self._is_implied(directory, join(path, names[i]))
            batch = batch if mask.all() else batch.only(mask)
        virtual = batch.numbers[batch.directories & (batch.numbers >= np.uint64(TABLE_END))]
        tree = self._names.source_tree.chunk_tree(int(virtual[0])) if len(virtual) else None
        if tree is None:
            return batch
        with self._names.lock:
            return batch.only(self._are_set(tree, batch.numbers))

    def show(self, path: str, *, is_shown: bool = True) -> None:
        """Show a directory of the tree, given by its path, from now on; with `is_shown=False` hide it.

        Nothing happens for a directory that the store has itself.
        """
        self._removed.discard(path)
        if not is_shown:
            self._inhabited.discard(path)
        number = self._names.source_number(path)
        tree = self._names.source_tree.chunk_tree(number) if number is not None else None
        if tree is None or number is None:
            if self._names.classify_name(*split(path)).kind is NameKind.DIRECTORY:
                (self._inhabited if is_shown else self._removed).add(path)
            return
        with self._names.lock:
            self._set(tree, number, is_shown=is_shown)

    def show_inhabited(self, path: str) -> None:
        """Show a directory that has files in the journal: after a crash, the store may lack it."""
        self._inhabited.add(path)
        self.show(path)

    # ---- bits: the caller holds the lock ----

    def _of(self, tree: ChunkDirs, *, change: bool = False) -> bytearray | None:
        """Return the bits of a collection; None if all its directories are shown."""
        size, former = (tree.directories + 7) // 8, tree.former_shape
        if tree.first not in self._bits:
            if former is not None and tree.collection.names.dims == former.collection.names.dims:
                self._bits[tree.first] = self._of(former)
            else:
                self._bits[tree.first] = self._new(tree)
                if tree.root is not None and self._showed_root(former):
                    self._set(tree, tree.root)
        if change and self._bits[tree.first] is None and tree.directories <= MAX_DIRECTORIES:
            self._bits[tree.first] = bytearray(b"\xff") * size
        return self._bits[tree.first]

    def _showed_root(self, former: ChunkDirs | None) -> bool:
        """Return whether an array's top directory was shown before its shape changed. It then stays shown."""
        return former is not None and former.first in self._bits and self._is_set(former, former.first)

    def _new(self, tree: ChunkDirs) -> bytearray | None:
        """Return the first bits of a collection. All directories of an array with shards are shown."""
        hides = tree.directories <= MAX_DIRECTORIES and tree.chunks.filler is None and tree.shards.is_empty()
        return bytearray((tree.directories + 7) // 8) if hides else None

    def _is_set(self, tree: ChunkDirs, number: int) -> bool:
        bits, at = self._of(tree), number - tree.first
        return bits is None or bool(bits[at >> 3] >> (at & 7) & 1)

    def _are_set(self, tree: ChunkDirs, numbers: U64) -> Bool:
        """Return for each number whether it is shown. Numbers outside of the collection count as shown."""
        bits, mask = self._of(tree), np.ones(len(numbers), np.bool_)
        first = np.uint64(tree.first)
        mine = (numbers >= first) & (numbers < first + np.uint64(tree.directories))
        if bits is not None:
            at = (numbers[mine] - first).astype(np.int64)
            mask[mine] = np.frombuffer(bits, np.uint8)[at >> 3] >> (at & 7).astype(np.uint8) & 1
        return mask

    def _set(self, tree: ChunkDirs, number: int, *, is_shown: bool = True) -> None:
        bits, at = self._of(tree, change=not is_shown), number - tree.first
        if bits is not None:
            bits[at >> 3] = bits[at >> 3] & ~(1 << (at & 7)) | is_shown << (at & 7)
