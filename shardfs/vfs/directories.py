"""The directories of the store, as the tree shows them: lookups, listings, kinds of names, and the walk below one."""

from __future__ import annotations

import errno
import math
import os
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

from shardfs.formats.documents import MAX_DOCUMENT_BYTES
from shardfs.model.attributes import Attributes
from shardfs.model.dataset import Problem
from shardfs.model.errors import NOT_FOUND, CorruptShardError, message
from shardfs.model.kinds import NameKind, is_in, is_scratch
from shardfs.storage.load_ahead import load_ahead
from shardfs.storage.store import DirEntry
from shardfs.vfs.chunk_dirs import NameMeaning, not_a_chunk
from shardfs.vfs.directory_content import CollectionAt, Content
from shardfs.vfs.inodes import TABLE_END, number_of
from shardfs.vfs.nodes import ChunkNode, DirectoryNode, DocumentNode, FileNode, Node, NodeTable
from shardfs.vfs.stored_files import listed_by_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardfs.formats.translate import Translation
    from shardfs.model.dataset import Consolidation
    from shardfs.model.values import Coords, Version
    from shardfs.vfs.chunk_dirs import ChunkDirs
    from shardfs.vfs.discovery import Datasets
    from shardfs.vfs.stored_files import StoredFiles

T = TypeVar("T")

MAX_TRIES = 5
"""How often a document is consolidated at most if documents below change meanwhile."""

MAX_CONSOLIDATED = 50_000
"""Maximum number of directories whose documents are consolidated in one document."""


