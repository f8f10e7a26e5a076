"""The end of a journal: numbers new records, writes them to the current segment, syncs them, and frees space.

Segments are unlinked oldest first, and only after all records are on disk. A record that supersedes another one is
younger and therefore outlives it. If a few live records keep many segments alive, all live records are copied.

Threads: the lock of `Contents` guards all state. A thread holds it while it copies a record to the page cache and while
it creates a segment, but not while it waits for fdatasync.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import time
from collections import deque
from itertools import dropwhile, takewhile
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from shardfs.model.blobs import FilePart
from shardfs.storage import syscalls
from shardfs.write.journal import records
from shardfs.write.journal.records import BLOCK, HEADER_SIZE, Position, RecordHead, RecordKind, SegmentHeader
from shardfs.write.journal.scanning import RecordPlace
from shardfs.write.journal.segments import AROUND, Segment

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardfs.model.blobs import Bytes
    from shardfs.write.journal.scanning import SegmentFile
    from shardfs.write.journal.segments import Contents

log = logging.getLogger("shardfs")

FULL = (errno.ENOSPC, errno.EDQUOT)

HELPFUL = (
    frozenset({RecordKind.BEGIN, RecordKind.DONE, RecordKind.CONFLICT, RecordKind.CLEAN, RecordKind.DROP}) | records.OWN
)
"""Kinds of small records that help to empty the journal. With `reserve`, no size limit applies to them."""

ON_FULL_DISK = HELPFUL | {RecordKind.DEL}
"""Kinds of records that may use the spare file when the disk is full."""

MAX_COPIED = 256 << 20
"""Bytes. If live records are larger, they are not copied to free space, because appending waits for the copy."""

REMOVED = "another program has removed the journal"


class _Fresh(NamedTuple):
    """A record that may not be on disk yet."""

    sequence: int
    lsn: int
    place: RecordPlace


class Appender:
    """Appends records to the segments of `contents`.

    The caller of `write`, `roll`, `copy` and `write_own` holds the lock.

    Args:
        source: the source's id and name, for the headers of new segments.
        last: the highest number of a record so far.
        number: the highest number of a segment so far.
        segment_bytes: size of new segments.

    Attributes:
        current: the segment to which records are appended; None: the next record begins a new one.
        sequence: the number of the last record, and `durable` that of the last one on disk.
        dirty: the segments written to since the last fdatasync, by number.
        read_only: why no record can be written any more; None if records can be written.
    """

    def __init__(
        self, contents: Contents, source: tuple[bytes, str], last: int, number: int, segment_bytes: int
    ) -> None:
        self._contents = contents
        self._source = source
        self._segment_bytes = segment_bytes
        self._epoch = int.from_bytes(secrets.token_bytes(8), "little")
        self.current: Segment | None = None
        self.sequence = self.durable = last
        self.dirty: dict[int, Segment] = {}
        self.read_only: str | None = None
        self._fresh: deque[_Fresh] = deque()
        self._number = number

    def adopt(self, files: Iterable[SegmentFile]) -> None:
        """Let the next sync cover recovered records: if the last mount was killed, they may be in the page cache only.

        `files` are sorted, and belong to segments of the contents.
        """
        for file in files:
            self.dirty[file.number] = self._contents.segments[file.number]
            self._fresh += (_Fresh(head.sequence, head.lsn, file.place(head)) for head, _ in file.found)
            self.durable = self.sequence - 1

    # ------------------------------------------------------------------------------------------------ appending

    def write(
        self, kind: int, flags: int, meta: bytes, content: Bytes = b"", crc: int | None = None, lsn: int = 0
    ) -> tuple[int, Position]:
        """Append a record. Return its LSN, which is a new one if none is given, and where its data are.

        After an error, the next record overwrites the failed one. Raise OSError: EROFS if the journal is read-only;
        EIO if data from a file do not have the given `crc`; ENOENT if a new segment is needed and another program has
        removed the journal.
        """
        if self.read_only:
            raise OSError(errno.EROFS, self.read_only)
        size = content.size if isinstance(content, FilePart) else len(content)
        segment, need = self.current, len(meta) + size + AROUND
        helpful = kind in ON_FULL_DISK
        if segment is None or segment.end + need > segment.size or (segment.spare and not helpful):
            if not self._contents.is_in_place():
                raise FileNotFoundError(errno.ENOENT, REMOVED, str(self._contents.directory))
            segment = self.roll(need, helpful=helpful)
        number = self.sequence + 1
        head = RecordHead(
            kind, flags, len(meta), size, number, lsn or number, self._epoch, segment.number, segment.end,
            self.durable, self._contents.oldest, crc or 0,
        )  # fmt: skip
        data = segment.write(head, meta, content, crc)
        size = data.start + data.size + records.TAIL_SIZE - head.offset
        step = records.aligned(size)
        self._contents.used += step
        segment.end += step
        self.sequence = number
        self.dirty[segment.number] = segment
        place = RecordPlace(segment.number, head.offset, size)
        self._fresh.append(_Fresh(number, head.lsn, place))
        if kind not in records.OWN:
            if lsn:  # a copy
                self._contents.release(lsn)
            self._contents.add_record(head.lsn, place)
        return head.lsn, data

    def write_own(self, kind: RecordKind, meta: dict[str, int]) -> None:
        """Append a record of the journal's own."""
        self.write(kind, 0, records.encode_meta(meta))

    def roll(self, need: int, *, helpful: bool) -> Segment:
        """Begin a segment with room for `need` bytes behind its header.

        On a full disk, raise OSError unless the record is `helpful` and the spare file is large enough.
        """
        id_, name = self._source
        header = SegmentHeader(id_, self._epoch, self._number + 1, self.sequence + 1, time.time_ns(), name)
        directory, need = self._contents.directory, HEADER_SIZE + need
        try:
            segment = Segment.create(directory, header, max(self._segment_bytes, need))
        except OSError as e:
            if e.errno not in FULL or not helpful:
                raise
            segment = Segment.from_spare(directory, header, need)
        self._number = header.number
        self._contents.add(segment)
        self.current = segment
        return segment

    def copy(self, lsn: int, place: RecordPlace) -> None:
        """Append a copy of a record, with the same LSN. Raise OSError (EIO) if the record is damaged."""
        fd, live = self._contents.segments[place.number].fd, lsn in self._contents.live
        text = os.pread(fd, records.HEAD_SIZE, place.offset)
        head = records.decode_head(text)
        meta = os.pread(fd, head.meta_size, place.offset + records.HEAD_SIZE) if head else b""
        if head is None or head.lsn != lsn or records.decode_meta(text + meta) is None:
            raise OSError(errno.EIO, f"record {lsn} of the journal cannot be read any more")
        part = FilePart(fd, head.data_start, head.data_size)
        _, position = self.write(head.kind, head.flags, meta, part, head.data_crc, lsn)
        self._contents.moved(place.number, head.data_start, position)
        if not live:
            self._contents.release(lsn)

    # --------------------------------------------------------------------------------------------------- syncing

    def sync(self) -> None:
        """Sync all records. Only the leader calls this, without the lock.

        Raise OSError (EIO) if the records cannot be written to disk.
        """
        with self._contents.lock:
            if self.read_only and self._fresh:
                raise OSError(errno.EIO, self.read_only)
            sequence, dirty = self.sequence, list(self.dirty.values())
            self.dirty.clear()
        broken = self._sync_segments(dirty)
        with self._contents.lock:
            if broken:
                self.current = None
                if not self._contents.is_in_place():  # the journal then writes all live records anew
                    raise OSError(errno.EIO, REMOVED)
                self._rescue(broken)
                return
            self.durable = max(self.durable, sequence)
            while self._fresh and self._fresh[0].sequence <= sequence:
                self._fresh.popleft()

    def _sync_segments(self, segments: Iterable[Segment]) -> list[Segment]:
        """Sync segments; return those for which fdatasync failed."""
        broken = []
        for segment in segments:
            try:
                syscalls.fdatasync(segment.fd)
            except OSError as e:
                log.error("%s: %s; its last records are written anew", segment.path, e.strerror)
                broken.append(segment)
        return broken

    def _rescue(self, broken: Sequence[Segment]) -> None:
        """After a failed fdatasync, write the records again that may be missing on disk; the lock is held.

        After the error, the kernel marks the pages as clean, so a second fdatasync of the file would prove nothing. The
        page cache usually still has the pages; each copied record is verified. All records from the first doubtful one
        on are copied in order, so that every record still precedes the records that supersede it.
        """
        numbers = {segment.number for segment in broken}
        doubtful = list(dropwhile(lambda fresh: fresh.place.number not in numbers, self._fresh))
        first, last = doubtful[0].sequence if doubtful else self.sequence, self.sequence
        try:
            for fresh in doubtful:
                self.copy(fresh.lsn, fresh.place)
            self.write_own(RecordKind.REWRITTEN, {"first": first, "last": last})
            for segment in self.dirty.values():
                if segment not in broken:
                    syscalls.fdatasync(segment.fd)
        except OSError as e:
            self.give_up(e)
        self.dirty.clear()
        self._fresh.clear()
        self.durable = self.sequence

    def give_up(self, error: OSError) -> NoReturn:
        """Make the journal read-only, and raise OSError (EIO)."""
        self.read_only = f"the journal cannot be written to disk: {error.strerror}"
        log.critical("%s: %s; nothing more is written", self._contents.directory, self.read_only)
        raise OSError(errno.EIO, self.read_only) from error

    # ------------------------------------------------------------------------------------------------ freeing space

    def free(self) -> None:
        """Unlink the oldest segments without live records, again until there are none. Only the leader calls this.

        A segment that a reader pins is unlinked later.
        """
        contents = self._contents
        while True:
            with contents.lock:
                segments = contents.segments.values()
                dead = list(takewhile(lambda segment: not segment.live and segment is not self.current, segments))
                if all(segment.pins and segment.number < contents.oldest for segment in dead):
                    return
            self.sync()  # superseding records first: the kernel may write the FREE record before them
            with contents.lock:
                needed = (n for n, segment in contents.segments.items() if n > 0 and segment not in dead)
                contents.oldest = min(needed, default=0)
                self.write_own(RecordKind.FREE, {})
            self.sync()
            with contents.lock:
                for segment in dead:
                    if not segment.pins:
                        contents.unlink(segment)
                        self.dirty.pop(segment.number, None)

    def rewrite(self) -> None:
        """Copy all live records to a new segment, and unlink the old segments. Only the leader calls this.

        Raise OSError if the disk has no room for the new segment: nothing has changed then. Raise OSError (EIO) if a
        record cannot be copied: the journal is read-only then.
        """
        contents = self._contents
        with contents.lock:  # no record may be superseded between two copies
            self.roll(contents.live_bytes + (len(contents.live) + 1) * AROUND, helpful=not contents.live)
            failure = None
            for lsn in sorted(contents.live):
                try:
                    self.copy(lsn, contents.live[lsn])
                except OSError as e:
                    failure = e
            if failure is not None and failure.errno in FULL and contents.missing():
                raise failure  # all is written anew once the disk has room
            if failure is not None:  # a partial copy would break the order of the records
                self.give_up(failure)
        self.free()

    def is_mostly_dead(self, *, hard: bool) -> bool:
        """Return whether copying the live records would free enough space to be worth the copy. `hard`: even less."""
        contents = self._contents
        with contents.lock:
            if not contents.live and self.current is not None:
                return self.current.end > (HEADER_SIZE + BLOCK if hard else self.current.size // 2)
            needed = (1 if hard else 2) * (contents.live_bytes + self._segment_bytes)
            pinned = any(segment.pins for segment in contents.segments.values())
            return contents.used > needed and contents.live_bytes <= MAX_COPIED and not pinned

    def close(self) -> None:
        """Refuse further writes."""
        self.read_only = self.read_only or "the journal is closed"
        self.current = None
        self.dirty.clear()
        self._fresh.clear()
