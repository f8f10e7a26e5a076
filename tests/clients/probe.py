"""Asks a mount for what it knows, again and again: `python probe.py MOUNT FILE SECONDS`; prints the slowest answers.

A program of its own, without imports of weight: it may hang in the mount.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def read(path: str) -> None:
    """From the daemon: the kernel is made to forget the file's pages."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if len(os.read(fd, 1 << 20)) == 0:
            raise AssertionError("nothing was read")
    finally:
        os.close(fd)


def main(mount: str, file: str, seconds: float) -> None:
    calls: dict[str, Callable[[], object]] = {
        "read": lambda: read(file),
        "list": lambda: os.listdir(mount),
        "statfs": lambda: os.statvfs(mount),
        "status": lambda: read(f"{mount}/.shardfs/status.json"),
        "xattr": lambda: os.getxattr(mount, "user.shardfs.pid"),
    }
    slowest = dict.fromkeys(calls, 0.0)
    stop, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < stop:
        for name, ask in calls.items():
            start_s = time.monotonic()
            ask()
            slowest[name] = max(slowest[name], time.monotonic() - start_s)
        rounds += 1
        time.sleep(0.02)
    print(json.dumps({**slowest, "rounds": rounds}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
