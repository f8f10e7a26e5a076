"""Write-back: put new versions of files into the journal, and publish them to their shards in batches.

One lock guards the pending versions. The only slow operation under the lock is a copy to the page cache. Worker threads
publish the shards; each worker publishes one shard at a time.
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
from shardfs.write.journal import RecordKind
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
"""Fill levels of the journal: shards are published early, writers are slowed down, writers wait."""

EVERYTHING = 1 << 62
"""Bytes. Larger than any file; reads a whole file."""

LASTING = {
    errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.EFBIG, errno.ENOTDIR,
    errno.EISDIR,
}  # fmt: skip
"""Errors that a quick retry does not fix. The next attempt is after `LASTING_RETRY_S`, or when a flush asks for it."""

LASTING_RETRY_S = 30.0

LOOK_S = 0.5

QUICK_S, QUICK_BYTES = 0.002, 1 << 20
"""Limits in seconds and bytes below which writing a journal record counts as quick (see `WriteBuffer.is_quick`)."""

NAMED = 100
"""Upper limit of the orphans and errors that the status lists by name. There may be as many as chunks."""

EMPTY_NS = 60 * 10**9
"""Age in nanoseconds from which an empty chunk counts as an error."""


class WriteBuffer:
    """The pending versions of a mount, and the threads that publish them. Thread-safe.

    Args:
        journal: an open journal. Its recovered records become pending versions.
        writer: writes to the store.
        settings: when and how shards are published.
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
            writer.recover(Begun.from_json(begun))
        writer.recovered()

    def attach(self, published: Callable[[Mapping[str, Version]], None], is_held: Callable[[str], bool]) -> None:
        """Start the publishing threads.

        `published` is called after each publish, with the published versions by path. `is_held` returns whether a path
        is open for writing; such a path is published only on request.
        """
        self.published, self.is_held = published, is_held
        for n in range(self.settings.workers):
            thread = threading.Thread(target=self._work, name=f"shardfs-publish-{n}", daemon=True)
            self._threads.append(thread)
            thread.start()

    # ---- pending versions ----

    def versions(self) -> dict[str, Version]:
        """Return all pending versions by path. A deleted file has `data` None."""
        with self._lock:
            return dict(self._pending.versions)

    def holds(self, path: str) -> bool:
        """Return whether a version is pending for a path."""
        return path in self._pending.versions

    def target(self, path: str) -> Target | None:
        """Return the chunk that the pending version of a path replaces; None if there is none."""
        with self._lock:
            shard = self._shard_at.get(path)
            return None if shard is None else shard.targets[path]

    def is_stored(self, path: str, target: Target | None) -> bool:
        """Return whether the chunk's shard has the chunk, or a publish of the chunk is in progress."""
        if target is None:
            return False
        with self._lock:  # first: a shard that is no longer being published has the chunk
            shard = self._shard_at.get(path)
            if shard is not None and path in shard.publishing:
                return True
        return target.tree.base(target.coords) is not None

    def put(
        self, path: str, data: Bytes, target: Target | None, mtime_ns: int, mode: int, *, scratch: bool = False
    ) -> Version:
        """Add a new version of a whole file. When this returns, the version survives a crash of this process."""
        meta = {"path": path, "mtime_ns": mtime_ns, "mode": mode, "scratch": scratch}
        with self._based(path, target) as base:
            self._apply(RecordKind.PUT, {**meta, "base": base}, data)
            self.refused.forget(path)
            self.retarget(path, target)
            return self._pending.versions[path]

    def keep(self, path: str, data: bytes, why: str, mtime_ns: int, mode: int) -> None:
        """Keep a metadata document as a conflict until a user decides, because another program has changed it too."""
        self.make_room(len(data))
        meta = {"path": path, "mtime_ns": mtime_ns, "mode": mode, "document": True, "conflict": why}
        with self._lock:
            self._apply(RecordKind.PUT, meta, data)
            self.counts["conflicts"] += 1
        self.failed(path, OSError(errno.ESTALE, why, path))

    def drop(self, path: str, target: Target | None) -> None:
        """Remove a file. With `target`, its shard loses the chunk too; without, only the pending version is dropped."""
        with self._based(path, target) as base:
            known = self._pending.versions.get(path)
            if target is not None:
                self._apply(RecordKind.DEL, {"path": path, "base": base})
            elif known is not None:
                self._apply(RecordKind.DROP, {"path": path, "lsn": known.lsn})
            self.retarget(path, target)

    def move(
        self, old: str, new: str, target: Target | None, gone: Target | None, data: Bytes | None, mtime_ns: int,
        mode: int, *, scratch: bool = False, had: Target | None = None,
    ) -> Version:  # fmt: skip
        """Rename a file and return its version.

        Args:
            target: the chunk that the new name stands for, if any.
            gone: the chunk of the old name, to be deleted from its shard.
            data: the whole file, if no version is pending for the old name.
            had: the chunk of the old name, if a version was pending. Its bytes are read from the shard if the version
                was published after the caller looked.
        """
        with self._based(new, target) as base:
            version = self._pending.versions.get(old)
            if data is None and version is None and had is not None:
                gone, tree = had, had.tree
                data = bytes(tree.read_chunk(tree.cached_as(had.coords), had.coords, 0, EVERYTHING))
            meta: dict[str, Any] = {"from": old, "to": new, "gone": gone is not None, "base": base}
            meta |= {"mtime_ns": mtime_ns, "mode": mode, "scratch": scratch}
            if data is None and version is not None:
                meta["lsn"] = version.lsn
            self._apply(RecordKind.MOVE, meta, data)
            self.refused.forget(new)
            self.retarget(old, gone)
            self.retarget(new, target)
            return self._pending.versions[new]

    def _apply(self, kind: RecordKind, meta: dict[str, Any], data: Bytes | None = None) -> None:
        began = time.monotonic()
        record = self._journal.append(kind, meta, data, reserve=data is None)
        self._slow = time.monotonic() - began > QUICK_S
        if record.data is not None:
            self.counts["written_bytes"] += record.data.size
        self._journal.release(self._pending.apply(record))

    @contextmanager
    def _based(self, path: str, target: Target | None) -> Iterator[Base]:
        """Hold the lock, and give the extent of the stored chunk that a new version of the path replaces.

        A later publish compares this extent with the shard to detect changes by other writers. The shard is read before
        the lock is taken.
        """
        while True:
            known = self._pending.versions.get(path)
            base = known.base if known is not None else "?" if target is None else self._found(target)
            with self._lock:
                if self._pending.versions.get(path) is known:  # else a publish has moved the chunk meanwhile
                    yield base
                    return

    def look(self, path: str, target: Target | None) -> None:
        """Load the index entry of the chunk into the cache, so that a `put` under the caller's lock need not wait."""
        if target is not None and path not in self._pending.versions:
            target.tree.base(target.coords)

    def _found(self, target: Target) -> tuple[int, ...] | None:
        """Return the chunk's extent in its shard; None if absent.

        In a local store, the extent includes the crc32c: another writer may store a different chunk in the same place.
        """
        return target.tree.base(target.coords, summed=self._writer.local)

    def retarget(self, path: str, target: Target | None) -> None:
        """Assign the pending version of a path to the shard of `target`; None: to no shard for now."""
        with self._lock:
            before = self._shard_at.pop(path, None)
            shard = None
            if target is not None and path in self._pending.versions:
                shard = self._shard_at[path] = self._dirty(target)
            if before is not None and before is not shard:
                before.targets.pop(path, None)
                if not before.targets and not before.busy:
                    self._shards.pop((before.tree.first, before.number), None)
                self._lock.notify_all()  # `drain` may wait for this shard
            if target is None or shard is None:
                return
            if before not in (None, shard) or self._pending.versions[path].lsn <= self._recovered:
                shard.version = UNLOOKED  # the base was noted for another shard, or before a crash
            shard.targets[path], shard.last = target, time.monotonic()
            shard.unfit.clear()
            if shard.failure is None:
                shard.retry_at = 0.0
            if self._is_complete(shard) or self._journal.nbytes > self._early:  # other shards are due later
                self._lock.notify_all()

    def _dirty(self, target: Target) -> DirtyShard:
        """Return the shard of a chunk, created and added to the pending shards if necessary."""
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
        """Raise OSError (usually EROFS) if the chunk cannot be written.

        Reasons: its collection is not writable, earlier versions are damaged in the journal, or its shard cannot be
        replaced.
        """
        path = target.tree.path
        if any(not damaged or is_below(damaged, path) for damaged in self._damaged):
            told = "what was written to it before is damaged in the journal (shardfs recover --salvage)"
            raise OSError(errno.EROFS, told, path)
        why = rewriting.unwritable(target.tree.collection)
        if why is None and target.tree.is_pair(target.coords):
            why = "shards in two files are shown only"  # publishing would replace both by a single file
        if why is not None:
            raise OSError(errno.EROFS, why, path)
        number = target.tree.outermost_shard(target.coords)
        if (target.tree.first, number) in self._shards:
            return  # checked when the shard's first pending chunk was opened
        key = target.tree.outermost_key(number)
        try:
            self._writer.require_writable(key)
        except OSError as e:
            log.warning("%s: refuses chunks: %s", key, e.strerror)
            raise

    def is_quick(self, target: Target | None, size: int) -> bool:
        """Return whether a `put` of this many bytes probably costs no more than a copy to the page cache.

        The caller then need not call `waiting`, because switching to another thread would cost as much.
        """
        plain = target is None or (not target.suffix and target.tree.transform_of(target.coords) is None)
        return plain and size <= QUICK_BYTES and not self._slow and self.settings.close == "journal"

    def require_valid(self, target: Target, buffer: Buffer) -> None:
        """Raise OSError (EINVAL) if the bytes are no valid chunk of the array."""
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
        """Return bytes of a pending version, like `Journal.read`."""
        return self._journal.read(data, offset, size)

    def sync(self) -> None:
        """Sync the journal. When this returns, all pending versions survive a power failure."""
        self._waiting()
        self._journal.sync()

    def statvfs(self) -> os.statvfs_result:
        """Return the statistics of the journal's file system."""
        return os.statvfs(self._journal.directory)

    # ---- room ----

    def make_room(self, size: int) -> None:
        """Wait for room in the journal. Call this before `put`, without a lock.

        Raise OSError (ENOSPC) if the journal is full and no shard can be published, or none has been for `stall_s`
        seconds.
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
            except BaseException as e:  # noqa: BLE001 - logged, and reported to the writing program
                self._failed(shard, e)
            finally:
                with self._lock:
                    shard.busy, shard.publishing = False, frozenset()
                    if not shard.targets:
                        self._shards.pop((shard.tree.first, shard.number), None)
                    self._lock.notify_all()

    def _next(self) -> DirtyShard | None:
        """Wait for a shard that is due, mark it busy and return it. None if the buffer is closing."""
        with self._lock:
            while not self._stopping:
                now = time.monotonic()
                wait = max(self.settings.idle_s, LOOK_S)  # a new shard is not due earlier
                # A new metadata document replaces the shards of its array by new ones with the same keys.
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
        """Return when to publish a shard, by the monotonic clock."""
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
        elif any(map(self.is_held, shard.targets)):  # the last files may just be closing
            when = min(when, now + 0.05)
        else:
            when = now
        return max(when, shard.retry_at)

    def _is_complete(self, shard: DirtyShard) -> bool:
        return shard.slots is not None and len(shard.targets) >= shard.slots

    def _taken(self, shard: DirtyShard) -> dict[str, tuple[Target, Version]]:
        """Return the chunks of a shard to publish now.

        Omits empty chunks, conflicts, chunks that do not fit, and (unless a flush asks for the shard) open files.
        """
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
            with self._lock:  # nothing can be published now: look again in a second, even if the journal is full
                shard.retry_at, shard.first, shard.last = time.monotonic() + 1, time.monotonic(), time.monotonic()
            return
        job = Job(self._journal, self.settings, shard, taken, self._begun)
        with self._lock:
            job.published = [b.get("entries", {}) for b in self._pending.begun.values() if b["key"] == shard.key]
        try:
            stat = self._writer.update(shard.key, job.make, job.begun, job.check, job.in_place)
            self._arrived(shard, job, stat)
        finally:  # the pinned data are not read any more
            job.close()

    def _begun(self, note: Begun, lsns: list[int], entries: Mapping[str, Extent]) -> None:
        with self._lock:
            self._apply(RecordKind.BEGIN, {**note._asdict(), "lsns": lsns, "entries": entries})
        self._journal.sync()

    def _entries(self, job: Job, done: Mapping[str, Version]) -> dict[str, Extent]:
        """Return the entries of a DONE record: all published paths, with the new extent if a newer version is pending.

        The lock is held until the record is written. Otherwise a version added in between would look like a conflict.
        """
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
            self._apply(RecordKind.DONE, meta)
            shard.version = None if stat is None else stat.version
            shard.failure, shard.pause, shard.retry_at = None, RETRY_S, 0.0
            for path in done:
                if path not in self._pending.versions:
                    shard.targets.pop(path, None)
                    self.retarget(path, None)  # a new document may have assigned it to another shard meanwhile
            self._set_aside(shard, job)
            self.counts["published_chunks"] += len(done)
            self.counts["published_shards"] += 1
            self.counts["published_bytes"] += job.written
            for path in job.conflicts:
                self._conflict(path, job.taken[path][1], job.conflicts[path])
        self.published(done)

    def _set_aside(self, shard: DirtyShard, job: Job) -> None:
        """Note the chunks that do not fit. Half of a mesh is no error, because its other file may still be written."""
        for path, why in job.unfit.items():
            known = self._pending.versions.get(path)
            if known is not None and known.lsn == job.taken[path][1].lsn:
                shard.unfit[path] = why
                if shard.tree.collection.lead is None:
                    self.note_failure(path, OSError(errno.EINVAL, why, path))

    def _conflict(self, path: str, version: Version, why: str) -> None:
        self._apply(RecordKind.CONFLICT, {"path": path, "lsn": version.lsn, "why": why})
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
        """Note an error for the handles of a path (see `Failures`), and report it to the `failed` callback at once."""
        self.failures.note(path, failure)
        self.failed(path, failure)

    def refuse(self, path: str, failure: OSError) -> None:
        """Note that a close or sync failed and the new version is lost. The caller raises the error."""
        if not self.refused:
            log.warning("%s: was refused when it was closed: %s", path, failure)
            self.failed(path, failure)
        self.refused.note(path, failure)

    def count(self, path: str) -> int:
        """Return the number of pending chunks at and below a path."""
        with self._lock:
            return sum(is_below(p, path) for p in self._shard_at)

    def failure(self, path: str) -> BaseException | None:
        """Return the error that prevents publishing a path; None if there is none."""
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
        """Publish the pending chunks at and below a path.

        Raise OSError if a chunk cannot be published, including conflicts; TimeoutError after `timeout` seconds.
        """
        self.drain(path, timeout)
        with self._lock:
            self._raise_conflicts(path)

    def publish(self, path: str, timeout: float | None = None) -> None:
        """Flush on a user's request. Also raise errors of earlier closes, because programs may have ignored them."""
        self.flush(path, timeout)
        if (failure := self.refused.first(path)) is not None:
            raise failure

    def drain(self, path: str, timeout: float | None = None) -> None:
        """Flush, but ignore chunks that need a user's decision: conflicts and chunks that do not fit."""
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
        """Return whether a flush must still wait for the shard. `lsns` are the versions to publish, by path."""
        if shard.busy:
            return True
        if shard.failure is not None:
            return bool(shard.targets)
        shard.due = True
        taken = self._taken(shard)
        shard.due = any(path in taken and taken[path][1].lsn <= lsn for path, lsn in lsns.items())
        return shard.due

    def _may_arrive(self, shard: DirtyShard) -> bool:
        """Return whether the shard is being published, or can be published without a user's help."""
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
        """Return the paths of all unpublished versions, except temporary files of programs."""
        with self._lock:
            return [path for path, version in self._pending.versions.items() if not version.scratch]

    def state(self) -> dict[str, Any]:
        """Return counters, orphans and errors for `status.json`."""
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
        """Return the chunks that have been empty for long, perhaps because a program ended in the middle of a write."""
        before = time.time_ns() - EMPTY_NS
        empty = (path for path in self._shard_at if (v := self._pending.versions[path]).data and not v.data.size)
        return [path for path in empty if self._pending.versions[path].mtime_ns < before]

    def close(self, timeout: float) -> list[str]:
        """Publish as much as possible within `timeout` seconds, and close the journal. Return the unpublished paths."""
        if self._stopping:  # closed before
            return self.left()
        try:
            self._journal.sync()
        except OSError:  # raised once if another program removed the journal and it was restored
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
    """Return whether a quick retry may succeed."""
    return isinstance(failure, OSError) and errno_of(failure) not in LASTING
