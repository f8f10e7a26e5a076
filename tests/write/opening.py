"""Opens a file with each combination of flags, writes and reads; prints what happened as JSON.

`python -m tests.write.opening DIRECTORY`. The same must come of a plain directory and of a mount.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import stat
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ACCESS = ("O_RDONLY", "O_WRONLY", "O_RDWR")
FLAGS = ("O_CREAT", "O_EXCL", "O_TRUNC", "O_APPEND")
BEFORE = b"0123456789"


def attempt(call: Callable[[], object]) -> object:
    """What it gives, or the name of its errno."""
    try:
        value = call()
    except OSError as e:
        return errno.errorcode[e.errno or 0]
    return value.decode() if isinstance(value, bytes) else value


def use(fd: int) -> list[object]:
    """What can be done with a descriptor: each step sees what the one before left."""
    steps: list[Callable[[], object]] = [
        lambda: os.read(fd, 4),
        lambda: os.write(fd, b"abc"),
        lambda: os.pwrite(fd, b"XY", 1),
        lambda: os.pread(fd, 20, 0),
        lambda: os.lseek(fd, 0, os.SEEK_CUR),
        lambda: os.ftruncate(fd, 12),
        lambda: os.write(fd, b"end"),
        lambda: os.fstat(fd).st_size if stat.S_ISREG(os.fstat(fd).st_mode) else 0,
        lambda: os.fsync(fd),
    ]
    return [attempt(step) for step in steps]


def open_and_use(path: str, flags: int) -> list[object]:
    try:
        fd = os.open(path, flags, 0o640)
    except OSError as e:
        return [errno.errorcode[e.errno or 0]]
    outcome = use(fd)
    return [*outcome, attempt(lambda: os.close(fd))]


def after(path: str) -> list[object]:
    """What is there afterwards."""
    if not os.path.exists(path):
        return [None]
    if os.path.isdir(path):
        return ["directory"]
    status = os.stat(path)
    with open(path, "rb") as file:
        return [file.read().decode(), status.st_size, oct(status.st_mode)]


def main(directory: str) -> dict[str, list[object]]:
    told = {}
    os.umask(0o022)
    for kind in ("missing", "file", "directory"):
        for access, *chosen in itertools.product(ACCESS, *((flag, "") for flag in FLAGS)):
            names = [access, *filter(None, chosen)]
            path = f"{directory}/{kind}-{'-'.join(names)}"
            if kind == "file":
                with open(path, "wb") as file:
                    file.write(BEFORE)
            elif kind == "directory":
                os.mkdir(path)
            flags = 0
            for name in names:
                flags |= getattr(os, name)
            told[f"{kind} {'|'.join(names)}"] = [*open_and_use(path, flags), *after(path)]
    return told


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
