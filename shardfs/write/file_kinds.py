"""Kinds of files: how each kind gets to where it is kept when it is closed, and leaves when its name is taken away."""

from __future__ import annotations

import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardfs.model.errors import NOT_FOUND, ShardfsError, errno_of, message
from shardfs.model.kinds import NameKind
from shardfs.write.file_contents import Part
from shardfs.write.files import split
from shardfs.write.journaled import FileKind, JournaledKind
from shardfs.write.name_kind import is_document
from shardfs.write.names import JOURNALED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardfs.vfs.chunk_dirs import Target
    from shardfs.write.descriptions import Descriptions
    from shardfs.write.files import WritableFile, Writeback
    from shardfs.write.journaled import CompressedKind
    from shardfs.write.pending import Version
    from shardfs.write.writeback import Predecessor


@dataclass(eq=False)
class PlainKind(FileKind):
    """Files that the store has under the same path. Those of a local store are open on the disk, and never dirty."""

    kind = NameKind.PLAIN

    _descriptions: Descriptions

    def write(self, file: WritableFile, path: str, data: bytes, frozen: bytes | None = None) -> None:
        self._writer.put(path, data)
        file.freeze(frozen)
        file.set_status(size=len(data))
        self._source_tree.changed(path)
        self._pending.refused.clear(path)

    def describe(self, path: str) -> None:
        directory, _, name = path.rpartition("/")
        if is_document(name):
            self._descriptions.describe_written(path, {directory})

    def require_own_name(self, path: str, target: Target | None) -> None:
        self._writer.require_own_name(path)

    def leave(self, path: str) -> None:
        self._pending.journal.sync()  # a file that was renamed may have its bytes there
        with suppress(FileNotFoundError):  # the writer has already removed a file named like a lock
            self._writer.delete(path)
        self._source_tree.changed(path)


class OrphanKind(JournaledKind):
    """Files that may become chunks. The source may have files of these names, too, which other programs wrote."""

    def _is_in_source(self, path: str) -> bool:
        with suppress(*NOT_FOUND):
            return not self._source_tree.resolve(path).directory
        return False

    def require_own_name(self, path: str, target: Target | None) -> None:
        if self._is_in_source(path):
            self._writer.require_own_name(path)

    def remove(self, path: str, target: Target | None) -> None:
        self.leave(path)  # first: if the source refuses that, the version in the journal stays
        super().remove(path, target)

    def leave(self, path: str) -> None:
        if self._is_in_source(path):
            self._pending.journal.sync()  # a file that was renamed has its bytes there
            self._writer.delete(path)
            self._source_tree.changed(path)


class DocumentKind(PlainKind):
    """Metadata documents of sharded data: a close translates them and writes them to the store."""

    kind = NameKind.DOCUMENT

    def write(self, file: WritableFile, path: str, data: bytes, frozen: bytes | None = None) -> None:
        self._store(file, path, data, has_name=False)

    def save(self, file: WritableFile, unsaved: Writeback) -> None:
        self._store(file, unsaved.path, unsaved.data, has_name=True)

    def _store(self, file: WritableFile, path: str, data: bytes, *, has_name: bool) -> None:
        directory, _, name = path.rpartition("/")
        # Chunks written under the old document are published first.
        self._pending.drain(self._documents.described_by(directory, name))
        if not self._descriptions.write_document(file, directory, name, data, has_name=has_name):
            super().write(file, path, data, frozen=data)
            super().describe(path)
        self._pending.refused.clear(path)

    def describe(self, path: str) -> None:
        """Do nothing: `write` has done it, before another thread could create a name that the document describes."""

    def require_movable(self, path: str) -> None:
        directory, _, name = path.rpartition("/")
        self._documents.require_known(directory, name)

    def drop(self, predecessor: Predecessor) -> bool:
        return True

    def leave(self, path: str) -> None:
        directory, _, name = path.rpartition("/")
        for changed in self._documents.remove(directory, name):
            self._descriptions.describe_anew(changed)


