"""Read-only access to a journal: locks and changes nothing, and works while a mount writes to the journal."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from shardfs.model.blobs import FilePart
from shardfs.storage import source_locks
from shardfs.write.journal import places
from shardfs.write.journal.reading import Reading, read, read_part

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardfs.write.journal.records import Position


class Peek:
    """A snapshot of a journal, with the attributes and read methods of `Journal`.

    `source` is the source's name without credentials. `owner` describes the process that holds the lock; None if no
    process does. If a mount writes meanwhile, the snapshot misses later records, and its last record may be incomplete.
    """

    def __init__(self, directory: Path, reading: Reading, owner: dict[str, Any] | None) -> None:
        self._reading = reading
        self.directory, self.owner, self.source = directory, owner, reading.source()
        self.recovered, self.problems, self.damaged_paths = reading.records, reading.problems, reading.damaged_paths
        self.nbytes = sum(file.end for file in reading.files.values())

    @classmethod
    def open(cls, directory: str | Path, source: str | None = None) -> Self:
        """Read and verify a whole journal. The directory may be a copy of another user's journal.

        Raise OSError if `source` is given and the journal belongs to another source, or if a segment is no regular
        file; UnsupportedError if a newer shardfs wrote the journal.
        """
        directory = Path(directory)
        lock = str(directory / source_locks.LOCK)
        owner = source_locks.read_owner(lock) if places.is_locked(lock) else None
        reading = read(directory, None if source is None else places.source_id(source), write=False)
        return cls(directory, reading, owner)

    def part(self, position: Position) -> FilePart:
        """Return where a record's data are. The result is valid until `close`."""
        return FilePart(self._reading.files[position.segment].fd, position.start, position.size)

    @contextmanager
    def using(self, position: Position) -> Iterator[FilePart]:
        """Give a record's data for the length of a `with` block, like `Journal.using`."""
        yield self.part(position)

    def read(self, position: Position, start: int = 0, size: int | None = None) -> bytes:
        """Return bytes of a record's data, like `Journal.read`."""
        return read_part(self.part(position), position.crc, start, size)

    def close(self) -> None:
        """Close the segment files."""
        self._reading.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
