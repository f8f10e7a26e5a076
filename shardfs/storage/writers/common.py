"""Types that all writers share: plans of new objects, and recovery notes of begun updates."""

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
    """The recovery note of an update that is about to switch versions. Its fields can be stored as JSON.

    Args:
        key: the object.
        base: the version that is replaced, in the writer's own notation; None if the object did not exist.
        temp: the name of the temporary file beside the object, or the id of a multipart upload; "" if there is none.
            After the switch, the temporary file holds the old version.
        temp_ino: the inode number of the new version in the temporary file; 0 if the object is to be removed.
        head: the number of bytes at the beginning that a change in place may rewrite; 0 if the object is replaced.
    """

    key: str
    base: Any
    temp: str = ""
    temp_ino: int = 0
    head: int = 0

    @classmethod
    def from_json(cls, meta: Mapping[str, Any]) -> Self:
        """Rebuild a note from its `_asdict` form. Fields that an earlier version did not write get their defaults."""
        return cls(**{name: meta[name] for name in cls._fields if name in meta})


Make = Callable[[Blob | None], Plan | None]
"""Gets the current object (None: absent) and returns the plan of the new one (None: remove the object)."""


def nobody(_: Any) -> None:
    """Ignore the argument: the default of optional callbacks."""


def part_of(piece: Piece, start: int, stop: int) -> Piece:
    """Return bytes `[start, stop)` of a piece, without reading them."""
    if isinstance(piece, ByteRange):
        return ByteRange(piece.start + start, piece.start + stop)
    if isinstance(piece, FilePart):
        return FilePart(piece.fd, piece.start + start, stop - start)
    return memoryview(piece)[start:stop]


class PlannedBlob:
    """The content that a plan makes of an old object, readable before it is written. Holds only the plan in memory."""

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
        """Return all bytes of a plan. The ranges of the old object are read with one call."""
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
