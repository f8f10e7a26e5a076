"""The lock file `<name>.__lock` of an object, by both protocols of tensorstore's file driver.

- `"os"`: the owner holds an open file description lock on the file. Other writers open the file and wait for that lock.
- `"lockfile"`: the owner is the writer that created the file, with O_EXCL. Nothing else distinguishes the file of a
  living owner from the file of a killed one.

With both protocols the owner writes the new object into the lock file and renames it to the object, or removes it. So
a lock file of another program is neither used nor removed here, even if nobody has locked it.
"""

from __future__ import annotations

import errno
import os
import random
import stat
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from shardfs.model.kinds import LOCK_ENDING
from shardfs.storage import syscalls

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardfs.storage.writers.files import ObjectPlace

OWN_MODE = stat.S_ISVTX | 0o666
"""Mode of new lock files. The sticky bit, which no other writer sets, shows that a killed shardfs left the file."""

PAUSE_S = 0.0005
"""Seconds before the second attempt. The pauses double up to `LONGEST_PAUSE_S`."""

LONGEST_PAUSE_S = 0.02


@contextmanager
def locked(place: ObjectPlace, wait_s: float) -> Iterator[None]:
    """Own the lock file of an object, by both protocols, within a block; it is removed afterwards.

    Raise TimeoutError after `wait_s` seconds if the lock file of another writer is still there; else OSError.
    """
    name = place.name + LOCK_ENDING
    fd = _acquire(place, name, wait_s)
    try:
        yield
    finally:
        with suppress(OSError):  # the next update of this object takes the file over
            syscalls.unlink(name, place.at)
        os.close(fd)


def remove_left(path: str) -> None:
    """Remove a lock file that a killed shardfs has left. A lock file of another program or a running writer stays."""
    fd = _open_own(path, None)
    if fd is not None and _owned(fd, path, None) is not None:
        syscalls.unlink(path)
        os.close(fd)


def _acquire(place: ObjectPlace, name: str, wait_s: float) -> int:
    """Return a descriptor of the lock file, which is locked and was created by shardfs."""
    deadline, pause = time.monotonic() + wait_s, PAUSE_S
    while (fd := _attempt(name, place.at)) is None:
        if time.monotonic() >= deadline:
            lock = place.key + LOCK_ENDING
            why = (
                f"{lock} was there for {wait_s:g} s: another program is writing this file, or was killed while writing"
                f" it. Try again later; if no program writes this file, remove {lock}"
            )
            raise TimeoutError(errno.ETIMEDOUT, why, place.key)
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, LONGEST_PAUSE_S)
    return fd


def _attempt(name: str, at: int) -> int | None:
    """Create and lock the file, or take over the file of a killed shardfs. Return None if another writer owns it."""
    try:
        return _owned(syscalls.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWN_MODE, at), name, at)
    except FileExistsError:
        fd = _open_own(name, at)
    return None if fd is None else _owned(fd, name, at)


def _owned(fd: int, name: str, at: int | None) -> int | None:
    """Lock an open lock file of shardfs and return its descriptor.

    Close the file and return None if another writer owns it.
    """
    try:
        syscalls.lock(fd)
        # Before the lock was acquired, a writer that only locks may have renamed the file to the object.
        info = os.fstat(fd)
        if _is_own(info) and os.path.samestat(info, os.stat(name, dir_fd=at, follow_symlinks=False)):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _open_own(name: str, at: int | None) -> int | None:
    """Open the lock file of this or another shardfs. Return None if there is none."""
    try:
        if _is_own(os.stat(name, dir_fd=at, follow_symlinks=False)):
            return syscalls.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK, at=at)
    except FileNotFoundError:
        pass
    return None


def _is_own(info: os.stat_result) -> bool:
    """Return whether shardfs created the file, and no other program has written to it."""
    return stat.S_ISREG(info.st_mode) and bool(info.st_mode & stat.S_ISVTX) and not info.st_size
