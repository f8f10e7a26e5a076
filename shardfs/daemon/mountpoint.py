"""The directory to mount on: its checks, and the attachment of a mount, also in the place of a dead one."""

from __future__ import annotations

import errno
import logging
import os
import shlex
import stat
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from shardfs.daemon.asking import MountState, ask
from shardfs.daemon.unmount import ANSWER_S, unmount
from shardfs.model.errors import MountError
from shardfs.model.redact import is_path
from shardfs.model.text import counted
from shardfs.storage.mount_table import FS_TYPE, covered_by, mounted_at
from shardfs.storage.source_locks import canonical

if TYPE_CHECKING:
    from shardfs.fuse.libfuse import Session
    from shardfs.storage.mount_table import MountInfo

log = logging.getLogger(__name__)

NAMED = 5
"""At most this many entries of a non-empty mountpoint are named."""

COUNTED = 1000
"""At most this many entries of a non-empty mountpoint are counted."""


def check(mountpoint: str, nonempty: str) -> MountInfo | None:
    """The mount of a dead daemon that `attach` must replace; None if there is none.

    Raise MountError if the path, absolute and without symbolic links, cannot be a mountpoint. `nonempty` is the option:
    warn, refuse or allow. Of several dead mounts on top of each other, all but the last are detached.
    """
    while (top := mounted_at(mountpoint)) is not None and top.type == FS_TYPE:
        mount = ask(top, ANSWER_S)
        if mount.state is MountState.HANGS:
            raise MountError(errno.EBUSY, "shardfs is mounted here, and does not answer: shardfs umount -l", mountpoint)
        if mount.state is not MountState.DEAD:
            raise MountError(errno.EBUSY, "shardfs is mounted here already", mountpoint)
        below = covered_by(top)
        if below is None or below.type != FS_TYPE:
            log.warning("%s: replacing the mount of a dead daemon", mountpoint)
            return top
        unmount(mountpoint, lazy=True)
    # `stat` of an autofs trigger would block until this mount exists.
    if top is not None and top.type == "autofs":
        return None
    try:
        is_directory = stat.S_ISDIR(os.stat(mountpoint).st_mode)
    except FileNotFoundError as e:
        why = f"the mountpoint does not exist: mkdir -p {shlex.quote(mountpoint)}"
        raise MountError(errno.ENOENT, why, mountpoint) from e
    except OSError as e:
        raise MountError(e.errno, f"the mountpoint cannot be used: {e.strerror}", mountpoint) from e
    if not is_directory:
        raise MountError(errno.ENOTDIR, "the mountpoint is not a directory", mountpoint)
    if nonempty != "allow" and (hidden := _listed(mountpoint)):
        if nonempty == "refuse":
            why = f"the directory is not empty: the mount would hide {hidden}; move them, or use -o nonempty=warn"
            raise MountError(errno.ENOTEMPTY, why, mountpoint)
        log.warning("%s: the directory is not empty: the mount hides %s", mountpoint, hidden)
    return None


def _listed(directory: str | int) -> str:
    """Number of entries in a directory and the first names, as text. Empty if the directory is empty or unreadable."""
    try:
        with os.scandir(directory) as entries:
            names = sorted(repr(entry.name) for entry in islice(entries, COUNTED))
    except OSError:  # the kernel permits mounts on directories that this user cannot list
        return ""
    if not names:
        return ""
    count = counted(len(names), "entry", "entries") if len(names) < COUNTED else f"{COUNTED} entries or more"
    return f"{count}: {', '.join(names[:NAMED])}{', ...' if len(names) > NAMED else ''}"


def check_apart(source: str, mountpoint: str) -> None:
    """Raise MountError if the mount would cover its source, or be inside the source. Chained URLs are not checked.

    `mountpoint` is absolute and without symbolic links.

    The daemon reads the source to answer requests. A read through its own mount would wait for itself forever.
    """
    if "::" in source and not is_path(source):  # the daemon keeps an archive open
        return
    root = Path(canonical(source))
    if root.is_relative_to(mountpoint) and root.exists():
        raise MountError(errno.EBUSY, "would cover the source", mountpoint)
    if Path(mountpoint).is_relative_to(root):
        raise MountError(errno.EBUSY, "lies in the source, which would have to show itself", mountpoint)


def attach(session: Session, mountpoint: str, dead: MountInfo | None) -> MountInfo | None:
    """Mount the session. `dead` is the result of `check`: the mount of a dead daemon to replace.

    Returns None once the session is attached. Otherwise returns the dead mount that the detached session must replace,
    after `negotiate`, with `Session.replace`. Raise MountError if another mount is there now, or if mounting fails.
    """
    top = mounted_at(mountpoint)
    if top is None or top.type != FS_TYPE:
        session.mount(mountpoint)
        return None
    if top != dead:
        raise MountError(errno.EBUSY, "another shardfs was mounted here meanwhile", mountpoint)
    try:
        session.mount_detached()
        return top
    except OSError as e:
        if e.errno not in (errno.EPERM, errno.ENOSYS):
            raise
    # fusermount3 can neither mount over a dead mount nor move one. Between these two calls, nothing is mounted here.
    unmount(mountpoint, lazy=True)
    bare = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY)
    try:
        session.mount(mountpoint)
        if hidden := _listed(bare):
            log.warning("%s: the directory is not empty: the mount hides %s", mountpoint, hidden)
    finally:
        os.close(bare)
    return None
