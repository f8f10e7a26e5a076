"""What lies in the store as it is: files, directories, rewritten documents; their numbers, and how long they stay."""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from shardfs.vfs.inodes import ROOT, TABLE_END, number_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardfs.model.arrays import Multiscale
    from shardfs.model.collection import ChunkNames, Collection
    from shardfs.model.dataset import Dataset, Scope
    from shardfs.model.shard_format import ShardFormat
    from shardfs.model.values import Coords
    from shardfs.vfs.chunk_dirs import ChunkDirs

RECENT_NODES = 65_536
"""Nodes that were handed out without the kernel (yet) counting on them."""


class Node:
    """A file or directory of the store."""

    __slots__ = ("lookups", "number", "path")

    def __init__(self, number: int, path: str) -> None:
        self.number, self.path, self.lookups = number, path, 0


class FileNode(Node):
    """Shown as it is stored."""

    __slots__ = ()


class DocumentNode(Node):
    """A metadata document that is shown otherwise than stored."""

    __slots__ = ("data",)

    def __init__(self, number: int, path: str, data: bytes) -> None:
        super().__init__(number, path)
        self.data = data


class ChunkNode(Node):
    """A chunk whose id is too large for a number by arithmetic."""

    __slots__ = ("chunks", "coords")

    def __init__(self, number: int, path: str, chunks: ChunkDirs, coords: Coords) -> None:
        super().__init__(number, path)
        self.chunks, self.coords = chunks, coords


N = TypeVar("N", bound=Node)


class CollectionAt(NamedTuple):
    """A collection, and the directory of the store in which its shards lie."""

    collection: Collection
    shards: str


Told: TypeAlias = "CollectionAt | bytes | Multiscale | None"


class Inherited(NamedTuple):
    """What a directory is told by those above.

    Args:
        below: collections, documents, images of which an array is a level, and directories (None) that belong here or
            further down: the path there, in components.
        scope: describes datasets here and further down; and the path of its own directory.
        moved: what lies below the first path in the store is shown below the second.
        closed: nothing that lies in the store here or further down is a dataset.
        cells: chunks lie here or further down as files: what they are called, and the level of names here, -1 for that
            of their prefix.
    """

    below: Sequence[tuple[tuple[str, ...], Told]] = ()
    scope: tuple[Scope, str] | None = None
    moved: tuple[str, str] = ("", "")
    closed: bool = False
    cells: tuple[ChunkNames, int] | None = None

    def shown(self, path: str) -> str:
        """The path under which something in the store is shown."""
        above, instead = self.moved
        return "/".join(filter(None, [instead, path.removeprefix(above).lstrip("/")]))


@dataclass(frozen=True)
class Content:
    """What a directory turned out to hold. `documents` are shown in place of what is stored.

    `shards` are the formats of shards in it of which the chunks are shown in another form. `closed`, `cells`: see
    `Inherited`.
    """

    dataset: Dataset | None = None
    chunks: ChunkDirs | None = None
    documents: Mapping[str, bytes] = field(default_factory=dict)
    below: Mapping[str, Sequence[tuple[tuple[str, ...], Told]]] = field(default_factory=dict)
    scope: tuple[Scope, str] | None = None
    shards: tuple[ShardFormat, ...] = ()
    moved: tuple[str, str] = ("", "")
    closed: bool = False
    cells: tuple[ChunkNames, int] | None = None

    def hides(self, name: str) -> bool:
        """Whether something of this name in the store is not shown."""
        if self.dataset is not None and (self.dataset.blank or name in self.dataset.hidden):
            return name not in self.below
        return name not in self.below and any(_leads_to_shard(format, name) for format in self.shards)

    @property
    def is_sharded(self) -> bool:
        """Whether chunks are shown here or further down, as is told here; a name proves nothing."""
        told = (
            not listed or any(isinstance(what, CollectionAt | bytes) for _, what in listed)
            for listed in self.below.values()
        )
        return self.chunks is not None or any(told)

    def inherited(self, name: str) -> Inherited:
        """What the directory `name` in this one is told."""
        return Inherited(self.below.get(name, ()), self.scope, self.moved, self.closed, self._cells_in(name))

    def _cells_in(self, name: str) -> tuple[ChunkNames, int] | None:
        """For the directory `name`, if chunks lie below it."""
        if self.cells is None:
            return None
        names, level = self.cells
        raw = os.fsencode(name)
        leads_on = raw == names.prefix if level < 0 else names.parse(level, raw) is not None
        return (names, level + 1) if leads_on and level + 1 < len(names.dims) else None


