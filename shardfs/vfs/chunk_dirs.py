"""The virtual directories and files of one collection: names, lookups and kinds of names."""

from __future__ import annotations

import errno
import math
import os
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardfs.model.attributes import Attributes
from shardfs.model.grid import IdNames, NestedNames, unravel
from shardfs.model.kinds import NameKind, compression, is_scratch
from shardfs.vfs.chunk_listing import ChunkListing
from shardfs.vfs.clipped_blocks import note_clipped, note_edges
from shardfs.vfs.collection_shards import CollectionShards
from shardfs.vfs.inodes import ChunkNumbers, TreePosition

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardfs.model.collection import Collection, Transform
    from shardfs.model.file_tree import KernelHooks
    from shardfs.model.listing import EntryRow
    from shardfs.model.shard_format import Placement
    from shardfs.model.values import U64, AxisPosition, Coords, Sizes
    from shardfs.shards.chunk_store import ChunkStore
    from shardfs.storage.cache import ByteLRU

ROWS = 4096
"""Maximum number of directories whose `_Row` is kept."""


class _Row(NamedTuple):
    """The chunks of one directory, which differ only in the last component of their names.

    `first` is the inode number of the first chunk; `above` holds the coordinates that all chunks share.
    """

    first: int
    above: Coords
    place: Callable[[int], Placement]


class Target(NamedTuple):
    """A chunk of a sharded collection, stored or not, by its grid coordinates."""

    tree: ChunkDirs
    coords: Coords

    @property
    def transform(self) -> Transform | None:
        """The transform between the stored and the shown bytes of the chunk; None if they are equal."""
        return self.tree.collection.transform_of(self.coords)

    @property
    def is_verbatim(self) -> bool:
        """Whether the bytes of the file are stored unchanged. Otherwise the journal holds the stored bytes."""
        return self.tree.collection.transform_of(self.coords) is None


class NameMeaning(NamedTuple):
    """What a name in a directory means, whether the file exists or not; `target` is set for a chunk."""

    kind: NameKind
    target: Target | None = None


def not_a_chunk(name: str, looks_like_one: bool, other: NameKind) -> NameMeaning:
    """Return the kind of a name that is no chunk in a directory of chunks; `other` is that of ordinary files.

    A name that looks like a chunk's, such as one outside of the grid, is an orphan. A tool's temporary file is scratch.
    """
    if looks_like_one:
        return NameMeaning(NameKind.ORPHAN)
    return NameMeaning(NameKind.SCRATCH if is_scratch(name) else other)


