"""Nodes of the store: files, directories and rewritten documents, with their inode numbers and lifetime."""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from shardfs.model.kinds import is_in
from shardfs.vfs.directory_content import NOTHING_INHERITED, Inherited, ScopeAt
from shardfs.vfs.inodes import ROOT, TABLE_END, number_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardfs.model.dataset import Dataset, Scope
    from shardfs.model.values import Coords
    from shardfs.vfs.chunk_dirs import ChunkDirs
    from shardfs.vfs.directory_content import Content


RECENT_NODES = 65_536
"""Maximum number of nodes kept without a lookup count, because the kernel does not refer to them (yet)."""


@dataclass(slots=True, eq=False)
class Node:
    """A file or directory of the store, at `path` in the store.

    `lookups` counts references of the kernel and of handles.
    """

    number: int
    path: str
    lookups: int = field(default=0, init=False)


class FileNode(Node):
    """A file whose bytes are shown unchanged."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class DocumentNode(Node):
    """A metadata document whose shown bytes differ from the stored ones. `checked` is when those were read last.

    `outdated`: the documents that it shows have changed. Open handles read the old bytes. The next lookup of its path
    returns another node with another inode number, because the kernel may cache size and bytes of this one.
    """

    data: bytes
    outdated: bool = field(default=False, init=False)
    checked: float = field(default_factory=monotonic, init=False)


@dataclass(slots=True, eq=False)
class ChunkNode(Node):
    """A chunk whose id is too large for a computed inode number."""

    chunks: ChunkDirs
    coords: Coords


N = TypeVar("N", bound=Node)


@dataclass(slots=True, eq=False)
class DirectoryNode(Node):
    """A directory of the store, or a virtual directory on the way to shown content.

    `content` is set when the directory is opened; `checked` is when its documents were read last. `inside` is the path
    in the store of the shown content. `file` is the dataset of a file that is shown as a directory.
    """

    inherited: Inherited
    file: Dataset | None = None
    inside: str = field(init=False)
    content: Content | None = field(default=None, init=False)
    checked: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.inside = self.path

    def child_path(self, name: str) -> str:
        """Return the path in the store of an entry of this directory."""
        return f"{self.inside}/{name}" if self.inside else name

    @property
    def shown(self) -> str:
        """The path under which the directory is shown."""
        return self.inherited.shown(self.inside)

    def set_scope(self, scope: Scope) -> None:
        """Show the data directory of the scope in place of this one. Concurrent calls are safe."""
        inherited, inside = self.inherited, "/".join(filter(None, [self.path, scope.data]))
        if inherited.scope != (scope, self.path):
            moved = inside, inherited.shown(self.path)
            self.inherited = Inherited(inherited.below, ScopeAt(scope, self.path), moved)
        self.inside = inside  # assigned last: a thread that sees the new path also sees the new scope


class NodeTable:
    """Nodes by inode number. Thread-safe.

    A node is kept while the kernel or a handle refers to it. Of the other nodes, the last `RECENT_NODES` are kept.
    """

    def __init__(self) -> None:
        self.root = DirectoryNode(ROOT, "", NOTHING_INHERITED)
        self._nodes: dict[int, Node] = {ROOT: self.root}  # read without the lock: one look-up is atomic
        self._recent: OrderedDict[int, None] = OrderedDict()  # the numbers of the nodes without references
        self._moved: dict[str, int] = {}  # inode numbers of renamed nodes, which were computed from their old paths
        self._lock = threading.Lock()

    def get(self, number: int) -> Node:
        """Return the node of an inode number. Raise FileNotFoundError if the node was forgotten."""
        node = self._nodes.get(number)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "no such number", str(number))
        return node

    def directory(self, number: int) -> DirectoryNode:
        """Return the directory of an inode number. Raise FileNotFoundError or NotADirectoryError without one."""
        node = self.get(number)
        if isinstance(node, DirectoryNode):
            return node
        raise NotADirectoryError(errno.ENOTDIR, "not a directory", node.path)

    def _number(self, path: str) -> int:
        return self._moved.get(path) or number_of(path)

    def move(self, old: str, new: str) -> list[Node]:
        """Rename a directory and all nodes below; they keep their inode numbers. Return the renamed nodes."""
        with self._lock:
            nodes = self._below(old)
            for node in nodes:
                self._moved.pop(node.path, None)
                node.path = new + node.path[len(old) :]
                if not isinstance(node, DocumentNode) or not node.outdated:
                    self._moved[node.path] = node.number
        return nodes

    def known(self, path: str) -> Node | None:
        """Return the node of a path in the store; None if there is none (any more)."""
        node = self._nodes.get(self._number(path))
        return node if node is not None and node.path == path else None

    def directory_at(self, shown_path: str) -> DirectoryNode | None:
        """Return the directory shown at this path; None if it, or a directory above it, is not known."""
        node: Node | None = self.root
        for name in shown_path.split("/") if shown_path else ():
            node = self.known(node.child_path(name)) if isinstance(node, DirectoryNode) else None
        return node if isinstance(node, DirectoryNode) else None

    def intern(self, path: str, kind: type[N], *args: Any, number: int | None = None) -> N:
        """Return the node of this kind for a path; create the node, with further arguments, if it is missing.

        The inode number is computed from the path unless it is given. A node that changes its kind keeps its number.
        """
        node = self._nodes.get(self._number(path) if number is None else number)
        if isinstance(node, kind) and node.path == path:
            return node
        with self._lock:
            number = self._number(path) if number is None else number
            while True:
                node = self._nodes.get(number)
                if isinstance(node, kind) and node.path == path:
                    return node
                if node is None or node.path == path:
                    return self._install(kind(number, path, *args), node)
                number = number % (TABLE_END - 1) + 2  # a hash collision of two paths, which is very rare

    def _install(self, node: N, before: Node | None) -> N:
        """Add a node, or replace the one `before`. The caller holds the lock."""
        if before is not None and before.number not in self._recent:
            node.lookups = before.lookups
            self._nodes[node.number] = node
        else:
            self._keep_recent(node)
        return node

    def _keep_recent(self, node: Node) -> None:
        """Keep a node without references, and evict the oldest ones. The caller holds the lock."""
        self._nodes[node.number] = node
        self._recent[node.number] = None
        while len(self._recent) > RECENT_NODES:
            number, _ = self._recent.popitem(last=False)
            evicted = self._nodes.pop(number)
            if self._moved.get(evicted.path) == number:
                del self._moved[evicted.path]

    def outdate(self, node: DocumentNode) -> None:
        """Give the path of a document another inode number from now on."""
        with self._lock:
            node.outdated, number = True, node.number
            while number in self._nodes:
                number = number % (TABLE_END - 1) + 2
            self._moved[node.path] = number

    def below(self, path: str) -> list[Node]:
        """Return the known nodes of a directory and everything below, parents first."""
        with self._lock:
            return self._below(path)

    def _below(self, path: str) -> list[Node]:
        nodes = [node for node in self._nodes.values() if is_in(node.path, path)]
        return sorted(nodes, key=lambda node: node.path.count("/") if node.path else -1)

    def has_moved(self, path: str) -> bool:
        """Return whether a known directory, at this path or below, is shown at another path than the store has it."""
        return any(isinstance(node, DirectoryNode) and node.inside != node.shown for node in self.below(path))

    def above(self, path: str) -> Iterator[DirectoryNode]:
        """Yield the known directories at a path and above."""
        parts = path.split("/") if path else []
        for end in range(len(parts) + 1):
            node = self.root if end == 0 else self.known("/".join(parts[:end]))
            if isinstance(node, DirectoryNode):
                yield node

    def shown_path(self, number: int) -> str:
        """Return the path under which a node is shown. Raise FileNotFoundError if the node was forgotten."""
        node = self.get(number)
        *_, nearest = self.above(node.path)
        return nearest.shown if nearest is node else nearest.inherited.shown(node.path)

    def remember(self, number: int) -> None:
        """Count one more reference from the kernel or a handle to an inode number, until `forget`."""
        if number >= TABLE_END:
            return
        with self._lock:
            node = self._nodes.get(number)
            if node is not None:
                self._recent.pop(number, None)
                node.lookups += 1

    def forget(self, number: int, count: int) -> None:
        """Drop `count` references to an inode number."""
        if number >= TABLE_END:
            return
        with self._lock:
            node = self._nodes.get(number)
            if node is None or number == ROOT or number in self._recent:
                return
            node.lookups -= count
            # A concurrent lookup that returns this node increases the count again; until then, the node is kept as
            # recent.
            if node.lookups <= 0:
                node.lookups = 0
                if isinstance(node, DirectoryNode):
                    node.content = None  # the metadata may change before the next lookup
                self._keep_recent(node)
