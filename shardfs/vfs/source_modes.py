"""The tree of a local source whose files are not for all users: each file has the permission bits of the source."""

from __future__ import annotations

import os
import stat
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING

import numpy as np

from shardfs.model.kinds import is_in
from shardfs.storage.local import LocalStore
from shardfs.vfs.inodes import TABLE_END, TOP
from shardfs.vfs.nodes import DocumentNode
from shardfs.vfs.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardfs.model.attributes import Attributes
    from shardfs.model.listing import Batch, EntryRow
    from shardfs.storage.cache import ByteLRU
    from shardfs.vfs.discovery import Datasets

READ, SEARCH = 0o444, 0o111
"""Permission bits of all users: to read a file, and to open names in a directory."""

ALL = 0o777


class SourceModes:
    """The permission bits (0 to 0o777) of a local source's files. Remembered for `ttl_s` seconds.

    Args:
        gid: the group that the mount shows. The bits of another group are ignored: the kernel does not know its
            members, and those of `gid` may have fewer rights. Such a file gives group members what it gives to all
            users, at most.
    """

    def __init__(self, store: LocalStore, gid: int, cache: ByteLRU, ttl_s: float) -> None:
        self._store = store
        self._gid = gid
        self._cache = cache
        self._ttl = ttl_s

    def directory(self, path: str) -> int:
        """Return the bits of a directory, or of the nearest one above that is in the source."""
        while (bits := self._mode_bits(path, directory=True)) is None and path:
            path = path.rpartition("/")[0]
        return bits or 0

    def document(self, path: str, names: Sequence[str]) -> int:
        """Return the bits of a document. One that is not stored has those that all documents beside it have.

        Args:
            path: of the document, in the store.
            names: the names of the documents that may be beside it.
        """
        if (bits := self._mode_bits(path)) is not None:
            return bits
        above = path.rpartition("/")[0]
        bits = ALL & ~SEARCH & self.directory(above)
        for name in names:
            beside = self._mode_bits(f"{above}/{name}" if above else name)
            bits &= ALL if beside is None else beside
        return bits

    def shard(self, key: str, array: str) -> int:
        """Return the bits of a shard, without those of users that may not search a directory between it and its array.

        A chunk whose shard does not exist has the bits of the array's directory, without those to search.

        Args:
            key: the path of the shard in the store.
            array: the path in the store of the array's directory.
        """
        stem = key.removesuffix(".shard")
        files = [b for name in {key, f"{stem}.index", f"{stem}.data"} if (b := self._mode_bits(name)) is not None]
        bits = reduce(and_, files or [self.directory(array)], ALL & ~SEARCH)
        above = key.rpartition("/")[0]
        while not is_in(array, above):
            searchable = self.directory(above) & SEARCH
            bits &= searchable << 2 | searchable << 1
            above = above.rpartition("/")[0]
        return bits

    def _mode_bits(self, path: str, *, directory: bool = False) -> int | None:
        """Return the bits of a file, or of what is shown as a `directory`; None if there is none."""
        bits = self._cache.get(("mode", path, directory), lambda: (self._look(path, directory), 1, self._ttl))
        return None if bits < 0 else bits

    def _look(self, path: str, directory: bool) -> int:
        try:
            info = os.stat(self._store.path(path))
        except (FileNotFoundError, NotADirectoryError):
            return -1
        except OSError:
            return 0
        bits = info.st_mode & ALL
        if stat.S_ISREG(info.st_mode) and directory:  # a file that is shown as a directory
            bits |= (bits & READ) >> 2
        if info.st_gid != self._gid:
            bits &= ~0o070 | (bits & 0o007) << 3
        return bits


class TreeWithModes(Tree):
    """A tree whose files have the permission bits of a local source, where these do not let all users read.

    Args:
        gid: see `SourceModes`.
        files, directories: whether files and directories have bits of the source.
    """

    def __init__(self, datasets: Datasets, *, gid: int, files: bool, directories: bool) -> None:
        super().__init__(datasets)
        self._modes = None
        if isinstance(self.store, LocalStore):
            self._modes = SourceModes(self.store, gid, datasets.index_cache, datasets.ttl_s)
        self._files_have_bits = files
        self._directories_have_bits = directories

    def lookup(self, parent: int, name: bytes) -> Attributes:
        return self._with_mode(super().lookup(parent, name))

    def attributes(self, number: int) -> Attributes:
        return self._with_mode(super().attributes(number))

    def small_listing(self, number: int, limit: int) -> list[EntryRow] | None:
        rows = super().small_listing(number, limit)
        if rows is None or any(self._mode(row[1], row[2]) for row in rows):
            return None
        return rows

    def scan(self, number: int, cookie: int = 0) -> Iterator[Batch]:
        for batch in super().scan(number, cookie):
            modes = list(map(self._mode, batch.numbers.tolist(), batch.directories.tolist()))
            # A listing has no modes: the kernel asks for each entry.
            yield batch._replace(sizes=np.where(modes, -1, batch.sizes)) if any(modes) else batch

    def _with_mode(self, attributes: Attributes) -> Attributes:
        mode = self._mode(attributes.number, attributes.directory)
        return attributes._replace(mode=mode) if mode else attributes

    def _mode(self, number: int, directory: bool) -> int:
        """Return the file type and the bits of a file or directory; 0 if it has those that the mount has for all."""
        if self._modes is None or not (self._directories_have_bits if directory else self._files_have_bits):
            return 0
        if directory:
            bits = self._modes.directory(self._path_of(number))
            return 0 if bits & (READ | SEARCH) == READ | SEARCH else stat.S_IFDIR | bits
        bits = self._bits(self._modes, number)
        return 0 if bits & READ == READ else stat.S_IFREG | bits

    def _bits(self, modes: SourceModes, number: int) -> int:
        target = self.target_of(number)
        if target is not None:
            shards = target.tree.shards
            return modes.shard(shards.key(shards.number_of(target.coords)), target.tree.directory_path(TOP))
        node = self.nodes.get(number)
        names = self.datasets.source.document_names if isinstance(node, DocumentNode) else ()
        return modes.document(node.path, names)

    def _path_of(self, number: int) -> str:
        if number >= TABLE_END:
            return self._chunks_of(number).directory_path(TOP)
        return self.nodes.get(number).path
