"""Unmounting from another process: unmount, wait for the daemon, print the files that stay in its journal."""

from __future__ import annotations

import errno
import os
import pwd
import select
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shardfs.daemon.asking import MountState, ask
from shardfs.model.errors import MountError
from shardfs.model.exit_codes import ExitCode
from shardfs.model.kinds import is_in
from shardfs.model.text import counted, printable
from shardfs.storage import descriptors, mount_calls
from shardfs.storage.mount_table import FS_TYPE, elsewhere, mount_type, mounted_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from shardfs.daemon.asking import Mount
    from shardfs.storage.mount_table import MountInfo

ANSWER_S = 10.0
"""Seconds to wait for a mount to report its daemon."""

INTERVAL_S = 0.2
NAMED = 20
"""At most this many files or processes are named in a message."""


def is_mounted(mountpoint: str) -> bool:
    """Whether shardfs is mounted on exactly this path, even if its daemon has died. Does not access the mount."""
    return mount_type(_mounted_path(mountpoint)) == FS_TYPE


def _mounted_path(mountpoint: str) -> str:
    """The path as mountinfo spells it. Never accesses a mount of shardfs, because its daemon may hang."""
    path = os.path.abspath(mountpoint)
    return path if mount_type(path) == FS_TYPE else os.path.realpath(path)


def umount(
    mountpoint: str,
    *,
    timeout: float,
    lazy: bool,
    patient: bool = False,
    progress: Callable[[int], object] = lambda _: None,
) -> int:
    """Unmount, wait until the daemon has published all written data and exited, and return the exit code.

    The code is LEFT if files stay in the journal or were refused at close, BUSY if programs use the mount, and LATE if
    the daemon has not ended in time or does not say whether all is published; a message on standard error says more.
    Raise MountError if shardfs is not mounted there, or if this user may not unmount it.

    Args:
        timeout: seconds to wait for the daemon. The time starts again whenever the journal changes.
        lazy: detach the mount even if programs use it or the daemon does not answer.
        patient: also wait up to `timeout` seconds for programs that use the mount.
        progress: called regularly with the size of the journal in bytes.
    """
    mountpoint = _mounted_path(mountpoint)
    mounted = mounted_at(mountpoint)
    if mounted is None or mounted.type != FS_TYPE:
        raise MountError(errno.EINVAL, "is not a mount of shardfs: `shardfs status` lists the mounts", mountpoint)
    mount = None if lazy else ask(mounted, ANSWER_S)
    with _process(mount and mount.pid) as process:
        return _unmount_and_wait(mounted, mount, process, timeout, progress, lazy=lazy, patient=patient)


def _unmount_and_wait(
    mounted: MountInfo,
    mount: Mount | None,
    process: int | None,
    timeout: float,
    progress: Callable[[int], object],
    *,
    lazy: bool,
    patient: bool,
) -> int:
    """`umount` of a mount that was asked, unless `lazy`. `process` is a pidfd of the daemon, if it has not ended."""
    mountpoint = mounted.mountpoint
    state = None if mount is None else mount.state
    journal = None if mount is None else mount.writing.get("journal")
    had_journal = journal is not None and os.path.isdir(journal)
    try:
        _unmount_within(timeout if patient else 0.0, mountpoint, lazy=lazy or state is MountState.DEAD)
    except OSError as e:
        if e.errno != errno.EBUSY:
            raise
        hangs = "" if state is not MountState.HANGS else "does not answer (--lazy detaches it), and is "
        _print(f"{mountpoint}: {hangs}busy: {_users(mountpoint)}")
        return ExitCode.BUSY
    _detach_dead(mountpoint)
    if state in (MountState.HANGS, MountState.CLOSED, MountState.OLD) and "rw" in mounted.options:
        _print(f"{mountpoint}: unmounted, but its daemon does not say whether all is published{_who_knows(mounted)}")
        return ExitCode.LATE
    if mount is None or process is None:
        return ExitCode.OK
    if journal:
        import shardfs.write.recover  # noqa: F401  # import while the daemon exits, which takes longer
    if not _await_end(process, timeout, journal, progress):
        doing = "still publishes what was written" if journal else "has not ended"
        if (other := elsewhere(mounted)) is not None:
            doing = f"serves it at {other[1]} for process {other[0]}, too"
        _print(f"{mountpoint}: unmounted, but process {mount.pid} {doing}; waited {timeout:g} s for it")
        return ExitCode.LATE
    code = _print_left(journal, had_journal) if journal else ExitCode.OK
    if refused := mount.writing.get("refused_paths"):
        _print_refused(refused)
        return ExitCode.LEFT
    return code


def _who_knows(mounted: MountInfo) -> str:
    """A hint for messages: which user can list the unpublished files. Empty for a mount of this user."""
    if mounted.owner in (None, os.getuid()):
        return ""
    return f": `shardfs recover` of the user {_user_name(mounted)} lists what is left"


def _user_name(mounted: MountInfo) -> str:
    """The name, or else the number, of the user who mounted this."""
    with suppress(KeyError):
        return pwd.getpwuid(mounted.owner or 0).pw_name
    return str(mounted.owner)


def _print(text: str, *more: str) -> None:
    """Print lines to standard error. Names in them may contain any characters."""
    sys.stderr.write("".join(f"{printable(line)}\n" for line in (f"shardfs: {text}", *more)))


