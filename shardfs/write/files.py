"""Inodes and names of files that were created or changed on a writable mount."""

from __future__ import annotations

import errno
import itertools
import os
import stat
import time
from collections import OrderedDict
from threading import RLock
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from shardfs.model.kinds import NameKind, compression, is_in
from shardfs.vfs.inodes import CREATED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from shardfs.vfs.chunk_dirs import Target
    from shardfs.write.buffers import Buffer
    from shardfs.write.encoding import Encoded
    from shardfs.write.pending import Version
    from shardfs.write.stored import Stored

MAX_SETTLED = 65_536
"""Maximum number of files whose inode number, times and mode are kept although the source shows the same contents."""

MAX_KEPT = 65_536
"""Default maximum of the entries of a table that is cleared when it is full."""

K = TypeVar("K")
V = TypeVar("V")


class Writeback(NamedTuple):
    """One state of a dirty file that is to be written to the store: the bytes of `buffer` in this `edition`."""

    path: str
    data: bytes
    buffer: Buffer
    edition: int


class WritableFile:
    """An inode. It has at most one name. Without a name it lives until no handle or kernel reference is left.

    Only methods of this class change the attributes, and each takes the lock of the name space itself. The contents are
    in the first of these places that is set: `buffer` (being written), `frozen` (a fixed copy), the journal
    (`version`), `fd`, or the source, as the chunk `target` or under `path`. A file goes from the source to a buffer
    (`load`, `change`), from there to the journal (`commit`), and from there to the source (`publish`).

    Attributes:
        path: path on the mount; None if the file has no name any more.
        last_path: the path that a file without a name had last.
        dirty: the buffer has bytes that are neither in the journal nor in the store.
        refused: these bytes could not be saved, and the writer got the error.
        superseded: the source's document differs from the one written here or cached by the kernel; `frozen` has the
            former, or (None) the tree.
        writeback: held while the bytes are written to the store, and while the file is renamed or removed, so that the
            bytes go to the name that the file has. Another close of the file waits, then saves what the first one could
            not save.
        stored: what the source had for a chunk whose size and time are those of this file; None if that was not noted.
    """

    __slots__ = (
        "_lock", "_spent", "buffer", "dirty", "fd", "frozen", "handles", "kind", "known_size", "last_path", "lookups",
        "mode", "mtime_ns", "number", "path", "refused", "stored", "superseded", "target", "version", "writeback",
        "writers",
    )  # fmt: skip

    def __init__(self, number: int, kind: NameKind, target: Target | None, lock: RLock) -> None:
        self._lock = lock
        self.number = number
        self.kind = kind
        self.target = target
        self.path: str | None = None
        self.last_path = ""
        self.mode = 0
        self.mtime_ns = 0
        self.known_size = 0
        self.buffer: Buffer | None = None
        self.frozen: bytes | None = None
        self.version: Version | None = None
        self.stored: Stored | None = None
        self.fd = -1
        self._spent: list[int] = []
        self.writeback = RLock()
        self.dirty = False
        self.refused = False
        self.superseded = False
        self.handles = 0
        self.writers = 0
        self.lookups = int(self.is_original)

    # ---- what it is ----

    @property
    def is_original(self) -> bool:
        """Whether the file was in the source when the mount first showed it, so the kernel may know it."""
        return self.number < CREATED

    @property
    def saved_path(self) -> str | None:
        """Path at which a close saves the file: without the suffix of a compressed chunk.

        None if the file has no name.
        """
        path = self.path
        return path.removesuffix(compression(path)) if path and self.kind is NameKind.COMPRESSED else path

    @property
    def matches_source(self) -> bool:
        """Whether the tree shows the same contents without this file."""
        return self.version is None and self.buffer is None and not self.writers

    @property
    def is_lost(self) -> bool:
        """Whether the file has neither a name nor contents on the mount: at most handles still refer to it."""
        version = self.version is not None and self.version.data is not None
        has_bytes = self.buffer is not None or self.frozen is not None or self.fd >= 0
        return self.path is None and not has_bytes and not version

    @property
    def version_and_target(self) -> tuple[Version | None, Target | None]:
        """Where the bytes of a file without a buffer are, or None for each: the `place` for `load`."""
        with self._lock:
            return self.version, self.target

    def unsaved(self) -> tuple[Buffer, str] | None:
        """Return the buffer and path of a dirty file; None if all bytes are saved or the file has no name."""
        return (self.buffer, self.path) if self.dirty and self.buffer is not None and self.path is not None else None

    def size(self) -> int:
        """Return the size in bytes, without a look at the source; `known_size` if nothing newer is known.

        -1 for a chunk in the journal that must be decoded to learn its size.
        """
        if self.buffer is not None:
            return self.buffer.size
        if self.frozen is not None:
            return len(self.frozen)
        if self.version is not None and self.version.data is not None:
            return self.known_size if self.version.is_encoded else self.version.data.size
        return os.fstat(self.fd).st_size if self.fd >= 0 else self.known_size

    # ---- names and references ----

    def set_path(self, path: str | None) -> None:
        """Take another path; None: the name is removed or replaced."""
        with self._lock:
            self.last_path = self.path or self.last_path
            self.path = path

    def become(self, kind: NameKind, target: Target | None) -> None:
        """Take another kind: the file was renamed, or documents describe its name anew."""
        with self._lock:
            self.kind = kind
            self.target = target

    def set_status(self, *, size: int | None = None, mtime_ns: int | None = None, mode: int | None = None) -> None:
        """Set the size in bytes that is shown while nothing newer is known, the modification time and the mode.

        None leaves a value as it is.
        """
        with self._lock:
            self.known_size = self.known_size if size is None else size
            self.mtime_ns = self.mtime_ns if mtime_ns is None else mtime_ns
            self.mode = self.mode if mode is None else mode

    def count_lookups(self, change: int) -> None:
        """Add `change` to the number of kernel references; it does not fall below 0."""
        with self._lock:
            self.lookups = max(self.lookups + change, 0)

    def add_handle(self, *, writes: bool = False) -> None:
        """Count a handle, and a writer if the handle `writes`."""
        with self._lock:
            self.handles += 1
            self.writers += writes

    def stop_writing(self) -> bool:
        """Count one writer less. Return False instead if it is the last one, and the file must be saved first."""
        with self._lock:
            if self.writers == 1 and self.unsaved() is not None and not self.refused:
                return False
            self.writers -= 1
            return True

    def remove_handle(self) -> None:
        """Count one handle less. The last one frees the fixed copy of a file without a name."""
        with self._lock:
            self.handles -= 1
            if self.path is None and not self.handles and self.frozen is not None:
                self.known_size = len(self.frozen)
                self.frozen = None

    # ---- from the source to a buffer ----

    def load(self, buffer: Buffer, place: tuple[Version | None, Target | None], *, dirty: bool = False) -> None:
        """Use a buffer with all bytes, read from `place`; do nothing if the file has other bytes by now."""
        with self._lock:
            if self.buffer is None and place == (self.version, self.target):
                self.buffer = buffer
                self.dirty = dirty

    def use_disk(self, fd: int) -> None:
        """Pass reads and writes through to a descriptor of the source."""
        with self._lock:
            self.leave_disk()
            self.fd = fd

    def leave_disk(self) -> bool:
        """Stop using `fd` for the contents. Return whether the file has used one.

        Descriptors are closed once no handle is open: a read may still use one.
        """
        with self._lock:
            if self.fd >= 0:
                self._spent.append(self.fd)
                self.fd = -1
            has_used = bool(self._spent)
            while self._spent and not self.handles:
                os.close(self._spent.pop())
            return has_used

    def change(self, change: Callable[[Buffer], None]) -> bool:
        """Change the bytes in the buffer. Return False if there is no buffer (any more)."""
        with self._lock:
            if self.buffer is None:
                return False
            change(self.buffer)
            self.dirty = True
            self.refused = False
            self.mtime_ns = time.time_ns()
            return True

    # ---- from the buffer to the journal or the store ----

    def commit(self, version: Version, *, dirty: bool = False) -> None:
        """Note the version in the journal that has all bytes; with `dirty`, not those written by another thread."""
        with self._lock:
            self.version = version
            self.dirty = dirty and self.dirty
            self.frozen = None

    def start_writeback(self, kind: NameKind) -> Writeback | None:
        """Return the bytes of a dirty file, for the store. The caller holds `writeback`.

        None if all are saved, or a rename has made the file one of another kind.
        """
        with self._lock:
            if (unsaved := self.unsaved()) is None or self.kind is not kind:
                return None
            buffer, path = unsaved
            return Writeback(path, buffer.read(0, buffer.size), buffer, buffer.edition)

    def end_writeback(self, saved: Writeback) -> None:
        """Note that the store has these bytes. Those that were written meanwhile are still unsaved.

        So are all bytes if the directory was renamed before they were stored.
        """
        with self._lock:
            is_saved = self.buffer is saved.buffer and saved.buffer.edition == saved.edition and self.path == saved.path
            self.dirty = self.dirty and not is_saved

    def show(self, encoded: Encoded) -> bool:
        """Show the bytes of a chunk as they will be shown once it is in its shard. Return whether they are others."""
        with self._lock:
            self.known_size = len(encoded.shown)
            if encoded.shown == encoded.written:
                return False
            encoded.buffer.truncate(0)
            encoded.buffer.write(0, encoded.shown)
            return True

    def freeze(self, data: bytes | None, *, superseded: bool = False) -> None:
        """Show the fixed bytes `data`, or (None) what is stored. `superseded`: see the attribute."""
        with self._lock:
            self.frozen = data
            self.superseded = superseded

    def refuse(self) -> None:
        """Note that the bytes could not be saved, and that the writer gets the error."""
        with self._lock:
            self.refused = True

    def discard(self) -> None:
        """Give up what is not saved. Open handles still read the bytes."""
        with self._lock:
            self.dirty = False
            self.superseded = False
            if not self.handles:
                self.drop_buffer()

    def drop_buffer(self) -> bool:
        """Release the buffer. Return whether it had bytes that are not saved."""
        with self._lock:
            if self.buffer is not None:
                self.buffer.close()
                self.buffer = None
            was_dirty = self.dirty
            self.dirty = False
            return was_dirty

    # ---- from the journal to the source ----

    def publish(self, base: Stored | None, size: int | None = None) -> None:
        """Note that the source has the bytes: `base` for a chunk; and how many, if that has changed."""
        with self._lock:
            self.version = None
            self.stored = base
            self.known_size = self.known_size if size is None else size

    def follow(self, base: Stored | None) -> None:
        """Note what the source has for a chunk now."""
        with self._lock:
            self.stored = base


