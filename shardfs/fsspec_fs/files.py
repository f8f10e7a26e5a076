"""Writable files of a tree as Python file objects, and path operations on a tree."""

from __future__ import annotations

import errno
import io
import os
import secrets
from typing import TYPE_CHECKING

from shardfs.vfs.inodes import ROOT

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from shardfs.write.tree import WriteTree

MODES = {
    "r": 0,
    "w": os.O_CREAT | os.O_TRUNC,
    "x": os.O_CREAT | os.O_EXCL,
    "a": os.O_CREAT | os.O_APPEND,
}
"""First letter of a mode of Python's `open` -> flags of open(2), without those of the access."""


def flags_of(mode: str) -> int:
    """Flags of open(2) for a binary mode of Python's `open` other than "rb". Raise ValueError for other modes."""
    first, letters = mode[:1], sorted(mode[1:])
    if first not in MODES or letters not in (["b"], ["+", "b"]):
        raise ValueError(f"mode {mode!r} is none of rb, wb, xb and ab, with or without +")
    return MODES[first] | (os.O_RDWR if "+" in letters else os.O_WRONLY)


class WrittenFile(io.RawIOBase):
    """A file that is open for writing, as `io.RawIOBase` describes its methods; `write` writes all bytes.

    The constructor opens or creates the file, and raises the errors of open(2), and ValueError for a wrong mode. The
    other methods raise the errors of a mount; `close` those of `close(2)`, such as EINVAL for bytes that are no chunk.

    Without `autocommit`, a file of mode "wb" has a temporary name until `commit`, as in a transaction of fsspec.
    """

    def __init__(self, tree: WriteTree, path: str, mode: str, *, autocommit: bool = True) -> None:
        super().__init__()
        self.path = path
        self.mode = mode
        self._tree = tree
        self._reads = "+" in mode
        self._appends = mode.startswith("a")
        self._temporary = "" if autocommit or not mode.startswith("w") else f"{path}.{secrets.token_hex(16)}.partial"
        try:
            number, handle = open_file(tree, self._temporary or path, flags_of(mode))
        except BaseException:
            super().close()  # else the finalizer would call `close`, which needs a handle
            raise
        self._number = number
        self._handle = handle
        self._position = self._size() if self._appends else 0

    def _size(self) -> int:
        return self._tree.attributes(self._number).size

    def readable(self) -> bool:
        return self._reads

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = (0, self._position, self._size())[whence] if whence in (0, 1, 2) else 0
        if base + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), self.path)
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def _require_open_tree(self) -> None:
        """Raise OSError (EBADF) if `ShardFileSystem.close` has closed this file."""
        if self._tree.is_closed:
            raise OSError(errno.EBADF, "its file system is closed", self.path)

    def write(self, data: Buffer) -> int:
        self._require_open_tree()
        view = memoryview(data).cast("B")
        if self._appends:
            self._position = self._size()
        self._tree.write(self._handle, self._position, view)
        self._position += len(view)
        return len(view)

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        data = self._tree.read(self._number, self._position, len(view))
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        self._require_open_tree()
        size = self._position if size is None else size
        self._tree.truncate(self._number, size, self._handle)
        return size

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        if self._tree.is_closed:  # which has closed the file
            if (error := self._tree.unsaved.pop(self._handle, None)) is not None:
                raise error
            return
        try:
            self._tree.flush(self._handle)
        finally:
            self._tree.release(self._handle)

    def commit(self) -> None:
        """Rename the closed temporary file to its final name, and replace any file with this name.

        Does nothing for a file without a temporary name, as does `discard`.
        """
        if self._temporary:
            self._require_open_tree()
            self._tree.rename(*place(self._tree, self._temporary), *place(self._tree, self.path), noreplace=False)

    def discard(self) -> None:
        """Remove the closed temporary file."""
        if self._temporary:
            self._tree.unlink(*place(self._tree, self._temporary))


def open_file(tree: WriteTree, path: str, flags: int) -> tuple[int, int]:
    """Open a file with flags of open(2); return its number, and a handle that the caller must release.

    With O_CREAT, creates the file and its parent directories if they are missing. Raise the errors of open(2).
    """
    if not flags & os.O_CREAT:
        number = tree.resolve(path).number
        return number, tree.open(number, flags)
    parent, _, name = path.strip("/").rpartition("/")
    attributes, handle = tree.create(make_directories(tree, parent), os.fsencode(name), flags, 0o644)
    return attributes.number, handle


def make_directories(tree: WriteTree, path: str) -> int:
    """Create a directory and its parents where they are missing; return the number of the directory.

    Raise NotADirectoryError if a file is in the way, except at the end of the path: then it has the number of the file.
    """
    number = ROOT
    for part in filter(None, path.split("/")):
        name = os.fsencode(part)
        try:
            number = tree.lookup(number, name).number
        except FileNotFoundError:
            try:
                number = tree.mkdir(number, name, 0o755).number
            except FileExistsError:  # another thread has created the directory
                number = tree.lookup(number, name).number
    return number


def place(tree: WriteTree, path: str) -> tuple[int, bytes]:
    """The number of the parent directory and the name in it. Raises FileNotFoundError if there is no such directory."""
    parent, _, name = path.strip("/").rpartition("/")
    return tree.resolve(parent).number, os.fsencode(name)


def remove_tree(tree: WriteTree, parent: int, name: bytes) -> None:
    """Remove a file, or a directory with all its content. The first error ends that, and leaves the other files."""
    entry = tree.lookup(parent, name)
    if not entry.directory:
        tree.unlink(parent, name)
        return
    for batch in tree.scan(entry.number):
        for below in batch.names.tolist():
            remove_tree(tree, entry.number, below)
    tree.rmdir(parent, name)
