"""Plain values and protocols that all parts of shardfs share. numpy only, no I/O."""

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
    """The bytes `[start, stop)` of an object."""

    start: int
    stop: int


class Suffix(NamedTuple):
    """The last `size` bytes of an object."""

    size: int


ByteRequest: TypeAlias = ByteRange | Suffix


Bytes: TypeAlias = bytes | FilePart

Piece: TypeAlias = bytes | memoryview | ByteRange | FilePart
"""A part of a new object. A `ByteRange` stands for these bytes of the object that is replaced."""

Plan: TypeAlias = list[Piece]
"""A new object as the concatenation of its pieces."""


Content: TypeAlias = Bytes | Plan
"""The content of a chunk or object to be written. A plan may refer to the object that is replaced."""


class Put(NamedTuple):
    """A chunk to be written. `lead` are the bytes to be stored right before the chunk (`Lead`)."""

    data: Content
    lead: Content | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """How many bytes of a shard object serve which purpose.

    Args:
        size: bytes of the whole object.
        index: bytes of the index and of headers.
        live: bytes of chunks; bytes that several chunks share count once.
        dead: bytes that the index does not refer to, such as overwritten chunks.
    """

    size: int
    index: int
    live: int
    dead: int


class Stat(NamedTuple):
    """An object's attributes in its store. `version` changes whenever the bytes may have changed."""

    size: int
    mtime_ns: int
    version: Version


class Blob(Protocol):
    """One object of a store, or a part or decoded form of one, in the version that was opened.

    `fd` is a file descriptor with the same bytes, the first one at position `base`; -1 if there is none.
    """

    fd: int
    base: int

    def stat(self) -> Stat:
        """Size, time and version. The first call may cost one request."""

    def read(self, requests: Sequence[ByteRequest]) -> list[bytes]:
        """The bytes of each request, in order; fewer where the object ends. Adjacent requests are coalesced."""


class ShardSource(Protocol):
    """Opens and lists the shard objects of one collection."""

    @property
    def is_local(self) -> bool:
        """Whether shards are files of this machine."""

    @property
    def layer(self) -> Layer: ...

    def open(self, shard: int) -> Blob:
        """Open the decoded shard. Raise FileNotFoundError if it does not exist: then all its chunks are absent.

        On a remote store the first `read` may raise the FileNotFoundError instead.
        """

    def stored(self, shard: int) -> Blob:
        """Open the stored shard, still encoded by the codecs of its layer. Raises the errors of `open`."""

    def unwrap(self, shard: int, stored: Blob) -> Blob:
        """Decode the result of `stored` to that of `open`. Raise ValueError, with the reason, if that fails."""

    def number(self, key: str) -> int | None:
        """The inverse of `key`; None if no shard has this name."""

    def existing(self) -> tuple[U64, CorruptShardError | None]:
        """The numbers of the existing shards, ascending; and an error if damage may hide other shards."""

    def exists(self) -> bool:
        """Whether there is at least one shard."""

    def survey(self) -> tuple[U64, Sequence[CorruptShardError]]:
        """The numbers of `existing`; and an error for each name of a shard that is not a shard."""

    def is_pair(self, shard: int) -> bool:
        """Whether the shard is stored as two files, and no single file exists."""

    def reopen(self, shard: int) -> None:
        """Drop cached state of the shard object, so that `open` finds its newest version."""

    def key(self, shard: int) -> str:
        """The shard's name in its store, for messages."""

    def move(self, old: str, new: str) -> None:
        """Continue below directory `new` of the store, to which directory `old` was renamed."""


Placement: TypeAlias = tuple[int, int, int]
"""A chunk's place: the shard, the page of the shard's index, and the slot of that page."""


class Placements(NamedTuple):
    """The `Placement` of many chunks, as arrays."""

    shard: U64
    page: U64
    slot: U64


class Index(Protocol):
    """One page of a shard index, in the form that needs the least memory."""

    @property
    def nbytes(self) -> int: ...

    def find(self, slot: int) -> tuple[int, int] | None:
        """Start and size of the chunk in `slot`, a result of `ShardFormat.place`; None if the chunk is absent.

        Raise ValueError, with the reason, if the entry is invalid.
        """

    def checked(self, object_size: int) -> Index:
        """The same index, with entries marked invalid whose range leaves the object."""

    def arrays(self) -> ShardIndex:
        """All entries, for listings."""


