"""Shards with one index at the start or the end, with a slot for every chunk that fits.

Zarr v3 "sharding_indexed" codec, https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/index.html
N5 4.x has the same shards with reversed axes (`shard/ShardIndex.java` of https://github.com/saalfeldlab/n5).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from struct import Struct
from typing import TYPE_CHECKING, Literal, Self

import google_crc32c
import numpy as np

from shardfs.model.blobs import ByteRange, ByteRequest, Suffix
from shardfs.model.byte_ranges import require_still_leaving
from shardfs.model.grid import ceil_div, strides, unravel, unravel_many
from shardfs.model.shard_format import Index, Placement, Placements, Reason, ShardIndex, Usage
from shardfs.model.write_plan import packed, pieces_of, size_of
from shardfs.shards.byte_layouts.single_page import MAX_INDEX_BYTES, GridShards
from shardfs.shards.index_reader import require_sound

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardfs.model.blobs import Plan
    from shardfs.model.collection import Layer
    from shardfs.model.shard_format import ChunkExtent, Leads, ShardChange, StoredIndex
    from shardfs.model.values import U64, Bool, Coords

MISSING = 2**64 - 1

HALF_EMPTY = Reason("entry", lambda start, size: f"half-empty index entry (offset {start:#x}, nbytes {size:#x})")

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
        """The numpy type of the two numbers of an entry."""
        return "<u8" if self.endian == "little" else ">u8"

    def present(self, rows: U64) -> Bool:
        """Return which rows (n, 2) of offset and nbytes are not empty. Two all-ones numbers are an empty row."""
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

    @classmethod
    def cut(cls, axis: int, extent: int, shard: int, chunk: int, bounds: tuple[int, ...] = ()) -> Self:
        """Return an axis of `extent` elements in shards of `shard` elements, or with these bounds, and their chunks.

        Raise ValueError, which names the number `axis`, if a shard does not consist of chunks of `chunk` elements.
        """
        for size in {b - a for a, b in pairwise(bounds)} if bounds else (shard,):
            if size % chunk:
                raise ValueError(f"a shard of {size} elements along axis {axis} does not consist of chunks of {chunk}")
        return cls(ceil_div(extent, chunk), shard // chunk, tuple(b // chunk for b in bounds))

    @property
    def shards(self) -> int:
        """The number of shards along the axis."""
        return len(self.bounds) - 1 if self.bounds else ceil_div(self.chunks, self.per_shard)

    def split(self, c: U64) -> tuple[U64, U64]:
        """Return for chunks (n,) the numbers (n,) of their shards, and the numbers (n,) of the chunks in these."""
        if not self.bounds:
            per = np.uint64(self.per_shard)
            return c // per, c % per
        bounds = np.array(self.bounds, np.uint64)
        g = (bounds.searchsorted(c, side="right") - 1).astype(np.uint64)
        return g, c - bounds[g]

    def first_chunk(self, g: int) -> int:
        """Return the number of the first chunk of shard `g`."""
        return self.bounds[g] if self.bounds else g * self.per_shard

    def slots(self, g: int) -> int:
        """Return the number of slots along the axis of shard `g`."""
        return self.bounds[g + 1] - self.bounds[g] if self.bounds else self.per_shard

    @property
    def most_slots(self) -> int:
        """The number of slots of the longest shard."""
        return max((b - a for a, b in pairwise(self.bounds)), default=self.per_shard)

    def inside(self, shards: range) -> range:
        """Return the chunks of these shards that are in the array."""
        stop = self.first_chunk(shards.stop - 1) + self.slots(shards.stop - 1) if shards else 0
        return range(self.first_chunk(shards.start) if shards else 0, min(stop, self.chunks))


def sharding_of(layers: Sequence[Layer]) -> str:
    """Return a line for `info` about layers of `ShardingIndexed`, given outermost first."""
    outer = layers[0]
    location = outer.format.index.location if isinstance(outer.format, ShardingIndexed) else ""
    words = [f"sharding_indexed, index at {location}"]
    words += [f"nested {len(layers)} deep"] if len(layers) > 1 else []
    words += ["inside " + ", ".join(codec.name for codec in outer.codecs)] if outer.codecs else []
    return ", ".join(words)


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
        self.axes = tuple(axes)
        self.order = tuple(order)
        self.index = index
        super().__init__(tuple(a.shards for a in axes), key, coords_of_key)
        self.grid = tuple(a.chunks for a in axes)
        if math.prod(self.shard_grid) >= 2**63:
            raise ValueError(f"a grid of {self.shard_grid} shards is beyond any real array")
        if math.prod(a.most_slots for a in axes) >= 2**63:
            raise ValueError(f"a shard of {tuple(a.most_slots for a in axes)} chunks is beyond any real array")
        self._shard_strides = strides(self.shard_grid)
        self._regular = not any(a.bounds for a in axes)
        self._steps = self._slot_strides((0,) * len(self.axes)) if self._regular else ()
        self._hot = tuple(
            (a.per_shard, shard, slot)
            for a, shard, slot in zip(self.axes, self._shard_strides, self._steps, strict=False)
        )

    def _slots_per_axis(self, g: Coords) -> tuple[int, ...]:
        """Return the number of slots along each axis, in the shard's own axis order."""
        return tuple(self.axes[a].slots(g[a]) for a in self.order)

    def _slot_strides(self, g: Coords) -> tuple[int, ...]:
        """Return, in array axis order, the slot distance between neighbors along each axis."""
        steps = strides(self._slots_per_axis(g)) if self._exists(g) else (0,) * len(g)
        out = [0] * len(self.axes)
        for i, a in enumerate(self.order):
            out[a] = steps[i]
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
        shards, _, slots = self.place_many(np.array([coords], np.uint64))
        return shards.item(), 0, slots.item()

    def row(self, above: Coords) -> Callable[[int], Placement]:
        if not self._regular:
            return lambda last: self.place((*above, last))
        shard, _, slot = self.place((*above, 0))
        per, shard_step, slot_step = self._hot[-1]
        return lambda last: (shard + last // per * shard_step, 0, slot + last % per * slot_step)

    def place_many(self, coords: U64) -> Placements:
        n = len(coords)
        shard, slot = np.zeros(n, np.uint64), np.zeros(n, np.uint64)
        split = [a.split(coords[:, i]) for i, a in enumerate(self.axes)]
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
        positions = unravel_many(slots, self._slots_per_axis(g))
        out = np.empty_like(positions)
        valid = np.ones(len(slots), np.bool_)
        for i, a in enumerate(self.order):
            out[:, a] = positions[:, i] + np.uint64(self.axes[a].first_chunk(g[a]))
            valid &= out[:, a] < np.uint64(self.axes[a].chunks)
        return out, valid

    def slots_per_shard(self, shard: int) -> int:
        """Return the number of slots of a shard, which its index has entries for."""
        return math.prod(self._slots_per_axis(unravel(shard, self.shard_grid)))

    def _index_bytes(self, shard: int) -> int:
        """Return the size of an index. Raise ValueError, with the reason, if it is too large."""
        n = len(self.index.header) + 16 * self.slots_per_shard(shard) + (4 if self.index.crc32c else 0)
        if n > MAX_INDEX_BYTES:
            raise ValueError(
                f"its index of {self.slots_per_shard(shard)} slots would have {n} bytes; {MAX_INDEX_BYTES} is the limit"
            )
        return n

    def page_request(self, shard: int, page: int, root: bytes | None) -> ByteRequest:
        n = self._index_bytes(shard)
        return Suffix(n) if self.index.location == "end" else ByteRange(0, n)

    def decode_page(self, shard: int, page: int, raw: bytes) -> Index:
        n, header = self._index_bytes(shard), self.index.header
        if len(raw) != n:
            raise ValueError(f"its index should have {n} bytes, but the shard ends after {len(raw)}")
        if not raw.startswith(header):
            raise ValueError(f"its index should begin with {header.hex()}, not {raw[: len(header)].hex()}")
        raw = raw[len(header) :]
        if self.index.crc32c:
            raw, checksum = raw[:-4], int.from_bytes(raw[-4:], "little")
            computed = google_crc32c.value(raw)
            if computed != checksum:
                raise ValueError(f"its index has crc32c {computed:08x}, but says {checksum:08x}")
        rows = _Rows(raw, self.index)
        return rows if rows.nbytes <= SMALL else rows.arrays()

    def candidates(self, shard: int) -> U64 | None:
        n = self.slots_per_shard(shard)
        return np.arange(n, dtype=np.uint64) if 16 * n <= MAX_INDEX_BYTES else None

    # ---- writing ----

    def inside(self, shards: Sequence[range]) -> list[range]:
        """Return, for each axis of the array, the numbers of the chunks in these shards. None is beyond the array."""
        return [axis.inside(along) for axis, along in zip(self.axes, shards, strict=True)]

    def capacity(self, shard: int) -> int:
        return math.prod(map(len, self.inside([range(c, c + 1) for c in unravel(shard, self.shard_grid)])))

    def rewrite(self, shard: int, old: StoredIndex | None, change: ShardChange) -> Plan | None:
        """Return the plan of the new shard; None if no chunk is left.

        Without `pack`, kept chunks do not move, except chunks that overlap an index at the start, which is overwritten.
        """
        nbytes, size = self._index_bytes(shard), 0 if old is None else old.size
        begin = nbytes if self.index.location == "start" else 0
        index = ShardIndex.empty() if old is None else old.page(0)
        remaining = index.without([slot for _, slot in (*change.puts, *change.drops)])
        if not change.puts and not len(remaining):
            return None
        if change.strict:
            require_sound(self, shard, 0, remaining)
        slots, starts, sizes = remaining.columns()
        rows = np.full((self.slots_per_shard(shard), 2), MISSING, np.uint64)
        moved: dict[int, Plan] = {}
        if change.pack and not len(remaining.broken):
            pieces, new_starts = packed(starts, starts + sizes, begin)
            rows[slots] = np.stack((new_starts, sizes), axis=1)
        else:
            pieces = [ByteRange(begin, size)] if size > begin else []
            rows[slots] = np.stack((starts, sizes), axis=1)
            # chunks that overlap an index at the start, which is about to change
            overlaps = (starts < np.uint64(begin)) & (sizes > 0)
            overlaps[remaining.broken] = False
            at = np.flatnonzero(overlaps)
            ends = starts[at] + sizes[at]
            moved = {
                slot: [ByteRange(start, stop)]
                for slot, start, stop in zip(slots[at].tolist(), starts[at].tolist(), ends.tolist(), strict=True)
            }
        moved |= {slot: pieces_of(put.data) for (_, slot), put in sorted(change.puts.items(), key=lambda item: item[0])}
        end = begin + size_of(pieces)
        if moved:
            lengths = [size_of(chunk) for chunk in moved.values()]
            *begins, end = accumulate(lengths, initial=end)
            rows[list(moved)] = np.array([begins, lengths], np.uint64).T
            pieces += chain.from_iterable(moved.values())
        require_still_leaving(starts, sizes, size, end if begin else end + nbytes)
        return [self._encoded(rows), *pieces] if begin else [*pieces, self._encoded(rows)]

    def _encoded(self, rows: U64) -> bytes:
        """Return the index with these rows of (offset, nbytes)."""
        raw = rows.astype(self.index.dtype).tobytes()
        crc = int(google_crc32c.value(raw)).to_bytes(4, "little") if self.index.crc32c else b""
        return self.index.header + raw + crc

    def usage(self, old: StoredIndex, leads: Leads | None = None) -> Usage:
        return old.usage(leads)


class _Rows(Index):
    """A small index in encoded form: rows of (offset, nbytes), one for each slot."""

    __slots__ = ("_encoding", "_end", "_raw", "_row")

    def __init__(self, raw: bytes, encoding: IndexEncoding, end: int = MISSING - 1) -> None:
        self._raw = raw
        self._encoding = encoding
        self._end = end
        self._row = _LITTLE if encoding.endian == "little" else _BIG

    @property
    def nbytes(self) -> int:
        return len(self._raw)

    def checked(self, object_size: int) -> _Rows:
        return _Rows(self._raw, self._encoding, object_size)

    def find(self, slot: int) -> ChunkExtent | None:
        start, size = self._row(self._raw, 16 * slot)
        if start + size <= self._end:
            return start, size
        return None if start == size == MISSING else self.arrays().find(slot)  # raises an error with the reason

    def arrays(self) -> ShardIndex:
        rows = np.frombuffer(self._raw, self._encoding.dtype).astype(np.uint64, copy=False).reshape(-1, 2)
        present = self._encoding.present(rows)
        slots = None if present.all() else np.flatnonzero(present).astype(np.uint64)
        entries = rows if slots is None else rows[present]
        index = ShardIndex(slots, entries[:, 0].copy(), entries[:, 1].copy())
        index = index.with_broken((entries == np.uint64(MISSING)).any(axis=1), HALF_EMPTY)
        return index if self._end >= MISSING - 1 else index.checked(self._end)


_LITTLE, _BIG = Struct("<QQ").unpack_from, Struct(">QQ").unpack_from
