"""The content that an update makes of an old object, readable before it is written."""

from __future__ import annotations

import errno
from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING

from shardfs.model.blobs import ByteRange, FilePart, Stat, absolute, read_file
from shardfs.model.write_plan import piece_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardfs.model.blobs import Blob, ByteRequest, Piece, Plan


def part_of(piece: Piece, start: int, stop: int) -> Piece:
    """Return bytes `[start, stop)`, counted from the beginning of a piece, without reading them."""
    if isinstance(piece, ByteRange):
        return ByteRange(piece.start + start, piece.start + stop)
    if isinstance(piece, FilePart):
        return FilePart(piece.fd, piece.start + start, stop - start)
    return memoryview(piece)[start:stop]


class PlannedBlob:
    """The content that a plan makes of an old object, readable before it is written. Holds only the plan in memory.

    Its methods raise the errors of `old`, and OSError (EIO) if that or a file of the plan ends early. The file
    descriptors of the plan stay open as long as their giver promises.

    Args:
        old: the object whose bytes the plan's `ByteRange`s are; None if there are none.
    """

    __slots__ = ("__weakref__", "_old", "_stops", "fd", "file_offset", "plan")

    def __init__(self, plan: Plan, old: Blob | None) -> None:
        self.fd = -1
        self.file_offset = 0
        self.plan = plan
        self._old = old
        self._stops = list(accumulate(map(piece_size, plan)))

    @property
    def size(self) -> int:
        """Bytes of the new object."""
        return self._stops[-1] if self._stops else 0

    def stat(self) -> Stat:
        """The size; time and version are unknown: 0 and None."""
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
        """Return all bytes of a plan for the same old object, such as `plan`. Its ranges are read with one call."""
        ranges = [piece for piece in plan if isinstance(piece, ByteRange)]
        old = iter(self._old.read(ranges) if self._old is not None and ranges else ())
        joined = []
        for piece in plan:
            if isinstance(piece, ByteRange):
                data: bytes | memoryview = next(old)
            elif isinstance(piece, FilePart):
                data = read_file(piece.fd, piece.size, piece.start)
            else:
                data = piece
            if len(data) != piece_size(piece):
                raise OSError(errno.EIO, f"{piece_size(piece)} bytes were expected, but only {len(data)} are there")
            joined.append(data)
        return b"".join(joined)
