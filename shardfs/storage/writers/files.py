"""Local files for writers: their directories, temporary files, versions, and copying data into them."""

from __future__ import annotations

import errno
import os
import stat
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from shardfs.model.blobs import ByteRange, FilePart
from shardfs.model.errors import NOT_FOUND
from shardfs.model.kinds import is_in
from shardfs.model.write_plan import piece_size
from shardfs.storage import descriptors, syscalls
from shardfs.storage.cache import nothing
from shardfs.storage.local import LocalBlob
from shardfs.storage.regular_files import open_regular, reopened
from shardfs.storage.writers.names import is_temporary, require_inside

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardfs.model.blobs import Plan
    from shardfs.storage.local import LocalStore

MAX_JOINED = 1 << 20
"""Bytes. Pieces in memory are joined up to about this size before they are written."""

WRITEBACK = 8 << 20
"""Bytes after which the kernel begins to write them to the disk, so that the final fsync waits for less."""

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
"""Flags to open a directory."""


class ObjectPlace(NamedTuple):
    """The name of an object in an open directory; `at` is the directory's descriptor."""

    key: str
    at: int
    name: str


class SourceDirectories:
    """Opens and creates the directories of `store`, and makes their names durable. All methods raise OSError.

    Thread-safe.
    """

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
        """Open the directory that contains an object, which need not exist; `make` creates the directory.

        The caller closes `at`, mostly with `changing`. Raise PermissionError for a key that is no path inside the
        source.
        """
        require_inside(key)
        if key:
            parent, _, name = key.rpartition("/")
            return ObjectPlace(key, self._open_directory(parent, make=make), name)
        parent, name = os.path.split(self._store.path(key))
        return ObjectPlace(key, descriptors.open(parent, DIRECTORY), name)

    def has_path(self, place: ObjectPlace) -> bool:
        """Return whether an opened directory still has its path. Another program may have removed or replaced it."""
        directory = place.key.rpartition("/")[0]
        if not place.key:
            return True  # the source is a file
        with suppress(*NOT_FOUND), self._store.open_descriptor(directory, DIRECTORY) as at:
            if os.path.samestat(os.fstat(at), os.fstat(place.at)):
                return True
        for name in list(self._durable):  # a copy: other threads add names meanwhile
            if name and is_in(name, directory):
                self._durable.discard(name)
        return False

    @contextmanager
    def changing(self, place: ObjectPlace) -> Iterator[ObjectPlace]:
        """Yield the place; afterwards close it, and have the store open the new version of its object."""
        try:
            yield place
        finally:
            self._store.reopen(place.key)
            os.close(place.at)

    def _open_directory(self, key: str, *, make: bool = False) -> int:
        try:
            return self._store.descriptor(key, DIRECTORY)
        except FileNotFoundError:
            if not make or not key:
                raise
        parent, _, name = key.rpartition("/")
        above = self._open_directory(parent, make=True)
        try:
            with suppress(FileExistsError):
                syscalls.mkdir(name, at=above)
            syscalls.fsync_directory(above)
        finally:
            os.close(above)
        return self._store.descriptor(key, DIRECTORY)

    def make_durable(self, key: str) -> None:
        """Fsync the parents of a directory once, so that its name is on disk. Nothing if symbolic links are followed.

        The process that created the directory may have been killed, or may have got an error, before its fsync.
        """
        if key not in self._durable and not self._store.follow_symlinks:
            above, _, _ = key.rpartition("/")
            self.make_durable(above)
            with self._store.open_descriptor(above, DIRECTORY) as at:
                syscalls.fsync_directory(at)
            self._durable.add(key)


def _identity(path: str) -> tuple[int, int] | None:
    """Return the device and inode number of a directory; None if there is none at this path."""
    with suppress(*NOT_FOUND):
        info = os.stat(os.path.join(path, ""))
        return info.st_dev, info.st_ino
    return None


