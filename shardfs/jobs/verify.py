"""Verifies one shard: the index against the format, the bytes against the index, the chunks against their codecs."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from shardfs.jobs.chunk_checks import ChunkRanges, ChunkVerifier, reason, stream
from shardfs.jobs.findings import ALL_PAGES, MOST, NAMES, ShardFindings, ShardPart
from shardfs.model.blobs import ByteRange
from shardfs.model.byte_ranges import Coverage, cover
from shardfs.model.errors import ShardfsError
from shardfs.model.grid import ravel
from shardfs.shards.index_reader import ShardIndexReader
from shardfs.storage.blob_views import SliceBlob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy.typing as npt

    from shardfs.jobs.findings import Report
    from shardfs.model.blobs import Blob
    from shardfs.model.shard_format import Checksum, ShardIndex
    from shardfs.model.values import U64, Bool, Coords, Sizes, Version
    from shardfs.shards.chunk_layer import ChunkLayer
    from shardfs.vfs.chunk_dirs import ChunkDirs

ROWS = 1 << 16

TURNS = 3
"""Maximum number of passes over a damaged shard that changed during verification."""


@dataclass(frozen=True)
class ShardVerifier:
    """Verifies shards of one collection, one at a time. Memory grows with the chunks per shard, not with the shards.

    Args:
        tree: the collection.
        deep: read and decode every chunk.
        chunks: check chunks; otherwise check only indices.
        on_chunks: called with the coordinates (n, d) and stored sizes (n,) of indexed chunks.
        regions: name all affected chunks in the findings (`Damage.affected`).
    """

    tree: ChunkDirs
    _: KW_ONLY
    deep: bool = False
    chunks: bool = True
    on_chunks: Callable[[U64, Sizes], None] | None = None
    regions: bool = False

    def verify(self, shard: int) -> Report:
        """Verify one outermost shard; return its counts and findings. Only bugs raise exceptions.

        Errors of the store and of the data become findings. Repeats the verification if a damaged local shard has
        changed meanwhile, at most `TURNS` times in total.
        """
        source = self.tree.shards.layers[0].source
        for turn in range(TURNS):
            findings = ShardFindings(self.tree, regions=self.regions)
            # Only the first pass reports chunks to the caller, so that each chunk is reported once.
            one = _Pass(self if turn == 0 else replace(self, on_chunks=None), findings)
            version = None
            source.reopen(shard)
            try:
                blob = source.stored(shard)
                findings.tally.shard_bytes, _, version = blob.stat()
                one.verify(0, shard, blob)
            except (OSError, ShardfsError, ValueError) as e:
                findings.add(source.key(shard), "read", reason(e), parts=(ShardPart(0, shard),))
            report = findings.complete()
            if not report.findings or not source.is_local or version == self._version(shard):
                break
        return report

    def _version(self, shard: int) -> Version:
        source = self.tree.shards.layers[0].source
        source.reopen(shard)
        try:
            return source.stored(shard).stat().version
        except (OSError, ShardfsError, ValueError):
            return None


@dataclass(frozen=True, slots=True)
class _Pass:
    """One verification of an outermost shard."""

    settings: ShardVerifier
    findings: ShardFindings

    @property
    def layers(self) -> Sequence[ChunkLayer]:
        """The layers of sharding, the outermost first."""
        return self.settings.tree.shards.layers

    def verify(self, level: int, shard: int, stored_shard: Blob) -> None:
        """Verify a shard of the layer at `level`, and the shards inside it."""
        source = self.layers[level].source
        try:
            _verify_trailer(stored_shard, source.layer.trailer)
            blob = source.unwrap(shard, stored_shard)
        except ValueError as e:
            self.findings.add(source.key(shard), "shard", str(e), parts=(ShardPart(level, shard),))
            return
        _Shard(self, level, shard, blob).verify()


def _verify_trailer(blob: Blob, trailer: int) -> None:
    """Raise ValueError if a checksum after the shard is wrong. Each checksum covers all bytes before it."""
    if not trailer:
        return
    import google_crc32c

    size = blob.stat().size
    if size < trailer:
        raise ValueError(f"its crc32c should have {trailer} bytes, but the object has {size}")
    crc, position = 0, 0
    for end in range(size - trailer, size, 4):
        for part in stream(blob, position, end):
            crc = google_crc32c.extend(crc, part)
        expected = int.from_bytes(blob.read([ByteRange(end, end + 4)])[0], "little")
        if expected != crc:
            raise ValueError(f"the whole shard has crc32c {crc:08x}, but says {expected:08x}")
        position = end


class _Shard:
    """State of the verification of one shard of one layer."""

    def __init__(self, one: _Pass, level: int, shard: int, blob: Blob) -> None:
        self._pass = one
        self._findings = one.findings
        self._tally = one.findings.tally
        self._level = level
        self._shard = shard
        self._blob = blob
        self._format = one.layers[level].format
        self._source = one.layers[level].source
        self._innermost = level + 1 == len(one.layers)
        self._key = self._source.key(shard)
        self._size = blob.stat().size
        self._covered: list[Coverage] = []
        # `walk` reads headers between chunks. Their ranges are unknown here, so dead bytes cannot be counted.
        self._whole = self._format.walk is None

    def _add_finding(self, kind: str, why: str, *coords: Coords) -> None:
        self._findings.add(self._key, kind, why, *map(self._innermost_of, coords), parts=self._parts(coords))

    def _parts(self, cells: Iterable[Coords]) -> tuple[ShardPart, ...]:
        """The shards of the next layer in these cells; none if the cells are chunks."""
        if self._innermost:
            return ()
        return tuple(ShardPart(self._level + 1, ravel(cell, self._format.grid)) for cell in cells)

    def _add_all(
        self, kind: str, at: npt.NDArray[np.intp], why: Callable[[int], str], coords: U64 | None = None
    ) -> None:
        """Add a finding for each position `at`, and name its chunk if `coords` are given. Lists only the first ones."""
        for i in at[:MOST].tolist():
            self._add_finding(kind, why(i), *(() if coords is None else (tuple(coords[i].tolist()),)))
        self._count(kind, max(len(at) - MOST, 0), None if coords is None else coords[at[MOST:]])

    def _count(self, kind: str, n: int, coords: U64 | None) -> None:
        """Count `n` findings about these cells."""
        cells = map(tuple, () if coords is None or not self._findings.regions else coords.tolist())
        if self._innermost:
            self._findings.count(self._key, kind, n, cells)
        else:
            self._findings.count(self._key, kind, n, parts=self._parts(cells))

    def _innermost_of(self, coords: Coords) -> Coords:
        """Coordinates of the first chunk in a cell of this layer. The cell is a chunk, or a shard of the next layer."""
        layers = self._pass.layers
        for outer, inner in zip(layers[self._level :], layers[self._level + 1 :], strict=False):
            cells, _ = inner.format.coords(ravel(coords, outer.format.grid), 0, np.zeros(1, np.uint64))
            coords = tuple(cells[0].tolist())
        return coords

    def verify(self) -> None:
        for page, index in self._pages():
            ranges = self._verify_entries(page, index)
            self._covered.append(cover(ranges.starts, ranges.stops))
            if self._innermost:
                self._tally.chunks += len(ranges.starts)
                self._tally.stored_bytes += int((ranges.stops - ranges.starts).sum())
                if (report := self._pass.settings.on_chunks) is not None:
                    report(ranges.coords, (ranges.stops - ranges.starts).astype(np.int64))
                self._verify_chunks(ranges, index.checksum)
            else:
                self._verify_inner(ranges)
        self._verify_coverage()

    # ---- index ----

    def _pages(self) -> Iterator[tuple[int, ShardIndex]]:
        """Yield every readable page of the index. Unreadable pages become findings."""
        index = ShardIndexReader(self._format, self._shard, self._blob, keep=False)
        try:
            self._cover_index(self._format.root_request())
            for page, where, entries in index.parts():
                self._cover_index(where)
                if isinstance(entries, ValueError):
                    self._add_index(entries, page)
                else:
                    yield page, entries
        except ValueError as e:
            self._add_index(e, None)

    def _cover_index(self, where: ByteRange | None) -> None:
        if where is not None:
            one = np.array([where.start], np.uint64), np.array([where.stop], np.uint64)
            self._covered.append(Coverage(*one, (), 0))

    def _add_index(self, error: ValueError, page: int | None) -> None:
        """Add a finding for an unreadable index page, and name the first chunks that may be in the page."""
        self._whole = False  # without this page, the number of dead bytes is unknown
        slots = self._format.candidates(self._shard) if page is not None else None
        named: Iterable[Coords] = ()
        if slots is not None:
            coords, valid = self._format.coords(self._shard, page or 0, slots[:ROWS])
            named = (self._innermost_of(tuple(c)) for c in coords[valid][:NAMES].tolist())
        part = ShardPart(self._level, self._shard, ALL_PAGES if page is None else page)
        self._findings.add(self._key, "index", str(error), *named, parts=(part,))

    # ---- index entries ----

    def _verify_entries(self, page: int, index: ShardIndex) -> ChunkRanges:
        """The valid entries of an index page. Invalid entries become findings."""
        slots = index.all_slots()
        if index.repeated is not None:
            for slot in np.unique(index.repeated.all_slots()).tolist():
                coords, _ = self._format.coords(self._shard, page, np.array([slot], np.uint64))
                self._add_finding("duplicate", f"id {slot} has several entries in its index", tuple(coords[0].tolist()))
        parts = [self._verify_some(page, slots[i : i + ROWS], index, i) for i in range(0, max(len(slots), 1), ROWS)]
        coords, starts, sizes = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(starts, kind="stable")
        return ChunkRanges(coords[order], starts[order], (starts + sizes)[order])

    def _verify_some(self, page: int, slots: U64, index: ShardIndex, at: int) -> tuple[U64, U64, U64]:
        coords, valid = self._format.coords(self._shard, page, slots)
        starts = index.starts[at : at + len(slots)].astype(np.uint64)
        sizes = index.sizes[at : at + len(slots)].astype(np.uint64)
        if not valid.all():
            self._add_lost(page, slots[~valid], coords[~valid])
        faults = np.zeros(len(slots), np.uint8) if index.faults is None else index.faults[at : at + len(slots)]
        good = valid & (faults == 0)
        for number, (kind, _) in enumerate(index.reasons, 1):
            broken = np.flatnonzero(valid & (faults == number))
            self._add_all(kind, broken, lambda i: index.reason(at + i), coords)
        if self._innermost:
            self._verify_sizes(coords, sizes, good)
        return coords[good], starts[good], sizes[good]

    def _add_lost(self, page: int, slots: U64, coords: U64) -> None:
        """Count or report entries that no reader finds, because they are outside the grid or in the wrong place."""
        if self._format.candidates(self._shard) is not None:  # not addressed by id
            self._tally.outside_chunks += len(slots)
            return
        homes = self._format.place_many(coords)
        grid = np.array([min(n, 2**64 - 1) for n in self._format.grid], np.uint64)
        in_grid = (homes.slot == slots) & (coords < grid).all(axis=1)

        def elsewhere(i: int) -> str:
            home = f"{self._source.key(int(homes.shard[i]))}, minishard {homes.page[i]}"
            return f"id {slots[i]} stands in minishard {page}, but belongs in {home}"

        self._add_all("placement", np.flatnonzero(in_grid), elsewhere, coords)
        self._add_all("grid", np.flatnonzero(~in_grid), lambda i: f"id {slots[i]} is that of no chunk of the grid")

    def _verify_sizes(self, coords: U64, sizes: U64, good: Bool) -> None:
        check = self._pass.settings.tree.collection.check
        wanted = check.sizes(coords) if check is not None else None
        if wanted is not None:
            wrong = np.flatnonzero(good & (sizes.astype(np.int64) != wanted))
            self._add_all("size", wrong, lambda i: f"{wanted[i]} bytes expected, {sizes[i]} stored", coords)

    # ---- overlaps and dead bytes ----

    def _verify_coverage(self) -> None:
        nothing = np.empty(0, np.uint64)
        starts = np.concatenate([nothing, *(c.starts for c in self._covered)])
        stops = np.concatenate([nothing, *(c.stops for c in self._covered)])
        whole = cover(starts, stops)
        self._tally.shared_bytes += sum(c.shared for c in (*self._covered, whole))
        if self._whole:
            self._tally.dead_bytes += self._size - whole.nbytes
        clashes = [clash for c in (*self._covered, whole) for clash in c.clashes]
        if clashes:
            for (start, stop), owners in self._owners(clashes[:MOST]).items():
                why = f"its bytes [{start}, {stop}) are said to be something else, too"
                self._add_finding("overlap", why, *owners)
            self._count("overlap", max(len(clashes) - MOST, 0), self._unlisted_owners(clashes[MOST:]))

    def _owners(self, clashes: list[tuple[int, int]]) -> dict[tuple[int, int], list[Coords]]:
        """For each overlap, the first chunks whose index entries cover these bytes; all if regions are wanted."""
        limit = None if self._findings.regions else NAMES
        out: dict[tuple[int, int], list[Coords]] = {clash: [] for clash in clashes}
        for ranges in self._ranges_again():
            for (start, stop), owners in out.items():
                at = np.flatnonzero((ranges.starts < np.uint64(stop)) & (ranges.stops > np.uint64(start)))
                owners += [tuple(c) for c in ranges.coords[at[:limit]].tolist()]
        return out

    def _ranges_again(self) -> Iterator[ChunkRanges]:
        """Yield the valid entries of each index page. Reads the index again."""
        quiet = _Pass(self._pass.settings, ShardFindings(self._pass.settings.tree))
        again = _Shard(quiet, self._level, self._shard, self._blob)
        for page, index in again._pages():
            yield again._verify_entries(page, index)

    def _unlisted_owners(self, clashes: list[tuple[int, int]]) -> U64 | None:
        """All chunks whose entries cover one of these overlaps, if regions are wanted."""
        if not clashes or not self._findings.regions:
            return None
        bounds = np.array(clashes, np.uint64)
        merged = cover(bounds[:, 0], bounds[:, 1])
        parts = []
        for ranges in self._ranges_again():
            at = merged.stops.searchsorted(ranges.starts, "right")
            hit = at < len(merged.stops)
            hit[hit] = merged.starts[at[hit]] < ranges.stops[hit]
            parts.append(ranges.coords[hit])
        return np.concatenate(parts)

    # ---- chunk data ----

    def _verify_inner(self, ranges: ChunkRanges) -> None:
        for cell, start, stop in zip(*(column.tolist() for column in ranges), strict=True):
            number = ravel(tuple(cell), self._format.grid)
            try:
                self._pass.verify(self._level + 1, number, SliceBlob(self._blob, start, stop - start))
            except OSError as e:
                key = self._pass.layers[self._level + 1].source.key(number)
                self._findings.add(key, "read", reason(e), parts=(ShardPart(self._level + 1, number),))

    def _verify_chunks(self, ranges: ChunkRanges, checksum: Checksum | None) -> None:
        settings = self._pass.settings
        lead = settings.tree.collection.lead
        chunks = ChunkVerifier(
            settings.tree.collection, self._blob, self._key, self._findings, checksum, deep=settings.deep
        )
        if lead is not None:
            self._covered.append(cover(chunks.lead_starts(ranges, lead), ranges.starts))
        elif settings.chunks:
            chunks.run(ranges, local=self._source.is_local)
