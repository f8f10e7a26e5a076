"""Threads that publish shards which are due. Each thread publishes one shard at a time."""

from __future__ import annotations

import errno
import logging
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from shardfs.model.errors import ShardfsError, errno_of
from shardfs.write.publish_shard import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardfs.model.blobs import Stat
    from shardfs.storage.writers import Writer
    from shardfs.vfs.chunk_dirs import ChunkDirs
    from shardfs.write.dirty_shards import DirtyShards
    from shardfs.write.pending import Backlog, Version
    from shardfs.write.publish_shard import DirtyShard, Taken
    from shardfs.write.reported_errors import Failures

log = logging.getLogger(__name__)

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
        self._backlog = backlog
        self._changed = backlog.changed
        self._shards = shards
        self._writer = writer
        self._failures = failures
        self._form_now = form_now
        self._stopping = False
        self._free = 0
        self._threads: list[threading.Thread] = []
        self.published: Callable[[Mapping[str, Version]], None] = lambda versions: None
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
                    self._free += 1
                    self._shards.release(shard)

    def _next(self) -> DirtyShard | None:
        """Wait for a shard that is due, and return it. None if the publisher stops."""
        with self._changed:
            while not self._stopping:
                shard, wait = self._shards.next(time.monotonic())
                if shard is not None:
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
        chunks = self._shards.take(shard)
        if not chunks or not self._has_form(shard, chunks):
            return
        job = Job(self._backlog, self._shards.settings, shard, chunks, self._writer)
        try:
            stat = self._writer.update(shard.key, job)
            self._arrived(shard, job, stat)
        finally:  # the pinned data are not read any more
            job.close()

    def _has_form(self, shard: DirtyShard, chunks: Mapping[str, Taken]) -> bool:
        """Return whether the array is still stored in the form for which chunks were written.

        Otherwise all pending versions of its chunks become conflicts. Deletions need no document, because clients
        delete an array's document before its chunks.
        """
        form = self._form_now(shard.tree)
        if form is None and any(version.data is not None for _, version in chunks.values()):
            text = "no document describes its array now, and another program may be about to create the array anew"
            raise OSError(errno.ESTALE, text, shard.key)
        if form in (None, shard.tree.collection.form):
            return True
        with self._changed:
            for path in self._shards.of_array(shard.tree):
                self.refuse(path, OBSOLETE, obsolete=True)
        return False

    def refuse(self, path: str, why: str, *, obsolete: bool = False) -> None:
        """Keep the version of a path as a conflict until a user decides.

        `obsolete`: the version was written for an array of another form.
        """
        with self._changed:
            version = self._backlog.versions.get(path)
            if version is not None and not version.obsolete:
                self._backlog.decide(path, version.lsn, why, obsolete=obsolete)
                self.counts["conflicts"] += 1
                self._failures.record(path, OSError(errno.ESTALE, why, path))

    def _arrived(self, shard: DirtyShard, job: Job, stat: Stat | None) -> None:
        versions = job.done(stat)
        if stat is None:
            shard.tree.allow_missing(shard.number)
        shard.tree.renew([target.coords for target, _ in job.chunks.values()], moved=job.outcome.packed)
        chunks = job.chunks
        with self._changed:
            lsns = [version.lsn for version in versions.values()]
            waiting = shard.targets.keys() - versions.keys()
            after = None if stat is None else stat.version
            self._backlog.done(shard.key, lsns, job.digests, waiting, job.before, after)
            unfit = {path: why for path, why in job.outcome.unfit.items() if self._is_pending(path, chunks[path][1])}
            self._shards.published(shard, versions, unfit, absent=stat is None)
            self.counts["published_chunks"] += len(versions)
            self.counts["published_shards"] += 1
            self.counts["published_bytes"] += job.written
            for path, why in job.outcome.conflicts.items():
                self._backlog.decide(path, chunks[path][1].lsn, why)
                self.counts["conflicts"] += 1
                text = f"another writer has changed this chunk too: {why}. Use shardfs recover --ours or --theirs"
                self._failures.record(path, OSError(errno.ESTALE, text, path))
            if shard.tree.collection.lead is None:  # half of a mesh is no error: its other file may still be written
                for path, why in unfit.items():
                    self._failures.record(path, OSError(errno.EINVAL, why, path))
        self.published(versions)

    def _is_pending(self, path: str, version: Version) -> bool:
        now = self._backlog.versions.get(path)
        return now is not None and now.lsn == version.lsn

    def _failed(self, shard: DirtyShard, failure: BaseException) -> None:
        if not isinstance(failure, OSError | ShardfsError):
            log.error("%s: publishing failed: this is a bug", shard.key, exc_info=failure)
        with self._changed:
            self.counts["failures"] += 1
            if self._shards.failed(shard, failure):
                log.warning("%s: cannot be published, and stays in the journal: %s", shard.key, failure)
                self._failures.record(shard.tree.path, OSError(errno_of(failure), f"{shard.key}: {failure}"))

    def wait_for_room(self, size: int) -> None:
        """Wait until the journal has room for a record of this size, or nothing is pending.

        Raise OSError (ENOSPC) if no shard can be published, or none has been for `stall_s` seconds.
        """
        stall_s, published = self._shards.settings.stall_s, self.counts["published_chunks"]
        end = time.monotonic() + stall_s
        with self._changed:
            while self._backlog.fullness(size) >= FULL and any(shard.targets for shard in self._shards):
                if self.counts["published_chunks"] != published:
                    published, end = self.counts["published_chunks"], time.monotonic() + stall_s
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
            wanted = self._shards.ask(path)
            while waiting := [shard for shard, lsns in wanted.items() if self._shards.waits_for(shard, lsns)]:
                self._changed.notify_all()
                failed = [shard for shard in waiting if shard.failure is not None and not shard.busy]
                if len(failed) == len(waiting) or (failed and time.monotonic() >= end):
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
            self._shards.ask()
            while (wait := end - time.monotonic()) > 0 and self._shards.may_arrive():
                self._changed.wait(min(wait, 1.0))
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(10)
