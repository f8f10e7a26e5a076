"""Files that were made or changed on a mount: where their bytes are, who has them open, what they are called."""

from __future__ import annotations

import itertools
import os
import stat
from collections import OrderedDict
from typing import TYPE_CHECKING

from shardfs.vfs.inodes import CREATED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardfs.model.kinds import NameKind
    from shardfs.vfs.chunk_dirs import Target
    from shardfs.write.buffers import Buffer
    from shardfs.write.pending import Version

MAX_SETTLED = 65_536
"""Files that are as the source has them by now, of which number, times and mode are kept all the same."""


class WritableFile:
    """An inode. It has at most one name; without one it lives for as long as somebody has it open.

    `twin`: the file with the compressed bytes of this chunk, which can be read, but is not listed, and has no name.
    `is_link`: a symbolic link of the source, which is passed through; it is never open.
    `dirty`: something was written that nobody has put in a safe place; `refused`: and its writer was told that it
    cannot be. `merged`: the source has another document by now than was written, or than the kernel knows: `frozen`,
    None if there is none.

    Its bytes are, in this order: in `buffer`, being written; `frozen`, as they were; in the journal, `version`; on
    `fd`; or those that the tree shows of `target`, or of the number `base`.
    """

    __slots__ = (
        "base", "buffer", "dirty", "fd", "frozen", "handles", "is_link", "kind", "known_size", "lookups", "merged",
        "mode", "mtime_ns", "name", "number", "parent", "refused", "spent", "target", "twin", "version", "writers",
    )  # fmt: skip

    def __init__(self, number: int, kind: NameKind, target: Target | None = None) -> None:
        self.number, self.kind, self.target = number, kind, target
        self.parent: str | None = None
        self.name = b""
        self.mode = self.mtime_ns = self.known_size = 0
        self.twin: WritableFile | None = None
        self.buffer: Buffer | None = None
        self.frozen: bytes | None = None
        self.version: Version | None = None
        self.fd, self.base = -1, 0
        self.spent: list[int] = []
        self.dirty = self.refused = self.is_link = self.merged = False
        self.handles = self.writers = self.lookups = 0

    @property
    def path(self) -> str | None:
        """Where it is shown; None once it has no name any more."""
        return None if self.parent is None else join(self.parent, self.name)

    @property
    def is_settled(self) -> bool:
        """Whether the source shows the same file by itself."""
        return self.version is None and self.buffer is None and not self.writers

    @property
    def is_lost(self) -> bool:
        """Whether its name was given away, and its bytes are nowhere."""
        version = self.version is not None and self.version.data is not None
        held = self.buffer is not None or self.frozen is not None or self.fd >= 0 or self.twin is not None
        return self.parent is None and not held and not version

    def unsaved(self) -> tuple[Buffer, str] | None:
        """What was written and nobody has put in a safe place yet, and the path; None if there is no such thing."""
        return (self.buffer, self.path) if self.dirty and self.buffer is not None and self.path is not None else None

    def size(self) -> int:
        """Its bytes, if they need no look at the source."""
        if self.buffer is not None:
            return self.buffer.size
        if self.frozen is not None:
            return len(self.frozen)
        if self.version is not None and self.version.data is not None:
            return self.version.data.size
        return os.fstat(self.fd).st_size if self.fd >= 0 else self.known_size

    def close(self) -> None:
        """Give back what it holds."""
        if self.buffer is not None:
            self.buffer.close()
            self.buffer = None
        self.leave_disk()

    def leave_disk(self) -> None:
        """`fd` is not where its bytes are any more. It is closed as soon as nobody can be using it."""
        if self.fd >= 0:
            self.spent.append(self.fd)
            self.fd = -1
        while self.spent and not self.handles:
            os.close(self.spent.pop())


def shown_mode(mode: int, directory: bool = False) -> int:
    """What `Attributes` say of permission bits: 0 if they are the usual ones, else all of the mode."""
    usual, kind = (0o755, stat.S_IFDIR) if directory else (0o644, stat.S_IFREG)
    bits = stat.S_IMODE(mode)
    return 0 if bits == usual else kind | bits


def join(directory: str, name: bytes | str) -> str:
    """The path of a name in a directory."""
    text = os.fsdecode(name)
    return f"{directory}/{text}" if directory else text


