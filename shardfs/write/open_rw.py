"""Opening a source for writing: its lock, its journal, publishing, and the writable tree."""

from __future__ import annotations

import errno
import logging
import os
import random
import socket
import subprocess
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from shardfs.formats import create_rules
from shardfs.model.errors import BusyError, message
from shardfs.storage.cache import nothing
from shardfs.storage.mount_table import FS_TYPE, mount_type
from shardfs.storage.source_locks import journal_directory
from shardfs.storage.writers import open_writer
from shardfs.write.journal import Journal
from shardfs.write.pending import Pending
from shardfs.write.publish_shard import Publishing
from shardfs.write.tree import open_write_tree

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from typing import Any

    from shardfs.config.options import Options
    from shardfs.storage.store import Store
    from shardfs.vfs.tree import Tree
    from shardfs.write.tree import WriteTree

log = logging.getLogger(__name__)

COMMAND_S = 60.0
"""Timeout of the `on_error` command, in seconds."""

ENDING_S = 30.0
"""Seconds to wait for the daemon of an unmounted file system that still publishes."""

LOOKED_AFTER_S = 1.0
"""Seconds to wait for other owners of the lock: `shardfs recover` may be about to remove an unused journal."""

LOOK_S = 0.2
"""Mean of the seconds between two attempts to lock the journal."""

UPLOADS = 16
"""The most shards that are published to a remote store at the same time."""

MOST_BYTES = 10 << 30
"""Default limit of a journal in bytes, and at most half of the free space."""


def open_journal(
    source: str,
    options: Options,
    *,
    directory: Path | None = None,
    mountpoint: str = "",
    waiting: Callable[[], None] = nothing,
) -> Journal:
    """Open and lock the journal of a source, and log the problems found in it.

    The options choose the directory of the journal if `directory` is None. If the lock belongs to a daemon whose mount
    is gone, wait for the daemon to finish publishing.

    Raise BusyError if another process writes to the source, or OSError if the directory is unsuitable. Both are raised
    before anything is changed.
    """
    directory = directory or journal_directory(source, options.journal)
    limit = options.journal_limit or _half_of_free(directory)
    soon, end = time.monotonic() + LOOKED_AFTER_S, time.monotonic() + ENDING_S
    while True:
        try:
            journal = Journal.open(
                directory, source, limit_bytes=limit, commit_s=options.commit, mountpoint=mountpoint, waiting=waiting
            )
            break
        except BusyError as e:
            if time.monotonic() > (end if _is_ending(e.owner, mountpoint) else soon):
                raise
        time.sleep(LOOK_S * random.uniform(0.5, 1.5))  # jitter, so that two processes do not block each other
    for problem in journal.problems:
        log.warning("%s", problem)
    return journal


def _is_ending(owner: Mapping[str, Any], mountpoint: str) -> bool:
    """Return whether the owner of the lock has ended, or is on this host and not mounted.

    The second means that the owner's mount is gone or not yet there. At our own `mountpoint` there can only be a dead
    mount.
    """
    if not owner:  # the owner has ended in the meantime and removed the journal
        return True
    theirs = owner.get("mountpoint")
    is_local = owner.get("host") == socket.gethostname() and owner.get("pid") != os.getpid()
    return bool(is_local and theirs) and (theirs == mountpoint or mount_type(str(theirs)) != FS_TYPE)


def _half_of_free(directory: Path) -> int:
    while not directory.exists():
        directory = directory.parent
    free = os.statvfs(directory)
    return min(MOST_BYTES, free.f_bavail * free.f_frsize // 2)


def require_writable(store: Store, source: str, options: Options) -> None:
    """Raise the errors that `open_writable` would raise. Leaves nothing behind; a store may get probes of a writer."""
    _require_write_access(store, source)
    directory = journal_directory(source, options.journal)
    Pending(Journal.rehearse(directory, source)).require_layout(options.shown_as)
    replace_links = options.linked_shards == "replace"
    open_writer(store, replace_links=replace_links, journal=directory, rehearse=True).close()


def _require_write_access(store: Store, source: str) -> None:
    """Raise OSError (EROFS) if the store is read-only."""
    file_system = store.statvfs()
    if file_system is not None and file_system.f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), source)


def open_writable(
    tree: Tree,
    source: str,
    options: Options,
    *,
    directory: Path | None = None,
    mountpoint: str = "",
    waiting: Callable[[], None] = nothing,
) -> WriteTree:
    """Return the writable tree of a source, and start publishing the versions in its journal.

    Raise UnsupportedError if the store cannot be written safely, OSError (EROFS) if the store is read-only, and the
    errors of `open_journal`.
    """
    _require_write_access(tree.store, source)
    journal = open_journal(source, options, directory=directory, mountpoint=mountpoint, waiting=waiting)
    publishing = Publishing(
        idle_s=options.idle,
        age_s=options.age,
        stall_s=options.stall,
        close=options.close,
        conflict=options.conflict,
        compact=options.compact,
        inplace=options.inplace,
        dirty_bytes=options.dirty_limit,
        workers=min(options.connections, UPLOADS) if tree.store.remote else 2,
    )
    try:
        write_tree = open_write_tree(
            tree,
            journal,
            publishing=publishing,
            rules=create_rules.parse(options.create or ""),
            replace_links=options.linked_shards == "replace",
            layout=options.shown_as,
            waiting=waiting,
        )
    except BaseException:
        journal.close(clean=False)
        raise
    if options.on_error is not None:
        write_tree.pending.failures.failed = partial(_run, options.on_error)
    return write_tree


def _run(command: str, path: str, failure: OSError) -> None:
    """Start the user's `on_error` command with the path and the error in its environment, without waiting for it."""
    environment = {**os.environ, "SHARDFS_PATH": path, "SHARDFS_ERROR": message(failure)}

    def run() -> None:
        try:
            subprocess.run(["/bin/sh", "-c", command], env=environment, check=True, timeout=COMMAND_S)
        except (OSError, subprocess.SubprocessError) as e:
            log.warning("on_error: %s", e)

    threading.Thread(target=run, name="shardfs-on-error", daemon=True).start()
