"""The calls of a file system, answered for the unsharded tree of a source.

Every file and directory has an inode number. Directories and files of the store have numbers below `TABLE_END`,
computed from their paths; a table keeps them while the kernel refers to them. Chunks and their virtual directories have
numbers from `TABLE_END` on, computed from coordinates (`ChunkDirs`); nothing is stored for them.
"""

from __future__ import annotations

import errno
import itertools
import logging
import math
import os
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from shardfs.formats.documents import MAX_DOCUMENT_BYTES
from shardfs.model.attributes import Attributes, Extent
from shardfs.model.blobs import Blob, ByteRange, Stat
from shardfs.model.dataset import Consolidation, Dataset, Problem
from shardfs.model.errors import CorruptShardError, is_expected
from shardfs.model.listing import Batch, EntryRow
from shardfs.storage.store import DirEntry, Store
from shardfs.vfs.chunk_dirs import BATCH, ChunkDirs, TreePosition, windowed
from shardfs.vfs.discovery import NATIVE, Datasets
from shardfs.vfs.inodes import ROOT, TABLE_END, number_of, numbers_of_ids
from shardfs.vfs.nodes import ChunkNode, Content, DirectoryNode, DocumentNode, FileNode, Inherited, Node, NodeTable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardfs.formats.format import Format
    from shardfs.model.values import Coords
    from shardfs.storage.cache import ByteLRU

log = logging.getLogger(__name__)

REST = 1 << 61
"""Cookies from here on stand for the names in a directory that are not chunks."""

MAX_FOREIGN = 1000
"""Maximum number of non-chunk names cached for a directory of chunks.

The cache saves a request for each missing name.
"""

MAX_CONSOLIDATED = 50_000
"""Maximum number of directories whose documents are consolidated in one document."""


