"""Plans of new objects (`model.Plan`): how large their pieces are, their bytes, and what is left when holes go."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from shardfs.disk import FilePart
from shardfs.extents import cover
from shardfs.model import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardfs.model import U64, Blob, Content, Piece, Plan

SPAN = 1 << 20
"""Bytes are read so many at a time where they are only looked at."""


def piece_size(piece: Piece) -> int:
    """In bytes."""
    if isinstance(piece, ByteRange):
        return piece.stop - piece.start
    if isinstance(piece, FilePart):
        return piece.size
    return piece.nbytes if isinstance(piece, memoryview) else len(piece)


def pieces_of(content: Content) -> Plan:
    """Content as pieces."""
    return content if isinstance(content, list) else [content]


def size_of(content: Content) -> int:
    """In bytes."""
    return sum(map(piece_size, pieces_of(content)))


def shifted(plan: Plan, start: int) -> Plan:
    """The same pieces, for who sees the old object from `start` bytes before it."""
    return [ByteRange(start + p.start, start + p.stop) if isinstance(p, ByteRange) else p for p in plan]


def unchanged(size: int) -> Plan:
    """That an object of this size stays as it is."""
    return [ByteRange(0, size)] if size else []


def joined(plan: Iterable[Piece]) -> Plan:
    """The same bytes in fewer pieces, as those that follow each other in the old object become one."""
    out: Plan = []
    for piece in plan:
        last = out[-1] if out else None
        if isinstance(piece, ByteRange) and isinstance(last, ByteRange) and last.stop == piece.start:
            out[-1] = ByteRange(last.start, piece.stop)
        elif piece_size(piece):
            out.append(piece)
    return out


def is_same(plan: Plan | None, size: int | None) -> bool:
    """Whether an object of this size (None: there is none) stays as it is."""
    return plan == (None if size is None else unchanged(size))


def chunks_of(pieces: Iterable[Piece], old: Blob | None) -> Iterator[bytes | memoryview]:
    """The bytes, some at a time. Raise ValueError, with the reason, if there are not so many."""
    for piece in pieces:
        if isinstance(piece, FilePart):
            for start in range(0, piece.size, SPAN):
                yield _whole(os.pread(piece.fd, min(SPAN, piece.size - start), piece.start + start), piece, start)
        elif isinstance(piece, ByteRange):
            if old is None:
                raise ValueError("bytes of an object that there is not")
            for start in range(piece.start, piece.stop, SPAN):
                part = ByteRange(start, min(start + SPAN, piece.stop))
                yield _whole(old.read([part])[0], piece, start - piece.start)
        else:
            yield piece


def _whole(data: bytes, piece: ByteRange | FilePart, done: int) -> bytes:
    wanted = min(SPAN, piece_size(piece) - done)
    if len(data) != wanted:
        raise ValueError(f"{wanted} bytes expected at {piece.start + done}, {len(data)} found")
    return data


def bytes_of(content: Content, old: Blob | None = None) -> bytes:
    """All bytes, in memory. Raise as `chunks_of`."""
    return content if isinstance(content, bytes) else b"".join(chunks_of(pieces_of(content), old))


def leaving(starts: U64, sizes: U64, object_size: int) -> U64:
    """Which ranges are not wholly in an object of this size; sums that wrap are not."""
    limit = np.uint64(object_size)
    return np.flatnonzero((starts > limit) | (sizes > limit - np.minimum(starts, limit))).astype(np.uint64)


def packed(starts: U64, stops: U64, begin: int) -> tuple[Plan, U64]:
    """The bytes in these ranges of the old object, as pieces to be put at `begin`; and where each range begins then.

    They keep their order, and what several share is there once.
    """
    kept = cover(starts, stops)
    sizes = kept.stops - kept.starts
    begins = np.uint64(begin) + np.cumsum(sizes, dtype=np.uint64) - sizes
    pieces: Plan = [ByteRange(a, b) for a, b in zip(kept.starts.tolist(), kept.stops.tolist(), strict=True)]
    if not len(begins):
        return pieces, np.full(len(starts), begin, np.uint64)
    at = np.maximum(kept.starts.searchsorted(starts, side="right"), 1) - 1
    moved = begins[at] + (starts - kept.starts[at])
    return pieces, np.where(stops > starts, moved, np.uint64(begin))
