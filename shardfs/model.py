"""The plain values everything else is written in, and the protocols between floors. numpy only, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from shardfs.disk import FilePart

if TYPE_CHECKING:
    from shardfs.arrays import Array, Codec, Multiscale
    from shardfs.errors import CorruptShardError

Coords: TypeAlias = tuple[int, ...]
U64: TypeAlias = npt.NDArray[np.uint64]
Bool: TypeAlias = npt.NDArray[np.bool_]
Sizes: TypeAlias = npt.NDArray[np.int64]
Version: TypeAlias = Hashable


class ByteRange(NamedTuple):
    """Half-open, absolute in its object: `[start, stop)`."""

    start: int
    stop: int


class Suffix(NamedTuple):
    """The last `size` bytes of an object."""

    size: int


ByteRequest: TypeAlias = ByteRange | Suffix


Bytes: TypeAlias = bytes | FilePart

Piece: TypeAlias = bytes | memoryview | ByteRange | FilePart
"""Of a new object; a `ByteRange` is those bytes of the object that it replaces."""

Plan: TypeAlias = list[Piece]
"""A new object: its pieces, one behind the other."""


Content: TypeAlias = Bytes | Plan
"""Of something to be written: bytes, or pieces of which some may be of the object that is replaced."""


class Put(NamedTuple):
    """A chunk to be written. `lead` is what shall lie right before it (`Lead`)."""

    data: Content
    lead: Content | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """What the bytes of a shard object are good for.

    Args:
        size: of the object.
        index: of its index, and of headers.
        live: which lead to chunks, bytes that several share counted once.
        dead: which lead nowhere; what a rewrite leaves behind.
    """

    size: int
    index: int
    live: int
    dead: int


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

    @property
    def layer(self) -> Layer: ...

    def open(self, shard: int) -> Blob:
        """Raise FileNotFoundError if the shard does not exist (then all its chunks are absent).

        On a remote store a missing shard may show only at the first `read`, as the same error.
        """

    def stored(self, shard: int) -> Blob:
        """The shard as it is stored, with the codecs of its layer around it. As `open`."""

    def unwrap(self, shard: int, stored: Blob) -> Blob:
        """What `open` gives, made of `stored`. Raise ValueError, with the reason, if it cannot be decoded."""

    def number(self, key: str) -> int | None:
        """The inverse of `key`; None if no shard is called so."""

    def existing(self) -> tuple[U64, CorruptShardError | None]:
        """The numbers of the shards that exist, ascending; and the damage for which some may be missing."""

    def exists(self) -> bool:
        """Whether there is any shard."""

    def survey(self) -> tuple[U64, Sequence[CorruptShardError]]:
        """The numbers of `existing`; and all that is called as a shard is, but is none."""

    def is_pair(self, shard: int) -> bool:
        """Whether the shard lies in two files, and in no single one."""

    def reopen(self, shard: int) -> None:
        """Forget what is remembered of the shard object, so that `open` sees what is there now."""

    def key(self, shard: int) -> str:
        """The shard's name in its store, for messages and for people."""

    def move(self, old: str, new: str) -> None:
        """The shards lie below directory `new` of the store now, which was called `old`."""


Placement: TypeAlias = tuple[int, int, int]
"""Where a chunk lies: which shard, which page of the shard's index, which slot of that page."""


class Placements(NamedTuple):
    """`Placement` of many chunks, as arrays."""

    shard: U64
    page: U64
    slot: U64


class Index(Protocol):
    """One page of a shard index, in whatever form costs least."""

    @property
    def nbytes(self) -> int: ...

    def find(self, slot: int) -> tuple[int, int] | None:
        """Start and size of the chunk in `slot`, which is one that the format places; None if it is absent.

        Raise ValueError, with the reason, if the entry cannot be true.
        """

    def checked(self, object_size: int) -> Index:
        """The same index, in which ranges that leave the object cannot be true."""

    def arrays(self) -> ShardIndex:
        """All of it, for listings."""


