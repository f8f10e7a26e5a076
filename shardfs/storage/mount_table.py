"""The mounts of shardfs on this machine, and how they fare. Nothing here waits for a mount that does not answer."""

from __future__ import annotations

import errno
import json
import os
import re
import select
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

FS_TYPE = "fuse.shardfs"

ANSWERS, DEAD, HANGS, CLOSED, OLD = "answers", "dead", "hangs", "closed", "old"
"""How a mount fares. A dead one has no daemon any more, a closed one is another user's, an old one tells nothing."""

LOOK_S = 0.5

PATIENCE_S = 0.7
"""How long mounts are waited for, all together."""


class MountInfo(NamedTuple):
    """A line of mountinfo.

    Args:
        owner: the user who mounted a FUSE file system.
        root: the directory of the file system that is mounted: not `/` if a part of it is bound.
        number: of this mount; `parent` is the number of the mount that it is attached to.
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


class Mount(NamedTuple):
    """A mount of shardfs; `told` is its `status.json`, if it answers."""

    mountpoint: str
    source: str
    state: str
    told: dict[str, Any] | None


def entries(process: int | str = "self") -> Iterator[MountInfo]:
    """Everything that is mounted for a process, in no order that says what covers what. Touches none of it."""
    with open(f"/proc/{process}/mountinfo", encoding="utf8", errors="surrogateescape", newline="\n") as lines:
        for line in lines:
            words = line.rstrip("\n").split(" ")  # other white space is not escaped in paths
            at = words.index("-", 6)
            options = frozenset(words[5].split(","))
            owner = re.search(r"\buser_id=(\d+)", words[at + 3])
            user = int(owner[1]) if owner else None
            source, root, numbers = _unescaped(words[at + 2]), _unescaped(words[3]), map(int, words[:2])
            yield MountInfo(_unescaped(words[4]), words[at + 1], source, options, words[2], user, root, *numbers)


def mount_type(mountpoint: str) -> str | None:
    """The type of the topmost file system mounted exactly there; None if there is none. Does not touch the path."""
    found = mounted_at(mountpoint)
    return None if found is None else found.type


def mounted_at(mountpoint: str) -> MountInfo | None:
    """What is mounted topmost exactly there. Does not touch the path."""
    return topmost().get(mountpoint)


def topmost() -> dict[str, MountInfo]:
    """The mount that is seen at each mountpoint: no other mount is attached to its root."""
    found = list(entries())
    covered = {(e.parent, e.mountpoint) for e in found}
    return {e.mountpoint: e for e in found if (e.number, e.mountpoint) not in covered}


def covered_by(top: MountInfo) -> MountInfo | None:
    """The mount at the same mountpoint to whose root `top` is attached."""
    return next((e for e in entries() if (e.number, e.mountpoint) == (top.parent, top.mountpoint)), None)


def mount_number(fd: int) -> int:
    """The number, as in `MountInfo`, of the mount that an open file is on."""
    with open(f"/proc/self/fdinfo/{fd}") as lines:
        return next(int(line.partition(":")[2]) for line in lines if line.startswith("mnt_id:"))


def elsewhere(mounted: MountInfo) -> tuple[int, str] | None:
    """A process that has the same file system mounted somewhere, bound or in a namespace of its own, and where.

    The number of a device is given to the next mount as soon as the one with it is gone, so the source counts, too.
    """
    same = (mounted.device, mounted.type, mounted.source)
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # it has ended, or is somebody else's
            for e in entries(process):
                if (e.device, e.type, e.source) == same:
                    return int(process), e.mountpoint
    return None


def _unescaped(path: str) -> str:
    for code in ("040", "011", "012", "043", "134"):
        path = path.replace("\\" + code, chr(int(code, 8)))
    return path


def mounts(mountpoint: str | None = None) -> list[Mount]:
    """Those on this machine, or only the one there. Takes less than a second."""
    wanted = [e for e in topmost().values() if e.type == FS_TYPE and mountpoint in (None, e.mountpoint)]
    return [Mount(e.mountpoint, e.source, *answer) for e, answer in zip(wanted, _asked(wanted), strict=True)]


# Another process asks: whoever waits for a mount that hangs may not even be killed.
_ASK = """\
import os, sys
try:
    with open(sys.argv[1] + "/.shardfs/status.json", "rb") as file:
        os.write(1, file.read())
except OSError as e:
    sys.exit(e.errno)
"""


_FLUSH = """\
import os, sys
try:
    os.setxattr(sys.argv[1], 'user.shardfs.flush', sys.argv[2].encode())
except OSError as e:
    sys.exit(e.errno)
"""

GRACE_S = 10.0
"""How long a mount may take to say that the time is up."""


def flush(path: str, seconds: float, look: Callable[[], object] = lambda: None) -> None:
    """Have a mount publish what was written at or below `path`; `look` is called every now and then.

    Raise OSError with what failed first, TimeoutError among it; that of a mount which does not answer at all, too.
    """
    null = subprocess.DEVNULL
    command = [sys.executable, "-IS", "-c", _FLUSH, path, f"{seconds:g}"]
    asking = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)
    end, code = time.monotonic() + seconds + GRACE_S, None
    while code is None and time.monotonic() < end:
        with suppress(subprocess.TimeoutExpired):
            code = asking.wait(LOOK_S)
        look()
    if code is None:
        asking.kill()  # may work
        raise TimeoutError(errno.ETIMEDOUT, "the mount does not answer", path)
    if code:
        raise OSError(code, os.strerror(code), path)


def mount_of(path: str) -> str | None:
    """The mount of shardfs that a path lies on. Touches the path only if it is not on one as it is written."""
    for candidate in (os.path.abspath, os.path.realpath):
        found = candidate(path)
        types = {e.mountpoint: e.type for e in entries()}
        while found not in types and found != "/":
            found = os.path.dirname(found)
        if types.get(found) == FS_TYPE:
            return found
    return None


_BY_ERRNO = {errno.ENOTCONN: DEAD, errno.ECONNABORTED: DEAD, errno.EACCES: CLOSED, errno.EPERM: CLOSED}


def _asked(wanted: Sequence[MountInfo]) -> list[tuple[str, dict[str, Any] | None]]:
    null = subprocess.DEVNULL
    asking = [
        subprocess.Popen(
            [sys.executable, "-IS", "-c", _ASK, e.mountpoint],
            stdin=null, stdout=subprocess.PIPE, stderr=null, start_new_session=True,
        )
        for e in wanted
    ]  # fmt: skip
    end = time.monotonic() + PATIENCE_S
    return [_answer(process, end) for process in asking]


def _answer(process: subprocess.Popen[bytes], end: float) -> tuple[str, dict[str, Any] | None]:
    out, data = process.stdout, b""
    if out is None:
        return HANGS, None
    with out:
        while select.select([out], [], [], max(end - time.monotonic(), 0))[0]:
            part = os.read(out.fileno(), 1 << 20)
            if not part:
                break
            data += part
    try:
        code = process.wait(max(end - time.monotonic(), 0.01))
    except subprocess.TimeoutExpired:
        process.kill()  # may work
        return HANGS, None
    with suppress(ValueError):
        return ANSWERS, json.loads(data)
    return _BY_ERRNO.get(code, OLD), None
