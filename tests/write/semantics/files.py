"""Cases of single files, the same for all kinds of them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import stat
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.write.semantics.calls import renameat2
from tests.write.semantics.cases import NEW, RW, SOURCES, R, W, case, fails, same, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.write.semantics.cases import Place

SIZE = 1000


@dataclass(frozen=True)
class Kind:
    """Two names of a kind. `held`: both are there from the beginning, `first` alone if `second` is not."""

    name: str
    first: str
    second: str = ""
    held: bool = False
    plain: bool = False

    @property
    def document(self) -> bool:
        return self.name == "document"

    def content(self, n: int) -> bytes:
        """Of `SIZE` bytes, to be told from those of other numbers."""
        if not self.document:
            return bytes([n]) * SIZE
        document = json.loads(SOURCES["zarr"]()["zarr.json"])
        document["chunk_grid"]["configuration"]["chunk_shape"] = [2, 2]
        document |= {"codecs": [{"name": "bytes"}], "attributes": {"n": n}}
        return json.dumps(document).encode().ljust(SIZE)

    def begin(self, x: Place) -> bytes:
        """See to it that the first one is there; its bytes."""
        if self.held:
            return x.get(self.first)
        x.put(self.first, self.content(1))
        return self.content(1)

    @property
    def directory(self) -> str:
        return self.first.rpartition("/")[0]


KINDS = [
    Kind("chunk", "c/3/3", "c/3/2"),
    Kind("stored chunk", "c/0/0", "c/0/1", held=True),
    Kind("orphan", "c/0/9", "c/0/10"),
    Kind("scratch", "c/1/0.0123456789abcdef0123456789abcdef.partial", "c/1/.1.AbCdEf"),
    Kind("document", "zarr.json", held=True),
    Kind("plain", "notes", "notes2", plain=True),
    Kind("plain beside chunks", "c/0/README", "c/2/notes", plain=True),
]


def each(
    name: str, *, document: bool = True, two: bool = False, kernel: bool = False, plain: bool = True
) -> Callable[[Callable[[Place, Kind], None]], Callable[[Place, Kind], None]]:
    """Register a case for each kind. `document`: also of documents, which must be valid; `two`: of two names."""

    def register(function: Callable[[Place, Kind], None]) -> Callable[[Place, Kind], None]:
        for kind in KINDS:
            if (document or not kind.document) and (kind.second or not two) and (plain or not kind.plain):
                case(f"{kind.name}/{name}", kernel=kernel)(lambda x, kind=kind: function(x, kind))  # type: ignore[misc]
        return function

    return register


# ---- open


@each("is made, read and listed")
def _(x: Place, k: Kind) -> None:
    x.put(k.first, k.content(3))
    same(x.get(k.first), k.content(3))
    same(x.stat(k.first).st_size, SIZE)
    same(k.first.rpartition("/")[2] in x.names(k.directory), True)


@each("is a regular file of the user's with one name")
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    status = x.stat(k.first)
    same((stat.S_ISREG(status.st_mode), status.st_nlink, status.st_uid), (True, 1, os.getuid()))
    same(stat.S_IMODE(status.st_mode), 0o644)


@each("open of what is missing: ENOENT")
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    x.unlink(k.first)
    for flags in (R, W, RW, W | os.O_TRUNC, W | os.O_APPEND):
        fails(errno.ENOENT, x.calls.open, x.path(k.first), flags)
    fails(errno.ENOENT, x.truncate, k.first, 0)
    fails(errno.ENOENT, x.stat, k.first)


@each("O_EXCL of what is there: EEXIST")
def _(x: Place, k: Kind) -> None:
    original = k.begin(x)
    for flags in (R, W, RW, W | os.O_TRUNC):
        fails(errno.EEXIST, x.calls.open, x.path(k.first), flags | os.O_CREAT | os.O_EXCL)
    same(x.get(k.first), original)


@each("O_EXCL makes it once")
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    x.unlink(k.first)
    with x.opened(k.first, W | os.O_CREAT | os.O_EXCL) as fd:
        x.calls.write(fd, k.content(2))
        fails(errno.EEXIST, x.calls.open, x.path(k.first), W | os.O_CREAT | os.O_EXCL)
    same(x.get(k.first), k.content(2))


@each("O_CREAT of what is there changes nothing")
def _(x: Place, k: Kind) -> None:
    original = k.begin(x)
    before = x.stat(k.first)
    with x.opened(k.first, W | os.O_CREAT, 0o600):
        pass
    after = x.stat(k.first)
    same((after.st_ino, after.st_mode, after.st_mtime_ns), (before.st_ino, before.st_mode, before.st_mtime_ns))
    same(x.get(k.first), original)


@each("O_TRUNC replaces it, and keeps the number")
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    number = x.stat(k.first).st_ino
    x.put(k.first, k.content(2))
    same((x.get(k.first), x.stat(k.first).st_ino), (k.content(2), number))


@each("O_TRUNC empties it at once", document=False)
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    with x.opened(k.first, W | os.O_TRUNC):
        same((x.stat(k.first).st_size, x.get(k.first)), (0, b""))
    same((x.stat(k.first).st_size, x.get(k.first)), (0, b""))


@each("a descriptor for reading does not write, one for writing does not read")
def _(x: Place, k: Kind) -> None:
    original = k.begin(x)
    with x.opened(k.first, R) as fd:
        fails(errno.EBADF, x.calls.pwrite, fd, b"x", 0)
        fails(errno.EINVAL, x.calls.ftruncate, fd, 1)
    with x.opened(k.first, W) as fd:
        fails(errno.EBADF, x.calls.pread, fd, 1, 0)
    same(x.get(k.first), original)


@each("its parent is missing: ENOENT")
def _(x: Place, k: Kind) -> None:
    name = f"nothing/{k.first}"
    fails(errno.ENOENT, x.calls.open, x.path(name), NEW)
    fails(errno.ENOENT, x.mkdir, name)
    k.begin(x)
    fails(errno.ENOENT, x.rename, k.first, name)
    fails(errno.ENOENT, x.link, k.first, name)


@each("it is no directory: ENOTDIR")
def _(x: Place, k: Kind) -> None:
    original = k.begin(x)
    fails(errno.ENOTDIR, x.calls.open, x.path(f"{k.first}/0"), NEW)
    fails(errno.ENOTDIR, x.stat, f"{k.first}/0")
    fails(errno.ENOTDIR, x.mkdir, f"{k.first}/0")
    fails(errno.ENOTDIR, x.unlink, f"{k.first}/0")
    fails(errno.ENOTDIR, x.rmdir, k.first)
    fails(errno.ENOTDIR, x.names, k.first)
    same(x.get(k.first), original)


@each("O_TMPFILE: EOPNOTSUPP", kernel=True)
def _(x: Place, k: Kind) -> None:
    fails(errno.EOPNOTSUPP, x.calls.open, x.path(k.directory), W | os.O_TMPFILE)


@each("O_DIRECT and O_SYNC are accepted", kernel=True)
def _(x: Place, k: Kind) -> None:
    with x.opened(k.first, NEW | os.O_SYNC) as fd:
        x.calls.write(fd, k.content(2))
    same(x.get(k.first), k.content(2))
    with x.opened(k.first, R | os.O_DIRECT) as fd:
        buffer = mmap.mmap(-1, 4096)
        same((os.preadv(fd, [buffer], 0), buffer[:SIZE]), (SIZE, k.content(2)))


# ---- write, append, truncate


@each("pieces in any order")
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    data = k.content(2)
    with x.opened(k.first, NEW) as fd:
        for at in (900, 100, 500, 0, 700, 300):
            x.calls.pwrite(fd, data[at : at + 200], at)
    same(x.get(k.first), data)


@each("a piece of an old one")
def _(x: Place, k: Kind) -> None:
    original = k.begin(x)
    changed = (
        original.replace(b'"n": 1', b'"n": 7').replace(b'"n": 0', b'"n": 8') if k.document else b"X" + original[1:]
    )
    with x.opened(k.first, W) as fd:
        x.calls.pwrite(fd, changed[:-1], 0)
    same(x.get(k.first), changed)


@each("a gap is zeros", document=False)
def _(x: Place, k: Kind) -> None:
    original = k.begin(x)
    with x.opened(k.first, RW) as fd:
        x.calls.pwrite(fd, b"end", 2000)
        same(x.calls.pread(fd, 5000, 0), original + bytes(2000 - len(original)) + b"end")
    same(x.get(k.first), original + bytes(2000 - len(original)) + b"end")


@each("O_APPEND writes at the end, whoever else does")
def _(x: Place, k: Kind) -> None:
    original = k.begin(x)
    with x.opened(k.first, W | os.O_APPEND) as one, x.opened(k.first, W | os.O_APPEND) as two:
        for fd in (one, two, one):
            x.calls.write(fd, b" \n")
    same(x.get(k.first), original + 3 * b" \n")


@each("truncate by name, shorter and longer", document=False)
def _(x: Place, k: Kind) -> None:
    original = k.begin(x)
    x.truncate(k.first, 2)
    same((x.get(k.first), x.stat(k.first).st_size), (original[:2], 2))
    x.truncate(k.first, 6)
    same((x.get(k.first), x.stat(k.first).st_size), (original[:2] + bytes(4), 6))
    x.truncate(k.first, 0)
    same((x.get(k.first), x.stat(k.first).st_size), (b"", 0))


@each("truncate by descriptor", document=False)
def _(x: Place, k: Kind) -> None:
    original = k.begin(x)
    with x.opened(k.first, RW) as fd:
        x.calls.ftruncate(fd, 3)
        same((x.calls.pread(fd, 10, 0), x.calls.fstat(fd).st_size), (original[:3], 3))
        x.calls.pwrite(fd, b"xyz", 3)
        x.calls.ftruncate(fd, 5)
    same(x.get(k.first), original[:3] + b"xy")


@each("truncate by name while another has it open")
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    with x.opened(k.first, RW) as fd:
        x.calls.ftruncate(fd, 0)
        x.calls.pwrite(fd, k.content(2) + b"    ", 0)
        x.truncate(k.first, SIZE)
        same(x.calls.fstat(fd).st_size, SIZE)
    same(x.get(k.first), k.content(2))


@each("too large: EFBIG")
def _(x: Place, k: Kind) -> None:
    if k.plain:
        return
    original = k.begin(x)
    limit = 16 << 20 if k.document else 2 << 30
    with x.opened(k.first, RW) as fd:
        fails(errno.EFBIG, x.calls.pwrite, fd, b"x", limit)
        fails(errno.EFBIG, x.calls.ftruncate, fd, limit + 1)
        same(x.calls.fstat(fd).st_size, len(original))
    fails(errno.EFBIG, x.truncate, k.first, limit + 1)
    same(x.get(k.first), original)


@each("many descriptors write, each sees all")
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    data = k.content(4)
    with x.opened(k.first, RW) as one, x.opened(k.first, RW) as two, x.opened(k.first) as three:
        x.calls.ftruncate(one, 0)
        x.calls.pwrite(one, data[:500], 0)
        x.calls.pwrite(two, data[500:], 500)
        same([x.calls.pread(fd, 2000, 0) for fd in (one, two, three)], 3 * [data])
    same(x.get(k.first), data)


@each("is read as it is before it is closed")
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    with x.opened(k.first, NEW) as fd:
        x.calls.write(fd, k.content(5))
        same((x.get(k.first), x.stat(k.first).st_size), (k.content(5), SIZE))


@each("a copy of a descriptor is closed before the first write", kernel=True)
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    with x.opened(k.first, NEW) as fd:
        os.write(fd, k.content(2))
        os.close(os.dup(fd))
        os.ftruncate(fd, 0)
        os.close(os.dup(fd)) if not k.document else None
        os.pwrite(fd, k.content(3), 0)
    same(x.get(k.first), k.content(3))


@each("fsync and fdatasync")
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    with x.opened(k.first, NEW) as fd:
        x.calls.write(fd, k.content(2))
        x.calls.fsync(fd)
        same(x.get(k.first), k.content(2))
        x.calls.pwrite(fd, k.content(3), 0)
        x.calls.fsync(fd)
    with x.opened(k.first) as fd:
        x.calls.fsync(fd)
    same(x.get(k.first), k.content(3))


# ---- names


@each("rename: number, bytes, mode and time go along", two=True)
def _(x: Place, k: Kind) -> None:
    original = k.begin(x)
    x.chmod(k.first, 0o640)
    x.utime(k.first, 1_234_567_890_123_456_789)
    before = x.stat(k.first)
    x.rename(k.first, k.second)
    after = x.stat(k.second)
    same(x.exists(k.first), False)
    same((x.get(k.second), after.st_ino, after.st_mode), (original, before.st_ino, before.st_mode))
    same(after.st_mtime_ns // 1000, before.st_mtime_ns // 1000)
    same(k.first.rpartition("/")[2] in x.names(k.directory), False)
    same(k.second.rpartition("/")[2] in x.names(k.second.rpartition("/")[0]), True)


@each("rename over another", two=True)
def _(x: Place, k: Kind) -> None:
    original = k.begin(x)
    x.put(k.second, k.content(2))
    x.rename(k.first, k.second)
    same((x.exists(k.first), x.get(k.second)), (False, original))
    x.put(k.first, k.content(3))
    x.rename(k.first, k.second)
    same((x.exists(k.first), x.get(k.second)), (False, k.content(3)))


@each("rename from a temporary name beside it")
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    temporary = f"{k.first}.0123456789abcdef0123456789abcdef.partial"
    x.put(temporary, k.content(2))
    number = x.stat(temporary).st_ino
    x.rename(temporary, k.first)
    same((x.get(k.first), x.exists(temporary), x.stat(k.first).st_ino), (k.content(2), False, number))


@each("rename of what is missing: ENOENT")
def _(x: Place, k: Kind) -> None:
    original = k.begin(x)
    fails(errno.ENOENT, x.rename, "c/0/3.partial", k.first)
    same(x.get(k.first), original)


@each("rename to itself")
def _(x: Place, k: Kind) -> None:
    original = k.begin(x)
    x.rename(k.first, k.first)
    same(x.get(k.first), original)


@each("rename to a directory: EISDIR; of one to it: ENOTDIR")
def _(x: Place, k: Kind) -> None:
    original = k.begin(x)
    x.mkdir("dir")
    fails(errno.EISDIR, x.rename, k.first, "dir")
    fails(errno.ENOTDIR, x.rename, "dir", k.first)
    same(x.get(k.first), original)


@each("RENAME_NOREPLACE", two=True, kernel=True)
def _(x: Place, k: Kind) -> None:
    original = k.begin(x)
    x.put(k.second, k.content(2))
    fails(errno.EEXIST, renameat2, x.path(k.first), x.path(k.second), 1)
    same((x.get(k.first), x.get(k.second)), (original, k.content(2)))
    x.unlink(k.second)
    renameat2(x.path(k.first), x.path(k.second), 1)
    same((x.exists(k.first), x.get(k.second)), (False, original))


@each("RENAME_EXCHANGE and RENAME_WHITEOUT: EINVAL", kernel=True)
def _(x: Place, k: Kind) -> None:
    original = k.begin(x)
    x.put("c/1/x.partial", b"x")
    for flags in (2, 4):
        fails(
            [errno.EINVAL, errno.EPERM] if flags == 4 else errno.EINVAL,
            renameat2,
            x.path("c/1/x.partial"),
            x.path(k.first),
            flags,
        )
    same((x.get(k.first), x.get("c/1/x.partial")), (original, b"x"))


@each("unlink: gone, and made anew it has another number")
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    number = x.stat(k.first).st_ino
    with x.opened(k.first, RW) as fd:
        x.unlink(k.first)
        same(x.exists(k.first), False)
        same(k.first.rpartition("/")[2] in x.names(k.directory), False)
        fails(errno.ENOENT, x.unlink, k.first)
        x.put(k.first, k.content(2))
        same(x.calls.fstat(fd).st_ino, number)
        same(x.stat(k.first).st_ino == number, False)
    same(x.get(k.first), k.content(2))


@each("who has it open keeps it when it is removed")
def _(x: Place, k: Kind) -> None:
    original = k.begin(x)
    with x.opened(k.first) as fd:
        same(x.calls.fstat(fd).st_nlink, 1)
        x.unlink(k.first)
        same((x.calls.pread(fd, 5000, 0), x.calls.fstat(fd).st_size), (original, len(original)))
        same(x.calls.fstat(fd).st_nlink, 0)
        same(x.calls.pread(fd, 2, 1), original[1:3])


@each("who has it open keeps it when it is replaced")
def _(x: Place, k: Kind) -> None:
    original = k.begin(x)
    temporary = f"{k.first}.0123456789abcdef0123456789abcdef.partial"
    with x.opened(k.first) as fd:
        x.put(temporary, k.content(2))
        x.rename(temporary, k.first)
        same((x.calls.pread(fd, 5000, 0), x.calls.fstat(fd).st_size), (original, len(original)))
        same((x.calls.fstat(fd).st_nlink, x.stat(k.first).st_nlink), (0, 1))
        same(x.get(k.first), k.content(2))


@each("who writes to it after it was removed does not bring it back")
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    with x.opened(k.first, RW) as fd:
        x.unlink(k.first)
        x.calls.pwrite(fd, k.content(2), 0)
        same(x.calls.pread(fd, SIZE, 0), k.content(2))
        x.calls.fsync(fd)
        same(x.calls.fstat(fd).st_nlink, 0)
    same(x.exists(k.first), False)
    same(k.first.rpartition("/")[2] in x.names(k.directory), False)


@each("who writes to it after it was replaced does not change the new one")
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    temporary = f"{k.first}.0123456789abcdef0123456789abcdef.partial"
    with x.opened(k.first, RW) as fd:
        x.put(temporary, k.content(2))
        x.rename(temporary, k.first)
        x.calls.pwrite(fd, k.content(3), 0)
        same(x.calls.pread(fd, SIZE, 0), k.content(3))
    same(x.get(k.first), k.content(2))


@each("who writes to it while it gets another name writes there", two=True)
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    with x.opened(k.first, RW) as fd:
        x.rename(k.first, k.second)
        x.calls.ftruncate(fd, 0)
        x.calls.pwrite(fd, k.content(3), 0)
    same((x.exists(k.first), x.get(k.second)), (False, k.content(3)))


@each("link: a file of its own", two=True)
def _(x: Place, k: Kind) -> None:
    original = k.begin(x)
    if x.exists(k.second):
        fails(errno.EEXIST, x.link, k.first, k.second)
        x.unlink(k.second)
    x.link(k.first, k.second)
    same((x.get(k.first), x.get(k.second)), (original, original))
    fails(errno.EEXIST, x.link, k.first, k.second)
    if not k.plain:
        same((x.stat(k.first).st_nlink, x.stat(k.first).st_ino == x.stat(k.second).st_ino), (1, False))
        x.put(k.first, k.content(2))
        same((x.get(k.first), x.get(k.second)), (k.content(2), original))
    x.unlink(k.first)
    same((x.exists(k.first), x.get(k.second)), (False, original))


@each("link of a temporary name, then unlink of that")
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    x.unlink(k.first)
    temporary = f"{k.first}.0123456789abcdef0123456789abcdef.partial"
    x.put(temporary, k.content(2))
    x.link(temporary, k.first)
    fails(errno.EEXIST, x.link, temporary, k.first)
    x.unlink(temporary)
    same((x.get(k.first), x.exists(temporary)), (k.content(2), False))


@each("a name of 256 bytes: ENAMETOOLONG")
def _(x: Place, k: Kind) -> None:
    original = k.begin(x)
    long = f"{k.directory}/{'x' * 256}".lstrip("/")
    for call in (x.stat, x.mkdir, x.unlink, x.rmdir):
        fails(errno.ENAMETOOLONG, call, long)
    fails(errno.ENAMETOOLONG, x.calls.open, x.path(long), NEW)
    fails(errno.ENAMETOOLONG, x.rename, k.first, long)
    fails(errno.ENAMETOOLONG, x.link, k.first, long)
    same(x.get(k.first), original)


@each("mkdir of its name: EEXIST")
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    fails(errno.EEXIST, x.mkdir, k.first)


@each("symbolic links, pipes and devices beside it: EPERM", kernel=True)
def _(x: Place, k: Kind) -> None:
    name = x.path(f"{k.directory}/other".lstrip("/"))
    fails(errno.EPERM, os.symlink, "target", name)
    fails(errno.EPERM, os.mkfifo, name)
    fails(errno.EPERM, os.mknod, name, 0o600 | stat.S_IFSOCK)
    same(os.path.lexists(name), False)


@each("every entry of its directory has a number, the file's own", kernel=True)
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    with os.scandir(x.path(k.directory)) as entries:
        status = {entry.name: entry.inode() for entry in entries}
    same(all(status.values()), True)
    same(status[k.first.rpartition("/")[2]], x.stat(k.first).st_ino)


# ---- mode, times, attributes


@each("chmod is shown")
def _(x: Place, k: Kind) -> None:
    original = k.begin(x)
    for mode in (0o600, 0o755, 0o444):
        x.chmod(k.first, mode)
        same(stat.S_IMODE(x.stat(k.first).st_mode), mode)
    same(x.get(k.first), original)


@each("the mode it is made with", kernel=True)
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    x.unlink(k.first)
    with x.opened(k.first, NEW, 0o640) as fd:
        os.write(fd, k.content(2))
    same(stat.S_IMODE(x.stat(k.first).st_mode), 0o640)


@each("set-user-id and set-group-id: EPERM", kernel=True)
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    path = x.path(k.first)
    for mode in (0o4755, 0o2755, 0o6755):
        fails(errno.EPERM, os.chmod, path, mode)
    same(stat.S_IMODE(x.stat(k.first).st_mode), 0o644)


@each("chown to its owner, and to others: EPERM", kernel=True)
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    path = x.path(k.first)
    os.chown(path, os.getuid(), os.getgid())
    os.chown(path, -1, -1)
    fails(errno.EPERM, os.chown, path, os.getuid() + 1, -1)
    fails(errno.EPERM, os.chown, path, -1, os.getgid() + 1)


@each("utimens is shown, to the nanosecond")
def _(x: Place, k: Kind) -> None:
    original = k.begin(x)
    for when in (1_234_567_890_123_456_789, 1, 4_000_000_000_000_000_000):
        x.utime(k.first, when)
        same(x.stat(k.first).st_mtime_ns, when)
    same(x.get(k.first), original)


@each("utimens through the descriptor, before it is closed", kernel=True)
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    with x.opened(k.first, NEW) as fd:
        os.write(fd, k.content(2))
        os.utime(fd, ns=(5_000_000_000, 5_000_000_000))
        os.fchmod(fd, 0o600)
    status = x.stat(k.first)
    same((status.st_mtime_ns, stat.S_IMODE(status.st_mode), x.get(k.first)), (5_000_000_000, 0o600, k.content(2)))


@each("what is written moves the time, to now")
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    x.utime(k.first, 1_000_000_000)
    before = time.time()
    x.put(k.first, k.content(2))
    same(before - 1 < x.stat(k.first).st_mtime < time.time() + 1, True)


@each("setxattr: EOPNOTSUPP", plain=False, kernel=True)
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    path = x.path(k.first)
    acl = struct.pack("<IHHIHHIHHI", 2, 1, 6, 0xFFFFFFFF, 4, 4, 0xFFFFFFFF, 32, 4, 0xFFFFFFFF)
    for name in ("user.note", "user.shardfs.state", "system.posix_acl_access"):
        fails(errno.EOPNOTSUPP, os.setxattr, path, name, acl if name.startswith("system") else b"x")
    fails(errno.EOPNOTSUPP, os.removexattr, path, "user.note")


@each("its state is told", plain=False)
def _(x: Place, k: Kind) -> None:
    x.put(k.first, k.content(2))
    wanted = {"orphan": b"orphan", "scratch": b"scratch", "document": b"published"}.get(k.name, b"journaled")
    same(x.xattr(k.first, "state"), wanted)
    if wanted != b"published":
        same(int(x.xattr(k.first, "lsn")) > 0, True)
    with x.opened(k.first, W) as fd:
        x.calls.pwrite(fd, k.content(3), 0)
        same(x.xattr(k.first, "state"), wanted if wanted in (b"orphan", b"scratch") else b"open")


# ---- mapping, locks, copies


@each("a shared mapping, and what is stored in it", kernel=True)
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    x.put(k.first, k.content(2))
    with x.opened(k.first, RW) as fd:
        shared = mmap.mmap(fd, SIZE)
    shared[:] = k.content(3)
    shared.close()
    until(lambda: x.get(k.first) == k.content(3))
    with x.opened(k.first, RW) as fd, mmap.mmap(fd, SIZE) as shared:
        shared[:] = k.content(4)
        shared.flush()
        same(os.pread(fd, SIZE, 0), k.content(4))
    same(x.get(k.first), k.content(4))


@each("a private mapping", kernel=True)
def _(x: Place, k: Kind) -> None:
    original = k.begin(x)
    with (
        x.opened(k.first) as fd,
        mmap.mmap(fd, len(original), mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as private,
    ):
        same(private[:], original)
        private[:2] = b"\0\0"
    same(x.get(k.first), original)


@each("flock, POSIX and OFD locks", kernel=True)
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    with x.opened(k.first, RW) as one, x.opened(k.first, RW) as two:
        fcntl.flock(one, fcntl.LOCK_EX)
        fails(errno.EWOULDBLOCK, fcntl.flock, two, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(one, fcntl.LOCK_UN)
        fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)
        exclusive = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
        fcntl.fcntl(one, 37, exclusive)
        fails(errno.EAGAIN, fcntl.fcntl, two, 37, exclusive)
        fcntl.lockf(one, fcntl.LOCK_UN)
    with x.opened(k.first, RW) as fd:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


@each("fallocate: EOPNOTSUPP", kernel=True, plain=False)
def _(x: Place, k: Kind) -> None:
    original = k.begin(x)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    with x.opened(k.first, RW) as fd:
        for mode in (0, 1, 3, 16):
            same((libc.fallocate(fd, mode, 0, 100), ctypes.get_errno()), (-1, errno.EOPNOTSUPP))
    same(x.get(k.first), original)


@each("copy_file_range and sendfile to it; FICLONE: EOPNOTSUPP", kernel=True)
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    x.put("c/1/x.partial", k.content(6))
    with x.opened("c/1/x.partial") as source, x.opened(k.first, NEW) as target:
        same(os.copy_file_range(source, target, SIZE), SIZE)
    same(x.get(k.first), k.content(6))
    with x.opened("c/1/x.partial") as source, x.opened(k.first, NEW) as target:
        same(os.sendfile(target, source, 0, SIZE), SIZE)
    same(x.get(k.first), k.content(6))
    with x.opened("c/1/x.partial") as source, x.opened(k.first, RW) as target:
        fails([errno.EOPNOTSUPP, errno.ENOTTY], fcntl.ioctl, target, 0x40049409, source)


# ---- publishing


@each("publishing changes neither number, size, time nor bytes, whoever has it open")
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    x.put(k.first, k.content(2))
    x.chmod(k.first, 0o600)
    before = x.stat(k.first)
    with x.opened(k.first) as fd:
        x.publish()
        same(x.calls.pread(fd, 5000, 0), k.content(2))
    after = x.stat(k.first)
    for member in ("st_ino", "st_size", "st_mtime_ns", "st_mode"):
        same(getattr(after, member), getattr(before, member))
    same(x.get(k.first), k.content(2))


@each("what was published can be written, renamed and removed again")
def _(x: Place, k: Kind) -> None:
    k.begin(x)
    for n in (2, 3):
        x.put(k.first, k.content(n))
        x.publish()
        same(x.get(k.first), k.content(n))
    if k.second:
        with suppress(FileNotFoundError):
            x.unlink(k.second)
        x.rename(k.first, k.second)
        x.publish()
        same((x.exists(k.first), x.get(k.second)), (False, k.content(3)))
        x.rename(k.second, k.first)
    x.unlink(k.first)
    x.publish()
    same(x.exists(k.first), False)
    x.put(k.first, k.content(4))
    x.publish()
    same(x.get(k.first), k.content(4))
