"""The shards with pending chunks: which chunks belong to each, and when each is due to be published."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING

from shardfs.model.kinds import is_in
from shardfs.shards import rewriting
from shardfs.write.publishing import DirtyShard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from shardfs.vfs.chunk_dirs import Target
    from shardfs.write.pending import Backlog
    from shardfs.write.publishing import Publishing, Taken

EARLY = 0.5
"""Fill level of the journal from which on all shards are due."""

LOOK_S = 0.5


class DirtyShards:
    """All shards with pending chunks. The caller of every method holds `backlog.changed`.

    Args:
        settings: tells when shards are due.

    Attributes:
        at: the shard of each pending chunk, by path.
        is_held: returns whether a path is open for writing. Such a path is published only on request.
    """

    def __init__(self, backlog: Backlog, settings: Publishing) -> None:
        self._backlog, self.settings = backlog, settings
        self._early = min(EARLY * backlog.journal.limit_bytes, settings.dirty_bytes)
        self._shards: dict[tuple[int, int], DirtyShard] = {}
        self.at: dict[str, DirtyShard] = {}
        self.is_held: Callable[[str], bool] = lambda path: False

    def __iter__(self) -> Iterator[DirtyShard]:
        return iter(self._shards.values())

    def __contains__(self, shard: tuple[int, int]) -> bool:
        """Return whether the shard with this number, of the array with this inode number, has pending chunks."""
        return shard in self._shards

    # ---- chunks and their shards ----

    def assign(self, path: str, target: Target | None) -> None:
        """Assign the pending version of a path to the shard of `target`; None: to no shard for now."""
        before = self.at.pop(path, None)
        shard = None
        if target is not None and path in self._backlog.pending.versions:
            shard = self.at[path] = self._shard(target)
        if before is not None and before is not shard:
            before.targets.pop(path, None)
            self.forget_if_clean(before)
            self._backlog.changed.notify_all()  # `Publisher.drain` may wait for this shard
        if target is None or shard is None:
            return
        shard.targets[path], shard.last = target, time.monotonic()
        shard.unfit.clear()
        if shard.failure is None:
            shard.retry_at = 0.0
        if shard.is_complete or self._backlog.journal.nbytes > self._early:  # other shards are due later
            self._backlog.changed.notify_all()

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
                shard.seems_absent = not outermost.is_local and outermost.index.is_absent(number)
        return shard

    def forget_if_clean(self, shard: DirtyShard) -> None:
        """Forget a shard without pending chunks, unless it is being published."""
        if not shard.targets and not shard.busy:
            self._shards.pop((shard.tree.first, shard.number), None)

    # ---- what is due ----

    def next(self, now: float) -> tuple[DirtyShard | None, float]:
        """Return a shard that is due; None if none is. Also return the seconds until the next one may be due."""
        wait = max(min(self.settings.idle_s, self.settings.age_s), LOOK_S)  # a new shard is not due earlier
        # A new metadata document replaces the shards of its array by new ones with the same keys.
        busy = {shard.key for shard in self if shard.busy}
        for shard in self:
            if shard.key not in busy and shard.targets:
                when = self._due_at(shard, now)
                if when <= now:
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

    def taken(self, shard: DirtyShard) -> dict[str, Taken]:
        """Return the chunks of a shard to publish now.

        Omits empty chunks, conflicts, chunks that do not fit, and (unless a flush asks for the shard) open files.
        """
        out = {}
        for path, target in shard.targets.items():
            version = self._backlog.pending.versions[path]
            empty = version.data is not None and version.data.size == 0 and not target.tree.by_id
            if not empty and not version.conflict and path not in shard.unfit and (shard.due or not self.is_held(path)):
                out[path] = target, version
        return out

    def waits_for(self, shard: DirtyShard, lsns: Mapping[str, int]) -> bool:
        """Return whether a flush must still wait for the shard. `lsns` are the versions to publish, by path."""
        if shard.busy:
            return True
        if shard.failure is not None:
            return bool(shard.targets)
        shard.due = True
        taken = self.taken(shard)
        shard.due = any(path in taken and taken[path][1].lsn <= lsn for path, lsn in lsns.items())
        return shard.due

    def can_progress(self) -> bool:
        """Return whether a shard is being published, or may be within a second."""
        soon = time.monotonic() + 1
        return any(s.targets and (s.busy or s.failure is None or s.retry_at <= soon) for s in self)

    # ---- what a user must decide ----

    def undecided(self, path: str = "") -> Iterator[tuple[str, OSError]]:
        """Yield the chunks at and below a path that cannot be published, and why: unfit ones, then conflicts."""
        for shard in self:
            for name, why in shard.unfit.items():
                if is_in(name, path):
                    yield name, OSError(errno.EINVAL, why, name)
        for name, version in self._backlog.pending.versions.items():
            if version.conflict and is_in(name, path):
                yield name, OSError(errno.ESTALE, version.conflict, name)
