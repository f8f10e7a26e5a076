"""Open files of a writable mount: reading, writing and closing, until a version is in the journal or the store."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import time
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from shardfs.model.kinds import LOCK, NameKind
from shardfs.storage import syscalls
from shardfs.storage.cache import nothing
from shardfs.vfs.chunk_dirs import Spot
from shardfs.vfs.inodes import CREATED, ROOT, TABLE_END
from shardfs.write.buffers import Budget, Buffer
from shardfs.write.descriptions import MAX_DOCUMENT, Descriptions
from shardfs.write.files import WritableFile, join, shown_mode
from shardfs.write.overlay import JOURNALED, KNOWN_PATHS, MAX_NAME, stale

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shardfs.model.attributes import Attributes
    from shardfs.storage.writers import Writer
    from shardfs.vfs.chunk_dirs import Target
    from shardfs.vfs.tree import Tree
    from shardfs.write.documents import Documents
    from shardfs.write.writeback import WriteBuffer

log = logging.getLogger(__name__)

MAX_CHUNK = 2 << 30
"""Maximum bytes of one file; a larger one is refused."""


PIECE = 8 << 20
"""Bytes copied at a time."""


class Handle(NamedTuple):
    """An open file. `seen` is the number of the newest publishing error already reported (`Failures.seen`).

    `file` is None for a file of the tree that is open for reading only and was not changed.
    """

    number: int
    file: WritableFile | None
    writes: bool
    seen: int


class OpenFiles(Descriptions):
    """The part of `WriteTree` that opens, reads, writes and closes files. Thread-safe."""

    def __init__(
        self,
        base: Tree,
        writer: Writer,
        pending: WriteBuffer,
        documents: Documents,
        budget: Budget,
        waiting: Callable[[], None] = nothing,
    ) -> None:
        """`budget` limits the memory for files open for writing."""
        super().__init__(base, writer, pending, documents, waiting)
        self._budget = budget
        self._handles: dict[int, Handle] = {}
        self._next_handle = count(1)
        self._opened: dict[int, int] = {}  # inode numbers of the tree: handles open for reading

    # ---- open files ----

    def create(self, parent: int, name: bytes, flags: int, mode: int) -> tuple[Attributes, int]:
        """Create a file, or open an existing one. Return its attributes and a handle."""
        directory = self._directory(parent)
        found = self._find(directory, parent, name)
        if found is not None:
            if flags & os.O_EXCL:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fsdecode(name))
            handle = self.open(found.number, flags)
            return self.attributes(found.number), handle
        with self._gate.shared():
            spot = self._spot_to_write(directory, name)
            if spot.kind is NameKind.PLAIN and self.writer.local:
                self._waiting()
                with self._naming():
                    self._store_directory(directory)
                    fd = self._open_plain(join(directory, name), flags | os.O_CREAT, mode)
                    file, handle = self._created(directory, name, spot, flags, mode, fd)
                    self.base.changed(join(directory, name))
            else:
                file, handle = self._created(directory, name, spot, flags, mode)
        if spot.kind is NameKind.PLAIN and self.documents.is_foreign(os.fsdecode(name)):
            self._described_anew(directory)
        return self._attributes(file), handle

    def _created(
        self, directory: str, name: bytes, spot: Spot, flags: int, mode: int, fd: int = -1
    ) -> tuple[WritableFile, int]:
        with self._lock:
            file = self._files.new(directory, name, spot.kind, spot.target)
            file.mode, file.mtime_ns, file.fd = shown_mode(mode), time.time_ns(), fd
            if fd < 0:
                file.buffer, file.dirty = self._new_buffer(file), True
            return file, self._handle(file, flags)

    def _directory(self, number: int) -> str:
        """Return the path of a directory in which the caller is about to change a name."""
        path = self.path_of(number)
        self._numbers[path] = number
        self._times.pop(number, None)
        file = self._files.by_number.get(number)
        if file is not None and file.kind is not NameKind.DIRECTORY:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return path

    def _spot_to_write(self, directory: str, name: bytes) -> Spot:
        """Return the kind and target of a name. Raise OSError if files with this name cannot be created or written."""
        if len(name) > MAX_NAME:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), os.fsdecode(name))
        spot = self.spot(directory, name)
        if spot.kind in (NameKind.HIDDEN, NameKind.DIRECTORY):
            raise PermissionError(errno.EPERM, "the name belongs to the sharded form", join(directory, name))
        if spot.target is not None:
            self.pending.require_writable(spot.target)
        return spot

    def _open_plain(self, path: str, flags: int, mode: int = 0o666) -> int:
        both = flags & ~(os.O_ACCMODE | os.O_APPEND | os.O_TRUNC) | os.O_RDWR
        return self.writer.open_file(path, both, mode)

    def _new_buffer(self, file: WritableFile) -> Buffer:
        return Buffer(self._budget, MAX_DOCUMENT if file.kind is NameKind.DOCUMENT else MAX_CHUNK)

    def _handle(self, file: WritableFile, flags: int) -> int:
        if file.is_lost:
            raise stale(file.number)
        if file.twin is not None:
            file.frozen, file.version = self._plain_bytes(file), file.twin.version
        if file.parent is None and not file.handles and file.fd < 0 and file.frozen is None:
            self._load(file)  # its name was just replaced: the journal may soon release the bytes
        handle = next(self._next_handle)
        writes = flags & os.O_ACCMODE != os.O_RDONLY
        seen = self.pending.failures.seen(file.path or "")
        self._handles[handle] = Handle(file.number, file, writes, seen)
        file.handles += 1
        file.writers += writes
        return handle

    def open(self, number: int, flags: int) -> int:
        """Open a file and return a handle. Of `flags`, the access mode and O_TRUNC count."""
        writes = flags & os.O_ACCMODE != os.O_RDONLY
        gone = self._files.by_number.get(number)
        if (
            gone is not None and gone.parent is None and gone.twin is None and not gone.handles
        ):  # the kernel looks up the name again
            raise stale(number)
        if flags & (os.O_ACCMODE | os.O_TRUNC) in (os.O_RDONLY, os.O_RDWR) and (gone is not None or number < TABLE_END):
            self._look_at(gone, number)
        if writes or flags & os.O_TRUNC:
            file, handle = self._open_known(number, flags)
            if flags & os.O_TRUNC:
                try:
                    self._resize(file, 0)
                except OSError:
                    self.release(handle)
                    raise
            return handle
        known = self._files.by_number.get(number)
        if known is not None and known.kind is NameKind.PLAIN and self.writer.local:
            return self._open_known(number, flags)[1]
        with self._lock:
            known = self._files.by_number.get(number)
            if known is not None:
                return self._handle(known, flags)
            self._require_shown(number)
            handle = next(self._next_handle)
            self._handles[handle] = Handle(number, None, False, 0)
            self._opened[number] = self._opened.get(number, 0) + 1
        return handle

    def _require_shown(self, number: int) -> None:
        """Raise OSError (ESTALE) if the name of an inode number of the tree was removed or reused."""
        if number >= CREATED:
            raise stale(number)
        parent, _, name = self.path_of(number).rpartition("/")
        names = self._files.directory(parent)
        if names is not None and os.fsencode(name) in names:
            raise stale(number)

    def _open_known(self, number: int, flags: int) -> tuple[WritableFile, int]:
        """Return a file ready for changes, and a handle. A passed-through file is open on the disk."""
        how = os.O_RDWR if flags & (os.O_ACCMODE | os.O_TRUNC) else os.O_RDONLY
        while True:
            file = self._adopt(number, how)
            with self._lock:
                if file.kind is not NameKind.PLAIN or file.fd >= 0 or not self.writer.local:
                    return file, self._handle(file, flags)

    def _adopt(self, number: int, flags: int | None = os.O_RDWR) -> WritableFile:
        """Return the file of an inode number, for a change.

        A passed-through file is opened on the disk with `flags`; None does not open it.
        """
        known = self._files.by_number.get(number)
        if known is None:
            self._require_shown(number)
            found, path = self.base.attributes(number), self.path_of(number)
            parent, _, name = path.rpartition("/")
            raw = os.fsencode(name)
            if found.directory:
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            spot = self._spot_to_write(parent, raw)
            former = self.base.target_of(number) if spot.kind is NameKind.ORPHAN else None
            if former is not None:  # outside of the new shape, but still in its shard
                spot = Spot(NameKind.CHUNK, former)
            with self._lock:
                known = self._files.by_number.get(number)
                if known is None:
                    self._require_shown(number)
                    known = self._files.new(parent, raw, spot.kind, spot.target, number)
                    known.known_size, known.mtime_ns, known.base = found.size, found.mtime_ns, number
                    known.mode = self._modes.get(number, 0)
                    known.lookups = 1
        if known.kind is NameKind.DIRECTORY:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), known.path)
        if known.twin is not None:
            self._promote(known)
        if known.is_link and flags is not None:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), known.path)
        if known.kind is NameKind.PLAIN and self.writer.local and flags is not None:
            self._open_on_disk(known, flags)
        return known

    def _open_on_disk(self, file: WritableFile, flags: int) -> None:
        with self._naming():
            if file.fd >= 0 and (flags == os.O_RDONLY or _may_write(file.fd)):
                return
            if file.path is None:
                raise stale(file.number)
            fd = self.writer.open_file(file.path, flags)
            with self._lock:
                file.leave_disk()
                file.fd = fd

    def _promote(self, file: WritableFile) -> None:
        """Make an uncompressed view of a chunk (`twin`) the chunk itself, before the view is written.

        Its contents replace the pending compressed version.
        """
        with self._lock:
            twin = file.twin
            if twin is None or twin.target is None or twin.parent is None:
                return
            file.buffer, file.mode = self._new_buffer(file), twin.mode
            file.buffer.write(0, self._plain_bytes(file))
            file.dirty, file.mtime_ns, file.frozen, file.version = True, twin.mtime_ns, None, None
            self._part_from_twin(twin)
            self._files.name(file, twin.parent, twin.name.removesuffix(twin.target.suffix.encode()))

    def _load(self, file: WritableFile) -> Buffer:
        """Return the buffer of a file with all its bytes, read from where they are now."""
        if file.buffer is not None:
            return file.buffer
        buffer, size, at = self._new_buffer(file), self._attributes(file).size, 0
        while at < size and (piece := self._read(file, at, min(size - at, PIECE))):
            buffer.write(at, piece)
            at += len(piece)
        with self._lock:
            if file.buffer is None:
                file.buffer = buffer
            return file.buffer

    def _keep(self, number: int, *, replaced: bool = False) -> None:
        """Keep an open file's bytes readable before its name is unlinked or replaced. Called without the lock held.

        With `replaced`, another file gets the name. A process that has looked up the old file may then be about to open
        it, so a passed-through file is kept open for it, too.
        """
        file = self._files.by_number.get(number)
        if number in self._opened:  # also if the file was renamed since
            file = self._adopt(number, None)
            with self._lock:  # handles refer to it by the inode number of the tree
                file.handles += self._opened.pop(number, 0)
                for handle, opened in list(self._handles.items()):
                    if opened.number == number and opened.file is None:
                        self._handles[handle] = opened._replace(file=file)
        if file is None:
            return
        if file.kind is NameKind.PLAIN and self.writer.local:
            if file.handles or (replaced and file.lookups and not file.is_link):
                self._adopt(number, os.O_RDONLY)
        elif file.handles:
            self._load(file)

    def write(self, handle: int, offset: int, data: bytes | memoryview) -> int:
        """Write bytes at `offset` of an open file. Return how many."""
        opened = self._writable(handle)
        file = opened.file
        if file is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if file.fd >= 0:
            syscalls.pwrite_all(file.fd, data, offset)
            return len(data)
        buffer = self._load(file)
        with self._lock:
            buffer = file.buffer or buffer
            buffer.write(offset, data)
            file.dirty, file.refused, file.mtime_ns = True, False, time.time_ns()
        return len(data)

    def _writable(self, handle: int) -> Handle:
        opened = self._handles[handle]
        if opened.file is None or not opened.writes:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return opened

    def truncate(self, number: int, size: int, handle: int | None) -> None:
        """Shorten a file, or extend it with zeros. `handle` is given if the caller has the file open."""
        file = self._writable(handle).file if handle is not None else self._adopt(number)
        if file is not None:
            if not file.writers:
                self._waiting()
            self._resize(file, size)
            if not file.writers:  # no close follows that would save it
                try:
                    self._settle(file)
                finally:
                    self._drop_buffer(file)

    def _resize(self, file: WritableFile, size: int) -> None:
        if file.fd >= 0:
            syscalls.ftruncate(file.fd, size)
            return
        if size:
            self._load(file)
        with self._lock:
            if file.buffer is None:
                file.buffer = self._new_buffer(file)
            file.buffer.truncate(size)
            file.dirty, file.refused, file.mtime_ns = True, False, time.time_ns()

    def set_mode(self, number: int, mode: int) -> None:
        """Set permission bits. Those of chunks are kept until the end of the mount."""
        file, mode = self._files.by_number.get(number), stat.S_IMODE(mode)
        if file is not None and file.twin is not None:
            file = file.twin
        if file is not None and file.fd >= 0:
            syscalls.chmod(file.fd, mode)
        elif (path := self._stored_path(number)) is not None:
            self.writer.set_mode(path, mode)
        elif file is not None:
            file.mode = shown_mode(mode, file.kind is NameKind.DIRECTORY)
        else:
            _remember(self._modes, number, shown_mode(mode, self.base.attributes(number).directory))
        if self.writer.local and self._is_document(number):
            with suppress(FileNotFoundError):
                self.writer.set_mode(self.path_of(number), mode)

    def set_times(self, number: int, mtime_ns: int | None) -> None:
        """Set the modification time (None: now). That of a chunk is kept until the end of the mount."""
        when = time.time_ns() if mtime_ns is None else mtime_ns
        file = self._files.by_number.get(number)
        if file is not None and file.twin is not None:
            file = file.twin
            number = file.number
        if file is not None and file.fd >= 0:
            syscalls.utime(file.fd, when, when)
        elif (path := self._stored_path(number)) is not None:
            self.writer.set_times(path, when)
            self.base.changed(path)
        elif file is not None and file.kind is NameKind.DIRECTORY:
            file.mtime_ns = when
        elif file is None and self.base.attributes(number).directory:
            _remember(self._times, number, when)
        else:
            file = self._adopt(number)
            with self._lock:
                file.mtime_ns = when
                if file.is_settled:
                    self._rest(file)
        if self.writer.local and self._is_document(number):
            with suppress(FileNotFoundError):
                self.writer.set_times(self.path_of(number), when)
                self.base.changed(self.path_of(number))

    def _is_document(self, number: int) -> bool:
        file = self._files.by_number.get(number)
        if file is not None or self.base.attributes(number).directory:
            return file is not None and file.kind is NameKind.DOCUMENT and file.path is not None
        parent, _, name = self.path_of(number).rpartition("/")
        return self.spot(parent, os.fsencode(name)).kind is NameKind.DOCUMENT

    def _stored_path(self, number: int) -> str | None:
        """Return the path of a file or directory whose mode and times a local store keeps; else None."""
        file = self._files.by_number.get(number)
        if not self.writer.local or (file is not None and (file.kind is not NameKind.PLAIN or file.path is None)):
            return None
        if file is not None and file.is_link:
            return None
        path = self.path_of(number)
        if file is None and (number == ROOT or self.base.is_virtual(number)):
            return None
        if file is None and not self.base.attributes(number).directory:
            parent, _, name = path.rpartition("/")
            return path if self.spot(parent, os.fsencode(name)).kind is NameKind.PLAIN else None
        return path

    def flush(self, handle: int) -> None:
        """Save the data written through this handle, in the journal or the store, at each close of a descriptor.

        With `close=sync` or `close=publish`, also sync or publish. Raise OSError for this version, or an earlier error
        of publishing that this handle has not received.
        """
        opened = self._handles[handle]
        if opened.file is None or not opened.writes or self._is_left_to_others(opened.file):
            return
        if not self._is_quick(opened.file):
            self._waiting()
        self._settle(opened.file)
        self._raise_errors(handle, opened)
        if self.pending.settings.close == "sync":
            self.pending.sync()
        elif self.pending.settings.close == "publish" and opened.file.path is not None:
            self.pending.flush(opened.file.path)

    def _is_left_to_others(self, file: WritableFile) -> bool:
        """Return whether a temporary file is still empty and another handle may write to it.

        tensorstore opens two handles for each chunk, to verify that its lock belongs to the file of that name, and
        closes one of them before it writes.
        """
        if file.kind is not NameKind.SCRATCH or file.writers < 2 or file.version is not None:
            return False
        return file.buffer is not None and not file.buffer.size

    def _is_quick(self, file: WritableFile) -> bool:
        """Return whether saving the file, if it is dirty, needs no more than a quick journal write."""
        if file.kind not in JOURNALED:
            return False
        return not file.dirty or (file.buffer is not None and self.pending.is_quick(file.target, file.buffer.size))

    def _raise_errors(self, handle: int, opened: Handle) -> None:
        path = opened.file.path if opened.file is not None else None
        if path is None:
            return
        seen, failure = self.pending.failures.since(path, opened.seen)
        if failure is not None:
            self._handles[handle] = opened._replace(seen=seen)
            raise failure.with_traceback(None)

    def fsync(self, handle: int) -> None:
        """Make the data written survive a power failure.

        For a `*.__lock` file, this only reports earlier errors. The data become durable once the file is renamed to its
        target and the target or its directory is synced; no client reads the lock file before (docs/decisions/0018).
        """
        opened = self._handles[handle]
        file = opened.file
        if file is None:
            return
        if file.fd >= 0:
            self._waiting()
            syscalls.fsync(file.fd)
            return
        if file.kind is NameKind.SCRATCH and file.name.endswith(LOCK):
            self._raise_errors(handle, opened)
            return
        if not self._is_quick(file):
            self._waiting()
        self._settle(file)
        self._raise_errors(handle, opened)
        self.pending.sync()

    def release(self, handle: int) -> None:
        """Close a handle for good. Data written through a memory mapping since the last flush are saved here."""
        file = self._handles[handle].file
        if file is not None and self._handles[handle].writes and file.dirty:
            self._waiting()
        with self._lock:
            opened = self._handles.pop(handle)
            file = opened.file
            if file is None:
                left = self._opened.pop(opened.number) - 1
                if left:
                    self._opened[opened.number] = left
                return
        try:
            if opened.writes and file.writers == 1 and not file.refused:
                self._settle(file)
        except OSError as e:
            self.pending.failures.note(file.path or "", e)
        finally:
            with self._lock:
                file.handles -= 1
                file.writers -= opened.writes
                if file.twin is not None and not file.handles:
                    file.frozen = file.version = None
                self._drop_buffer(file)
                if file.parent is None:
                    self._files.let_go(file)
                elif file.is_settled and file.kind is not NameKind.PLAIN:
                    self._rest(file)

    def _rest(self, file: WritableFile) -> None:
        """The source now shows the same contents, or shows them under the plain name. The caller holds the lock."""
        compressed = file.target is not None and file.target.suffix
        for number, name in self._let_out([file] if compressed else self._files.settle(file)):
            self.invalidate(number, name)

    def _let_out(self, files: Iterable[WritableFile]) -> list[tuple[int, bytes]]:
        """Remove the names of files that the source now shows.

        Return the parents' inode numbers and the names, for the kernel to invalidate.
        """
        out = []
        for file in files:
            number = self._numbers.get(file.parent or "")
            if number is not None:
                out.append((number, file.name))
            if file.handles:
                self._load(file)
            self._files.unname(file)
        return out

    def _drop_buffer(self, file: WritableFile) -> None:
        """Free the buffer of a file once no handle writes to it.

        Data still unsaved at that point were refused, and are dropped.
        """
        with self._lock:
            path = file.path
            if file.writers or path is None:
                return
            if file.merged:
                self._show_merged(file)
                return
            if not file.handles and (file.fd >= 0 or file.spent):
                file.leave_disk()
                self.base.changed(path)
            if file.buffer is not None:
                file.buffer.close()
                file.buffer = None
            if file.dirty:  # refused, and the writer got the error: restore the old contents
                file.dirty = False
                file.mtime_ns = time.time_ns()
                self.invalidate_content(file.number)
                if not self._was_there(file, path):
                    directory = self._numbers.get(file.parent or "")
                    self._files.unname(file)
                    if directory is not None:
                        self.invalidate(directory, file.name)

    def _was_there(self, file: WritableFile, path: str) -> bool:
        """Return whether the file existed before the refused write."""
        if file.version is not None or file.frozen is not None or file.base:
            return True
        target = file.target
        return target is not None and not target.suffix and self.pending.is_stored(path, target)

    def _settle(self, file: WritableFile) -> None:
        """Save a dirty file in the journal or the store. Record the error if the file is refused."""
        try:
            self._save(file)
        except OSError as e:
            file.refused = True
            if file.path is not None and file.kind is not NameKind.SCRATCH:  # the rename fails instead
                self.pending.refused.note(file.path, e)
            raise

    def _save(self, file: WritableFile) -> None:
        unsaved = file.unsaved()
        if unsaved is None:
            return
        if file.kind in JOURNALED:
            if file.target is not None:
                self.pending.require_valid(file.target, unsaved[0])
            self.pending.make_room(unsaved[0].size)
        with self._gate.shared():  # keeps the shard in place until the record is written
            if file.kind in JOURNALED:
                self.pending.look(unsaved[1], file.target)
            rest = self._save_to_journal(file)
        if rest is None:
            return
        try:
            self._write_through(file, *rest)
        except BaseException:
            file.dirty = True
            raise

    def _save_to_journal(self, file: WritableFile) -> tuple[str, bytes] | None:
        """Write a dirty file to the journal. Return path and bytes instead if its kind is not journaled."""
        with self._lock:
            unsaved = file.unsaved()
            if unsaved is None:
                return None
            buffer, path = unsaved
            if file.kind not in JOURNALED:
                file.dirty = False
                return path, buffer.read(0, buffer.size)
            mode, scratch = file.mode, file.kind is NameKind.SCRATCH
            content, when = buffer.content(), file.mtime_ns
            file.version = self.pending.put(path, content, file.target, when, mode, scratch=scratch)
            file.dirty, file.frozen = False, None
            self._supersede(file)
            return None

    def _reveal(self, directory: str, name: bytes, target: Target | None) -> None:
        """Show the stored chunk of a name again. The caller holds the lock."""
        self._files.reveal(directory, name)
        for other in target.tree.other_names(name) if target is not None else []:
            self._files.reveal(directory, other)

    def _write_through(self, file: WritableFile, path: str, data: bytes) -> None:
        """Write a document, or a file of a remote store, to the store."""
        self._write_to_store(file, path, data)
        self.pending.refused.forget(path)

    def _write_to_store(self, file: WritableFile, path: str, data: bytes) -> None:
        directory, _, name = path.rpartition("/")
        if file.kind is NameKind.DOCUMENT:  # chunks written under the old document are published first
            self.pending.drain(self.documents.described_by(directory, name))
        if file.kind is NameKind.DOCUMENT and self._write_document(file, directory, name, data):
            return
        self.writer.put(path, data)
        file.frozen = data if file.kind is NameKind.DOCUMENT else None
        file.base, file.known_size = 0, len(data)
        self.base.changed(path)
        if self.documents.is_document(name):
            self._described_anew(directory)


def _may_write(fd: int) -> bool:
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY


def _remember(what: dict[int, int], number: int, value: int) -> None:
    if len(what) >= KNOWN_PATHS:
        what.clear()
    what[number] = value
