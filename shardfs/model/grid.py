"""Chunk grid arithmetic: coordinates, Morton codes, chunk names. Pure; vectorised where listings need it."""

from __future__ import annotations

import math
import os
import re
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardfs.model.collection import ChunkNames

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardfs.model.values import U64, Bool, Coords


def ceil_div(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)


def strides(dims: Sequence[int]) -> tuple[int, ...]:
    """C-order strides, in items: the last axis has 1."""
    out, n = [], 1
    for d in reversed(dims):
        out.append(n)
        n *= d
    return tuple(reversed(out))


def ravel(coords: Coords, dims: Sequence[int]) -> int:
    """The C-order number of a cell."""
    n = 0
    for c, d in zip(coords, dims, strict=True):
        n = n * d + c
    return n


def unravel(number: int, dims: Sequence[int]) -> Coords:
    """The inverse of `ravel`."""
    out = []
    for d in reversed(dims):
        number, c = divmod(number, max(d, 1))  # an axis of length 0 has no cells, but its shards still have names
        out.append(c)
    return tuple(reversed(out))


def ravel_many(coords: U64, dims: Sequence[int]) -> U64:
    """`ravel` of (n, d) cells."""
    n = np.zeros(len(coords), np.uint64)
    for axis, d in enumerate(dims):
        n = n * np.uint64(d) + coords[:, axis]
    return n


def unravel_many(numbers: U64, dims: Sequence[int]) -> U64:
    """The inverse of `ravel_many`."""
    out = np.empty((len(numbers), len(dims)), np.uint64)
    for axis in range(len(dims) - 1, -1, -1):
        d = np.uint64(max(dims[axis], 1))
        out[:, axis] = numbers % d
        numbers = numbers // d
    return out


def renamed(source: ChunkNames, target: ChunkNames, coords: U64) -> U64:
    """The coordinates among `target` of the chunks at (n, d) coordinates among `source`: their file names are equal."""
    return target.coords_many(source.values(coords))


class MortonCode:
    """Compressed Morton codes of the cells of a grid of any rank: interleaved bits, lowest first.

    An axis contributes only as many bits as its length needs (Neuroglancer precomputed volume format, "compressed
    Morton code"). Raise ValueError if a code would not fit in 64 bits.
    """

    def __init__(self, grid: Sequence[int]) -> None:
        self.grid = tuple(grid)
        bits = [(max(n, 1) - 1).bit_length() for n in grid]
        if sum(bits) > 64:
            raise ValueError(f"chunk ids of a grid of {self.grid} need {sum(bits)} bits; 64 is the limit")
        rounds = [(i, axis) for i in range(max(bits, default=0)) for axis, n in enumerate(bits) if i < n]
        self._places: list[list[int]] = [[] for _ in grid]  # per axis, the position in the code of its bit i
        for out, (_, axis) in enumerate(rounds):
            self._places[axis].append(out)

    @property
    def bits(self) -> int:
        """The number of bits of a code."""
        return sum(map(len, self._places))

    def agrees_with(self, other: MortonCode) -> bool:
        """Whether each cell that is in both grids has the same code in both."""
        axes = zip(self._places, other._places, strict=True)
        return all(a[: len(b)] == b[: len(a)] for a, b in axes)

    def encode(self, cell: Coords) -> int:
        """The code of a cell inside the grid."""
        code = 0
        for c, places in zip(cell, self._places, strict=True):
            for i, out in enumerate(places):
                code |= (c >> i & 1) << out
        return code

    def encode_many(self, cells: U64) -> U64:
        """The codes (n,) of (n, d) cells inside the grid."""
        code = np.zeros(len(cells), np.uint64)
        one = np.uint64(1)
        for axis, places in enumerate(self._places):
            for i, out in enumerate(places):
                code |= (cells[:, axis] >> np.uint64(i) & one) << np.uint64(out)
        return code

    def decode_many(self, codes: U64) -> tuple[U64, Bool]:
        """The cells, and which of them are inside the grid: there are codes of cells beyond its edge."""
        cells = np.zeros((len(codes), len(self.grid)), np.uint64)
        one, code_bits = np.uint64(1), 0
        for axis, places in enumerate(self._places):
            for i, out in enumerate(places):
                cells[:, axis] |= (codes >> np.uint64(out) & one) << np.uint64(i)
                code_bits |= 1 << out
        inside = (codes & ~np.uint64(code_bits)) == 0
        for axis, n in enumerate(self.grid):
            inside &= cells[:, axis] < np.uint64(n)
        return cells, inside


