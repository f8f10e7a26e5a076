"""Shutdown of a writable mount: publish the written data, and log the files that stay in the journal."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from shardfs.model.text import counted

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

HURRIED_S = 30.0
"""Seconds that publishing may continue after a signal."""

STALL_S = 300.0
"""Seconds that publishing may make no progress after the unmount."""

A_DAY_S = 86_400.0
INTERVAL_S = 0.25
COUNT_EVERY = 8
NAMED = 20
"""At most this many of the remaining files are named in the log."""


class Writing(Protocol):
    """The write side of a mount, as start, status and shutdown need it. Thread-safe."""

    def state(self) -> dict[str, Any]:
        """Fields for `status.json`:

        journal: directory of the journal.
        journal_bytes, journal_limit: size of the journal, and its maximum.
        dirty_chunks, dirty_shards: number of chunks and shards with data that is not published yet.
        orphans, orphan_paths: number of files that belong to no array, and the paths of the first ones.
        written_bytes, published_bytes, published_chunks, published_shards: counted since the mount started.
            `published_bytes` excludes bytes that a new shard shares with the old one.
        conflicts, failures: number of conflicts with other writers, and of failed attempts to publish.
        failing, errors: number of shards and files that cannot be published now, and the first ones with the reason.
        refused, refused_paths: number of files whose last version was refused at close, and the first ones with the
            reason.
        problems: damage found in the journal.
        read_only: reason why the mount refuses writes, or None.
        """

    def left(self) -> list[str]:
        """Paths of the files that are not published yet or cannot be published."""

    def close(self, timeout: float) -> list[str]:
        """Publish the written data for at most `timeout` seconds; return the paths of the files that remain.

        Refuses further writes, syncs all closed files to the journal, publishes, then closes the journal.
        """


class _Closing(threading.Thread):
    """The thread that publishes the remaining files. `remaining` has those that stay, once `has_closed` is set."""

    def __init__(self, writing: Writing, seconds: float) -> None:
        super().__init__(name="shardfs-drain", daemon=True)
        self._writing = writing
        self._seconds = seconds
        self.remaining: list[str] = []
        self.has_closed = threading.Event()

    def run(self) -> None:
        try:
            self.remaining = self._writing.close(self._seconds)
        except Exception:
            log.exception("the remaining files could not be published; they stay in the journal")
            self.remaining = self._writing.left()
        self.has_closed.set()


def drain(
    writing: Writing, *, hurried: bool, signalled: Callable[[float], bool], progress: Callable[[int], object]
) -> int:
    """Publish all remaining files; return the number of files that stay in the journal.

    Gives up after `STALL_S` seconds without progress.

    Args:
        hurried: give up after `HURRIED_S`, even if publishing makes progress.
        signalled: waits up to the given number of seconds and returns whether a signal arrived. A signal sets
            `hurried`.
        progress: called regularly with the number of remaining files.

    A separate thread publishes, because the store may hang. `drain` does not wait for a hanging thread: the journal
    lets the next mount complete or repeat an interrupted publish.
    """
    thread = _Closing(writing, HURRIED_S if hurried else A_DAY_S)
    thread.start()
    fewest = len(writing.left())
    end = time.monotonic() + (HURRIED_S if hurried else STALL_S)
    for turn in itertools.count():
        if thread.has_closed.wait(INTERVAL_S) or time.monotonic() >= end:
            break
        if signalled(0) and not hurried:
            hurried = True
            end = time.monotonic() + HURRIED_S
        if turn % COUNT_EVERY:  # `left` may list a million files, and blocks the publishing thread meanwhile
            continue
        n = len(writing.left())
        if n < fewest and not hurried:
            end = time.monotonic() + STALL_S
        fewest = min(n, fewest)
        progress(n)
    paths = thread.remaining if thread.has_closed.is_set() else writing.left()
    if paths:
        more = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
        names = ", ".join(sorted(paths)[:NAMED])
        log.warning("the journal keeps %s: %s%s", counted(len(paths), "file"), names, more)
    return len(paths)
