"""Locks between processes: `python -m tests.write.locking DIRECTORY` prints what failed as JSON.

Each kind of lock must keep a second process out, let it in when the first one has gone, and let readers share.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Lock = Callable[[int, int, bool], None]

F_OFD_SETLK, F_OFD_SETLKW = 37, 38
ROUNDS = 300


def ofd(fd: int, kind: int, wait: bool) -> None:
    what = struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)
    fcntl.fcntl(fd, F_OFD_SETLKW if wait else F_OFD_SETLK, what)


def posix(fd: int, kind: int, wait: bool) -> None:
    what = struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)
    fcntl.fcntl(fd, fcntl.F_SETLKW if wait else fcntl.F_SETLK, what)


def flock(fd: int, kind: int, wait: bool) -> None:
    how = {fcntl.F_RDLCK: fcntl.LOCK_SH, fcntl.F_WRLCK: fcntl.LOCK_EX, fcntl.F_UNLCK: fcntl.LOCK_UN}[kind]
    fcntl.flock(fd, how if wait else how | fcntl.LOCK_NB)


def in_child(work: Callable[[], Any]) -> Callable[[], Any]:
    """Run it in another process; call what is returned for its result."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            told = json.dumps(work())
        except OSError as e:
            told = json.dumps(e.errno)
        os.write(send, told.encode())
        os._exit(0)
    os.close(send)

    def result() -> Any:
        with open(receive) as pipe:
            told = pipe.read()
        os.waitpid(pid, 0)
        return json.loads(told)

    return result


def excludes(path: str, lock: Lock, mine: int, theirs: int) -> bool:
    """Whether my lock keeps another process from its."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    lock(fd, mine, True)

    def attempt() -> None:
        other = os.open(path, os.O_RDWR)
        lock(other, theirs, False)

    kept_out = in_child(attempt)() is not None
    os.close(fd)
    return kept_out


def counted(path: str, lock: Lock) -> int:
    """Two processes that count in one file, under the lock."""
    with open(path, "wb") as file:
        file.write(b"0")

    def count() -> None:
        fd = os.open(path, os.O_RDWR)
        for _ in range(ROUNDS):
            lock(fd, fcntl.F_WRLCK, True)
            number = int(os.pread(fd, 20, 0))
            os.pwrite(fd, b"%d" % (number + 1), 0)
            lock(fd, fcntl.F_UNLCK, True)
        os.close(fd)

    for result in [in_child(count) for _ in range(2)]:
        result()
    with open(path, "rb") as counted:
        return int(counted.read())


def main(directory: str) -> list[str]:
    failed = []
    for lock in (ofd, posix, flock):
        path = f"{directory}/{lock.__name__}"
        checks = {
            "a writer keeps a writer out": excludes(path, lock, fcntl.F_WRLCK, fcntl.F_WRLCK),
            "a writer keeps a reader out": excludes(path, lock, fcntl.F_WRLCK, fcntl.F_RDLCK),
            "a reader keeps a writer out": excludes(path, lock, fcntl.F_RDLCK, fcntl.F_WRLCK),
            "readers share": not excludes(path, lock, fcntl.F_RDLCK, fcntl.F_RDLCK),
            "nothing is left of a process that has gone": not excludes(path, lock, fcntl.F_UNLCK, fcntl.F_WRLCK),
            "two processes count": counted(path, lock) == 2 * ROUNDS,
        }
        failed += [f"{lock.__name__}: {what}" for what, holds in checks.items() if not holds]
    return failed


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
