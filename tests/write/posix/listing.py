"""Cases about directory streams, with the system call itself: its buffers may be of any size."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import struct
from typing import TYPE_CHECKING, NamedTuple

from tests.write.posix.cases import case, fails, file, same
from tests.write.scale import times

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_GETDENTS64 = {"x86_64": 217, "aarch64": 61}[os.uname().machine]
LARGE = 2_000 * times()


class Entry(NamedTuple):
    number: int
    position: int
    kind: int
    name: str


def getdents(fd: int, size: int = 32_768) -> list[Entry]:
    """What one call gives."""
    buffer = ctypes.create_string_buffer(size)
    nbytes = _LIBC.syscall(_GETDENTS64, fd, buffer, size)
    if nbytes < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    entries, at = [], 0
    while at < nbytes:
        number, position, length, kind = struct.unpack_from("=QqHB", buffer.raw, at)
        name = buffer.raw[at + 19 : at + length].split(b"\0", 1)[0]
        entries.append(Entry(number, position, kind, os.fsdecode(name)))
        at += length
    return entries


def stream(fd: int, size: int = 32_768) -> Iterator[Entry]:
    while entries := getdents(fd, size):
        yield from entries


def names(fd: int, size: int = 32_768) -> list[str]:
    return [entry.name for entry in stream(fd, size) if entry.name not in (".", "..")]


def filled(d: Path, count: int = 300) -> list[str]:
    names = [f"file{i}" for i in range(count)]
    for name in names:
        os.close(os.open(d / name, os.O_CREAT | os.O_WRONLY))
    return sorted(names)


@case("readdir/each name once, with . and ..")
def _(d: Path) -> None:
    file_names, fd = filled(d), os.open(d, os.O_RDONLY)
    same(sorted(entry.name for entry in stream(fd)), sorted([*file_names, ".", ".."]))
    os.close(fd)


@case("readdir/numbers and kinds are those of stat, and never 0")
def _(d: Path) -> None:
    filled(d, 20)
    (d / "x").mkdir()
    fd = os.open(d, os.O_RDONLY)
    for entry in stream(fd):
        entries = os.stat(d / entry.name)
        if entry.name != "..":
            same(entry.number, entries.st_ino)
        same((entry.kind, entry.number != 0), (entries.st_mode >> 12, True))
    os.close(fd)


@case("readdir/small buffers")
def _(d: Path) -> None:
    file_names = filled(d)
    for size in (48, 100, 280, 1000, 2048, 4096, 5000):
        fd = os.open(d, os.O_RDONLY)
        same(sorted(names(fd, size)), file_names)
        os.close(fd)


@case("readdir/from the beginning again: what is there now")
def _(d: Path) -> None:
    file_names, fd = filled(d, 10), os.open(d, os.O_RDONLY)
    same(sorted(names(fd)), file_names)
    same(names(fd), [])
    file(d / "new")
    os.unlink(d / "file3")
    os.lseek(fd, 0, os.SEEK_SET)
    same(sorted(names(fd)), sorted({*file_names, "new"} - {"file3"}))
    os.close(fd)


@case("readdir/back to any position")
def _(d: Path) -> None:
    filled(d)
    fd = os.open(d, os.O_RDONLY)
    entries = list(stream(fd, 600))
    for i in (0, 1, 2, 3, 17, 150, len(entries) - 2, len(entries) - 1):
        os.lseek(fd, entries[i].position, os.SEEK_SET)
        same([entry.name for entry in stream(fd)], [entry.name for entry in entries[i + 1 :]])
    os.close(fd)


@case("readdir/what is removed meanwhile, from a stream that goes on")
def _(d: Path) -> None:
    file_names, fd = filled(d, 600), os.open(d, os.O_RDONLY)
    entry_list: list[str] = []
    while entries := [e.name for e in getdents(fd, 1000)]:
        for name in entries:
            if name not in (".", ".."):
                entry_list.append(name)
                os.unlink(d / name)
    os.close(fd)
    same((sorted(entry_list), os.listdir(d)), (file_names, []))


@case("readdir/removed names do not come back")
def _(d: Path) -> None:
    file_names, fd = filled(d, 600), os.open(d, os.O_RDONLY)
    getdents(fd, 1000)
    for name in file_names:
        os.unlink(d / name)
    list(stream(fd))
    for name in file_names:
        same((name, os.path.lexists(d / name)), (name, False))
    os.close(fd)


@case("readdir/sizes are those of now, for who looks after listing")
def _(d: Path) -> None:
    file_names, fd = filled(d, 500), os.open(d, os.O_RDONLY)
    getdents(fd, 1000)
    for name in file_names:
        (d / name).write_bytes(b"12345")
    list(stream(fd))
    same({os.stat(d / name).st_size for name in file_names}, {5})
    os.close(fd)


@case("readdir/what is added meanwhile makes nothing come twice")
def _(d: Path) -> None:
    file_names, fd = filled(d, 500), os.open(d, os.O_RDONLY)
    entry_list: list[str] = []
    for i, entry in enumerate(stream(fd, 400)):
        entry_list.append(entry.name)
        if i < 200:
            file(d / f"added{i}")
    os.close(fd)
    same(
        (sorted(name for name in entry_list if name.startswith("file")), len(set(entry_list))),
        (file_names, len(entry_list)),
    )


@case("readdir/of a directory that was removed: ENOENT")
def _(d: Path) -> None:
    (d / "x").mkdir()
    fd = os.open(d / "x", os.O_RDONLY)
    os.rmdir(d / "x")
    fails(errno.ENOENT, getdents, fd)
    same(os.listdir(fd), [])
    os.close(fd)


@case("readdir/two streams do not mix")
def _(d: Path) -> None:
    file_names = filled(d)
    a, b = (os.open(d, os.O_RDONLY) for _ in range(2))
    entries: tuple[list[str], list[str]] = [], []
    for _ in range(100):
        for fd, entry_list in ((a, entries[0]), (b, entries[1])):
            entry_list += [e.name for e in getdents(fd, 300) if e.name not in (".", "..")]
    os.close(a)
    os.close(b)
    same((sorted(entries[0]), sorted(entries[1])), (file_names, file_names))


@case("readdir/a large tree is removed as a whole")
def _(d: Path) -> None:
    for i in range(4):
        (d / "x" / f"{i}").mkdir(parents=True)
        filled(d / "x" / f"{i}", LARGE // 4)
    shutil.rmtree(d / "x")
    same(os.listdir(d), [])