@dataclass(eq=False)
class Kinds(Part):
    """The kinds of files that can be written, and what files of all kinds have in common. Thread-safe."""

    compressed: CompressedKind
    _descriptions: Descriptions

    def __post_init__(self) -> None:
        super().__post_init__()
        self.journaled = JournaledKind(self._contents)
        self._kinds: dict[NameKind, FileKind] = {
            **dict.fromkeys(JOURNALED, self.journaled),
            NameKind.ORPHAN: OrphanKind(self._contents),
            NameKind.COMPRESSED: self.compressed,
            NameKind.DOCUMENT: DocumentKind(self._contents, self._descriptions),
            NameKind.PLAIN: PlainKind(self._contents, self._descriptions),
        }

    def __getitem__(self, kind: NameKind) -> FileKind:
        return self._kinds[kind]

    def commit(self, file: WritableFile) -> None:
        """Save a dirty file where its kind is kept. Record the error if the file is refused.

        Raise OSError, also (EIO) if the shard of a chunk is damaged.
        """
        try:
            while file.dirty:
                kind = file.kind
                path = file.path
                self._kinds[kind].commit(file)
                if file.kind is kind and file.path == path:
                    return  # else it was renamed meanwhile, and is saved under its new name
        except OSError as e:
            self._refuse(file, e)
            raise
        except ShardfsError as e:
            failure = OSError(errno_of(e), message(e), file.path)
            self._refuse(file, failure)
            raise failure from e

    def _refuse(self, file: WritableFile, failure: OSError) -> None:
        file.refuse()
        path = file.saved_path
        if path is not None and file.kind is not NameKind.SCRATCH:  # the rename fails instead
            self._pending.refused.record(path, failure)

    def copy_status(self, file: WritableFile, path: str) -> None:
        """Give the file that a local store has at a path the mode and time that were set on the mount."""
        if (disk := self._writer.disk) is not None:
            with suppress(FileNotFoundError):  # a document may be stored under another name
                disk.set_mode(path, stat.S_IMODE(file.mode) or 0o644)
                disk.set_times(path, file.mtime_ns)
            self._source_tree.changed(path)

    # ---- files that need no buffer any more ----

    def drop_buffer(self, file: WritableFile) -> None:
        """Free the buffer of a file once no handle writes to it.

        Data still unsaved at that point were refused, and are dropped.
        """
        with self._names.lock:
            path = file.path
            if file.writers or path is None:
                return
            if file.superseded:
                self._descriptions.show_superseding(file)
                return
            if not file.handles and file.leave_disk():
                self._source_tree.changed(path)
            if file.drop_buffer() or file.kind is NameKind.COMPRESSED:  # refused, and the writer got the error: restore
                file.set_status(mtime_ns=time.time_ns())
                self._names.hooks.invalidate_content(file.number)
                if file.version is None and file.frozen is None and not file.is_original:
                    self._files.unname(file)
                    if path in self._pending.backlog.versions:  # a removal
                        self._files.hide(*split(path))
                    self._names.invalidate(*split(path))

    def rest(self, file: WritableFile) -> None:
        """Forget a file that the source shows with the same contents.

        The most recent of these files are kept, with their times and modes. The caller holds the lock.
        """
        self._files.settle(file)
        self._unname(self._files.evict_settled())

    def _unname(self, files: Iterable[WritableFile]) -> None:
        """Remove the names of files that the source now shows. The caller holds the lock."""
        for file in files:
            path = file.path
            if file.handles:
                self._contents.load(file)
            self._files.unname(file)
            if path is not None:
                self._names.invalidate(*split(path))

    # ---- publishing ----

    def is_held(self, path: str) -> bool:
        """Return whether a handle has the file open for writing."""
        file = self._files.at(path)
        return file is not None and file.writers > 0

    def published(self, versions: Mapping[str, Version]) -> None:
        """Update the files whose versions are now in their shards, by path. Called without any lock."""
        with self._names.lock:
            for path, version in versions.items():
                file = self._files.at(path)
                if file is None:
                    if version.data is None:
                        self._files.reveal(*split(path))
                    continue
                if file.version is not None and file.version.lsn == version.lsn:
                    self._file_published(file, version)

    def _file_published(self, file: WritableFile, version: Version) -> None:
        size = version.data.size if version.data is not None else 0
        if file.target is None or file.target.is_verbatim or version.is_encoded:
            file.publish(version.base, None if version.is_encoded else size)
            if file.matches_source:
                self.rest(file)
        elif file.writers:  # open writers make the next version
            self._contents.load(file)
            file.publish(version.base)
        else:
            self._unname([file])
