"""The mounts of this machine, as /proc/PID/mountinfo lists them. No function accesses a mount of shardfs."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

FS_TYPE = "fuse.shardfs"


class MountInfo(NamedTuple):
    """One line of /proc/PID/mountinfo (proc_pid_mountinfo(5)).

    Args:
        source: what is mounted: for shardfs the name of its source.
        options: the options of this mount, such as `ro`, not those of its file system.
        device: `MAJOR:MINOR` of the file system; its files have this `st_dev`.
        owner: the user who mounted a FUSE file system; None for others.
        root: the mounted directory of the file system; not `/` for a bind mount of a part of it.
        number: the id of this mount. `parent` is the id of the mount that it is attached to.
    """

    mountpoint: str
    type: str
    source: str
    options: frozenset[str] = frozenset()
    device: str = ""
    owner: int | None = None
    root: str = "/"
    number: int = 0
    parent: int = 0


def entries(process: int | str = "self") -> Iterator[MountInfo]:
    """Yield all mounts that a process sees; `self` is this one. The order does not show which mount covers another.

    Does not access the mounts. Raise OSError if the process has ended, or belongs to another user.
    """
    with open(f"/proc/{process}/mountinfo", encoding="utf8", errors="surrogateescape", newline="\n") as lines:
        for line in lines:
            # Split at spaces only: mountinfo does not escape all white space in paths.
            words = line.rstrip("\n").split(" ")
            at = words.index("-", 6)
            options = frozenset(words[5].split(","))
            owner = re.search(r"\buser_id=(\d+)", words[at + 3])
            user = int(owner[1]) if owner else None
            source, root, numbers = _unescaped(words[at + 2]), _unescaped(words[3]), map(int, words[:2])
            yield MountInfo(_unescaped(words[4]), words[at + 1], source, options, words[2], user, root, *numbers)


def mount_type(mountpoint: str) -> str | None:
    """Return the type of the file system that `mounted_at` finds; None if there is none."""
    mount = mounted_at(mountpoint)
    return None if mount is None else mount.type


def mounted_at(mountpoint: str) -> MountInfo | None:
    """Return the topmost mount at exactly this path; None if there is none. Does not access the path."""
    return topmost().get(mountpoint)


def topmost() -> dict[str, MountInfo]:
    """Return mountpoint -> the visible mount there: the one to whose root no other mount is attached."""
    mounts = list(entries())
    covered = {(e.parent, e.mountpoint) for e in mounts}
    return {e.mountpoint: e for e in mounts if (e.number, e.mountpoint) not in covered}


def covered_by(top: MountInfo) -> MountInfo | None:
    """Return the mount at the same mountpoint that `top` covers directly; None if there is none."""
    return next((e for e in entries() if (e.number, e.mountpoint) == (top.parent, top.mountpoint)), None)


def mount_number(fd: int) -> int:
    """Return the id of the mount that an open file is on, as `MountInfo.number`."""
    with open(f"/proc/self/fdinfo/{fd}") as lines:
        return next(int(line.partition(":")[2]) for line in lines if line.startswith("mnt_id:"))


def elsewhere(mounted: MountInfo) -> tuple[int, str] | None:
    """Return the number of a process that still has the file system mounted, and where that process sees it.

    None if none was found; processes of other users may be missing. Call this after `mounted` was unmounted, because
    neither that mount nor the calling process is left out. The other mount may be a bind mount or in another mount
    namespace. The source is compared, too, because the kernel reuses the device number of an unmounted file system at
    once.
    """
    file_system = (mounted.device, mounted.type, mounted.source)
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # the process has ended, or belongs to another user
            for e in entries(process):
                if (e.device, e.type, e.source) == file_system:
                    return int(process), e.mountpoint
    return None


def _unescaped(path: str) -> str:
    for code in ("040", "011", "012", "043", "134"):
        path = path.replace("\\" + code, chr(int(code, 8)))
    return path


def mount_of(path: str) -> str | None:
    """Return the mountpoint of the shardfs mount that contains a path; None if there is none.

    Accesses the path, to resolve links, only if the path as written is not on a mount of shardfs.
    """
    for candidate in (os.path.abspath, os.path.realpath):
        directory = candidate(path)
        types = {e.mountpoint: e.type for e in entries()}
        while directory not in types and directory != "/":
            directory = os.path.dirname(directory)
        if types.get(directory) == FS_TYPE:
            return directory
    return None
