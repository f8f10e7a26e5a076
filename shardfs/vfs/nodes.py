"""Nodes of the store: files, directories and rewritten documents, with their inode numbers and lifetime."""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from shardfs.model.kinds import is_in
from shardfs.vfs.inodes import ROOT, TABLE_END, number_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardfs.model.arrays import Multiscale
    from shardfs.model.collection import ChunkNames, Collection
    from shardfs.model.dataset import Consolidation, Dataset, Scope
    from shardfs.model.shard_format import ShardFormat
    from shardfs.model.values import Coords
    from shardfs.vfs.chunk_dirs import ChunkDirs


RECENT_NODES = 65_536
"""Maximum number of nodes kept without a lookup count, because the kernel does not refer to them (yet)."""


@dataclass(slots=True, eq=False)
class Node:
    """A file or directory of the store. `lookups` is the kernel's lookup count."""

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


class CollectionAt(NamedTuple):
    """A collection and the directory of the store that contains its shards."""

    collection: Collection
    shards: str


class ScopeAt(NamedTuple):
    """A scope, and the directory whose documents describe it."""

    scope: Scope
    path: str

    def relative(self, path: str) -> str:
        """Return the path of a directory in the scope, relative to the scope."""
        return path.removeprefix(self.path).lstrip("/")


class DocumentsRead(NamedTuple):
    """The documents that were looked for in a directory, and digests of those that exist."""

    names: Sequence[str]
    digests: Mapping[str, bytes]


class ChunkLevel(NamedTuple):
    """A directory of chunks that are stored as files: their names, and the level of the names in this directory.

    The level is -1 in the directory of the array if all names have a prefix.
    """

    names: ChunkNames
    level: int

    def child(self, name: bytes) -> ChunkLevel | None:
        """Return the level in a subdirectory; None if no chunks are below it."""
        names, level = self
        leads_on = name == names.prefix if level < 0 else names.parse(level, name) is not None
        return ChunkLevel(names, level + 1) if leads_on and level + 1 < len(names.dims) else None


ItemBelow: TypeAlias = "tuple[tuple[str, ...], CollectionAt | bytes | Multiscale | None]"
"""A collection, a document, an image of which an array is a level, or a directory (None), with its relative path."""


class Inherited(NamedTuple):
    """Properties that a directory inherits from its parents.

    Args:
        below: what is shown at this directory and below.
        scope: describes datasets at this directory and below.
        moved: paths below the first path in the store are shown below the second path.
        closed: neither this directory nor any below contains a dataset.
        cells: given if chunks are stored as files at this directory or below.
    """

    below: Sequence[ItemBelow] = ()
    scope: ScopeAt | None = None
    moved: tuple[str, str] = ("", "")
    closed: bool = False
    cells: ChunkLevel | None = None

    def shown(self, path: str) -> str:
        """Return the shown path of a path in the store."""
        above, instead = self.moved
        return "/".join(filter(None, [instead, path.removeprefix(above).lstrip("/")]))


NOTHING_INHERITED = Inherited()


@dataclass(frozen=True)
class ShownDataset:
    """What the mount shows of a directory's own dataset, and what the layout adds.

    Args:
        dataset: what the documents that are shown describe; None in a directory without documents.
        images: the images that have an array further down as a level, by the array's path (`Surroundings.level_of`).
        consolidation: makes a further document from all documents below.
        is_omitted: the layout cannot express the dataset, and nothing of the directory is shown.
    """

    dataset: Dataset | None = None
    images: Mapping[str, Multiscale] = field(default_factory=dict)
    consolidation: Consolidation | None = None
    is_omitted: bool = False


NOTHING_SHOWN = ShownDataset()


@dataclass(frozen=True)
class Content:
    """The content of an opened directory.

    `documents` replace stored files of the same name. `shards` are the formats of the shards in the directory whose
    chunks are shown in another form. `passed` is what all subdirectories inherit. `reads` are the stored documents of
    which the content was made, by directory.
    """

    shown_dataset: ShownDataset = NOTHING_SHOWN
    chunks: ChunkDirs | None = None
    documents: Mapping[str, bytes] = field(default_factory=dict)
    below: Mapping[str, Sequence[ItemBelow]] = field(default_factory=dict)
    shards: tuple[ShardFormat, ...] = ()
    passed: Inherited = NOTHING_INHERITED
    reads: Mapping[str, DocumentsRead] = field(default_factory=dict)

    @property
    def dataset(self) -> Dataset | None:
        """What the documents describe that are shown in the directory; None if there are none."""
        return self.shown_dataset.dataset

    def hides(self, name: str) -> bool:
        """Return whether a stored file or directory of this name is hidden."""
        if name in self.below:
            return False
        if self.shown_dataset.is_omitted or (self.dataset is not None and name in self.dataset.hidden):
            return True
        return any(_leads_to_shard(format, name) for format in self.shards)

    def shows(self, name: str) -> bool:
        """Return whether the dataset has a document at this path below the directory, stored or generated."""
        return (self.dataset is not None and name in self.dataset.documents) or self.is_consolidated(name)

    def is_consolidated(self, name: str) -> bool:
        """Return whether this is the name of the document that is built from all documents below."""
        consolidation = self.shown_dataset.consolidation
        return consolidation is not None and consolidation.name == name

    def is_generated(self, name: str) -> bool:
        """Return whether a document of this name is built or translated when it is looked up."""
        rewriter = self.dataset.rewriter if self.dataset is not None else None
        return self.is_consolidated(name) or (rewriter is not None and rewriter.applies(name))

    @property
    def is_sharded(self) -> bool:
        """Whether chunks are shown in this directory or below, according to metadata. A name alone proves nothing."""
        return self.chunks is not None or any(
            not items or any(isinstance(item, CollectionAt | bytes) for _, item in items)
            for items in self.below.values()
        )

    def inherited(self, name: str) -> Inherited:
        """Return the properties that the subdirectory `name` inherits."""
        _, scope, moved, closed, cells = self.passed
        cells = None if cells is None else cells.child(os.fsencode(name))
        return Inherited(self.below.get(name, ()), scope, moved, closed, cells)


def _leads_to_shard(format: ShardFormat, name: str) -> bool:
    """Return whether a name is that of a shard or of a directory of shards."""
    _, slash, below = format.key(0).partition("/")
    return bool(format.key(0)) and format.shard_of(name + slash + below) is not None


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
    """Nodes by inode number.

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
        """Return the node of a path; None if there is none."""
        node = self._nodes.get(self._number(path))
        return node if node is not None and node.path == path else None

    def directory_at(self, shown_path: str) -> DirectoryNode | None:
        """Return the directory shown at this path; None if it is not known."""
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
