"""The on-disk format of a journal: encode and decode segment headers and records. No I/O.

A segment is a file: a header of 4 KiB, then records, each at a multiple of 64 bytes. A record consists of:

    head      88 bytes, `_HEAD`: kind, numbers, sizes, offset, the crc32c of the data, the crc32c of head and meta
    meta      JSON
    data      at the next multiple of 4 KiB, so that they can be cloned; directly after meta if less than 4 KiB
    tail      24 bytes, `_TAIL`: size of the record, its sequence number, the crc32c of both

Each record has two numbers:

- The *sequence number* counts the writes into the journal. Within an epoch (one opening of the journal) the numbers
  have no gaps, so that the reader notices a missing record.
- The *LSN* orders versions. The journal copies a record before it unlinks the record's segment, or if that segment
  could not be synced. The copy has a new sequence number and the LSN of the original.

Each record also has two numbers about the rest of the journal at the time of writing:

- `durable`: all records up to this sequence number were on disk. Later records may be missing after a power failure.
- `oldest`: the first segment that was still needed. Earlier segments may be missing at any time.
"""

from __future__ import annotations

import json
import struct
from enum import IntEnum
from typing import Any, NamedTuple

from google_crc32c import extend as crc32c_extend
from google_crc32c import value as crc32c

from shardfs.model.errors import UnsupportedError

FORMAT = 1
HEADER_SIZE = BLOCK = 4096
ALIGN = 64
MAX_META = 1 << 26
"""Bytes. The record of a publish names each of the shard's pending chunks, with a digest."""

CRC_STEP = 1 << 20
"""Bytes that are read and checksummed in one step."""

_SEGMENT_MAGIC = b"\x89shardfs-wal\r\n\x1a\n"
_SEGMENT = struct.Struct("<16sHHI16sQQQQ")
RECORD_MAGIC = b"\x89sfsREC\n"
_HEAD = struct.Struct("<8sBBHIQQQQQQQQI")
_TAIL = struct.Struct("<8sQI")
_CRC = struct.Struct("<I")
HEAD_SIZE = _HEAD.size + _CRC.size
TAIL_MAGIC = b"\x89sfsEND\n"
TAIL_SIZE = _TAIL.size + _CRC.size

_encode_json = json.JSONEncoder(separators=(",", ":")).encode  # escapes to ASCII, which also carries non-UTF-8 names


HAS_DATA = 1
"""Flag of a record that has data. The data may be empty."""


class RecordKind(IntEnum):
    """The kind of a record. `pending.py` documents the meta of each kind. Numbers of removed kinds are never reused."""

    PUT = 1
    DEL = 2
    MOVE = 3
    BEGIN = 6
    DONE = 7
    CONFLICT = 8
    CLEAN = 9
    DROP = 12
    FREE = 13
    REWRITTEN = 14


OWN = frozenset({RecordKind.FREE, RecordKind.REWRITTEN})
"""Kinds of the records that the journal writes for itself. `Journal.recovered` does not contain them.

- FREE: the journal is about to unlink the segments before `oldest`.
- REWRITTEN: the records with sequence numbers from `first` to `last` may be missing in their original place. The
  journal has written them again since.
"""


_NEEDED: dict[int, tuple[str, ...]] = {
    RecordKind.PUT: ("path",), RecordKind.DEL: ("path",), RecordKind.MOVE: ("from", "to"), RecordKind.BEGIN: ("key",),
    RecordKind.DONE: ("key", "lsns", "entries"), RecordKind.CONFLICT: ("path", "lsn"), RecordKind.DROP: ("path", "lsn"),
    RecordKind.CLEAN: (), RecordKind.FREE: (), RecordKind.REWRITTEN: ("first", "last"),
}  # fmt: skip
_TYPES: dict[str, tuple[type, ...]] = {
    "path": (str,), "from": (str,), "to": (str,), "key": (str,), "why": (str,), "lsn": (int,), "first": (int,),
    "last": (int,), "mtime_ns": (int,), "mode": (int,), "lsns": (list,), "entries": (dict,),
}  # fmt: skip


def is_sound(kind: int, meta: dict[str, Any]) -> bool:
    """Return whether meta has the members that the kind requires, and all known members have the right types.

    The content is not trusted, because a journal may be a copy of another user's journal.
    """
    return (
        kind in _NEEDED
        and all(name in meta for name in _NEEDED[kind])
        and all(isinstance(meta[name], types) for name, types in _TYPES.items() if name in meta)
        and all(isinstance(lsn, int) for lsn in meta.get("lsns", ()))
    )


class Position(NamedTuple):
    """The position of a record's data: `size` bytes from offset `start` of a segment, and their crc32c."""

    segment: int
    start: int
    size: int
    crc: int


