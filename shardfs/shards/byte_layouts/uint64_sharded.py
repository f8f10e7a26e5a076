"""Shards with a two-level index of uint64 chunk ids. A hash of the id selects shard and minishard.

Neuroglancer precomputed sharded format ("neuroglancer_uint64_sharded_v1"),
https://github.com/google/neuroglancer/blob/master/src/datasource/precomputed/sharded.md
"""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardfs.codecs.encoders import encode
from shardfs.codecs.zlib_streams import PRECOMPUTED_LEVEL, gunzip
from shardfs.model.arrays import Codec
from shardfs.model.blobs import ByteRange
from shardfs.model.byte_ranges import cover, leaving
from shardfs.model.errors import UnsupportedError
from shardfs.model.shard_format import Placement, Placements, Put, ShardIndex, Usage
from shardfs.model.write_plan import joined, packed, pieces_of, size_of
from shardfs.shards.byte_layouts.single_page import MAX_INDEX_BYTES
from shardfs.shards.byte_layouts.uint64_spec import (
    BLOCK_BITS,
    ENTRY,
    ChunkIds,
    Ids,
    ShardingSpec,
    _shift_right,
    murmurhash3_x86_128,
    murmurhash3_x86_128_many,
)
from shardfs.shards.index_reader import read_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from shardfs.model.blobs import Blob, ByteRequest, Plan
    from shardfs.model.shard_format import Leads, ShardChange
    from shardfs.model.values import U64, Bool, Coords


