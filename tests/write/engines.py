"""What is put to the proof: the writers alone, or all of the writing engine, in this process and without FUSE."""

from __future__ import annotations

import json
import math
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

from shardfs.formats.registry import formats
from shardfs.model.changes import Begun
from shardfs.model.shard_format import Put
from shardfs.shards import rewriting
from shardfs.shards.rewriting import StoredShard
from shardfs.storage.local import LocalStore
from shardfs.storage.writers.local import LocalWriter
from shardfs.vfs.inodes import ROOT
from shardfs.vfs.tree import open_tree
from shardfs.write.journal import Journal
from shardfs.write.publish_shard import Publishing
from shardfs.write.tree import open_write_tree
from tests.write.faults import Frozen, hooked
from tests.write.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from shardfs.model.blobs import Blob, Plan
    from shardfs.model.collection import Collection
    from shardfs.model.values import Coords
    from shardfs.write.tree import WriteTree
    from tests.write.scenarios import Files
    from tests.write.targets import Target


class Engine(Protocol):
    """`level`: what survives a kill in it ("closed"), or nothing before it is published."""

    level: str

    def open(self, target: Target, root: Path, journal: Path) -> AbstractContextManager[Files]:
        """Recover what a crash left, and serve; at the end let go as a kill would, without publishing."""


# ------------------------------------------------------------------------------------------------ writers alone


class Bare:
    """Writers and plans, with a note of what had begun instead of a journal."""

    level = "published"

    @contextmanager
    def open(self, target: Target, root: Path, journal: Path) -> Iterator[BareFiles]:
        files = BareFiles(target, root, journal / "begun")
        files.recover()
        yield files


class BareFiles:
    """What is written is kept in memory until it is published."""

    def __init__(self, target: Target, root: Path, notes: Path) -> None:
        self._writer = LocalWriter(LocalStore(str(root)))
        documents = {target.document: (root / target.document).read_bytes()}
        datasets = (format.open("", documents) for format in formats() if target.document in format.documents)
        self._collection: Collection = next(d for d in datasets if d is not None and d.collections).collections[0]
        self._pending: dict[str, bytes | None] = {}
        self._notes, self._shards = notes, list(target.shards())

    def recover(self) -> None:
        if self._notes.exists():
            for line in self._notes.read_text().splitlines():
                self._writer.recover(Begun(*json.loads(line)))
            self._notes.unlink()
        for directory in {os.path.dirname(key) for key in self._shards}:
            self._writer.temporary_files.sweep(directory)

    read_only = False

    def write(self, path: str, data: bytes, *, sync: bool = False) -> None:
        self._pending[path] = data

    def patch(self, path: str, offset: int, data: bytes, *, sync: bool = False) -> None:
        self._pending[path] = data

    def write_locked(self, path: str, data: bytes) -> None:
        self._pending[path] = data

    def rename(self, old: str, new: str) -> None:
        self._pending[new] = self._pending.pop(old)
        if not old.endswith(".partial"):
            self._pending[old] = None

    def link(self, old: str, new: str) -> None:
        self._pending[new] = self._pending[old]

    def unlink(self, path: str) -> None:
        self._pending[path] = None
        if "#" in path:
            del self._pending[path]

    def sync_directory(self, path: str) -> None:
        pass

    def read(self, path: str) -> bytes | None:
        return self._pending.get(path)

    def publish(self) -> None:
        shards: dict[int, tuple[dict[Coords, Put], set[Coords]]] = {}
        for path, data in self._pending.items():
            coords = self._coords(path)
            puts, drops = shards.setdefault(rewriting.shard_of(self._collection, coords), ({}, set()))
            if data is None:
                drops.add(coords)
            else:
                transform = self._collection.transform_of(coords)
                puts[coords] = Put(data if transform is None else transform.store(coords, data))
        for shard, (puts, drops) in shards.items():
            self._publish(shard, puts, drops)
        self._pending.clear()
        self._notes.unlink(missing_ok=True)

    def _publish(self, shard: int, puts: dict[Coords, Put], drops: set[Coords]) -> None:
        def make(old: Blob | None) -> Plan | None:
            return StoredShard(self._collection, shard, old).plan(puts, drops)

        below = self._collection.stored_at
        key = rewriting.key(self._collection, shard)
        self._writer.update(f"{below}/{key}" if below else key, Steps(make, self._note))

    def _note(self, note: Begun) -> None:
        with self._notes.open("a") as file:
            file.write(json.dumps(note) + "\n")

    def _coords(self, path: str) -> Coords:
        names = self._collection.names
        inside = path.removeprefix(self._collection.path).strip("/")
        parts = [os.fsencode(part) for part in inside.removeprefix(os.fsdecode(names.prefix)).strip("/").split("/")]
        values = [names.parse(level, part) for level, part in enumerate(parts)]
        return names.coords(tuple(v for v in values if v is not None))


# ---------------------------------------------------------------------------------------------------- all of it

NEVER = 1e6
"""Seconds."""


class Whole:
    """Journal, buffer, writers; publishing is asked for, or comes when a shard is complete."""

    level = "closed"

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
    """The calls that FUSE would make."""

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
        parent, name = self._parent(path, make=True)
        _, handle = self.tree.create(parent, name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._fill(handle, 0, data, sync=sync)

    def write_locked(self, path: str, data: bytes) -> None:
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
        try:
            entry = self.tree.resolve(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return bytes(self.tree.read(entry.number, 0, max(entry.size, 1)))

    def publish(self) -> None:
        self.tree.pending.flush()


ENGINES: dict[str, Engine] = {
    "bare": Bare(),
    "whole": Whole(),
    "in_place": Whole(Publishing(idle_s=NEVER, age_s=NEVER, inplace="uint64")),
}
