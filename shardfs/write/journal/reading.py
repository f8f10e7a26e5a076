"""Read and verify the segments of a journal directory: collect records, and tell damage from the traces of a crash."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from google_crc32c import extend
from google_crc32c import value as crc32c

from shardfs.model.blobs import FilePart, read_file
from shardfs.model.write_plan import SPAN
from shardfs.write.journal.records import HAS_DATA, OWN, Position, Record, RecordHead, RecordKind, is_sound
from shardfs.write.journal.scanning import NAME, Gap, RecordPlace, SegmentFile, WholeRecord, open_segment, segment_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

DAMAGED = "a record of the journal is damaged"

MOST = 1_000_000
"""Upper limit of the sequence numbers that are checked in one gap. No segment has so many records."""


@dataclass
class Reading:
    """The content of a journal as found on disk, with open segment files.

    Attributes:
        owner: describes the process that holds the lock; None if no process does.
        files: the segment files by number; a copy of a segment has a negative number.
        recovered: the complete records in LSN order, and `places` their places by LSN.
        problems: messages for the user.
        damaged_paths: the paths of lost records that had been on disk; "" if the path of a lost record is unknown.
        torn: files that end in an incomplete append.
        stale: files that are older than `oldest` and not needed.
        last: the highest sequence number or LSN found.
    """

    directory: Path
    owner: dict[str, Any] | None = None
    files: dict[int, SegmentFile] = field(default_factory=dict)
    recovered: list[Record] = field(default_factory=list)
    places: dict[int, RecordPlace] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    damaged_paths: list[str] = field(default_factory=list)
    torn: list[SegmentFile] = field(default_factory=list)
    stale: list[SegmentFile] = field(default_factory=list)
    oldest: int = 0
    last: int = 0

    @property
    def source(self) -> str:
        """The source's name without credentials; "" if no header is intact."""
        return self.identity()[1]

    def identity(self) -> tuple[bytes, str]:
        """Return the source's id and its name without credentials, from the newest intact header; empty without one."""
        headers = (file.header for _, file in sorted(self.files.items(), reverse=True) if file.header)
        return next(((header.source_id, header.source) for header in headers), (bytes(16), ""))

    @contextmanager
    def using(self, positions: Iterable[Position]) -> Iterator[list[FilePart]]:
        """Give where data of records are for the length of a `with` block, like `Journal.using`."""
        yield [FilePart(self.files[segment].fd, start, size) for segment, start, size, _ in positions]

    def read(self, position: Position, start: int = 0, size: int | None = None) -> bytes:
        """Return bytes of a record's data, like `Journal.read`."""
        with self.using([position]) as (part,):
            return read_part(part, position.crc, start, size)

    def close(self) -> None:
        """Close the segment files."""
        while self.files:
            os.close(self.files.popitem()[1].fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def read(directory: Path, source_id: bytes | None, *, write: bool) -> Reading:
    """Read all segments of a directory, and verify the checksums of heads, meta and data.

    The segment files are open for writing if `write`. Raise UnsupportedError if a newer shardfs wrote a segment;
    OSError if a segment is no regular file, belongs to another source than `source_id`, or (with `write`) belongs to
    another user.
    """
    reading = Reading(directory)
    for name in sorted(filter(NAME.fullmatch, os.listdir(directory))):
        with suppress(FileNotFoundError):  # a running mount has just unlinked the segment
            _add(reading, open_segment(directory, name, source_id, write=write))
    _merge(reading)
    return reading


def _add(reading: Reading, file: SegmentFile) -> None:
    """Add a file under its number, or under a negative number if another file has the same."""
    number = file.recorded_number()
    if number is None:
        if file.gaps:
            file.problems.append(f"{file.name} cannot be read")
        number = int(file.name[:16], 16)
    elif file.name != segment_name(number):
        file.problems.append(f"{file.name} is a copy of segment {number}, or was renamed")
    if number in reading.files:
        number = min(0, *reading.files) - 1
    file.number = number
    reading.files[number] = file


def _merge(reading: Reading) -> None:
    """Collect the records of all segments in LSN order, keep one copy of each, and find missing records."""
    files = sorted(reading.files.values(), key=lambda file: file.order)
    reading.oldest = max((record.head.oldest for file in files for record in file.found), default=0)
    reading.stale = [file for file in files if _own_number(file) < reading.oldest]
    files = [file for file in files if _own_number(file) >= reading.oldest]
    sequences: set[int] = set()
    for file in files:
        for head, meta in file.found:
            sequences.add(head.sequence)
            if head.lsn not in reading.places:
                reading.places[head.lsn] = file.place(head)
                if head.kind not in OWN:
                    reading.recovered.append(_record_of(head, meta, file.number))
    reading.recovered.sort()
    reading.last = max(sequences.union(reading.places), default=0)
    _Judge(reading, files, sequences).run()


def _own_number(file: SegmentFile) -> int:
    number = file.recorded_number()
    return file.number if number is None else number


def _record_of(head: RecordHead, meta: dict[str, Any], number: int) -> Record:
    data = Position(number, head.data_start, head.data_size, head.data_crc) if head.flags & HAS_DATA else None
    return Record(head.lsn, RecordKind(head.kind), meta, data)


def read_part(part: FilePart, crc: int, start: int = 0, size: int | None = None) -> bytes:
    """Return up to `size` bytes of a part from `start`; None: up to the end.

    A read of the whole part verifies `crc`. Raise OSError (EIO) if the crc32c differs, or the file is too short.
    """
    size = part.size - start if size is None else min(size, part.size - start)
    if size <= 0:
        return b""
    data = read_file(part.fd, size, part.start + start)
    if len(data) != size:
        raise OSError(errno.EIO, "the journal ends early")
    if size == part.size and crc32c(data) != crc:
        raise OSError(errno.EIO, DAMAGED)
    return data


def checked_pieces(part: FilePart, crc: int) -> Iterator[bytes]:
    """Yield all bytes of a part, at most `SPAN` at a time. Raise OSError (EIO) as `read_part`, perhaps at the end."""
    if part.size <= SPAN:
        yield read_part(part, crc)
        return
    actual = 0
    for start in range(0, part.size, SPAN):
        data = read_part(part, crc, start, SPAN)
        actual = extend(actual, data)
        yield data
    if actual != crc:
        raise OSError(errno.EIO, DAMAGED)


class _Judge:
    """Distinguish damage from the normal traces of a crash, and find the paths of damaged records."""

    def __init__(self, reading: Reading, files: list[SegmentFile], sequences: set[int]) -> None:
        self._reading = reading
        self._files = files
        self._present = sequences  # sequence numbers of records that are whole, or whose loss is judged by itself
        self._durable: dict[int, int] = {}
        self._rewritten: list[range] = []
        self._paths: dict[str, None] = {}

    def run(self) -> None:
        for file in self._files:
            for record in [*file.found, *(g.found for g in file.gaps if g.found)]:
                epoch = record.head.epoch
                self._durable[epoch] = max(record.head.durable, self._durable.get(epoch, 0))
                if record.head.kind == RecordKind.REWRITTEN and is_sound(RecordKind.REWRITTEN, record.meta):
                    self._rewritten.append(range(record.meta["first"], record.meta["last"] + 1))
            self._present.update(g.found.head.sequence for g in file.gaps if g.found)
        for i, file in enumerate(self._files):
            self._reading.problems += file.problems
            self._file(file, next(filter(None, map(_begins, self._files[i + 1 :])), None))
        self._missing()
        self._reading.damaged_paths = list(self._paths)

    def _file(self, file: SegmentFile, following: tuple[int, int] | None) -> None:
        start = _begins(file)
        stop = following[1] if following and start and following[0] == start[0] and following[1] >= start[1] else None
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
            is_known = head.lsn in self._reading.places or self._is_rewritten(head.sequence)
            lost = None if is_known else head.sequence
        elif after is None:
            lost = first if first not in self._reading.places and not self._is_rewritten(first) else None
        else:
            lost = next((n for n in range(first, min(after, first + MOST)) if not self._is_there(n)), None)
        begins = file.first()
        at_end = gap.tail and after is None
        if lost is None:
            return at_end
        if begins is not None and lost > self._durable.get(begins[0], 0):
            incomplete = "the last record is not whole"
            self._report(file, gap, incomplete if at_end else "a record is missing that was not yet on disk")
            return at_end
        self._paths.update(dict.fromkeys(_paths_of(gap.found)))
        self._report(file, gap, "a record is damaged")
        return False

    def _is_there(self, number: int) -> bool:
        return number in self._present or number in self._reading.places or self._is_rewritten(number)

    def _is_rewritten(self, number: int) -> bool:
        return any(number in numbers for numbers in self._rewritten)

    def _report(self, file: SegmentFile, gap: Gap, problem: str) -> None:
        paths = ", ".join(path for path in _paths_of(gap.found) if path)
        text = f"{file.name}, bytes {gap.start} to {gap.stop}: {problem}{paths and f' ({paths})'}"
        self._reading.problems.append(text)

    def _missing(self) -> None:
        numbers = sorted({_own_number(file) for file in self._files})
        first = self._reading.oldest or min(numbers, default=0)
        for number in numbers:
            if number > first:
                self._paths[""] = None
                last = number - 1  # a file with a forged number may leave out very many
                names = segment_name(first) if first == last else f"{segment_name(first)} to {segment_name(last)}"
                self._reading.problems.append(f"{names} {'is' if first == last else 'are'} missing")
            first = number + 1


def _begins(file: SegmentFile) -> tuple[int, int] | None:
    """Return the epoch and the first sequence number of a segment; None if unknown, or if the file is a copy."""
    return None if file.number < 0 else file.first()


def _paths_of(record: WholeRecord | None) -> list[str]:
    paths = [record.meta.get(name) for name in ("path", "from", "to")] if record else []
    return [path for path in paths if isinstance(path, str)] or [""]
