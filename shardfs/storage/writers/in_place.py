"""Files that are changed where they lie: new bytes behind the old ones, then the beginning, an entry at a time.

What is appended is on the disk before an entry leads to it, and no old byte goes but those of entries. So a crash
leaves each entry old or new, both lead to what was written for them, and what nothing leads to is dead. There is no
exchange that would show who else was there: it is looked for right before each step, and at the end.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from shardfs.model.blobs import ByteRange
from shardfs.model.write_plan import size_of
from shardfs.storage import syscalls
from shardfs.storage.blob_views import HeadedBlob
from shardfs.storage.cache import nothing
from shardfs.storage.local import LocalBlob, stat_of
from shardfs.storage.writers.common import Begun
from shardfs.storage.writers.files import fill, identity, identity_at, identity_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardfs.model.blobs import Blob, Plan, Stat
    from shardfs.storage.writers.files import ObjectPlace


class Change(NamedTuple):
    """What is to become of a file: `head` in place of as many of its first bytes, `unit` of them at a time, and `tail`
    behind all others, which is never nothing."""

    head: bytes
    tail: Plan
    unit: int

    def entries(self, head: bytes) -> Iterator[tuple[int, bytes]]:
        """Those that differ from a head, and where they lie."""
        for at in range(0, len(head), self.unit):
            entry = self.head[at : at + self.unit]
            if entry != head[at : at + self.unit]:
                yield at, entry


def change_of(plan: Plan, old: LocalBlob, unit: int) -> Change | None:
    """A plan as a change of a file where it lies; None if it must be replaced.

    So must one with several names: who has made the others, as backups do, means to keep what it was.
    """
    size = old.stat().size
    head, tail = plan[0], plan[1:]
    if not unit or not isinstance(head, bytes) or len(head) % unit or not 0 < len(head) <= size:
        return None
    if len(head) < size:
        if not tail or tail[0] != ByteRange(len(head), size):
            return None
        del tail[0]
    if os.fstat(old.fd).st_nlink != 1:
        return None
    # A file that becomes longer is another version for everybody, also where the clock that tells times is coarse.
    return Change(head, tail or [bytes(unit)], unit)


def changed(
    place: ObjectPlace, old: LocalBlob, change: Change, begun: Callable[[Begun], None], check: Callable[[Blob], None]
) -> Stat | None:
    """Change it; what it is then. None if somebody else changed it meanwhile, or put another one in its place."""
    base, end = identity(old), old.stat().size + size_of(change.tail)
    fd = _opened(place)
    if fd is None:
        return None
    try:
        head = os.pread(fd, len(change.head), 0)
        if not base == identity_in(os.fstat(fd)) == identity_at(place.name, place.at):
            return None
        try:
            grown = _append(fd, old, change, check)
            begun(Begun(place.key, base, head=len(head)))
            if not _is_ours(place, fd, grown, head, end):
                return None
            for at, entry in change.entries(head):
                syscalls.pwrite_all(fd, entry, at)
        except BaseException:
            _cut_off(fd, old, head, end)
            raise
        _make_newer(fd, max(grown.st_mtime_ns, old.stat().mtime_ns))
        syscalls.fsync(fd)
        info = os.fstat(fd)
        return stat_of(info) if identity_in(info) == identity_at(place.name, place.at) else None
    finally:
        os.close(fd)


def _opened(place: ObjectPlace) -> int | None:
    """None if there is no file of this name any more."""
    try:
        return syscalls.open(place.name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, at=place.at)
    except OSError as e:
        if e.errno not in (errno.ENOENT, errno.ELOOP, errno.EISDIR):
            raise
        return None


def _append(fd: int, old: LocalBlob, change: Change, check: Callable[[Blob], None]) -> os.stat_result:
    """What the file is when the tail is checked and on the disk."""
    fill(fd, old, change.tail, old.stat().size)
    check(HeadedBlob(change.head, LocalBlob(os.dup(fd), os.fstat(fd), nothing)))
    syscalls.fsync(fd)
    return os.fstat(fd)


def _is_ours(place: ObjectPlace, fd: int, grown: os.stat_result, head: bytes, end: int) -> bool:
    """Whether nobody else has changed the file since it was looked at, nor put another one in its place."""
    now = identity_at(place.name, place.at)
    return grown.st_size == end and identity_in(grown) == now and os.pread(fd, len(head), 0) == head


def _cut_off(fd: int, old: LocalBlob, head: bytes, end: int) -> None:
    """Make the file what it was, if no entry leads to what was appended yet, and nobody else has been there."""
    with suppress(OSError):
        size, info = old.stat().size, os.fstat(fd)
        if size < info.st_size <= end and os.pread(fd, len(head), 0) == head:
            syscalls.ftruncate(fd, size)
            syscalls.utime(fd, info.st_atime_ns, old.stat().mtime_ns)


def _make_newer(fd: int, mtime_ns: int) -> None:
    """tensorstore tells versions by their times, and many kernels give the same time to all within milliseconds."""
    info = os.fstat(fd)
    if info.st_mtime_ns <= mtime_ns:
        syscalls.utime(fd, info.st_atime_ns, mtime_ns + 1)


def made_last(place: ObjectPlace, note: Begun) -> None:
    """See to it that the head is on the disk as it is seen now.

    It may be in the page cache alone, and taken to be clean: after an fsync that has failed. So it is written again.
    """
    fd = _opened(place)
    if fd is None:
        return
    try:
        info = os.fstat(fd)
        if info.st_ino == note.base[0]:
            syscalls.pwrite_all(fd, os.pread(fd, note.head, 0), 0)
            syscalls.utime(fd, info.st_atime_ns, info.st_mtime_ns)
            syscalls.fsync(fd)
    finally:
        os.close(fd)