class ChunkDirs:
    """Files and directories of a collection, by inode number. Nothing is stored for a chunk.

    Args:
        path: the directory in which the collection is shown.
        mtime_ns: modification time of its directories; a chunk has the modification time of its shard.
        stored_path: the path of the collection's directory in the store.

    Attributes:
        is_moved: the store has the shards in another directory than `path`.
        root: the inode number of the top directory (`c`); None if the names are in the dataset's directory.
        description: the stored documents that describe the collection, as they were when they were read last.
        is_former: another tree has replaced this one. Files that are open keep the bytes of this one; its directories
            stand for those of the other tree.
        is_frozen: another array is stored there now, and nothing of that may be read through this tree.
        shapes: the trees of this array in all shapes that it has had, the present one last. They share the list.
    """

    def __init__(
        self,
        path: str,
        collection: Collection,
        chunks: ChunkStore,
        cache: ByteLRU,
        numbers: ChunkNumbers,
        mtime_ns: int,
        ttl_s: float = math.inf,
        *,
        stored_path: str,
        is_moved: bool = False,
    ) -> None:
        self.path = path
        self.collection = collection
        self.chunks = chunks
        self.stored_path = stored_path
        self.is_moved = is_moved
        self.numbers = numbers
        self.first = numbers.first
        self.directories = numbers.directories
        self.depth = numbers.depth
        self._names = collection.names
        self._dims = collection.names.dims
        self.root = numbers.first if self._names.prefix else None
        self.mtime_ns = mtime_ns
        self.description = collection.description
        self.is_former = False
        self.is_frozen = False
        self.shapes = [self]
        self.shards = CollectionShards(path, collection, chunks, cache, numbers.first, ttl_s)
        self.listing = ChunkListing(numbers, chunks, mtime_ns)
        self._rows: dict[int | None, _Row] = {}
        has_parents = self.depth > 1 or bool(self._names.prefix)
        self._has_rows = type(self._names) is NestedNames and collection.lead is None and has_parents
        self.by_id = isinstance(self._names, IdNames)

    # ---- lookups ----

    def lookup(self, parent: int | None, name: bytes) -> Attributes | None:
        """Return the child of a directory (None: the dataset's); None if the collection has no such name.

        Raise FileNotFoundError for a chunk that does not exist, NotADirectoryError if `parent` is a chunk, and the
        errors of `ChunkStore.attributes`.
        """
        row = self._rows.get(parent)
        if row is not None:
            value = self._names.parse(self.depth - 1, name)
            return None if value is None else self._in_row(row, value)
        place = self.numbers.position(parent)
        level = place.level
        if level >= self.depth:
            raise NotADirectoryError(errno.ENOTDIR, "is a chunk", str(parent))
        value = self._names.parse(level, name)
        if value is None:
            return None
        number = self.numbers.number(place, value)
        if level + 1 < self.depth:
            return Attributes(number, True, 0, self.mtime_ns)
        if self._has_rows and parent is not None:
            return self._in_row(self._make_row(parent, place), value)
        return self.chunk_attributes(number, self.numbers.coords_in(place, value))

    def _make_row(self, directory: int, place: TreePosition) -> _Row:
        if len(self._rows) >= ROWS:
            self._rows.clear()
        above = unravel(place.nth, self._dims[:-1])
        row = _Row(self.numbers.number(place, 0), above, self.chunks.layer.format.row(above))
        self._rows[directory] = row
        return row

    def _in_row(self, row: _Row, value: int) -> Attributes:
        first, above, place = row
        coords = (*above, value)
        return self.chunks.attributes(first + value, coords, self.chunks.layer.index.at(place(value), coords))

    def find(self, names: Sequence[bytes]) -> Attributes | None:
        """Return a directory or chunk by its path below the dataset's directory; None if the path names neither.

        Raise the errors of `lookup`.
        """
        if self.root is not None:
            if not names or names[0] != self._names.prefix:
                return None
            names = names[1:]
        attributes = None if self.root is None else self.attributes(self.root)
        for name in names:
            attributes = self.lookup(None if attributes is None else attributes.number, name)
            if attributes is None:
                return None
        return attributes

    def number(self, parent: int | None, name: bytes) -> int | None:
        """Return the inode number of a child of a directory (None: the dataset's); None if no child can have this name.

        The child need not exist.
        """
        place = self.numbers.position(parent)
        value = self._names.parse(place.level, name) if place.level < self.depth else None
        return None if value is None else self.numbers.number(place, value)

    def unnumbered(self, name: bytes) -> Coords | None:
        """Return the coordinates of a chunk whose id is too large for a computed inode number; None for other names."""
        return self._names.cell(name) if isinstance(self._names, IdNames) else None

    def small_listing(self, directory: int, limit: int) -> list[EntryRow] | None:
        """Return the entries of a directory with at most `limit` places; None if the collection must be scanned for it.

        The entries are all subdirectories, also empty ones, or the stored chunks, ascending. The size of a damaged
        chunk is -1. Stored files that are no chunks are not among them.
        """
        place = self.numbers.position(directory)
        level = place.level
        if not self._has_rows or self.chunks.filler is not None:
            return None
        if self.depth == 1 or level >= self.depth or self._dims[level] > limit:
            return None
        dim, mtime_ns = self._dims[level], self.mtime_ns
        if level + 1 < self.depth:
            first = self.numbers.number(place, 0)
            return [(b"%d" % i, first + i, True, 0, mtime_ns, i + 1) for i in range(dim)]
        first, above, placement = self._rows.get(directory) or self._make_row(directory, place)
        row = self.chunks.layer.row(placement, dim)
        if self.collection.transform is not None and row:
            coords = np.array([(*above, i) for i, _, _ in row], np.uint64)
            sizes = self.chunks.sizes(coords, np.array([size for _, size, _ in row], np.int64)).tolist()
            row = [(i, size, mtime) for (i, _, mtime), size in zip(row, sizes, strict=True)]
        return [(b"%d" % i, first + i, False, size, mtime, i + 1) for i, size, mtime in row]

    # ---- attributes and bytes ----

    def attributes(self, number: int) -> Attributes:
        """Return the attributes of a directory or a chunk of this collection.

        Raise FileNotFoundError for a chunk that does not exist, and the errors of `ChunkStore.attributes`.
        """
        position = number - self.first - self.directories
        if position < 0:
            return Attributes(number, True, 0, self.mtime_ns)
        if not self._has_rows:
            return self.chunk_attributes(number, self.numbers.coords(number))
        nth, value = divmod(position, self._dims[-1])
        parent = self.first + self.numbers.bases[-2] + nth
        row = self._rows.get(parent) or self._make_row(parent, TreePosition(self.depth - 1, nth))
        return self._in_row(row, value)

    def chunk_attributes(self, number: int, coords: Coords) -> Attributes:
        """Return the attributes of the chunk at these coordinates with this inode number. Raise as `attributes`."""
        return self.chunks.attributes(number, coords, self.chunks.layer.locate(coords))

    def read(self, number: int, offset: int, size: int) -> bytes | memoryview:
        """Return `size` bytes of a chunk from `offset` on; fewer only at its end.

        Raise FileNotFoundError for a chunk that does not exist, IsADirectoryError for a directory, and the errors of
        `ChunkStore.read`.
        """
        if number - self.first < self.directories:
            path = self.directory_path(self.numbers.position(number), is_shown=True)
            raise IsADirectoryError(errno.EISDIR, "is a directory of chunks", path)
        return self.chunks.read(number, self.numbers.coords(number), offset, size)

    def read_chunk(self, coords: Coords, offset: int, size: int) -> bytes | memoryview:
        """Return `size` bytes, from `offset` on, of the chunk at these coordinates. Return and raise as `read`."""
        return self.chunks.read(self.numbers.of_chunk(self.path, coords), coords, offset, size)

    # ---- kinds of names ----

    def classify_name(self, directory: int, name: bytes) -> NameMeaning:
        """Return the kind of a name in a directory of chunks, given by its inode number. The name need not exist."""
        place, text = self.numbers.position(directory), os.fsdecode(name)
        other = NameKind.FIXED if self.is_moved else NameKind.PLAIN
        return self.classify_child(directory, name) or not_a_chunk(text, self.reserved(place.level, text), other)

    def classify_child(self, parent: int | None, name: bytes) -> NameMeaning | None:
        """Return the kind of a name in a directory (None: the dataset's); None if the collection has no such name."""
        place = self.numbers.position(parent)
        value = self._names.parse(place.level, name) if place.level < self.depth else None
        if value is None:
            coords = self.unnumbered(name) if parent is None else None
            if coords is not None:
                return NameMeaning(NameKind.CHUNK, Target(self, coords))
            return self._compressed(parent, os.fsdecode(name))
        if place.level + 1 < self.depth:
            return NameMeaning(NameKind.DIRECTORY)
        return NameMeaning(NameKind.CHUNK, Target(self, self.numbers.coords_in(place, value)))

    def _compressed(self, parent: int | None, name: str) -> NameMeaning | None:
        """Return the kind of a name with a compression suffix; None if this is no name of a chunk.

        Only clients of precomputed volumes write such files.
        """
        suffix = compression(name)
        if not suffix or not self.collection.compressible:
            return None
        whole = self.classify_child(parent, os.fsencode(name.removesuffix(suffix)))
        return NameMeaning(NameKind.COMPRESSED) if whole is not None and whole.target is not None else None

    def reserved(self, level: int, name: str) -> bool:
        """Return whether a stored name in a directory of chunks is a shard or looks like a chunk name.

        `level` is the number of components between the collection's top directory and the directory.
        """
        if self._names.reserved(level, os.fsencode(name)):
            return True
        layer = self.collection.layers[0]
        return not self._names.prefix and layer.format.shard_of(layer.single_name(name)) is not None

    def reserved_at_top(self, name: str) -> bool:
        """Return whether a stored name in the dataset's directory is the top directory, a shard or a possible chunk."""
        prefix = self._names.prefix
        return os.fsencode(name) == prefix if prefix else self.reserved(0, name)

    def is_shard(self, name: str) -> bool:
        """Return whether a name in the dataset's directory is a shard's or the top directory's, and no chunk's.

        The file need not exist.
        """
        return self.reserved_at_top(name) and not self._names.reserved(0, os.fsencode(name))

    # ---- paths ----

    def directory_path(self, place: TreePosition, *, is_shown: bool = False) -> str:
        """Return the path of a directory of chunks: the shown one, or the corresponding one in the store."""
        values = np.array(unravel(place.nth, self._dims[: place.level]), np.uint64)
        parts = [self._names.render(level, values[level : level + 1])[0] for level in range(len(values))]
        prefix = [self._names.prefix] if self._names.prefix else []
        top = self.path if is_shown else self.stored_path
        return "/".join(filter(None, [top, b"/".join([*prefix, *parts]).decode()]))

    def chunk_path(self, coords: Coords) -> str:
        """Return the shown path of a chunk."""
        return self.chunk_paths(np.array([coords], np.uint64).reshape(1, -1))[0]

    def chunk_paths(self, coords: U64) -> list[str]:
        """Return the shown paths of chunks (n, d), in this order."""
        if isinstance(self._names, IdNames):  # ids above `SMALL_IDS` have no values
            levels = [self._names.names(coords)]
        else:
            values = self._names.values(coords)
            levels = [self._names.render(level, values[:, level]) for level in range(values.shape[1])]
        prefix = self._names.prefix and self._names.prefix + b"/"
        top = f"{self.path}/" if self.path else ""
        return [top + (prefix + b"/".join(parts)).decode() for parts in zip(*(x.tolist() for x in levels), strict=True)]

    # ---- changes ----

    def renew(self, coords: Sequence[Coords], *, moved: bool = False) -> None:
        """Invalidate all caches of the shards of these chunks, after the shards were rewritten.

        `moved`: other chunks of these shards may have moved, too. Then all cached pages of remote shards are dropped;
        pages of local shards carry a version, which shows that they are stale.
        """
        for tree in tuple(self.shapes):
            inside = [c for c in coords if tree.contains(c)]
            tree.shards.invalidate(inside, moved=moved)
            for c in inside if tree.chunks.is_cached else ():
                tree.chunks.invalidate(tree.numbers.of_chunk(tree.path, c))

    def allow_missing(self, first: int) -> None:
        """Allow that the outermost shards from this number on are absent: see `ShardSource.allow_missing`."""
        for tree in tuple(self.shapes):
            tree.shards.outermost.source.allow_missing(first)

    def resized(self, hooks: KernelHooks, coords: U64, sizes: Sizes) -> None:
        """Invalidate cached bytes of chunks (n, d) that were resized, and what the kernel knows of these chunks.

        `sizes`: for each chunk the larger one of its sizes before and after.
        """
        numbers = self.numbers.of_chunks(self.path, coords)
        for number, size in zip(numbers.tolist(), sizes.tolist(), strict=True) if self.chunks.is_cached else ():
            self.chunks.invalidate(number, size)
        if self.is_former:
            hooks.former_resized(numbers)
        else:
            hooks.resized(numbers)

    def found_clipped(self, hooks: KernelHooks, positions: set[AxisPosition]) -> None:
        """Invalidate what the kernel knows of the chunks at these positions, because one of their blocks is clipped."""
        for coords in note_clipped(self.collection, positions):
            numbers = self.numbers.of_chunks(self.path, coords)
            hooks.resized(numbers)
            hooks.reshaped(numbers)

    def contains(self, coords: Coords) -> bool:
        """Return whether the grid has a chunk at these coordinates."""
        return all(i < n for i, n in zip(coords, self.chunks.layer.format.grid, strict=False))

    @property
    def former_shape(self) -> ChunkDirs | None:
        """The tree of the array in the shape that it had before; None if no other shape is known."""
        shapes = tuple(self.shapes)
        at = shapes.index(self) if self in shapes else 0
        return shapes[at - 1] if at else None

    def follow(self, former: ChunkDirs) -> None:
        """Show an array in place of the former tree, which has another shape or fill value of the same array."""
        self.shapes = former.shapes
        self.shapes.append(self)
        note_edges(former.collection, self.collection)

    def freeze(self) -> None:
        """Read no more indices, because another array is stored there now."""
        self.is_frozen = True
        for layer in self.shards.layers:
            layer.index.is_frozen = True
        self.chunks.invalidate_all()  # also what may be of the other array already

    def move(self, old: str, new: str) -> None:
        """Update the paths after the directory, or one of its parents, was renamed."""
        self.path = new + self.path[len(old) :]
        self.stored_path = new + self.stored_path[len(old) :]
        self.shards.move(self.path, old, new)