class Checksum(NamedTuple):
    """A sum that is stored beside what it is of; `digest` gives its `size` bytes."""

    name: str
    size: int
    digest: Callable[[bytes], bytes]

    def verify(self, data: bytes, told: bytes) -> None:
        """Raise ValueError, with the reason, if `told` is not the sum of `data`."""
        found = self.digest(data)
        if found != told:
            raise ValueError(f"its {self.name} is {found.hex()}, but says {told.hex()}")


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """One page of a shard index: which slots are present, and where.

    Parallel arrays, sorted by slot. `slots` is None when slot i is entry i for all i: then an entry costs 8 or
    16 bytes of memory instead of 24. `broken` says why the entries at some positions cannot be true. `checksum` is
    given if one lies right behind the range of each entry; only `ShardFormat.walk` gives one. `repeated` are slots with
    further entries, which nobody finds; `checked` does not keep it.
    """

    slots: U64 | None
    starts: npt.NDArray[np.unsignedinteger[Any]]
    sizes: npt.NDArray[np.unsignedinteger[Any]]
    broken: Mapping[int, str] = field(default_factory=dict)
    checksum: Checksum | None = None
    repeated: U64 | None = None

    @classmethod
    def empty(cls) -> Self:
        none = np.empty(0, np.uint64)
        return cls(none, none, none)

    @property
    def nbytes(self) -> int:
        return self.starts.nbytes + self.sizes.nbytes + (0 if self.slots is None else self.slots.nbytes)

    def __len__(self) -> int:
        return len(self.starts)

    def arrays(self) -> ShardIndex:
        return self

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

    def row(self, above: Coords) -> Callable[[int], Placement]:
        """`place` of the chunks that differ in the last coordinate only, given that one; `above` are the others."""

    def place_many(self, coords: U64) -> Placements:
        """`place` for an (n, d) array."""

    def coords(self, shard: int, page: int, slots: U64) -> tuple[U64, Bool]:
        """The inverse, for listing: (n, d) coordinates, and which of them really belong to this page.

        An entry that readers cannot reach (outside the grid, or where its hash does not lead) is not valid.
        """

    @property
    def walk(self) -> Callable[[Blob], ShardIndex] | None:
        """Reads the only page of a shard whose index cannot be had in the two steps below; None if it can.

        It uses few calls of `read`, of many ranges each, and raises ValueError with the reason.
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

    def decode_page(self, shard: int, page: int, raw: bytes) -> Index:
        """Raise ValueError, with the reason, unless length and checksum hold. Ranges are not compared with the
        object's size yet (`Index.checked`)."""

    def candidates(self, shard: int) -> U64 | None:
        """All slots that the (only) page of a shard could hold; None if they cannot be counted."""

    def key(self, shard: int) -> str:
        """The shard object's key, relative to the collection."""

    def shard_of(self, key: str) -> int | None:
        """The inverse of `key`; None if no shard of this collection is called so."""

    def capacity(self, shard: int) -> int | None:
        """How many chunks of the collection a shard can hold; None if that cannot be told."""

    @property
    def unwritable(self) -> str:
        """Why its shards cannot be rewritten; "" if they can."""

    in_place: int
    """So many bytes of a shard's beginning may be changed at a time where they lie, when what they lead to is there: an
    entry of an index that is true or not by itself. 0: none."""

    def rewrite(
        self,
        shard: int,
        old: Blob | None,
        puts: Mapping[tuple[int, int], Put],
        drops: Set[tuple[int, int]],
        *,
        pack: bool = False,
        forward: bool = False,
        leads: Leads | None = None,
    ) -> Plan | None:
        """The shard with chunks written and others gone, all by page and slot; None if no chunk is left.

        What was in the object stays where it was, with the index that led to it, so that who remembers that reads
        what it read before; new bytes come behind. Formats say where they cannot have it so. What no reader finds, and
        broken entries, are carried over as they are.

        Args:
            pack: leave out what no entry leads to, which moves everything; unless an entry is broken.
            forward: an index that is written has no differences below zero, though chunks must be copied for that. Only
                formats that store differences know it.
            leads: given if bytes before chunks belong to them.

        Raise ValueError, with the reason, for an object so damaged that chunks would be lost, or others seem found;
        UnsupportedError for what no such shard can be.
        """

    def repack(self, shard: int, old: Blob, *, leads: Leads | None = None) -> Plan | None:
        """The shard without what no entry leads to. Raise ValueError, with the reason, if an entry is broken."""

    def usage(self, shard: int, old: Blob, *, leads: Leads | None = None) -> Usage:
        """What cannot be found because of damage counts as dead. Raise ValueError if that is everything."""


