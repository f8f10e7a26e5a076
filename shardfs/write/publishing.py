"""Publish one shard: compute its new content from the pending chunks, detect conflicts, and verify the result."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from shardfs.codecs.decoders import decompressed
from shardfs.model.errors import CorruptShardError
from shardfs.model.shard_format import Put
from shardfs.model.write_plan import size_of
from shardfs.shards import rewriting
from shardfs.storage.blob_views import crc32c_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardfs.model.blobs import Blob, Bytes, Plan
    from shardfs.model.values import Coords
    from shardfs.storage.writers import Begun
    from shardfs.vfs.chunk_dirs import ChunkDirs, Target
    from shardfs.write.journal import Journal, Position
    from shardfs.write.pending import Version

log = logging.getLogger(__name__)

LIMIT = 64 << 20
"""Dead bytes. A shard with more is compacted if its dead bytes also exceed three times its live bytes."""

RETRY_S, MAX_RETRY_S = 0.1, 60.0

UNLOOKED = object()
"""Marks a shard whose version at the time of the writes is unknown, for example after a crash."""

Extent: TypeAlias = "tuple[int, ...] | None"
"""Start, size and perhaps crc32c of a chunk as stored in the shard; None: the shard does not have the chunk."""


@dataclass(frozen=True)
class Publishing:
    """Settings for publishing shards.

    Args:
        idle_s, age_s: a shard is published `idle_s` seconds after the last close of one of its chunks, but at most
            `age_s` seconds after the first one.
        stall_s: seconds that a writer waits for room in the journal while nothing is published.
        close: what a close waits for: "journal" (the page cache), "sync" (the disk) or "publish" (the store).
        conflict: what happens to a chunk that another writer has changed too: "fail" reports a conflict, "ours"
            overwrites the other version.
        compact: when dead bytes are removed from shards: "limit" (see `LIMIT`), "never", or "eager" (more than half as
            many dead bytes as live ones).
        u64: "wrap": offset differences in a minishard index may wrap around at 64 bits; "nowrap": chunks are copied to
            avoid that.
        inplace: which shards are updated in place: "never" (none) or "uint64".
        dirty_bytes: shards are published at once while the journal has more bytes than this.
        workers: shards that are published at the same time.
    """

    idle_s: float = 5.0
    age_s: float = 30.0
    stall_s: float = 300.0
    close: str = "journal"
    conflict: str = "fail"
    compact: str = "limit"
    u64: str = "wrap"
    inplace: str = "never"
    dirty_bytes: int = 256 << 20
    workers: int = 2


@dataclass(eq=False)
class DirtyShard:
    """A shard with pending chunks, and the state of publishing it.

    `first` and `last` are the times of the first and last pending write, `retry_at` the earliest time of the next
    attempt, all by the monotonic clock. `due`: publish now. `busy`: a thread publishes the shard. `publishing`: the
    paths of the chunks being published.
    """

    tree: ChunkDirs
    number: int
    key: str
    targets: dict[str, Target] = field(default_factory=dict)
    first: float = 0.0
    last: float = 0.0
    slots: int | None = None
    """The number of the array's chunks that the shard can hold; None if unknown."""
    due: bool = False
    busy: bool = False
    publishing: frozenset[str] = frozenset()
    unfit: dict[str, str] = field(default_factory=dict)
    """Chunks that do not fit into the shard, and why. A later write of another chunk may make them fit."""
    failure: BaseException | None = None
    retry_at: float = 0.0
    pause: float = RETRY_S
    version: Any = None
    """Version of the shard object before the first pending write, or after our last publish; or `UNLOOKED`."""


