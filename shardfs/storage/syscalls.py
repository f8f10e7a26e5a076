"""All calls that change a local disk, in one place, so that tests can count, fail, shorten, delay or record them.

Paths may be relative to an open directory, whose descriptor is `at`. Errors are the system's own OSErrors.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import random
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from shardfs.storage import descriptors

Data: TypeAlias = bytes | bytearray | memoryview
Hook: TypeAlias = Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]

hook: Hook | None = None
"""For tests only: called as `hook(name, function, args)` instead of `function(*args)`; returns the call's result.

The hook may call the function with other arguments, later, twice or not at all. It may also record the arguments,
raise, or end the process. Changing requests to remote stores pass through it, too.
"""

BLOCK = 4096
"""Bytes. Cloned ranges are aligned to this size."""

MIN_CLONE = 64 * 1024
"""Bytes. Smaller ranges are copied: a separate extent costs more than it saves."""

MAX_COPY = 64 * 1024 * 1024
"""Most bytes that one call copies, so that no thread stays in the kernel for long."""


_NO_FOLLOW = {"follow_symlinks": False}
_FICLONERANGE = 0x4020940D
_NOREPLACE, _EXCHANGE = 1, 2
_AT_FDCWD = -100
_SYNC_FILE_RANGE_WRITE = 2
_NOT_HERE = {errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM}
"""Errors of file systems that cannot clone, or not from another file system. The bytes are then copied."""

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`, or what the test hook returns for it.

    `name` is that under which tests know the call.
    """
    if hook is None:
        return function(*args)
    return hook(name, function, args)


def open(path: str, flags: int, mode: int = 0o600, at: int | None = None) -> int:
    """Open a file and return its descriptor, which child processes do not inherit."""
    fd: int = call("open", descriptors.open, path, flags | os.O_CLOEXEC, mode, at)
    return fd


def open_unnamed(directory: str) -> int:
    """Return a descriptor of a new unnamed file on the disk of `directory`.

    The file is gone when the descriptor is closed.
    """
    try:
        return open(directory, os.O_TMPFILE | os.O_RDWR)
    except OSError as e:
        if e.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    name = f"{directory}/{random.getrandbits(64):016x}.spill"
    fd = open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    unlink(name)
    return fd


close: Callable[[int], None] = partial(call, "close", os.close)
"""Close a descriptor. It is closed even if this raises, so never retry."""


def write_all(fd: int, data: Data) -> None:
    """Write all bytes at the descriptor's position."""
    view = memoryview(data).cast("B")
    while view:
        view = view[call("write", os.write, fd, view) :]


def pwrite_all(fd: int, data: Data, offset: int) -> None:
    """Write all bytes at `offset`, without moving the descriptor's position."""
    view = memoryview(data).cast("B")
    while view:
        n = call("pwrite", os.pwrite, fd, view, offset)
        view, offset = view[n:], offset + n


ftruncate: Callable[[int, int], None] = partial(call, "ftruncate", os.ftruncate)
"""Set the file's size: truncate it, or extend it with zeros."""

fallocate: Callable[[int, int, int], None] = partial(call, "fallocate", os.posix_fallocate)
"""Allocate disk space for `[start, start + size)`, extending the file if needed."""


def allocate(fd: int, start: int, size: int, mode: int) -> None:
    """Call fallocate(2) without emulation. Raise OSError (EOPNOTSUPP) if the file system does not support `mode`."""
    call("allocate", _fallocate, fd, start, size, mode)


def _fallocate(fd: int, start: int, size: int, mode: int) -> None:
    function = getattr(_libc, "fallocate64", None) or _libc.fallocate
    while function(fd, mode, ctypes.c_int64(start), ctypes.c_int64(size)):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


fsync: Callable[[int], None] = partial(call, "fsync", os.fsync)
"""Flush a file to disk.

Do not retry: after an error the kernel marks the pages clean, so a second fsync may succeed falsely.
"""

