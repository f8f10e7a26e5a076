"""Arrays with one object per chunk, which other layouts can show."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardfs.model.grid import ravel, ravel_many, unravel
from shardfs.model.shard_format import Placement, Placements, ShardIndex, Usage
from shardfs.model.write_plan import pieces_of, unchanged
from shardfs.shards.byte_layouts.single_page import GridShards

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.model.blobs import Blob, Plan
    from shardfs.model.shard_format import Leads, ShardChange, StoredIndex
    from shardfs.model.values import U64, Bool, Coords


class Unsharded(GridShards):
    """A `ShardFormat` in which every chunk is a shard of its own. Its key is that of `GridShards`."""

    def place(self, coords: Coords) -> Placement:
        return ravel(coords, self.grid), 0, 0

    def row(self, above: Coords) -> Callable[[int], Placement]:
        first = ravel((*above, 0), self.grid)
        return lambda last: (first + last, 0, 0)

    def place_many(self, coords: U64) -> Placements:
        zeros = np.zeros(len(coords), np.uint64)
        return Placements(ravel_many(coords, self.grid), zeros, zeros)

    def coords(self, shard: int, page: int, slots: U64) -> tuple[U64, Bool]:
        cells = np.array([unravel(shard, self.grid)] * len(slots), np.uint64).reshape(len(slots), len(self.grid))
        return cells, np.ones(len(slots), np.bool_)

    def walk(self, blob: Blob) -> ShardIndex:
        return ShardIndex(None, np.zeros(1, np.uint64), np.array([blob.stat().size], np.uint64))

    def is_beyond(self, key: str) -> bool:
        """Return whether a key is that of a chunk of a larger grid."""
        return self._coords_of_key(key) is not None and self.shard_of(key) is None

    def candidates(self, shard: int) -> U64:
        return np.zeros(1, np.uint64)

    def capacity(self, shard: int) -> int:
        return 1

    def rewrite(self, shard: int, old: StoredIndex | None, change: ShardChange) -> Plan | None:
        """Return the plan of the object, which is the new chunk and nothing else; None if the chunk is dropped."""
        for put in change.puts.values():
            return pieces_of(put.data)
        return None if change.drops or old is None else unchanged(old.size)

    def usage(self, old: StoredIndex, leads: Leads | None = None) -> Usage:
        return Usage(old.size, 0, old.size, 0)