def decimal(name: bytes, digits: int = 19) -> int | None:
    """The value of a decimal number without leading zeros; None for other texts and more than `digits` digits."""
    if not name.isdigit() or (name[0] == 48 and len(name) > 1) or len(name) > digits:
        return None
    return int(name)


def cell_of(key: str, separator: str, rank: int) -> Coords | None:
    """The coordinates in a key such as `1/23/45`; None if the key does not have `rank` decimal numbers."""
    parts = [decimal(os.fsencode(part)) for part in key.split(separator)]
    cell = tuple(part for part in parts if part is not None)
    return cell if len(cell) == len(parts) == rank else None


class _PerAxis(ChunkNames):
    """Names whose component values are the coordinates themselves."""

    def coords(self, values: Coords) -> Coords:
        return values

    def coords_many(self, values: U64) -> U64:
        return values

    def values(self, coords: U64) -> U64:
        return coords


class _Joined(ChunkNames):
    """Names in one directory: the value of the only component is the C-order number of the chunk in `grid`."""

    prefix = b""

    def __init__(self, grid: Sequence[int]) -> None:
        self.grid = tuple(grid)
        self.dims = (math.prod(grid),)

    def coords(self, values: Coords) -> Coords:
        return unravel(values[0], self.grid)

    def coords_many(self, values: U64) -> U64:
        return unravel_many(values[:, 0], self.grid)

    def values(self, coords: U64) -> U64:
        return ravel_many(coords, self.grid)[:, None]


class NestedNames(_PerAxis):
    """Names with one directory level for each axis: `c/1/23/45` or `1/23/45`."""

    def __init__(self, grid: Sequence[int], prefix: bytes = b"") -> None:
        self.prefix = prefix
        self.dims = tuple(grid)

    def parse(self, level: int, name: bytes) -> int | None:
        if not name.isdigit() or (name[0] == 48 and len(name) > 1) or len(name) > 19:  # `decimal` inlined: hot path
            return None
        value = int(name)
        return value if value < self.dims[level] else None

    def reserved(self, level: int, name: bytes) -> bool:
        return decimal(name) is not None

    def render(self, level: int, values: U64) -> npt.NDArray[np.bytes_]:
        return values.astype(f"S{len(str(self.dims[level]))}")


class HeadedNames(NestedNames):
    """Nested names with a prefix of the first component: `c1/23/45`."""

    def __init__(self, grid: Sequence[int], head: bytes) -> None:
        super().__init__(grid)
        self._head = head

    def parse(self, level: int, name: bytes) -> int | None:
        if level:
            return super().parse(level, name)
        return super().parse(0, name.removeprefix(self._head)) if name.startswith(self._head) else None

    def reserved(self, level: int, name: bytes) -> bool:
        if level:
            return super().reserved(level, name)
        return name.startswith(self._head) and super().reserved(0, name.removeprefix(self._head))

    def render(self, level: int, values: U64) -> npt.NDArray[np.bytes_]:
        names = super().render(level, values)
        return names if level else np.char.add(self._head, names)


class FlatNames(_Joined):
    """Names in one directory, with the coordinates joined by a separator: `c.1.23.45` or `1.23.45`.

    `scalar` is the name of the only chunk of a 0-d array.
    """

    def __init__(self, grid: Sequence[int], head: bytes, separator: bytes, scalar: bytes) -> None:
        super().__init__(grid)
        self.separator = separator
        self._head = head
        self._scalar = scalar

    def _parts(self, name: bytes) -> list[int] | None:
        if not name.startswith(self._head):
            return None
        parts = [decimal(p) for p in name[len(self._head) :].split(self.separator)]
        coords = [p for p in parts if p is not None]
        return coords if len(coords) == len(parts) == len(self.grid) else None

    def parse(self, level: int, name: bytes) -> int | None:
        if not self.grid:
            return 0 if name == self._scalar else None
        parts, number = self._parts(name), 0
        if parts is None:
            return None
        for c, n in zip(parts, self.grid, strict=True):
            if c >= n:
                return None
            number = number * n + c
        return number

    def reserved(self, level: int, name: bytes) -> bool:
        return name == self._scalar if not self.grid else self._parts(name) is not None

    def render(self, level: int, values: U64) -> npt.NDArray[np.bytes_]:
        if not self.grid:
            return np.full(len(values), self._scalar)
        columns = unravel_many(values, self.grid)
        parts = [columns[:, axis].astype("S20").tolist() for axis in range(len(self.grid))]
        return np.array([self._head + self.separator.join(row) for row in zip(*parts, strict=True)], "S")


