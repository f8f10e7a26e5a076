"""Makes each call that docs/semantics.md speaks of, on a mount and one chunk in it; prints the errno names as JSON.

Runs as a program of its own: `python -m tests.mount.calls MOUNT CHUNK SCRATCH`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import select
import socket
import sys
from collections.abc import Callable

Call = Callable[[], object]

FIGETBSZ, FS_IOC_GETFLAGS, FICLONE = 2, 0x80086601, 0x40049409


def with_open(path: str, flags: int, use: Callable[[int], object] = os.fstat) -> object:
    fd = os.open(path, flags)
    try:
        return use(fd)
    finally:
        os.close(fd)


def checked(status: int) -> int:
    if status < 0:
        raise OSError(ctypes.get_errno(), "")
    return status


def opening(mount: str, chunk: str) -> dict[str, Call]:
    new = f"{mount}/new"
    return {
        "open O_RDONLY": lambda: with_open(chunk, os.O_RDONLY),
        "open O_RDONLY|O_CREAT": lambda: with_open(chunk, os.O_RDONLY | os.O_CREAT),
        "open O_DIRECT": lambda: with_open(chunk, os.O_DIRECT, lambda fd: os.preadv(fd, [mmap.mmap(-1, 1 << 20)], 0)),
        "open O_PATH": lambda: with_open(chunk, os.O_PATH),
        "open O_RDWR": lambda: with_open(chunk, os.O_RDWR),
        "open O_WRONLY|O_TRUNC": lambda: with_open(chunk, os.O_WRONLY | os.O_TRUNC),
        "open O_WRONLY|O_APPEND": lambda: with_open(chunk, os.O_WRONLY | os.O_APPEND),
        "open O_TMPFILE": lambda: with_open(mount, os.O_TMPFILE | os.O_RDWR),
        "open O_DIRECTORY of a file": lambda: with_open(chunk, os.O_DIRECTORY),
        "create": lambda: with_open(new, os.O_RDONLY | os.O_CREAT),
        "open of nothing": lambda: with_open(new, os.O_RDONLY),
        "open below a file": lambda: with_open(f"{chunk}/x", os.O_RDONLY),
        "open of a long name": lambda: with_open(f"{mount}/{'x' * 256}", os.O_RDONLY),
        "read of a directory": lambda: with_open(mount, os.O_RDONLY, lambda fd: os.read(fd, 1)),
    }


def reading(chunk: str, scratch: int) -> dict[str, Call]:
    size = os.stat(chunk).st_size
    _reader, writer = os.pipe()

    def same(answer: object, wanted: object) -> None:
        if answer != wanted:
            raise OSError(errno.EBADMSG, f"{answer!r}")

    def using(use: Callable[[int], object], wanted: object = None) -> Call:
        def call() -> None:
            answer = with_open(chunk, os.O_RDONLY, use)
            if wanted is not None:
                same(answer, wanted)

        return call

    return {
        "read past the end": using(lambda fd: os.pread(fd, 10, 1 << 40), b""),
        "SEEK_DATA": using(lambda fd: os.lseek(fd, 0, os.SEEK_DATA), 0),
        "SEEK_HOLE": using(lambda fd: os.lseek(fd, 0, os.SEEK_HOLE), size),
        "mmap shared": using(lambda fd: len(mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)), size),
        "mmap private": using(lambda fd: len(mmap.mmap(fd, 0, mmap.MAP_PRIVATE)), size),
        "sendfile": using(lambda fd: os.sendfile(scratch, fd, 0, size), size),
        "splice": using(lambda fd: os.splice(fd, writer, 10), 10),
        "readahead": using(lambda fd: os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)),
        "copy_file_range": using(lambda fd: os.copy_file_range(fd, scratch, size)),
        "reflink": using(lambda fd: fcntl.ioctl(scratch, FICLONE, fd)),
        "fsync": using(os.fsync),
        "flock": using(lambda fd: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)),
        "fcntl read lock": using(lambda fd: fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)),
        "fcntl write lock": using(lambda fd: fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)),
        "lease": using(lambda fd: fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)),
        "poll": using(lambda fd: len(select.select([fd], [], [], 0)[0]), 1),
        "ioctl": using(lambda fd: fcntl.ioctl(fd, FS_IOC_GETFLAGS, bytearray(8))),
        "ftruncate": using(lambda fd: os.ftruncate(fd, 0)),
    }


def naming(mount: str, chunk: str, scratch: str) -> dict[str, Call]:
    new = f"{mount}/new"
    libc = ctypes.CDLL(None, use_errno=True)
    return {
        "mkdir": lambda: os.mkdir(new),
        "mkdir of what exists": lambda: os.mkdir(os.path.dirname(chunk)),
        "mknod": lambda: os.mkfifo(new),
        "bind": lambda: socket.socket(socket.AF_UNIX).bind(new),
        "symlink": lambda: os.symlink("x", new),
        "link": lambda: os.link(chunk, new),
        "link elsewhere": lambda: os.link(chunk, f"{scratch}/link"),
        "rename": lambda: os.rename(chunk, new),
        "rename elsewhere": lambda: os.rename(chunk, f"{scratch}/renamed"),
        "unlink": lambda: os.unlink(chunk),
        "rmdir": lambda: os.rmdir(os.path.dirname(chunk)),
        "chmod": lambda: os.chmod(chunk, 0o600),
        "chown": lambda: os.chown(chunk, 0, 0),
        "utimensat": lambda: os.utime(chunk),
        "truncate": lambda: os.truncate(chunk, 0),
        "setxattr": lambda: os.setxattr(chunk, "user.x", b""),
        "removexattr": lambda: os.removexattr(chunk, "user.shardfs.shard"),
        "getxattr of nothing": lambda: os.getxattr(chunk, "user.nothing"),
        "getxattr of an ACL": lambda: os.getxattr(chunk, "system.posix_acl_access"),
        "readlink": lambda: os.readlink(chunk),
        "inotify_add_watch": lambda: checked(libc.inotify_add_watch(libc.inotify_init(), os.fsencode(chunk), 0xFFF)),
        "execve": lambda: os.posix_spawn(chunk, [chunk], {}),
        "chdir": lambda: os.chdir(mount),
        "syncfs": lambda: with_open(mount, os.O_RDONLY, lambda fd: checked(libc.syncfs(fd))),
    }


def outcome(call: Call) -> str:
    try:
        call()
    except OSError as e:
        return errno.errorcode.get(e.errno or 0, str(e))
    return "ok"


def main(mount: str, chunk: str, scratch: str) -> None:
    file = os.open(f"{scratch}/file", os.O_RDWR | os.O_CREAT)
    calls = {**opening(mount, chunk), **reading(chunk, file), **naming(mount, chunk, scratch)}
    json.dump({name: outcome(call) for name, call in calls.items()}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
