"""Read and verify the segments of a journal directory: find complete records, damage and missing records."""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from google_crc32c import extend as crc32c_extend
from google_crc32c import value as crc32c

from shardfs.write.journal.records import (
    ALIGN,
    CRC_STEP,
    HAS_DATA,
    HEAD_SIZE,
    HEADER_SIZE,
    OWN,
    RECORD_MAGIC,
    TAIL_SIZE,
    Position,
    Record,
    RecordHead,
    RecordKind,
    SegmentHeader,
    aligned,
    decode_head,
    decode_header,
    decode_meta,
    encode_tail,
    is_sound,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardfs.model.blobs import FilePart

MOST = 1_000_000
"""Upper limit of the sequence numbers that are checked in one gap. No segment has so many records."""

NAME = re.compile(r"[0-9a-f]{16}\.wal")


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


class RecordPlace(NamedTuple):
    """The place of a record: an offset and a size in the segment `number`, which is a key of `Reading.files`."""

    number: int
    offset: int
    size: int


@dataclass
class Reading:
    """The content of a journal as found on disk.

    `records` and `places` are those of complete records. `damaged_paths` are the paths of lost records that had been on
    disk; it contains "" if the path of a lost record is unknown. `torn` files end in an incomplete append. `stale`
    files are older than `oldest` and not needed. `sequence` and `lsn` are the highest numbers found.
    """

    files: dict[int, SegmentFile] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    places: dict[int, RecordPlace] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    damaged_paths: list[str] = field(default_factory=list)
    torn: list[SegmentFile] = field(default_factory=list)
    stale: list[SegmentFile] = field(default_factory=list)
    oldest: int = 0
    sequence: int = 0
    lsn: int = 0

    def close(self) -> None:
        """Close all segment files."""
        while self.files:
            os.close(self.files.popitem()[1].fd)

    def source(self) -> str:
        """Return the source's name from the newest intact header, without credentials; "" if no header is intact."""
        return next((f.header.source for _, f in sorted(self.files.items(), reverse=True) if f.header), "")


def read(directory: Path, source_id: bytes | None, *, write: bool) -> Reading:
    """Read all segments of a directory, and verify the checksums of heads, meta and data.

    The segment files stay open, for writing if `write`. The caller closes them. Raise UnsupportedError if a newer
    shardfs wrote a segment; OSError if a segment is no regular file, belongs to another source than `source_id`, or
    (with `write`) belongs to another user.
    """
    reading = Reading()
    try:
        for name in sorted(filter(NAME.fullmatch, os.listdir(directory))):
            with suppress(FileNotFoundError):  # a running mount has just unlinked the segment
                _add(reading, open_segment(directory, name, source_id, write=write))
    except BaseException:
        reading.close()
        raise
    _merge(reading)
    return reading


def _add(reading: Reading, file: SegmentFile) -> None:
    told = file.header.number if file.header else (file.found[0].head.segment if file.found else None)
    if told is None:
        if file.gaps:
            file.problems.append(f"{file.name} cannot be read")
        told = int(file.name[:16], 16)
    elif file.name != segment_name(told):
        file.problems.append(f"{file.name} is a copy of segment {told}, or was renamed")
    if told in reading.files:
        told = min(0, *reading.files) - 1
    file.number = told
    reading.files[told] = file


def segment_name(number: int) -> str:
    """Return the file name of a segment."""
    return f"{number:016x}.wal"


def open_segment(directory: Path, name: str, source_id: bytes | None, *, write: bool) -> SegmentFile:
    """Open and scan one segment. Raise the errors of `read`."""
    path = str(directory / name)
    fd = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or (write and info.st_uid != os.geteuid()):
            raise PermissionError(errno.EPERM, "a segment of the journal is not a file of its user", path)
        header = decode_header(os.pread(fd, HEADER_SIZE, 0))
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
        self._start, self._window = 0, b""
        self._without_end: list[RecordHead] = []
        self._of: tuple[int, int] | None = (file.header.number, file.header.epoch) if file.header else None

    def run(self) -> None:
        file = self._file
        if file.header is None and not self._empty(0):
            file.problems.append(f"the header of {file.name} is damaged")
        at = HEADER_SIZE
        while at < file.size:
            found = self._head(at)
            if found is None:
                at = self._skip(at)
                continue
            stop = found.head.stop
            if stop <= file.size and is_sound(found.head.kind, found.meta) and self._whole(found.head):
                file.found.append(found)
            elif (after := self._next(at + ALIGN)) is not None and after < stop:
                # Appending this record failed, and later records have overwritten its end.
                file.gaps.append(Gap(at, after, found, tail=False))
                stop = after
            else:
                file.gaps.append(Gap(at, min(stop, file.size), found, tail=False))
            at = aligned(stop)
        self._close_tail()

    def _close_tail(self) -> None:
        file = self._file
        file.end = max((f.head.stop for f in file.found), default=HEADER_SIZE)
        file.gaps = [g._replace(tail=g.start >= file.end) for g in file.gaps]
        for head in self._without_end:
            if head.stop < file.end:  # a crash may leave the last record without its tail, which is no damage
                file.problems.append(f"{file.name}: the end of record {head.lsn} is damaged, not the record")

    def _head(self, at: int) -> WholeRecord | None:
        head = decode_head(self._bytes(at, HEAD_SIZE))
        if head is None or head.offset != at or (self._of and (head.segment, head.epoch) != self._of):
            return None
        meta = decode_meta(self._bytes(at, HEAD_SIZE + head.meta_size))
        if meta is None:
            return None
        self._of = head.segment, head.epoch
        return WholeRecord(head, meta)

    def _whole(self, head: RecordHead) -> bool:
        crc, at, left = 0, head.data_start, head.data_size
        while left:
            data = os.pread(self._file.fd, min(left, CRC_STEP), at)
            if not data:
                return False
            crc, at, left = crc32c_extend(crc, data), at + len(data), left - len(data)
        if crc != head.data_crc:
            return False
        if self._bytes(head.stop - TAIL_SIZE, TAIL_SIZE) != encode_tail(head):
            self._without_end.append(head)
        return True

    def _skip(self, at: int) -> int:
        after = self._next(at + ALIGN)
        if after is not None:
            self._file.gaps.append(Gap(at, after, None, tail=False))
            return after
        if not self._empty(at):
            self._file.gaps.append(Gap(at, self._file.size, None, tail=True))
        return self._file.size

    def _next(self, at: int) -> int | None:
        """Return the first offset from `at` on with an intact head and meta; None if there is none."""
        for offset in self._find(at):
            if self._head(offset) is not None:
                return offset
        return None

    def _find(self, at: int) -> Iterator[int]:
        step = len(RECORD_MAGIC)
        while at < self._file.size:
            at = self._data_from(at)
            block = os.pread(self._file.fd, CRC_STEP, at)
            i = block.find(RECORD_MAGIC)
            while i >= 0:
                if (at + i) % ALIGN == 0:
                    yield at + i
                i = block.find(RECORD_MAGIC, i + step)
            if len(block) < CRC_STEP:
                return
            at += CRC_STEP - step

    def _data_from(self, at: int) -> int:
        try:
            return max(at, os.lseek(self._file.fd, at, os.SEEK_DATA) // ALIGN * ALIGN)
        except OSError as e:
            return self._file.size if e.errno == errno.ENXIO else at

    def _empty(self, at: int) -> bool:
        """Return whether the file has only zeros from `at` on."""
        while (at := self._data_from(at)) < self._file.size:
            block = os.pread(self._file.fd, CRC_STEP, at)
            if not block:
                return True
            if block.strip(b"\0"):
                return False
            at += len(block)
        return True

    def _bytes(self, at: int, size: int) -> bytes:
        if not self._start <= at or at + size > self._start + len(self._window):
            self._start, self._window = at, os.pread(self._file.fd, max(size, 16 * HEADER_SIZE), at)
        return self._window[at - self._start : at - self._start + size]


# ------------------------------------------------------------------------------------------------ all segments


def _merge(reading: Reading) -> None:
    """Collect the records of all segments in LSN order, keep one copy of each, and find missing records."""
    files = sorted(reading.files.values(), key=lambda file: (file.number < 0, abs(file.number)))
    reading.oldest = max((found.head.oldest for file in files for found in file.found), default=0)
    reading.stale = [file for file in files if _own_number(file) < reading.oldest]
    files = [file for file in files if _own_number(file) >= reading.oldest]
    seen: set[int] = set()
    for file in files:
        for head, meta in file.found:
            seen.add(head.sequence)
            if head.lsn not in reading.places:
                reading.places[head.lsn] = RecordPlace(file.number, head.offset, head.stop - head.offset)
                if head.kind not in OWN:
                    reading.records.append(record_of(head, meta, file.number))
    reading.records.sort()
    reading.lsn, reading.sequence = max(reading.places, default=0), max(seen, default=0)
    _Judge(reading, files, seen).run()


def _own_number(file: SegmentFile) -> int:
    return file.header.number if file.header else file.found[0].head.segment if file.found else file.number


def record_of(head: RecordHead, meta: dict[str, Any], number: int) -> Record:
    """Return the record of a head and its meta, with its data in the segment `number`."""
    data = Position(number, head.data_start, head.data_size, head.data_crc) if head.flags & HAS_DATA else None
    return Record(head.lsn, RecordKind(head.kind), meta, data)


def read_part(part: FilePart, crc: int, start: int = 0, size: int | None = None) -> bytes:
    """Return up to `size` bytes of a part from `start`; None: up to the end.

    A read of the whole part verifies `crc`. Raise OSError (EIO) if the crc32c differs, or the file is too short.
    """
    size = part.size - start if size is None else min(size, part.size - start)
    if size <= 0:
        return b""
    out = []
    at, left = part.start + start, size
    while left:
        data = os.pread(part.fd, left, at)
        if not data:
            raise OSError(errno.EIO, "the journal ends early")
        out.append(data)
        at, left = at + len(data), left - len(data)
    whole = out[0] if len(out) == 1 else b"".join(out)
    if size == part.size and crc32c(whole) != crc:
        raise OSError(errno.EIO, "a record of the journal is damaged")
    return whole


class _Judge:
    """Distinguish damage from the normal traces of a crash, and find the paths of damaged records."""

    def __init__(self, reading: Reading, files: list[SegmentFile], seen: set[int]) -> None:
        self._reading, self._files, self._seen = reading, files, seen
        self._durable: dict[int, int] = {}
        self._rewritten: list[range] = []
        self._paths: dict[str, None] = {}

    def run(self) -> None:
        for file in self._files:
            for found in [*file.found, *(g.found for g in file.gaps if g.found)]:
                epoch, durable = found.head.epoch, found.head.durable
                self._durable[epoch] = max(durable, self._durable.get(epoch, 0))
                if found.head.kind == RecordKind.REWRITTEN and is_sound(RecordKind.REWRITTEN, found.meta):
                    self._rewritten.append(range(found.meta["first"], found.meta["last"] + 1))
            self._seen.update(g.found.head.sequence for g in file.gaps if g.found)
        for i, file in enumerate(self._files):
            self._reading.problems += file.problems
            self._file(file, next(filter(None, map(_begins, self._files[i + 1 :])), None))
        self._missing()
        self._reading.damaged_paths = list(self._paths)

    def _file(self, file: SegmentFile, following: tuple[int, int] | None) -> None:
        own = _begins(file)
        stop = following[1] if following and own and following[0] == own[0] and following[1] >= own[1] else None
        first = file.header.first if file.header else 0
        last = file.found[-1].head.sequence if file.found else first - 1
        gaps = list(file.gaps)
        if stop is not None and last + 1 < stop and not any(gap.tail for gap in gaps):
            gaps.append(Gap(file.size, file.size, None, tail=True))
        at_end = True
        for gap in gaps:
            before = max((f.head.sequence for f in file.found if f.head.offset < gap.start), default=first - 1)
            after = min((f.head.sequence for f in file.found if f.head.offset > gap.start), default=stop)
            at_end &= self._gap(file, gap, before + 1, after) or not gap.tail
        if at_end and any(gap.tail for gap in gaps):
            self._reading.torn.append(file)

    def _gap(self, file: SegmentFile, gap: Gap, first: int, after: int | None) -> bool:
        """Report a gap in which the records `[first, after)` should be; `after` None: the end is unknown.

        Return whether the gap is an append that a crash has interrupted: the last write of its epoch.
        """
        if gap.found:
            head = gap.found.head
            known = head.lsn in self._reading.places or self._is_rewritten(head.sequence)
            lost = None if known else head.sequence
        elif after is None:
            lost = first if first not in self._reading.places and not self._is_rewritten(first) else None
        else:
            lost = next((n for n in range(first, min(after, first + MOST)) if not self._is_there(n)), None)
        epoch = file.header.epoch if file.header else file.found[0].head.epoch if file.found else None
        at_end = gap.tail and after is None
        if lost is not None and epoch is not None and lost > self._durable.get(epoch, 0):
            what = "the last record is not whole" if at_end else "a record is missing that was not yet on disk"
            self._say(file, gap, what)
        elif lost is not None:
            self._paths.update(dict.fromkeys(_paths_of(gap.found)))
            self._say(file, gap, "a record is damaged")
            return False
        return at_end

    def _is_there(self, number: int) -> bool:
        return number in self._seen or number in self._reading.places or self._is_rewritten(number)

    def _is_rewritten(self, number: int) -> bool:
        return any(number in numbers for numbers in self._rewritten)

    def _say(self, file: SegmentFile, gap: Gap, what: str) -> None:
        paths = ", ".join(path for path in _paths_of(gap.found) if path)
        self._reading.problems.append(f"{file.name}, bytes {gap.start} to {gap.stop}: {what}{paths and f' ({paths})'}")

    def _missing(self) -> None:
        numbers = {_own_number(file) for file in self._files}
        if not numbers:
            return
        for number in range(self._reading.oldest or min(numbers), max(numbers)):
            if number not in numbers:
                self._paths[""] = None
                self._reading.problems.append(f"{segment_name(number)} is missing")


def _begins(file: SegmentFile) -> tuple[int, int] | None:
    """Return the epoch and the first sequence number of a segment; None if unknown, or if the file is a copy."""
    if file.number < 0:
        return None
    if file.header:
        return file.header.epoch, file.header.first
    return (file.found[0].head.epoch, file.found[0].head.sequence) if file.found else None


def _paths_of(found: WholeRecord | None) -> list[str]:
    told = [found.meta.get(name) for name in ("path", "from", "to")] if found else []
    return [path for path in told if isinstance(path, str)] or [""]
