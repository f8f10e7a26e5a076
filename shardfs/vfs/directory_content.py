"""What an opened directory of the store shows, and what its subdirectories inherit from it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardfs.model.arrays import Multiscale
    from shardfs.model.collection import ChunkNames, Collection
    from shardfs.model.dataset import Consolidation, Dataset, Scope
    from shardfs.model.shard_format import ShardFormat
    from shardfs.vfs.chunk_dirs import ChunkDirs


class CollectionAt(NamedTuple):
    """A collection and the directory of the store that contains its shards."""

    collection: Collection
    directory: str


class ScopeAt(NamedTuple):
    """A scope, and the directory whose documents describe it."""

    scope: Scope
    path: str

    def relative(self, path: str) -> str:
        """Return the path of a directory in the scope, relative to the scope."""
        return path.removeprefix(self.path).lstrip("/")


class DocumentsRead(NamedTuple):
    """The names of documents that were looked for in a directory, and digests (`hashes_of`) of those that exist."""

    names: Sequence[str]
    digests: Mapping[str, bytes]


class ChunkLevel(NamedTuple):
    """A directory of chunks that are files of their own: their names, and the level of the names in this directory.

    The level is -1 in the directory of the array if all names have a prefix.
    """

    names: ChunkNames
    level: int

    def child(self, name: bytes) -> ChunkLevel | None:
        """Return the level in a subdirectory; None if no chunks are below it."""
        names, level = self
        leads_on = name == names.prefix if level < 0 else names.parse(level, name) is not None
        return ChunkLevel(names, level + 1) if leads_on and level + 1 < len(names.dims) else None


class ItemBelow(NamedTuple):
    """What documents of a directory say about a path in it or below.

    Args:
        parts: the components of the path, relative to the directory; () for the directory itself.
        item: a collection that is shown there, a document with its bytes, the image of which an array there is a level,
            or None: a directory that need not be stored.
    """

    parts: tuple[str, ...]
    item: CollectionAt | bytes | Multiscale | None


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
        """Return the path on the mount of a path in the store."""
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

    Args:
        chunks: the tree of the sharded collection in the directory; None without one.
        documents: documents by name, shown in place of stored files of the same name.
        below: what documents say about names in the directory. A name with an empty list is a dataset.
        hidden_shards: byte layouts of shards in the directory whose chunks are shown in another one.
        passed: what all subdirectories inherit.
        reads: the stored documents of which the content was made, by directory.
    """

    shown_dataset: ShownDataset = NOTHING_SHOWN
    chunks: ChunkDirs | None = None
    documents: Mapping[str, bytes] = field(default_factory=dict)
    below: Mapping[str, Sequence[ItemBelow]] = field(default_factory=dict)
    hidden_shards: tuple[ShardFormat, ...] = ()
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
        return any(_leads_to_shard(format, name) for format in self.hidden_shards)

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
            not items or any(isinstance(below.item, CollectionAt | bytes) for below in items)
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
