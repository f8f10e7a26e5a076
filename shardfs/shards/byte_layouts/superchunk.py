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
from shardfs.model.errors import UnsupportedError
from shardfs.model.grid import ceil_div, decimal
from shardfs.model.shard_format import Checksum, ShardIndex, Usage
from shardfs.model.write_plan import bytes_of, joined
from shardfs.shards.byte_layouts.single_page import (
    BLOSC_HEADER,
    MAX_BLOSC_CHUNKS,
    Numbered,
    blosc_index,
    blosc_size,
    blosc_sizes,
    read_exactly,
)
from shardfs.shards.index_reader import require_sound

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Set

    from shardfs.model.blobs import Plan
    from shardfs.model.shard_format import Leads, Put, ShardChange, StoredIndex
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
    flags = bool(options & HAS_OFFSETS), bool(options & HAS_METADATA)
    # the RFC only reserves the bytes of `room`, so a negative number counts as none
    return SuperchunkHeader(*flags, CHECKSUMS[checksum], typesize, chunk_size, last_chunk, chunks, max(room, 0))


def read_head(blob: Blob) -> bytes:
    """Return the first `HEAD` bytes of a file, fewer if it is shorter."""
    return blob.read([ByteRange(0, HEAD)])[0]


class Beginning:
    """The bytes before the chunks; the first read contains most of them.

    All methods raise ValueError, with the reason, for invalid bytes.
    """

    def __init__(self, blob: Blob, head: bytes | None = None) -> None:
        """`head` is the result of `read_head`, if the caller has it already."""
        self._head = read_head(blob) if head is None else head
        self.header = parse_header(self._head)
        self.blob = blob
        self.size = blob.stat().size

    def _part(self, start: int, size: int) -> bytes:
        if start + size <= len(self._head):
            return self._head[start : start + size]
        return read_exactly(self.blob, ByteRange(start, start + size))

    def data_start(self) -> int:
        """Return the first position, in bytes, where a chunk may begin."""
        offsets = 8 * (self.header.chunks + self.header.room) if self.header.has_offsets else 0
        return self.metadata_end() + offsets

    def _metadata_header(self) -> tuple[bytes, Checksum, int, int, int, int]:
        """Return magic, checksum, codec, decoded size, reserved size and stored size of the metadata section."""
        magic, _, checksum, codec, _, size, room, length, _ = METADATA.unpack(self._part(HEADER.size, METADATA.size))
        if checksum >= len(CHECKSUMS):
            raise ValueError(f"checksum {checksum} of its metadata is not known")
        return magic, CHECKSUMS[checksum], codec, size, room, length

    def metadata_end(self) -> int:
        """Return the end of the metadata section in bytes; the end of the header if there is no such section."""
        if not self.header.has_metadata:
            return HEADER.size
        _, checksum, _, _, room, _ = self._metadata_header()
        return HEADER.size + METADATA.size + room + checksum.size

    def metadata(self) -> Metadata | None:
        """Return the metadata section, verified; None if there is none.

        Raise ValueError as all methods of this class.
        """
        if not self.header.has_metadata:
            return None
        magic, checksum, codec, size, room, length = self._metadata_header()
        if length > room or max(size, room) > MAX_METADATA:
            raise ValueError(f"{length} bytes of metadata, {size} when decoded, in a section of {room}")
        section = self._part(HEADER.size + METADATA.size, room + checksum.size)
        checksum.verify(section[:length], section[room:])
        return Metadata(magic.rstrip(b"\0 "), codec, size, section[:length])

    def most(self) -> int:
        """Return the maximum number of chunks that the file may contain."""
        return min(MAX_BLOSC_CHUNKS, self.size // BLOSC_HEADER)

    def index(self, limit: int = MAX_BLOSC_CHUNKS) -> ShardIndex:
        """Return the index of all chunks; chunks that cannot be found are broken. Reads the header of each chunk.

        Raise ValueError for more than `limit` chunks.
        """
        header, end, limit = self.header, self.metadata_end(), min(limit, self.most())
        if header.chunks > limit:
            raise ValueError(f"{header.chunks} chunks in {self.size} bytes; {limit} is the limit")
        if header.chunks < 0:
            places = list(itertools.islice(self._walk(end), limit + 1))
            if len(places) > limit:
                raise ValueError(f"more than {limit} chunks")
            starts, sizes = np.array(places, np.int64).reshape(-1, 2).T
        elif header.has_offsets:
            offsets = np.frombuffer(self._part(end, 8 * header.chunks), "<i8").astype(np.int64)
            starts, sizes = self._places(offsets, end + 8 * header.chunks)
        else:
            starts, sizes = self._places(np.full(header.chunks, -1, np.int64), end)
        bad = (sizes < 0) | (starts + sizes > self.size - header.checksum.size)
        return blosc_index(None, starts, sizes, bad, "Blosc chunk", header.checksum)

    def _places(self, starts: Sizes, begin: int) -> tuple[Sizes, Sizes]:
        """Return starts and sizes of the chunks: -1 for a chunk that cannot be found.

        A start of -1 was not stored: the chunk follows the one before it. No chunk is before `begin`.
        """
        sizes = blosc_sizes(self.blob, starts, (starts >= begin) & (starts <= self.size - BLOSC_HEADER))
        unknown = np.flatnonzero(starts == -1)
        for run in np.split(unknown, np.flatnonzero(np.diff(unknown) != 1) + 1) if len(unknown) else ():
            before, position = int(run[0]) - 1, self.data_start()
            if before >= 0 and sizes[before] < BLOSC_HEADER:
                continue
            if before >= 0:
                position = int(starts[before] + sizes[before]) + self.header.checksum.size
            for i, place in zip(run.tolist(), self._walk(position), strict=False):
                starts[i], sizes[i] = place
        return starts, sizes

    def _walk(self, position: int) -> Iterator[tuple[int, int]]:
        """Yield start and size of consecutive chunks from `position` on, each followed by a checksum.

        A size of -1 means damage; it is last.
        """
        window, begin, length = b"", position, BLOSC_HEADER
        while position < self.size:
            head = window[position - begin : position - begin + BLOSC_HEADER]
            if len(head) < BLOSC_HEADER:
                where = ByteRange(position, min(position + length, self.size))
                window, begin = self.blob.read([where])[0], position
                head = window[:BLOSC_HEADER]
            if not head:
                return
            size = blosc_size(head)
            yield position, size
            if size < 0:
                return
            position += size + self.header.checksum.size
            length = WINDOW if size <= SMALL else BLOSC_HEADER


class Pack(Numbered):
    """A `ShardFormat`: all chunks in one bloscpack file."""

    def walk(self, blob: Blob) -> ShardIndex:
        return Beginning(blob).index(self.per_file)

    def rewrite(self, shard: int, old: StoredIndex | None, change: ShardChange) -> Plan | None:
        """Return the plan of a new file in chunk order; None if no chunk is left.

        Readers step from chunk to chunk and ignore the offsets. Raise UnsupportedError if a chunk before another one
        would be missing, or have another decoded size.
        """
        work = _PackRewriting(old)
        puts = {slot: put for (_, slot), put in change.puts.items()}
        require_sound(self, shard, 0, work.index.without(puts))
        return work.rewritten(puts, {slot for _, slot in change.drops})

    def usage(self, old: StoredIndex, leads: Leads | None = None) -> Usage:
        beginning, size = Beginning(old.blob), old.size
        start = min(beginning.data_start(), size)
        live = old.page(0).live_bytes(beginning.header.checksum.size)
        return Usage(size, start, live, max(size - start - live, 0))


class _PackRewriting:
    """A file that is being rewritten.

    Without an old file, the new one has a table of offsets and no checksums, as in the RFC.
    """

    def __init__(self, old: StoredIndex | None) -> None:
        self._old = None if old is None else old.blob
        if old is None:
            self._head = HEADER.pack(MAGIC, VERSIONS[0], HAS_OFFSETS, 0, 1, 0, 0, 0, 0)
            self._header = parse_header(self._head)
            self._metadata = HEADER.size
            self.index = ShardIndex.empty()
            return
        beginning = Beginning(old.blob)
        if beginning.data_start() > beginning.size:  # the new table has as many entries as the old one
            raise ValueError(f"{beginning.data_start()} bytes before its chunks, but it has {beginning.size}")
        self._head = old.blob.read([ByteRange(0, HEADER.size)])[0]
        self._header = beginning.header
        self._metadata = beginning.metadata_end()
        self.index = old.page(0)

    def rewritten(self, puts: Mapping[int, Put], drops: Set[int]) -> Plan | None:
        """Return the plan of the new file; None if no chunk is left.

        Raise UnsupportedError if the format cannot express the new file.
        """
        slots = sorted({*range(len(self.index)), *puts}.difference(drops))
        if slots != list(range(len(slots))):
            raise UnsupportedError("such a file has no gaps: a chunk can be removed only together with all later ones")
        if not slots:
            return None
        news = {slot: bytes_of(put.data, self._old) for slot, put in puts.items()}
        room = self._header.room
        if self._header.has_offsets:
            room = max(len(self.index) + room - len(slots), 0)
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
        checksum, old = self._header.checksum, len(self.index)
        sizes, begins = np.zeros(n, np.int64), np.zeros(n, np.int64)
        begins[:old], sizes[:old] = self.index.starts[:n], self.index.sizes[:n]
        for i, data in news.items():
            begins[i], sizes[i] = -1, len(data)
        sizes += checksum.size
        rows = enumerate(zip(begins.tolist(), sizes.tolist(), strict=True))
        body = joined(
            news[i] + checksum.digest(news[i]) if i in news else ByteRange(start, start + size)
            for i, (start, size) in rows
        )
        return begin + np.cumsum(sizes) - sizes, body

    def _new_head(self, n: int, room: int, news: Mapping[int, bytes]) -> bytes:
        """Return the new header.

        Raise UnsupportedError unless all decoded chunks except the last have the same size.
        """
        magic, version, options, checksum, typesize, whole, last, _, old_room = HEADER.unpack(self._head)
        if whole >= 0 and last >= 0:
            whole = self._decoded(0, news) if min(n, len(self.index)) < 2 else whole
            last = self._decoded(n - 1, news)
            uneven = (i for i in {*news, len(self.index) - 1} if 0 <= i < n - 1 and self._decoded(i, news) != whole)
            for i in uneven:
                raise UnsupportedError(f"chunk {i} would have {self._decoded(i, news)} bytes, others have {whole}")
            if last > whole:
                raise UnsupportedError(f"the last chunk would have {last} bytes, others have {whole}")
        if self._old is None:
            typesize = news[0][3]
        if room == self._header.room:
            room = old_room  # a negative number counts as 0, but stays
        return HEADER.pack(magic, version, options, checksum, typesize, whole, last, n, room)

    def _decoded(self, i: int, news: Mapping[int, bytes]) -> int:
        """Return the decoded size of a chunk from its header."""
        if i in news:
            head = news[i][:BLOSC_HEADER]
        elif self._old is not None:
            start = int(self.index.starts[i])
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
