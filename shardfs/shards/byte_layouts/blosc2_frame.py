"""Contiguous frames: files of consecutive Blosc2 chunks, followed by a table of their offsets.

https://github.com/Blosc/c-blosc2/blob/main/README_CFRAME_FORMAT.rst and, for sparse frames, README_SFRAME_FORMAT.rst.
Integers of header and trailer are big-endian, those of chunks little-endian.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardfs.codecs.decoders import blosc2_index
from shardfs.model.blobs import ByteRange
from shardfs.model.errors import UnsupportedError
from shardfs.model.grid import ceil_div
from shardfs.model.shard_format import Usage
from shardfs.model.write_plan import bytes_of, joined, pieces_of, size_of
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
    from shardfs.model.blobs import Blob, Plan
    from shardfs.model.shard_format import Leads, ShardChange, ShardIndex, StoredIndex
    from shardfs.model.values import Sizes

MAGIC = b"b2frame\0"
HEAD = 16 << 10
LEAST_HEADER, LEAST_TRAILER = 0x57, 35
FRAME_LENGTH, FRAME_TYPE, CHUNK_BYTES, META = 0x10, 0x1A, 0x27, 0x57
FIELDS = struct.Struct(">ixQ6xqxqxi6xi")
"""Six numbers of the header from position 0x0B on; the bytes between them are their types and flags."""

CONTIGUOUS, SPARSE = 0, 1
ZEROS = -(2**63) + 2**56
"""The offset of a chunk that is full of zeros and has no bytes."""

CHUNK_HEADER = 32
MAX_TRAILER = 16 << 20


class FrameHeader(NamedTuple):
    """The header. Sizes are in bytes.

    Args:
        length: of the header itself.
        frame_length: of the whole frame: header, chunks, table of offsets and trailer.
        nbytes, cbytes: of all data, decoded and as stored.
        typesize: of an element.
        chunk_bytes: of a decoded chunk; 0 if chunks differ in size.
    """

    length: int
    frame_length: int
    nbytes: int
    cbytes: int
    typesize: int
    chunk_bytes: int

    @property
    def chunks(self) -> int:
        """The expected number of chunks; -1 if chunks differ in size."""
        return ceil_div(self.nbytes, self.chunk_bytes) if self.chunk_bytes else -1 if self.nbytes else 0


def is_contiguous(head: bytes) -> bool:
    """Return whether a file is a contiguous frame from its first bytes.

    Index files of sparse frames begin similarly.
    """
    return head[2:10] == MAGIC and len(head) > FRAME_TYPE and head[FRAME_TYPE] & 15 == CONTIGUOUS


def parse_header(head: bytes) -> FrameHeader:
    """Parse the header of a contiguous frame. Raise ValueError, with the reason, if it is invalid."""
    if len(head) < LEAST_HEADER or not is_contiguous(head):
        raise ValueError(f"starts with {head[:10].hex()}, which is no header of a contiguous frame")
    # each number follows its type in MessagePack
    length, frame_length, nbytes, cbytes, typesize, chunk_bytes = FIELDS.unpack_from(head, 0x0B)
    if head[0x19] >> 4 & 3 != 1:
        raise ValueError("its chunk offsets do not have 64 bits")
    header = FrameHeader(length, frame_length, nbytes, cbytes, typesize, chunk_bytes)
    if length < LEAST_HEADER or min(nbytes, cbytes, chunk_bytes) < 0 or typesize < 1:
        raise ValueError(f"its header has impossible sizes: {header}")
    if length + cbytes + LEAST_TRAILER > frame_length:
        raise ValueError(f"a header of {length} bytes and {cbytes} bytes of chunks in a frame of {frame_length}")
    return header


def read_head(blob: Blob) -> bytes:
    """Return the first `HEAD` bytes of a file, fewer if it is shorter: enough for most headers."""
    return blob.read([ByteRange(0, HEAD)])[0]


class Frame:
    """A contiguous frame without its chunks. All methods raise ValueError, with the reason, if the frame is invalid.

    Attributes:
        head, trailer: the bytes before the chunks, and those after the table of offsets.
        offsets: (n,) the start of each chunk, counted from the end of the header; negative for a chunk of a special
            value, which has no bytes.
    """

    def __init__(self, blob: Blob, head: bytes | None = None) -> None:
        """`head` is the result of `read_head`, if the caller has it already."""
        head = read_head(blob) if head is None else head
        self.header = parse_header(head)
        self._blob, size = blob, blob.stat().size
        if self.header.frame_length > size:
            raise ValueError(f"its frame should have {self.header.frame_length} bytes, but the file has {size}")
        if self.header.length > len(head):
            head = read_exactly(blob, ByteRange(0, self.header.length))
        self.head = head[: self.header.length]
        offsets, self.trailer = self._read_end()
        self.offsets = offsets

    def _read_end(self) -> tuple[Sizes, bytes]:
        """Return the offsets of the chunks, counted from the end of the header, and the trailer after their table."""
        start, stop = self.header.length + self.header.cbytes, self.header.frame_length
        if stop - start > MAX_TRAILER + 8 * MAX_BLOSC_CHUNKS:
            raise ValueError(f"an index of {stop - start} bytes follows the chunks, which is too large")
        end = read_exactly(self._blob, ByteRange(start, stop))
        if self.header.chunks == 0:
            return np.zeros(0, np.int64), end
        offsets, trailer = _table(end)
        if len(trailer) < LEAST_TRAILER or self.header.chunks not in (-1, len(offsets)):
            raise ValueError(f"an index of {len(offsets)} chunks for {self.header.chunks} chunks")
        return offsets, trailer

    def index(self) -> ShardIndex:
        """Return the index of all chunks. Chunks of special values have no bytes, so they are absent."""
        slots = np.flatnonzero(self.offsets >= 0)
        offsets = self.offsets[slots]
        starts = offsets + self.header.length
        sizes = blosc_sizes(self._blob, starts, offsets <= self.header.cbytes - CHUNK_HEADER)
        bad = (sizes < CHUNK_HEADER) | (sizes > self.header.cbytes - offsets)
        return blosc_index(slots.astype(np.uint64), starts, sizes, bad, "Blosc2 chunk")

    def sparse(self) -> bytes:
        """Return the index file of a sparse frame with the same chunks, in which chunk i is in file number i."""
        numbers = np.where(self.offsets < 0, self.offsets, np.arange(len(self.offsets)))
        table = _stored(numbers.astype("<i8").tobytes()) if len(numbers) else b""
        head = bytearray(self.head)
        head[FRAME_TYPE] = head[FRAME_TYPE] & 0xF0 | SPARSE
        struct.pack_into(">Q", head, FRAME_LENGTH, len(head) + len(table) + len(self.trailer))
        return bytes(head) + table + self.trailer

    # ---- rewriting ----

    def kept(self) -> tuple[Sizes, Plan]:
        """Return new offsets (n,) and a plan that keeps all bytes behind the header, also the table and trailer.

        New chunks follow, so that a reader with the old table still finds the old chunks.
        """
        return self.offsets.copy(), [ByteRange(self.header.length, self.header.frame_length)]

    def packed(self, index: ShardIndex) -> tuple[Sizes, Plan]:
        """Return new offsets (n,) and the plan of the chunks in `index`, without the bytes between them."""
        offsets = self.offsets.copy()
        slots, starts, sizes = index.columns()
        offsets[slots] = np.cumsum(sizes) - sizes
        stops = starts + sizes
        return offsets, [ByteRange(*extent) for extent in zip(starts.tolist(), stops.tolist(), strict=True)]

    def require_fit(self, slot: int, chunk: bytes) -> None:
        """Raise UnsupportedError, with the reason, unless the bytes may be the chunk in this slot."""
        header, decoded = self.header, int.from_bytes(chunk[4:8], "little")
        if len(chunk) < CHUNK_HEADER or blosc_size(chunk[:BLOSC_HEADER]) != len(chunk):
            raise UnsupportedError(f"the {len(chunk)} bytes for chunk {slot} are no Blosc2 chunk")
        wanted = min(header.chunk_bytes, header.nbytes - slot * header.chunk_bytes)
        if decoded != wanted:
            raise UnsupportedError(f"chunk {slot} would have {decoded} bytes when decoded, and should have {wanted}")

    def head_of(self, chunks: int, table: int) -> bytes:
        """Return the header of a frame with so many bytes of chunks, and with a table of offsets of `table` bytes."""
        head = bytearray(self.head)
        struct.pack_into(">Q", head, FRAME_LENGTH, len(head) + chunks + table + len(self.trailer))
        struct.pack_into(">q", head, CHUNK_BYTES, chunks)
        return bytes(head)

    def metalayer(self, name: bytes) -> bytes | None:
        """Return the bytes of a fixed metalayer, which are msgpack; None if there is none of this name."""
        head = self.head
        try:
            count, position = struct.unpack_from(">H", head, META + 5)[0], META + 7
            for _ in range(count):
                size = head[position] & 31
                key, where = head[position + 1 : position + 1 + size], position + 2 + size
                (offset,) = struct.unpack_from(">i", head, where)
                if key == name:
                    (length,) = struct.unpack_from(">I", head, offset + 1)
                    return head[offset + 5 : offset + 5 + length]
                position = where + 4
        except (struct.error, IndexError):
            return None
        return None


def is_same_sparse(old: bytes, new: bytes) -> bool:
    """Return whether two index files of sparse frames differ at most in sizes, and in chunks that are zeros in `new`.

    True also for a file that is not complete yet: c-blosc2 writes table, header and trailer one after the other, and
    closes the file in between.
    """
    try:
        if _sparse_head(old) != _sparse_head(new):
            return False
        if len(new) != FIELDS.unpack_from(new, 0x0B)[1]:
            return True
        offsets, trailer = _sparse_table(old)
        new_offsets, new_trailer = _sparse_table(new)
    except (ValueError, struct.error):
        return False
    if len(offsets) != len(new_offsets):
        return False
    alike = (new_offsets == offsets) | (new_offsets == ZEROS) | (new_offsets == np.arange(len(offsets)))
    # A table of another size reaches into the old trailer, or ends before it, until the new trailer is written.
    return bool(alike.all()) and (new_trailer.endswith(trailer) or trailer.endswith(new_trailer))


def _sparse_head(data: bytes) -> bytes:
    """Return the header of a sparse frame without the sizes of stored bytes. Raise struct.error if it is cut off."""
    head = bytearray(data[: FIELDS.unpack_from(data, 0x0B)[0]])
    for start in (FRAME_LENGTH, CHUNK_BYTES):
        head[start : start + 8] = bytes(8)
    return bytes(head)


def _sparse_table(data: bytes) -> tuple[Sizes, bytes]:
    """Return the numbers of the files of the chunks of a sparse frame, and its trailer. Raise ValueError."""
    length, frame_length, nbytes, *_ = FIELDS.unpack_from(data, 0x0B)
    return _table(data[length:frame_length]) if nbytes else (np.zeros(0, np.int64), data[length:frame_length])


def _table(data: bytes) -> tuple[Sizes, bytes]:
    """Return the numbers in the Blosc2 chunk with which these bytes begin, and the bytes after it.

    Raise ValueError, with the reason, if no chunk of 64-bit numbers is there, or one of too many.
    """
    size, nbytes = blosc_size(data[:BLOSC_HEADER]), int.from_bytes(data[4:8], "little")
    if not CHUNK_HEADER <= size <= len(data):
        raise ValueError("no Blosc2 chunk where its index should be")
    table = b"" if nbytes > 8 * MAX_BLOSC_CHUNKS or nbytes % 8 else blosc2_index(data[:size])
    if len(table) != nbytes:
        raise ValueError(f"an index of {nbytes} bytes expected, {len(table)} found")
    return np.frombuffer(table, "<i8").astype(np.int64), data[size:]


def _stored(data: bytes) -> bytes:
    """Return an uncompressed Blosc2 chunk of 8-byte items: an extended header, flag 2, no filters."""
    n = len(data)
    return struct.pack("<BBBBIII16x", 5, 1, 0b10111, 8, n, n, n + CHUNK_HEADER) + data


class Frames(Numbered):
    """A `ShardFormat`: all chunks in one file, a contiguous frame.

    Args:
        even: whether all chunks but the last have the same decoded size.
    """

    def __init__(self, chunks: int, *, even: bool = True) -> None:
        super().__init__(chunks, max(chunks, 1))
        self.unwritable = "" if even else "frames of Blosc2 whose chunks differ in size are shown only"

    def walk(self, blob: Blob) -> ShardIndex:
        return Frame(blob).index()

    def rewrite(self, shard: int, old: StoredIndex | None, change: ShardChange) -> Plan | None:
        """Return the frame after a change, never None. A dropped chunk is then full of zeros, and takes no bytes.

        Raise UnsupportedError without an old frame, because its header describes the array, and for a chunk that has
        another decoded size than the frame's chunks.
        """
        if old is None:
            raise UnsupportedError("only a program of Blosc2 can make a frame, whose header describes the array")
        frame = Frame(old.blob)
        if change.pack:
            remaining = old.page(0).without([slot for _, slot in (*change.puts, *change.drops)])
            require_sound(self, shard, 0, remaining)
            offsets, plan = frame.packed(remaining)
        else:
            offsets, plan = frame.kept()
        offsets[[slot for _, slot in change.drops]] = ZEROS
        end = size_of(plan)
        for (_, slot), put in sorted(change.puts.items()):
            frame.require_fit(slot, bytes_of(put.data, old.blob))
            offsets[slot] = end
            plan += pieces_of(put.data)
            end += size_of(put.data)
        table = _stored(offsets.astype("<i8").tobytes()) if len(offsets) else b""
        return joined([frame.head_of(end, len(table)), *plan, table, frame.trailer])

    def usage(self, old: StoredIndex, leads: Leads | None = None) -> Usage:
        frame = Frame(old.blob)
        live = old.page(0).live_bytes()
        return Usage(old.size, frame.header.frame_length - frame.header.cbytes, live, frame.header.cbytes - live)