fdatasync: Callable[[int], None] = partial(call, "fdatasync", os.fdatasync)
"""Flush a file's data to disk without its times. Do not retry, as for `fsync`."""


def start_writeback(fd: int, start: int, size: int) -> None:
    """Have the kernel begin to write these bytes to the disk, if the system can do that. Makes nothing durable."""
    if (function := getattr(_libc, "sync_file_range", None)) is not None:
        function(fd, ctypes.c_int64(start), ctypes.c_int64(size), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


def fsync_directory(directory: str | int) -> None:
    """Flush the names in a directory (path or descriptor) to disk."""
    fd = descriptors.open(directory, os.O_RDONLY | os.O_DIRECTORY) if isinstance(directory, str) else directory
    try:
        call("fsync_directory", os.fsync, fd)
    finally:
        if fd != directory:
            os.close(fd)


def rename(old: str, new: str, at: int | None = None, new_at: int | None = None) -> None:
    """Rename a file; an existing `new` is replaced."""
    call("rename", lambda o, n, a, b: os.rename(o, n, src_dir_fd=a, dst_dir_fd=b), old, new, at, new_at)


def rename_new(old: str, new: str, at: int | None = None, new_at: int | None = None) -> None:
    """Rename a file without replacing.

    Raise FileExistsError if `new` exists; EINVAL or ENOSYS if the disk cannot do this.
    """
    call("rename_new", _renameat2, old, new, at, new_at, _NOREPLACE)


def exchange(a: str, b: str, at: int | None = None, b_at: int | None = None) -> None:
    """Exchange two names atomically. Raise EINVAL or ENOSYS if the file system does not support this."""
    call("exchange", _renameat2, a, b, at, b_at, _EXCHANGE)


def _renameat2(old: str, new: str, at: int | None, new_at: int | None, flags: int) -> None:
    function = getattr(_libc, "renameat2", None)
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), old)
    a, b = (_AT_FDCWD if fd is None else fd for fd in (at, new_at))
    if function(a, os.fsencode(old), b, os.fsencode(new), ctypes.c_uint(flags)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), old, None, new)


def link(old: str, new: str, at: int | None = None, new_at: int | None = None) -> None:
    """Make a hard link `new` to `old`. Raise FileExistsError if `new` exists."""
    call("link", lambda o, n, a, b: os.link(o, n, src_dir_fd=a, dst_dir_fd=b, **_NO_FOLLOW), old, new, at, new_at)


def unlink(path: str, at: int | None = None) -> None:
    """Remove a name. Open descriptors of the file stay valid."""
    call("unlink", lambda p, d: os.unlink(p, dir_fd=d), path, at)


def mkdir(path: str, mode: int = 0o777, at: int | None = None) -> None:
    """Create a directory. Raise FileExistsError if the name exists."""
    call("mkdir", lambda p, m, d: os.mkdir(p, m, dir_fd=d), path, mode, at)


def rmdir(path: str, at: int | None = None) -> None:
    """Remove an empty directory. Raise OSError (ENOTEMPTY) if it has entries."""
    call("rmdir", lambda p, d: os.rmdir(p, dir_fd=d), path, at)


chmod: Callable[[str | int, int], None] = partial(call, "chmod", os.chmod)
"""Set the mode of a path or descriptor."""

chown: Callable[[str | int, int, int], None] = partial(call, "chown", os.chown)
"""Change the owner of a path or descriptor; -1 keeps the user or the group."""


def utime(path: str | int, atime_ns: int, mtime_ns: int) -> None:
    """Set the access and modification times of a path or descriptor."""
    call("utime", lambda p, a, m: os.utime(p, ns=(a, m)), path, atime_ns, mtime_ns)


def setxattr(path: str | int, name: str, value: bytes, flags: int = 0) -> None:
    """Set an extended attribute of a path or descriptor. `flags`: `os.XATTR_CREATE` or `os.XATTR_REPLACE`."""
    call("setxattr", os.setxattr, path, name, value, flags)


