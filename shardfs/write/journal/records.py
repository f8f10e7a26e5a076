"""How a journal lies on disk: segments and records, to bytes and back. No I/O.

A segment is a file: a header of 4 KiB, then records, each at a multiple of 64 bytes. A record is

    head      88 bytes, `_HEAD`: what it is, where it lies, the crc32c of its data, the crc32c of head and meta
    meta      JSON
    data      at the next multiple of 4 KiB, so that it can be cloned; right behind meta if it is shorter than that
    tail      24 bytes, `_TAIL`: size of the record, its sequence number, the crc32c of both

Records are numbered twice. The *sequence number* counts what is written into the journal, without gaps within an epoch:
so a missing record is noticed. The *LSN* orders versions: a copy of a record, made when its segment is to go or could
not be written to disk, has a sequence number of its own and the LSN of the original. Each record tells how far the
journal was known to be on disk when it was written (`durable`, a sequence number), and which segments were still needed
(`oldest`): what lies beyond the one may be missing after a power failure, what lies before the other always.
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
MAX_META = 1 << 20
CRC_STEP = 1 << 20
"""Bytes that are read, or summed up, at a time."""

_SEGMENT_MAGIC = b"\x89shardfs-wal\r\n\x1a\n"
_SEGMENT = struct.Struct("<16sHHI16sQQQQ")
RECORD_MAGIC = b"\x89sfsREC\n"
_HEAD = struct.Struct("<8sBBHIQQQQQQQQI")
_TAIL = struct.Struct("<8sQI")
_CRC = struct.Struct("<I")
HEAD_SIZE = _HEAD.size + _CRC.size
TAIL_MAGIC = b"\x89sfsEND\n"
TAIL_SIZE = _TAIL.size + _CRC.size

_encode_json = json.JSONEncoder(separators=(",", ":")).encode  # ASCII, so also names that are not UTF-8


HAS_DATA = 1
"""The flag of records with content, be it empty."""


class RecordKind(IntEnum):
    """What a record says. Numbers are never given anew; `pending.py` tells the meta of each."""

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
"""Kinds of the journal's own records, which are not among `Journal.recovered`. FREE: segments before `oldest` are about
to be unlinked. REWRITTEN: records with sequence numbers from `first` to `last` may be missing where they were written;
they have been written again since."""


_NEEDED: dict[int, tuple[str, ...]] = {
    RecordKind.PUT: ("path",), RecordKind.DEL: ("path",), RecordKind.MOVE: ("to",), RecordKind.BEGIN: ("key",),
    RecordKind.DONE: ("key", "lsns", "entries"), RecordKind.CONFLICT: ("path", "lsn"), RecordKind.DROP: ("path", "lsn"),
    RecordKind.CLEAN: (), RecordKind.FREE: (), RecordKind.REWRITTEN: ("first", "last"),
}  # fmt: skip
_TYPES: dict[str, tuple[type, ...]] = {
    "path": (str,), "from": (str,), "to": (str,), "key": (str,), "why": (str,), "lsn": (int,), "first": (int,),
    "last": (int,), "mtime_ns": (int,), "mode": (int,), "lsns": (list,), "entries": (dict,),
}  # fmt: skip


def is_sound(kind: int, meta: dict[str, Any]) -> bool:
    """Whether a record has what its kind must have, of the right types; a journal may be somebody else's copy."""
    return (
        kind in _NEEDED
        and all(name in meta for name in _NEEDED[kind])
        and all(isinstance(meta[name], types) for name, types in _TYPES.items() if name in meta)
        and all(isinstance(lsn, int) for lsn in meta.get("lsns", ()))
    )


class Position(NamedTuple):
    """Where data lie: `size` bytes from `start` of a segment, and their crc32c."""

    segment: int
    start: int
    size: int
    crc: int


class Record(NamedTuple):
    """What was written. `data` is None for kinds that have no content; an empty file has an empty one."""

    lsn: int
    kind: RecordKind
    meta: dict[str, Any]
    data: Position | None


class SegmentHeader(NamedTuple):
    """Of a segment. `first` is the sequence number of its first record, `source` is scrubbed: no credentials."""

    source_id: bytes
    epoch: int
    number: int
    first: int
    created_ns: int
    source: str


class RecordHead(NamedTuple):
    """Of a record. `offset` is where it lies in its segment."""

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
        """In the segment."""
        return data_start(self.offset, self.meta_size, self.data_size)

    @property
    def stop(self) -> int:
        """Where the record ends, in the segment."""
        return self.data_start + self.data_size + TAIL_SIZE


def aligned(offset: int, step: int = ALIGN) -> int:
    """The next multiple of `step`."""
    return -(-offset // step) * step


def data_start(offset: int, meta_size: int, data_size: int) -> int:
    """Where the data of a record at `offset` begin."""
    start = offset + HEAD_SIZE + meta_size
    return start if data_size < BLOCK else aligned(start, BLOCK)


def encode_header(header: SegmentHeader) -> bytes:
    """`HEADER_SIZE` bytes."""
    source = header.source.encode(errors="surrogateescape")[: HEADER_SIZE - _SEGMENT.size - _CRC.size]
    fixed = _SEGMENT.pack(_SEGMENT_MAGIC, FORMAT, 0, len(source), *header[:5])
    text = (fixed + source).ljust(HEADER_SIZE - _CRC.size, b"\0")
    return text + _CRC.pack(crc32c(text))


def decode_header(data: bytes) -> SegmentHeader | None:
    """The inverse of `encode_header`; None if it is damaged. Raise UnsupportedError if a newer shardfs wrote it."""
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
    """Raise ValueError if it is larger than `MAX_META`."""
    text = _encode_json(meta).encode("ascii")
    if len(text) > MAX_META:
        raise ValueError(f"the description of a record takes {len(text)} bytes; {MAX_META} are allowed")
    return text


def encode_head(head: RecordHead, meta: bytes) -> bytes:
    """Head and meta, to lie at `head.offset`."""
    fixed = _HEAD.pack(RECORD_MAGIC, head.kind, head.flags, 0, *head[2:])
    return b"".join((fixed, _CRC.pack(crc32c_extend(crc32c(fixed), meta)), meta))


def encode_tail(head: RecordHead) -> bytes:
    """To lie right behind the data."""
    text = _TAIL.pack(TAIL_MAGIC, head.sequence, head.stop - head.offset)
    return text + _CRC.pack(crc32c(text))


def decode_head(data: bytes) -> RecordHead | None:
    """From the first `HEAD_SIZE` bytes of a record; nothing is verified but the magic and what meta may take."""
    if len(data) < HEAD_SIZE or not data.startswith(RECORD_MAGIC):
        return None
    _, kind, flags, _, *rest = _HEAD.unpack_from(data)
    head = RecordHead(kind, flags, *rest)
    return head if head.meta_size <= MAX_META else None


def decode_meta(data: bytes) -> dict[str, Any] | None:
    """Of head and meta as `encode_head` gives them; None if their crc32c says they are damaged."""
    text = data[HEAD_SIZE:]
    if crc32c_extend(crc32c(data[: _HEAD.size]), text) != _CRC.unpack_from(data, _HEAD.size)[0]:
        return None
    try:
        meta = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return meta if isinstance(meta, dict) else None
