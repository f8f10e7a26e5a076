"""What documents say of the files that are there: a new one makes chunks of some, and plain files of others."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from shardfs.errors import CorruptShardError
from shardfs.kinds import Kind
from shardfs.writing.files import File, join
from shardfs.writing.overlay import Overlay

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardfs.chunk_tree import ChunkTree
    from shardfs.writers import Writer
    from shardfs.writing.documents import Documents
    from shardfs.writing.writeback import WriteBuffer

log = logging.getLogger(__name__)


class Descriptions(Overlay):
    """See `WriteTree`."""

    writer: Writer
    pending: WriteBuffer
    documents: Documents

    def _write_document(self, file: File, directory: str, name: str, data: bytes) -> bool:
        """Nobody makes a file meanwhile that the document might describe."""
        with self._gate.alone():
            changed = self.documents.write(directory, name, data)
            if changed is None:
                return False
            with self._lock:
                file.frozen = data
            for path in changed:
                self._described_anew(path)
        return True

    def _described_anew(self, directory: str) -> None:
        """Documents of a directory were changed: names in it may stand for something else now."""
        former, strays = self._former(self._renewed(directory)), list[File]()
        with self._lock:
            for parent, name, file in self._files.below(directory):
                if file is not None and file.kind not in (Kind.CHUNK, Kind.ORPHAN):
                    continue
                spot = self.spot(parent, name)
                path = join(parent, name)
                known = self.pending.target(path) if file is None else file.target
                if spot.target is None and known is not None and known.tree in former:
                    continue  # it lies outside now: it can still be read, and deleted
                if file is not None and spot.kind in (Kind.CHUNK, Kind.ORPHAN):
                    file.kind, file.target = spot.kind, spot.target
                    self._make_parents(parent)
                if file is not None and file.kind is Kind.ORPHAN and spot.kind is Kind.PLAIN:
                    strays.append(file)
                self.pending.retarget(path, spot.target)
        for file in strays:
            self._pass_through(file)

    def _pass_through(self, file: File) -> None:
        """What looked like a chunk of an array to come is none, and goes where it would have gone at once."""
        path = file.path
        if path is None:
            return
        try:
            data = self._whole(file)
            self._store_directory(path.rpartition("/")[0])
            self.writer.put(path, data)
        except OSError as e:
            log.warning("%s: stays in the journal: %s", path, e)
            return
        with self._lock:
            file.kind, file.known_size, file.version = Kind.PLAIN, len(data), None
            if self.pending.holds(path):
                self.pending.drop(path, None)
        if file.mtime_ns and self.writer.local:
            self.writer.set_times(path, file.mtime_ns)
        self.base.changed(path)

    def _pass_strays_through(self) -> None:
        """At the end: nothing has come that would describe them, and no shards have names that these could take.

        Nor is there a sharded dataset beside what is called as temporary files are: it may be somebody's own.
        """
        for parent, name, file in list(self._files.below("")):
            if (
                file is None
                or file.kind not in (Kind.ORPHAN, Kind.SCRATCH)
                or not self.pending.holds(join(parent, name))
            ):
                continue
            above, number = self._nearest(parent)
            below = join(parent, name)[len(above) :].strip("/").split("/")
            with suppress(OSError, CorruptShardError):
                if self.base.spot(number, os.fsencode(below[0])).kind is Kind.PLAIN:
                    self._pass_through(file)

    def _former(self, paths: Iterable[str]) -> set[ChunkTree]:
        """How arrays were described while they had other shapes."""
        every: set[ChunkTree] = set()
        for path in paths:
            found: set[ChunkTree] = set()
            with suppress(OSError, CorruptShardError):
                found.update(self.base.collection(path).formers())
            (self._cut.add if found else self._cut.discard)(path)
            every |= found
        return every

    def _store_directory(self, path: str) -> None:
        """A virtual directory, or one outside the grid, is to have something in it that is the store's."""
        if not path or not self.writer.local:
            return
        number = self._base_number(path)
        if number is not None and not self.base.is_virtual(number):
            return
        self._store_directory(path.rpartition("/")[0])
        with suppress(FileExistsError):
            self.writer.make_directory(path)
            self.base.changed(path)
