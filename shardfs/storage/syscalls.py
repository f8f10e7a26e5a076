"""Every call that changes a local disk: one place where tests count, fail, shorten, delay, record or kill it.

Paths may be relative to a directory that is open (`at`, a descriptor). Errors are the system's own OSErrors.
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
from typing import Any, TypeAlias

Data: TypeAlias = bytes | bytearray | memoryview
Hook: TypeAlias = Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]

hook: Hook | None = None
"""Only for tests: called as `hook(name, function, args)` in place of `function(*args)`.

It calls the function itself, or does not; with other arguments (fewer bytes to `pwrite`), later, or twice; it may note
the arguments, raise, or end the process before or after. Its result is the call's. Changing calls of stores come here,
too.
"""

BLOCK = 4096
"""Bytes; what is cloned is aligned to it."""

MIN_CLONE = 64 * 1024
"""Bytes. Fewer are copied: an extent of its own costs more than it saves."""

MAX_COPY = 64 * 1024 * 1024
"""Bytes that one call copies, so that no thread is in the kernel for long."""


_FICLONERANGE = 0x4020940D
_NOREPLACE, _EXCHANGE = 1, 2
_AT_FDCWD = -100
_NOT_HERE = {errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM}
"""What a file system says that does not clone, or not from another one; then the bytes are copied otherwise."""

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, or whatever a test makes of it."""
    if hook is None:
        return function(*args)
    return hook(name, function, args)


def open(path: str, flags: int, mode: int = 0o600, at: int | None = None) -> int:
    """A descriptor; a child process does not inherit it."""
    fd: int = call("open", lambda p, f, m, d: os.open(p, f, m, dir_fd=d), path, flags | os.O_CLOEXEC, mode, at)
    return fd


def open_unnamed(directory: str) -> int:
    """A file without a name, which goes with its descriptor."""
    try:
        return open(directory, os.O_TMPFILE | os.O_RDWR)
    except OSError as e:
        if e.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    name = f"{directory}/{random.getrandbits(64):016x}.spill"
    fd = open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    unlink(name)
    return fd


def close(fd: int) -> None:
    """It is closed even if this raises; never try again."""
    call("close", os.close, fd)


def write_all(fd: int, data: Data) -> None:
    """At the descriptor's position."""
    view = memoryview(data).cast("B")
    while view:
        view = view[call("write", os.write, fd, view) :]


def pwrite_all(fd: int, data: Data, offset: int) -> None:
    """At `offset`; the descriptor's position stays."""
    view = memoryview(data).cast("B")
    while view:
        n = call("pwrite", os.pwrite, fd, view, offset)
        view, offset = view[n:], offset + n


def ftruncate(fd: int, size: int) -> None:
    """Cut, or extend by zeros."""
    call("ftruncate", os.ftruncate, fd, size)


def fallocate(fd: int, start: int, size: int) -> None:
    """Have room for `[start, start + size)`; the file becomes as long as that."""
    call("fallocate", os.posix_fallocate, fd, start, size)


def allocate(fd: int, start: int, size: int, mode: int) -> None:
    """What fallocate(2) does of itself. Raise OSError (EOPNOTSUPP) if this disk does not."""
    call("allocate", _fallocate, fd, start, size, mode)


def _fallocate(fd: int, start: int, size: int, mode: int) -> None:
    function = getattr(_libc, "fallocate64", None) or _libc.fallocate
    while function(fd, mode, ctypes.c_int64(start), ctypes.c_int64(size)):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def fsync(fd: int) -> None:
    """After an error the kernel believes the pages clean: another fsync of the same file proves nothing."""
    call("fsync", os.fsync, fd)


def fdatasync(fd: int) -> None:
    """As `fsync`, without the times."""
    call("fdatasync", os.fdatasync, fd)


def fsync_directory(directory: str | int) -> None:
    """Make the names in a directory (path or descriptor) last."""
    if isinstance(directory, int):
        call("fsync_directory", os.fsync, directory)
        return
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        call("fsync_directory", os.fsync, fd)
    finally:
        os.close(fd)


def rename(old: str, new: str, at: int | None = None, new_at: int | None = None) -> None:
    """Replaces what is called `new`."""
    call("rename", lambda o, n, a, b: os.rename(o, n, src_dir_fd=a, dst_dir_fd=b), old, new, at, new_at)


def rename_new(old: str, new: str, at: int | None = None, new_at: int | None = None) -> None:
    """As `rename`, but raise FileExistsError if there is something called `new`; EINVAL, ENOSYS: not on this disk."""
    call("rename_new", _renameat2, old, new, at, new_at, _NOREPLACE)