def put_bounded(table: dict[K, V], key: K, value: V, limit: int = MAX_KEPT) -> None:
    """Add an entry to a table; clear the table first if it has `limit` entries."""
    if len(table) >= limit:
        table.clear()
    table[key] = value


def shown_mode(mode: int, directory: bool = False) -> int:
    """Return the mode for `Attributes`: 0 for the usual 0644 (directories 0755), else file type and bits."""
    usual, kind = (0o755, stat.S_IFDIR) if directory else (0o644, stat.S_IFREG)
    bits = stat.S_IMODE(mode)
    return 0 if bits == usual else kind | bits


def join(directory: str, name: bytes | str) -> str:
    """Return the path of a name in a directory."""
    text = os.fsdecode(name)
    return f"{directory}/{text}" if directory else text


def split(path: str) -> tuple[str, bytes]:
    """Return directory and name of a path."""
    directory, _, name = path.rpartition("/")
    return directory, os.fsencode(name)


def upwards(path: str) -> Iterator[str]:
    """Yield a path and the directories above it. The last one is "", the root."""
    while path:
        yield path
        path = path.rpartition("/")[0]
    yield ""


def stale(number: int) -> OSError:
    """Return an OSError (ESTALE) for an inode number without a file. The kernel then looks up the name again."""
    return OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(number))


