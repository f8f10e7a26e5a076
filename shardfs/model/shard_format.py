"""What a byte layout of shards must do (`ShardFormat`), and the decoded index of a shard."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from shardfs.model.byte_ranges import cover, leaving, leaving_reason
from shardfs.model.values import U64, Bool, Coords, Sizes

if TYPE_CHECKING:
    from shardfs.model.blobs import Blob, ByteRange, ByteRequest, Content, Plan


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


Placement: TypeAlias = tuple[int, int, int]
"""A chunk's place: the shard, the page of the shard's index, and the slot of that page."""

PageSlot: TypeAlias = tuple[int, int]
"""A chunk's place in a given shard: page and slot."""

ChunkExtent: TypeAlias = tuple[int, int]
"""Where a chunk is in its shard: start and size in bytes."""


class Placements(NamedTuple):
    """The `Placement` of many chunks, as arrays."""

    shard: U64
    page: U64
    slot: U64


class Index(Protocol):
    """One page of a shard index, in the form that needs the least memory."""

    __slots__ = ()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the page takes."""

    def find(self, slot: int) -> ChunkExtent | None:
        """The extent of the chunk in `slot`, a result of `ShardFormat.place`; None if the chunk is absent.

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

    def verify(self, data: bytes, checksum: bytes) -> None:
        """Raise ValueError, with the reason, if `checksum` is not that of `data`."""
        computed = self.digest(data)
        if computed != checksum:
            raise ValueError(f"its {self.name} is {computed.hex()}, but {checksum.hex()} is stored")


class Reason(NamedTuple):
    """Why entries are invalid: the kind of the finding of `verify`, and a text made of the start and size of one."""

    kind: str
    text: Callable[[int, int], str]


