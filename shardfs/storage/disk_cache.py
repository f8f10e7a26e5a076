"""Bytes that were fetched from remote stores, on the local disk, for later mounts.

One file holds one entry: a header with a checksum, then the bytes. A file appears by a rename, so a process that is
killed leaves no half entry. After a power failure, the checksum finds one. Several processes share a directory without
locks. The modification time of a file is the time of its last use, give or take `TOUCH_S`.

Nothing here is pickled or executed, and no failure of the disk reaches a reader: an unreadable entry is a miss.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import random
import stat
import struct
import threading
import time
import weakref
from collections import Counter, deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import google_crc32c

from shardfs.model.errors import message
from shardfs.model.own_places import require_own_place
from shardfs.storage import descriptors, syscalls
from shardfs.storage.regular_files import read_all, require_file

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

FOLDER = "entries-1"
"""Directory of the entries in the cache directory. Another layout of entries gets another number."""

NAME_BYTES = TAG_BYTES = 16
"""Length of an entry's name, and of the tag that says which version of the object it has."""

_HEADER = struct.Struct(f"<8sI{TAG_BYTES}s")  # magic, checksum of name, tag and bytes, tag
_MAGIC = b"shardfs\1"

SLOW_S = 0.002
"""After a look-up that took longer, the next one counts as waiting for the disk."""

TOUCH_S = 600.0
"""Seconds after which another use of an entry is recorded."""

MAX_PENDING = 64 << 20
"""Bytes that may wait to be written. Beyond that, bytes are not cached: a slow disk must not fill the memory.

So no entry is larger, either.
"""

SHARE = 16
"""A part of `1/SHARE` of the limit is evicted at once, and written before the directory is looked through again."""

RESERVE, RESERVE_SHARE = 1 << 30, 20
"""Bytes that stay free on the disk, or a 20th of a smaller disk."""

PAUSE_S = 60.0
"""Seconds without writing after a write has failed."""

IDLE_S = 10.0
"""Seconds after which the writing thread ends if it has nothing to do."""

LAST_FLUSH_S = 2.0
"""Seconds that the end of a program waits for the disk."""

BIN_NS = 1 << 34
"""Entries whose last uses differ by less than these 17 s count as equally old."""


class CacheUsage(NamedTuple):
    """What a cache directory contains.

    Attributes:
        entries: the number of files, also of those that killed processes have left.
        nbytes: the bytes that they occupy on the disk.
        oldest_ns: when the entry that was not used for the longest time was used, in nanoseconds since 1970, give or
            take `TOUCH_S`; now if there is none.
    """

    entries: int
    nbytes: int
    oldest_ns: int


class _Pending(NamedTuple):
    name: bytes
    tag: bytes
    data: bytes


def cache_directory(path: str) -> str:
    """Return the path of a cache directory, which need not exist. For `auto`, that is the service's or the user's.

    Raise FileNotFoundError for `auto` if there is no home directory.
    """
    if path != "auto":
        return path
    if service := os.environ.get("CACHE_DIRECTORY"):  # systemd.exec(5); may name several directories
        return service.split(":")[0]
    home = os.environ.get("XDG_CACHE_HOME", "")
    home = home if os.path.isabs(home) else os.path.expanduser("~/.cache")
    if not os.path.isabs(home):
        raise FileNotFoundError(errno.ENOENT, "there is no home directory; give cache_dir a path", home)
    return os.path.join(home, "shardfs")


