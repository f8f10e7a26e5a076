"""The protocols of formats and layouts. A format only parses and prints documents; it does no I/O.

A format is a module-level value with the attributes of `Format`. `registry.formats` lists all formats, in order of
detection.
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
        format: the name that `info` prints.
        found_by: the documents, or the form of a file, that identify such data.
        shown_as: the files that a mount shows instead.
        writers: programs of other projects that wrote such data for the tests, or their substitutes.
        readers: programs of other projects that read such data in the tests, through a mount.
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
        format: the format of the source, as in `System.format`.
        shown: how the layout shows the chunks.
        readers: programs of other projects that know only the layout and read the source in the tests, through a mount.
    """

    format: str
    shown: str
    readers: str


class Format(Protocol):
    """A format of datasets in the source: detects datasets and translates their documents in both directions."""

    @property
    def systems(self) -> Sequence[System]:
        """The kinds of data that the format detects, for the documentation."""

    @property
    def documents(self) -> Sequence[str]:
        """The names of the documents that `open` needs."""

    def open(self, path: str, documents: Mapping[str, bytes]) -> Dataset | None:
        """The dataset that the documents in directory `path` describe; None if they belong to another format.

        `path` is for messages. Raise CorruptShardError if a document is damaged.
        """

    def may_hold(self, name: str) -> bool:
        """Whether a file of this name may be a dataset. The caller then passes the file to `open_file`."""

    def open_file(self, path: str, blob: Blob) -> Dataset | None:
        """The dataset in the file, shown as a directory with the file's name; None if the file is an ordinary file.

        Raise ValueError, with the reason, if the file is damaged.
        """

    def describes(self, name: str) -> bool:
        """Whether a file of this name may be a document that `edit` and `shard` can translate."""

    def described_by(self, path: str, name: str) -> str:
        """The directory that the document `name` in directory `path` describes."""

    def references(self, path: str, name: str, new: bytes) -> Sequence[str]:
        """Further documents of the source that `edit` needs, as paths relative to directory `path`."""

    def shown(self, path: str, stored: Mapping[str, bytes], name: str) -> bytes | None:
        """The document `name` as a mount shows it, translated from the stored documents; None if there is none."""

    def edit(
        self, path: str, stored: Mapping[str, bytes], name: str, new: bytes, rule: Rule | None = None
    ) -> Mapping[str, bytes]:
        """The documents to store, by name, when a client replaces the shown document `name` by `new`.

        `path` is the directory, for messages and for rules. `stored` has the directory's documents from the source,
        and those of `references`, as far as they exist. `rule` shards new parts of the document, such as a new scale.
        If the dataset is not sharded, or does not exist yet, `new` is stored unchanged.

        Raise ValueError, with the reason, if `new` is not such a document, if `new` contradicts stored chunks (chunk
        shape, codecs, data type, names of chunks), or if `new` describes shards, because clients write single chunks.
        """

    def sharding(self, stored: Mapping[str, bytes]) -> Sharding | None:
        """The sharding to keep when these documents are deleted, for a later `shard`; None if they have no sharding."""

    def shard(self, path: str, name: str, new: bytes, sharding: Sharding | Rule) -> Mapping[str, bytes] | None:
        """The documents of the sharded dataset, made from the document `new` of an unsharded one.

        None if there is nothing to shard (a group). Raise ValueError, with the reason, if the dataset cannot be
        sharded, or is sharded already.
        """

    def chunk_like(self, name: str) -> bool:
        """Whether a chunk of some dataset of this format could have this path, relative to the dataset."""


class Fixed:
    """Base of formats whose documents are read-only."""

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
    """Base of formats that are detected by documents, never by a single file."""

    documents: Sequence[str] = ()

    def describes(self, name: str) -> bool:
        return name in self.documents

    def may_hold(self, name: str) -> bool:
        return False

    def open_file(self, path: str, blob: Blob) -> None:
        return None


class View(Protocol):
    """A layout: shows datasets of any format as datasets of one format."""

    @property
    def name(self) -> str:
        """The name for `--layout`."""

    @property
    def pairings(self) -> Sequence[Pairing]:
        """How the layout shows each kind of source, for the documentation."""

    @property
    def renames(self) -> bool:
        """Whether the layout renames images, and so needs `Dataset.sibling_names` to avoid names in use."""

    def children(self, dataset: Dataset) -> Sequence[str]:
        """The directories below whose datasets `show` needs, as paths relative to the dataset."""

    def show(self, path: str, dataset: Dataset | None, children: Mapping[str, Dataset]) -> Dataset:
        """The dataset in this layout, with the layout's documents, names and transforms instead of the source's.

        `dataset` is None for a directory above datasets that no format recognises. `path` is for messages. Raise
        UnsupportedError, with the reason, if the layout cannot express the dataset.
        """
