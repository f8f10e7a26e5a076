"""The shards with pending chunks: which chunks belong to each, and when each is due to be published."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING

from shardfs.model.errors import errno_of
from shardfs.model.kinds import is_in
from shardfs.shards import rewriting
from shardfs.write.publish_shard import RETRY_S, DirtyShard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from shardfs.vfs.chunk_dirs import ChunkDirs, Target
    from shardfs.write.pending import Backlog
    from shardfs.write.publish_shard import Publishing, Taken

EARLY = 0.5
"""Fill level of the journal from which on all shards are due."""

LOOK_S = 0.5
"""Seconds between two looks at what is due, at least: new shards are due later."""

MOST_CHUNKS = 1 << 17
"""Maximum number of chunks of one publish, which its records in the journal name."""

MAX_RETRY_S = 60.0
"""Maximum of the seconds between two attempts to publish a shard after errors that may pass."""

LASTING = {
    errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.EFBIG, errno.ENOTDIR,
    errno.EISDIR,
}  # fmt: skip
"""Errors that a quick retry does not fix. The next attempt is after `LASTING_RETRY_S`, or when a flush asks for it."""

LASTING_RETRY_S = 30.0


class DirtyShards:
    """All shards with pending chunks. Thread-safe: each method takes the lock `backlog.lock` itself.

    Args:
        settings: tells when shards are due.

    Attributes:
        is_held: returns whether a path is open for writing. Such a path is published only on request.
    """

    def __init__(self, backlog: Backlog, settings: Publishing) -> None:
        self._backlog = backlog
        self._lock = backlog.lock
        self._changed = backlog.changed
        self.settings = settings
        self._early = min(EARLY * backlog.journal.limit_bytes, settings.dirty_bytes)
        self._shards: dict[tuple[int, int], DirtyShard] = {}
        self._at: dict[str, DirtyShard] = {}
        self.is_held: Callable[[str], bool] = lambda path: False

    def __iter__(self) -> Iterator[DirtyShard]:
        with self._lock:
            return iter([*self._shards.values()])

    def __contains__(self, shard: tuple[int, int]) -> bool:
        """Return whether the shard with this number, of the array with this inode number, has pending chunks."""
        return shard in self._shards

    # ---- chunks and their shards ----

    def assign(self, path: str, target: Target | None) -> None:
        """Assign the pending version of a path to the shard of `target`; None: to no shard for now."""
        with self._lock:
            before = self._at.pop(path, None)
            shard = None
            if target is not None and self._backlog.versions.get(path) is not None:
                shard = self._at[path] = self._shard(target)
            if before is not None and before is not shard:
                before.targets.pop(path, None)
                self._forget_if_clean(before)
                self._changed.notify_all()  # a thread that drains may wait for this shard
            if target is None or shard is None:
                return
            shard.targets[path] = target
            shard.last = time.monotonic()
            shard.unfit.clear()
            if shard.failure is None:
                shard.retry_at = 0.0
            if shard.is_complete or self._backlog.journal.nbytes > self._early:  # other shards are due later
                self._changed.notify_all()

    def _shard(self, target: Target) -> DirtyShard:
        """Return the shard of a chunk, created and added to the pending shards if necessary."""
        tree, number = target.tree, target.tree.shards.number_of(target.coords)
        shard = self._shards.get((tree.first, number))
        if shard is None:
            slots = rewriting.slots(tree.collection, number)
            shard = self._shards[tree.first, number] = DirtyShard(tree, number, tree.shards.key(number), slots)
        if not shard.targets:
            shard.first = time.monotonic()
            if not shard.busy:
                outermost = tree.shards.outermost
                shard.seems_absent = not outermost.source.is_local and outermost.index.is_absent(number)
        return shard

    def _forget_if_clean(self, shard: DirtyShard) -> None:
        if not shard.targets and not shard.busy:
            self._shards.pop((shard.tree.first, shard.number), None)

    def at(self, path: str) -> DirtyShard | None:
        """Return the shard of a pending chunk; None if the path has no pending version, or is no chunk."""
        return self._at.get(path)

    def target(self, path: str) -> Target | None:
        """Return the chunk that the pending version of a path replaces; None if there is none."""
        with self._lock:
            shard = self._at.get(path)
            return None if shard is None else shard.targets[path]

    def paths(self, path: str = "") -> list[str]:
        """Return the pending chunks at and below a path."""
        with self._lock:
            return [name for name in self._at if is_in(name, path)]

    def of_array(self, tree: ChunkDirs) -> list[str]:
        """Return the pending chunks of an array."""
        return [path for shard in self if shard.tree is tree for path in shard.targets]

    # ---- what is due ----

    def next(self, now: float) -> tuple[DirtyShard | None, float]:
        """Return a shard that is due, and 0; or None, and the seconds until the next one may be due.

        `now` is the time of the monotonic clock. The caller has the shard for itself until it calls `release`.
        """
        wait = max(min(self.settings.idle_s, self.settings.age_s), LOOK_S)  # a new shard is not due earlier
        with self._lock:
            # A new metadata document replaces the shards of its array by new ones with the same keys.
            busy = {shard.key for shard in self._shards.values() if shard.busy}
            for shard in self._shards.values():
                if shard.key not in busy and shard.targets:
                    when = self._due_at(shard, now)
                    if when <= now:
                        shard.busy = True
                        return shard, 0.0
                    wait = min(wait, when - now)
        return None, wait

    def _due_at(self, shard: DirtyShard, now: float) -> float:
        """Return when to publish a shard, by the monotonic clock."""
        if shard.due:
            return now
        if shard.failure is not None:
            return shard.retry_at
        soon = now + 0.05 if all(map(self.is_held, shard.targets)) else now
        when = max(min(shard.last + self.settings.idle_s, shard.first + self.settings.age_s), soon)
        if not shard.is_complete:
            when = soon if self._backlog.journal.nbytes > self._early else when
        elif any(map(self.is_held, shard.targets)):  # the last files may just be closing
            when = min(when, now + 0.05)
        else:
            when = now
        return max(when, shard.retry_at)

    def _to_publish(self, shard: DirtyShard) -> dict[str, Taken]:
        """Return the chunks of a shard to publish now.

        Omits empty chunks, conflicts, chunks that do not fit, and (unless a flush asks for the shard) open files. The
        chunks beyond `MOST_CHUNKS` are left to the next publish.
        """
        out: dict[str, Taken] = {}
        for path, target in shard.targets.items():
            if len(out) == MOST_CHUNKS:
                break
            version = self._backlog.versions[path]
            empty = version.data is not None and version.data.size == 0 and not target.tree.by_id
            if not empty and not version.conflict and path not in shard.unfit and (shard.due or not self.is_held(path)):
                out[path] = target, version
        return out

    # ---- publishing ----

    def take(self, shard: DirtyShard) -> dict[str, Taken]:
        """Begin to publish a shard: return its chunks that can be published now, by path. May be empty."""
        with self._lock:
            chunks = self._to_publish(shard)
            shard.publishing = frozenset(chunks)
            shard.due = False
            if not chunks:  # look again in a second, even if the journal is full
                now = time.monotonic()
                shard.retry_at = now + 1
                shard.first = now
                shard.last = now
            return chunks

    def published(self, shard: DirtyShard, paths: Iterable[str], unfit: Mapping[str, str], *, absent: bool) -> None:
        """Note that a shard was replaced, or (`absent`) removed, and which of its chunks do not fit, and why."""
        with self._lock:
            shard.seems_absent = absent
            shard.failure = None
            shard.pause = RETRY_S
            shard.retry_at = 0.0
            shard.unfit.update(unfit)
            for path in paths:
                if self._backlog.versions.get(path) is None:
                    shard.targets.pop(path, None)
                    if self._at.get(path) is shard:
                        del self._at[path]
                    else:  # a new document has assigned it to another shard meanwhile
                        self.assign(path, None)

    def failed(self, shard: DirtyShard, failure: BaseException) -> bool:
        """Note that a publish has failed, and when to try again.

        Return whether that differs from the failure before.
        """
        with self._lock:
            before = shard.failure
            shard.failure = failure
            shard.retry_at = time.monotonic() + (shard.pause if _passes(failure) else LASTING_RETRY_S)
            shard.pause = min(2 * shard.pause, MAX_RETRY_S)
            return before is None or str(before) != str(failure)

    def release(self, shard: DirtyShard) -> None:
        """End an attempt to publish a shard."""
        with self._lock:
            shard.busy = False
            shard.publishing = frozenset()
            self._forget_if_clean(shard)
            self._changed.notify_all()

    # ---- publishing on request ----

    def ask(self, path: str = "") -> dict[DirtyShard, dict[str, int]]:
        """Make the shards with pending chunks at and below a path due at once, even after failures.

        Return the LSNs of the pending versions there, by shard and path.
        """
        wanted = {}
        with self._lock:
            for shard in self._shards.values():
                lsns = {name: self._backlog.versions[name].lsn for name in shard.targets if is_in(name, path)}
                if lsns:
                    wanted[shard] = lsns
                    shard.due = True
                    shard.failure = None
                    shard.retry_at = 0.0
            self._changed.notify_all()
        return wanted

    def waits_for(self, shard: DirtyShard, lsns: Mapping[str, int]) -> bool:
        """Return whether a flush must still wait for the shard. `lsns` are the versions to publish, by path."""
        with self._lock:
            if shard.busy:
                return True
            if shard.failure is not None:
                return bool(shard.targets)
            shard.due = True
            chunks = self._to_publish(shard)
            shard.due = any(path in chunks and chunks[path][1].lsn <= lsn for path, lsn in lsns.items())
            return shard.due

    def can_progress(self) -> bool:
        """Return whether a shard is being published, or may be within a second."""
        soon = time.monotonic() + 1
        return any(s.targets and (s.busy or s.failure is None or s.retry_at <= soon) for s in self)

    def may_arrive(self) -> bool:
        """Return whether a shard is being published, or can be published without a user's help."""
        with self._lock:
            return any(
                s.busy or (bool(self._to_publish(s)) and (s.failure is None or _passes(s.failure)))
                for s in self._shards.values()
            )

    # ---- what a user must decide ----

    def undecided(self, path: str = "") -> list[tuple[str, OSError]]:
        """Return the chunks at and below a path that cannot be published, and why: unfit ones, then conflicts."""
        with self._lock:
            unfit = [(name, errno.EINVAL, why) for shard in self for name, why in shard.unfit.items()]
            versions = self._backlog.versions.items()
            conflicts = [(name, errno.ESTALE, version.conflict) for name, version in versions if version.conflict]
        return [(name, OSError(number, why, name)) for name, number, why in unfit + conflicts if is_in(name, path)]


def _passes(failure: BaseException) -> bool:
    """Return whether a quick retry may succeed."""
    return isinstance(failure, OSError) and errno_of(failure) not in LASTING
