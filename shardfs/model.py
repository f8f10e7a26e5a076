"""The plain values everything else is written in, and the protocols between floors. numpy only, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from shardfs.errors import CorruptShardError

Coords: TypeAlias = tuple[int, ...]
U64: TypeAlias = npt.NDArray[np.uint64]
Bool: TypeAlias = npt.NDArray[np.bool_]
Version: TypeAlias = Hashable


class ByteRange(NamedTuple):
    """Half-open, absolute in its object: `[start, stop)`."""

    start: int
    stop: int


class Suffix(NamedTuple):
    """The last `size` bytes of an object."""

    size: int


ByteRequest: TypeAlias = ByteRange | Suffix


class Stat(NamedTuple):
    """What a store says of one object. `version` changes whenever the bytes may have changed."""

    size: int
    mtime_ns: int
    version: Version


class Blob(Protocol):
    """One object of a store, or a part or a decoded form of one; as it was when it was opened.

    `fd` is a descriptor on which the bytes lie as they are, the first at position `base`; -1 if there is none.
    """

    fd: int
    base: int

    def stat(self) -> Stat:
        """Size, time and version; may cost one request, the first time."""

    def read(self, requests: Sequence[ByteRequest]) -> list[bytes]:
        """The bytes of each request, in order. Short where the object ends; neighbours are coalesced."""


class ShardSource(Protocol):
    """Where the shard objects of one collection come from."""

    @property
    def is_local(self) -> bool:
        """Whether they are files of this machine."""

    def open(self, shard: int) -> Blob:
        """Raise FileNotFoundError if the shard does not exist (then all its chunks are absent).

        On a remote store a missing shard may show only at the first `read`, as the same error.
        """

    def existing(self) -> tuple[U64, CorruptShardError | None]:
        """The numbers of the shards that exist, ascending; and the damage for which some may be missing."""

    def reopen(self, shard: int) -> None:
        """Forget what is remembered of the shard object, so that `open` sees what is there now."""

    def key(self, shard: int) -> str:
        """The shard's name in its store, for messages and for people."""


Placement: TypeAlias = tuple[int, int, int]
"""Where a chunk lies: which shard, which page of the shard's index, which slot of that page."""


class Placements(NamedTuple):
    """`Placement` of many chunks, as arrays."""

    shard: U64
    page: U64
    slot: U64


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """One page of a shard index: which slots are present, and where.

    Parallel arrays, sorted by slot. `slots` is None when slot i is entry i for all i: then an entry costs 8 or
    16 bytes of memory instead of 24. `broken` says why the entries at some positions cannot be true.
    """

    slots: U64 | None
    starts: npt.NDArray[np.unsignedinteger[Any]]
    sizes: npt.NDArray[np.unsignedinteger[Any]]
    broken: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def empty(cls) -> Self:
        none = np.empty(0, np.uint64)
        return cls(none, none, none)

    @property
    def nbytes(self) -> int:
        return self.starts.nbytes + self.sizes.nbytes + (0 if self.slots is None else self.slots.nbytes)

    def __len__(self) -> int:
        return len(self.starts)

    def all_slots(self) -> U64:
        return np.arange(len(self.starts), dtype=np.uint64) if self.slots is None else self.slots

    def position(self, slot: int) -> int:
        """The entry of `slot`, or -1 if it is absent."""
        if self.slots is None:
            return slot if slot < len(self.starts) else -1
        i = int(self.slots.searchsorted(np.uint64(slot)))
        return i if i < len(self.slots) and int(self.slots[i]) == slot else -1

    def positions(self, slots: U64) -> npt.NDArray[np.intp]:
        """`position` of many slots at once."""
        if self.slots is None:
            found = slots < len(self.starts)
            return np.where(found, slots, 0).astype(np.intp) - np.where(found, 0, 1)
        if not len(self.slots):
            return np.full(len(slots), -1, np.intp)
        i = self.slots.searchsorted(slots)
        i[i == len(self.slots)] = 0
        return np.where(self.slots[i] == slots, i, -1)

    def extent_at(self, i: int) -> tuple[int, int]:
        """Start and size of entry `i`. Raise ValueError, with the reason, if the entry cannot be true."""
        if self.broken and i in self.broken:
            raise ValueError(self.broken[i])
        return self.starts.item(i), self.sizes.item(i)

    def find(self, slot: int) -> tuple[int, int] | None:
        """`extent_at` of the entry of `slot`; None if the chunk is absent."""
        if self.slots is not None or slot >= len(self.starts):
            slot = self.position(slot)
            if slot < 0:
                return None
        if self.broken:
            return self.extent_at(slot)
        return self.starts.item(slot), self.sizes.item(slot)

    def checked(self, object_size: int) -> ShardIndex:
        """The same index, with ranges that leave the object marked broken, and in as little memory as it can be."""
        starts, sizes = self.starts, self.sizes
        if len(starts) and not self.broken and int(starts.max()) + int(sizes.max()) <= object_size < 2**32:
            return ShardIndex(self.slots, starts.astype(np.uint32), sizes.astype(np.uint32))
        limit = np.uint64(object_size)
        outside = (starts > limit) | (sizes > limit - np.minimum(starts, limit))
        if not outside.any():
            if object_size < 2**32 and not self.broken:
                starts, sizes = starts.astype(np.uint32), sizes.astype(np.uint32)
            return ShardIndex(self.slots, starts, sizes, self.broken)
        broken = dict(self.broken)
        for i in np.flatnonzero(outside)[:MAX_BROKEN].tolist():
            where = f"[{int(starts[i])}, {int(starts[i]) + int(sizes[i])})"
            broken.setdefault(i, f"its range {where} leaves the object of {object_size} bytes")
        if np.count_nonzero(outside) > MAX_BROKEN:
            keep = ~outside
            keep[list(broken)] = True  # beyond the first few a broken entry is simply absent: no list of millions
            at = np.cumsum(keep) - 1
            broken = {int(at[i]): why for i, why in broken.items()}
            return ShardIndex(self.all_slots()[keep], starts[keep], sizes[keep], broken)
        return ShardIndex(self.slots, starts, sizes, broken)


