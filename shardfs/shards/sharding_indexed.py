"""One index at the start or the end of the shard, a slot for every chunk it could hold.

Zarr v3 "sharding_indexed" codec, https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/index.html
N5 4.x has the same shards with its axes reversed (`shard/ShardIndex.java` of https://github.com/saalfeldlab/n5).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct
from typing import TYPE_CHECKING, Literal

import google_crc32c
import numpy as np

from shardfs.grid import ceil_div, strides, unravel, unravel_many
from shardfs.model import U64, Bool, ByteRange, ByteRequest, Coords, Index, Placement, Placements, ShardIndex, Suffix
from shardfs.shards import MAX_INDEX_BYTES, SinglePage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MISSING = 2**64 - 1

SMALL = 4096
"""Bytes of an index up to which it stays as it was read: making arrays of it costs as much as reading a chunk."""


@dataclass(frozen=True, slots=True)
class IndexEncoding:
    """How the index itself is written: `index_codecs` and `index_location`.

    Args:
        either_is_empty: an entry of which only one number is all-ones is empty, too, as N5 has it; else it is damage.
    """

    endian: Literal["little", "big"] = "little"
    crc32c: bool = True
    location: Literal["start", "end"] = "end"
    either_is_empty: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """How the chunks of one axis are dealt to shards, in chunks.

    Args:
        chunks: in the grid.
        per_shard: in each shard; a shard at the end of the array has as many slots as any other.
        bounds: for shards of differing size: the first chunk of each shard, and the end of the last.
    """

    chunks: int
    per_shard: int
    bounds: tuple[int, ...] = ()

    @property
    def shards(self) -> int:
        return len(self.bounds) - 1 if self.bounds else ceil_div(self.chunks, self.per_shard)

    def split(self, c: int) -> tuple[int, int]:
        """Chunk number -> (shard number, number inside the shard)."""
        if not self.bounds:
            return divmod(c, self.per_shard)
        g = bisect_right(self.bounds, c) - 1
        return g, c - self.bounds[g]

    def split_many(self, c: U64) -> tuple[U64, U64]:
        if not self.bounds:
            per = np.uint64(self.per_shard)
            return c // per, c % per
        bounds = np.array(self.bounds, np.uint64)
        g = (bounds.searchsorted(c, side="right") - 1).astype(np.uint64)
        return g, c - bounds[g]

    def begin(self, g: int) -> int:
        return self.bounds[g] if self.bounds else g * self.per_shard

    def slots(self, g: int) -> int:
        return self.bounds[g + 1] - self.bounds[g] if self.bounds else self.per_shard

    @property
    def most_slots(self) -> int:
        """Of the shard that has most."""
        return max((b - a for a, b in pairwise(self.bounds)), default=self.per_shard)


class ShardingIndexed(SinglePage):
    """Places the chunks of a grid in shards; a `model.ShardFormat` with a single page.

    Args:
        axes: in array axis order.
        order: axis i of the shard's own (transposed) order is array axis `order[i]`; slots are numbered in C order
            of the shard's own axes.
        key: the name of the shard object at these coordinates of the outer grid, and its inverse.
    """

    def __init__(
        self,
        axes: Sequence[Axis],
        order: Sequence[int],
        index: IndexEncoding,
        key: Callable[[Coords], str],
        coords_of_key: Callable[[str], Coords | None],
    ) -> None:
        self.axes, self.order, self.index = tuple(axes), tuple(order), index
        self.grid = tuple(a.chunks for a in axes)
        self.shard_grid = tuple(a.shards for a in axes)
        if math.prod(self.shard_grid) >= 2**63:
            raise ValueError(f"a grid of {self.shard_grid} shards is beyond any real array")
        if math.prod(a.most_slots for a in axes) >= 2**63:
            raise ValueError(f"a shard of {tuple(a.most_slots for a in axes)} chunks is beyond any real array")
        self._key, self._coords_of_key = key, coords_of_key
        self._shard_strides = strides(self.shard_grid)
        self._regular = not any(a.bounds for a in axes)
        self._steps = self._slot_strides((0,) * len(self.axes)) if self._regular else ()
        self._slots = math.prod(a.per_shard for a in self.axes)
        self._hot = tuple(
            (a.per_shard, shard, slot)
            for a, shard, slot in zip(self.axes, self._shard_strides, self._steps, strict=False)
        )

    walk = None

    def _slots_per_axis(self, g: Coords) -> tuple[int, ...]:
        """In the shard's own axis order."""
        return tuple(self.axes[a].slots(g[a]) for a in self.order)

    def _slot_strides(self, g: Coords) -> tuple[int, ...]:
        """In array axis order: what a step along the axis adds to the slot."""
        own = strides(self._slots_per_axis(g)) if self._exists(g) else (0,) * len(g)
        out = [0] * len(self.axes)
        for i, a in enumerate(self.order):
            out[a] = own[i]
        return tuple(out)

    def _exists(self, g: Coords) -> bool:
        return self._regular or all(c < n for c, n in zip(g, self.shard_grid, strict=True))

    def place(self, coords: Coords) -> Placement:
        shard = slot = 0
        if self._regular:
            for c, (per, shard_stride, slot_stride) in zip(coords, self._hot):  # noqa: B905 - the hottest loop of all
                shard += c // per * shard_stride
                slot += c % per * slot_stride
            return shard, 0, slot
        split = [a.split(c) for a, c in zip(self.axes, coords, strict=True)]
        steps = self._slot_strides(tuple(g for g, _ in split))
        shard = sum(g * s for (g, _), s in zip(split, self._shard_strides, strict=True))
        return shard, 0, sum(i * s for (_, i), s in zip(split, steps, strict=True))

    def row(self, above: Coords) -> Callable[[int], Placement]:
        if not self._regular:
            return lambda last: self.place((*above, last))
        shard, _, slot = self.place((*above, 0))
        per, shard_step, slot_step = self._hot[-1]
        return lambda last: (shard + last // per * shard_step, 0, slot + last % per * slot_step)

    def place_many(self, coords: U64) -> Placements:
        n = len(coords)
        shard, slot = np.zeros(n, np.uint64), np.zeros(n, np.uint64)
        split = [a.split_many(coords[:, i]) for i, a in enumerate(self.axes)]
        for (g, _), stride in zip(split, self._shard_strides, strict=True):
            shard += g * np.uint64(stride)
        if self._regular:
            for (_, inner), stride in zip(split, self._steps, strict=True):
                slot += inner * np.uint64(stride)
        else:
            for s in np.unique(shard).tolist():
                at = shard == s
                for (_, inner), stride in zip(split, self._slot_strides(unravel(s, self.shard_grid)), strict=True):
                    slot[at] += inner[at] * np.uint64(stride)
        return Placements(shard, np.zeros(n, np.uint64), slot)

    def coords(self, shard: int, page: int, slots: U64) -> tuple[U64, Bool]:
        g = unravel(shard, self.shard_grid)
        own = unravel_many(slots, self._slots_per_axis(g))
        out = np.empty_like(own)
        valid = np.ones(len(slots), np.bool_)
        for i, a in enumerate(self.order):
            out[:, a] = own[:, i] + np.uint64(self.axes[a].begin(g[a]))
            valid &= out[:, a] < np.uint64(self.axes[a].chunks)
        return out, valid

    def slots_per_shard(self, shard: int) -> int:
        """How many chunks a shard has room for."""
        if self._regular:
            return self._slots
        return math.prod(self._slots_per_axis(unravel(shard, self.shard_grid)))

    def _index_bytes(self, shard: int) -> int:
        return 16 * self.slots_per_shard(shard) + (4 if self.index.crc32c else 0)

    def page_request(self, shard: int, page: int, root: bytes | None) -> ByteRequest:
        n = self._index_bytes(shard)
        if n > MAX_INDEX_BYTES:
            raise ValueError(
                f"its index of {self.slots_per_shard(shard)} slots would have {n} bytes; {MAX_INDEX_BYTES} is the limit"
            )
        return Suffix(n) if self.index.location == "end" else ByteRange(0, n)

    def decode_page(self, shard: int, page: int, raw: bytes) -> Index:
        if not raw:  # zarr-python reads a shard of zero bytes as all fill value
            return ShardIndex.empty()
        n = self._index_bytes(shard)
        if len(raw) != n:
            raise ValueError(f"its index should have {n} bytes, but the shard ends after {len(raw)}")
        if self.index.crc32c:
            raw, told = raw[:-4], int.from_bytes(raw[-4:], "little")
            found = google_crc32c.value(raw)
            if found != told:
                raise ValueError(f"its index has crc32c {found:08x}, but says {told:08x}")
        rows = _Rows(raw, self.index)
        return rows if len(raw) <= SMALL else rows.arrays()

    def candidates(self, shard: int) -> U64 | None:
        n = self.slots_per_shard(shard)
        return np.arange(n, dtype=np.uint64) if 16 * n <= MAX_INDEX_BYTES else None

    def key(self, shard: int) -> str:
        return self._key(unravel(shard, self.shard_grid))

    def shard_of(self, key: str) -> int | None:
        g = self._coords_of_key(key)
        if g is None or not all(c < n for c, n in zip(g, self.shard_grid, strict=True)):
            return None
        return sum(c * s for c, s in zip(g, self._shard_strides, strict=True))


class _Rows:
    """A small index as it was read: rows of (offset, nbytes), one for each slot."""

    __slots__ = ("_encoding", "_end", "_raw", "_row")

    def __init__(self, raw: bytes, encoding: IndexEncoding, end: int = MISSING - 1) -> None:
        self._raw, self._encoding, self._end = raw, encoding, end
        self._row = _LITTLE if encoding.endian == "little" else _BIG

    @property
    def nbytes(self) -> int:
        return len(self._raw)

    def checked(self, object_size: int) -> _Rows:
        return _Rows(self._raw, self._encoding, object_size)

    def find(self, slot: int) -> tuple[int, int] | None:
        start, size = self._row(self._raw, 16 * slot)
        if start + size <= self._end:
            return start, size
        return None if start == size == MISSING else self.arrays().find(slot)  # which says what is wrong with it

    def arrays(self) -> ShardIndex:
        rows = np.frombuffer(self._raw, "<u8" if self._encoding.endian == "little" else ">u8")
        rows = rows.astype(np.uint64, copy=False).reshape(-1, 2)
        index = _index_of(rows, self._encoding.either_is_empty)
        return index if self._end >= MISSING - 1 else index.checked(self._end)


_LITTLE, _BIG = Struct("<QQ").unpack_from, Struct(">QQ").unpack_from


def _index_of(rows: U64, either_is_empty: bool) -> ShardIndex:
    """Rows of (offset, nbytes); both all-ones means empty, only one of them may be damage to that chunk alone."""
    missing = rows == np.uint64(MISSING)
    if not missing.any():
        return ShardIndex(None, rows[:, 0].copy(), rows[:, 1].copy())
    if either_is_empty:
        missing[:] = missing.any(axis=1, keepdims=True)
    absent = missing[:, 0] & missing[:, 1]
    half = missing[:, 0] ^ missing[:, 1]
    if not absent.any():
        slots, kept = None, rows
        halves = np.flatnonzero(half)
    else:
        slots = np.flatnonzero(~absent).astype(np.uint64)
        kept = rows[~absent]
        halves = np.flatnonzero(half[~absent])
    broken = {}
    for i in halves.tolist()[:1000]:
        broken[i] = f"half-empty index entry (offset {int(kept[i, 0]):#x}, nbytes {int(kept[i, 1]):#x})"
    return ShardIndex(slots, kept[:, 0].copy(), kept[:, 1].copy(), broken)
