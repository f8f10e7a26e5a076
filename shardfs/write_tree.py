"""The unsharded tree, to be written: what the mount shows of a source, with what was changed on top.

A chunk that is written goes to the journal as a whole when it is closed (`WriteBuffer`), and from there to its shard.
What a name stands for is said in `Tree.spot`. Paths are shown paths; numbers are inode numbers, as in `Tree`.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardfs import disk
from shardfs.buffers import Budget, Buffer
from shardfs.cache import nothing
from shardfs.chunk_tree import Attributes, Spot
from shardfs.errors import CorruptShardError
from shardfs.inodes import CREATED, ROOT, TABLE_END
from shardfs.kinds import OWN, Kind, is_scratch
from shardfs.model import Batch
from shardfs.write_directories import Directories
from shardfs.write_documents import Documents
from shardfs.write_files import File, Files, join
from shardfs.writeback import WriteBuffer
from shardfs.writers import open_writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from shardfs.create_rules import Rules
    from shardfs.journal import Journal
    from shardfs.model import Bool, Entry
    from shardfs.patience import Patience
    from shardfs.pending import Version
    from shardfs.tree import Tree
    from shardfs.writeback import Publishing
    from shardfs.writers import Writer

log = logging.getLogger(__name__)

MAX_CHUNK = 2 << 30
MAX_DOCUMENT = 16 << 20
"""Bytes of one file; more are refused."""

MAX_NAME = 255
KNOWN_PATHS = 65_536
JOURNALED = frozenset((Kind.CHUNK, Kind.ORPHAN, Kind.SCRATCH))


class Handle(NamedTuple):
    """Who has a file open. `seen`: errors of publishing that were there before."""

    number: int
    file: File | None
    writes: bool
    seen: int


class WriteTree:
    """Thread-safe. What it has in common with `Tree` is said there."""

    def __init__(
        self,
        base: Tree,
        writer: Writer,
        pending: WriteBuffer,
        documents: Documents,
        budget: Budget,
        waiting: Callable[[], None] = nothing,
    ) -> None:
        self.base, self.writer, self.pending, self.documents = base, writer, pending, documents
        self.store = base.store
        self.invalidate: Callable[[int, bytes], None] = lambda parent, name: None
        self.invalidate_content: Callable[[int], None] = lambda number: None
        self._budget, self._waiting = budget, waiting
        self._lock = threading.RLock()
        self._files = Files()
        self._handles: dict[int, Handle] = {}
        self._next_handle = count(1)
        self._opened: dict[int, int] = {}  # numbers of the tree that are open for reading: how often
        self._frozen: dict[int, bytes] = {}  # their bytes, if the name has got others since
        self._paths: dict[int, str] = {}
        self._numbers: dict[str, int] = {}
        self._base_numbers: dict[str, int | None] = {}
        self._modes: dict[int, int] = {}
        self._directories = Directories()
        pending.attach(self._published, self._is_held)
        self._recover()

    def _recover(self) -> None:
        """Show what the journal holds."""
        for path, version in self.pending.versions().items():
            parent, _, name = path.rpartition("/")
            raw = os.fsencode(name)
            spot = self.spot(parent, raw)
            if version.data is None:
                if spot.target is not None:
                    self._files.hide(parent, raw)
                self.pending.retarget(path, spot.target)
                continue
            kind = spot.kind if spot.kind in JOURNALED else Kind.ORPHAN
            file = self._files.new(parent, raw, kind, spot.target)
            file.version, file.mode, file.mtime_ns = version, version.mode, version.mtime_ns
            self.pending.retarget(path, spot.target)
            self._make_parents(parent)

    def _make_parents(self, path: str) -> None:
        """Directories that the tree does not show by itself, around something that is in the journal."""
        while path and self._files.at(path) is None:
            parent, _, name = path.rpartition("/")
            if self._base_number(path) is None:
                self._files.new(parent, os.fsencode(name), Kind.DIRECTORY).mtime_ns = time.time_ns()
            else:
                self._show(path)
            path = parent

    # ---- numbers and paths ----

    def path_of(self, number: int) -> str:
        """The path that a number stands for. Raise FileNotFoundError for one that stands for nothing."""
        if number == ROOT:
            return ""
        file = self._files.by_number.get(number)
        path = file.path if file is not None else self._paths.get(number)
        if path is None and file is None:
            path = self.base.shown_path(number) or None
            if path is not None:
                if len(self._paths) >= KNOWN_PATHS:
                    self._paths.clear()
                self._paths[number] = path
        if path is None:
            raise FileNotFoundError(errno.ENOENT, "has no name any more", str(number))
        return path

    def _base_number(self, path: str) -> int | None:
        """What the tree calls this directory by itself; None if it has none there."""
        if path in self._base_numbers:
            return self._base_numbers[path]
        try:
            found = self.base.resolve(path)
        except (FileNotFoundError, NotADirectoryError):
            found = None
        if len(self._base_numbers) >= KNOWN_PATHS:
            self._base_numbers.clear()
        number = found.number if found is not None and found.directory else None
        if number is not None:  # what is not there may come any moment
            self._base_numbers[path] = number
        return number

    def _renewed(self, path: str) -> None:
        """The documents of a directory were changed, or it was renamed."""
        self.base.renew(path)
        self._paths.clear()
        self._base_numbers.clear()

    def spot(self, directory: str, name: bytes) -> Spot:
        """What a name stands for, in a directory of this path."""
        if name.startswith(OWN.encode()):
            return Spot(Kind.HIDDEN)
        number = self._base_number(directory)
        text = os.fsdecode(name)
        if number is None:
            return Spot(self._kind_in_made(directory, text))
        try:
            spot = self.base.spot(number, name)
        except CorruptShardError:  # its documents: they may be mended
            return Spot(Kind.PLAIN)
        return Spot(self.documents.kind(directory, text)) if spot.kind is Kind.PLAIN else spot

    def _kind_in_made(self, directory: str, name: str) -> Kind:
        """In a directory that exists on the mount alone."""
        above = directory
        while (number := self._base_number(above)) is None:
            above = above.rpartition("/")[0]
        below = directory[len(above) :].strip("/").split("/")
        first = self.base.spot(number, os.fsencode(below[0])).kind
        if first is Kind.PLAIN:  # of a store that has no directories
            return self.documents.kind(directory, name)
        temporary = first is Kind.SCRATCH or any(map(is_scratch, below)) or is_scratch(name)
        return Kind.SCRATCH if temporary else Kind.ORPHAN

    def remember(self, number: int) -> None:
        """As `Tree.remember`; files that were made here are counted, too."""
        file = self._files.by_number.get(number)
        if file is not None:
            with self._lock:
                file.lookups += 1
        self.base.remember(number)

    def forget(self, number: int, times: int) -> None:
        """As `Tree.forget`."""
        file = self._files.by_number.get(number)
        if file is not None:
            with self._lock:
                file.lookups = max(file.lookups - times, 0)
                if file.kind is Kind.PLAIN and not file.lookups and not file.handles:
                    self._files.unname(file)
                else:
                    self._files.let_go(file)
        self.base.forget(number, times)

    # ---- looking ----

    def lookup(self, parent: int, name: bytes) -> Attributes:
        """The child of a directory. Raise FileNotFoundError, another OSError or CorruptShardError."""
        directory = self.path_of(parent)
        self._numbers[directory] = parent
        found = self._find(directory, parent, name)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", os.fsdecode(name))
        return found

    def _find(self, directory: str, parent: int, name: bytes) -> Attributes | None:
        if len(name) > MAX_NAME:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), os.fsdecode(name))
        names = self._files.directory(directory)
        if names is not None and name in names:
            file = names[name]
            return None if file is None else self._attributes(file)
        if name.startswith(OWN.encode()):
            return None
        number = self._base_number(directory)
        if number is not None:
            with suppress(FileNotFoundError):
                shown = self._if_shown(self.base.lookup(number, name))
                return None if shown is None else self._with_mode(shown)
        if CREATED > parent != number:  # as it was described before: what lies outside now can still be deleted
            with suppress(OSError):
                return self.base.lookup(parent, name)
        return None

    def _if_shown(self, found: Attributes) -> Attributes | None:
        """Virtual directories are shown if somebody made them, or the source had chunks before."""
        tree = self.base.chunk_tree(found.number) if found.directory else None
        if tree is None:
            return found
        with self._lock:
            return found if self._directories.shows(tree, found.number) else None

    def _with_mode(self, found: Attributes) -> Attributes:
        mode = self._modes.get(found.number)
        return found if mode is None else found._replace(mode=mode)

    def attributes(self, number: int) -> Attributes:
        """As `Tree.attributes`."""
        file = self._files.by_number.get(number)
        if file is not None:
            return self._attributes(file)
        frozen = self._frozen.get(number)
        if frozen is not None:
            return Attributes(number, False, len(frozen), time.time_ns())
        if number >= CREATED:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(number))
        return self._with_mode(self.base.attributes(number))

    def _attributes(self, file: File) -> Attributes:
        if file.kind is Kind.DIRECTORY:
            return Attributes(file.number, True, 0, file.mtime_ns, None, file.mode)
        if file.kind is Kind.PLAIN and self.writer.local:
            return self._plain_attributes(file)
        return Attributes(file.number, False, file.size(), file.mtime_ns, None, file.mode)

    def _plain_attributes(self, file: File) -> Attributes:
        if file.fd >= 0:
            info = os.fstat(file.fd)
            return Attributes(file.number, False, info.st_size, info.st_mtime_ns, None, info.st_mode & 0o7777)
        stat = self.store.entry(file.path or "").stat
        if stat is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", file.path)
        return Attributes(file.number, False, stat.size, stat.mtime_ns, None, file.mode)

    def resolve(self, path: str) -> Attributes:
        """As `Tree.resolve`."""
        found = Attributes(ROOT, True, 0, 0)
        for part in filter(None, path.split("/")):
            found = self.lookup(found.number, os.fsencode(part))
        return found if found.number != ROOT else self.attributes(ROOT)

    def number(self, path: str) -> int:
        """The number of a file to read."""
        return self.resolve(path).number

    def shown_path(self, number: int) -> str:
        """As `Tree.shown_path`."""
        try:
            return self.path_of(number)
        except FileNotFoundError:
            return ""

    def read(self, number: int, offset: int, size: int) -> bytes | memoryview:
        """As `Tree.read`."""
        frozen = self._frozen.get(number)
        if frozen is not None:
            return memoryview(frozen)[offset : offset + size]
        file = self._files.by_number.get(number)
        if file is None:
            if number >= CREATED:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(number))
            return self.base.read(number, offset, size)
        return self._read(file, offset, size)

    def _read(self, file: File, offset: int, size: int) -> bytes | memoryview:
        if file.kind is Kind.DIRECTORY:
            raise IsADirectoryError(errno.EISDIR, "is a directory", file.path)
        with self._lock:
            if file.buffer is not None:
                return file.buffer.read(offset, size)
            version, target = file.version, file.target
        if file.frozen is not None:
            return memoryview(file.frozen)[offset : offset + size]
        if version is not None and version.data is not None:
            return self.pending.read(version.data, offset, size)
        if file.fd >= 0:
            return os.pread(file.fd, size, offset)
        if target is not None:
            return target.tree.read_chunk(target.tree.cached_as(target.coords), target.coords, offset, size)
        return self.base.read(file.base or self.base.resolve(file.path or "").number, offset, size)

    def read_many(self, requests: list[tuple[int, int, int]]) -> list[bytes | Exception]:
        """As `Tree.read_many`."""
        out: list[bytes | Exception] = []
        for number, offset, size in requests:
            try:
                out.append(bytes(self.read(number, offset, size)))
            except (OSError, CorruptShardError) as e:
                out.append(e)
        return out

    def few(self, number: int, most: int) -> list[Entry] | None:
        """As `Tree.few`; None where something was changed."""
        path = self.path_of(number)
        if number >= CREATED or self._files.directory(path) is not None or self._base_number(path) != number:
            return None
        return self.base.few(number, most)

    def scan(self, number: int, cookie: int = 0) -> Iterator[Batch]:
        """As `Tree.scan`: first what was changed, as it is at the first call; then the others."""
        path = self.path_of(number)
        with self._lock:
            names = dict(self._files.directory(path) or {})
        changed = []
        for name, file in names.items():
            if file is not None:
                with suppress(OSError):
                    changed.append((name, self._attributes(file)))
        if changed and not cookie:
            yield _batch(changed)
        base = self._base_number(path)
        if base is None:
            return
        for batch in self.base.scan(base, max(cookie - OVERLAID, 0)):
            shown = self._only_shown(_without(batch, names))
            if len(shown.names):
                yield shown._replace(cookies=shown.cookies + np.uint64(OVERLAID))

    def _only_shown(self, batch: Batch) -> Batch:
        """Without the virtual directories that are not shown."""
        virtual = batch.numbers[batch.directories & (batch.numbers >= np.uint64(TABLE_END))]
        tree = self.base.chunk_tree(int(virtual[0])) if len(virtual) else None
        if tree is None:
            return batch
        with self._lock:
            return _kept(batch, self._directories.shows_many(tree, batch.numbers))

    def xattrs(self, number: int) -> dict[str, bytes]:
        """As `Tree.xattrs`; and how far a changed file has come."""
        file = self._files.by_number.get(number)
        if file is None:
            return self.base.xattrs(number) if number < CREATED else {}
        out = {"user.shardfs.state": self._state(file)}
        if file.version is not None:
            out["user.shardfs.lsn"] = b"%d" % file.version.lsn
        failure = self.pending.failure(file.path or "")
        if failure is not None:
            out["user.shardfs.error"] = str(failure).encode(errors="replace")
        return out

    def _state(self, file: File) -> bytes:
        if file.kind in (Kind.ORPHAN, Kind.SCRATCH):
            return file.kind.name.lower().encode()
        if file.dirty:
            return b"open"
        return b"published" if file.version is None else b"journaled"

    def statvfs(self) -> os.statvfs_result | None:
        """The smaller of what the journal and the store have room for."""
        mine, stored = self.pending.statvfs(), self.base.statvfs()
        return mine if stored is None or mine.f_bavail * mine.f_frsize < stored.f_bavail * stored.f_frsize else stored

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
            fd = self._open_plain(join(directory, name), flags | os.O_CREAT, mode)
        with self._lock:
            file = self._files.new(directory, name, spot.kind, spot.target)
            file.mode, file.mtime_ns, file.fd = mode & 0o7777, time.time_ns(), fd
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

    def _open_plain(self, path: str, flags: int, mode: int = 0o666) -> int:
        both = flags & ~(os.O_ACCMODE | os.O_APPEND | os.O_TRUNC) | os.O_RDWR
        return self.writer.open_file(path, both, mode)

    def _new_buffer(self, file: File) -> Buffer:
        return Buffer(self._budget, MAX_DOCUMENT if file.kind is Kind.DOCUMENT else MAX_CHUNK)

    def _handle(self, file: File, flags: int) -> int:
        handle = next(self._next_handle)
        writes = flags & os.O_ACCMODE != os.O_RDONLY
        seen = self.pending.errors_seen(file.path or "")
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
        data = bytes(self._read(file, 0, max(file.size(), 1)))
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
            disk.chmod(self._adopt(number).fd, mode & 0o7777)
        elif file is not None:
            file.mode = mode & 0o7777
        else:
            if len(self._modes) >= KNOWN_PATHS:
                self._modes.clear()
            self._modes[number] = mode & 0o7777

    def set_times(self, number: int, mtime_ns: int | None) -> None:
        """The time of the last change (None: now); that of chunks is kept until the end of the mount."""
        when = time.time_ns() if mtime_ns is None else mtime_ns
        if self.attributes(number).directory:
            return
        file = self._adopt(number)
        if file.fd >= 0:
            disk.utime(file.fd, when, when)
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
        seen, failure = self.pending.errors_since(path, opened.seen)
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

    # ---- names ----

    def unlink(self, parent: int, name: bytes) -> None:
        """Remove a file. A chunk is gone from its shard once that is published."""
        directory = self._directory(parent)
        found = self._find(directory, parent, name)
        path = join(directory, name)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if found.directory:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        self._waiting()
        spot = self._spot_of(directory, name, found)
        if spot.kind is Kind.HIDDEN:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
        if spot.kind is Kind.DOCUMENT:
            self.documents.remove(directory, os.fsdecode(name))
        elif spot.kind is Kind.PLAIN:
            self.writer.delete(path)
        self._remove(directory, name, found.number, spot)
        if spot.kind is Kind.PLAIN:
            self.base.changed(path)
            if self.documents.is_document(os.fsdecode(name)):
                self._described_anew(directory)

    def _spot_of(self, directory: str, name: bytes, found: Attributes) -> Spot:
        """What a file is, which is there."""
        file = self._files.by_number.get(found.number)
        if file is not None:
            return Spot(file.kind, file.target)
        spot = self.spot(directory, name)
        if spot.kind is Kind.ORPHAN:  # a chunk that is outside since its array was cut
            former = self.base.target_of(found.number)
            return spot if former is None else Spot(Kind.CHUNK, former)
        return spot

    def _remove(self, directory: str, name: bytes, number: int, spot: Spot) -> None:
        """Take a name away; who has the file open goes on with its bytes."""
        path = join(directory, name)
        self._keep_for_readers(number)
        with self._lock:
            file = self._files.at(path)
            if file is not None:
                self._keep_for_handles(file)
            stored = self.pending.is_stored(path, spot.target)
            if spot.kind in JOURNALED and (stored or self.pending.holds(path)):
                self.pending.drop(path, spot.target if stored else None)
            if file is not None:
                self._files.unname(file)
            if stored or spot.kind is Kind.DOCUMENT:
                self._files.hide(directory, name)

    def _keep_for_readers(self, number: int) -> None:
        """Programs have it open that know it by the number the tree gave it."""
        if number in self._opened and number not in self._frozen and number not in self._files.by_number:
            size = self.base.attributes(number).size
            self._frozen[number] = bytes(self.base.read(number, 0, max(size, 1)))

    def _keep_for_handles(self, file: File) -> None:
        if file.handles and file.fd < 0:
            self._load(file)

    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, noreplace: bool) -> None:
        """Give a file another name; what was called so is gone, in one step for whoever looks."""
        source, directory = self._directory(parent), self._directory(new_parent)
        found = self._find(source, parent, name)
        old, new = join(source, name), join(directory, new_name)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), old)
        there = self._find(directory, new_parent, new_name)
        if there is not None and noreplace:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
        if old == new:
            return
        self._waiting()
        if found.directory:
            self._rename_directory(found, old, new, there)
            return
        if there is not None and there.directory:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), new)
        spot = self._spot_to_write(directory, new_name)
        if there is not None:
            spot = self._spot_of(directory, new_name, there)
            self._keep_for_readers(there.number)
        if spot.kind is Kind.PLAIN and self._spot_of(source, name, found).kind is Kind.PLAIN:
            self._rename_plain(found.number, old, new)
            return
        self._replace(self._adopt(found.number), old, directory, new_name, spot)

    def _rename_plain(self, number: int, old: str, new: str) -> None:
        file = self._adopt(number) if self.writer.local else self._files.by_number.get(number)
        if file is not None and not self.writer.local:
            self._settle(file)
        self.writer.rename(old, new)
        replaced = self._files.at(new)
        directory, _, name = new.rpartition("/")
        with self._lock:
            if replaced is not None:
                self._keep_for_handles(replaced)
                self._files.unname(replaced)
            if file is not None:
                self._files.rename(file, directory, os.fsencode(name))
                if not file.handles and file.fd >= 0:
                    os.close(file.fd)
                    file.fd = -1
        for path in (old, new):
            self.base.changed(path)
        for path in (old, new):
            above, _, last = path.rpartition("/")
            if self.documents.is_document(last):
                self._described_anew(above)

    def _replace(self, file: File, old: str, directory: str, name: bytes, spot: Spot) -> None:
        """Rename of a file where the bytes move, from the journal, from a shard, to one or to a document."""
        new = join(directory, name)
        was, had = file.kind, file.target
        source = file.parent or ""
        if was in JOURNALED:
            self._settle(file)
        data = (
            None
            if file.version is not None and spot.kind in JOURNALED
            else bytes(self._read(file, 0, max(file.size(), 1)))
        )
        if spot.kind is Kind.DOCUMENT or spot.kind is Kind.PLAIN:
            self._replace_through(file, new, data or b"", spot)
        with self._lock:
            stored = self.pending.is_stored(old, had)
            replaced = self._files.at(new)
            if replaced is not None:
                self._keep_for_handles(replaced)
                self._files.unname(replaced)
            if spot.kind in JOURNALED:
                scratch = spot.kind is Kind.SCRATCH
                file.version = self.pending.move(
                    old, new, spot.target, had if stored else None, data, file.mtime_ns, file.mode, scratch=scratch
                )
            elif was in JOURNALED and (stored or self.pending.holds(old)):
                self.pending.drop(old, had if stored else None)
                file.version = None
            self._files.rename(file, directory, name)
            file.kind, file.target = spot.kind, spot.target
            if stored or was is Kind.DOCUMENT:
                self._files.hide(source, os.fsencode(old.rpartition("/")[2]))
            if file.fd >= 0:
                os.close(file.fd)
                file.fd = -1
        if was is Kind.DOCUMENT:
            self.documents.remove(source, old.rpartition("/")[2])
        elif was is Kind.PLAIN:
            self.writer.delete(old)
            self.base.changed(old)

    def _replace_through(self, file: File, new: str, data: bytes, spot: Spot) -> None:
        before = file.kind
        file.kind = spot.kind
        try:
            self._write_through(file, new, data)
        except BaseException:
            file.kind = before
            raise
        with self._lock:
            if file.buffer is not None and not file.writers:
                file.buffer.close()
                file.buffer = None

    def _rename_directory(self, found: Attributes, old: str, new: str, there: Attributes | None) -> None:
        """Whole trees are renamed in the store; what is pending in them is published before."""
        parents = (self._base_number(old.rpartition("/")[0]), self._base_number(new.rpartition("/")[0]))
        if found.number >= CREATED or None in parents or self.base.is_virtual(found.number):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), old)
        if any(number is not None and self.base.is_virtual(number) for number in parents):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), new)
        if there is not None:
            if not there.directory:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), new)
            self._remove_directory(there.number, new)
        self.pending.flush(old)
        if any(path.startswith(f"{old}/") for path in self.pending.versions()):
            raise OSError(errno.EBUSY, "something in it is not published", old)
        self.writer.rename(old, new)
        with self._lock:
            self._files.forget_below(old)
            self.base.moved(old, new)
        self._paths.clear()
        self._base_numbers.clear()
        for path in (old, new):
            self.base.changed(path)

    def link(self, number: int, new_parent: int, new_name: bytes) -> Attributes:
        """A file of its own with the same bytes: names do not share files here."""
        directory = self._directory(new_parent)
        if self._find(directory, new_parent, new_name) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fsdecode(new_name))
        self._waiting()
        spot = self._spot_to_write(directory, new_name)
        source = self._files.by_number.get(number)
        if source is not None:
            self._settle(source)
            data = bytes(self._read(source, 0, max(self._attributes(source).size, 1)))
        else:
            data = bytes(self.base.read(number, 0, max(self.base.attributes(number).size, 1)))
        self.pending.make_room(len(data))
        path, mode, now = join(directory, new_name), source.mode if source is not None else 0, time.time_ns()
        file = self._files.unnamed(spot.kind, spot.target)
        file.mode, file.mtime_ns = mode, now
        if spot.kind not in JOURNALED:
            self._write_through(file, path, data)
        with self._lock:
            if spot.kind in JOURNALED:
                scratch = spot.kind is Kind.SCRATCH
                file.version = self.pending.put(path, data, spot.target, now, mode, scratch=scratch)
            self._files.name(file, directory, new_name)
        return self._attributes(file)

    def mkdir(self, parent: int, name: bytes, mode: int) -> Attributes:
        """Make a directory: of the store, or in a tree of chunks one that is kept until the end of the mount."""
        directory = self._directory(parent)
        path = join(directory, name)
        if self._find(directory, parent, name) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        spot = self.spot(directory, name)
        if spot.kind is Kind.HIDDEN:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
        if spot.kind is Kind.DIRECTORY:
            self._show(path)
            return self.lookup(parent, name)
        if spot.kind is not Kind.PLAIN or self._base_number(directory) is None or not self.writer.local:
            with self._lock:
                file = self._files.new(directory, name, Kind.DIRECTORY)
                file.mode, file.mtime_ns = mode & 0o7777, time.time_ns()
            return self._attributes(file)
        self._waiting()
        self.writer.make_directory(path)
        self.base.changed(path)
        return self.lookup(parent, name)

    def _show(self, path: str, *, shown: bool = True) -> None:
        number = self._base_number(path)
        tree = self.base.chunk_tree(number) if number is not None else None
        if tree is None or number is None:
            return
        with self._lock:
            self._directories.show(tree, number, shown=shown)

    def rmdir(self, parent: int, name: bytes) -> None:
        """Remove a directory in which nothing is shown any more."""
        directory = self._directory(parent)
        found = self._find(directory, parent, name)
        path = join(directory, name)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if not found.directory:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        self._waiting()
        self._remove_directory(found.number, path)

    def _remove_directory(self, number: int, path: str) -> None:
        if any(len(batch.names) for batch in self.scan(number)):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        made = self._files.by_number.get(number)
        if made is not None:
            with self._lock:
                self._files.forget_below(path)
                self._files.unname(made)
        base = self._base_number(path)
        if base is None:
            return
        if self.base.is_virtual(base):
            self._show(path, shown=False)
            return
        self.pending.flush(path)
        self._remove_stored(path)
        with self._lock:
            self._files.forget_below(path)
        self.documents.removed(path)
        self._renewed(path)

    def _remove_stored(self, path: str) -> None:
        """A directory of which nothing is shown any more: what is left are the empty ones of its shards."""
        for entry in list(self.store.scan(path)):
            if not entry.directory:
                raise OSError(errno.ENOTEMPTY, f"{entry.name} is in it, which is not shown", path)
            self._remove_stored(join(path, entry.name))
        with suppress(FileNotFoundError):
            self.writer.remove_directory(path)

    def sync_directory(self, number: int) -> None:
        """The names in a directory survive a power failure when this returns."""
        self._waiting()
        self.pending.sync()
        path = self.path_of(number)
        if self.writer.local and number < CREATED and not self.base.is_virtual(number):
            self.writer.sync_directory(path)

    def set_xattr(self, number: int, name: str, value: bytes) -> None:
        """`user.shardfs.flush`: publish what is at or below, within so many seconds. Nothing else can be set."""
        if name != "user.shardfs.flush":
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), name)
        self._waiting()
        self.pending.flush(self.path_of(number), float(value or b"0") or None)

    # ---- what was published ----

    def _is_held(self, path: str) -> bool:
        """Whether somebody has it open for writing."""
        file = self._files.at(path)
        return file is not None and file.writers > 0

    def _published(self, done: Mapping[str, Version]) -> None:
        """These versions are in their shards now; called without any lock."""
        gone: list[tuple[int, bytes]] = []
        with self._lock:
            for path, version in done.items():
                parent, _, name = path.rpartition("/")
                file = self._files.at(path)
                if file is None:
                    if version.data is None:
                        self._files.reveal(parent, os.fsencode(name))
                    continue
                if file.version is not None and file.version.lsn == version.lsn:
                    gone += self._has_arrived(file, version)
        for number, raw in gone:
            self.invalidate(number, raw)

    def _has_arrived(self, file: File, version: Version) -> list[tuple[int, bytes]]:
        if file.target is not None and file.target.suffix:  # shown by its plain name from now on
            victims = [file]
        else:
            file.known_size = version.data.size if version.data is not None else 0
            file.version = None
            victims = self._files.settle(file) if file.is_settled else []
        out = []
        for old in victims:
            number = self._numbers.get(old.parent or "")
            if number is not None:
                out.append((number, old.name))
            self._keep_for_handles(old)
            self._files.unname(old)
        return out

    # ---- the rest of `Tree` ----

    # ---- the end ----

    def state(self) -> dict[str, Any]:
        """As `WriteBuffer.state`."""
        return self.pending.state()

    def left(self) -> list[str]:
        """As `WriteBuffer.left`."""
        return self.pending.left()

    def close(self, timeout: float) -> list[str]:
        """As `WriteBuffer.close`, after what is still open is closed: the kernel may not say so any more."""
        for handle in list(self._handles):
            try:
                self.flush(handle)
                self.release(handle)
            except OSError as e:
                log.warning("what is open when the mount ends: %s", e)
        try:
            return self.pending.close(timeout)
        finally:
            self.writer.close()

    def caches(self) -> dict[str, dict[str, int]]:
        """As `Tree.caches`."""
        return self.base.caches()

    @property
    def patience(self) -> Patience | None:
        """As `Tree.patience`."""
        return self.base.patience


OVERLAID = 1 << 61
"""Added to the cookies of the tree, behind those of what was changed."""


def _batch(entries: list[tuple[bytes, Attributes]]) -> Batch:
    rows = [a for _, a in entries]
    return Batch(
        np.array([name for name, _ in entries], "S"),
        np.array([a.number for a in rows], np.uint64),
        np.array([a.directory for a in rows], np.bool_),
        np.array([-1 if a.mode else a.size for a in rows], np.int64),  # such are asked for one by one
        np.array([a.mtime_ns for a in rows], np.int64),
        np.arange(1, len(rows) + 1, dtype=np.uint64),
    )


def _without(batch: Batch, names: dict[bytes, File | None]) -> Batch:
    """What is left of a batch without these names, and without those of shardfs's own."""
    keep = np.array([n not in names and not n.startswith(OWN.encode()) for n in batch.names.tolist()], np.bool_)
    return _kept(batch, keep)


