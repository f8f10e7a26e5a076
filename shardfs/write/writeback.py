"""What was written and is not published yet: in the journal, and from there to its shards, batch by batch.

One lock guards what is pending; nothing waits while it is held but a copy to the page cache. Publishing runs in threads
of its own, one shard at a time in each.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

from shardfs.codecs.decoders import decompressed
from shardfs.model.errors import ShardfsError, errno_of
from shardfs.shards import rewriting
from shardfs.storage.cache import nothing
from shardfs.storage.writers import Begun
from shardfs.write.failures import Failures, Refused, is_below
from shardfs.write.files import join
from shardfs.write.journal import RecordKind as Record
from shardfs.write.pending import Pending
from shardfs.write.publishing import MAX_RETRY_S, RETRY_S, UNLOOKED, DirtyShard, Extent, Job, Publishing
from shardfs.write.recover import losses, park_scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from shardfs.model.blobs import Bytes, Stat
    from shardfs.storage.writers import Writer
    from shardfs.vfs.chunk_dirs import Target
    from shardfs.write.buffers import Buffer
    from shardfs.write.journal import Journal, Position
    from shardfs.write.pending import Base, Version

log = logging.getLogger(__name__)

EARLY, SLOW, FULL = 0.5, 0.8, 0.95
"""How full the journal is when shards are published early, writers are slowed down, and have to wait."""

EVERYTHING = 1 << 62
"""Bytes: more than a file has."""

LASTING = {
    errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.EFBIG, errno.ENOTDIR,
    errno.EISDIR,
}  # fmt: skip
"""Errors that do not go away by trying again soon: it is tried when somebody asks, or after `LASTING_RETRY_S`."""

LASTING_RETRY_S = 30.0

LOOK_S = 0.5

QUICK_S, QUICK_BYTES = 0.002, 1 << 20
"""A record of the journal that took no longer, and one that has no more bytes, are nothing to wait for."""

NAMED = 100
"""So many orphans and errors are told by name: there may be as many as chunks."""

EMPTY_NS = 60 * 10**9
"""How old an empty chunk is when it counts as an error."""


class WriteBuffer:
    """Thread-safe.

    Args:
        journal: opened, and read: what it holds is pending.
        writer: of the store.
        waiting: called before a thread waits.
    """

    def __init__(
        self, journal: Journal, writer: Writer, settings: Publishing | None = None,
        waiting: Callable[[], None] = nothing,
    ) -> None:  # fmt: skip
        self.settings = settings or Publishing()
        self._journal, self._writer, self._waiting = journal, writer, waiting
        self._lock = threading.Condition(threading.RLock())
        self._pending = Pending()
        self._shards: dict[tuple[int, int], DirtyShard] = {}
        self._shard_at: dict[str, DirtyShard] = {}
        self.failures, self.refused = Failures(), Refused()
        self._early = min(EARLY * journal.limit_bytes, self.settings.dirty_bytes)
        self._stopping = self._slow = False
        self._threads: list[threading.Thread] = []
        self.published: Callable[[Mapping[str, Version]], None] = lambda done: None
        self.is_held: Callable[[str], bool] = lambda path: False
        self.failed: Callable[[str, OSError], object] = lambda path, failure: None
        self.counts = {"published_chunks": 0, "published_shards": 0, "published_bytes": 0, "written_bytes": 0,
                       "conflicts": 0, "failures": 0}  # fmt: skip
        self._recovered = max((record.lsn for record in journal.recovered), default=-1)
        for record in journal.recovered:
            self._journal.release(self._pending.apply(record))
        self._damaged = [*journal.damaged_paths, *self._pending.lost]
        for loss in losses(self._pending):
            log.warning("%s", loss)
            journal.problems.append(loss)
        park_scratch(journal, self._pending)
        for begun in self._pending.begun.values():
            writer.recover(Begun.told(begun))
        writer.recovered()

    def attach(self, published: Callable[[Mapping[str, Version]], None], is_held: Callable[[str], bool]) -> None:
        """Begin to publish. `published` is told what has arrived; paths that are `is_held` are open for writing."""
        self.published, self.is_held = published, is_held
        for n in range(self.settings.workers):
            thread = threading.Thread(target=self._work, name=f"shardfs-publish-{n}", daemon=True)
            self._threads.append(thread)
            thread.start()

    # ---- what is pending ----

    def versions(self) -> dict[str, Version]:
        """By path; `data` is None for what was deleted."""
        with self._lock:
            return dict(self._pending.versions)

    def holds(self, path: str) -> bool:
        """Whether something is pending for a path."""
        return path in self._pending.versions

    def target(self, path: str) -> Target | None:
        """Of which chunk a version is pending for a path."""
        with self._lock:
            shard = self._shard_at.get(path)
            return None if shard is None else shard.targets[path]

    def is_stored(self, path: str, target: Target | None) -> bool:
        """Whether the chunk's shard has it, or is just being given it."""
        if target is None:
            return False
        with self._lock:  # before the look at the shard: it is complete by the time it is not being published
            shard = self._shard_at.get(path)
            if shard is not None and path in shard.publishing:
                return True
        return target.tree.base(target.coords) is not None

    def put(
        self, path: str, data: Bytes, target: Target | None, mtime_ns: int, mode: int, *, scratch: bool = False
    ) -> Version:
        """A whole version of a file. It survives the end of this process when this returns."""
        meta = {"path": path, "mtime_ns": mtime_ns, "mode": mode, "scratch": scratch}
        with self._based(path, target) as base:
            self._apply(Record.PUT, {**meta, "base": base}, data)
            self.refused.forget(path)
            self.retarget(path, target)
            return self._pending.versions[path]

    def keep(self, path: str, data: bytes, why: str, mtime_ns: int, mode: int) -> None:
        """Keep a document that cannot be written, as another program has changed it, too, until a user decides."""
        self.make_room(len(data))
        meta = {"path": path, "mtime_ns": mtime_ns, "mode": mode, "document": True, "conflict": why}
        with self._lock:
            self._apply(Record.PUT, meta, data)
            self.counts["conflicts"] += 1
        self.failed(path, OSError(errno.ESTALE, why, path))

    def drop(self, path: str, target: Target | None) -> None:
        """The file is gone; `target` is given if its shard must be told."""
        with self._based(path, target) as base:
            known = self._pending.versions.get(path)
            if target is not None:
                self._apply(Record.DEL, {"path": path, "base": base})
            elif known is not None:
                self._apply(Record.DROP, {"path": path, "lsn": known.lsn})
            self.retarget(path, target)

    def move(
        self, old: str, new: str, target: Target | None, gone: Target | None, data: Bytes | None, mtime_ns: int,
        mode: int, *, scratch: bool = False, had: Target | None = None,
    ) -> Version:  # fmt: skip
        """Another name for a version; `data` if it is not pending so far. `gone` is given if the shard of the old name
        must be told, `had` if it was a chunk: it may have been published since the caller looked."""
        with self._based(new, target) as base:
            version = self._pending.versions.get(old)
            if data is None and version is None and had is not None:
                gone, tree = had, had.tree
                data = bytes(tree.read_chunk(tree.cached_as(had.coords), had.coords, 0, EVERYTHING))
            meta: dict[str, Any] = {"from": old, "to": new, "gone": gone is not None, "base": base}
            meta |= {"mtime_ns": mtime_ns, "mode": mode, "scratch": scratch}
            if data is None and version is not None:
                meta["lsn"] = version.lsn
            self._apply(Record.MOVE, meta, data)
            self.refused.forget(new)
            self.retarget(old, gone)
            self.retarget(new, target)
            return self._pending.versions[new]

    def _apply(self, kind: Record, meta: dict[str, Any], data: Bytes | None = None) -> None:
        began = time.monotonic()
        record = self._journal.append(kind, meta, data, reserve=data is None)
        self._slow = time.monotonic() - began > QUICK_S
        if record.data is not None:
            self.counts["written_bytes"] += record.data.size
        self._journal.release(self._pending.apply(record))

    @contextmanager
    def _based(self, path: str, target: Target | None) -> Iterator[Base]:
        """Hold the lock, and know which chunk a new version of a path is to replace: whoever changes that, too, is
        noticed. The shard is looked at before, without the lock."""
        while True:
            known = self._pending.versions.get(path)
            base = known.base if known is not None else "?" if target is None else self._found(target)
            with self._lock:
                if self._pending.versions.get(path) is known:  # else it was published meanwhile, and lies elsewhere
                    yield base
                    return

    def look(self, path: str, target: Target | None) -> None:
        """Have at hand where the chunk lies that a new version is to replace: before a lock is taken around `put`."""
        if target is not None and path not in self._pending.versions:
            target.tree.base(target.coords)

    def _found(self, target: Target) -> tuple[int, ...] | None:
        """Where a chunk lies in its shard, and, as that takes no request, its checksum: others may put theirs at the
        same place."""
        found = target.tree.base(target.coords)
        summed = None if found is None or not self._writer.local else target.tree.stored_sum(target.coords)
        return found if found is None or summed is None else (*found, summed)

    def retarget(self, path: str, target: Target | None) -> None:
        """Say of which shard a path is a chunk; None: of none, as far as is known now."""
        with self._lock:
            before = self._shard_at.pop(path, None)
            shard = None
            if target is not None and path in self._pending.versions:
                shard = self._shard_at[path] = self._dirty(target)
            if before is not None and before is not shard:
                before.targets.pop(path, None)
                if not before.targets and not before.busy:
                    self._shards.pop((before.tree.first, before.number), None)
                self._lock.notify_all()  # somebody may wait for it
            if target is None or shard is None:
                return
            if before not in (None, shard) or self._pending.versions[path].lsn <= self._recovered:
                shard.version = UNLOOKED  # the version that it replaces was noted for another shard, or before a crash
            shard.targets[path], shard.last = target, time.monotonic()
            shard.unfit.clear()
            if shard.failure is None:
                shard.retry_at = 0.0
            if self._is_complete(shard) or self._journal.nbytes > self._early:  # others are due in a while
                self._lock.notify_all()

    def _dirty(self, target: Target) -> DirtyShard:
        """The shard of a chunk, of which something is pending from now on."""
        number = target.tree.outermost_shard(target.coords)
        shard = self._shards.get((target.tree.first, number))
        if shard is None:
            shard = DirtyShard(target.tree, number, target.tree.outermost_key(number))
            shard.slots = rewriting.slots(target.tree.collection, number)
            self._shards[target.tree.first, number] = shard
        if not shard.targets:
            shard.first = time.monotonic()
            if not shard.busy:
                shard.version = target.tree.shard_version(number)
        return shard

    def require_writable(self, target: Target) -> None:
        """Raise OSError (EROFS as a rule) if the chunk cannot be written: because of its collection, because earlier
        versions are lost, or because its shard cannot be replaced."""
        path = target.tree.path
        if any(not damaged or is_below(damaged, path) for damaged in self._damaged):
            told = "what was written to it before is damaged in the journal (shardfs recover --salvage)"
            raise OSError(errno.EROFS, told, path)
        why = rewriting.unwritable(target.tree.collection)
        if why is None and target.tree.is_pair(target.coords):
            why = "shards in two files are shown only"  # a single file would take their place
        if why is not None:
            raise OSError(errno.EROFS, why, path)
        number = target.tree.outermost_shard(target.coords)
        if (target.tree.first, number) in self._shards:
            return  # it was looked at when the first chunk that waits for it was opened
        key = target.tree.outermost_key(number)
        try:
            self._writer.require_writable(key)
        except OSError as e:
            log.warning("%s: refuses chunks: %s", key, e.strerror)
            raise

    def is_quick(self, target: Target | None, size: int) -> bool:
        """Whether to take a version of so many bytes is a copy to the page cache and no more, as far as can be known:
        to let another thread take over before it would cost as much again."""
        plain = target is None or (not target.suffix and target.tree.transform_of(target.coords) is None)
        return plain and size <= QUICK_BYTES and not self._slow and self.settings.close == "journal"

    def require_valid(self, target: Target, buffer: Buffer) -> None:
        """Raise OSError (EINVAL) if the array cannot hold a chunk of these bytes."""
        transform = target.tree.transform_of(target.coords)
        if not buffer.size or (transform is None and not target.suffix):
            return
        data = buffer.read(0, buffer.size)
        try:
            data = decompressed(data, target.suffix) if target.suffix else data
            if transform is not None:
                transform.require(target.coords, data)
        except ValueError as e:
            log.warning("%s: chunk %s is refused: %s", target.tree.path or "/", target.coords, e)
            raise OSError(errno.EINVAL, str(e)) from e

    def read(self, data: Position, offset: int, size: int) -> bytes:
        """Bytes of a version."""
        return self._journal.read(data, offset, size)

    def sync(self) -> None:
        """All that was written survives a power failure when this returns."""
        self._waiting()
        self._journal.sync()

    def statvfs(self) -> os.statvfs_result:
        """Of the journal's disk."""
        return os.statvfs(self._journal.directory)

    # ---- room ----

    def make_room(self, size: int) -> None:
        """Wait while the journal is full and something is being published: before `put`, with no lock held.

        Raise OSError (ENOSPC).
        """
        journal = self._journal
        fullness = (journal.nbytes + size) / journal.limit_bytes
        if fullness < EARLY:
            return
        with self._lock:
            self._lock.notify_all()
        if fullness >= FULL:
            self._wait_for_room(size)
        elif fullness >= SLOW:
            self._waiting()
            time.sleep(min(0.1 * size / (1 << 20), 0.1))

    def _wait_for_room(self, size: int) -> None:
        self._waiting()
        journal, done = self._journal, self.counts["published_chunks"]
        end = time.monotonic() + self.settings.stall_s
        with self._lock:
            while (journal.nbytes + size) / journal.limit_bytes >= FULL and self._shards_pending():
                if self.counts["published_chunks"] != done:
                    done, end = self.counts["published_chunks"], time.monotonic() + self.settings.stall_s
                if time.monotonic() >= end or not self._can_progress():
                    raise OSError(errno.ENOSPC, "the journal is full, and nothing can be published")
                self._lock.wait(0.5)

    def _shards_pending(self) -> bool:
        return any(shard.targets for shard in self._shards.values())

    def _can_progress(self) -> bool:
        now = time.monotonic()
        return any(s.targets and (s.busy or s.failure is None or s.retry_at <= now + 1) for s in self._shards.values())

    # ---- publishing ----

    def _work(self) -> None:
        while (shard := self._next()) is not None:
            try:
                self._publish(shard)
            except BaseException as e:  # noqa: BLE001 - told to who writes, and logged
                self._failed(shard, e)
            finally:
                with self._lock:
                    shard.busy, shard.publishing = False, frozenset()
                    if not shard.targets:
                        self._shards.pop((shard.tree.first, shard.number), None)
                    self._lock.notify_all()

    def _next(self) -> DirtyShard | None:
        """A shard that is due; waits for one. None at the end."""
        with self._lock:
            while not self._stopping:
                now = time.monotonic()
                wait = max(self.settings.idle_s, LOOK_S)  # new ones are not due before
                # A document that is written makes new shards of its array's, of the same objects.
                busy = {shard.key for shard in self._shards.values() if shard.busy}
                for shard in (s for s in self._shards.values() if s.key not in busy):
                    when = self._due_at(shard, now)
                    if when <= now:
                        shard.busy = True
                        return shard
                    wait = min(wait, when - now)
                self._lock.wait(wait)
        return None

    def _due_at(self, shard: DirtyShard, now: float) -> float:
        """When a shard is to be published, by the monotonic clock."""
        if shard.busy or not shard.targets:
            return float("inf")
        if shard.due:
            return now
        if shard.failure is not None:
            return shard.retry_at
        soon = now + 0.05 if all(map(self.is_held, shard.targets)) else now
        when = max(min(shard.last + self.settings.idle_s, shard.first + self.settings.age_s), soon)
        if not self._is_complete(shard):
            when = soon if self._journal.nbytes > self._early else when
        elif any(map(self.is_held, shard.targets)):  # that the last ones are closed is known in a moment
            when = min(when, now + 0.05)
        else:
            when = now
        return max(when, shard.retry_at)

    def _is_complete(self, shard: DirtyShard) -> bool:
        return shard.slots is not None and len(shard.targets) >= shard.slots

    def _taken(self, shard: DirtyShard) -> dict[str, tuple[Target, Version]]:
        """What of a shard is published now: not what is open for writing, unless somebody asks; nor what is empty."""
        out = {}
        for path, target in shard.targets.items():
            version = self._pending.versions[path]
            empty = version.data is not None and version.data.size == 0 and not target.tree.by_id
            if not empty and not version.conflict and path not in shard.unfit and (shard.due or not self.is_held(path)):
                out[path] = target, version
        return out

    def _publish(self, shard: DirtyShard) -> None:
        with self._lock:
            taken = self._taken(shard)
            shard.publishing, shard.due = frozenset(taken), False
        if not taken:
            with self._lock:  # they are conflicts, do not fit, or are open: however full it is, it can wait
                shard.retry_at, shard.first, shard.last = time.monotonic() + 1, time.monotonic(), time.monotonic()
            return
        job = Job(self._journal, self.settings, shard, taken, self._begun)
        with self._lock:
            job.published = [b.get("entries", {}) for b in self._pending.begun.values() if b["key"] == shard.key]
        try:
            stat = self._writer.update(shard.key, job.make, job.begun, job.check, job.in_place)
            self._arrived(shard, job, stat)
        finally:  # by now nobody reads from the journal what is in the shard
            job.close()

    def _begun(self, note: Begun, lsns: list[int], entries: Mapping[str, Extent]) -> None:
        with self._lock:
            self._apply(Record.BEGIN, {**note._asdict(), "lsns": lsns, "entries": entries})
        self._journal.sync()

    def _entries(self, job: Job, done: Mapping[str, Version]) -> dict[str, Extent]:
        """All that was published; and where it lies now, if a newer version is pending already. The lock is held: one
        that came behind this look would be taken for a conflict."""
        out: dict[str, Extent] = dict.fromkeys(done)
        for path, version in done.items():
            target, (directory, _, name) = job.taken[path][0], path.rpartition("/")
            others = (join(directory, other) for other in target.tree.other_names(os.fsencode(name)))
            for known in (path, *others):
                newest = self._pending.versions.get(known)
                if newest is not None and newest.lsn != version.lsn:
                    out[known] = job.extent(path)
        return out

    def _arrived(self, shard: DirtyShard, job: Job, stat: Stat | None) -> None:
        done = job.done()
        shard.tree.renew([target.coords for target, _ in job.taken.values()], moved=job.packed)
        with self._lock:
            meta = {"key": shard.key, "lsns": [v.lsn for v in done.values()], "entries": self._entries(job, done)}
            self._apply(Record.DONE, meta)
            shard.version = None if stat is None else stat.version
            shard.failure, shard.pause, shard.retry_at = None, RETRY_S, 0.0
            for path in done:
                if path not in self._pending.versions:
                    shard.targets.pop(path, None)
                    self.retarget(path, None)  # a document may have made it another shard's meanwhile
            self._set_aside(shard, job)
            self.counts["published_chunks"] += len(done)
            self.counts["published_shards"] += 1
            self.counts["published_bytes"] += job.written
            for path in job.conflicts:
                self._conflict(path, job.taken[path][1], job.conflicts[path])
        self.published(done)

    def _set_aside(self, shard: DirtyShard, job: Job) -> None:
        """Chunks that do not fit. Half a mesh is no error: the other file may come."""
        for path, why in job.unfit.items():
            known = self._pending.versions.get(path)
            if known is not None and known.lsn == job.taken[path][1].lsn:
                shard.unfit[path] = why
                if shard.tree.collection.lead is None:
                    self.note_failure(path, OSError(errno.EINVAL, why, path))

    def _conflict(self, path: str, version: Version, why: str) -> None:
        self._apply(Record.CONFLICT, {"path": path, "lsn": version.lsn, "why": why})
        self.counts["conflicts"] += 1
        self.note_failure(path, OSError(errno.ESTALE, f"somebody else changed it, too: {why}", path))

    def _failed(self, shard: DirtyShard, failure: BaseException) -> None:
        expected = isinstance(failure, OSError | ShardfsError)
        if not expected:
            log.error("%s: publishing failed: this is a bug", shard.key, exc_info=failure)
        number = errno_of(failure)
        with self._lock:
            shard.retry_at = time.monotonic() + (shard.pause if _passes(failure) else LASTING_RETRY_S)
            shard.pause = min(2 * shard.pause, MAX_RETRY_S)
            known = shard.failure
            shard.failure = failure
            self.counts["failures"] += 1
            if known is None or str(known) != str(failure):
                log.warning("%s: cannot be published, and stays in the journal: %s", shard.key, failure)
                self.note_failure(shard.tree.path, OSError(number, f"{shard.key}: {failure}"))

    # ---- errors ----

    def note_failure(self, path: str, failure: OSError) -> None:
        """As `Failures.note`; and whoever wants to know is told at once."""
        self.failures.note(path, failure)
        self.failed(path, failure)

    def refuse(self, path: str, failure: OSError) -> None:
        """A program closes or syncs a file, and its new version cannot be kept. The caller raises the error."""
        if not self.refused:
            log.warning("%s: was refused when it was closed: %s", path, failure)
            self.failed(path, failure)
        self.refused.note(path, failure)

    def count(self, path: str) -> int:
        """How much is pending at and below a path."""
        with self._lock:
            return sum(is_below(p, path) for p in self._shard_at)

    def failure(self, path: str) -> BaseException | None:
        """Why a path is not published; None if nothing is known to be wrong."""
        with self._lock:
            shard = self._shard_at.get(path)
            if shard is not None and shard.failure is not None:
                return shard.failure
            if shard is not None and path in shard.unfit:
                return OSError(errno.EINVAL, shard.unfit[path])
            version = self._pending.versions.get(path)
            return OSError(errno.ESTALE, version.conflict) if version is not None and version.conflict else None

    # ---- the end ----

    def flush(self, path: str = "", timeout: float | None = None) -> None:
        """Publish what is pending at and below a path. Raise OSError if something of it cannot be, or not in time."""
        self.drain(path, timeout)
        with self._lock:
            self._raise_conflicts(path)

    def publish(self, path: str, timeout: float | None = None) -> None:
        """As `flush`, for a user: raise also what programs were told when they closed files, and may have ignored."""
        self.flush(path, timeout)
        if (failure := self.refused.first(path)) is not None:
            raise failure

    def drain(self, path: str, timeout: float | None = None) -> None:
        """As `flush`, but what waits for somebody to decide (conflicts, chunks that do not fit) is passed over."""
        self._waiting()
        end = time.monotonic() + (timeout if timeout is not None else 1e9)
        with self._lock:
            shards = [s for s in self._shards.values() if any(is_below(p, path) for p in s.targets)]
            wanted = {s: {p: self._pending.versions[p].lsn for p in s.targets if is_below(p, path)} for s in shards}
            for shard in shards:
                shard.due, shard.failure, shard.retry_at = True, None, 0.0
            self._lock.notify_all()
            while left := [s for s in shards if self._waits_for(s, wanted[s])]:
                self._lock.notify_all()
                for shard in left:
                    if shard.failure is not None and not shard.busy:
                        number = errno_of(shard.failure)
                        raise OSError(number, f"{shard.key}: {shard.failure}") from shard.failure
                if time.monotonic() >= end:
                    raise TimeoutError(errno.ETIMEDOUT, "not all was published in time")
                self._lock.wait(min(end - time.monotonic(), 1.0))

    def _waits_for(self, shard: DirtyShard, lsns: Mapping[str, int]) -> bool:
        """Whether versions are pending that could be published."""
        if shard.busy:
            return True
        if shard.failure is not None:
            return bool(shard.targets)
        shard.due = True
        taken = self._taken(shard)
        shard.due = any(path in taken and taken[path][1].lsn <= lsn for path, lsn in lsns.items())
        return shard.due

    def _may_arrive(self, shard: DirtyShard) -> bool:
        """Whether something of it is published soon, if nobody does anything about what is wrong."""
        return shard.busy or (bool(self._taken(shard)) and (shard.failure is None or _passes(shard.failure)))

    def _raise_conflicts(self, path: str) -> None:
        for shard in self._shards.values():
            for p, why in shard.unfit.items():
                if is_below(p, path):
                    raise OSError(errno.EINVAL, why, p)
        for p, version in self._pending.versions.items():
            if version.conflict and is_below(p, path):
                raise OSError(errno.ESTALE, version.conflict, p)

    def left(self) -> list[str]:
        """Paths of what is not published yet, or cannot be; temporary names of tools are not among them."""
        with self._lock:
            return [path for path, version in self._pending.versions.items() if not version.scratch]

    def state(self) -> dict[str, Any]:
        """For `status.json`."""
        with self._lock:
            failing = {s.key: str(s.failure) for s in self._shards.values() if s.failure is not None}
            failing |= {path: why for s in self._shards.values() for path, why in s.unfit.items()}
            failing |= {path: v.conflict for path, v in self._pending.versions.items() if v.conflict}
            failing |= {path: "has no bytes, which readers take for damage" for path in self._long_empty()}
            versions = self._pending.versions.items()
            orphans = [p for p, v in versions if not (v.scratch or v.is_document or p in self._shard_at)]
            return {
                "dirty_chunks": len(self._shard_at),
                "dirty_shards": len([s for s in self._shards.values() if s.targets]),
                "orphans": len(orphans),
                "orphan_paths": orphans[:NAMED],
                "journal": str(self._journal.directory),
                "journal_bytes": self._journal.nbytes,
                "journal_limit": self._journal.limit_bytes,
                "problems": list(self._journal.problems),
                "read_only": self._journal.read_only,
                "failing": len(failing),
                "errors": dict(islice(failing.items(), NAMED)),
                "refused": len(self.refused),
                "refused_paths": self.refused.state(NAMED),
                **self.counts,
            }

    def _long_empty(self) -> list[str]:
        """Chunks that were left empty, maybe by a program that ended in the middle of writing."""
        before = time.time_ns() - EMPTY_NS
        empty = (path for path in self._shard_at if (v := self._pending.versions[path]).data and not v.data.size)
        return [path for path in empty if self._pending.versions[path].mtime_ns < before]

    def close(self, timeout: float) -> list[str]:
        """Publish what can be, within so many seconds, and close the journal. What is left."""
        if self._stopping:  # nobody publishes any more
            return self.left()
        try:
            self._journal.sync()
        except OSError:  # raised once by a journal that another program has removed, and that was begun anew
            self._journal.sync()
        end = time.monotonic() + timeout
        with self._lock:
            for shard in self._shards.values():
                shard.due, shard.failure, shard.retry_at = True, None, 0.0
            self._lock.notify_all()
            while (wait := end - time.monotonic()) > 0 and any(map(self._may_arrive, self._shards.values())):
                self._lock.wait(min(wait, 1.0))
            self._stopping = True
            self._lock.notify_all()
        for thread in self._threads:
            thread.join(10)
        left = self.left()
        self._writer.close()  # the lock in the store names the journal, which may be removed now
        self._journal.close(clean=not left)
        return left


def _passes(failure: BaseException) -> bool:
    """Whether what went wrong may be right again by itself, soon."""
    return isinstance(failure, OSError) and errno_of(failure) not in LASTING
