"""Change local files in place: append new data, then overwrite the changed entries of the beginning one by one.

Appended data is on disk before an entry refers to it, and entries are the only old bytes that are overwritten. After a
crash, each entry is therefore old or new, and either refers to complete data. Data without an entry is unused space.

No atomic exchange reveals a concurrent writer. Instead, the file's identity is checked before each step and at the end.
"""

from __future__ import annotations

import os
import stat as stat_module
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from shardfs.model.blobs import ByteRange
from shardfs.model.changes import Begun
from shardfs.model.write_plan import size_of
from shardfs.storage import descriptors, syscalls
from shardfs.storage.cache import nothing
from shardfs.storage.local import LocalBlob, stat_of
from shardfs.storage.regular_files import open_regular
from shardfs.storage.writers.files import fill, identity_at, identity_in
from shardfs.storage.writers.planned_blob import PlannedBlob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardfs.model.blobs import Blob, Plan, Stat
    from shardfs.storage.writers.files import ObjectPlace


class Growth(NamedTuple):
    """A change of a file in place.

    Attributes:
        head: replaces the file's first `len(head)` bytes.
        tail: is appended; never empty.
        unit: bytes of one entry of `head`, which is written at once.
    """

    head: bytes
    tail: Plan
    unit: int

    def entries(self, head: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the position and bytes of each entry that differs from the old `head`."""
        for at in range(0, len(head), self.unit):
            entry = self.head[at : at + self.unit]
            if entry != head[at : at + self.unit]:
                yield at, entry


def growth_of(plan: Plan, old: LocalBlob, unit: int) -> Growth | None:
    """Return a plan as a change in place; None if the file must be replaced. See `Change.in_place` for `unit`.

    A file with several hard links is replaced: backup programs make hard links to keep the old content.
    """
    size = old.stat().size
    head, tail = plan[0], plan[1:]
    if not isinstance(head, bytes) or len(head) % unit or not 0 < len(head) <= size:
        return None
    if len(head) < size:
        if not tail or tail[0] != ByteRange(len(head), size):
            return None
        del tail[0]
    if os.fstat(old.fd).st_nlink != 1:
        return None
    # The tail is never empty: a larger size marks a new version even if the clock is too coarse to change the time.
    return Growth(head, tail or [bytes(unit)], unit)


def changed(
    place: ObjectPlace,
    old: LocalBlob,
    growth: Growth,
    verify: Callable[[Blob], None],
    on_switch: Callable[[Begun], None],
) -> Stat | None:
    """Change the file durably and return its new `Stat`; None if another writer changed or replaced the file meanwhile.

    Args:
        old: the version that `growth` belongs to.
        verify: called with the new version after `tail` is appended, before `head` is written.
        on_switch: called right before `head` is written. Errors of both are raised; the file is as before then.

    Raise OSError. If `head` was not begun, the appended bytes are cut off again.
    """
    base = [os.fstat(old.fd).st_ino, old.stat().size, old.stat().mtime_ns]
    end = old.stat().size + size_of(growth.tail)
    fd = _opened(place)
    if fd is None:
        return None
    try:
        head = os.pread(fd, len(growth.head), 0)
        if not base == identity_in(os.fstat(fd)) == identity_at(place.name, place.at):
            return None
        try:
            grown = _append(fd, old, growth, verify)
            on_switch(Begun(place.key, base, head=len(head)))
            is_current = grown.st_size == end and identity_in(grown) == identity_at(place.name, place.at)
            if not is_current or os.pread(fd, len(head), 0) != head:
                return None  # the file was changed since it has grown, or has lost its name
            for at, entry in growth.entries(head):
                syscalls.pwrite_all(fd, entry, at)
        except BaseException:
            _cut_off(fd, old, head, end)
            raise
        # tensorstore distinguishes versions by time, but many kernels give all changes within a few milliseconds the
        # same time. So the new time must be later than the earlier ones.
        info, mtime_ns = os.fstat(fd), max(grown.st_mtime_ns, old.stat().mtime_ns)
        if info.st_mtime_ns <= mtime_ns:
            syscalls.utime(fd, info.st_atime_ns, mtime_ns + 1)
        syscalls.fsync(fd)
        info = os.fstat(fd)
        return stat_of(info) if identity_in(info) == identity_at(place.name, place.at) else None
    finally:
        os.close(fd)


def _opened(place: ObjectPlace) -> int | None:
    """Open the file for reading and writing; return None if no regular file has this name any more."""
    with suppress(FileNotFoundError):
        if stat_module.S_ISREG(os.stat(place.name, dir_fd=place.at, follow_symlinks=False).st_mode):
            return open_regular(place.name, os.O_RDWR, at=place.at)
    return None


def _append(fd: int, old: LocalBlob, growth: Growth, verify: Callable[[Blob], None]) -> os.stat_result:
    """Append, check and fsync the tail; return the file's attributes afterwards."""
    fill(fd, old, growth.tail, old.stat().size)
    grown = LocalBlob(descriptors.dup(fd), os.fstat(fd), nothing)
    new = PlannedBlob([growth.head, ByteRange(len(growth.head), grown.stat().size)], grown)
    new.fd = grown.fd  # valid after the head only, where all chunks are
    verify(new)
    syscalls.fsync(fd)
    return os.fstat(fd)


def _cut_off(fd: int, old: LocalBlob, head: bytes, end: int) -> None:
    """Truncate the appended data, unless an entry was written or another writer changed the file."""
    with suppress(OSError):
        size, info = old.stat().size, os.fstat(fd)
        if size < info.st_size <= end and os.pread(fd, len(head), 0) == head:
            syscalls.ftruncate(fd, size)
            syscalls.utime(fd, info.st_atime_ns, old.stat().mtime_ns)


def made_last(place: ObjectPlace, note: Begun) -> None:
    """Rewrite and fsync the head that the file has now; nothing if another file has its name.

    After a failed fsync, the page cache may hold the head as clean although the disk does not. Writing it again makes
    the next fsync effective.
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
