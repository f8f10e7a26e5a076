"""Listings of a collection's directories, from arithmetic or from the shard indices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardfs.model.grid import SMALL_IDS, IdNames, unravel
from shardfs.model.listing import BATCH, Batch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardfs.model.values import U64
    from shardfs.shards.chunk_store import ChunkStore
    from shardfs.vfs.inodes import ChunkNumbers, TreePosition

LONG_ROW = 1 << 22
"""In a directory with more possible chunks than this, few exist. They are found in the shard indices."""

IDS_WITH_INODES = 1 << 16
"""Number of directory entries listed with attributes; further entries of a directory of object ids are listed by name.

Such directories hold millions of objects, and most readers need only the names. Listing a million names is four times
as fast, while `ls -l` takes five times as long.
"""


class ChunkListing:
    """Lists the directories of a collection in batches.

    `mtime_ns` is the modification time of subdirectories and of chunks that are shown but not stored.
    """

    def __init__(self, numbers: ChunkNumbers, chunks: ChunkStore, mtime_ns: int) -> None:
        self._numbers = numbers
        self._names = numbers.names
        self._dims = numbers.dims
        self._chunks = chunks
        self._mtime_ns = mtime_ns

    def scan(self, place: TreePosition, cookie: int) -> Iterator[Batch]:
        """Yield the entries of a directory that follow `cookie`, ascending. Cookies are below `REST`.

        Raise CorruptShardError as `ChunkLayer.scan`, after the entries that could be read.
        """
        if place.level + 1 < self._numbers.depth:
            return self._scan_directories(place, cookie)
        # In rows, the chunks of missing shards are listed, too.
        in_rows = self._numbers.depth > 1 or self._chunks.layer.source.layer.required > 0
        if self._chunks.filler is not None or (in_rows and self._dims[-1] <= LONG_ROW):
            return self._scan_row(place, cookie)
        return self._scan_stored(place, cookie)

    def _values(self, level: int, cookie: int) -> Iterator[U64]:
        """Yield the values of the names on a level from `cookie` on, in parts."""
        for start in range(cookie, self._dims[level], BATCH):
            yield np.arange(start, min(start + BATCH, self._dims[level]), dtype=np.uint64)

    def _scan_directories(self, place: TreePosition, cookie: int) -> Iterator[Batch]:
        """Yield subdirectories without looking for chunks; some may be empty."""
        for values in self._values(place.level, cookie):
            names, numbers = self._names.render(place.level, values), self._numbers.numbers(place, values)
            yield Batch.from_columns(names, numbers, 0, self._mtime_ns, values + np.uint64(1), directories=True)

    def _scan_row(self, place: TreePosition, cookie: int) -> Iterator[Batch]:
        """Yield the chunks of one directory; each is looked up."""
        row, filler = np.array(unravel(place.nth, self._dims[:-1]), np.uint64), self._chunks.filler
        for last in self._values(-1, cookie):
            values = np.empty((len(last), self._numbers.depth), np.uint64)
            values[:, :-1] = row
            values[:, -1] = last
            coords = self._names.coords_many(values)
            exists, stored_sizes, mtimes = self._chunks.layer.present(coords)
            sizes = self._chunks.sizes(coords, stored_sizes)
            if filler is not None:
                sizes[~exists], mtimes[~exists] = filler.sizes(coords[~exists]), self._mtime_ns
                exists = np.ones(len(last), np.bool_)
            last = last[exists]
            if len(last):
                names, numbers = self._names.render(place.level, last), self._numbers.numbers(place, last)
                yield Batch.from_columns(names, numbers, sizes[exists], mtimes[exists], last + np.uint64(1))

    def _scan_stored(self, place: TreePosition, cookie: int) -> Iterator[Batch]:
        """Yield the chunks of one directory from the shard indices, shard by shard."""
        row, listed = np.array(unravel(place.nth, self._dims[:-1]), np.uint64), 0
        for coords, stored_sizes, mtime_ns, cookies in self._chunks.layer.scan(cookie):
            values = self._names.values(coords)
            if self._numbers.depth > 1:
                in_row = (values[:, :-1] == row).all(axis=1)
                if not in_row.any():
                    continue
                values, coords, stored_sizes, cookies = (x[in_row] for x in (values, coords, stored_sizes, cookies))
            last = values[:, -1]
            numbers, sizes = self._numbers.numbers(place, last), self._chunks.sizes(coords, stored_sizes)
            if isinstance(self._names, IdNames):
                listed += len(coords)
                names = self._names.names(coords)
                large = coords[:, 0] >= SMALL_IDS  # without computed inode numbers: listed by name only
                if large.any():
                    numbers[large] = self._numbers.of_ids(self._chunks.layer.index.path, coords[large])
                    sizes = np.where(large, -1, sizes)
            else:
                names = self._names.render(place.level, last)
            batch = Batch.from_columns(names, numbers, sizes, mtime_ns, cookies)
            yield batch._replace(by_name=listed > IDS_WITH_INODES)