class Job:
    """One attempt to publish a shard: its input (`taken`) and its result (`conflicts`, `unfit`, `done`)."""

    def __init__(
        self,
        journal: Journal,
        settings: Publishing,
        shard: DirtyShard,
        taken: dict[str, tuple[Target, Version]],
        begun: Callable[[Begun, list[int], Mapping[str, Extent]], None],
    ) -> None:
        """Prepare a publish of the versions `taken`.

        `begun` is called before the shard is replaced, with the LSNs of the versions and the new extents by path.
        """
        self._journal, self._settings, self._shard, self.taken, self._begun = journal, settings, shard, taken, begun
        self.conflicts: dict[str, str] = {}
        self.unfit: dict[str, str] = {}
        self.written, self.packed = 0, False
        self.in_place = rewriting.in_place(shard.tree.collection) if settings.inplace == "uint64" else 0
        self._old_size = 0
        self._pinned = ExitStack()
        self._planned: dict[str, Extent] = {}
        self.published: list[Mapping[str, Any]] = []
        """Extents by path from earlier attempts that a crash or an error interrupted. They may be in the shard."""

    def make(self, old: Blob | None) -> Plan | None:
        """Return the plan of the shard's new content, given the present object; None removes the shard.

        Sets `conflicts` and `unfit`; their chunks are not part of the plan.
        """
        shard, collection = self._shard, self._shard.tree.collection
        self.conflicts = self._conflicts(old)
        puts: dict[Coords, Put] = {}
        drops: set[Coords] = set()
        for path, (target, version) in self.taken.items():
            if path in self.conflicts:
                continue
            if version.data is None:
                drops.add(target.coords)
            else:
                puts[target.coords] = Put(self._content(target, version))
        drops -= puts.keys()
        self.packed = self._packs(old)
        unfit: dict[Coords, str] = {}
        pack, forward = self.packed, self._settings.u64 == "nowrap"
        plan = rewriting.plan(collection, shard.number, old, puts, drops, pack=pack, forward=forward, unfit=unfit)
        self.unfit = {path: unfit[target.coords] for path, (target, _) in self.taken.items() if target.coords in unfit}
        self.written = 0 if plan is None else size_of(plan)
        self._old_size = 0 if old is None else old.stat().size
        self._planned = dict.fromkeys(self.done())
        return plan

    def check(self, new: Blob) -> None:
        """Verify the new object by reading its index, and note the extents of the published chunks.

        Raise ValueError if a chunk is missing, was not removed, or has the wrong checksum; CorruptShardError if the
        journal's own bytes of that chunk are damaged.
        """
        done, lead = self.done(), self._shard.tree.collection.lead
        coords = [self.taken[path][0].coords for path in done]
        entries = rewriting.entries(self._shard.tree.collection, new, coords)
        for (path, version), entry in zip(done.items(), entries, strict=True):
            target = self.taken[path][0]
            summed = self._sum(new, entry)
            plain = summed is not None and target.tree.transform_of(target.coords) is None and not target.suffix
            plain &= lead is None or target.coords[-1] == 0  # else a lead: the entry is that of the next chunk
            wrong = plain and version.data is not None and version.data.crc != summed
            if wrong and version.data is not None:
                self._require_sound(path, version.data)
            if wrong or (entry is None) != (version.data is None):
                raise ValueError(f"{path} would not be as it was written")
            self._planned[path] = entry if entry is None or summed is None else (*entry, summed)

    def _require_sound(self, path: str, data: Position) -> None:
        """Raise CorruptShardError if the journal's bytes are damaged or unreadable."""
        try:
            self._journal.read(data)
        except OSError as e:
            raise CorruptShardError(self._shard.tree.path, path, e.strerror or str(e)) from e

    def _sum(self, blob: Blob | None, entry: tuple[int, int] | None) -> int | None:
        """Return the crc32c of a chunk's stored bytes; None if the shard has codecs, or no local file to read."""
        layers = self._shard.tree.collection.layers
        if blob is None or entry is None or blob.fd < 0 or any(layer.codecs for layer in layers):
            return None
        return crc32c_of(blob, *entry)

    def _packs(self, old: Blob | None) -> bool:
        """Return whether this publish removes dead bytes.

        That moves chunks: a reader that has cached the old index then reads wrong bytes.
        """
        compact = self._settings.compact
        if old is None or compact == "never" or (compact == "limit" and old.stat().size <= LIMIT):
            return False
        usage = rewriting.usage(self._shard.tree.collection, self._shard.number, old)
        packs = usage.dead > usage.live / 2 if compact == "eager" else usage.dead > max(3 * usage.live, LIMIT)
        if packs:
            log.info("%s: is compacted: %d bytes are dead, %d live", self._shard.key, usage.dead, usage.live)
        return packs

    def _content(self, target: Target, version: Version) -> Bytes:
        if version.data is None:
            raise ValueError("a deleted chunk has no bytes")
        part = self._pinned.enter_context(self._journal.using(version.data))
        return decompressed(self._journal.read(version.data), target.suffix) if target.suffix else part

    def close(self) -> None:
        """Unpin the chunks' bytes in the journal."""
        self._pinned.close()

    def _conflicts(self, old: Blob | None) -> dict[str, str]:
        """Return the chunks that another writer has changed since they were written here, and why each conflicts."""
        shard = self._shard
        version = None if old is None else old.stat().version
        if version == shard.version:
            return {}
        known = {path: t.coords for path, (t, pending) in self.taken.items() if pending.base != "?"}
        entries = rewriting.entries(shard.tree.collection, old, list(known.values()))
        found = {}
        for path, entry in zip(known, entries, strict=True):
            if not any(self._is_at(expected, entry, old) for expected in self._expected(path)):
                found[path] = f"it was at {self.taken[path][1].base}, and is at {entry} now"
        if found and self._settings.conflict == "ours":
            told = "%s: somebody else changed it; what was written here replaces %d chunks of that, %s the first"
            log.warning(told, shard.key, len(found), next(iter(found)))
            return {}
        if found or not (shard.version is UNLOOKED or self.published):
            log.warning("%s: somebody else changed it; what was written here is added to that", shard.key)
        return found

    def _is_at(self, expected: Any, entry: tuple[int, int] | None, old: Blob | None) -> bool:
        """Return whether a chunk is unchanged.

        If checksums are known, size and checksum are compared, because another writer may have moved the chunk to write
        its neighbours. Otherwise start and size are compared.
        """
        if expected is None or entry is None:
            return expected is entry
        summed = None if len(expected) == 2 else self._sum(old, entry)
        if summed is None:
            return tuple(expected[:2]) == entry
        return tuple(expected[1:]) == (entry[1], summed)

    def _expected(self, path: str) -> list[Any]:
        """Return all extents that the chunk can have if no other writer has changed it.

        These are the extent before the local write and the extents of earlier attempts to publish.
        """
        version = self.taken[path][1]
        ours = [entries[path] for entries in self.published if path in entries]
        return [version.base, *ours, *([None] if version.data is None else [])]

    def begun(self, note: Begun) -> None:
        """Record the publish in the journal, so that recovery finds it on disk, before the shard is replaced."""
        if note.head:
            self.written -= self._old_size
        self._begun(note, [version.lsn for version in self.done().values()], self._planned)

    def extent(self, path: str) -> Extent:
        """Return the new extent of a published chunk."""
        return self._planned[path]

    def done(self) -> dict[str, Version]:
        """Return the versions that this job publishes: all taken ones except conflicts and chunks that do not fit."""
        left = {*self.conflicts, *self.unfit}
        return {path: version for path, (_, version) in self.taken.items() if path not in left}
