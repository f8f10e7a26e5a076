"""What a tree is asked and told by `WriteTree`, on top of it: what names stand for, and what is not as it was."""

from __future__ import annotations

import logging
import math
import os
from contextlib import suppress

from shardfs.model.errors import CorruptShardError
from shardfs.model.kinds import NameKind, is_scratch
from shardfs.vfs.chunk_dirs import WINDOW, ChunkDirs, Spot, Target
from shardfs.vfs.inodes import TABLE_END
from shardfs.vfs.nodes import ChunkNode, CollectionAt, Content, DirectoryNode, DocumentNode
from shardfs.vfs.survey import Survey

log = logging.getLogger(__name__)


def is_in(path: str, directory: str) -> bool:
    """Whether a path is a directory, or lies below it."""
    return path == directory or path.startswith(f"{directory}/")


class Changes(Survey):
    """The tree itself changes nothing in the source."""

    def spot(self, directory: int, name: bytes) -> Spot:
        """What a name in a directory stands for, whether there is such a file or not."""
        text = os.fsdecode(name)
        if directory >= TABLE_END:
            here = self._chunks_of(directory)
            found = here.spot(directory, name)
            return found or self._no_chunk(text, here.reserved(here.place(directory).level, text))
        node = self._directory(directory)
        content = self._datasets.open(node)
        if text in content.documents or self._rewritten_name(content, text):
            return Spot(NameKind.DOCUMENT)
        chunks = content.chunks
        if chunks is None:
            return Spot(NameKind.SCRATCH if content.documents and is_scratch(text) else NameKind.PLAIN)
        if chunks.root is not None and name == chunks.collection.names.prefix:
            return Spot(NameKind.DIRECTORY)
        found = chunks.spot(None, name) if chunks.root is None else None
        if found is not None:
            return found
        if content.hides(text) or chunks.is_shard(text):
            return Spot(NameKind.HIDDEN)
        return self._no_chunk(text, chunks.root is None and chunks.reserved(0, text))

    def has_chunks(self, directory: int) -> bool:
        """Whether it is the directory of a sharded array, or one of its chunks."""
        return directory >= TABLE_END or self._datasets.open(self._directory(directory)).chunks is not None

    def _no_chunk(self, name: str, like_one: bool) -> Spot:
        if like_one:
            return Spot(NameKind.ORPHAN)
        return Spot(NameKind.SCRATCH if is_scratch(name) else NameKind.PLAIN)

    def _rewritten_name(self, content: Content, name: str) -> bool:
        dataset = content.dataset
        if dataset is None:
            return False
        if dataset.consolidation is not None and dataset.consolidation.name == name:
            return True
        return dataset.rewriter is not None and dataset.rewriter.applies(name)

    def is_implied(self, directory: int, name: str) -> bool:
        """Whether a directory is shown only because documents name it: the store has none, or no shard in it."""
        if directory >= TABLE_END:
            return False
        node = self._directory(directory)
        below, path = self._datasets.open(node).below.get(name), node.child_path(name)
        placed = [what for _, what in below or () if what is not None]
        if below is None or not all(isinstance(what, CollectionAt) and is_in(what.shards, path) for what in placed):
            return False
        if self.store.remote and placed:  # which has no directories
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
        """What describes a directory, as it is stored."""
        return self._datasets.documents(path)

    def may_be_old(self, age_s: float) -> bool:
        """Whether documents that were read so long ago may be others by now: asking a local store costs little."""
        return not self.store.remote or (math.isfinite(self._ttl) and age_s >= self._ttl)

    def is_closed(self, path: str) -> bool:
        """Whether a directory, which need not exist, lies where no dataset is looked for: inside of an array."""
        while path:
            path = path.rpartition("/")[0]
            with suppress(OSError, CorruptShardError):
                return self._datasets.open(self._directory(self.resolve(path).number)).closed
        return False

    def renew(self, path: str) -> list[str]:
        """Look anew at what is in a directory and below: documents there were changed. The paths of the collections."""
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
        """A file or directory was made, removed or written in the store."""
        self.store.reopen(path)
        stat = self._chunk_cache.peek((path, "stat"))
        for window in range(-(-stat.size // WINDOW) if stat is not None else 0):
            self._chunk_cache.drop((path, window))
        self._chunk_cache.drop((path, "stat"))
        above = path
        while above:  # directories may have come with it
            above = above.rpartition("/")[0]
            with suppress(OSError, CorruptShardError):
                number = self.resolve(above).number
                self._index_cache.drop(("foreign", number))
                if number >= TABLE_END:
                    chunks = self._chunks_of(number)
                    self._index_cache.drop(("stored", chunks.first, chunks.place(number)))

    def is_virtual(self, number: int) -> bool:
        """Whether it is a directory or a chunk of a sharded collection."""
        return number >= TABLE_END

    def chunk_tree(self, number: int) -> ChunkDirs | None:
        """The collection of which a number is one of the directories; None if it is something else."""
        chunks = self._chunks_of(number) if number >= TABLE_END else None
        return chunks if chunks is not None and number - chunks.first < chunks.directories else None

    def target_of(self, number: int) -> Target | None:
        """The chunk that has this number; None if none has."""
        if number >= TABLE_END:
            chunks = self._chunks_of(number)
            return Target(chunks, chunks.coords(number)) if chunks.place(number).level >= chunks.depth else None
        try:
            node = self._nodes.get(number)
        except FileNotFoundError:
            return None
        return Target(node.chunks, node.coords) if isinstance(node, ChunkNode) else None

    def moved(self, old: str, new: str) -> None:
        """A directory has another name in the store. What is in it keeps its numbers."""
        for node in self._nodes.move(old, new):
            if isinstance(node, DirectoryNode):
                node.inside, node.content = node.path, None
        self._datasets.move(old, new)
        for directory in (old, new):  # others may come to lie there, with the same names
            self.store.reopen_below(directory)
        self.renew(new)