class StoreDirectories:
    """Opened directories of the store: datasets, groups, and plain directories on the way to them."""

    def __init__(self, nodes: NodeTable, files: StoredFiles, datasets: Datasets) -> None:
        self.root = nodes.root
        self._nodes = nodes
        self._files = files
        self._datasets = datasets
        self._source = datasets.source
        self._store = datasets.store
        self._changes = 0  # counts the calls of `generated`

    def content(self, number: int) -> Content:
        """Return the content of the directory with this inode number.

        Raise as `NodeTable.directory` and `Datasets.open`.
        """
        return self._datasets.open(self._nodes.directory(number))

    def stored_path(self, number: int) -> str | None:
        """Return the path in the store of a known file or directory that is shown unchanged; None for any other."""
        node = self._nodes.get(number) if number < TABLE_END else None
        return node.path if isinstance(node, FileNode | DirectoryNode) else None

    def shown_version(self, path: str) -> Version:
        """Return the version of the file that is shown unchanged at a path; None if none is shown there.

        The store is asked only for a file that was looked up or listed, and if what it answered then has expired.
        """
        with suppress(*NOT_FOUND):
            return self._files.version(path) if isinstance(self._nodes.known(path), FileNode) else None
        return None

    # ---- lookups ----

    def lookup(
        self, directory: DirectoryNode, raw: bytes, age_s: float = math.inf, *, anew: bool = False
    ) -> Attributes:
        """Return the child of a directory. Raise FileNotFoundError, another OSError or CorruptShardError.

        A rewritten document whose stored bytes were read more than `age_s` seconds ago is read again. If it has
        changed, it gets another inode number. `anew`: read it again in any case, and keep the number.
        """
        content = self._datasets.open(directory)
        name = os.fsdecode(raw)
        if name in content.documents:
            return self._files.document(directory.child_path(name), content.documents[name])
        if (chunks := content.chunks) is not None:
            if chunks.root is not None and raw == chunks.collection.names.prefix:
                return chunks.attributes(chunks.root)
            if chunks.root is None and (attributes := chunks.lookup(None, raw)) is not None:
                return attributes
            if chunks.root is None and (coords := chunks.unnumbered(raw)) is not None:
                return self._unnumbered(chunks, directory.child_path(name), coords)
            if chunks.reserved_at_top(name):
                self._datasets.damage.require_none(number_of(f"{directory.inside}/{name}"))
                raise FileNotFoundError(errno.ENOENT, "no such chunk", name)
        return self._generated(directory, content, name, age_s, anew=anew) or self._stored(directory, content, name)

    def _unnumbered(self, chunks: ChunkDirs, path: str, coords: Coords) -> Attributes:
        number = chunks.numbers.of_chunk(chunks.path, coords)
        node = self._nodes.intern(path, ChunkNode, chunks, coords, number=number)
        return chunks.chunk_attributes(node.number, coords)

    def _generated(
        self, directory: DirectoryNode, content: Content, name: str, age_s: float, *, anew: bool
    ) -> Attributes | None:
        """Return a consolidated or rewritten document; None for any other name."""
        if not content.is_generated(name):
            return None
        path = directory.child_path(name)
        node = self._nodes.known(path)
        is_consolidated = content.is_consolidated(name)
        is_old = anew or (isinstance(node, DocumentNode) and self._source.are_old(node.checked, age_s))
        if isinstance(node, DocumentNode) and (is_consolidated or not is_old):
            return self._files.document_attributes(node)
        if content.shown_dataset.consolidation is not None and is_consolidated:
            return self._consolidated(directory, path, content.shown_dataset.consolidation)
        rewriter = content.dataset.rewriter if content.dataset is not None else None
        raw = self._store.documents(directory.inside, [name], MAX_DOCUMENT_BYTES).get(name)
        data = None if raw is None or rewriter is None else rewriter.rewrite(directory.inside, name, raw)
        if isinstance(node, DocumentNode) and not anew:
            node.checked = monotonic()
            if data != node.data:
                self._nodes.outdate(node)
        return None if data is None else self._files.document(path, data)

    def _consolidated(self, directory: DirectoryNode, path: str, consolidation: Consolidation) -> Attributes:
        """Build a document from those below a directory, anew if these change meanwhile."""
        for _ in range(MAX_TRIES):
            changes = self._changes
            attributes = self._files.document(path, consolidation.build(self._documents_below(directory)))
            if changes == self._changes:
                break
        return attributes

    def _documents_below(self, directory: DirectoryNode) -> dict[str, bytes]:
        """Return the documents shown in a directory and below, by relative path. Raise FileNotFoundError for too many.

        Clients can do without a consolidated document, which would occupy much memory then.
        """
        documents, key, cache = {}, ("too much", directory.number), self._datasets.index_cache
        is_too_much = cache.peek(key)
        for count, below in enumerate(self.walk(start=directory)):
            if is_too_much or count == MAX_CONSOLIDATED:
                cache.get(key, lambda: (True, 100, self._datasets.ttl_s))  # prevents a search at each lookup
                raise FileNotFoundError(errno.ENOENT, "too much lies below to be told in one file", directory.shown)
            inside = below.shown.removeprefix(directory.shown).lstrip("/")
            for name, raw in (below.content or Content()).documents.items():
                documents[f"{inside}/{name}" if inside else name] = raw
        return documents

    def _stored(self, directory: DirectoryNode, content: Content, name: str) -> Attributes:
        """Return a child that is stored under its own name, or that only documents name."""
        path, inherited = directory.child_path(name), content.inherited(name)
        if content.hides(name):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        if self._store.remote and (name in content.below or (self._store.blind and inherited.cells is not None)):
            # The documents decide: object stores have no directories, and web servers give different answers.
            return self._files.known(path, DirEntry(name, True, None), inherited)
        node = self._nodes.known(path) if self._store.remote else None
        if isinstance(node, DirectoryNode) and node.content is not None:
            # already opened; a second check would cost a request to the remote store
            return Attributes(node.number, True, 0, 0)
        try:
            entry = self._files.entry(path, inherited)
        except NOT_FOUND:
            # A volume's directory may have no shard yet. Some stores have objects only, and no directories.
            if name not in content.below and not (self._store.blind and self._source.is_described(path, inherited)):
                # In a file shown as a directory, the store raises NotADirectoryError, which would be wrong here.
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", path) from None
            entry = DirEntry(name, True, None)
        return self._files.known(path, entry, inherited)

    def renew(self, directory: DirectoryNode, child: Node, name: str) -> None:
        """Read a child of a directory again after documents have changed: a document, or what a directory inherits.

        Raise the errors of `lookup`. The children of a directory are not read.
        """
        if isinstance(child, DirectoryNode):
            child.inherited = self._datasets.open(directory).inherited(name)
        elif isinstance(child, DocumentNode) and child.outdated:
            return
        elif isinstance(child, DocumentNode) or name in self._source.document_names:
            self.lookup(directory, os.fsencode(name), anew=True)

    # ---- listings ----

    def scan(self, directory: DirectoryNode) -> Iterator[tuple[str, Attributes]]:
        """Yield names and attributes of entries that are no chunks; the size is -1 where it would cost a request.

        Raise OSError if the store cannot list the directory.
        """
        content = self._datasets.open(directory)
        chunks = content.chunks
        for name, raw in content.documents.items():
            yield name, self._files.document(directory.child_path(name), raw)
        if content.shown_dataset.consolidation is not None:  # built when it is opened
            name = content.shown_dataset.consolidation.name
            yield name, listed_by_name(directory.child_path(name))
        if chunks is not None and chunks.root is not None:
            yield chunks.collection.names.prefix.decode(), chunks.attributes(chunks.root)
        if content.shown_dataset.is_omitted:
            return
        names = set(content.documents)
        for entry in self._listed(directory, is_described=chunks is not None or bool(content.below)):
            name = entry.name
            if name in names or content.is_consolidated(name) or content.hides(name):
                continue
            if chunks is not None and chunks.reserved_at_top(name):
                continue
            path = directory.child_path(name)
            if content.is_generated(name):
                yield name, listed_by_name(path)
                continue
            if name in content.below:
                names.add(name)
            yield name, self._files.listed(path, entry, content.inherited(name))
        for name in content.below:
            if name not in names:
                yield name, self._stored(directory, content, name)

    def _listed(self, directory: DirectoryNode, *, is_described: bool) -> Iterator[DirEntry]:
        """Yield stored entries. Without a listing by the server, there are none in a directory that is described."""
        return self._source.listed(directory.inside) if is_described else self._store.scan(directory.inside)

    # ---- kinds of names ----

    def classify_name(self, number: int, name: bytes) -> NameMeaning:
        """Return the kind of a name in a directory, whether the file exists or not."""
        text, content = os.fsdecode(name), self.content(number)
        other = NameKind.FIXED if self.is_moved(number) else NameKind.PLAIN
        if content.shown_dataset.is_omitted:
            return NameMeaning(NameKind.HIDDEN)
        if text in content.documents or content.is_generated(text):
            return NameMeaning(NameKind.DOCUMENT)
        chunks, path = content.chunks, self._nodes.directory(number).child_path(text)
        placed = [item for _, item in content.below.get(text, ()) if isinstance(item, CollectionAt)]
        if text in content.below and (other is NameKind.FIXED or any(not is_in(c.directory, path) for c in placed)):
            return NameMeaning(NameKind.DIRECTORY)
        if chunks is None:
            return NameMeaning(NameKind.SCRATCH if content.documents and is_scratch(text) else other)
        if chunks.root is not None and name == chunks.collection.names.prefix:
            return NameMeaning(NameKind.DIRECTORY)
        if chunks.root is None and (meaning := chunks.classify_child(None, name)) is not None:
            return meaning
        if content.hides(text) or chunks.is_shard(text):
            return NameMeaning(NameKind.HIDDEN)
        return not_a_chunk(text, chunks.root is None and chunks.reserved(0, text), other)

    def is_moved(self, number: int) -> bool:
        """Return whether the store has a directory at another path than the mount, or has only its chunks."""
        node, chunks = self._nodes.directory(number), self.content(number).chunks
        return node.inside != node.shown or (chunks is not None and chunks.is_moved)

    # ---- documents that clients write ----

    def shown_by(self, path: str) -> tuple[str, str, Translation | None] | None:
        """Return what shows the document at a path: a directory, the document's path below it, and the translation.

        This is the topmost directory whose dataset has the document. If none has, it is the document's own directory,
        provided that documents describe it. None if the document would be the first one of its dataset. Raise
        FileNotFoundError or NotADirectoryError if there is no such directory.
        """
        *above, name = path.split("/")
        node = self.root
        for i in range(len(above) + 1):
            content, below = self._datasets.open(node), "/".join((*above[i:], name))
            if content.shows(below):
                translation = self._datasets.translation(node)
                has_chunks = content.dataset is not None and content.dataset.collections and node.file is None
                if has_chunks and translation is not None and not translation.has_source:
                    return None  # the array's document is deleted, but its chunks can still be read and deleted
                return "/".join(above[:i]), below, translation
            if i < len(above):
                number = self.lookup(node, os.fsencode(above[i])).number
                if number >= TABLE_END:
                    return None
                node = self._nodes.directory(number)
        translation = self._datasets.translation(node)
        described = content.dataset is not None and (translation is None or translation.describes(name))
        return ("/".join(above), name, translation) if described else None

    def generated(self, path: str) -> Iterator[str]:
        """Yield the paths of documents of the layout, as far as known, that depend on the documents in a directory.

        They are generated again when they are looked up next.
        """
        self._changes += 1
        above = (d.child_path(name) for d in self._nodes.above(path) for name in self._datasets.consolidated_names)
        for node in (*self._nodes.below(path), *map(self._nodes.known, above)):
            if isinstance(node, DocumentNode) and not node.outdated:
                self._nodes.outdate(node)
                yield node.path

    def is_outdated(self, number: int) -> bool:
        """Return whether a document or its array has changed, so that the path of this node has another number now."""
        node = self._nodes.get(number)
        if isinstance(node, ChunkNode):
            return node.chunks.is_former
        return isinstance(node, DocumentNode) and node.outdated

    def is_implied(self, number: int, name: str) -> bool:
        """Return whether a directory is shown only because documents name it.

        Then the store has no such directory, or the directory contains no shard.
        """
        directory = self._nodes.directory(number)
        below, path = self._datasets.open(directory).below.get(name), directory.child_path(name)
        placed = [item for _, item in below or () if item is not None]
        if below is None or not all(isinstance(item, CollectionAt) and is_in(item.directory, path) for item in placed):
            return False
        if self._store.remote and placed:  # a remote store has no directories
            chunks = self.content(self.lookup(directory, os.fsencode(name)).number).chunks
            return chunks is not None and chunks.shards.is_empty()
        try:
            self._store.entry(path)
        except FileNotFoundError:
            return True
        except OSError:
            pass
        return False

    # ---- directories below ----

    def walk(self, limit: int | None = None, start: DirectoryNode | None = None) -> Iterator[DirectoryNode]:
        """Open and yield, breadth first, the directories at `start` (None: the root) and below that may hold datasets.

        At most `limit` directories. Damaged ones are reported and skipped. Raise OSError if the root itself cannot be
        read.
        """
        level, count = [start or self.root], 0
        while level:
            opened: list[DirectoryNode] = []
            for directory, content in self._each(self._datasets.open, level):
                count += 1
                if limit is not None and count > limit:
                    return
                if content is not None:
                    opened.append(directory)
                    yield directory
            level = [node for _, below in self._each(self._subdirectories, opened) for node in below or ()]

    def _each(
        self, call: Callable[[DirectoryNode], T], directories: Sequence[DirectoryNode]
    ) -> Iterator[tuple[DirectoryNode, T | None]]:
        """Yield each directory and what `call` returns, None if it is damaged. Remote directories are read ahead."""

        def outcome(directory: DirectoryNode) -> T | CorruptShardError | OSError:
            try:
                return call(directory)
            except (CorruptShardError, OSError) as e:
                return e

        for directory, value in load_ahead(self._store.read_ahead, outcome, directories, first=2):
            if not isinstance(value, CorruptShardError | OSError):
                yield directory, value
                continue
            if directory is self.root and isinstance(value, OSError):
                raise value
            why = f"{value.key}: {value.why}" if isinstance(value, CorruptShardError) else message(value)
            self._datasets.report(Problem(directory.path, why, damaged=True))
            yield directory, None

    def collections(self) -> Iterator[ChunkDirs]:
        """Yield all sharded collections, breadth first. Opens every directory that may hold one. Raise as `walk`."""
        for directory in self.walk():
            if directory.content is not None and directory.content.chunks is not None:
                yield directory.content.chunks

    def _subdirectories(self, directory: DirectoryNode) -> list[DirectoryNode]:
        # One node at a time: with very many nodes, the first would be evicted before the last is returned.
        nodes = (self._nodes.get(child.number) for child in self._children(directory) if child.directory)
        return [node for node in nodes if isinstance(node, DirectoryNode)]

    def _children(self, directory: DirectoryNode) -> Iterator[Attributes]:
        """Yield the subdirectories that may hold datasets, and the files that may be shown as directories."""
        content = self._datasets.open(directory)
        dataset, names = content.dataset, set[str]()
        skipped = dataset.unwalked | dataset.hidden if dataset is not None else frozenset[str]()
        if content.chunks is None and (dataset is None or not dataset.closed):
            for e in self._listed(directory, is_described=bool(content.below)):
                if e.name not in skipped and (e.directory or any(f.may_hold(e.name) for f in self._source.formats)):
                    with suppress(OSError):  # a file that the store does not send was reported
                        yield self._files.known(directory.child_path(e.name), e, content.inherited(e.name))
                        names.add(e.name)
        for name in content.below:
            if name not in names:
                yield self._stored(directory, content, name)
