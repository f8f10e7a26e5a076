"""Operations on plans of new objects (`model.Plan`): sizes, bytes, comparison, packing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from shardfs.model.blobs import ByteRange, FilePart
from shardfs.model.byte_ranges import cover

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardfs.model.blobs import Blob, Content, Piece, Plan
    from shardfs.model.values import U64

SPAN = 1 << 20
"""Bytes that are read at a time, to limit memory."""


def piece_size(piece: Piece) -> int:
    """The size of a piece in bytes."""
    if isinstance(piece, bytes):  # first, because most pieces are
        return len(piece)
    if isinstance(piece, ByteRange):
        return piece.stop - piece.start
    if isinstance(piece, FilePart):
        return piece.size
    return piece.nbytes


def pieces_of(content: Content) -> Plan:
    """The content as a list of pieces."""
    return content if isinstance(content, list) else [content]


def size_of(content: Content) -> int:
    """The size of the content in bytes."""
    return sum(map(piece_size, pieces_of(content)))


def shifted(plan: Plan, start: int) -> Plan:
    """The plan with the ranges of the old object moved by `start`, for an old object inside a larger one."""
    return [ByteRange(start + p.start, start + p.stop) if isinstance(p, ByteRange) else p for p in plan]


def unchanged(size: int) -> Plan:
    """The plan that keeps an object of this size unchanged."""
    return [ByteRange(0, size)] if size else []


def joined(plan: Iterable[Piece]) -> Plan:
    """The plan with adjacent ranges of the old object joined and empty pieces dropped."""
    out: Plan = []
    for piece in plan:
        last = out[-1] if out else None
        if isinstance(piece, ByteRange) and isinstance(last, ByteRange) and last.stop == piece.start:
            out[-1] = ByteRange(last.start, piece.stop)
        elif piece_size(piece):
            out.append(piece)
    return out


def is_same(plan: Plan | None, size: int | None) -> bool:
    """Whether the plan keeps an object of this size unchanged; None stands for no object."""
    return plan == (None if size is None else unchanged(size))


def chunks_of(pieces: Iterable[Piece], old: Blob | None) -> Iterator[bytes | memoryview]:
    """The bytes of the pieces, at most `SPAN` at a time from files. Raise ValueError if one is too short."""
    for piece in pieces:
        if isinstance(piece, FilePart):
            for start in range(0, piece.size, SPAN):
                yield _whole(os.pread(piece.fd, min(SPAN, piece.size - start), piece.start + start), piece, start)
        elif isinstance(piece, ByteRange):
            if old is None:
                raise ValueError(f"the plan has bytes [{piece.start}, {piece.stop}) of an old object, but none exists")
            for start in range(piece.start, piece.stop, SPAN):
                part = ByteRange(start, min(start + SPAN, piece.stop))
                yield _whole(old.read([part])[0], piece, start - piece.start)
        else:
            yield piece


def _whole(data: bytes, piece: ByteRange | FilePart, offset: int) -> bytes:
    size = min(SPAN, piece_size(piece) - offset)
    if len(data) != size:
        raise ValueError(f"{size} bytes expected at {piece.start + offset}, {len(data)} found")
    return data


def bytes_of(content: Content, old: Blob | None = None) -> bytes:
    """The whole content in memory. Raises the errors of `chunks_of`."""
    return content if isinstance(content, bytes) else b"".join(chunks_of(pieces_of(content), old))


def packed(starts: U64, stops: U64, begin: int) -> tuple[Plan, U64]:
    """Pieces with the bytes of ranges of the old object, to be placed at `begin`; and the new position of each range.

    The bytes keep their order by old position, without the gaps; bytes that several ranges share are included once. The
    positions (n,) are in the order of `starts`; that of an empty range is `begin`.
    """
    union = cover(starts, stops)
    sizes = union.stops - union.starts
    begins = np.uint64(begin) + np.cumsum(sizes, dtype=np.uint64) - sizes
    pieces: Plan = [ByteRange(a, b) for a, b in zip(union.starts.tolist(), union.stops.tolist(), strict=True)]
    if not len(begins):
        return pieces, np.full(len(starts), begin, np.uint64)
    at = np.maximum(union.starts.searchsorted(starts, side="right"), 1) - 1
    moved = begins[at] + (starts - union.starts[at])
    return pieces, np.where(stops > starts, moved, np.uint64(begin))
