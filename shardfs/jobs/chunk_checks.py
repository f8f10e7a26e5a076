"""Reads the chunks of one shard, and checks them: checksums, first bytes, decoding."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardfs.codecs.zlib_streams import MAX_STORED
from shardfs.model.blobs import ByteRange
from shardfs.model.byte_ranges import groups
from shardfs.model.errors import message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from shardfs.jobs.findings import ShardFindings
    from shardfs.model.blobs import Blob
    from shardfs.model.collection import Collection, Lead
    from shardfs.model.shard_format import Checksum
    from shardfs.model.values import U64, Coords

    Buffer = npt.NDArray[np.uint8]
    CheckFunction = Callable[[Coords, int, Buffer], object]
    """Raises ValueError if the chunk at these coordinates, of this stored size and with these bytes, is damaged."""

SPAN = 1 << 20
"""Bytes per read of local files: few system calls, and the data is still in the CPU cache when it is checked."""

REMOTE_SPAN = 16 << 20


class ChunkRanges(NamedTuple):
    """The ranges of chunks that an index page states, ascending by start.

    Args:
        coords: the coordinates of the chunks (n, d).
        starts, stops: byte positions in the shard (n,).
    """

    coords: U64
    starts: U64
    stops: U64


@dataclass(frozen=True)
class ChunkVerifier:
    """Checks the chunks of a shard of the innermost layer. What it finds and counts goes into `findings`.

    Args:
        blob: the bytes of the shard, not closed.
        key: name of the shard, for findings.
        checksum: given if a checksum follows each chunk.
        deep: read and decode every chunk.
    """

    collection: Collection
    blob: Blob
    key: str
    findings: ShardFindings
    checksum: Checksum | None
    _: KW_ONLY
    deep: bool

    def run(self, ranges: ChunkRanges, *, local: bool) -> None:
        """Run all checks of the collection. `local`: reading the first bytes of each chunk costs no requests.

        Errors of the store and of the data become findings.
        """
        check = self.collection.check
        if self.deep and (check is None or check.unchecked):
            self.findings.tally.unchecked_chunks += len(ranges.starts)
        if check is not None and check.head and local and not self.deep:
            self._check_heads(ranges, check.head, check.quick)
        checks = list(self._checks())
        if checks or self.deep:
            self.check(ranges, checks)

    def _checks(self) -> Iterator[tuple[str, CheckFunction]]:
        """The checks of whole chunks in order, each with the kind of its findings."""
        check = self.collection.check
        transform = self.collection.transform
        if self.checksum is not None and self.checksum.size:
            yield "checksum", partial(_verify_checksum, self.checksum)
        if check is not None and check.head is None:
            yield "checksum", check.quick
        if not self.deep:
            return
        if check is not None and check.head:
            yield "decode", check.quick
        if check is not None and not check.plain:
            yield "decode", lambda coords, _, data: check.deep(coords, data.tobytes())
        elif check is None and transform is not None:
            yield "decode", lambda coords, _, data: transform.show(coords, data.tobytes())

    def lead_starts(self, ranges: ChunkRanges, lead: Lead) -> U64:
        """Return where the bytes before each chunk (n,) begin that belong to it. Reads and decodes the chunks.

        For a chunk that cannot be decoded, which becomes a finding, this is the start of the chunk.
        """
        begins = ranges.starts.copy()
        at = {tuple(c): i for i, c in enumerate(ranges.coords.tolist())}

        def measure(coords: Coords, size: int, data: Buffer) -> None:
            chunk = data.tobytes()
            before = lead.size(chunk if lead.transform is None else bytes(lead.transform.show(coords, chunk)))
            start = int(ranges.starts[at[coords]])
            if before > start:
                raise ValueError(f"{before} bytes should lie before it, but it begins at {start}")
            begins[at[coords]] = start - before

        self.check(ranges, [("decode", measure)])
        return begins

    def check(self, ranges: ChunkRanges, checks: Sequence[tuple[str, CheckFunction]]) -> None:
        """Read all chunks and run the checks on each chunk, up to the first check that fails.

        `checks` are functions, each with the kind of its findings. Without any, the chunks are only read.
        """
        span = SPAN if self.blob.fd >= 0 else REMOTE_SPAN
        behind = self.checksum.size if self.checksum is not None else 0
        coords, stops = ranges.coords, ranges.stops + np.uint64(behind)
        buffer = _buffer(self.blob)
        for first, end, stop in groups(ranges.starts, stops, span):
            start, alone = int(ranges.starts[first]), end == first + 1
            if alone and stop - start > (MAX_STORED if checks else SPAN):
                self.findings.tally.unchecked_chunks += bool(checks)  # decoding this chunk would take too much memory
                self._read_through(tuple(coords[first].tolist()), start, stop)
                continue
            try:
                data = _read(self.blob, start, stop, buffer)
            except (OSError, ValueError) as e:
                if alone:
                    self._add_finding("read", reason(e), tuple(coords[first].tolist()))
                else:
                    for i in range(first, end):
                        self.check(ChunkRanges(*(column[i : i + 1] for column in ranges)), checks)
                continue
            self.findings.tally.looked_bytes += stop - start
            if not checks:
                continue
            begins, ends = ranges.starts[first:end].tolist(), stops[first:end].tolist()
            for cell, a, b in zip(coords[first:end].tolist(), begins, ends, strict=True):
                self._check_one(tuple(cell), data[a - start : b - start], behind, checks)

    def _check_one(
        self, coords: Coords, data: Buffer, behind: int, checks: Sequence[tuple[str, CheckFunction]]
    ) -> None:
        """Run the checks on one chunk. `data` ends with a checksum of `behind` bytes that the first check verifies."""
        for kind, check in checks:
            try:
                check(coords, len(data), data)
            except ValueError as e:
                self._add_finding(kind, str(e), coords)
                return
            data, behind = data[: len(data) - behind], 0

    def _read_through(self, coords: Coords, start: int, stop: int) -> None:
        try:
            for part in stream(self.blob, start, stop):
                self.findings.tally.looked_bytes += len(part)
        except (OSError, ValueError) as e:
            self._add_finding("read", reason(e), coords)

    def _check_heads(self, ranges: ChunkRanges, head: int, check: CheckFunction) -> None:
        buffer = np.empty(head, np.uint8)
        for cell, start, stop in zip(*(column.tolist() for column in ranges), strict=True):
            coords = tuple(cell)
            try:
                check(coords, stop - start, _read(self.blob, start, min(start + head, stop), buffer))
            except (OSError, ValueError) as e:
                self._add_finding("read" if isinstance(e, OSError) else "decode", reason(e), coords)

    def _add_finding(self, kind: str, why: str, coords: Coords) -> None:
        self.findings.add(self.key, kind, why, coords)


def _verify_checksum(checksum: Checksum, _coords: Coords, size: int, data: Buffer) -> None:
    chunk = data.tobytes()
    checksum.verify(chunk[: size - checksum.size], chunk[size - checksum.size :])


def reason(error: Exception) -> str:
    """Return the reason of a finding: the text of an error of the store or of the data, for users."""
    return str(error) if isinstance(error, ValueError) else message(error)


def _buffer(blob: Blob, size: int = SPAN) -> Buffer:
    """A buffer to read up to `size` bytes of a blob; empty if the blob is not local, because reads allocate there."""
    return np.empty(size if blob.fd >= 0 else 0, np.uint8)


def _read(blob: Blob, start: int, stop: int, buffer: Buffer) -> Buffer:
    """Read a range of a blob, into `buffer` if the blob is local and the range fits. ValueError: the blob is short."""
    size = stop - start
    if blob.fd < 0:
        data = np.frombuffer(blob.read([ByteRange(start, stop)])[0], np.uint8)
        n = len(data)
    else:
        data = buffer[:size] if size <= len(buffer) else np.empty(size, np.uint8)
        n = 0
        while n < size and (got := os.preadv(blob.fd, [data[n:].data], blob.file_offset + start + n)):
            n += got
    if n < size:
        raise ValueError(f"{size} bytes expected at {start}, {n} found")
    return data


def stream(blob: Blob, start: int, stop: int) -> Iterator[Buffer]:
    """Yield the bytes from `start` to below `stop` in pieces. The next one overwrites the previous one.

    Raise ValueError if the blob is shorter, OSError if it cannot be read.
    """
    span = SPAN if blob.fd >= 0 else REMOTE_SPAN
    buffer = _buffer(blob, min(span, stop - start))
    for begin in range(start, stop, span):
        yield _read(blob, begin, min(begin + span, stop), buffer)
