"""The directories of a local source: opened without leaving the source, created durably, cleared of temporary files."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from shardfs.storage import syscalls
from shardfs.storage.writers.common import is_temporary, require_inside

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardfs.storage.local import LocalStore

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class ObjectPlace(NamedTuple):
    """The name of an object in an open directory; `at` is the directory's descriptor."""

    key: str
    at: int
    name: str


class Directories:
    """Opens and creates the directories of `store`, and makes their names durable."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._source = _identity(store.root)
        self._durable = {""}  # directories whose names, and those of all parents, are on disk

    def require_source(self) -> None:
        """Raise OSError (ESTALE) if the source was moved away or unmounted.

        Its shards still exist elsewhere, and a directory that now has its path is another source.
        """
        if self._source is not None and _identity(self._store.root) != self._source:
            why = "the source was moved, removed or unmounted; bring it back, or unmount and mount again"
            raise OSError(errno.ESTALE, why, self._store.root)

    def locate(self, key: str, *, make: bool = False) -> ObjectPlace:
        """Open the directory that contains an object; `make` creates the directory. The caller closes it."""
        require_inside(key)
        if key:
            parent, _, name = key.rpartition("/")
            return ObjectPlace(key, self._open(parent, make=make), name)
        parent, name = os.path.split(self._store.path(key))
        return ObjectPlace(key, os.open(parent, _FLAGS), name)

    @contextmanager
    def changing(self, place: ObjectPlace) -> Iterator[ObjectPlace]:
        """Close a place after the object has changed. The store then opens the new version."""
        try:
            yield place
        finally:
            self._store.reopen(place.key)
            os.close(place.at)

    @contextmanager
    def opened(self, key: str) -> Iterator[int]:
        """Open a directory, and close it afterwards."""
        at = self._open(key)
        try:
            yield at
        finally:
            os.close(at)

    def _open(self, key: str, *, make: bool = False) -> int:
        try:
            fd = os.open(self._store.path(key), _FLAGS)
        except FileNotFoundError:
            if not make or not key:
                raise
            parent, _, name = key.rpartition("/")
            above = self._open(parent, make=True)
            try:
                with suppress(FileExistsError):
                    syscalls.mkdir(name, at=above)
                syscalls.fsync_directory(above)
                fd = os.open(name, _FLAGS, dir_fd=above)
            finally:
                os.close(above)
        try:
            self._store.confined(fd, key)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def make_durable(self, key: str) -> None:
        """Fsync the parents of a directory once, so that its name is on disk.

        The process that created the directory may have been killed, or may have got an error, before its fsync.
        """
        if key not in self._durable and not self._store.follow_symlinks:
            above, _, _ = key.rpartition("/")
            self.make_durable(above)
            with self.opened(above) as at:
                syscalls.fsync_directory(at)
            self._durable.add(key)


def _identity(path: str) -> tuple[int, int] | None:
    """Return the device and inode number of a directory; None if there is none at this path."""
    with suppress(FileNotFoundError, NotADirectoryError):
        info = os.stat(os.path.join(path, ""))
        return info.st_dev, info.st_ino
    return None


class TemporaryFiles:
    """Removes the temporary files of updates that a crash ended before they began."""

    def __init__(self, directories: Directories) -> None:
        self._directories = directories
        self._swept: set[str] | None = None
        self._sweeping = threading.Lock()

    def allow(self) -> None:
        """Allow `sweep_once`: each begun update was recovered."""
        self._swept = set()

    def sweep_once(self, directory: str) -> None:
        """Sweep a directory that has not been swept, if that is allowed."""
        with self._sweeping:
            if self._swept is not None and directory not in self._swept:
                self._swept.add(directory)
                self.sweep(directory)

    def sweep(self, directory: str) -> int:
        """Remove the temporary files in a directory; return how many.

        Call this only after `recover` of every begun update.
        """
        with suppress(FileNotFoundError), self._directories.opened(directory) as at:
            return sum(_removed(name, at) for name in os.listdir(at) if is_temporary(name))
        return 0


def _removed(name: str, at: int) -> bool:
    """Remove a temporary file, unless its writer still holds its lock; return whether it was removed."""
    try:
        fd = syscalls.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, at=at)
    except OSError:
        return False
    try:
        syscalls.lock(fd)
        syscalls.unlink(name, at)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