Leads: TypeAlias = Callable[[U64, U64], U64]
"""How many bytes before each chunk belong to it (`Lead`), by starts and sizes in the shard.

Raise ValueError, with the reason, if one does not tell."""


class Transform(Protocol):
    """What turns a stored chunk into the bytes that are shown. Pure arithmetic and bytes; no I/O."""

    @property
    def name(self) -> str:
        """For people, as `locate` prints it."""

    def sizes(self, coords: U64, stored: Sizes) -> Sizes:
        """Shown sizes of chunks (n, d) with these stored sizes; -1 where only reading can tell."""

    def show(self, coords: Coords, stored: bytes) -> bytes | memoryview:
        """Raise ValueError, with the reason, for bytes that cannot be this chunk."""

    def require(self, coords: Coords, shown: bytes) -> None:
        """Raise as `store` would, without its work."""

    def store(self, coords: Coords, shown: bytes) -> bytes:
        """What `show` shows so. Raise ValueError, with the reason, for bytes that cannot be this chunk;
        UnsupportedError if chunks shown so cannot be written at all."""


class Filler(Protocol):
    """Makes the chunks that are not stored, where a reader would take a missing one for something else."""

    def sizes(self, coords: U64) -> Sizes:
        """Of chunks (n, d)."""

    def show(self, coords: Coords) -> bytes:
        """The bytes of one."""


class ChunkCheck(Protocol):
    """What the stored bytes of chunks must be, for `verify`. Pure arithmetic and bytes; no I/O."""

    @property
    def head(self) -> int | None:
        """How many first bytes of a chunk `quick` looks at; None means all of them, as a checksum needs."""

    @property
    def plain(self) -> bool:
        """Whether any bytes of the right number are a chunk, so that `deep` tells no more than `sizes`."""

    @property
    def unchecked(self) -> str:
        """The codec for which `deep` cannot look into chunks; "" if it can."""

    def sizes(self, coords: U64) -> Sizes | None:
        """The stored sizes of chunks (n, d); None if they depend on the content."""

    def quick(self, coords: Coords, size: int, head: npt.NDArray[np.uint8]) -> None:
        """Raise ValueError, with the reason, if a chunk of `size` bytes that begins with `head` is damaged."""

    def deep(self, coords: Coords, stored: bytes) -> None:
        """The same, having decoded all of it."""


class Lead(NamedTuple):
    """Each chunk is two files: itself, and the bytes that lie right before it in its shard, which no index names.

    Args:
        size: how many bytes those are, told by the chunk as it is shown. Raise ValueError, with the reason.
        transform: what is around the chunk itself, but not around the bytes before it.
    """

    size: Callable[[bytes], int]
    transform: Transform | None = None


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
    codecs: tuple[Codec, ...] = ()
    trailer: int = 0
    pair: Pair | None = None

    def single_name(self, name: str) -> str:
        """The name of a shard's single file, for that of a file of its pair; any other as it is."""
        for suffix in (self.pair.head, self.pair.body) if self.pair is not None else ():
            if name.endswith(suffix):
                return name.removesuffix(suffix) + "." + self.format.key(0).rsplit(".", 1)[-1]
        return name


