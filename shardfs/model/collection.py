"""A collection of chunks: names, grid, shards, and the codecs around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from shardfs.model.arrays import Array, Codec
    from shardfs.model.blobs import Blob
    from shardfs.model.errors import CorruptShardError
    from shardfs.model.shard_format import ShardFormat
    from shardfs.model.values import U64, Coords, Sizes


MISSING = "is missing, but arrays of this format have no absent chunks; bring back the file"
"""What is wrong with a required shard that is absent."""


class ShardSource(Protocol):
    """Opens and lists the shard objects of one collection.

    The methods with a body here are those of a source whose shards are no files of their own.
    """

    layer: Layer
    required: int = 0
    """The number of shards, the first ones, whose absence is damage."""

    @property
    def is_local(self) -> bool:
        """Whether shards are files of this machine."""

    def open(self, shard: int) -> Blob:
        """Open the decoded shard. Raise FileNotFoundError if it does not exist: then all its chunks are absent.

        On a remote store the first `read` may raise the FileNotFoundError instead.
        """
        return self.unwrap(shard, self.stored(shard))

    def stored(self, shard: int) -> Blob:
        """Open the stored shard, still encoded by the codecs of its layer. Raises the errors of `open`."""

    def unwrap(self, shard: int, blob: Blob) -> Blob:
        """Decode what `stored` returned to what `open` returns. Raise ValueError, with the reason, if that fails."""

    def number(self, key: str) -> int | None:
        """The inverse of `key`; None if no shard has this name."""

    def existing(self) -> tuple[U64, CorruptShardError | None]:
        """The numbers of the existing shards, ascending; and an error if damage may hide other shards, else None.

        On a local disk, a directory with the name of a shard counts as a shard, which cannot be opened.
        """

    def exists(self) -> bool:
        """Whether there is at least one shard."""
        return bool(len(self.existing()[0]))

    def survey(self) -> tuple[U64, Sequence[CorruptShardError]]:
        """The numbers of `existing` without such directories; and an error for each name of a shard that is none."""
        shards, damage = self.existing()
        return shards, [] if damage is None else [damage]

    def is_pair(self, shard: int) -> bool:
        """Whether the shard is stored as two files, and no single file exists. One of the two may be missing."""
        return False

    def allow_missing(self, first: int) -> None:
        """Allow that the shards from this number on are absent: programs of this mount write or remove them."""
        return

    def reopen(self, shard: int) -> None:
        """Drop cached state of the shard object, so that `open` finds its newest version."""

    def key(self, shard: int) -> str:
        """The shard's path in the store, with which it is opened and written.

        Of a shard inside a shard: the path of the outer one with coordinates in brackets, for messages only.
        """

    def move(self, old: str, new: str) -> None:
        """Continue below directory `new` of the store, to which directory `old` was renamed."""
        return


class Transform(Protocol):
    """Converts between the stored and the shown bytes of a chunk. Pure; no I/O."""

    @property
    def name(self) -> str:
        """The name that `locate` prints."""

    def sizes(self, coords: U64, stored_sizes: Sizes) -> Sizes:
        """Shown sizes of chunks (n, d) with these stored sizes; -1 where the chunk must be read for that."""

    def show(self, coords: Coords, stored_bytes: bytes) -> bytes | memoryview:
        """The shown bytes. Raise ValueError, with the reason, if `stored_bytes` cannot be this chunk."""

    def work(self, coords: Coords, stored_size: int) -> int:
        """Bytes of memory that `show` takes at most for a chunk of `stored_size` bytes: returned and decoded ones."""

    @property
    def unwritable(self) -> str | None:
        """Why `store` cannot make stored chunks, such as a lossy encoding; None if it can."""

    def store(self, coords: Coords, shown_bytes: bytes) -> bytes:
        """Bytes that `show` turns into a chunk with the same elements.

        Raise ValueError, with the reason, if `shown_bytes` cannot be this chunk; UnsupportedError if `unwritable`.
        """

    def is_exact(self, coords: Coords, shown_bytes: bytes) -> bool:
        """Whether `show` returns `shown_bytes` again, after `store` has accepted them. False if that is unknown."""


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

    def deep(self, coords: Coords, stored_bytes: bytes) -> None:
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

    def shown(self, stored_bytes: bytes) -> bytes:
        """The shown bytes of a chunk. Raise the errors of `Transform.show`."""
        return stored_bytes if self.transform is None else bytes(self.transform.show((), stored_bytes))


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
        required: the number of shards, the first ones, that must exist; 0 if chunks may be absent.
    """

    format: ShardFormat
    codecs: tuple[Codec, ...] = ()
    trailer: int = 0
    pair: Pair | None = None
    required: int = 0

    def single_name(self, name: str) -> str:
        """Convert the name of one file of a pair to that of the shard's single file; return other names unchanged."""
        for suffix in (self.pair.head, self.pair.body) if self.pair is not None else ():
            if name.endswith(suffix):
                return name.removesuffix(suffix) + "." + self.format.key(0).rsplit(".", 1)[-1]
        return name


