"""A tree that is only read, with what waits in a journal on which nobody works: as the next writable mount shows it.

Nothing is locked or changed. As soon as somebody works on the journal the source alone is shown: from then on only he
knows what of it is published, superseded or given up.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from typing import TYPE_CHECKING

from shardfs.model.errors import ShardfsError
from shardfs.model.kinds import NameKind
from shardfs.model.redact import public_name
from shardfs.storage.cache import nothing
from shardfs.storage.source_locks import LOCK
from shardfs.vfs.changes import is_in
from shardfs.write.journal import Journal, directory_for
from shardfs.write.journal.places import own_directory
from shardfs.write.overlay import Overlay
from shardfs.write.pending import Pending
from shardfs.write.recover import LOOK_S, losses, unpublished_words, unreadable_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from shardfs.model.attributes import Attributes
    from shardfs.model.listing import Batch, EntryRow
    from shardfs.vfs.chunk_dirs import Target
    from shardfs.vfs.tree import Tree
    from shardfs.write.journal import Peek, Position
    from shardfs.write.pending import Version

log = logging.getLogger(__name__)

GRACE_S = 60.0
"""How long who has a file open goes on reading it then. Its bytes take room on the disk of the journal for so long."""


class UnpublishedWrites:
    """What waits in a journal, with the methods of `WriteBuffer` that an `Overlay` needs."""

    def __init__(self, peek: Peek) -> None:
        self._peek: Peek | None = peek
        self._directory = peek.directory
        pending, _ = Pending.of(peek.recovered)
        self.problems = peek.problems + losses(pending)
        shown = ((p, v) for p, v in pending.versions.items() if not (v.scratch or v.is_document))
        self._versions = dict(shown)

    def versions(self) -> dict[str, Version]:
        return dict(self._versions)

    def holds(self, path: str) -> bool:
        return path in self._versions

    def drop(self, path: str, _target: Target | None) -> None:
        """Another name has taken the chunk since."""
        self._versions.pop(path, None)

    def retarget(self, path: str, target: Target | None) -> None:
        """Nothing is published here."""

    def read(self, data: Position, offset: int, size: int) -> bytes:
        peek = self._peek  # whose descriptors are closed when nobody reads from them any more
        if peek is None:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return peek.read(data, offset, size)

    def count(self, path: str) -> int:
        return sum(not path or is_in(known, path) for known in self._versions)

    def failure(self, path: str) -> OSError | None:
        version = self._versions.get(path)
        return OSError(errno.ESTALE, version.conflict) if version is not None and version.conflict else None

    def statvfs(self) -> os.statvfs_result:
        return os.statvfs(self._directory)

    def forget(self) -> None:
        """Nothing waits any more, as far as is known. What was shown can be read until `close`."""
        self._versions.clear()

    def close(self) -> None:
        """Let go of the journal's files."""
        self._peek = None


class _Reader:
    """In the places of the writer and the documents: modes are those of all files, and documents the source's."""

    local = False

    def stat(self, key: str) -> os.stat_result:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)

    def kind(self, _directory: str, _name: str) -> NameKind:
        return NameKind.PLAIN


class Unpublished(Overlay):
    """Thread-safe. What is common with `Tree` is said there; all methods that change something are missing.

    Args:
        held: what is shown over the tree.
        state: tells, whenever it is asked, what changes if somebody works on the journal.
        was: what it told before the journal was read.
        look_s: how often it is asked at most.
    """

    def __init__(
        self,
        base: Tree,
        held: UnpublishedWrites,
        state: Callable[[], object],
        was: object,
        *,
        look_s: float = LOOK_S,
        waiting: Callable[[], None] = nothing,
    ) -> None:
        super().__init__(base, _Reader(), held, _Reader(), waiting)
        self._held, self._journal_state, self._was = held, state, was
        self._look_s, self._next_look = look_s, time.monotonic() + look_s
        self._close_at: float | None = None
        self._recover()

    # ---- whether it is still true ----

    def _look(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        with self._lock:
            self._next_look = now + self._look_s
            if self._close_at is None and self._journal_state() != self._was:
                log.warning("somebody works on the journal now: from here on the source alone is shown")
                self._held.forget()
                self._files.unname_all()
                self._twins.clear()
                self._close_at = now + GRACE_S
            elif self._close_at is not None and now >= self._close_at:
                self._files.by_number.clear()
                self._held.close()
                self._next_look = float("inf")

    def lookup(self, parent: int, name: bytes) -> Attributes:
        """As `Tree.lookup`."""
        self._look()
        return super().lookup(parent, name)

    def few(self, number: int, most: int) -> list[EntryRow] | None:
        """As `Tree.few`."""
        self._look()
        return super().few(number, most)

    def scan(self, number: int, cookie: int = 0) -> Iterator[Batch]:
        """As `Tree.scan`."""
        self._look()
        return super().scan(number, cookie)

    # ---- what a mount that is only read shows otherwise than one that is written ----

    def _if_shown(self, found: Attributes) -> Attributes:
        """All directories that can hold chunks are shown, also those that others make."""
        return found

    def _is_implied(self, number: int, directory: str, name: bytes) -> bool:
        return False

    def _only_shown(self, batch: Batch, directory: int) -> Batch:
        return batch

    def statvfs(self) -> os.statvfs_result | None:
        """As `Tree.statvfs`."""
        return self.base.statvfs()


def with_unpublished(
    tree: Tree, source: str, base: str | Path | None = None, *, look_s: float = LOOK_S,
    waiting: Callable[[], None] = nothing,
) -> Tree | Unpublished:  # fmt: skip
    """The tree of a source, with what waits in its journal if nobody works on that; else the tree itself.

    Whatever is wrong with the journal is logged, and never raised. `base` is as in `directory_for`.
    """
    directory = directory_for(source, base)
    try:
        was = _state(directory)
        if was is None:
            return tree
        own_directory(directory)  # what others can write to is not shown
        peek = Journal.peek(directory, source)
        if peek.owner is not None:
            return tree
        held = UnpublishedWrites(peek)
        count = len(held.versions())
        if count or held.problems:
            told = unpublished_words(count, shown=True, damaged=bool(held.problems))
            log.warning("%s: %s", public_name(source), "; ".join([told, *held.problems]))
        if not count:
            return tree
        return Unpublished(tree, held, lambda: _state(directory), was, look_s=look_s, waiting=waiting)
    except FileNotFoundError:  # a mount has just published all and removed it
        return tree
    except (OSError, ShardfsError, ValueError) as e:
        log.warning("%s: %s", public_name(source), unreadable_words(e))
        return tree


def _state(directory: Path) -> tuple[int, ...] | None:
    """What is different after somebody has locked the journal, or removed or added a segment; None without one."""
    try:
        here = os.stat(directory)
    except OSError:
        return None
    try:
        lock = os.lstat(directory / LOCK)
    except OSError:
        return here.st_ino, here.st_mtime_ns
    return here.st_ino, here.st_mtime_ns, lock.st_ino, lock.st_mtime_ns
