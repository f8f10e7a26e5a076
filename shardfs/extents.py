"""Byte ranges in one object: which bytes they cover, and which of them overlap. Arrays in, arrays out."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardfs.model import U64, ShardIndex


class Coverage(NamedTuple):
    """What ranges cover together.

    Args:
        starts, stops: of the bytes covered, as few ranges as possible, ascending.
        clashes: bytes that several ranges share in part, as (start, stop).
        shared: bytes that are covered more than once by ranges that are equal.
    """

    starts: U64
    stops: U64
    clashes: Sequence[tuple[int, int]]
    shared: int

    @property
    def nbytes(self) -> int:
        """How many bytes are covered."""
        return int((self.stops - self.starts).sum())


def live_bytes(index: ShardIndex, behind: int = 0) -> int:
    """How many bytes the chunks of an index cover, each with so many behind it; entries that cannot be true do not."""
    broken = list(index.broken)
    starts = np.delete(index.starts, broken).astype(np.uint64)
    return cover(starts, starts + np.delete(index.sizes, broken) + np.uint64(behind)).nbytes


def cover(starts: U64, stops: U64) -> Coverage:
    """The union of ranges (n,), in any order."""
    order = np.lexsort((stops, starts))
    starts, stops = starts[order], stops[order]
    filled = stops > starts
    starts, stops = starts[filled], stops[filled]
    if not len(starts):
        return Coverage(starts, stops, (), 0)
    again = np.append(False, (starts[1:] == starts[:-1]) & (stops[1:] == stops[:-1]))
    shared = int((stops[again] - starts[again]).sum())
    starts, stops = starts[~again], stops[~again]
    reach = np.maximum.accumulate(stops)
    clash = np.flatnonzero(starts[1:] < reach[:-1]) + 1
    clashes = list(zip(starts[clash].tolist(), np.minimum(stops[clash], reach[clash - 1]).tolist(), strict=True))
    first = np.append(True, starts[1:] > reach[:-1])
    last = np.append(np.flatnonzero(first)[1:] - 1, len(starts) - 1)
    return Coverage(starts[first], reach[last], clashes, shared)


def groups(starts: U64, stops: U64, span: int) -> list[tuple[int, int, int]]:
    """Runs of ranges, ascending by start, to be read at once: (first, end, stop), of `span` bytes at most.

    A range longer than that is a run by itself.
    """
    reach = np.maximum.accumulate(stops)
    out, i = [], 0
    while i < len(starts):
        j = max(i + 1, int(reach.searchsorted(starts[i] + np.uint64(span), "right")))
        out.append((i, j, int(stops[i:j].max())))
        i = j
    return out