@dataclass(frozen=True, slots=True)
class ShardIndex(Index):
    """One page of a shard index: the slots that are present, and the byte range of each.

    Args:
        slots: parallel to `starts` and `sizes`, ascending. None if slot i is entry i for all i: then an entry takes 8
            or 16 bytes of memory instead of 24.
        faults: for each entry 0, or the number of its reason in `reasons` if it is invalid. None if all are valid.
        reasons: the first one has the number 1.
        checksum: given if a checksum follows the range of each entry. Only `ShardFormat.walk` sets it.
        repeated: further entries of some slots, which readers do not find; None if there are none.
    """

    slots: U64 | None
    starts: npt.NDArray[np.unsignedinteger[Any]]
    sizes: npt.NDArray[np.unsignedinteger[Any]]
    faults: npt.NDArray[np.uint8] | None = None
    reasons: tuple[Reason, ...] = ()
    checksum: Checksum | None = None
    repeated: ShardIndex | None = None

    @classmethod
    def empty(cls) -> Self:
        """A page without chunks."""
        array = np.empty(0, np.uint64)
        return cls(array, array, array)

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the arrays."""
        optional = sum(part.nbytes for part in (self.slots, self.faults, self.repeated) if part is not None)
        return self.starts.nbytes + self.sizes.nbytes + optional

    def __len__(self) -> int:
        return len(self.starts)

    def arrays(self) -> ShardIndex:
        """This page: it has arrays already."""
        return self

    def all_slots(self) -> U64:
        """The slots of all entries (n,), ascending."""
        return np.arange(len(self.starts), dtype=np.uint64) if self.slots is None else self.slots

    def position(self, slot: int) -> int:
        """The position of the entry of `slot`, or -1 if it is absent."""
        if self.slots is None:
            return slot if slot < len(self.starts) else -1
        i = int(self.slots.searchsorted(np.uint64(slot)))
        return i if i < len(self.slots) and int(self.slots[i]) == slot else -1

    def positions(self, slots: U64) -> npt.NDArray[np.intp]:
        """`position` of many slots (n,) at once; -1 for each slot that is absent."""
        if self.slots is None:
            present = slots < len(self.starts)
            return np.where(present, slots, 0).astype(np.intp) - np.where(present, 0, 1)
        if not len(self.slots):
            return np.full(len(slots), -1, np.intp)
        i = self.slots.searchsorted(slots)
        i[i == len(self.slots)] = 0
        return np.where(self.slots[i] == slots, i, -1)

    def extent_at(self, i: int) -> ChunkExtent:
        """The extent of entry `i`. Raise ValueError, with the reason, if the entry is invalid."""
        if self.faults is not None and self.faults[i]:
            raise ValueError(self.reason(i))
        return self.starts.item(i), self.sizes.item(i)

    def sizes_at(self, positions: npt.NDArray[np.intp]) -> Sizes:
        """Sizes in bytes of the entries at these positions; -1 for a broken entry."""
        sizes = self.sizes[positions].astype(np.int64)
        if self.faults is not None:
            sizes[self.faults[positions] > 0] = -1
        return sizes

    def find(self, slot: int) -> ChunkExtent | None:
        """`extent_at` of the entry of `slot`; None if the chunk is absent. Raise ValueError as `extent_at`."""
        if self.slots is not None or slot >= len(self.starts):
            slot = self.position(slot)
            if slot < 0:
                return None
        if self.faults is not None:
            return self.extent_at(slot)
        return self.starts.item(slot), self.sizes.item(slot)

    def checked(self, object_size: int) -> ShardIndex:
        """The same index in 32-bit numbers if these suffice, with ranges that leave the object marked broken."""
        starts = self.starts
        sizes = self.sizes
        fits = len(starts) and self.faults is None and int(starts.max()) + int(sizes.max()) <= object_size
        outside = leaving(starts, sizes, object_size) if not fits else np.zeros(0, np.bool_)
        whole = self if self.repeated is None else replace(self, repeated=self.repeated.checked(object_size))
        if outside.any():
            return whole.with_broken(outside, Reason("range", partial(leaving_reason, object_size=object_size)))
        if object_size < 2**32 and self.faults is None:
            return replace(whole, starts=starts.astype(np.uint32), sizes=sizes.astype(np.uint32))
        return whole

    def with_broken(self, bad: Bool, reason: Reason) -> ShardIndex:
        """The same index with the entries `bad` marked broken.

        An entry that was broken before keeps its reason.
        """
        if not bad.any():
            return self
        faults = np.zeros(len(self), np.uint8) if self.faults is None else self.faults.copy()
        faults[bad & (faults == 0)] = len(self.reasons) + 1
        return replace(self, faults=faults, reasons=(*self.reasons, reason))

    @property
    def broken(self) -> npt.NDArray[np.intp]:
        """The positions of invalid entries, ascending."""
        return np.empty(0, np.intp) if self.faults is None else np.flatnonzero(self.faults)

    def reason(self, i: int) -> str:
        """Why the entry at position `i`, one of `broken`, is invalid."""
        if self.faults is None:
            return ""
        return self.reasons[self.faults.item(i) - 1].text(self.starts.item(i), self.sizes.item(i))

    def selected(self, at: Bool | npt.NDArray[np.intp]) -> ShardIndex:
        """The entries at these positions, or of this mask."""
        faults = None if self.faults is None else self.faults[at]
        slots = self.all_slots()[at]
        return replace(self, slots=slots, starts=self.starts[at], sizes=self.sizes[at], faults=faults)

    def without(self, slots: Collection[int]) -> ShardIndex:
        """The entries of all slots but these, also of repeated ones."""
        if not slots:
            return self
        index = self.selected(~np.isin(self.all_slots(), np.fromiter(slots, np.uint64, len(slots))))
        return index if self.repeated is None else replace(index, repeated=self.repeated.without(slots))

    def columns(self) -> tuple[U64, U64, U64]:
        """Slots, starts and sizes of all entries, also of broken and repeated ones, in 64-bit numbers."""
        slots, starts, sizes = self.all_slots(), self.starts.astype(np.uint64), self.sizes.astype(np.uint64)
        if self.repeated is None:
            return slots, starts, sizes
        more = self.repeated.columns()
        return np.append(slots, more[0]), np.append(starts, more[1]), np.append(sizes, more[2])

    def valid_ranges(self) -> tuple[U64, U64]:
        """Starts and sizes of the valid entries, also of repeated ones, in 64-bit numbers."""
        _, starts, sizes = self.columns()
        bad = self.broken if self.repeated is None else np.append(self.broken, self.repeated.broken + len(self))
        return np.delete(starts, bad), np.delete(sizes, bad)

    def live_bytes(self, behind: int = 0) -> int:
        """The number of bytes that valid entries cover, each with `behind` further bytes after its chunk."""
        starts, sizes = self.valid_ranges()
        return cover(starts, starts + sizes + np.uint64(behind)).nbytes


class IndexPart(NamedTuple):
    """A page of a stored index: its number, its range if that is possible, and its entries or why it has none."""

    page: int
    where: ByteRange | None
    entries: ShardIndex | ValueError


class StoredIndex(Protocol):
    """The index of a stored shard. Entries whose range leaves the shard are marked broken.

    Attributes:
        blob: the shard.
        size: the bytes of the shard.
    """

    blob: Blob
    size: int

    def root(self) -> bytes | None:
        """The root, fewer bytes if the shard is shorter; None if the format has no root."""

    def parts(self, pages: Sequence[int] | None = None) -> Iterator[IndexPart]:
        """The nonempty ones of these pages, or of all pages.

        Raise ValueError, with the reason, if all pages are wanted and the root cannot be read.
        """

    def page(self, number: int) -> ShardIndex:
        """One page; an empty index if the shard has no such page. Raise ValueError, with the reason."""

    def usage(self, leads: Leads | None) -> Usage:
        """`ShardFormat.usage` of a shard whose index consists of a root and pages."""


Leads: TypeAlias = Callable[[U64, U64], U64]
"""Returns how many bytes before each chunk belong to it (`Lead`), from the chunks' starts and sizes in the shard.

