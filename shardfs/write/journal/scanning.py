"""Scan one segment file of a journal: find its complete records, and the gaps between them."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from google_crc32c import extend as crc32c_extend

from shardfs.storage.regular_files import open_regular
from shardfs.write.journal import records
from shardfs.write.journal.records import HEADER_SIZE, RecordHead, SegmentHeader

if TYPE_CHECKING:
    from pathlib import Path

NAME = re.compile(r"[0-9a-f]{16}\.wal")


def segment_name(number: int) -> str:
    """Return the file name of a segment."""
    return f"{number:016x}.wal"


class WholeRecord(NamedTuple):
    """The head and meta of a record. Their crc32c is correct."""

    head: RecordHead
    meta: dict[str, Any]


class Gap(NamedTuple):
    """A range of bytes in which no complete record was found.

    `found` is the record's head and meta if these are intact. `tail`: no record follows in the segment.
    """

    start: int
    stop: int
    found: WholeRecord | None
    tail: bool


class RecordPlace(NamedTuple):
    """The place of a record: an offset and a size in the segment `number`."""

    number: int
    offset: int
    size: int


@dataclass
class SegmentFile:
    """An open segment file and the result of scanning it.

    `number` is the segment's number, or a negative number if another file has the same. `end` is the end of the last
    complete record.
    """

    name: str
    fd: int
    size: int
    header: SegmentHeader | None
    number: int = 0
    end: int = HEADER_SIZE
    found: list[WholeRecord] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def damaged(self) -> bool:
        """Whether the file has damage, so that it is kept for inspection when the journal does not need it any more."""
        return bool(self.gaps or self.problems)

    @property
    def order(self) -> tuple[bool, int]:
        """The sort key of segment files: oldest first, copies last."""
        return self.number < 0, abs(self.number)

    def recorded_number(self) -> int | None:
        """Return the segment's number as its content has it; None if header and records are damaged."""
        return self.header.number if self.header else self.found[0].head.segment if self.found else None

    def first(self) -> tuple[int, int] | None:
        """Return the epoch and the sequence number of the first record; None if header and records are damaged."""
        if self.header:
            return self.header.epoch, self.header.first
        return (self.found[0].head.epoch, self.found[0].head.sequence) if self.found else None

    def place(self, head: RecordHead) -> RecordPlace:
        """Return the place of a record of this file."""
        return RecordPlace(self.number, head.offset, head.stop - head.offset)


def open_segment(directory: Path, name: str, source_id: bytes | None, *, write: bool) -> SegmentFile:
    """Open and scan one segment file. Its `number` is not set yet. Raise the errors of `reading.read`."""
    path = str(directory / name)
    fd = open_regular(path, os.O_RDWR if write else os.O_RDONLY)
    try:
        info = os.fstat(fd)
        if write and info.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "a segment of the journal is not a file of its user", path)
        header = records.decode_header(os.pread(fd, HEADER_SIZE, 0))
        if header and source_id is not None and header.source_id != source_id:
            raise OSError(errno.EINVAL, f"it is the journal of another source ({header.source})", path)
        file = SegmentFile(name, fd, info.st_size, header)
        _Scan(file).run()
    except BaseException:
        os.close(fd)
        raise
    return file


class _Scan:
    """Find the records and gaps of one segment file."""

    def __init__(self, file: SegmentFile) -> None:
        self._file = file
        self._start = 0
        self._window = b""
        self._without_end: list[RecordHead] = []
        self._of: tuple[int, int] | None = (file.header.number, file.header.epoch) if file.header else None

    def run(self) -> None:
        file = self._file
        if file.header is None and not self._empty(0):
            file.problems.append(f"the header of {file.name} is damaged")
        at = HEADER_SIZE
        while at < file.size:
            record = self._head(at)
            if record is None:
                at = self._skip(at)
                continue
            stop = record.head.stop
            if stop <= file.size and records.is_sound(record.head.kind, record.meta) and self._whole(record.head):
                file.found.append(record)
            elif (after := self._next(at + records.ALIGN)) is not None and after < stop:
                # Appending this record failed, and later records have overwritten its end.
                file.gaps.append(Gap(at, after, record, tail=False))
                stop = after
            else:
                file.gaps.append(Gap(at, min(stop, file.size), record, tail=False))
            at = records.aligned(stop)
        file.end = max((f.head.stop for f in file.found), default=HEADER_SIZE)
        file.gaps = [gap._replace(tail=gap.start >= file.end) for gap in file.gaps]
        for head in self._without_end:
            if head.stop < file.end:  # a crash may leave the last record without its tail, which is no damage
                file.problems.append(f"{file.name}: the end of record {head.lsn} is damaged, not the record")

    def _head(self, at: int) -> WholeRecord | None:
        head = records.decode_head(self._bytes(at, records.HEAD_SIZE))
        if head is None or head.offset != at or (self._of and (head.segment, head.epoch) != self._of):
            return None
        meta = records.decode_meta(self._bytes(at, records.HEAD_SIZE + head.meta_size))
        if meta is None:
            return None
        self._of = head.segment, head.epoch
        return WholeRecord(head, meta)

    def _whole(self, head: RecordHead) -> bool:
        crc, at, remaining = 0, head.data_start, head.data_size
        while remaining:
            data = os.pread(self._file.fd, min(remaining, records.CRC_STEP), at)
            if not data:
                return False
            crc, at, remaining = crc32c_extend(crc, data), at + len(data), remaining - len(data)
        if crc != head.data_crc:
            return False
        tail = records.encode_tail(head.sequence, head.stop - head.offset)
        if self._bytes(head.stop - records.TAIL_SIZE, records.TAIL_SIZE) != tail:
            self._without_end.append(head)
        return True

    def _skip(self, at: int) -> int:
        """Note the gap at `at`, if it is one, and return where to look for the next record."""
        after = self._next(at + records.ALIGN)
        if after is not None or not self._empty(at):
            self._file.gaps.append(Gap(at, after or self._file.size, None, tail=False))
        return after or self._file.size

    def _next(self, at: int) -> int | None:
        """Return the first offset from `at` on with an intact head and meta; None if there is none."""
        while at < self._file.size:
            at = self._data_from(at)
            block = os.pread(self._file.fd, records.CRC_STEP, at)
            i = block.find(records.RECORD_MAGIC)
            while i >= 0:
                if (at + i) % records.ALIGN == 0 and self._head(at + i) is not None:
                    return at + i
                i = block.find(records.RECORD_MAGIC, i + len(records.RECORD_MAGIC))
            if len(block) < records.CRC_STEP:
                return None
            at += records.CRC_STEP - len(records.RECORD_MAGIC)
        return None

    def _data_from(self, at: int) -> int:
        try:
            return max(at, os.lseek(self._file.fd, at, os.SEEK_DATA) // records.ALIGN * records.ALIGN)
        except OSError as e:
            return self._file.size if e.errno == errno.ENXIO else at

    def _empty(self, at: int) -> bool:
        """Return whether the file has only zeros from `at` on."""
        while (at := self._data_from(at)) < self._file.size:
            block = os.pread(self._file.fd, records.CRC_STEP, at)
            if not block:
                return True
            if block.strip(b"\0"):
                return False
            at += len(block)
        return True

    def _bytes(self, at: int, size: int) -> bytes:
        if not self._start <= at or at + size > self._start + len(self._window):
            self._start = at
            self._window = os.pread(self._file.fd, max(size, 16 * HEADER_SIZE), at)
        return self._window[at - self._start : at - self._start + size]
