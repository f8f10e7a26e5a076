"""What writers have in common: what they are asked to make, and what they note for recovery."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from errno import EIO
from itertools import accumulate
from os import pread
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from shardfs.model.blobs import Blob, ByteRange, FilePart, Piece, Plan, Stat
from shardfs.model.write_plan import piece_size
from shardfs.storage.blob_views import absolute

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardfs.model.blobs import ByteRequest


class Begun(NamedTuple):
    """An update that is about to happen, for whoever finds its traces after a crash. JSON can carry it.

    Args:
        key: the object.
        base: what it was before, as its writer tells versions apart; None if it was not there.
        temp: what the new one was made in, if anything: the file beside the object, in which the old one is found
            later, or the upload in parts.
        temp_ino: the inode number of that file, as long as it is the new one; 0 if the object is to be removed.
        head: the object is changed where it lies, and so many bytes at its beginning are not only added to; else 0.
    """

    key: str
    base: Any
    temp: str = ""
    temp_ino: int = 0
    head: int = 0

    @classmethod
    def told(cls, meta: Mapping[str, Any]) -> Self:
        """Of what `_asdict` has said, perhaps of an earlier version that knew less."""
        return cls(**{name: meta[name] for name in cls._fields if name in meta})


Make = Callable[[Blob | None], Plan | None]
"""Of the object as it is (None: absent), what it shall be (None: gone)."""


def nobody(_: Any) -> None:
    """Who is not interested."""


def part_of(piece: Piece, start: int, stop: int) -> Piece:
    """Its bytes `[start, stop)`."""
    if isinstance(piece, ByteRange):
        return ByteRange(piece.start + start, piece.start + stop)
    if isinstance(piece, FilePart):
        return FilePart(piece.fd, piece.start + start, stop - start)
    return memoryview(piece)[start:stop]


class PlannedBlob:
    """A new object that is still to be: what a plan makes of an old one. Nothing is kept but the plan."""

    __slots__ = ("__weakref__", "_old", "_stops", "base", "fd", "plan")

    def __init__(self, plan: Plan, old: Blob | None) -> None:
        self.fd, self.base = -1, 0
        self.plan, self._old = plan, old
        self._stops = list(accumulate(map(piece_size, plan)))

    @property
    def size(self) -> int:
        return self._stops[-1] if self._stops else 0

    def stat(self) -> Stat:
        return Stat(self.size, 0, None)

    def read(self, requests: Sequence[ByteRequest]) -> list[bytes]:
        return [self.bytes(self._between(absolute(r, self.size))) for r in requests]

    def _between(self, wanted: ByteRange) -> Plan:
        out = []
        for i in range(bisect_right(self._stops, wanted.start), len(self.plan)):
            begin = self._stops[i] - piece_size(self.plan[i])
            if begin >= wanted.stop:
                break
            out.append(part_of(self.plan[i], max(wanted.start - begin, 0), min(wanted.stop, self._stops[i]) - begin))
        return out

    def bytes(self, plan: Plan) -> bytes:
        """All bytes of a plan; those of the old object are asked for at once."""
        ranges = [piece for piece in plan if isinstance(piece, ByteRange)]
        old = iter(self._old.read(ranges) if self._old is not None and ranges else ())
        joined = []
        for piece in plan:
            if isinstance(piece, ByteRange):
                data: bytes | memoryview = next(old)
            elif isinstance(piece, FilePart):
                data = pread(piece.fd, piece.size, piece.start)
            else:
                data = piece
            if len(data) != piece_size(piece):
                raise OSError(EIO, f"{piece_size(piece)} bytes were expected, {len(data)} are there")
            joined.append(data)
        return b"".join(joined)
