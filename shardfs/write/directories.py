"""Which virtual directories of chunks a writable mount shows.

A tree that is only read shows all that could hold chunks, by arithmetic. Programs that copy or delete trees want
directories that can be made and removed; and a new array has none. A bit for each directory, and only where somebody
made or removed one, or where there was no shard yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from shardfs.model.values import U64, Bool
    from shardfs.vfs.chunk_dirs import ChunkDirs

MAX_DIRECTORIES = 1 << 27
"""Of one collection. Those of a larger one are all shown, and cannot be removed: its bits would take over 16 MiB."""


class Directories:
    """Its users hold one lock."""

    def __init__(self) -> None:
        self._bits: dict[int, bytearray | None] = {}

    def _of(self, tree: ChunkDirs, *, change: bool = False) -> bytearray | None:
        """The bits of a collection; None if all of its directories are shown."""
        size = (tree.directories + 7) // 8
        if tree.first not in self._bits:
            small = tree.directories <= MAX_DIRECTORIES
            self._bits[tree.first] = bytearray(size) if small and tree.is_empty() else None
            if tree.root is not None and self._showed_root(tree.former):
                self.show(tree, tree.root)
        if change and self._bits[tree.first] is None and tree.directories <= MAX_DIRECTORIES:
            self._bits[tree.first] = bytearray(b"\xff") * size
        return self._bits[tree.first]

    def _showed_root(self, former: ChunkDirs | None) -> bool:
        """Whether somebody has seen the top directory of an array before that got another shape: it outlives that."""
        return former is not None and former.first in self._bits and self.shows(former, former.first)

    def shows(self, tree: ChunkDirs, number: int) -> bool:
        """Whether a directory of this number is shown."""
        bits, at = self._of(tree), number - tree.first
        return bits is None or bool(bits[at >> 3] >> (at & 7) & 1)

    def shows_many(self, tree: ChunkDirs, numbers: U64) -> Bool:
        """The same of many; what is none of its directories is shown."""
        bits, shown = self._of(tree), np.ones(len(numbers), np.bool_)
        first = np.uint64(tree.first)
        mine = (numbers >= first) & (numbers < first + np.uint64(tree.directories))
        if bits is not None:
            at = (numbers[mine] - first).astype(np.int64)
            shown[mine] = np.frombuffer(bits, np.uint8)[at >> 3] >> (at & 7).astype(np.uint8) & 1
        return shown

    def show(self, tree: ChunkDirs, number: int, *, shown: bool = True) -> None:
        """Show a directory from now on, or do not."""
        bits, at = self._of(tree, change=not shown), number - tree.first
        if bits is not None:
            bits[at >> 3] = bits[at >> 3] & ~(1 << (at & 7)) | shown << (at & 7)