class Checksum(NamedTuple):
    """A checksum that is stored beside its data; `digest` computes its `size` bytes."""

    name: str
    size: int
    digest: Callable[[bytes], bytes]

    def verify(self, data: bytes, stored: bytes) -> None:
        """Raise ValueError, with the reason, if `stored` is not the checksum of `data`."""
        computed = self.digest(data)
        if computed != stored:
            raise ValueError(f"its {self.name} is {computed.hex()}, but {stored.hex()} is stored")


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """One page of a shard index: the slots that are present, and the byte range of each.

    Args:
        slots: parallel to `starts` and `sizes`, ascending. None if slot i is entry i for all i: then an entry takes 8
            or 16 bytes of memory instead of 24.
        broken: the reasons why entries are invalid, by position.
        checksum: given if a checksum follows the range of each entry. Only `ShardFormat.walk` sets it.
        repeated: slots with further entries, which readers do not find. `checked` drops it.
    """

    slots: U64 | None
    starts: npt.NDArray[np.unsignedinteger[Any]]
    sizes: npt.NDArray[np.unsignedinteger[Any]]
    broken: Mapping[int, str] = field(default_factory=dict)
    checksum: Checksum | None = None
    repeated: U64 | None = None

    @classmethod
    def empty(cls) -> Self:
        array = np.empty(0, np.uint64)
        return cls(array, array, array)

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
        """The position of the entry of `slot`, or -1 if it is absent."""
        if self.slots is None:
            return slot if slot < len(self.starts) else -1
        i = int(self.slots.searchsorted(np.uint64(slot)))
        return i if i < len(self.slots) and int(self.slots[i]) == slot else -1

    def positions(self, slots: U64) -> npt.NDArray[np.intp]:
        """`position` of many slots at once."""
        if self.slots is None:
            present = slots < len(self.starts)
            return np.where(present, slots, 0).astype(np.intp) - np.where(present, 0, 1)
        if not len(self.slots):
            return np.full(len(slots), -1, np.intp)
        i = self.slots.searchsorted(slots)
        i[i == len(self.slots)] = 0
        return np.where(self.slots[i] == slots, i, -1)

    def extent_at(self, i: int) -> tuple[int, int]:
        """Start and size of entry `i`. Raise ValueError, with the reason, if the entry is invalid."""
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
        """The same index in 32-bit numbers if these suffice, with ranges that leave the object marked broken."""
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
            keep[list(broken)] = True  # further broken entries become absent, to limit the size of the dictionary
            at = np.cumsum(keep) - 1
            broken = {int(at[i]): why for i, why in broken.items()}
            return ShardIndex(self.all_slots()[keep], starts[keep], sizes[keep], broken)
        return ShardIndex(self.slots, starts, sizes, broken)


MAX_BROKEN = 100_000


