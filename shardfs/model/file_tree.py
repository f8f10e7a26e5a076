"""The file tree that the server shows to the kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator

    from shardfs.model.attributes import Attributes
    from shardfs.model.listing import Batch, EntryRow
    from shardfs.model.values import U64


class Listable(Protocol):
    """A tree whose directories can be listed."""

    def small_listing(self, number: int, limit: int) -> list[EntryRow] | None:
        """All entries of a directory, if they are at most `limit` and the tree can say so cheaply; else None."""

    def scan(self, number: int, cookie: int = 0) -> Iterator[Batch]:
        """The entries of a directory behind `cookie`, without `.` and `..`.

        Cookies rise strictly. A later scan gives an unchanged entry the same cookie again.
        """


class FileTree(Listable, Protocol):
    """Files and directories by number. Thread-safe. Methods that may fail raise OSError or ShardfsError.

    Numbers are below `control.DIRECTORY`. The kernel's references to numbers below `inodes.TABLE_END` and from
    `inodes.CREATED` on are counted with `remember`. `forget` is called for all numbers.
    """

    hooks: KernelHooks
    """The server sets the attributes of this object."""

    @property
    def note_read(self) -> Callable[[int], None] | None:
        """To be called with the number of a file whose first bytes are read without `read`. None: not needed."""

    def lookup(self, parent: int, name: bytes) -> Attributes:
        """The entry `name` of the directory `parent`. Raise FileNotFoundError if there is none."""

    def attributes(self, number: int) -> Attributes:
        """The attributes of a file or directory. Raise OSError (ESTALE) for a number that is not used any more."""

    def chunk_number(self, parent: int, name: bytes) -> int | None:
        """The number that a chunk with this name has, if it exists; None if the name is none of a chunk."""

    def is_chunk(self, number: int) -> bool:
        """Whether a number is that of a chunk, which need not exist."""

    def read(self, number: int, offset: int, size: int) -> bytes | memoryview:
        """At most `size` bytes from `offset`; fewer only at the end of the file."""

    def remember(self, number: int) -> None:
        """Count one more reference of the kernel to this number."""

    def forget(self, number: int, count: int) -> None:
        """Count `count` references less."""

    def xattrs(self, number: int) -> dict[str, bytes]:
        """The extended attributes that are listed."""

    def costly_xattrs(self, number: int) -> dict[str, bytes]:
        """The extended attributes that are too expensive to be listed: `user.shardfs.live` and `user.shardfs.dead`."""

    def statvfs(self) -> os.statvfs_result | None:
        """Size and free space of the store; None if unknown."""

    def shown_path(self, number: int) -> str:
        """The path of a file on the mount, for the access log."""


@dataclass
class KernelHooks:
    """What the server sets on a tree, for the tree to call. Nothing happens without a server.

    Attributes:
        resized: to be called with the numbers of files that another program may have made longer or shorter, before any
            of their new bytes are returned. Set on a read-only tree.
        former_resized: as `resized`, for chunks of an array in a former shape.
        names_changed: to be called with the path of a directory, and with names there that stand for other files now,
            as do all names below them. Set by the tree itself.
        reshaped: to be called with the numbers of files whose bytes and sizes have changed without a request for them.
            Does not block. Set on a writable tree, like those that follow.
        invalidate: to be called when a name in a directory has changed without a request.
        invalidate_all: as `invalidate`, for many names and all names below them. Set on all trees.
        invalidate_content: to be called when bytes or attributes of a file have changed without a request. Neither this
            nor `invalidate` blocks; both may be called anywhere.
    """

    resized: Callable[[U64], None] = lambda numbers: None
    former_resized: Callable[[U64], None] = lambda numbers: None
    names_changed: Callable[[str, Iterable[bytes]], None] = lambda directory, names: None
    reshaped: Callable[[U64], None] = lambda numbers: None
    invalidate: Callable[[int, bytes], None] = lambda parent, name: None
    invalidate_all: Callable[[int, Iterable[bytes]], None] = lambda parent, names: None
    invalidate_content: Callable[[int], None] = lambda number: None
