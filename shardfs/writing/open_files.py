"""Files of a writable mount that are open: from the first byte that is written to the version in the journal."""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from shardfs import disk
from shardfs.cache import nothing
from shardfs.kinds import Kind
from shardfs.writing.buffers import Budget, Buffer
from shardfs.writing.files import File, join, shown_mode
from shardfs.writing.overlay import JOURNALED, KNOWN_PATHS, MAX_NAME, Overlay

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.chunk_tree import Attributes, Spot
    from shardfs.tree import Tree
    from shardfs.writers import Writer
    from shardfs.writing.documents import Documents
    from shardfs.writing.writeback import WriteBuffer

log = logging.getLogger(__name__)

MAX_CHUNK = 2 << 30
MAX_DOCUMENT = 16 << 20
"""Bytes of one file; more are refused."""


class Handle(NamedTuple):
    """Who has a file open. `seen`: errors of publishing that were there before."""

    number: int
    file: File | None
    writes: bool
    seen: int


class OpenFiles(Overlay):
    """Opens, writes and closes files. Thread-safe."""

    def __init__(
        self,
        base: Tree,
        writer: Writer,
        pending: WriteBuffer,
        documents: Documents,
        budget: Budget,
        waiting: Callable[[], None] = nothing,
    ) -> None:
        """`budget` is the memory for what is being written."""
        super().__init__(base, writer, pending, documents, waiting)
        self._budget = budget
        self._handles: dict[int, Handle] = {}
        self._next_handle = count(1)
        self._opened: dict[int, int] = {}  # numbers of the tree that are open for reading: how often

    # ---- open files ----

    def create(self, parent: int, name: bytes, flags: int, mode: int) -> tuple[Attributes, int]:
        """Make a file, or open the one that is there; its attributes, and a handle."""
        directory = self._directory(parent)
        found = self._find(directory, parent, name)
        if found is not None:
            if flags & os.O_EXCL:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fsdecode(name))
            handle = self.open(found.number, flags)
            return self.attributes(found.number), handle
        spot = self._spot_to_write(directory, name)
        fd = -1
        if spot.kind is Kind.PLAIN and self.writer.local:
            self._waiting()
            fd = self._create_plain(join(directory, name), flags, stat.S_IMODE(mode))
        with self._lock:
            file = self._files.new(directory, name, spot.kind, spot.target)
            file.mode, file.mtime_ns, file.fd = shown_mode(mode), time.time_ns(), fd
            if fd < 0:
                file.buffer, file.dirty = self._new_buffer(file), True
            handle = self._handle(file, flags)
        if fd >= 0:
            self.base.changed(join(directory, name))
        return self._attributes(file), handle

    def _directory(self, number: int) -> str:
        """The path of a directory, in which something is to be changed."""
        path = self.path_of(number)
        self._numbers[path] = number
        self._times.pop(number, None)
        file = self._files.by_number.get(number)
        if file is not None and file.kind is not Kind.DIRECTORY:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return path

    def _spot_to_write(self, directory: str, name: bytes) -> Spot:
        """What a name stands for. Raise OSError if nothing of this name may be made or written."""
        if len(name) > MAX_NAME:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), os.fsdecode(name))
        spot = self.spot(directory, name)
        if spot.kind in (Kind.HIDDEN, Kind.DIRECTORY):
            raise PermissionError(errno.EPERM, "the name belongs to the sharded form", join(directory, name))
        if spot.target is not None:
            self.pending.require_writable(spot.target)
        return spot

    def _create_plain(self, path: str, flags: int, mode: int) -> int:
        """Whoever asks has looked at his umask; ours is not to be looked at."""
        try:
            fd = self._open_plain(path, flags | os.O_CREAT | os.O_EXCL, mode)
        except FileExistsError:  # somebody else has made it in this moment
            if flags & os.O_EXCL:
                raise
            return self._open_plain(path, flags, mode)
        if stat.S_IMODE(os.fstat(fd).st_mode) != mode:
            disk.chmod(fd, mode)
        return fd

    def _open_plain(self, path: str, flags: int, mode: int = 0o666) -> int:
        both = flags & ~(os.O_ACCMODE | os.O_APPEND | os.O_TRUNC) | os.O_RDWR
        return self.writer.open_file(path, both, mode)

    def _new_buffer(self, file: File) -> Buffer:
        return Buffer(self._budget, MAX_DOCUMENT if file.kind is Kind.DOCUMENT else MAX_CHUNK)

    def _handle(self, file: File, flags: int) -> int:
        handle = next(self._next_handle)
        writes = flags & os.O_ACCMODE != os.O_RDONLY
        seen = self.pending.failures.seen(file.path or "")
        self._handles[handle] = Handle(file.number, file, writes, seen)
        file.handles += 1
        file.writers += writes
        return handle

    def open(self, number: int, flags: int) -> int:
        """A handle. O_TRUNC and the access mode are looked at."""
        writes = flags & os.O_ACCMODE != os.O_RDONLY
        if writes or flags & os.O_TRUNC:
            file = self._adopt(number)
            with self._lock:
                handle = self._handle(file, flags)
            if flags & os.O_TRUNC:
                try:
                    self._resize(file, 0)
                except OSError:
                    self.release(handle)
                    raise
            return handle
        with self._lock:
            known = self._files.by_number.get(number)
            if known is not None:
                return self._handle(known, flags)
            handle = next(self._next_handle)
            self._handles[handle] = Handle(number, None, False, 0)
            self._opened[number] = self._opened.get(number, 0) + 1
        return handle

    def _adopt(self, number: int) -> File:
        """The file of a number, to be changed."""
        known = self._files.by_number.get(number)
        if known is None:
            path = self.path_of(number)
            parent, _, name = path.rpartition("/")
            raw = os.fsencode(name)
            known = (self._files.directory(parent) or {}).get(raw)
            if known is None:
                found = self.base.attributes(number)
                if found.directory:
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
                spot = self._spot_to_write(parent, raw)
                with self._lock:
                    known = self._files.by_number.get(number)
                    if known is None:
                        known = self._files.new(parent, raw, spot.kind, spot.target, number)
                        known.known_size, known.mtime_ns, known.base = found.size, found.mtime_ns, number
                        known.mode = self._modes.get(number, 0)
                        known.lookups = 1
        if known.kind is Kind.DIRECTORY:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), known.path)
        if known.kind is Kind.PLAIN and self.writer.local and known.fd < 0:
            fd = self._open_plain(known.path or "", os.O_RDWR)
            with self._lock:
                if known.fd < 0:
                    known.fd, fd = fd, -1
            if fd >= 0:
                os.close(fd)
        return known

    def _load(self, file: File) -> Buffer:
        """Have the bytes of a file at hand, to change them."""
        if file.buffer is not None:
            return file.buffer
        data = self._whole(file)
        with self._lock:
            if file.buffer is None:
                buffer = self._new_buffer(file)
                buffer.write(0, data)
                file.buffer = buffer
            return file.buffer

    def write(self, handle: int, offset: int, data: bytes | memoryview) -> int:
        """Put bytes at `offset` of an open file; how many."""
        opened = self._writable(handle)
        file = opened.file
        if file is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if file.fd >= 0:
            disk.pwrite_all(file.fd, data, offset)
            return len(data)
        buffer = self._load(file)
        with self._lock:
            buffer = file.buffer or buffer
            buffer.write(offset, data)
            file.dirty, file.mtime_ns, file.frozen = True, time.time_ns(), None
        return len(data)

    def _writable(self, handle: int) -> Handle:
        opened = self._handles[handle]
        if opened.file is None or not opened.writes:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return opened

    def truncate(self, number: int, size: int, handle: int | None) -> None:
        """Cut a file, or extend it by zeros; with a handle, that of one who has it open."""
        file = self._writable(handle).file if handle is not None else self._adopt(number)
        if file is not None:
            if not file.writers:
                self._waiting()
            self._resize(file, size)
            if not file.writers:  # nobody will close it
                self._settle(file)

    def _resize(self, file: File, size: int) -> None:
        if file.fd >= 0:
            disk.ftruncate(file.fd, size)
            return
        if size:
            self._load(file)
        with self._lock:
            if file.buffer is None:
                file.buffer = self._new_buffer(file)
            file.buffer.truncate(size)
            file.dirty, file.mtime_ns, file.frozen = True, time.time_ns(), None

    def set_mode(self, number: int, mode: int) -> None:
        """Permission bits; those of chunks are kept until the end of the mount."""
        file = self._files.by_number.get(number)
        if self._is_plain(number) and self.writer.local:
            file = self._adopt(number)
            disk.chmod(file.fd, stat.S_IMODE(mode))
            file.mode = shown_mode(mode)
            self._close_plain(file)
        elif file is not None:
            file.mode = shown_mode(mode, file.kind is Kind.DIRECTORY)
        else:
            if len(self._modes) >= KNOWN_PATHS:
                self._modes.clear()
            self._modes[number] = shown_mode(mode, self.base.attributes(number).directory)

    def set_times(self, number: int, mtime_ns: int | None) -> None:
        """The time of the last change (None: now); that of chunks is kept until the end of the mount."""
        when = time.time_ns() if mtime_ns is None else mtime_ns
        known = self._files.by_number.get(number)
        if self.attributes(number).directory:
            if known is not None:
                known.mtime_ns = when
                return
            if len(self._times) >= KNOWN_PATHS:
                self._times.clear()
            self._times[number] = when
            return
        file = self._adopt(number)
        if file.fd >= 0:
            disk.utime(file.fd, when, when)
            self._close_plain(file)
            return
        with self._lock:
            file.mtime_ns = when
            if file.is_settled:
                self._files.settle(file)

    def _is_plain(self, number: int) -> bool:
        file = self._files.by_number.get(number)
        if file is not None:
            return file.kind is Kind.PLAIN
        parent, _, name = self.path_of(number).rpartition("/")
        return not self.base.attributes(number).directory and self.spot(parent, os.fsencode(name)).kind is Kind.PLAIN

    def flush(self, handle: int) -> None:
        """A close: what was written is in the journal, or the store, when this returns. Old errors come up here."""
        opened = self._handles[handle]
        if opened.file is None or not opened.writes:
            return
        self._waiting()
        self._settle(opened.file)
        self._raise_errors(handle, opened)
        if self.pending.settings.close == "sync":
            self.pending.sync()
        elif self.pending.settings.close == "publish" and opened.file.path is not None:
            self.pending.flush(opened.file.path)

    def _raise_errors(self, handle: int, opened: Handle) -> None:
        path = opened.file.path if opened.file is not None else None
        if path is None:
            return
        seen, failure = self.pending.failures.since(path, opened.seen)
        if failure is not None:
            self._handles[handle] = opened._replace(seen=seen)
            raise failure.with_traceback(None)

    def fsync(self, handle: int) -> None:
        """What was written survives a power failure when this returns."""
        opened = self._handles[handle]
        file = opened.file
        if file is None:
            return
        self._waiting()
        if file.fd >= 0:
            disk.fsync(file.fd)
            return
        self._settle(file)
        self._raise_errors(handle, opened)
        self.pending.sync()

    def release(self, handle: int) -> None:
        """The last close of an open file. What was stored through a mapping since the flush is dealt with here."""
        opened = self._handles[handle]
        file = opened.file
        if file is not None and opened.writes and file.dirty:
            self._waiting()
        del self._handles[handle]
        if file is None:
            self._released(opened.number)
            return
        try:
            if opened.writes:
                self._settle(file)
        except OSError as e:
            self.pending.note_failure(file.path or "", e)
        finally:
            with self._lock:
                file.handles -= 1
                file.writers -= opened.writes
                if not file.writers and file.parent is not None:
                    self._drop_buffer(file)
                if file.parent is None:
                    self._files.let_go(file)
                elif file.is_settled and file.kind is not Kind.PLAIN:
                    self._files.settle(file)

    def _close_plain(self, file: File) -> None:
        """What was opened to change it once is not kept open."""
        with self._lock:
            if not file.handles and file.fd >= 0:
                os.close(file.fd)
                file.fd = -1
        self.base.changed(file.path or "")

    def _drop_buffer(self, file: File) -> None:
        if file.fd >= 0:
            os.close(file.fd)
            file.fd = -1
            self.base.changed(file.path or "")
        if file.buffer is not None:
            file.buffer.close()
            file.buffer = None
        if file.dirty:  # its writer was told that it was refused: it is as it was before
            file.dirty = False
            path = file.path or ""
            if file.version is None and not file.base and not self.pending.is_stored(path, file.target):
                self._files.unname(file)

    def _hold(self, number: int) -> None:
        """The name of an open file is about to be given away: who has it open goes on with it as it is.

        To be called before anything is changed.
        """
        file = self._files.by_number.get(number)
        if number not in self._opened and (file is None or not file.handles):
            return
        if not (self.writer.local and self._is_plain(number)):
            if file is None and number not in self._frozen:
                size = self.base.attributes(number).size
                self._frozen[number] = bytes(self.base.read(number, 0, max(size, 1)))
            return
        file = self._adopt(number)
        with self._lock:
            self._opened.pop(number, None)
            for handle, opened in self._handles.items():
                if opened.number == number and opened.file is None:
                    self._handles[handle] = opened._replace(file=file)
                    file.handles += 1

    def _released(self, number: int) -> None:
        with self._lock:
            left = self._opened.get(number, 1) - 1
            if left:
                self._opened[number] = left
            else:
                self._opened.pop(number, None)
                self._frozen.pop(number, None)

    def _settle(self, file: File) -> None:
        """Put what was written where it is safe."""
        unsaved = file.unsaved()
        if unsaved is None:
            return
        if file.kind in JOURNALED:
            if file.target is not None:
                self.pending.require_valid(file.target, unsaved[0])
            self.pending.make_room(unsaved[0].size)
        with self._lock:
            unsaved = file.unsaved()
            if unsaved is None:
                return
            buffer, path = unsaved
            if file.kind in JOURNALED:
                mode, scratch = file.mode, file.kind is Kind.SCRATCH
                content, when = buffer.content(), file.mtime_ns
                file.version = self.pending.put(path, content, file.target, when, mode, scratch=scratch)
                file.dirty = False
                return
            data = buffer.read(0, buffer.size)
            file.dirty = False
        try:
            self._write_through(file, path, data)
        except BaseException:
            file.dirty = True
            raise

    def _write_through(self, file: File, path: str, data: bytes) -> None:
        """A document, or a file of a store that is not local."""
        directory, _, name = path.rpartition("/")
        if file.kind is Kind.DOCUMENT and self.documents.write(directory, name, data):
            with self._lock:
                file.frozen = data
            self._described_anew(directory)
            return
        self.writer.put(path, data)
        file.frozen = data if file.kind is Kind.DOCUMENT else None
        file.base, file.known_size = 0, len(data)
        self.base.changed(path)
        if self.documents.is_document(name):
            self._described_anew(directory)

    def _described_anew(self, directory: str) -> None:
        """Documents of a directory were changed: names in it may stand for something else now."""
        self._renewed(directory)
        with self._lock:
            for parent, name, file in self._files.below(directory):
                if file is not None and file.kind not in (Kind.CHUNK, Kind.ORPHAN):
                    continue
                spot = self.spot(parent, name)
                path = join(parent, name)
                if file is not None and spot.kind in (Kind.CHUNK, Kind.ORPHAN):
                    if spot.target is None and file.target is not None and file.is_settled:
                        continue  # it lies outside now: it can still be read, and deleted
                    file.kind, file.target = spot.kind, spot.target
                    self._make_parents(parent)
                self.pending.retarget(path, spot.target)
