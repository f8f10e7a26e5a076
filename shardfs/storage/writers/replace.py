"""Replace local files atomically: write a new file beside the old one, exchange the two, and verify the outcome.

At every moment the name leads to the old or the new file, complete and on disk. (`in_place` may instead change an
existing file step by step.)

The lock file (`lock_file`) excludes cooperating writers. The exchange reveals writers that do not take this lock,
because it yields their version instead of the expected one. Their version is then put back, and the update starts again
from it.
"""

from __future__ import annotations

import errno
import logging
import os
import stat as stat_module
from contextlib import suppress
from typing import TYPE_CHECKING

from shardfs.storage import descriptors, syscalls
from shardfs.storage.cache import nothing
from shardfs.storage.local import LocalBlob
from shardfs.storage.writers import in_place
from shardfs.storage.writers.files import fill, identity_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.model.blobs import Blob, Plan, Stat
    from shardfs.model.changes import Begun
    from shardfs.storage.writers.files import ObjectPlace

log = logging.getLogger("shardfs")

_NO_SUCH_RENAME = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
"""Errors of file systems that support rename, but not RENAME_EXCHANGE or RENAME_NOREPLACE."""


def written(
    place: ObjectPlace,
    temp: str,
    old: LocalBlob | None,
    plan: Plan,
    *,
    verify: Callable[[Blob], None] = lambda _: None,
    alike: bool = True,
) -> int:
    """Write a complete temporary file `temp` beside the object, on disk, and return its descriptor.

    The caller closes it.

    Args:
        old: the file that the plan refers to; None if there is none.
        verify: called with the new version; its errors are raised.
        alike: copy owner, mode and extended attributes of `old`. Otherwise the umask and the directory determine them.

    Raise OSError. After an error there is no temporary file.
    """
    alike = alike and old is not None
    fd = syscalls.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600 if alike else 0o666, place.at)
    try:
        with suppress(OSError):
            syscalls.lock(fd)  # keeps `sweep` from removing the file
        fill(fd, old, plan)
        if alike and old is not None:
            _copy_attributes(fd, old.fd)
        verify(LocalBlob(descriptors.dup(fd), os.fstat(fd), nothing))
        syscalls.fsync(fd)
    except BaseException:
        with suppress(OSError):
            syscalls.unlink(temp, place.at)
        os.close(fd)
        raise
    return fd


def _copy_attributes(fd: int, old: int) -> None:
    """Copy owner, mode and extended attributes (including access control lists) as far as permissions allow."""
    info, mine = os.fstat(old), os.fstat(fd)
    for user, group in ((info.st_uid, -1), (-1, info.st_gid)):
        if (user, group) not in ((mine.st_uid, -1), (-1, mine.st_gid)):
            with suppress(PermissionError):
                syscalls.chown(fd, user, group)
    syscalls.chmod(fd, stat_module.S_IMODE(info.st_mode))
    try:
        names = os.listxattr(old)
    except OSError:
        return
    for name in names:
        try:
            syscalls.setxattr(fd, name, os.getxattr(old, name))
        except OSError as e:
            if e.errno not in (errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENODATA):
                raise


def synced(place: ObjectPlace, old: LocalBlob | None) -> Stat | None:
    """Fsync an unchanged object and its directory, and return its `Stat`; None if there is none.

    An earlier update or removal may have failed or crashed before its own fsync.
    """
    if old is not None:
        syscalls.fsync(old.fd)
    syscalls.fsync_directory(place.at)
    return None if old is None else old.stat()


def switch(place: ObjectPlace, note: Begun) -> bool:
    """Exchange the versions durably; return whether the new one is in place. If not, another writer was faster.

    After False, the object is the other writer's version, and the temporary file is removed. Raise OSError.
    """
    try:
        if note.base is None:
            syscalls.rename_new(note.temp, place.name, place.at, place.at)
        elif note.temp_ino:
            syscalls.exchange(note.temp, place.name, place.at, place.at)
        else:
            syscalls.rename_new(place.name, note.temp, place.at, place.at)
    except (FileExistsError, FileNotFoundError):
        return finish_or_undo(place, note)
    except OSError as e:
        if e.errno not in _NO_SUCH_RENAME:
            raise
        return _switched_by_comparing(place, note)
    if note.base is not None:
        return finish_or_undo(place, note)
    syscalls.fsync_directory(place.at)
    return True


def name_new(place: ObjectPlace, temp: str) -> None:
    """Rename a temporary file to its final name, which is not durable then.

    Raise FileExistsError if the name exists.
    """
    try:
        syscalls.rename_new(temp, place.name, place.at, place.at)
    except OSError as e:
        if e.errno not in _NO_SUCH_RENAME:
            raise
        if identity_at(place.name, place.at) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), place.key) from None
        syscalls.rename(temp, place.name, place.at, place.at)


def _switched_by_comparing(place: ObjectPlace, note: Begun) -> bool:
    """Switch on a file system without RENAME_EXCHANGE: compare versions, then rename or unlink.

    Another writer's change between these two calls is lost.
    """
    if identity_at(place.name, place.at) != note.base:
        return finish_or_undo(place, note)
    if note.temp_ino:
        syscalls.rename(note.temp, place.name, place.at, place.at)
    else:
        syscalls.unlink(place.name, place.at)
    syscalls.fsync_directory(place.at)
    return True


def finish_or_undo(place: ObjectPlace, note: Begun) -> bool:
    """Clean up the temporary name; return whether it held the old version, so that the new version is in place.

    The temporary name may also hold the new version (the exchange did not happen or was undone), or a version of
    another writer, which is put back under its own name. Of a change in place, only the head is made durable; returns
    False.
    """
    if note.head:
        in_place.made_last(place, note)
        return False
    temp = identity_at(note.temp, place.at)
    if temp is None:
        return False
    if temp[0] == note.temp_ino:
        syscalls.unlink(note.temp, place.at)
        return False
    if temp == note.base:
        syscalls.fsync_directory(place.at)  # first, so that the new version is on disk before the old one is removed
        with suppress(FileNotFoundError):  # a writer that has just started removes temporary files without a lock
            syscalls.unlink(note.temp, place.at)
        return True
    _put_back(place, note)
    return False


def _put_back(place: ObjectPlace, note: Begun) -> None:
    name = identity_at(place.name, place.at)
    if name is None:
        with suppress(FileExistsError):
            syscalls.rename_new(note.temp, place.name, place.at, place.at)
    elif name[0] == note.temp_ino:
        syscalls.exchange(note.temp, place.name, place.at, place.at)
        temp = identity_at(note.temp, place.at)
        if temp is not None and temp[0] == note.temp_ino:
            syscalls.unlink(note.temp, place.at)
        elif temp is not None:  # a third version, which is newer
            syscalls.exchange(note.temp, place.name, place.at, place.at)
    syscalls.fsync_directory(place.at)
    if identity_at(note.temp, place.at) is not None:
        why = "two other writers replaced it at the same time; look whether the newer version has all changes"
        log.error("%s: %s. The earlier version is in %s", place.key, why, note.temp)
