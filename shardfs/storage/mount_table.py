"""The mounts of shardfs on this machine and their states. No function waits without limit for a mount."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from shardfs.storage.mount_status import MAX_STATUS, parse_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FS_TYPE = "fuse.shardfs"

ANSWERS, DEAD, HANGS, CLOSED, OLD = "answers", "dead", "hangs", "closed", "old"
"""States of a mount.

- `answers`: the daemon answers with its status.
- `dead`: the daemon has ended.
- `hangs`: the daemon does not answer in time.
- `closed`: the mount belongs to another user and denies access.
- `old`: the mount answers without a status that this version can read, as other versions of shardfs do.
"""

LOOK_S = 0.5

PATIENCE_S = 0.7
"""Seconds to wait for the answers of all mounts together."""


class MountInfo(NamedTuple):
    """One line of /proc/PID/mountinfo (proc_pid_mountinfo(5)).

    Args:
        owner: the user who mounted a FUSE file system.
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


class Mount(NamedTuple):
    """A mount of shardfs. `status` is the content of its `status.json`, None if the mount does not answer."""

    mountpoint: str
    source: str
    state: str
    status: dict[str, Any] | None


def entries(process: int | str = "self") -> Iterator[MountInfo]:
    """Yield all mounts that a process sees. The order does not show which mount covers another.

    Does not access the mounts.
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
    found = mounted_at(mountpoint)
    return None if found is None else found.type


def mounted_at(mountpoint: str) -> MountInfo | None:
    """Return the topmost mount at exactly this path; None if there is none. Does not access the path."""
    return topmost().get(mountpoint)


def topmost() -> dict[str, MountInfo]:
    """Return the visible mount of each mountpoint: the one to whose root no other mount is attached."""
    found = list(entries())
    covered = {(e.parent, e.mountpoint) for e in found}
    return {e.mountpoint: e for e in found if (e.number, e.mountpoint) not in covered}


def covered_by(top: MountInfo) -> MountInfo | None:
    """Return the mount at the same mountpoint that `top` covers directly; None if there is none."""
    return next((e for e in entries() if (e.number, e.mountpoint) == (top.parent, top.mountpoint)), None)


def mount_number(fd: int) -> int:
    """Return the id of the mount that an open file is on, as `MountInfo.number`."""
    with open(f"/proc/self/fdinfo/{fd}") as lines:
        return next(int(line.partition(":")[2]) for line in lines if line.startswith("mnt_id:"))


def elsewhere(mounted: MountInfo) -> tuple[int, str] | None:
    """Return a process that also has the file system mounted, with its mountpoint; None if there is none.

    The other mount may be a bind mount or in another mount namespace. The source is compared, too, because the kernel
    reuses the device number of an unmounted file system at once.
    """
    same = (mounted.device, mounted.type, mounted.source)
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # the process has ended, or belongs to another user
            for e in entries(process):
                if (e.device, e.type, e.source) == same:
                    return int(process), e.mountpoint
    return None


def _unescaped(path: str) -> str:
    for code in ("040", "011", "012", "043", "134"):
        path = path.replace("\\" + code, chr(int(code, 8)))
    return path


def mounts(mountpoint: str | None = None) -> list[Mount]:
    """Return the mounts of shardfs on this machine, or only the one at `mountpoint`. Takes less than a second."""
    wanted = [e for e in topmost().values() if e.type == FS_TYPE and mountpoint in (None, e.mountpoint)]
    asking = [_asking(e) for e in wanted]
    end = time.monotonic() + PATIENCE_S
    asked = [(e, Mount(e.mountpoint, e.source, *_answer(e, p, end))) for e, p in zip(wanted, asking, strict=True)]
    if all(mount.state == ANSWERS for _, mount in asked):
        return [mount for _, mount in asked]
    numbers = {e.number for e in entries()}  # the others may have been unmounted: then the directory below has answered
    return [mount for e, mount in asked if mount.state == ANSWERS or e.number in numbers]


_stuck: dict[MountInfo, subprocess.Popen[bytes]] = {}
"""Mounts that did not answer, with the process that still waits for them although it was killed."""


def _asking(mount: MountInfo) -> subprocess.Popen[bytes] | None:
    """Start a process that asks a mount for its status; None while an earlier one waits for this mount."""
    if mount in _stuck:
        if _stuck[mount].poll() is None:
            return None
        del _stuck[mount]
    return _started(_ASK, mount.mountpoint, str(MAX_STATUS + 1), output=subprocess.PIPE)


# Subprocesses run these programs: a process that waits for a hanging mount may be unkillable.
_ASK = """\
import os, sys
try:
    with open(sys.argv[1] + "/.shardfs/status.json", "rb") as file:
        sys.stdout.buffer.write(file.read(int(sys.argv[2])))
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


def _started(program: str, *arguments: str, output: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    command, null = [sys.executable, "-IS", "-c", program, *arguments], subprocess.DEVNULL
    return subprocess.Popen(command, stdin=null, stdout=output, stderr=null, start_new_session=True)


GRACE_S = 10.0
"""Seconds after the time limit of a flush in which the mount may still report its time-out."""


def flush(path: str, seconds: float, look: Callable[[], object] = lambda: None) -> None:
    """Make a mount publish all data written at or below `path`. Calls `look` regularly while waiting.

    Raise OSError with the first failure. Raise TimeoutError after `seconds`, also if the mount does not answer at all.
    """
    asking = _started(_FLUSH, path, f"{seconds:g}")
    end, code = time.monotonic() + seconds + GRACE_S, None
    while code is None and time.monotonic() < end:
        with suppress(subprocess.TimeoutExpired):
            code = asking.wait(LOOK_S)
        look()
    if code is None:
        asking.kill()  # no effect while the process waits uninterruptibly
        why = f"the mount does not answer within {seconds + GRACE_S:g} s; see `shardfs doctor`"
        raise TimeoutError(errno.ETIMEDOUT, why, path)
    if code:
        raise OSError(code, os.strerror(code), path)


def mount_of(path: str) -> str | None:
    """Return the mountpoint of the shardfs mount that contains a path; None if there is none.

    Accesses the path, to resolve links, only if the path as written is not on a mount of shardfs.
    """
    for candidate in (os.path.abspath, os.path.realpath):
        found = candidate(path)
        types = {e.mountpoint: e.type for e in entries()}
        while found not in types and found != "/":
            found = os.path.dirname(found)
        if types.get(found) == FS_TYPE:
            return found
    return None


_BY_ERRNO = {errno.ENOTCONN: DEAD, errno.ECONNABORTED: DEAD, errno.EACCES: CLOSED, errno.EPERM: CLOSED}


def _answer(mount: MountInfo, process: subprocess.Popen[bytes] | None, end: float) -> tuple[str, dict[str, Any] | None]:
    """Return the state of a mount, and its status, from the process that asks the mount."""
    if process is None:
        return HANGS, None
    try:
        data, _ = process.communicate(timeout=max(end - time.monotonic(), 0.01))
    except subprocess.TimeoutExpired:
        process.kill()  # no effect while the process waits uninterruptibly
        _stuck[mount] = process
        return HANGS, None
    finally:
        if process.stdout is not None:
            process.stdout.close()
    if (status := parse_status(data)) is not None:
        return ANSWERS, status
    return _BY_ERRNO.get(process.returncode, OLD), None
