"""Arithmetic of many byte ranges in one object: coverage, overlaps, grouping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardfs.model.blobs import ByteRange

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from shardfs.model.values import U64, Bool

    Unsigned = npt.NDArray[np.unsignedinteger[Any]]


class Coverage(NamedTuple):
    """The union of byte ranges.

    Args:
        starts, stops: the covered bytes as the fewest ranges, ascending.
        clashes: the bytes where ranges overlap that are not equal, as (start, stop).
        shared: the number of bytes saved because equal ranges share them.
    """

    starts: U64
    stops: U64
    clashes: Sequence[tuple[int, int]]
    shared: int

    @property
    def nbytes(self) -> int:
        """The number of covered bytes."""
        return int((self.stops - self.starts).sum())


def leaving(starts: Unsigned, sizes: Unsigned, object_size: int) -> Bool:
    """A mask (n,) of the ranges that leave an object of this size, also if start plus size overflows 64 bits."""
    limit = np.uint64(object_size)
    return np.asarray((starts > limit) | (sizes > limit - np.minimum(starts, limit)))


def leaving_reason(start: int | np.integer[Any], size: int | np.integer[Any], object_size: int) -> str:
    """Why an index entry is invalid whose range leaves the object."""
    return f"its range [{int(start)}, {int(start) + int(size)}) leaves the object of {object_size} bytes"


def require_still_leaving(starts: U64, sizes: U64, old_size: int, new_size: int) -> None:
    """Raise ValueError, with the reason, if a range that leaves an object of the old size is in one of the new size."""
    inside = leaving(starts, sizes, old_size) & ~leaving(starts, sizes, new_size)
    for i in np.flatnonzero(inside)[:1].tolist():
        why = leaving_reason(starts[i], sizes[i], old_size)
        raise ValueError(f"{why}, and would have bytes of other chunks after the change")


def cover(starts: U64, stops: U64) -> Coverage:
    """The union of ranges (n,), which may be in any order. Empty ranges cover nothing."""
    order = np.lexsort((stops, starts))
    starts, stops = starts[order], stops[order]
    filled = stops > starts
    starts, stops = starts[filled], stops[filled]
    if not len(starts):
        return Coverage(starts, stops, (), 0)
    repeated = np.append(False, (starts[1:] == starts[:-1]) & (stops[1:] == stops[:-1]))
    shared = int((stops[repeated] - starts[repeated]).sum())
    starts, stops = starts[~repeated], stops[~repeated]
    reach = np.maximum.accumulate(stops)
    clash = np.flatnonzero(starts[1:] < reach[:-1]) + 1
    clashes = list(zip(starts[clash].tolist(), np.minimum(stops[clash], reach[clash - 1]).tolist(), strict=True))
    first = np.append(True, starts[1:] > reach[:-1])
    last = np.append(np.flatnonzero(first)[1:] - 1, len(starts) - 1)
    return Coverage(starts[first], reach[last], clashes, shared)


def groups(starts: U64, stops: U64, span: int) -> list[tuple[int, int, int]]:
    """Group ranges, ascending by start, for reads of at most `span` bytes; a longer range is a group of its own.

    Each group is (first, end, stop): the ranges `first` to `end - 1`, which end at byte `stop`.
    """
    reach = np.maximum.accumulate(stops)
    out, i = [], 0
    while i < len(starts):
        j = max(i + 1, int(reach.searchsorted(starts[i] + np.uint64(span), "right")))
        out.append((i, j, int(stops[i:j].max())))
        i = j
    return out


def coalesce(ranges: Sequence[ByteRange], max_gap: int, max_merged: int) -> list[tuple[ByteRange, list[int]]]:
    """Merge ranges with at most `max_gap` bytes between them to ranges of at most `max_merged` bytes.

    Return each merged range with the indices of its members in `ranges`, ascending by start. A range that is longer
    than `max_merged` stays alone.
    """
    merged: list[tuple[ByteRange, list[int]]] = []
    for i in sorted(range(len(ranges)), key=lambda i: ranges[i]):
        r = ranges[i]
        if merged:
            last, members = merged[-1]
            stop = max(last.stop, r.stop)
            if r.start - last.stop <= max_gap and stop - last.start <= max_merged:
                members.append(i)
                merged[-1] = (ByteRange(last.start, stop), members)
                continue
        merged.append((r, [i]))
    return merged