def _leads_to_shard(format: ShardFormat, name: str) -> bool:
    """Whether a shard is called so, or shards lie in a directory called so."""
    _, slash, rest = format.key(0).partition("/")
    return bool(format.key(0)) and format.shard_of(name + slash + rest) is not None


class DirectoryNode(Node):
    """A directory of the store, or one that exists because something is shown in it or below.

    `content` is known once it is opened; `inside` is the path in the store of what it shows; `file` is what a file
    describes that is shown as a directory.
    """

    __slots__ = ("content", "file", "inherited", "inside")

    def __init__(self, number: int, path: str, inherited: Inherited, file: Dataset | None = None) -> None:
        super().__init__(number, path)
        self.inherited, self.inside, self.file = inherited, path, file
        self.content: Content | None = None

    def child_path(self, name: str) -> str:
        """The path in the store of something in this directory."""
        return f"{self.inside}/{name}" if self.inside else name

    @property
    def shown(self) -> str:
        """The path under which it is shown."""
        return self.inherited.shown(self.inside)

    def move(self, scope: Scope) -> None:
        """Show what the scope says holds its data, instead of what is here. Several threads may say so at once."""
        inherited, inside = self.inherited, "/".join(filter(None, [self.path, scope.data]))
        if inherited.scope != (scope, self.path):
            self.inherited = Inherited(inherited.below, (scope, self.path), (inside, inherited.shown(self.path)))
        self.inside = inside  # last: who sees it sees the other, too


class NodeTable:
    """Nodes by number. A node is kept for as long as somebody counts on it, and for a while after it was handed out."""

    def __init__(self, root: DirectoryNode) -> None:
        self._kept: dict[int, Node] = {root.number: root}
        self._recent: OrderedDict[int, Node] = OrderedDict()
        self._moved: dict[str, int] = {}  # numbers that were made from the path that a node had before
        self._lock = threading.Lock()

    def get(self, number: int) -> Node:
        """Raise FileNotFoundError for a number nobody counts on any more."""
        node = self._kept.get(number) or self._recent.get(number)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "no such number", str(number))
        return node

    def _number(self, path: str) -> int:
        return self._moved.get(path) or number_of(path)

    def move(self, old: str, new: str) -> list[Node]:
        """All nodes of a directory that has another name now, and of what is in it, have other paths, and keep their
        numbers."""
        found = self.below(old)
        with self._lock:
            for node in found:
                self._moved.pop(node.path, None)
                node.path = new + node.path[len(old) :]
                self._moved[node.path] = node.number
        return found

    def known(self, path: str) -> Node | None:
        """The node for a path, if there is one."""
        number = self._number(path)
        node = self._kept.get(number) or self._recent.get(number)
        return node if node is not None and node.path == path else None

    def intern(self, path: str, make: Callable[[int], N], kind: type[N], number: int | None = None) -> N:
        """The node of this kind for a path: the known one, or a new one. Its number follows from the path, unless it
        is given; and what becomes something else keeps its number.
        """
        number = self._number(path) if number is None else number
        while True:
            node = self._kept.get(number) or self._recent.get(number)
            if isinstance(node, kind) and node.path == path:
                return node
            if node is None or node.path == path:
                return self._put(make(number), node)
            number = number % (TABLE_END - 1) + 2  # two paths with one hash: about never

    def _put(self, node: N, before: Node | None) -> N:
        with self._lock:
            if before is not None and node.number in self._kept:
                node.lookups = before.lookups
                self._kept[node.number] = node
                return node
            self._keep_recent(node)
        return node

    def _keep_recent(self, node: Node) -> None:
        """The lock is held."""
        self._recent[node.number] = node
        while len(self._recent) > RECENT_NODES:
            _, gone = self._recent.popitem(last=False)
            self._moved.pop(gone.path, None)

    def below(self, path: str) -> list[Node]:
        """All nodes that are known of a directory and what is in it, those above first."""
        inside = f"{path}/" if path else ""
        found = [
            n
            for n in (*self._kept.values(), *list(self._recent.values()))
            if n.path == path or n.path.startswith(inside)
        ]
        return sorted(found, key=lambda n: n.path.count("/") if n.path else -1)

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
            if node.lookups <= 0:  # who is being given it this moment is about to count on it again
                del self._kept[number]
                node.lookups = 0
                if isinstance(node, DirectoryNode):
                    node.content = None  # what is described there may be another thing by then
                self._keep_recent(node)
