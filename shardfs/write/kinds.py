"""Kinds of files: how each kind gets to where it is kept when it is closed, and leaves when its name is taken away."""

from __future__ import annotations

import errno
import stat
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from shardfs.model.errors import CorruptShardError, ShardfsError, errno_of, message
from shardfs.model.kinds import NameKind, compression
from shardfs.write.encoding import encode, stored_bytes, uncompressed
from shardfs.write.files import split
from shardfs.write.name_kind import is_document
from shardfs.write.names import JOURNALED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardfs.model.blobs import Bytes
    from shardfs.write.contents import FileContents
    from shardfs.write.descriptions import Descriptions
    from shardfs.write.encoding import Encoded
    from shardfs.write.files import WritableFile
    from shardfs.write.open_files import OpenFiles
    from shardfs.write.overlay import Overlay
    from shardfs.write.pending import Version


class FileKind:
    """What happens to the files of one kind of names. Thread-safe.

    Attributes:
        is_journaled: the files are kept in the journal.
    """

    is_journaled = False

    def __init__(self, contents: FileContents) -> None:
        self._contents = contents
        self._names = contents.names
        self._pending = contents.pending
        self._writer = contents.writer
        self._base = contents.names.base

    def is_quick(self, file: WritableFile) -> bool:
        """Return whether committing a file, if it is dirty, needs no more than a quick journal write."""
        return False

    def commit(self, file: WritableFile) -> None:
        """Save a dirty file."""
        with self._names.gate.shared():  # its directory may be being renamed
            unsaved = file.start_writeback()
        if unsaved is None:
            return
        try:
            self.write(file, *unsaved)
        except BaseException:
            file.redirty()
            raise

    def write(self, file: WritableFile, path: str, data: bytes) -> None:
        """Store bytes as the file at `path`. A journaled file gets that name at the same time."""
        raise NotImplementedError

    def require_movable(self, path: str) -> None:
        """Raise OSError if the file at a path cannot be renamed to a name of another kind."""

    def leave(self, path: str) -> None:
        """Remove what is stored at a path, after the file has got a name of another kind."""


class JournaledKind(FileKind):
    """Chunks, chunks to be, and temporary files: a close adds a version to the journal."""

    is_journaled = True

    def is_quick(self, file: WritableFile) -> bool:
        return not file.dirty or (file.buffer is not None and self._pending.is_quick(file.target, file.buffer.size))

    def commit(self, file: WritableFile) -> None:
        unsaved = file.unsaved()
        if unsaved is None:
            return
        encoded = encode(file.target, unsaved[0])
        self._pending.make_room(unsaved[0].size if encoded is None else len(encoded.stored))
        with self._names.gate.shared():  # keeps the shard in place until the record is written
            self._pending.look(unsaved[1], file.target)
            with self._names.lock:
                unsaved = file.unsaved()
                if unsaved is None or file.kind not in JOURNALED:  # saved or renamed by another thread meanwhile
                    return
                buffer, path = unsaved
                if encoded is not None and not encoded.is_of(file.target, buffer):
                    encoded = encode(file.target, buffer)  # another thread has written meanwhile
                if encoded is None:
                    self.put(file, path, buffer.content())
                else:
                    self.put(file, path, encoded.stored, stored=True)
                    self.show(file, encoded)

    def write(self, file: WritableFile, path: str, data: bytes) -> None:
        stored = stored_bytes(file.target, data)
        with self._names.lock:
            self.put(file, path, data if stored is None else stored, stored=stored is not None)
            self._names.files.name(file, *split(path))

    def put(self, file: WritableFile, path: str, data: Bytes, *, stored: bool = False) -> None:
        """Add a version of a file to the journal. The caller holds the lock."""
        scratch, when, mode = file.kind is NameKind.SCRATCH, file.mtime_ns, file.mode
        file.commit(self._pending.put(path, data, file.target, when, mode, scratch=scratch, stored=stored))

    def show(self, file: WritableFile, encoded: Encoded) -> None:
        """Show the bytes of a chunk as they will be shown once it is in its shard. The caller holds the lock."""
        if file.show(encoded):
            self._names.hooks.invalidate_content(file.number)


