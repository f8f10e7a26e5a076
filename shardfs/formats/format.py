"""Formats: what the documents of an ecosystem say. Parsing and printing only; nothing here reads anything.

A format is a module-level value with the attributes of `Format`; it is registered in `FORMATS`, in order of detection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from shardfs.model.errors import CorruptShardError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardfs.formats.create_rules import Rule, Sharding
    from shardfs.model.blobs import Blob
    from shardfs.model.dataset import Dataset


class System(NamedTuple):
    """A kind of sharded data, as docs/formats.md lists it.

    Args:
        format: what `info` calls it.
        found_by: the documents, or the form of a file.
        shown_as: what a mount holds instead.
        writers: programs of others that wrote such data in the tests, or what stands in for them.
        readers: programs of others that read it there, through a mount.
    """

    format: str
    name: str
    found_by: str
    shown_as: str
    writers: str
    readers: str


class Pairing(NamedTuple):
    """A kind of source in a layout, as docs/layouts.md lists it.

    Args:
        format: of the source, as `System` calls it.
        shown: what becomes of its chunks.
        readers: programs of others that read it in the tests through a mount, and know only the layout.
    """

    format: str
    shown: str
    readers: str


class Format(Protocol):
    """The source face of a format."""

    @property
    def systems(self) -> Sequence[System]:
        """What it knows, for people."""

    @property
    def documents(self) -> Sequence[str]:
        """The documents, by name, that `open` looks at."""

    def open(self, path: str, documents: Mapping[str, bytes]) -> Dataset | None:
        """What the documents found in directory `path` describe; None if they are not of this format.

        `path` is for messages. Raise CorruptShardError for a document that cannot be what it claims to be.
        """

    def may_hold(self, name: str) -> bool:
        """Whether a file of this name may be a dataset by itself. Such files are opened to see."""

    def open_file(self, path: str, blob: Blob) -> Dataset | None:
        """What the file describes, shown as a directory of its name; None if it is an ordinary file.

        Raise ValueError, with the reason, for a file that cannot be what it claims to be.
        """

    def describes(self, name: str) -> bool:
        """Whether a file of this name may be a document that `edit` and `shard` know what to do with."""

    def described_by(self, path: str, name: str) -> str:
        """The directory that the document `name` of the dataset in directory `path` tells about."""

    def references(self, path: str, name: str, new: bytes) -> Sequence[str]:
        """Documents of the source that `edit` needs to see besides those of its own directory, by path below it."""

    def shown(self, path: str, stored: Mapping[str, bytes], name: str) -> bytes | None:
        """The document `name` as a mount shows it, made of the documents in the source; None if there is none."""

    def edit(
        self, path: str, stored: Mapping[str, bytes], name: str, new: bytes, rule: Rule | None = None
    ) -> Mapping[str, bytes]:
        """What becomes of the source's documents when the shown document `name` is written anew.

        `path` is the directory, for messages and for rules; `stored` has its documents as they are in the source, and
        those of `references`, as far as they exist. What is new in the document (a scale) is sharded by `rule`. If the
        dataset is not sharded, or not there yet, the document becomes the source's as it is.

        Raise ValueError, with the reason, for what is no such document, for what chunks that are stored contradict
        (chunk shape, codecs, data type, names of chunks), and for a document of shards: chunks are written one by one.
        """

    def sharding(self, stored: Mapping[str, bytes]) -> Sharding | None:
        """What to remember when these documents are deleted, so that `shard` can make them anew; None if nothing."""

    def shard(self, path: str, name: str, new: bytes, sharding: Sharding | Rule) -> Mapping[str, bytes] | None:
        """The documents of a sharded dataset, made of that of a new one without shards.

        None if there is nothing to be sharded (a group). Raise ValueError, with the reason, if it cannot be, or is
        sharded already.
        """

    def chunk_like(self, name: str) -> bool:
        """Whether a path below a directory of this format could be a chunk's, whatever its documents say."""


class Fixed:
    """The part of `Format` that is the same for all of which no documents can be written."""

    def open(self, path: str, documents: Mapping[str, bytes]) -> Dataset | None:
        return None

    def shown(self, path: str, stored: Mapping[str, bytes], name: str) -> bytes | None:
        try:
            found = self.open(path, stored)
        except CorruptShardError:
            found = None
        return stored.get(name) if found is None else found.documents.get(name, stored.get(name))

    def describes(self, name: str) -> bool:
        return False

    def described_by(self, path: str, name: str) -> str:
        return path

    def references(self, path: str, name: str, new: bytes) -> Sequence[str]:
        return ()

    def edit(
        self, path: str, stored: Mapping[str, bytes], name: str, new: bytes, rule: Rule | None = None
    ) -> Mapping[str, bytes]:
        raise ValueError("the documents of this format cannot be changed through a mount")

    def sharding(self, stored: Mapping[str, bytes]) -> Sharding | None:
        return None

    def shard(self, path: str, name: str, new: bytes, sharding: Sharding | Rule) -> Mapping[str, bytes] | None:
        return None

    def chunk_like(self, name: str) -> bool:
        return False


class OfDocuments(Fixed):
    """The part of `Format` that is the same for all that are found by documents, and never in a single file."""

    documents: Sequence[str] = ()

    def describes(self, name: str) -> bool:
        return name in self.documents

    def may_hold(self, name: str) -> bool:
        return False

    def open_file(self, path: str, blob: Blob) -> None:
        return None


class View(Protocol):
    """The layout face of a format: how it would show datasets of any other."""

    @property
    def name(self) -> str:
        """As `--layout` calls it."""

    @property
    def pairings(self) -> Sequence[Pairing]:
        """What it shows, for people."""

    @property
    def renames(self) -> bool:
        """Whether images are shown under names of its own, so that it must know what else there is."""

    def children(self, dataset: Dataset) -> Sequence[str]:
        """Directories below of which `show` needs to know the datasets, as paths relative to the dataset's."""

    def show(self, path: str, dataset: Dataset | None, children: Mapping[str, Dataset]) -> Dataset:
        """A directory in this layout: other documents, names and transforms, and nothing of the source's form.

        `dataset` is None for a directory that no format knows, above datasets. `path` is for messages. Raise
        UnsupportedError, with the reason, for what cannot be expressed.
        """
