"""Shards with one index at the start or the end, with a slot for every chunk that fits.

Zarr v3 "sharding_indexed" codec, https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/index.html
N5 4.x has the same shards with reversed axes (`shard/ShardIndex.java` of https://github.com/saalfeldlab/n5).
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

from shardfs.model.blobs import ByteRange, ByteRequest, Suffix
from shardfs.model.byte_ranges import cover, leaving
from shardfs.model.grid import ceil_div, strides, unravel, unravel_many
from shardfs.model.shard_format import Index, Placement, Placements, ShardIndex, Usage
from shardfs.model.write_plan import packed, pieces_of, size_of
from shardfs.shards.byte_layouts.single_page import MAX_INDEX_BYTES, GridShards

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardfs.model.blobs import Blob, Plan
    from shardfs.model.shard_format import Leads, ShardChange
    from shardfs.model.values import U64, Bool, Coords

MISSING = 2**64 - 1

SMALL = 4096
"""Maximum bytes of an index that is kept encoded. Converting it to arrays costs as much time as reading a chunk."""


@dataclass(frozen=True, slots=True)
class IndexEncoding:
    """The encoding of an index: `index_codecs` and `index_location`.

    Args:
        either_is_empty: an entry with only one all-ones number is empty, as in N5; otherwise it is damage.
        header: bytes before the entries. The checksum does not cover them.
    """

    endian: Literal["little", "big"] = "little"
    crc32c: bool = True
    location: Literal["start", "end"] = "end"
    either_is_empty: bool = False
    header: bytes = b""

    @property
    def dtype(self) -> str:
        return "<u8" if self.endian == "little" else ">u8"

    def present(self, rows: U64) -> Bool:
        """Which rows of (offset, nbytes) are not empty. Two all-ones numbers are an empty row."""
        missing = rows == np.uint64(MISSING)
        return ~np.asarray(missing.any(axis=1) if self.either_is_empty else missing.all(axis=1))


@dataclass(frozen=True, slots=True)
class ShardedAxis:
    """The distribution of the chunks of one axis over shards. All numbers count chunks.

    Args:
        chunks: the length of the grid.
        per_shard: the length of each shard. A shard at the end of the array has as many slots as any other.
        bounds: for shards of different lengths: the first chunk of each shard, and the end of the last shard.
    """

    chunks: int
    per_shard: int
    bounds: tuple[int, ...] = ()

    @property
    def shards(self) -> int:
        return len(self.bounds) - 1 if self.bounds else ceil_div(self.chunks, self.per_shard)

    def split(self, c: int) -> tuple[int, int]:
        """Convert a chunk number to (shard number, number inside the shard)."""
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
        """The number of slots of the longest shard."""
        return max((b - a for a, b in pairwise(self.bounds)), default=self.per_shard)

    def inside(self, shards: range) -> range:
        """Return the chunks of these shards that are in the array."""
        stop = self.begin(shards.stop - 1) + self.slots(shards.stop - 1) if shards else 0
        return range(self.begin(shards.start) if shards else 0, min(stop, self.chunks))


class ShardingIndexed(GridShards):
    """Shards of a chunk grid with one index each; a `ShardFormat` with a single page.

    Args:
        axes: in array axis order.
        order: axis i of the shard's own (transposed) order is array axis `order[i]`; slots are numbered in C order
            of the shard's own axes.
        key, coords_of_key: see `GridShards`.
    """

    def __init__(
        self,
        axes: Sequence[ShardedAxis],
        order: Sequence[int],
        index: IndexEncoding,
        key: Callable[[Coords], str],
        coords_of_key: Callable[[str], Coords | None],
    ) -> None:
        self.axes, self.order, self.index = tuple(axes), tuple(order), index
        super().__init__(tuple(a.shards for a in axes), key, coords_of_key)
        self.grid = tuple(a.chunks for a in axes)
        if math.prod(self.shard_grid) >= 2**63:
            raise ValueError(f"a grid of {self.shard_grid} shards is beyond any real array")
        if math.prod(a.most_slots for a in axes) >= 2**63:
            raise ValueError(f"a shard of {tuple(a.most_slots for a in axes)} chunks is beyond any real array")
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
        """Return the number of slots along each axis, in the shard's own axis order."""
        return tuple(self.axes[a].slots(g[a]) for a in self.order)

    def _slot_strides(self, g: Coords) -> tuple[int, ...]:
        """Return, in array axis order, the slot distance between neighbors along each axis."""
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
            for s in set(shard.tolist()):
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
        """Return the number of slots of a shard."""
        if self._regular:
            return self._slots
        return math.prod(self._slots_per_axis(unravel(shard, self.shard_grid)))

    def _index_bytes(self, shard: int) -> int:
        return len(self.index.header) + 16 * self.slots_per_shard(shard) + (4 if self.index.crc32c else 0)

    def page_request(self, shard: int, page: int, root: bytes | None) -> ByteRequest:
        n = self._index_bytes(shard)
        if n > MAX_INDEX_BYTES:
            raise ValueError(
                f"its index of {self.slots_per_shard(shard)} slots would have {n} bytes; {MAX_INDEX_BYTES} is the limit"
            )
        return Suffix(n) if self.index.location == "end" else ByteRange(0, n)

    def decode_page(self, shard: int, page: int, raw: bytes) -> Index:
        rows = _Rows(self._verified(shard, raw), self.index)
        return rows if rows.nbytes <= SMALL else rows.arrays()

    def _verified(self, shard: int, raw: bytes) -> bytes:
        """Return the rows of an index. Raise ValueError, with the reason, for a wrong length, header or checksum."""
        n, header = self._index_bytes(shard), self.index.header
        if len(raw) != n:
            raise ValueError(f"its index should have {n} bytes, but the shard ends after {len(raw)}")
        if not raw.startswith(header):
            raise ValueError(f"its index should begin with {header.hex()}, not {raw[: len(header)].hex()}")
        raw = raw[len(header) :]
        if self.index.crc32c:
            raw, stored = raw[:-4], int.from_bytes(raw[-4:], "little")
            found = google_crc32c.value(raw)
            if found != stored:
                raise ValueError(f"its index has crc32c {found:08x}, but says {stored:08x}")
        return raw

    def candidates(self, shard: int) -> U64 | None:
        n = self.slots_per_shard(shard)
        return np.arange(n, dtype=np.uint64) if 16 * n <= MAX_INDEX_BYTES else None

    # ---- writing ----

    def inside(self, shards: Sequence[range]) -> list[range]:
        """Return the chunks along each axis that are in these shards and in the array."""
        return [axis.inside(along) for axis, along in zip(self.axes, shards, strict=True)]

    def capacity(self, shard: int) -> int:
        return math.prod(map(len, self.inside([range(c, c + 1) for c in unravel(shard, self.shard_grid)])))

    def rewrite(self, shard: int, old: Blob | None, change: ShardChange) -> Plan | None:
        """Return the plan of the new shard; None if no chunk is left.

        Without `pack`, kept chunks do not move, except chunks that overlap an index at the start, which is overwritten.
        """
        table = _Table.read(self, shard, old)
        for _, slot in (*change.puts, *change.drops):
            table.rows[slot] = MISSING
        if not change.puts and not table.present.any():
            return None
        broken = table.outside(table.size)
        if change.strict and len(broken):
            raise ValueError(f"an index entry is outside the shard: {table.describe(int(broken[0]))}")
        pieces = table.packed() if change.pack and not len(broken) else table.appended()
        for (_, slot), put in sorted(change.puts.items(), key=lambda item: item[0]):
            pieces += table.put(slot, pieces_of(put.data))
        return table.framed(pieces)

    def usage(self, shard: int, old: Blob, leads: Leads | None = None) -> Usage:
        table = _Table.read(self, shard, old)
        starts, sizes = table.extents()
        begin = 0 if self.index.location == "start" else table.size - table.nbytes
        live = cover(starts, starts + sizes)
        own = (np.append(live.starts, np.uint64(begin)), np.append(live.stops, np.uint64(begin + table.nbytes)))
        return Usage(table.size, table.nbytes, live.nbytes, table.size - cover(*own).nbytes)


