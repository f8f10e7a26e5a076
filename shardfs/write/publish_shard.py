"""Publish one shard: compute its new content from the pending chunks, detect conflicts, and verify the result.

`Job` carries the plan through the steps of `Writer.update`, which plans again when another writer changes the shard.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from shardfs.model.changes import FIRST, Change
from shardfs.model.errors import CorruptShardError
from shardfs.model.shard_format import Put
from shardfs.model.text import counted
from shardfs.model.write_plan import size_of
from shardfs.shards import rewriting
from shardfs.shards.rewriting import StoredShard
from shardfs.write.journal.reading import checked_pieces, read_part
from shardfs.write.pending import SAME
from shardfs.write.stored import ABSENT, Stored, conflicts, digest_of, digest_of_pieces

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Set

    from shardfs.model.blobs import Blob, ByteRequest, Bytes, FilePart, Plan, Stat
    from shardfs.model.changes import Begun
    from shardfs.model.values import Coords
    from shardfs.model.values import Version as StoredVersion
    from shardfs.storage.writers import Writer
    from shardfs.vfs.chunk_dirs import ChunkDirs, Target
    from shardfs.write.journal import Position
    from shardfs.write.pending import Backlog, Version

log = logging.getLogger(__name__)

LIMIT = 64 << 20
"""Dead bytes. A shard with more is compacted if its dead bytes also exceed three times its live bytes."""

RETRY_S = 0.1
"""Seconds from the first failure of a publish to the next attempt. They double up to a minute."""

Taken: TypeAlias = "tuple[Target, Version]"
"""A chunk and its version to be published."""


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
        inplace: which shards are updated in place: "never" (none) or "uint64".
        dirty_bytes: shards are published at once while the journal has more bytes than this.
        workers: the most shards that are published at the same time.
    """

    idle_s: float = 5.0
    age_s: float = 30.0
    stall_s: float = 300.0
    close: str = "journal"
    conflict: str = "fail"
    compact: str = "limit"
    inplace: str = "never"
    dirty_bytes: int = 256 << 20
    workers: int = 2


@dataclass(eq=False)
class DirtyShard:
    """A shard with pending chunks, and the state of publishing it. Only `DirtyShards` changes it.

    `first` and `last` are the times of the first and last pending write, `retry_at` the earliest time of the next
    attempt, all by the monotonic clock. `due`: publish now. `busy`: a thread publishes the shard. `publishing`: the
    paths of the chunks being published.
    """

    tree: ChunkDirs
    number: int
    key: str
    slots: int | None
    """The number of the array's chunks that the shard can hold; None if unknown."""
    targets: dict[str, Target] = field(default_factory=dict)
    first: float = 0.0
    last: float = 0.0
    due: bool = False
    busy: bool = False
    publishing: frozenset[str] = frozenset()
    unfit: dict[str, str] = field(default_factory=dict)
    """Chunks that do not fit into the shard, and why. A later write of another chunk may make them fit."""
    failure: BaseException | None = None
    retry_at: float = 0.0
    pause: float = RETRY_S
    seems_absent: bool = False
    """Whether a remote store probably has no such object. A wrong value costs requests."""

    @property
    def is_complete(self) -> bool:
        """Whether all chunks that the shard can hold are pending."""
        return self.slots is not None and len(self.targets) >= self.slots


class PublishPlan(NamedTuple):
    """What a publish does to a shard.

    `plan` is the shard's new content; None removes the shard. `done` are the chunks to be published, by path.
    `conflicts` and `unfit` are the chunks that are not, and why. `packed`: other stored chunks move.
    """

    plan: Plan | None
    done: dict[str, Taken]
    conflicts: dict[str, str]
    unfit: dict[str, str]
    packed: bool


