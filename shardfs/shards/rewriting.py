"""Plans of shards with changed chunks, through nested shards and codecs around shards.

Nothing here writes. From an old shard only indices are read, and chunks that may already have the new bytes. If codecs
surround the shard, all of it is read.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from shardfs.codecs import encoders
from shardfs.model.blobs import ByteRange, Suffix
from shardfs.model.errors import CorruptShardError, UnfitChunkError
from shardfs.model.grid import unravel, unravel_many
from shardfs.model.shard_format import Put, ShardChange, Usage
from shardfs.model.write_plan import bytes_of, is_same, shifted, size_of, unchanged
from shardfs.shards.byte_layouts.sharding_indexed import ShardingIndexed
from shardfs.shards.comparing import stored_already
from shardfs.shards.index_reader import ShardIndexReader, why_broken
from shardfs.shards.outer_codecs import unwrapped, wrapped
from shardfs.storage.blob_views import SliceBlob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence, Set

    from shardfs.model.blobs import Blob, ByteRequest, Content, Plan
    from shardfs.model.collection import Collection, Lead
    from shardfs.model.shard_format import ChunkExtent, Leads, PageSlot, Placement, Placements, ShardFormat, ShardIndex
    from shardfs.model.values import U64, Bool, Coords

    Entry = ChunkExtent | CorruptShardError | None
    """The range of a chunk; why its entry is broken; or None if it is absent."""

    Member = tuple[list[Coords], Entry]

T = TypeVar("T")

NO_PLACE = "no shard has a place for it"


# ---- places of chunks ----


def unwritable(collection: Collection) -> str | None:
    """Return why chunks of the collection cannot be written; None if they can."""
    transform = collection.transform if collection.lead is None else collection.lead.transform
    if transform is not None and transform.unwritable is not None:
        return transform.unwritable
    for layer in collection.layers:
        if layer.format.unwritable:
            return layer.format.unwritable
        for codec in layer.codecs:
            if not encoders.can_encode(codec):
                return f"codec {codec.name!r:.80} around shards can be undone only"
    return None


def key(collection: Collection, shard: int) -> str:
    """Return the key of an outermost shard, relative to the directory of the collection's shards."""
    return collection.layers[0].format.key(shard)


def shard_of(collection: Collection, coords: Coords) -> int:
    """Return the number of the outermost shard of a chunk.

    Raise UnfitChunkError if no shard has a place for the chunk.
    """
    return _homes_of_all(collection, [coords])[coords][0][0]


def shards_of(collection: Collection, cells: U64) -> U64:
    """Return the numbers (n,) of the outermost shards of chunks (n, d), all of which have places."""
    for layer, outer in zip(collection.layers[:0:-1], collection.layers[-2::-1], strict=True):
        cells = unravel_many(layer.format.place_many(cells).shard, outer.format.grid)
    return collection.layers[0].format.place_many(cells).shard


def slots(collection: Collection, shard: int) -> int | None:
    """Return how many chunks of the array an outermost shard can hold; None if unknown.

    A shard with so many chunks is complete.
    """
    outer = collection.layers[0].format
    if len(collection.layers) == 1:
        return outer.capacity(shard)
    along: list[range] = []
    for layer in collection.layers:
        if not isinstance(layer.format, ShardingIndexed):
            return None
        if not along:
            along = [range(c, c + 1) for c in unravel(shard, layer.format.shard_grid)]
        along = layer.format.inside(along)
    return math.prod(map(len, along))


def _homes(collection: Collection, cells: Sequence[Coords]) -> dict[Coords, list[Placement]]:
    """Return the placement of chunks in each layer, outermost first. Chunks without a place are omitted."""
    if not cells:
        return {}
    at = np.array(cells, np.uint64).reshape(len(cells), len(cells[0]))
    fit = np.ones(len(cells), np.bool_)
    levels: list[list[Placement]] = []
    for n, layer in reversed(list(enumerate(collection.layers))):
        places = layer.format.place_many(at)
        # Both files of a chunk have the same place. Coordinates beyond the grid would get the places of other chunks.
        fit &= _are_at(layer.format, places, at[:, :-1] if collection.lead is not None else at)
        levels.insert(0, list(zip(*(column.tolist() for column in places), strict=True)))
        if n:
            at = unravel_many(places.shard, collection.layers[n - 1].format.grid)
    homes = zip(cells, map(list, zip(*levels, strict=True)), fit.tolist(), strict=True)
    return {c: home for c, home, is_fit in homes if is_fit}


