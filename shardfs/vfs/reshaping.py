"""Chunks that change with the shape of their array: layouts crop or pad chunks at the edge of an array."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from shardfs.codecs.transcode import Transcoder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardfs.model.arrays import Array
    from shardfs.model.collection import ChunkNames, Collection
    from shardfs.model.values import U64, Coords

BATCH = 1 << 16
"""Chunks handled at a time: an edge may have very many."""


def is_reshaped(old: Collection, new: Collection, coords: Coords) -> bool:
    """Return whether the file of a chunk has changed with the array's shape."""
    if old is new or (before := shown_array(old)) is None or (after := shown_array(new)) is None:
        return False
    axes = after.grid_axes
    return any((0 if (a := axes[axis]) is None else coords[a]) == cell for axis, cell in edges(before, after))


def is_refilled(old: Collection, new: Collection) -> bool:
    """Return whether any file of a chunk that is not stored, or padding, has changed or appeared."""
    before, after = shown_array(old), shown_array(new)
    if before is None or after is None or (new.filler is not None and old.names.dims != new.names.dims):
        return before is not after
    shows = [(c.filler is None, c.zeros is None) for c in (old, new)]
    return before.fill_value != after.fill_value or shows[0] != shows[1]


def top_names(names: ChunkNames) -> Iterator[bytes]:
    """Yield the names of chunks, or of directories of chunks, in the directory of their array."""
    if names.prefix:
        yield names.prefix
        return
    for start in range(0, names.dims[0], BATCH):
        yield from names.render(0, np.arange(start, min(start + BATCH, names.dims[0]), dtype=np.uint64)).tolist()


def note_edges(old: Collection, new: Collection) -> None:
    """Make a transform expect that chunks at the edge of a former shape of the array are stored clipped."""
    if old.array is not None and new.array is not None and isinstance(new.transform, Transcoder):
        new.transform.former_edges |= {*edges(old.array, new.array)}


def edge_chunks(old: Array, new: Array) -> Iterator[U64]:
    """Yield grid coordinates (n, d) of the chunks in both shapes of an array that have more elements in one of them."""
    yield from chunks_at(edges(old, new), tuple(map(min, old.grid, new.grid)), new.grid_axes)


def chunks_at(positions: Iterable[tuple[int, int]], grid: Coords, axes: Sequence[int | None]) -> Iterator[U64]:
    """Yield grid coordinates (n, d) of the chunks of a grid at positions on its axes. `axes`: `Array.grid_axes`."""
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


def shown_array(collection: Collection) -> Array | None:
    """Return the array of a collection; None if its files are the stored chunks, which do not depend on the shape."""
    return None if collection.transform is None and collection.filler is None else collection.array


def edges(old: Array, new: Array) -> Iterator[tuple[int, int]]:
    """Yield axes, and the positions on them of the chunks that have more elements in one of the two shapes."""
    for axis, (before, after, chunk) in enumerate(zip(old.shape, new.shape, new.chunk, strict=True)):
        if before != after and min(before, after) % chunk:
            yield axis, min(before, after) // chunk