class DiskCache:
    """The entries in one directory, at most `limit` bytes. Thread-safe.

    Names and tags of entries have `NAME_BYTES` and `TAG_BYTES`. Raise OSError if the directory cannot be created or
    used, or if other users could read or forge entries.

    Attributes:
        slow: whether the last `get` waited for the disk, so that the next one probably waits, too.
    """

    def __init__(self, directory: str, limit: int) -> None:
        self.directory = directory
        self.limit = limit
        self._root = _opened(directory)
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._pending: deque[_Pending] = deque()
        self._pending_bytes = self._room = 0
        self._writing = self._warned = self.slow = False
        self._resume = 0.0
        atexit.register(_flush_at_exit, weakref.ref(self))

    def __del__(self) -> None:
        with suppress(OSError, AttributeError):
            os.close(self._root)

    # ---- reading ----

    def get(self, name: bytes) -> tuple[bytes, bytes] | None:
        """Return the tag and the bytes of an entry; None if there is none, or it cannot be read.

        A damaged entry is removed.
        """
        start = time.monotonic()
        try:
            return self._read(name)
        finally:
            self.slow = time.monotonic() - start > SLOW_S

    def _read(self, name: bytes) -> tuple[bytes, bytes] | None:
        path = _path(name)
        try:
            # One call instead of `open_regular`: no other user can make a device in this directory.
            fd = descriptors.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, at=self._root)
        except FileNotFoundError:
            return None
        except OSError as e:
            self._failed(e)
            return None
        header = data = b""
        try:
            info = os.fstat(fd)
            require_file(info, path)
            header, data = os.pread(fd, _HEADER.size, 0), read_all(fd, MAX_PENDING, _HEADER.size)
            if abs(time.time() - info.st_mtime) > TOUCH_S:
                with suppress(OSError):
                    syscalls.utime(fd, time.time_ns(), time.time_ns())
        except OSError as e:
            self._failed(e)
        except ValueError as e:
            log.warning("the cache %s: %s %s; it is removed", self.directory, path, e)
        finally:
            os.close(fd)
        if len(header) == _HEADER.size:
            magic, checksum, tag = _HEADER.unpack(header)
            if magic == _MAGIC and checksum == _checksum(name, tag, data):
                return tag, data
        with suppress(OSError):
            syscalls.unlink(path, at=self._root)
        return None

    # ---- writing ----

    def put(self, name: bytes, tag: bytes, data: bytes) -> None:
        """Keep bytes, replacing the entry of this name.

        Another thread writes them later, so `get` may not find them yet. Nothing is kept, and nothing raised, if too
        many bytes wait, after a write has failed, for more than `1/SHARE` of the limit, or in a child process after a
        fork.
        """
        nbytes = _on_disk(len(data))
        if nbytes > self.limit // SHARE or os.getpid() != self._pid:
            return
        with self._changed:
            if self._pending_bytes + nbytes > MAX_PENDING or time.monotonic() < self._resume:
                return
            if not self._writing:
                # A daemon thread: the end of a program waits in `flush`, and no longer than that.
                try:
                    threading.Thread(target=self._work, name="shardfs-cache", daemon=True).start()
                except RuntimeError:  # no more threads, or the program ends
                    return
                self._writing = True
            self._pending.append(_Pending(name, tag, data))
            self._pending_bytes += nbytes
            self._changed.notify_all()

    def flush(self, seconds: float) -> None:
        """Wait until all bytes are written or given up, for at most so many seconds. Raises nothing after that time."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending_bytes, seconds)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._pending, IDLE_S):
                    self._writing = False
                    return
                entry = self._pending.popleft()
            try:
                self._store(entry)
            except OSError as e:
                self._failed(e)
                self._room = 0
                self._resume = time.monotonic() + PAUSE_S
            except Exception:
                log.exception("the cache %s", self.directory)
            with self._changed:
                self._pending_bytes -= _on_disk(len(entry.data))
                self._changed.notify_all()

    def _store(self, entry: _Pending) -> None:
        nbytes = _on_disk(len(entry.data))
        if time.monotonic() < self._resume:
            return
        if nbytes > min(self._room, self._free()):
            self._room = self._make_room()
            if nbytes > self._room:
                self._resume = time.monotonic() + PAUSE_S
                return
        self._room -= nbytes
        path = _path(entry.name)
        new = f"{path}.{random.getrandbits(64):016x}"
        try:
            fd = self._created(new)
            try:
                checksum = _checksum(entry.name, entry.tag, entry.data)
                syscalls.write_all(fd, _HEADER.pack(_MAGIC, checksum, entry.tag))
                syscalls.write_all(fd, entry.data)
            finally:
                syscalls.close(fd)
            with suppress(FileNotFoundError):  # another process has cleared the cache meanwhile
                syscalls.rename(new, path, at=self._root, new_at=self._root)
        except OSError:
            with suppress(OSError):
                syscalls.unlink(new, at=self._root)
            raise

    def _created(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            return syscalls.open(path, flags, at=self._root)
        except FileNotFoundError:
            with suppress(FileExistsError):
                syscalls.mkdir(os.path.dirname(path), 0o700, at=self._root)
            return syscalls.open(path, flags, at=self._root)

    def _failed(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            why = "; what is not in the cache is fetched from the source"
            log.warning("the cache %s: %s%s", self.directory, message(error), why)

    # ---- bounds ----

    def _free(self) -> int:
        """Return the bytes that may still be written to the disk."""
        disk = os.fstatvfs(self._root)
        if not disk.f_blocks:  # the file system does not say
            return self.limit
        return disk.f_bavail * disk.f_frsize - min(RESERVE, disk.f_blocks * disk.f_frsize // RESERVE_SHARE)

    def _make_room(self) -> int:
        """Evict the entries that were used least recently. Return the bytes to write until the next call."""
        ages = Counter[int]()
        for _, info in self._files():
            ages[info.st_mtime_ns // BIN_NS] += info.st_blocks * 512
        total = ages.total()
        limit = min(self.limit, total + self._free())
        excess = total - limit * (SHARE - 1) // SHARE
        evicted, cutoff = 0, 0
        for age in sorted(ages):
            if evicted >= excess:
                break
            evicted += ages[age]
            cutoff = (age + 1) * BIN_NS
        return max(min(limit - total + self._evict(cutoff, excess), limit // SHARE), 0)

    def _evict(self, cutoff_ns: int, nbytes: int) -> int:
        """Remove entries that were not used since a time, until so many bytes are free. Return the bytes removed."""
        removed = 0
        for path, info in self._files() if nbytes > 0 else ():
            if info.st_mtime_ns < cutoff_ns:
                with suppress(OSError):
                    syscalls.unlink(path, at=self._root)
                    removed += info.st_blocks * 512
            if removed >= nbytes:
                break
        return removed

    def _files(self, *, strict: bool = False) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the path and attributes of all entries, and of files that killed processes have left.

        Raise OSError if the directory cannot be read; with `strict`, also for a folder in it.
        """
        with descriptors.obtain(lambda: os.scandir(self._root)) as listing:
            folders = [entry.name for entry in listing if len(entry.name) == 2]
        for folder in folders:
            try:
                fd = descriptors.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, at=self._root)
            except OSError:
                if strict:
                    raise
                continue
            try:
                with descriptors.obtain(partial(os.scandir, fd)) as entries:
                    for entry in entries:
                        with suppress(FileNotFoundError):  # another process removed it
                            yield f"{folder}/{entry.name}", entry.stat(follow_symlinks=False)
            finally:
                os.close(fd)

    # ---- for `shardfs cache` ----

    @staticmethod
    def exists(directory: str) -> bool:
        """Return whether a directory contains a cache."""
        return os.path.isdir(os.path.join(directory, FOLDER))

    def usage(self) -> CacheUsage:
        """Count the entries. Raise OSError if the directory cannot be read."""
        entries, nbytes, oldest = 0, 0, time.time_ns()
        for _, info in self._files(strict=True):
            entries, nbytes, oldest = entries + 1, nbytes + info.st_blocks * 512, min(oldest, info.st_mtime_ns)
        return CacheUsage(entries, nbytes, oldest)

    def clear(self) -> int:
        """Remove all entries; return the bytes on the disk that were freed.

        Mounts that use the cache are not disturbed. Raise OSError if a folder of the cache cannot be read, or an entry
        cannot be removed.
        """
        removed = 0
        for path, info in self._files(strict=True):
            with suppress(FileNotFoundError):
                syscalls.unlink(path, at=self._root)
                removed += info.st_blocks * 512
        return removed