MAX_BROKEN = 100_000


class ShardFormat(Protocol):
    """How chunks lie in the shards of one collection. Says what to read and what bytes mean; does no I/O.

    `grid` is the grid of chunks it places (for grids).

    Coordinates are chunk grid coordinates (or ids) as given by `Collection`; none of these check that they lie
    in the grid.
    """

    @property
    def grid(self) -> Coords: ...

    def place(self, coords: Coords) -> Placement: ...

    def place_many(self, coords: U64) -> Placements:
        """`place` for an (n, d) array."""

    def coords(self, shard: int, page: int, slots: U64) -> tuple[U64, Bool]:
        """The inverse, for listing: (n, d) coordinates, and which of them really belong to this page.

        An entry that readers cannot reach (outside the grid, or where its hash does not lead) is not valid.
        """

    page_bits: int
    """Page numbers fit in so many bits."""

    blocks: int
    """A shard's root index, which tells where its pages lie, is read in so many blocks; each covers some pages."""

    def block_of(self, page: int) -> int: ...

    def root_request(self, block: int) -> ByteRange | None:
        """The bytes of a block of the root; None if this format needs no root to find its pages."""

    def nonempty_pages(self, block: int, root: bytes | None) -> U64:
        """The pages covered by this block that may hold entries, ascending. Raise ValueError, with the reason."""

    def page_request(self, shard: int, page: int, root: bytes | None) -> ByteRequest | None:
        """The bytes of `page`; None if the page is empty. Raise ValueError, with the reason, if impossible."""

    def decode_page(self, shard: int, page: int, raw: bytes) -> ShardIndex:
        """Raise ValueError, with the reason, unless length and checksum hold. Ranges are not compared with the
        object's size yet (`ShardIndex.checked`)."""

    def candidates(self, shard: int) -> U64 | None:
        """All slots that the (only) page of a shard could hold; None if they cannot be counted."""

    def key(self, shard: int) -> str:
        """The shard object's key, relative to the collection."""

    def shard_of(self, key: str) -> int | None:
        """The inverse of `key`; None if no shard of this collection is called so."""


@dataclass(frozen=True, slots=True)
class ChunkEncoding:
    """What lies between a stored chunk and the bytes that are shown.

    Args:
        container: "gzip" if the stored chunk is a gzip member around the shown bytes, else "raw".
        codecs: what the shown bytes are made with, innermost first; for people, opaque to shardfs.
    """

    container: str = "raw"
    codecs: tuple[str, ...] = ()


class Pair(NamedTuple):
    """A shard in two files, named by suffix: its first `head_bytes` in one, the rest in the other."""

    head: str
    body: str
    head_bytes: int


