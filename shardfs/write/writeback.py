"""Write-back: put new versions of files into the journal, and publish them to their shards in batches.

`Backlog` holds the pending versions, `DirtyShards` tells which shards are due, and `Publisher` publishes them.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from shardfs.model.changes import Begun
from shardfs.model.kinds import is_in, is_scratch
from shardfs.shards import rewriting
from shardfs.storage.blob_views import READ_ONLY_PAIR
from shardfs.storage.cache import nothing
from shardfs.storage.local import stat_of
from shardfs.write.dirty_shards import EARLY, DirtyShards
from shardfs.write.failures import Failures, Refused
from shardfs.write.journal import RecordKind
from shardfs.write.pending import Backlog
from shardfs.write.publisher import FULL, OBSOLETE, Publisher
from shardfs.write.publishing import Publishing
from shardfs.write.recover import park_scratch
from shardfs.write.stored import NOTHING, Stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from shardfs.model.blobs import Bytes
    from shardfs.storage.writers import Writer
    from shardfs.vfs.chunk_dirs import ChunkDirs, Target
    from shardfs.write.journal import Journal, Position
    from shardfs.write.pending import Version

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


class Look(NamedTuple):
    """What was stored for the chunk at a path, when `version` was pending and `Backlog.replaced` was `replaced`."""

    path: str
    target: Target | None
    version: Version | None
    replaced: int
    base: Stored


class WriteBuffer:
    """The pending versions of a mount, and the threads that publish them. Thread-safe.

    Args:
        journal: an open journal. Its recovered records become pending versions.
        writer: writes to the store.
        form_now: returns the present form of an array (`Forms.now`).
        settings: when and how shards are published.
        waiting: called before a thread waits.
        layout: the options that say how the mount shows the source (`Options.shown_as`).

    Raise OSError (EBUSY) if the journal has versions of a mount with another layout.
    """

    def __init__(
        self, journal: Journal, writer: Writer, form_now: Callable[[ChunkDirs], str | None],
        settings: Publishing | None = None, waiting: Callable[[], None] = nothing, layout: str = "",
    ) -> None:  # fmt: skip
        self.settings = settings or Publishing()
        self.backlog = Backlog(journal, layout)
        self.backlog.pending.require_layout(layout)
        self._journal = journal
        self._writer = writer
        self._waiting = waiting
        self._lock = self.backlog.lock
        self.shards = DirtyShards(self.backlog, self.settings)
        self.failures = Failures()
        self.refused = Refused(self.failures)
        self.publisher = Publisher(self.backlog, self.shards, writer, self.failures, form_now)
        self._closed = False
        self._looked = threading.local()  # `base`: the last `Look` of a thread
        self._unwritable: set[str] = set()  # arrays whose reason was logged
        pending = self.backlog.pending
        self._damaged = [*journal.damaged_paths, *pending.lost]
        for loss in pending.losses():
            log.warning("%s", loss)
            journal.problems.append(loss)
        park_scratch(self.backlog)
        for begun in pending.begun.values():
            writer.recover(Begun.from_json(begun))
        writer.recovered()

    def attach(self, published: Callable[[Mapping[str, Version]], None], is_held: Callable[[str], bool]) -> None:
        """Start publishing. See `Publisher.published` and `DirtyShards.is_held`."""
        self.publisher.published = published
        self.shards.is_held = is_held
        self.publisher.start()

    # ---- pending versions ----

    def versions(self) -> dict[str, Version]:
        """Return all pending versions by path. A deleted file has `data` None."""
        return self.backlog.versions()

    def holds(self, path: str) -> bool:
        """Return whether a version is pending for a path."""
        return self.backlog.get(path) is not None

    def read(self, data: Position, offset: int, size: int) -> bytes:
        """Return bytes of a pending version. Raise OSError (ESTALE) if it is not pending any more."""
        return self._journal.read(data, offset, size)

    def target(self, path: str) -> Target | None:
        """Return the chunk that the pending version of a path replaces; None if there is none."""
        with self._lock:
            shard = self.shards.at(path)
            return None if shard is None else shard.targets[path]

    def is_stored(self, path: str, target: Target | None) -> bool:
        """Return whether the chunk's shard has the chunk, or a publish of the chunk is in progress."""
        if target is None:
            return False
        shard = self.shards.at(path)  # first: a shard that is no longer being published has the chunk
        if shard is not None and path in shard.publishing:
            return True
        return target.tree.shards.has(target.coords)

    def put(
        self, path: str, data: Bytes, target: Target | None, mtime_ns: int, mode: int, *, scratch: bool = False,
        stored: bool = False,
    ) -> Version:  # fmt: skip
        """Add a new version of a whole file. When this returns, the version survives a crash of this process.

        `stored`: `data` are the bytes that the shard is to have, and the mount shows others.
        """
        with self._based(path, target) as base:
            meta = {"path": path, "mtime_ns": mtime_ns, "mode": mode, "scratch": scratch, "base": base.to_json()}
            version = self.backlog.add(RecordKind.PUT, path, meta, data, stored=stored, form=_form(target))
            self.refused.forget(path)
            self.shards.assign(path, target)
            return version

    def keep(self, path: str, data: bytes, why: str, mtime_ns: int, mode: int) -> None:
        """Keep a metadata document as a conflict until a user decides, because another program has changed it too."""
        self.make_room(len(data))
        meta = {"path": path, "mtime_ns": mtime_ns, "mode": mode}
        with self._lock:
            self.backlog.add(RecordKind.PUT, path, meta, data, document=True, conflict=why)
            self.publisher.counts["conflicts"] += 1
        self.failures.failed(path, OSError(errno.ESTALE, why, path))

    def drop(self, path: str) -> None:
        """Discard the pending version of a path, if there is one."""
        with self._lock:
            self.backlog.drop(path)
            self.shards.assign(path, None)

    def remove(self, path: str, target: Target | None) -> bool:
        """Remove a file: its pending version, and its chunk in the shard. Return whether the shard has the chunk."""
        self.is_stored(path, target)  # loads the index before the lock is taken
        with self._based(path, target) as base:
            is_stored = self.is_stored(path, target)
            if not is_stored:
                self.drop(path)
                return False
            meta = {"path": path, "base": base.to_json()}
            self.backlog.add(RecordKind.DEL, path, meta, form=_form(target))
            self.shards.assign(path, target)
            return True

    def move(
        self, old: str, new: str, target: Target | None, had: Target | None, data: Bytes | None, mtime_ns: int,
        mode: int, *, scratch: bool = False, stored: bool = False,
    ) -> Version:  # fmt: skip
        """Rename a file and return its version.

        Args:
            target: the chunk that the new name stands for, if any.
            had: the chunk that the old name stands for, if any. It is deleted from its shard.
            data: the whole file, if no version is pending for the old name. Else its bytes are read from the shard if
                the version was published after the caller looked.
            stored: as for `put`.
        """
        self.is_stored(old, had)  # loads the index before the lock is taken
        with self._based(new, target) as base:
            gone = had if self.is_stored(old, had) else None
            if data is None and had is not None and not self.holds(old):
                gone = had
                data = bytes(had.tree.read_chunk(had.coords, 0, EVERYTHING))
            known = self.backlog.get(old)
            meta: dict[str, Any] = {"from": old, "to": new, "gone": gone is not None, "base": base.to_json()}
            meta |= {"mtime_ns": mtime_ns, "mode": mode, "scratch": scratch}
            if data is None and known is not None:
                meta["lsn"] = known.lsn
            elif gone is not None and known is None:
                meta["from_base"] = self._base(old, gone).to_json()
            version = self.backlog.add(RecordKind.MOVE, new, meta, data, stored=stored, form=_form(target))
            self.refused.forget(new)
            self.shards.assign(old, gone)
            self.shards.assign(new, target)
            return version

    def retarget(self, path: str, target: Target | None) -> None:
        """Assign the pending version of a path to the shard of `target`; None: to no shard for now.

        A version that was written for an array of another form becomes a conflict.
        """
        with self._lock:
            version = self.backlog.get(path)
            if version is not None and target is not None:
                form = version.form or _form(self.target(path))
                if form not in ("", _form(target)):
                    self.publisher.refuse(path, OBSOLETE, obsolete=True)
            self.shards.assign(path, target)

    def is_obsolete(self, path: str) -> bool:
        """Return whether the pending version of a path was written for an array that another one has replaced."""
        version = self.backlog.get(path)
        return version is not None and version.obsolete

    @contextmanager
    def _based(self, path: str, target: Target | None) -> Iterator[Stored]:
        """Hold the lock, and give what is stored for the chunk that a new version of the path replaces.

        The shard is read before the lock is taken. No chunk is stored under a name that is none of a chunk.
        """
        looked = self._looked.__dict__.pop("base", None)
        while True:
            if looked is None or looked.path != path or looked.target != target:
                looked = self._look(path, target)
            with self._lock:
                if self._is_present(looked):
                    yield looked.base
                    return
            looked = None

    def look(self, path: str, target: Target | None) -> None:
        """Load the index entry of a chunk, and read the chunk in a local store.

        A change of the path by this thread, under the caller's lock, then need not wait.
        """
        self._looked.base = self._look(path, target)

    def _look(self, path: str, target: Target | None) -> Look:
        replaced, version = self.backlog.replaced, self.backlog.get(path)
        return Look(path, target, version, replaced, self._base(path, target))

    def _is_present(self, looked: Look) -> bool:
        """Return whether neither the path was written nor its shard replaced since a look."""
        if self.backlog.get(looked.path) != looked.version:
            return False
        if looked.target is None or self.backlog.replaced == looked.replaced:
            return True
        shards = looked.target.tree.shards
        return not self.backlog.has_replaced(shards.key(shards.number_of(looked.target.coords)), looked.replaced)

    def _base(self, path: str, target: Target | None) -> Stored:
        """Return what a new version of a path is written over. A remote store is asked about chunks only.

        The bytes of a remote chunk are not read: a program that replaces chunks need not load them
        (docs/durability.md). Raise CorruptShardError if the bytes of a local chunk are not there.
        """
        known = self.backlog.get(path)
        if known is not None and not known.obsolete:
            return known.base
        if target is not None:
            return Stored.of(target, read=self._writer.local)
        if (disk := self._writer.disk) is not None and not is_scratch(path.rpartition("/")[2]):
            with suppress(OSError):
                return NOTHING._replace(version=stat_of(disk.stat(path)).version)
        return NOTHING

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
            (target is None or target.is_verbatim)
            and size <= QUICK_BYTES
            and self.backlog.took_s <= QUICK_S
            and self.settings.close == "journal"
        )

    def sync(self) -> None:
        """Sync the journal. When this returns, all pending versions survive a power failure."""
        self._waiting()
        self._journal.sync()

    def statvfs(self) -> os.statvfs_result:
        """Return the statistics of the journal's file system."""
        return os.statvfs(self._journal.directory)

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
        """Publish the pending chunks at and below a path. See `Publisher.drain` for the errors."""
        self._waiting()
        self.publisher.drain(path, timeout)

    def flush(self, path: str = "", timeout: float | None = None) -> None:
        """Drain. Also raise OSError if a chunk needs a user's decision: in a conflict, or if it does not fit."""
        self.drain(path, timeout)
        for _, failure in self.shards.undecided(path):
            raise failure

    def publish(self, path: str, timeout: float | None = None) -> None:
        """Flush on a user's request. Also raise errors of earlier closes, because programs may have ignored them."""
        self.flush(path, timeout)
        if (failure := self.refused.first(path)) is not None:
            raise failure

    # ---- status ----

    def count(self, path: str) -> int:
        """Return the number of pending chunks at and below a path."""
        return len(self.shards.paths(path))

    def failure(self, path: str) -> BaseException | None:
        """Return the error that prevents publishing a path; None if there is none."""
        with self._lock:
            shard = self.shards.at(path)
            if shard is not None and shard.failure is not None:
                return shard.failure
            if shard is not None and path in shard.unfit:
                return OSError(errno.EINVAL, shard.unfit[path])
            version = self.backlog.get(path)
            if version is not None and version.conflict:
                return OSError(errno.ESTALE, version.conflict)
            is_empty = version is not None and version.data is not None and not version.data.size
            waits = is_empty and shard is not None and not shard.targets[path].tree.by_id
            return OSError(errno.EINVAL, EMPTY) if waits else None

    def left(self) -> list[str]:
        """Return the paths of all unpublished versions, except temporary files of programs."""
        return [path for path, version in self.versions().items() if not version.scratch]

    def state(self) -> dict[str, Any]:
        """Return counters, orphans and errors for `status.json`."""
        with self._lock:
            versions = self.versions()
            chunks = self.shards.paths()
            others = versions.keys() - chunks
            orphans = [p for p, v in versions.items() if p in others and not (v.scratch or v.is_document)]
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
                "journal": str(self._journal.directory),
                "journal_bytes": self._journal.nbytes,
                "journal_limit": self._journal.limit_bytes,
                "problems": list(self._journal.problems),
                "read_only": self._journal.read_only,
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
        left = self.left()
        self._writer.close()  # the lock in the store names the journal, which may be removed now
        self._journal.close(clean=not left)
        return left

    def _is_synced(self) -> bool:
        """Sync the journal; return whether that succeeded. An error may be the one that reports a restored journal."""
        for _ in range(2):
            with suppress(OSError):
                self._journal.sync()
                return True
        return False


def _form(target: Target | None) -> str:
    """Return the form of the array of a chunk; "" for another file."""
    return "" if target is None else target.tree.collection.form