def _kept(batch: Batch, keep: Bool) -> Batch:
    if keep.all():
        return batch
    return batch._replace(
        names=batch.names[keep], numbers=batch.numbers[keep], directories=batch.directories[keep],
        sizes=batch.sizes[keep], mtimes_ns=batch.mtimes_ns[keep], cookies=batch.cookies[keep],
    )  # fmt: skip


def open_write_tree(
    base: Tree,
    journal: Journal,
    *,
    publishing: Publishing | None = None,
    rules: Rules | None = None,
    remembers: bool = True,
    dirty_bytes: int = 256 << 20,
    cas_none: bool = False,
    waiting: Callable[[], None] = nothing,
) -> WriteTree:
    """A tree on top of one that is shown as it is stored; what the journal holds is pending.

    Args:
        dirty_bytes: memory for files that are open for writing.
        cas_none: the store may be one in which others could lose what they write.
        rules, remembers: see `Documents`.

    Raise UnsupportedError, with the reason, if the source cannot be written; BusyError if another host writes to it.
    """
    writer = open_writer(base.store, cas_none=cas_none, journal=journal.directory)
    try:
        pending = WriteBuffer(journal, writer, publishing, waiting)
    except BaseException:
        writer.close()
        raise
    documents = Documents(base, writer, rules, remembers=remembers)
    budget = Budget(dirty_bytes, lambda: disk.open_unnamed(str(journal.directory)))
    return WriteTree(base, writer, pending, documents, budget, waiting)
