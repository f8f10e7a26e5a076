"""Directories and lock files of journals: checks of a directory, and the lock of the writer."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shardfs.model.own_places import require_own_place
from shardfs.storage import syscalls
from shardfs.storage.mount_table import topmost
from shardfs.storage.regular_files import open_or_create, open_regular
from shardfs.storage.source_locks import LOCK, SOURCE_LOCK, busy, canonical, owner_record, read_owner

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger("shardfs")

TRIES = 10
"""Attempts to create and lock a journal's directory while other processes remove the directory."""

LOST = "lost+scratch"

DISCARDED = "discarded-"

KEPT_S = 7 * 24 * 3600
"""Seconds for which discarded, damaged and parked files are kept, so that a user can inspect them."""

FORGETFUL = frozenset({"tmpfs", "ramfs", "devtmpfs"})
"""File systems in memory: a power failure loses their content."""

FAR = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4",
        "ocfs2", "orangefs", "pvfs2", "smb2", "smb3", "smbfs", "virtiofs",
    }
)  # fmt: skip
"""File systems that no journal may use: another host (or another program) decides whether fdatasync and locks work."""


def prepare(directory: Path, source: str, mountpoint: str, *, create: bool = True) -> list[str]:
    """Create the directory if it is missing, and check it. Return warnings for the user.

    Without `create`, only check whether the directory could be created.

    Raise OSError if the directory cannot hold a journal: it belongs to another user, other users may access it, it is a
    symbolic link, it is on a network or FUSE file system, or it is inside the source or the mount.
    """
    _no_links(directory)
    real = os.path.realpath(directory)
    for name, other in (("source", source and canonical(source)), ("mount", mountpoint)):
        if other and "://" not in other and Path(real).is_relative_to(os.path.realpath(other)):
            why = f"the journal cannot be inside the {name}: use -o journal=DIRECTORY"
            raise OSError(errno.EINVAL, why, str(directory))
    if directory.parent.is_dir():
        require_own_place(str(directory.parent), "use chmod, or -o journal=DIRECTORY")
    if not create and not directory.exists():
        return _of_file_system(os.path.realpath(_require_creatable(directory)))
    for path in (directory.parent, directory):
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            syscalls.mkdir(str(path), 0o700)
            syscalls.fsync_directory(str(path.parent))
    own_directory(directory)
    return _of_file_system(real)


def _require_creatable(directory: Path) -> Path:
    """The nearest directory above that exists. Raise OSError if this user cannot create directories in it."""
    above = next(path for path in directory.parents if path.exists())
    trial = str(above / f"{directory.name}.{os.getpid()}")  # os.access does not know what root may do in /proc or /sys
    syscalls.mkdir(trial, 0o700)
    syscalls.rmdir(trial)
    return above


def rehearse(directory: Path, source: str) -> None:
    """Raise the errors of `take` and of `lock_source`. Locks nothing, and leaves nothing behind."""
    prepare(directory, source, "", create=False)
    root = canonical(source)
    with suppress(PermissionError):
        if os.path.isdir(root) and is_locked(lock := os.path.join(root, SOURCE_LOCK)):
            raise busy(read_owner(lock), source)
    if is_locked(lock := str(directory / LOCK)):
        raise busy(read_owner(lock), source)


def take(directory: Path, source: str, mountpoint: str) -> tuple[list[str], list[Lock]]:
    """Prepare the directory and lock it. Return the warnings of `prepare`, and the lock.

    Raise BusyError if another process holds the lock, and the errors of `prepare`.
    """
    attempts = TRIES
    while True:
        try:
            return prepare(directory, source, mountpoint), [Lock.take(str(directory / LOCK), mountpoint, source)]
        except FileNotFoundError:  # the previous writer has just removed the directory
            attempts -= 1
            if not attempts:
                raise


def own_directory(directory: Path) -> None:
    """Raise OSError unless the directory is this user's own, closed to other users, and no symbolic link."""
    _no_links(directory)
    info = directory.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))
    if info.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"the journal belongs to user {info.st_uid}", str(directory))
    if info.st_mode & 0o077:
        why = f"other users can access the journal (mode {info.st_mode & 0o777:o}, expected 700): use chmod 700"
        raise PermissionError(errno.EPERM, why, str(directory))


def _no_links(directory: Path) -> None:
    for path in (directory.parent, directory):
        if path.is_symlink():
            raise OSError(errno.ELOOP, "a journal must not be behind a symbolic link: give the real path", str(path))


def _of_file_system(path: str) -> list[str]:
    kind = file_system(path)
    if kind in FAR or kind.partition(".")[0] in ("fuse", "fuseblk"):
        raise OSError(errno.EOPNOTSUPP, f"a journal must be on a local disk, not on {kind}: -o journal=DIRECTORY", path)
    if kind in FORGETFUL:
        return [f"the journal {path} is on {kind}: unpublished writes do not survive a power failure"]
    return []


