"""System calls that attach and detach mounts, for root. Each raises MountError with the kernel's reason."""

from __future__ import annotations

import ctypes
import os

from shardfs.model.errors import MountError

DETACH = 2  # umount2(2): MNT_DETACH
OPEN_TREE, MOVE_MOUNT = 428, 429  # the same numbers on all architectures that Python supports
CLONE, CLOEXEC = 1, os.O_CLOEXEC  # open_tree(2)
EMPTY_PATH, BENEATH = 0x4, 0x200  # move_mount(2)
AT_FDCWD = -100


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def detach(mountpoint: str, *, lazy: bool) -> None:
    """Detach the topmost mount at `mountpoint`. Raise MountError (EBUSY) if programs use the mount, unless `lazy`."""
    _check(_libc.umount2(os.fsencode(mountpoint), DETACH if lazy else 0), mountpoint)


def clone(path: str) -> int:
    """Return a descriptor of a copy of the mount at `path`, attached nowhere; the caller closes it.

    Needs Linux 5.2, else raises MountError (ENOSYS).
    """
    return _call(OPEN_TREE, path, AT_FDCWD, os.fsencode(path), CLONE | CLOEXEC)


def attach(mount: int, mountpoint: str, *, beneath: bool) -> None:
    """Attach a mount from `clone` at `mountpoint`: above all mounts there, or `beneath` the topmost one.

    `beneath` needs Linux 6.5 and a mount at `mountpoint`, else raises MountError (EINVAL).
    """
    flags = EMPTY_PATH | (BENEATH if beneath else 0)
    _call(MOVE_MOUNT, mountpoint, mount, b"", AT_FDCWD, os.fsencode(mountpoint), flags)


def _call(number: int, path: str, *arguments: int | bytes) -> int:
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _check(_libc.syscall(ctypes.c_long(number), *words), path)


def _check(answer: int, path: str) -> int:
    if answer < 0:
        number = ctypes.get_errno()
        raise MountError(number, os.strerror(number), path)
    return answer
