"""Kinds of files that a close puts into the journal: chunks, compressed ones, and temporary files."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardfs.model.kinds import NameKind, compression
from shardfs.write.encoding import encode, to_journal, uncompressed
from shardfs.write.file_contents import Part
from shardfs.write.files import split
from shardfs.write.names import JOURNALED

if TYPE_CHECKING:
    from shardfs.model.blobs import Bytes
    from shardfs.vfs.chunk_dirs import Target
    from shardfs.write.encoding import Encoded
    from shardfs.write.files import WritableFile, Writeback
    from shardfs.write.open_files import OpenFiles
    from shardfs.write.overlay import Overlay
    from shardfs.write.writeback import Predecessor


class FileKind(Part):
    """What happens to the files of one kind of names. Thread-safe.

    Attributes:
        kind: of the names; files that are kept in the journal have several kinds.
        is_journaled: the files are kept in the journal.
    """

    kind: NameKind
    is_journaled = False

    def commit(self, file: WritableFile) -> None:
        """Save a dirty file, and describe its directory anew if it is a document. Do nothing if all is saved.

        Raise OSError or ShardfsError if the bytes are refused or cannot be saved.
        """
        with self._names.gate.shared():  # a rename of its directory ends first
            if file.unsaved() is None:
                return
        with file.writeback:  # before the gate, which a document takes alone
            if (unsaved := file.start_writeback(self.kind)) is None:
                return
            self.save(file, unsaved)
            file.end_writeback(unsaved)
        self.describe(unsaved.path)

    def save(self, file: WritableFile, unsaved: Writeback) -> None:
        """Store the bytes of a dirty file under its name, with `writeback` held. Raise as `commit`."""
        self.write(file, unsaved.path, unsaved.data)

    def write(self, file: WritableFile, path: str, data: bytes) -> None:
        """Store bytes as the file at `path`. A journaled file gets that name at the same time. Raise as `commit`."""
        raise NotImplementedError

    def describe(self, path: str) -> None:
        """Update the names that a file describes, after `write` has stored it."""

    # ---- names that are removed, or given up for one of another kind ----

    def require_own_name(self, path: str, target: Target | None) -> None:
        """Raise OSError (EROFS) if the source has the file below a symbolic link to a directory.

        A program that removes a directory that is a link would otherwise empty the directory to which the link leads.
        """

    def require_movable(self, path: str) -> None:
        """Raise OSError if the file at a path cannot be renamed to a name of another kind."""

    def drop(self, predecessor: Predecessor) -> bool:
        """Drop the pending version of a path, with the lock held. Return whether the source still shows the name."""
        return False

    def leave(self, path: str) -> None:
        """Remove what the store has at a path, after the file has got a name of another kind."""

    def remove(self, path: str, target: Target | None) -> None:
        """Remove a name. Open handles keep the bytes of the file."""
        self._pending.refused.clear(path)
        predecessor = self._pending.predecessor(path, target)
        with self._names.lock:
            is_in_source = self.drop(predecessor)
            if (file := self._files.at(path)) is not None:
                self._files.unname(file)
            if is_in_source:
                self._files.hide(*split(path))
            else:
                self._files.reveal(*split(path))


class JournaledKind(FileKind):
    """Chunks, chunks to be, and temporary files: a close adds a version to the journal."""

    is_journaled = True

    def commit(self, file: WritableFile) -> None:
        unsaved = file.unsaved()
        if unsaved is None:
            return
        target = file.target
        buffer, path = unsaved
        encoded = None if target is None or target.is_verbatim else encode(target, buffer)
        self._pending.make_room(buffer.size if encoded is None else len(encoded.stored))
        with self._names.gate.shared():  # keeps the shard in place until the record is written
            predecessor = self._pending.predecessor(path, target)
            with self._names.lock:
                unsaved = file.unsaved()
                if unsaved is None or file.kind not in JOURNALED:  # saved or renamed by another thread meanwhile
                    return
                buffer, path = unsaved
                if (predecessor.path, predecessor.target) != (
                    path,
                    file.target,
                ):  # another thread has renamed it meanwhile
                    predecessor = self._pending.predecessor(path, file.target)
                if encoded is not None and not encoded.is_of(file.target, buffer):
                    encoded = encode(file.target, buffer)  # another thread has written meanwhile
                if encoded is None:
                    self.put(file, predecessor, buffer.content())
                else:
                    self.put(file, predecessor, encoded.stored, is_encoded=True)
                    self.show(file, encoded)

    def write(self, file: WritableFile, path: str, data: bytes) -> None:
        content, is_encoded = to_journal(file.target, data)
        predecessor = self._pending.predecessor(path, file.target)
        with self._names.lock:
            self.put(file, predecessor, content, is_encoded=is_encoded)
            self._files.name(file, *split(path))

    def require_own_name(self, path: str, target: Target | None) -> None:
        if target is not None:
            shards = target.tree.shards
            self._writer.require_own_name(shards.key(shards.number_of(target.coords)))

    def drop(self, predecessor: Predecessor) -> bool:
        return self._pending.remove(predecessor)

    def put(self, file: WritableFile, predecessor: Predecessor, data: Bytes, *, is_encoded: bool = False) -> None:
        """Add a version of a file to the journal. The caller holds the lock."""
        is_scratch = file.kind is NameKind.SCRATCH
        file.commit(
            self._pending.put(predecessor, data, file.mtime_ns, file.mode, scratch=is_scratch, is_encoded=is_encoded)
        )

    def show(self, file: WritableFile, encoded: Encoded) -> None:
        """Show the bytes of a chunk as they will be shown once it is in its shard. The caller holds the lock."""
        if file.show(encoded):
            self._names.hooks.invalidate_content(file.number)


@dataclass(eq=False)
class CompressedKind(FileKind):
    """Chunks that a program compresses itself: a file `X.gz` is the chunk `X` from its close on."""

    kind = NameKind.COMPRESSED

    _overlay: Overlay
    _open_files: OpenFiles

    def write(self, file: WritableFile, path: str, data: bytes) -> None:
        """Write the bytes `data` of a file at `path`, decompressed, as a new version of the chunk.

        The compressed file keeps its name: the caller calls `retire`. Raise OSError (EINVAL) if they are no such chunk,
        and the errors of `OpenFiles.classify_to_write` and `WriteBuffer.rename`.
        """
        plain = path.removesuffix(compression(path))
        directory, name = split(plain)
        content = uncompressed(path, data)
        self._pending.make_room(len(content))
        with self._names.gate.shared():
            target = self._open_files.classify_to_write(directory, name).target
            if target is None:
                raise OSError(errno.EINVAL, "no metadata describes this chunk any more", plain)
            content, is_encoded = to_journal(target, content)
            present = self._overlay.find(directory, name)
            if present is not None:
                self._open_files.adopt(present.number)
            predecessor = self._pending.predecessor(plain, target)
            with self._names.lock:
                chunk = self._files.at(plain) or self._files.new(directory, name, NameKind.CHUNK, target)
                version = self._pending.rename(
                    path, predecessor, None, content, file.mtime_ns, file.mode, is_encoded=is_encoded
                )
                chunk.commit(version, dirty=True)
                chunk.set_status(size=-1, mtime_ns=file.mtime_ns, mode=file.mode)
                if not chunk.writers:
                    chunk.drop_buffer()
                file.publish(None)
        if present is None:
            self._names.invalidate(directory, name)
        self._names.hooks.reshaped(np.array([chunk.number], np.uint64))
        self._pending.refused.clear(path)

    def retire(self, file: WritableFile) -> None:
        """Remove the name of a file that was saved. Handles that are open fail with ESTALE from now on."""
        with self._names.lock:
            if file.dirty:  # another handle has written meanwhile, and its close saves that
                return
            file.drop_buffer()
            if file.path is not None:
                self._names.invalidate(*split(file.path))
                self._files.unname(file)
        self._names.hooks.reshaped(np.array([file.number], np.uint64))