def file_system(path: str) -> str:
    """Return the type of the file system of an existing path, as in mountinfo. The path must have no symbolic links."""
    above = {path, *map(str, Path(path).parents)}
    mounts = [mount for mount in topmost().values() if mount.mountpoint in above]
    return max(mounts, key=lambda mount: len(mount.mountpoint)).type if mounts else ""


def remove(directory: Path, segments: Sequence[str]) -> None:
    """Remove a journal's directory, given its segment files. The caller holds the lock.

    Nothing is removed if the directory has other files (damaged, discarded or parked ones).
    """
    with suppress(OSError):
        syscalls.rmdir(str(directory / LOST))
    with suppress(OSError):
        if set(os.listdir(directory)) == {LOCK, *segments}:
            # Earlier unlinks must be on disk first. Else a power failure could restore older segments without these.
            syscalls.fsync_directory(str(directory))
            for name in (*segments, LOCK):
                syscalls.unlink(str(directory / name))
            syscalls.rmdir(str(directory))  # fails if another process has just created a lock file in it


def purge(directory: Path) -> None:
    """Remove torn, damaged, discarded and parked files that are older than `KEPT_S`."""
    for path in [*directory.iterdir(), *(directory / LOST).glob("*")]:
        aside = path.suffix in (".torn", ".damaged") or path.parent.name == LOST or path.name.startswith(DISCARDED)
        with suppress(OSError):
            info = path.lstat()
            if not aside or info.st_mtime >= time.time() - KEPT_S:
                continue
            if not stat.S_ISDIR(info.st_mode):
                syscalls.unlink(str(path))
                continue
            for below in path.iterdir():
                syscalls.unlink(str(below))
            syscalls.rmdir(str(path))


class Lock:
    """A locked file that names its owner. The kernel releases the lock when the owner's process ends or crashes."""

    def __init__(self, path: str, fd: int, mountpoint: str, source: str, *, fleeting: bool) -> None:
        self.mountpoint = mountpoint
        self.source = source
        self._path = path
        self._fd = fd
        self._fleeting = fleeting

    @classmethod
    def take(
        cls,
        path: str,
        mountpoint: str,
        source: str = "",
        *,
        fleeting: bool = False,
        mode: int = 0o600,
        job: str = "",
    ) -> Lock:
        """Create and lock the file, and write the owner into it. Raise BusyError if another process holds the lock.

        `free` unlinks the file of a `fleeting` lock. `job` says what the owner does, if it is no mount.
        """
        while True:
            fd = open_or_create(path, os.O_RDWR, mode)
            try:
                syscalls.lock(fd)
                if is_at(fd, path):  # else the previous owner unlinked the file after this open
                    syscalls.ftruncate(fd, 0)
                    syscalls.pwrite_all(fd, json.dumps(owner_record(mountpoint, source, job)).encode(), 0)
                    return cls(path, fd, mountpoint, source, fleeting=fleeting)
            except BlockingIOError:
                owner = read_owner(path)
                syscalls.close(fd)
                raise busy(owner) from None
            except BaseException:
                syscalls.close(fd)
                raise
            syscalls.close(fd)

    def is_at_its_path(self) -> bool:
        """Return whether the lock file is still at its path. If it was removed, other processes can take the lock."""
        return is_at(self._fd, self._path)

    def free(self) -> None:
        """Release the lock."""
        if self._fleeting and self.is_at_its_path():
            with suppress(OSError):
                syscalls.unlink(self._path)
        syscalls.close(self._fd)


def is_at(fd: int, path: str) -> bool:
    """Return whether an open file is the file at `path`."""
    try:
        mine, present = os.fstat(fd), os.lstat(path)
    except OSError:
        return False
    return (mine.st_dev, mine.st_ino) == (present.st_dev, present.st_ino)


def lock_source(source: str, mountpoint: str) -> list[Lock]:
    """Lock a local source against writers on other hosts.

    Return no lock if the source is remote, is a file, or cannot be written to by this user. Raise BusyError if another
    writer holds the lock.
    """
    root = canonical(source)
    if not os.path.isdir(root):
        return []
    try:
        return [Lock.take(os.path.join(root, SOURCE_LOCK), mountpoint, source, fleeting=True, mode=0o644)]
    except PermissionError:  # the lock file cannot be created
        log.warning("%s cannot be locked against writers on other hosts: this user may not create files in it", root)
    except OSError as e:
        if e.errno != errno.EROFS:
            raise
    return []


def is_locked(path: str) -> bool:
    """Return whether another process holds the lock at `path`. Nothing is changed."""
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return False
    try:
        return syscalls.is_locked(fd)
    finally:
        os.close(fd)
