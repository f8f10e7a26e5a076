"""Files and directories of the store by path: their nodes, attributes and bytes."""

from __future__ import annotations

import errno
import itertools
import math
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

from shardfs.model.attributes import Attributes, Extent
from shardfs.model.blobs import Blob, ByteRange, Stat
from shardfs.model.dataset import Problem
from shardfs.model.errors import NOT_FOUND, CorruptShardError, message
from shardfs.storage.cache import WindowCache
from shardfs.vfs.directory_content import NOTHING_INHERITED, Inherited
from shardfs.vfs.inodes import TreePosition, number_of
from shardfs.vfs.nodes import DirectoryNode, DocumentNode, FileNode, Node, NodeTable
from shardfs.vfs.source_datasets import directory_mtime

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardfs.formats.format import Format
    from shardfs.model.dataset import Dataset
    from shardfs.model.values import Version
    from shardfs.storage.store import DirEntry
    from shardfs.vfs.chunk_dirs import ChunkDirs
    from shardfs.vfs.discovery import Datasets


MAX_NAMES = 50_000
"""Maximum number of names cached for a directory of chunks. The cache saves a request for each missing name."""


class StoredFiles:
    """The files that are shown unchanged, and the nodes of all files of the store."""

    def __init__(self, nodes: NodeTable, datasets: Datasets) -> None:
        self.store = datasets.store
        self._nodes = nodes
        self._datasets = datasets
        self._source = datasets.source
        self._windows = WindowCache(datasets.chunk_cache)

    # ---- nodes ----

    def entry(self, path: str, inherited: Inherited) -> DirEntry:
        """Return the entry of the store at a path. Raise FileNotFoundError, or another OSError if the store fails.

        A page of a web server counts as a directory if metadata documents or the parent's listing prove that it is one.
        """
        entry = self.store.entry(path)
        if not entry.page or entry.directory:
            return entry
        is_directory = entry.name in self._directories_beside(path) or self._source.is_described(path, inherited)
        return entry._replace(directory=is_directory)

    def _directories_beside(self, path: str) -> frozenset[str]:
        """Return the names of the directories beside a stored path; none if the parent directory is not listed."""
        parent = path.rpartition("/")[0]

        def load() -> tuple[frozenset[str], int, float]:
            names = frozenset(e.name for e in self._source.listed(parent) if e.directory)
            return names, 100 * len(names), self._datasets.ttl_s

        return self._datasets.index_cache.get(("directories", parent), load)

    def known(self, path: str, entry: DirEntry, inherited: Inherited) -> Attributes:
        """Return the attributes of an entry of the store, whose node is known from now on. Raise as `attributes`."""
        if entry.directory or self._is_dataset(path, entry.name, inherited):
            trusted = entry.stat is not None and not self.store.remote
            mtime = entry.stat.mtime_ns if entry.stat and trusted else directory_mtime(self.store, path)
            directory = self._nodes.intern(path, DirectoryNode, inherited)
            return Attributes(directory.number, True, 0, mtime)
        if self.store.remote and (stat := entry.stat) is not None:
            self._datasets.chunk_cache.get((path, "stat"), lambda: (stat, 100, self._datasets.ttl_s))
        return self.attributes(self._nodes.intern(path, FileNode))

    def listed(self, path: str, entry: DirEntry, inherited: Inherited) -> Attributes:
        """Return the attributes of an entry for a listing, with size -1 where they are unknown or cost a request.

        Raises nothing: a file that cannot be read gets size -1, so that the kernel looks it up and gets the error.
        """
        try:
            if entry.directory or self._is_dataset(path, entry.name, inherited):
                return self.known(path, entry, inherited)
        except OSError:  # was reported; the kernel will look the name up, and gets the error or a directory then
            return listed_by_name(path)
        if entry.stat is None:
            return listed_by_name(path)
        node = self._nodes.intern(path, FileNode)
        return Attributes(node.number, False, entry.stat.size, entry.stat.mtime_ns)

    def _is_dataset(self, path: str, name: str, inherited: Inherited) -> bool:
        """Return whether a file is shown as a directory."""
        candidates = [f for f in self._source.formats if f.may_hold(name)] if not inherited.closed else []
        if not candidates:
            return False
        node = self._nodes.known(path)
        if node is None and (dataset := self.dataset_in_file(path, candidates)) is not None:
            node = self._nodes.intern(path, DirectoryNode, inherited, dataset)
        return isinstance(node, DirectoryNode)

    def dataset_in_file(self, path: str, candidates: Sequence[Format]) -> Dataset | None:
        """Return the dataset that a single file contains; None if it contains none, is damaged, or does not exist.

        Damage is reported as a problem. Raise OSError, which is reported, too, if the file cannot be read: what it
        contains is unknown, and the next call reads it again.

        Args:
            candidates: the formats that may have a dataset in a file of this name; the first one comes first.
        """
        for f in candidates:
            try:
                dataset = f.open_file(path, self.store.open(path))
            except NOT_FOUND:
                continue
            except (ValueError, CorruptShardError) as e:
                self._datasets.report(Problem(path, str(e)))
                continue
            except OSError as e:
                self._datasets.report(Problem(path, message(e), damaged=True))
                raise
            if dataset is not None:
                return dataset
        return None

    def document(self, path: str, data: bytes) -> Attributes:
        """Return the attributes of a document that is shown with these bytes, whose node is known from now on."""
        node = self._nodes.intern(path, DocumentNode, data)
        node.data = data
        return self.document_attributes(node)

    def document_attributes(self, node: DocumentNode) -> Attributes:
        """Return the attributes of a document."""
        return Attributes(node.number, False, len(node.data), self._document_mtime(node.path))

    def _document_mtime(self, path: str) -> int:
        """Return the modification time, in ns, of a generated or rewritten document."""
        if self._datasets.layout is not None or not self.store.remote:
            return directory_mtime(self.store, path)
        with suppress(OSError):
            return self.store.open(path).stat().mtime_ns  # unlike `entry`, through obstore
        return 0

    # ---- attributes and bytes of files that are shown unchanged ----

    def attributes(self, node: Node) -> Attributes:
        """Return the attributes of a stored file that is shown unchanged, with its extent if it is local.

        Raise FileNotFoundError if it does not exist, and OSError if it cannot be opened.
        """
        blob, stat = self._opened(node.path)
        extent = Extent(blob, 0) if blob.fd >= 0 else None
        return Attributes(node.number, False, stat.size, stat.mtime_ns, extent)

    def version(self, path: str) -> Version:
        """Return the version of a file to which its shown attributes belong; in a remote store, up to `ttl_s` old.

        Raise FileNotFoundError if the file was gone then, and as `attributes`.
        """
        return self._opened(path)[1].version

    def _opened(self, path: str) -> tuple[Blob, Stat]:
        if self._datasets.ttl_s != math.inf:
            self.store.reopen(path)
        blob = self.store.open(path)
        return blob, self._stat(path, blob)

    def _stat(self, path: str, blob: Blob) -> Stat:
        """Return size and modification time of a file.

        For a remote store they are cached, so that reading pieces costs no further requests.
        """
        if blob.fd >= 0:
            return blob.stat()
        return self._datasets.chunk_cache.get((path, "stat"), lambda: (blob.stat(), 100, self._datasets.ttl_s))

    def read(self, path: str, offset: int, size: int) -> bytes | memoryview:
        """Return `size` bytes of a file from `offset` on; fewer only at its end.

        Raise OSError; StaleShardError if a remote file was replaced during the call.
        """
        blob = self.store.open(path)
        if blob.fd >= 0:
            return blob.read([ByteRange(offset, offset + size)])[0]
        stat = self._stat(path, blob)
        end = stat.size

        def fetch(part: ByteRange) -> bytes:
            return self.store.open(path).read([ByteRange(part.start, min(part.stop, end))])[0]

        expires = monotonic() + self._datasets.ttl_s
        return self._windows.read((path, stat), fetch, offset, min(size, max(end - offset, 0)), expires)

    def invalidate(self, path: str) -> None:
        """Drop everything cached for a file after a change in the store."""
        self.store.reopen(path)
        stat: Stat | None = self._datasets.chunk_cache.former((path, "stat"))
        if stat is not None:  # not all stores tell equally long versions of a file apart
            self._windows.invalidate((path, stat), stat.size)
        self._datasets.chunk_cache.invalidate((path, "stat"))