_NO_NAMES: Mapping[bytes, WritableFile | None] = MappingProxyType({})


class Files:
    """All files by inode number and by name. Callers hold `lock`.

    A name with the value None is hidden: the tree has an entry of that name, and the mount does not show the entry.
    """

    def __init__(self, lock: RLock) -> None:
        self._lock = lock
        self.by_number: dict[int, WritableFile] = {}
        self._directories: dict[str, dict[bytes, WritableFile | None]] = {}
        self._numbers = itertools.count(CREATED)
        self._settled: OrderedDict[int, WritableFile] = OrderedDict()

    def new(
        self, parent: str, name: bytes, kind: NameKind, target: Target | None = None, number: int = 0
    ) -> WritableFile:
        """Create a file with a name, in place of any file with that name. By default the inode number is a new one."""
        file = self.unnamed(kind, target, number)
        self.name(file, parent, name)
        return file

    def unnamed(self, kind: NameKind, target: Target | None = None, number: int = 0) -> WritableFile:
        """Create a file without a name; call `name` next. `number` 0: a new inode number."""
        return WritableFile(number or next(self._numbers), kind, target, self._lock)

    def name(self, file: WritableFile, parent: str, name: bytes) -> None:
        """Give a file without a name a name, in place of any file with that name."""
        file.set_path(join(parent, name))
        self.by_number[file.number] = file
        self._directories.setdefault(parent, {})[name] = file

    def in_directory(self, path: str) -> Mapping[bytes, WritableFile | None]:
        """Return the changed names in a directory: the file of each, None for a hidden one."""
        return self._directories.get(path, _NO_NAMES)

    def at(self, path: str) -> WritableFile | None:
        """Return the file at a path; None if there is none or the name is hidden."""
        parent, _, name = path.rpartition("/")
        return self._directories.get(parent, _NO_NAMES).get(os.fsencode(name))

    def hide(self, parent: str, name: bytes) -> None:
        """Hide a name that the tree has."""
        self._directories.setdefault(parent, {})[name] = None

    def reveal(self, parent: str, name: bytes) -> None:
        """Show the tree's own entry of a hidden name again."""
        self._free_name(parent, name, None)

    def unname(self, file: WritableFile) -> None:
        """Remove the name of a file. The file is freed unless a handle or the kernel still uses it."""
        if file.path is not None:
            self._free_name(*split(file.path), file)
            file.set_path(None)
        self._settled.pop(file.number, None)
        self.let_go(file)

    def rename(self, file: WritableFile, parent: str, name: bytes) -> None:
        """Move a file to another name. A file with that name loses its name."""
        if (replaced := self.at(join(parent, name))) is not None:
            self.unname(replaced)
        if file.path is not None:
            self._free_name(*split(file.path), file)
        self.name(file, parent, name)

    def _free_name(self, parent: str, name: bytes, file: WritableFile | None) -> None:
        """Forget a name if it belongs to this file; None: if it is hidden."""
        names = self._directories.get(parent, {})
        if name in names and names[name] is file:
            del names[name]
            if not names:
                del self._directories[parent]

    def let_go(self, file: WritableFile) -> None:
        """Free a file that has no name, no open handle and no kernel reference."""
        if file.path is None and not file.handles and not file.lookups:
            file.drop_buffer()
            file.leave_disk()
            self.by_number.pop(file.number, None)

    def settle(self, file: WritableFile) -> None:
        """Record that the source shows the same contents as this file."""
        self._settled[file.number] = file
        self._settled.move_to_end(file.number)

    def evict_settled(self) -> list[WritableFile]:
        """Return the least recently settled files beyond `MAX_SETTLED`, for the caller to take their names away."""
        evicted: list[WritableFile] = []
        for number in list(itertools.islice(self._settled, max(len(self._settled) - MAX_SETTLED, 0))):
            old = self._settled.pop(number)
            if old.matches_source and not old.handles:
                evicted.append(old)
        return evicted

    def below(self, path: str) -> Iterator[tuple[str, bytes, WritableFile | None]]:
        """Yield directory, name and file (None: hidden) of all names at and below a path."""
        inside = f"{path}/" if path else ""
        for directory, names in list(self._directories.items()):
            if directory == path or directory.startswith(inside):
                for name, file in list(names.items()):
                    yield directory, name, file
        file = self.at(path) if path else None
        if file is not None:
            yield *split(path), file

    def move_below(self, old: str, new: str) -> None:
        """Move all names below a directory to its new path. The files keep their inode numbers."""
        for directory in [d for d in self._directories if is_in(d, old)]:
            moved = new + directory[len(old) :]
            names = self._directories.pop(directory)
            self._directories[moved] = names
            for name, file in names.items():
                if file is not None:
                    file.set_path(join(moved, name))

    def forget_below(self, path: str) -> None:
        """Forget all changed names below a path, but not the path itself."""
        for directory, name, file in self.below(path):
            if join(directory, name) == path:
                continue
            if file is None:
                self.reveal(directory, name)
            else:
                self.unname(file)