class CompressedKind(FileKind):
    """Chunks that a program compresses itself: a file `X.gz` is the chunk `X` from its close on."""

    def __init__(self, contents: FileContents, overlay: Overlay, open_files: OpenFiles) -> None:
        super().__init__(contents)
        self._overlay = overlay
        self._open_files = open_files

    def write(self, file: WritableFile, path: str, data: bytes) -> None:
        """Write the bytes `data` of a file at `path`, decompressed, as a new version of the chunk.

        The compressed file keeps its name: the caller calls `retire`.

        Raise OSError (EINVAL) if they are no such chunk, or as `OpenFiles.classify_to_write`.
        """
        plain = path.removesuffix(compression(path))
        directory, name = split(plain)
        content = uncompressed(path, data)
        self._pending.make_room(len(content))
        with self._names.gate.shared():
            target = self._open_files.classify_to_write(directory, name).target
            if target is None:
                raise OSError(errno.EINVAL, "no metadata describes this chunk any more", plain)
            stored = stored_bytes(target, content)
            present = self._overlay.find(directory, name)
            if present is not None:
                self._open_files.adopt(present.number)
            self._pending.look(plain, target)
            with self._names.lock:
                files = self._names.files
                chunk = files.at(plain) or files.new(directory, name, NameKind.CHUNK, target)
                version = self._pending.move(
                    path, plain, target, None, content if stored is None else stored, file.mtime_ns, file.mode,
                    stored=stored is not None,
                )  # fmt: skip
                chunk.commit(version, dirty=True)
                chunk.set_status(size=-1, mtime_ns=file.mtime_ns, mode=file.mode)
                if not chunk.writers:
                    chunk.drop_buffer()
                file.publish(None)
        if present is None:
            self._names.invalidate(directory, name)
        self._names.hooks.reshaped(np.array([chunk.number], np.uint64))
        self._pending.refused.forget(path)

    def retire(self, file: WritableFile) -> None:
        """Remove the name of a file that was saved. Handles that are open fail with ESTALE from now on."""
        with self._names.lock:
            if file.dirty:  # another handle has written meanwhile, and its close saves that
                return
            file.drop_buffer()
            if file.path is not None:
                self._names.invalidate(*split(file.path))
                self._names.files.unname(file)
        self._names.hooks.reshaped(np.array([file.number], np.uint64))


class PlainKind(FileKind):
    """Files that the store has under the same path. Those of a local store are open on the disk, and never dirty."""

    def __init__(self, contents: FileContents, descriptions: Descriptions) -> None:
        super().__init__(contents)
        self._descriptions = descriptions

    def write(self, file: WritableFile, path: str, data: bytes) -> None:
        self._store(file, path, data)

    def _store(self, file: WritableFile, path: str, data: bytes, frozen: bytes | None = None) -> None:
        self._writer.put(path, data)
        file.freeze(frozen)
        file.set_status(size=len(data))
        self._base.changed(path)
        directory, _, name = path.rpartition("/")
        if is_document(name):
            self._descriptions.describe_anew(directory)
        self._pending.refused.forget(path)

    def leave(self, path: str) -> None:
        with suppress(FileNotFoundError):  # the writer has already removed a file named like a lock
            self._writer.delete(path)
        self._base.changed(path)


class DocumentKind(PlainKind):
    """Metadata documents of sharded data: a close translates them and writes them to the store."""

    def write(self, file: WritableFile, path: str, data: bytes) -> None:
        directory, _, name = path.rpartition("/")
        # Chunks written under the old document are published first.
        self._pending.drain(self._names.documents.described_by(directory, name))
        if not self._descriptions.write_document(file, directory, name, data):
            self._store(file, path, data, frozen=data)
        self._pending.refused.forget(path)

    def require_movable(self, path: str) -> None:
        directory, _, name = path.rpartition("/")
        self._names.documents.require_known(directory, name)

    def leave(self, path: str) -> None:
        directory, _, name = path.rpartition("/")
        for changed in self._names.documents.remove(directory, name):
            self._descriptions.describe_anew(changed)


