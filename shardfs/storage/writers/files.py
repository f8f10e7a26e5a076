"""Local files for writers: their places, the identities of their versions, and copying data into them."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from shardfs.model.blobs import ByteRange, FilePart
from shardfs.model.write_plan import piece_size
from shardfs.storage import syscalls
from shardfs.storage.cache import nothing
from shardfs.storage.local import LocalBlob

if TYPE_CHECKING:
    from shardfs.model.blobs import Plan
    from shardfs.storage.local import LocalStore
    from shardfs.storage.writers.directories import ObjectPlace

MAX_JOINED = 1 << 20
"""Bytes. Pieces in memory are joined up to about this size before they are written."""


class Old(NamedTuple):
    """The object that an update replaces.

    Args:
        blob: None if there is no object.
        base: the version that is replaced, see `Begun`.
        linked: the name is a symbolic link to the object. The update replaces the link.
    """

    blob: LocalBlob | None
    base: list[int] | None
    linked: bool = False


def open_old(store: LocalStore, place: ObjectPlace, *, replace_links: bool = False) -> Old:
    """Open an object that an update will replace. Raise OSError if the update must not replace it."""
    flags, link = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, None
    try:
        fd = os.open(place.name, flags | os.O_NOFOLLOW, dir_fd=place.at)
    except FileNotFoundError:
        return Old(None, None)
    except OSError as e:
        if e.errno != errno.ELOOP:
            raise
        # Read the identity of the link before opening the file, because another program may replace the link meanwhile.
        link = identity_at(place.name, place.at)
        fd = _open_linked(store, place, flags, replace_links)
    info = os.fstat(fd)
    blob = LocalBlob(fd, info, nothing)
    if stat.S_ISDIR(info.st_mode):
        raise IsADirectoryError(errno.EISDIR, "is a directory", place.key)
    if not stat.S_ISREG(info.st_mode):
        raise PermissionError(errno.EACCES, "is neither a file nor a directory", place.key)
    # The directory's permissions would allow replacing a write-protected file. An update never changes the target of a
    # link, so the target may be write-protected.
    if link is None and not os.access(f"/proc/self/fd/{fd}", os.W_OK):
        raise PermissionError(errno.EACCES, "is write-protected", place.key)
    return Old(blob, link or identity(blob), link is not None)


def _open_linked(store: LocalStore, place: ObjectPlace, flags: int, replace_links: bool) -> int:
    if not replace_links:
        why = "is a symbolic link, and -o linked_shards=replace, which puts a file in its place, was not given"
        raise OSError(errno.EROFS, why, place.key)
    try:
        fd = os.open(place.name, flags, dir_fd=place.at)
    except FileNotFoundError:
        raise OSError(errno.EROFS, "is a symbolic link that leads nowhere", place.key) from None
    try:
        store.confined(fd, place.key)
    except BaseException:
        os.close(fd)
        raise
    return fd


def identity(blob: LocalBlob | None) -> list[int] | None:
    """Return the identity of a file's version: inode number, size and modification time.

    The device number is left out because it may change when the machine restarts.
    """
    if blob is None:
        return None
    info = os.fstat(blob.fd)
    return [info.st_ino, blob.stat().size, blob.stat().mtime_ns]


def identity_at(name: str, at: int) -> list[int] | None:
    """Return the `identity` of the file with this name in directory `at`; None if there is none.

    Does not follow links.
    """
    try:
        return identity_in(os.stat(name, dir_fd=at, follow_symlinks=False))
    except FileNotFoundError:
        return None


def identity_in(info: os.stat_result) -> list[int]:
    """Return the `identity` from the result of `os.stat`."""
    return [info.st_ino, info.st_size, info.st_mtime_ns]


def fill(fd: int, old: LocalBlob | None, plan: Plan, position: int = 0) -> None:
    """Write the pieces of a plan in sequence, beginning at `position`."""
    joined, waiting = list[bytes | memoryview](), 0
    for piece in plan:
        if isinstance(piece, ByteRange | FilePart) or waiting >= MAX_JOINED:
            syscalls.pwrite_all(fd, b"".join(joined), position - waiting)
            joined, waiting = [], 0
        if isinstance(piece, FilePart):
            syscalls.copy_range(piece.fd, fd, piece.start, piece.size, position)
        elif isinstance(piece, ByteRange):
            if old is None:
                raise ValueError("a new object cannot have bytes of an old one")
            syscalls.copy_range(old.fd, fd, piece.start, piece_size(piece), position)
        else:
            joined.append(piece)
            waiting += piece_size(piece)
        position += piece_size(piece)
    syscalls.pwrite_all(fd, b"".join(joined), position - waiting)
