"""Verifies one shard: the index against the format, the bytes against the index, the chunks against their codecs."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardfs.codecs.zlib_streams import MAX_STORED
from shardfs.model.blobs import ByteRange, Suffix
from shardfs.model.byte_ranges import Coverage, cover, groups
from shardfs.model.errors import ShardfsError, message
from shardfs.model.grid import ravel
from shardfs.storage.blob_views import SliceBlob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from shardfs.model.blobs import Blob
    from shardfs.model.shard_format import Checksum, ShardIndex
    from shardfs.model.values import U64, Bool, Coords, Sizes, Version
    from shardfs.vfs.chunk_dirs import ChunkDirs

    Buffer = npt.NDArray[np.uint8]
    Look = Callable[[Coords, int, Buffer], None]

SPAN = 1 << 20
"""Bytes per read of local files: few system calls, and the data is still in the CPU cache when it is checked."""

REMOTE_SPAN = 16 << 20
ROWS = 1 << 16
MOST = 20
"""At most this many findings of one kind are listed for each shard; the others are only counted."""

TURNS = 3
"""Maximum number of passes over a damaged shard that changed during verification."""

NAMES = 3
PAGES = 256


class Damage(NamedTuple):
    """One finding.

    Args:
        shard: name of the shard in the source. A shard inside a shard has its position in brackets.
        kind: one of the words in docs/verify.md.
        why: the reason, for users.
        files: paths of the first few affected chunks on a mount; empty if unknown.
        times: number of findings of this kind that this entry represents.
    """

    collection: str
    shard: str
    kind: str
    why: str
    files: tuple[str, ...] = ()
    times: int = 1


@dataclass(slots=True)
class ShardTally:
    """Numbers of items and bytes in verified shards.

    Args:
        shard_bytes: size of the shards.
        stored_bytes: size of the chunks, as the index states.
        dead_bytes: bytes that no index entry refers to.
        shared_bytes: bytes that several index entries refer to, without the first reference.
        outside_chunks: index entries beyond the edge of the array. These remain after an array was shrunk, and are no
            damage.
        looked_bytes: bytes of chunks that were read.
        unchecked_chunks: chunks that a deep run did not decode, because their decoder is missing or they are too large.
    """

    shards: int = 0
    chunks: int = 0
    shard_bytes: int = 0
    stored_bytes: int = 0
    dead_bytes: int = 0
    shared_bytes: int = 0
    outside_chunks: int = 0
    looked_bytes: int = 0
    unchecked_chunks: int = 0
    findings: int = 0

    def add(self, other: ShardTally) -> None:
        """Add the numbers of `other` to these."""
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))


@dataclass(slots=True)
class Report:
    """Counts and findings of some shards of a collection."""

    collection: str
    tally: ShardTally = field(default_factory=ShardTally)
    findings: list[Damage] = field(default_factory=list)

    def add(self, other: Report) -> None:
        """Add the counts and findings of `other` to these."""
        self.tally.add(other.tally)
        self.findings += other.findings


class _Entries(NamedTuple):
    """Valid entries of an index page, ascending by start."""

    coords: U64
    starts: U64
    stops: U64


class ShardVerifier:
    """Verifies shards of one collection, one at a time. Memory grows with the chunks per shard, not with the shards.

    Args:
        deep: read and decode every chunk.
        chunks: check chunks; otherwise check only indices.
        seen: called with the coordinates (n, d) and stored sizes (n,) of indexed chunks.
    """

    def __init__(
        self,
        tree: ChunkDirs,
        *,
        deep: bool = False,
        chunks: bool = True,
        seen: Callable[[U64, Sizes], None] | None = None,
    ) -> None:
        self._tree, self._deep, self._look_at_chunks, self._seen = tree, deep, chunks, seen
        self._layers = tree.shards.layers
        self._check, self._lead = tree.collection.check, tree.collection.lead
        self._report = Report(tree.path)
        self._counts: Counter[tuple[str, str]] = Counter()

    def verify(self, shard: int) -> Report:
        """Verify one outermost shard. Errors of the store and of the data become findings; only bugs raise exceptions.

        Repeats the verification if a damaged local shard has changed meanwhile, at most `TURNS` times in total.
        """
        seen = self._seen
        try:
            for _ in range(TURNS):
                version = self._look_into(shard)
                if not self._report.findings or not self._layers[0].is_local or version == self._version(shard):
                    break
                self._seen = None  # report each chunk to the caller once
        finally:
            self._seen = seen
        return self._report

    def _look_into(self, shard: int) -> Version:
        """Verify a shard once; return the version that was read, or None if the shard is unreadable."""
        self._report, self._counts = Report(self._tree.path), Counter()
        self._report.tally.shards = 1
        outermost, version = self._layers[0], None
        key = outermost.source.key(shard)
        outermost.source.reopen(shard)
        try:
            stored = outermost.source.stored(shard)
            self._report.tally.shard_bytes, _, version = stored.stat()
            self._shard(0, shard, stored)
        except (OSError, ShardfsError, ValueError) as e:
            self._found(key, "read", _reason(e))
        for (kind, where), n in self._counts.items():
            if n > MOST:
                why = f"and {n - MOST} more like these"
                self._report.findings.append(Damage(self._tree.path, where, kind, why, times=n - MOST))
        return version

    def _version(self, shard: int) -> Version:
        source = self._layers[0].source
        source.reopen(shard)
        try:
            return source.stored(shard).stat().version
        except (OSError, ShardfsError, ValueError):
            return None

    def _found(self, shard: str, kind: str, why: str, *coords: Coords) -> None:
        self._report.tally.findings += 1
        self._counts[kind, shard] += 1
        if self._counts[kind, shard] <= MOST:
            files = tuple(self._tree.chunk_path(c) for c in coords[:NAMES])
            self._report.findings.append(Damage(self._tree.path, shard, kind, why, files))

    def _more(self, shard: str, kind: str, n: int) -> None:
        """Count `n` more findings without listing them."""
        if n > 0:
            self._report.tally.findings += n
            self._counts[kind, shard] += n

    # ---- shard ----

    def _shard(self, level: int, shard: int, stored: Blob) -> None:
        source = self._layers[level].source
        key = source.key(shard)
        try:
            self._verify_trailer(level, stored)
            blob = source.unwrap(shard, stored)
        except ValueError as e:
            self._found(key, "shard", str(e))
            return
        _Shard(self, level, shard, blob).verify()

    def _verify_trailer(self, level: int, stored: Blob) -> None:
        """Raise ValueError if a checksum after the shard is wrong. Each checksum covers all bytes before it."""
        trailer = self._layers[level].source.layer.trailer
        if not trailer:
            return
        import google_crc32c

        size = stored.stat().size
        if size < trailer:
            raise ValueError(f"its crc32c should have {trailer} bytes, but the object has {size}")
        crc, position = 0, 0
        for end in range(size - trailer, size, 4):
            for part in _stream(stored, position, end):
                crc = google_crc32c.extend(crc, part)
            told = int.from_bytes(stored.read([ByteRange(end, end + 4)])[0], "little")
            if told != crc:
                raise ValueError(f"the whole shard has crc32c {crc:08x}, but says {told:08x}")
            position = end


class _Shard:
    """State of the verification of one shard of one layer."""

    def __init__(self, owner: ShardVerifier, level: int, shard: int, blob: Blob) -> None:
        self._owner, self._level, self._shard, self._blob = owner, level, shard, blob
        layer = owner._layers[level]
        self._format, self._source = layer.format, layer.source
        self._innermost = level + 1 == len(owner._layers)
        self._key = layer.source.key(shard)
        self._size = blob.stat().size
        self._by_id = self._format.candidates(shard) is None
        self._covered: list[Coverage] = []
        self._checksum: Checksum | None = None
        # `walk` reads headers between chunks. Their ranges are unknown here, so dead bytes cannot be counted.
        self._whole = self._format.walk is None

    def _found(self, kind: str, why: str, *coords: Coords) -> None:
        self._owner._found(self._key, kind, why, *(self._innermost_of(c) for c in coords))

    def _found_all(self, kind: str, coords: U64, at: npt.NDArray[np.intp], why: Callable[[int], str]) -> None:
        """Add a finding for each chunk at the positions `at`. Findings after the first `MOST` are only counted."""
        for i in at[:MOST].tolist():
            self._found(kind, why(i), tuple(coords[i].tolist()))
        self._owner._more(self._key, kind, len(at) - MOST)

    def _innermost_of(self, coords: Coords) -> Coords:
        """Coordinates of the first chunk in a cell of this layer. The cell is a chunk, or a shard of the next layer."""
        for level in range(self._level, len(self._owner._layers) - 1):
            number = ravel(coords, self._owner._layers[level].format.grid)
            inner, _ = self._owner._layers[level + 1].format.coords(number, 0, np.zeros(1, np.uint64))
            coords = tuple(inner[0].tolist())
        return coords

    @property
    def _tally(self) -> ShardTally:
        return self._owner._report.tally

    def verify(self) -> None:
        for page, index in self._pages():
            entries, self._checksum = self._verify_entries(page, index), index.checksum
            coverage = cover(entries.starts, entries.stops)
            self._covered.append(coverage)
            if self._innermost:
                self._tally.chunks += len(entries.starts)
                self._tally.stored_bytes += int((entries.stops - entries.starts).sum())
                if self._owner._seen is not None:
                    self._owner._seen(entries.coords, (entries.stops - entries.starts).astype(np.int64))
                self._verify_chunks(entries)
            else:
                self._verify_inner(entries)
        self._verify_coverage()

    # ---- index ----

    def _pages(self) -> Iterator[tuple[int, ShardIndex]]:
        """Yield every readable page of the index. Unreadable pages become findings."""
        if self._format.walk is not None:
            try:
                yield 0, self._format.walk(self._blob)
            except ValueError as e:
                self._found_index(e, 0)
            return
        for block in range(self._format.blocks):
            try:
                root = self._read_root(block)
                pages = self._format.nonempty_pages(block, root).tolist()
            except ValueError as e:
                self._found_index(e, None)
                return
            for i in range(0, len(pages), PAGES):
                yield from self._read_pages(pages[i : i + PAGES], root)

    def _read_root(self, block: int) -> bytes | None:
        where = self._format.root_request(block)
        if where is None:
            return None
        self._cover_index(where)
        return self._blob.read([where])[0]

    def _read_pages(self, pages: list[int], root: bytes | None) -> Iterator[tuple[int, ShardIndex]]:
        wanted: list[tuple[int, ByteRange]] = []
        for page in pages:
            try:
                request = self._format.page_request(self._shard, page, root)
                if isinstance(request, Suffix):
                    request = ByteRange(max(self._size - request.size, 0), self._size)
                if request is not None and request.stop > self._size:
                    why = f"is said to lie at [{request.start}, {request.stop}), beyond its {self._size} bytes"
                    raise ValueError(f"the index of minishard {page} {why}" if root else f"its index {why}")
                if request is not None:
                    wanted.append((page, request))
            except ValueError as e:
                self._found_index(e, page)
        for (page, where), raw in zip(wanted, self._blob.read([r for _, r in wanted]), strict=True):
            self._cover_index(where)
            try:
                yield page, self._format.decode_page(self._shard, page, raw).arrays()
            except ValueError as e:
                self._found_index(e, page)

    def _cover_index(self, where: ByteRange) -> None:
        stop = min(where.stop, self._size)
        one = np.array([min(where.start, stop)], np.uint64), np.array([stop], np.uint64)
        self._covered.append(Coverage(*one, (), 0))

    def _found_index(self, error: ValueError, page: int | None) -> None:
        """Add a finding for an unreadable index page, and name the first chunks that may be in the page."""
        self._whole = False  # without this page, the number of dead bytes is unknown
        slots = self._format.candidates(self._shard) if page is not None else None
        if slots is None:
            self._found("index", str(error))
            return
        coords, valid = self._format.coords(self._shard, page or 0, slots[:ROWS])
        named = [tuple(c) for c in coords[valid][:NAMES].tolist()]
        self._found("index", str(error), *named)

    # ---- index entries ----

    def _verify_entries(self, page: int, index: ShardIndex) -> _Entries:
        """The valid entries of an index page. Invalid entries become findings."""
        slots = index.all_slots()
        if index.repeated is not None:
            for slot in index.repeated.tolist():
                at = np.array([slot], np.uint64)
                coords, _ = self._format.coords(self._shard, page, at)
                self._found("duplicate", f"id {slot} has several entries in its index", tuple(coords[0].tolist()))
        parts = [self._verify_some(page, slots[i : i + ROWS], index, i) for i in range(0, max(len(slots), 1), ROWS)]
        coords, starts, sizes = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(starts, kind="stable")
        return _Entries(coords[order], starts[order], (starts + sizes)[order])

    def _verify_some(self, page: int, slots: U64, index: ShardIndex, at: int) -> tuple[U64, U64, U64]:
        coords, valid = self._format.coords(self._shard, page, slots)
        starts = index.starts[at : at + len(slots)].astype(np.uint64)
        sizes = index.sizes[at : at + len(slots)].astype(np.uint64)
        if not valid.all():
            self._found_lost(page, slots[~valid], coords[~valid])
        size = np.uint64(self._size)
        leaves = (starts > size) | (sizes > size - np.minimum(starts, size))
        broken = np.array([i - at for i in index.broken if at <= i < at + len(slots)], np.intp)
        good = valid & ~leaves
        good[broken] = False
        leaves[broken] = False
        self._found_all("entry", coords, broken[valid[broken]], lambda i: index.broken[at + i])

        def leaving(i: int) -> str:
            where = f"[{int(starts[i])}, {int(starts[i]) + int(sizes[i])})"
            return f"its range {where} leaves the object of {self._size} bytes"

        self._found_all("range", coords, np.flatnonzero(leaves & valid), leaving)
        if self._innermost:
            self._verify_sizes(coords, sizes, good)
        return coords[good], starts[good], sizes[good]

    def _found_lost(self, page: int, slots: U64, coords: U64) -> None:
        """Count or report entries that no reader finds, because they are outside the grid or in the wrong place."""
        if not self._by_id:
            self._tally.outside_chunks += len(slots)
            return
        homes = self._format.place_many(coords)
        grid = np.array([min(n, 2**64 - 1) for n in self._format.grid], np.uint64)
        known = (homes.slot == slots) & (coords < grid).all(axis=1)

        def elsewhere(i: int) -> str:
            where = f"{self._source.key(int(homes.shard[i]))}, minishard {homes.page[i]}"
            return f"id {slots[i]} stands in minishard {page}, but belongs in {where}"

        self._found_all("placement", coords, np.flatnonzero(known), elsewhere)
        beyond = slots[~known]
        for slot in beyond[:MOST].tolist():
            self._found("grid", f"id {slot} is that of no chunk of the grid")
        self._owner._more(self._key, "grid", len(beyond) - MOST)

    def _verify_sizes(self, coords: U64, sizes: U64, good: Bool) -> None:
        check = self._owner._check
        wanted = check.sizes(coords) if check is not None else None
        if wanted is None:
            return
        wrong = np.flatnonzero(good & (sizes.astype(np.int64) != wanted))
        self._found_all("size", coords, wrong, lambda i: f"{wanted[i]} bytes expected, {sizes[i]} stored")

    # ---- overlaps and dead bytes ----

    def _verify_coverage(self) -> None:
        starts = np.concatenate([c.starts for c in self._covered] or [np.empty(0, np.uint64)])
        stops = np.concatenate([c.stops for c in self._covered] or [np.empty(0, np.uint64)])
        whole = cover(starts, stops)
        self._tally.shared_bytes += sum(c.shared for c in self._covered) + whole.shared
        if self._whole:
            self._tally.dead_bytes += self._size - whole.nbytes
        clashes = [clash for c in (*self._covered, whole) for clash in c.clashes]
        if clashes:
            for (start, stop), owners in self._owners(clashes[:MOST]).items():
                why = f"its bytes [{start}, {stop}) are said to be something else, too"
                self._found("overlap", why, *owners)
            self._owner._more(self._key, "overlap", len(clashes) - MOST)

    def _owners(self, clashes: list[tuple[int, int]]) -> dict[tuple[int, int], list[Coords]]:
        """For each overlap, the first chunks whose index entries cover these bytes. Reads the index again."""
        out: dict[tuple[int, int], list[Coords]] = {clash: [] for clash in clashes}
        quiet = _Shard(ShardVerifier(self._owner._tree, chunks=False), self._level, self._shard, self._blob)
        for page, index in quiet._pages():
            entries = quiet._verify_entries(page, index)
            for (start, stop), owners in out.items():
                here = np.flatnonzero((entries.starts < np.uint64(stop)) & (entries.stops > np.uint64(start)))
                owners += [tuple(c) for c in entries.coords[here[:NAMES]].tolist()]
        return out

    # ---- chunk data ----

    def _verify_inner(self, entries: _Entries) -> None:
        layers = self._owner._layers
        for cell, start, stop in zip(
            entries.coords.tolist(), entries.starts.tolist(), entries.stops.tolist(), strict=True
        ):
            number = ravel(tuple(cell), self._format.grid)
            try:
                self._owner._shard(self._level + 1, number, SliceBlob(self._blob, start, stop - start))
            except OSError as e:
                self._owner._found(layers[self._level + 1].source.key(number), "read", message(e))

    def _verify_chunks(self, entries: _Entries) -> None:
        owner, check, transform = self._owner, self._owner._check, self._owner._tree.collection.transform
        if owner._lead is not None:
            self._verify_leads(entries)
            return
        if not owner._look_at_chunks:
            return
        if owner._deep and (check is None or check.unchecked):
            self._tally.unchecked_chunks += len(entries.starts)
        looks: list[tuple[str, Look]] = []
        if self._checksum is not None and self._checksum.size:
            looks.append(("checksum", _checksum_look(self._checksum)))
        if check is not None and check.head is None:
            looks.append(("checksum", check.quick))
        elif check is not None and check.head and owner._deep:
            looks.append(("decode", check.quick))
        elif check is not None and check.head and self._source.is_local:
            self._look_at_heads(entries, check.head, check.quick)
        if owner._deep and check is not None and not check.plain:
            looks.append(("decode", lambda coords, _, data: check.deep(coords, data.tobytes())))
        elif owner._deep and check is None and transform is not None:
            looks.append(("decode", lambda coords, _, data: _nothing(transform.show(coords, data.tobytes()))))
        if looks or owner._deep:
            self._look(entries, looks)

    def _verify_leads(self, entries: _Entries) -> None:
        lead = self._owner._lead
        begins = entries.starts.copy()
        at = {tuple(c): i for i, c in enumerate(entries.coords.tolist())} if lead is not None else {}

        def look(coords: Coords, size: int, data: Buffer) -> None:
            if lead is None:
                return
            stored = data.tobytes()
            before = lead.size(stored if lead.transform is None else bytes(lead.transform.show(coords, stored)))
            start = int(entries.starts[at[coords]])
            if before > start:
                raise ValueError(f"{before} bytes should lie before it, but it begins at {start}")
            begins[at[coords]] = start - before

        self._look(entries, [("decode", look)])
        self._covered.append(cover(begins, entries.starts))

    def _look(self, entries: _Entries, looks: Sequence[tuple[str, Look]]) -> None:
        """Read all chunks and run the checks `looks` on each chunk, up to the first check that fails."""
        local = self._blob.fd >= 0
        behind = self._checksum.size if self._checksum is not None else 0
        coords, stops = entries.coords, entries.stops + np.uint64(behind)
        buffer = np.empty(SPAN, np.uint8) if local else np.empty(0, np.uint8)
        for first, end, stop in groups(entries.starts, stops, SPAN if local else REMOTE_SPAN):
            start = int(entries.starts[first])
            alone = end == first + 1
            if alone and stop - start > (MAX_STORED if looks else SPAN):
                self._tally.unchecked_chunks += bool(looks)  # decoding this chunk would take too much memory
                self._read_through(tuple(coords[first].tolist()), start, stop)
                continue
            try:
                data = _read(self._blob, start, stop, buffer)
            except (OSError, ValueError) as e:
                if alone:
                    self._found("read", _reason(e), tuple(coords[first].tolist()))
                else:
                    for i in range(first, end):
                        self._look(_Entries(*(column[i : i + 1] for column in entries)), looks)
                continue
            self._tally.looked_bytes += stop - start
            if not looks:
                continue
            begins, ends = entries.starts[first:end].tolist(), stops[first:end].tolist()
            for cell, a, b in zip(coords[first:end].tolist(), begins, ends, strict=True):
                self._look_at(tuple(cell), data[a - start : b - start], behind, looks)

    def _look_at(self, coords: Coords, data: Buffer, behind: int, looks: Sequence[tuple[str, Look]]) -> None:
        """Run the checks on one chunk. `data` ends with a checksum of `behind` bytes that the first check verifies."""
        for kind, look in looks:
            try:
                look(coords, len(data), data)
                data = data[: len(data) - behind]
                behind = 0
            except ValueError as e:
                self._found(kind, str(e), coords)
                return

    def _read_through(self, coords: Coords, start: int, stop: int) -> None:
        try:
            for part in _stream(self._blob, start, stop):
                self._tally.looked_bytes += len(part)
        except (OSError, ValueError) as e:
            self._found("read", _reason(e), coords)

    def _look_at_heads(self, entries: _Entries, head: int, look: Look) -> None:
        buffer = np.empty(head, np.uint8)
        columns = entries.coords.tolist(), entries.starts.tolist(), entries.stops.tolist()
        for cell, start, stop in zip(*columns, strict=True):
            coords = tuple(cell)
            try:
                data = _read(self._blob, start, min(start + head, stop), buffer)
                look(coords, stop - start, data)
            except OSError as e:
                self._found("read", message(e), coords)
            except ValueError as e:
                self._found("decode", str(e), coords)


def _checksum_look(checksum: Checksum) -> Look:
    def look(coords: Coords, size: int, data: Buffer) -> None:
        stored = data.tobytes()
        checksum.verify(stored[: size - checksum.size], stored[size - checksum.size :])

    return look


def _nothing(_: object) -> None:
    """Discard a value."""


def _reason(error: Exception) -> str:
    return message(error) if isinstance(error, OSError) else str(error)


def _read(blob: Blob, start: int, stop: int, buffer: Buffer) -> Buffer:
    """Read a range of a blob, into `buffer` if the blob is local and the range fits. ValueError: the blob is short."""
    size = stop - start
    if blob.fd < 0:
        data = np.frombuffer(blob.read([ByteRange(start, stop)])[0], np.uint8)
        n = len(data)
    else:
        data = buffer[:size] if size <= len(buffer) else np.empty(size, np.uint8)
        n = 0
        while n < size:
            got = os.preadv(blob.fd, [data[n:].data], blob.base + start + n)
            if not got:
                break
            n += got
    if n < size:
        raise ValueError(f"{size} bytes expected at {start}, {n} found")
    return data


def _stream(blob: Blob, start: int, stop: int) -> Iterator[Buffer]:
    """Read a range of a blob in pieces. The next piece overwrites the previous one."""
    span = SPAN if blob.fd >= 0 else REMOTE_SPAN
    buffer = np.empty(min(span, stop - start), np.uint8)
    for begin in range(start, stop, span):
        yield _read(blob, begin, min(begin + span, stop), buffer)
