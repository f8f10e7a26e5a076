"""A store of local files, with a cache of open descriptors."""

from __future__ import annotations

import errno
import os
import resource
import stat as stat_module
import threading
from collections import OrderedDict
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from shardfs.model.blobs import ByteRange, ByteRequest, Stat, absolute
from shardfs.model.errors import NOT_FOUND, DanglingLinkError
from shardfs.storage import descriptors
from shardfs.storage.cache import nothing
from shardfs.storage.regular_files import is_directory, reopened, require_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from shardfs.storage.read_ahead import ReadAhead

from shardfs.model.kinds import OWN_PREFIX
from shardfs.storage.store import LARGE, DirEntry, absent_documents

MAX_DESCRIPTORS = 1024

DESCRIPTORS_SHARE = 4
"""The cache of descriptors takes at most `MAX_DESCRIPTORS`, and at most 1/`DESCRIPTORS_SHARE` of the process's limit.

Writing needs the other descriptors. A program that uses shardfs as a library needs them, too.
"""


MAX_DIRECTORIES = 128
"""Directories that `LocalStore.open_once` keeps open. The chunks of a shard are seldom in more."""


class _Descriptor:
    """Closes a descriptor when the last reference to this object is gone.

    `LocalBlob` must not have this `__del__` itself: weak references to a `LocalBlob` still work while its `__del__`
    runs. Another thread could then read from a descriptor that is closed or already reused.
    """

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self.fd)


class LocalBlob:
    """An open file. It keeps reading the opened version even after a rename has replaced the file.

    Args:
        fd: open for reading. The blob owns it, and closes it when nobody refers to the blob any more.
        info: of `fd`; `stat` returns it even if the file grows.
    """

    __slots__ = ("__weakref__", "_owner", "_stat", "_waiting", "fd", "file_offset")

    def __init__(self, fd: int, info: os.stat_result, waiting: Callable[[], None]) -> None:
        self.fd = fd
        self.file_offset = 0
        self._waiting = waiting
        self._owner = _Descriptor(fd)
        self._stat = stat_of(info)

    def stat(self) -> Stat:
        return self._stat

    def read(self, requests: Sequence[ByteRequest]) -> list[bytes]:
        out = []
        for request in requests:
            start, stop = absolute(request, self._stat.size)
            out.append(pread(self.fd, stop - start, start, self._waiting))
        return out


def pread(fd: int, size: int, position: int, waiting: Callable[[], None]) -> bytes:
    """Return `size` bytes at `position` of an open file, fewer at its end. Raise OSError.

    Calls `waiting` first if `size` is at least `LARGE` or the bytes are not in the page cache.
    """
    if size >= LARGE or waiting is nothing:
        waiting()
        whole = os.pread(fd, size, position)
        if len(whole) == size:
            return whole
    data = bytearray(size)
    view = memoryview(data)
    length = 0
    flags = os.RWF_NOWAIT
    while length < size:
        try:
            n = os.preadv(fd, [view[length:]], position + length, flags)
        except OSError as e:
            if not flags or e.errno not in (errno.EAGAIN, errno.EOPNOTSUPP):
                raise
            flags = 0
            waiting()
            continue
        if n == 0:
            break
        length += n
    return bytes(view[:length]) if length < size else bytes(data)


