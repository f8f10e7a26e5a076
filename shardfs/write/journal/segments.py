"""Segment files of a journal, and the account of them: which records are live, and where their data are now."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from google_crc32c import extend as crc32c_extend

from shardfs.model.blobs import FilePart
from shardfs.storage import source_locks, syscalls
from shardfs.storage.regular_files import open_regular
from shardfs.write.journal import places, records
from shardfs.write.journal.records import HEADER_SIZE, Position, RecordHead, SegmentHeader
from shardfs.write.journal.scanning import segment_name

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardfs.model.blobs import Bytes
    from shardfs.write.journal.reading import Reading
    from shardfs.write.journal.scanning import RecordPlace, SegmentFile

SPARE = "spare"
"""Name of the file that reserves disk space, so that a full disk still has room for records that free space."""

JOINED = 1 << 20
"""Bytes. A record with at most this much data is written by one system call, at the cost of one more copy."""

AROUND = records.HEAD_SIZE + records.BLOCK + records.TAIL_SIZE + records.ALIGN
"""Upper limit of the bytes that a record takes in addition to its meta and data."""


class Segment:
    """An open segment file. Not thread-safe.

    `size` is the file's size in bytes, and `end` is where the next record begins. `live` counts the live records,
    `pins` the readers. `spare` marks a segment made from the spare file.
    """

    __slots__ = ("damaged", "end", "fd", "live", "number", "path", "pins", "size", "spare")

    def __init__(self, number: int, path: str, fd: int, size: int, end: int, *, damaged: bool = False) -> None:
        self.number = number
        self.path = path
        self.fd = fd
        self.size = size
        self.end = end
        self.damaged = damaged
        self.live = 0
        self.pins = 0
        self.spare = False

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @classmethod
    def create(cls, directory: Path, header: SegmentHeader, size: int) -> Segment:
        """Create a segment of `size` bytes. Its header and its name are on disk when this returns.

        If this fails, no file remains.
        """
        path = str(directory / segment_name(header.number))
        fd = syscalls.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        try:
            syscalls.fallocate(fd, 0, size)
            return cls._with_header(path, header, fd, size)
        except BaseException:
            syscalls.close(fd)
            with suppress(OSError):
                syscalls.unlink(path)
            raise

    @classmethod
    def from_spare(cls, directory: Path, header: SegmentHeader, need: int) -> Segment:
        """Create a segment on a full disk by renaming the spare file. If this fails, the spare file stays.

        Raise OSError (ENOSPC) if there is no spare file, or if it has less than `need` bytes.
        """
        spare, path = str(directory / SPARE), str(directory / segment_name(header.number))
        try:
            fd = open_regular(spare, os.O_RDWR)
        except FileNotFoundError:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory)) from None
        try:
            size = os.fstat(fd).st_size
            if size < need:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))
            syscalls.rename(spare, path)
            try:
                segment = cls._with_header(path, header, fd, size)
            except BaseException:
                syscalls.rename(path, spare)
                raise
            segment.spare = True
            return segment
        except BaseException:
            syscalls.close(fd)
            raise

    @classmethod
    def _with_header(cls, path: str, header: SegmentHeader, fd: int, size: int) -> Segment:
        syscalls.pwrite_all(fd, records.encode_header(header), 0)
        syscalls.fsync(fd)
        syscalls.fsync_directory(os.path.dirname(path))
        return cls(header.number, path, fd, size, HEADER_SIZE)

    def write(self, head: RecordHead, meta: bytes, content: Bytes, crc: int | None) -> Position:
        """Write a record at `head.offset`. Return where its data are; if they come from a file, `data_crc` is ignored.

        Raise OSError (EIO), before the head is written, if data from a file do not have the given `crc`.
        """
        start = head.data_start
        stop = start + head.data_size
        tail = records.encode_tail(head.sequence, stop + records.TAIL_SIZE - head.offset)
        if isinstance(content, FilePart):
            data_crc = _copy(content, self.fd, start)
            if crc is not None and crc != data_crc:
                raise OSError(errno.EIO, f"record {head.lsn} of the journal cannot be read any more")
            head = head._replace(data_crc=data_crc)
        front = records.encode_head(head, meta)
        if not isinstance(content, FilePart):
            if head.data_size <= JOINED:
                gap = bytes(start - head.offset - len(front))
                syscalls.pwrite_all(self.fd, b"".join((front, gap, content, tail)), head.offset)
                return Position(self.number, start, head.data_size, head.data_crc)
            syscalls.pwrite_all(self.fd, content, start)
        syscalls.pwrite_all(self.fd, tail, stop)
        syscalls.pwrite_all(self.fd, front, head.offset)
        return Position(self.number, start, head.data_size, head.data_crc)

    def cut(self, stop: int) -> None:
        """Truncate the file behind its last record. The bytes up to `stop` are first appended to a `.torn` file."""
        at = self.end
        copy = syscalls.open(self.path.removesuffix(".wal") + ".torn", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            while at < stop and (data := os.pread(self.fd, min(records.CRC_STEP, stop - at), at).rstrip(b"\0")):
                syscalls.write_all(copy, data)
                at += records.CRC_STEP
            syscalls.fsync(copy)
        finally:
            syscalls.close(copy)
        syscalls.ftruncate(self.fd, self.end)
        self.damaged = False

    def remove(self) -> None:
        """Close and unlink the segment. A damaged segment is renamed to `.damaged` instead, and kept for a week."""
        with suppress(FileNotFoundError):  # another program has removed it
            if self.damaged:
                syscalls.rename(self.path, self.path.removesuffix(".wal") + ".damaged")
            else:
                syscalls.unlink(self.path)
        syscalls.close(self.fd)


class Contents:
    """The files and the live records of a journal. A record is live until it is released.

    The caller of every method holds `lock`.

    Attributes:
        locks: the lock of the journal, and perhaps that of the source.
        segments: by number, oldest first.
        oldest: the number of the first segment that is needed.
        live: the places of the live records by LSN, and `live_bytes` their sizes.
        used: bytes of all segments.
    """

    def __init__(self, directory: Path, locks: Sequence[places.Lock]) -> None:
        self.directory = directory
        self.locks = list(locks)
        self.lock = threading.Lock()
        self.segments: dict[int, Segment] = {}
        self.oldest = 1
        self.live: dict[int, RecordPlace] = {}
        self.used = self.live_bytes = 0
        self._moved: dict[tuple[int, int], Position] = {}  # original (segment, start) to the current position
        self._origins: dict[tuple[int, int], tuple[int, int]] = {}  # the inverse

    def adopt(self, reading: Reading) -> list[SegmentFile]:
        """Take over the files and records that were found on disk, and cut off incomplete appends.

        Return the files that are needed.
        """
        files = sorted(reading.files.values(), key=lambda file: file.order)
        self.oldest = reading.oldest or min((n for n in reading.files if n > 0), default=1)
        for file in files:
            path = str(self.directory / file.name)
            self.add(Segment(file.number, path, file.fd, file.end, file.end, damaged=file.damaged))
        reading.files = {}
        for file in reading.torn:
            self.segments[file.number].cut(file.size)
        for file in files:
            if file.size > file.end and not file.damaged:
                syscalls.ftruncate(file.fd, file.end)
        for file in reading.stale:
            self.unlink(self.segments[file.number])
        for record in reading.recovered:
            self.add_record(record.lsn, reading.places[record.lsn])
        return [file for file in files if file.number in self.segments]

    # ---------------------------------------------------------------------------------------- records and positions

    def add_record(self, lsn: int, place: RecordPlace) -> None:
        """Add a live record."""
        self.live[lsn] = place
        self.live_bytes += place.size
        self.segments[place.number].live += 1

    def release(self, lsn: int) -> None:
        """Remove a live record, if it is one."""
        if (place := self.live.pop(lsn, None)) is not None:
            self.live_bytes -= place.size
            self.segments[place.number].live -= 1

    def moved(self, segment: int, start: int, new: Position) -> None:
        """Note that data at this segment and offset have been copied to a new position."""
        origin = self._origins.pop((segment, start), (segment, start))
        self._moved[origin] = new
        self._origins[new.segment, new.start] = origin

    def part(self, position: Position) -> tuple[Segment, FilePart]:
        """Return where data are now. Raise OSError (ESTALE) if their segment is gone."""
        position = self._moved.get((position.segment, position.start), position)
        segment = self.segments.get(position.segment)
        if segment is None:
            raise OSError(errno.ESTALE, "the record is not in the journal any more: it was published or discarded")
        return segment, FilePart(segment.fd, position.start, position.size)

    # ---------------------------------------------------------------------------------------------------- the files

    def add(self, segment: Segment) -> None:
        """Add a segment."""
        self.segments[segment.number] = segment
        self.used += segment.end

    def unlink(self, segment: Segment) -> None:
        """Remove a segment and its file."""
        self.segments.pop(segment.number, None)
        self.used -= segment.end
        for key in [key for key in self._origins if key[0] == segment.number]:
            del self._moved[self._origins.pop(key)]
        segment.remove()

    def is_in_place(self) -> bool:
        """Return whether the lock file and all needed segments are still in the directory."""
        return all(lock.is_at_its_path() for lock in self.locks[:1]) and not self.missing()

    def missing(self) -> list[Segment]:
        """Return the needed segments that another program has removed from the directory."""
        needed = (segment for segment in self.segments.values() if segment.number >= self.oldest)
        return [segment for segment in needed if not places.is_at(segment.fd, segment.path)]

    def take_place(self) -> None:
        """Recreate the directory and the lock file if they are missing.

        Raise OSError if another process holds the lock, or the directory has segments of another journal.
        """
        old = self.locks[0]
        if not old.is_at_its_path():
            places.prepare(self.directory, "", "")  # no mount point: a look at our own mount would wait for this thread
            self.locks[0] = places.Lock.take(str(self.directory / source_locks.LOCK), old.mountpoint, old.source)
            old.free()
        ours = {segment.name for segment in self.segments.values() if places.is_at(segment.fd, segment.path)}
        if foreign := {path.name for path in self.directory.glob("*.wal")} - ours:
            raise OSError(errno.EEXIST, f"there is another journal at its place ({min(foreign)}): move it away")

    def remove_if_not_needed(self) -> None:
        """Remove the directory, unless it has live records, damage, kept files, or is not in place."""
        segments = list(self.segments.values())
        needed = self.live or len(segments) > 1 or any(s.pins or s.damaged for s in segments)
        if not needed and self.is_in_place():
            places.remove(self.directory, [segment.name for segment in segments])

    def close(self) -> None:
        """Close all files and release the locks."""
        for segment in self.segments.values():
            with suppress(OSError):
                syscalls.close(segment.fd)
        self.segments = {}
        locks, self.locks = self.locks, []
        for lock in locks:
            lock.free()


def keep_spare(directory: Path, size: int) -> None:
    """Create the spare file if there is none. Raise OSError if the disk has no room for it.

    No spare file is made if `size` is too small for a single record.
    """
    path = str(directory / SPARE)
    if size < AROUND + HEADER_SIZE or os.path.exists(path):
        return
    fd = syscalls.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
    try:
        syscalls.fallocate(fd, 0, size)
    except OSError:
        syscalls.unlink(path)
        raise
    finally:
        syscalls.close(fd)


def _copy(part: FilePart, target: int, at: int) -> int:
    """Copy a part of a file to `at` and return the crc32c of its bytes.

    Raise OSError (EIO) if the file is shorter than the part.
    """
    crc, start, remaining = 0, part.start, part.size
    while remaining:
        data = os.pread(part.fd, min(remaining, records.CRC_STEP), start)
        if not data:
            raise OSError(errno.EIO, f"a file ends {remaining} bytes early")
        syscalls.pwrite_all(target, data, at)
        crc, start, at, remaining = crc32c_extend(crc, data), start + len(data), at + len(data), remaining - len(data)
    return crc
