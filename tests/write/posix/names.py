"""Cases about names: mkdir, rmdir, unlink, rename, link, and kinds of files that are neither files nor directories."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from typing import TYPE_CHECKING

from tests.write.posix.cases import case, changes, fails, file, names_too_long, same

if TYPE_CHECKING:
    from pathlib import Path

NOREPLACE, EXCHANGE, WHITEOUT = 1, 2, 4


def number_of(path: Path) -> int:
    return os.lstat(path).st_ino


def directory(path: Path) -> Path:
    path.mkdir()
    return path


# ---- mkdir, rmdir


@case("mkdir/makes an empty directory")
def _(d: Path) -> None:
    os.mkdir(d / "x")
    same((stat.S_ISDIR(os.stat(d / "x").st_mode), os.listdir(d / "x"), os.listdir(d)), (True, [], ["x"]))


@case("mkdir/mode is that asked for without the umask")
def _(d: Path) -> None:
    for umask, mode in ((0o022, 0o755), (0o077, 0o151), (0o070, 0o345), (0, 0o777)):
        os.umask(umask)
        os.mkdir(d / f"{umask}-{mode}", mode)
        same(stat.S_IMODE(os.stat(d / f"{umask}-{mode}").st_mode), mode & ~umask)


@case("mkdir/moves the times of the directory around")
def _(d: Path) -> None:
    changes(d, lambda: os.mkdir(d / "x"))


@case("mkdir/what exists: EEXIST")
def _(d: Path) -> None:
    for path in (file(d / "f"), directory(d / "x")):
        fails(errno.EEXIST, os.mkdir, path)


@case("mkdir/names that are too long")
def _(d: Path) -> None:
    names_too_long(os.mkdir, d)


@case("mkdir/errors")
def _(d: Path) -> None:
    fails(errno.ENOENT, os.mkdir, d / "none" / "x")
    fails(errno.ENOTDIR, os.mkdir, file(d / "f") / "x")


@case("mkdir/in a directory that was removed: ENOENT")
def _(d: Path) -> None:
    fd = os.open(directory(d / "x"), os.O_RDONLY)
    os.rmdir(d / "x")
    fails(errno.ENOENT, os.mkdir, "y", dir_fd=fd)
    fails(errno.ENOENT, os.open, "y", os.O_CREAT | os.O_WRONLY, dir_fd=fd)
    same(os.listdir(fd), [])
    os.close(fd)


@case("rmdir/removes")
def _(d: Path) -> None:
    os.rmdir(directory(d / "x"))
    fails(errno.ENOENT, os.stat, d / "x")
    same(os.listdir(d), [])


@case("rmdir/moves the times of the directory around")
def _(d: Path) -> None:
    directory(d / "x")
    changes(d, lambda: os.rmdir(d / "x"))


@case("rmdir/with something inside: ENOTEMPTY")
def _(d: Path) -> None:
    file(directory(d / "x") / "f")
    fails((errno.ENOTEMPTY, errno.EEXIST), os.rmdir, d / "x")
    same((d / "x" / "f").read_bytes(), b"content")
    os.unlink(d / "x" / "f")
    os.rmdir(d / "x")


@case("rmdir/errors")
def _(d: Path) -> None:
    fails(errno.ENOENT, os.rmdir, d / "none")
    fails(errno.ENOTDIR, os.rmdir, file(d / "f"))
    fails(errno.ENOTDIR, os.rmdir, d / "f" / "x")
    fails(errno.ENAMETOOLONG, os.rmdir, d / ("x" * 256))
    fails(errno.EINVAL, os.rmdir, f"{directory(d / 'x')}/.")
    fails((errno.ENOTEMPTY, errno.EEXIST, errno.EINVAL), os.rmdir, f"{d / 'x'}/..")


# ---- unlink


@case("unlink/moves the times of the directory")
def _(d: Path) -> None:
    file(d / "f")
    changes(d, lambda: os.unlink(d / "f"))


@case("unlink/errors")
def _(d: Path) -> None:
    fails(errno.ENOENT, os.unlink, d / "none" / "x")
    fails(errno.ENOTDIR, os.unlink, file(d / "f") / "x")
    fails(errno.ENAMETOOLONG, os.unlink, d / ("x" * 256))
    fails((errno.EISDIR, errno.EPERM), os.unlink, directory(d / "x"))


@case("unlink/an open file that was renamed is there until it is closed")
def _(d: Path) -> None:
    fd = os.open(file(d / "f"), os.O_RDONLY)
    os.rename(d / "f", d / "g")
    os.unlink(d / "g")
    same((os.fstat(fd).st_size, os.pread(fd, 10, 0)), (7, b"content"))
    os.close(fd)


# ---- rename


@case("rename/of a directory keeps what is in it")
def _(d: Path) -> None:
    file(directory(directory(d / "x") / "y") / "f")
    number = number_of(d / "x")
    os.rename(d / "x", d / "z")
    same((number_of(d / "z"), (d / "z" / "y" / "f").read_bytes(), os.listdir(d)), (number, b"content", ["z"]))


@case("rename/a directory to another place, and .. with it")
def _(d: Path) -> None:
    file(directory(d / "x") / "f")
    directory(d / "y")
    os.rename(d / "x", d / "y" / "z")
    same((d / "y" / "z" / ".." / "z" / "f").read_bytes(), b"content")
    same(os.path.samefile(d / "y" / "z" / "..", d / "y"), True)


@case("rename/many times over the same name, with readers")
def _(d: Path) -> None:
    for i in range(100):
        os.rename(file(d / f"t{i}", b"%d" % i * 50), d / "f")
        same((d / "f").read_bytes(), b"%d" % i * 50)
    same(os.listdir(d), ["f"])


@case("rename/a directory over an empty one")
def _(d: Path) -> None:
    file(directory(d / "x") / "f")
    os.rename(d / "x", directory(d / "y"))
    same((os.listdir(d), os.listdir(d / "y")), (["y"], ["f"]))


@case("rename/a directory over one with something inside: ENOTEMPTY")
def _(d: Path) -> None:
    file(directory(d / "x") / "f")
    file(directory(d / "y") / "g")
    fails((errno.ENOTEMPTY, errno.EEXIST), os.rename, d / "x", d / "y")
    same((os.listdir(d / "x"), os.listdir(d / "y")), (["f"], ["g"]))


@case("rename/a directory into itself: EINVAL")
def _(d: Path) -> None:
    directory(directory(d / "x") / "y")
    fails(errno.EINVAL, os.rename, d / "x", d / "x" / "z")
    fails(errno.EINVAL, os.rename, d / "x", d / "x" / "y" / "z")


@case("rename/of . and ..")
def _(d: Path) -> None:
    directory(d / "x")
    for old in (f"{d}/x/.", f"{d}/x/.."):
        fails((errno.EINVAL, errno.EBUSY), os.rename, old, d / "y")


@case("rename/errors")
def _(d: Path) -> None:
    fails(errno.ENOENT, os.rename, d / "none", d / "b")
    fails(errno.ENOENT, os.rename, d / "none" / "a", d / "b")
    fails(errno.ENOENT, os.rename, file(d / "f"), d / "none" / "b")
    fails(errno.ENOTDIR, os.rename, d / "f" / "x", d / "b")
    fails(errno.ENOTDIR, os.rename, d / "f", d / "f" / "x")
    fails(errno.ENAMETOOLONG, os.rename, d / ("x" * 256), d / "b")
    fails(errno.ENAMETOOLONG, os.rename, d / "f", d / ("x" * 256))


@case("rename/the longest name")
def _(d: Path) -> None:
    os.rename(file(d / "f"), d / ("x" * 255))
    same(os.listdir(d), ["x" * 255])


@case("rename/moves the times of both directories")
def _(d: Path) -> None:
    file(directory(d / "x") / "f")
    directory(d / "y")
    changes(d / "x", lambda: os.rename(d / "x" / "f", d / "y" / "f"))
    changes(d / "y", lambda: os.rename(d / "y" / "f", d / "x" / "f"))


@case("rename/to another file system: EXDEV")
def _(d: Path) -> None:
    places = [place for place in ("/dev/shm", "/tmp", "/") if os.stat(place).st_dev != os.stat(d).st_dev]
    with tempfile.TemporaryDirectory(dir=places[0]) as other:
        fails(errno.EXDEV, os.rename, file(d / "f"), f"{other}/f")
        fails(errno.EXDEV, os.link, d / "f", f"{other}/f")


# ---- link


@case("link/errors")
def _(d: Path) -> None:
    fails(errno.EEXIST, os.link, file(d / "a"), file(d / "b"))
    fails(errno.EEXIST, os.link, d / "a", d / "a")
    fails(errno.ENOENT, os.link, d / "none", d / "c")
    fails(errno.ENOENT, os.link, d / "a", d / "none" / "c")
    fails(errno.ENOTDIR, os.link, d / "a", d / "a" / "c")
    fails(errno.ENAMETOOLONG, os.link, d / "a", d / ("x" * 256))
    fails(errno.EPERM, os.link, directory(d / "x"), d / "y")
    same(sorted(os.listdir(d)), ["a", "b", "x"])


@case("link/moves the times of the directory")
def _(d: Path) -> None:
    file(d / "a")
    changes(d, lambda: os.link(d / "a", d / "b"))


# ---- neither files nor directories


@case("mknod/a regular file")
def _(d: Path) -> None:
    os.mknod(d / "f", stat.S_IFREG | 0o640)
    same((os.stat(d / "f").st_mode, os.stat(d / "f").st_size), (stat.S_IFREG | 0o640, 0))
    fails(errno.EEXIST, os.mknod, d / "f", stat.S_IFREG | 0o640)


@case("names/any bytes but the slash")
def _(d: Path) -> None:
    names = [b"\xff\xfe", "gr\u00fc\u00df".encode(), b" ", b"new\nline", b"-rf", b"a\\b", b"*", b"..."]
    for name in names:
        path = os.path.join(os.fsencode(d), name)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    same(sorted(os.listdir(os.fsencode(d))), sorted(names))
