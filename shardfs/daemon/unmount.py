"""The end of a mount, asked for from outside: unmount, wait for the daemon, tell what stays in its journal."""

from __future__ import annotations

import errno
import json
import os
import pwd
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shardfs.model.errors import MountError
from shardfs.storage import mount_calls
from shardfs.storage.mount_table import FS_TYPE, elsewhere, mount_type, mounted_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

LEFT, BUSY, LATE = 3, 4, 5
"""Exit codes: files stay in the journal; a program uses the mount; the daemon has not ended in time."""

ANSWER_S = 10.0
"""How long a mount may take to say whose it is."""

LOOK_S = 0.2
NAMED = 20
"""So many files, or processes, are named."""

_ASK = """\
import os, sys
try:
    print(int(os.getxattr(sys.argv[1], 'user.shardfs.pid')), flush=True)
    with open(sys.argv[1] + '/.shardfs/status.json', 'rb') as file:
        sys.stdout.buffer.write(file.read())
except OSError as e:
    sys.exit(e.errno)
"""


class Daemon(NamedTuple):
    """The daemon of a mount: its process and the directory of its journal, if it has one.

    Args:
        pid: 0 if the daemon is dead, -1 if the mount does not say, like the mount of another user.
        refused: files whose last version was refused at close, and why.
    """

    pid: int
    journal: str | None = None
    refused: Mapping[str, str] = {}


def is_mounted(mountpoint: str) -> bool:
    """Whether shardfs is mounted there, be it that its daemon is dead."""
    return mount_type(_mounted_path(mountpoint)) == FS_TYPE


def _mounted_path(mountpoint: str) -> str:
    """As mountinfo has it. A path that is a mount itself is not looked at: its daemon may hang."""
    path = os.path.abspath(mountpoint)
    return path if mount_type(path) == FS_TYPE else os.path.realpath(path)


def umount(
    mountpoint: str,
    *,
    timeout: float,
    lazy: bool,
    patient: bool = False,
    tell: Callable[[int], object] = lambda _: None,
) -> int:
    """Unmount and wait until the daemon has published what was written, and gone; the exit code.

    Args:
        timeout: seconds to wait for the daemon, anew whenever its journal changes; and if `patient`, for programs that
            use the mount.
        tell: is told every now and then how many bytes the journal has.
    """
    mountpoint = _mounted_path(mountpoint)
    mounted = mounted_at(mountpoint)
    if mounted is None or mounted.type != FS_TYPE:
        raise MountError(errno.EINVAL, "is not a mount of shardfs: `shardfs status` lists the mounts", mountpoint)
    daemon = None if lazy else daemon_of(mountpoint, ANSWER_S)
    process = _process(daemon.pid if daemon else 0)
    had_journal = daemon is not None and daemon.journal is not None and os.path.isdir(daemon.journal)
    try:
        _unmount_within(timeout if patient else 0.0, mountpoint, lazy=lazy or (daemon is not None and not daemon.pid))
    except OSError as e:
        if e.errno != errno.EBUSY:
            raise
        hangs = "" if daemon is not None else "does not answer (--lazy detaches it), and is "
        sys.stderr.write(f"shardfs: {mountpoint}: {hangs}busy: {_users(mountpoint)}\n")
        return BUSY
    _detach_dead(mountpoint)
    if daemon is None and not lazy and "rw" in mounted.options:
        sys.stderr.write(f"shardfs: {mountpoint}: unmounted, but its daemon does not say whether all is published\n")
        return LATE
    if daemon is None or process < 0:
        return 0
    if daemon.journal:
        import shardfs.write.recover  # noqa: F401  # while the daemon ends: it takes longer than that
    if not _await_end(process, timeout, daemon.journal, tell):
        doing = "still publishes what was written" if daemon.journal else "has not ended"
        if (other := elsewhere(mounted)) is not None:
            doing = f"serves it at {other[1]} for process {other[0]}, too"
        waited = f"waited {timeout:g} s for it"
        sys.stderr.write(f"shardfs: {mountpoint}: unmounted, but process {daemon.pid} {doing}; {waited}\n")
        return LATE
    code = _told(daemon.journal, had_journal) if daemon.journal else 0
    return _told_refused(daemon.refused) if daemon.refused else code


def _await_end(process: int, seconds: float, journal: str | None, tell: Callable[[int], object]) -> bool:
    """Whether it has ended; the seconds are counted anew whenever something happens to the journal."""
    seen, end = None, 0.0
    while True:
        found = _segments(journal) if journal else {}
        if found != seen or seen is None:
            seen, end = found, time.monotonic() + seconds
        wait = min(LOOK_S, end - time.monotonic()) if journal else seconds
        if select.select([process], [], [], max(wait, 0))[0]:
            return True
        if time.monotonic() >= end:
            return False
        tell(sum(found.values()))


def _segments(journal: str) -> dict[str, int]:
    """Its files, and how large they are."""
    with suppress(OSError), os.scandir(journal) as entries:
        return {entry.name: entry.stat().st_blocks * 512 for entry in entries}
    return {}