@dataclass(frozen=True)
class Collection:
    """The chunks of one sharding rule: an array, a scale of a volume, all meshes of a segmentation.

    Args:
        format: the name of the format that described it.
        path: where its chunks are shown, relative to the dataset's directory.
        names: what the chunks are called there.
        layers: outermost first; more than one if shards lie in shards. The chunk coordinates of a layer are those of
            its own grid.
        codecs: what the shown bytes are made with, innermost first; for people, opaque to shardfs.
        facts: shape, data type and the like, for `info`.
        transform: given if chunks are shown otherwise than stored.
        shards: where its shards lie, relative to the dataset's directory, if not at `path`. If the only shard is
            called "", it is the file of this name.
        lead: given if two files are shown for each chunk. The last coordinate tells them apart: 0 is the chunk.
        array: what the chunks are chunks of, for layouts; None if it is no array, or shardfs knows too little of it.
        filler: given if chunks that are not stored are shown all the same.
        check: what stored chunks must be; None if that is not known.
    """

    format: str
    path: str
    names: ChunkNames
    layers: tuple[Layer, ...]
    codecs: tuple[str, ...]
    facts: Facts
    transform: Transform | None = None
    shards: str | None = None
    lead: Lead | None = None
    array: Array | None = None
    filler: Filler | None = None
    check: ChunkCheck | None = None

    @property
    def stored_at(self) -> str:
        """Where its shards lie, relative to the dataset's directory."""
        return self.path if self.shards is None else self.shards