class TemporaryFiles:
    """Removes the temporary files of updates that a crash ended before they began."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
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
        """Remove the temporary files in a directory whose writers have ended; return how many.

        0 if there is no such directory. Call this only after `recover` of every begun update.
        """
        with suppress(FileNotFoundError), self._store.open_descriptor(directory, DIRECTORY) as at:
            return sum(_removed(name, at) for name in descriptors.obtain(lambda: os.listdir(at)) if is_temporary(name))
        return 0


def _removed(name: str, at: int) -> bool:
    """Remove a temporary file, unless its writer still holds its lock; return whether it was removed."""
    try:
        fd = open_regular(name, os.O_RDWR, at=at)
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
    """Open an object that an update will replace.

    Raise OSError if the update must not replace it: it is write-protected, no regular file, or a symbolic link that
    leads out of the source or nowhere, or without `replace_links`.
    """
    try:
        named = descriptors.open(place.name, os.O_PATH | os.O_NOFOLLOW, at=place.at)
    except FileNotFoundError:
        return Old(None, None)
    try:
        # Read the identity of a link before opening the file, because another program may replace the link meanwhile.
        info = os.fstat(named)
        link = identity_in(info) if stat.S_ISLNK(info.st_mode) else None
        if link is None:
            fd = reopened(named, os.O_RDONLY, place.key)
        else:
            fd = _open_linked(store, place, replace_links=replace_links)
    finally:
        os.close(named)
    info = os.fstat(fd)
    blob = LocalBlob(fd, info, nothing)  # closes the file if a check below fails
    # The directory's permissions would allow replacing a write-protected file. An update never changes the target of a
    # link, so the target may be write-protected.
    if link is None and not os.access(f"/proc/self/fd/{fd}", os.W_OK):
        raise PermissionError(errno.EACCES, "is write-protected", place.key)
    return Old(blob, link or identity_in(info), link is not None)


def _open_linked(store: LocalStore, place: ObjectPlace, *, replace_links: bool) -> int:
    if not replace_links:
        why = "is a symbolic link, and -o linked_shards=replace, which puts a file in its place, was not given"
        raise OSError(errno.EROFS, why, place.key)
    try:
        named = descriptors.open(place.name, os.O_PATH, at=place.at)
    except FileNotFoundError:
        why = "is a symbolic link that leads nowhere; fetch its target (git-annex: git annex get), or remove the link"
        raise OSError(errno.EROFS, why, place.key) from None
    try:
        store.confined(named, place.key)
        return reopened(named, os.O_RDONLY, place.key)
    finally:
        os.close(named)


def identity_at(name: str, at: int) -> list[int] | None:
    """Return `identity_in` of the file with this name in the open directory `at`; None if there is none.

    Does not follow links.
    """
    try:
        return identity_in(os.stat(name, dir_fd=at, follow_symlinks=False))
    except FileNotFoundError:
        return None


def identity_in(info: os.stat_result) -> list[int]:
    """Return the identity of a file's version: inode number, size in bytes and modification time in nanoseconds.

    The device number is left out because it may change when the machine restarts.
    """
    return [info.st_ino, info.st_size, info.st_mtime_ns]


def fill(fd: int, old: LocalBlob | None, plan: Plan, position: int = 0) -> None:
    """Write the pieces of a plan in sequence, beginning at `position`; does not fsync.

    Args:
        old: the file whose bytes the plan's `ByteRange`s are. None raises ValueError if the plan has some.

    Raise OSError, also if `old` or a `FilePart` ends early.
    """
    joined, waiting, flushed = list[bytes | memoryview](), 0, position
    shares: dict[int, bool] = {}  # by descriptor: whether the file system may share its bytes
    for piece in plan:
        if joined and (waiting >= MAX_JOINED or isinstance(piece, ByteRange | FilePart)):
            syscalls.pwrite_all(fd, b"".join(joined), position)
            position += waiting
            joined, waiting = [], 0
        if position - flushed >= WRITEBACK:
            syscalls.start_writeback(fd, flushed, position - flushed)
            flushed = position
        if isinstance(piece, ByteRange | FilePart):
            source, size = _descriptor(piece, old), piece_size(piece)
            share = shares.get(source, True)
            shares[source] = syscalls.copy_range(source, fd, piece.start, size, position, share=share)
            position += size
        else:
            joined.append(piece)
            waiting += piece_size(piece)
    syscalls.pwrite_all(fd, b"".join(joined), position)


def _descriptor(piece: ByteRange | FilePart, old: LocalBlob | None) -> int:
    """Return the descriptor of the file that has a piece."""
    if isinstance(piece, FilePart):
        return piece.fd
    if old is None:
        raise ValueError("a new object cannot have bytes of an old one")
    return old.fd