class MappedNames(ChunkNames):
    """Names for chunks that are shown with another order of axes, or with axes of length 1 added or removed.

    Args:
        names: the names in the shown grid.
        axes: shown axis i is axis `axes[i]` of the chunks' own grid; None for an added axis.
        rank: the rank of the chunks' own grid. An axis that is not shown has one chunk.
    """

    def __init__(self, names: ChunkNames, axes: Sequence[int | None], rank: int) -> None:
        self.prefix = names.prefix
        self.dims = names.dims
        self._names = names
        self.axes = tuple(axes)
        self._rank = rank

    def parse(self, level: int, name: bytes) -> int | None:
        return self._names.parse(level, name)

    def reserved(self, level: int, name: bytes) -> bool:
        return self._names.reserved(level, name)

    def render(self, level: int, values: U64) -> npt.NDArray[np.bytes_]:
        return self._names.render(level, values)

    def coords(self, values: Coords) -> Coords:
        out = [0] * self._rank
        for axis, c in zip(self.axes, self._names.coords(values), strict=True):
            if axis is not None:
                out[axis] = c
        return tuple(out)

    def coords_many(self, values: U64) -> U64:
        shown_coords = self._names.coords_many(values)
        out = np.zeros((len(values), self._rank), np.uint64)
        for i, axis in enumerate(self.axes):
            if axis is not None:
                out[:, axis] = shown_coords[:, i]
        return out

    def values(self, coords: U64) -> U64:
        shown_coords = np.zeros((len(coords), len(self.axes)), np.uint64)
        for i, axis in enumerate(self.axes):
            if axis is not None:
                shown_coords[:, i] = coords[:, axis]
        return self._names.values(shown_coords)


class NumberedNames(_PerAxis):
    """Names of the chunks of one axis by number, in one directory: `__12.blp`, `0000000C.chunk`.

    Args:
        count: the number of chunks.
        digits: if not 0, numbers are upper-case hexadecimal with at least that many digits.
    """

    prefix = b""

    def __init__(self, count: int, head: bytes, tail: bytes, digits: int = 0) -> None:
        self.dims = (count,)
        self._head = head
        self._tail = tail
        self._digits = digits

    def _number(self, name: bytes) -> int | None:
        if not name.startswith(self._head) or not name.endswith(self._tail) or len(name) > 64:
            return None
        text = name[len(self._head) : len(name) - len(self._tail)]
        if not self._digits:
            return decimal(text)
        number = int(text, 16) if re.fullmatch(rb"[0-9A-F]{1,16}", text) else -1
        return number if text == b"%0*X" % (self._digits, number) else None

    def parse(self, level: int, name: bytes) -> int | None:
        number = self._number(name)
        return number if number is not None and number < self.dims[0] else None

    def reserved(self, level: int, name: bytes) -> bool:
        return self._number(name) is not None

    def render(self, level: int, values: U64) -> npt.NDArray[np.bytes_]:
        form = b"%%0%dX" % self._digits if self._digits else b"%d"
        return np.array([self._head + form % v + self._tail for v in values.tolist()], "S")


