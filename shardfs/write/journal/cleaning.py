"""Free space of a journal: unlink segments without live records, and copy live records to a new segment.

Segments are unlinked oldest first, and only after all records are on disk. A record that supersedes another one is
younger and therefore outlives it. If a few live records keep many segments alive, all live records are copied.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from shardfs.write.journal.appender import FULL
from shardfs.write.journal.records import BLOCK, HEADER_SIZE, RecordKind
from shardfs.write.journal.segments import AROUND

if TYPE_CHECKING:
    from shardfs.write.journal.appender import Appender
    from shardfs.write.journal.segments import Contents

MAX_COPIED = 256 << 20
"""Bytes. If live records are larger, they are not copied to free space, because appending waits for the copy."""


def free(contents: Contents, appender: Appender) -> None:
    """Unlink the oldest segments without live records, again until there are none. Only the leader calls this.

    A segment that a reader pins is unlinked later.
    """
    while True:
        with contents.lock:
            segments = contents.segments.values()
            dead = list(takewhile(lambda segment: not segment.live and segment is not appender.current, segments))
            if all(segment.pins and segment.number < contents.oldest for segment in dead):
                return
        appender.sync()  # superseding records first: the kernel may write the FREE record before them
        with contents.lock:
            needed = (n for n, segment in contents.segments.items() if n > 0 and segment not in dead)
            contents.oldest = min(needed, default=0)
            appender.write_own(RecordKind.FREE, {})
        appender.sync()
        with contents.lock:
            for segment in dead:
                if not segment.pins:
                    contents.unlink(segment)
                    appender.dirty.pop(segment.number, None)


def renew(contents: Contents, appender: Appender) -> None:
    """Copy all live records to a new segment, and unlink the old segments. Only the leader calls this.

    Raise OSError if the disk has no room for the new segment: nothing has changed then. Raise OSError (EIO) if a record
    cannot be copied: the journal is read-only then.
    """
    with contents.lock:  # no record may be superseded between two copies
        appender.roll(contents.live_bytes + (len(contents.live) + 1) * AROUND, helpful=not contents.live)
        failed = None
        for lsn in sorted(contents.live):
            try:
                appender.copy(lsn, contents.live[lsn])
            except OSError as e:
                failed = e
        if failed is not None and failed.errno in FULL and contents.missing():
            raise failed  # all is written anew once the disk has room
        if failed is not None:  # a partial copy would break the order of the records
            appender.give_up(failed)
    free(contents, appender)


def is_mostly_dead(contents: Contents, appender: Appender, segment_bytes: int, *, hard: bool) -> bool:
    """Return whether copying the live records would free enough space to be worth the copy. `hard`: even if less."""
    with contents.lock:
        if not contents.live and appender.current is not None:
            return appender.current.end > (HEADER_SIZE + BLOCK if hard else appender.current.size // 2)
        needed = (1 if hard else 2) * (contents.live_bytes + segment_bytes)
        pinned = any(segment.pins for segment in contents.segments.values())
        return contents.used > needed and contents.live_bytes <= MAX_COPIED and not pinned
