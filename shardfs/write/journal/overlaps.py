"""Refuse a second writer whose source is a directory above or below the source of another writer.

Each writer first takes its own locks and then looks for other writers. If two writers start at the same time, at least
one of them sees the other.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from glob import iglob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardfs.storage import source_locks, syscalls
from shardfs.storage.mount_table import FS_TYPE, entries
from shardfs.storage.regular_files import open_regular, read_all
from shardfs.write.journal import places

if TYPE_CHECKING:
    from collections.abc import Iterator

_JOURNAL_LOCK = re.compile(rf"/[0-9a-f]{{32}}/{source_locks.LOCK}\Z")


def refuse(source: str) -> None:
    """Raise BusyError, which names the other writer, if the source of another writer is above or below `source`.

    The search covers the writers on this machine whose processes this user may inspect. For a local source, the search
    also covers writers on any host whose source is above, and mounts of other users whose source is below.
    """
    ours = source_locks.names(source)
    for owner in _owners():
        theirs = owner.get("sources") or [""]
        if theirs[0] != ours[0] and any(_nested(a, b) for a in ours for b in theirs):
            raise source_locks.busy(owner, source, theirs[0])
    if "://" in ours[0]:
        return
    below = (e.source for e in entries() if e.type == FS_TYPE and "rw" in e.options and _nested(ours[0], e.source))
    for other in (*map(str, Path(ours[0]).parents), *below):
        lock = os.path.join(other, source_locks.SOURCE_LOCK)
        if other != ours[0] and _is_locked(lock):
            raise source_locks.busy(source_locks.read_owner(lock), source, other)


def _is_locked(lock: str) -> bool:
    try:
        return places.is_locked(lock)
    except OSError:  # this user may not read the lock file
        return False


def _nested(one: str, other: str) -> bool:
    """Return whether the two names are equal, or one is a directory above the other."""
    short, long = sorted((one.rstrip("/"), other.rstrip("/")), key=len)
    return bool(other) and (long == short or long.startswith(f"{short}/"))


def _owners() -> Iterator[dict[str, Any]]:
    """Yield the owner entries in the journal locks of running writers whose processes this user may inspect."""
    for link in iglob("/proc/[0-9]*/fd/*"):
        with suppress(OSError, ValueError):
            if _JOURNAL_LOCK.search(os.readlink(link)) is None:
                continue
            fd = open_regular(link, follow=True)
            try:
                if syscalls.is_locked(fd):
                    yield source_locks.owner_in(read_all(fd, source_locks.MAX_RECORD))
            finally:
                os.close(fd)
