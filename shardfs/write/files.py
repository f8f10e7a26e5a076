"""Inodes and names of files that were created or changed on a writable mount."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections import OrderedDict
from types import MappingProxyType
from typing import TYPE_CHECKING

from shardfs.model.kinds import NameKind, compression, is_in
from shardfs.vfs.inodes import CREATED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardfs.vfs.chunk_dirs import Target
    from shardfs.write.buffers import Buffer
    from shardfs.write.pending import Version
    from shardfs.write.stored import Stored

MAX_SETTLED = 65_536
"""Maximum number of files whose inode number, times and mode are kept although the source shows the same contents."""


class WritableFile:
    """An inode. It has at most one name. Without a name it lives until no handle or kernel reference is left.

    Attributes:
        dirty: the buffer has bytes that are neither in the journal nor in the store.
        refused: these bytes could not be saved, and the writer got the error.
        superseded: the source's document differs from the one written here or cached by the kernel; `frozen` has the
            former, or (None) the tree.
        last_path: the path that a file without a name had last.
        stored: what the source had for a chunk whose size and time are those of this file; None if that was not noted.

    The contents are in the first of these places that is set: `buffer` (being written), `frozen` (a fixed copy), the
    journal (`version`), `fd`, or the tree, as chunk `target` or as inode number `base`.
    """

    __slots__ = (
        "base", "buffer", "dirty", "fd", "frozen", "handles", "kind", "known_size", "last_path", "lookups", "mode",
        "mtime_ns", "name", "number", "parent", "refused", "spent", "stored", "superseded", "target", "version",
        "writers",
    )  # fmt: skip

    def __init__(self, number: int, kind: NameKind, target: Target | None = None) -> None:
        self.number, self.kind, self.target = number, kind, target
        self.parent: str | None = None
        self.name = b""
        self.last_path = ""
        self.mode = self.mtime_ns = self.known_size = 0
        self.buffer: Buffer | None = None
        self.frozen: bytes | None = None
        self.version: Version | None = None
        self.stored: Stored | None = None
        self.fd, self.base = -1, 0
        self.spent: list[int] = []
        self.dirty = self.refused = self.superseded = False
        self.handles = self.writers = self.lookups = 0

    @property
    def path(self) -> str | None:
        """Path on the mount; None if the file has no name any more."""
        return None if self.parent is None else join(self.parent, self.name)

    @property
    def saved_path(self) -> str | None:
        """Path at which a close saves the file: that of a compressed chunk is without the suffix."""
        path = self.path
        return path.removesuffix(compression(path)) if path and self.kind is NameKind.COMPRESSED else path

    @property
    def is_settled(self) -> bool:
        """Whether the tree shows the same contents without this file."""
        return self.version is None and self.buffer is None and not self.writers

    @property
    def is_lost(self) -> bool:
        """Whether the file has neither a name nor contents anywhere."""
        version = self.version is not None and self.version.data is not None
        held = self.buffer is not None or self.frozen is not None or self.fd >= 0
        return self.parent is None and not held and not version

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
            return self.known_size if self.version.stored else self.version.data.size
        return os.fstat(self.fd).st_size if self.fd >= 0 else self.known_size

    def drop_buffer(self) -> None:
        """Release the buffer, with all bytes that are not saved."""
        if self.buffer is not None:
            self.buffer.close()
            self.buffer = None

    def leave_disk(self) -> None:
        """Stop using `fd` for the contents. Descriptors are closed once no handle is open: a read may still use one."""
        if self.fd >= 0:
            self.spent.append(self.fd)
            self.fd = -1
        while self.spent and not self.handles:
            os.close(self.spent.pop())


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


def stale(number: int) -> OSError:
    """Return an OSError (ESTALE) for an inode number without a file. The kernel then looks up the name again."""
    return OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(number))


_NO_NAMES: Mapping[bytes, WritableFile | None] = MappingProxyType({})


class Files:
    """All files by inode number and by name. Callers hold one common lock.

    A name with the value None is hidden: the tree has an entry of that name, and the mount does not show the entry.
    """

    def __init__(self) -> None:
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
        """Create a file without a name; call `name` next."""
        return WritableFile(number or next(self._numbers), kind, target)

    def name(self, file: WritableFile, parent: str, name: bytes) -> None:
        """Give a file without a name a name, in place of any file with that name."""
        file.parent, file.name = parent, name
        self.by_number[file.number] = file
        self._directories.setdefault(parent, {})[name] = file

    def in_directory(self, path: str) -> Mapping[bytes, WritableFile | None]:
        """Return the changed names in a directory."""
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
        if file.parent is not None:
            self._free_name(file.parent, file.name, file)
            file.last_path = join(file.parent, file.name)
        file.parent = None
        self._settled.pop(file.number, None)
        self.let_go(file)

    def rename(self, file: WritableFile, parent: str, name: bytes) -> None:
        """Move a file to another name, in place of any file with that name."""
        if file.parent is not None:
            self._free_name(file.parent, file.name, file)
        file.base = 0
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
        if file.parent is None and not file.handles and not file.lookups:
            file.drop_buffer()
            file.leave_disk()
            self.by_number.pop(file.number, None)

    def settle(self, file: WritableFile) -> list[WritableFile]:
        """Record that the source shows the same contents as this file.

        Return the least recently settled files beyond `MAX_SETTLED`, for the caller to forget.
        """
        self._settled[file.number] = file
        self._settled.move_to_end(file.number)
        gone: list[WritableFile] = []
        for number in list(itertools.islice(self._settled, max(len(self._settled) - MAX_SETTLED, 0))):
            old = self._settled.pop(number)
            if old.is_settled and not old.handles:
                gone.append(old)
        return gone

    def below(self, path: str) -> Iterator[tuple[str, bytes, WritableFile | None]]:
        """Yield directory, name and file (None: hidden) of all names at and below a path."""
        inside = f"{path}/" if path else ""
        for directory, names in list(self._directories.items()):
            if directory == path or directory.startswith(inside):
                for name, file in list(names.items()):
                    yield directory, name, file
        file = self.at(path) if path else None
        if file is not None and file.parent is not None:
            yield file.parent, file.name, file

    def move_below(self, old: str, new: str) -> None:
        """Move all names below a directory to its new path. The files keep their inode numbers."""
        for directory in [d for d in self._directories if is_in(d, old)]:
            moved = new + directory[len(old) :]
            names = self._directories[moved] = self._directories.pop(directory)
            for file in names.values():
                if file is not None:
                    file.parent = moved

    def forget_below(self, path: str) -> None:
        """Forget all changed names below a path, but not the path itself."""
        for directory, name, file in self.below(path):
            if join(directory, name) == path:
                continue
            if file is None:
                self.reveal(directory, name)
            else:
                self.unname(file)
