"""The chunks and array regions that are damaged or missing, for programs that compute exactly these again."""

from __future__ import annotations

import csv
import json
import math
from contextlib import suppress
from itertools import chain, product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardfs.jobs.findings import ALL_PAGES
from shardfs.model.errors import message
from shardfs.model.grid import IdNames, ceil_div, ravel, ravel_many, unravel, unravel_many

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from shardfs.jobs.findings import Damage, ShardPart
    from shardfs.jobs.shared_work import JobPart
    from shardfs.model.shard_format import ShardFormat
    from shardfs.model.values import U64, Bool, Coords
    from shardfs.vfs.chunk_dirs import ChunkDirs

BITS = 14
"""At most 2**14 chunks are looked up at a time."""


class Region(NamedTuple):
    """A chunk, or a box of chunks without a name, and its elements from `start` to below `stop` along each axis.

    Args:
        collection: the path of the collection on a mount.
        chunk: the path of the chunk on a mount; "" for a box of several chunks, or if the chunks are unknown.
        status: "damaged" or "missing".
        start, stop: in the order of the axes in the array's metadata; () if the chunk has no region, such as a mesh, or
            if the affected chunks are unknown.
        reason: why the chunk is damaged; "" if it is missing.
    """

    collection: str
    chunk: str
    status: str
    start: Coords
    stop: Coords
    reason: str


class ExpectedError(ValueError):
    """A file of expected chunks cannot be understood. The message, for the user, has the row and the reason."""


class Box(NamedTuple):
    """The cells from `first` to below `stop` along each axis."""

    first: Coords
    stop: Coords

    @property
    def dims(self) -> Coords:
        """The number of cells along each axis."""
        return tuple(b - a for a, b in zip(self.first, self.stop, strict=True))

    def cells(self) -> U64:
        """Return all cells (n, d) in C order."""
        n = math.prod(self.dims)
        return unravel_many(np.arange(n, dtype=np.uint64), self.dims) + np.array(self.first, np.uint64)