class ShardFormat(Protocol):
    """The byte layout of one collection's shards: which bytes to read, and what they mean. Does no I/O.

    `grid` is the shape of the chunk grid, for formats that place grids. Coordinates are those of `Collection`: chunk
    grid coordinates or ids. No method checks that coordinates are inside the grid.
    """

    @property
    def grid(self) -> Coords: ...

    def place(self, coords: Coords) -> Placement: ...

    def row(self, above: Coords) -> Callable[[int], Placement]:
        """`place` as a function of the last coordinate, with the other coordinates fixed to `above`."""

    def place_many(self, coords: U64) -> Placements:
        """`place` for an (n, d) array of coordinates."""

    def coords(self, shard: int, page: int, slots: U64) -> tuple[U64, Bool]:
        """The inverse of `place_many`: (n, d) coordinates, and which of them are valid.

        An entry that readers cannot reach (outside the grid, or on a page to which its hash does not lead) is invalid.
        """

    @property
    def walk(self) -> Callable[[Blob], ShardIndex] | None:
        """Reads the index of a shard that has neither a root nor pages; None for formats with these.

        The function makes few calls of `read`, of many ranges each. It raises ValueError with the reason.
        """

    page_bits: int
    """Page numbers fit in this number of bits."""

    blocks: int
    """The number of blocks in which a shard's root index is read. Each block has the positions of some pages."""

    def block_of(self, page: int) -> int: ...

    def root_request(self, block: int) -> ByteRange | None:
        """The range of a block of the root; None if this format finds its pages without a root."""

    def nonempty_pages(self, block: int, root: bytes | None) -> U64:
        """The pages of this block that may have entries, ascending. Raise ValueError, with the reason, for damage."""

    def page_request(self, shard: int, page: int, root: bytes | None) -> ByteRequest | None:
        """The range of `page`; None if the page is empty. Raise ValueError, with the reason, if it is impossible."""

    def decode_page(self, shard: int, page: int, raw: bytes) -> Index:
        """Decode a page. Raise ValueError, with the reason, for a wrong length or checksum.

        `Index.checked` compares the ranges with the object's size later.
        """

    def candidates(self, shard: int) -> U64 | None:
        """All slots that the only page of a shard may have; None if they are not enumerable."""

    def key(self, shard: int) -> str:
        """The shard object's key, relative to the collection."""

    def shard_of(self, key: str) -> int | None:
        """The inverse of `key`; None if no shard of this collection has this key."""

    def capacity(self, shard: int) -> int | None:
        """The number of the collection's chunks that belong to a shard; None if unknown."""

    @property
    def unwritable(self) -> str:
        """Why shards of this format cannot be rewritten; "" if they can."""

    in_place: int
    """The size of an index entry at a shard's beginning that can be overwritten in place, once the data it refers to
    are stored: the entry is valid independently of the others. 0 if the format has no such entries."""

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
        """Plan the shard after some chunks are put and others dropped, by page and slot; None if no chunk remains.

        Existing bytes stay at their positions, also the old index, and new bytes are appended. So readers with a cached
        index still read the old chunks. Formats document exceptions. Unreachable bytes and broken entries are kept.

        Args:
            pack: omit bytes that no entry refers to, which moves chunks. Ignored if an entry is broken.
            forward: write no index with negative differences, even if chunks must be copied for that. Only formats that
                store differences use it.
            leads: given if bytes before chunks belong to them.

        Raise ValueError, with the reason, if the object is so damaged that chunks would be lost or wrong ones found;
        UnsupportedError if the format cannot express the result.
        """

    def repack(self, shard: int, old: Blob, *, leads: Leads | None = None) -> Plan | None:
        """Plan the shard without unreferenced bytes. Raise ValueError, with the reason, if an entry is broken."""

    def usage(self, shard: int, old: Blob, *, leads: Leads | None = None) -> Usage:
        """Measure a shard. Chunks that are lost by damage count as dead. Raise ValueError if all chunks are lost."""


Leads: TypeAlias = Callable[[U64, U64], U64]
"""Returns how many bytes before each chunk belong to it (`Lead`), from the chunks' starts and sizes in the shard.

Raises ValueError, with the reason, if a chunk does not contain that number."""


class Transform(Protocol):
    """Converts between the stored and the shown bytes of a chunk. Pure; no I/O."""

    @property
    def name(self) -> str:
        """The name that `locate` prints."""

    def sizes(self, coords: U64, stored: Sizes) -> Sizes:
        """Shown sizes of chunks (n, d) with these stored sizes; -1 where the chunk must be read for that."""

    def show(self, coords: Coords, stored: bytes) -> bytes | memoryview:
        """The shown bytes. Raise ValueError, with the reason, if `stored` cannot be this chunk."""

    def require(self, coords: Coords, shown: bytes) -> None:
        """Raise the errors of `store`, without encoding if possible."""

    def store(self, coords: Coords, shown: bytes) -> bytes:
        """Bytes that `show` turns into `shown`.

        Raise ValueError, with the reason, if `shown` cannot be this chunk; UnsupportedError if this transform cannot
        write chunks.
        """


class Filler(Protocol):
    """Makes chunks that are not stored, for readers that would misinterpret a missing chunk."""

    def sizes(self, coords: U64) -> Sizes:
        """The sizes of chunks (n, d)."""

    def show(self, coords: Coords) -> bytes:
        """The bytes of one chunk."""


class ChunkCheck(Protocol):
    """Checks stored chunks for `verify`. Pure; no I/O."""

    @property
    def head(self) -> int | None:
        """The number of first bytes that `quick` needs; None for the whole chunk, such as for a checksum."""

    @property
    def plain(self) -> bool:
        """Whether all bytes of the right number are valid, so that `deep` finds no more than `sizes`."""

    @property
    def unchecked(self) -> str:
        """The codec or encoding that `deep` cannot decode; "" if there is none."""

    def sizes(self, coords: U64) -> Sizes | None:
        """The stored sizes of chunks (n, d); None if they depend on the content."""

    def quick(self, coords: Coords, size: int, head: npt.NDArray[np.uint8]) -> None:
        """Raise ValueError, with the reason, if a chunk of `size` bytes that begins with `head` is damaged."""

    def deep(self, coords: Coords, stored: bytes) -> None:
        """Decode the chunk. Raise ValueError, with the reason, if it is damaged."""


