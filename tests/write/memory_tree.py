"""A writable tree in memory, complete and plain: what `shardfs.fuse.write_requests` is tested with.

It knows nothing of shards. Everything is done under one lock, in the way POSIX has it.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from shardfs.model.attributes import Attributes
from shardfs.model.file_tree import KernelHooks
from shardfs.model.listing import Batch
from shardfs.vfs.inodes import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardfs.model.listing import EntryRow

LARGEST = 1 << 30
BATCH = 4096
ACCEPTED_XATTR = "user.shardfs.flush"


@dataclass
class Inode:
    number: int
    directory: bool
    mode: int
    mtime_ns: int = field(default_factory=time.time_ns)
    data: bytearray = field(default_factory=bytearray)
    names: dict[bytes, tuple[Inode, int]] = field(default_factory=dict)  # with their cookies
    cookies: Iterator[int] = field(default_factory=lambda: count(1))
    linked: bool = True
    opened: int = 0
    known: int = 0
    xattrs: dict[str, bytes] = field(default_factory=dict)

    def attributes(self) -> Attributes:
        mode = self.mode | (stat.S_IFDIR if self.directory else stat.S_IFREG)
        return Attributes(self.number, self.directory, len(self.data), self.mtime_ns, None, mode)


def error(number: int, name: bytes = b"") -> OSError:
    return OSError(number, os.strerror(number), os.fsdecode(name))


class MemoryTree:
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._numbers, self._handle_numbers = count(ROOT + 1), count(1)
        self._inodes = {ROOT: Inode(ROOT, True, 0o755)}
        self._handles: dict[int, tuple[Inode, int]] = {}
        self.flushes: list[bytes] = []
        self.hooks = KernelHooks()
        self.note = None

    # ---- looking

    def _inode(self, number: int) -> Inode:
        found = self._inodes.get(number)
        if found is None:
            raise error(errno.ESTALE)
        return found

    def _directory(self, number: int) -> Inode:
        found = self._inode(number)
        if not found.directory:
            raise error(errno.ENOTDIR)
        return found

    def _child(self, parent: int, name: bytes) -> Inode:
        found = self._directory(parent).names.get(name)
        if found is None:
            raise error(errno.ENOENT, name)
        return found[0]

    def lookup(self, parent: int, name: bytes) -> Attributes:
        with self._lock:
            return self._child(parent, name).attributes()

    def chunk_number(self, parent: int, name: bytes) -> int | None:
        """This tree has no chunks."""
        return None

    def is_chunk(self, number: int) -> bool:
        """This tree has no chunks."""
        return False

    def attributes(self, number: int) -> Attributes:
        with self._lock:
            return self._inode(number).attributes()

    def is_unlinked(self, number: int) -> bool:
        with self._lock:
            found = self._inodes.get(number)
            return found is not None and not found.linked and not found.directory

    def read(self, number: int, offset: int, size: int) -> bytes | memoryview:
        with self._lock:
            return bytes(memoryview(self._inode(number).data)[offset : offset + size])

    def remember(self, number: int) -> None:
        with self._lock:
            self._inode(number).known += 1

    def forget(self, number: int, count: int) -> None:
        with self._lock:
            found = self._inode(number)
            found.known -= count
            self._drop(found)

    def _drop(self, inode: Inode) -> None:
        if not (inode.linked or inode.opened or inode.known > 0):
            self._inodes.pop(inode.number, None)

    def xattrs(self, number: int) -> dict[str, bytes]:
        return {"user.shardfs.state": b"clean", **self._inode(number).xattrs}

    def usage(self, number: int) -> dict[str, bytes]:
        return {}

    def statvfs(self) -> os.statvfs_result:
        return os.statvfs_result((4096, 4096, 1 << 28, 1 << 28, 1 << 28, 1 << 20, 1 << 20, 1 << 20, 0, 255))

    def shown_path(self, number: int) -> str:
        return str(number)

    def small_listing(self, number: int, most: int) -> list[EntryRow] | None:
        return None

    def scan(self, number: int, cookie: int = 0) -> Iterator[Batch]:
        with self._lock:
            found = [(name, inode, at) for name, (inode, at) in self._directory(number).names.items() if at > cookie]
        return self._batches(sorted(found, key=lambda entry: entry[2]))

    def _batches(self, entries: list[tuple[bytes, Inode, int]]) -> Iterator[Batch]:
        for start in range(0, len(entries), BATCH):
            part = entries[start : start + BATCH]
            told = [inode.attributes() for _, inode, _ in part]
            yield Batch(
                np.array([name for name, _, _ in part], "S"),
                np.array([a.number for a in told], np.uint64),
                np.array([a.directory for a in told], np.bool_),
                np.array([a.size if stat.S_IMODE(a.mode) == _usual(a) else -1 for a in told], np.int64),
                np.array([a.mtime_ns for a in told], np.int64),
                np.array([cookie for _, _, cookie in part], np.uint64),
            )

    # ---- names

    def _add(self, parent: Inode, name: bytes, inode: Inode) -> None:
        if not parent.linked:
            raise error(errno.ENOENT, name)
        parent.names[name] = inode, next(parent.cookies)
        parent.mtime_ns = time.time_ns()
        self._inodes[inode.number] = inode

    def _remove(self, parent: Inode, name: bytes) -> None:
        inode, _ = parent.names.pop(name)
        parent.mtime_ns = time.time_ns()
        inode.linked = False
        self._drop(inode)

    def mkdir(self, parent: int, name: bytes, mode: int) -> Attributes:
        with self._lock:
            around = self._directory(parent)
            if name in around.names:
                raise error(errno.EEXIST, name)
            made = Inode(next(self._numbers), True, mode)
            self._add(around, name, made)
            return made.attributes()

    def unlink(self, parent: int, name: bytes) -> None:
        with self._lock:
            if self._child(parent, name).directory:
                raise error(errno.EISDIR, name)
            self._remove(self._inode(parent), name)

    def rmdir(self, parent: int, name: bytes) -> None:
        with self._lock:
            found = self._child(parent, name)
            if not found.directory:
                raise error(errno.ENOTDIR, name)
            if found.names:
                raise error(errno.ENOTEMPTY, name)
            self._remove(self._inode(parent), name)

    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, noreplace: bool) -> None:
        with self._lock:
            moved, target = self._child(parent, name), self._directory(new_parent).names.get(new_name)
            if target is not None:
                if noreplace:
                    raise error(errno.EEXIST, new_name)
                if target[0] is moved:
                    return
                self._check_replaceable(moved, target[0], new_name)
                self._remove(self._inode(new_parent), new_name)
            self._add(self._inode(new_parent), new_name, moved)
            del self._inode(parent).names[name]
            self._inode(parent).mtime_ns = time.time_ns()

    def _check_replaceable(self, moved: Inode, target: Inode, name: bytes) -> None:
        if target.directory and not moved.directory:
            raise error(errno.EISDIR, name)
        if moved.directory and not target.directory:
            raise error(errno.ENOTDIR, name)
        if target.names:
            raise error(errno.ENOTEMPTY, name)

    def link(self, number: int, new_parent: int, new_name: bytes) -> Attributes:
        with self._lock:
            source, around = self._inode(number), self._directory(new_parent)
            if source.directory:
                raise error(errno.EPERM, new_name)
            if not source.linked:
                raise error(errno.ENOENT, new_name)
            if new_name in around.names:
                raise error(errno.EEXIST, new_name)
            data = bytearray(source.data)
            made = Inode(next(self._numbers), False, source.mode, source.mtime_ns, data)
            self._add(around, new_name, made)
            return made.attributes()

    def sync_directory(self, number: int) -> None:
        self._directory(number)

    # ---- files

    def create(self, parent: int, name: bytes, flags: int, mode: int) -> tuple[Attributes, int]:
        with self._lock:
            around = self._directory(parent)
            found = around.names.get(name)
            if found is None:
                inode = Inode(next(self._numbers), False, mode)
                self._add(around, name, inode)
            elif flags & os.O_EXCL:
                raise error(errno.EEXIST, name)
            else:
                inode = found[0]
            handle = self.open(inode.number, flags)
            return inode.attributes(), handle

    def open(self, number: int, flags: int) -> int:
        with self._lock:
            inode = self._inode(number)
            if inode.directory:
                raise error(errno.EISDIR)
            if flags & os.O_TRUNC:
                inode.data.clear()
                inode.mtime_ns = time.time_ns()
            inode.opened += 1
            handle = next(self._handle_numbers)
            self._handles[handle] = inode, flags
            return handle

    def write(self, handle: int, offset: int, data: memoryview) -> int:
        with self._lock:
            inode, flags = self._handles[handle]
            if flags & os.O_ACCMODE == os.O_RDONLY:
                raise error(errno.EBADF)
            if offset + len(data) > LARGEST:
                raise error(errno.EFBIG)
            if offset > len(inode.data):
                inode.data.extend(bytes(offset - len(inode.data)))
            inode.data[offset : offset + len(data)] = data
            inode.mtime_ns = time.time_ns()
            return len(data)

    def flush(self, handle: int) -> None:
        self._handles[handle]

    def fsync(self, handle: int) -> None:
        self._handles[handle]

    def release(self, handle: int) -> None:
        with self._lock:
            inode, _ = self._handles.pop(handle)
            inode.opened -= 1
            self._drop(inode)

    def truncate(self, number: int, size: int, handle: int | None) -> None:
        with self._lock:
            inode = self._inode(number)
            if inode.directory:
                raise error(errno.EISDIR)
            if size > LARGEST:
                raise error(errno.EFBIG)
            del inode.data[size:]
            inode.data.extend(bytes(size - len(inode.data)))
            inode.mtime_ns = time.time_ns()

    def allocate(self, handle: int, offset: int, size: int, mode: int) -> None:
        with self._lock:
            data, keeps = self._handles[handle][0].data, mode & 1
            if not keeps:
                data.extend(bytes(offset + size - len(data)))
            if mode & ~1:
                data[offset : offset + size] = bytes(len(data[offset : offset + size]))

    def set_mode(self, number: int, mode: int) -> None:
        with self._lock:
            self._inode(number).mode = mode

    def set_times(self, number: int, mtime_ns: int | None) -> None:
        with self._lock:
            self._inode(number).mtime_ns = time.time_ns() if mtime_ns is None else mtime_ns

    def set_xattr(self, number: int, name: str, value: bytes, flags: int) -> None:
        if name == ACCEPTED_XATTR:
            self.flushes.append(value)
            return
        with self._lock:
            known = self._inode(number).xattrs
            if flags & os.XATTR_CREATE and name in known:
                raise error(errno.EEXIST)
            if flags & os.XATTR_REPLACE and name not in known:
                raise error(errno.ENODATA)
            known[name] = value

    def remove_xattr(self, number: int, name: str) -> None:
        with self._lock:
            if self._inode(number).xattrs.pop(name, None) is None:
                raise error(errno.ENODATA)


def _usual(a: Attributes) -> int:
    return 0o755 if a.directory else 0o644
