"""Common parts of byte layouts: shards with a single index page, and the headers of Blosc chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardfs.model.blobs import ByteRange
from shardfs.model.grid import ravel, unravel
from shardfs.model.shard_format import Placements, Reason, ShardFormat, ShardIndex

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.model.blobs import Blob, ByteRequest
    from shardfs.model.shard_format import Checksum, Index, Placement
    from shardfs.model.values import U64, Bool, Coords, Sizes

MAX_INDEX_BYTES = (32 << 20) + 4096
"""The largest index page that is decoded: 2**21 chunks and their checksum.

A larger size counts as damage, so that a malicious size allocates no memory.
"""


class SinglePage(ShardFormat):
    """The part of `ShardFormat` that is the same for shards with one index page and no root.

    Shards whose index `walk` reads have no page to request.
    """

    def root_request(self) -> None:
        return None

    def nonempty_pages(self, root: bytes | None) -> U64:
        return np.zeros(1, np.uint64)

    def page_request(self, shard: int, page: int, root: bytes | None) -> ByteRequest | None:
        return None

    def decode_page(self, shard: int, page: int, raw: bytes) -> Index:
        return ShardIndex.empty()


class GridShards(SinglePage):
    """Shards that are numbered by their position in a grid.

    Args:
        key: returns the key of the shard object at these coordinates of the shard grid.
        coords_of_key: the inverse of `key`; None for other keys.
    """

    def __init__(
        self, shard_grid: Coords, key: Callable[[Coords], str], coords_of_key: Callable[[str], Coords | None]
    ) -> None:
        self.grid = self.shard_grid = shard_grid  # a subclass with several chunks in a shard sets another `grid`
        self._key = key
        self._coords_of_key = coords_of_key

    def key(self, shard: int) -> str:
        return self._key(unravel(shard, self.shard_grid))

    def shard_of(self, key: str) -> int | None:
        cell = self._coords_of_key(key)
        if cell is None or not all(c < n for c, n in zip(cell, self.shard_grid, strict=True)):
            return None
        return ravel(cell, self.shard_grid)


class Numbered(SinglePage):
    """Shards of a fixed number of chunks along one axis. No single request returns the index: `walk` reads it.

    In this class there is one shard only, the dataset's own file.
    """

    def __init__(self, chunks: int, per_file: int) -> None:
        self.grid = (chunks,)
        self.per_file = per_file

    def place(self, coords: Coords) -> Placement:
        shard, slot = divmod(coords[0], self.per_file)
        return shard, 0, slot

    def row(self, above: Coords) -> Callable[[int], Placement]:
        return lambda last: self.place((last,))

    def place_many(self, coords: U64) -> Placements:
        per_file, numbers = np.uint64(self.per_file), coords[:, 0]
        return Placements(numbers // per_file, np.zeros(len(numbers), np.uint64), numbers % per_file)

    def coords(self, shard: int, page: int, slots: U64) -> tuple[U64, Bool]:
        numbers = slots + np.uint64(shard * self.per_file)
        return numbers[:, None], (slots < np.uint64(self.per_file)) & (numbers < np.uint64(self.grid[0]))

    def candidates(self, shard: int) -> U64 | None:
        n = min(self.per_file, self.grid[0] - shard * self.per_file)
        return np.arange(max(n, 0), dtype=np.uint64) if n <= MAX_BLOSC_CHUNKS else None

    def key(self, shard: int) -> str:
        return ""

    def shard_of(self, key: str) -> int | None:
        return 0 if key == "" else None

    def capacity(self, shard: int) -> int:
        return max(min(self.per_file, self.grid[0] - shard * self.per_file), 0)


BLOSC_HEADER = 16

MAX_BLOSC_CHUNKS = 1 << 21

_BATCH = 1 << 16


def read_exactly(blob: Blob, where: ByteRange) -> bytes:
    """Return the bytes of a range.

    Raise ValueError, with the reason, if they are cut off or more than an index may have.
    """
    if where.stop - where.start > MAX_INDEX_BYTES:
        raise ValueError(f"{where.stop - where.start} bytes at {where.start}; {MAX_INDEX_BYTES} is the limit")
    data = blob.read([where])[0]
    if len(data) != where.stop - where.start:
        raise ValueError(f"{where.stop - where.start} bytes expected at {where.start}, {len(data)} found")
    return data


def blosc_size(head: bytes) -> int:
    """Return the size of a Blosc chunk of version 1 or 2 from its first 16 bytes; -1 if they are invalid.

    https://github.com/Blosc/c-blosc/blob/main/README_CHUNK_FORMAT.rst: `cbytes`, which includes these 16 bytes.
    """
    size = int.from_bytes(head[12:16], "little")
    return size if len(head) == BLOSC_HEADER and BLOSC_HEADER <= size < 2**31 else -1


def blosc_sizes(blob: Blob, starts: Sizes, inside: Bool) -> Sizes:
    """Return `blosc_size` of the chunks at the starts that are `inside`; -1 for the others.

    Each batch of 65,536 chunks needs one read.
    """
    out, positions = np.full(len(starts), -1, np.int64), np.flatnonzero(inside)
    for i in range(0, len(positions), _BATCH):
        batch = positions[i : i + _BATCH]
        where = [ByteRange(start, start + BLOSC_HEADER) for start in starts[batch].tolist()]
        out[batch] = [blosc_size(head) for head in blob.read(where)]
    return out


def blosc_index(
    slots: U64 | None, starts: Sizes, sizes: Sizes, bad: Bool, name: str, checksum: Checksum | None = None
) -> ShardIndex:
    """Return the index of Blosc chunks; `bad` ones are broken, and `name` is the kind of chunk for the reason.

    A chunk with a negative start or size must be `bad`; the index has 0 for it. `slots`, `checksum`: see `ShardIndex`.
    """
    index = ShardIndex(slots, starts.clip(0).astype(np.uint64), sizes.clip(0).astype(np.uint64), checksum=checksum)
    # no chunk is at 0, where each file has its header
    return index.with_broken(bad, Reason("entry", lambda start, _: f"no whole {name} at {start or 'any position'}"))