removexattr: Callable[[str | int, str], None] = partial(call, "removexattr", os.removexattr)
"""Remove an extended attribute of a path or descriptor. Raise OSError (ENODATA) if it does not exist."""


def lock(fd: int, *, exclusive: bool = True, wait: float = 0.0) -> None:
    """Lock a whole file with an open file description lock (fcntl(2), F_OFD_SETLK), exclusive or shared.

    The lock conflicts with other opens of the file, also in this process. It ends when the last descriptor of this open
    is closed. Raise BlockingIOError if the file is still locked after `wait` seconds.
    """
    deadline, pause = time.monotonic() + wait, 0.0005
    while True:
        try:
            call("lock", _ofd_lock, fd, fcntl.F_OFD_SETLK, fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK)
            return
        except (BlockingIOError, PermissionError) as e:  # POSIX allows EAGAIN and EACCES for a conflicting lock
            if time.monotonic() >= deadline:
                raise BlockingIOError(errno.EAGAIN, "another program has locked the file; try again later") from e
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, 0.02)


def unlock(fd: int) -> None:
    """Release the lock that `lock` acquired."""
    call("unlock", _ofd_lock, fd, fcntl.F_OFD_SETLK, fcntl.F_UNLCK)


def is_locked(fd: int) -> bool:
    """Return whether another open of the file holds an exclusive lock.

    Only queries the lock, so that a concurrent `lock` call does not fail because of this check.
    """
    return _ofd_lock(fd, fcntl.F_OFD_GETLK, fcntl.F_RDLCK) != fcntl.F_UNLCK


def _ofd_lock(fd: int, command: int, kind: int) -> int:
    """Call fcntl(2) for a lock of the whole file; return the kind of lock in the answer."""
    answer = fcntl.fcntl(fd, command, struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0))
    answered_kind: int = struct.unpack_from("h", answer)[0]
    return answered_kind


def copy_range(source: int, target: int, start: int, size: int, at: int, *, share: bool = True) -> bool:
    """Copy bytes `[start, start + size)` of one open file to position `at` of another; `share` extents if possible.

    The positions of the descriptors do not move. Return False if the file systems refuse to share, so that the caller
    need not ask again. Raise OSError (EIO) if the source ends early.
    """
    head = -start % BLOCK
    aligned = (size - head) // BLOCK * BLOCK
    if share and aligned >= MIN_CLONE and (start - at) % BLOCK == 0:
        share = _clone(source, target, start + head, aligned, at + head)
        if share:
            _copy(source, target, start, head, at)
            end = head + aligned
            start, size, at = start + end, size - end, at + end
    _copy(source, target, start, size, at)
    return share


def _clone(source: int, target: int, start: int, size: int, at: int) -> bool:
    argument = struct.pack("qQQQ", source, start, size, at)
    try:
        call("clone", lambda t, s, b, n, a: fcntl.ioctl(t, _FICLONERANGE, argument), target, source, start, size, at)
    except OSError as e:
        if e.errno not in _NOT_HERE:
            raise
        return False
    return True


def _copy(source: int, target: int, start: int, size: int, at: int) -> None:
    in_kernel = True
    while size:
        length = min(size, MAX_COPY)
        try:
            n = call("copy_file_range", os.copy_file_range, source, target, length, start, at) if in_kernel else 0
        except OSError as e:
            if e.errno not in _NOT_HERE:
                raise
            n = 0
        if not n:  # an error above, the end of the file, or a file type for which copy_file_range returns 0
            in_kernel = False
            data = os.pread(source, min(length, 1 << 20), start)
            if not data:
                raise OSError(errno.EIO, f"the file ends at {start}, where {size} further bytes were expected")
            pwrite_all(target, data, at)
            n = len(data)
        start, size, at = start + n, size - n, at + n
