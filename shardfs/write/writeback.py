"""Write-back: put new versions of files into the journal, and publish them to their shards in batches.

`Backlog` holds the pending versions, `DirtyShards` tells which shards are due, and `Publisher` publishes them.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from shardfs.model.kinds import is_in, is_scratch
from shardfs.shards import rewriting
from shardfs.storage.blob_views import READ_ONLY_PAIR
from shardfs.storage.cache import nothing
from shardfs.storage.local import stat_of
from shardfs.write.dirty_shards import EARLY, DirtyShards
from shardfs.write.journal import RecordKind
from shardfs.write.pending import Backlog
from shardfs.write.publisher import FULL, OBSOLETE, Publisher
from shardfs.write.recover import park_scratch
from shardfs.write.reported_errors import Failures, Refused
from shardfs.write.stored import NOTHING, Stored

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardfs.model.blobs import Bytes
    from shardfs.model.values import Version as ObjectVersion
    from shardfs.storage.writers import Writer
    from shardfs.vfs.chunk_dirs import ChunkDirs, Target
    from shardfs.write.journal import Journal
    from shardfs.write.pending import Version
    from shardfs.write.publish_shard import Publishing

log = logging.getLogger(__name__)

SLOW = 0.8
"""Fill level of the journal from which on writers are slowed down. See also `EARLY` and `FULL`."""

EVERYTHING = 1 << 62
"""Bytes. Larger than any file; reads a whole file."""

QUICK_S, QUICK_BYTES = 0.002, 1 << 20
"""Limits in seconds and bytes below which writing a journal record counts as quick (see `WriteBuffer.is_quick`)."""

NAMED = 100
"""Upper limit of the orphans and errors that the status lists by name. There may be as many as chunks."""

EMPTY_NS = 60 * 10**9
"""Age in nanoseconds from which an empty chunk counts as an error."""

EMPTY = "is an empty file, which readers take for damage: write or remove it"


class Predecessor(NamedTuple):
    """What a new version of a path is written over. `WriteBuffer.predecessor` makes it before the lock is taken.

    Args:
        path: on the mount.
        target: the chunk at the path; None if the path is none of a chunk.
        version: the version that was pending then; None without one.
        replaced: `Backlog.replaced` then.
        base: what was stored for the path then.
    """

    path: str
    target: Target | None
    version: Version | None
    replaced: int
    base: Stored


class WriteBuffer:
    """The pending versions of a mount, and the threads that publish them. Thread-safe.

    Args:
        journal: an open journal, whose recovered records become the pending versions. It is read from: ESTALE tells
            that a version is not pending any more.
        writer: writes to the store.
        form_now: returns the present form of an array (`Forms.now`).
        shown_version: returns the version of a file that the mount shows unchanged (`StoreDirectories.shown_version`).
        settings: when and how shards are published.
        waiting: called before a thread waits.
        layout: the options that say how the mount shows the source (`Options.shown_as`).

    Raise OSError (EBUSY) if the journal has versions of a mount with another layout.
    """

    def __init__(
        self, journal: Journal, writer: Writer, form_now: Callable[[ChunkDirs], str | None],
        shown_version: Callable[[str], ObjectVersion], settings: Publishing, waiting: Callable[[], None] = nothing,
        layout: str = "",
    ) -> None:  # fmt: skip
        self.settings = settings
        self.backlog = Backlog(journal, layout)
        self.backlog.pending.require_layout(layout)
        self.journal = journal
        self._writer = writer
        self._shown_version = shown_version
        self._waiting = waiting
        self._lock = self.backlog.lock
        self.shards = DirtyShards(self.backlog, self.settings)
        self.failures = Failures()
        self.refused = Refused(self.failures)
        self.publisher = Publisher(self.backlog, self.shards, writer, self.failures, form_now)
        self._closed = False
        self._unwritable: set[str] = set()  # arrays whose reason was logged
        pending = self.backlog.pending
        self._damaged = [*journal.damaged_paths, *pending.lost]
        for loss in pending.losses():
            log.warning("%s", loss)
            journal.problems.append(loss)
        park_scratch(self.backlog)
        self.backlog.finish_begun(writer)

    def attach(self, published: Callable[[Mapping[str, Version]], None], is_held: Callable[[str], bool]) -> None:
        """Start publishing. See `Publisher.published` and `DirtyShards.is_held`."""
        self.publisher.published = published
        self.shards.is_held = is_held
        self.publisher.start()

    # ---- pending versions ----

    def is_stored(self, path: str, target: Target | None) -> bool:
        """Return whether the chunk's shard has the chunk, or a publish of the chunk is in progress.

        False without a target. Raise OSError or CorruptShardError if the index cannot be read.
        """
        if target is None:
            return False
        shard = self.shards.at(path)  # first: a shard that is no longer being published has the chunk
        if shard is not None and path in shard.publishing:
            return True
        return target.tree.shards.has(target.coords)

    def put(
        self,
        predecessor: Predecessor,
        data: Bytes,
        mtime_ns: int,
        mode: int,
        *,
        scratch: bool = False,
        is_encoded: bool = False,
    ) -> Version:
        """Add a new version of a whole file. When this returns, the version survives a crash of this process.

        `is_encoded`: `data` are the bytes that the shard is to have, and the mount shows others. Raise the errors of
        `Journal.append`, such as OSError (ENOSPC), and those of `predecessor`.
        """
        base = self._hold(predecessor)
        try:
            meta = {
                "path": predecessor.path,
                "mtime_ns": mtime_ns,
                "mode": mode,
                "scratch": scratch,
                "base": base.to_json(),
            }
            return self._add_version(RecordKind.PUT, predecessor, meta | {"stored": is_encoded}, data)
        finally:
            self._lock.release()

    def _add_version(
        self, kind: RecordKind, predecessor: Predecessor, meta: dict[str, Any], data: Bytes | None
    ) -> Version:
        """Add a version of a path, and assign it to its shard. The caller holds the lock."""
        form = "" if predecessor.target is None else predecessor.target.tree.collection.form
        version = self.backlog.add(kind, predecessor.path, meta | {"form": form}, data)
        self.refused.clear(predecessor.path)
        self.shards.assign(predecessor.path, predecessor.target)
        return version

    def keep(self, path: str, data: bytes, why: str, mtime_ns: int, mode: int) -> None:
        """Keep a metadata document in the journal, as a conflict with the reason `why`, until a user decides.

        Raise OSError as `make_room` and `Journal.append`.
        """
        self.make_room(len(data))
        meta = {"path": path, "mtime_ns": mtime_ns, "mode": mode, "document": True, "conflict": why}
        with self._lock:
            self.backlog.add(RecordKind.PUT, path, meta, data)
            self.publisher.counts["conflicts"] += 1
        self.failures.failed(path, OSError(errno.ESTALE, why, path))

    def drop(self, path: str) -> None:
        """Discard the pending version of a path, if there is one."""
        with self._lock:
            self.backlog.drop(path)
            self.shards.assign(path, None)

    def remove(self, predecessor: Predecessor) -> bool:
        """Remove a file: its pending version, and at the next publish its chunk in the shard.

        Return whether the shard has the chunk. Raise the errors of `put`.
        """
        self.is_stored(predecessor.path, predecessor.target)  # loads the index before the lock is taken
        base = self._hold(predecessor)
        try:
            if self.is_stored(predecessor.path, predecessor.target):
                self._add_version(RecordKind.DEL, predecessor, {"path": predecessor.path, "base": base.to_json()}, None)
                return True
            self.drop(predecessor.path)
            return False
        finally:
            self._lock.release()

    def rename(
        self, old: str, predecessor: Predecessor, old_target: Target | None, data: Bytes | None, mtime_ns: int,
        mode: int, *, scratch: bool = False, is_encoded: bool = False,
    ) -> Version:  # fmt: skip
        """Rename a file to the path of `predecessor`, and return its version.

        Args:
            old_target: the chunk that the old name stands for, if any. It is deleted from its shard.
            data: the whole file, if no version is pending for the old name. Else its bytes are read from the shard if
                the version was published after the caller looked.
            is_encoded: as for `put`.
        """
        self.is_stored(old, old_target)  # loads the index before the lock is taken
        base = self._hold(predecessor)
        try:
            removed, pending = old_target if self.is_stored(old, old_target) else None, self.backlog.versions.get(old)
            if data is None and old_target is not None and pending is None:
                removed = old_target
                data = bytes(old_target.tree.read_chunk(old_target.coords, 0, EVERYTHING))
            meta: dict[str, Any] = {
                "from": old,
                "to": predecessor.path,
                "gone": removed is not None,
                "base": base.to_json(),
            }
            meta |= {"mtime_ns": mtime_ns, "mode": mode, "scratch": scratch, "stored": is_encoded}
            if data is None and pending is not None:
                meta["lsn"] = pending.lsn
            elif removed is not None and pending is None:
                meta["from_base"] = self.predecessor(old, removed).base.to_json()
            version = self._add_version(RecordKind.MOVE, predecessor, meta, data)
            self.shards.assign(old, removed)
            return version
        finally:
            self._lock.release()

    def retarget(self, path: str, target: Target | None) -> bool:
        """Assign the pending version of a path to the shard of `target`, for the next publish; None: to no shard.

        A version that was written for an array of another form becomes an obsolete conflict. Return whether the path
        has an obsolete version, by this call or an earlier one; False if nothing is pending.
        """
        with self._lock:
            version = self.backlog.versions.get(path)
            if version is not None and target is not None:
                former = self.shards.target(path)
                form = version.form or ("" if former is None else former.tree.collection.form)
                if form not in ("", target.tree.collection.form):
                    self.publisher.refuse(path, OBSOLETE, obsolete=True)
            self.shards.assign(path, target)
            return path in self.backlog.versions and self.backlog.versions[path].obsolete

    def predecessor(self, path: str, target: Target | None) -> Predecessor:
        """Return what a new version of a path is written over, for `put`, `remove` and `rename`.

        Loads the chunk's index entry, so that a change under the caller's lock need not wait. Reads the chunk in a
        local store; a program that replaces remote chunks need not load them (docs/durability.md). Raise
        CorruptShardError if the index is damaged, or if bytes of a local chunk are missing; OSError if the store fails.
        """
        replaced, version = self.backlog.replaced, self.backlog.versions.get(path)
        if version is not None and not version.obsolete:
            base = version.base
        else:
            base = self._stored(path) if target is None else Stored.from_target(target, read=self._writer.local)
        return Predecessor(path, target, version, replaced, base)

    def _stored(self, path: str) -> Stored:
        """Return what the source has at the path of a file that is no chunk; a remote source: what the mount showed."""
        if is_scratch(path.rpartition("/")[2]):
            return NOTHING
        if (disk := self._writer.disk) is None:
            return NOTHING._replace(version=self._shown_version(path))
        with suppress(OSError):
            return NOTHING._replace(version=stat_of(disk.stat(path)).version)
        return NOTHING

    def _hold(self, predecessor: Predecessor) -> Stored:
        """Take the lock, and return what a new version of the path is written over now.

        The caller releases the lock. What was stored is read again if another thread has changed it meanwhile.
        """
        while True:
            with self._lock:
                if self._is_present(predecessor):
                    self._lock.acquire()  # once more, for the caller
                    return predecessor.base
            predecessor = self.predecessor(predecessor.path, predecessor.target)

    def _is_present(self, predecessor: Predecessor) -> bool:
        """Return whether neither the path was written nor its shard replaced since `predecessor` was noted."""
        if self.backlog.versions.get(predecessor.path) != predecessor.version:
            return False
        if predecessor.target is None or self.backlog.replaced == predecessor.replaced:
            return True
        shards = predecessor.target.tree.shards
        return not self.backlog.has_replaced(
            shards.key(shards.number_of(predecessor.target.coords)), predecessor.replaced
        )

    def require_writable(self, target: Target) -> None:
        """Raise OSError (usually EROFS) if the chunk cannot be written.

        Reasons: its collection is not writable, earlier versions are damaged in the journal, or its shard cannot be
        replaced.
        """
        path = target.tree.path
        if any(not damaged or is_in(damaged, path) for damaged in self._damaged):
            text = "earlier writes to this array are damaged in the journal; shardfs recover --salvage drops them"
            raise OSError(errno.EROFS, text, path)
        why = rewriting.unwritable(target.tree.collection)
        if why is None and target.tree.shards.is_pair(target.coords):
            why = READ_ONLY_PAIR
        if why is not None:
            if path not in self._unwritable:
                self._unwritable.add(path)
                log.warning("%s: refuses chunks: %s", path, why)
            raise OSError(errno.EROFS, why, path)
        number = target.tree.shards.number_of(target.coords)
        if (target.tree.first, number) in self.shards:
            return  # checked when the shard's first pending chunk was opened
        key = target.tree.shards.key(number)
        try:
            self._writer.require_writable(key)
        except OSError as e:
            log.warning("%s: refuses chunks: %s", key, e.strerror)
            raise

    def is_quick(self, target: Target | None, size: int) -> bool:
        """Return whether a `put` of this many bytes probably costs no more than a copy to the page cache.

        The caller then need not call `waiting`, because switching to another thread would cost as much.
        """
        return (
            size <= QUICK_BYTES
            and self.backlog.took_s <= QUICK_S
            and self.settings.close == "journal"
            and (target is None or target.is_verbatim)
        )

    def sync(self) -> None:
        """Sync the journal. When this returns, all pending versions survive a power failure."""
        self._waiting()
        self.journal.sync()

    def statvfs(self) -> os.statvfs_result:
        """Return the statistics of the journal's file system."""
        return os.statvfs(self.journal.directory)

    # ---- room ----

    def make_room(self, size: int) -> None:
        """Wait for room in the journal. Call this before `put`, without a lock. Raise as `Publisher.wait_for_room`."""
        fullness = self.backlog.fullness(size)
        if fullness < EARLY:
            return
        with self._lock:
            self.backlog.changed.notify_all()
        if fullness >= SLOW:
            self._waiting()
        if fullness >= FULL:
            self.publisher.wait_for_room(size)
        elif fullness >= SLOW:
            time.sleep(min(0.1 * size / (1 << 20), 0.1))

    # ---- publishing on request ----

    def drain(self, path: str, timeout: float | None = None) -> None:
        """Publish the pending chunks at and below a path, and wait for it.

        See `Publisher.drain` for time-out and errors.
        """
        self._waiting()
        self.publisher.drain(path, timeout)

    def flush(self, path: str = "", timeout: float | None = None) -> None:
        """Publish the pending chunks at and below a path, as `drain`. "" is the whole mount.

        Then raise OSError if a chunk there needs a user's decision: EINVAL if it does not fit, ESTALE for a conflict.
        """
        self.drain(path, timeout)
        for _, failure in self.shards.undecided(path):
            raise failure

    def publish(self, path: str, timeout: float | None = None) -> None:
        """Flush on a user's request. Also raise errors of earlier closes, because programs may have ignored them."""
        self.flush(path, timeout)
        if (failure := self.refused.first(path)) is not None:
            raise failure

    # ---- status ----

    def failure(self, path: str) -> BaseException | None:
        """Return the error that prevents publishing a path; None if there is none, or nothing is pending there."""
        with self._lock:
            shard = self.shards.at(path)
            if shard is not None and shard.failure is not None:
                return shard.failure
            if shard is not None and path in shard.unfit:
                return OSError(errno.EINVAL, shard.unfit[path])
            version = self.backlog.versions.get(path)
            if version is not None and version.conflict:
                return OSError(errno.ESTALE, version.conflict)
            is_empty = version is not None and version.data is not None and not version.data.size
            waits = is_empty and shard is not None and not shard.targets[path].tree.by_id
            return OSError(errno.EINVAL, EMPTY) if waits else None

    def left(self) -> list[str]:
        """Return the paths of all unpublished versions, except temporary files of programs."""
        return [path for path, version in list(self.backlog.versions.items()) if not version.scratch]

    def state(self) -> dict[str, Any]:
        """Return counters, orphans and errors for `status.json`."""
        with self._lock:
            versions = self.backlog.versions
            chunks = self.shards.paths()
            loose = versions.keys() - chunks
            orphans = [p for p, v in versions.items() if p in loose and not (v.scratch or v.is_document)]
            # Perhaps a program has ended in the middle of a write.
            before = time.time_ns() - EMPTY_NS
            empty = [p for p in chunks if (v := versions[p]).data and not v.data.size and v.mtime_ns < before]
            failing = {s.key: str(s.failure) for s in self.shards if s.failure is not None}
            failing |= {path: str(failure.strerror) for path, failure in self.shards.undecided()}
            failing |= dict.fromkeys(empty, EMPTY)
            return {
                "dirty_chunks": len(chunks),
                "dirty_shards": len([s for s in self.shards if s.targets]),
                "orphans": len(orphans),
                "orphan_paths": orphans[:NAMED],
                "journal": str(self.journal.directory),
                "journal_bytes": self.journal.nbytes,
                "journal_limit": self.journal.limit_bytes,
                "problems": list(self.journal.problems),
                "read_only": self.journal.read_only,
                "failing": len(failing),
                "errors": dict(islice(failing.items(), NAMED)),
                "refused": len(self.refused),
                "refused_paths": self.refused.state(NAMED),
                "written_bytes": self.backlog.written_bytes,
                **self.publisher.counts,
            }

    def close(self, timeout: float) -> list[str]:
        """Publish as much as possible within `timeout` seconds, and close the journal. Return the unpublished paths.

        Raise OSError if the journal cannot be synced; all threads have ended and the journal is closed even then.
        """
        if self._closed:
            return self.left()
        self.publisher.stop(timeout if self._is_synced() else 0)  # publishing needs the journal
        self._closed = True
        unpublished = self.left()
        self._writer.close()  # the lock in the store names the journal, which may be removed now
        self.journal.close(clean=not unpublished)
        return unpublished

    def _is_synced(self) -> bool:
        """Sync the journal; return whether that succeeded. An error may be the one that reports a restored journal."""
        for _ in range(2):
            with suppress(OSError):
                self.journal.sync()
                return True
        return False
