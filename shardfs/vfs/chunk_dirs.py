"""The virtual directories and files of one collection, with inode numbers computed from coordinates.

Nothing is stored per chunk. An inode number is `first` plus a position: first all directories of level 1, then those of
level 2, and so on; the chunks come last.
"""

from __future__ import annotations

import errno
import math
import os
from bisect import bisect_right
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardfs.codecs.zlib_streams import MAX_STORED
from shardfs.model.blobs import ByteRange
from shardfs.model.errors import CorruptShardError
from shardfs.model.grid import SMALL_IDS, IdNames, NestedNames, ravel, unravel
from shardfs.model.kinds import COMPRESSIONS, NameKind
from shardfs.model.listing import Batch, EntryRow
from shardfs.shards import rewriting
from shardfs.storage.blob_views import crc32c_of
from shardfs.vfs.inodes import numbers_of_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from shardfs.model.collection import Collection, Transform
    from shardfs.model.shard_format import Placement
    from shardfs.model.values import U64, Bool, Coords, Sizes, Version
    from shardfs.shards.chunk_store import ChunkBatch, ChunkStore, StoredChunk
    from shardfs.storage.cache import ByteLRU

from shardfs.model.attributes import Attributes, Extent

BATCH = 4096

ROWS = 4096

LONG_ROW = 1 << 22

LONG_WORK = 4096
"""Stored chunks of this many bytes or more may take longer to decode than handing leadership to another thread."""

MAX_FORMER = 64
"""Maximum number of earlier array shapes whose inode numbers stay valid."""

WINDOW = 8 << 20
"""Window size for reads that cannot be served from a local file.

A chunk of up to 8 MiB costs one request, however small the client's reads are.
"""


IDS_WITH_INODES = 1 << 16
"""Number of directory entries listed with attributes; further entries of a directory of object ids are listed by name.

Such directories hold millions of objects, and most readers need only the names. Listing a million names is four times
as fast, while `ls -l` takes five times as long.
"""


_new = tuple.__new__


class TreePosition(NamedTuple):
    """A node of the tree: `level` components deep, the `nth` of the nodes of its level."""

    level: int
    nth: int


class _Row(NamedTuple):
    """The chunks of one directory, which differ only in the last component of their names.

    `first` is the inode number of the first chunk; `above` holds the coordinates that all chunks share.
    """

    first: int
    above: Coords
    place: Callable[[int], Placement]


class Target(NamedTuple):
    """A chunk of a sharded collection.

    `suffix` is the extension of the compression that a client applied to its file.
    """

    tree: ChunkDirs
    coords: Coords
    suffix: str = ""


class NameMeaning(NamedTuple):
    """What a name in a directory means, whether the file exists or not; `target` is set for a chunk."""

    kind: NameKind
    target: Target | None = None


