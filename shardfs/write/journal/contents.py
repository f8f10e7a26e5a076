"""In-memory account of a journal: its lock, its segments, its live records, and the position of each record's data."""

from __future__ import annotations

import errno
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from shardfs.model.blobs import FilePart
from shardfs.storage import source_locks, syscalls
from shardfs.write.journal import places
from shardfs.write.journal.segments import Segment

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardfs.write.journal.reading import Reading
    from shardfs.write.journal.records import Position
    from shardfs.write.journal.scanning import RecordPlace, SegmentFile


class Contents:
    """The files and the live records of a journal. A record is live until it is released.

    The caller of every method holds `lock`.

    Attributes:
        locks: the lock of the journal, and perhaps that of the source.
        segments: by number, oldest first.
        oldest: the number of the first segment that is needed.
        live: the places of the live records by LSN, and `live_bytes` their sizes.
        used: bytes of all segments.
    """

    def __init__(self, directory: Path, locks: Sequence[places.Lock]) -> None:
        self.directory, self.locks = directory, list(locks)
        self.lock = threading.Lock()
        self.segments: dict[int, Segment] = {}
        self.oldest = 1
        self.live: dict[int, RecordPlace] = {}
        self.used = self.live_bytes = 0
        self._moved: dict[tuple[int, int], Position] = {}  # original (segment, start) to the current position
        self._origins: dict[tuple[int, int], tuple[int, int]] = {}  # the inverse

    def adopt(self, reading: Reading) -> list[SegmentFile]:
        """Take over the files and records that were found on disk, and cut off incomplete appends.

        Return the files that are needed.
        """
        files = sorted(reading.files.values(), key=lambda file: file.order)
        self.oldest = reading.oldest or min((n for n in reading.files if n > 0), default=1)
        for file in files:
            self.add(Segment(file.number, file.name, file.fd, file.end, file.end, damaged=file.damaged))
        reading.files = {}
        for file in reading.torn:
            self.segments[file.number].cut(self.directory, file.size)
        for file in files:
            if file.size > file.end and not file.damaged:
                syscalls.ftruncate(file.fd, file.end)
        for file in reading.stale:
            self.unlink(self.segments[file.number])
        for record in reading.recovered:
            self.note(record.lsn, reading.places[record.lsn])
        return [file for file in files if file.number in self.segments]

    # ---------------------------------------------------------------------------------------- records and positions

    def note(self, lsn: int, place: RecordPlace) -> None:
        """Add a live record."""
        self.live[lsn] = place
        self.live_bytes += place.size
        self.segments[place.number].live += 1

    def forget(self, lsn: int) -> None:
        """Remove a live record, if it is one."""
        if (place := self.live.pop(lsn, None)) is not None:
            self.live_bytes -= place.size
            self.segments[place.number].live -= 1

    def moved(self, segment: int, start: int, new: Position) -> None:
        """Note that data at this segment and offset have been copied to a new position."""
        origin = self._origins.pop((segment, start), (segment, start))
        self._moved[origin] = new
        self._origins[new.segment, new.start] = origin

    def part(self, position: Position) -> tuple[Segment, FilePart]:
        """Return where data are now. Raise OSError (ESTALE) if their segment is gone."""
        position = self._moved.get((position.segment, position.start), position)
        segment = self.segments.get(position.segment)
        if segment is None:
            raise OSError(errno.ESTALE, "the record is not in the journal any more: it was published or discarded")
        return segment, FilePart(segment.fd, position.start, position.size)

    # ---------------------------------------------------------------------------------------------------- the files

    def add(self, segment: Segment) -> None:
        """Add a segment."""
        self.segments[segment.number] = segment
        self.used += segment.end

    def unlink(self, segment: Segment) -> None:
        """Remove a segment and its file."""
        self.segments.pop(segment.number, None)
        self.used -= segment.end
        for key in [key for key in self._origins if key[0] == segment.number]:
            del self._moved[self._origins.pop(key)]
        segment.remove(self.directory)

    def is_in_place(self) -> bool:
        """Return whether the lock file and all needed segments are still in the directory."""
        return all(lock.is_at_its_path() for lock in self.locks[:1]) and not self.missing()

    def missing(self) -> list[Segment]:
        """Return the needed segments that another program has removed from the directory."""
        needed = (segment for segment in self.segments.values() if segment.number >= self.oldest)
        return [segment for segment in needed if not segment.is_in(self.directory)]

    def take_place(self) -> None:
        """Recreate the directory and the lock file if they are missing.

        Raise OSError if another process holds the lock, or the directory has segments of another journal.
        """
        old = self.locks[0]
        if not old.is_at_its_path():
            places.prepare(self.directory, "", "")  # no mount point: a look at our own mount would wait for this thread
            self.locks[0] = places.Lock.take(str(self.directory / source_locks.LOCK), old.mountpoint, old.source)
            old.free()
        ours = {segment.name for segment in self.segments.values() if segment.is_in(self.directory)}
        if others := {path.name for path in self.directory.glob("*.wal")} - ours:
            raise OSError(errno.EEXIST, f"there is another journal at its place ({min(others)}): move it away")

    def remove_if_not_needed(self) -> None:
        """Remove the directory, unless it has live records, damage, kept files, or is not in place."""
        segments = list(self.segments.values())
        needed = self.live or len(segments) > 1 or any(s.pins or s.damaged for s in segments)
        if not needed and self.is_in_place():
            places.remove(self.directory, [segment.name for segment in segments])

    def close(self) -> None:
        """Close all files and release the locks."""
        for segment in self.segments.values():
            with suppress(OSError):
                syscalls.close(segment.fd)
        self.segments = {}
        locks, self.locks = self.locks, []
        for lock in locks:
            lock.free()