@dataclass(frozen=True)
class Layer:
    """One level of sharding.

    Args:
        format: how chunks lie in a shard.
        codecs: bytes-to-bytes codecs around the whole shard: it is decoded before anything else is read from it.
        trailer: bytes behind the shard that belong to such codecs but leave it readable in place (a checksum).
        pair: given if a shard may lie in two files instead.
    """

    format: ShardFormat
    codecs: tuple[Any, ...] = ()
    trailer: int = 0
    pair: Pair | None = None

    def single_name(self, name: str, suffix: str) -> str:
        """The name of a shard's single file, for that of the file of a pair with this suffix; any other as it is."""
        if not name.endswith(suffix):
            return name
        return name.removesuffix(suffix) + "." + self.format.key(0).rsplit(".", 1)[-1]


@dataclass(frozen=True)
class Collection:
    """The chunks of one sharding rule: an array, a scale of a volume.

    Args:
        format: the name of the format that described it.
        path: where its chunks are shown, relative to the dataset's directory; shards lie there too.
        names: what the chunks are called there.
        layers: outermost first; more than one if shards lie in shards. The chunk coordinates of a layer are those of
            its own grid.
        shown_sizes: the sizes of shown chunks by arithmetic, where the encoding allows (`container` not "raw").
        facts: shape, data type and the like, for `info`.
    """

    format: str
    path: str
    names: ChunkNames
    layers: tuple[Layer, ...]
    encoding: ChunkEncoding
    facts: Facts
    shown_sizes: Callable[[U64], U64] | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What `info` tells of a collection. Shapes are in elements."""

    shape: Coords
    chunk_shape: Coords
    shard_shape: Coords | None
    data_type: str
    sharding: str


class Located(NamedTuple):
    """Where a shown chunk lies. `shard` is a path in the source; a shard in a shard has the slot in brackets."""

    collection: str
    coords: Coords
    shard: str
    offset: int
    size: int
    codecs: tuple[str, ...]


class Summary(NamedTuple):
    """What `info` tells of a collection."""

    path: str
    format: str
    shape: Coords
    chunk_shape: Coords
    shard_shape: Coords | None
    data_type: str
    codecs: tuple[str, ...]
    sharding: str
    grid_chunks: int
    shards: int
    chunks: int
    stored_bytes: int
    shard_bytes: int


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that shardfs does not expand, and why; told by `info` and in the log."""

    path: str
    why: str


@dataclass(frozen=True)
class Dataset:
    """What the documents of one directory describe.

    Args:
        format: the name of the format, as `info` prints it.
        collections: none if there is nothing sharded here.
        documents: the documents that are shown otherwise than stored.
        problems: what was left as it is stored, and why.
        closed: no other datasets lie below this directory (it is an array, full of chunks).
    """

    format: str
    collections: tuple[Collection, ...] = ()
    documents: Mapping[str, bytes] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    closed: bool = False


class ChunkNames(Protocol):
    """How the chunks of a grid are called: path components below the collection's directory.

    `prefix` is a directory all chunks lie in, or b"". Below it come `len(dims)` components; component k takes
    `dims[k]` values, and a chunk's coordinates follow from the values of all of them (`coords`).
    """

    @property
    def prefix(self) -> bytes: ...

    @property
    def dims(self) -> tuple[int, ...]: ...

    def parse(self, level: int, name: bytes) -> int | None:
        """The value of component `level` called `name`; None if no chunk is called so."""

    def render(self, level: int, values: U64) -> npt.NDArray[np.bytes_]:
        """The inverse of `parse`, for many values."""

    def reserved(self, level: int, name: bytes) -> bool:
        """Whether `name` could be a chunk's (or a shard's, where they are named alike) of a larger grid."""

    def coords(self, values: Coords) -> Coords:
        """Grid coordinates of the chunk whose components have these values."""

    def values(self, coords: U64) -> U64:
        """The inverse of `coords` for (n, d) coordinates: (n, len(dims))."""


class Batch(NamedTuple):
    """Consecutive entries of a directory, as parallel arrays of length n (at most 4,096 by convention).

    `sizes` is -1 where the size is not known without further I/O; such an entry is listed by name only.
    `cookies` are positions: `scan(cookie)` goes on behind that entry. They rise strictly and fit in 62 bits.
    """

    names: npt.NDArray[np.bytes_]
    numbers: U64
    directories: Bool
    sizes: npt.NDArray[np.int64]
    mtimes_ns: npt.NDArray[np.int64]
    cookies: U64
