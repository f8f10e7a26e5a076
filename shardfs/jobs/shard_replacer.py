"""Replaces shards of a source, one at a time, while no other writer uses the source."""

from __future__ import annotations

import errno
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from shardfs.model.changes import Change
from shardfs.model.errors import CorruptShardError
from shardfs.model.write_plan import size_of
from shardfs.shards import rewriting
from shardfs.shards.rewriting import StoredShard
from shardfs.storage.writers import open_writer
from shardfs.write.open_rw import open_journal
from shardfs.write.pending import Backlog

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardfs.config.options import Options
    from shardfs.model.blobs import Blob, Plan, Stat
    from shardfs.model.changes import Begun
    from shardfs.model.collection import Collection
    from shardfs.model.shard_format import Put
    from shardfs.model.values import Coords
    from shardfs.storage.writers import Writer
    from shardfs.vfs.tree import Tree
    from shardfs.write.journal import Journal


@dataclass
class ChunksPut(Change):
    """Put chunks, by their coordinates, into a shard."""

    collection: Collection
    shard: int
    puts: Mapping[Coords, Put]

    def plan(self, old: Blob | None) -> Plan | None:
        try:
            return StoredShard(self.collection, self.shard, old).plan(self.puts, set())
        except CorruptShardError:
            if old is None or len(self.puts) != rewriting.slots(self.collection, self.shard):
                raise
            # No chunk of the old shard is needed.
            return StoredShard(self.collection, self.shard, None).plan(self.puts, set())

    def verify(self, new: Blob) -> None:
        chunks = StoredShard(self.collection, self.shard, new).stored_chunks(list(self.puts))
        for (coords, put), chunk in zip(self.puts.items(), chunks, strict=True):
            if chunk is None or chunk.stat().size != size_of(put.data):
                raise ValueError(f"the new shard would not have the chunk {coords}")


@dataclass
class _Noted(Change):
    """A change that notes in the journal when it begins."""

    change: Change
    backlog: Backlog

    def plan(self, old: Blob | None) -> Plan | None:
        return self.change.plan(old)

    def verify(self, new: Blob) -> None:
        self.change.verify(new)

    def begun(self, note: Begun) -> None:
        self.backlog.begin(note)


class ShardReplacer:
    """Replaces shards. `journal` must be the locked journal of the source, which excludes other writers.

    Raises OSError (EBUSY) if the journal contains unpublished files, because these refer to positions of chunks.
    """

    def __init__(self, writer: Writer, journal: Journal) -> None:
        self._writer, self._backlog = writer, Backlog(journal)
        if n := len(self._backlog.versions):
            why = f"{n} files wait to be published first: mount it with --rw, or shardfs recover --apply"
            raise OSError(errno.EBUSY, why, str(journal.directory))
        self._backlog.finish_begun(writer)

    @classmethod
    @contextmanager
    def opened(cls, tree: Tree, source: str, found: Options) -> Iterator[Self]:
        """Lock the source and its journal. Raises the errors of `open_journal`, `open_writer` and `ShardReplacer`."""
        with ExitStack() as stack:
            journal, clean = open_journal(source, found), False
            stack.callback(lambda: journal.close(clean=clean))
            links = found.linked_shards == "replace"
            writer = open_writer(tree.store, replace_links=links, journal=journal.directory)
            stack.callback(writer.close)
            made = cls(writer, journal)
            clean = True  # otherwise the journal contains unpublished files
            yield made

    def update(self, key: str, change: Change) -> Stat | None:
        """Replace a shard: see `Writer.update`. After a crash, the next writer of the source cleans up."""
        after = self._writer.update(key, _Noted(change, self._backlog))
        self._backlog.done(key)
        return after
