"""The interface of a tree for `WriteTree`: the kind of each name, and the invalidation of changed files."""

from __future__ import annotations

import logging
import math
import os
from contextlib import suppress

from shardfs.model.errors import CorruptShardError
from shardfs.model.kinds import NameKind, is_scratch
from shardfs.vfs.chunk_dirs import WINDOW, ChunkDirs, NameMeaning, Target
from shardfs.vfs.inodes import TABLE_END
from shardfs.vfs.nodes import ChunkNode, CollectionAt, Content, DirectoryNode, DocumentNode
from shardfs.vfs.survey import Survey

log = logging.getLogger(__name__)


def is_in(path: str, directory: str) -> bool:
    """Return whether a path is `directory` or below it."""
    return path == directory or path.startswith(f"{directory}/")


class Changes(Survey):
    """The part of a tree that `WriteTree` uses. The tree itself changes nothing in the source."""

    def classify_name(self, directory: int, name: bytes) -> NameMeaning:
        """Return the kind of a name in a directory, whether the file exists or not."""
        text = os.fsdecode(name)
        if directory >= TABLE_END:
            here = self._chunks_of(directory)
            found = here.classify_name(directory, name)
            return found or self._no_chunk(text, here.reserved(here.place(directory).level, text))
        node = self._directory(directory)
        content = self._datasets.open(node)
        if text in content.documents or self._rewritten_name(content, text):
            return NameMeaning(NameKind.DOCUMENT)
        chunks = content.chunks
        if chunks is None:
            return NameMeaning(NameKind.SCRATCH if content.documents and is_scratch(text) else NameKind.PLAIN)
        if chunks.root is not None and name == chunks.collection.names.prefix:
            return NameMeaning(NameKind.DIRECTORY)
        found = chunks.classify_name(None, name) if chunks.root is None else None
        if found is not None:
            return found
        if content.hides(text) or chunks.is_shard(text):
            return NameMeaning(NameKind.HIDDEN)
        return self._no_chunk(text, chunks.root is None and chunks.reserved(0, text))

    def has_chunks(self, directory: int) -> bool:
        """Return whether an inode number is that of a sharded array's directory or of a directory of its chunks."""
        return directory >= TABLE_END or self._datasets.open(self._directory(directory)).chunks is not None

    def _no_chunk(self, name: str, like_one: bool) -> NameMeaning:
        if like_one:
            return NameMeaning(NameKind.ORPHAN)
        return NameMeaning(NameKind.SCRATCH if is_scratch(name) else NameKind.PLAIN)

    def _rewritten_name(self, content: Content, name: str) -> bool:
        dataset = content.dataset
        if dataset is None:
            return False
        if dataset.consolidation is not None and dataset.consolidation.name == name:
            return True
        return dataset.rewriter is not None and dataset.rewriter.applies(name)

    def is_implied(self, directory: int, name: str) -> bool:
        """Return whether a directory is shown only because documents name it.

        Then the store has no such directory, or the directory contains no shard.
        """
        if directory >= TABLE_END:
            return False
        node = self._directory(directory)
        below, path = self._datasets.open(node).below.get(name), node.child_path(name)
        placed = [what for _, what in below or () if what is not None]
        if below is None or not all(isinstance(what, CollectionAt) and is_in(what.shards, path) for what in placed):
            return False
        if self.store.remote and placed:  # a remote store has no directories
            chunks = self._datasets.open(self._directory(self.lookup(directory, os.fsencode(name)).number)).chunks
            return chunks is not None and chunks.is_empty()
        try:
            self.store.entry(path)
        except FileNotFoundError:
            return True
        except OSError:
            pass
        return False

    def stored_documents(self, path: str) -> dict[str, bytes]:
        """Return the stored metadata documents of a directory by name."""
        return self._datasets.documents(path)

    def may_be_old(self, age_s: float) -> bool:
        """Return whether documents read `age_s` seconds ago may be outdated.

        For a local store always: a check costs little.
        """
        return not self.store.remote or (math.isfinite(self._ttl) and age_s >= self._ttl)

    def is_closed(self, path: str) -> bool:
        """Return whether a path, which need not exist, is inside an array, where shardfs looks for no datasets."""
        while path:
            path = path.rpartition("/")[0]
            with suppress(OSError, CorruptShardError):
                return self._datasets.open(self._directory(self.resolve(path).number)).closed
        return False

    def renew(self, path: str) -> list[str]:
        """Read the metadata of a directory and everything below again. Return the paths of the collections there."""
        self.changed(path)
        nodes = self._nodes.below(path)
        forgotten = self._datasets.forget(path)
        for node in nodes:
            if isinstance(node, DirectoryNode):
                self._index_cache.drop(("damage", node.number))
                node.content = None
        for node in nodes:
            if node is self._root:
                continue
            parent, _, name = node.path.rpartition("/")
            with suppress(OSError, CorruptShardError):
                above = self._directory(self.resolve(parent).number)
                if isinstance(node, DirectoryNode):
                    node.inherited = self._datasets.open(above).inherited(name)
                elif isinstance(node, DocumentNode) or name in self._datasets.document_names:
                    self._lookup_in(above, os.fsencode(name), anew=True)
        return forgotten

    def changed(self, path: str) -> None:
        """Invalidate caches after a file or directory was created, removed or written in the store."""
        self.store.reopen(path)
        stat = self._chunk_cache.peek((path, "stat"))
        for window in range(-(-stat.size // WINDOW) if stat is not None else 0):
            self._chunk_cache.drop((path, window))
        self._chunk_cache.drop((path, "stat"))
        above = path
        while above:  # parent directories may be new, too
            above = above.rpartition("/")[0]
            with suppress(OSError, CorruptShardError):
                number = self.resolve(above).number
                self._index_cache.drop(("foreign", number))
                if number >= TABLE_END:
                    chunks = self._chunks_of(number)
                    self._index_cache.drop(("stored", chunks.first, chunks.place(number)))

    def is_virtual(self, number: int) -> bool:
        """Return whether an inode number is that of a directory or a chunk of a sharded collection."""
        return number >= TABLE_END

    def chunk_tree(self, number: int) -> ChunkDirs | None:
        """Return the collection that has a directory with this inode number; None for any other number."""
        chunks = self._chunks_of(number) if number >= TABLE_END else None
        return chunks if chunks is not None and number - chunks.first < chunks.directories else None

    def target_of(self, number: int) -> Target | None:
        """Return the chunk with this inode number; None if there is none."""
        if number >= TABLE_END:
            chunks = self._chunks_of(number)
            return Target(chunks, chunks.coords(number)) if chunks.place(number).level >= chunks.depth else None
        try:
            node = self._nodes.get(number)
        except FileNotFoundError:
            return None
        return Target(node.chunks, node.coords) if isinstance(node, ChunkNode) else None

    def moved(self, old: str, new: str) -> None:
        """Update all nodes of a directory that was renamed in the store. They keep their inode numbers."""
        for node in self._nodes.move(old, new):
            if isinstance(node, DirectoryNode):
                node.inside, node.content = node.path, None
        self._datasets.move(old, new)
        for directory in (old, new):  # other files with the same names may be created at both paths
            self.store.reopen_below(directory)
        self.renew(new)