class ChunkDirs:
    """Files and directories of a collection.

    Args:
        path: the directory in which the collection is shown.
        first: the first of `count` inode numbers reserved for the collection.
        mtime_ns: modification time of its directories; a chunk has the modification time of its shard.
        stored: the path of the collection's directory in the store.
    """

    def __init__(
        self,
        path: str,
        collection: Collection,
        chunks: ChunkStore,
        cache: ByteLRU,
        first: int,
        mtime_ns: int,
        ttl_s: float = math.inf,
        *,
        stored: str,
    ) -> None:
        self.path, self.collection, self.chunks, self._stored = path, collection, chunks, stored
        self.first, self.mtime_ns = first, mtime_ns
        self.former: ChunkDirs | None = None  # the tree of an earlier shape of the array; its inode numbers stay valid
        self._cache, self._ttl = cache, ttl_s
        self._names = collection.names
        self._dims = self._names.dims
        self.depth = len(self._dims)
        *self._bases, _ = _bases(self._dims, bool(self._names.prefix))
        self._rows: dict[int, _Row] = {}
        has_parents = self.depth > 1 or bool(self._names.prefix)
        self._has_rows = type(self._names) is NestedNames and collection.lead is None and has_parents
        self._raw, self._filler = collection.transform is None, collection.filler
        self.by_id = isinstance(self._names, IdNames)

    def usage(self) -> tuple[int, int]:
        """Return the live and the dead bytes of all shards. Reads every index."""
        outermost, live, dead = self.outermost, 0, 0
        for shard in outermost.existing_shards().tolist():
            with suppress(OSError, ValueError, CorruptShardError):  # `verify` reports damaged shards
                found = rewriting.usage(self.collection, shard, outermost.source.stored(shard))
                live, dead = live + found.live, dead + found.dead
        return live, dead

    @staticmethod
    def count(collection: Collection) -> int:
        """Return how many inode numbers the nodes of a collection need."""
        return _bases(collection.names.dims, bool(collection.names.prefix))[-1]

    # ---- numbers ----

    @property
    def root(self) -> int | None:
        """The inode number of the top directory (`c`); None if the names are in the dataset's directory."""
        return self.first if self._names.prefix else None

    def place(self, number: int) -> TreePosition:
        position = number - self.first
        level = bisect_right(self._bases, position, 1) - 1
        return TreePosition(level, position - self._bases[level])

    def lookup(self, parent: int, name: bytes) -> Attributes | None:
        """Return the child of a directory of this collection; None if the name does not belong to the collection.

        Raise FileNotFoundError for a chunk that does not exist, and NotADirectoryError if `parent` is a chunk.
        """
        row = self._rows.get(parent)
        if row is not None:
            value = self._names.parse(self.depth - 1, name)
            return None if value is None else self._in_row(row, value)
        level, nth = self.place(parent)
        if level >= self.depth:
            raise NotADirectoryError(errno.ENOTDIR, "is a chunk", str(parent))
        value = self._names.parse(level, name)
        if value is None:
            return None
        if level + 1 == self.depth and self._has_rows:
            return self._in_row(self._make_row(parent, nth), value)
        return self._child(level, nth, value)

    def _make_row(self, directory: int, nth: int) -> _Row:
        if len(self._rows) >= ROWS:
            self._rows.clear()
        above = unravel(nth, self._dims[:-1])
        row = _Row(self._number(self.depth - 1, nth, 0), above, self.chunks.format.row(above))
        self._rows[directory] = row
        return row

    def _in_row(self, row: _Row, value: int) -> Attributes:
        first, above, place = row
        coords = (*above, value)
        return self._attributes_of(first + value, coords, self.chunks.at(place(value), coords))

    def lookup_top(self, name: bytes) -> Attributes | None:
        """Look up a name in the dataset's directory, for collections without a top directory."""
        value = self._names.parse(0, name)
        return None if value is None else self._child(0, 0, value)

    def find(self, names: Sequence[bytes]) -> Attributes | None:
        """Return a directory or chunk by its path below the dataset's directory; None if the path names neither.

        Raise FileNotFoundError for a chunk that does not exist, and NotADirectoryError if a parent is a chunk.
        """
        parent = self.root
        if parent is not None:
            if not names or names[0] != self._names.prefix:
                return None
            names = names[1:]
        found = None if parent is None else self.attributes(parent)
        for name in names:
            found = self.lookup_top(name) if parent is None else self.lookup(parent, name)
            if found is None:
                return None
            parent = found.number
        return found

    def unnumbered(self, name: bytes) -> Coords | None:
        """Return the coordinates of a chunk whose id is too large for a computed inode number; None for other names."""
        return self._names.cell(name) if isinstance(self._names, IdNames) else None

    def classify_name(self, parent: int | None, name: bytes) -> NameMeaning | None:
        """Return the kind of a name in a directory (None: the dataset's); None if the collection has no such name."""
        place = TreePosition(0, 0) if parent is None else self.place(parent)
        value = self._names.parse(place.level, name) if place.level < self.depth else None
        if value is None:
            coords = self.unnumbered(name) if parent is None else None
            if coords is not None:
                return NameMeaning(NameKind.CHUNK, Target(self, coords))
            return self._compressed(parent, name)
        if place.level + 1 < self.depth:
            return NameMeaning(NameKind.DIRECTORY)
        coords = self._names.coords((*unravel(place.nth, self._dims[:-1]), value))
        return NameMeaning(NameKind.CHUNK, Target(self, coords))

    def _compressed(self, parent: int | None, name: bytes) -> NameMeaning | None:
        """Return the kind of a name with a compression extension.

        Only clients of precomputed volumes write such files.
        """
        text = os.fsdecode(name)
        suffix = next((s for s in COMPRESSIONS if text.endswith(s)), "")
        if not suffix or self.collection.format != "precomputed":
            return None
        whole = self.classify_name(parent, os.fsencode(text.removesuffix(suffix)))
        if whole is None or whole.target is None:
            return whole
        return NameMeaning(NameKind.CHUNK, whole.target._replace(suffix=suffix))

    def other_names(self, name: bytes) -> list[bytes]:
        """Return the other file names of a chunk: first the name without compression, then each compressed name."""
        if self.collection.format != "precomputed":
            return []
        text = os.fsdecode(name)
        plain = text.removesuffix(next((s for s in COMPRESSIONS if text.endswith(s)), ""))
        return [os.fsencode(plain + s) for s in ("", *COMPRESSIONS) if plain + s != text]

    def renew(self, coords: Sequence[Coords], *, moved: bool = False) -> None:
        """Invalidate all caches of the shards of these chunks, after the shards were rewritten.

        `moved`: other chunks of these shards may have moved, too. Then all cached pages of remote shards are dropped;
        pages of local shards carry a version, which shows that they are stale.
        """
        self._renew(coords, moved=moved)
        for tree in self.formers():
            grid = tree.chunks.format.grid
            tree._renew([c for c in coords if all(i < n for i, n in zip(c, grid, strict=False))], moved=moved)

    def formers(self) -> Iterator[ChunkDirs]:
        """Yield the trees of earlier shapes of the array, latest first."""
        tree, left = self.former, MAX_FORMER
        while tree is not None and left:
            yield tree
            tree, left = tree.former, left - 1

    def _renew(self, coords: Sequence[Coords], *, moved: bool) -> None:
        place = self.chunks.format.place
        for c in {place(c)[:2]: c for c in coords}.values():
            self.chunks.forget(c)
        chunks: ChunkStore | None = self.chunks
        while chunks is not None:
            chunks.forget_existing()
            if moved and not chunks.is_local:
                chunks.forget_all()
            chunks = chunks.outer
        if not self._raw or not self.chunks.is_local:  # after the pages, from which these bytes are computed
            for c in coords:
                number = self.cached_as(c)
                self._cache.drop((number, "shown"))
                for window in range(MAX_STORED // WINDOW):
                    self._cache.drop((number, window))

    @property
    def outermost(self) -> ChunkStore:
        """The outermost layer, whose shards are objects of the store."""
        chunks = self.chunks
        while chunks.outer is not None:
            chunks = chunks.outer
        return chunks

    def outermost_shard(self, coords: Coords) -> int:
        """Return the number of the outermost shard for a chunk of the grid."""
        chunks = self.chunks
        shard = chunks.format.place(coords)[0]
        while chunks.outer is not None:
            chunks = chunks.outer
            shard = chunks.format.place(unravel(shard, chunks.format.grid))[0]
        return shard

    def outermost_key(self, shard: int) -> str:
        """Return the path in the store of an outermost shard."""
        return self.outermost.source.key(shard)

    def is_pair(self, coords: Coords) -> bool:
        """Return whether a chunk's outermost shard is stored as two files instead of one."""
        if self.collection.layers[0].pair is None:
            return False
        number = self.outermost_shard(coords)

        def load() -> tuple[bool, int, float]:
            return self.outermost.source.is_pair(number), 1, self._ttl

        return self._cache.get((self.first, "pair", number), load)

    def shard_version(self, shard: int) -> Version:
        """Return the cached version of an outermost shard; None if the shard does not exist."""
        try:
            return self.outermost.source.stored(shard).stat().version
        except (FileNotFoundError, NotADirectoryError):
            return None

    def base(self, coords: Coords, *, summed: bool = False) -> tuple[int, ...] | None:
        """Return start and size of a chunk in its outermost shard, like `rewriting.entries`; None if absent.

        `summed`: also return the CRC-32C of the stored bytes, unless codecs surround the shard.
        """
        if self.collection.lead is not None:
            coords = (*coords[:-1], 0)
        found = self.chunks.stored(coords)
        if found is None:
            return None
        extent = (max(found.blob.base, 0) + found.start, found.size)
        if not summed or any(layer.codecs for layer in self.collection.layers):
            return extent
        return (*extent, crc32c_of(found.blob, found.start, found.size))

    @property
    def directories(self) -> int:
        """The number of directories of the collection. Directories have the first inode numbers."""
        return self._bases[-1]

    def is_empty(self) -> bool:
        """Return whether the collection has no shard."""
        return not self.outermost.source.exists()

    def move(self, old: str, new: str) -> None:
        """Update the paths after the directory, or one of its parents, was renamed."""
        self.path, self._stored = new + self.path[len(old) :], new + self._stored[len(old) :]
        chunks: ChunkStore | None = self.chunks
        while chunks is not None:
            chunks.path = self.path
            chunks.source.move(old, new)
            # a lookup under the new name may have cached the absence of the shards before the rename
            chunks.forget_all()
            chunks = chunks.outer
        if self.former is not None:
            self.former.move(old, new)

    def is_like(self, collection: Collection) -> bool:
        """Return whether newly read metadata describes the same chunks in the same places."""
        mine = self.collection
        same = mine.facts == collection.facts and mine.codecs == collection.codecs and mine.format == collection.format
        return same and mine.names.dims == collection.names.dims and mine.names.prefix == collection.names.prefix

    def is_former(self, collection: Collection) -> bool:
        """Return whether newly read metadata describes the same array with another shape."""
        mine = self.collection
        same = replace(mine.facts, shape=collection.facts.shape) == collection.facts
        alike = mine.codecs == collection.codecs and mine.format == collection.format
        return same and alike and mine.names.prefix == collection.names.prefix

    def cached_as(self, coords: Coords) -> int:
        """Return the cache key for the bytes of a chunk."""
        if isinstance(self._names, IdNames) and coords[0] >= SMALL_IDS:
            return int(numbers_of_ids(self.path, np.array([coords], np.uint64))[0])
        values = self._names.values(np.array([coords], np.uint64))[0].tolist()
        return self.first + self._bases[-1] + ravel(values, self._dims)

    def number(self, parent: int | None, name: bytes) -> int | None:
        """Return the inode number of a child of a directory (None: the dataset's); None if no child can have this name.

        The child need not exist.
        """
        level, nth = TreePosition(0, 0) if parent is None else self.place(parent)
        value = self._names.parse(level, name) if level < self.depth else None
        return None if value is None else self._number(level, nth, value)

    def _number(self, level: int, nth: int, value: int) -> int:
        return self.first + self._bases[level + 1] + nth * self._dims[level] + value

    def _child(self, level: int, nth: int, value: int) -> Attributes:
        number = self._number(level, nth, value)
        if level + 1 < self.depth:
            return Attributes(number, True, 0, self.mtime_ns)
        return self.chunk_attributes(number, self._names.coords((*unravel(nth, self._dims[:-1]), value)))

    def coords(self, number: int) -> Coords:
        """Return the grid coordinates of a chunk."""
        return self._coords(number - self.first - self._bases[-1])

    def _coords(self, nth: int) -> Coords:
        return self._names.coords(unravel(nth, self._dims))

    def reserved(self, level: int, name: str) -> bool:
        """Return whether a stored name in a directory of chunks is a shard or looks like a chunk name."""
        if self._names.reserved(level, os.fsencode(name)):
            return True
        layer = self.collection.layers[0]
        return not self._names.prefix and layer.format.shard_of(layer.single_name(name)) is not None

    def reserved_at_top(self, name: str) -> bool:
        """Return whether a stored name in the dataset's directory is the top directory, a shard or a possible chunk."""
        prefix = self._names.prefix
        return os.fsencode(name) == prefix if prefix else self.reserved(0, name)

    def is_shard(self, name: str) -> bool:
        """Return whether a file in the dataset's directory is a shard and cannot be a chunk."""
        return self.reserved_at_top(name) and not self._names.reserved(0, os.fsencode(name))

    def directory_path(self, place: TreePosition) -> str:
        """Return the path in the store that corresponds to a virtual directory."""
        return self._directory_in(self._stored, place)

    def shown_directory(self, place: TreePosition) -> str:
        """Return the shown path of a directory of chunks."""
        return self._directory_in(self.path, place)

    def _directory_in(self, top: str, place: TreePosition) -> str:
        return self._path(top, np.array(unravel(place.nth, self._dims[: place.level]), np.uint64))

    def chunk_path(self, coords: Coords) -> str:
        """Return the shown path of a chunk."""
        cell = np.array([coords], np.uint64).reshape(1, -1)
        if isinstance(self._names, IdNames):  # ids above `SMALL_IDS` have no values
            return "/".join(filter(None, [self.path, self._names.names(cell)[0].decode()]))
        return self._path(self.path, self._names.values(cell)[0])

    def _path(self, top: str, values: U64) -> str:
        """Return the path whose components have these values. There may be fewer values than levels."""
        parts = [self._names.render(level, values[level : level + 1])[0] for level in range(len(values))]
        prefix = [self._names.prefix] if self._names.prefix else []
        return "/".join(filter(None, [top, b"/".join([*prefix, *parts]).decode()]))

    # ---- attributes and bytes ----

    def attributes(self, number: int) -> Attributes:
        """Return the attributes of a directory or a chunk. Raise FileNotFoundError for a chunk that does not exist."""
        position = number - self.first - self._bases[-1]
        if position < 0:
            return Attributes(number, True, 0, self.mtime_ns)
        if not self._has_rows:
            return self.chunk_attributes(number, self._coords(position))
        nth, value = divmod(position, self._dims[-1])
        parent = self.first + self._bases[-2] + nth
        return self._in_row(self._rows.get(parent) or self._make_row(parent, nth), value)

    def chunk_attributes(self, number: int, coords: Coords) -> Attributes:
        """Return the attributes of the chunk at these coordinates with this inode number."""
        return self._attributes_of(number, coords, self.chunks.locate(coords))

    def _attributes_of(self, number: int, coords: Coords, found: StoredChunk | None) -> Attributes:
        if found is None:
            if self._filler is None:
                raise self._missing(coords)
            size = self._fill_sizes(np.array([coords], np.uint64)).item()
            return Attributes(number, False, len(self._filler.show(coords)) if size < 0 else size, self.mtime_ns)
        blob, start, size, _ = found
        if blob.fd < 0:
            mtime_ns = self.chunks.stat(self.chunks.shard_of(coords)).mtime_ns
            return Attributes(number, False, size if self._raw else self._shown_size(number, coords, size), mtime_ns)
        mtime_ns = blob.stat().mtime_ns
        if self._raw:
            # Twice as fast as the constructor. Every opened chunk passes here.
            return _new(Attributes, (number, False, size, mtime_ns, _new(Extent, (blob, start)), 0))
        return Attributes(number, False, self._shown_size(number, coords, size), mtime_ns)

    def _found(self, coords: Coords) -> StoredChunk:
        found = self.chunks.locate(coords)
        if found is None:
            raise self._missing(coords)
        return found

    def _missing(self, coords: Coords) -> FileNotFoundError:
        return FileNotFoundError(f"{self.path or '/'}: no chunk {coords}")

    def _shown_size(self, number: int, coords: Coords, stored: int) -> int:
        known = self._shown_sizes(np.array([coords], np.uint64), np.array([stored], np.int64)).item()
        return len(self._transformed(number, coords)) if known < 0 else known

    def read(self, number: int, offset: int, size: int) -> bytes | memoryview:
        if number - self.first < self._bases[-1]:
            path = self.shown_directory(self.place(number))
            raise IsADirectoryError(errno.EISDIR, "is a directory of chunks", path)
        return self.read_chunk(number, self.coords(number), offset, size)

    def read_chunk(self, number: int, coords: Coords, offset: int, size: int) -> bytes | memoryview:
        """Return bytes of the chunk at these coordinates with this inode number; fewer than `size` only at its end."""
        if self._filler is not None and self.chunks.locate(coords) is None:
            return memoryview(self._filler.show(coords))[offset : offset + size]
        if not self._raw:
            shown = memoryview(self._transformed(number, coords))
            if offset + size >= len(shown):
                self._cache.mark_read((number, "shown"))
            return shown[offset : offset + size]
        if self.chunks.is_local:
            return self._part(coords, ByteRange(offset, offset + size))
        size = min(size, max(self._found(coords).size - offset, 0))
        return windowed(self._cache, number, self._ttl, partial(self._part, coords), offset, size)

    def _part(self, coords: Coords, part: ByteRange) -> bytes:
        data = self.chunks.read(coords, part)
        if data is None:
            raise self._missing(coords)
        return data

    def _transformed(self, number: int, coords: Coords) -> bytes | memoryview:
        """Return the shown bytes of a chunk whose stored bytes differ from them."""
        key = number, "shown"
        return self._cache.peek(key) or self._cache.get(key, partial(self._transform, coords))

    def _transform(self, coords: Coords) -> tuple[bytes | memoryview, int, float]:
        transform = self.collection.transform

        def show(stored: bytes) -> bytes | memoryview:
            if len(stored) >= LONG_WORK:
                self._cache.waiting()
            return stored if transform is None else transform.show(coords, stored)

        data = self.chunks.decoded(coords, show, most=MAX_STORED)
        if data is None:
            raise self._missing(coords)
        return data, len(data), self._ttl

    @property
    def can_read_many(self) -> bool:
        """Whether to read several chunks together: they are shown unchanged and their shards are not local files."""
        return self._raw and not self.chunks.is_local

    def read_many(self, requests: Sequence[tuple[int, int, int]]) -> list[bytes | Exception]:
        """Read several chunks, given as (number, offset, size). Chunks of the same shard are fetched together."""
        coords = [self.coords(number) for number, _, _ in requests]
        parts = [ByteRange(offset, offset + size) for _, offset, size in requests]
        found = self.chunks.read_many(coords, parts)
        if self._filler is not None:
            for i, data in enumerate(found):
                if isinstance(data, FileNotFoundError):
                    found[i] = self._filler.show(coords[i])[parts[i].start : parts[i].stop]
        return found

    def stored(self, coords: Coords) -> StoredChunk:
        """Return the location of a chunk's stored bytes. Raise FileNotFoundError if the chunk is absent."""
        found = self.chunks.stored(coords)
        if found is None:
            raise self._missing(coords)
        return found

    def transform_of(self, coords: Coords) -> Transform | None:
        """Return the transform between the stored and the shown bytes of a chunk; None if they are equal."""
        lead = self.collection.lead
        return self.collection.transform if lead is None else lead.transform if coords[-1] == 0 else None

    # ---- listing ----

    def small_listing(self, directory: int, most: int) -> list[EntryRow] | None:
        """Return all entries of a directory with at most `most` places; None for any other directory."""
        level, nth = self.place(directory)
        if not self._has_rows or self._filler is not None:
            return None
        if self.depth == 1 or level >= self.depth or self._dims[level] > most:
            return None
        dim, mtime_ns = self._dims[level], self.mtime_ns
        if level + 1 < self.depth:
            first = self._number(level, nth, 0)
            return [(b"%d" % i, first + i, True, 0, mtime_ns, i + 1) for i in range(dim)]
        first, above, place = self._rows.get(directory) or self._make_row(directory, nth)
        found = self.chunks.row(place, dim)
        if not self._raw and found:
            coords = np.array([(*above, i) for i, _, _ in found], np.uint64)
            sizes = self._shown_sizes(coords, np.array([size for _, size, _ in found], np.int64)).tolist()
            found = [(i, size, mtime) for (i, _, mtime), size in zip(found, sizes, strict=True)]
        return [(b"%d" % i, first + i, False, size, mtime, i + 1) for i, size, mtime in found]

    def scan(self, place: TreePosition, cookie: int) -> Iterator[Batch]:
        """Yield the entries of a directory of this collection that follow `cookie`."""
        if place.level + 1 < self.depth:
            return self._scan_directories(place, cookie)
        if self._filler is not None:
            return self._scan_chunks(place, cookie)
        if self.depth == 1:
            return self._scan_flat(cookie)
        return self._scan_chunks(place, cookie) if self._dims[-1] <= LONG_ROW else self._scan_long_row(place, cookie)

    def _numbers(self, place: TreePosition, values: U64) -> U64:
        begin = self.first + self._bases[place.level + 1] + place.nth * self._dims[place.level]
        return values + np.uint64(begin)

    def _scan_directories(self, place: TreePosition, cookie: int) -> Iterator[Batch]:
        """Yield subdirectories without looking for chunks; some may be empty."""
        for start in range(cookie, self._dims[place.level], BATCH):
            values = np.arange(start, min(start + BATCH, self._dims[place.level]), dtype=np.uint64)
            n = len(values)
            yield Batch(
                self._names.render(place.level, values),
                self._numbers(place, values),
                np.ones(n, np.bool_),
                np.zeros(n, np.int64),
                np.full(n, self.mtime_ns, np.int64),
                values + np.uint64(1),
            )

    def _scan_chunks(self, place: TreePosition, cookie: int) -> Iterator[Batch]:
        """Yield the chunks of one directory; each is looked up."""
        row = np.array(unravel(place.nth, self._dims[:-1]), np.uint64)
        for start in range(cookie, self._dims[-1], BATCH):
            last = np.arange(start, min(start + BATCH, self._dims[-1]), dtype=np.uint64)
            values = np.empty((len(last), self.depth), np.uint64)
            values[:, :-1], values[:, -1] = row, last
            coords = self._names.coords_many(values)
            exists, sizes, mtimes = self.chunks.present(coords)
            shown = self._shown_sizes(coords, sizes)
            if self._filler is not None:
                shown[~exists], mtimes[~exists] = self._fill_sizes(coords[~exists]), self.mtime_ns
                exists = np.ones(len(last), np.bool_)
            last = last[exists]
            if len(last):
                yield Batch(
                    self._names.render(place.level, last),
                    self._numbers(place, last),
                    np.zeros(len(last), np.bool_),
                    shown[exists],
                    mtimes[exists],
                    last + np.uint64(1),
                )

    def _scan_long_row(self, place: TreePosition, cookie: int) -> Iterator[Batch]:
        """Yield the chunks of one directory from the shard indices: in such a long row, few chunks exist."""
        row = np.array(unravel(place.nth, self._dims[:-1]), np.uint64)
        for batch in self.chunks.scan(cookie):
            values = self._names.values(batch.coords)
            here = (values[:, :-1] == row).all(axis=1)
            if here.any():
                yield self._batch(place, batch, values[:, -1], here)

    def _scan_flat(self, cookie: int) -> Iterator[Batch]:
        """Yield all chunks of a collection that has one directory, shard by shard."""
        listed = 0
        for batch in self.chunks.scan(cookie):
            here = np.ones(len(batch.sizes), np.bool_)
            listed += len(here)
            if isinstance(self._names, IdNames) and (batch.coords[:, 0] >= SMALL_IDS).any():
                yield self._batch_of_ids(self._names, batch)
            else:
                found = self._batch(TreePosition(0, 0), batch, self._names.values(batch.coords)[:, 0], here)
                yield found._replace(by_name=True) if self.by_id and listed > IDS_WITH_INODES else found

    def _batch_of_ids(self, names: IdNames, batch: ChunkBatch) -> Batch:
        """Return a batch in which chunks without a computed inode number are listed by name only."""
        small = batch.coords[:, 0] < SMALL_IDS
        by_arithmetic = self._numbers(TreePosition(0, 0), names.values(batch.coords)[:, 0])
        n = len(small)
        return Batch(
            names.names(batch.coords),
            np.where(small, by_arithmetic, numbers_of_ids(self.path, batch.coords)),
            np.zeros(n, np.bool_),
            np.where(small, self._shown_sizes(batch.coords, batch.sizes), -1),
            np.full(n, batch.mtime_ns, np.int64),
            batch.cookies,
        )

    def _batch(self, place: TreePosition, batch: ChunkBatch, values: U64, here: Bool) -> Batch:
        """Return the chunks selected by `here`; `values` are the last components of their names."""
        values = values[here]
        n = len(values)
        return Batch(
            self._names.render(place.level, values),
            self._numbers(place, values),
            np.zeros(n, np.bool_),
            self._shown_sizes(batch.coords[here], batch.sizes[here]),
            np.full(n, batch.mtime_ns, np.int64),
            batch.cookies[here],
        )

    def _shown_sizes(self, coords: U64, stored: Sizes) -> Sizes:
        """Return shown sizes; -1 where the chunk is damaged or must be decoded to learn its size."""
        if self.collection.transform is None:
            return stored
        return np.where(stored < 0, -1, self.collection.transform.sizes(coords, stored))

    def _fill_sizes(self, coords: U64) -> Sizes:
        """Return the shown sizes of chunks that are not stored."""
        return np.zeros(len(coords), np.int64) if self._filler is None else self._filler.sizes(coords)


def windowed(
    cache: ByteLRU, key: Hashable, ttl_s: float, fetch: Callable[[ByteRange], bytes], offset: int, size: int
) -> bytes | memoryview:
    """Return bytes of a remote object, cached in windows of `WINDOW` bytes; `fetch` returns fewer bytes at the end."""
    pieces: list[bytes | memoryview] = []
    while size > 0:
        window = offset // WINDOW

        def load(window: int = window) -> tuple[bytes, int, float]:
            data = fetch(ByteRange(window * WINDOW, (window + 1) * WINDOW))
            return data, len(data), ttl_s

        piece = memoryview(cache.get((key, window), load))[offset % WINDOW : offset % WINDOW + size]
        if not len(piece):
            break
        pieces.append(piece)
        offset, size = offset + len(piece), size - len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _bases(dims: Coords, has_root: bool) -> list[int]:
    """Return the position at which each level begins, followed by the total number of nodes."""
    bases, position, n = [0], int(has_root), 1
    for d in dims:
        bases.append(position)
        n *= d
        position += n
    return [*bases, position]
