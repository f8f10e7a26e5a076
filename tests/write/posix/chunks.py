"""Cases about files that are named 0, 1, 2, ... in one directory, as the chunks of an array are.

Half of them exist. Whatever programs do to chunks must do what it does to files.
"""

from __future__ import annotations

import errno
import mmap
import os
from typing import TYPE_CHECKING

from tests.write.posix.cases import changes, fails, opened, same
from tests.write.posix.listing import getdents, stream
from tests.write.posix.names import NOREPLACE, number_of, renameat2

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CHUNKS: dict[str, Callable[[Chunks], None]] = {}
"""Cases by name."""

COUNT = 1000
"""Names 0 to 999 may be given; the first half exists, with at least 8 bytes each."""


class Chunks:
    """Hands out chunks that no other case touches."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._old, self._new = iter(range(COUNT // 2)), iter(range(COUNT // 2, COUNT))

    def old(self) -> Path:
        """One that exists."""
        return self.directory / str(next(self._old))

    def new(self, data: bytes | None = None) -> Path:
        """One that does not, or is made now."""
        path = self.directory / str(next(self._new))
        if data is not None:
            path.write_bytes(data)
        return path

    def listed(self, path: Path) -> bool:
        return path.name in os.listdir(self.directory)


def chunk(function: Callable[[Chunks], None]) -> Callable[[Chunks], None]:
    CHUNKS[f"chunk/{function.__name__.replace('_', ' ')}"] = function
    return function


def run(directory: Path) -> dict[str, str]:
    """What failed, and why."""
    os.umask(0o022)
    failed, chunks = {}, Chunks(directory)
    for name, function in CHUNKS.items():
        try:
            function(chunks)
        except (AssertionError, OSError) as e:
            failed[name] = f"{type(e).__name__}: {e}"
    return failed


# ---- open


@chunk
def exclusive_creation(c: Chunks) -> None:
    for path in (c.old(), c.new(b"x")):
        fails(errno.EEXIST, opened, path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    path = c.new()
    opened(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    same((path.read_bytes(), c.listed(path)), (b"", True))


@chunk
def opening_an_absent_one(c: Chunks) -> None:
    fails(errno.ENOENT, opened, c.new())
    fails(errno.ENOENT, opened, c.new(), os.O_RDWR)


@chunk
def creation_leaves_what_exists(c: Chunks) -> None:
    path = c.old()
    before = path.read_bytes()
    opened(path, os.O_CREAT | os.O_RDWR)
    same(path.read_bytes(), before)


@chunk
def truncation_by_open(c: Chunks) -> None:
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_CREAT):
        path = c.old()
        opened(path, flags | os.O_TRUNC)
        same((path.read_bytes(), os.stat(path).st_size, c.listed(path)), (b"", 0, True))


@chunk
def something_below_a_chunk(c: Chunks) -> None:
    path = c.old()
    for call in (opened, os.stat, os.unlink, os.mkdir, os.rmdir):
        fails(errno.ENOTDIR, call, path / "x")
    fails(errno.ENOTDIR, opened, path / "x", os.O_CREAT | os.O_WRONLY)
    fails(errno.ENOTDIR, opened, path, os.O_RDONLY | os.O_DIRECTORY)
    fails(errno.ENOTDIR, os.listdir, path)


@chunk
def names_that_are_too_long(c: Chunks) -> None:
    path = c.directory / ("1" * 256)
    fails(errno.ENAMETOOLONG, opened, path)
    fails(errno.ENAMETOOLONG, opened, path, os.O_CREAT | os.O_WRONLY)
    for call in (os.stat, os.unlink, os.mkdir):
        fails(errno.ENAMETOOLONG, call, path)
    fails(errno.ENAMETOOLONG, os.rename, c.old(), path)


@chunk
def directories_are_not_files(c: Chunks) -> None:
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_CREAT | os.O_WRONLY):
        fails(errno.EISDIR, opened, c.directory, flags)
    fails(errno.EISDIR, os.truncate, c.directory, 0)
    fails((errno.EISDIR, errno.EPERM), os.unlink, c.directory)
    fails((errno.ENOTEMPTY, errno.EEXIST), os.rmdir, c.directory)
    fails(errno.ENOTDIR, os.rmdir, c.old())
    fails(errno.EEXIST, os.mkdir, c.old())


# ---- bytes


@chunk
def writing_into_the_middle_keeps_the_rest(c: Chunks) -> None:
    path = c.old()
    wanted = bytearray(path.read_bytes())
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, b"XY", 3)
    wanted[3:5] = b"XY"
    same(os.pread(fd, 100_000, 0), bytes(wanted))
    os.close(fd)
    same(path.read_bytes(), bytes(wanted))


@chunk
def appending(c: Chunks) -> None:
    path = c.old()
    before = path.read_bytes()
    for _ in range(3):
        with open(path, "ab") as file:
            file.write(b"more")
    same(path.read_bytes(), before + b"more" * 3)


@chunk
def truncation_by_name_and_by_descriptor(c: Chunks) -> None:
    for size in (0, 3, 5000):
        path, other = c.old(), c.old()
        before, wanted = path.read_bytes(), other.read_bytes()
        os.truncate(path, size)
        same(path.read_bytes(), (before + bytes(5000))[:size])
        fd = os.open(other, os.O_RDWR)
        os.ftruncate(fd, size)
        same(os.fstat(fd).st_size, size)
        os.close(fd)
        same(other.read_bytes(), (wanted + bytes(5000))[:size])


@chunk
def truncation_moves_the_time(c: Chunks) -> None:
    path = c.old()
    changes(path, lambda: os.truncate(path, 2), ctime=False)


@chunk
def truncation_of_what_is_not_there(c: Chunks) -> None:
    fails(errno.ENOENT, os.truncate, c.new(), 0)


@chunk
def readers_see_what_is_written(c: Chunks) -> None:
    path = c.old()
    r, w = os.open(path, os.O_RDONLY), os.open(path, os.O_RDWR | os.O_TRUNC)
    same(os.pread(r, 10, 0), b"")
    os.write(w, b"new bytes")
    same((os.pread(r, 20, 0), os.fstat(r).st_size), (b"new bytes", 9))
    os.close(w)
    same(os.pread(r, 20, 0), b"new bytes")
    os.close(r)


@chunk
def stores_behind_the_last_close(c: Chunks) -> None:
    path = c.new(bytes(9000))
    fd = os.open(path, os.O_RDWR)
    view = mmap.mmap(fd, 9000)
    os.close(fd)
    view[:] = b"m" * 9000
    view.close()
    same(path.read_bytes(), b"m" * 9000)


@chunk
def a_large_one_in_pieces(c: Chunks) -> None:
    path, data = c.new(), os.urandom(5 << 20)
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    pieces = [(at, data[at : at + 777_777]) for at in range(0, len(data), 777_777)]
    for at, piece in reversed(pieces):
        os.pwrite(fd, piece, at)
    os.fsync(fd)
    os.close(fd)
    same(path.read_bytes() == data, True)


@chunk
def modes_and_times(c: Chunks) -> None:
    for path in (c.old(), c.new(b"x")):
        os.utime(path, ns=(5, 10**18 + 123_456_789))
        os.chmod(path, 0o640)
        found = os.stat(path)
        same((found.st_mtime_ns, found.st_mode & 0o7777), (10**18 + 123_456_789, 0o640))
        os.chown(path, os.getuid(), os.getgid())
        same(path.read_bytes() != b"", True)


@chunk
def writing_keeps_the_number(c: Chunks) -> None:
    for path in (c.old(), c.new(b"x")):
        number = number_of(path)
        path.write_bytes(b"other")
        os.truncate(path, 2)
        with open(path, "ab") as file:
            file.write(b"end")
        same((number_of(path), path.read_bytes()), (number, b"otend"))


# ---- unlink


@chunk
def removal(c: Chunks) -> None:
    for path in (c.old(), c.new(b"x")):
        os.unlink(path)
        for call in (os.stat, os.unlink, opened):
            fails(errno.ENOENT, call, path)
        same(c.listed(path), False)


@chunk
def removal_while_it_is_open(c: Chunks) -> None:
    for path in (c.old(), c.new(b"x" * 50)):
        before = path.read_bytes()
        fd = os.open(path, os.O_RDONLY)
        os.unlink(path)
        same((os.pread(fd, 100_000, 0), os.fstat(fd).st_size), (before, len(before)))
        path.write_bytes(b"another one")
        same((os.pread(fd, 100_000, 0), path.read_bytes()), (before, b"another one"))
        os.close(fd)


@chunk
def removal_while_it_is_being_written(c: Chunks) -> None:
    for path in (c.old(), c.new(b"12345678")):
        fd = os.open(path, os.O_RDWR)
        os.pwrite(fd, b"first", 0)
        os.unlink(path)
        os.pwrite(fd, b"F", 0)
        same(os.pread(fd, 5, 0), b"First")
        os.close(fd)
        fails(errno.ENOENT, os.stat, path)


@chunk
def a_new_one_has_another_number(c: Chunks) -> None:
    for path in (c.old(), c.new(b"x")):
        seen = {number_of(path)}
        for _ in range(5):
            fd = os.open(path, os.O_RDONLY)  # a plain file system may use a number again when nobody has it
            os.unlink(path)
            path.write_bytes(b"again")
            os.close(fd)
            seen.add(number_of(path))
        same(len(seen) > 1, True)


# ---- rename, link


@chunk
def renaming_over_another(c: Chunks) -> None:
    for old, new in ((c.old(), c.old()), (c.new(b"n"), c.old()), (c.old(), c.new(b"n")), (c.new(b"1"), c.new(b"2"))):
        data, number = old.read_bytes(), number_of(old)
        os.rename(old, new)
        same((new.read_bytes(), number_of(new), c.listed(old), c.listed(new)), (data, number, False, True))
        fails(errno.ENOENT, os.stat, old)


@chunk
def renaming_to_an_absent_one(c: Chunks) -> None:
    for old in (c.old(), c.new(b"n")):
        new, data = c.new(), old.read_bytes()
        os.rename(old, new)
        same((new.read_bytes(), c.listed(old), c.listed(new)), (data, False, True))
        old.write_bytes(b"back again")
        same((old.read_bytes(), new.read_bytes()), (b"back again", data))


@chunk
def renaming_temporary_files_onto_it(c: Chunks) -> None:
    endings = ("{}.0123456789abcdef0123456789abcdef.partial", "{}.__lock", "{}#1", ".{}.AbCd12", "{}.tmp", "sedAbCd12")
    for ending in endings:
        for target in (c.old(), c.new()):
            temporary = target.with_name(ending.format(target.name))
            fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
            os.write(fd, ending.encode())
            same(os.stat(temporary).st_size, len(ending))
            os.rename(temporary, target)
            same(os.fstat(fd).st_ino, number_of(target))
            os.close(fd)
            same((target.read_bytes(), c.listed(target), c.listed(temporary)), (ending.encode(), True, False))


@chunk
def renaming_over_one_that_is_read(c: Chunks) -> None:
    for target in (c.old(), c.new(b"before")):
        before = target.read_bytes()
        fd = os.open(target, os.O_RDONLY)
        os.rename(c.new(b"after"), target)
        same((os.pread(fd, 100_000, 0), target.read_bytes()), (before, b"after"))
        os.close(fd)


@chunk
def renaming_over_one_that_is_written(c: Chunks) -> None:
    for target in (c.old(), c.new(b"before")):
        fd = os.open(target, os.O_RDWR)
        os.pwrite(fd, b"half", 0)
        os.rename(c.new(b"after"), target)
        os.pwrite(fd, b"HALF", 0)
        os.close(fd)
        same(target.read_bytes(), b"after")


@chunk
def renaming_without_replacing(c: Chunks) -> None:
    old, taken = c.new(b"mine"), c.old()
    before = taken.read_bytes()
    fails(errno.EEXIST, renameat2, old, taken, NOREPLACE)
    same((old.read_bytes(), taken.read_bytes()), (b"mine", before))
    free = c.new()
    renameat2(old, free, NOREPLACE)
    same((free.read_bytes(), c.listed(old)), (b"mine", False))


@chunk
def renaming_what_is_not_there(c: Chunks) -> None:
    target = c.old()
    before = target.read_bytes()
    fails(errno.ENOENT, os.rename, c.new(), target)
    fails(errno.ENOENT, os.rename, c.old(), c.directory / "none" / "0")
    fails((errno.EISDIR, errno.ENOTEMPTY, errno.EXDEV, errno.EINVAL), os.rename, c.old(), c.directory)
    same(target.read_bytes(), before)


@chunk
def linking_makes_a_copy(c: Chunks) -> None:
    for old in (c.old(), c.new(b"some")):
        new, data = c.new(), old.read_bytes()
        os.link(old, new)
        same((new.read_bytes(), c.listed(new)), (data, True))
        fails(errno.EEXIST, os.link, old, new)
        os.unlink(old)
        same(new.read_bytes(), data)


# ---- listing


@chunk
def each_is_listed_once_and_with_its_number(c: Chunks) -> None:
    added, removed = c.new(b"x"), c.old()
    os.unlink(removed)
    fd = os.open(c.directory, os.O_RDONLY)
    for size in (32_768, 2048):
        os.lseek(fd, 0, os.SEEK_SET)
        found = [entry for entry in stream(fd, size) if entry.name not in (".", "..")]
        names = [entry.name for entry in found]
        same((len(names), added.name in names, removed.name in names), (len(set(names)), True, False))
        for entry in found:
            same((entry.name, entry.number), (entry.name, number_of(c.directory / entry.name)))
    os.close(fd)


@chunk
def removed_while_listing_does_not_come_back(c: Chunks) -> None:
    victims = [c.old() for _ in range(100)] + [c.new(b"x") for _ in range(100)]
    fd = os.open(c.directory, os.O_RDONLY)
    getdents(fd, 500)
    for path in victims:
        os.unlink(path)
    list(stream(fd))
    os.close(fd)
    same([path.name for path in victims if os.path.lexists(path)], [])


@chunk
def sizes_after_a_listing_are_those_of_now(c: Chunks) -> None:
    changed = [c.old() for _ in range(20)]
    fd = os.open(c.directory, os.O_RDONLY)
    getdents(fd, 500)
    for path in changed:
        path.write_bytes(b"12345")
    list(stream(fd))
    os.close(fd)
    same({(os.stat(path).st_size, path.read_bytes()) for path in changed}, {(5, b"12345")})
