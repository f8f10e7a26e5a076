"""The protocols of formats and layouts. A format only parses and prints documents; it does no I/O.

A format is a module-level value with the attributes of `Format`. `registry.formats` lists all formats, in order of
detection.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

from shardfs.formats import json_text
from shardfs.model.errors import CorruptShardError

if TYPE_CHECKING:
    import re
    from collections.abc import Mapping, Sequence, Set

    from shardfs.formats.create_rules import Rule, Sharding
    from shardfs.formats.json_text import Path
    from shardfs.model.blobs import Blob
    from shardfs.model.dataset import Consolidation, Dataset, Surroundings


NUMBER = r"(?:0|[1-9][0-9]{0,18})"
"""A coordinate in the name of a chunk."""


class Edits(Protocol):
    """Translates documents that clients write to the documents of sharded datasets: see the methods of `Format`."""

    def edited(self, name: str, raw: bytes | None, new: bytes, rule: Rule | None = None) -> bytes:
        """The document to store for the stored one `raw` when a client writes `new`.

        Raise ValueError as `Format.edit`.
        """

    def sharding(self, documents: Mapping[str, bytes]) -> Sharding | None:
        """The sharding of these documents; None if they have no sharding."""

    def sharded(self, name: str, new: bytes, like: Sharding | Rule) -> Mapping[str, bytes] | None:
        """The documents of a new dataset with shards, by name; None if there is nothing to shard.

        Raise as `Format.shard`.
        """


class Format(Protocol):
    """A format of datasets in the source: detects datasets and translates their documents in both directions.

    The methods here suit a format of datasets that one document describes.
    """

    @property
    def dataset_formats(self) -> Sequence[str]:
        """The values of `Dataset.format` for the format's datasets. docs/formats.md describes each."""

    documents: Sequence[str] = ()
    """The names of the documents that `open` needs."""

    edits: Edits | None = None
    """Translates documents that clients write; None if they are stored unchanged."""

    chunk_names: re.Pattern[str] | None = None
    """The paths that chunks of some dataset of this format could have, relative to the dataset."""

    def open(self, path: str, documents: Mapping[str, bytes]) -> Dataset | None:
        """The dataset that the documents in directory `path` describe; None if they belong to another format.

        `path` is for messages. Raise CorruptShardError if a document is damaged.
        """
        return None

    def may_hold(self, name: str) -> bool:
        """Whether a file of this name may be a dataset. The caller then passes the file to `open_file`."""
        return False

    def open_file(self, path: str, blob: Blob) -> Dataset | None:
        """The dataset in the file, shown as a directory with the file's name; None if the file is an ordinary file.

        Raise ValueError, with the reason, if the file is damaged.
        """
        return None

    def describes(self, name: str) -> bool:
        """Whether a file of this name may be a document that `edit` and `shard` can translate."""
        return name in self.documents

    def described_by(self, path: str, name: str) -> str:
        """The directory that the document `name` in directory `path` describes."""
        return path

    def references(self, path: str, name: str, new: bytes) -> Sequence[str]:
        """Further documents of the source that `edit` needs, as paths relative to directory `path`."""
        return ()

    def shown(self, path: str, documents: Mapping[str, bytes], name: str) -> bytes | None:
        """The document `name` as a mount shows it, translated from the stored documents; None if there is none."""
        try:
            dataset = self.open(path, documents)
        except CorruptShardError:
            dataset = None
        return documents.get(name) if dataset is None else dataset.documents.get(name, documents.get(name))

    def edit(
        self, path: str, documents: Mapping[str, bytes], name: str, new: bytes, rule: Rule | None = None
    ) -> Mapping[str, bytes]:
        """The documents to store, by name, when a client replaces the shown document `name` by `new`.

        `path` is the directory, for messages and for rules. `documents` has the directory's documents from the source,
        and those of `references`, as far as they exist. `rule` shards new parts of the document, such as a new scale.
        If the dataset is not sharded, or does not exist yet, `new` is stored unchanged.

        Raise ValueError, with the reason, if `new` is not such a document, if `new` contradicts stored chunks (chunk
        shape, codecs, data type, names of chunks), or if `new` describes shards, because clients write single chunks.
        """
        return {name: new if self.edits is None else self.edits.edited(name, documents.get(name), new, rule)}

    def differences(self, old: bytes, new: bytes) -> Mapping[Path, Any]:
        """What a generated document `new` says other than `old`, as `json_text.differences`, apart from stored sizes.

        Raise ValueError for bytes that are no such document.
        """
        return json_text.differences(json.loads(old), json.loads(new))

    def with_copy(self, raw: bytes, below: str, source: bytes | None) -> bytes:
        """The document `raw` of a group, in which copies of documents are consolidated, with a new or changed copy.

        `source` is the stored document (None: deleted) at path `below` relative to the group. Raise ValueError if one
        of the documents is invalid.
        """
        return raw

    def sharding(self, documents: Mapping[str, bytes]) -> Sharding | None:
        """The sharding to keep when these documents are deleted, for a later `shard`; None if they have no sharding."""
        return None if self.edits is None else self.edits.sharding(documents)

    def shard(self, path: str, name: str, new: bytes, sharding: Sharding | Rule) -> Mapping[str, bytes] | None:
        """The documents of the sharded dataset, by name, made from the document `new` of an unsharded one.

        None if there is nothing to shard (a group). Raise ValueError, with the reason, if the dataset cannot be
        sharded, or is sharded already.
        """
        return None if self.edits is None else self.edits.sharded(name, new, sharding)

    def chunk_like(self, name: str) -> bool:
        """Whether this path, relative to a dataset, is one of `chunk_names`."""
        return self.chunk_names is not None and self.chunk_names.fullmatch(name) is not None


class View(Protocol):
    """A layout: shows datasets of any format as datasets of one format. docs/layouts.md has a row for each format."""

    @property
    def name(self) -> str:
        """The name for `--layout`."""

    renames: bool = False
    """Whether the layout renames images, and so needs `Surroundings.names` to avoid names in use."""

    consolidation: Consolidation | None = None
    """A document of each group that is built from all documents below; None if the layout has no such document."""

    def children(self, dataset: Dataset, names: Set[str]) -> Sequence[str]:
        """The directories below whose datasets `show` needs, as paths relative to the dataset.

        `names` are `Surroundings.names`.
        """
        return ()

    def show(self, path: str, dataset: Dataset | None, around: Surroundings) -> Dataset:
        """The dataset in this layout, with the layout's documents, names and transforms instead of the source's.

        `dataset` is None for a directory above datasets that no format recognises. `path` is for messages. Raise
        UnsupportedError, with the reason, if the layout cannot express the dataset.
        """