def _homes_of_all(collection: Collection, cells: Sequence[Coords]) -> dict[Coords, list[Placement]]:
    """Return `_homes`. Raise UnfitChunkError if a chunk has no place."""
    homes = _homes(collection, cells)
    for c in cells:
        if c not in homes:
            raise UnfitChunkError(c, NO_PLACE)
    return homes


def _are_at(format: ShardFormat, places: Placements, cells: U64) -> Bool:
    """Return which cells are the coordinates of the chunks at these places."""
    pages: dict[tuple[int, int], list[int]] = {}
    for i, home in enumerate(zip(places.shard.tolist(), places.page.tolist(), strict=True)):
        pages.setdefault(home, []).append(i)
    out = np.zeros(len(cells), np.bool_)
    for (shard, page), at in pages.items():
        cells_there, _ = format.coords(shard, page, places.slot[at])
        out[at] = (cells_there[:, : cells.shape[1]] == cells[at]).all(axis=1)
    return out


def in_place(collection: Collection) -> int:
    """Return the bytes of index entries that can be overwritten in place at a shard's beginning (`Writer.update`).

    0 if the shards have no such entries.
    """
    outer = collection.layers[0]
    return 0 if len(collection.layers) > 1 or outer.codecs or outer.trailer else outer.format.in_place


# ---- stored shards ----


def index_request(collection: Collection, shard: int) -> ByteRequest | None:
    """Return the range from which `StoredShard.replaces_all` begins to read; None if it cannot judge these shards."""
    layer = collection.layers[0]
    if len(collection.layers) > 1 or layer.codecs or layer.format.walk is not None or collection.lead is not None:
        return None
    where = layer.format.root_request() or layer.format.page_request(shard, 0, None)
    return Suffix(where.size + layer.trailer) if isinstance(where, Suffix) else where


@contextmanager
def _naming_shard(collection: Collection, shard: int) -> Iterator[None]:
    """Turn a ValueError of a format into a CorruptShardError that names the shard."""
    try:
        yield
    except UnfitChunkError:
        raise
    except ValueError as e:
        raise CorruptShardError(collection.path, key(collection, shard), str(e)) from e


class _OldFragments(NamedTuple):
    """An old chunk with a lead: its shown bytes, the size of the lead, and the chunk's start and size."""

    shown: bytes
    lead: int
    extent: ChunkExtent