class Lead(NamedTuple):
    """For collections that show two files for each chunk: the chunk, and the bytes right before it in its shard.

    No index has the range of the bytes before a chunk.

    Args:
        size: returns the number of these bytes from the shown chunk. Raises ValueError, with the reason.
        transform: the transform of the chunk; the bytes before it have none.
    """

    size: Callable[[bytes], int]
    transform: Transform | None = None


class Pair(NamedTuple):
    """The suffixes of a shard in two files: its first `head_bytes` are in file `head`, the rest in file `body`."""

    head: str
    body: str
    head_bytes: int


@dataclass(frozen=True)
class Layer:
    """One level of sharding.

    Args:
        format: the byte layout of a shard.
        codecs: bytes-to-bytes codecs around the whole shard. The shard is decoded before chunks are read from it.
        trailer: the size of a checksum after the shard. Unlike codecs, it leaves the shard readable without decoding.
        pair: given if a shard may be stored as two files instead.
    """

    format: ShardFormat
    codecs: tuple[Codec, ...] = ()
    trailer: int = 0
    pair: Pair | None = None

    def single_name(self, name: str) -> str:
        """Convert the name of one file of a pair to that of the shard's single file; return other names unchanged."""
        for suffix in (self.pair.head, self.pair.body) if self.pair is not None else ():
            if name.endswith(suffix):
                return name.removesuffix(suffix) + "." + self.format.key(0).rsplit(".", 1)[-1]
        return name


@dataclass(frozen=True)
class Collection:
    """All chunks that share one sharding rule: an array, a scale of a volume, all meshes of a segmentation.

    Args:
        format: the name of the format that describes the collection.
        path: the directory where the chunks are shown, relative to the dataset's directory.
        names: the names of the chunks there.
        layers: outermost first; more than one if shards contain shards. Each layer has its own grid of chunks.
        codecs: the codecs of the shown bytes, innermost first. Only displayed.
        facts: shape, data type and other facts, for `info`.
        transform: given if the shown bytes differ from the stored ones.
        shards: the directory of the shards, relative to the dataset's directory, if not `path`. If the only shard has
            the key "", `shards` is the path of its file.
        lead: given if two files are shown for each chunk. The last coordinate distinguishes them: 0 is the chunk.
        array: the array of these chunks, for layouts; None for other collections, or if shardfs cannot describe it.
        filler: given if chunks that are not stored are shown anyway.
        check: checks stored chunks; None if the format has no check.
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
        """The directory of the shards, relative to the dataset's directory."""
        return self.path if self.shards is None else self.shards


@dataclass(frozen=True, slots=True)
class Facts:
    """A collection's properties for `info`. Shapes are in elements, and () for collections that are no arrays."""

    shape: Coords
    chunk_shape: Coords
    shard_shape: Coords | None
    data_type: str
    sharding: str


class Located(NamedTuple):
    """The place of a shown chunk. `shard` is a path in the source, with a slot in brackets for a shard in a shard."""

    collection: str
    coords: Coords
    shard: str
    offset: int
    size: int
    codecs: tuple[str, ...]


class Summary(NamedTuple):
    """The output of `info` about a collection."""

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
    """Data that shardfs cannot unshard, and the reason, for `info` and the log.

    Its files are shown unchanged; if `skipped`, they are not shown; if `damaged`, opening them fails.
    """

    path: str
    why: str
    skipped: bool = False
    damaged: bool = False

    @property
    def instead(self) -> str:
        """What the mount does with these data, for messages."""
        if self.damaged:
            return "cannot be opened"
        return "not shown" if self.skipped else "shown as it is stored"


class Rewriter(Protocol):
    """Translates documents of a directory whose names are not known in advance."""

    def applies(self, name: str) -> bool:
        """Whether a file of this name may be such a document."""

    def rewrite(self, path: str, name: str, raw: bytes) -> bytes | None:
        """The document to show; None to show the file unchanged. Raise CorruptShardError for a damaged document."""


class Scope(Protocol):
    """Datasets in subdirectories whose documents are in another directory. Paths are relative to the scope."""

    @property
    def data(self) -> str:
        """The directory of the outermost dataset. Other layouts show its content in place of the scope."""

    def listing(self, below: str) -> str:
        """The directory whose entries name the datasets directly in `below`, also datasets without data."""

    def member(self, name: str, is_directory: bool) -> str | None:
        """The name of the dataset for which this entry of `listing` stands; None if it stands for none."""

    def documents(self, below: str) -> Sequence[str]:
        """The paths of the documents that may describe directory `below`."""

    def open(self, path: str, below: str, documents: Mapping[str, bytes]) -> Dataset | None:
        """The dataset that the existing documents describe, see `Format.open`. `path` is for messages."""