def listed_by_name(path: str) -> Attributes:
    """Return attributes without a size, for a name whose size would cost a request."""
    return Attributes(number_of(path), False, -1, 0)


class ForeignFiles:
    """Stored files in the directories of chunks that are neither chunks nor shards.

    They rarely exist, but clients often look for them, and every listing must contain them. The cache holds all names
    that the store has in a directory, by the collection and the position of the directory.
    """

    def __init__(self, files: StoredFiles, datasets: Datasets) -> None:
        self._files = files
        self._source = datasets.source
        self._store = datasets.store
        self._cache = datasets.index_cache
        self._ttl = datasets.ttl_s

    def lookup(self, chunks: ChunkDirs, parent: int, name: str) -> Attributes:
        """Return the attributes of a stored file or directory in a directory of chunks.

        Raise FileNotFoundError if missing. A name that is reserved for chunks or shards counts as missing.
        """
        place = chunks.numbers.position(parent)
        if chunks.reserved(place.level, name):
            raise FileNotFoundError(errno.ENOENT, "no such chunk", name)
        names = self._names(chunks, place)
        if names is not None and name not in names:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
        path = f"{chunks.directory_path(place)}/{name}"
        return self._files.known(path, self._files.entry(path, NOTHING_INHERITED), NOTHING_INHERITED)

    def scan(self, chunks: ChunkDirs, place: TreePosition) -> Iterator[tuple[str, Attributes]]:
        """Yield names and attributes of the foreign entries of a directory; size -1 where it would cost a request.

        Raise OSError if the store cannot list the directory; a directory that the store does not have is empty.
        """
        if self._is_absent(chunks, place):
            return
        path, names = chunks.directory_path(place), set[str]()
        for entry in self._source.listed(path):
            if len(names) <= MAX_NAMES:
                names.add(entry.name)
            if not chunks.reserved(place.level, entry.name):
                yield entry.name, self._files.listed(f"{path}/{entry.name}", entry, NOTHING_INHERITED)
        if names or not self._store.blind:  # a web server that does not list this directory may have it all the same
            self._cache.get(_key(chunks, place), lambda: self._cached(names))

    def _names(self, chunks: ChunkDirs, place: TreePosition) -> frozenset[str] | None:
        """Return all names that the store has in a directory; None if they are too many, or if a server lists none."""
        key = _key(chunks, place)
        names: frozenset[str] | None = self._cache.peek(key)
        if names is not None:
            return names
        if self._is_absent(chunks, place):
            return frozenset()
        path = chunks.directory_path(place)
        try:
            return self._cache.get(key, lambda: self._cached(entry.name for entry in self._store.scan(path)))
        except PermissionError:
            if not self._store.blind:
                raise
            return None

    def _cached(self, names: Iterable[str]) -> tuple[frozenset[str] | None, int, float]:
        """Return what the cache holds for the names in a directory, its size, and how long."""
        some = frozenset(itertools.islice(names, MAX_NAMES + 1))
        return (some, 100 * len(some), self._ttl) if len(some) <= MAX_NAMES else (None, 100, self._ttl)

    def _is_absent(self, chunks: ChunkDirs, place: TreePosition) -> bool:
        """Return whether the names in a directory above prove that the store has no directory for these chunks.

        Most directories of chunks exist only in shards elsewhere.
        """
        if not place.level:
            return False
        nth, value = divmod(place.nth, chunks.numbers.dims[place.level - 1])
        above = TreePosition(place.level - 1, nth)
        names = self._cache.peek(_key(chunks, above))
        return self._is_absent(chunks, above) if names is None else str(value) not in names

    def invalidate(self, chunks: ChunkDirs, directory: int) -> None:
        """Drop the cached names of a directory of chunks."""
        self._cache.invalidate(_key(chunks, chunks.numbers.position(directory)))


def _key(chunks: ChunkDirs, place: TreePosition) -> tuple[str, int, TreePosition]:
    """Return the key of the cache for the names in a directory of chunks."""
    return "names", chunks.first, place
