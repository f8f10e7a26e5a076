"""What is put to the proof: all of the writing engine, in this process and without FUSE."""

from __future__ import annotations

import math
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from shardfs.vfs.inodes import ROOT
from shardfs.vfs.tree import open_tree
from shardfs.write.journal import Journal
from shardfs.write.publish_shard import Publishing
from shardfs.write.tree import open_write_tree
from tests.write.faults import Frozen, hooked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from shardfs.write.tree import WriteTree
    from tests.write.targets import Target


NEVER = 1e6
"""Seconds."""


class Whole:
    """Journal, buffer, writers; publishing is asked for, or comes when a shard is complete."""

    def __init__(self, publishing: Publishing | None = None) -> None:
        self._publishing = publishing

    def open(self, target: Target, root: Path, journal: Path) -> AbstractContextManager[TreeFiles]:
        return mounted(root, journal, target.layout, self._publishing)


@contextmanager
def mounted(
    store: Path, journal: Path, layout: str = "native", publishing: Publishing | None = None,
    index_ttl_s: float = math.inf,
) -> Iterator[TreeFiles]:  # fmt: skip
    """The writable tree of a source in a layout. By default, publishing must be asked for."""
    base = open_tree(str(store), layout=layout, index_ttl_s=index_ttl_s)
    # Small, so that segments come and go.
    tokens = Journal.open(journal, str(store), limit_bytes=2 << 20, reserve_bytes=256 << 10, commit_s=0)
    publishing = publishing or Publishing(idle_s=NEVER, age_s=NEVER)
    try:
        words = "" if layout == "native" else f"layout={layout}"
        tree = open_write_tree(base, tokens, publishing=publishing, layout=words)
    except BaseException:
        tokens.close(clean=False)
        raise
    files = TreeFiles(tree, tokens)
    try:
        yield files
    finally:
        if not files.dead:
            tree.pending.close(5)


class TreeFiles:
    """The calls that FUSE would make. Paths are as they are shown; errors are OSError."""

    def __init__(self, tree: WriteTree, journal: Journal) -> None:
        self.tree, self._journal, self.dead = tree, journal, False

    def die(self) -> None:
        """Nothing reaches the disk any more, and the locks are free: as after kill -9."""
        self.dead = True
        with hooked(Frozen()), suppress(OSError):
            self.tree.pending.close(0)
        with suppress(OSError):
            self._journal._close_files()

    @property
    def read_only(self) -> bool:
        """Whether nothing can be written any more until all is opened anew."""
        return self._journal.read_only is not None

    def _parent(self, path: str, *, make: bool = False) -> tuple[int, bytes]:
        directory, _, name = path.rpartition("/")
        number = ROOT
        for part in filter(None, directory.split("/")):
            try:
                number = self.tree.lookup(number, os.fsencode(part)).number
            except FileNotFoundError:
                if not make:
                    raise
                number = self.tree.mkdir(number, os.fsencode(part), 0o755).number
        return number, os.fsencode(name)

    def write(self, path: str, data: bytes, *, sync: bool = False) -> None:
        """Open with O_CREAT and O_TRUNC, write, fsync if wanted, close."""
        parent, name = self._parent(path, make=True)
        _, handle = self.tree.create(parent, name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._fill(handle, 0, data, sync=sync)

    def write_locked(self, path: str, data: bytes) -> None:
        """As tensorstore does: to `path.__lock`, fsync, rename, fsync of the directory, close."""
        parent, name = self._parent(path, make=True)
        lock = name + b".__lock"
        _, handle = self.tree.create(parent, lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self.tree.write(handle, 0, memoryview(data))
            self.tree.fsync(handle)
            self.tree.rename(parent, lock, parent, name, noreplace=False)
            self.tree.sync_directory(parent)
        finally:
            try:
                self.tree.flush(handle)
            finally:
                self.tree.release(handle)

    def patch(self, path: str, offset: int, data: bytes, *, sync: bool = False) -> None:
        """Open for reading and writing, pwrite, fsync if wanted, close."""
        handle = self.tree.open(self.tree.resolve(path).number, os.O_RDWR)
        self._fill(handle, offset, data, sync=sync)

    def _fill(self, handle: int, offset: int, data: bytes, *, sync: bool) -> None:
        half = len(data) // 2
        try:
            self.tree.write(handle, offset, memoryview(data)[:half])
            self.tree.write(handle, offset + half, memoryview(data)[half:])
            if sync:
                self.tree.fsync(handle)
            self.tree.flush(handle)
        finally:
            self.tree.release(handle)

    def rename(self, old: str, new: str) -> None:
        self.tree.rename(*self._parent(old), *self._parent(new, make=True), noreplace=False)

    def link(self, old: str, new: str) -> None:
        self.tree.link(self.tree.resolve(old).number, *self._parent(new, make=True))

    def unlink(self, path: str) -> None:
        self.tree.unlink(*self._parent(path))

    def sync_directory(self, path: str) -> None:
        self.tree.sync_directory(self.tree.resolve(path).number)

    def read(self, path: str) -> bytes | None:
        """None if there is no such file."""
        try:
            entry = self.tree.resolve(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return bytes(self.tree.read(entry.number, 0, max(entry.size, 1)))

    def publish(self) -> None:
        """All that is closed is in the store when this returns."""
        self.tree.pending.flush()


ENGINES = {
    "whole": Whole(),
    "in_place": Whole(Publishing(idle_s=NEVER, age_s=NEVER, inplace="uint64")),
}