class Calls:
    """The calls of a file system. Thread-safe.

    Every method may block on the store; before that, the tree calls the `waiting` hook.
    """

    def __init__(
        self,
        store: Store,
        index_cache: ByteLRU,
        chunk_cache: ByteLRU,
        index_ttl_s: float = math.inf,
        layout: str = NATIVE,
        *,
        skip_unsupported: bool = False,
        chunk_codec: str | None = None,
    ) -> None:
        self.store = store
        self._index_cache, self._chunk_cache, self._ttl = index_cache, chunk_cache, index_ttl_s
        self._datasets = Datasets(
            store,
            index_cache,
            chunk_cache,
            index_ttl_s,
            layout,
            skip_unsupported=skip_unsupported,
            chunk_codec=chunk_codec,
        )
        self._chunks_of = self._datasets.chunks_of
        self._root = DirectoryNode(ROOT, "", Inherited())
        self._nodes = NodeTable(self._root)

    # ---- numbers ----

    def remember(self, number: int) -> None:
        """Count one more reference from the kernel or a handle to an inode number, until `forget`."""
        if number < TABLE_END:
            self._nodes.remember(number)

    def forget(self, number: int, count: int) -> None:
        """Drop `count` references to an inode number."""
        if number < TABLE_END:
            self._nodes.forget(number, count)

    # ---- the calls of a file system ----

    def lookup(self, parent: int, name: bytes) -> Attributes:
        """Return the child of a directory. Raise FileNotFoundError, another OSError or CorruptShardError."""
        if parent >= TABLE_END:
            chunks = self._chunks_of(parent)
            return chunks.lookup(parent, name) or self._lookup_foreign(chunks, parent, os.fsdecode(name))
        node = self._nodes.get(parent)
        if not isinstance(node, DirectoryNode):
            raise NotADirectoryError(errno.ENOTDIR, "not a directory", node.path)
        return self._lookup_in(node, name)

    def _lookup_foreign(self, chunks: ChunkDirs, parent: int, name: str) -> Attributes:
        """Look up a non-chunk name in a directory of chunks.

        Such names rarely exist, but clients often look for them.
        """
        names = self._index_cache.peek(("foreign", parent))
        # the usual case: the directory has only chunks, so no further check is needed
        if names is not None and not names:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
        place = chunks.place(parent)
        if chunks.reserved(place.level, name):
            raise FileNotFoundError(errno.ENOENT, "no such chunk", name)
        names = self._foreign_names(chunks, parent)
        if names is not None and name not in names:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
        path = f"{chunks.directory_path(place)}/{name}"
        return self._listed(path, self._entry(path, Inherited()), Inherited())

    def _foreign_names(self, chunks: ChunkDirs, directory: int) -> frozenset[str] | None:
        """Return the names in a directory of chunks that are neither chunks nor shards.

        None if there are more than `MAX_FOREIGN` names, or if the server does not list the directory.
        """

        def load() -> tuple[frozenset[str], int, float]:
            place = chunks.place(directory)
            listed = self.store.scan(chunks.directory_path(place))
            foreign = (e.name for e in listed if not chunks.reserved(place.level, e.name))
            names = frozenset(itertools.islice(foreign, MAX_FOREIGN + 1))
            return names, 100 * len(names), self._ttl

        try:
            names = self._index_cache.get(("foreign", directory), load)
        except PermissionError:
            if not self.store.blind:
                raise
            return None
        return names if len(names) <= MAX_FOREIGN else None

    def _lookup_in(self, directory: DirectoryNode, raw: bytes, *, anew: bool = False) -> Attributes:
        content = self._datasets.open(directory)
        name = os.fsdecode(raw)
        if name in content.documents:
            return self._document(directory, name, content.documents[name])
        if (chunks := content.chunks) is not None:
            top = chunks.root
            if top is not None and raw == chunks.collection.names.prefix:
                return chunks.attributes(top)
            found = chunks.lookup_top(raw) if top is None else None
            if found is not None:
                return found
            coords = chunks.unnumbered(raw) if top is None else None
            if coords is not None:
                return self._unnumbered(chunks, directory.child_path(name), coords)
            if chunks.reserved_at_top(name):
                damage = self._index_cache.peek(("damage", number_of(f"{directory.inside}/{name}")))
                if damage is not None:
                    raise damage.with_traceback(None)
                raise FileNotFoundError(errno.ENOENT, "no such chunk", name)
        return self._rewritten(directory, content, name, anew=anew) or self._child(directory, content, name)

    def _unnumbered(self, chunks: ChunkDirs, path: str, coords: Coords) -> Attributes:
        number = int(numbers_of_ids(chunks.path, np.array([coords], np.uint64))[0])
        node = self._nodes.intern(path, lambda number: ChunkNode(number, path, chunks, coords), ChunkNode, number)
        return chunks.chunk_attributes(node.number, coords)

    def _rewritten(
        self, directory: DirectoryNode, content: Content, name: str, *, anew: bool = False
    ) -> Attributes | None:
        """Return a consolidated or rewritten document; None for any other name.

        `anew`: read the stored document again.
        """
        consolidation = content.dataset.consolidation if content.dataset is not None else None
        if consolidation is not None and name == consolidation.name:
            return self._consolidated(directory, consolidation)
        rewriter = content.dataset.rewriter if content.dataset is not None else None
        if rewriter is None or not rewriter.applies(name):
            return None
        known = self._nodes.known(directory.child_path(name))
        if isinstance(known, DocumentNode) and not anew:
            return self._document(directory, name, known.data)
        raw = self.store.documents(directory.inside, [name], MAX_DOCUMENT_BYTES).get(name)
        data = None if raw is None else rewriter.rewrite(directory.inside, name, raw)
        return None if data is None else self._document(directory, name, data)

    def _consolidated(self, directory: DirectoryNode, consolidation: Consolidation) -> Attributes:
        known = self._nodes.known(directory.child_path(consolidation.name))
        if isinstance(known, DocumentNode):
            return self._document(directory, consolidation.name, known.data)
        found, key = {}, ("too much", directory.number)
        is_known = self._index_cache.peek(key)
        for count, below in enumerate(self._directories(start=directory)):
            # clients can do without this document, which would occupy much memory
            if is_known or count == MAX_CONSOLIDATED:
                self._index_cache.get(key, lambda: (True, 100, self._ttl))  # prevents a search at each lookup
                raise FileNotFoundError(errno.ENOENT, "too much lies below to be told in one file", directory.shown)
            inside = below.shown.removeprefix(directory.shown).lstrip("/")
            for name, data in (below.content or Content()).documents.items():
                found[f"{inside}/{name}" if inside else name] = data
        return self._document(directory, consolidation.name, consolidation.build(found))

    def _child(self, directory: DirectoryNode, content: Content, name: str) -> Attributes:
        path, inherited = directory.child_path(name), content.inherited(name)
        if content.hides(name):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        if self.store.blind and (name in content.below or inherited.cells is not None):
            # The documents decide, because web servers give different answers, and some know no directories.
            return self._listed(path, DirEntry(name, True, None), inherited)
        known = self._nodes.known(path) if self.store.remote else None
        if isinstance(known, DirectoryNode) and known.content is not None:
            # already opened; a second check would cost a request to the remote store
            return Attributes(known.number, True, 0, 0)
        try:
            entry = self._entry(path, inherited)
        except (FileNotFoundError, NotADirectoryError):
            # A volume's directory may have no shard yet. Some stores have objects only, and no directories.
            if name not in content.below and not (self.store.blind and self._datasets.is_described(path, inherited)):
                # In a file shown as a directory, the store raises NotADirectoryError, which would be wrong here.
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", path) from None
            entry = DirEntry(name, True, None)
        return self._listed(path, entry, inherited)

    def _entry(self, path: str, inherited: Inherited) -> DirEntry:
        """Return the entry of the store at a path.

        A page of a web server counts as a directory if metadata documents or the parent's listing prove that it is one.
        """
        entry = self.store.entry(path)
        if not entry.page or entry.directory:
            return entry
        is_directory = self._datasets.is_described(path, inherited) or entry.name in self._directories_in(path)
        return entry._replace(directory=is_directory)

    def _directories_in(self, path: str) -> frozenset[str]:
        """Return the names of the directories beside a stored path; none if the parent directory is not listed."""
        parent = path.rpartition("/")[0]

        def load() -> tuple[frozenset[str], int, float]:
            found = frozenset(e.name for e in self._datasets.listed_by_store(parent) if e.directory)
            return found, 100 * len(found), self._ttl

        return self._index_cache.get(("directories", parent), load)

    def _listed(self, path: str, entry: DirEntry, inherited: Inherited) -> Attributes:
        if entry.directory or self._is_dataset(path, entry.name, inherited):
            known = entry.stat is not None and not self.store.remote
            mtime = entry.stat.mtime_ns if entry.stat and known else self._datasets.directory_mtime(path)
            known_as = self._nodes.intern(path, lambda number: DirectoryNode(number, path, inherited), DirectoryNode)
            return Attributes(known_as.number, True, 0, mtime)
        return self._file_attributes(self._nodes.intern(path, lambda number: FileNode(number, path), FileNode))

    def _is_dataset(self, path: str, name: str, inherited: Inherited) -> bool:
        """Return whether a file is shown as a directory."""
        candidates = [f for f in self._datasets.formats if f.may_hold(name)] if not inherited.closed else []
        if not candidates:
            return False
        known = self._nodes.known(path)
        if known is not None:
            return isinstance(known, DirectoryNode)
        found = self._described_by_itself(path, candidates)
        if found is not None:
            self._nodes.intern(path, lambda number: DirectoryNode(number, path, inherited, found), DirectoryNode)
        return found is not None

    def _described_by_itself(self, path: str, candidates: Sequence[Format]) -> Dataset | None:
        for f in candidates:
            try:
                found = f.open_file(path, self.store.open(path))
            except (ValueError, OSError, CorruptShardError) as e:
                self._datasets.report(Problem(path, str(e)))
                continue
            if found is not None:
                return found
        return None

    def _document(self, directory: DirectoryNode, name: str, data: bytes) -> Attributes:
        path = directory.child_path(name)
        node = self._nodes.intern(path, lambda number: DocumentNode(number, path, data), DocumentNode)
        node.data = data
        return Attributes(node.number, False, len(data), self._datasets.document_mtime(path))

    def _file_attributes(self, node: Node) -> Attributes:
        if self._ttl != math.inf:
            self.store.reopen(node.path)
        blob = self.store.open(node.path)
        stat = self._stat(node.path, blob)
        extent = Extent(blob, 0) if blob.fd >= 0 else None
        return Attributes(node.number, False, stat.size, stat.mtime_ns, extent)

    def _stat(self, path: str, blob: Blob) -> Stat:
        """Return size and modification time of a file that is shown unchanged.

        For a remote store they are cached, so that reading pieces costs no further requests.
        """
        if blob.fd >= 0:
            return blob.stat()
        return self._chunk_cache.get((path, "stat"), lambda: (blob.stat(), 100, self._ttl))

    def attributes(self, number: int) -> Attributes:
        if number >= TABLE_END:
            return self._chunks_of(number).attributes(number)
        node = self._nodes.get(number)
        if isinstance(node, DocumentNode):
            return Attributes(number, False, len(node.data), self._datasets.document_mtime(node.path))
        if isinstance(node, DirectoryNode):
            return Attributes(number, True, 0, self._datasets.directory_mtime(node.path))
        if isinstance(node, ChunkNode):
            return node.chunks.chunk_attributes(number, node.coords)
        return self._file_attributes(node)

    def read(self, number: int, offset: int, size: int) -> bytes | memoryview:
        """Return bytes of a file; fewer than `size` only at its end."""
        if number >= TABLE_END:
            return self._chunks_of(number).read(number, offset, size)
        node = self._nodes.get(number)
        if isinstance(node, DocumentNode):
            return memoryview(node.data)[offset : offset + size]
        if isinstance(node, DirectoryNode):
            raise IsADirectoryError(errno.EISDIR, "is a directory", node.path)
        if isinstance(node, ChunkNode):
            return node.chunks.read_chunk(number, node.coords, offset, size)
        blob = self.store.open(node.path)
        if blob.fd >= 0:
            return blob.read([ByteRange(offset, offset + size)])[0]
        end = self._stat(node.path, blob).size

        def fetch(part: ByteRange) -> bytes:
            return self.store.open(node.path).read([ByteRange(part.start, min(part.stop, end))])[0]

        size = min(size, max(end - offset, 0))
        return windowed(self._chunk_cache, node.path, self._ttl, fetch, offset, size)

    def read_many(self, requests: Sequence[tuple[int, int, int]]) -> list[bytes | Exception]:
        """Read several files, given as (number, offset, size). Neighboring chunks of a shard are fetched together."""
        out: list[bytes | Exception] = [b""] * len(requests)
        groups: dict[ChunkDirs, list[int]] = {}
        for i, (number, offset, size) in enumerate(requests):
            chunks = self._chunks_of(number) if number >= TABLE_END else None
            if chunks is not None and chunks.can_read_many:
                groups.setdefault(chunks, []).append(i)
                continue
            try:
                out[i] = bytes(self.read(number, offset, size))
            except Exception as e:
                if not is_expected(e):
                    log.exception("read of %d", number)
                out[i] = e
        for chunks, members in groups.items():
            for i, data in zip(members, chunks.read_many([requests[i] for i in members]), strict=True):
                out[i] = data
        return out

    def small_listing(self, number: int, most: int) -> list[EntryRow] | None:
        """Return the entries of a directory that has at most `most` chunks and nothing else; None for any other."""
        if number < TABLE_END:
            return None
        chunks = self._chunks_of(number)
        found = chunks.small_listing(number, most)
        if found is None:
            return None
        try:
            alone = next(self._foreign(chunks, chunks.place(number)), None) is None
        except OSError:  # `scan` yields the chunks first and then raises this error
            return None
        return found if alone else None

    def scan(self, number: int, cookie: int = 0) -> Iterator[Batch]:
        """Yield the entries of a directory that follow `cookie`, without `.` and `..`. Needs constant memory."""
        if number >= TABLE_END:
            chunks = self._chunks_of(number)
            place = chunks.place(number)
            if place.level >= chunks.depth:
                raise NotADirectoryError(errno.ENOTDIR, "is a chunk", str(number))
            yield from self._scan_both(chunks, place, self._foreign(chunks, place), cookie)
            return
        node = self._nodes.get(number)
        if not isinstance(node, DirectoryNode):
            raise NotADirectoryError(errno.ENOTDIR, "not a directory", node.path)
        content = self._datasets.open(node)
        top = content.chunks if content.chunks is not None and content.chunks.root is None else None
        yield from self._scan_both(top, TreePosition(0, 0), self._others(node, content), cookie)

    def _scan_both(
        self, chunks: ChunkDirs | None, place: TreePosition, others: Iterator[tuple[str, Attributes]], cookie: int
    ) -> Iterator[Batch]:
        if chunks is not None and cookie < REST - 1:
            try:
                yield from chunks.scan(place, cookie)
            except CorruptShardError as e:
                yield _batch([self._damaged_entry(chunks, place, e)], REST - 2)
        yield from self._scan_rest(others, cookie)

    def _damaged_entry(
        self, chunks: ChunkDirs, place: TreePosition, damage: CorruptShardError
    ) -> tuple[str, Attributes]:
        """Return an entry for a shard whose chunks cannot be listed. Opening the entry raises the error.

        An error of the listing itself would make `cp -r` skip the whole directory.
        """
        name = damage.key.rsplit("/", 1)[-1].partition("[")[0]
        number = number_of(f"{chunks.directory_path(place)}/{name}")
        self._index_cache.get(("damage", number), lambda: (damage, 1000, math.inf))
        return name, Attributes(number, False, -1, 0)

    def _foreign(self, chunks: ChunkDirs, place: TreePosition) -> Iterator[tuple[str, Attributes]]:
        key = ("stored", chunks.first, place)
        if not self._is_stored(chunks, place):
            self._index_cache.get(key, lambda: (frozenset[str](), 0, self._ttl))
            return
        path, names = chunks.directory_path(place), set[str]()
        for entry in self._datasets.listed_by_store(path):
            if len(names) <= MAX_FOREIGN:
                names.add(entry.name)
            if not chunks.reserved(place.level, entry.name):
                yield entry.name, self._quick(f"{path}/{entry.name}", entry, Inherited())
        if place.level + 1 < chunks.depth and len(names) <= MAX_FOREIGN and not self.store.blind:
            self._index_cache.get(key, lambda: (frozenset(names), 100 * len(names), self._ttl))

    def _is_stored(self, chunks: ChunkDirs, place: TreePosition) -> bool:
        """Return whether the store may have a directory for these chunks.

        Most directories of chunks exist only in shards elsewhere. If the parent directory was listed before, this costs
        no request.
        """
        if not place.level:
            return True
        above, value = divmod(place.nth, chunks.collection.names.dims[place.level - 1])
        around = self._index_cache.peek(("stored", chunks.first, TreePosition(place.level - 1, above)))
        return around is None or str(value) in around

    def _others(self, directory: DirectoryNode, content: Content) -> Iterator[tuple[str, Attributes]]:
        """Yield the entries of a directory that are not chunks; the size is -1 where it would cost a request."""
        chunks, documents = content.chunks, content.documents
        rewriter = content.dataset.rewriter if content.dataset is not None else None
        made = set(documents)
        for name, data in documents.items():
            yield name, self._document(directory, name, data)
        if content.dataset is not None and content.dataset.consolidation is not None:
            name = content.dataset.consolidation.name
            made.add(name)
            yield name, Attributes(number_of(directory.child_path(name)), False, -1, 0)  # built when it is opened
        if chunks is not None and chunks.root is not None:
            yield chunks.collection.names.prefix.decode(), chunks.attributes(chunks.root)
        if content.dataset is not None and content.dataset.hidden_entirely:
            return
        seen = set()
        named = chunks is not None or bool(content.below)
        for entry in self._datasets.listed_by_store(directory.inside) if named else self.store.scan(directory.inside):
            name = entry.name
            if name in made or content.hides(name) or (chunks is not None and chunks.reserved_at_top(name)):
                continue
            path = directory.child_path(name)
            if rewriter is not None and rewriter.applies(name):
                yield name, Attributes(number_of(path), False, -1, 0)  # listed by name only
                continue
            if name in content.below:
                seen.add(name)
            yield name, self._quick(path, entry, content.inherited(name))
        for name in content.below:
            if name not in seen and name not in documents:
                yield name, self._child(directory, content, name)

    def _quick(self, path: str, entry: DirEntry, inherited: Inherited) -> Attributes:
        if entry.directory or self._is_dataset(path, entry.name, inherited):
            return self._listed(path, entry, inherited)
        if entry.stat is None:
            return Attributes(number_of(path), False, -1, 0)  # listed by name only
        node = self._nodes.intern(path, lambda number: FileNode(number, path), FileNode)
        return Attributes(node.number, False, entry.stat.size, entry.stat.mtime_ns)

    def _scan_rest(self, entries: Iterator[tuple[str, Attributes]], cookie: int) -> Iterator[Batch]:
        skip = max(cookie - REST, 0)
        rest = itertools.islice(entries, skip, None)
        position = REST + skip
        while part := list(itertools.islice(rest, BATCH)):
            yield _batch(part, position)
            position += len(part)

    def statvfs(self) -> os.statvfs_result | None:
        """Return the file system statistics of a local source; None for a remote one."""
        return self.store.statvfs()

    # ---- paths ----

    def resolve(self, path: str) -> Attributes:
        """Walk a path from the root and return its attributes.

        Raise FileNotFoundError or NotADirectoryError like `stat`.
        """
        found = Attributes(ROOT, True, 0, 0)
        parts = [p for p in path.split("/") if p and p != "."]
        if ".." in parts:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        for part in parts:
            try:
                found = self.lookup(found.number, os.fsencode(part))
            except FileNotFoundError as e:  # the error names the whole path instead of its last component
                raise FileNotFoundError(errno.ENOENT, e.strerror or os.strerror(errno.ENOENT), path) from e
        if path.endswith("/") and not found.directory:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return found if parts else self.attributes(ROOT)

    def number(self, path: str) -> int:
        """Return the inode number of a file to read.

        A chunk gets its number without a check that it exists; reading it raises the error. On a remote store, this
        saves a request for the modification time of the shard.
        """
        parent, _, name = path.rstrip("/").rpartition("/")
        directory = self.resolve(parent).number
        if directory >= TABLE_END:
            number = self._chunks_of(directory).number(directory, os.fsencode(name))
        else:
            node = self._nodes.get(directory)
            chunks = self._datasets.open(node).chunks if isinstance(node, DirectoryNode) else None
            at_top = chunks is not None and chunks.root is None
            number = chunks.number(None, os.fsencode(name)) if chunks is not None and at_top else None
        return self.resolve(path).number if number is None else number

    def shown_path(self, number: int) -> str:
        """Return the path of a known inode number; empty for any other number."""
        try:
            if number < TABLE_END:
                return self._nodes.get(number).path
            chunks = self._chunks_of(number)
            place = chunks.place(number)
            return (
                chunks.shown_directory(place)
                if place.level < chunks.depth
                else chunks.chunk_path(chunks.coords(number))
            )
        except FileNotFoundError:
            return ""

    # ---- directories below ----

    def _directory(self, number: int) -> DirectoryNode:
        node = self._nodes.get(number)
        if not isinstance(node, DirectoryNode):
            raise NotADirectoryError(errno.ENOTDIR, "not a directory", node.path)
        return node

    def _directories(self, limit: int | None = None, start: DirectoryNode | None = None) -> Iterator[DirectoryNode]:
        """Open and yield, breadth first, the directories that may hold datasets.

        Damaged ones are reported and skipped.
        """
        queue, count = deque([start or self._root]), 0
        while queue:
            directory = queue.popleft()
            count += 1
            if limit is not None and count > limit:
                return
            try:
                content = self._datasets.open(directory)
                yield directory
                queue += self._subdirectories(directory, content)
            except CorruptShardError as e:
                self._datasets.report(Problem(directory.path, f"{e.key}: {e.why}", damaged=True))
            except OSError as e:
                if directory is self._root:
                    raise
                self._datasets.report(Problem(directory.path, str(e), damaged=True))

    def _subdirectories(self, directory: DirectoryNode, content: Content) -> list[DirectoryNode]:
        dataset, seen, out = content.dataset, set(), list[DirectoryNode]()

        def add(name: str, found: Attributes) -> None:
            node = self._nodes.get(found.number) if found.directory else None
            # one node at a time: with very many nodes, the first would be evicted before the last is seen
            seen.add(name)
            if isinstance(node, DirectoryNode):
                out.append(node)

        skipped = dataset.unwalked | dataset.hidden if dataset is not None else frozenset[str]()
        if content.chunks is None and (dataset is None or not (dataset.closed or dataset.hidden_entirely)):
            told = bool(content.below)
            for e in self._datasets.listed_by_store(directory.inside) if told else self.store.scan(directory.inside):
                if e.name not in skipped and (e.directory or any(f.may_hold(e.name) for f in self._datasets.formats)):
                    add(e.name, self._listed(directory.child_path(e.name), e, content.inherited(e.name)))
        for name in content.below:
            if name not in seen:
                add(name, self._child(directory, content, name))
        return out


def _batch(entries: Sequence[tuple[str, Attributes]], position: int) -> Batch:
    names = np.array([os.fsencode(name) for name, _ in entries], "S")
    rows = [a for _, a in entries]
    return Batch(
        names,
        np.array([a.number for a in rows], np.uint64),
        np.array([a.directory for a in rows], np.bool_),
        np.array([a.size for a in rows], np.int64),
        np.array([a.mtime_ns for a in rows], np.int64),
        np.arange(position + 1, position + 1 + len(rows), dtype=np.uint64),
    )