class Levels(Protocol):
    """An image that only the attributes of its levels, the arrays in a group, describe. Only layouts use it."""

    def paths(self) -> Iterable[str]:
        """Possible paths of levels, relative to the group. The search ends at the first path that does not exist."""

    def image(self, found: Mapping[str, Array]) -> Multiscale | None:
        """The image with these levels, in the order of `paths`; None if they are not levels of an image."""


class Consolidation(NamedTuple):
    """A document that is built on request from all documents shown below its directory.

    Args:
        build: takes the documents by path relative to the directory, including those of the directory itself.
    """

    name: str
    build: Callable[[Mapping[str, bytes]], bytes]


@dataclass(frozen=True)
class Dataset:
    """What the documents of one directory describe.

    Args:
        format: the name of the format, printed by `info`.
        collections: the sharded collections, if there are any.
        documents: translated documents by path below the directory, shown instead of stored ones. The directories in
            these paths need not exist in the store, and documents stored in these directories are ignored.
        problems: data shown unchanged, and the reasons.
        closed: whether no other datasets are below this directory, because it is an array, full of chunks.
        unwalked: subdirectories without datasets, because they are full of chunks.
        named: subdirectories that the documents name. Stores that cannot list directories are assumed to have them.
        hidden: names in this directory that are not shown.
        form: names in this directory that belong to the format (documents, directories of chunks), so that other
            layouts hide them. Names of shards may be missing.
        rewriter: given if there are further documents to translate.
        scope: given if these documents describe how to find datasets in subdirectories.
        unsharded: arrays that the native layout shows unchanged, but other layouts convert.
        attributes: the user's attributes of a group; None if this is not a group.
        multiscales: images whose levels are arrays below.
        levels: given if the attributes of the arrays below may describe another image.
        beside: all names in the directory of an image, for views that must choose unused names there.
        images: the images that have an array further down as a level, by the array's path. The array's own documents do
            not mention the image.
        level_of: the image that has this array as a level, from `images` of a dataset above. Its only level has the
            path "".
        indescribable: why the arrays have no description, if they have none.
        consolidation: given if one of the documents is built from those below.
        blank: whether the mount shows nothing of this directory.
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
    """The names of a grid's chunks: path components below the collection's directory.

    `prefix` is a directory with all chunks, or b"". Below it a chunk has `len(dims)` components. Component k has a
    value below `dims[k]`, and the values of all components determine the chunk's coordinates (`coords`).
    """

    @property
    def prefix(self) -> bytes: ...

    @property
    def dims(self) -> tuple[int, ...]: ...

    def parse(self, level: int, name: bytes) -> int | None:
        """The value of component `level` with this name; None if no chunk has such a component."""

    def render(self, level: int, values: U64) -> npt.NDArray[np.bytes_]:
        """The inverse of `parse`, for many values."""

    def reserved(self, level: int, name: bytes) -> bool:
        """Whether `name` could be a chunk's name in a larger grid (or a shard's, if shards have such names)."""

    def coords(self, values: Coords) -> Coords:
        """Grid coordinates of the chunk whose components have these values."""

    def coords_many(self, values: U64) -> U64:
        """`coords` of many chunks: from (n, len(dims)) values to (n, d) coordinates."""

    def values(self, coords: U64) -> U64:
        """The inverse of `coords_many`: from (n, d) coordinates to (n, len(dims)) values."""


Entry: TypeAlias = tuple[bytes, int, bool, int, int, int]
"""One entry of a directory: name, number, whether it is a directory, size, mtime in ns, cookie. Cheaper than a `Batch`
for small directories."""


class Batch(NamedTuple):
    """Consecutive entries of a directory, as parallel arrays of length n (at most 4,096 by convention).

    Args:
        sizes: -1 where the size is unknown without further I/O; such an entry is listed by name only.
        cookies: positions; `scan(cookie)` continues after that entry. Strictly ascending, below 2**62.
        by_name: whether to send the kernel only names, because it would otherwise keep too many inodes.
        links: which entries are symbolic links, with `directories` not set; None if there are none.
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
        """The entries that a mask, a slice or an array of positions selects."""
        return self._replace(
            names=self.names[which],
            numbers=self.numbers[which],
            directories=self.directories[which],
            sizes=self.sizes[which],
            mtimes_ns=self.mtimes_ns[which],
            cookies=self.cookies[which],
            links=None if self.links is None else self.links[which],
        )
