"""Whether other users could change a file, or replace the files in a directory."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from contextlib import suppress


def require_own_place(directory: str, advice: str) -> None:
    """Raise PermissionError if another user owns a directory, or may rename the names in it; OSError if it is absent.

    The owner may be root. A directory that other users may write to is accepted if it is sticky, like `/tmp`. `advice`
    ends the message.
    """
    info = os.stat(directory)
    if not is_own(info):
        why = f"belongs to user {info.st_uid}, who could replace the files in it; {advice}"
        raise PermissionError(errno.EACCES, why, directory)
    if _is_shared(info) and not info.st_mode & stat.S_ISVTX:
        why = f"is writable for other users (mode {stat.S_IMODE(info.st_mode):04o}), who could replace the files in it"
        raise PermissionError(errno.EACCES, f"{why}; {advice}", directory)


def is_closed(directory: str) -> bool:
    """Return whether no other user than root may create a name in a directory. Raise OSError if there is none."""
    info = os.stat(directory)
    return is_own(info) and not _is_shared(info)


def is_own(info: os.stat_result) -> bool:
    """Return whether a file or a directory belongs to this user or to root."""
    return info.st_uid in (0, os.geteuid())


def _is_shared(info: os.stat_result) -> bool:
    """Return whether a mode lets other users write."""
    return bool(info.st_mode & stat.S_IWOTH or (info.st_mode & stat.S_IWGRP and not is_private(info.st_gid)))


def is_private(group: int) -> bool:
    """Return whether a group is root's, or has the name of this user and no other member.

    Distributions create such a group for each user. A primary group with another name is not private: it does not
    list the users whose primary group it is, too.
    """
    if group == 0:
        return True
    with suppress(KeyError):
        name, entry = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
        return entry.gr_name == name and set(entry.gr_mem) <= {name}
    return False
