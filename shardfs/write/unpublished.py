"""Read-only view of a source and the unpublished writes of its journal, as the next writable mount would show them.

The view locks and changes nothing. When another process locks the journal, the view shows the source alone, because
only that process knows which writes are published, superseded or discarded.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from typing import TYPE_CHECKING

from shardfs.model.errors import ShardfsError
from shardfs.model.kinds import is_in
from shardfs.model.redact import public_name
from shardfs.storage.cache import nothing
from shardfs.storage.source_locks import LOCK, journal_directory
from shardfs.write.buffers import Budget
from shardfs.write.contents import FileContents
from shardfs.write.directories import Directories
from shardfs.write.journal import Journal
from shardfs.write.journal.places import own_directory
from shardfs.write.names import Names
from shardfs.write.overlay import Overlay
from shardfs.write.pending import Pending
from shardfs.write.recover import LOOK_S, unpublished_words, unreadable_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from shardfs.model.attributes import Attributes
    from shardfs.model.listing import Batch, EntryRow
    from shardfs.vfs.chunk_dirs import Target
    from shardfs.vfs.tree import Tree
    from shardfs.write.journal import Position, Reading
    from shardfs.write.pending import Version

log = logging.getLogger(__name__)

GRACE_S = 60.0
"""Seconds for which open files stay readable after the view switches to the source alone.

The open descriptors keep the journal's disk space occupied for as long.
"""


class UnpublishedWrites:
    """The unpublished writes of a journal, as `PendingWrites`."""

    def __init__(self, peek: Reading) -> None:
        self._peek: Reading | None = peek
        self._directory = peek.directory
        pending = Pending(peek.recovered)
        self.problems, self.layout = peek.problems + pending.losses(), pending.layout or ""
        shown = ((p, v) for p, v in pending.versions.items() if not (v.scratch or v.is_document))
        self._versions = dict(shown)

    def versions(self) -> dict[str, Version]:
        return dict(self._versions)

    def holds(self, path: str) -> bool:
        return path in self._versions

    def drop(self, path: str, _target: Target | None) -> None:
        """Hide a path, because another name has replaced its chunk."""
        self._versions.pop(path, None)

    def retarget(self, path: str, target: Target | None) -> None:
        """Do nothing, because a read-only view publishes nothing."""

    def read(self, data: Position, offset: int, size: int) -> bytes:
        peek = self._peek  # a reference: the descriptors stay open until this read ends
        if peek is None:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return peek.read(data, offset, size)

    def count(self, path: str) -> int:
        return sum(is_in(known, path) for known in self._versions)

    def failure(self, path: str) -> OSError | None:
        version = self._versions.get(path)
        return OSError(errno.ESTALE, version.conflict) if version is not None and version.conflict else None

    def statvfs(self) -> os.statvfs_result:
        return os.statvfs(self._directory)

    def forget(self) -> None:
        """Show no unpublished writes any more. Their bytes stay readable until `close`."""
        self._versions.clear()

    def close(self) -> None:
        """Release the journal's files. They are closed after the last read."""
        self._peek = None


class Unpublished:
    """A `Tree` with unpublished writes shown over it. Thread-safe. It has no methods that change files.

    The calls that it does not define are those of `Overlay`. Like a read-only mount, it shows all directories that can
    hold chunks, and the statistics of the source's file system.

    Args:
        base: the tree of the source.
        held: the unpublished writes.
        state: returns a value that changes as soon as another process works on the journal.
        was: the value of `state()` before the journal was read.
        look_s: seconds between two calls of `state`, at least.
        waiting: called before a thread waits.
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
        self._held, self._journal_state, self._was = held, state, was
        self._look_s, self._next_look = look_s, time.monotonic() + look_s
        self._close_at: float | None = None
        self._names = names = Names(base, None, waiting)
        self._contents = FileContents(names, held, None, Budget(0, lambda: -1))  # no file is open for writing
        self._view = view = Overlay(self._contents, Directories(names, local=False, every=True))
        self.store, self.retry, self.caches, self.statvfs = base.store, base.retry, base.caches, base.statvfs
        self.hooks, self.note = base.hooks, None
        self.shown_path, self.remember, self.forget = names.shown_path, names.remember, names.forget
        self.attributes, self.xattrs, self.usage = view.attributes, view.xattrs, view.usage
        self.read, self.read_many = view.read, view.read_many
        view.recover()

    # ---- detecting a writer ----

    def _look(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        with self._names.lock:
            self._next_look = now + self._look_s
            if self._close_at is None and self._journal_state() != self._was:
                log.warning("another process works on the journal: from now on the mount shows the source alone")
                self._held.forget()
                self._contents.forget_names()
                self._close_at = now + GRACE_S
            elif self._close_at is not None and now >= self._close_at:
                self._names.files.by_number.clear()
                self._held.close()
                self._next_look = float("inf")

    def lookup(self, parent: int, name: bytes) -> Attributes:
        """Look up a name like `Tree.lookup`, after a check for a writer."""
        self._look()
        return self._view.lookup(parent, name)

    def resolve(self, path: str) -> Attributes:
        """Walk a path like `Tree.resolve`, after a check for a writer."""
        self._look()
        return self._view.resolve(path)

    def number(self, path: str) -> int:
        """Return the inode number of a file to read."""
        return self.resolve(path).number

    def small_listing(self, number: int, most: int) -> list[EntryRow] | None:
        """List a small directory like `Tree.small_listing`, after a check for a writer."""
        self._look()
        return self._view.small_listing(number, most)

    def scan(self, number: int, cookie: int = 0) -> Iterator[Batch]:
        """List a directory like `Tree.scan`, after a check for a writer."""
        self._look()
        return self._view.scan(number, cookie)


def with_unpublished(
    tree: Tree, source: str, base: str | Path | None = None, layout: str = "", *, look_s: float = LOOK_S,
    waiting: Callable[[], None] = nothing,
) -> Tree | Unpublished:  # fmt: skip
    """Return the tree of a source with the unpublished writes of its journal.

    Return `tree` itself if there are none, or another process has locked the journal, or they were written with another
    layout than that of the tree. Problems of the journal are logged, not raised. `base` is the directory of all
    journals, as in `journal_directory`.
    """
    directory = journal_directory(source, base)
    try:
        was = _state(directory)
        if was is None:
            return tree
        own_directory(directory)  # a journal that other users can change is not shown
        peek = Journal.peek(directory, source)
        if peek.owner is not None:
            return tree
        held = UnpublishedWrites(peek)
        count, shown = len(held.versions()), held.layout == layout
        if count or held.problems:
            warning = unpublished_words(count, held.layout, shown=shown, damaged=bool(held.problems))
            log.warning("%s: %s", public_name(source), "; ".join([warning, *held.problems]))
        if not count or not shown:
            return tree
        return Unpublished(tree, held, lambda: _state(directory), was, look_s=look_s, waiting=waiting)
    except FileNotFoundError:  # a mount has just published all writes and removed the journal
        return tree
    except (OSError, ShardfsError, ValueError) as e:
        log.warning("%s: %s", public_name(source), unreadable_words(e))
        return tree


def _state(directory: Path) -> tuple[int, ...] | None:
    """Return a value that changes when a process locks the journal or changes its segments; None without a journal."""
    try:
        here = os.stat(directory)
    except OSError:
        return None
    try:
        lock = os.lstat(directory / LOCK)
    except OSError:
        return here.st_ino, here.st_mtime_ns
    return here.st_ino, here.st_mtime_ns, lock.st_ino, lock.st_mtime_ns