class BoxNames(_Joined):
    """Names of precomputed volumes, the voxel box of each chunk: `x0-x1_y0-y1_z0-z1`.

    The end of a box is clipped to the volume. Numbers are negative where `offset` is negative.
    """

    def __init__(self, size: Coords, chunk: Coords, offset: Coords) -> None:
        super().__init__([ceil_div(s, c) for s, c in zip(size, chunk, strict=True)])
        self._size = size
        self._chunk = chunk
        self._offset = offset

    def reserved(self, level: int, name: bytes) -> bool:
        return self.parse(level, name) is not None  # shards have names of another form

    def _interval(self, axis: int, g: int) -> bytes:
        c, offset = self._chunk[axis], self._offset[axis]
        return b"%d-%d" % (offset + g * c, offset + min((g + 1) * c, self._size[axis]))

    def _cell(self, axis: int, text: bytes) -> int | None:
        # The begin determines the cell. Formatting the cell again rejects names that are not canonical.
        begin = text[: text.find(b"-", 1)]
        if len(begin) > 20 or not begin.lstrip(b"-").isdigit():
            return None
        g, remainder = divmod(int(begin) - self._offset[axis], self._chunk[axis])
        if remainder or not 0 <= g < self.grid[axis] or self._interval(axis, g) != text:
            return None
        return g

    def parse(self, level: int, name: bytes) -> int | None:
        parts = name.split(b"_")
        if len(parts) != len(self.grid):
            return None
        number = 0
        for axis, text in enumerate(parts):
            g = self._cell(axis, text)
            if g is None:
                return None
            number = number * self.grid[axis] + g
        return number

    def name(self, cell: Coords) -> str:
        """The name of one chunk."""
        return b"_".join(self._interval(axis, g) for axis, g in enumerate(cell)).decode()

    def cell(self, name: str) -> Coords | None:
        """The inverse of `name`; None if no chunk has this name."""
        number = self.parse(0, name.encode(errors="replace"))
        return None if number is None else unravel(number, self.grid)

    def render(self, level: int, values: U64) -> npt.NDArray[np.bytes_]:
        columns = unravel_many(values, self.grid)
        parts = []
        for axis in range(len(self.grid)):
            cells, back = np.unique(columns[:, axis], return_inverse=True)
            texts = np.array([self._interval(axis, g) for g in cells.tolist()], "S")
            parts.append(texts[back].tolist())
        return np.array([b"_".join(row) for row in zip(*parts, strict=True)], "S")

    def shape(self, coords: Coords) -> Coords:
        """The shape of a chunk in voxels, clipped to the volume."""
        return tuple(min((g + 1) * c, s) - g * c for g, c, s in zip(coords, self._chunk, self._size, strict=True))

    def voxels_many(self, coords: U64) -> U64:
        """The number of voxels (n,) of the chunks at (n, 3) coordinates, clipped to the volume."""
        n = np.ones(len(coords), np.uint64)
        for axis in range(len(self.grid)):
            c = np.uint64(self._chunk[axis])
            start = coords[:, axis] * c
            n *= np.minimum(start + c, np.uint64(self._size[axis])) - start
        return n


SMALL_IDS = 1 << 44
"""Ids below this limit have component values. Consecutive ids stay below, but some ids encode data in upper bits.

Each collection of ids reserves as many inode numbers, so that a mount can show about 100,000 volumes with meshes and
skeletons.
"""


class IdNames(ChunkNames):
    """Names of 64-bit ids in decimal, in one directory, with a suffix for each file of an id.

    Only ids below `SMALL_IDS` have component values; other ids are identified by their coordinates (`cell`, `names`).
    """

    prefix = b""

    def __init__(self, suffixes: Sequence[bytes] = (b"",)) -> None:
        """With several suffixes, coordinates are the id and the position of the suffix; with one, the id alone."""
        self._suffixes = tuple(suffixes)
        self._n = len(self._suffixes)
        self.dims = (SMALL_IDS * self._n,)

    def cell(self, name: bytes) -> Coords | None:
        """The coordinates of the file with this name, for ids of any size; None if no file has this name."""
        for part, suffix in enumerate(self._suffixes):
            if name.endswith(suffix):
                number = decimal(name[: len(name) - len(suffix)], 20)
                if number is not None and number < 1 << 64:
                    return (number, part)[: 1 if self._n == 1 else 2]
        return None

    def parse(self, level: int, name: bytes) -> int | None:
        cell = self.cell(name)
        if cell is None or cell[0] >= SMALL_IDS:
            return None
        return cell[0] * self._n + (cell[1] if self._n > 1 else 0)

    def reserved(self, level: int, name: bytes) -> bool:
        return self.cell(name) is not None

    def render(self, level: int, values: U64) -> npt.NDArray[np.bytes_]:
        return self.names(self.coords_many(values[:, None]))

    def names(self, coords: U64) -> npt.NDArray[np.bytes_]:
        """The names (n,) of the files at (n, d) coordinates, in their order and with suffixes, for ids of any size."""
        names = coords[:, 0].astype("S20")
        if self._suffixes == (b"",):
            return names
        parts = coords[:, 1].tolist() if self._n > 1 else [0] * len(coords)
        return np.array([n + self._suffixes[p] for n, p in zip(names.tolist(), parts, strict=True)], "S")

    def coords(self, values: Coords) -> Coords:
        return values if self._n == 1 else divmod(values[0], self._n)

    def coords_many(self, values: U64) -> U64:
        n = np.uint64(self._n)
        return values if self._n == 1 else np.concatenate([values // n, values % n], axis=1)

    def values(self, coords: U64) -> U64:
        return coords if self._n == 1 else coords[:, :1] * np.uint64(self._n) + coords[:, 1:]