class StoredShard:
    """An outermost shard as it is stored, to be changed or measured. Each index is read and decoded once.

    The methods raise CorruptShardError if the shard is damaged.

    Args:
        blob: the stored shard; None if there is none.
    """

    def __init__(self, collection: Collection, shard: int, blob: Blob | None) -> None:
        self.blob = blob
        self._collection = collection
        self._shard = shard
        self._layers = collection.layers
        self._lead = collection.lead
        self._homes: dict[Coords, list[Placement]] = {}
        self._puts: dict[Coords, Put] = {}
        self._indices: dict[tuple[int, int], ShardIndexReader] = {}

    # ---- changing chunks ----

    def plan(
        self,
        puts: Mapping[Coords, Put],
        drops: Set[Coords],
        *,
        pack: bool = False,
        unfit: dict[Coords, str] | None = None,
    ) -> Plan | None:
        """Return the plan of the shard with `puts` written and `drops` removed; None if no chunk is left.

        Chunks that already have the same bytes are not rewritten. If nothing changes, the plan is the old object
        (`write_plan.is_same`).

        Args:
            puts: stored bytes of innermost chunks by coordinates. All belong to this shard, like `drops`. If a chunk is
                two files, a file in neither `puts` nor `drops` keeps its bytes.
            pack: omit dead bytes. Readers that have cached the old index will read wrong bytes.
            unfit: receives the chunks that cannot be written, with reasons; they keep their old bytes. If None, the
                first such chunk raises UnfitChunkError.

        Raise CorruptShardError if the old shard is so damaged that readable chunks could be lost. Raise
        UnfitChunkError for a chunk that cannot be written, and UnsupportedError if the format cannot express the new
        shard.
        """
        with _naming_shard(self._collection, self._shard):
            self._puts = {}
            members: dict[Coords, set[Coords]] = {}
            for c in (*puts, *drops):  # both files of a chunk are grouped under the coordinates of the first
                members.setdefault(c if self._lead is None else (*c[:-1], 0), set()).add(c)
            self._homes = _homes(self._collection, list(members))
            for coords, files in list(members.items()):
                try:
                    self._join(coords, {c: puts[c] for c in files if c in puts}, files & drops)
                except UnfitChunkError as e:
                    if unfit is None:
                        raise
                    unfit |= dict.fromkeys(files, str(e))
                    del members[coords]
            return self._rewritten(0, self._shard, self.blob, list(members), pack)

    def _join(self, coords: Coords, puts: Mapping[Coords, Put], drops: Set[Coords]) -> None:
        """Determine the new bytes of one chunk. Raise UnfitChunkError."""
        if coords not in self._homes:
            raise UnfitChunkError(coords, NO_PLACE)
        home = self._homes[coords][0][0]
        if home != self._shard:
            raise UnfitChunkError(coords, f"belongs in shard {home}, not {self._shard}")
        put = puts.get(coords)
        if self._lead is not None:
            put = self._with_lead(self._lead, coords, puts, drops)
        if put is not None:
            self._puts[coords] = put

    def _rewritten(self, level: int, shard: int, blob: Blob | None, members: list[Coords], pack: bool) -> Plan | None:
        """Return the plan of a shard of one layer with these chunks changed; None if no chunk is left."""
        layer, old = self._layers[level], self._index(level, shard, blob)
        inner = None if old is None else old.blob
        puts, drops = self._changes(level, shard, old, members)
        if not puts and not drops and not pack:
            return None if blob is None else unchanged(blob.stat().size)
        # an inner shard, or one within codecs, is rewritten completely in any case
        pack = pack or level > 0 or bool(layer.codecs)
        change = ShardChange(puts, drops, pack=pack, leads=self._leads())
        return wrapped(layer, layer.format.rewrite(shard, old, change), blob, inner)

    def _changes(
        self, level: int, shard: int, old: ShardIndexReader | None, members: list[Coords]
    ) -> tuple[dict[PageSlot, Put], set[PageSlot]]:
        """Return the members of a shard to write and to drop: chunks, or inner shards, which get no dead bytes."""
        puts: dict[PageSlot, Put] = {}
        drops = set()
        entries = self._entries(level, shard, old, members)
        innermost = level + 1 == len(self._layers)
        new = {at: (self._puts.get(group[0]), entry) for at, (group, entry) in entries.items()} if innermost else {}
        equal = stored_already(new, None if old is None else old.blob)
        for at, (group, entry) in entries.items():
            if innermost:
                put = self._puts.get(group[0])
                is_stored = entry is None if put is None else at in equal
            else:
                extent, inner = _sound(entry), self._homes[group[0]][level + 1][0]
                plan = self._rewritten(level + 1, inner, _slice(old, extent), group, pack=False)
                is_stored = is_same(plan, None if extent is None else extent[1])
                put = None if plan is None else Put(plan if extent is None else shifted(plan, extent[0]))
            if is_stored:
                continue
            if put is None:
                drops.add(at[1:])
            else:
                puts[at[1:]] = put
        return puts, drops

    # ---- chunks that are two files ----

    def _with_lead(self, lead: Lead, first: Coords, puts: Mapping[Coords, Put], drops: Set[Coords]) -> Put | None:
        """Return both files of a chunk as one `Put`. A file in neither `puts` nor `drops` keeps its old bytes.

        None if the chunk is removed. Raise UnfitChunkError if only one of the files would be left.
        """
        second, changed = (*first[:-1], 1), {*puts, *drops}
        index = self._index(0, self._shard, self.blob)
        ((_, entry),) = self._entries(0, self._shard, index, [first]).values()
        extent = None if {first, second} <= changed else _sound(entry)
        old = None if extent is None else _fit(first, self._old_fragments, lead, extent)
        if first in puts:
            manifest = _fit(first, lead.shown, bytes_of(puts[first].data))
        elif first in drops or old is None:
            if second in puts or (second not in drops and old is not None and old.lead):
                raise UnfitChunkError(second, "its size is in the file beside it, which is missing: write both files")
            return None
        else:
            manifest = old.shown
        size = _fit(first, lead.size, manifest)
        before: Content = b""
        if second in puts:
            before = puts[second].data
        elif second not in drops and old is not None:
            before = [ByteRange(old.extent[0] - old.lead, old.extent[0])]
        if size_of(before) != size:
            raise UnfitChunkError(
                second, f"should have {size} bytes, according to the file beside it, not {size_of(before)}"
            )
        if first not in puts and old is not None:
            return Put([ByteRange(old.extent[0], sum(old.extent))], before)
        return Put(puts[first].data, before)

    def _old_fragments(self, lead: Lead, extent: ChunkExtent) -> _OldFragments:
        """Read an old chunk to find the size of its lead. Raise ValueError, with the reason."""
        data = bytes_of([ByteRange(extent[0], sum(extent))], self.blob)
        manifest = lead.shown(data)
        size = lead.size(manifest)
        if size > extent[0]:
            raise ValueError(f"{size} bytes expected before a chunk that begins at {extent[0]}")
        return _OldFragments(manifest, size, extent)

    def _leads(self, *, of_damaged: int | None = None) -> Leads | None:
        """Return the function that gives formats the sizes of leads; None for a collection without leads.

        Args:
            of_damaged: the size to assume for a chunk that does not contain a valid one; None: raise ValueError.
        """
        lead = self._lead
        if lead is None:
            return None

        def size(extent: ChunkExtent) -> int:
            try:
                return self._old_fragments(lead, extent).lead
            except ValueError:
                if of_damaged is None:
                    raise
                return of_damaged

        def sizes(starts: U64, lengths: U64) -> U64:
            extents = zip(starts.tolist(), lengths.tolist(), strict=True)
            return np.fromiter(map(size, extents), np.uint64, len(starts))

        return sizes

    # ---- index lookups ----

    def _entries(
        self, level: int, shard: int, old: ShardIndexReader | None, members: Sequence[Coords]
    ) -> dict[Placement, Member]:
        """Return, by placement, the chunks that share it and its entry in a shard's index."""
        groups: dict[Placement, list[Coords]] = {}
        for c in members:
            groups.setdefault(self._homes[c][level], []).append(c)
        out: dict[Placement, Member] = {at: (group, None) for at, group in groups.items()}
        pages: dict[int, list[Placement]] = {}
        for at in groups:
            pages.setdefault(at[1], []).append(at)
        for page, _, index in () if old is None else old.parts(list(pages)):
            if isinstance(index, ValueError):
                raise index
            if not len(index):
                continue
            places = pages[page]
            positions = index.positions(np.array([slot for _, _, slot in places], np.uint64))
            columns = (positions, index.starts[positions], index.sizes_at(positions))
            for at, i, start, size in zip(places, *(column.tolist() for column in columns), strict=True):
                if i >= 0 and size >= 0:
                    out[at] = groups[at], (start, size)
                elif i >= 0:
                    out[at] = groups[at], self._broken(level, shard, page, index, i)
        return out

    def _broken(self, level: int, shard: int, page: int, index: ShardIndex, i: int) -> CorruptShardError:
        """Return the error that a reader of the broken entry at position `i` gets."""
        why = why_broken(self._layers[level].format, shard, page, index, i)
        return CorruptShardError(
            self._collection.path, key(self._collection, self._shard), why, int(index.all_slots()[i])
        )

    def _index(self, level: int, shard: int, blob: Blob | None) -> ShardIndexReader | None:
        """Return the index of a shard, without the codecs around it; None if there is no shard."""
        if blob is None:
            return None
        index = self._indices.get((level, shard))
        if index is None:
            layer = self._layers[level]
            index = ShardIndexReader(layer.format, shard, unwrapped(layer, blob))
            if level == 0 or not layer.codecs:  # many decoded inner shards would take much memory
                self._indices[level, shard] = index
        return index

    def stored_chunks(self, coords: Sequence[Coords]) -> list[Blob | None]:
        """Return the stored bytes of chunks in this shard, within all codecs around shards; None for an absent one.

        Nothing but indices is read, unless codecs surround a shard, or a chunk has the size of its second file
        (`Lead`). An empty second file counts as absent. Raise CorruptShardError also for an invalid entry.
        """
        if self.blob is None:
            return [None] * len(coords)
        out: dict[Coords, Blob | None] = {}
        with _naming_shard(self._collection, self._shard):
            self._homes = _homes_of_all(self._collection, coords)
            for group, old, entry in self._located(0, self.blob, list(coords)) if coords else ():
                for c in group:
                    out[c] = self._stored_file(c, old, _sound(entry))
        return [out[c] for c in coords]

    def _stored_file(self, coords: Coords, old: ShardIndexReader | None, extent: ChunkExtent | None) -> Blob | None:
        """Return a file of the chunk with this range; None if it is absent."""
        if old is None or extent is None:
            return None
        start, size = extent
        leads = self._leads(of_damaged=0)
        if leads is None or coords[-1] == 0:
            return SliceBlob(old.blob, start, size)
        lead = int(leads(np.array([start], np.uint64), np.array([size], np.uint64))[0])
        return SliceBlob(old.blob, start - lead, lead) if lead else None

    def _located(
        self, level: int, blob: Blob | None, members: list[Coords]
    ) -> Iterator[tuple[list[Coords], ShardIndexReader | None, Entry]]:
        """Yield the members by placement: their innermost shard and the entry. `blob` is a shard of this level."""
        shard = self._homes[members[0]][level][0]
        old = self._index(level, shard, blob)
        for group, entry in self._entries(level, shard, old, members).values():
            if level + 1 == len(self._layers):
                yield group, old, entry
            else:
                yield from self._located(level + 1, _slice(old, _sound(entry)), group)

    # ---- the whole shard ----

    def replaces_all(self, changed: Set[Coords]) -> bool:
        """Return whether `changed` has every chunk of the shard. Reads all indices and nothing else.

        False if the shard is damaged or absent, has chunks outside of the array, or is of a kind that `index_request`
        excludes.
        """
        format = self._layers[0].format
        try:
            index = self._index(0, self._shard, self.blob)
            if index is None or index_request(self._collection, self._shard) is None:
                return False
            for page, _, entries in index.parts():
                if isinstance(entries, ValueError) or len(entries.broken):
                    return False
                cells, valid = format.coords(self._shard, page, entries.all_slots())
                if not valid.all() or not changed >= set(map(tuple, cells.tolist())):
                    return False
        except ValueError:
            return False
        return True

    def repack(self) -> Plan | None:
        """Return the plan of the shard without its dead bytes; None if it has no chunk.

        Raise CorruptShardError also for a broken entry.
        """
        layer = self._layers[0]
        with _naming_shard(self._collection, self._shard):
            old = self._index(0, self._shard, self.blob)
            change = ShardChange(pack=True, strict=True, leads=self._leads())
            plan = layer.format.rewrite(self._shard, old, change)
            return wrapped(layer, plan, self.blob, None if old is None else old.blob)

    def usage(self) -> Usage:
        """Return how many bytes of the shard serve which purpose; zeros if there is no shard.

        Reads every index, and for meshes every manifest. Bytes hidden by damage, such as a broken entry, count as dead.
        Raise CorruptShardError only if the shard's only or top index, or the codecs around it, cannot be read.

        For nested shards, this is the use of the outermost shard. For a shard with codecs, it is that of the decoded
        bytes.
        """
        with _naming_shard(self._collection, self._shard):
            old = self._index(0, self._shard, self.blob)
            leads = self._leads(of_damaged=0)
            return Usage(0, 0, 0, 0) if old is None else self._layers[0].format.usage(old, leads)


def _sound(entry: Entry) -> ChunkExtent | None:
    """Return the entry. Raise the error of a broken one."""
    if isinstance(entry, CorruptShardError):
        raise entry
    return entry


def _slice(outer: ShardIndexReader | None, extent: ChunkExtent | None) -> SliceBlob | None:
    """Return an inner shard."""
    return None if outer is None or extent is None else SliceBlob(outer.blob, *extent)


def _fit(coords: Coords, work: Callable[..., T], *arguments: object) -> T:
    """Run `work` on new bytes, and turn its ValueError into UnfitChunkError."""
    try:
        return work(*arguments)
    except ValueError as e:
        raise UnfitChunkError(coords, str(e)) from e
