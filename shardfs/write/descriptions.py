"""Effects of metadata documents on names: a new document turns some files into chunks, and others into plain files."""

from __future__ import annotations

import errno
import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from shardfs.model.errors import CorruptShardError
from shardfs.model.kinds import NameKind
from shardfs.write.documents import Overlap
from shardfs.write.files import WritableFile, join
from shardfs.write.overlay import Overlay, stale

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardfs.model.attributes import Attributes
    from shardfs.storage.writers import Writer
    from shardfs.vfs.chunk_dirs import ChunkDirs
    from shardfs.write.documents import Documents
    from shardfs.write.pending import Version
    from shardfs.write.writeback import WriteBuffer

log = logging.getLogger(__name__)

MAX_DOCUMENT = 16 << 20
"""Maximum bytes of a document; a larger one is refused."""


class Descriptions(Overlay):
    """The part of `WriteTree` that writes documents and updates the tree for them."""

    writer: Writer
    pending: WriteBuffer
    documents: Documents

    def lookup(self, parent: int, name: bytes) -> Attributes:
        """Return the attributes of a child, as `Overlay.lookup` does.

        The absence of a document is recorded: the program may create the document next.
        """
        try:
            return super().lookup(parent, name)
        except FileNotFoundError:
            if self.documents.is_document(text := os.fsdecode(name)):
                self.documents.seen.note(join(self.path_of(parent), text), None)
            raise

    def _recover(self) -> None:
        """Publish the documents chosen with `shardfs recover --ours`, then show the contents of the journal."""
        for path, version in self.pending.versions().items():
            if version.is_document and not version.conflict and version.data is not None:
                self._publish_decided(path, version, self.pending.read(version.data, 0, MAX_DOCUMENT))
        super()._recover()

    def _publish_decided(self, path: str, version: Version, data: bytes) -> None:
        directory, _, name = path.rpartition("/")
        try:
            written = self.documents.write(directory, name, data, decided=True)
        except OSError as e:
            log.warning("%s: stays in the journal: %s", path, e.strerror)
            if e.errno == errno.EINVAL:  # the document contradicts the source: a user decides
                self.pending.keep(path, data, str(e), version.mtime_ns, version.mode)
            return
        self.pending.drop(path, None)
        for changed in written.changed if written is not None else ():
            self._renewed(changed)

    def _write_document(self, file: WritableFile, directory: str, name: str, data: bytes) -> bool:
        """Write a document to the store and look up its datasets anew. Return False if the format is unknown.

        The name-space lock is held exclusively, so that no other thread creates a file that the document might
        describe. A document in conflict with another program's version stays in the journal for `shardfs recover`;
        raise Overlap.
        """
        try:
            with self._gate.alone():
                written = self.documents.write(directory, name, data)
                if written is None:
                    return False
                with self._lock:
                    file.frozen, file.merged = written.shown, written.shown is not data
                for path in written.changed:
                    self._described_anew(path)
        except Overlap as e:
            path = join(directory, name)
            log.warning("%s: %s; shardfs recover --ours or --theirs decides which document stays", path, e.why)
            self.pending.keep(path, e.ours, e.why, file.mtime_ns, file.mode)
            self._show_stored(directory, name)
            raise
        return True

    def _look_at(self, file: WritableFile | None, number: int) -> None:
        """Record the version of a document that a program is about to read.

        Raise OSError (ESTALE) if the source has another version than the mount shows. The kernel then looks up the name
        again and gets the new version.
        """
        if file is not None and (file.kind is not NameKind.DOCUMENT or file.writers or file.parent is None):
            return
        path = self.path_of(number)
        directory, _, name = path.rpartition("/")
        if (
            not self.documents.is_document(name)
            or self.spot(directory, os.fsencode(name)).kind is not NameKind.DOCUMENT
        ):
            return
        self._waiting()
        size = self.attributes(number).size
        if size > MAX_DOCUMENT:
            return
        shown = bytes(self.read(number, 0, max(size, 1)))
        if self.documents.is_changed(directory, name, shown):
            log.info("%s: another program has changed it in the source", path)
            self._show_stored(directory, name)
            raise stale(number)
        self.documents.seen.note(path, shown)

    def _show_stored(self, directory: str, name: str) -> None:
        """Show the source's version of a document that another program has changed."""
        path, found, data = join(directory, name), None, None
        with suppress(OSError, CorruptShardError):
            self._keep(self.resolve(path).number)
        with self._gate.alone():
            for at in {directory, self.documents.described_by(directory, name)}:
                self._described_anew(at)
            self.base.changed(path)
        with suppress(OSError, CorruptShardError):
            found = self._with_mode(self.base.resolve(path), path)
            data = self.documents.shown(path)
        with self._lock:
            file = self._files.at(path)
            if file is None or not file.writers:
                self._show_anew(directory, name, file, data)
            else:
                file.frozen, file.merged = data, True
            shown = self._files.at(path)
            if shown is not None and found is not None:
                shown.mode, shown.mtime_ns = found.mode, found.mtime_ns

    def _show_merged(self, file: WritableFile) -> None:
        """Show the source's document instead of the one written here, unless a program still writes to the document.

        The caller holds the lock.
        """
        if file.merged and not file.writers and file.parent is not None:
            self._show_anew(file.parent, os.fsdecode(file.name), file, file.frozen)

    def _show_anew(self, directory: str, name: str, old: WritableFile | None, data: bytes | None) -> None:
        """Show the bytes `data` under a name; None shows no file. The caller holds the lock.

        The file gets a new inode number, because the kernel may have cached size and bytes of the old file.
        """
        raw = os.fsencode(name)
        if old is not None:
            old.merged = old.dirty = False
            if old.buffer is not None and not old.handles:
                old.buffer.close()
                old.buffer = None
            self._files.unname(old)
        if data is not None:
            new = self._files.new(directory, raw, NameKind.DOCUMENT)
            new.frozen = data
            if old is not None:
                new.mode, new.mtime_ns = old.mode, old.mtime_ns
            self._files.settle(new)
        if directory in self._numbers:
            self.invalidate(self._numbers[directory], raw)

    def _described_anew(self, directory: str) -> None:
        """Update the files in a directory whose documents have changed: their names may now have another kind."""
        former, strays = self._former(self._renewed(directory)), list[WritableFile]()
        with self._lock:
            for parent, name, file in self._files.below(directory):
                if file is not None and file.kind not in (NameKind.CHUNK, NameKind.ORPHAN):
                    continue
                spot = self.spot(parent, name)
                path = join(parent, name)
                known = self.pending.target(path) if file is None else file.target
                if spot.target is None and known is not None and known.tree in former:
                    continue  # outside of the new shape, but still readable and deletable
                if file is not None and spot.kind in (NameKind.CHUNK, NameKind.ORPHAN):
                    file.kind, file.target = spot.kind, spot.target
                    self._make_parents(parent)
                if file is not None and file.kind is NameKind.ORPHAN and spot.kind is NameKind.PLAIN:
                    strays.append(file)
                self.pending.retarget(path, spot.target)
        for file in strays:
            self._pass_through(file)

    def _pass_through(self, file: WritableFile) -> None:
        """Write a file to the store under its own name: it was kept as a chunk of a future array, but is no chunk."""
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
            file.kind, file.known_size, file.version = NameKind.PLAIN, len(data), None
            if self.pending.holds(path):
                self.pending.drop(path, None)
        if file.mtime_ns and self.writer.local:
            self.writer.set_times(path, file.mtime_ns)
        self.base.changed(path)

    def _pass_strays_through(self) -> None:
        """Write orphaned chunks and temporary files to the store under their own names, at unmount.

        This applies to names that no metadata document describes and that no shard can have. Such temporary files have
        no sharded dataset beside them, so they may be files of the user.
        """
        for parent, name, file in list(self._files.below("")):
            if (
                file is None
                or file.kind not in (NameKind.ORPHAN, NameKind.SCRATCH)
                or not self.pending.holds(join(parent, name))
            ):
                continue
            above, number = self._nearest(parent)
            below = join(parent, name)[len(above) :].strip("/").split("/")
            with suppress(OSError, CorruptShardError):
                if self.base.spot(number, os.fsencode(below[0])).kind is NameKind.PLAIN:
                    self._pass_through(file)

    def _former(self, paths: Iterable[str]) -> set[ChunkDirs]:
        """Return how the arrays at these paths were described while they had other shapes.

        Also records which of the arrays have such former shapes.
        """
        every: set[ChunkDirs] = set()
        for path in paths:
            found: set[ChunkDirs] = set()
            with suppress(OSError, CorruptShardError):
                found.update(self.base.collection(path).formers())
            (self._cut.add if found else self._cut.discard)(path)
            every |= found
        return every

    def _store_directory(self, path: str) -> None:
        """Create a directory and its parents in a local store, if missing.

        A file of the store is about to be created in the directory, which was so far virtual or outside of the grid.
        """
        if not path or not self.writer.local:
            return
        number = self._base_number(path)
        if number is not None and not self.base.is_virtual(number):
            return
        self._store_directory(path.rpartition("/")[0])
        with suppress(FileExistsError):
            self.writer.make_directory(path)
            self.base.changed(path)
