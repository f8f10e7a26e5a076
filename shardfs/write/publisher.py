"""Threads that publish shards which are due. Each thread publishes one shard at a time."""

from __future__ import annotations

import errno
import logging
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from shardfs.model.errors import ShardfsError, errno_of
from shardfs.model.kinds import is_in
from shardfs.write.journal import RecordKind
from shardfs.write.publishing import RETRY_S, Job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from shardfs.model.blobs import Stat
    from shardfs.storage.writers import Writer
    from shardfs.vfs.chunk_dirs import ChunkDirs
    from shardfs.write.dirty_shards import DirtyShards
    from shardfs.write.failures import Failures
    from shardfs.write.pending import Backlog, Version
    from shardfs.write.publishing import DirtyShard, Taken

log = logging.getLogger(__name__)

LASTING = {
    errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.EFBIG, errno.ENOTDIR,
    errno.EISDIR,
}  # fmt: skip
"""Errors that a quick retry does not fix. The next attempt is after `LASTING_RETRY_S`, or when a flush asks for it."""

LASTING_RETRY_S = 30.0

MAX_RETRY_S = 60.0

FULL = 0.95
"""Fill level of the journal from which on writers wait for publishing."""


OBSOLETE = (
    "another program has created the array anew, with other codecs or chunks, so this version cannot be stored there; "
    "use shardfs recover --export to keep it, then --theirs"
)