def _await_end(process: int, seconds: float, journal: str | None, progress: Callable[[int], object]) -> bool:
    """Wait for the process; return whether it has ended. The time starts again whenever the journal changes."""
    before = None
    end = 0.0
    poller = select.poll()  # unlike `select`, for descriptors of any number
    poller.register(process, select.POLLIN)
    while True:
        segments = _segments(journal) if journal else {}
        if segments != before:
            before = segments
            end = time.monotonic() + seconds
        wait = min(INTERVAL_S, end - time.monotonic()) if journal else seconds
        if poller.poll(max(wait, 0) * 1000):
            return True
        if time.monotonic() >= end:
            return False
        progress(sum(segments.values()))


def _segments(journal: str) -> dict[str, int]:
    """Name -> allocated bytes of each file of the journal; empty if the journal is gone."""
    with suppress(OSError), os.scandir(journal) as entries:
        return {entry.name: entry.stat().st_blocks * 512 for entry in entries}
    return {}


def _print_left(journal: str, was_there: bool) -> ExitCode:
    """Print the files left in the journal; return the exit code.

    `was_there`: whether the journal existed before the unmount. The daemon removes an empty journal.
    """
    from shardfs.write.recover import read_if_there

    contents = read_if_there(journal)
    if contents is None:
        if was_there:
            return ExitCode.OK
        _print(f"another program has removed the journal {journal}; the log of the mount says more")
        return ExitCode.LEFT
    paths = [entry.path for entry in contents.waiting]
    if not paths and not contents.problems:
        return ExitCode.OK
    more = [f"and {len(paths) - NAMED} more"] if len(paths) > NAMED else []
    problems = [f"problem: {problem}" for problem in contents.problems[:NAMED]]
    lines = [f"  {line}" for line in [*paths[:NAMED], *more, *problems]]
    state = f"{counted(len(paths), 'file')} left unpublished" if paths else "damage is left"
    hint = f"The journal is kept for the next writable mount, and for shardfs recover {journal}"
    _print(f"{state} in the journal {journal}:", *lines, hint)
    return ExitCode.LEFT


def _print_refused(refused: Mapping[str, str]) -> None:
    """Print the files whose last version was refused at close."""
    lines = [f"  {path or 'more files'}: {why}" for path, why in refused.items()]
    more = [f"  and {len(lines) - NAMED} more, or many more"] if len(lines) > NAMED else []
    state = "the last version of these files was refused when a program closed them; write them again"
    _print(f"{state}:", *lines[:NAMED], *more)


def _detach_dead(mountpoint: str) -> None:
    """Detach dead mounts of shardfs that the removed mount covered, topmost first."""
    while (top := mounted_at(mountpoint)) is not None and top.type == FS_TYPE:
        if ask(top, ANSWER_S).state is not MountState.DEAD:
            return
        try:
            unmount(mountpoint, lazy=True)
        except MountError:  # the daemon of the covering mount has detached it already, or another user owns the mount
            return


def _unmount_within(seconds: float, mountpoint: str, *, lazy: bool) -> None:
    """Unmount, and retry for up to `seconds` while the mount is busy."""
    end = time.monotonic() + seconds
    while True:
        try:
            return unmount(mountpoint, lazy=lazy)
        except OSError as e:
            if e.errno != errno.EBUSY or time.monotonic() >= end:
                raise
        time.sleep(INTERVAL_S)


def _users(mountpoint: str) -> str:
    """Describe the programs that use the mount, as far as this user may see them. Reads /proc, never the mount."""
    processes = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # the process has ended, or belongs to another user
            if any(is_in(path, mountpoint) for path in _paths(f"/proc/{pid}")):
                processes.append(f"{pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})")
    if not processes:
        return "a program has a file or its current directory there"
    return f"used by {', '.join(processes[:NAMED])}{' and others' if len(processes) > NAMED else ''}"


def _paths(process: str) -> Iterator[str]:
    """Paths of the open and mapped files and of the current, root and program paths of a /proc/PID directory."""
    links = [f"{process}/{name}" for name in ("cwd", "root", "exe")]
    for link in [*links, *(f"{process}/fd/{fd}" for fd in os.listdir(f"{process}/fd"))]:
        with suppress(OSError):
            yield os.readlink(link)
    with open(f"{process}/maps", errors="surrogateescape") as lines:
        for line in lines:
            yield "/" + line.rstrip("\n").partition("/")[2]


@contextmanager
def _process(pid: int | None) -> Iterator[int | None]:
    """Yield a pidfd, which becomes readable when the process ends; None if there is no such process.

    A hostile mount may report any number.
    """
    fd = None
    try:
        fd = descriptors.obtain(lambda: os.pidfd_open(pid)) if pid else None
    except OverflowError:  # not a C int
        pass
    except OSError as e:
        if e.errno not in (errno.ESRCH, errno.EINVAL, errno.ENOENT):  # EINVAL or ENOENT: negative, or a thread
            raise
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


def unmount(mountpoint: str, *, lazy: bool) -> None:
    """Detach the topmost mount on this path; `lazy`: even if programs use it.

    Raise OSError: EBUSY if it is in use, EPERM if another user mounted it.
    """
    if os.geteuid() == 0:
        return mount_calls.detach(mountpoint, lazy=lazy)
    mounted = mounted_at(mountpoint)
    if mounted is not None and mounted.owner not in (None, os.getuid()):
        why = f"was mounted by the user {_user_name(mounted)}: only that user or root can unmount it"
        raise MountError(errno.EPERM, why, mountpoint)
    command = ["fusermount3", "-u", *(["-z"] if lazy else []), "--", mountpoint]
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if ended.returncode:  # fusermount3 returns no errno. If our mount is still there, it is in use
        busy = mount_type(mountpoint) == FS_TYPE
        raise MountError(errno.EBUSY if busy else errno.EPERM, ended.stderr.strip(), mountpoint)
