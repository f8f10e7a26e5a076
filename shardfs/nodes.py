"""What lies in the store as it is: files, directories, rewritten documents; their numbers, and how long they stay."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardfs.chunk_tree import ChunkTree
    from shardfs.model import Collection, Dataset

ROOT = 1
TABLE_END = 1 << 48
"""Numbers of nodes are below; those from here on are arithmetic (`ChunkTree`)."""

RECENT_NODES = 65_536
"""Nodes that were handed out without the kernel (yet) counting on them."""


class Node:
    """A file or directory of the store."""

    __slots__ = ("lookups", "number", "path")

    def __init__(self, number: int, path: str) -> None:
        self.number, self.path, self.lookups = number, path, 0


class File(Node):
    """Shown as it is stored."""

    __slots__ = ()


class Document(Node):
    """A metadata document that is shown otherwise than stored."""

    __slots__ = ("data",)

    def __init__(self, number: int, path: str, data: bytes) -> None:
        super().__init__(number, path)
        self.data = data


@dataclass(frozen=True)
class Content:
    """What a directory turned out to hold.

    `below` are collections whose directory is further down: the path there, in components, and the collection.
    """

    dataset: Dataset | None = None
    chunks: ChunkTree | None = None
    below: Mapping[str, Sequence[tuple[tuple[str, ...], Collection]]] = field(default_factory=dict)


class Directory(Node):
    """A directory of the store, or one that exists because a collection lies in it or below. `content` once opened."""

    __slots__ = ("content", "inherited")

    def __init__(self, number: int, path: str, inherited: Sequence[tuple[tuple[str, ...], Collection]] = ()) -> None:
        super().__init__(number, path)
        self.inherited = inherited
        self.content: Content | None = None

    def child_path(self, name: str) -> str:
        """The path in the store of something in this directory."""
        return f"{self.path}/{name}" if self.path else name


def number_of(path: str) -> int:
    """The number for a path: the same in every mount, unless two paths share one."""
    digest = hashlib.blake2b(os.fsencode(path), digest_size=6).digest()
    return int.from_bytes(digest, "little") % (TABLE_END - 2) + 2


class NodeTable:
    """Nodes by number. A node is kept for as long as somebody counts on it, and for a while after it was handed out."""

    def __init__(self, root: Directory) -> None:
        self._kept: dict[int, Node] = {root.number: root}
        self._recent: OrderedDict[int, Node] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, number: int) -> Node:
        """Raise FileNotFoundError for a number nobody counts on any more."""
        node = self._kept.get(number) or self._recent.get(number)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "no such number", str(number))
        return node

    def known(self, path: str) -> Node | None:
        """The node for a path, if there is one."""
        number = number_of(path)
        node = self._kept.get(number) or self._recent.get(number)
        return node if node is not None and node.path == path else None

    def intern(self, path: str, make: Callable[[int], Node]) -> Node:
        """The node for a path: the known one, or a new one. Its number follows from the path."""
        number = number_of(path)
        while True:
            node = self._kept.get(number) or self._recent.get(number)
            if node is None:
                node = make(number)
                with self._lock:
                    self._recent[number] = node
                    while len(self._recent) > RECENT_NODES:
                        self._recent.popitem(last=False)
                return node
            if node.path == path:
                return node
            number = number % (TABLE_END - 1) + 2  # two paths with one hash: about never

    def remember(self, number: int) -> None:
        """One more counts on the node."""
        with self._lock:
            node = self._kept.get(number) or self._recent.pop(number, None)
            if node is not None:
                self._kept[number] = node
                node.lookups += 1

    def forget(self, number: int, count: int) -> None:
        """`count` less."""
        with self._lock:
            node = self._kept.get(number)
            if node is None or number == ROOT:
                return
            node.lookups -= count
            if node.lookups <= 0:
                del self._kept[number]
