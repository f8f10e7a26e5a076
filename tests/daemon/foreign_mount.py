"""Mounts a file system of type `fuse.shardfs` that is not of shardfs: its status is that of a file.

python -m tests.daemon.foreign_mount MOUNTPOINT FILE NAME
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from typing import Any

import mfusepy

STATUS = "/.shardfs/status.json"


class Foreign(mfusepy.Operations):  # type: ignore[misc]
    """One file in one directory, and an extended attribute with the number of the process."""

    def __init__(self, status: bytes) -> None:
        self._status = status

    def getattr(self, path: str, fh: Any = None) -> dict[str, Any]:
        if path in ("/", "/.shardfs"):
            return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
        if path != STATUS:
            raise mfusepy.FuseOSError(errno.ENOENT)
        return {"st_mode": stat.S_IFREG | 0o444, "st_nlink": 1, "st_size": len(self._status)}

    def readdir(self, path: str, fh: Any) -> list[str]:
        return [".", ".."]

    def read(self, path: str, size: int, offset: int, fh: Any) -> bytes:
        return self._status[offset : offset + size]

    def getxattr(self, path: str, name: str, position: int = 0) -> bytes:
        if name != "user.shardfs.pid":
            raise mfusepy.FuseOSError(errno.ENODATA)
        return b"%d" % os.getpid()


if __name__ == "__main__":
    mountpoint, file, name = sys.argv[1:]
    with open(file, "rb") as content:
        operations = Foreign(content.read())
    mfusepy.FUSE(operations, mountpoint, foreground=True, nothreads=True, subtype="shardfs", fsname=name)