def _flush_at_exit(reference: weakref.ref[DiskCache]) -> None:
    if (cache := reference()) is not None:
        cache.flush(LAST_FLUSH_S)


def _opened(directory: str) -> int:
    """Return a descriptor of the directory of entries, which is created if it is missing."""
    path = os.path.join(directory, FOLDER)
    os.makedirs(directory, 0o700, exist_ok=True)
    require_own_place(directory, "use another cache_dir")
    if not os.path.isdir(path):
        with suppress(FileExistsError):
            syscalls.mkdir(path, 0o700)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    info = os.fstat(fd)
    if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
        os.close(fd)
        why = "must belong to you, and no other user may have access (mode 0700); use another cache_dir"
        raise PermissionError(errno.EACCES, why, path)
    return fd


def _path(name: bytes) -> str:
    text = name.hex()
    return f"{text[:2]}/{text[2:]}"


def _checksum(name: bytes, tag: bytes, data: bytes) -> int:
    """Return the CRC-32C of an entry. It includes the name, so no entry can be mistaken for another one."""
    return int(google_crc32c.extend(google_crc32c.value(name + tag), data))


def _on_disk(nbytes: int) -> int:
    """Return about how many bytes an entry occupies."""
    return (nbytes + _HEADER.size + 4095) // 4096 * 4096