Raises ValueError, with the reason, if a chunk does not contain that number."""


@dataclass(frozen=True, slots=True)
class ShardChange:
    """The chunks to put into a shard and to drop from it, by page and slot.

    Args:
        pack: omit bytes that no entry refers to, which moves chunks. Ignored if an entry is broken.
        strict: refuse to pack a shard with a broken entry.
        leads: given if bytes before chunks belong to them.
    """

    puts: Mapping[PageSlot, Put] = field(default_factory=dict)
    drops: Set[PageSlot] = frozenset()
    pack: bool = False
    strict: bool = False
    leads: Leads | None = None


class ShardFormat(Protocol):
    """The byte layout of one collection's shards: which bytes to read, and what they mean. Does no I/O.

    `grid` is the shape of the chunk grid, for formats that place grids. Coordinates are those of `Collection`: chunk
    grid coordinates or ids. No method checks that coordinates are inside the grid.
    """

    grid: Coords
    """The number of chunks along each axis, in the order of coordinates."""

    def place(self, coords: Coords) -> Placement:
        """The shard, the page and the slot of a chunk, whether it exists or not."""

    def row(self, above: Coords) -> Callable[[int], Placement]:
        """`place` as a function of the last coordinate, with the other coordinates fixed to `above`."""

    def place_many(self, coords: U64) -> Placements:
        """`place` for an (n, d) array of coordinates."""

    def coords(self, shard: int, page: int, slots: U64) -> tuple[U64, Bool]:
        """The inverse of `place_many`: (n, d) coordinates, and which of them are valid.

        An entry that readers cannot reach (outside the grid, or on a page to which its hash does not lead) is invalid.
        """

    walk: Callable[[Blob], ShardIndex] | None = None
    """Reads the index of a shard that has neither a root nor pages; None for formats with these.

    The function makes few calls of `read`, of many ranges each. It raises ValueError with the reason.
    """

    page_bits: int = 0
    """Page numbers fit in this number of bits."""

    def root_request(self) -> ByteRange | None:
        """The range of the root, which has the positions of all pages; None if this format has no root."""

    def nonempty_pages(self, root: bytes | None) -> U64:
        """The pages that may have entries, ascending. Raise ValueError, with the reason, for damage."""

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

    unwritable: str = ""
    """Why shards of this format cannot be rewritten; "" if they can."""

    in_place: int = 0
    """The size of an index entry at a shard's beginning that can be overwritten in place, once the data it refers to
    are stored: the entry is valid independently of the others. 0 if the format has no such entries."""

    def rewrite(self, shard: int, old: StoredIndex | None, change: ShardChange) -> Plan | None:
        """Plan the shard after a change; None if no chunk remains.

        Existing bytes stay at their positions, also the old index, and new bytes are appended. So readers with a cached
        index still read the old chunks. Formats document exceptions. Unreachable bytes and broken entries are kept.

        Raise ValueError, with the reason, if the object is so damaged that chunks would be lost or wrong ones found, or
        if an entry is broken and the change is `strict`. Raise UnsupportedError if the format cannot express the
        result.
        """

    def usage(self, old: StoredIndex, leads: Leads | None = None) -> Usage:
        """Measure a shard. Chunks that are lost by damage count as dead. Raise ValueError if all chunks are lost."""
