"""In-memory account of a journal: its segments, its live records, and the current position of each record's data."""

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
    """The base class of `Journal` that tracks segments and live records.

    A record is live until it is released. `_lock` guards all attributes. The caller of a private method holds `_lock`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = threading.Lock()
        self._segments: dict[int, Segment] = {}  # oldest first
        self._dirty: dict[int, Segment] = {}  # written to since the last fdatasync
        self._live: dict[int, RecordPlace] = {}
        self._used = self._live_bytes = 0
        self._moved: dict[tuple[int, int], Position] = {}  # original (segment, start) to the current position
        self._origins: dict[tuple[int, int], tuple[int, int]] = {}  # the inverse

    @property
    def nbytes(self) -> int:
        """Bytes of the segments from the oldest one with a live record on; 0 if no record is live."""
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
        """Mark records as not needed any more. `tidy` unlinks segments without live records later."""
        with self._lock:
            for lsn in lsns:
                self._forget(lsn)

    def part(self, position: Position) -> FilePart:
        """Return where a record's data are, for `preadv` and copies.

        The result is valid until the record is released. `pin` gives a longer lifetime. Raise OSError (ESTALE) if the
        segment is gone.
        """
        with self._lock:
            return self._part(position)

    def _part(self, position: Position) -> FilePart:
        position = self._moved.get((position.segment, position.start), position)
        segment = self._segments.get(position.segment)
        if segment is None:
            raise OSError(errno.ESTALE, "the record is not in the journal any more")
        return FilePart(segment.fd, position.start, position.size)

    def pin(self, position: Position) -> FilePart:
        """Return where a record's data are, and keep their segment until `unpin`, even if the record is released."""
        with self._lock:
            part = self._part(position)
            self._of(part).pins += 1
            return part

    def unpin(self, part: FilePart) -> None:
        """Release a part that `pin` returned. Call it exactly once for each `pin`."""
        with self._lock:
            self._of(part).pins -= 1

    def _of(self, part: FilePart) -> Segment:
        return next(segment for segment in reversed(self._segments.values()) if segment.fd == part.fd)

    @contextmanager
    def using(self, position: Position) -> Iterator[FilePart]:
        """Pin a record's data for the length of a `with` block."""
        part = self.pin(position)
        try:
            yield part
        finally:
            self.unpin(part)

    def read(self, position: Position, start: int = 0, size: int | None = None) -> bytes:
        """Return up to `size` bytes of a record's data from `start`; None: up to the end.

        A read of all data verifies their crc32c and raises OSError (EIO) if it differs. A partial read is not verified.
        """
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
