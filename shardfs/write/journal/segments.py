"""The files of a journal: made, written to, cut, removed. Not thread-safe."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from google_crc32c import extend as crc32c_extend

from shardfs.model.blobs import FilePart
from shardfs.storage import syscalls
from shardfs.write.journal import places
from shardfs.write.journal.reading import segment_name
from shardfs.write.journal.records import (
    ALIGN,
    BLOCK,
    CRC_STEP,
    HEAD_SIZE,
    HEADER_SIZE,
    TAIL_SIZE,
    RecordHead,
    SegmentHeader,
    encode_head,
    encode_header,
    encode_tail,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SPARE = "spare"
"""A file that keeps room on the disk for tombstones and the like, so that a full disk can be emptied again."""

JOINED = 1 << 20
"""Bytes. Records up to that size are written by one call, which costs one more copy."""

AROUND = HEAD_SIZE + BLOCK + TAIL_SIZE + ALIGN
"""Bytes that a record takes at most beside its meta and data."""

Content: TypeAlias = "Sequence[bytes] | FilePart"
Data: TypeAlias = "bytes | bytearray | memoryview | Content"


class Segment:
    """A file of the journal: room for `size` bytes, the next record goes to `end`; live records and readers in it."""

    __slots__ = ("damaged", "end", "fd", "live", "name", "number", "pins", "size", "spare")

    def __init__(self, number: int, name: str, fd: int, size: int, end: int, *, damaged: bool = False) -> None:
        self.number, self.name, self.fd, self.size, self.end = number, name, fd, size, end
        self.live, self.pins, self.damaged, self.spare = 0, 0, damaged, False

    @classmethod
    def create(cls, directory: Path, header: SegmentHeader, size: int) -> Segment:
        """Header and name are on disk before anything counts on them. Nothing is left of one that fails."""
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
        """As `create`, on a full disk. Raise OSError (ENOSPC) if the spare file is used up, or too small."""
        spare, path = str(directory / SPARE), str(directory / segment_name(header.number))
        try:
            fd = syscalls.open(spare, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory)) from None
        try:
            size = os.fstat(fd).st_size
            if size < need:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))
            syscalls.rename(spare, path)
            segment = cls._begin(directory, header, fd, size)
            segment.spare = True
            return segment
        except BaseException:
            syscalls.close(fd)
            raise

    @classmethod
    def _begin(cls, directory: Path, header: SegmentHeader, fd: int, size: int) -> Segment:
        syscalls.pwrite_all(fd, encode_header(header), 0)
        syscalls.fsync(fd)
        syscalls.fsync_directory(str(directory))
        return cls(header.number, segment_name(header.number), fd, size, HEADER_SIZE)

    def is_in(self, directory: Path) -> bool:
        """Whether the next mount would find it there: false if it was unlinked, or the directory was removed."""
        return places.is_at(self.fd, f"{directory}/{self.name}")

    def write(self, head: RecordHead, meta: bytes, content: Content, crc: int | None) -> RecordHead:
        """Write a record, which lies at `head.offset`; the head with the crc32c of the data, if they are from a file.

        Raise EIO, before anything looks like a record, if the data should have another `crc`.
        """
        if isinstance(content, FilePart):
            found = _copy(content, self.fd, head.data_start)
            if crc is not None and crc != found:
                raise OSError(errno.EIO, f"record {head.lsn} of the journal cannot be read any more")
            head = head._replace(data_crc=found)
            syscalls.pwrite_all(self.fd, encode_tail(head), head.stop - TAIL_SIZE)
            syscalls.pwrite_all(self.fd, encode_head(head, meta), head.offset)
            return head
        front, tail = encode_head(head, meta), encode_tail(head)
        if head.data_size <= JOINED:
            gap = bytes(head.data_start - head.offset - len(front))
            syscalls.pwrite_all(self.fd, b"".join((front, gap, *content, tail)), head.offset)
            return head
        at = head.data_start
        for part in (*content, tail):
            syscalls.pwrite_all(self.fd, part, at)
            at += len(part)
        syscalls.pwrite_all(self.fd, front, head.offset)
        return head

    def cut(self, directory: Path, stop: int) -> None:
        """Take what is no record, up to `stop`, off the end. A copy is kept."""
        at = self.end
        copy = syscalls.open(str(directory / f"{self.name[:16]}.torn"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            while at < stop and (data := os.pread(self.fd, min(CRC_STEP, stop - at), at).rstrip(b"\0")):
                syscalls.write_all(copy, data)
                at += CRC_STEP
            syscalls.fsync(copy)
        finally:
            syscalls.close(copy)
        syscalls.ftruncate(self.fd, self.end)
        self.damaged = False

    def remove(self, directory: Path) -> None:
        """It is not needed any more; the file of one with damage is kept for a while, under another name."""
        path = str(directory / self.name)
        with suppress(FileNotFoundError):  # another program has removed it
            if self.damaged:
                syscalls.rename(path, path.removesuffix(".wal") + ".damaged")
            else:
                syscalls.unlink(path)
        syscalls.close(self.fd)


def keep_spare(directory: Path, size: int) -> None:
    """Have a spare file. Raise OSError if there is no room for one."""
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


def content_of(data: Data | None) -> tuple[Content, int]:
    """And its size in bytes."""
    if isinstance(data, FilePart):
        return data, data.size
    if data is None:
        return (), 0
    if isinstance(data, bytes):
        return (data,), len(data)
    if isinstance(data, bytearray | memoryview):
        return (bytes(data),), len(data)
    return data, sum(map(len, data))


def crc_of(parts: Sequence[bytes]) -> int:
    """Of all of them, one behind the other."""
    crc = 0
    for part in parts:
        crc = crc32c_extend(crc, part)
    return crc


def _copy(part: FilePart, target: int, at: int) -> int:
    """The crc32c of what was copied. Raise EIO if the file is shorter than the part."""
    crc, start, left = 0, part.start, part.size
    while left:
        data = os.pread(part.fd, min(left, CRC_STEP), start)
        if not data:
            raise OSError(errno.EIO, f"a file ends {left} bytes early")
        syscalls.pwrite_all(target, data, at)
        crc, start, at, left = crc32c_extend(crc, data), start + len(data), at + len(data), left - len(data)
    return crc