class Job(Change):
    """One attempt to publish `chunks` of a shard.

    Attributes:
        outcome: what the attempt does to the shard.
        before: the version of the shard object that the attempt replaces; None if there is none.
        digests: the digests of the stored bytes of the chunks in `outcome.done`, by path; `SAME` if they stay.
        written: the bytes written to the store.
    """

    def __init__(
        self, backlog: Backlog, settings: Publishing, shard: DirtyShard, chunks: dict[str, Taken], writer: Writer
    ) -> None:
        self._backlog = backlog
        self._settings = settings
        self._shard = shard
        self._collection = shard.tree.collection
        self.chunks = chunks
        self._index = None if writer.local else rewriting.index_request(self._collection, shard.number)
        may_pack = writer.pins and settings.compact != "never"
        self._may_replace = may_pack and self._index is not None and self._may_be_all()
        self.outcome = PublishPlan(None, {}, {}, {}, packed=False)
        self.digests: dict[str, str | bool] = {}
        self.before: StoredVersion = None
        self._wanted: dict[Coords, str] = {}
        self._kept: dict[str, str] = {}
        self.written = self._old_size = 0
        self._pinned = ExitStack()

    @property
    def first(self) -> ByteRequest | None:
        """The part of the present object that `plan` will probably read; None if there is probably no object."""
        if self._shard.seems_absent and any(version.data is not None for _, version in self.chunks.values()):
            return None
        return self._index if self._index is not None and (self._may_replace or self._is_large()) else FIRST

    @property
    def in_place(self) -> int:
        """The size of the index entries that may be changed in place; 0 if the shard is replaced."""
        return rewriting.in_place(self._collection) if self._settings.inplace == "uint64" else 0

    def _may_be_all(self) -> bool:
        """Return whether the stored shard probably has no other chunks than those to be published."""
        coords = [target.coords for target, _ in self.chunks.values()]
        return self._shard.tree.shards.may_be_all(self._shard.number, coords)

    def _is_large(self) -> bool:
        """Return whether the stored shard is so large that `FIRST` is only a part of it."""
        with suppress(OSError, CorruptShardError):
            return self._shard.tree.shards.outermost.index.stat(self._shard.number).size > FIRST.stop
        return False

    def plan(self, old: Blob | None) -> Plan | None:
        """Return the plan of the shard's new content, given the present object; None removes the shard."""
        self.before = None if old is None else old.stat().version
        self._old_size = 0 if old is None else old.stat().size
        shard = StoredShard(self._collection, self._shard.number, old)
        if old is not None and not self._may_replace and self._old_size <= FIRST.stop:
            self._note_bases(shard)
        self.outcome = self._outcome(shard, may_replace=self._may_replace)
        self.written = 0 if self.outcome.plan is None else size_of(self.outcome.plan)
        planned = self.outcome.done.items()
        self.digests = {path: ABSENT if version.data is None else SAME for path, (_, version) in planned}
        self._kept = {} if old is None else self._digests_of_kept(shard)
        return self.outcome.plan

    def _outcome(self, old: StoredShard, *, may_replace: bool) -> PublishPlan:
        """Return how to publish the chunks.

        `may_replace`: write the shard anew, without its old bytes, if all its chunks are changed.
        """
        changed = self._conflicts(old)
        mergeable = {path: chunk for path, chunk in self.chunks.items() if path not in changed}
        refused = dict[Any, str]()
        puts = dict[Any, Put]()
        data = {path: version.data for path, (_, version) in mergeable.items() if version.data is not None}
        parts = self._pinned.enter_context(self._backlog.journal.using(data.values()))
        for path, part in zip(data, parts, strict=True):
            coords = self.chunks[path][0].coords
            try:
                puts[coords] = Put(self._content(path, part))
            except ValueError as e:
                refused[coords] = str(e)
        drops = {target.coords for target, version in mergeable.values() if version.data is None}
        anew = may_replace and self._is_replaced(old, puts.keys() | drops)
        packed = not anew and self._packs(old)
        base = StoredShard(self._collection, self._shard.number, None) if anew else old
        plan = base.plan(puts, drops, pack=packed, unfit=refused)
        if anew and refused:  # these chunks keep their old bytes
            return self._outcome(old, may_replace=False)
        unfit = {path: refused[target.coords] for path, (target, _) in self.chunks.items() if target.coords in refused}
        published = {path: chunk for path, chunk in mergeable.items() if path not in unfit}
        return PublishPlan(plan, published, changed, unfit, packed)

    def _is_replaced(self, old: StoredShard, changed: Set[Coords]) -> bool:
        """Return whether all chunks of the shard are changed, and it has the version over which programs wrote them.

        A shard with another version may have the new chunks already, from a publish that a crash interrupted.
        """
        bases = [version.base for _, version in self.chunks.values() if version.base.version is not None]
        if not bases or not all(base.is_in(self.before) for base in bases):
            return False
        return old.replaces_all(changed)

    def _packs(self, old: StoredShard) -> bool:
        """Return whether this publish removes dead bytes.

        That moves chunks: a reader that has cached the old index then reads wrong bytes.
        """
        compact = self._settings.compact
        if old.blob is None or compact == "never" or (compact == "limit" and self._old_size <= LIMIT):
            return False
        usage = old.usage()
        packs = usage.dead > usage.live / 2 if compact == "eager" else usage.dead > max(3 * usage.live, LIMIT)
        if packs:
            log.info("%s: is compacted: %d bytes are dead, %d live", self._shard.key, usage.dead, usage.live)
        return packs

    def _conflicts(self, old: StoredShard) -> dict[str, str]:
        """Return the chunks that may have been changed by another writer since they were written here, and why."""
        bases = {path: version.base for path, (_, version) in self.chunks.items()}
        removed = {path for path, (_, version) in self.chunks.items() if version.data is None}
        reasons = conflicts(bases, removed, self.before, lambda paths: self._digests(old, self._targets(paths)))
        if reasons and self._settings.conflict == "ours":
            text = "%s: another writer has changed this shard; conflict=ours replaces %s of its version, first %s"
            log.warning(text, self._shard.key, counted(len(reasons), "chunk"), next(iter(reasons)))
            return {}
        return reasons

    def _note_bases(self, old: StoredShard) -> None:
        """Note the digests of the chunks in `old` that programs have written over, in case another writer is faster.

        `old` is in memory as a whole.
        """
        relying = [path for path, (_, version) in self.chunks.items() if version.base.relies_on(self.before)]
        for path, digest in self._digests(old, self._targets(relying)).items():
            target, version = self.chunks[path]
            self.chunks[path] = target, version._replace(base=version.base.including(digest))

    def _digests_of_kept(self, old: StoredShard) -> dict[str, str]:
        """Return the digests of stored chunks that wait for a later publish, and only rely on the version of `old`.

        This publish replaces that version.
        """
        with self._backlog.lock:
            versions, targets = self._backlog.versions, dict(self._shard.targets)
            relying = {path for path in targets if versions[path].base.relies_on(self.before)}
        return self._digests(old, {path: targets[path] for path in relying - self.outcome.done.keys()})

    def _targets(self, paths: Iterable[str]) -> dict[str, Target]:
        return {path: self.chunks[path][0] for path in paths}

    def _digests(self, old: StoredShard, targets: Mapping[str, Target]) -> dict[str, str]:
        """Return the digests of chunks in a shard object, by path. Raise CorruptShardError."""
        chunks = old.stored_chunks([target.coords for target in targets.values()])
        try:
            return {path: digest_of(chunk) for path, chunk in zip(targets, chunks, strict=True)}
        except ValueError as e:  # another program shortens the file at this moment
            raise CorruptShardError(self._shard.tree.path, self._shard.key, str(e)) from e

    def _content(self, path: str, part: FilePart) -> Bytes:
        """Return the bytes to store: the part of the journal, unless it got them before it was known what they are.

        Note their digest for `verify`. Raise CorruptShardError if the journal's bytes are damaged or unreadable.
        """
        target, version = self.chunks[path]
        crc, transform = cast("Position", version.data).crc, None if version.is_encoded else target.transform
        try:
            if transform is None:
                self._wanted[target.coords] = digest_of_pieces(checked_pieces(part, crc))
                return part
            shown_bytes = read_part(part, crc)
        except OSError as e:
            raise CorruptShardError(self._shard.tree.path, path, e.strerror or str(e)) from e
        content = transform.store(target.coords, shown_bytes)
        self._wanted[target.coords] = digest_of_pieces([content])
        return content

    def verify(self, new: Blob) -> None:
        """Verify the chunks to be published in the new object, and note their digests.

        Raise ValueError if a chunk is missing, was not removed, or has other bytes than `plan` has planned.
        """
        planned = self.outcome.done
        shard = StoredShard(self._collection, self._shard.number, new)
        chunks = shard.stored_chunks([target.coords for target, _ in planned.values()])
        for (path, (target, version)), chunk in zip(planned.items(), chunks, strict=True):
            data = version.data
            is_second = self._collection.lead is not None and target.coords[-1] == 1
            wrong = (chunk is None) != (data is None or (is_second and not data.size))
            if chunk is not None and data is not None:
                self.digests[path] = digest_of(chunk)
                wrong |= self.digests[path] != self._wanted[target.coords]
            if wrong:
                raise ValueError(f"the new shard would not have {path} as it was written, so the old shard is kept")

    def begun(self, note: Begun) -> None:
        """Record the publish in the journal, so that recovery finds it on disk, before the shard is replaced."""
        if note.head:
            self.written -= self._old_size
        lsns = [version.lsn for _, version in self.outcome.done.values()]
        self._backlog.begin(note, lsns=lsns, entries=self.digests | self._kept)

    def done(self, stat: Stat | None) -> dict[str, Version]:
        """Return the published versions by path, with what is stored now as their base. `stat`: of the new shard."""
        now = None if stat is None else stat.version
        digests = {path: (digest,) if isinstance(digest, str) else () for path, digest in self.digests.items()}
        published = self.outcome.done.items()
        return {path: version._replace(base=Stored(now, digests[path])) for path, (_, version) in published}

    def close(self) -> None:
        """Unpin the chunks' bytes in the journal."""
        self._pinned.close()
