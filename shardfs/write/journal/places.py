"""Where journals lie, whether a directory may hold one, and who works on it."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shardfs.model.errors import BusyError
from shardfs.storage import syscalls
from shardfs.storage.mount_table import entries

if TYPE_CHECKING:
    from collections.abc import Sequence

from shardfs.storage.source_locks import LOCK, SOURCE_LOCK, _about_us, busy, canonical, read_owner

log = logging.getLogger("shardfs")

TRIES = 10
"""How often a journal's directory is made and locked if another process removes it meanwhile."""

LOST = "lost+scratch"

DISCARDED = "discarded-"

KEPT_S = 7 * 24 * 3600
"""How long what is not needed any more is kept, for people."""

FORGETFUL = frozenset({"tmpfs", "ramfs", "devtmpfs"})
"""File systems that a power failure empties."""

FAR = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4",
        "ocfs2", "orangefs", "pvfs2", "smb2", "smb3", "smbfs", "virtiofs",
    }
)  # fmt: skip
"""File systems on which what fdatasync and locks promise is up to another host, or to another program, like FUSE."""


def source_id(source: str) -> bytes:
    """16 bytes."""
    return hashlib.blake2b(os.fsencode(canonical(source)), digest_size=16).digest()


def state_directory() -> Path:
    """Where journals lie unless something else is said."""
    told = os.environ.get("XDG_STATE_HOME", "")
    return Path(told if os.path.isabs(told) else os.path.expanduser("~/.local/state"), "shardfs")


def directory_for(source: str, base: str | Path | None = None) -> Path:
    """The journal's directory, below `base` instead of `state_directory()` if it is given. Need not exist."""
    return (state_directory() if base is None else Path(base)) / source_id(source).hex()


def prepare(directory: Path, source: str, mountpoint: str) -> list[str]:
    """Make the directory if there is none. What should be known of its place is returned.

    Raise OSError if it is no place for a journal: of another user, open to others, a symbolic link, on a network or
    FUSE file system, or inside the source or the mount.
    """
    _no_links(directory)
    here = os.path.realpath(directory)
    for name, other in (("source", source and canonical(source)), ("mount", mountpoint)):
        if other and "://" not in other and Path(here).is_relative_to(os.path.realpath(other)):
            raise OSError(errno.EINVAL, f"the journal cannot lie inside the {name}", str(directory))
    for path in (directory.parent, directory):
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            syscalls.mkdir(str(path), 0o700)
            syscalls.fsync_directory(str(path.parent))
    own_directory(directory)
    return _of_file_system(here)


def take(directory: Path, source: str, mountpoint: str) -> tuple[list[str], list[Lock]]:
    """`prepare` the directory and lock it. What should be known of its place, and the lock, are returned.

    Raise BusyError if another process has the journal, and as `prepare`.
    """
    left = TRIES
    while True:
        try:
            return prepare(directory, source, mountpoint), [Lock.take(str(directory / LOCK), mountpoint, source)]
        except FileNotFoundError:  # the last owner of the journal has just removed the directory
            left -= 1
            if not left:
                raise


def own_directory(directory: Path) -> None:
    """Raise OSError unless it is the user's own, closed to others, and not reached by a symbolic link."""
    _no_links(directory)
    info = directory.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))
    if info.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"the journal belongs to user {info.st_uid}", str(directory))
    if info.st_mode & 0o077:
        why = f"the journal is open to others (mode {info.st_mode & 0o777:o}, expected 700)"
        raise PermissionError(errno.EPERM, why, str(directory))


def _no_links(directory: Path) -> None:
    for path in (directory.parent, directory):
        if path.is_symlink():
            raise OSError(errno.ELOOP, "a journal must not be reached by a symbolic link", str(path))


