"""What a journal holds: its segments, the records in them that are needed, and where their data are by now."""

from __future__ import annotations

import errno
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardfs.model.blobs import FilePart
from shardfs.write.journal.reading import RecordPlace, read_part

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from shardfs.write.journal.records import Position
    from shardfs.write.journal.segments import Segment


class Contents:
    """The half of a `Journal` that keeps account. `_lock` guards all of it; private methods expect it to be held."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = threading.Lock()
        self._segments: dict[int, Segment] = {}  # oldest first
        self._dirty: dict[int, Segment] = {}  # written to since they were synced
        self._live: dict[int, RecordPlace] = {}
        self._used = self._live_bytes = 0
        self._moved: dict[tuple[int, int], Position] = {}  # segment and start when it was written: where it is now
        self._origins: dict[tuple[int, int], tuple[int, int]] = {}  # the inverse

    @property
    def nbytes(self) -> int:
        """What is taken by records that are still needed, and by others between and behind them."""
        with self._lock:
            if not self._live:
                return 0
            used = self._used
            for segment in self._segments.values():
                if segment.live:
                    break
                used -= segment.end
            return used

    def release(self, lsns: Iterable[int]) -> None:
        """The records are superseded or done with; their segments are unlinked some time later."""
        with self._lock:
            for lsn in lsns:
                self._forget(lsn)

    def part(self, position: Position) -> FilePart:
        """Where the data are, for `preadv` and copies. Good until the record is released; see `pin`."""
        with self._lock:
            return self._part(position)

    def _part(self, position: Position) -> FilePart:
        position = self._moved.get((position.segment, position.start), position)
        segment = self._segments.get(position.segment)
        if segment is None:
            raise OSError(errno.ESTALE, "the record is not in the journal any more")
        return FilePart(segment.fd, position.start, position.size)

    def pin(self, position: Position) -> FilePart:
        """As `part`, but good until `unpin`, also if the record is released meanwhile."""
        with self._lock:
            part = self._part(position)
            self._of(part).pins += 1
            return part

    def unpin(self, part: FilePart) -> None:
        """Exactly once for what `pin` gave."""
        with self._lock:
            self._of(part).pins -= 1

    def _of(self, part: FilePart) -> Segment:
        return next(segment for segment in reversed(self._segments.values()) if segment.fd == part.fd)

    @contextmanager
    def using(self, position: Position) -> Iterator[FilePart]:
        """`pin` for the length of a `with` block."""
        part = self.pin(position)
        try:
            yield part
        finally:
            self.unpin(part)

    def read(self, position: Position, start: int = 0, size: int | None = None) -> bytes:
        """Bytes of the data, fewer at their end. Raise EIO if all were asked for and are not what was written."""
        with self.using(position) as part:
            return read_part(part, position.crc, start, size)

    def _note(self, lsn: int, place: RecordPlace) -> None:
        self._live[lsn] = place
        self._live_bytes += place.size
        self._segments[place.number].live += 1

    def _forget(self, lsn: int) -> None:
        if (place := self._live.pop(lsn, None)) is not None:
            self._live_bytes -= place.size
            self._segments[place.number].live -= 1

    def _add(self, segment: Segment) -> None:
        self._segments[segment.number] = segment
        self._used += segment.end

    def _unlink(self, segment: Segment) -> None:
        self._segments.pop(segment.number, None)
        self._dirty.pop(segment.number, None)
        self._used -= segment.end
        for key in [key for key in self._origins if key[0] == segment.number]:
            del self._moved[self._origins.pop(key)]
        segment.remove(self.directory)
