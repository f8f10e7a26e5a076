"""A dataset: the documents that describe collections, and how writing changes these documents."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from shardfs.model.arrays import Array, Multiscale
    from shardfs.model.collection import Collection
    from shardfs.model.values import Coords


class Summary(NamedTuple):
    """The output of `info` about a collection."""

    path: str
    format: str
    shape: Coords
    chunk_shape: Coords
    shard_shape: Coords | None
    data_type: str
    codecs: tuple[str, ...]
    sharding: str
    grid_chunks: int | None
    shards: int
    chunks: int
    stored_bytes: int
    shard_bytes: int
    damaged: bool
    """Whether shards are missing or chunks cannot be found, which are not counted."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Data that shardfs cannot unshard, and the reason, for `info` and the log.

    Its files are shown unchanged; if `skipped`, they are not shown; if `damaged`, opening them fails.
    """

    path: str
    why: str
    skipped: bool = False
    damaged: bool = False

    @property
    def consequence(self) -> str:
        """What the mount does with these data, for messages."""
        if self.damaged:
            return "cannot be opened"
        return "not shown" if self.skipped else "shown as it is stored"


class Rewriter(Protocol):
    """Translates documents of a directory whose names are not known in advance."""

    def applies(self, name: str) -> bool:
        """Whether a file of this name may be such a document."""

    def rewrite(self, path: str, name: str, raw: bytes) -> bytes | None:
        """The document to show; None to show the file unchanged. Raise CorruptShardError for a damaged document."""


class Scope(Protocol):
    """Datasets in subdirectories whose documents are in another directory. Paths are relative to the scope."""

    @property
    def data(self) -> str:
        """The directory of the outermost dataset. Other layouts show its content in place of the scope."""

    def listing(self, below: str) -> str:
        """The directory whose entries name the datasets directly in `below`, also datasets without data."""

    def member(self, name: str, is_directory: bool) -> str | None:
        """The name of the dataset for which this entry of `listing` stands; None if it stands for none."""

    def documents(self, below: str) -> Sequence[str]:
        """The paths of the documents that may describe directory `below`."""

    def open(self, path: str, below: str, documents: Mapping[str, bytes]) -> Dataset | None:
        """The dataset that the existing documents describe, see `Format.open`. `path` is for messages."""


class Levels(Protocol):
    """An image that only the attributes of its levels, the arrays in a group, describe. Only layouts use it."""

    def paths(self) -> Iterable[str]:
        """Possible paths of levels, relative to the group. The search ends at the first path that does not exist."""

    def image(self, levels: Mapping[str, Array]) -> Multiscale | None:
        """The image with these levels, in the order of `paths`; None if the arrays are not levels of an image."""


class Consolidation(NamedTuple):
    """A document that is built on request from all documents shown below its directory.

    Args:
        build: takes the documents by path relative to the directory, including those of the directory itself.
    """

    name: str
    build: Callable[[Mapping[str, bytes]], bytes]


@dataclass(frozen=True)
class Surroundings:
    """What is around a dataset in the source, for layouts.

    Args:
        below: the datasets in the directories of `View.children`, by path.
        names: all names in the directory of an image, for layouts that must choose unused names there.
        level_of: the image that has this array as a level, although the array's own documents do not mention the image.
            Its only level has the path "".
    """

    below: Mapping[str, Dataset] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    level_of: Multiscale | None = None


@dataclass(frozen=True)
class Dataset:
    """What the documents of one directory describe: those of the source, or those that a layout shows instead.

    Args:
        format: the name of the format, printed by `info`.
        collections: the sharded collections, if there are any.
        documents: translated documents by path below the directory, shown instead of stored ones. The directories in
            these paths need not exist in the store, and documents stored in these directories are ignored.
        problems: data shown unchanged, and the reasons.
        closed: whether no other datasets are below this directory, because it is an array, full of chunks.
        unwalked: subdirectories without datasets, because they are full of chunks.
        named: subdirectories that the documents name. Stores that cannot list directories are assumed to have them.
        hidden: names in this directory that are not shown.
        format_names: names in this directory that belong to the format (documents, directories of chunks), which other
            layouts hide. Names of shards may be missing.
        rewriter: given if there are further documents to translate.
        scope: given if these documents describe how to find datasets in subdirectories.
        unsharded: arrays that the native layout shows unchanged, but other layouts convert.
        attributes: the user's attributes of a group; None if this is not a group.
        multiscales: images whose levels are arrays below.
        levels: given if the attributes of the arrays below may describe another image.
        indescribable: why the arrays have no description, if they have none.
    """

    format: str
    collections: tuple[Collection, ...] = ()
    documents: Mapping[str, bytes] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    closed: bool = False
    unwalked: frozenset[str] = frozenset()
    named: tuple[str, ...] = ()
    hidden: frozenset[str] = frozenset()
    format_names: frozenset[str] = frozenset()
    rewriter: Rewriter | None = None
    scope: Scope | None = None
    unsharded: tuple[Collection, ...] = ()
    attributes: Mapping[str, Any] | None = None
    multiscales: tuple[Multiscale, ...] = ()
    levels: Levels | None = None
    indescribable: str = ""

    @property
    def all_collections(self) -> tuple[Collection, ...]:
        """The sharded and the unsharded collections."""
        return (*self.collections, *self.unsharded)
