"""Histograms of a collection: existing chunks by position, chunks by size, live and dead bytes by shard."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from shardfs.jobs.verify import ShardVerifier
from shardfs.model.grid import MappedNames

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardfs.model.values import U64, Coords, Sizes
    from shardfs.vfs.chunk_dirs import ChunkDirs

Counts = npt.NDArray[np.int64]

X_FIRST = frozenset(("n5", "precomputed"))
"""Formats whose first axis is horizontal, for arrays that shardfs cannot describe."""

MOST_KEYS = 5
"""Number of shards that `ChunkMap.keys` names."""

LEAST = 8
"""Minimum number of bins along the shorter axis, unless the axis has fewer chunks."""

PER_OCTAVE = 4
"""Number of size bins per factor of two."""


class Bins(NamedTuple):
    """An axis of the chunk grid, divided into `n` bins of about equal length.

    Args:
        axis: the number of the axis in `ChunkMap.grid`; -1 for a missing axis.
        chunks: the number of chunks along the axis; 1 for a missing axis.
    """

    axis: int
    chunks: int
    n: int

    def bin_of(self, coords: U64) -> npt.NDArray[np.intp]:
        """Return the bin of each chunk (n,), from 0, given coordinates (n, d) in the order of `ChunkMap.grid`."""
        if self.axis < 0:
            return np.zeros(len(coords), np.intp)
        return (coords[:, self.axis] * np.uint64(self.n) // np.uint64(self.chunks)).astype(np.intp)

    def lengths(self) -> Counts:
        """Return how many of the positions along the axis are in each bin (`n`,)."""
        edges = [-(-i * self.chunks // self.n) for i in range(self.n + 1)]
        return np.array([b - a for a, b in pairwise(edges)], np.int64)


@dataclass
class ChunkMap:
    """Counts of one collection. Memory grows by 24 bytes per shard, not with the number of chunks.

    Args:
        grid: number of chunks along each axis, in the order of the layout's axes; () for collections with ids.
        rows, columns: the two axes of the map; None for collections with ids. All other axes are summed.
        chunks, nbytes: number and stored bytes of the existing chunks in each bin (rows, columns).
        sizes: number of chunks by stored size. Bin i starts at 2**(i / PER_OCTAVE) bytes; bin 0 includes empty chunks.
        shards: shard numbers.
        stored, dead, objects: bytes of chunks, dead bytes and object size of each shard, in the order of `shards`.
        keys: names of the shards with the most dead bytes, worst first.
        findings: number of damages found.
    """

    path: str
    format: str
    grid: Coords
    rows: Bins | None
    columns: Bins | None
    chunks: Counts
    nbytes: Counts
    sizes: Counts
    shards: U64
    stored: Counts
    dead: Counts
    objects: Counts
    keys: Sequence[str]
    findings: int

    @property
    def total(self) -> int:
        """Number of existing chunks."""
        return int(self.sizes.sum())

    def shares(self) -> npt.NDArray[np.float64]:
        """Return the fraction of the chunks of the grid that exist, from 0 to 1, for each bin (rows, columns)."""
        if self.rows is None or self.columns is None:
            return np.zeros((0, 0))
        axes = {self.rows.axis, self.columns.axis}
        depth = math.prod(n for axis, n in enumerate(self.grid) if axis not in axes)
        cells = np.outer(self.rows.lengths(), self.columns.lengths()).astype(np.float64) * depth
        return self.chunks / np.maximum(cells, 1)


def chunk_map(tree: ChunkDirs, most_rows: int, most_columns: int) -> ChunkMap:
    """Return the counts of a collection. Reads every index, and of the chunks only those with positions of others.

    `most_rows` and `most_columns` limit the bins of the map. Errors of the store and of the data count as findings.
    """
    axes = _shown_axes(tree)
    grid = tuple(1 if axis is None else tree.chunks.layer.format.grid[axis] for axis in axes)
    rows, columns = (None, None) if tree.by_id else _bins(tree, axes, grid, most_rows, most_columns)
    shape = (rows.n, columns.n) if rows is not None and columns is not None else (0, 0)
    chunks, nbytes = np.zeros((2, *shape), np.int64)
    histogram = np.zeros(64 * PER_OCTAVE, np.int64)

    def count(coords: U64, sizes: Sizes) -> None:
        octaves = np.log2(np.maximum(sizes, 1)) * PER_OCTAVE
        np.add(histogram, np.bincount(octaves.astype(np.intp), minlength=len(histogram)), out=histogram)
        if rows is not None and columns is not None:
            cells = np.zeros((len(coords), len(axes)), np.uint64)
            for i, axis in enumerate(axes):
                cells[:, i] = 0 if axis is None else coords[:, axis]
            at = (rows.bin_of(cells), columns.bin_of(cells))
            np.add.at(chunks, at, 1)
            np.add.at(nbytes, at, sizes)

    outermost = tree.shards.outermost
    shards, _ = outermost.source.existing()
    counts = np.zeros((3, len(shards)), np.int64)
    verifier, findings = ShardVerifier(tree, chunks=False, on_chunks=count), 0
    for i, shard in enumerate(shards.tolist()):
        tally = verifier.verify(shard).tally
        counts[:, i] = tally.stored_bytes, tally.dead_bytes, tally.shard_bytes
        findings += tally.findings
    worst = [i for i in np.argsort(-counts[1], kind="stable")[:MOST_KEYS].tolist() if counts[1, i]]
    return ChunkMap(
        path=tree.path,
        format=tree.collection.format,
        grid=() if tree.by_id else grid,
        rows=rows,
        columns=columns,
        chunks=chunks,
        nbytes=nbytes,
        sizes=histogram,
        shards=shards,
        stored=counts[0],
        dead=counts[1],
        objects=counts[2],
        keys=[outermost.source.key(int(shards[i])) for i in worst],
        findings=findings,
    )


def _shown_axes(tree: ChunkDirs) -> Sequence[int | None]:
    """The axis of the stored grid for each axis of the layout; None for an axis that the layout has added."""
    names = tree.collection.names
    return names.axes if isinstance(names, MappedNames) else range(len(tree.chunks.layer.format.grid))


def _bins(
    tree: ChunkDirs, axes: Sequence[int | None], grid: Coords, most_rows: int, most_columns: int
) -> tuple[Bins, Bins]:
    """Bins of the two longest axes of the grid, vertical axis first. The faster-varying axis is horizontal."""
    array = tree.collection.array
    longest = sorted(sorted(range(len(grid)), key=lambda axis: (-grid[axis], -axis))[:2])
    if array is not None:
        place = {grid_axis: axis for axis, grid_axis in enumerate(array.grid_axes)}
        longest.sort(key=lambda axis: place.get(axes[axis], -1))
    elif tree.collection.format in X_FIRST:
        longest.reverse()
    slow, fast = [-1, -1, *longest][-2:]
    high, wide = (max(grid[axis], 1) if axis >= 0 else 1 for axis in (slow, fast))
    scale = max(high / most_rows, wide / most_columns, 1)  # one scale for both axes keeps the aspect ratio of the grid
    rows = min(max(round(high / scale), LEAST), high, most_rows)
    columns = min(max(round(wide / scale), LEAST), wide, most_columns)
    return Bins(slow, high, rows), Bins(fast, wide, columns)


class SizeBin(NamedTuple):
    """The number of chunks with stored sizes from `start` to below `stop`, in bytes."""

    start: int
    stop: int
    chunks: int


def size_bins(chunks: ChunkMap, limit: int) -> list[SizeBin]:
    """Return the chunk sizes from the smallest to the largest in at most `limit` bins, as fine as possible.

    Empty if there are no chunks. The bins adjoin; some may have no chunks.
    """
    filled = np.flatnonzero(chunks.sizes)
    if not len(filled):
        return []
    for width in (1, 2, PER_OCTAVE, 2 * PER_OCTAVE, 4 * PER_OCTAVE, 64 * PER_OCTAVE):
        first, last = int(filled[0]) // width, int(filled[-1]) // width
        if last - first < limit:
            break
    edges = [math.ceil(2 ** (i * width / PER_OCTAVE)) for i in range(first, last + 2)]
    counts = [int(chunks.sizes[i * width : (i + 1) * width].sum()) for i in range(first, last + 1)]
    return [SizeBin(*edge, n) for edge, n in zip(pairwise(edges), counts, strict=True)]
