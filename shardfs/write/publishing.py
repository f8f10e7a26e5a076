"""One publish: a shard of which chunks are pending, and what it is to become."""

from __future__ import annotations

import logging
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

    from shardfs.model.blobs import Blob, Bytes, FilePart, Plan
    from shardfs.model.values import Coords
    from shardfs.storage.writers import Begun
    from shardfs.vfs.chunk_dirs import ChunkDirs, Target
    from shardfs.write.journal import Journal, Position
    from shardfs.write.pending import Version

log = logging.getLogger(__name__)

LIMIT = 64 << 20
"""Dead bytes of a shard, if they are also three times those that live, for which it is compacted."""

RETRY_S, MAX_RETRY_S = 0.1, 60.0

UNLOOKED = object()
"""The version of a shard that nobody has looked at since chunks were written for it: before a crash."""

Extent: TypeAlias = "tuple[int, ...] | None"
"""Start, size and perhaps checksum of a chunk as it is stored; None: there is none."""


@dataclass(frozen=True)
class Publishing:
    """When shards are published, and how.

    Args:
        idle_s, age_s: a shard is published when no chunk of it was closed for `idle_s`, or the first one `age_s` ago.
        stall_s: how long writers wait for room in the journal while nothing is published.
        close: what a close waits for: "journal", "sync" (the disk) or "publish".
        conflict: what becomes of a chunk that somebody else changed, too: "fail" or "ours".
        compact: when dead bytes are left out: "limit", "never" or "eager".
        u64: whether differences in a minishard index may "wrap", or "nowrap", which copies chunks.
        inplace: which shards are changed where they lie: "never" any, or those of "uint64".
        dirty_bytes: shards are published at once when more than this waits for it.
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
    """A shard of which chunks are pending."""

    tree: ChunkDirs
    number: int
    key: str
    targets: dict[str, Target] = field(default_factory=dict)
    first: float = 0.0
    last: float = 0.0
    slots: int | None = None
    """Chunks of the array that it can hold."""
    due: bool = False
    busy: bool = False
    publishing: frozenset[str] = frozenset()
    unfit: dict[str, str] = field(default_factory=dict)
    """Chunks that cannot be written as they are, and why; another one that is written may mend that."""
    failure: BaseException | None = None
    retry_at: float = 0.0
    pause: float = RETRY_S
    version: Any = None
    """Of the shard object as it was when the first of these was written, or as we left it; or `UNLOOKED`."""


class Job:
    """One publish: what goes into the shard, and what came of it."""

    def __init__(
        self,
        journal: Journal,
        settings: Publishing,
        shard: DirtyShard,
        taken: dict[str, tuple[Target, Version]],
        begun: Callable[[Begun, list[int], Mapping[str, Extent]], None],
    ) -> None:
        """`begun` notes that the versions of these records are about to be published, and where they will lie."""
        self._journal, self._settings, self._shard, self.taken, self._begun = journal, settings, shard, taken, begun
        self.conflicts: dict[str, str] = {}
        self.unfit: dict[str, str] = {}
        self.written, self.packed = 0, False
        self.in_place = rewriting.in_place(shard.tree.collection) if settings.inplace == "uint64" else 0
        self._old_size = 0
        self._pinned: list[FilePart] = []
        self._planned: dict[str, Extent] = {}
        self.published: list[Mapping[str, Any]] = []
        """Where chunks lie by now, perhaps, that we were about to publish before: a crash or an error came between."""

    def make(self, old: Blob | None) -> Plan | None:
        """What the shard shall be, given what it is now."""
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
        """Note where the chunks lie in the new object, which is read again. Raise ValueError if one is not there that
        should be, or is there that should not, or has other bytes."""
        done, lead = self.done(), self._shard.tree.collection.lead
        coords = [self.taken[path][0].coords for path in done]
        entries = rewriting.entries(self._shard.tree.collection, new, coords)
        for (path, version), entry in zip(done.items(), entries, strict=True):
            target = self.taken[path][0]
            summed = self._sum(new, entry)
            plain = summed is not None and target.tree.transform_of(target.coords) is None and not target.suffix
            plain &= lead is None or target.coords[-1] == 0  # else the entry is that of the chunk it goes before
            wrong = plain and version.data is not None and version.data.crc != summed
            if wrong and version.data is not None:
                self._require_sound(path, version.data)
            if wrong or (entry is None) != (version.data is None):
                raise ValueError(f"{path} would not be as it was written")
            self._planned[path] = entry if entry is None or summed is None else (*entry, summed)

    def _require_sound(self, path: str, data: Position) -> None:
        """Raise CorruptShardError if the journal has other bytes by now than were written to it."""
        try:
            self._journal.read(data)
        except OSError as e:
            raise CorruptShardError(self._shard.tree.path, path, e.strerror or str(e)) from e

    def _sum(self, blob: Blob | None, entry: tuple[int, int] | None) -> int | None:
        """The checksum of a chunk in the shard; None if it does not lie there as it is."""
        layers = self._shard.tree.collection.layers
        if blob is None or entry is None or blob.fd < 0 or any(layer.codecs for layer in layers):
            return None
        return crc32c_of(blob, *entry)

    def _packs(self, old: Blob | None) -> bool:
        """Whether dead bytes are left out this time: readers that remember the old index read other bytes then."""
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
        part = self._journal.pin(version.data)
        self._pinned.append(part)
        return decompressed(self._journal.read(version.data), target.suffix) if target.suffix else part

    def close(self) -> None:
        """Bytes in the journal may go where it likes again."""
        for part in self._pinned:
            self._journal.unpin(part)

    def _conflicts(self, old: Blob | None) -> dict[str, str]:
        """Chunks that somebody else changed since they were written here."""
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
        """Whether a chunk is what is expected, wherever it lies: others may have moved it to write its neighbours.
        Where that does not show, whether it is where it is expected."""
        if expected is None or entry is None:
            return expected is entry
        summed = None if len(expected) == 2 else self._sum(old, entry)
        if summed is None:
            return tuple(expected[:2]) == entry
        return tuple(expected[1:]) == (entry[1], summed)

    def _expected(self, path: str) -> list[Any]:
        """Where the chunk lies if nobody else has changed it: where it was when it was written here, or where we have
        put it ourselves since."""
        version = self.taken[path][1]
        ours = [entries[path] for entries in self.published if path in entries]
        return [version.base, *ours, *([None] if version.data is None else [])]

    def begun(self, note: Begun) -> None:
        """All is prepared: what recovery needs is on disk before the switch."""
        if note.head:
            self.written -= self._old_size
        self._begun(note, [version.lsn for version in self.done().values()], self._planned)

    def extent(self, path: str) -> Extent:
        """Where a chunk that is published by it lies from now on."""
        return self._planned[path]

    def done(self) -> dict[str, Version]:
        """What is published by it."""
        left = {*self.conflicts, *self.unfit}
        return {path: version for path, (_, version) in self.taken.items() if path not in left}