def _of_file_system(path: str) -> list[str]:
    kind = file_system(path)
    if kind in FAR or kind.partition(".")[0] in ("fuse", "fuseblk"):
        raise OSError(errno.EOPNOTSUPP, f"a journal must lie on a local disk, not on {kind}", path)
    if kind in FORGETFUL:
        return [f"the journal {path} lies on {kind}: what is not published yet does not survive a power failure"]
    return []


def file_system(path: str) -> str:
    """The type of the file system on which an existing path without links lies, as mountinfo calls it."""
    above = {path, *map(str, Path(path).parents)}
    found = ""
    best = -1
    for entry in entries():
        if entry.mountpoint in above and len(entry.mountpoint) >= best:
            found, best = entry.type, len(entry.mountpoint)
    return found


def remove(directory: Path, segments: Sequence[str]) -> None:
    """Remove a journal of these segments, whose lock we hold; leave it if something was put aside in its directory."""
    with suppress(OSError):
        syscalls.rmdir(str(directory / LOST))
    with suppress(OSError):
        if set(os.listdir(directory)) == {LOCK, *segments}:
            syscalls.fsync_directory(
                str(directory)
            )  # or after a power failure older segments may be there without these
            for name in (*segments, LOCK):
                syscalls.unlink(str(directory / name))
            syscalls.rmdir(str(directory))  # fails if another process has just made another lock there


def purge(directory: Path) -> None:
    """Remove what has been put aside, a week ago or more."""
    for path in [*directory.iterdir(), *(directory / LOST).glob("*")]:
        aside = path.suffix in (".torn", ".damaged") or path.parent.name == LOST or path.name.startswith(DISCARDED)
        with suppress(OSError):
            if aside and path.lstat().st_mtime < time.time() - KEPT_S:
                for below in path.iterdir() if path.is_dir() else ():
                    syscalls.unlink(str(below))
                (syscalls.rmdir if path.is_dir() else syscalls.unlink)(str(path))


class Lock:
    """A lock file that says who has it. The kernel frees it when its owner ends, however that happens."""

    def __init__(self, path: str, fd: int, mountpoint: str, source: str, *, fleeting: bool) -> None:
        self.mountpoint, self.source = mountpoint, source
        self._path, self._fd, self._fleeting = path, fd, fleeting

    @classmethod
    def take(cls, path: str, mountpoint: str, source: str = "", *, fleeting: bool = False, mode: int = 0o600) -> Lock:
        """Raise BusyError if another process has it. A fleeting one leaves no file behind."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        while True:
            fd = syscalls.open(path, flags, mode)
            try:
                syscalls.lock(fd)
                if is_at(fd, path):  # else its last owner has removed the name after we had opened it
                    syscalls.ftruncate(fd, 0)
                    syscalls.pwrite_all(fd, json.dumps(_about_us(mountpoint, source)).encode(), 0)
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
        """Whether another process that wants the lock would find it taken: false if the file was removed."""
        return is_at(self._fd, self._path)

    def free(self) -> None:
        """Somebody else may have it."""
        if self._fleeting:
            with suppress(OSError):
                syscalls.unlink(self._path)
        syscalls.close(self._fd)


def is_at(fd: int, path: str) -> bool:
    """Whether an open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except OSError:
        return False


def lock_source(source: str, mountpoint: str) -> list[Lock]:
    """Lock a local source against writers on other hosts; no lock if it is remote, a file, or not ours to write to."""
    root = canonical(source)
    if not os.path.isdir(root):
        return []
    try:
        return [Lock.take(os.path.join(root, SOURCE_LOCK), mountpoint, source, fleeting=True, mode=0o644)]
    except PermissionError:
        log.warning("%s cannot be locked against writers on other hosts", root)
    except OSError as e:
        if isinstance(e, BusyError) or e.errno != errno.EROFS:
            raise
    return []


def is_locked(path: str) -> bool:
    """Whether somebody else has the lock at `path`. Nothing is changed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return syscalls.is_locked(fd)
    finally:
        os.close(fd)
