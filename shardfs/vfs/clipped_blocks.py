"""Stored chunks that end where their array ended before it grew, as the blocks of N5 do."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from shardfs.codecs.transcode import Transcoder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardfs.model.arrays import Array
    from shardfs.model.collection import Collection
    from shardfs.model.values import U64, AxisPosition

BATCH = 1 << 16
"""Chunks handled at a time: an edge may have very many."""


def edges(array: Array) -> set[AxisPosition]:
    """Return where chunks are cut by the end of the array."""
    return {(axis, n // c) for axis, (n, c) in enumerate(zip(array.shape, array.chunk, strict=True)) if n % c}


def note_edges(old: Collection, new: Collection) -> None:
    """Make the transform of an array expect chunks that were clipped while the array had its former shape."""
    if isinstance(old.transform, Transcoder) and isinstance(new.transform, Transcoder) and old.array is not None:
        new.transform.clipped |= old.transform.clipped | edges(old.array)


def note_clipped(collection: Collection, positions: set[AxisPosition]) -> Iterator[U64]:
    """Make the transform of an array expect clipped chunks at these positions, as in `edges`.

    Yield the grid coordinates (n, d) of these chunks, at most `BATCH` at a time. Nothing happens before the first is
    taken.
    """
    if isinstance(collection.transform, Transcoder) and collection.array is not None:
        collection.transform.clipped |= positions
        yield from _chunks_at(positions, collection.array)


def _chunks_at(positions: Iterable[AxisPosition], array: Array) -> Iterator[U64]:
    """Yield grid coordinates (n, d) of the chunks at positions on the axes of an array."""
    grid = array.grid
    axes = array.grid_axes
    for axis, cell in positions:
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