class Record(NamedTuple):
    """A decoded record. `data` is None if the record has no data. An empty file has data of size 0."""

    lsn: int
    kind: RecordKind
    meta: dict[str, Any]
    data: Position | None


class SegmentHeader(NamedTuple):
    """The header of a segment. `first` is the sequence number of its first record. `source` has no credentials."""

    source_id: bytes
    epoch: int
    number: int
    first: int
    created_ns: int
    source: str


class RecordHead(NamedTuple):
    """The head of a record. `offset` is the record's offset in its segment."""

    kind: int
    flags: int
    meta_size: int
    data_size: int
    sequence: int
    lsn: int
    epoch: int
    segment: int
    offset: int
    durable: int
    oldest: int
    data_crc: int

    @property
    def data_start(self) -> int:
        """The offset of the data in the segment."""
        start = self.offset + HEAD_SIZE + self.meta_size
        return start if self.data_size < BLOCK else -(-start // BLOCK) * BLOCK

    @property
    def stop(self) -> int:
        """The offset in the segment at which the record ends."""
        return self.data_start + self.data_size + TAIL_SIZE


def aligned(offset: int) -> int:
    """Round up to a multiple of `ALIGN`."""
    return -(-offset // ALIGN) * ALIGN


def encode_header(header: SegmentHeader) -> bytes:
    """Return the `HEADER_SIZE` bytes of a segment header. A source name that is too long is cut."""
    source = header.source.encode(errors="surrogateescape")[: HEADER_SIZE - _SEGMENT.size - _CRC.size]
    fixed = _SEGMENT.pack(_SEGMENT_MAGIC, FORMAT, 0, len(source), *header[:5])
    text = (fixed + source).ljust(HEADER_SIZE - _CRC.size, b"\0")
    return text + _CRC.pack(crc32c(text))


def decode_header(data: bytes) -> SegmentHeader | None:
    """Decode a segment header; None if it is damaged. Raise UnsupportedError if a newer shardfs wrote it."""
    if len(data) < HEADER_SIZE or crc32c(data[: -_CRC.size]) != _CRC.unpack(data[-_CRC.size :])[0]:
        return None
    magic, form, _, size, id_, epoch, number, first, created_ns = _SEGMENT.unpack_from(data)
    if magic != _SEGMENT_MAGIC:
        return None
    if form > FORMAT:
        raise UnsupportedError(f"the journal has format {form}; this shardfs knows formats up to {FORMAT}")
    source = data[_SEGMENT.size : _SEGMENT.size + size].decode(errors="surrogateescape")
    return SegmentHeader(id_, epoch, number, first, created_ns, source)


def encode_meta(meta: dict[str, Any]) -> bytes:
    """Return meta as JSON. Raise ValueError if the JSON is larger than `MAX_META` bytes."""
    text = _encode_json(meta).encode("ascii")
    if len(text) > MAX_META:
        raise ValueError(f"the description of a record takes {len(text)} bytes; {MAX_META} are allowed")
    return text


def encode_head(head: RecordHead, meta: bytes) -> bytes:
    """Return the bytes of head and meta, to be written at `head.offset`."""
    fixed = _HEAD.pack(RECORD_MAGIC, head.kind, head.flags, 0, *head[2:])
    return b"".join((fixed, _CRC.pack(crc32c_extend(crc32c(fixed), meta)), meta))


def encode_tail(sequence: int, size: int) -> bytes:
    """Return the bytes of the tail of a record of `size` bytes, to be written directly after the data."""
    text = _TAIL.pack(TAIL_MAGIC, sequence, size)
    return text + _CRC.pack(crc32c(text))


def decode_head(data: bytes) -> RecordHead | None:
    """Decode the first `HEAD_SIZE` bytes of a record; None if the magic is wrong or meta would exceed `MAX_META`.

    The crc32c is not verified here; `decode_meta` does that.
    """
    if len(data) < HEAD_SIZE or not data.startswith(RECORD_MAGIC):
        return None
    _, kind, flags, _, *numbers = _HEAD.unpack_from(data)
    head = RecordHead(kind, flags, *numbers)
    return head if head.meta_size <= MAX_META else None


def decode_meta(data: bytes) -> dict[str, Any] | None:
    """Decode meta from the bytes of head and meta; None if their crc32c is wrong or meta is no JSON object."""
    text = data[HEAD_SIZE:]
    if crc32c_extend(crc32c(data[: _HEAD.size]), text) != _CRC.unpack_from(data, _HEAD.size)[0]:
        return None
    try:
        meta = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return meta if isinstance(meta, dict) else None
