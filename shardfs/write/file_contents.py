"""Bytes and attributes of the files that were created or changed on a writable mount."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardfs.model.attributes import Attributes
from shardfs.model.blobs import read_file
from shardfs.model.kinds import NameKind
from shardfs.write.buffers import Buffer
from shardfs.write.files import shown_mode, stale
from shardfs.write.stored import NOT_NOTED

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.storage.writers import Writer
    from shardfs.storage.writers.local_directory import LocalDirectory
    from shardfs.vfs.chunk_dirs import Target
    from shardfs.write.buffers import Budget
    from shardfs.write.files import WritableFile
    from shardfs.write.names import Names
    from shardfs.write.pending import Version
    from shardfs.write.writeback import WriteBuffer

MAX_CHUNK = 2 << 30
"""Maximum bytes of one file; a larger one is refused."""

MAX_DOCUMENT = 16 << 20
"""Maximum bytes of a document; a larger one is refused."""

PIECE = 8 << 20
"""Bytes copied at a time."""


@dataclass(eq=False)
class FileContents:
    """Reads changed files from where their bytes are: a buffer, the journal, the disk or the tree. Thread-safe.

    Args:
        writer: of the source. If that is a directory of this machine, its files' sizes, modes and times are shown.
        _budget: memory limit of the buffers of files open for writing.
    """

    names: Names
    pending: WriteBuffer
    writer: Writer
    _budget: Budget

    def attributes(self, file: WritableFile) -> Attributes:
        """Return the attributes of a file. Raise OSError (ESTALE) if its bytes are gone."""
        if file.kind is NameKind.DIRECTORY:
            return Attributes(file.number, True, 0, file.mtime_ns, None, file.mode)
        if file.kind is NameKind.PLAIN and (disk := self.writer.disk) is not None:
            return self._attributes_on_disk(file, disk)
        if file.kind is NameKind.COMPRESSED and file.is_lost:
            raise stale(file.number)
        if self.names.source_tree.expires and file.target is not None:
            self._follow_source(file, file.target)
        version, size = file.version, file.size()
        if size < 0 and file.target is not None:
            size = self._shown_size(file.target, version)
            with self.names.lock:
                if file.version is version:
                    file.set_status(size=size)
        return Attributes(file.number, False, size, file.mtime_ns, None, file.mode)

    def _follow_source(self, file: WritableFile, target: Target) -> None:
        """Take over size and time of a chunk that another program has changed in the source since it was published.

        Raise OSError (ESTALE) if the program has removed the chunk: the name is then looked up in the source.
        """
        if not file.matches_source or file.frozen is not None:
            return
        chunk, before = target.tree.shards.stored_chunk(target.coords), file.stored
        if chunk is None and target.tree.shards.has(target.coords):
            return  # an empty second file
        now = (before or NOT_NOTED).followed(chunk)
        if now == before:
            return
        entry = None if chunk is None else target.tree.chunk_attributes(file.number, target.coords)
        with self.names.lock:
            if not file.matches_source:
                return
            file.follow(now)
            if before is None or before.is_same(now):
                return  # only its neighbours have changed
            if entry is None:
                self.names.files.unname(file)
                raise stale(file.number)
            file.set_status(size=entry.size, mtime_ns=entry.mtime_ns)
        self.names.hooks.invalidate_content(file.number)

    def _attributes_on_disk(self, file: WritableFile, disk: LocalDirectory) -> Attributes:
        with self.names.lock:
            info = os.fstat(file.fd) if file.fd >= 0 else None
        if info is None:
            if file.path is None:
                raise stale(file.number)
            info = disk.stat(file.path)
        return Attributes(file.number, False, info.st_size, info.st_mtime_ns, None, shown_mode(info.st_mode))

    def whole(self, file: WritableFile) -> bytes:
        """Return all bytes of a file. Raise as `read`."""
        return bytes(self.read(file, 0, max(self.attributes(file).size, 1)))

    def read(self, file: WritableFile, offset: int, size: int) -> bytes | memoryview:
        """Return `size` bytes of a file from `offset` on; fewer only at its end.

        Raise OSError: ESTALE if its bytes are gone, EIO if those in the journal are damaged or no document describes
        them.
        """
        if file.kind is NameKind.DIRECTORY:
            raise IsADirectoryError(errno.EISDIR, "is a directory", file.path)
        with self.names.lock:
            if file.buffer is not None:
                return file.buffer.read(offset, size)
            version = file.version
            target = file.target
        if file.frozen is not None:
            return memoryview(file.frozen)[offset : offset + size]
        if version is not None and version.data is not None:
            try:
                if version.is_encoded:
                    return memoryview(self._shown(version, target))[offset : offset + size]
                return self.pending.journal.read(version.data, offset, size)
            except OSError as e:
                if e.errno != errno.ESTALE:
                    raise
                with self.names.lock:
                    changed = file.version is not version or file.buffer is not None
                    replaced = file.path is None
                if changed:
                    return self.read(file, offset, size)
                if replaced or target is None:  # else it was just published
                    raise
        if file.fd >= 0:
            return read_file(file.fd, size, offset)
        if target is not None:
            return target.tree.read_chunk(target.coords, offset, size)
        if file.path is None:
            raise stale(file.number)
        # Look up by path: the tree may have forgotten the kernel's inode number.
        source_tree = self.names.source_tree
        return source_tree.read(source_tree.resolve(file.path).number, offset, size)

    def _shown_size(self, target: Target, version: Version | None) -> int:
        """Return the shown size of a chunk in the journal, or else in its shard, without decoding if possible."""
        if version is None:
            tree = target.tree
            return tree.chunk_attributes(tree.numbers.of_chunk(tree.path, target.coords), target.coords).size
        size = -1
        if version.data is not None:
            size = target.tree.chunks.shown_size(target.coords, version.data.size)
        return len(self._shown(version, target)) if size < 0 else size

    def _shown(self, version: Version, target: Target | None) -> bytes | memoryview:
        """Return the shown bytes of a version whose stored bytes are in the journal."""
        data = version.data
        if target is None or data is None:
            raise OSError(errno.EIO, "no metadata describes this chunk any more, so its bytes cannot be shown")
        try:
            key = "pending", version.lsn, target.tree.first
            return target.tree.chunks.show(key, target.coords, lambda: self.pending.journal.read(data))
        except ValueError as e:
            raise OSError(errno.EIO, f"cannot be a chunk of this array: {e}", target.tree.path) from e

    def new_buffer(self, file: WritableFile) -> Buffer:
        """Return an empty buffer for a file that is about to be written."""
        return Buffer(self._budget, MAX_DOCUMENT if file.kind is NameKind.DOCUMENT else MAX_CHUNK)

    def load(self, file: WritableFile) -> Buffer:
        """Return the buffer of a file, with all its bytes.

        A file without one gets a buffer with the bytes from where they are now. An existing buffer is returned as it
        is, with unsaved changes. Raise OSError: ESTALE if the bytes are gone, EFBIG if they are too many, and the
        errors of reading.
        """
        while (buffer := file.buffer) is None:
            place = file.version_and_target
            file.load(self._read_whole(file), place)
        return buffer

    def _read_whole(self, file: WritableFile) -> Buffer:
        buffer, size, at = self.new_buffer(file), self.attributes(file).size, 0
        while at < size and (piece := self.read(file, at, min(size - at, PIECE))):
            buffer.write(at, piece)
            at += len(piece)
        if at < size:
            raise OSError(errno.EIO, f"only {at} of {size} bytes could be read; try again", file.path)
        return buffer

    def write(self, file: WritableFile, offset: int, data: bytes | memoryview) -> None:
        """Write bytes at `offset` into a file that has no descriptor. Raise as `load` and `Buffer.write`."""
        self._change(file, lambda buffer: buffer.write(offset, data))

    def resize(self, file: WritableFile, size: int) -> None:
        """Shorten the contents of a file that has no descriptor to `size` bytes, or extend them with zeros.

        Raise as `write`.
        """
        if not size and file.buffer is None:
            file.load(self.new_buffer(file), file.version_and_target)
        self._change(file, lambda buffer: buffer.truncate(size))

    def _change(self, file: WritableFile, change: Callable[[Buffer], None]) -> None:
        """Change the buffer of a file, with all its bytes. Another thread may drop a buffer that is not dirty."""
        while not file.change(change):
            self.load(file)


@dataclass(eq=False)
class Part:
    """A part of the writable tree, with what all parts share: names, files, their bytes, the journal and the source.

    The fields of a part are the other parts that it calls. Its attributes: `_files` and `_names` of the mount,
    `_source_tree` (without the mount's changes), `_pending` versions, `_writer` of the store.
    """

    _contents: FileContents

    def __post_init__(self) -> None:
        self._names = self._contents.names
        self._documents = self._names.documents
        self._files = self._names.files
        self._source_tree = self._names.source_tree
        self._pending = self._contents.pending
        self._writer = self._contents.writer
