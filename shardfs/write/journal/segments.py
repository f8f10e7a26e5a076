"""Create, write, cut and remove the segment files of a journal. Not thread-safe."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from google_crc32c import extend as crc32c_extend

from shardfs.model.blobs import FilePart
from shardfs.storage import syscalls
from shardfs.storage.regular_files import open_regular
from shardfs.write.journal import places, records
from shardfs.write.journal.records import HEADER_SIZE, RecordHead, SegmentHeader
from shardfs.write.journal.scanning import segment_name

if TYPE_CHECKING:
    from pathlib import Path

    from shardfs.model.blobs import Bytes

SPARE = "spare"
"""Name of the file that reserves disk space, so that a full disk still has room for records that free space."""

JOINED = 1 << 20
"""Bytes. A record with at most this much data is written by one system call, at the cost of one more copy."""

AROUND = records.HEAD_SIZE + records.BLOCK + records.TAIL_SIZE + records.ALIGN
"""Upper limit of the bytes that a record takes in addition to its meta and data."""


class Segment:
    """An open segment file.

    `size` is the file's size in bytes, and `end` is where the next record begins. `live` counts the live records,
    `pins` the readers. `spare` marks a segment made from the spare file.
    """

    __slots__ = ("damaged", "end", "fd", "live", "name", "number", "pins", "size", "spare")

    def __init__(self, number: int, name: str, fd: int, size: int, end: int, *, damaged: bool = False) -> None:
        self.number, self.name, self.fd, self.size, self.end = number, name, fd, size, end
        self.live, self.pins, self.damaged, self.spare = 0, 0, damaged, False

    @classmethod
    def create(cls, directory: Path, header: SegmentHeader, size: int) -> Segment:
        """Create a segment of `size` bytes. Its header and its name are on disk when this returns.

        If this fails, no file remains.
        """
        path = str(directory / segment_name(header.number))
        fd = syscalls.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        try:
            syscalls.fallocate(fd, 0, size)
            return cls._begin(directory, header, fd, size)
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
                segment = cls._begin(directory, header, fd, size)
            except BaseException:
                syscalls.rename(path, spare)
                raise
            segment.spare = True
            return segment
        except BaseException:
            syscalls.close(fd)
            raise

    @classmethod
    def _begin(cls, directory: Path, header: SegmentHeader, fd: int, size: int) -> Segment:
        syscalls.pwrite_all(fd, records.encode_header(header), 0)
        syscalls.fsync(fd)
        syscalls.fsync_directory(str(directory))
        return cls(header.number, segment_name(header.number), fd, size, HEADER_SIZE)

    def is_in(self, directory: Path) -> bool:
        """Return whether the next mount would find this segment.

        False if another program unlinked the file or removed the directory.
        """
        return places.is_at(self.fd, f"{directory}/{self.name}")

    def write(self, head: RecordHead, meta: bytes, content: Bytes, crc: int | None) -> RecordHead:
        """Write a record at `head.offset`. Return its head, with `data_crc` filled in if the data come from a file.

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
                return head
            syscalls.pwrite_all(self.fd, content, start)
        syscalls.pwrite_all(self.fd, tail, stop)
        syscalls.pwrite_all(self.fd, front, head.offset)
        return head

    def cut(self, directory: Path, stop: int) -> None:
        """Truncate the file behind its last record. The bytes up to `stop` are first appended to a `.torn` file."""
        at = self.end
        copy = syscalls.open(str(directory / f"{self.name[:16]}.torn"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            while at < stop and (data := os.pread(self.fd, min(records.CRC_STEP, stop - at), at).rstrip(b"\0")):
                syscalls.write_all(copy, data)
                at += records.CRC_STEP
            syscalls.fsync(copy)
        finally:
            syscalls.close(copy)
        syscalls.ftruncate(self.fd, self.end)
        self.damaged = False

    def remove(self, directory: Path) -> None:
        """Close and unlink the segment. A damaged segment is renamed to `.damaged` instead, and kept for a week."""
        path = str(directory / self.name)
        with suppress(FileNotFoundError):  # another program has removed it
            if self.damaged:
                syscalls.rename(path, path.removesuffix(".wal") + ".damaged")
            else:
                syscalls.unlink(path)
        syscalls.close(self.fd)


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
    crc, start, left = 0, part.start, part.size
    while left:
        data = os.pread(part.fd, min(left, records.CRC_STEP), start)
        if not data:
            raise OSError(errno.EIO, f"a file ends {left} bytes early")
        syscalls.pwrite_all(target, data, at)
        crc, start, at, left = crc32c_extend(crc, data), start + len(data), at + len(data), left - len(data)
    return crc
