"""Change files and directories of a local source directly, each with one or two system calls."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from shardfs.model.blobs import ByteRange
from shardfs.storage import descriptors, syscalls
from shardfs.storage.cache import nothing
from shardfs.storage.local import LocalBlob
from shardfs.storage.regular_files import reopened
from shardfs.storage.writers.files import DIRECTORY
from shardfs.storage.writers.names import temporary_name
from shardfs.storage.writers.replace import name_new, written

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from shardfs.storage.local import LocalStore
    from shardfs.storage.writers.files import ObjectPlace, SourceDirectories


class LocalDirectory:
    """Changes files and directories below the root of `store`. Thread-safe. Keys are paths in the store.

    All methods raise OSError, also for a path outside the source. None of them makes a change durable but
    `sync_directory`.

    Args:
        directories: opens the directories of `store`.
    """

    def __init__(self, store: LocalStore, directories: SourceDirectories) -> None:
        self._store = store
        self._directories = directories

    def _place(self, key: str) -> AbstractContextManager[ObjectPlace]:
        return self._directories.changing(self._directories.locate(key))

    def delete(self, key: str) -> None:
        """Remove a file."""
        with self._place(key) as place:
            syscalls.unlink(place.name, place.at)

    def make_directory(self, key: str, mode: int | None = None) -> None:
        """Create a directory. `mode` None applies the umask."""
        with self._place(key) as place:
            syscalls.mkdir(place.name, at=place.at)
        if mode is not None:
            self.set_mode(key, mode)

    def remove_directory(self, key: str) -> None:
        """Remove an empty directory."""
        with self._place(key) as place:
            syscalls.rmdir(place.name, place.at)

    def rename(self, old: str, new: str) -> None:
        """Rename a file, or a directory with its contents; a file `new` is replaced.

        Raise PermissionError for a symbolic link.
        """
        with self._place(old) as a, self._place(new) as b:
            if stat.S_ISLNK(os.stat(a.name, dir_fd=a.at, follow_symlinks=False).st_mode):
                why = "is a symbolic link, which may lead elsewhere from another directory; rename it in the source"
                raise PermissionError(errno.EPERM, why, old)
            syscalls.rename(a.name, b.name, a.at, b.at)

    def require_own_name(self, key: str) -> None:
        """Raise OSError (EROFS) if `key` is below a symbolic link to a directory, so that its file has another name."""
        directory = key.rpartition("/")[0]
        with suppress(FileNotFoundError), self.named(directory) as fd:
            if (real := os.readlink(f"/proc/self/fd/{fd}")) != self._store.path(directory):
                why = f"a symbolic link leads to {real}, so the file has another name; remove or rename it there"
                raise OSError(errno.EROFS, why, key)

    def sync_directory(self, key: str) -> None:
        """Flush a directory: names created, renamed or removed in it survive a power failure after the return."""
        with self._store.open_descriptor(key, DIRECTORY) as at:
            syscalls.fsync_directory(at)

    def open_file(self, key: str, flags: int, mode: int = 0o666) -> int:
        """Return a descriptor, as `os.open` does, but with exactly this `mode` whatever the umask is.

        The caller closes it. Raise PermissionError for a device, a pipe or a socket.
        """
        create = flags & os.O_CREAT
        if not (create and flags & os.O_EXCL):
            try:
                return self._open_existing(key, flags & ~os.O_CREAT)
            except FileNotFoundError:
                if not create:
                    raise
        with self._place(key) as place:  # a dangling link counts as existing
            fd = syscalls.open(place.name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode, place.at)
        # The caller has already applied its umask to `mode`, so undo the effect of this process's umask.
        if stat.S_IMODE(os.fstat(fd).st_mode) != mode:
            syscalls.chmod(fd, mode)
        return fd

    def _open_existing(self, key: str, flags: int) -> int:
        with self.named(key) as fd:
            return reopened(fd, flags & ~os.O_NOFOLLOW, key)

    def named(self, key: str) -> AbstractContextManager[int]:
        """Open a file or directory with O_PATH (open(2)) for a block.

        Its descriptor is for `fstat`, or for its path in /proc/self/fd.
        """
        return self._store.open_descriptor(key, os.O_PATH)

    def stat(self, key: str) -> os.stat_result:
        """Return the attributes of a file or directory; of a symbolic link, those of what it leads to."""
        with self.named(key) as fd:
            return os.fstat(fd)

    def set_mode(self, key: str, mode: int) -> None:
        """Set the permission bits of a file or directory."""
        with self.named(key) as fd:
            syscalls.chmod(f"/proc/self/fd/{fd}", mode)

    def set_times(self, key: str, mtime_ns: int) -> None:
        """Set the access and modification times of a file or directory, in nanoseconds since 1970."""
        with self.named(key) as fd:
            syscalls.utime(f"/proc/self/fd/{fd}", mtime_ns, mtime_ns)
        self._store.reopen(key)

    def copy(self, fd: int, key: str) -> None:
        """Create a file with the bytes, mode, times and extended attributes of the open file `fd`, which stays open.

        The file is on disk before it has its name. Raise FileExistsError if `key` exists.
        """
        info, temp = os.fstat(fd), temporary_name()
        old = LocalBlob(descriptors.dup(fd), info, nothing)
        with self._place(key) as place:
            new = written(place, temp, old, [ByteRange(0, info.st_size)])
            try:
                syscalls.utime(new, info.st_atime_ns, info.st_mtime_ns)
                name_new(place, temp)
            except BaseException:
                with suppress(OSError):
                    syscalls.unlink(temp, place.at)
                raise
            finally:
                os.close(new)