class Kinds:
    """The kinds of files that can be written, and what files of all kinds have in common. Thread-safe."""

    def __init__(self, contents: FileContents, compressed: CompressedKind, descriptions: Descriptions) -> None:
        self.journaled = JournaledKind(contents)
        self.compressed = compressed
        self._kinds: dict[NameKind, FileKind] = {
            NameKind.CHUNK: self.journaled,
            NameKind.ORPHAN: self.journaled,
            NameKind.SCRATCH: self.journaled,
            NameKind.COMPRESSED: compressed,
            NameKind.DOCUMENT: DocumentKind(contents, descriptions),
            NameKind.PLAIN: PlainKind(contents, descriptions),
        }
        self._contents = contents
        self._descriptions = descriptions
        self._pending = contents.pending
        self._names = contents.names
        self._files = contents.names.files

    def __getitem__(self, kind: NameKind) -> FileKind:
        return self._kinds[kind]

    def commit(self, file: WritableFile) -> None:
        """Save a dirty file where its kind is kept. Record the error if the file is refused.

        Raise OSError, also (EIO) if the shard of a chunk is damaged.
        """
        try:
            while file.dirty:
                kind = file.kind
                self._kinds[kind].commit(file)
                if file.kind is kind:
                    return  # else it was renamed meanwhile, and another kind commits it
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
            self._pending.refused.note(path, failure)

    def copy_status(self, file: WritableFile, path: str) -> None:
        """Give a file in a local store the mode and time that were set on the mount."""
        if (disk := self._contents.writer.disk) is not None:
            with suppress(FileNotFoundError):  # a document may be stored under another name
                disk.set_mode(path, stat.S_IMODE(file.mode) or 0o644)
                disk.set_times(path, file.mtime_ns)
            self._names.base.changed(path)

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
                self._descriptions.show_stored(file)
                return
            if not file.handles and file.leave_disk():
                self._names.base.changed(path)
            if file.drop_buffer() or file.kind is NameKind.COMPRESSED:  # refused, and the writer got the error: restore
                file.set_status(mtime_ns=time.time_ns())
                self._names.hooks.invalidate_content(file.number)
                if not self._was_there(file, path):
                    self._files.unname(file)
                    if self._pending.holds(path):  # a removal
                        self._files.hide(*split(path))
                    self._names.invalidate(*split(path))

    def _was_there(self, file: WritableFile, path: str) -> bool:
        """Return whether the file existed before the refused write, or may have existed in a damaged shard."""
        if file.version is not None or file.frozen is not None or file.is_original:
            return True
        if self._pending.holds(path):  # removed, although its shard still has it
            return False
        target = file.target
        try:
            return target is not None and self._pending.is_stored(path, target)
        except (OSError, CorruptShardError):  # reads of the file report the damage
            return True

    def rest(self, file: WritableFile) -> None:
        """Forget a file that the source shows with the same contents.

        The most recent of these files are kept, with their times and modes. The caller holds the lock.
        """
        self._unname(self._files.settle(file))

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

    def published(self, done: Mapping[str, Version]) -> None:
        """Update the files whose versions are now in their shards. Called without any lock."""
        with self._names.lock:
            for path, version in done.items():
                file = self._files.at(path)
                if file is None:
                    if version.data is None:
                        self._files.reveal(*split(path))
                    continue
                if file.version is not None and file.version.lsn == version.lsn:
                    self._file_published(file, version)

    def _file_published(self, file: WritableFile, version: Version) -> None:
        size = version.data.size if version.data is not None else 0
        if file.target is None or file.target.is_verbatim or version.stored:
            file.publish(version.base, None if version.stored else size)
            if file.is_settled:
                self._unname(self._files.settle(file))
        elif file.writers:  # open writers make the next version
            self._contents.load(file)
            file.publish(version.base)
        else:
            self._unname([file])
