"""Cases about single files: open, truncate, chmod, times, bytes."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import stat
import subprocess
import time
from typing import TYPE_CHECKING

from tests.write.posix.cases import TICK_S, case, changes, fails, file, opened, same

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CREATE = os.O_CREAT | os.O_WRONLY


def mode_of(path: Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


# ---- open


@case("open/mode is that asked for without the umask")
def _(d: Path) -> None:
    for umask, mode in ((0o022, 0o755), (0o077, 0o151), (0o070, 0o345), (0o501, 0o345), (0, 0o666), (0o022, 0)):
        os.umask(umask)
        opened(d / f"{umask}-{mode}", CREATE, mode)
        same(mode_of(d / f"{umask}-{mode}"), mode & ~umask)


@case("open/a file without write permission can be written through the descriptor that made it")
def _(d: Path) -> None:
    fd = os.open(d / "f", os.O_CREAT | os.O_RDWR, 0)
    os.write(fd, b"x")
    same(os.pread(fd, 2, 0), b"x")
    os.close(fd)


@case("open/creating moves the times of the directory")
def _(d: Path) -> None:
    changes(d, lambda: opened(d / "f", CREATE))


@case("open/the times of a new file are now")
def _(d: Path) -> None:
    before = time.time() - 1
    opened(d / "f", CREATE)
    same(before < os.stat(d / "f").st_mtime < time.time() + 1, True)


@case("open/O_TRUNC empties and moves the times")
def _(d: Path) -> None:
    file(d / "f")
    changes(d / "f", lambda: opened(d / "f", os.O_WRONLY | os.O_TRUNC))
    same(os.stat(d / "f").st_size, 0)


@case("open/O_TRUNC on a descriptor that only reads")
def _(d: Path) -> None:
    opened(file(d / "f"), os.O_RDONLY | os.O_TRUNC)
    same((d / "f").read_bytes(), b"")


@case("open/O_DIRECTORY on a file: ENOTDIR")
def _(d: Path) -> None:
    fails(errno.ENOTDIR, opened, file(d / "f"), os.O_RDONLY | os.O_DIRECTORY)


@case("open/a running program for writing: ETXTBSY")
def _(d: Path) -> None:
    shutil.copy(shutil.which("sleep") or "", d / "sleep")
    with subprocess.Popen([d / "sleep", "30"]) as running:
        try:
            fails(errno.ETXTBSY, opened, d / "sleep", os.O_WRONLY)
            fails(errno.ETXTBSY, os.truncate, d / "sleep", 1)
        finally:
            running.kill()


# ---- truncate


def _truncations(cut: Callable[[Path, int], None], d: Path) -> None:
    data = os.urandom(70_001)
    for size in (70_001, 70_000, 65_536, 65_535, 4096, 1, 0, 1, 5000, 100_000):
        path = file(d / f"f{size}", data)
        cut(path, size)
        same(os.stat(path).st_size, size)
        same(path.read_bytes(), (data + bytes(40_000))[:size])
    path = file(d / "again", data)
    cut(path, 100)
    cut(path, 70_001)
    same(path.read_bytes(), data[:100] + bytes(69_901))


def _cut_open(path: Path, size: int) -> None:
    fd = os.open(path, os.O_RDWR)
    os.ftruncate(fd, size)
    same(os.fstat(fd).st_size, size)
    os.close(fd)


@case("truncate/cuts off and adds zeros")
def _(d: Path) -> None:
    _truncations(os.truncate, d)


@case("ftruncate/cuts off and adds zeros")
def _(d: Path) -> None:
    _truncations(_cut_open, d)


@case("truncate/moves the times")
def _(d: Path) -> None:
    for size in (3, 100, 0):
        changes(file(d / "f"), lambda size=size: os.truncate(d / "f", size))  # type: ignore[misc]


@case("truncate/errors")
def _(d: Path) -> None:
    (d / "x").mkdir()
    fails(errno.EISDIR, os.truncate, d / "x", 0)
    fails(errno.ENOENT, os.truncate, d / "none", 0)
    fails(errno.ENOTDIR, os.truncate, file(d / "f") / "x", 0)
    fails(errno.EINVAL, os.truncate, d / "f", -1)
    fails(errno.ENAMETOOLONG, os.truncate, d / ("x" * 256), 0)
    same((d / "f").read_bytes(), b"content")


@case("ftruncate/of a file that was removed")
def _(d: Path) -> None:
    fd = os.open(file(d / "f"), os.O_RDWR)
    os.unlink(d / "f")
    os.ftruncate(fd, 3)
    same(os.pread(fd, 10, 0), b"con")
    os.close(fd)


# ---- bytes


@case("write/of nothing leaves the size")
def _(d: Path) -> None:
    fd = os.open(d / "f", CREATE)
    same(os.pwrite(fd, b"", 1000), 0)
    os.close(fd)
    same(os.stat(d / "f").st_size, 0)


@case("write/moves the times")
def _(d: Path) -> None:
    fd = os.open(file(d / "f"), os.O_WRONLY)
    changes(d / "f", lambda: os.write(fd, b"C"))
    os.close(fd)


@case("read/at and behind the end gives nothing")
def _(d: Path) -> None:
    fd = os.open(file(d / "f"), os.O_RDONLY)
    same([os.pread(fd, 10, at) for at in (6, 7, 8, 1 << 40)], [b"t", b"", b"", b""])
    os.close(fd)


@case("mmap/stores behind the last close of the descriptor are kept")
def _(d: Path) -> None:
    fd = os.open(file(d / "f", bytes(10_000)), os.O_RDWR)
    view = mmap.mmap(fd, 10_000)
    os.close(fd)
    for i in range(10_000):
        view[i] = i % 251
    view.close()
    same((d / "f").read_bytes(), bytes(i % 251 for i in range(10_000)))


@case("posix_fallocate/gives room, and zeros")
def _(d: Path) -> None:
    fd = os.open(file(d / "f"), os.O_RDWR)
    os.posix_fallocate(fd, 0, 10_000)
    os.close(fd)
    same((d / "f").read_bytes(), b"content" + bytes(9993))


KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 1, 2, 16


def fallocate(path: Path, mode: int, start: int, size: int) -> None:
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64
    fd = os.open(path, os.O_RDWR)
    try:
        if call(fd, mode, start, size):
            raise OSError(ctypes.get_errno(), path)
    finally:
        os.close(fd)


@case("fallocate/gives room behind the end, with zeros or unseen")
def _(d: Path) -> None:
    fallocate(file(d / "f"), KEEP_SIZE, 0, 10_000)
    same((d / "f").read_bytes(), b"content")
    fallocate(d / "f", 0, 5, 10)
    same((d / "f").read_bytes(), b"content" + bytes(8))
    for start, size in ((0, 0), (0, -1), (-1, 1)):
        fails(errno.EINVAL, fallocate, d / "f", 0, start, size)


@case("fallocate/makes holes and zeros, seen by who has read before")
def _(d: Path) -> None:
    data = os.urandom(30_000)
    fd = os.open(file(d / "f", data), os.O_RDONLY)
    same(os.pread(fd, 30_000, 0), data)
    fallocate(d / "f", PUNCH_HOLE | KEEP_SIZE, 100, 10_000)
    fallocate(d / "f", ZERO_RANGE, 25_000, 6_000)
    same(os.pread(fd, 40_000, 0), data[:100] + bytes(10_000) + data[10_100:25_000] + bytes(6_000))
    os.close(fd)


# ---- modes, owners, times


@case("chmod/through a descriptor")
def _(d: Path) -> None:
    fd = os.open(file(d / "f"), os.O_RDONLY)
    os.fchmod(fd, 0o601)
    same((stat.S_IMODE(os.fstat(fd).st_mode), mode_of(d / "f")), (0o601, 0o601))
    os.close(fd)


@case("chmod/leaves bytes and mtime")
def _(d: Path) -> None:
    os.utime(file(d / "f"), ns=(5, 10**18 + 7))
    os.chmod(d / "f", 0o600)
    same(((d / "f").read_bytes(), os.stat(d / "f").st_mtime_ns), (b"content", 10**18 + 7))


@case("chmod/errors")
def _(d: Path) -> None:
    fails(errno.ENOENT, os.chmod, d / "f", 0o600)
    fails(errno.ENOTDIR, os.chmod, file(d / "f") / "x", 0o600)
    fails(errno.ENAMETOOLONG, os.chmod, d / ("x" * 256), 0o600)


@case("chown/errors")
def _(d: Path) -> None:
    fails(errno.ENOENT, os.chown, d / "f", -1, -1)
    fails(errno.ENOTDIR, os.chown, file(d / "f") / "x", -1, -1)


@case("utimensat/mtime before 1970")
def _(d: Path) -> None:
    os.utime(file(d / "f"), ns=(0, -(10**18) + 1))
    same(os.stat(d / "f").st_mtime_ns, -(10**18) + 1)


@case("utimensat/holds until something is written, also for an open file")
def _(d: Path) -> None:
    fd = os.open(d / "f", CREATE)
    os.write(fd, b"x")
    os.utime(fd, ns=(1, 2 * 10**9))
    os.close(fd)
    time.sleep(TICK_S)
    same(os.stat(d / "f").st_mtime_ns, 2 * 10**9)
    changes(d / "f", lambda: (d / "f").write_bytes(b"y"))


@case("utimensat/errors")
def _(d: Path) -> None:
    fails(errno.ENOENT, os.utime, d / "f")
    fails(errno.ENOTDIR, os.utime, file(d / "f") / "x")


@case("stat/times do not move by reading")
def _(d: Path) -> None:
    file(d / "f")
    changes(d / "f", (d / "f").read_bytes, is_changed=False)


@case("stat/inode numbers stay while a file is changed, and are not used again")
def _(d: Path) -> None:
    numbers, names = set(), []
    for _ in range(20):
        number = os.stat(file(d / "f", b"1")).st_ino
        os.truncate(d / "f", 0)
        file(d / "f", b"22")
        same(os.stat(d / "f").st_ino, number)
        numbers.add(number)
        names.append(os.open(d / "f", os.O_RDONLY))  # a plain file system may use a number again when nobody has it
        os.unlink(d / "f")
    for fd in names:
        os.close(fd)
    same(len(numbers), 20)


@case("xattr/user attributes")
def _(d: Path) -> None:
    os.setxattr(file(d / "f"), "user.some", b"value")
    same(os.getxattr(d / "f", "user.some"), b"value")
    os.removexattr(d / "f", "user.some")
    fails(errno.ENODATA, os.getxattr, d / "f", "user.some")
    fails(errno.ENODATA, os.removexattr, d / "f", "user.some")


@case("xattr/XATTR_CREATE and XATTR_REPLACE")
def _(d: Path) -> None:
    fails(errno.ENODATA, os.setxattr, file(d / "f"), "user.some", b"1", os.XATTR_REPLACE)
    os.setxattr(d / "f", "user.some", b"2", os.XATTR_CREATE)
    fails(errno.EEXIST, os.setxattr, d / "f", "user.some", b"3", os.XATTR_CREATE)
    os.setxattr(d / "f", "user.some", b"4", os.XATTR_REPLACE)
    same(os.getxattr(d / "f", "user.some"), b"4")


@case("xattr/any names and bytes, listed; also of directories, and along with a new name")
def _(d: Path) -> None:
    wanted = {"user.empty": b"", "user.\xe4 \udcff": bytes(range(256)), "user." + "x" * 250: b"long"}
    (d / "x").mkdir()
    for path in (file(d / "f"), d / "x"):
        for name, value in wanted.items():
            os.setxattr(path, name, value)
        os.rename(path, path := d / f"{path.name}2")
        listed = {name for name in os.listxattr(path) if name in wanted}
        same({name: os.getxattr(path, name) for name in listed}, wanted)


@case("xattr/of an open file without a name")
def _(d: Path) -> None:
    fd = os.open(file(d / "f"), os.O_RDWR)
    os.unlink(d / "f")
    os.setxattr(fd, "user.some", b"value")
    same(os.getxattr(fd, "user.some"), b"value")
    os.close(fd)
