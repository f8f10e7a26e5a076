"""Which chunks a reader will ask for next, in coordinates of the chunk grid.

A program that reads a plane, a pencil, a block or a whole array runs through the grid in nested loops. `Streams`
recognises these loops from the accesses alone: in any order of the axes, several of them interleaved, and slightly out
of order, as parallel readers are. A loop is predicted only as far as the accesses have shown it. The reader crosses the
end of the first row before any row is predicted, so a pencil or a plane costs no chunk beyond its end.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardfs.model.values import Coords

RUN = 4
"""Chunks in a row that begin a stream."""

MAX_STREAMS = 32
"""Streams that are followed at once; the one that was used least recently is dropped."""

RECENT = 512
"""Accesses that are remembered in order to recognise the beginning of a stream."""

DISORDER = 64
"""Chunks by which an access may be ahead of a stream or behind it: parallel readers have many requests under way."""

GROWTH = 4
"""How many times as many chunks are fetched ahead for each inner loop that runs over its whole axis."""

UNPROVEN = 12
"""Chunks that may be predicted before any prediction has come true."""

PROVEN = 3
"""Chunks that may be predicted in addition for each prediction that has come true."""

PATIENCE = 128
"""Accesses, in addition to the predictions that came true, after which a prediction is given up."""

MAX_PATIENCE = 4096
"""The most accesses after which a prediction is given up."""

LAST = 16
"""A stream is at the farthest of so many accesses. So one access far ahead of the others moves it only for a while."""


class _Loop:
    """One loop: `count` chunks along an axis, from `first` in steps of +1 or -1. `reached` is the last one accessed."""

    __slots__ = ("axis", "count", "first", "reached", "step")

    def __init__(self, axis: int, first: int, step: int, dim: int) -> None:
        self.axis = axis
        self.first = first
        self.step = step
        self.reached = 0
        self.count = dim - first if step > 0 else first + 1

    def position(self, coords: Coords) -> int:
        return (coords[self.axis] - self.first) * self.step


class _Side(NamedTuple):
    """One side of a block of chunks that is read by nested loops."""

    axis: int
    step: int
    length: int


Block: TypeAlias = tuple[_Side, ...]
"""The sides of a block, innermost loop first."""


class Stream:
    """Nested loops over the chunk grid, innermost first. Chunks are numbered in the order in which they are visited.

    Args:
        corner: the chunk at which all loops begin.
        far: the farthest chunk of the first run, which is along `axis` in steps of `step`.
    """

    def __init__(self, dims: Sequence[int], corner: Coords, far: Coords, axis: int, step: int) -> None:
        self._dims = dims
        self.corner = corner
        self._loops = [_Loop(axis, corner[axis], step, dims[axis])]
        self._loops[0].reached = self._mark = self._issued = self._loops[0].position(far)
        self._last = deque([(self._mark, far)], LAST)
        self.used = self._mark + 1
        self.age = 0
        self._sure = 0

    @classmethod
    def of_block(cls, dims: Sequence[int], corner: Coords, block: Block) -> Stream:
        """Return a stream that will read a block of known shape."""
        stream = cls(dims, corner, corner, block[0].axis, block[0].step)
        stream._loops = [_Loop(axis, corner[axis], step, dims[axis]) for axis, step, _ in block]
        for loop, side in zip(stream._loops, block, strict=True):
            loop.count = min(loop.count, side.length)
        stream._sure = stream._total()
        return stream

    @property
    def block(self) -> Block | None:
        """The shape of the box of chunks that was read; None while it has gaps, or only one axis."""
        sides = tuple(_Side(loop.axis, loop.step, loop.reached + 1) for loop in self._loops)
        whole = len(sides) > 1 and self.used * 4 >= math.prod(side.length for side in sides) * 3
        return sides if whole else None

    def follow(self, coords: Coords) -> bool:
        """Return whether an access belongs to the stream. If so, the stream moves on, or grows by an axis."""
        number = self._number(coords)
        if number is None:
            if not (self._widen(coords) or self._nest(coords)):
                return False
            self._last = deque([(self._number(c) or 0, c) for _, c in self._last], LAST)
            self._issued = self._mark = max(self._last)[0]
            number = self._number(coords) or 0
        if not self._mark - DISORDER <= number <= max(self._mark, self._issued) + DISORDER:
            return False
        self.used += 1
        self._last.append((number, coords))
        self._mark = max(self._last)[0]
        for loop in self._loops:
            loop.reached = max(loop.reached, loop.position(coords))
        return True

    def ahead(self, room: int) -> list[Coords]:
        """Return the chunks to fetch next: at most `room`.

        A reader that has crossed an array from edge to edge probably wants the whole plane or array, so much is fetched
        ahead of it. Any other reader gets at most as many chunks ahead as it has used.

        They are returned in portions of at least half the distance ahead, so that neighbours are fetched together.
        """
        self._issued = max(self._issued, self._mark)
        whole = sum(loop.count == self._dims[loop.axis] for loop in self._loops[:-1])
        wanted = max(self.used * GROWTH**whole, self._sure)
        end, distance = self._end() - 1, min(wanted, self._issued - self._mark + room)
        last = min(self._mark + distance, end)
        portion = last - self._issued
        if portion <= 0 or (portion * 2 < distance and last < end):
            return []
        chunks = [self._at(number) for number in range(self._issued + 1, last + 1)]
        self._issued = last
        return chunks

    @property
    def at_end(self) -> bool:
        """Whether all chunks up to the end were returned by `ahead` or accessed."""
        return max(self._issued, self._mark) >= self._total() - 1

    def _end(self) -> int:
        """Return the number of chunks up to the end of what may be predicted.

        A second row may be nothing but another pencil beside the first one, so only a third row predicts more rows.
        Whole planes are evidence enough.
        """
        *inner, outer = self._loops
        whole_planes = any(loop.count == self._dims[loop.axis] for loop in inner[1:])
        second_row = inner and outer.reached == 1 and not whole_planes and not self._sure
        return self._total() // outer.count * 2 if second_row else self._total()

    def _total(self) -> int:
        return math.prod(loop.count for loop in self._loops)

    def _number(self, coords: Coords) -> int | None:
        number, weight, inside = 0, 1, list(self.corner)
        for loop in self._loops:
            position = loop.position(coords)
            if not 0 <= position < loop.count:
                return None
            number += position * weight
            weight *= loop.count
            inside[loop.axis] = coords[loop.axis]
        return number if tuple(inside) == coords else None

    def _at(self, number: int) -> Coords:
        coords = list(self.corner)
        for loop in self._loops:
            number, position = divmod(number, loop.count)
            coords[loop.axis] = loop.first + position * loop.step
        return tuple(coords)

    def _off(self, coords: Coords) -> list[int]:
        """Return the axes outside of all loops along which the chunk is away from the corner."""
        looped = {loop.axis for loop in self._loops}
        return [
            axis for axis, (a, b) in enumerate(zip(coords, self.corner, strict=True)) if a != b and axis not in looped
        ]

    def _widen(self, coords: Coords) -> bool:
        """Take in a chunk a little beyond the end that a loop was thought to have."""
        beyond = [loop for loop in self._loops if not 0 <= loop.position(coords) < loop.count]
        if self._off(coords) or len(beyond) != 1 or self.block is not None:
            return False
        loop, position = beyond[0], beyond[0].position(coords)
        if not loop.count <= position < loop.count + DISORDER:
            return False
        loop.count = position + 1
        return True

    def _nest(self, coords: Coords) -> bool:
        """Begin an outer loop with the first access beside the box so far. The inner loops end where the reader did."""
        off = self._off(coords)
        if len(off) != 1 or any(not 0 <= loop.position(coords) < loop.count for loop in self._loops):
            return False
        axis = off[0]
        step = coords[axis] - self.corner[axis]
        if abs(step) != 1:
            return False
        for loop in self._loops:
            loop.count = max(loop.reached, loop.position(coords)) + 1
        self._loops.append(_Loop(axis, self.corner[axis], step, self._dims[axis]))
        return True


class Streams:
    """The streams of one collection. Not thread-safe.

    Args:
        dims: the number of chunks along each axis.
    """

    def __init__(self, dims: Sequence[int]) -> None:
        self._dims = dims
        self._streams: list[Stream] = []
        self.recent: dict[Coords, None] = {}
        self.unclaimed = 0  # the number of accesses since the last one that belongs to a stream
        self._accesses = 0
        self._predicted: dict[Coords, int] = {}  # not accessed yet, and the number of the access that predicted it
        self._came_true = 0
        self._blocks: deque[tuple[Block, Coords]] = deque(maxlen=2)  # the last blocks and their corners
        self.latest: Stream | None = None  # the stream of the last access, if it belongs to one

    def access(self, coords: Coords, room: int) -> list[Coords]:
        """Take note of an access. Return chunks that will probably be asked for next, at most `room`."""
        if coords in self.recent:
            return []
        self.recent[coords] = None
        if len(self.recent) > RECENT:
            del self.recent[next(iter(self.recent))]
        self._accesses += 1
        self._came_true += self._predicted.pop(coords, None) is not None
        stream = next((stream for stream in self._streams if stream.follow(coords)), None)
        stream = stream or self._begin_block(coords) or self._begin(coords)
        self.latest = stream
        self.unclaimed = self.unclaimed + 1 if stream is None else 0
        if stream is None:
            return []
        stream.age = self._accesses
        self._streams.sort(key=lambda stream: -stream.used)  # the longest stream has the best claim to an access
        coming = [c for c in stream.ahead(min(room, self._trust())) if c not in self.recent]
        for c in coming:
            self.give_up(c)  # the oldest predictions are first
            self._predicted[c] = self._accesses
        return coming

    def give_up(self, coords: Coords) -> None:
        """Forget a prediction, such as that of a chunk that does not exist, which costs nothing."""
        self._predicted.pop(coords, None)

    def _trust(self) -> int:
        """Give up old predictions. Return how many chunks may be predicted now, after what became of the others."""
        old = self._accesses - min(PATIENCE + self._came_true, MAX_PATIENCE)
        for coords in list(itertools.takewhile(lambda c: self._predicted[c] < old, self._predicted)):
            del self._predicted[coords]
        return max(UNPROVEN + PROVEN * self._came_true - len(self._predicted), 0)

    def expect(self, length: int, room: int) -> list[Coords]:
        """Begin a stream at the first chunk, which continues another one that has used so many chunks elsewhere."""
        corner = (0,) * len(self._dims)
        stream = Stream(self._dims, corner, corner, len(corner) - 1, 1)
        stream.used = self._came_true = length
        self.latest = self._added(stream)
        return [corner, *stream.ahead(room)]

    def _begin_block(self, coords: Coords) -> Stream | None:
        """Return a new stream for a block like the one before, if two such blocks were read or `coords` begins one."""
        if self.latest is not None and self.latest.block is not None:
            if self._blocks and self._blocks[-1][1] == self.latest.corner:
                self._blocks.pop()  # it was not complete
            self._blocks.append((self.latest.block, self.latest.corner))
        if not self._blocks:
            return None
        block, before = self._blocks[-1]
        cells = [divmod((coords[axis] - before[axis]) * step, length) for axis, step, length in block]
        outside = set(range(len(coords))) - {axis for axis, _, _ in block}
        if not any(cell for cell, _ in cells) and all(coords[axis] == before[axis] for axis in outside):
            return None  # a late access to the block before
        if any(inside for _, inside in cells) and not self._is_repeated(block):
            return None
        corner = list(coords)
        if self._is_repeated(block, aligned=True):  # parallel readers need not begin with the corner
            for (axis, step, _), (_, inside) in zip(block, cells, strict=True):
                corner[axis] -= inside * step
        if not all(0 <= c < d for c, d in zip(corner, self._dims, strict=True)):
            return None
        return self._added(Stream.of_block(self._dims, tuple(corner), block))

    def _is_repeated(self, block: Block, *, aligned: bool = False) -> bool:
        """Return whether the last two blocks have the same shape; if `aligned`, also whether they fit into a grid."""
        (first, one), (last, other) = self._blocks[0], self._blocks[-1]
        if len(self._blocks) < 2 or first != last:
            return False
        return not aligned or all((one[axis] - other[axis]) % length == 0 for axis, _, length in block)

    def _added(self, stream: Stream) -> Stream:
        if len(self._streams) == MAX_STREAMS:
            self._streams.remove(min(self._streams, key=lambda stream: stream.age))
        self._streams.append(stream)
        return stream

    def _begin(self, coords: Coords) -> Stream | None:
        """Return a new stream if recent accesses form a run with `coords`: the longest one."""
        best, stream = RUN - 1, None
        for axis, step in itertools.product(reversed(range(len(coords))), (1, -1)):
            first, last = self._end_of_run(coords, axis, -step), self._end_of_run(coords, axis, step)
            length = abs(last[axis] - first[axis]) + 1
            # A chunk within a run says nothing about the direction, so the usual one is assumed.
            if length > best and (coords == last or (coords != first and step > 0)):
                best, stream = length, Stream(self._dims, first, last, axis, step)
        return None if stream is None else self._added(stream)

    def _end_of_run(self, coords: Coords, axis: int, step: int) -> Coords:
        while (beyond := (*coords[:axis], coords[axis] + step, *coords[axis + 1 :])) in self.recent:
            coords = beyond
        return coords