def _told(journal: str, was_there: bool) -> int:
    """Name what is left in it; the exit code. The daemon removes it if nothing is left; `was_there` before that."""
    from shardfs.write.recover import look_if_there

    found = look_if_there(journal)
    if found is None:
        if was_there:
            return 0
        sys.stderr.write(
            f"shardfs: another program has removed the journal {journal}; the log of the mount says more\n"
        )
        return LEFT
    left = [entry.path for entry in found.waiting]
    if not left and not found.problems:
        return 0
    more = [f"and {len(left) - NAMED} more"] if len(left) > NAMED else []
    lines = "".join(f"  {path}\n" for path in [*left[:NAMED], *more])
    lines += "".join(f"  problem: {problem}\n" for problem in found.problems[:NAMED])
    lines += f"They are kept for the next writable mount, and for shardfs recover {journal}\n"
    what = f"{len(left)} files are not in the source, but in the journal" if left else "damage is left in the journal"
    sys.stderr.write(f"shardfs: {what} {journal}:\n{lines}")
    return LEFT


def _told_refused(refused: Mapping[str, str]) -> int:
    """Name the files whose last version is lost; the exit code."""
    lines = [f"  {path or 'more files'}: {why}\n" for path, why in refused.items()]
    more = f"  and {len(lines) - NAMED} more, or many more\n" if len(lines) > NAMED else ""
    what = "the last version of these files was refused when a program closed them; write them again"
    sys.stderr.write(f"shardfs: {what}:\n{''.join(lines[:NAMED])}{more}")
    return LEFT


def _detach_dead(mountpoint: str) -> None:
    """Detach the dead mounts that the mount has covered: a later mount may have been attached above them."""
    while mount_type(mountpoint) == FS_TYPE and daemon_of(mountpoint, ANSWER_S) == Daemon(0):
        try:
            unmount(mountpoint, lazy=True)
        except MountError:  # the daemon that covered it was faster, or it is another user's
            return


def _unmount_within(seconds: float, mountpoint: str, *, lazy: bool) -> None:
    """Try again while it is busy."""
    end = time.monotonic() + seconds
    while True:
        try:
            return unmount(mountpoint, lazy=lazy)
        except OSError as e:
            if e.errno != errno.EBUSY or time.monotonic() >= end:
                raise
        time.sleep(LOOK_S)


def _users(mountpoint: str) -> str:
    """Which programs use it, as far as we may know. Asks the kernel for names only, never the mount."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # it has ended, or is somebody else's
            if any(path == mountpoint or path.startswith(f"{mountpoint}/") for path in _paths(f"/proc/{pid}")):
                found.append(f"{pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})")
    if not found:
        return "a program has a file or its current directory there"
    return f"used by {', '.join(found[:NAMED])}{' and others' if len(found) > NAMED else ''}"


def _paths(process: str) -> Iterator[str]:
    """What it has open, maps, or is in."""
    links = [f"{process}/{name}" for name in ("cwd", "root", "exe")]
    for link in [*links, *(f"{process}/fd/{fd}" for fd in os.listdir(f"{process}/fd"))]:
        with suppress(OSError):
            yield os.readlink(link)
    with open(f"{process}/maps", errors="surrogateescape") as lines:
        for line in lines:
            yield "/" + line.rstrip("\n").partition("/")[2]


def daemon_of(mountpoint: str, seconds: float) -> Daemon | None:
    """The daemon, as it says itself; None if it does not answer within `seconds`.

    `stat` would not tell: the kernel knows the answer by heart. Another process asks, as a question that the daemon has
    read but does not answer cannot be taken back, not even by SIGKILL.
    """
    command = [sys.executable, "-IS", "-c", _ASK, mountpoint]
    asker = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        answer, _ = asker.communicate(timeout=seconds)
        pid, _, status = answer.partition(b"\n")
        writing = (json.loads(status)["writing"] if status else None) or {}
        dead = asker.returncode in (errno.ENOTCONN, errno.ECONNABORTED)
        return Daemon(int(pid or (0 if dead else -1)), writing.get("journal"), writing.get("refused_paths", {}))
    except subprocess.TimeoutExpired:
        asker.kill()
        with suppress(subprocess.TimeoutExpired):
            asker.wait(1)  # as long as it is there the mount is in use
        return None
    finally:
        if asker.stdout is not None:
            asker.stdout.close()


def _process(pid: int) -> int:
    """A descriptor that becomes readable when the process ends; -1 if there is none."""
    with suppress(OSError):
        return os.pidfd_open(pid) if pid > 0 else -1
    return -1


def _user_name(user: int | None) -> str:
    with suppress(KeyError):
        return pwd.getpwuid(user or 0).pw_name
    return str(user)


def unmount(mountpoint: str, *, lazy: bool) -> None:
    """Raise OSError with what the kernel says, EBUSY among it."""
    if os.geteuid() == 0:
        return mount_calls.detach(mountpoint, lazy=lazy)
    mounted = mounted_at(mountpoint)
    if mounted is not None and mounted.owner not in (None, os.getuid()):
        why = f"was mounted by the user {_user_name(mounted.owner)}: only that user or root can unmount it"
        raise MountError(errno.EPERM, why, mountpoint)
    command = ["fusermount3", "-u", *(["-z"] if lazy else []), "--", mountpoint]
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if ended.returncode:  # it says why in words only; a mount of ours that it leaves in place is in use
        busy = mount_type(mountpoint) == FS_TYPE
        raise MountError(errno.EBUSY if busy else errno.EPERM, ended.stderr.strip(), mountpoint)
