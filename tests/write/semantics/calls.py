"""The system calls that cases make: those of `os` on a mount, or the same of a tree in this process."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

from shardfs.vfs.inodes import ROOT

if TYPE_CHECKING:
    from types import ModuleType

    from shardfs.model.attributes import Attributes
    from shardfs.write.tree import WriteTree


Calls: TypeAlias = "InProcess | ModuleType"
"""`os` in a process whose working directory is the mount, or the same functions of a tree in this process."""


def renameat2(old: str, new: str, flags: int) -> None:
    """On a mount, with flags such as `RENAME_NOREPLACE`, which is 1."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(-100, os.fsencode(old), -100, os.fsencode(new), flags):
        raise _failed(ctypes.get_errno(), new)


@dataclass
class _Open:
    number: int
    handle: int
    flags: int
    offset: int = 0


def _failed(number: int, path: object) -> OSError:
    return OSError(number, os.strerror(number), str(path))


class InProcess:
    """What the kernel makes of them, for a tree: no more than cases need. Paths are relative to its root."""

    def __init__(self, tree: WriteTree, *, forgets: bool = False) -> None:
        self.tree = tree
        self.forgets = forgets  # files that are closed, as a kernel that is short of memory
        self._open: dict[int, _Open] = {}
        self._descriptors = count(3)

    def _at(self, path: str) -> tuple[int, bytes]:
        """The directory of a name, and the name."""
        *above, name = path.split("/")
        number = ROOT
        for part in above:
            entry = self.tree.lookup(number, os.fsencode(part))
            if not entry.directory:
                raise _failed(errno.ENOTDIR, path)
            number = entry.number
        return number, os.fsencode(name)

    def _find(self, path: str) -> Attributes:
        return self.tree.lookup(*self._at(path)) if path else self.tree.attributes(ROOT)

    def _exists(self, path: str) -> bool:
        try:
            self._find(path)
        except FileNotFoundError:
            return False
        return True

    def open(self, path: str, flags: int, mode: int = 0o644) -> int:
        """As the kernel, which looks for the name anew if the file has gone; more than once, since threads may be held
        up between the two calls for longer here."""
        for _ in range(9):
            try:
                return self._open_once(path, flags, mode)
            except OSError as e:
                if e.errno != errno.ESTALE:
                    raise
        return self._open_once(path, flags, mode)

    def _open_once(self, path: str, flags: int, mode: int) -> int:
        parent, name = self._at(path)
        try:
            entry = self.tree.lookup(parent, name)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
            entry, handle = self.tree.create(parent, name, flags, mode)
        else:
            if flags & os.O_CREAT and flags & os.O_EXCL:
                raise _failed(errno.EEXIST, path)
            if entry.directory:
                raise _failed(errno.EISDIR, path)
            handle = self.tree.open(entry.number, flags)
        self.tree.remember(entry.number)
        fd = next(self._descriptors)
        self._open[fd] = _Open(entry.number, handle, flags)
        return fd

    def close(self, fd: int) -> None:
        opened = self._open.pop(fd)
        try:
            self.tree.flush(opened.handle)
        finally:
            self.tree.release(opened.handle)
            if self.forgets:
                self.tree.forget(opened.number, 1)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        if self._open[fd].flags & os.O_ACCMODE == os.O_WRONLY:
            raise _failed(errno.EBADF, fd)
        return bytes(self.tree.read(self._open[fd].number, offset, size))

    def _writing(self, fd: int) -> _Open:
        if self._open[fd].flags & os.O_ACCMODE == os.O_RDONLY:
            raise _failed(errno.EBADF, fd)
        return self._open[fd]

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        return self.tree.write(self._writing(fd).handle, offset, data)

    def write(self, fd: int, data: bytes) -> int:
        opened = self._writing(fd)
        if opened.flags & os.O_APPEND:
            opened.offset = self.tree.attributes(opened.number).size
        nbytes = self.pwrite(fd, data, opened.offset)
        opened.offset += nbytes
        return nbytes

    def ftruncate(self, fd: int, size: int) -> None:
        if self._open[fd].flags & os.O_ACCMODE == os.O_RDONLY:
            raise _failed(errno.EINVAL, fd)
        self.tree.truncate(self._open[fd].number, size, self._open[fd].handle)

    def truncate(self, path: str, size: int) -> None:
        attributes = self._find(path)
        if attributes.directory:
            raise _failed(errno.EISDIR, path)
        self.tree.truncate(attributes.number, size, None)

    def fsync(self, fd: int) -> None:
        self.tree.fsync(self._open[fd].handle)

    def _told(self, attributes: Attributes, links: int = 1) -> os.stat_result:
        kind = stat.S_IFDIR if attributes.directory else stat.S_IFREG
        mode = kind | (attributes.mode & 0o7777 or (0o755 if attributes.directory else 0o644))
        seconds = attributes.mtime_ns / 1e9
        plain = (mode, attributes.number, 0, links, os.getuid(), os.getgid(), attributes.size, 0, seconds, seconds)
        return os.stat_result(plain, {"st_mtime_ns": attributes.mtime_ns})

    def lstat(self, path: str) -> os.stat_result:
        return self._told(self._find(path))

    def fstat(self, fd: int) -> os.stat_result:
        number = self._open[fd].number
        return self._told(self.tree.attributes(number), links=0 if self.tree.is_unlinked(number) else 1)

    def listdir(self, path: str) -> list[str]:
        attributes = self._find(path)
        if not attributes.directory:
            raise _failed(errno.ENOTDIR, path)
        return [os.fsdecode(name) for batch in self.tree.scan(attributes.number) for name in batch.names.tolist()]

    def rename(self, old: str, new: str, *, noreplace: bool = False) -> None:
        self.tree.rename(*self._at(old), *self._at(new), noreplace=noreplace)

    def link(self, old: str, new: str) -> None:
        if self._find(old).directory:
            raise _failed(errno.EPERM, old)
        self.tree.link(self._find(old).number, *self._at(new))

    def unlink(self, path: str) -> None:
        self.tree.unlink(*self._at(path))

    def mkdir(self, path: str, mode: int = 0o755) -> None:
        with suppress(FileNotFoundError):
            self.tree.lookup(*self._at(path))
            raise _failed(errno.EEXIST, path)
        self.tree.mkdir(*self._at(path), mode)

    def rmdir(self, path: str) -> None:
        self.tree.rmdir(*self._at(path))

    def chmod(self, path: str, mode: int) -> None:
        self.tree.set_mode(self._find(path).number, mode)

    def utime(self, path: str, *, ns: tuple[int, int]) -> None:
        self.tree.set_times(self._find(path).number, ns[1])

    def getxattr(self, path: str, name: str) -> bytes:
        attributes = self.tree.xattrs(self._find(path).number)
        if name not in attributes:
            raise _failed(errno.ENODATA, path)
        return attributes[name]

    def setxattr(self, path: str, name: str, value: bytes) -> None:
        self.tree.set_xattr(self._find(path).number, name, value)