class Files:
    """All of them, by number and by name. Names that the tree has, and the mount has not any more, are None here.

    Its users hold one lock.
    """

    def __init__(self) -> None:
        self.by_number: dict[int, WritableFile] = {}
        self._directories: dict[str, dict[bytes, WritableFile | None]] = {}
        self._numbers = itertools.count(CREATED)
        self._settled: OrderedDict[int, WritableFile] = OrderedDict()

    def new(
        self, parent: str, name: bytes, kind: NameKind, target: Target | None = None, number: int = 0
    ) -> WritableFile:
        """A file by that name, which takes the place of what was called so. Its number was never used before."""
        file = self.unnamed(kind, target, number)
        self.name(file, parent, name)
        return file

    def unnamed(self, kind: NameKind, target: Target | None = None, number: int = 0) -> WritableFile:
        """A file that is to get a name."""
        return WritableFile(number or next(self._numbers), kind, target)

    def name(self, file: WritableFile, parent: str, name: bytes) -> None:
        """Give a file its first name."""
        file.parent, file.name = parent, name
        self.by_number[file.number] = file
        self.names(parent)[name] = file

    def directory(self, path: str) -> dict[bytes, WritableFile | None] | None:
        """What is known of the names in a directory; None if nothing is."""
        return self._directories.get(path)

    def names(self, path: str) -> dict[bytes, WritableFile | None]:
        """The same, to be changed."""
        return self._directories.setdefault(path, {})

    def at(self, path: str) -> WritableFile | None:
        """The file of this name."""
        parent, _, name = path.rpartition("/")
        return self._directories.get(parent, {}).get(os.fsencode(name))

    def hide(self, parent: str, name: bytes) -> None:
        """The tree shows something of this name, and the mount shall not."""
        self.names(parent)[name] = None

    def unname(self, file: WritableFile) -> None:
        """Take its name from a file. It goes if nobody has it open."""
        if file.parent is not None:
            names = self._directories.get(file.parent, {})
            if names.get(file.name) is file:
                del names[file.name]
                if not names:
                    del self._directories[file.parent]
        file.parent = None
        self._settled.pop(file.number, None)
        self.let_go(file)

    def reveal(self, parent: str, name: bytes) -> None:
        """The tree's own file of this name, if there is one, is shown again."""
        names = self._directories.get(parent)
        if names is not None and name in names and names[name] is None:
            del names[name]
            if not names:
                del self._directories[parent]

    def rename(self, file: WritableFile, parent: str, name: bytes) -> None:
        """Another name for a file, which takes the place of what was called so."""
        if file.parent is not None:
            old = self._directories[file.parent]
            del old[file.name]
            if not old:
                del self._directories[file.parent]
        file.parent, file.name, file.base = parent, name, 0
        self.names(parent)[name] = file

    def unname_all(self) -> None:
        """All names are as the tree has them. Who knows a number goes on with its file."""
        for file in self.by_number.values():
            file.parent = None
        self._directories.clear()

    def let_go(self, file: WritableFile) -> None:
        """Forget a file that has neither a name nor anybody who knows it."""
        if file.parent is None and not file.handles and not file.lookups:
            file.close()
            self.by_number.pop(file.number, None)

    def settle(self, file: WritableFile) -> list[WritableFile]:
        """The source shows the file by itself; which files are forgotten for that, as there are too many."""
        self._settled[file.number] = file
        self._settled.move_to_end(file.number)
        gone: list[WritableFile] = []
        for number in list(itertools.islice(self._settled, max(len(self._settled) - MAX_SETTLED, 0))):
            old = self._settled.pop(number)
            if old.is_settled and not old.handles:
                gone.append(old)
        return gone

    def below(self, path: str) -> Iterator[tuple[str, bytes, WritableFile | None]]:
        """All names at and below a path: directory, name, file."""
        inside = f"{path}/" if path else ""
        for directory, names in list(self._directories.items()):
            if directory == path or directory.startswith(inside):
                for name, file in list(names.items()):
                    yield directory, name, file
        file = self.at(path) if path else None
        if file is not None and file.parent is not None:
            yield file.parent, file.name, file

    def move_below(self, old: str, new: str) -> None:
        """A directory has another name: what is in it keeps its files."""
        for directory in [d for d in self._directories if d == old or d.startswith(f"{old}/")]:
            moved = new + directory[len(old) :]
            names = self._directories[moved] = self._directories.pop(directory)
            for file in names.values():
                if file is not None:
                    file.parent = moved

    def forget_below(self, path: str) -> None:
        """Nothing is known any more of the names below a path."""
        for directory, name, file in self.below(path):
            if join(directory, name) == path:
                continue
            if file is None:
                self.reveal(directory, name)
            else:
                self.unname(file)