class _Table:
    """The index of a shard that is being rewritten: rows of (offset, nbytes), which are changed in place.

    Args:
        size: bytes of the old object; 0 if there is none.
        nbytes: bytes of the encoded index.
    """

    def __init__(self, rows: U64, encoding: IndexEncoding, size: int, nbytes: int) -> None:
        self.rows, self.size, self.nbytes = rows, size, nbytes
        self._encoding, self._at_start = encoding, encoding.location == "start"
        self._end = 0  # the end of the new object so far
        self._doubtful = np.empty(0, np.uint64)  # slots that refer to bytes outside the old object and are kept

    @classmethod
    def read(cls, format: ShardingIndexed, shard: int, old: Blob | None) -> _Table:
        request, nbytes = format.page_request(shard, 0, None), format._index_bytes(shard)
        if old is None:
            return cls(np.full((format.slots_per_shard(shard), 2), MISSING, np.uint64), format.index, 0, nbytes)
        raw = format._verified(shard, old.read([request])[0])
        rows = np.frombuffer(raw, format.index.dtype).astype(np.uint64).reshape(-1, 2)
        return cls(rows, format.index, old.stat().size, nbytes)

    @property
    def present(self) -> Bool:
        """Which rows are not empty."""
        return self._encoding.present(self.rows)

    def describe(self, slot: int) -> str:
        """Return a description of a row for messages."""
        start, size = self.rows[slot].tolist()
        return f"slot {slot} has offset {start} and nbytes {size} in an object of {self.size} bytes"

    def outside(self, size: int) -> U64:
        """Return the slots whose ranges leave an object of this size."""
        leaves = self.present & leaving(self.rows[:, 0], self.rows[:, 1], size)
        return np.flatnonzero(leaves).astype(np.uint64)

    def extents(self) -> tuple[U64, U64]:
        """Return starts and sizes of the rows whose ranges are inside the old object."""
        sound = self.present
        sound[self.outside(self.size)] = False
        return self.rows[sound, 0], self.rows[sound, 1]

    def packed(self) -> Plan:
        """Return the bytes of all chunks without gaps, and update their starts."""
        self._end = begin = self.nbytes if self._at_start else 0
        slots = np.flatnonzero(self.present)
        starts, sizes = self.rows[slots, 0], self.rows[slots, 1]
        pieces, self.rows[slots, 0] = packed(starts, starts + sizes, begin)
        self._end += size_of(pieces)
        return pieces

    def appended(self) -> Plan:
        """Return all bytes of the old object except an index at its start."""
        begin = self.nbytes if self._at_start else 0
        self._end, self._doubtful = max(self.size, begin), self.outside(self.size)
        pieces: Plan = [ByteRange(begin, self.size)] if self.size > begin else []
        if not self._at_start:
            return pieces
        found = self.present & (self.rows[:, 0] < np.uint64(begin)) & (self.rows[:, 1] > 0)
        found[self._doubtful] = False
        for slot in np.flatnonzero(found).tolist():  # the chunk overlaps the index, which is about to change
            start, size = self.rows[slot].tolist()
            pieces += self.put(slot, [ByteRange(start, start + size)])
        return pieces

    def put(self, slot: int, pieces: Plan) -> Plan:
        """Append the pieces as the chunk of a slot, and return them."""
        size = size_of(pieces)
        self.rows[slot] = self._end, size
        self._end += size
        return pieces

    def framed(self, pieces: Plan) -> Plan:
        """Return the whole object. Raise ValueError if a row outside the old object would refer to new bytes."""
        total = self._end if self._at_start else self._end + self.nbytes
        found = np.setdiff1d(self._doubtful, self.outside(total), assume_unique=True)
        if len(found):
            raise ValueError(
                f"an index entry outside the shard would point to new bytes: {self.describe(int(found[0]))}"
            )
        raw = self.rows.astype(self._encoding.dtype).tobytes()
        crc = int(google_crc32c.value(raw)).to_bytes(4, "little") if self._encoding.crc32c else b""
        raw = self._encoding.header + raw + crc
        return [raw, *pieces] if self._at_start else [*pieces, raw]


class _Rows:
    """A small index in encoded form: rows of (offset, nbytes), one for each slot."""

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
        return None if start == size == MISSING else self.arrays().find(slot)  # raises an error with the reason

    def arrays(self) -> ShardIndex:
        rows = np.frombuffer(self._raw, self._encoding.dtype).astype(np.uint64, copy=False).reshape(-1, 2)
        present = self._encoding.present(rows)
        slots = None if present.all() else np.flatnonzero(present).astype(np.uint64)
        kept = rows if slots is None else rows[present]
        index = ShardIndex(slots, kept[:, 0].copy(), kept[:, 1].copy())
        starts, sizes = index.starts, index.sizes
        index = index.with_broken(
            (kept == np.uint64(MISSING)).any(axis=1),
            lambda i: f"half-empty index entry (offset {int(starts[i]):#x}, nbytes {int(sizes[i]):#x})",
        )
        return index if self._end >= MISSING - 1 else index.checked(self._end)


_LITTLE, _BIG = Struct("<QQ").unpack_from, Struct(">QQ").unpack_from
