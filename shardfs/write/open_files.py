"""Open files of a writable mount: their handles, and the files of the tree that become changeable."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from shardfs.model.errors import CorruptShardError
from shardfs.model.kinds import NameKind, compression
from shardfs.vfs.chunk_dirs import NameMeaning
from shardfs.vfs.inodes import CREATED
from shardfs.write.file_contents import Part
from shardfs.write.files import join, split, stale
from shardfs.write.overlay import MAX_NAME

if TYPE_CHECKING:
    from shardfs.storage.writers.local_directory import LocalDirectory
    from shardfs.write.files import WritableFile


@dataclass(eq=False, slots=True)
class Handle:
    """An open file. `seen` is the number of the newest publishing error already reported (`Failures.seen`).

    `file` is None for a file of the tree that is open for reading only and was not changed.
    """

    number: int
    file: WritableFile | None
    writes: bool = False
    seen: int = 0


class OpenFiles(Part):
    """The handles of a mount. Thread-safe. `names.lock` guards them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.handles: dict[int, Handle] = {}
        self._next_handle = count(1)
        self._readers: dict[int, set[Handle]] = {}  # those without a file, by the inode number of the tree

    # ---- handles ----

    def writable(self, handle: int) -> WritableFile:
        """Return the file of a handle. Raise OSError (EBADF) if the handle is not open for writing."""
        opened = self.handles[handle]
        if opened.file is None or not opened.writes:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return opened.file

    def add(self, file: WritableFile, flags: int) -> int:
        """Return a new handle of a file; `flags` as for open(2). The caller holds the lock.

        Of `flags`, only the access mode counts. The bytes of a file whose name was replaced are loaded first. Raise
        OSError: ESTALE if the bytes are gone, and the errors of `FileContents.load`.
        """
        if file.is_lost:
            raise stale(file.number)
        if file.path is None and not file.handles and file.fd < 0 and file.frozen is None:
            self._contents.load(file)  # its name was just replaced: the journal may soon release the bytes
        handle = next(self._next_handle)
        writes = flags & os.O_ACCMODE != os.O_RDONLY
        newest = self._pending.failures.seen(file.saved_path or "")
        self.handles[handle] = Handle(file.number, file, writes, newest)
        file.add_handle(writes=writes)
        return handle

    def add_reader(self, number: int) -> int:
        """Return a new handle that only reads the file with this inode number, changed or not.

        Raise OSError (ESTALE).
        """
        inode = self._files.by_number.get(number)
        if inode is not None and inode.kind is NameKind.PLAIN and self._writer.local:
            return self.add_known(number, os.O_RDONLY)[1]
        with self._names.lock:
            inode = self._files.by_number.get(number)
            if inode is not None:
                return self.add(inode, os.O_RDONLY)
            self._require_shown(number)
            handle = next(self._next_handle)
            opened = self.handles[handle] = Handle(number, None)
            self._readers.setdefault(number, set()).add(opened)
        return handle

    def remove_reader(self, opened: Handle) -> None:
        """Forget a handle without a file. The caller holds the lock."""
        readers = self._readers[opened.number]
        readers.remove(opened)
        if not readers:
            del self._readers[opened.number]

    def add_known(self, number: int, flags: int) -> tuple[WritableFile, int]:
        """Return the file with this inode number, ready for changes, and a handle. Raise as `adopt` and `add`.

        A passed-through file is open on the disk.
        """
        how = os.O_RDWR if flags & (os.O_ACCMODE | os.O_TRUNC) else os.O_RDONLY
        while True:
            file = self.adopt(number, how)
            with self._names.lock:
                if file.kind is not NameKind.PLAIN or file.fd >= 0 or not self._writer.local:
                    return file, self.add(file, flags)

    # ---- files ----

    def directory_to_change(self, number: int) -> str:
        """Return the path of a directory in which the caller is about to change a name.

        Raise FileNotFoundError if the inode number has no path any more, and NotADirectoryError for a file.
        """
        path = self._names.path_of(number)
        self._names.numbers[path] = number
        self._names.times.pop(number, None)
        file = self._files.by_number.get(number)
        if file is not None and file.kind is not NameKind.DIRECTORY:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return path

    def classify_to_write(self, directory: str, name: bytes) -> NameMeaning:
        """Return the kind and target of a name.

        Raise OSError if files with this name cannot be created or written: ENAMETOOLONG, EPERM, EROFS, and the errors
        of `WriteBuffer.require_writable`.
        """
        if len(name) > MAX_NAME:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), os.fsdecode(name))
        meaning = self._names.classify_name(directory, name)
        kind = meaning.kind if meaning.kind is not NameKind.DIRECTORY else NameKind.HIDDEN
        require_changeable(kind, join(directory, name))
        if meaning.target is not None:
            self._pending.require_writable(meaning.target)
        elif meaning.kind is NameKind.COMPRESSED:
            self.classify_to_write(directory, name.removesuffix(compression(os.fsdecode(name)).encode()))
        elif meaning.kind is NameKind.ORPHAN and self._documents.is_in_a_file(directory):
            why = "the array is one file, which gets no further chunks"
            raise OSError(errno.EROFS, why, join(directory, name))
        return meaning

    def _require_shown(self, number: int) -> None:
        """Raise OSError (ESTALE) if the name of an inode number of the tree was removed or reused."""
        if number >= CREATED:
            raise stale(number)
        parent, name = split(self._names.path_of(number))
        if name in self._files.in_directory(parent):
            raise stale(number)

    def adopt(self, number: int, flags: int | None = os.O_RDWR) -> WritableFile:
        """Return the file of an inode number, for a change. A file of the tree becomes a changed one.

        A passed-through file is opened on the disk with `flags`; None does not open it. Raise OSError: EISDIR, ESTALE
        if its name was removed or reused, and as `classify_to_write`.
        """
        file = self._files.by_number.get(number) or self._adopt_from_tree(number)
        if file.kind is NameKind.DIRECTORY:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), file.path)
        if file.kind is NameKind.PLAIN and flags is not None and (disk := self._writer.disk) is not None:
            self._open_on_disk(disk, file, flags)
        return file

    def _adopt_from_tree(self, number: int) -> WritableFile:
        self._require_shown(number)
        entry, path = self._source_tree.attributes(number), self._names.path_of(number)
        if entry.directory:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        parent, name = split(path)
        meaning = self.classify_to_write(parent, name)
        former = self._source_tree.target_of(number) if meaning.kind is NameKind.ORPHAN else None
        if former is not None:  # outside of the new shape, but still in its shard
            meaning = NameMeaning(NameKind.CHUNK, former)
        with self._names.lock:
            file = self._files.by_number.get(number)
            if file is None:
                self._require_shown(number)
                file = self._files.new(parent, name, meaning.kind, meaning.target, number)
                mode = self._names.modes.get(number, entry.mode)
                file.set_status(size=entry.size, mtime_ns=entry.mtime_ns, mode=mode)
        return file

    def _open_on_disk(self, disk: LocalDirectory, file: WritableFile, flags: int) -> None:
        with self._names.renaming():
            if file.fd >= 0 and (flags == os.O_RDONLY or _may_write(file.fd)):
                return
            if file.path is None:
                raise stale(file.number)
            fd = disk.open_file(file.path, flags)
            file.use_disk(fd)

    def keep_readable(self, number: int, *, replaced: bool = False) -> None:
        """Keep an open file's bytes readable before its name is unlinked or replaced. Called without the lock held.

        With `replaced`, another file gets the name. A process that has looked up the old file may then be about to open
        it, so a passed-through file is kept open for it, too. The bytes of a damaged chunk, which nobody can read, are
        given up. Raise OSError if they cannot be read: the name must then stay.
        """
        file = self._files.by_number.get(number)
        if number in self._readers:  # also if the file was renamed since
            file = self.adopt(number, None)
            with self._names.lock:
                for opened in self._readers.pop(number, ()):
                    opened.file = file
                    file.add_handle()
        if file is None:
            return
        if file.kind is NameKind.PLAIN and self._writer.local:
            if file.handles or (replaced and file.lookups):
                self.adopt(number, os.O_RDONLY)
        elif file.handles:
            with suppress(CorruptShardError):
                self._contents.load(file)


_REFUSED = {
    NameKind.HIDDEN: (errno.EPERM, "shards or their directories are stored under this name; choose another name"),
    NameKind.FIXED: (
        errno.EROFS,
        "the layout shows this directory at another path than the source; use a mount without --layout",
    ),
}


def require_changeable(kind: NameKind, path: str) -> None:
    """Raise OSError (EPERM, EROFS) if a name of this kind can be neither created nor changed."""
    if kind in _REFUSED:
        raise OSError(*_REFUSED[kind], path)


def _may_write(fd: int) -> bool:
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