class ChunkRegions:
    """Regions of the chunks of one collection, in the axes of the array's own metadata.

    A cell is the position of a chunk along these axes. A collection of one axis that numbers the chunks of an array of
    several axes has other coordinates. In both, a chunk has the same number in C order.

    Attributes:
        tree: the collection.
        grid: the number of cells along each axis.
        whole: all cells.
    """

    def __init__(self, tree: ChunkDirs) -> None:
        facts = tree.collection.facts
        stored_grid = tuple(tree.chunks.layer.format.grid)
        rank = len(stored_grid) if len(stored_grid) > 1 else len(facts.shape)  # precomputed: without the channels
        self.tree = tree
        self._shape = facts.shape[:rank]
        self._chunk = facts.chunk_shape[:rank]
        self._offset = facts.offset or (0,) * rank
        grid = tuple(ceil_div(s, c) if c else 0 for s, c in zip(self._shape, self._chunk, strict=True))
        self._is_array = not tree.by_id and math.prod(grid) == math.prod(stored_grid)
        self.grid = grid if self._is_array else stored_grid
        self._stored = stored_grid
        self.whole = Box((0,) * len(self.grid), self.grid)

    # ---- rows ----

    def box_row(self, box: Box, status: str, reason: str) -> Region:
        """Return the row of a box of at least one cell. Only a single chunk has a name."""
        name = self.tree.chunk_path(self._coords(box.first)) if math.prod(box.dims) == 1 else ""
        start, stop = self._elements(box) if self._is_array else ((), ())
        return Region(self.tree.path, name, status, start, stop, reason)

    def chunk_row(self, coords: Coords, status: str, reason: str) -> Region:
        """Return the row of the chunk at these coordinates of the collection."""
        return self.box_row(self._box(coords, coords), status, reason)

    def _elements(self, box: Box) -> Box:
        axes = list(zip(box.first, box.stop, self._chunk, self._shape, self._offset, strict=True))
        start = tuple(offset + first * chunk for first, _, chunk, _, offset in axes)
        return Box(start, tuple(offset + min(stop * chunk, size) for _, stop, chunk, size, offset in axes))

    # ---- boxes ----

    def _coords(self, cell: Coords) -> Coords:
        return cell if self.grid == self._stored else unravel(ravel(cell, self.grid), self._stored)

    def _coords_many(self, cells: U64) -> U64:
        return cells if self.grid == self._stored else unravel_many(ravel_many(cells, self.grid), self._stored)

    def _box(self, first: Coords, last: Coords) -> Box:
        """The box of cells with these first and last coordinates."""
        if self.grid != self._stored:
            first, last = (unravel(ravel(c, self._stored), self.grid) for c in (first, last))
        return Box(first, tuple(c + 1 for c in last))

    def shard_box(self, layer: int, shard: int) -> Box | None:
        """Return the cells of a shard of a layer (0 is the outermost); None if they may form no box, or if all are
        outside the array."""
        ends = shard, shard
        for format in (chunks.format for chunks in self.tree.shards.layers[layer:]):
            low, high = (_corners(format, end) for end in ends)
            if low is None or high is None:
                return None
            first, last = low[0], high[1]
            ends = ravel(first, format.grid), ravel(last, format.grid)
        return self._box(first, last)

    def named(self, names: list[str]) -> Box | None:
        """Return the box of the chunk whose path below the collection has these parts; None if no chunk has it."""
        forms, parts = self.tree.collection.names, [name.encode(errors="surrogateescape") for name in names]
        if isinstance(forms, IdNames):
            coords = forms.cell(parts[0]) if len(parts) == 1 else None
            return None if coords is None else self._box(coords, coords)
        if forms.prefix and parts[:1] != [forms.prefix]:
            return None
        parts = parts[1:] if forms.prefix else parts
        values = [forms.parse(i, part) for i, part in enumerate(parts)] if len(parts) == len(forms.dims) else [None]
        if None in values:
            return None
        coords = forms.coords(tuple(v for v in values if v is not None))
        return self._box(coords, coords)

    def touching(self, start: Coords, stop: Coords) -> Box:
        """Return the cells whose chunks contain elements from `start` to below `stop`; empty for elements outside.

        Raise ValueError for another number of axes, and for chunks without regions.
        """
        if not self._is_array or not len(start) == len(stop) == len(self.grid):
            raise ValueError(f"{len(start)} numbers in start, {len(stop)} in stop, {len(self._shape)} axes")
        axes = list(zip(start, stop, self._chunk, self._offset, self.grid, strict=True))
        first = tuple(min(max((a - offset) // chunk, 0), n) for a, _, chunk, offset, n in axes)
        last = (min(max(ceil_div(b - offset, chunk), 0), n) for _, b, chunk, offset, n in axes)
        return Box(first, tuple(max(a, b) for a, b in zip(first, last, strict=True)))

    def tiles(self, box: Box) -> Iterator[Box]:
        """Yield boxes of at most 2**`BITS` cells that cover `box` once.

        Where the cells of shards form boxes, no box has cells of two shards.
        """
        edge = 1 << BITS // max(sum(n > 1 for n in self.grid), 1)
        axes = []
        for axis, (at, stop) in enumerate(zip(*box, strict=True)):
            spans, begin, end = [], 0, at
            while at < stop:
                if at >= end:
                    cell = (*box.first[:axis], at, *box.first[axis + 1 :])
                    shard = self.shard_box(0, self.tree.shards.number_of(self._coords(cell)))
                    begin, end = (0, stop) if shard is None else (shard.first[axis], min(shard.stop[axis], stop))
                spans.append((at, min(end, at + edge - (at - begin) % edge)))
                at = spans[-1][1]
            axes.append(spans)
        return (Box(tuple(a for a, _ in spans), tuple(b for _, b in spans)) for spans in product(*axes))

    # ---- stored chunks ----

    def is_in(self, tile: Box, part: JobPart) -> bool:
        """Return whether this part of the work looks up the chunks of a tile: the part of its first cell's shard."""
        return part.of == 1 or self.tree.shards.number_of(self._coords(tile.first)) % part.of == part.number - 1

    def present(self, tiles: list[Box]) -> Bool:
        """Return for each cell of these tiles (n,) whether a chunk is stored, damaged or not. Reads indices.

        Raise OSError if an index cannot be read.
        """
        return self.tree.chunks.layer.present(self._coords_many(np.concatenate([tile.cells() for tile in tiles])))[0]

    def of_parts(self, parts: Mapping[tuple[int, int], str]) -> Iterator[tuple[Coords, str]]:
        """Yield the coordinates of all chunks in these shards and pages of the innermost layer, and their values.

        The keys of `parts` are the number of a shard and of a page, or `ALL_PAGES`. Looks up the place of every chunk
        of the grid, because a hash can scatter the chunks of a shard.
        """
        for tile in self.tiles(self.whole):
            coords = self._coords_many(tile.cells())
            shards, pages, _ = self.tree.chunks.layer.format.place_many(coords)
            for i in np.flatnonzero(np.isin(shards, np.array([s for s, _ in parts], np.uint64))).tolist():
                shard = int(shards[i])
                why = parts.get((shard, int(pages[i])), parts.get((shard, ALL_PAGES)))
                if why is not None:
                    yield tuple(coords[i].tolist()), why


def _corners(format: ShardFormat, shard: int) -> tuple[Coords, Coords] | None:
    """The first and the last cell of a shard inside the grid; None if its cells may form no box or are all outside."""
    slots = format.candidates(shard)
    if slots is None or not len(slots):
        return None
    first, last = (tuple(c) for c in format.coords(shard, 0, slots[[0, -1]])[0].tolist())
    last = tuple(min(c, n - 1) for c, n in zip(last, format.grid, strict=True))
    return (first, last) if all(a <= b for a, b in zip(first, last, strict=True)) else None


class DamagedRegions:
    """The rows of findings. `rows` returns those known at once, and `rest` those of shards scattered over the array.

    Memory grows with the number of damaged scattered shards.
    """

    def __init__(self, collections: Mapping[str, ChunkRegions]) -> None:
        self._collections = collections
        self._scattered: dict[str, dict[tuple[int, int], str]] = {}  # collection -> (shard, page) -> reason

    def rows(self, finding: Damage) -> Iterator[Region]:
        """Yield at least one row for a finding, unless it is left to `rest`. Call it for all findings before `rest`."""
        reason = finding.kind if finding.times > 1 else f"{finding.kind}: {finding.why}"
        regions, affected = self._collections.get(finding.collection), finding.affected
        unknown = Region(finding.collection, "", "damaged", (), (), f"{finding.shard}: {reason}".removeprefix(": "))
        if regions is None or not any(affected):
            yield unknown
            return
        for coords in affected.chunks:
            yield regions.chunk_row(coords, "damaged", reason)
        for part in affected.parts:
            box = regions.shard_box(part.layer, part.shard)
            if box is not None:
                yield regions.box_row(box, "damaged", reason)
            elif self._is_scattered(regions, part):
                self._scattered.setdefault(finding.collection, {})[part.shard, part.page] = reason
            else:
                yield unknown

    @staticmethod
    def _is_scattered(regions: ChunkRegions, part: ShardPart) -> bool:
        layers = regions.tree.shards.layers
        return not regions.tree.by_id and part.layer + 1 == len(layers) and layers[-1].format.candidates(0) is None

    def rest(self) -> Iterator[Region]:
        """Yield the rows that `rows` has left out."""
        for path, parts in self._scattered.items():
            regions = self._collections[path]
            for coords, why in regions.of_parts(parts):
                yield regions.chunk_row(coords, "damaged", why)


# ---- missing chunks


def missing(expected: Iterable[tuple[ChunkRegions, Box]], part: JobPart) -> Iterator[Region]:
    """Yield the expected chunks that the shards lack, one row for each tile that lacks all of its chunks.

    Chunks with damaged index entries are not missing. A region that cannot be looked up is damaged. Only the chunks of
    shards in `part` are looked up.
    """
    for regions, tiles in _batches(expected, part):
        present: Bool | None = None
        with suppress(OSError):  # each tile is looked up alone
            present = regions.present(tiles)
        at = 0
        for tile in tiles:
            n = math.prod(tile.dims)
            try:
                is_present = regions.present([tile]) if present is None else present[at : at + n]
            except OSError as e:
                yield regions.box_row(tile, "damaged", f"read: {message(e)}")
                continue
            at += n
            if not is_present.any():
                yield regions.box_row(tile, "missing", "")
                continue
            for cell in tile.cells()[~is_present].tolist():
                yield regions.box_row(Box(tuple(cell), tuple(c + 1 for c in cell)), "missing", "")


def _batches(expected: Iterable[tuple[ChunkRegions, Box]], part: JobPart) -> Iterator[tuple[ChunkRegions, list[Box]]]:
    """The tiles of the expected boxes, those of a collection together up to 2**`BITS` chunks."""
    tiles: list[Box] = []
    of, n = None, 0
    for regions, tile in ((r, t) for r, box in expected for t in r.tiles(box) if r.is_in(t, part)):
        size = math.prod(tile.dims)
        if of is not None and tiles and (regions is not of or n + size > 1 << BITS):
            yield of, tiles
            tiles, n = [], 0
        of = regions
        tiles.append(tile)
        n += size
    if of is not None and tiles:
        yield of, tiles


def read_expected(collections: Mapping[str, ChunkRegions], lines: Iterable[str]) -> Iterator[tuple[ChunkRegions, Box]]:
    """Yield the chunks that a file names: CSV with a header, or JSON lines, with `chunk`, or `start` and `stop`.

    Rows without both are ignored. Raise ExpectedError, with the reason, for other text.
    """
    for number, row in enumerate(_rows(iter(lines)), 1):
        try:
            region = _expected(collections, row)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as e:
            raise ExpectedError(f"row {number}: {e}") from e
        if region is not None:
            yield region


def _rows(lines: Iterator[str]) -> Iterator[Mapping[str, Any]]:
    first = next(lines, "")
    if first.startswith("{"):
        for line in chain([first], lines):
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as e:
                raise ExpectedError(f"{line!r:.80} is not JSON") from e
        return
    reader = csv.DictReader(chain([first], lines))
    try:
        if not {"chunk", "start"} & set(reader.fieldnames or ()):
            raise ExpectedError("the first line should name the columns: chunk, or start and stop")
        yield from reader
    except csv.Error as e:
        raise ExpectedError(f"line {reader.line_num}: {e}") from e


def _expected(collections: Mapping[str, ChunkRegions], row: Mapping[str, Any]) -> tuple[ChunkRegions, Box] | None:
    start, stop = (_numbers(row[name]) if row.get(name) else () for name in ("start", "stop"))
    if row.get("chunk"):
        return _named(collections, row["chunk"])
    if not start:
        return None
    path = row.get("collection") or ("" if "" in collections or len(collections) != 1 else next(iter(collections)))
    if path not in collections:
        raise ValueError(f"the source has no collection {path!r:.80}")
    return collections[path], collections[path].touching(start, stop)


def _named(collections: Mapping[str, ChunkRegions], chunk: str) -> tuple[ChunkRegions, Box]:
    names = chunk.split("/")
    for i in range(len(names), -1, -1):
        regions = collections.get("/".join(names[:i]))
        box = None if regions is None else regions.named(names[i:])
        if regions is not None and box is not None:
            return regions, box
    raise ValueError(f"no array of the source has a chunk {chunk!r:.80}")


def _numbers(value: Any) -> Coords:
    return tuple(map(int, value.split() if isinstance(value, str) else value))
