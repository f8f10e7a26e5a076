"""The end of a writable mount: what was written is published, or stays in the journal and is told."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

HURRIED_S = 30.0
"""How long publishing may go on after a signal."""

STALL_S = 300.0
"""How long it may go on without anything being published, after the mount was taken away."""

A_DAY_S = 86_400.0
LOOK_S = 0.25
COUNT_EVERY = 8
TOLD = 20
"""So many of the files that are left are named in the log."""


class Writing(Protocol):
    """What was written to a mount, as far as its start and end are concerned. Thread-safe."""

    def state(self) -> dict[str, Any]:
        """For `status.json`:

        journal: its directory.
        journal_bytes, journal_limit
        dirty_chunks, dirty_shards: written, and not published yet.
        orphans, orphan_paths: what belongs to no array; the first of them.
        written_bytes, published_bytes, published_chunks, published_shards: since the mount began. What is published of
            a shard is what is not shared with the old one.
        conflicts, failures: how often that was so.
        failing, errors: what cannot be published now; the first of it, with why.
        refused, refused_paths: files whose last version was refused when they were closed; the first of them, with why.
        problems: what is wrong with the journal.
        read_only: why nothing can be written any more, or None.
        """

    def left(self) -> list[str]:
        """Paths of what is not published yet, or cannot be."""

    def close(self, timeout: float) -> list[str]:
        """Take no more writes, make all that was closed survive a power failure, publish as much as `timeout` seconds
        allow, and close the journal. What is left."""


def drain(writing: Writing, *, hurried: bool, signalled: Callable[[float], bool], tell: Callable[[int], object]) -> int:
    """Publish what is left, as long as something is published every five minutes; how many files remain.

    Args:
        hurried: give up after `HURRIED_S`, also if nothing is wrong.
        signalled: waits for so many seconds; whether there was a signal meanwhile, from which on it is hurried.
        tell: is told every now and then how many files are left.

    Publishing goes on in a thread, which may hang in the store. It is left to itself then: a process that ends in
    the middle of publishing leaves nothing that the next mount would not put right.
    """
    done, found = threading.Event(), list[str]()

    def close() -> None:
        try:
            found.extend(writing.close(HURRIED_S if hurried else A_DAY_S))
            done.set()
        except Exception:
            log.exception("what is left could not be published")
            found.extend(writing.left())
            done.set()

    threading.Thread(target=close, name="shardfs-drain", daemon=True).start()
    least, end = len(writing.left()), time.monotonic() + (HURRIED_S if hurried else STALL_S)
    for look in itertools.count():
        if done.wait(LOOK_S) or time.monotonic() >= end:
            break
        if signalled(0) and not hurried:
            hurried, end = True, time.monotonic() + HURRIED_S
        if look % COUNT_EVERY:  # there may be a million, and who publishes waits meanwhile
            continue
        n = len(writing.left())
        if n < least and not hurried:
            end = time.monotonic() + STALL_S
        least = min(n, least)
        tell(n)
    return _told(found if done.is_set() else writing.left())


def _told(left: list[str]) -> int:
    if left:
        more = f" and {len(left) - TOLD} more" if len(left) > TOLD else ""
        log.warning("%d files stay in the journal: %s%s", len(left), ", ".join(sorted(left)[:TOLD]), more)
    return len(left)