class Publisher:
    """Publishes the shards of `shards` with `writer`, and removes the published versions from `backlog`.

    `form_now` returns the present form of an array (`Forms.now`). `counts` has the figures of publishing for
    the status. `published` is called after each publish, without the lock, with the published versions by path;
    their `base` is what is stored now.
    """

    def __init__(
        self, backlog: Backlog, shards: DirtyShards, writer: Writer, failures: Failures,
        form_now: Callable[[ChunkDirs], str | None],
    ) -> None:  # fmt: skip
        self._backlog, self._shards, self._writer, self._failures = backlog, shards, writer, failures
        self._changed = backlog.changed
        self._stopping, self._free = False, 0
        self._threads: list[threading.Thread] = []
        self.published: Callable[[Mapping[str, Version]], None] = lambda done: None
        self._form_now = form_now
        self.counts = {"published_chunks": 0, "published_shards": 0, "published_bytes": 0, "conflicts": 0,
                       "failures": 0}  # fmt: skip

    def start(self) -> None:
        """Start the first thread. The others start when there are shards for them. Raise RuntimeError if it fails."""
        with self._changed:
            self._add_thread()

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=f"shardfs-publish-{len(self._threads)}", daemon=True)
        thread.start()
        self._threads.append(thread)
        self._free += 1

    def _work(self) -> None:
        while (shard := self._next()) is not None:
            try:
                self.publish(shard)
            except BaseException as e:  # noqa: BLE001 - logged, and reported to the writing program
                self._failed(shard, e)
            finally:
                with self._changed:
                    shard.busy, shard.publishing = False, frozenset()
                    self._free += 1
                    self._shards.forget_if_clean(shard)
                    self._changed.notify_all()

    def _next(self) -> DirtyShard | None:
        """Wait for a shard that is due, mark it busy and return it. None if the publisher stops."""
        with self._changed:
            while not self._stopping:
                shard, wait = self._shards.next(time.monotonic())
                if shard is not None:
                    shard.busy = True
                    self._free -= 1
                    if not self._free and len(self._threads) < self._shards.settings.workers:
                        with suppress(RuntimeError):  # no more threads: this one publishes all shards
                            self._add_thread()
                    return shard
                self._changed.wait(wait)
        return None

    # ---- one attempt ----

    def publish(self, shard: DirtyShard) -> None:
        """Publish the chunks of a shard that can be published now.

        Raise the errors of `Writer.update`; OSError (ESTALE) if no document describes the array.
        """
        with self._changed:
            taken = self._shards.taken(shard)
            shard.publishing, shard.due = frozenset(taken), False
            if not taken:  # nothing can be published now: look again in a second, even if the journal is full
                shard.retry_at, shard.first, shard.last = time.monotonic() + 1, time.monotonic(), time.monotonic()
                return
        if not self._has_form(shard, taken):
            return
        writer = self._writer
        job = Job(self._backlog, self._shards.settings, shard, taken, writer)
        try:
            stat = writer.update(shard.key, job)
            self._arrived(shard, job, stat)
        finally:  # the pinned data are not read any more
            job.close()

    def _has_form(self, shard: DirtyShard, taken: Mapping[str, Taken]) -> bool:
        """Return whether the array is still stored in the form for which chunks were written.

        Otherwise all pending versions of its chunks become conflicts. Deletions need no document, because clients
        delete an array's document before its chunks.
        """
        form = self._form_now(shard.tree)
        if form is None and any(version.data is not None for _, version in taken.values()):
            text = "no document describes its array now, and another program may be about to create the array anew"
            raise OSError(errno.ESTALE, text, shard.key)
        if form in (None, shard.tree.collection.form):
            return True
        with self._changed:
            self.refuse_obsolete([p for other in self._shards if other.tree is shard.tree for p in other.targets])
        return False

    def refuse_obsolete(self, paths: Iterable[str]) -> None:
        """Keep versions that were written for an array of another form as conflicts. The caller holds the lock."""
        for path in paths:
            version = self._backlog.pending.versions[path]
            if not version.obsolete:
                meta = {"path": path, "lsn": version.lsn, "why": OBSOLETE, "obsolete": True}
                self._backlog.add(RecordKind.CONFLICT, meta)
                self.counts["conflicts"] += 1
                self._failures.note(path, OSError(errno.ESTALE, OBSOLETE, path))

    def _arrived(self, shard: DirtyShard, job: Job, stat: Stat | None) -> None:
        done = job.done(stat)
        if stat is None:
            shard.tree.allow_missing(shard.number)
        shard.tree.renew([target.coords for target, _ in job.taken.values()], moved=job.outcome.packed)
        with self._changed:
            lsns, after = [version.lsn for version in done.values()], None if stat is None else stat.version
            others = shard.targets.keys() - done.keys()
            self._backlog.done(shard.key, lsns, job.digests, others, job.before, after)
            shard.seems_absent = stat is None
            shard.failure, shard.pause, shard.retry_at = None, RETRY_S, 0.0
            for path in done:
                if path not in self._backlog.pending.versions:
                    shard.targets.pop(path, None)
                    self._shards.assign(path, None)  # a new document may have assigned it to another shard meanwhile
            self._note_unfit(shard, job)
            self.counts["published_chunks"] += len(done)
            self.counts["published_shards"] += 1
            self.counts["published_bytes"] += job.written
            for path, why in job.outcome.conflicts.items():
                self._backlog.add(RecordKind.CONFLICT, {"path": path, "lsn": job.taken[path][1].lsn, "why": why})
                self.counts["conflicts"] += 1
                text = f"another writer has changed this chunk too: {why}. Use shardfs recover --ours or --theirs"
                self._failures.note(path, OSError(errno.ESTALE, text, path))
        self.published(done)

    def _note_unfit(self, shard: DirtyShard, job: Job) -> None:
        """Note the chunks that do not fit. Half of a mesh is no error, because its other file may still be written."""
        for path, why in job.outcome.unfit.items():
            known = self._backlog.pending.versions.get(path)
            if known is not None and known.lsn == job.taken[path][1].lsn:
                shard.unfit[path] = why
                if shard.tree.collection.lead is None:
                    self._failures.note(path, OSError(errno.EINVAL, why, path))

    def _failed(self, shard: DirtyShard, failure: BaseException) -> None:
        if not isinstance(failure, OSError | ShardfsError):
            log.error("%s: publishing failed: this is a bug", shard.key, exc_info=failure)
        with self._changed:
            shard.retry_at = time.monotonic() + (shard.pause if _passes(failure) else LASTING_RETRY_S)
            shard.pause = min(2 * shard.pause, MAX_RETRY_S)
            known, shard.failure = shard.failure, failure
            self.counts["failures"] += 1
            if known is None or str(known) != str(failure):
                log.warning("%s: cannot be published, and stays in the journal: %s", shard.key, failure)
                self._failures.note(shard.tree.path, OSError(errno_of(failure), f"{shard.key}: {failure}"))

    def wait_for_room(self, size: int) -> None:
        """Wait until the journal has room for a record of this size, or nothing is pending.

        Raise OSError (ENOSPC) if no shard can be published, or none has been for `stall_s` seconds.
        """
        stall_s, done = self._shards.settings.stall_s, self.counts["published_chunks"]
        end = time.monotonic() + stall_s
        with self._changed:
            while self._backlog.fullness(size) >= FULL and any(shard.targets for shard in self._shards):
                if self.counts["published_chunks"] != done:
                    done, end = self.counts["published_chunks"], time.monotonic() + stall_s
                if time.monotonic() >= end or not self._shards.can_progress():
                    text = "the journal is full, and no shard can be published; shardfs status shows the reasons"
                    raise OSError(errno.ENOSPC, text)
                self._changed.wait(0.5)

    # ---- publishing on request ----

    def drain(self, path: str, timeout: float | None = None) -> None:
        """Publish the pending chunks at and below a path, except those that need a user's decision.

        Raise OSError if a shard cannot be published, after the others; TimeoutError after `timeout` seconds.
        """
        end = time.monotonic() + (timeout if timeout is not None else 1e9)
        with self._changed:
            versions = self._backlog.pending.versions
            wanted = {s: {p: versions[p].lsn for p in s.targets if is_in(p, path)} for s in self._shards}
            wanted = {shard: lsns for shard, lsns in wanted.items() if lsns}
            for shard in wanted:
                shard.ask()
            self._changed.notify_all()
            while left := [shard for shard, lsns in wanted.items() if self._shards.waits_for(shard, lsns)]:
                self._changed.notify_all()
                failed = [shard for shard in left if shard.failure is not None and not shard.busy]
                if len(failed) == len(left) or (failed and time.monotonic() >= end):
                    key, why = failed[0].key, cast("BaseException", failed[0].failure)
                    raise OSError(errno_of(why), f"{key}: {why}") from why
                if time.monotonic() >= end:
                    raise TimeoutError(
                        errno.ETIMEDOUT,
                        "not all chunks were published before the time-out; the rest stays in the journal",
                    )
                self._changed.wait(min(end - time.monotonic(), 1.0))

    def stop(self, timeout: float) -> None:
        """Publish as much as possible within `timeout` seconds, and end the threads."""
        end = time.monotonic() + timeout
        with self._changed:
            for shard in self._shards:
                shard.ask()
            self._changed.notify_all()
            while (wait := end - time.monotonic()) > 0 and any(map(self._may_arrive, self._shards)):
                self._changed.wait(min(wait, 1.0))
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(10)

    def _may_arrive(self, shard: DirtyShard) -> bool:
        """Return whether the shard is being published, or can be published without a user's help."""
        return shard.busy or (bool(self._shards.taken(shard)) and (shard.failure is None or _passes(shard.failure)))


def _passes(failure: BaseException) -> bool:
    """Return whether a quick retry may succeed."""
    return isinstance(failure, OSError) and errno_of(failure) not in LASTING
