"""Calls on the files of a writable mount: create, open, write, truncate, flush, fsync and release."""

from __future__ import annotations

import errno
import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from shardfs.model.errors import CorruptShardError, ShardfsError
from shardfs.model.kinds import LOCK_ENDING, NameKind
from shardfs.storage import syscalls
from shardfs.vfs.inodes import TABLE_END
from shardfs.write.file_contents import Part
from shardfs.write.files import join, shown_mode, split, stale
from shardfs.write.name_kind import FOREIGN
from shardfs.write.names import JOURNALED

if TYPE_CHECKING:
    from shardfs.model.attributes import Attributes
    from shardfs.vfs.chunk_dirs import NameMeaning
    from shardfs.write.descriptions import Descriptions
    from shardfs.write.file_kinds import Kinds
    from shardfs.write.files import WritableFile
    from shardfs.write.open_files import OpenFiles
    from shardfs.write.overlay import Overlay

log = logging.getLogger(__name__)


@dataclass(eq=False)
class FileCalls(Part):
    """Opens, writes and closes files. Thread-safe.

    Attributes:
        unsaved: the errors of files that `close_all` could not save, by handle.
    """

    _overlay: Overlay
    _open_files: OpenFiles
    _descriptions: Descriptions
    _kinds: Kinds
    unsaved: dict[int, Exception] = field(init=False, default_factory=dict)

    def create(self, parent: int, name: bytes, flags: int, mode: int) -> tuple[Attributes, int]:
        """Create a file, or open an existing one. Return its attributes and a handle.

        `flags` and `mode` as for open(2). Raise OSError: EEXIST with O_EXCL, and as `OpenFiles.classify_to_write` and
        `open`.
        """
        directory = self._open_files.directory_to_change(parent)
        entry = self._overlay.find(directory, name)
        if entry is not None:
            if flags & os.O_EXCL:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fsdecode(name))
            handle = self.open(entry.number, flags)
            try:
                return self._overlay.attributes(entry.number), handle
            except BaseException:
                self.release(handle)
                raise
        with self._names.gate.shared():
            meaning = self._open_files.classify_to_write(directory, name)
            if meaning.kind is NameKind.PLAIN and (disk := self._writer.disk) is not None:
                self._names.before_waiting()
                with self._names.renaming():
                    path = join(directory, name)
                    self._descriptions.make_stored_directory(directory)
                    how = flags & ~(os.O_ACCMODE | os.O_APPEND | os.O_TRUNC) | os.O_RDWR | os.O_CREAT
                    fd = disk.open_file(path, how, mode)
                    file, handle = self._created(directory, name, meaning, flags, mode, fd)
                    self._source_tree.changed(path)
            else:
                file, handle = self._created(directory, name, meaning, flags, mode)
        if meaning.kind is NameKind.PLAIN and name == FOREIGN.encode():
            self._descriptions.describe_anew(directory)
        return self._contents.attributes(file), handle

    def _created(
        self, directory: str, name: bytes, meaning: NameMeaning, flags: int, mode: int, fd: int = -1
    ) -> tuple[WritableFile, int]:
        with self._names.lock:
            file = self._files.new(directory, name, meaning.kind, meaning.target)
            file.set_status(mtime_ns=time.time_ns(), mode=shown_mode(mode))
            if fd < 0:
                file.load(self._contents.new_buffer(file), file.version_and_target, dirty=True)
            else:
                file.use_disk(fd)
            return file, self._open_files.add(file, flags)

    def open(self, number: int, flags: int) -> int:
        """Open the file with this inode number, and return a handle. Of `flags`, the access mode and O_TRUNC count.

        Raise OSError: ESTALE if the name has another inode number now (the kernel looks it up again), or the errors of
        `OpenFiles.classify_to_write` if the file is to be changed.
        """
        inode = self._files.by_number.get(number)
        if inode is not None and inode.path is None and not inode.handles:
            if flags & (os.O_ACCMODE | os.O_TRUNC) or not self._succeeded(inode):
                raise stale(number)  # the kernel looks up the name again, but only once for each call
            return self._open_files.add_reader(number)
        if inode is None and self._source_tree.is_outdated(number):
            raise stale(number)
        reads = flags & (os.O_ACCMODE | os.O_TRUNC) in (os.O_RDONLY, os.O_RDWR)
        if reads and (inode is not None or number < TABLE_END):
            self._descriptions.note_read(inode, number)
        if not flags & (os.O_ACCMODE | os.O_TRUNC):
            return self._open_files.add_reader(number)
        file, handle = self._open_files.add_known(number, flags)
        if flags & os.O_TRUNC:
            try:
                self._resize(file, 0)
            except BaseException:
                self.release(handle)
                raise
        return handle

    def _succeeded(self, file: WritableFile) -> bool:
        """Give a file that has just lost its name the bytes of the file that has the name now.

        A disk would open that file. Return False if there is none.
        """
        with suppress(OSError, CorruptShardError):
            entry = self._overlay.find(*split(file.last_path)) if file.last_path else None
            if entry is None or entry.directory:
                return False
            data = bytes(self._overlay.read(entry.number, 0, max(entry.size, 1)))
            with self._names.lock:
                if len(data) != entry.size or file.number not in self._files.by_number:
                    return False
                file.freeze(data)
            # The kernel may know another size: it must not cut the bytes.
            self._names.hooks.reshaped(np.array([file.number], np.uint64))
            return True
        return False

    def write(self, handle: int, offset: int, data: bytes | memoryview) -> int:
        """Write bytes at `offset` of an open file. Return how many: all.

        Raise OSError: EBADF if the handle does not write, EFBIG or ENOSPC, and the errors of reading the file's present
        bytes.
        """
        file = self._open_files.writable(handle)
        if file.fd >= 0:
            syscalls.pwrite_all(file.fd, data, offset)
            return len(data)
        self._contents.write(file, offset, data)
        return len(data)

    def truncate(self, number: int, size: int, handle: int | None) -> None:
        """Shorten a file to `size` bytes, or extend it with zeros. `handle` is given if the caller has the file open.

        Without a handle, the new version is saved at once, as by `flush`. Raise as `open`, `write` and `flush`.
        """
        if handle is not None:
            self._resize(self._open_files.writable(handle), size)
            return
        file, opened = self._open_files.add_known(number, os.O_WRONLY)
        try:
            if file.writers == 1:
                self._names.before_waiting()
            self._resize(file, size)
            if file.writers == 1:  # else the close of another writer saves it
                self._kinds.commit(file)
        finally:
            self.release(opened)

    def _resize(self, file: WritableFile, size: int) -> None:
        if file.fd >= 0:
            syscalls.ftruncate(file.fd, size)
        else:
            self._contents.resize(file, size)

    def allocate(self, handle: int, offset: int, size: int, mode: int) -> None:
        """Reserve or change a byte range of a passed-through file; `mode` as for fallocate(2).

        Raise OSError: EBADF if the handle does not write, EOPNOTSUPP for other files or if the disk does not support
        `mode`.
        """
        file = self._open_files.writable(handle)
        if file.fd < 0:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        self._names.before_waiting()
        syscalls.allocate(file.fd, offset, size, mode)

    # ---- closing ----

    def flush(self, handle: int) -> None:
        """Save the data written through this handle, in the journal or the store, at each close of a descriptor.

        With `close=sync` or `close=publish`, also sync or publish. Raise OSError for this version, or an earlier error
        of publishing that this handle has not received.
        """
        opened = self._open_files.handles[handle]
        file = opened.file
        if file is None or not opened.writes or (file.writers > 1 and _is_left_to_others(file)):
            return
        path = file.saved_path
        self._commit(file, handle, path)
        if file.kind is NameKind.COMPRESSED:
            self._kinds.compressed.retire(file)
        if self._pending.settings.close == "sync":
            self._pending.sync()
        elif self._pending.settings.close == "publish" and path is not None:
            self._pending.flush(path)

    def _commit(self, file: WritableFile, handle: int, path: str | None) -> None:
        """Save the data of a file. Raise OSError for this version, or an earlier one that the handle has not got."""
        if file.dirty:
            if file.kind not in JOURNALED or not self._pending.is_quick(file.target, file.size()):
                self._names.before_waiting()
            self._kinds.commit(file)
        self._raise_errors(handle, path)

    def _raise_errors(self, handle: int, path: str | None) -> None:
        if path is None:
            return
        opened = self._open_files.handles[handle]
        number, failure = self._pending.failures.since(path, opened.seen)
        if failure is not None:
            opened.seen = number
            raise failure.with_traceback(None)

    def fsync(self, handle: int) -> None:
        """Make the data written through any handle of the file survive a power failure. Raise OSError as `flush`.

        For a `*.__lock` file, this only reports earlier errors. The data become durable once the file is renamed to its
        target and the target or its directory is synced; no client reads the lock file before (docs/decisions/0018).
        """
        file = self._open_files.handles[handle].file
        if file is None:
            return
        if file.fd >= 0:
            self._names.before_waiting()
            syscalls.fsync(file.fd)
        elif file.kind is NameKind.SCRATCH and (file.path or "").endswith(LOCK_ENDING):
            self._raise_errors(handle, file.path)
        else:
            self._commit(file, handle, file.saved_path)
            self._pending.sync()

    def release(self, handle: int) -> None:
        """Close a handle for good. Data written through a memory mapping since the last flush are saved here.

        An error is recorded for later handles, because the kernel ignores it here.
        """
        opened = self._open_files.handles[handle]
        if opened.file is not None and opened.writes and opened.file.dirty:
            self._names.before_waiting()
        with self._names.lock:
            opened = self._open_files.handles.pop(handle)
            file = opened.file
            if file is None:
                self._open_files.remove_reader(opened)
                return
        try:
            while opened.writes and not file.stop_writing():
                try:
                    self._kinds.commit(file)
                except OSError as e:
                    self._pending.failures.record(file.saved_path or "", e)
                except BaseException:  # a bug: the shard is published without this version
                    file.refuse()
                    file.stop_writing()
                    raise
        finally:
            with self._names.lock:
                file.remove_handle()
                self._kinds.drop_buffer(file)
                if file.path is None:
                    self._files.let_go(file)
                elif file.matches_source and file.kind is not NameKind.PLAIN:
                    self._kinds.rest(file)

    def close_all(self) -> None:
        """Save and close all open files, at the end of the mount. `unsaved` then has the errors of those not saved."""
        for handle in list(self._open_files.handles):
            try:
                self.flush(handle)
            except (OSError, ShardfsError) as e:
                log.warning("an open file could not be saved at unmount, and its last changes are lost: %s", e)
                self.unsaved[handle] = e
            self.release(handle)


def _is_left_to_others(file: WritableFile) -> bool:
    """Return whether a temporary file that several handles may write to is still empty.

    tensorstore opens two handles for each chunk, to verify that its lock belongs to the file of that name, and closes
    one of them before it writes.
    """
    if file.kind is not NameKind.SCRATCH or file.version is not None:
        return False
    return file.buffer is not None and not file.buffer.size
