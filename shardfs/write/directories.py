"""Which virtual directories of chunks a writable mount shows.

A read-only mount shows every directory that could hold chunks, by arithmetic. Programs that copy or delete trees need
directories that can be created and removed, and a new array has no directories yet. A writable mount therefore keeps
one bit for each directory, but only in collections that were empty at first or where a directory was removed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from shardfs.model.values import U64, Bool
    from shardfs.vfs.chunk_dirs import ChunkDirs

MAX_DIRECTORIES = 1 << 27
"""Maximum directories of one collection with bits (16 MiB). A larger one shows all of them, and none can be removed."""


class Directories:
    """Shown directories of all collections. Not thread-safe: callers hold one common lock."""

    def __init__(self) -> None:
        self._bits: dict[int, bytearray | None] = {}

    def _of(self, tree: ChunkDirs, *, change: bool = False) -> bytearray | None:
        """Return the bits of a collection; None if all its directories are shown."""
        size = (tree.directories + 7) // 8
        if tree.first not in self._bits:
            small = tree.directories <= MAX_DIRECTORIES
            self._bits[tree.first] = bytearray(size) if small and tree.shards.is_empty() else None
            if tree.root is not None and self._showed_root(tree.former):
                self.show(tree, tree.root)
        if change and self._bits[tree.first] is None and tree.directories <= MAX_DIRECTORIES:
            self._bits[tree.first] = bytearray(b"\xff") * size
        return self._bits[tree.first]

    def _showed_root(self, former: ChunkDirs | None) -> bool:
        """Return whether an array's top directory was shown before its shape changed. It then stays shown."""
        return former is not None and former.first in self._bits and self.shows(former, former.first)

    def shows(self, tree: ChunkDirs, number: int) -> bool:
        """Return whether the directory with this number is shown."""
        bits, at = self._of(tree), number - tree.first
        return bits is None or bool(bits[at >> 3] >> (at & 7) & 1)

    def shows_many(self, tree: ChunkDirs, numbers: U64) -> Bool:
        """Return for each number whether it is shown. Numbers outside of the collection count as shown."""
        bits, shown = self._of(tree), np.ones(len(numbers), np.bool_)
        first = np.uint64(tree.first)
        mine = (numbers >= first) & (numbers < first + np.uint64(tree.directories))
        if bits is not None:
            at = (numbers[mine] - first).astype(np.int64)
            shown[mine] = np.frombuffer(bits, np.uint8)[at >> 3] >> (at & 7).astype(np.uint8) & 1
        return shown

    def show(self, tree: ChunkDirs, number: int, *, shown: bool = True) -> None:
        """Show a directory from now on, or with `shown=False` hide it."""
        bits, at = self._of(tree, change=not shown), number - tree.first
        if bits is not None:
            bits[at >> 3] = bits[at >> 3] & ~(1 << (at & 7)) | shown << (at & 7)