class Uint64Sharded:
    """A `ShardFormat`: page = minishard, slot = chunk id."""

    in_place = ENTRY  # the shard index has no checksum, and its entries are independent of each other

    def __init__(self, spec: ShardingSpec, ids: ChunkIds, *, suffix: str = ".shard") -> None:
        self.spec, self.ids = spec, ids
        self.page_bits = spec.minishard_bits
        self.blocks = max(1, (1 << spec.minishard_bits) >> BLOCK_BITS)
        self._digits = max(1, -(-spec.shard_bits // 4))
        self._suffix = suffix
        self._header = ENTRY << spec.minishard_bits  # stored offsets count from the end of the shard index
        self._minishard_mask = (1 << spec.minishard_bits) - 1
        self._shard_mask = (1 << spec.shard_bits) - 1
        self._murmur = spec.hash == "murmurhash3_x86_128"
        self._capacity = lru_cache(1024)(self._count)

    @property
    def grid(self) -> Coords:
        return self.ids.grid

    walk = None

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

    def block_of(self, page: int) -> int:
        return page >> BLOCK_BITS

    def root_request(self, block: int) -> ByteRange:
        start = block * (ENTRY << BLOCK_BITS)
        return ByteRange(start, min(start + (ENTRY << BLOCK_BITS), self._header))

    def _entries(self, block: int, root: bytes | None) -> U64:
        wanted = self.root_request(block)
        if root is None or len(root) != wanted.stop - wanted.start:
            raise ValueError(f"its shard index should have {self._header} bytes, but the shard is shorter")
        return np.frombuffer(root, "<u8").astype(np.uint64, copy=False).reshape(-1, 2)

    def nonempty_pages(self, block: int, root: bytes | None) -> U64:
        entries = self._entries(block, root)
        return np.flatnonzero(entries[:, 0] != entries[:, 1]).astype(np.uint64) + np.uint64(block << BLOCK_BITS)

    def page_request(self, shard: int, page: int, root: bytes | None) -> ByteRange | None:
        entry = self._entries(page >> BLOCK_BITS, root)[page & ((1 << BLOCK_BITS) - 1)]
        start, end = int(entry[0]), int(entry[1])
        if start == end:
            return None
        if start > end or end >= 2**62:
            raise ValueError(f"minishard {page} should have an index at [{start}, {end}), which is impossible")
        if end - start > MAX_INDEX_BYTES:
            raise ValueError(
                f"the index of minishard {page} would have {end - start} bytes; {MAX_INDEX_BYTES} is the limit"
            )
        return ByteRange(self._header + start, self._header + end)

    def _entries_of(self, page: int, raw: bytes) -> MinishardEntries:
        """Return the index of a minishard with entries unchanged. Raise ValueError, with the reason."""
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
        return MinishardEntries(ids, ends - rows[2], rows[2].copy())

    def decode_page(self, shard: int, page: int, raw: bytes) -> ShardIndex:
        ids, starts, sizes = self._entries_of(page, raw)
        if len(ids) > 1 and not (ids[1:] > ids[:-1]).all():
            order = np.argsort(ids, kind="stable")
            ids, starts, sizes = ids[order], starts[order], sizes[order]
            first = np.append(True, ids[1:] != ids[:-1])  # a repeated id is damage; readers find its first entry
            repeated = np.unique(ids[~first]) if not first.all() else None
            return ShardIndex(ids[first], starts[first], sizes[first], repeated=repeated)
        return ShardIndex(ids, starts, sizes)

    def candidates(self, shard: int) -> None:
        return None  # would need a hash of every possible id

    def key(self, shard: int) -> str:
        return f"{shard:0{self._digits}x}{self._suffix}"

    def shard_of(self, key: str) -> int | None:
        digits = key.removesuffix(self._suffix)
        if len(key) - len(digits) != len(self._suffix) or len(digits) != self._digits:
            return None
        if not set(digits) <= set("0123456789abcdef"):
            return None
        shard = int(digits, 16)
        return shard if shard <= self._shard_mask else None

    # ---- writing ----

    @property
    def unwritable(self) -> str:
        most = MAX_INDEX_BYTES // ENTRY
        return f"shards of more than {most} minishards are shown only" if self._header > MAX_INDEX_BYTES else ""

    def capacity(self, shard: int) -> int | None:
        return self._capacity(shard)

    def _count(self, shard: int) -> int | None:
        if self._murmur or isinstance(self.ids, Ids):
            return None  # to count the chunks of a hashed shard, every chunk id would have to be hashed
        low, used = self.spec.preshift_bits + self.page_bits, sum((n - 1).bit_length() for n in self.grid if n)
        high = max(used - low - self.spec.shard_bits, 0)
        if low + high > CAPACITY_BITS or not all(self.grid):
            return None if all(self.grid) else 0
        runs = np.arange(1 << high, dtype=np.uint64) << np.uint64(low + self.spec.shard_bits if high else 0)
        codes = runs[:, None] | np.uint64(shard << low) | np.arange(1 << low, dtype=np.uint64)
        return int(np.count_nonzero(self.ids.decode_many(codes.ravel())[1]))

    def rewrite(self, shard: int, old: Blob | None, change: ShardChange) -> Plan | None:
        """Return the plan of the new shard; None if no chunk is left.

        Without `pack`, only the shard index changes in place. New chunks and new minishard indices are
        appended; old minishard indices become dead bytes.
        """
        work = _Minishards(self, shard, old, change.leads)
        changed: dict[int, list[int]] = {}
        for page, slot in (*change.puts, *change.drops):
            changed.setdefault(page, []).append(slot)
        sound = work.sound() if change.pack else None
        if sound is None and change.strict:
            raise ValueError("an index entry is outside the shard, or a part of the index cannot be read")
        kept = work.entries(changed) if sound is None else dict.fromkeys(changed, NO_ENTRIES) | sound
        kept = {page: entries.without(changed.get(page, ())) for page, entries in kept.items()}
        pieces = work.append(kept) if sound is None else work.pack(kept)
        for page, entries in sorted(kept.items()):
            puts = {
                slot: change.puts[page, slot] for slot in sorted(changed.get(page, ())) if (page, slot) in change.puts
            }
            pieces += work.write(page, entries, puts)
        return work.framed(joined(pieces))

    def usage(self, shard: int, old: Blob, leads: Leads | None = None) -> Usage:
        size, begins, sizes = old.stat().size, [_NONE], [_NONE]
        indices = [ByteRange(0, self._header)]
        for block in range(self.blocks):  # one after the other: all of them may have any size
            (root,) = old.read([self.root_request(block)])
            pages = self.nonempty_pages(block, root).tolist()
            for _, at, entries in read_pages(self, shard, pages, root, old, self._entries_of):
                if isinstance(at, ByteRange) and not isinstance(entries, ValueError):
                    indices.append(at)
                    inside = ~entries.leaving(size)
                    begins.append(entries.starts[inside])
                    sizes.append(entries.sizes[inside])
        starts, lengths = np.concatenate(begins), np.concatenate(sizes)
        before = np.zeros_like(starts) if leads is None else leads(starts, lengths)
        live, own = cover(starts - before, starts + lengths), cover(*np.array(indices, np.uint64).T)
        used = cover(np.append(live.starts, own.starts), np.append(live.stops, own.stops)).nbytes
        return Usage(size, own.nbytes, live.nbytes, size - used)


CAPACITY_BITS = 21


class MinishardEntries(NamedTuple):
    """Entries of a minishard, in any order; starts are positions in the file."""

    ids: U64
    starts: U64
    sizes: U64

    def without(self, ids: Collection[int]) -> MinishardEntries:
        """Return the entries without these ids."""
        if not ids:
            return self
        kept = ~np.isin(self.ids, np.fromiter(ids, np.uint64, len(ids)))
        return MinishardEntries(self.ids[kept], self.starts[kept], self.sizes[kept])

    def leaving(self, object_size: int) -> Bool:
        """Return which entries leave an object of this size."""
        return leaving(self.starts, self.sizes, object_size)

    def and_these(self, rows: list[tuple[int, int, int]]) -> MinishardEntries:
        """Return the entries with these rows added."""
        if not rows:
            return self
        more = np.array(rows, np.uint64)
        return MinishardEntries(*(np.append(a, b) for a, b in zip(self, more.T, strict=True)))


_NONE = np.empty(0, np.uint64)

NO_ENTRIES = MinishardEntries(_NONE, _NONE, _NONE)


class _Minishards:
    """A shard that is being rewritten. `_root` is its shard index, which is changed in place.

    Its offsets count from the end of the shard index.
    """

    def __init__(self, format: Uint64Sharded, shard: int, old: Blob | None, leads: Leads | None) -> None:
        self._format, self._shard, self._old = format, shard, old
        self._leads = leads or (lambda starts, sizes: np.zeros_like(starts))
        self._header = format._header
        self._size = 0 if old is None else old.stat().size
        self._root = np.zeros((1 << format.page_bits, 2), np.uint64)
        if old is not None:
            blocks = old.read([format.root_request(block) for block in range(format.blocks)])
            self._root = np.concatenate([format._entries(n, raw) for n, raw in enumerate(blocks)])
        self._before = self._root.copy()
        self._end = self._header  # the end of the new object so far
        self._doubtful = _NONE, _NONE  # starts and sizes of kept entries that leave the old object
        # Fragments of a mesh precede its manifest. Entries sorted by start keep this order for readers of the
        # minishard.
        self._by_start = isinstance(format.ids, Ids) and len(format.ids.grid) == 2

    def _pages(self) -> list[int]:
        """Return the minishards that have an index."""
        return np.flatnonzero(self._before[:, 0] != self._before[:, 1]).tolist()

    def _read(self, pages: list[int]) -> Iterator[tuple[int, ByteRequest | None, MinishardEntries | ValueError]]:
        """Yield the nonempty ones of these minishards, ascending (see `read_pages`)."""
        for block, members in groupby(pages, self._format.block_of):
            root = self._before[block << BLOCK_BITS : block + 1 << BLOCK_BITS].astype("<u8").tobytes()
            if self._old is not None:
                decode = self._format._entries_of
                yield from read_pages(self._format, self._shard, list(members), root, self._old, decode)

    def entries(self, pages: Collection[int]) -> dict[int, MinishardEntries]:
        """Return the entries of these minishards. Raise ValueError, with the reason, if one cannot be read."""
        out = dict.fromkeys(pages, NO_ENTRIES)
        for page, _, entries in self._read(sorted(pages)):
            if isinstance(entries, ValueError):
                raise entries
            out[page] = entries
        return out

    def sound(self) -> dict[int, MinishardEntries] | None:
        """Return the entries of all minishards; None if an entry is invalid."""
        try:
            found = self.entries(self._pages())
            for entries in found.values():
                if entries.leaving(self._size).any():
                    return None
                self._leads(entries.starts, entries.sizes)
        except ValueError:
            return None
        return found

    def append(self, kept: Mapping[int, MinishardEntries]) -> Plan:
        """Return all bytes after the shard index."""
        self._end = max(self._size, self._header)
        others = np.setdiff1d(self._pages(), list(kept), assume_unique=True).astype(np.intp)
        starts, stops = self._before[others].T + np.uint64(self._header)
        found = [(starts, stops - starts)]
        for page, entries in kept.items():
            if ((entries.starts < self._header) & (entries.sizes > 0)).any():
                raise ValueError(f"a chunk of minishard {page} begins in the shard index, which is about to change")
            found.append((entries.starts, entries.sizes))
        starts, sizes = (np.concatenate(column) for column in zip(*found, strict=True))
        outside = leaving(starts, sizes, self._size)
        self._doubtful = starts[outside], sizes[outside]
        return [ByteRange(self._header, self._size)] if self._size > self._header else []

    def pack(self, kept: dict[int, MinishardEntries]) -> Plan:
        """Return the bytes of all chunks and of their leads without gaps, and update the starts in `kept`."""
        self._root[:] = 0
        _, starts, sizes = (np.concatenate(column) for column in zip(NO_ENTRIES, *kept.values(), strict=True))
        before = self._leads(starts, sizes)
        pieces, moved = packed(starts - before, starts + sizes, self._header)
        moved += before
        done = 0
        for page, entries in kept.items():
            kept[page] = entries._replace(starts=moved[done : done + len(entries.ids)])
            done += len(entries.ids)
        self._end += size_of(pieces)
        return pieces

    def write(self, page: int, entries: MinishardEntries, puts: Mapping[int, Put]) -> Plan:
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
        entries = entries.and_these(rows)
        if not len(entries.ids):
            self._root[page] = 0
            return pieces
        index = self._encoded(entries)
        self._root[page] = self._end - self._header, self._end - self._header + len(index)
        self._end += len(index)
        return [*pieces, index]

    def _encoded(self, entries: MinishardEntries) -> bytes:
        order = np.lexsort((entries.ids, entries.starts)) if self._by_start else np.argsort(entries.ids, kind="stable")
        ids, starts, sizes = (column[order] for column in entries)
        if 24 * len(ids) > MAX_INDEX_BYTES:
            raise UnsupportedError(f"{len(ids)} chunks in a minishard; {MAX_INDEX_BYTES // 24} is the limit")
        rows = np.empty((3, len(ids)), np.uint64)
        rows[0, 0], rows[0, 1:] = ids[0], ids[1:] - ids[:-1]  # modulo 2**64, like the next row
        rows[1, 0], rows[1, 1:] = starts[0] - np.uint64(self._header), starts[1:] - (starts + sizes)[:-1]
        rows[2] = sizes
        raw = rows.astype("<u8").tobytes()
        return encode(GZIPPED, raw) if self._format.spec.minishard_index_encoding == "gzip" else raw

    def framed(self, pieces: Plan) -> Plan | None:
        """Return the whole object. Raise ValueError if an entry outside the old object would refer to new bytes."""
        if (self._root[:, 0] == self._root[:, 1]).all():
            return None
        starts, sizes = self._doubtful
        inside = np.flatnonzero(~leaving(starts, sizes, self._end))
        if len(inside):
            where = f"[{starts[inside[0]]}, {starts[inside[0]] + sizes[inside[0]]})"
            raise ValueError(
                f"an index entry for {where} is outside the {self._size} bytes, but would point to new bytes"
            )
        return [self._root.astype("<u8").tobytes(), *pieces]


GZIPPED = (Codec("gzip", {"level": PRECOMPUTED_LEVEL}),)
