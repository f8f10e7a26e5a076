"""A journal looked into from outside: nothing is locked or changed, also if a mount is writing to it."""

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
    """Attributes as those of `Journal`; `source` is its name without credentials, `owner` who is writing, if anybody.

    While somebody writes, what is read is a moment of the past, and the last record may be seen half.
    """

    def __init__(self, directory: Path, reading: Reading, owner: dict[str, Any] | None) -> None:
        self._reading = reading
        self.directory, self.owner, self.source = directory, owner, reading.source()
        self.recovered, self.problems, self.damaged_paths = reading.records, reading.problems, reading.damaged_paths
        self.nbytes = sum(file.end for file in reading.files.values())

    @classmethod
    def open(cls, directory: str | Path, source: str | None = None) -> Self:
        """Read it all; `source` is compared if it is given. Also another user's copy. The errors of `Journal.open`."""
        directory = Path(directory)
        lock = str(directory / source_locks.LOCK)
        owner = source_locks.read_owner(lock) if places.is_locked(lock) else None
        reading = read(directory, None if source is None else places.source_id(source), write=False)
        return cls(directory, reading, owner)

    def part(self, position: Position) -> FilePart:
        """Where the data are; good until `close`."""
        return FilePart(self._reading.files[position.segment].fd, position.start, position.size)

    @contextmanager
    def using(self, position: Position) -> Iterator[FilePart]:
        """`part`, as `Journal.using`."""
        yield self.part(position)

    def read(self, position: Position, start: int = 0, size: int | None = None) -> bytes:
        """As `Journal.read`."""
        return read_part(self.part(position), position.crc, start, size)

    def close(self) -> None:
        """Let go of the segments."""
        self._reading.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
