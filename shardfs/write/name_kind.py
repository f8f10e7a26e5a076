"""Kinds of names outside of known sharded datasets: documents, and the chunks of datasets without a document yet."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from shardfs.formats.create_rules import NONE, Rule, Sharding
from shardfs.formats.registry import format_of, formats, sources
from shardfs.formats.translate import Translation, creation
from shardfs.model.errors import NOT_FOUND, CorruptShardError
from shardfs.model.kinds import NameKind, is_scratch
from shardfs.write.files import join, upwards

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardfs.formats.create_rules import Rules
    from shardfs.formats.format import Format
    from shardfs.vfs.tree import Tree

log = logging.getLogger(__name__)

ALWAYS = ".json"
"""Suffix of names that are treated as documents wherever they are written. Otherwise a client could describe shards and
then write chunks in their place, or contradict another document. A file named `info` is not among them: any program
may use that name."""

_TO_COME = re.compile(r"\.?(?:zarr|zarray|zgroup|zattrs|zmetadata|attributes|.+\.array)\.", re.DOTALL)
"""Prefix of temporary files that their writer renames to a document. Some have names like the lock files of shardfs's
own writer."""

FOREIGN = ".zarray"
"""Document name of Zarr v2 arrays, which have no shards."""

MAX_ABOVE = 8
"""Maximum path components of a chunk name that is recognized before its array has a document."""


@lru_cache(maxsize=4096)
def is_document(name: str) -> bool:
    """Return whether a file with this name may describe the contents of its directory."""
    return any(f.describes(name) or name in f.documents for f in sources())


class Document(NamedTuple):
    """A metadata document, by the directory of its dataset and its path below that directory, as the mount shows them.

    `format` is the one that reads and writes it; in a layout, a `Translation` to the documents of the source.
    """

    format: Format
    directory: str
    name: str

    @property
    def path(self) -> str:
        return join(self.directory, self.name)

    @property
    def is_copy(self) -> bool:
        """Whether a layout generates the document from others."""
        return isinstance(self.format, Translation) and self.format.is_copy(self.name)

    def stored_at(self, below: str) -> Document:
        """Return the source's document at this path below the directory: one of the `sources` (see `documents.py`).

        In a layout, it has the source's format, and the directory in which the source has it.
        """
        if not isinstance(self.format, Translation):
            return self._replace(name=below)
        at, name = self.format.stored_name(below)
        return Document(self.format.source, join(self.directory, at) if at else self.directory, name)


def document_at(source_tree: Tree, directory: str, name: str) -> Document | None:
    """Return the document for which a name in a directory of the mount stands; None for other names.

    The document need not exist. Raise CorruptShardError if documents that decide this are damaged, and OSError.
    """
    if source_tree.datasets.layout is not None:
        try:
            place = source_tree.directories.shown_by(join(directory, name))
        except NOT_FOUND:
            place = None
        if place is None:
            return None
        path, below, translation = place
        if translation is not None:
            return Document(translation, path, below)
    above, _, last = directory.rpartition("/")
    for path, below in ((directory, name), (above, join(last, name))):
        form = next((f for f in formats() if f.describes(below)), None)
        if form is not None:
            return Document(form, path, below)
    return None


class ExpectedDatasets:
    """Sharded datasets that a new document may describe, and the kinds of names there. Thread-safe.

    Args:
        rules: sharding of new arrays.
    """

    def __init__(self, source_tree: Tree, rules: Rules) -> None:
        self._source_tree = source_tree
        self._rules = rules
        self._deleted: dict[str, Sharding] = {}  # by directory

    def kind(self, directory: str, name: str) -> NameKind:
        """Return the kind of a name outside of known sharded datasets, judged by the documents seen so far."""
        layout = self._source_tree.datasets.layout
        likely = name.endswith(ALWAYS) or name in self._source_tree.datasets.layout_documents
        if (
            likely
            and (document_at(self._source_tree, directory, name) or self.new_document(directory, name)) is not None
        ):
            return NameKind.DOCUMENT
        if layout is not None and name.endswith(ALWAYS) and is_document(name):
            return NameKind.HIDDEN  # a document of the source
        if _TO_COME.match(name) and is_scratch(name):
            return NameKind.SCRATCH
        if not self._rules.rules and not self._deleted:
            return NameKind.PLAIN
        if self.shardings_for(directory, name):
            return NameKind.DOCUMENT
        if self._may_be_chunk(directory, name):
            return NameKind.ORPHAN
        is_expected = self._is_deleted(directory) or any(r.matches(directory) for r in self._rules.rules)
        return NameKind.SCRATCH if is_expected and is_scratch(name) else NameKind.PLAIN

    def new_document(self, directory: str, name: str) -> Document | None:
        """Return a layout's document that begins a new dataset in a directory; None for other names, and natively.

        The source's format is that of the first rule for the directory, otherwise that of the nearest group above.
        """
        datasets = self._source_tree.datasets
        view = datasets.shown_datasets.view
        layout = datasets.layout
        if (
            view is None
            or layout is None
            or name not in datasets.layout_documents
            or self._source_tree.is_closed(directory)
        ):
            return None
        with suppress(*NOT_FOUND):
            if self._source_tree.directories.shown_by(join(directory, name)) is not None:
                return None
        format = self._format_of_new(directory)
        source = next((f for f in datasets.source.formats if format in f.dataset_formats), None)
        if format == NONE or source is layout:
            return Document(layout, directory, name) if source in formats() else None
        deleted = self._deleted[directory].documents if directory in self._deleted else {}
        return Document(creation(layout, view, source, directory, deleted), directory, name)

    def _format_of_new(self, directory: str) -> str:
        """Return the format of a new dataset, `NONE` to store documents unchanged, or "" if it is unknown."""
        if directory in self._deleted:
            return self._deleted[directory].format
        formats = (rule.format for rule in self._rules.rules if rule.matches(directory))
        return next(formats, "") or self._format_above(directory)

    def _format_above(self, directory: str) -> str:
        for above in islice(upwards(directory), 1, None):
            with suppress(CorruptShardError):
                if (dataset := next(self._source_tree.datasets.source.own_datasets(above), None)) is not None:
                    return dataset.format
        return ""

    def shardings_for(self, directory: str, name: str) -> list[tuple[Format, Sharding | Rule]]:
        """Return the formats and shardings that may apply to a new document, in the order in which to try them.

        Empty inside of an array, and where neither a rule nor a remembered sharding applies.
        """
        fitting = [(f, sharding) for f, sharding in self._shardings(directory) if f.describes(name)]
        return fitting if fitting and not self._source_tree.is_closed(directory) else []

    def sharded(self, directory: str, name: str, data: bytes) -> Mapping[str, bytes] | None:
        """Return the documents that the first fitting sharding makes of a new one, by name; None if none applies.

        Where a sharding does not fit, or the directory has chunks already, the log has the reason.
        """
        path = join(directory, name)
        refusals: list[ValueError] = []
        for form, sharding in self.shardings_for(directory, name):
            try:
                documents = form.shard(directory, name, data, sharding)
            except ValueError as e:
                refusals.append(e)
                continue
            if documents is None:
                continue
            if isinstance(sharding, Rule) and self._has_chunks(form, form.described_by(directory, name)):
                log.warning("%s: the new array is not sharded, because its directory has chunks already", path)
                return None
            return documents
        for why in refusals:
            log.warning("%s: the new array is not sharded: %s", path, why)
        return None

    def _has_chunks(self, form: Format, directory: str, below: str = "") -> bool:
        """Return whether the store has files in the directory that would be mistaken for shards."""
        for entry in self._source_tree.store.scan(join(directory, below)):
            name = join(below, entry.name)
            if form.chunk_like(name) if not entry.directory else self._may_hold_chunks(form, directory, name):
                return True
        return False

    def _may_hold_chunks(self, form: Format, directory: str, below: str) -> bool:
        deep = below.count("/") >= MAX_ABOVE
        return not deep and form.chunk_like(f"{below}/0") and self._has_chunks(form, directory, below)

    def _shardings(self, directory: str) -> Iterator[tuple[Format, Sharding | Rule]]:
        """Yield the formats and shardings of the datasets that new documents in a directory might describe."""
        sharding = self._deleted.get(directory)
        if sharding is not None:
            yield format_of(sharding.format), sharding
        for rule in self._rules.rules:
            if self._rules.match(directory, rule.format) is rule:
                yield format_of(rule.format), rule

    def _may_be_chunk(self, directory: str, name: str) -> bool:
        """Return whether a name may be a chunk of an array whose document is not written yet."""
        path, layout = join(directory, name), self._source_tree.datasets.layout
        for above in islice(upwards(directory), MAX_ABOVE):
            below = path[len(above) :].lstrip("/")
            is_like = any((layout or f).chunk_like(below) for f, _ in self._shardings(above))
            if is_like and not self._is_described(above):
                return not self._source_tree.is_closed(above) and not self._is_in_foreign(directory)
        return False

    def _is_deleted(self, directory: str) -> bool:
        """Return whether the directory is, or is below, that of a dataset whose document is deleted."""
        return any(at in self._deleted for at in upwards(directory))

    def _is_in_foreign(self, directory: str) -> bool:
        return any(self._source_tree.store.documents(at, [FOREIGN], 1) for at in islice(upwards(directory), MAX_ABOVE))

    def _is_described(self, path: str) -> bool:
        """Return whether documents describe a directory.

        In a layout, a group is no answer: a program may write the attributes of an array, then chunks, then `.zarray`.
        """
        try:
            datasets = self._source_tree.datasets
            if datasets.layout is None:
                return bool(datasets.source.documents(path))
            return any(dataset.all_collections for dataset in datasets.source.own_datasets(path))
        except CorruptShardError:
            return False

    def record_deleted(self, document: Document, documents: Mapping[str, bytes]) -> None:
        """Keep the sharding of a dataset whose document is deleted. `documents` are its sources, by name."""
        sharding = document.format.sharding(documents)
        directory = document.directory
        if sharding is not None:
            before = self._deleted.get(directory)
            earlier = before.documents if before is not None and before.format == sharding.format else {}
            self._deleted[directory] = Sharding(sharding.format, {**earlier, **sharding.documents})

    def drop_deleted(self, document: Document) -> None:
        """Drop the sharding of a deleted document, because it is written again."""
        before = self._deleted.pop(document.directory, None)
        if before is not None and (remaining := {n: raw for n, raw in before.documents.items() if n != document.name}):
            self._deleted[document.directory] = Sharding(before.format, remaining)
