"""Names of a writable mount: their inode numbers, paths and kinds, and the locks under which they change."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import ExitStack, contextmanager, suppress
from operator import attrgetter
from typing import TYPE_CHECKING

from shardfs.model.errors import NOT_FOUND, CorruptShardError
from shardfs.model.kinds import OWN_PREFIX, NameKind, is_scratch
from shardfs.storage.cache import nothing
from shardfs.vfs.chunk_dirs import NameMeaning
from shardfs.vfs.inodes import CREATED, ROOT
from shardfs.write.files import Files, put_bounded, split
from shardfs.write.rw_lock import RWLock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from shardfs.vfs.tree import Tree
    from shardfs.write.documents import Documents
    from shardfs.write.files import WritableFile

JOURNALED = (NameKind.CHUNK, NameKind.ORPHAN, NameKind.SCRATCH)  # a tuple: hashing an enum member is a Python call


class Names:
    """Paths, inode numbers and kinds of the names on a mount. Thread-safe.

    Paths are paths on the mount; numbers are inode numbers, as in `Tree`. `lock` guards `files` and all tables here.

    Attributes:
        files: the files that were created or changed on the mount.
        gate: held shared while files are created, and exclusively while a document or directory changes what names are.
        numbers: inode numbers under which the kernel knows directories, by path.
        modes, times: set on the mount for files of the tree; times of directories hold until an entry changes.
        source_tree: the tree of the source, without the changes of the mount.
        before_waiting: to be called before a thread waits. It may raise `Postponed`: the request is then repeated.
        hooks: the server's, shared with the tree of the source.
    """

    def __init__(self, source_tree: Tree, documents: Documents, waiting: Callable[[], None] = nothing) -> None:
        self.source_tree = source_tree
        self.documents = documents
        self.before_waiting = waiting
        source_tree.follows_documents = False  # paths and numbers are cached here
        source_tree.datasets.trees.is_writable = True
        self.hooks = source_tree.hooks
        self.hooks.names_changed = self.invalidate_all
        self.lock = threading.RLock()
        self._rename_lock = threading.RLock()
        self.gate = RWLock(waiting)
        self.files = Files(self.lock)
        self.numbers: dict[str, int] = {}
        self.modes: dict[int, int] = {}
        self.times: dict[int, int] = {}
        self._paths: dict[int, str] = {}
        self._source_numbers: dict[str, int] = {}

    @contextmanager
    def renaming(self) -> Iterator[None]:
        """Hold the lock under which a passed-through file is renamed on the mount and on the disk as one step.

        The holder may wait for a disk. `lock` may be acquired inside, never the other way round.
        """
        self._acquire(self._rename_lock)
        try:
            yield
        finally:
            self._rename_lock.release()

    @contextmanager
    def writeback(self, *files: WritableFile | None) -> Iterator[None]:
        """Hold `writeback` of files that are about to be renamed or removed. No other lock may be held before."""
        with ExitStack() as stack:
            for file in sorted(filter(None, files), key=attrgetter("number")):
                self._acquire(file.writeback)
                stack.callback(file.writeback.release)
            yield

    def _acquire(self, lock: threading.RLock) -> None:
        """Acquire a lock whose holder may wait for a disk."""
        if not lock.acquire(blocking=False):
            self.before_waiting()
            lock.acquire()

    # ---- numbers and paths ----

    def path_of(self, number: int) -> str:
        """Return the path of an inode number. Raise FileNotFoundError if the number has no path."""
        if number == ROOT:
            return ""
        file = self.files.by_number.get(number)
        path = file.path if file is not None else self._paths.get(number)
        if path is None and file is None and number < CREATED:
            path = self.source_tree.shown_path(number) or None
            if path is not None:
                put_bounded(self._paths, number, path)
        if path is None:
            raise FileNotFoundError(errno.ENOENT, "the file was removed or replaced", str(number))
        return path

    def shown_path(self, number: int) -> str:
        """Return the path of an inode number; empty if the number has none."""
        try:
            return self.path_of(number)
        except FileNotFoundError:
            return ""

    def source_number(self, path: str) -> int | None:
        """Return the inode number of a directory in the source's tree; None if the source has no such directory.

        Raise OSError or CorruptShardError if that cannot be found out.
        """
        number = self._source_numbers.get(path)
        if number is not None:
            return number
        with suppress(*NOT_FOUND):
            entry = self.source_tree.resolve(path)
            if entry.directory:  # a missing directory is not recorded, because it may appear at any time
                put_bounded(self._source_numbers, path, entry.number)
                return entry.number
        return None

    def renew(self, path: str) -> list[str]:
        """Read the documents of a directory again. Return the shown paths of the collections there and below."""
        collections = self.source_tree.renew(path)
        self._outdate(path)
        self._paths.clear()
        self._source_numbers.clear()
        return collections

    def _outdate(self, path: str) -> None:
        """Show a layout's documents anew that depend on the documents in a directory."""
        if self.source_tree.datasets.layout is None:
            return
        for document in self.source_tree.directories.generated(path):
            directory, name = split(document)
            with self.lock:
                file = self.files.at(document)
                if file is not None and file.is_original and file.matches_source and not (file.frozen or file.handles):
                    self.files.unname(file)  # it only has another mode or time
            self.invalidate(directory, name)

    def move_below(self, old: str, new: str) -> None:
        """Move the names in a directory that was renamed in the store."""
        self._outdate(old)
        with self.lock:
            self.files.move_below(old, new)
            self.source_tree.moved(old, new)
            self._paths.clear()
            self.numbers.clear()
            self._source_numbers.clear()

    def remember(self, number: int) -> None:
        """Count one kernel reference to an inode number, also of a file created on the mount."""
        file = self.files.by_number.get(number)
        if file is not None:
            file.count_lookups(1)
        self.source_tree.remember(number)

    def forget(self, number: int, count: int) -> None:
        """Release `count` kernel references. A file without references or handles is freed."""
        file = self.files.by_number.get(number)
        if file is not None:
            with self.lock:
                file.count_lookups(-count)
                if file.kind is NameKind.PLAIN and not file.lookups and not file.handles:
                    self.files.unname(file)
                else:
                    self.files.let_go(file)
        self.source_tree.forget(number, count)

    def invalidate(self, directory: str, name: bytes) -> None:
        """Make the kernel look up a name again."""
        number = self.numbers.get(directory)
        if number is not None:
            self.hooks.invalidate(number, name)

    def invalidate_all(self, directory: str, names: Iterable[bytes]) -> None:
        """Make the kernel look up names, and all names below them, again. There may be very many names."""
        number = self.numbers.get(directory)
        if number is not None:
            self.hooks.invalidate_all(number, names)

    # ---- kinds of names ----

    def classify_name(self, directory: str, name: bytes) -> NameMeaning:
        """Return the kind of a name in a directory, and its target if the name is a chunk. The name need not exist.

        Raise OSError if documents that decide this cannot be read.
        """
        if name.startswith(OWN_PREFIX.encode()):
            return NameMeaning(NameKind.HIDDEN)
        number = self.source_number(directory)
        if number is None:
            return NameMeaning(self._kind_in_made(directory, os.fsdecode(name)))
        try:
            meaning = self.source_tree.classify_name(number, name)
        except CorruptShardError:  # damaged documents may be repaired
            return NameMeaning(NameKind.PLAIN)
        if meaning.kind is not NameKind.PLAIN:
            return meaning
        return NameMeaning(self.documents.expected.kind(directory, os.fsdecode(name)))

    def _kind_in_made(self, directory: str, name: str) -> NameKind:
        """Return the kind of a name in a directory that exists only on the mount."""
        above, number = self._nearest(directory)
        below = directory[len(above) :].strip("/").split("/")
        temporary = any(map(is_scratch, below)) and self.has_scratch(above)
        if temporary or (any(n.startswith(".") for n in below) and self.keeps_hidden(above)):
            return NameKind.SCRATCH
        first = self.source_tree.classify_name(number, os.fsencode(below[0])).kind
        if first is NameKind.PLAIN:  # an object store has no directories
            return self.documents.expected.kind(directory, name)
        return NameKind.SCRATCH if first is NameKind.SCRATCH or is_scratch(name) else NameKind.ORPHAN

    def _nearest(self, path: str) -> tuple[str, int]:
        """Return path and inode number of the closest directory in the tree: the path itself or one above it."""
        while (number := self.source_number(path)) is None:
            path = path.rpartition("/")[0]
        return path, number

    def is_plain_in_source(self, path: str) -> bool:
        """Return whether the tree takes a file, or the directory above that it lacks, for one that no dataset has."""
        above, number = self._nearest(path.rpartition("/")[0])
        below = path[len(above) :].strip("/").split("/")
        return self.source_tree.classify_name(number, os.fsencode(below[0])).kind is NameKind.PLAIN

    def has_scratch(self, directory: str) -> bool:
        """Return whether temporary files in the directory are kept from the store, as in a sharded dataset."""
        return self.classify_name(directory, b"x.partial").kind is NameKind.SCRATCH

    def keeps_hidden(self, directory: str) -> bool:
        """Return whether hidden directories in the directory are kept from the store.

        Outside of sharded datasets, a hidden directory may be a group or a directory of the user.
        """
        number = self.source_number(directory)
        with suppress(CorruptShardError):
            return number is not None and self.source_tree.chunks_in(number) is not None
        return False