@dataclass(frozen=True, slots=True)
class Facts:
    """What `info` tells of a collection. Shapes are in elements; () for what is no array."""

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
    grid_chunks: int | None
    shards: int
    chunks: int
    stored_bytes: int
    shard_bytes: int


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that shardfs does not expand, and why; told by `info` and in the log.

    It is shown as it is stored; or not at all, if `skipped`; or, if `damaged`, it is an error to open it.
    """

    path: str
    why: str
    skipped: bool = False
    damaged: bool = False

    @property
    def instead(self) -> str:
        """What is done about it, for people."""
        if self.damaged:
            return "cannot be opened"
        return "not shown" if self.skipped else "shown as it is stored"


class Rewriter(Protocol):
    """Documents of a directory that are shown otherwise than stored, and whose names are not known in advance."""

    def applies(self, name: str) -> bool:
        """Whether a file of this name may be such a document."""

    def rewrite(self, path: str, name: str, raw: bytes) -> bytes | None:
        """What is shown instead; None if the file is shown as it is stored. Raise CorruptShardError."""


class Scope(Protocol):
    """Datasets in directories below, described by documents that lie elsewhere. Paths are relative to the scope."""

    @property
    def data(self) -> str:
        """The directory of the outermost dataset: other layouts show its content where the scope lies."""

    def listing(self, below: str) -> str:
        """The directory that tells which datasets lie right below a directory, some of which may have no data yet."""

    def member(self, name: str, is_directory: bool) -> str | None:
        """What the dataset is called of which something in `listing` tells that it is there."""

    def documents(self, below: str) -> Sequence[str]:
        """The documents that may describe directory `below`."""

    def open(self, path: str, below: str, documents: Mapping[str, bytes]) -> Dataset | None:
        """What those that exist say of it; as `Format.open`. `path` is for messages."""


class Levels(Protocol):
    """An image of which the levels lie below, told by their own attributes. Only layouts look for it."""

    def paths(self) -> Iterable[str]:
        """Where they may lie, relative to the group; those behind the first that is not there are not looked for."""

    def image(self, found: Mapping[str, Array]) -> Multiscale | None:
        """The image that these levels are, which were found in this order; None if they are none."""


class Consolidation(NamedTuple):
    """A document that is made of all documents shown below its directory, when somebody asks for it.

    Args:
        build: takes the documents by path relative to the directory, this directory's own among them.
    """

    name: str
    build: Callable[[Mapping[str, bytes]], bytes]


@dataclass(frozen=True)
class Dataset:
    """What the documents of one directory describe.

    Args:
        format: the name of the format, as `info` prints it.
        collections: none if there is nothing sharded here.
        documents: the documents that are shown otherwise than stored, by path below the directory. Directories on
            the way to one need not exist in the store, and what those say themselves gives way.
        problems: what was left as it is stored, and why.
        closed: no other datasets lie below this directory (it is an array, full of chunks).
        unwalked: subdirectories in which no datasets lie (they are full of chunks, too).
        named: directories below that the documents name. Stores that list nothing are believed to have them.
        hidden: names in this directory that are not shown.
        form: names in this directory that make it a dataset of its format (documents, directories of chunks), which
            other layouts do not show. What shards are called need not be among them.
        rewriter: given if there are further documents to show otherwise.
        scope: given if there are datasets below that these documents lead to.
        unsharded: arrays that the native layout shows as they are stored; other layouts need them described, too.
        attributes: the user's, of a group; None if this is no group.
        multiscales: images whose levels are arrays below.
        levels: given if there may be another, which the arrays themselves tell of.
        beside: names of all that lies in the directory of an image, for views that make names of their own there.
        images: of arrays further down, by path: what one is a level of, which its own documents do not tell.
        level_of: what an array is a level of, as told by `images` of a dataset above; its only level, at "".
        indescribable: why its arrays have no description, if they have none.
        consolidation: given if one of its documents is made of those below.
        blank: nothing at all is shown of this directory.
    """

    format: str
    collections: tuple[Collection, ...] = ()
    documents: Mapping[str, bytes] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    closed: bool = False
    unwalked: frozenset[str] = frozenset()
    named: tuple[str, ...] = ()
    hidden: frozenset[str] = frozenset()
    form: frozenset[str] = frozenset()
    rewriter: Rewriter | None = None
    scope: Scope | None = None
    unsharded: tuple[Collection, ...] = ()
    attributes: Mapping[str, Any] | None = None
    multiscales: tuple[Multiscale, ...] = ()
    levels: Levels | None = None
    beside: frozenset[str] = frozenset()
    images: Mapping[str, Multiscale] = field(default_factory=dict)
    level_of: Multiscale | None = None
    indescribable: str = ""
    consolidation: Consolidation | None = None
    blank: bool = False


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

    def coords_many(self, values: U64) -> U64:
        """The same for (n, len(dims)) values: (n, d)."""

    def values(self, coords: U64) -> U64:
        """The inverse of `coords` for (n, d) coordinates: (n, len(dims))."""


Entry: TypeAlias = tuple[bytes, int, bool, int, int, int]
"""One entry of a directory, for directories so small that arrays of entries (`Batch`) would be most of the work: name,
number, whether it is a directory, size, mtime in ns, cookie."""


class Batch(NamedTuple):
    """Consecutive entries of a directory, as parallel arrays of length n (at most 4,096 by convention).

    `sizes` is -1 where the size is not known without further I/O; such an entry is listed by name only.
    `cookies` are positions: `scan(cookie)` goes on behind that entry. They rise strictly and fit in 62 bits.
    `links`: which are symbolic links, with `directories` not set; None if there are none.
    `by_name` if the kernel had better be told the names alone, as it would keep too many inodes otherwise.
    """

    names: npt.NDArray[np.bytes_]
    numbers: U64
    directories: Bool
    sizes: npt.NDArray[np.int64]
    mtimes_ns: npt.NDArray[np.int64]
    cookies: U64
    by_name: bool = False
    links: Bool | None = None

    def only(self, which: Bool | slice | npt.NDArray[np.intp]) -> Batch:
        """Some of the entries: those that a mask, a slice or an array of positions selects."""
        return self._replace(
            names=self.names[which],
            numbers=self.numbers[which],
            directories=self.directories[which],
            sizes=self.sizes[which],
            mtimes_ns=self.mtimes_ns[which],
            cookies=self.cookies[which],
            links=None if self.links is None else self.links[which],
        )
