"""Chunks that change with the shape of their array: layouts crop or pad chunks at the edge of an array."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardfs.model.arrays import Array
    from shardfs.model.values import U64, Coords
    from shardfs.vfs.chunk_dirs import ChunkDirs

BATCH = 1 << 16
"""Chunks handled at a time: an edge may have very many."""


def numbers_at_edges(tree: ChunkDirs) -> Iterator[U64]:
    """Yield the inode numbers of former trees whose files have changed with the array's latest change of shape."""
    if tree.former is None or (old := _shown_array(tree.former)) is None or (new := _shown_array(tree)) is None:
        return
    for coords in edge_chunks(old, new):
        for former in tree.formers():
            inside = (coords < np.array(former.chunks.format.grid, np.uint64)).all(axis=1)
            yield former.numbers.of_chunks(former.path, coords[inside])


def is_reshaped(old: ChunkDirs, new: ChunkDirs, coords: Coords) -> bool:
    """Return whether the file of a chunk has changed with the array's shape."""
    if old is new or (before := _shown_array(old)) is None or (after := _shown_array(new)) is None:
        return False
    axes = after.grid_axes
    return any((0 if (a := axes[axis]) is None else coords[a]) == cell for axis, cell in _edges(before, after))


def edge_chunks(old: Array, new: Array) -> Iterator[U64]:
    """Yield grid coordinates (n, d) of the chunks in both shapes of an array that have more elements in one of them."""
    grid, axes = tuple(map(min, old.grid, new.grid)), new.grid_axes
    for axis, cell in _edges(old, new):
        slab = (*grid[:axis], 1, *grid[axis + 1 :])
        for start in range(0, math.prod(slab), BATCH):
            flat = np.arange(start, min(start + BATCH, math.prod(slab)), dtype=np.int64)
            cells = np.stack(np.unravel_index(flat, slab), axis=1).astype(np.uint64)
            cells[:, axis] = cell
            coords = np.zeros((len(flat), len(axes) - axes.count(None)), np.uint64)
            for i, grid_axis in enumerate(axes):
                if grid_axis is not None:
                    coords[:, grid_axis] = cells[:, i]
            yield coords


def _shown_array(tree: ChunkDirs) -> Array | None:
    """Return the array of a tree; None if its files are the stored chunks, which do not depend on the shape."""
    collection = tree.collection
    return None if collection.transform is None and collection.filler is None else collection.array


def _edges(old: Array, new: Array) -> Iterator[tuple[int, int]]:
    """Yield axes, and the positions on them of the chunks that have more elements in one of the two shapes."""
    for axis, (before, after, chunk) in enumerate(zip(old.shape, new.shape, new.chunk, strict=True)):
        if before != after and min(before, after) % chunk:
            yield axis, min(before, after) // chunk
