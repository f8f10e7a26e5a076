"""Whether other users could replace the files that shardfs keeps in a directory."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from contextlib import suppress


def require_own_place(directory: str, advice: str) -> None:
    """Raise PermissionError if another user owns a directory, or may rename the names in it.

    The owner may be root. A directory that others may write to is accepted if it is sticky, like /tmp, or if the
    others are the group of this user's name, which has no other members.
    """
    info = os.stat(directory)
    if info.st_uid not in (0, os.geteuid()):
        why = f"belongs to user {info.st_uid}, who could replace the files in it; {advice}"
        raise PermissionError(errno.EACCES, why, directory)
    others = info.st_mode & stat.S_IWOTH or (info.st_mode & stat.S_IWGRP and not _is_private(info.st_gid))
    if others and not info.st_mode & stat.S_ISVTX:
        why = f"is writable for other users (mode {stat.S_IMODE(info.st_mode):04o}), who could replace the files in it"
        raise PermissionError(errno.EACCES, f"{why}; {advice}", directory)


def _is_private(group: int) -> bool:
    """Return whether a group has the name of this user and no other member, as distributions create one for each."""
    with suppress(KeyError):
        name, entry = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
        return group == 0 or (entry.gr_name == name and set(entry.gr_mem) <= {name})
    return False