class LocalStore:
    """A local directory or file. Symbolic links that lead out of the source are refused unless `follow_symlinks`.

    Args:
        root: its path; symbolic links in it are resolved.
        read_ahead: what `Store.read_ahead` returns.
    """

    remote = blind = False

    def __init__(
        self,
        root: str,
        waiting: Callable[[], None] = nothing,
        read_ahead: ReadAhead | None = None,
        *,
        follow_symlinks: bool = False,
    ) -> None:
        self.root = os.path.realpath(root)
        self.name = os.path.basename(os.path.abspath(root))
        self._inside = self.root.rstrip("/") + "/"
        self.follow_symlinks = follow_symlinks
        self._waiting = waiting
        self.read_ahead = read_ahead
        self._blobs: OrderedDict[str, LocalBlob] = OrderedDict()
        self._directories: dict[str, _Descriptor] = {}
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        unlimited = soft == resource.RLIM_INFINITY
        self._most_open = MAX_DESCRIPTORS if unlimited else min(MAX_DESCRIPTORS, soft // DESCRIPTORS_SHARE)
        self._reopened = 0  # counts the calls of `reopen` and `reopen_below`
        self._lock = threading.Lock()
        descriptors.register(self)

    def path(self, key: str) -> str:
        """Return the absolute path of a key below the resolved root. A caller that opens it must use `confined`."""
        return self._inside + key if key else self.root

    def confined(self, fd: int, key: str) -> None:
        """Raise PermissionError if the open file is outside the source, unless `follow_symlinks`.

        `key` is for the error.
        """
        # Check the path of the open descriptor, not the name: no link can be swapped between the check and the use.
        if self.follow_symlinks:
            return
        real = os.readlink(f"/proc/self/fd/{fd}")
        if real != self.root and not real.startswith(self._inside):
            why = f"a symbolic link leads out of the source to {real}, and -o symlinks=follow was not given"
            raise PermissionError(errno.EACCES, why, key)

    def descriptor(self, key: str, flags: int) -> int:
        """Open a regular file or directory, or anything with O_PATH; return the descriptor, which the caller closes.

        Raise FileNotFoundError or NotADirectoryError only if it does not exist; IsADirectoryError for a directory
        without O_DIRECTORY; DanglingLinkError if a symbolic link in its path leads nowhere; PermissionError if it is
        outside the source, or if it is a device, a pipe or a socket. Such a file is not opened, because that may have
        effects.
        """
        harmless = flags & (os.O_PATH | os.O_DIRECTORY)
        only = os.O_PATH | flags & os.O_NOFOLLOW
        try:
            fd = descriptors.open(self.path(key), flags if harmless else only)
        except NOT_FOUND:
            self._require_absent(key)
            raise
        try:
            self.confined(fd, key)
            if harmless:
                return fd
            file = reopened(fd, flags & ~os.O_NOFOLLOW, key)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return file

    @contextmanager
    def open_descriptor(self, key: str, flags: int) -> Iterator[int]:
        """Open a file or directory inside the source for a block, and close it afterwards.

        Raise the errors of `descriptor`.
        """
        fd = self.descriptor(key, flags)
        try:
            yield fd
        finally:
            os.close(fd)

    def open(self, key: str) -> LocalBlob:
        blob = self._blobs.get(key)
        if blob is not None:
            with suppress(KeyError):
                self._blobs.move_to_end(key)
            return blob
        before = self._reopened
        blob = self._open(key)
        with self._lock:
            if self._reopened != before:
                return blob  # opened before the `reopen`, so the version may be outdated
            self._blobs[key] = blob
            while len(self._blobs) > self._most_open:
                self._blobs.popitem(last=False)
        return blob

    def _open(self, key: str) -> LocalBlob:
        return self._blob(self.descriptor(key, os.O_RDONLY))

    def _blob(self, fd: int) -> LocalBlob:
        return LocalBlob(fd, os.fstat(fd), self._waiting)

    def open_once(self, key: str) -> LocalBlob:
        """Return a file that the store does not keep open. Its directory stays open, for the next files in it.

        A pipe or a device with this name is opened without waiting and refused unread; a symbolic link as in `open`.
        Only for jobs on sources that do not change: a directory that another one replaces is not noticed. Raise the
        errors of `descriptor`.
        """
        parent, _, name = key.rpartition("/")
        directory = self._directories.get(parent)
        if directory is None:
            directory = _Descriptor(self.descriptor(parent, os.O_RDONLY | os.O_DIRECTORY))
            if len(self._directories) >= MAX_DIRECTORIES:
                self._directories.clear()  # a thread that uses one of them keeps it open
            self._directories[parent] = directory
        # Opening with O_PATH first would nearly double the system calls for each chunk file of a job.
        try:
            fd = descriptors.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, at=directory.fd)
        except OSError as e:
            if e.errno not in (errno.ELOOP, errno.ENXIO):  # a symbolic link, a socket
                raise OSError(e.errno, e.strerror, key) from e
            blob = self.open(key)
            self.reopen(key)
            return blob
        try:
            info = os.fstat(fd)
            require_file(info, key)
        except BaseException:
            os.close(fd)
            raise
        return LocalBlob(fd, info, self._waiting)

    def _require_absent(self, key: str) -> None:
        """Raise DanglingLinkError if there is a dangling symbolic link in the path of a file that cannot be opened."""
        link = key
        while link and not os.path.lexists(self.path(link)):
            link = link.rpartition("/")[0]
        if link and not os.path.exists(self.path(link)):
            why = f"the symbolic link {link} leads nowhere (git-annex: git annex get)"
            raise DanglingLinkError(errno.EIO, why, key)

    def release_descriptors(self) -> None:
        """Close all cached descriptors that no thread uses."""
        with self._lock:
            self._blobs.clear()
            self._directories.clear()

    def reopen(self, key: str) -> None:
        """Drop the cached descriptor of `key`, so that the next `open` sees the current version."""
        with self._lock:
            self._reopened += 1
            self._blobs.pop(key, None)

    def reopen_below(self, key: str) -> None:
        """Drop the cached descriptors of all files below a directory."""
        with self._lock:
            self._reopened += 1
            for path in [k for k in self._blobs if not key or k.startswith(f"{key}/")]:
                self._blobs.pop(path, None)

    def entry(self, key: str) -> DirEntry:
        try:
            fd = self.descriptor(key, os.O_PATH)
        except DanglingLinkError as e:  # stat(2) gives the same error; `open` says that the file is not absent
            raise FileNotFoundError(errno.ENOENT, e.strerror, key) from e
        try:
            info = os.fstat(fd)
        finally:
            os.close(fd)
        return DirEntry(key.rsplit("/", 1)[-1], is_directory(info, key), stat_of(info))

    def scan(self, key: str) -> Iterator[DirEntry]:
        for e in self._entries(key):
            yield self._listed(key, e)

    def names(self, key: str) -> Iterator[tuple[str, bool]]:
        """Yield the names in a directory, and whether each is a directory itself, not a link to one.

        In the order of the disk, without names that begin with `OWN_PREFIX`; none if the directory does not exist.
        """
        for e in self._entries(key):
            yield e.name, e.is_dir(follow_symlinks=False)

    def _entries(self, key: str) -> Iterator[os.DirEntry[str]]:
        try:
            fd = self.descriptor(key, os.O_RDONLY | os.O_DIRECTORY)
        except (*NOT_FOUND, DanglingLinkError):  # the listing above has the link
            return
        try:
            self._waiting()
            with descriptors.obtain(lambda: os.scandir(fd)) as entries:  # duplicates the descriptor
                for e in entries:
                    if not e.name.startswith(OWN_PREFIX):
                        yield e
        finally:
            os.close(fd)

    def _listed(self, parent: str, e: os.DirEntry[str]) -> DirEntry:
        directory = e.is_dir(follow_symlinks=False)
        with suppress(OSError):  # the name is listed without attributes, and opening it raises the error
            if e.is_symlink():
                return self.entry(f"{parent}/{e.name}" if parent else e.name)
            info = e.stat(follow_symlinks=False)
            if directory or stat_module.S_ISREG(info.st_mode):
                return DirEntry(e.name, directory, stat_of(info))
        return DirEntry(e.name, directory, None)

    def documents(self, directory: str, names: Sequence[str], limit: int) -> dict[str, bytes]:
        out = {}
        for name in names:
            key = f"{directory}/{name}" if directory else name
            with absent_documents(name, key):
                out[name] = self._open(key).read([ByteRange(0, limit + 1)])[0]
        return out

    def require_ranges(self, keys: Iterable[str]) -> None:
        pass

    def statvfs(self) -> os.statvfs_result:
        return os.statvfs(self.root)


def stat_of(info: os.stat_result) -> Stat:
    """Convert the result of `os.stat` to a `Stat`. The version consists of device, inode number, time and size."""
    return Stat(info.st_size, info.st_mtime_ns, (info.st_dev, info.st_ino, info.st_mtime_ns, info.st_size))
