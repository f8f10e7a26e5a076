"""Calls on the names of a writable mount: unlink, link, symlink, mkdir and rmdir."""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardfs.model.errors import NOT_FOUND
from shardfs.model.kinds import NameKind
from shardfs.vfs.chunk_dirs import NameMeaning
from shardfs.vfs.inodes import CREATED
from shardfs.write.encoding import cleared
from shardfs.write.file_contents import Part
from shardfs.write.files import join, shown_mode, split
from shardfs.write.name_kind import document_at, is_document
from shardfs.write.open_files import require_changeable

if TYPE_CHECKING:
    from shardfs.model.attributes import Attributes
    from shardfs.vfs.chunk_dirs import ChunkDirs, Target
    from shardfs.write.descriptions import Descriptions
    from shardfs.write.directories import Directories
    from shardfs.write.file_attributes import FileMetadata
    from shardfs.write.file_kinds import Kinds
    from shardfs.write.open_files import OpenFiles
    from shardfs.write.overlay import Overlay


@dataclass(eq=False)
class Entries(Part):
    """Creates and removes names. Thread-safe."""

    _overlay: Overlay
    _directories: Directories
    _open_files: OpenFiles
    _descriptions: Descriptions
    _kinds: Kinds
    _metadata: FileMetadata

    def existing(self, parent: int, name: bytes) -> tuple[str, Attributes]:
        """Return the path of a directory, and the attributes of an entry in it that the caller is about to change.

        Raise FileNotFoundError without such an entry, and the errors of `OpenFiles.directory_to_change`.
        """
        directory = self._open_files.directory_to_change(parent)
        entry = self._overlay.find(directory, name)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), join(directory, name))
        return directory, entry

    def _unused(self, parent: int, name: bytes) -> str:
        """Return the directory in which an entry is to be created. Raise FileExistsError if it exists."""
        directory = self._open_files.directory_to_change(parent)
        if self._overlay.find(directory, name) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), join(directory, name))
        return directory

    def classify(self, directory: str, name: bytes, entry: Attributes) -> NameMeaning:
        """Return the kind and target of an existing file.

        A chunk outside of its array's new shape keeps its kind and target.
        """
        file = self._files.by_number.get(entry.number)
        if file is not None:
            return NameMeaning(file.kind, file.target)
        meaning = self._names.classify_name(directory, name)
        if meaning.kind is NameKind.ORPHAN:  # a chunk outside of the array's new shape
            former = self._source_tree.target_of(entry.number)
            return meaning if former is None else NameMeaning(NameKind.CHUNK, former)
        return meaning

    # ---- files ----

    def unlink(self, parent: int, name: bytes) -> None:
        """Remove a file. A chunk is removed from its shard at the next publishing, or becomes a chunk of zeros.

        Raise OSError: EISDIR for a directory, EPERM or EROFS for names that cannot be changed, and the errors of the
        store for files that it has itself.
        """
        directory, entry = self.existing(parent, name)
        path = join(directory, name)
        if entry.directory:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        self._names.before_waiting()
        with self._names.writeback(self._files.by_number.get(entry.number)):
            self._unlink(parent, directory, name, entry)

    def _unlink(self, parent: int, directory: str, name: bytes, entry: Attributes) -> None:
        path, meaning = join(directory, name), self.classify(directory, name, entry)
        require_changeable(meaning.kind, path)
        if meaning.target is not None:
            self._pending.require_writable(meaning.target)
        kind = self._kinds[meaning.kind]
        kind.require_own_name(path, meaning.target)
        if meaning.kind is not NameKind.PLAIN:
            self._open_files.keep_readable(entry.number)
            if meaning.kind is NameKind.DOCUMENT:
                self._remove_cleared(parent, directory, besides=name)
                kind.leave(path)
            if meaning.target is not None and meaning.target.tree.collection.zeros is not None:
                self._pending.make_room(entry.size)
            with self._names.gate.shared():  # another thread may have renamed the directory
                directory = self._open_files.directory_to_change(parent)
                if not self.clear(directory, name):
                    kind.remove(join(directory, name), meaning.target)
            return
        with self._names.renaming():
            self._open_files.keep_readable(entry.number)
            self._writer.delete(path)
            kind.remove(path, None)
            self._source_tree.changed(path)
        if is_document(os.fsdecode(name)):
            self._descriptions.describe_anew(directory)

    def clear(self, directory: str, name: bytes) -> bool:
        """Replace a chunk by one of zeros, if clients of the layout remove chunks in order to write zeros.

        Return False for other files, for chunks outside of their array, and for those of a deleted array.
        """
        target = self._names.classify_name(directory, name).target
        zeros = None if target is None else self._cleared(target)
        if target is None or zeros is None:
            return False
        stored_bytes, shown_bytes = zeros
        path = join(directory, name)
        predecessor = self._pending.predecessor(path, target)
        with self._names.lock:
            old = self._files.at(path)
            if old is not None:
                self._files.unname(old)
            file = self._files.new(directory, name, NameKind.CHUNK, target)
            file.set_status(size=len(shown_bytes), mtime_ns=time.time_ns())
            self._kinds.journaled.put(file, predecessor, stored_bytes, is_encoded=not target.is_verbatim)
        return True

    def _cleared(self, target: Target) -> tuple[bytes, bytes] | None:
        """Return what a removed chunk becomes, as `encoding.cleared` does; None if its array is being deleted."""
        return None if self._is_deleted(target.tree) else cleared(target)

    def _is_deleted(self, tree: ChunkDirs) -> bool:
        """Return whether a client has deleted the document of an array."""
        for directory in (tree.path, tree.path.rpartition("/")[0]):
            for name in self._source_tree.datasets.layout_documents:
                if document_at(self._source_tree, directory, name) is not None:
                    names, key = self._files.in_directory(directory), os.fsencode(name)
                    return key in names and names[key] is None
        return False

    def link(self, number: int, new_parent: int, new_name: bytes) -> Attributes:
        """Create a copy of a file under another name, because files here have one name each.

        Return the copy's attributes. Raise OSError: EEXIST, or as `Entries.unlink` and `FileCalls.flush`.
        """
        directory = self._unused(new_parent, new_name)
        self._names.before_waiting()
        meaning, path = self._open_files.classify_to_write(directory, new_name), join(directory, new_name)
        if meaning.kind is NameKind.COMPRESSED:
            raise PermissionError(errno.EPERM, "a compressed chunk loses its suffix at close: copy or rename it", path)
        if meaning.kind is NameKind.PLAIN and self._writer.local:
            self._descriptions.make_stored_directory(directory)
            if self._metadata.copy_on_disk(number, path):
                with self._names.lock:
                    file = self._files.new(directory, new_name, NameKind.PLAIN)
                if self._descriptions.changes_kinds(new_name):
                    self._descriptions.describe_anew(directory)
                return self._contents.attributes(file)
        return self._copy_bytes(number, path, directory, new_name, meaning)

    def _copy_bytes(self, number: int, path: str, directory: str, name: bytes, meaning: NameMeaning) -> Attributes:
        """Copy a file by its bytes, if the source or the copy is not a plain file of a local store."""
        source = self._files.by_number.get(number)
        if source is not None:
            self._kinds.commit(source)
        entry = self._overlay.attributes(number)
        data = bytes(self._overlay.read(number, 0, max(entry.size, 1)))
        self._pending.make_room(len(data))
        file, kind = self._files.unnamed(meaning.kind, meaning.target), self._kinds[meaning.kind]
        file.set_status(size=-1, mtime_ns=time.time_ns(), mode=entry.mode)
        kind.write(file, path, data)
        kind.describe(path)
        if not kind.is_journaled:
            self._kinds.copy_status(file, path)
            with self._names.lock:
                self._files.name(file, directory, name)
        if entry.mode and meaning.kind is NameKind.PLAIN:
            self._metadata.set_mode(file.number, entry.mode)
        return self._contents.attributes(file)

    # ---- directories ----

    def mkdir(self, parent: int, name: bytes, mode: int) -> Attributes:
        """Create a directory, and return its attributes. Raise OSError: EEXIST, EPERM or EROFS, or as the store does.

        In a tree of chunks and over a remote store, the directory exists only until the end of the mount.
        """
        directory = self._unused(parent, name)
        path, meaning = join(directory, name), self._names.classify_name(directory, name)
        if meaning.kind is NameKind.DIRECTORY:
            self._directories.show(path)
            return self._overlay.lookup(parent, name)
        hidden = name.startswith(b".") and self._names.keeps_hidden(directory)
        if not hidden or meaning.kind is not NameKind.FIXED:
            require_changeable(meaning.kind, path)
        disk = self._writer.disk if self._names.source_number(directory) is not None else None
        if meaning.kind is not NameKind.PLAIN or hidden or disk is None:
            with self._names.lock:
                file = self._files.new(directory, name, NameKind.DIRECTORY)
                file.set_status(mtime_ns=time.time_ns(), mode=shown_mode(mode, True))
            return self._contents.attributes(file)
        self._names.before_waiting()
        self._descriptions.make_stored_directory(directory)
        disk.make_directory(path, stat.S_IMODE(mode))
        self._directories.show(path)
        self._source_tree.changed(path)
        return self._overlay.lookup(parent, name)

    def rmdir(self, parent: int, name: bytes) -> None:
        """Remove a directory that shows no entries. Raise OSError: ENOTDIR, or as `remove_directory`."""
        directory, entry = self.existing(parent, name)
        path = join(directory, name)
        if not entry.directory:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        self._names.before_waiting()
        self._writer.require_own_name(f"{path}/")  # the directory itself may be a link, too
        self.remove_directory(entry.number, path)

    def remove_directory(self, number: int, path: str) -> None:
        """Remove the directory with this inode number and path. Pending chunks below are published first.

        Raise OSError: ENOTEMPTY if it shows entries or the store has others there, EPERM or EROFS if it cannot be
        changed, and the errors of `WriteBuffer.flush`.
        """
        if self._has_entries(number):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        file, kind = self._files.by_number.get(number), self._names.classify_name(*split(path)).kind
        if file is None:
            require_changeable(kind, path)
        self._remove_cleared(number, path)
        self._pending.refused.clear_below(path)
        if file is not None:
            with self._names.lock:
                self._files.forget_below(path)
                self._files.unname(file)
        self._directories.show(path, is_shown=False)
        source_number = self._names.source_number(path)
        if source_number is None:
            return
        if kind is NameKind.DIRECTORY or self._source_tree.is_virtual(source_number):
            tree = self._source_tree.chunk_tree(source_number)
            if tree is not None and source_number == tree.root and self._writer.local:
                with suppress(OSError):  # another array, perhaps with other axes, may have shards of the same names
                    self._pending.flush(path)
                    self._remove_stored(path)
            return
        self._pending.flush(path)
        self._remove_stored(path)
        with self._names.lock:
            self._files.forget_below(path)
        self._source_tree.store.reopen(path)
        self._documents.seen.discard_below(path)  # the sharding is kept: tools delete an array to write it anew
        self._names.renew(path)

    def _has_entries(self, number: int, besides: bytes = b"") -> bool:
        """Return whether a directory has entries besides chunks that no client can remove."""
        for batch in self._overlay.scan(number):
            for name, entry in zip(batch.names.tolist(), batch.numbers.tolist(), strict=True):
                if name != besides and not self._always_exists(entry):
                    return True
        return False

    def _always_exists(self, number: int) -> bool:
        """Return whether a file is a chunk of zeros as removal leaves it, or a chunk that is shown but not stored."""
        file = self._files.by_number.get(number)
        target = self._source_tree.target_of(number) if file is None else file.target
        if target is None or target.tree.chunks.filler is None:
            return False
        if file is None and not target.tree.chunks.layer.locate(target.coords):
            return True
        zeros = self._cleared(target)
        return zeros is not None and bytes(self._overlay.read(number, 0, len(zeros[1]) + 1)) == zeros[1]

    def _remove_cleared(self, number: int, path: str, besides: bytes = b"") -> None:
        """Remove the chunks that removal has replaced by zeros, if the directory has no other entries."""
        source_number = self._names.source_number(path)
        tree = None if source_number is None else self._source_tree.chunks_in(source_number)
        if tree is None or tree.collection.zeros is None or self._has_entries(number, besides):
            return
        for batch in self._overlay.scan(number):
            for name in batch.names.tolist():
                target = self._names.classify_name(path, name).target
                if target is not None:
                    self._kinds.journaled.remove(join(path, name), target)

    def _remove_stored(self, path: str) -> None:
        """Remove a directory and its empty subdirectories from the store.

        Raise OSError (ENOTEMPTY) if a file is in any of them.
        """
        for entry in list(self._source_tree.store.scan(path)):
            if not entry.directory:
                raise OSError(
                    errno.ENOTEMPTY, f"the store has the file {entry.name} there, which the mount does not show", path
                )
            self._remove_stored(join(path, entry.name))
        with suppress(FileNotFoundError):
            self._writer.remove_directory(path)

    def sync_directory(self, number: int) -> None:
        """Make the names in a directory, and all pending versions, survive a power failure.

        Raise OSError if that fails.
        """
        self._names.before_waiting()
        self._pending.sync()
        path = self._names.path_of(number)
        disk = self._writer.disk
        if disk is not None and number < CREATED and not self._source_tree.is_virtual(number):
            # documents describe it, but the store does not have it yet, or it is a file that is shown as a directory
            with suppress(*NOT_FOUND):
                disk.sync_directory(path)
