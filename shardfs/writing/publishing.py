"""One publish: a shard of which chunks are pending, and what it is to become."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardfs import rewriting
from shardfs.codecs import decompressed
from shardfs.model import FilePart, Put
from shardfs.plans import size_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.chunk_tree import ChunkTree, Target
    from shardfs.journal import Journal
    from shardfs.model import Blob, Bytes, Coords, Plan
    from shardfs.pending import Version
    from shardfs.writers import Begun

log = logging.getLogger(__name__)

LIMIT = 64 << 20
"""Dead bytes of a shard, if they are also three times those that live, for which it is compacted."""

RETRY_S, MAX_RETRY_S = 0.1, 60.0


@dataclass(frozen=True)
class Publishing:
    """When shards are published, and how.

    Args:
        idle_s, age_s: a shard is published when no chunk of it was closed for `idle_s`, or the first one `age_s` ago.
        stall_s: how long writers wait for room in the journal while nothing is published.
        close: what a close waits for: "journal", "sync" (the disk) or "publish".
        conflict: what becomes of a chunk that somebody else changed, too: "fail" or "ours".
        compact: when dead bytes are left out: "limit", "never" or "eager".
        dirty_bytes: shards are published at once when more than this waits for it.
        workers: shards that are published at the same time.
    """

    idle_s: float = 5.0
    age_s: float = 30.0
    stall_s: float = 300.0
    close: str = "journal"
    conflict: str = "fail"
    compact: str = "limit"
    dirty_bytes: int = 256 << 20
    workers: int = 2


@dataclass(eq=False)
class DirtyShard:
    """A shard of which chunks are pending."""

    tree: ChunkTree
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
    """Of the shard object as it was when the first of these was written, or as we left it."""


class Job:
    """One publish: what goes into the shard, and what came of it."""

    def __init__(
        self,
        journal: Journal,
        settings: Publishing,
        shard: DirtyShard,
        taken: dict[str, tuple[Target, Version]],
        begun: Callable[[Begun, list[int]], None],
    ) -> None:
        """`begun` notes that the versions of these records are about to be published."""
        self._journal, self._settings, self._shard, self.taken, self._begun = journal, settings, shard, taken, begun
        self.conflicts: dict[str, str] = {}
        self.unfit: dict[str, str] = {}
        self.written, self.packed = 0, False
        self._pinned: list[FilePart] = []

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
        plan = rewriting.plan(collection, shard.number, old, puts, drops, pack=self.packed, unfit=unfit)
        self.unfit = {path: unfit[target.coords] for path, (target, _) in self.taken.items() if target.coords in unfit}
        self.written = 0 if plan is None else size_of(plan)
        return plan

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
        if target.suffix:
            return decompressed(self._journal.read(version.data), target.suffix)
        part = self._journal.pin(version.data)
        self._pinned.append(part)
        return part

    def close(self) -> None:
        """Bytes in the journal may go where it likes again."""
        for part in self._pinned:
            self._journal.unpin(part)

    def _conflicts(self, old: Blob | None) -> dict[str, str]:
        """Chunks that somebody else changed since they were written here."""
        shard = self._shard
        version = None if old is None else old.stat().version
        if version == shard.version or self._settings.conflict == "ours":
            return {}
        log.warning("%s: somebody else changed it; what was written here is added to that", shard.key)
        known = {path: t.coords for path, (t, pending) in self.taken.items() if pending.base != "?"}
        entries = rewriting.entries(shard.tree.collection, old, list(known.values()))
        found = {}
        for path, entry in zip(known, entries, strict=True):
            base = self.taken[path][1].base
            if (None if entry is None else tuple(entry)) != base:
                found[path] = f"it was at {base}, and is at {entry} now"
        return found

    def begun(self, note: Begun) -> None:
        """All is prepared: what recovery needs is on disk before the switch."""
        self._begun(note, [version.lsn for version in self.done().values()])

    def done(self) -> dict[str, Version]:
        """What is published by it."""
        left = {*self.conflicts, *self.unfit}
        return {path: version for path, (_, version) in self.taken.items() if path not in left}