REMOVED = b""
"""Takes the place of the digest of a document that this mount has removed."""


class Description(NamedTuple):
    """The stored documents that describe a collection.

    Args:
        directory, scope: where the documents were looked for; `scope` as in `Inherited`.
        path: the collection's path relative to `directory`, in the format that it is stored in.
        digests: digests of the documents by their paths in the store; `REMOVED` for one that this mount has removed.
        fill_value: that of the array. Documents of a layout need not have it.
    """

    directory: str
    scope: Any
    path: str
    digests: Mapping[str, bytes]
    fill_value: Any = None

    def without(self, document: str) -> Self:
        """Return the description after this mount has removed a document."""
        return self._replace(digests={**self.digests, document: REMOVED})


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
        zeros: makes what a removed chunk becomes. Given if a missing chunk means zeros to clients of the layout, but
            other elements in the source.
        check: checks stored chunks; None if the format has no check.
        compressible: whether clients may write chunks under names with a compression suffix, as CloudVolume does.
        form: a digest of everything in the documents that says how chunks are stored: data type, codecs, chunks and
            shards, the encoding of their indices, names. Not the array's shape and fill value. "" if no document says
            so, as for datasets in one file.
        description: the stored documents that describe the collection; None until they are noted.
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
    zeros: Filler | None = None
    check: ChunkCheck | None = None
    compressible: bool = False
    form: str = ""
    description: Description | None = None

    @property
    def stored_at(self) -> str:
        """The directory of the shards, relative to the dataset's directory."""
        return self.path if self.shards is None else self.shards

    def transform_of(self, coords: Coords) -> Transform | None:
        """The transform between the stored and the shown bytes of a chunk; None if they are equal."""
        if self.lead is None:
            return self.transform
        return self.lead.transform if coords[-1] == 0 else None


@dataclass(frozen=True, slots=True)
class Facts:
    """A collection's properties for `info`. Shapes are in elements, and () for collections that are no arrays.

    Axes are in the order of the array's own metadata.

    Args:
        shard_shape: None if shards have no single shape, such as those of hashed ids.
        sharding: the name of the byte layout of shards.
        offset: the position of the first element along each axis of the chunk grid; () is zeros.
    """

    shape: Coords
    chunk_shape: Coords
    shard_shape: Coords | None
    data_type: str
    sharding: str
    offset: Coords = ()


class Located(NamedTuple):
    """The place of a shown chunk. `shard` is a path in the source, with a slot in brackets for a shard in a shard."""

    collection: str
    coords: Coords
    shard: str
    offset: int
    size: int
    codecs: tuple[str, ...]


class ChunkNames(Protocol):
    """The names of a grid's chunks: path components below the collection's directory.

    `prefix` is a directory with all chunks, or b"". Below it a chunk has `len(dims)` components. Component k has a
    value below `dims[k]`, and the values of all components determine the chunk's coordinates (`coords`).
    """

    prefix: bytes
    dims: tuple[int, ...]

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
