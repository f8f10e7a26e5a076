"""Saves the bytes of changed files: in the journal, in the store, or as the document that they become."""

from __future__ import annotations

import stat
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from shardfs.model.errors import CorruptShardError, ShardfsError, errno_of, message
from shardfs.model.kinds import NameKind
from shardfs.write.encoding import encode
from shardfs.write.files import split
from shardfs.write.name_kind import is_document
from shardfs.write.names import JOURNALED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardfs.model.blobs import Bytes
    from shardfs.write.compressed import CompressedChunks
    from shardfs.write.contents import FileContents
    from shardfs.write.descriptions import Descriptions
    from shardfs.write.encoding import Encoded
    from shardfs.write.files import WritableFile
    from shardfs.write.open_files import Backing
    from shardfs.write.pending import Version


class Saving:
    """Moves changed files from their buffers to where they are kept, and on once they are published. Thread-safe."""

    def __init__(
        self, contents: FileContents, compressed: CompressedChunks, descriptions: Descriptions, backing: Backing
    ) -> None:
        self._contents, self._compressed, self._descriptions = contents, compressed, descriptions
        self._writer, self._pending, self._documents = backing
        self._names, self._files, self._base = contents.names, contents.names.files, contents.names.base

    def settle(self, file: WritableFile) -> None:
        """Save a dirty file in the journal or the store. Record the error if the file is refused.

        Raise OSError, also (EIO) if the shard of a chunk is damaged.
        """
        try:
            self._save(file)
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

    def _save(self, file: WritableFile) -> None:
        unsaved = file.unsaved()
        if unsaved is None:
            return
        encoded = None
        if file.kind in JOURNALED:
            encoded = encode(file.target, unsaved[0])
            self._pending.make_room(unsaved[0].size if encoded is None else len(encoded.stored))
        with self._names.gate.shared():  # keeps the shard in place until the record is written
            if file.kind in JOURNALED:
                self._pending.look(unsaved[1], file.target)
            rest = self._save_to_journal(file, encoded)
        if rest is None:
            return
        try:
            self.write_through(file, *rest)
        except BaseException:
            file.redirty()
            raise

    def _save_to_journal(self, file: WritableFile, encoded: Encoded | None) -> tuple[str, bytes] | None:
        """Write a dirty file to the journal. Return path and bytes instead if its kind is not journaled."""
        with self._names.lock:
            unsaved = file.unsaved()
            if unsaved is None:
                return None
            buffer, path = unsaved
            if file.kind not in JOURNALED:
                return file.start_writeback()
            if encoded is not None and not encoded.is_of(file.target, buffer):
                encoded = encode(file.target, buffer)  # another thread has written meanwhile
            if encoded is None:
                self.put(file, path, buffer.content())
            else:
                self.put(file, path, encoded.stored, stored=True)
                self.show_encoded(file, encoded)
            return None

    def put(self, file: WritableFile, path: str, data: Bytes, *, stored: bool = False) -> None:
        """Write a new version of a file to the journal. The caller holds the lock."""
        scratch = file.kind is NameKind.SCRATCH
        when, mode = file.mtime_ns, file.mode
        file.commit(self._pending.put(path, data, file.target, when, mode, scratch=scratch, stored=stored))

    def show_encoded(self, file: WritableFile, encoded: Encoded) -> None:
        """Show the bytes of a chunk as they will be shown once it is in its shard. The caller holds the lock."""
        if file.show(encoded):
            self._names.hooks.invalidate_content(file.number)

    def write_through(self, file: WritableFile, path: str, data: bytes) -> None:
        """Write a document, or a file of a remote store, to the store; a compressed chunk to the journal."""
        if file.kind is NameKind.COMPRESSED:
            self._compressed.write(file, path, data)
            return
        directory, _, name = path.rpartition("/")
        if file.kind is NameKind.DOCUMENT:  # chunks written under the old document are published first
            self._pending.drain(self._documents.described_by(directory, name))
        if file.kind is not NameKind.DOCUMENT or not self._descriptions.write_document(file, directory, name, data):
            self._writer.put(path, data)
            file.freeze(data if file.kind is NameKind.DOCUMENT else None)
            file.set_status(size=len(data))
            self._base.changed(path)
            if is_document(name):
                self._descriptions.describe_anew(directory)
        self._pending.refused.forget(path)

    def copy_status(self, file: WritableFile, path: str) -> None:
        """Give a file in a local store the mode and time that were set on the mount."""
        if (disk := self._writer.disk) is not None:
            with suppress(FileNotFoundError):  # a document may be stored under another name
                disk.set_mode(path, stat.S_IMODE(file.mode) or 0o644)
                disk.set_times(path, file.mtime_ns)
            self._base.changed(path)

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
                self._base.changed(path)
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

    def retire(self, file: WritableFile) -> None:
        """Remove the name of a compressed chunk that was saved. Handles that are open fail with ESTALE from now on."""
        with self._names.lock:
            if file.dirty:  # another handle has written meanwhile, and its close saves that
                return
            file.drop_buffer()
            if file.path is not None:
                self._names.invalidate(*split(file.path))
                self._files.unname(file)
        self._names.hooks.reshaped(np.array([file.number], np.uint64))

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
