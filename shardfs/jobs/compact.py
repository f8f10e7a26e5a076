"""`shardfs compact`: rewrites shards without dead bytes. Needs no mount. No other writer may use the source meanwhile.

Before a new shard replaces the old one, `compare` reads both chunk by chunk. It uses the code of readers, not the code
that packed the shard.
"""

from __future__ import annotations

import errno
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self, cast

from shardfs.jobs.chunk_checks import reason
from shardfs.model.changes import Change
from shardfs.model.dataset import Problem
from shardfs.model.errors import ShardfsError
from shardfs.shards import rewriting
from shardfs.shards.open_chunks import open_chunks
from shardfs.shards.rewriting import StoredShard
from shardfs.storage.cache import ByteLRU
from shardfs.storage.store import DirEntry
from shardfs.storage.writers import open_writer
from shardfs.write.open_rw import open_journal
from shardfs.write.pending import Backlog

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardfs.config.options import Options
    from shardfs.model.blobs import Blob, Plan
    from shardfs.model.changes import Begun
    from shardfs.model.collection import Collection
    from shardfs.model.shard_format import Usage
    from shardfs.shards.chunk_store import ChunkStore
    from shardfs.storage.store import Store
    from shardfs.storage.writers import Writer
    from shardfs.vfs.chunk_dirs import ChunkDirs
    from shardfs.vfs.tree import Tree
    from shardfs.write.journal import Journal

CACHE = 64 << 20


class Work(NamedTuple):
    """A shard with dead bytes.

    Args:
        tree: the collection of the shard.
        shard: the number of the shard, of the outermost layer.
        key: its path in the source.
        usage: its size, and how many of its bytes are dead.
    """

    tree: ChunkDirs
    shard: int
    key: str
    usage: Usage


def survey(tree: Tree) -> Iterator[Work | Problem]:
    """Yield all shards of a source with dead bytes, and problems. Reads every index.

    A problem is the path of a shard that is `damaged`, or of a collection that is `skipped`, because shardfs rewrites
    no shards of this kind.
    """
    for collection in tree.collections():
        why = rewriting.unwritable(collection.collection)
        if why is not None:
            yield Problem(collection.path, why, skipped=True)
            continue
        outermost = collection.shards.outermost
        for shard in outermost.existing_shards().tolist():
            key = outermost.source.key(shard)
            try:
                usage = StoredShard(collection.collection, shard, outermost.source.stored(shard)).usage()
            except (OSError, ShardfsError, ValueError) as e:
                yield Problem(key, reason(e), damaged=True)
                continue
            if usage.dead:
                yield Work(collection, shard, key, usage)


@dataclass
class _Packing(Change):
    """Replace a shard by one without dead bytes.

    Attributes:
        old: the shard that was replaced; None if there was none.
        is_begun: whether a note for recovery is in the journal.
    """

    work: Work
    backlog: Backlog
    old: Blob | None = None
    is_begun: bool = False

    def plan(self, old: Blob | None) -> Plan | None:
        self.old = old
        return None if old is None else StoredShard(self.work.tree.collection, self.work.shard, old).repack()

    def verify(self, new: Blob) -> None:
        if self.old is not None:
            compare(self.work, self.old, new)

    def begun(self, note: Begun) -> None:
        self.is_begun = True
        self.backlog.begin(note)


class Packer:
    """Packs shards, one at a time, in this process, because it holds the lock of the journal.

    `journal` must be the locked journal of the source, which excludes other writers. Raise OSError (EBUSY) if it
    contains unpublished files, because these refer to positions of chunks.

    Attributes:
        is_clean: whether all replacements were finished, so that no later writer needs the notes in the journal.
    """

    def __init__(self, writer: Writer, journal: Journal) -> None:
        self._writer = writer
        self._backlog = Backlog(journal)
        self.is_clean = True
        if n := len(self._backlog.versions):
            why = f"{n} files wait to be published first: mount it with --rw, or shardfs recover --apply"
            raise OSError(errno.EBUSY, why, str(journal.directory))
        self._backlog.finish_begun(writer)

    @classmethod
    @contextmanager
    def open(cls, tree: Tree, source: str, options: Options) -> Iterator[Self]:
        """Context manager that locks the source of `tree`, and yields the packer; unlocks it at the end.

        Raise the errors of `open_journal`, `open_writer` and `Packer`.
        """
        with ExitStack() as stack:
            journal, clean = open_journal(source, options), False
            stack.callback(lambda: journal.close(clean=clean))
            links = options.linked_shards == "replace"
            writer = open_writer(tree.store, replace_links=links, journal=journal.directory)
            stack.callback(writer.close)
            packer = cls(writer, journal)
            try:
                yield packer
            finally:
                clean = packer.is_clean

    def pack(self, work: Work) -> int | Problem:
        """Replace a shard by one without dead bytes; return the number of bytes saved, or the problem.

        Errors of the store and of the data are problems. They leave the shard unchanged, unless the store failed after
        the switch. After a failure or a crash, the next writer of the source cleans up.
        """
        packing = _Packing(work, self._backlog)
        try:
            after = self._writer.update(work.key, packing)
        except (OSError, ShardfsError, ValueError) as e:
            self.is_clean = self.is_clean and not packing.is_begun
            return Problem(work.key, reason(e), damaged=True)
        self._backlog.done(work.key)
        return 0 if packing.old is None else packing.old.stat().size - (0 if after is None else after.size)


def compare(work: Work, old: Blob, new: Blob) -> None:
    """Raise ValueError unless both shards have the same chunks with the same bytes, as readers find them.

    Raise OSError or CorruptShardError if one of them cannot be read. The blobs are not closed.
    """
    one, other = (chunks_in(work.tree.collection, work.shard, work.key, blob) for blob in (old, new))
    n = sum(len(batch.sizes) for batch in other.layer.scan(0))
    for batch in one.layer.scan(0):
        n -= len(batch.sizes)
        for coords in map(tuple, batch.coords.tolist()):
            if one.stored_bytes(coords) != other.stored_bytes(coords):
                raise ValueError(f"{work.key}: chunk {coords} would not be the same")
    if n:
        raise ValueError(f"{work.key}: the number of chunks would not be the same")


def chunks_in(collection: Collection, shard: int, key: str, blob: Blob) -> ChunkStore:
    """Return the chunks that readers find if this blob is stored as the shard with the path `key` in the source."""
    directory = key.removesuffix(rewriting.key(collection, shard)).rstrip("/")
    store = cast("Store", _Single(key, blob))
    return open_chunks(store, directory, collection.path, collection, ByteLRU(CACHE), ByteLRU(CACHE))


class _Single:
    """A store with a single object."""

    read_ahead = None

    def __init__(self, key: str, blob: Blob) -> None:
        self._key = key
        self._blob = blob
        self.remote = self.blind = blob.fd < 0

    def open(self, key: str) -> Blob:
        if key != self._key:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", key)
        return self._blob

    def reopen(self, key: str) -> None:
        """Does nothing: the object never changes."""

    def scan(self, key: str) -> Iterator[DirEntry]:
        above = f"{key}/" if key else ""
        if self._key.startswith(above):
            name, slash, _ = self._key[len(above) :].partition("/")
            yield DirEntry(name, bool(slash), None if slash else self._blob.stat())
