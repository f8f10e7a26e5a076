"""Files of consecutive Blosc chunks, each followed by its checksum: superchunks and bloscpack files.

"RFC for a persistence layer for bcolz" (bcolz, docs/persistence.rst), section "The superchunk layout", and bloscpack
(https://github.com/Blosc/bloscpack, README). Their headers differ in the version only. Integers are little-endian.
"""

from __future__ import annotations

import itertools
import os
import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardfs.codecs.decoders import CHECKSUMS
from shardfs.model.blobs import Blob, ByteRange
from shardfs.model.byte_ranges import live_bytes
from shardfs.model.errors import UnsupportedError
from shardfs.model.grid import ceil_div, decimal
from shardfs.model.shard_format import MAX_BROKEN, Checksum, ShardIndex, Usage
from shardfs.model.write_plan import bytes_of
from shardfs.shards.byte_layouts.single_page import (
    BLOSC_HEADER,
    MAX_BLOSC_CHUNKS,
    Numbered,
    blosc_size,
    blosc_sizes,
    read_exactly,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Set

    from shardfs.model.blobs import Plan
    from shardfs.model.shard_format import Leads, Put
    from shardfs.model.values import Sizes

MAGIC = b"blpk"
HEADER = struct.Struct("<4sBBBBiiqq")
METADATA = struct.Struct("<8sBBBBIII8s")
HAS_OFFSETS, HAS_METADATA = 1, 2
VERSIONS = (2, 3)
"""2 in the RFC, 3 in bloscpack. bcolz writes version 1, with a header of 16 bytes, around each of its chunks."""

HEAD = 64 << 10
"""Size of the first read: header, metadata and offsets of all but the largest files."""

MAX_METADATA = 16 << 20

SMALL, WINDOW = 16 << 10, 64 << 10
"""Without offsets, a chunk's header is found only after the previous chunk.

Headers of small chunks are read together.
"""


class SuperchunkHeader(NamedTuple):
    """The first 32 bytes. Sizes, in bytes, and the number of chunks are -1 where the writer did not know them."""

    has_offsets: bool
    has_metadata: bool
    checksum: Checksum
    typesize: int
    chunk_size: int
    last_chunk: int
    chunks: int
    room: int
    """Number of free entries in the table of offsets, reserved for new chunks."""


class Metadata(NamedTuple):
    """The metadata section. If `codec` is 1, `data` is compressed with zlib; `size` is the uncompressed size."""

    magic: bytes
    codec: int
    size: int
    data: bytes


def is_superchunk(head: bytes) -> bool:
    """Return whether a file is a superchunk or a bloscpack file from its first bytes.

    A single bcolz chunk is neither.
    """
    return head[:4] == MAGIC and len(head) > 4 and head[4] in VERSIONS


def parse_header(head: bytes) -> SuperchunkHeader:
    """Parse the 32 bytes of a header. Raise ValueError, with the reason, if they are invalid."""
    if len(head) < HEADER.size:
        raise ValueError(f"its header should have {HEADER.size} bytes, but it ends after {len(head)}")
    _, _, options, checksum, typesize, chunk_size, last_chunk, chunks, room = HEADER.unpack_from(head)
    if not is_superchunk(head):
        raise ValueError(f"starts with {head[:5].hex()} instead of {MAGIC.hex()} and a version of 2 or 3")
    if options & ~(HAS_OFFSETS | HAS_METADATA) or checksum >= len(CHECKSUMS):
        raise ValueError(f"options {options:#x} and checksum {checksum} are not all known")
    if chunks < -1 or (chunks == -1 and options & HAS_OFFSETS):
        raise ValueError(f"a table of offsets of {chunks} chunks")
    return SuperchunkHeader(
        bool(options & HAS_OFFSETS),
        bool(options & HAS_METADATA),
        CHECKSUMS[checksum],
        typesize,
        chunk_size,
        last_chunk,
        chunks,
        max(room, 0),  # the RFC only reserves these bytes
    )


def read_head(blob: Blob) -> bytes:
    """Return the bytes of the first read."""
    return blob.read([ByteRange(0, HEAD)])[0]


class Beginning:
    """The bytes before the chunks; the first read contains most of them.

    All methods raise ValueError, with the reason, for invalid bytes.
    """

    def __init__(self, blob: Blob, head: bytes | None = None) -> None:
        """`head` is the result of `read_head`, if the caller has it already."""
        self._head = read_head(blob) if head is None else head
        self.header = parse_header(self._head)
        self.blob, self.size = blob, blob.stat().size

    def _part(self, start: int, size: int) -> bytes:
        if start + size <= len(self._head):
            return self._head[start : start + size]
        return read_exactly(self.blob, ByteRange(start, start + size))

    def data_start(self) -> int:
        """Return the first position where a chunk may begin."""
        offsets = 8 * (self.header.chunks + self.header.room) if self.header.has_offsets else 0
        return self.metadata_end() + offsets

    def metadata_end(self) -> int:
        """Return the end of the metadata section; the end of the header if there is no such section."""
        if not self.header.has_metadata:
            return HEADER.size
        _, _, checksum, _, _, _, room, _, _ = METADATA.unpack(self._part(HEADER.size, METADATA.size))
        if checksum >= len(CHECKSUMS):
            raise ValueError(f"checksum {checksum} of its metadata is not known")
        end: int = HEADER.size + METADATA.size + room + CHECKSUMS[checksum].size
        return end

    def metadata(self) -> Metadata | None:
        """Return the metadata section, verified; None if there is none."""
        if not self.header.has_metadata:
            return None
        magic, _, checksum, codec, _, size, room, stored, _ = METADATA.unpack(self._part(HEADER.size, METADATA.size))
        if stored > room or max(size, room) > MAX_METADATA:
            raise ValueError(f"{stored} bytes of metadata, {size} when decoded, in a section of {room}")
        start = HEADER.size + METADATA.size
        section = self._part(start, self.metadata_end() - start)
        CHECKSUMS[checksum].verify(section[:stored], section[room:])
        return Metadata(magic.rstrip(b"\0 "), codec, size, section[:stored])

    def most(self) -> int:
        """Return the maximum number of chunks that the file may contain."""
        return min(MAX_BLOSC_CHUNKS, self.size // BLOSC_HEADER)

    def index(self, most: int = MAX_BLOSC_CHUNKS) -> ShardIndex:
        """Return the index of all chunks; chunks that cannot be found are broken.

        Raise ValueError for more than `most` chunks.
        """
        header, end, most = self.header, self.metadata_end(), min(most, self.most())
        if header.chunks > most:
            raise ValueError(f"{header.chunks} chunks in {self.size} bytes; {most} is the limit")
        if not header.has_offsets:
            return _by_walking(self.blob, self.size, header, end, most)
        offsets = np.frombuffer(self._part(end, 8 * header.chunks), "<i8").astype(np.int64)
        return _by_offsets(self.blob, self.size, header, offsets, end + 8 * header.chunks)


def _by_offsets(blob: Blob, size: int, header: SuperchunkHeader, starts: Sizes, begin: int) -> ShardIndex:
    sizes = np.full(len(starts), -1, np.int64)
    inside = (starts >= begin) & (starts <= size - BLOSC_HEADER)
    sizes[inside] = blosc_sizes(blob, starts[inside])
    # the writer did not store these offsets; the chunks follow the previous ones
    unknown = np.flatnonzero(starts == -1)
    for run in np.split(unknown, np.flatnonzero(np.diff(unknown) != 1) + 1):
        if not len(run):
            break
        before = int(run[0]) - 1
        if before >= 0 and sizes[before] < BLOSC_HEADER:
            continue
        position = begin + 8 * header.room if before < 0 else int(starts[before] + sizes[before]) + header.checksum.size
        for i, found in zip(run.tolist(), _walk(blob, size, position, header.checksum.size), strict=False):
            starts[i], sizes[i] = found
    return _index(starts, sizes, header.checksum, size)


def _by_walking(blob: Blob, size: int, header: SuperchunkHeader, begin: int, most: int) -> ShardIndex:
    walk = _walk(blob, size, begin, header.checksum.size)
    found = list(itertools.islice(walk, header.chunks if header.chunks >= 0 else most + 1))
    if len(found) > most:
        raise ValueError(f"more than {most} chunks")
    rows = np.full((max(len(found), header.chunks), 2), -1, np.int64)
    rows[: len(found)] = np.array(found, np.int64).reshape(-1, 2)
    return _index(rows[:, 0], rows[:, 1], header.checksum, size)


def _walk(blob: Blob, size: int, position: int, gap: int) -> Iterator[tuple[int, int]]:
    """Yield start and size of consecutive chunks from `position` on, `gap` bytes apart.

    A size of -1 means damage; it is last.
    """
    window, begin, length = b"", position, BLOSC_HEADER
    while position < size:
        head = window[position - begin : position - begin + BLOSC_HEADER]
        if len(head) < BLOSC_HEADER:
            window, begin = blob.read([ByteRange(position, min(position + length, size))])[0], position
            head = window[:BLOSC_HEADER]
        if not head:
            return
        stored = blosc_size(head)
        yield position, stored
        if stored < 0:
            return
        position += stored + gap
        length = WINDOW if stored <= SMALL else BLOSC_HEADER


def _index(starts: Sizes, sizes: Sizes, checksum: Checksum, object_size: int) -> ShardIndex:
    bad = np.flatnonzero((sizes < 0) | (starts + sizes > object_size - checksum.size))
    keep = np.ones(len(starts), np.bool_)
    keep[bad[MAX_BROKEN:]] = False  # further broken chunks become absent, to limit the size of the dictionary
    slots = None if keep.all() else np.flatnonzero(keep).astype(np.uint64)
    at = (np.cumsum(keep) - 1)[bad[:MAX_BROKEN]]
    told = starts[bad[:MAX_BROKEN]]
    broken = {i: f"no whole Blosc chunk at {start}" for i, start in zip(at.tolist(), told.tolist(), strict=True)}
    starts, sizes = starts[keep].clip(0), sizes[keep].clip(0)
    return ShardIndex(slots, starts.astype(np.uint64), sizes.astype(np.uint64), broken, checksum)


class Pack(Numbered):
    """A `ShardFormat`: all chunks in one bloscpack file."""

    unwritable = ""

    def walk(self, blob: Blob) -> ShardIndex:
        return Beginning(blob).index(self.per_file)

    def rewrite(
        self,
        shard: int,
        old: Blob | None,
        puts: Mapping[tuple[int, int], Put],
        drops: Set[tuple[int, int]],
        *,
        pack: bool = False,
        forward: bool = False,
        leads: Leads | None = None,
    ) -> Plan | None:
        """Return the plan of a new file in chunk order. Readers step from chunk to chunk and ignore the offsets."""
        work = _Rewriting(old, self.per_file)
        return work.rewritten({slot: put for (_, slot), put in puts.items()}, {slot for _, slot in drops})

    def repack(self, shard: int, old: Blob, *, leads: Leads | None = None) -> Plan | None:
        return self.rewrite(shard, old, {}, frozenset())

    def usage(self, shard: int, old: Blob, *, leads: Leads | None = None) -> Usage:
        beginning = Beginning(old)
        size = beginning.size
        own = min(beginning.data_start(), size)
        live = live_bytes(beginning.index(self.per_file), beginning.header.checksum.size)
        return Usage(size, own, live, max(size - own - live, 0))


class _Rewriting:
    """A file that is being rewritten.

    Without an old file, the new one has a table of offsets and no checksums, as in the RFC.
    """

    def __init__(self, old: Blob | None, most: int) -> None:
        self._old = old
        if old is None:
            self._head = HEADER.pack(MAGIC, VERSIONS[0], HAS_OFFSETS, 0, 1, 0, 0, 0, 0)
            self._header, self._metadata, self._index = parse_header(self._head), HEADER.size, ShardIndex.empty()
            return
        beginning = Beginning(old)
        if beginning.data_start() > beginning.size:  # the new table has as many entries as the old one
            raise ValueError(f"{beginning.data_start()} bytes before its chunks, but it has {beginning.size}")
        self._head, self._header = old.read([ByteRange(0, HEADER.size)])[0], beginning.header
        self._metadata, self._index = beginning.metadata_end(), beginning.index(most)

    def rewritten(self, puts: Mapping[int, Put], drops: Set[int]) -> Plan | None:
        """Return the plan of the new file; None if no chunk is left.

        Raise ValueError if a chunk cannot be found, and UnsupportedError if the format cannot express the new file.
        """
        lost = [why for i, why in self._index.broken.items() if i not in puts]
        if lost or (self._index.slots is not None and len(self._index)):
            raise ValueError(lost[0] if lost else "many chunks cannot be found")
        slots = sorted({*range(len(self._index)), *puts}.difference(drops))
        if slots != list(range(len(slots))):
            raise UnsupportedError("chunks lie one behind the other in such a file: none can be left out before others")
        if not slots:
            return None
        news = {slot: bytes_of(put.data, self._old) for slot, put in puts.items()}
        room = self._header.room
        if self._header.has_offsets:
            room = max(len(self._index) + room - len(slots), 0)
        begin = self._metadata + (8 * (len(slots) + room) if self._header.has_offsets else 0)
        starts, body = self._body(len(slots), news, begin)
        plan: Plan = [self._new_head(len(slots), room, news)]
        if self._metadata > HEADER.size:
            plan.append(ByteRange(HEADER.size, self._metadata))
        if self._header.has_offsets:
            plan.append(np.append(starts, np.full(room, -1, np.int64)).astype("<i8").tobytes())
        return plan + body

    def _body(self, n: int, news: Mapping[int, bytes], begin: int) -> tuple[Sizes, Plan]:
        """Return the starts of all chunks, the first at `begin`, and the plan of chunks and checksums."""
        checksum, old = self._header.checksum, len(self._index)
        sizes, begins = np.zeros(n, np.int64), np.zeros(n, np.int64)
        begins[:old], sizes[:old] = self._index.starts[:n], self._index.sizes[:n]
        for i, data in news.items():
            begins[i], sizes[i] = -1, len(data)
        sizes += checksum.size
        body: Plan = []
        for i, (start, size) in enumerate(zip(begins.tolist(), sizes.tolist(), strict=True)):
            before = body[-1] if body else None
            if i in news:
                body.append(news[i] + checksum.digest(news[i]))
            elif isinstance(before, ByteRange) and before.stop == start:
                body[-1] = ByteRange(before.start, start + size)
            else:
                body.append(ByteRange(start, start + size))
        return begin + np.cumsum(sizes) - sizes, body

    def _new_head(self, n: int, room: int, news: Mapping[int, bytes]) -> bytes:
        """Return the new header.

        Raise UnsupportedError unless all decoded chunks except the last have the same size.
        """
        magic, version, options, checksum, typesize, whole, last, _, told = HEADER.unpack(self._head)
        if whole >= 0 and last >= 0:
            whole = self._decoded(0, news) if min(n, len(self._index)) < 2 else whole
            last = self._decoded(n - 1, news)
            uneven = (i for i in {*news, len(self._index) - 1} if 0 <= i < n - 1 and self._decoded(i, news) != whole)
            for i in uneven:
                raise UnsupportedError(f"chunk {i} would have {self._decoded(i, news)} bytes, others have {whole}")
            if last > whole:
                raise UnsupportedError(f"the last chunk would have {last} bytes, others have {whole}")
        if self._old is None:
            typesize = news[0][3]
        told = room if room != self._header.room else told
        return HEADER.pack(magic, version, options, checksum, typesize, whole, last, n, told)

    def _decoded(self, i: int, news: Mapping[int, bytes]) -> int:
        """Return the decoded size of a chunk from its header."""
        if i in news:
            head = news[i][:BLOSC_HEADER]
        elif self._old is not None:
            start = int(self._index.starts[i])
            head = self._old.read([ByteRange(start, start + BLOSC_HEADER)])[0]
        return int.from_bytes(head[4:8], "little")


class Superchunks(Pack):
    """A `ShardFormat`: files of a fixed number of chunks; the last may have fewer."""

    def key(self, shard: int) -> str:
        return f"__{shard + 1}__.bin"

    def shard_of(self, key: str) -> int | None:
        number = decimal(os.fsencode(key[2:-6])) if key.startswith("__") and key.endswith("__.bin") else None
        files = ceil_div(self.grid[0], self.per_file)
        return number - 1 if number is not None and 1 <= number <= files else None
