"""Shards with a two-level index of uint64 chunk ids. A hash of the id selects shard and minishard.

Neuroglancer precomputed sharded format ("neuroglancer_uint64_sharded_v1"),
https://github.com/google/neuroglancer/blob/master/src/datasource/precomputed/sharded.md
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from shardfs.codecs.encoders import encode
from shardfs.codecs.zlib_streams import PRECOMPUTED_LEVEL, gunzip
from shardfs.model.arrays import Codec
from shardfs.model.blobs import ByteRange
from shardfs.model.byte_ranges import require_still_leaving
from shardfs.model.errors import UnsupportedError
from shardfs.model.shard_format import Placement, Placements, Put, ShardFormat, ShardIndex, Usage
from shardfs.model.write_plan import joined, packed, pieces_of, size_of
from shardfs.shards.byte_layouts.single_page import MAX_INDEX_BYTES
from shardfs.shards.byte_layouts.uint64_spec import (
    ENTRY,
    ChunkIds,
    Ids,
    ShardingSpec,
    _shift_right,
    murmurhash3_x86_128,
    murmurhash3_x86_128_many,
)
from shardfs.shards.index_reader import require_sound

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardfs.model.blobs import Plan
    from shardfs.model.shard_format import Leads, ShardChange, StoredIndex
    from shardfs.model.values import U64, Bool, Coords

    Columns = tuple[U64, U64, U64]


SUFFIX = ".shard"


class Uint64Sharded(ShardFormat):
    """A `ShardFormat`: page = minishard, slot = chunk id."""

    in_place = ENTRY  # the shard index has no checksum, and its entries are independent of each other

    def __init__(self, spec: ShardingSpec, ids: ChunkIds) -> None:
        self.spec = spec
        self.ids = ids
        self.grid = ids.grid
        self.page_bits = spec.minishard_bits
        self._digits = max(1, -(-spec.shard_bits // 4))
        self._header = ENTRY << spec.minishard_bits  # stored offsets count from the end of the shard index
        self._minishard_mask = (1 << spec.minishard_bits) - 1
        self._shard_mask = (1 << spec.shard_bits) - 1
        self._murmur = spec.hash == "murmurhash3_x86_128"
        self._capacity = lru_cache(1024)(self._count)

    def place(self, coords: Coords) -> Placement:
        chunk_id = self.ids.encode(coords)
        h = chunk_id >> self.spec.preshift_bits
        if self._murmur:
            h = murmurhash3_x86_128(h)
        return h >> self.spec.minishard_bits & self._shard_mask, h & self._minishard_mask, chunk_id

    def row(self, above: Coords) -> Callable[[int], Placement]:
        return lambda last: self.place((*above, last))

    def place_many(self, coords: U64) -> Placements:
        ids = self.ids.encode_many(coords)
        shard, page = self._homes(ids)
        return Placements(shard, page, ids)

    def _homes(self, ids: U64) -> tuple[U64, U64]:
        h = _shift_right(ids, self.spec.preshift_bits)
        if self._murmur:
            h = murmurhash3_x86_128_many(h)
        shard = _shift_right(h, self.spec.minishard_bits) & np.uint64(self._shard_mask)
        return shard, h & np.uint64(self._minishard_mask)

    def coords(self, shard: int, page: int, slots: U64) -> tuple[U64, Bool]:
        cells, inside = self.ids.decode_many(slots)
        shards, pages = self._homes(slots)
        return cells, inside & (shards == np.uint64(shard)) & (pages == np.uint64(page))

    def root_request(self) -> ByteRange:
        return ByteRange(0, self._header)

    def _entries(self, root: bytes | None) -> U64:
        if root is None or len(root) != self._header:
            raise ValueError(f"its shard index should have {self._header} bytes, but the shard is shorter")
        return np.frombuffer(root, "<u8").astype(np.uint64, copy=False).reshape(-1, 2)

    def nonempty_pages(self, root: bytes | None) -> U64:
        entries = self._entries(root)
        return np.flatnonzero(entries[:, 0] != entries[:, 1]).astype(np.uint64)

    def page_request(self, shard: int, page: int, root: bytes | None) -> ByteRange | None:
        start, end = self._entries(root)[page].tolist()
        if start == end:
            return None
        if start > end or end >= 2**62:
            raise ValueError(f"minishard {page} should have an index at [{start}, {end}), which is impossible")
        if end - start > MAX_INDEX_BYTES:
            raise ValueError(
                f"the index of minishard {page} would have {end - start} bytes; {MAX_INDEX_BYTES} is the limit"
            )
        return ByteRange(self._header + start, self._header + end)

    def decode_page(self, shard: int, page: int, raw: bytes) -> ShardIndex:
        if self.spec.minishard_index_encoding == "gzip":
            try:
                raw = gunzip(raw, MAX_INDEX_BYTES)
            except ValueError as e:
                raise ValueError(f"the index of minishard {page}: {e}") from e
        if len(raw) % 24:
            raise ValueError(f"the index of minishard {page} has {len(raw)} bytes, which is no multiple of 24")
        rows = np.frombuffer(raw, "<u8").astype(np.uint64, copy=False).reshape(3, -1)
        # Differences wrap modulo 2**64 on purpose: ids may be unsorted, and offsets may decrease.
        ids = np.cumsum(rows[0], dtype=np.uint64)
        ends = np.cumsum(rows[1] + rows[2], dtype=np.uint64) + np.uint64(self._header)
        index = ShardIndex(ids, ends - rows[2], rows[2].copy())
        if len(ids) > 1 and not (ids[1:] > ids[:-1]).all():
            index = index.selected(np.argsort(ids, kind="stable"))
            ids = index.all_slots()
            first = np.append(True, ids[1:] != ids[:-1])  # a repeated id is damage; readers find its first entry
            if not first.all():
                return replace(index.selected(first), repeated=index.selected(~first))
        return index

    def candidates(self, shard: int) -> None:
        return None  # would need a hash of every possible id

    def key(self, shard: int) -> str:
        return f"{shard:0{self._digits}x}{SUFFIX}"

    def shard_of(self, key: str) -> int | None:
        digits = key.removesuffix(SUFFIX)
        if digits == key or len(digits) != self._digits or not set(digits) <= set("0123456789abcdef"):
            return None
        shard = int(digits, 16)
        return shard if shard <= self._shard_mask else None

    # ---- writing ----

    def capacity(self, shard: int) -> int | None:
        return self._capacity(shard)

    def _count(self, shard: int) -> int | None:
        if self._murmur or isinstance(self.ids, Ids):
            return None  # to count the chunks of a hashed shard, every chunk id would have to be hashed
        low, bits = self.spec.preshift_bits + self.page_bits, sum((n - 1).bit_length() for n in self.grid if n)
        high = max(bits - low - self.spec.shard_bits, 0)
        if low + high > CAPACITY_BITS or not all(self.grid):
            return None if all(self.grid) else 0
        runs = np.arange(1 << high, dtype=np.uint64) << np.uint64(low + self.spec.shard_bits if high else 0)
        codes = runs[:, None] | np.uint64(shard << low) | np.arange(1 << low, dtype=np.uint64)
        return int(np.count_nonzero(self.ids.decode_many(codes.ravel())[1]))

    def rewrite(self, shard: int, old: StoredIndex | None, change: ShardChange) -> Plan | None:
        """Return the plan of the new shard; None if no chunk is left.

        Without `pack`, only the shard index changes in place. New chunks and new minishard indices are
        appended; old minishard indices become dead bytes.
        """
        work = _Minishards(self, shard, old, change.leads)
        changed: dict[int, list[int]] = {}
        for page, slot in (*change.puts, *change.drops):
            changed.setdefault(page, []).append(slot)
        sound = work.sound(strict=change.strict) if change.pack else None
        indices = work.indices(list(changed)) if sound is None else dict.fromkeys(changed, ShardIndex.empty()) | sound
        entries = {page: index.without(changed.get(page, ())).columns() for page, index in indices.items()}
        pieces = work.append(entries) if sound is None else work.pack(entries)
        for page, columns in sorted(entries.items()):
            puts = {
                slot: change.puts[page, slot] for slot in sorted(changed.get(page, ())) if (page, slot) in change.puts
            }
            pieces += work.write(page, columns, puts)
        return work.framed(joined(pieces))

    def usage(self, old: StoredIndex, leads: Leads | None = None) -> Usage:
        return old.usage(leads)


CAPACITY_BITS = 21

_NONE = np.empty(0, np.uint64)


class _Minishards:
    """A shard that is being rewritten. `_root` is its shard index, which is changed in place.

    Its offsets count from the end of the shard index.
    """

    def __init__(self, format: Uint64Sharded, shard: int, old: StoredIndex | None, leads: Leads | None) -> None:
        self._format = format
        self._shard = shard
        self._old = old
        self._leads = leads or (lambda starts, sizes: np.zeros_like(starts))
        self._header = format._header
        self._size = 0 if old is None else old.size
        self._before = np.zeros((1 << format.page_bits, 2), np.uint64) if old is None else format._entries(old.root())
        self._root = self._before.copy()
        self._end = self._header  # the end of the new object so far
        self._kept = _NONE, _NONE  # starts and sizes of entries that do not change
        # Fragments of a mesh precede its manifest. Entries sorted by start keep this order for readers of the
        # minishard.
        self._by_start = isinstance(format.ids, Ids) and len(format.ids.grid) == 2

    def indices(self, pages: Sequence[int] | None) -> dict[int, ShardIndex]:
        """Return the indices of these minishards, empty for those that the shard lacks; None: of all that it has.

        Raise ValueError, with the reason, if one is damaged.
        """
        out = dict.fromkeys(pages or (), ShardIndex.empty())
        for page, _, index in () if self._old is None else self._old.parts(pages):
            if isinstance(index, ValueError):
                raise index
            out[page] = index
        return out

    def sound(self, *, strict: bool) -> dict[int, ShardIndex] | None:
        """Return the indices of all minishards. If an entry is invalid, return None, or raise ValueError if strict."""
        try:
            indices = self.indices(None)
            for page, index in indices.items():
                require_sound(self._format, self._shard, page, index)
                require_sound(self._format, self._shard, page, index.repeated or ShardIndex.empty())
                self._leads(*index.columns()[1:])
        except ValueError:
            if strict:
                raise
            return None
        return indices

    def append(self, entries: Mapping[int, Columns]) -> Plan:
        """Return all bytes after the old shard index, which stay; new ones are appended after them.

        Raise ValueError if a chunk of `entries` begins in the shard index.
        """
        self._end = max(self._size, self._header)
        untouched = np.flatnonzero(self._before[:, 0] != self._before[:, 1])
        untouched = np.setdiff1d(untouched, list(entries), assume_unique=True).astype(np.intp)
        starts, stops = self._before[untouched].T + np.uint64(self._header)
        unchanged = [(starts, stops - starts)]
        for page, (_, starts, sizes) in entries.items():
            if ((starts < self._header) & (sizes > 0)).any():
                raise ValueError(f"a chunk of minishard {page} begins in the shard index, which is about to change")
            unchanged.append((starts, sizes))
        starts, sizes = (np.concatenate(column) for column in zip(*unchanged, strict=True))
        self._kept = starts, sizes
        return [ByteRange(self._header, self._size)] if self._size > self._header else []

    def pack(self, entries: dict[int, Columns]) -> Plan:
        """Return the bytes of all chunks and of their leads without gaps, and update the starts in `entries`."""
        self._root[:] = 0
        starts, sizes = (np.concatenate([_NONE, *(columns[i] for columns in entries.values())]) for i in (1, 2))
        before = self._leads(starts, sizes)
        pieces, moved = packed(starts - before, starts + sizes, self._header)
        moved += before
        position = 0
        for page, (ids, _, own_sizes) in entries.items():
            entries[page] = ids, moved[position : position + len(ids)], own_sizes
            position += len(ids)
        self._end += size_of(pieces)
        return pieces

    def write(self, page: int, entries: Columns, puts: Mapping[int, Put]) -> Plan:
        """Return the plan of a minishard's new chunks and of its new index."""
        pieces: Plan = []
        rows = []
        for slot, put in puts.items():
            if put.lead is not None:
                pieces += pieces_of(put.lead)
                self._end += size_of(put.lead)
            rows.append((slot, self._end, size_of(put.data)))
            pieces += pieces_of(put.data)
            self._end += rows[-1][2]
        new = np.array(rows, np.uint64).reshape(-1, 3).T
        ids, starts, sizes = (np.append(old, column) for old, column in zip(entries, new, strict=True))
        if not len(ids):
            self._root[page] = 0
            return pieces
        index = self._encoded(ids, starts, sizes)
        self._root[page] = self._end - self._header, self._end - self._header + len(index)
        self._end += len(index)
        return [*pieces, index]

    def _encoded(self, ids: U64, starts: U64, sizes: U64) -> bytes:
        order = np.lexsort((ids, starts)) if self._by_start else np.argsort(ids, kind="stable")
        ids, starts, sizes = ids[order], starts[order], sizes[order]
        if 24 * len(ids) > MAX_INDEX_BYTES:
            raise UnsupportedError(f"{len(ids)} chunks in a minishard; {MAX_INDEX_BYTES // 24} is the limit")
        rows = np.empty((3, len(ids)), np.uint64)
        rows[0, 0], rows[0, 1:] = ids[0], ids[1:] - ids[:-1]  # modulo 2**64, like the next row
        rows[1, 0], rows[1, 1:] = starts[0] - np.uint64(self._header), starts[1:] - (starts + sizes)[:-1]
        rows[2] = sizes
        raw = rows.astype("<u8").tobytes()
        return encode(GZIPPED, raw) if self._format.spec.minishard_index_encoding == "gzip" else raw

    def framed(self, pieces: Plan) -> Plan | None:
        """Return the whole object; None if it has no chunks, and is to be removed.

        Raise ValueError if an entry outside the old object would refer to new bytes.
        """
        if (self._root[:, 0] == self._root[:, 1]).all():
            return None
        require_still_leaving(*self._kept, self._size, self._end)
        return [self._root.astype("<u8").tobytes(), *pieces]


GZIPPED = (Codec("gzip", {"level": PRECOMPUTED_LEVEL}),)