def exchange(a: str, b: str, at: int | None = None, b_at: int | None = None) -> None:
    """Both exist before and after. EINVAL, ENOSYS: not on this disk."""
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
    """Raise FileExistsError if there is something called `new`."""
    call(
        "link",
        lambda o, n, a, b: os.link(o, n, src_dir_fd=a, dst_dir_fd=b, follow_symlinks=False),
        old,
        new,
        at,
        new_at,
    )


def symlink(target: str, path: str, at: int | None = None) -> None:
    """Raise FileExistsError if there is something."""
    call("symlink", lambda t, p, d: os.symlink(t, p, dir_fd=d), target, path, at)


def unlink(path: str, at: int | None = None) -> None:
    """The name only; who has the file open keeps it."""
    call("unlink", lambda p, d: os.unlink(p, dir_fd=d), path, at)


def mkdir(path: str, mode: int = 0o777, at: int | None = None) -> None:
    """Raise FileExistsError if there is something."""
    call("mkdir", lambda p, m, d: os.mkdir(p, m, dir_fd=d), path, mode, at)


def rmdir(path: str, at: int | None = None) -> None:
    """Raise OSError (ENOTEMPTY) if something is in it."""
    call("rmdir", lambda p, d: os.rmdir(p, dir_fd=d), path, at)


def chmod(path: str | int, mode: int) -> None:
    """Of a path or descriptor."""
    call("chmod", os.chmod, path, mode)


def chown(path: str | int, user: int, group: int) -> None:
    """Of a path or descriptor; -1 leaves one as it is."""
    call("chown", os.chown, path, user, group)


def utime(path: str | int, atime_ns: int, mtime_ns: int) -> None:
    """Of a path or descriptor."""
    call("utime", lambda p, a, m: os.utime(p, ns=(a, m)), path, atime_ns, mtime_ns)


def setxattr(path: str | int, name: str, value: bytes, flags: int = 0) -> None:
    """Of a path or descriptor. `flags`: `os.XATTR_CREATE` or `os.XATTR_REPLACE`."""
    call("setxattr", os.setxattr, path, name, value, flags)


def removexattr(path: str | int, name: str) -> None:
    """Of a path or descriptor. Raise OSError (ENODATA) if there is none."""
    call("removexattr", os.removexattr, path, name)


def lock(fd: int, *, exclusive: bool = True, wait: float = 0.0) -> None:
    """Lock the whole open file (OFD: against other opens of it, also of this process; ends with the last descriptor).

    Raise BlockingIOError if others still hold it after `wait` seconds.
    """
    deadline, pause = time.monotonic() + wait, 0.0005
    while True:
        try:
            call("lock", _ofd_lock, fd, fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK)
            return
        except (BlockingIOError, PermissionError) as e:  # either is allowed to say "somebody has it"
            if time.monotonic() >= deadline:
                raise BlockingIOError(errno.EAGAIN, "locked by another program") from e
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, 0.02)


def unlock(fd: int) -> None:
    """What `lock` has locked."""
    call("unlock", _ofd_lock, fd, fcntl.F_UNLCK)


def is_locked(fd: int) -> bool:
    """Whether others hold an exclusive lock. Nobody who takes one in this moment is refused for it."""
    told = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _whole(fcntl.F_RDLCK))
    kind: int = struct.unpack_from("h", told)[0]
    return kind != fcntl.F_UNLCK


def _ofd_lock(fd: int, kind: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _whole(kind))


def _whole(kind: int) -> bytes:
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)


def copy_range(source: int, target: int, start: int, size: int, at: int) -> None:
    """Bytes `[start, start + size)` of one open file to position `at` of another: shared if the disk can, else copied.

    Raise OSError (EIO) if the source ends before.
    """
    head = -start % BLOCK
    aligned = (size - head) // BLOCK * BLOCK
    if aligned >= MIN_CLONE and (start - at) % BLOCK == 0 and _clone(source, target, start + head, aligned, at + head):
        _copy(source, target, start, head, at)
        done = head + aligned
        start, size, at = start + done, size - done, at + done
    _copy(source, target, start, size, at)


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
        try:
            n = _copy_some(source, target, start, min(size, MAX_COPY), at, in_kernel=in_kernel)
        except OSError as e:
            if not in_kernel or e.errno not in _NOT_HERE:
                raise
            in_kernel = False
            continue
        if not n and in_kernel:  # the end; or a file of a kind that has no copies, and says so this way
            in_kernel = False
        elif not n:
            raise OSError(errno.EIO, f"it ends at {start}, where {size} further bytes were expected")
        start, size, at = start + n, size - n, at + n


def _copy_some(source: int, target: int, start: int, size: int, at: int, *, in_kernel: bool) -> int:
    if in_kernel:
        n: int = call("copy_file_range", os.copy_file_range, source, target, size, start, at)
        return n
    data = os.pread(source, min(size, 1024 * 1024), start)
    pwrite_all(target, data, at)
    return len(data)
